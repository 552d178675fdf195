"""Self-play, fictitious self-play, prioritized fictitious self-play and DualCurriculum."""

import io
import json
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from algos.ppo import pack
from curricula.core import Curriculum, TaskSpace, TaskWrapper
from curricula.domain_randomization import DomainRandomization
from curricula.dual import DualCurriculum
from curricula.plr import PrioritizedLevelReplay
from curricula.self_play import (
    NEWEST,
    FictitiousSelfPlay,
    LeaguePlay,
    PrioritizedFictitiousSelfPlay,
    SelfPlay,
    pfsp_distribution,
)
from curricula.sync_envs import GymnasiumSyncWrapper
from curricula.sync_learner import make_multiprocessing_curriculum

VECTORS = json.loads((Path(__file__).parent / "data/pfsp.json").read_text())
CLOSE = {"rtol": 1e-9, "atol": 1e-12}
NAMES = {  # in the vectors -> here
    "squared": ("hard", 2), "hard_k1": ("hard", 1), "hard_k2": ("hard", 2), "hard_k5": ("hard", 5),
    "variance": ("var", 2), "linear": ("linear", 2), "linear_capped": ("linear_capped", 2),
}  # fmt: skip
ALL = (SelfPlay, FictitiousSelfPlay, PrioritizedFictitiousSelfPlay)
WEIGHTINGS = PrioritizedFictitiousSelfPlay.WEIGHTINGS


def league(kind=PrioritizedFictitiousSelfPlay, n=3, win_rates=None, **options):
    """n agents, agent i the vector [i]; with `win_rates`, each from ten games of this mean."""
    curriculum = kind(np.zeros(1), **options)
    for i in range(1, n):
        assert curriculum.update_agent(np.full(1, float(i))) == i
    for opponent, rate in enumerate(win_rates or ()):
        for game in range(10):
            curriculum.update_winrate(opponent, float(game < round(10 * rate)))
    return curriculum


@pytest.mark.parametrize("case", VECTORS["weights"], ids=lambda case: case["case"])
def test_weightings_of_the_vectors(case):
    for name, expected in case["expect"].items():
        if name in NAMES:
            weights = pfsp_distribution(case["win_rates"], *NAMES[name])
            np.testing.assert_allclose(weights, expected, **CLOSE, err_msg=name)
            assert weights.dtype == np.float64
    paper = pfsp_distribution(case["win_rates"], "argmax")
    easiest_to_lose_to = np.flatnonzero(np.array(case["win_rates"]) == min(case["win_rates"]))
    assert case["expect"]["argmax_opponent_winrate_index"] in easiest_to_lose_to
    assert np.array_equal(np.flatnonzero(paper), easiest_to_lose_to) and np.ptp(paper[easiest_to_lose_to]) == 0
    np.testing.assert_allclose(paper.sum(), 1)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_one_opponent_and_mass_that_vanishes(weighting):
    assert pfsp_distribution([0.3], weighting).tolist() == [1.0]
    assert pfsp_distribution([1.0], weighting).tolist() == [1.0]
    if weighting != "argmax":
        assert pfsp_distribution([1 - 1e-13, 1 - 1e-12], weighting).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("power", [20.0, 2000.0])
def test_a_large_power_leaves_the_hardest_the_mass(power):
    """It was uniform below an absolute sum of 1e-10."""
    np.testing.assert_allclose(pfsp_distribution([0.7, 0.9], "hard", power), [1, 3**-power], rtol=1e-9, atol=1e-300)
    np.testing.assert_allclose(pfsp_distribution([0.99999, 0.99998, 1.0], "hard", 2.0), [0.2, 0.8, 0], rtol=1e-9)


def test_win_rates_of_the_vectors_from_both_seats():
    """SP-04."""
    seats = {name: league(n=2) for name in "ABC"}  # each one's opponents: the other two
    place = {"AB": 0, "AC": 1, "BA": 0, "BC": 1, "CA": 0, "CB": 1}
    payoff = VECTORS["payoff"]
    for (one, other, outcome), expected in zip(payoff["games"], payoff["win_rates_after_each"], strict=True):
        seats[one].update_winrate(place[one + other], (outcome + 1) / 2)
        seats[other].update_winrate(place[other + one], (-outcome + 1) / 2)
        for pair, win_rate in expected.items():
            np.testing.assert_allclose(seats[pair[0]].win_rates()[place[pair]], win_rate, **CLOSE)


def test_beta_prior_and_moving_average_of_the_vectors():
    beta, ema = VECTORS["beta_prior"], VECTORS["ema"]
    prior = league(n=1, decay=1.0, prior_games=beta["alpha"] + beta["beta"])
    for (one, other, outcome), expected in zip(VECTORS["payoff"]["games"], beta["win_rate_AB_after_each"]):
        if (one, other) == ("A", "B"):
            prior.update_winrate(0, (outcome + 1) / 2)
        np.testing.assert_allclose(prior.win_rates(), [expected], **CLOSE)
    average = league(n=1, decay=1 - ema["beta"], prior_games=1 / ema["beta"])
    for result, expected in zip(ema["results"], ema["values"], strict=True):
        average.update_winrate(0, result)
        np.testing.assert_allclose(average.win_rates(), [expected], **CLOSE)


def test_elo_of_the_vectors():
    curriculum = league(SelfPlay, 1)
    for game in VECTORS["elo"]["log"]:
        curriculum.update_winrate(0, game["score"])
        np.testing.assert_allclose([curriculum.rating, *curriculum.ratings()], [game["a"], game["b"]], **CLOSE)
    curriculum = league(n=2)
    curriculum.update_winrate(0, 1)
    newest = curriculum.update_agent(np.ones(1))
    np.testing.assert_allclose(curriculum.ratings(), [984, 1000, 1016])
    assert newest == 2 and curriculum.metrics()["rating"] == 1016


def test_unplayed_opponents_count_as_even_and_all_are_real():
    """SP-02."""
    for weighting in WEIGHTINGS:
        curriculum = league(weighting=weighting)
        assert curriculum.win_rates().tolist() == [0.5] * 3
        np.testing.assert_allclose(curriculum._sample_distribution(), [1 / 3] * 3)
    curriculum = league(win_rates=(0.9, 0.5, 0.1), decay=1.0)
    np.testing.assert_allclose(curriculum._sample_distribution(), np.array([0.01, 0.25, 0.81]) / 1.07)
    beaten = league(win_rates=(1.0, 0.5, 0.5))
    assert beaten._sample_distribution()[0] == 0 and 0 not in beaten.sample(5000)


def test_minimum_games_hold_the_rate_at_one_half():
    curriculum = league(min_games=3, n=2)
    for played in range(1, 5):
        curriculum.update_winrate(1, 0)
        assert curriculum.win_rates().tolist() == [0.5, 0.5 if played < 3 else 0.0]
    assert (curriculum.win_rates() >= 0).all() and curriculum.metrics()["games"] == 4


def test_uniform_share_and_argmax():
    curriculum = league(win_rates=(0.7, 0.2, 0.7, 0.2), n=4, weighting="argmax", uniform=0.2, decay=1.0, seed=1)
    np.testing.assert_allclose(curriculum._sample_distribution(), [0.05, 0.45, 0.05, 0.45])
    draws = np.bincount(curriculum.sample(4000), minlength=4)
    assert chisquare(draws, 4000 * np.array([0.05, 0.45, 0.05, 0.45])).pvalue > 0.001


@pytest.mark.parametrize("kind", ALL)
def test_opponents_keep_the_weights_they_had(kind):
    vector = np.zeros(3)
    curriculum = kind(vector)
    vector += 1
    assert curriculum.get_opponent(0).tolist() == [0, 0, 0]
    newest = curriculum.update_agent(vector)
    vector += 1
    assert curriculum.get_opponent(newest).tolist() == [1, 1, 1] and curriculum.opponents[-1] == newest
    assert newest == (0 if kind is SelfPlay else 1)
    with pytest.raises(ValueError, match="read-only"):
        curriculum.get_opponent(newest)[0] = 5
    weights = {"layers": [np.zeros(2)]}
    curriculum = kind(weights)
    weights["layers"][0] += 1
    assert curriculum.get_opponent(0)["layers"][0].tolist() == [0, 0]


@pytest.mark.parametrize("kind", ALL)
def test_torch_modules_are_copied_without_gradients(kind):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

    def learn():
        net.zero_grad()
        net(torch.ones(4, 2) * torch.arange(4)[:, None]).sum().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.5 * p.grad

    learn()
    curriculum = kind(net)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert all(p.requires_grad and p.grad is not None for p in net.parameters())  # the learner's are untouched
    learn()
    opponent = curriculum.get_opponent(0)
    assert all(torch.equal(value, before[name]) for name, value in opponent.state_dict().items())
    assert not torch.equal(net[2].bias, before["2.bias"])
    assert not any(p.requires_grad or p.grad is not None for p in opponent.parameters())
    assert net.training and not opponent.training
    state = curriculum.state_dict()
    opponent(torch.ones(4, 2))
    assert torch.equal(opponent[1].running_mean, before["1.running_mean"])
    opponent[1].running_mean += 1  # a user's own doing
    assert torch.equal(state["agents"][0]["1.running_mean"], before["1.running_mean"])
    curriculum.load_state_dict(state)
    opponent = curriculum.get_opponent(0)
    assert torch.equal(opponent[1].running_mean, before["1.running_mean"]) and not opponent.training
    opponent = curriculum.get_opponent(curriculum.update_agent(net))
    assert torch.equal(opponent[2].bias, net[2].bias) and opponent[2].bias.data_ptr() != net[2].bias.data_ptr()


def test_the_oldest_is_evicted_and_named():
    """SP-06."""
    curriculum = league(FictitiousSelfPlay, 10, capacity=3)
    assert curriculum.opponents == [7, 8, 9] and curriculum.num_tasks == len(curriculum._records) == 3
    assert [curriculum.get_opponent(i).tolist() for i in (7, 8, 9)] == [[7], [8], [9]]
    assert set(curriculum.sample(300)) == {7, 8, 9}
    for call in (curriculum.get_opponent, lambda i: curriculum.update_winrate(i, 1.0)):
        with pytest.raises(ValueError, match=r"opponent 6 was evicted: 3 are kept.*\[7, 8, 9\]"):
            call(6)
        for unknown in (10, -1, "a", None, 7.5):
            with pytest.raises(ValueError, match=rf"opponent {unknown!r} does not exist"):
                call(unknown)
    assert curriculum.get_opponent(np.int64(8)).tolist() == [8]
    assert league(FictitiousSelfPlay, 10, capacity=3, keep_initial=True).opponents == [0, 8, 9]


def test_the_easiest_is_evicted():
    curriculum = league(n=4, win_rates=(0.4, 0.9, 0.9, 0.6), capacity=4)
    assert curriculum.update_agent(np.zeros(1)) == 4 and curriculum.opponents == [0, 2, 3, 4]  # of equals the oldest
    assert curriculum.update_agent(np.zeros(1)) == 5 and curriculum.opponents == [0, 3, 4, 5]
    np.testing.assert_allclose(
        curriculum.win_rates(),
        league(n=4, win_rates=(0.4, 0.5, 0.5, 0.6)).win_rates()[[0, 3, 1, 2]] * [1, 1, 0, 0] + [0, 0, 0.5, 0.5],
    )
    kept = league(n=3, win_rates=(1.0, 0.2, 0.3), capacity=3, keep_initial=True)
    kept.update_agent(np.zeros(1))
    assert kept.opponents == [0, 1, 3]


@pytest.mark.parametrize("kind", ALL)
def test_an_agent_of_another_kind_is_named(kind):
    curriculum, net = kind(np.zeros(3)), kind(torch.nn.Linear(3, 2))
    for wrong in (None, np.zeros(2), torch.nn.Linear(3, 2), "net"):
        with pytest.raises(ValueError, match=r"an agent is one as the first, of \(3,\), found "):
            curriculum.update_agent(wrong)
    for wrong in (None, torch.nn.Linear(2, 2), np.zeros(3)):
        with pytest.raises(ValueError, match="an agent is one as the first, of {'weight': "):
            net.update_agent(wrong)
    assert curriculum.opponents == net.opponents == [0]
    curriculum.update_winrate(0, np.float32(0.5))
    assert not any(isinstance(value, np.generic) for value in curriculum.state_dict().values())


@pytest.mark.parametrize("kind", ALL)
def test_draws_are_seeded_one_call_a_sample_and_updates_draw_nothing(kind):
    before = np.random.get_state()[1].copy()
    curriculum = league(kind, 1, seed=5)
    if kind is not SelfPlay:
        curriculum = league(kind, 4, seed=5)
    oracle = np.random.default_rng(5)
    for k, result in ((1, 0.5), (7, 1.0), (3, 0.0), (0, 0.5)):
        p = curriculum._sample_distribution()
        assert curriculum.sample(k) == oracle.choice(len(p), size=k, p=p).tolist()
        curriculum.update_winrate(0, result)
        curriculum.update_on_episode(1.0, 3, 0, 1.0)  # says nothing of who won: ignored
    assert len(curriculum.sample()) == 1 and all(type(i) is int for i in curriculum.sample(3))
    assert curriculum.metrics()["games"] == 4
    assert np.array_equal(np.random.get_state()[1], before)


@pytest.mark.parametrize("saved", [lambda state: state, lambda state: through_a_file(state)], ids=["as it is", "file"])
@pytest.mark.parametrize("agent", ["array", "module", "dict"])
@pytest.mark.parametrize("kind", ALL)
def test_state_restores_the_league_exactly(kind, agent, saved):
    """SP-05, SP-07."""
    rng = np.random.default_rng(3)

    def make():
        if agent == "module":
            return torch.nn.Linear(3, 2)
        return rng.normal(size=5).astype(np.float32) if agent == "array" else {"w": torch.rand(2)}

    def weights(curriculum):
        agents = map(curriculum.get_opponent, curriculum.opponents)
        return [np.concatenate([np.ravel(v) for v in (a.state_dict() if agent == "module" else a).values()])
                if agent != "array" else a for a in agents]  # fmt: skip

    def play(curriculum, rng):
        for _ in range(50):
            for opponent in curriculum.sample(2):
                curriculum.update_winrate(opponent, rng.choice([0, 0.5, 1]))

    options = {} if kind is SelfPlay else {"capacity": 4}
    first = kind(make(), seed=8, **options)
    for _ in range(5):
        play(first, rng)
        first.update_agent(make())
    second = kind(make(), seed=9, **options)
    second.load_state_dict(saved(first.state_dict()))
    assert second.opponents == first.opponents and second.metrics() == first.metrics()
    for mine, other in zip(weights(first), weights(second), strict=True):
        assert np.array_equal(mine, other) and mine.dtype == other.dtype
    if agent == "array":
        assert not second.get_opponent(second.opponents[0]).flags.writeable
    new = make()
    for curriculum in (first, second):
        curriculum.update_agent(new)
        play(curriculum, np.random.default_rng(4))
    assert first.sample(50) == second.sample(50) and first.opponents == second.opponents
    assert np.array_equal(first.win_rates(), second.win_rates()) and np.array_equal(first.ratings(), second.ratings())


def through_a_file(state):
    file = io.BytesIO()
    torch.save(pack(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_saved_state_does_not_follow_the_league():
    curriculum = league(n=2)
    state = curriculum.state_dict()
    curriculum.update_winrate(0, 1)
    curriculum.update_agent(np.ones(1))
    curriculum.sample(3)
    again = league(n=1)
    again.load_state_dict(state)
    assert again.opponents == [0, 1] and again.metrics()["games"] == 0 and again.rating == 1000


def test_a_state_of_another_game_or_league_is_named():
    with pytest.raises(ValueError, match=r"shape \(1,\) in the state.*\(2,\)"):
        PrioritizedFictitiousSelfPlay(np.zeros(2)).load_state_dict(league().state_dict())
    with pytest.raises(ValueError, match="holds 3 opponents, this curriculum 1 to 2"):
        league(n=1, capacity=2).load_state_dict(league().state_dict())
    for kind, state in ((SelfPlay, {"rng": 1}), (PrioritizedFictitiousSelfPlay, None)):
        with pytest.raises(ValueError, match=f"this state does not fit the {kind.__name__}: "):
            kind(np.zeros(2)).load_state_dict(state)
    with pytest.raises(RuntimeError, match="size mismatch"):
        SelfPlay(torch.nn.Linear(2, 2)).load_state_dict(SelfPlay(torch.nn.Linear(3, 2)).state_dict())


@pytest.mark.parametrize(
    "options,message",
    [
        ({"agent": None}, "agent=None: must be the first opponent: a league is never empty"),
        ({"decay": 0}, r"decay=0: must be in \(0, 1\]"),
        ({"decay": float("nan")}, "decay=nan"),
        ({"prior_games": -1}, "prior_games=-1: must be 0 or more"),
        ({"min_games": -1}, "min_games=-1"),
        ({"capacity": 0}, "capacity=0: must be a whole number from 1"),
        ({"capacity": 2.5}, "capacity=2.5"),
        ({"capacity": None}, "capacity=None"),
        ({"capacity": 1, "keep_initial": True}, "capacity=1: must be a whole number from 2 with keep_initial=True"),
        ({"weighting": "softmax"}, r"weighting='softmax': must be one of \('hard'"),
        ({"power": 0}, "power=0: must be above 0"),
        ({"uniform": 1.1}, r"uniform=1.1: must be in \[0, 1\]"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        PrioritizedFictitiousSelfPlay(**{"agent": np.zeros(1), **options})


@pytest.mark.parametrize("result", [-1, 2, float("nan")])
def test_a_return_is_no_result(result):
    curriculum = league()
    with pytest.raises(ValueError, match=rf"result {result} is none of .*\(return \+ 1\) / 2"):
        curriculum.update_winrate(0, result)
    assert curriculum.metrics()["games"] == 0 and curriculum.rating == 1000


@pytest.mark.parametrize("kind", ALL)
def test_metrics_are_floats(kind):
    metrics = league(kind, 1).metrics()
    assert all(type(value) is float for value in metrics.values())
    assert (metrics["opponents"], metrics["effective_opponents"], metrics["win_rate_mean"]) == (1, 1, 0.5)
    metrics = league(win_rates=(1.0, 0.5, 0.5)).metrics()
    np.testing.assert_allclose(metrics["effective_opponents"], 2, rtol=0.01)
    assert metrics["newest_opponent"] == 2 and metrics["win_rate_min"] < 0.6


PAYOFF = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])  # rock, paper, scissors: of the row player


def test_rock_paper_scissors():
    """The learner is the pure best response to the opponents that it is given."""

    def best_response(curriculum):
        opponents = np.stack([curriculum.get_opponent(i) for i in curriculum.opponents])
        return np.eye(3)[np.argmax(PAYOFF @ (curriculum._sample_distribution() @ opponents))]

    rock = np.eye(3)[0]
    self_play, fictitious = SelfPlay(rock), FictitiousSelfPlay(rock, capacity=3000)
    played = []
    for _ in range(600):
        for curriculum in (self_play, fictitious):
            curriculum.update_agent(best_response(curriculum))
        played.append(int(self_play.get_opponent(0).argmax()))
    assert played[:6] == [1, 2, 0, 1, 2, 0] and played[-3:] == [1, 2, 0]  # self-play goes round for ever
    average = np.mean([fictitious.get_opponent(i) for i in fictitious.opponents], axis=0)
    assert abs(average - 1 / 3).max() < 0.05 and (PAYOFF @ average).max() < 0.1
    prioritized = PrioritizedFictitiousSelfPlay(rock, decay=1.0, seed=0)
    for move in (1, 2):
        prioritized.update_agent(np.eye(3)[move])
    for _ in range(60):  # the learner plays rock
        for opponent in prioritized.sample(5):
            outcome = PAYOFF[0] @ prioritized.get_opponent(opponent)
            prioritized.update_winrate(opponent, (outcome + 1) / 2)
    np.testing.assert_allclose(prioritized.win_rates(), [0.5, 0, 1])
    np.testing.assert_allclose(prioritized._sample_distribution(), [0.2, 0.8, 0])  # most on paper, which beats it


class Recorder(Curriculum):
    """Notes what it is told."""

    def __init__(self, task_space, steps=False):
        super().__init__(task_space, seed=0)
        self.told, self.requires_step_updates = [], steps

    def _sample_distribution(self):
        return np.full(self.num_tasks, 1 / self.num_tasks)

    def update_task_progress(self, task, progress, env_id=None):
        self.told.append(("progress", task, progress, env_id))

    def update_on_step(self, task, *step, env_id=None):
        self.told.append(("step", task, *step, env_id))

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        self.told.append(("episode", task, episode_return, length, progress, env_id))

    def update_on_demand(self, metrics):
        self.told.append(metrics)

    def get_opponent(self, opponent_id):
        return f"agent {opponent_id}"


def test_dual_samples_pairs_from_both_generators():
    tasks, opponents = TaskSpace(["small", "large"]), league(FictitiousSelfPlay, 3, seed=2)
    dual = DualCurriculum(DomainRandomization(tasks, seed=1), opponents)
    draws = dual.sample(6)
    assert draws == list(
        zip(DomainRandomization(tasks, seed=1).sample(6), league(FictitiousSelfPlay, 3, seed=2).sample(6))
    )
    assert dual.task_space.decode((1, 2)) == ("large", 2) and dual.task_space.encode(("small", 10**6)) == (0, 10**6)
    assert all(dual.task_space.contains(draw) for draw in draws)
    counts = np.zeros((2, 3))
    for pair in dual.sample(6000):
        counts[pair] += 1
    assert chisquare(counts.ravel()).pvalue > 0.001
    opponents.update_agent(np.zeros(1))
    assert 3 in {opponent for _, opponent in dual.sample(50)}


def test_dual_sends_every_update_to_both():
    env, agent = Recorder(4), Recorder(3)
    dual = DualCurriculum(env, agent)
    dual.update_task_progress((2, 1), 0.5, env_id=7)
    step = ("obs", 1.0, False, True, {"x": 1}, 0.25)
    dual.update_on_step((3, 0), *step, env_id=6)
    dual.update_on_step_batch([((0, 1), *step), ((1, 2), *step)], env_id=5)
    dual.update_on_episode(9.0, 30, (1, 0), 1.0, env_id=4)
    dual.update_on_demand({"loss": 1})
    for half, tasks in ((env, (2, 3, 0, 1, 1)), (agent, (1, 0, 1, 2, 0))):
        assert half.told == [
            ("progress", tasks[0], 0.5, 7), ("step", tasks[1], *step, 6), ("step", tasks[2], *step, 5),
            ("step", tasks[3], *step, 5), ("episode", tasks[4], 9.0, 30, 1.0, 4), {"loss": 1},
        ]  # fmt: skip
    assert dual.get_opponent(2) == "agent 2"


@pytest.mark.parametrize("steps", [False, True])
def test_dual_behind_the_queue(steps):
    """Through shared memory: each half is told its half of the tasks that were played, in order."""

    class Reaching(TaskWrapper):
        def change_task(self, new_task):
            self.task = new_task
            self.unwrapped.target, self.unwrapped.opponent = new_task

        def _task_completion(self, obs, reward, terminated, truncated, info):
            return float(terminated)

    class Count(gym.Env):
        observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self.place = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.place += 1
            return np.full(1, self.place, np.float32), float(self.opponent), self.place == self.target, False, {}

    env_half, agent_half = Recorder(TaskSpace([2, 3, 5]), steps), league(FictitiousSelfPlay, 4, seed=1)
    curriculum = make_multiprocessing_curriculum(DualCurriculum(env_half, agent_half), max_envs=1, start=False)
    env = GymnasiumSyncWrapper(Reaching(Count()), curriculum.components.task_space, curriculum.components)
    played = []
    for _ in range(20):
        env.reset()
        target, opponent = env.env.task
        played.append((target, opponent))
        while not env.step(0)[2]:
            pass
    env.close()
    curriculum.stop()
    assert {target for target, _ in played} == {2, 3, 5} and {opponent for _, opponent in played} == {0, 1, 2, 3}
    episodes = [told for told in env_half.told if told[0] == "episode"]
    assert [(told[1], told[2], told[3]) for told in episodes] == [
        ([2, 3, 5].index(target), target * opponent, target) for target, opponent in played
    ]
    counted = [told[1] for told in env_half.told if told[0] == "step"]
    assert len(counted) == (sum(target for target, _ in played) if steps else 0)


def test_dual_asks_for_steps_if_either_does():
    for env, agent in ((False, False), (True, False), (False, True)):
        dual = DualCurriculum(Recorder(2, steps=env), Recorder(2, steps=agent))
        assert dual.requires_step_updates is (env or agent) and dual.requires_observations is False
    watching = Recorder(2, steps=True)
    watching.requires_observations = True
    assert DualCurriculum(watching, league()).requires_observations is True
    assert not DualCurriculum(DomainRandomization(2), league()).requires_step_updates


def test_dual_passes_on_what_is_about_opponents():
    dual = DualCurriculum(DomainRandomization(2), league(n=1))
    assert dual.update_agent(np.full(1, 5.0)) == 1 and dual.get_opponent(1).tolist() == [5]
    dual.update_winrate(1, 1)
    assert dual.agent_curriculum.win_rates().tolist() == [0.5, 1.0]
    assert dual.metrics()["agent/games"] == 1 and dual.metrics()["agent/opponents"] == 2
    plr = DualCurriculum(PrioritizedLevelReplay(5), SelfPlay(np.zeros(1)))
    assert any(name.startswith("env/") for name in plr.metrics())
    with pytest.raises(ValueError, match="agent_curriculum chooses opponents: DomainRandomization has none"):
        DualCurriculum(DomainRandomization(2), DomainRandomization(2))
    with pytest.raises(ValueError, match="agent_batch_size=0"):
        DualCurriculum(DomainRandomization(2), league(), agent_batch_size=0)


@pytest.mark.parametrize("batch", [1, 8])
def test_dual_resumes_exactly_in_the_middle_of_a_batch(batch):
    def make(seed):
        return DualCurriculum(PrioritizedLevelReplay(30, seed=seed), league(seed=seed), agent_batch_size=batch)

    dual, again = make(1), make(2)
    dual.update_winrate(2, 0)
    dual.sample(11)
    again.load_state_dict(through_a_file(dual.state_dict()))
    assert dual.sample(40) == again.sample(40) and dual.metrics() == again.metrics()


def test_dual_repeats_an_opponent_until_its_batch_or_its_place_ends():
    dual = DualCurriculum(
        DomainRandomization(100, seed=0), league(FictitiousSelfPlay, 8, capacity=8, seed=3), agent_batch_size=4
    )
    opponents = [opponent for k in (3, 1, 10, 1, 25) for _, opponent in dual.sample(k)]
    chosen = league(FictitiousSelfPlay, 8, capacity=8, seed=3)
    assert opponents == [opponent for _ in range(10) for opponent in chosen.sample() * 4]
    assert len({task for task, _ in dual.sample(40)}) > 20
    first = dual.sample()[0][1]
    while first in dual.agent_curriculum.opponents:
        dual.update_agent(np.zeros(1))
    assert dual.sample()[0][1] in dual.agent_curriculum.opponents


# ---- LeaguePlay ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_league_draws_the_learner_in_its_share_and_else_by_its_curriculum(share):
    past, same = (league(n=4, win_rates=[0.9, 0.5, 0.2, 0.0], seed=5) for _ in range(2))
    whole = LeaguePlay(past, self_play_share=share, seed=7)
    p = whole._sample_distribution()
    assert whole.opponents == [NEWEST, 0, 1, 2, 3] and len(p) == whole.num_tasks == 5
    np.testing.assert_allclose(p, [share, *(1 - share) * past._sample_distribution()])
    rng, drawn = np.random.default_rng(7), whole.sample(3000)
    assert drawn == [NEWEST if rng.random() < share else same.sample()[0] for _ in range(3000)]
    counts = np.array([drawn.count(opponent) for opponent in whole.opponents])
    np.testing.assert_allclose(counts / 3000, p, atol=0.03)


def test_a_league_counts_results_against_those_that_it_holds():
    whole = LeaguePlay(league(FictitiousSelfPlay, n=2, capacity=2))
    for opponent in (1, NEWEST, 7):
        whole.update_winrate(opponent, 1.0)
    assert whole.metrics()["games"] == 1 and whole.curriculum.win_rates().tolist() == [0.5, 1.0]
    assert whole.update_agent(np.full(1, 5.0)) == 2
    whole.update_winrate(0, 0.0)  # evicted while it was played
    assert whole.opponents == [NEWEST, 1, 2] and whole.num_tasks == 3 and whole.metrics()["games"] == 1
    assert whole.get_opponent(2).tolist() == [5.0]
    with pytest.raises(ValueError, match="opponent 0 was evicted"):
        whole.get_opponent(0)


def test_a_league_grows_by_time_or_by_winning_against_all():
    whole = LeaguePlay(league(n=1), snapshot_interval=3, snapshot_win_rate=0.7)
    grown = [whole.after_update(np.full(1, float(update))) for update in range(7)]
    assert grown == [None, None, 1, None, None, 2, None] and whole.get_opponent(2).tolist() == [5.0]
    for opponent in (0, 1):
        whole.update_winrate(opponent, 1.0)
    assert whole.after_update(np.zeros(1)) is None  # not against 2
    whole.update_winrate(2, 1.0)
    assert [whole.after_update(np.zeros(1)) for _ in range(4)] == [3, None, None, 4]


def test_a_league_resumes_exactly():
    def play(whole, updates):
        found = []
        for update in range(updates):
            drawn = whole.sample(5)
            found.append((drawn, whole.after_update(np.full(1, float(update))), whole.metrics()))
            for opponent in drawn:
                whole.update_winrate(opponent, (opponent % 3) / 2)
        return found

    options = {"snapshot_interval": 4, "seed": 3}
    straight, stopped = (LeaguePlay(league(capacity=3, seed=1), **options) for _ in range(2))
    assert play(straight, 10) == play(stopped, 10)
    again = LeaguePlay(league(n=1, capacity=3), **options)
    again.load_state_dict(through_a_file(stopped.state_dict()))
    assert again.num_tasks == stopped.num_tasks == 4 and play(straight, 20) == play(again, 20)
    with pytest.raises(ValueError, match="does not fit the LeaguePlay"):
        again.load_state_dict(stopped.curriculum.state_dict())


def test_a_league_gives_openings_and_opponents_through_the_queue():
    dual = DualCurriculum(DomainRandomization(9, seed=1), LeaguePlay(league(n=3, seed=2), self_play_share=0.5, seed=3))
    with make_multiprocessing_curriculum(dual, start=False) as curriculum:
        space = dual.task_space
        env = GymnasiumSyncWrapper(TaskWrapper(gym.make("CartPole-v1")), space, curriculum.components)
        tasks = [env.reset()[1]["task"] for _ in range(40)]
        env.close()
    openings, opponents = map(set, zip(*tasks))
    assert opponents == {NEWEST, 0, 1, 2} and openings <= set(range(9))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"self_play_share": 1.5}, r"self_play_share=1.5: must be in \[0, 1\]"),
        ({"snapshot_interval": 0}, "snapshot_interval=0: must be 1 or more"),
        ({"snapshot_win_rate": float("nan")}, "snapshot_win_rate=nan"),
        ({"curriculum": SelfPlay(np.zeros(1))}, r"must be a \(Prioritized\)FictitiousSelfPlay"),
    ],
)
def test_bad_options_of_a_league_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LeaguePlay(**{"curriculum": league(n=1)} | options)
