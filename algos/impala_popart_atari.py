"""IMPALA with multi-task PopArt on Atari: one agent for many games whose rewards may have any scale.

Papers: Hessel et al. 2018, arXiv:1809.04474 (multi-task PopArt); Espeholt et al. 2018, arXiv:1802.01561 (IMPALA);
Jaderberg et al. 2017, arXiv:1611.05397 (pixel control).

  Train:     python algos/impala_popart_atari.py --env-id Boxing-v5,Pong-v5 --network nature --total-timesteps 2000000
  Baselines: the same with --no-popart (IMPALA), or with --no-popart --multi-head (MultiHead-IMPALA)
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)
  PBT:       a controller ends members (--pbt) by SIGTERM, may replace checkpoints/ by that of a better one, and starts
             them again with other --learning-rate, --ent-coef, --rmsprop-eps or --max-grad-norm

Differs from the paper: V-trace takes the value of the true final observation at a truncation, which is no termination.
"""

import ast
import ctypes
import difflib
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
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
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
    device: Literal["auto", "cpu", "cuda"] = "auto"  # the learner's (auto: cuda if there is one); actors use the CPU
    deterministic: bool = False  # only deterministic GPU kernels (on a CPU num_actors 0 always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the learner; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 100  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 10  # updates between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team
    pbt: bool = False  # member of a population: a resume may change the four arguments named above

    # environments
    env_id: Annotated[str, tyro.conf.arg(aliases=("--suite",))] = "atari57"  # suite, or games separated by commas
    num_actors: int = 1  # actor processes; 0: the learner acts itself, and the run repeats to the bit
    envs_per_actor: int = 16  # environments of an actor, stepped and seen by the network as a batch
    max_policy_lag: int | None = None  # updates that an unroll's policy may be behind the one it trains; None: any
    reward_clip: Literal["none", "unit"] = "none"  # unit: learn from rewards clipped to [-1, 1]; returns stay raw

    # algorithm
    total_timesteps: int = 2_000_000  # agent steps of 4 frames; rounded up to whole updates
    network: Literal["nature", "impala"] = "impala"  # DQN's convolutions, or the paper's ResNet
    lstm_size: int = 256  # units of the LSTM on top, which also sees the last action and clipped reward; 0: none
    learning_rate: float = 6e-4  # RMSProp step size at the start
    anneal_lr: bool = True  # linearly to 0 at total_timesteps (which early updates then depend on)
    rmsprop_decay: float = 0.99  # of the mean squared gradient
    rmsprop_eps: float = 0.01  # added to it, inside the root
    max_grad_norm: float = 40.0  # gradient norm limit (losses are sums over the batch, as in the paper)
    num_steps: int = 20  # unroll length: steps of an environment in a rollout
    batch_rollouts: int = 32  # rollouts per update
    gamma: float = 0.99  # discount
    rho_bar: float = 1.0  # V-trace's limit of the importance weights
    c_bar: float = 1.0  # V-trace's limit of the trace weights
    ent_coef: float = 0.01  # entropy bonus
    vf_coef: float = 0.5  # value loss weight
    popart: bool = True  # normalise each task's values by its statistics (--no-popart: IMPALA)
    multi_head: bool = False  # with --no-popart: a value head per task, not normalised (MultiHead-IMPALA)
    popart_beta: float = 3e-4  # step size of the statistics: a memory of 1 / beta rollouts of a task
    popart_second_moment: Literal["sq-mean", "mean-sq"] = "sq-mean"  # of a rollout: squared mean target, or mean square
    pixel_control_coef: float = 0.0  # weight of the pixel control loss; 0: off

    # evaluation
    eval_interval: int = 0  # updates between evaluations; 0: only at the end
    eval_episodes: int = 10  # episodes per game and evaluation
    eval_max_steps: int = 27_000  # evaluation episodes still running after so many steps count as they are
    eval_seed: int = 10_000  # seeds the evaluation episodes, the same for every run and algorithm
    eval_greedy: bool = False  # evaluate the most likely action (--no-eval-greedy: sample, as the paper does)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    games: tuple[str, ...] = field(init=False)
    batch_size: int = field(init=False)
    num_updates: int = field(init=False)

    def __post_init__(self):
        E, P, B = self.envs_per_actor, self.num_actors, self.batch_rollouts
        least_lag = max(0, -(-P * E // max(B, 1)) - 1)  # with less, some actor would never have an unroll to fill
        at_least_0 = dict.fromkeys(("seed", "num_actors", "eval_interval"), (0, math.inf))
        check_numbers(self, gamma=(0, 1), rmsprop_decay=(0, 1), popart_beta=(0, 1), eval_seed=(0, 2**64 - 1),
                      torch_threads=(0, 1024), lstm_size=(0, 4096), max_policy_lag=(least_lag, math.inf),
                      **at_least_0)  # fmt: skip
        self.games = parse_games(self.env_id)
        self.batch_size = B * self.num_steps
        self.num_updates = -(-self.total_timesteps // self.batch_size)
        if B % E:
            fitting = max(round(B / E), 1) * E
            raise ValueError(f"--batch-rollouts {B} is no multiple of --envs-per-actor {E}: try {fitting}")
        if max(P, 1) * E < len(self.games):
            raise ValueError(f"{max(P, 1) * E} environments (num_actors x envs_per_actor) cannot play "
                             f"{len(self.games)} games: try --envs-per-actor {len(self.games)}")  # fmt: skip
        if self.popart and self.multi_head:
            raise ValueError("--multi-head is the baseline without PopArt, which has its own heads: add --no-popart")


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


# Scores of a uniformly random policy and of a human tester, after no-op starts, with 108,000 frames at most an episode
# (dqn_zoo, atari_data.py). The games are the suite atari57.
HUMAN_RANDOM = """
Alien 227.8 7127.7, Amidar 5.8 1719.5, Assault 222.4 742, Asterix 210 8503.3, Asteroids 719.1 47388.7,
Atlantis 12850 29028.1, BankHeist 14.2 753.1, BattleZone 2360 37187.5, BeamRider 363.9 16926.5, Berzerk 123.7 2630.4,
Bowling 23.1 160.7, Boxing 0.1 12.1, Breakout 1.7 30.5, Centipede 2090.9 12017, ChopperCommand 811 7387.8,
CrazyClimber 10780.5 35829.4, Defender 2874.5 18688.9, DemonAttack 152.1 1971, DoubleDunk -18.6 -16.4, Enduro 0 860.5,
FishingDerby -91.7 -38.7, Freeway 0 29.6, Frostbite 65.2 4334.7, Gopher 257.6 2412.5, Gravitar 173 3351.4,
Hero 1027 30826.4, IceHockey -11.2 0.9, Jamesbond 29 302.8, Kangaroo 52 3035, Krull 1598 2665.5,
KungFuMaster 258.5 22736.3, MontezumaRevenge 0 4753.3, MsPacman 307.3 6951.6, NameThisGame 2292.3 8049,
Phoenix 761.4 7242.6, Pitfall -229.4 6463.7, Pong -20.7 14.6, PrivateEye 24.9 69571.3, Qbert 163.9 13455,
Riverraid 1338.5 17118, RoadRunner 11.5 7845, Robotank 2.2 11.9, Seaquest 68.4 42054.7, Skiing -17098.1 -4336.9,
Solaris 1236.3 12326.7, SpaceInvaders 148 1668.7, StarGunner 664 10250, Surround -10 6.5, Tennis -23.8 -8.3,
TimePilot 3568 5229.2, Tutankham 11.4 167.6, UpNDown 533.4 11693.2, Venture 0 1187.5, VideoPinball 16256.9 17667.9,
WizardOfWor 563.5 4756.5, YarsRevenge 3092.9 54576.9, Zaxxon 32.5 9173.3"""
HUMAN_RANDOM = {name: (float(r), float(h)) for name, r, h in map(str.split, HUMAN_RANDOM.split(","))}

SUITES = {"atari57": tuple(f"{name}-v5" for name in HUMAN_RANDOM)}


def human_normalized(game, score):
    """(score - random) / (human - random); None for a game that is not in the table."""
    low_high = HUMAN_RANDOM.get(game.removesuffix("-v5"))
    return low_high and (score - low_high[0]) / (low_high[1] - low_high[0])


def human_median(prefix, means):
    """{tag: median human-normalised score} of {game: mean return}."""
    scores = [score for game, mean in means.items() if (score := human_normalized(game, mean)) is not None]
    return {f"{prefix}/human_normalized_median": np.median(scores)} if scores else {}


def parse_games(env_id):
    """The games of a suite, or separated by commas. ValueError: one is unknown or there twice, or envpool is absent."""
    if importlib.util.find_spec("envpool") is None:
        raise ValueError(f"--env-id {env_id} needs envpool: pip install envpool==1.2.5")
    specs = importlib.import_module("envpool").registration.registry.specs.items()
    games, known = SUITES.get(env_id) or tuple(env_id.split(",")), [id for id, (m, *_) in specs if m == "envpool.atari"]
    for game in games:
        if games.count(game) > 1:
            raise ValueError(f"--env-id {env_id}: {game} is listed more than once")
        if game not in known:
            nearest = ", ".join(difflib.get_close_matches(game, [*SUITES, *known], cutoff=0.3))
            raise ValueError(f"--env-id {game}: there is no such game or suite. Nearest: {nearest}")
    return games


SPACE = SimpleNamespace(obs_shape=(4, 84, 84), obs_dtype=np.uint8, num_actions=18)


class AtariEnvs:
    """Environment i plays games[tasks[i]] of envpool all its life, seeded by seeds[i] (SeedSequences): 4 grey frames,
    all 18 actions in all games; episodes end after 27,000 steps = 108,000 frames (truncated), not with a life.

    step(actions (E,)) -> obs (E, 4, 84, 84), reward (E,) as the game gives it, terminated, truncated, info. An episode
    restarts in the step that ends it: obs (also `self.obs`) is the next one's first, info["final_obs"] its last.
    """

    def __init__(self, games, tasks, seeds):
        import envpool

        self.tasks, self.groups = np.asarray(tasks), []  # groups: the environments of a game
        self.obs = np.empty((len(tasks), *SPACE.obs_shape), np.uint8)
        for task in np.unique(self.tasks):
            index = np.flatnonzero(self.tasks == task)
            ints = [int(seeds[i].generate_state(1)[0] % 2**31) for i in index]
            envs = envpool.make(games[task], env_type="gymnasium", num_envs=len(ints), num_threads=1,
                                seed=ints, full_action_space=True, use_fire_reset=False)  # fmt: skip
            self.groups.append((index, envs))
            self.obs[index] = envs.reset()[0]

    def step(self, actions):
        final_obs, reward = np.empty_like(self.obs), np.zeros(len(actions))
        terminated, truncated = np.zeros((2, len(actions)), bool)
        for index, envs in self.groups:
            final_obs[index], reward[index], _, truncated[index], info = envs.step(actions[index])
            terminated[index] = info["terminated"]  # envpool's own flag denies a death in the very last step
            self.obs[index] = final_obs[index]
            ended = np.flatnonzero((terminated | truncated)[index]).astype(np.int32)
            if len(ended):
                self.obs[index[ended]] = envs.reset(ended)[0]
        return self.obs.copy(), reward, terminated, truncated, {"final_obs": final_obs}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        """Returns where the episodes go on (E,): envpool cannot be saved."""
        print("note: envpool cannot restore its episodes; all environments start new ones", file=sys.stderr)
        return np.zeros(len(self.tasks), bool)

    def close(self):
        for _, envs in self.groups:
            envs.close()


# ---- 3. Mathematics --------------------------------------------------------------------------------------------------


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


# Copied from algos/impala_popart.py:PopArt
class PopArt(nn.Linear):
    """Normalised values of every task, n = W f + b, with each task's statistics (Hessel et al. 2018, eq. 6, 10, 13).

    forward(features (..., F)) -> n (..., N); the unnormalised value of task i is sigma[i] n[i] + mu[i]. The buffers mu,
    nu (N,) are float64: in float32, nu - mu^2 is 0 where |mu| >> sigma. A MultiHead agent never calls `update`; an
    agent with one head has one task. `second_moment` is what nu averages: "sq-mean", the square of a rollout's mean
    target (eq. 6 to the letter), or "mean-sq", the mean of its squared targets.
    """

    def __init__(self, num_features, num_tasks, beta=3e-4, second_moment="sq-mean"):
        super().__init__(num_features, num_tasks)
        self.beta, self.second_moment = beta, second_moment
        self.register_buffer("mu", torch.zeros(num_tasks, dtype=torch.float64))
        self.register_buffer("nu", torch.ones(num_tasks, dtype=torch.float64))

    @property
    def sigma(self):
        return (self.nu - self.mu**2).clamp(min=0).sqrt().clamp(1e-4, 1e6)

    @torch.no_grad()
    def update(self, targets, tasks):
        """Folds each rollout's mean of `targets` (T, B) into the statistics of its task, tasks (B,), in the order of
        the batch; then rescales W and b so that no task's value changes (eq. 13: once for all rollouts, as its steps
        telescope)."""
        targets = torch.as_tensor(targets, dtype=torch.float64, device=self.mu.device)
        means = targets.mean(0)
        squares = {"sq-mean": means**2, "mean-sq": (targets**2).mean(0)}[self.second_moment]
        mu, nu, tasks = self.mu.tolist(), self.nu.tolist(), torch.as_tensor(tasks).tolist()
        for i, mean, square in zip(tasks, means.tolist(), squares.tolist()):
            mu[i] = (1 - self.beta) * mu[i] + self.beta * mean
            nu[i] = (1 - self.beta) * nu[i] + self.beta * square
        old_mu, old_sigma = self.mu.clone(), self.sigma
        self.mu.copy_(torch.tensor(mu, dtype=torch.float64))  # in place: buffers may be shared
        self.nu.copy_(torch.tensor(nu, dtype=torch.float64))
        i = torch.tensor(sorted({*tasks}), device=self.mu.device)
        w, b, sigma = self.weight[i].double(), self.bias[i].double(), self.sigma[i]
        self.weight[i] = ((old_sigma[i] / sigma)[:, None] * w).to(self.weight)
        self.bias[i] = ((old_sigma[i] * b + (old_mu[i] - self.mu[i])) / sigma).to(self.bias)


# Copied from algos/impala_popart.py:impala_loss
def impala_loss(logits, normalized, next_normalized, mu, sigma, tasks, actions, behaviour_logits, rewards, terminated,
                truncated, gamma, ent_coef, vf_coef, rho_bar=1.0, pg_rho_bar=1.0, c_bar=1.0):  # fmt: skip
    """The actor-critic loss (Hessel et al. 2018, eq. 11 and 12) as a sum over the steps (T, B).

    Logits (T, B, A); `normalized` (T, B, N) is PopArt's output, `next_normalized` that for each step's true successor.
    mu, sigma (N,) before their update; tasks (B,). Returns the loss, its parts, and V and G^v (T, B), unnormalised.
    """
    column = tasks.expand(normalized.shape[:2])[..., None]
    n, next_n = (x.gather(-1, column).squeeze(-1) for x in (normalized, next_normalized))
    mu, sigma = mu[tasks], sigma[tasks]
    values, next_values = (sigma * x.detach() + mu for x in (n, next_n))
    log_pi = logits.log_softmax(-1)
    logprob, behaviour_logprob = (x.gather(-1, actions[..., None]).squeeze(-1)
                                  for x in (log_pi, behaviour_logits.log_softmax(-1)))  # fmt: skip
    log_rhos = logprob.detach() - behaviour_logprob
    targets, advantages = vtrace(log_rhos, rewards, values, next_values, terminated, truncated, gamma, rho_bar,
                                 pg_rho_bar, c_bar)  # fmt: skip
    value_loss = 0.5 * (((targets - mu) / sigma - n) ** 2).sum()
    policy_loss = -(advantages / sigma * logprob).sum()  # (G^pi - mu) / sigma - n = (G^pi - V) / sigma
    entropy = -(log_pi.exp() * log_pi).sum(-1).sum()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy
    with torch.no_grad():
        approx_kl = (log_rhos.exp() - 1 - log_rhos).mean()
        clipfrac = (log_rhos.exp() > rho_bar).float().mean()
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy / rewards.numel(),
             "approx_kl": approx_kl, "clipfrac": clipfrac}  # fmt: skip
    return loss, parts, values, targets


# Copied from algos/impala_popart.py:RMSPropTF
class RMSPropTF(torch.optim.Optimizer):
    """TensorFlow 1's RMSProp, which IMPALA's settings are for: epsilon inside the root, the mean square starts at 1."""

    def __init__(self, params, lr, decay=0.99, eps=0.01):
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if p not in self.state:
                        self.state[p]["mean_square"] = torch.ones_like(p)
                    mean_square = self.state[p]["mean_square"]
                    mean_square.mul_(group["decay"]).addcmul_(p.grad, p.grad, value=1 - group["decay"])
                    p.addcdiv_(p.grad, (mean_square + group["eps"]).sqrt_(), value=-group["lr"])


class PixelControlHead(nn.Module):
    """Action values of every 4x4 cell of the picture (Hessel et al. 2018, appendix): features (..., F) -> (..., A, 20,
    20), for the central 80x80 of 84x84 pixels. Only the learner runs it."""

    def __init__(self, num_features, num_actions):
        super().__init__()
        self.hidden = nn.Linear(num_features, 32 * 7 * 7)
        self.deconv = nn.ConvTranspose2d(32, 32, 3)  # 7 + 2 = 9 cells, then 2 x 9 + 2 = 20
        self.value, self.advantage = (nn.ConvTranspose2d(32, n, 4, 2) for n in (1, num_actions))

    def forward(self, features):
        x = self.hidden(features).relu().reshape(-1, 32, 7, 7)
        x = self.deconv(x).relu()
        advantage = self.advantage(x)
        q = self.value(x) + advantage - advantage.mean(1, keepdim=True)
        return q.reshape(*features.shape[:-1], *q.shape[1:])


def pixel_rewards(frames, next_frames):
    """uint8 pictures (T, B, 84, 84) and those that followed -> mean |change| per 4x4 cell in [0, 1] (T, B, 20, 20)."""
    changes = torch.maximum(frames, next_frames) - torch.minimum(frames, next_frames)  # bytes have no sign
    return nn.functional.avg_pool2d(changes[..., 2:82, 2:82].float(), 4) / 255


def pixel_control_loss(q, next_q, rewards, actions, terminated, truncated, gamma=0.9):
    """Half the squared errors of multi-step Q-learning (Jaderberg et al. 2017, eq. 3), summed over cells and steps.

    q (T, B, A, h, w), next_q for each step's true successor; rewards (T, B, h, w) accumulate to the episode's or the
    rollout's end, then the best action value stands in, but nothing after a termination; the rest (T, B).
    """
    terminated, truncated = (x[..., None, None] for x in (terminated, truncated))
    best, next_best = q.detach().amax(2), next_q.detach().amax(2)
    # On policy, the V-trace target is the n-step return.
    targets = vtrace(torch.zeros_like(rewards), rewards, best, next_best, terminated, truncated, gamma)[0]
    index = actions[..., None, None, None].expand(-1, -1, 1, *q.shape[-2:])
    return 0.5 * ((targets - q.gather(2, index).squeeze(2)) ** 2).sum()


# Copied from algos/ppo.py:explained_variance
def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns]; NaN where it is undefined."""
    variance = returns.var()
    return 1 - (returns - values).var() / variance if 0 < variance < math.inf else math.nan


# ---- 4. Agent --------------------------------------------------------------------------------------------------------


# Copied from algos/ppo_plr.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    """Orthogonal weights for linear layers, xavier for convolutions (the PLR code's choice); zero biases."""
    if isinstance(layer, nn.Conv2d):
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


# Copied from algos/ppo_plr.py:ResidualBlock
class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convs = nn.Sequential(nn.ReLU(), layer_init(nn.Conv2d(channels, channels, 3, padding=1)), nn.ReLU(True),
                                   layer_init(nn.Conv2d(channels, channels, 3, padding=1)))  # fmt: skip

    def forward(self, x):
        return x + self.convs(x)


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


class Policy(nn.Module):
    """All that acts: torso, LSTM and policy head. It never learns which task it plays.

    forward(obs (T, B, 4, 84, 84), starts, last_action, last_reward (T, B), core (2, B, H)) -> logits (T, B, A),
    features (T, B, F), core. `starts` marks the first observations of episodes: there the LSTM is cleared, and last
    action and reward are none. `core` is the LSTM's state before row 0, then after the last row.
    """

    def __init__(self, space, network="impala", lstm_size=256):
        super().__init__()
        self.num_actions, self.lstm_size = space.num_actions, lstm_size
        if network == "nature":
            sizes = (4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)
            layers = [layer for size in sizes for layer in (layer_init(nn.Conv2d(*size)), nn.ReLU(True))]
        else:
            layers = []
            for before, after in ((4, 16), (16, 32), (32, 32)):
                layers += [layer_init(nn.Conv2d(before, after, 3, padding=1)), nn.MaxPool2d(3, 2, padding=1),
                           ResidualBlock(after), ResidualBlock(after)]  # fmt: skip
            layers.append(nn.ReLU())
        layers += [nn.Flatten(), layer_init(nn.Linear(3136 if network == "nature" else 3872, 256)), nn.ReLU(True)]
        self.torso = nn.Sequential(*layers)
        self.lstm = LSTM(256 + self.num_actions + 1, lstm_size) if lstm_size else None
        self.num_features = lstm_size or 256
        self.head = layer_init(nn.Linear(self.num_features, self.num_actions), 0.01)

    def forward(self, obs, starts, last_action, last_reward, core):
        # Channels last: up to twice as fast on a CPU.
        pictures = obs.flatten(0, 1).to(torch.float32, memory_format=torch.channels_last).div_(255)
        features = self.torso(pictures).unflatten(0, starts.shape)
        if self.lstm is not None:
            known = ~starts[..., None]
            last_action = nn.functional.one_hot(last_action, self.num_actions) * known
            inputs = torch.cat([features, last_action, last_reward[..., None].clamp(-1, 1) * known], -1)
            features, core = self.lstm(inputs, starts, core)
        return self.head(features), features, core

    def initial_core(self, num_envs):
        return torch.zeros(2, num_envs, self.lstm_size)


class Agent(nn.Module):
    """The policy, and what the learner alone runs: a normalised value per task, and the pixel control head."""

    def __init__(self, space, num_tasks, args):
        super().__init__()
        self.policy = Policy(space, args.network, args.lstm_size)
        size, self.num_heads = self.policy.num_features, num_tasks if args.popart or args.multi_head else 1
        self.values = layer_init(PopArt(size, self.num_heads, args.popart_beta, args.popart_second_moment), 1.0)
        self.pixels = PixelControlHead(size, space.num_actions) if args.pixel_control_coef else None

    # Copied from algos/impala_popart.py:Agent.last_features
    def last_features(self, b):
        """Of the episodes that were cut off in a batch of unrolls: where, steps and columns (K,), and the features
        (K, F) of their true last observations, in whose place the unroll has the first one of another episode."""
        t, i = torch.where(b["truncated"] & ~b["terminated"])
        k = torch.arange(len(t), device=t.device)
        obs, starts, action, reward = (b[name][:, i] for name in ("obs", "starts", "action", "reward"))
        obs[t + 1, k], starts[t + 1, k] = b["final_obs"][t, i], False
        features = self.policy(obs, starts, action, reward, b["core"][:, i])[1]
        return (t, i), features[t + 1, k]

    def pixel_loss(self, b, features, cut, last):
        q = self.pixels(features)
        next_q = q[1:].detach().clone()
        next_q[cut] = self.pixels(last).detach()
        rewards = pixel_rewards(b["obs"][:-1, :, -1], b["final_obs"][:, :, -1])  # the newest of each stack
        return pixel_control_loss(q[:-1], next_q, rewards, b["action"][1:], b["terminated"], b["truncated"])


# ---- 5. The asynchronous queue, and the actors that fill it ----------------------------------------------------------


# Copied from algos/impala_popart.py:region(queue)
def available_memory():
    """Bytes that this process may still take, by what the machine has free and by the limit of its control group."""
    free = int(re.search(r"MemAvailable: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    with suppress(OSError, ValueError):  # no such group; its limit is the word max
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


class SharedMemory(dict):
    """Arrays {name: (count, *shape)} by a layout {name: (shape, dtype)}, which other processes get as an argument of
    theirs. A file without a name: nothing stays in /dev/shm, however they end. SystemExit if the machine has less."""

    def __init__(self, layout, count, copied_fd=None):
        record = np.dtype([(name, dtype, shape) for name, (shape, dtype) in layout.items()], align=True)
        if copied_fd is None and (size := count * record.itemsize) > (free := available_memory()):
            parts = ", ".join(f"{name} {count * record[name].itemsize / 2**20:.0f}" for name in layout)
            found = f"{size / 2**20:.0f} MiB of shared memory ({parts}), and {free / 2**20:.0f} MiB are available"
            sys.exit(f"error: {count} unrolls take {found}: use fewer --num-actors, --envs-per-actor or --num-steps")
        self.layout, self.count = layout, count
        self.fd = copied_fd.detach() if copied_fd else os.memfd_create("unrolls")
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, count * record.itemsize)
        records = np.frombuffer(mmap.mmap(self.fd, 0), record)
        super().__init__({name: records[name] for name in layout})

    def __reduce__(self):
        return SharedMemory, (self.layout, self.count, DupFd(self.fd))

    def record(self, i):
        return {name: array[i, ...] for name, array in self.items()}


def flat_weights(module):
    return nn.utils.parameters_to_vector(module.parameters()).detach().cpu().numpy()


def sample(logits, generator):
    """Actions (B,) by logits (B, A); without a generator the likeliest."""
    require_finite(policy_logits=logits)
    if generator is None:
        return logits.argmax(-1)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


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
        code = getattr(error, "code", None)  # of sys.exit
        pipe.send(code.removeprefix("error: ") if isinstance(code, str) else traceback.format_exc())


class Actors:
    """The asynchronous queue: slots go out to `num_actors` processes, with the tasks that deal(slot) writes into them,
    and come back with unrolls, while the learner learns. With 0 processes it fills them itself, in turn.

    make_actor(version, index) -> Actor. `batch` waits for `batch_slots` full slots, takes the oldest and returns their
    unrolls side by side; `publish` hands out new weights. `max_lag`: in no batch is an unroll whose weights are more
    than so many updates old. For that a slot counts as old as the weights when it was handed out, there are at most
    batch_slots (max_lag + 1), and a batch waits for old slots where the others would make those too old. Nothing is
    ever dropped. An actor that raised, died or does not answer is a SystemExit.
    """

    TIMEOUT_S = 600  # for an actor's start, and for any one unroll
    AHEAD = 100  # slots that an actor has at most: so many numbers go into its pipe without a reader

    def __init__(self, make_actor, layout, num_actors, batch_slots, max_lag, deal=lambda slot: None):
        self.make_actor, self.layout, self.num_actors, self.deal = make_actor, layout, num_actors, deal
        self.batch_slots, self.max_lag = batch_slots, max_lag
        slots = num_actors + 2 * batch_slots if num_actors else batch_slots  # a batch, one per actor, a batch to come
        self.num_slots = slots if max_lag is None else min(slots, batch_slots * (max_lag + 1))
        self.actor, self.actor_state, self.processes = None, None, []

    def start(self, weights, version):
        """Everything acts with `weights` from now on, the version `version`."""
        self.slots, self.board, self.version = SharedMemory(self.layout, self.num_slots), Board(len(weights)), version
        self.board.write(weights, version)
        self.free, self.issued, self.full = [*range(self.num_slots)], {}, []  # numbers; issued: with which version
        self.held, self.since = np.zeros((2, self.num_actors))  # by actor: its slots, when it last did what it has to
        self.clock, self.looked = 0.0, time.monotonic()
        if not self.num_actors:
            self.actor = self.make_actor(version, 0)
            if self.actor_state is not None:
                self.actor.load_state_dict(self.actor_state)
            return
        context = multiprocessing.get_context("spawn")  # a fork would copy locks of torch's threads in any state
        # Actors inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
        for index in range(self.num_actors):
            pipe, remote = context.Pipe()
            args = partial(self.make_actor, version), index, self.slots, self.board, remote
            self.processes.append((context.Process(target=actor_process, args=args), pipe))
            self.processes[-1][0].start()
            remote.close()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.hand_out()

    def issue(self):
        """Takes a free slot, with tasks for its unroll."""
        number = self.free.pop(0)
        self.issued[number] = self.version
        self.deal(self.slots.record(number))
        return number

    def hand_out(self):
        """Slots that are free go to the actors that have the fewest."""
        while self.processes and self.free and self.held.min() < self.AHEAD:
            index, number = self.held.argmin(), self.issue()
            self.held[index] += 1
            with suppress(OSError):  # the actor died: `poll` will say so
                self.processes[index][1].send(number)

    def batch(self, check=lambda: None):
        """Tensors {name: (T or T + 1, environments of batch_slots slots, ...)}. Calls check() while it waits."""
        start = time.perf_counter()
        self.poll(0)
        while not self.ready():
            check()
            self.poll(1)
        waited = time.perf_counter() - start if self.processes else 0.0
        used, self.full = self.full[: self.batch_slots], self.full[self.batch_slots :]
        arrays = {name: np.concatenate([self.slots[name][number] for number in used], axis=1)
                  for name, (shape, _) in self.layout.items() if shape}  # fmt: skip
        self.lags = self.version - self.slots["version"][used]
        self.metrics = {"async/policy_lag_mean": self.lags.mean(), "async/policy_lag_max": self.lags.max(),
                        "async/policy_lag_sent": self.slots["lag_sent"][used].mean(),
                        "async/queue_depth": len(self.full), "async/learner_wait_s": waited,
                        "async/actor_wait_s": self.slots["wait_s"][used].sum(), "async/dropped": 0}  # fmt: skip
        self.free += used
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
        """Takes in what is full, or else waits so long for a slot. SystemExit if one has ended or hangs."""
        if self.actor is not None:
            self.full.append(self.issue())
            return self.actor.fill(self.slots.record(self.full[-1]), self.board)
        ready = connection.wait([pipe for _, pipe in self.processes], seconds)
        now = time.monotonic()
        self.clock, self.looked = self.clock + min(now - self.looked, 60), now  # a Ctrl-Z that stops all is no time-out
        self.since[self.held == 0] = self.clock
        for index, (process, pipe) in enumerate(self.processes):
            name = f"actor {index} (process {process.pid})"
            while pipe in ready and pipe.poll():
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    process.join(2)
                    sys.exit(f"error: {name} died with exit code {process.exitcode}")
                if isinstance(message, str):
                    sys.exit(f"error: actor {index} failed: {message}")
                self.full.append(message)
                self.held[index], self.since[index] = self.held[index] - 1, self.clock
            if self.clock - self.since[index] > self.TIMEOUT_S:
                sys.exit(f"error: {name} hangs: no unroll of it for {self.TIMEOUT_S} s")
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


# End of copy
# Copied from algos/impala_popart.py:Actor
class Actor:
    """Environments and a policy of its own that acts in them as one batch. `unroll` continues where the last ended.

    An unroll has T + 1 rows of E environments: obs[t], its action action[t + 1] and what came of it, reward[t + 1],
    terminated[t], truncated[t], final_obs[t] (which is obs[t + 1] unless the episode ended there); row 0 repeats the
    last row of the unroll before. `core` is the LSTM's state before row 0; episode_return and episode_length count up
    to and with step t.
    """

    def __init__(self, envs, policy, seed, num_steps):
        self.envs, self.policy, self.num_steps, E = envs, policy, num_steps, len(envs.tasks)
        self.generator = torch.Generator().manual_seed(int(seed.generate_state(1)[0]))
        self.weights = np.zeros(sum(p.numel() for p in policy.parameters()), np.float32)  # new ones are one copy:
        nn.utils.vector_to_parameters(torch.from_numpy(self.weights), policy.to_empty(device="cpu").parameters())
        self.row = {"obs": envs.obs.copy(), "starts": np.ones(E, bool), "action": np.zeros(E, np.int64),
                    "reward": np.zeros(E, np.float32)}  # fmt: skip
        self.core = policy.initial_core(E)
        self.totals = {"episode_return": np.zeros(E), "episode_length": np.zeros(E, np.int64)}

    @staticmethod
    def layout(num_steps, num_envs, space, lstm_size):
        """Shapes and types of an unroll's arrays."""
        T, E, obs = num_steps, num_envs, (space.obs_shape, space.obs_dtype)
        rows = {"obs": obs, "starts": ((), bool), "action": ((), np.int64), "reward": ((), np.float32)}
        steps = {"logits": ((space.num_actions,), np.float32), "terminated": ((), bool), "truncated": ((), bool),
                 "final_obs": obs, "episode_return": ((), np.float64), "episode_length": ((), np.int64)}  # fmt: skip
        layout = {"core": ((2, E, lstm_size), np.float32), "tasks": ((1, E), np.int64), "version": ((), np.int64),
                  "lag_sent": ((), np.int64), "wait_s": ((), np.float64)}  # fmt: skip
        layout |= {name: ((T + 1, E, *shape), dtype) for name, (shape, dtype) in rows.items()}
        return layout | {name: ((T, E, *shape), dtype) for name, (shape, dtype) in steps.items()}

    def fill(self, slot, board):
        """An unroll with the newest weights."""
        slot["version"][...] = board.read(self.weights)
        self.unroll(slot)
        slot["lag_sent"][...] = board.memory["version"][0] - slot["version"]

    @torch.inference_mode()
    def unroll(self, slot):
        slot["core"][:], slot["tasks"][:] = self.core.numpy(), self.envs.tasks
        for t in range(self.num_steps):
            self.write(slot, t, self.row)
            inputs = (torch.from_numpy(self.row[name])[None] for name in ("obs", "starts", "action", "reward"))
            logits, _, self.core = self.policy(*inputs, self.core)
            action = sample(logits[0], self.generator).numpy()
            obs, reward, terminated, truncated, info = self.envs.step(action)
            self.totals["episode_return"] += reward
            self.totals["episode_length"] += 1
            step = {"logits": logits[0].numpy(), "terminated": terminated, "truncated": truncated}
            self.write(slot, t, step | info | self.totals)
            ended = terminated | truncated
            for total in self.totals.values():
                total[ended] = 0
            self.row = {"obs": obs, "starts": ended, "action": action, "reward": reward.astype(np.float32)}
        self.write(slot, self.num_steps, self.row)

    def write(self, slot, t, row):
        for name, values in row.items():
            slot[name][t] = values

    def state_dict(self):
        return {"envs": self.envs.state_dict(), "generator": self.generator.get_state(), "row": self.row,
                "core": self.core, "totals": self.totals}  # fmt: skip

    def load_state_dict(self, state):
        """Goes on where that ended, but in new episodes where the environments cannot."""
        self.generator.set_state(state["generator"])
        same = self.envs.load_state_dict(state["envs"])
        for arrays, saved in ((self.row, state["row"]), (self.totals, state["totals"])):
            for name, values in arrays.items():
                values[same] = saved[name].numpy()[same]
        self.row["obs"], self.core[:, same] = self.envs.obs.copy(), state["core"][:, same]


# ---- 6. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


# Copied from algos/impala_popart.py:Stats
class Stats:
    """What came since the last row of metrics.jsonl: episodes that ended, by their raw rewards, and updates."""

    def __init__(self):
        self.total, self.episodes, self.updates = 0, [], []  # episodes: (task, return, length)

    def add(self, batch):
        """The episodes that ended in the unrolls' arrays (T, B)."""
        ended = batch["terminated"] | batch["truncated"]
        columns = batch["tasks"].expand(ended.shape), batch["episode_return"], batch["episode_length"]
        self.episodes += zip(*(column[ended].tolist() for column in columns))
        self.total += int(ended.sum())

    def pop(self, games):
        """Means over the episodes, also by game, and over the updates; of updates' numbers named ..._max the maxima."""
        row = {"charts/episodic_return": math.nan, "charts/episodic_length": math.nan, "charts/episodes": self.total}
        row |= dict(zip(row, np.mean([episode[1:] for episode in self.episodes], axis=0))) if self.episodes else {}
        for task, game in enumerate(games):
            returns = [[episode[1]] for episode in self.episodes if episode[0] == task]
            row[f"tasks/{game}/episodic_return"] = np.mean(returns, axis=0)[0] if returns else math.nan
        for name in self.updates[0]:
            row[name] = (max if name.endswith("_max") else np.mean)([update[name] for update in self.updates])
        self.episodes, self.updates = [], []
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


# Copied from algos/impala_popart.py:Member
class Member(RunLogger):
    """A run whose resumes may change four settings, and whose checkpoint may be another member's: no logs are cut."""

    UNHASHED = (*RunLogger.UNHASHED, "learning_rate", "ent_coef", "rmsprop_eps", "max_grad_norm")
    LOGS = (f"tb/events.out.tfevents.{os.getpid()}",)


# ---- 7. Evaluation ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def evaluate(policy, args, check=lambda: None):
    """Plays args.eval_episodes episodes of each game in environments of their own, seeded by args.eval_seed alone: one
    policy for all, which is not told the game. Returns a row per episode: the game as `level`, raw return, length.
    `check` may end it."""
    E, device, rows = args.eval_episodes, next(policy.parameters()).device, []
    *seeds, action_seed = np.random.SeedSequence(args.eval_seed).spawn(len(args.games) * E + 1)
    generator = torch.Generator(device).manual_seed(int(action_seed.generate_state(1)[0]))
    for task, game in enumerate(args.games):  # in turn: none is played on until the longest of all ends
        with closing(AtariEnvs(args.games, [task] * E, seeds[task * E : (task + 1) * E])) as envs:
            obs, core, running = envs.obs, policy.initial_core(E).to(device), np.ones(E, bool)
            starts, action, reward = np.ones(E, bool), np.zeros(E, np.int64), np.zeros(E, np.float32)
            returns, lengths = np.zeros(E), np.zeros(E, np.int64)
            while running.any() and lengths.max() < args.eval_max_steps:
                check()
                inputs = (torch.from_numpy(array)[None].to(device) for array in (obs, starts, action, reward))
                logits, _, core = policy(*inputs, core)
                action = sample(logits[0], None if args.eval_greedy else generator).cpu().numpy()
                obs, reward, terminated, truncated, _ = envs.step(action)
                returns, lengths = returns + reward * running, lengths + running
                starts, reward = terminated | truncated, reward.astype(np.float32)
                running &= ~starts
        if running.any():
            print(f"note: {running.sum()} episodes of {game} were cut off at --eval-max-steps", file=sys.stderr)
        rows += [{"split": "eval", "level": game, "return": float(total), "length": int(length)}
                 for total, length in zip(returns, lengths)]  # fmt: skip
    return rows


# ---- 8. Training -----------------------------------------------------------------------------------------------------


def make_actor(args, seed, version, index):
    """Actor `index`, with its share of the environments of all actors."""
    E = args.envs_per_actor
    tasks = np.arange(index * E, (index + 1) * E) % len(args.games)  # the games in turn, over all actors
    # By the version too, so that where the episodes of before a resume are lost, others come.
    seed = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, version, index))
    *env_seeds, action_seed = seed.spawn(E + 1)
    with torch.device("meta"):  # no weights yet, and no draws for them
        policy = Policy(SPACE, args.network, args.lstm_size)
    return Actor(AtariEnvs(args.games, tasks, env_seeds), policy, action_seed, args.num_steps)


def train(args):
    with (Member if args.pbt else RunLogger)(args) as run:
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
        # glibc must not hand the activations' memory back after each piece, to fault it in again: thresholds, arenas.
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-8, 1)):
            ctypes.CDLL(None).mallopt(option, value)
        E, games, space = args.envs_per_actor, args.games, SPACE
        agent = Agent(space, len(games), args).to(device)
        optimizer = RMSPropTF(agent.parameters(), args.learning_rate, args.rmsprop_decay, args.rmsprop_eps)
        layout = Actor.layout(args.num_steps, E, space, args.lstm_size)
        options = args.num_actors, args.batch_rollouts // E, args.max_policy_lag
        actors = run.enter_context(closing(Actors(partial(make_actor, args, random.envs), layout, *options)))
        stats, parts = Stats(), {"agent": agent, "optimizer": optimizer, "random": random, "actors": actors}
        stats.latest = {}  # game -> its last mean return
        first_update, global_step, row = run.restore(**parts, stats=stats)

        def test():
            rows = evaluate(agent.policy, args, run.check_signals)
            means = {game: np.mean([row["return"] for row in rows if row["level"] == game]) for game in games}
            by_game = {f"eval/{game}/return_mean": mean for game, mean in means.items()} | human_median("eval", means)
            return run.log_eval(global_step, rows) | by_game | {"eval/return_mean": np.mean([*means.values()])}

        if args.eval_only:
            print(json.dumps(means := test()))
            return means
        actors.start(flat_weights(agent.policy), first_update)

        for update in range(first_update, args.num_updates):
            run.checkpoint(update, global_step, row)
            rate = args.learning_rate * (1 - update / args.num_updates if args.anneal_lr else 1)
            optimizer.param_groups[0].update(lr=rate, eps=args.rmsprop_eps)

            # Collect: the oldest full unrolls of the actors, side by side.
            begun = time.perf_counter()
            batch = actors.batch(run.check_signals)
            stats.add(batch)
            global_step += args.batch_size
            collected = time.perf_counter()

            # ---- PopArt-IMPALA: this block is the method (with vtrace and PopArt.update) ----
            b = {name: tensor.to(device) for name, tensor in batch.items()}
            tasks = b["tasks"][0].clamp(max=agent.num_heads - 1)
            logits, features, _ = agent.policy(b["obs"], b["starts"], b["action"], b["reward"], b["core"])
            normalized = agent.values(features)
            next_normalized = normalized[1:].detach().clone()
            with torch.no_grad():  # what was cut off is worth what its last observation is
                cut, last = agent.last_features(b)
                next_normalized[cut] = agent.values(last)
            rewards = b["reward"][1:].clamp(-1, 1) if args.reward_clip == "unit" else b["reward"][1:]
            loss, loss_parts, values, targets = impala_loss(
                logits[:-1], normalized[:-1], next_normalized, agent.values.mu, agent.values.sigma, tasks,
                b["action"][1:], b["logits"], rewards, b["terminated"], b["truncated"], args.gamma, args.ent_coef,
                args.vf_coef, args.rho_bar, args.rho_bar, args.c_bar,
            )  # fmt: skip
            if args.pixel_control_coef:
                loss_parts["pixel_loss"] = agent.pixel_loss(b, features, cut, last)
                loss = loss + args.pixel_control_coef * loss_parts["pixel_loss"]
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            if not torch.isfinite(grad_norm + loss):
                require_finite(rewards=rewards, logits=logits, values=values, **loss_parts, grad_norm=grad_norm)
            optimizer.step()  # first the network, with the old statistics ...
            if args.popart:
                agent.values.update(targets, tasks)  # ... then these, which leaves all values as they are
            actors.publish(flat_weights(agent.policy))
            # ---- end of the method ----
            require_finite(**dict(agent.named_parameters()), mu=agent.values.mu, nu=agent.values.nu)

            # Log and evaluate.
            loss_parts["grad_norm"] = grad_norm
            losses = zip(loss_parts, torch.stack([*loss_parts.values()]).tolist())
            stats.updates.append({f"losses/{name}": loss for name, loss in losses} | actors.metrics | {
                "perf/collect_s": collected - begun, "perf/update_s": time.perf_counter() - collected,
            })  # fmt: skip
            last, row = update + 1 == args.num_updates, {}
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                begun = time.perf_counter()
                row = test() | {"perf/eval_s": time.perf_counter() - begun}
            if last or row or (update + 1) % args.log_interval == 0:
                done = {"charts/update": update + 1, "charts/learning_rate": rate, "charts/frames": 4 * global_step}
                mu, sigma = agent.values.mu[tasks], agent.values.sigma[tasks]
                normalized = [((x - mu) / sigma).flatten().cpu().numpy() for x in (values, targets)]
                done["losses/explained_variance"] = explained_variance(*normalized)
                for name in ("mu", "sigma") if args.popart else ():
                    done |= {f"popart/{game}/{name}": x for game, x in zip(games, getattr(agent.values, name).tolist())}
                row |= stats.pop(games)
                means = {game: row[f"tasks/{game}/episodic_return"] for game in games}
                stats.latest |= {game: mean for game, mean in means.items() if not math.isnan(mean)}
                run.log(global_step, row | human_median("charts", stats.latest) | done)

        return run.finish(args.num_updates, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
