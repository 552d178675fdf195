"""The staleness of A3C's gradients by the number of workers: a histogram for each, and the mean against the others.

scripts/run benchmark/speed/a3c_staleness.py --picture    # measures, and writes results/a3c/figures/staleness.*
scripts/run benchmark/figures/a3c_figures.py              # draws staleness.json, the numbers beside it, again
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import tyro
from matplotlib.ticker import MaxNLocator

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.runner.figures import COLORS, SETTINGS, legend, panels, save  # noqa: E402

FOLDER = ROOT / "benchmark" / "results" / "a3c" / "figures"


@dataclass
class Args:
    folder: Path = FOLDER  # of staleness.json


def mean(counts):
    """counts: {staleness: gradients}, as JSON has it."""
    return sum(int(age) * count for age, count in counts.items()) / sum(counts.values())


def draw(data):
    """data: environment -> workers -> counts."""
    figure, axes = panels(1, len(data) + 1, 2.2)
    for i, (axis, (arm, of)) in enumerate(zip(axes, data.items())):
        for color, (workers, counts) in zip(COLORS, of.items()):
            ages, total = sorted(map(int, counts)), sum(counts.values())
            shares = [100 * counts[str(age)] / total for age in ages]
            axis.plot(
                ages, shares, color=color, marker=".", linewidth=1, label=f"{workers} worker{'s' * (workers != '1')}"
            )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(title=arm, xlabel="staleness (updates)", ylabel="gradients (%)" if i == 0 else None, ylim=(0, None))
        others = [int(workers) - 1 for workers in of]
        axes[-1].plot(
            others, [mean(counts) for counts in of.values()], "ov"[i % 2], color="black", label=arm, mfc="none"
        )
    limit = max(int(workers) for of in data.values() for workers in of) - 1
    axes[-1].plot([0, limit], [0, limit], color="gray", linewidth=0.7, label="all under way")
    axes[-1].set(title="mean", xlabel="other workers", ylabel="staleness (updates)")
    legend(figure, axes)
    return figure


def remake(folder):
    with matplotlib.rc_context(SETTINGS):
        save(draw(json.loads((folder / "staleness.json").read_text())), folder / "staleness")


if __name__ == "__main__":
    remake(tyro.cli(Args, description=__doc__).folder)
