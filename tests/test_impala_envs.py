"""The environments of algos/impala_popart.py: every family behind the one contract, on the real games."""

import csv
import importlib.util
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import envpool
import numpy as np
import pytest

from algos import impala_popart as script

DATA = Path(__file__).parent / "data"
OUTPUTS = ("obs", "reward", "terminated", "truncated", "valid", "starts")
FIRE = 1


def make(env_id, num_envs, seed=0, tasks=None):
    games = script.parse_games(env_id)
    tasks = script.assign_tasks(games, num_envs) if tasks is None else tasks
    return script.MultiTaskEnvs(games, tasks, np.random.SeedSequence(seed).spawn(num_envs))


def roll(envs, actions):
    """Steps with actions (T, E) or (T,), the same for all; returns the outputs by name, each (T, E, ...)."""
    actions = np.broadcast_to(np.asarray(actions).reshape(len(actions), -1), (len(actions), envs.num_envs))
    steps = [envs.step(row) for row in actions]
    rows = [(*outputs, info["valid"], info["starts"]) for *outputs, info in steps]
    return dict(zip(OUTPUTS, map(np.stack, zip(*rows))))


def random_actions(envs, steps, seed=0):
    return np.random.default_rng(seed).integers(envs.num_actions, size=(steps, envs.num_envs))


def start_and_roll(env_id, num_envs, steps, seed=0):
    with closing(make(env_id, num_envs, seed)) as envs:
        return {"first": envs.reset().copy()} | roll(envs, random_actions(envs, steps))


def assert_same(found, expected):
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


# ---- the contract, computed by hand ----------------------------------------------------------------------------------


def test_rows_of_known_chains_restart_one_step_late_with_their_true_last_observation():
    envs = make("probe_envs:Chain-v0,probe_envs:TruncatedChain-v0,probe_envs:ShiftedChain-v0@10", 4)
    assert (envs.obs_shape, envs.obs_dtype, envs.num_actions, envs.frame_skip) == ((3,), np.float32, 3, 1)
    assert envs.tasks.tolist() == [0, 1, 2, 0]
    assert not envs.reset().any()  # all chains begin at 0
    # Action 2 is beyond Chain's two actions and is taken modulo; ShiftedChain asserts that it gets -1, 0 or 1 (ENV-10).
    found = roll(envs, [2, 0, 1, 2, 1, 0, 2, 0])
    state = [1, 2, 3, 0, 1, 2, 3, 0]  # 3 is the true last observation; the step after it is ignored
    block = [[[s * (task == column) for column in range(3)] for task in envs.tasks] for s in state]
    paid, last = np.array([1, 2, 4, 0, 1, 2, 4, 0]), np.array([s == 3 for s in state])
    dead, chain = np.array([s == 0 for s in state]), np.array([1, 0, 1, 1], bool)
    assert_same(found, {
        "obs": block, "reward": np.outer(paid, [1, 1, 10, 1]), "terminated": np.outer(last, chain),
        "truncated": np.outer(last, ~chain), "valid": np.repeat(~dead[:, None], 4, 1),
        "starts": np.repeat(dead[:, None], 4, 1),
    })  # fmt: skip
    assert found["reward"].dtype == np.float64 and found["obs"].dtype == np.float32


def test_an_actor_with_some_of_the_games_sees_the_observations_that_the_others_see():
    games = script.parse_games("mixed")
    space, offsets = script.shared_space(games)
    assert space == ((4 + 6 + 4,), np.float32, 3, 1) and offsets == [0, 4, 10]
    for task, stop in enumerate((4, 10, 14)):
        envs = make("mixed", 2, tasks=[task, task])
        envs.reset()
        found = roll(envs, random_actions(envs, 60))["obs"]
        assert found.shape == (60, 2, 14) and found[..., offsets[task] : stop].any()
        found[..., offsets[task] : stop] = 0
        assert not found.any()


def test_one_game_alone_is_not_padded():
    assert script.shared_space(("CartPole-v1",)) == (((4,), np.float32, 2, 1), [0])


def test_cartpole_x100_pays_100_a_step_and_times_out_at_50000():
    with closing(make("CartPole-v1@100", 1)) as envs:
        obs, total, steps, truncated = envs.reset(), 0, 0, np.zeros(1, bool)
        while not truncated[0]:
            action = (obs[:, 2] + 0.2 * obs[:, 3] + 0.05 * obs[:, 1] + 0.02 * obs[:, 0] > 0).astype(int)
            obs, reward, terminated, truncated, info = envs.step(action)
            assert not terminated[0] and info["valid"][0]
            total, steps = total + reward[0], steps + 1
    assert (total, steps) == (50_000, 500)


# ---- seeds and states ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env_id", "steps"), [("mixed", 150), ("bigfish,coinrun", 30), ("Pong-v5,Breakout-v5", 25)])
def test_seeds_decide_everything_and_differ_between_environments(env_id, steps):
    one, same, other = (start_and_roll(env_id, 6, steps, seed) for seed in (1, 1, 2))
    assert_same(same, one)
    assert not np.array_equal(one["obs"], other["obs"])
    with closing(make(env_id, 6, 1)) as envs:  # the same actions everywhere
        envs.reset()
        obs = roll(envs, np.full(steps, FIRE))["obs"]
    for task in np.unique(envs.tasks):
        assert len({obs[:, i].tobytes() for i in np.flatnonzero(envs.tasks == task)}) > 1


@pytest.mark.parametrize("env_id", ["mixed", "bigfish,chaser,starpilot", "ALE/Pong-v5,ALE/Breakout-v5"])
def test_a_restored_state_goes_on_to_the_bit(env_id):
    if "ALE" in env_id:
        pytest.importorskip("ale_py", reason="an extra: scripts/extras/atari.txt")
    num_envs = 2 if "ALE" in env_id else 6
    envs = make(env_id, num_envs)
    envs.reset()
    for seed in range(2):  # mixed: also with environments that have just ended
        roll(envs, random_actions(envs, 20, seed))
        while env_id == "mixed" and not envs.restart.any():
            roll(envs, random_actions(envs, 1, seed))
        state = envs.state_dict()
        expected = roll(envs, random_actions(envs, 60, seed + 10))
        fresh = make(env_id, num_envs, seed=99)
        fresh.reset()
        assert fresh.load_state_dict(state) is True
        assert_same(roll(fresh, random_actions(envs, 60, seed + 10)), expected)
        fresh.close()
    envs.close()


def test_envpool_says_that_it_cannot_be_restored_and_goes_on_as_it_was(capfd):
    with closing(make("Pong-v5", 2)) as envs, closing(make("Pong-v5", 2)) as twin:
        envs.reset(), twin.reset()
        assert envs.load_state_dict(twin.state_dict()) is False
        assert "envpool cannot restore" in capfd.readouterr().err
        assert_same(roll(envs, [0] * 3), roll(twin, [0] * 3))


# ---- Atari -----------------------------------------------------------------------------------------------------------


def lost_game(env_id):
    """Breakout with nothing but FIRE: number of steps to the end of the game, and the outputs of two more steps."""
    with closing(make(env_id, 1)) as envs:
        envs.reset()
        found = roll(envs, [FIRE] * 150)
    end = int((found["terminated"] | found["truncated"])[:, 0].argmax())
    return end + 1, {name: array[end : end + 3, 0] for name, array in found.items()}


def test_a_lost_life_ends_nothing_and_a_lost_game_terminates_even_in_the_last_step_allowed(monkeypatch):  # ENV-11
    with closing(make("Breakout-v5", 1)) as envs:
        envs.reset()
        lives = []
        for _ in range(150):
            _, _, _, _, info = envs.groups[0][1].envs.step(np.array([FIRE]))
            lives.append(int(info["lives"][0]))
    length, rows = lost_game("Breakout-v5")
    assert sorted(set(lives)) == [0, 1, 2, 3, 4, 5] and lives.index(0) + 1 == length
    assert rows["terminated"].tolist() == [True, False, False] and not rows["truncated"].any()
    assert rows["valid"].tolist() == [True, False, True] and rows["starts"].tolist() == [False, True, False]

    real = envpool.make
    for limit, terminated in ((length - 1, False), (length, True)):  # envpool's own flag says truncated both times
        monkeypatch.setattr(envpool, "make", lambda *a, limit=limit, **k: real(*a, max_episode_steps=limit, **k))
        steps, rows = lost_game("Breakout-v5")
        assert (steps, rows["terminated"][0], rows["truncated"][0]) == (limit, terminated, True)


def test_a_time_limit_cuts_with_lives_left_and_the_next_episode_begins_from_zero(monkeypatch):  # ENV-04
    real = envpool.make
    monkeypatch.setattr(envpool, "make", lambda *args, **kwargs: real(*args, max_episode_steps=10, **kwargs))
    with closing(make("SpaceInvaders-v5", 2)) as envs:
        envs.reset()
        found = roll(envs, [FIRE] * 33)
    cut = np.zeros((33, 2), bool)
    cut[[9, 20, 31]] = True  # 10 steps, the ignored one, 10 steps, ...
    assert_same(found, {"truncated": cut, "terminated": np.zeros((33, 2)), "valid": ~np.roll(cut, 1, 0)})
    assert not found["reward"][~found["valid"]].any()


def test_atari_rewards_are_raw_and_a_factor_in_the_name_multiplies_them():  # ENV-05
    twins = [np.random.SeedSequence(0)] * 2
    with closing(script.MultiTaskEnvs(("SpaceInvaders-v5", "SpaceInvaders-v5@100"), [0, 1], twins)) as envs:
        envs.reset()
        rewards = roll(envs, [FIRE] * 100)["reward"]
    assert set(rewards[:, 0]) - {0} <= {5, 10, 15, 20, 25, 30} and rewards.any()
    np.testing.assert_array_equal(rewards[:, 1], 100 * rewards[:, 0])


def test_all_games_take_all_18_actions_on_four_grey_frames():
    with closing(make("Pong-v5,Freeway-v5", 2)) as envs:  # Freeway knows no FIRE
        assert (envs.obs_shape, envs.obs_dtype, envs.num_actions, envs.frame_skip) == ((4, 84, 84), np.uint8, 18, 4)
        obs = envs.reset()
        found = roll(envs, range(18))["obs"]
        assert obs.dtype == np.uint8 and found.shape == (18, 2, 4, 84, 84)
        assert_same({"older frames": found[1:, :, :3]}, {"older frames": found[:-1, :, 1:]})


def test_ale_py_plays_as_envpool_does_four_frames_a_step():  # ENV-13
    pytest.importorskip("ale_py", reason="an extra: scripts/extras/atari.txt")
    envs = make("ALE/Breakout-v5", 1)
    envs.reset()
    ale = envs.groups[0][1].envs[0].unwrapped.ale
    frames = [ale.getEpisodeFrameNumber()]
    for _ in range(10):
        envs.step(np.array([0]))
        frames.append(ale.getEpisodeFrameNumber())
    assert 1 <= frames[0] <= 31 and np.diff(frames).tolist() == [4] * 10
    assert script.game_space("ALE/Breakout-v5") == script.game_space("Breakout-v5")
    (length, rows), (expected, same) = (lost_game(f"{prefix}Breakout-v5") for prefix in ("ALE/", ""))
    assert length == expected
    assert np.abs(rows.pop("obs")[0].astype(int) - same.pop("obs")[0]).mean() < 1
    assert_same(rows, same)


def test_human_normalised_scores_are_those_of_the_published_table():
    lines = [line for line in (DATA / "atari_human_random.csv").read_text().splitlines() if line[0] != "#"]
    table = list(csv.DictReader(lines))
    assert script.parse_games("atari57") == tuple(row["ale_v5_id"].removeprefix("ALE/") for row in table)
    for row in table:
        random, human = float(row["random"]), float(row["human"])
        for game in (row["ale_v5_id"], row["ale_v5_id"].removeprefix("ALE/")):
            assert script.human_normalized(game, random) == 0 and script.human_normalized(game, human) == 1
            assert script.human_normalized(game, 2 * human - random) == pytest.approx(2)
    assert script.human_normalized("bigfish", 3.0) is None and script.human_normalized("Pong-v5@10", 3.0) is None


# ---- Procgen and DMLab -----------------------------------------------------------------------------------------------


def test_procgen_restarts_in_the_same_step_as_the_game_itself_does():
    with closing(make("bigfish,coinrun", 4)) as envs:
        assert (envs.obs_shape, envs.obs_dtype, envs.num_actions, envs.frame_skip) == ((64, 64, 3), np.uint8, 15, 1)
        first, found = envs.reset(), roll(envs, random_actions(envs, 400))
        actions, index = random_actions(envs, 400), envs.groups[0][0]
        env = type(envs.groups[0][1].env)(num=2, env_name="bigfish", num_threads=0, distribution_mode="easy",
                                          rand_seed=envs.groups[0][1].env.options["rand_seed"])  # fmt: skip
    with closing(env):  # a fresh Procgen pool of the same seed, without any of our code
        np.testing.assert_array_equal(first[index], env.observe()[1]["rgb"])
        for t in range(400):
            env.act(actions[t, index])
            reward, obs, ended = env.observe()
            outputs = {"obs": obs["rgb"], "reward": reward.astype(float), "terminated": ended, "starts": ended}
            assert_same({name: found[name][t, index] for name in outputs}, outputs)
    assert found["terminated"].any() and found["valid"].all() and not found["truncated"].any()


def test_all_16_procgen_games_make_one_pool():
    with closing(make("procgen16", 16)) as envs:
        assert len({obs.tobytes() for obs in envs.reset()}) == 16
        assert roll(envs, range(15))["valid"].all()


def test_dmlab_adapter_drives_the_interface_that_its_documentation_describes(monkeypatch, tmp_path):
    """deepmind_lab cannot be installed here: this stand-in only has the calls of its Python API."""
    (tmp_path / "deepmind_lab.py").write_text(
        textwrap.dedent("""
        import numpy as np

        class Lab:
            def __init__(self, level, observations, config):
                assert level == "contributed/dmlab30/rooms_watermaze" and observations == ["RGB_INTERLEAVED"]
                self.shape = int(config["height"]), int(config["width"]), 3

            def reset(self, seed):
                self.frames = 0

            def step(self, action, num_steps):
                assert action.dtype == np.intc and action.shape == (7,) and self.is_running()
                self.frames += num_steps
                return float(action[3])

            def is_running(self):
                return self.frames < 12

            def observations(self):
                assert self.is_running()
                return {"RGB_INTERLEAVED": np.full(self.shape, self.frames, np.uint8)}

            def close(self):
                pass
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    envs = make("rooms_watermaze", 1)
    assert (envs.obs_shape, envs.num_actions, envs.frame_skip) == ((72, 96, 3), 9, 4)
    envs.reset()
    found = roll(envs, [0, 1, 8, 5, 6])  # forward, backward, fire; ignored; left and forward
    sys.modules.pop("deepmind_lab")
    assert found["obs"][:, 0, 0, 0, 0].tolist() == [4, 8, 8, 0, 4]
    assert found["reward"][:, 0].tolist() == [1, -1, 0, 0, 1]
    assert found["terminated"][:, 0].tolist() == [False, False, True, False, False]
    assert found["valid"][:, 0].tolist() == [True, True, True, False, True] and not found["truncated"].any()


# ---- what was asked, what was found, what to type --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("Pon-v5", "--env-id Pon-v5: there is no such game or suite. Nearest: Pong-v5"),
        ("Pong-v5,Brekout-v5", "--env-id Brekout-v5: there is no such game or suite. Nearest: Breakout-v5"),
        ("bigfsh", "Nearest: bigfish"),
        ("mixd", "Nearest: mixed"),
        ("CartPole-v9", "Nearest: CartPole-v1"),
        ("", "--env-id : there is no such game or suite"),
        ("no_such_module:Env-v0", "No module named 'no_such_module'"),
        ("probe_envs:Chan-v0", "Nearest: .*Chain-v0"),
        ("CartPole-v1,Acrobot-v1,CartPole-v1", "CartPole-v1 is listed more than once"),
        ("CartPole-v1@hundred", "what follows @ must be a number"),
        ("CartPole-v1@nan", "what follows @ must be a number"),
        ("CartPole-v1@inf", "what follows @ must be a number"),
        ("CartPole-v1@", "what follows @ must be a number"),
        ("GymV21Environment-v0", "GymV21Environment-v0 cannot be made: ImportError"),
        ("dmlab30", "rooms_collect_good_objects_train needs deepmind_lab: build it"),
        ("Pong-v5,bigfish", r"Pong-v5 has .*\(4, 84, 84\) uint8 and 18 .*, bigfish has .*\(64, 64, 3\) uint8 and 15"),
        ("probe_envs:TinyImage-v0,bigfish", r"TinyImage-v0 has .*\(8, 8, 3\) uint8 and 2 actions, bigfish has"),
        ("Pendulum-v1", r"its actions are Box\(-2.0, 2.0, \(1,\), float32\); this script takes Discrete"),
        ("probe_envs:ManyActions-v0", "its actions are MultiDiscrete"),
    ],
)  # fmt: skip
def test_games_that_cannot_be_played_are_one_line(env_id, words):
    with pytest.raises(ValueError, match=words) as error:
        script.shared_space(script.parse_games(env_id))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("bigfish", "procgen: pip install --no-deps"),
        ("Pong-v5", "envpool: pip"),
        ("ALE/Pong-v5", "ale_py: scripts/run"),
    ],
)
def test_a_missing_package_is_named_with_what_brings_it(monkeypatch, env_id, words):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"--env-id {env_id} needs {words}"):
        script.parse_games(env_id)


def test_fewer_environments_than_games():
    with pytest.raises(ValueError, match="8 environments .* cannot play 16 games: try --envs-per-actor 16"):
        script.assign_tasks(script.parse_games("procgen16"), 8)
    assert script.assign_tasks(("a", "b", "c"), 5).tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("fault", "words"), [("observation", "observation .*nan"), ("reward", "reward nan")])
def test_what_is_not_finite_names_the_environment_and_its_game(fault, words):
    envs = make(f"probe_envs:Chain-v0,probe_envs:Faulty-{fault}-v0", 4)
    envs.reset()
    with pytest.raises(SystemExit, match=rf"environment 1 \(probe_envs:Faulty-{fault}-v0\) .* not finite: .*{words}"):
        roll(envs, [1] * 9)


def test_an_environment_that_raises_is_named_with_its_step():
    envs = make("probe_envs:Chain-v0,probe_envs:Faulty-raise-v0", 4)
    envs.reset()
    with pytest.raises(RuntimeError, match=r"environment 1, step 7 of the episode with seed \d+: ValueError: boom-42"):
        roll(envs, [1] * 9)
