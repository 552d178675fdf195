"""Curves and a table of finished runs, grouped by one of their arguments.

    python benchmark/compare.py runs/ppo_plr/bigfish --by curriculum --out benchmark/results/bigfish_nature

Writes curves.png (every seed thin, the mean of all seeds thick) and table.md to the folder `out`, and prints the table.
A run without result.json is named and left out. Intervals are 95 % bootstrap intervals of the mean over seeds.
"""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402  after the choice of backend

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito: told apart by colour-blind readers
PANELS = {
    "charts/episodic_return": "training episodes",
    "eval_train/return_mean": "evaluation, training levels",
    "eval/return_mean": "evaluation, unseen levels",
}
COLUMNS = ("eval/return_mean", "eval_train/return_mean", "eval/generalization_gap", "eval/return_normalized")


@dataclass
class Args:
    runs: tyro.conf.Positional[Path]  # folder that holds a folder per run
    by: str = "curriculum"  # the argument that tells the methods apart
    out: Path = Path("benchmark/results/compare")  # folder for curves.png and table.md


def load(folder, by):
    """value of `by` -> list of (seed, rows of metrics.jsonl, result.json) of the finished runs in `folder`."""
    methods = defaultdict(list)
    for config in sorted(folder.glob("*/config.json")):
        run, args = config.parent, json.loads(config.read_text())["args"]
        if not (run / "result.json").exists():
            print(f"left out, not finished: {run}")
            continue
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        methods[args[by]].append((args["seed"], rows, json.loads((run / "result.json").read_text())))
    if not methods:
        raise SystemExit(f"error: {folder} holds no finished run (a folder with config.json and result.json)")
    return dict(sorted(methods.items(), reverse=True))


def interval(values, draws=10_000):
    """95 % bootstrap interval of the mean, or None for a single value."""
    values = np.asarray(values)
    if len(values) < 2:
        return None
    means = np.random.default_rng(0).choice(values, (draws, len(values))).mean(1)
    return np.percentile(means, [2.5, 97.5])


def draw(methods, path):
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 3.4), sharey=True, constrained_layout=True)
    for axis, (key, title) in zip(axes, PANELS.items()):
        for color, (name, runs) in zip(COLORS, methods.items()):
            curves = [{r["global_step"]: r[key] for r in rows if r.get(key) is not None} for _, rows, _ in runs]
            for curve in curves:
                axis.plot([s / 1e6 for s in curve], list(curve.values()), color=color, alpha=0.3, linewidth=0.8)
            steps = sorted(set.intersection(*(set(curve) for curve in curves)))  # only where every seed has a point
            mean = [np.mean([curve[step] for curve in curves]) for step in steps]
            label = f"{name} (n={len(runs)})"
            axis.plot([s / 1e6 for s in steps], mean, color=color, linewidth=2, label=label)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("environment steps, millions")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("return")
    axes[0].legend()
    figure.savefig(path, dpi=130)


def table(methods):
    lines = ["| method | seeds | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for name, runs in methods.items():
        cells = []
        for column in COLUMNS:
            values = [result[column] for _, _, result in runs if column in result]
            bounds = interval(values)
            spread = "" if bounds is None else f" [{bounds[0]:.2f}, {bounds[1]:.2f}]"
            cells.append(f"{np.mean(values):.2f}{spread}" if values else "")
        seeds = ", ".join(str(seed) for seed, _, _ in sorted(runs, key=lambda run: run[0]))
        lines.append(f"| {name} | {seeds} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(args):
    methods = load(args.runs, args.by)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(methods, args.out / "curves.png")
    (args.out / "table.md").write_text(table(methods))
    print(table(methods))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
