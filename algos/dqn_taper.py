"""Deep Q-learning of many tasks from one stream of experience, with task-prioritized experience replay (TaPER), in a
grid of two rooms.

Method: Kompella, MacGlashan, Wurman, Stone, "A task-prioritized experience replay algorithm for reinforcement
learning", patents US 12,277,194 B2 and JP 7602027 B2 (Sony). It is patented and in force: ask before you use it in a
product. Also double Q-learning (the default), arXiv:1509.06461, and prioritized replay (a baseline), arXiv:1511.05952.

  Train:     python algos/dqn_taper.py --env-id two-rooms-rare --total-timesteps 100000
  Baselines: the same with --replay uniform, per, taper_td (TD errors as priorities) or taper_shuffled (a control)
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: two-rooms-rare by the first command, seeds 1 to 3: all four tasks from all 40 starts, at 60,000 steps and from
then on. benchmark/suites/taper_grid.toml compares the replays. dqn_taper_minigrid.py is the same for MiniGrid,
dqn_taper_crafter.py for Crafter and your own environments with tasks.
Differs from the patent: several environments feed one replay; transitions are marked as soon as the task is achieved,
not at the episode's end; the minibatches of one step are drawn, and their targets computed, before the first is learned
from. Where the patent's formulas are lost, the reading taken stands beside the code.
"""

import ast
import copy
import ctypes
import fcntl
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter, deque
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from itertools import pairwise
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Literal, get_args

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn
from tqdm import tqdm

# ---- 1. Arguments ----------------------------------------------------------------------------------------------------


@dataclass
class Args:
    # run
    exp_name: str = Path(__file__).stem  # folder under run_dir
    seed: int = 1  # all randomness but the evaluation's derives from it
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one, else cpu
    deterministic: bool = False  # only deterministic GPU kernels (a CPU run always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the network; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 20  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 1  # updates between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # environment
    env_id: Literal["two-rooms-rare", "two-rooms-mixed"] = "two-rooms-rare"  # its tasks: see Envs
    num_envs: int = 16  # environments that feed the replay
    num_actors: int = 0  # processes that step them; 0: this one, and the run repeats to the bit
    control: Literal["episodic", "continuing"] = "episodic"  # continuing: no reset after T steps
    episode_length: int = 50  # T: steps of an episode; continuing: of the moving window that leads to an achievement

    # behaviour
    behaviour: Literal["uniform", "eps-greedy"] = "uniform"  # eps-greedy: in the values of a task drawn per episode
    start_e: float = 1.0  # epsilon at the start (eps-greedy only, as the next two)
    end_e: float = 0.05  # epsilon at the end
    exploration_fraction: float = 0.5  # share of total_timesteps from start_e to end_e

    # replay
    replay: Literal["uniform", "per", "taper", "taper_td", "taper_shuffled"] = "taper"  # _td: priorities by TD error
    buffer_size: int = 100_000  # transitions: the capacity
    taper_eps: float = 0.01  # priority of a transition that led to no achievement; that of the others is 1
    taper_reading: Literal["first", "last"] = "last"  # what led to an achievement: all up to a task's first or last one
    taper_alpha_start: float = 0.0  # priority exponent at the start: 0 is uniform
    taper_alpha_end: float = 1.0  # and at the end
    taper_alpha_fraction: float = 0.5  # share of total_timesteps from one to the other
    per_alpha: float = 0.6  # priority exponent of --replay per
    per_beta: float = 0.4  # its importance weights' exponent at the start; 1 at the end

    # algorithm
    total_timesteps: int = 100_000  # environment steps
    num_steps: int = 125  # steps per environment and update: what lies between two rows of the log
    learning_starts: int = 1000  # steps before the first gradient step (at least batch_size)
    train_frequency: int = 4  # steps per gradient step
    batch_size: int = 32  # transitions per gradient step, each of which trains every task
    learning_rate: float = 1e-3  # Adam step size
    gamma: float = 0.9  # discount
    target_network_frequency: int = 1000  # steps between updates of the target network
    tau: float = 1.0  # its step towards the network; 1: a copy
    double_q: bool = True  # the network chooses the next action, the target network values it
    separate_networks: bool = False  # a network per task; else a head per task on a shared torso
    hidden_size: int = 128  # units of the two hidden layers
    max_grad_norm: float = 10.0  # gradient norm limit

    # evaluation
    eval_interval: int = 10  # updates between evaluations; 0: only at the end
    eval_episodes: int = 40  # starts from which each task's greedy policy is evaluated
    eval_seed: int = 10_000  # seeds the starts, the same for every run, task and algorithm
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    num_updates: int = field(init=False)

    def __post_init__(self):
        check_dqn_args(self)


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


def gradient_steps(args, global_step):
    """How many belong to the first `global_step` steps."""
    return max(global_step - max(args.learning_starts, args.batch_size), 0) // args.train_frequency


def check_dqn_args(args):
    """Validates the arguments and derives num_updates. Errors: ValueError."""
    shares = ("start_e", "end_e", "exploration_fraction", "taper_alpha_start", "taper_alpha_end", "per_alpha",
              "taper_alpha_fraction", "per_beta", "gamma", "tau")  # fmt: skip
    limits = dict.fromkeys(shares, (0, 1)) | {"taper_eps": (1e-9, 1), "eval_seed": (0, 2**64 - 1)}
    limits |= dict.fromkeys(("seed", "num_actors", "learning_starts", "eval_interval"), (0, math.inf))
    check_numbers(args, **limits, torch_threads=(0, 1024))
    E, T, P = args.num_envs, args.episode_length, args.num_actors
    if args.buffer_size < E * T:  # an episode of each environment must fit
        raise ValueError(f"--buffer-size {args.buffer_size} is less than num_envs {E} x episode_length {T} = {E * T}")
    if P and E % P:
        raise ValueError(f"--num-actors {P} cannot share --num-envs {E} equally")
    if P and args.behaviour == "eps-greedy":
        raise ValueError("--behaviour eps-greedy acts by the network, which actors do not have: use --num-actors 0")
    first = max(args.learning_starts, args.batch_size) + args.train_frequency
    if args.total_timesteps < first:
        raise ValueError(f"--total-timesteps {args.total_timesteps} ends before the first gradient step, at {first}")
    args.num_updates = -(-args.total_timesteps // (E * args.num_steps))


# ---- 2. Replay: the method, together with its block in `train` -------------------------------------------------------


def achieving_prefix(rises, reading):
    """The transitions of one episode that led to each task's achievement (TaPER, eq. 1).

    rises (T, n) bool: whether beta^j rose from 0 to 1 by that transition, at its s'. Returns (T, n) bool: all up to and
    with the "first" or the "last" rise of task j; none where there is no rise.
    """
    if reading == "last":
        return np.logical_or.accumulate(rises[::-1])[::-1]
    return rises.any(0) & (rises.cumsum(0) - rises == 0)  # none before it


def ramp(progress, start, end, share):
    """From start to end over the first `share` of a run that is at `progress` in [0, 1], in 100 equal steps, because a
    sum tree is built anew for each alpha."""
    return end if progress >= share else start + (end - start) * int(100 * progress / share) / 100


# Lean form of curricula/taper.py:IndexSets
class IndexSets:
    """Slots in two sets: those of `order[:marked]`, D*, have priority 1, the others eps. A slot changes sets by a swap,
    and a draw is O(1) at any alpha. `where` is the inverse of `order`."""

    def __init__(self, capacity, eps):
        self.order, self.where = np.arange(capacity, dtype=np.int32), np.arange(capacity, dtype=np.int32)
        self.marked, self.eps = 0, eps

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

    def sample(self, size, batch_size, alpha, rng):
        """Draws from the slots below `size`, which the first `size` places hold: slots, P(k), (batch_size,)."""
        low, rest = self.eps**alpha, size - self.marked
        total = self.marked + rest * low
        marked = rng.random(batch_size) < self.marked / total
        place = (rng.random(batch_size) * np.where(marked, self.marked, rest)).astype(np.int64)
        slots = self.order[np.where(marked, place, self.marked + place)].astype(np.int64)
        return slots, np.where(marked, 1.0, low) / total


# Lean form of curricula/taper.py:SumTree
class SumTree:
    """Priorities p of slots, drawn in proportion to p^alpha: float64 sums over blocks of 32, each recomputed from the
    level below, so that nothing drifts; the maximum of p likewise. A slot of priority 0 is never drawn."""

    FAN = 32  # numpy's cost is per level: 5 at 10^7 slots, where a binary tree has 24

    def __init__(self, capacity):
        self.sums, self.maxima = [], []
        while capacity > 1 or not self.sums:
            capacity = -(-capacity // self.FAN)
            self.sums.append(np.zeros(capacity * self.FAN))
            self.maxima.append(np.zeros(capacity * self.FAN))

    @property
    def top(self):
        return self.maxima[-1].max()

    def set(self, slots, priorities, alpha):
        self.maxima[0][slots] = priorities
        self.sums[0][slots] = np.power(priorities, alpha)
        for (sums, sums_above), (maxima, maxima_above) in zip(pairwise(self.sums), pairwise(self.maxima)):
            blocks = len(sums) // self.FAN
            slots = slots // self.FAN if len(slots) < blocks else np.arange(blocks)
            sums_above[slots] = sums.reshape(-1, self.FAN)[slots].sum(1)
            maxima_above[slots] = maxima.reshape(-1, self.FAN)[slots].max(1)

    def sample(self, batch_size, rng):
        """A draw from each of batch_size strata of equal mass (Schaul et al. 2016): slots, P(k), (batch_size,). Their
        order is random, so that each part of the batch is a draw from all slots."""
        total = self.sums[-1].sum()
        mass = (rng.permutation(batch_size) + rng.random(batch_size)) * (total / batch_size)
        slots, each = np.zeros(batch_size, np.int64), np.arange(batch_size)
        for level in reversed(self.sums):
            children = level.reshape(-1, self.FAN)[slots]
            until = children.cumsum(1)
            # Rounding can carry mass out of [0, last sum), where the child found might be one of priority 0.
            mass = np.maximum(np.minimum(mass, np.nextafter(until[:, -1], 0)), 0)
            child = (until <= mass[:, None]).sum(1)
            mass -= until[each, child] - children[each, child]
            slots = slots * self.FAN + child
        return slots, self.sums[0][slots] / total


def require_memory(capacity, size):
    """Says what a replay of `capacity` transitions of `size` bytes takes. SystemExit if there is less: on the machine,
    or within the limit of this process's control group."""
    free = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    with suppress(OSError, ValueError):  # no such group; its limit is the word max
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    said = f"{capacity:,} transitions take {capacity * size / 2**20:,.1f} MiB of memory"
    print(f"replay: {said}", file=sys.stderr)
    if capacity * size > free:
        fit = f"{free / 2**20:,.1f} MiB are free: a capacity of {free // size} fits"
        sys.exit(f"error: --buffer-size {capacity}: {said}, but {fit}")


# Lean form of curricula/taper.py:TaskPrioritizedReplay
class TaskPrioritizedReplay:
    """Task-prioritized experience replay (TaPER), with uniform and PER replay as baselines; knows nothing of a learner.

    A FIFO of `capacity` transitions (s, a, r (n), s', beta at s' (n), terminated) of several environments. D^j are
    those that were followed, in their episode or moving window of at most T steps, by a rise of beta^j from 0 to 1, at
    their own s' at the earliest; D* is the union over the n tasks. P(k) = p_k^alpha / sum_m p_m^alpha, where p is

    - uniform: equal for all; per: |delta| + eps, at first the current maximum (Schaul et al. 2016)
    - taper: 1 in D*, else eps; taper_td: |delta| + eps in D*, at first the current maximum, else eps (eq. 3 and 4)
    - taper_shuffled: as taper, but random transitions are marked, as many as enter D*: the control for which ones are
    """

    def __init__(self, capacity, kind, num_envs, num_tasks, obs_shape, obs_dtype, T, eps, reading, rng):
        obs, n = (obs_shape, obs_dtype), (num_tasks,)
        fields = {"obs": obs, "action": ((), np.int64), "reward": (n, np.float32), "next_obs": obs,
                  "next_beta": (n, bool), "terminated": ((), bool)}  # fmt: skip
        self.rows = {name: np.zeros((capacity, *shape), dtype) for name, (shape, dtype) in fields.items()}
        self.capacity, self.total = capacity, 0  # total: ever added, number i of them to slot i % capacity
        self.kind, self.T, self.eps, self.reading, self.rng, self.alpha = kind, T, eps, reading, rng, 0.0
        self.steps = np.zeros(num_envs, np.int64)  # of the running episode; number and rises of the last T of them:
        self.window = np.zeros((num_envs, T), np.int64)
        self.rises = np.zeros((num_envs, T, num_tasks), bool)
        self.members = np.zeros((capacity, num_tasks), bool)  # D^j by slot
        self.drawn = np.zeros(2, np.int64)  # transitions since the last `metrics`, and those of D* among them
        self.sets = IndexSets(capacity, eps)
        self.tree = SumTree(capacity) if kind in ("per", "taper_td") else None

    def __len__(self):
        return min(self.total, self.capacity)

    def set_alpha(self, alpha):
        """The exponent of P(k), in [0, 1]; per and taper_td build their sum tree anew for another one."""
        if self.tree and alpha != self.alpha:
            self.tree.set(np.arange(len(self)), self.tree.maxima[0][: len(self)], alpha)
        self.alpha = alpha

    def add(self, transition):
        """Arrays (K, ...) of K different environments, `envs`: obs, action, reward (K, n), next_obs (the true s', also
        where the episode ends), beta at s and next_beta at s' (K, n), terminated, truncated."""
        envs = transition["envs"]
        numbers = np.arange(self.total, self.total + len(envs))
        slots = numbers % self.capacity
        for name, rows in self.rows.items():
            rows[slots] = transition[name]
        self.total += len(envs)
        self.members[slots] = False
        self.sets.unmark(slots)
        if self.tree:
            self.tree.set(slots, self.eps if self.kind == "taper_td" else self.tree.top or 1.0, self.alpha)

        place, rises = self.steps[envs] % self.T, transition["next_beta"] & ~transition["beta"]
        self.window[envs, place], self.rises[envs, place] = numbers, rises
        self.steps[envs] += 1
        for env in envs[rises.any(1)]:
            self.mark(env)
        self.steps[envs[transition["terminated"] | transition["truncated"]]] = 0

    def mark(self, env):
        """Takes what led to the achievements in the environment's window into D^j and D*."""
        order = np.arange(max(0, self.steps[env] - self.T), self.steps[env]) % self.T
        prefix, numbers = achieving_prefix(self.rises[env, order], self.reading), self.window[env, order]
        kept = prefix.any(1) & (numbers >= self.total - self.capacity)
        slots = numbers[kept] % self.capacity
        entering = slots[~self.members[slots].any(1)]
        self.members[slots] |= prefix[kept]
        if self.kind == "taper":
            self.sets.mark(entering)
        elif self.kind == "taper_shuffled":
            rest = self.sets.order[self.sets.marked : len(self)]
            self.sets.mark(self.rng.choice(rest, min(len(entering), len(rest)), replace=False))
        elif self.kind == "taper_td":
            self.tree.set(entering, self.tree.top if self.tree.top > self.eps else 1.0, self.alpha)

    def sample(self, batch_size, is_beta=0.0):
        """`batch_size` transitions by P(k), with replacement: a dict of arrays, their slots (for `set_priorities`) and
        weight, the importance weights (|D| P(k))^-is_beta over their maximum."""
        if self.tree:
            slots, probability = self.tree.sample(batch_size, self.rng)
        else:
            slots, probability = self.sets.sample(len(self), batch_size, self.alpha, self.rng)
        self.drawn += batch_size, np.count_nonzero(self.members[slots].any(1))
        weight = (probability / probability.min()) ** -is_beta  # |D| cancels
        batch = {name: rows[slots] for name, rows in self.rows.items()}
        return batch | {"slots": slots, "weight": weight.astype(np.float32)}

    def set_priorities(self, slots, td_errors):
        """New priorities max_j |delta^j| + eps of sampled transitions from their TD errors delta (B, n), which no
        importance weight may have scaled."""
        priorities = np.abs(td_errors).max(1).astype(float) + self.eps
        if self.kind == "taper_td":
            priorities[~self.members[slots].any(1)] = self.eps
        self.tree.set(slots, priorities, self.alpha)

    def metrics(self):
        """|D|, |D*| / |D|, D*'s share of what was drawn since the last call, alpha, and |D^j| of each task (0: it was
        not achieved, or not lately)."""
        counts = {f"replay/achieving_{task}": int(count) for task, count in enumerate(self.members.sum(0))}
        share, (drawn, achieving) = self.members.any(1).sum() / max(1, len(self)), self.drawn.tolist()
        self.drawn[:] = 0
        return {"replay/size": len(self), "replay/achieving_share": share, "replay/alpha": self.alpha,
                "replay/drawn_share": achieving / drawn if drawn else math.nan} | counts  # fmt: skip

    def state_dict(self):
        state = {name: getattr(self, name) for name in ("total", "alpha", "steps", "window", "rises", "drawn")}
        state |= {"rng": self.rng.bit_generator.state} | {name: rows[: self.total] for name, rows in self.rows.items()}
        state |= {"members": self.members[: self.total], "order": self.sets.order, "marked": self.sets.marked}
        return state | {"priorities": self.tree.maxima[0][: self.total] if self.tree else None}

    def load_state_dict(self, state):
        """Into a new replay."""
        self.total, self.alpha, self.rng.bit_generator.state = state["total"], state["alpha"], state["rng"]
        for name, rows in self.rows.items():
            rows[: self.total] = np.asarray(state[name])
        for name in ("steps", "window", "rises", "drawn"):
            getattr(self, name)[:] = np.asarray(state[name])
        self.members[: self.total] = np.asarray(state["members"])
        self.sets.order[:], self.sets.marked = np.asarray(state["order"]), state["marked"]
        self.sets.where[self.sets.order] = np.arange(self.capacity)
        if self.tree:
            self.tree.set(np.arange(len(self)), np.asarray(state["priorities"])[: len(self)], self.alpha)


# ---- 3. Environment --------------------------------------------------------------------------------------------------


class Envs:
    """A grid of 9 x 9 cells: a wall at x = 4, whose door at (4, 4) opens to whoever has been on the key at (1, 1).
    Episodes start in a random cell of the left room and end after `limit` steps (None: never); actions: up, down,
    left, right.

    Tasks `rare`: to reach each of four cells behind the door, in 3 to 5 % of random episodes of 100 steps; `mixed`: the
    key (66 %), the door (14 %) and two corners behind it (1 %). The whole of it is tables over (x, y, key).

    reset() -> obs; step(actions) -> obs, reward, terminated, truncated, info, arrays over num_envs. The next episode
    starts in the step that ends one; info["final_obs"] are the true successors of all. info["task_rewards"]
    (num_envs, n) float32 and info["task_terminations"] bool: each task's reward, and whether it ended in the state
    reached, whose rise from 0 to 1 is the achievement; `beta`: those of the state in which the next step starts.
    """

    KEY, DOOR = (1, 1), (4, 4)
    TASKS = {"rare": {f"cell-{x}-{y}": (x, y) for x, y in ((5, 3), (6, 2), (6, 5), (7, 4))},
             "mixed": {"key": KEY, "door": DOOR, "corner-8-0": (8, 0), "corner-8-8": (8, 8)}}  # fmt: skip
    obs_shape, obs_dtype, num_actions, num_tasks = (19,), np.float32, 4, 4  # one-hot x, one-hot y, key
    lost = []  # environments whose unfinished episode a resume could not restore: here none

    def __init__(self, env_id, seeds, limit):
        goals = self.TASKS[env_id.removeprefix("two-rooms-")]
        self.task_names, self.num_envs, self.limit = tuple(goals), len(seeds), limit or 2**62
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        x, y, key = np.unravel_index(np.arange(9 * 9 * 2), (9, 9, 2))
        self.table = np.concatenate([np.eye(9)[x], np.eye(9)[y], key[:, None]], 1, dtype=np.float32)
        holds = [key == 1 if at == self.KEY else (x == at[0]) & (y == at[1]) for at in goals.values()]
        self.holds = np.stack(holds, 1)
        self.next = np.zeros((len(x), 4), np.int64)
        for action, (dx, dy) in enumerate(((0, -1), (0, 1), (-1, 0), (1, 0))):
            to_x, to_y = np.clip(x + dx, 0, 8), np.clip(y + dy, 0, 8)
            blocked = (to_x == 4) & ~((to_y == self.DOOR[1]) & (key == 1))
            to_x, to_y = np.where(blocked, x, to_x), np.where(blocked, y, to_y)
            has_key = key | ((to_x == self.KEY[0]) & (to_y == self.KEY[1]))
            self.next[:, action] = np.ravel_multi_index((to_x, to_y, has_key), (9, 9, 2))
        self.starts = np.flatnonzero((x < 4) & (key == 0) & ~((x == self.KEY[0]) & (y == self.KEY[1])))

    def reset(self):
        self.state, self.steps = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.int64)
        self.beta = np.zeros((self.num_envs, self.num_tasks), bool)
        self.restart(range(self.num_envs))
        return self.obs

    @property
    def obs(self):
        return self.table[self.state]

    def restart(self, envs):
        for i in envs:
            self.state[i], self.steps[i] = self.starts[self.rngs[i].integers(len(self.starts))], 0

    def step(self, actions):
        before, self.state = self.state, self.next[self.state, actions]
        rises = self.holds[self.state] & ~self.holds[before]
        self.steps += 1
        truncated, final_obs = self.steps >= self.limit, self.obs
        self.beta = rises & ~truncated[:, None]
        info = {"task_rewards": rises.astype(np.float32), "task_terminations": rises, "final_obs": final_obs}
        self.restart(np.flatnonzero(truncated))
        reward, terminated = rises.sum(1, dtype=np.float64), np.zeros(self.num_envs, bool)
        return self.obs, reward, terminated, truncated, info

    def state_dict(self):
        rngs = [rng.bit_generator.state for rng in self.rngs]
        return {"state": self.state, "steps": self.steps, "beta": self.beta, "rngs": rngs}

    def load_state_dict(self, state):
        self.state, self.steps, self.beta = (state[name].numpy() for name in ("state", "steps", "beta"))
        for rng, saved in zip(self.rngs, state["rngs"], strict=True):
            rng.bit_generator.state = saved

    def close(self):
        """Nothing is held."""


# ---- 4. Behaviour: actors and their queue ----------------------------------------------------------------------------


class Actor:
    """Steps environments with the behaviour policy: uniformly random actions or, with an agent, epsilon-greedy ones in
    the values of a task that each environment draws for each episode."""

    def __init__(self, envs, rng, agent=None):
        self.envs, self.rng, self.agent, self.every = envs, rng, agent, np.arange(envs.num_envs)
        self.obs = envs.reset()
        self.tasks = rng.integers(envs.num_tasks, size=envs.num_envs)

    def step(self, epsilon=1.0):
        """A transition of each environment, as TaskPrioritizedReplay.add takes them."""
        action = self.rng.integers(self.envs.num_actions, size=len(self.every))
        if self.agent is not None:
            greedy = self.rng.random(len(self.every)) >= epsilon
            action = np.where(greedy, self.agent.act(self.obs, self.tasks), action)
        obs, beta, (self.obs, _, terminated, truncated, info) = self.obs, self.envs.beta, self.envs.step(action)
        ended = terminated | truncated
        if ended.any():
            self.tasks[ended] = self.rng.integers(self.envs.num_tasks, size=ended.sum())
        return {"envs": self.every, "obs": obs, "action": action, "reward": info["task_rewards"],
                "next_obs": info["final_obs"], "beta": beta, "next_beta": info["task_terminations"],
                "terminated": terminated, "truncated": truncated}  # fmt: skip

    def state_dict(self):
        return {"envs": self.envs.state_dict(), "rng": self.rng.bit_generator.state, "tasks": self.tasks}

    def load_state_dict(self, state):
        self.envs.load_state_dict(state["envs"])
        self.rng.bit_generator.state, self.tasks = state["rng"], state["tasks"].numpy()
        self.obs = self.envs.obs.copy()


def actor_process(pipe, memory, chunk, index, env_id, limit, seed):
    """A process of `Actors`: an Actor that fills the chunks whose numbers it receives, and sends the numbers back."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: so it ends with its parent, even if stopped
    try:
        (_, num_envs), (env_seed, action_seed) = chunk.shape, seed.spawn(2)
        actor = Actor(Envs(env_id, env_seed.spawn(num_envs), limit), np.random.default_rng(action_seed))
        actor.every += index * num_envs
        chunks = np.frombuffer(memory, chunk)
        while True:
            number = pipe.recv()
            for row in chunks[number]:
                transition = actor.step()
                for name in row.dtype.names:
                    row[name] = transition[name]
            pipe.send(number)
    except BaseException as error:  # sys.exit of the environment, too: an exit code of 0 is no news for the learner
        code = getattr(error, "code", None)  # of sys.exit
        pipe.send(code.removeprefix("error: ") if isinstance(code, str) else traceback.format_exc()[-8192:])


class Actors:
    """The same as an Actor in processes, each with an equal share of the environments. They act at random, so they do
    not wait for the network. The numbers of an actor's chunks go to it through a pipe when they are free and come back
    when they are full: with none free it waits. One that raises, dies or falls silent is a SystemExit of `step`."""

    CHUNK, CHUNKS, TIMEOUT_S = 16, 4, 60  # steps in a chunk, chunks of an actor, seconds: ten times that to start

    def __init__(self, run, num_envs, transition, env_id, limit, seeds):
        fields = [(name, array.dtype, array.shape[1:]) for name, array in transition.items()]
        chunk = np.dtype((np.dtype(fields, align=True), (self.CHUNK, num_envs // len(seeds))))
        self.check, self.actors, self.rows = run.check_signals, [], deque()
        self.silent, self.looked = np.full(len(seeds), -9.0 * self.TIMEOUT_S), time.monotonic()
        self.waited, self.taken = 0.0, []
        run.callback(self.close)
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of threads in whatever state
        resource_tracker.ensure_running()  # its own start would unblock the signals, which the actors inherit blocked:
        numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP  # what is sent to the whole group is
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # for this process to answer
        for index, seed in enumerate(seeds):
            memory = context.RawArray("B", self.CHUNKS * chunk.itemsize)  # without a name: none stays in /dev/shm
            pipe, remote = context.Pipe()
            args = remote, memory, chunk, index, env_id, limit, seed
            process = context.Process(target=actor_process, args=args, name=f"actor {index}")
            process.start()
            for number in range(self.CHUNKS):
                pipe.send(number)
            self.actors.append((process, pipe, remote, np.frombuffer(memory, chunk)))
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def step(self, epsilon=1.0):
        begun = time.monotonic()
        while not self.rows:  # take what all actors have sent; wait for something
            self.check()
            dead = [process for process, *_ in self.actors if process.exitcode]  # before pipes: it reports, then dies
            connection.wait([pipe for _, pipe, *_ in self.actors], 0.1)
            now, taken = time.monotonic(), 0
            self.silent += min(now - self.looked, 1.0)  # no more at a time: a Ctrl-Z that stops all is no time-out
            self.looked = now
            for index, (_, pipe, _, chunks) in enumerate(self.actors):
                while pipe.poll():  # of one that died, too: its end is open here
                    number = pipe.recv()
                    if isinstance(number, str):
                        sys.exit(f"error: actor {index} failed:\n{number}")
                    self.rows += ({name: row[name] for name in row.dtype.names} for row in chunks[number].copy())
                    pipe.send(number)
                    self.silent[index], taken = 0, taken + 1
            if dead:
                sys.exit(f"error: worker {dead[0].name} (pid {dead[0].pid}) died with exit code {dead[0].exitcode}")
            if self.silent.max() > self.TIMEOUT_S:
                actor = self.actors[self.silent.argmax()][0]
                sys.exit(f"error: {actor.name} (process {actor.pid}) has sent nothing for {self.TIMEOUT_S} s")
            self.taken += [taken] if taken else []
        self.waited += time.monotonic() - begun
        return self.rows.popleft()

    def metrics(self):
        """Since the last call: seconds that the learner waited, and the chunks that it found waiting, on average."""
        row = {"async/learner_wait_s": self.waited, "async/queue_depth": np.mean(self.taken or math.nan)}
        self.waited, self.taken = 0.0, []
        return row

    def close(self):
        for process, *_ in self.actors:
            process.kill()
            process.join()


# ---- 5. Agent and mathematics ----------------------------------------------------------------------------------------


class Agent(nn.Module):
    """Q-values of n tasks: obs (B, *obs_shape) -> (B, n, num_actions). A head per task on a shared torso, or `separate`
    networks: ReLU MLPs with two hidden layers."""

    def __init__(self, obs_shape, num_actions, num_tasks, hidden_size=128, separate=False):
        super().__init__()
        self.shape = num_tasks, num_actions
        heads = num_actions if separate else num_actions * num_tasks
        networks = [self.network(obs_shape, hidden_size, heads) for _ in range(num_tasks if separate else 1)]
        self.networks = nn.ModuleList(networks)

    def network(self, obs_shape, hidden_size, outputs):
        layers = nn.Linear(*obs_shape, hidden_size), nn.ReLU(), nn.Linear(hidden_size, hidden_size), nn.ReLU()
        return nn.Sequential(*layers, nn.Linear(hidden_size, outputs))

    def forward(self, obs):
        q = [network(obs) for network in self.networks]
        return (torch.cat(q, 1) if len(q) > 1 else q[0]).view(-1, *self.shape)

    @torch.no_grad()
    def act(self, obs, tasks):
        """The greedy action of task tasks[i] in obs[i], arrays (B, ...) -> (B,)."""
        q = self(torch.as_tensor(obs).to(next(self.parameters()).device))
        return q[torch.arange(len(q)), torch.as_tensor(tasks)].argmax(-1).cpu().numpy()


def flatten_parameters(module):
    """One parameter that holds all of the module's, which become views of it, as do their gradients: for an optimiser,
    a norm and a copy that are one operation each."""
    parameters = list(module.parameters())
    flat = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach().clone())
    flat.grad = torch.zeros_like(flat)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, values, gradient in zip(parameters, flat.detach().split(sizes), flat.grad.split(sizes)):
        parameter.data, parameter.grad = values.view_as(parameter), gradient.view_as(parameter)
    return flat


def td_targets(rewards, terminations, terminated, q_target, q_chooser, gamma):
    """y^j = r^j + gamma (1 - beta^j)(1 - terminated) Q_target^j(s', argmax_a Q_chooser^j(s', a)): rewards, terminations
    (B, n), terminated (B,), Q-values of s' (B, n, A) -> (B, n).

    The chooser is the network in double Q-learning, else the target network. A task's end is the end for that task
    alone, the environment's for all; a truncation is none.
    """
    next_values = q_target.gather(2, q_chooser.argmax(2, keepdim=True)).squeeze(2)
    return rewards + gamma * next_values * ~(terminations | terminated.unsqueeze(1))


def huber_gradient(q, actions, targets, weights):
    """TD errors (B, n, 1) of the actions taken (B, n, 1), in q (B, n, A), against targets (B, n, 1); and the gradient
    in q of the sum of their Huber losses times weights (B, 1, 1): the errors clipped to +-1 (Mnih et al. 2015)."""
    errors = q.gather(2, actions) - targets
    return errors, torch.zeros_like(q).scatter_(2, actions, errors.clamp(-1, 1).mul_(weights))


def clip_norm(gradient, limit):
    """Scales the vector in place to a norm of at most `limit`; returns the norm that it had."""
    norm = gradient.norm()
    if norm > limit:
        gradient.mul_(limit / norm)
    return norm


# ---- 6. Plumbing: statistics, seeds, the run directory ---------------------------------------------------------------


class TaskStats:
    """Of episodes: return and length by raw rewards; terminated or truncated, or both, end one. Of tasks: achievements,
    and success rates at the evaluations so far, whose means are the areas under the learning curves (auc)."""

    def __init__(self, num_envs, num_tasks):
        self.running, self.finished, self.episodes = np.zeros((num_envs, 2)), [], 0  # running: return, length
        self.achieved, self.history = np.zeros(num_tasks, np.int64), []

    def step(self, transition):
        envs, reward = transition["envs"], transition["reward"].sum(1)
        ended = envs[transition["terminated"] | transition["truncated"]]
        self.running[envs] += np.stack([reward, np.ones(len(envs))], 1)
        self.finished += self.running[ended].tolist()
        self.running[ended] = 0
        self.achieved += (transition["next_beta"] & ~transition["beta"]).sum(0)

    def pop(self):
        """Means over the episodes that finished since the last call, and the number of all."""
        returns, lengths = np.mean(self.finished, axis=0) if self.finished else (math.nan, math.nan)
        self.episodes, self.finished = self.episodes + len(self.finished), []
        return {"charts/episodic_return": returns, "charts/episodic_length": lengths, "charts/episodes": self.episodes}

    def success(self, rows):
        """Means of evaluation rows: over all tasks, by task and of the worst."""
        names = dict.fromkeys(row["task"] for row in rows)
        rates = {name: float(np.mean([row["solved"] for row in rows if row["task"] == name])) for name in names}
        self.history.append(list(rates.values()))
        auc = np.mean(self.history, 0)
        means = {f"{name}_mean": np.mean([row[name] for row in rows]) for name in ("return", "length")}
        means |= {"success_mean": np.mean(self.history[-1]), "success_worst": min(self.history[-1])}
        means |= {"auc_mean": auc.mean(), "auc_worst": auc.min()} | {f"success/{k}": rate for k, rate in rates.items()}
        return {f"eval/{name}": float(value) for name, value in means.items()}

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state | {name: state[name].numpy() for name in ("running", "achieved")})


# Copied from algos/ppo.py:Randomness
class Randomness:
    """Every random stream of a run, from one SeedSequence: nothing draws from a global generator after the networks are
    initialised, so evaluation and logging cannot disturb training."""

    def __init__(self, seed, device):
        model, self.envs, actions, minibatches, self.curriculum = np.random.SeedSequence(seed).spawn(5)
        torch.manual_seed(int(model.generate_state(1)[0]))
        self.actions = torch.Generator(device).manual_seed(int(actions.generate_state(1)[0]))
        self.minibatches = np.random.default_rng(minibatches)

    def state_dict(self):
        return {"actions": self.actions.get_state(), "minibatches": self.minibatches.bit_generator.state}

    def load_state_dict(self, state):
        self.actions.set_state(state["actions"])
        self.minibatches.bit_generator.state = state["minibatches"]


# Copied from algos/ppo.py:pack
def pack(state):
    """A deep copy that torch.load(weights_only=True) reads: arrays as CPU tensors, numpy scalars as Python's."""
    if isinstance(state, dict):
        return {key: pack(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [pack(value) for value in state]
    if isinstance(state, (np.ndarray, torch.Tensor)):
        return torch.as_tensor(state).detach().to("cpu", copy=True)
    return state.item() if isinstance(state, np.generic) else state


# Copied from algos/ppo.py:require_finite
def require_finite(**tensors):
    """SystemExit that names the first tensor with a value that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            sys.exit(f"error: {name} is not finite. The last good checkpoint is kept; lower --learning-rate or rewards")


# Copied from algos/ppo.py:RunLogger
class RunLogger(ExitStack):
    """A run on disk (config.json, code.py, status.json, metrics.jsonl, eval.jsonl, tb/, checkpoints/, result.json).

    Around all of `train`. SIGTERM, SIGUSR1 or SIGHUP end a run at the next `check_signals` (exit 75), Ctrl-C at once
    (exit 130), with a checkpoint of the newest whole update; an error keeps the checkpoints as they are.
    """

    # These do not change what a run computes, so the same folder serves them all.
    UNHASHED = ("seed", "run_dir", "resume", "progress", "track", "wandb_project_name", "wandb_entity", "eval_only",
                "capture_video", "keep_checkpoints", "log_interval")  # fmt: skip
    LOGS = "metrics.jsonl", "eval.jsonl", "tb/events.out.tfevents.0"

    def __init__(self, args):
        super().__init__()
        self.args, self.begun, self.step, self.test = args, time.monotonic(), None, math.nan
        self.signals, self.handlers, self.state, self.wandb, self.host = [], {}, None, None, os.uname().nodename
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
                self.handlers[number] = signal.signal(number, self.stop)
        values = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        script = Path(sys.modules[type(args).__module__].__file__)
        tree = ast.parse(code := script.read_bytes())
        for node in ast.walk(tree):  # comments are gone already, now docstrings
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
                del node.body[0]
        self.config = {key: value for key, value in values.items() if key not in self.UNHASHED}
        self.config["program"] = hashlib.sha256(ast.unparse(tree).encode()).hexdigest()
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()
        names = [re.sub(r"[^\w.-]+|^\.+", "-", name)[:100] for name in (args.exp_name, args.env_id)]
        self.dir = Path(args.run_dir, *names, f"seed{args.seed}-{digest[:8]}")
        result = self.dir / "result.json"
        try:
            self.result = json.loads(result.read_text()) if result.exists() else None
        except ValueError as error:
            sys.exit(f"error: {result} is damaged: {error}. Remove it: the same command then makes it anew")
        if self.result is not None and not args.eval_only:
            return
        try:
            for folder in ("checkpoints", "tb"):
                (self.dir / folder).mkdir(parents=True, exist_ok=True)
            self.lock = open(os.open(self.dir / "lock", os.O_RDWR | os.O_CREAT), "r+")
            fcntl.lockf(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # this process's alone: no child holds it on
            self.lock.truncate(0)
            os.write(self.lock.fileno(), f"pid {os.getpid()} on {self.host}".encode())
        except BlockingIOError:
            sys.exit(f"error: {self.dir} is in use by {self.lock.read()}: wait, or choose another --run-dir")
        except OSError as error:
            sys.exit(f"error: cannot write {self.dir}/lock: {error}. Choose another --run-dir")
        git = {"cwd": script.resolve().parent, "capture_output": True, "text": True}
        self.info = {
            "args": values, "argv": sys.argv, "script_sha256": hashlib.sha256(code).hexdigest(), "host": self.host,
            "git_commit": subprocess.run(["env", "git", "rev-parse", "HEAD"], **git).stdout.strip(),
            "git_dirty": bool(subprocess.run(["env", "git", "status", "--porcelain", script.name], **git).stdout),
        } | {"python": sys.version} | {module.__name__: module.__version__ for module in (torch, np, gym)}  # fmt: skip
        if not args.eval_only:
            self.write("config.json", json.dumps(self.info, indent=1))
            self.write("code.py", code)

    def stop(self, number, frame):
        self.signals.append(number)
        if number == signal.SIGINT:  # one is enough: a second would cut the clean-up short
            signal.signal(number, signal.SIG_IGN)
            raise SystemExit(130)

    def check_signals(self):
        if self.signals:
            raise SystemExit(75)

    def __exit__(self, kind, error, traceback):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stopped = kind is SystemExit and error.code in (75, 130)
        super().__exit__(*([None] * 3 if stopped else [kind, error, traceback]))  # wandb prints what it is given
        if stopped and self.state is not None:
            self.save()
            print(f"{signal.Signals(self.signals[0]).name}: the same command goes on from {self.dir}", file=sys.stderr)
        self.status("finished" if kind is None else "interrupted" if stopped else "failed")
        for number, handler in () if stopped else self.handlers.items():  # a second signal does not cut an exit short
            signal.signal(number, handler)
        if isinstance(error, (OSError, ImportError, MemoryError)) or re.search("(allocate|out of) memory", str(error)):
            sys.exit(f"error: {type(error).__name__}: {error}")
        if kind is SystemExit and not stopped and not isinstance(error.code, str):
            sys.exit("error: the program was ended before its result (by sys.exit in an environment?)")

    def write(self, name, data, append=False):
        """Appends to a file of the run, or replaces it when the new one is safely on disk."""
        path, data = self.dir / name, data.encode() if isinstance(data, str) else data
        written = path if append else self.dir / "half.tmp"  # one name: what a kill leaves does not pile up
        try:
            with open(written, "ab" if append else "wb") as file:
                file.write(data)
                file.flush()
                if not append:
                    os.fsync(file.fileno())
            written.replace(path)
        except OSError as error:
            (self.dir / "half.tmp").unlink(missing_ok=True)
            sys.exit(f"error: cannot write {path}: {error}. What was there before is intact")

    def restore(self, **parts):
        """Loads the newest readable checkpoint into `parts`, whose states checkpoints hold from now on -> its update,
        global_step, row; 0, 0, {} for a new run. What was logged after it is dropped: it will come again."""
        self.parts, paths = parts, sorted((self.dir / "checkpoints").glob("*.pt"), reverse=True)
        state = new = {"logs": {}, "token": os.urandom(8).hex(), "wall_s": 0, "update": 0, "global_step": 0, "row": {}}
        for path in paths:
            try:
                saved = torch.load(path, weights_only=True, map_location="cpu")
                state = {name: saved[name] for name in (*new, *parts)}
                break
            except Exception as error:  # a damaged file can raise anything
                print(f"warning: {path} cannot be read ({type(error).__name__})", file=sys.stderr)
        if state is new and (paths or self.args.resume == "must" or self.args.eval_only):
            sys.exit(f"error: {self.dir} holds no checkpoint to go on from: remove it, or train with --resume auto")
        if state is not new and self.args.resume == "never":
            sys.exit(f"error: --resume never, but {self.dir} holds a run: remove it or choose another --run-dir")
        for name in parts if state is not new else ():
            parts[name].load_state_dict(state[name])
        for path in filter(Path.exists, (self.dir / name for name in self.LOGS if not self.args.eval_only)):
            os.truncate(path, min(state["logs"].get(path.name, 0), path.stat().st_size))
        self.token, self.step, self.resumed = state["token"], state["global_step"], state is not new
        self.time, self.begun = time.monotonic(), self.begun - state["wall_s"]
        if self.args.track:
            try:
                import wandb

                self.wandb = wandb.init(project=self.args.wandb_project_name, entity=self.args.wandb_entity,
                                        id=self.token, resume="allow", config=self.info, name=str(self.dir),
                                        dir=self.dir)  # fmt: skip
            except Exception as error:  # its own kinds are many
                sys.exit(f"error: --track: {' '.join(str(error).split())}")
            self.enter_context(self.wandb).define_metric("*", step_metric="global_step")
        auto = "none" if sys.stderr is None else "bar" if sys.stderr.isatty() else "log"  # None: it was closed
        mode = self.args.progress.replace("auto", auto)
        wait, end = (30, "\n") if mode == "log" else (0.1, "")  # seconds between lines; what ends one
        form = "{n_fmt}/{total_fmt} steps | {rate_fmt} | {desc} | eta {remaining}" + end
        look = {"unit": "", "unit_scale": True, "delay": wait, "mininterval": wait, "disable": mode == "none"}
        self.bar = self.enter_context(tqdm(total=self.args.total_timesteps, initial=self.step, bar_format=form, **look))
        return state["update"], self.step, state["row"]

    def checkpoint(self, update, global_step, row, last=False):
        """At the top of each update: keeps the packed state, and saves it when due. Ends the run if it was told to."""
        logs = {path.name: path.stat().st_size for name in self.LOGS if (path := self.dir / name).exists()}
        state = {"update": update, "global_step": global_step, "row": row, "logs": logs, "token": self.token}
        state |= {"wall_s": time.monotonic() - self.begun} | {name: p.state_dict() for name, p in self.parts.items()}
        self.state = pack(state)
        if last or (update and update % self.args.checkpoint_interval == 0):
            self.save()
        self.check_signals()

    def save(self):
        buffer = io.BytesIO()
        torch.save(self.state, buffer)
        self.write(f"checkpoints/{self.state['global_step']:012d}.pt", buffer.getbuffer())
        for old in sorted((self.dir / "checkpoints").glob("*.pt"))[: -self.args.keep_checkpoints]:
            old.unlink()

    def status(self, state):
        row = {"state": state, "step": self.step, "pid": os.getpid(), "host": self.host, "heartbeat": time.time()}
        if self.step is not None and not self.args.eval_only:  # which leaves the run as it was
            with suppress(OSError):  # a full disk has been reported already, by what matters more
                (self.dir / "status.json").write_text(json.dumps(row))

    def log(self, step, row):
        """One row of metrics.jsonl (not finite: null), TensorBoard and wandb; the progress line; status.json."""
        now = time.monotonic()
        row |= {"charts/SPS": (step - self.step) / (now - self.time)}
        known = {key: float(value) for key, value in row.items() if math.isfinite(value)}
        self.write_rows("metrics.jsonl", step, [{"wall_s": round(now - self.begun, 3)} | dict.fromkeys(row) | known])
        summary = {"value": [{"tag": key, "simple_value": value} for key, value in known.items()]}
        record = io.BytesIO()  # not by SummaryWriter, whose thread meets a full disk with a traceback
        RecordWriter(record).write(Event(wall_time=time.time(), step=step, summary=summary).SerializeToString())
        self.write(self.LOGS[-1], record.getvalue(), append=True)
        if self.wandb is not None:
            self.wandb.log({"global_step": step} | known)
        self.test = known.get("eval/return_mean", self.test)
        self.bar.set_description_str(f"ret {row['charts/episodic_return']:.1f} | test {self.test:.1f}", refresh=False)
        self.bar.update(min(step, self.bar.total) - self.step)
        self.step, self.time = step, now
        self.status("running")

    def write_rows(self, name, step, rows):
        self.write(name, "".join(json.dumps({"global_step": step} | row) + "\n" for row in rows), append=True)

    def log_eval(self, step, rows, prefix="eval"):
        """A row of eval.jsonl for each evaluation episode; their means."""
        self.write_rows("eval.jsonl", step, rows)
        returns, lengths = zip(*((row["return"], row["length"]) for row in rows), strict=True)
        return {f"{prefix}/return_mean": np.mean(returns), f"{prefix}/return_std": np.std(returns),
                f"{prefix}/length_mean": np.mean(lengths)}  # fmt: skip

    def finish(self, update, step, row):
        """The last checkpoint, then result.json: its presence means that the run is complete."""
        self.checkpoint(update, step, row, last=True)
        evals = {key: value for key, value in row.items() if key.startswith("eval")}
        result = {"global_step": step, "wall_s": time.monotonic() - self.begun} | evals
        self.write("result.json", json.dumps(result, indent=1))
        print(f"\nfinished: {self.dir}\n{json.dumps(result)}")
        return result


# ---- 7. Evaluation and training --------------------------------------------------------------------------------------


def evaluate(agent, args, check=lambda: None):
    """Plays each task's greedy policy until that task or the episode ends, from args.eval_episodes starts, the same for
    all tasks and seeded by args.eval_seed alone. Touches no training state; calls check() at each step.

    Returns a row per task and start: the task's return, the length, and whether it was achieved.
    """
    starts, (n, _) = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes), agent.shape
    with closing(Envs(args.env_id, starts * n, args.episode_length)) as envs:
        every, tasks = np.arange(envs.num_envs), np.repeat(np.arange(n), len(starts))
        obs, running, solved = envs.reset(), np.ones(len(every), bool), np.zeros(len(every), bool)
        returns, lengths = np.zeros(len(every)), np.zeros(len(every), int)
        while running.any():
            check()
            before = envs.beta.copy()
            obs, _, terminated, truncated, info = envs.step(np.where(running, agent.act(obs, tasks), -1))
            achieves = (info["task_terminations"] & ~before)[every, tasks] & running
            returns, lengths = returns + info["task_rewards"][every, tasks] * running, lengths + running
            solved, running = solved | achieves, running & ~achieves & ~terminated & ~truncated
        columns = [envs.task_names[task] for task in tasks], returns.tolist(), lengths.tolist(), solved.tolist()
    return [{"split": "eval", **dict(zip(("task", "return", "length", "solved"), row))} for row in zip(*columns)]


def train(args):
    with RunLogger(args) as run:
        # Copied from algos/ppo.py:region(setup)
        if run.result is not None and not args.eval_only:
            print(f"finished before, nothing to do: {run.dir}\n{json.dumps(run.result)}")
            return run.result
        torch.set_num_threads(args.torch_threads or len(os.sched_getaffinity(0)))
        torch.use_deterministic_algorithms(args.deterministic)
        device = torch.device(args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cpu", getattr(torch.accelerator.current_accelerator(True), "type", None)):
            sys.exit(f"error: --device {device}, but torch {torch.__version__} finds none: use --device cpu")
        random = Randomness(args.seed, device)
        # End of copy
        # region: learning
        P, E, B = args.num_actors, args.num_envs, args.batch_size
        limit = args.episode_length if args.control == "episodic" else None
        envs = Envs(args.env_id, random.envs.spawn(1 if P else E), limit)  # with actors, only to know their shapes
        run.enter_context(closing(envs))
        n = envs.num_tasks
        agent = Agent(envs.obs_shape, envs.num_actions, n, args.hidden_size, args.separate_networks).to(device)
        target = copy.deepcopy(agent)
        weights, target_weights = flatten_parameters(agent), flatten_parameters(target)
        optimizer = torch.optim.Adam([weights], args.learning_rate, fused=True)
        stats = TaskStats(E, n)
        parts = {"agent": agent, "target": target, "optimizer": optimizer, "random": random, "stats": stats}
        if args.eval_only:
            _, global_step, _ = run.restore(**parts)
            rows = evaluate(agent, args, run.check_signals)
            run.write_rows("eval.jsonl", global_step, rows)
            means = stats.success(rows)
            print(json.dumps(means))
            return means
        require_memory(args.buffer_size, 2 * np.zeros(envs.obs_shape, envs.obs_dtype).nbytes + 6 * n + 33)
        replay = TaskPrioritizedReplay(args.buffer_size, args.replay, E, n, envs.obs_shape, envs.obs_dtype,
                                       args.episode_length, args.taper_eps, args.taper_reading,
                                       random.minibatches)  # fmt: skip
        alphas = args.taper_alpha_start, args.taper_alpha_end, args.taper_alpha_fraction
        actor = Actor(envs, np.random.default_rng(random.curriculum), agent if args.behaviour == "eps-greedy" else None)
        first_update, global_step, row = run.restore(**parts, replay=replay, **({} if P else {"actor": actor}))
        lost = slice(None) if P else envs.lost  # their episodes start anew: with actors all
        replay.steps[lost], stats.running[lost] = 0, 0
        if P:
            seeds = np.random.SeedSequence([args.seed, global_step]).spawn(P)
            actor = Actors(run, E, actor.step(), args.env_id, limit, seeds)

        for update in range(first_update, args.num_updates):
            run.checkpoint(update, global_step, row)
            laps, learned, progress = [("", time.perf_counter())], [], global_step / args.total_timesteps
            epsilon = ramp(progress, args.start_e, args.end_e, args.exploration_fraction)
            is_beta = ramp(progress, args.per_beta, 1.0, 1.0) if args.replay == "per" else 0.0
            replay.set_alpha(args.per_alpha if args.replay == "per" else ramp(progress, *alphas))
            stop = min((update + 1) * args.num_steps * E, args.total_timesteps)
            while global_step < stop:
                # Collect: a step of all environments, or of those of one actor.
                transition = actor.step(epsilon)
                laps.append(("collect", time.perf_counter()))
                replay.add(transition)
                before, global_step = global_step, global_step + len(transition["envs"])
                stats.step(transition)
                laps.append(("store", time.perf_counter()))

                # ---- TaPER: each minibatch trains all tasks. This block is the method, with TaskPrioritizedReplay ----
                due, minibatches = gradient_steps(args, global_step) - gradient_steps(args, before), ()
                if due:  # all minibatches are drawn at once, their targets computed from the weights as they are now
                    batch = replay.sample(due * B, is_beta)
                    b = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
                    with torch.no_grad():
                        q_target = target(b["next_obs"])
                        q_chooser = agent(b["next_obs"]) if args.double_q else q_target
                        y = td_targets(b["reward"], b["next_beta"], b["terminated"], q_target, q_chooser, args.gamma)
                    b["y"], b["action"] = y.unsqueeze(2), b["action"].view(-1, 1, 1).expand(-1, n, 1)
                    b["weight"] = b["weight"].view(-1, 1, 1) / (B * n)  # the loss is a mean
                    minibatches = zip(*(b[name].split(B) for name in ("obs", "action", "y", "weight", "slots")))
                    laps.append(("sample", time.perf_counter()))
                for obs, action, y, weight, slots in minibatches:
                    q = agent(obs)
                    errors, gradient = huber_gradient(q.detach(), action, y, weight)
                    weights.grad.zero_()
                    q.backward(gradient)
                    grad_norm = clip_norm(weights.grad, args.max_grad_norm)
                    optimizer.step()
                    if args.replay in ("per", "taper_td"):
                        require_finite(td_errors=errors)
                        replay.set_priorities(slots.cpu().numpy(), errors.squeeze(2).cpu().numpy())
                    # ---- end of the method ----
                    learned.append((errors, y, grad_norm))
                laps.append(("update", time.perf_counter()))
                if global_step // args.target_network_frequency > before // args.target_network_frequency:
                    target_weights.data.lerp_(weights.data, args.tau)

            # Log and evaluate.
            last, row, seconds = update + 1 == args.num_updates, {}, Counter()
            for (_, begun), (activity, ended) in pairwise(laps):
                seconds[activity] += ended - begun
            if learned:
                errors, y, grad_norm = (torch.stack(tensors) for tensors in zip(*learned))
                require_finite(td_targets=y, td_errors=errors, gradient=grad_norm, weights=weights)
                loss = nn.functional.huber_loss(errors, torch.zeros_like(errors))
                means = {"td_loss": loss, "td_error": errors.abs(), "q_values": y + errors, "grad_norm": grad_norm}
                row = {f"losses/{name}": tensor.mean().item() for name, tensor in means.items()}
                row["perf/updates_per_s"] = len(learned) / (seconds["update"] + seconds["sample"])
            row |= {"charts/update": update + 1, "charts/epsilon": epsilon, "losses/gradient_steps": len(learned),
                    "charts/learning_rate": args.learning_rate} | replay.metrics()  # fmt: skip
            row |= {f"tasks/{name}/achieved": count for name, count in zip(envs.task_names, stats.achieved)}
            row |= actor.metrics() if P else {}
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                rows = evaluate(agent, args, run.check_signals)
                run.write_rows("eval.jsonl", global_step, rows)
                row |= stats.success(rows)
                seconds["eval"] = time.perf_counter() - ended
            row |= {f"perf/{activity}_s": spent for activity, spent in seconds.items()}
            if last or (update + 1) % args.log_interval == 0:
                run.log(global_step, stats.pop() | row)
        if never := [name for name, count in zip(envs.task_names, stats.achieved) if count == 0]:
            print(f"note: the behaviour never achieved {', '.join(never)}", file=sys.stderr)
        # endregion: learning
        return run.finish(args.num_updates, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
