"""The portable API: task spaces, curricula and the wrappers that give an environment its task."""

import contextlib
import math

import gymnasium as gym
import numpy as np


class Curriculum:
    """Chooses tasks. It sees encodings (elements of `task_space`), never decoded tasks.

    `task_space` is a TaskSpace or, for tasks 0..n-1, the number n. `seed` is anything that numpy's default_rng takes.
    A subclass overrides `_sample_distribution` or `sample`, and those update hooks that it needs; the others ignore
    their arguments.
    """

    requires_step_updates = False  # True: the environments must send every step, not only finished episodes
    requires_observations = False  # True: with the observations

    def __init__(self, task_space, *, seed=None):
        if not isinstance(task_space, (int, np.integer)) and not hasattr(task_space, "num_tasks"):
            raise ValueError(f"task_space={task_space!r}: must be a number or a TaskSpace (made of a list, a space)")
        self.task_space = task_space
        self.num_tasks = int(task_space) if isinstance(task_space, (int, np.integer)) else task_space.num_tasks
        if self.num_tasks is not None and self.num_tasks < 1:
            raise ValueError(f"task space {task_space!r} holds no task: at least 1 is needed")
        self.rng = np.random.default_rng(seed)

    def sample(self, k=1):
        """Draws k task encodings, a list."""
        return [self._encoding(i) for i in self.rng.choice(self.num_tasks, size=k, p=self._sample_distribution())]

    def _sample_distribution(self):
        """Probability of each task at the next draw: float64 (num_tasks,), sums to 1."""
        raise NotImplementedError(f"{type(self).__name__} has no distribution over single tasks")

    def _index(self, task):
        """The position 0..num_tasks-1 of an encoding."""
        if hasattr(self.task_space, "index"):
            return self.task_space.index(task)
        if not 0 <= task < self.num_tasks or int(task) != task:
            raise ValueError(f"task {task!r} is outside the space of {self.num_tasks} tasks 0..{self.num_tasks - 1}")
        return int(task)

    def _encoding(self, index):
        """The encoding at a position: the inverse of `_index`."""
        return self.task_space.encoding(index) if hasattr(self.task_space, "encoding") else int(index)

    def available(self):
        """How many tasks `sample` can give now. Environments wait while it is 0."""
        return np.inf

    def update_on_draw(self, tasks, env_ids):
        """`sample` has just drawn `tasks`, for one environment, or one with several agents: `env_ids`."""

    def update_on_end(self, env_ids, waiting):
        """The task underway there is over, reported or not: the environment was perhaps reset, or its process killed.

        What is kept of it must go. `waiting` tasks, the last ones drawn for the environment, are still to be played.
        """

    def update_task_progress(self, task, progress, env_id=None):
        """One measurement of `task`'s progress in [0, 1]."""

    def update_on_step(self, task, obs, reward, terminated, truncated, info, progress, env_id=None):
        """One environment step. Called only if `requires_step_updates`."""

    def update_on_step_batch(self, steps, env_id=None):
        """Several steps of one environment in order; each a tuple of `update_on_step`'s arguments up to progress."""
        for step in steps:
            self.update_on_step(*step, env_id=env_id)

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        """One finished episode: undiscounted return, length in steps."""

    def update_on_demand(self, metrics):
        """Whatever the learner chooses to tell (a dict)."""

    def state_dict(self):
        """All that the next draw depends on: arrays and plain Python."""
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        """ValueError if the state is another one's: build the same curriculum, then load."""
        try:
            self._load(state)
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"this state does not fit the {type(self).__name__}: {reason}") from error

    def _load(self, state):
        """A subclass loads its part here."""
        self.rng.bit_generator.state = state["rng"]

    def metrics(self):
        """Figures to log, dict[str, float]."""
        return {}


def as_task_space(task_space):
    """A TaskSpace as it is; one made of a number, a list of tasks or a gymnasium space."""
    return task_space if isinstance(task_space, TaskSpace) else TaskSpace(task_space)


def checked_length(task, length):
    """`length`, in steps, as an int; else a ValueError that names the task."""
    with contextlib.suppress(TypeError):
        if length >= 0 and length % 1 == 0:  # of NaN and infinity the latter fails
            return int(length)
    raise ValueError(f"an episode of task {task!r} has length {length!r}: must be a whole number of steps from 0")


def checked_completion(completion):
    """What `_task_completion` returned, as a float."""
    try:
        return float(completion)
    except (TypeError, ValueError):
        raise ValueError(f"_task_completion returned {completion!r}: must be a number in [0, 1]") from None


class TaskSpace:
    """The user's tasks (strings, tuples, vectors, ...) and their encodings, which are elements of `gym_space`.

    `space`: a list of tasks (encoded by position), a number n for the tasks 0..n-1, or a gymnasium Discrete,
    MultiDiscrete, Box, Tuple or Dict. `tasks` names the elements of a finite space in order, the last part varying
    fastest; without names a task is its own encoding, but that MultiDiscrete's tasks are tuples of ints. A Box counts
    as infinite: `num_tasks` and `tasks` are None. `seed` is anything that numpy's default_rng takes.
    A task or an encoding from outside the space is a ValueError everywhere.
    """

    def __init__(self, space, tasks=None, *, seed=None):
        given = space
        if isinstance(space, (list, range)) and tasks is None:
            space, tasks = len(space), space
        if isinstance(space, (int, np.integer)) and not isinstance(space, bool) and space > 0:
            space = gym.spaces.Discrete(space)
        parts, self._start, self.num_tasks = None, None, None
        if isinstance(space, gym.spaces.Discrete):
            self._start, self.num_tasks = int(space.start), int(space.n)
        elif isinstance(space, gym.spaces.MultiDiscrete):
            parts = [gym.spaces.Discrete(n, start=start) for n, start in zip(space.nvec.flat, space.start.flat)]
        elif isinstance(space, (gym.spaces.Tuple, gym.spaces.Dict)):
            parts = space.spaces.values() if isinstance(space, gym.spaces.Dict) else space.spaces
        elif not isinstance(space, gym.spaces.Box):
            parts = []
        if parts is not None and not parts:
            kinds = "a list of tasks, a number of tasks, a Discrete, Box, MultiDiscrete, Tuple or Dict, and not empty"
            raise ValueError(f"a task space is {kinds}, found {given!r}")
        self.gym_space, self._parts, self._names = space, parts and [TaskSpace(part) for part in parts], None
        if parts:
            sizes = [part.num_tasks for part in self._parts]
            self.num_tasks = None if None in sizes else math.prod(sizes)
        if tasks is not None:
            if len(tasks) != self.num_tasks:
                raise ValueError(f"{len(tasks)} tasks cannot name the {self.num_tasks or 'infinitely many'} of {space}")
            self._names, self._positions = list(tasks), {}
            for i, task in enumerate(tasks):
                try:
                    first = self._positions.setdefault(self._key(task), i)
                except TypeError:
                    raise ValueError(f"tasks must be hashable, found {task!r}: name it by a string") from None
                if task is None or first != i:
                    raise ValueError(f"tasks must be distinct and not None, found {task!r} at position {i} for {space}")
        self.seed(seed)

    def __repr__(self):
        return f"{type(self).__name__}({self.gym_space}{f', tasks {self._names}'[:200] if self._names else ''})"

    @staticmethod
    def _key(task):
        """What a task is found by, hashable: arrays and lists count as tuples, and True is not 1."""
        task = task.tolist() if isinstance(task, (np.ndarray, np.generic)) else task
        if isinstance(task, (list, tuple)):
            return tuple(map(TaskSpace._key, task))
        if isinstance(task, dict):
            return frozenset((name, TaskSpace._key(value)) for name, value in task.items())
        return (bool, task) if isinstance(task, bool) else task

    @property
    def tasks(self):
        """The list of all tasks, in order."""
        if self._names is None and self.num_tasks is not None:
            return [self.decode(self.encoding(i)) for i in range(self.num_tasks)]
        return self._names

    def seed(self, seed):
        self._rng = np.random.default_rng(seed)

    def sample(self):
        """A task, uniformly, from the space's own generator."""
        return self.decode(self.draw(self._rng))

    def draw(self, rng):
        """An encoding, uniformly, from the caller's generator."""
        if self._start is not None:
            return self._start + int(rng.integers(self.num_tasks))
        if self._parts:
            return self._join([part.draw(rng) for part in self._parts])
        low, high = self.gym_space.low, self.gym_space.high
        if not self.gym_space.is_bounded():
            raise ValueError(f"{self!r} has no uniform distribution: give it finite bounds")
        values = rng.uniform(low, high) if low.dtype.kind == "f" else rng.integers(low, high, endpoint=True)
        return np.asarray(values, dtype=low.dtype)

    def encode(self, task):
        return self._convert(task, "encode")

    def decode(self, encoding):
        return self._convert(encoding, "decode")

    def contains(self, encoding):
        with contextlib.suppress(ValueError):
            self.decode(encoding)
            return True
        return False

    def restore(self, saved):
        """An encoding from a checkpoint, which may have made lists of tuples and tensors of arrays."""
        space = self.gym_space
        if isinstance(space, gym.spaces.Dict):
            return {key: part.restore(saved[key]) for key, part in zip(space.spaces, self._parts, strict=True)}
        if isinstance(space, gym.spaces.Tuple):
            return tuple(part.restore(value) for part, value in zip(self._parts, saved, strict=True))
        encoding = int(saved) if self._start is not None else np.asarray(saved).astype(space.dtype)
        self.decode(encoding)  # raises outside the space
        return encoding

    def _convert(self, value, method):
        try:
            if self._names and method == "encode":
                return self.encoding(self._positions[self._key(value)])
            if self._names:
                return self._names[self.index(value)]
            if self._start is not None:
                return self._start + self.index(value)
            if self._parts:
                element = self._join([getattr(part, method)(v) for part, v in zip(self._parts, self._split(value))])
                return self._key(element) if method == "decode" and isinstance(element, np.ndarray) else element
            array = np.array(value)
            element = array.astype(self.gym_space.dtype)
            exact = array.dtype.kind in "iu" and (element == array).all()
            rounded = array.dtype.kind == element.dtype.kind == "f"  # a float64 becomes the nearest float32
            if not (exact or rounded) or not self.gym_space.contains(element):
                raise ValueError
            return element
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"cannot {method} {value!r}: it is not in {self!r}") from None

    def index(self, encoding):
        """The position 0..num_tasks-1 of an encoding of a finite space."""
        if self._start is not None and isinstance(encoding, (int, np.integer)) and not isinstance(encoding, bool):
            position = int(encoding) - self._start
            if 0 <= position < self.num_tasks:
                return position
        elif self._parts and self.num_tasks:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of a part: what follows names the whole
                position = 0
                for part, value in zip(self._parts, self._split(encoding)):
                    position = position * part.num_tasks + part.index(value)
                return position
        raise ValueError(f"{encoding!r} has no position in {self!r}")

    def encoding(self, index):
        """The encoding at a position: the inverse of `index`."""
        if self.num_tasks is None or not 0 <= index < self.num_tasks:
            raise ValueError(f"position {index!r} is not in {self!r}")
        if self._start is not None:
            return self._start + int(index)
        digits, rest = [], int(index)
        for part in reversed(self._parts):
            rest, digit = divmod(rest, part.num_tasks)
            digits.append(part.encoding(digit))
        return self._join(digits[::-1])

    def _split(self, element):
        """The parts of an element of a MultiDiscrete, Tuple or Dict."""
        space = self.gym_space
        if isinstance(space, gym.spaces.Dict) and set(element) == set(space.spaces):
            return [element[key] for key in space.spaces]
        if isinstance(space, gym.spaces.Tuple) and isinstance(element, (tuple, list)) and len(element) == len(space):
            return element
        if isinstance(space, gym.spaces.MultiDiscrete) and np.shape(element) == space.shape:
            return np.ravel(element).tolist()
        raise ValueError(f"{element!r} is not in {space}")

    def _join(self, parts):
        """The element of which these are the parts."""
        if isinstance(self.gym_space, gym.spaces.Dict):
            return dict(zip(self.gym_space.spaces, parts))
        if isinstance(self.gym_space, gym.spaces.Tuple):
            return tuple(parts)
        return np.array(parts, dtype=self.gym_space.dtype).reshape(self.gym_space.shape)

    def split(self, sizes, seed=0):
        """(train, validation): disjoint task spaces that together hold every task; each numbers its tasks anew.

        `sizes`: the fraction of train, a float in (0, 1), or the two numbers of tasks.
        """
        n = self.num_tasks
        if n is None:
            raise ValueError(f"{self!r} is infinite: only a finite space can be split")
        train, validation = (round(sizes * n), n - round(sizes * n)) if isinstance(sizes, float) else sizes
        if train < 1 or validation < 1 or train + validation != n:
            raise ValueError(f"{sizes!r} does not split {n} tasks into two parts of at least 1 task")
        rng = np.random.default_rng(seed)
        parts = np.split(rng.permutation(n), [train])
        named = [[self.decode(self.encoding(i)) for i in np.sort(part)] for part in parts]
        return tuple(TaskSpace(tasks, seed=child) for tasks, child in zip(named, rng.spawn(2)))


class DiscreteTaskSpace(TaskSpace):
    """The tasks 0..n-1, or the names in `tasks`: `space` is n or a gymnasium Discrete. An encoding is an int."""

    def __init__(self, space, tasks=None, *, seed=None):
        super().__init__(space, tasks, seed=seed)
        if self._start is None:
            raise ValueError(f"a DiscreteTaskSpace is made of a number of tasks or a Discrete, found {space!r}")


class BoxTaskSpace(TaskSpace):
    """Vectors within the bounds of a gymnasium Box: an encoding is the array itself, in the Box's dtype."""

    def __init__(self, space, *, seed=None):
        super().__init__(space, seed=seed)
        if not isinstance(self.gym_space, gym.spaces.Box):
            raise ValueError(f"a BoxTaskSpace is made of a Box, found {space!r}")


class TupleTaskSpace(TaskSpace):
    """Tuples of one task from each of `spaces` (TaskSpaces, or what makes one). An encoding is a tuple of encodings.

    `flatten`: it is the position instead, an int, the last part varying fastest; the spaces must be finite, and all
    tasks are listed in memory. `space_names` name the parts, for messages.
    """

    def __init__(self, spaces, space_names=None, flatten=False, *, seed=None):
        parts = [space if isinstance(space, TaskSpace) else TaskSpace(space) for space in spaces]
        if space_names is not None and len(space_names) != len(parts):
            raise ValueError(f"{len(space_names)} space_names {space_names!r} cannot name {len(parts)} spaces")
        super().__init__(gym.spaces.Tuple([part.gym_space for part in parts]), seed=seed)
        self._parts, self.space_names = parts, space_names
        if flatten and self.num_tasks is None:
            raise ValueError(f"flatten=True numbers the tasks, but {self!r} is infinite: leave it out")
        if flatten:
            super().__init__(self.tasks, seed=seed)

    def __repr__(self):
        names = f", {', '.join(map(str, self.space_names))}" if self.space_names else ""
        return f"{super().__repr__()[:-1]}{names})"


class MultiDiscreteTaskSpace(TupleTaskSpace):
    """Tuples with one of nvec[i] values in place i, which `tasks[i]` names: `space` is a MultiDiscrete or nvec itself.

    An encoding is a tuple of ints or, with `flatten`, as in TupleTaskSpace, one int.
    """

    def __init__(self, space, tasks=None, flatten=False, *, seed=None):
        if not isinstance(space, gym.spaces.MultiDiscrete):
            space = gym.spaces.MultiDiscrete(space)
        places = [gym.spaces.Discrete(n, start=start) for n, start in zip(space.nvec.flat, space.start.flat)]
        names = [None] * len(places) if tasks is None else tasks
        if len(names) != len(places):
            raise ValueError(f"{len(names)} lists of tasks cannot name the {len(places)} places of {space}")
        spaces = [DiscreteTaskSpace(place, named) for place, named in zip(places, names)]
        super().__init__(spaces, flatten=flatten, seed=seed)


class _Tasked:
    """What the wrappers of gymnasium and of PettingZoo environments have in common."""

    def _set_up(self, task_space, goal):
        self.task, self.task_space, self._tells_task = None, task_space, goal is True
        if goal is True and task_space is None:
            raise ValueError("goal=True encodes the task's place in its task_space: give that, or the goal's own space")
        if goal is True:
            goal = task_space.gym_space
            if task_space.num_tasks is not None:
                goal = gym.spaces.MultiBinary(task_space.num_tasks)
        self._goal_space = goal if isinstance(goal, gym.spaces.Space) else None

    def _space_with_goal(self, space):
        if self._goal_space is None:
            return space
        spaces = space.spaces if isinstance(space, gym.spaces.Dict) else {"observation": space}
        return gym.spaces.Dict({**spaces, "goal": self._goal_space})

    def _start_task(self, new_task):
        if new_task is None:
            return
        if self.task_space is not None:
            self.task_space.encode(new_task)  # raises for a task from outside
        before, self.task = self.task, new_task  # here too, for the override of change_task that does not set it
        try:
            self.change_task(new_task)
        except BaseException:
            self.task = before  # which the environment still plays
            raise

    def change_task(self, new_task):
        """Makes `new_task` the task from the next step on. An override that refuses it sets `self.task` anew."""
        self.task = new_task

    def _reset_arguments(self, seed, options):
        """Arguments of the environment's reset: override it where the task goes in by them."""
        return {"seed": seed, "options": options}

    def _encode_goal(self):
        """What tells the agent its task, for `obs["goal"]`, or None for nothing. With goal=True: one-hot of the task's
        position in a finite task space, the vector itself from a Box."""
        if not self._tells_task:
            return None
        encoding = self.task_space.encode(self.task)
        if self.task_space.num_tasks is None:
            return encoding
        goal = np.zeros(self.task_space.num_tasks, np.int8)
        goal[self.task_space.index(encoding)] = 1
        return goal

    def _with_goal(self, obs, space):
        goal = self._encode_goal()
        if goal is None:
            return obs
        if "goal" not in getattr(space, "spaces", ()):
            raise ValueError(f"_encode_goal needs a Dict observation space that has 'goal', found {space!r}")
        return {**(obs if isinstance(obs, dict) else {"observation": obs}), "goal": goal}


class TaskWrapper(_Tasked, gym.Wrapper):
    """Gives an environment its task.

    Override `change_task` or `_reset_arguments` to bring the task into the environment, and `_task_completion` and
    `_encode_goal` where they mean something. `info["task"]` is the task, decoded, that the reward belongs to;
    `info["task_completion"]` its progress. `task_space`, if given, refuses other tasks at reset. `goal` puts the task
    into the observations: True for the encoding of `_encode_goal`, or the gymnasium space of what your override of it
    returns. An observation that is no dict then becomes {"observation": ..., "goal": ...}.
    """

    def __init__(self, env, task_space=None, goal=False):
        super().__init__(env)
        self._set_up(task_space, goal)
        if self._goal_space is not None:  # else it is the environment's, also when that changes
            self.observation_space = self._space_with_goal(env.observation_space)

    def reset(self, *, new_task=None, seed=None, options=None):
        """Starts an episode of `new_task`, or of the same task again."""
        self._start_task(new_task)
        obs, info = self.env.reset(**self._reset_arguments(seed, options))
        return self.observation(obs), {**info, "task": self.task, "task_completion": 0.0}

    def step(self, action):
        task = self.task  # remembered: a task that changes during the step has not earned this reward
        obs, reward, terminated, truncated, info = self.env.step(action)
        completion = checked_completion(self._task_completion(obs, reward, terminated, truncated, info))
        info = {**info, "task": task, "task_completion": completion}
        return self.observation(obs), reward, terminated, truncated, info

    def _task_completion(self, obs, reward, terminated, truncated, info):
        """Progress in the task, 1.0 when done. Syllabus' default, which knows no better: done when the episode ends."""
        return 1.0 if terminated or truncated else 0.0

    def observation(self, obs):
        """`obs` with the goal, if there is one."""
        return self._with_goal(obs, self.observation_space)


class PettingZooTaskWrapper(_Tasked):
    """The same for a PettingZoo parallel environment: one task for all agents, in each agent's observation and info.

    It answers to all that a ParallelEnv does, but is no subclass of it: pettingzoo need not be installed.
    """

    def __init__(self, env, task_space=None, goal=False):
        self.env = env
        self._set_up(task_space, goal)
        self._spaces = {}

    def __getattr__(self, name):
        if name == "env" or name.startswith("_"):  # not there yet while it is unpickled
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.env, name)

    def observation_space(self, agent):
        if agent not in self._spaces:  # always the same object, as PettingZoo's API demands
            self._spaces[agent] = self._space_with_goal(self.env.observation_space(agent))
        return self._spaces[agent]

    def reset(self, seed=None, options=None, *, new_task=None):
        """Starts an episode of `new_task`, or of the same task again."""
        self._start_task(new_task)
        obs, infos = self.env.reset(**self._reset_arguments(seed, options))
        return self.observation(obs), self._with_task(obs, infos, self.task, 0.0)

    def step(self, actions):
        task = self.task  # as in TaskWrapper
        obs, rewards, terminations, truncations, infos = self.env.step(actions)
        completion = checked_completion(self._task_completion(obs, rewards, terminations, truncations, infos))
        infos = self._with_task(obs, infos, task, completion)
        return self.observation(obs), rewards, terminations, truncations, infos

    @staticmethod
    def _with_task(obs, infos, task, completion):
        """`infos` with the task for each agent that has an observation, also for one that has no info."""
        told = {"task": task, "task_completion": completion}
        return {**infos, **{agent: {**infos.get(agent, {}), **told} for agent in obs}}

    def _task_completion(self, obs, rewards, terminations, truncations, infos):
        """Progress of all agents together, 1.0 when done. The default: done when no agent is left."""
        return 0.0 if self.env.agents else 1.0

    def observation(self, obs):
        """Each agent's observation with the goal, if there is one."""
        return {agent: self._with_goal(value, self.observation_space(agent)) for agent, value in obs.items()}
