"""Asynchronous PPO in self-play against a league: two-player zero-sum games, opponents that are the agent's past.

Papers: Vinyals et al. 2019 (prioritized fictitious self-play); Heinrich et al. 2015 (fictitious self-play);
Espeholt et al. 2018, arXiv:1802.01561 (V-trace); Schulman et al. 2017, arXiv:1707.06347 (the clipped surrogate).

  Train:     python algos/appo_pfsp.py --env-id connect_four --total-timesteps 5000000
  Baselines: the same with --opponents fsp, or with --opponents self
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per game goes to eval.jsonl)
  Play:      python scripts/play.py runs/appo_pfsp/connect_four/seed1-...

Differs from the papers: the clipped surrogate is of V-trace's advantage without its importance weight, which the ratio
already is (--appo-parity counts it twice, as public implementations do); one agent instead of AlphaStar's three kinds.
"""

import atexit
import copy
import ctypes
import difflib
import fcntl
import hashlib
import importlib
import json
import math
import mmap
import multiprocessing
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, lru_cache, partial
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
from torch import nn
from tqdm import tqdm

# ---- 1. Arguments ----------------------------------------------------------------------------------------------------


@dataclass
class Args:
    # run
    exp_name: str = "appo_pfsp"  # folder under run_dir
    seed: int = 1  # all randomness but the evaluation's derives from it
    device: Literal["auto", "cpu", "cuda"] = "auto"  # the learner's (auto: cuda if there is one); actors use the CPU
    deterministic: bool = False  # only deterministic GPU kernels (on a CPU num_actors 0 always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the learner; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of the other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 200  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 20  # updates between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # games
    env_id: str = "connect_four"  # also tic_tac_toe, rps, biased_rps; a game of OpenSpiel, or of PettingZoo (..._v3)
    num_actors: int = 1  # actor processes; 0: the learner acts itself, and the run repeats to the bit
    envs_per_actor: int = 64  # games of an actor, played side by side
    max_policy_lag: int | None = None  # updates that an unroll's policy may be behind the one it trains; None: any
    openings: int = 0  # each game of a line game begins with 0 to this many random moves, uniformly: a task curriculum

    # league
    opponents: Literal["self", "fsp", "pfsp"] = "pfsp"  # newest weights; past ones uniformly; past ones by difficulty
    self_play_share: float = 0.5  # share of the games against the newest weights (opponents self: 1)
    league_size: int = 50  # snapshots held; a new one evicts fsp's oldest, pfsp's easiest, and never the initial one
    league_opponents: int = 4  # opponents drawn for an unroll: its new games are shared out among them
    snapshot_interval: int = 50  # updates after which a snapshot joins the league at the latest
    snapshot_win_rate: float = 0.7  # it joins sooner when the learner's win rate is above this against all of them
    # mass by win rate x: (1 - x)^power; x (1 - x); 1 - x; min(1/2, 1 - x); all on the smallest x
    pfsp_weighting: Literal["hard", "var", "linear", "linear_capped", "argmax"] = "hard"
    pfsp_power: float = 2.0  # of hard
    pfsp_uniform: float = 0.1  # share of the draws that is uniform
    pfsp_decay: float = 0.99  # what a result leaves of the weight of those before it
    pfsp_prior_games: float = 2.0  # games, half of them won, that a record begins with
    pfsp_min_games: int = 0  # below it a win rate counts as 1/2

    # algorithm
    total_timesteps: int = 5_000_000  # the learner's moves in all games, rounded up to whole updates
    network: Literal["auto", "mlp", "conv", "nature"] = "auto"  # auto: nature for pictures, else mlp
    hidden_size: int = 256  # units of its layers
    lstm_size: int = 0  # units of an LSTM on top (NashConv and the round robin need a policy without); 0: none
    learning_rate: float = 1e-3  # Adam step size at the start
    anneal_lr: bool = True  # linearly to 0 at total_timesteps (which early updates then depend on)
    num_steps: int = 16  # unroll length: the learner's moves in a game
    batch_rollouts: int = 128  # unrolls of a game per update
    num_minibatches: int = 4  # minibatches per epoch, of whole unrolls
    update_epochs: int = 2  # passes over each batch
    gamma: float = 1.0  # discount
    rho_bar: float = 1.0  # V-trace's limit of the importance weights
    c_bar: float = 0.95  # V-trace's limit of the trace weights
    appo_parity: bool = False  # the importance weight in the advantage too, as other APPO implementations have it
    norm_adv: bool = False  # normalise advantages in each minibatch (what entropy is worth then changes all the time)
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    ent_coef: float = 0.1  # entropy bonus: without exploration nobody learns to answer what the others do
    vf_coef: float = 0.5  # value loss weight
    max_grad_norm: float = 0.5  # gradient norm limit

    # evaluation
    eval_interval: int = 0  # updates between evaluations; 0: only at the end
    eval_episodes: int = 200  # games against each rival and evaluation, half of them as either player
    eval_seed: int = 10_000  # seeds the evaluation games, the same for every run and algorithm
    eval_round_robin: int = 16  # policies in the round robin at the end, the learner included; 0: none
    eval_greedy: bool = False  # evaluate the most likely action, not a sampled one (as an equilibrium may have to)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    game: str = field(init=False)  # so that a checkpoint tells its game
    batch_size: int = field(init=False)
    num_updates: int = field(init=False)

    def __post_init__(self):
        at_least = dict.fromkeys(("envs_per_actor", "num_steps", "batch_rollouts", "total_timesteps", "num_minibatches",
                                  "update_epochs", "league_opponents", "snapshot_interval", "hidden_size",
                                  "checkpoint_interval", "keep_checkpoints", "log_interval"), 1)  # fmt: skip
        at_least |= dict.fromkeys(("seed", "num_actors", "max_policy_lag", "lstm_size", "learning_rate", "clip_coef",
                                   "max_grad_norm", "rho_bar", "c_bar", "ent_coef", "vf_coef", "eval_interval",
                                   "openings", "pfsp_min_games", "pfsp_prior_games", "pfsp_power",
                                   "eval_round_robin"), 0)  # fmt: skip
        at_least |= {"league_size": 2, "eval_episodes": 2}
        limits = {name: (low, math.inf) for name, low in at_least.items()}
        limits |= dict.fromkeys(("gamma", "self_play_share", "snapshot_win_rate", "pfsp_uniform", "pfsp_decay"), (0, 1))
        check_numbers(self, limits | {"eval_seed": (0, 2**64 - 1), "torch_threads": (0, 1024)})
        for name in ("pfsp_decay", "pfsp_power"):
            if getattr(self, name) == 0:
                raise ValueError(f"--{name.replace('_', '-')} 0: above 0 is needed")
        self.game, obs_shape = self.env_id, game_spec(self.env_id)[0]
        self.batch_size = self.batch_rollouts * self.num_steps
        self.num_updates = -(-self.total_timesteps // self.batch_size)
        E, P, B = self.envs_per_actor, self.num_actors, self.batch_rollouts
        if B % E:
            nearest_fit = max(round(B / E), 1) * E
            raise ValueError(f"--batch-rollouts {B} is no multiple of --envs-per-actor {E}: try {nearest_fit}")
        if self.num_minibatches > B:
            raise ValueError(f"--num-minibatches {self.num_minibatches} of {B} unrolls: try {B} or fewer")
        if self.norm_adv and B // self.num_minibatches * self.num_steps == 1:
            raise ValueError(f"--num-minibatches {self.num_minibatches} leaves 1 move a minibatch, and the deviation "
                             "of 1 advantage is undefined: use fewer minibatches or --no-norm-adv")  # fmt: skip
        if self.league_opponents > E:
            raise ValueError(f"--league-opponents {self.league_opponents} for --envs-per-actor {E}: try {E} or fewer")
        if self.total_timesteps < self.batch_size:
            raise ValueError(f"--total-timesteps {self.total_timesteps} is less than one update, batch_rollouts {B} x "
                             f"num_steps {self.num_steps} = {self.batch_size}: ask for more")  # fmt: skip
        if self.eval_episodes % 2:
            raise ValueError(f"--eval-episodes {self.eval_episodes}: an even number plays both seats alike")
        if self.network in ("conv", "nature") and len(obs_shape) != 3:
            raise ValueError(f"--network {self.network}: {self.env_id} shows {obs_shape}, no planes. Use mlp")
        if self.network == "nature" and min(obs_shape[1:]) < 36:
            raise ValueError(f"--network nature: {self.env_id} shows {obs_shape}, less than 36 x 36. Use conv or mlp")
        most = 2 * (LineRules.GAMES[self.env_id][2] - 1) if self.env_id in LineRules.GAMES else 0
        if self.openings > most:
            raise ValueError(f"--openings {self.openings}: {self.env_id} can begin with at most {most} random moves")
        if self.max_policy_lag is not None and self.num_slots < P:
            raise ValueError(f"--max-policy-lag {self.max_policy_lag} leaves {B // E} x {self.max_policy_lag + 1} = "
                             f"{self.num_slots} unrolls at a time for --num-actors {P}: "
                             f"try {-(-P * E // B) - 1} or fewer actors")  # fmt: skip

    # Copied from algos/impala_popart.py:Args.num_slots
    @property
    def num_slots(self):
        """Unrolls that exist at a time: a batch, one under way in each actor, and a batch to come."""
        batch = self.batch_rollouts // self.envs_per_actor
        slots = self.num_actors + 2 * batch if self.num_actors else batch
        return slots if self.max_policy_lag is None else min(slots, batch * (self.max_policy_lag + 1))


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, limits):
    """ValueError that names the first argument outside its limits, {name: (low, high)}, or not finite. None passes."""
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be a number {allowed}")


# ---- 2. Curriculum ---------------------------------------------------------------------------------------------------


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


# Copied from curricula/self_play.py:pfsp_distribution
def pfsp_distribution(win_rates, weighting="hard", power=2.0):
    """Probability of each opponent from the learner's win rates x against them: both float64 (n,).

    AlphaStar's (Vinyals et al. 2019, supplement): hard (1 - x)^power, var x (1 - x), linear 1 - x, linear_capped
    min(1/2, 1 - x). argmax, as the Syllabus paper has it: those that win most against the learner, all alike.
    No mass: uniform.
    """
    x = np.asarray(win_rates, float)
    mass = {
        "hard": lambda: (1 - x) ** power,
        "var": lambda: x * (1 - x),
        "linear": lambda: 1 - x,
        "linear_capped": lambda: np.minimum(0.5, 1 - x),
        "argmax": lambda: (x == x.min()).astype(float),
    }[weighting]()
    return mass / mass.sum() if mass.sum() > 1e-10 else np.full(len(x), 1 / len(x))


# Copied from curricula/self_play.py:SelfPlay
class SelfPlay(Curriculum):
    """The opponent is the newest copy of the agent: its id is always 0.

    A task is an opponent's id. `agent` is the first opponent: a flat array, a torch module, anything that deepcopy
    copies. Copies keep the weights that they were made with: arrays become read-only, modules get no gradient and are
    in eval mode.
    Every result changes the opponent's record: its counts of games and of wins are multiplied by `decay`, then the game
    is added, a draw as half a win. The record starts with `prior_games` games, half of them won (decay=1, prior_games=2
    is the mean of a Beta(1, 1) posterior; prior_games=1/(1 - decay) a moving average). Without games, or with fewer
    than `min_games` played, the win rate is 0.5.

    Each call of `sample` draws from the generator once, no update does. The state holds arrays as they are, of
    modules their state_dict, other agents as they are: to load it, build the curriculum with an agent of that kind.
    """

    capacity = 1

    def __init__(self, agent, *, decay=0.99, prior_games=0.0, min_games=0, seed=None):
        super().__init__(2**31 - 1, seed=seed)  # ids count up and are never used twice; num_tasks are those held
        for name, value, valid, allowed in (
            ("agent", agent, agent is not None, "the first opponent: a league is never empty"),
            ("decay", decay, 0 < decay <= 1, "in (0, 1]"),
            ("prior_games", prior_games, 0 <= prior_games < np.inf, "0 or more"),
            ("min_games", min_games, 0 <= min_games < np.inf, "0 or more"),
        ):
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
        self.decay, self.prior_games, self.min_games = decay, prior_games, min_games
        self.rating = 1000.0  # the learner's Elo rating
        self._agents, self._records, self._next_id = {}, {}, 0
        self._add(0, self._snapshot(agent))

    @property
    def opponents(self):
        """The ids that are held, oldest first: what `_sample_distribution` and `win_rates` are about."""
        return list(self._agents)

    def get_opponent(self, opponent_id):
        """The agent with this id, as it was when it was added. A ValueError names an id that is not held."""
        return self._agents[self._held(opponent_id)]

    def update_agent(self, agent):
        """Makes a copy of `agent` the opponent; its record goes on. Returns its id."""
        self._agents[0] = self._snapshot(agent)
        return 0

    def update_winrate(self, opponent_id, result):
        """One finished game: the learner has won (1), drawn (0.5) or lost (0). Of a return in {-1, 0, 1}: (r + 1) / 2.

        A game against an opponent that was evicted meanwhile is a ValueError: look in `opponents` first.
        """
        if not 0 <= result <= 1:
            raise ValueError(f"result {result!r} is none of 1 (won), 0.5 (drawn), 0 (lost): pass (return + 1) / 2")
        record = self._records[self._held(opponent_id)]
        games, wins, played, rating = record
        # Elo: what the result says beyond the expected score, at most K = 32 points
        change = 32 * (result - 1 / (1 + 10 ** ((rating - self.rating) / 400)))
        self.rating += float(change)
        record[:] = self.decay * games + 1, self.decay * wins + result, played + 1, rating - change

    def win_rates(self):
        """The learner's win rate against each of `opponents`: float64 (num_tasks,)."""
        games, wins, played, _ = np.array(list(self._records.values())).T
        known = (games > 0) & (played >= self.min_games)
        return np.where(known, wins / np.where(known, games, 1), 0.5)

    def ratings(self):
        """The Elo rating of each of `opponents`: float64 (num_tasks,). A new one starts with the learner's."""
        return np.array([record[3] for record in self._records.values()])

    def _sample_distribution(self):
        return np.full(self.num_tasks, 1 / self.num_tasks)

    def _held(self, opponent_id):
        if opponent_id in self._agents:
            return opponent_id
        known = isinstance(opponent_id, (int, np.integer)) and 0 <= opponent_id < self._next_id
        was = f"was evicted: {self.capacity} are kept" if known else "does not exist"
        raise ValueError(f"opponent {opponent_id!r} {was}. Take one of `opponents`: {str(self.opponents)[:200]}")

    def _index(self, task):
        return self.opponents.index(self._held(task))

    def _encoding(self, index):
        return self.opponents[index]

    def _add(self, opponent_id, snapshot):
        self._agents[opponent_id] = snapshot
        self._records[opponent_id] = [self.prior_games, self.prior_games / 2, 0, self.rating]
        self._next_id, self.num_tasks = opponent_id + 1, len(self._agents)

    @staticmethod
    def _shapes(agent):
        """What agents of one game have in common, as far as it can be seen."""
        if hasattr(agent, "load_state_dict"):
            return {name: np.shape(value) for name, value in agent.state_dict().items()}
        return agent.shape if isinstance(agent, np.ndarray) else type(agent)

    def _snapshot(self, agent):
        wanted = [self._shapes(held) for held in list(self._agents.values())[:1]]
        if agent is None or wanted not in ([], [self._shapes(agent)]):
            found = f"found {type(agent).__name__} of {self._shapes(agent)}"
            raise ValueError(f"an agent is one as the first, of {wanted[0]}, {found}")
        snapshot = copy.deepcopy(agent)
        if isinstance(snapshot, np.ndarray):
            snapshot.setflags(write=False)
        elif hasattr(snapshot, "requires_grad_"):  # of torch: an opponent only acts
            snapshot.requires_grad_(False)
            if hasattr(snapshot, "eval"):  # a tensor has none
                snapshot.eval()  # BatchNorm would learn from the games, and Dropout play them badly
        return snapshot

    def _restored(self, saved):
        """The agent from its part of the state, of the same kind as those that are held."""
        like = next(iter(self._agents.values()))
        if isinstance(like, np.ndarray):
            agent = np.asarray(saved).astype(like.dtype)
            if agent.shape != like.shape:
                raise ValueError(f"an agent of shape {agent.shape} in the state is none of this game's, {like.shape}")
            return self._snapshot(agent)
        agent = copy.deepcopy(like if hasattr(like, "load_state_dict") else saved)
        if hasattr(like, "load_state_dict"):
            agent.load_state_dict(saved)
        return agent

    def state_dict(self):
        saved = [a.state_dict() if hasattr(a, "load_state_dict") else a for a in self._agents.values()]
        agents = [a if isinstance(a, np.ndarray) else copy.deepcopy(a) for a in saved]
        records = np.array(list(self._records.values()), float)
        state = {"ids": np.array(self.opponents), "records": records, "next_id": self._next_id, "rating": self.rating}
        return {**super().state_dict(), **state, "agents": agents}

    def _load(self, state):
        ids, records = np.asarray(state["ids"]).tolist(), np.asarray(state["records"]).tolist()
        if not 1 <= len(ids) <= self.capacity:
            raise ValueError(f"the state holds {len(ids)} opponents, this curriculum 1 to {self.capacity}")
        if unknown := [i for i in ids if not 0 <= i < state["next_id"]]:
            raise ValueError(f"the state holds opponents {unknown}, but ids go to {state['next_id'] - 1}")
        if not np.isfinite(records).all():
            raise ValueError("the state's records of games are not finite")
        agents = [self._restored(saved) for saved in state["agents"]]
        super()._load(state)
        self._agents, self._records = dict(zip(ids, agents)), dict(zip(ids, records))
        self._next_id, self.rating, self.num_tasks = int(state["next_id"]), float(state["rating"]), len(ids)

    def metrics(self):
        p, x = self._sample_distribution(), self.win_rates()
        played = sum(record[2] for record in self._records.values())
        effective = np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum())  # the number of equally likely ones
        figures = {"opponents": len(p), "newest_opponent": self._next_id - 1, "effective_opponents": effective}
        figures |= {"games": played, "win_rate_mean": x.mean(), "win_rate_min": x.min(), "rating": self.rating}
        return {name: float(value) for name, value in figures.items()}


# Copied from curricula/self_play.py:FictitiousSelfPlay
class FictitiousSelfPlay(SelfPlay):
    """Uniform over past copies of the agent (Heinrich et al. 2015): `update_agent` adds one, under the next id.

    At most `capacity` copies are kept: a new one evicts the oldest, and evicted ids are never used again. An id that
    waited in a queue can be evicted before it is played: if it is not in `opponents`, sample another. With
    `keep_initial` the first agent, id 0, stays. `options` are those of SelfPlay.
    """

    def __init__(self, agent, *, capacity=100, keep_initial=False, **options):
        least = 2 if keep_initial else 1
        if not isinstance(capacity, (int, np.integer)) or capacity < least:
            raise ValueError(f"capacity={capacity!r}: must be a whole number from {least} with {keep_initial=}")
        self.capacity, self.keep_initial = capacity, keep_initial
        super().__init__(agent, **options)

    def update_agent(self, agent):
        """Adds a copy of `agent` and returns its id."""
        snapshot = self._snapshot(agent)
        if self.num_tasks == self.capacity:
            evicted = self._encoding(self._least_useful())
            del self._agents[evicted], self._records[evicted]
        opponent_id = self._next_id
        self._add(opponent_id, snapshot)
        return opponent_id

    def _least_useful(self):
        """The position of the opponent to evict."""
        return int(self.keep_initial)


# Copied from curricula/self_play.py:PrioritizedFictitiousSelfPlay
class PrioritizedFictitiousSelfPlay(FictitiousSelfPlay):
    """Past copies of the agent by how hard they are for it (Vinyals et al. 2019): see `pfsp_distribution`.

    `uniform` is the share of the draws that is uniform: argmax can go back and forth between two opponents without it.
    A new copy evicts the easiest, the one with the highest win rate, of equal ones the oldest. `options` are those of
    FictitiousSelfPlay.
    """

    WEIGHTINGS = ("hard", "var", "linear", "linear_capped", "argmax")

    def __init__(self, agent, *, weighting="hard", power=2.0, uniform=0.0, **options):
        for name, value, valid, allowed in (
            ("weighting", weighting, weighting in self.WEIGHTINGS, f"one of {self.WEIGHTINGS}"),
            ("power", power, 0 < power < np.inf, "above 0 and finite"),
            ("uniform", uniform, 0 <= uniform <= 1, "in [0, 1]"),
        ):
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
            setattr(self, name, value)
        super().__init__(agent, **options)

    def _sample_distribution(self):
        priorities = pfsp_distribution(self.win_rates(), self.weighting, self.power)
        return (1 - self.uniform) * priorities + self.uniform / self.num_tasks

    def _least_useful(self):
        return int(self.keep_initial) + int(np.argmax(self.win_rates()[int(self.keep_initial) :]))


# ---- 3. Sync queue ---------------------------------------------------------------------------------------------------


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


# ---- 4. Games --------------------------------------------------------------------------------------------------------


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


class Games:
    """B games of one two-player zero-sum kind, side by side. Players are 0 and 1; chance moves inside.

    reset(seeds): all start anew; seeds: a SeedSequence per game, for its chance. player (B,) int8: whose turn it is.
    observe() -> obs (B, *obs_shape) of obs_dtype as the player to move sees it, legal (B, num_actions) bool.
    step(actions (B,)) -> rewards (B, 2) float32, each row of sum 0; ended (B,) bool. A game that ended has begun anew.
    Both take the numbers (n,) of the games that they are about; the others stand still.
    get_state(), set_state(state): to go on from exactly there.
    """

    obs_dtype, saved = np.float32, ("player",)  # saved: the attributes that say where the games are

    def reset(self, seeds):
        if len(seeds) != self.num_games:
            raise ValueError(f"{len(seeds)} seeds for {self.num_games} games of {self.name}: one for each is needed")
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.player = np.zeros(self.num_games, np.int8)
        self.start(np.arange(self.num_games))

    def checked(self, actions, legal, games):
        """The arrays actions, games (all for None); RuntimeError that names the first action that is not legal."""
        games = np.arange(self.num_games) if games is None else games
        actions = np.asarray(actions)
        known = (actions >= 0) & (actions < self.num_actions)
        wrong = ~(known & legal[np.arange(len(games)), np.where(known, actions, 0)])
        if wrong.any():
            i = wrong.argmax()
            found = f"took action {actions[i]}, legal are {np.flatnonzero(legal[i]).tolist()}"
            raise RuntimeError(f"{self.name}, game {games[i]}: player {self.player[games[i]]} {found}")
        return actions, games

    def close(self):
        """Nothing is held beyond memory."""

    def get_state(self):
        state = {"game": self.name, "rngs": [rng.bit_generator.state for rng in self.rngs]}
        return state | {name: copy.deepcopy(getattr(self, name)) for name in self.saved}

    def set_state(self, state):
        found = state["game"], len(state["rngs"])
        if found != (self.name, self.num_games):
            raise ValueError(f"a state of {found[1]} games of {found[0]} for {self.num_games} games of {self.name}")
        self.rngs = [np.random.default_rng(0) for _ in range(self.num_games)]
        for rng, saved in zip(self.rngs, state["rngs"]):
            rng.bit_generator.state = saved
        for name in self.saved:
            value = copy.deepcopy(state[name])
            setattr(self, name, value if isinstance(value, list) else np.asarray(value))


class LineRules:
    """Boards on which a line of own pieces wins, in bits: cell (row from the top, column) is bit
    column * (rows + 1) + rows - 1 - row. The bit above each column stays 0, so that no line runs over to the next."""

    GAMES = {"connect_four": (6, 7, 4), "tic_tac_toe": (3, 3, 3)}  # rows, columns, length of a line

    def __init__(self, name):
        self.rows, self.columns, self.length = rows, columns, length = self.GAMES[name]
        bits = [[1 << column * (rows + 1) + rows - 1 - row for column in range(columns)] for row in range(rows)]
        self.bits, self.full = np.array(bits), sum(map(sum, bits))
        # An action adds (occupied + lowest) & cells: the carry finds the free cell; 0 if there is none.
        if name == "connect_four":
            self.lowest, self.cells = self.bits[-1], self.bits.sum(0)
        else:
            self.lowest = self.cells = self.bits.reshape(-1)
        self.steps = np.array([[1], [rows], [rows + 1], [rows + 2]])  # to the next cell of a line

    def moves(self, boards):
        """Own and other pieces (..., 2) -> the bit that each action adds, 0 if it is illegal: (..., num_actions)."""
        return ((boards[..., 0] | boards[..., 1])[..., None] + self.lowest) & self.cells

    def won(self, pieces):
        """Whether there is a line among a player's pieces: (B,) -> bool (B,)."""
        pairs = pieces & pieces >> self.steps
        return (pairs & pairs >> (self.length - 2) * self.steps).any(0)

    def planes(self, boards):
        return (boards[..., None, None] & self.bits != 0).astype(np.float32)

    def boards(self, obs):
        return (np.asarray(obs, bool) * self.bits).sum((-2, -1))


class LineGames(Games):
    """Connect Four (an action is a column) and tic-tac-toe (a cell, row by row): obs (2, rows, columns), own pieces
    first. `openings` (B,), a task for a curriculum: how many random moves each game from now on begins with."""

    GAMES, saved = LineRules.GAMES, ("player", "boards", "openings")

    def __init__(self, name, num_games):
        self.name, self.num_games, self.rules = name, num_games, LineRules(name)
        self.obs_shape, self.num_actions = (2, self.rules.rows, self.rules.columns), len(self.rules.cells)
        self.boards, self.openings = np.zeros((num_games, 2), np.int64), np.zeros(num_games, np.int64)

    def start(self, games):
        self.boards[games], self.player[games] = 0, self.openings[games] % 2
        for i in games[self.openings[games] != 0]:
            most = 2 * (self.rules.length - 1)  # nobody has a line's number of pieces yet
            if not 0 <= self.openings[i] <= most:
                raise ValueError(f"{self.name} can open with 0 to {most} random moves, not {self.openings[i]}")
            for _ in range(self.openings[i]):
                moves = self.rules.moves(self.boards[i])
                self.boards[i] = self.boards[i, 1], self.boards[i, 0] + self.rngs[i].choice(moves[moves != 0])

    def observe(self, games=slice(None)):
        boards = self.boards[games]
        return self.rules.planes(boards), self.rules.moves(boards) != 0

    def step(self, actions, games=None):
        boards = self.boards if games is None else self.boards[games]
        moves = self.rules.moves(boards)
        actions, games = self.checked(actions, moves != 0, games)
        own, other = boards[:, 0] | moves[np.arange(len(games)), actions], boards[:, 1]
        won = self.rules.won(own)
        ended, gain = won | (own | other == self.rules.full), np.where(self.player[games] == 0, won, -1.0 * won)
        self.boards[games], self.player[games] = np.stack([other, own], 1), 1 - self.player[games]
        self.start(games[ended])
        return np.stack([gain, -gain], 1).astype(np.float32), ended


class MatrixGames(Games):
    """Rock-paper-scissors: player 0 chooses, player 1 chooses without having seen it, player 0 gets matrix[choices].
    obs (2,): whose turn it is. In biased_rps rock beats scissors twice: its equilibrium is (1/4, 1/2, 1/4)."""

    GAMES = {"rps": [[0, -1, 1], [1, 0, -1], [-1, 1, 0]], "biased_rps": [[0, -1, 2], [1, 0, -1], [-2, 1, 0]]}
    saved = "player", "first"  # first: what player 0 chose

    def __init__(self, name, num_games):
        self.name, self.num_games, self.matrix = name, num_games, np.array(self.GAMES[name], np.float32)
        self.obs_shape, self.num_actions, self.first = (2,), len(self.matrix), np.zeros(num_games, np.int64)

    def start(self, games):
        self.player[games] = 0

    def observe(self, games=slice(None)):
        player = self.player[games]
        return np.eye(2, dtype=np.float32)[player], np.ones((len(player), self.num_actions), bool)

    def step(self, actions, games=None):
        actions, games = self.checked(actions, np.ones((len(actions), self.num_actions), bool), games)
        ended = self.player[games] == 1
        gain = np.where(ended, self.matrix[self.first[games], actions], 0)
        self.first[games], self.player[games] = actions, 1 - self.player[games]
        return np.stack([gain, -gain], 1), ended


class SingleGames(Games):
    """Games of a library that has them one by one: start(seed); look() -> player, legal actions, obs; play(action) ->
    rewards, ended. A game is its seed and its actions: `set_state` plays it again."""

    saved = "player", "seeds", "actions"

    def __init__(self, name, num_games, make):
        self.name, self.num_games, self.games = name, num_games, [make(name) for _ in range(num_games)]
        one = self.games[0]
        self.obs_shape, self.num_actions, self.obs_dtype = one.obs_shape, one.num_actions, one.obs_dtype
        self.obs = np.zeros((num_games, *self.obs_shape), self.obs_dtype)
        self.legal = np.zeros((num_games, self.num_actions), bool)
        self.seeds, self.actions = [0] * num_games, [[] for _ in range(num_games)]

    def start(self, games):
        for i in games:
            self.seeds[i], self.actions[i] = int(self.rngs[i].integers(2**31)), []
            self.games[i].start(self.seeds[i])
            self.look(i)

    def look(self, i):
        self.player[i], legal, self.obs[i] = self.games[i].look()
        self.legal[i] = False
        self.legal[i, legal] = True

    def observe(self, games=slice(None)):
        return self.obs[games].copy(), self.legal[games].copy()

    def step(self, actions, games=None):
        """RuntimeError also if the rewards do not sum to 0: not every library tells beforehand."""
        actions, games = self.checked(actions, self.legal if games is None else self.legal[games], games)
        rewards, ended = np.zeros((len(games), 2), np.float32), np.zeros(len(games), bool)
        for k, (i, action) in enumerate(zip(games.tolist(), actions.tolist())):
            self.actions[i].append(action)
            rewards[k], ended[k] = self.games[i].play(action)
            if not ended[k]:
                self.look(i)
        if (wrong := abs(rewards.sum(1)) > 1e-5).any():
            raise RuntimeError(f"{self.name} is not zero-sum: it paid {rewards[wrong.argmax()].tolist()}")
        self.start(games[ended])
        return rewards, ended

    def set_state(self, state):
        super().set_state(state)
        for i, game in enumerate(self.games):
            game.start(self.seeds[i])
            for action in self.actions[i]:
                game.play(action)
            self.look(i)


def optional(module, extra):
    """The imported module; ValueError that says what brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        message = f"{error}: scripts/run --extra {extra} ... brings what {module} needs"
        raise ValueError(message) from error


def openspiel_game(name):
    """The pyspiel.Game with sequential moves; parameters as in goofspiel(num_cards=4). ValueError if there is none, it
    is not for two players or not zero-sum, or has no tensor for a network."""
    known = {*LineRules.GAMES, *MatrixGames.GAMES}
    try:
        pyspiel = optional("pyspiel", "openspiel")
    except ValueError as error:
        raise ValueError(
            f"{name} is none of {', '.join(sorted(known))}, so it would be of OpenSpiel. {error}"
        ) from error
    if name.split("(")[0] not in (names := pyspiel.registered_names()):
        raise ValueError(f"there is no game {name}. Nearest: {nearest(name, known.union(names))}")
    try:
        game = pyspiel.load_game(name)
    except pyspiel.SpielError as error:
        raise ValueError(f"OpenSpiel cannot load {name}: {' '.join(str(error).split())[:300]}") from error
    kind, Type = game.get_type(), pyspiel.GameType
    if game.num_players() != 2 or kind.utility != Type.Utility.ZERO_SUM:
        found = f"{game.num_players()} players, {kind.utility.name.lower()}"
        raise ValueError(f"{name} is not a two-player zero-sum game: {found}")
    if not (kind.provides_information_state_tensor or kind.provides_observation_tensor):
        raise ValueError(f"{name} has neither an information state tensor nor an observation tensor for a network")
    return pyspiel.convert_to_turn_based(game) if kind.dynamics == Type.Dynamics.SIMULTANEOUS else game


class OpenSpielGame:
    """One game of OpenSpiel. obs: the information state tensor, or the observation tensor where there is none, and
    the player appended along the first axis, as not every tensor tells it."""

    obs_dtype = np.float32

    def __init__(self, name):
        self.game = openspiel_game(name)
        kind = "information_state" if self.game.get_type().provides_information_state_tensor else "observation"
        self.tensor, shape = f"{kind}_tensor", getattr(self.game, f"{kind}_tensor_shape")()
        self.obs_shape, self.num_actions = (shape[0] + 1, *shape[1:]), self.game.num_distinct_actions()

    def start(self, seed):
        self.rng, self.state = np.random.default_rng(seed), self.game.new_initial_state()
        self.play_chance()

    def play_chance(self):
        while self.state.is_chance_node():
            outcomes, point = self.state.chance_outcomes(), self.rng.random()
            while len(outcomes) > 1 and point >= outcomes[0][1]:
                point -= outcomes.pop(0)[1]
            self.state.apply_action(outcomes[0][0])

    def look(self):
        player = self.state.current_player()
        numbers = getattr(self.state, self.tensor)() + [player] * math.prod(self.obs_shape[1:])
        return player, self.state.legal_actions(), np.reshape(numbers, self.obs_shape)

    def play(self, action):
        self.state.apply_action(action)
        self.play_chance()
        ended = self.state.is_terminal()
        return self.state.returns() if ended else (0, 0), ended


class ClassicGame:
    """One of PettingZoo's classic games that are played in turns, such as connect_four_v3. obs: as it shows itself, but
    for the planes (height, width, channel), which come first as everywhere here."""

    obs_dtype = np.float32

    def __init__(self, name):
        folder = Path(optional("pettingzoo.classic", "pettingzoo").__file__).parent
        if name not in (known := {path.stem for path in folder.glob("*_v*.py")}):
            raise ValueError(f"there is no game {name}. Nearest: {nearest(name, known | {'pong_v3'})}")
        try:
            self.env = optional(f"pettingzoo.classic.{name}", "pettingzoo").env()
        except ImportError as error:
            raise ValueError(f"PettingZoo cannot make {name}: {error}") from error
        self.agents = self.env.possible_agents
        space = self.env.observation_space(self.agents[0])
        if len(self.agents) != 2 or "action_mask" not in getattr(space, "spaces", {}):
            raise ValueError(f"{name} has {len(self.agents)} players and shows {space}: it takes 2 and an action_mask")
        self.obs_shape = tuple(np.roll(space["observation"].shape, 1).tolist())
        self.num_actions = int(self.env.action_space(self.agents[0]).n)

    def start(self, seed):
        self.env.reset(seed=seed)

    def look(self):
        seen = self.env.observe(self.env.agent_selection)
        player = self.agents.index(self.env.agent_selection)
        return player, np.flatnonzero(seen["action_mask"]), np.moveaxis(seen["observation"], -1, 0)

    def play(self, action):
        self.env.step(action)
        ended = any(self.env.terminations.values()) or any(self.env.truncations.values())
        return [self.env.rewards[agent] for agent in self.agents], ended


class PongGame:
    """PettingZoo's Atari Pong for two: player 0 chooses, player 1 chooses without having seen it, 4 frames pass.

    obs (4, 84, 84): the newest pictures, mirrored for player 1: the own paddle is always the right one. Who serves too
    late pays half a point to the other, where PettingZoo takes a whole one from this player alone.
    """

    obs_shape, num_actions, obs_dtype = (4, 84, 84), 6, np.uint8

    def __init__(self, name):
        roms = Path(optional("ale_py", "atari").__file__).parent / "roms"
        self.cv2 = optional("cv2", "atari")
        make = optional(f"pettingzoo.atari.{name}", "pettingzoo").parallel_env
        self.env = make(obs_type="grayscale_image", full_action_space=False, auto_rom_install_path=str(roms))

    def start(self, seed):
        obs, _ = self.env.reset(seed=seed)
        self.pictures, self.first = np.repeat(self.small(obs["first_0"])[None], 4, 0), None

    def small(self, frame):
        return self.cv2.resize(frame, (84, 84), interpolation=self.cv2.INTER_AREA)

    def look(self):
        player = int(self.first is not None)
        return player, range(6), self.pictures[..., ::-1] if player else self.pictures

    def play(self, action):
        if self.first is None:
            self.first = action
            return (0, 0), False
        frames, gain = [], 0
        while len(frames) < 4 and self.env.agents:
            obs, rewards, *_ = self.env.step({"first_0": self.first, "second_0": action})
            frames.append(obs["first_0"])
            gain += (int(rewards["first_0"]) - int(rewards["second_0"])) / 2
        newest = self.small(np.max(frames[-2:], 0))  # both: sprites flicker
        self.pictures, self.first = np.concatenate([self.pictures[1:], newest[None]]), None
        return (gain, -gain), not self.env.agents


def make_games(name, num_games):
    """`Games` by name: of this file, of PettingZoo (_v and a number at the end), of OpenSpiel. Errors: ValueError."""
    for family in (LineGames, MatrixGames):
        if name in family.GAMES:
            return family(name, num_games)
    of_pettingzoo = PongGame if name == "pong_v3" else ClassicGame
    return SingleGames(name, num_games, of_pettingzoo if re.search(r"_v\d+$", name) else OpenSpielGame)


@cache
def game_spec(name):
    """obs_shape, num_actions."""
    games = make_games(name, 1)
    return games.obs_shape, games.num_actions


# ---- 5. Engines and measures -----------------------------------------------------------------------------------------
# A policy maps obs (n, ...), legal (n, A) and the numbers (n,) of the games that these are from, for one that remembers
# them, to float64 probabilities (n, A).


def random_policy(obs, legal, games=None):
    return legal / legal.sum(1, keepdims=True)


@cache
def alpha_beta(name, depth):
    """The policy that looks `depth` moves ahead, sees nothing beyond, and is uniform over the best moves; of a line
    game. Depth 9 is perfect in tic-tac-toe."""
    rules = LineRules(name)
    steps, gap = rules.steps[:, 0].tolist(), rules.length - 2
    # the middle first: it is most often good, which cuts off most
    order = sorted(range(len(rules.cells)), key=lambda a: abs(a - len(rules.cells) // 2))
    lowest, cells = rules.lowest.tolist(), rules.cells.tolist()

    def won(pieces):
        return any((pairs := pieces & pieces >> step) & pairs >> gap * step for step in steps)

    @lru_cache(100_000)
    def value(own, other, depth, low, high):
        """1 + the moves left when the player to move wins, 0 if nobody does, within low to high: sooner is better."""
        occupied = own | other
        moves = [move for a in order if (move := (occupied + lowest[a]) & cells[a])]
        if depth > 0 and any(won(own | move) for move in moves):
            return 1 + depth
        if depth <= 1 or not moves:
            return 0
        for move in moves:
            low = max(low, -value(other, own | move, depth - 1, -high, -low))
            if low >= high:
                break
        return low

    @cache
    def best_actions(own, other):
        best, actions = -math.inf, []
        for a in order:
            if move := (own + other + lowest[a]) & cells[a]:
                low = best - 1  # so that equally good moves are told from worse ones
                v = 1 + depth if won(own | move) else -value(other, own | move, depth - 1, -math.inf, -low)
                best, actions = (v, [a]) if v > best else (best, actions + [a] * (v == best))
        return actions

    def policy(obs, legal, games=None):
        probabilities = np.zeros(legal.shape)
        for row, board in zip(probabilities, rules.boards(obs).tolist()):
            actions = best_actions(*board)
            row[actions] = 1 / len(actions)
        return probabilities

    return policy


def mcts(name, simulations=100, c=2.0, seed=0):
    """The policy of Monte Carlo tree search (UCT with constant c, one random playout each; Kocsis & Szepesvari 2006)
    in a line game: a new tree for every move, all B of a batch at a time, then the most visited action."""
    rules, rng = LineRules(name), np.random.default_rng(seed)

    def playout(boards):
        """Results (B,) of random play for the player to move: 1, 0, -1."""
        result, sign, alive, (own, other) = np.zeros(len(boards)), 1.0, np.arange(len(boards)), boards.T
        while len(alive):
            moves = np.zeros_like(own)
            while len(rest := np.flatnonzero(moves == 0)):  # again for those who drew an illegal action
                action = rng.integers(len(rules.cells), size=len(rest))
                moves[rest] = ((own[rest] | other[rest]) + rules.lowest[action]) & rules.cells[action]
            own = own | moves
            won = rules.won(own)
            result[alive[won]] = sign
            go = ~won & (own | other != rules.full)
            alive, own, other, sign = alive[go], other[go], own[go], -sign
        return result

    def policy(obs, legal, games=None):
        root, (B, A) = rules.boards(obs), legal.shape
        child = np.zeros((B, simulations + 1, A), np.int64)  # node 0 is the root, and no node's child
        visits, total = np.zeros((B, simulations + 1)), np.zeros((B, simulations + 1))  # total: for who moved there
        for n in range(1, simulations + 1):
            games, node, boards, sign, path = np.arange(B), np.zeros(B, np.int64), root, 1.0, []
            leaf, leaf_sign, value = root.copy(), np.zeros(B), np.zeros(B)  # value: for the player to move at the root
            while len(games):
                moves, children, row = rules.moves(boards), child[games, node], np.arange(len(games))
                count = np.maximum(visits[games[:, None], children], 1)
                explore = c * np.sqrt(np.log(np.maximum(visits[games, node], 1))[:, None] / count)
                score = total[games[:, None], children] / count + explore
                score = np.where(children, score, 1e9 + rng.random(score.shape))  # the untried first
                action = np.where(moves, score, -np.inf).argmax(1)
                new = children[row, action] == 0
                child[games[new], node[new], action[new]] = n
                node, own = child[games, node, action], boards[:, 0] | moves[row, action]
                path.append((games, node, sign))
                won = rules.won(own)
                value[games[won]] = sign
                over, boards, sign = won | (own | boards[:, 1] == rules.full), np.stack([boards[:, 1], own], 1), -sign
                leaf[games[new & ~over]], leaf_sign[games[new & ~over]] = boards[new & ~over], sign
                go = ~(new | over)
                games, node, boards = games[go], node[go], boards[go]
            played = leaf_sign != 0
            value[played] = leaf_sign[played] * playout(leaf[played])
            for games, node, sign in path:
                visits[games, node] += 1
                total[games, node] += sign * value[games]
            visits[:, 0] += 1
        count = np.where(child[:, 0], visits[np.arange(B)[:, None], child[:, 0]], 0)
        mean = total[np.arange(B)[:, None], child[:, 0]] / np.maximum(count, 1)
        return np.eye(A)[(count + mean / 4).argmax(1)]  # the mean decides between equally visited ones

    return policy


def match(policy_a, policy_b, name, num_games, seed=0, pause=lambda: None):
    """Side by side, `num_games` games, an even number: a is player 0 in every other one; pause() before each move of
    all. Returns what a has got and how many moves both made, (num_games,) each."""
    if num_games < 2 or num_games % 2:
        raise ValueError(f"a match of {num_games} games: it takes an even number, so that each plays both seats alike")
    *seeds, moves = np.random.SeedSequence(seed).spawn(num_games + 1)
    games, rng, seat = make_games(name, num_games), np.random.default_rng(moves), np.arange(num_games) % 2
    games.reset(seeds)
    returns, lengths, playing = np.zeros(num_games), np.zeros(num_games, np.int64), np.arange(num_games)
    while len(playing):
        pause()
        (obs, legal), own = games.observe(playing), games.player[playing] == seat[playing]
        probabilities = np.zeros(legal.shape)
        for policy, turn in ((policy_a, own), (policy_b, ~own)):
            if turn.any():
                probabilities[turn] = policy(obs[turn], legal[turn], playing[turn])
        cumulative = probabilities.cumsum(1)
        actions = (cumulative > rng.random((len(playing), 1)) * cumulative[:, -1:]).argmax(1)
        rewards, ended = games.step(actions, playing)
        returns[playing] += rewards[np.arange(len(playing)), seat[playing]]
        lengths[playing] += 1
        playing = playing[~ended]
    return returns, lengths


def score(returns):
    """Mean of 1 for a game won, 1/2 for a draw, 0 for a loss."""
    return float(np.mean((np.sign(returns) + 1) / 2))


def round_robin(policies, name, num_games, seed=0, pause=lambda: None):
    """Mean scores (n, n) of each policy (row) against each (column) in `num_games` a pair, 1/2 against itself; pause()
    before each move."""
    payoff = np.full((len(policies), len(policies)), 0.5)
    for i in range(len(policies)):
        for j in range(i):
            payoff[i, j] = score(match(policies[i], policies[j], name, num_games, seed, pause)[0])
            payoff[j, i] = 1 - payoff[i, j]
    return payoff


def elo(payoff, num_games):
    """Elo ratings (n,), the first one 1000, from mean scores (n, n) of `num_games` games a pair: the likeliest ones
    (Bradley-Terry model; Hunter 2004, eq. 3), with one draw more a pair, so that a clean sweep is finite."""
    strength, others = np.ones(len(payoff)), 1 - np.eye(len(payoff))
    points = (others * (num_games * np.asarray(payoff) + 0.5)).sum(1)
    for _ in range(10_000 if len(payoff) > 1 else 0):
        before = strength
        strength = points / ((num_games + 1) * others / (before[:, None] + before)).sum(1)
        strength /= strength[0]
        if np.allclose(strength, before, rtol=1e-9, atol=0):
            break
    return 1000 + 400 * np.log10(strength)


def plot_payoff(payoff, labels, path):
    """A heat map of the mean scores (n, n) as a picture file."""
    from matplotlib.figure import Figure

    n = len(payoff)
    figure = Figure(figsize=(2 + 0.5 * n, 1.5 + 0.5 * n), layout="constrained")
    axes = figure.add_subplot(xticks=range(n), yticks=range(n), xlabel="opponent", title="mean score of the row")
    axes.set_xticklabels(labels, rotation=90)
    axes.set_yticklabels(labels)
    figure.colorbar(axes.imshow(payoff, cmap="RdBu", vmin=0, vmax=1))
    for i in range(n if n <= 20 else 0):
        for j in range(n):
            color = "white" if abs(payoff[i][j] - 0.5) > 0.35 else "black"
            axes.text(j, i, f"{payoff[i][j]:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.savefig(path)


@cache
def information_states(name, limit=600_000):
    """All decisions of an OpenSpiel game, a player's earlier ones first: keys, obs (n, ...), legal (n, A), and of each
    the same player's decision before it, parent (n,), -1: none, and the action that was taken there (n,)."""
    one, rules = OpenSpielGame(name), LineRules(name) if name in LineRules.GAMES else None
    cells = rules.cells.tolist() if rules else None
    if not one.game.get_type().provides_information_state_string:
        raise ValueError(f"nash_conv of {name}: OpenSpiel does not tell its information states")
    rows, seen, legal, visited = {}, [], [], 0  # rows: key -> its number, parent, action taken there
    stack = [(one.game.new_initial_state(), {0: (-1, 0), 1: (-1, 0)})]
    while stack:
        state, last = stack.pop()
        visited += 1
        if visited > limit:
            raise ValueError(f"nash_conv of {name}: more than {limit} positions, too many for an exact best response")
        if state.is_chance_node():
            stack += [(state.child(action), last) for action in state.legal_actions()]
        elif not state.is_terminal():
            player, actions, key = state.current_player(), state.legal_actions(), state.information_state_string()
            if key not in rows:
                rows[key] = (len(rows), *last[player])
                legal.append([action in actions for action in range(one.num_actions)])
                one.state, history = state, state.history()  # this file shows tic-tac-toe in its own way
                seen.append([sum(cells[a] for a in history[k::-2]) for k in (-2, -1)] if rules else one.look()[2])
            stack += [(state.child(action), last | {player: (rows[key][0], action)}) for action in actions]
    numbers = np.array(list(rows.values()))
    obs = rules.planes(np.array(seen)) if rules else np.array(seen, one.obs_dtype)
    return list(rows), obs, np.array(legal), *numbers.T[1:]


def average(policies, weights, parent, taken, obs, legal):
    """The behaviour policy (n, A) of a player who draws one of `policies` by `weights` before the game and keeps to it.

    In sequence form: at each decision the probabilities are weighted by how likely it is that this policy's own actions
    led there (Heinrich et al. 2015, eq. 3), which the mean of the probabilities is not.
    """
    unique, inverse = np.unique(obs.reshape(len(obs), -1), axis=0, return_index=True, return_inverse=True)[1:]
    probabilities = np.stack([policy(obs[unique], legal[unique])[inverse.reshape(-1)] for policy in policies])
    reach, depth = np.ones(probabilities.shape[:2]), np.zeros(len(obs), int)
    for i in np.flatnonzero(parent >= 0):  # parents come first
        depth[i] = depth[parent[i]] + 1
    for d in range(1, depth.max() + 1):
        now = np.flatnonzero(depth == d)
        reach[:, now] = reach[:, parent[now]] * probabilities[:, parent[now], taken[now]]
    reach *= np.asarray(weights, float)[:, None]
    total = reach.sum(0)
    mean = np.einsum("kn,kna->na", reach, probabilities) / np.where(total > 0, total, 1)[:, None]
    return np.where(total[:, None] > 0, mean, random_policy(obs, legal))  # never reached: anything will do


def nash_conv(name, policies, weights=None):
    """What both players together could gain by a best response to the league `policies`, drawn by `weights` (uniform):
    sum over players i of max_pi u_i(pi, average_-i) - u_i(average); 0 at a Nash equilibrium (Lanctot et al. 2017).

    Exact: by the matrix, or by OpenSpiel's best response (seconds and 1 GB for tic_tac_toe)."""
    weights = np.ones(len(policies)) / max(len(policies), 1) if weights is None else np.asarray(weights, float)
    if len(weights) != len(policies) or not math.isclose(weights.sum(), 1):
        raise ValueError(f"a league of {len(policies)} policies with weights {weights}: as many, of sum 1, from one up")
    if name in MatrixGames.GAMES:
        matrix, turns = np.array(MatrixGames.GAMES[name], float), np.eye(2, dtype=np.float32)
        p, q = sum(w * policy(turns, np.ones((2, 3), bool)) for w, policy in zip(weights, policies))
        return float((matrix @ q).max() - (p @ matrix).min())
    import pyspiel

    keys, obs, legal, parent, taken = information_states(name)
    table = average(policies, weights, parent, taken, obs, legal)
    rows = [[(int(a), float(row[a])) for a in np.flatnonzero(mask)] for row, mask in zip(table, legal)]
    return float(pyspiel.nash_conv(openspiel_game(name), dict(zip(keys, rows))))


# ---- 6. Mathematics --------------------------------------------------------------------------------------------------


# Copied from algos/impala_popart.py:vtrace
@torch.no_grad()
def vtrace(log_rhos, rewards, values, next_values, terminated, truncated, gamma, rho_bar=1.0, pg_rho_bar=1.0,
           c_bar=1.0):  # fmt: skip
    """V-trace (Hessel et al. 2018, eq. 3 and 4; Espeholt et al. 2018, eq. 1): arrays (T, B) -> targets G^v, advantages.

    `log_rhos` is log pi(a|s) - log b(a|s); `next_values` is V of each step's true successor. Terminated cuts bootstrap
    and trace, truncated the trace alone; both at once mean terminated. The advantage is min(pg_rho_bar, rho)(G^pi - V).
    """
    inputs = log_rhos, rewards, values, next_values, terminated, truncated
    inputs = (torch.as_tensor(x if torch.is_tensor(x) else np.asarray(x)) for x in inputs)  # lists become float64
    log_rhos, rewards, values, next_values, terminated, truncated = inputs
    next_values = torch.where(terminated.bool(), 0, next_values)
    ended, rhos = terminated.bool() | truncated.bool(), log_rhos.exp()
    deltas = rhos.clamp(max=rho_bar) * (rewards + gamma * next_values - values)
    decay = gamma * rhos.clamp(max=c_bar) * ~ended
    traces = [torch.zeros_like(deltas[0])]
    for delta, c in zip(reversed(deltas.unbind()), reversed(decay.unbind())):
        traces.append(delta + c * traces[-1])
    targets = values + torch.stack(traces[:0:-1])
    # An episode's or the unroll's last step has no successor's target here: its value stands in.
    next_targets = torch.where(ended, next_values, torch.cat([targets[1:], next_values[-1:]]))
    return targets, rhos.clamp(max=pg_rho_bar) * (rewards + gamma * next_targets - values)


def appo_targets(logprob, behaviour_logprob, rewards, values, next_value, terminated, gamma, rho_bar, c_bar, parity):
    """V-trace's value targets and the advantages for the clipped surrogate: arrays (T, B), next_value (B,).

    The surrogate's ratio pi/b is the importance weight, so the advantage r + gamma v' - V has none; with `parity` it is
    V-trace's own, min(rho_bar, rho)(r + gamma v' - V), and the weight counts twice, as in other APPO implementations.
    """
    next_values = torch.cat([values[1:], next_value[None]])
    targets, weighted = vtrace(logprob - behaviour_logprob, rewards, values, next_values, terminated,
                               torch.zeros_like(terminated), gamma, rho_bar, rho_bar, c_bar)  # fmt: skip
    next_targets = torch.cat([targets[1:], next_value[None]]).where(~terminated, 0)
    return targets, weighted if parity else rewards + gamma * next_targets - values


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


# ---- 7. Agent --------------------------------------------------------------------------------------------------------


# Copied from algos/ppo_plr.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    """Orthogonal weights for linear layers, xavier for convolutions (the PLR code's choice); zero biases."""
    if isinstance(layer, nn.Conv2d):
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


# Copied from algos/impala_popart.py:LSTM
class LSTM(nn.Module):
    """forward(inputs (T, B, F), starts (T, B), core (2, B, H)) -> outputs (T, B, H), core; cleared where `starts`. Much
    faster than nn.LSTM for one row, and for many rows one product serves the inputs of all."""

    def __init__(self, num_inputs, size):
        super().__init__()
        self.inputs = layer_init(nn.Linear(num_inputs, 4 * size), 1.0)
        self.hidden = layer_init(nn.Linear(size, 4 * size), 1.0)
        nn.init.ones_(self.inputs.bias[size : 2 * size])  # an open forget gate, as in TensorFlow's cell

    def forward(self, inputs, starts, core):
        (h, c), outputs = core, []
        for x, keep in zip(self.inputs(inputs).unbind(), ~starts[..., None]):
            i, f, g, o = (x + self.hidden(h * keep)).chunk(4, -1)
            c = f.sigmoid() * (c * keep) + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs), torch.stack([h, c])


class Agent(nn.Module):
    """Policy and value of one player, who sees the game from the own side.

    forward(obs (T, B, *obs_shape), legal (T, B, A), starts (T, B), core (2, B, H)) -> logits (T, B, A), -1e9 where not
    legal; values (T, B); core. `starts` marks the first observations of games, where the LSTM is cleared; `core` is its
    state before row 0, then after the last row.
    """

    def __init__(self, obs_shape, num_actions, args):
        super().__init__()
        c, h, w = [*obs_shape, 1, 1][:3]
        network = args.network
        if network == "auto":
            network = "nature" if len(obs_shape) == 3 and min(h, w) >= 36 else "mlp"
        convs = {"mlp": (), "conv": ((64, 3, 1, 1),) * 3, "nature": ((32, 8, 4, 0), (64, 4, 2, 0), (64, 3, 1, 0))}
        layers, size = [], math.prod(obs_shape)
        for channels, kernel, stride, padding in convs[network]:
            layers += [layer_init(nn.Conv2d(c, channels, kernel, stride, padding)), nn.ReLU()]
            c, h, w = channels, *((x + 2 * padding - kernel) // stride + 1 for x in (h, w))
            size = c * h * w
        layers.append(nn.Flatten())
        for _ in range(1 if convs[network] else 2):
            layers += [layer_init(nn.Linear(size, args.hidden_size)), nn.ReLU()]
            size = args.hidden_size
        self.torso, self.lstm_size = nn.Sequential(*layers), args.lstm_size
        self.lstm = LSTM(size, args.lstm_size) if args.lstm_size else None
        self.policy = layer_init(nn.Linear(args.lstm_size or size, num_actions), 0.01)
        self.value = layer_init(nn.Linear(args.lstm_size or size, 1), 1.0)

    def forward(self, obs, legal, starts, core):
        flat = obs.flatten(0, 1)
        flat = flat.float().div_(255) if flat.dtype == torch.uint8 else flat
        features = self.torso(flat).unflatten(0, starts.shape)
        if self.lstm is not None:
            features, core = self.lstm(features, starts, core)
        return self.policy(features).masked_fill(~legal, -1e9), self.value(features).squeeze(-1), core

    def initial_core(self, num_games):
        return torch.zeros(2, num_games, self.lstm_size)


# Copied from algos/impala_popart.py:flat_weights
def flat_weights(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).cpu().numpy()


def acting_agent(args):
    """An agent on the CPU, and the flat vector that its parameters are views of: other weights are one copy."""
    with torch.device("meta"):  # no weights yet, and no draws for them
        agent = Agent(*game_spec(args.env_id), args)
    shapes = {name: parameter.shape for name, parameter in agent.named_parameters()}
    weights = np.zeros(sum(map(math.prod, shapes.values())), np.float32)
    views = torch.from_numpy(weights).split([*map(math.prod, shapes.values())])
    agent.load_state_dict({name: view.view(shapes[name]) for name, view in zip(shapes, views)}, assign=True)
    return agent, weights


def as_policy(agent, num_games=1, greedy=False):
    """The agent, on the CPU, as a policy for measures; it plays each of `num_games` games once, from the beginning."""
    core = agent.initial_core(num_games)

    @torch.inference_mode()
    def policy(obs, legal, games=slice(None)):
        own = core[:, games] if agent.lstm_size else core
        rows = torch.from_numpy(obs)[None], torch.from_numpy(legal)[None], torch.zeros(1, len(obs), dtype=torch.bool)
        logits, _, own = agent(*rows, own)
        if agent.lstm_size:
            core[:, games] = own
        logits = logits[0].double()
        return (logits == logits.amax(1, keepdim=True)).double().numpy() if greedy else logits.softmax(1).numpy()

    return policy


# Copied from algos/impala_popart.py:sample
def sample(logits, generator):
    """Actions (B,) by logits (B, A); without a generator the likeliest."""
    if not torch.isfinite(logits.sum()):
        require_finite(policy_logits=logits)
    if generator is None:
        return logits.argmax(-1)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


# ---- 8. League -------------------------------------------------------------------------------------------------------


# Copied from algos/impala_popart.py:SharedMemory
class SharedMemory:
    """`count` records of numpy arrays, {name: (shape, dtype)}, one block of memory per name: memory["obs"] is (count,
    *shape). It goes to other processes as an argument of theirs. A file without a name: nothing stays in /dev/shm,
    however the processes end. RunError, before any is taken, if the machine has less."""

    def __init__(self, layout, count):
        size = sum(self.nbytes(*field) * count for field in layout.values())
        free = available_memory()
        if size > free:
            parts = ", ".join(f"{name} {self.nbytes(*field) * count / 2**20:.0f}" for name, field in layout.items())
            found = f"{size / 2**20:.0f} MiB of shared memory ({parts}), and {free / 2**20:.0f} MiB are available"
            fix = "ask for fewer --num-actors, --envs-per-actor or --num-steps"
            raise RunError(f"{count} unrolls take {found}: {fix}")
        fd = os.memfd_create("unrolls")
        os.ftruncate(fd, size)
        self.attach(layout, count, fd)

    def attach(self, layout, count, fd):
        self.layout, self.count, self.fd, at = layout, count, fd, 0
        memory = mmap.mmap(fd, 0)
        self.arrays = {}
        for name, (shape, dtype) in layout.items():
            array = np.frombuffer(memory, dtype, count * math.prod(shape), at)
            self.arrays[name] = array.reshape(count, *shape)
            at += self.nbytes(shape, dtype) * count

    @staticmethod
    def nbytes(shape, dtype):
        return -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64

    def __del__(self):
        with suppress(AttributeError):  # it was never made
            os.close(self.fd)

    def __getitem__(self, name):
        return self.arrays[name]

    def record(self, i):
        return {name: array[i, ...] for name, array in self.arrays.items()}

    def __getstate__(self):
        return self.layout, self.count, DupFd(self.fd)

    def __setstate__(self, state):
        layout, count, fd = state
        self.attach(layout, count, fd.detach())


# Copied from algos/impala_popart.py:available_memory
def available_memory():
    """Bytes that this process may still take, by what the machine has free and by the limit of its control group."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # no such group; its limit is the word max
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


class Board:
    """The newest weights of the policy with their version, in shared memory, under a sequence lock: a writer never
    waits, a reader copies again when the writer came in between, and a killed process leaves no lock behind."""

    _fence = staticmethod(SyncQueue._fence)

    # Copied from algos/impala_popart.py:Board.__init__
    def __init__(self, size):
        self.memory = SharedMemory({"sequence": ((), np.int64), "weights": ((size,), np.float32)}, 1)

    # Copied from algos/impala_popart.py:Board.version
    @property
    def version(self):
        return int(self.memory["sequence"][0]) // 2

    # Copied from algos/impala_popart.py:Board.write
    def write(self, weights, version):
        sequence = self.memory["sequence"]
        sequence[0] = 2 * version - 1  # odd: being written
        self._fence()
        self.memory["weights"][0] = weights
        self._fence()
        sequence[0] = 2 * version

    # Copied from algos/impala_popart.py:Board.read
    def read(self, out):
        """Copies the weights to `out`; returns their version."""
        while True:
            before = int(self.memory["sequence"][0])
            self._fence()
            out[:] = self.memory["weights"][0]
            self._fence()
            if before % 2 == 0 and before == self.memory["sequence"][0]:
                return before // 2
            time.sleep(1e-4)


class Shelf:
    """The snapshots of the league, flat vectors in shared memory, each under a sequence lock as on the Board: who reads
    one while it is replaced learns that it is gone, and never has half of it."""

    def __init__(self, capacity, size):
        need, free = capacity * size * 4 / 2**20, available_memory() / 2**20
        if need > free:
            found = f"{need:.0f} MiB of shared memory, and {free:.0f} MiB are available"
            raise RunError(f"--league-size {capacity}: the snapshots take {found}. Ask for fewer, or a smaller network")
        self.memory = SharedMemory({"sequence": ((), np.int64), "weights": ((size,), np.float32)}, capacity)

    def hold(self, snapshots):
        """Makes the shelf hold {id: weights}: what is not among them gives way to what is new."""
        sequence = self.memory["sequence"]
        ids = (sequence // 2 - 1).tolist()
        free = [row for row, held in enumerate(ids) if held not in snapshots]
        for row, new in zip(free, snapshots.keys() - ids):
            sequence[row] = 2 * new + 1  # odd: being written
            Board._fence()
            self.memory["weights"][row] = snapshots[new]
            Board._fence()
            sequence[row] = 2 * new + 2

    def holds(self, snapshot_id):
        return bool((self.memory["sequence"] == 2 * snapshot_id + 2).any())

    def read(self, snapshot_id, out):
        """Copies a snapshot to `out`. False: it is not there, and `out` is spoiled."""
        rows = np.flatnonzero(self.memory["sequence"] == 2 * snapshot_id + 2)
        for row in rows:
            Board._fence()
            out[:] = self.memory["weights"][row]
            Board._fence()
        return self.holds(snapshot_id)


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


NEWEST = -1  # the opponent that is the learner itself, with the weights that it acts with


class League:
    """The learner's end: draws tasks (opening, opponent) for the actors' queue, as a DualCurriculum does, learns from
    the results, and takes snapshots of the learner in."""

    def __init__(self, args, weights, seed):
        *seeds, self_play = seed.spawn(3)
        self.share = 1.0 if args.opponents == "self" else args.self_play_share
        self.rng = np.random.default_rng(self_play)
        self.interval, self.win_rate, self.newest = args.snapshot_interval, args.snapshot_win_rate, 0
        options = {"capacity": args.league_size, "keep_initial": True, "decay": args.pfsp_decay, "seed": seeds[0],
                   "prior_games": args.pfsp_prior_games, "min_games": args.pfsp_min_games}  # fmt: skip
        if args.opponents == "pfsp":
            self.curriculum = PrioritizedFictitiousSelfPlay(weights, weighting=args.pfsp_weighting,
                power=args.pfsp_power, uniform=args.pfsp_uniform, **options)  # fmt: skip
        else:  # self too: snapshots are then taken to be measured
            self.curriculum = FictitiousSelfPlay(weights, **options)
        self.openings = DomainRandomization(args.openings + 1, seed=seeds[1])
        self.shelf, P = Shelf(args.league_size, len(weights)), args.num_actors
        # Enough between the actors for two batches. Older draws would favour those who have become easy, or are gone.
        batch = args.batch_rollouts // args.envs_per_actor
        self.ahead = args.league_opponents * (-(-2 * batch // P) if P else 1)
        # Without a time-out: actors wait while the learner evaluates. Whether they hang is for `Actors.wait` to tell.
        self.queue = SyncQueue(max(P, 1), task_shape=(2,), prefetch=self.ahead, timeout=math.inf)

    @property
    def snapshots(self):
        return {i: self.curriculum.get_opponent(i) for i in self.curriculum.opponents}

    def deal(self):
        """Fills the queue up."""
        for actor in range(self.queue.num_envs):
            for _ in range(self.ahead - self.queue.tasks_waiting(actor)):
                (opening,), newest = self.openings.sample(), self.rng.random() < self.share
                self.queue.put_task(actor, (opening, NEWEST if newest else self.curriculum.sample()[0]))

    def record(self, batch):
        """The games that ended in an unroll's arrays (T, B); those against the newest weights or against an opponent
        that was evicted meanwhile count for nobody."""
        ended, held = batch["terminated"], set(self.curriculum.opponents)
        for opponent, result in zip(batch["opponent"][ended].tolist(), batch["episode_return"][ended].tolist()):
            if opponent in held:
                self.curriculum.update_winrate(opponent, (np.sign(result) + 1) / 2)

    def grow(self, update, weights):
        """Takes a snapshot in after the update if it is time, or the learner beats everyone."""
        if update + 1 - self.newest >= self.interval or self.curriculum.win_rates().min() > self.win_rate:
            self.newest = update + 1
            self.curriculum.update_agent(weights)
            self.shelf.hold(self.snapshots)

    def metrics(self):
        """Figures of the curriculum; by opponent the row of the payoff matrix, the probability, the Elo rating."""
        c = self.curriculum
        columns = {"win_rate": c.win_rates(), "probability": c._sample_distribution(), "rating": c.ratings()}
        row = {f"curriculum/{name}": value for name, value in c.metrics().items()}
        return row | {f"league/{i}/{name}": x[k] for k, i in enumerate(c.opponents) for name, x in columns.items()}

    def state_dict(self):
        """Without the queue: it is empty when there are no actor processes, and else filled anew."""
        return {"curriculum": self.curriculum.state_dict(), "openings": self.openings.state_dict(),
                "rng": self.rng.bit_generator.state, "newest": self.newest}  # fmt: skip

    def load_state_dict(self, state):
        try:
            self.curriculum.load_state_dict(state["curriculum"])
        except ValueError as error:
            raise RunError(f"the checkpoint is not of this game and league: {error}") from error
        self.openings.load_state_dict(state["openings"])
        self.rng.bit_generator.state, self.newest = state["rng"], state["newest"]


# ---- 9. Actors -------------------------------------------------------------------------------------------------------


class Actor:
    """E games, in each of which the learner has one seat, random and fixed for the game, and an opponent the other. A
    step is the learner's move and all that follows until it is the learner's turn again, everywhere. `unroll`
    continues where the last ended.

    An unroll has T + 1 rows of E games at the learner's turn: obs[t], legal[t], and for t < T the action, its logprob,
    and what came of it: reward, terminated, and there the game's return and length. Where `starts`, obs is the
    learner's first of a game. `opponent` is the one that action[t] was played against, `core` the LSTM's state before
    row 0. Games begin against the opponents of the unroll's tasks in turn.
    """

    def __init__(self, args, seed, index, shelf, queue):
        self.args, self.num_steps, self.index, self.shelf, self.queue = args, args.num_steps, index, shelf, queue
        E = args.envs_per_actor
        *seeds, action_seed, seat_seed = seed.spawn(E + 2)
        self.envs = make_games(args.env_id, E)
        self.envs.reset(seeds)
        self.generator = torch.Generator().manual_seed(int(action_seed.generate_state(1)[0]))
        self.rng = np.random.default_rng(seat_seed)
        self.agent, self.weights = acting_agent(args)
        self.agents, self.spare, self.row = {NEWEST: (self.agent, self.weights)}, [], None
        self.core, self.opponent_core = self.agent.initial_core(E), self.agent.initial_core(E)
        self.seat, self.opponent, self.next_opponent = np.zeros((3, E), np.int64)
        self.reward, self.total, self.episode_return = np.zeros((3, E))
        self.length, self.episode_length = np.zeros((2, E), np.int64)
        self.terminated, self.starts = np.zeros((2, E), bool)

    # What the next unroll depends on, beside the games, the networks and the generators
    SAVED = "seat", "opponent", "total", "length"

    @staticmethod
    def layout(args):
        """Shapes and types of an unroll's arrays."""
        T, E, games = args.num_steps, args.envs_per_actor, make_games(args.env_id, 1)
        layout = {"obs": ((T + 1, E, *games.obs_shape), games.obs_dtype), "starts": ((T + 1, E), bool),
                  "legal": ((T + 1, E, games.num_actions), bool)}  # fmt: skip
        layout |= {name: ((T, E), dtype) for name, dtype in (
            ("action", np.int64), ("logprob", np.float32), ("reward", np.float32), ("terminated", bool),
            ("opponent", np.int64), ("episode_return", np.float64), ("episode_length", np.int64),
        )}  # fmt: skip
        layout |= {"core": ((2, E, args.lstm_size), np.float32)}
        return layout | {"version": ((), np.int64), "lag_sent": ((), np.int64), "wait_s": ((), np.float64)}

    def fill(self, slot, board):
        """An unroll with the newest weights."""
        slot["version"][...] = board.read(self.weights)
        self.meet(np.array([self.queue.get_task(self.index) for _ in range(self.args.league_opponents)]))
        self.unroll(slot)
        slot["lag_sent"][...] = board.version - slot["version"]

    def meet(self, tasks):
        """Has the networks ready of those who play now, and of the opponents in `tasks` (k, 2)."""
        playing = {NEWEST, *self.opponent.tolist()} if self.row else {NEWEST}
        for gone in self.agents.keys() - playing:
            self.spare.append(self.agents.pop(gone))
        for opponent in set(tasks[:, 1].tolist()) - self.agents.keys():
            agent, weights = self.spare.pop() if self.spare else acting_agent(self.args)
            if self.shelf.read(opponent, weights):
                self.agents[opponent] = agent, weights
            else:
                self.spare.append((agent, weights))
        newest = tasks[:, 1] == NEWEST
        held = np.array([i in self.agents and self.shelf.holds(i) for i in tasks[:, 1].tolist()]) & ~newest
        gone = ~(held | newest)  # evicted while its task waited: others of these play instead, or the newest
        tasks[gone, 1] = np.resize(tasks[held, 1], gone.sum()) if held.any() else NEWEST
        self.tasks, self.dealt = tasks, 0
        self.deal(np.arange(len(self.opponent)))

    def deal(self, games):
        """The next of the tasks for what follows in `games`: every opponent gets as many games, however long they are
        (by place, those that lose fast would get more, and the mixture would be another than the league's)."""
        tasks = self.tasks[(self.dealt + np.arange(len(games))) % len(self.tasks)]
        self.next_opponent[games], self.dealt = tasks[:, 1], self.dealt + len(games)
        if self.args.openings:
            self.envs.openings[games] = tasks[:, 0]

    @torch.inference_mode()
    def unroll(self, slot):
        if self.row is None:
            everywhere = np.arange(len(self.seat))
            self.envs.start(everywhere)  # anew, by the openings of the first tasks
            self.begin(everywhere)
            self.reply()
        slot["core"][:] = self.core.numpy()
        for t in range(self.num_steps):
            self.write(slot, t, self.row | {"opponent": self.opponent})
            inputs = (torch.from_numpy(self.row[name])[None] for name in ("obs", "legal", "starts"))
            logits, _, self.core = self.agent(*inputs, self.core)
            action = sample(logits[0], self.generator)
            logprob = logits[0].log_softmax(-1).gather(-1, action[:, None])[:, 0].numpy()
            self.step(action.numpy())
            self.write(slot, t, {"action": action.numpy(), "logprob": logprob, "reward": self.reward,
                                 "terminated": self.terminated, "episode_return": self.episode_return,
                                 "episode_length": self.episode_length})  # fmt: skip
        self.write(slot, self.num_steps, self.row)

    # ---- A game with two seats, of which the learner sees one ----

    def step(self, actions):
        """The learner's moves (E,), and the replies."""
        self.reward[:], self.terminated[:], self.starts[:] = 0, False, False
        self.length += 1
        self.move(np.arange(len(actions)), actions)
        self.reply()

    def reply(self):
        """Opponents move, each in all its games at once, until it is the learner's turn everywhere."""
        while len(waiting := np.flatnonzero(self.envs.player != self.seat)):
            obs, legal = map(torch.from_numpy, self.envs.observe(waiting))
            actions, opponents = np.zeros(len(waiting), np.int64), self.opponent[waiting]
            for opponent in np.unique(opponents):
                rows = np.flatnonzero(opponents == opponent)
                games, agent = waiting[rows], self.agents[int(opponent)][0]
                goes_on = torch.zeros(1, len(rows), dtype=torch.bool)  # begin() clears their memory
                logits, _, core = agent(obs[rows][None], legal[rows][None], goes_on, self.opponent_core[:, games])
                self.opponent_core[:, games] = core
                actions[rows] = sample(logits[0], self.generator).numpy()
            self.move(waiting, actions)
        obs, legal = self.envs.observe()
        self.row = {"obs": obs, "legal": legal, "starts": self.starts.copy()}

    def move(self, games, actions):
        rewards, ended = self.envs.step(actions, games)
        rewards = rewards[np.arange(len(games)), self.seat[games]]
        self.total[games] += rewards
        own = ~self.starts[games]  # what came before the learner's first move came of none, and is not told
        self.reward[games] += np.where(own, rewards, 0)
        known = games[ended & own]
        self.terminated[known], self.episode_return[known] = True, self.total[known]
        self.episode_length[known] = self.length[known]
        self.begin(games[ended])

    def begin(self, games):
        self.seat[games], self.opponent[games] = self.rng.integers(2, size=len(games)), self.next_opponent[games]
        self.deal(games)
        self.starts[games], self.total[games], self.length[games], self.opponent_core[:, games] = True, 0, 0, 0

    # ----

    # Copied from algos/impala_popart.py:Actor.write
    def write(self, slot, t, row):
        for name, array in row.items():
            slot[name][t] = array

    def state_dict(self):
        playing = set(self.opponent.tolist()) - {NEWEST}  # perhaps evicted meanwhile
        return {name: getattr(self, name) for name in self.SAVED} | {
            "envs": self.envs.get_state(), "generator": self.generator.get_state(), "row": self.row,
            "rng": self.rng.bit_generator.state, "core": self.core, "opponent_core": self.opponent_core,
            "agents": {i: self.agents[i][1] for i in playing if self.row},
        }  # fmt: skip

    def load_state_dict(self, state):
        self.envs.set_state(state["envs"])
        self.generator.set_state(state["generator"])
        self.rng.bit_generator.state = state["rng"]
        self.row = state["row"] and {name: tensor.numpy().copy() for name, tensor in state["row"].items()}
        self.core, self.opponent_core = state["core"].clone(), state["opponent_core"].clone()
        for name in self.SAVED:
            getattr(self, name)[:] = state[name].numpy()
        for opponent, saved in state["agents"].items():
            self.agents[opponent] = agent, weights = acting_agent(self.args)
            weights[:] = saved.numpy()
        if unknown := self.row and set(self.opponent.tolist()) - self.agents.keys():
            raise RunError(f"the checkpoint is not of this game and league: its games are against {unknown}, who lack")


# Copied from algos/impala_popart.py:put
def put(pipe, number):
    os.write(pipe.fileno(), number.to_bytes(4, "little"))  # 4 bytes go through a pipe whole, without a lock


# Copied from algos/impala_popart.py:take
def take(pipe):
    data = os.read(pipe.fileno(), 4)
    if not data:
        raise EOFError("the other end of the pipe is closed")
    return int.from_bytes(data, "little")


# Copied from algos/impala_popart.py:actor_process
def actor_process(make_actor, index, slots, board, turns, free, full, errors):
    """Fills free slots for ever. Its count in `turns` is odd while it waits for one."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: so it ends with its parent, even if stopped
    if os.getppid() != multiprocessing.parent_process().pid:  # which died before that
        return
    try:
        torch.set_num_threads(1)
        actor = make_actor(index)
        while True:
            turns["count"][index] += 1
            start, number = time.perf_counter(), take(free)
            turns["count"][index] += 1
            slot = slots.record(number)
            slot["wait_s"][...] = time.perf_counter() - start
            actor.fill(slot, board)
            put(full, number)
    except (Exception, RunError) as error:
        with suppress(OSError):  # the parent died
            errors.send(error.code if isinstance(error, RunError) else traceback.format_exc())


# Copied from algos/impala_popart.py:Actors
class Actors:
    """`num_actors` processes that fill slots with unrolls while the learner learns; with 0 it acts itself, in turn.

    make_actor(version, index) -> Actor. `batch` waits for `batch_slots` full slots, takes the oldest and returns their
    unrolls side by side; `publish` hands out new weights. `max_lag`: in no batch is an unroll whose weights are more
    than so many updates old. For that a slot counts as old as the weights when it was handed out, there are at most
    batch_slots (max_lag + 1), and a batch waits for old slots where the others would make those too old. Nothing is
    ever dropped. An actor that raised, died or does not answer is a RunError.
    """

    TIMEOUT_S = 600  # for an actor's start, and for any one unroll

    def __init__(self, make_actor, layout, num_actors, num_slots, batch_slots, max_lag):
        self.make_actor, self.layout, self.num_actors, self.num_slots = make_actor, layout, num_actors, num_slots
        self.batch_slots, self.max_lag = batch_slots, max_lag
        self.actor, self.actor_state, self.processes = None, None, []

    def start(self, weights, version):
        """Everything acts with `weights` from now on, the version `version`."""
        self.slots, self.board, self.version = SharedMemory(self.layout, self.num_slots), Board(len(weights)), version
        self.board.write(weights, version)
        self.issued, self.full, self.used = dict.fromkeys(range(self.num_slots), version), [], []
        self.batch_arrays = {name: np.concatenate(self.slots[name][: self.batch_slots], axis=1)
                             for name, (shape, _) in self.layout.items() if shape}  # fmt: skip
        if self.num_actors:
            return self.start_processes(partial(self.make_actor, version))
        self.actor = self.make_actor(version, 0)
        if self.actor_state is not None:
            self.actor.load_state_dict(self.actor_state)

    def start_processes(self, make_actor):
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch's threads in any state
        atexit.register(self.close)
        (free_out, self.free), (self.full_out, full) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        if self.num_slots > (most := fcntl.fcntl(self.free, fcntl.F_GETPIPE_SZ) // 4):
            fix = "ask for more --envs-per-actor or fewer --batch-rollouts"
            raise RunError(f"{self.num_slots} unrolls at a time, but a pipe takes the numbers of {most}: {fix}")
        self.turns = SharedMemory({"count": ((), np.int64)}, self.num_actors)
        self.counts, self.since = np.zeros(self.num_actors, np.int64), np.zeros(self.num_actors)
        self.clock, self.looked = 0.0, time.monotonic()
        for number in self.issued:
            put(self.free, number)
        # Actors inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        try:
            for index in range(self.num_actors):
                errors, remote = context.Pipe(duplex=False)
                args = make_actor, index, self.slots, self.board, self.turns, free_out, full, remote
                self.processes.append((context.Process(target=actor_process, args=args), errors))
                self.processes[-1][0].start()
                remote.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        free_out.close()
        full.close()

    def batch(self):
        """Tensors {name: (T or T + 1, environments of batch_slots slots, ...)}, valid until the next call."""
        self.wait_s = 0.0
        while not self.ready():
            self.full.append(self.receive())
        self.used, self.full = self.full[: self.batch_slots], self.full[self.batch_slots :]
        for name, array in self.batch_arrays.items():
            np.concatenate([self.slots[name][number] for number in self.used], axis=1, out=array)
        self.versions = self.slots["version"][self.used].tolist()
        lags = [self.version - version for version in self.versions]
        self.metrics = {"async/policy_lag_mean": np.mean(lags), "async/policy_lag_max": max(lags),
                        "async/policy_lag_sent": self.slots["lag_sent"][self.used].mean(),
                        "async/queue_depth": len(self.full), "async/learner_wait_s": self.wait_s,
                        "async/actor_wait_s": self.slots["wait_s"][self.used].sum(), "async/dropped": 0}  # fmt: skip
        if self.max_lag is None:
            self.release()
        return {name: torch.from_numpy(array) for name, array in self.batch_arrays.items()}

    def ready(self):
        """Whether the oldest full slots make a batch after which no other slot must become too old."""
        while self.processes and self.wait(0):
            self.full.append(take(self.full_out))
        self.full.sort(key=self.issued.get)
        if len(self.full) < self.batch_slots or self.max_lag is None:
            return len(self.full) >= self.batch_slots
        left = sorted(self.issued[number] for number in self.issued.keys() - self.full[: self.batch_slots])
        return all(self.version + 1 + i // self.batch_slots - issued <= self.max_lag for i, issued in enumerate(left))

    def receive(self):
        """The next full slot."""
        if self.actor is not None:
            self.actor.fill(self.slots.record(len(self.full)), self.board)
            return len(self.full)
        start = time.perf_counter()
        while not self.wait(1):
            pass
        self.wait_s += time.perf_counter() - start
        return take(self.full_out)

    def wait(self, seconds):
        """Whether a slot gets full within this time. RunError if an actor has ended or hangs, whatever others do."""
        ends = {end: index for index, pair in enumerate(self.processes) for end in (pair[0].sentinel, pair[1])}
        found = connection.wait([self.full_out, *ends], seconds)
        for index in (ends[end] for end in found if end in ends):
            process, errors = self.processes[index]
            process.join(2)
            with suppress(EOFError, OSError):
                if errors.poll():
                    raise RunError(f"actor {index} failed: {errors.recv().removeprefix('error: ')}")
            raise RunError(f"actor {index} (process {process.pid}) died with exit code {process.exitcode}")
        now, counts = time.monotonic(), self.turns["count"].copy()
        self.clock, self.looked = self.clock + min(now - self.looked, 60), now  # a Ctrl-Z that stops all is no time-out
        self.since[(counts != self.counts) | (counts % 2 == 1)] = self.clock
        self.counts, index = counts, self.since.argmin()
        if self.clock - self.since[index] > self.TIMEOUT_S:
            pid = self.processes[index][0].pid
            raise RunError(f"actor {index} (process {pid}) hangs: no unroll of it for {self.TIMEOUT_S} s")
        return bool(found)

    def publish(self, weights):
        """After an update."""
        self.version += 1
        self.board.write(weights, self.version)
        self.release()

    def release(self):
        """Hands out the slots of the last batch again."""
        for number in self.used:
            self.issued[number] = self.version
            if self.processes:
                put(self.free, number)
        self.used = []

    def state_dict(self):
        """Of num_actors 0. The episodes of processes are not kept: a resumed run starts new ones."""
        return {"actor": self.actor and self.actor.state_dict()}

    def load_state_dict(self, state):
        self.actor_state = state["actor"]

    def close(self):
        started = [process for process, _ in self.processes if process.pid]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        if self.actor is not None:
            self.actor.envs.close()
        atexit.unregister(self.close)


class LeagueActors(Actors):
    """Actors that find the tasks of an unroll in the queue. The learner fills it up whenever it looks for full slots:
    so nobody who waits for tasks can keep it waiting."""

    def __init__(self, league, *options):
        self.league = league
        super().__init__(*options)

    def receive(self):
        self.league.deal()
        return super().receive()

    def wait(self, seconds):
        self.league.deal()
        return super().wait(seconds)


# Copied from algos/ppo_plr.py:keep_freed_memory
def keep_freed_memory():
    """Keeps glibc from handing the activations' memory back to the kernel after each piece, to fault it in again."""
    with suppress(OSError, AttributeError):  # another C library has no such switch, nor the need
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-8, 1)):  # mmap threshold, trim threshold, arenas
            mallopt(option, value)


# ---- 10. Plumbing: seeds, the run directory, checkpoints -------------------------------------------------------------


class GameStats:
    """Means of finished games' returns and lengths since the last pop, and the number of all games."""

    def __init__(self):
        self.total, self.count, self.sums = 0, 0, [0.0, 0.0]

    def update(self, batch):
        """The unrolls' arrays (T, B)."""
        columns = (batch[name][batch["terminated"]] for name in ("episode_return", "episode_length"))
        self.sums = [total + float(column.sum()) for total, column in zip(self.sums, columns)]
        self.count += int(batch["terminated"].sum())

    def pop(self):
        self.total += self.count
        means = [total / self.count if self.count else math.nan for total in self.sums]
        self.count, self.sums = 0, [0.0, 0.0]
        return dict(zip(("charts/episodic_return", "charts/episodic_length", "charts/episodes"), [*means, self.total]))

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


# Copied from algos/impala_popart.py:Window
class Window:
    """Means of rows of numbers since the last pop; maxima of those named ..._max."""

    def __init__(self):
        self.rows = []

    def add(self, row):
        self.rows.append({name: float(value) for name, value in row.items()})

    def pop(self):
        rows, self.rows = self.rows, []
        columns = {name: [row[name] for row in rows] for name in rows[0]}
        return {name: (max if name.endswith("_max") else np.mean)(values) for name, values in columns.items()}

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


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


# ---- 11. Evaluation --------------------------------------------------------------------------------------------------


def rivals(name):
    """The engines that a game is measured against, as policies by name."""
    found = {"random": random_policy}
    if name == "tic_tac_toe":
        found["minimax"] = alpha_beta(name, 9)
    if name == "connect_four":
        found["mcts100"] = mcts(name, 100)
    return found


def evaluate(weights, args, pause=lambda: None):
    """Plays args.eval_episodes games against each rival, half of them as either player, seeded by args.eval_seed alone;
    pause() before each move. Returns a row per game: the rival as `level`, the seat, the return, its moves."""
    agent, flat = acting_agent(args)
    flat[:], rows = weights, []
    for name, rival in rivals(args.env_id).items():
        policy = as_policy(agent, args.eval_episodes, args.eval_greedy)
        returns, lengths = match(policy, rival, args.env_id, args.eval_episodes, args.eval_seed, pause)
        rows += [{"split": "eval", "level": name, "seat": i % 2, "return": float(total), "length": int(length)}
                 for i, (total, length) in enumerate(zip(returns, lengths))]  # fmt: skip
    return rows


def summarize(rows):
    """Means of evaluation rows over all, and by rival: score (win 1, draw 1/2) and share of losses."""
    returns = {}
    for row in rows:
        returns.setdefault(row["level"], []).append(row["return"])
    summary = {"eval/return_mean": np.mean([row["return"] for row in rows]),
               "eval/length_mean": np.mean([row["length"] for row in rows])}  # fmt: skip
    for name, values in returns.items():
        summary |= {f"eval/{name}/score": score(values), f"eval/{name}/losses": np.mean(np.sign(values) < 0)}
    return summary


def snapshot_policies(snapshots, args):
    """Flat weights -> policies, which share one network."""
    agent, flat = acting_agent(args)

    def policy(weights, obs, legal, games=None):
        flat[:] = weights
        return as_policy(agent)(obs, legal)

    return [partial(policy, weights) for weights in snapshots]


def exploitability(weights, snapshots, args, last):
    """NashConv of the learner and of the league's average, every snapshot alike, where it is exact and takes less than
    seconds; at the end of a run also of tic_tac_toe. Only of policies without memory."""
    matrix, exact = args.env_id in MatrixGames.GAMES, ("kuhn_poker", "leduc_poker", *["tic_tac_toe"] * last)
    if args.lstm_size or not (matrix or (args.env_id in exact and importlib.util.find_spec("pyspiel"))):
        return {}
    newest, *league = snapshot_policies([weights, *snapshots], args)
    return {
        "eval/nash_conv": nash_conv(args.env_id, [newest]),
        "eval/nash_conv_average": nash_conv(args.env_id, league),
    }


def rank(weights, snapshots, args, folder, pause=lambda: None):
    """A round robin of args.eval_round_robin policies, the league's snapshots {id: weights} and the learner, pause()
    before each move: payoff.json, payoff.png in the folder. Returns the learner's Elo rating, where the oldest snapshot
    has 1000."""
    if args.lstm_size or not args.eval_round_robin:
        return {}
    ids = [*snapshots]
    ids = [ids[i] for i in np.unique(np.linspace(0, len(ids) - 1, args.eval_round_robin - 1).round().astype(int))]
    policies = snapshot_policies([*(snapshots[i] for i in ids), weights], args)
    payoff = round_robin(policies, args.env_id, 20, args.eval_seed, pause)
    ratings, labels = elo(payoff, 20), [*map(str, ids), "learner"]
    table = {"labels": labels, "payoff": payoff.tolist(), "elo": ratings.tolist()}
    write_atomically(folder / "payoff.json", lambda f: f.write(json.dumps(table).encode()))
    plot_payoff(payoff, labels, folder / "payoff.png")
    return {"eval/elo": ratings[-1]}


# ---- 12. Training ----------------------------------------------------------------------------------------------------


def make_actor(args, seed, shelf, queue, version, index):
    # By the version too, so that where the games of before a resume are lost, others come.
    seed = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, version, index))
    return Actor(args, seed, index, shelf, queue)


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
    agent = Agent(*game_spec(args.env_id), args).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    stats, window, league = GameStats(), Window(), League(args, flat_weights(agent), random.curriculum)
    actors = LeagueActors(
        league, partial(make_actor, args, random.envs, league.shelf, league.queue), Actor.layout(args),
        args.num_actors, args.num_slots, args.batch_rollouts // args.envs_per_actor, args.max_policy_lag,
    )  # fmt: skip
    parts = {"agent": agent, "optimizer": optimizer, "random": random, "league": league, "actors": actors,
             "stats": stats, "window": window}  # fmt: skip
    first_update, global_step, row = 0, 0, {}

    def snapshot(update):
        state = {name: part.state_dict() for name, part in parts.items()}
        return state | {"update": update, "global_step": global_step, "row": row, "next_obs": None}

    def pause():
        """Between the moves of an evaluation, which can take minutes: answers a signal as `run.checkpoint` does."""
        if run.signals and args.eval_only:
            raise SystemExit(75)
        if run.signals:
            run.checkpoint(run.state, due=True)  # of the top of this update

    with run, closing(actors):
        # Copied from algos/ppo.py:region(restore)
        state = run.restore(parts)
        if state is not None:
            first_update, global_step, row = state["update"], state["global_step"], state["row"]
            for name, part in parts.items():
                part.load_state_dict(state[name])
        # End of copy
        if args.eval_only:
            rows, snapshots = evaluate(flat_weights(agent), args, pause), [*league.snapshots.values()]
            summary = summarize(rows) | exploitability(flat_weights(agent), snapshots, args, last=True)
            run.log_eval(global_step, rows)
            print(json.dumps(summary))
            return summary
        league.shelf.hold(league.snapshots)
        actors.start(flat_weights(agent), first_update)

        for update in range(first_update, args.num_updates):
            last = update + 1 == args.num_updates  # its long evaluation must not cost more than one update
            due = update > first_update and (last or update % args.checkpoint_interval == 0)
            run.checkpoint(snapshot(update), due)
            rate = args.learning_rate * (1 - update / args.num_updates if args.anneal_lr else 1)
            optimizer.param_groups[0]["lr"] = rate
            clock = Stopwatch()

            # Collect: the oldest full unrolls of the actors, side by side.
            batch = actors.batch()
            stats.update(batch)
            global_step += args.batch_size
            clock.lap("collect")

            # ---- APPO against a league: this block is the method (with League, Actor.step and appo_targets) ----
            league.record(batch)
            b, losses = {name: tensor.to(device) for name, tensor in batch.items()}, []
            with torch.no_grad():
                logits, values, _ = agent(b["obs"], b["legal"], b["starts"], b["core"])
                logprob = logits[:-1].log_softmax(-1).gather(-1, b["action"][..., None]).squeeze(-1)
                targets, advantages = appo_targets(
                    logprob, b["logprob"], b["reward"], values[:-1], values[-1], b["terminated"], args.gamma,
                    args.rho_bar, args.c_bar, args.appo_parity,
                )  # fmt: skip
            for _ in range(args.update_epochs):
                rollouts = random.minibatches.permutation(args.batch_rollouts)
                for columns in map(torch.from_numpy, np.array_split(rollouts, args.num_minibatches)):
                    m = {name: tensor[:, columns] for name, tensor in b.items()}
                    logits, value, _ = agent(m["obs"][:-1], m["legal"][:-1], m["starts"][:-1], m["core"])
                    log_pi, advantage = logits.log_softmax(-1), advantages[:, columns]
                    if args.norm_adv:
                        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                    loss, loss_parts = ppo_loss(
                        log_pi.gather(-1, m["action"][..., None]).squeeze(-1), -(log_pi.exp() * log_pi).sum(-1), value,
                        m["logprob"], None, advantage, targets[:, columns], args.clip_coef, False, args.ent_coef,
                        args.vf_coef,
                    )  # fmt: skip
                    optimizer.zero_grad()
                    loss.backward()
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    if not torch.isfinite(grad_norm + loss):
                        require_finite(logits=logits, value=value, **loss_parts, grad_norm=grad_norm)
                    optimizer.step()
                    losses.append(torch.stack([*loss_parts.values(), grad_norm]).detach())
            league.grow(update, flat_weights(agent))
            actors.publish(flat_weights(agent))
            # ---- end of the method ----
            require_finite(**dict(agent.named_parameters()))
            clock.lap("update")

            # Log and evaluate.
            means = zip((*loss_parts, "grad_norm"), torch.stack(losses).mean(0).tolist())
            newest_share = (batch["opponent"] == NEWEST).float().mean()
            window.add({f"losses/{name}": loss for name, loss in means} | actors.metrics
                       | {"curriculum/newest_share": newest_share}
                       | {f"perf/{name}_s": seconds for name, seconds in clock.total.items()})  # fmt: skip
            row = {}
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                weights = flat_weights(agent)
                rows = evaluate(weights, args, pause)
                run.log_eval(global_step, rows)
                row = summarize(rows) | exploitability(weights, [*league.snapshots.values()], args, last)
                row |= rank(weights, league.snapshots, args, run.dir, pause) if last else {}
                clock.lap("eval")
                row |= {"perf/eval_s": clock.total["eval"]}
            if last or row or (update + 1) % args.log_interval == 0:
                done = {"charts/update": update + 1, "charts/learning_rate": rate, "perf/dead_steps": 0,
                        "losses/explained_variance": explained_variance(values[:-1].cpu().numpy(),
                                                                        targets.cpu().numpy())}  # fmt: skip
                run.log(global_step, row | window.pop() | stats.pop() | league.metrics() | done, update + 1)

        # Copied from algos/ppo.py:region(finish)
        run.checkpoint(snapshot(args.num_updates), due=True)
        names = {key: value for key, value in row.items() if key.startswith("eval")}
        return run.finish({"global_step": global_step, "wall_s": run.elapsed()} | names)
        # End of copy


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
