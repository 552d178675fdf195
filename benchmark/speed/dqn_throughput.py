"""Gradient steps per second of algos/dqn_taper_crafter.py beside Stable-Baselines3's DQN, in one run.

    scripts/run --extra sb3 benchmark/speed/dqn_throughput.py             # 5 rounds, about 4 minutes

Both train one task (the environment's reward) from uniform replay, with random behaviour, and share the network, the
batch, the schedule and the number of environments: the script's defaults. Every arm is a process of its own with one
thread; the arms take turns, and the table gives the medians of the rounds. "learning" is the time of sampling and
gradient steps, "loop" that of everything between two logs: acting, the environments and storing too. The first
`--skip` steps, before and while learning starts, are not counted. Stable-Baselines3's DQN has no double Q-learning, so
the script runs with it (the default) and without.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro

SCRIPT = Path(__file__).resolve().parents[2] / "algos" / "dqn_taper_crafter.py"
sys.path[:0] = [str(SCRIPT.parent), str(SCRIPT.parents[1])]
import dqn_taper_crafter as dqn_taper  # noqa: E402

from benchmark.runner.measured import finish  # noqa: E402


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # a Gymnasium id with vector observations
    rounds: int = 5  # turns of every arm
    steps: int = 12_000  # environment steps of each
    skip: int = 2_000  # of them that are not counted
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json
    arm: Literal["", "sb3"] = ""  # used by the benchmark itself: run this arm, print its figures


def run_sb3(args):
    """[gradient steps, seconds of learning, seconds of all] of Stable-Baselines3 after the skipped steps."""
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    ours = dqn_taper.Args(env_id=args.env_id)
    figures = {"updates": 0, "learning": 0.0, "start": 0.0}

    class Timed(DQN):
        def train(self, gradient_steps, batch_size):
            begun = time.perf_counter()
            super().train(gradient_steps, batch_size)
            if figures["start"]:
                figures["learning"] += time.perf_counter() - begun
                figures["updates"] += gradient_steps

    class Start(BaseCallback):
        def _on_step(self):
            if not figures["start"] and self.num_timesteps >= args.skip:
                figures["start"] = time.perf_counter()
            return True

    model = Timed(
        "MlpPolicy", make_vec_env(args.env_id, ours.num_envs, seed=1), learning_rate=ours.learning_rate,
        buffer_size=ours.buffer_size, learning_starts=ours.learning_starts, batch_size=ours.batch_size, tau=ours.tau,
        gamma=ours.gamma, train_freq=1, gradient_steps=ours.num_envs // ours.train_frequency,
        target_update_interval=ours.target_network_frequency, exploration_initial_eps=1.0, exploration_final_eps=1.0,
        max_grad_norm=ours.max_grad_norm, policy_kwargs={"net_arch": [ours.hidden_size] * 2}, seed=1, device="cpu",
    )  # fmt: skip
    model.learn(args.steps, callback=Start(), log_interval=10**9)
    return figures["updates"], figures["learning"], time.perf_counter() - figures["start"]


def run_script(args, *flags):
    """The same of the script, from its own clocks."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, SCRIPT, "--env-id", args.env_id, "--replay", "uniform", "--total-timesteps",
                   args.steps, "--eval-interval", 0, "--eval-episodes", 1, "--run-dir", folder, "--progress", "none",
                   *flags]  # fmt: skip
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        rows = map(json.loads, next(Path(folder).rglob("metrics.jsonl")).read_text().splitlines())
        rows = [row for row in rows if row["global_step"] > args.skip]
    seconds = [[row[f"perf/{name}_s"] for name in ("update", "sample", "collect", "store")] for row in rows]
    return sum(r["losses/gradient_steps"] for r in rows), sum(s[0] + s[1] for s in seconds), sum(map(sum, seconds))


def main(args):
    if args.arm:
        return print(json.dumps(run_sb3(args)))
    rounds = {"dqn_taper_crafter.py": [], "dqn_taper_crafter.py --no-double-q": [], "Stable-Baselines3": []}
    for number in range(args.rounds):
        for arm, found in rounds.items():
            if arm == "Stable-Baselines3":
                command = [sys.executable, __file__, "--arm", "sb3", "--env-id", args.env_id, "--steps",
                           str(args.steps), "--skip", str(args.skip)]  # fmt: skip
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                updates, learning, loop = json.loads(output.splitlines()[-1])
            else:
                updates, learning, loop = run_script(args, *arm.split()[1:])
            found.append((updates / learning, updates / loop))
            print(f"round {number + 1} {arm}: {found[-1][0]:.0f} updates/s learning, {found[-1][1]:.0f} in the loop",
                  flush=True)  # fmt: skip
    script = dqn_taper.Args(env_id=args.env_id)
    note = (f"{args.env_id}, {script.num_envs} environments, 2 x {script.hidden_size} units, batch "
            f"{script.batch_size}, 1 thread; medians of {args.rounds} rounds")  # fmt: skip
    header = ["gradient steps per second", "learning", "x SB3", "with acting, environments and storing", "x SB3"]
    rows = []
    for arm, found in rounds.items():
        cells = []
        for kind in (0, 1):
            ratio = statistics.median(a[kind] / b[kind] for a, b in zip(found, rounds["Stable-Baselines3"]))
            cells += [f"{statistics.median(a[kind] for a in found):,.0f}", f"{ratio:.2f}"]
        rows.append([arm, *cells])
    finish({"dqn_throughput": (header, rows)}, args.output, note)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
