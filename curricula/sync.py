"""Shared memory between a curriculum and environments in other processes: SyncQueue, and what is beneath the wrappers.

The environments' side is in curricula/sync_envs.py, the learner's in curricula/sync_learner.py.
"""

import contextlib
import ctypes
import fcntl
import functools
import mmap
import operator
import os
import pickle
import struct
import sys
import time
import weakref
from multiprocessing.heap import Arena
from multiprocessing.reduction import DupFd
from threading import Lock

import cloudpickle
import gymnasium as gym
import numpy as np


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


def tree_of(space):
    """A gymnasium space as dicts and tuples of dtypes, one for each array in its elements."""
    if isinstance(space, gym.spaces.Dict):
        return {key: tree_of(part) for key, part in space.spaces.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(map(tree_of, space.spaces))
    if space.shape is None:
        raise ValueError(f"the elements of {space} have no fixed size: they cannot travel through shared memory")
    return np.dtype((space.dtype, space.shape))


def leaves_of(tree, element):
    """The arrays in an element, in the tree's order."""
    if isinstance(tree, dict):
        return [leaf for key in tree for leaf in leaves_of(tree[key], element[key])]
    if isinstance(tree, tuple):
        return [leaf for part, value in zip(tree, element) for leaf in leaves_of(part, value)]
    return [element]


def nested(tree, leaves):
    """The element with these arrays, an iterator: the inverse of `leaves_of`."""
    if isinstance(tree, dict):
        return {key: nested(part, leaves) for key, part in tree.items()}
    return tuple(nested(part, leaves) for part in tree) if isinstance(tree, tuple) else next(leaves)


class TaskCodec:
    """Task encodings as `nbytes` bytes: the position in a finite space, otherwise the arrays themselves."""

    def __init__(self, space):
        self._space, self._finite = space, space.num_tasks is not None and space.num_tasks < 2**63
        self._tree = np.dtype(np.int64) if self._finite else tree_of(space.gym_space)
        self._types = leaves_of(self._tree, self._tree)
        self.nbytes = -(-sum(leaf.itemsize for leaf in self._types) // 8) * 8

    def pack(self, encoding):
        if self._finite:
            return self._space.index(encoding).to_bytes(8, sys.byteorder)
        if not self._space.contains(encoding):
            raise ValueError(f"{encoding!r} is not in {self._space!r}")
        leaves = zip(self._types, leaves_of(self._tree, encoding))
        return b"".join(np.asarray(leaf, kind.base).tobytes() for kind, leaf in leaves).ljust(self.nbytes, b"\0")

    def unpack(self, data):
        if self._finite:
            return self._space.encoding(int.from_bytes(data, sys.byteorder))
        leaves, start = [], 0
        for kind in self._types:
            leaf = np.frombuffer(data, kind, 1, start)[0]
            leaves.append(leaf.item() if kind.shape == () and kind.kind in "iu" else np.array(leaf))
            start += kind.itemsize
        return nested(self._tree, iter(leaves))


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
        self.codec = TaskCodec(self.task_space)
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


def step_record(tree):
    """What a step is in a message: (reward, progress, terminated, truncated), then the arrays of its observation."""
    leaves = [(str(i), leaf) for i, leaf in enumerate(leaves_of(tree, tree))]
    return np.dtype([("row", "f8", 4), *leaves], align=True)
