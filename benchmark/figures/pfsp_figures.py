"""What self-play does in games with an exact NashConv, from a suite of algos/appo_pfsp.py: the paths of the policies of
rock-paper-scissors and of their average, and each game's NashConv over the steps, of the average and the newest policy.

    scripts/run --extra benchmark benchmark/run.py collect pfsp_small
    scripts/run --extra benchmark benchmark/figures/pfsp_figures.py pfsp_small    # figures/equilibrium.* there
"""

import importlib.util
import json
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated

import matplotlib
import numpy as np
import pandas as pd
import tyro
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.runner.figures import SETTINGS, WIDTH, named, save, styles  # noqa: E402
from benchmark.runner.suite import RESULTS  # noqa: E402

CORNERS = np.array([[0.5, 0.75**0.5], [0, 0], [1, 0]])  # rock, paper, scissors; the middle is the mean
EQUILIBRIA = {"rps": [1 / 3, 1 / 3, 1 / 3], "biased_rps": [1 / 4, 1 / 2, 1 / 4]}


@dataclass
class Args:
    suite: Annotated[str, tyro.conf.Positional]  # its name
    results: Path = RESULTS  # folder of the suites' results, as of run.py
    seed: int = 1  # whose paths are drawn


def league_policies(run):
    """Probabilities (n, 3) that the first player's n snapshots of a finished run give the three moves, oldest first.
    The run's own code.py reads them from its last checkpoint."""
    import torch

    spec = importlib.util.spec_from_file_location("code_of_the_run", run / "code.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    args = SimpleNamespace(**json.loads((run / "config.json").read_text())["args"])
    state = torch.load(sorted((run / "checkpoints").glob("*.pt"))[-1], weights_only=True, map_location="cpu")
    snapshots = module.as_policies(state["league"]["agents"], args)
    first = np.eye(2, dtype=np.float32)[:1], np.ones((1, 3), bool)
    return np.concatenate([policy(*first) for policy in snapshots])


def draw_path(axis, policies, equilibrium, style):
    """In the triangle of mixed strategies: the snapshots one after the other, and the average of all up to each."""
    newest, average = policies @ CORNERS, (policies.cumsum(0) / np.arange(1, len(policies) + 1)[:, None]) @ CORNERS
    axis.plot(*CORNERS[[0, 1, 2, 0]].T, color="black", linewidth=0.8)
    axis.plot(*newest.T, linewidth=0.5, alpha=0.6, **style)
    axis.plot(*average.T, color="black", linewidth=1.2)
    axis.plot(*(np.array(equilibrium) @ CORNERS), "*", color="#E69F00", markersize=8, markeredgecolor="black", zorder=3)
    for name, corner, side in zip("RPS", CORNERS, ("bottom", "top", "top")):
        axis.text(*corner, name, ha="center", va=side)
    axis.set_aspect("equal")


def draw_curves(axis, metrics, algorithms, looks):
    """NashConv over steps: of the league's average, every run (thin) and the mean over seeds; mean of the newest's."""
    for name in algorithms:
        for key, dashes in (("eval/nash_conv_average", "-"), ("eval/nash_conv", ":")):
            rows = metrics[(metrics["key"] == key) & (metrics["algorithm"] == name)]
            table = rows.pivot_table(index="global_step", columns="seed", values="value")
            look = looks[name] | {"linestyle": dashes}
            if key == "eval/nash_conv_average":
                axis.plot(table.index / 1e3, table, alpha=0.3, linewidth=0.6, **look)
            label = f"{named(name)}, {'average' if dashes == '-' else 'newest'}"
            axis.plot(table.index / 1e3, table.mean(axis=1), label=label, **look)
    axis.set(yscale="log", xlabel="thousand steps")


def main(args):
    folder = args.results / args.suite
    if not (folder / "metrics.parquet").is_dir():
        raise SystemExit(f"error: no tables in {folder}: run benchmark/run.py collect {args.suite}")
    runs, metrics = pd.read_parquet(folder / "runs.parquet"), pd.read_parquet(folder / "metrics.parquet")
    metrics = metrics.astype({name: str for name in ("key", "algorithm", "env_id")}).dropna(subset="value")
    metrics = metrics[metrics["key"].isin(("eval/nash_conv", "eval/nash_conv_average"))]
    if metrics.empty:
        raise SystemExit(f"error: {folder} holds no eval/nash_conv: is it a suite of appo_pfsp.py with exact games?")
    algorithms, games = list(runs["algorithm"].drop_duplicates()), list(runs["env_id"].drop_duplicates())  # its order
    looks, matrix = styles({"algorithms": algorithms}), [game for game in games if game in EQUILIBRIA]
    done = runs[(runs["state"] == "done") & (runs["seed"] == args.seed) & runs["env_id"].isin(matrix)]
    done = done.set_index(["env_id", "algorithm"])["path"]
    for path in done:
        if not Path(path).resolve().is_relative_to(folder.resolve()):
            raise SystemExit(f"error: {folder / 'runs.parquet'} names a run outside of it, {path}: its code is not run")
    if len(done):
        print(f"note: runs the code.py of {len(done)} runs in {folder}, as {done.iloc[0]}", file=sys.stderr)
    heights = [1.6] * bool(matrix) + [2.8]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure((WIDTH, sum(heights)), layout="constrained")
        *above, below = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        for part in above:
            axes = part.subplots(1, len(matrix) * len(algorithms), squeeze=False)[0]
            for axis, (game, name) in zip(axes, product(matrix, algorithms)):
                axis.set_title(f"{game}\n{name}")
                axis.set_axis_off()
                if (game, name) in done:
                    draw_path(axis, league_policies(Path(done[game, name])), EQUILIBRIA[game], looks[name])
        axes = below.subplots(1, len(games), squeeze=False)[0]
        for axis, game in zip(axes, games):
            draw_curves(axis, metrics[metrics["env_id"] == game], algorithms, looks)
            axis.set_title(game)
        axes[0].set_ylabel("NashConv")
        below.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
        (folder / "figures").mkdir(exist_ok=True)
        save(figure, folder / "figures" / "equilibrium")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
