"""Curricula by hand: one task for ever, or the tasks that the user queues."""

import copy
from collections import deque

import numpy as np

from curricula.core import Curriculum, as_task_space


class Constant(Curriculum):
    """Always `default_task`, a (decoded) task of the space."""

    def __init__(self, default_task, task_space, require_step_updates=False, *, seed=None):
        super().__init__(as_task_space(task_space), seed=seed)
        self.default_task = self.task_space.encode(default_task)
        self.requires_step_updates = require_step_updates

    def sample(self, k=1):
        return [copy.copy(self.default_task) for _ in range(k)]

    def _sample_distribution(self):
        probabilities = np.zeros(self.num_tasks or 0)
        probabilities[self._index(self.default_task)] = 1
        return probabilities


class Manual(Curriculum):
    """The tasks of `add_tasks`, first in, first out. With none left, environments wait for `add_tasks`."""

    def __init__(self, task_space, *, seed=None):
        super().__init__(as_task_space(task_space), seed=seed)
        self._queue = deque()

    def add_tasks(self, tasks):
        """Appends (decoded) tasks; all of them, or with a ValueError none."""
        self._queue.extend([self.task_space.encode(task) for task in tasks])

    def available(self):
        return len(self._queue)

    def sample(self, k=1):
        if len(self._queue) < k:
            raise ValueError(f"{k} tasks wanted, {len(self._queue)} queued: add_tasks([...]) first")
        return [self._queue.popleft() for _ in range(k)]

    def state_dict(self):
        return super().state_dict() | {"queue": list(self._queue)}

    def _load(self, state):
        super()._load(state)
        self._queue = deque(map(self.task_space.restore, state["queue"]))

    def metrics(self):
        return {"tasks_queued": float(len(self._queue))}
