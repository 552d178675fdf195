"""The lineage of a population (algos/pbt_ppo.py): fitness and each gene over the frames of all members, a line a
member; where a member copied another, a dot, and a thin line from the other's last value to its own.

    scripts/run --extra benchmark benchmark/figures/pbt_figures.py runs/pbt_ppo/VectorPong/seed1-1a2b3c4d  # lineage.png
    scripts/run --extra benchmark benchmark/figures/pbt_figures.py pbt_pong          # figures/lineage.* of its report

Of a run it reads lineage.jsonl alone. For a suite's report it takes the first algorithm's run with --seed, and leaves
the numbers of the picture beside it, in lineage.json.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.runner.figures import COLORS, SETTINGS, panels, save, unit  # noqa: E402
from benchmark.runner.suite import RESULTS  # noqa: E402


@dataclass
class Args:
    what: Annotated[str, tyro.conf.Positional]  # folder of a run, or a suite's name
    seed: int = 1  # of the suite's run
    results: Path = RESULTS  # folder of the suites' results, as of run.py


def read(folder):
    """The rows of a run's lineage.jsonl; SystemExit if there are none."""
    path = Path(folder) / "lineage.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if not rows:
        raise SystemExit(f"error: {path} holds no leg: is {folder} a run of algos/pbt_ppo.py?")
    return rows


def gather(rows):
    """The picture's numbers: slot -> global_step, parent and values (fitness first, then the genes) of its legs."""
    names, slots = ["fitness", *rows[0]["genes"]], sorted({row["slot"] for row in rows})
    return {"names": names, "members": {
        str(slot): [[row["global_step"], row["parent"], row["fitness"], *row["genes"].values()]
                    for row in rows if row["slot"] == slot] for slot in slots
    }}  # fmt: skip


def draw(data):
    members = {int(slot): legs for slot, legs in data["members"].items()}
    scale, label = unit(max(leg[0] for legs in members.values() for leg in legs))
    figure, axes = panels(len(data["names"]), 1, 1.7, sharex=True)
    for column, (axis, name) in enumerate(zip(axes, data["names"]), 2):
        for slot, legs in members.items():
            color = COLORS[slot % len(COLORS)]
            steps, values = (np.array([leg[k] for leg in legs], float) for k in (0, column))  # null is NaN
            axis.plot(steps / scale, values, color=color, linewidth=1, alpha=0.8)
            for step, parent, value in ((leg[0], leg[1], leg[column]) for leg in legs if leg[1] is not None):
                before = [leg[column] for leg in members[parent] if leg[0] < step and leg[column] is not None]
                if before and value is not None:
                    axis.plot([step / scale] * 2, [before[-1], value], color=color, linewidth=0.5)
                    axis.plot(step / scale, value, ".", color=color, markersize=4)
        values = np.array([leg[column] for legs in members.values() for leg in legs], float)
        if name != "fitness" and np.nanmin(values) > 0 and np.nanmax(values) > 10 * np.nanmin(values):
            axis.set_yscale("log")
        axis.set_ylabel(name.replace("_", " "))
    axes[-1].set_xlabel(f"{label} of all members")
    return figure


def remake(folder):
    """Draws lineage.json in the folder of a report's figures."""
    with matplotlib.rc_context(SETTINGS | {"text.parse_math": True}):  # the labels of a logarithmic axis
        save(draw(json.loads((folder / "lineage.json").read_text())), folder / "lineage")


def main(args):
    if (Path(args.what) / "config.json").is_file():
        with matplotlib.rc_context(SETTINGS | {"text.parse_math": True}):
            draw(gather(read(args.what))).savefig(Path(args.what) / "lineage.png", dpi=150)
        print(Path(args.what) / "lineage.png")
        return
    folder = args.results / args.what
    if not (folder / "runs.parquet").is_file():
        raise SystemExit(f"error: {args.what} is no folder of a run, and there are no tables in {folder}")
    import pandas as pd

    runs = pd.read_parquet(folder / "runs.parquet")
    runs = runs[(runs["state"] == "done") & (runs["seed"] == args.seed)]
    if runs.empty:
        raise SystemExit(f"error: no run of {args.what} with seed {args.seed} is done")
    (folder / "figures").mkdir(exist_ok=True)
    data = gather(read(runs["path"].iloc[0]))
    (folder / "figures" / "lineage.json").write_text(json.dumps(data, allow_nan=False))
    remake(folder / "figures")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
