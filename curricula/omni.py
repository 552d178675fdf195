"""OMNI: learning progress among interesting tasks (Zhang et al. 2023, arXiv:2306.01711)."""

from collections.abc import Mapping

import numpy as np

from curricula.learning_progress import LearningProgress


class OMNI(LearningProgress):
    """Learning progress, in which boring tasks keep a thousandth of their weight.

    `interestingness(done, task)` tells whether `task` is interesting to an agent that is good at `done`, both decoded
    tasks; a model may stand behind it. A table {done: {task: bool}} serves as well: what it omits is boring. After
    each evaluation the tasks are visited from the highest success rate down (of equal ones the first first): one not
    yet marked is interesting, and those unmarked that it makes boring are marked so. By default none is boring.
    """

    ARRAYS = (*LearningProgress.ARRAYS, "_boring")  # saved, not asked again: a model may change its mind

    def __init__(self, evaluator, task_space, *, interestingness=lambda done, task: True, **options):
        if isinstance(interestingness, Mapping):
            table = interestingness

            def interestingness(done, task):
                return table.get(done, {}).get(task, False)

        if not callable(interestingness):
            raise ValueError(f"interestingness={interestingness!r}: must be a callable (done, task) -> bool or a table")
        self.interestingness = interestingness
        super().__init__(evaluator, task_space, **options)
        self._boring = self._boring != 0

    def _absorb(self, tried, first):
        super()._absorb(tried, first)
        tasks = getattr(self.task_space, "tasks", range(self.num_tasks))
        boring, marked = np.zeros((2, self.num_tasks), bool)
        for done in np.argsort(-self.task_rates, kind="stable"):
            if not marked[done]:
                marked[done] = True
                for i in np.flatnonzero(~marked):
                    boring[i] = marked[i] = not self.interestingness(tasks[done], tasks[i])
        self._boring = boring

    def _weigh(self):
        weights = super()._weigh() * np.where(self._boring, 1e-3, 1)
        return weights / weights.sum()

    def metrics(self):
        return super().metrics() | {"tasks_boring": float(self._boring.sum())}
