"""Collecting, estimating and reporting: synthetic runs with known answers, and event files as CleanRL writes them."""

import base64
import contextlib
import fcntl
import html.parser
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow", reason="scripts/run --extra benchmark brings it")
import matplotlib  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from scipy import stats  # noqa: E402

from benchmark.runner import board, estimates, figures, ledger  # noqa: E402
from benchmark.runner.collect import collect, export_wandb, points, read_runs  # noqa: E402
from benchmark.runner.publish import publish, remake  # noqa: E402
from benchmark.runner.report import report  # noqa: E402
from benchmark.runner.study import Study, environment_curves, run_curves  # noqa: E402
from benchmark.runner.suite import Suite, load  # noqa: E402

ROOT = Path(__file__).parents[1]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
METRIC, BUDGET = "eval/return_mean", 1000


def make_suite(algorithms=("a",), envs=("E1",), seeds=(1, 2, 3), **more):
    tables = [{"name": name, "script": "algos/ppo.py"} for name in algorithms]
    return Suite(name="s", environments=list(envs), seeds=list(seeds), budget=BUDGET, algorithms=tables, **more)


def write_run(results, run, values, steps=None, result=True, key=METRIC, **extra):
    """A run folder with `values` of the metric, by default at equal distances up to the budget."""
    env_id = re.sub(r"[^\w.-]+", "-", run.env_id)  # as the scripts do
    folder = results / "s" / "runs" / run.id / "ppo" / env_id / f"seed{run.seed}-abc"
    folder.mkdir(parents=True)
    steps = np.linspace(0, BUDGET, len(values) + 1)[1:].astype(int).tolist() if steps is None else steps
    rows = [{"global_step": s, "wall_s": s / 10, key: v, "charts/SPS": 10.0} | extra for s, v in zip(steps, values)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"args": {"batch_size": 100}, "git_commit": "c0ffee" * 6, "git_dirty": False, "host": "h", "torch": "2.0"}
    (folder / "config.json").write_text(json.dumps(config))
    if result:
        (folder / "result.json").write_text(json.dumps({"global_step": steps[-1], "wall_s": steps[-1] / 10}))
    return folder


def write_all(results, suite, score):
    """A whole run for each planned one, with the constant return score(algorithm, env, seed)."""
    for run in suite.runs:
        write_run(results, run, [score(run.algorithm, run.env_id, run.seed)] * 10)


def write_ledger(results, run, **record):
    folder = results / "s" / "ledger"
    folder.mkdir(parents=True, exist_ok=True)
    record = {"attempts": 1, "command": "c", "host": "h", "place": "p", "started": 1.0, "heartbeat": 1.0} | record
    (folder / f"{run.id}.json").write_text(json.dumps(record))


def made(results, suite, **options):
    """Summary and Markdown of a fresh collect and report."""
    collect(suite, results)
    return report(suite, results, reps=200, **options), (results / "s" / "report.md").read_text()


# ---- Estimates -------------------------------------------------------------------------------------------------------


def test_estimates_by_hand():
    scores = np.array([[0.0, 1, 2, 3], [4, 8, 9, 15]])
    assert estimates.iqm(scores) == 4.25  # of 2, 3, 4, 8
    assert estimates.median(scores) == 5  # of 2, 4.5, 5.5, 9
    assert estimates.mean(scores) == 5.25
    assert estimates.optimality_gap(np.array([[0.5, 3.0], [0.7, 0.8]])) == pytest.approx(1 - (0.5 + 1 + 0.7 + 0.8) / 4)
    assert estimates.profile(scores, np.array([0, 4.5])).tolist() == [7 / 8, 3 / 8]
    x, y = np.array([[1.0], [3.0]]), np.array([[0.0], [3.0], [5.0]])
    assert estimates.improvement(x, y)[0] == pytest.approx((1 + 0 + 0 + 1 + 0.5 + 0) / 6)


def test_estimates_agree_with_rliable():
    from rliable import library, metrics

    rng, reps = np.random.default_rng(0), 1000
    x, y = rng.beta(2, 2, (5, 8)), rng.beta(2, 3, (6, 8))
    theirs = {"IQM": metrics.aggregate_iqm, "median": metrics.aggregate_median, "mean": metrics.aggregate_mean,
              "optimality gap": metrics.aggregate_optimality_gap}  # fmt: skip
    np.random.seed(0)  # rliable takes a random_state and ignores it
    every = lambda z: np.array([f(z) for f in theirs.values()])  # noqa: E731
    values, bounds = library.get_interval_estimates({"x": x}, every, reps=reps)
    for i, name in enumerate(theirs):
        assert estimates.ESTIMATES[name](x) == pytest.approx(values["x"][i], abs=1e-6)
        ours = estimates.interval(x, estimates.ESTIMATES[name], reps)
        np.testing.assert_allclose(ours, bounds["x"][:, i], atol=0.02 * np.ptp(x))
    np.random.seed(0)
    values, bounds = library.get_interval_estimates({"x,y": (x, y)}, metrics.probability_of_improvement, reps=reps)
    value, ours = estimates.improvement(x, y, reps)
    assert value == pytest.approx(float(values["x,y"]), abs=1e-6)
    np.testing.assert_allclose(ours, np.ravel(bounds["x,y"]), atol=0.02)
    thresholds = np.linspace(0, 1, 11)
    np.random.seed(0)
    shares, bands = library.create_performance_profile({"x": x}, thresholds, reps=100)
    np.testing.assert_allclose(estimates.profile(x, thresholds), shares["x"], atol=1e-6)
    ours = estimates.interval(x, lambda z: estimates.profile(z, thresholds).T, 1000)
    np.testing.assert_allclose(ours, bands["x"], atol=0.08)


def test_intervals_are_over_seeds():  # google-research/rliable#20
    """BEN-04."""
    low, high = estimates.interval(np.array([[0.0], [25], [50], [75], [100]]), estimates.iqm)
    assert low < 30 and high > 70
    assert estimates.interval(np.array([[1.0, 2.0, 3.0]]), estimates.mean) is None
    same = np.array([[0.0, 100.0]] * 5)  # environments differ, seeds do not
    assert estimates.interval(same, estimates.mean).tolist() == [50, 50]
    curves = np.stack([same + i for i in range(3)])
    assert estimates.interval(curves, estimates.mean).tolist() == [[50, 51, 52]] * 2


def test_t_intervals_of_means_and_differences_agree_with_scipy():
    rng = np.random.default_rng(0)
    x, y = rng.normal(0, 1, 6), rng.normal(0, 4, 9)
    ours = stats.t.interval(0.95, 5, x.mean(), stats.sem(x))
    np.testing.assert_allclose(estimates.t_interval(x), ours)
    np.testing.assert_allclose(estimates.t_interval(np.stack([x, x + 1], 1)), np.transpose([ours, np.add(ours, 1)]))
    theirs = stats.ttest_ind(x, y, equal_var=False).confidence_interval(0.95)
    np.testing.assert_allclose(estimates.difference(x, y), [theirs.low, theirs.high])
    assert estimates.t_interval(x[:1]) is None and estimates.difference(x, y[:1]) is None
    assert estimates.difference(np.ones(5), np.zeros(5)).tolist() == [1, 1]


def test_t_intervals_of_few_seeds_hold_what_they_promise():
    draws = np.random.default_rng(0).normal(size=(3, 20_000))
    low, high = estimates.t_interval(draws)
    assert ((low < 0) & (high > 0)).mean() == pytest.approx(0.95, abs=0.01)
    low, high = estimates.interval(draws[:, :500].T[..., None], estimates.mean, 500)  # as the reports had it
    assert ((low < 0) & (high > 0)).mean() < 0.85


def test_no_order_below_five_seeds_nor_where_the_difference_may_be_zero():
    x = {"a": np.array([1.0, 1.1, 0.9, 1.0, 1.05]), "b": np.array([2.0, 2.1, 1.9, 2.0, 2.05]), "c": np.zeros(5)}

    def orders(scores, *more):
        return estimates.orders({name: dict(enumerate(values)) for name, values in scores.items()}, *more)

    assert orders(x) == {"a": ["c"], "b": ["a", "c"]} and estimates.best(orders(x), x) == "b"
    assert estimates.best(orders(x, -1), x) == "c" and estimates.best({}, ["a"]) is None
    assert orders({name: scores[:4] for name, scores in x.items()}) == {}
    assert orders(x | {"a": x["a"][:4]}) == {"b": ["c"]}  # b is above c, but who knows about a
    close = x | {"d": x["b"] - np.linspace(-0.2, 0.25, 5)}  # b and d overlap
    assert orders(close)["b"] == ["a", "c"] and estimates.best(orders(close), close) is None
    assert not estimates.better(x["b"], x["b"] - np.linspace(-0.2, 0.25, 5)) and not estimates.better(x["c"], x["c"])


def test_paired_differences_agree_with_scipy_and_pair_by_seed():
    rng = np.random.default_rng(1)
    level = rng.normal(0, 5, 8)  # the seeds differ much more than the two within a seed
    x, y = level + rng.normal(1, 0.3, 8), level + rng.normal(0, 0.3, 8)
    theirs = stats.ttest_rel(x, y).confidence_interval(0.95)
    np.testing.assert_allclose(estimates.difference(x, y, paired=True), [theirs.low, theirs.high])
    of = {"x": dict(enumerate(x)), "y": dict(reversed(list(enumerate(y))))}  # in another order
    assert estimates.orders(of) == {} and estimates.orders(of, 1, True) == {"x": ["y"]}
    np.testing.assert_array_equal(estimates.shared(of["x"], of["y"]), [x, y])
    few = {"x": of["x"], "y": {seed: y[seed] for seed in (0, 1, 2, 3)} | {8: 0.0}}  # five seeds, four of them shared
    assert estimates.orders(few, 1, True) == {}


# ---- Collect ---------------------------------------------------------------------------------------------------------


def test_tables_in_long_form(tmp_path):
    suite = make_suite(seeds=(1, 2))
    folder = write_run(tmp_path, suite.runs[0], [1.0, 2.0], loss=None)
    episode = {"global_step": 500, "split": "eval", "level": 7, "return": 3.0, "length": 9, "solved": True, "task": "t"}
    (folder / "eval.jsonl").write_text(json.dumps(episode) + "\n")
    assert collect(suite, tmp_path) == []
    row, pending = read_runs(tmp_path / "s")
    assert (row["algorithm"], row["env_id"], row["seed"], row["state"]) == ("a", "E1", 1, "done")
    assert (row["host"], row["git_commit"], row["final_step"], row["sps_median"]) == ("h", "c0ffee" * 6, 1000, 10.0)
    assert json.loads(row["args_json"]) == {"batch_size": 100} and json.loads(row["versions_json"]) == {"torch": "2.0"}
    assert pending["state"] == "pending" and pending["final_step"] is None
    table = pq.read_table(tmp_path / "s" / "metrics.parquet").to_pylist()
    assert {r["key"] for r in table} == {METRIC, "charts/SPS", "loss"}
    found = [(r["run_id"], r["global_step"], r["wall_s"], r["value"]) for r in table if r["key"] == METRIC]
    assert found == [(suite.runs[0].id, 500, 50.0, 1.0), (suite.runs[0].id, 1000, 100.0, 2.0)]
    assert all(math.isnan(r["value"]) for r in table if r["key"] == "loss")  # null in the file: not finite
    (found,) = pq.read_table(tmp_path / "s" / "evals.parquet").to_pylist()
    assert (found["level"], found["return"], found["solved"], found["algorithm"]) == ("7", 3.0, True, "a")
    assert json.loads(found["other_json"]) == {"task": "t"}


def test_damaged_lines_are_counted_and_the_rest_is_read(tmp_path):
    suite = make_suite(seeds=(1,))
    folder = write_run(tmp_path, suite.runs[0], [1.0, 2.0, 3.0])
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'\x00\x00\n[1]\n{"global_step": NaN}\n{"global_step": 1000, "eval/retu')
    (note,) = collect(suite, tmp_path)
    assert note == "a/E1/seed1: 4 damaged lines left out"
    assert report(suite, tmp_path)["environments"]["E1"]["a"]["scores"] == {1: 2.0}


def test_one_damaged_run_costs_no_other(tmp_path):
    suite = make_suite(envs=("ALE/Pong-v5",), seeds=range(6))
    folders = [write_run(tmp_path, run, [1.0] * 10) for run in suite.runs]
    (folders[1] / "metrics.jsonl").write_text('{"global_step": 1, "wall_s": {"x": 1}, "eval/return_mean": 2}\n')
    (folders[2] / "config.json").write_text("[]")
    (folders[3] / "config.json").write_text('{"args": null, "host": 3, "git_commit": [1], "git_dirty": "x"}')
    (folders[4] / "result.json").write_text('{"global_step": 1e30, "wall_s": "x"}')
    with open(folders[5] / "metrics.jsonl", "a") as file:
        file.write(f'{{"global_step": {2**70}, "eval/return_mean": 9}}\n')
    odd, lines = collect(suite, tmp_path)
    assert odd == f"a/ALE/Pong-v5/seed2: {folders[2] / 'config.json'} is left out: it holds no table"
    assert lines == "a/ALE/Pong-v5/seed5: 1 damaged lines left out"
    summary = report(suite, tmp_path, reps=10)
    assert list(summary["environments"]["ALE/Pong-v5"]["a"]["scores"]) == [0, 2, 3, 4, 5], summary["missing"]
    assert "its metrics cannot be read" in summary["missing"][0]["why"]


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "text", ["[]", "3", '"x"', "{}", '{"state": "running"}', '{"state": "failed", "reason": 3}', DEEP]
)
def test_a_ledger_entry_of_another_shape_is_that_of_a_run_whose_runner_died(tmp_path, text, capsys):
    suite = make_suite(seeds=(1, 2))
    write_run(tmp_path, suite.runs[0], [1.0] * 10)
    write_ledger(tmp_path, suite.runs[1])
    (tmp_path / "s" / "ledger" / f"{suite.runs[1].id}.json").write_text(text)
    (missing,) = made(tmp_path, suite)[0]["missing"]
    assert missing["name"] == "a/E1/seed2" and missing["why"] == "interrupted: its entry was damaged"
    records = ledger.Ledger(tmp_path / "s")
    assert board.Board(suite, tmp_path / "s", suite.runs).summary(records) == 1
    assert "1 interrupted" in capsys.readouterr().out
    assert ledger.outlook(records.records()[suite.runs[1].id]) == "open"


@pytest.mark.parametrize("name", ["config.json", "result.json", "metrics.jsonl", "eval.jsonl"])
@pytest.mark.parametrize("text", [None, DEEP, '{"global_step": 1000, "host": "\\ud800", "\\udfff": 1}'])
def test_odd_files_of_a_run_cost_no_other(tmp_path, name, text):
    """None: a folder of that name; half characters, which UTF-8 cannot hold."""
    suite = make_suite(seeds=(1, 2))
    folder = [write_run(tmp_path, run, [1.0] * 10) for run in suite.runs][0]
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir() if text is None else (folder / name).write_text(text)
    notes = collect(suite, tmp_path)
    summary = report(suite, tmp_path, reps=10)
    assert 2 in summary["environments"]["E1"]["a"]["scores"]
    told = notes + [missing["why"] for missing in summary["missing"]]
    assert text not in (None, DEEP) or any(name in line or "damaged line" in line for line in told), told


@pytest.mark.parametrize("table", ["metrics.parquet", "evals.parquet"])
def test_a_part_that_is_damaged_inside_is_made_anew(tmp_path, table):
    suite = make_suite(seeds=(1, 2))
    write_all(tmp_path, suite, lambda *who: 1.0)
    for path in (tmp_path / "s" / "runs").glob("*/*/*/*"):
        (path / "eval.jsonl").write_text('{"global_step": 1000, "return": 2.0, "split": "eval"}\n' * 50)
    before, _ = made(tmp_path, suite)
    path = next((tmp_path / "s" / table).glob("part-*"))
    number = pq.read_schema(path).names.index("global_step")
    column, data = pq.read_metadata(path).row_group(0).column(number), bytearray(path.read_bytes())
    data[column.dictionary_page_offset + column.total_compressed_size - 1] ^= 1  # one bit of a value
    path.write_bytes(data)
    assert collect(suite, tmp_path) == []  # reads no old part
    summary, text = made(tmp_path, suite)
    (note,) = summary["notes"]
    assert str(path) in note and "is damaged" in note and "it is made anew" in note and path.name in text
    assert summary | {"notes": []} == before and made(tmp_path, suite)[0] == before


def test_runs_parquet_that_is_damaged_inside_is_made_anew(tmp_path):
    suite = make_suite(seeds=(1, 2))
    write_all(tmp_path, suite, lambda *who: 1.0)
    before, _ = made(tmp_path, suite)
    path = tmp_path / "s" / "runs.parquet"
    data = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(0).column(0).data_page_offset
    data[start : start + 60] = b"\x5a" * 60
    path.write_bytes(data)
    (note,) = collect(suite, tmp_path)
    assert "runs.parquet was damaged" in note and "has to be imported again" in note
    assert report(suite, tmp_path, reps=200) == before


ODD = "$\\frac$ <img src=x onerror=alert(1)>|&"


@pytest.mark.parametrize("names, env", [((ODD, "b"), "E$1_$"), (("_a", "__"), "_E")])
def test_odd_names_are_shown_as_they_are(tmp_path, names, env):
    """CLI-02."""
    suite = make_suite(names, (env,), (1, 2), normalization={env: [0, 10]})
    write_all(tmp_path, suite, lambda *who: 1.0)
    summary, text = made(tmp_path, suite)
    assert list(summary["environments"][env]) == list(names) and "<img" not in text
    svg = (tmp_path / "s" / "figures" / "curves.svg").read_text()
    shown = {re.sub(r"&(\w+);", lambda m: {"lt": "<", "gt": ">", "amp": "&"}[m[1]], t.strip()) for t in re.findall(
        r"<!-- (.*?) -->", svg)}  # fmt: skip
    assert {*names, env} <= shown


def test_collect_reads_only_what_is_new(tmp_path):
    suite = make_suite(seeds=(1, 2, 3, 4))
    folder = write_run(tmp_path, suite.runs[0], [1.0])
    write_run(tmp_path, suite.runs[1], [2.0], result=False)
    write_run(tmp_path, suite.runs[3], [4.0])
    parts = lambda: {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s" / "metrics.parquet").glob("part-*")}  # noqa: E731
    values = lambda: sorted(v for _, _, _, _, of in points(tmp_path / "s", METRIC) for v in of)  # noqa: E731
    collect(suite, tmp_path)
    first = parts()
    assert len(first) == 2 and "part-open.parquet" in first
    write_run(tmp_path, suite.runs[2], [3.0])
    collect(suite, tmp_path)
    second = parts()
    assert len(second) == 3 and values() == [1, 2, 3, 4]
    kept = first.keys() & second.keys() - {"part-open.parquet"}
    assert len(kept) == 1 and all(first[name] == second[name] for name in kept)
    (folder / "metrics.jsonl").write_text(json.dumps({"global_step": 1000, METRIC: 7.0}) + "\n")  # run again
    collect(suite, tmp_path)
    assert values() == [2, 3, 4, 7]
    shutil.rmtree(tmp_path / "s" / "runs" / suite.runs[2].id)
    collect(suite, tmp_path)
    assert values() == [2, 4, 7]


@pytest.mark.parametrize("lost", ["runs.parquet", "metrics.parquet", "evals.parquet"])
@pytest.mark.parametrize("left", [None, 0, 100])
def test_collect_killed_half_way_ends_with_the_same_tables(tmp_path, lost, left):
    """`left`: bytes of a file, for want of power; None: nothing at all."""
    suite = make_suite(seeds=(1, 2))
    write_all(tmp_path, suite, lambda *who: 5.0)
    for path in (tmp_path / "s" / "runs").glob("*/*/*/*"):
        (path / "eval.jsonl").write_text('{"global_step": 1, "return": 2.0}\n')
    collect(suite, tmp_path)
    names = "runs.parquet", "metrics.parquet", "evals.parquet"
    before = [pq.read_table(tmp_path / "s" / name).to_pylist() for name in names]
    path = tmp_path / "s" / lost
    if left is None:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    else:
        os.truncate(path if path.is_file() else next(path.glob("part-*")), left)
    notes = collect(suite, tmp_path)
    assert (left is not None and lost == "runs.parquet") == any("damaged and is made anew" in note for note in notes)
    assert [pq.read_table(tmp_path / "s" / name).to_pylist() for name in names] == before


def test_two_collects_at_once_and_two_folders_of_one_run(tmp_path):
    suite = make_suite(seeds=(1,))
    folder = write_run(tmp_path, suite.runs[0], [1.0] * 3)
    collect(suite, tmp_path)
    with (
        open(tmp_path / "s" / "metrics.parquet" / ".lock") as lock,
        pytest.raises(SystemExit, match="error: another process collects"),
    ):
        fcntl.flock(lock, fcntl.LOCK_SH)
        collect(suite, tmp_path)
    newer = shutil.copytree(folder, folder.with_name("seed1-def"))
    (newer / "metrics.jsonl").write_text(json.dumps({"global_step": 1000, METRIC: 9.0}) + "\n")
    os.utime(newer / "config.json")
    assert collect(suite, tmp_path) == [f"a/E1/seed1: 2 run folders, the newest counts: {newer}"]
    assert report(suite, tmp_path, reps=10)["environments"]["E1"]["a"]["value"] == 9


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    suite = make_suite(seeds=(1,))
    write_all(tmp_path, suite, lambda *who: 5.0)
    limited = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import resource, test_benchmark_report as t
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
vars(t)[sys.argv[2]](t.make_suite(seeds=(1,)), {str(tmp_path)!r})
"""

    def fails(size, what):
        command = [sys.executable, "-c", limited, str(size), what]
        out = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert out.returncode == 1 and re.fullmatch(r"error: .* cannot be written: .*File too large.*\n", out.stderr), (
            out
        )

    fails(1000, "collect")
    assert not list((tmp_path / "s").rglob("*.tmp"))
    assert made(tmp_path, suite)[0]["environments"]["E1"]["a"]["value"] == 5
    files = [
        *(tmp_path / "s" / "figures").iterdir(),
        *(tmp_path / "s").glob("report.*"),
        tmp_path / "s" / "summary.json",
    ]
    before = {path: path.read_bytes() for path in files}
    shutil.rmtree(tmp_path / "s" / "runs")
    write_all(tmp_path, suite, lambda *who: 7.0)
    collect(suite, tmp_path)
    fails(30_000, "report")
    assert {path: path.read_bytes() for path in before} == before and len(before) == 3 + 8
    assert not list((tmp_path / "s").glob(".report*"))
    with pytest.raises(SystemExit, match="error: .*report.md/s/metrics.parquet cannot be written: .* untouched"):
        collect(suite, tmp_path / "s" / "report.md")


def test_a_step_logged_twice_by_a_resumed_run_counts_once(tmp_path):  # DLR-RM/rl-baselines3-zoo#364
    """BEN-09."""
    suite = make_suite(seeds=(1,))
    write_run(tmp_path, suite.runs[0], [1, 2, 9, 2, 3], steps=[400, 700, 1000, 700, 1000])
    assert made(tmp_path, suite)[0]["environments"]["E1"]["a"]["scores"] == {1: 2.0}  # of 1, 2 and 3


# ---- Other programs' runs --------------------------------------------------------------------------------------------


def write_tensorboard(folder, rows, args=None, **options):
    """As CleanRL does: rows of (tag, value, step)."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), **options)
    if args:
        lines = "\n".join(f"|{key}|{value}|" for key, value in args.items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{lines}")
    for tag, value, step in rows:
        writer.add_scalar(tag, value, step)
    writer.close()


RETURN = "charts/episodic_return"


def test_cleanrl_runs_are_imported_and_compared(tmp_path):  # entity-neural-network/incubator PR 93
    suite = make_suite(seeds=(1, 2), metric=RETURN)
    for run in suite.runs:
        write_run(tmp_path, run, [3.0] * 10, key=RETURN)
    args = {"exp_name": "ppo", "env_id": "E1", "seed": 1, "batch_size": 128, "gamma": 0.99}
    eight = [(RETURN, i, step) for step in range(100, 1000, 100) for i in range(8)]  # environments that end together
    write_tensorboard(tmp_path / "tb" / "E1__ppo__1__17", [*eight, ("charts/SPS", 50, 950)], args)
    write_tensorboard(tmp_path / "tb" / "E1__ppo__2__18", [(RETURN, 4.0, step) for step in range(100, 1001, 100)])
    write_tensorboard(
        tmp_path / "tb" / "ALE" / "X__ppo__3__19", [(RETURN, 4.0, 1000)], args | {"env_id": "E1", "seed": 3}
    )
    write_tensorboard(tmp_path / "tb" / "unknown", [(RETURN, 1.0, 1)])
    write_tensorboard(tmp_path / "tb" / "E1__short__1__17", [(RETURN, 1.0, step) for step in range(50, 951, 50)])
    write_tensorboard(tmp_path / "tb" / "E9__ppo__1__19", [(RETURN, 1.0, 1000)])
    (note,) = collect(suite, tmp_path, tensorboard=tmp_path / "tb")
    assert "unknown is left out: it has no hyperparameters or a name such as" in note
    summary, text = made(tmp_path, suite)  # a collect without the folder keeps what was imported
    assert summary["environments"]["E1"]["ppo (imported)"]["scores"] == {1: 3.5, 2: 4.0, 3: 4.0}
    assert summary["algorithms"] == ["a", "ppo (imported)", "short (imported)"] and summary["counted"] == 5
    assert [m["why"] for m in summary["missing"]] == ["short: 950 of 1,000 steps"]  # not within an update of the budget
    assert "E9" in summary["notes"][0] and "ppo (imported)/E9/seed1 is left out" in text
    row = next(r for r in read_runs(tmp_path / "s") if r["batch_size"] == 128 and r["seed"] == 1)
    assert json.loads(row["args_json"])["gamma"] == "0.99" and row["final_step"] == 950 and row["sps_median"] == 50
    assert len(read_runs(tmp_path / "s")) == 2 + 5


def odd_text(folder):
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    tensor = tensor_pb2.TensorProto(dtype=7, string_val=[b"\xff\xfe"])
    value = summary_pb2.Summary.Value(tag="hyperparameters/text_summary", tensor=tensor)
    writer = EventFileWriter(str(folder))
    writer.add_event(event_pb2.Event(step=1, wall_time=1.0, summary=summary_pb2.Summary(value=[value])))
    writer.close()


WHO = {"exp_name": "ppo", "env_id": "E1", "seed": 1}
FOLDERS = {  # None: nothing is wrong
    "a folder of that name": (lambda at: (at / "events.out.tfevents.1.h").mkdir(), "Is a directory"),
    "a dangling link": (lambda at: (at / "events.out.tfevents.1.h").symlink_to("/nowhere"), "does not point to"),
    "noise": (lambda at: (at / "events.out.tfevents.1.h").write_bytes(bytes(range(256)) * 4), "it has no scalars"),
    "empty": (lambda at: (at / "events.out.tfevents.1.h").write_bytes(b""), "it has no scalars"),
    "text that is none": (odd_text, "can't decode"),
    "a scalar named hyperparameters": (lambda at: write_tensorboard(at, [("hyperparameters", 1.0, 1)]), None),
    "seed of 2^63": (lambda at: write_tensorboard(at, [(RETURN, 1.0, 1)], WHO | {"seed": 2**63}), "hyperparameters or"),
    "seed in other digits": (lambda at: write_tensorboard(at, [(RETURN, 1.0, 1)], WHO | {"seed": "²"}), "hyperparam"),
    "unprintable name": (lambda at: write_tensorboard(at, [(RETURN, 1.0, 1)], WHO | {"exp_name": "a\x07"}), "hyperpar"),
    "batch of 2^70": (lambda at: write_tensorboard(at, [(RETURN, 1.0, 1)], WHO | {"batch_size": 2**70}), None),
    "batch in other digits": (lambda at: write_tensorboard(at, [(RETURN, 1.0, 1)], WHO | {"batch_size": "²"}), None),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLDERS)
def test_an_odd_tensorboard_folder_costs_no_other(tmp_path, case):
    suite = make_suite(seeds=(1,), metric=RETURN)
    good, odd = tmp_path / "tb" / "E1__good__1__17", tmp_path / "tb" / "E1__odd__1__17"
    write_tensorboard(good, [(RETURN, 4.0, step) for step in range(100, 1001, 100)])
    odd.mkdir()
    write, says = FOLDERS[case]
    write(odd)
    notes = collect(suite, tmp_path, tensorboard=tmp_path / "tb")
    assert [f"{odd} is left out: " in note and says in note for note in notes] == ([True] if says else [])
    assert report(suite, tmp_path, reps=10)["environments"]["E1"]["good (imported)"]["scores"] == {1: 4.0}


def test_event_files_of_a_resumed_run_are_one_run(tmp_path):
    """BEN-09."""
    suite, folder = make_suite(seeds=(1,), metric=RETURN), tmp_path / "tb" / "E1__ppo__1__17"
    write_tensorboard(folder, [(RETURN, 1.0, step) for step in range(100, 801, 100)], filename_suffix=".1")
    path = next(folder.iterdir())
    path.rename(folder / "events.out.tfevents.1000000000.h")
    write_tensorboard(folder, [(RETURN, 5.0, step) for step in range(600, 1001, 100)])
    collect(suite, tmp_path, tensorboard=tmp_path / "tb")
    ((_, _, steps, walls, values),) = points(tmp_path / "s", RETURN)
    assert steps.tolist() == list(range(100, 1001, 100)) and values.tolist() == [1] * 5 + [5] * 5
    assert (np.diff(walls) >= 0).all()


def wandb_records(path):
    """Records of an offline log: after 7 bytes, pieces of records in blocks of 32 KiB, as LevelDB keeps its log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) < 7 and left:
            at += left  # no room for a head: padding
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # all of a record, or its end
            yield Record.FromString(record)
            record = b""


def test_wandb_export_holds_every_key(tmp_path, monkeypatch):  # vwxyzjn/cleanrl#489
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    suite = make_suite(seeds=(1,))
    write_run(tmp_path, suite.runs[0], [1.0, 2.0], **{"losses/policy_loss": 0.5, "gone": None})
    collect(suite, tmp_path)
    assert export_wandb(suite, tmp_path) == 1
    (path,) = (tmp_path / "s" / "wandb").glob(f"offline-run-*/run-{suite.runs[0].id}.wandb")
    records = list(wandb_records(path))
    run = next(record.run for record in records if record.HasField("run"))
    assert run.run_id == suite.runs[0].id and run.run_group == "a" and run.display_name == "a/E1/seed1"
    rows = [record.history.item for record in records if record.HasField("history")]
    rows = [{item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
    found = [(row["global_step"], row[METRIC], row["losses/policy_loss"]) for row in rows]
    assert found == [(500, 1, 0.5), (1000, 2, 0.5)]
    assert "gone" not in rows[0]


# ---- Report ----------------------------------------------------------------------------------------------------------


def test_scores_and_intervals_of_known_runs(tmp_path):
    suite = make_suite(("a", "b"), ("E1", "E2"), (1, 2, 3, 4, 5), normalization={"E1": [0, 10], "E2": [-1, 1]})
    write_all(tmp_path, suite, lambda name, env, seed: {"E1": 2.0 * seed, "E2": 0.5}[env] - (name == "b"))
    summary, text = made(tmp_path, suite)
    x = np.array([[0.2, 0.75], [0.4, 0.75], [0.6, 0.75], [0.8, 0.75], [1.0, 0.75]])
    for kind, of in summary["aggregate"]["a"].items():
        assert of["value"] == pytest.approx(float(estimates.ESTIMATES[kind](x))) and of["n"] == 5
        assert of["interval"][0] <= of["value"] <= of["interval"][1]
    mean = summary["environments"]["E1"]["a"]
    assert mean["value"] == 6 and mean["scores"] == {1: 2, 2: 4, 3: 6, 4: 8, 5: 10}
    assert mean["interval"] == pytest.approx(stats.t.interval(0.95, 4, 6, np.sqrt(10 / 5)))
    assert summary["best"] == {"E1": None, "E2": "a"} and summary["missing"] == []
    assert summary["orders"] == {"E1": {}, "E2": {"a": ["b"]}} and "| E2 | a | b |" in text
    (pair,) = summary["improvement"]
    assert (pair["x"], pair["y"], pair["value"]) == ("b", "a", pytest.approx((0 + 10 / 25) / 2))  # 1 3 5 7 9, 2 4 ...
    assert "**Complete**: all 6" not in text and "**Complete**: all 20 runs" in text
    assert "| E2 | **0.50 (0.50 to 0.50)** | -0.50 (-0.50 to -0.50) |" in text  # bold: it is better
    assert "| E1 | 6.00 (" in text and f"git checkout {'c0ffee' * 6}" in text
    assert "scripts/run algos/ppo.py --env-id E1 --seed 1 --total-timesteps 1000" in text
    for name in ("aggregate", "improvement", "profile", "efficiency", "curves"):
        assert (tmp_path / "s" / "figures" / f"{name}.png").stat().st_size > 5000
        assert f"(figures/{name}.png)" in text
    assert json.loads((tmp_path / "s" / "summary.json").read_text())["aggregate"] == summary["aggregate"]


@pytest.mark.parametrize("metric, score", [(METRIC, 4.7), ("eval_train/return_mean", 3.0), ("charts/x", 3.0)])
def test_a_large_last_evaluation_counts_as_what_it_is(tmp_path, metric, score):
    suite = make_suite(seeds=(1,), metric=metric)
    folder = write_run(tmp_path, suite.runs[0], [9.0, 1.0, 3.0, 5.0], key=metric)
    sizes = {250: 5, 500: 1, 750: 1, 1000: 18}  # (1 + 3 + 18 * 5) / 20; none of another split counts
    rows = [{"global_step": step, "split": "eval", "return": 1.0} for step, size in sizes.items() for _ in range(size)]
    rows += [{"global_step": 500, "split": "eval_train", "return": 1.0}]
    (folder / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary, text = made(tmp_path, suite)
    assert summary["environments"]["E1"]["a"]["scores"] == {1: pytest.approx(score)}
    assert "over the last 3 of 100 parts of its budget" in text and "weighted by evaluation episodes" in text


def test_the_score_of_many_games_is_the_mean_of_theirs(tmp_path):
    """As in impala_mixed: raw means put first whoever is best in the loudest game."""
    suite = make_suite(["loud", "even"], envs=["mixed"], seeds=range(5), metric="eval/*/return_mean",
                       games={"A": [0, 1000], "B": [-10, -5]})  # fmt: skip
    for run in suite.runs:
        a, b = {"loud": (500, -10), "even": (400, -6)}[run.algorithm]
        b = [None] * 5 + [b - run.seed / 100] * 5  # not measured in the first half: no score there
        folder = write_run(tmp_path, run, [a] * 10, key="eval/A/return_mean")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        rows = [row | {"eval/B/return_mean": value} for row, value in zip(rows, b)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary, text = made(tmp_path, suite)
    found = summary["environments"]["mixed"]
    assert found["even"]["scores"][0] == pytest.approx((0.4 + 0.8) / 2)
    assert found["loud"]["scores"][2] == pytest.approx((0.5 - 0.004) / 2)
    assert found["even"]["value"] == pytest.approx(0.5 * 0.4 + 0.5 * (0.8 - 0.02 / 5))
    assert summary["orders"] == {"mixed": {"even": ["loud"]}}
    assert summary["aggregate"]["even"]["optimality gap"]["value"] == pytest.approx(1 - found["even"]["value"])
    assert "between constants over the games A (0 is 0, 1000 is 1), B (-10 is 0, -5 is 1), of which more" in text
    assert "Scores lie between the suite's constants" in text
    (line,) = environment_curves(json.loads((tmp_path / "s" / "curves.json").read_text()))["mixed"]["loud"][1][:1]
    assert np.isnan(line[:59]).all() and line[59] == pytest.approx(0.25)
    with pytest.raises(SystemExit, match=r"--metric eval/\*/x: \* stands for one of the suite's \[games\], and it has"):
        report(make_suite(envs=["mixed"]), tmp_path, metric="eval/*/x")


@pytest.mark.parametrize("wrong, said", [
    ({"games": {"A": [0, 1]}}, "is needed where there are some"), ({"metric": "eval/*/x"}, "is needed where there are"),
    ({"games": {"A": [1, 0]}, "metric": "eval/*/x"}, r"\[games\] A = \[1, 0\]: \[minimum, maximum\] is needed"),
    ({"games": {"A": [0, 1]}, "metric": "*", "normalization": {"E1": [0, 1]}}, "constants of their own"),
])  # fmt: skip
def test_games_and_metric_go_together(wrong, said):
    with pytest.raises(ValueError, match=said):
        make_suite(**wrong)


def test_paired_seeds_are_compared_in_pairs(tmp_path):
    scores = {"a": [0, 5, 2, 9, 4, 7], "b": [1, 6.1, 3, 9.9, 5, 8]}
    for paired, word in (False, "Welch's t interval"), (True, "the t interval of the difference of runs of one seed"):
        suite = make_suite(["a", "b"], seeds=range(6), paired=paired)
        write_all(tmp_path / str(paired), suite, lambda name, env, seed: float(scores[name][seed]))
        summary, text = made(tmp_path / str(paired), suite)
        assert summary["paired"] == paired and word in text
        assert summary["orders"] == {"E1": {"b": ["a"]} if paired else {}}


def test_further_metrics_stand_in_the_report(tmp_path):
    suite = make_suite(("a", "b"), ("E1", "E2"), (1, 2), also=["eval/*/success", "gone"])
    for run in suite.runs:
        more = {"eval/key/success": run.seed / 4} | ({"eval/door/success": 1.0} if run.algorithm == "b" else {})
        write_run(tmp_path, run, [1.0] * 10, **more)
    summary, text = made(tmp_path, suite)
    assert list(summary["also"]) == ["eval/door/success", "eval/key/success"]
    assert summary["also"]["eval/key/success"]["E2"]["a"]["scores"] == {1: 0.25, 2: 0.5}
    assert list(summary["also"]["eval/door/success"]["E1"]) == ["b"]
    assert "| E1 | eval/door/success |  | 1.00 (1.00 to 1.00) |\n| E1 | eval/key/success | 0.38 (" in text
    assert "Further metrics" not in made(tmp_path, make_suite(("a", "b"), ("E1", "E2"), (1, 2)))[1]


def test_the_same_runs_give_the_same_files(tmp_path):
    suite = make_suite(seeds=(1, 2), normalization={"E1": [0, 10]})
    write_all(tmp_path, suite, lambda name, env, seed: float(seed))
    files = []
    for _ in range(2):
        made(tmp_path, suite)
        outputs = [tmp_path / "s" / name for name in ("report.md", "report.html", "summary.json")]
        files.append({p.name: p.read_bytes() for p in [*outputs, *(tmp_path / "s" / "figures").iterdir()]})
    assert files[0] == files[1] and len(files[0]) == 3 + 8  # no pair to compare: four figures


def test_curves_stand_on_the_grid_and_are_neither_stretched_nor_carried_back(tmp_path):
    suite = make_suite(seeds=(1, 2), normalization={"E1": [0, 10]})
    uneven = {1: ([91, 100, 105, 555, 990], [4, 6, 2, 8, 3]), 2: (list(range(25, 1001, 25)), list(range(40)))}
    for run in suite.runs:
        steps, values = uneven[run.seed]
        folder = write_run(tmp_path, run, [float(v) for v in values], steps=steps)
        (folder / "result.json").write_text('{"global_step": 1000, "wall_s": 100}')
    summary, _ = made(tmp_path, suite)

    def oracle(seed, edge):  # mean since the last edge, else the last one
        now = [v for s, v in zip(*uneven[seed]) if edge - 10 < s <= edge]
        return np.mean(now) if now else oracle(seed, edge - 10) if edge > 10 else None

    x, middle, low, high = summary["efficiency"]["a"]["steps"]
    assert x == list(range(10, 1001, 10))
    for edge, value, bottom, top in zip(x, middle, low, high):
        both = [oracle(1, edge), oracle(2, edge)]
        if None in both:
            assert edge < 91 and value is bottom is top is None
        else:
            assert value == pytest.approx(np.mean(both) / 10)
            assert [bottom, top] == pytest.approx(sorted(b / 10 for b in both))
    seconds, middle, *_ = summary["efficiency"]["a"]["seconds"]
    np.testing.assert_allclose(
        seconds, np.linspace(0, 99, 51)[1:]
    )  # the first run ends after 99 s, the other after 100
    ends = {seed: {-(-s // 10) * 10: s / 10 for s in steps} for seed, (steps, _) in uneven.items()}  # of each cell
    for now, value in zip(seconds, middle):
        done = [max((edge for edge, end in of.items() if end <= now + 1e-9), default=0) for of in ends.values()]
        both = [oracle(seed, edge) for seed, edge in zip(ends, done)]
        assert value is None if None in both else value == pytest.approx(np.mean(both) / 10)
    assert value is not None and middle[3] is None
    assert summary["environments"]["E1"]["a"]["scores"] == {1: pytest.approx((2 + 8 + 3) / 3), 2: 38.0}


def test_points_beyond_the_budget_are_the_last_update_s_alone(tmp_path):
    suite = make_suite(seeds=(1,))
    write_run(tmp_path, suite.runs[0], [1.0, 2.0, 3.0, 99.0], steps=[400, 800, 1010, 1300])
    assert made(tmp_path, suite)[0]["environments"]["E1"]["a"]["scores"] == {1: 2.0}


def test_a_killed_seed_is_listed_and_is_no_data(tmp_path):  # microsoft/oac-explore#5
    """BEN-06."""
    suite = make_suite(normalization={"E1": [0, 10]})
    first, second, killed = suite.runs
    write_run(tmp_path, first, [2.0] * 10)
    write_run(tmp_path, second, [4.0] * 10)
    write_run(tmp_path, killed, [100.0], steps=[100], result=False)
    record = {"state": "failed", "reason": "killed by SIGKILL", "last_line": "upd `1` | a", "command": ["python", "x"]}
    write_ledger(tmp_path, killed, attempts=3, **record)
    summary, text = made(tmp_path, suite)
    assert (summary["counted"], summary["planned"]) == (2, 3) and "**Incomplete**: 2 of 3 runs count" in text
    (missing,) = summary["missing"]
    assert missing["name"] == "a/E1/seed3" and missing["why"] == "failed at step 100 of 1,000: killed by SIGKILL"
    assert missing["command"] == "python x" and r"| `upd '1' \| a` | `python x` |" in text
    assert summary["environments"]["E1"]["a"]["value"] == 3 and summary["aggregate"]["a"]["IQM"]["n"] == 2
    assert "as many seeds as each environment has: a: 2" in text
    assert text.index("Completeness") < text.index("All environments")


def test_short_empty_and_early_ending_runs_are_missing(tmp_path):  # hill-a/stable-baselines PR 293
    """BEN-01."""
    suite = make_suite(seeds=range(8))
    runs = suite.runs
    write_run(tmp_path, runs[0], [1.0, 2.0, 3.0])  # as few points as the score needs
    write_run(tmp_path, runs[1], [50.0] * 9, steps=list(range(100, 1000, 100)))
    write_run(tmp_path, runs[2], [50.0], key="charts/episodic_return")
    empty = write_run(tmp_path, runs[3], [50.0])
    (empty / "metrics.jsonl").write_text("")
    early = write_run(tmp_path, runs[4], [50.0] * 20, steps=list(range(10, 201, 10)))
    (early / "result.json").write_text('{"global_step": 1000}')
    write_ledger(tmp_path, runs[5], state="running", place="elsewhere", heartbeat=time.time())
    write_ledger(tmp_path, runs[7], state="running", place="elsewhere", heartbeat=0)
    summary, text = made(tmp_path, suite)
    assert summary["environments"]["E1"]["a"]["scores"] == {0: 2.0}
    why = {m["name"][-1]: m["why"] for m in summary["missing"]}
    assert why == {
        "1": "short: 900 of 1,000 steps",
        "2": "logs no eval/return_mean up to its budget (but charts/episodic_return)",
        "3": "logs no eval/return_mean up to its budget",
        "4": "its last eval/return_mean is at step 200 of 1,000",
        "5": "running",
        "6": "pending",
        "7": "interrupted: its runner ended",
    }
    assert "| a | 8 | 1 | 1 |  | 1 | 1 | 4 |" in text


def test_dead_autoreset_steps_count_as_budget(tmp_path):
    """A script with NEXT_STEP resets spends them of total_timesteps, though they are no steps."""
    suite = make_suite(seeds=(1, 2))
    for run, dead in zip(suite.runs, (150, 0)):
        write_run(tmp_path, run, [5.0] * 17, steps=list(range(50, 851, 50)), **{"perf/dead_steps": dead})
    summary, _ = made(tmp_path, suite)
    assert summary["environments"]["E1"]["a"]["scores"] == {1: 5.0}
    assert [m["why"] for m in summary["missing"]] == ["short: 850 of 1,000 steps"]
    collect(suite, tmp_path)  # reads nothing anew
    assert [row["dead_steps"] for row in read_runs(tmp_path / "s")] == [150, 0]
    table = pq.read_table(tmp_path / "s" / "runs.parquet")
    pq.write_table(table.drop_columns("dead_steps"), tmp_path / "s" / "runs.parquet")  # of an earlier version
    assert made(tmp_path, suite)[0] == summary


def test_one_seed_has_no_interval(tmp_path):  # DLR-RM/stable-baselines3#1137
    """BEN-02."""
    suite = make_suite(("a", "b"), seeds=(1,), normalization={"E1": [0, 10]})
    write_all(tmp_path, suite, lambda name, *_: {"a": 5.0, "b": 1.0}[name])
    summary, text = made(tmp_path, suite)
    assert summary["environments"]["E1"]["a"]["interval"] is None and "| E1 | 5.00 (n=1) | 1.00 (n=1) |" in text
    assert summary["aggregate"]["a"]["IQM"] == {"value": 0.5, "interval": None, "n": 1} and "**5.00" not in text
    assert (tmp_path / "s" / "figures" / "curves.svg").exists() and "None is called better than another." in text


def test_what_is_not_finite_is_never_best(tmp_path):  # ray-project/ray#23812
    """BEN-05."""
    scores = {"nan": math.nan, "one": 1.0, "three": 3.0, "inf": math.inf}
    suite = make_suite(scores, seeds=(1, 2, 3, 4, 5), normalization={"E1": [0, 10]})
    for run in suite.runs:
        write_run(tmp_path, run, [2.0, 2.0, scores[run.algorithm]])
    summary, text = made(tmp_path, suite)
    assert summary["best"] == {"E1": "three"}
    assert {m["name"]: m["why"] for m in summary["missing"]} == {
        f"{name}/E1/seed{seed}": "eval/return_mean is not finite at its end"
        for name in ("nan", "inf")
        for seed in suite.seeds
    }
    row = next(line for line in text.splitlines() if line.startswith("| E1"))
    cells = [cell.strip() for cell in row.split("|")]
    assert cells == ["", "E1", "", "1.67 (1.67 to 1.67)", "**2.33 (2.33 to 2.33)**", "", ""]


def test_no_finished_run_at_all(tmp_path):
    suite = make_suite(("a", "b"))
    with pytest.raises(SystemExit, match=r"error: 6 runs, as a/E1/seed1, are in no table of .*: collect first"):
        report(suite, tmp_path)
    summary, text = made(tmp_path, suite)
    assert summary["counted"] == 0 and "No run is whole yet" in text and "| a | 3 |  |  |  |  | 3 |  |" in text


def test_seeds_of_one_configuration_are_one_curve(tmp_path):  # gxywy/rl-plotter#2, openai/baselines#1020
    """BEN-11, BEN-13."""
    suite = make_suite(seeds=(1, 2, 3))
    write_all(tmp_path, suite, lambda name, env, seed: float(seed))
    summary, _ = made(tmp_path, suite)
    curves = environment_curves(run_curves(Study(suite, tmp_path / "s", METRIC, "max")))
    (axis,) = figures.environments(summary, curves).axes
    (thick,), (thin, _) = axis.lines, axis.collections
    assert len(thin.get_segments()) == 3 and thick.get_ydata()[-1] == 2 and thick.get_xdata()[-1] == BUDGET
    assert axis.get_xlabel() == "steps" and summary["environments"]["E1"]["a"]["n"] == 3


def test_returns_of_several_environments_are_not_mixed_without_constants(tmp_path):
    suite = make_suite(envs=("E1", "E2"), seeds=(1, 2), normalization={"E1": [0, 10]})
    write_all(tmp_path, suite, lambda name, env, seed: float(seed))
    summary, text = made(tmp_path, suite)
    assert summary["aggregate"] == {} and "no estimate over all environments: [normalization] lacks E2" in text
    assert summary["environments"]["E2"]["a"]["value"] == 1.5
    gone = make_suite(envs=("E1",), seeds=(1, 2))  # one environment: its returns as they are
    assert set(made(tmp_path / "one", gone)[0]["aggregate"]) == set()
    write_all(tmp_path / "two", gone, lambda name, env, seed: float(seed))
    assert set(made(tmp_path / "two", gone)[0]["aggregate"]["a"]) == {"IQM", "median", "mean"}


def test_the_figures_of_a_large_sweep_show_the_best(tmp_path):
    names = [f"ppo#{i:02d}:learning-rate=0.00{i}" for i in range(15)]
    suite = make_suite(names, ("E1", "E2"), (1, 2), normalization={"E1": [0, 20], "E2": [0, 20]})
    write_all(tmp_path, suite, lambda name, env, seed: float(name[4:6]) + seed)
    summary, text = made(tmp_path, suite)
    assert (
        f"Figures show the {figures.MOST} algorithms with the best places" in text and len(summary["aggregate"]) == 15
    )
    assert f"| environment | E1 | E2 |\n| --- | --- | --- |\n| {names[0]} | 1.50 (-4.85 to 7.85) | 1.50 (" in text
    summary, curves = figures.leading(
        summary, environment_curves(run_curves(Study(suite, tmp_path / "s", METRIC, "max")))
    )
    kept = names[-figures.MOST :]
    assert summary["algorithms"] == list(summary["aggregate"]) == list(curves["E2"]) == kept
    assert [pair["x"] for pair in summary["improvement"]] == kept and list(summary["profile"]["shares"]) == kept
    with matplotlib.rc_context(figures.SETTINGS):
        figure = figures.environments(summary, curves)
        figure.draw_without_rendering()
    legend, panels = figure.legends[0].get_window_extent(), [axis.get_tightbbox() for axis in figure.axes]
    assert (
        legend.y0 >= max(panel.y1 for panel in panels)
        and min(axis.get_window_extent().height for axis in figure.axes) > 80
    )
    assert legend.x0 >= 0 and legend.x1 <= figure.bbox.width


FAKE = f"""
name = "fake"
seeds = [1, 2]
environments = ["A", "B"]
budget = 12
args = {{ step-s = 0.1 }}
normalization = {{ A = [0, 1_000_003], B = [0, 1_000_003] }}
[[algorithms]]
name = "fake"
script = "{ROOT / "tests" / "fake_script.py"}"
"""


def test_runs_that_were_killed_give_the_report_of_undisturbed_ones(tmp_path):
    reports = []
    for kills in (0, 2):
        folder = tmp_path / str(kills)
        folder.mkdir()
        (folder / "fake.toml").write_text(FAKE)

        def start(verb, *more, folder=folder):
            command = [
                sys.executable,
                ROOT / "benchmark" / "run.py",
                verb,
                folder / "fake.toml",
                "--results",
                folder,
                *more,
            ]
            return subprocess.Popen(command, stdout=subprocess.DEVNULL)

        for kill in range(kills):
            runner, deadline, under_way = start("run", "--workers", "2"), time.monotonic() + 60, []
            while len(under_way) < 6 + 8 * kill and time.monotonic() < deadline:
                time.sleep(0.02)
                logs = folder.glob("fake/runs/*/*/*/*/metrics.jsonl")
                under_way = [log.parent for log in logs for _ in log.read_text().splitlines()]
            runner.kill()
            runner.wait()
            last = [path for path in under_way if not (path / "result.json").exists()][-1]
            with contextlib.suppress(ProcessLookupError):
                os.kill(json.loads((last / "status.json").read_text())["pid"], signal.SIGKILL)
        assert start("run", "--workers", "2").wait(timeout=100) == 0
        assert start("report").wait(timeout=100) == 0
        summary = json.loads((folder / "fake" / "summary.json").read_text())
        text = (folder / "fake" / "report.md").read_text().split("## Speed")[0]
        reports.append((text, {key: value for key, value in summary.items() if key not in ("speed", "origin")}))
    assert reports[0] == reports[1]
    assert summary["counted"] == 4 and len(summary["environments"]["B"]["fake"]["scores"]) == 2


def test_against_the_paper(tmp_path):
    suite = make_suite(reference={"a": {"E1": [2.5, 0.3]}, "other": {"E1": 9}})
    write_all(tmp_path, suite, lambda name, env, seed: float(seed))
    _, text = made(tmp_path, suite)
    assert (
        re.search(r"\| a \| E1 \| 2.50 ± 0.30 \| 2.00 \(.*\) \| yes \|", text) and "| other | E1 | 9.00 |  |  |" in text
    )


def test_against_a_baseline(tmp_path):
    suite = make_suite(("a", "b"), ("E1", "E2"), (1, 2, 3, 4, 5))
    write_all(tmp_path, suite, lambda name, env, seed: 5.0 + seed / 100)
    baseline, text = made(tmp_path, suite)
    assert "baseline" not in text
    old = tmp_path / "old.json"
    old.write_text(json.dumps(baseline))
    assert made(tmp_path, suite, against=old)[0]["regressions"] == []
    environments = baseline["environments"]
    environments["E1"]["a"]["scores"] = {seed: 5.07 + seed / 100 for seed in suite.seeds}  # ours: 5.01 to 5.05
    environments["E1"]["b"]["scores"] = {seed: 5.01 + seed / 100 for seed in suite.seeds}  # could be chance
    baseline["environments"]["E2"]["gone"] = baseline["environments"]["E2"]["a"]
    old.write_text(json.dumps(baseline))
    summary, text = made(tmp_path, suite, against=old)
    found = [(row["algorithm"], row["env_id"], row["what"]) for row in summary["regressions"]]
    assert found == [("a", "E1", "worse"), ("gone", "E2", "missing")]
    assert "| a | E1 | worse | 5.10 | 5.03 |" in text
    old.write_text(json.dumps(baseline | {"metric": "charts/episodic_return"}))
    (tmp_path / "odd.json").write_text(json.dumps(baseline | {"environments": {"E1": {"a": {}}}}))
    for name in "nothing", "odd":
        with pytest.raises(SystemExit, match=f"{name}.json: this is no summary.json of a report"):
            report(suite, tmp_path, against=tmp_path / f"{name}.json")
    with pytest.raises(SystemExit, match="its metric is charts/episodic_return, here it is eval/return_mean"):
        report(suite, tmp_path, against=old)


@pytest.mark.parametrize("seeds, code", [((1, 2, 3), 0), ((1, 2, 3, 4, 5), 1)])
def test_few_seeds_are_no_regression(tmp_path, seeds, code):
    suite = make_suite(seeds=seeds)
    write_all(tmp_path, suite, lambda name, env, seed: 5.0 + seed / 100)
    baseline, _ = made(tmp_path, suite)
    baseline["environments"]["E1"]["a"]["scores"] = {seed: 6.0 + seed / 100 for seed in seeds}
    old, path = tmp_path / "old.json", tmp_path / "s.toml"
    old.write_text(json.dumps(baseline))
    path.write_text(f'name = "s"\nenvironments = ["E1"]\nseeds = {list(seeds)}\nbudget = 1000\n[[algorithms]]\n'
                    'name = "a"\nscript = "algos/ppo.py"\n')  # fmt: skip
    command = [sys.executable, ROOT / "benchmark" / "run.py", "report", path, "--results", tmp_path, "--against", old]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, timeout=100).returncode == code
    (row,) = json.loads((tmp_path / "s" / "summary.json").read_text())["regressions"]
    assert row["what"] == ("worse" if code else "perhaps worse: n=3 is too few to say")


# ---- What is published -----------------------------------------------------------------------------------------------


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def reported(tmp_path):
    """A suite of two algorithms and two seeds with its report, loaded from a file as run.py does."""
    path = tmp_path / "s.toml"
    path.write_text(
        'name = "s"\nenvironments = ["E1"]\nseeds = [1, 2]\nbudget = 1000\nnormalization = { E1 = [0, 10] }\n'
        + "".join(f'[[algorithms]]\nname = "{name}"\nscript = "algos/ppo.py"\n' for name in "ab")
    )
    suite = load(path)
    write_all(tmp_path, suite, lambda name, env, seed: seed / 3 + (name == "b"))
    shutil.copyfile(path, tmp_path / "s" / "suite.toml")
    made(tmp_path, suite)
    return suite


def test_a_published_report_is_made_again_from_its_numbers(reported, tmp_path):
    (tmp_path / "s" / "figures" / "games.png").write_bytes(b"of another script")
    (tmp_path / "published" / "s").mkdir(parents=True)
    (tmp_path / "published" / "s" / "once.json").write_text("{}")  # measured once, of older runs
    assert publish(reported, tmp_path, tmp_path / "published") == []
    before = files(tmp_path / "published" / "s")
    assert {"suite.toml", "summary.json", "curves.json", "report.md", "figures/curves.svg"} < before.keys()
    assert "once.json" not in before
    (tmp_path / "s" / "suite.toml").write_text("as it ran, perhaps with another metric")
    publish(reported, tmp_path, tmp_path / "published")
    assert files(tmp_path / "published" / "s") == before
    for name in ("report.md", "figures/curves.svg", "figures/curves.png", "figures/aggregate.svg"):
        (tmp_path / "published" / "s" / name).write_text("gone")
    remake("s", tmp_path / "published")
    assert files(tmp_path / "published" / "s") == before
    with pytest.raises(SystemExit, match="there is no report of t in .*, only of s"):
        remake("t", tmp_path / "published")


def test_fewer_runs_than_are_published_are_refused(reported, tmp_path):
    publish(reported, tmp_path, tmp_path / "published")
    (tmp_path / "published" / "s" / "figures" / "payoff.png").write_bytes(b"by hand")
    before = files(tmp_path / "published")
    for run in reported.runs[:3]:
        (board.run_directory(tmp_path / "s", run.id) / "result.json").unlink()
    made(tmp_path, reported)
    with pytest.raises(SystemExit, match="a on E1 has 0 runs, in the published report 2, and 1 more such: --fewer"):
        publish(reported, tmp_path, tmp_path / "published")
    assert files(tmp_path / "published") == before
    notes = publish(reported, tmp_path, tmp_path / "published", fewer=True)
    assert notes and "figures/payoff.png is not of this report" in notes[-1]
    assert "**Incomplete**: 1 of 4 runs" in (tmp_path / "published" / "s" / "report.md").read_text()


def test_only_the_suite_s_own_report_is_published(reported, tmp_path):
    report(reported, tmp_path, metric="charts/SPS")
    with pytest.raises(SystemExit, match="is of charts/SPS, the suite's metric is eval/return_mean"):
        publish(reported, tmp_path, tmp_path / "published")
    (tmp_path / "s" / "report.md").unlink()
    with pytest.raises(SystemExit, match="there is no whole report in .*: benchmark/run.py report s makes it"):
        publish(reported, tmp_path, tmp_path / "published")
    assert not (tmp_path / "published").exists()


def test_a_report_of_nothing_leaves_what_is_published(tmp_path):
    """As in a fresh clone, which has no runs."""
    folder = tmp_path / "benchmark" / "results" / "minigrid_plr"
    shutil.copytree(ROOT / "benchmark" / "results" / "minigrid_plr", folder)
    before = files(folder)
    command = [sys.executable, ROOT / "benchmark" / "run.py", "report", "minigrid_plr"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and files(folder) == before, done.stderr
    assert "0 of 18 runs count" in (tmp_path / "runs" / "suites" / "minigrid_plr" / "report.md").read_text()


PUBLISHED = sorted(path.parent.name for path in (ROOT / "benchmark" / "results").glob("*/summary.json"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_report_is_what_its_numbers_say(name, tmp_path):
    folder = ROOT / "benchmark" / "results" / name
    shutil.copytree(folder, tmp_path / name)
    command = [sys.executable, ROOT / "benchmark" / "run.py", "remake", name, "--published", tmp_path]
    subprocess.run(command, check=True, timeout=300)
    before, after = files(folder), files(tmp_path / name)
    assert before.keys() == after.keys()
    assert [path for path in before if path.endswith((".md", ".svg")) and before[path] != after[path]] == []


# ---- Less is better --------------------------------------------------------------------------------------------------

COST, SEEDS = "eval/nash_conv", (1, 2, 3, 4, 5)  # in these tests a is the worst, c the best


def write_costs(results, suite):
    for run in suite.runs:
        write_run(results, run, [{"a": 3.0, "b": 2.0, "c": 1.0}[run.algorithm] + run.seed / 100] * 10, key=COST)


@pytest.mark.parametrize("constants", [{}, {"E1": [0, 4]}], ids=["raw", "constants"])
def test_where_less_is_better_the_least_is_the_best(tmp_path, constants):
    suite = make_suite(("a", "b", "c"), seeds=SEEDS, metric=COST, direction="min", normalization=constants)
    write_costs(tmp_path, suite)
    summary, text = made(tmp_path, suite)
    assert summary["direction"] == "min" and f"`{COST}`, of which less is better" in text
    assert summary["best"] == {"E1": "c"} and re.search(r"\| E1 \| 3.03 .* \| 2.03 .* \| \*\*1.03 ", text)
    pairs = {(pair["x"], pair["y"]): pair["value"] for pair in summary["improvement"]}
    assert pairs == {("b", "a"): 1, ("c", "a"): 1, ("c", "b"): 1}
    kinds = {name: {kind: of["value"] for kind, of in kinds.items()} for name, kinds in summary["aggregate"].items()}
    for name, cost in {"a": 3.03, "b": 2.03, "c": 1.03}.items():
        assert kinds[name]["IQM"] == pytest.approx((4 - cost) / 4 if constants else cost)
        if constants:  # 0 is the upper constant
            assert kinds[name]["optimality gap"] == pytest.approx(cost / 4)
    shares, thresholds = summary["profile"]["shares"], summary["profile"]["thresholds"]
    assert all(np.mean(shares["c"][0]) > np.mean(shares[name][0]) for name in "ab")
    between = np.argmin(np.abs(np.array(thresholds) - (0.4 if constants else 2.5)))  # better: b and c, or c alone
    assert [shares[name][0][between] for name in "abc"] == ([0, 1, 1] if not constants else [0, 1, 1])
    assert "(less is better)" in figures.environments(summary, environment_curves(
        run_curves(Study(suite, tmp_path / "s", COST, "min")))).axes[0].get_ylabel()  # fmt: skip


def test_where_less_is_better_more_than_before_is_a_regression(tmp_path):
    suite = make_suite(("a", "b", "c"), seeds=SEEDS, metric=COST, direction="min")
    write_costs(tmp_path, suite)
    baseline, _ = made(tmp_path, suite)
    for name, old in {"a": 2.9, "b": 2.02, "c": 1.1}.items():  # worse now, the same, better now
        baseline["environments"]["E1"][name]["scores"] = {seed: old + seed / 1000 for seed in SEEDS}
    (tmp_path / "old.json").write_text(json.dumps(baseline))
    summary, _ = made(tmp_path, suite, against=tmp_path / "old.json")
    assert [(row["algorithm"], row["what"]) for row in summary["regressions"]] == [("a", "worse")]


def test_another_metric_of_the_same_suite_has_a_direction_of_its_own(tmp_path):
    suite = make_suite(("a", "b", "c"), seeds=SEEDS)
    write_costs(tmp_path, suite)
    collect(suite, tmp_path)
    with pytest.raises(SystemExit, match="eval/nash_conv has nash in its name: say whether more or less"):
        report(suite, tmp_path, metric=COST)
    assert report(suite, tmp_path, metric=COST, direction="min", reps=200)["best"] == {"E1": "c"}
    assert report(suite, tmp_path, metric=COST, direction="max", reps=200)["best"] == {"E1": "a"}


def test_figures_of_a_large_sweep_show_the_least_where_that_is_better(tmp_path):
    names = [f"ppo{i:02d}" for i in range(15)]
    suite = make_suite(names, seeds=(1, 2), direction="min")
    write_all(tmp_path, suite, lambda name, env, seed: float(name[3:]) + seed)
    summary, _ = made(tmp_path, suite)
    assert figures.leading(summary, {})[0]["algorithms"] == names[: figures.MOST]


# ---- The page --------------------------------------------------------------------------------------------------------


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.ids, self.pictures, self.open, self.text = [], set(), [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [attributes["href"]] if "href" in attributes else []
        self.ids |= {attributes.get("id")}
        self.pictures += [attributes["src"]] if "src" in attributes else []
        self.open += [tag] if tag not in ("meta", "img") else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    suite = make_suite(("a", "b"), ("E1", "E2"), normalization={"E1": [0, 10], "E2": [0, 10]}, description="x < y & z")
    for run in suite.runs[:-1]:
        write_run(folder, run, [run.seed + (run.algorithm == "a")] * 10)
    record = {"state": "failed", "reason": "exit 1", "last_line": "<b>no tag</b> **", "command": "c" * 300}
    write_ledger(folder, suite.runs[-1], **record)
    made(folder, suite)
    return folder / "s" / "report.html"


def test_the_page_needs_no_other_file(page):
    found = Page(page.read_text())
    assert found.open == [] and {link[1:] for link in found.links} <= found.ids and len(found.links) >= 5
    assert "x < y & z" in found.text and "<b>no tag</b> **" in found.text
    assert len(found.pictures) == 5
    for picture in found.pictures:
        kind, data = picture.split(",")
        assert kind == "data:image/svg+xml;base64"
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")


@pytest.mark.skipif(not BROWSER, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1280, 800, 500])
def test_the_page_in_a_browser(page, tmp_path, width):
    """A script in a copy measures: nothing sticks out, pictures are there, contents stay in view, lines are short."""
    script = """<script>onload = () => {
      scrollTo(0, 1e6);
      const box = (e) => document.querySelector(e).getBoundingClientRect();
      document.title = JSON.stringify({
        out: document.documentElement.scrollWidth - innerWidth, top: box("nav").top, text: box("p").width,
        pictures: [...document.images].filter((i) => i.naturalWidth > 100 && i.width > 100).length,
        overlap: box("nav").right > box("main").left + 1, height: document.body.scrollHeight,
      });
    }</script>"""
    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text().replace("</body>", script + "</body>"))
    flags = f"--headless --no-sandbox --disable-gpu --user-data-dir={tmp_path}/p --window-size={width},900".split()
    out = subprocess.run([BROWSER, *flags, "--dump-dom", copy.as_uri()], capture_output=True, text=True, timeout=60)
    found = json.loads(re.search(r"<title>({.*?})</title>", out.stdout)[1])
    assert found["out"] <= 0 and found["pictures"] == 5 and found["height"] > 2000
    if width == 1280:
        assert 0 <= found["top"] < 50 and not found["overlap"] and 500 < found["text"] < 800
