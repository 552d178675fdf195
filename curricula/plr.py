"""Prioritized Level Replay (Jiang et al. 2021, arXiv:2010.03934), also for robust PLR (arXiv:2110.02439)."""

import numpy as np
from sortedcontainers import SortedList

from curricula.core import Curriculum


def rollout_advantages(rewards, values, next_values, dones, terminated, gamma, gae_lambda):
    """GAE (Schulman et al. 2016, eq. 16), all (T, N): sums end at `dones`, `terminated` steps have no successor."""
    advantages = rewards + gamma * ~terminated * next_values - values
    decay = gamma * gae_lambda * ~dones
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages


def level_scores(name, rewards, values, next_values, advantages, terminated, logits, gamma, episode_stat):
    """Score of each step (PLR table 1), in the shape of `rewards`; what the named score does not read may be None.

    `episode_stat` is the level's best return (grounded_*, max_mc) or success rate (learnability).
    """
    if name in ("policy_entropy", "least_confidence", "min_margin"):
        p = np.exp(logits - logits.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        if name == "policy_entropy":
            return -(p * np.log(np.where(p > 0, p, 1))).sum(-1) / np.log(max(p.shape[-1], 2))
        return 1 - p.max(-1) + (np.sort(p)[..., -2:-1].sum(-1) if name == "min_margin" else 0)
    return {
        "gae": lambda: advantages,
        "signed_value_loss": lambda: advantages,
        "value_l1": lambda: np.abs(advantages),
        "positive_value_loss": lambda: np.maximum(advantages, 0),
        "one_step_td_error": lambda: np.abs(rewards + gamma * ~terminated * next_values - values),
        "grounded_signed_value_loss": lambda: episode_stat - values,
        "grounded_positive_value_loss": lambda: np.maximum(episode_stat - values, 0),
        "max_mc": lambda: episode_stat - values,
        "learnability": lambda: episode_stat * (1 - episode_stat),
        "uniform": lambda: np.ones(rewards.shape),
    }[name]()


def replay_weights(transform, x, seen, temperature, epsilon=0.0, offset=0.0):
    """Distribution over the levels that `seen` marks, (L,) float64; all 0 where these have no mass.

    Ranks are among seen levels; equal ones share the mass of their ranks equally. max and eps_greedy take the first.
    """
    weights, num_levels, x = np.zeros(len(x)), len(x), x[seen]
    if not len(x):
        return weights
    if transform in ("match", "match_rank"):
        x = x * (1 - x)
    mass = np.ones(len(x))
    if transform in ("rank", "match_rank"):
        _, group, sizes = np.unique(-x, return_inverse=True, return_counts=True)
        by_rank = np.arange(1.0, len(x) + 1) ** (-1 / temperature)
        mass = (np.add.reduceat(by_rank, np.cumsum(sizes) - sizes) / sizes)[group]
    elif transform in ("power", "match"):
        mass = np.maximum(x, 0) + offset
        mass = (mass / (mass.max() or 1)) ** (1 / temperature)  # the division: no overflow
    elif transform == "softmax":
        mass = np.exp((x - x.max()) / temperature)
    elif transform in ("eps_greedy", "max"):
        epsilon = epsilon if transform == "eps_greedy" else 0.0
        mass *= epsilon / num_levels
        mass[np.argmax(x)] += 1 - epsilon
    weights[seen] = mass / (mass.sum() or 1)
    return weights


class PrioritizedLevelReplay(Curriculum):
    """A draw replays a seen level with probability `replay_probability()`, else takes an unseen one, uniformly.

    After each rollout call `update_from_rollout`, after each policy update `after_update`. An episode's score is
    max_score_coef * maximum + (1 - max_score_coef) * mean over its steps, and moves its level's score by `alpha`.
    Levels that several actors play in one rollout are updated in order of actor, then time: with alpha=1 the last
    stays. grounded_*, max_mc and learnability score finished episodes only, after all returns of the rollout entered
    the level's best return or success rate (return > 0; a mean, from 20 episodes on a moving one of rate 1/20).
    grounded_* takes the steps of the rollout in which the episode ended; max_mc all its steps, then the mean over one
    actor's episodes on the level. match and match_rank read a score as a success rate p and rate it p (1 - p).

    robust=True asks the trainer for PLR-perp: it calls `is_unseen(task)` when a task is drawn, and an episode on a task
    that was unseen then is scored but gives no gradient. Sampling is the same either way.

    With buffer_size the tasks are a range too large for arrays: all arrays are (buffer_size,), slot i holds task
    `levels[i]` (-1: none). A new task waits in staging until its first score, then takes a free slot, or the slot of
    the lowest sample weight unless that one's score is higher.
    """

    LOGIT_SCORES = ("policy_entropy", "least_confidence", "min_margin")
    ADVANTAGE_SCORES = ("gae", "signed_value_loss", "value_l1", "positive_value_loss")
    EPISODE_SCORES = ("grounded_signed_value_loss", "grounded_positive_value_loss", "max_mc", "learnability")
    SCORES = (*LOGIT_SCORES, *ADVANTAGE_SCORES, *EPISODE_SCORES, "one_step_td_error", "uniform")
    UNIT_SCORES = (*LOGIT_SCORES, "learnability", "uniform")  # in [0, 1]
    TRANSFORMS = ("rank", "power", "softmax", "eps_greedy", "max", "constant", "match", "match_rank")

    def __init__(self, task_space, *, score="value_l1", score_transform="rank", temperature=0.1, staleness_coef=0.1,
                 staleness_transform="power", staleness_temperature=1.0, rho=1.0, replay_prob=0.5,
                 replay_schedule="proportionate", alpha=1.0, epsilon=0.05, max_score_coef=0.0, robust=False,
                 buffer_size=None, seed=None):  # fmt: skip
        super().__init__(task_space, seed=seed)
        unit, positive, schedules = "in [0, 1]", "above 0 and finite", ("proportionate", "fixed")
        ages = self.TRANSFORMS[:6]  # an age is no success rate
        rates = self.SCORES if score_transform in ages else self.UNIT_SCORES
        sized = buffer_size is None or buffer_size % 1 == 0 < buffer_size
        for name, value, valid, allowed in (
            ("task_space", task_space, self.num_tasks is not None, "countable: a level is known by its number"),
            ("score", score, score in self.SCORES, f"one of {self.SCORES}"),
            ("score_transform", score_transform, score_transform in self.TRANSFORMS, f"one of {self.TRANSFORMS}"),
            ("score", score, score in rates, f"one of {rates} for {score_transform}, which takes success rates"),
            ("temperature", temperature, 0 < temperature < np.inf, positive),
            ("staleness_coef", staleness_coef, 0 <= staleness_coef <= 1, unit),
            ("staleness_transform", staleness_transform, staleness_transform in ages, f"one of {ages}"),
            ("staleness_temperature", staleness_temperature, 0 < staleness_temperature < np.inf, positive),
            ("rho", rho, 0 <= rho <= 1, unit),
            ("replay_prob", replay_prob, 0 <= replay_prob <= 1, unit),
            ("replay_schedule", replay_schedule, replay_schedule in schedules, f"one of {schedules}"),
            ("alpha", alpha, 0 < alpha <= 1, "in (0, 1]"),
            ("epsilon", epsilon, 0 <= epsilon <= 1, unit),
            ("max_score_coef", max_score_coef, 0 <= max_score_coef <= 1, unit),
            ("robust", robust, robust in (True, False), "True or False"),
            ("buffer_size", buffer_size, sized, "None or a whole number from 1"),
        ):
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
            setattr(self, name, value)
        size = int(self.num_tasks if buffer_size is None else buffer_size)
        self._scores, self._unseen, self._last_drawn = np.zeros(size), np.ones(size, bool), np.zeros(size)
        self._clock, self._oldest = 0.0, 0.0  # staleness = clock - last_drawn <= clock - oldest
        self._open = {}  # actor -> its unfinished episode
        self._episodes = {}  # level -> (best return or success rate, finished episodes), for EPISODE_SCORES
        self._levels = np.full(size, -1) if buffer_size else range(size)  # slot -> level
        self._staging = {}  # new level -> clock at its draw
        ranks = np.arange(1.0, size + 1) if "rank" in score_transform else None
        self._rank_sums = None if ranks is None else np.cumsum(ranks ** (-1 / temperature))
        self._rebuild()

    def _rebuild(self):
        """Derives what makes draws fast from the arrays."""
        seen = np.flatnonzero(~self._unseen)
        keys = -self._rated(self._scores[seen])
        order = np.argsort(keys, kind="stable")
        self._ranked = SortedList(zip(keys[order].tolist(), seen[order].tolist()))  # (-rated score, slot), best first
        self._unseen_slots = SortedList(np.flatnonzero(self._unseen).tolist())
        self._slots = {int(self._levels[slot]): int(slot) for slot in seen} if self.buffer_size else self._levels
        self._sums = None  # running sums of the score weights, made at a draw

    def _rated(self, score):
        return score * (1 - score) if "match" in self.score_transform else score

    @staticmethod
    def _snapshot(array):
        array = np.array(array)
        array.setflags(write=False)
        return array

    scores = property(lambda self: self._snapshot(self._scores), doc="read-only copy, (num_tasks,)")
    unseen = property(lambda self: self._snapshot(self._unseen), doc="read-only copy, (num_tasks,) bool: never scored")
    staleness = property(lambda self: self._snapshot(self._clock - self._last_drawn), doc="(num_tasks,), in draws")
    levels = property(lambda self: self._snapshot(self._levels), doc="read-only copy, (num_tasks,): task in each slot")

    def is_unseen(self, task):
        """Whether `task` has no score yet."""
        level = int(self._index(task))
        return level not in self._slots or bool(self._unseen[self._slots[level]])

    def replay_probability(self):
        """P(replay): 0 below a share `rho` of seen levels (filled slots), then that share or, "fixed", replay_prob."""
        share = len(self._ranked) / len(self._scores)
        if not share or share < self.rho:
            return 0.0
        if self.replay_schedule == "fixed" and share < 1:
            return self.replay_prob
        return min(share, self.replay_prob) if self.buffer_size else share

    def _score_weights(self):
        seen, offset = ~self._unseen, 0.0 if self.staleness_coef else 1e-3
        weights = replay_weights(self.score_transform, self._scores, seen, self.temperature, self.epsilon, offset)
        return weights if weights.any() else seen / max(seen.sum(), 1)

    def _stale_weights(self):
        ages, temperature = self._clock - self._last_drawn, self.staleness_temperature
        return replay_weights(self.staleness_transform, ages, ~self._unseen, temperature, self.epsilon)

    def sample_weights(self):
        """Distribution of a replay draw, (num_tasks,) float64; all 0 while nothing is seen.

        (1 - staleness_coef) P_score + staleness_coef P_staleness, where P_staleness is dropped if no level is stale.
        """
        weights, c = self._score_weights(), self.staleness_coef
        stale = self._stale_weights() if c else weights
        return (1 - c) * weights + c * stale if stale.any() else weights

    def _sample_distribution(self):
        if self.buffer_size:
            return super()._sample_distribution()
        replay = self.replay_probability()
        return replay * self.sample_weights() + (1 - replay) * self._unseen / max(self._unseen.sum(), 1)

    def sample(self, k=1):
        tasks = []
        for _ in range(k):
            if self.rng.random() < self.replay_probability():
                level = int(self._levels[self._draw_replay()])
            elif self.buffer_size:
                level = int(self.rng.integers(self.num_tasks))
            else:
                level = self._unseen_slots[int(self.rng.random() * len(self._unseen_slots))]
            self._touch(level)
            tasks.append(self._encoding(level))
        return tasks

    def mark_sampled(self, task):
        """Staleness after a draw (`sample` calls it): 0 for `task`, +1 for others; nothing if staleness_coef=0."""
        self._touch(int(self._index(task)))

    def _touch(self, level):
        self._clock += self.staleness_coef > 0
        if level not in self._slots:
            self._staging[level] = self._clock
        elif self.staleness_coef:
            self._last_drawn[self._slots[level]] = self._clock

    def _draw_replay(self):
        """A slot drawn from sample_weights(). O(log num_tasks) by rank; other transforms first renew their sums."""
        if len(self._ranked) > 1 and self.staleness_coef and self.rng.random() < self.staleness_coef:
            slot = self._draw_stale()
            if slot is not None:
                return slot
        if self._rank_sums is not None:
            return self._draw_by_rank()
        if self._sums is None:
            self._sums = np.cumsum(self._score_weights())
        return self._pick(self._sums)

    def _draw_by_rank(self):
        """A slot by the mass of its rank, which levels of equal score share: the same number says which of them."""
        sums = self._rank_sums[: len(self._ranked)]
        mass = self.rng.random() * sums[-1]
        score = self._ranked[int(np.searchsorted(sums, mass, side="right"))][0]
        first, stop = self._ranked.bisect((score, -1)), self._ranked.bisect((score, np.inf))
        below = sums[first - 1] if first else 0.0
        share = (mass - below) / (sums[stop - 1] - below)
        return self._ranked[first + min(int(share * (stop - first)), stop - first - 1)][1]

    def _pick(self, sums):
        """An index drawn in proportion to the increments of `sums`."""
        return int(np.searchsorted(sums, self.rng.random() * sums[-1], side="right"))

    def _draw_stale(self):
        """A slot drawn by staleness, None if no level is stale: rejection, after 64 misses a draw in O(num_tasks)."""
        if self.staleness_transform == "power":
            random, seen, bound = self.rng.random, len(self._ranked), self._clock - self._oldest
            for _ in range(64 if bound else 0):
                slot = self._ranked[int(random() * seen)][1]
                age = self._clock - float(self._last_drawn[slot])
                if random() < (age / bound) ** (1 / self.staleness_temperature):
                    return slot
            self._oldest = float(self._last_drawn[~self._unseen].min())
        weights = self._stale_weights()
        return self._pick(np.cumsum(weights)) if weights.any() else None

    def update_from_rollout(self, tasks, rewards, values, logits, dones, gamma, gae_lambda, *,
                            next_values=None, terminated=None, advantages=None, valid=None):  # fmt: skip
        """Scores the levels that N actors played for T steps; an episode may span rollouts.

        tasks (T, N) int encodings; rewards (T, N); values (T + 1, N); logits (T, N, A) or None; dones (T + 1, N) bool:
        dones[t + 1] = step t ended an episode, dones[0] = the last step before the rollout did. Optional, all (T, N):
        next_values of each step's true successor, with which terminated tells termination from truncation; advantages
        (raw) if known; valid, False for (autoreset) steps that count for nothing. ValueError names what does not fit.
        """
        tasks = np.asarray(tasks)
        if tasks.ndim != 2 + np.ndim(self._encoding(0)) or not tasks.size or tasks.dtype.kind not in "iu":
            raise ValueError(f"tasks is {tasks.dtype} of shape {tasks.shape}: must be (T, N) integer encodings")
        if not (0 <= gamma <= 1 and 0 <= gae_lambda <= 1):
            raise ValueError(f"gamma={gamma!r}, gae_lambda={gae_lambda!r}: both must be in [0, 1]")
        if terminated is not None and next_values is None:
            raise ValueError("terminated without next_values: a truncated step's successor has no value; pass both")
        if self.score in self.LOGIT_SCORES and logits is None:
            raise ValueError(f"score={self.score!r} needs logits, found None: use one of {self.ADVANTAGE_SCORES}")

        def checked(name, x, extra_rows=0, dtype=np.float64, last=()):
            x, shape = np.asarray(x), (len(tasks) + extra_rows, tasks.shape[1], *last)
            if x.shape != shape:
                raise ValueError(f"{name} has shape {x.shape}: must be {shape}, as tasks is {tasks.shape}")
            # within 1e100 sums and products stay finite
            good = np.abs(x) < np.float64(1e100) if dtype is np.float64 else (x == 0) | (x == 1)
            if not good.all():
                allowed = "finite and below 1e100" if dtype is np.float64 else "True or False"
                raise ValueError(f"{name} holds {x[~good][0]}: must be {allowed}")
            return x.astype(dtype)

        rewards, values = checked("rewards", rewards), checked("values", values, 1)
        before, dones = np.split(checked("dones", dones, 1, bool), [1])
        terminated = dones if terminated is None else checked("terminated", terminated, dtype=bool)
        next_values = values[1:] if next_values is None else checked("next_values", next_values)
        values = values[:-1]
        if advantages is not None:
            advantages = checked("advantages", advantages)
        elif self.score in self.ADVANTAGE_SCORES:
            advantages = rollout_advantages(rewards, values, next_values, dones, terminated, gamma, gae_lambda)
        if self.score in self.LOGIT_SCORES:  # a masked action's -inf is no error
            logits = np.maximum(np.asarray(logits, np.float64), -1e30)
            logits = checked("logits", logits, last=logits.shape[-1:])
        else:
            logits = None

        # Rows in order of actor, then time. A segment is the part of one episode in this rollout.
        rows = slice(None) if valid is None else np.flatnonzero(checked("valid", valid, dtype=bool).T)

        def flat(x):
            return None if x is None else x.swapaxes(0, 1).reshape(-1, *x.shape[2:])[rows]

        begins = np.vstack([np.ones_like(before), dones[:-1]]).T
        segment = np.cumsum(begins)[rows] - 1
        if not segment.size:
            return
        starts = np.flatnonzero(np.diff(segment, prepend=-1))
        lengths, segment, first = np.diff(starts, append=len(segment)), segment[starts], np.flatnonzero(begins)
        ended = np.logical_or.reduceat(dones.T.ravel(), first)[segment].tolist()
        actors, time = np.divmod(first[segment], len(tasks))
        continued, actors = (time == 0) & ~before[0, actors], actors.tolist()
        levels = [int(self._index(task)) for task in flat(tasks)[starts].tolist()]
        returns = np.add.reduceat(flat(rewards), starts).tolist()

        episodes = []
        for actor, level, done, goes_on, part in zip(actors, levels, ended, continued, returns):
            episode = self._open.pop(actor, None)
            if episode and not (goes_on and episode["level"] == level):
                self._flush(episode)  # it ended out of sight
                episode = None
            episode = episode or {"level": level, "mean": 0.0, "max": -np.inf, "steps": 0, "return": 0.0}
            episode["return"] += part
            if done and self.score in self.EPISODE_SCORES:
                self._record(level, episode["return"])
            episodes.append(episode)
        stats = np.array([self._episodes.get(level, (0,))[0] * done for level, done in zip(levels, ended)])
        inputs = map(flat, (rewards, values, next_values, advantages, terminated, logits))
        step_scores = level_scores(self.score, *inputs, gamma, np.repeat(stats, lengths))
        means = np.add.reduceat(step_scores, starts) / lengths
        tops = np.maximum.reduceat(step_scores, starts)
        columns = [column.tolist() for column in (means, tops, lengths, stats)]
        finished = {}  # of max_mc: (actor, level) -> means of its episodes
        for episode, done, actor, mean, top, steps, stat in zip(episodes, ended, actors, *columns):
            if done and self.score == "max_mc":  # until its end an episode's scores lack the best return
                episode.update(mean=episode["mean"] + stat, max=episode["max"] + stat)
            if done or self.score == "max_mc" or self.score not in self.EPISODE_SCORES:
                episode["steps"] += steps
                episode["mean"] += (mean - episode["mean"]) * steps / episode["steps"]
                episode["max"] = max(episode["max"], top)
            if not done:
                self._open[actor] = episode
                continue
            if self.score == "max_mc":
                finished.setdefault((actor, episode["level"]), []).append(episode["mean"])
                episode["mean"] = np.mean(finished[actor, episode["level"]]).item()
            self._score(episode)
        if self.buffer_size:
            self._episodes = {level: stat for level, stat in self._episodes.items() if level in self._slots}

    def after_update(self):
        """Once per policy update: unfinished episodes count as they stand, and their next steps as an episode anew."""
        for actor in sorted(self._open):
            self._flush(self._open[actor])

    def _flush(self, episode):
        if episode["steps"] and self.score not in self.EPISODE_SCORES:
            self._score(episode)
            episode.update(mean=0.0, max=-np.inf, steps=0)

    def _record(self, level, episode_return):
        value, count = self._episodes.get(level, (0.0 if self.score == "learnability" else -np.inf, 0))
        rate = ((episode_return > 0) - value) / min(count + 1, 20)
        value = value + rate if self.score == "learnability" else max(value, episode_return)
        self._episodes[level] = (value, count + 1)

    def _score(self, episode):
        """Moves a level's score by that of an episode."""
        level, score = episode["level"], episode["mean"]
        if self.max_score_coef:
            score += self.max_score_coef * (episode["max"] - score)
        known = level in self._slots
        slot = self._slots[level] if known else self._admit(level, self.alpha * score)
        if slot is None:
            return
        old = float(self._scores[slot])
        if self._unseen[slot]:
            self._unseen[slot] = False
            self._unseen_slots.remove(slot)
        else:
            self._ranked.remove((-self._rated(old), slot))
        self._oldest = min(self._oldest, float(self._last_drawn[slot]))
        self._scores[slot] = score = (1 - self.alpha) * old * known + self.alpha * score
        self._ranked.add((-self._rated(score), slot))
        self._sums = None

    def _admit(self, level, score):
        """A slot for a new level, whose first score is `score`; None if every slot is worth more."""
        drawn = self._staging.pop(level, self._clock)
        slot = self._unseen_slots[0] if self._unseen_slots else int(np.argmin(self.sample_weights()))
        if not self._unseen[slot] and self._scores[slot] > score:
            return None
        self._slots.pop(int(self._levels[slot]), None)
        self._levels[slot], self._slots[level], self._last_drawn[slot] = level, slot, drawn
        return slot

    def state_dict(self):
        return super().state_dict() | {
            "scores": self._scores.copy(),
            "unseen": self._unseen.copy(),
            "staleness": self._clock - self._last_drawn,
            "staleness_bound": self._clock - self._oldest,
            "open": {actor: dict(episode) for actor, episode in self._open.items()},
            "episodes": np.array([(level, *stat) for level, stat in self._episodes.items()]).reshape(-1, 3),
            "levels": np.array(self._levels) if self.buffer_size else None,
            "staging": {level: self._clock - drawn for level, drawn in self._staging.items()},
        }

    def _load(self, state):
        for name, low in (("scores", -np.inf), ("unseen", 0), ("staleness", 0)):
            array, shape = np.asarray(state[name]), self._scores.shape
            if array.shape != shape or not (np.isfinite(array) & (array >= low)).all():
                raise ValueError(f"{name} has shape {array.shape}: must be {shape}, finite and not below {low}")
        super()._load(state)
        self._scores, self._unseen = np.asarray(state["scores"]).astype(float), np.asarray(state["unseen"]) != 0
        self._clock, self._last_drawn = 0.0, -np.asarray(state["staleness"]).astype(float)
        self._oldest = min(-state["staleness_bound"], float(self._last_drawn[~self._unseen].min(initial=0)))
        self._open = {actor: dict(episode) for actor, episode in state["open"].items()}
        self._episodes = {int(level): (value, int(n)) for level, value, n in np.asarray(state["episodes"]).tolist()}
        self._levels = np.asarray(state["levels"]).copy() if self.buffer_size else self._levels
        self._staging = {level: -age for level, age in state["staging"].items()}
        self._rebuild()

    def metrics(self):
        """Over the seen levels; sampling_entropy, in nats, is that of the next draw (with a buffer: of a replay)."""
        seen, weights = ~self._unseen, self.sample_weights() if self.buffer_size else self._sample_distribution()
        scores, weights = self._scores[seen] if seen.any() else np.zeros(1), weights[weights > 0]
        return {
            "levels_seen": float(seen.sum()),
            "replay_prob": float(self.replay_probability()),
            "score_mean": float(scores.mean()),
            "score_max": float(scores.max()),
            "staleness_mean": float((self._clock - self._last_drawn)[seen].sum() / max(seen.sum(), 1)),
            "sampling_entropy": float(-(weights * np.log(weights)).sum()),
        }
