"""The PopArt paper's Figure 3 from a suite of algos/impala_popart.py: each game's returns by agent and, below them, the
statistics mu and sigma of its values. Also a table of every game's last evaluation.

    scripts/run --extra benchmark benchmark/run.py collect impala_mixed
    scripts/run --extra benchmark benchmark/figures/popart_figures.py impala_mixed    # figures/games.* there
"""

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
from benchmark.runner.suite import RESULTS  # noqa: E402


@dataclass
class Args:
    suite: Annotated[str, tyro.conf.Positional]  # its name
    results: Path = RESULTS  # folder of the suites' results, as of run.py
    bins: int = 40  # points of a curve: means of a run's episodes between two of them


def curve(rows, edges):
    """Mean value of `rows` in each bin of global_step; NaN where there is none."""
    bins = np.digitize(rows["global_step"], edges[1:-1])
    return pd.Series(rows["value"].to_numpy()).groupby(bins).mean().reindex(range(len(edges) - 1)).to_numpy()


def draw(metrics, games, algorithms, edges):
    """A column per game: returns of every run (thin) and their mean over seeds; mu, with mu +- sigma, of PopArt's."""
    figure, axes = panels(2, len(games), 2.0, sharex=True)
    x, looks = (edges[:-1] + edges[1:]) / 2e6, styles({"algorithms": algorithms})
    for column, game in enumerate(games):
        returns, values = axes[column], axes[len(games) + column]
        for name in algorithms:
            rows = metrics[(metrics["key"] == f"tasks/{game}/episodic_return") & (metrics["algorithm"] == name)]
            runs = np.array([curve(run, edges) for _, run in rows.groupby("seed")])
            if len(runs):
                returns.plot(x, runs.T, alpha=0.3, linewidth=0.6, **looks[name])
                returns.plot(x, runs.mean(0), label=named(name), **looks[name])
        for (name, _), run in metrics[metrics["key"] == f"popart/{game}/mu"].groupby(["algorithm", "seed"]):
            spread = metrics[(metrics["key"] == f"popart/{game}/sigma") & (metrics["run_id"] == run["run_id"].iloc[0])]
            mu, sigma = curve(run, edges), curve(spread, edges)
            values.plot(x, mu, linewidth=0.8, **looks[name])
            values.fill_between(x, mu - sigma, mu + sigma, color=looks[name]["color"], alpha=0.2, linewidth=0)
        returns.set_title(game)
        values.set_xlabel("million steps")
    axes[0].set_ylabel("return")
    axes[len(games)].set_ylabel("mu ± sigma of the values")
    legend(figure, axes)
    return figure


def table(metrics, games, algorithms):
    """Markdown: the last evaluation of every game, mean over seeds and its range."""
    lines = ["| agent | seeds | " + " | ".join(games) + " |", "|---" * (len(games) + 2) + "|"]
    for name in algorithms:
        cells, seeds = [], set()
        for game in games:
            rows = metrics[(metrics["key"] == f"eval/{game}/return_mean") & (metrics["algorithm"] == name)]
            last = rows.sort_values("global_step").groupby("seed")["value"].last()
            seeds |= set(last.index)
            cells.append(f"{last.mean():,.4g} ({last.min():,.4g} to {last.max():,.4g})" if len(last) else "missing")
        lines.append(f"| {name} | {', '.join(map(str, sorted(seeds)))} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
    with matplotlib.rc_context(SETTINGS):
        figure = draw(metrics, games, algorithms, np.linspace(0, metrics["global_step"].max(), args.bins + 1))
        (folder / "figures").mkdir(exist_ok=True)
        save(figure, folder / "figures" / "games")
    print(table(metrics, games, algorithms))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
