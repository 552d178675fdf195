"""Asynchronous population-based training (PBT) of PPO: each member trains on, copies a better one, varies its settings.

Papers: Jaderberg et al. 2017, arXiv:1711.09846 (PBT), 2019, arXiv:1807.01281 (FTW: matches by Elo, internal rewards);
Schulman et al. 2017, arXiv:1707.06347 (PPO); Han and Sung 2019, arXiv:1905.02363 (DISC: GAE-V).

  Train:     python algos/pbt_ppo.py --env-id VectorPong --total-timesteps 8000000
  Controls:  the same with --exploit none (random search), or with --genes and no names (one fixed setting)
  Self-play: python algos/pbt_ppo.py --self-play --exploit elo --genes reward-hit=0:0.2:linear ent-coef=1e-3:1e-1:log
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: a member alone, no genes: +10 of 20 against the scripted player within 460,000 frames on seeds 1 to 3.
Differs from the papers: Adam's moments travel with the weights; linear genes move by a share of their range, off 0 too.
"""

import ast
import ctypes
import fcntl
import hashlib
import importlib
import io
import json
import math
import multiprocessing
import os
import queue
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import connection, resource_tracker
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Literal, NamedTuple, get_args

import gymnasium as gym
import numpy as np
import torch
import tyro
from scipy.stats import ttest_ind
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
    torch_threads: int = 1  # CPU threads of each process; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 1  # legs between checkpoints of the whole population
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 1  # legs between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # environment
    env_id: str = "VectorPong"  # VectorPong, ImagePong, or a Gymnasium id, also module:id
    num_envs: int = 64  # environments of a member, side by side
    reward_win: float = 1.0  # Pong: reward of a point won
    reward_lose: float = 1.0  # Pong: cost of a point lost
    reward_hit: float = 0.0  # Pong: reward when the own bat meets the ball
    reward_move: float = 0.0  # Pong: reward of a frame in which the own bat moves
    reward_scale: float = 1.0  # PPO sees rewards times this (Pendulum's are large: 0.1)

    # population
    population: int = 8  # members
    leg_steps: int = 65_536  # environment steps that a member trains between two decisions: a leg
    # what varies, as NAME=LOW:HIGH:SCALE (log, linear or int) of an argument here; none: a fixed setting
    genes: tuple[str, ...] = ("learning-rate=1e-4:1e-1:log", "ent-coef=1e-4:1e-1:log", "clip-coef=0.05:0.4:linear")
    # whom a member copies: one of the best fifth when in the worst; one better by a t-test; by Elo (self-play); nobody
    exploit: Literal["truncation", "ttest", "elo", "none"] = "truncation"
    explore: bool = True  # vary the genes that were copied (log: times 0.8 or 1.2)
    barrier: bool = False  # synchronous control: all members return before any goes on. The same for all num_workers
    num_workers: int = 2  # processes that do legs; 0: this one, and the run repeats and resumes to the bit
    backend: Literal["local", "ray"] = "local"  # ray: workers are actors in the cluster of RAY_ADDRESS, or a new one
    leg_timeout: float = 3600.0  # seconds after which a leg hangs: its worker is replaced and the leg begins again

    # self-play
    self_play: bool = False  # both seats of Pong are members, matched by Elo, which is the fitness
    self_play_opponents: int = 2  # opponents of a leg; its games are shared out among them
    elo_k: float = 4.0  # points that a game moves at most

    # algorithm
    total_timesteps: int = 8_000_000  # environment steps of all members; rounded up to whole legs
    learning_rate: float = 2e-3  # Adam step size
    num_steps: int = 64  # steps per environment and update
    gamma: float = 0.97  # discount
    estimator: Literal["gae", "gae_v"] = "gae"  # of advantages; gae_v: DISC's, off-policy in the later epochs
    gae_lambda: float = 0.9  # trace decay
    num_minibatches: int = 8  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    ent_coef: float = 0.001  # entropy bonus
    vf_coef: float = 0.5  # value loss weight
    max_grad_norm: float = 0.5  # gradient norm limit

    # evaluation
    eval_episodes: int = 20  # episodes at the end of a leg, with the same seeds for everyone: the fitness
    final_eval_episodes: int = 100  # held-out episodes of the best member, against Pong's scripted player
    eval_interval: int = 16  # legs between held-out evaluations; 0: only at the end
    eval_max_steps: int = 27_000  # evaluation episodes still running after so many steps count as they are
    eval_seed: int = 10_000  # seeds the held-out episodes, the same for every run and algorithm
    eval_greedy: bool = True  # evaluate the most likely action (--no-eval-greedy: sample; in self-play legs always)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    obs_shape: tuple = field(init=False)
    num_actions: int = field(init=False)
    continuous: bool = field(init=False)
    num_updates: int = field(init=False)  # legs

    def __post_init__(self):
        check_numbers(self, **LIMITS)
        genes = [parse_gene(text, self) for text in self.genes]
        names = [gene.name for gene in genes]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"--genes: {twice[0].replace('_', '-')} is there twice")
        if self.leg_steps % (batch := self.num_envs * self.num_steps):
            fitting = max(round(self.leg_steps / batch), 1) * batch
            shape = f"num_envs {self.num_envs} x num_steps {self.num_steps}"
            raise ValueError(f"--leg-steps {self.leg_steps} is no multiple of {shape} = {batch}: try {fitting}")
        minibatches = max([self.num_minibatches, *(gene.high for gene in genes if gene.name == "num_minibatches")])
        if minibatches > batch // 2:  # one sample has no deviation to normalise its advantage by
            raise ValueError(f"--num-minibatches {minibatches} of {batch} samples: use {batch // 2} at most")
        if self.self_play and self.env_id not in PONG:
            raise ValueError(f"--self-play with --env-id {self.env_id}: it has one seat; use {' or '.join(PONG)}")
        if self.exploit != "none" and self.self_play != (self.exploit == "elo"):
            raise ValueError(f"--exploit {self.exploit}: elo and none go with --self-play, all others without it")
        self.num_updates = -(-self.total_timesteps // self.leg_steps)
        self.obs_shape, self.num_actions, self.continuous = spaces(self.env_id)


GENES = ("reward_win", "reward_lose", "reward_hit", "reward_move", "reward_scale", "learning_rate", "gamma",
         "gae_lambda", "num_minibatches", "update_epochs", "clip_coef", "ent_coef", "vf_coef",
         "max_grad_norm")  # fmt: skip
LIMITS = dict.fromkeys(("seed", "num_workers", "eval_interval"), (0, math.inf))
LIMITS |= dict.fromkeys(GENES[:4], (-1e6, 1e6)) | dict.fromkeys(("gamma", "gae_lambda"), (0, 1))
LIMITS |= {"population": (2, math.inf), "torch_threads": (0, 1024), "eval_seed": (0, 2**64 - 1)}


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


# ---- 2. The method (with `leg`): exploit, explore, ratings, the order of a population --------------------------------


class Gene(NamedTuple):
    name: str
    low: float
    high: float
    scale: str

    def draw(self, rng):
        """An initial value: uniform, on a log scale uniform in its logarithm."""
        if self.scale == "int":
            return int(rng.integers(self.low, self.high + 1))
        if self.scale == "log":
            return self.clip(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self.clip(rng.uniform(self.low, self.high))

    def clip(self, value):
        return type(self.low)(min(max(value, self.low), self.high))


def parse_gene(text, args):
    """`NAME=LOW:HIGH:SCALE` -> Gene. ValueError for what no argument of `args` can be."""
    if not (match := re.fullmatch(r"([\w-]+)=([^:]+):([^:]+):(log|linear|int)", text)):
        raise ValueError(f"--genes {text}: write NAME=LOW:HIGH:SCALE with SCALE log, linear or int")
    if (name := match[1].replace("-", "_")) not in GENES:
        raise ValueError(f"--genes {text}: there is no gene {match[1]}; use {', '.join(GENES).replace('_', '-')}")
    (kind,) = (entry.type for entry in fields(args) if entry.name == name)
    try:
        gene = Gene(name, kind(match[2]), kind(match[3]), match[4])
    except ValueError:
        gene = Gene(name, 0, 0, "")
    if (gene.scale == "int") != (kind is int) or not gene.scale:
        fitting = "int" if kind is int else "log or linear"
        raise ValueError(
            f"--genes {text}: --{match[1]} is of type {kind.__name__}, its bounds too, its scale {fitting}"
        )
    low, high = LIMITS.get(name, (int(kind is int), math.inf))
    if not (low <= gene.low < gene.high <= high and gene.high < math.inf):
        raise ValueError(f"--genes {text}: it takes LOW below HIGH, both in [{low}, {high}]")
    if gene.scale == "log" and gene.low <= 0:
        raise ValueError(f"--genes {text}: no log scale begins at {gene.low:g}: use a LOW above 0, or linear")
    return gene


def explore(values, genes, rng):
    """Varied copies of {name: value}, inside the bounds: log genes times 0.8 or 1.2, linear ones plus or minus 20 % of
    their range (a multiple of 0 would stay there), integers by 20 %, at least 1."""
    varied = {}
    for gene in genes:
        value, sign = values[gene.name], int(rng.choice((-1, 1)))
        step = {"log": 0.2 * value, "linear": 0.2 * (gene.high - gene.low), "int": max(1, round(0.2 * value))}
        varied[gene.name] = gene.clip(value + sign * step[gene.scale])
    return varied


def exploit(method, slot, fitness, scores, rng, share=0.2, p=0.05, win=0.3):
    """Whom member `slot` copies, or None: fitness (P,), NaN where it is not known or nothing; scores: P lists of the
    last evaluation's returns. NaN never wins and never donates, and who has it copies whomever the rule names.

    truncation: below or at the k-th worst of n, k = ceil(share n), one of the k best, uniformly. ttest: a uniform draw,
    if its mean is higher and Welch's p is small. elo (fitness is Elo): a uniform draw that `slot` beats too seldom.
    """
    fitness = np.asarray(fitness, float)
    known = [other for other in np.flatnonzero(np.isfinite(fitness)) if other != slot]
    if method == "none" or not known:
        return None
    if method == "truncation":
        ranked = sorted([*known, slot] if math.isfinite(fitness[slot]) else known, key=lambda i: fitness[i])
        k = math.ceil(share * len(ranked))
        donor = int(rng.choice(ranked[-k:]))
        better = fitness[slot] <= fitness[ranked[k - 1]] and fitness[donor] > fitness[slot]
    else:
        donor = int(rng.choice(known))
        if method == "ttest":
            better = np.mean(scores[donor]) > np.mean(scores[slot]) and welch(scores[donor], scores[slot]) < p
        else:
            better = elo_expected(fitness[slot], fitness[donor]) < win
    return donor if better or not math.isfinite(fitness[slot]) else None


def welch(a, b):
    """Two-sided p of Welch's t-test for different means (Welch 1947). No variance at all: 0 if they differ, or 1."""
    if min(len(a), len(b)) < 2:
        return 1.0
    if np.var(a) == np.var(b) == 0:
        return float(np.mean(a) == np.mean(b))
    return float(ttest_ind(a, b, equal_var=False).pvalue)


def elo_expected(rating, other):
    """Estimated probability that `rating` beats `other` (Elo 1978)."""
    return 1 / (1 + 10 ** ((other - rating) / 400))


def elo_update(rating, other, result, k):
    """Both ratings after a game; result 1, 1/2 or 0: `rating` won, drew, lost. Their sum stays."""
    change = k * (result - elo_expected(rating, other))
    return rating + change, other - change


def opponents(slot, ratings, number, rng, sigma=0.15):
    """Members to play against, drawn by exp(-(p - 1/2)^2 / (2 sigma^2)) with p the estimated win probability (FTW)."""
    others = [other for other in range(len(ratings)) if other != slot]
    wins = np.array([elo_expected(ratings[slot], ratings[other]) for other in others])
    mass = np.exp(-(((wins - 0.5) / sigma) ** 2) / 2) + 1e-12
    return [int(other) for other in rng.choice(others, size=number, p=mass / mass.sum())]


class Population:
    """The members and all that is decided about them; what happens in a leg is no concern of this class.

    A member is a dict: `agent`, `optimizer`, `envs` (states), `genes`, `frames` of its line, `legs` of its slot,
    `scores` of its last evaluation, `fitness`, the genes that `earned` it, `elo`, `parent` (the slot copied before its
    last leg). `ready`: slots, who goes on next. `in_flight`: the requests that are underway, sent again when a worker
    is lost or the run is resumed.
    """

    def __init__(self, args, genes, agents, rng):
        self.args, self.genes, self.rng = args, genes, rng
        self.members = [
            {"agent": agent, "optimizer": None, "envs": None, "genes": {gene.name: gene.draw(rng) for gene in genes},
             "frames": 0, "legs": 0, "scores": [], "fitness": math.nan, "earned": {}, "elo": 1000.0, "parent": None}
            for agent in agents
        ]  # fmt: skip
        self.ready, self.in_flight, self.failures = [*range(len(agents))], {}, [0] * len(agents)
        self.returns = self.exploits = self.restarts = 0

    def next(self):
        """The request of the member at the head, who first may copy another."""
        slot, args = self.ready.pop(0), self.args
        member, column = self.members[slot], lambda name: [other[name] for other in self.members]
        donor = exploit(args.exploit, slot, column("fitness"), column("scores"), self.rng) if member["legs"] else None
        member["parent"] = donor
        if donor is not None:
            names = "agent", "optimizer", "genes", "frames", "scores", "fitness", "earned", "elo"
            member.update({name: self.members[donor][name] for name in names})
            if args.explore:
                member["genes"] = explore(member["genes"], self.genes, self.rng)
            self.exploits += 1
        rivals = opponents(slot, column("elo"), args.self_play_opponents, self.rng) if args.self_play else []
        request = {name: member[name] for name in ("legs", "agent", "optimizer", "envs", "genes")}
        request |= {"slot": slot, "rivals": rivals, "opponents": [column("agent")[i] for i in rivals]}
        self.in_flight[slot] = request
        return request

    def record(self, slot, answer):
        """Takes in the member that a leg returned; it goes to the end of the line. Its row of the lineage."""
        member, args = self.members[slot], self.args
        member.update({name: answer[name] for name in ("agent", "optimizer", "envs", "scores")})
        member["frames"], member["legs"] = member["frames"] + args.leg_steps, member["legs"] + 1
        for rival, result in answer["results"]:
            other = self.members[rival]
            member["elo"], other["elo"] = elo_update(member["elo"], other["elo"], result, args.elo_k)
            if args.self_play and math.isfinite(other["fitness"]):
                other["fitness"] = other["elo"]
        member["fitness"] = float(np.mean(member["scores"]))  # NaN if it diverged
        if args.self_play and not math.isnan(member["fitness"]):
            member["fitness"] = member["elo"]
        member["earned"] = member["genes"]
        row = {"slot": slot, "parent": member["parent"], "genes": member["genes"], "frames": member["frames"],
               "fitness": None if math.isnan(member["fitness"]) else member["fitness"], "leg": member["legs"],
               "restarted": self.failures[slot]}  # fmt: skip
        del self.in_flight[slot]
        self.ready.append(slot)
        self.returns, self.failures[slot] = self.returns + 1, 0
        if all(m["legs"] and not math.isfinite(m["fitness"]) for m in self.members):
            sys.exit(f"error: all {len(self.members)} members have a fitness of NaN, the last one slot {slot} with "
                     f"{member['genes']} ({answer['diverged']}): lower the bounds of --genes")  # fmt: skip
        return row

    def failed(self, slot, reason):
        """A leg did not come back. The third time in a row ends the run."""
        self.failures[slot], self.restarts = self.failures[slot] + 1, self.restarts + 1
        who = f"slot {slot}, leg {self.members[slot]['legs'] + 1}, genes {self.members[slot]['genes']}"
        if self.failures[slot] == 3:
            sys.exit(f"error: {who}: failed three times in a row, at last: {' '.join(reason.split())}")
        print(f"warning: {who}: {' '.join(reason.split())}. It begins again from its last state", file=sys.stderr)

    def best(self):
        """The slot of the highest fitness; of nobody evaluated yet the first."""
        return int(np.argmax([-math.inf if math.isnan(m["fitness"]) else m["fitness"] for m in self.members]))

    def metrics(self):
        best, fitness = self.members[self.best()], [m["fitness"] for m in self.members if m["fitness"] == m["fitness"]]
        row = {"fitness_best": max(fitness, default=math.nan), "fitness_mean": np.mean(fitness or math.nan),
               "frames_best": best["frames"], "exploits": self.exploits, "restarts": self.restarts}  # fmt: skip
        genes = {f"genes/{name}": value for name, value in best["earned"].items()}
        return {f"pbt/{name}": value for name, value in row.items()} | genes

    def state_dict(self):
        names = "members", "ready", "in_flight", "failures", "returns", "exploits", "restarts"
        return {name: getattr(self, name) for name in names} | {"rng": self.rng.bit_generator.state}

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        vars(self).update(state | {"rng": self.rng})


def evolve(population, workers, legs, barrier=False, check=lambda: None):
    """Yields (lineage row, answer) of each leg when its member is recorded, until `legs` are, no generation between:
    who returns goes to the end of the line, and its head to the worker that is free. With `barrier` all return, and
    are recorded by slot, before any goes on; then the outcome does not depend on workers or their speed."""
    waiting, done = [*population.in_flight.values()], {}  # underway before a resume; answers that are not recorded
    while population.returns < legs:
        check()
        left = legs - population.returns - len(population.in_flight)
        if barrier and not population.in_flight:
            waiting += [population.next() for _ in range(min(left, len(population.ready)))]
        while workers.free() and (waiting or not barrier and left > 0 and population.ready):
            left -= not waiting
            workers.send(waiting.pop(0) if waiting else population.next())
        for slot, answer in workers.poll(0.5, check):
            if isinstance(answer, str):
                population.failed(slot, answer)
                waiting.append(population.in_flight[slot])
            else:
                done[slot] = answer
        if not barrier or len(done) == len(population.in_flight):
            for slot in sorted(done):
                answer = done.pop(slot)
                yield population.record(slot, answer), answer


# ---- 3. Workers: requests go out, answers come back ------------------------------------------------------------------


def packed(message):
    buffer = io.BytesIO()
    torch.save(pack(message), buffer)
    return buffer.getvalue()


def unpacked(data):
    """Never more than tensors and plain values: whatever comes through a connection runs no code."""
    return torch.load(io.BytesIO(data), weights_only=True)


def worker(line, work, threads=1, parent=None):
    """Answers the requests that come through a connection by `work(request)`, or by a reason (a string), until the
    other end is gone. The same on every backend. `parent`: the process with which it ends, even if stopped."""
    if parent is not None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # which died before that
            return
    torch.set_num_threads(threads)
    with suppress(EOFError, OSError):
        while True:
            request = unpacked(line.recv_bytes())
            try:
                answer = work(request)
            except (Exception, SystemExit) as error:  # an environment may ask to exit: that is no end of a run
                answer = f"{type(error).__name__}: {error}"
            line.send_bytes(packed(answer))


class RayWorker:
    """An actor that Ray places, anew where it died. What it says goes straight to the controller."""

    def run(self, address, key, index, work, threads):
        with connection.Client(address, authkey=key) as line:
            line.send_bytes(str(index).encode())
            worker(line, work, threads)


class Workers:
    """`number` processes that do legs; 0: this one does them when it waits for them, through the same bytes.

    `free` of them take a request by `send`; `poll` returns (slot, answer), or a reason for it where a worker raised, or
    died or hung and was replaced. Each line has a thread of its own: none that is slow or stopped holds up the others.
    """

    def __init__(self, work, number, timeout_s, backend="local", threads=1):
        self.work, self.number, self.timeout_s, self.threads = work, number, timeout_s, threads
        self.lines, self.boxes, self.jobs, self.answers = {}, {}, {}, queue.SimpleQueue()
        self.processes, self.ray, self.queued = {}, None, []
        self.clock, self.looked, self.backend = 0.0, time.monotonic(), backend

    def start(self):
        begin = self.start_ray() if self.number and self.backend == "ray" else self.begin
        for index in range(self.number):
            begin(index)

    def begin(self, index):
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch's threads in any state
        # Workers inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
        line, remote = context.Pipe()
        self.processes[index] = context.Process(target=worker, args=(remote, self.work, self.threads, os.getpid()))
        self.processes[index].start()
        remote.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.connect(index, line)

    def start_ray(self):
        """The function that begins a worker. Data goes from process to process, not through Ray."""
        try:
            self.ray = importlib.import_module("ray")
        except ImportError as error:
            sys.exit(f"error: --backend ray: {error}. scripts/run --extra ray SCRIPT brings it")
        if not self.ray.is_initialized():
            self.ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        if (cpus := self.ray.cluster_resources().get("CPU", 0)) < self.number:
            sys.exit(f"error: --num-workers {self.number} take a CPU each, and the Ray cluster has {cpus:g}")
        alone = sum(node["Alive"] for node in self.ray.nodes()) == 1
        host = "127.0.0.1" if alone else self.ray.util.get_node_ip_address()
        self.server, self.key, self.actors, self.runs = socket.create_server((host, 0)), secrets.token_bytes(32), {}, []
        Thread(target=self.admit, daemon=True).start()
        actor = self.ray.remote(RayWorker).options(max_restarts=-1, max_task_retries=-1)  # `run` begins anew with it

        def begin(index):
            self.actors[index] = one = actor.remote()
            self.runs.append(one.run.remote(self.server.getsockname(), self.key, index, self.work, self.threads))

        return begin

    def admit(self):
        """In a thread: who shows the secret within 5 s is a worker."""
        while True:
            with suppress(Exception), self.server.accept()[0] as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 5, 0))
                line = connection.Connection(os.dup(stranger.fileno()))
                connection.deliver_challenge(line, self.key)
                connection.answer_challenge(line, self.key)
                self.answers.put((int(line.recv_bytes()), line, None))
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))

    def connect(self, index, line):
        self.lines[index], self.boxes[index] = line, queue.SimpleQueue()
        Thread(target=self.carry, args=(index, line, self.boxes[index]), daemon=True).start()

    def carry(self, index, line, box):
        """In a thread: a line's requests out, its answers in; b"" when it is dead."""
        try:
            while request := box.get():
                line.send_bytes(request)
                self.answers.put((index, line, line.recv_bytes()))
        except (EOFError, OSError):
            self.answers.put((index, line, b""))

    def free(self):
        return len(self.lines) - len(self.jobs) if self.number else not self.queued

    def send(self, request):
        if not self.number:
            return self.queued.append(packed(request))
        index = next(index for index in self.lines if index not in self.jobs)
        self.jobs[index] = request["slot"], self.clock
        self.boxes[index].put(packed(request))

    def poll(self, seconds, check=lambda: None):
        """What came back, after a wait of so many seconds at most."""
        if not self.number:
            request = unpacked(self.queued.pop())
            try:
                return [(request["slot"], unpacked(packed(self.work(request, check))))]
            except Exception as error:
                return [(request["slot"], f"{type(error).__name__}: {error}")]
        now = time.monotonic()
        self.clock, self.looked = self.clock + min(now - self.looked, 60), now  # a Ctrl-Z that stops all is no time-out
        for index, (_, since) in self.jobs.items():
            if self.clock - since > self.timeout_s:
                return [self.replace(index, f"its worker hangs: no answer for {self.timeout_s:g} s")]
        if self.ray and (ended := self.ray.wait(self.runs, timeout=0)[0]):
            sys.exit(f"error: a worker of Ray's cannot run: {' '.join(str(self.ray.get(ended)).split())}")
        with suppress(queue.Empty):
            index, line, data = self.answers.get(timeout=seconds)
            if data is None:
                self.connect(index, line)
            elif line is self.lines.get(index):  # else it was replaced
                return [(self.jobs.pop(index)[0], unpacked(data)) if data else self.replace(index, "its worker died")]
        return []

    def replace(self, index, reason):
        """Another worker in the place of one that is dead or hangs; the slot of its leg, and the reason."""
        died, _ = reason.endswith("died"), self.lines.pop(index)
        self.boxes[index].put(None)
        if self.ray and not died:
            self.ray.kill(self.actors[index], no_restart=False)
        elif not self.ray:
            process = self.processes[index]
            process.join(2 * died)
            process.kill()
            process.join()
            reason += f" with exit code {process.exitcode}" * died
            self.begin(index)
        return self.jobs.pop(index)[0], reason

    def close(self):
        for end in ("kill", "join"):
            for process in self.processes.values():
                getattr(process, end)()
        if self.ray:
            self.ray.shutdown()


# ---- 4. Environments -------------------------------------------------------------------------------------------------


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


class ImagePong(VectorPong):
    """The same seen as images: observations (games, 2, 4, 40, 40), uint8, a pixel is 4 x 4 of the arena. Four channels,
    one for each of the ball's last places, newest last; both bats are where they are now."""

    OBS_SHAPE = (4, 40, 40)

    def observations(self) -> np.ndarray:
        pixels = 4.0 * np.arange(40)

        def covered(start, width):  # (...) -> (..., 40), the share of each pixel
            start = np.asarray(start)[..., None]
            return np.clip(np.minimum(start + width, pixels + 4) - np.maximum(start, pixels), 0, 4) / 4

        ball = covered(self.trail[..., 1], 4)[..., :, None] * covered(self.trail[..., 0], 4)[..., None, :]
        bats = covered(self.bats, 15)[..., None] * covered([16, 139], 5)[:, None]  # (games, 2, 40, 40)
        left = (255 * np.minimum(ball + bats.sum(1)[:, None], 1)).astype(np.uint8)
        return np.stack([left, left[..., ::-1]], axis=1)


PONG = {"VectorPong": VectorPong, "ImagePong": ImagePong}


class Episodes:
    """Raw return and length of the episodes that are underway. step(...) of both families below returns obs (also
    `self.obs`), reward, terminated, truncated, info, arrays over num_envs; an episode restarts in the step that ends
    it. info: `final_obs`, the true last observations, and `finished`, (environment, raw return, length) of each."""

    def __init__(self, num_envs):
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    def track(self, raw, ended):
        self.returns, self.lengths = self.returns + raw, self.lengths + 1
        finished = [(int(i), float(self.returns[i]), int(self.lengths[i])) for i in np.flatnonzero(ended)]
        self.returns[ended] = self.lengths[ended] = 0
        return finished

    def state_dict(self):
        """None: the next leg begins new episodes."""

    def close(self):
        """Nothing is held beyond memory."""


class PongEnvs(Episodes):
    """One seat of each game, the other one from game to game. The opponents are agents, `rivals`, in turn, by sampled
    actions, or the scripted player. The raw return is the score's difference."""

    def __init__(self, args, seeds, rivals, generator):
        self.games, self.args, self.rivals, self.generator = PONG[args.env_id](seeds), args, rivals, generator
        super().__init__(len(seeds))
        self.all, self.seats = np.arange(len(seeds)), np.arange(len(seeds)) % 2
        self.look(self.games.reset())

    def seen(self, both):
        return both if both.dtype == np.uint8 else 4 * both - 2  # the network learns faster with -2 to 2

    def look(self, both):
        self.both = self.seen(both)
        self.obs = self.both[self.all, self.seats]

    def step(self, actions):
        joint, args = self.games.scripted(), self.args
        for k, rival in enumerate(self.rivals):
            mine, seat = self.all[k :: len(self.rivals)], 1 - self.seats[k :: len(self.rivals)]
            joint[mine, seat] = rival.act(self.both[mine, seat], self.generator)
        joint[self.all, self.seats] = actions
        both, rewards, terminated, info = self.games.step(joint)
        own = self.all, self.seats.copy()
        won, hit, moved = rewards[own], info["hits"][own], info["moved"][own]
        reward = args.reward_win * (won > 0) - args.reward_lose * (won < 0)
        reward += args.reward_hit * hit + args.reward_move * moved
        self.seats[terminated] ^= 1
        self.look(both)
        told = {"final_obs": self.seen(info["final_obs"][own]), "finished": self.track(won, terminated)}
        return self.obs, reward, terminated, np.zeros_like(terminated), told

    def state_dict(self):
        return self.games.state_dict() | {"seats": self.seats, "own": [self.returns, self.lengths]}

    def load_state_dict(self, state):
        state = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        self.seats, (self.returns, self.lengths) = state.pop("seats").copy(), [own.numpy() for own in state.pop("own")]
        self.games.load_state_dict(state)
        self.look(self.games.observations())


class GymEnvs(Episodes):
    """Gymnasium environments, observations as flat vectors, actions discrete or in a Box. Each leg begins new episodes:
    they cannot be saved."""

    def __init__(self, args, seeds, *_):
        super().__init__(len(seeds))
        self.envs = [gym.wrappers.FlattenObservation(gym.make(args.env_id)) for _ in seeds]
        self.space, self.rngs = self.envs[0].action_space, [np.random.default_rng(seed) for seed in seeds]
        self.obs = np.stack([self.begin(i) for i in range(len(seeds))])

    def begin(self, i):
        return np.float32(self.envs[i].reset(seed=int(self.rngs[i].integers(2**31)))[0])

    def step(self, actions):
        rewards, flags, final_obs = np.zeros(len(actions)), np.zeros((2, len(actions)), bool), self.obs.copy()
        if isinstance(self.space, gym.spaces.Box):
            actions = np.clip(actions.reshape(-1, *self.space.shape), self.space.low, self.space.high)
        else:
            actions = actions + self.space.start
        self.obs = self.obs.copy()
        for i, action in enumerate(actions):
            final_obs[i], reward, *flags[:, i], _ = self.envs[i].step(action)
            rewards[i] = np.asarray(reward).item()
            self.obs[i] = self.begin(i) if flags[:, i].any() else final_obs[i]
        require_finite(reward=torch.as_tensor(rewards), observation=torch.as_tensor(final_obs))
        return self.obs, rewards, *flags, {"final_obs": final_obs, "finished": self.track(rewards, flags.any(0))}

    def close(self):
        for env in self.envs:
            env.close()


ENVS = dict.fromkeys(PONG, PongEnvs)  # all others: GymEnvs


def spaces(env_id):
    """Shape of the observations, number of actions (or of their coordinates), whether they are in a Box."""
    if env_id in PONG:
        return PONG[env_id].OBS_SHAPE, PONG[env_id].NUM_ACTIONS, False
    try:
        with closing(gym.wrappers.FlattenObservation(gym.make(env_id))) as env:
            obs, actions = env.observation_space.shape, env.action_space
    except (gym.error.Error, ImportError, NotImplementedError) as error:  # the last one without a message
        raise ValueError(f"--env-id {env_id}: {str(error) or 'observations that are no numbers'}") from error
    if isinstance(actions, gym.spaces.Box):
        return obs, math.prod(actions.shape), True
    if not isinstance(actions, gym.spaces.Discrete):
        raise ValueError(f"--env-id {env_id} has actions {actions}: this script takes Discrete and Box")
    return obs, int(actions.n), False


# ---- 5. Agent and mathematics ----------------------------------------------------------------------------------------


# Copied from algos/ppo.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Policy and value: separate MLPs of vectors; of images (uint8, channels first) four convolutions in common.

    forward(obs (B, *obs_shape)) -> logits (B, num_actions), or the means of a Gaussian in a Box, and values (B,).
    """

    def __init__(self, obs_shape, num_actions, continuous):
        super().__init__()
        self.log_std = nn.Parameter(torch.zeros(num_actions)) if continuous else None
        self.torso, self.scale, sizes = nn.Identity(), 1.0, [math.prod(obs_shape), 128, 64]
        if len(obs_shape) == 3:
            self.scale = 255.0
            layers, channels, sizes = [], obs_shape[0], [32 * math.prod(-(-side // 16) for side in obs_shape[1:]), 256]
            for size in (channels, 32, 32, 32):
                layers += [layer_init(nn.Conv2d(size, 32, 3, 2, 1)), nn.ReLU()]
            self.torso = nn.Sequential(*layers, nn.Flatten())
        self.policy, self.value = (
            nn.Sequential(*(layer for pair in zip(sizes, sizes[1:])
                            for layer in (layer_init(nn.Linear(*pair)), nn.ReLU())),
                          layer_init(nn.Linear(sizes[-1], outputs), std))
            for outputs, std in ((num_actions, 0.01), (1, 1.0))
        )  # fmt: skip

    def forward(self, obs):
        features = self.torso(obs / self.scale)
        return self.policy(features), self.value(features).squeeze(-1)

    def distribution(self, outputs):
        """The policy of the first of forward's results. log_prob(actions) and entropy() are (B,)."""
        if self.log_std is None:
            return torch.distributions.Categorical(logits=outputs, validate_args=False)
        normal = torch.distributions.Normal(outputs, self.log_std.exp(), validate_args=False)
        return torch.distributions.Independent(normal, 1, validate_args=False)

    @torch.no_grad()
    def act(self, obs, generator=None):
        """Array obs (B, ...) -> actions (B,), in a Box (B, size), as an array. No generator: the most likely ones."""
        outputs = self.policy(self.torso(torch.as_tensor(obs) / self.scale))
        require_finite(policy_output=outputs)
        if self.log_std is not None:
            noise = torch.randn(outputs.shape, generator=generator) if generator else 0
            return (outputs + self.log_std.exp() * noise).numpy()
        taken = (
            torch.multinomial(outputs.softmax(-1), 1, generator=generator)[:, 0] if generator else outputs.argmax(-1)
        )
        return taken.numpy()


def load_agent(args, state):
    """An agent with given weights, without a draw from the global generator."""
    with torch.device("meta"):
        agent = Agent(args.obs_shape, args.num_actions, args.continuous)
    agent.to_empty(device="cpu").load_state_dict(state)
    return agent


def gae_v(ratios, rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """GAE-V (Han and Sung 2019): arrays (T, N) -> advantages, value targets V + c A, c = min(1, ratio).

    A_t = delta_t + gamma lambda c_{t+1} A_{t+1}; ratios pi / b of the policy that learns to the one that acted. All 1:
    GAE (Schulman et al. 2016, eq. 16). `next_values` is V of each step's true successor: the bootstrap at a
    truncation and at the end of the rollout. Terminated cuts bootstrap and trace, truncated the trace alone.
    """
    deltas = rewards + gamma * np.where(terminated, 0, next_values) - values
    clipped, decay = np.minimum(ratios, 1), gamma * gae_lambda * ~(terminated | truncated)
    advantages, trace = np.zeros_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = deltas[t] + decay[t] * trace
        trace = clipped[t] * advantages[t]
    return advantages, clipped * advantages + values


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


# ---- 6. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


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


def require_finite(**tensors):
    """FloatingPointError that names the first tensor with a value that is not finite: a leg ends, not the run."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise FloatingPointError(f"{name} is not finite")


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


RunLogger.LOGS = ("lineage.jsonl", *RunLogger.LOGS)  # a row a leg; a resume cuts it as the others


# ---- 7. A leg, evaluation, training ----------------------------------------------------------------------------------


def play(agent, args, seeds, greedy, check=lambda: None, rivals=()):
    """An episode in each of len(seeds) - 1 environments -> returns, lengths; the last seed is for actions."""
    generator = torch.Generator().manual_seed(int(seeds[-1].generate_state(1)[0]))
    running, outcome = np.ones(len(seeds) - 1, bool), np.zeros((2, len(seeds) - 1))
    with closing(ENVS.get(args.env_id, GymEnvs)(args, seeds[:-1], rivals, generator)) as envs:
        while running.any() and envs.lengths.max() < args.eval_max_steps:
            check()
            *_, info = envs.step(agent.act(envs.obs, None if greedy else generator))
            for i, *found in info["finished"]:
                outcome[:, i], running[i] = found if running[i] else outcome[:, i], False
        outcome[:, running] = envs.returns[running], envs.lengths[running]
    if running.any():
        print(f"note: {running.sum()} evaluation episodes were cut off at --eval-max-steps", file=sys.stderr)
    return outcome


def leg(args, request, check=lambda: None):
    """`leg_steps` of PPO with a member's genes, and the evaluation by which it is judged; on a CPU the request alone
    says what comes out. Where something is not finite, the fitness is NaN and the state stays that of before."""
    args = SimpleNamespace(**vars(args) | request["genes"])
    seed = np.random.SeedSequence([args.seed, request["slot"], request["legs"]])
    env_seed, eval_seed, minibatch_seed, *action_seeds = seed.spawn(5)
    acting, answering = (torch.Generator().manual_seed(int(s.generate_state(1)[0])) for s in action_seeds)
    minibatches, agent = np.random.default_rng(minibatch_seed), load_agent(args, request["agent"])
    rivals = [load_agent(args, state) for state in request["opponents"]]
    optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5)
    if request["optimizer"] is not None:
        optimizer.load_state_dict(request["optimizer"])
    optimizer.param_groups[0]["lr"] = args.learning_rate  # the gene, whatever step size the moments came with
    begun, finished, losses = time.perf_counter(), [], []
    T, N = args.num_steps, args.num_envs
    obs = torch.zeros((T + 1, N, *args.obs_shape), dtype=torch.uint8 if agent.scale == 255 else torch.float32)
    actions = torch.zeros((T, N, args.num_actions)) if args.continuous else torch.zeros((T, N), dtype=torch.int64)
    rewards, (terminated, truncated) = np.zeros((T, N), np.float32), np.zeros((2, T, N), bool)
    try:
        with closing(ENVS.get(args.env_id, GymEnvs)(args, env_seed.spawn(N), rivals, answering)) as envs:
            if request["envs"] is not None:
                envs.load_state_dict(request["envs"])
            for _ in range(args.leg_steps // (T * N)):
                check()
                # Collect: T steps of every environment.
                cuts = []
                for t in range(T):
                    obs[t], taken = torch.as_tensor(envs.obs), agent.act(envs.obs, acting)
                    actions[t] = torch.as_tensor(taken)
                    _, reward, terminated[t], truncated[t], info = envs.step(taken)
                    rewards[t] = args.reward_scale * reward
                    finished += info["finished"]
                    if (cut := truncated[t] & ~terminated[t]).any():  # envs.obs belongs to the next episode
                        cuts.append((t, cut, torch.as_tensor(info["final_obs"][cut])))
                obs[T] = torch.as_tensor(envs.obs)
                # Optimise: minibatches of the steps.
                flat = {"obs": obs[:T].flatten(0, 1), "actions": actions.flatten(0, 1)}
                for epoch in range(args.update_epochs):
                    if epoch == 0 or args.estimator == "gae_v":  # advantages by what the network says now
                        with torch.no_grad():
                            outputs, values = (x.unflatten(0, (T + 1, N)) for x in agent(obs.flatten(0, 1)))
                            logprobs = agent.distribution(outputs[:T]).log_prob(actions)
                            flat["logprobs"] = flat.get("logprobs", logprobs.flatten())  # when they were taken
                            next_values = values[1:].clone()
                            for t, cut, final_obs in cuts:
                                next_values[t, torch.as_tensor(cut)] = agent(final_obs)[1]
                        ratios = (logprobs.flatten() - flat["logprobs"]).clamp(max=0).exp().view(T, N).numpy()
                        found = gae_v(ratios, rewards, values[:T].numpy(), next_values.numpy(), terminated, truncated,
                                      args.gamma, args.gae_lambda)  # fmt: skip
                        for name, array in zip(("advantages", "returns"), found):
                            flat[name] = torch.as_tensor(array.reshape(-1), dtype=torch.float32)
                    for rows in np.array_split(minibatches.permutation(T * N), args.num_minibatches):
                        b = {name: tensor[torch.as_tensor(rows)] for name, tensor in flat.items()}
                        b["advantages"] = (b["advantages"] - b["advantages"].mean()) / (b["advantages"].std() + 1e-8)
                        outputs, value = agent(b["obs"])
                        policy = agent.distribution(outputs)
                        loss, parts_of_loss = ppo_loss(
                            policy.log_prob(b["actions"]), policy.entropy(), value, b["logprobs"], None,
                            b["advantages"], b["returns"], args.clip_coef, False, args.ent_coef, args.vf_coef,
                        )  # fmt: skip
                        optimizer.zero_grad()
                        loss.backward()
                        grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                        if not torch.isfinite(grad_norm + loss):
                            require_finite(**flat, outputs=outputs, value=value, **parts_of_loss, grad_norm=grad_norm)
                        optimizer.step()
                        losses.append(torch.stack([*parts_of_loss.values(), grad_norm]).detach())
            state = envs.state_dict()
        require_finite(**dict(agent.named_parameters()))
        # Evaluate: the same seeds for every member and leg; in self-play against the leg's opponents.
        seeds = (eval_seed if rivals else np.random.SeedSequence([args.seed, 2**32 - 1])).spawn(args.eval_episodes + 1)
        trained = time.perf_counter()
        scores, _ = play(agent, args, seeds, args.eval_greedy and not rivals, check, rivals)
        results = [(request["rivals"][i % len(rivals)], (np.sign(scores[i]) + 1) / 2)
                   for i in range(len(scores) if rivals else 0)]  # fmt: skip
    except FloatingPointError as error:
        return request | {"scores": [math.nan] * args.eval_episodes, "results": [], "row": {}, "diverged": str(error)}
    names = [f"losses/{name}" for name in (*parts_of_loss, "grad_norm")]
    _, score, length = np.mean(finished or [[math.nan] * 3], axis=0)
    row = dict(zip(names, torch.stack(losses).mean(0).tolist(), strict=True)) | {
        "charts/episodic_return": score, "charts/episodic_length": length,
        "charts/learning_rate": optimizer.param_groups[0]["lr"], "losses/gradient_steps": len(losses),
        "perf/train_s": trained - begun, "perf/fitness_s": time.perf_counter() - trained,
    }  # fmt: skip
    return {"slot": request["slot"], "agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "envs": state,
            "scores": scores.tolist(), "results": results, "row": row, "diverged": None}  # fmt: skip


def evaluate(agent, args, check=lambda: None):
    """Plays args.final_eval_episodes episodes in environments of their own, seeded by args.eval_seed alone -> a row for
    each, its raw return and length. Touches no training state. `check` may end it."""
    seeds = np.random.SeedSequence(args.eval_seed).spawn(args.final_eval_episodes + 1)
    found = play(agent, args, seeds, args.eval_greedy, check).T.tolist()
    return [{"split": "eval", "return": score, "length": int(length)} for score, length in found]


def train(args):
    with RunLogger(args) as run:
        if run.result is not None and not args.eval_only:
            print(f"finished before, nothing to do: {run.dir}\n{json.dumps(run.result)}")
            return run.result
        torch.set_num_threads(threads := args.torch_threads or len(os.sched_getaffinity(0)))
        model, decisions = np.random.SeedSequence(args.seed).spawn(2)
        torch.manual_seed(int(model.generate_state(1)[0]))  # of the initial networks alone
        networks = [Agent(args.obs_shape, args.num_actions, args.continuous) for _ in range(args.population)]
        population = Population(args, [parse_gene(text, args) for text in args.genes],
                                [pack(network.state_dict()) for network in networks],
                                np.random.default_rng(decisions))  # fmt: skip
        agent = networks[0]  # of the best member from now on
        legs, global_step, row = run.restore(agent=agent, population=population)
        if args.eval_only:
            means = run.log_eval(global_step, evaluate(agent, args, run.check_signals))
            print(json.dumps(means))
            return means
        workers = Workers(partial(leg, args), min(args.num_workers, args.population), args.leg_timeout, args.backend,
                          threads)  # fmt: skip
        run.enter_context(closing(workers)).start()
        run.checkpoint(legs, global_step, row)
        for born, answer in evolve(population, workers, args.num_updates, args.barrier, run.check_signals):
            legs, global_step = legs + 1, global_step + args.leg_steps
            run.write_rows("lineage.jsonl", global_step, [{"time": round(time.monotonic() - run.begun, 3)} | born])
            agent.load_state_dict(population.members[population.best()]["agent"])

            # Log and evaluate.
            row = {"charts/episodic_return": math.nan, "charts/update": legs} | answer["row"] | population.metrics()
            last = legs == args.num_updates
            if last or (args.eval_interval and legs % args.eval_interval == 0):
                begun = time.perf_counter()
                row |= run.log_eval(global_step, evaluate(agent, args, run.check_signals))
                row["perf/eval_s"] = time.perf_counter() - begun
            if last or legs % args.log_interval == 0:
                run.log(global_step, {**row})
            run.checkpoint(legs, global_step, row)
        return run.finish(args.num_updates, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
