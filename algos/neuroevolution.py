"""Neuroevolution: a genetic algorithm over network weights, and its Lamarckian form, whose children train by PPO.

Papers: Such et al. 2017, arXiv:1712.06567 (genetic algorithms over weights); Zheng et al. 2019, "Wuji", and Lamarckian
(crossover of networks by tensors, layers and channels; reinforcement learning between birth and evaluation).

  GA:          python algos/neuroevolution.py --env-id VectorPong --total-timesteps 20000000
  Lamarckian:  the same with --train-steps 65536 --population-size 8 --num-children 8 --num-elites 4 --mutation-std 0.01
               --no-fitness-before (children inherit trained weights)
  Baldwinian:  that with --inheritance baldwinian (the control: fitness after training, untrained weights inherited)
  Evaluate:    the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: seed 1, 20 greedy games: GA 0.8 (47 CPU-seconds), Lamarckian 12.5 (143), of at most 20 (commit f57a787).
Differs from the papers: the members share one process and one batch; who stays is evaluated again each generation.
"""

import ast
import fcntl
import hashlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
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
    device: Literal["auto", "cpu", "cuda"] = "cpu"  # of the networks (small ones: a CPU is fast enough)
    deterministic: bool = False  # only deterministic GPU kernels (a CPU run always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the networks; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 5  # generations between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 1  # generations between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # environment
    env_id: str = "VectorPong"  # or a Gymnasium id, also module:id; vector observations, discrete actions

    # evolution
    total_timesteps: int = 20_000_000  # frames of all members, trained and evaluated; rounded up to whole generations
    population_size: int = 32  # individuals that survive a generation
    num_children: int = 32  # children born in a generation
    num_elites: int = 8  # the best of the population, evaluated again beside the children; the others make room
    # best: a copy of the fitter parent; split: one cut between two layers; split_layer: one cut at an output channel of
    # any layer; split_layers: each layer cut at one of its output channels; sbx: simulated binary, each weight by
    # itself; sbx_tensor: the same with one factor a tensor, along the line between the parents' tensors
    crossover: Literal["best", "split", "split_layer", "split_layers", "sbx", "sbx_tensor"] = "best"
    sbx_eta: float = 20.0  # of sbx*: the larger, the nearer to a parent
    mutation_std: float = 0.05  # standard deviation of what is added to each weight of a child
    fitness_episodes: int = 10  # games that a fitness is the mean return of, the same for all of a generation
    hidden_size: int = 64  # units of each of the network's two layers

    # training between birth and evaluation (PPO)
    train_steps: int = 0  # frames of a child, rounded up to whole rollouts; 0: none, the plain genetic algorithm
    inheritance: Literal["lamarckian", "baldwinian"] = "lamarckian"  # a child inherits trained weights, or those before
    fitness_before: bool = True  # also evaluate children before they train, for the lineage (these frames count)
    train_envs: int = 16  # games of a child, side by side
    num_steps: int = 64  # frames of each game in a rollout
    learning_rate: float = 3e-3  # Adam step size
    gamma: float = 0.95  # discount
    gae_lambda: float = 0.95  # GAE trace decay
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    ent_coef: float = 0.01  # entropy bonus
    vf_coef: float = 0.5  # value loss weight
    max_grad_norm: float = 0.5  # limit of each child's gradient norm

    # evaluation of the champion
    eval_interval: int = 10  # generations between evaluations; 0: only at the end
    eval_episodes: int = 20  # episodes per evaluation
    eval_max_steps: int = 27_000  # episodes still running after so many steps count as they are; fitness's too
    eval_seed: int = 10_000  # seeds the evaluation episodes, the same for every run and algorithm
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    train_frames: int = field(init=False)  # of a child: train_steps in whole rollouts
    batch_size: int = field(init=False)  # frames of a generation at most, by which the last one may go beyond the total

    def __post_init__(self):
        at_least_2 = dict.fromkeys(("population_size", "hidden_size"), (2, math.inf))
        check_numbers(self, seed=(0, math.inf), train_steps=(0, math.inf), eval_interval=(0, math.inf), gamma=(0, 1),
                      num_elites=(1, self.population_size), gae_lambda=(0, 1), torch_threads=(0, 1024),
                      eval_seed=(0, 2**64 - 1), num_children=(1, 10_000), **at_least_2)  # fmt: skip
        if self.num_children + self.num_elites < self.population_size:
            least = self.population_size - self.num_elites
            raise ValueError(f"--num-children {self.num_children} and --num-elites {self.num_elites} do not fill "
                             f"--population-size {self.population_size}: use {least} children or more")  # fmt: skip
        if self.inheritance == "baldwinian" and not self.train_steps:
            raise ValueError("--inheritance baldwinian without training: give --train-steps, as 16384")
        batch, born = self.train_envs * self.num_steps, max(self.num_children, self.population_size)
        if self.train_steps and batch // self.num_minibatches < 2:
            raise ValueError(f"--num-minibatches {self.num_minibatches}: less than 2 of {batch} frames a minibatch")
        if self.train_steps and batch % self.num_minibatches:
            fitting = next(n for n in range(self.num_minibatches, 0, -1) if batch % n == 0)
            raise ValueError(f"--num-minibatches {self.num_minibatches} does not divide --train-envs {self.train_envs} "
                             f"x --num-steps {self.num_steps} = {batch}: try {fitting}")  # fmt: skip
        self.train_frames = -(-self.train_steps // batch) * batch
        members = born * (2 if self.train_steps and self.fitness_before else 1) + self.num_elites
        self.batch_size = born * self.train_frames + members * self.fitness_episodes * self.eval_max_steps
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


# ---- 2. Variation: an individual's genome is the list of its network's arrays, a weight (out, in) and a bias (out,) a
# ---- layer. `a` is the fitter parent ---------------------------------------------------------------------------------


def best(a, b, rng):
    """A copy of the fitter parent."""
    return [x.copy() for x in a]


def join_channels(a, b, cuts, rng):
    """Each layer's first `cuts[k]` output channels of one parent, the others of the other one; which one is a toss."""
    a, b = (a, b) if rng.random() < 0.5 else (b, a)
    return [np.concatenate([x[: cuts[k // 2]], y[cuts[k // 2] :]]) for k, (x, y) in enumerate(zip(a, b, strict=True))]


def split(a, b, rng):
    """One cut between two layers: the layers before it are one parent's, those after it the other's."""
    sizes = np.array([len(x) for x in a[::2]])
    return join_channels(a, b, np.where(np.arange(len(sizes)) < rng.integers(1, len(sizes)), sizes, 0), rng)


def split_layer(a, b, rng):
    """One cut at an output channel, drawn from those of all layers: it goes through a layer, or between two."""
    sizes = np.array([len(x) for x in a[::2]])
    return join_channels(a, b, np.clip(rng.integers(1, sizes.sum()) - (sizes.cumsum() - sizes), 0, sizes), rng)


def split_layers(a, b, rng):
    """Every layer is cut at one of its output channels."""
    return join_channels(a, b, [rng.integers(1, len(x)) for x in a[::2]], rng)


def spread_factor(r, eta):
    """SBX's spread factor without bounds (Deb and Agrawal 1995) for r uniform in [0, 1), of r's shape."""
    return np.where(r <= 0.5, 2 * r, 1 / (2 - 2 * r)) ** (1 / (eta + 1))


def sbx(a, b, rng, eta, by_tensor=False):
    """(a + b) / 2 -+ beta (a - b) / 2: a factor and a sign for each weight, or for each array (then the child's array
    lies on the line through its parents')."""
    child = []
    for x, y in zip(a, b, strict=True):
        shape = () if by_tensor else x.shape
        beta = spread_factor(rng.random(shape), eta) * rng.choice([-1, 1], shape)
        child.append(((x + y) / 2 + beta * (x - y) / 2).astype(x.dtype))
    return child


def crossed(a, b, operator, eta, rng):
    """A child's genome by the operator's name. Neither parent is changed."""
    if operator.startswith("sbx"):
        return sbx(a, b, rng, eta, operator == "sbx_tensor")
    return {"best": best, "split": split, "split_layer": split_layer, "split_layers": split_layers}[operator](a, b, rng)


def mutated(genome, std, rng):
    """Gaussian noise is added to all weights."""
    return [x + np.float32(std) * rng.standard_normal(x.shape, np.float32) for x in genome]


# ---- 3. Selection ----------------------------------------------------------------------------------------------------


def draw_parents(fitness, rng):
    """Two different parents, each the fitter of two drawn without replacement, the fitter first; fitness (N,). One that
    is NaN is never drawn; where one alone is a number, it is both."""
    left, parents = np.flatnonzero(np.isfinite(fitness)), []
    for _ in range(2):
        drawn = rng.choice(left, min(2, len(left)), replace=False)
        parents.append(int(drawn[fitness[drawn].argmax()]))
        left = left[left != parents[-1]] if len(left) > 1 else left
    return sorted(parents, key=lambda i: -fitness[i])


def repeated(genome):
    """Which of the individuals, arrays (N, ...), are equal to one before them: (N,)."""
    seen, found = set(), []
    for rows in zip(*genome, strict=True):
        key = b"".join(row.tobytes() for row in rows)
        found.append(key in seen)
        seen.add(key)
    return np.array(found)


def survivors(fitness, duplicate, count):
    """The `count` that stay, fittest first; of equal ones the first. Duplicates, and then those whose fitness is NaN,
    only if there are too few others; all (N,)."""
    return np.lexsort((-np.nan_to_num(fitness, nan=-np.inf), duplicate, np.isnan(fitness)))[:count]


class Population:
    """Individuals as rows of arrays: what children inherit, `genome`; what plays, `weights` (the same arrays unless the
    inheritance is Baldwinian); `table`, by name, (N,)."""

    def __init__(self, genome=(), weights=(), table=None):
        self.genome, self.weights, self.table = [*genome], [*weights], table or {}

    def __len__(self):
        return len(self.table["id"])

    def take(self, rows):
        table = {name: column[rows] for name, column in self.table.items()}
        return Population([x[rows] for x in self.genome], [x[rows] for x in self.weights], table)

    def joined(self, other):
        genome, weights = (
            [np.concatenate(pair) for pair in zip(*pairs, strict=True)]
            for pairs in ((self.genome, other.genome), (self.weights, other.weights))
        )
        return Population(genome, weights, {k: np.concatenate([v, other.table[k]]) for k, v in self.table.items()})

    def state_dict(self):
        return {"genome": self.genome, "weights": self.weights, "table": self.table}

    def load_state_dict(self, state):
        self.genome, self.weights = ([x.numpy().copy() for x in state[name]] for name in ("genome", "weights"))
        self.table = {name: column.numpy().copy() for name, column in state["table"].items()}


# ---- 4. Environments: games side by side, of all members -------------------------------------------------------------


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
    """Vector Pong against the scripted player. Each of `members` plays the games of the same seeds, in either seat by
    turns. step(actions) -> obs, reward, terminated, truncated, info, arrays over all games."""

    def __init__(self, seeds, members):
        self.pong, self.seats = VectorPong([*seeds] * members), np.arange(len(seeds) * members) % len(seeds) % 2
        self.obs, self.num_actions = self.own(self.pong.reset()), VectorPong.NUM_ACTIONS

    def own(self, both):
        return both[np.arange(len(both)), self.seats]

    def step(self, actions):
        both = self.pong.scripted()
        both[np.arange(len(both)), self.seats] = actions
        obs, rewards, terminated, info = self.pong.step(both)
        self.obs = self.own(obs)
        never = np.zeros(len(both), bool)
        return self.obs, self.own(rewards), terminated, never, {"final_obs": self.own(info["final_obs"])}

    def keep(self, games):
        """Goes on with the games of these indices, alone."""
        for name, value in vars(self.pong).items():
            if isinstance(value, np.ndarray):
                setattr(self.pong, name, value[games])
        self.pong.generators, self.pong.num_games = [self.pong.generators[i] for i in games], len(games)
        self.obs, self.seats = self.obs[games], self.seats[games]

    def close(self):
        """There is nothing to close."""


class GymGames:
    """The same of a Gymnasium environment: each game draws a seed for every episode from its own generator."""

    def __init__(self, env_id, seeds, members):
        self.envs = [gym.wrappers.FlattenObservation(gym.make(env_id)) for _ in range(len(seeds) * members)]
        self.action_space = self.envs[0].action_space
        if not isinstance(self.action_space, gym.spaces.Discrete):
            sys.exit(f"error: actions {self.action_space}: this script takes Discrete")
        self.num_actions = int(self.action_space.n)
        self.obs = np.zeros((len(self.envs), *self.envs[0].observation_space.shape), np.float32)
        self.rngs = [np.random.default_rng(seed) for _ in range(members) for seed in seeds]
        self.seeds, self.actions = [0] * len(self.envs), [array("q") for _ in self.envs]
        self.returns, self.finished = np.zeros(len(self.envs)), []
        for i in range(len(self.envs)):
            self.begin(i)

    # Copied from algos/ppo.py:Envs.call
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

    # Copied from algos/ppo.py:Envs.begin
    def begin(self, i):
        self.seeds[i], self.actions[i], self.returns[i] = int(self.rngs[i].integers(2**31)), array("q"), 0
        self.call(i, "reset", seed=self.seeds[i])

    # Copied from algos/ppo.py:Envs.step
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

    def keep(self, games):
        for i in {*range(len(self.envs))} - {*games.tolist()}:
            self.envs[i].close()
        for name in ("envs", "rngs", "seeds", "actions"):
            setattr(self, name, [getattr(self, name)[i] for i in games])
        self.obs, self.returns = self.obs[games], self.returns[games]

    # Copied from algos/ppo.py:Envs.close
    def close(self):
        for env in self.envs:
            env.close()


def make_games(env_id, seeds, members):
    return PongGames(seeds, members) if env_id == "VectorPong" else GymGames(env_id, seeds, members)


# ---- 5. Agent and mathematics ----------------------------------------------------------------------------------------


# Copied from algos/ppo.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """One tanh MLP for policy and value: forward(obs (B, D)) -> logits (B, num_actions), values (B,). A genome is its
    parameters in their order."""

    def __init__(self, obs_shape, num_actions, hidden_size):
        super().__init__()
        self.net = nn.Sequential(layer_init(nn.Linear(*obs_shape, hidden_size)), nn.Tanh(),
                                 layer_init(nn.Linear(hidden_size, hidden_size)), nn.Tanh(),
                                 layer_init(nn.Linear(hidden_size, num_actions + 1), 0.1))  # fmt: skip

    def forward(self, obs):
        out = self.net(obs)
        return out[:, :-1], out[:, -1]


def forward(weights, obs):
    """`Agent.forward` of all members at once: arrays (P, out, in) and (P, out) a layer, obs (P, B, D) -> logits
    (P, B, num_actions), values (P, B)."""
    for k in range(0, len(weights), 2):
        obs = torch.tanh(obs) if k else obs
        obs = torch.baddbmm(weights[k + 1][:, None], obs, weights[k].transpose(1, 2))
    return obs[..., :-1], obs[..., -1]


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


def clip_by_member(gradients, limit):
    """In place: each member's gradient, arrays (P, ...), gets a norm of at most `limit`. Returns the old ones, (P,)."""
    norms = torch.stack([x.flatten(1).norm(dim=1) for x in gradients]).norm(dim=0)
    scale = (limit / (norms + 1e-6)).clamp(max=1)
    for x in gradients:
        x.mul_(scale.view(-1, *[1] * (x.ndim - 1)))
    return norms


@torch.no_grad()
def play(weights, games, shape, max_steps, check=lambda: None):
    """P members play E games each to the end, in a batch, by their likeliest actions: weights (P, ...), games (P x E),
    shape (P, E) -> returns, lengths (P, E). Returns are NaN where a member's network gives what is not finite.

    Games that are over are left out: the batch is cut to the members and places still in use when that halves it.
    """
    device, where = weights[0].device, np.arange(math.prod(shape)).reshape(shape)  # the games of the batch
    returns, lengths, running = np.zeros(where.size), np.zeros(where.size, np.int64), np.ones(where.size, bool)
    members, sums = torch.arange(shape[0], device=device), torch.zeros(shape[0], device=device)
    for _ in range(max_steps):
        check()
        logits, _ = forward(weights, torch.as_tensor(games.obs, device=device).view(*where.shape, -1))
        sums[members] += logits.sum((1, 2))
        _, rewards, terminated, truncated, _ = games.step(logits.argmax(-1).flatten().cpu().numpy())
        at, over = where.ravel(), terminated | truncated
        returns[at] += rewards * running[at]
        lengths[at] += running[at]
        if not over.any():
            continue
        running[at[over]] = False
        left = running[where]
        if not left.any():
            break
        rows, places = np.flatnonzero(left.any(1)), left.sum(1).max()
        if 2 * len(rows) * places <= where.size:
            order = np.argsort(~left[rows], axis=1, kind="stable")[:, :places]
            kept = rows[:, None] * where.shape[1] + order
            games.keep(kept.ravel())
            where, rows = at[kept], torch.as_tensor(rows, device=device)
            weights, members = [x[rows] for x in weights], members[rows]
    returns = np.where(torch.isfinite(sums).cpu().numpy()[:, None], returns.reshape(shape), np.nan)
    return returns, lengths.reshape(shape)


def ppo_leg(weights, games, args, generator, rng, check=lambda: None):
    """The members' training: weights (P, ...), games (P x train_envs) -> the trained weights, means of the losses.

    All members play and learn in one batch. No term of one's loss holds another's weights, and Adam works on each
    weight by itself: each learns as if it was alone, with an optimiser of its own that begins with the leg.
    """
    weights = [x.clone().requires_grad_() for x in weights]
    P, E, T, losses = len(weights[0]), args.train_envs, args.num_steps, []
    optimizer, device = torch.optim.Adam(weights, lr=args.learning_rate, eps=1e-5), weights[0].device
    obs = torch.zeros((T + 1, P, E, games.obs.shape[1]), device=device)
    actions, logprobs = torch.zeros((T, P, E), dtype=torch.int64, device=device), torch.zeros((T, P, E), device=device)
    rewards, values, cut_values = (np.zeros((T, P * E), np.float32) for _ in range(3))
    terminated, truncated = np.zeros((2, T, P * E), bool)
    for _ in range(-(-args.train_steps // (E * T))):
        check()

        # Collect: T steps of every member's games.
        with torch.no_grad():
            for t in range(T):
                obs[t] = torch.as_tensor(games.obs, device=device).view(P, E, -1)
                logits, value = forward(weights, obs[t])
                noise = torch.empty_like(logits).exponential_(generator=generator)
                actions[t] = (logits - noise.log()).argmax(-1)  # Gumbel: a sample, and no error where logits are NaN
                logprobs[t] = logits.log_softmax(-1).gather(-1, actions[t][..., None])[..., 0]
                values[t] = value.flatten().cpu().numpy()
                _, rewards[t], terminated[t], truncated[t], info = games.step(actions[t].flatten().cpu().numpy())
                if (truncated[t] & ~terminated[t]).any():  # the next observation is another episode's
                    final = torch.as_tensor(info["final_obs"], device=device).view(P, E, -1)
                    cut_values[t] = forward(weights, final)[1].flatten().cpu().numpy()
            obs[T] = torch.as_tensor(games.obs, device=device).view(P, E, -1)
            next_values = np.vstack([values[1:], forward(weights, obs[T])[1].flatten().cpu().numpy()[None]])
        next_values = np.where(truncated & ~terminated, cut_values, next_values)
        advantages, returns = gae(rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda)

        # Optimise: minibatches of the members' steps, (P, B).
        b = {"obs": obs[:T], "actions": actions, "logprobs": logprobs}
        b |= {name: torch.as_tensor(x, dtype=torch.float32, device=device).view(T, P, E)
              for name, x in (("values", values), ("advantages", advantages), ("returns", returns))}  # fmt: skip
        flat = {name: x.transpose(0, 1).flatten(1, 2) for name, x in b.items()}
        epochs = (rng.permutation(T * E) for _ in range(args.update_epochs))
        for rows in (rows for epoch in epochs for rows in np.split(epoch, args.num_minibatches)):
            b = {name: x[:, torch.as_tensor(rows, device=device)] for name, x in flat.items()}
            advantage = b["advantages"] - b["advantages"].mean(1, keepdim=True)
            advantage = advantage / (b["advantages"].std(1, keepdim=True) + 1e-8)
            logits, value = forward(weights, b["obs"])
            policy = torch.distributions.Categorical(logits=logits, validate_args=False)
            loss, parts = ppo_loss(policy.log_prob(b["actions"]), policy.entropy(), value, b["logprobs"], b["values"],
                                   advantage, b["returns"], args.clip_coef, False, args.ent_coef,
                                   args.vf_coef)  # fmt: skip
            optimizer.zero_grad()
            (loss * P).backward()  # the sum of the members' means
            grad_norm = clip_by_member([x.grad for x in weights], args.max_grad_norm)
            optimizer.step()
            losses.append(torch.stack([*parts.values(), grad_norm.mean()]).detach())
    names = [f"losses/{name}" for name in (*parts, "grad_norm")]
    return [x.detach() for x in weights], dict(zip(names, torch.stack(losses).mean(0).tolist(), strict=True))


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


RunLogger.LOGS = ("lineage.jsonl", *RunLogger.LOGS)  # it is cut on resume, too


def draw_lineage(rows):
    """A picture (PNG bytes) of lineage.jsonl's rows: the fitness of each individual over the frames, lines to its
    parents, and the line of the last champion back to its first ancestor thick."""
    from matplotlib.collections import LineCollection
    from matplotlib.figure import Figure

    def point(individual, generation):
        row = found[individual, generation]
        return row["global_step"], math.nan if row["fitness"] is None else row["fitness"]

    found = {(row["individual"], row["generation"]): row for row in rows}
    pairs = [((i, g), (parent, g - 1)) for (i, g), row in found.items() for parent in row["parents"]]
    lines = [[point(*one), point(*other)] for one, other in pairs if other in found]  # the file may have been cut
    ancestors = [[key for key, row in found.items() if row["champion"]][-1]]
    while (parents := found[ancestors[-1]]["parents"]) and (before := (parents[0], ancestors[-1][1] - 1)) in found:
        ancestors.append(before)
    figure, shown = Figure(figsize=(9, 5), layout="constrained"), {"elite": "tab:blue", "initial": "tab:gray"}
    axes = figure.subplots()
    axes.add_collection(LineCollection(lines, colors="0.5", linewidths=0.3, alpha=0.4))
    colors = [shown.get(row["operator"], "tab:orange") for row in rows]
    axes.scatter(*zip(*(point(*key) for key in found)), s=4, c=colors, linewidths=0)
    axes.plot(*zip(*(point(*key) for key in ancestors)), color="tab:red", linewidth=2.5, label="the champion's line")
    for label, color in (("children", "tab:orange"), ("evaluated again", "tab:blue"), ("the first", "tab:gray")):
        axes.plot([], [], ".", color=color, label=label)
    axes.set(xlabel="frames of all members", ylabel="fitness (mean return)")
    axes.legend(loc="lower right")
    figure.savefig(buffer := io.BytesIO(), format="png", dpi=120)
    return buffer.getvalue()


# ---- 7. Evaluation and training --------------------------------------------------------------------------------------


def evaluate(agent, args, check=lambda: None):
    """Plays args.eval_episodes episodes in games of their own, seeded by args.eval_seed alone, by the likeliest actions
    -> a row for each, its return and length. Touches no training state. `check` may end it."""
    seeds = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes)
    with closing(make_games(args.env_id, seeds, 1)) as games, torch.no_grad():
        running, device = np.ones(len(seeds), bool), next(agent.parameters()).device
        returns, lengths = np.zeros((2, len(seeds)))
        while running.any() and lengths.max() < args.eval_max_steps:
            check()
            logits, _ = agent(torch.as_tensor(games.obs).to(device))
            require_finite(logits=logits)
            _, reward, terminated, truncated, _ = games.step(logits.argmax(-1).cpu().numpy())
            returns, lengths = returns + reward * running, lengths + running
            running &= ~(terminated | truncated)
    if running.any():
        print(f"note: {running.sum()} evaluation episodes were cut off at --eval-max-steps", file=sys.stderr)
    return [{"split": "eval", "return": float(r), "length": int(n)} for r, n in zip(returns, lengths, strict=True)]


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
        with closing(make_games(args.env_id, [0], 1)) as games:
            obs_shape, num_actions = games.obs.shape[1:], games.num_actions
        agent, population = Agent(obs_shape, num_actions, args.hidden_size).to(device), Population()
        generation, global_step, row = run.restore(agent=agent, population=population, random=random)
        if args.eval_only:
            means = run.log_eval(global_step, evaluate(agent, args, run.check_signals))
            print(json.dumps(means))
            return means
        rng, check = random.minibatches, run.check_signals

        def number(x):
            return float(x) if math.isfinite(x) else None  # JSON's null

        def on_device(arrays):
            return [torch.as_tensor(x, device=device) for x in arrays]

        def fitness_of(weights, seeds):
            """Mean returns, and frames, of individuals (P,): each plays the games of the same seeds."""
            shape = len(weights[0]), args.fitness_episodes
            with closing(make_games(args.env_id, seeds, shape[0])) as games:
                returns, lengths = play(on_device(weights), games, shape, args.eval_max_steps, check)
            return returns.mean(1), lengths.sum(1)

        while global_step < args.total_timesteps:
            run.checkpoint(generation, global_step, row)
            key = *random.envs.spawn_key, generation
            fitness_seeds, train_seeds = np.random.SeedSequence(random.envs.entropy, spawn_key=key).spawn(2)
            fitness_seeds, train_seeds = fitness_seeds.spawn(args.fitness_episodes), train_seeds.spawn(args.train_envs)
            begun, losses = time.perf_counter(), {}

            # ==== The method: birth, ... ==============================================================================
            table, size = population.table, args.num_children if generation else args.population_size
            if generation:
                operator, pairs = args.crossover, [draw_parents(table["fitness"], rng) for _ in range(size)]
                couples = ([[x[i] for x in population.genome] for i in pair] for pair in pairs)
                genomes = [mutated(crossed(*pair, operator, args.sbx_eta, rng), args.mutation_std, rng)
                           for pair in couples]  # fmt: skip
                parents = table["id"][pairs][:, : 1 if operator == "best" else 2]  # those that gave it something
                ages = table["age"][[fitter for fitter, _ in pairs]]
            else:
                operator, parents, ages = "initial", np.zeros((size, 0), np.int64), np.zeros(size, np.int64)
                networks = [agent, *(Agent(obs_shape, num_actions, args.hidden_size) for _ in range(size - 1))]
                genomes = [[x.detach().cpu().numpy() for x in network.parameters()] for network in networks]
            genome = weights = [np.stack(arrays) for arrays in zip(*genomes, strict=True)]

            # ... training, whose outcome is inherited (Lamarck) or not (Baldwin), ...
            before, frames = np.full(size, np.nan), np.zeros(size, np.int64)
            if args.train_steps:
                if args.fitness_before:
                    before, frames = fitness_of(genome, fitness_seeds)
                with closing(make_games(args.env_id, train_seeds, size)) as games:
                    trained, losses = ppo_leg(on_device(genome), games, args, random.actions, rng, check)
                weights, frames = [x.cpu().numpy() for x in trained], frames + args.train_frames
            trained_s = time.perf_counter() - begun

            # ... and evaluation beside the elites, in games that are new to both. The best of them stay.
            ids = np.arange(size) + (args.population_size + (generation - 1) * size if generation else 0)
            born = Population(weights if args.inheritance == "lamarckian" else genome, weights,
                              {"id": ids, "age": ages, "fitness": before, "evaluations": 0 * ids})  # fmt: skip
            elites = population.take(slice(args.num_elites)) if generation else born.take(slice(0))
            everyone, old = elites.joined(born), len(elites)
            fitness, lengths = fitness_of(everyone.weights, fitness_seeds)
            frames = np.concatenate([np.zeros(old, np.int64), frames]) + lengths
            if not np.isfinite(fitness).any():
                sys.exit(f"error: generation {generation}: no fitness of {len(fitness)} individuals is a number: their "
                         "networks' outputs are not finite. The last good checkpoint is kept; lower --learning-rate "
                         "or --mutation-std")  # fmt: skip
            everyone.table |= {"fitness": fitness, "age": everyone.table["age"] + frames}
            everyone.table["evaluations"] = everyone.table["evaluations"] + 1
            duplicates = repeated(everyone.genome)
            stay = survivors(fitness, duplicates, args.population_size)
            vars(population).update(vars(everyone.take(stay)))
            again = np.isfinite(population.table["fitness"]) & (population.table["evaluations"] > 1)
            champion = int(again.argmax())  # the fittest of those evaluated again; before there are any, of all
            for parameter, x in zip(agent.parameters(), population.weights, strict=True):
                parameter.data.copy_(torch.as_tensor(x[champion]))
            # ==========================================================================================================

            global_step += int(frames.sum())
            run.write_rows("lineage.jsonl", global_step, [
                {"generation": generation, "individual": int(everyone.table["id"][i]),
                 "parents": [int(everyone.table["id"][i])] if i < old else parents[i - old].tolist(),
                 "operator": "elite" if i < old else operator,
                 "fitness_before": number(before[i - old]) if i >= old else None, "fitness": number(fitness[i]),
                 "frames": int(frames[i]), "age": int(everyone.table["age"][i]), "stays": bool(i in stay),
                 "champion": bool(i == stay[champion])}
                for i in range(len(everyone))
            ])  # fmt: skip
            last = global_step >= args.total_timesteps
            row = losses | {
                "charts/update": generation + 1, "charts/episodic_return": np.nanmean(fitness),
                "charts/episodic_length": lengths.mean() / args.fitness_episodes,
                "evolution/fitness_max": np.nanmax(fitness), "evolution/fitness_before": np.mean(before),
                "evolution/champion_fitness": population.table["fitness"][champion],
                "evolution/champion_age": population.table["age"][champion],
                "evolution/champion_evaluations": population.table["evaluations"][champion],
                "evolution/duplicates": duplicates.sum(), "evolution/not_finite": np.isnan(fitness).sum(),
                "perf/birth_s": trained_s, "perf/fitness_s": time.perf_counter() - begun - trained_s,
            }  # fmt: skip
            if last or (args.eval_interval and (generation + 1) % args.eval_interval == 0):
                begun = time.perf_counter()
                row |= run.log_eval(global_step, evaluate(agent, args, check))
                row["perf/eval_s"] = time.perf_counter() - begun
            generation += 1
            if last or generation % args.log_interval == 0:
                run.log(global_step, {**row})

        lineage = [json.loads(line) for line in (run.dir / "lineage.jsonl").read_text().splitlines()]
        run.write("lineage.png", draw_lineage(lineage))
        return run.finish(generation, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
