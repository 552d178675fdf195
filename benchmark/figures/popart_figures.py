"""The PopArt paper's Figure 3 from a suite of algos/impala_popart*.py: each game's returns by agent and, below them,
the statistics mu and sigma of its values. The numbers of the picture stand beside it, in games.json; the games' scores
in the report (`also` in the suite).

    scripts/run --extra benchmark benchmark/run.py report impala_mixed
    scripts/run --extra benchmark benchmark/figures/popart_figures.py impala_mixed    # figures/games.* there
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import matplotlib
import numpy as np
import pandas as pd
import tyro

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.runner.figures import SETTINGS, legend, named, panels, save, styles  # noqa: E402
from benchmark.runner.study import plain, rounded  # noqa: E402
from benchmark.runner.suite import RESULTS  # noqa: E402


@dataclass
class Args:
    suite: Annotated[str, tyro.conf.Positional]  # its name
    results: Path = RESULTS  # folder of the suites' results, as of run.py
    bins: int = 40  # points of a curve: means of a run's episodes between two of them


def curve(rows, edges):
    """Mean value of `rows` in each bin of global_step; null where there is none."""
    bins = np.digitize(rows["global_step"], edges[1:-1])
    means = pd.Series(rows["value"].to_numpy()).groupby(bins).mean().reindex(range(len(edges) - 1))
    return plain(map(rounded, means))


def gather(metrics, games, algorithms, edges):
    """The picture's numbers: game -> returns, mu and sigma -> algorithm -> seed -> a value per bin."""
    tags = {"returns": "tasks/{}/episodic_return", "mu": "popart/{}/mu", "sigma": "popart/{}/sigma"}
    found = {game: {kind: {name: {} for name in algorithms} for kind in tags} for game in games}
    for game in games:
        for kind, tag in tags.items():
            for (name, seed), run in metrics[metrics["key"] == tag.format(game)].groupby(["algorithm", "seed"]):
                found[game][kind][name][str(seed)] = curve(run, edges)
    return {"algorithms": algorithms, "steps": plain((edges[:-1] + edges[1:]) / 2), "games": found}


def draw(data):
    """A column per game: returns of every run (thin) and their mean over seeds; mu, with mu +- sigma, of PopArt's."""
    games, looks, x = data["games"], styles(data), np.array(data["steps"]) / 1e6
    figure, axes = panels(2, len(games), 2.0, sharex=True)
    for axis, below, (game, of) in zip(axes, axes[len(games) :], games.items()):
        for name, runs in of["returns"].items():
            runs = np.array(list(runs.values()), float)
            if len(runs):
                axis.plot(x, runs.T, alpha=0.3, linewidth=0.6, **looks[name])
                axis.plot(x, runs.mean(0), label=named(name), **looks[name])
        for name, runs in of["mu"].items():
            for seed, values in runs.items():
                mu, sigma = np.array(values, float), np.array(of["sigma"][name][seed], float)
                below.plot(x, mu, linewidth=0.8, **looks[name])
                below.fill_between(x, mu - sigma, mu + sigma, color=looks[name]["color"], alpha=0.2, linewidth=0)
        axis.set_title(game)
        below.set_xlabel("million steps")
    axes[0].set_ylabel("return")
    axes[len(games)].set_ylabel("mu ± sigma of the values")
    legend(figure, axes)
    return figure


def remake(folder):
    """Draws games.json in the folder of a report's figures."""
    with matplotlib.rc_context(SETTINGS):
        save(draw(json.loads((folder / "games.json").read_text())), folder / "games")


def main(args):
    folder = args.results / args.suite
    if not (folder / "metrics.parquet").is_dir():
        raise SystemExit(f"error: no tables in {folder}: run benchmark/run.py collect {args.suite}")
    metrics = pd.read_parquet(folder / "metrics.parquet")
    metrics = metrics.astype({name: str for name in ("key", "algorithm", "run_id")}).dropna(subset="value")
    keys = metrics["key"].drop_duplicates()
    games = [key.split("/")[1] for key in keys if key.startswith("tasks/") and key.endswith("/episodic_return")]
    if not games:
        raise SystemExit(f"error: {folder} holds no tasks/<game>/episodic_return: is it a suite of impala_popart.py?")
    algorithms = list(pd.read_parquet(folder / "runs.parquet")["algorithm"].drop_duplicates())  # as the suite has them
    data = gather(metrics, games, algorithms, np.linspace(0, metrics["global_step"].max(), args.bins + 1))
    (folder / "figures").mkdir(exist_ok=True)
    (folder / "figures" / "games.json").write_text(json.dumps(data, allow_nan=False))
    remake(folder / "figures")
    print(folder / "figures" / "games.png")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
