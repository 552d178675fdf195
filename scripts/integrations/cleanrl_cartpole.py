"""PPO as a CleanRL-style loop with a curriculum: the CartPole experiment of the Syllabus paper (its section 6).

    scripts/run scripts/integrations/cleanrl_cartpole.py        # 5 seeds of both arms: 3 minutes on one core

`expanding` starts episodes near the balance and widens the range with success, `full` uses the widest range all the
time; both are evaluated on the widest. Beyond 0.209 rad the pole counts as fallen: with the paper's range of 0.3 no
policy can save 29 % of the evaluation's starts, and the best return is 354. Writes curves.json and curves.png to `out`
(those of the README: --out benchmark/results/cartpole_curriculum; the table there: benchmark/run.py tables).
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import matplotlib
import numpy as np
import torch
import tyro
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from curricula.annealing import ExpandingBox  # noqa: E402
from curricula.core import BoxTaskSpace  # noqa: E402
from curricula.manual import Constant  # noqa: E402
from curricula.sync_envs import GymnasiumSyncWrapper  # noqa: E402
from curricula.sync_learner import make_multiprocessing_curriculum  # noqa: E402
from curricula.task_wrappers import CartPoleTaskWrapper  # noqa: E402

ARMS = {"expanding": "#0072B2", "full": "#D55E00"}


@dataclass
class Args:
    total_timesteps: int = 150_000  # environment steps of a run
    seed: int = 1  # of the first run; the others follow
    num_seeds: int = 5  # runs of each arm
    start_range: float = 0.3  # widest start: m, m/s, rad, rad/s
    num_envs: int = 8
    num_steps: int = 128  # of an environment in a rollout
    learning_rate: float = 1e-3
    eval_episodes: int = 400  # greedy, the same starts every time
    eval_interval: int = 10  # updates between two evaluations
    out: Path = Path("runs/cartpole_curriculum")  # folder for curves.json and curves.png
    remake: bool = False  # run nothing: draw the picture again from curves.json


def evaluate(actor, args):
    """Mean return of the greedy policy over the widest range of starts."""
    envs = gym.make_vec("CartPole-v1", args.eval_episodes, "vector_entry_point")
    obs, _ = envs.reset(seed=0, options={"low": -args.start_range, "high": args.start_range})
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, bool)
    while running.any():
        returns += running
        obs, _, terminated, truncated, _ = envs.step(actor(torch.as_tensor(obs)).argmax(1).numpy())
        running &= ~(terminated | truncated)
    return returns.mean()


def train(args, arm, seed):
    """One run: rows of (step, mean return on the widest range, upper end of the curriculum's range)."""
    torch.manual_seed(seed)
    task_space = BoxTaskSpace(gym.spaces.Box(-args.start_range, args.start_range, (2,)))
    curriculum = ExpandingBox(task_space, seed=seed)
    if arm == "full":
        curriculum = Constant((-args.start_range, args.start_range), task_space)
    with make_multiprocessing_curriculum(curriculum) as curriculum:

        def make_env():
            env = CartPoleTaskWrapper(gym.make("CartPole-v1"), task_space)
            return GymnasiumSyncWrapper(env, task_space, curriculum.components)

        envs = gym.vector.SyncVectorEnv([make_env] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        actor = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
        critic = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        parameters = [*actor.parameters(), *critic.parameters()]
        optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5)
        T, N = args.num_steps, args.num_envs
        obs, next_obs = torch.zeros(T, N, 4), torch.as_tensor(envs.reset(seed=seed)[0])
        actions, (rewards, true_next_values, ended) = torch.zeros(T, N, dtype=torch.long), torch.zeros(3, T, N)
        num_updates, rows = args.total_timesteps // (T * N), []
        for update in range(num_updates):
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - update / num_updates)
            with torch.no_grad():
                for t in range(T):
                    obs[t], actions[t] = next_obs, torch.distributions.Categorical(logits=actor(next_obs)).sample()
                    raw, reward, terminated, truncated, info = envs.step(actions[t].numpy())
                    final = raw.copy()  # the true successors: raw already holds the next episode's first observations
                    for i in np.flatnonzero(terminated | truncated):
                        final[i] = info["final_obs"][i]
                    true_next_values[t] = critic(torch.as_tensor(final))[:, 0] * torch.as_tensor(~terminated)
                    rewards[t], ended[t] = torch.as_tensor(reward), torch.as_tensor(terminated | truncated)
                    next_obs = torch.as_tensor(raw)
                values, advantages, last = critic(obs)[..., 0], torch.zeros(T, N), 0
                for t in reversed(range(T)):
                    delta = rewards[t] + 0.99 * true_next_values[t] - values[t]
                    advantages[t] = last = delta + 0.99 * 0.95 * (1 - ended[t]) * last
                old = F.log_softmax(actor(obs), -1).gather(-1, actions[..., None])[..., 0]
            batch = [x.flatten(0, 1) for x in (obs, actions, old, advantages, advantages + values)]
            for rows_of in (part for _ in range(4) for part in torch.randperm(T * N).chunk(8)):
                b_obs, b_actions, b_old, b_advantages, b_returns = (x[rows_of] for x in batch)
                logprobs = F.log_softmax(actor(b_obs), -1)
                ratio = (logprobs.gather(-1, b_actions[:, None])[:, 0] - b_old).exp()
                b_advantages = (b_advantages - b_advantages.mean()) / (b_advantages.std() + 1e-8)
                policy_loss = -torch.min(b_advantages * ratio, b_advantages * ratio.clamp(0.8, 1.2)).mean()
                entropy = -(logprobs.exp() * logprobs).sum(-1).mean()
                loss = policy_loss - 0.01 * entropy + 0.25 * F.mse_loss(critic(b_obs)[:, 0], b_returns)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
            if update % args.eval_interval == 0 or update + 1 == num_updates:
                with torch.no_grad():
                    widest = curriculum.metrics().get("range_max", args.start_range)
                    rows.append(((update + 1) * T * N, evaluate(actor, args), widest))
        envs.close()
    return np.array(rows)


def draw(folder):
    """curves.png from the curves.json beside it."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for arm, runs in json.loads((folder / "curves.json").read_text()).items():
        for lines in runs.values():
            for axis, values in zip(axes, (lines["return"], lines["widest"])):
                axis.plot(np.array(lines["steps"]) / 1e3, values, color=ARMS[arm], alpha=0.3, linewidth=0.8)
        for axis, kind in zip(axes, ("return", "widest")):
            mean = np.mean([lines[kind] for lines in runs.values()], 0)
            axis.plot(
                np.array(lines["steps"]) / 1e3, mean, color=ARMS[arm], linewidth=2, label=f"{arm} (n={len(runs)})"
            )
    for axis, title in zip(axes, ("return on the widest range of starts", "range of starts in training")):
        axis.set(title=title, xlabel="environment steps, thousands")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(folder / "curves.png", dpi=130)


def main(args):
    if args.remake:
        if not (args.out / "curves.json").is_file():
            raise SystemExit(f"error: --remake: there is no curves.json in {args.out}")
        return draw(args.out)
    torch.set_num_threads(1)
    found = {arm: {} for arm in ARMS}
    for arm in ARMS:
        started = time.time()
        for seed in range(args.seed, args.seed + args.num_seeds):
            steps, returns, widest = train(args, arm, seed).T
            print(f"{arm} seed {seed}: {returns[-1]:.1f}, range {widest[-1]:.2f} ({time.time() - started:.0f} s)")
            lines = {"steps": steps, "return": returns, "widest": widest}
            found[arm][seed] = {kind: [float(f"{x:.6g}") for x in values] for kind, values in lines.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "curves.json").write_text(json.dumps(found))
    draw(args.out)
    print(args.out / "curves.png")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
