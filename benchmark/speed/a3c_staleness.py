"""Staleness of the gradients of algos/a3c.py with 1, 2, 4 and 8 workers: the mean against the number of other workers.

    scripts/run benchmark/speed/a3c_staleness.py               # about 5 minutes on 2 cores
    scripts/run benchmark/speed/a3c_staleness.py --workers 1 2 --updates 100

Two arms. In the slept one an environment's step sleeps for --step-ms (drawn anew for each unroll, exponential), so that
the workers wait for their environments and not for a core: as more workers would do on a larger machine. In
the other, CartPole-v1 as it is, 8 workers share the machine's cores. At each update the gradients of the n - 1 other
workers, if they are under way, become a version older: the mean is at most n - 1, and less by the time that a gradient
waits for the server and its worker for the answer. What came before all workers had started is left out.
The numbers of the histograms go to benchmark/results/a3c/figures/staleness.json with --picture, and their picture.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.envs.classic_control import CartPoleEnv

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.runner.measured import finish  # noqa: E402

SCRIPT = ROOT / "algos" / "a3c.py"
ARMS = {"slept": "a3c_staleness:SleptCartPole-v0", "CartPole": "CartPole-v1"}
UNROLL = 4  # steps of an unroll


@dataclass
class Args:
    workers: tuple[int, ...] = (1, 2, 4, 8)  # numbers of workers
    arms: tuple[Literal["slept", "CartPole"], ...] = ("slept", "CartPole")  # kinds of environments
    updates: int = 1000  # gradients of each run that count, at least
    step_ms: float = 10.0  # mean sleep of a step
    picture: bool = False  # also write the histograms and their picture to benchmark/results/a3c/figures
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json


class SleptCartPole(CartPoleEnv):
    """CartPole whose steps take a time that is drawn for each unroll."""

    def __init__(self, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.chance, self.steps = np.random.default_rng(os.getpid()), 0

    def step(self, action):
        if self.steps % UNROLL == 0:
            self.seconds = self.chance.exponential(float(os.environ["STEP_MS"]) / 1000)
        self.steps += 1
        time.sleep(self.seconds)
        return super().step(action)


gym.register("SleptCartPole-v0", "a3c_staleness:SleptCartPole", max_episode_steps=500)


def histogram(arm, workers, args):
    """Staleness -> gradients of one run, from the first row to which all workers gave some."""
    with tempfile.TemporaryDirectory() as folder:
        envs = {"slept": 1, "CartPole": 8}[arm]
        steps = {"slept": UNROLL, "CartPole": 16}[arm]
        command = [SCRIPT, "--env-id", ARMS[arm], "--num-workers", workers, "--num-envs", envs, "--num-steps", steps,
                   "--total-timesteps", 10**9, "--log-interval", 10 * workers, "--checkpoint-interval", 10**9,
                   "--progress", "none", "--no-anneal-lr", "--run-dir", folder]  # fmt: skip
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "STEP_MS": str(args.step_ms), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([sys.executable, *map(str, command)], env=environment, stderr=-1, text=True)
        try:
            counts = Counter()
            while counts.total() < args.updates:
                time.sleep(0.2)
                if process.poll() is not None:
                    raise SystemExit(f"error: {' '.join(map(str, command))} ended:\n{process.stderr.read()[-2000:]}")
                file = next(Path(folder).rglob("staleness.jsonl"), None)
                lines = file.read_text().splitlines(keepends=True) if file else []
                rows = [json.loads(line) for line in lines if line.endswith("\n")]
                counts = Counter()
                for row in dropwhile(lambda row: row["workers"] < workers, rows):
                    counts.update({int(age): count for age, count in row["staleness"].items()})
            return counts
        finally:
            process.kill()
            process.wait()


def mean(counts):
    return sum(age * count for age, count in counts.items()) / sum(counts.values())


def percentile(counts, share):
    """The least staleness that so many of the gradients do not exceed."""
    left = share * sum(counts.values())
    for age in sorted(counts):
        left -= counts[age]
        if left <= 0:
            return age
    return max(counts)


def main(args):
    found, rows = {}, []
    for arm in args.arms:
        for workers in args.workers:
            counts = found.setdefault(arm, {})[workers] = histogram(arm, workers, args)
            row = [arm, workers, workers - 1, f"{mean(counts):.2f}", percentile(counts, 0.99), max(counts)]
            print(*row, flush=True)
            rows.append([str(x) for x in row])
    header = ["environment", "workers", "others", "mean staleness", "99th percentile", "highest"]
    note = f"at least {args.updates} gradients a run, slept steps {args.step_ms:g} ms in the mean"
    finish({"a3c_staleness": (header, rows)}, args.output, note)
    if args.picture:
        from benchmark.figures import a3c_figures

        folder = a3c_figures.FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        data = {arm: {str(n): dict(sorted(counts.items())) for n, counts in of.items()} for arm, of in found.items()}
        (folder / "staleness.json").write_text(json.dumps(data, indent=1) + "\n")
        a3c_figures.remake(folder)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
