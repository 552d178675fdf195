"""The environments' side: wrappers that play a curriculum's tasks and report their episodes, from any process."""

import contextlib
import os
import pickle
import struct
import traceback
import weakref

import gymnasium as gym
import numpy as np

from curricula.core import PettingZooTaskWrapper, TaskWrapper, as_task_space
from curricula.sync import SyncComponents, leaves_of, step_record, tree_of


class _Track:
    """One agent's share of the episode underway. Its steps wait here until there are `batch`, or the episode ends.

    A step's observation is the one that the agent acted on; behind the last step of an episode comes the final one.
    All are copied at once. Without a batch no steps are kept, with the tree () no observations.
    """

    def __init__(self, agent, tree, batch):
        self.agent, self.tree, self.full, self.rows = agent, tree, 4 * batch, []
        self.block = np.zeros(batch + 1, step_record(tree))
        self.fields = [self.block[name] for name in self.block.dtype.names[1:]]
        self.started = False

    def start(self, obs):
        self.started, self.ended, self.episode_return, self.length = True, False, 0.0, 0
        self.write(0, obs)

    def write(self, index, obs):
        if self.fields:
            for field, leaf in zip(self.fields, leaves_of(self.tree, obs)):
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
        trees = [tree_of(space) if components.requires_observations else () for space in spaces]
        self.tracks, room = [], components.ring_bytes // 2 - components.HEAD.size - components.codec.nbytes
        for agent, tree in enumerate(trees if components.requires_step_updates else ()):
            nbytes = step_record(tree).itemsize
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
