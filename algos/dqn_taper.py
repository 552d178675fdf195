"""Deep Q-learning of many tasks from one stream of experience, with task-prioritized experience replay (TaPER).

Method: Kompella, MacGlashan, Wurman, Stone, "A task-prioritized experience replay algorithm for reinforcement
learning", patents US 12,277,194 B2 and JP 7602027 B2 (Sony). It is patented and in force: ask before you use it in a
product. Also van Hasselt et al. 2016, arXiv:1509.06461 (double Q-learning, the default);
Schaul et al. 2016, arXiv:1511.05952 (PER, a baseline).

  Train:     python algos/dqn_taper.py --env-id two-rooms-rare --total-timesteps 100000
  Baselines: the same with --replay uniform, per, taper_td (TD errors as priorities) or taper_shuffled (a control)
  MiniGrid:  python algos/dqn_taper.py --env-id MiniGrid-DoorKey-5x5-v0 --episode-length 100 --gamma 0.95
  Crafter:   python algos/dqn_taper.py --env-id crafter --episode-length 500 --gamma 0.97 --hidden-size 512
             --buffer-size 20000 --checkpoint-interval 5 --eval-interval 0 --eval-episodes 2
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: two-rooms-rare by the first command, seeds 1 to 3: all four tasks from all 40 starts, at 60,000 steps and from
then on. benchmark/suites/taper_grid.toml and taper_minigrid.toml compare the replays.
Differs from the patent: several environments feed one replay; transitions are marked as soon as the task is achieved,
not at the episode's end; the minibatches of one step are drawn, and their targets computed, before the first is learned
from. Where the patent's formulas are lost, the reading taken stands beside the code.
"""

import atexit
import copy
import difflib
import fcntl
import hashlib
import heapq
import importlib
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import pairwise
from multiprocessing import resource_tracker
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
    exp_name: str = "dqn_taper"  # folder under run_dir
    seed: int = 1  # all randomness but the evaluation's derives from it
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one, else cpu
    deterministic: bool = False  # only deterministic GPU kernels (a CPU run always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the network; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of the other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 20  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 1  # updates between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # environment
    env_id: str = "two-rooms-rare"  # two-rooms-rare, two-rooms-mixed, MiniGrid-..., crafter, or any Gymnasium id
    num_envs: int = 16  # environments that feed the replay
    num_actors: int = 0  # processes that step them; 0: this one, and the run repeats to the bit
    control: Literal["episodic", "continuing"] = "episodic"  # continuing: no reset after T steps
    episode_length: int = 50  # T: steps of an episode; continuing: of the moving window that leads to an achievement

    # behaviour
    behaviour: Literal["uniform", "eps-greedy"] = "uniform"  # eps-greedy: in the values of a task drawn per episode
    start_e: float = 1.0  # epsilon at the start (eps-greedy only, as the next two)
    end_e: float = 0.05  # epsilon at the end
    exploration_fraction: float = 0.5  # share of total_timesteps from start_e to end_e

    # replay
    replay: Literal["uniform", "per", "taper", "taper_td", "taper_shuffled"] = "taper"  # _td: priorities by TD error
    buffer_size: int = 100_000  # transitions: the capacity
    taper_eps: float = 0.01  # priority of a transition that led to no achievement; that of the others is 1
    taper_reading: Literal["first", "last"] = "last"  # what led to an achievement: all up to a task's first or last one
    taper_alpha_start: float = 0.0  # priority exponent at the start: 0 is uniform
    taper_alpha_end: float = 1.0  # and at the end
    taper_alpha_fraction: float = 0.5  # share of total_timesteps from one to the other
    per_alpha: float = 0.6  # priority exponent of --replay per
    per_beta: float = 0.4  # its importance weights' exponent at the start; 1 at the end

    # algorithm
    total_timesteps: int = 100_000  # environment steps
    num_steps: int = 125  # steps per environment and update: what lies between two rows of the log
    learning_starts: int = 1000  # steps before the first gradient step (at least batch_size)
    train_frequency: int = 4  # steps per gradient step
    batch_size: int = 32  # transitions per gradient step, each of which trains every task
    learning_rate: float = 1e-3  # Adam step size
    gamma: float = 0.9  # discount
    target_network_frequency: int = 1000  # steps between updates of the target network
    tau: float = 1.0  # its step towards the network; 1: a copy
    double_q: bool = True  # the network chooses the next action, the target network values it
    separate_networks: bool = False  # a network per task; else a head per task on a shared torso
    hidden_size: int = 128  # units of the two hidden layers (images: of the one after the convolutions)
    max_grad_norm: float = 10.0  # gradient norm limit

    # evaluation
    eval_interval: int = 10  # updates between evaluations; 0: only at the end
    eval_episodes: int = 40  # starts from which each task's greedy policy is evaluated
    eval_seed: int = 10_000  # seeds the starts, the same for every run, task and algorithm
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop

    # derived
    num_updates: int = field(init=False)

    def __post_init__(self):
        positive = ("checkpoint_interval", "keep_checkpoints", "log_interval", "num_envs", "buffer_size", "num_steps",
                    "total_timesteps", "train_frequency", "target_network_frequency", "hidden_size",
                    "eval_episodes")  # fmt: skip
        shares = ("start_e", "end_e", "exploration_fraction", "taper_alpha_start", "taper_alpha_end", "per_alpha",
                  "taper_alpha_fraction", "per_beta", "gamma", "tau")  # fmt: skip
        from_0 = "seed", "num_actors", "learning_starts", "learning_rate", "max_grad_norm", "eval_interval"
        limits = dict.fromkeys(positive, (1, math.inf)) | dict.fromkeys(shares, (0, 1))
        limits |= dict.fromkeys(from_0, (0, math.inf)) | {"eval_seed": (0, 2**64 - 1), "torch_threads": (0, 1024)}
        limits |= dict.fromkeys(("episode_length", "batch_size"), (1, self.buffer_size))
        check_numbers(self, limits)
        check_env_id(self.env_id)
        if not 0 < self.taper_eps <= 1:
            raise ValueError(f"--taper-eps {self.taper_eps}: it must be above 0, so that all transitions can be drawn, "
                             "and at most 1, the priority of those that led to an achievement")  # fmt: skip
        if self.num_envs * self.episode_length > self.buffer_size:
            raise ValueError(f"--buffer-size {self.buffer_size} is less than num_envs {self.num_envs} x episode_length "
                             f"{self.episode_length} = {self.num_envs * self.episode_length}: an episode of each "
                             "environment must fit")  # fmt: skip
        at_once = -(-self.num_envs // self.train_frequency) * self.batch_size
        if at_once > self.buffer_size:
            raise ValueError(f"--buffer-size {self.buffer_size} is less than the {at_once} transitions that are drawn "
                             "at once: num_envs / train_frequency minibatches of --batch-size")  # fmt: skip
        if self.num_actors and self.num_envs % self.num_actors:
            best = self.num_envs - self.num_envs % self.num_actors or self.num_actors
            raise ValueError(f"--num-actors {self.num_actors} cannot share --num-envs {self.num_envs} equally: "
                             f"try --num-envs {best}")  # fmt: skip
        if self.num_actors and self.behaviour == "eps-greedy":
            raise ValueError("--behaviour eps-greedy acts by the network, which actor processes do not have: "
                             "use --num-actors 0 or --behaviour uniform")  # fmt: skip
        if not gradient_steps(self, self.total_timesteps):
            first = max(self.learning_starts, self.batch_size) + self.train_frequency
            raise ValueError(f"--total-timesteps {self.total_timesteps} ends before the first gradient step, at "
                             f"{first}: give more, or a smaller --learning-starts")  # fmt: skip
        self.num_updates = -(-self.total_timesteps // (self.num_envs * self.num_steps))


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


class EventTasks(gym.Wrapper):
    """Turns events of any Gymnasium environment into tasks: the contract of multi-task environments.

    info["task_rewards"] (n,) and info["task_terminations"] (n,) bool: each task's reward and whether it ended in the
    state reached (which reset's info may hold, too); its rise from 0 to 1 is the achievement. `task_names` is optional.
    Here, `events` maps a task's name to a function of (obs, reward, terminated, truncated, info, env) that gives a
    condition or a count: whenever that rises, the task pays 1 and ends. What holds at reset is no achievement.
    """

    def __init__(self, env, events):
        super().__init__(env)
        if not events:
            raise ValueError("EventTasks needs at least one event, and got none")
        self.task_names, self.events = tuple(events), tuple(events.values())

    def reset(self, *, seed=None, options=None):
        obs, info = self.env.reset(seed=seed, options=options)
        self.values = self.evaluate(obs, 0.0, False, False, info)
        return obs, info

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        before, self.values = self.values, self.evaluate(obs, reward, terminated, truncated, info)
        rises = self.values > before
        tasks = {"task_rewards": rises.astype(np.float32), "task_terminations": rises}
        return obs, reward, terminated, truncated, info | tasks

    def evaluate(self, *outcome):
        return np.array([event(*outcome, self.env) for event in self.events], np.float64)


def grid_event(function):
    """An event of MiniGrid's own state: function(env.unwrapped)."""
    return lambda *outcome: function(outcome[-1].unwrapped)


def cells(grid, kind):
    return [cell for cell in grid.grid if cell is not None and cell.type == kind]


def carrying(kind):
    return grid_event(lambda env: env.carrying is not None and env.carrying.type == kind)


def standing_on(kind):
    return grid_event(lambda env: getattr(env.grid.get(*env.agent_pos), "type", None) == kind)


MINIGRID_EVENTS = {  # name: (the object it needs, the event)
    "pick-up-key": ("key", carrying("key")),
    "pick-up-ball": ("ball", carrying("ball")),
    "pick-up-box": ("box", carrying("box")),
    "put-down": ("key", grid_event(lambda env: env.carrying is None)),
    "open-door": ("door", grid_event(lambda env: sum(door.is_open for door in cells(env.grid, "door")))),
    "close-door": ("door", grid_event(lambda env: -sum(door.is_open for door in cells(env.grid, "door")))),
    "pass-door": ("door", standing_on("door")),
    "reach-goal": ("goal", standing_on("goal")),
}


class WholeGrid(gym.Wrapper):
    """MiniGrid's whole grid as an image (width, height, 15) of 0 and 255: a plane per kind of object (10 is the agent)
    and one per state of doors or direction of the agent. Colours and what the agent carries are left out. The agent's
    own view, most of the cost of a step, is not computed."""

    def __init__(self, env):
        super().__init__(env)
        shape = env.unwrapped.width, env.unwrapped.height, 15
        self.observation_space = gym.spaces.Box(0, 255, shape, np.uint8)
        env.unwrapped.gen_obs = self.planes

    def planes(self):
        env = self.env.unwrapped
        grid = env.grid.encode()
        grid[tuple(env.agent_pos)] = 10, 0, env.agent_dir
        planes = np.concatenate([grid[..., :1] == np.arange(11), grid[..., 2:] == np.arange(4)], 2)
        return planes.view(np.uint8) * 255


class Crafter(gym.Env):
    """Crafter (Hafner 2021, arXiv:2109.06780) for Gymnasium, without a time limit of its own: death terminates."""

    observation_space, action_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8), gym.spaces.Discrete(17)

    def __init__(self):
        import crafter

        self.game = crafter.Env(length=None, seed=0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game._seed, self.game._episode = seed, 0  # its worlds are a function of these two
        return self.game.reset(), {"achievements": self.game._player.achievements}

    def step(self, action):
        obs, reward, _, info = self.game.step(action)
        return obs, reward, info["discount"] == 0, False, info


ACHIEVEMENTS = (
    "collect_coal", "collect_diamond", "collect_drink", "collect_iron", "collect_sapling", "collect_stone",
    "collect_wood", "defeat_skeleton", "defeat_zombie", "eat_cow", "eat_plant", "make_iron_pickaxe", "make_iron_sword",
    "make_stone_pickaxe", "make_stone_sword", "make_wood_pickaxe", "make_wood_sword", "place_furnace", "place_plant",
    "place_stone", "place_table", "wake_up",
)  # fmt: skip


def achieved(name):
    return lambda obs, reward, terminated, truncated, info, env: info["achievements"][name]


def check_env_id(env_id):
    """ValueError with the nearest names if there is no such environment, or with what brings its package."""
    module, _, name = env_id.rpartition(":")
    known = [f"two-rooms-{tasks}" for tasks in TwoRooms.TASKS] + ["crafter"]
    if env_id == "crafter" and importlib.util.find_spec("crafter") is None:
        raise ValueError("--env-id crafter needs crafter: use scripts/run --extra crafter, or pip install crafter")
    if env_id not in known:
        try:
            importlib.import_module(module or "minigrid" * name.startswith("MiniGrid-") or "gymnasium")  # registers ids
            gym.spec(name)
        except (gym.error.Error, ImportError) as error:
            reason = str(error).split("\n")[0]
            message = f"--env-id {env_id}: {reason}. Nearest: {nearest(env_id, known + list(gym.registry))}"
            raise ValueError(message) from error


def make_env(env_id, limit):
    """One environment with a Box observation, cut off after `limit` steps (None: never)."""
    if env_id == "crafter":
        env = EventTasks(Crafter(), {name: achieved(name) for name in ACHIEVEMENTS})
        return gym.wrappers.TimeLimit(env, limit or 2**62)
    if env_id.startswith("MiniGrid-"):
        env = WholeGrid(gym.make(f"minigrid:{env_id}", disable_env_checker=True, max_steps=limit or 2**62))
        env.reset(seed=0)
        events = {k: event for k, (kind, event) in MINIGRID_EVENTS.items() if cells(env.unwrapped.grid, kind)}
        return EventTasks(env, events)
    env = gym.make(env_id, max_episode_steps=limit or -1)
    return env if isinstance(env.observation_space, gym.spaces.Box) else gym.wrappers.FlattenObservation(env)


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


class TaskEnvs:
    """Gymnasium environments with n tasks, one a seed; each episode is cut off after `limit` steps.

    reset() -> obs; step(actions) -> obs, reward, terminated, truncated, info, arrays over num_envs; action -1: no step.
    After an episode's end (info["final_mask"]) the next one starts in the same step; info["final_obs"] are the true
    successors of all. info["task_rewards"] (num_envs, n) float32, info["task_terminations"] bool; `beta`: those of the
    state in which the next step starts. RunError for an environment that breaks the contract of `EventTasks`. Without
    task vectors it has one task: its own reward and termination.
    """

    def __init__(self, env_id, seeds, limit):
        self.envs = [Episodes(make_env(env_id, limit), seed, i) for i, seed in enumerate(seeds)]
        self.num_envs, env = len(seeds), self.envs[0]
        if not isinstance(env.action_space, gym.spaces.Discrete):
            raise RunError(f"actions {env.action_space}: this script takes Discrete")
        self.num_actions, self.first_action = int(env.action_space.n), int(env.action_space.start)
        self.obs_shape = env.observation_space.shape
        self.obs_dtype = np.uint8 if env.observation_space.dtype == np.uint8 else np.float32
        if env.has_wrapper_attr("task_names"):
            self.task_names = tuple(map(str, env.get_wrapper_attr("task_names")))
        else:  # a step tells how many there are
            env.env.reset(seed=0)  # not by Episodes, whose seeds are the run's
            _, reward, _, _, info = env.env.step(self.first_action)
            self.task_names = tuple(map(str, range(np.size(info.get("task_rewards", reward)))))
        self.num_tasks = len(self.task_names)
        if not self.num_tasks:
            raise RunError(f"{env_id} has no task: at least one is needed")

    def task_vectors(self, i, rewards, terminations):
        rewards, terminations = np.asarray(rewards), np.asarray(terminations)
        shapes = rewards.shape == terminations.shape == (self.num_tasks,)
        if not (shapes and rewards.dtype.kind in "buif" and terminations.dtype.kind in "bui"):
            raise RunError(f"environment {i} gave task_rewards of shape {rewards.shape} and task_terminations of shape "
                           f"{terminations.shape}, {rewards.dtype} and {terminations.dtype}: both must be "
                           f"({self.num_tasks},) all the time, numbers and bool")  # fmt: skip
        return rewards, terminations

    def observation(self, i, obs):
        if np.shape(obs) != self.obs_shape or not np.isfinite(obs).all():
            raise RunError(f"environment {i} gave observation {obs}: it must be finite, of shape {self.obs_shape}")
        return obs

    def reset(self):
        self.obs = np.zeros((self.num_envs, *self.obs_shape), self.obs_dtype)
        self.beta = np.zeros((self.num_envs, self.num_tasks), bool)
        for i in range(self.num_envs):
            self.start(i)
        return self.obs.copy()

    def start(self, i):
        obs, info = self.envs[i].reset()
        self.obs[i], none = self.observation(i, obs), np.zeros(self.num_tasks, bool)
        _, self.beta[i] = self.task_vectors(i, none, info.get("task_terminations", none))

    def step(self, actions):
        n = self.num_envs
        rewards, terminations = np.zeros((n, self.num_tasks), np.float32), np.zeros((n, self.num_tasks), bool)
        (terminated, truncated), final_obs, reward = np.zeros((2, n), bool), self.obs.copy(), np.zeros(n)
        for i in np.flatnonzero(actions >= 0):
            obs, reward[i], terminated[i], truncated[i], info = self.envs[i].step(self.first_action + actions[i])
            final_obs[i], tasks = self.observation(i, obs), ("task_rewards", [reward[i]])
            tasks = info.get(*tasks), info.get("task_terminations", [terminated[i]])
            rewards[i], terminations[i] = self.task_vectors(i, *tasks)
        finite = np.isfinite(rewards).all(1)
        if not finite.all():
            raise RunError(f"environment {finite.argmin()} gave task rewards {rewards[finite.argmin()]}: not finite")
        self.obs[:], self.beta, ended = final_obs, terminations.copy(), terminated | truncated
        for i in np.flatnonzero(ended):
            self.start(i)
        info = {"task_rewards": rewards, "task_terminations": terminations, "final_obs": final_obs, "final_mask": ended}
        return self.obs.copy(), reward, terminated, truncated, info

    def state_dict(self):
        return {"episodes": [env.get_state() for env in self.envs]}

    def load_state_dict(self, state):
        for env in self.envs:
            env.set_state(state["episodes"])

    def close(self):
        for env in self.envs:
            env.close()


class TwoRooms:
    """A grid of 9 x 9 cells behind the contract of `TaskEnvs`: a wall at x = 4, whose door at (4, 4) opens to whoever
    has been on the key at (1, 1). Episodes start in a random cell of the left room; actions: up, down, left, right.

    Tasks `rare`: to reach each of four cells behind the door, in 3 to 5 % of random episodes of 100 steps; `mixed`: the
    key (66 %), the door (14 %) and two corners behind it (1 %). The whole of it is tables over (x, y, key).
    """

    KEY, DOOR = (1, 1), (4, 4)
    TASKS = {"rare": {f"cell-{x}-{y}": (x, y) for x, y in ((5, 3), (6, 2), (6, 5), (7, 4))},
             "mixed": {"key": KEY, "door": DOOR, "corner-8-0": (8, 0), "corner-8-8": (8, 8)}}  # fmt: skip
    obs_shape, obs_dtype, num_actions, num_tasks = (19,), np.float32, 4, 4  # one-hot x, one-hot y, key

    def __init__(self, env_id, seeds, limit):
        goals = self.TASKS[env_id.removeprefix("two-rooms-")]
        self.task_names, self.num_envs, self.limit = tuple(goals), len(seeds), limit or 2**62
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        x, y, key = np.unravel_index(np.arange(9 * 9 * 2), (9, 9, 2))
        self.table = np.concatenate([np.eye(9)[x], np.eye(9)[y], key[:, None]], 1, dtype=np.float32)
        holds = [key == 1 if at == self.KEY else (x == at[0]) & (y == at[1]) for at in goals.values()]
        self.holds = np.stack(holds, 1)
        self.next = np.zeros((len(x), 4), np.int64)
        for action, (dx, dy) in enumerate(((0, -1), (0, 1), (-1, 0), (1, 0))):
            to_x, to_y = np.clip(x + dx, 0, 8), np.clip(y + dy, 0, 8)
            blocked = (to_x == 4) & ~((to_y == self.DOOR[1]) & (key == 1))
            to_x, to_y = np.where(blocked, x, to_x), np.where(blocked, y, to_y)
            has_key = key | ((to_x == self.KEY[0]) & (to_y == self.KEY[1]))
            self.next[:, action] = np.ravel_multi_index((to_x, to_y, has_key), (9, 9, 2))
        self.starts = np.flatnonzero((x < 4) & (key == 0) & ~((x == self.KEY[0]) & (y == self.KEY[1])))

    def reset(self):
        self.state, self.steps = np.zeros(self.num_envs, np.int64), np.zeros(self.num_envs, np.int64)
        self.beta = np.zeros((self.num_envs, self.num_tasks), bool)
        self.start(range(self.num_envs))
        return self.table[self.state]

    def start(self, envs):
        for i in envs:
            self.state[i], self.steps[i] = self.starts[self.rngs[i].integers(len(self.starts))], 0

    def step(self, actions):
        before, self.state = self.state, self.next[self.state, actions]
        rises = self.holds[self.state] & ~self.holds[before]
        self.steps += 1
        truncated, final_obs = self.steps >= self.limit, self.table[self.state]
        self.beta = rises & ~truncated[:, None]
        info = {"task_rewards": rises.astype(np.float32), "task_terminations": rises, "final_obs": final_obs,
                "final_mask": truncated}  # fmt: skip
        if truncated.any():
            self.start(np.flatnonzero(truncated))
        reward, terminated = rises.sum(1, dtype=np.float64), np.zeros(self.num_envs, bool)
        return self.table[self.state], reward, terminated, truncated, info

    def state_dict(self):
        return {"state": self.state, "steps": self.steps, "rngs": [rng.bit_generator.state for rng in self.rngs]}

    def load_state_dict(self, state):
        self.state, self.steps = (np.asarray(state[name]).copy() for name in ("state", "steps"))
        for rng, saved in zip(self.rngs, state["rngs"], strict=True):
            rng.bit_generator.state = saved

    def close(self):
        """Nothing is held."""


def make_envs(env_id, seeds, limit):
    """Environments with tasks, one per SeedSequence of `seeds`; None as `limit`: only they end their episodes."""
    return (TwoRooms if env_id.startswith("two-rooms-") else TaskEnvs)(env_id, seeds, limit)


# ---- 3. Replay -------------------------------------------------------------------------------------------------------


def achieving_prefix(terminations, reading="last"):
    """The transitions of one episode that led to each task's achievement (TaPER, eq. 1).

    terminations (T, n) bool: beta^j at s_{t+1}. Returns (T, n) bool: t up to and with the "first" or the "last" t at
    which task j's beta is 1; nothing where it never is. Of a beta that stays 1, pass the rises from 0 to 1 alone.
    """
    terminations = np.asarray(terminations, bool)
    if reading == "last":
        return np.logical_or.accumulate(terminations[::-1])[::-1]
    if reading != "first":
        raise ValueError(f"reading {reading!r}: it must be 'first' or 'last'")
    earlier = np.zeros_like(terminations)
    earlier[1:] = np.logical_or.accumulate(terminations)[:-1]
    return terminations.any(0) & ~earlier


def ramp(progress, start, end, share):
    """From start to end over the first `share` of a run that is at `progress` in [0, 1], in 100 equal steps, because a
    sum tree is built anew for each alpha."""
    return end if progress >= share else start + (end - start) * int(100 * progress / share) / 100


# Copied from algos/impala_popart.py:available_memory
def available_memory():
    """Bytes that this process may still take, by what the machine has free and by the limit of its control group."""
    rows = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):  # no such group; its limit is the word max
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        free = min(free, limit - used)
    return free


def as_bytes(array):
    """Any array, structured ones too, as the uint8 vector that a checkpoint can hold."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class IndexSets:
    """Slots in two sets: those of `order[:marked]` have priority `high`, the others `low`. A slot changes sets by a
    swap, and a draw is O(1) at any alpha. `where` is the inverse of `order`."""

    def __init__(self, capacity, high, low, alpha):
        self.order, self.where = np.arange(capacity, dtype=np.int32), np.arange(capacity, dtype=np.int32)
        self.marked, self.high, self.low, self.alpha = 0, high, low, alpha

    def mark(self, slots):
        self.place(slots, self.marked)
        self.marked += len(slots)

    def unmark(self, slots):
        slots = slots[self.where[slots] < self.marked]
        if len(slots):
            self.marked -= len(slots)
            self.place(slots, self.marked)

    def place(self, slots, start):
        """Puts `slots` at `start` of `order`; those that were there take the places that become vacant."""
        stop, before = start + len(slots), self.where[slots]
        inside = (before >= start) & (before < stop)
        stays = np.zeros(len(slots), bool)
        stays[before[inside] - start] = True
        others, vacant = self.order[start:stop][~stays], before[~inside]
        self.order[vacant], self.where[others] = others, vacant
        self.order[start:stop], self.where[slots] = slots, np.arange(start, stop)

    def sample(self, size, batch_size, rng):
        """Draws from the slots below `size`, which the first `size` places hold: slots, P(k), (batch_size,)."""
        high, low, rest = self.high**self.alpha, self.low**self.alpha, size - self.marked
        total = self.marked * high + rest * low
        marked = rng.random(batch_size) < self.marked * high / total
        place = (rng.random(batch_size) * np.where(marked, self.marked, rest)).astype(np.int64)
        slots = self.order[np.where(marked, place, self.marked + place)].astype(np.int64)
        return slots, np.where(marked, high, low) / total


class SumTree:
    """Priorities p of slots, drawn in proportion to p^alpha: float64 sums over blocks of 32, each recomputed from the
    level below, so that nothing drifts; the maximum of p likewise. A slot of priority 0 is never drawn."""

    FAN = 32  # numpy's cost is per level: 5 at 10^7 slots, where a binary tree has 24

    def __init__(self, capacity, alpha):
        self.alpha, self.sums, self.maxima = alpha, [], []
        while capacity > 1 or not self.sums:
            capacity = -(-capacity // self.FAN)
            self.sums.append(np.zeros(capacity * self.FAN))
            self.maxima.append(np.zeros(capacity * self.FAN))

    @property
    def total(self):
        return self.sums[-1].sum()

    @property
    def top(self):
        return self.maxima[-1].max()

    def set(self, slots, priorities):
        self.maxima[0][slots] = priorities
        self.sums[0][slots] = np.power(priorities, self.alpha)
        for (sums, sums_above), (maxima, maxima_above) in zip(pairwise(self.sums), pairwise(self.maxima)):
            slots = slots // self.FAN
            sums_above[slots] = sums.reshape(-1, self.FAN)[slots].sum(1)
            maxima_above[slots] = maxima.reshape(-1, self.FAN)[slots].max(1)

    def rebuild(self, priorities, alpha):
        """The priorities of all slots from 0 on, with another alpha."""
        self.alpha, size = alpha, len(priorities)
        self.maxima[0][:size], self.sums[0][:size] = priorities, np.power(priorities, alpha)
        for (sums, sums_above), (maxima, maxima_above) in zip(pairwise(self.sums), pairwise(self.maxima)):
            sums_above[: len(sums) // self.FAN] = sums.reshape(-1, self.FAN).sum(1)
            maxima_above[: len(maxima) // self.FAN] = maxima.reshape(-1, self.FAN).max(1)

    def find(self, mass):
        """The slots k with sum_{i<k} p_i^alpha <= mass < sum_{i<=k} p_i^alpha; mass (B,) in [0, total)."""
        node, each = np.zeros(len(mass), np.int64), np.arange(len(mass))
        for level in reversed(self.sums):
            children = level.reshape(-1, self.FAN)[node]
            until = children.cumsum(1)
            # Rounding can carry mass out of [0, last sum), where the child found might be one of priority 0.
            mass = np.maximum(np.minimum(mass, np.nextafter(until[:, -1], 0)), 0)
            child = (until <= mass[:, None]).sum(1)
            mass -= until[each, child] - children[each, child]
            node = node * self.FAN + child
        return node

    def sample(self, size, batch_size, rng):
        """A draw from each of batch_size strata of equal mass (Schaul et al. 2016): slots, P(k), (batch_size,). Their
        order is random, so that each part of the batch is a draw from all slots."""
        total = self.total
        slots = self.find((rng.permutation(batch_size) + rng.random(batch_size)) * (total / batch_size))
        return slots, self.sums[0][slots] / total


class TaskPrioritizedReplay:
    """Task-prioritized experience replay (TaPER), with uniform and PER replay as baselines; knows nothing of a learner.

    A FIFO of `capacity` transitions (s, a, r (n), s', beta at s' (n), terminated) of `num_envs` environments. D^j are
    those that were followed, in their episode of at most T = `episode_length` steps (`continuing`: in the moving window
    of T steps), by a rise of beta^j from 0 to 1, at their own s' at the earliest; D* is the union over the n tasks.
    P(k) = p_k^alpha / sum_m p_m^alpha, where p depends on `kind`:

    - uniform: all equal; per: |delta| + eps, at first the current maximum (Schaul et al. 2016)
    - taper: c in D*, else eps; taper_td: |delta| + eps in D*, at first the current maximum, else eps (eq. 3 and 4)
    - taper_shuffled: as taper, but random transitions are marked, as many as enter D*: the control for which ones are

    Each observation is stored once: s' is in the row of the environment's next transition; that of its newest, and the
    true last one of each episode, lie in `extra`. With a `folder` the rows are memory-mapped files, and a `state_dict`
    is small and stays loadable until more than `slack` further transitions are added. Errors: ValueError.
    """

    KINDS = ("uniform", "per", "taper", "taper_td", "taper_shuffled")

    def __init__(self, capacity, num_envs, num_tasks, obs_shape, obs_dtype, episode_length, rng, kind="taper",
                 alpha=1.0, c=1.0, eps=1e-2, reading="last", continuing=False, action_shape=(), action_dtype=np.int64,
                 folder=None, slack=0):  # fmt: skip
        for name, value, low in (("capacity", capacity, 1), ("num_envs", num_envs, 1), ("num_tasks", num_tasks, 1),
                                 ("episode_length", episode_length, 1), ("slack", slack, 0)):  # fmt: skip
            if not (low <= value < 2**31 and value == int(value)):
                raise ValueError(f"{name} {value}: it must be a whole number between {low} and {2**31 - 1}")
        if num_envs * episode_length > capacity:
            raise ValueError(f"capacity {capacity} is below num_envs {num_envs} x episode_length {episode_length} = "
                             f"{num_envs * episode_length}: an episode must fit in each environment")  # fmt: skip
        if not 0 < eps <= c < math.inf:
            raise ValueError(f"eps {eps}, c {c}: they must be 0 < eps <= c, so that no transition is left out")
        if kind not in self.KINDS:
            raise ValueError(f"kind {kind!r}: it must be one of {', '.join(self.KINDS)}")
        achieving_prefix(np.zeros((1, 1)), reading)  # checks it
        self.capacity, self.num_envs, self.num_tasks, self.T = capacity, num_envs, num_tasks, episode_length
        self.kind, self.reading, self.continuing, self.c, self.eps, self.rng = kind, reading, continuing, c, eps, rng
        self.num_rows, self.folder, self.maps = capacity + slack, None if folder is None else Path(folder), {}
        row = [("obs", obs_dtype, tuple(obs_shape)), ("action", action_dtype, tuple(action_shape)),
               ("reward", np.float32, (num_tasks,)), ("next_beta", bool, (num_tasks,)), ("terminated", bool),
               # `number` of the transition, counted from the first; where s' is: in the row of number `next`, or in
               # extra[-1 - next].
               ("number", np.int64), ("next", np.int64)]  # fmt: skip
        row = np.dtype(row, align=True)
        # extra[:num_envs] are the environments' newest s', the others final observations.
        num_extra = 2 * num_envs + self.num_rows // episode_length
        self.nbytes = self.reserve(row, num_extra)
        if self.folder and len(files := list(self.folder.glob("*.bin"))) == 1:
            files[0].unlink()  # without the other it is worthless: a state must not find the rows alone
        self.rows, self.extra = self.allocate("rows", self.num_rows, row), self.allocate("extra", num_extra, row["obs"])
        self.free = list(range(num_envs, len(self.extra)))  # a heap, so that a restored replay uses the same one
        self.total = 0  # transitions ever added; number i is in slot i % capacity and in row i % num_rows
        self.last = np.full(num_envs, -1)  # number of the environment's newest transition; -1 between episodes
        self.steps = np.zeros(num_envs, np.int64)  # of the running episode; number and rises of the last T of them:
        self.window = np.zeros((num_envs, episode_length), np.int64)
        self.rises = np.zeros((num_envs, episode_length, num_tasks), bool)
        self.members = np.zeros((capacity, num_tasks), bool)  # D^j by slot
        self.counts, self.num_achieving = np.zeros(num_tasks, np.int64), 0  # |D^j| and |D*|
        self.drawn = np.zeros(2, np.int64)  # transitions since the last `metrics`, and those of D* among them
        self.tree = SumTree(capacity, alpha) if kind in ("per", "taper_td") else None
        self.sets = IndexSets(capacity, c, eps, alpha) if self.tree is None else None
        self.alpha = alpha

    def __len__(self):
        return min(self.total, self.capacity)

    @property
    def alpha(self):
        """Exponent of P(k), in [0, 1]. A new value is free, but for per and taper_td, which build the sum tree anew."""
        return (self.tree or self.sets).alpha

    @alpha.setter
    def alpha(self, alpha):
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha {alpha}: it must lie between 0 and 1")
        if self.tree is None:
            self.sets.alpha = alpha
        elif alpha != self.tree.alpha:
            self.tree.rebuild(self.tree.maxima[0][: len(self)], alpha)

    # -- memory --

    def reserve(self, row, num_extra):
        """Says what the replay takes and returns it in bytes; ValueError if that is not free."""
        rows = self.num_rows * row.itemsize + num_extra * row["obs"].itemsize
        index = self.capacity * (self.num_tasks + (17 if self.kind in ("per", "taper_td") else 8))
        index += self.num_envs * self.T * (8 + self.num_tasks)
        need, free = {"of memory": index + (0 if self.folder else rows)}, {"of memory": available_memory()}
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)
            there = sum(path.stat().st_size for path in self.folder.glob("*.bin"))  # of the run that goes on
            need[f"in {self.folder}"], free[f"in {self.folder}"] = rows, shutil.disk_usage(self.folder).free + there
        said = " and ".join(f"{size / 2**20:,.1f} MiB {place}" for place, size in need.items())
        print(f"replay: {self.capacity:,} transitions take {said}", file=sys.stderr)
        place = max(need, key=lambda place: need[place] / free[place])
        if need[place] > free[place]:
            fit = self.capacity * free[place] // need[place]
            raise ValueError(f"a replay of {self.capacity} transitions takes {said}, but {free[place] / 2**20:,.1f} "
                             f"MiB {place} are free: a capacity of {fit} fits")  # fmt: skip
        return index + rows

    def allocate(self, name, count, dtype):
        """An array of at least `count` rows: the file's, where there is one already."""
        if self.folder is None:
            return np.zeros(count, dtype)
        path = self.folder / f"{name}.bin"
        with open(path, "ab") as file:
            try:  # a full disk is an error here; met by a later write it would kill the process
                os.posix_fallocate(file.fileno(), 0, count * dtype.itemsize)
            except OSError as error:
                size = f"{count * dtype.itemsize / 2**20:,.1f} MiB"
                raise OSError(error.errno, f"{size}: {error.strerror}", str(path)) from error
        count = path.stat().st_size // dtype.itemsize
        self.maps[name] = np.memmap(path, dtype.base, "r+", shape=(count, *dtype.shape))
        return np.asarray(self.maps[name])  # indexing a memmap itself is slower

    def flush(self):
        """Writes the files to disk: for a checkpoint that is to survive more than the death of the process."""
        for array in self.maps.values():
            array.flush()

    # -- adding --

    def add(self, envs, obs, action, reward, next_obs, beta, next_beta, terminated, truncated):
        """A transition of each of K different environments, arrays (K, ...): reward, beta at s and at s' (K, n);
        next_obs is the true s', also where the episode ends."""
        new = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "beta": beta,
               "next_beta": next_beta, "terminated": terminated, "truncated": truncated}  # fmt: skip
        envs, new = np.asarray(envs), {name: np.asarray(value) for name, value in new.items()}
        self.check(envs, new)
        next_obs, beta, truncated = (new.pop(name) for name in ("next_obs", "beta", "truncated"))
        ended = new["terminated"].astype(bool) | truncated.astype(bool)
        rises = new["next_beta"].astype(bool) & ~beta.astype(bool)

        numbers = np.arange(self.total, self.total + len(envs))
        slots, at = numbers % self.capacity, numbers % self.num_rows
        before = self.last[envs]
        linked = before >= max(0, self.total - self.num_rows)  # that of a slow environment may be gone
        self.rows["next"][before[linked] % self.num_rows] = numbers[linked]
        gone = self.rows["next"][at[numbers >= self.num_rows]]
        for final in -1 - gone[gone < -self.num_envs]:
            heapq.heappush(self.free, int(final))
        rows = np.zeros(len(envs), self.rows.dtype)
        for name, value in (new | {"number": numbers, "next": -1 - envs}).items():
            rows[name] = value
        self.rows[at] = rows
        self.extra[envs], self.last[envs] = next_obs, numbers
        self.total += len(envs)

        old = self.members[slots]
        if old.any():
            self.counts -= old.sum(0)
            self.num_achieving -= int(old.any(1).sum())
            self.members[slots] = False
        if self.sets:
            self.sets.unmark(slots)
        else:
            self.tree.set(slots, self.eps if self.kind == "taper_td" else self.tree.top or self.c)

        place = self.steps[envs] % self.T
        self.window[envs, place], self.rises[envs, place] = numbers, rises
        self.steps[envs] += 1
        if rises.any():
            for env in envs[rises.any(1)]:
                self.mark(env)
        if ended.any():
            self.end_episodes(envs[ended])

    def check(self, envs, new):
        if len(set(envs.tolist())) < len(envs) or not ((envs >= 0) & (envs < self.num_envs)).all():
            raise ValueError(f"environments {envs.tolist()}: they must differ and lie in 0 to {self.num_envs - 1}")
        twins = {"next_obs": "obs", "beta": "next_beta", "truncated": "terminated"}
        for name, value in new.items():
            spec = self.rows.dtype[twins.get(name, name)]
            shape, dtype = spec.shape, spec.base
            if value.shape != (len(envs), *shape):
                raise ValueError(f"{name} has shape {value.shape}: for {len(envs)} environments and {self.num_tasks} "
                                 f"tasks it must be {(len(envs), *shape)}")  # fmt: skip
            if value.dtype != dtype and dtype.kind != "b" and not np.can_cast(value.dtype, dtype, "same_kind"):
                raise ValueError(f"{name} has type {value.dtype}: this replay stores {dtype}")
        finite = np.isfinite(new["reward"])
        if not finite.all():
            k, task = np.argwhere(~finite)[0]
            raise ValueError(f"environment {envs[k]} gave task {task} the reward {new['reward'][k, task]}")
        if not self.continuing and (self.steps[envs] >= self.T).any():
            env = envs[self.steps[envs].argmax()]
            raise ValueError(f"environment {env} is at step {self.steps[env] + 1} of an episode of at most "
                             f"{self.T} steps: truncate it there, or let it be continuing")  # fmt: skip

    def mark(self, env):
        """Takes what led to the achievements in the environment's window into D^j and D*."""
        order = np.arange(max(0, self.steps[env] - self.T), self.steps[env]) % self.T
        prefix, numbers = achieving_prefix(self.rises[env, order], self.reading), self.window[env, order]
        kept = prefix.any(1) & (numbers >= self.total - self.capacity)
        slots, prefix = numbers[kept] % self.capacity, prefix[kept]
        old = self.members[slots]
        entering = slots[~old.any(1)]
        self.members[slots] = old | prefix
        self.counts += (prefix & ~old).sum(0)
        self.num_achieving += len(entering)
        if self.kind == "taper":
            self.sets.mark(entering)
        elif self.kind == "taper_shuffled":
            rest = self.sets.order[self.sets.marked : len(self)]
            self.sets.mark(self.rng.choice(rest, min(len(entering), len(rest)), replace=False))
        elif self.kind == "taper_td":
            self.tree.set(entering, self.tree.top if self.tree.top > self.eps else self.c)

    def end_episodes(self, envs):
        """The environments' newest s' become final observations. `add` calls it at each end; call it for environments
        that start anew for another reason."""
        for env in envs[self.last[envs] >= max(0, self.total - self.num_rows)]:
            if not self.free:  # episodes are shorter than T: more room
                old, count = self.extra, 2 * len(self.extra)
                self.extra = self.allocate("extra", count, self.rows.dtype["obs"])
                self.extra[: len(old)] = old
                self.free = list(range(len(old), count))
            final = heapq.heappop(self.free)
            self.extra[final] = self.extra[env]
            self.rows["next"][self.last[env] % self.num_rows] = -1 - final
        self.last[envs], self.steps[envs] = -1, 0

    # -- sampling --

    def sample(self, batch_size, is_beta=0.0):
        """`batch_size` transitions by P(k), with replacement: a dict of arrays obs, action, reward, next_obs,
        next_beta, terminated, index (for `set_priorities`) and weight, the importance weights (|D| P(k))^-is_beta over
        their maximum."""
        if not 0 < batch_size <= self.capacity:
            raise ValueError(f"batch_size {batch_size}: it must lie between 1 and the capacity of {self.capacity}")
        if self.total == 0:
            raise ValueError(f"a batch of {batch_size} from 0 transitions: add some first")
        slots, probability = (self.tree or self.sets).sample(len(self), batch_size, self.rng)
        numbers = self.total - 1 - (self.total - 1 - slots) % self.capacity
        rows = self.rows.take(numbers % self.num_rows)
        inside, names = rows["next"] < 0, ("obs", "action", "reward", "next_beta", "terminated")
        batch = {name: np.ascontiguousarray(rows[name]) for name in names}
        batch["next_obs"] = self.rows["obs"][rows["next"] % self.num_rows]
        batch["next_obs"][inside] = self.extra[-1 - rows["next"][inside]]
        self.drawn += batch_size, np.count_nonzero(self.members[slots].any(1))
        weight = (probability / probability.min()) ** -is_beta  # |D| cancels
        return batch | {"index": numbers, "weight": weight.astype(np.float32)}

    def set_priorities(self, index, td_errors):
        """New priorities max_j |delta^j| + eps of sampled transitions from their TD errors delta (B, n), which no
        importance weight may have scaled; those that were overwritten since are left out. Only per and taper_td have
        priorities of their own."""
        if self.tree is None:
            return
        if td_errors.shape != (len(index), self.num_tasks) or not np.isfinite(td_errors).all():
            raise ValueError(f"TD errors of shape {td_errors.shape}, {np.isfinite(td_errors).sum()} of them finite: "
                             f"all of {(len(index), self.num_tasks)} must be")  # fmt: skip
        kept = index >= self.total - self.capacity
        slots, priorities = index[kept] % self.capacity, np.abs(td_errors[kept]).max(1).astype(float) + self.eps
        if self.kind == "taper_td":
            priorities[~self.members[slots].any(1)] = self.eps
        self.tree.set(slots, priorities)

    def metrics(self):
        """|D|, |D*| / |D|, D*'s share of what was drawn since the last call, alpha, and |D^j| of each task (0: it was
        not achieved, or not lately)."""
        counts = {f"replay/achieving_{task}": int(count) for task, count in enumerate(self.counts)}
        share, (drawn, achieving) = self.num_achieving / max(1, len(self)), self.drawn.tolist()
        self.drawn[:] = 0
        return {"replay/size": len(self), "replay/achieving_share": share, "replay/alpha": self.alpha,
                "replay/drawn_share": achieving / drawn if drawn else math.nan} | counts  # fmt: skip

    # -- state --

    def signature(self):
        """What a state must agree on with the replay that loads it."""
        names = "kind", "capacity", "num_envs", "num_tasks", "T", "num_rows"
        fields = [f"{name} {getattr(self, name)}" for name in names]
        return ", ".join([*fields, f"obs {self.rows.dtype['obs']}", f"{'in files' if self.folder else 'in memory'}"])

    def state_dict(self):
        """All that the folder's files do not hold, or may not hold any more when it is loaded. Until `slack` further
        transitions are added, no row that the state refers to is written, but for `next` of each environment's newest;
        nor is a final observation, which is free only when its transition's row is overwritten."""
        size, names = len(self), ("total", "alpha", "last", "steps", "window", "rises", "drawn")
        state = {name: getattr(self, name) for name in names} | {"signature": self.signature()}
        state |= {"rng": self.rng.bit_generator.state, "members": self.members[:size]}
        state |= {"newest": as_bytes(self.extra[: self.num_envs])}
        if self.sets:
            state |= {"order": self.sets.order[:size], "marked": self.sets.marked}
        else:
            state |= {"priorities": self.tree.maxima[0][:size]}
        if not self.folder:
            filled = min(self.total, self.num_rows)
            state |= {"rows": as_bytes(self.rows[:filled]), "extra": as_bytes(self.extra)}
        return state

    def load_state_dict(self, state):
        """The replay as it was; ValueError if it had other arguments or the files no longer hold it."""
        if state["signature"] != self.signature():
            raise ValueError(f"the state is of a replay with {state['signature']}; this one has {self.signature()}")
        self.total, self.rng.bit_generator.state = int(state["total"]), state["rng"]
        size, filled = len(self), min(self.total, self.num_rows)
        for name in ("last", "steps", "window", "rises", "drawn"):
            getattr(self, name)[:] = np.asarray(state[name])
        if not self.folder:
            self.rows[:filled] = np.asarray(state["rows"]).view(self.rows.dtype)
            extra = np.asarray(state["extra"]).view(self.extra.dtype)
            self.extra = extra.reshape(-1, *self.extra.shape[1:]).copy()

        expected = np.full(self.num_rows, -1)
        numbers = np.arange(self.total - filled, self.total)
        expected[numbers % self.num_rows] = numbers
        lost = (self.rows["number"] != expected) & (expected >= self.total - size)
        if lost.any():
            slack = self.num_rows - self.capacity
            raise ValueError(f"{self.folder} no longer holds {lost.sum()} of the {size} transitions of this state: its "
                             f"files were removed, or more than {slack} (slack) added after it")  # fmt: skip
        self.rows["next"][self.rows["number"] != expected] = 0  # added after the state: they own no final observation
        newest = np.asarray(state["newest"]).view(self.extra.dtype).reshape(self.extra[: self.num_envs].shape)
        self.extra[: self.num_envs] = newest
        running = np.flatnonzero((self.last >= 0) & (self.last >= self.total - filled))
        self.rows["next"][self.last[running] % self.num_rows] = -1 - running
        used = -1 - self.rows["next"][: self.num_rows]
        self.free = np.setdiff1d(np.arange(self.num_envs, len(self.extra)), used).tolist()

        self.members[:] = False
        self.members[:size] = np.asarray(state["members"])
        self.counts, self.num_achieving = self.members.sum(0), int(self.members.any(1).sum())
        if self.sets:
            self.sets = IndexSets(self.capacity, self.c, self.eps, float(state["alpha"]))
            self.sets.order[:size], self.sets.marked = np.asarray(state["order"]), int(state["marked"])
            self.sets.where[self.sets.order[:size]] = np.arange(size)
        else:
            self.tree = SumTree(self.capacity, 0.0)
            self.tree.rebuild(np.asarray(state["priorities"]), float(state["alpha"]))


# ---- 4. Behaviour ----------------------------------------------------------------------------------------------------


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


class Actor:
    """Steps environments with the behaviour policy: uniformly random actions or, with an agent, epsilon-greedy ones in
    the values of a task that each environment draws for each episode."""

    def __init__(self, envs, rng, agent=None):
        self.envs, self.rng, self.agent, self.every = envs, rng, agent, np.arange(envs.num_envs)
        self.obs, self.beta = envs.reset(), envs.beta.copy()
        self.tasks = rng.integers(envs.num_tasks, size=envs.num_envs)

    def step(self, epsilon=1.0):
        """A transition of each environment, as TaskPrioritizedReplay.add takes them."""
        action = self.rng.integers(self.envs.num_actions, size=len(self.every))
        if self.agent is not None:
            greedy = self.rng.random(len(self.every)) >= epsilon
            action = np.where(greedy, self.agent.act(self.obs, self.tasks), action)
        obs, beta, (self.obs, _, terminated, truncated, info) = self.obs, self.beta, self.envs.step(action)
        self.beta, ended = self.envs.beta, info["final_mask"]
        if ended.any():
            self.tasks[ended] = self.rng.integers(self.envs.num_tasks, size=ended.sum())
        return {"envs": self.every, "obs": obs, "action": action, "reward": info["task_rewards"],
                "next_obs": info["final_obs"], "beta": beta, "next_beta": info["task_terminations"],
                "terminated": terminated, "truncated": truncated}  # fmt: skip

    def state_dict(self):
        state = {"envs": self.envs.state_dict(), "rng": self.rng.bit_generator.state}
        return state | {"beta": self.beta, "tasks": self.tasks}

    def load_state_dict(self, state):
        self.envs.load_state_dict(state["envs"])
        self.rng.bit_generator.state = state["rng"]
        self.beta, self.tasks = (np.asarray(state[name]).copy() for name in ("beta", "tasks"))

    def close(self):
        self.envs.close()


def actor_process(queue, chunk, index, env_id, limit, seed):
    """A process of `Actors`: an Actor that sends its transitions in the queue's chunks."""
    parent = multiprocessing.parent_process()  # its death ends this process even inside the environment
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    try:
        env_seed, action_seed = seed.spawn(2)
        actor = Actor(make_envs(env_id, env_seed.spawn(chunk.shape[1]), limit), np.random.default_rng(action_seed))
        while True:
            for row in chunk:
                transition = actor.step()
                for name in row.dtype.names:
                    row[name] = transition[name]
            queue.put_episode(index, chunk, 0.0, chunk.size, 0.0)
    except EOFError:  # the learner closed the queue
        actor.close()
    except RunError as error:
        queue.report_error(index, str(error).removeprefix("error: "))
    except BaseException:  # sys.exit of the environment, too: an exit code of 0 is no news for the learner
        queue.report_error(index, traceback.format_exc())


class Actors:
    """The same as an Actor in processes, each with an equal share of the environments. They act at random, so they do
    not wait for the network; a full queue holds them up. One that raises, dies or falls silent is a RunError of `step`.

    Spawned: a fork would copy the locks of torch's and the loggers' threads in whatever state they are.
    """

    CHUNK, CHUNKS, TIMEOUT_S = 16, 4, 60  # steps in an entry of the queue, entries of an actor; ten times that to start

    def __init__(self, num_actors, num_envs, env_id, limit, seeds, envs):
        share = num_envs // num_actors
        n, fields = (envs.num_tasks,), [(name, envs.obs_dtype, envs.obs_shape) for name in ("obs", "next_obs")]
        fields += [("action", np.int64), ("reward", np.float32, n), ("beta", bool, n), ("next_beta", bool, n)]
        fields += [("terminated", bool), ("truncated", bool)]
        chunk = np.zeros((self.CHUNK, share), fields)  # the queue's "task"; its own tasks are not used
        self.queue = SyncQueue(num_actors, task_shape=chunk.shape, task_dtype=chunk.dtype, prefetch=1,
                               capacity=self.CHUNKS, timeout=10 * self.TIMEOUT_S)  # fmt: skip
        self.lanes, self.rows = np.arange(num_envs).reshape(num_actors, share), deque()
        self.silent, self.looked = np.full(num_actors, -9.0 * self.TIMEOUT_S), time.monotonic()
        self.waited, self.taken = 0.0, []
        context, self.processes = multiprocessing.get_context("spawn"), []
        atexit.register(self.close)
        # They inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        for index, seed in enumerate(seeds):
            args = self.queue, chunk, index, env_id, limit, seed
            self.processes.append(context.Process(target=actor_process, args=args, name=f"actor {index}"))
            self.processes[-1].start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.queue.watch(self.processes)

    def step(self, epsilon=1.0):
        while not self.rows:
            self.receive()
        return self.rows.popleft()

    def receive(self):
        """Takes what all actors have sent; waits for something."""
        begun = time.monotonic()
        while True:
            try:
                records = self.queue.drain()
            except RuntimeError as error:
                raise RunError(str(error).replace("environment", "actor", 1)) from error  # the queue's word for it
            now = time.monotonic()
            self.silent += min(now - self.looked, 1.0)  # no more at a time: a Ctrl-Z that stops all is no time-out
            self.silent[records["env_id"]], self.looked = 0, now
            if self.silent.max() > self.TIMEOUT_S:
                actor = self.processes[self.silent.argmax()]
                raise RunError(f"{actor.name} (process {actor.pid}) has sent nothing for {self.TIMEOUT_S} s")
            if len(records):
                break
            time.sleep(2e-4)
        self.waited, self.taken = self.waited + now - begun, [*self.taken, len(records)]
        for index, chunk in zip(records["env_id"], records["task"]):
            self.rows += ({"envs": self.lanes[index]} | {name: row[name] for name in row.dtype.names} for row in chunk)

    def metrics(self):
        """Since the last call: seconds that the learner waited, and the chunks that it found waiting, on average."""
        row = {"async/learner_wait_s": self.waited, "async/queue_depth": np.mean(self.taken or math.nan)}
        self.waited, self.taken = 0.0, []
        return row

    def close(self):
        self.queue.close()  # whoever waits or sends then ends
        deadline = time.monotonic() + 1
        while self.processes:
            process = self.processes[-1]
            process.join(max(deadline - time.monotonic(), 0))
            process.kill()
            process.join()
            self.processes.pop()
        atexit.unregister(self.close)


# ---- 5. Agent --------------------------------------------------------------------------------------------------------


class Agent(nn.Module):
    """Q-values of n tasks: obs (B, *obs_shape) -> (B, n, num_actions). A head per task on a shared torso, or `separate`
    networks. ReLU MLPs on vectors and small grids, NatureCNNs on images (HWC or CHW); uint8 observations are / 255."""

    def __init__(self, obs_shape, num_actions, num_tasks, hidden_size=128, separate=False):
        super().__init__()
        self.shape = num_tasks, num_actions
        self.convolutional = len(obs_shape) == 3 and sorted(obs_shape)[1] >= 36
        self.channels_last = self.convolutional and obs_shape[-1] < obs_shape[0]
        heads = num_actions if separate else num_actions * num_tasks
        networks = [self.network(obs_shape, hidden_size, heads) for _ in range(num_tasks if separate else 1)]
        self.networks = nn.ModuleList(networks)

    def network(self, obs_shape, hidden_size, outputs):
        size, layers = math.prod(obs_shape), [nn.Flatten()] if len(obs_shape) > 1 else []
        if self.convolutional:
            height, width, channels = obs_shape if self.channels_last else (*obs_shape[1:], obs_shape[0])
            convs = nn.Conv2d(channels, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3)
            layers = [*convs, nn.ReLU(), nn.Flatten()]
            size = nn.Sequential(*layers)(torch.zeros(1, channels, height, width)).shape[1]
        else:
            layers += [nn.Linear(size, hidden_size), nn.ReLU()]
            size = hidden_size
        return nn.Sequential(*layers, nn.Linear(size, hidden_size), nn.ReLU(), nn.Linear(hidden_size, outputs))

    def forward(self, obs):
        if obs.dtype == torch.uint8:
            obs = (obs.permute(0, 3, 1, 2) if self.channels_last else obs) / 255
        q = [network(obs) for network in self.networks]
        return (torch.cat(q, 1) if len(q) > 1 else q[0]).view(-1, *self.shape)

    @torch.no_grad()
    def act(self, obs, tasks):
        """The greedy action of task tasks[i] in obs[i], arrays (B, ...) -> (B,)."""
        q = self(torch.as_tensor(obs).to(next(self.parameters()).device))
        return q[torch.arange(len(q)), torch.as_tensor(tasks)].argmax(-1).cpu().numpy()


def flatten_parameters(module):
    """One parameter that holds all of the module's, which become views of it, as do their gradients: for an optimiser,
    a norm and a copy that are one operation each."""
    parameters = list(module.parameters())
    flat = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach().clone())
    flat.grad = torch.zeros_like(flat)
    sizes = [parameter.numel() for parameter in parameters]
    for parameter, values, gradient in zip(parameters, flat.detach().split(sizes), flat.grad.split(sizes)):
        parameter.data, parameter.grad = values.view_as(parameter), gradient.view_as(parameter)
    return flat


# ---- 6. Mathematics --------------------------------------------------------------------------------------------------


def td_targets(rewards, terminations, terminated, q_target, q_chooser, gamma):
    """y^j = r^j + gamma (1 - beta^j)(1 - terminated) Q_target^j(s', argmax_a Q_chooser^j(s', a)): rewards, terminations
    (B, n), terminated (B,), Q-values of s' (B, n, A) -> (B, n).

    The chooser is the network in double Q-learning, else the target network. A task's end is the end for that task
    alone, the environment's for all; a truncation is none.
    """
    next_values = q_target.gather(2, q_chooser.argmax(2, keepdim=True)).squeeze(2)
    return rewards + gamma * next_values * ~(terminations | terminated.unsqueeze(1))


def huber_gradient(q, actions, targets, weights):
    """TD errors (B, n, 1) of the actions taken (B, n, 1), in q (B, n, A), against targets (B, n, 1); and the gradient
    in q of the sum of their Huber losses times weights (B, 1, 1): the errors clipped to +-1 (Mnih et al. 2015)."""
    errors = q.gather(2, actions) - targets
    return errors, torch.zeros_like(q).scatter_(2, actions, errors.clamp(-1, 1).mul_(weights))


def clip_norm(gradient, limit):
    """Scales the vector in place to a norm of at most `limit`; returns the norm that it had."""
    norm = gradient.norm()
    if norm > limit:
        gradient.mul_(limit / norm)
    return norm


def scatter(size, places, *arrays):
    """Each array at `places` of one of that size, 0 elsewhere."""
    return [np.bincount(places, array, size).astype(array.dtype) for array in arrays]


def gradient_steps(args, global_step):
    """How many belong to the first `global_step` steps."""
    return max(global_step - max(args.learning_starts, args.batch_size), 0) // args.train_frequency


# ---- 7. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


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


# ---- 8. Evaluation ---------------------------------------------------------------------------------------------------


def evaluate(agent, args):
    """Plays each task's greedy policy until that task or the episode ends, from args.eval_episodes starts, the same for
    all tasks and seeded by args.eval_seed alone. Touches no training state.

    Returns a row per task and start: the task's return, the length, and whether it was achieved.
    """
    starts, (n, _) = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes), agent.shape
    with closing(make_envs(args.env_id, starts * n, args.episode_length)) as envs:
        every, tasks = np.arange(envs.num_envs), np.repeat(np.arange(n), len(starts))
        obs, running, solved = envs.reset(), np.ones(len(every), bool), np.zeros(len(every), bool)
        returns, lengths = np.zeros(len(every)), np.zeros(len(every), int)
        while running.any():
            before = envs.beta.copy()
            obs, _, _, _, info = envs.step(np.where(running, agent.act(obs, tasks), -1))
            achieves = (info["task_terminations"] & ~before)[every, tasks] & running
            returns, lengths = returns + info["task_rewards"][every, tasks] * running, lengths + running
            solved, running = solved | achieves, running & ~achieves & ~info["final_mask"]
        columns = [envs.task_names[task] for task in tasks], returns.tolist(), lengths.tolist(), solved.tolist()
    return [{"split": "eval", **dict(zip(("task", "return", "length", "solved"), row))} for row in zip(*columns)]


def summarize(rows, history):
    """Means of evaluation rows: over all tasks, by task and of the worst. This success rate of each task is appended to
    `history`, those of the evaluations so far, whose means are the areas under the tasks' learning curves (auc)."""
    success = {
        name: [row["solved"] for row in rows if row["task"] == name] for name in {row["task"]: 0 for row in rows}
    }
    success = {name: float(np.mean(solved)) for name, solved in success.items()}
    history.append(list(success.values()))
    auc = np.mean(history, 0)
    means = {f"{name}_mean": float(np.mean([row[name] for row in rows])) for name in ("return", "length")}
    means |= {"success_mean": np.mean(history[-1]), "success_worst": min(history[-1]), "auc_mean": auc.mean()}
    means |= {"auc_worst": auc.min()} | {f"success/{name}": rate for name, rate in success.items()}
    return {f"eval/{name}": float(value) for name, value in means.items()}


# ---- 9. Training -----------------------------------------------------------------------------------------------------


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

    P, E, B = args.num_actors, args.num_envs, args.batch_size
    limit = args.episode_length if args.control == "episodic" else None
    envs = make_envs(args.env_id, random.envs.spawn(1 if P else E), limit)  # with actors, only to know what they have
    n = envs.num_tasks
    agent = Agent(envs.obs_shape, envs.num_actions, n, args.hidden_size, args.separate_networks).to(device)
    target = copy.deepcopy(agent)
    weights, target_weights = flatten_parameters(agent), flatten_parameters(target)
    optimizer = torch.optim.Adam([weights], args.learning_rate, fused=True)
    steps_per_update = args.num_steps * E
    folder = run.dir / "replay"
    try:
        replay = None if args.eval_only else TaskPrioritizedReplay(
            args.buffer_size, E, n, envs.obs_shape, envs.obs_dtype, args.episode_length, random.minibatches,
            args.replay, eps=args.taper_eps, reading=args.taper_reading, continuing=args.control == "continuing",
            folder=folder, slack=3 * args.checkpoint_interval * steps_per_update,
        )  # fmt: skip
    except (ValueError, OSError) as error:  # too little memory, or a full disk
        raise RunError(f"--buffer-size {args.buffer_size}: {error}") from error
    alphas = args.taper_alpha_start, args.taper_alpha_end, args.taper_alpha_fraction
    stats, achieved, history = EpisodeStats(E), np.zeros(n, np.int64), []  # history: success by task at each evaluation
    behaviour = agent if args.behaviour == "eps-greedy" else None
    actor = None if P else Actor(envs, np.random.default_rng(random.curriculum), behaviour)

    parts = {"agent": agent, "target": target, "optimizer": optimizer, "random": random, "stats": stats}
    parts |= {} if args.eval_only else {"replay": replay} | ({} if P else {"actor": actor})
    first_update, global_step, row = 0, 0, {}

    def snapshot(update):
        state = {name: part.state_dict() for name, part in parts.items()} | {"next_obs": None if P else actor.obs}
        state |= {"achieved": achieved, "history": history}
        return state | {"update": update, "global_step": global_step, "row": row}

    with run, ExitStack() as stack:
        stack.callback(envs.close)
        try:
            # Copied from algos/ppo.py:region(restore)
            state = run.restore(parts)
            if state is not None:
                first_update, global_step, row = state["update"], state["global_step"], state["row"]
                for name, part in parts.items():
                    part.load_state_dict(state[name])
            # End of copy
        except ValueError as error:  # of the replay, whose files are not the checkpoint's
            raise RunError(f"{error}: remove {run.dir} to start again") from error
        if state is not None:
            achieved, history = state["achieved"].numpy(), state["history"]
        if args.eval_only:
            rows = evaluate(agent, args)
            run.log_eval(global_step, rows)
            print(json.dumps(summarize(rows, history)))
            return summarize(rows, history)
        if P:  # all episodes start anew, also those of a run that goes on
            replay.end_episodes(np.arange(E))
            stats.returns[:], stats.lengths[:] = 0, 0
            seeds = np.random.SeedSequence([args.seed, global_step]).spawn(P)
            actor = stack.enter_context(closing(Actors(P, E, args.env_id, limit, seeds, envs)))
        elif state is not None:
            actor.obs = state["next_obs"].numpy()

        for update in range(first_update, args.num_updates):
            save = update > first_update and update % args.checkpoint_interval == 0
            if save:
                replay.flush()
            run.checkpoint(snapshot(update), save)
            clock, learned, progress = Stopwatch(), [], global_step / args.total_timesteps
            epsilon = ramp(progress, args.start_e, args.end_e, args.exploration_fraction)
            is_beta = ramp(progress, args.per_beta, 1.0, 1.0) if args.replay == "per" else 0.0
            replay.alpha = args.per_alpha if args.replay == "per" else ramp(progress, *alphas)
            while global_step < min((update + 1) * steps_per_update, args.total_timesteps):
                # Collect: a step of all environments, or of those of one actor.
                transition = actor.step(epsilon)
                clock.lap("collect")
                with writing(folder):
                    replay.add(**transition)
                before, global_step = global_step, global_step + len(transition["envs"])
                ended = transition["terminated"] | transition["truncated"]
                stats.step(*scatter(E, transition["envs"], transition["reward"].sum(1), ended, np.ones_like(ended)))
                achieved += (transition["next_beta"] & ~transition["beta"]).sum(0)
                clock.lap("store")

                # ---- TaPER: each minibatch trains all tasks. This block is the method, with TaskPrioritizedReplay ----
                due, minibatches = gradient_steps(args, global_step) - gradient_steps(args, before), ()
                if due:  # all minibatches are drawn at once, their targets computed from the weights as they are now
                    batch = replay.sample(due * B, is_beta)
                    b = {name: torch.from_numpy(array).to(device) for name, array in batch.items()}
                    with torch.no_grad():
                        q_target = target(b["next_obs"])
                        q_chooser = agent(b["next_obs"]) if args.double_q else q_target
                        y = td_targets(b["reward"], b["next_beta"], b["terminated"], q_target, q_chooser, args.gamma)
                    b["y"], b["action"] = y.unsqueeze(2), b["action"].view(-1, 1, 1).expand(-1, n, 1)
                    b["weight"] = b["weight"].view(-1, 1, 1) / (B * n)  # the loss is a mean
                    minibatches = zip(*(b[name].split(B) for name in ("obs", "action", "y", "weight", "index")))
                    clock.lap("sample")
                for obs, action, y, weight, index in minibatches:
                    q = agent(obs)
                    errors, gradient = huber_gradient(q.detach(), action, y, weight)
                    weights.grad.zero_()
                    q.backward(gradient)
                    grad_norm = clip_norm(weights.grad, args.max_grad_norm)
                    optimizer.step()
                    if args.replay in ("per", "taper_td"):
                        require_finite(td_errors=errors)
                        replay.set_priorities(index.cpu().numpy(), errors.squeeze(2).cpu().numpy())
                    # ---- end of the method ----
                    learned.append((errors, y, grad_norm))
                clock.lap("update")
                if global_step // args.target_network_frequency > before // args.target_network_frequency:
                    target_weights.data.lerp_(weights.data, args.tau)

            # Log and evaluate.
            last = update + 1 == args.num_updates
            row = {}
            if learned:
                errors, y, grad_norm = (torch.stack(tensors) for tensors in zip(*learned))
                require_finite(td_targets=y, td_errors=errors, gradient=grad_norm, weights=weights)
                loss = nn.functional.huber_loss(errors, torch.zeros_like(errors))
                means = {"td_loss": loss, "td_error": errors.abs(), "q_values": y + errors, "grad_norm": grad_norm}
                row = {f"losses/{name}": tensor.mean().item() for name, tensor in means.items()}
                row["perf/updates_per_s"] = len(learned) / (clock.total["update"] + clock.total["sample"])
            row |= {"charts/update": update + 1, "charts/epsilon": epsilon, "losses/gradient_steps": len(learned),
                    "charts/learning_rate": args.learning_rate} | replay.metrics()  # fmt: skip
            row |= {f"tasks/{name}/achieved": count for name, count in zip(envs.task_names, achieved)}
            row |= actor.metrics() if P else {}
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                rows = evaluate(agent, args)
                run.log_eval(global_step, rows)
                row |= summarize(rows, history)
                clock.lap("eval")
            row |= {f"perf/{name}_s": seconds for name, seconds in clock.total.items()}
            if last or (update + 1) % args.log_interval == 0:
                run.log(global_step, stats.pop() | row, update + 1)
        if not achieved.all():
            never = ", ".join(name for name, count in zip(envs.task_names, achieved) if count == 0)
            print(f"note: the behaviour never achieved {never}", file=sys.stderr)

        replay.flush()
        # Copied from algos/ppo.py:region(finish)
        run.checkpoint(snapshot(args.num_updates), due=True)
        names = {key: value for key, value in row.items() if key.startswith("eval")}
        return run.finish({"global_step": global_step, "wall_s": run.elapsed()} | names)
        # End of copy


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
