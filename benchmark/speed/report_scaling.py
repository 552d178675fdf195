"""Time and memory of collect and report on made-up runs of 10 algorithms on 50 environments.

    python benchmark/speed/report_scaling.py                                # 10,000 runs of 1,000 points: 1.5 GB
    python benchmark/speed/report_scaling.py --runs 1000 --folder scaling   # a tenth; the folder stays

Every point has a return and a speed, every tenth an evaluation: the metric. Prints a table of seconds and peak memory,
of a fresh process each: collect 99 % of the runs, once more with nothing new, with the rest; report.
"""

import json
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmark.runner.collect import collect  # noqa: E402
from benchmark.runner.measured import finish  # noqa: E402
from benchmark.runner.report import report  # noqa: E402
from benchmark.runner.suite import Suite  # noqa: E402

STEP = 1000  # environment steps between points


@dataclass
class Args:
    runs: int = 10_000  # of 10 algorithms on 50 environments
    points: int = 1000  # rows of metrics.jsonl in each
    metric: str = "eval/return_mean"  # or charts/episodic_return, which every point has
    folder: Path | None = None  # default: a temporary one, removed at the end
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json


def make_suite(args):
    environments = [f"env{i:02d}" for i in range(50)]
    return Suite(
        name="scaling", environments=environments, seeds=list(range(args.runs // 500)), budget=args.points * STEP,
        algorithms=[{"name": f"algorithm{i}", "script": "algos/ppo.py"} for i in range(10)], metric=args.metric,
        normalization={env: [0, 1] for env in environments},
    )  # fmt: skip


def make_run(folder, run, points):
    rng = np.random.default_rng([run.seed, int(run.id, 16)])
    path = folder / "runs" / run.id / "script" / run.env_id / f"seed{run.seed}-0"
    path.mkdir(parents=True, exist_ok=True)
    returns = np.linspace(0, rng.uniform(0.3, 1), points) + 0.1 * rng.standard_normal(points)
    rows = []
    for i, value in enumerate(returns.tolist()):
        test = f', "eval/return_mean": {value - 0.05!r}' if i % 10 == 9 else ""
        charts = f'"charts/episodic_return": {value!r}, "charts/SPS": {900 + i % 7}'
        rows.append(f'{{"global_step": {(i + 1) * STEP}, "wall_s": {i + 1.5}, {charts}{test}}}\n')
    (path / "metrics.jsonl").write_text("".join(rows))
    (path / "config.json").write_text(json.dumps({"args": {"seed": run.seed, "gamma": 0.99}, "host": "made-up"}))
    (path / "result.json").write_text(json.dumps({"global_step": points * STEP, "wall_s": points + 0.5}))


def measured(function, *args):
    """Seconds and peak MiB of a call in a fresh process."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(timed, (function, *args))


def timed(function, *args):
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(args):
    suite = make_suite(args)
    results = args.folder or Path(tempfile.mkdtemp(prefix="report_scaling_"))
    try:
        late, rows = suite.runs[::100], []
        steps = {
            "collect": (collect, [run for run in suite.runs if run not in late]),
            "collect, nothing new": (collect, []), f"collect, {len(late)} new": (collect, late), "report": (report, []),
        }  # fmt: skip
        for name, (function, made) in steps.items():
            for run in made:
                make_run(results / suite.name, run, args.points)
            seconds, memory = measured(function, suite, results)
            rows.append([name, f"{seconds:.1f}", f"{memory:.0f}"])
            print(*rows[-1], flush=True)
        note = f"{len(suite.runs):,} runs of {args.points:,} points"
        finish({"report_scaling": (["step", "seconds", "peak MiB"], rows)}, args.output, note)
    finally:
        if args.folder is None:
            shutil.rmtree(results)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
