"""What self-play does in games with an exact NashConv, from a suite of algos/appo_pfsp.py: the paths of the policies of
rock-paper-scissors and of their average, and each game's NashConv over the steps, of the average and the newest policy.
The numbers of the picture stand beside it, in equilibrium.json.

    scripts/run --extra benchmark benchmark/run.py report pfsp_small
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
from benchmark.runner.study import plain, rounded  # noqa: E402
from benchmark.runner.suite import RESULTS  # noqa: E402

CORNERS = np.array([[0.5, 0.75**0.5], [0, 0], [1, 0]])  # rock, paper, scissors; the middle is the mean
KEYS = {"newest": "eval/nash_conv", "average": "eval/nash_conv_average"}
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


def gather(runs, metrics, games, algorithms, seed):
    """The picture's numbers. paths: matrix game -> algorithm -> policies of its snapshots and their average so far, of
    one seed; curves: game -> algorithm -> steps, and NashConv of the average and of the newest policy by seed."""
    paths, curves = {game: {} for game in games if game in EQUILIBRIA}, {game: {} for game in games}
    for (game, name), path in runs.items():
        policies = league_policies(Path(path)).astype(float)
        average = policies.cumsum(0) / np.arange(1, len(policies) + 1)[:, None]
        paths[game][name] = {"newest": policies.round(6).tolist(), "average": average.round(6).tolist()}
    for game in games:
        for name in algorithms:
            rows = metrics[(metrics["env_id"] == game) & (metrics["algorithm"] == name)]
            tables = [rows[rows["key"] == key].pivot_table(index="global_step", columns="seed", values="value")
                      for key in KEYS.values()]  # fmt: skip
            lines = [{str(run): plain(map(rounded, table[run])) for run in table} for table in tables]
            curves[game][name] = {"steps": tables[0].index.tolist()} | dict(zip(KEYS, lines))
    return {"seed": seed, "algorithms": algorithms, "paths": paths, "curves": curves}


def draw_path(axis, path, equilibrium, style):
    """In the triangle of mixed strategies: the snapshots one after the other, and the average of all up to each."""
    newest, average = (np.array(path[kind]) @ CORNERS for kind in KEYS)
    axis.plot(*CORNERS[[0, 1, 2, 0]].T, color="black", linewidth=0.8)
    axis.plot(*newest.T, linewidth=0.5, alpha=0.6, **style)
    axis.plot(*average.T, color="black", linewidth=1.2)
    axis.plot(*(np.array(equilibrium) @ CORNERS), "*", color="#E69F00", markersize=8, markeredgecolor="black", zorder=3)
    for name, corner, side in zip("RPS", CORNERS, ("bottom", "top", "top")):
        axis.text(*corner, name, ha="center", va=side)
    axis.set_aspect("equal")


def draw_curves(axis, curves, looks):
    """NashConv over steps: of the league's average, every run (thin) and the mean over seeds; mean of the newest's."""
    for name, curve in curves.items():
        steps = np.array(curve["steps"]) / 1e3
        for kind, dashes in (("average", "-"), ("newest", ":")):
            runs, look = np.array(list(curve[kind].values()), float), looks[name] | {"linestyle": dashes}
            if not len(runs):
                continue
            if kind == "average":
                axis.plot(steps, runs.T, alpha=0.3, linewidth=0.6, **look)
            axis.plot(steps, runs.mean(0), label=f"{named(name)}, {kind}", **look)
    axis.set(yscale="log", xlabel="thousand steps")


def draw(data):
    paths, curves, looks = data["paths"], data["curves"], styles(data)
    heights = [1.6] * bool(paths) + [2.8]
    figure = Figure((WIDTH, sum(heights)), layout="constrained")
    *above, below = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part in above:
        axes = part.subplots(1, len(paths) * len(looks), squeeze=False)[0]
        for axis, (game, name) in zip(axes, product(paths, looks)):
            axis.set_title(f"{game}\n{name}")
            axis.set_axis_off()
            if name in paths[game]:
                draw_path(axis, paths[game][name], EQUILIBRIA[game], looks[name])
    axes = below.subplots(1, len(curves), squeeze=False)[0]
    for axis, (game, of) in zip(axes, curves.items()):
        draw_curves(axis, of, looks)
        axis.set_title(game)
    axes[0].set_ylabel("NashConv")
    below.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def remake(folder):
    """Draws equilibrium.json in the folder of a report's figures."""
    with matplotlib.rc_context(SETTINGS | {"text.parse_math": True}):  # the labels of a logarithmic axis
        save(draw(json.loads((folder / "equilibrium.json").read_text())), folder / "equilibrium")


def main(args):
    folder = args.results / args.suite
    if not (folder / "metrics.parquet").is_dir():
        raise SystemExit(f"error: no tables in {folder}: run benchmark/run.py collect {args.suite}")
    runs, metrics = pd.read_parquet(folder / "runs.parquet"), pd.read_parquet(folder / "metrics.parquet")
    metrics = metrics.astype({name: str for name in ("key", "algorithm", "env_id")}).dropna(subset="value")
    metrics = metrics[metrics["key"].isin(KEYS.values())]
    if metrics.empty:
        raise SystemExit(f"error: {folder} holds no eval/nash_conv: is it a suite of appo_pfsp.py with exact games?")
    algorithms, games = list(runs["algorithm"].drop_duplicates()), list(runs["env_id"].drop_duplicates())  # its order
    done = runs[(runs["state"] == "done") & (runs["seed"] == args.seed) & runs["env_id"].isin(EQUILIBRIA)]
    done = done.set_index(["env_id", "algorithm"])["path"]
    for path in done:
        if not Path(path).resolve().is_relative_to(folder.resolve()):
            raise SystemExit(f"error: {folder / 'runs.parquet'} names a run outside of it, {path}: its code is not run")
    if len(done):
        print(f"note: runs the code.py of {len(done)} runs in {folder}, as {done.iloc[0]}", file=sys.stderr)
    data = gather(done, metrics, games, algorithms, args.seed)
    (folder / "figures").mkdir(exist_ok=True)
    (folder / "figures" / "equilibrium.json").write_text(json.dumps(data, allow_nan=False))
    remake(folder / "figures")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
