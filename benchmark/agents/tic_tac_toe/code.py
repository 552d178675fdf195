"""Asynchronous PPO in self-play against a league: two-player zero-sum games, opponents that are the agent's past.

Papers: Vinyals et al. 2019 (prioritized fictitious self-play); Heinrich et al. 2015 (fictitious self-play);
Espeholt et al. 2018, arXiv:1802.01561 (V-trace); Schulman et al. 2017, arXiv:1707.06347 (the clipped surrogate).

  Train:     python algos/appo_pfsp.py --env-id connect_four --total-timesteps 5000000
  Baselines: the same with --opponents fsp, or with --opponents self
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per game goes to eval.jsonl)
  Measure:   python scripts/arena.py runs/appo_pfsp/connect_four/seed1-... --engines mcts100
  Play:      python scripts/play.py runs/appo_pfsp/connect_four/seed1-...

Differs from the papers: the clipped surrogate is of V-trace's advantage without its importance weight, which the ratio
already is (--appo-parity counts it twice, as public implementations do); one agent instead of AlphaStar's three kinds.
"""

import ast
import ctypes
import difflib
import fcntl
import hashlib
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
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from functools import cache, partial
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
    device: Literal["auto", "cpu", "cuda"] = "auto"  # the learner's (auto: cuda if there is one); actors use the CPU
    deterministic: bool = False  # only deterministic GPU kernels (on a CPU num_actors 0 always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the learner; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 200  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 20  # updates between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # games
    env_id: str = "connect_four"  # or tic_tac_toe, rps, biased_rps
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

    # algorithm
    total_timesteps: int = 5_000_000  # the learner's moves in all games, rounded up to whole updates
    hidden_size: int = 256  # units of each of the network's two layers
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
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    ent_coef: float = 0.1  # entropy bonus: without exploration nobody learns to answer what the others do
    vf_coef: float = 0.5  # value loss weight
    max_grad_norm: float = 0.5  # gradient norm limit

    # evaluation
    eval_interval: int = 0  # updates between evaluations; 0: only at the end
    eval_episodes: int = 200  # games against random play, half of them as either player
    eval_seed: int = 10_000  # seeds the evaluation games, the same for every run and algorithm
    eval_greedy: bool = False  # evaluate the most likely action, not a sampled one (as an equilibrium may have to)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    batch_size: int = field(init=False)
    num_updates: int = field(init=False)

    def __post_init__(self):
        E, P, B = self.envs_per_actor, self.num_actors, self.batch_rollouts
        from_0 = dict.fromkeys(("seed", "num_actors", "max_policy_lag", "eval_interval"), (0, math.inf))
        shares = dict.fromkeys(("gamma", "self_play_share", "snapshot_win_rate", "pfsp_uniform"), (0, 1))
        check_numbers(self, **from_0, **shares, league_size=(2, math.inf), pfsp_decay=(1e-9, 1),
                      pfsp_power=(1e-9, 1e9), openings=(0, make_games(self.env_id, 1).most_openings),
                      num_minibatches=(1, B), torch_threads=(0, 1024), eval_seed=(0, 2**64 - 1))  # fmt: skip
        self.batch_size = B * self.num_steps
        self.num_updates = -(-self.total_timesteps // self.batch_size)
        if B % E:
            fitting = max(round(B / E), 1) * E
            raise ValueError(f"--batch-rollouts {B} is no multiple of --envs-per-actor {E}: try {fitting}")
        if self.num_slots < P:
            raise ValueError(f"--max-policy-lag {self.max_policy_lag} leaves {self.num_slots} unrolls at a time for "
                             f"--num-actors {P}: try {-(-P * E // B) - 1} or fewer actors")  # fmt: skip

    # Copied from algos/impala_popart.py:Args.num_slots
    @property
    def num_slots(self):
        """Unrolls that exist at a time: a batch, one under way in each actor, and a batch to come."""
        batch = self.batch_rollouts // self.envs_per_actor
        slots = self.num_actors + 2 * batch if self.num_actors else batch
        return slots if self.max_policy_lag is None else min(slots, batch * (self.max_policy_lag + 1))


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


# ---- 2. Curriculum: the league ---------------------------------------------------------------------------------------

NEWEST = -1  # the opponent that is the learner itself, with the weights that it acts with


# Lean form of curricula/self_play.py:LeaguePlay with LeaguePlay->League
class League:
    """Opponents: the learner itself, NEWEST, in a share of the games, and past copies of it, flat arrays by id.

    pfsp draws the past by how hard it is for the learner (Vinyals et al. 2019, supplement), a weighting of its win
    rates x; a new copy evicts the easiest, the one with the highest win rate, of equal ones the oldest. fsp draws
    uniformly (Heinrich et al. 2015) and evicts the oldest, and so does self, whose past is there to be measured. The
    first copy, id 0, stays.
    """

    WEIGHTINGS = {
        "hard": lambda x: 1 - x,  # with pfsp_power
        "var": lambda x: x * (1 - x),
        "linear": lambda x: 1 - x,
        "linear_capped": lambda x: np.minimum(0.5, 1 - x),
        "argmax": lambda x: (x == x.min()).astype(float),  # as the Syllabus paper has it
    }

    def __init__(self, args, weights, seed):
        self.args, self.share = args, 1.0 if args.opponents == "self" else args.self_play_share
        self.rngs = self.past_rng, self.opening_rng, self.newest_rng = [*map(np.random.default_rng, seed.spawn(3))]
        self.past, self.records, self.next_id = {}, {}, 0
        self.update_agent(weights)

    def draw(self):
        """A task: how many random moves a game begins with, uniformly, and against whom it is."""
        (opening,) = self.opening_rng.integers(self.args.openings + 1, size=1)
        if self.newest_rng.random() < self.share:
            return opening, NEWEST
        return opening, [*self.past][self.past_rng.choice(len(self.past), p=self.distribution())]

    def deal(self, tasks):
        """Draws the tasks of an unroll, with the opponents' weights."""
        for k in range(len(tasks["opponents"])):
            tasks["openings"][k], opponent = self.draw()
            tasks["opponents"][k], tasks["weights"][k] = opponent, self.past.get(opponent, 0)

    def record(self, batch):
        """The games that ended in an unroll's arrays (T, B); those against NEWEST, or an opponent that was evicted
        meanwhile, count for nobody."""
        ended = batch["terminated"]
        opponents = torch.cat([batch["opponent"][ended], batch["early_opponent"].flatten()]).tolist()
        returns = torch.cat([batch["episode_return"][ended], batch["early_return"].flatten()]).tolist()
        for opponent, total in zip(opponents, returns):
            if opponent in self.past:
                self.update_winrate(opponent, (np.sign(total) + 1) / 2)

    def update_winrate(self, opponent, result):
        """One finished game: the learner has won (1), drawn (0.5) or lost (0). Older games count for less and less."""
        decay, (games, wins, played) = self.args.pfsp_decay, self.records[opponent]
        self.records[opponent] = decay * games + 1, decay * wins + result, played + 1

    def after_update(self, weights):
        """Once per update: takes a copy in if it is time, or the learner beats everyone."""
        self.updates += 1
        if self.updates >= self.args.snapshot_interval or self.win_rates().min() > self.args.snapshot_win_rate:
            self.update_agent(weights)

    def update_agent(self, weights):
        """Adds a copy; a full league evicts one for it."""
        if len(self.past) == self.args.league_size:
            easiest = self.win_rates()[1:].argmax() if self.args.opponents == "pfsp" else 0
            evicted = [*self.past][1 + easiest]
            del self.past[evicted], self.records[evicted]
        prior = self.args.pfsp_prior_games
        self.past[self.next_id], self.records[self.next_id] = np.array(weights), (prior, prior / 2, 0)
        self.next_id, self.updates = self.next_id + 1, 0  # updates since the newest copy joined

    def win_rates(self):
        """The learner's win rate against each of the past: float64 (n,)."""
        return np.array([wins / games if games else 0.5 for games, wins, _ in self.records.values()])

    def distribution(self):
        """Probability of each of the past where it is not NEWEST: float64 (n,). Weightings without mass: uniform."""
        uniform = np.full(len(self.past), 1 / len(self.past))
        if self.args.opponents != "pfsp":
            return uniform
        mass = self.WEIGHTINGS[self.args.pfsp_weighting](self.win_rates())
        if mass.max() < 1e-10:
            mass = uniform
        mass = (mass / mass.max()) ** (self.args.pfsp_power if self.args.pfsp_weighting == "hard" else 1)
        return (1 - self.args.pfsp_uniform) * (mass / mass.sum()) + self.args.pfsp_uniform / len(mass)

    def metrics(self):
        p, x = self.distribution(), self.win_rates()
        effective = np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum())  # the number of equally likely ones
        row = {"opponents": len(p), "newest_opponent": self.next_id - 1, "effective_opponents": effective,
               "games": sum(played for *_, played in self.records.values()), "win_rate_mean": x.mean(),
               "win_rate_min": x.min()}  # fmt: skip
        return {f"curriculum/{name}": value for name, value in row.items()}

    def state_dict(self):
        return {"rngs": [rng.bit_generator.state for rng in self.rngs], "next_id": self.next_id,
                "ids": [*self.past], "agents": [*self.past.values()], "updates": self.updates,
                "records": np.array([*self.records.values()], float)}  # fmt: skip

    def load_state_dict(self, state):
        for rng, saved in zip(self.rngs, state["rngs"]):
            rng.bit_generator.state = saved
        self.past = {i: agent.numpy().copy() for i, agent in zip(state["ids"], state["agents"])}
        self.records = dict(zip(state["ids"], state["records"].tolist()))
        self.next_id, self.updates = state["next_id"], state["updates"]


# ---- 3. Games --------------------------------------------------------------------------------------------------------


# Copied from algos/ppo.py:RunError
class RunError(SystemExit):
    """Ends the program with one line on stderr and exit code 1."""

    def __init__(self, message):
        super().__init__(f"error: {message}")


class Games:
    """B games of one two-player zero-sum kind, side by side. Players are 0 and 1; chance moves inside.

    reset(seeds): all start anew; seeds: a SeedSequence per game, for its chance. player (B,) int8: whose turn it is.
    observe() -> obs (B, *obs_shape) float32 as the player to move sees it, legal (B, num_actions) bool.
    step(actions (B,)) -> rewards (B, 2) float32, each row of sum 0; ended (B,) bool. A game that ended has begun anew.
    Both take the numbers (n,) of the games that they are about; the others stand still. No game is ever cut off.
    openings (B,), where most_openings allows them: how many random moves each game from now on begins with.
    get_state(), set_state(state): to go on from exactly there.
    """

    saved = ("player",)  # the attributes that say where the games are
    most_openings = 0

    def reset(self, seeds):
        self.rngs = [np.random.default_rng(seed) for _, seed in zip(range(self.num_games), seeds, strict=True)]
        self.player = np.zeros(self.num_games, np.int8)
        self.start(np.arange(self.num_games))

    def checked(self, actions, legal, games):
        """The arrays actions, games (all for None); RuntimeError that names the first action that is not legal."""
        games, actions = np.arange(self.num_games) if games is None else games, np.asarray(actions)
        wrong = ~(legal & (actions[:, None] == np.arange(self.num_actions))).any(1)
        if wrong.any():
            i = wrong.argmax()
            found = f"took action {actions[i]}, legal are {np.flatnonzero(legal[i]).tolist()}"
            raise RuntimeError(f"{self.name}, game {games[i]}: player {self.player[games[i]]} {found}")
        return actions, games

    def close(self):
        """Nothing is held beyond memory."""

    def get_state(self):
        state = {name: getattr(self, name).copy() for name in self.saved}
        return state | {"rngs": [rng.bit_generator.state for rng in self.rngs]}

    def set_state(self, state):
        self.reset([0] * self.num_games)
        for rng, saved in zip(self.rngs, state["rngs"], strict=True):
            rng.bit_generator.state = saved
        for name in self.saved:
            getattr(self, name)[:] = np.asarray(state[name])


class LineGames(Games):
    """Connect Four (an action is a column) and tic-tac-toe (a cell, row by row): obs (2, rows, columns), own pieces
    first. A line of own pieces wins.

    Boards are in bits: cell (row from the top, column) is bit column * (rows + 1) + rows - 1 - row. The bit above each
    column stays 0, so that no line runs over to the next.
    """

    GAMES = {"connect_four": (6, 7, 4), "tic_tac_toe": (3, 3, 3)}  # rows, columns, length of a line
    saved = "player", "openings", "boards"

    def __init__(self, name, num_games):
        self.name, self.num_games, (rows, columns, self.length) = name, num_games, self.GAMES[name]
        bits = [[1 << column * (rows + 1) + rows - 1 - row for column in range(columns)] for row in range(rows)]
        self.bits, self.full = np.array(bits), sum(map(sum, bits))
        # An action adds (occupied + lowest) & cells: the carry finds the free cell; 0 if there is none.
        if name == "connect_four":
            self.lowest, self.cells = self.bits[-1], self.bits.sum(0)
        else:
            self.lowest = self.cells = self.bits.reshape(-1)
        self.steps = np.array([[1], [rows], [rows + 1], [rows + 2]])  # to the next cell of a line
        self.obs_shape, self.num_actions = (2, rows, columns), len(self.cells)
        self.most_openings = 2 * (self.length - 1)  # nobody has a line's number of pieces yet
        self.boards, self.openings = np.zeros((num_games, 2), np.int64), np.zeros(num_games, np.int64)

    def moves(self, boards):
        """Own and other pieces (..., 2) -> the bit that each action adds, 0 if it is illegal: (..., num_actions)."""
        return ((boards[..., 0] | boards[..., 1])[..., None] + self.lowest) & self.cells

    def won(self, pieces):
        """Whether there is a line among a player's pieces: (B,) -> bool (B,)."""
        pairs = pieces & pieces >> self.steps
        return (pairs & pairs >> (self.length - 2) * self.steps).any(0)

    def planes(self, boards):
        return (boards[..., None, None] & self.bits != 0).astype(np.float32)

    def start(self, games):
        self.boards[games], self.player[games] = 0, self.openings[games] % 2
        for i in games[self.openings[games] != 0]:
            for _ in range(self.openings[i]):
                moves = self.moves(self.boards[i])
                self.boards[i] = self.boards[i, 1], self.boards[i, 0] + self.rngs[i].choice(moves[moves != 0])

    def observe(self, games=slice(None)):
        boards = self.boards[games]
        return self.planes(boards), self.moves(boards) != 0

    def step(self, actions, games=None):
        boards = self.boards if games is None else self.boards[games]
        moves = self.moves(boards)
        actions, games = self.checked(actions, moves != 0, games)
        own, other = boards[:, 0] | moves[np.arange(len(games)), actions], boards[:, 1]
        won = self.won(own)
        ended, gain = won | (own | other == self.full), np.where(self.player[games] == 0, won, -1.0 * won)
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


def make_games(name, num_games):
    """`Games` by name. ValueError if there is none."""
    families = {game: family for family in (LineGames, MatrixGames) for game in family.GAMES}
    if name not in families:
        (nearest,) = difflib.get_close_matches(name, families, n=1, cutoff=0)
        found = f"there is no game {name}. Nearest: {nearest}, of {', '.join(families)}"
        raise ValueError(f"{found}. Those of OpenSpiel are in appo_pfsp_openspiel.py")
    return families[name](name, num_games)


@cache
def game_spec(name):
    """obs_shape, num_actions."""
    games = make_games(name, 1)
    return games.obs_shape, games.num_actions


# ---- 4. Mathematics and agent ----------------------------------------------------------------------------------------


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


# Copied from algos/ppo.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value of one player, who sees the game from the own side.

    forward(obs (..., *obs_shape), legal (..., A)) -> logits (..., A), -1e9 where not legal; values (...).
    """

    def __init__(self, obs_shape, num_actions, args):
        super().__init__()
        layers = [nn.Flatten()]
        for size in (math.prod(obs_shape), args.hidden_size):
            layers += [layer_init(nn.Linear(size, args.hidden_size)), nn.ReLU()]
        self.torso = nn.Sequential(*layers)
        self.policy = layer_init(nn.Linear(args.hidden_size, num_actions), 0.01)
        self.value = layer_init(nn.Linear(args.hidden_size, 1), 1.0)

    def forward(self, obs, legal):
        features = self.torso(obs.flatten(0, legal.dim() - 2)).unflatten(0, legal.shape[:-1])
        return self.policy(features).masked_fill(~legal, -1e9), self.value(features).squeeze(-1)


# Copied from algos/impala_popart.py:flat_weights
def flat_weights(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu().numpy()


def acting_agent(args):
    """An agent on the CPU, and the flat vector that its parameters are views of: other weights are one copy."""
    with torch.device("meta"):  # no weights yet, and no draws for them
        agent = Agent(*game_spec(args.env_id), args)
    weights = np.zeros(sum(parameter.numel() for parameter in agent.parameters()), np.float32)
    nn.utils.vector_to_parameters(torch.from_numpy(weights), agent.to_empty(device="cpu").parameters())
    return agent, weights


# Copied from algos/impala_popart.py:sample
def sample(logits, generator):
    """Actions (B,) by logits (B, A); without a generator the likeliest."""
    require_finite(policy_logits=logits)
    if generator is None:
        return logits.argmax(-1)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


# ---- 5. Actors -------------------------------------------------------------------------------------------------------


# Copied from algos/impala_popart.py:available_memory
def available_memory():
    """Bytes that this process may still take, by what the machine has free and by the limit of its control group."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # no such group; its limit is the word max
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


# Copied from algos/impala_popart.py:SharedMemory
class SharedMemory(dict):
    """Arrays {name: (count, *shape)} by a layout {name: (shape, dtype)}, which other processes get as an argument of
    theirs. A file without a name: nothing stays in /dev/shm, however they end. RunError if the machine has less."""

    def __init__(self, layout, count, copied_fd=None):
        sizes = [-(-count * math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64 for shape, dtype in layout.values()]
        if copied_fd is None and sum(sizes) > (free := available_memory()):
            parts = ", ".join(f"{name} {size / 2**20:.0f}" for name, size in zip(layout, sizes))
            found = f"{sum(sizes) / 2**20:.0f} MiB of shared memory ({parts}), and {free / 2**20:.0f} MiB are available"
            raise RunError(f"{count} unrolls take {found}: ask for fewer --num-actors, --envs-per-actor or --num-steps")
        self.layout, self.count = layout, count
        self.fd = copied_fd.detach() if copied_fd else os.memfd_create("unrolls")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, sum(sizes))
        memory, at = mmap.mmap(self.fd, 0), 0
        for size, (name, (shape, dtype)) in zip(sizes, layout.items()):
            self[name] = np.frombuffer(memory, dtype, count * math.prod(shape), at).reshape(count, *shape)
            at += size

    def __reduce__(self):
        return SharedMemory, (self.layout, self.count, DupFd(self.fd))

    def record(self, i):
        return {name: array[i, ...] for name, array in self.items()}


# Copied from algos/impala_popart.py:Board
class Board:
    """The newest weights of the policy with their version, in shared memory, in two places by turns: a writer never
    waits, a reader copies again when newer ones came meanwhile, and a killed process leaves no lock behind."""

    def __init__(self, size):
        self.memory = SharedMemory({"version": ((), np.int64), "weights": ((2, size), np.float32)}, 1)

    @property
    def version(self):
        return int(self.memory["version"][0])

    def write(self, weights, version):
        self.fence()
        self.memory["weights"][0, version % 2] = weights
        self.fence()
        self.memory["version"][0] = version

    def read(self, out):
        """Copies the weights to `out`; returns their version."""
        version = None
        while version != self.version:
            version = self.version
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


class Actor:
    """E games, in each of which the learner has one seat, random and fixed for the game, and an opponent the other. A
    step is the learner's move and all that follows until it is the learner's turn again, everywhere. `fill`
    continues where the last ended.

    An unroll has T + 1 rows of E games at the learner's turn: obs[t], legal[t], and for t < T the action, its logprob,
    the opponent that it was played against, and what came of it: reward, terminated, and there the game's return and
    length. Games begin by the unroll's tasks in turn. Games that are over before the learner's first move are known to
    the league alone: early_opponent (NEWEST: none), early_return, in no order.
    """

    def __init__(self, args, seed, version, index):
        self.args, E = args, args.envs_per_actor
        # By the version too, so that where the games of before a resume are lost, others come.
        seed = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, version, index))
        *seeds, action_seed, seat_seed = seed.spawn(E + 2)
        self.envs = make_games(args.env_id, E)
        self.envs.reset(seeds)
        self.generator = torch.Generator().manual_seed(int(action_seed.generate_state(1)[0]))
        self.rng = np.random.default_rng(seat_seed)
        self.agent, self.weights = acting_agent(args)
        self.players = {NEWEST: np.zeros_like(self.weights)}  # the weights of who plays
        self.seat, self.opponent, self.next_opponent, self.length = np.zeros((4, E), np.int64)
        self.total, self.row = np.zeros(E), None  # of each game the learner's rewards; obs and legal at its turn
        self.early = []  # opponent and return of games that are over and not told yet

    @staticmethod
    def layout(args):
        """Shapes and types of an unroll's arrays."""
        T, E, (obs_shape, num_actions) = args.num_steps, args.envs_per_actor, game_spec(args.env_id)
        steps = {"logprob": np.float32, "reward": np.float32, "terminated": bool}
        steps |= dict.fromkeys(("action", "opponent", "early_opponent", "episode_length"), np.int64)
        steps |= dict.fromkeys(("episode_return", "early_return"), np.float64)
        k, size = args.league_opponents, len(acting_agent(args)[1])
        tasks = [("openings", np.int64, k), ("opponents", np.int64, k), ("weights", np.float32, (k, size))]
        layout = {"obs": ((T + 1, E, *obs_shape), np.float32), "legal": ((T + 1, E, num_actions), bool)}
        layout |= {name: ((T, E), dtype) for name, dtype in steps.items()} | {"tasks": ((), np.dtype(tasks))}
        return layout | {"version": ((), np.int64), "lag_sent": ((), np.int64), "wait_s": ((), np.float64)}

    @torch.inference_mode()
    def fill(self, slot, board):
        """An unroll with the newest weights, against those who play now and the opponents in its tasks."""
        slot["version"][...] = board.read(self.players[NEWEST])
        playing, tasks = {NEWEST, *self.opponent.tolist()} if self.row else {NEWEST}, slot["tasks"]
        drawn = zip(tasks["opponents"].tolist(), tasks["weights"].copy())
        self.players = dict(drawn) | {player: self.players[player] for player in playing}
        self.tasks, self.dealt = np.stack([tasks["openings"], tasks["opponents"]]), 0
        self.slot, self.t, everywhere = slot, 0, np.arange(len(self.seat))
        self.deal(everywhere)
        if self.row is None:
            self.envs.start(everywhere)  # anew, by the openings of the first tasks
            self.begin(everywhere)
            self.reply()
        for t in range(self.args.num_steps):
            self.t, (slot["obs"][t], slot["legal"][t]), slot["opponent"][t] = t, self.row, self.opponent
            action, logits = self.act(NEWEST, *self.row)
            slot["action"][t] = action
            slot["logprob"][t] = logits.log_softmax(-1).gather(-1, action[:, None])[:, 0]
            slot["reward"][t], slot["terminated"][t] = 0, False
            self.length += 1
            self.move(everywhere, action.numpy())
            self.reply()
        slot["obs"][-1], slot["legal"][-1] = self.row
        slot["early_opponent"][:] = NEWEST
        for place, (opponent, total) in zip(np.ndindex(slot["early_opponent"].shape), self.early):
            slot["early_opponent"][place], slot["early_return"][place] = opponent, total
        self.early = self.early[slot["early_opponent"].size :]  # the next unroll tells the rest
        slot["lag_sent"][...] = board.version - slot["version"]

    def deal(self, games):
        """The next of the tasks for what follows in `games`: every opponent gets as many games, however long they are
        (by place, those that lose fast would get more, and the mixture would be another than the league's)."""
        openings, self.next_opponent[games] = self.tasks[:, (self.dealt + np.arange(len(games))) % self.tasks.shape[1]]
        self.dealt += len(games)
        if self.args.openings:
            self.envs.openings[games] = openings

    def act(self, player, obs, legal):
        self.weights[:] = self.players[player]
        logits, _ = self.agent(torch.from_numpy(obs), torch.from_numpy(legal))
        return sample(logits, self.generator), logits

    def reply(self):
        """Opponents move, each in all its games at once, until it is the learner's turn everywhere."""
        while len(waiting := np.flatnonzero(self.envs.player != self.seat)):
            (obs, legal), opponents = self.envs.observe(waiting), self.opponent[waiting]
            actions = np.zeros(len(waiting), np.int64)
            for opponent in np.unique(opponents):
                rows = opponents == opponent
                actions[rows] = self.act(int(opponent), obs[rows], legal[rows])[0]
            self.move(waiting, actions)
        self.row = self.envs.observe()

    def move(self, games, actions):
        rewards, ended = self.envs.step(actions, games)
        rewards = rewards[np.arange(len(games)), self.seat[games]]
        self.total[games] += rewards
        own = self.length[games] > 0  # what came before the learner's first move came of none, and is not told
        self.slot["reward"][self.t, games] += np.where(own, rewards, 0)
        known, early = games[ended & own], games[ended & ~own]
        self.slot["terminated"][self.t, known], self.slot["episode_return"][self.t, known] = True, self.total[known]
        self.slot["episode_length"][self.t, known] = self.length[known]
        self.early += zip(self.opponent[early].tolist(), self.total[early].tolist())
        self.begin(games[ended])

    def begin(self, games):
        self.seat[games], self.opponent[games] = self.rng.integers(2, size=len(games)), self.next_opponent[games]
        self.total[games], self.length[games] = 0, 0
        self.deal(games)

    PLACES = "seat", "opponent", "total", "length"

    def state_dict(self):
        playing = {*self.opponent.tolist()} - {NEWEST} if self.row else ()  # perhaps evicted meanwhile
        return {"envs": self.envs.get_state(), "generator": self.generator.get_state(), "early": self.early,
                "rng": self.rng.bit_generator.state, "row": self.row, "players": {i: self.players[i] for i in playing},
                "places": {name: getattr(self, name) for name in self.PLACES}}  # fmt: skip

    def load_state_dict(self, state):
        self.envs.set_state(state["envs"])
        self.generator.set_state(state["generator"])
        self.rng.bit_generator.state, self.early = state["rng"], state["early"]
        self.row = state["row"] and [tensor.numpy().copy() for tensor in state["row"]]
        self.players |= {player: weights.numpy().copy() for player, weights in state["players"].items()}
        for name, tensor in state["places"].items():
            getattr(self, name)[:] = tensor.numpy()


# Copied from algos/impala_popart.py:actor_process
def actor_process(make_actor, index, slots, board, pipe):
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
        pipe.send(error.code.removeprefix("error: ") if isinstance(error, RunError) else traceback.format_exc())


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
    AHEAD = 100  # slots that an actor has at most: so many numbers go into its pipe without a reader

    def __init__(self, make_actor, layout, num_actors, num_slots, batch_slots, max_lag):
        self.make_actor, self.layout, self.num_actors, self.num_slots = make_actor, layout, num_actors, num_slots
        self.batch_slots, self.max_lag = batch_slots, max_lag
        self.actor, self.actor_state, self.processes = None, None, []

    def start(self, weights, version):
        """Everything acts with `weights` from now on, the version `version`."""
        self.slots, self.board, self.version = SharedMemory(self.layout, self.num_slots), Board(len(weights)), version
        self.board.write(weights, version)
        self.free, self.issued, self.full, self.used = [*range(self.num_slots)], {}, [], []
        self.held, self.since = np.zeros((2, self.num_actors))  # by actor: its slots, when it last did what it has to
        self.clock, self.looked, self.wait_s = 0.0, time.monotonic(), 0.0
        if not self.num_actors:
            self.actor = self.make_actor(version, 0)
            if self.actor_state is not None:
                self.actor.load_state_dict(self.actor_state)
            return
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch's threads in any state
        # Actors inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
        try:
            for index in range(self.num_actors):
                pipe, remote = context.Pipe()
                args = partial(self.make_actor, version), index, self.slots, self.board, remote
                self.processes.append((context.Process(target=actor_process, args=args), pipe))
                self.processes[-1][0].start()
                remote.close()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.hand_out()

    def hand_out(self):
        """Slots that are free, those of the last batch with them, go to the actors that have the fewest."""
        self.free, self.used = self.free + self.used, []
        while self.processes and self.free and self.held.min() < self.AHEAD:
            index, number = self.held.argmin(), self.free.pop(0)
            self.held[index] += 1
            self.issued[number] = self.version
            with suppress(OSError):  # the actor died: `poll` will say so
                self.processes[index][1].send(number)

    def batch(self, check=lambda: None):
        """Tensors {name: (T or T + 1, environments of batch_slots slots, ...)}. Calls check() while it waits."""
        self.wait_s = 0.0
        self.poll(0)
        while not self.ready():
            check()
            self.poll(1)
        self.used, self.full = self.full[: self.batch_slots], self.full[self.batch_slots :]
        arrays = {name: np.concatenate([self.slots[name][number] for number in self.used], axis=1)
                  for name, (shape, _) in self.layout.items() if shape}  # fmt: skip
        self.versions = self.slots["version"][self.used].tolist()
        lags = [self.version - version for version in self.versions]
        self.metrics = {"async/policy_lag_mean": np.mean(lags), "async/policy_lag_max": max(lags),
                        "async/policy_lag_sent": self.slots["lag_sent"][self.used].mean(),
                        "async/queue_depth": len(self.full), "async/learner_wait_s": self.wait_s,
                        "async/actor_wait_s": self.slots["wait_s"][self.used].sum(), "async/dropped": 0}  # fmt: skip
        if self.max_lag is None:
            self.hand_out()
        return {name: torch.from_numpy(array) for name, array in arrays.items()}

    def ready(self):
        """Whether the oldest full slots make a batch after which no other slot must become too old."""
        self.full.sort(key=self.issued.get)
        if len(self.full) < self.batch_slots or self.max_lag is None:
            return len(self.full) >= self.batch_slots
        left = sorted(self.issued[i] for i in {*self.issued} - {*self.full[: self.batch_slots]} - {*self.free})
        return all(self.version + 1 + i // self.batch_slots - issued <= self.max_lag for i, issued in enumerate(left))

    def poll(self, seconds):
        """Takes in what is full, or else waits so long for a slot. RunError if an actor has ended or hangs."""
        if self.actor is not None:
            self.full.append(self.free.pop(0))
            self.issued[self.full[-1]] = self.version
            return self.actor.fill(self.slots.record(self.full[-1]), self.board)
        start = time.perf_counter()
        ready = connection.wait([pipe for _, pipe in self.processes], seconds)
        self.wait_s += time.perf_counter() - start
        now = time.monotonic()
        self.clock, self.looked = self.clock + min(now - self.looked, 60), now  # a Ctrl-Z that stops all is no time-out
        self.since[self.held == 0] = self.clock
        for index, (process, pipe) in enumerate(self.processes):
            name = f"actor {index} (process {process.pid})"
            while pipe in ready and pipe.poll():
                try:
                    message = pipe.recv()
                except (EOFError, OSError) as error:
                    process.join(2)
                    raise RunError(f"{name} died with exit code {process.exitcode}") from error
                if isinstance(message, str):
                    raise RunError(f"actor {index} failed: {message}")
                self.full.append(message)
                self.held[index], self.since[index] = self.held[index] - 1, self.clock
            if self.clock - self.since[index] > self.TIMEOUT_S:
                raise RunError(f"{name} hangs: no unroll of it for {self.TIMEOUT_S} s")
        self.hand_out()

    def publish(self, weights):
        """After an update."""
        self.version += 1
        self.board.write(weights, self.version)
        self.hand_out()

    def state_dict(self):
        """Of num_actors 0. The episodes of processes are not kept: a resumed run starts new ones."""
        return {"actor": self.actor and self.actor.state_dict()}

    def load_state_dict(self, state):
        self.actor_state = state["actor"]

    def close(self):
        for end in ("kill", "join"):
            for process in (process for process, _ in self.processes if process.pid):
                getattr(process, end)()
        if self.actor is not None:
            self.actor.envs.close()


class LeagueActors(Actors):
    """Actors whose slots come with the tasks of the unroll, drawn when a slot is handed out: older draws would favour
    opponents that have become easy, or are gone."""

    def __init__(self, league, *options):
        self.league = league
        super().__init__(*options)

    def poll(self, seconds):
        if self.actor is not None:
            self.league.deal(self.slots["tasks"][self.free[0]])
        super().poll(seconds)

    def hand_out(self):
        for number in self.free + self.used if self.processes else ():
            self.league.deal(self.slots["tasks"][number])
        super().hand_out()


# ---- 6. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


class Stats:
    """What came since the last row of metrics.jsonl: games that ended, and updates."""

    def __init__(self):
        self.total, self.finished, self.updates = 0, [], []  # finished: return and length of a game

    def add(self, batch):
        """The games that ended in the unrolls' arrays (T, B)."""
        ended = batch["terminated"]
        self.finished += zip(batch["episode_return"][ended].tolist(), batch["episode_length"][ended].tolist())
        self.total += int(ended.sum())

    def pop(self):
        """Means over the games, and over the updates; of updates' numbers named ..._max the maxima."""
        returns, length = np.mean(self.finished, axis=0) if self.finished else (math.nan, math.nan)
        row = {"charts/episodic_return": returns, "charts/episodic_length": length, "charts/episodes": self.total}
        for name in self.updates[0]:
            row[name] = (max if name.endswith("_max") else np.mean)([update[name] for update in self.updates])
        self.finished, self.updates = [], []
        return row

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


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
def as_policies(snapshots, args, greedy=False):
    """Flat weights -> functions of obs (n, ...), legal (n, A) to float64 probabilities (n, A). They share a network."""
    agent, flat = acting_agent(args)

    @torch.inference_mode()
    def policy(weights, obs, legal):
        flat[:] = weights
        logits = agent(torch.from_numpy(obs), torch.from_numpy(legal))[0].double()
        return (logits == logits.amax(1, keepdim=True)).double().numpy() if greedy else logits.softmax(1).numpy()

    return [partial(policy, weights) for weights in snapshots]


def evaluate(weights, args, check=lambda: None):
    """Plays args.eval_episodes games side by side against random play, every other one as player 0, seeded by
    args.eval_seed alone; check() before each move. Returns a row per game: the seat, the return, its moves."""
    everywhere, (policy,) = np.arange(args.eval_episodes), as_policies([weights], args, args.eval_greedy)
    *seeds, moves = np.random.SeedSequence(args.eval_seed).spawn(len(everywhere) + 1)
    games, rng, seat = make_games(args.env_id, len(everywhere)), np.random.default_rng(moves), everywhere % 2
    games.reset(seeds)
    returns, lengths, playing = np.zeros(len(seat)), np.zeros(len(seat), int), everywhere
    while len(playing):
        check()
        (obs, legal), own = games.observe(playing), games.player[playing] == seat[playing]
        probabilities = legal / legal.sum(1, keepdims=True)
        if own.any():
            probabilities[own] = policy(obs[own], legal[own])
        cumulative = probabilities.cumsum(1)
        actions = (cumulative > rng.random((len(playing), 1)) * cumulative[:, -1:]).argmax(1)
        rewards, ended = games.step(actions, playing)
        returns[playing] += rewards[np.arange(len(playing)), seat[playing]]
        lengths[playing] += 1
        playing = playing[~ended]
    return [{"split": "eval", "level": "random", "seat": i % 2, "return": total, "length": length}
            for i, (total, length) in enumerate(zip(returns.tolist(), lengths.tolist()))]  # fmt: skip


def nash_conv(name, policies):
    """What both players together could gain by a best response to the average of `policies` in a matrix game: sum over
    players i of max_pi u_i(pi, average_-i) - u_i(average); 0 at a Nash equilibrium (Lanctot et al. 2017)."""
    matrix, turns = np.array(MatrixGames.GAMES[name], float), np.eye(2, dtype=np.float32)
    p, q = sum(1 / len(policies) * policy(turns, np.ones((2, 3), bool)) for policy in policies)
    return float((matrix @ q).max() - (p @ matrix).min())


def measures(rows, weights, past, args):
    """Of evaluation rows the score (win 1, draw 1/2) and the share of losses against random play. NashConv of the
    learner and of the league's average, every one of the past alike, of a matrix game."""
    signs = np.sign([row["return"] for row in rows])
    found = {"eval/random/score": np.mean((signs + 1) / 2), "eval/random/losses": np.mean(signs < 0)}
    if args.env_id not in MatrixGames.GAMES:
        return found
    newest, *league = as_policies([weights, *past], args)
    return found | {"eval/nash_conv": nash_conv(args.env_id, [newest]),
                    "eval/nash_conv_average": nash_conv(args.env_id, league)}  # fmt: skip


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
        # region: appo
        agent = Agent(*game_spec(args.env_id), args).to(device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        stats, league = Stats(), League(args, flat_weights(agent), random.curriculum)
        actors = run.enter_context(closing(LeagueActors(
            league, partial(Actor, args, random.envs), Actor.layout(args), args.num_actors, args.num_slots,
            args.batch_rollouts // args.envs_per_actor, args.max_policy_lag,
        )))  # fmt: skip
        first_update, global_step, row = run.restore(agent=agent, optimizer=optimizer, random=random, league=league,
                                                     actors=actors, stats=stats)  # fmt: skip
        if args.eval_only:
            rows = evaluate(flat_weights(agent), args, run.check_signals)
            means = run.log_eval(global_step, rows) | measures(rows, flat_weights(agent), league.past.values(), args)
            print(json.dumps(means))
            return means
        actors.start(flat_weights(agent), first_update)

        for update in range(first_update, args.num_updates):
            run.checkpoint(update, global_step, row)
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / args.num_updates)

            # Collect: the oldest full unrolls of the actors, side by side.
            begun = time.perf_counter()
            batch = actors.batch(run.check_signals)
            stats.add(batch)
            global_step += args.batch_size
            collected = time.perf_counter()

            # ---- APPO against a league: this block is the method (with League, Actor.fill and appo_targets) ----
            league.record(batch)
            b, losses = {name: tensor.to(device) for name, tensor in batch.items()}, []
            with torch.no_grad():
                logits, values = agent(b["obs"], b["legal"])
                logprob = logits[:-1].log_softmax(-1).gather(-1, b["action"][..., None]).squeeze(-1)
                targets, advantages = appo_targets(
                    logprob, b["logprob"], b["reward"], values[:-1], values[-1], b["terminated"], args.gamma,
                    args.rho_bar, args.c_bar, args.appo_parity,
                )  # fmt: skip
            epochs = (random.minibatches.permutation(args.batch_rollouts) for _ in range(args.update_epochs))
            for columns in (part for epoch in epochs for part in np.array_split(epoch, args.num_minibatches)):
                m = {name: tensor[:, torch.from_numpy(columns)] for name, tensor in b.items()}
                logits, value = agent(m["obs"][:-1], m["legal"][:-1])
                log_pi = logits.log_softmax(-1)
                loss, parts_of_loss = ppo_loss(
                    log_pi.gather(-1, m["action"][..., None]).squeeze(-1), -(log_pi.exp() * log_pi).sum(-1), value,
                    m["logprob"], None, advantages[:, columns], targets[:, columns], args.clip_coef, False,
                    args.ent_coef, args.vf_coef,
                )  # fmt: skip
                optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                if not torch.isfinite(grad_norm + loss):
                    require_finite(logits=logits, value=value, **parts_of_loss, grad_norm=grad_norm)
                optimizer.step()
                losses.append(torch.stack([*parts_of_loss.values(), grad_norm]).detach())
            league.after_update(flat_weights(agent))
            actors.publish(flat_weights(agent))
            # ---- end of the method ----
            require_finite(**dict(agent.named_parameters()))

            # Log and evaluate.
            last, names = update + 1 == args.num_updates, [f"losses/{name}" for name in (*parts_of_loss, "grad_norm")]
            stats.updates.append(dict(zip(names, torch.stack(losses).mean(0).tolist())) | actors.metrics | {
                "curriculum/newest_share": (batch["opponent"] == NEWEST).float().mean().item(),
                "perf/collect_s": collected - begun, "perf/update_s": time.perf_counter() - collected,
            })  # fmt: skip
            row = {}
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                begun = time.perf_counter()
                rows = evaluate(flat_weights(agent), args, run.check_signals)
                row = run.log_eval(global_step, rows) | measures(rows, flat_weights(agent), league.past.values(), args)
                row["perf/eval_s"] = time.perf_counter() - begun
            if last or row or (update + 1) % args.log_interval == 0:
                explained = explained_variance(values[:-1].cpu().numpy(), targets.cpu().numpy())
                run.log(global_step, row | stats.pop() | league.metrics() | {
                    "losses/explained_variance": explained, "charts/update": update + 1, "perf/dead_steps": 0,
                    "charts/learning_rate": optimizer.param_groups[0]["lr"],
                })  # fmt: skip
        # endregion: appo

        # Copied from algos/ppo.py:region(finish)
        run.checkpoint(args.num_updates, global_step, row, last=True)
        return run.finish(global_step, row)
        # End of copy


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
