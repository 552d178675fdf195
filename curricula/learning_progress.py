"""Learning progress (Kanitscheider et al. 2021, arXiv:2106.14876), learnability (arXiv:2408.15099, SFL)."""

import contextlib

import numpy as np

from curricula.core import Curriculum, checked_length


def checked_progress(task, progress):
    """`progress` as a float in [0, 1]; else a ValueError that names the task."""
    with contextlib.suppress(TypeError):
        if 0 <= progress <= 1:  # NaN is not
            return float(progress)
    found = f"task {task!r} has progress {progress!r}"
    raise ValueError(f"{found}: must be in [0, 1]; rescale what the wrapper's _task_completion returns")


def reweight(p, theta):
    """f(p) = (1 - theta) p / (p + theta (1 - 2 p)), p in [0, 1]: magnifies low success rates; f(theta) = 1/2."""
    return (1 - theta) * p / (p + theta * (1 - 2 * p))


def progress_distribution(progress, active):
    """Sigmoid of the z-scores of `progress` over the `active` tasks (all, if none is), normalised; (num_tasks,)."""
    active = active if active.any() else np.ones_like(active)
    chosen, weights = progress[active], np.zeros(len(progress))
    std = chosen.std()
    z = (chosen - chosen.mean()) / (std if std > 1e-12 else 1)  # below it is the rounding of equal values
    weights[active] = 1 + np.tanh(z / 2)  # twice the sigmoid, without its overflow
    return weights / weights.sum()


class SuccessRates(Curriculum):
    """What curricula over the tasks' success rates share: who measures them and when. A subclass overrides `_weigh`.

    `evaluator` is a callable without arguments that returns the success rate of every task, (num_tasks,) in [0, 1], as
    numpy or torch; or an object with the public package's `evaluate_agent(episodes)`, which gets `eval_eps` (for the
    first evaluation `baseline_eval_eps`), and whose success rates are its second result, those at the episodes' ends
    (`continuous_progress`) its third. It is called at the first draw, then after `eval_interval` episodes or
    `eval_interval_steps` steps (a learner may also call `eval_and_update`), in the thread that draws or updates.
    With None the learner evaluates and calls update_on_demand({"success_rates": rates}); uniform until then.

    A task's first rate, at most 0.75, is its random baseline b. `normalize_success` turns a rate r into
    max(r - b, 0) / (1 - b). `task_rates` and `random_baseline` are (num_tasks,), 0 for a task never measured.
    """

    ARRAYS = ("task_rates", "random_baseline", "_measured")

    def __init__(self, evaluator, task_space, *, eval_interval=None, eval_interval_steps=None, eval_eps=1,
                 baseline_eval_eps=None, normalize_success=True, continuous_progress=False, seed=None):  # fmt: skip
        super().__init__(task_space, seed=seed)
        runs = callable(evaluator) or hasattr(evaluator, "evaluate_agent")
        for name, value, valid, allowed in (
            ("task_space", task_space, self.num_tasks is not None, "finite: every task has its own success rate"),
            ("evaluator", evaluator, runs or evaluator is None, "a callable, an object with evaluate_agent, or None"),
            ("eval_interval", eval_interval, eval_interval is None or eval_interval >= 1, "None or at least 1"),
            ("eval_interval_steps", eval_interval_steps, eval_interval_steps is None or eval_interval_steps >= 1,
             "None or at least 1"),
            ("eval_eps", eval_eps, eval_eps > 0, "above 0"),
            ("baseline_eval_eps", baseline_eval_eps, baseline_eval_eps is None or baseline_eval_eps > 0,
             "None or above 0"),
        ):  # fmt: skip
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
        if eval_interval and eval_interval_steps:
            found = f"eval_interval={eval_interval!r} and eval_interval_steps={eval_interval_steps!r}"
            raise ValueError(f"{found}: give one of them")
        self.evaluator, self.eval_interval, self.eval_interval_steps = evaluator, eval_interval, eval_interval_steps
        self.eval_eps, self.baseline_eval_eps = eval_eps, baseline_eval_eps or eval_eps
        self.normalize_success, self.continuous_progress = normalize_success, continuous_progress
        self._episodes, self._steps = 0, 0  # since the last evaluation
        for name in self.ARRAYS:
            setattr(self, name, np.zeros(self.num_tasks))
        self._measured = np.zeros(self.num_tasks, bool)
        self._refresh()

    def _weigh(self):
        """The distribution over tasks by what is measured; called once some are."""
        raise NotImplementedError

    def _refresh(self):
        uniform = np.full(self.num_tasks, 1 / self.num_tasks)
        self._distribution = self._weigh() if self._measured.any() else uniform
        self._sums = np.cumsum(self._distribution)
        self._sums /= self._sums[-1]

    def _first_evaluation(self):
        if self.evaluator is not None and not self._measured.any():
            self.eval_and_update()

    def sample(self, k=1):
        """Draws k task encodings, a list, in O(k log num_tasks)."""
        self._first_evaluation()
        return [self._encoding(i) for i in np.searchsorted(self._sums, self.rng.random(k), side="right")]

    def _sample_distribution(self):
        self._first_evaluation()
        return self._distribution.copy()

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        self._steps += checked_length(task, length)
        self._episodes += 1
        if self._episodes >= (self.eval_interval or np.inf) or self._steps >= (self.eval_interval_steps or np.inf):
            self.eval_and_update()

    def update_on_demand(self, metrics):
        """Takes in `metrics["success_rates"]` of all tasks, (num_tasks,) in [0, 1]; other entries are not for us."""
        if "success_rates" in metrics:
            self._take(metrics["success_rates"], np.ones(self.num_tasks, bool))

    def eval_and_update(self):
        """Measures the success rates now, and takes them in."""
        self._episodes = self._steps = 0
        self._take(*self._measure())

    def _measure(self):
        """Success rates, and of which tasks: both (num_tasks,)."""
        if self.evaluator is None:
            raise ValueError('evaluator=None: pass the rates to update_on_demand({"success_rates": rates})')
        if hasattr(self.evaluator, "evaluate_agent"):
            episodes = self.eval_eps if self._measured.any() else self.baseline_eval_eps
            rates = self.evaluator.evaluate_agent(int(episodes))[2 if self.continuous_progress else 1]
        else:
            rates = self.evaluator()
        return rates, np.ones(self.num_tasks, bool)

    def _take(self, rates, tried):
        """Takes in the success rates of the tasks that were tried; the others keep what is known of them."""
        rates = np.asarray(rates.detach().cpu() if hasattr(rates, "detach") else rates, np.float64)
        if rates.shape != (self.num_tasks,):
            raise ValueError(f"success rates have shape {rates.shape}: must be ({self.num_tasks},), one for each task")
        if not ((rates >= 0) & (rates <= 1)).all():
            worst = int(np.argmin((rates >= 0) & (rates <= 1)))
            raise ValueError(
                f"success rate of task {worst} is {rates[worst]}: must be in [0, 1], as successes / trials"
            )
        first = tried & ~self._measured
        self.task_rates = np.where(tried, rates, self.task_rates)
        self.random_baseline = np.where(first, np.minimum(rates, 0.75), self.random_baseline)
        self._measured = self._measured | tried
        self._absorb(tried, first)
        self._refresh()

    def _absorb(self, tried, first):
        """Whatever a subclass derives from new rates; `first`: the tasks that had none before."""

    def _normalized(self):
        rates, base = self.task_rates, self.random_baseline
        return np.maximum(rates - base, 0) / (1 - base) if self.normalize_success else rates

    def state_dict(self):
        arrays = {name: getattr(self, name).copy() for name in self.ARRAYS}
        return super().state_dict() | arrays | {"episodes": self._episodes, "steps": self._steps}

    def _load(self, state):
        for name in self.ARRAYS:
            if np.shape(state[name]) != (self.num_tasks,):
                raise ValueError(
                    f"{name} has shape {np.shape(state[name])}: this curriculum has {self.num_tasks} tasks"
                )
        super()._load(state)
        for name in self.ARRAYS:
            setattr(self, name, np.asarray(state[name]).astype(getattr(self, name).dtype))
        self._episodes, self._steps = int(state["episodes"]), int(state["steps"])
        self._refresh()

    def metrics(self):
        """success_rate_mean is over the measured tasks; sampling_entropy, in nats, that of the next draw."""
        p = self._distribution[self._distribution > 0]
        return {
            "tasks_measured": float(self._measured.sum()),
            "success_rate_mean": float(self.task_rates.sum() / max(self._measured.sum(), 1)),
            "sampling_entropy": float(-(p * np.log(p)).sum()),
        }


class LearningProgress(SuccessRates):
    """Draws the tasks whose success rate changes, upwards or downwards, by evaluation of all tasks (see SuccessRates).

    fast <- a rate + (1 - a) fast; slow <- a fast + (1 - a) slow; both begin at the task's first rate. Learning progress
    is |f(fast) - f(slow)| with `reweight`, theta = `p_theta`. A task is active if it has progress or if its mean raw
    rate is above 0; the probabilities are `progress_distribution` (as in OMNI's and Syllabus' released code).
    """

    ARRAYS = (*SuccessRates.ARRAYS, "_p_fast", "_p_slow", "_p_true")

    def __init__(self, evaluator, task_space, *, ema_alpha=0.1, p_theta=0.1, **evaluation):
        for name, value in (("ema_alpha", ema_alpha), ("p_theta", p_theta)):
            if not 0 < value < 1:
                raise ValueError(f"{name}={value!r}: must be in (0, 1), where learning progress is defined")
        self.ema_alpha, self.p_theta = ema_alpha, p_theta
        super().__init__(evaluator, task_space, **evaluation)

    def _absorb(self, tried, first):
        def moved(mean, value):
            after = self.ema_alpha * value + (1 - self.ema_alpha) * mean
            return np.where(first, value, np.where(tried, after, mean))

        self._p_fast = moved(self._p_fast, self._normalized())
        self._p_slow = moved(self._p_slow, self._p_fast)
        self._p_true = moved(self._p_true, self.task_rates)

    def learning_progress(self):
        """(num_tasks,), in [0, 1]."""
        return np.abs(reweight(self._p_fast, self.p_theta) - reweight(self._p_slow, self.p_theta))

    def _weigh(self):
        progress = self.learning_progress()
        return progress_distribution(progress, (progress > 0) | (self._p_true > 0))

    def metrics(self):
        progress = self.learning_progress()
        extremes = {"learning_progress_mean": float(progress.mean()), "learning_progress_max": float(progress.max())}
        return super().metrics() | extremes


class OnlineLearningProgress(LearningProgress):
    """Learning progress by the training episodes alone; a share `uniform_prob` of the draws is uniform.

    Every finished episode is a trial of its task, and so is a task that `update_task_progress` reports as ended within
    one: a success if its progress is 1, or the progress itself with `continuous_progress`. Every `update_interval`
    episodes or `update_interval_steps` steps the rates of the tasks tried since then are taken in; the other tasks'
    means stay, because no trial is no failure. With `save_last` a task's last rate counts as one more trial.
    """

    ARRAYS = (*LearningProgress.ARRAYS, "_successes", "_trials")

    def __init__(self, task_space, *, ema_alpha=0.1, p_theta=0.1, update_interval=None, update_interval_steps=None,
                 normalize_success=True, uniform_prob=0.25, save_last=False, continuous_progress=False,
                 seed=None):  # fmt: skip
        if update_interval is None and update_interval_steps is None:
            raise ValueError("update_interval=None, update_interval_steps=None: give one, in episodes or in steps")
        if not 0 <= uniform_prob <= 1:
            raise ValueError(f"uniform_prob={uniform_prob!r}: must be in [0, 1]")
        self.uniform_prob, self.save_last = uniform_prob, save_last
        super().__init__(None, task_space, ema_alpha=ema_alpha, p_theta=p_theta, eval_interval=update_interval,
                         eval_interval_steps=update_interval_steps, normalize_success=normalize_success,
                         continuous_progress=continuous_progress, seed=seed)  # fmt: skip

    def update_task_progress(self, task, progress, env_id=None):
        index, progress = self._index(task), checked_progress(task, progress)
        self._successes[index] += progress if self.continuous_progress else progress // 1
        self._trials[index] += 1

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        length = checked_length(task, length)
        self.update_task_progress(task, progress, env_id)
        super().update_on_episode(episode_return, length, task, progress, env_id)

    def _measure(self):
        tried = self._trials > 0
        rates = self._successes / np.maximum(self._trials, 1)
        self._trials = np.where(tried & self.save_last, 1.0, 0.0)
        self._successes = rates * self._trials
        return rates, tried

    def _weigh(self):
        return (1 - self.uniform_prob) * super()._weigh() + self.uniform_prob / self.num_tasks


class Learnability(SuccessRates):
    """Draws tasks of high learnability p (1 - p), p the success rate, by evaluation of all tasks (see SuccessRates).

    `sampling` "topk": uniform over the `topk` most learnable (of equal ones the first); "dist": in proportion to it.
    A share 1 - `learnable_prob` of the draws is uniform over all.
    """

    def __init__(self, evaluator, task_space, *, topk=1000, learnable_prob=1.0, sampling="topk",
                 normalize_success=False, **evaluation):  # fmt: skip
        for name, value, valid, allowed in (
            ("topk", topk, topk >= 1 and topk % 1 == 0, "a whole number from 1"),
            ("learnable_prob", learnable_prob, 0 <= learnable_prob <= 1, "in [0, 1]"),
            ("sampling", sampling, sampling in ("topk", "dist"), "'topk' or 'dist'"),
        ):
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
            setattr(self, name, value)
        super().__init__(evaluator, task_space, normalize_success=normalize_success, **evaluation)

    def learnability(self):
        """(num_tasks,), in [0, 1/4]."""
        return self._normalized() * (1 - self._normalized())

    def _weigh(self):
        weights = self.learnability()
        if self.sampling == "topk":
            weights[np.argsort(-weights, kind="stable")] = np.arange(self.num_tasks) < self.topk
        weights = weights if weights.any() else np.ones(self.num_tasks)
        return self.learnable_prob * weights / weights.sum() + (1 - self.learnable_prob) / self.num_tasks

    def metrics(self):
        return super().metrics() | {"learnability_mean": float(self.learnability().mean())}
