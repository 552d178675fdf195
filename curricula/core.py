"""The portable API: task spaces, curricula and the wrapper that gives an environment its task."""

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

    def __init__(self, task_space, *, seed=None):
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
        self.rng.bit_generator.state = state["rng"]

    def metrics(self):
        """Figures to log, dict[str, float]."""
        return {}


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
                if task is None or self._positions.setdefault(self._key(task), i) != i:
                    raise ValueError(f"tasks must be distinct and not None, found {task!r} at position {i} for {space}")
        self.seed(seed)

    def __repr__(self):
        return f"TaskSpace({self.gym_space}{f', tasks {self._names}'[:200] if self._names else ''})"

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


class TaskWrapper(gym.Wrapper):
    """Gives an environment its task.

    Override `change_task` to bring the task into the environment, and `_task_completion` and `_encode_goal` where they
    mean something. `info["task"]` is the task, decoded, that the reward belongs to; `info["task_completion"]` its
    progress.
    """

    def __init__(self, env):
        super().__init__(env)
        self.task = None

    def reset(self, *, new_task=None, seed=None, options=None):
        """Starts an episode of `new_task`, or of the same task again."""
        if new_task is not None:
            self.task = new_task  # here too, for the override of change_task that does not set it
            self.change_task(new_task)
        obs, info = self.env.reset(seed=seed, options=options)
        return self.observation(obs), {**info, "task": self.task, "task_completion": 0.0}

    def step(self, action):
        task = self.task  # remembered: a task that changes during the step has not earned this reward
        obs, reward, terminated, truncated, info = self.env.step(action)
        completion = float(self._task_completion(obs, reward, terminated, truncated, info))
        info = {**info, "task": task, "task_completion": completion}
        return self.observation(obs), reward, terminated, truncated, info

    def change_task(self, new_task):
        """Makes `new_task` the task from the next step on. An override that refuses it sets `self.task` anew."""
        self.task = new_task

    def _task_completion(self, obs, reward, terminated, truncated, info):
        """Progress in the task, 1.0 when done. Syllabus' default, which knows no better: done when the episode ends."""
        return 1.0 if terminated or truncated else 0.0

    def _encode_goal(self):
        """What tells the agent its task: an array for `obs["goal"]`, or None for nothing."""

    def observation(self, obs):
        """`obs` with the goal, if there is one."""
        goal, space = self._encode_goal(), self.observation_space
        if goal is None:
            return obs
        if "goal" not in getattr(space, "spaces", ()):
            raise ValueError(f"_encode_goal needs a Dict observation space that has 'goal', found {space!r}")
        return {**obs, "goal": goal}
