"""Proximal Policy Optimization (PPO) for any Gymnasium or envpool id: vectors, images, Dicts, any kind of actions.

Paper: Schulman et al. 2017, arXiv:1707.06347; details after Huang et al. 2022, "The 37 Implementation Details of PPO".
What ppo.py lacks: images, alone or in a Dict, Box and MultiDiscrete actions, running normalisation, a process per
environment, envpool.

  Train:     python algos/ppo_vector.py --env-id CartPole-v1 --vectorization envpool --total-timesteps 100000
  MuJoCo:    python algos/ppo_vector.py --env-id Hopper-v4 --total-timesteps 1000000 --num-envs 1 --num-steps 2048
             --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --ent-coef 0 --clip-vloss --norm-obs
             --norm-reward
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: Hopper-v4 by the second command, seeds 1, 2, 3: 3,404, 2,984, 3,283 in 20 greedy evaluation episodes (commits
b71df4f and 6dcf3ea, before the two scripts were parted, with the same numbers to the bit).
Differs from the paper: truncation is not termination (the value of the true final observation is bootstrapped).
"""

import ast
import ctypes
import difflib
import fcntl
import hashlib
import importlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.wrappers import utils
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
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one, else cpu
    deterministic: bool = False  # only deterministic GPU kernels (a CPU run always repeats to the bit)
    torch_threads: int = 1  # CPU threads for the network; 0: all cores. The count changes rounding
    run_dir: Path = Path("runs")  # results go to run_dir/exp_name/env_id/seed<k>-<hash of program and other arguments>
    resume: Literal["auto", "never", "must"] = "auto"  # go on from this command's newest checkpoint
    checkpoint_interval: int = 20  # updates between checkpoints
    keep_checkpoints: int = 2  # newest checkpoints to keep
    log_interval: int = 1  # updates between rows of metrics.jsonl
    progress: Literal["auto", "bar", "log", "none"] = "auto"  # bar: one line in place; log: one per 30 s
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works)
    wandb_project_name: str = "coursework"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team

    # environment
    env_id: str = "CartPole-v1"  # Gymnasium id (also module:id), or envpool id with --vectorization envpool
    vectorization: Literal["sync", "async", "envpool"] = "sync"  # async: a process per environment; envpool: C++
    num_envs: int = 4  # parallel environments
    norm_obs: bool = False  # normalise observations by their running mean and deviation, clip to +-10
    norm_reward: bool = False  # divide rewards by the running deviation of the discounted return, clip to +-10

    # algorithm
    total_timesteps: int = 500_000  # environment steps; rounded up to whole updates
    learning_rate: float = 1e-3  # Adam step size at the start
    anneal_lr: bool = True  # linearly to 0 at total_timesteps (which early updates then depend on)
    num_steps: int = 128  # steps per environment and update
    gamma: float = 0.99  # discount
    gae_lambda: float = 0.95  # GAE trace decay
    num_minibatches: int = 4  # minibatches per epoch
    update_epochs: int = 4  # passes over each rollout
    norm_adv: bool = True  # normalise advantages in each minibatch
    clip_coef: float = 0.2  # epsilon of the clipped surrogate
    clip_vloss: bool = False  # clip the value loss by clip_coef (for returns near 1: with --norm-reward)
    ent_coef: float = 0.01  # entropy bonus
    vf_coef: float = 0.5  # value loss weight
    max_grad_norm: float = 0.5  # gradient norm limit
    target_kl: float | None = None  # ends the update after the first minibatch whose KL exceeds it

    # evaluation
    eval_interval: int = 50  # updates between evaluations; 0: only at the end
    eval_episodes: int = 20  # episodes per evaluation
    eval_max_steps: int = 27_000  # evaluation episodes still running after so many steps count as they are
    eval_seed: int = 10_000  # seeds the evaluation episodes, the same for every run and algorithm
    eval_greedy: bool = True  # evaluate the most likely action (--no-eval-greedy: sample)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop
    capture_video: bool = False  # film the first episode of the final evaluation into videos/

    # derived
    batch_size: int = field(init=False)
    num_updates: int = field(init=False)

    def __post_init__(self):
        check_args(self)
        if self.capture_video and self.vectorization == "envpool":
            raise ValueError("--capture-video: envpool renders no frames, use --vectorization sync or async")
        module, _, name = self.env_id.rpartition(":")
        try:
            if self.vectorization == "envpool":
                import envpool

                if self.env_id not in (known := envpool.list_all_envs()):
                    near = ", ".join(difflib.get_close_matches(self.env_id, known))
                    raise ValueError(f"--env-id {self.env_id}: envpool has no such id. Nearest: {near}")
            else:
                if module:
                    __import__(module)  # registers its ids
                gym.spec(name)
        except (gym.error.Error, ImportError) as error:
            raise ValueError(f"--env-id {self.env_id}: {error}") from error


# Copied from algos/ppo.py:check_numbers
def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


# Copied from algos/ppo.py:check_args
def check_args(args):
    """Validates the arguments that PPO scripts share and derives batch_size and num_updates. Errors: ValueError."""
    check_numbers(args, seed=(0, math.inf), eval_interval=(0, math.inf), eval_seed=(0, 2**64 - 1),
                  torch_threads=(0, 1024), gamma=(0, 1), gae_lambda=(0, 1))  # fmt: skip
    args.batch_size = args.num_envs * args.num_steps
    args.num_updates = -(-args.total_timesteps // args.batch_size)
    shape = f"num_envs {args.num_envs} x num_steps {args.num_steps} = {args.batch_size}"
    if args.batch_size % args.num_minibatches:
        fitting = next(n for n in range(args.num_minibatches, 0, -1) if args.batch_size % n == 0)
        raise ValueError(f"--num-minibatches {args.num_minibatches} does not divide {shape}: try {fitting}")
    if args.norm_adv and args.batch_size == args.num_minibatches:
        raise ValueError(f"--norm-adv with 1 sample a minibatch of {shape}: use fewer, or --no-norm-adv")


# ---- 2. Environments -------------------------------------------------------------------------------------------------


class Episodes(gym.Wrapper):
    """Names itself and its episode in errors; plays an episode again, which brings its state back after a resume."""

    def __init__(self, env, index=0):
        super().__init__(env)
        self.index = index

    def attempt(self, method, *args, **options):
        """What reset or step returns, checked before gymnasium's vector environments stumble over it."""
        try:
            obs, *rest = getattr(self.env, method)(*args, **options)
            if np.shape(obs) != self.observation_space.shape:
                raise ValueError(f"observation {np.shape(obs)}, by its space {self.observation_space.shape}")
            if method == "step":
                reward, terminated, truncated, info = rest
                rest = np.asarray(reward).item(), terminated, truncated, info  # some give an array of one number
            return obs, *rest
        except Exception as error:
            where = f"environment {self.index}, step {self.steps} of the episode with seed {self.seed}"
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error

    def reset(self, *, seed=None, options=None):
        self.seed, self.steps = seed, 0
        return self.attempt("reset", seed=seed, options=options or None)

    def step(self, action):
        self.steps += 1
        return self.attempt("step", action)

    def replay(self, episodes):
        """(seed, actions, last observation) of each environment's episode -> that observation and seed; where the
        same actions lead elsewhere, those of a new episode."""
        seed, actions, expected = episodes[self.index]
        obs, _ = self.reset(seed=seed)
        for action in actions:
            obs, *_ = self.step(action)
        if not np.array_equal(np.asarray(obs, expected.dtype), expected):
            seed = int(np.random.default_rng(seed).integers(2**31))
            obs, _ = self.reset(seed=seed)
        return obs, seed


class FlattenDict(gym.ObservationWrapper):
    """A Dict observation as one vector: first the picture that it holds under `name`, then all else."""

    def __init__(self, env, name):
        super().__init__(env)
        image, self.name = env.observation_space[name], name
        self.scale = 255 if image.dtype == np.uint8 else 1
        self.others = gym.spaces.Dict({key: space for key, space in env.observation_space.items() if key != name})
        size = math.prod(image.shape) + gym.spaces.flatdim(self.others)
        self.observation_space = gym.spaces.Box(-math.inf, math.inf, (size,), np.float32)
        self.observation_space.image_shape = image.shape

    def observation(self, obs):
        others = gym.spaces.flatten(self.others, {key: obs[key] for key in self.others})
        return np.concatenate([np.float32(obs[self.name]).ravel() / self.scale, others], dtype=np.float32)


def make_env(env_id, index=0, video_folder=None):
    """One Gymnasium environment with a Box observation; with a folder, environment 0 films its first episode."""
    env = gym.make(env_id, render_mode="rgb_array" if video_folder else None)
    if video_folder and index == 0:
        env = gym.wrappers.RecordVideo(env, str(video_folder), episode_trigger=lambda n: n == 0)
    spaces = dict(env.observation_space) if isinstance(env.observation_space, gym.spaces.Dict) else {}
    if hasattr(spaces.get("mission"), "mission_func"):  # MiniGrid's text: the numbers of its words
        env = importlib.import_module("minigrid.wrappers").DictObservationSpaceWrapper(env)
    pictures = [name for name, space in spaces.items() if len(space.shape or ()) == 3 and min(space.shape[:2]) >= 36]
    if len(pictures) == 1:
        env = FlattenDict(env, *pictures)
    elif not (isinstance(env.observation_space, gym.spaces.Box) and env.observation_space.shape):
        try:
            env = gym.wrappers.FlattenObservation(env)
        except NotImplementedError:  # a graph or a sequence, for one
            sys.exit(f"error: observations {env.observation_space}: this script takes numbers and images")
    return Episodes(env, index)


def make_envs(env_id, vectorization, seeds, video_folder=None, check=lambda: None):
    """`VectorEnvs` with one environment per SeedSequence of `seeds`. `check` may end a long wait for a process."""
    if vectorization == "envpool":
        import envpool

        ints = [int(seed.generate_state(1)[0] % 2**31) for seed in seeds]
        return VectorEnvs(envpool.make(env_id, env_type="gymnasium", num_envs=len(ints), seed=ints), seeds)
    makers = [partial(make_env, env_id, i, video_folder) for i in range(len(seeds))]
    vector = {"sync": gym.vector.SyncVectorEnv, "async": partial(AsyncEnvs, check=check)}[vectorization]
    return VectorEnvs(vector(makers, autoreset_mode=gym.vector.AutoresetMode.DISABLED), seeds)


class WorkerPipe:
    """This process's end of the pipe to one environment's: a SystemExit names what died or does not answer."""

    TIMEOUT_S = 60  # for a step; ten times that to start, or to play an unfinished episode again

    def __init__(self, check, index, pipe, process):
        self.name, self.pipe, self.process = f"environment {index} (process {process.pid})", pipe, process
        self.check = check
        self.close = pipe.close

    def send(self, message):
        self.limit = self.TIMEOUT_S * (1 if message[0] == "step" else 10)
        with suppress(OSError):  # it died: `recv` says how
            self.pipe.send(message)

    def recv(self):
        # Counted so, a Ctrl-Z that stops all is no time-out.
        if not any(self.pipe.poll(1) or self.check() for _ in range(self.limit)):
            sys.exit(f"error: {self.name} gave no answer for {self.limit} s")
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(2)
            sys.exit(f"error: {self.name} died with exit code {self.process.exitcode}")


def env_process(parent, *args):
    """One environment's process: leaves signals to its parent, and ends with it, even when stopped or by kill -9."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):  # sent to the whole group
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() == parent:  # else it ended before
        gym.vector.async_vector_env._async_worker(*args)


class AsyncEnvs(gym.vector.AsyncVectorEnv):
    """A process per environment. Each wait for one ends, by a SystemExit at the latest, and so does `close`."""

    def __init__(self, makers, check=lambda: None, **options):
        self.processes, self.check = [], check
        try:
            super().__init__(makers, worker=partial(env_process, os.getpid()), **options)
        except BaseException:
            self.close()
            raise

    def _check_spaces(self):  # all processes are started: the last step of the constructor, and the first wait
        self.parent_pipes = [
            WorkerPipe(self.check, *named) for named in zip(range(self.num_envs), self.parent_pipes, self.processes)
        ]
        super()._check_spaces()

    def close(self, **_):  # gymnasium's own waits for answers that Ctrl-C or a death cut off
        for process in self.processes:
            if process.pid:
                process.kill()
                process.join()
        self.closed = True


class VectorEnvs:
    """Gymnasium's vector environments (autoreset DISABLED) or envpool's behind one contract; a SeedSequence for each.

    reset() -> obs; step(actions) -> obs, reward, terminated, truncated, info, arrays over num_envs. An episode restarts
    in the step that ends it: obs then belongs to the next one, and info["final_obs"] holds the true last observation.
    """

    def __init__(self, envs, seeds):
        self.envs, self.num_envs = envs, len(seeds)
        self.is_envpool = not isinstance(envs, (gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv))
        obs_space = getattr(envs, "single_observation_space", envs.observation_space)
        self.obs_shape, self.obs_dtype = obs_space.shape, np.uint8 if obs_space.dtype == np.uint8 else np.float32
        self.image_shape = getattr(obs_space, "image_shape", None)  # of the picture in a Dict
        self.action_space = getattr(envs, "single_action_space", envs.action_space)
        self.continuous = isinstance(self.action_space, gym.spaces.Box)
        if isinstance(self.action_space, gym.spaces.MultiDiscrete):
            self.num_actions = self.action_space.nvec.ravel().tolist()
        elif self.continuous or isinstance(self.action_space, gym.spaces.Discrete):
            self.num_actions = math.prod(self.action_space.shape) if self.continuous else int(self.action_space.n)
        else:
            sys.exit(f"error: actions {self.action_space}: this script takes Discrete, MultiDiscrete or Box")
        one = isinstance(self.action_space, gym.spaces.Discrete)
        self.action_shape = () if one else (math.prod(self.action_space.shape),)
        self.obs = np.zeros((self.num_envs, *self.obs_shape), self.obs_dtype)
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.seeds, self.actions = [0] * self.num_envs, [[] for _ in seeds]  # of the unfinished episodes

    def reset(self):
        obs = self.restart(np.ones(self.num_envs, bool))
        if self.num_envs > 1 and (obs == obs[:1]).all():
            print("note: all environments start from the same observation", file=sys.stderr)
        return obs

    def restart(self, mask):
        """Begins new episodes where mask (num_envs,) is True; the observations of all environments."""
        if self.is_envpool:  # which seeds its episodes itself
            obs, ids = self.obs.copy(), np.flatnonzero(mask)
            obs[ids] = self.envs.reset(ids)[0]
        else:
            for i in np.flatnonzero(mask):
                self.seeds[i], self.actions[i] = int(self.rngs[i].integers(2**31)), []
            obs, _ = self.envs.reset(seed=self.seeds, options={"reset_mask": mask})
        return self.checked(obs, np.zeros(self.num_envs))

    def checked(self, obs, reward):
        """obs, copied (packages reuse their arrays); SystemExit if a number of an environment is not finite."""
        bad = ~(abs(reward) <= np.finfo(np.float32).max)
        if self.obs_dtype == np.float32:
            bad |= ~np.isfinite(obs.reshape(self.num_envs, -1)).all(1)
        if bad.any():
            where = f"environment {(i := bad.argmax())}"
            if not self.is_envpool:
                where += f", step {sum(map(len, self.actions[i]))} of the episode with seed {self.seeds[i]}"
            sys.exit(" ".join(f"error: {where}: reward {reward[i]}, observation {obs[i]}: no finite float32".split()))
        self.obs = obs.astype(self.obs_dtype)
        return self.obs

    def step(self, actions):
        space, actions = self.action_space, actions.reshape(-1, *self.action_space.shape)
        actions = np.clip(actions, space.low, space.high) if self.continuous else actions + getattr(space, "start", 0)
        obs, reward, terminated, truncated, _ = self.envs.step(actions)
        for i, taken in enumerate(self.actions if not self.is_envpool else ()):
            taken.append(actions[i : i + 1])
        reward = np.asarray(reward, np.float64)
        obs = final_obs = self.checked(obs, reward)
        if (terminated | truncated).any():
            obs = self.restart(terminated | truncated)
        return obs, reward, terminated, truncated, {"final_obs": final_obs}

    def state_dict(self):
        self.actions = [[np.concatenate(taken)] if taken else [] for taken in self.actions]  # one array: quick to copy
        rngs = [rng.bit_generator.state for rng in self.rngs]
        return {"rngs": rngs, "seeds": self.seeds, "actions": self.actions, "obs": self.obs}

    def load_state_dict(self, state):
        """Plays the unfinished episodes again. Where that cannot be, new ones begin: `lost` (num_envs,) is True."""
        self.lost, self.obs = np.ones(self.num_envs, bool), state["obs"].numpy()
        for rng, saved in zip(self.rngs, state["rngs"], strict=True):
            rng.bit_generator.state = saved
        if self.is_envpool:
            self.restart(self.lost)
        else:
            blocks = [[block.numpy() for block in taken] for taken in state["actions"]]
            episodes = zip(state["seeds"], [block[0] if block else [] for block in blocks], self.obs, strict=True)
            obs, self.seeds = map(list, zip(*self.envs.call("replay", list(episodes)), strict=True))
            self.lost = np.not_equal(self.seeds, state["seeds"])
            self.actions = [[] if lost else taken for lost, taken in zip(self.lost, blocks, strict=True)]
            self.checked(np.stack(obs), np.zeros(self.num_envs))
        if self.lost.any():
            which = "envpool" if self.is_envpool else f"environments {np.flatnonzero(self.lost).tolist()}"
            print(f"note: {which} cannot restore the unfinished episodes; new ones start", file=sys.stderr)

    def close(self):
        self.envs.close()


class Stateful:
    """An object whose attributes are its state."""

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        arrays = {name: value.numpy() for name, value in state.items() if isinstance(value, torch.Tensor)}
        vars(self).update(state | arrays)


class EpisodeStats(Stateful):
    """Return and length of every finished episode, from raw rewards; terminated or truncated or both end one."""

    def __init__(self, num_envs):
        self.returns, self.lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)
        self.total, self.finished = 0, []  # finished: [return, length] since the last pop

    def step(self, reward, ended):
        self.returns += reward
        self.lengths += 1
        for i in np.flatnonzero(ended):
            self.add(float(self.returns[i]), int(self.lengths[i]))
        self.returns[ended], self.lengths[ended] = 0, 0

    def add(self, episode_return, length):
        self.finished.append([episode_return, length])
        self.total += 1

    def pop(self):
        """Means over the episodes that finished since the last call, and the number of all."""
        returns, lengths = np.mean(self.finished, axis=0) if self.finished else (math.nan, math.nan)
        self.finished = []
        return {"charts/episodic_return": returns, "charts/episodic_length": lengths, "charts/episodes": self.total}


class RunningMeanStd(utils.RunningMeanStd, Stateful):
    """Gymnasium's mean and variance of a stream of batches, in float64."""

    def normalize(self, x):
        return np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -10, 10).astype(np.float32)


class RewardScaler(RunningMeanStd):
    """Divides rewards by the running deviation of the discounted return and clips them to +-10, as OpenAI baselines'
    VecNormalize. The return restarts at every episode end, terminated or truncated."""

    def __init__(self, num_envs, gamma):
        super().__init__()
        self.returns, self.gamma = np.zeros(num_envs), gamma

    def __call__(self, reward, ended):
        self.returns = self.returns * self.gamma + reward
        self.update(self.returns)
        self.returns[ended] = 0
        return np.clip(reward / np.sqrt(self.var + 1e-8), -10, 10)


# ---- 3. Agent and mathematics ----------------------------------------------------------------------------------------


# Copied from algos/ppo.py:layer_init
def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class MultiCategorical:
    """Independent choices, action k out of sizes[k]: logits (B, sum(sizes)), actions (B, len(sizes))."""

    def __init__(self, logits, sizes):
        parts = logits.split(sizes, 1)
        self.parts = [torch.distributions.Categorical(logits=part, validate_args=False) for part in parts]

    @property
    def mode(self):
        return torch.stack([part.mode for part in self.parts], 1)

    def log_prob(self, actions):
        return sum(part.log_prob(action) for part, action in zip(self.parts, actions.unbind(1), strict=True))

    def entropy(self):
        return sum(part.entropy() for part in self.parts)


class PictureAndNumbers(nn.Module):
    """The features of the picture at the front of a flat observation (B, D), and the numbers behind it."""

    def __init__(self, convs, shape, channels_last):
        super().__init__()
        self.convs, self.shape, self.channels_last = convs, shape, channels_last

    def forward(self, obs):
        image, numbers = obs.tensor_split([math.prod(self.shape)], 1)
        image = image.unflatten(1, self.shape)
        return torch.cat([self.convs(image.permute(0, 3, 1, 2) if self.channels_last else image), numbers], 1)


class Agent(nn.Module):
    """Separate policy and value networks: tanh MLPs on vectors, NatureCNNs on images (HWC or CHW).

    forward(obs (B, *obs_shape)) -> logits or action means (B, num_actions), values (B,). `num_actions` is a list for
    several choices at once, and the number of action dimensions if `continuous`; the deviation is then a parameter that
    does not depend on the state. A vector with `image_shape` begins with a picture of that shape.
    """

    def __init__(self, obs_shape, num_actions, continuous=False, image_shape=None):
        super().__init__()
        shape, outputs = image_shape or obs_shape, int(np.sum(num_actions))
        self.sizes, self.continuous = num_actions if isinstance(num_actions, list) else None, continuous
        self.channels_last = len(shape) == 3 and shape[-1] < shape[0]
        self.policy = self.network(obs_shape, outputs, 0.01, image_shape)
        self.value = self.network(obs_shape, 1, 1.0, image_shape)
        self.log_std = nn.Parameter(torch.zeros(num_actions)) if continuous else None

    def network(self, obs_shape, outputs, std, image_shape):
        shape = image_shape or obs_shape
        if len(shape) != 3:
            size = math.prod(shape)
            hidden = layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
            return nn.Sequential(nn.Flatten(), *hidden, layer_init(nn.Linear(64, outputs), std))
        height, width, channels = shape if self.channels_last else (*shape[1:], shape[0])
        if min(height, width) < 36:
            sys.exit(f"error: observations {shape}: the network takes images of 36 x 36 or more")
        convs = nn.Sequential(layer_init(nn.Conv2d(channels, 32, 8, 4)), nn.ReLU(), layer_init(nn.Conv2d(32, 64, 4, 2)),
                              nn.ReLU(), layer_init(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten())  # fmt: skip
        size = convs(torch.zeros(1, channels, height, width)).shape[1]
        if image_shape:
            convs = PictureAndNumbers(convs, image_shape, self.channels_last)
            size += obs_shape[0] - math.prod(image_shape)
        hidden = layer_init(nn.Linear(size, 512)), nn.ReLU()
        return nn.Sequential(convs, *hidden, layer_init(nn.Linear(512, outputs), std))

    def forward(self, obs):
        obs = obs.permute(0, 3, 1, 2) if self.channels_last and obs.dim() == 4 else obs
        obs = obs / 255 if obs.dtype == torch.uint8 else obs
        return self.policy(obs), self.value(obs).squeeze(-1)

    def distribution(self, out):
        if self.continuous:
            normal = torch.distributions.Normal(out, self.log_std.exp().expand_as(out), validate_args=False)
            return torch.distributions.Independent(normal, 1, validate_args=False)
        if self.sizes:
            return MultiCategorical(out, self.sizes)
        return torch.distributions.Categorical(logits=out, validate_args=False)

    @torch.no_grad()
    def act(self, obs, generator=None):
        """obs (B, *obs_shape) -> actions, their log-probabilities (B,), values (B,). No generator: the mode."""
        out, value = self(obs)
        require_finite(policy_output=out, value=value)
        distribution = self.distribution(out)
        if generator is None:
            action = distribution.mode
        elif self.continuous:
            noise = torch.randn(out.shape, generator=generator, device=out.device)
            action = out + self.log_std.exp() * noise
        elif self.sizes:
            parts = (torch.multinomial(part.softmax(-1), 1, generator=generator) for part in out.split(self.sizes, 1))
            action = torch.cat(list(parts), 1)
        else:
            action = torch.multinomial(out.softmax(-1), 1, generator=generator).squeeze(1)
        return action, distribution.log_prob(action), value


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


# Copied from algos/ppo.py:explained_variance
def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns]; NaN where it is undefined."""
    variance = returns.var()
    return 1 - (returns - values).var() / variance if 0 < variance < math.inf else math.nan


# ---- 4. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


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


# ---- 5. Evaluation and training --------------------------------------------------------------------------------------


def evaluate(agent, obs_norm, args, video_folder=None, check=lambda: None):
    """Plays args.eval_episodes episodes in environments of their own, seeded by args.eval_seed alone -> a row for each,
    its raw return and length. Touches no training state; the statistics stay frozen. `check` may end it."""
    *seeds, action_seed = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes + 1)
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(int(action_seed.generate_state(1)[0]))
    vectorization = "envpool" if args.vectorization == "envpool" else "sync"
    with closing(make_envs(args.env_id, vectorization, seeds, video_folder)) as envs:
        obs, running = envs.reset(), np.ones(len(seeds), bool)
        returns, lengths = np.zeros(len(seeds)), np.zeros(len(seeds), np.int64)
        while running.any() and lengths.max() < args.eval_max_steps:
            check()
            obs = torch.as_tensor(obs if obs_norm is None else obs_norm.normalize(obs)).to(device)
            actions = agent.act(obs, None if args.eval_greedy else generator)[0]
            obs, reward, terminated, truncated, _ = envs.step(actions.cpu().numpy())
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
        seeds = random.envs.spawn(args.num_envs)
        envs = make_envs(args.env_id, args.vectorization, seeds, check=run.check_signals)
        run.enter_context(closing(envs))
        agent = Agent(envs.obs_shape, envs.num_actions, envs.continuous, envs.image_shape).to(device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
        stats = EpisodeStats(args.num_envs)
        obs_norm = RunningMeanStd(shape=envs.obs_shape) if args.norm_obs else None
        scale_reward = RewardScaler(args.num_envs, args.gamma) if args.norm_reward else None

        T, N = args.num_steps, args.num_envs
        obs = torch.zeros((T, *envs.obs.shape), dtype=torch.float32 if obs_norm else torch.as_tensor(envs.obs).dtype)
        dtype = torch.float32 if envs.continuous else torch.int64
        actions = torch.zeros((T, N, *envs.action_shape), dtype=dtype)
        obs, actions, logprobs = obs.to(device), actions.to(device), torch.zeros((T, N), device=device)
        rewards, values, cut_values = (np.zeros((T, N), np.float32) for _ in range(3))
        terminated, truncated = (np.zeros((T, N), bool) for _ in range(2))

        def to_network(raw, learn=True):
            """Raw observations as network input; if `learn`, they enter the running statistics first."""
            if obs_norm is not None and learn:
                obs_norm.update(raw)
            return torch.as_tensor(raw if obs_norm is None else obs_norm.normalize(raw)).to(device)

        parts = {"agent": agent, "optimizer": optimizer, "random": random, "envs": envs, "stats": stats}
        parts |= {"obs_norm": obs_norm} if obs_norm else {}
        parts |= {"scale_reward": scale_reward} if scale_reward else {}
        first_update, global_step, row = run.restore(**parts)
        if args.eval_only:
            folder = run.dir / "videos" if args.capture_video else None
            means = run.log_eval(global_step, evaluate(agent, obs_norm, args, folder, run.check_signals))
            print(json.dumps(means))
            return means
        if run.resumed:
            next_obs = to_network(envs.obs, learn=False)
            for part in (stats, scale_reward) if scale_reward else (stats,):
                part.returns[envs.lost] = 0
            stats.lengths[envs.lost] = 0
        else:
            next_obs = to_network(envs.reset())

        for update in range(first_update, args.num_updates):
            run.checkpoint(update, global_step, row)
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / args.num_updates)

            # Collect: T steps of every environment.
            begun = time.perf_counter()
            for t in range(T):
                obs[t] = next_obs
                actions[t], logprobs[t], value = agent.act(next_obs, random.actions)
                values[t] = value.cpu().numpy()
                raw, reward, terminated[t], truncated[t], info = envs.step(actions[t].cpu().numpy())
                ended = terminated[t] | truncated[t]
                rewards[t] = reward if scale_reward is None else scale_reward(reward, ended)
                stats.step(reward, ended)
                cut = truncated[t] & ~terminated[t]
                if cut.any():  # raw belongs to the next episode: bootstrap from the one that was cut off
                    final_obs = to_network(info["final_obs"][cut], learn=False)
                    cut_values[t, cut] = agent.act(final_obs)[2].cpu().numpy()
                next_obs = to_network(raw)
            global_step += T * N

            # Advantages.
            next_values = np.vstack([values[1:], agent.act(next_obs)[2].cpu().numpy()])
            next_values = np.where(truncated & ~terminated, cut_values, next_values)
            advantages, returns = gae(rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda)
            collected = time.perf_counter()

            # Optimise: minibatches of the steps.
            flat = {"obs": obs.flatten(0, 1), "actions": actions.flatten(0, 1), "logprobs": logprobs.flatten()}
            for name, array in (("values", values), ("advantages", advantages), ("returns", returns)):
                flat[name] = torch.as_tensor(array.reshape(-1), dtype=torch.float32).to(device)
            losses, epochs = [], (random.minibatches.permutation(T * N) for _ in range(args.update_epochs))
            for rows in (rows for epoch in epochs for rows in np.split(epoch, args.num_minibatches)):
                b = {name: tensor[torch.as_tensor(rows, device=device)] for name, tensor in flat.items()}
                if args.norm_adv:
                    b["advantages"] = (b["advantages"] - b["advantages"].mean()) / (b["advantages"].std() + 1e-8)
                out, value = agent(b["obs"])
                policy = agent.distribution(out)
                loss, parts_of_loss = ppo_loss(
                    policy.log_prob(b["actions"]), policy.entropy(), value, b["logprobs"], b["values"],
                    b["advantages"], b["returns"], args.clip_coef, args.clip_vloss, args.ent_coef, args.vf_coef,
                )  # fmt: skip
                optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                if not torch.isfinite(grad_norm + loss):
                    require_finite(**flat, policy_output=out, value=value, **parts_of_loss, grad_norm=grad_norm)
                optimizer.step()
                losses.append(torch.stack([*parts_of_loss.values(), grad_norm]).detach())
                if args.target_kl is not None and parts_of_loss["approx_kl"] > args.target_kl:
                    break
            require_finite(**dict(agent.named_parameters()), squared_value=agent.act(next_obs)[2] ** 2)

            # Log and evaluate.
            last = update + 1 == args.num_updates
            names = [f"losses/{name}" for name in (*parts_of_loss, "grad_norm")]
            row = dict(zip(names, torch.stack(losses).mean(0).tolist(), strict=True)) | {
                "losses/explained_variance": explained_variance(values, returns), "losses/gradient_steps": len(losses),
                "charts/update": update + 1, "charts/learning_rate": optimizer.param_groups[0]["lr"],
                "perf/collect_s": collected - begun, "perf/update_s": time.perf_counter() - collected,
            }  # fmt: skip
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                begun, folder = time.perf_counter(), run.dir / "videos" if last and args.capture_video else None
                row |= run.log_eval(global_step, evaluate(agent, obs_norm, args, folder, run.check_signals))
                row["perf/eval_s"] = time.perf_counter() - begun
            if last or (update + 1) % args.log_interval == 0:
                run.log(global_step, stats.pop() | row)

        return run.finish(args.num_updates, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
