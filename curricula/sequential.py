"""One curriculum after the other, each until its stopping condition holds."""

import contextlib
import copy
import math
import re
from collections import deque

import gymnasium as gym
import numpy as np

from curricula.core import Curriculum, TaskSpace, as_task_space, checked_length
from curricula.domain_randomization import DomainRandomization
from curricula.manual import Constant

MEMORY = 10_000  # draws that nobody has played yet; an environment in the sync has its own, without a limit
METRICS = ("steps", "episodes", "tasks", "total_steps", "total_episodes", "total_tasks", "episode_return")
OPERATORS = {
    "<": lambda x, value, start: x < value,
    "<=": lambda x, value, start: x <= value,
    ">": lambda x, value, start: x > value,
    ">=": lambda x, value, start: x >= value,
    "=": lambda x, value, start: x == value or (x > value) != (start > value),  # reached or passed since the start
}


def parse_condition(text):
    """["metric operator number" joined by & within |] as a list of alternatives, each a list of such triples.

    A ValueError names the token that is none of METRICS, OPERATORS or a finite number.
    """

    def refuse(token, expected):
        raise ValueError(f"stopping condition {text!r}: found {token!r}, must be {expected}")

    if not isinstance(text, str):
        refuse(text, "text or a callable")

    def comparison(part):
        tokens = [token.strip() for token in re.split("(<=|>=|<|>|=)", part, maxsplit=1)]
        metric, operator, number = tokens if len(tokens) == 3 else (tokens[0], "", "")
        if metric not in METRICS:
            refuse(metric, f"one of {', '.join(METRICS)}")
        if operator not in OPERATORS:
            refuse(part, f"a metric, then one of {' '.join(OPERATORS)}, then a number")
        if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", number) or not math.isfinite(float(number)):
            refuse(number, "a finite number")
        return metric, operator, float(number)

    return [[comparison(part) for part in alternative.split("&")] for alternative in text.split("|")]


class SequentialCurriculum(Curriculum):
    """Draws from one curriculum, the stage, until its stopping condition holds; then from the next one.

    An entry of `curriculum_list` is a Curriculum, a TaskSpace or list of tasks (uniform over them) or a single task
    (that one), all of tasks of `task_space`, the environments'. A curriculum keeps its own task space and encodings.
    `stopping_conditions`: one for every stage but the last; with `should_loop` for that too, and stage 0 follows. One
    is a callable without arguments, or text such as "steps>=1000&episode_return>.8|tasks=500", & binding before |:

    - steps, episodes, tasks: what the stage has counted; total_*: what all have. Steps are those of finished episodes.
    - episode_return: mean of the stage's last `return_buffer_size` returns; false until there are that many.
    - = holds once the value is reached, also if one episode jumps over it.

    Conditions are looked at after each draw and each finished episode. An episode counts, and its updates are passed
    on, in the stage that drew its task; if that has ended, it counts for the totals alone. Of an environment in the
    sync it is known which draw it plays (update_on_draw and update_on_end; a loop of yours may call them too, and must
    where episodes are cut off). Otherwise it plays the oldest unplayed draw of its task, or without an `env_id`, where
    there is but one environment, the newest; the last MEMORY draws are kept in mind. What is played without a draw
    belongs to the present stage.
    """

    def __init__(self, curriculum_list, stopping_conditions, task_space, return_buffer_size=1000, should_loop=False,
                 *, seed=None):  # fmt: skip
        super().__init__(as_task_space(task_space), seed=seed)
        stages, needed = len(curriculum_list), len(curriculum_list) - (not should_loop)
        if not stages or len(stopping_conditions) != needed:
            found = f"{stages} stages with {len(stopping_conditions)} stopping conditions"
            raise ValueError(f"{found}: at least 1 stage is needed, and here {max(needed, 0)} conditions")
        if not return_buffer_size >= 1 or return_buffer_size % 1 != 0:
            raise ValueError(f"return_buffer_size={return_buffer_size!r}: must be a whole number of episodes from 1")
        self.curriculum_list = [self._stage_of(x, rng) for x, rng in zip(curriculum_list, self.rng.spawn(stages))]
        self.stopping_conditions = [c if callable(c) else parse_condition(c) for c in stopping_conditions]
        self.requires_step_updates = any(curriculum.requires_step_updates for curriculum in self.curriculum_list)
        self.requires_observations = any(curriculum.requires_observations for curriculum in self.curriculum_list)
        self._stage = 0  # counts on when the stages loop
        self._counts = dict.fromkeys(METRICS[:-1], 0)
        self._returns, self._first_mean = deque(maxlen=int(return_buffer_size)), None
        self._unplayed = []  # (key, stage, the stage's encoding) of draws that are not known to be anyone's
        self._drawn = {}  # env_id -> those that it plays, in order: the first one is underway, or the next

    def _stage_of(self, entry, rng):
        """The curriculum that an entry means; its tasks, if not too many to look at, are all in the task space."""
        if not isinstance(entry, Curriculum):
            if isinstance(entry, (TaskSpace, gym.Space, list, range)):
                entry = DomainRandomization(as_task_space(entry), seed=rng)
            else:
                entry = Constant(entry, self.task_space, seed=rng)
        if entry.task_space is not self.task_space:
            for i in range(min(entry.num_tasks or 0, 10_000)):
                self._outer(entry, entry._encoding(i))
        return entry

    @property
    def current_curriculum(self):
        return self._of(self._stage)

    def _of(self, stage):
        return self.curriculum_list[stage % len(self.curriculum_list)]

    def _outer(self, curriculum, encoding):
        """The environments' encoding of a stage's."""
        return self.task_space.encode(as_task_space(curriculum.task_space).decode(encoding))

    def _key(self, task):
        """What an encoding is found by: its number, in an infinite space its bytes."""
        if self.num_tasks is not None:
            return self._index(task)
        self.task_space.decode(task)  # raises outside the space
        return gym.spaces.flatten(self.task_space.gym_space, task).tobytes().hex()

    def available(self):
        return min(1, self.current_curriculum.available())  # after a draw it may be the next stage's turn

    def sample(self, k=1):
        tasks = []
        for _ in range(k):
            curriculum = self.current_curriculum
            encoding = curriculum.sample()[0]
            tasks.append(self._outer(curriculum, encoding))
            self._unplayed.append((self._key(tasks[-1]), self._stage, encoding))
            self._count(1, tasks=1)
            self._advance()
        del self._unplayed[:-MEMORY]
        return tasks

    def update_on_draw(self, tasks, env_ids):
        new = [self._unplayed.pop() for _ in tasks][::-1]
        for env_id in env_ids:
            self._drawn.setdefault(env_id, []).extend(new)
        for curriculum in self.curriculum_list:
            if own := [encoding for _, stage, encoding in new if self._of(stage) is curriculum]:
                curriculum.update_on_draw(own, env_ids)

    def update_on_end(self, env_ids, waiting):
        for env_id in env_ids:
            mine = self._drawn.get(env_id, [])
            del mine[: max(len(mine) - waiting, 0)]
        left = [stage for _, stage, _ in self._drawn.get(env_ids[0], []) if stage is not None]
        for curriculum in self.curriculum_list:
            curriculum.update_on_end(env_ids, sum(self._of(stage) is curriculum for stage in left))

    def _sample_distribution(self):
        curriculum = self.current_curriculum
        probabilities = np.zeros(self.num_tasks or 0)
        for i, p in enumerate(curriculum._sample_distribution()):
            probabilities[self._index(self._outer(curriculum, curriculum._encoding(i)))] += p
        return probabilities

    def _count(self, in_stage, **amounts):
        for name, amount in amounts.items():
            self._counts[name] += amount * in_stage
            self._counts[f"total_{name}"] += amount

    def _value(self, metric):
        """(now, at the stage's start) of a metric; None, None for a mean of too few returns."""
        if metric != "episode_return":
            return self._counts[metric], 0
        if len(self._returns) < self._returns.maxlen:
            return None, None
        return self._return_mean(), self._first_mean

    def _return_mean(self):
        return math.fsum(self._returns) / len(self._returns)  # exact: 12 returns of .8 have the mean .8

    def _holds(self, condition):
        if callable(condition):
            return condition()

        def true(metric, operator, number):
            now, start = self._value(metric)
            return now is not None and OPERATORS[operator](now, number, start)

        return any(all(true(*comparison) for comparison in alternative) for alternative in condition)

    def _advance(self):
        """To the next stage, if it is time."""
        place = self._stage % len(self.curriculum_list)
        if place < len(self.stopping_conditions) and self._holds(self.stopping_conditions[place]):
            self._stage += 1
            self._counts |= {"steps": 0, "episodes": 0, "tasks": 0}
            self._returns.clear()
            self._first_mean = None

    def _played(self, task, env_id, ends):
        """The present stage's encoding of the task that an environment plays; None if it is not of this stage."""
        key, mine = self._key(task), self._drawn.setdefault(env_id, [])
        if not mine or mine[0][0] != key:
            places = [i for i, draw in enumerate(self._unplayed) if draw[0] == key]
            place = places and places[-1 if env_id is None else 0]
            mine[:1] = [self._unplayed.pop(place) if places else (key, *self._undrawn(task))]
        _, stage, encoding = mine.pop(0) if ends else mine[0]
        return encoding if stage == self._stage else None

    def _undrawn(self, task):
        """(stage, its encoding) of a task that is played without a draw; (None, None) if the stage does not know it."""
        with contextlib.suppress(ValueError):
            known = as_task_space(self.current_curriculum.task_space)
            return self._stage, known.encode(self.task_space.decode(task))
        return None, None

    def update_task_progress(self, task, progress, env_id=None):
        encoding = self._played(task, env_id, ends=True)
        if encoding is not None:
            self.current_curriculum.update_task_progress(encoding, progress, env_id)

    def update_on_step(self, task, obs, reward, terminated, truncated, info, progress, env_id=None):
        self.update_on_step_batch([(task, obs, reward, terminated, truncated, info, progress)], env_id)

    def update_on_step_batch(self, steps, env_id=None):
        own, task = [], None
        for step in steps:
            if step[0] is not task:  # looked up once for an episode
                task = step[0]
                encoding = self._played(task, env_id, ends=False)
            if encoding is not None:
                own.append((encoding, *step[1:]))
        if own and self.current_curriculum.requires_step_updates:
            self.current_curriculum.update_on_step_batch(own, env_id)

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        if not math.isfinite(episode_return):
            raise ValueError(f"episode_return={episode_return!r} of task {task!r}: must be finite")
        length, encoding = checked_length(task, length), self._played(task, env_id, ends=True)
        self._count(encoding is not None, steps=length, episodes=1)
        if encoding is not None:
            self._returns.append(float(episode_return))
            if self._first_mean is None and len(self._returns) == self._returns.maxlen:
                self._first_mean = self._return_mean()
            self.current_curriculum.update_on_episode(episode_return, length, encoding, progress, env_id)
        self._advance()

    def update_on_demand(self, metrics):
        self.current_curriculum.update_on_demand(metrics)

    def state_dict(self):
        return super().state_dict() | {
            "stage": self._stage,
            "counts": dict(self._counts),
            "returns": list(self._returns),
            "first_mean": self._first_mean,
            "unplayed": copy.deepcopy(self._unplayed),
            "drawn": copy.deepcopy(self._drawn),
            "curricula": [curriculum.state_dict() for curriculum in self.curriculum_list],
        }

    def _load(self, state):
        if len(state["curricula"]) != len(self.curriculum_list):
            raise ValueError(f"a state of {len(state['curricula'])} stages does not fit {len(self.curriculum_list)}")
        super()._load(state)
        self._stage, self._first_mean = int(state["stage"]), state["first_mean"]
        self._counts = {name: int(state["counts"][name]) for name in self._counts}
        self._returns = deque(map(float, state["returns"]), maxlen=self._returns.maxlen)
        self._unplayed = [self._restored(*draw) for draw in state["unplayed"]]
        self._drawn = {env_id: [self._restored(*draw) for draw in draws] for env_id, draws in state["drawn"].items()}
        for curriculum, saved in zip(self.curriculum_list, state["curricula"]):
            curriculum.load_state_dict(saved)

    def _restored(self, key, stage, encoding):
        known = None if stage is None else as_task_space(self._of(stage).task_space)
        return key, stage, known and known.restore(encoding)

    def metrics(self):
        """The present stage's metrics, its number and what it has counted."""
        counts = {f"stage_{name}": float(self._counts[name]) for name in METRICS[:3]}
        mean = {"stage_return_mean": self._return_mean()} if self._returns else {}
        return self.current_curriculum.metrics() | {"stage": float(self._stage)} | counts | mean
