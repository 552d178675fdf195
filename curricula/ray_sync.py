"""A curriculum in a Ray actor, for environments anywhere in the cluster.

Ray starts the actor and calls it for the learner. What environments send goes to it over TCP: an actor call for each
episode would cost 2 to 3 ms of CPU time at both ends, as much as 25 steps of NetHack, and TCP costs a tenth of that.
"""

import atexit
import collections
import contextlib
import fcntl
import inspect
import operator
import os
import pickle
import secrets
import select
import selectors
import socket
import struct
import sys
import termios
import threading
import time
import uuid

import cloudpickle

from curricula.core import TaskSpace
from curricula.sync import SyncComponents, TaskCodec
from curricula.sync_envs import GymnasiumSyncWrapper, PettingZooSyncWrapper
from curricula.sync_learner import REQUIRES, CurriculumSyncWrapper


def _ray():
    try:
        import ray
    except ImportError as error:
        raise ImportError(f"ray cannot be imported ({error}): scripts/run --extra ray SCRIPT brings it") from error
    return ray


class RayComponents(SyncComponents):
    """The way to a curriculum in an actor, for processes and threads on any machine that reaches it; they need no Ray.

    A few values, its address and a secret among them, which any pickle takes along. An environment holds its place by
    its connection: the system closes that when the process ends, and finds within half a minute that a machine is gone.
    Nothing is dropped: a full connection holds up its writer, an empty one its reader, `timeout` seconds at most.
    """

    ring_bytes = 2**23  # a message of steps takes up to half of it
    LEAVE = 5  # one more kind of message
    JOINED, REFUSED, TASKS, OVER = range(4)  # kinds of answers
    ANSWER = struct.Struct("2q")  # kind, bytes that follow
    JOIN = struct.Struct("32s2q")  # the first message: the secret, env_id or -1, bytes of the owner's name that follow
    AT_ONCE = 2**14  # bytes: fewer wait for the next message that asks for a task

    def __init__(self, *settings):
        self._settings, self._lines = settings, {}
        self.task_space, self.max_envs, self.timeout, *required, self.actor_name, self._address = settings
        self.requires_step_updates, self.requires_observations = required
        self.codec = TaskCodec(self.task_space)

    def __getstate__(self):
        return cloudpickle.dumps(self._settings)  # takes tasks that are lambdas too

    def __setstate__(self, settings):
        self.__init__(*pickle.loads(settings))

    def claim(self, env_id):
        """Takes the place `env_id`, or the first that is free: (place, descriptor of the connection that holds it)."""
        if env_id is not None and not 0 <= env_id < self.max_envs:
            raise ValueError(f"env_id {env_id} is not in 0..{self.max_envs - 1}: ask for a larger max_envs")
        *address, secret = self._address
        try:
            connection = socket.create_connection(address, timeout=self.timeout)
        except OSError as error:
            there = "{}:{}".format(*address)
            raise RuntimeError(f"the curriculum's actor {self.actor_name!r} is not at {there} ({error})") from error
        _keep(connection)
        line = _Line(self, connection.detach(), "an environment" if env_id is None else f"environment {env_id}")
        owner = f"{os.getpid()} on {socket.gethostname()}".encode()
        line.outbox += self.JOIN.pack(secret, -1 if env_id is None else env_id, len(owner)) + owner
        try:
            line.until(lambda: line.place is not None)
        except BaseException:
            os.close(line.fd)
            raise
        self._lines[line.place] = line
        return line.place, line.fd

    def release(self, place, fd):
        """Returns when all that was sent is applied."""
        line = self._lines.pop(place)
        line.outbox += self.HEAD.pack(self.HEAD.size, time.monotonic_ns(), self.LEAVE, 0, 0, line.got)
        with contextlib.suppress(EOFError, RuntimeError):  # whatever the curriculum died of
            line.until(lambda: False)  # the actor closes the connection

    def take(self, place):
        """The next task encoding; waits for it."""
        line = self._lines[place]
        line.until(lambda: line.tasks)
        line.got += 1
        return self.codec.unpack(line.tasks.popleft())

    def send(self, place, kind, agent=0, parts=(), steps=0, buffer=0, wake=True):
        """Sends a message; waits while the connection is full. `buffer`: tasks to be drawn beyond those taken."""
        line = self._lines[place]
        if line.stuck:
            line.until(lambda: not line.outbox)
            line.stuck = False
        wanted = line.got + buffer if buffer else 0
        size = self.HEAD.size + sum(map(len, parts))
        line.outbox += self.HEAD.pack(size, time.monotonic_ns(), kind, agent, steps, wanted)
        for part in parts:
            line.outbox += memoryview(part)
        if buffer or len(line.outbox) > self.AT_ONCE:
            try:
                line.until(lambda: not line.outbox)
            except TimeoutError:  # half of it may be sent: it will go, or the next one raises
                line.stuck = True

    def split(self, tasks):
        return [bytes(tasks[at : at + self.codec.nbytes]) for at in range(0, len(tasks), self.codec.nbytes)]


def _keep(connection):
    """No waiting, neither in calls nor for more to send, and an error if the other machine is gone for 25 s."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class _Line:
    """An environment's end of the connection."""

    def __init__(self, components, fd, name):
        self._components, self.fd, self._name = components, fd, name
        self.inbox, self.outbox, self.tasks = bytearray(), bytearray(), collections.deque()
        self.place, self.got, self.stuck, self._over = None, 0, False, None
        self._poll = select.poll()

    def until(self, done):
        """Writes what there is to write, and reads, until `done()`. Raises if the curriculum is over."""
        start, actor = time.monotonic(), f"the curriculum's actor {self._components.actor_name!r}"
        while True:
            alive = self._write() and self._read()
            if self._over:
                raise RuntimeError(f"{self._name}: the curriculum failed:\n{self._over}")
            if self._over is not None:
                raise EOFError(f"{self._name}: the curriculum was stopped")
            if not alive:
                raise RuntimeError(f"{self._name}: {actor} died")
            if done():
                return
            waited = time.monotonic() - start
            if waited >= self._components.timeout:
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
                stuck = "has read no update" if self.outbox else "has not answered"
                raise TimeoutError(f"{self._name}: {actor} {stuck} for {waited:.1f} s (since {since})")
            self._poll.register(self.fd, select.POLLIN | (select.POLLOUT if self.outbox else 0))
            self._poll.poll(1000 * (self._components.timeout - waited))

    def _write(self):
        try:
            while self.outbox:
                del self.outbox[: os.write(self.fd, self.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self._read()  # it may have told why
            return False
        return True

    def _read(self):
        try:
            while data := os.read(self.fd, 2**16):
                self.inbox += data
                self._understand()
                if len(data) < 2**16:
                    return True
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _understand(self):
        components, head = self._components, self._components.ANSWER
        while len(self.inbox) >= head.size:
            kind, size = head.unpack_from(self.inbox)
            if len(self.inbox) < head.size + size:
                return
            body = self.inbox[head.size : head.size + size]
            del self.inbox[: head.size + size]
            if kind == components.REFUSED:
                raise ValueError(body.decode())
            if kind == components.OVER:
                self._over = body.decode()
                continue
            if kind == components.JOINED:
                self.place, self.got = struct.unpack_from("2q", body)
                self._name, body = f"environment {self.place}", body[16:]
            self.tasks += components.split(body)


class _Place:
    """What the actor knows of an environment: its process, and the tasks drawn for it that it is not done with."""

    def __init__(self):
        self.owner, self.client, self.lost = "", None, False
        self.tasks, self.put, self.done, self.buffer = collections.deque(), 0, 0, 0

    def advance(self, done):
        while self.done < done:
            self.tasks.popleft()
            self.done += 1


class _Client:
    """The actor's end of a connection."""

    def __init__(self, connection):
        self.connection, self.place, self.inbox, self.outbox = connection, None, bytearray(), bytearray()

    def unacknowledged(self):
        """Bytes that were sent, and whose arrival the other machine has not told yet."""
        return int.from_bytes(fcntl.ioctl(self.connection, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


class _Server(RayComponents):
    """The actor: the components, on the learner's side, of a CurriculumSyncWrapper."""

    PATIENCE, STRANGERS = 5.0, 100  # seconds to show the secret; connections that have not shown it, at most

    def __init__(self, settings, curriculum, host):
        ray = _ray()
        if host is None:
            alone = sum(node["Alive"] for node in ray.nodes()) == 1
            host = "127.0.0.1" if alone else ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0), backlog=1024)
        self._listener.setblocking(False)
        super().__init__(*settings, (*self._listener.getsockname()[:2], secrets.token_bytes(32)))
        self._selector, self._buffer = selectors.DefaultSelector(), bytearray(2**20)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers = {}  # client that has not joined -> when it must have, oldest first
        self.learner, self._places, self._over = os.getpid(), [_Place() for _ in range(self.max_envs)], None
        self.sync = CurriculumSyncWrapper(pickle.loads(curriculum), self)
        atexit.unregister(self.sync._at_exit)  # who would hear of a failure?
        threading.Thread(target=self._run, name="curriculum", daemon=True).start()

    # Called by the RayCurriculumWrapper, as an actor.

    def address(self):
        return self._address

    def look(self, name):
        """(False, the curriculum's attribute), or (True, None) if that is a method."""
        value = getattr(self.sync.curriculum, name)
        return (True, None) if inspect.ismethod(value) else (False, value)

    def call(self, name, args, kwargs):
        return getattr(self.sync, name)(*args, **kwargs)

    def stop(self):
        """Ends all waiting. It returns when each environment's machine has acknowledged that and no message is half
        here: what environments sent before has arrived then, and is applied."""
        self.sync.stop()
        end = time.monotonic() + min(self.sync.HURRY, self.timeout / 2)
        while time.monotonic() < end and self.sync._error is None:
            with self.sync._lock:
                told = not any(client.outbox or client.unacknowledged() for client in self._joined())
                if not self.sync._serve() and told and not any(client.inbox for client in self._joined()):
                    break
            time.sleep(0.001)
        self.sync.stop()

    # Called by the CurriculumSyncWrapper, but for close() under its lock.

    def messages(self):
        """What has come, by the senders' clocks: tuples (time, place, kind, agent, steps, wanted, body)."""
        found, room = [], 2**20  # bytes, more or less: what is not read yet holds up its sender
        while room > 0 and (
            ready := self._selector.select(0)
        ):  # again: of one process, what was sent first comes first
            for key, events in ready:
                if key.data is None:
                    self._accept()
                    continue
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ:
                    room -= self._read(key.data, found)
                room -= 1
        now = time.monotonic()
        for client in [client for client, end in self._strangers.items() if end < now and room > 0]:
            self._hang_up(client)
        found.sort(key=operator.itemgetter(0))
        return found

    def read(self, _, body):
        if isinstance(body, _Client):  # it leaves
            self._hang_up(body)
        return body

    def word(self, number, _):
        return self._places[number].put

    def put(self, number, tasks):
        place, packed = self._places[number], [self.codec.pack(task) for task in tasks]
        place.tasks += packed
        place.put += len(packed)
        if place.client is not None:
            self._answer(place.client, self.TASKS, b"".join(packed))

    def any_put(self):
        return any(place.put for place in self._places)

    def waiting(self):
        """Tasks that were drawn and whose episodes are not over: {place: list of encodings}."""
        places = enumerate(self._places)
        return {number: [self.codec.unpack(task) for task in place.tasks] for number, place in places if place.tasks}

    def dead(self):
        return {number: place.owner for number, place in enumerate(self._places) if place.lost}

    def close(self, error=""):
        with self.sync._lock:
            self._over = error
            for place in self._places:
                if place.client is not None:
                    self._answer(place.client, self.OVER, error.encode(errors="backslashreplace"))

    # Its thread, and connections.

    def _run(self):
        while True:
            self._selector.select(0.5)
            with self.sync._lock:
                if self.sync._error is None:
                    self.sync._serve()
                else:
                    self.messages()  # whoever comes now is told

    def _accept(self):
        """Connects a stranger; of too many the one that has waited longest goes."""
        try:
            connection, _ = self._listener.accept()
            _keep(connection)
        except BlockingIOError:
            return
        except OSError:  # it is gone already, or this process may open no more files
            if not self._strangers:
                time.sleep(0.01)
            for client in list(self._strangers)[:1]:
                self._hang_up(client)
            return
        client = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._strangers[client] = time.monotonic() + self.PATIENCE
        if len(self._strangers) > self.STRANGERS:
            self._hang_up(next(iter(self._strangers)))

    def _joined(self):
        return [place.client for place in self._places if place.client is not None]

    def _answer(self, client, kind, body):
        client.outbox += self.ANSWER.pack(kind, len(body)) + body
        self._flush(client)

    def _flush(self, client):
        with contextlib.suppress(OSError):  # no room, or no connection: of that _read will hear
            del client.outbox[: client.connection.send(client.outbox)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outbox else 0)
        if client.connection.fileno() >= 0 and self._selector.get_key(client.connection).events != events:
            self._selector.modify(client.connection, events, client)

    def _read(self, client, found):
        try:
            count = client.connection.recv_into(self._buffer)
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        client.inbox += memoryview(self._buffer)[:count]
        at = self._join(client) if client.place is None else 0
        while client.place is not None and len(client.inbox) - at >= self.HEAD.size:
            size, clock, kind, *rest, wanted = self.HEAD.unpack_from(client.inbox, at)
            if len(client.inbox) - at < size:
                break
            body, at, place = client.inbox[at + self.HEAD.size : at + size], at + size, self._places[client.place]
            if kind == self.LEAVE:
                place.advance(wanted)
                found.append((clock, client.place, self.ASK, 0, 0, 0, client))  # in its turn
                continue
            if kind == self.HELLO:
                place.buffer = wanted - place.done
            if wanted:
                place.advance(wanted - place.buffer)
            found.append((clock, client.place, kind, *rest, wanted, body))
        del client.inbox[:at]
        if not count:
            self._hang_up(client, lost=True)
        return count

    def _join(self, client):
        """A new connection's place, if its first message is there: the length of that, or 0."""
        if len(client.inbox) < self.JOIN.size:
            return 0
        secret, env_id, size = self.JOIN.unpack_from(client.inbox)
        if not secrets.compare_digest(secret, self._address[-1]):
            self._hang_up(client)
            return 0
        if len(client.inbox) < self.JOIN.size + size:
            return 0
        if self._over is not None:
            self._answer(client, self.OVER, self._over.encode(errors="backslashreplace"))
        else:
            owner = client.inbox[self.JOIN.size : self.JOIN.size + size].decode()
            for number in range(self.max_envs) if env_id == -1 else (env_id,):
                place = self._places[number]
                if place.client is None:
                    place.owner, place.client, place.lost, client.place = owner, client, False, number
                    del self._strangers[client]
                    self._answer(client, self.JOINED, struct.pack("2q", number, place.done) + b"".join(place.tasks))
                    return self.JOIN.size + size
            text = f"environment {env_id} is there already, in the process {self._places[env_id].owner}"
            if env_id == -1:
                owners = ", ".join(sorted({place.owner for place in self._places}))
                fix = "close() environments, or give make_ray_curriculum a larger max_envs"
                text = f"all {self.max_envs} places for environments are taken (by the processes {owners}): {fix}"
            self._answer(client, self.REFUSED, text.encode())
        return 0

    def _hang_up(self, client, lost=False):
        if client.connection.fileno() < 0:
            return
        self._selector.unregister(client.connection)
        self._strangers.pop(client, None)
        client.connection.close()
        if client.place is not None:
            place = self._places[client.place]
            place.client, place.lost = None, lost
            if lost and place.tasks:
                place.advance(place.done + 1)  # it was underway, or about to be


class RayGymnasiumSyncWrapper(GymnasiumSyncWrapper):
    """GymnasiumSyncWrapper for a curriculum in a Ray actor: the same arguments, updates and tasks.

    At the end of an episode its steps and its report travel in one message, and the answer brings the next task but
    one (`buffer_size` 2): reset need not wait. The task of a process that died in an episode, or before one, is lost.
    """


class RayPettingZooSyncWrapper(PettingZooSyncWrapper):
    """PettingZooSyncWrapper for a curriculum in a Ray actor; see RayGymnasiumSyncWrapper."""


class RayCurriculumWrapper:
    """A curriculum in a Ray actor, which ends with this object. Environments get `.components`.

    Everything else is the curriculum's own: a method is called in the actor, between updates, and an attribute is a
    copy of the actor's. Updates are applied once and in order for each environment; of several in one process, in the
    order in which it sent them; otherwise as they arrive. A failure of the curriculum is raised in every environment
    when it next sends something or waits, and here at the next call and by stop().
    """

    def __init__(self, actor, components):
        self._actor, self.components, self._stopped, self._methods = actor, components, False, set()
        atexit.register(self._at_exit)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def __getstate__(self):
        raise TypeError("the curriculum stays with its process: give the others its .components")

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name not in self._methods:
            method, value = self._ask("look", name)
            if not method:
                return value
            self._methods.add(name)
        return lambda *args, **kwargs: self._ask("call", name, args, kwargs)

    def _ask(self, method, *args):
        return _ask(self._actor, self.components.actor_name, self.components.timeout, method, *args)

    def stop(self):
        """Ends all waiting, applies everything that was sent, and raises a failure that was not raised before."""
        if not self._stopped:
            self._stopped = True
            atexit.unregister(self._at_exit)
            self._ask("stop")

    def check(self):
        """Raises RuntimeError if the curriculum failed, or an environment's process is gone without close()."""
        self._ask("call", "check", (), {})

    def state_dict(self):
        """The curriculum's state after all updates that arrived, and the tasks drawn whose episodes are not over."""
        return self._ask("call", "state_dict", (), {})

    def load_state_dict(self, state):
        """Into a new one: its environments first get the tasks that were waiting."""
        self._ask("call", "load_state_dict", (state,), {})

    def _at_exit(self):
        if _ray().is_initialized():
            self.stop()


def _ask(actor, name, timeout, method, *args):
    """The answer to a call of the actor, in the process that made it."""
    ray = _ray()
    if not ray.is_initialized():  # a call would start another Ray
        raise RuntimeError(f"Ray was shut down, and the curriculum's actor {name!r} with it")
    try:
        return ray.get(getattr(actor, method).remote(*args), timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError(f"the curriculum's actor {name!r} has not answered {method}() for {timeout} s") from None
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"the curriculum's actor {name!r} died: {error}") from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def make_ray_curriculum(curriculum, *, actor_name=None, max_envs=256, timeout=60.0, host=None):
    """A RayCurriculumWrapper of `curriculum`, which moves into an actor of its own, for up to `max_envs` environments.

    Call ray.init() before. `actor_name`: for ray.get_actor, in the namespace of this process; by default a new one.
    Environments send their steps if the curriculum's `requires_step_updates` is true, and the observations too if its
    `requires_observations` is. Every wait ends after `timeout` seconds with an error.
    `host`: the address of its machine that the actor listens on; by default loopback in a cluster of one machine, else
    the one that the cluster knows it by. Give that, ray.util.get_node_ip_address(), if others are to join later.
    """
    ray = _ray()
    steps, observations = (bool(getattr(curriculum, name, False)) for name in REQUIRES)
    if observations and not steps:
        raise ValueError(
            f"{type(curriculum).__name__} requires observations, which come with steps: "
            "set requires_step_updates = True"
        )
    if min(max_envs, timeout) <= 0:
        raise ValueError(f"a curriculum needs max_envs and a timeout above 0, found {max_envs} and {timeout}")
    if not ray.is_initialized():
        raise RuntimeError("Ray is not running in this process: call ray.init() before make_ray_curriculum")
    try:
        moved = cloudpickle.dumps(curriculum)
    except Exception as error:
        raise TypeError(f"{type(curriculum).__name__} cannot be pickled, to move into an actor: {error}") from error
    space, name = curriculum.task_space, actor_name or f"curriculum-{uuid.uuid4().hex[:8]}"
    settings = space if isinstance(space, TaskSpace) else TaskSpace(space), max_envs, timeout, steps, observations, name
    actor = ray.remote(_Server).options(name=name, num_cpus=0).remote(settings, moved, host)
    address = _ask(actor, name, timeout + 60, "address")  # to start a process takes seconds
    return RayCurriculumWrapper(actor, RayComponents(*settings, address))
