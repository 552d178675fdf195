"""IMPALA with multi-task PopArt: one agent for many games whose rewards may have any scale.

Papers: Hessel et al. 2018, arXiv:1809.04474 (multi-task PopArt); Espeholt et al. 2018, arXiv:1802.01561 (IMPALA).

  Train:     python algos/impala_popart.py --suite mixed --num-actors 0 --lstm-size 0 --learning-rate 2e-3
             --popart-beta 1e-2 --total-timesteps 1000000
  Atari:     python algos/impala_popart.py --env-id Boxing-v5,Breakout-v5 --network nature --total-timesteps 2000000
  Baselines: the same with --no-popart (IMPALA), or with --no-popart --multi-head (MultiHead-IMPALA)
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)
  PBT:       members with --pbt and a --seed or --exp-name each. A controller ends one by SIGTERM (it saves, and exits
             75), may replace its checkpoints/ by a better member's, and starts it again with other --learning-rate,
             --ent-coef, --rmsprop-eps or --max-grad-norm

Differs from the paper: V-trace takes the value of the true final observation at a truncation, which is no termination.
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
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.reduction import DupFd
from pathlib import Path
from threading import Lock
from typing import Annotated, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

# ---- 1. Arguments ----------------------------------------------------------------------------------------------------


@dataclass
class Args:
    # run
    exp_name: str = "impala_popart"  # folder under run_dir
    seed: int = 1  # all randomness but the evaluation's derives from it
    device: Literal["auto", "cpu", "cuda"] = "auto"  # the learner's (auto: cuda if there is one); actors use the CPU
    deterministic: bool = False  # only deterministic GPU kernels (on a CPU num_actors 0 always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the learner; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of the other arguments>
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
    env_id: Annotated[str, tyro.conf.arg(aliases=("--suite",))] = "mixed"  # suite, or games separated by commas
    num_actors: int = 1  # actor processes; 0: the learner acts itself, and the run repeats to the bit
    envs_per_actor: int = 16  # environments of an actor, stepped and seen by the network as a batch
    max_policy_lag: int | None = None  # updates that an unroll's policy may be behind the one it trains; None: any
    reward_clip: Literal["none", "unit"] = "none"  # unit: learn from rewards clipped to [-1, 1]; returns stay raw

    # algorithm
    total_timesteps: int = 2_000_000  # agent steps, dead autoreset ones included; rounded up to whole updates
    network: Literal["auto", "mlp", "nature", "impala"] = "auto"  # auto: mlp for vectors, the paper's ResNet for images
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
    eval_seed: int = 10_000  # seeds the evaluation episodes, the same for every run and algorithm
    eval_greedy: bool = False  # evaluate the most likely action (--no-eval-greedy: sample, as the paper does)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    games: tuple[str, ...] = field(init=False)
    batch_size: int = field(init=False)
    num_updates: int = field(init=False)

    def __post_init__(self):
        at_least = dict.fromkeys(("envs_per_actor", "num_steps", "batch_rollouts", "total_timesteps", "eval_episodes",
                                  "checkpoint_interval", "keep_checkpoints", "log_interval"), 1)  # fmt: skip
        at_least |= dict.fromkeys(("seed", "num_actors", "max_policy_lag", "lstm_size", "learning_rate", "rmsprop_eps",
                                   "max_grad_norm", "rho_bar", "c_bar", "ent_coef", "vf_coef", "pixel_control_coef",
                                   "eval_interval"), 0)  # fmt: skip
        limits = {name: (low, math.inf) for name, low in at_least.items()}
        limits |= dict.fromkeys(("gamma", "rmsprop_decay", "popart_beta"), (0, 1))
        check_numbers(self, limits | {"eval_seed": (0, 2**64 - 1), "torch_threads": (0, 1024)})
        self.games = parse_games(self.env_id)
        self.batch_size = self.batch_rollouts * self.num_steps
        self.num_updates = -(-self.total_timesteps // self.batch_size)
        E, P, B = self.envs_per_actor, self.num_actors, self.batch_rollouts
        if B % E:
            nearest_fit = max(round(B / E), 1) * E
            raise ValueError(f"--batch-rollouts {B} is no multiple of --envs-per-actor {E}: try {nearest_fit}")
        if self.total_timesteps < self.batch_size:
            raise ValueError(f"--total-timesteps {self.total_timesteps} is less than one update, batch_rollouts {B} x "
                             f"num_steps {self.num_steps} = {self.batch_size}: ask for more")  # fmt: skip
        assign_tasks(self.games, max(P, 1) * E)
        space = shared_space(self.games)[0]
        has_pixels = len(space.obs_shape) == 3
        if self.pixel_control_coef and not (has_pixels and space.obs_dtype == np.uint8):
            raise ValueError(f"--pixel-control-coef {self.pixel_control_coef}: {self.env_id} has no pixels (uint8)")
        if self.network in ("nature", "impala") and not has_pixels:
            raise ValueError(f"--network {self.network} sees images, and {self.env_id} has none: use mlp or auto")
        if self.popart and self.multi_head:
            raise ValueError("--multi-head is the baseline without PopArt, which has its own heads: add --no-popart")
        if self.max_policy_lag is not None and self.num_slots < P:
            raise ValueError(f"--max-policy-lag {self.max_policy_lag} leaves {B // E} x {self.max_policy_lag + 1} = "
                             f"{self.num_slots} unrolls at a time for --num-actors {P}: "
                             f"try {-(-P * E // B) - 1} or fewer actors")  # fmt: skip
        with torch.device("meta"):  # takes no memory
            parameters = sum(p.numel() for p in Agent(space, len(self.games), self).parameters())
        size = 4 * parameters * (5 + P)  # learner: weights, gradients, mean squares, a copy to publish; board; actors
        if size > available_memory():
            raise ValueError(f"--lstm-size {self.lstm_size} makes a network of {parameters / 1e6:.0f} million weights: "
                             f"{size / 2**20:.0f} MiB for the learner and the actors, and "
                             f"{available_memory() / 2**20:.0f} MiB are available")  # fmt: skip

    @property
    def num_slots(self):
        """Unrolls that exist at a time: a batch, one under way in each actor, and a batch to come."""
        batch = self.batch_rollouts // self.envs_per_actor
        slots = self.num_actors + 2 * batch if self.num_actors else batch
        return slots if self.max_policy_lag is None else min(slots, batch * (self.max_policy_lag + 1))

    @property
    def tunable(self):
        """Arguments that a resume of this run may change."""
        return ("learning_rate", "ent_coef", "rmsprop_eps", "max_grad_norm") if self.pbt else ()


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, limits):
    """ValueError that names the first argument outside its limits, {name: (low, high)}, or not finite. None passes."""
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be a number {allowed}")


# ---- 2. Environments -------------------------------------------------------------------------------------------------


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


# Copied from algos/ppo.py:Episodes
class Episodes(gym.Wrapper):
    """Seeds each episode from its own generator and remembers its actions, so that any environment that repeats itself
    can be saved and restored (`get_state`, `set_state`) by playing the unfinished episode again."""

    def __init__(self, env, seed, index=0):
        super().__init__(env)
        self.rng, self.index = np.random.default_rng(seed), index

    def reset(self, *, seed=None, options=None):
        self.episode_seed, self.actions = int(self.rng.integers(2**31)), []
        return self.env.reset(seed=self.episode_seed, options=options)

    def step(self, action):
        self.actions.append(np.array(action))
        try:
            return self.env.step(action)
        except Exception as error:
            where = f"environment {self.index}, step {len(self.actions)} of the episode with seed {self.episode_seed}"
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error

    def get_state(self):
        actions = np.array(self.actions) if self.actions else None
        return {"rng": self.rng.bit_generator.state, "seed": self.episode_seed, "actions": actions}

    def set_state(self, states):
        state = states[self.index]
        self.rng.bit_generator.state, self.episode_seed, self.actions = state["rng"], state["seed"], []
        self.env.reset(seed=self.episode_seed)
        for action in () if state["actions"] is None else np.asarray(state["actions"]):
            self.step(action)


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

SUITES = {
    "mixed": ("CartPole-v1@100", "Acrobot-v1", "CartPole-v1@0.01"),  # returns up to 50,000, about -80, up to 5
    "atari57": tuple(f"{name}-v5" for name in HUMAN_RANDOM),
    "procgen16": ("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist",
                  "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"),
    "dmlab30": (
        "rooms_collect_good_objects_train", "rooms_exploit_deferred_effects_train", "rooms_select_nonmatching_object",
        "rooms_watermaze", "rooms_keys_doors_puzzle", "language_select_described_object",
        "language_select_located_object", "language_execute_random_task", "language_answer_quantitative_question",
        "lasertag_one_opponent_small", "lasertag_three_opponents_small", "lasertag_one_opponent_large",
        "lasertag_three_opponents_large", "natlab_fixed_large_map", "natlab_varying_map_regrowth",
        "natlab_varying_map_randomized", "skymaze_irreversible_path_hard", "skymaze_irreversible_path_varied",
        "psychlab_arbitrary_visuomotor_mapping", "psychlab_continuous_recognition", "psychlab_sequential_comparison",
        "psychlab_visual_search", "explore_object_locations_small", "explore_object_locations_large",
        "explore_obstructed_goals_small", "explore_obstructed_goals_large", "explore_goal_locations_small",
        "explore_goal_locations_large", "explore_object_rewards_few", "explore_object_rewards_many",
    ),
}  # fmt: skip

PACKAGES = {
    "procgen": "pip install --no-deps procgen-mirror==0.10.7 gym3==0.3.3",
    "envpool": "pip install envpool==1.2.5",
    "ale_py": "scripts/run --extra atari, or pip install ale-py==0.12.1 opencv-python-headless==5.0.0.93",
    "deepmind_lab": "build it from github.com/google-deepmind/lab, no package index has it",
}


def human_normalized(game, score):
    """(score - random) / (human - random) of an Atari game; None for other games."""
    low_high = HUMAN_RANDOM.get(game.removeprefix("ALE/").removesuffix("-v5"))
    return low_high and (score - low_high[0]) / (low_high[1] - low_high[0])


def human_median(prefix, means):
    """{tag: median human-normalised score} of the Atari games in {game: mean return}."""
    scores = [human_normalized(game, mean) for game, mean in means.items()]
    scores = [score for score in scores if score is not None]
    return {f"{prefix}/human_normalized_median": np.median(scores)} if scores else {}


def parse_games(env_id):
    """The games of a suite, or of a comma-separated list: Gymnasium ids (also module:id), Atari games of envpool
    (Pong-v5) and of ale-py (ALE/Pong-v5), Procgen games, DMLab-30 levels. GAME@100: its rewards are 100 times as large.
    ValueError for a game that is unknown, listed twice, or without its package."""
    games = SUITES.get(env_id) or tuple(env_id.split(","))
    for game in games:
        if games.count(game) > 1:
            raise ValueError(f"--env-id {env_id}: {game} is listed more than once")
        package_of(game)
        split_scale(game)
    return games


def split_scale(game):
    """GAME@100 -> GAME, 100.0."""
    name, at, scale = game.partition("@")
    with suppress(ValueError):
        if math.isfinite(factor := float(scale if at else 1)):
            return name, factor
    raise ValueError(f"--env-id {game}: what follows @ must be a number, the factor of its rewards")


def package_of(game):
    """The package that plays a game. ValueError: no such game, or its package is missing and how to get it."""
    name = game.partition("@")[0]
    if name in SUITES["procgen16"]:
        package = "procgen"
    elif name in SUITES["dmlab30"]:
        package = "deepmind_lab"
    elif name.startswith("ALE/"):
        package = "ale_py"
    else:
        package = "gymnasium" if ":" in name or name in gym.registry else "envpool"
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"--env-id {game} needs {package}: {PACKAGES[package]}")
    if package == "envpool":
        known = {id for id, (module, *_) in importlib.import_module("envpool").registration.registry.specs.items()
                 if module == "envpool.atari"}  # fmt: skip
        if name not in known:
            known |= {*gym.registry, *SUITES, *SUITES["procgen16"], *SUITES["dmlab30"]}
            raise ValueError(f"--env-id {game}: there is no such game or suite. Nearest: {nearest(name, known)}")
    elif package in ("gymnasium", "ale_py"):
        try:
            importlib.import_module(name.rpartition(":")[0] or package)  # registers its ids
            gym.spec(name.rpartition(":")[2])
        except (gym.error.Error, ImportError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"--env-id {game}: {reason}. Nearest: {nearest(name, gym.registry)}") from error
    return package


class Space(NamedTuple):
    """What an agent has to know of a game."""

    obs_shape: tuple
    obs_dtype: type
    num_actions: int
    frame_skip: int = 1  # emulator frames per step


@functools.cache
def game_space(game):
    package = package_of(game)
    if package in ("envpool", "ale_py"):
        return Space((4, 84, 84), np.uint8, 18, 4)
    if package == "procgen":
        return Space((64, 64, 3), np.uint8, 15)
    if package == "deepmind_lab":
        return Space((72, 96, 3), np.uint8, 9, 4)
    try:
        with closing(make_env(game)) as env:
            obs_space, actions = env.observation_space, env.action_space
    except Exception as error:  # a package of its own is missing, its observations cannot be flattened, ...
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        raise ValueError(f"--env-id {game} cannot be made: {reason}") from error
    if not isinstance(actions, gym.spaces.Discrete):
        raise ValueError(f"--env-id {game}: its actions are {actions}; this script takes Discrete")
    return Space(obs_space.shape, np.uint8 if obs_space.dtype == np.uint8 else np.float32, int(actions.n))


def shared_space(games):
    """The `Space` of an agent for all the games, and the offset of each in a vector observation: several games with
    vectors have a block of it each, zero while another is played, and the actions of the one with the most (beyond its
    own, a game takes them modulo). Games with other observations must be alike: ValueError."""
    spaces = [game_space(game) for game in games]
    if len(games) > 1 and all(len(space.obs_shape) == 1 for space in spaces):
        ends = np.cumsum([space.obs_shape[0] for space in spaces]).tolist()
        space = Space((ends[-1],), np.float32, max(space.num_actions for space in spaces))
        return space, [0, *ends[:-1]]
    for game, space in zip(games, spaces):
        if space[:3] != spaces[0][:3]:
            found = (f"{name} has observations {s.obs_shape} {s.obs_dtype.__name__} and {s.num_actions} actions"
                     for name, s in ((games[0], spaces[0]), (game, space)))  # fmt: skip
            raise ValueError(f"--env-id: one agent needs one kind of game, but {', '.join(found)}")
    return spaces[0], [0] * len(games)


class DMLab(gym.Env):
    """A DMLab-30 level as in Espeholt et al. 2018: 72 x 96 RGB, 9 actions, each for 4 frames. UNTESTED: deepmind_lab
    cannot be installed, only built. It gives no instructions in words. The last frame is hidden: always terminated."""

    ACTIONS = ((0, 0, 0, 1, 0, 0, 0), (0, 0, 0, -1, 0, 0, 0), (0, 0, -1, 0, 0, 0, 0), (0, 0, 1, 0, 0, 0, 0),
               (-20, 0, 0, 0, 0, 0, 0), (20, 0, 0, 0, 0, 0, 0), (-20, 0, 0, 1, 0, 0, 0), (20, 0, 0, 1, 0, 0, 0),
               (0, 0, 0, 0, 1, 0, 0))  # fmt: skip  # look right, look down, strafe right, forward, fire, jump, crouch
    observation_space, action_space = gym.spaces.Box(0, 255, (72, 96, 3), np.uint8), gym.spaces.Discrete(9)

    def __init__(self, level):
        import deepmind_lab

        config = {"width": "96", "height": "72"}
        self.lab = deepmind_lab.Lab(f"contributed/dmlab30/{level}", ["RGB_INTERLEAVED"], config=config)

    def reset(self, *, seed=None, options=None):
        self.lab.reset(seed=seed)
        self.frame = self.lab.observations()["RGB_INTERLEAVED"]
        return self.frame, {}

    def step(self, action):
        reward = self.lab.step(np.array(self.ACTIONS[action], np.intc), num_steps=4)
        if running := self.lab.is_running():
            self.frame = self.lab.observations()["RGB_INTERLEAVED"]
        return self.frame, reward, not running, False, {}

    def close(self):
        self.lab.close()


def make_env(game):
    """One environment with a Box observation, for the games that are stepped one by one."""
    package, name = package_of(game), split_scale(game)[0]
    if package == "deepmind_lab":
        return DMLab(name)
    if package == "ale_py":
        import cv2

        cv2.setNumThreads(0)  # its threads would fight for the cores of other actors
        # Mnih et al. 2015: up to 30 no-ops, 4 frames a step (the wrapper's), the maximum of the last two, 4 stacked.
        env = gym.make(name, frameskip=1, repeat_action_probability=0.0, full_action_space=True)
        return gym.wrappers.FrameStackObservation(gym.wrappers.AtariPreprocessing(env, noop_max=30, frame_skip=4), 4)
    env = gym.make(name, disable_env_checker=True)
    is_array = isinstance(env.observation_space, gym.spaces.Box) and env.observation_space.shape
    return env if is_array else gym.wrappers.FlattenObservation(env)


class SingleEnvs:
    """Environments `index` (their numbers among all), stepped one by one. Where `restart`, the action is ignored and
    the next episode begins: NEXT_STEP autoreset."""

    same_step = False

    def __init__(self, game, index, seeds, space, offset):
        self.envs = [Episodes(make_env(game), seed, i) for i, seed in zip(index.tolist(), seeds)]
        self.obs = np.zeros((len(index), *space.obs_shape), space.obs_dtype)
        shape, self.actions = self.envs[0].observation_space.shape, self.envs[0].action_space
        self.own = self.obs[:, offset : offset + shape[0]] if len(shape) == 1 else self.obs

    def reset(self):
        for i, env in enumerate(self.envs):
            self.own[i] = env.reset()[0]
        return self.obs

    def step(self, actions, restart):
        reward, (terminated, truncated) = np.zeros(len(actions)), np.zeros((2, len(actions)), bool)
        actions = (actions % self.actions.n + self.actions.start).tolist()
        for i, env in enumerate(self.envs):
            if restart[i]:
                self.own[i] = env.reset()[0]
            else:
                self.own[i], reward[i], terminated[i], truncated[i], _ = env.step(actions[i])
        return self.obs, reward, terminated, truncated

    def get_state(self):
        return [env.get_state() for env in self.envs]

    def set_state(self, states):
        for env in self.envs:
            env.set_state(states)

    def close(self):
        for env in self.envs:
            env.close()


class EnvpoolAtari:
    """The same for one Atari game of envpool, which restarts by itself, also one step late. Its episodes end after
    27,000 steps = 108,000 frames (truncated), not with a life. It cannot be saved."""

    same_step = False

    def __init__(self, game, index, seeds, space, offset):
        import envpool

        self.ints = ints = [int(seed.generate_state(1)[0] % 2**31) for seed in seeds]
        self.envs = envpool.make(split_scale(game)[0], env_type="gymnasium", num_envs=len(ints), num_threads=1,
                                 seed=ints, full_action_space=True, use_fire_reset=False)  # fmt: skip

    def reset(self):
        return self.envs.reset()[0]

    def step(self, actions, restart):
        obs, reward, _, truncated, info = self.envs.step(actions)
        return obs, reward, info["terminated"].astype(bool), truncated  # its flag denies a death in the very last step

    def get_state(self):
        return [None] * len(self.ints)

    def close(self):
        self.envs.close()


class ProcgenGame:
    """The same for one Procgen game (easy, all levels), but it restarts in the same step, and its last frame is never
    seen: a time-out looks like a death and counts as one."""

    same_step = True

    def __init__(self, game, index, seeds, space, offset):
        for name in ("gym3", "procgen"):  # bare packages: their __init__ would import the old gym, and imageio
            if name not in sys.modules:
                sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
        vars(sys.modules["gym3"]).setdefault("ToBaselinesVecEnv", object)  # base of a class that nobody uses
        from procgen.env import ProcgenGym3Env

        seed = int(seeds[0].generate_state(1)[0] % 2**31)  # of the game, which draws one for each environment
        self.index = index
        self.env = ProcgenGym3Env(num=len(index), env_name=split_scale(game)[0], num_threads=0, rand_seed=seed,
                                  distribution_mode="easy")  # fmt: skip

    def reset(self):
        return self.env.observe()[1]["rgb"]

    def step(self, actions, restart):
        self.env.act(actions)
        reward, obs, first = self.env.observe()
        return obs["rgb"], reward, first, np.zeros_like(first)

    def get_state(self):
        return [np.frombuffer(bytearray(state), np.uint8) for state in self.env.get_state()]

    def set_state(self, states):
        self.env.set_state([np.asarray(states[i]).tobytes() for i in self.index])

    def close(self):  # by hand: a game that the cyclic garbage collector frees can hang in a lock of cffi
        self.env.close()


class MultiTaskEnvs:
    """Environment i plays games[tasks[i]] all its life; its randomness is seeds[i] (SeedSequences).

    reset() -> obs; step(actions (E,)) -> obs (E, *obs_shape), reward (E,) float64 as the game gives it, terminated,
    truncated, info. Where an episode ends, obs is its true last one; the next step ignores the action, gives the first
    obs of the next episode and reward 0 (NEXT_STEP), and info["valid"] is False there. Procgen alone restarts in the
    same step. info["starts"]: obs is the first of an episode. RunError: a reward or an observation is not finite.
    """

    def __init__(self, games, tasks, seeds):
        self.games, self.tasks, self.num_envs = games, np.asarray(tasks), len(tasks)
        space, offsets = shared_space(games)
        self.obs_shape, self.obs_dtype, self.num_actions, self.frame_skip = space
        self.scale = np.array([split_scale(games[task])[1] for task in self.tasks])
        self.groups = []
        for task in np.unique(self.tasks):
            index = np.flatnonzero(self.tasks == task)
            make = {"envpool": EnvpoolAtari, "procgen": ProcgenGame}.get(package_of(games[task]), SingleEnvs)
            self.groups.append((index, make(games[task], index, [seeds[i] for i in index], space, offsets[task])))
        self.same_step = np.zeros(self.num_envs, bool)
        for index, group in self.groups:
            self.same_step[index] = group.same_step

    def reset(self):
        obs, self.restart = np.zeros((self.num_envs, *self.obs_shape), self.obs_dtype), np.zeros(self.num_envs, bool)
        for index, group in self.groups:
            obs[index] = group.reset()
        return self.checked(obs, np.zeros(self.num_envs))

    def step(self, actions):
        obs, reward = np.zeros((self.num_envs, *self.obs_shape), self.obs_dtype), np.zeros(self.num_envs)
        terminated, truncated = np.zeros((2, self.num_envs), bool)
        for index, group in self.groups:
            try:
                outputs = group.step(actions[index], self.restart[index])
            except Exception as error:
                raise RuntimeError(f"{self.games[self.tasks[index[0]]]}: {error}") from error
            obs[index], reward[index], terminated[index], truncated[index] = outputs
        reward *= self.scale
        info, ended = {"valid": ~self.restart}, terminated | truncated
        info["starts"] = np.where(self.same_step, ended, self.restart)
        self.restart = ended & ~self.same_step
        return self.checked(obs, reward), reward, terminated, truncated, info

    def checked(self, obs, reward):
        bad = ~(abs(reward) <= np.finfo(np.float32).max)  # which the learner takes
        if self.obs_dtype == np.float32:
            bad |= ~np.isfinite(obs.reshape(self.num_envs, -1)).all(1)
        if bad.any():
            i = bad.argmax()
            found = f"reward {reward[i]}, observation {obs[i]}"
            raise RunError(f"environment {i} ({self.games[self.tasks[i]]}) gave what is not finite: {found}")
        return obs

    def state_dict(self):
        """All that the next steps depend on but the actions, to the bit: `restart` (E,) and a state per environment."""
        states = [None] * self.num_envs
        for index, group in self.groups:
            for i, state in zip(index, group.get_state()):
                states[i] = state
        return {"states": states, "restart": self.restart}

    def load_state_dict(self, state):
        """True if all is as it was. False, and nothing done, if envpool plays: it cannot be saved."""
        if any(part is None for part in state["states"]):
            print("note: envpool cannot restore its episodes; all environments start new ones", file=sys.stderr)
            return False
        self.restart = np.asarray(state["restart"]).copy()
        for _, group in self.groups:
            group.set_state(state["states"])
        return True

    def close(self):
        for _, group in self.groups:
            group.close()


def assign_tasks(games, num_envs):
    """Which game each environment plays, in turn: (num_envs,). ValueError: fewer environments than games."""
    if num_envs < len(games):
        raise ValueError(f"{num_envs} environments (num_actors x envs_per_actor) cannot play {len(games)} games: "
                         f"try --envs-per-actor {len(games)}")  # fmt: skip
    return np.arange(num_envs) % len(games)


# ---- 3. Mathematics --------------------------------------------------------------------------------------------------


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


class PopArt(nn.Linear):
    """Normalised values of every task, n = W f + b, with each task's statistics (Hessel et al. 2018, eq. 6, 10, 13).

    forward(features (..., F)) -> n (..., N); the unnormalised value of task i is sigma[i] n[i] + mu[i]. The buffers mu,
    nu (N,) are float64: in float32, nu - mu^2 is 0 where |mu| >> sigma. A MultiHead agent never calls `update`; an
    agent with one head has one task. `second_moment` is what nu averages: "sq-mean", the square of a rollout's mean
    target (eq. 6 to the letter), or "mean-sq", the mean of its squared targets.
    """

    def __init__(self, num_features, num_tasks, beta=3e-4, second_moment="sq-mean"):
        if second_moment not in ("sq-mean", "mean-sq"):
            raise ValueError(f"second_moment {second_moment!r}: give 'sq-mean' or 'mean-sq'")
        super().__init__(num_features, num_tasks)
        self.beta, self.second_moment = beta, second_moment
        self.register_buffer("mu", torch.zeros(num_tasks, dtype=torch.float64))
        self.register_buffer("nu", torch.ones(num_tasks, dtype=torch.float64))

    @property
    def sigma(self):
        return (self.nu - self.mu**2).clamp(min=0).sqrt().clamp(1e-4, 1e6)

    @torch.no_grad()
    def update(self, targets, tasks, valid=None):
        """Folds each rollout's mean of `targets` (T, B) into the statistics of its task, tasks (B,), in the order of
        the batch; then rescales W and b so that no task's value changes (eq. 13: once for all rollouts, as its steps
        telescope). Targets where `valid` (T, B) is False do not count."""
        targets = torch.as_tensor(targets, dtype=torch.float64, device=self.mu.device)
        valid = torch.as_tensor(True if valid is None else valid, device=self.mu.device).bool().expand(targets.shape)
        targets, count = targets.where(valid, 0), valid.sum(0)
        means, squares = targets.sum(0) / count, (targets**2).sum(0) / count
        squares = means**2 if self.second_moment == "sq-mean" else squares
        mu, nu, touched = self.mu.tolist(), self.nu.tolist(), set()
        rollouts = zip(torch.as_tensor(tasks).tolist(), count.tolist(), means.tolist(), squares.tolist())
        for i, rows, mean, square in rollouts:
            if rows:
                mu[i] = (1 - self.beta) * mu[i] + self.beta * mean
                nu[i] = (1 - self.beta) * nu[i] + self.beta * square
                touched.add(i)
        old_mu, old_sigma = self.mu.clone(), self.sigma
        self.mu.copy_(torch.tensor(mu, dtype=torch.float64))  # in place: buffers may be shared
        self.nu.copy_(torch.tensor(nu, dtype=torch.float64))
        i = torch.tensor(sorted(touched), dtype=torch.long, device=self.mu.device)
        w, b, sigma = self.weight[i].double(), self.bias[i].double(), self.sigma[i]
        self.weight[i] = ((old_sigma[i] / sigma)[:, None] * w).to(self.weight)
        self.bias[i] = ((old_sigma[i] * b + (old_mu[i] - self.mu[i])) / sigma).to(self.bias)


def impala_loss(logits, normalized, mu, sigma, tasks, actions, behaviour_logits, rewards, terminated, truncated, valid,
                gamma, ent_coef, vf_coef, rho_bar=1.0, pg_rho_bar=1.0, c_bar=1.0):  # fmt: skip
    """The actor-critic loss (Hessel et al. 2018, eq. 11 and 12) as a sum over the steps (T, B) that are `valid`.

    Logits (T, B, A); `normalized` is PopArt's output (T+1, B, N): its row t+1 belongs to the observation step t led
    to. mu, sigma (N,) before their update; tasks (B,). Returns the loss, its parts, and V and G^v (T, B), unnormalised.
    """
    n = normalized.gather(-1, tasks.expand(normalized.shape[:2])[..., None]).squeeze(-1)
    mu, sigma = mu[tasks], sigma[tasks]
    values = sigma * n.detach() + mu
    log_pi = logits.log_softmax(-1)
    logprob, behaviour_logprob = (x.gather(-1, actions[..., None]).squeeze(-1)
                                  for x in (log_pi, behaviour_logits.log_softmax(-1)))  # fmt: skip
    log_rhos = logprob.detach() - behaviour_logprob
    targets, advantages = vtrace(log_rhos, rewards, values[:-1], values[1:], terminated, truncated, gamma, rho_bar,
                                 pg_rho_bar, c_bar)  # fmt: skip
    value_loss = 0.5 * (((targets - mu) / sigma - n[:-1]) ** 2 * valid).sum()
    policy_loss = -(advantages / sigma * logprob * valid).sum()  # (G^pi - mu) / sigma - n = (G^pi - V) / sigma
    entropy = -((log_pi.exp() * log_pi).sum(-1) * valid).sum()
    loss = policy_loss + vf_coef * value_loss - ent_coef * entropy
    with torch.no_grad():
        count = valid.sum().clamp(min=1)
        approx_kl = ((log_rhos.exp() - 1 - log_rhos) * valid).sum() / count
        clipfrac = ((log_rhos.exp() > rho_bar) * valid).sum() / count
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy / count, "approx_kl": approx_kl,
             "clipfrac": clipfrac}  # fmt: skip
    return loss, parts, values[:-1], targets


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
    """Action values of every 4x4 cell of the image (Hessel et al. 2018, appendix): features (..., F) -> (..., A, h, w).

    72x96 pixels have 18x24 cells, 64x64 have 16x16; of 84x84, the central 80x80 have 20x20. Only the learner runs it.
    """

    def __init__(self, num_features, num_actions, height, width):
        super().__init__()
        if min(height, width) < 32:
            raise ValueError(f"pixel control needs images of at least 32x32 pixels, not {height}x{width}")
        rows, columns = pixel_cells(height, width)
        self.seed = (rows - 6) // 2, (columns - 6) // 2  # + 2 in the first deconvolution, 2x + 2 in the second
        self.hidden = nn.Linear(num_features, 32 * math.prod(self.seed))
        self.deconv = nn.ConvTranspose2d(32, 32, 3)
        self.value, self.advantage = (nn.ConvTranspose2d(32, n, 4, 2) for n in (1, num_actions))

    def forward(self, features):
        x = self.hidden(features).relu().reshape(-1, 32, *self.seed)
        x = self.deconv(x).relu()
        advantage = self.advantage(x)
        q = self.value(x) + advantage - advantage.mean(1, keepdim=True)
        return q.reshape(*features.shape[:-1], *q.shape[1:])


def pixel_cells(height, width):
    """The grid of 4x4 cells that the deconvolutions can make: even numbers, of the image or of its centre."""
    return tuple(2 * (size // 8) for size in (height, width))


def pixel_rewards(frames):
    """uint8 frames (T+1, B, C, H, W), the newest alone of a stack -> mean |change| per cell in [0, 1] (T, B, h, w)."""
    rows, columns = pixel_cells(*frames.shape[-2:])
    top, left = (frames.shape[-2] - 4 * rows) // 2, (frames.shape[-1] - 4 * columns) // 2
    frames = frames[..., top : top + 4 * rows, left : left + 4 * columns]
    changes = torch.maximum(frames[1:], frames[:-1]) - torch.minimum(frames[1:], frames[:-1])  # bytes have no sign
    return F.avg_pool2d(changes.float().mean(2), 4) / 255


def pixel_control_loss(q, rewards, actions, terminated, truncated, valid, starts, gamma=0.9):
    """Half the squared errors of multi-step Q-learning (Jaderberg et al. 2017, eq. 3), summed over cells, valid steps.

    q (T+1, B, A, h, w); rewards (T, B, h, w) accumulate to the episode's or the rollout's end, then the best action
    value stands in, but nothing after a termination; the rest (T, B). Where `starts` says that step t led to the first
    frame of another episode (an environment that resets in the same step), the change of the picture is no reward.
    """
    terminated, truncated, valid, starts = (x[..., None, None] for x in (terminated, truncated, valid, starts))
    best = q.detach().amax(2)
    rewards = rewards.where(~starts, 0)
    # On policy, the V-trace target is the n-step return.
    targets = vtrace(torch.zeros_like(rewards), rewards, best[:-1], best[1:], terminated, truncated, gamma)[0]
    index = actions[..., None, None, None].expand(-1, -1, 1, *q.shape[-2:])
    return 0.5 * ((targets - q[:-1].gather(2, index).squeeze(2)) ** 2 * valid).sum()


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


relu = partial(nn.ReLU, inplace=True)  # behind a convolution or a linear layer, which need not keep their output


# Copied from algos/ppo_plr.py:ResidualBlock
class ResidualBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.convs = nn.Sequential(nn.ReLU(), layer_init(nn.Conv2d(channels, channels, 3, padding=1)), relu(),
                                   layer_init(nn.Conv2d(channels, channels, 3, padding=1)))  # fmt: skip

    def forward(self, x):
        return x + self.convs(x)


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

    forward(obs (T, B, *obs_shape), starts, last_action, last_reward (T, B), core (2, B, H)) -> logits (T, B, A),
    features (T, B, F), core. `starts` marks the first observations of episodes: there the LSTM is cleared, and last
    action and reward are none. `core` is the LSTM's state before row 0, then after the last row.
    """

    def __init__(self, space, network="auto", lstm_size=256):
        super().__init__()
        obs_shape, _, num_actions, _ = space
        self.channels_last = len(obs_shape) == 3 and obs_shape[-1] < obs_shape[0]
        self.num_actions, self.lstm_size = num_actions, lstm_size
        if network == "auto":
            network = "impala" if len(obs_shape) == 3 else "mlp"
        if network == "mlp":
            layers = [nn.Flatten(), layer_init(nn.Linear(math.prod(obs_shape), 256)), relu()]
            size = 256
        else:
            height, width, channels = obs_shape if self.channels_last else (*obs_shape[1:], obs_shape[0])
            if network == "nature":
                layers = [layer_init(nn.Conv2d(channels, 32, 8, 4)), relu(), layer_init(nn.Conv2d(32, 64, 4, 2)),
                          relu(), layer_init(nn.Conv2d(64, 64, 3, 1)), relu()]  # fmt: skip
            else:
                layers = []
                for before, after in ((channels, 16), (16, 32), (32, 32)):
                    layers += [layer_init(nn.Conv2d(before, after, 3, padding=1)), nn.MaxPool2d(3, 2, padding=1),
                               ResidualBlock(after), ResidualBlock(after)]  # fmt: skip
                layers.append(nn.ReLU())
            layers.append(nn.Flatten())
            try:
                size = nn.Sequential(*layers)(torch.zeros(1, channels, height, width)).shape[1]
            except RuntimeError:
                raise ValueError(f"--network {network} needs larger images than {height}x{width}: use impala") from None
        self.torso = nn.Sequential(*layers, layer_init(nn.Linear(size, 256)), relu())
        self.lstm = LSTM(256 + num_actions + 1, lstm_size) if lstm_size else None
        self.num_features = lstm_size or 256
        self.head = layer_init(nn.Linear(self.num_features, num_actions), 0.01)

    def forward(self, obs, starts, last_action, last_reward, core):
        flat = obs.flatten(0, 1)
        if flat.dim() == 4:
            flat = flat.permute(0, 3, 1, 2) if self.channels_last else flat
            flat = flat.to(torch.float32, memory_format=torch.channels_last)  # up to twice as fast on a CPU
        if obs.dtype == torch.uint8:
            flat = flat.float().div_(255)
        features = self.torso(flat).unflatten(0, starts.shape)
        if self.lstm is not None:
            known = ~starts[..., None]
            last_action = F.one_hot(last_action, self.num_actions) * known
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
        if args.pixel_control_coef:
            height, width = space.obs_shape[:2] if self.policy.channels_last else space.obs_shape[1:]
            self.pixels = PixelControlHead(size, space.num_actions, height, width)

    def pixel_loss(self, b, features):
        frames = b["obs"].permute(0, 1, 4, 2, 3) if self.policy.channels_last else b["obs"][:, :, -1:]  # of the stack
        return pixel_control_loss(self.pixels(features), pixel_rewards(frames), b["action"][1:], b["terminated"],
                                  b["truncated"], b["valid"], b["starts"][1:])  # fmt: skip


def sample(logits, generator):
    """Actions (B,) by logits (B, A); without a generator the likeliest."""
    if not torch.isfinite(logits.sum()):
        require_finite(policy_logits=logits)
    if generator is None:
        return logits.argmax(-1)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


# ---- 5. Actors -------------------------------------------------------------------------------------------------------


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

    def __init__(self, size):
        self.memory = SharedMemory({"sequence": ((), np.int64), "weights": ((size,), np.float32)}, 1)

    @property
    def version(self):
        return int(self.memory["sequence"][0]) // 2

    def write(self, weights, version):
        sequence = self.memory["sequence"]
        sequence[0] = 2 * version - 1  # odd: being written
        self._fence()
        self.memory["weights"][0] = weights
        self._fence()
        sequence[0] = 2 * version

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

    # Copied from curricula/sync.py:SyncQueue._fence
    @staticmethod
    def _fence():
        """Memory accesses before it stay before those after it: a lock's release, then its acquisition."""
        lock = Lock()
        lock.acquire()
        lock.release()
        lock.acquire()


def flat_weights(module):
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()]).cpu().numpy()


class Actor:
    """Environments and a policy of its own that acts in them as one batch. `unroll` continues where the last ended.

    An unroll has T + 1 rows of E environments: obs[t], its action action[t + 1] and what came of it, reward[t + 1],
    terminated[t], truncated[t]; row 0 repeats the last row of the unroll before. `valid` is False where the action was
    ignored. `core` is the LSTM's state before row 0; episode_return and episode_length count up to and with step t.
    """

    def __init__(self, envs, policy, seed, num_steps):
        self.envs, self.policy, self.num_steps, E = envs, policy, num_steps, envs.num_envs
        self.generator = torch.Generator().manual_seed(int(seed.generate_state(1)[0]))
        shapes = {name: parameter.shape for name, parameter in policy.named_parameters()}
        self.weights = np.zeros(sum(map(math.prod, shapes.values())), np.float32)
        views = torch.from_numpy(self.weights).split([*map(math.prod, shapes.values())])  # new weights are one copy
        policy.load_state_dict({name: v.view(shapes[name]) for name, v in zip(shapes, views)}, assign=True)
        self.row = {"obs": envs.reset(), "starts": np.ones(E, bool), "action": np.zeros(E, np.int64),
                    "reward": np.zeros(E, np.float32)}  # fmt: skip
        self.core = policy.initial_core(E)
        self.totals = {"episode_return": np.zeros(E), "episode_length": np.zeros(E, np.int64)}

    @staticmethod
    def layout(num_steps, num_envs, space, lstm_size):
        """Shapes and types of an unroll's arrays."""
        T, E, (obs_shape, obs_dtype, num_actions, _) = num_steps, num_envs, space
        rows = {"obs": (obs_shape, obs_dtype), "reward": ((), np.float32)}
        rows |= {"starts": ((), bool), "action": ((), np.int64)}
        steps = {"logits": ((num_actions,), np.float32), "episode_return": ((), np.float64)}
        steps |= {"episode_length": ((), np.int64)}
        steps |= dict.fromkeys(("terminated", "truncated", "valid"), ((), bool))
        layout = {name: ((T + 1, E, *shape), dtype) for name, (shape, dtype) in rows.items()}
        layout |= {name: ((T, E, *shape), dtype) for name, (shape, dtype) in steps.items()}
        layout |= {"core": ((2, E, lstm_size), np.float32), "tasks": ((1, E), np.int64)}
        return layout | {"version": ((), np.int64), "lag_sent": ((), np.int64), "wait_s": ((), np.float64)}

    def fill(self, slot, board):
        """An unroll with the newest weights."""
        slot["version"][...] = board.read(self.weights)
        self.unroll(slot)
        slot["lag_sent"][...] = board.version - slot["version"]

    @torch.inference_mode()
    def unroll(self, slot):
        slot["core"][:], slot["tasks"][:] = self.core.numpy(), self.envs.tasks
        for t in range(self.num_steps):
            self.write(slot, t, self.row)
            inputs = (torch.from_numpy(self.row[name])[None] for name in ("obs", "starts", "action", "reward"))
            logits, _, self.core = self.policy(*inputs, self.core)
            action = sample(logits[0], self.generator).numpy()
            obs, reward, terminated, truncated, info = self.envs.step(action)
            valid, ended = info["valid"], terminated | truncated
            self.totals["episode_return"] += np.where(valid, reward, 0)
            self.totals["episode_length"] += valid
            step = {"logits": logits[0].numpy(), "terminated": terminated, "truncated": truncated, "valid": valid}
            self.write(slot, t, step | self.totals)
            for total in self.totals.values():
                total[ended] = 0
            self.row = {"obs": obs, "starts": info["starts"], "action": action, "reward": reward.astype(np.float32)}
        self.write(slot, self.num_steps, self.row)

    def write(self, slot, t, row):
        for name, array in row.items():
            slot[name][t] = array

    def state_dict(self):
        return {"envs": self.envs.state_dict(), "generator": self.generator.get_state(), "row": self.row,
                "core": self.core, "totals": self.totals}  # fmt: skip

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        if self.envs.load_state_dict(state["envs"]):  # else they start new episodes
            self.row, self.totals = ({name: tensor.numpy().copy() for name, tensor in state[key].items()}
                                     for key in ("row", "totals"))  # fmt: skip
            self.core = state["core"].clone()


def put(pipe, number):
    os.write(pipe.fileno(), number.to_bytes(4, "little"))  # 4 bytes go through a pipe whole, without a lock


def take(pipe):
    data = os.read(pipe.fileno(), 4)
    if not data:
        raise EOFError("the other end of the pipe is closed")
    return int.from_bytes(data, "little")


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


# Copied from algos/ppo_plr.py:keep_freed_memory
def keep_freed_memory():
    """Keeps glibc from handing the activations' memory back to the kernel after each piece, to fault it in again."""
    with suppress(OSError, AttributeError):  # another C library has no such switch, nor the need
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-8, 1)):  # mmap threshold, trim threshold, arenas
            mallopt(option, value)


# ---- 6. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


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


class GameStats:
    """Finished episodes from raw rewards, over all games and by game."""

    def __init__(self, games):
        self.games, self.all, self.by_game = games, EpisodeStats(0), {game: EpisodeStats(0) for game in games}
        self.latest = {}  # game -> its last mean return

    def update(self, batch):
        """The unrolls' arrays (T, B)."""
        ended = (batch["terminated"] | batch["truncated"]) & batch["valid"]
        columns = batch["tasks"].expand(ended.shape), batch["episode_return"], batch["episode_length"]
        for task, *episode in zip(*(column[ended].tolist() for column in columns)):
            self.all.add(*episode)
            self.by_game[self.games[task]].add(*episode)
        self.all.dead += int((~batch["valid"]).sum())

    def pop(self):
        """Means over the episodes that finished since the last call; the human-normalised score is by the latest."""
        returns = {game: stats.pop()["charts/episodic_return"] for game, stats in self.by_game.items()}
        self.latest |= {game: value for game, value in returns.items() if not math.isnan(value)}
        row = self.all.pop() | {f"tasks/{game}/episodic_return": value for game, value in returns.items()}
        return row | human_median("charts", self.latest)

    def state_dict(self):
        by_game = {game: stats.state_dict() for game, stats in self.by_game.items()}
        return {"all": self.all.state_dict(), "by_game": by_game, "latest": self.latest}

    def load_state_dict(self, state):
        self.all.load_state_dict(state["all"])
        self.latest = state["latest"]
        for game, stats in self.by_game.items():
            stats.load_state_dict(state["by_game"][game])


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


# ---- 7. Evaluation ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def evaluate(policy, args):
    """Plays args.eval_episodes episodes of each game in environments of their own, seeded by args.eval_seed alone: one
    policy for all, which is not told the game. Returns a row per episode: the game as `level`, raw return, length."""
    E, device, rows = args.eval_episodes, next(policy.parameters()).device, []
    *seeds, action_seed = np.random.SeedSequence(args.eval_seed).spawn(len(args.games) * E + 1)
    generator = torch.Generator(device).manual_seed(int(action_seed.generate_state(1)[0]))
    for task, game in enumerate(args.games):  # in turn: none is played on until the longest of all ends
        with closing(MultiTaskEnvs(args.games, [task] * E, seeds[task * E : (task + 1) * E])) as envs:
            obs, core, running = envs.reset(), policy.initial_core(E).to(device), np.ones(E, bool)
            starts, action, reward = np.ones(E, bool), np.zeros(E, np.int64), np.zeros(E, np.float32)
            returns, lengths = np.zeros(E), np.zeros(E, np.int64)
            while running.any():
                inputs = (torch.from_numpy(array)[None].to(device) for array in (obs, starts, action, reward))
                logits, _, core = policy(*inputs, core)
                action = sample(logits[0], None if args.eval_greedy else generator).cpu().numpy()
                obs, reward, terminated, truncated, info = envs.step(action)
                returns, lengths = returns + reward * running, lengths + running
                running &= ~(terminated | truncated)
                starts, reward = info["starts"], reward.astype(np.float32)
        rows += [{"split": "eval", "level": game, "return": float(total), "length": int(length)}
                 for total, length in zip(returns, lengths)]  # fmt: skip
    return rows


def summarize(rows):
    """Means of evaluation rows by game and over all; of Atari games also the median human-normalised score."""
    returns = {}
    for row in rows:
        returns.setdefault(row["level"], []).append(row["return"])
    means = {game: np.mean(values) for game, values in returns.items()}
    summary = {"eval/return_mean": np.mean([*means.values()]), "eval/length_mean": np.mean([r["length"] for r in rows])}
    summary |= {f"eval/{game}/return_mean": mean for game, mean in means.items()}
    return summary | human_median("eval", means)


# ---- 8. Training -----------------------------------------------------------------------------------------------------


def make_actor(args, seed, version, index):
    """Actor `index`, with its share of the environments of all actors."""
    E = args.envs_per_actor
    tasks = assign_tasks(args.games, max(args.num_actors, 1) * E)[index * E : (index + 1) * E]
    # By the version too, so that where the episodes of before a resume are lost, others come.
    seed = np.random.SeedSequence(seed.entropy, spawn_key=(*seed.spawn_key, version, index))
    *env_seeds, action_seed = seed.spawn(E + 1)
    envs = MultiTaskEnvs(args.games, tasks, env_seeds)
    with torch.device("meta"):  # no weights yet, and no draws for them
        policy = Policy(shared_space(args.games)[0], args.network, args.lstm_size)
    return Actor(envs, policy, action_seed, args.num_steps)


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
    E, games, space = args.envs_per_actor, args.games, shared_space(args.games)[0]
    agent = Agent(space, len(games), args).to(device)
    optimizer = RMSPropTF(agent.parameters(), args.learning_rate, args.rmsprop_decay, args.rmsprop_eps)
    stats, window = GameStats(games), Window()
    actors = Actors(
        partial(make_actor, args, random.envs), Actor.layout(args.num_steps, E, space, args.lstm_size),
        args.num_actors, args.num_slots, args.batch_rollouts // E, args.max_policy_lag,
    )  # fmt: skip
    parts = {"agent": agent, "optimizer": optimizer, "random": random, "actors": actors, "stats": stats,
             "window": window}  # fmt: skip
    first_update, global_step, row = 0, 0, {}

    def snapshot(update):
        state = {name: part.state_dict() for name, part in parts.items()}
        return state | {"update": update, "global_step": global_step, "row": row, "next_obs": None}

    with run, closing(actors):
        # Copied from algos/ppo.py:region(restore)
        state = run.restore(parts)
        if state is not None:
            first_update, global_step, row = state["update"], state["global_step"], state["row"]
            for name, part in parts.items():
                part.load_state_dict(state[name])
        # End of copy
        if args.eval_only:
            rows = evaluate(agent.policy, args)
            run.log_eval(global_step, rows)
            print(json.dumps(summarize(rows)))
            return summarize(rows)
        actors.start(flat_weights(agent.policy), first_update)

        for update in range(first_update, args.num_updates):
            run.checkpoint(snapshot(update), due=update > first_update and update % args.checkpoint_interval == 0)
            rate = args.learning_rate * (1 - update / args.num_updates if args.anneal_lr else 1)
            optimizer.param_groups[0].update(lr=rate, eps=args.rmsprop_eps)
            clock = Stopwatch()

            # Collect: the oldest full unrolls of the actors, side by side.
            batch = actors.batch()
            stats.update(batch)
            global_step += int(batch["valid"].sum())
            clock.lap("collect")

            # ---- PopArt-IMPALA: this block is the method (with vtrace and PopArt.update) ----
            b = {name: tensor.to(device) for name, tensor in batch.items()}
            tasks = b["tasks"][0].clamp(max=agent.num_heads - 1)
            logits, features, _ = agent.policy(b["obs"], b["starts"], b["action"], b["reward"], b["core"])
            rewards = b["reward"][1:].clamp(-1, 1) if args.reward_clip == "unit" else b["reward"][1:]
            loss, loss_parts, values, targets = impala_loss(
                logits[:-1], agent.values(features), agent.values.mu, agent.values.sigma, tasks, b["action"][1:],
                b["logits"], rewards, b["terminated"], b["truncated"], b["valid"], args.gamma, args.ent_coef,
                args.vf_coef, args.rho_bar, args.rho_bar, args.c_bar,
            )  # fmt: skip
            if args.pixel_control_coef:
                loss_parts["pixel_loss"] = agent.pixel_loss(b, features)
                loss = loss + args.pixel_control_coef * loss_parts["pixel_loss"]
            optimizer.zero_grad()
            loss.backward()
            grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            if not torch.isfinite(grad_norm + loss):
                require_finite(rewards=rewards, logits=logits, values=values, **loss_parts, grad_norm=grad_norm)
            optimizer.step()  # first the network, with the old statistics ...
            if args.popart:
                agent.values.update(targets, tasks, b["valid"])  # ... then these, which leaves all values as they are
            actors.publish(flat_weights(agent.policy))
            # ---- end of the method ----
            require_finite(**dict(agent.named_parameters()), mu=agent.values.mu, nu=agent.values.nu)
            clock.lap("update")

            # Log and evaluate.
            loss_parts["grad_norm"] = grad_norm
            losses = zip(loss_parts, torch.stack([*loss_parts.values()]).tolist())
            window.add({f"losses/{name}": loss for name, loss in losses} | actors.metrics
                       | {f"perf/{name}_s": seconds for name, seconds in clock.total.items()})  # fmt: skip
            last, row = update + 1 == args.num_updates, {}
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                rows = evaluate(agent.policy, args)
                run.log_eval(global_step, rows)
                clock.lap("eval")
                row = summarize(rows) | {"perf/eval_s": clock.total["eval"]}
            if last or row or (update + 1) % args.log_interval == 0:
                done = {"charts/update": update + 1, "charts/learning_rate": rate, "perf/dead_steps": stats.all.dead,
                        "charts/frames": global_step * space.frame_skip}  # fmt: skip
                mu, sigma = agent.values.mu[tasks], agent.values.sigma[tasks]
                normalized = [((x - mu) / sigma)[b["valid"]].cpu().numpy() for x in (values, targets)]
                done["losses/explained_variance"] = explained_variance(*normalized)
                for name in ("mu", "sigma") if args.popart else ():
                    statistics = zip(games, getattr(agent.values, name).tolist())
                    done |= {f"popart/{game}/{name}": value for game, value in statistics}
                run.log(global_step, row | window.pop() | stats.pop() | done, update + 1)

        # Copied from algos/ppo.py:region(finish)
        run.checkpoint(snapshot(args.num_updates), due=True)
        names = {key: value for key, value in row.items() if key.startswith("eval")}
        return run.finish({"global_step": global_step, "wall_s": run.elapsed()} | names)
        # End of copy


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
