"""Runs per hour of algos/onpolicy_choices.py, alone and stacked, beside Stable-Baselines3's PPO, in one run.

    scripts/run --extra sb3 benchmark/speed/onpolicy_throughput.py                    # HalfCheetah-v4
    scripts/run --extra sb3 benchmark/speed/onpolicy_throughput.py --rounds 1 --iterations 4

The same settings on all sides: 16 environments, 2,048 steps an iteration, 10 epochs of minibatches of 64, two networks
of 2 x 64 tanh units, Adam 3e-4, clip 0.2, gradients clipped at 0.5, GAE 0.95, normalised observations, a thread. Arms:

- plain: one run of the script.
- stack: `--stack` with that many members, of which each has its own seed.
- sb3: Stable-Baselines3's PPO with VecNormalize (of observations alone), over Gymnasium's environments in its process
  (it has no envpool), so part of its distance is the environment's: `collecting` says how much.

Arms take turns. Each measures iterations after the first, and hours are those of a run of `--steps`; the table has the
medians, and their ratio to the plain run of the same round. One process an arm: on two cores two of them run.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmark.runner.measured import finish  # noqa: E402

SCRIPT = Path(__file__).parents[2] / "algos" / "onpolicy_choices.py"
ENVS, ITERATION = 16, 2048


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # of envpool and of Gymnasium
    stack: int = 16  # members of the stacked arm
    rounds: int = 3  # turns of every arm
    iterations: int = 6  # measured per turn
    steps: int = 300_000  # of a run
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json
    arm: Literal["", "sb3"] = ""  # used by the benchmark itself: run this arm, print its figures


def run_sb3(args):
    """Seconds of an iteration, and those in which it collects."""
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    class Clock(BaseCallback):
        def __init__(self):
            super().__init__()
            self.begun, self.ended = [], []

        def _on_rollout_start(self):
            self.begun.append(time.perf_counter())

        def _on_rollout_end(self):
            self.ended.append(time.perf_counter())

        def _on_step(self):
            return True

    torch.set_num_threads(1)
    envs = VecNormalize(DummyVecEnv([lambda: gym.make(args.env_id)] * ENVS), norm_reward=False)
    clock = Clock()
    PPO("MlpPolicy", envs, n_steps=ITERATION // ENVS, batch_size=64, n_epochs=10, device="cpu").learn(
        ITERATION * (args.iterations + 2), callback=clock
    )
    whole = (clock.begun[-1] - clock.begun[1]) / args.iterations
    collect = statistics.mean(e - b for b, e in zip(clock.begun[1:-1], clock.ended[1:-1], strict=True))
    return {"iteration_s": whole, "collect_s": collect}


def run_ours(args, members):
    """Seconds of an iteration of each member, and those in which it collects; the members share both."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, SCRIPT, "--env-id", args.env_id, "--num-envs", ENVS, "--iteration-size", ITERATION,
                   "--value-clip", 0, "--norm-value", "none", "--total-timesteps", ITERATION * (args.iterations + 1),
                   "--eval-interval", 0, "--eval-episodes", 1, "--eval-max-steps", 1, "--progress", "none",
                   "--run-dir", folder]  # fmt: skip
        if members > 1:
            path = Path(folder) / "stack.json"
            path.write_text(json.dumps([{"seed": seed} for seed in range(1, members + 1)]))
            command += ["--stack", path]
        subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
        rows = [
            [json.loads(line) for line in path.read_text().splitlines()] for path in Path(folder).rglob("metrics.jsonl")
        ]
    spent = statistics.mean((run[-1]["wall_s"] - run[0]["wall_s"]) / args.iterations for run in rows)
    collect = statistics.mean(row["perf/collect_s"] for run in rows for row in run[1:])
    return {"iteration_s": spent / members, "collect_s": collect}


def main(args):
    if args.arm:
        return print(json.dumps(run_sb3(args)))
    print(f"{os.cpu_count()} cores, {args.env_id}, {args.rounds} rounds of {args.iterations} iterations", flush=True)
    arms = {"plain": 1, f"stack of {args.stack}": args.stack, "sb3": 0}
    found = {name: [] for name in arms}
    for number in range(args.rounds):
        for name, members in arms.items():
            if members:
                found[name].append(run_ours(args, members))
            else:
                command = [sys.executable, __file__, "--arm", "sb3", "--env-id", args.env_id,
                           "--iterations", str(args.iterations)]  # fmt: skip
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                found[name].append(json.loads(printed.splitlines()[-1]))
            print(f"round {number + 1}, {name}: {found[name][-1]['iteration_s']:.3f} s an iteration", flush=True)
    header, rows = ["", f"runs of {args.steps:,} steps an hour", "x plain", "s an iteration", "of it collecting"], []
    for name, rounds in found.items():
        spent = statistics.median(row["iteration_s"] for row in rounds)
        runs = 3600 / (spent * args.steps / ITERATION)
        ratio = statistics.median(
            p["iteration_s"] / row["iteration_s"] for p, row in zip(found["plain"], rounds, strict=True)
        )
        collect = statistics.median(row["collect_s"] for row in rounds)
        rows.append([name, f"{runs:.0f}", f"{ratio:.1f}", f"{spent:.3f}", f"{collect:.3f}"])
    finish({"onpolicy_throughput": (header, rows)}, args.output)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
