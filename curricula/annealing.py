"""Curricula over a Box: values that move along a line, and an interval that grows with success."""

import gymnasium as gym
import numpy as np

from curricula.core import Curriculum, as_task_space, checked_length
from curricula.learning_progress import checked_progress


def _box(task_space, owner):
    space = as_task_space(task_space)
    if not isinstance(space.gym_space, gym.spaces.Box):
        raise ValueError(f"{owner} needs the task space of a Box, found {space!r}")
    return space


class SimulatedAnnealing(Curriculum):
    """The task goes in a line from `start_values` to `end_values`, both in the Box, while `total_steps` steps pass.

    `total_steps`: one number, or one for each value. The steps are the lengths of finished episodes.
    """

    def __init__(self, task_space, start_values, end_values, total_steps, *, seed=None):
        super().__init__(_box(task_space, "SimulatedAnnealing"), seed=seed)
        shape = self.task_space.gym_space.shape
        for name, values in (("start_values", start_values), ("end_values", end_values)):
            if np.shape(values) != shape:
                raise ValueError(f"{name}={values!r} has shape {np.shape(values)}: must be {shape}, as the Box")
            self.task_space.encode(values)
        steps = np.asarray(total_steps, float)
        if steps.shape not in ((), shape):
            raise ValueError(
                f"total_steps={total_steps!r} has shape {steps.shape}: must be a number, or of shape {shape}"
            )
        if not (steps > 0).all():
            raise ValueError(f"total_steps={total_steps!r}: must be above 0")
        self.start_values, self.end_values = np.asarray(start_values, float), np.asarray(end_values, float)
        self.total_steps, self.current_step = steps, 0

    def sample(self, k=1):
        """k times the present values. A Box of whole numbers gets the nearest ones."""
        space, share = self.task_space.gym_space, np.minimum(self.current_step / self.total_steps, 1)
        values = self.start_values + (self.end_values - self.start_values) * share
        values = np.rint(values) if space.dtype.kind in "iu" else values
        values = values.astype(space.dtype).clip(space.low, space.high)  # rounding must not leave the Box
        return [values.copy() for _ in range(k)]

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        self.current_step += checked_length(task, length)

    def state_dict(self):
        return super().state_dict() | {"current_step": self.current_step}

    def _load(self, state):
        super()._load(state)
        self.current_step = int(state["current_step"])

    def metrics(self):
        return {"annealed": float(np.minimum(self.current_step / self.total_steps, 1).mean())}


class ExpandingBox(Curriculum):
    """The task is an interval [low, high] around the middle of a Box of shape (2,), from its low[0] to its high[1].

    It begins `1 / steps` as wide as the whole, and grows by as much each time that `required_successes` episodes in a
    row reach a progress above `success_threshold`. What is reported of another interval than the present one, from an
    episode that began before it grew, does not count.
    """

    def __init__(self, task_space, steps=5, success_threshold=0.75, required_successes=10, *, seed=None):
        super().__init__(_box(task_space, "ExpandingBox"), seed=seed)
        space = self.task_space.gym_space
        fits = space.shape == (2,) and space.dtype.kind == "f" and space.is_bounded() and space.low[0] < space.high[1]
        for name, value, valid, allowed in (
            ("task_space", task_space, fits, "a bounded Box of 2 floats: a task is an interval [low, high]"),
            ("steps", steps, steps >= 1 and steps % 1 == 0, "a whole number from 1"),
            ("success_threshold", success_threshold, 0 <= success_threshold < 1, "in [0, 1): progress must exceed it"),
            ("required_successes", required_successes, required_successes >= 1, "at least 1"),
        ):
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
        self.steps, self.success_threshold, self.required_successes = steps, success_threshold, required_successes
        self._width, self._successes = 1, 0  # the width in steps

    def interval(self):
        """The present task, (2,)."""
        space, share = self.task_space.gym_space, self._width / self.steps
        low, high = float(space.low[0]), float(space.high[1])
        middle, half = (low + high) / 2, (high - low) / 2 * share
        return np.array([middle - half, middle + half], space.dtype).clip(space.low, space.high)

    def sample(self, k=1):
        return [self.interval() for _ in range(k)]

    def update_task_progress(self, task, progress, env_id=None):
        progress = checked_progress(task, progress)
        if self._width == self.steps or not np.array_equal(self.task_space.decode(task), self.interval()):
            return
        self._successes = self._successes + 1 if progress > self.success_threshold else 0
        if self._successes >= self.required_successes:
            self._width, self._successes = self._width + 1, 0

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        self.update_task_progress(task, progress, env_id)

    def state_dict(self):
        return super().state_dict() | {"width": self._width, "successes": self._successes}

    def _load(self, state):
        super()._load(state)
        self._width, self._successes = int(state["width"]), int(state["successes"])

    def metrics(self):
        low, high = self.interval().tolist()
        return {"range_min": low, "range_max": high, "successes": float(self._successes)}
