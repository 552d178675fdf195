"""Proximal Policy Optimization (PPO): the plain baseline, vector observations and discrete actions.

Paper: Schulman et al. 2017, arXiv:1707.06347; details after Huang et al. 2022, "The 37 Implementation Details of PPO".
ppo_vector.py adds images, continuous actions, running normalisation, environments in processes, and envpool.

  Train:     python algos/ppo.py --env-id CartPole-v1 --total-timesteps 100000
  Evaluate:  the training command with --eval-only appended (newest checkpoint; a row per episode goes to eval.jsonl)

Measured: seeds 1 to 5: 500.0 in 20 greedy evaluation episodes, 20 s each on a core (commit b71df4f).
Differs from the paper: truncation is not termination (the value of the true final observation is bootstrapped).
"""

import ast
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
from array import array
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
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
    env_id: str = "CartPole-v1"  # Gymnasium id, also module:id; vector observations, discrete actions
    num_envs: int = 4  # environments, side by side in this process

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
    clip_vloss: bool = False  # clip the value loss by clip_coef (for returns near 1)
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

    def __post_init__(self):
        check_args(self)
        try:
            gym.wrappers.FlattenObservation(gym.make(self.env_id)).close()
        except (gym.error.Error, ImportError, NotImplementedError) as error:  # the last one without a message
            raise ValueError(f"--env-id {self.env_id}: {str(error) or 'observations that are no numbers'}") from error


def check_numbers(args, **limits):
    """ValueError for a number outside `limits`, (low, high); where none are given, an int is >= 1 and a float >= 0."""
    for entry in fields(args):
        types, value = {entry.type, *get_args(entry.type)}, getattr(args, entry.name, None)
        low, high = limits.get(entry.name, (int(int in types), math.inf))
        if types & {int, float} and value is not None and not (low <= value <= high and value < math.inf):
            allowed = f"at least {low}" if high == math.inf else f"between {low} and {high}"
            raise ValueError(f"--{entry.name.replace('_', '-')} {value}: it must be a number {allowed}")


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


class Envs:
    """Gymnasium environments in this process. Each draws a seed for every episode from its own SeedSequence.

    step(actions) -> obs, reward, terminated, truncated, info, arrays over num_envs. An episode restarts in the step
    that ends it: obs (also `self.obs`) then belongs to the next one, info["final_obs"] holds the true last observation.
    """

    def __init__(self, env_id, seeds):
        self.envs = [gym.wrappers.FlattenObservation(gym.make(env_id)) for _ in seeds]
        self.action_space = self.envs[0].action_space
        if not isinstance(self.action_space, gym.spaces.Discrete):
            kinds = "this script takes Discrete, ppo_vector.py also MultiDiscrete and Box"
            sys.exit(f"error: actions {self.action_space}: {kinds}")
        self.obs = np.zeros((len(seeds), *self.envs[0].observation_space.shape), np.float32)
        self.rngs = [np.random.default_rng(seed) for seed in seeds]
        self.seeds, self.actions = [0] * len(seeds), [array("q") for _ in seeds]  # of the unfinished episodes
        self.returns, self.episodes, self.finished = np.zeros(len(seeds)), 0, []  # finished: (return, length)
        for i in range(len(seeds)):
            self.begin(i)

    def call(self, i, method, *args, **options):
        """Puts the observation that the environment's method returns into self.obs[i]; returns reward and flags."""
        where = f"environment {i}, step {len(self.actions[i])} of the episode with seed {self.seeds[i]}"
        try:
            obs, *rest = getattr(self.envs[i], method)(*args, **options)
            self.obs[i] = np.reshape(obs, self.obs[i].shape)
            reward = float(np.asarray(rest[0]).item()) if method == "step" else 0.0  # some give an array of one
        except Exception as error:
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error
        if not (np.isfinite(self.obs[i]).all() and abs(reward) <= np.finfo(np.float32).max.item()):
            sys.exit(" ".join(f"error: {where}: reward {reward}, observation {self.obs[i]}: no finite float32".split()))
        return reward, *rest[1:3]

    def begin(self, i):
        self.seeds[i], self.actions[i], self.returns[i] = int(self.rngs[i].integers(2**31)), array("q"), 0
        self.call(i, "reset", seed=self.seeds[i])

    def step(self, actions):
        rewards, flags, final_obs = np.zeros(len(actions)), np.zeros((2, len(actions)), bool), self.obs.copy()
        for i, action in enumerate(actions + self.action_space.start):
            self.actions[i].append(action)
            rewards[i], *flags[:, i] = self.call(i, "step", action)
            self.returns[i], final_obs[i] = self.returns[i] + rewards[i], self.obs[i]
            if flags[:, i].any():
                self.finished.append((float(self.returns[i]), len(self.actions[i])))
                self.begin(i)
        return self.obs.copy(), rewards, *flags, {"final_obs": final_obs}

    def pop_episodes(self):
        """Means of raw return and length over the episodes that finished since the last call, and the number of all."""
        returns, lengths = np.mean(self.finished, axis=0) if self.finished else (math.nan, math.nan)
        self.episodes, self.finished = self.episodes + len(self.finished), []
        return {"charts/episodic_return": returns, "charts/episodic_length": lengths, "charts/episodes": self.episodes}

    def state_dict(self):
        return {"rngs": [rng.bit_generator.state for rng in self.rngs], "seeds": self.seeds, "obs": self.obs,
                "actions": [np.array(taken) for taken in self.actions], "returns": self.returns,
                "episodes": self.episodes, "finished": self.finished}  # fmt: skip

    def load_state_dict(self, state):
        """Plays the unfinished episodes again; where that leads elsewhere, a new one begins."""
        self.seeds, self.episodes, self.finished = state["seeds"], state["episodes"], state["finished"]
        self.returns = state["returns"].numpy()
        for i, (rng, actions) in enumerate(zip(state["rngs"], state["actions"], strict=True)):
            self.rngs[i].bit_generator.state, self.actions[i] = rng, array("q", actions.tolist())
            self.call(i, "reset", seed=self.seeds[i])
            for action in self.actions[i]:
                self.call(i, "step", action)
            if (self.obs[i] != state["obs"][i].numpy()).any():
                print(f"note: environment {i} does not repeat itself; it begins a new episode", file=sys.stderr)
                self.begin(i)

    def close(self):
        for env in self.envs:
            env.close()


# ---- 3. Agent and mathematics ----------------------------------------------------------------------------------------


def layer_init(layer, std=math.sqrt(2)):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """Separate policy and value networks, tanh MLPs. forward(obs (B, D)) -> logits (B, num_actions), values (B,)."""

    def __init__(self, obs_shape, num_actions):
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(layer_init(nn.Linear(*obs_shape, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
                          layer_init(nn.Linear(64, outputs), std))
            for outputs, std in ((num_actions, 0.01), (1, 1.0))
        )  # fmt: skip

    def forward(self, obs):
        return self.policy(obs), self.value(obs).squeeze(-1)

    @torch.no_grad()
    def act(self, obs, generator=None):
        """obs (B, D) -> actions, their log-probabilities, values, each (B,). No generator: the most likely action."""
        logits, value = self(obs)
        require_finite(policy_output=logits, value=value)
        action = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0] if generator else logits.argmax(-1)
        return action, torch.distributions.Categorical(logits=logits, validate_args=False).log_prob(action), value


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


def explained_variance(values, returns):
    """1 - Var[returns - values] / Var[returns]; NaN where it is undefined."""
    variance = returns.var()
    return 1 - (returns - values).var() / variance if 0 < variance < math.inf else math.nan


# ---- 4. Plumbing: seeds, the run directory, checkpoints --------------------------------------------------------------


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
    """SystemExit that names the first tensor with a value that is not finite."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            sys.exit(f"error: {name} is not finite. The last good checkpoint is kept; lower --learning-rate or rewards")


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


def evaluate(agent, args, check=lambda: None):
    """Plays args.eval_episodes episodes in environments of their own, seeded by args.eval_seed alone -> a row for each,
    its raw return and length. Touches no training state. `check` may end it."""
    *seeds, action_seed = np.random.SeedSequence(args.eval_seed).spawn(args.eval_episodes + 1)
    device = next(agent.parameters()).device
    generator = torch.Generator(device).manual_seed(int(action_seed.generate_state(1)[0]))
    with closing(Envs(args.env_id, seeds)) as envs:
        obs, running = envs.obs, np.ones(len(seeds), bool)
        returns, lengths = np.zeros((2, len(seeds)))
        while running.any() and lengths.max() < args.eval_max_steps:
            check()
            actions = agent.act(torch.as_tensor(obs).to(device), None if args.eval_greedy else generator)[0]
            obs, reward, terminated, truncated, _ = envs.step(actions.cpu().numpy())
            returns, lengths = returns + reward * running, lengths + running
            running &= ~(terminated | truncated)
    if running.any():
        print(f"note: {running.sum()} evaluation episodes were cut off at --eval-max-steps", file=sys.stderr)
    return [{"split": "eval", "return": float(r), "length": int(n)} for r, n in zip(returns, lengths, strict=True)]


def train(args):
    with RunLogger(args) as run:
        # region: setup
        if run.result is not None and not args.eval_only:
            print(f"finished before, nothing to do: {run.dir}\n{json.dumps(run.result)}")
            return run.result
        torch.set_num_threads(args.torch_threads or len(os.sched_getaffinity(0)))
        torch.use_deterministic_algorithms(args.deterministic)
        device = torch.device(args.device.replace("auto", "cuda" if torch.cuda.is_available() else "cpu"))
        if device.type not in ("cpu", getattr(torch.accelerator.current_accelerator(True), "type", None)):
            sys.exit(f"error: --device {device}, but torch {torch.__version__} finds none: use --device cpu")
        random = Randomness(args.seed, device)
        # endregion: setup
        envs = run.enter_context(closing(Envs(args.env_id, random.envs.spawn(args.num_envs))))
        agent = Agent(envs.obs.shape[1:], int(envs.action_space.n)).to(device)
        optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

        T, N = args.num_steps, args.num_envs
        obs, logprobs = torch.zeros((T, *envs.obs.shape), device=device), torch.zeros((T, N), device=device)
        actions = torch.zeros((T, N), dtype=torch.int64, device=device)
        rewards, values, cut_values = (np.zeros((T, N), np.float32) for _ in range(3))
        terminated, truncated = (np.zeros((T, N), bool) for _ in range(2))

        # region: restore
        first_update, global_step, row = run.restore(agent=agent, optimizer=optimizer, random=random, envs=envs)
        # endregion: restore
        if args.eval_only:
            means = run.log_eval(global_step, evaluate(agent, args, run.check_signals))
            print(json.dumps(means))
            return means
        next_obs = torch.as_tensor(envs.obs.copy()).to(device)

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
                raw, rewards[t], terminated[t], truncated[t], info = envs.step(actions[t].cpu().numpy())
                next_obs = torch.as_tensor(raw).to(device)
                cut = truncated[t] & ~terminated[t]
                if cut.any():  # next_obs belongs to the next episode: bootstrap from the one that was cut off
                    final_obs = torch.as_tensor(info["final_obs"][cut]).to(device)
                    cut_values[t, cut] = agent.act(final_obs)[2].cpu().numpy()
            global_step += T * N

            # Advantages.
            next_values = np.vstack([values[1:], agent.act(next_obs)[2].cpu().numpy()])
            next_values = np.where(truncated & ~terminated, cut_values, next_values)
            advantages, returns = gae(rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda)
            collected = time.perf_counter()

            # Optimise: minibatches of the steps.
            flat = {"obs": obs.flatten(0, 1), "actions": actions.flatten(), "logprobs": logprobs.flatten()}
            for name, array in (("values", values), ("advantages", advantages), ("returns", returns)):
                flat[name] = torch.as_tensor(array.reshape(-1), dtype=torch.float32).to(device)
            losses, epochs = [], (random.minibatches.permutation(T * N) for _ in range(args.update_epochs))
            for rows in (rows for epoch in epochs for rows in np.split(epoch, args.num_minibatches)):
                b = {name: tensor[torch.as_tensor(rows, device=device)] for name, tensor in flat.items()}
                if args.norm_adv:
                    b["advantages"] = (b["advantages"] - b["advantages"].mean()) / (b["advantages"].std() + 1e-8)
                logits, value = agent(b["obs"])
                policy = torch.distributions.Categorical(logits=logits, validate_args=False)
                loss, parts_of_loss = ppo_loss(policy.log_prob(b["actions"]), policy.entropy(), value, b["logprobs"],
                                               b["values"], b["advantages"], b["returns"], args.clip_coef,
                                               args.clip_vloss, args.ent_coef, args.vf_coef)  # fmt: skip
                optimizer.zero_grad()
                loss.backward()
                grad_norm = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                if not torch.isfinite(grad_norm + loss):
                    require_finite(**flat, logits=logits, value=value, **parts_of_loss, grad_norm=grad_norm)
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
                begun = time.perf_counter()
                row |= run.log_eval(global_step, evaluate(agent, args, run.check_signals))
                row["perf/eval_s"] = time.perf_counter() - begun
            if last or (update + 1) % args.log_interval == 0:
                run.log(global_step, envs.pop_episodes() | row)

        return run.finish(args.num_updates, global_step, row)


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
