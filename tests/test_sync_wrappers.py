"""Curricula and environments in other processes: every task and every update once and in order, every wait ends."""

import contextlib
import gc
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Text, Tuple
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from test_sync import START, start

from curricula.core import Curriculum, MultiDiscreteTaskSpace, PettingZooTaskWrapper, TaskSpace, TaskWrapper
from curricula.domain_randomization import DomainRandomization
from curricula.manual import Manual
from curricula.plr_async import AsyncPrioritizedLevelReplay
from curricula.sequential import SequentialCurriculum
from curricula.sync import SyncComponents
from curricula.sync_envs import GymnasiumSyncWrapper, PettingZooSyncWrapper
from curricula.sync_learner import make_multiprocessing_curriculum

pytestmark = pytest.mark.filterwarnings("ignore:environment .* is gone without close")


class Count(gym.Env):
    """`length` steps an episode; step t has the observation 100 * task + t, always the same array, and reward t."""

    observation_space, action_space = Box(-1e6, 1e6, (2,), np.float32), Discrete(2)

    def __init__(self, length=3):
        self.length, self.obs, self.level = length, np.zeros(2, np.float32), 0

    def reset(self, *, seed=None, options=None):
        self.t, self.obs[:] = 0, 100 * self.level
        return self.obs, {"seed": seed, "options": options}

    def step(self, action):
        self.t += 1
        self.obs += 1
        return self.obs, np.float32(self.t), self.t == self.length, False, {}


class Level(TaskWrapper):
    def change_task(self, new_task):
        self.task = self.unwrapped.level = new_task


class Book(Curriculum):
    """Tasks 0, 1, 2, ... in turn, and a log of all that it is told: (env_id, kind, ...)."""

    def __init__(self, task_space=10**6, steps=False, observations=False, pause=0.0, seed=None):
        super().__init__(task_space, seed=seed)
        self.requires_step_updates, self.requires_observations = steps, observations
        self.given, self.log, self.pause = itertools.count(), [], pause

    def sample(self, k=1):
        return [self._encoding(next(self.given) % self.num_tasks) for _ in range(k)]

    def update_on_step_batch(self, steps, env_id=None):
        assert steps
        time.sleep(self.pause)
        self.log += [(env_id, "step", *step) for step in steps]

    def update_on_episode(self, *episode, env_id=None):
        time.sleep(self.pause)
        self.log.append((env_id, "episode", *episode))

    def update_task_progress(self, *progress, env_id=None):
        self.log.append((env_id, "progress", *progress))

    def told(self, env_id, kind):
        return [entry[2:] for entry in self.log if entry[:2] == (env_id, kind)]


def join(workers, seconds=30):
    for worker in workers:
        worker.join(seconds)
        assert not worker.is_alive() and getattr(worker, "exitcode", 0) == 0


def episode(env):
    env.reset()
    while not any(env.step(0)[2:4]):
        pass


def play(components, env_ids, episodes, length=3, **settings):
    """Steps its environments in turn to the end of their episodes."""
    space, envs = components.task_space, []
    for env_id in env_ids:
        envs.append(GymnasiumSyncWrapper(Level(Count(length)), space, components, env_id=env_id, **settings))
    for _ in range(episodes):
        for env in envs:
            episode(env)
    for env in envs:
        env.close()


@pytest.mark.parametrize(
    "method,num_envs,workers,episodes,steps,observations",
    [
        ("thread", 1, 1, 50, True, True),
        ("thread", 8, 8, 10, False, False),
        ("thread", 8, 8, 10, True, False),
        ("fork", 1, 1, 50, False, False),
        ("fork", 2, 2, 50, True, False),
        ("fork", 4, 4, 30, True, True),
        ("fork", 8, 8, 30, False, False),
        ("fork", 8, 8, 30, True, False),
        ("spawn", 8, 2, 10, False, False),
        ("spawn", 8, 2, 10, True, True),
        ("forkserver", 8, 2, 10, True, False),
        ("fork", 128, 4, 10, False, False),
        ("fork", 128, 4, 5, True, False),
    ],
)
def test_every_task_is_received_once_and_every_update_applied_once_in_order(
    method, num_envs, workers, episodes, steps, observations
):
    length, book = 7, Book(steps=steps, observations=observations)
    curriculum = make_multiprocessing_curriculum(book, max_envs=num_envs, timeout=30, ring_bytes=4096)
    args = [(curriculum.components, range(i, num_envs, workers), episodes, length) for i in range(workers)]
    join([start(method, play, *arg) for arg in args])
    curriculum.stop()  # at once: nothing is lost
    ended = [entry for entry in book.log if entry[1] == "episode"]
    tasks = [entry[4] for entry in ended]
    assert len(tasks) == len(set(tasks)) == num_envs * episodes  # none lost, none twice
    assert max(tasks) < num_envs * (episodes + 2)  # buffer_size ahead, not more
    for env_id in range(num_envs):
        mine = book.told(env_id, "episode")
        assert [task for _, _, task, _ in mine] == sorted(task for _, _, task, _ in mine) and len(mine) == episodes
        assert [(total, steps, progress) for total, steps, _, progress in mine] == [(28.0, length, 1.0)] * episodes
        rows = book.told(env_id, "step")
        assert len(rows) == (episodes * length if steps else 0)
        if steps:
            assert [row[0] for row in rows] == [task for _, _, task, _ in mine for _ in range(length)]
            assert [row[2] for row in rows] == [*range(1, length + 1)] * episodes
            assert [row[3] for row in rows] == [t == length - 1 for t in range(length)] * episodes
        for t, row in enumerate(rows):
            wanted = 100 * row[0] + t % length  # what the agent acted on, not what came of it
            assert np.array_equal(row[1], [wanted] * 2) if observations else row[1] is None
    where = [place for place, *entry in book.log if entry[0] == "episode"]
    assert Counter(where) == dict.fromkeys(range(num_envs), episodes)


def test_a_step_record_holds_what_the_agent_acted_on_and_the_last_one_what_came_after():
    for batch_size in (1, 2, 100):
        book = Book(TaskSpace(["a", "b", "c"]), steps=True, observations=True)
        with make_multiprocessing_curriculum(book, start=False) as curriculum:

            class Named(TaskWrapper):
                def change_task(self, new_task):
                    self.task, self.unwrapped.level = new_task, "abc".index(new_task)

            env = GymnasiumSyncWrapper(Named(Count()), book.task_space, curriculum.components, batch_size=batch_size)
            for _ in range(2):
                episode(env)
            curriculum.pump()
        kinds = [entry[1] for entry in book.log]
        assert kinds == ["step", "step", "step", "episode"] * 2
        task, obs, reward, terminated, truncated, info, progress = book.told(0, "step")[4]
        assert (task, reward, terminated, truncated, info, progress) == (1, 2.0, False, False, {}, 0.0)
        assert [type(x) for x in (reward, terminated, truncated, progress)] == [float, bool, bool, float]
        assert obs.tolist() == [101, 101] and obs.dtype == np.float32 and obs.flags.writeable
        task, obs, reward, terminated, truncated, info, progress = book.told(0, "step")[5]
        assert (obs.tolist(), reward, terminated, truncated, progress) == ([102, 102], 3.0, True, False, 1.0)
        assert list(info) == ["final_obs"] and info["final_obs"].tolist() == [103, 103]
        assert book.told(0, "episode") == [(6.0, 3, 0, 1.0), (6.0, 3, 1, 1.0)]
        assert [type(x) for x in book.told(0, "episode")[0]] == [float, int, int, float]


class Rich(Count):
    """Observations of many parts, one of them without a shape."""

    observation_space = Dict({"map": Box(0, 255, (2, 3), np.uint8), "more": Tuple([Discrete(9), Box(-1, 1, ())])})

    def reset(self, **kwargs):
        return self.rich(super().reset(**kwargs)[0]), {}

    def step(self, action):
        obs, *rest = super().step(action)
        return self.rich(obs), *rest

    def rich(self, obs):
        t = int(obs[0]) % 100
        return {"map": np.full((2, 3), t, np.uint8), "more": (t, np.float32(t / 8))}


def test_observations_of_many_parts_keep_their_structure():
    book = Book(steps=True, observations=True)
    with make_multiprocessing_curriculum(book, start=False) as curriculum:
        episode(GymnasiumSyncWrapper(Level(Rich()), TaskSpace(10**6), curriculum.components, batch_size=2))
    observations = [row[1] for row in book.told(0, "step")] + [book.told(0, "step")[-1][5]["final_obs"]]
    for t, obs in enumerate(observations):
        assert list(obs) == ["map", "more"] and isinstance(obs["more"], tuple)
        assert obs["map"].tolist() == [[t] * 3] * 2 and obs["map"].dtype == np.uint8
        assert obs["more"][0] == t and obs["more"][1] == np.float32(t / 8)


def test_an_episode_that_is_cut_off_ends_truncated_and_is_no_episode():
    for cut in ("reset", "close"):
        for batch_size in (1, 2, 100):
            book = Book(steps=True, observations=True)
            with make_multiprocessing_curriculum(book) as curriculum:
                env = GymnasiumSyncWrapper(
                    Level(Count()), TaskSpace(10**6), curriculum.components, batch_size=batch_size
                )
                env.reset()
                env.step(0)
                env.step(0)
                getattr(env, cut)()
                if cut == "reset":
                    env.step(0)
                    assert env.get_wrapper_attr("task") == 1  # it took the next task
            rows = [(row[0], row[3], row[4], "final_obs" in row[5]) for row in book.told(0, "step")]
            assert rows[:2] == [(0, False, False, False), (0, False, True, True)]
            assert book.told(0, "step")[1][5]["final_obs"].tolist() == [2, 2]
            assert len(rows) == 2 and not book.told(0, "episode")  # its one step after the reset was not sent


class Stubborn(Count):
    level = 0


class Picky(TaskWrapper):
    """Plays 0 in place of odd tasks, and from the second step on the next task."""

    def change_task(self, new_task):
        self.task = 0 if new_task % 2 else new_task

    def step(self, action):
        outcome = super().step(action)
        if self.unwrapped.t == 2:
            self.task = 7
        return outcome


def test_the_task_that_is_played_is_the_one_reported():
    book = Book(steps=True)
    with make_multiprocessing_curriculum(book, start=False) as curriculum:
        env = GymnasiumSyncWrapper(Picky(Count()), TaskSpace(10**6), curriculum.components)
        env.reset()
        assert env.reset()[1]["task"] == 0  # task 1 was refused
        infos = [env.step(0)[4] for _ in range(3)]
    assert [info["task"] for info in infos] == [0, 0, 7]
    assert [row[0] for row in book.told(0, "step")] == [0, 0, 7]
    assert [entry[2] for entry in book.told(0, "episode")] == [7]


def test_a_played_task_outside_the_space_is_named():
    with make_multiprocessing_curriculum(Book(5), start=False) as curriculum:
        env = GymnasiumSyncWrapper(Picky(Count()), TaskSpace(5), curriculum.components)
        env.reset()
        env.step(0)
        env.step(0)
        with pytest.raises(ValueError, match=r"cannot encode 7: it is not in TaskSpace\(Discrete\(5\)"):
            env.step(0)


class Scored(AsyncPrioritizedLevelReplay):
    """Writes down what it scores: (task, rewards, terminated)."""

    def __init__(self):
        super().__init__(10, None, lambda agent, obs: obs["observation"][:, 0] / 1e3, seed=0)
        self.scored = []

    def update_from_rollout(self, tasks, rewards, *rest, terminated, **options):
        self.scored.append((int(tasks[0, 0]), rewards.ravel().tolist(), bool(terminated[-1, 0])))
        super().update_from_rollout(tasks, rewards, *rest, terminated=terminated, **options)


@pytest.mark.parametrize("how", ["lost", "reset", "completed", "reset after completion"])
def test_steps_of_an_episode_never_join_those_of_another_task(how):
    book = Scored()
    with make_multiprocessing_curriculum(book, start=False) as curriculum:
        settings = {"change_task_on_completion": "compl" in how, "batch_size": 1, "env_id": 0}
        space, task_env = TaskSpace(10), Half(Count(6), goal=Box(0, 1e6, (1,), np.int64))
        env = GymnasiumSyncWrapper(task_env, space, curriculum.components, **settings)
        tasks = [env.reset()[1]["task"]]
        env.step(0)
        env.step(0)
        if how == "lost":
            del env
            gc.collect()
            env = GymnasiumSyncWrapper(task_env, space, curriculum.components, **settings)
        if how != "completed":
            tasks.append(env.reset()[1]["task"])
        while True:
            *_, terminated, _, info = env.step(0)
            tasks += [info["task"]] * (tasks[-1] != info["task"])
            if terminated:
                break
        curriculum.pump()
    assert [task for task, *_ in book.scored] == tasks[how == "lost" :]
    pairs, whole = [([1, 2], True), ([3, 4], True), ([5, 6], True)], [([1, 2, 3, 4, 5, 6], True)]
    wanted = {"lost": whole, "reset": [([1, 2], False), *whole], "completed": pairs}.get(how, [pairs[0], *pairs])
    assert [(rewards, terminated) for _, rewards, terminated in book.scored] == wanted


class Half(Level):
    """Done with a task after two steps, of eight in all; tells the task."""

    def _task_completion(self, obs, reward, terminated, truncated, info):
        return float(self.unwrapped.t % 2 == 0)

    def _encode_goal(self):
        return np.array([self.task])

    def step(self, action):
        obs, *rest = super().step(action)
        return obs, *rest


def test_a_task_completed_within_an_episode_is_reported_and_replaced():
    book = Book(steps=True)
    with make_multiprocessing_curriculum(book, start=False) as curriculum:
        task = Half(Count(6), goal=Box(0, 1e6, (1,), np.int64))
        for changes in (False, True):
            env = GymnasiumSyncWrapper(
                task, TaskSpace(10**6), curriculum.components, env_id=int(changes), change_task_on_completion=changes
            )
            env.reset()
            tasks, goals = [], []
            for _ in range(6):
                obs, *_, info = env.step(0)
                tasks.append(info["task"])
                goals.append(obs["goal"].item())
            first = tasks[0]
            if changes:
                tail = [first + 2, first + 3]  # one more was drawn ahead for the environment
                assert tasks == [first, first, first + 1, first + 1, first + 2, first + 2], tail
                assert goals == [first, first + 1, first + 1, first + 2, first + 2, first + 2]
            else:
                assert tasks == goals == [first] * 6
    first = book.told(1, "episode")[0][2] - 2
    assert book.told(1, "progress") == [(first, 1.0), (first + 1, 1.0)]  # the last one is the episode's own
    assert book.told(1, "episode") == [(21.0, 6, first + 2, 1.0)]
    kinds = [entry[1] for entry in book.log if entry[0] == 1]
    assert kinds == ["step", "step", "progress"] * 2 + ["step", "step", "episode"]
    assert not book.told(0, "progress") and book.told(0, "episode") == [(21.0, 6, 0, 1.0)]


def test_after_a_completed_task_the_agent_sees_and_reports_the_new_goal():
    class Shrunk(Half):
        def observation(self, obs):
            return super().observation(obs / 2)

    class Bare(gym.Env):
        """The documented interface, and no more."""

        def __init__(self, env):
            self.env, self.observation_space, self.change_task = env, env.observation_space, env.change_task
            self.reset, self.step, self.metadata = env.reset, env.step, {}

    book = Book(steps=True, observations=True)
    with make_multiprocessing_curriculum(book, start=False) as curriculum:
        for env_id, wrap in enumerate((lambda env: env, Bare)):
            inner = wrap(Shrunk(Count(6), goal=Box(0, 1e6, (1,), np.int64)))
            settings = {"env_id": env_id, "change_task_on_completion": True}
            env = GymnasiumSyncWrapper(inner, TaskSpace(10**6), curriculum.components, **settings)
            seen = [env.reset()[0]]
            seen += [env.step(0)[0] for _ in range(6)]
        curriculum.pump()
        assert [obs["observation"][0] - seen[0]["observation"][0] for obs in seen] == [t / 2 for t in range(7)]
    for env_id in range(2):
        rows = book.told(env_id, "step")
        goals = [row[1]["goal"].item() for row in rows]
        assert len(rows) == 6 and (goals == [row[0] for row in rows]) == (env_id == 0)


def test_an_agent_that_is_gone_is_reported_for_the_task_that_it_played():
    """SP-10."""

    class HalfPair(PettingZooTaskWrapper):
        def _task_completion(self, *outcome):
            return float(self.env.t % 2 == 0)

    book = Book()
    with make_multiprocessing_curriculum(book, start=False) as curriculum:
        settings = {"change_task_on_completion": True}
        env = PettingZooSyncWrapper(HalfPair(Pair()), TaskSpace(10**6), curriculum.components, **settings)
        env.reset()
        while env.agents:
            env.step({agent: 0 for agent in env.agents})
    assert book.told(0, "episode") == [(3.0, 2, 0, 1.0)] and not book.told(0, "progress")  # agent a leaves after 2
    for agent, (total, length) in {1: (-10.0, 4), 2: (-9.0, 3)}.items():
        assert book.told(agent, "progress") == [(0, 1.0)]
        assert book.told(agent, "episode") == [(total, length, 1, 1.0)]


@pytest.mark.parametrize("how", ["reset", "lost", "resumed"])
def test_a_sequential_curriculum_forgets_draws_whose_episodes_never_end(how):
    make = lambda: SequentialCurriculum(  # noqa: E731
        [DomainRandomization(TaskSpace(2), seed=i) for i in range(2)], ["tasks>=100"], TaskSpace(2)
    )
    state, sequential = None, make()
    for _ in range(30):
        curriculum = make_multiprocessing_curriculum(sequential, start=False)
        if state:
            curriculum.load_state_dict(state)
        for _ in range(1 if how == "resumed" else 4):
            env = make_env(curriculum.components, env_id=0)
            for _ in range(4 if how == "resumed" else 1):
                env.reset()
                env.step(0)
            if how == "lost":
                del env
                gc.collect()
        state = curriculum.state_dict()
        assert len(sequential._drawn[0]) <= 2 and not sequential._unplayed
        curriculum.stop()
        sequential = make()
    curriculum = make_multiprocessing_curriculum(sequential, start=False)
    curriculum.load_state_dict(state)
    env = make_env(curriculum.components, env_id=0)
    while sequential.metrics()["stage"] == 0:
        env.reset()
    for _ in range(20):
        episode(env)
    curriculum.stop()
    assert sequential.metrics()["stage_episodes"] >= 20 - 2  # two were drawn ahead


def test_the_agents_of_an_environment_play_one_draw_of_a_sequential_curriculum():
    sequential = SequentialCurriculum([[0], [0]], ["episodes>=9"], TaskSpace(1))
    with make_multiprocessing_curriculum(sequential, start=False) as curriculum:
        env = PettingZooSyncWrapper(PettingZooTaskWrapper(Pair()), TaskSpace(1), curriculum.components)
        counted = []
        for _ in range(6):
            env.reset()
            while env.agents:
                env.step({agent: 0 for agent in env.agents})
            curriculum.pump()
            counted.append((sequential.metrics()["stage"], sequential.metrics()["stage_episodes"]))
    assert counted == [(0, 3), (0, 6), (1, 0), (1, 0), (1, 3), (1, 6)]  # the fourth was drawn before the end


def test_a_manual_curriculum_is_played_to_its_last_task_and_waited_for():
    space = TaskSpace(["a", "b", "c"])
    with make_multiprocessing_curriculum(Manual(space), timeout=20) as curriculum:
        env = GymnasiumSyncWrapper(TaskWrapper(Count()), space, curriculum.components)
        curriculum.add_tasks(["c"])
        assert env.reset()[1]["task"] == 2
        threading.Timer(0.3, curriculum.add_tasks, [["b", "a"]]).start()
        assert [env.reset()[1]["task"] for _ in range(2)] == [1, 0]
    with make_multiprocessing_curriculum(Manual(space), timeout=0.5) as curriculum:
        env = GymnasiumSyncWrapper(TaskWrapper(Count()), space, curriculum.components)
        with pytest.raises(TimeoutError, match=r"no task for 0.5 s .*: it has no task to give; .* add_tasks"):
            env.reset()
        sequential = SequentialCurriculum([Manual(space), "a"], ["tasks>=1"], space)
    with make_multiprocessing_curriculum(sequential, timeout=20) as curriculum:
        env = GymnasiumSyncWrapper(TaskWrapper(Count()), space, curriculum.components, buffer_size=3)
        threading.Timer(0.3, lambda: curriculum.curriculum_list[0].add_tasks(["c"])).start()
        assert [env.reset()[1]["task"] for _ in range(2)] == [2, 0]


SPACES = [
    TaskSpace(["easy", "hard", ("a", 1)]),
    TaskSpace(Discrete(5, start=-2)),
    TaskSpace(MultiDiscrete([3, 2], start=[1, -1])),
    TaskSpace(MultiDiscrete([1000] * 9)),  # more tasks than an int64 counts
    TaskSpace(Box(-1, 1, (3,), np.float32)),
    TaskSpace(Box(-1, 1, (2, 2), np.float64)),
    TaskSpace(Box(-(2**62), 2**62, (2,), np.int64)),
    TaskSpace(Box(-1, 1, (), np.float64)),
    TaskSpace(Tuple([Discrete(3), Box(0, 1, (2,)), MultiDiscrete([4, 4])])),
    TaskSpace(Dict({"seed": Discrete(2**40), "gap": Tuple([Box(0, 1, (1,)), Discrete(2)])})),
    TaskSpace(Dict({"seed": Discrete(7), "kind": Discrete(2)})),
]


def same(a, b):
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and getattr(a, "dtype", 0) == getattr(b, "dtype", 0) and np.array_equal(a, b)


class Draws(Book):
    def sample(self, k=1):
        self.drawn = [*getattr(self, "drawn", []), *(self.task_space.draw(self.rng) for _ in range(k))]
        return self.drawn[-k:]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("method", ["thread", "fork"])
def test_encodings_of_any_kind_travel_exactly(space, method):
    book = Draws(space)
    with make_multiprocessing_curriculum(book) as curriculum:
        join([start(method, plain, curriculum.components, 5)])
    got = [entry[2] for entry in book.told(0, "episode")]
    assert len(got) == 5 and all(map(same, book.drawn, got)), (book.drawn, got)


def plain(components, episodes):
    env = GymnasiumSyncWrapper(TaskWrapper(Count()), components.task_space, components)
    for _ in range(episodes):
        _, info = env.reset()
        assert same(env.get_wrapper_attr("task"), components.task_space.decode(info["task"]))
        episode_of = env.step
        while not episode_of(0)[2]:
            pass
    env.close()


def test_seed_and_options_pass_through():
    with make_multiprocessing_curriculum(Book(), start=False) as curriculum:
        env = GymnasiumSyncWrapper(Level(Count()), TaskSpace(10**6), curriculum.components)
        assert env.reset(seed=5, options={"x": 1})[1] == {
            "seed": 5,
            "options": {"x": 1},
            "task": 0,
            "task_completion": 0.0,
        }


# Places.


def hold(components, path, env_id=None):
    env = GymnasiumSyncWrapper(Level(Count(10**9)), components.task_space, components, env_id=env_id)
    env.reset()
    env.step(0)
    Path(f"{path}.new").write_text(str(env.get_wrapper_attr("task")))
    Path(f"{path}.new").rename(path)
    time.sleep(60)


def until(condition, seconds=20):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "not in time"
        time.sleep(0.01)


@pytest.mark.parametrize("method", START)
def test_a_killed_worker_is_named_and_its_place_and_tasks_go_to_the_next(method, tmp_path):
    book = Book()
    with make_multiprocessing_curriculum(book, max_envs=2, timeout=10) as curriculum:
        other = start("fork", hold, curriculum.components, tmp_path / "other", 0)
        worker = start(method, hold, curriculum.components, tmp_path / "task", 1)
        until(lambda: (tmp_path / "task").exists() and (tmp_path / "other").exists())
        curriculum.check()
        late = GymnasiumSyncWrapper(Level(Count()), TaskSpace(10**6), curriculum.components)
        with pytest.raises(
            ValueError, match=rf"all 2 places for environments are taken \(by the processes .*{worker.pid}"
        ):
            late.reset()
        text = rf"environment 1 \(process {worker.pid}\) is gone without close\(\): its episode underway"
        with pytest.warns(RuntimeWarning, match=text):
            worker.kill()
            worker.join()
            time.sleep(1.1)
            curriculum.pump()
        with pytest.raises(RuntimeError, match=text):
            curriculum.check()
        waiting = curriculum.state_dict()["waiting"][1]
        assert len(waiting) == 1
        late.reset()
        assert late.get_wrapper_attr("task") == waiting[0]  # the one that was played is lost
        curriculum.check()
        episode(late)
        late.close()
        curriculum.pump()
        lost = {int((tmp_path / "task").read_text()), int((tmp_path / "other").read_text())}
        done = {entry[2] for entry in book.told(1, "episode")}
        drawn = set(range(next(book.given)))
        assert len(done) == 1 and not lost & done
        assert drawn == lost | done | {waiting[0]} | {
            t for ts in curriculum.state_dict()["waiting"].values() for t in ts
        }
        other.kill()
        other.join()


def play_for_ever(components, env_ids):
    play(components, env_ids, 10**9)


def test_workers_killed_at_any_place_lose_the_episode_underway_and_nothing_else():
    book = Book(steps=True)
    with make_multiprocessing_curriculum(book, max_envs=4, timeout=10, ring_bytes=2048) as curriculum:
        for generation in range(6):
            workers = [start("fork", play_for_ever, curriculum.components, [i, i + 2]) for i in range(2)]
            until(lambda: len(book.log) > 400 * (generation + 1))  # noqa: B023
            for worker in workers:
                worker.kill()
                worker.join()
        join([start("fork", play, curriculum.components, range(4), 3)])
        curriculum.check()
    tasks = [entry[4] for entry in book.log if entry[1] == "episode"]
    drawn = next(book.given)
    assert len(tasks) == len(set(tasks)) and drawn - len(tasks) <= 4 * 6 + 4 * 2  # killed underway, still waiting
    for env_id in range(4):
        mine = book.told(env_id, "episode")
        assert [m[:2] for m in mine] == [(6.0, 3)] * len(mine)
        rows = Counter(row[0] for row in book.told(env_id, "step"))
        assert all(rows[entry[2]] == 3 for entry in mine)


def test_every_loss_of_a_place_is_told():
    with make_multiprocessing_curriculum(Book(), start=False) as curriculum:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(4):
                env = make_env(curriculum.components, env_id=5)
                env.reset()
                del env
                gc.collect()
            curriculum._look = 0.0  # pump() looks for the lost once a second: now
            curriculum.pump()
        texts = [str(w.message) for w in caught if "gone without close" in str(w.message)]
    assert len(texts) == 4 and all(text.startswith("environment 5 (process ") for text in texts)
    assert [text[-23:] for text in texts[1:]] == [f" (loss {n} of this place)" for n in (2, 3, 4)]


def fail_in_step(components):
    class Fails(Count):
        def step(self, action):
            raise ZeroDivisionError("boom-7")

    env = GymnasiumSyncWrapper(Level(Fails()), components.task_space, components)
    env.reset()
    env.step(0)


def test_the_traceback_of_a_worker_whose_environment_raised_reaches_the_main_process(capfd):
    with make_multiprocessing_curriculum(Book()) as curriculum:
        worker = start("fork", fail_in_step, curriculum.components)
        worker.join(20)
        with pytest.raises(RuntimeError, match=r"(?s)is gone without close.*It failed before:\n.*in step.*boom-7$"):
            curriculum.check()


def hold_and_fork(components, path):
    env = make_env(components, env_id=0)
    env.reset()
    if child := os.fork():
        Path(f"{path}.new").write_text(str(child))
        Path(f"{path}.new").rename(path)
    time.sleep(60)
    os._exit(0)


def test_a_place_that_a_child_of_a_dead_worker_holds_is_named(tmp_path):
    with make_multiprocessing_curriculum(Book()) as curriculum:
        worker = start("fork", hold_and_fork, curriculum.components, tmp_path / "child")
        until((tmp_path / "child").exists)
        worker.kill()
        worker.join()
        try:
            text = rf"in the process {worker.pid} \(which is gone; a child that it forked still holds the place"
            with pytest.raises(ValueError, match=text):
                make_env(curriculum.components, env_id=0).reset()
            with pytest.raises(RuntimeError, match="environment 0 .* is gone without close"):
                curriculum.check()
        finally:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_a_place_is_taken_at_the_first_reset_and_given_back_by_close():
    with make_multiprocessing_curriculum(Book(), max_envs=2) as curriculum:
        make = lambda **settings: GymnasiumSyncWrapper(  # noqa: E731
            Level(Count()), TaskSpace(10**6), curriculum.components, **settings
        )
        unused = [make() for _ in range(5)]
        for env in unused[:2]:
            episode(env)
        with pytest.raises(ValueError, match=f"all 2 places .* {os.getpid()}.* larger max_envs"):
            unused[2].reset()
        with pytest.raises(ValueError, match=f"environment 1 is there already, in the process {os.getpid()}"):
            make(env_id=1).reset()
        for env_id in (-1, 2):
            with pytest.raises(ValueError, match=f"env_id {env_id} is not in 0..1"):
                make(env_id=env_id).reset()
        unused[0].close()
        unused[0].close()
        episode(unused[2])
        curriculum.check()
        unused[1].close()
        episode(unused[0])  # elsewhere than before


def test_bad_arguments_are_named():
    with make_multiprocessing_curriculum(Book(TaskSpace(["a", "b"]), steps=True, observations=True)) as curriculum:
        components, space = curriculum.components, TaskSpace(["a", "b"])
        grids = [MultiDiscreteTaskSpace([2, 2], [["n", "s"], names]) for names in (["e", "w"], ["w", "e"])]
        other = make_multiprocessing_curriculum(Book(grids[0]), start=False)
        with pytest.raises(ValueError, match="is not the curriculum's"):
            GymnasiumSyncWrapper(Level(Count()), grids[1], other.components)
        copy = MultiDiscreteTaskSpace([2, 2], [["n", "s"], ["e", "w"]])
        GymnasiumSyncWrapper(Level(Count()), copy, other.components)
        other.stop()
        for wrong in (TaskSpace(["a", "c"]), TaskSpace(3), TaskSpace(2)):
            with pytest.raises(ValueError, match="is not the curriculum's TaskSpace"):
                GymnasiumSyncWrapper(Level(Count()), wrong, components)
        with pytest.raises(ValueError, match="a task space is a list of tasks, .* found None"):
            GymnasiumSyncWrapper(Level(Count()), None, components)
        GymnasiumSyncWrapper(Level(Count()), ["a", "b"], components)
        with pytest.raises(ValueError, match="is not the curriculum's TaskSpace"):
            GymnasiumSyncWrapper(Level(Count()), [0, 1, 2], components)
        with pytest.raises(TypeError, match="takes a Curriculum, found None"):
            make_multiprocessing_curriculum(None)
        with pytest.raises(TypeError, match="takes no task: wrap it in a TaskWrapper"):
            GymnasiumSyncWrapper(Count(), space, components)
        with pytest.raises(TypeError, match=r"is the \.components of make_multiprocessing_curriculum's .* Curriculum"):
            GymnasiumSyncWrapper(Level(Count()), space, curriculum)
        for settings in ({"batch_size": 0}, {"buffer_size": 0}, {"buffer_size": 17}):
            with pytest.raises(ValueError, match=f"found .*{next(iter(settings))}={next(iter(settings.values()))}"):
                GymnasiumSyncWrapper(Level(Count()), space, components, **settings)
        text, big = Count(), Count()
        text.observation_space, big.observation_space = Text(5), Box(0, 1, (2**21,))
        with pytest.raises(ValueError, match="have no fixed size"):
            GymnasiumSyncWrapper(Level(text), space, components)
        with pytest.raises(ValueError, match=r"a step of 8388640 bytes does not fit .* ring_bytes=67109120 or more"):
            GymnasiumSyncWrapper(Level(big), space, components)
    wrong = [{"max_envs": 0}, {"max_envs": 2.5}, {"ring_bytes": -1}]
    for settings in wrong + [{"timeout": seconds} for seconds in (0, float("nan"), float("inf"))]:
        with pytest.raises(ValueError, match=f"{next(iter(settings))}={next(iter(settings.values()))}"):
            make_multiprocessing_curriculum(Book(), **settings)
    with pytest.raises(ValueError, match="Book requires observations, which come with steps"):
        make_multiprocessing_curriculum(Book(observations=True))
    other = make_multiprocessing_curriculum(Book(), start=False)
    with pytest.raises(ValueError, match=r"Book\.requires_step_updates is True, its components were made for"):
        type(other)(Book(steps=True), other.components)
    other.stop()


def test_progress_outside_its_range_is_named():
    for wrong in (-0.1, 1.5, float("nan"), None, "half"):

        class Off(Level):
            def step(self, action):
                *outcome, info = super().step(action)
                return *outcome, info | {"task_completion": wrong}  # noqa: B023

        with make_multiprocessing_curriculum(Book(), start=False) as curriculum:
            env = GymnasiumSyncWrapper(Off(Count()), TaskSpace(10**6), curriculum.components)
            env.reset()
            with pytest.raises(ValueError, match=f"task_completion {wrong!r} of the task 0 is outside"):
                env.step(0)


def test_an_environment_that_tells_no_task_is_named():
    class Silent(Level):
        def reset(self, **arguments):
            return super().reset(**arguments)[0], {}

    with make_multiprocessing_curriculum(Book(), start=False) as curriculum:
        env = GymnasiumSyncWrapper(Silent(Count()), TaskSpace(10**6), curriculum.components)
        with pytest.raises(ValueError, match="told no task: its info needs 'task'"):
            env.reset()


def test_a_step_without_a_reset_is_an_error():
    with make_multiprocessing_curriculum(Book(), start=False) as curriculum:
        env = GymnasiumSyncWrapper(Level(Count(1)), TaskSpace(10**6), curriculum.components)
        episode(env)
        with pytest.raises(RuntimeError, match=r"the episode is over, or has not begun: reset\(\)"):
            env.step(0)


def test_an_unpicklable_task_is_named_and_a_lambda_travels():
    lock = threading.Lock()
    curriculum = make_multiprocessing_curriculum(Book(TaskSpace([lock, "b"])))
    with pytest.raises(
        TypeError,
        match="(?s)^the task <unlocked .* cannot go to another process .*pickle.* look them up in change_task",
    ):
        start("spawn", play, curriculum.components, [0], 1)
    with pytest.raises(TypeError, match=r"stays in its process: give the others its \.components"):
        start("spawn", play, curriculum, [0], 1)
    curriculum.stop()
    with make_multiprocessing_curriculum(Book(TaskSpace([lambda: 1, lambda: 2]))) as curriculum:
        worker = start("spawn", hold_one, curriculum.components)
        join([worker])
        assert len(curriculum.log) == 1


def hold_one(components):
    env = GymnasiumSyncWrapper(TaskWrapper(Count()), components.task_space, components)
    episode(env)
    assert env.get_wrapper_attr("task")() == 1
    env.close()


# Faults: each ends in time and names its cause.


class Boom(Book):
    """Fails at the 4th draw or at the first update."""

    def __init__(self, where):
        super().__init__()
        self.where = where

    def sample(self, k=1):
        tasks = super().sample(k)
        if self.where == "sample" and max(tasks) >= 3:
            raise ZeroDivisionError("boom-42")
        return tasks

    def update_on_episode(self, *episode, env_id=None):
        if self.where == "update":
            raise ZeroDivisionError("boom-42")


def play_until_it_fails(components, path, buffer_size):
    env = GymnasiumSyncWrapper(Level(Count()), components.task_space, components, buffer_size=buffer_size)
    try:
        while True:
            episode(env)
    except BaseException as error:
        Path(f"{path}.new").write_text(f"{type(error).__name__}: {error}")
        Path(f"{path}.new").rename(path)


@pytest.mark.parametrize("where", ["sample", "update"])
@pytest.mark.parametrize("method", [*START, "thread"])
def test_a_failure_of_the_curriculum_reaches_every_environment_and_the_main_process(where, method, tmp_path):
    curriculum = make_multiprocessing_curriculum(Boom(where), timeout=60)
    args = [(curriculum.components, tmp_path / str(i), i + 1) for i in range(2)]
    workers = [start(method, play_until_it_fails, *arg) for arg in args]
    join(workers, 20)  # far less than the time-out
    for i in range(2):
        text = (tmp_path / str(i)).read_text()
        assert text.startswith(f"RuntimeError: environment {text[26]}: the curriculum failed:\nTraceback ")
        assert f"in {'sample' if where == 'sample' else 'update_on_episode'}" in text
        assert text.rstrip().endswith("ZeroDivisionError: boom-42")
    for call in (lambda: curriculum.sample(k=1), curriculum.metrics, curriculum.pump, curriculum.check):
        with pytest.raises(RuntimeError, match="(?s)the curriculum failed:\nTraceback.*boom-42") as error:
            call()
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    curriculum.stop()  # it was raised already
    curriculum = make_multiprocessing_curriculum(Boom("sample"))
    late = GymnasiumSyncWrapper(Level(Count()), TaskSpace(10**6), curriculum.components, buffer_size=5)
    with pytest.raises(RuntimeError, match="environment 0: the curriculum failed:(?s:.*)boom-42"):
        late.reset()
    with pytest.raises(RuntimeError, match="boom-42"):
        curriculum.stop()  # the first call since
    late.close()
    curriculum.stop()


class Outside(Book):
    def sample(self, k=1):
        return [7] * k


class Few(Book):
    def sample(self, k=1):
        return [1]


@pytest.mark.parametrize(
    "book,text",
    [
        (Outside(5), r"7 has no position in TaskSpace\(Discrete\(5\)\)"),
        (Outside(TaskSpace(Box(0, 1, (2,)))), r"7 is not in TaskSpace\(Box"),
        (Few(5), r"Few.sample\(k=2\) returned 1 tasks"),
    ],
)
def test_a_wrong_draw_is_named(book, text):
    curriculum = make_multiprocessing_curriculum(book, start=False)
    env = GymnasiumSyncWrapper(TaskWrapper(Count()), curriculum.components.task_space, curriculum.components)
    with pytest.raises(RuntimeError, match=text):
        env.reset()
    with pytest.raises(RuntimeError, match=text):
        curriculum.stop()


SCRIPT = """
import os, signal, sys, threading, time
sys.path[:0] = ["tests", "."]
from test_sync_wrappers import *

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run where it is ignored
    curriculum = make_multiprocessing_curriculum({book}, timeout={timeout})
    Process = multiprocessing.get_context({method!r}).Process  # no daemons: the interpreter's end waits for them
    workers = [Process(target={worker}, args=(curriculum.components, *args)) for args in {args}]
    [worker.start() for worker in workers]
    print(os.getpid(), *(worker.pid for worker in workers), flush=True)
    {then}
"""


def script(tmp_path, book="Book()", timeout=60, method="fork", worker="play", args=(([0], 2),), then="pass"):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(book=book, timeout=timeout, method=method, worker=worker, args=args, then=then))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, str(path)], cwd=Path(__file__).parents[1], **pipes)


def gone(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, 0)
        return False
    return True


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_failing_curriculum_ends_the_script_with_its_traceback(method, tmp_path):
    worker, args = "play_until_it_fails", [(str(tmp_path / str(i)), 1) for i in range(2)]
    then = "[worker.join() for worker in workers]; curriculum.stop(); print('on')"
    process = script(tmp_path, "Boom('update')", method=method, worker=worker, args=args, then=then)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "on" not in out
    assert "ZeroDivisionError: boom-42" in err and err.count("in update_on_episode") == 2  # the cause, and its text
    assert all("boom-42" in (tmp_path / str(i)).read_text() for i in range(2))


def test_a_failure_that_main_does_not_look_at_is_in_the_exit_code(tmp_path):
    then = "[worker.join() for worker in workers]; print('on')"
    process = script(
        tmp_path, "Boom('update')", worker="play_until_it_fails", args=[(str(tmp_path / "0"), 1)], then=then
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1 and out.endswith("on\n") and "ZeroDivisionError: boom-42" in err


INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize(
    "how,code,method",
    [("print('end')", 0, "fork"), (INTERRUPT, -2, "fork"), ("1 / 0", 1, "fork"), ("1 / 0", 1, "spawn")],
)
def test_the_end_of_the_main_process_stops_the_curriculum_and_its_environments(how, code, method, tmp_path):
    then = "until(lambda: curriculum.log); curriculum.curriculum.pause = 0.01; " + how
    process = script(tmp_path, method=method, worker="play_for_ever", args=(([0],),), then=then)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code
    until(lambda: gone(process))  # spawn's resource tracker ends a moment later
    assert "EOFError: environment 0: the curriculum was stopped" in err
    assert err.count("Traceback") == 1 + (code != 0)


def test_ctrl_c_does_not_wait_for_a_busy_curriculum(tmp_path):
    then = "until(lambda: curriculum.components._words[SyncComponents.BUSY]); time.sleep(0.2); "
    process = script(tmp_path, "Book(pause=50)", then=f"curriculum.HURRY = 1; {then}{INTERRUPT}")
    _, err = process.communicate(timeout=25)
    assert process.returncode != 0 and "the curriculum's thread is busy for 1 s: its updates are not applied" in err


@pytest.mark.parametrize(
    "method,victim",
    [*itertools.product(["fork", "spawn"], ["learner", "worker"]), ("forkserver", "learner"), ("fork", "all")],
)
def test_kill_9_leaves_nothing_in_dev_shm_and_nobody_hangs(method, victim, tmp_path):
    then = "until(lambda: {entry[0] for entry in curriculum.log} == {0, 1}); print('on', flush=True); "
    then += "workers[0].join(); curriculum.check()" if victim == "worker" else "time.sleep(60)"
    args = [(str(tmp_path / str(i)), 1) for i in range(2)]
    process = script(tmp_path, "Book(pause=0.001)", 60, method, "play_until_it_fails", args, then)
    learner, *workers = map(int, process.stdout.readline().split())
    assert process.stdout.readline() == "on\n"
    maps = [line for line in Path(f"/proc/{learner}/maps").read_text().splitlines() if "curriculum" in line]
    assert maps and all(line.endswith("/memfd:curriculum (deleted)") for line in maps)  # it never had a name
    for pid in {"learner": [learner], "worker": workers[:1], "all": [learner, *workers]}[victim]:
        os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    until(lambda: gone(process))
    if victim == "learner":
        for i in range(2):
            assert (tmp_path / str(i)).read_text().endswith(f"the curriculum's process {learner} died")
    if victim == "worker":
        assert process.returncode == 1 and f"(process {workers[0]}) is gone without close()" in err
        assert "EOFError" in (tmp_path / "1").read_text()
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in (learner, *workers))]


def fill(components, path, episodes):
    env = GymnasiumSyncWrapper(Level(Count(1)), components.task_space, components, buffer_size=16)
    try:
        for done in range(episodes):
            episode(env)
            Path(path).write_text(str(done + 1))
        env.close()
    except TimeoutError as error:
        Path(path).write_text(str(error))


def test_a_full_ring_holds_up_the_environment_and_keeps_what_it_has(tmp_path):
    book = Book()
    with make_multiprocessing_curriculum(book, start=False, timeout=1, ring_bytes=512) as curriculum:
        worker = start("fork", fill, curriculum.components, tmp_path / "text", 100)
        while not curriculum.pump():  # the first 16 tasks
            time.sleep(0.01)
        worker.join(10)
        text = "the ring of 512 bytes is full, for 1.0 s (since "
        assert (
            f"(in process {os.getpid()}; is it started?) has read no update, {text}" in (tmp_path / "text").read_text()
        )
        curriculum.pump()
        count = len(book.log)
        assert count >= 5 and [entry[4] for entry in book.log] == list(range(count))


def test_an_environment_waits_for_its_task_until_the_time_out():
    with make_multiprocessing_curriculum(Book(pause=1.5), timeout=0.5, start=False) as curriculum:
        curriculum.components.serve = None  # as in another process
        text = (
            rf"environment 0: the curriculum \(in process {os.getpid()}; is it started\?\) has drawn no task for 0\.5 s"
        )
        with pytest.raises(TimeoutError, match=text):
            make_env(curriculum.components).reset()


def test_a_busy_curriculum_is_called_busy():
    class Slow(Book):
        def sample(self, k=1):
            time.sleep(1)
            return super().sample(k)

    with make_multiprocessing_curriculum(Slow(), timeout=0.5) as curriculum:
        with pytest.raises(TimeoutError, match=r"drawn no task for 0.5 s .*: it has been busy for 0\.[3-9] s"):
            make_env(curriculum.components).reset()
        time.sleep(1)


def test_a_ring_filled_to_its_last_byte_keeps_every_message():
    with make_multiprocessing_curriculum(Book(), start=False, timeout=0.1, ring_bytes=240) as curriculum:
        ring = curriculum.components
        ring.serve = None

        def send(agent, size):  # 48 of them are the message's head
            ring.send(3, ring.ASK, agent, (bytes([agent]) * (size - 56), bytes([agent]) * 8))

        def read():
            _, place, _, agent, _, _, *where = ring.messages()[0]
            body = ring.read(place, *where)
            assert set(body) == {agent}
            return agent, len(body) + 48

        send(1, 80)
        send(2, 80)
        assert [read(), read()] == [(1, 80), (2, 80)]
        for agent in (3, 4, 5):  # full; two of them lie at the beginning
            send(agent, 80)
        for size in (56, 80, 104):  # 104: more than there is to the ring's end
            with pytest.raises(TimeoutError, match="environment 3: .* the ring of 240 bytes is full, for 0.1 s"):
                send(6, size)
        assert read() == (3, 80)
        with pytest.raises(TimeoutError):
            send(6, 104)
        assert [read(), read()] == [(4, 80), (5, 80)]
        send(7, 120)
        assert read() == (7, 120) and ring.messages() == []
        with pytest.raises(
            ValueError, match="a message of 128 bytes exceeds half the ring: ring_bytes=240 is too small"
        ):
            send(8, 128)


def test_what_is_sent_while_the_learner_stops_is_not_lost_unseen():
    with make_multiprocessing_curriculum(Book(), start=False) as curriculum:

        class Late(bytes):
            calls = 0

            def __len__(self):
                self.calls += 1
                if self.calls == 3:  # past the check, before the last word
                    curriculum.components.close()
                return super().__len__()

        with pytest.raises(EOFError, match="environment 2: the curriculum was stopped"):
            curriculum.components.send(2, SyncComponents.ASK, 0, (Late(8),))


@pytest.mark.parametrize("steps", [False, True])
def test_a_slow_curriculum_loses_nothing(steps):
    book = Book(steps=steps, pause=0.003)
    with make_multiprocessing_curriculum(book, ring_bytes=2048, timeout=20) as curriculum:
        join([start("fork", play, curriculum.components, [i], 40) for i in range(2)])
    assert [len(book.told(i, "episode")) for i in range(2)] == [40, 40]
    assert [len(book.told(i, "step")) for i in range(2)] == [120 * steps] * 2


def test_stop_in_every_state(tmp_path):
    curriculum = make_multiprocessing_curriculum(Book(), start=False)
    curriculum.stop()
    curriculum.stop()
    with pytest.raises(RuntimeError, match="the curriculum was stopped: make another one"):
        curriculum.start()
    assert curriculum.sample(k=2) == [0, 1]
    late = GymnasiumSyncWrapper(Level(Count()), TaskSpace(10**6), curriculum.components)
    with pytest.raises(EOFError, match="environment 0: the curriculum was stopped"):
        late.reset()
    late.close()
    curriculum = make_multiprocessing_curriculum(Book(), start=False)
    workers = [start(method, play_until_it_fails, curriculum.components, tmp_path / method, 1) for method in START]
    until(lambda: curriculum.components._places[:, SyncComponents.WAITING].sum() == 3)
    began = time.time()
    curriculum.stop()  # without ever having started
    join(workers, 10)
    assert time.time() - began < 5
    assert all("EOFError: environment" in (tmp_path / method).read_text() for method in START)
    curriculum = make_multiprocessing_curriculum(Book())
    curriculum.start()
    env = GymnasiumSyncWrapper(Level(Count()), TaskSpace(10**6), curriculum.components)
    episode(env)
    curriculum.stop()
    assert len(curriculum.log) == 1
    env.close()  # after it: no error
    book = Book()
    curriculum = make_multiprocessing_curriculum(book, start=False)
    episode(make_env(curriculum.components))
    curriculum.stop()
    assert len(book.log) == 1 and next(book.given) == 2  # nobody is left to take the third


def test_the_curriculum_can_be_asked_before_any_worker_and_answers_for_itself():
    class Empty(Book):
        flag, nothing, count = False, None, 0

    curriculum = make_multiprocessing_curriculum(Empty(5, seed=0))
    assert curriculum.sample(k=3) == [0, 1, 2] and curriculum.sample() == [3]
    assert (curriculum.flag, curriculum.nothing, curriculum.count) == (False, None, 0)
    assert curriculum.num_tasks == 5 and curriculum.metrics() == {} and curriculum.requires_step_updates is False
    assert not hasattr(curriculum, "missing")
    with pytest.raises(AttributeError, match="'Empty' object has no attribute 'missing'"):
        curriculum.missing  # noqa: B018
    curriculum.update_on_episode(1.0, 2, 3, 0.5, env_id=4)
    assert curriculum.told(4, "episode") == [(1.0, 2, 3, 0.5)]
    child = multiprocessing.get_context("fork").Process(target=curriculum.sample)
    child.start()
    child.join(10)
    assert child.exitcode == 1  # in another process it would be a copy
    curriculum.stop()


class Random(Book):
    """Draws by what it was told."""

    def sample(self, k=1):
        return [int(task) for task in self.rng.integers(1 + len(self.log), 1000, size=k)]


@pytest.mark.parametrize("buffer_size", [1, 2, 5])
def test_the_same_seed_draws_the_same_tasks_for_environments_of_one_process(buffer_size):
    runs = []
    for threaded in (True, True, False):
        book = Random(1000, seed=3)
        with make_multiprocessing_curriculum(book, start=threaded) as curriculum:
            envs = [
                GymnasiumSyncWrapper(
                    Level(Count(1 + i)), TaskSpace(1000), curriculum.components, buffer_size=buffer_size
                )
                for i in range(3)
            ]
            for turn in range(30):
                for i, env in enumerate(envs):
                    if turn % (i + 1) == 0:
                        env.reset()
                    env.step(0)
                if threaded:
                    time.sleep(0.001 * (turn % 3))
        runs.append(book.log)
    assert runs[0] == runs[1] == runs[2] and len(runs[0]) > 50


def test_the_task_is_drawn_when_buffer_size_says():
    for buffer_size in (1, 2, 3):
        book = Random(1000, seed=0)
        with make_multiprocessing_curriculum(book, start=False) as curriculum:
            env = GymnasiumSyncWrapper(Level(Count(1)), TaskSpace(1000), curriculum.components, buffer_size=buffer_size)
            seen = []
            for _ in range(5):
                seen.append(env.reset()[1]["task"])
                curriculum.pump()
                env.step(0)
            rng = np.random.default_rng(0)
            drawn = [int(t) for t in rng.integers(1, 1000, size=buffer_size)]
            drawn += [int(rng.integers(1 + finished, 1000)) for finished in range(1, 6)]
            assert seen == drawn[:5]


def test_a_state_holds_sent_updates_and_drawn_tasks():
    book = Book(steps=True)
    with make_multiprocessing_curriculum(book, start=False) as curriculum:
        envs = [GymnasiumSyncWrapper(Level(Count()), TaskSpace(10**6), curriculum.components) for _ in range(2)]
        for env in envs:
            episode(env)
        state = curriculum.state_dict()
        assert len(book.log) == 8 and state["waiting"] == {0: [1, 2], 1: [4, 5]}
        with pytest.raises(RuntimeError, match="before the first environment asks"):
            curriculum.load_state_dict(state)
    with make_multiprocessing_curriculum(Book(), start=False, max_envs=1) as curriculum:
        for wrong, text in (({}, "no state of a Curr.*'waiting'"), (state, "need max_envs=2 or more, here it is 1")):
            with pytest.raises(ValueError, match=text):
                curriculum.load_state_dict(wrong)
    again = Book()
    again.given = itertools.count(6)
    with make_multiprocessing_curriculum(again) as curriculum:
        curriculum.load_state_dict(state)
        envs = [GymnasiumSyncWrapper(Level(Count()), TaskSpace(10**6), curriculum.components) for _ in range(2)]
        assert [[env.reset()[1]["task"] for env in envs] for _ in range(2)] == [[1, 4], [2, 5]]


# Under the vector environments of others.


def make_env(components, env_id=None, length=3):
    return GymnasiumSyncWrapper(Level(Count(length)), components.task_space, components, env_id=env_id)


def check_vector_run(book, num_envs, steps):
    for env_id in range(num_envs):
        mine = book.told(env_id, "episode")
        assert len(mine) == steps and [entry[:2] for entry in mine] == [(6.0, 3)] * len(mine)
    tasks = [entry[4] for entry in book.log if entry[1] == "episode"]
    assert len(set(tasks)) == len(tasks)


@pytest.mark.parametrize("method", ["sync", *START])
@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_gymnasium_vector_environments(method, mode):
    book = Book(steps=True)
    with make_multiprocessing_curriculum(book, max_envs=2, timeout=20) as curriculum:
        components = curriculum.components
        functions = [lambda env_id=env_id: make_env(components, env_id) for env_id in range(2)]
        if method == "sync":
            envs = SyncVectorEnv(functions, autoreset_mode=mode)
        else:
            envs = AsyncVectorEnv(functions, context=method, autoreset_mode=mode)
        envs.reset(seed=0)
        for _ in range(12):
            envs.step(np.zeros(2, int))
        envs.close()
    check_vector_run(book, 2, 3 if mode == AutoresetMode.NEXT_STEP else 4)


@pytest.mark.parametrize("method", ["fork", "forkserver"])  # its own default is the latter
def test_stable_baselines3_subproc_vec_env(method):
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env", reason="pip install stable-baselines3")
    book = Book()
    with make_multiprocessing_curriculum(book, max_envs=2, timeout=20) as curriculum:
        components = curriculum.components
        envs = vec_env.SubprocVecEnv([lambda: make_env(components) for _ in range(2)], start_method=method)
        envs.seed(3)
        envs.reset()
        for _ in range(9):
            _, _, _, infos = envs.step(np.zeros(2, int))
        envs.close()
        assert {info["task"] for info in infos} <= set(range(100))
    check_vector_run(book, 2, 3)


# Many agents.


class Pair:
    """A parallel environment: agent a is there for 2 steps, b for 4, c from the second to the last."""

    possible_agents = ["a", "b", "c"]
    ends = {"a": 2, "b": 4, "c": 4}

    def observation_space(self, agent):
        return Box(-1e6, 1e6, (1,), np.float64)

    def action_space(self, agent):
        return Discrete(2)

    def observe(self, agents):
        return {agent: np.array([10.0 * self.possible_agents.index(agent) + self.t]) for agent in agents}

    def reset(self, seed=None, options=None):
        self.t, self.agents = 0, ["a", "b"]
        return self.observe(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.t += 1
        acted = list(self.agents) + ["c"] * (self.t == 1)
        ended = {agent: self.t == self.ends[agent] for agent in acted}
        self.agents = [agent for agent in acted if not ended[agent]]
        rewards = {agent: self.t * (1.0 if agent == "a" else -1.0) for agent in acted}
        return self.observe(acted), rewards, ended, dict.fromkeys(acted, False), {agent: {} for agent in acted}

    def close(self):
        self.closed = True


def play_pairs(components, env_id, episodes):
    env = PettingZooSyncWrapper(
        PettingZooTaskWrapper(Pair()), components.task_space, components, env_id=env_id, batch_size=2
    )
    for _ in range(episodes):
        env.reset(seed=1)
        while env.agents:
            _, _, _, _, infos = env.step({agent: 0 for agent in env.agents})
            assert len({info["task"] for info in infos.values()}) == 1
    env.close()
    assert env.env.env.closed


@pytest.mark.parametrize("method", ["thread", "fork", "spawn"])
def test_agents_are_told_apart_also_after_one_is_gone(method):
    book = Book(steps=True, observations=True)
    with make_multiprocessing_curriculum(book, timeout=20) as curriculum:
        join([start(method, play_pairs, curriculum.components, i, 5) for i in range(2)])
    for env_id in range(6):
        agent = env_id % 3
        episodes = book.told(env_id, "episode")
        assert [entry[:2] for entry in episodes] == [[(3.0, 2), (-10.0, 4), (-9.0, 3)][agent]] * 5
        rows = book.told(env_id, "step")
        first, last = [(1, 2), (1, 4), (2, 4)][agent]
        steps = list(range(first, last + 1))
        assert [abs(row[2]) for row in rows] == steps * 5
        assert [row[1].item() for row in rows] == [10 * agent + t - 1 for t in steps] * 5
        assert [row[3] for row in rows] == [t == last for t in steps] * 5
        assert [row[5].get("final_obs") for row in rows] == [10 * agent + t if t == last else None for t in steps] * 5
        assert [row[0] for row in rows] == [entry[2] for entry in episodes for _ in steps]
        kinds = [entry[1] for entry in book.log if entry[0] == env_id]
        assert kinds == (["step"] * len(steps) + ["episode"]) * 5
    for base in (0, 3):  # one task for all agents of an environment
        assert [e[2] for e in book.told(base, "episode")] == [e[2] for e in book.told(base + 2, "episode")]


def test_a_real_pettingzoo_environment_passes_its_own_test():
    test = pytest.importorskip("pettingzoo.test", reason="pip install pettingzoo")
    rps = pytest.importorskip("pettingzoo.classic.rps_v2", reason="pip install pygame")
    book = Book(steps=True, observations=True)
    with make_multiprocessing_curriculum(book) as curriculum:
        task_env = PettingZooTaskWrapper(rps.parallel_env(max_cycles=15))
        env = PettingZooSyncWrapper(task_env, TaskSpace(10**6), curriculum.components)
        test.parallel_api_test(env, num_cycles=100)
        env.close()
    for agent in (0, 1):
        episodes = book.told(agent, "episode")
        assert len(episodes) >= 2 and {entry[1] for entry in episodes} == {15}
        rows = book.told(agent, "step")
        ends = [row for row in rows if row[3] or row[4]]
        assert [row[0] for row in ends][: len(episodes)] == [entry[2] for entry in episodes]
        assert [row[5]["final_obs"].shape for row in ends] == [()] * len(ends)
    returns = [[entry[0] for entry in book.told(agent, "episode")] for agent in (0, 1)]
    assert np.array_equal(np.negative(returns[0]), returns[1])  # a zero-sum game


def test_environments_of_different_numbers_of_agents_cannot_share_a_curriculum():
    curriculum = make_multiprocessing_curriculum(Book(), start=False)
    env = PettingZooSyncWrapper(PettingZooTaskWrapper(Pair()), TaskSpace(10**6), curriculum.components)
    env.reset()
    with pytest.raises(RuntimeError, match=r"environments of \[1, 3\] agents cannot share a curriculum"):
        make_env(curriculum.components).reset()
    with pytest.raises(RuntimeError, match="cannot share"):
        curriculum.stop()


# Costs that must not grow.


def test_what_travels_does_not_grow_with_environments_or_history():
    """SYN-12."""
    sizes = set()
    for num_envs in (2, 32):
        with make_multiprocessing_curriculum(Book(), start=False, max_envs=num_envs) as curriculum:
            envs = [make_env(curriculum.components) for _ in range(num_envs)]
            for env in envs * 20:
                before = curriculum.components._places[:, SyncComponents.SENT].sum()
                episode(env)
                sizes.add(int(curriculum.components._places[:, SyncComponents.SENT].sum() - before))
                curriculum.pump()
    assert max(sizes) < 300 and 80 in sizes  # 80: a finished episode; 300: the first message tells the space too


def test_resets_leak_no_memory_and_closing_leaves_no_descriptor():
    """SYN-14, SYN-15."""
    rss = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731
    counts = []
    for _ in range(10):
        with make_multiprocessing_curriculum(Random(1000)) as curriculum:
            env = make_env(curriculum.components)
            episode(env)
            env.close()
        del env, curriculum
        gc.collect()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[-1] == counts[1]

    class Nothing(Curriculum):
        def sample(self, k=1):
            return [1] * k

    with make_multiprocessing_curriculum(Nothing(5)) as curriculum:
        env = make_env(curriculum.components, length=1)
        for turn in range(20000):
            if turn == 2000:
                before = rss()
            env.reset()
            env.step(0)
    assert rss() - before < 10e6


def test_importing_has_no_side_effects():
    code = """
        import os, sys, threading, numpy as np
        before = np.geterr(), np.random.get_state()[1].tolist(), set(os.listdir("/dev/shm")), threading.active_count()
        fds = len(os.listdir("/proc/self/fd"))
        import curricula
        assert before == (np.geterr(), np.random.get_state()[1].tolist(), set(os.listdir("/dev/shm")), 1)
        assert len(os.listdir("/proc/self/fd")) == fds
        assert not {"torch", "ray", "matplotlib", "pettingzoo"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=Path(__file__).parents[1])
