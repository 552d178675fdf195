"""Insertions, draws and new priorities per CPU second of the replay of curricula/taper.py, beside cpprb, in one run.

    python benchmark/speed/replay_throughput.py                         # 10^4 to 10^7 transitions, 5 minutes, 3 GB
    python benchmark/speed/replay_throughput.py --capacities 1e5 --peer none

cpprb (C++) is no requirement: `.venv/bin/pip install --no-deps cpprb==11.0.0`. Both hold MiniGrid's observations (7 x 7
x 3 bytes; ours once, cpprb s and s', because its `next_of` is for one environment), four rewards and betas, episodes of
100 steps, 16 environments; a task rises at one step in 1,000. Every arm is full, so that insertions overwrite. A draw
is a batch with its importance weights; new priorities are those of a drawn batch. Medians over the rounds.
"""

import importlib.metadata
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmark.runner.measured import finish  # noqa: E402
from curricula.taper import TaskPrioritizedReplay  # noqa: E402

OBS, TASKS, T, ENVS, FILL = (7, 7, 3), 4, 100, 16, 1000  # FILL environments at once fill the replay before it is timed
ALPHA, IS_BETA = 0.6, 0.4


@dataclass
class Args:
    capacities: tuple[float, ...] = (1e4, 1e5, 1e6, 1e7)  # transitions
    kinds: tuple[Literal["uniform", "per", "taper", "taper_td"], ...] = ("uniform", "per", "taper", "taper_td")
    files: bool = True  # also taper in memory-mapped files, in a temporary folder
    peer: Literal["cpprb", "none"] = "cpprb"  # measured beside ours: its uniform and its PER replay
    batch_size: int = 64  # transitions of a draw
    seconds: float = 0.5  # CPU time of each measurement
    rounds: int = 3  # of all measurements of an arm
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json


class Ours:
    def __init__(self, kind, capacity, folder=None):
        num_envs = min(FILL, capacity // T)
        rng = np.random.default_rng(0)
        self.replay = TaskPrioritizedReplay(
            capacity, num_envs, TASKS, OBS, np.uint8, T, rng, kind, ALPHA, folder=folder
        )
        self.priorities, self.nbytes = self.replay.tree is not None, self.replay.nbytes
        self.steps = np.zeros(num_envs, np.int64)

    def add(self, step):
        self.steps[step["envs"]] += 1
        end = self.steps[step["envs"]] == T
        self.steps[step["envs"][end]] = 0
        self.replay.add(**step, beta=np.zeros_like(step["next_beta"]), terminated=np.zeros_like(end), truncated=end)

    def sample(self, batch_size):
        return self.replay.sample(batch_size, IS_BETA)

    def update(self, batch, errors):
        self.replay.set_priorities(batch["index"], errors)


class Cpprb:
    def __init__(self, kind, capacity):
        import cpprb

        obs = {"shape": OBS, "dtype": np.uint8}
        fields = {"obs": obs, "next_obs": obs, "action": {"dtype": np.int64}, "reward": {"shape": TASKS},
                  "next_beta": {"shape": TASKS, "dtype": bool}}  # fmt: skip
        make = {"uniform": cpprb.ReplayBuffer, "per": cpprb.PrioritizedReplayBuffer}[kind]
        self.priorities = kind == "per"
        self.buffer = make(capacity, fields, **({"alpha": ALPHA} if self.priorities else {}))
        self.nbytes = None

    def add(self, step):
        self.buffer.add(**{name: value for name, value in step.items() if name != "envs"})

    def sample(self, batch_size):
        return self.buffer.sample(batch_size, **({"beta": IS_BETA} if self.priorities else {}))

    def update(self, batch, errors):
        self.buffer.update_priorities(batch["indexes"], np.abs(errors).max(1))


def transitions(rng, num_envs, count):
    """`count` steps of all environments."""
    for _ in range(count):
        yield {
            "envs": np.arange(num_envs), "obs": rng.integers(0, 11, (num_envs, *OBS), np.uint8),
            "next_obs": rng.integers(0, 11, (num_envs, *OBS), np.uint8), "action": rng.integers(0, 7, num_envs),
            "reward": rng.random((num_envs, TASKS), np.float32),
            "next_beta": rng.random((num_envs, TASKS)) < 0.001 / TASKS,
        }  # fmt: skip


def per_second(work, size, seconds):
    """Thousands of transitions per CPU second of work(i), which handles `size` of them."""
    start, calls = time.process_time(), 0
    while (passed := time.process_time() - start) < seconds:
        work(calls)
        calls += 1
    return calls * size / passed / 1000


def measure(arm, capacity, args):
    rng = np.random.default_rng(1)
    fill = min(FILL, capacity // T)
    steps = list(transitions(rng, fill, 20))
    for i in range(-(-capacity // fill)):
        arm.add(steps[i % 20])
    steps = list(transitions(rng, min(ENVS, fill), 100))
    errors = rng.random((args.batch_size, TASKS))
    found = {"insert": [], "draw": [], "priorities": []}
    for _ in range(args.rounds):
        found["insert"].append(per_second(lambda i: arm.add(steps[i % 100]), min(ENVS, fill), args.seconds))
        found["draw"].append(per_second(lambda i: arm.sample(args.batch_size), args.batch_size, args.seconds))
        if arm.priorities:
            batches = [arm.sample(args.batch_size) for _ in range(20)]
            update = lambda i: arm.update(batches[i % 20], errors)  # noqa: B023, E731
            found["priorities"].append(per_second(update, args.batch_size, args.seconds))
    return {name: statistics.median(values) if values else None for name, values in found.items()}


def main(args):
    arms = [(f"ours, {kind}", Ours, kind) for kind in args.kinds]
    arms += [("ours, taper in files", Ours, "taper")] * args.files
    if args.peer == "cpprb":
        try:
            name = f"cpprb {importlib.metadata.version('cpprb')}"
        except ImportError as error:
            raise SystemExit(f"error: --peer cpprb: {error}. Install it (see --help), or --peer none") from error
        arms += [(f"{name}, {kind}", Cpprb, kind) for kind in ("uniform", "per")]
    header, rows = ["capacity", "replay", "insert", "draw", "new priorities", "MiB"], []
    for capacity, (name, make, kind) in product(map(int, args.capacities), arms):
        with tempfile.TemporaryDirectory() as folder:
            arm = make(kind, capacity, folder) if "files" in name else make(kind, capacity)
            found = measure(arm, capacity, args)
            speeds = ["" if value is None else f"{value:,.0f}" for value in found.values()]
            memory = f"{arm.nbytes / 2**20:,.0f}" if arm.nbytes else ""
            rows.append([f"{capacity:,}", name, *speeds, memory])
            print(*rows[-1], flush=True)
            del arm
    note = f"thousands of transitions per CPU second; batches of {args.batch_size}, alpha {ALPHA}"
    finish({"replay_throughput": (header, rows)}, args.output, note)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
