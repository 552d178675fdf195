"""The environments of algos/impala_popart*.py: three families behind the one contract, on the real games."""

import csv
import importlib.util
from contextlib import closing
from pathlib import Path

import envpool
import numpy as np
import pytest
from probe_envs import ChainEnv

from algos import impala_popart as script
from algos import impala_popart_atari as atari
from algos import impala_popart_procgen as procgen

DATA = Path(__file__).parent / "data"
OUTPUTS = ("obs", "reward", "terminated", "truncated", "final_obs")
FIRE = 1


def make(env_id, num_envs, seed=0, tasks=None, module=script):
    games = module.parse_games(env_id)
    tasks = np.arange(num_envs) % len(games) if tasks is None else tasks
    make_envs = {script: "GymEnvs", atari: "AtariEnvs", procgen: "ProcgenEnvs"}[module]
    return getattr(module, make_envs)(games, tasks, np.random.SeedSequence(seed).spawn(num_envs))


def roll(envs, actions):
    """Steps with actions (T, E) or (T,), the same for all; returns the outputs by name, each (T, E, ...)."""
    actions = np.broadcast_to(np.asarray(actions).reshape(len(actions), -1), (len(actions), len(envs.tasks)))
    rows = [(*outputs, info["final_obs"]) for *outputs, info in map(envs.step, actions)]
    return dict(zip(OUTPUTS, map(np.stack, zip(*rows))))


def random_actions(envs, steps, seed=0, num_actions=2):
    return np.random.default_rng(seed).integers(num_actions, size=(steps, len(envs.tasks)))


def assert_same(found, expected):
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def assert_restarts(found):
    """Where no episode ends, the last observation is the next one; both are copies, which no later step changes."""
    ended = found["terminated"] | found["truncated"]
    assert ended.any() and np.array_equal(found["final_obs"][~ended], found["obs"][~ended])
    assert not np.array_equal(found["final_obs"][ended], found["obs"][ended])


# ---- the contract, computed by hand ----------------------------------------------------------------------------------


def test_rows_of_known_chains_restart_in_the_step_that_ends_them_with_their_true_last_observation():
    """ENV-10."""
    env_id = "probe_envs:Chain-v0,probe_envs:TruncatedChain-v0,probe_envs:ShiftedChain-v0@10"
    assert script.shared_space(script.parse_games(env_id)) == (((3,), np.float32, 3), [0, 1, 2])
    envs = make(env_id, 4)
    assert envs.tasks.tolist() == [0, 1, 2, 0] and not envs.obs.any()  # all chains begin at 0
    # Action 2 is beyond Chain's two actions and is taken modulo; ShiftedChain asserts that it gets -1, 0 or 1.
    found = roll(envs, [2, 0, 1, 2, 1, 0, 2])

    def block(states):
        return [[[s * (task == column) for column in range(3)] for task in envs.tasks] for s in states]

    paid, last = np.array([1, 2, 4, 1, 2, 4, 1]), np.array([0, 0, 1, 0, 0, 1, 0], bool)
    chain = np.array([1, 0, 1, 1], bool)
    assert_same(found, {
        "obs": block([1, 2, 0, 1, 2, 0, 1]), "final_obs": block([1, 2, 3, 1, 2, 3, 1]),
        "reward": np.outer(paid, [1, 1, 10, 1]), "terminated": np.outer(last, chain),
        "truncated": np.outer(last, ~chain),
    })  # fmt: skip
    assert found["reward"].dtype == np.float64 and found["obs"].dtype == np.float32


def test_an_actor_with_some_of_the_games_sees_the_observations_that_the_others_see():
    games = script.parse_games("mixed")
    space, offsets = script.shared_space(games)
    assert space == ((4 + 6 + 4,), np.float32, 3) and offsets == [0, 4, 10]
    for task, stop in enumerate((4, 10, 14)):
        envs = make("mixed", 2, tasks=[task, task])
        found = roll(envs, random_actions(envs, 60))["obs"]
        assert found.shape == (60, 2, 14) and found[..., offsets[task] : stop].any()
        found[..., offsets[task] : stop] = 0
        assert not found.any()


def test_one_game_alone_is_not_padded():
    assert script.shared_space(("CartPole-v1",)) == (((4,), np.float32, 2), [0])


def test_cartpole_x100_pays_100_a_step_and_times_out_at_50000():
    with closing(make("CartPole-v1@100", 1)) as envs:
        obs, total, steps, truncated = envs.obs, 0, 0, np.zeros(1, bool)
        while not truncated[0]:
            action = (obs[:, 2] + 0.2 * obs[:, 3] + 0.05 * obs[:, 1] + 0.02 * obs[:, 0] > 0).astype(int)
            obs, reward, terminated, truncated, _ = envs.step(action)
            assert not terminated[0]
            total, steps = total + reward[0], steps + 1
    assert (total, steps) == (50_000, 500)


# ---- seeds and states ------------------------------------------------------------------------------------------------

FAMILIES = [(script, "mixed", 150), (procgen, "bigfish,coinrun", 30), (atari, "Pong-v5,Breakout-v5", 25)]


@pytest.mark.parametrize(("module", "env_id", "steps"), FAMILIES)
def test_seeds_decide_everything_and_differ_between_environments(module, env_id, steps):
    def start_and_roll(seed):
        with closing(make(env_id, 6, seed, module=module)) as envs:
            return {"first": envs.obs.copy()} | roll(envs, random_actions(envs, steps))

    one, same, other = map(start_and_roll, (1, 1, 2))
    assert_same(same, one)
    assert not np.array_equal(one["obs"], other["obs"])
    with closing(make(env_id, 6, 1, module=module)) as envs:  # the same actions everywhere
        obs = roll(envs, np.full(steps, FIRE))["obs"]
    for task in np.unique(envs.tasks):
        assert len({obs[:, i].tobytes() for i in np.flatnonzero(envs.tasks == task)}) > 1


@pytest.mark.parametrize(("module", "env_id"), [(script, "mixed"), (procgen, "bigfish,chaser,starpilot")])
def test_a_restored_state_goes_on_to_the_bit(module, env_id):
    with closing(make(env_id, 6, module=module)) as envs:
        for seed in range(2):
            roll(envs, random_actions(envs, 20, seed))
            state, before = module.pack(envs.state_dict()), envs.obs.copy()
            expected = roll(envs, random_actions(envs, 60, seed + 10))
            with closing(make(env_id, 6, seed=99, module=module)) as fresh:
                assert fresh.load_state_dict(state).all()
                np.testing.assert_array_equal(fresh.obs, before)
                assert_same(roll(fresh, random_actions(envs, 60, seed + 10)), expected)


def test_a_step_of_four_values_is_an_error():
    """Of (obs, reward, done, info), info would pass for truncated; and so is an observation of another shape."""
    with closing(make("probe_envs:OldStep-v0", 2)) as envs, pytest.raises(RuntimeError, match="not enough values"):
        roll(envs, [0])
    with (
        closing(make("probe_envs:WrongShape-v0", 2)) as envs,
        pytest.raises(RuntimeError, match="array of size 1 into"),
    ):
        roll(envs, [0, 0])


def test_an_environment_that_does_not_repeat_itself_begins_again_and_says_so(capfd, monkeypatch):
    """USE-04."""
    with closing(make("probe_envs:Chain-v0", 2)) as envs:
        roll(envs, [0, 0])
        state = script.pack(envs.state_dict())
        step = ChainEnv.step

        def drifting(self, action):
            obs, *rest = step(self, action)
            return obs + 0.5 * (self is envs.envs[1].unwrapped), *rest

        monkeypatch.setattr(ChainEnv, "step", drifting)
        assert envs.load_state_dict(state).tolist() == [True, False]
    assert capfd.readouterr().err == "note: probe_envs:Chain-v0 does not repeat itself: environment 1 starts anew\n"
    assert envs.obs.tolist() == [[2], [0]] and [len(actions) for actions in envs.actions] == [2, 0]


def test_envpool_says_that_it_cannot_be_restored_and_goes_on_as_it_was(capfd):
    with closing(make("Pong-v5", 2, module=atari)) as envs, closing(make("Pong-v5", 2, module=atari)) as twin:
        assert not envs.load_state_dict(twin.state_dict()).any()
        assert "envpool cannot restore" in capfd.readouterr().err
        assert_same(roll(envs, [0] * 3), roll(twin, [0] * 3))


# ---- Atari -----------------------------------------------------------------------------------------------------------


def lost_game():
    """Breakout with nothing but FIRE: number of steps to the end of the game, and the outputs of it and two more."""
    with closing(make("Breakout-v5", 1, module=atari)) as envs:
        found = roll(envs, [FIRE] * 150)
    end = int((found["terminated"] | found["truncated"])[:, 0].argmax())
    return end + 1, {name: array[end : end + 3, 0] for name, array in found.items()}


def test_a_lost_life_ends_nothing_and_a_lost_game_terminates_even_in_the_last_step_allowed(monkeypatch):
    """ENV-11."""
    with closing(make("Breakout-v5", 1, module=atari)) as envs:
        lives = []
        for _ in range(150):
            _, _, _, _, info = envs.groups[0][1].step(np.array([FIRE]))
            lives.append(int(info["lives"][0]))
    length, rows = lost_game()
    assert sorted(set(lives)) == [0, 1, 2, 3, 4, 5] and lives.index(0) + 1 == length
    assert rows["terminated"].tolist() == [True, False, False] and not rows["truncated"].any()

    real = envpool.make
    for limit, terminated in ((length - 1, False), (length, True)):  # envpool's own flag says truncated both times
        monkeypatch.setattr(envpool, "make", lambda *a, limit=limit, **k: real(*a, max_episode_steps=limit, **k))
        steps, rows = lost_game()
        assert (steps, rows["terminated"][0], rows["truncated"][0]) == (limit, terminated, True)


def test_games_restart_as_envpool_itself_restarts_them_but_without_a_step_that_counts_for_nothing():
    """Against a pool of the same seeds that restarts a step late: the same episodes, to the bit."""
    with closing(make("Breakout-v5", 3, module=atari)) as envs:
        first, found = envs.obs.copy(), roll(envs, [FIRE] * 400)
        seeds = np.random.SeedSequence(0).spawn(3)
    options = {"num_envs": 3, "num_threads": 1, "full_action_space": True, "use_fire_reset": False}
    ints = [int(seed.generate_state(1)[0] % 2**31) for seed in seeds]
    pool = envpool.make("Breakout-v5", env_type="gymnasium", seed=ints, **options)
    np.testing.assert_array_equal(first, pool.reset()[0])
    rows = [[] for _ in range(3)]
    for _ in range(430):
        obs, reward, _, truncated, info = pool.step(np.full(3, FIRE))
        for env, row in enumerate(rows):
            row.append((obs[env].copy(), reward[env], bool(info["terminated"][env])))
    pool.close()
    for env, row in enumerate(rows):
        t, ends = 0, 0
        for k, (obs, reward, terminated) in enumerate(row):
            if t == 400:
                break
            if k and row[k - 1][2]:  # the step that restarts there
                np.testing.assert_array_equal(found["obs"][t - 1, env], obs)
                ends += 1
                continue
            np.testing.assert_array_equal(found["final_obs"][t, env], obs)
            assert (found["reward"][t, env], found["terminated"][t, env]) == (reward, terminated)
            t += 1
        assert t == 400 and ends >= 2
    assert_restarts(found)


def test_a_time_limit_cuts_with_lives_left_and_the_next_episode_begins_from_zero(monkeypatch):
    """ENV-04."""
    real = envpool.make
    monkeypatch.setattr(envpool, "make", lambda *args, **kwargs: real(*args, max_episode_steps=10, **kwargs))
    with closing(make("SpaceInvaders-v5", 2, module=atari)) as envs:
        found = roll(envs, [FIRE] * 33)
    cut = np.zeros((33, 2), bool)
    cut[[9, 19, 29]] = True
    assert_same(found, {"truncated": cut, "terminated": np.zeros((33, 2))})
    assert_restarts(found)


def test_atari_rewards_are_raw():
    """ENV-05."""
    with closing(make("SpaceInvaders-v5", 1, module=atari)) as envs:
        rewards = roll(envs, [FIRE] * 100)["reward"]
    assert set(rewards[:, 0]) - {0} <= {5, 10, 15, 20, 25, 30} and rewards.any()


def test_all_games_take_all_18_actions_on_four_grey_frames():
    with closing(make("Pong-v5,Freeway-v5", 2, module=atari)) as envs:  # Freeway knows no FIRE
        found = roll(envs, range(18))["obs"]
        assert envs.obs.dtype == np.uint8 and found.shape == (18, 2, 4, 84, 84)
        assert_same({"older frames": found[1:, :, :3]}, {"older frames": found[:-1, :, 1:]})


def test_human_normalised_scores_are_those_of_the_published_table():
    lines = [line for line in (DATA / "atari_human_random.csv").read_text().splitlines() if line[0] != "#"]
    table = list(csv.DictReader(lines))
    assert atari.parse_games("atari57") == tuple(row["ale_v5_id"].removeprefix("ALE/") for row in table)
    for row in table:
        random, human, game = float(row["random"]), float(row["human"]), row["ale_v5_id"].removeprefix("ALE/")
        assert atari.human_normalized(game, random) == 0 and atari.human_normalized(game, human) == 1
        assert atari.human_normalized(game, 2 * human - random) == pytest.approx(2)
    assert atari.human_normalized("AirRaid-v5", 3.0) is None


# ---- Procgen ---------------------------------------------------------------------------------------------------------


def test_procgen_restarts_in_the_same_step_as_the_game_itself_does():
    with closing(make("bigfish,coinrun@10", 4, module=procgen)) as envs:
        first, actions = envs.obs.copy(), random_actions(envs, 400, num_actions=15)
        found, groups = roll(envs, actions), envs.groups
        pools = [type(pool)(num=2, env_name=name, num_threads=0, distribution_mode="easy",
                            rand_seed=pool.options["rand_seed"])
                 for (_, pool), name in zip(groups, ("bigfish", "coinrun"))]  # fmt: skip
    for (index, _), pool, scale in zip(groups, pools, (1, 10)):
        with closing(pool) as env:  # a fresh Procgen pool of the same seed, without any of our code
            np.testing.assert_array_equal(first[index], env.observe()[1]["rgb"])
            for t in range(400):
                env.act(actions[t, index])
                reward, obs, ended = env.observe()
                outputs = {"obs": obs["rgb"], "reward": scale * reward.astype(float), "terminated": ended}
                assert_same({name: found[name][t, index] for name in outputs}, outputs)
    assert found["terminated"].any() and not found["truncated"].any()


def test_all_16_procgen_games_make_one_pool():
    with closing(make("procgen16", 16, module=procgen)) as envs:
        assert len({obs.tobytes() for obs in envs.obs}) == 16
        assert roll(envs, range(15))["obs"].shape == (15, 16, 64, 64, 3)


# ---- what was asked, what was found, what to type --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "env_id", "words"),
    [
        (atari, "Pon-v5", "--env-id Pon-v5: there is no such game or suite. Nearest: Pong-v5"),
        (atari, "Pong-v5,Brekout-v5", "--env-id Brekout-v5: there is no such game or suite. Nearest: Breakout-v5"),
        (atari, "Pong-v5,bigfish", "--env-id bigfish: there is no such game or suite"),
        (procgen, "bigfsh", "Nearest: bigfish"),
        (procgen, "bigfish@x", "what follows @ must be a number"),
        (script, "mixd", "Nearest: mixed"),
        (script, "CartPole-v9", "Nearest: CartPole-v1"),
        (script, "", "--env-id  cannot be made"),
        (script, "no_such_module:Env-v0", "No module named 'no_such_module'"),
        (script, "probe_envs:Chan-v0", "cannot be made: .*Did you mean: .*Chain"),
        (script, "CartPole-v1,Acrobot-v1,CartPole-v1", "CartPole-v1 is listed more than once"),
        (script, "CartPole-v1@hundred", "what follows @ must be a number"),
        (script, "CartPole-v1@nan", "what follows @ must be a number"),
        (script, "CartPole-v1@inf", "what follows @ must be a number"),
        (script, "CartPole-v1@", "what follows @ must be a number"),
        (script, "GymV21Environment-v0", "GymV21Environment-v0 cannot be made: ImportError"),
        (script, "CartPole-v1,probe_envs:TinyImage-v0", r"TinyImage-v0 has observations \(8, 8, 3\) uint8"),
        (script, "Pendulum-v1", r"its actions are Box\(-2.0, 2.0, \(1,\), float32\); this script takes Discrete"),
        (script, "probe_envs:ManyActions-v0", "its actions are MultiDiscrete"),
    ],
)  # fmt: skip
def test_games_that_cannot_be_played_are_one_line(module, env_id, words):
    """SYN-13."""
    with pytest.raises(ValueError, match=words) as error:
        module.Args(env_id=env_id)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("module", "env_id", "words"),
    [(procgen, "bigfish", "procgen: pip install --no-deps"), (atari, "Pong-v5", "envpool: pip")],
)
def test_a_missing_package_is_named_with_what_brings_it(monkeypatch, module, env_id, words):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=f"--env-id {env_id} needs {words}"):
        module.parse_games(env_id)


def test_fewer_environments_than_games():
    with pytest.raises(ValueError, match="8 environments .* cannot play 16 games: try --envs-per-actor 16"):
        procgen.Args(env_id="procgen16", envs_per_actor=8)


@pytest.mark.parametrize(("fault", "words"), [("observation", "observation .*nan"), ("reward", "reward nan")])
def test_what_is_not_finite_names_the_environment_and_its_game(fault, words):
    """PPO-16."""
    envs = make(f"probe_envs:Chain-v0,probe_envs:Faulty-{fault}-v0", 4)
    with pytest.raises(SystemExit, match=rf"environment 1 \(probe_envs:Faulty-{fault}-v0\) .* not finite: .*{words}"):
        roll(envs, [1] * 9)


@pytest.mark.parametrize("value", [np.nan, 1e39])
def test_a_first_observation_that_is_not_finite_names_the_environment_and_its_game(value, monkeypatch):
    monkeypatch.setattr(ChainEnv, "reset", lambda self, **options: (np.array([value]), {}))
    with pytest.raises(SystemExit, match=r"environment 0 \(probe_envs:Chain-v0\) gave what is not finite.*step 0 of"):
        make("probe_envs:Chain-v0", 2)


def test_an_environment_that_raises_is_named_with_its_step():
    envs = make("probe_envs:Chain-v0,probe_envs:Faulty-raise-v0", 4)
    with pytest.raises(RuntimeError, match=r"environment 1, step 7 of the episode with seed \d+: ValueError: boom-42"):
        roll(envs, [1] * 9)


def test_an_environment_that_raises_in_reset_is_named_with_its_seed(monkeypatch):
    """USE-06."""
    envs = make("probe_envs:Chain-v0", 2)
    monkeypatch.setattr(ChainEnv, "reset", lambda self, **options: 1 / 0)
    with pytest.raises(RuntimeError, match=r"environment 0, step 0 of the episode with seed \d+: ZeroDivisionError"):
        roll(envs, [1] * 9)
