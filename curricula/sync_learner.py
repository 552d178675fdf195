"""The learner's side: a curriculum whose environments live in other processes."""

import atexit
import contextlib
import functools
import inspect
import os
import pickle
import struct
import sys
import threading
import time
import traceback
import warnings
from collections import Counter

import numpy as np

from curricula.core import Curriculum, as_task_space
from curricula.sync import SyncComponents, nested, step_record

REQUIRES = "requires_step_updates", "requires_observations"


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
        for name in REQUIRES:
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
                block = np.frombuffer(body, step_record(trees[agent]), offset=split)
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
        observations = [nested(tree, iter(leaves)) for leaves in zip(*(block[name] for name in names))]
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
    steps, observations = (bool(getattr(curriculum, name, False)) for name in REQUIRES)
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
