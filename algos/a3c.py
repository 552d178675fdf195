"""Asynchronous advantage actor-critic (A3C): workers send gradients, a server applies each as it arrives.

Papers: Mnih et al. 2016, arXiv:1602.01783; gradients sent to a server as in the Lamarckian platform (Table I).
Gymnasium environments with vector observations and discrete actions, and `VectorPong` against a scripted player.

  Train:     python algos/a3c.py --env-id CartPole-v1 --num-workers 2
  Pong:      python algos/a3c.py --env-id VectorPong --num-envs 32 --num-steps 8 --optimizer adam --learning-rate 2e-3
             --gamma 0.97 --estimator gae --gae-lambda 0.9 --ent-coef 3e-4 --total-timesteps 3000000
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured, 2 workers on 2 cores: the first command 500.0 in 20 greedy episodes, 3 of 3 seeds, 40 CPU-seconds; the second
10.0, 15 of 20 points, on one seed, 94 CPU-seconds (commit 220d087).

A worker takes the newest weights, makes an unroll and its gradient, and waits until that has arrived. A gradient's
staleness is the number of optimiser steps between the weights that it was made with and those that it changes: with n
workers about n - 1 in the mean. RUN/staleness.jsonl has a histogram a row of metrics.jsonl, RUN/staleness.png all.
With --num-workers 0 the server makes the gradients itself: such a run repeats, and resumes, to the bit. With workers
the order of the gradients is the machine's: no run repeats, and a resumed one begins new episodes.

Differs from the paper: processes and a server instead of threads that write into shared weights without locks; several
environments a worker, so that the network sees a batch; losses are means over the unroll, not sums; separate networks
for policy and value; truncation is not termination (the value of the true final observation is bootstrapped).
"""

import ast
import ctypes
import fcntl
import hashlib
import importlib.util
import io
import json
import math
import mmap
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
import traceback
import weakref
from array import array
from collections import Counter
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from threading import Lock
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
    torch_threads: int = 1  # CPU threads of the server (a worker has one); 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 200  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 20  # updates between rows of metrics.jsonl and staleness.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # environment
    env_id: str = "CartPole-v1"  # VectorPong, or a Gymnasium id, also module:id; vector observations, discrete actions
    num_envs: int = 8  # environments of a worker, side by side

    # algorithm
    total_timesteps: int = 500_000  # environment steps of all workers; rounded up to whole unrolls
    num_workers: int = 2  # processes that make gradients; 0: the server does, and the run repeats to the bit
    max_staleness: int = 0  # gradients from weights older than so many updates are dropped; 0: all are used
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"  # its statistics are the server's, shared by all workers
    learning_rate: float = 1e-3  # step size at the start
    anneal_lr: bool = True  # linearly to 0 at total_timesteps (which early updates then depend on)
    rmsprop_decay: float = 0.99  # of the mean squared gradient
    rmsprop_eps: float = 1e-5  # added to it, inside the root
    num_steps: int = 16  # steps of an environment in an unroll, of which a gradient is made
    gamma: float = 0.99  # discount
    estimator: Literal["nstep", "gae"] = "nstep"  # of advantages: n-step returns to the unroll's end, or GAE
    gae_lambda: float = 0.95  # GAE trace decay
    ent_coef: float = 0.01  # entropy bonus
    vf_coef: float = 0.5  # value loss weight
    max_grad_norm: float = 0.5  # gradient norm limit

    # evaluation
    eval_interval: int = 0  # updates between evaluations; 0: only at the end
    eval_episodes: int = 20  # episodes per evaluation
    eval_max_steps: int = 27_000  # evaluation episodes still running after so many steps count as they are
    eval_seed: int = 10_000  # seeds the evaluation episodes, the same for every run and algorithm
    eval_greedy: bool = True  # evaluate the most likely action (--no-eval-greedy: sample)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    def __post_init__(self):
        at_least_0 = dict.fromkeys(("seed", "num_workers", "max_staleness", "eval_interval"), (0, math.inf))
        check_numbers(self, eval_seed=(0, 2**64 - 1), torch_threads=(0, 1024), gamma=(0, 1), gae_lambda=(0, 1),
                      rmsprop_decay=(0, 1), **at_least_0)  # fmt: skip
        self.batch_size = self.num_envs * self.num_steps
        self.num_updates = -(-self.total_timesteps // self.batch_size)
        try:
            if self.env_id != "VectorPong":
                gym.wrappers.FlattenObservation(gym.make(self.env_id)).close()
        except (gym.error.Error, ImportError, NotImplementedError) as error:  # the last one without a message
            raise ValueError(f"--env-id {self.env_id}: {str(error) or 'observations that are no numbers'}") from error


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


# ---- 2. Environments -------------------------------------------------------------------------------------------------


# Copied from algos/ppo.py:Envs
class Envs:
    """Gymnasium environments in this process. Each draws a seed for every episode from its own SeedSequence.

    step(actions) -> obs, reward, terminated, truncated, info, arrays over num_envs. An episode restarts in the step
    that ends it: obs (also `self.obs`) then belongs to the next one, info["final_obs"] holds the true last observation.
    """

    def __init__(self, env_id, seeds):
        self.envs = [gym.wrappers.FlattenObservation(gym.make(env_id)) for _ in seeds]
        self.action_space = self.envs[0].action_space
        if not isinstance(self.action_space, gym.spaces.Discrete):
            kinds = "this script takes Discrete, ppo_vector.py also MultiDiscrete and Box"
            sys.exit(f"error: actions {self.action_space}: {kinds}")
        self.obs = np.zeros((len(seeds), *self.envs[0].observation_space.shape), np.float32)
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.seeds, self.actions = [0] * len(seeds), [array("q") for _ in seeds]  # of the unfinished episodes
        self.returns, self.episodes, self.finished = np.zeros(len(seeds)), 0, []  # finished: (return, length)
        for i in range(len(seeds)):
            self.begin(i)

    def call(self, i, method, *args, **options):
        """Puts the observation that the environment's method returns into self.obs[i]; returns reward and flags."""
        where = f"environment {i}, step {len(self.actions[i])} of the episode with seed {self.seeds[i]}"
        try:
            obs, *rest = getattr(self.envs[i], method)(*args, **options)
            self.obs[i] = np.reshape(obs, self.obs[i].shape)
            reward = float(np.asarray(rest[0]).item()) if method == "step" else 0.0  # some give an array of one
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        if not (np.isfinite(self.obs[i]).all() and abs(reward) <= np.finfo(np.float32).max.item()):
            sys.exit(" ".join(f"error: {where}: reward {reward}, observation {self.obs[i]}: no finite float32".split()))
        return reward, *rest[1:3]

    def begin(self, i):
        self.seeds[i], self.actions[i], self.returns[i] = int(self.rngs[i].integers(2**31)), array("q"), 0
        self.call(i, "reset", seed=self.seeds[i])

    def step(self, actions):
        rewards, flags, final_obs = np.zeros(len(actions)), np.zeros((2, len(actions)), bool), self.obs.copy()
        for i, action in enumerate(actions + self.action_space.start):
            self.actions[i].append(action)
            rewards[i], *flags[:, i] = self.call(i, "step", action)
            self.returns[i], final_obs[i] = self.returns[i] + rewards[i], self.obs[i]
            if flags[:, i].any():
                self.finished.append((float(self.returns[i]), len(self.actions[i])))
                self.begin(i)
        return self.obs.copy(), rewards, *flags, {"final_obs": final_obs}

    def pop_episodes(self):
        """Means of raw return and length over the episodes that finished since the last call, and the number of all."""
        returns, lengths = np.mean(self.finished, axis=0) if self.finished else (math.nan, math.nan)
        self.episodes, self.finished = self.episodes + len(self.finished), []
        return {"charts/episodic_return": returns, "charts/episodic_length": lengths, "charts/episodes": self.episodes}

    def state_dict(self):
        return {"rngs": [rng.bit_generator.state for rng in self.rngs], "seeds": self.seeds, "obs": self.obs,
                "actions": [np.array(taken) for taken in self.actions], "returns": self.returns,
                "episodes": self.episodes, "finished": self.finished}  # fmt: skip

    def load_state_dict(self, state):
        """Plays the unfinished episodes again; where that leads elsewhere, a new one begins."""
        self.seeds, self.episodes, self.finished = state["seeds"], state["episodes"], state["finished"]
        self.returns = state["returns"].numpy()
        for i, (rng, actions) in enumerate(zip(state["rngs"], state["actions"], strict=True)):
            self.rngs[i].bit_generator.state, self.actions[i] = rng, array("q", actions.tolist())
            self.call(i, "reset", seed=self.seeds[i])
            for action in self.actions[i]:
                self.call(i, "step", action)
            if (self.obs[i] != state["obs"][i].numpy()).any():
                print(f"note: environment {i} does not repeat itself; it begins a new episode", file=sys.stderr)
                self.begin(i)

    def close(self):
        for env in self.envs:
            env.close()


# Copied from algos/pbt_ppo.py:VectorPong
class VectorPong:
    """Games of Pong side by side, both seats open, in an arena of 160 x 160 (after Lamarckian's).

    Bats (5 x 15, 16 from the sides, speed 4) take up 0, stay 1 or down 2. The ball (4 x 4) starts at the centre with
    vx = +-4 and vy = +-U(1.2, 4), flips at walls and bats, and takes 0.7 of the bat's move into vy. A round is a point
    (+1 for its winner, -1 for the other) or 1,000 frames, a draw; a game is 20 rounds, the next one begins in the same
    step. Observations (games, 2, 10): own bat's y, the other's, the last four (x, y) of the ball, all / 160, as seen
    from the left (x is mirrored for seat 1). Each game draws its serves from a generator of its own: what happens in it
    does not depend on its neighbours.
    """

    ROUNDS = 20
    ROUND_FRAMES = 1_000
    OBS_SHAPE = (10,)
    NUM_ACTIONS = 3

    def __init__(self, seeds: list):
        self.generators = [np.random.default_rng(seed) for seed in seeds]
        self.num_games = len(seeds)
        self.serves = np.zeros((self.num_games, self.ROUNDS, 2))
        self.bats = np.zeros((self.num_games, 2))  # upper edges
        self.ball = np.zeros((self.num_games, 4))  # x, y of its upper left corner, vx, vy
        self.trail = np.zeros((self.num_games, 4, 2))  # the last four (x, y), newest last
        self.round, self.frame, self.length = np.zeros((3, self.num_games), dtype=np.int64)
        self.points = np.zeros((self.num_games, 2), dtype=np.int64)

    def reset(self) -> np.ndarray:
        self.begin_games(np.arange(self.num_games))
        return self.observations()

    def begin_games(self, games: np.ndarray) -> None:
        for game in games:
            directions = self.generators[game].choice([-1.0, 1.0], size=(self.ROUNDS, 2))
            self.serves[game] = directions * [4.0, 1.0]
            self.serves[game, :, 1] *= self.generators[game].uniform(1.2, 4.0, size=self.ROUNDS)
        self.bats[games] = 72.5
        self.round[games] = self.length[games] = self.points[games] = 0
        self.begin_rounds(games)

    def begin_rounds(self, games: np.ndarray) -> None:
        self.ball[games, :2] = 78.0
        self.ball[games, 2:] = self.serves[games, self.round[games]]
        self.trail[games] = 78.0
        self.frame[games] = 0

    def step(self, actions: np.ndarray) -> tuple:
        """actions (games, 2) -> observations, rewards (games, 2) for both seats, terminated (games,), info.

        info: `final_obs` (games, 2, 10), the true last observations; `points` (games, 2) and `length` (games,) of the
        games so far; `hits` (games, 2), which bats met the ball; `moved` (games, 2), which bats changed their place.
        """
        before = self.bats.copy()
        self.bats = np.clip(self.bats + 4.0 * (actions - 1), 0.0, 145.0)
        moves = self.bats - before
        ball = self.ball
        ball[:, :2] += ball[:, 2:]
        wall = (ball[:, 1] < 0) | (ball[:, 1] > 156)
        ball[wall, 3] *= -1
        ball[wall, 1] = np.clip(np.where(ball[wall, 1] < 0, -ball[wall, 1], 312 - ball[wall, 1]), 0, 156)
        level = (ball[:, 1, None] + 4 > self.bats) & (ball[:, 1, None] < self.bats + 15)
        x, vx = ball[:, 0], ball[:, 2]
        hits = level & np.stack([(vx < 0) & (x < 21) & (x + 4 > 16), (vx > 0) & (x + 4 > 139) & (x < 144)], axis=1)
        ball[hits.any(1), 2] *= -1
        ball[:, 3] += 0.7 * (moves * hits).sum(1)
        self.trail = np.concatenate([self.trail[:, 1:], ball[:, None, :2]], axis=1)
        won = np.stack([ball[:, 0] > 160, ball[:, 0] < -4], axis=1)
        rewards = won.astype(np.float64) - won[:, ::-1]
        self.points += won
        self.frame += 1
        self.length += 1
        over = won.any(1) | (self.frame >= self.ROUND_FRAMES)
        self.round += over
        terminated = self.round >= self.ROUNDS
        final_obs = self.observations()
        info = {"final_obs": final_obs, "points": self.points.copy(), "length": self.length.copy()}
        info |= {"hits": hits, "moved": moves != 0}
        if not over.any():
            return final_obs, rewards, terminated, info
        self.begin_rounds(np.flatnonzero(over & ~terminated))
        self.begin_games(np.flatnonzero(terminated))
        return self.observations(), rewards, terminated, info

    def observations(self) -> np.ndarray:
        trail = self.trail + 2  # the ball's centre
        mirrored = np.stack([160 - trail[..., 0], trail[..., 1]], axis=-1)
        bats = self.bats + 7.5
        left = np.concatenate([bats, trail.reshape(-1, 8)], axis=1)
        right = np.concatenate([bats[:, ::-1], mirrored.reshape(-1, 8)], axis=1)
        return (np.stack([left, right], axis=1) / 160).astype(np.float32)

    def scripted(self) -> np.ndarray:
        """Actions (games, 2) of the scripted player: always towards the ball's centre."""
        offset = self.ball[:, 1, None] + 2 - (self.bats + 7.5)
        return 1 + np.sign(offset).astype(np.int64)

    def state_dict(self) -> dict:
        state = {name: value.copy() for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        return state | {"generators": [generator.bit_generator.state for generator in self.generators]}

    def load_state_dict(self, state: dict) -> None:
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.bit_generator.state = saved
        vars(self).update({name: value.copy() for name, value in state.items() if name != "generators"})


class PongGames:
    """VectorPong with the interface of Envs: the agent has one seat, the scripted player the other; they change places
    after every game. Rewards are the agent's, observations centred: (obs - 0.5) * 4. A game ends by its rules alone, so
    nothing is ever truncated."""

    def __init__(self, seeds):
        self.games, self.action_space = VectorPong(seeds), gym.spaces.Discrete(VectorPong.NUM_ACTIONS)
        self.rows, self.seats = np.arange(len(seeds)), np.arange(len(seeds)) % 2
        self.obs = self.seen(self.games.reset())
        self.returns, self.finished = np.zeros(len(seeds)), []  # finished: (return, length)

    def seen(self, obs):
        return (obs[self.rows, self.seats] - 0.5) * 4

    def step(self, actions):
        at, both = (self.rows, self.seats), self.games.scripted()
        both[at] = actions
        obs, rewards, terminated, info = self.games.step(both)
        rewards, final_obs = rewards[at], self.seen(info["final_obs"])
        self.returns += rewards
        for i in np.flatnonzero(terminated):
            self.finished.append((float(self.returns[i]), int(info["length"][i])))
            self.returns[i], self.seats[i] = 0, 1 - self.seats[i]
        self.obs = self.seen(obs)
        return self.obs.copy(), rewards, terminated, np.zeros_like(terminated), {"final_obs": final_obs}

    def state_dict(self):
        return {"games": self.games.state_dict(), "seats": self.seats, "returns": self.returns,
                "finished": self.finished}  # fmt: skip

    def load_state_dict(self, state):
        arrays = {name: x.numpy() if torch.is_tensor(x) else x for name, x in state["games"].items()}
        self.games.load_state_dict(arrays)
        self.seats, self.returns, self.finished = state["seats"].numpy(), state["returns"].numpy(), state["finished"]
        self.obs = self.seen(self.games.observations())

    def close(self):
        """Nothing is open."""


def make_envs(env_id, seeds):
    return PongGames(seeds) if env_id == "VectorPong" else Envs(env_id, seeds)


# ---- 3. Agent and mathematics ----------------------------------------------------------------------------------------


# Copied from algos/ppo.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Separate policy and value networks, ReLU MLPs. forward(obs (B, D)) -> logits (B, num_actions), values (B,)."""

    def __init__(self, obs_shape, num_actions):
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(layer_init(nn.Linear(*obs_shape, 128)), nn.ReLU(), layer_init(nn.Linear(128, 64)), nn.ReLU(),
                          layer_init(nn.Linear(64, outputs), std))
            for outputs, std in ((num_actions, 0.01), (1, 1.0))
        )  # fmt: skip

    def forward(self, obs):
        return self.policy(obs), self.value(obs).squeeze(-1)

    # Copied from algos/ppo.py:Agent.act
    @torch.no_grad()
    def act(self, obs, generator=None):
        """obs (B, D) -> actions, their log-probabilities, values, each (B,). No generator: the most likely action."""
        logits, value = self(obs)
        require_finite(policy_output=logits, value=value)
        action = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0] if generator else logits.argmax(-1)
        return action, torch.distributions.Categorical(logits=logits, validate_args=False).log_prob(action), value


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


# Copied from algos/ppo.py:explained_variance
def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns]; NaN where it is undefined."""
    variance = returns.var()
    return 1 - (returns - values).var() / variance if 0 < variance < math.inf else math.nan


def a3c_loss(logits, values, actions, advantages, returns, ent_coef, vf_coef):
    """Policy, value and entropy losses (Mnih et al. 2016, section 4), means over the batch: logits (B, A), the others
    (B,). Advantages and returns are constants. Returns the loss and its parts."""
    policy = torch.distributions.Categorical(logits=logits, validate_args=False)
    policy_loss = -(advantages * policy.log_prob(actions)).mean()
    value_loss, entropy = 0.5 * ((returns - values) ** 2).mean(), policy.entropy().mean()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy
    return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}


class RMSProp(torch.optim.Optimizer):
    """The paper's, with the statistics of all workers in one place: g <- decay g + (1 - decay) d^2, then
    w <- w - lr d / sqrt(g + eps) for a gradient d (Mnih et al. 2016, section 4, Optimization)."""

    def __init__(self, params, lr, decay=0.99, eps=1e-5):
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = self.state[p].setdefault("mean_square", torch.zeros_like(p))
                g.mul_(group["decay"]).addcmul_(p.grad, p.grad, value=1 - group["decay"])
                p.addcdiv_(p.grad, (g + group["eps"]).sqrt_(), value=-group["lr"])


# ---- 4. Workers and their gradients ----------------------------------------------------------------------------------


class SharedMemory(dict):
    """Arrays {name: (count, *shape)} by a layout {name: (shape, dtype)}, which other processes get as an argument of
    theirs. A file without a name: nothing stays in /dev/shm, however they end."""

    def __init__(self, layout, count, copied_fd=None):
        record = np.dtype([(name, dtype, shape) for name, (shape, dtype) in layout.items()], align=True)
        self.layout, self.count = layout, count
        self.fd = copied_fd.detach() if copied_fd else os.memfd_create("gradients")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, count * record.itemsize)
        records = np.frombuffer(mmap.mmap(self.fd, 0), record)
        super().__init__({name: records[name] for name in layout})

    # Copied from algos/impala_popart.py:SharedMemory.__reduce__
    def __reduce__(self):
        return SharedMemory, (self.layout, self.count, DupFd(self.fd))

    # Copied from algos/impala_popart.py:SharedMemory.record
    def record(self, i):
        return {name: array[i, ...] for name, array in self.items()}


# Copied from algos/impala_popart.py:flat_weights
def flat_weights(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu().numpy()


# Copied from algos/impala_popart.py:Board
class Board:
    """The newest weights of the policy with their version, in shared memory, in two places by turns: a writer never
    waits, a reader copies again when newer ones came meanwhile, and a killed process leaves no lock behind."""

    def __init__(self, size):
        self.memory = SharedMemory({"version": ((), np.int64), "weights": ((2, size), np.float32)}, 1)

    def write(self, weights, version):
        self.fence()
        self.memory["weights"][0, version % 2] = weights
        self.fence()
        self.memory["version"][0] = version

    def read(self, out):
        """Copies the weights to `out`; returns their version."""
        version = None
        while version != self.memory["version"][0]:
            version = int(self.memory["version"][0])
            self.fence()
            out[:] = self.memory["weights"][0, version % 2]
            self.fence()
        return version

    @staticmethod
    def fence():
        """Memory accesses before it stay before those after it: a lock's release, then its acquisition."""
        for lock in [Lock()] * 2:
            with lock:
                pass


class Worker:
    """Environments and a network of its own. `fill` makes an unroll, which goes on where the last ended, and puts what
    the server needs of it into a slot."""

    LOSSES = "policy_loss", "value_loss", "entropy", "explained_variance"

    def __init__(self, args, seed):
        *env_seeds, action_seed = seed.spawn(args.num_envs + 1)
        self.args, self.envs = args, make_envs(args.env_id, env_seeds)
        self.generator = torch.Generator().manual_seed(int(action_seed.generate_state(1)[0]))
        with torch.device("meta"):  # no weights yet, and no draws for them
            self.agent = Agent(self.envs.obs.shape[1:], int(self.envs.action_space.n))
        self.weights = np.zeros(sum(p.numel() for p in self.agent.parameters()), np.float32)  # new ones are one copy:
        nn.utils.vector_to_parameters(torch.from_numpy(self.weights), self.agent.to_empty(device="cpu").parameters())

    @staticmethod
    def layout(args, num_weights):
        """Shapes and types of a slot's arrays."""
        return {"gradient": ((num_weights,), np.float32), "losses": ((len(Worker.LOSSES),), np.float64),
                "episodes": ((args.batch_size, 2), np.float64), "num_episodes": ((), np.int64),
                "version": ((), np.int64), "wait_s": ((), np.float64), "sent_s": ((), np.float64)}  # fmt: skip

    def fill(self, slot, board):
        """The gradient with the newest weights; slot["version"] says which."""
        slot["version"][...] = board.read(self.weights)
        slot["gradient"][:], losses = self.gradient(self.unroll())
        slot["losses"][:] = [losses[name] for name in self.LOSSES]
        slot["num_episodes"][...] = len(self.envs.finished)  # (return, length)
        slot["episodes"][: len(self.envs.finished)] = np.reshape(self.envs.finished, (-1, 2))
        self.envs.finished = []
        slot["sent_s"][...] = time.monotonic()  # the same clock in every process

    def unroll(self):
        """num_steps of every environment: arrays (T, N, ...)."""
        T, N = self.args.num_steps, self.args.num_envs
        obs, actions = np.zeros((T, *self.envs.obs.shape), np.float32), np.zeros((T, N), np.int64)
        rewards, values, next_values = (np.zeros((T, N), np.float32) for _ in range(3))
        terminated, truncated = np.zeros((2, T, N), bool)
        for t in range(T):
            obs[t] = self.envs.obs
            action, _, value = self.agent.act(torch.from_numpy(obs[t]), self.generator)
            actions[t], values[t] = action.numpy(), value.numpy()
            _, rewards[t], terminated[t], truncated[t], info = self.envs.step(actions[t])
            cut = truncated[t] & ~terminated[t]
            if cut.any():  # the next observation belongs to the next episode: bootstrap from the one that was cut off
                next_values[t, cut] = self.agent.act(torch.from_numpy(info["final_obs"][cut]))[2].numpy()
        after = np.vstack([values[1:], self.agent.act(torch.from_numpy(self.envs.obs))[2].numpy()])
        next_values = np.where(truncated & ~terminated, next_values, after)
        return {"obs": obs, "actions": actions, "rewards": rewards, "values": values, "next_values": next_values,
                "terminated": terminated, "truncated": truncated}  # fmt: skip

    def gradient(self, b):
        """Of the loss of an unroll: (num_weights,), and the loss's parts."""
        args = self.args
        trace = args.gae_lambda if args.estimator == "gae" else 1.0  # 1: R <- r + gamma R from the bootstrap, less V
        parts = (b[name] for name in ("rewards", "values", "next_values", "terminated", "truncated"))
        advantages, returns = gae(*parts, args.gamma, trace)
        b |= {"advantages": advantages, "returns": returns}
        flat = {name: torch.from_numpy(x).flatten(0, 1) for name, x in b.items()}
        logits, values = self.agent(flat["obs"])
        loss, losses = a3c_loss(logits, values, flat["actions"], flat["advantages"], flat["returns"], args.ent_coef,
                                args.vf_coef)  # fmt: skip
        if not torch.isfinite(loss):
            require_finite(**flat, logits=logits, values=values, **losses)
        gradient = torch.autograd.grad(loss, [*self.agent.parameters()])
        losses = {name: x.item() for name, x in losses.items()}
        losses["explained_variance"] = explained_variance(b["values"], returns)
        return torch.cat([g.flatten() for g in gradient]).numpy(), losses

    def state_dict(self):
        return {"envs": self.envs.state_dict(), "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.envs.load_state_dict(state["envs"])
        self.generator.set_state(state["generator"])


# Copied from algos/impala_popart.py:actor_process with actor_process->worker_process
def worker_process(make_actor, index, slots, board, pipe):
    """Fills the slots whose numbers come, and sends the numbers back; at last the reason, if it cannot go on."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: so it ends with its parent, even if stopped
    if os.getppid() != multiprocessing.parent_process().pid:  # which died before that
        return
    try:
        torch.set_num_threads(1)
        actor = make_actor(index)
        while True:
            start, number = time.perf_counter(), pipe.recv()
            slot = slots.record(number)
            slot["wait_s"][...] = time.perf_counter() - start
            actor.fill(slot, board)
            pipe.send(number)
    except (Exception, SystemExit) as error:  # an environment may ask to exit: that is no end of a run
        code = getattr(error, "code", None)  # of sys.exit
        pipe.send(code.removeprefix("error: ") if isinstance(code, str) else traceback.format_exc())


class Workers:
    """num_workers processes, each with a slot of its own and at most one gradient under way; with 0 this process makes
    the gradients.

    make_worker(version, index) -> Worker. `take` waits for a gradient and returns the slot of the one that was sent
    first; `publish` hands out new weights; `go_on` lets the worker of that slot make the next, with the newest weights.
    A worker that raised, died or does not answer is a SystemExit of one line.
    """

    TIMEOUT_S = 600  # for a worker's start, and for any one gradient

    def __init__(self, make_worker, layout, num_workers):
        self.make_worker, self.layout, self.num_workers = make_worker, layout, num_workers
        self.worker, self.worker_state, self.processes = None, None, []

    def start(self, weights, version):
        """The first gradients are made with `weights`, the version `version`."""
        self.slots, self.board = SharedMemory(self.layout, max(self.num_workers, 1)), Board(len(weights))
        self.version, self.full, self.taken = version, [], None  # full: workers whose gradients wait
        self.board.write(weights, version)
        self.busy = np.ones(self.num_workers, bool)
        self.since = np.zeros(self.num_workers)  # of busy workers, when they began
        self.clock, self.looked = 0.0, time.monotonic()
        if not self.num_workers:
            self.worker = self.make_worker(version, 0)
            if self.worker_state is not None:
                self.worker.load_state_dict(self.worker_state)
            return
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch's threads in any state
        # Workers inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
        for index in range(self.num_workers):
            pipe, remote = context.Pipe()
            args = partial(self.make_worker, version), index, self.slots, self.board, remote
            self.processes.append((context.Process(target=worker_process, args=args), pipe))
            self.processes[-1][0].start()
            remote.close()
            pipe.send(index)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def take(self, check=lambda: None):
        """The slot with the gradient that was sent first. Calls check() while it waits."""
        start = time.perf_counter()
        self.poll(0)
        while not self.full:
            check()
            self.poll(1)
        self.waited = time.perf_counter() - start if self.processes else 0.0
        self.taken = min(self.full, key=self.slots["sent_s"].__getitem__)
        self.full.remove(self.taken)
        return self.slots.record(self.taken)

    def poll(self, seconds):
        """Takes in what was sent, or else waits so long for it. SystemExit if a worker has ended or hangs."""
        if self.worker is not None:
            self.worker.fill(self.slots.record(0), self.board)
            return self.full.append(0)
        ready = connection.wait([pipe for _, pipe in self.processes], seconds)
        now = time.monotonic()
        self.clock, self.looked = self.clock + min(now - self.looked, 60), now  # a Ctrl-Z that stops all is no time-out
        for index, (process, pipe) in enumerate(self.processes):
            name = f"worker {index} (process {process.pid})"
            if pipe in ready:
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    process.join(2)
                    sys.exit(f"error: {name} died with exit code {process.exitcode}")
                if isinstance(message, str):  # a traceback, or one line
                    *before, cause = message.strip().splitlines()
                    print(*before, sep="\n", end="\n" * bool(before), file=sys.stderr)
                    sys.exit(f"error: worker {index} failed: {cause}")
                self.full.append(message)
                self.busy[index] = False
            if self.busy[index] and self.clock - self.since[index] > self.TIMEOUT_S:
                sys.exit(f"error: {name} hangs: no gradient of it for {self.TIMEOUT_S} s")

    def publish(self, weights):
        """After an update."""
        self.version += 1
        self.board.write(weights, self.version)

    def go_on(self):
        """After `take` and what was done with it: its slot may be overwritten."""
        if self.processes:
            self.busy[self.taken], self.since[self.taken] = True, self.clock
            with suppress(OSError):  # the worker died: `poll` will say so
                self.processes[self.taken][1].send(self.taken)

    def state_dict(self):
        """Of num_workers 0. The episodes of processes are not kept: a resumed run starts new ones."""
        return {"worker": self.worker and self.worker.state_dict()}

    def load_state_dict(self, state):
        self.worker_state = state["worker"]

    def close(self):
        for end in ("kill", "join"):
            for process in (process for process, _ in self.processes if process.pid):
                getattr(process, end)()
        if self.worker is not None:
            self.worker.envs.close()


# ---- 5. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


class Stats:
    """What came since the last row of metrics.jsonl: episodes, by their raw returns, and gradients. Totals: all."""

    def __init__(self):
        self.num_episodes = self.dropped = 0  # of the whole run
        self.episodes, self.updates, self.waits, self.staleness, self.workers = [], [], [], [], []

    def pop(self):
        """Means, and a row of staleness.jsonl: how many gradients had which staleness, those dropped included, and from
        how many workers they came."""
        returns, lengths = np.mean(self.episodes, axis=0) if self.episodes else (math.nan, math.nan)
        row = {"charts/episodic_return": returns, "charts/episodic_length": lengths,
               "charts/episodes": self.num_episodes, "losses/gradient_steps": len(self.updates),
               "async/gradient_staleness_mean": np.mean(self.staleness), "async/dropped": self.dropped,
               "async/gradient_staleness_max": max(self.staleness)}  # fmt: skip
        for rows in (self.waits, self.updates or [dict.fromkeys(UPDATE_TAGS, math.nan)]):
            row |= {name: np.mean([each[name] for each in rows]) for name in rows[0]}
        counts = {str(age): count for age, count in sorted(Counter(self.staleness).items())}
        ages = {"dropped": self.dropped, "workers": len({*self.workers}), "staleness": counts}
        self.episodes, self.updates, self.waits, self.staleness, self.workers = [], [], [], [], []
        return row, ages

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


UPDATE_TAGS = [f"losses/{name}" for name in (*Worker.LOSSES, "grad_norm")]


def draw_staleness(folder):
    """staleness.png of staleness.jsonl: the histogram over all gradients, and mean and maximum over time."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in (folder / "staleness.jsonl").read_text().splitlines()]
    counts, mean = Counter(), []
    for row in rows:
        found = Counter({int(age): count for age, count in row["staleness"].items()})
        counts += found
        mean.append(sum(age * count for age, count in found.items()) / found.total())
    figure = Figure((9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(counts.keys(), [100 * count / counts.total() for count in counts.values()], color="C0")
    average = sum(age * count for age, count in counts.items()) / counts.total()
    title = f"{counts.total():,} gradients, mean {average:.2f}"
    left.set(xlabel="staleness (updates)", ylabel="gradients (%)", title=title)
    steps = [row["global_step"] for row in rows]
    right.plot(steps, [max(map(int, row["staleness"])) for row in rows], "C1", linewidth=0.7, label="maximum")
    right.plot(steps, mean, "C0", label="mean")
    right.set(xlabel="environment steps", title="per row of metrics.jsonl", ylim=(0, None))
    right.legend(frameon=False)
    figure.savefig(folder / "staleness.png", dpi=120)


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


RunLogger.LOGS = ("staleness.jsonl", *RunLogger.LOGS)  # so a resume cuts it to its length at the checkpoint


# ---- 6. Evaluation and training --------------------------------------------------------------------------------------


def evaluate(agent, args, check=lambda: None):
    """Plays args.eval_episodes episodes in environments of their own, seeded by args.eval_seed alone -> a row for each,
    its raw return and length. Touches no training state. `check` may end it."""
    *seeds, action_seed = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes + 1)
    generator = torch.Generator().manual_seed(int(action_seed.generate_state(1)[0]))
    with closing(make_envs(args.env_id, seeds)) as envs:
        running, (returns, lengths) = np.ones(len(seeds), bool), np.zeros((2, len(seeds)))
        while running.any() and lengths.max() < args.eval_max_steps:
            check()
            actions = agent.act(torch.from_numpy(envs.obs.copy()), None if args.eval_greedy else generator)[0]
            _, reward, terminated, truncated, _ = envs.step(actions.numpy())
            returns, lengths = returns + reward * running, lengths + running
            running &= ~(terminated | truncated)
    if running.any():
        print(f"note: {running.sum()} evaluation episodes were cut off at --eval-max-steps", file=sys.stderr)
    return [{"split": "eval", "return": float(r), "length": int(n)} for r, n in zip(returns, lengths, strict=True)]


def make_worker(args, seed, version, index):
    """Worker `index`. By the version too, so that where the episodes of before a resume are lost, others come."""
    return Worker(args, np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, version, index)))


def train(args):
    with RunLogger(args) as run:
        if run.result is not None and not args.eval_only:
            print(f"finished before, nothing to do: {run.dir}\n{json.dumps(run.result)}")
            return run.result
        if args.num_workers and importlib.util.find_spec("matplotlib") is None:
            sys.exit("error: staleness.png is drawn by matplotlib, which is missing: pip install matplotlib")
        torch.set_num_threads(args.torch_threads or len(os.sched_getaffinity(0)))
        random = Randomness(args.seed, "cpu")
        with closing(make_envs(args.env_id, np.random.SeedSequence(0).spawn(1))) as envs:
            agent = Agent(envs.obs.shape[1:], int(envs.action_space.n))
        if args.optimizer == "adam":
            optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate)
        else:
            optimizer = RMSProp(agent.parameters(), args.learning_rate, args.rmsprop_decay, args.rmsprop_eps)
        params = [*agent.parameters()]
        sizes = [p.numel() for p in params]
        layout = Worker.layout(args, sum(sizes))
        workers = run.enter_context(closing(Workers(partial(make_worker, args, random.envs), layout, args.num_workers)))
        parts = {"agent": agent, "optimizer": optimizer, "random": random, "workers": workers, "stats": Stats()}
        (first_update, global_step, row), stats = run.restore(**parts), parts["stats"]
        if args.eval_only:
            means = run.log_eval(global_step, evaluate(agent, args, run.check_signals))
            print(json.dumps(means))
            return means
        workers.start(flat_weights(agent), first_update)

        for update in range(first_update, args.num_updates):
            run.checkpoint(update, global_step, row)
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / args.num_updates * args.anneal_lr)

            # ---- A3C: this block is the method (with Worker) ----
            begun = time.perf_counter()
            slot = workers.take(run.check_signals)
            collected = time.perf_counter()
            staleness = workers.version - int(slot["version"])
            if args.max_staleness and staleness > args.max_staleness:
                stats.dropped += 1
            else:
                for p, gradient in zip(params, torch.from_numpy(slot["gradient"].copy()).split(sizes)):
                    p.grad = gradient.view_as(p)
                grad_norm = nn.utils.clip_grad_norm_(params, args.max_grad_norm)
                require_finite(grad_norm=grad_norm)
                optimizer.step()
                require_finite(**dict(agent.named_parameters()))
                workers.publish(flat_weights(agent))
                stats.updates.append(dict(zip(UPDATE_TAGS, [*slot["losses"].tolist(), grad_norm.item()], strict=True)))
            global_step += args.batch_size
            stats.staleness.append(staleness)
            stats.workers.append(workers.taken)
            stats.episodes += slot["episodes"][: slot["num_episodes"]].tolist()
            stats.num_episodes += int(slot["num_episodes"])
            waits = {"async/queue_depth": len(workers.full), "async/learner_wait_s": workers.waited,
                     "async/actor_wait_s": float(slot["wait_s"]), "perf/collect_s": collected - begun,
                     "perf/update_s": time.perf_counter() - collected}  # fmt: skip
            stats.waits.append(waits)
            workers.go_on()
            # ---- end of the method ----

            # Log and evaluate.
            last, row = update + 1 == args.num_updates, {}
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                begun = time.perf_counter()
                row = run.log_eval(global_step, evaluate(agent, args, run.check_signals))
                row["perf/eval_s"] = time.perf_counter() - begun
            if last or row or (update + 1) % args.log_interval == 0:
                means, ages = stats.pop()
                run.write_rows("staleness.jsonl", global_step, [ages])
                done = {"charts/update": update + 1, "charts/learning_rate": optimizer.param_groups[0]["lr"]}
                run.log(global_step, means | done | row)

        if args.num_workers:
            draw_staleness(run.dir)
        return run.finish(args.num_updates, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
