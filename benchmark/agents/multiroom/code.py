"""PPO with prioritized level replay (PLR, robust PLR) on MiniGrid levels.

Papers: Jiang et al. 2021, arXiv:2010.03934 (PLR); Jiang et al. 2021, arXiv:2110.02439 (robust PLR);
Schulman et al. 2017, arXiv:1707.06347 (PPO). Defaults: PLR, table 3; the suite minigrid_plr.toml has MiniGrid's.

  Train:     python algos/ppo_plr_minigrid.py --env-id MiniGrid-MultiRoom-N2-S4-v0 --total-timesteps 150000
  Baseline:  the same with --curriculum dr (levels drawn uniformly)
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: see the README of algos/ and benchmark/suites/minigrid_plr.toml.
Differs from the paper: a level is drawn one episode ahead, so that no environment waits for the curriculum; ranks are
among seen levels; a one-step TD error is |r + gamma V' - V|; the first levels are drawn, not taken in order; robust PLR
decides per episode, not per rollout; time limits are bootstrapped from the true last frame.
"""

import ast
import atexit
import ctypes
import fcntl
import hashlib
import importlib.util
import io
import json
import math
import multiprocessing
import operator
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from multiprocessing import connection, resource_tracker
from pathlib import Path
from threading import Lock
from typing import Literal, get_args

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.wrappers.utils import RunningMeanStd
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import nn
from tqdm import tqdm

# ---- 1. Arguments ----------------------------------------------------------------------------------------------------

UnitScore = Literal["policy_entropy", "least_confidence", "min_margin", "learnability", "uniform"]  # in [0, 1]
Score = Literal[UnitScore, "value_l1", "positive_value_loss", "gae", "signed_value_loss", "one_step_td_error",
                "grounded_signed_value_loss", "grounded_positive_value_loss", "max_mc"]  # fmt: skip
Transform = Literal["rank", "power", "softmax", "eps_greedy", "max", "constant", "match", "match_rank"]


@dataclass
class Args:
    # run
    exp_name: str = Path(__file__).stem  # folder under run_dir
    seed: int = 1  # all randomness but the evaluation's derives from it
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one, else cpu
    deterministic: bool = False  # only deterministic GPU kernels (a CPU run always repeats to the bit)
    torch_threads: int = 0  # CPU threads for the network; 0: all cores. The count may change rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 5  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 1  # updates between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # environment
    env_id: str = "MiniGrid-MultiRoom-N2-S4-v0"  # its seeds are the levels
    num_levels: int = 200  # training levels
    start_level: int = 0  # first training level
    num_envs: int = 64  # parallel environments
    num_workers: int = 0  # processes that step them; 0: this process. Both give the same metrics to the bit
    norm_reward: bool = True  # divide rewards by the running deviation of the discounted return, clip to +-10
    reward_gamma: float = 0.99  # discount of that return (the paper's code leaves it apart from gamma)

    # curriculum
    curriculum: Literal["plr", "robust_plr", "dr"] = "plr"  # dr: uniform; robust_plr: unseen levels give no gradient
    plr_score: Score = "value_l1"  # how much there is to learn on a level
    plr_score_transform: Transform = "rank"  # score -> replay weight
    plr_temperature: float = 0.1  # beta: weight ** (1 / beta)
    plr_staleness_coef: float = 0.1  # rho in the paper: share of the draws by staleness
    plr_replay_schedule: Literal["proportionate", "fixed"] = "proportionate"  # P(replay): share seen, plr_replay_prob
    plr_replay_prob: float = 0.5  # P(replay) under the fixed schedule
    plr_rho: float = 1.0  # share of levels to be seen before any replay (1: the released code; 0: the paper's text)
    plr_alpha: float = 1.0  # step size of a level's score

    # algorithm
    total_timesteps: int = 25_000_000  # environment steps, rounded up to whole updates
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
    eval_max_steps: int = 27_000  # evaluation episodes still running after so many steps count as they are
    eval_seed: int = 10_000  # seeds the evaluation's levels and actions, the same for every run and algorithm
    eval_greedy: bool = False  # evaluate the most likely action (--no-eval-greedy: sample, as the paper does)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    num_updates: int = field(init=False)  # derived

    def __post_init__(self):
        check_numbers(
            self, seed=(0, math.inf), torch_threads=(0, 1024), num_workers=(0, self.num_envs),
            start_level=(0, 2**31 - 2 - self.num_levels), eval_interval=(0, math.inf), eval_seed=(0, 2**64 - 1),
            gamma=(0, 1), gae_lambda=(0, 1), reward_gamma=(0, 1 - 1e-9), plr_temperature=(1e-3, math.inf),
            plr_staleness_coef=(0, 1), plr_replay_prob=(0, 1), plr_rho=(0, 1), plr_alpha=(0, 1),
        )  # fmt: skip
        self.num_updates = -(-self.total_timesteps // (self.num_envs * self.num_steps))
        env_spec(self.env_id)
        if self.curriculum != "dr" and self.num_levels > 10**7:
            raise ValueError(f"--num-levels {self.num_levels}: PLR keeps a score a level, for 10^7 at most; or dr")
        if "match" in self.plr_score_transform and self.plr_score not in get_args(UnitScore):
            scores = ", ".join(get_args(UnitScore))
            raise ValueError(f"--plr-score {self.plr_score}: not for {self.plr_score_transform}, which takes {scores}")


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


# ---- 2. Curriculum ---------------------------------------------------------------------------------------------------


# Copied from algos/ppo_plr.py:level_scores
def level_scores(name, rewards, values, next_values, advantages, terminated, logits, gamma, stat):
    """Score of each step (PLR table 1), all (B,). `stat`: the level's best return, or success rate (learnability)."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return {
        "policy_entropy": -(p * np.log(np.where(p > 0, p, 1))).sum(-1) / np.log(max(p.shape[-1], 2)),
        "least_confidence": 1 - p.max(-1),
        "min_margin": 1 - p.max(-1) + np.sort(p)[..., -2:-1].sum(-1),
        "gae": advantages,
        "signed_value_loss": advantages,
        "value_l1": np.abs(advantages),
        "positive_value_loss": np.maximum(advantages, 0),
        "one_step_td_error": np.abs(rewards + gamma * ~terminated * next_values - values),
        "grounded_signed_value_loss": stat - values,
        "grounded_positive_value_loss": np.maximum(stat - values, 0),
        "max_mc": stat - values,
        "learnability": stat * (1 - stat),
        "uniform": np.ones(len(rewards)),
    }[name]


# Copied from algos/ppo_plr.py:replay_weights
def replay_weights(transform, x, seen, temperature, offset=0.0):
    """Distribution over the levels that `seen` marks, (L,) float64; all 0 where these have no mass. Equal ones share
    the mass of their ranks equally; max and eps_greedy take the first."""
    weights, x = np.zeros(len(x)), x[seen]
    if not len(x):
        return weights
    if "match" in transform:
        x = x * (1 - x)
    _, group, sizes = np.unique(-x, return_inverse=True, return_counts=True)
    by_rank = np.arange(1.0, len(x) + 1) ** (-1 / temperature)
    power, best = np.maximum(x, 0) + offset, np.arange(len(x)) == np.argmax(x)
    mass = {
        "rank": (np.add.reduceat(by_rank, np.cumsum(sizes) - sizes) / sizes)[group],
        "power": (power / (power.max() or 1)) ** (1 / temperature),  # the division: no overflow
        "softmax": np.exp((x - x.max()) / temperature),
        "eps_greedy": 0.05 / len(weights) + (1 - 0.05) * best,
        "max": 1.0 * best,
        "constant": np.ones(len(x)),
    }[{"match": "power", "match_rank": "rank"}.get(transform, transform)]
    weights[seen] = mass / (mass.sum() or 1)
    return weights


# Copied from algos/ppo_plr.py:PrioritizedLevelReplay
class PrioritizedLevelReplay:
    """`sample` replays a seen level with probability `replay_probability()`, else takes an unseen one, uniformly.

    `update` scores the levels of a rollout: an episode by the mean over its steps there, which moves its level's score
    by `alpha`. Of levels played more than once the last counts most: by actor, then time, episodes that go on last.
    EPISODE_SCORES are of finished episodes, and know the level's best return (or success rate: return > 0, a mean,
    from 20 episodes on a moving one) with all of this rollout's. max_mc takes the mean over all steps of an episode,
    then over one actor's episodes on the level. match and match_rank rate a success rate p by p (1 - p).
    """

    EPISODE_SCORES = "grounded_signed_value_loss", "grounded_positive_value_loss", "max_mc", "learnability"
    SAVED = "scores", "unseen", "last_drawn", "best", "successes", "episodes", "clock", "oldest", "open"

    def __init__(self, num_levels, rng, **options):
        vars(self).update(options, rng=rng)  # the options are those of Args, without "plr_"
        self.scores, self.last_drawn, self.successes, self.episodes = np.zeros((4, num_levels))
        self.unseen, self.best = np.ones(num_levels, bool), np.full(num_levels, -np.inf)
        self.clock, self.oldest = 0.0, 0.0  # in draws; staleness = clock - last_drawn <= clock - oldest
        self.open = {}  # actor -> its unfinished episode
        self.rank()

    def replay_probability(self):
        """0 below a share `rho` of seen levels, then that share or, if "fixed", `replay_prob` until all are seen."""
        share = len(self.ranked) / len(self.scores)
        if share == 0 or share < self.rho:
            return 0.0
        return self.replay_prob if self.replay_schedule == "fixed" and share < 1 else share

    def sample(self):
        if self.rng.random() < self.replay_probability():
            level = self.replay()
        else:
            level = np.flatnonzero(self.unseen)[int(self.rng.random() * self.unseen.sum())]
        if self.staleness_coef:
            self.clock += 1
            self.last_drawn[level] = self.clock
        return int(level)

    def replay(self):
        """A level by `weights()`. By staleness it is drawn by rejection, which is fast with many levels."""
        if self.staleness_coef and len(self.ranked) > 1 and self.rng.random() < self.staleness_coef:
            bound = self.clock - self.oldest
            for _ in range(64 if bound else 0):
                level = self.ranked[int(self.rng.random() * len(self.ranked))]
                if self.rng.random() < (self.clock - self.last_drawn[level]) / bound:
                    return level
            self.oldest = self.last_drawn[~self.unseen].min()
            sums = np.cumsum(self.stale_weights())
            if sums[-1]:
                return np.searchsorted(sums, self.rng.random() * sums[-1], side="right")
        mass = self.rng.random() * self.sums[-1]
        k = np.searchsorted(self.sums, mass, side="right")
        if "rank" not in self.score_transform:
            return k
        first, stop = (np.searchsorted(self.keys, self.keys[k], side) for side in ("left", "right"))
        below = self.sums[first - 1] if first else 0.0
        share = (mass - below) / (self.sums[stop - 1] - below)  # levels of equal score share the mass of their ranks
        return self.ranked[first + min(int(share * (stop - first)), stop - first - 1)]

    def weights(self):
        """Distribution of a replay, (num_levels,): (1 - staleness_coef) P_score + staleness_coef P_staleness."""
        stale = self.stale_weights()
        c = self.staleness_coef if stale.any() else 0.0
        return (1 - c) * self.score_weights + c * stale

    def stale_weights(self):
        return replay_weights("power", self.clock - self.last_drawn, ~self.unseen, temperature=1.0)

    def rank(self):
        """What the draws need until the next update: seen levels, best first, and the running sums of weights."""
        seen, offset = np.flatnonzero(~self.unseen), 0.0 if self.staleness_coef else 1e-3
        weights = replay_weights(self.score_transform, self.scores, ~self.unseen, self.temperature, offset)
        self.score_weights = weights if weights.any() else ~self.unseen / max(len(seen), 1)
        keys = -self.scores[seen] * (1 - self.scores[seen] if "match" in self.score_transform else 1)
        order = np.argsort(keys, kind="stable")
        self.ranked, self.keys = seen[order], keys[order]
        by_rank = np.arange(1.0, len(seen) + 1) ** (-1 / self.temperature)
        self.sums = np.cumsum(by_rank if "rank" in self.score_transform else self.score_weights)

    def update(self, levels, rewards, values, next_values, advantages, logits, terminated, ended, gamma):
        """After a rollout of T steps by N actors: all (T, N), logits (T, N, A). `ended`: terminated or truncated;
        next_values: V of each step's true successor."""

        def flat(x):  # by actor, then time
            return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

        # A segment is the part of one episode in this rollout.
        starts = np.flatnonzero(flat(np.vstack([np.ones_like(ended[:1]), ended[:-1]])))
        lengths = np.diff(starts, append=levels.size)
        columns = starts // len(levels), flat(levels)[starts], np.logical_or.reduceat(flat(ended), starts)
        segments = list(zip(*(column.tolist() for column in columns)))
        floats = [flat(x).astype(np.float64) for x in (rewards, values, next_values, advantages, logits)]
        episodes = [self.open.pop(a, {"level": k, "return": 0.0, "steps": 0, "mean": 0.0}) for a, k, _ in segments]
        for episode, (_, level, done), reward in zip(episodes, segments, np.add.reduceat(floats[0], starts).tolist()):
            episode["return"] += reward
            if done:
                self.best[level] = max(self.best[level], episode["return"])
                self.episodes[level] = min(self.episodes[level] + 1, 20)
                self.successes[level] += ((episode["return"] > 0) - self.successes[level]) / self.episodes[level]
        stats = self.successes if self.score == "learnability" else self.best
        stats = np.where(columns[2], stats[columns[1]], 0.0)
        inputs = *floats[:4], flat(terminated), floats[4]
        step_scores = level_scores(self.score, *inputs, gamma, np.repeat(stats, lengths))
        means, finished = np.add.reduceat(step_scores, starts) / lengths, defaultdict(list)
        rows = zip(segments, episodes, stats.tolist(), lengths.tolist(), means.tolist())
        for (actor, level, done), episode, stat, steps, mean in rows:
            if self.score == "max_mc":
                episode["mean"] += stat  # it lacks the best return until the end
            if done or self.score == "max_mc" or self.score not in self.EPISODE_SCORES:
                episode["steps"] += steps
                episode["mean"] += (mean - episode["mean"]) * steps / episode["steps"]
            if not done:
                self.open[actor] = episode
                continue
            finished[actor, level].append(episode["mean"])
            self.move(level, np.mean(finished[actor, level]) if self.score == "max_mc" else episode["mean"])
        for episode in self.open.values() if self.score not in self.EPISODE_SCORES else ():
            self.move(episode["level"], episode["mean"])
            episode.update(steps=0, mean=0.0)
        self.rank()

    def move(self, level, score):
        self.unseen[level], self.oldest = False, min(self.oldest, self.last_drawn[level])
        self.scores[level] = (1 - self.alpha) * self.scores[level] + self.alpha * score

    def metrics(self):
        """Over the seen levels; sampling_entropy, in nats, is that of the next draw."""
        seen, replay = ~self.unseen, self.replay_probability()
        p = replay * self.weights() + (1 - replay) * self.unseen / max(self.unseen.sum(), 1)
        scores, p, ages = self.scores[seen] if seen.any() else np.zeros(1), p[p > 0], self.clock - self.last_drawn
        return {"levels_seen": seen.sum(), "replay_prob": replay, "score_mean": scores.mean(),
                "score_max": scores.max(), "staleness_mean": ages[seen].sum() / max(seen.sum(), 1),
                "sampling_entropy": -(p * np.log(p)).sum()}  # fmt: skip

    def state_dict(self):
        return {name: getattr(self, name) for name in self.SAVED}

    def load_state_dict(self, state):
        vars(self).update({name: x.numpy().copy() if torch.is_tensor(x) else x for name, x in state.items()})
        self.rank()


# ---- 3. Queue --------------------------------------------------------------------------------------------------------


# Copied from algos/ppo_plr.py:SyncQueue
class SyncQueue:
    """Tasks (two numbers) to and finished episodes from `num_envs` environments, in shared memory: a ring of `prefetch`
    tasks and a ring of `capacity` records for each. Nothing is dropped: a full ring holds up its producer, an empty one
    its consumer, for `timeout` seconds at most. Workers get the queue as an argument of their Process. No locks, which
    a killed process could hold: a ring has one writer and one reader, each with an int64 that it alone counts up, after
    the payload. The memory has no name: nothing stays in /dev/shm."""

    def __init__(self, num_envs, prefetch=2, capacity=64, timeout=60.0):
        record = [("env_id", "i8"), ("task", "i8", 2), ("episode_return", "f8"), ("length", "i8"), ("progress", "f8")]
        rings = [("tasks", "i8", (prefetch, 2)), ("records", record, capacity)]
        counters = [(name, "i8") for name in ("put", "got", "sent", "drained")]
        self.dtype = np.dtype(counters + rings, align=True)
        self.memory, self.timeout = multiprocessing.RawArray("B", num_envs * self.dtype.itemsize), timeout

    @property
    def rings(self):  # a view: only the memory itself can go to another process
        return np.frombuffer(self.memory, self.dtype)

    def put_task(self, env_id, task):
        """Learner: appends a task to an environment's ring."""
        self.append(env_id, "tasks", "put", "got", task, "the environment has taken no task")

    def get_task(self, env_id):
        """Worker: the next task (2,)."""
        ring = self.rings[env_id]
        self.wait(env_id, lambda: ring["put"] > ring["got"], "the learner has put no task")
        task = ring["tasks"][ring["got"] % len(ring["tasks"])].copy()
        self.fence()
        ring["got"] += 1
        return task

    def put_episode(self, env_id, *episode):
        """Worker: appends the record of a finished episode: task, return, length, progress."""
        self.append(env_id, "records", "sent", "drained", (env_id, *episode), "the learner has drained no record")

    def drain(self):
        """Learner: all waiting records, a structured array (k,), k >= 0, by environment and in order of arrival."""
        sent = self.rings["sent"].copy()
        self.fence()
        records = self.between("records", self.rings["drained"], sent)
        self.fence()
        self.rings["drained"] = sent
        return records

    def state_dict(self):
        """The tasks waiting in the rings, by environment, which stand still. All records are drained."""
        put, got = self.rings["put"], self.rings["got"]
        return {"waiting": put - got, "tasks": self.between("tasks", got, put)}

    def load_state_dict(self, state):  # into a new queue
        for env_id, task in zip(np.repeat(np.arange(len(self.rings)), state["waiting"]), state["tasks"], strict=True):
            self.put_task(env_id, task)

    def append(self, env_id, name, head, tail, entry, stuck):
        ring = self.rings[env_id]
        size = len(ring[name])
        self.wait(env_id, lambda: ring[head] - ring[tail] < size, f"{stuck}, its ring of {size} is full,")
        ring[name][ring[head] % size] = entry
        self.fence()
        ring[head] += 1

    def between(self, name, start, stop):
        """Copies of the entries start[i]:stop[i] of each environment's ring."""
        ring, count = self.rings[name], stop - start
        place = np.arange(count.sum()) + np.repeat(stop - count.cumsum(), count)
        return ring[np.repeat(np.arange(len(ring)), count), place % ring.shape[1]]

    def wait(self, env_id, ready, stuck):
        """Until `ready()`, by naps of up to 1 ms."""
        start = time.monotonic()
        while not ready():
            if (waited := time.monotonic() - start) > self.timeout:
                raise TimeoutError(f"environment {env_id}: {stuck} for {waited:.1f} s")
            time.sleep(min(waited / 100, 1e-3))
        self.fence()

    @staticmethod
    def fence():
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


def make_env(env_id):
    return gym.make("minigrid:" + env_id.removeprefix("minigrid:"), disable_env_checker=True)


def env_spec(env_id):
    """Shape of the image and number of actions. ValueError if there is no such environment."""
    if importlib.util.find_spec("minigrid") is None:
        raise ValueError(f"--env-id {env_id} needs minigrid: pip install minigrid==3.2.0")
    try:
        env = make_env(env_id)
        return env.observation_space["image"].shape, int(env.action_space.n)
    except (gym.error.Error, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"--env-id {env_id} has no image or no discrete actions: {error}") from error


def notice_equal_levels(make_levels, start_level, num_levels):
    """Says so if the first levels all begin with the same frame: the environment may ignore its level."""
    slots = make_levels(min(num_levels, 10))
    for i in range(len(slots.obs)):
        slots.set_level(i, start_level + i)
    if len(slots.obs) > 1 and (slots.obs == slots.obs[0]).all():
        last = start_level + len(slots.obs) - 1
        print(f"note: levels {start_level} to {last} all begin with the same frame", file=sys.stderr)


class MiniGridLevels:
    """`num` MiniGrid environments, with any level at any episode: set_level(i, level) makes obs[i] its first frame.

    step(actions (num,)) -> obs uint8, reward float32, terminated, truncated. obs (num, H, W, C) is live. A slot that
    ended waits for set_level; solved[i] tells whether it reached its goal. `at`: the slot worked on, for messages.
    A level is the seed of `reset`, the state of a slot its level and the actions since. obs is the egocentric image;
    direction and mission are left out, so Fetch, GoToDoor and the like hide their goal.
    """

    def __init__(self, env_id, num):
        self.envs = [make_env(env_id) for _ in range(num)]
        self.obs = np.zeros((num, *self.envs[0].observation_space["image"].shape), np.uint8)
        self.history, self.at = [[] for _ in range(num)], 0

    def set_level(self, i, level):
        self.history[i] = [int(level)]
        np.copyto(self.obs[i], self.envs[i].reset(seed=int(level))[0]["image"])  # which refuses floats

    def play(self, i, action):
        self.at = i
        self.history[i].append(action)
        frame, *outcome, _ = self.envs[i].step(action)
        np.copyto(self.obs[i], frame["image"])
        return outcome

    def step(self, actions):
        outcomes = zip(*(self.play(i, action) for i, action in enumerate(actions.tolist())))
        reward, terminated, truncated = map(np.array, outcomes, (np.float32, bool, bool))
        if not np.isfinite(reward).all():
            self.at = int((~np.isfinite(reward)).argmax())
            raise ValueError(f"the reward {reward[self.at]} is not finite")
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


class LevelEnvs:
    """Environments `env_ids` (a range) whose tasks come from `queue` as episodes start; level = start_level + task[0].

    step(actions (N,)) -> obs (N, *obs_shape) uint8, reward (N,) float32, terminated, truncated (N,) bool, info.
    Where an episode ends, its raw return and length go to `queue` and the next level starts in the same step: obs is
    its first frame, info["final_obs"] the last one of the episode. info["task"] (N, 2) are the tasks that the rewards
    belong to.
    """

    EPISODE = ["playing", "return", "length"]  # the task of the running episode, its return and steps so far

    # Copied from algos/ppo_plr.py:LevelEnvs.__init__
    def __init__(self, make_levels, obs_shape, queue, env_ids, start_level, records=None):
        self.queue, self.env_ids, self.start_level = queue, env_ids, start_level
        self.records = np.zeros(len(env_ids), self.layout(obs_shape)) if records is None else records
        self.slots = make_levels(len(env_ids))

    @classmethod
    def layout(cls, obs_shape):
        """The dtype of all that is known of one environment: the whole can then be shared memory."""
        fields = [(name, np.uint8, obs_shape) for name in ("obs", "final_obs")]
        fields += [("reward", np.float32), ("terminated", bool), ("truncated", bool)]
        fields += [("task", int, 2), ("playing", int, 2), ("return", float), ("length", int)]
        return np.dtype(fields, align=True)

    def step(self, actions):
        self.run("advance", actions)
        names = "obs", "reward", "terminated", "truncated", "task", "final_obs"
        *outputs, task, final_obs = (self.records[name].copy() for name in names)
        return *outputs, {"task": task, "final_obs": final_obs}

    # Copied from algos/ppo_plr.py:LevelEnvs.state_dict
    def state_dict(self):
        """All that the next steps depend on, to the bit; "slots" is a list of N uint8 arrays."""
        return {"slots": self.run("slots.get_state")} | {name: self.records[name].copy() for name in self.EPISODE}

    # Copied from algos/ppo_plr.py:LevelEnvs.load_state_dict
    def load_state_dict(self, state):
        for name in self.EPISODE:
            self.records[name] = state[name]
        self.run("slots.set_state", state["slots"])

    # Copied from algos/ppo_plr.py:LevelEnvs.run
    def run(self, method, items=()):
        """Calls a method with `items` (one an environment); an error names the environment and its task."""
        try:
            answer = operator.attrgetter(method)(self)(*[items] if len(items) else ())
        except Exception as error:
            where = f"environment {self.env_ids[self.slots.at]}, task {self.records['playing'][self.slots.at, 0]}"
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        self.records["obs"] = self.slots.obs
        return answer

    # Copied from algos/ppo_plr.py:LevelEnvs.start
    def start(self, ended=None):
        for i in range(len(self.env_ids)) if ended is None else ended:
            self.slots.at, task = i, self.queue.get_task(self.env_ids[i])
            self.records[self.EPISODE][i] = tuple(task), 0, 0
            self.slots.set_level(i, self.start_level + task[0])

    def advance(self, actions):
        r = self.records
        obs, r["reward"], r["terminated"], r["truncated"] = self.slots.step(actions)
        r["task"], r["final_obs"] = r["playing"], obs
        r["return"] += r["reward"]
        r["length"] += 1
        ended = np.flatnonzero(r["terminated"] | r["truncated"])
        for i in ended:
            self.queue.put_episode(self.env_ids[i], *r[self.EPISODE][i].item(), float(self.slots.solved[i]))
        self.start(ended)

    # Copied from algos/ppo_plr.py:LevelEnvs.close
    def close(self):
        self.slots.close()


# Copied from algos/ppo_plr.py:env_worker
def env_worker(conn, memory, dtype, rows, make_envs):
    """A process of WorkerEnvs: answers the calls that come through `conn`, an error by its traceback."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with its parent, even when it is stopped
    if os.getppid() != multiprocessing.parent_process().pid:  # it has ended already
        return
    try:
        envs = make_envs(records=np.frombuffer(memory, dtype)[rows])
        while True:
            conn.send(envs.run(*conn.recv()))
    except BaseException:  # a game's sys.exit(0), too
        with suppress(OSError):
            conn.send(traceback.format_exc())


# Copied from algos/ppo_plr.py:WorkerEnvs
class WorkerEnvs(LevelEnvs):
    """LevelEnvs in `num_workers` processes, each with a slice of the environments: the same results to the bit.

    Spawned: a fork would copy the locks of torch's and the loggers' threads in whatever state they are. The memory has
    no name, so nothing can stay in /dev/shm. A worker that raises, dies or gives no answer is a RunError of `run`.
    """

    TIMEOUT_S = 90  # for a step: above the queue's, whose error says more; ten times that to start or to restore

    def __init__(self, make_levels, obs_shape, queue, env_ids, start_level, num_workers, check=lambda: None):
        dtype, context = self.layout(obs_shape), multiprocessing.get_context("spawn")
        memory = context.RawArray("B", dtype.itemsize * len(env_ids))
        self.env_ids, self.check, self.records, self.workers = env_ids, check, np.frombuffer(memory, dtype), []
        atexit.register(self.close)
        # Workers inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        signals = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        cuts = [len(env_ids) * k // num_workers for k in range(num_workers + 1)]
        for rows in map(slice, cuts, cuts[1:]):
            make_envs = partial(LevelEnvs, make_levels, obs_shape, queue, env_ids[rows], start_level)
            conn, remote = context.Pipe()
            process = context.Process(target=env_worker, args=(remote, memory, dtype, rows, make_envs))
            self.workers.append((conn, process, rows))
            process.start()
            remote.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def run(self, method, items=()):
        for conn, _, rows in self.workers:
            with suppress(OSError):  # it has ended: its last words, or its exit code, say why
                conn.send((method, items[rows]))
        answers, waiting = {}, {conn: rest for conn, *rest in self.workers}
        limit = seconds = self.TIMEOUT_S * (1 if method == "advance" else 10)
        while waiting:
            ready = connection.wait(waiting, 1)
            if not ready:
                self.check()
                seconds -= 1  # counted so: a Ctrl-Z that stops all is no time-out
            for conn in ready if seconds else list(waiting):
                process, rows = waiting.pop(conn)
                try:
                    answer = conn.recv() if seconds else f"gave no answer for {limit} s"
                except (EOFError, OSError):
                    process.join(2)
                    answer = f"died with exit code {process.exitcode}"
                if isinstance(answer, str):
                    tasks = self.records["playing"][rows, 0].tolist()
                    self.close()
                    raise RunError(f"worker of environments {self.env_ids[rows]}, tasks {tasks}: {answer}")
                answers[rows.start] = answer
        return [item for start in sorted(answers) for item in answers[start] or ()]

    def close(self):
        for _, process, _ in self.workers:
            process.kill()
            process.join()
        self.workers.clear()
        atexit.unregister(self.close)  # last: Ctrl-C may have cut this short


# Copied from algos/ppo_plr.py:RewardScaler
class RewardScaler(RunningMeanStd):
    """Divides rewards by the running deviation of the discounted return of an episode and clips them to +-10."""

    def __init__(self, num_envs, gamma):
        super().__init__(shape=())
        self.returns, self.gamma = np.zeros(num_envs), gamma

    def __call__(self, reward, ended):
        self.returns = self.returns * self.gamma + reward
        self.update(self.returns)
        self.returns[ended] = 0
        return np.clip(reward / np.sqrt(self.var + 1e-8), -10, 10)

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update({name: x.numpy() if torch.is_tensor(x) else x for name, x in state.items()})


# ---- 5. Agent and mathematics ----------------------------------------------------------------------------------------


# Copied from algos/ppo_plr.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    """Orthogonal weights for linear layers, xavier for convolutions (the PLR code's choice); zero biases."""
    if isinstance(layer, nn.Conv2d):
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value heads on three 2 x 2 convolutions: obs (B, H, W, C) uint8 -> logits (B, A), values (B,)."""

    SCALE = 10  # of the observations, small numbers

    def __init__(self, obs_shape, num_actions):
        super().__init__()
        height, width, channels = obs_shape
        layers = []
        for shape in ((channels, 16, 2), (16, 32, 2), (32, 64, 2)):
            layers += [layer_init(nn.Conv2d(*shape)), nn.ReLU(True)]
        layers.append(nn.Flatten())
        size = nn.Sequential(*layers)(torch.zeros(1, channels, height, width)).shape[1]
        self.network = nn.Sequential(*layers, layer_init(nn.Linear(size, 256)), nn.ReLU(True))
        self.policy, self.value = layer_init(nn.Linear(256, num_actions), 0.01), layer_init(nn.Linear(256, 1), 1.0)

    # Copied from algos/ppo_plr.py:Agent.forward
    def forward(self, obs):
        features = self.network(obs.permute(0, 3, 1, 2).float().div_(self.SCALE))
        return self.policy(features), self.value(features).squeeze(-1)

    # Copied from algos/ppo_plr.py:Agent.act
    @torch.no_grad()
    def act(self, obs, generator=None, forward=None):
        """obs (B, H, W, C) -> actions, log-probabilities, values (B,), logits (B, A). No generator: the likeliest."""
        logits, value = (forward or self)(obs)
        require_finite(logits=logits, value=value)
        logprobs = logits.log_softmax(-1)
        action = logits.argmax(-1)
        if generator is not None:
            action = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        return action, logprobs.gather(1, action[:, None])[:, 0], value, logits

    # Copied from algos/ppo_plr.py:Agent.evaluate_actions
    def evaluate_actions(self, obs, actions):
        """Log-probabilities of `actions`, entropies, values, all (B,), with gradients."""
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        return logprobs.gather(1, actions[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1), value


# Copied from algos/ppo_plr.py:Pieces
class Pieces:
    """Learns from pieces of a batch, each worked off by one thread of a pool: faster than all threads on one operator.
    Pieces and the order of their sums are fixed, so that the number of threads changes no bit. A GPU takes a minibatch
    in one piece."""

    def __init__(self, agent, size, threads):
        self.agent, self.parameters, self.threads = agent, list(agent.parameters()), threads
        self.size = size if self.parameters[0].device.type == "cpu" else 2**31
        self.pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        torch.set_num_threads(1)  # all the parallelism is here

    def forward(self, obs):
        """logits (B, A), values (B,). For the small batches of a rollout, all threads on one operator are faster."""
        torch.set_num_threads(self.threads)
        outputs = self.agent(obs)
        torch.set_num_threads(1)
        return outputs

    def gradients(self, flat, minibatch, coefs):
        """Leaves the gradient of the minibatch's mean loss in the parameters; returns the parts of the loss."""
        pieces = np.array_split(minibatch, math.ceil(len(minibatch) / self.size))
        shares, parts = zip(*self.pool.map(partial(self.piece, flat, coefs, len(minibatch)), pieces))
        for parameter, *gradients in zip(self.parameters, *shares):
            parameter.grad = reduce(torch.add, gradients)
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def piece(self, flat, coefs, total, rows):
        """One piece's share of a minibatch of `total` samples: gradients and parts of the loss."""
        rows = torch.as_tensor(rows, device=flat["obs"].device)
        b = {name: tensor.index_select(0, rows) for name, tensor in flat.items()}  # far faster than tensor[rows]
        new = self.agent.evaluate_actions(b.pop("obs"), b.pop("actions"))
        loss, parts = ppo_loss(*new, *(b[k] for k in ("old_logprob", "old_value", "advantage", "returns")), *coefs)
        share = len(rows) / total
        return torch.autograd.grad(loss * share, self.parameters), {k: v.detach() * share for k, v in parts.items()}


# Copied from algos/ppo_plr.py:keep_freed_memory
def keep_freed_memory():
    """Keeps glibc from handing the activations' memory back to the kernel after each piece, to fault it in again."""
    with suppress(OSError, AttributeError):  # another C library has no such switch, nor the need
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-8, 1)):  # mmap threshold, trim threshold, arenas
            mallopt(option, value)


# Copied from algos/ppo.py:gae
def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): arrays (T, N) -> advantages, returns (T, N).

    `next_values` is V of each step's true successor: the bootstrap at a truncation and at the end of the rollout.
    Terminated cuts bootstrap and trace, truncated the trace alone; both at once mean terminated.
    """
    rewards, values, next_values = (np.asarray(x) * np.float32(1) for x in (rewards, values, next_values))  # no int
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
    ratio = log_ratio.clamp(max=88).exp()  # exp(89) is inf, its gradient NaN even where clipped
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


# ---- 6. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


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
    if isinstance(state, np.ndarray):
        return torch.from_numpy(state.copy())
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    return state.item() if isinstance(state, np.generic) else state


# Copied from algos/ppo.py:require_finite
def require_finite(**tensors):
    """RunError that names the first tensor with a value that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise RunError(f"{name} is not finite. The last good checkpoint is kept; try a lower --learning-rate")


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
            raise RunError(f"{result} is damaged: {error}. Remove it: the same command then makes it anew") from error
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
            raise RunError(f"{self.dir} is in use by {self.lock.read()}: wait, or choose another --run-dir") from None
        except OSError as error:
            raise RunError(f"cannot write {self.dir}/lock: {error}. Choose another --run-dir") from error
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
        super().__exit__(kind, error, traceback)
        if stopped and self.state is not None:
            self.save()
            print(f"{signal.Signals(self.signals[0]).name}: the same command goes on from {self.dir}", file=sys.stderr)
        self.status("finished" if kind is None else "interrupted" if stopped else "failed")
        for number, handler in () if stopped else self.handlers.items():  # a second signal does not cut an exit short
            signal.signal(number, handler)
        if isinstance(error, (OSError, ImportError, MemoryError)) or re.search("(allocate|out of) memory", str(error)):
            raise RunError(f"{type(error).__name__}: {error}") from error
        if kind is SystemExit and not error.code:
            raise RunError("the program was ended before its result (by sys.exit in an environment?)") from error

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
            raise RunError(f"cannot write {path}: {error}. What was there before is intact") from error

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
            raise RunError(f"{self.dir} holds no checkpoint to go on from: remove it, or train with --resume auto")
        if state is not new and self.args.resume == "never":
            raise RunError(f"--resume never, but {self.dir} holds a run: remove it or choose another --run-dir")
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
                raise RunError(f"--track: {' '.join(str(error).split())}") from error
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

    def finish(self, step, row):
        """result.json, written last: its presence means that the run is complete."""
        evals = {key: value for key, value in row.items() if key.startswith("eval")}
        result = {"global_step": step, "wall_s": time.monotonic() - self.begun} | evals
        self.write("result.json", json.dumps(result, indent=1))
        print(f"\nfinished: {self.dir}\n{json.dumps(result)}")
        return result


# ---- 7. Evaluation and training --------------------------------------------------------------------------------------


# Copied from algos/ppo_plr.py:evaluate
def evaluate(agent, args, make_levels, episodes, forward=None, check=lambda: None):
    """Plays `episodes` levels of each split once, in environments of their own, seeded by args.eval_seed alone.

    "eval": held-out levels, drawn from all outside the training range; "eval_train": training levels. Returns a row per
    episode (split, level, raw return, length, solved). Touches no training state. `check` may end it.
    """
    rng, device, n = np.random.default_rng(args.eval_seed), next(agent.parameters()).device, args.num_levels
    generator, rows = torch.Generator(device).manual_seed(args.eval_seed), []
    held_out = rng.integers(2**31 - 1 - n, size=episodes)
    held_out += np.where(held_out >= args.start_level, n, 0)
    order = rng.permutation(n) if n <= 10**6 else rng.choice(n, episodes, replace=False)  # which makes no list of all
    training = args.start_level + order[np.arange(episodes) % len(order)]
    for split, levels in (("eval", held_out), ("eval_train", training)):
        with closing(make_levels(episodes)) as slots:
            actions, returns = np.zeros(episodes, np.int32), np.zeros(episodes)
            length, running, ended = 0, np.ones(episodes, bool), np.ones(episodes, bool)
            while running.any():
                check()
                length += 1
                for i in np.flatnonzero(ended):
                    slots.set_level(i, levels[i])
                batch = torch.as_tensor(slots.obs[running]).to(device)
                actions[running] = agent.act(batch, None if args.eval_greedy else generator, forward)[0].cpu().numpy()
                _, reward, terminated, truncated = slots.step(actions)
                returns, ended = returns + reward * running, terminated | truncated
                over = running & (ended | (length == args.eval_max_steps))
                for i in np.flatnonzero(over):
                    rows.append({"split": split, "level": int(levels[i]), "return": float(returns[i]),
                                 "length": length, "solved": bool(slots.solved[i])})  # fmt: skip
                    if not ended[i]:
                        print(f"note: level {levels[i]} of {split} was cut off at --eval-max-steps", file=sys.stderr)
                running &= ~over
    return rows


# Copied from algos/ppo_plr.py:log_evaluation
def log_evaluation(run, step, rows):
    """Means of evaluation rows by split, and the gap between the splits."""
    means = {}
    for split in ("eval", "eval_train"):
        part = [row for row in rows if row["split"] == split]
        means |= run.log_eval(step, part, split) | {f"{split}/solve_rate": np.mean([row["solved"] for row in part])}
    means["eval/generalization_gap"] = means["eval_train/return_mean"] - means["eval/return_mean"]
    return {name: float(x) for name, x in means.items()}


# Copied from algos/ppo_plr.py:Dealer
class Dealer:
    """The learner's end of the queue: deals tasks, (level, whether it had no score when it was drawn), one episode
    ahead of every environment, and takes in what comes of them. Without a curriculum levels are drawn uniformly."""

    def __init__(self, args, queue, seed):
        self.queue, self.num_levels, self.rng = queue, args.num_levels, np.random.default_rng(seed)
        options = {name.removeprefix("plr_"): x for name, x in vars(args).items() if name.startswith("plr_")}
        self.plr = None if args.curriculum == "dr" else PrioritizedLevelReplay(args.num_levels, self.rng, **options)
        self.episodes, self.finished = 0, []  # finished: (return, length)

    def deal(self, env_id):
        level = self.plr.sample() if self.plr else int(self.rng.integers(self.num_levels))
        self.queue.put_task(env_id, (level, self.plr is not None and self.plr.unseen[level]))

    def collect(self):
        """Takes in the episodes that finished, in the order of the environments, and deals a task for each."""
        for env_id, _, episode_return, length, _ in self.queue.drain().tolist():
            self.finished.append((episode_return, length))
            self.deal(env_id)

    def pop_episodes(self):
        """Means of raw return and length over the episodes that finished since the last call, and the number of all."""
        returns, lengths = np.mean(self.finished, axis=0) if self.finished else (math.nan, math.nan)
        self.episodes, self.finished = self.episodes + len(self.finished), []
        return {"charts/episodic_return": returns, "charts/episodic_length": lengths, "charts/episodes": self.episodes}

    def state_dict(self):
        state = {"episodes": self.episodes, "finished": self.finished, "queue": self.queue.state_dict()}
        return state | {"rng": self.rng.bit_generator.state, "plr": self.plr and self.plr.state_dict()}

    def load_state_dict(self, state):
        self.episodes, self.finished, self.rng.bit_generator.state = state["episodes"], state["finished"], state["rng"]
        self.queue.load_state_dict(state["queue"])
        if self.plr:
            self.plr.load_state_dict(state["plr"])


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
            raise RunError(f"--device {device}, but torch {torch.__version__} finds none: use --device cpu")
        random = Randomness(args.seed, device)
        # End of copy
        keep_freed_memory()
        obs_shape, num_actions = env_spec(args.env_id)
        agent = Agent(obs_shape, num_actions).to(device, memory_format=torch.channels_last)
        pieces = Pieces(agent, args.micro_batch_size, torch.get_num_threads())
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

        T, N = args.num_steps, args.num_envs
        queue = SyncQueue(N)
        dealer, scale_reward = Dealer(args, queue, random.curriculum), RewardScaler(N, args.reward_gamma)
        make_levels = partial(MiniGridLevels, args.env_id)
        notice_equal_levels(make_levels, args.start_level, args.num_levels)
        options = make_levels, obs_shape, queue, range(N), args.start_level
        envs = WorkerEnvs(*options, args.num_workers, run.check_signals) if args.num_workers else LevelEnvs(*options)
        run.enter_context(closing(envs))

        obs = torch.zeros((T, N, *obs_shape), dtype=torch.uint8, device=device)
        actions = torch.zeros((T, N), dtype=torch.int64, device=device)
        logprobs, logits = torch.zeros((T, N), device=device), torch.zeros((T, N, num_actions), device=device)
        rewards, values, cut_values = np.zeros((3, T, N), np.float32)
        (terminated, truncated), tasks = np.zeros((2, T, N), bool), np.zeros((T, N, 2), np.int64)

        parts = {"random": random, "envs": envs, "dealer": dealer, "scale_reward": scale_reward}
        first_update, global_step, row = run.restore(agent=agent, optimizer=optimizer, **parts)
        if args.eval_only:
            rows = evaluate(agent, args, make_levels, args.final_eval_episodes, pieces.forward, run.check_signals)
            means = log_evaluation(run, global_step, rows)
            print(json.dumps(means))
            return means
        if not run.resumed:  # the first episode's level and the one after
            for env_id in np.repeat(np.arange(N), 2).tolist():
                dealer.deal(env_id)
            envs.run("start")
        next_obs = torch.as_tensor(envs.records["obs"].copy()).to(device)

        for update in range(first_update, args.num_updates):
            run.checkpoint(update, global_step, row)
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / args.num_updates)

            # Collect: T steps of every environment. An episode that ends is followed by the level dealt for it.
            begun = time.perf_counter()
            for t in range(T):
                obs[t] = next_obs
                actions[t], logprobs[t], value, logits[t] = agent.act(next_obs, random.actions, pieces.forward)
                values[t] = value.cpu().numpy()
                raw, reward, terminated[t], truncated[t], info = envs.step(actions[t].cpu().numpy())
                tasks[t] = info["task"]
                rewards[t] = scale_reward(reward, terminated[t] | truncated[t]) if args.norm_reward else reward
                next_obs = torch.as_tensor(raw).to(device)
                cut = truncated[t] & ~terminated[t]
                if cut.any():  # next_obs belongs to the next episode: bootstrap from the one that was cut off
                    final_obs = torch.as_tensor(info["final_obs"][cut]).to(device)
                    cut_values[t, cut] = agent.act(final_obs)[2].cpu().numpy()
                dealer.collect()
            global_step += T * N

            # Advantages.
            next_values = np.vstack([values[1:], agent.act(next_obs, forward=pieces.forward)[2].cpu().numpy()])
            next_values = np.where(truncated & ~terminated, cut_values, next_values)
            advantages, returns = gae(rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda)

            # ---- PLR: this block is the method (with Dealer.deal and PrioritizedLevelReplay) ----
            if dealer.plr:
                dealer.plr.update(tasks[..., 0], rewards, values, next_values, advantages, logits.cpu().numpy(),
                                  terminated, terminated | truncated, args.gamma)  # fmt: skip
            learns = tasks[..., 1] == 0 if args.curriculum == "robust_plr" else np.ones((T, N), bool)
            rows = np.flatnonzero(learns)  # robust PLR learns from replayed levels alone
            # ---- end of the method ----
            collected = time.perf_counter()

            # Optimise. A minibatch is worked off in small pieces whose gradients add up to its own.
            flat = {"obs": obs.flatten(0, 1), "actions": actions.flatten(), "old_logprob": logprobs.flatten()}
            for name, array in (("old_value", values), ("advantage", advantages), ("returns", returns)):
                flat[name] = torch.as_tensor(array.reshape(-1), dtype=torch.float32).to(device)
            if args.norm_adv and len(rows) > 1:
                used = flat["advantage"][rows]
                flat["advantage"] = (flat["advantage"] - used.mean()) / (used.std() + 1e-5)
            coefs = args.clip_coef, args.clip_vloss, args.ent_coef, args.vf_coef
            losses, epochs = [], [random.minibatches.permutation(rows) for _ in range(args.update_epochs)]
            minibatches = (part for epoch in epochs for part in np.array_split(epoch, args.num_minibatches))
            for minibatch in filter(len, minibatches):
                loss = pieces.gradients(flat, minibatch, coefs)
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                if not torch.isfinite(grad_norm):
                    require_finite(**flat, **loss, gradient=grad_norm)
                optimizer.step()
                losses.append({**loss, "grad_norm": grad_norm})
                if args.target_kl is not None and loss["approx_kl"] > args.target_kl:
                    break
            value = agent.act(next_obs, forward=pieces.forward)[2]  # before a checkpoint can hold them
            require_finite(**dict(agent.named_parameters()), squared_value=value**2)

            # Log and evaluate.
            last = update + 1 == args.num_updates
            columns = {name: [loss[name] for loss in losses] for name in losses[0]} if losses else {}
            row = {f"losses/{name}": torch.stack(column).mean().item() for name, column in columns.items()}
            row |= {f"curriculum/{name}": value for name, value in dealer.plr.metrics().items()} if dealer.plr else {}
            row |= {"losses/explained_variance": explained_variance(values, returns), "charts/update": update + 1,
                    "losses/gradient_steps": len(losses), "curriculum/learning_share": learns.mean(),
                    "charts/learning_rate": optimizer.param_groups[0]["lr"], "perf/collect_s": collected - begun,
                    "perf/update_s": time.perf_counter() - collected}  # fmt: skip
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                episodes = args.final_eval_episodes if last else args.eval_episodes
                begun = time.perf_counter()
                rows = evaluate(agent, args, make_levels, episodes, pieces.forward, run.check_signals)
                row |= log_evaluation(run, global_step, rows) | {"perf/eval_s": time.perf_counter() - begun}
            if last or (update + 1) % args.log_interval == 0:
                run.log(global_step, dealer.pop_episodes() | row)

        # Copied from algos/ppo.py:region(finish)
        run.checkpoint(args.num_updates, global_step, row, last=True)
        return run.finish(global_step, row)
        # End of copy


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
