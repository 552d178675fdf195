"""SyncQueue between real processes and threads: nothing lost, every wait ends, every death is told."""

import gc
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from curricula import SyncQueue

START = ["fork", "spawn", "forkserver"]


def start(method, function, *args):
    """A process, or a thread, that runs `function(*args)`."""
    if method == "thread":
        worker = threading.Thread(target=function, args=args, daemon=True)
    else:
        worker = multiprocessing.get_context(method).Process(target=function, args=args, daemon=True)
    worker.start()
    return worker


def play(queue, env_ids, episodes):
    """Plays its environments in turn; the record tells the task back and numbers the episodes."""
    for episode in range(episodes):
        for env_id in env_ids:
            queue.put_episode(env_id, queue.get_task(env_id), episode / 2, episode, env_id / 4)


def feed(queue, num_envs, episodes, pause=0.0):
    """The learner: keeps every ring full with tasks that are all different; returns all records."""
    given, records, count = [0] * num_envs, [], 0
    while count < num_envs * episodes:
        for env_id in range(num_envs):
            while given[env_id] < episodes and queue.tasks_waiting(env_id) < queue._envs["tasks"].shape[1]:
                queue.put_task(env_id, 1000 * env_id + given[env_id])
                given[env_id] += 1
        records.append(queue.drain())
        count += len(records[-1])
        assert (np.diff(records[-1]["env_id"]) >= 0).all()
        time.sleep(pause if len(records[-1]) else max(pause, 1e-4))
    return np.concatenate(records)


@pytest.mark.parametrize(
    "method,num_envs,workers,episodes",
    [
        ("thread", 1, 1, 300),
        ("fork", 1, 1, 3000),  # each ring is wrapped around 1500 and 1000 times
        ("spawn", 1, 1, 300),
        ("thread", 8, 8, 50),
        ("fork", 8, 8, 100),
        ("spawn", 8, 2, 100),
        ("forkserver", 8, 2, 100),
        ("fork", 128, 4, 20),
        ("thread", 128, 128, 10),
    ],
)
def test_every_task_and_every_record_arrives_once_and_in_order(method, num_envs, workers, episodes):
    queue = SyncQueue(num_envs, capacity=3, timeout=30)
    started = [start(method, play, queue, range(i, num_envs, workers), episodes) for i in range(workers)]
    if method != "thread":
        queue.watch(started)
    records = feed(queue, num_envs, episodes)
    for worker in started:
        worker.join(10)
    assert len(queue.drain()) == 0
    for env_id in range(num_envs):
        mine = records[records["env_id"] == env_id]
        assert mine["task"].tolist() == list(range(1000 * env_id, 1000 * env_id + episodes))
        assert mine["length"].tolist() == list(range(episodes))
        assert mine["episode_return"].tolist() == [episode / 2 for episode in range(episodes)]
        assert (mine["progress"] == env_id / 4).all() and queue.tasks_waiting(env_id) == 0


def test_a_slow_consumer_loses_nothing():
    queue = SyncQueue(2, capacity=4)
    worker = start("fork", play, queue, [0, 1], 60)
    records = feed(queue, 2, 60, pause=0.01)
    worker.join(10)
    assert [records[records["env_id"] == env_id]["length"].tolist() for env_id in (0, 1)] == [list(range(60))] * 2


def test_drain_of_nothing_and_order_over_environments():
    queue = SyncQueue(3, capacity=4)
    assert queue.drain().shape == (0,)
    for turn in range(3):  # 9 records an environment: the rings wrap around
        for length in range(3):
            for env_id in (2, 0):
                queue.put_episode(env_id, 5, 0.5, 10 * turn + length, 1.0)
        records = queue.drain()
        assert records["env_id"].tolist() == [0, 0, 0, 2, 2, 2]
        assert records["length"].tolist() == [10 * turn + length for length in range(3)] * 2
    assert records[0].item() == (0, 5, 0.5, 20, 1.0)
    first = records["length"].copy()
    queue.put_episode(0, 5, 0.5, 99, 1.0)
    assert np.array_equal(records["length"], first)  # a copy: the ring goes on


@pytest.mark.parametrize("shape,dtype", [((3,), np.float32), ((2, 2), np.int8), ((), np.float64), ((1,), np.int64)])
def test_encodings_of_any_shape(shape, dtype):
    queue, tasks = SyncQueue(2, task_shape=shape, task_dtype=dtype), []
    for task in np.random.default_rng(0).integers(-100, 100, (5, *shape)).astype(dtype):
        queue.put_task(1, task)
        tasks.append(queue.get_task(1))
        assert type(tasks[-1]) is float if shape == () else tasks[-1].dtype == dtype
        queue.put_episode(1, tasks[-1], 1, 2, 3)
        assert np.array_equal(queue.drain()["task"], task[None])
    assert np.array_equal(tasks, np.random.default_rng(0).integers(-100, 100, (5, *shape)))  # copies: the ring goes on


@pytest.mark.parametrize("dtype,fits,task", [
    (np.int8, -128, 300), (np.uint8, np.uint8(255), np.uint16(256)), (np.int64, 2**63 - 1, 2**63),
    (np.float32, 1e30, 1e300), (np.float32, 2**24, 2**24 + 1), (np.float32, -np.inf, -1e39), ("U3", "abc", "abcd"),
])  # fmt: skip
def test_a_task_that_its_ring_would_change_is_refused(dtype, fits, task):
    queue = SyncQueue(1, task_dtype=dtype)
    for call in (lambda: queue.put_task(0, task), lambda: queue.put_episode(0, task, 1, 1, 1)):
        with pytest.raises(ValueError, match="is not an encoding"):
            call()
    queue.put_task(0, fits)
    assert queue.get_task(0) == np.dtype(dtype).type(fits)


def test_bad_arguments_are_named():
    for sizes in ({"num_envs": 0}, {"prefetch": 0}, {"capacity": -1}, {"timeout": 0}, {"timeout": np.nan}):
        with pytest.raises(ValueError, match=f"{next(iter(sizes))}={next(iter(sizes.values()))}"):
            SyncQueue(**{"num_envs": 2, **sizes})
    numbers, vectors = SyncQueue(2), SyncQueue(2, task_shape=(2,), task_dtype=np.float32)
    for queue, tasks in ((numbers, [None, 1.5, "1", [1]]), (vectors, [None, 1.0, [1.0], [[1.0, 2.0]], "ab"])):
        for task in tasks:
            for call in (
                lambda q=queue, t=task: q.put_task(0, t),
                lambda q=queue, t=task: q.put_episode(0, t, 1, 1, 1),
            ):
                with pytest.raises(ValueError, match=re.escape(f"task {task!r} is not")):
                    call()
    for env_id in (-1, 2):  # -1 would be numpy's last
        calls = [lambda e=env_id: numbers.put_task(e, 1), lambda e=env_id: numbers.report_error(e, "")]
        calls += [lambda e=env_id: numbers.get_task(e), lambda e=env_id: numbers.tasks_waiting(e)]
        for call in calls:
            with pytest.raises(IndexError, match=f"environment {env_id} is not in 0..1"):
                call()
    assert [numbers.tasks_waiting(0), numbers.tasks_waiting(1), len(numbers.drain())] == [0, 0, 0]


def test_a_full_ring_holds_up_its_producer_until_the_time_out_and_keeps_what_it_has():
    queue = SyncQueue(2, prefetch=3, capacity=2, timeout=0.3)
    for task in range(3):
        queue.put_task(1, task)
    assert queue.tasks_waiting(1) == 3 and queue.tasks_waiting(0) == 0
    began = time.time()
    with pytest.raises(TimeoutError) as error:
        queue.put_task(1, 3)
    assert 0.3 <= time.time() - began < 2
    text = r"environment 1: the environment has taken no task, its ring of 3 is full, for 0\.3 s \(since ([\d:]+)\)"
    since = re.fullmatch(text, str(error.value)).group(1)
    assert since in [time.strftime("%H:%M:%S", time.localtime(began + late)) for late in (0, 1)]
    assert [queue.get_task(1) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(TimeoutError, match=r"environment 1: the learner has put no task for 0\.3 s \(since "):
        queue.get_task(1)
    queue.put_episode(0, 7, 1.0, 1, 0.0)
    queue.put_episode(0, 8, 1.0, 1, 0.0)
    with pytest.raises(
        TimeoutError, match=r"environment 0: the learner has drained no record, its ring of 2 is full, for"
    ):
        queue.put_episode(0, 9, 1.0, 1, 0.0)
    assert queue.drain()["task"].tolist() == [7, 8]
    queue.put_episode(0, 9, 1.0, 1, 0.0)
    assert queue.drain()["task"].tolist() == [9]


def boom(queue, env_id, text):
    try:
        queue.get_task(env_id)
        raise ValueError(text)
    except ValueError:
        queue.report_error(env_id, traceback.format_exc())
        raise


@pytest.mark.parametrize("method", ["fork", "spawn", "thread"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_a_worker_reaches_the_waiting_learner(method, capfd):
    queue = SyncQueue(4, prefetch=1, timeout=60)
    queue.put_task(2, 5)
    worker = start(method, boom, queue, 2, "boom-42")
    if method != "thread":
        queue.watch([worker])
    queue.put_task(3, 0)
    with pytest.raises(RuntimeError, match=r"(?s)environment 2 failed:\nTraceback .*in boom.*ValueError: boom-42"):
        queue.put_task(3, 1)  # full: environment 3 has no worker
    worker.join(10)
    with pytest.raises(RuntimeError, match="boom-42"):
        queue.drain()  # the text comes before the exit code, and whatever the learner does


def test_the_first_error_counts_and_long_texts_keep_their_end():
    queue = SyncQueue(3)
    queue.check()
    queue.report_error(2, "x" * 3000 + "é" * 5000 + "\nValueError: the cause ✗")
    time.sleep(0.01)
    queue.report_error(0, "a consequence")
    with pytest.raises(RuntimeError) as error:
        queue.check()
    text = str(error.value)
    assert text.startswith("environment 2 failed:\n[the beginning is cut off]\n")
    assert text.endswith("é\nValueError: the cause ✗") and 8100 < len(text.split("\n", 1)[1].encode()) <= 8192 + 4
    queue = SyncQueue(1)
    queue.report_error(0, "y" * 8192)
    with pytest.raises(RuntimeError, match="failed:\ny{8192}$"):
        queue.check()


@pytest.mark.parametrize("method", START)
def test_a_killed_worker_is_named_with_its_exit_code(method):
    queue = SyncQueue(2, prefetch=1)
    worker, done = start(method, play, queue, [0], 10**9), start("fork", play, queue, [], 0)
    queue.watch([done, worker])
    done.join()
    queue.put_task(0, 1)
    while not len(queue.drain()):  # it plays, and an exit code of 0 is no error
        time.sleep(0.01)
    queue.put_task(1, 1)
    threading.Timer(0.2, os.kill, (worker.pid, signal.SIGKILL)).start()
    began = time.time()
    with pytest.raises(RuntimeError, match=rf"worker {worker.name} \(pid {worker.pid}\) died with exit code -9"):
        queue.put_task(1, 2)
    assert time.time() - began < 2
    with pytest.raises(RuntimeError, match="exit code -9"):
        queue.drain()


def wait_for_ever(queue, side, path):
    """Waits on its side of the queue and writes down what ends that."""
    try:
        Path(f"{path}.pid").write_text(str(os.getpid()))
        while True:
            queue.get_task(0) if side == "task" else queue.put_episode(0, 1, 1.0, 1, 1.0)
    except BaseException as error:
        Path(f"{path}.new").write_text(f"{type(error).__name__}: {error}")
        Path(f"{path}.new").rename(path)


def learn_for_ever(method, path):
    queue = SyncQueue(1, capacity=1)
    workers = [start(method, wait_for_ever, queue, side, f"{path}/{side}") for side in ("task", "record")]
    Path(f"{path}/maps").write_text(Path("/proc/self/maps").read_text())
    workers[0].join()


def until(condition, seconds):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "not in time"
        time.sleep(0.01)


@pytest.mark.parametrize("method", START)
def test_a_killed_learner_ends_its_workers_and_leaves_nothing_in_dev_shm(method, tmp_path):
    learner = multiprocessing.get_context("spawn").Process(target=learn_for_ever, args=(method, tmp_path))
    learner.start()
    until(lambda: len(list(tmp_path.glob("*.pid"))) == 2, 30)
    time.sleep(0.2)
    pids = [learner.pid, *(int(file.read_text()) for file in tmp_path.glob("*.pid"))]
    shared = [line for line in (tmp_path / "maps").read_text().splitlines() if "/dev/shm" in line]
    assert len(shared) == 1 and shared[0].endswith("(deleted)")  # in use and already without a name
    os.kill(learner.pid, signal.SIGKILL)
    until(lambda: (tmp_path / "task").exists() and (tmp_path / "record").exists(), 3)  # a zombie until here
    for side in ("task", "record"):
        assert (tmp_path / side).read_text() == f"RuntimeError: environment 0: the learner (pid {learner.pid}) died"
    learner.join()
    assert not [name for name in os.listdir("/dev/shm") if any(str(pid) in name for pid in pids)]


def test_killed_workers_leave_nothing_in_dev_shm_and_the_queue_whole():
    queue = SyncQueue(2)
    workers = [start(method, play, queue, [env_id], 10**9) for env_id, method in enumerate(("fork", "spawn"))]
    for task in range(200):  # kill them at any place
        for env_id in range(2):
            queue.put_task(env_id, task)
        queue.drain()
    for worker in workers:
        worker.kill()
        worker.join()
    queue.drain()
    for env_id in range(2):  # another one goes on where it was
        while queue.tasks_waiting(env_id):
            queue.get_task(env_id)
        queue.put_task(env_id, 77)
        replay = start("fork", play, queue, [env_id], 1)
        replay.join(10)
        assert [record["task"] for record in queue.drain()] == [77]
    pids = [os.getpid(), *(worker.pid for worker in workers)]
    assert not [name for name in os.listdir("/dev/shm") if any(f"-{pid}-" in name for pid in pids)]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", "thread"])
def test_close_wakes_every_waiter(method, tmp_path):
    queue = SyncQueue(1, capacity=1)
    workers = [start(method, wait_for_ever, queue, side, tmp_path / side) for side in ("task", "record")]
    until(lambda: len(list(tmp_path.glob("*.pid"))) == 2 and queue._envs["sent"][0] == 1, 30)
    time.sleep(0.1)
    queue.close()
    began = time.time()
    for worker in workers:
        worker.join(10)
    assert time.time() - began < 2
    for side in ("task", "record"):
        assert (tmp_path / side).read_text() == "EOFError: environment 0: the learner closed the queue"
    with pytest.raises(EOFError):
        queue.put_task(0, 1)  # even if there is room
    assert len(queue.drain()) == 1  # what came before is not lost
    queue.close()


def test_waiting_tasks_are_saved_and_restored_in_order():
    import torch

    queue = SyncQueue(3, task_shape=(2,), task_dtype=np.float32, prefetch=5)
    for i in range(7):  # wraps around
        queue.put_task(0, [i, 0.5])
        if i > 3:
            queue.put_task(2, [i, 1.5])
        if i < 4:
            queue.get_task(0)
    queue.put_episode(1, [0, 0], 1.0, 1, 1.0)
    with pytest.raises(RuntimeError, match=r"1 episode records wait in the queue: drain\(\) them"):
        queue.state_dict()
    queue.drain()
    state = queue.state_dict()
    assert state["waiting"].tolist() == [3, 0, 3] and state["tasks"].dtype == np.float32
    assert state["tasks"].tolist() == [[4, 0.5], [5, 0.5], [6, 0.5], [4, 1.5], [5, 1.5], [6, 1.5]]
    restored = SyncQueue(3, task_shape=(2,), task_dtype=np.float32, prefetch=3)
    restored.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in state.items()})
    assert [restored.tasks_waiting(env_id) for env_id in range(3)] == [3, 0, 3]
    for env_id in (0, 2):
        assert [restored.get_task(env_id).tolist() for _ in range(3)] == [
            queue.get_task(env_id).tolist() for _ in range(3)
        ]
    for bad in (queue, SyncQueue(3, task_shape=(2,), prefetch=2), SyncQueue(4, task_shape=(2,), prefetch=3)):
        with pytest.raises(ValueError, match=r"\[3 0 3\] waiting tasks need a new queue"):
            bad.load_state_dict(state)
    with pytest.raises(ValueError, match="shorter"):
        SyncQueue(3, task_shape=(2,), task_dtype="f4", prefetch=3).load_state_dict(
            {**state, "tasks": state["tasks"][1:]}
        )
    empty = SyncQueue(3, task_shape=(2,)).state_dict()
    SyncQueue(3, task_shape=(2,)).load_state_dict(empty)


def test_builds_and_closes_leave_no_child_and_no_descriptor():
    """SYN-15."""

    def build():
        queue = SyncQueue(4)
        workers = [start("fork", play, queue, range(i, 4, 2), 3) for i in range(2)]
        assert len(feed(queue, 4, 3)) == 12
        queue.close()
        for worker in workers:
            worker.join(10)
            assert worker.exitcode == 0
            worker.close()

    build()  # whatever multiprocessing itself opens once
    gc.collect()
    children = lambda: Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()  # noqa: E731
    before, ours = len(os.listdir("/proc/self/fd")), children()
    for _ in range(10):
        build()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before and children() == ours


def test_a_closed_queue_and_its_late_workers_do_not_disturb_the_next_one():
    old = SyncQueue(1)
    late = old.__getstate__()  # as a worker holds it; the descriptor is its own
    old.close()
    del old
    new = SyncQueue(1)
    stale = SyncQueue.__new__(SyncQueue)
    stale.__setstate__(late)
    with pytest.raises(EOFError):
        stale.put_episode(0, 1, 1.0, 1, 1.0)
    stale.report_error(0, "too late")
    assert len(new.drain()) == 0


class AskForTask(gym.Wrapper):
    def __init__(self, env, queue, env_id):
        super().__init__(env)
        self.queue, self.env_id = queue, env_id

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return obs, {**info, "task": self.queue.get_task(self.env_id)}


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_travels_to_the_workers_of_a_vector_environment(method):
    queue = SyncQueue(2)
    for env_id in range(2):
        queue.put_task(env_id, 7 + env_id)
    envs = [lambda i=i: AskForTask(gym.make("CartPole-v1"), queue, i) for i in range(2)]
    envs = gym.vector.AsyncVectorEnv(envs, context=method)
    try:
        assert envs.reset()[1]["task"].tolist() == [7, 8]
    finally:
        envs.close()
