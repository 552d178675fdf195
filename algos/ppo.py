"""Proximal Policy Optimization (PPO): the plain baseline, for any Gymnasium or envpool id.

Paper: Schulman et al. 2017, arXiv:1707.06347; details after Huang et al. 2022, "The 37 Implementation Details of PPO".

  Train:     python algos/ppo.py --env-id CartPole-v1 --total-timesteps 100000
  MuJoCo:    python algos/ppo.py --env-id Hopper-v4 --total-timesteps 1000000 --num-envs 1 --num-steps 2048
             --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --ent-coef 0 --clip-vloss --norm-obs
             --norm-reward
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: CartPole-v1 by the first command, seeds 1 to 5: 500.0 in 20 greedy evaluation episodes, 20 s each on a core;
Hopper-v4 by the second, seed 1: 3,404 (commit b71df4f).
Differs from the paper: truncation is not termination (the value of the true final observation is bootstrapped).
"""

import atexit
import difflib
import fcntl
import hashlib
import importlib
import json
import math
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing import resource_tracker
from pathlib import Path
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
    exp_name: str = "ppo"  # folder under run_dir
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
    env_id: str = "CartPole-v1"  # Gymnasium id (also module:id), or envpool id with --vectorization envpool
    vectorization: Literal["sync", "async", "envpool"] = "sync"  # async: a process per environment; envpool: C++
    num_envs: int = 4  # parallel environments
    norm_obs: bool = False  # normalise observations by their running mean and deviation, clip to +-10
    norm_reward: bool = False  # divide rewards by the running deviation of the discounted return, clip to +-10

    # algorithm
    total_timesteps: int = 500_000  # environment steps, dead ones included; rounded up to whole updates
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
    eval_seed: int = 10_000  # seeds the evaluation episodes, the same for every run and algorithm
    eval_greedy: bool = True  # evaluate the most likely action (--no-eval-greedy: sample)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop
    capture_video: bool = False  # film the first episode of the final evaluation into videos/

    # derived
    batch_size: int = field(init=False)
    num_updates: int = field(init=False)

    def __post_init__(self):
        check_args(self)
        check_env_id(self.env_id, self.vectorization)
        if self.capture_video and self.vectorization == "envpool":
            raise ValueError("--capture-video: envpool renders no frames, use --vectorization sync or async")


def check_numbers(args, limits):
    """ValueError that names the first argument outside its limits, {name: (low, high)}, or not finite. None passes."""
    for name, (low, high) in limits.items():
        value = getattr(args, name)
        if value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{name.replace('_', '-')} {value}: it must be a number {allowed}")


def check_args(args):
    """Validates the arguments that PPO scripts share and derives batch_size and num_updates. Errors: ValueError."""
    from_0 = "learning_rate", "clip_coef", "ent_coef", "vf_coef", "max_grad_norm", "target_kl", "seed", "eval_interval"
    from_1 = ("num_envs", "num_steps", "num_minibatches", "update_epochs", "total_timesteps", "eval_episodes",
              "checkpoint_interval", "keep_checkpoints", "log_interval")  # fmt: skip
    limits = dict.fromkeys(from_0, (0, math.inf)) | dict.fromkeys(from_1, (1, math.inf))
    limits |= {"gamma": (0, 1), "gae_lambda": (0, 1), "eval_seed": (0, 2**64 - 1), "torch_threads": (0, 1024)}
    check_numbers(args, limits)
    args.batch_size = args.num_envs * args.num_steps
    args.num_updates = -(-args.total_timesteps // args.batch_size)
    shape = f"num_envs {args.num_envs} x num_steps {args.num_steps} = {args.batch_size}"
    if args.total_timesteps < args.batch_size:
        raise ValueError(f"--total-timesteps {args.total_timesteps} is less than one rollout, {shape}: ask for more")
    if args.batch_size % args.num_minibatches:
        best = min((n for n in range(1, args.batch_size + 1) if args.batch_size % n == 0),
                   key=lambda n: abs(n - args.num_minibatches))  # fmt: skip
        raise ValueError(f"--num-minibatches {args.num_minibatches} does not divide {shape}: try {best}")
    if args.norm_adv and args.batch_size == args.num_minibatches:
        raise ValueError(f"--num-minibatches {args.num_minibatches} leaves 1 sample a minibatch of {shape}, and the "
                         "deviation of 1 advantage is undefined: use fewer minibatches or --no-norm-adv")  # fmt: skip


# ---- 2. Environments -------------------------------------------------------------------------------------------------


class RunError(SystemExit):
    """Ends the program with one line on stderr and exit code 1."""

    def __init__(self, message):
        super().__init__(f"error: {message}")


def check_env_id(env_id, vectorization):
    """ValueError with the nearest names if there is no such environment, or with the command that brings envpool."""
    if vectorization == "envpool":
        try:
            import envpool
        except ImportError as error:
            raise ValueError(f"--vectorization envpool needs envpool: pip install envpool==1.2.5 ({error})") from error
        known = envpool.list_all_envs()
    else:
        try:
            module, _, name = env_id.rpartition(":")
            if module:
                importlib.import_module(module)  # registers its ids
            return gym.spec(name)
        except (gym.error.Error, ImportError) as error:
            known, reason = list(gym.registry), str(error).split("\n")[0]
            raise ValueError(f"--env-id {env_id}: {reason}. Nearest: {nearest(env_id, known)}") from error
    if env_id not in known:
        raise ValueError(f"--env-id {env_id}: envpool has no such id. Nearest: {nearest(env_id, known)}")


def nearest(name, known):
    """The three known names most like `name`, for error messages."""
    by_lower = {k.lower(): k for k in known}
    return ", ".join(by_lower[k] for k in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=0.3)) or "none"


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


def make_env(env_id, seed, index=0, video_folder=None):
    """One Gymnasium environment with a Box observation; with a folder, environment 0 films its first episode."""
    env = gym.make(env_id, render_mode="rgb_array" if video_folder else None)
    if video_folder and index == 0:
        env = gym.wrappers.RecordVideo(env, str(video_folder), episode_trigger=lambda n: n == 0)
    if not isinstance(env.observation_space, gym.spaces.Box):
        env = gym.wrappers.FlattenObservation(env)
    return Episodes(env, seed, index)


def make_envs(env_id, vectorization, seeds, video_folder=None):
    """`VectorEnvs` with one environment per SeedSequence of `seeds`."""
    if vectorization == "envpool":
        import envpool

        ints = [int(seed.generate_state(1)[0] % 2**31) for seed in seeds]
        return VectorEnvs(envpool.make(env_id, env_type="gymnasium", num_envs=len(ints), seed=ints), len(ints))
    vector = {"sync": gym.vector.SyncVectorEnv, "async": AsyncEnvs}[vectorization]
    makers = [partial(make_env, env_id, seed, i, video_folder) for i, seed in enumerate(seeds)]
    return VectorEnvs(vector(makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP), len(makers))


class WorkerPipe:
    """This process's end of the pipe to one environment's: a RunError names what died or does not answer."""

    TIMEOUT_S = 60  # for a step; ten times that to start, or to play an unfinished episode again

    def __init__(self, index, pipe, process):
        self.name, self.pipe, self.process = f"environment {index} (process {process.pid})", pipe, process
        self.close = pipe.close

    def send(self, message):
        self.limit = self.TIMEOUT_S * (1 if message[0] == "step" else 10)
        with suppress(OSError):  # it died: `recv` says how
            self.pipe.send(message)

    def recv(self):
        if not any(self.pipe.poll(1) for _ in range(self.limit)):  # counted so: a Ctrl-Z that stops all is no time-out
            raise RunError(f"{self.name} gave no answer for {self.limit} s")
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(2)
            raise RunError(f"{self.name} died with exit code {self.process.exitcode}") from None


class AsyncEnvs(gym.vector.AsyncVectorEnv):
    """A process per environment. Each wait for one ends, by a RunError at the latest, and so does `close`."""

    def __init__(self, makers, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP):
        self.processes = []
        atexit.register(self.close)  # before multiprocessing's, which waits for processes that no SIGTERM ends
        # They inherit blocked signals: what is sent to the whole group is for this process to answer.
        resource_tracker.ensure_running()  # its own start would unblock them
        self.mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1))
        try:
            super().__init__(makers, autoreset_mode=autoreset_mode)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)

    def _check_spaces(self):  # all processes are started: the last step of the constructor, and the first wait
        signal.pthread_sigmask(signal.SIG_SETMASK, self.mask)
        self.parent_pipes = list(map(WorkerPipe, range(self.num_envs), self.parent_pipes, self.processes))
        super()._check_spaces()

    def close(self, **_):  # gymnasium's own waits for answers that Ctrl-C or a death cut off
        started = [process for process in self.processes if process.pid]
        for process in started:
            process.kill()
        for process in started:
            process.join()
        self.closed = True
        atexit.unregister(self.close)


class VectorEnvs:
    """Gymnasium vector environments and envpool behind one contract, under NEXT_STEP and SAME_STEP autoreset.

    reset() -> obs; step(actions) -> obs, reward, terminated, truncated, info, arrays over num_envs. info["valid"] is
    False where the action was ignored (the dead step of NEXT_STEP). info["final_mask"], info["final_obs"]: where the
    episode ended and obs already belongs to the next one (SAME_STEP), the true last observation.
    """

    def __init__(self, envs, num_envs):
        self.envs, self.num_envs = envs, num_envs
        self.same_step = envs.metadata.get("autoreset_mode") == gym.vector.AutoresetMode.SAME_STEP
        obs_space = getattr(envs, "single_observation_space", envs.observation_space)
        self.obs_shape, self.obs_dtype = obs_space.shape, np.uint8 if obs_space.dtype == np.uint8 else np.float32
        self.action_space = getattr(envs, "single_action_space", envs.action_space)
        self.continuous = isinstance(self.action_space, gym.spaces.Box)
        if not self.continuous and not isinstance(self.action_space, gym.spaces.Discrete):
            raise RunError(f"actions {self.action_space}: this script takes Discrete or Box")
        self.num_actions = math.prod(self.action_space.shape) if self.continuous else int(self.action_space.n)

    def reset(self):
        self.pending = np.zeros(self.num_envs, bool)  # ended under NEXT_STEP: their next action is ignored
        obs, _ = self.envs.reset()
        if self.num_envs > 1 and (obs == obs[:1]).all():
            print("note: all environments start from the same observation", file=sys.stderr)
        return self.checked(obs, np.zeros(self.num_envs))

    def checked(self, obs, reward):
        """obs in its dtype; RunError that names the first environment whose obs or reward is not finite."""
        bad = ~np.isfinite(reward)
        if self.obs_dtype == np.float32:
            bad |= ~np.isfinite(obs.reshape(self.num_envs, -1)).all(1)
        if bad.any():
            i = bad.argmax()
            found = f"reward {reward[i]}, observation {obs[i]}"
            raise RunError(f"environment {i} gave a reward or an observation that is not finite: {found}")
        return obs.astype(self.obs_dtype)

    def step(self, actions):
        if self.continuous:
            space = self.action_space
            actions = np.clip(actions.reshape(-1, *space.shape), space.low, space.high)
        else:
            actions = actions + getattr(self.action_space, "start", 0)
        obs, reward, terminated, truncated, raw = self.envs.step(actions)
        reward = np.asarray(reward, np.float64)
        info = {"valid": ~self.pending, "final_mask": np.zeros(self.num_envs, bool), "final_obs": obs}
        ended = terminated | truncated
        if not self.same_step:
            self.pending = ended
        elif ended.any():
            final_obs = obs.copy()
            for i in np.flatnonzero(ended):
                final_obs[i] = raw["final_obs"][i]
            info["final_mask"], info["final_obs"] = ended, self.checked(final_obs, reward)
        return self.checked(obs, reward), reward, terminated, truncated, info

    def state_dict(self):
        """The unfinished episodes; None for envpool, which cannot be saved: a resumed run starts new episodes there."""
        return {"episodes": list(self.envs.call("get_state")) if self.same_step else None}

    def load_state_dict(self, state):
        if state["episodes"] is None:
            return print("note: envpool cannot restore its episodes; all environments start new ones", file=sys.stderr)
        self.envs.call("set_state", state["episodes"])

    def close(self):
        self.envs.close()


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


class RunningMeanStd:
    """Mean and variance of a stream of batches in float64 (Chan et al. 1979)."""

    def __init__(self, shape=()):
        self.mean, self.var, self.count = np.zeros(shape), np.ones(shape), 1e-4

    def update(self, batch):
        if len(batch) == 0:
            return
        delta, total = batch.mean(0) - self.mean, self.count + len(batch)
        squares = self.var * self.count + batch.var(0) * len(batch) + delta**2 * self.count * len(batch) / total
        self.mean, self.var, self.count = self.mean + delta * len(batch) / total, squares / total, total

    def normalize(self, x):
        return np.clip((x - self.mean) / np.sqrt(self.var + 1e-8), -10, 10).astype(np.float32)

    def state_dict(self):
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def load_state_dict(self, state):
        self.mean, self.var, self.count = np.asarray(state["mean"]), np.asarray(state["var"]), state["count"]


class RewardScaler:
    """Divides rewards by the running deviation of the discounted return and clips them to +-10, as OpenAI baselines'
    VecNormalize. The return restarts at every episode end, terminated or truncated; dead steps do not count."""

    def __init__(self, num_envs, gamma):
        self.returns, self.gamma, self.stats = np.zeros(num_envs), gamma, RunningMeanStd()

    def __call__(self, reward, ended, valid):
        self.returns = np.where(valid, self.returns * self.gamma + reward, self.returns)
        self.stats.update(self.returns[valid])
        self.returns[ended] = 0
        return np.clip(reward / np.sqrt(self.stats.var + 1e-8), -10, 10)

    def state_dict(self):
        return {"returns": self.returns, "stats": self.stats.state_dict()}

    def load_state_dict(self, state):
        self.returns = np.asarray(state["returns"]).copy()
        self.stats.load_state_dict(state["stats"])


# ---- 3. Agent --------------------------------------------------------------------------------------------------------


def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Separate policy and value networks: tanh MLPs on vectors, NatureCNNs on uint8 images (HWC or CHW).

    forward(obs (B, *obs_shape)) -> logits or action means (B, num_actions), values (B,). `num_actions` is the number of
    action dimensions if `continuous`; the deviation is then a parameter that does not depend on the state.
    """

    def __init__(self, obs_shape, num_actions, continuous=False):
        super().__init__()
        self.continuous, self.channels_last = continuous, len(obs_shape) == 3 and obs_shape[-1] < obs_shape[0]
        self.policy = self.network(obs_shape, num_actions, std=0.01)
        self.value = self.network(obs_shape, 1, std=1.0)
        self.log_std = nn.Parameter(torch.zeros(num_actions)) if continuous else None

    def network(self, obs_shape, outputs, std):
        if len(obs_shape) != 3:
            size = math.prod(obs_shape)
            hidden = layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
            return nn.Sequential(nn.Flatten(), *hidden, layer_init(nn.Linear(64, outputs), std))
        height, width, channels = obs_shape if self.channels_last else (*obs_shape[1:], obs_shape[0])
        convs = nn.Sequential(layer_init(nn.Conv2d(channels, 32, 8, 4)), nn.ReLU(), layer_init(nn.Conv2d(32, 64, 4, 2)),
                              nn.ReLU(), layer_init(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten())  # fmt: skip
        size = convs(torch.zeros(1, channels, height, width)).shape[1]
        hidden = layer_init(nn.Linear(size, 512)), nn.ReLU()
        return nn.Sequential(convs, *hidden, layer_init(nn.Linear(512, outputs), std))

    def forward(self, obs):
        if obs.dtype == torch.uint8:
            obs = (obs.permute(0, 3, 1, 2) if self.channels_last else obs) / 255
        return self.policy(obs), self.value(obs).squeeze(-1)

    def distribution(self, out):
        if self.continuous:
            normal = torch.distributions.Normal(out, self.log_std.exp().expand_as(out), validate_args=False)
            return torch.distributions.Independent(normal, 1, validate_args=False)
        return torch.distributions.Categorical(logits=out, validate_args=False)

    @torch.no_grad()
    def act(self, obs, generator=None):
        """obs (B, *obs_shape) -> actions, their log-probabilities (B,), values (B,). No generator: the mode."""
        out, value = self(obs)
        if not torch.isfinite(out.sum() + value.sum()):
            require_finite(policy_output=out, value=value)
        distribution = self.distribution(out)
        if generator is None:
            action = distribution.mode
        elif self.continuous:
            noise = torch.randn(out.shape, generator=generator, device=out.device)
            action = out + self.log_std.exp() * noise
        else:
            action = torch.multinomial(out.softmax(-1), 1, generator=generator).squeeze(1)
        return action, distribution.log_prob(action), value


# ---- 4. Mathematics --------------------------------------------------------------------------------------------------


def gae(rewards, values, next_values, terminated, truncated, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2016, eq. 16): arrays (T, N) -> advantages, returns (T, N).

    `next_values` is V of each step's true successor: the bootstrap at a truncation and at the end of the rollout.
    Terminated cuts bootstrap and trace, truncated the trace alone; both at once mean terminated.
    """
    rewards, values, next_values = np.asarray(rewards), np.asarray(values), np.asarray(next_values)
    terminated, truncated = np.asarray(terminated, bool), np.asarray(truncated, bool)
    deltas = rewards + gamma * np.where(terminated, 0, next_values) - values
    decay = gamma * gae_lambda * ~(terminated | truncated)
    advantages, trace = np.zeros_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = trace = deltas[t] + decay[t] * trace
    return advantages, advantages + values


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


def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns]; NaN where it is undefined."""
    variance = returns.var()
    return 1 - (returns - values).var() / variance if 0 < variance < math.inf else math.nan


# ---- 5. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


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


@contextmanager
def writing(path):
    """RunError that names `path` if the disk is full, the folder is gone and the like."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise RunError(f"cannot write {path}: {error}. What was there before is intact") from error


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


def save_checkpoint(folder, state, keep):
    """Writes folder/<global_step>.pt, then removes all but the `keep` newest."""
    with writing(folder):
        folder.mkdir(exist_ok=True)
    write_atomically(folder / f"{state['global_step']:012d}.pt", partial(torch.save, state))
    for old in sorted(folder.glob("*.pt"))[:-keep]:
        old.unlink()


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


def finite(row):
    """The row's numbers as floats, None for those that JSON has no word for."""
    return {key: float(value) if math.isfinite(value) else None for key, value in row.items()}


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


class Stopwatch:
    """Seconds by activity since it was made: lap(name) books the time since the last lap."""

    def __init__(self):
        self.total, self.last = {}, time.perf_counter()

    def lap(self, name):
        now = time.perf_counter()
        self.total[name], self.last = self.total.get(name, 0.0) + now - self.last, now


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


def require_finite(**tensors):
    """RunError that names the first tensor with a value that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise RunError(f"{name} is not finite. The last good checkpoint is kept; try a lower --learning-rate")


# ---- 6. Evaluation ---------------------------------------------------------------------------------------------------


def evaluate(agent, obs_norm, args, video_folder=None):
    """Plays args.eval_episodes episodes in environments of their own, seeded by args.eval_seed alone.

    Returns a row per episode: its raw return and length. Touches no training state; the statistics stay frozen.
    """
    *seeds, action_seed = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes + 1)
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(int(action_seed.generate_state(1)[0]))
    vectorization = "envpool" if args.vectorization == "envpool" else "sync"
    with closing(make_envs(args.env_id, vectorization, seeds, video_folder)) as envs:
        obs, running = envs.reset(), np.ones(len(seeds), bool)
        returns, lengths = np.zeros(len(seeds)), np.zeros(len(seeds), np.int64)
        while running.any():
            obs = torch.as_tensor(obs if obs_norm is None else obs_norm.normalize(obs)).to(device)
            actions = agent.act(obs, None if args.eval_greedy else generator)[0]
            obs, reward, terminated, truncated, _ = envs.step(actions.cpu().numpy())
            returns, lengths = returns + reward * running, lengths + running
            running &= ~(terminated | truncated)
    return [{"split": "eval", "return": float(r), "length": int(n)} for r, n in zip(returns, lengths, strict=True)]


def summarize(rows, prefix):
    """Means of evaluation rows under prefix/..."""
    returns = [row["return"] for row in rows]
    return {f"{prefix}/return_mean": np.mean(returns), f"{prefix}/return_std": np.std(returns),
            f"{prefix}/length_mean": np.mean([row["length"] for row in rows])}  # fmt: skip


# ---- 7. Training -----------------------------------------------------------------------------------------------------


def train(args):
    # region: setup
    torch.set_num_threads(args.torch_threads or len(os.sched_getaffinity(0)))
    device = select_device(args.device, args.deterministic)
    random = Randomness(args.seed, device)
    run = RunLogger(args)
    if run.result is not None and not args.eval_only:
        print(f"finished before, nothing to do: {run.dir}\n{json.dumps(run.result)}")
        return run.result
    # endregion: setup

    envs = make_envs(args.env_id, args.vectorization, random.envs.spawn(args.num_envs))
    agent = Agent(envs.obs_shape, envs.num_actions, envs.continuous).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    stats = EpisodeStats(args.num_envs)
    obs_norm = RunningMeanStd(envs.obs_shape) if args.norm_obs else None
    scale_reward = RewardScaler(args.num_envs, args.gamma) if args.norm_reward else None

    T, N = args.num_steps, args.num_envs
    obs = torch.zeros((T, N, *envs.obs_shape), dtype=torch.uint8 if envs.obs_dtype == np.uint8 else torch.float32)
    actions = torch.zeros((T, N, envs.num_actions) if envs.continuous else (T, N), dtype=torch.float32)
    actions = actions if envs.continuous else actions.long()
    obs, actions, logprobs = obs.to(device), actions.to(device), torch.zeros(T, N, device=device)
    rewards, values, next_values = (np.zeros((T, N), np.float32) for _ in range(3))
    terminated, truncated, valid = (np.zeros((T, N), bool) for _ in range(3))

    def to_network(raw, learn=True):
        """Raw observations as network input; if `learn`, they enter the running statistics first."""
        if obs_norm is not None and learn:
            obs_norm.update(raw)
        return torch.as_tensor(raw if obs_norm is None else obs_norm.normalize(raw)).to(device)

    parts = {"agent": agent, "optimizer": optimizer, "random": random, "envs": envs, "stats": stats}
    parts |= {"obs_norm": obs_norm} if obs_norm else {}
    parts |= {"scale_reward": scale_reward} if scale_reward else {}
    first_update, global_step, row, next_raw, next_obs = 0, 0, {}, envs.reset(), None

    def snapshot(update):
        state = {name: part.state_dict() for name, part in parts.items()}
        return state | {"update": update, "global_step": global_step, "row": row, "next_obs": next_obs}

    with run, closing(envs):
        # region: restore
        state = run.restore(parts)
        if state is not None:
            first_update, global_step, row = state["update"], state["global_step"], state["row"]
            for name, part in parts.items():
                part.load_state_dict(state[name])
        # endregion: restore
        if args.eval_only:
            rows = evaluate(agent, obs_norm, args, run.dir / "videos" if args.capture_video else None)
            run.log_eval(global_step, rows)
            print(json.dumps(summarize(rows, "eval")))
            return summarize(rows, "eval")
        restored = state is not None and args.vectorization != "envpool"
        next_obs = state["next_obs"].to(device) if restored else to_network(next_raw)

        for update in range(first_update, args.num_updates):
            run.checkpoint(snapshot(update), due=update > first_update and update % args.checkpoint_interval == 0)
            if args.anneal_lr:
                optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / args.num_updates)

            # Collect: T steps of every environment.
            clock, bootstraps = Stopwatch(), {}
            for t in range(T):
                obs[t] = next_obs
                actions[t], logprobs[t], value = agent.act(next_obs, random.actions)
                values[t] = value.cpu().numpy()
                raw, reward, terminated[t], truncated[t], info = envs.step(actions[t].cpu().numpy())
                valid[t], ended = info["valid"], terminated[t] | truncated[t]
                rewards[t] = reward if scale_reward is None else scale_reward(reward, ended, valid[t])
                stats.step(reward, ended, valid[t])
                cut = info["final_mask"] & truncated[t] & ~terminated[t]
                if cut.any():  # obs already belongs to the next episode: bootstrap from the one that was cut off
                    bootstraps[t] = cut, agent.act(to_network(info["final_obs"][cut], learn=False))[2].cpu()
                next_obs = to_network(raw)
            global_step += int(valid.sum())

            # Advantages.
            next_values[:-1], next_values[-1] = values[1:], agent.act(next_obs)[2].cpu().numpy()
            for t, (cut, value) in bootstraps.items():
                next_values[t, cut] = value
            advantages, returns = gae(rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda)
            clock.lap("collect")

            # Optimise: minibatches of the steps in which the action counted.
            flat = {"obs": obs.flatten(0, 1), "actions": actions.flatten(0, 1), "logprobs": logprobs.flatten()}
            for name, array in (("values", values), ("advantages", advantages), ("returns", returns)):
                flat[name] = torch.as_tensor(array.reshape(-1), dtype=torch.float32).to(device)
            rows, losses, stop = np.flatnonzero(valid.reshape(-1)), [], False
            for _ in range(args.update_epochs):
                for minibatch in np.array_split(random.minibatches.permutation(rows), args.num_minibatches):
                    if len(minibatch) == 0:  # fewer valid steps than minibatches
                        continue
                    b = {name: tensor[torch.as_tensor(minibatch, device=device)] for name, tensor in flat.items()}
                    if args.norm_adv and len(minibatch) > 1:
                        b["advantages"] = (b["advantages"] - b["advantages"].mean()) / (b["advantages"].std() + 1e-8)
                    out, value = agent(b["obs"])
                    distribution = agent.distribution(out)
                    loss, parts_of_loss = ppo_loss(
                        distribution.log_prob(b["actions"]), distribution.entropy(), value, b["logprobs"], b["values"],
                        b["advantages"], b["returns"], args.clip_coef, args.clip_vloss, args.ent_coef, args.vf_coef,
                    )  # fmt: skip
                    optimizer.zero_grad()
                    loss.backward()
                    grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                    if not torch.isfinite(grad_norm + loss):
                        require_finite(**flat, logits=out, value=value, **parts_of_loss, grad_norm=grad_norm)
                    optimizer.step()
                    losses.append(torch.stack([*parts_of_loss.values(), grad_norm]).detach())
                    stop = args.target_kl is not None and parts_of_loss["approx_kl"] > args.target_kl
                    if stop:
                        break
                if stop:
                    break
            with torch.no_grad():  # before a checkpoint can hold them
                out, value = agent(next_obs)
            require_finite(**dict(agent.named_parameters()), policy_output=out, squared_value=value**2)

            # Log and evaluate.
            last = update + 1 == args.num_updates
            row = {}
            if losses:
                names = [f"losses/{name}" for name in (*parts_of_loss, "grad_norm")]
                row = dict(zip(names, torch.stack(losses).mean(0).tolist()))
            row |= {"losses/explained_variance": explained_variance(values[valid], returns[valid]),
                    "losses/gradient_steps": len(losses), "charts/update": update + 1, "perf/dead_steps": stats.dead,
                    "charts/learning_rate": optimizer.param_groups[0]["lr"]}  # fmt: skip
            clock.lap("update")
            if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
                rows = evaluate(agent, obs_norm, args, run.dir / "videos" if last and args.capture_video else None)
                run.log_eval(global_step, rows)
                row |= summarize(rows, "eval")
                clock.lap("eval")
            row |= {f"perf/{name}_s": seconds for name, seconds in clock.total.items()}
            if last or (update + 1) % args.log_interval == 0:
                run.log(global_step, stats.pop() | row, update + 1)

        # region: finish
        run.checkpoint(snapshot(args.num_updates), due=True)
        names = {key: value for key, value in row.items() if key.startswith("eval")}
        return run.finish({"global_step": global_step, "wall_s": run.elapsed()} | names)
        # endregion: finish


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
