"""Cost of prioritized level replay as levels grow: `python benchmark/speed/plr_scaling.py` prints a markdown table.

draw alone: `sample()` while scores stand still. draw, update: a `sample()` and an update by one episode, in turn.
rollout: one `update_from_rollout` of T=256, N=64 with about 200 ended episodes, then `after_update`. Each is the median
and, in brackets, the mean over calls. Memory is the peak of making the curriculum and loading a state. All levels are
seen, with random scores, after 10,000 draws.
"""

import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmark.runner.measured import finish  # noqa: E402
from curricula.plr import PrioritizedLevelReplay  # noqa: E402


def make(num_tasks, transform):
    rng = np.random.default_rng(0)
    temperature = 0.1 if transform == "rank" else 1.0
    curriculum = PrioritizedLevelReplay(num_tasks, score_transform=transform, temperature=temperature, seed=0)
    arrays = {"scores": rng.random(num_tasks), "unseen": np.zeros(num_tasks, bool)}
    curriculum.load_state_dict(curriculum.state_dict() | arrays)
    curriculum.sample(10_000)
    return curriculum


def seconds(function, repeats):
    times = np.empty(repeats)
    for i in range(repeats):
        start = time.perf_counter()
        function()
        times[i] = time.perf_counter() - start
    return times


def measure(num_tasks, transform):
    curriculum, rng = make(num_tasks, transform), np.random.default_rng(1)
    draw = seconds(curriculum.sample, 3000)
    zero, ended = np.zeros((2, 1)), np.ones((2, 1), bool)
    sample, update = [], []
    for task in rng.integers(num_tasks, size=(3000 if transform == "rank" else 100, 1, 1)):
        episode = task, rng.random((1, 1)), zero, None, ended, 1.0, 1.0
        update += seconds(partial(curriculum.update_from_rollout, *episode), 1).tolist()
        sample += seconds(curriculum.sample, 1).tolist()
    T, N = 256, 64
    data = [rng.integers(num_tasks, size=(T, N)), rng.random((T, N)), rng.random((T + 1, N)), rng.random((T, N, 15))]
    data += [rng.random((T + 1, N)) < 200 / (T * N), 0.999, 0.95]
    rollout = seconds(lambda: (curriculum.update_from_rollout(*data), curriculum.after_update()), 20)
    return [(1e6 * np.median(times), 1e6 * np.mean(times)) for times in (draw, sample, update, rollout)]


def main(
    levels: tuple[int, ...] = (10**2, 10**4, 10**6),
    transforms: tuple[str, ...] = ("rank", "power"),
    output: Path | None = None,  # also write the table there, as benchmark/results/speed/NAME.json
):
    header, rows = ["transform", "levels", "draw alone", "draw", "update", "rollout", "peak memory"], []
    for transform in transforms:
        for num_tasks in levels:
            times = [f"{median:.1f} ({mean:.1f})" for median, mean in measure(num_tasks, transform)]
            tracemalloc.start()
            make(num_tasks, transform)
            peak = tracemalloc.get_traced_memory()[1] / 2**20
            tracemalloc.stop()
            rows.append([transform, f"{num_tasks:,}", *times, f"{peak:.1f} MiB"])
            print(*rows[-1], flush=True)
    finish({"plr_scaling": (header, rows)}, output, "microseconds, median (mean)")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
