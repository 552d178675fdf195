"""Task wrappers: environments, classes and rewards swapped, and the real packages."""

import importlib
import resource
import subprocess
import sys
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary
from gymnasium.utils.env_checker import check_env

from algos.ppo_plr import ProcgenLevels
from curricula.core import BoxTaskSpace, DiscreteTaskSpace, TaskSpace
from curricula.task_wrappers import (
    CartPoleTaskWrapper,
    MiniGridTaskWrapper,
    NetHackTaskWrapper,
    ProcgenEnv,
    ProcgenTaskWrapper,
    ReinitTaskWrapper,
    RewardFunctionWrapper,
    SubclassTaskWrapper,
)


def growth(env, tasks, resets=20_000):
    """Bytes of resident memory that `resets` task changes leave behind, after a tenth of them as a warm-up."""

    def play(count):
        for i in range(count):
            env.reset(new_task=tasks[i % len(tasks)])
            env.step(env.action_space.start if isinstance(env.action_space, Discrete) else 0)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    play(resets // 10)
    before = resident()
    play(resets)
    return resident() - before


class Walk(gym.Env):
    """Counts its steps up to `length`; notes the arguments of reset."""

    observation_space, action_space = Box(0, 100, (1,)), Discrete(2)

    def __init__(self, length=3):
        self.length, self.closed, self.resets = length, 0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.resets.append((seed, options))
        self.place = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.place += 1
        return np.full(1, self.place, np.float32), 1.0, self.place >= self.length, False, {}

    def close(self):
        self.closed += 1


def length_of_episode(env, **arguments):
    env.reset(**arguments)
    for steps in range(1, 600):
        obs, reward, terminated, truncated, info = env.step(env.action_space.sample())
        if terminated or truncated:
            return steps, info
    raise AssertionError("no end")


def test_reinit_keeps_one_environment_a_task_and_closes_them_all():
    made, first = [], Walk(9)

    def make(task):
        made.append(Walk(task))
        return made[-1]

    env = ReinitTaskWrapper(first, make, TaskSpace([2, 5, 7]))
    assert length_of_episode(env)[0] == 9 and env.reset()[1]["task"] is None
    for task in (5, 2, 5, 5, 2):
        steps, info = length_of_episode(env, new_task=task, seed=task, options={"a": task})
        assert (steps, info["task"], info["task_completion"]) == (task, task, 1.0)
    assert [walk.length for walk in made] == [5, 2] and env.unwrapped is made[1]
    assert made[0].resets == [(5, {"a": 5})] * 3 and length_of_episode(env)[0] == 2
    env.close()
    assert [walk.closed for walk in (first, *made)] == [1, 1, 1]


def test_reinit_closes_the_rest_where_one_fails_and_the_same_once():
    class Broken(Walk):
        def close(self):
            super().close()
            raise OSError("stuck")

    envs = {1: Walk(1), 2: Broken(2), 3: Walk(3)}
    env = ReinitTaskWrapper(envs[1], envs.get, TaskSpace([1, 2, 3]))
    for task in (2, 3, 1):
        env.reset(new_task=task)
    with pytest.raises(OSError, match="stuck"):
        env.close()
    assert [walk.closed for walk in envs.values()] == [1, 1, 1]


def test_reinit_needs_a_finite_space_and_equal_environments():
    with pytest.raises(ValueError, match="one environment is kept for each task, but BoxTaskSpace.* is infinite"):
        ReinitTaskWrapper(Walk(), Walk, BoxTaskSpace(Box(0, 1, (1,))))
    env = ReinitTaskWrapper(Walk(), lambda task: gym.make(task), TaskSpace(["CartPole-v1"]))
    for _ in range(2):  # it is not kept
        with pytest.raises(ValueError, match=r"env_fn\('CartPole-v1'\) has the observation_space Box\(\[-4.8"):
            env.reset(new_task="CartPole-v1")
    assert length_of_episode(env)[0] == 3 and env.reset()[1]["task"] is None


def test_tasks_change_between_episodes_only():
    env = ReinitTaskWrapper(Walk(), Walk, DiscreteTaskSpace(5))
    env.change_task(2)  # no episode has begun
    env.reset()
    env.step(0)
    with pytest.raises(ValueError, match=r"cannot change to 4 in an episode: use reset\(new_task=4\)"):
        env.change_task(4)
    assert env.task == 2 and env.reset(new_task=4)[1]["task"] == 4  # an episode may be left early
    length_of_episode(env)
    env.change_task(1)
    assert length_of_episode(env)[0] == 1


def test_a_task_from_outside_the_space_is_named():
    walk = Walk()
    for env in (
        ReinitTaskWrapper(walk, Walk, TaskSpace([1, 2])),
        SubclassTaskWrapper(walk, [Walk]),
        RewardFunctionWrapper(walk, {"one": len}),
        CartPoleTaskWrapper(gym.make("CartPole-v1")),
    ):
        for task in (7, "x", (0.5, 0.6)):
            with pytest.raises(ValueError, match="cannot encode"):
                env.reset(new_task=task)
    assert not walk.resets


class Backwards(Walk):
    def step(self, action):
        obs, _, terminated, truncated, info = super().step(action)
        return obs, -1.0, terminated, truncated, info


class Short(Walk):
    def reset(self, **arguments):
        self.length = 1
        return super().reset(**arguments)


def test_subclasses_are_swapped_in_one_environment():
    inner = Walk()
    env = SubclassTaskWrapper(gym.wrappers.OrderEnforcing(inner), [Walk, Backwards, Short], goal=True)
    assert env.reset()[1]["task"] is Walk and env.task_space.tasks == [Walk, Backwards, Short]
    assert env.observation_space == Dict({"observation": Walk.observation_space, "goal": MultiBinary(3)})
    for task, reward, length, place in ((Backwards, -1, 3, 1), (Walk, 1, 3, 0), (Short, 1, 1, 2)):
        obs, info = env.reset(new_task=task, seed=4, options={})
        assert type(inner) is task and info["task"] is task and inner.resets[-1] == (4, {})
        assert obs["goal"].tolist() == np.eye(3)[place].tolist() and env.observation_space.contains(obs)
        obs, got, terminated, _, _ = env.step(0)
        assert (got, terminated, obs["observation"].tolist()) == (reward, length == 1, [1])
    named = SubclassTaskWrapper(Backwards(), {"forth": Walk, "back": Backwards})
    assert named.reset()[1]["task"] == "back"
    assert named.reset(new_task="forth")[1]["task"] == "forth" and named.step(0)[1] == 1
    with pytest.raises(ValueError, match="CartPoleEnv has no base in common with all of Walk, Short: make it of one"):
        SubclassTaskWrapper(gym.make("CartPole-v1"), [Walk, Short])


def test_rewards_are_swapped_also_in_an_episode():
    def slow(obs, action, reward, terminated, truncated, info):
        return np.float32(-obs[0] * reward)

    def ones(obs, action, reward, terminated, truncated, info):
        return action + 10 * terminated

    for functions, tasks in (({"slow": slow, "ones": ones}, ("slow", "ones")), ([slow, ones], (slow, ones))):
        env = RewardFunctionWrapper(Walk(), functions, goal=True)
        assert env.reset()[1]["task"] == tasks[0] and env.task_space.tasks == list(tasks)
        obs, reward, _, _, info = env.step(1)
        assert (reward, info["env_reward"], info["task"]) == (-1, 1, tasks[0]) and type(reward) is float
        env.change_task(tasks[1])
        obs, reward, _, _, info = env.step(1)
        assert (reward, info["task"], obs["goal"].tolist()) == (1, tasks[1], [0, 1])
        _, reward, terminated, _, info = env.step(0)
        assert (reward, terminated, info["env_reward"], info["task_completion"]) == (10, True, 1, 1.0)
        assert env.reset(new_task=tasks[0])[0]["goal"].tolist() == [1, 0]


def test_a_function_may_change_the_task_but_not_this_reward():
    env = RewardFunctionWrapper(Walk(), {"a": lambda *step: env.change_task("b") or 1, "b": lambda *step: 2})
    env.reset()
    assert [(step[1], step[4]["task"]) for step in (env.step(0), env.step(0))] == [(1, "a"), (2, "b")]


def test_box_goal_is_the_vector():
    env = CartPoleTaskWrapper(gym.make("CartPole-v1"), goal=True)
    obs, _ = env.reset(new_task=np.float32([-0.1, 0.2]), seed=0)
    assert obs["goal"].tolist() == np.float32([-0.1, 0.2]).tolist() and env.observation_space.contains(obs)
    assert env.step(0)[0]["goal"].tolist() == obs["goal"].tolist()
    with pytest.raises(ValueError, match="cannot encode None"):
        CartPoleTaskWrapper(gym.make("CartPole-v1"), goal=True).reset()


def test_cartpole_starts_in_the_range():
    env, plain = CartPoleTaskWrapper(gym.make("CartPole-v1")), gym.make("CartPole-v1")
    for task in ((-0.02, 0.02), (0.1, 0.3), (0.3, 0.1), np.float32([-0.3, -0.3])):
        low, high = np.sort(np.float32(task))
        starts = np.stack([env.reset(new_task=task, seed=s)[0] for s in range(200)])
        assert (starts >= low).all() and (starts <= high).all()
        assert np.ptp(starts) >= 0.95 * (high - low)
        expected = plain.reset(seed=7, options={"low": float(low), "high": float(high)})[0]
        np.testing.assert_allclose(env.reset(seed=7)[0], expected)  # the same task again, the seed passed on
    assert np.array_equal(CartPoleTaskWrapper(plain).reset(seed=3)[0], gym.make("CartPole-v1").reset(seed=3)[0])
    env = CartPoleTaskWrapper(gym.make("CartPole-v1", max_episode_steps=8), DiscreteTaskSpace(2, [(0, 0), (-0.1, 0.1)]))
    obs, info = env.reset(new_task=(0, 0))
    assert obs.tolist() == [0] * 4 and info["task"] == (0, 0)
    assert [env.step(i % 2)[4]["task_completion"] for i in range(8)] == [i / 8 for i in range(1, 9)]
    env.reset()
    assert env.step(0)[4]["task_completion"] == 1 / 8


def test_cartpole_and_reinit_leak_nothing():
    """SYN-14."""
    assert growth(CartPoleTaskWrapper(gym.make("CartPole-v1")), [(-0.1, 0.1), (0.0, 0.2), (-0.3, 0.3)]) < 10e6
    envs = ReinitTaskWrapper(Walk(), lambda task: gym.make("CartPole-v1"), DiscreteTaskSpace(4))
    envs._first = gym.make("CartPole-v1")
    assert growth(envs, range(4)) < 10e6


MINIGRID = "MiniGrid-SimpleCrossingS9N1-v0"


def test_minigrid_plays_the_layout_of_the_task():
    pytest.importorskip("minigrid", reason="scripts/test brings minigrid")
    env = MiniGridTaskWrapper(gym.make(f"minigrid:{MINIGRID}"), TaskSpace(range(100, 140)), goal=True)
    layout = lambda env: (env.unwrapped.grid.encode().tobytes(), env.unwrapped.agent_dir)  # noqa: E731
    layouts = {}
    for task in (100, 117, 100, 139, 117):
        obs, info = env.reset(new_task=task, seed=5, options={})
        assert info["task"] == task and np.flatnonzero(obs["goal"]).tolist() == [task - 100]
        fresh = gym.make(f"minigrid:{MINIGRID}")
        assert np.array_equal(obs["image"], fresh.reset(seed=task)[0]["image"])
        assert layouts.setdefault(task, layout(env)) == layout(env) == layout(fresh)
        assert env.reset()[1]["task"] == task and layout(env) == layouts[task]
    assert len(set(layouts.values())) == 3
    unset = MiniGridTaskWrapper(gym.make(f"minigrid:{MINIGRID}"))
    unset.reset(seed=139)
    assert unset.task_space.num_tasks == 200 and layout(unset) == layouts[139]


def test_minigrid_completion_is_success():
    env = MiniGridTaskWrapper(gym.make("minigrid:MiniGrid-Empty-5x5-v0"))
    env.reset(new_task=1)
    ends = [env.step(action)[2:] for action in (2, 2, 1, 2, 2)]  # along two walls, to the goal in the corner
    assert [end[0] for end in ends] == [False] * 4 + [True]
    assert [end[2]["task_completion"] for end in ends] == [0, 0, 0, 0, 1]
    env = MiniGridTaskWrapper(gym.make("minigrid:MiniGrid-Empty-5x5-v0", max_steps=3))
    assert length_of_episode(env, new_task=1)[1]["task_completion"] == 0


def play(env, actions):
    """Frames, rewards and ends, until the first end."""
    steps = []
    for action in actions:
        obs, reward, terminated, _, info = env.step(int(action))
        steps.append((obs.copy(), reward, terminated))
        if terminated:
            break
    return steps, info


@pytest.mark.parametrize("game", ["coinrun", "maze"])
def test_procgen_plays_the_exact_level(game):
    """CUR-07."""
    env, slots = ProcgenTaskWrapper(game, DiscreteTaskSpace(300)), ProcgenLevels(game, 1)
    actions = np.random.default_rng(1).integers(15, size=300)
    first_frames = {}
    for level in (7, 250, 7, 0):
        obs, info = env.reset(new_task=level, seed=3)
        slots.set_level(0, level)
        assert info["task"] == level and np.array_equal(obs, slots.obs[0]) and env.observation_space.contains(obs)
        assert np.array_equal(first_frames.setdefault(level, obs), obs)
        for obs, reward, terminated in play(env, actions)[0]:
            frames, rewards, ends, _ = slots.step(np.array([actions[0]]))
            actions = np.roll(actions, -1)
            assert (reward, terminated) == (rewards[0], ends[0])
            assert terminated or np.array_equal(obs, frames[0])
        assert np.array_equal(env.reset()[0], first_frames[level])
    assert len({frame.tobytes() for frame in first_frames.values()}) == 3
    env.close()
    slots.close()


def test_procgen_completion_frames_and_errors():
    env = ProcgenTaskWrapper(ProcgenEnv("coinrun"), 5)
    assert env.reset()[1]["task"] == 0 and env.task_space.num_tasks == 5
    assert ProcgenTaskWrapper(env.env, 2**31 - 1).reset()[1]["task"] == 0  # at once: no list of all levels
    before = env.reset(new_task=1)[0]
    kept = before.copy()
    env.step(8)
    assert np.array_equal(before, kept) and env.render().shape == (64, 64, 3)  # the frames are the user's own
    rng, completed = np.random.default_rng(0), {}
    for level in range(5):  # right and jump more than other things
        env.reset(new_task=level)
        steps, info = play(env, rng.choice([7, 8, 8, 8, 4], size=1000))
        completed[level] = info["task_completion"], steps[-1][1]
    assert all(completion == (reward > 0) for completion, reward in completed.values())
    assert {completion for completion, _ in completed.values()} == {0.0, 1.0}
    env.close()
    with pytest.raises(ValueError, match="wraps a ProcgenEnv or the name of a game, found <.*CartPole"):
        ProcgenTaskWrapper(gym.make("CartPole-v1"))


def test_procgen_env_is_a_gymnasium_environment():
    env = ProcgenEnv("bigfish", level=3)
    check_env(env, skip_render_check=True)
    env.close()


def test_importing_loads_no_environment_and_a_missing_one_is_named():
    code = """
import sys
import curricula.task_wrappers as wrappers
assert not {"nle", "minigrid", "procgen", "gym3", "pettingzoo", "torch"} & set(sys.modules)
for name, make in {"nle": wrappers.NetHackTaskWrapper, "procgen": lambda: wrappers.ProcgenEnv("coinrun")}.items():
    sys.modules[name] = sys.modules[name + ".env"] = sys.modules[name + ".env.tasks"] = None  # as if not installed
    try:
        make()
    except ImportError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    nethack, procgen = done.stdout.splitlines()
    assert nethack.startswith("nle.env.tasks cannot be imported") and "scripts/run --extra nethack SCRIPT" in nethack
    assert procgen.startswith("procgen.env cannot be imported") and "scripts/run SCRIPT brings it" in procgen


@pytest.fixture
def nle_tasks():
    pytest.importorskip("nle", reason="NetHack: scripts/test --extra nethack")
    return importlib.import_module("nle.env.tasks")


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def test_nethack_swaps_its_seven_tasks_at_reset(nle_tasks):
    env, rng = NetHackTaskWrapper(goal=True), np.random.default_rng(0)
    assert env.task_space.tasks == list(NetHackTaskWrapper.TASKS) and len(env.task_space.tasks) == 7
    game = env.unwrapped
    for place, (task, name) in reversed(list(enumerate(NetHackTaskWrapper.TASKS.items()))):
        if task == "gold":
            continue  # below: it is made with other options
        fresh = getattr(nle_tasks, name)()
        obs, info = env.reset(new_task=task, seed=11)
        fresh.seed(core=11, disp=11, reseed=False, lgen=11)
        expected, _ = fresh.reset()
        assert env.unwrapped is game and type(game).__name__ == name and info["task"] == task
        assert np.flatnonzero(obs.pop("goal")).tolist() == [place] and same(obs, expected)
        for action in rng.integers(23, size=300):
            obs, *outcome, info = env.step(action)
            expected, *other, _ = fresh.step(action)
            obs.pop("goal")
            assert outcome == other and same(obs, expected) and info["task"] == task
            if outcome[1]:
                break
        fresh.close()
    env.close()


def test_nethack_gold_pays_for_gold(nle_tasks):
    env, fresh = NetHackTaskWrapper("NetHackGold-v0"), nle_tasks.NetHackGold()
    env.reset(new_task="scout", seed=1)
    env.reset(new_task="gold", seed=12)
    fresh.seed(core=12, disp=12, reseed=False, lgen=12)
    fresh.reset()
    for action in np.random.default_rng(5).integers(1, 17, size=250):
        obs, *outcome, info = env.step(action)
        expected, *other, _ = fresh.step(action)
        assert outcome == other and same(obs, expected)
    assert obs["blstats"][13] == 10 and 0.005 < info["task_completion"] <= 0.01  # gold, less the time penalty
    env.close()
    fresh.close()


def test_nethack_seeds(nle_tasks):
    env = NetHackTaskWrapper()
    chars = lambda **arguments: env.reset(**arguments)[0]["chars"].tobytes()  # noqa: E731
    played = [chars(seed=4), chars(), chars(new_task="eat"), chars(seed=5)]
    assert len(set(played)) == 4
    assert [chars(seed=4), chars(), chars(), chars(seed=5)] == played
    assert chars(seed=6) != NetHackTaskWrapper().reset()[0]["chars"].tobytes()  # NLE's own random start
    env.close()
    env = NetHackTaskWrapper(seeds=[3, 2**40])
    assert env.task_space.num_tasks == 14 and env.reset()[1]["task"] == ("score", 3)
    maps = {task: chars(new_task=task) for task in (("score", 3), ("scout", 2**40), ("eat", 3))}
    assert maps["score", 3] == maps["eat", 3] != maps["scout", 2**40]
    assert chars(new_task=("oracle", 2**40), seed=1) == chars() == maps["scout", 2**40]  # the task's seed decides
    assert NetHackTaskWrapper(seeds=4).task_space.num_tasks == 28
    env.close()


def test_nethack_starts_as_a_new_game(nle_tasks):
    env = NetHackTaskWrapper(nle_tasks.NetHackScore(penalty_mode="linear"))  # grows with the steps that take no time
    rewards = []
    for _ in range(2):
        env.reset(seed=0)
        rewards.append([env.step(0)[1] for _ in range(3)])
    assert rewards[0] == rewards[1] == [-0.01, -0.02, -0.03]
    env.close()


def test_nethack_observations_are_the_users_own(nle_tasks):
    for copy in (True, False):
        env = NetHackTaskWrapper(copy=copy)
        first, _ = env.reset(seed=0)
        kept = {name: array.copy() for name, array in first.items()}
        frames = [env.step(action)[0] for action in (1, 2, 3, 4)]
        assert same(first, kept) is copy
        assert (len({frame["blstats"].tobytes() for frame in frames}) > 1) is copy
        env.close()


def test_nethack_completion(nle_tasks):
    env = NetHackTaskWrapper()
    env.reset(new_task="staircase", seed=0)
    game, status = env.unwrapped, nle_tasks.NetHackStaircase.StepStatus
    game._is_episode_end = lambda observation: status.TASK_SUCCESSFUL  # as if on the stairs
    _, reward, terminated, _, info = env.step(1)
    assert (terminated, info["task_completion"]) == (True, 1.0) and reward > 0.9
    del game._is_episode_end
    env.reset(new_task="staircase", seed=0)
    game._max_episode_steps = 3
    assert [env.step(1)[4]["task_completion"] for _ in range(3)] == [0, 0, 0]  # ended, but not by success
    game._max_episode_steps = 5000
    env.reset(new_task="scout", seed=0)
    rewards, completions = zip(*[(step[1], step[4]["task_completion"]) for step in map(env.step, [1, 2, 3, 4] * 10)])
    np.testing.assert_allclose(completions, np.clip(np.cumsum(rewards) / 1000, 0, 1))
    assert completions[-1] > 0 and env.reset()[1]["task_completion"] == 0 and env.step(1)[4]["task_completion"] < 0.3
    env.close()


def test_nethack_wraps_the_seven_only(nle_tasks):
    with pytest.raises(ValueError, match="wraps one of NetHackScore, .*NetHackScout, found <.*CartPole"):
        NetHackTaskWrapper("CartPole-v1")
    with pytest.raises(ValueError, match="found <.*NetHackChallenge"):
        NetHackTaskWrapper("nle:NetHackChallenge-v0")
    with pytest.raises(ValueError, match="a task space is"):
        NetHackTaskWrapper(seeds=[])


def test_nethack_leaks_nothing(nle_tasks):
    """SYN-14."""
    env = NetHackTaskWrapper()
    assert growth(env, list(NetHackTaskWrapper.TASKS), resets=200) < 10e6
    env.close()


def test_wrappers_work_in_vector_environments():
    make = [partial(CartPoleTaskWrapper, gym.make("CartPole-v1")) for _ in range(3)]
    envs = gym.vector.SyncVectorEnv(make)
    obs, infos = envs.reset(seed=[1, 2, 3])
    assert obs.shape == (3, 4) and infos["task_completion"].tolist() == [0, 0, 0]
    envs.close()
