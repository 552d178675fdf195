"""Task-prioritized experience replay (TaPER) for a trainer of your own, with uniform and PER replay as baselines.

Method: Kompella, MacGlashan, Wurman, Stone, "A task-prioritized experience replay algorithm for reinforcement
learning", patents US 12,277,194 B2 and JP 7602027 B2 (Sony). It is patented and in force: ask before you use it in a
product. Where the patent's formulas are lost, the reading taken stands beside the code.
"""

import heapq
import math
import os
import re
import shutil
import sys
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np


def achieving_prefix(terminations, reading="last"):
    """The transitions of one episode that led to each task's achievement (TaPER, eq. 1).

    terminations (T, n) bool: beta^j at s_{t+1}. Returns (T, n) bool: t up to and with the "first" or the "last" t at
    which task j's beta is 1; nothing where it never is. Of a beta that stays 1, pass the rises from 0 to 1 alone.
    """
    terminations = np.asarray(terminations, bool)
    if reading == "last":
        return np.logical_or.accumulate(terminations[::-1])[::-1]
    if reading != "first":
        raise ValueError(f"reading {reading!r}: it must be 'first' or 'last'")
    earlier = np.zeros_like(terminations)
    earlier[1:] = np.logical_or.accumulate(terminations)[:-1]
    return terminations.any(0) & ~earlier


def ramp(progress, start, end, share):
    """From start to end over the first `share` of a run that is at `progress` in [0, 1], in 100 equal steps, because a
    sum tree is built anew for each alpha."""
    return end if progress >= share else start + (end - start) * int(100 * progress / share) / 100


# Copied from algos/impala_popart.py:available_memory
def available_memory():
    """Bytes that this process may still take, by what the machine has free and by the limit of its control group."""
    free = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    with suppress(OSError, ValueError):  # no such group; its limit is the word max
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def as_bytes(array):
    """Any array, structured ones too, as the uint8 vector that a checkpoint can hold."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class IndexSets:
    """Slots in two sets: those of `order[:marked]` have priority `high`, the others `low`. A slot changes sets by a
    swap, and a draw is O(1) at any alpha. `where` is the inverse of `order`."""

    def __init__(self, capacity, high, low, alpha):
        self.order, self.where = np.arange(capacity, dtype=np.int32), np.arange(capacity, dtype=np.int32)
        self.marked, self.high, self.low, self.alpha = 0, high, low, alpha

    def mark(self, slots):
        self.place(slots, self.marked)
        self.marked += len(slots)

    def unmark(self, slots):
        slots = slots[self.where[slots] < self.marked]
        if len(slots):
            self.marked -= len(slots)
            self.place(slots, self.marked)

    def place(self, slots, start):
        """Puts `slots` at `start` of `order`; those that were there take the places that become vacant."""
        stop, before = start + len(slots), self.where[slots]
        inside = (before >= start) & (before < stop)
        stays = np.zeros(len(slots), bool)
        stays[before[inside] - start] = True
        others, vacant = self.order[start:stop][~stays], before[~inside]
        self.order[vacant], self.where[others] = others, vacant
        self.order[start:stop], self.where[slots] = slots, np.arange(start, stop)

    def sample(self, size, batch_size, rng):
        """Draws from the slots below `size`, which the first `size` places hold: slots, P(k), (batch_size,)."""
        high, low, rest = self.high**self.alpha, self.low**self.alpha, size - self.marked
        total = self.marked * high + rest * low
        marked = rng.random(batch_size) < self.marked * high / total
        place = (rng.random(batch_size) * np.where(marked, self.marked, rest)).astype(np.int64)
        slots = self.order[np.where(marked, place, self.marked + place)].astype(np.int64)
        return slots, np.where(marked, high, low) / total


class SumTree:
    """Priorities p of slots, drawn in proportion to p^alpha: float64 sums over blocks of 32, each recomputed from the
    level below, so that nothing drifts; the maximum of p likewise. A slot of priority 0 is never drawn."""

    FAN = 32  # numpy's cost is per level: 5 at 10^7 slots, where a binary tree has 24

    def __init__(self, capacity, alpha):
        self.alpha, self.sums, self.maxima = alpha, [], []
        while capacity > 1 or not self.sums:
            capacity = -(-capacity // self.FAN)
            self.sums.append(np.zeros(capacity * self.FAN))
            self.maxima.append(np.zeros(capacity * self.FAN))

    @property
    def total(self):
        return self.sums[-1].sum()

    @property
    def top(self):
        return self.maxima[-1].max()

    def set(self, slots, priorities):
        self.maxima[0][slots] = priorities
        self.sums[0][slots] = np.power(priorities, self.alpha)
        for (sums, sums_above), (maxima, maxima_above) in zip(pairwise(self.sums), pairwise(self.maxima)):
            slots = slots // self.FAN
            sums_above[slots] = sums.reshape(-1, self.FAN)[slots].sum(1)
            maxima_above[slots] = maxima.reshape(-1, self.FAN)[slots].max(1)

    def rebuild(self, priorities, alpha):
        """The priorities of all slots from 0 on, with another alpha."""
        self.alpha, size = alpha, len(priorities)
        self.maxima[0][:size], self.sums[0][:size] = priorities, np.power(priorities, alpha)
        for (sums, sums_above), (maxima, maxima_above) in zip(pairwise(self.sums), pairwise(self.maxima)):
            sums_above[: len(sums) // self.FAN] = sums.reshape(-1, self.FAN).sum(1)
            maxima_above[: len(maxima) // self.FAN] = maxima.reshape(-1, self.FAN).max(1)

    def find(self, mass):
        """The slots k with sum_{i<k} p_i^alpha <= mass < sum_{i<=k} p_i^alpha; mass (B,) in [0, total)."""
        node, each = np.zeros(len(mass), np.int64), np.arange(len(mass))
        for level in reversed(self.sums):
            children = level.reshape(-1, self.FAN)[node]
            until = children.cumsum(1)
            # Rounding can carry mass out of [0, last sum), where the child found might be one of priority 0.
            mass = np.maximum(np.minimum(mass, np.nextafter(until[:, -1], 0)), 0)
            child = (until <= mass[:, None]).sum(1)
            mass -= until[each, child] - children[each, child]
            node = node * self.FAN + child
        return node

    def sample(self, size, batch_size, rng):
        """A draw from each of batch_size strata of equal mass (Schaul et al. 2016): slots, P(k), (batch_size,). Their
        order is random, so that each part of the batch is a draw from all slots."""
        total = self.total
        slots = self.find((rng.permutation(batch_size) + rng.random(batch_size)) * (total / batch_size))
        return slots, self.sums[0][slots] / total


class TaskPrioritizedReplay:
    """Task-prioritized experience replay (TaPER), with uniform and PER replay as baselines; knows nothing of a learner.

    A FIFO of `capacity` transitions (s, a, r (n), s', beta at s' (n), terminated) of `num_envs` environments. D^j are
    those that were followed, in their episode of at most T = `episode_length` steps (`continuing`: in the moving window
    of T steps), by a rise of beta^j from 0 to 1, at their own s' at the earliest; D* is the union over the n tasks.
    P(k) = p_k^alpha / sum_m p_m^alpha, where p depends on `kind`:

    - uniform: all equal; per: |delta| + eps, at first the current maximum (Schaul et al. 2016)
    - taper: c in D*, else eps; taper_td: |delta| + eps in D*, at first the current maximum, else eps (eq. 3 and 4)
    - taper_shuffled: as taper, but random transitions are marked, as many as enter D*: the control for which ones are

    Each observation is stored once: s' is in the row of the environment's next transition; that of its newest, and the
    true last one of each episode, lie in `extra`. With a `folder` the rows are memory-mapped files, and a `state_dict`
    is small and stays loadable until more than `slack` further transitions are added. Errors: ValueError.
    """

    KINDS = ("uniform", "per", "taper", "taper_td", "taper_shuffled")

    def __init__(self, capacity, num_envs, num_tasks, obs_shape, obs_dtype, episode_length, rng, kind="taper",
                 alpha=1.0, c=1.0, eps=1e-2, reading="last", continuing=False, action_shape=(), action_dtype=np.int64,
                 folder=None, slack=0):  # fmt: skip
        for name, value, low in (("capacity", capacity, 1), ("num_envs", num_envs, 1), ("num_tasks", num_tasks, 1),
                                 ("episode_length", episode_length, 1), ("slack", slack, 0)):  # fmt: skip
            if not (low <= value < 2**31 and value == int(value)):
                raise ValueError(f"{name} {value}: it must be a whole number between {low} and {2**31 - 1}")
        if num_envs * episode_length > capacity:
            raise ValueError(f"capacity {capacity} is below num_envs {num_envs} x episode_length {episode_length} = "
                             f"{num_envs * episode_length}: an episode must fit in each environment")  # fmt: skip
        if not 0 < eps <= c < math.inf:
            raise ValueError(f"eps {eps}, c {c}: they must be 0 < eps <= c, so that no transition is left out")
        if kind not in self.KINDS:
            raise ValueError(f"kind {kind!r}: it must be one of {', '.join(self.KINDS)}")
        achieving_prefix(np.zeros((1, 1)), reading)  # checks it
        self.capacity, self.num_envs, self.num_tasks, self.T = capacity, num_envs, num_tasks, episode_length
        self.kind, self.reading, self.continuing, self.c, self.eps, self.rng = kind, reading, continuing, c, eps, rng
        self.num_rows, self.folder, self.maps = capacity + slack, None if folder is None else Path(folder), {}
        row = [("obs", obs_dtype, tuple(obs_shape)), ("action", action_dtype, tuple(action_shape)),
               ("reward", np.float32, (num_tasks,)), ("next_beta", bool, (num_tasks,)), ("terminated", bool),
               # `number` of the transition, counted from the first; where s' is: in the row of number `next`, or in
               # extra[-1 - next].
               ("number", np.int64), ("next", np.int64)]  # fmt: skip
        row = np.dtype(row, align=True)
        # extra[:num_envs] are the environments' newest s', the others final observations.
        num_extra = 2 * num_envs + self.num_rows // episode_length
        self.nbytes = self.reserve(row, num_extra)
        if self.folder and len(files := list(self.folder.glob("*.bin"))) == 1:
            files[0].unlink()  # without the other it is worthless: a state must not find the rows alone
        self.rows, self.extra = self.allocate("rows", self.num_rows, row), self.allocate("extra", num_extra, row["obs"])
        self.free = list(range(num_envs, len(self.extra)))  # a heap, so that a restored replay uses the same one
        self.total = 0  # transitions ever added; number i is in slot i % capacity and in row i % num_rows
        self.last = np.full(num_envs, -1)  # number of the environment's newest transition; -1 between episodes
        self.steps = np.zeros(num_envs, np.int64)  # of the running episode; number and rises of the last T of them:
        self.window = np.zeros((num_envs, episode_length), np.int64)
        self.rises = np.zeros((num_envs, episode_length, num_tasks), bool)
        self.members = np.zeros((capacity, num_tasks), bool)  # D^j by slot
        self.counts, self.num_achieving = np.zeros(num_tasks, np.int64), 0  # |D^j| and |D*|
        self.drawn = np.zeros(2, np.int64)  # transitions since the last `metrics`, and those of D* among them
        self.tree = SumTree(capacity, alpha) if kind in ("per", "taper_td") else None
        self.sets = IndexSets(capacity, c, eps, alpha) if self.tree is None else None
        self.alpha = alpha

    def __len__(self):
        return min(self.total, self.capacity)

    @property
    def alpha(self):
        """Exponent of P(k), in [0, 1]. A new value is free, but for per and taper_td, which build the sum tree anew."""
        return (self.tree or self.sets).alpha

    @alpha.setter
    def alpha(self, alpha):
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha {alpha}: it must lie between 0 and 1")
        if self.tree is None:
            self.sets.alpha = alpha
        elif alpha != self.tree.alpha:
            self.tree.rebuild(self.tree.maxima[0][: len(self)], alpha)

    # -- memory --

    def reserve(self, row, num_extra):
        """Says what the replay takes and returns it in bytes; ValueError if that is not free."""
        rows = self.num_rows * row.itemsize + num_extra * row["obs"].itemsize
        index = self.capacity * (self.num_tasks + (17 if self.kind in ("per", "taper_td") else 8))
        index += self.num_envs * self.T * (8 + self.num_tasks)
        need, free = {"of memory": index + (0 if self.folder else rows)}, {"of memory": available_memory()}
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            there = sum(path.stat().st_size for path in self.folder.glob("*.bin"))  # of the run that goes on
            need[f"in {self.folder}"], free[f"in {self.folder}"] = rows, shutil.disk_usage(self.folder).free + there
        said = " and ".join(f"{size / 2**20:,.1f} MiB {place}" for place, size in need.items())
        print(f"replay: {self.capacity:,} transitions take {said}", file=sys.stderr)
        place = max(need, key=lambda place: need[place] / free[place])
        if need[place] > free[place]:
            fit = self.capacity * free[place] // need[place]
            raise ValueError(f"a replay of {self.capacity} transitions takes {said}, but {free[place] / 2**20:,.1f} "
                             f"MiB {place} are free: a capacity of {fit} fits")  # fmt: skip
        return index + rows

    def allocate(self, name, count, dtype):
        """An array of at least `count` rows: the file's, where there is one already."""
        if self.folder is None:
            return np.zeros(count, dtype)
        path = self.folder / f"{name}.bin"
        with open(path, "ab") as file:
            try:  # a full disk is an error here; met by a later write it would kill the process
                os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
            except OSError as error:
                size = f"{count * dtype.itemsize / 2**20:,.1f} MiB"
                raise OSError(error.errno, f"{size}: {error.strerror}", str(path)) from error
        count = path.stat().st_size // dtype.itemsize
        self.maps[name] = np.memmap(path, dtype.base, "r+", shape=(count, *dtype.shape))
        return np.asarray(self.maps[name])  # indexing a memmap itself is slower

    def flush(self):
        """Writes the files to disk: for a checkpoint that is to survive more than the death of the process."""
        for array in self.maps.values():
            array.flush()

    # -- adding --

    def add(self, envs, obs, action, reward, next_obs, beta, next_beta, terminated, truncated):
        """A transition of each of K different environments, arrays (K, ...): reward, beta at s and at s' (K, n);
        next_obs is the true s', also where the episode ends."""
        new = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "beta": beta,
               "next_beta": next_beta, "terminated": terminated, "truncated": truncated}  # fmt: skip
        envs, new = np.asarray(envs), {name: np.asarray(value) for name, value in new.items()}
        self.check(envs, new)
        next_obs, beta, truncated = (new.pop(name) for name in ("next_obs", "beta", "truncated"))
        ended = new["terminated"].astype(bool) | truncated.astype(bool)
        rises = new["next_beta"].astype(bool) & ~beta.astype(bool)

        numbers = np.arange(self.total, self.total + len(envs))
        slots, at = numbers % self.capacity, numbers % self.num_rows
        before = self.last[envs]
        linked = before >= max(0, self.total - self.num_rows)  # that of a slow environment may be gone
        self.rows["next"][before[linked] % self.num_rows] = numbers[linked]
        gone = self.rows["next"][at[numbers >= self.num_rows]]
        for final in -1 - gone[gone < -self.num_envs]:
            heapq.heappush(self.free, int(final))
        rows = np.zeros(len(envs), self.rows.dtype)
        for name, value in (new | {"number": numbers, "next": -1 - envs}).items():
            rows[name] = value
        self.rows[at] = rows
        self.extra[envs], self.last[envs] = next_obs, numbers
        self.total += len(envs)

        old = self.members[slots]
        if old.any():
            self.counts -= old.sum(0)
            self.num_achieving -= int(old.any(1).sum())
            self.members[slots] = False
        if self.sets:
            self.sets.unmark(slots)
        else:
            self.tree.set(slots, self.eps if self.kind == "taper_td" else self.tree.top or self.c)

        place = self.steps[envs] % self.T
        self.window[envs, place], self.rises[envs, place] = numbers, rises
        self.steps[envs] += 1
        if rises.any():
            for env in envs[rises.any(1)]:
                self.mark(env)
        if ended.any():
            self.end_episodes(envs[ended])

    def check(self, envs, new):
        if len(set(envs.tolist())) < len(envs) or not ((envs >= 0) & (envs < self.num_envs)).all():
            raise ValueError(f"environments {envs.tolist()}: they must differ and lie in 0 to {self.num_envs - 1}")
        twins = {"next_obs": "obs", "beta": "next_beta", "truncated": "terminated"}
        for name, value in new.items():
            spec = self.rows.dtype[twins.get(name, name)]
            shape, dtype = spec.shape, spec.base
            if value.shape != (len(envs), *shape):
                raise ValueError(f"{name} has shape {value.shape}: for {len(envs)} environments and {self.num_tasks} "
                                 f"tasks it must be {(len(envs), *shape)}")  # fmt: skip
            if value.dtype != dtype and dtype.kind != "b" and not np.can_cast(value.dtype, dtype, "same_kind"):
                raise ValueError(f"{name} has type {value.dtype}: this replay stores {dtype}")
        finite = np.isfinite(new["reward"])
        if not finite.all():
            k, task = np.argwhere(~finite)[0]
            raise ValueError(f"environment {envs[k]} gave task {task} the reward {new['reward'][k, task]}")
        if not self.continuing and (self.steps[envs] >= self.T).any():
            env = envs[self.steps[envs].argmax()]
            raise ValueError(f"environment {env} is at step {self.steps[env] + 1} of an episode of at most "
                             f"{self.T} steps: truncate it there, or let it be continuing")  # fmt: skip

    def mark(self, env):
        """Takes what led to the achievements in the environment's window into D^j and D*."""
        order = np.arange(max(0, self.steps[env] - self.T), self.steps[env]) % self.T
        prefix, numbers = achieving_prefix(self.rises[env, order], self.reading), self.window[env, order]
        kept = prefix.any(1) & (numbers >= self.total - self.capacity)
        slots, prefix = numbers[kept] % self.capacity, prefix[kept]
        old = self.members[slots]
        entering = slots[~old.any(1)]
        self.members[slots] = old | prefix
        self.counts += (prefix & ~old).sum(0)
        self.num_achieving += len(entering)
        if self.kind == "taper":
            self.sets.mark(entering)
        elif self.kind == "taper_shuffled":
            rest = self.sets.order[self.sets.marked : len(self)]
            self.sets.mark(self.rng.choice(rest, min(len(entering), len(rest)), replace=False))
        elif self.kind == "taper_td":
            self.tree.set(entering, self.tree.top if self.tree.top > self.eps else self.c)

    def end_episodes(self, envs):
        """The environments' newest s' become final observations. `add` calls it at each end; call it for environments
        that start anew for another reason."""
        for env in envs[self.last[envs] >= max(0, self.total - self.num_rows)]:
            if not self.free:  # episodes are shorter than T: more room
                old, count = self.extra, 2 * len(self.extra)
                self.extra = self.allocate("extra", count, self.rows.dtype["obs"])
                self.extra[: len(old)] = old
                self.free = list(range(len(old), count))
            final = heapq.heappop(self.free)
            self.extra[final] = self.extra[env]
            self.rows["next"][self.last[env] % self.num_rows] = -1 - final
        self.last[envs], self.steps[envs] = -1, 0

    # -- sampling --

    def sample(self, batch_size, is_beta=0.0):
        """`batch_size` transitions by P(k), with replacement: a dict of arrays obs, action, reward, next_obs,
        next_beta, terminated, index (for `set_priorities`) and weight, the importance weights (|D| P(k))^-is_beta over
        their maximum."""
        if not 0 < batch_size <= self.capacity:
            raise ValueError(f"batch_size {batch_size}: it must lie between 1 and the capacity of {self.capacity}")
        if self.total == 0:
            raise ValueError(f"a batch of {batch_size} from 0 transitions: add some first")
        slots, probability = (self.tree or self.sets).sample(len(self), batch_size, self.rng)
        numbers = self.total - 1 - (self.total - 1 - slots) % self.capacity
        rows = self.rows.take(numbers % self.num_rows)
        inside, names = rows["next"] < 0, ("obs", "action", "reward", "next_beta", "terminated")
        batch = {name: np.ascontiguousarray(rows[name]) for name in names}
        batch["next_obs"] = self.rows["obs"][rows["next"] % self.num_rows]
        batch["next_obs"][inside] = self.extra[-1 - rows["next"][inside]]
        self.drawn += batch_size, np.count_nonzero(self.members[slots].any(1))
        weight = (probability / probability.min()) ** -is_beta  # |D| cancels
        return batch | {"index": numbers, "weight": weight.astype(np.float32)}

    def set_priorities(self, index, td_errors):
        """New priorities max_j |delta^j| + eps of sampled transitions from their TD errors delta (B, n), which no
        importance weight may have scaled; those that were overwritten since are left out. Only per and taper_td have
        priorities of their own."""
        if self.tree is None:
            return
        if td_errors.shape != (len(index), self.num_tasks) or not np.isfinite(td_errors).all():
            raise ValueError(f"TD errors of shape {td_errors.shape}, {np.isfinite(td_errors).sum()} of them finite: "
                             f"all of {(len(index), self.num_tasks)} must be")  # fmt: skip
        kept = index >= self.total - self.capacity
        slots, priorities = index[kept] % self.capacity, np.abs(td_errors[kept]).max(1).astype(float) + self.eps
        if self.kind == "taper_td":
            priorities[~self.members[slots].any(1)] = self.eps
        self.tree.set(slots, priorities)

    def metrics(self):
        """|D|, |D*| / |D|, D*'s share of what was drawn since the last call, alpha, and |D^j| of each task (0: it was
        not achieved, or not lately)."""
        counts = {f"replay/achieving_{task}": int(count) for task, count in enumerate(self.counts)}
        share, (drawn, achieving) = self.num_achieving / max(1, len(self)), self.drawn.tolist()
        self.drawn[:] = 0
        return {"replay/size": len(self), "replay/achieving_share": share, "replay/alpha": self.alpha,
                "replay/drawn_share": achieving / drawn if drawn else math.nan} | counts  # fmt: skip

    # -- state --

    def signature(self):
        """What a state must agree on with the replay that loads it."""
        names = "kind", "capacity", "num_envs", "num_tasks", "T", "num_rows"
        fields = [f"{name} {getattr(self, name)}" for name in names]
        return ", ".join([*fields, f"obs {self.rows.dtype['obs']}", f"{'in files' if self.folder else 'in memory'}"])

    def state_dict(self):
        """All that the folder's files do not hold, or may not hold any more when it is loaded. Until `slack` further
        transitions are added, no row that the state refers to is written, but for `next` of each environment's newest;
        nor is a final observation, which is free only when its transition's row is overwritten."""
        size, names = len(self), ("total", "alpha", "last", "steps", "window", "rises", "drawn")
        state = {name: getattr(self, name) for name in names} | {"signature": self.signature()}
        state |= {"rng": self.rng.bit_generator.state, "members": self.members[:size]}
        state |= {"newest": as_bytes(self.extra[: self.num_envs])}
        if self.sets:
            state |= {"order": self.sets.order[:size], "marked": self.sets.marked}
        else:
            state |= {"priorities": self.tree.maxima[0][:size]}
        if not self.folder:
            filled = min(self.total, self.num_rows)
            state |= {"rows": as_bytes(self.rows[:filled]), "extra": as_bytes(self.extra)}
        return state

    def load_state_dict(self, state):
        """The replay as it was; ValueError if it had other arguments or the files no longer hold it."""
        if state["signature"] != self.signature():
            raise ValueError(f"the state is of a replay with {state['signature']}; this one has {self.signature()}")
        self.total, self.rng.bit_generator.state = int(state["total"]), state["rng"]
        size, filled = len(self), min(self.total, self.num_rows)
        for name in ("last", "steps", "window", "rises", "drawn"):
            getattr(self, name)[:] = np.asarray(state[name])
        if not self.folder:
            self.rows[:filled] = np.asarray(state["rows"]).view(self.rows.dtype)
            extra = np.asarray(state["extra"]).view(self.extra.dtype)
            self.extra = extra.reshape(-1, *self.extra.shape[1:]).copy()

        expected = np.full(self.num_rows, -1)
        numbers = np.arange(self.total - filled, self.total)
        expected[numbers % self.num_rows] = numbers
        lost = (self.rows["number"] != expected) & (expected >= self.total - size)
        if lost.any():
            slack = self.num_rows - self.capacity
            raise ValueError(f"{self.folder} no longer holds {lost.sum()} of the {size} transitions of this state: its "
                             f"files were removed, or more than {slack} (slack) added after it")  # fmt: skip
        self.rows["next"][self.rows["number"] != expected] = 0  # added after the state: they own no final observation
        newest = np.asarray(state["newest"]).view(self.extra.dtype).reshape(self.extra[: self.num_envs].shape)
        self.extra[: self.num_envs] = newest
        running = np.flatnonzero((self.last >= 0) & (self.last >= self.total - filled))
        self.rows["next"][self.last[running] % self.num_rows] = -1 - running
        used = -1 - self.rows["next"][: self.num_rows]
        self.free = np.setdiff1d(np.arange(self.num_envs, len(self.extra)), used).tolist()

        self.members[:] = False
        self.members[:size] = np.asarray(state["members"])
        self.counts, self.num_achieving = self.members.sum(0), int(self.members.any(1).sum())
        if self.sets:
            self.sets = IndexSets(self.capacity, self.c, self.eps, float(state["alpha"]))
            self.sets.order[:size], self.sets.marked = np.asarray(state["order"]), int(state["marked"])
            self.sets.where[self.sets.order[:size]] = np.arange(size)
        else:
            self.tree = SumTree(self.capacity, 0.0)
            self.tree.rebuild(np.asarray(state["priorities"]), float(state["alpha"]))
