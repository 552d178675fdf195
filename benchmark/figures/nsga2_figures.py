"""The last fronts of algos/nsga2.py against the true ones, from benchmark/results/nsga2/figures/fronts.json.

scripts/run benchmark/figures/nsga2_figures.py                       # fronts.png beside the numbers
scripts/run --extra evolution benchmark/speed/nsga2_pymoo.py --fronts benchmark/results/nsga2/figures/fronts.json
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from algos import nsga2  # noqa: E402
from benchmark.runner.figures import COLORS, SETTINGS, WIDTH  # noqa: E402

SHOWN = "zdt1", "zdt2", "zdt3", "zdt4", "zdt6", "dtlz1", "dtlz2", "dtlz7"


@dataclass
class Args:
    folder: Path = ROOT / "benchmark" / "results" / "nsga2" / "figures"  # of fronts.json


def draw(data):
    """A panel a function: the points found, and grey the true front."""
    figure = Figure((WIDTH, 4.0), layout="constrained")
    for i, name in enumerate(SHOWN):
        found = np.array(data["fronts"][name])
        true = nsga2.true_front(name, found.shape[1])
        axis = figure.add_subplot(2, 4, i + 1, projection="3d" if found.shape[1] == 3 else None)
        axis.scatter(*true.T, color="0.75", s=2 if found.shape[1] == 3 else 14, label="true front")
        axis.scatter(*found.T, color=COLORS[0], s=3, label="found")
        axis.set_title(name.upper(), pad=2)
        axis.tick_params(labelsize=6, pad=-1)
        if found.shape[1] == 3:
            axis.view_init(30, 45)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False, markerscale=3)
    return figure


def remake(folder):
    """Draws fronts.json in a folder."""
    with matplotlib.rc_context(SETTINGS):
        figure = draw(json.loads((folder / "fronts.json").read_text()))
        figure.savefig(folder / "fronts.png", dpi=130, metadata={})


def main(args):
    if not (args.folder / "fronts.json").is_file():
        raise SystemExit(f"error: there is no fronts.json in {args.folder}: see --help")
    remake(args.folder)
    print(args.folder / "fronts.png")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
