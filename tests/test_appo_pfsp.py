"""algos/appo_pfsp*.py: learning, the league, seats, unrolls, faults, resume. Their games: test_games.py."""

import contextlib
import gc
import itertools
import os
import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
import tyro
from test_games import openspiel
from test_runs import Run, assert_same, restored_signals  # noqa: F401

from algos import appo_pfsp as appo
from algos import appo_pfsp_openspiel as tree
from benchmark.runner.suite import Suite

TINY = ("--env-id tic_tac_toe --envs-per-actor 8 --batch-rollouts 16 --num-steps 5 --hidden-size 16 --log-interval 1 "
        "--league-size 4 --snapshot-interval 2 --num-minibatches 2 --eval-episodes 2 --progress none "
        "--total-timesteps 800 ")  # 10 updates of 80 steps  # fmt: skip


@pytest.fixture(autouse=True)
def quick():
    torch.set_num_threads(1)  # as `train` does


def parse(*arguments, script=appo):
    return tyro.cli(script.Args, args=[word for argument in arguments for word in argument.split()])


def train(folder, *arguments, script=appo):
    try:
        script.train(parse(TINY, f"--run-dir {folder}", *arguments, script=script))
    finally:
        gc.collect()
    return Run(folder)


# ---- It learns -------------------------------------------------------------------------------------------------------

RPS = ("--env-id rps --opponents fsp --self-play-share 0 --envs-per-actor 256 --batch-rollouts 256 --num-steps 1 "
       "--num-minibatches 1 --hidden-size 16 --learning-rate 0.02 --no-anneal-lr --ent-coef 0.3 --snapshot-interval 4 "
       "--league-size 100 --league-opponents 16 --num-actors 0 --progress none --total-timesteps 51200 "
       "--eval-episodes 2")  # fmt: skip


def average_policy(run, args):
    """The mean of the snapshots' probabilities, a row per seat."""
    state = torch.load(run.checkpoints()[-1], weights_only=True)
    weights = [x.numpy() for x in state["league"]["agents"]]
    policies = appo.as_policies(weights, args)
    return np.mean([policy(np.eye(2, dtype=np.float32), np.ones((2, 3), bool)) for policy in policies], 0)


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_the_average_of_fictitious_self_play_approaches_one_third_each(seed, tmp_path):
    args = parse(RPS, f"--seed {seed} --run-dir {tmp_path}")
    result = appo.train(args)
    np.testing.assert_allclose(average_policy(Run(tmp_path), args), 1 / 3, atol=0.05)
    assert result["eval/nash_conv_average"] < 0.1


def test_the_figures_show_the_snapshots_and_the_nash_conv_of_the_runs(tmp_path, monkeypatch, capsys):
    figures = pytest.importorskip(
        "benchmark.figures.pfsp_figures", reason="needs --extra benchmark", exc_type=ImportError
    )
    with pytest.raises(SystemExit, match="no tables in .*: run benchmark/run.py collect s"):
        figures.main(figures.Args("s", tmp_path))
    arguments = {"num_actors": 0, "envs_per_actor": 16, "batch_rollouts": 16,
                 "num_steps": 1, "hidden_size": 8, "snapshot_interval": 2, "eval_interval": 4, "eval_episodes": 2,
                 "num_minibatches": 1, "progress": "none"}  # fmt: skip
    tables = [{"name": name, "script": "algos/appo_pfsp.py", "args": {"opponents": name}} for name in ("self", "fsp")]
    suite = Suite(name="s", environments=["rps"], seeds=[1], budget=160, args=arguments, algorithms=tables)
    from benchmark.runner.collect import collect

    folder = tmp_path / "s" / "runs" / suite.runs[0].id  # the other is not done yet
    appo.train(appo.Args(env_id="rps", opponents="self", total_timesteps=160, run_dir=folder, **arguments))
    run, drawn = Run(folder), []
    collect(suite, tmp_path)
    monkeypatch.setattr(figures, "save", lambda figure, path: drawn.append(figure))
    figures.main(figures.Args("s", tmp_path))
    assert f"note: runs the code.py of 1 runs in {tmp_path / 's'}, as {run.dir}" in capsys.readouterr().err
    above, below = drawn[0].subfigs
    paths, missing = above.axes
    assert len(paths.lines) == 4 and not missing.lines
    _, newest, average, equilibrium = (np.column_stack(line.get_data()) for line in paths.lines)
    policy = np.linalg.lstsq(np.vstack([figures.CORNERS.T, np.ones(3)]), np.append(average[-1], 1), rcond=None)[0]
    np.testing.assert_allclose(policy, average_policy(run, parse("--env-id rps --hidden-size 8"))[0], atol=1e-6)
    np.testing.assert_allclose(newest.mean(0), average[-1], atol=1e-6)
    assert len(newest) == 6  # the initial policy and five more
    np.testing.assert_allclose(equilibrium[0], figures.CORNERS.mean(0))
    rows = [row for row in run.rows() if "eval/nash_conv" in row]
    lines = {line.get_label(): line.get_ydata() for line in below.axes[0].lines}
    assert len(rows) == 3  # after 4, 8 and all 10 updates
    np.testing.assert_allclose(lines["self, average"], [row["eval/nash_conv_average"] for row in rows], rtol=1e-5)
    np.testing.assert_allclose(lines["self, newest"], [row["eval/nash_conv"] for row in rows], rtol=1e-5)
    before = (tmp_path / "s" / "figures" / "equilibrium.json").read_bytes()
    figures.remake(tmp_path / "s" / "figures")  # from the numbers alone
    again = {line.get_label(): line.get_ydata() for line in drawn[1].subfigs[1].axes[0].lines}
    assert again.keys() == lines.keys() and all(np.array_equal(again[key], lines[key]) for key in lines)
    assert (tmp_path / "s" / "figures" / "equilibrium.json").read_bytes() == before
    import pandas as pd

    table = pd.read_parquet(tmp_path / "s" / "runs.parquet")
    other = tmp_path / "other"
    other.mkdir()
    (other / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    table["path"] = str(other)
    table.to_parquet(tmp_path / "s" / "runs.parquet")
    with pytest.raises(SystemExit, match=f"names a run outside of it, {other}: its code is not run"):
        figures.main(figures.Args("s", tmp_path))
    assert not (tmp_path / "ran").exists()


@openspiel
def test_it_learns_to_win_at_poker(tmp_path):
    result = tree.train(parse(
        "--env-id kuhn_poker --num-actors 1 --envs-per-actor 64 --batch-rollouts 64 --num-steps 8 --hidden-size 32 "
        f"--total-timesteps 40000 --learning-rate 0.01 --update-epochs 4 --eval-episodes 2000 "
        f"--progress none --run-dir {tmp_path}", script=tree
    ))  # fmt: skip
    assert result["eval/return_mean"] > 0.1 and result["eval/nash_conv"] < 0.7  # uniform: 0, 0.92


# ---- League ----------------------------------------------------------------------------------------------------------


NO_EARLY = {"early_opponent": torch.tensor([appo.NEWEST]), "early_reward": torch.zeros(1)}


def make_league(*arguments):
    args = parse(TINY, "--num-actors 0", *arguments)
    return appo.League(args, appo.acting_agent(args)[1], np.random.SeedSequence(0)), args


def play(league, opponent, reward):
    """A game against this opponent is over."""
    game = {"terminated": torch.ones(1, dtype=torch.bool), "opponent": torch.tensor([opponent])}
    league.record(game | {"reward": torch.tensor([reward])} | NO_EARLY)


def drawn(league, count=4000):
    """Opponents."""
    return np.array([league.draw()[1] for _ in range(count)])


@pytest.mark.parametrize("weighting", ["hard", "var", "linear", "linear_capped", "argmax"])
def test_opponents_are_drawn_where_the_formula_puts_the_mass(weighting):
    league, args = make_league(f"--pfsp-weighting {weighting} --pfsp-uniform 0.2 --self-play-share 0.25 "
                               "--pfsp-prior-games 0 --pfsp-decay 1 --league-size 3")  # fmt: skip
    for _ in range(2):
        league.update_agent(np.zeros_like(league.past[0]))
    opponent = torch.tensor([[0, 1, 2]]).repeat(10, 1)
    wins = torch.arange(10)[:, None] < torch.tensor([9, 5, 2])
    league.record({"terminated": torch.ones(10, 3, dtype=torch.bool), "opponent": opponent,
                   "reward": torch.where(wins, 1.0, -1.0)} | NO_EARLY)  # fmt: skip
    x = np.array([0.9, 0.5, 0.2])
    mass = {"hard": (1 - x) ** 2, "var": x * (1 - x), "linear": 1 - x, "linear_capped": np.minimum(0.5, 1 - x),
            "argmax": np.array([0, 0, 1.0])}[weighting]  # fmt: skip
    expected = 0.8 * mass / mass.sum() + 0.2 / 3
    np.testing.assert_allclose(league.distribution(), expected)
    np.testing.assert_allclose(league.win_rates(), x)
    shares = np.bincount(drawn(league) + 1, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.25, *0.75 * expected], atol=0.03)


@pytest.mark.parametrize("opponents", ["fsp", "pfsp"])
def test_a_full_league_evicts_and_keeps_the_first(opponents):
    """SP-06: at most 3 of 10 snapshots are held; who was evicted is not drawn."""
    league, _ = make_league(f"--opponents {opponents} --league-size 3 --self-play-share 0 --pfsp-uniform 0.5")
    size, gone = len(league.past[0]), set()
    for update in range(1, 20, 2):
        if update == 13:  # the newest snapshots are the easiest by far
            for _ in range(30):
                play(league, [*league.past][-1], 1.0)
        before, last = set(league.past), [*league.past][-1]
        league.update_agent(np.full(size, update, np.float32))
        assert len(league.past) <= 3 and 0 in league.past
        gone |= before - set(league.past)
        assert (update == 13 and opponents == "pfsp") == (last in gone and last == max(gone) and update == 13)
        assert set(drawn(league, 300)) <= set(league.past)
    assert len(gone) == 8 and not gone & set(league.past)


def test_results_are_the_learners_and_draws_count_half():
    """SP-04; games against the newest weights and against who was evicted count for nobody."""
    league, _ = make_league("--pfsp-prior-games 0 --pfsp-decay 1")
    league.update_agent(np.zeros_like(league.past[0]))
    rewards = torch.tensor([[2.0, -1.0, 0.0, 1.0, 1.0, 1.0]])
    ended = torch.tensor([[True, True, True, False, True, True]])
    opponent = torch.tensor([[0, 1, 0, 1, appo.NEWEST, 7]])
    league.record({"terminated": ended, "opponent": opponent, "reward": rewards} | NO_EARLY)
    assert league.win_rates().tolist() == [0.75, 0.0] and league.metrics()["curriculum/games"] == 3


def test_snapshots_come_by_time_or_by_winning_against_all():
    league, _ = make_league("--snapshot-interval 5 --snapshot-win-rate 0.7 --league-size 10")
    weights = np.zeros_like(league.past[0])
    for update in range(5):
        assert len(league.past) == 1 and league.updates == update
        league.after_update(weights)
    assert len(league.past) == 2 and league.updates == 0
    for opponent, won in ((0, True), (1, False), (1, True)):
        for _ in range(150):
            play(league, opponent, 1.0 if won else -1.0)
        league.after_update(weights)
        assert len(league.past) == 2 + (opponent == 1 and won)
    assert league.updates == 0


@pytest.mark.parametrize("num_actors", [0, 2])
def test_draws_are_young(num_actors, monkeypatch):
    """Tasks are drawn when a slot is handed out, for it alone: without actor processes right before its unroll. They
    bring the opponents' weights along."""
    args = parse(TINY, f"--num-actors {num_actors} --league-opponents 3 --openings 4 --self-play-share 0.3")
    weights = appo.acting_agent(args)[1]
    league, drawn = appo.League(args, weights, np.random.SeedSequence(0)), []
    league.update_agent(weights + 1)
    draw = league.draw
    monkeypatch.setattr(league, "draw", lambda: drawn.append(draw()) or drawn[-1])
    make, slots = partial(appo.Actor, args, np.random.SeedSequence(0)), 6 if num_actors else 2
    with contextlib.closing(appo.Actors(make, appo.Actor.layout(args), num_actors, 2, None, league.deal)) as actors:
        assert actors.num_slots == slots
        actors.start(weights, 0)
        assert len(drawn) == (3 * slots if num_actors else 0)
        for update in range(1, 4):
            played = set(actors.batch()["opponent"].flatten().tolist())
            actors.publish(weights)
            assert len(drawn) == 3 * (2 * update + (slots if num_actors else 0))
            assert played <= {opponent for _, opponent in drawn} and played <= {appo.NEWEST, 0, 1}
        for tasks in actors.slots["tasks"]:
            assert set(zip(tasks["openings"].tolist(), tasks["opponents"].tolist())) <= {(int(o), i) for o, i in drawn}
            for opponent, found in zip(tasks["opponents"].tolist(), tasks["weights"]):
                assert (found == {appo.NEWEST: 0, 0: weights, 1: weights + 1}[opponent]).all()


@pytest.mark.parametrize("share", [0, 1])
def test_who_plays_is_who_was_drawn(share, tmp_path):
    """Also where each update evicts a snapshot: without actor processes no draw is older than its unroll."""
    run = train(tmp_path, f"--num-actors 0 --self-play-share {share} --league-size 2 --snapshot-interval 1")
    assert [row["curriculum/newest_share"] for row in run.rows()] == [share] * 10


# ---- Unrolls ---------------------------------------------------------------------------------------------------------


def make_actor(*arguments, draws=(0,), opening=0, script=appo):
    """An actor whose league holds snapshots 0 (plays its first action), 1 (its second one) and 2 (fresh weights); its
    unrolls draw the opponents `draws` in turn."""
    args = parse(TINY, "--num-actors 0", *arguments, script=script)
    torch.manual_seed(0)
    fresh = script.flat_weights(script.Agent(args.obs_shape, args.num_actions, args))
    weights = [constant(args, 0, script), constant(args, 1, script), fresh]
    actor = script.Actor(args, np.random.SeedSequence(0), 0, 0)
    actor.test = itertools.cycle((opening, draw, weights[draw]) for draw in draws)
    return actor, args, weights


def constant(args, action, script=appo):
    """Weights of an agent that likes nothing but one action."""
    agent, weights = script.acting_agent(args)
    agent.policy.bias.data[action] = 100
    return weights


def unrolls(actor, args, weights, count):
    board, found = appo.Board(len(weights)), []
    board.write(weights, 1)
    for _ in range(count):
        slot = {name: np.zeros(shape, dtype) for name, (shape, dtype) in actor.layout(args).items()}
        for k in range(args.league_opponents):
            for name, value in zip(("openings", "opponents", "weights"), next(actor.test)):
                slot["tasks"][name][k] = value
        begun = np.ones((1, args.envs_per_actor), bool) if actor.row is None else actor.slot["terminated"][-1:]
        actor.fill(slot, board)
        found.append(slot | {"starts": np.concatenate([begun, slot["terminated"]])})
    return found


def test_each_seat_plays_with_its_own_policy_and_only_the_learner_is_recorded():
    """SP-08, SP-09: the learner always plays rock, its opponent paper, in both seats; each game is one step of the
    learner, which ends with the opponent's move."""
    actor, args, weights = make_actor("--env-id biased_rps", draws=[1])
    step, played = actor.envs.step, []

    def spy(actions, games):
        played.extend(zip(actor.envs.player[games].tolist(), actor.seat[games].tolist(), np.array(actions).tolist()))
        return step(actions, games)

    actor.envs.step = spy
    for slot in unrolls(actor, args, weights[0], 6):
        assert not slot["action"].any() and slot["terminated"].all() and slot["starts"].all()
        assert (slot["reward"] == -1).all()
        assert (slot["episode_length"] == 1).all() and (slot["opponent"] == 1).all()
        assert 0.2 < slot["obs"][..., 0].mean() < 0.8 and (slot["obs"].sum(-1) == 1).all()  # its own seat, each one
        assert np.exp(slot["logprob"]).min() > 0.99
    assert {(player == seat, action) for player, seat, action in played} == {(True, 0), (False, 1)}
    assert len({(player, seat) for player, seat, _ in played}) == 4


@openspiel
def test_opponents_get_as_many_games_however_long_they_are():
    """Against one who always bets a game of Kuhn poker takes a quarter more of the learner's moves than against one who
    always passes. Dealt by place, not by game, the passer would have a quarter more games than the league says."""
    actor, args, weights = make_actor("--env-id kuhn_poker --num-steps 12 --envs-per-actor 16 --batch-rollouts 16",
                                      draws=[0, 1], script=tree)  # fmt: skip
    slots = unrolls(actor, args, weights[2], 30)
    opponents = np.concatenate([slot["opponent"][slot["starts"][:-1]] for slot in slots])
    games = np.bincount(opponents)
    moves = np.bincount(np.concatenate([slot["opponent"].ravel() for slot in slots])) / games
    assert moves[1] > 1.15 * moves[0] and abs(games[0] / games[1] - 1) < 0.05, (games, moves)


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four", pytest.param("leduc_poker", marks=openspiel)])
def test_a_step_goes_from_the_learners_turn_to_its_next(name):
    script = tree if name == "leduc_poker" else appo
    actor, args, weights = make_actor(f"--env-id {name} --num-steps 40", draws=[0, 2], script=script)
    first, second = unrolls(actor, args, weights[2], 2)
    for row in ("obs", "legal", "starts"):
        np.testing.assert_array_equal(first[row][-1], second[row][0])
    b = {key: np.concatenate([first[key][:40], second[key][:40]]) for key in first if first[key].ndim > 1}
    T, E = b["action"].shape[:2]
    assert np.take_along_axis(b["legal"][:T], b["action"][..., None], 2).all()
    assert not b["reward"][~b["terminated"]].any() and b["reward"][b["terminated"]].std() > 0
    assert set(np.unique(b["opponent"][:40])) == {0, 2} and b["starts"][0].all()
    for t, e in np.ndindex(T - 1, E):
        length = b["episode_length"][t, e]
        if b["terminated"][t, e] and t + 1 >= length:
            assert b["starts"][t + 1 - length, e] and not b["starts"][t + 2 - length : t + 1, e].any()
        if not b["terminated"][t, e]:
            assert b["opponent"][t, e] == b["opponent"][t + 1, e]
        if name == "leduc_poker":  # the tensor tells the player, first and last
            assert b["terminated"][t, e] or (b["obs"][t, e, [0, -1]] == b["obs"][t + 1, e, [0, -1]]).all()
            continue
        own, other = (b["obs"][t + 1, e] - b["obs"][t, e]).reshape(2, -1)
        if b["terminated"][t, e]:
            assert b["obs"][t + 1, e, 0].sum() == 0 and b["obs"][t + 1, e, 1].sum() in (0, 1)
        else:
            assert own.sum() == other.sum() == 1 and own.min() == other.min() == 0
            cell = own.argmax() % 7 if name == "connect_four" else own.argmax()
            assert cell == b["action"][t, e]


def test_the_recorded_policy_is_the_one_that_acted():
    """SYN-11, with illegal moves out of reach in acting and learning."""
    actor, args, weights = make_actor(draws=[0, 1])
    agent = appo.Agent(args.obs_shape, args.num_actions, args)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights[2]), agent.parameters())
    for slot in unrolls(actor, args, weights[2], 4):
        logits, _ = agent(*(torch.from_numpy(slot[name][:-1]) for name in ("obs", "legal")))
        log_pi = logits.log_softmax(-1)
        found = log_pi.gather(-1, torch.from_numpy(slot["action"])[..., None])[..., 0]
        np.testing.assert_allclose(slot["logprob"], found.detach(), atol=1e-5)
        illegal = ~torch.from_numpy(slot["legal"][:-1])
        assert illegal.any() and (log_pi.exp()[illegal] == 0).all()
        logits.logsumexp(-1).sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in agent.parameters() if p.grad is not None)


def test_games_that_end_before_the_learner_moves_count_in_the_league():
    """After four random moves both may have two in a row: the opponent who goes on from there can win at once. A record
    of the learner's moves alone would have a higher win rate; these games have no row of their own (USE-05)."""
    actor, args, weights = make_actor("--openings 4 --num-steps 40", draws=[1], opening=4)
    step, played = actor.envs.step, []

    def spy(actions, games):
        seats = actor.seat[games].copy()
        rewards, ended = step(actions, games)
        played.extend(rewards[ended, seats[ended]].tolist())
        return rewards, ended

    actor.envs.step = spy
    slots = unrolls(actor, args, weights[2], 6)
    told = np.concatenate([slot["reward"][slot["terminated"]] for slot in slots])
    early = np.concatenate([slot["early_reward"][slot["early_opponent"] == 1] for slot in slots])
    assert len(early) > 20 and (early == -1).all() and len(told) + len(early) == len(played) and not actor.early
    assert sorted([*told, *early]) == sorted(played)
    league, _ = make_league("--pfsp-prior-games 0 --pfsp-decay 1")
    league.update_agent(np.zeros_like(league.past[0]))
    for slot in slots:
        league.record({name: torch.from_numpy(array) for name, array in slot.items() if array.shape})
    won = (np.sign(played) + 1).mean() / 2
    assert league.win_rates()[1] == pytest.approx(won) and won < (np.sign(told) + 1).mean() / 2 - 0.02


@pytest.mark.parametrize(
    ("draws", "left"), [([0], {0}), ([appo.NEWEST], {appo.NEWEST}), ([0, appo.NEWEST], {0, appo.NEWEST})]
)
def test_a_snapshot_that_left_the_league_plays_its_games_to_the_end_and_no_others(draws, left):
    actor, args, weights = make_actor("--env-id connect_four --num-steps 2", draws=[1])
    unrolls(actor, args, weights[2], 1)
    actor.test = itertools.cycle((0, draw, weights[draw]) for draw in draws)
    rows = np.concatenate([slot["opponent"] for slot in unrolls(actor, args, weights[2], 30)])
    assert (rows[0] == 1).any() and (np.diff((rows == 1).sum(1)) <= 0).all()
    assert set(rows[-1].tolist()) == left


def test_openings_are_drawn_and_played_from_the_first_game_on():
    league, _ = make_league("--env-id connect_four --openings 3")
    drawn = [league.draw()[0] for _ in range(300)]
    assert set(drawn) == {0, 1, 2, 3} and np.bincount(drawn).min() > 50
    actor, args, weights = make_actor("--env-id connect_four --openings 3 --num-steps 30", opening=3)
    (slot,) = unrolls(actor, args, weights[2], 1)
    pieces = slot["obs"][slot["starts"]].sum((1, 2, 3))
    assert len(pieces) > 16 and set(pieces.tolist()) == {3, 4}  # 4: it is the opponent who goes on from there


# ---- Mathematics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parity", [False, True])
def test_the_importance_weight_counts_once(parity):
    """Targets of V-trace (Espeholt et al. 2018, eq. 1) by hand; parity multiplies the advantage by the weight."""
    rng = np.random.default_rng(0)
    (T, B), gamma, c_bar = (6, 3), 0.9, 0.8
    logprob, behaviour, rewards, values = rng.normal(size=(4, T, B))
    next_value, terminated = rng.normal(size=B), rng.random((T, B)) < 0.3
    tensors = (torch.tensor(x) for x in (logprob - behaviour, rewards, np.vstack([values, next_value]), terminated))
    targets, advantages = appo.appo_targets(*tensors, gamma, 1.0, c_bar, parity)
    rho = np.exp(logprob - behaviour)
    for b in range(B):
        following, target = next_value[b], next_value[b]
        for t in reversed(range(T)):
            if terminated[t, b]:
                following = target = 0.0
            advantage = rewards[t, b] + gamma * target - values[t, b]
            delta = min(1, rho[t, b]) * (rewards[t, b] + gamma * following - values[t, b])
            target = values[t, b] + delta + gamma * min(c_bar, rho[t, b]) * (target - following)
            following = values[t, b]
            assert targets[t, b].item() == pytest.approx(target)
            weight = min(1, rho[t, b]) if parity else 1
            assert advantages[t, b].item() == pytest.approx(weight * advantage)


def test_the_learner_starts_from_the_policy_that_acted_and_bootstraps(tmp_path, monkeypatch):
    """In an update of one epoch and one minibatch without lag the KL divergence is 0, by the masks as they were when
    acting; it is measured from the policy that acted, here said to be half as likely."""
    original, targets, seen = appo.Actors.batch, appo.appo_targets, []

    def batch(self, *check):
        tensors = original(self, *check)
        tensors["logprob"] -= np.log(2) if self.version >= 5 else 0
        return tensors

    def spy(*arguments):
        seen.append((arguments[2][:-1], arguments[2][-1]))
        return targets(*arguments)

    monkeypatch.setattr(appo.Actors, "batch", batch)
    monkeypatch.setattr(appo, "appo_targets", spy)
    run = train(tmp_path, "--num-actors 0 --update-epochs 1 --num-minibatches 1 --learning-rate 0.1")
    divergence = [row["losses/approx_kl"] for row in run.rows()]
    np.testing.assert_allclose(divergence, [0] * 5 + [1 - np.log(2)] * 5, atol=1e-5)
    for values, next_value in seen:  # the first 8 games go on in the other unroll
        np.testing.assert_allclose(next_value[:8], values[0, 8:], atol=1e-5)
    assert seen[-1][1].std() > 0.01


# ---- Evaluation ------------------------------------------------------------------------------------------------------


def test_exploitability_is_of_the_newest_and_of_the_leagues_average():
    args = parse("--env-id rps --num-actors 0")
    rock, paper, scissors = (constant(args, action) for action in range(3))
    found = appo.measures([{"return": 1.0}, {"return": -0.5}], rock, [rock, paper, scissors], args)
    assert found == {"eval/random/score": 0.5, "eval/random/losses": 0.5, "eval/nash_conv": pytest.approx(2),
                     "eval/nash_conv_average": pytest.approx(0)}  # fmt: skip


def test_a_greedy_evaluation_plays_the_likeliest_action(monkeypatch):
    """And random play any."""
    step, played = appo.MatrixGames.step, []

    def spy(self, actions, games):
        own = self.player[games] == games % 2
        played.append([set(actions[own].tolist()), set(actions[~own].tolist())])
        return step(self, actions, games)

    monkeypatch.setattr(appo.MatrixGames, "step", spy)
    for greedy, own in (("--eval-greedy", {1}), ("", {0, 1, 2})):
        args = parse(f"--env-id rps --num-actors 0 {greedy}")
        agent, weights = appo.acting_agent(args)
        agent.policy.bias.data[1] = 0.1
        rows = appo.evaluate(weights, args)
        assert played == [[own, {0, 1, 2}]] * 2 and {row["return"] for row in rows} == {-1, 0, 1}
        played.clear()


def test_the_evaluation_at_the_end_costs_one_update_at_most(tmp_path):
    """Signals are answered in the middle of an evaluation, and the update before it is kept (USE-02)."""
    original, played = appo.evaluate, []

    def evaluate(*arguments):
        signal.raise_signal(signal.SIGTERM)
        played.append(original(*arguments))

    arguments = "--num-actors 0 --checkpoint-interval 100"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(appo, "evaluate", evaluate)
        train(tmp_path, arguments)
    assert caught.value.code == 75 and Run(tmp_path).state()["update"] == 9 and not played
    assert not (Run(tmp_path).dir / "result.json").exists()
    run = train(tmp_path, arguments)
    assert run.json("result.json")["global_step"] == 800 and len(run.rows()) == 10


# ---- Runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_actors", [1, 2])
def test_a_run_with_actors_leaves_what_is_documented(num_actors, tmp_path):
    more = "--openings 2" if num_actors == 2 else ""
    run = train(tmp_path, f"--num-actors {num_actors}", more)
    rows = run.rows()
    names = {"charts": "episodic_return episodic_length episodes SPS learning_rate update",
             "losses": "policy_loss value_loss entropy approx_kl clipfrac explained_variance grad_norm",
             "async": "policy_lag_mean policy_lag_max policy_lag_sent queue_depth learner_wait_s actor_wait_s dropped",
             "perf": "collect_s update_s dead_steps",
             "curriculum": "opponents newest_opponent effective_opponents games win_rate_mean win_rate_min "
                           "newest_share"}  # fmt: skip
    always = {f"{group}/{name}" for group, text in names.items() for name in text.split()}
    assert all(always <= row.keys() for row in rows) and len(rows) == 10
    assert rows[-1]["global_step"] == 800 and rows[-1]["curriculum/opponents"] >= 4
    measured = {f"eval/{name}" for name in ("return_mean", "length_mean", "random/score", "random/losses")}
    assert measured <= rows[-1].keys()
    assert [(row["level"], row["seat"]) for row in run.rows("eval.jsonl")] == [("random", 0), ("random", 1)]


@contextlib.contextmanager
def stopping_at(update, script=appo):
    """Ends a run in the middle of an update, as a kill would: what is not in a checkpoint is lost."""
    original = script.Actors.batch

    def batch(self, *check):
        if self.version == update:
            raise KeyboardInterrupt
        return original(self, *check)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(script.Actors, "batch", batch)
        yield


@pytest.mark.parametrize(
    ("script", "more"),
    [
        (appo, ""),
        (appo, "--env-id connect_four --openings 3 --opponents fsp"),
        pytest.param(tree, "--env-id leduc_poker --openings 1", marks=openspiel),
    ],
)
def test_the_synchronous_form_repeats_and_resumes_to_the_bit(script, more, tmp_path):
    """SP-05, SP-07: with the snapshots, their records, the draws that wait and the games underway."""
    arguments = "--num-actors 0 --checkpoint-interval 3 --num-steps 3 --total-timesteps 480 --league-size 3", more
    straight = train(tmp_path / "straight", *arguments, script=script)
    with stopping_at(8, script):
        train(tmp_path / "stopped", *arguments, script=script)
    stopped = train(tmp_path / "stopped", *arguments, script=script)
    a, b = ({key: value for key, value in run.state().items() if key not in ("token", "logs")}
            for run in (straight, stopped))  # fmt: skip
    assert len(a["league"]["agents"]) == 3 and a["league"]["next_id"] > 4
    assert a["league"]["records"][:, 2].sum() > 0
    assert_same(a, b)
    assert straight.repeatable() == stopped.repeatable()
    assert straight.rows("eval.jsonl") == stopped.rows("eval.jsonl")
    other = train(tmp_path / "other", *arguments, "--seed 2", script=script)
    assert other.rows()[0]["losses/entropy"] != straight.rows()[0]["losses/entropy"]


def test_a_league_outlives_its_actors(tmp_path):
    """With actor processes new games begin; snapshots and records go on."""
    arguments = "--num-actors 1 --checkpoint-interval 1"
    with stopping_at(6):
        train(tmp_path, arguments)
    before = torch.load(Run(tmp_path).checkpoints()[-1], weights_only=True)["league"]
    with stopping_at(7):
        train(tmp_path, arguments)
    after = torch.load(Run(tmp_path).checkpoints()[-1], weights_only=True)["league"]
    assert len(before["ids"]) == 4 and before["ids"] == after["ids"] and before["records"][:, 2].sum() > 0
    assert all(torch.equal(x, y) for x, y in zip(before["agents"], after["agents"]))
    assert (after["records"][:, 2] >= before["records"][:, 2]).all()


def test_an_actor_that_dies_in_mid_game_ends_the_run_and_says_so(tmp_path):
    killed, original = [], appo.Actors.batch

    def batch(self, *check):
        if self.version == 2:
            os.kill(self.processes[1][0].pid, signal.SIGKILL)
            killed.append(time.monotonic())
            while True:
                original(self, *check)
                self.hand_out()
        return original(self, *check)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(appo.Actors, "batch", batch)
        train(tmp_path, "--num-actors 2")
    assert "actor 1 (process " in caught.value.code and "died with exit code -9" in caught.value.code
    assert time.monotonic() - killed[0] < 10 and Run(tmp_path).json("status.json")["state"] == "failed"


def test_an_actor_that_fails_tells_why():
    """Its own error, also from the middle of a game: here a policy that wants what is not legal."""
    _, args, weights = make_actor("--env-id connect_four --num-steps 50 --num-actors 1")
    league = appo.League(args, weights[0], np.random.SeedSequence(0))
    actors = appo.Actors(partial(failing_actor, args), appo.Actor.layout(args), 1, 1, None, league.deal)
    with contextlib.closing(actors), pytest.raises(SystemExit) as caught:
        actors.start(weights[0], 0)
        for _ in range(5):
            actors.batch()
    assert "actor 0 failed" in caught.value.code and "legal are [0, 1, 2" in caught.value.code
    assert "connect_four, game 0: player 0 took action 9" in caught.value.code


def failing_actor(args, version, index):
    actor = appo.Actor(args, np.random.SeedSequence(0), version, index)
    actor.move = lambda games, actions: actor.envs.step(np.full(len(games), 9), games)
    return actor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env_id": "conect_four"}, "Nearest: connect_four"),
        ({"batch_rollouts": 100}, "--batch-rollouts 100 is no multiple of --envs-per-actor 64: try 128"),
        ({"num_minibatches": 200}, "--num-minibatches 200: it must be a number between 1 and 128"),
        ({"league_size": 1}, "--league-size 1: it must be a number at least 2"),
        ({"openings": 7}, "--openings 7: it must be a number between 0 and 6"),
        ({"openings": 1, "env_id": "rps"}, "--openings 1: it must be a number between 0 and 0"),
        ({"self_play_share": 1.5}, "--self-play-share 1.5: it must be a number between 0 and 1"),
        ({"pfsp_decay": 0.0}, "--pfsp-decay 0.0: it must be"),
        ({"pfsp_power": 0.0}, "--pfsp-power 0.0: it must be"),
        ({"num_actors": 9, "max_policy_lag": 1}, "--max-policy-lag 1: it must be a number at least 4"),
        ({"learning_rate": np.nan}, "--learning-rate nan"),
    ],
)
def test_wrong_arguments_are_named_with_what_works(change, words):
    with pytest.raises(ValueError) as error:
        appo.Args(**change)
    assert words in str(error.value)


@openspiel
def test_a_game_that_is_not_zero_sum_is_refused():
    with pytest.raises(ValueError, match="matrix_pd is not a two-player zero-sum game: 2 players, general_sum"):
        tree.Args(env_id="matrix_pd")


def test_unrolls_with_opponents_that_do_not_fit_are_named():
    args = parse(TINY, "--hidden-size 4096 --league-opponents 8")
    with pytest.raises(SystemExit, match=r"100000 unrolls take \d+ MiB of shared memory .*tasks \d{8}"):
        appo.SharedMemory(appo.Actor.layout(args), 100_000)
