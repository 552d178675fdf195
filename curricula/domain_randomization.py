"""Domain randomization: every task is equally likely, whatever the agent does. The baseline of every curriculum."""

import numpy as np

from curricula.core import Curriculum


class DomainRandomization(Curriculum):
    """Uniform over the task space (Tobin et al. 2017, arXiv:1703.06907). No update changes it."""

    def sample(self, k=1):
        """Draws k task encodings, a list, in O(k) however many tasks there are. In a Box: uniform in its bounds."""
        if hasattr(self.task_space, "draw"):
            return [self.task_space.draw(self.rng) for _ in range(k)]
        return self.rng.integers(self.num_tasks, size=k).tolist()

    def _sample_distribution(self):
        if self.num_tasks is None:
            raise ValueError(f"{self.task_space!r} is infinite: single tasks have no probability")
        return np.full(self.num_tasks, 1 / self.num_tasks)
