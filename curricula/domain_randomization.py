"""Domain randomization: every task is equally likely, whatever the agent does. The baseline of every curriculum."""

import copy

import numpy as np

from curricula.core import Curriculum, as_task_space, checked_length


class DomainRandomization(Curriculum):
    """Uniform over the task space (Tobin et al. 2017, arXiv:1703.06907). No update changes it."""

    def __init__(self, task_space, *, seed=None):
        super().__init__(task_space, seed=seed)
        if hasattr(self.task_space, "draw"):
            self.task_space.draw(np.random.default_rng(0))  # raises for a Box without bounds

    def sample(self, k=1):
        """Draws k task encodings, a list, in O(k) however many tasks there are. In a Box: uniform in its bounds."""
        if hasattr(self.task_space, "draw"):
            return [self.task_space.draw(self.rng) for _ in range(k)]
        return self.rng.integers(self.num_tasks, size=k).tolist()

    def _sample_distribution(self):
        if self.num_tasks is None:
            raise ValueError(f"{self.task_space!r} is infinite: single tasks have no probability")
        return np.full(self.num_tasks, 1 / self.num_tasks)


class BatchedDomainRandomization(DomainRandomization):
    """One task for all environments, drawn uniformly anew whenever `batch_size` steps have been played.

    The steps are the lengths of finished episodes. In the first `warmup_batches` batches every draw is its own.
    """

    def __init__(self, batch_size, task_space, warmup_batches=5, *, seed=None):
        super().__init__(as_task_space(task_space), seed=seed)
        if not 1 <= batch_size < np.inf or not 0 <= warmup_batches < np.inf:
            found = f"batch_size={batch_size!r}, warmup_batches={warmup_batches!r}"
            raise ValueError(f"{found}: must be at least 1 step and 0 batches")
        self.batch_size, self.warmup_batches = batch_size, warmup_batches
        self._batches, self._steps, self._task = 0, 0, None  # whole batches, steps since, the batch's task

    def sample(self, k=1):
        """Draws k task encodings, a list of equal ones after the warm-up."""
        if self._batches < self.warmup_batches:
            return super().sample(k)
        if self._task is None:
            self._task = super().sample()[0]
        return [copy.copy(self._task) for _ in range(k)]

    def _sample_distribution(self):
        probabilities = super()._sample_distribution()
        if self._task is not None:
            probabilities[:] = 0
            probabilities[self._index(self._task)] = 1
        return probabilities

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        whole, self._steps = divmod(self._steps + checked_length(task, length), self.batch_size)
        if whole:
            self._batches, self._task = self._batches + whole, None

    def state_dict(self):
        return super().state_dict() | {"batches": self._batches, "steps": self._steps, "task": copy.copy(self._task)}

    def _load(self, state):
        super()._load(state)
        self._batches, self._steps, task = int(state["batches"]), int(state["steps"]), state["task"]
        self._task = None if task is None else self.task_space.restore(task)

    def metrics(self):
        return {"batches": float(self._batches)}
