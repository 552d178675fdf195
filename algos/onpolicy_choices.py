"""Every choice of an on-policy agent for continuous control as an argument; many configurations in one process.

Paper: Andrychowicz et al. 2020, "What Matters In On-Policy Reinforcement Learning?", arXiv:2006.05990. C1 to C68 are
its numbers. Where its text, Table 2, and its authors' settings and code differ, the text's equation holds.

  Train:     python algos/onpolicy_choices.py --env-id HalfCheetah-v4 --preset recommended --num-envs 16
  A stack:   the same with --stack FILE, a JSON list of one object a member: [{"seed": 1}, {"policy_loss": "awr"}]
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

The members of a stack train in one process with batched matrix products; a plain run is a stack of one. Each member has
the folder, the numbers (to the bit) and the checkpoints of its plain run, which can go on from them.
Differs from the paper: mean and deviation of the observations take in a rollout after it was learned from, not before,
so that pi = mu at each iteration's first minibatch.
"""

import ast
import ctypes
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
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal, get_args

import gymnasium as gym
import numpy as np
import torch
import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.nn import functional as F
from torch.nn import init
from tqdm import tqdm

# ---- 1. Arguments ----------------------------------------------------------------------------------------------------

# The paper's Table 2; and what a choice that is inactive there takes in a run that activates it.
DEFAULT = dict(
    num_envs=256, iteration_size=2048, update_epochs=10, minibatch_size=64, batch_mode="shuffle_transitions",
    advantage_estimator="gae", n_step=3, gae_lambda=0.95, vtrace_lambda=0.95, vtrace_rho_bar=1.0, value_loss="mse",
    huber_delta=1.0, value_clip=0.2,  # C13: Table 2; off in the authors' settings
    policy_loss="ppo", vtrace_loss_rho_bar=1.0, clip_coef=0.2, awr_beta=0.1, awr_max_weight=1.5, vmpo_epsilon=0.01,
    gamma=0.99, frame_skip=1, handle_abandoned=False,  # C22: Table 2; True in the authors' code
    optimizer="adam", adam_learning_rate=3e-4, rmsprop_learning_rate=3e-4, adam_beta1=0.9, rmsprop_momentum=0.9,
    adam_eps=1e-7, rmsprop_eps=1e-7, rmsprop_centered=False, final_lr=0.0, regularization="none", penalty="entropy",
    constraint="kl_mu_pi", kl_mu_pi_threshold=0.01, kl_pi_mu_threshold=0.01, kl_ref_pi_threshold=10.0,
    decoupled_mean_threshold=0.001, decoupled_std_threshold=0.01, entropy_threshold=0.0, kl_mu_pi_coef=0.1,
    kl_pi_mu_coef=0.1, kl_ref_pi_coef=1e-3, decoupled_mean_coef=0.1, decoupled_std_coef=0.1, entropy_coef=1e-3,
    network="separate",  # C47: shared in Table 2, which lists the sub-choices of separate networks all the same
    shared_width=64, policy_width=64, value_width=64, shared_depth=2, policy_depth=2, value_depth=2, vf_coef=1.0,
    activation="tanh", initializer="orthogonal_1.41", policy_init_scale=0.01, value_init_scale=1.0, norm_adv=False,
    std_dependence="global", std_transform="exp", init_std=1.0, min_std=1e-3, norm_obs="average", obs_clip=10.0,
    norm_value="average", max_grad_norm=0.5, action_transform="clip",  # C63: Table 2; tanh in the authors' settings
)  # fmt: skip
PRESETS = {"default": DEFAULT, "recommended": DEFAULT | dict(  # what section 3 recommends, where it names a value
    batch_mode="shuffle_transitions_recompute", gae_lambda=0.9, value_clip=0.0, clip_coef=0.25, value_width=256,
    std_transform="softplus", init_std=0.5, action_transform="tanh")}  # fmt: skip
REGULARIZERS = ("entropy", "kl_mu_pi", "kl_pi_mu", "kl_ref_pi", "decoupled_kl")
PARTS = {kind: [kind] for kind in REGULARIZERS} | {"decoupled_kl": ["decoupled_mean", "decoupled_std"]}
# Choices that only exist within a value of another one.
WITHIN = {
    ("advantage_estimator", "gae"): ["gae_lambda"], ("advantage_estimator", "n_step"): ["n_step"],
    ("advantage_estimator", "vtrace"): ["vtrace_lambda", "vtrace_rho_bar"], ("value_loss", "huber"): ["huber_delta"],
    ("policy_loss", "ppo"): ["clip_coef"], ("policy_loss", "vtrace"): ["vtrace_loss_rho_bar"],
    ("policy_loss", "awr"): ["awr_beta", "awr_max_weight"], ("policy_loss", "vmpo"): ["vmpo_epsilon"],
    ("optimizer", "adam"): ["adam_learning_rate", "adam_beta1", "adam_eps"],
    ("optimizer", "rmsprop"): ["rmsprop_learning_rate", "rmsprop_momentum", "rmsprop_eps", "rmsprop_centered"],
    ("regularization", "penalty"): ["penalty"], ("regularization", "constraint"): ["constraint"],
    ("network", "shared"): ["shared_width", "shared_depth", "vf_coef"], ("norm_obs", "average"): ["obs_clip"],
    ("network", "separate"): ["policy_width", "policy_depth", "value_width", "value_depth"],
} | {("penalty", kind): [f"{part}_coef" for part in PARTS[kind]] for kind in REGULARIZERS} | {
    ("constraint", kind): [f"{part}_threshold" for part in PARTS[kind]] for kind in REGULARIZERS}  # fmt: skip
# Choices that shape the tensors of a stack, equal for all of its members.
STRUCTURE = ("num_envs", "iteration_size", "update_epochs", "minibatch_size", "batch_mode", "frame_skip", "network",
             "shared_width", "policy_width", "value_width", "shared_depth", "policy_depth", "value_depth", "activation",
             "std_dependence")  # fmt: skip
MEMBER = "seed", "preset", "run_dir"  # what a member sets beside its choices


def flag(name):
    return name.replace("_", "-")


@dataclass
class Args:
    # run
    exp_name: str = Path(__file__).stem  # folder under run_dir
    seed: int = 1  # all randomness but the evaluation's derives from it
    stack: Path | None = None  # JSON list: for each member an object of its choices, seed, preset and run_dir
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
    # environment and budget
    env_id: str = "HalfCheetah-v4"  # id with vectors as observations and a bounded box of actions
    vectorization: Literal["envpool", "sync"] = "envpool"  # envpool's ids, or Gymnasium's (also module:id)
    total_timesteps: int = 1_000_000  # environment frames; rounded up to whole iterations
    # evaluation
    eval_interval: int = 50  # iterations between evaluations; 0: only at the end
    eval_episodes: int = 20  # episodes per evaluation
    eval_max_steps: int = 27_000  # evaluation episodes still running after so many frames count as they are
    eval_seed: int = 10_000  # seeds the evaluation episodes, the same for every run and algorithm
    eval_greedy: bool = False  # evaluate the policy's mean (else, as the authors do, samples)
    eval_only: bool = False  # evaluate the newest checkpoint of this same command and stop
    # choices; {the paper's grid}. None: the preset's value, or inactive, where the choice that it is within is not made
    preset: Literal["default", "recommended"] = "default"  # the paper's Table 2, or what it recommends
    num_envs: int | None = None  # C1 environments side by side {64, 128, 256}
    iteration_size: int | None = None  # C2 decisions per iteration, of all environments {512, 1024, 2048, 4096}
    update_epochs: int | None = None  # C3 passes over an iteration's data {1, 3, 10}
    minibatch_size: int | None = None  # C4 transitions {64, 128, 256}
    batch_mode: Literal["fixed_trajectories", "shuffle_trajectories", "shuffle_transitions",
                        "shuffle_transitions_recompute"] | None = None  # C5 {all}  # fmt: skip
    advantage_estimator: Literal["gae", "n_step", "vtrace"] | None = None  # C6 {all}
    n_step: int | None = None  # C7 at most the fragment's rest {1, 3, 10, 1000000}
    gae_lambda: float | None = None  # C8 {0.8, 0.9, 0.95, 0.99}
    vtrace_lambda: float | None = None  # C9 {0.8, 0.9, 0.95, 0.99, 1}
    vtrace_rho_bar: float | None = None  # C10 limit of both importance weights {1, 1.2, 1.5, 2}
    value_loss: Literal["mse", "huber"] | None = None  # C11 {all}
    huber_delta: float | None = None  # C12 {0.001, 0.01, 0.1, 1}
    value_clip: float | None = None  # C13 PPO's, in the network's units; 0: none {0.001, 0.01, 0.1, 1, 0}
    policy_loss: Literal["awr", "pg", "ppo", "rpa", "vmpo", "vtrace"] | None = None  # C14 {all}
    vtrace_loss_rho_bar: float | None = None  # C15 limit of the importance weight {1, 1.2, 1.5, 2}
    clip_coef: float | None = None  # C16 PPO's epsilon: ratios in [1/(1+e), 1+e] {0.1, 0.2, 0.3, 0.5}
    awr_beta: float | None = None  # C17 temperature {1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3}
    awr_max_weight: float | None = None  # C18 {1.1, 1.2, 1.3, 1.5}
    vmpo_epsilon: float | None = None  # C19 limit of the weights' divergence {1e-4, 3e-4, ..., 0.1, 0.3, 1}
    gamma: float | None = None  # C20 discount per frame {0.95, 0.97, 0.99, 0.999}
    frame_skip: int | None = None  # C21 frames per decision {1, 2, 5}
    handle_abandoned: bool = False  # C22 bootstrap where a time limit ends an episode (else: as a terminal state)
    optimizer: Literal["adam", "rmsprop"] | None = None  # C23 in Keras' forms {all}
    adam_learning_rate: float | None = None  # C24 {3e-5, 1e-4, 3e-4, 1e-3, 3e-3}
    rmsprop_learning_rate: float | None = None  # C25 {3e-5, 1e-4, 3e-4, 1e-3}
    adam_beta1: float | None = None  # C26 momentum {0, 0.9}
    rmsprop_momentum: float | None = None  # C27 {0, 0.9}
    adam_eps: float | None = None  # C28 {1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4}
    rmsprop_eps: float | None = None  # C29 {1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4}
    rmsprop_centered: bool = False  # C30 divide by the gradient's deviation
    final_lr: float | None = None  # C31 the last step size as a part of the first, linearly {0, 1}
    regularization: Literal["none", "penalty", "constraint"] | None = (
        None  # C32 {all}; the grids of C35 to C46 are not known
    )
    penalty: Literal[REGULARIZERS] | None = None  # C33 {all}
    constraint: Literal[REGULARIZERS] | None = None  # C34 {all}
    kl_mu_pi_threshold: float | None = None  # C35 KL(mu || pi) < this
    kl_pi_mu_threshold: float | None = None  # C36 KL(pi || mu) < this
    kl_ref_pi_threshold: float | None = None  # C37 KL(N(0, 1) || pi) < this
    decoupled_mean_threshold: float | None = None  # C38 KL of the mean's change < this
    decoupled_std_threshold: float | None = None  # C39 KL of the deviation's change < this
    entropy_threshold: float | None = None  # C40 -entropy < this
    kl_mu_pi_coef: float | None = None  # C41 weight in the loss
    kl_pi_mu_coef: float | None = None  # C42
    kl_ref_pi_coef: float | None = None  # C43
    decoupled_mean_coef: float | None = None  # C44
    decoupled_std_coef: float | None = None  # C45
    entropy_coef: float | None = None  # C46
    network: Literal["separate", "shared"] | None = None  # C47 {all}
    shared_width: int | None = None  # C48 units of a layer {16, 32, 64, 128, 256, 512}
    policy_width: int | None = None  # C49 {16, 32, 64, 128, 256, 512}
    value_width: int | None = None  # C50 {16, 32, 64, 128, 256, 512}
    shared_depth: int | None = None  # C51 hidden layers {1, 2, 4, 8}
    policy_depth: int | None = None  # C52 {1, 2, 4, 8}
    value_depth: int | None = None  # C53 {1, 2, 4, 8}
    vf_coef: float | None = None  # C54 weight of the value loss in a shared network {0.001, 0.1, 1, 10, 100}
    activation: Literal["elu", "leaky_relu", "relu", "sigmoid", "swish", "tanh"] | None = None  # C55 {all}
    initializer: Literal["glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "lecun_normal", "lecun_uniform",
                         "orthogonal", "orthogonal_1.41"] | None = None  # C56 {all}  # fmt: skip
    policy_init_scale: float | None = None  # C57 multiplies the last layer's first weights {0.001, 0.01, 0.1, 1}
    value_init_scale: float | None = None  # C58 {0.001, 0.01, 0.1, 1}
    std_dependence: Literal["global", "state"] | None = None  # C59 deviation: parameter or network's output {all}
    std_transform: Literal["exp", "softplus"] | None = None  # C60 {all}
    init_std: float | None = None  # C61 {0.1, 0.5, 1, 2}
    min_std: float | None = None  # C62 {0, 0.01, 0.1}
    action_transform: Literal["clip", "tanh"] | None = None  # C63 from the Gaussian's sample to [-1, 1] {all}
    norm_obs: Literal["average", "none"] | None = None  # C64 {all}
    obs_clip: float | None = None  # C65 of normalised observations; 0: none {1, 2, 5, 10, 0}
    norm_value: Literal["average", "none"] | None = None  # C66 {all}
    norm_adv: bool = False  # C67 normalise advantages in each minibatch
    max_grad_norm: float | None = None  # C68 0: no limit {0.5, 1, 2, 5, 0}

    def __post_init__(self):
        if self.stack is not None:  # the choices stay open for the members
            self.members()
            return
        for entry in fields(self):  # tyro's work, for what does not come from a command line
            kinds, given = {entry.type, *get_args(entry.type)}, getattr(self, entry.name)
            words = [word for kind in get_args(entry.type) for word in get_args(kind) or [kind] if type(word) is str]
            if words and given not in words and not (given is None and type(None) in kinds):
                raise ValueError(f"--{flag(entry.name)} {given}: it is one of {', '.join(words)}")
            kinds |= {int} if float in kinds else set()
            if kinds & {bool, int} and type(given) not in kinds:
                raise ValueError(f"--{flag(entry.name)} {json.dumps(given)}: it must be of type {entry.type}")
        within = {name: parent for parent, names in WITHIN.items() for name in names}
        for name, value in PRESETS[self.preset].items():  # each after the one that it is within
            given, (parent, needed) = getattr(self, name), within.get(name, (None, None))
            if parent is None or getattr(self, parent) == needed:
                setattr(self, name, value if given is None else given)
            elif given is not None and given is not False:
                found = f"here that is {getattr(self, parent) or 'not made'}"
                raise ValueError(f"--{flag(name)} {given} is a choice within --{flag(parent)} {needed}, but {found}")
        unit = dict.fromkeys(("gamma", "gae_lambda", "vtrace_lambda", "adam_beta1", "rmsprop_momentum"), (0, 1))
        above = dict.fromkeys(("clip_coef", "awr_beta", "huber_delta", "init_std", "vtrace_rho_bar"), (1e-9, math.inf))
        check_numbers(self, **unit, **above, seed=(0, math.inf), eval_interval=(0, math.inf), torch_threads=(0, 1024),
                      eval_seed=(0, 2**64 - 1), entropy_threshold=(-1e9, 1e9), min_std=(0, self.init_std))  # fmt: skip
        size, self.num_steps = self.iteration_size, self.iteration_size // self.num_envs  # of a fragment
        self.num_updates = -(-self.total_timesteps // (size * self.frame_skip))
        needed = {"--num-envs": (self.num_envs, size), "--minibatch-size": (self.minibatch_size, size)}
        if self.batch_mode in ("fixed_trajectories", "shuffle_trajectories"):
            needed["fragments of --iteration-size / --num-envs ="] = self.num_steps, self.minibatch_size
        for name, (part, whole) in needed.items():
            if whole % max(part, 1) or part > whole:
                what = f"--iteration-size {size}" if whole == size else f"--minibatch-size {whole}"
                raise ValueError(f"{name} {part}: it must divide {what} (--batch-mode {self.batch_mode})")
        try:
            if self.vectorization == "envpool":
                import envpool

                if self.env_id not in (known := envpool.list_all_envs()):
                    near = ", ".join(difflib.get_close_matches(self.env_id, known))
                    raise ValueError(f"--env-id {self.env_id}: envpool has no such id. Nearest: {near}")
            else:
                gym.wrappers.FlattenObservation(gym.make(self.env_id)).close()
        except (gym.error.Error, ImportError, NotImplementedError) as error:
            raise ValueError(f"--env-id {self.env_id}: {str(error) or 'observations that are no numbers'}") from error

    def members(self):
        """The configurations of the stack; of a plain run itself."""
        if self.stack is None:
            return [self]
        members = []
        try:
            if not (isinstance(rows := json.loads(self.stack.read_text()), list) and rows):
                raise ValueError("the file must hold a list of one object or more")
            for row in rows:
                row = {name.replace("-", "_"): value for name, value in dict(row).items()}
                if other := row.keys() - {*MEMBER, *DEFAULT}:
                    raise ValueError(f"{other.pop()}: members set {', '.join(MEMBER)} and choices alone")
                if (member := replace(self, stack=None, **row)) in members:
                    raise ValueError("the same run as one before it")
                members.append(member)
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"--stack {self.stack}, member {len(members)}: {error}") from error
        for name in STRUCTURE:
            if len(found := {str(getattr(member, name)) for member in members}) != 1:
                raise ValueError(f"--stack {self.stack}: its members share one --{flag(name)}, but here are {found}")
        if self.track:
            raise ValueError("--track follows one run of a process: leave it out of a stack")
        return members


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


class GymEnvs:
    """Gymnasium environments in this process, behind envpool's interface."""

    def __init__(self, env_id, seeds):
        self.envs = [gym.wrappers.FlattenObservation(gym.make(env_id)) for _ in seeds]
        self.observation_space, self.action_space = self.envs[0].observation_space, self.envs[0].action_space
        self.rngs = [np.random.default_rng(seed) for seed in seeds]  # of the episodes' seeds
        self.close = lambda: [env.close() for env in self.envs]

    def reset(self, ids):
        return np.stack([self.envs[i].reset(seed=int(self.rngs[i].integers(2**31)))[0] for i in ids]), {}

    def step(self, actions, ids):
        obs, rewards, *flags, _ = zip(*(self.envs[i].step(a) for i, a in zip(ids, actions, strict=True)), strict=True)
        return np.stack(obs), np.array([np.asarray(r).item() for r in rewards]), *np.array(flags, bool), {}


class Envs:
    """A run's environments. Actions in [-1, 1] are scaled to the box and repeated for `frame_skip` frames.

    step(actions (N, A)) -> obs, reward, terminated, truncated, info, arrays over num_envs. An episode restarts in the
    step that ends it: obs (also `self.obs`) then belongs to the next one, info["final_obs"] holds the true last one.
    """

    def __init__(self, args, seeds):
        if args.vectorization == "envpool":
            import envpool

            ints = [int(seed.generate_state(1)[0] % 2**31) for seed in seeds]
            self.envs = envpool.make(args.env_id, env_type="gymnasium", num_envs=len(ints), seed=ints, num_threads=1)
        else:
            self.envs = GymEnvs(args.env_id, seeds)
        space, self.frame_skip, self.ids = self.envs.action_space, args.frame_skip, np.arange(len(seeds))
        if len(self.envs.observation_space.shape or ()) != 1:
            sys.exit(f"error: observations {self.envs.observation_space}: this script takes vectors")
        if not (isinstance(space, gym.spaces.Box) and space.shape and np.isfinite([space.low, space.high]).all()):
            sys.exit(f"error: actions {space}: this script takes a box with bounds; ppo_vector.py takes others")
        self.low, self.half = space.low, (space.high.astype(np.float64) - space.low) / 2
        self.num_actions = math.prod(space.shape)
        self.obs = np.zeros((len(seeds), *self.envs.observation_space.shape), np.float32)
        self.begun, self.steps, self.frames = (np.zeros(len(seeds), np.int64) for _ in range(3))
        self.taken = np.zeros((64, len(seeds), self.num_actions), np.float32)  # actions of the unfinished episodes
        self.returns, self.episodes, self.finished = np.zeros(len(seeds)), 0, []  # finished: (return, length)
        self.close = self.envs.close
        self.begin(self.ids)

    def checked(self, ids, obs, rewards=0.0):
        """obs as float32; SystemExit if a number is not finite."""
        finite = np.isfinite(obs).all(1) & np.isfinite(rewards)
        if not finite.all():
            at = finite.argmin()
            found = f"reward {np.broadcast_to(rewards, len(ids))[at]}, observation {obs[at]}: not finite"
            where = f"environment {ids[at]}, step {self.steps[ids[at]]} of its episode {self.begun[ids[at]]}"
            sys.exit(" ".join(f"error: {where}: {found}".split()))
        return obs.astype(np.float32)

    def begin(self, ids):
        self.steps[ids] = self.frames[ids] = self.returns[ids] = 0
        self.begun[ids] += 1
        self.obs[ids] = self.checked(ids, self.envs.reset(ids)[0])

    def play(self, actions, ids):
        """One decision in environments `ids` -> last observations, sums of rewards, flags, the frames that it took."""
        scaled = self.low + (actions.reshape(-1, *self.low.shape) + 1.0) * self.half
        scaled, frames = scaled.astype(self.low.dtype), np.ones(len(ids), np.int64)
        obs, rewards, terminated, truncated, _ = self.envs.step(scaled, ids)
        for _ in range(1, self.frame_skip):
            if len(on := np.flatnonzero(~(terminated | truncated))):
                obs[on], reward, terminated[on], truncated[on], _ = self.envs.step(scaled[on], ids[on])
                rewards[on], frames[on] = rewards[on] + reward, frames[on] + 1
        self.steps[ids], self.frames[ids] = self.steps[ids] + 1, self.frames[ids] + frames
        return self.checked(ids, obs, rewards), rewards, terminated, truncated, frames

    def step(self, actions):
        if self.steps.max() == len(self.taken):
            self.taken = np.concatenate([self.taken, np.zeros_like(self.taken)])
        self.taken[self.steps, self.ids] = actions
        self.obs, rewards, terminated, truncated, frames = self.play(actions, self.ids)
        self.returns, final_obs = self.returns + rewards, self.obs
        if len(ids := np.flatnonzero(terminated | truncated)):
            self.finished += zip(self.returns[ids].tolist(), self.frames[ids].tolist(), strict=True)
            self.obs = final_obs.copy()
            self.begin(ids)
        return self.obs, rewards, terminated, truncated, {"final_obs": final_obs, "frames": frames}

    # Copied from algos/ppo.py:Envs.pop_episodes
    def pop_episodes(self):
        """Means of raw return and length over the episodes that finished since the last call, and the number of all."""
        returns, lengths = np.mean(self.finished, axis=0) if self.finished else (math.nan, math.nan)
        self.episodes, self.finished = self.episodes + len(self.finished), []
        return {"charts/episodic_return": returns, "charts/episodic_length": lengths, "charts/episodes": self.episodes}

    def state_dict(self):
        return {"obs": self.obs, "begun": self.begun, "steps": self.steps, "taken": self.taken[: self.steps.max() + 1],
                "returns": self.returns, "episodes": self.episodes, "finished": self.finished}  # fmt: skip

    def load_state_dict(self, state):
        """Begins as many episodes and plays the unfinished ones again: the same state where random numbers are drawn
        at resets alone, as in MuJoCo's tasks. Where that leads elsewhere, new episodes begin."""
        obs, begun, steps, self.taken, returns = (state[name].numpy().copy() for name in list(state)[:5])
        for episode in range(1, begun.max()):
            self.begin(self.ids[begun > episode])
        for t in range(steps.max()):
            ids = self.ids[steps > t]
            self.obs[ids] = self.play(self.taken[t, ids], ids)[0]
        self.returns, self.episodes, self.finished = returns, state["episodes"], state["finished"]
        if len(lost := np.flatnonzero((self.obs != obs).any(1))):
            print(f"note: environments {lost.tolist()} do not repeat themselves; new episodes begin", file=sys.stderr)
            self.begin(lost)


# ---- 3. The method: distribution, advantages, losses, minibatches, optimizers ----------------------------------------


def log_prob(x, mean, std):
    """log N(x; mean, std) of a diagonal Gaussian, (..., A) -> (...); of raw samples (C63; the code: clipped)."""
    return (-0.5 * ((x - mean) / std) ** 2 - std.log() - 0.5 * math.log(2 * math.pi)).sum(-1)


def log_tanh_derivative(x):
    """log(1 - tanh(x)^2), also where tanh(x) rounds to 1."""
    return 2 * (math.log(2) - x - F.softplus(-2 * x))


def action_std(kind, x_rho, init_std, min_std):
    """C60 to C62: T(x_rho + c_rho) + min_std, where c_rho = T^-1(init_std - min_std), so that x_rho = 0 gives init_std.
    T exp has its argument within +-15, and the slope exp there as well. Equal init_std and min_std: it stays there."""
    above = init_std - min_std
    if kind == "softplus":
        return F.softplus(x_rho + above + (-torch.expm1(-above)).log()) + min_std
    x = x_rho + above.log()
    clipped = x.clamp(-15, 15).exp().detach()
    return torch.where(above > 0, clipped * (1 + x - x.detach()).nan_to_num(), 0.0) + min_std


def kl_gauss(mean0, std0, mean1, std1):
    """KL(N(mean0, std0) || N(mean1, std1)), (..., A) -> (...)."""
    return ((std1 / std0).log() + (std0**2 + (mean0 - mean1) ** 2) / (2 * std1**2) - 0.5).sum(-1)


def advantages(kind, rewards, values, next_values, terminated, truncated, log_rho, gamma, lam, n, rho_bar):
    """C6 to C10, of fragments (..., T, N); gamma, lam, n, rho_bar are numbers or (..., 1) -> A_t, targets of V(s_t).

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t); `next_values` is V of each step's true successor. Terminated cuts
    bootstrap and trace, truncated the trace alone, as the fragment's end does.
    gae:    A_t = delta_t + gamma lam A_{t+1}, target V(s_t) + A_t
    vtrace: A_t = delta_t + gamma lam acc_{t+1}, acc_t = min(pi/mu, rho_bar) A_t, target V(s_t) + acc_t
    n_step: target = sum_{i<n} gamma^i r_{t+i} + gamma^n V(s_{t+n}), n at most to the end of episode or fragment
    """
    step = lambda x: torch.as_tensor(x, dtype=rewards.dtype).unsqueeze(-1)  # noqa: E731
    bootstrap = step(gamma) * torch.where(terminated, 0.0, next_values)
    ended, steps = terminated | truncated, rewards.shape[-2]
    if kind == "n_step":
        target = one_step = rewards + bootstrap
        for i in range(1, min(int(step(n).max()), steps)):
            longer = torch.where(ended, one_step, rewards + step(gamma) * target.roll(-1, -2))
            longer[..., -1, :] = one_step[..., -1, :]
            target = torch.where(step(n) > i, longer, target)
        return target - values, target
    delta = rewards + bootstrap - values
    weight = log_rho.clamp(max=80).exp().minimum(step(rho_bar)) if kind == "vtrace" else torch.ones_like(delta)
    decay = step(gamma) * step(lam) * ~ended
    out, traces, trace = torch.empty_like(delta), torch.empty_like(delta), torch.zeros_like(delta[..., 0, :])
    for t in reversed(range(steps)):
        out[..., t, :] = delta[..., t, :] + decay[..., t, :] * trace
        traces[..., t, :] = trace = weight[..., t, :] * out[..., t, :]
    return out, values + traces


def normalize_advantages(advantage):
    """C67, over the last axis, with the population's deviation."""
    centred = advantage - advantage.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + 1e-8)


def vmpo_weights(advantage, temperature):
    """psi = softmax(A / temperature) over the upper half of the advantages (..., B), and its KL from uniform, (...), as
    in the text (the authors' code keeps the lower half in the softmax, and the divergence is a log-mean-exp)."""
    kept = advantage >= advantage.topk(max(1, advantage.shape[-1] // 2), -1).values[..., -1:]
    log_psi = torch.where(kept, advantage / temperature, -math.inf).log_softmax(-1)
    psi = log_psi.exp()
    return psi, (psi * (log_psi.clamp(min=-1e4) + kept.sum(-1, keepdim=True).to(psi.dtype).log())).sum(-1)


def policy_loss(kind, logp, logp_mu, advantage, clip_coef, rho_bar, temperature, max_weight):
    """C14 to C19: losses (..., B), whose mean is the policy's loss. sg: no gradient flows through it.

    ppo:    -min(rho A, clip(rho, 1/(1+clip_coef), 1+clip_coef) A), rho = pi/mu
    pg:     -log pi A                     vtrace: -log pi A sg(min(pi/mu, rho_bar))
    awr:    -log pi sg(min(exp(A / temperature), max_weight))
    rpa:    -log pi [A > 0]  (0 at A = 0, where the authors' code has 1)
    vmpo:   -log pi sg(psi), summed: vmpo_weights
    """
    ratio = (logp - logp_mu).clamp(max=80).exp()  # exp(89) is inf, its gradient NaN even where clipped
    if kind == "ppo":
        return torch.maximum(-ratio * advantage, -ratio.clamp(1 / (1 + clip_coef), 1 + clip_coef) * advantage)
    if kind == "pg":
        weight = advantage
    elif kind == "vtrace":
        weight = ratio.detach().clamp(max=rho_bar) * advantage
    elif kind == "awr":
        weight = (advantage / temperature).clamp(max=80).exp().clamp(max=max_weight)
    elif kind == "rpa":
        weight = (advantage > 0).to(logp.dtype)
    else:
        weight = vmpo_weights(advantage, temperature)[0] * advantage.shape[-1]
    return -logp * weight


def value_loss(kind, value, target, old_value, clip, delta):
    """C11 to C13: losses (..., B). mse: (v - t)^2; huber: 1/2 e^2 up to |e| = delta, then delta |e| - 1/2 delta^2; with
    clip > 0 the larger of that and that of v within old_value +- clip."""
    clip, losses = torch.as_tensor(clip, dtype=value.dtype), []
    for v in (value, old_value + (value - old_value).clamp(-clip, clip)):
        error = (v - target).abs()
        losses.append(error**2 if kind == "mse" else torch.where(
            error <= delta, 0.5 * error**2, delta * error - 0.5 * delta**2))  # fmt: skip
    return torch.where(clip > 0, torch.maximum(*losses), losses[0])


def regularizer(kind, mean, std, mu_mean, mu_std, noise):
    """C33, C34 of pi = N(mean, std) and mu, (..., B, A) -> R (..., 2, B); the second is 0 but for decoupled_kl.
    `kind` is (name, C63). entropy: -H(pi); with tanh - sum log tanh'(x) at one sample x = mean + std noise, too.
    kl_mu_pi: KL(mu || pi). kl_pi_mu: KL(pi || mu). kl_ref_pi: KL(N(0, 1) || pi) (the code's ref: deviation init_std).
    decoupled_kl: KL(mu || zeta) and KL(zeta || pi), with zeta = N(mu_mean, std): the parts of mean and deviation.
    """
    pi, mu = (mean, std), (mu_mean, mu_std)
    first = second = torch.zeros_like(mean[..., 0])
    if kind[0] == "entropy":
        first = -(std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
        if kind[1] == "tanh":
            first = first - log_tanh_derivative(mean + std * noise).sum(-1)
    elif kind[0] == "decoupled_kl":
        first, second = kl_gauss(mu_mean, std, *pi), kl_gauss(*mu, mu_mean, std)
    elif kind[0] is not None:
        ref = torch.zeros_like(mean), torch.ones_like(std)
        first = kl_gauss(*{"kl_mu_pi": mu + pi, "kl_pi_mu": pi + mu, "kl_ref_pi": ref + pi}[kind[0]])
    return torch.stack([first, second], -2)


def constraint_loss(p, divergence, threshold):
    """R < threshold with alpha = exp(10 p): sg(alpha) R + alpha sg(threshold - R), whose descent raises alpha where
    R is above. p is clipped to +-P_LIMIT after each step."""
    alpha = (10 * p).exp()
    return alpha.detach() * divergence + alpha * (threshold - divergence).detach()


def minibatches(mode, num_steps, num_envs, size, rng):
    """C5: one epoch's rows t * num_envs + i of the transitions, (iteration size / size, size). In trajectory modes a
    minibatch is whole fragments, step by step, so that its first rows are its environments."""
    if mode.startswith("shuffle_transitions"):
        return rng.permutation(num_steps * num_envs).reshape(-1, size)
    envs = np.arange(num_envs) if mode == "fixed_trajectories" else rng.permutation(num_envs)
    return (np.arange(num_steps)[:, None] * num_envs + envs.reshape(-1, 1, size // num_steps)).reshape(-1, size)


def optimizer_change(kind, step, grad, first, second, buffer, lr, momentum, eps, centered):
    """C23 to C30, `step` from 1: what to take off the parameters, then the new first, second, buffer. Keras' forms:
    adam:    lr sqrt(1 - 0.999^t) / (1 - momentum^t) m / (sqrt(v) + eps)
    rmsprop: with momentum > 0 buffer = momentum buffer + lr g / sqrt(v + eps), without it lr g / (sqrt(v) + eps);
             v is the mean of g^2 (decay 0.9: Keras' default, which the text calls rho = 0.1), minus m^2 if centered
    """
    decay, square_decay = (momentum, 0.999) if kind == "adam" else (0.9, 0.9)
    first, second = decay * first + (1 - decay) * grad, square_decay * second + (1 - square_decay) * grad.square()
    if kind == "adam":
        rate = lr * math.sqrt(1 - 0.999**step) / (1 - momentum**step)
        return rate * first / (second.sqrt() + eps), first, second, buffer
    variance = torch.where(torch.as_tensor(centered, dtype=torch.bool), second - first.square(), second)
    change = torch.where(torch.as_tensor(momentum) > 0, momentum * buffer + lr * grad / (variance + eps).sqrt(),
                         lr * grad / (variance.clamp(min=0).sqrt() + eps))  # fmt: skip
    return change, first, second, change


def learning_rate(first, final, step, total):
    """C31: linearly from `first` at step 0 to `final` times that at step `total`."""
    return first * ((1 - min(step / total, 1)) * (1 - final) + final)


def clip_gradient(grad, limit):
    """C68: grad (..., P) with an L2 norm of at most `limit` (..., 1); 0: as it is -> grad, norm (..., 1)."""
    norm = torch.linalg.vector_norm(grad, dim=-1, keepdim=True)
    return torch.where((limit > 0) & (norm > limit), grad * (limit / norm), grad), norm


def add_moments(moments, x):
    """C64, C66: count, mean, sum of squared differences (..., 3, D) of each coordinate take in rows x (..., B, D)."""
    (count, mean, squares), x, n = moments.unbind(-2), x.to(moments.dtype), x.shape[-2]
    gap, within = x.mean(-2) - mean, (x - x.mean(-2, keepdim=True)).square().sum(-2)
    squares = squares + within + gap**2 * (count * n / (count + n))
    return torch.stack([count + n, mean + gap * (n / (count + n)), squares], -2)


def mean_and_std(moments):
    """(..., 3, D) -> (..., D) twice: the mean, and the population's deviation, at least 1e-6; 0 and 1 without data."""
    count, mean, squares = moments.unbind(-2)
    return mean, torch.where(count > 0, (squares / count.clamp(min=1)).sqrt().clamp(min=1e-6), 1.0)


def normalize(x, mean, std, clip):
    """C64, C65: within +-clip; 0: no limit."""
    limit = torch.where(torch.as_tensor(clip) > 0, clip, math.inf)
    return ((x - mean) / std).clamp(-limit, limit)


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


# ---- 5. Networks, for K members at once ------------------------------------------------------------------------------


def layer_sizes(args, obs_dim, action_dim):
    """{part: [inputs, units, ..., outputs]} of the network's parts; the shared one ends with a hidden layer."""
    policy, value = action_dim * (1 if args.std_dependence == "global" else 2), 1
    if args.network == "shared":
        shared = [obs_dim] + [args.shared_width] * args.shared_depth
        return {"shared": shared, "policy": [shared[-1], policy], "value": [shared[-1], value]}
    return {"policy": [obs_dim] + [args.policy_width] * args.policy_depth + [policy],
            "value": [obs_dim] + [args.value_width] * args.value_depth + [value]}  # fmt: skip


def initial_weight(kind, inputs, outputs):
    """C56; the normal ones are cut off at two deviations, as Keras' are."""
    weight = torch.empty(inputs, outputs)
    if kind.startswith("orthogonal"):
        return init.orthogonal_(weight, 1.41 if kind.endswith("1.41") else 1.0)
    name, shape = kind.split("_")
    std = math.sqrt({"glorot": 2 / (inputs + outputs), "he": 2 / inputs, "lecun": 1 / inputs}[name])
    if shape == "uniform":
        return weight.uniform_(-math.sqrt(3) * std, math.sqrt(3) * std)
    return init.trunc_normal_(weight, 0.0, std / 0.87962566, -2 * std / 0.87962566, 2 * std / 0.87962566)  # std at last


def initial_state(args, obs_dim, action_dim):
    """What a member learns: parameters in one row, the optimizer's three, running moments of observations, targets."""
    rows, scales = [], {"shared": 1.0, "policy": args.policy_init_scale, "value": args.value_init_scale}
    for part, sizes in layer_sizes(args, obs_dim, action_dim).items():
        for i, (inputs, outputs) in enumerate(pairwise(sizes)):
            scale = scales[part] if i == len(sizes) - 2 else 1.0  # C57, C58: times the initializer's gain
            rows += [(initial_weight(args.initializer, inputs, outputs) * scale).flatten(), torch.zeros(outputs)]
    theta = torch.cat([*rows, torch.zeros(action_dim + 3)])  # x_rho; p of two constraints and of V-MPO's temperature
    moments = {"obs_moments": torch.zeros(3, obs_dim).double(), "value_moments": torch.zeros(3, 1).double()}
    return {"theta": theta} | {name: torch.zeros_like(theta) for name in ("first", "second", "buffer")} | moments


def for_each_kind(function, kinds, *tensors):
    """function(kind, *tensors) of the members of each kind together; tensors and (tuples of) results (K, ...)."""
    rows = {kind: [i for i, k in enumerate(kinds) if k == kind] for kind in dict.fromkeys(kinds)}
    if len(rows) == 1:
        return function(kinds[0], *tensors)
    parts = [function(kind, *(tensor[i] for tensor in tensors)) for kind, i in rows.items()]
    order = torch.tensor(sum(rows.values(), [])).argsort()
    if isinstance(parts[0], tuple):
        return tuple(torch.cat(part)[order] for part in zip(*parts, strict=True))
    return torch.cat(parts)[order]


ACTIVATIONS = dict(elu=F.elu, leaky_relu=F.leaky_relu, relu=F.relu, sigmoid=F.sigmoid, swish=F.silu, tanh=F.tanh)
P_LIMIT = math.log(1e6) / 10  # of the constraints' p
LOSSES = "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "grad_norm", "regularization"


class Agents:
    """K agents of equal structure: batched networks, optimizer and running moments. Joins the members' states, whose
    tensors from then on are views of the joined ones in `self.state`."""

    def __init__(self, members):
        self.args, self.obs_dim, self.action_dim = members[0].args, members[0].obs_dim, members[0].action_dim
        self.state = {name: torch.stack([m.state[name] for m in members]) for name in members[0].state}
        for k, m in enumerate(members):
            m.state.update({name: tensor[k] for name, tensor in self.state.items()})
        sizes = layer_sizes(self.args, self.obs_dim, self.action_dim)
        shapes = [shape for part in sizes.values() for i, o in pairwise(part) for shape in ((i, o), (1, o))]
        shapes += (1, self.action_dim), (3,)
        rows = zip(self.state["theta"].split([math.prod(shape) for shape in shapes], 1), shapes, strict=True)
        self.parameters = [row.view(-1, *shape).detach().requires_grad_() for row, shape in rows]
        rest = iter(self.parameters)
        self.layers = {name: [(next(rest), next(rest)) for _ in part[1:]] for name, part in sizes.items()}
        self.x_rho, self.p = rest
        args = [m.args for m in members]
        self.kinds = {name: tuple(getattr(a, name) for a in args) for name in DEFAULT}
        self.kinds["regularizer"] = tuple((a.penalty or a.constraint, a.action_transform) for a in args)
        self.h = h = {name: torch.tensor([[float(x or 0)] for x in kinds]) for name, kinds in self.kinds.items()
                      if not any(isinstance(x, (str, tuple)) for x in kinds)}  # fmt: skip  # numbers; inactive: 0
        h["lam"], h["rate"] = h["gae_lambda"] + h["vtrace_lambda"], h["adam_learning_rate"] + h["rmsprop_learning_rate"]
        h["momentum"], h["eps"] = h["adam_beta1"] + h["rmsprop_momentum"], h["adam_eps"] + h["rmsprop_eps"]
        h["gamma"], h["vf_coef"] = h["gamma"] ** h["frame_skip"], h["vf_coef"] if "shared" in sizes else 1.0
        is_ = lambda name, value: torch.tensor([[kind == value] for kind in self.kinds[name]])  # noqa: E731
        self.vmpo, self.constrained = is_("policy_loss", "vmpo"), is_("regularization", "constraint")
        self.averaged = {"obs": is_("norm_obs", "average"), "value": is_("norm_value", "average")}
        parts = [[f"{part}_{'coef' if a.penalty else 'threshold'}" for part in PARTS.get(a.penalty or a.constraint, ())]
                 for a in args]  # fmt: skip
        self.strength = torch.tensor([[*(getattr(a, x) for x in names), 0.0, 0.0][:2] for a, names in zip(args, parts)])
        self.refresh()

    def refresh(self, **batches):
        """Takes batches (K, B, D) into the running moments of `obs` or `value`, which from now on normalise."""
        for name, x in batches.items():
            moments = self.state[f"{name}_moments"]
            moments.copy_(torch.where(self.averaged[name].unsqueeze(-1), add_moments(moments, x), moments))
        self.obs_mean, self.obs_std = (x.float().unsqueeze(1) for x in mean_and_std(self.state["obs_moments"]))
        self.value_mean, self.value_std = (x.float() for x in mean_and_std(self.state["value_moments"]))

    def part(self, name, x):
        for weight, bias in self.layers[name]:
            one = weight.shape[-1] == 1  # a product with one column is rounded in another way if K = 1
            x = (x * weight.mT).sum(-1, keepdim=True) + bias if one else torch.baddbmm(bias, x, weight)
            if name == "shared" or weight is not self.layers[name][-1][0]:
                x = ACTIVATIONS[self.args.activation](x)
        return x

    def __call__(self, obs):
        """Raw observations (K, B, D) -> means and deviations of the Gaussians (K, B, A), normalised values (K, B)."""
        obs_clip, *spread = (self.h[name].unsqueeze(-1) for name in ("obs_clip", "init_std", "min_std"))
        obs = normalize(obs, self.obs_mean, self.obs_std, obs_clip)
        trunk = self.part("shared", obs) if "shared" in self.layers else obs
        mean, *x_rho = self.part("policy", trunk).split(self.action_dim, -1)
        std = for_each_kind(action_std, self.kinds["std_transform"], *(x_rho or [self.x_rho]), *spread)
        return mean, std.expand_as(mean), self.part("value", trunk).squeeze(-1)

    @torch.no_grad()
    def act(self, obs, noise=None):
        """obs (K, N, D), noise (K, N, A) -> actions in [-1, 1], samples, means, deviations, values in the units of the
        rewards. No noise: the means."""
        mean, std, value = self(torch.as_tensor(obs))
        x = mean if noise is None else mean + std * noise
        u = for_each_kind(lambda kind, x: x.tanh() if kind == "tanh" else x, self.kinds["action_transform"], x)
        u = u.clamp(-1, 1).nan_to_num()  # no NaN to the simulator: a diverged member ends with the update
        return u.numpy(), x, mean, std, value * self.value_std + self.value_mean

    @torch.no_grad()
    def estimate(self, data, envs=None):
        """Advantages and value targets with the networks as they are, of all fragments or of those of `envs` (K, n)
        -> (K, T n, 3): advantages; targets and the values when acting, both in the value network's units."""
        at = {n: None if envs is None else envs.view(len(envs), 1, -1, *[1] * (n - 3)) for n in (3, 4)}  # dimensions
        pick = lambda x: x if envs is None else torch.take_along_dim(x, at[x.dim()], 2)  # noqa: E731
        h, obs, truncated = self.h, pick(data["obs"]), pick(data["truncated"])
        mean, std, values = (x.unflatten(1, obs.shape[1:3]) for x in self(obs.flatten(1, 2)))
        values = values * self.value_std.unsqueeze(-1) + self.value_mean.unsqueeze(-1)
        next_values = values[:, 1:]
        if data["cuts"]:  # bootstrap from the observation at the time limit, not from the next episode's first
            cut_values = torch.zeros_like(data["rewards"])
            for k, t, n, final_obs in data["cuts"]:
                cut_values[k, t, n] = self.act(final_obs.expand(len(obs), -1, -1))[-1][k]
            next_values = torch.where(truncated, pick(cut_values), next_values)
        log_rho = log_prob(pick(data["x"]), mean[:, :-1], std[:, :-1]) - pick(data["logp"])
        found, targets = for_each_kind(
            advantages, self.kinds["advantage_estimator"], pick(data["rewards"]), values[:, :-1], next_values,
            pick(data["terminated"]), truncated, log_rho, h["gamma"], h["lam"], h["n_step"], h["vtrace_rho_bar"],
        )  # fmt: skip
        found, targets, old = (x.flatten(1) for x in (found, targets, pick(data["values"])))
        # C66 with the moments before these targets. Advantages stay as they are (the authors' code divides them, too).
        units = [(x - self.value_mean) / self.value_std for x in (targets, old)]
        self.refresh(value=targets.unsqueeze(-1))
        return torch.stack([found, *units], -1)

    def learn(self, batch, estimates, step, total):
        """One gradient step of `total` on minibatches (K, B, ...) -> the LOSSES (parts, K)."""
        h, kinds, state, size = self.h, self.kinds, self.state, self.action_dim
        obs, x, mu_mean, mu_std, noise, logp_mu = batch.split([self.obs_dim, size, size, size, size, 1], -1)
        (advantage, target, old_value), logp_mu = estimates.unbind(-1), logp_mu.squeeze(-1)
        advantage = torch.where(h["norm_adv"] > 0, normalize_advantages(advantage), advantage)
        mean, std, value = self(obs)
        logp = log_prob(x, mean, std)
        temperature = torch.where(self.vmpo, (10 * self.p[:, 2:]).exp(), h["awr_beta"]).detach()
        policy = for_each_kind(policy_loss, kinds["policy_loss"], logp, logp_mu, advantage, h["clip_coef"],
                               h["vtrace_loss_rho_bar"], temperature, h["awr_max_weight"]).mean(-1)  # fmt: skip
        value = for_each_kind(value_loss, kinds["value_loss"], value, target, old_value, h["value_clip"],
                              h["huber_delta"]).mean(-1, keepdim=True)  # fmt: skip
        loss, added = policy + (h["vf_coef"] * value).squeeze(-1), torch.zeros_like(policy)
        if self.vmpo.any():
            divergence = torch.where(self.vmpo[:, 0], vmpo_weights(advantage, temperature)[1], 0.0)
            loss = loss + constraint_loss(self.p[:, 2], divergence, h["vmpo_epsilon"][:, 0])  # of the others: 0
        if any(kind for kind, _ in kinds["regularizer"]):
            parts = for_each_kind(regularizer, kinds["regularizer"], mean, std, mu_mean, mu_std, noise).mean(-1)
            constraint = constraint_loss(self.p[:, :2], parts, self.strength)
            added = torch.where(self.constrained, constraint, self.strength * parts).sum(-1)
        grads = torch.autograd.grad((loss + added).sum(), self.parameters, allow_unused=True, materialize_grads=True)
        with torch.no_grad():
            grad, norm = clip_gradient(torch.cat([g.flatten(1) for g in grads], 1), h["max_grad_norm"])
            change, *slots = for_each_kind(
                lambda kind, *x: optimizer_change(kind, step + 1, *x), kinds["optimizer"], grad, state["first"],
                state["second"], state["buffer"], learning_rate(h["rate"], h["final_lr"], step, total), h["momentum"],
                h["eps"], h["rmsprop_centered"])  # fmt: skip
            state["theta"] -= change
            state["theta"][:, -3:].clamp_(-P_LIMIT, P_LIMIT)
            for name, slot in zip(("first", "second", "buffer"), slots, strict=True):
                state[name].copy_(slot)
            log_ratio = (logp - logp_mu).clamp(max=80)
            kl = (log_ratio.exp() - 1 - log_ratio).mean(-1)  # Schulman's low-variance estimate
            clipped = (log_ratio.abs() > torch.log1p(h["clip_coef"])).float().mean(-1)
            entropy = (std.log() + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean(-1)  # the Gaussian's
            return torch.stack([policy, value.squeeze(-1), entropy, kl, clipped, norm.squeeze(-1), added])


# ---- 6. Evaluation and training --------------------------------------------------------------------------------------


class Member:
    """One run of a stack: its folder, random streams, environments, and what it learns. `error`: why it ended."""

    def __init__(self, run):
        self.run, self.args, self.error = run, run.args, None
        self.random = Randomness(self.args.seed, "cpu")
        self.envs = run.enter_context(closing(Envs(self.args, self.random.envs.spawn(self.args.num_envs))))
        self.obs_dim, self.action_dim = self.envs.obs.shape[1], self.envs.num_actions
        self.state = initial_state(self.args, self.obs_dim, self.action_dim)
        self.update, self.step, self.row = run.restore(agent=self, random=self.random, envs=self.envs)

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        for name, tensor in self.state.items():
            tensor.copy_(state[name])

    def attempt(self, function, *args, **named):
        """The function's result; None after an error, which ends this member with the update, and no other one."""
        try:
            return function(*args, **named) if self.error is None else None
        except (Exception, SystemExit) as error:
            self.error, code = error, error.code if isinstance(error, SystemExit) else ""
            if code in (75, 130):  # a signal, which ends them all
                raise
            if not isinstance(code, str):
                self.error = SystemExit("error: an environment called sys.exit")

    def ended(self):
        """Whether an error did; then its status says why, and stays so."""
        if self.error is None:
            return False
        self.run.status("failed")
        status = json.loads((self.run.dir / "status.json").read_text()) | {"error": repr(self.error)}
        self.run.write("status.json", json.dumps(status))
        self.run.step = self.run.state = None
        return True


def evaluate(agents, members, check=lambda: None):
    """Plays eval_episodes episodes of each member in environments of their own, seeded by eval_seed alone -> a list of
    a row for each: its raw return, its length in frames. Touches no training state. `check` may end it."""
    args, K = agents.args, len(members)
    *seeds, action_seed = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes + 1)
    generator = torch.Generator().manual_seed(int(action_seed.generate_state(1)[0]))
    (returns, lengths), running = np.zeros((2, K, len(seeds))), np.ones((K, len(seeds)), bool)
    obs = np.zeros((K, -(-len(seeds) // 4) * 4, agents.obs_dim), np.float32)  # other row counts round in other ways
    with ExitStack() as stack:
        envs = [stack.enter_context(closing(Envs(args, seeds))) for _ in members]
        while running.any() and lengths.max() < args.eval_max_steps:
            check()
            obs[:, : len(seeds)] = [e.obs for e in envs]
            noise = torch.randn(len(obs[0]), agents.action_dim, generator=generator).expand(K, -1, -1)
            actions = agents.act(obs, None if args.eval_greedy else noise)[0][:, : len(seeds)]
            for k in np.flatnonzero(running.any(1)):
                if found := members[k].attempt(envs[k].step, actions[k]):
                    _, reward, terminated, truncated, info = found
                    returns[k] += reward * running[k]
                    lengths[k] += info["frames"] * running[k]
                running[k] &= ~(terminated | truncated) if found else False
    if running.any():
        print(f"note: {running.sum()} evaluation episodes were cut off at --eval-max-steps", file=sys.stderr)
    return [[{"split": "eval", "return": float(r), "length": int(n)} for r, n in zip(*rows, strict=True)]
            for rows in zip(returns, lengths, strict=True)]  # fmt: skip


def collect(agents, members):
    """num_steps decisions of every environment: tensors (K, T, N, ...), `obs` of one more; the episodes cut off."""
    K, T, (N, D), A = len(members), agents.args.num_steps, members[0].envs.obs.shape, agents.action_dim
    noise = torch.stack([torch.randn(2, T, N, A, generator=m.random.actions) for m in members])  # [1]: the entropy's
    obs, rewards = np.zeros((K, T + 1, N, D), np.float32), np.zeros((K, T, N), np.float32)
    (terminated, truncated), cuts, acted = np.zeros((2, K, T, N), bool), [], []
    for t in range(T):
        obs[:, t] = [m.envs.obs for m in members]
        actions, *found = agents.act(obs[:, t], noise[:, 0, t])
        acted.append(found)
        for k, m in enumerate(members):
            if found := m.attempt(m.envs.step, actions[k]):
                _, rewards[k, t], terminated[k, t], truncated[k, t], info = found
                cut = truncated[k, t] & ~terminated[k, t]
                if not m.args.handle_abandoned:
                    terminated[k, t] |= cut
                elif cut.any():
                    cuts.append((k, t, np.flatnonzero(cut), torch.as_tensor(info["final_obs"][cut])))
    obs[:, T] = [m.envs.obs for m in members]
    x, mean, std, values = (torch.stack(column, 1) for column in zip(*acted, strict=True))
    data = {"obs": obs, "rewards": rewards, "terminated": terminated, "truncated": truncated}
    return {name: torch.as_tensor(array) for name, array in data.items()} | {
        "x": x, "mean": mean, "std": std, "values": values, "noise": noise[:, 1], "cuts": cuts,
        "logp": log_prob(x, mean, std)}  # fmt: skip


def optimise(agents, members, data, update):
    """An iteration's epochs -> means of the LOSSES over the minibatches (parts, K); the first epoch's estimates."""
    args, losses, first = agents.args, [], []
    T, size, mode = args.num_steps, args.minibatch_size, args.batch_mode
    columns = data["obs"][:, :-1], *(data[name] for name in ("x", "mean", "std", "noise")), data["logp"].unsqueeze(-1)
    rollout, count = torch.cat(columns, -1).flatten(0, 2), args.iteration_size // size
    for epoch in range(args.update_epochs):
        epochs = [minibatches(mode, T, args.num_envs, size, m.random.minibatches) for m in members]
        if mode == "shuffle_transitions_recompute" or (mode == "shuffle_transitions" and epoch == 0):
            estimates = agents.estimate(data)
        for i, rows in enumerate(torch.as_tensor(np.stack(epochs, 1))):
            index = rows + torch.arange(len(rows)).unsqueeze(1) * (T * args.num_envs)
            by_fragment = mode in ("fixed_trajectories", "shuffle_trajectories")
            found = agents.estimate(data, rows[:, : size // T]) if by_fragment else estimates.flatten(0, 1)[index]
            step = (update * args.update_epochs + epoch) * count + i
            losses.append(agents.learn(rollout[index], found, step, args.num_updates * args.update_epochs * count))
            first += [found] if epoch == 0 else []
    return torch.stack(losses, -1).mean(-1), torch.cat(first, 1)


def train_stack(members, check):
    """Trains members that all are at the same update to their end."""
    agents, args = Agents(members), members[0].args
    for update in range(members[0].update, args.num_updates):
        for m in members:
            m.run.checkpoint(update, m.step, m.row)
        check()
        begun = time.perf_counter()
        data = collect(agents, members)
        collected = time.perf_counter()
        losses, estimates = optimise(agents, members, data, update)
        agents.refresh(obs=data["obs"][:, :-1].flatten(1, 2))  # after learning: pi = mu at the first minibatch
        times = {"perf/collect_s": collected - begun, "perf/update_s": time.perf_counter() - collected}
        explained = 1 - (estimates[..., 1] - estimates[..., 2]).var(1) / estimates[..., 1].var(1)
        rates = learning_rate(agents.h["rate"], agents.h["final_lr"], update, args.num_updates)
        last = update + 1 == args.num_updates
        for k, m in enumerate(members):
            m.step = (update + 1) * args.iteration_size * args.frame_skip  # nominal: an episode's end may cut decisions
            m.row = {f"losses/{name}": value for name, value in zip(LOSSES, losses[:, k].tolist(), strict=True)} | {
                "losses/explained_variance": explained[k].item(),
                "charts/update": update + 1, "charts/learning_rate": rates[k].item(),
            } | {name: seconds / len(members) for name, seconds in times.items()}  # fmt: skip
            m.attempt(require_finite, **dict(zip(LOSSES, losses[:, k], strict=True)), parameters=m.state["theta"])
        if last or (args.eval_interval and (update + 1) % args.eval_interval == 0):
            begun = time.perf_counter()
            for m, rows in zip(members, evaluate(agents, members, check), strict=True):
                m.row |= m.attempt(m.run.log_eval, m.step, rows) or {}
                m.row["perf/eval_s"] = (time.perf_counter() - begun) / len(members)
        if len(alive := [m for m in members if not m.ended()]) < len(members):
            if not (members := alive):
                return
            agents = Agents(members)
        for m in members if last or (update + 1) % args.log_interval == 0 else ():
            m.run.log(m.step, m.envs.pop_episodes() | m.row)
    for m in members:
        m.result = m.run.finish(args.num_updates, m.step, m.row)


def train(args):
    with ExitStack() as stack:
        runs = [stack.enter_context(RunLogger(member)) for member in args.members()]
        # A signal reaches the last run alone; all are to save and say so.
        stack.callback(lambda: [run.signals.extend(runs[-1].signals) for run in runs[:-1]])
        torch.set_num_threads(args.torch_threads or len(os.sched_getaffinity(0)))
        # Copied from algos/ppo_plr.py:region(memory)
        with suppress(OSError, AttributeError):  # glibc keeps freed activations, instead of faulting them in anew
            for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-8, 1)):  # mmap threshold, trim threshold, arenas
                ctypes.CDLL("libc.so.6").mallopt(option, value)
        # End of copy
        results = {run: run.result for run in runs if run.result is not None and not args.eval_only}
        for run in results:
            print(f"finished before, nothing to do: {run.dir}\n{json.dumps(run.result)}")
        members = [Member(run) for run in runs if run not in results]
        for m in members[1:]:
            m.run.bar.disable = True  # one line for the stack
        for m in members if args.eval_only else ():
            m.result = m.attempt(m.run.log_eval, m.step, evaluate(Agents([m]), [m], runs[-1].check_signals)[0])
            print(json.dumps(m.result))
        for update in sorted({m.update for m in members if not args.eval_only}):  # a kill may have parted them
            train_stack([m for m in members if m.update == update], runs[-1].check_signals)
        if (failed := [m for m in members if m.error]) and args.stack is None:
            raise failed[0].error
    if failed:
        why = "; ".join(f"{m.run.dir}: {m.error!r}" for m in failed)
        sys.exit(f"error: {len(failed)} of {len(runs)} members failed, the others are complete: {why}")
    results |= {m.run: m.result for m in members}
    return [results[run] for run in runs] if args.stack else results[runs[0]]


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
