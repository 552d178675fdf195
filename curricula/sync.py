"""Shared memory between a curriculum and environments in other processes."""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import inspect
import mmap
import operator
import os
import pickle
import struct
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from multiprocessing.heap import Arena
from multiprocessing.reduction import DupFd
from threading import Lock

import cloudpickle
import gymnasium as gym
import numpy as np

from curricula.core import Curriculum, PettingZooTaskWrapper, TaskWrapper, as_task_space

_REQUIRES = "requires_step_updates", "requires_observations"


class SyncQueue:
    """Tasks to and finished episodes from `num_envs` environments, in shared memory. Build it in the learner's process.

    Each environment has a ring of `prefetch` task encodings and a ring of `capacity` episode records. Nothing is
    dropped: a full ring holds up its producer, an empty one its consumer, for `timeout` seconds at most. A worker gets
    the queue as an argument of its Process, under any start method, and reports its errors to it.
    No locks, which a killed process could hold: a ring has one writer and one reader, each with an aligned int64 that
    it alone counts up, after the payload. x86-64 keeps that order by itself, `_fence` enforces it elsewhere. The memory
    is a file without a name: nothing stays in /dev/shm, however the processes end.
    """

    def __init__(self, num_envs, *, task_shape=(), task_dtype=np.int64, prefetch=2, capacity=64, timeout=60.0):
        if not all(x > 0 for x in (num_envs, prefetch, capacity, timeout)):
            found = f"num_envs={num_envs}, prefetch={prefetch}, capacity={capacity}, timeout={timeout}"
            raise ValueError(f"a SyncQueue needs sizes and a timeout above 0, found {found}")
        record = [("env_id", "i8"), ("task", task_dtype, task_shape), ("episode_return", "f8"), ("length", "i8")]
        record = np.dtype([*record, ("progress", "f8")], align=True)
        rings = [("tasks", record["task"].base, (prefetch, *record["task"].shape)), ("records", record, (capacity,))]
        counters = [(name, "i8") for name in ("put", "got", "sent", "drained", "closed")]
        dtype = np.dtype([*counters, *rings, ("failed_at", "f8"), ("error", "S8192")], align=True)
        self._attach(num_envs, timeout, os.getpid(), dtype, Arena(num_envs * dtype.itemsize))

    def _attach(self, num_envs, timeout, learner, dtype, arena):
        self.num_envs, self.timeout, self._learner, self._arena, self._watched = num_envs, timeout, learner, arena, ()
        self._envs = np.frombuffer(arena.buffer, dtype, count=num_envs)

    def __getstate__(self):
        return self.num_envs, self.timeout, self._learner, self._envs.dtype, self._arena.size, DupFd(self._arena.fd)

    def __setstate__(self, state):
        *settings, size, fd = state
        self._attach(*settings, Arena(size, fd.detach()))

    def put_task(self, env_id, encoding):
        """Learner: appends a task to an environment's ring; waits while it is full."""
        self._append(env_id, "tasks", "put", "got", self._checked(encoding), "the environment has taken no task")

    def get_task(self, env_id):
        """Worker: the next task encoding, a number or an array of `task_shape`; waits for it."""
        tasks, put, got = (self._envs[name] for name in ("tasks", "put", "got"))
        self._wait(env_id, lambda: put[env_id] > got[env_id], "the learner has put no task")
        task = tasks[env_id, got[env_id] % tasks.shape[1]].copy()
        self._fence()
        got[env_id] += 1
        return task if task.shape else task.item()

    def tasks_waiting(self, env_id):
        self._check_env(env_id)
        return int(self._envs["put"][env_id] - self._envs["got"][env_id])

    def put_episode(self, env_id, task, episode_return, length, progress):
        """Worker: appends the record of a finished episode; waits while the ring is full."""
        record = (env_id, self._checked(task), episode_return, length, progress)
        self._append(env_id, "records", "sent", "drained", record, "the learner has drained no record")

    def drain(self):
        """Learner: all waiting records, a structured array (k,), k >= 0, by environment and in order of arrival."""
        self.check()
        sent = self._envs["sent"].copy()
        self._fence()
        records = self._between("records", self._envs["drained"], sent)
        self._fence()
        self._envs["drained"] = sent
        return records

    def report_error(self, env_id, traceback_text):
        """Worker: the learner's next look at the queue will raise this text (its last 8 KiB)."""
        self._check_env(env_id)
        text, cut = traceback_text.encode(errors="backslashreplace"), b"[the beginning is cut off]\n"
        self._envs["error"][env_id] = text if len(text) <= 8192 else cut + text[len(cut) - 8192 :]
        self._fence()
        self._envs["failed_at"][env_id] = time.time()

    def watch(self, processes):
        """Learner: the worker Processes; that one of them ends with an exit code but 0 is an error from now on."""
        self._watched = tuple(processes)

    def check(self):
        """Learner: RuntimeError with the first error that a worker reported, or else with a dead worker's exit code."""
        dead = [process for process in self._watched if process.exitcode]  # before errors: a worker reports, then dies
        failed_at = self._envs["failed_at"]
        if failed_at.any():
            env_id = np.where(failed_at > 0, failed_at, np.inf).argmin()
            raise RuntimeError(f"environment {env_id} failed:\n{self._envs['error'][env_id].decode(errors='replace')}")
        if dead:
            raise RuntimeError(f"worker {dead[0].name} (pid {dead[0].pid}) died with exit code {dead[0].exitcode}")

    def close(self):
        """From now on a worker that waits, or comes for a task or with an episode, gets an EOFError."""
        self._envs["closed"] = 1

    def state_dict(self):
        """The tasks waiting in the rings, by environment. All records are drained, and the environments stand still."""
        if count := int((self._envs["sent"] - self._envs["drained"]).sum()):
            raise RuntimeError(f"{count} episode records wait in the queue: drain() them, then save its state")
        put, got = self._envs["put"], self._envs["got"]
        return {"waiting": put - got, "tasks": self._between("tasks", got, put)}

    def load_state_dict(self, state):
        """Into a new queue."""
        waiting, tasks = np.asarray(state["waiting"]), np.asarray(state["tasks"])
        if self._envs["put"].any() or len(waiting) != self.num_envs or waiting.max() > self._envs["tasks"].shape[1]:
            raise ValueError(f"{waiting} waiting tasks need a new queue: that many rings, prefetch >= {waiting.max()}")
        for env_id, task in zip(np.repeat(np.arange(self.num_envs), waiting), tasks, strict=True):
            self.put_task(env_id, task)

    def _checked(self, encoding):
        task, ring = np.asarray(encoding), self._envs["tasks"]
        fits = task.shape == ring.shape[2:] and np.can_cast(task.dtype, ring.dtype, "same_kind")
        if fits and task.dtype != ring.dtype:  # of other kinds every value must stay, of floats all but the last digits
            with np.errstate(over="ignore"):
                given, task = task, task.astype(ring.dtype)
            fits = (np.isfinite(task) == np.isfinite(given) if given.dtype.kind in "fc" else task == given).all()
        if not fits:
            raise ValueError(f"task {encoding!r} is not an encoding of shape {ring.shape[2:]}, dtype {ring.dtype}")
        return task

    def _check_env(self, env_id):
        if not 0 <= env_id < self.num_envs:  # -1 would be the last
            raise IndexError(f"environment {env_id} is not in 0..{self.num_envs - 1}")

    def _append(self, env_id, ring, head, tail, entry, stuck):
        ring, head, tail = (self._envs[name] for name in (ring, head, tail))
        size = ring.shape[1]
        self._wait(env_id, lambda: head[env_id] - tail[env_id] < size, f"{stuck}, its ring of {size} is full,")
        ring[env_id, head[env_id] % size] = entry
        self._fence()
        head[env_id] += 1

    def _between(self, ring, start, stop):
        """Copies of the entries start[i]:stop[i] of each environment's ring."""
        ring, count = self._envs[ring], stop - start
        place = np.arange(count.sum()) + np.repeat(stop - count.cumsum(), count)
        return ring[np.repeat(np.arange(self.num_envs), count), place % ring.shape[1]]

    def _wait(self, env_id, ready, stuck):
        """Until `ready()`: a short spin, then naps of up to 1 ms. Raises if the other side fails, dies or closes."""
        self._check_env(env_id)
        start, naps = time.monotonic(), 0
        while self._envs["closed"][env_id] or not ready():
            waited = time.monotonic() - start
            if self._envs["closed"][env_id]:
                raise EOFError(f"environment {env_id}: the learner closed the queue")
            if waited > self.timeout:
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
                raise TimeoutError(f"environment {env_id}: {stuck} for {waited:.1f} s (since {since})")
            if naps % 20 == 0 and os.getpid() == self._learner:
                self.check()
            # a fork server's child never has the learner as its parent; a zombie has no exe
            elif naps % 20 == 0 and os.getppid() != self._learner and not os.path.exists(f"/proc/{self._learner}/exe"):
                raise RuntimeError(f"environment {env_id}: the learner (pid {self._learner}) died")
            time.sleep(min(naps // 20 * 5e-5, 1e-3))
            naps += 1
        self._fence()

    @staticmethod
    def _fence():
        """Memory accesses before it stay before those after it: a lock's release, then its acquisition."""
        lock = Lock()
        lock.acquire()
        lock.release()
        lock.acquire()


@functools.cache
def _futex():
    """Linux' futex(address, operation, value, timeout): 0 sleeps while that int32 is the value, 1 wakes a sleeper."""
    number = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None:
        raise OSError(f"curricula/sync.py needs Linux on x86_64 or aarch64, this is {sys.platform}")
    call = ctypes.CDLL(None).syscall  # releases the GIL meanwhile
    call.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return functools.partial(call, number)


def _tree(space):
    """A gymnasium space as dicts and tuples of dtypes, one for each array in its elements."""
    if isinstance(space, gym.spaces.Dict):
        return {key: _tree(part) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(map(_tree, space.spaces))
    if space.shape is None:
        raise ValueError(f"the elements of {space} have no fixed size: they cannot travel through shared memory")
    return np.dtype((space.dtype, space.shape))


def _leaves(tree, element):
    """The arrays in an element, in the tree's order."""
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in _leaves(tree[key], element[key])]
    if isinstance(tree, tuple):
        return [leaf for part, value in zip(tree, element) for leaf in _leaves(part, value)]
    return [element]


def _nest(tree, leaves):
    """The element with these arrays, an iterator: the inverse of `_leaves`."""
    if isinstance(tree, dict):
        return {key: _nest(part, leaves) for key, part in tree.items()}
    return tuple(_nest(part, leaves) for part in tree) if isinstance(tree, tuple) else next(leaves)


class _TaskCodec:
    """Task encodings as `nbytes` bytes: the position in a finite space, otherwise the arrays themselves."""

    def __init__(self, space):
        self._space, self._finite = space, space.num_tasks is not None and space.num_tasks < 2**63
        self._tree = np.dtype(np.int64) if self._finite else _tree(space.gym_space)
        self._types = _leaves(self._tree, self._tree)
        self.nbytes = -(-sum(leaf.itemsize for leaf in self._types) // 8) * 8

    def pack(self, encoding):
        if self._finite:
            return self._space.index(encoding).to_bytes(8, sys.byteorder)
        if not self._space.contains(encoding):
            raise ValueError(f"{encoding!r} is not in {self._space!r}")
        leaves = zip(self._types, _leaves(self._tree, encoding))
        return b"".join(np.asarray(leaf, kind.base).tobytes() for kind, leaf in leaves).ljust(self.nbytes, b"\0")

    def unpack(self, data):
        if self._finite:
            return self._space.encoding(int.from_bytes(data, sys.byteorder))
        leaves, start = [], 0
        for kind in self._types:
            leaf = np.frombuffer(data, kind, 1, start)[0]
            leaves.append(leaf.item() if kind.shape == () and kind.kind in "iu" else np.array(leaf))
            start += kind.itemsize
        return _nest(self._tree, iter(leaves))


class SyncComponents:
    """The shared memory between a curriculum and up to `max_envs` environments: give it to their processes or threads.

    An environment has a ring of tasks and a ring of `ring_bytes` for its messages: steps, completed tasks, finished
    episodes. Nothing is dropped: a full ring holds up its writer, an empty one its reader, `timeout` seconds at most.
    As in SyncQueue there are no locks that a killed process could hold, and the memory has no name. Beyond SyncQueue,
    environments come and go, messages have any size, and who waits sleeps until it is woken (a futex). An environment
    holds its place by an open file description lock, which the kernel takes back when its process ends. Linux only.
    """

    MAX_BUFFER = 16  # tasks in a ring
    HEAD = struct.Struct("6q")  # of a message: its bytes, time in ns, kind, agent, steps, tasks wanted since the start
    HELLO, STEPS, PROGRESS, EPISODE, ASK, ERROR = 0, 1, 2, 3, 4, 6  # kinds of messages; 5 is curricula/ray_sync.py's
    SENT, GOT, OWNER, PUT, FREED, WAITING = 0, 1, 2, 8, 9, 10  # words of a place: a cache line for each side's writes
    ASLEEP, CLOSED, FAILED, BUSY, EMPTY = range(5)  # words for all, then up to 8 KiB of the error's text
    _ERROR_AT, _PLACES_AT, _ERROR_BYTES = 64, 64 + 8192, 8192
    _words = None  # over Ray there are none

    def __init__(self, task_space, *, max_envs, timeout, ring_bytes, requires_step_updates, requires_observations):
        if not all(0 < x < 10**15 and x % 1 == 0 for x in (max_envs, ring_bytes)) or not 0 < timeout < 10**6:
            found = f"max_envs={max_envs}, timeout={timeout}, ring_bytes={ring_bytes}"
            raise ValueError(f"a curriculum needs whole sizes and a timeout above 0, of at most 1e6 s, found {found}")
        settings = task_space, max_envs, timeout, -(-ring_bytes // 8) * 8, requires_step_updates, requires_observations
        self._attach((*settings, os.getpid()), os.memfd_create("curriculum"))

    def _attach(self, settings, fd):
        self._settings, self._fd, self.serve = settings, fd, None
        self.task_space, self.max_envs, self.timeout, self.ring_bytes, *required, self.learner = settings
        self.requires_step_updates, self.requires_observations = required
        weakref.finalize(self, os.close, fd)
        _futex()  # raises where there is none
        self.codec = _TaskCodec(self.task_space)
        self._tasks_at = self._PLACES_AT + 128 * self.max_envs
        self._rings_at = self._tasks_at + self.max_envs * self.MAX_BUFFER * self.codec.nbytes
        size = self._rings_at + self.max_envs * self.ring_bytes
        if os.getpid() == self.learner:
            os.ftruncate(fd, size)  # a page costs memory from its first use on
        self._memory = memoryview(mmap.mmap(fd, size))
        self._words = self._memory[: self._tasks_at].cast("q")
        self._address = np.frombuffer(self._words, np.int64).ctypes.data
        self._places = np.frombuffer(self._words, np.int64)[self._PLACES_AT // 8 :].reshape(self.max_envs, 16)
        self._lost = {}  # place -> the process that lost it to this one

    def __getstate__(self):
        try:
            settings = cloudpickle.dumps(self._settings)  # takes lambdas too; gymnasium itself needs it
        except Exception as error:
            stuck = (f"the task {task!r}" for task in self.task_space._names or () if not _pickles(task))
            fix = "name such tasks by strings and look them up in change_task, or start the processes by fork"
            raise TypeError(f"{next(stuck, self.task_space)} cannot go to another process ({error}): {fix}") from error
        return settings, DupFd(self._fd)

    def __setstate__(self, state):
        settings, fd = state
        self._attach(pickle.loads(settings), fd.detach())

    # Both sides.

    def _index(self, place, name):
        return self._PLACES_AT // 8 + 16 * place + name

    def word(self, place, name):
        return self._words[self._index(place, name)]

    def set_word(self, place, name, value):
        """Publishes what was written before."""
        SyncQueue._fence()
        self._words[self._index(place, name)] = value

    def _sleep(self, index, ready, seconds):
        """Until a wake() of the word `index`, or `ready()`, or the time is over."""
        self._words[index] = 1
        SyncQueue._fence()  # the other side looks at the word after its change, this one at the change after the word
        if not ready():
            _futex()(self._address + 8 * index, 0, 1, (ctypes.c_long * 2)(*divmod(int(seconds * 1e9), 10**9)))
        self._words[index] = 0

    def _wake(self, index):
        SyncQueue._fence()
        if self._words[index]:
            self._words[index] = 0
            _futex()(self._address + 8 * index, 1, 1, None)

    # The environments' side.

    def claim(self, env_id):
        """Takes the place `env_id`, or the first that is free: (place, descriptor of the file that locks it)."""
        if env_id is not None and not 0 <= env_id < self.max_envs:
            raise ValueError(f"env_id {env_id} is not in 0..{self.max_envs - 1}: ask for a larger max_envs")
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR)  # a description of its own, which owns its locks
        for place in range(self.max_envs) if env_id is None else (env_id,):
            with contextlib.suppress(BlockingIOError):
                self._lock(fd, fcntl.F_OFD_SETLK, fcntl.F_WRLCK, place)
                self._lost[place] = self.word(place, self.OWNER)
                self.set_word(place, self.OWNER, os.getpid())
                return place, fd
        os.close(fd)
        if env_id is not None:
            raise ValueError(
                f"environment {env_id} is there already, in the process {_holder(self.word(env_id, self.OWNER))}"
            )
        pids = ", ".join(map(_holder, np.unique(self._places[:, self.OWNER]).tolist()))
        fix = "give make_multiprocessing_curriculum a larger max_envs"
        raise ValueError(f"all {self.max_envs} places for environments are taken (by the processes {pids}): {fix}")

    def release(self, place, fd):
        self.set_word(place, self.OWNER, 0)
        self._lock(fd, fcntl.F_OFD_SETLK, fcntl.F_UNLCK, place)

    @staticmethod
    def _lock(fd, command, kind, place):
        flock = struct.Struct("hhqqi4x")
        return flock.unpack(fcntl.fcntl(fd, command, flock.pack(kind, os.SEEK_SET, place, 1, 0)))[0]

    def lost(self, place):
        """To the one who claimed a place: the process that held it before, if it left without release(), or 0."""
        return self._lost.pop(place) if self._words else 0

    def take(self, place):
        """The next task encoding; waits for it."""
        self._wait(place, lambda: self.word(place, self.PUT) > self.word(place, self.GOT), "has drawn no task")
        got, nbytes = self.word(place, self.GOT), self.codec.nbytes
        start = self._tasks_at + (place * self.MAX_BUFFER + got % self.MAX_BUFFER) * nbytes
        task = self.codec.unpack(self._memory[start : start + nbytes])
        self.set_word(place, self.GOT, got + 1)
        return task

    def send(self, place, kind, agent=0, parts=(), steps=0, buffer=0, wake=True):
        """Appends a message; waits while the ring is full. `buffer`: tasks to be drawn beyond those taken."""
        size, start = self.HEAD.size + sum(map(len, parts)), self._rings_at + place * self.ring_bytes
        if size > self.ring_bytes // 2:  # it must fit beside the rest of a ring that it did not fit into
            raise ValueError(
                f"a message of {size} bytes exceeds half the ring: ring_bytes={self.ring_bytes} is too small"
            )
        sent = self.word(place, self.SENT)
        rest = self.ring_bytes - sent % self.ring_bytes
        skipped = rest if rest < size else 0  # a message lies in one piece
        ready = lambda: sent + skipped + size - self.word(place, self.FREED) <= self.ring_bytes  # noqa: E731
        self._wait(place, ready, f"has read no update, the ring of {self.ring_bytes} bytes is full,")
        if skipped:
            struct.pack_into("q", self._memory, start + sent % self.ring_bytes, -skipped)
            sent += skipped
        at = start + sent % self.ring_bytes
        wanted = self.word(place, self.GOT) + buffer if buffer else 0
        self.HEAD.pack_into(self._memory, at, size, time.monotonic_ns(), kind, agent, steps, wanted)
        at += self.HEAD.size
        for part in parts:
            self._memory[at : at + len(part)] = part
            at += len(part)
        self.set_word(place, self.SENT, sent + size)
        if wake or sent + size - self.word(place, self.FREED) > self.ring_bytes // 2:
            self._wake(self.ASLEEP)
        self._check(place)  # sent while the learner stopped: perhaps too late

    def _check(self, place):
        if self._words[self.FAILED]:
            text = bytes(self._memory[self._ERROR_AT : self._ERROR_AT + self._words[self.FAILED]])
            raise RuntimeError(f"environment {place}: the curriculum failed:\n{text.decode(errors='replace')}")
        if self._words[self.CLOSED]:
            raise EOFError(f"environment {place}: the curriculum was stopped")

    def _wait(self, place, ready, stuck):
        start, here = time.monotonic(), os.getpid() == self.learner
        over = lambda: ready() or self._words[self.FAILED] or self._words[self.CLOSED]  # noqa: E731
        while self._check(place) or not ready():
            waited = time.monotonic() - start
            if waited >= self.timeout:
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
                stuck = f"the curriculum (in process {self.learner}; is it started?) {stuck}"
                raise TimeoutError(f"environment {place}: {stuck} for {waited:.1f} s (since {since}){self._why()}")
            if here and self.serve and self.serve():
                continue
            # a fork server's child never has the learner as its parent; a zombie has no exe
            if not here and os.getppid() != self.learner and not os.path.exists(f"/proc/{self.learner}/exe"):
                raise RuntimeError(f"environment {place}: the curriculum's process {self.learner} died")
            self._wake(self.ASLEEP)
            self._sleep(self._index(place, self.WAITING), over, min(1.0, self.timeout - waited))
        SyncQueue._fence()

    def _why(self):
        if since := self._words[self.BUSY]:
            busy = (time.monotonic_ns() - since) / 1e9
            return f": it has been busy for {busy:.1f} s, which may take a longer timeout"
        return ": it has no task to give; a Manual curriculum needs add_tasks([...])" if self._words[self.EMPTY] else ""

    # The learner's side.

    def note(self, word, value):
        if self._words:
            self._words[word] = value

    def messages(self):
        """What lies in the rings, by its time: tuples (time, place, kind, agent, steps, wanted, start, stop, freed)."""
        found, ends, freed = [], self._places[:, self.SENT].copy(), self._places[:, self.FREED]  # ends at one moment
        SyncQueue._fence()
        for place in np.flatnonzero(ends != freed).tolist():
            freed, sent, start = self.word(place, self.FREED), ends[place], self._rings_at + place * self.ring_bytes
            while freed < sent:
                at = start + freed % self.ring_bytes
                size = int.from_bytes(self._memory[at : at + 8], sys.byteorder, signed=True)
                freed += abs(size)
                if size > 0:
                    _, *head = self.HEAD.unpack_from(self._memory, at)
                    found.append((head[0], place, *head[1:], at + self.HEAD.size, at + size, freed))
        found.sort(key=operator.itemgetter(0))
        return found

    def read(self, place, start, stop, freed):
        """A copy of a message's body, whose place in the ring is free from now on."""
        body = bytearray(self._memory[start:stop])
        self.set_word(place, self.FREED, freed)
        self._wake(self._index(place, self.WAITING))
        return body

    def put(self, place, tasks):
        put, nbytes = self.word(place, self.PUT), self.codec.nbytes
        for number, task in enumerate(map(self.codec.pack, tasks), put):
            start = self._tasks_at + (place * self.MAX_BUFFER + number % self.MAX_BUFFER) * nbytes
            self._memory[start : start + nbytes] = task
        self.set_word(place, self.PUT, put + len(tasks))
        self._wake(self._index(place, self.WAITING))

    def any_put(self):
        return bool(self._places[:, self.PUT].any())

    def waiting(self):
        """Tasks that were drawn and not taken yet: {place: list of encodings}."""
        found, nbytes = {}, self.codec.nbytes
        for place in np.flatnonzero(self._places[:, self.PUT] > self._places[:, self.GOT]).tolist():
            numbers = range(self.word(place, self.GOT), self.word(place, self.PUT))
            starts = [self._tasks_at + (place * self.MAX_BUFFER + n % self.MAX_BUFFER) * nbytes for n in numbers]
            found[place] = [self.codec.unpack(self._memory[start : start + nbytes]) for start in starts]
        return found

    def dead(self):
        """Environments whose processes are gone without close(): {place: pid}."""
        found = {}
        for place in np.flatnonzero(self._places[:, self.OWNER]).tolist():
            pid = self.word(place, self.OWNER)
            free = self._lock(self._fd, fcntl.F_OFD_GETLK, fcntl.F_WRLCK, place) == fcntl.F_UNLCK
            if (free or _gone(pid)) and pid == self.word(place, self.OWNER):
                found[place] = pid
        return found

    def close(self, error=""):
        """Ends all waiting, with a RuntimeError of this text if there is one, otherwise an EOFError."""
        text = error.encode(errors="backslashreplace")[-self._ERROR_BYTES :]
        self._memory[self._ERROR_AT : self._ERROR_AT + len(text)] = text
        SyncQueue._fence()
        self._words[self.FAILED if text else self.CLOSED] = len(text) or 1
        for place in range(self.max_envs):
            self._wake(self._index(place, self.WAITING))
        self._wake(self.ASLEEP)

    def rest(self, seconds):
        """Until an environment wants something."""
        over = lambda: self._words[self.CLOSED] or (self._places[:, self.SENT] != self._places[:, self.FREED]).any()  # noqa: E731
        self._sleep(self.ASLEEP, over, seconds)


def _pickles(task):
    try:
        return bool(cloudpickle.dumps(task))
    except Exception:
        return False


def _gone(pid):
    return not os.path.exists(f"/proc/{pid}/exe")  # which a zombie lacks


def _holder(pid):
    """A process that holds a place, in words."""
    return f"{pid} (which is gone; a child that it forked still holds the place: end that)" if _gone(pid) else str(pid)


def _step_record(tree):
    """What a step is in a message: (reward, progress, terminated, truncated), then the arrays of its observation."""
    leaves = [(str(i), leaf) for i, leaf in enumerate(_leaves(tree, tree))]
    return np.dtype([("row", "f8", 4), *leaves], align=True)


class _Track:
    """One agent's share of the episode underway. Its steps wait here until there are `batch`, or the episode ends.

    A step's observation is the one that the agent acted on; behind the last step of an episode comes the final one.
    All are copied at once. Without a batch no steps are kept, with the tree () no observations.
    """

    def __init__(self, agent, tree, batch):
        self.agent, self.tree, self.full, self.rows = agent, tree, 4 * batch, []
        self.block = np.zeros(batch + 1, _step_record(tree))
        self.fields = [self.block[name] for name in self.block.dtype.names[1:]]
        self.started = False

    def start(self, obs):
        self.started, self.ended, self.episode_return, self.length = True, False, 0.0, 0
        self.write(0, obs)

    def write(self, index, obs):
        if self.fields:
            for field, leaf in zip(self.fields, _leaves(self.tree, obs)):
                field[index] = leaf

    def add(self, link, obs, reward, progress, terminated, truncated):
        try:
            valid = 0 <= progress <= 1
        except TypeError:
            valid = False
        if not valid:
            fix = "let _task_completion return a number in [0, 1]"
            raise ValueError(f"task_completion {progress!r} of the task {link.task!r} is outside [0, 1]: {fix}")
        self.episode_return += float(reward)
        self.length += 1
        self.ended, link.progress = terminated or truncated, progress
        if self.full:
            if len(self.rows) == self.full:  # not earlier: cut() needs a step that was not sent
                self.flush(link)
            self.rows += (reward, progress, terminated, truncated)
            self.write(len(self.rows) // 4, obs)

    def flush(self, link):
        count = len(self.rows) // 4
        if count:
            final = bool(self.fields) and bool(self.rows[-2] or self.rows[-1])
            self.block["row"][:count] = np.array(self.rows, np.float64).reshape(count, 4)
            body = self.block[: count + final].view(np.uint8)
            link.send(SyncComponents.STEPS, self, (link.packed, body), count, wake=False)
            self.block[0] = self.block[count]
            self.rows = []


_NO_TASK = object()  # between episodes: no task of a step is this one


class _Link:
    """An environment's end of the SyncComponents: takes its place at the first reset, and reports its episodes."""

    def __init__(self, components, task_space, spaces, env_id, batch_size, buffer_size, change_task_on_completion):
        if not isinstance(components, SyncComponents):
            found = f"found {type(components).__name__}"
            raise TypeError(f"components is the .components of make_multiprocessing_curriculum's return, {found}")
        task_space = as_task_space(task_space)
        if not _same(task_space, components.task_space):
            raise ValueError(f"the environment's {task_space!r} is not the curriculum's {components.task_space!r}")
        if batch_size < 1 or not 1 <= buffer_size <= components.MAX_BUFFER:
            found = f"found batch_size={batch_size}, buffer_size={buffer_size}"
            raise ValueError(f"batch_size is at least 1 and buffer_size in 1..{components.MAX_BUFFER}, {found}")
        self.components, self.task_space, self._wanted_id, self._buffer = components, task_space, env_id, buffer_size
        self.env_id = env_id
        self.changes_task, self.task, self.packed = change_task_on_completion, _NO_TASK, None
        self._pid, self._underway, self._asked = None, False, False
        trees = [_tree(space) if components.requires_observations else () for space in spaces]
        self.tracks, room = [], components.ring_bytes // 2 - components.HEAD.size - components.codec.nbytes
        for agent, tree in enumerate(trees if components.requires_step_updates else ()):
            nbytes = _step_record(tree).itemsize
            if 2 * nbytes > room:
                fix = f"give make_multiprocessing_curriculum ring_bytes={8 * nbytes} or more"
                raise ValueError(f"a step of {nbytes} bytes does not fit a ring of {components.ring_bytes}: {fix}")
            cached = max(1, 2**20 // nbytes)  # observations that are still in the cache when they are sent
            self.tracks.append(_Track(agent, tree, min(batch_size, room // nbytes - 1, cached)))
        self.tracks = self.tracks or [_Track(agent, (), 0) for agent in range(len(spaces))]
        hello = pickle.dumps((len(spaces), trees, buffer_size))
        self._hello = hello.ljust(-(-len(hello) // 8) * 8, b"\0")  # pickle.loads stops where the pickle ends

    def send(self, kind, track=None, parts=(), steps=0, ask=False, wake=True):
        if self._pid != os.getpid():
            raise RuntimeError(f"environment {self.env_id} belongs to the process {self._pid}, not to {os.getpid()}")
        agent, buffer = track.agent if track else 0, self._buffer if ask else 0
        self.components.send(self.env_id, kind, agent, parts, steps, buffer, wake)
        self._asked = self._asked or ask

    def next_task(self):
        """The next task, decoded, for the start of an episode; the episode underway is over, cut off."""
        if self._pid is None:
            self.env_id, fd = self.components.claim(self._wanted_id)
            self._pid, self._release = os.getpid(), weakref.finalize(self, os.close, fd)
            self._fd = fd
            self.send(SyncComponents.HELLO, None, (self._hello,), self.components.lost(self.env_id), ask=True)
        self._cut()
        return self._take()

    def _take(self):
        if not self._asked:
            self.send(SyncComponents.ASK, ask=True)
        self._asked = False
        return self.task_space.decode(self.components.take(self.env_id))

    def start(self, info, observations):
        """After the environment's reset, whose info has the task; each agent's observation (None: not there yet)."""
        if "task" not in info:
            raise ValueError(
                f"reset(new_task=...) told no task: its info needs 'task', as a TaskWrapper's, found {info}"
            )
        self._underway, self.progress = True, 0.0
        self.play(info["task"])
        for track, obs in zip(self.tracks, observations):
            track.started = False
            if obs is not None:
                track.start(obs)

    def play(self, task):
        """From now on the environment plays `task`."""
        self._check_underway()
        encoding = self.task_space.encode(task)
        packed = self.components.codec.pack(encoding)
        if packed != self.packed:  # an equal task may be another object
            self._flush()
        self.task, self.encoding, self.packed = task, encoding, packed

    def _check_underway(self):
        if not self._underway:
            raise RuntimeError("the episode is over, or has not begun: reset() the environment first")

    def complete(self):
        """The task is done and the episode goes on: reports it, and returns the next task, decoded."""
        self._flush()
        self._report()
        return self._take()

    def finish(self):
        """The episode is over."""
        self._check_underway()
        self._flush()
        self._underway, self.task = False, _NO_TASK
        self._report()

    def _report(self):
        tracks = [track for track in self.tracks if track.started]
        for track in tracks:
            kind, figures = SyncComponents.PROGRESS, struct.pack("d", self.progress)
            if track.ended or not self._underway:
                kind, track.started = SyncComponents.EPISODE, False
                figures = struct.pack("dqd", track.episode_return, track.length, self.progress)
            self.send(kind, track, (self.packed, figures), ask=track is tracks[-1])

    def failed(self):
        """The environment raises: the curriculum's process is told, in case that this one dies of it."""
        text = traceback.format_exc().encode(errors="backslashreplace")[-1024:]
        with contextlib.suppress(EOFError, RuntimeError, TimeoutError):  # the error underway is the one to raise
            self.send(SyncComponents.ERROR, None, (text.ljust(-(-len(text) // 8) * 8),))

    def _flush(self):
        for track in self.tracks:
            track.flush(self)

    def _cut(self):
        """An episode that nobody plays to its end counts as truncated in its steps, and is no finished episode."""
        for track in self.tracks if self._underway else ():
            if track.rows and not track.rows[-2]:
                track.rows[-1] = True
        self._flush()
        self._underway, self.task = False, _NO_TASK

    def close(self):
        if self._pid == os.getpid():
            try:
                with contextlib.suppress(EOFError, RuntimeError):  # stopped or failed: nobody is left to be told
                    self._cut()
            finally:
                self.components.release(self.env_id, self._fd)
                self._release()
                self._pid = None


def _same(space, other):
    """Whether two task spaces, perhaps in different processes, are the same as far as one can tell."""
    if space is other:
        return True
    names, others = space._names or [], other._names or []
    if space.gym_space != other.gym_space or len(names) != len(others):
        return False
    plain = (str, int, float, tuple, list)  # other objects need not be equal to their copies
    return all(map(_same, space._parts or (), other._parts or ())) and all(
        space._key(a) == space._key(b) for a, b in zip(names, others) if isinstance(a, plain)
    )


class GymnasiumSyncWrapper(gym.Wrapper):
    """Plays the tasks of a curriculum, possibly in another process, and reports what becomes of them.

    `env` is a TaskWrapper, or an environment with its interface: reset(new_task=...), change_task, and both
    `info["task"]` and `info["task_completion"]`. Here `info["task"]` becomes the encoding, as curricula see it.
    `env_id` is the environment's place in 0..max_envs-1; by default the first free one at the first reset. A place
    that a dead process left goes to the next environment, with the tasks that were drawn for it and not taken; the one
    underway is lost. `buffer_size`: tasks drawn beyond those of finished episodes. 1: each is drawn after the report of
    the episode before; 2 (the default): one episode earlier, so that reset need not wait. Up to `batch_size` steps
    travel together. `change_task_on_completion`: a task that is done within an episode is reported and replaced.
    Its observation then has the new goal of a TaskWrapper. An episode cut off by reset() or close() is no finished
    episode: its last step is truncated, unless it completed a task, and the curriculum hears of it by update_on_end.
    """

    def __init__(
        self,
        env,
        task_space,
        components,
        *,
        env_id=None,
        batch_size=100,
        buffer_size=2,
        change_task_on_completion=False,
    ):
        super().__init__(env)
        _check_task_wrapper(env)
        settings = env_id, batch_size, buffer_size, change_task_on_completion
        self._link = _Link(components, task_space, [env.observation_space], *settings)
        self._track = self._link.tracks[0]

    def reset(self, *, seed=None, options=None):
        task = self._link.next_task()
        try:
            obs, info = self.env.reset(new_task=task, seed=seed, options=options)
        except Exception:
            self._link.failed()
            raise
        self._link.start(info, [obs])
        return obs, {**info, "task": self._link.encoding}

    def step(self, action):
        link = self._link
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except Exception:
            link.failed()
            raise
        if info["task"] is not link.task:
            link.play(info["task"])
        self._track.add(link, obs, reward, info["task_completion"], terminated, truncated)
        info = {**info, "task": link.encoding}
        if terminated or truncated:
            link.finish()
        elif link.changes_task and info["task_completion"] >= 1:
            self.env.change_task(link.complete())
            if isinstance(self.env, TaskWrapper):
                obs = self.env._with_goal(obs, self.env.observation_space)
                self._track.write(0, obs)  # what the agent acts on next
        return obs, reward, terminated, truncated, info

    def close(self):
        try:
            self._link.close()
        finally:
            super().close()


class PettingZooSyncWrapper:
    """The same for a parallel PettingZoo environment, a PettingZooTaskWrapper: its agents play one task together.

    Each agent's steps and episode are reported by themselves: to the curriculum, agent j of `possible_agents` in
    environment i is the environment `i * len(possible_agents) + j`. An agent's length counts the steps that it was
    there; all are reported when no agent is left, those that are gone also when the task changes. Other than that it
    answers to what `env` does.
    """

    def __init__(
        self,
        env,
        task_space,
        components,
        *,
        env_id=None,
        batch_size=100,
        buffer_size=2,
        change_task_on_completion=False,
    ):
        self.env = env
        _check_task_wrapper(env)
        spaces = [env.observation_space(agent) for agent in env.possible_agents]
        settings = env_id, batch_size, buffer_size, change_task_on_completion
        self._link = _Link(components, task_space, spaces, *settings)
        self._tracks = dict(zip(env.possible_agents, self._link.tracks))

    def __getattr__(self, name):
        if name == "env" or name.startswith("_"):  # not there yet while it is unpickled
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.env, name)

    def reset(self, seed=None, options=None):
        task = self._link.next_task()
        try:
            obs, infos = self.env.reset(seed=seed, options=options, new_task=task)
        except Exception:
            self._link.failed()
            raise
        self._link.start(infos[next(iter(obs))], [obs.get(agent) for agent in self._tracks])
        return obs, self._with_encoding(infos)

    def step(self, actions):
        link = self._link
        try:
            obs, rewards, terminations, truncations, infos = self.env.step(actions)
        except Exception:
            link.failed()
            raise
        for agent in obs:
            if infos[agent]["task"] is not link.task:
                link.play(infos[agent]["task"])
            if self._tracks[agent].started:
                outcome = rewards[agent], infos[agent]["task_completion"], terminations[agent], truncations[agent]
                self._tracks[agent].add(link, obs[agent], *outcome)
            else:  # it came in with this step
                self._tracks[agent].start(obs[agent])
        infos = self._with_encoding(infos)
        if not self.env.agents:
            link.finish()
        elif link.changes_task and link.progress >= 1:
            self.env.change_task(link.complete())
            if isinstance(self.env, PettingZooTaskWrapper):
                obs = {agent: self.env._with_goal(o, self.env.observation_space(agent)) for agent, o in obs.items()}
                for agent, o in obs.items():
                    self._tracks[agent].write(0, o)
        return obs, rewards, terminations, truncations, infos

    def _with_encoding(self, infos):
        return {agent: {**info, "task": self._link.encoding} for agent, info in infos.items()}

    def close(self):
        try:
            self._link.close()
        finally:
            self.env.close()


def _check_task_wrapper(env):
    if not hasattr(env, "change_task"):
        raise TypeError(f"{env} takes no task: wrap it in a TaskWrapper, and other wrappers around the sync wrapper")


class CurriculumSyncWrapper:
    """A curriculum whose environments may live in other processes: they get `.components`. Everything else is the
    curriculum's own: methods run under a lock, with a thread that draws tasks and applies updates.

    Updates are applied once and in order for each environment; of several, in the order of their clocks. A task is
    drawn for one environment, when that asks for it. Hence with one environment, or several that one process steps in
    a fixed order, the same seed draws the same tasks; with several processes their timing decides who comes first.
    A failure of the curriculum is raised in every environment at once, and here at the next call and by stop().
    Without start(), pump() does the thread's work, and environments in this process do it by themselves.
    After Ctrl-C or another exception the thread gets HURRY seconds to finish, otherwise the time-out.
    `final_obs` in the info of an episode's last step is the observation after it; the info of all others is empty.
    """

    HURRY = 10.0

    def __init__(self, curriculum, components):
        self.curriculum, self.components = curriculum, components
        self._lock, self._thread, self._stopped, self._error, self._told = threading.RLock(), None, False, None, False
        self._envs, self._owed = {}, {}  # place -> (agents, trees, buffer); place -> tasks it wants, since the start
        self._look, self._mourned, self._losses, self._last_words = 0.0, set(), Counter(), {}
        for name in _REQUIRES:
            if bool(getattr(curriculum, name, False)) != getattr(components, name):
                told = f"{type(curriculum).__name__}.{name} is {not getattr(components, name)}"
                raise ValueError(
                    f"{told}, its components were made for the contrary: use make_multiprocessing_curriculum"
                )
        components.serve = self._serve
        atexit.register(self._at_exit)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        self._stop(self.components.timeout if error is None else self.HURRY)

    def __getstate__(self):
        raise TypeError("the curriculum stays in its process: give the others its .components")

    def __getattr__(self, name):
        if name.startswith("__") or name == "curriculum":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        value = getattr(self.curriculum, name)
        if not inspect.ismethod(value):
            return value

        @functools.wraps(value)
        def call(*args, **kwargs):
            with self._ours():
                with self._busy():
                    result = value(*args, **kwargs)
                if self._owed:
                    self._serve()  # it may have got tasks
                return result

        return call

    def start(self):
        """Starts the thread; a second call does nothing."""
        with self._ours():
            if self._stopped:
                raise RuntimeError("the curriculum was stopped: make another one")
            if self._thread is None:
                self.components.serve = None
                self._thread = threading.Thread(target=self._run, name="curriculum", daemon=True)
                self._thread.start()

    def stop(self):
        """Ends all waiting, applies everything that was sent, and raises a failure that was not raised before."""
        self._stop(self.components.timeout)

    def _stop(self, seconds):
        if not self._stopped and os.getpid() == self.components.learner:
            self._stopped = True
            self.components.close()
            if self._thread is not None:
                self._thread.join(min(seconds, self.components.timeout))
                if self._thread.is_alive():
                    raise TimeoutError(f"the curriculum's thread is busy for {seconds} s: its updates are not applied")
            self.components.serve = None
            atexit.unregister(self._at_exit)
            if self._error is None:
                self._serve()
        if not self._told:
            self._raise()

    def pump(self):
        """Applies all updates that wait and draws the tasks that are asked for; returns the number of messages."""
        with self._ours():
            count = self._serve()
            self._raise()
            return count

    def check(self):
        """Raises RuntimeError if the curriculum failed, or an environment's process is gone without close()."""
        with self._ours():
            self.pump()  # what an environment said before it died
            for place, pid in self.components.dead().items():
                raise RuntimeError(self._obituary(place, pid))

    def state_dict(self):
        """The curriculum's state after all updates that were sent, and the tasks drawn for environments to come."""
        with self._ours():
            self.pump()
            return {"curriculum": self.curriculum.state_dict(), "waiting": self.components.waiting()}

    def load_state_dict(self, state):
        """Into a new one: its environments first get the tasks that were waiting."""
        with self._ours():
            if self.components.any_put():
                raise RuntimeError("tasks were drawn already: load the state before the first environment asks")
            restore, room = self.components.task_space.restore, (self.components.max_envs, self.components.MAX_BUFFER)
            try:
                drawn = {int(place): list(map(restore, tasks)) for place, tasks in state["waiting"].items()}
                self.curriculum.load_state_dict(state["curriculum"])
            except (AttributeError, KeyError, TypeError) as error:
                raise ValueError(f"this is no state of a CurriculumSyncWrapper: {error!r}") from error
            if any(place >= room[0] or len(tasks) > room[1] for place, tasks in drawn.items()):
                raise ValueError(f"the state's tasks need max_envs={max(drawn) + 1} or more, here it is {room[0]}")
            for place, tasks in drawn.items():
                self.components.put(place, tasks)

    @contextlib.contextmanager
    def _ours(self):
        if os.getpid() != self.components.learner:
            where = f"belongs to the process {self.components.learner}, this is {os.getpid()}"
            raise RuntimeError(f"the curriculum {where}: give the environments its .components only")
        with self._lock:
            self._raise()
            yield

    def _raise(self):
        if self._error is not None:
            self._told = True
            raise RuntimeError(f"the curriculum failed:\n{self._text}") from self._error

    def _run(self):
        while not self._stopped and self._error is None:
            if not self._serve():
                self.components.rest(0.5)

    def _serve(self):
        """Does all that there is to do: the number of messages. A failure ends all waiting, and is kept."""
        with self._lock:
            try:
                look, messages = time.monotonic() > self._look, self.components.messages()
                with self._busy() if messages else contextlib.nullcontext():
                    for message in messages:
                        self._apply(*message)
                    for place in () if self._stopped else list(self._owed):
                        self._draw(place)
                if look:
                    self._look = time.monotonic() + 1.0
                    for place, pid in self.components.dead().items():
                        self._mourn(place, pid)
                self.components.note(self.components.EMPTY, bool(self._owed))
                return len(messages)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # SystemExit too: the thread must not end unseen
                self._error, self._text = error, traceback.format_exc()
                self.components.close(self._text)
                return 0

    @contextlib.contextmanager
    def _busy(self):
        self.components.note(self.components.BUSY, time.monotonic_ns())
        try:
            yield
        finally:
            self.components.note(self.components.BUSY, 0)

    def _mourn(self, place, pid):
        """Warns of a process that is gone, once."""
        if (place, pid) not in self._mourned:
            self._mourned.add((place, pid))
            self._losses[place] += 1
            warnings.warn(self._obituary(place, pid), RuntimeWarning, stacklevel=1)

    def _obituary(self, place, pid):
        text = f"environment {place} (process {pid}) is gone without close(): "
        text += "its episode underway and steps that it had not sent are lost"
        text += f" (loss {self._losses[place]} of this place)" if self._losses[place] > 1 else ""
        if place in self._last_words:
            text += f". It failed before:\n{self._last_words[place]}"
        return text

    def _apply(self, _, place, kind, agent, count, wanted, *where):
        curriculum, components = self.curriculum, self.components
        body = components.read(place, *where)
        if kind == components.HELLO:
            if count:  # of its place's last owner it could be that nobody has heard
                self._mourn(place, count)
            self._mourned -= {(place, count)}
            self._last_words.pop(place, None)
            self._envs[place] = pickle.loads(body)
            numbers = {agents for agents, *_ in self._envs.values()}
            if len(numbers) > 1:
                raise ValueError(
                    f"environments of {sorted(numbers)} agents cannot share a curriculum: their ids collide"
                )
        elif kind == components.ERROR:
            self._last_words[place] = body.decode(errors="replace").rstrip()
        elif kind != components.ASK:
            agents, trees, _ = self._envs[place]
            env_id, split = place * agents + agent, components.codec.nbytes
            task = components.codec.unpack(body[:split])
            if kind == components.STEPS:
                block = np.frombuffer(body, _step_record(trees[agent]), offset=split)
                curriculum.update_on_step_batch(_steps(task, block, count, trees[agent]), env_id=env_id)
            elif kind == components.PROGRESS:
                curriculum.update_task_progress(task, *struct.unpack_from("d", body, split), env_id=env_id)
            else:
                episode_return, length, progress = struct.unpack_from("dqd", body, split)
                curriculum.update_on_episode(episode_return, length, task, progress, env_id=env_id)
        if wanted and not self._stopped:  # whoever asks is done with its task
            agents, _, buffer = self._envs[place]
            waiting = components.word(place, components.PUT) - (wanted - buffer)  # drawn, and not taken yet
            curriculum.update_on_end(range(place * agents, (place + 1) * agents), waiting)
            self._owed[place] = wanted
            self._draw(place)

    def _draw(self, place):
        """Draws what an environment asked for, as far as the curriculum has tasks."""
        curriculum, components, agents = self.curriculum, self.components, self._envs[place][0]
        while (missing := self._owed[place] - components.word(place, components.PUT)) > 0:
            k = min(missing, curriculum.available())
            if k < 1:
                return
            tasks = curriculum.sample(k=k)
            if len(tasks) != k:
                raise ValueError(f"{type(curriculum).__name__}.sample(k={k}) returned {len(tasks)} tasks")
            components.put(place, tasks)
            curriculum.update_on_draw(tasks, range(place * agents, (place + 1) * agents))
        del self._owed[place]

    def _at_exit(self):
        """A failure that nobody looked at is printed, and makes the exit code 1."""
        try:
            self._stop(self.HURRY if hasattr(sys, "last_type") else self.components.timeout)  # after an exception
        except BaseException:
            globals()["_exit_code"] = _ExitCode()
            raise


class _ExitCode:
    """A module's variable is deleted after all atexit functions, which themselves cannot change the exit code."""

    def __del__(self, exit=os._exit):
        exit(1)


def _steps(task, block, count, tree):
    """The step records of a message as `update_on_step_batch` takes them."""
    rows, names = block["row"][:count].tolist(), block.dtype.names[1:]
    infos, observations = [{} for _ in rows], [None] * count
    if names:
        observations = [_nest(tree, iter(leaves)) for leaves in zip(*(block[name] for name in names))]
        if len(block) > count:
            infos[-1]["final_obs"] = observations[count]
    return [
        (task, obs, reward, terminated > 0, truncated > 0, info, progress)
        for obs, info, (reward, progress, terminated, truncated) in zip(observations, infos, rows)
    ]


def make_multiprocessing_curriculum(curriculum, *, max_envs=256, timeout=60.0, ring_bytes=None, start=True):
    """A CurriculumSyncWrapper of `curriculum` for up to `max_envs` environments, started.

    Environments send their steps if the curriculum's `requires_step_updates` is true, and the observations too if its
    `requires_observations` is. `ring_bytes`: of updates that wait, for each environment, 64 KiB by default, 256 KiB
    with steps, 8 MiB with observations. Every wait ends after `timeout` seconds with an error.
    """
    if not isinstance(curriculum, Curriculum):
        raise TypeError(f"make_multiprocessing_curriculum takes a Curriculum, found {curriculum!r}")
    steps, observations = (bool(getattr(curriculum, name, False)) for name in _REQUIRES)
    if observations and not steps:
        raise ValueError(
            f"{type(curriculum).__name__} requires observations, which come with steps: "
            "set requires_step_updates = True"
        )
    space = curriculum.task_space
    components = SyncComponents(
        as_task_space(space),
        max_envs=max_envs,
        timeout=timeout,
        ring_bytes=ring_bytes or (2**23 if observations else 2**18 if steps else 2**16),
        requires_step_updates=steps,
        requires_observations=observations,
    )
    wrapper = CurriculumSyncWrapper(curriculum, components)
    if start:
        wrapper.start()
    return wrapper
