"""A curriculum in a Ray actor: the same updates and tasks as over shared memory, once each, whoever dies."""

import contextlib
import multiprocessing
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

from curricula.core import Curriculum, TaskSpace, TaskWrapper
from curricula.sync_envs import GymnasiumSyncWrapper, PettingZooSyncWrapper
from curricula.sync_learner import make_multiprocessing_curriculum
from curricula.task_wrappers import PettingZooTaskWrapper

ray = pytest.importorskip("ray", reason="ray is an extra: scripts/extras/ray.txt")
from curricula.ray_sync import RayGymnasiumSyncWrapper, RayPettingZooSyncWrapper, make_ray_curriculum  # noqa: E402


class Log(Curriculum):
    """Draws 0, 1, 2, ... and writes down what it is told."""

    def __init__(self, space=10**6, steps=False, observations=False, hold=None, fail=None):
        super().__init__(space)
        self.requires_step_updates, self.requires_observations = steps, observations
        self.hold, self.fail, self.drawn, self.log, self.falsy = hold, fail, 0, {}, 0

    def sample(self, k=1):
        if self.fail == ("sample", self.drawn):
            raise ValueError("boom-42 in sample")
        self.drawn += k
        return list(range(self.drawn - k, self.drawn))

    def update_task_progress(self, task, progress, env_id=None):
        self.log.setdefault(env_id, []).append(("progress", task, progress))

    def update_on_step_batch(self, steps, env_id=None):
        self.log.setdefault(env_id, []).extend(("step", *step) for step in steps)

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        if self.fail == ("episode", task):
            raise ValueError("boom-42 in update")
        while self.hold and not os.path.exists(self.hold):
            time.sleep(0.01)
        self.log.setdefault(env_id, []).append(("episode", task, episode_return, length, progress))

    def double(self, number, *, plus=0):
        if number < 0:
            raise ValueError(f"{number} is below 0")
        return 2 * number + plus

    def state_dict(self):
        return {**super().state_dict(), "drawn": self.drawn}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.drawn = state["drawn"]


class Seeded(Curriculum):
    def _sample_distribution(self):
        return np.full(self.num_tasks, 1 / self.num_tasks)


class Course(gym.Env):
    """Task k lasts k % 5 + 1 steps, odd ones are cut off. obs: (task, step), in an array that is used again."""

    observation_space = gym.spaces.Dict(
        {"at": gym.spaces.Box(-1, 1e6, (2,), np.float32), "n": gym.spaces.Discrete(100)}
    )
    action_space = gym.spaces.Discrete(2)
    task, t, at = 0, 0, np.zeros(2, np.float32)

    def _observe(self):
        self.at[:] = self.task, self.t
        return {"at": self.at, "n": self.t}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        over = self.t > self.task % 5
        return self._observe(), self.t + self.task / 4, over and self.task % 2 == 0, over and self.task % 2 == 1, {}


class CourseWrapper(TaskWrapper):
    """Tasks 3, 7, 11, ... are done after their second step."""

    def change_task(self, new_task):
        self.task = self.unwrapped.task = new_task
        self.unwrapped.t = 0

    def _task_completion(self, obs, reward, terminated, truncated, info):
        return 1.0 if self.task % 4 == 3 and self.unwrapped.t == 2 else obs["n"] / 100


class Pair:
    """Two agents on a course; "b" leaves after two steps."""

    possible_agents = ["a", "b"]
    metadata = {}

    def __init__(self):
        self.course = Course()

    def observation_space(self, agent):
        return Course.observation_space

    def action_space(self, agent):
        return Course.action_space

    def reset(self, seed=None, options=None):
        self.agents = ["a", "b"]
        obs, _ = self.course.reset(seed=seed)
        return {agent: obs for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions):
        obs, reward, terminated, truncated, _ = self.course.step(0)
        there, left = self.agents, terminated or truncated
        self.agents = [] if left else there[: 2 - (self.course.t > 1)]
        every = lambda value: {agent: value for agent in there}  # noqa: E731
        gone = {agent: terminated or (not left and agent not in self.agents) for agent in there}
        return every(obs), {agent: reward * (1 + (agent == "b")) for agent in there}, gone, every(truncated), every({})

    def close(self):
        pass


class PairWrapper(PettingZooTaskWrapper):
    def change_task(self, new_task):
        self.task = self.env.course.task = new_task
        self.env.course.t = 0

    def _task_completion(self, obs, rewards, terminations, truncations, infos):
        return 1.0 if self.task % 4 == 3 and self.env.course.t == 2 else 0.25


def play(components, episodes, envs=1, env_ids=None, close=True, pause=0.0, **settings):
    """Plays `envs` environments in turn: for each (its env_id, the (task, return, length) of its episodes)."""
    make = lambda env_id: RayGymnasiumSyncWrapper(  # noqa: E731
        CourseWrapper(Course()), components.task_space, components, env_id=env_id, **settings
    )
    played = [(make(env_id), []) for env_id in env_ids or [None] * envs]
    for _ in range(episodes):
        for env, done in played:
            task, returned, length, over = env.reset()[1]["task"], 0.0, 0, False
            while not over:
                _, reward, terminated, truncated, _ = env.step(0)
                returned, length, over = returned + reward, length + 1, terminated or truncated
            done.append((task, returned, length))
            time.sleep(pause)
    if close:
        for env, _ in played:
            env.close()
    return [(env._link.env_id, done) for env, done in played]


class Worker:
    def pid(self):
        return os.getpid()

    def run(self, function, *args, **kwargs):
        return function(*args, **kwargs)


def worker(**options):
    return ray.remote(Worker).options(num_cpus=0, **options).remote()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")  # it kills workers when others use up the memory
        patch.setenv("PYTHONPATH", os.path.dirname(__file__), prepend=os.pathsep)  # Ray's workers import this file
        ray.init("local", num_cpus=4, object_store_memory=2**28, include_dashboard=False, logging_level="ERROR")
        yield
        ray.shutdown()


@pytest.fixture(scope="module")
def workers(cluster):
    found = [worker() for _ in range(8)]
    ray.get([w.pid.remote() for w in found], timeout=100)
    return found


def episodes(log):
    return [update[1:4] for update in log if update[0] == "episode"]


@pytest.mark.parametrize(
    "count,envs,number,steps", [(1, 1, 60, False), (8, 1, 15, False), (8, 1, 10, True), (4, 8, 5, False)]
)
def test_every_task_is_received_once_and_every_update_applied_once_and_in_order(workers, count, envs, number, steps):
    with make_ray_curriculum(Log(steps=steps), max_envs=count * envs) as curriculum:
        calls = [
            w.run.remote(play, curriculum.components, number, env_ids=range(i * envs, i * envs + envs), batch_size=3)
            for i, w in enumerate(workers[:count])  # fixed places: one that is done leaves its own to the next
        ]
        played = dict(sum(ray.get(calls, timeout=60), []))
        assert sorted(played) == list(range(count * envs)) == sorted(curriculum.log)
        for env_id, log in curriculum.log.items():
            assert episodes(log) == played[env_id] and len(played[env_id]) == number
            if steps:
                assert [update[0] for update in log] == [
                    kind for _, _, length in played[env_id] for kind in ["step"] * length + ["episode"]
                ]
        received = [task for done in played.values() for task, _, _ in done]
        waiting = curriculum.state_dict()["waiting"]
        assert sorted(received + sum(waiting.values(), [])) == list(range(curriculum.drawn))
        assert all(len(tasks) == 2 for tasks in waiting.values())


SETTINGS = [
    {},
    {"buffer_size": 1},
    {"buffer_size": 5, "batch_size": 2},
    {"change_task_on_completion": True},
    {"change_task_on_completion": True, "batch_size": 1, "buffer_size": 3},
]


def both(log, wrap, classes, drive):
    """What environments of all SETTINGS see in turn, and the curriculum's log: over shared memory, and over Ray."""
    found = []
    for make, sync in zip((make_multiprocessing_curriculum, make_ray_curriculum), classes):
        with make(Log(**log)) as curriculum:
            seen = []
            for env_id, settings in enumerate(SETTINGS):
                env = sync(wrap(), curriculum.components.task_space, curriculum.components, env_id=env_id, **settings)
                drive(env, seen)
                env.close()
            curriculum.stop()
            found.append((seen, curriculum.log))
    return found


@pytest.mark.parametrize("steps,observations", [(False, False), (True, False), (True, True)])
def test_all_is_as_over_shared_memory(steps, observations):
    def drive(env, seen):
        for episode in range(25):
            seen.append(repr(env.reset(seed=episode)))
            for _ in range(3 if episode % 7 == 6 else 99):  # some are cut off
                *told, terminated, truncated, info = env.step(0)
                seen.append(repr((told, terminated, truncated, info)))
                if terminated or truncated:
                    break
        env.reset()
        env.step(0)

    classes, wrap = (GymnasiumSyncWrapper, RayGymnasiumSyncWrapper), lambda: CourseWrapper(Course())
    native, over_ray = both({"steps": steps, "observations": observations}, wrap, classes, drive)
    assert native[0] == over_ray[0]
    assert sorted(over_ray[1]) == list(range(len(SETTINGS)))
    for env_id, log in native[1].items():
        assert [repr(update) for update in log] == [repr(update) for update in over_ray[1][env_id]]
        kinds = {"episode"} | ({"step"} if steps else set()) | ({"progress"} if env_id > 2 else set())
        assert {update[0] for update in log} == kinds and ("'at'" in repr(log)) == observations


@pytest.mark.parametrize("steps", [False, True])
def test_agents_are_as_over_shared_memory(steps):
    def drive(env, seen):
        for episode in range(20):
            seen.append(repr(env.reset(seed=episode)))
            while env.agents and (episode % 7 != 6 or len(seen) % 3):
                seen.append(repr(env.step({agent: 0 for agent in env.agents})))

    classes, wrap = (PettingZooSyncWrapper, RayPettingZooSyncWrapper), lambda: PairWrapper(Pair())
    native, over_ray = both({"steps": steps, "observations": steps}, wrap, classes, drive)
    assert native[0] == over_ray[0]
    assert sorted(over_ray[1]) == list(range(2 * len(SETTINGS)))
    for env_id, log in native[1].items():
        assert [repr(update) for update in log] == [repr(update) for update in over_ray[1][env_id]]


@pytest.mark.parametrize("envs", [1, 4])
def test_the_same_seed_draws_the_same_tasks_in_one_process(envs):
    tasks = []
    for seed in (1, 1, 2):
        with make_ray_curriculum(Seeded(TaskSpace(1000), seed=seed)) as curriculum:
            tasks.append([[task for task, _, _ in done] for _, done in play(curriculum.components, 50, envs)])
    assert tasks[0] == tasks[1] != tasks[2]


def test_stop_applies_what_was_sent_without_a_close_and_ends_the_environments(workers):
    curriculum = make_ray_curriculum(Log())
    calls = [  # fixed places: those of a worker that is done are free, and another may come late
        w.run.remote(play, curriculum.components, 10, env_ids=range(4 * i, 4 * i + 4), close=False)
        for i, w in enumerate(workers[:4])
    ]
    played = dict(sum(ray.get(calls, timeout=60), []))
    curriculum.stop()
    assert {env_id: episodes(log) for env_id, log in curriculum.log.items()} == played and len(played) == 16
    curriculum.stop()
    with pytest.raises(EOFError, match="an environment: the curriculum was stopped"):
        play(curriculum.components, 1)


def test_stop_waits_for_the_rest_of_a_message_however_long_it_takes():
    """Not for a time: a machine under load may send its second half when another would have been silent for long."""
    curriculum = make_ray_curriculum(Log())
    components = curriculum.components
    env = RayGymnasiumSyncWrapper(CourseWrapper(Course()), components.task_space, components)
    env.reset()
    line = components._lines[0]
    line.until = lambda done: None  # from now on it sends nothing by itself
    assert env.step(0)[2]
    os.write(line.fd, line.outbox[:60])
    applied = []

    def stop():
        curriculum.stop()
        applied.append(curriculum.log.get(0))

    stopping = threading.Thread(target=stop)
    stopping.start()
    time.sleep(1)
    os.write(line.fd, line.outbox[60:])
    stopping.join(20)
    assert applied == [[("episode", 0, 1.0, 1, 0.01)]]
    del line.outbox[:], line.until


def wait_for_ever(components):
    try:
        play(components, 10**9)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_stop_ends_environments_in_the_middle(workers):
    curriculum = make_ray_curriculum(Log())
    call = workers[0].run.remote(wait_for_ever, curriculum.components)
    while curriculum.drawn < 20:
        time.sleep(0.01)
    curriculum.stop()
    assert ray.get(call, timeout=10) == "EOFError: environment 0: the curriculum was stopped"
    tasks = [task for task, *_ in episodes(curriculum.log[0])]
    assert tasks == list(range(len(tasks))) and 0 <= curriculum.drawn - len(tasks) <= 2


@pytest.mark.parametrize(
    "place,fail", [("update", ("episode", 3)), ("sample", ("sample", 7)), ("sample", ("sample", 0))]
)
def test_a_failure_of_the_curriculum_is_raised_everywhere(workers, place, fail):
    curriculum = make_ray_curriculum(Log(fail=fail))
    calls = [w.run.remote(wait_for_ever, curriculum.components) for w in workers[:2]]
    text = (
        rf"the curriculum failed:\nTraceback [\s\S]*in (sample|update_on_episode)[\s\S]*ValueError: boom-42 in {place}"
    )
    for told in ray.get(calls, timeout=20):
        assert re.match(r"RuntimeError: (an environment|environment \d): " + text, told)
    for ask in (curriculum.check, lambda: curriculum.double(1), curriculum.state_dict):
        with pytest.raises(RuntimeError, match=text):
            ask()
    curriculum.stop()  # it was told


def test_a_failure_is_raised_by_stop_once():
    curriculum = make_ray_curriculum(Log(fail=("sample", 0)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="boom-42"):
            play(curriculum.components, 1)
    with pytest.raises(RuntimeError, match="boom-42"):
        curriculum.stop()
    curriculum.stop()


def test_a_dead_actor_is_told_to_everybody(workers):
    curriculum = make_ray_curriculum(Log(), actor_name="curriculum-to-kill")
    call = workers[0].run.remote(wait_for_ever, curriculum.components)
    while curriculum.drawn < 20:
        time.sleep(0.01)
    ray.kill(ray.get_actor("curriculum-to-kill"))
    assert ray.get(call, timeout=10) == "RuntimeError: environment 0: the curriculum's actor 'curriculum-to-kill' died"
    for ask in (curriculum.check, curriculum.stop):
        with pytest.raises(RuntimeError, match="^the curriculum's actor 'curriculum-to-kill' died: "):
            ask()
    end = time.time() + 30
    with pytest.raises(ConnectionRefusedError):  # a dying process may still accept for a moment
        while time.time() < end:
            socket.create_connection(curriculum.components._address[:2]).close()
    with pytest.raises(RuntimeError, match=r"the curriculum's actor 'curriculum-to-kill' is not at [\d.]+:\d+ \("):
        play(curriculum.components, 1)


def restarted(actor):
    """Its process, when Ray has restarted it."""
    end = time.time() + 30
    while True:
        try:
            return ray.get(actor.pid.remote(), timeout=30)
        except ray.exceptions.RayActorError:
            assert time.time() < end
            time.sleep(0.1)


def test_a_killed_worker_leaves_its_place_and_its_tasks_to_the_next():
    curriculum = make_ray_curriculum(Log(), max_envs=2)
    killed = worker(max_restarts=1)
    pid = ray.get(killed.pid.remote())
    call = killed.run.remote(play, curriculum.components, 10**9, pause=0.01)
    while curriculum.drawn < 8:
        time.sleep(0.01)
    with pytest.raises(ValueError, match=rf"environment 0 is there already, in the process {pid} on "):
        play(curriculum.components, 1, env_ids=[0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(call, timeout=20)
    with pytest.raises(RuntimeError, match=rf"environment 0 \(process {pid} on .*\) .* without close\(\)"):
        curriculum.check()
    before, waiting = curriculum.drawn, curriculum.state_dict()["waiting"][0]
    assert restarted(killed) != pid
    again = ray.get(killed.run.remote(play, curriculum.components, 4), timeout=30)
    assert again[0][0] == 0 and [task for task, *_ in again[0][1]] == [*waiting, before, before + 1, before + 2][:4]
    reported = [task for task, *_ in episodes(curriculum.log[0])]
    lost = waiting[0] - 1  # it was underway
    assert reported == [task for task in range(again[0][1][-1][0] + 1) if task != lost]
    curriculum.check()
    curriculum.stop()


def test_places_run_out_and_come_back(workers):
    curriculum = make_ray_curriculum(Log(), max_envs=2)
    make = lambda: RayGymnasiumSyncWrapper(CourseWrapper(Course()), TaskSpace(10**6), curriculum.components)  # noqa: E731
    envs = [make() for _ in range(3)]
    envs[0].reset(), envs[1].reset()
    with pytest.raises(ValueError, match=rf"all 2 places .* \(by the processes {os.getpid()} on .*\): close\(\) env"):
        envs[2].reset()
    envs[0].close()
    assert envs[2].reset()[1]["task"] == 1 and envs[2]._link.env_id == 0  # what waited for the one before
    for env_id in (2, -1):
        with pytest.raises(ValueError, match=rf"env_id {env_id} is not in 0\.\.1"):
            play(curriculum.components, 1, env_ids=[env_id])
    for env in envs:
        env.close()
    curriculum.stop()


def test_a_stuck_curriculum_holds_up_its_environments_and_nothing_is_lost(tmp_path):
    curriculum = make_ray_curriculum(Log(hold=str(tmp_path / "go on")), timeout=2.0, actor_name="stuck")
    env = RayGymnasiumSyncWrapper(CourseWrapper(Course()), TaskSpace(10**6), curriculum.components, buffer_size=4)
    tasks = []

    def play_episode():
        tasks.append(env.reset()[1]["task"])
        while not any(env.step(0)[2:4]):
            pass

    text = r"environment 0: the curriculum's actor 'stuck' has not answered for 2\.\d s \(since \d\d:\d\d:\d\d\)"
    with pytest.raises(TimeoutError, match=text):
        for _ in range(16):
            play_episode()
    assert tasks == [0, 1, 2, 3]
    with pytest.raises(TimeoutError, match=r"^the curriculum's actor 'stuck' has not answered call\(\) for 2\.0 s"):
        curriculum.check()
    (tmp_path / "go on").touch()
    for _ in range(40):
        play_episode()
    env.close()
    assert [task for task, *_ in episodes(curriculum.log[0])] == tasks == list(range(44))
    curriculum.stop()


class Wide(gym.Env):
    """Steps of 64 KB without an end, numbered."""

    observation_space = gym.spaces.Box(0, 1e9, (2**14,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.obs = np.zeros(2**14, np.float32)
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 0.0, False, False, {}


class Numbers(Log):
    def update_on_step_batch(self, steps, env_id=None):
        while not os.path.exists(self.hold):
            time.sleep(0.01)
        self.log.setdefault(env_id, []).extend(float(step[1].mean()) for step in steps)


def test_a_full_connection_holds_up_its_environment_and_nothing_is_lost(tmp_path):
    log = Numbers(steps=True, observations=True, hold=str(tmp_path / "go on"))
    curriculum = make_ray_curriculum(log, timeout=2.0)
    env = RayGymnasiumSyncWrapper(TaskWrapper(Wide()), TaskSpace(10**6), curriculum.components, batch_size=10)
    env.reset()
    count = 0
    with pytest.raises(TimeoutError, match=r"environment 0: .* has read no update for 2\.\d s \(since "):
        while True:
            env.step(0)
            count += 1
    assert 10 < count < 1000  # that is 64 MB
    (tmp_path / "go on").touch()
    env.close()
    assert curriculum.log[0] == list(range(count))  # all but the step that raised
    curriculum.stop()


def test_methods_attributes_and_state():
    curriculum = make_ray_curriculum(Log(), actor_name="public")
    assert ray.get(ray.get_actor("public").address.remote()) == curriculum.components._address
    assert curriculum.double(4, plus=1) == 9 and curriculum.falsy == 0 and curriculum.metrics() == {}
    assert curriculum.sample(k=2) == [0, 1]
    with pytest.raises(ValueError, match="^-1 is below 0$"):
        curriculum.double(-1)
    assert not hasattr(curriculum, "get_opponent") and hasattr(curriculum, "double")
    with pytest.raises(ValueError, match="public"):
        make_ray_curriculum(Log(), actor_name="public")
    assert [task for task, *_ in play(curriculum.components, 3)[0][1]] == [2, 3, 4]
    state = curriculum.state_dict()
    assert state["waiting"] == {0: [5, 6]}
    restored = make_ray_curriculum(Log())
    restored.load_state_dict(state)
    for c in (curriculum, restored):
        assert [task for task, *_ in play(c.components, 3)[0][1]] == [5, 6, 7]
    with pytest.raises(RuntimeError, match="tasks were drawn already"):
        restored.load_state_dict(state)
    curriculum.stop(), restored.stop()


def run_in_process(components, queue):
    try:
        queue.put(play(components, 5))
    except Exception as error:
        queue.put(f"{type(error).__name__}: {error}")


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_ray_did_not_start_take_part(method):
    curriculum, context = make_ray_curriculum(Log()), multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=run_in_process, args=(curriculum.components, queue))
    process.start()
    found = queue.get()
    process.join(20)
    assert dict(found) == {0: episodes(curriculum.log[0])} and len(found[0][1]) == 5
    curriculum.stop()


class Big(Curriculum):
    def sample(self, k=1):
        return [np.full(2**18, self.rng.integers(100), np.float32) for _ in range(k)]


def test_tasks_of_a_megabyte():
    with make_ray_curriculum(Big(TaskSpace(gym.spaces.Box(0, 100, (2**18,))), seed=0)) as curriculum:
        env = TaskWrapper(Course(), curriculum.components.task_space)
        env = RayGymnasiumSyncWrapper(env, env.task_space, curriculum.components, buffer_size=16)
        tasks = [env.reset()[1]["task"] for _ in range(20)]
        expected = np.random.default_rng(0).integers(100, size=20)
        assert [task.tolist() for task in tasks] == [[float(number)] * 2**18 for number in expected]
        env.close()


def test_strangers_are_turned_away():
    with make_ray_curriculum(Log()) as curriculum:
        *address, secret = curriculum.components._address
        for first in (bytes(48), secret[:-1] + bytes(17), b"GET / HTTP/1.1" + bytes(99)):
            stranger = socket.create_connection(address, timeout=5)
            stranger.sendall(first)
            assert stranger.recv(1) == b""
        assert len(play(curriculum.components, 3)[0][1]) == 3


class Files(Log):
    def allow(self, more):
        """This process may open so many more files."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + more, hard_limit()))


def hard_limit():
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.mark.parametrize("more", [200, 20])
def test_strangers_who_say_nothing_do_not_use_up_the_files(more):
    """More of them than files are allowed: below the limit on strangers, and above it."""
    with make_ray_curriculum(Files()) as curriculum, contextlib.ExitStack() as stack:
        curriculum.allow(more)
        address = curriculum.components._address[:2]
        for _ in range(400):
            stack.enter_context(socket.create_connection(address, timeout=5))
        assert len(play(curriculum.components, 3)[0][1]) == 3
        curriculum.check()


def test_a_stranger_has_seconds_to_show_the_secret():
    with make_ray_curriculum(Log()) as curriculum:
        with socket.create_connection(curriculum.components._address[:2], timeout=20) as stranger:
            stranger.sendall(bytes(5))
            assert stranger.recv(1) == b""
        assert len(play(curriculum.components, 3)[0][1]) == 3


def test_a_cluster_of_one_machine_listens_on_loopback_unless_told_otherwise():
    for host, address in ((None, "127.0.0.1"), ("127.0.0.2", "127.0.0.2")):
        with make_ray_curriculum(Log(), host=host) as curriculum:
            assert curriculum.components._address[0] == address
            assert len(play(curriculum.components, 3)[0][1]) == 3


def test_bad_arguments_are_named():
    with make_ray_curriculum(Log()) as curriculum, pytest.raises(ValueError, match="is not the curriculum's"):
        RayGymnasiumSyncWrapper(CourseWrapper(Course()), TaskSpace(3), curriculum.components)
    unpicklable = Log()
    unpicklable.lock = threading.Lock()
    with pytest.raises(TypeError, match="Log cannot be pickled, to move into an actor: "):
        make_ray_curriculum(unpicklable)
    with pytest.raises(ValueError, match="max_envs and a timeout above 0, found 0 and 60.0"):
        make_ray_curriculum(Log(), max_envs=0)
    with pytest.raises(ValueError, match="requires_step_updates = True"):
        make_ray_curriculum(Log(observations=True))


def test_a_missing_ray_is_told_and_curricula_does_not_import_it():
    code = """
import sys, curricula, curricula.ray_sync
assert "ray" not in sys.modules
sys.modules["ray"] = None
curricula.ray_sync.make_ray_curriculum(None)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr.rstrip().endswith("scripts/run --extra ray SCRIPT brings it"), found.stderr
