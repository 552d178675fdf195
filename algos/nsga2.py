"""NSGA-II: many solutions of a problem with two or three objectives, on test functions and on policies for Pong.

Paper: Deb, Pratap, Agarwal, Meyarivan 2002, "A Fast and Elitist Multiobjective Genetic Algorithm: NSGA-II". Functions:
Zitzler, Deb, Thiele 2000 (ZDT); Deb, Thiele, Laumanns, Zitzler 2005 (DTLZ). With --problem policy an individual is a
network and the weights of its reward. It is varied, trained by PPO in that reward, evaluated, and its trained network
is what its children inherit, as in Lamarckian (Bai, Shen et al. 2022), use case A.

  Train:     python algos/nsga2.py --problem zdt1
             python algos/nsga2.py --problem policy --pop-size 8 --total-timesteps 96
  Evaluate:  the training command with --eval-only appended (the newest checkpoint's front, or its best policy)

All objectives are minimised. RUN/front.jsonl has each generation's front, front.csv and front.png the last one.
Measured: on all 12 functions IGD at most 1.06 times and hypervolume at least 0.996 times pymoo 0.6.2's in the same run,
in a fifth of its CPU time (0.17 s for ZDT1; medians of seeds 1 to 5, commit 029875e).
Differs from the paper: a child that exists already is drawn again; an individual whose objectives are no numbers is
dropped, and the population is smaller until others come; the matrix of dominance is made at once instead of by lists.
"""

import ast
import difflib
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
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_args

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
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # of the networks. auto: cuda if there is one, else cpu
    deterministic: bool = False  # only deterministic GPU kernels (a CPU run always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the networks; 0: all cores. The count changes rounding
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
    env_id: Annotated[str, tyro.conf.arg(aliases=("--problem",))] = "zdt1"  # zdt1 to 4, zdt6, dtlz1 to 7, or policy
    num_variables: int | None = None  # genes; None: the literature's
    num_objectives: int | None = None  # dtlz1 to 7 have 2 or 3; None: 3

    # algorithm
    total_timesteps: int | None = None  # evaluations; None: 250 generations, dtlz1 and 3: 400, policy: 20
    pop_size: int | None = None  # individuals, and children in a generation; None: 100, policy: 16
    sbx_prob: float = 0.9  # share of the pairs that simulated binary crossover crosses
    sbx_gene_prob: float = 0.5  # share of such a pair's genes that it crosses
    sbx_eta: float = 20.0  # its distribution index: the higher, the nearer are children to their parents
    mutation_prob: float | None = None  # share of the genes that polynomial mutation changes; None: 1/num_variables
    mutation_eta: float = 20.0  # its distribution index

    # policy: networks of Vector Pong against the scripted player
    network_sigma: float = 0.005  # deviation of the noise that a child's network gets on all weights
    fitness_games: int = 8  # games of an evaluation, the same for all individuals
    train_steps: int = 65_536  # frames of PPO before an evaluation, in whole rollouts; 0: no training
    num_envs: int = 16  # games in which an individual is trained, side by side
    num_steps: int = 128  # frames of each in a rollout
    learning_rate: float = 1e-3  # Adam step size; its moments begin anew with each individual
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE trace decay
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    ent_coef: float = 0.01  # entropy bonus
    vf_coef: float = 0.5  # value loss weight
    max_grad_norm: float = 0.5  # gradient norm limit

    # evaluation of the policy with the highest score
    eval_interval: int = 10  # generations between evaluations; 0: only at the end
    eval_episodes: int = 20  # games per evaluation
    eval_max_steps: int = 20_000  # frames of a game, which by its rules has no more; those still running count as is
    eval_seed: int = 10_000  # seeds the evaluation's games, the same for every run and algorithm
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    def __post_init__(self):
        names = [*FUNCTIONS, "policy"]
        if self.env_id not in names:
            near = difflib.get_close_matches(self.env_id.lower(), names, 1, 0)[0]
            raise ValueError(f"--problem {self.env_id} is unknown: did you mean {near}? There are {' '.join(names)}")
        policy = self.env_id == "policy"
        genes, objectives = FUNCTIONS.get(self.env_id, (2, 2))
        dtlz = self.env_id.startswith("dtlz")
        if self.num_objectives is None:
            self.num_objectives = objectives
        if self.num_variables is None:
            self.num_variables = genes + self.num_objectives - objectives
        if self.pop_size is None:
            self.pop_size = 16 if policy else 100
        if self.total_timesteps is None:
            self.total_timesteps = self.pop_size * {"dtlz1": 400, "dtlz3": 400, "policy": 20}.get(self.env_id, 250)
        if self.mutation_prob is None:
            self.mutation_prob = 1 / max(self.num_variables, 1)
        zero = dict.fromkeys(("seed", "eval_interval", "train_steps"), (0, math.inf))
        unit = dict.fromkeys(("sbx_prob", "sbx_gene_prob", "mutation_prob", "gamma", "gae_lambda"), (0, 1))
        check_numbers(self, torch_threads=(0, 1024), eval_seed=(0, 2**64 - 1), pop_size=(2, 5_000),
                      num_variables=(0, 10**6), **zero, **unit)  # fmt: skip
        if self.num_objectives not in ((2, 3) if dtlz else (2,)):
            allowed = "takes 2 or 3" if dtlz else "has 2"
            raise ValueError(f"--num-objectives {self.num_objectives}: {self.env_id} {allowed}")
        least = self.num_objectives if dtlz else 2
        if self.num_variables < least or (policy and self.num_variables > 2):
            allowed = "has 2, its reward weights" if policy else f"takes {least} or more"
            raise ValueError(f"--num-variables {self.num_variables}: {self.env_id} {allowed}")
        size = self.num_envs * self.num_steps
        if policy and self.train_steps and (size % self.num_minibatches or size == self.num_minibatches):
            shape = f"num_envs {self.num_envs} x num_steps {self.num_steps} = {size}"
            raise ValueError(f"--num-minibatches {self.num_minibatches} must divide {shape}, 2 frames or more in each")
        self.num_updates = -(-self.total_timesteps // self.pop_size)


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


# ==== 2. NSGA-II ======================================================================================================


def non_dominated_ranks(objectives):
    """(N, M) -> (N,): 0 for the individuals that none dominates, 1 for those that only these dominate, and so on."""
    size = len(objectives)
    no_worse = np.ones((size, size), bool)
    for values in objectives.T:
        no_worse &= values[:, None] <= values
    dominates = (no_worse & ~no_worse.T).astype(np.float32)  # so that counting is a product of matrices
    ranks, rank = np.full(size, -1), 0
    dominators = dominates.sum(0)  # of each individual, not yet ranked; -1 of the ranked
    while len(front := np.flatnonzero(dominators == 0)):
        ranks[front] = rank
        dominators -= dominates[front].sum(0)
        dominators[front] = -1
        rank += 1
    return ranks


def crowding_distances(objectives, ranks):
    """(N, M), (N,) -> (N,): within each front the sum over objectives of the gap between both neighbours, in parts of
    the front's range; infinite at its ends. An objective in which a front is flat counts for nothing."""
    bounded = np.clip(objectives, -1e300, 1e300)  # an infinite gap in an infinite range is 1, not NaN
    distances = np.zeros(len(bounded))
    for values in bounded.T:
        order = np.lexsort((values, ranks))
        value, edge = values[order], np.flatnonzero(np.diff(ranks[order], prepend=-1, append=-1))
        first, last = edge[:-1], edge[1:] - 1
        ranges, gaps, sizes = value[last] - value[first], np.zeros(len(value)), last - first + 1
        gaps[1:-1] = value[2:] - value[:-2]
        gaps[first] = gaps[last] = math.inf
        gaps[np.repeat((ranges == 0) & (sizes > 1), sizes)] = 0
        distances[order] += gaps / np.repeat(np.where(ranges == 0, 1, ranges), sizes)
    return distances


def tournament(ranks, crowding, number, rng):
    """Deb's: of two individuals that of the lower rank, then that in the less crowded place, wins. `number` winners,
    in whole permutations, so that all take part equally often."""
    rounds = -(-2 * number // len(ranks))
    pairs = np.concatenate([rng.permutation(len(ranks)) for _ in range(rounds)])[: 2 * number].reshape(-1, 2)
    (rank, other), (distance, less) = ranks[pairs].T, crowding[pairs].T
    return np.where((rank < other) | ((rank == other) & (distance > less)), *pairs.T)


def simulated_binary_crossover(parents, lower, upper, eta, prob, gene_prob, rng):
    """Deb and Agrawal 1995, in its bounded form: pairs (P, 2, n) -> children (P, 2, n). A child's distance to the mean
    of its parents is their own times a spread, whose density falls with eta and ends where the bounds are."""
    first, second = parents[:, 0], parents[:, 1]
    crossed = (rng.random((len(parents), 1)) < prob) & (rng.random(first.shape) < gene_prob)
    crossed &= abs(first - second) > 1e-14
    low, high = np.minimum(first, second)[crossed], np.maximum(first, second)[crossed]
    columns = np.nonzero(crossed)[1]
    room = np.stack([low - lower[columns], upper[columns] - high])  # to the bound on either side
    alpha = 2 - (1 + 2 * room / (high - low)) ** -(eta + 1)
    drawn = rng.random(len(low)) * alpha
    spread = np.where(drawn <= 1, drawn, 1 / (2 - drawn)) ** (1 / (eta + 1))
    both = np.stack([low + high - spread[0] * (high - low), low + high + spread[1] * (high - low)]) / 2
    both = np.where(rng.random(len(low)) < 0.5, both, both[::-1])
    children = parents.copy()
    children.swapaxes(0, 1)[:, crossed] = np.clip(both, lower[columns], upper[columns])
    return children


def polynomial_mutation(genes, lower, upper, eta, prob, rng):
    """Deb and Goyal 1996, in its bounded form: (N, n) -> (N, n), each gene changed with probability `prob`."""
    mutated = rng.random(genes.shape) < prob
    columns = np.nonzero(mutated)[1]
    value, low, span = genes[mutated], lower[columns], (upper - lower)[columns]
    drawn = rng.random(len(value))
    down = drawn < 0.5
    room = np.where(down, value - low, low + span - value) / span
    tail = np.where(down, 2 * drawn, 2 - 2 * drawn)  # uniform in [0, 1]
    step = 1 - (tail + (1 - tail) * (1 - room) ** (eta + 1)) ** (1 / (eta + 1))
    changed = genes.copy()
    changed[mutated] = np.clip(value + np.where(down, -step, step) * span, low, low + span)
    return changed


def keys(genes, networks):
    """A text of bytes for each individual: two of the same are one."""
    return [row.tobytes() for row in (np.concatenate([genes, networks], 1) if networks.size else genes)]


class Population:
    """The individuals: genes (N, n), networks (N, W), objectives (N, M), ranks and crowding distances (N,)."""

    ARRAYS = "genes", "networks", "objectives", "ranks", "crowding"

    def __init__(self, problem, rng):
        self.rng, self.lower, self.upper = rng, problem.lower, problem.upper
        self.genes, self.objectives = np.zeros((0, len(problem.lower))), np.zeros((0, problem.num_objectives))
        self.networks = np.zeros((0, problem.network_size), np.float32)
        self.ranks, self.crowding = np.zeros(0, np.int64), np.zeros(0)

    def vary(self, size, args):
        """Genes and networks of `size` children, two of each pair of parents."""
        bounds = self.lower, self.upper
        pairs = tournament(self.ranks, self.crowding, 2 * -(-size // 2), self.rng).reshape(-1, 2)
        genes = self.genes[pairs]
        genes = simulated_binary_crossover(genes, *bounds, args.sbx_eta, args.sbx_prob, args.sbx_gene_prob, self.rng)
        genes = genes.reshape(-1, len(self.lower))[:size]
        genes = polynomial_mutation(genes, *bounds, args.mutation_eta, args.mutation_prob, self.rng)
        fitter = pairs.min(1).repeat(2)[:size]  # `select` leaves the best first
        networks = self.networks[fitter]
        noise = self.rng.standard_normal(networks.shape, np.float32)
        return genes, networks + np.float32(args.network_sigma) * noise

    def children(self, args):
        """Genes and networks of args.pop_size children, and how many were drawn again since they existed already (where
        little varies, all might: the last of 100 attempts counts)."""
        known, parts, left, again = set(keys(self.genes, self.networks)), [], args.pop_size, 0
        for attempt in range(100):
            genes, networks = self.vary(left, args)
            new = [not (key in known or known.add(key)) or attempt == 99 for key in keys(genes, networks)]
            parts.append((genes[new], networks[new]))
            left -= sum(new)
            if not left:
                break
            again += left
        return *map(np.concatenate, zip(*parts)), again

    def select(self, genes, networks, objectives, size):
        """The best `size` of the old and the new by rank, then by crowding distance -> how many were dropped before,
        since they exist already, or since an objective of theirs is NaN."""
        genes, networks = np.concatenate([self.genes, genes]), np.concatenate([self.networks, networks])
        objectives, seen = np.concatenate([self.objectives, objectives]), {}
        unique = [seen.setdefault(key, i) == i for i, key in enumerate(keys(genes, networks))]
        numbers = ~np.isnan(objectives).any(1)
        kept = np.flatnonzero(unique & numbers)
        ranks = non_dominated_ranks(objectives[kept])
        crowding = crowding_distances(objectives[kept], ranks)
        best = np.lexsort((-crowding, ranks))[:size]
        self.genes, self.networks, self.objectives = (x[kept[best]] for x in (genes, networks, objectives))
        self.ranks, self.crowding = ranks[best], crowding[best]
        return len(genes) - sum(unique), int((~numbers).sum())

    @property
    def front(self):
        return np.flatnonzero(self.ranks == 0)

    def state_dict(self):
        return {name: getattr(self, name) for name in self.ARRAYS} | {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        vars(self).update({name: state[name].numpy() for name in self.ARRAYS})


# ==== end of NSGA-II ==================================================================================================


def igd(front, objectives):
    """Inverted generational distance: the mean over the true front's points (K, M) of the distance to the nearest of
    `objectives` (N, M)."""
    return float(np.sqrt(((front[:, None] - objectives) ** 2).sum(-1)).min(1).mean())


def hypervolume(objectives, reference):
    """The volume that (N, 2) or (N, 3) minimised objectives dominate up to `reference`, exactly: slabs along the last
    objective, in each the area below the staircase of the points in or under it. Of two objectives there is one slab.
    """
    points = objectives[(objectives < reference).all(1)]
    if points.shape[1] == 2:
        points, reference = np.pad(points, ((0, 0), (0, 1))), np.append(reference, 1.0)
    points = points[np.argsort(points[:, 0])]
    levels = np.unique(points[:, 2])
    under = points[:, 2] <= levels[:, None]
    height = np.minimum.accumulate(np.where(under, points[:, 1], reference[1]), axis=1)
    areas = (reference[1] - height) @ np.diff(points[:, 0], append=reference[0])
    return float(areas @ np.diff(levels, append=reference[2]))


# ---- 3. Test functions -----------------------------------------------------------------------------------------------

FUNCTIONS = {  # variables and objectives in the literature
    "zdt1": (30, 2), "zdt2": (30, 2), "zdt3": (30, 2), "zdt4": (10, 2), "zdt6": (10, 2), "dtlz1": (7, 3),
    "dtlz2": (12, 3), "dtlz3": (12, 3), "dtlz4": (12, 3), "dtlz5": (12, 3), "dtlz6": (12, 3), "dtlz7": (22, 3),
}  # fmt: skip
ZDT3_PIECES = ((0, 0.0830015349), (0.182228780, 0.2577623634), (0.4093136748, 0.4538821041),
               (0.6183967944, 0.6525117038), (0.8233317983, 0.8518328654))  # fmt: skip


def zdt(number, x):
    """Zitzler et al. 2000: (N, n) -> (N, 2). ZDT1 to 4 and 6; x is in [0, 1], of ZDT4 all but the first in [-5, 5]."""
    f, rest = x[:, 0], x[:, 1:]
    if number == 4:
        g = 1 + (10 + rest**2 - 10 * np.cos(4 * np.pi * rest)).sum(1)
    else:
        g = 1 + 9 * rest.mean(1) ** (0.25 if number == 6 else 1)
    if number == 6:
        f = 1 - np.exp(-4 * f) * np.sin(6 * np.pi * f) ** 6
    share = f / g
    h = 1 - (share**2 if number in (2, 6) else np.sqrt(share))
    if number == 3:
        h = h - share * np.sin(10 * np.pi * f)
    return np.stack([f, g * h], 1)


def dtlz(number, x, num_objectives):
    """Deb et al. 2005: (N, n) in [0, 1] -> (N, M)."""
    place, rest = x[:, : num_objectives - 1], x[:, num_objectives - 1 :]
    if number in (1, 3):
        g = 100 * (1 + (rest - 0.5) ** 2 - np.cos(20 * np.pi * (rest - 0.5))).sum(1)
    elif number == 6:
        g = (rest**0.1).sum(1)
    elif number == 7:
        g = 1 + 9 * rest.mean(1)
    else:
        g = ((rest - 0.5) ** 2).sum(1)
    if number == 7:
        h = num_objectives - (place / (1 + g[:, None]) * (1 + np.sin(3 * np.pi * place))).sum(1)
        return np.column_stack([place, (1 + g) * h])
    if number == 4:
        place = place**100
    elif number in (5, 6):  # the front is a curve: all angles but the first go to 45 degrees
        bent = (1 + 2 * g[:, None] * place[:, 1:]) / (2 * (1 + g[:, None]))
        place = np.concatenate([place[:, :1], bent], 1)
    angle, ones = place * np.pi / 2, np.ones((len(x), 1))
    factor, last = (place, 1 - place) if number == 1 else (np.cos(angle), np.sin(angle))
    products = np.cumprod(np.concatenate([ones, factor], 1), 1) * np.concatenate([last, ones], 1)
    return (0.5 if number == 1 else 1) * (1 + g[:, None]) * products[:, ::-1]


def true_front(name, num_objectives):
    """Points (K, M) of the true front: as many and where pymoo has them, of DTLZ5 to 7 our own."""
    number = int(name[-1])
    if name.startswith("zdt"):
        pieces = {"zdt3": ZDT3_PIECES, "zdt6": ((0.2807753191, 1),)}.get(name, ((0, 1),))
        x = np.concatenate([np.linspace(*piece, 100 // len(pieces)) for piece in pieces])
        h = 1 - (x**2 if number in (2, 6) else np.sqrt(x))
        return np.stack([x, h - x * np.sin(10 * np.pi * x) if number == 3 else h], 1)
    if number == 7:  # a place is on the front where f (1 + sin 3 pi f) is higher than at all smaller f
        f = np.linspace(0, 1, 500 if num_objectives == 2 else 100)
        gain = f * (1 + np.sin(3 * np.pi * f))
        f = f[gain > np.maximum.accumulate(np.append(-1, gain[:-1]))]
        f = np.stack(np.meshgrid(*[f] * (num_objectives - 1)), -1).reshape(-1, num_objectives - 1)
        return dtlz(7, np.column_stack([f, np.zeros(len(f))]), num_objectives)
    if number in (5, 6):
        x = np.full((500, num_objectives), 0.5 if number == 5 else 0.0)
        x[:, 0] = np.linspace(0, 1, 500)
        return dtlz(number, x, num_objectives)
    steps = 99 if num_objectives == 2 else 15  # the simplex, in equal steps (Das and Dennis 1998)
    simplex = np.stack(np.meshgrid(*[np.arange(steps + 1)] * (num_objectives - 1)), -1).reshape(-1, num_objectives - 1)
    simplex = simplex[simplex.sum(1) <= steps]
    simplex = np.column_stack([simplex, steps - simplex.sum(1)]) / steps
    return 0.5 * simplex if number == 1 else simplex / np.linalg.norm(simplex, axis=1, keepdims=True)


class TestFunction:
    """A problem: bounds, evaluate, the true front, and the reference point of the hypervolume."""

    network_size = 0
    __test__ = False  # pytest's

    def __init__(self, name, num_variables, num_objectives):
        self.name, self.num_objectives = name, num_objectives
        self.lower, self.upper = np.zeros(num_variables), np.ones(num_variables)
        if name == "zdt4":
            self.lower[1:], self.upper[1:] = -5, 5
        self.front = true_front(name, num_objectives)
        self.reference = np.full(num_objectives, 0.6 if name == "dtlz1" else 1.1)
        if name == "dtlz7":
            self.reference[-1] = 2 * num_objectives + 0.6
        self.gene_names = [f"x{i + 1}" for i in range(num_variables)]
        self.objective_names = [f"f{i + 1}" for i in range(num_objectives)]

    def initial(self, size, rng):
        return rng.uniform(self.lower, self.upper, (size, len(self.lower))), np.zeros((size, 0), np.float32)

    def objectives(self, genes):
        number = int(self.name[-1])
        return zdt(number, genes) if self.name.startswith("zdt") else dtlz(number, genes, self.num_objectives)

    def evaluate(self, genes, networks, _rng, _check=None):
        """genes (N, n) -> objectives (N, M), the networks as they were, nothing to log."""
        return self.objectives(genes), networks, {}


# ---- 4. Policies -----------------------------------------------------------------------------------------------------


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


# Copied from algos/ppo.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """`count` pairs of a policy and a value network, tanh MLPs, computed at once. forward(obs (count * B, D), those of
    the first pair first) -> logits (count * B, num_actions), values (count * B,)."""

    def __init__(self, obs_shape, num_actions, count=1):
        super().__init__()
        self.count = count
        self.policy, self.value = nn.ParameterList(), nn.ParameterList()
        for layers, outputs, std in ((self.policy, num_actions, 0.01), (self.value, 1, 1.0)):
            for sizes, gain in (((*obs_shape, 64), 2**0.5), ((64, 64), 2**0.5), ((64, outputs), std)):
                layer = [layer_init(nn.Linear(*sizes), gain) for _ in range(count)]
                layers.append(torch.stack([one.weight.data.T for one in layer]))  # (count, in, out)
                layers.append(torch.stack([one.bias.data[None] for one in layer]))  # (count, 1, out)

    def forward(self, obs):
        outputs = []
        for layers in (self.policy, self.value):
            x = obs.reshape(self.count, -1, obs.shape[-1])
            for i in range(0, 6, 2):
                x = torch.baddbmm(layers[i + 1], x.tanh() if i else x, layers[i])
            outputs.append(x.flatten(0, 1))
        return outputs[0], outputs[1][:, 0]

    @torch.no_grad()
    def act(self, obs, generator=None):
        """obs (count * B, D) -> actions, their log-probabilities, values. No generator: the most likely action."""
        logits, value = self(obs)
        logprobs = logits.log_softmax(-1)
        if generator is None:
            action = logits.argmax(-1)
        else:  # the number of shares of [0, 1) that lie below a draw: a network that is not finite takes action 0
            drawn = torch.rand((len(obs), 1), generator=generator, device=obs.device)
            action = (logprobs.exp().cumsum(-1)[:, :-1] < drawn).sum(-1)
        return action, logprobs.gather(-1, action[:, None])[:, 0], value

    @torch.no_grad()
    def vectors(self):
        """The networks as rows (count, W)."""
        return torch.cat([parameter.flatten(1) for parameter in self.parameters()], 1)

    @torch.no_grad()
    def load_vectors(self, rows):
        parameters = list(self.parameters())
        for parameter, part in zip(parameters, rows.split([p[0].numel() for p in parameters], 1), strict=True):
            parameter.copy_(part.view_as(parameter))


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


def play(agent, seeds, max_steps, check=lambda: None):
    """The same games, one a seed, by the most likely actions of each of the agent's policies; seats alternate ->
    score differences, lengths and shares of the frames with a move, (count, games) each."""
    games = VectorPong(list(seeds) * agent.count)
    rows, seats = np.arange(games.num_games), np.tile(np.arange(len(seeds)) % 2, agent.count)
    device = next(agent.parameters()).device
    obs, running = games.reset(), np.ones(games.num_games, bool)
    returns, lengths, moves = np.zeros((3, games.num_games))
    while running.any() and lengths.max() < max_steps:
        check()
        actions = games.scripted()
        actions[rows, seats] = agent.act(torch.as_tensor(obs[rows, seats]).to(device))[0].cpu().numpy()
        obs, reward, terminated, _ = games.step(actions)
        returns, lengths = returns + reward[rows, seats] * running, lengths + running
        moves += (actions[rows, seats] != 1) & running
        running &= ~terminated
    return [x.reshape(agent.count, -1) for x in (returns, lengths, moves / lengths)]


class Policies:
    """A problem whose individuals play Pong. Genes: the weights of a point and of a frame with a move in the reward in
    which the network is trained. Objectives, as in Lamarckian's use case A: score + moves and score + rests, negated;
    score is (own - other points + 20) / 40, moves and rests are shares of the frames."""

    lower, upper = np.array([0.0, -0.01]), np.array([1.0, 0.01])
    num_objectives, reference, front = 2, np.zeros(2), None
    gene_names, objective_names = ["point_weight", "move_weight"], ["-(score + moves)", "-(score + rests)"]

    def __init__(self, args, random, device):
        self.args, self.random, self.device = args, random, device
        self.seeds = random.envs.spawn(args.fitness_games)
        self.rollouts = -(-args.train_steps // (args.num_envs * args.num_steps))
        self.agent = Agent(VectorPong.OBS_SHAPE, VectorPong.NUM_ACTIONS, args.pop_size).to(device)
        self.network_size = self.agent.vectors().shape[1]

    def initial(self, size, rng):
        return rng.uniform(self.lower, self.upper, (size, 2)), self.agent.vectors().cpu().numpy()

    def evaluate(self, genes, networks, rng, check=lambda: None):
        """Trains the networks (N, W) of genes (N, 2), and plays -> objectives (N, 2), the trained networks, a log.
        `check` may end it."""
        self.agent.load_vectors(torch.as_tensor(networks).to(self.device))
        row = self.train(genes, rng, check) if self.rollouts else {}
        networks = self.agent.vectors().cpu().numpy()
        points, lengths, moves = (x.mean(1) for x in play(self.agent, self.seeds, self.args.eval_max_steps, check))
        score = (points + 20) / 40
        objectives = -np.stack([score + moves, score + 1 - moves], 1)
        objectives[~np.isfinite(networks).all(1)] = math.nan
        row |= {"charts/episodic_return": points.mean(), "charts/episodic_length": lengths.mean()}
        return objectives, networks, row

    def train(self, weights, rng, check=lambda: None):
        """PPO for args.train_steps frames of each individual, in its own reward; their networks meet nowhere."""
        args, agent = self.args, self.agent
        T, N = args.num_steps, agent.count * args.num_envs
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        games = VectorPong(list(rng.integers(2**63, size=N)))
        rows, seats = np.arange(N), np.arange(N) % 2
        point_weight, move_weight = np.repeat(weights, args.num_envs, 0).T
        obs, next_obs = torch.zeros((T, N, *games.OBS_SHAPE)), torch.as_tensor(games.reset()[rows, seats])
        obs, next_obs = obs.to(self.device), next_obs.to(self.device)
        actions, logprobs = torch.zeros((2, T, N), device=self.device)
        rewards, values = np.zeros((2, T, N), np.float32)
        terminated, parts = np.zeros((T, N), bool), []

        def by_individual(x):  # (T, N, ...) -> (count, T * num_envs, ...)
            x = torch.as_tensor(x, device=self.device)
            return x.unflatten(1, (agent.count, -1)).transpose(0, 1).flatten(1, 2)

        for _ in range(self.rollouts):
            check()
            for t in range(T):
                obs[t] = next_obs
                action, logprobs[t], value = agent.act(next_obs, self.random.actions)
                actions[t], values[t], taken = action, value.cpu().numpy(), games.scripted()
                taken[rows, seats] = action.cpu().numpy()
                raw, reward, terminated[t], _ = games.step(taken)
                next_obs = torch.as_tensor(raw[rows, seats]).to(self.device)
                rewards[t] = point_weight * reward[rows, seats] + move_weight * (taken[rows, seats] != 1)
            next_values = np.vstack([values[1:], agent.act(next_obs)[2].cpu().numpy()])
            advantages, returns = gae(rewards, values, next_values, terminated, np.zeros_like(terminated), args.gamma,
                                      args.gae_lambda)  # fmt: skip
            batch = [by_individual(x) for x in (obs, actions, logprobs, values, advantages, returns)]
            epochs = (self.random.minibatches.permutation(T * args.num_envs) for _ in range(args.update_epochs))
            for chosen in (part for epoch in epochs for part in np.split(epoch, args.num_minibatches)):
                *b, advantage, target = (x[:, torch.as_tensor(chosen, device=self.device)] for x in batch)
                advantage = (advantage - advantage.mean(1, True)) / (advantage.std(1, keepdim=True) + 1e-8)
                o, a, logprob, value, advantage, target = (x.flatten(0, 1) for x in (*b, advantage, target))
                logits, new_value = agent(o)
                log_all = logits.log_softmax(-1)
                loss, found = ppo_loss(log_all.gather(-1, a.long()[:, None])[:, 0], -(log_all.exp() * log_all).sum(-1),
                                       new_value, logprob, value, advantage, target, args.clip_coef, False,
                                       args.ent_coef, args.vf_coef)  # fmt: skip
                optimizer.zero_grad()
                (loss * agent.count).backward()  # the sum over individuals: each has its own gradient
                norms = torch.cat([p.grad.flatten(1) for p in agent.parameters()], 1).norm(dim=1)
                for parameter in agent.parameters():
                    parameter.grad *= (args.max_grad_norm / (norms + 1e-6)).clamp(max=1)[:, None, None]
                optimizer.step()
                parts.append(found | {"grad_norm": norms.mean()})
        return {f"losses/{name}": float(torch.stack([part[name].detach() for part in parts]).mean())
                for name in parts[0]}  # fmt: skip


# ---- 5. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


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


RunLogger.LOGS = "front.jsonl", *RunLogger.LOGS  # cut at a resume, as they are


# ---- 6. Evaluation and training --------------------------------------------------------------------------------------


def evaluate(agent, args, check=lambda: None):
    """Plays args.eval_episodes games against the scripted player, seeded by args.eval_seed alone -> a row for each, its
    score difference and length. Touches no training state. `check` may end it."""
    seeds = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes)
    found = zip(*(x[0].tolist() for x in play(agent, seeds, args.eval_max_steps, check)), strict=True)
    return [{"split": "eval", "return": r, "length": int(n), "moves": share} for r, n, share in found]


def measures(problem, population):
    """IGD and hypervolume of the population's front."""
    front = population.objectives[population.front]
    found = {"eval/hypervolume": hypervolume(front, problem.reference)}
    return found if problem.front is None else {"eval/igd": igd(problem.front, front)} | found


def draw(problem, objectives, title, path):
    """The front found, against the true one where that is known."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(5, 4))
    axis = figure.add_subplot(projection="3d" if problem.num_objectives == 3 else None)
    looks = ({"color": "0.7", "s": 6}, {"color": "C0", "s": 10})
    for points, label, look in zip((problem.front, objectives), ("true front", "found"), looks, strict=True):
        if points is not None:
            axis.scatter(*points.T, label=label, **look)
    for set_label, name in zip((axis.set_xlabel, axis.set_ylabel, getattr(axis, "set_zlabel", None)),
                               problem.objective_names):  # fmt: skip
        set_label(name)
    if problem.num_objectives == 3:
        axis.view_init(30, 45)
    axis.set_title(title)
    axis.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)


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
        rng = np.random.default_rng(random.curriculum)
        policy = args.env_id == "policy"
        function = args.env_id, args.num_variables, args.num_objectives
        problem = Policies(args, random, device) if policy else TestFunction(*function)
        population = Population(problem, rng)
        parts = {"population": population, "random": random}
        if policy:  # that with the highest score is what is published
            parts["agent"] = Agent(VectorPong.OBS_SHAPE, VectorPong.NUM_ACTIONS).to(device)
        first_update, global_step, row = run.restore(**parts)
        if args.eval_only:
            means = measures(problem, population)
            means |= run.log_eval(global_step, evaluate(parts["agent"], args, run.check_signals)) if policy else {}
            print(json.dumps(means))
            return means

        for generation in range(first_update, args.num_updates):
            run.checkpoint(generation, global_step, row)
            begun = time.perf_counter()
            if generation:
                genes, networks, again = population.children(args)
            else:
                (genes, networks), again = problem.initial(args.pop_size, rng), 0
            varied = time.perf_counter()
            objectives, networks, row = problem.evaluate(genes, networks, rng, run.check_signals)
            evaluated = time.perf_counter()
            duplicates, dropped = population.select(genes, networks, objectives, args.pop_size)
            if dropped:
                first = np.flatnonzero(np.isnan(objectives).any(1))[0]
                what = f"{dropped} of {len(genes)} individuals of generation {generation} have objectives that are NaN"
                where = f"the first has {', '.join(map('{}={:.6g}'.format, problem.gene_names, genes[first]))}"
                if not len(population.genes):
                    sys.exit(f"error: {what}, and there are no others: {where}"[:600])
                print(f"note: {what}, and are never selected: {where}"[:600], file=sys.stderr)
            global_step += len(genes)

            # Log and evaluate.
            last = generation + 1 == args.num_updates
            selected, front = time.perf_counter(), population.front
            row |= measures(problem, population) | {
                "charts/update": generation + 1, "evolution/generation": generation, "evolution/front_size": len(front),
                "evolution/fronts": int(population.ranks.max()) + 1, "evolution/size": len(population.genes),
                "evolution/duplicates": again + duplicates, "evolution/nan": dropped, "perf/vary_s": varied - begun,
                "perf/evaluate_s": evaluated - varied, "perf/select_s": selected - evaluated,
            }  # fmt: skip
            points = np.vectorize(lambda value: float(f"{value:.6g}"))(population.objectives[front]).tolist()
            run.write_rows("front.jsonl", global_step, [{"generation": generation, "front": points}])
            if policy:
                best = front[population.objectives[front].sum(1).argmin()]  # the highest score: moves + rests = 1
                parts["agent"].load_vectors(torch.as_tensor(population.networks[best : best + 1]).to(device))
                row["charts/frames"] = (generation + 1) * len(genes) * problem.rollouts * args.num_envs * args.num_steps
                if last or (args.eval_interval and (generation + 1) % args.eval_interval == 0):
                    begun = time.perf_counter()
                    row |= run.log_eval(global_step, evaluate(parts["agent"], args, run.check_signals))
                    row["perf/eval_s"] = time.perf_counter() - begun
            if last or (generation + 1) % args.log_interval == 0:
                run.log(global_step, {"charts/episodic_return": math.nan} | row)

        table = np.concatenate([population.genes, population.objectives], 1)[population.front]
        table = [",".join(map(repr, line)) for line in table[np.argsort(table[:, -1])].tolist()]
        run.write("front.csv", "\n".join([",".join([*problem.gene_names, *problem.objective_names]), *table]) + "\n")
        try:
            title = f"{args.env_id}, seed {args.seed}, {global_step:,} evaluations"
            draw(problem, population.objectives[population.front], title, run.dir / "front.png")
        except ImportError as error:
            print(f"note: front.png is not drawn: {error}. pip install matplotlib", file=sys.stderr)
        return run.finish(args.num_updates, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
