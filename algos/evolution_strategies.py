"""Evolution strategies: OpenAI-ES and CMA-ES, on test functions and on policies of reinforcement learning.

Papers: Salimans et al. 2017, arXiv:1703.03864 (--method openai); Hansen 2016, "The CMA Evolution Strategy: A Tutorial",
arXiv:1604.00772 (--method cma).

  Policy:    python algos/evolution_strategies.py --method openai --env-id CartPole-v1
  Function:  python algos/evolution_strategies.py --method cma --env-id rosenbrock --start 0.1 --target 1e-10
  Farm:      --num-workers 2 evaluates in processes, with the same result; --asynchronous uses what arrives
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured, seed 1: Vector Pong, 20M frames, 100 CPU-seconds: points of 20 against the scripted player, own minus its: 9.7
(openai), 15.2 (cma). CartPole-v1, 80k steps, seeds 1 to 3: 475 or more with both, in 4 CPU-seconds.
Differs from the papers: noise is drawn anew from its seed, not cut from a shared table; equal fitness gets equal ranks;
all observations enter the normalisation; CMA-ES does not restart.
"""

import ast
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
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections import deque
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, fields
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
    device: Literal["cpu"] = "cpu"  # the networks are small
    deterministic: bool = False  # only deterministic kernels (a CPU run always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the networks; 0: all cores. The count changes rounding; workers have one
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 10  # generations between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 1  # generations between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # problem
    env_id: str = "CartPole-v1"  # VectorPong, a Gymnasium id, or a function: sphere ellipsoid rosenbrock rastrigin
    dim: int = 10  # of a function
    start: float = 1.0  # of a function: every coordinate of the first mean
    target: float | None = None  # of a function: the run ends with an evaluation this low
    games: int = 1  # of a policy: episodes per evaluation, with the same seeds for a whole generation
    max_episode_steps: int = 27_000  # of a policy: episodes still running after so many steps count as they are
    hidden_size: int = 0  # of a policy: tanh units of its hidden layer; 0: linear
    norm_obs: bool = True  # of a policy: observations normalised by all that were seen in earlier generations

    # algorithm
    method: Literal["openai", "cma"] = "openai"  # fixed spread and a gradient, or an adapted covariance
    total_timesteps: int = 500_000  # environment steps (of a function: evaluations); rounded up to whole generations
    population_size: int | None = None  # evaluations per generation; None: 16 (openai), 4 + 3 ln(parameters) (cma)
    sigma: float = 0.3  # standard deviation of the perturbations (cma: of the first generation)
    learning_rate: float = 0.1  # openai: the optimiser's step size
    optimizer: Literal["adam", "sgd"] = "adam"  # openai: of the mean
    momentum: float = 0.9  # openai: SGD's momentum, Adam's beta1
    weight_decay: float = 0.005  # openai: pulls the mean to 0

    # farm
    num_workers: int = 0  # processes that evaluate; 0: this one does
    task_members: int = 64  # evaluations that go to a process, and are batched, at a time; changes rounding
    asynchronous: bool = False  # openai: workers never wait; a generation is what arrives, of the last version too
    worker_timeout: float = 300.0  # seconds after which a worker without an answer is replaced

    # evaluation
    eval_interval: int = 10  # generations between evaluations of the mean; 0: only at the end
    eval_episodes: int = 20  # episodes per evaluation
    eval_max_steps: int = 27_000  # evaluation episodes still running after so many steps count as they are
    eval_seed: int = 10_000  # seeds the evaluation episodes, the same for every run and algorithm
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    def __post_init__(self):
        check_numbers(self, seed=(0, math.inf), eval_interval=(0, math.inf), eval_seed=(0, 2**64 - 1), momentum=(0, 1),
                      torch_threads=(0, 1024), start=(-math.inf, math.inf), target=(-math.inf, math.inf),
                      population_size=(2, math.inf), hidden_size=(0, math.inf), num_workers=(0, 1024),
                      sigma=(1e-12, math.inf))  # fmt: skip
        if self.target is not None and self.env_id not in FUNCTIONS:
            raise ValueError(f"--target {self.target}: it ends runs on {', '.join(FUNCTIONS)}, not on {self.env_id}")
        if self.asynchronous and (self.method == "cma" or not self.num_workers):
            raise ValueError("--asynchronous goes with --method openai and --num-workers 1 or more: CMA-ES needs whole "
                             "generations")  # fmt: skip
        for name, number in (("population-size", self.population_size or 0), ("task-members", self.task_members)):
            if self.method == "openai" and number % 2:
                raise ValueError(f"--{name} {number}: mirrored pairs need an even number")
        if self.env_id not in (*FUNCTIONS, "VectorPong"):
            try:
                make_env(self.env_id).close()
            except (gym.error.Error, ImportError, NotImplementedError) as error:
                raise ValueError(f"--env-id {self.env_id}: {str(error) or 'observations that are no numbers'}; here "
                                 f"are also VectorPong, {', '.join(FUNCTIONS)}") from error  # fmt: skip


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


# ---- 2. The method ---------------------------------------------------------------------------------------------------


def centered_ranks(fitness):
    """Fitness (M,) -> ranks (M,) in [-0.5, 0.5], the best highest; equal values share the mean of their ranks, and what
    is not finite counts as worse than all else (Salimans et al. 2017, section 2.1; M >= 2)."""
    fitness = np.where(np.isfinite(fitness), fitness, -np.inf)
    _, which, count = np.unique(fitness, return_inverse=True, return_counts=True)
    return ((np.cumsum(count) - (count + 1) / 2) / (len(fitness) - 1) - 0.5)[which]


def mirrored_gradient(ranks, noise, sigma):
    """Ranks (2 K,) of the members mean + sigma noise[0], mean - sigma noise[0], ... and noise (K, n) -> the gradient
    (n,), 1 / (2 K sigma) sum of rank x perturbation (Salimans et al. 2017, algorithm 1, with mirrored sampling)."""
    return (ranks[0::2] - ranks[1::2]) @ noise / (len(ranks) * sigma)


def draw_noise(seeds, n):
    """Standard normal numbers (len(seeds), n), each row from its seed."""
    return np.stack([np.random.default_rng(int(seed)).standard_normal(n) for seed in seeds])


class OpenAIES:
    """Maximises the mean fitness of Gaussian perturbations of fixed spread around `mean` (n,), float64. A perturbation
    is the seed that draws it: each seed makes a mirrored pair of members."""

    members_per_seed = 2

    def __init__(self, mean, args):
        self.mean, self.sigma, self.weight_decay = nn.Parameter(torch.tensor(mean)), args.sigma, args.weight_decay
        self.population_size = args.population_size or 16
        self.optimizer = (
            torch.optim.Adam([self.mean], args.learning_rate, (args.momentum, 0.999), maximize=True)
            if args.optimizer == "adam"
            else torch.optim.SGD([self.mean], args.learning_rate, args.momentum, maximize=True)
        )

    def version(self):
        """What a worker needs once, before it can make members from seeds."""
        return self.mean.detach().numpy(), np.array([self.sigma])

    @staticmethod
    def members(mean, sigma, seeds):
        noise = sigma * draw_noise(seeds, len(mean))
        return mean + np.stack([noise, -noise], 1).reshape(-1, len(mean))

    # ======== the method: OpenAI-ES (algorithm 1 of Salimans et al. 2017) ========
    def update(self, seeds, fitness):
        """One generation: seeds (K,), fitness (2 K,) -> metrics."""
        before = self.mean.detach().clone()
        gradient = mirrored_gradient(centered_ranks(fitness), draw_noise(seeds, len(before)), self.sigma)
        self.mean.grad = torch.from_numpy(gradient) - self.weight_decay * before
        self.optimizer.step()
        return {"evolution/sigma": self.sigma, "evolution/grad_norm": np.linalg.norm(gradient),
                "evolution/step_norm": (self.mean.detach() - before).norm().item(),
                "charts/learning_rate": self.optimizer.param_groups[0]["lr"]}  # fmt: skip

    def state_dict(self):
        return {"mean": self.mean, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        with torch.no_grad():
            self.mean.copy_(state["mean"])
        self.optimizer.load_state_dict(state["optimizer"])


def cma_constants(n, population_size):
    """Weights (population_size,) by rank, mu_eff and the learning rates of CMA-ES in n dimensions (Hansen 2016, table 1
    and eq. 49 to 58): the best half's weights sum to 1, the others' are negative."""
    raw = math.log((population_size + 1) / 2) - np.log(np.arange(1, population_size + 1))
    mu = population_size // 2
    mu_eff, mu_eff_minus = (part.sum() ** 2 / (part**2).sum() for part in (raw[:mu], raw[mu:]))
    c_sigma = (mu_eff + 2) / (n + mu_eff + 5)
    d_sigma = 1 + 2 * max(0.0, math.sqrt((mu_eff - 1) / (n + 1)) - 1) + c_sigma
    c_c = (4 + mu_eff / n) / (n + 4 + 2 * mu_eff / n)
    c_1 = 2 / ((n + 1.3) ** 2 + mu_eff)
    c_mu = min(1 - c_1, 2 * (0.25 + mu_eff - 2 + 1 / mu_eff) / ((n + 2) ** 2 + mu_eff))
    least = min(1 + c_1 / c_mu, 1 + 2 * mu_eff_minus / (mu_eff + 2), (1 - c_1 - c_mu) / (n * c_mu))
    weights = np.where(raw >= 0, raw / raw[raw >= 0].sum(), raw * least / -raw[raw < 0].sum())
    return weights, mu_eff, c_sigma, d_sigma, c_c, c_1, c_mu


class CMAES:
    """Adapts mean (n,), step size sigma and covariance C = axes diag(scales^2) axes^T (n, n) to the best half of each
    generation, and C away from the rest. A member is the seed that draws it."""

    members_per_seed = 1
    ARRAYS = "mean", "C", "axes", "scales", "p_sigma", "p_c"

    def __init__(self, mean, args):
        n, self.sigma, self.generation, self.decomposed = len(mean), args.sigma, 0, 0
        self.population_size = args.population_size or 4 + int(3 * math.log(n))
        self.constants = cma_constants(n, self.population_size)
        self.chi_n = math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))  # E|N(0, I)|
        self.mean, self.C, self.axes, self.scales = mean.copy(), np.eye(n), np.eye(n), np.ones(n)
        self.p_sigma, self.p_c = np.zeros(n), np.zeros(n)

    def version(self):
        return self.mean, self.sigma * self.axes * self.scales

    @staticmethod
    def members(mean, spread, seeds):
        return mean + draw_noise(seeds, len(mean)) @ spread.reshape(len(mean), -1).T

    # ======== the method: CMA-ES (figure 6 of Hansen 2016) ========
    def update(self, seeds, fitness):
        """One generation: seeds (M,), fitness (M,) -> metrics."""
        weights, mu_eff, c_sigma, d_sigma, c_c, c_1, c_mu = self.constants
        order = np.argsort(-np.where(np.isfinite(fitness), fitness, -np.inf), kind="stable")
        weights = weights * np.isfinite(fitness[order])  # what is not finite gives nothing on
        parents = np.maximum(weights, 0) / np.maximum(weights, 0).sum()
        z = draw_noise(seeds, len(self.mean))[order]
        y = z @ (self.axes * self.scales).T
        step = parents @ y
        self.mean = self.mean + self.sigma * step
        self.generation += 1
        whitened = self.axes @ (parents @ z)  # C^-1/2 step, as step = axes diag(scales) (parents @ z)
        self.p_sigma = (1 - c_sigma) * self.p_sigma + math.sqrt(c_sigma * (2 - c_sigma) * mu_eff) * whitened
        length = np.linalg.norm(self.p_sigma)
        expected = math.sqrt(1 - (1 - c_sigma) ** (2 * self.generation)) * self.chi_n
        h = float(length / expected < 1.4 + 2 / (len(self.mean) + 1))  # 0 stalls p_c while sigma is far too small
        self.p_c = (1 - c_c) * self.p_c + h * math.sqrt(c_c * (2 - c_c) * mu_eff) * step
        bounded = np.where(weights >= 0, weights, weights * len(self.mean) / (z**2).sum(1))  # keeps C positive definite
        kept = 1 - c_1 - c_mu * weights.sum() + (1 - h) * c_1 * c_c * (2 - c_c)
        self.C = kept * self.C + c_1 * np.outer(self.p_c, self.p_c) + c_mu * (bounded * y.T) @ y
        self.sigma *= math.exp(min(1.0, c_sigma / d_sigma * (length / self.chi_n - 1)))
        if (self.generation - self.decomposed) * 10 * len(self.mean) * (c_1 + c_mu) >= 1:  # seldom, in many dimensions
            self.decompose()
        return {"evolution/sigma": self.sigma, "evolution/axis_ratio": self.scales.max() / self.scales.min(),
                "evolution/step_norm": np.linalg.norm(step) * self.sigma}  # fmt: skip

    def decompose(self):
        self.C = (self.C + self.C.T) / 2
        require_finite(covariance=torch.from_numpy(self.C))
        variances, axes = torch.linalg.eigh(torch.from_numpy(self.C))
        if variances[0] <= 1e-14 * variances[-1]:
            sys.exit(f"error: the covariance has variances from {variances[0]:.3g} to {variances[-1]:.3g}: the search "
                     "has nothing left to adapt. The last checkpoint is kept; lower --total-timesteps")  # fmt: skip
        self.scales, self.axes, self.decomposed = variances.sqrt().numpy(), axes.numpy(), self.generation

    def state_dict(self):
        state = {name: getattr(self, name) for name in self.ARRAYS}
        return state | {"sigma": self.sigma, "generation": self.generation, "decomposed": self.decomposed}

    def load_state_dict(self, state):
        vars(self).update({name: state[name].numpy() if name in self.ARRAYS else state[name] for name in state})


# ---- 3. Problems -----------------------------------------------------------------------------------------------------


FUNCTIONS = {  # to be minimised: points (M, n) -> values (M,); all have the minimum 0
    "sphere": lambda x: (x**2).sum(1),
    "ellipsoid": lambda x: (10 ** (6 * np.arange(x.shape[1]) / max(1, x.shape[1] - 1)) * x**2).sum(1),
    "rosenbrock": lambda x: (100 * (x[:, :-1] ** 2 - x[:, 1:]) ** 2 + (x[:, :-1] - 1) ** 2).sum(1),
    "rastrigin": lambda x: (10 + x**2 - 10 * np.cos(2 * np.pi * x)).sum(1),
}


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
    """Games of VectorPong against the scripted player; the seats that are played from outside alternate."""

    obs_size, num_actions = *VectorPong.OBS_SHAPE, VectorPong.NUM_ACTIONS

    def __init__(self, env_id):
        self.close = lambda: None

    def reset(self, seeds, members=1):
        """Each member plays a game of each seed -> observations (members x seeds, D)."""
        self.rows, self.pong = np.arange(members * len(seeds)), VectorPong([*seeds] * members)
        self.seats = np.tile((int(seeds[0]) + np.arange(len(seeds))) % 2, members)
        return self.pong.reset()[self.rows, self.seats]

    def step(self, outputs, running):
        """The policy's outputs (N, num_actions) -> observations (N, D), rewards, ends (N,). Only those of `running`
        games mean something."""
        actions = self.pong.scripted()
        actions[self.rows, self.seats] = outputs.argmax(1)
        obs, rewards, terminated, _ = self.pong.step(actions)
        return obs[self.rows, self.seats], rewards[self.rows, self.seats], terminated

    def keep(self, rows):
        """Goes on with the games `rows` alone."""
        for name, value in vars(self.pong).items():
            if isinstance(value, np.ndarray):
                setattr(self.pong, name, value[rows])
        self.pong.generators = [self.pong.generators[row] for row in rows]
        self.pong.num_games, self.rows, self.seats = len(rows), np.arange(len(rows)), self.seats[rows]


def make_env(env_id):
    env = gym.wrappers.FlattenObservation(gym.make(env_id, disable_env_checker=True))
    actions = env.action_space
    if not isinstance(actions, gym.spaces.Discrete) and not (
        isinstance(actions, gym.spaces.Box) and actions.shape and np.isfinite([actions.low, actions.high]).all()
    ):
        raise NotImplementedError(f"actions {actions}: this script takes Discrete, or a Box with bounds")
    return env


class GymGames:
    """Episodes of Gymnasium environments, which are made when they are needed."""

    def __init__(self, env_id):
        self.env_id, self.envs = env_id, [make_env(env_id)]
        (self.obs_size,), self.actions = self.envs[0].observation_space.shape, self.envs[0].action_space
        self.discrete = isinstance(self.actions, gym.spaces.Discrete)
        self.num_actions = int(self.actions.n) if self.discrete else math.prod(self.actions.shape)
        self.close = lambda: [env.close() for env in self.envs]

    def reset(self, seeds, members=1):
        self.envs += [make_env(self.env_id) for _ in range(members * len(seeds) - len(self.envs))]
        self.playing = self.envs[: members * len(seeds)]
        obs = [env.reset(seed=int(seeds[i % len(seeds)]))[0] for i, env in enumerate(self.playing)]
        self.obs = np.stack(obs).astype(np.float32)
        return self.obs.copy()

    def step(self, outputs, running):
        if self.discrete:
            actions = outputs.argmax(1) + self.actions.start
        else:
            low, high = self.actions.low.astype(np.float64), self.actions.high
            scaled = low.ravel() + (high.ravel() - low.ravel()) * (np.clip(outputs, -1, 1) + 1) / 2
            actions = scaled.reshape(-1, *self.actions.shape).astype(self.actions.dtype)
        rewards, over = np.zeros(len(actions)), np.ones(len(actions), bool)
        for i in np.flatnonzero(running):
            self.obs[i], rewards[i], terminated, truncated, _ = self.playing[i].step(actions[i])
            over[i] = terminated or truncated  # a fitness is a sum of rewards: nothing is bootstrapped
        return self.obs.copy(), rewards, over

    def keep(self, rows):
        self.playing, self.obs = [self.playing[row] for row in rows], self.obs[rows]


def make_games(env_id):
    return PongGames(env_id) if env_id == "VectorPong" else GymGames(env_id)


# ---- 4. Agent, and a whole population of it in one batch -------------------------------------------------------------


# Copied from algos/ppo.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """A policy, linear or with one tanh layer: forward(obs (B, D)) -> (B, num_actions), logits or actions in [-1, 1].
    It normalises observations: their mean and one over their standard deviation are buffers of it."""

    def __init__(self, obs_size, num_actions, hidden_size):
        super().__init__()
        sizes, layers = [obs_size, *[hidden_size] * (hidden_size > 0), num_actions], []
        for number, pair in enumerate(zip(sizes, sizes[1:], strict=False), 2):
            layers += [layer_init(nn.Linear(*pair), 0.01 if number == len(sizes) else 1.0), nn.Tanh()]
        self.layers = nn.Sequential(*layers[:-1])
        self.register_buffer("obs_normal", torch.stack([torch.zeros(obs_size), torch.ones(obs_size)]))

    def forward(self, obs):
        return self.layers(normalize(obs, self.obs_normal))

    def set(self, mean, obs_normal):
        """Takes on the mean (n,) of a search, and the normalisation of observations (2, D)."""
        nn.utils.vector_to_parameters(torch.from_numpy(mean).float(), self.parameters())
        self.obs_normal.copy_(torch.from_numpy(obs_normal))


class Point(nn.Module):
    """A function's argument, as the agent of a run."""

    def __init__(self, dim, start):
        super().__init__()
        self.x = nn.Parameter(torch.full((dim,), start, dtype=torch.float64))

    def set(self, mean, _):
        self.x.data.copy_(torch.from_numpy(mean))


def normalize(obs, obs_normal):
    """Observations (..., D) by their mean and scale, obs_normal (2, D), cut at 5 standard deviations."""
    return ((obs - obs_normal[0]) * obs_normal[1]).clamp(-5, 5)


def batched_policy(layers, obs, obs_normal):
    """What M agents answer to G observations each, (M, G, D) -> (M, G, num_actions). `layers`: weights (M, in, out) and
    biases (M, 1, out)."""
    x = normalize(obs, obs_normal)
    for number, (weight, bias) in enumerate(layers):
        x = torch.baddbmm(bias, x.tanh() if number else x, weight)
    return x


def batched_layers(members, sizes):
    """Flat parameters (M, n), in the order of Agent's, of layers of `sizes` -> their weights and biases."""
    layers, at = [], 0
    for inputs, outputs in zip(sizes, sizes[1:], strict=False):
        weight = members[:, at : at + inputs * outputs].reshape(-1, outputs, inputs).transpose(1, 2)
        at += inputs * outputs
        layers.append((weight.contiguous(), members[:, None, at : at + outputs].contiguous()))
        at += outputs
    return layers


class ObsMoments:
    """Count, sum and sum of squares of observations, (1 + 2 D,), of all generations."""

    def __init__(self, obs_size):
        self.total = np.zeros(1 + 2 * obs_size)

    def normal(self):
        """Mean and one over the standard deviation, (2, D)."""
        count, (first, second) = max(self.total[0], 1), self.total[1:].reshape(2, -1)
        variance = second / count - (first / count) ** 2
        return np.stack([first / count, np.where(self.total[0] > 0, 1 / np.sqrt(np.maximum(variance, 1e-6)), 1.0)])

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"].numpy()


class Evaluator:
    """Evaluates members that it makes from seeds. All that goes in and comes out is bytes, in whichever process."""

    VERSION, TASK, RESULT, FAILURE = range(4)  # the first byte of a message

    def __init__(self, args):
        self.args, self.games, self.obs_size = args, None, 0
        self.family = OpenAIES if args.method == "openai" else CMAES
        if args.env_id not in FUNCTIONS:
            self.games = make_games(args.env_id)
            self.obs_size = self.games.obs_size
            self.sizes = [self.obs_size, *[args.hidden_size] * (args.hidden_size > 0), self.games.num_actions]
            self.num_parameters = sum((i + 1) * o for i, o in zip(self.sizes, self.sizes[1:], strict=False))
        else:
            self.num_parameters = args.dim

    def answer(self, message):
        """A version (mean, normalisation, spread) is kept; a task (seeds) gives a result: fitness and frames of each
        member, and the moments of the observations."""
        if message[0] == self.VERSION:
            parts = self.num_parameters, self.num_parameters + 2 * self.obs_size
            self.mean, obs_normal, self.spread = np.split(np.frombuffer(message, offset=1), parts)
            self.obs_normal = torch.tensor(obs_normal.reshape(2, -1), dtype=torch.float32)
            return None
        number, env_seed, *seeds = struct.unpack(f"<QQ{(len(message) - 17) // 8}Q", message[1:])
        members = self.family.members(self.mean, self.spread, seeds)
        if self.games is None:
            fitness, frames, moments = -FUNCTIONS[self.args.env_id](members), np.ones(len(members)), np.zeros(1)
        else:
            fitness, frames, moments = self.play(members, env_seed)
        return struct.pack("<BQ", self.RESULT, number) + b"".join(
            array.astype(kind).tobytes() for array, kind in ((fitness, "<f8"), (frames, "<u4"), (moments, "<f8"))
        )

    @torch.inference_mode()
    def play(self, members, env_seed):
        """Members (M, n), each on the same games -> mean return (M,), frames (M,), moments of observations."""
        M, G, D = len(members), self.args.games, self.obs_size
        seeds = np.random.SeedSequence(env_seed).generate_state(G)
        obs = self.games.reset(seeds, M)
        layers = batched_layers(torch.from_numpy(members).float(), self.sizes)
        running, returns, frames, at = np.ones((M, G), bool), np.zeros((M, G)), np.zeros((M, G)), np.arange(M)
        moments = torch.zeros(1 + 2 * D, dtype=torch.float64)
        for _ in range(self.args.max_episode_steps):
            seen = torch.from_numpy(obs)
            if self.args.norm_obs:
                some = torch.from_numpy(running[at].ravel()).float()
                moments += torch.cat([some.sum()[None], some @ seen, some @ seen**2])
            outputs = batched_policy(layers, seen.reshape(len(at), G, D), self.obs_normal)
            obs, rewards, over = self.games.step(outputs.flatten(0, 1).numpy(), running[at].ravel())
            returns[at] += rewards.reshape(-1, G) * running[at]
            frames[at] += running[at]
            running[at] &= ~over.reshape(-1, G)
            if not np.isfinite(obs.sum()):  # such an episode ends here, and its member's fitness is no number
                broken = ~np.isfinite(obs.reshape(len(at), -1)).all(1)
                obs.reshape(len(at), -1)[broken] = 0
                returns[at[broken]], running[at[broken]] = np.nan, False
            busy = running[at].any(1)
            if not busy.any():
                break
            if busy.mean() < 0.8:  # those that are through leave the batch
                rows = np.flatnonzero(busy.repeat(G))
                obs, at, chosen = obs[rows], at[busy], torch.from_numpy(np.flatnonzero(busy))
                layers = [(weight[chosen], bias[chosen]) for weight, bias in layers]
                self.games.keep(rows)
        return returns.mean(1), frames.sum(1), moments.numpy()

    def close(self):
        if self.games is not None:
            self.games.close()


# ---- 5. The farm -----------------------------------------------------------------------------------------------------


def send(link, message):
    link.sendall(struct.pack("<I", len(message)) + message)


def receive(link):
    """The next message of a socket. ConnectionError at its end, TimeoutError after the socket's time-out."""

    def exactly(size):
        data = bytearray()
        while len(data) < size:
            if not (part := link.recv(min(size - len(data), 1 << 20))):
                raise ConnectionError("closed")
            data += part
        return bytes(data)

    return exactly(struct.unpack("<I", exactly(4))[0])


def worker_process(args, link):
    """Answers messages; at last the reason, if it cannot go on."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: so it ends with its parent, even if stopped
    if os.getppid() != multiprocessing.parent_process().pid:  # which died before that
        return
    try:
        torch.set_num_threads(1)
        evaluator = Evaluator(args)
        while True:
            result = evaluator.answer(receive(link))
            if result is not None:
                send(link, result)
    except ConnectionError:
        return
    except (Exception, SystemExit) as error:  # an environment may ask to exit: that is no end of a run
        code = getattr(error, "code", None)  # of sys.exit
        text = code.removeprefix("error: ") if isinstance(code, str) else f"{type(error).__name__}: {error}"
        traceback.print_exc()
        send(link, bytes([Evaluator.FAILURE]) + " ".join(text.split()).encode())


@dataclass
class Task:
    number: int
    env_seed: int
    seeds: np.ndarray
    version: int = 0  # of the mean that it was evaluated around
    attempts: int = 0
    message: bytes = b""  # the result


class Worker:
    def __init__(self, process, link):
        self.process, self.link, self.task, self.version, self.since = process, link, None, -1, 0.0


class Farm:
    """Gives tasks to `num_workers` processes, one each at a time, and takes in the results; with 0 processes it does
    them itself. A worker gets weights once a version, and then only seeds. One that dies, or has no answer within
    `worker_timeout`, is replaced, and its task is done again; the third time is a SystemExit."""

    ATTEMPTS = 3
    LAG = 1  # asynchronous: results around an older mean than the last update's are dropped

    def __init__(self, args):
        self.args, self.version, self.message = args, -1, b""
        self.waiting, self.done, self.workers, self.number, self.restarts = deque(), [], [], 0, 0
        self.clock, self.looked, self.evaluator = 0.0, time.monotonic(), None

    def start(self):
        if not self.args.num_workers:
            self.evaluator = Evaluator(self.args)
        self.workers = [self.new_worker() for _ in range(self.args.num_workers)]

    def new_worker(self):
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch's threads in any state
        # Workers inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
        link, remote = socket.socketpair()
        link.settimeout(min(10, self.args.worker_timeout))  # in the middle of a message
        process = context.Process(target=worker_process, args=(self.args, remote))
        process.start()
        remote.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return Worker(process, link)

    def publish(self, mean, obs_normal, spread):
        """The next version, around which tasks are evaluated from now on."""
        self.version += 1
        parts = (np.asarray(part, "<f8").tobytes() for part in (mean, obs_normal, spread))
        self.message = bytes([Evaluator.VERSION]) + b"".join(parts)
        if self.evaluator is not None:
            self.evaluator.answer(self.message)

    def collect(self, make_task, sizes, check):
        """Done tasks: those that make_task(number, size) makes, in their order; asynchronous: any, as they come, and
        how many were dropped. Calls check() while it waits."""
        done, dropped, sizes = [], [], deque(sizes)
        for number in range(len(sizes)) if not self.args.asynchronous else ():
            self.waiting.append(make_task(number, sizes[number]))
        while len(done) < len(sizes):
            check()
            if self.args.asynchronous:
                while len(self.waiting) < sum(worker.task is None for worker in self.workers):
                    self.number += 1
                    self.waiting.append(make_task(self.number, sizes[0]))
            self.poll(1)
            while self.done and len(done) < len(sizes):
                task = self.done.pop(0)
                (done if self.version - task.version <= self.LAG else dropped).append(task)
        return done if self.args.asynchronous else sorted(done, key=lambda task: task.number), dropped

    def hand(self, task):
        """The task's message; it belongs to the newest version now."""
        task.version = self.version
        return struct.pack(f"<BQQ{len(task.seeds)}Q", Evaluator.TASK, task.number, task.env_seed, *task.seeds.tolist())

    def poll(self, seconds):
        """Hands out tasks that wait, or takes in results, after so many seconds at most."""
        if self.evaluator is not None:
            task = self.waiting.popleft()
            task.message = self.evaluator.answer(self.hand(task))
            self.done.append(task)
            return
        now = time.monotonic()
        self.clock, self.looked = self.clock + min(now - self.looked, 60), now  # a Ctrl-Z that stops all is no time-out
        for worker in self.workers:
            if worker.task is None and self.waiting:
                worker.task, worker.since = self.waiting.popleft(), self.clock
                with self.failures(worker):
                    if worker.version != self.version:
                        send(worker.link, self.message)
                        worker.version = self.version
                    send(worker.link, self.hand(worker.task))
        ready = connection.wait([worker.link for worker in self.workers if worker.task is not None], seconds)
        for worker in [worker for worker in self.workers if worker.task is not None]:
            with self.failures(worker):
                if worker.link in ready:
                    worker.task.message = receive(worker.link)
                    if worker.task.message[0] == Evaluator.FAILURE:
                        sys.exit(f"error: a worker failed: {worker.task.message[1:].decode()}")
                    self.done.append(worker.task)
                    worker.task = None
                elif self.clock - worker.since > self.args.worker_timeout:
                    raise TimeoutError

    @contextmanager
    def failures(self, worker):
        """Replaces a worker that does not answer, and lets its task wait first in the line."""
        try:
            yield
        except OSError as error:  # TimeoutError is one
            if hangs := isinstance(error, TimeoutError):
                worker.process.kill()
            worker.process.join(10)
            worker.link.close()
            code, task = worker.process.exitcode, worker.task
            reason = f"did not answer for {self.args.worker_timeout:g} s" if hangs else f"died with exit code {code}"
            task.attempts += 1
            if task.attempts >= self.ATTEMPTS:
                sys.exit(f"error: process {worker.process.pid}, which evaluated the members of seeds {task.seeds[0]}, "
                         f"..., {reason}, and {self.ATTEMPTS - 1} before it did no better")  # fmt: skip
            print(f"warning: worker process {worker.process.pid} {reason}; a new one does its task", file=sys.stderr)
            self.waiting.appendleft(task)
            self.restarts += 1
            self.workers[self.workers.index(worker)] = self.new_worker()

    def results(self, done):
        """Fitness (M,), frames (M,) and moments of the observations of done tasks, in their order; bytes per
        evaluation on the wire, both ways, the length prefixes too."""
        per_seed = OpenAIES.members_per_seed if self.args.method == "openai" else CMAES.members_per_seed
        fitness, frames, moments, size = [], [], 0, 0
        for task in done:
            count = per_seed * len(task.seeds)
            fitness.append(np.frombuffer(task.message, "<f8", count, 9))
            frames.append(np.frombuffer(task.message, "<u4", count, 9 + 8 * count))
            moments = moments + np.frombuffer(task.message, "<f8", -1, 9 + 12 * count)
            size += 4 + 17 + 8 * len(task.seeds) + 4 + len(task.message)
        fitness = np.concatenate(fitness)
        return fitness, np.concatenate(frames), moments, size / len(fitness)

    def close(self):
        for end in ("kill", "join"):
            for worker in self.workers:
                getattr(worker.process, end)()
        if self.evaluator is not None:
            self.evaluator.close()


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


@torch.no_grad()
def evaluate(agent, args, check=lambda: None):
    """Plays args.eval_episodes episodes in environments of their own, seeded by args.eval_seed alone -> a row for each,
    its raw return and length; of a function its value at the mean. Touches no training state. `check` may end it."""
    if args.env_id in FUNCTIONS:
        return [{"split": "eval", "return": -float(FUNCTIONS[args.env_id](agent.x.numpy()[None])[0]), "length": 1}]
    seeds = np.random.SeedSequence(args.eval_seed).generate_state(args.eval_episodes)
    with closing(make_games(args.env_id)) as games:
        obs, running = games.reset(seeds), np.ones(len(seeds), bool)
        returns, lengths = np.zeros((2, len(seeds)))
        while running.any() and lengths.max() < args.eval_max_steps:
            check()
            outputs = agent(torch.from_numpy(obs))
            require_finite(policy_output=outputs)
            obs, rewards, over = games.step(outputs.numpy(), running)
            returns, lengths = returns + rewards * running, lengths + running
            running &= ~over
    if running.any():
        print(f"note: {running.sum()} evaluation episodes were cut off at --eval-max-steps", file=sys.stderr)
    return [{"split": "eval", "return": float(r), "length": int(n)} for r, n in zip(returns, lengths, strict=True)]


class Progress:
    """What a run has found so far."""

    def __init__(self):
        self.best, self.episodes = -math.inf, 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, state):
        vars(self).update(state)


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
        with closing(Evaluator(args)) as sizes:
            obs_size, num_actions = sizes.obs_size, getattr(sizes.games, "num_actions", 0)
        is_policy = args.env_id not in FUNCTIONS
        agent = Agent(obs_size, num_actions, args.hidden_size) if is_policy else Point(args.dim, args.start)
        mean = nn.utils.parameters_to_vector(agent.parameters()).detach().double().numpy()
        search = (OpenAIES if args.method == "openai" else CMAES)(mean, args)
        moments, progress, farm = ObsMoments(obs_size), Progress(), run.enter_context(closing(Farm(args)))
        update, global_step, row = run.restore(
            agent=agent, search=search, moments=moments, progress=progress, random=random
        )
        if args.eval_only:
            means = run.log_eval(global_step, evaluate(agent, args, run.check_signals))
            print(json.dumps(means))
            return means
        farm.start()
        target = math.inf if args.target is None else -args.target
        sizes = [min(args.task_members, search.population_size - at)
                 for at in range(0, search.population_size, args.task_members)]  # fmt: skip

        while global_step < args.total_timesteps and progress.best < target:
            run.checkpoint(update, global_step, row)

            # Evaluate a generation. All randomness is drawn here; what it becomes is the same in any process.
            begun = time.perf_counter()
            farm.publish(search.version()[0], moments.normal(), search.version()[1])
            env_seed = int(random.minibatches.integers(2**63))

            def make_task(number, size, env_seed=env_seed):
                seeds = random.minibatches.integers(2**63, size=size // search.members_per_seed)
                return Task(number, env_seed, seeds)

            done, dropped = farm.collect(make_task, sizes, run.check_signals)
            fitness, frames, seen, wire_bytes = farm.results(done)
            global_step += int(frames.sum()) + sum(int(farm.results([task])[1].sum()) for task in dropped)
            collected = time.perf_counter()

            # Update the search and the normalisation; the agent is the new mean.
            finite = np.isfinite(fitness)
            if not finite.any():
                sys.exit(f"error: no fitness of the {len(fitness)} in generation {update} is finite. The last good "
                         "checkpoint is kept; lower --sigma or --learning-rate, or look at the rewards")  # fmt: skip
            metrics = search.update(np.concatenate([task.seeds for task in done]), fitness)
            if is_policy and args.norm_obs:
                moments.total = moments.total + seen
            mean = search.version()[0]
            require_finite(mean=torch.from_numpy(mean), observations=torch.from_numpy(moments.total))
            agent.set(mean, moments.normal())
            progress.best = max(progress.best, float(fitness[finite].max()))
            progress.episodes += len(fitness) * (args.games if is_policy else 1)

            # Log and evaluate.
            update += 1
            last = global_step >= args.total_timesteps or progress.best >= target
            lags = np.array([farm.version - task.version for task in done])
            row = metrics | {
                "charts/episodic_return": fitness[finite].mean(), "charts/episodes": progress.episodes,
                "charts/episodic_length": frames.mean() / (args.games if is_policy else 1), "charts/update": update,
                "evolution/fitness_max": fitness[finite].max(), "evolution/fitness_min": fitness[finite].min(),
                "evolution/fitness_std": fitness[finite].std(), "evolution/fitness_best": progress.best,
                "evolution/not_finite": (~finite).sum(), "evolution/mean_norm": np.linalg.norm(mean),
                "async/bytes_per_evaluation": wire_bytes, "async/version_bytes": 4 + len(farm.message),
                "async/policy_lag_mean": lags.mean(), "async/late": (lags > 0).mean(), "async/dropped": len(dropped),
                "async/restarts": farm.restarts, "perf/collect_s": collected - begun,
                "perf/update_s": time.perf_counter() - collected,
            }  # fmt: skip
            if last or (args.eval_interval and update % args.eval_interval == 0):
                begun = time.perf_counter()
                row |= run.log_eval(global_step, evaluate(agent, args, run.check_signals))
                row["perf/eval_s"] = time.perf_counter() - begun
            if last or update % args.log_interval == 0:
                run.log(global_step, row | {})  # which adds to it

        return run.finish(update, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
