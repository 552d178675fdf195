"""PPO with prioritized level replay (PLR, robust PLR) on Procgen and MiniGrid levels.

Papers: Jiang et al. 2021, arXiv:2010.03934 (PLR); Jiang et al. 2021, arXiv:2110.02439 (robust PLR);
Schulman et al. 2017, arXiv:1707.06347 (PPO). Settings: PLR, table 3 (Procgen easy, 200 levels).

  Train:     python algos/ppo_plr.py --env-id bigfish --network nature --total-timesteps 200000
  Baseline:  the same with --curriculum dr (levels drawn uniformly)
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: bigfish, nature, 1M steps, seeds 1 to 3: 1.03 on unseen levels (dr: 1.00), a random policy's level: 4 %
of the paper's steps show nothing yet (commit 87f4e2c, README).
Differs from the paper: a level is drawn one episode ahead, so that no environment waits for the curriculum; ranks are
among seen levels; a one-step TD error is |r + gamma V' - V|; the first levels are drawn, not taken in order; robust PLR
decides per episode, not per rollout. As there, a Procgen time-out counts as a death: the game shows no last frame.
Held-out levels lie outside the training range, yet on coinrun, maze and ninja some equal a training level all the same
(openai/procgen#100).
"""

import atexit
import ctypes
import difflib
import fcntl
import functools
import hashlib
import importlib.util
import json
import math
import multiprocessing
import operator
import os
import platform
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.heap import Arena
from multiprocessing.reduction import DupFd
from pathlib import Path
from threading import Lock
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from sortedcontainers import SortedList
from torch import nn
from tqdm import tqdm

# ---- 1. Arguments ----------------------------------------------------------------------------------------------------


@dataclass
class Args:
    # run
    exp_name: str = "ppo_plr"  # folder under run_dir
    seed: int = 1  # all randomness but the evaluation's derives from it
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one, else cpu
    deterministic: bool = False  # only deterministic GPU kernels (a CPU run always repeats to the bit)
    torch_threads: int = 0  # CPU threads for the network; 0: all cores. The count may change rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of the other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 5  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 1  # updates between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # environment
    env_id: str = "bigfish"  # one of Procgen's 16 games, or MiniGrid-... (its seeds are the levels)
    distribution_mode: Literal["easy", "hard"] = "easy"  # Procgen's difficulty
    num_levels: int = 200  # training levels
    start_level: int = 0  # first training level
    num_envs: int = 64  # parallel environments
    num_workers: int = 0  # processes that step them; 0: this process. Both give the same metrics to the bit
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return, clip to +-10
    reward_gamma: float = 0.99  # discount of that return (the paper's code leaves it apart from gamma)

    # curriculum
    curriculum: Literal["plr", "robust_plr", "dr"] = "plr"  # dr: uniform; robust_plr: unseen levels give no gradient
    plr_score: str = "value_l1"  # how much there is to learn on a level; a wrong name lists all 13
    plr_score_transform: str = "rank"  # score -> replay weight; a wrong name lists all 8
    plr_temperature: float = 0.1  # beta: weight ** (1 / beta)
    plr_staleness_coef: float = 0.1  # rho in the paper: share of the draws by staleness
    plr_replay_schedule: Literal["proportionate", "fixed"] = "proportionate"  # P(replay): share seen, plr_replay_prob
    plr_replay_prob: float = 0.5  # P(replay) under the fixed schedule
    plr_rho: float = 1.0  # share of levels to be seen before any replay (1: the released code; 0: the paper's text)
    plr_alpha: float = 1.0  # step size of a level's score

    # algorithm
    total_timesteps: int = 25_000_000  # environment steps, rounded up to whole updates
    network: Literal["impala", "nature"] = "impala"  # the paper's ResNet, or the small CNN that 2 CPU cores can train
    learning_rate: float = 5e-4  # Adam step size
    anneal_lr: bool = False  # linearly to 0 at total_timesteps (which early updates then depend on)
    num_steps: int = 256  # steps per environment and update
    gamma: float = 0.999  # discount
    gae_lambda: float = 0.95  # GAE trace decay
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 3  # passes over each rollout
    micro_batch_size: int = 512  # samples per forward pass on a CPU: gradients add up to the minibatch's
    norm_adv: bool = True  # normalise advantages over the whole batch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = True  # clip the value loss by the same epsilon
    ent_coef: float = 0.01  # entropy bonus
    vf_coef: float = 0.5  # value loss weight
    max_grad_norm: float = 0.5  # gradient norm limit
    target_kl: float | None = None  # ends the update after the first minibatch whose KL exceeds it

    # evaluation
    eval_interval: int = 5  # updates between evaluations on held-out and on training levels; 0: only at the end
    eval_episodes: int = 20  # episodes per evaluation and split
    final_eval_episodes: int = 200  # episodes per split of the evaluation at the end
    eval_seed: int = 10_000  # seeds the evaluation's levels and actions, the same for every run and algorithm
    eval_greedy: bool = False  # evaluate the most likely action (--no-eval-greedy: sample, as the paper does)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    batch_size: int = field(init=False)
    num_updates: int = field(init=False)

    def __post_init__(self):
        check_args(self)
        env_spec(self.env_id)
        at_least = {"num_levels": 1, "start_level": 0, "num_workers": 0}
        for name, low in (at_least | {"micro_batch_size": 1, "final_eval_episodes": 1}).items():
            if getattr(self, name) < low:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: it must be at least {low}")
        if self.start_level + self.num_levels >= 2**31 - 1:
            raise ValueError(
                f"--start-level {self.start_level} + --num-levels {self.num_levels}: levels end at 2^31 - 2"
            )
        if self.num_workers > self.num_envs:
            raise ValueError(f"--num-workers {self.num_workers} for --num-envs {self.num_envs}: at most one a worker")
        if not 0 <= self.reward_gamma < 1:
            raise ValueError(f"--reward-gamma {self.reward_gamma}: it must be at least 0 and below 1")
        if self.curriculum != "dr" and self.num_levels > 10**7:
            raise ValueError(f"--num-levels {self.num_levels}: PLR keeps a score a level, for 10^7 at most; or dr")
        make_plr(self, num_levels=1)  # checks its own arguments, also those that dr does not use


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, limits):
    """ValueError that names the first argument outside its limits, {name: (low, high)}, or not finite. None passes."""
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be a number {allowed}")


# Copied from algos/ppo.py:check_args
def check_args(args):
    """Validates the arguments that PPO scripts share and derives batch_size and num_updates. Errors: ValueError."""
    from_0 = "learning_rate", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "target_kl", "seed", "eval_interval"
    from_1 = ("num_envs", "num_steps", "num_minibatches", "update_epochs", "total_timesteps", "eval_episodes",
              "checkpoint_interval", "keep_checkpoints", "log_interval")  # fmt: skip
    limits = dict.fromkeys(from_0, (0, math.inf)) | dict.fromkeys(from_1, (1, math.inf))
    limits |= {"gamma": (0, 1), "gae_lambda": (0, 1), "eval_seed": (0, 2**64 - 1), "torch_threads": (0, 1024)}
    check_numbers(args, limits)
    args.batch_size = args.num_envs * args.num_steps
    args.num_updates = -(-args.total_timesteps // args.batch_size)
    shape = f"num_envs {args.num_envs} x num_steps {args.num_steps} = {args.batch_size}"
    if args.total_timesteps < args.batch_size:
        raise ValueError(f"--total-timesteps {args.total_timesteps} is less than one rollout, {shape}: ask for more")
    if args.batch_size % args.num_minibatches:
        best = min((n for n in range(1, args.batch_size + 1) if args.batch_size % n == 0),
                   key=lambda n: abs(n - args.num_minibatches))  # fmt: skip
        raise ValueError(f"--num-minibatches {args.num_minibatches} does not divide {shape}: try {best}")
    if args.norm_adv and args.batch_size == args.num_minibatches:
        raise ValueError(f"--num-minibatches {args.num_minibatches} leaves 1 sample a minibatch of {shape}, and the "
                         "deviation of 1 advantage is undefined: use fewer minibatches or --no-norm-adv")  # fmt: skip


# ---- 2. Curricula ----------------------------------------------------------------------------------------------------


# Copied from curricula/core.py:Curriculum
class Curriculum:
    """Chooses tasks. It sees encodings (elements of `task_space`), never decoded tasks.

    `task_space` is a TaskSpace or, for tasks 0..n-1, the number n. `seed` is anything that numpy's default_rng takes.
    A subclass overrides `_sample_distribution` or `sample`, and those update hooks that it needs; the others ignore
    their arguments.
    """

    requires_step_updates = False  # True: the environments must send every step, not only finished episodes
    requires_observations = False  # True: with the observations

    def __init__(self, task_space, *, seed=None):
        if not isinstance(task_space, (int, np.integer)) and not hasattr(task_space, "num_tasks"):
            raise ValueError(f"task_space={task_space!r}: must be a number or a TaskSpace (made of a list, a space)")
        self.task_space = task_space
        self.num_tasks = int(task_space) if isinstance(task_space, (int, np.integer)) else task_space.num_tasks
        if self.num_tasks is not None and self.num_tasks < 1:
            raise ValueError(f"task space {task_space!r} holds no task: at least 1 is needed")
        self.rng = np.random.default_rng(seed)

    def sample(self, k=1):
        """Draws k task encodings, a list."""
        return [self._encoding(i) for i in self.rng.choice(self.num_tasks, size=k, p=self._sample_distribution())]

    def _sample_distribution(self):
        """Probability of each task at the next draw: float64 (num_tasks,), sums to 1."""
        raise NotImplementedError(f"{type(self).__name__} has no distribution over single tasks")

    def _index(self, task):
        """The position 0..num_tasks-1 of an encoding."""
        if hasattr(self.task_space, "index"):
            return self.task_space.index(task)
        if not 0 <= task < self.num_tasks or int(task) != task:
            raise ValueError(f"task {task!r} is outside the space of {self.num_tasks} tasks 0..{self.num_tasks - 1}")
        return int(task)

    def _encoding(self, index):
        """The encoding at a position: the inverse of `_index`."""
        return self.task_space.encoding(index) if hasattr(self.task_space, "encoding") else int(index)

    def available(self):
        """How many tasks `sample` can give now. Environments wait while it is 0."""
        return np.inf

    def update_on_draw(self, tasks, env_ids):
        """`sample` has just drawn `tasks`, for one environment, or one with several agents: `env_ids`."""

    def update_on_end(self, env_ids, waiting):
        """The task underway there is over, reported or not: the environment was perhaps reset, or its process killed.

        What is kept of it must go. `waiting` tasks, the last ones drawn for the environment, are still to be played.
        """

    def update_task_progress(self, task, progress, env_id=None):
        """One measurement of `task`'s progress in [0, 1]."""

    def update_on_step(self, task, obs, reward, terminated, truncated, info, progress, env_id=None):
        """One environment step. Called only if `requires_step_updates`."""

    def update_on_step_batch(self, steps, env_id=None):
        """Several steps of one environment in order; each a tuple of `update_on_step`'s arguments up to progress."""
        for step in steps:
            self.update_on_step(*step, env_id=env_id)

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        """One finished episode: undiscounted return, length in steps."""

    def update_on_demand(self, metrics):
        """Whatever the learner chooses to tell (a dict)."""

    def state_dict(self):
        """All that the next draw depends on: arrays and plain Python."""
        return {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        """ValueError if the state is another one's: build the same curriculum, then load."""
        try:
            self._load(state)
        except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"this state does not fit the {type(self).__name__}: {reason}") from error

    def _load(self, state):
        """A subclass loads its part here."""
        self.rng.bit_generator.state = state["rng"]

    def metrics(self):
        """Figures to log, dict[str, float]."""
        return {}


# Copied from curricula/domain_randomization.py:DomainRandomization
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


# Copied from curricula/plr.py:rollout_advantages
def rollout_advantages(rewards, values, next_values, dones, terminated, gamma, gae_lambda):
    """GAE (Schulman et al. 2016, eq. 16), all (T, N): sums end at `dones`, `terminated` steps have no successor."""
    advantages = rewards + gamma * ~terminated * next_values - values
    decay = gamma * gae_lambda * ~dones
    for t in reversed(range(len(advantages) - 1)):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages


# Copied from curricula/plr.py:level_scores
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


# Copied from curricula/plr.py:replay_weights
def replay_weights(transform, x, seen, temperature, epsilon=0.0, offset=0.0):
    """Distribution over the levels that `seen` marks, (L,) float64; all 0 where these have no mass.

    Ranks are among seen levels; of equal ones the lowest index comes first.
    """
    weights, num_levels, x = np.zeros(len(x)), len(x), x[seen]
    if not len(x):
        return weights
    if transform in ("match", "match_rank"):
        x = x * (1 - x)
    mass = np.ones(len(x))
    if transform in ("rank", "match_rank"):
        mass[np.argsort(-x, kind="stable")] = np.arange(1.0, len(x) + 1) ** (-1 / temperature)
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


# Copied from curricula/plr.py:PrioritizedLevelReplay
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
            return self._ranked[self._pick(self._rank_sums[: len(self._ranked)])][1]
        if self._sums is None:
            self._sums = np.cumsum(self._score_weights())
        return self._pick(self._sums)

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


# ---- 3. Queue --------------------------------------------------------------------------------------------------------


# Copied from curricula/sync.py:SyncQueue
class SyncQueue:
    """Tasks to and finished episodes from `num_envs` environments, in shared memory. Build it in the learner's process.

    Each environment has a ring of `prefetch` task encodings and a ring of `capacity` episode records. Nothing is
    dropped: a full ring holds up its producer, an empty one its consumer, for `timeout` seconds at most. A worker gets
    the queue as an argument of its Process, under any start method, and reports its errors to it.
    No locks, which a killed process could hold: a ring has one writer and one reader, each with an aligned int64 that
    it alone counts up, after the payload. x86-64 keeps that order by itself, `_fence` enforces it elsewhere. The memory
    is a file without a name: nothing stays in /dev/shm, however the processes end.
    """

    def __init__(self, num_envs, *, task_shape=(), task_dtype=np.int64, prefetch=2, capacity=64, timeout=60.0):
        if not all(x > 0 for x in (num_envs, prefetch, capacity, timeout)):
            found = f"num_envs={num_envs}, prefetch={prefetch}, capacity={capacity}, timeout={timeout}"
            raise ValueError(f"a SyncQueue needs sizes and a timeout above 0, found {found}")
        record = [("env_id", "i8"), ("task", task_dtype, task_shape), ("episode_return", "f8"), ("length", "i8")]
        record = np.dtype([*record, ("progress", "f8")], align=True)
        rings = [("tasks", record["task"].base, (prefetch, *record["task"].shape)), ("records", record, (capacity,))]
        counters = [(name, "i8") for name in ("put", "got", "sent", "drained", "closed")]
        dtype = np.dtype([*counters, *rings, ("failed_at", "f8"), ("error", "S8192")], align=True)
        self._attach(num_envs, timeout, os.getpid(), dtype, Arena(num_envs * dtype.itemsize))

    def _attach(self, num_envs, timeout, learner, dtype, arena):
        self.num_envs, self.timeout, self._learner, self._arena, self._watched = num_envs, timeout, learner, arena, ()
        self._envs = np.frombuffer(arena.buffer, dtype, count=num_envs)

    def __getstate__(self):
        return self.num_envs, self.timeout, self._learner, self._envs.dtype, self._arena.size, DupFd(self._arena.fd)

    def __setstate__(self, state):
        *settings, size, fd = state
        self._attach(*settings, Arena(size, fd.detach()))

    def put_task(self, env_id, encoding):
        """Learner: appends a task to an environment's ring; waits while it is full."""
        self._append(env_id, "tasks", "put", "got", self._checked(encoding), "the environment has taken no task")

    def get_task(self, env_id):
        """Worker: the next task encoding, a number or an array of `task_shape`; waits for it."""
        tasks, put, got = (self._envs[name] for name in ("tasks", "put", "got"))
        self._wait(env_id, lambda: put[env_id] > got[env_id], "the learner has put no task")
        task = tasks[env_id, got[env_id] % tasks.shape[1]].copy()
        self._fence()
        got[env_id] += 1
        return task if task.shape else task.item()

    def tasks_waiting(self, env_id):
        self._check_env(env_id)
        return int(self._envs["put"][env_id] - self._envs["got"][env_id])

    def put_episode(self, env_id, task, episode_return, length, progress):
        """Worker: appends the record of a finished episode; waits while the ring is full."""
        record = (env_id, self._checked(task), episode_return, length, progress)
        self._append(env_id, "records", "sent", "drained", record, "the learner has drained no record")

    def drain(self):
        """Learner: all waiting records, a structured array (k,), k >= 0, by environment and in order of arrival."""
        self.check()
        sent = self._envs["sent"].copy()
        self._fence()
        records = self._between("records", self._envs["drained"], sent)
        self._fence()
        self._envs["drained"] = sent
        return records

    def report_error(self, env_id, traceback_text):
        """Worker: the learner's next look at the queue will raise this text (its last 8 KiB)."""
        self._check_env(env_id)
        text, cut = traceback_text.encode(errors="backslashreplace"), b"[the beginning is cut off]\n"
        self._envs["error"][env_id] = text if len(text) <= 8192 else cut + text[len(cut) - 8192 :]
        self._fence()
        self._envs["failed_at"][env_id] = time.time()

    def watch(self, processes):
        """Learner: the worker Processes; that one of them ends with an exit code but 0 is an error from now on."""
        self._watched = tuple(processes)

    def check(self):
        """Learner: RuntimeError with the first error that a worker reported, or else with a dead worker's exit code."""
        dead = [process for process in self._watched if process.exitcode]  # before errors: a worker reports, then dies
        failed_at = self._envs["failed_at"]
        if failed_at.any():
            env_id = np.where(failed_at > 0, failed_at, np.inf).argmin()
            raise RuntimeError(f"environment {env_id} failed:\n{self._envs['error'][env_id].decode(errors='replace')}")
        if dead:
            raise RuntimeError(f"worker {dead[0].name} (pid {dead[0].pid}) died with exit code {dead[0].exitcode}")

    def close(self):
        """From now on a worker that waits, or comes for a task or with an episode, gets an EOFError."""
        self._envs["closed"] = 1

    def state_dict(self):
        """The tasks waiting in the rings, by environment. All records are drained, and the environments stand still."""
        if count := int((self._envs["sent"] - self._envs["drained"]).sum()):
            raise RuntimeError(f"{count} episode records wait in the queue: drain() them, then save its state")
        put, got = self._envs["put"], self._envs["got"]
        return {"waiting": put - got, "tasks": self._between("tasks", got, put)}

    def load_state_dict(self, state):
        """Into a new queue."""
        waiting, tasks = np.asarray(state["waiting"]), np.asarray(state["tasks"])
        if self._envs["put"].any() or len(waiting) != self.num_envs or waiting.max() > self._envs["tasks"].shape[1]:
            raise ValueError(f"{waiting} waiting tasks need a new queue: that many rings, prefetch >= {waiting.max()}")
        for env_id, task in zip(np.repeat(np.arange(self.num_envs), waiting), tasks, strict=True):
            self.put_task(env_id, task)

    def _checked(self, encoding):
        task, ring = np.asarray(encoding), self._envs["tasks"]
        fits = task.shape == ring.shape[2:] and np.can_cast(task.dtype, ring.dtype, "same_kind")
        if fits and task.dtype != ring.dtype:  # of other kinds every value must stay, of floats all but the last digits
            with np.errstate(over="ignore"):
                given, task = task, task.astype(ring.dtype)
            fits = (np.isfinite(task) == np.isfinite(given) if given.dtype.kind in "fc" else task == given).all()
        if not fits:
            raise ValueError(f"task {encoding!r} is not an encoding of shape {ring.shape[2:]}, dtype {ring.dtype}")
        return task

    def _check_env(self, env_id):
        if not 0 <= env_id < self.num_envs:  # -1 would be the last
            raise IndexError(f"environment {env_id} is not in 0..{self.num_envs - 1}")

    def _append(self, env_id, ring, head, tail, entry, stuck):
        ring, head, tail = (self._envs[name] for name in (ring, head, tail))
        size = ring.shape[1]
        self._wait(env_id, lambda: head[env_id] - tail[env_id] < size, f"{stuck}, its ring of {size} is full,")
        ring[env_id, head[env_id] % size] = entry
        self._fence()
        head[env_id] += 1

    def _between(self, ring, start, stop):
        """Copies of the entries start[i]:stop[i] of each environment's ring."""
        ring, count = self._envs[ring], stop - start
        place = np.arange(count.sum()) + np.repeat(stop - count.cumsum(), count)
        return ring[np.repeat(np.arange(self.num_envs), count), place % ring.shape[1]]

    def _wait(self, env_id, ready, stuck):
        """Until `ready()`: a short spin, then naps of up to 1 ms. Raises if the other side fails, dies or closes."""
        self._check_env(env_id)
        start, naps = time.monotonic(), 0
        while self._envs["closed"][env_id] or not ready():
            waited = time.monotonic() - start
            if self._envs["closed"][env_id]:
                raise EOFError(f"environment {env_id}: the learner closed the queue")
            if waited > self.timeout:
                since = time.strftime("%H:%M:%S", time.localtime(time.time() - waited))
                raise TimeoutError(f"environment {env_id}: {stuck} for {waited:.1f} s (since {since})")
            if naps % 20 == 0 and os.getpid() == self._learner:
                self.check()
            # a fork server's child never has the learner as its parent; a zombie has no exe
            elif naps % 20 == 0 and os.getppid() != self._learner and not os.path.exists(f"/proc/{self._learner}/exe"):
                raise RuntimeError(f"environment {env_id}: the learner (pid {self._learner}) died")
            time.sleep(min(naps // 20 * 5e-5, 1e-3))
            naps += 1
        self._fence()

    @staticmethod
    def _fence():
        """Memory accesses before it stay before those after it: a lock's release, then its acquisition."""
        lock = Lock()
        lock.acquire()
        lock.release()
        lock.acquire()


# ---- 4. Environments -------------------------------------------------------------------------------------------------


# Copied from algos/ppo.py:RunError
class RunError(SystemExit):
    """Ends the program with one line on stderr and exit code 1."""

    def __init__(self, message):
        super().__init__(f"error: {message}")


# Copied from algos/ppo.py:nearest
def nearest(name, known):
    """The three known names most like `name`, for error messages."""
    by_lower = {k.lower(): k for k in known}
    return ", ".join(by_lower[k] for k in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.3)) or "none"


PROCGEN_GAMES = ("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist",
                 "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot")  # fmt: skip


def env_spec(env_id):
    """Observation shape and number of actions; loads no game. ValueError for an unknown id or a missing package."""
    package, pip, known = "procgen", "--no-deps procgen-mirror==0.10.7 gym3==0.3.3", PROCGEN_GAMES
    if env_id.startswith("MiniGrid-"):
        package, pip, known = "minigrid", "minigrid==3.2.0", gym.registry
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"--env-id {env_id} needs {package}: pip install {pip}")
    if package == "minigrid":
        importlib.import_module(package)  # registers its ids
    if env_id not in known:
        raise ValueError(f"--env-id {env_id}: no such Procgen game or MiniGrid id. Nearest: {nearest(env_id, known)}")
    if package == "procgen":
        return (64, 64, 3), 15
    env = gym.make(env_id)
    return env.observation_space["image"].shape, int(env.action_space.n)


class ProcgenLevels:
    """`num` slots of one Procgen game, with any level at any episode: set_level(i, level) makes obs[i] its first frame.

    step(actions (num,)) -> obs uint8, reward float32, terminated, truncated. obs (num, 64, 64, 3) is live. A slot that
    ended waits for set_level; solved[i] tells whether it reached its goal. `at`: the slot worked on, for messages.
    Stock Procgen fixes its levels when it is made, so the saved state of a level's first frame is written over the
    slot. Each episode is, to the bit, the first one of a fresh game with start_level=level, num_levels=1. Procgen
    resets inside `act`: the last frame is never seen, a time-out looks like a death. Both count as terminated.
    """

    def __init__(self, game, num, distribution_mode="easy", cached_levels=1700):
        for name in ("gym3", "procgen"):  # bare packages: their __init__ would import the old gym, and imageio
            if name not in sys.modules:
                sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
        vars(sys.modules["gym3"]).setdefault("ToBaselinesVecEnv", object)  # base of a class that nobody uses
        from procgen.env import ProcgenGym3Env

        options = {"distribution_mode": distribution_mode, "start_level": 123456789, "num_levels": 1, "rand_seed": 0}
        threads = 0 if multiprocessing.parent_process() else 2  # workers are parallel as they are
        self.env = ProcgenGym3Env(num=num, env_name=game, num_threads=threads, **options)
        scratch = ProcgenGym3Env(num=1, env_name=game, num_threads=0, **options)
        self.env._reuse_arrays = True  # observe() then returns the very buffers that the game writes
        self.reward, obs, self.ended = self.env.observe()
        self.obs, self.solved, self.at = obs["rgb"], self.env._info["prev_level_complete"], 0
        blank = bytearray(scratch.get_state()[0])
        level_range = blank.index(struct.pack("<ii", 123456789, 123456790))

        @functools.lru_cache(cached_levels)  # 22-40 kB each: 64 MB
        def first_state(level):  # always from the one blank state: what was played before has no say
            struct.pack_into("<ii", blank, level_range, level, level + 1)
            scratch.set_state([bytes(blank)])
            scratch.act(np.array([-1]))  # a forced reset
            return scratch.get_state()[0]

        self.first_state, self.scratch = first_state, scratch

    def set_level(self, i, level):
        state = self.first_state(int(level))
        self.env.call_c_func("set_state", i, state, len(state))  # also rewrites obs[i], reward[i], solved[i]

    def step(self, actions):
        self.env.act(actions)
        self.env.observe()  # waits for the game's threads
        return self.obs, self.reward.copy(), self.ended.copy(), np.zeros_like(self.ended)

    def get_state(self):
        return [np.frombuffer(bytearray(state), np.uint8) for state in self.env.get_state()]

    def set_state(self, states):
        self.env.set_state([np.asarray(state).tobytes() for state in states])

    def close(self):  # by hand: a game that the cyclic garbage collector frees can hang in a lock of cffi
        self.env.close()
        self.scratch.close()


class MiniGridLevels:
    """The same for MiniGrid: a level is the seed of `reset`, the state of a slot its level and the actions since. obs
    is the egocentric image; direction and mission are left out, so Fetch, GoToDoor and the like hide their goal."""

    def __init__(self, env_id, num, distribution_mode=None):
        self.envs = [gym.make(f"minigrid:{env_id}", disable_env_checker=True) for _ in range(num)]
        self.obs = np.zeros((num, *self.envs[0].observation_space["image"].shape), np.uint8)
        self.history, self.at = [[] for _ in range(num)], 0

    def set_level(self, i, level):
        self.history[i] = [int(level)]
        self.obs[i] = self.envs[i].reset(seed=int(level))[0]["image"]

    def play(self, i, action):
        self.at = i
        self.history[i].append(action)
        frame, *outcome, _ = self.envs[i].step(action)
        self.obs[i] = frame["image"]
        return outcome

    def step(self, actions):
        outcomes = zip(*(self.play(i, action) for i, action in enumerate(actions.tolist())))
        reward, terminated, truncated = map(np.array, outcomes, (np.float32, bool, bool))
        self.solved = terminated & (reward > 0)
        return self.obs, reward, terminated, truncated

    def get_state(self):
        return [np.array(history).view(np.uint8) for history in self.history]

    def set_state(self, states):
        for i, state in enumerate(states):
            level, *actions = np.asarray(state).view(np.int64).tolist()
            self.set_level(i, level)
            for action in actions:
                self.play(i, action)

    def close(self):
        """Nothing is held."""


def make_levels(env_id, num, distribution_mode):
    return (MiniGridLevels if env_id.startswith("MiniGrid-") else ProcgenLevels)(env_id, num, distribution_mode)


class LevelEnvs:
    """Environments `env_ids` (a range) whose tasks come from `queue` as episodes start; level = start_level + task.

    step(actions (N,)) -> obs (N, *obs_shape) uint8, reward (N,) float32, terminated, truncated (N,) bool, info.
    Where an episode ends, its raw return and length go to `queue` and the next level starts in the same step: obs is
    its first frame, info["final_obs"][info["final_mask"]] (until the next step) the last frames of those truncated.
    info["task"] (N,) are the tasks that the rewards belong to; info["valid"] is all True.
    """

    EPISODE = ["playing", "return", "length"]  # the running episode's task, return and steps so far

    def __init__(self, env_id, queue, env_ids, start_level, distribution_mode, records=None):
        self.queue, self.env_ids, self.start_level = queue, env_ids, start_level
        self.records = np.zeros(len(env_ids), self.layout(env_id)) if records is None else records
        self.slots = make_levels(env_id, len(env_ids), distribution_mode)

    def layout(self, env_id):
        """The dtype of all that is known of one environment: the whole can then be shared memory."""
        self.obs_shape, self.num_actions = env_spec(env_id)
        fields = [(name, np.uint8, self.obs_shape) for name in ("obs", "final_obs")]
        fields += [("reward", np.float32), ("terminated", bool), ("truncated", bool), ("action", int), ("task", int)]
        return np.dtype([*fields, *zip(self.EPISODE, (int, float, int))], align=True)

    def reset(self):
        self.run("start")
        return self.records["obs"].copy()

    def step(self, actions):
        self.records["action"] = actions
        self.run("advance")
        *outputs, task = (self.records[k].copy() for k in ("obs", "reward", "terminated", "truncated", "task"))
        info = {"task": task, "valid": np.ones(len(task), bool), "final_mask": outputs[3] & ~outputs[2]}
        return *outputs, info | {"final_obs": self.records["final_obs"]}

    def state_dict(self):
        """All that the next steps depend on, to the bit; "slots" is a list of N uint8 arrays."""
        return {"slots": self.run("slots.get_state")} | {name: self.records[name].copy() for name in self.EPISODE}

    def load_state_dict(self, state):
        for name in self.EPISODE:
            self.records[name] = state[name]
        self.run("slots.set_state", state["slots"])

    def run(self, method, items=()):
        """Calls a method with `items` (one an environment); an error names the environment and its task."""
        try:
            answer = operator.attrgetter(method)(self)(*items and [items])
        except Exception as error:
            where = f"environment {self.env_ids[self.slots.at]}, task {self.records['playing'][self.slots.at]}"
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        self.records["obs"] = self.slots.obs
        return answer

    def start(self, ended=None):
        for i in range(len(self.env_ids)) if ended is None else ended:
            self.slots.at, task = i, self.queue.get_task(self.env_ids[i])
            self.records[self.EPISODE][i] = task, 0, 0
            self.slots.set_level(i, self.start_level + task)

    def advance(self):
        r = self.records
        obs, r["reward"], r["terminated"], r["truncated"] = self.slots.step(r["action"])
        cut, ended = r["truncated"] & ~r["terminated"], np.flatnonzero(r["terminated"] | r["truncated"])
        r["task"], r["final_obs"][cut] = r["playing"], obs[cut]
        r["return"] += r["reward"]
        r["length"] += 1
        for i in ended:
            self.queue.put_episode(self.env_ids[i], *r[self.EPISODE][i].item(), float(self.slots.solved[i]))
        self.start(ended)

    def close(self):
        self.slots.close()


def env_worker(conn, memory, dtype, rows, *args):
    """A process of WorkerEnvs: answers the calls that come through `conn` for the environments `rows`."""
    parent = multiprocessing.parent_process()  # its death ends this process even inside the game or the queue
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    try:
        envs = LevelEnvs(*args, np.frombuffer(memory, dtype)[rows])
        while True:
            conn.send((envs.run(*conn.recv()), None))
    except EOFError:  # the parent closed the pipe
        envs.close()
    except Exception:
        with suppress(OSError):  # the parent died
            conn.send((None, traceback.format_exc()))


class WorkerEnvs(LevelEnvs):
    """LevelEnvs in `num_workers` processes, each with a slice of the environments: the same results to the bit.

    Spawned: a fork would copy the locks of torch's and the loggers' threads in whatever state they are. The memory has
    no name, so nothing can stay in /dev/shm. A worker that raised, died or does not answer is a RunError of `run`.
    """

    TIMEOUT_S = 90  # for a step: above the queue's, whose error says more; ten times that to start or to restore

    def __init__(self, env_id, queue, env_ids, start_level, distribution_mode, num_workers):
        dtype, context = self.layout(env_id), multiprocessing.get_context("spawn")
        memory = context.RawArray("B", dtype.itemsize * len(env_ids))
        self.env_ids, self.records, self.workers = env_ids, np.frombuffer(memory, dtype), []
        atexit.register(self.close)
        # Workers inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        cuts = [len(env_ids) * k // num_workers for k in range(num_workers + 1)]
        for rows in map(slice, cuts, cuts[1:]):
            conn, remote = context.Pipe()
            args = remote, memory, dtype, rows, env_id, queue, env_ids[rows], start_level, distribution_mode
            self.workers.append((conn, context.Process(target=env_worker, args=args), rows))
            self.workers[-1][1].start()
            remote.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(self, method, items=()):
        for conn, _, rows in self.workers:
            with suppress(BrokenPipeError):  # it died: what it left in the pipe, or its exit code, says why
                conn.send((method, items[rows]))
        answers, waiting = {}, {conn: rest for conn, *rest in self.workers}
        limit = self.TIMEOUT_S * (1 if method == "advance" else 10)
        while waiting:
            turns = (connection.wait(waiting, 1) for _ in range(limit))  # so a Ctrl-Z that stops all is no time-out
            ready = next(filter(None, turns), None)
            for conn in ready or list(waiting):
                process, rows = waiting.pop(conn)
                try:
                    answers[rows.start], error = conn.recv() if ready else (None, f"gave no answer for {limit} s")
                except (EOFError, OSError):
                    process.join(2)
                    error = f"died with exit code {process.exitcode}"
                if error:
                    tasks = self.records["playing"][rows].tolist()
                    self.close()
                    raise RunError(f"worker of environments {self.env_ids[rows]}, tasks {tasks}: {error}")
        return [item for start in sorted(answers) for item in answers[start] or ()]

    def close(self):
        deadline = time.monotonic() + 1
        for conn, *_ in self.workers:
            conn.close()  # the worker reads the end of the pipe
        while self.workers:
            process = self.workers[-1][1]
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()
            self.workers.pop()
            process.close()
        atexit.unregister(self.close)  # last: Ctrl-C may have cut this short


# Copied from algos/ppo.py:EpisodeStats
class EpisodeStats:
    """Return and length of every finished episode from raw rewards: dead steps do not count, both flags end one."""

    def __init__(self, num_envs):
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self.total, self.dead, self.finished = 0, 0, []  # finished: (return, length) since the last pop

    def step(self, reward, ended, valid):
        self.returns += np.where(valid, reward, 0)
        self.lengths += valid
        self.dead += int((~valid).sum())
        for i in np.flatnonzero(ended):
            self.add(float(self.returns[i]), int(self.lengths[i]))
        self.returns[ended], self.lengths[ended] = 0, 0

    def add(self, episode_return, length):
        self.finished.append((episode_return, length))
        self.total += 1

    def pop(self):
        """Means over the episodes that finished since the last call, and the number of all."""
        returns, lengths = np.mean(self.finished, axis=0) if self.finished else (math.nan, math.nan)
        self.finished = []
        return {"charts/episodic_return": returns, "charts/episodic_length": lengths, "charts/episodes": self.total}

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        self.returns, self.lengths = (np.asarray(state[name]).copy() for name in ("returns", "lengths"))
        self.total, self.dead, self.finished = state["total"], state["dead"], [tuple(e) for e in state["finished"]]


# Copied from algos/ppo.py:RunningMeanStd
class RunningMeanStd:
    """Mean and variance of a stream of batches in float64 (Chan et al. 1979)."""

    def __init__(self, shape=()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, batch):
        if len(batch) == 0:
            return
        delta, total = batch.mean(0) - self.mean, self.count + len(batch)
        squares = self.var * self.count + batch.var(0) * len(batch) + delta**2 * self.count * len(batch) / total
        self.mean, self.var, self.count = self.mean + delta * len(batch) / total, squares / total, total

    def normalize(self, x):
        return np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -10, 10).astype(np.float32)

    def state_dict(self):
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def load_state_dict(self, state):
        self.mean, self.var, self.count = np.asarray(state["mean"]), np.asarray(state["var"]), state["count"]


# Copied from algos/ppo.py:RewardScaler
class RewardScaler:
    """Divides rewards by the running deviation of the discounted return and clips them to +-10, as OpenAI baselines'
    VecNormalize. The return restarts at every episode end, terminated or truncated; dead steps do not count."""

    def __init__(self, num_envs, gamma):
        self.returns, self.gamma, self.stats = np.zeros(num_envs), gamma, RunningMeanStd()

    def __call__(self, reward, ended, valid):
        self.returns = np.where(valid, self.returns * self.gamma + reward, self.returns)
        self.stats.update(self.returns[valid])
        self.returns[ended] = 0
        return np.clip(reward / np.sqrt(self.stats.var + 1e-8), -10, 10)

    def state_dict(self):
        return {"returns": self.returns, "stats": self.stats.state_dict()}

    def load_state_dict(self, state):
        self.returns = np.asarray(state["returns"]).copy()
        self.stats.load_state_dict(state["stats"])


# ---- 5. Agent --------------------------------------------------------------------------------------------------------


def layer_init(layer, std=math.sqrt(2)):
    """Orthogonal weights for linear layers, xavier for convolutions (the PLR code's choice); zero biases."""
    if isinstance(layer, nn.Conv2d):
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


relu = partial(nn.ReLU, inplace=True)  # behind a convolution or a linear layer, which need not keep their output


class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convs = nn.Sequential(nn.ReLU(), layer_init(nn.Conv2d(channels, channels, 3, padding=1)), relu(),
                                   layer_init(nn.Conv2d(channels, channels, 3, padding=1)))  # fmt: skip

    def forward(self, x):
        return x + self.convs(x)


class Agent(nn.Module):
    """Policy and value heads on one network: IMPALA's ResNet (Espeholt et al. 2018), NatureCNN (Mnih et al. 2015), or,
    for MiniGrid's 7 x 7 cells, three 2 x 2 convolutions. forward(obs (B, H, W, C) uint8) -> logits (B, A), values (B,).
    """

    def __init__(self, obs_shape, num_actions, network="impala"):
        super().__init__()
        height, width, channels = obs_shape
        self.scale = 255 if height >= 36 else 10  # MiniGrid's cells hold small numbers
        if height < 36:
            layers = [layer_init(nn.Conv2d(channels, 16, 2)), relu(), layer_init(nn.Conv2d(16, 32, 2)), relu(),
                      layer_init(nn.Conv2d(32, 64, 2)), relu()]  # fmt: skip
        elif network == "nature":
            layers = [layer_init(nn.Conv2d(channels, 32, 8, 4)), relu(), layer_init(nn.Conv2d(32, 64, 4, 2)),
                      relu(), layer_init(nn.Conv2d(64, 64, 3, 1)), relu()]  # fmt: skip
        else:
            layers = []
            for before, after in ((channels, 16), (16, 32), (32, 32)):
                layers += [layer_init(nn.Conv2d(before, after, 3, padding=1)), nn.MaxPool2d(3, 2, padding=1),
                           ResidualBlock(after), ResidualBlock(after)]  # fmt: skip
            layers.append(nn.ReLU())
        layers.append(nn.Flatten())
        size = nn.Sequential(*layers)(torch.zeros(1, channels, height, width)).shape[1]
        self.network = nn.Sequential(*layers, layer_init(nn.Linear(size, 256)), relu())
        self.policy, self.value = layer_init(nn.Linear(256, num_actions), 0.01), layer_init(nn.Linear(256, 1), 1.0)

    def forward(self, obs):
        features = self.network(obs.permute(0, 3, 1, 2).float().div_(self.scale))
        return self.policy(features), self.value(features).squeeze(-1)

    @torch.no_grad()
    def act(self, obs, generator=None, forward=None):
        """obs (B, H, W, C) -> actions, log-probabilities, values (B,), logits (B, A). No generator: the likeliest."""
        logits, value = (forward or self)(obs)
        if not torch.isfinite(logits.sum() + value.sum()):
            require_finite(logits=logits, value=value)
        logprobs = logits.log_softmax(-1)
        action = (
            logits.argmax(-1) if generator is None else torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        )
        return action, logprobs.gather(1, action[:, None])[:, 0], value, logits

    def evaluate_actions(self, obs, actions):
        """Log-probabilities of `actions`, entropies, values, all (B,), with gradients."""
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, actions[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1), value


class Pieces:
    """Learns from pieces of a batch, each worked off by one thread of a pool: faster than all threads on one operator.
    Pieces and the order of their sums are fixed, so that the number of threads changes no bit. A GPU takes a minibatch
    in one piece.
    """

    def __init__(self, agent, size, threads):
        self.agent, self.parameters, self.threads = agent, list(agent.parameters()), threads
        self.size = size if self.parameters[0].device.type == "cpu" else 2**31
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def forward(self, obs):
        """logits (B, A), values (B,). For the small batches of a rollout, all threads on one operator are faster."""
        torch.set_num_threads(self.threads)
        outputs = self.agent(obs)
        torch.set_num_threads(1)
        return outputs

    def gradients(self, flat, minibatch, coefs):
        """Leaves the gradient of the minibatch's mean loss in the parameters; returns the parts of the loss."""
        pieces = np.array_split(minibatch, math.ceil(len(minibatch) / self.size))
        for k, (grads, parts) in enumerate(self.pool.map(partial(self.piece, flat, coefs, len(minibatch)), pieces)):
            if k == 0:
                total, total_parts = grads, parts
            else:
                torch._foreach_add_(total, grads)
                total_parts = {name: total_parts[name] + part for name, part in parts.items()}
        for parameter, gradient in zip(self.parameters, total):
            parameter.grad = gradient
        return total_parts

    def piece(self, flat, coefs, total, rows):
        """One piece's share of a minibatch of `total` samples: gradients and parts of the loss."""
        rows = torch.as_tensor(rows, device=flat["obs"].device)
        b = {name: tensor.index_select(0, rows) for name, tensor in flat.items()}  # far faster than tensor[rows]
        new = self.agent.evaluate_actions(b.pop("obs"), b.pop("actions"))
        loss, parts = ppo_loss(*new, *(b[k] for k in ("old_logprob", "old_value", "advantage", "returns")), *coefs)
        share = len(rows) / total
        return torch.autograd.grad(loss * share, self.parameters), {k: v.detach() * share for k, v in parts.items()}


def keep_freed_memory():
    """Keeps glibc from handing the activations' memory back to the kernel after each piece, to fault it in again."""
    with suppress(OSError, AttributeError):  # another C library has no such switch, nor the need
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-8, 1)):  # mmap threshold, trim threshold, arenas
            mallopt(option, value)


# ---- 6. Mathematics and plumbing -------------------------------------------------------------------------------------


# Copied from algos/ppo.py:gae
def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): arrays (T, N) -> advantages, returns (T, N).

    `next_values` is V of each step's true successor: the bootstrap at a truncation and at the end of the rollout.
    Terminated cuts bootstrap and trace, truncated the trace alone; both at once mean terminated.
    """
    rewards, values, next_values = np.asarray(rewards), np.asarray(values), np.asarray(next_values)
    terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
    deltas = rewards + gamma * np.where(terminated, 0, next_values) - values
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages, trace = np.zeros_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = trace = deltas[t] + decay[t] * trace
    return advantages, advantages + values


# Copied from algos/ppo.py:ppo_loss
def ppo_loss(logprob, entropy, value, old_logprob, old_value, advantage, returns, clip_coef, clip_vloss, ent_coef,
             vf_coef):  # fmt: skip
    """The clipped surrogate (Schulman et al. 2017, eq. 7 and 9); all arguments (B,). Returns the loss and its parts."""
    log_ratio = logprob - old_logprob
    ratio = log_ratio.exp()
    policy_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(1 - clip_coef, 1 + clip_coef)).mean()
    value_error = (value - returns) ** 2
    if clip_vloss:
        clipped = old_value + (value - old_value).clamp(-clip_coef, clip_coef)
        value_error = torch.max(value_error, (clipped - returns) ** 2)
    value_loss, entropy_loss = 0.5 * value_error.mean(), entropy.mean()
    loss = policy_loss - ent_coef * entropy_loss + vf_coef * value_loss
    with torch.no_grad():  # Schulman's low-variance estimate of the KL divergence
        approx_kl = (ratio - 1 - log_ratio).mean()
        clipfrac = ((ratio - 1).abs() > clip_coef).float().mean()
    return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy_loss,
                  "approx_kl": approx_kl, "clipfrac": clipfrac}  # fmt: skip


# Copied from algos/ppo.py:explained_variance
def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns]; NaN where it is undefined."""
    variance = returns.var()
    return 1 - (returns - values).var() / variance if 0 < variance < math.inf else math.nan


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
        return {"torch": torch.get_rng_state(), "actions": self.actions.get_state(),
                "minibatches": self.minibatches.bit_generator.state}  # fmt: skip

    def load_state_dict(self, state):
        torch.set_rng_state(state["torch"])
        self.actions.set_state(state["actions"])
        self.minibatches.bit_generator.state = state["minibatches"]


# Copied from algos/ppo.py:pack
def pack(state):
    """A deep copy that torch.load(weights_only=True) reads: arrays as CPU tensors, numpy scalars as Python's."""
    if isinstance(state, dict):
        return {key: pack(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [pack(value) for value in state]
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    return state.item() if isinstance(state, np.generic) else state


# Copied from algos/ppo.py:writing
@contextmanager
def writing(path):
    """RunError that names `path` if the disk is full, the folder is gone and the like."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise RunError(f"cannot write {path}: {error}. What was there before is intact") from error


# Copied from algos/ppo.py:write_atomically
def write_atomically(path, write):
    """Calls write(file) on a temporary neighbour, which replaces `path` only when it is safely on disk."""
    temporary = path.with_name(path.name + ".tmp")
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


# Copied from algos/ppo.py:save_checkpoint
def save_checkpoint(folder, state, keep):
    """Writes folder/<global_step>.pt, then removes all but the `keep` newest."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{state['global_step']:012d}.pt", partial(torch.save, state))
    for old in sorted(folder.glob("*.pt"))[:-keep]:
        old.unlink()


# Copied from algos/ppo.py:load_checkpoint
def load_checkpoint(folder, config, names):
    """The newest checkpoint that can be read and has `names`, or None. RunError if another configuration made it."""
    paths = sorted(folder.glob("*.pt"), reverse=True)
    for path in paths:
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            if missing := {"config", *names} - state.keys():
                raise KeyError(*missing)
        except Exception as error:  # a damaged file can raise anything
            print(f"warning: {path} cannot be read ({type(error).__name__}); trying the one before", file=sys.stderr)
            continue
        other = {key for key in config if state["config"].get(key, config[key]) != config[key]}
        if other:
            what = ", ".join(f"{key} {state['config'][key]} (now {config[key]})" for key in sorted(other))
            raise RunError(f"{path} was made by another configuration: {what}. Use another --run-dir")
        return state
    if paths:
        raise RunError(f"no checkpoint in {folder} can be read: remove {folder.parent} to start again")
    return None


# Copied from algos/ppo.py:no_interrupt
@contextmanager
def no_interrupt():
    """Lets Ctrl-C wait for the end of the block: torch.save breaks, and a row is torn, when it is cut short."""
    received = []
    before = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    for number in received[:1]:
        signal.raise_signal(number)


# Copied from algos/ppo.py:finite
def finite(row):
    """The row's numbers as floats, None for those that JSON has no word for."""
    return {key: float(value) if math.isfinite(value) else None for key, value in row.items()}


# Copied from algos/ppo.py:RunLogger
class RunLogger:
    """A run on disk (config.json, code.py, status.json, metrics.jsonl, eval.jsonl, tb/, checkpoints/, result.json).

    As a context manager it turns the ways a run can end into what is left behind: SIGTERM or SIGUSR1 end it after the
    update (exit 75), Ctrl-C at once (exit 130), both with a checkpoint; an error keeps the checkpoints as they are.
    The signals are its own from the constructor on.
    """

    # These do not change what a run computes, so the same folder serves them all.
    UNHASHED = ("exp_name", "env_id", "seed", "run_dir", "resume", "progress", "track", "wandb_project_name",
                "wandb_entity", "eval_only", "capture_video", "keep_checkpoints", "log_interval")  # fmt: skip

    def __init__(self, args):
        self.args, self.start, self.wall_s = args, time.time(), 0.0
        self.last_step, self.state, self.result = 0, None, None
        self.metrics = self.evals = self.tb = None  # opened by `restore`
        self.signals, numbers = [], (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        self.handlers = {number: signal.signal(number, partial(self.stop, self.signals)) for number in numbers}
        values = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        free = {*self.UNHASHED, *getattr(args, "tunable", ())}  # tunable: what this run's resumes may change
        self.config = {key: value for key, value in values.items() if key not in free}
        self.id = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode()).hexdigest()[:8]
        names = args.exp_name, args.env_id, f"seed{args.seed}-{self.id}"
        self.dir = Path(args.run_dir, *(re.sub(r"[^\w.-]+|^\.+", "-", name)[:100] for name in names))
        script = Path(sys.modules[type(args).__module__].__file__)
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.dir / "lock", "a+")  # held as long as the process lives
        except OSError as error:
            raise RunError(f"--run-dir {args.run_dir} cannot be written: {error}. Choose another --run-dir") from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            raise RunError(f"{self.dir} is in use by {self.lock.read()}: wait, or choose another --run-dir") from None
        with writing(self.dir / "lock"):
            self.lock.truncate(0)
            print(f"pid {os.getpid()} on {socket.gethostname()}", end="", file=self.lock, flush=True)
        self.checkpoints = self.dir / "checkpoints"
        if args.resume == "never" and ((self.dir / "metrics.jsonl").exists() or any(self.checkpoints.glob("*.pt"))):
            raise RunError(f"--resume never, but {self.dir} holds a run: remove it or choose another --run-dir")
        code = script.read_bytes()
        self.code_sha = hashlib.sha256(code).hexdigest()
        git = partial(subprocess.run, cwd=script.resolve().parent, capture_output=True, text=True)
        status = ["git", "status", "--porcelain", script.resolve()]  # of the script alone: it imports nothing else
        self.config_json = {
            "args": values, "argv": sys.argv, "script_sha256": self.code_sha,
            "git_commit": git(["git", "rev-parse", "HEAD"]).stdout.strip() if shutil.which("git") else "",
            "git_dirty": bool(git(status).stdout) if shutil.which("git") else None,
            "host": socket.gethostname(), "cpus": len(os.sched_getaffinity(0)), "python": platform.python_version(),
            "torch": torch.__version__, "numpy": np.__version__, "gymnasium": gym.__version__,
        }  # fmt: skip
        if (self.dir / "result.json").exists():
            try:
                self.result = json.loads((self.dir / "result.json").read_text())
            except ValueError as error:
                message = f"{self.dir}/result.json is damaged: {error}. Remove it: the same command then makes it anew"
                raise RunError(message) from error
        if self.result is None and not args.eval_only:
            config = json.dumps(self.config_json, indent=1).encode()
            write_atomically(self.dir / "config.json", lambda f: f.write(config))
            write_atomically(self.dir / "code.py", lambda f: f.write(code))

    def restore(self, parts):
        """The state to go on from, with that of each of `parts`, or None for a new run. Rows logged after it are
        dropped: they will come again."""
        from tensorboard.summary.writer.record_writer import RecordWriter

        names = "code_sha", "wall_s", "update", "global_step", "row", "next_obs", *parts
        state = load_checkpoint(self.checkpoints, self.config, names)
        if state is None and (self.args.resume == "must" or self.args.eval_only):
            raise RunError(f"{self.checkpoints} holds no checkpoint to go on from: train first, with --resume auto")
        if state is not None and state["code_sha"] != self.code_sha:
            old, new = state["code_sha"][:8], self.code_sha[:8]
            print(f"warning: the script changed since the checkpoint (sha {old}, now {new})", file=sys.stderr)
        step, self.first_update, self.wall_s = -1, 0, 0.0
        if state is not None:
            step, self.first_update, self.wall_s = state["global_step"], state["update"], state["wall_s"]
        self.last_step = max(step, 0)
        for path in (self.dir / "metrics.jsonl", self.dir / "eval.jsonl"):
            text, kept, damaged = path.read_text(errors="replace") if path.exists() else "", "", []
            for line in text.splitlines():
                try:
                    kept += f"{line}\n" if json.loads(line)["global_step"] <= step or self.args.eval_only else ""
                except (ValueError, KeyError, TypeError):
                    damaged.append(line)
            if damaged:
                print(f"warning: {path}: {len(damaged)} damaged rows dropped: {damaged[0][:60]!r}", file=sys.stderr)
            if kept != text:
                write_atomically(path, lambda f, kept=kept: f.write(kept.encode()))
        with writing(self.dir):
            self.metrics, self.evals = open(self.dir / "metrics.jsonl", "a"), open(self.dir / "eval.jsonl", "a")
            (self.dir / "tb").mkdir(exist_ok=True)
            name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}"
            self.tb = RecordWriter(open(self.dir / "tb" / name, "ab"))
        self.write_event(file_version="brain.Event:2")
        self.write_event(step=step + 1, session_log={"status": "START"})  # hides what was logged from that step on
        return state

    def __enter__(self):
        self.last_time, self.last_line, self.eval_return = time.time(), time.time(), None
        self.wandb = None
        if self.args.track:
            try:
                import wandb

                self.wandb = wandb.init(project=self.args.wandb_project_name, entity=self.args.wandb_entity,
                                        id=f"{self.dir.parent.name}-{self.dir.name}", resume="allow", dir=self.dir,
                                        config=self.config_json, name=str(self.dir))  # fmt: skip
            except Exception as error:  # not installed, no key, no network
                raise RunError(f"--track: {error!r} (WANDB_MODE=offline needs no key)") from error
            self.wandb.define_metric("*", step_metric="global_step")
        progress = {"auto": "bar" if sys.stderr.isatty() else "log"}.get(self.args.progress, self.args.progress)
        self.bar = tqdm(bar_format="{desc}") if progress == "bar" else None
        self.show = {"bar": lambda line: self.bar.set_description_str(line), "log": self.every_30_s}.get(progress)
        return self

    @staticmethod  # so that the handler holds no run, which would hold its lock
    def stop(signals, number, frame):
        signals.append(number)
        if number == signal.SIGINT:  # one is enough: a second would cut the clean-up short
            signal.signal(number, signal.SIG_IGN)
            raise SystemExit(130)

    def __exit__(self, kind, error, traceback):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stopped = kind is SystemExit and error.code in (75, 130)
        if stopped and error.code == 130 and self.state is not None:
            save_checkpoint(self.checkpoints, self.state, self.args.keep_checkpoints)
            print(f"interrupted: the same command goes on from {self.checkpoints}", file=sys.stderr)
        self.status("finished" if kind is None else "interrupted" if stopped else "failed")
        for sink in (self.metrics, self.evals, self.tb, self.bar, self.lock):
            with suppress(OSError, AttributeError):  # a full disk again; no bar
                sink.close()
        if self.wandb is not None:
            self.wandb.finish(exit_code=int(kind is not None))
        for number, handler in () if stopped else self.handlers.items():  # else: another signal could hit the exit
            signal.signal(number, handler)

    def every_30_s(self, line):
        if time.time() - self.last_line >= 30:
            self.last_line = time.time()
            print(line, file=sys.stderr, flush=True)

    @no_interrupt()
    def checkpoint(self, state, due):
        """At the top of each update: keeps the packed state for Ctrl-C; writes it when due or when asked to stop."""
        self.state = pack(state) | {"config": self.config, "code_sha": self.code_sha, "wall_s": self.elapsed()}
        if due or self.signals:
            save_checkpoint(self.checkpoints, self.state, self.args.keep_checkpoints)
        if self.signals:
            name = signal.Signals(self.signals[0]).name
            print(f"stopped by {name}: the same command goes on from here", file=sys.stderr)
            raise SystemExit(130 if name == "SIGINT" else 75)

    def elapsed(self):
        """Seconds of work on this run, those before a resume included."""
        return self.wall_s + time.time() - self.start

    def status(self, state):
        if self.args.eval_only:  # the run stays what it was
            return
        row = {"state": state, "step": self.last_step, "pid": os.getpid(), "host": socket.gethostname(),
               "heartbeat": time.time()}  # fmt: skip
        with suppress(OSError):  # a full disk has been reported already, by what matters more
            (self.dir / "status.json").write_text(json.dumps(row))

    @no_interrupt()
    def log(self, step, row, update):
        """One row of metrics.jsonl (not finite: null), TensorBoard and wandb; the progress line; status.json."""
        now = time.time()
        row["charts/SPS"] = (step - self.last_step) / (now - self.last_time)
        self.last_step, self.last_time = step, now
        row = finite(row)
        self.write(self.metrics, {"global_step": step, "wall_s": round(self.elapsed(), 3)} | row)
        known = {key: value for key, value in row.items() if value is not None}
        self.write_event(step=step, summary={"value": [{"tag": k, "simple_value": v} for k, v in known.items()]})
        if self.wandb is not None:
            self.wandb.log({"global_step": step} | known)
        self.status("running")
        self.eval_return = row.get("eval/return_mean", self.eval_return)
        if self.show:
            left = (now - self.start) / (update - self.first_update) * (self.args.num_updates - update)
            ret, test = ("-" if x is None else f"{x:.1f}" for x in (row["charts/episodic_return"], self.eval_return))
            done = f"upd {update}/{self.args.num_updates} | {step / 1e6:.2f}M/{self.args.total_timesteps / 1e6:.2f}M"
            speed = f"{row['charts/SPS']:.0f} sps | ret {ret} | test {test} | eta {timedelta(seconds=int(left))}"
            self.show(f"{done} | {speed}")

    def write_event(self, **fields):
        """Appends to TensorBoard's file. Not by SummaryWriter, whose thread meets a full disk with a traceback."""
        from tensorboard.compat.proto.event_pb2 import Event

        with writing(self.dir / "tb"):
            self.tb.write(Event(wall_time=time.time(), **fields).SerializeToString())
            self.tb.flush()

    def log_eval(self, step, rows):
        """One row of eval.jsonl per evaluation episode."""
        for row in rows:
            self.write(self.evals, {"global_step": step} | row)

    def write(self, file, row):
        with writing(file.name):
            print(json.dumps(row), file=file, flush=True)

    def finish(self, result):
        """result.json, written last: its presence means that the run is complete."""
        result = {key: int(value) if key == "global_step" else value for key, value in finite(result).items()}
        write_atomically(self.dir / "result.json", lambda f: f.write(json.dumps(result, indent=1).encode()))
        if self.show:
            tqdm.write(f"finished: {self.dir}\n{json.dumps(result)}")
        return result


# Copied from algos/ppo.py:Stopwatch
class Stopwatch:
    """Seconds by activity since it was made: lap(name) books the time since the last lap."""

    def __init__(self):
        self.total, self.last = {}, time.perf_counter()

    def lap(self, name):
        now = time.perf_counter()
        self.total[name], self.last = self.total.get(name, 0.0) + now - self.last, now


# Copied from algos/ppo.py:select_device
def select_device(name, deterministic):
    """The torch device, with cuda checked and deterministic kernels switched on."""
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if (name == "cuda" and not torch.cuda.is_available()) or (name == "mps" and not torch.backends.mps.is_available()):
        raise RunError(f"--device {name}, but torch {torch.__version__} finds none: use --device cpu")
    return torch.device(name)


# Copied from algos/ppo.py:require_finite
def require_finite(**tensors):
    """RunError that names the first tensor with a value that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise RunError(f"{name} is not finite. The last good checkpoint is kept; try a lower --learning-rate")


# ---- 7. Evaluation ---------------------------------------------------------------------------------------------------

# Returns of a random and of a perfect policy, Cobbe et al. 2020, appendix C: game: (easy), (hard). Jumper and leaper
# have the paper's easy minimum 3, not the 1 and 1.5 of the train-procgen code.
RETURN_RANGES = {
    "coinrun": ((5, 10), (5, 10)), "starpilot": ((2.5, 64), (1.5, 35)), "caveflyer": ((3.5, 12), (2, 13.4)),
    "dodgeball": ((1.5, 19), (1.5, 19)), "fruitbot": ((-1.5, 32.4), (-0.5, 27.2)), "chaser": ((0.5, 13), (0.5, 14.2)),
    "miner": ((1.5, 13), (1.5, 20)), "jumper": ((3, 10), (1, 10)), "leaper": ((3, 10), (1.5, 10)),
    "maze": ((5, 10), (4, 10)), "bigfish": ((1, 40), (0, 40)), "heist": ((3.5, 10), (2, 10)),
    "climber": ((2, 12.6), (1, 12.6)), "plunder": ((4.5, 30), (3, 30)), "ninja": ((3.5, 10), (2, 10)),
    "bossfight": ((0.5, 13), (0.5, 13)),
}  # fmt: skip


def evaluate(agent, args, episodes, forward=None):
    """Plays `episodes` levels of each split once, in environments of their own, seeded by args.eval_seed alone.

    "eval": held-out levels, drawn from all outside the training range; "eval_train": training levels. Returns a row per
    episode (split, level, raw return, length, solved). Touches no training state.
    """
    rng = np.random.default_rng(args.eval_seed)
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(args.eval_seed)
    held_out = rng.integers(2**31 - 1 - args.num_levels, size=episodes)
    held_out += np.where(held_out >= args.start_level, args.num_levels, 0)
    n = args.num_levels
    order = rng.permutation(n) if n <= 10**6 else rng.choice(n, episodes, replace=False)  # which makes no list of all
    training = args.start_level + order[np.arange(episodes) % len(order)]
    rows = []
    for split, levels in (("eval", held_out), ("eval_train", training)):
        with closing(make_levels(args.env_id, episodes, args.distribution_mode)) as slots:
            for i, level in enumerate(levels):
                slots.set_level(i, level)
            obs, actions, returns = slots.obs, np.zeros(episodes, np.int32), np.zeros(episodes)
            lengths, running = np.zeros(episodes, np.int64), np.ones(episodes, bool)
            while running.any():
                batch = torch.as_tensor(obs[running]).to(device)
                actions[running] = agent.act(batch, None if args.eval_greedy else generator, forward)[0].cpu().numpy()
                obs, reward, terminated, truncated = slots.step(actions)
                returns, lengths = returns + reward * running, lengths + running
                for i in np.flatnonzero(terminated | truncated):
                    if running[i]:
                        rows.append({"split": split, "level": int(levels[i]), "return": float(returns[i]),
                                     "length": int(lengths[i]), "solved": bool(slots.solved[i])})  # fmt: skip
                    running[i] = False
                    slots.set_level(i, levels[i])
    return rows


def summarize(rows, args):
    """Means of evaluation rows by split, the return normalised by RETURN_RANGES, and the gap between the splits."""
    summary = {}
    for prefix in ("eval", "eval_train"):
        split = [row for row in rows if row["split"] == prefix]
        returns = np.array([row["return"] for row in split])
        summary |= {f"{prefix}/return_mean": returns.mean(), f"{prefix}/return_std": returns.std(),
                    f"{prefix}/length_mean": np.mean([row["length"] for row in split]),
                    f"{prefix}/solve_rate": np.mean([row["solved"] for row in split])}  # fmt: skip
        if args.env_id in RETURN_RANGES:
            low, high = RETURN_RANGES[args.env_id][args.distribution_mode == "hard"]
            summary[f"{prefix}/return_normalized"] = (returns.mean() - low) / (high - low)
    gap = summary["eval_train/return_mean"] - summary["eval/return_mean"]
    return {key: float(value) for key, value in summary.items()} | {"eval/generalization_gap": float(gap)}


# ---- 8. Training -----------------------------------------------------------------------------------------------------


def make_plr(args, num_levels, seed=None):
    """PLR over `num_levels` levels, as the arguments describe it. Errors: ValueError."""
    return PrioritizedLevelReplay(
        num_levels, score=args.plr_score, score_transform=args.plr_score_transform,
        temperature=args.plr_temperature, staleness_coef=args.plr_staleness_coef, rho=args.plr_rho,
        replay_schedule=args.plr_replay_schedule, replay_prob=args.plr_replay_prob, alpha=args.plr_alpha,
        robust=args.curriculum == "robust_plr", seed=seed,
    )  # fmt: skip


class Dealer:
    """The learner's end of the queue: keeps one task ahead for every environment, and what each draw was.

    learns (N, 2): whether the running and the next episode of each environment give gradients. All do, but in robust
    PLR those on levels that had no score when they were drawn.
    """

    def __init__(self, curriculum, queue, num_envs):
        self.curriculum, self.queue, self.learns = curriculum, queue, np.ones((num_envs, 2), bool)

    def deal(self, env_id):
        task = self.curriculum.sample()[0]
        robust = getattr(self.curriculum, "robust", False)
        self.learns[env_id] = self.learns[env_id, 1], not (robust and self.curriculum.is_unseen(task))
        self.queue.put_task(env_id, task)

    def collect(self, stats):
        """Takes in the episodes that finished, in the order of the environments, and deals a task for each."""
        for env_id, task, episode_return, length, progress in self.queue.drain().tolist():
            stats.add(episode_return, length)
            self.curriculum.update_on_episode(episode_return, length, task, progress, env_id)
            self.deal(env_id)

    def state_dict(self):
        return {"learns": self.learns, "queue": self.queue.state_dict(), "curriculum": self.curriculum.state_dict()}

    def load_state_dict(self, state):
        self.learns = np.asarray(state["learns"]).copy()
        self.queue.load_state_dict(state["queue"])
        self.curriculum.load_state_dict(state["curriculum"])


def require_finite_reward(reward, tasks):
    """RunError that names the first environment whose reward is not finite, and its task."""
    if not np.isfinite(reward).all():
        i = int((~np.isfinite(reward)).argmax())
        raise RunError(f"environment {i}, playing task {tasks[i]}, gave the reward {reward[i]}, which is not finite")


def train(args):
    # Copied from algos/ppo.py:region(setup)
    torch.set_num_threads(args.torch_threads or len(os.sched_getaffinity(0)))
    device = select_device(args.device, args.deterministic)
    random = Randomness(args.seed, device)
    run = RunLogger(args)
    if run.result is not None and not args.eval_only:
        print(f"finished before, nothing to do: {run.dir}\n{json.dumps(run.result)}")
        return run.result
    # End of copy

    keep_freed_memory()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # all the parallelism is that of Pieces
    T, N = args.num_steps, args.num_envs
    obs_shape, num_actions = env_spec(args.env_id)
    agent = Agent(obs_shape, num_actions, args.network).to(device, memory_format=torch.channels_last)
    pieces = Pieces(agent, args.micro_batch_size, threads)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    make_curriculum = DomainRandomization if args.curriculum == "dr" else partial(make_plr, args)
    curriculum, queue, stats = make_curriculum(args.num_levels, seed=random.curriculum), SyncQueue(N), EpisodeStats(N)
    dealer = Dealer(curriculum, queue, N)
    scale_reward = RewardScaler(N, args.reward_gamma) if args.norm_reward else None
    options = (args.env_id, queue, range(N), args.start_level, args.distribution_mode)
    envs = WorkerEnvs(*options, args.num_workers) if args.num_workers else LevelEnvs(*options)

    obs = torch.zeros((T, N, *obs_shape), dtype=torch.uint8, device=device)
    actions, logprobs = torch.zeros(T, N, dtype=torch.int64, device=device), torch.zeros(T, N, device=device)
    logits = torch.zeros(T, N, num_actions, device=device)
    rewards, values, next_values = (np.zeros((T, N), np.float32) for _ in range(3))
    terminated, truncated, learns = (np.zeros((T, N), bool) for _ in range(3))
    tasks, ended = np.zeros((T, N), np.int64), np.zeros(N, bool)

    parts = {"agent": agent, "optimizer": optimizer, "random": random, "envs": envs, "dealer": dealer, "stats": stats}
    parts |= {"scale_reward": scale_reward} if scale_reward else {}
    first_update, global_step, row, next_obs = 0, 0, {}, None

    def snapshot(update):
        state = {name: part.state_dict() for name, part in parts.items()}
        return state | {"update": update, "global_step": global_step, "row": row, "next_obs": next_obs, "ended": ended}

    with run, closing(envs):
        # Copied from algos/ppo.py:region(restore)
        state = run.restore(parts)
        if state is not None:
            first_update, global_step, row = state["update"], state["global_step"], state["row"]
            for name, part in parts.items():
                part.load_state_dict(state[name])
        # End of copy
        if args.eval_only:
            rows = evaluate(agent, args, args.final_eval_episodes, pieces.forward)
            run.log_eval(global_step, rows)
            print(json.dumps(summarize(rows, args)))
            return summarize(rows, args)
        if state is not None:
            next_obs, ended = state["next_obs"].to(device), state["ended"].numpy()
        else:
            for env_id in np.repeat(np.arange(N), 2).tolist():  # the first episode's task and the one after
                dealer.deal(env_id)
            next_obs = torch.as_tensor(envs.reset()).to(device)

        for update in range(first_update, args.num_updates):
            run.checkpoint(snapshot(update), due=update > first_update and update % args.checkpoint_interval == 0)
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / args.num_updates)

            # Collect: T steps of every environment. An episode that ends is followed by the level dealt for it.
            clock = Stopwatch()
            dones, bootstraps = [ended], {}
            for t in range(T):
                obs[t], learns[t] = next_obs, dealer.learns[:, 0]
                actions[t], logprobs[t], value, logits[t] = agent.act(next_obs, random.actions, pieces.forward)
                values[t] = value.cpu().numpy()
                clock.lap("inference")
                raw, reward, terminated[t], truncated[t], info = envs.step(actions[t].cpu().numpy())
                require_finite_reward(reward, info["task"])
                ended, tasks[t] = terminated[t] | truncated[t], info["task"]
                rewards[t] = reward if scale_reward is None else scale_reward(reward, ended, info["valid"])
                dones.append(ended)
                next_obs = torch.as_tensor(raw).to(device)
                clock.lap("env")
                cut = info["final_mask"]
                if cut.any():  # obs already belongs to the next episode: bootstrap from the one that was cut off
                    bootstraps[t] = cut, agent.act(torch.as_tensor(info["final_obs"][cut]).to(device))[2].cpu()
                    clock.lap("inference")
                dealer.collect(stats)
                clock.lap("curriculum")
            global_step += T * N

            # Advantages.
            next_values[:-1], next_values[-1] = values[1:], agent.act(next_obs, forward=pieces.forward)[2].cpu().numpy()
            for t, (cut, value) in bootstraps.items():
                next_values[t, cut] = value
            advantages, returns = gae(rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda)
            clock.lap("inference")

            # ---- PLR: this block is the method (with Dealer.deal and PrioritizedLevelReplay) ----
            if args.curriculum != "dr":
                values_and_last = np.vstack([values, next_values[-1:]])
                curriculum.update_from_rollout(
                    tasks, rewards, values_and_last, logits.cpu().numpy(), np.array(dones), args.gamma, args.gae_lambda,
                    next_values=next_values, terminated=terminated, advantages=advantages,
                )  # fmt: skip
            rows = np.flatnonzero(learns.reshape(-1))  # robust PLR learns from replayed levels alone
            # ---- end of the method ----
            clock.lap("curriculum")

            # Optimise. A minibatch is worked off in small pieces whose gradients add up to its own.
            flat = {"obs": obs.flatten(0, 1), "actions": actions.flatten(), "old_logprob": logprobs.flatten()}
            for name, array in (("old_value", values), ("advantage", advantages), ("returns", returns)):
                flat[name] = torch.as_tensor(array.reshape(-1), dtype=torch.float32).to(device)
            if args.norm_adv and len(rows) > 1:
                used = flat["advantage"][rows]
                flat["advantage"] = (flat["advantage"] - used.mean()) / (used.std() + 1e-5)
            losses, stop = [], len(rows) == 0
            for _ in range(args.update_epochs):
                for minibatch in np.array_split(random.minibatches.permutation(rows), args.num_minibatches):
                    if stop or len(minibatch) == 0:
                        break
                    coefs = args.clip_coef, args.clip_vloss, args.ent_coef, args.vf_coef
                    loss = pieces.gradients(flat, minibatch, coefs)
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    if not torch.isfinite(grad_norm):
                        require_finite(
                            **{k: v for k, v in flat.items() if v.is_floating_point()}, **loss, gradient=grad_norm
                        )
                    optimizer.step()
                    losses.append({**loss, "grad_norm": grad_norm})
                    stop = args.target_kl is not None and loss["approx_kl"] > args.target_kl
            with torch.no_grad():  # before a checkpoint can hold them
                new_logits, value = pieces.forward(next_obs)
            require_finite(**dict(agent.named_parameters()), logits=new_logits, squared_value=value**2)
            clock.lap("update")
            if args.curriculum != "dr":
                curriculum.after_update()
            clock.lap("curriculum")

            # Log and evaluate.
            last = update + 1 == args.num_updates
            row = {
                f"losses/{name}": torch.stack([loss[name] for loss in losses]).mean().item()
                for name in losses[:1] and losses[0]
            }
            row |= {f"curriculum/{name}": value for name, value in curriculum.metrics().items()}
            row |= {f"perf/{name}_s": seconds for name, seconds in clock.total.items()}
            row |= {"losses/explained_variance": explained_variance(values, returns), "charts/update": update + 1,
                    "losses/gradient_steps": len(losses), "curriculum/learning_share": learns.mean(),
                    "charts/learning_rate": optimizer.param_groups[0]["lr"]}  # fmt: skip
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                rows = evaluate(agent, args, args.final_eval_episodes if last else args.eval_episodes, pieces.forward)
                run.log_eval(global_step, rows)
                clock.lap("eval")
                row |= summarize(rows, args) | {"perf/eval_s": clock.total["eval"]}
            if last or (update + 1) % args.log_interval == 0:
                run.log(global_step, stats.pop() | row, update + 1)

        # Copied from algos/ppo.py:region(finish)
        run.checkpoint(snapshot(args.num_updates), due=True)
        names = {key: value for key, value in row.items() if key.startswith("eval")}
        return run.finish({"global_step": global_step, "wall_s": run.elapsed()} | names)
        # End of copy


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
