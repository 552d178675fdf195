"""The study of choices (choices.py), its claims (claims.py), and stacks of runs (stacks.py)."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from pathlib import Path

import numpy as np
import pytest

from benchmark.runner import board, choices, claims, execute, ledger, stacks, suite

ROOT = Path(__file__).resolve().parents[1]
CASES = json.loads((ROOT / "tests" / "data" / "study_stats.json").read_text())

# ---- Statistics ------------------------------------------------------------------------------------------------------

ADAPTER = {
    "score": lambda evals_per_seed: {"out": choices.score(evals_per_seed)},
    "percentile_ci": choices.percentile_ci,
    "top_frequency": lambda scores, choices_: choices.top_frequency(scores, choices_),
    "top_count": lambda n: {"out": choices.top_count(n)},
}


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_vectors(case):
    made = ADAPTER[case["fn"]](*case["args"].values())
    assert made == pytest.approx(case["expect"], abs=case["tol"])
    assert made.get("short") is case["expect"].get("short")


@pytest.mark.parametrize(("p", "n"), [(0.95, 72), (0.9, 36), (0.8, 17)])
def test_from_how_many_configurations_on_a_percentile_has_an_upper_end(p, n):
    assert [choices.percentile_ci(range(k), p)["short"] for k in (n - 1, n)] == [True, False]


def test_the_share_of_the_top_and_its_interval():
    scores, values = np.arange(40.0), ["a", "b"] * 20  # the best 8: four of either
    assert choices.top(scores, values, 0.2) == ["b", "a"] * 4
    assert choices.share_ci(4, 8) == pytest.approx([0.157013, 0.842987], abs=1e-6)
    assert choices.share_ci(0, 8)[0] == 0 and choices.share_ci(8, 8)[1] == 1
    assert choices.top([], []) == [] and choices.ordered([10, None, "x", 2.5, True]) == [True, 2.5, 10, "x"]


# ---- Groups of choices -----------------------------------------------------------------------------------------------

GROUPS = {"policy_losses": 80, "networks": 80, "normalisation": 80, "advantages": 80,
          "setup": 48, "time": 48, "optimisers": 48}  # fmt: skip


@pytest.mark.parametrize(("group", "count"), GROUPS.items())
def test_the_groups(group, count):
    """Their sizes; the step size is in each of them; sub-choices stand where their parent's value does, and nowhere
    else; all seeds of a configuration share its choices, all configurations their seeds."""
    plan = suite.load(f"what_matters_{group}")
    assert len(plan.runs) == count * 2 * 3 and plan.budget == 300_000
    space = plan.algorithms[0].sweep["random"]
    for run in plan.runs:
        assert run.params.keys() & {"adam-learning-rate", "rmsprop-learning-rate"}
        for flag, spec in space.items():
            within = {value: set(sub) for value, sub in spec.get("when", {}).items()}
            own = within.get(suite.text(run.params[flag]), set())
            assert run.params.keys() & set().union(*within.values()) == own
    seeds = {}
    for run in plan.runs:
        seeds.setdefault((run.algorithm, run.env_id), []).append((run.seed, json.dumps(run.params)))
    assert all([seed for seed, _ in of] == [1, 2, 3] and len({p for _, p in of}) == 1 for of in seeds.values())
    flags = list(choices.drawn(space))
    assert "eval-interval" not in flags and {"adam-learning-rate"} <= set(flags)
    counts = Counter(suite.text(run.params[flags[0]]) for run in plan.runs)
    assert len(counts) == len(space[flags[0]]["choice"]) and min(counts.values()) >= 9 * 6


# ---- Stacks ----------------------------------------------------------------------------------------------------------

SUITE = """
name = "small"
environments = ["Pendulum-v1"]
seeds = [1, 2]
budget = 128
[args]
torch-threads = 1
num-envs = 4
iteration-size = 64
minibatch-size = 32
update-epochs = 1
eval-interval = 1
eval-episodes = 1
policy-width = 8
value-width = 8
checkpoint-interval = 1
[random]
Pendulum-v1 = -1263
[resources]
stack = 8
[[algorithms]]
name = "config"
script = "algos/onpolicy_choices.py"
[algorithms.sweep]
grid = { adam-learning-rate = [1e-4, 1e-3, 1e30] }
"""


LONGER = SUITE.replace(", 1e30", "").replace("budget = 128", "budget = 2560").replace("al = 1", "al = 20")


def plan_of(folder, text=SUITE):
    (folder / "small.toml").write_text(text)
    return suite.load(folder / "small.toml")


def test_runs_of_one_shape_are_packed_evenly():
    plan = suite.load("what_matters_policy_losses")
    runs = [run for run in plan.runs if run.env_id == "InvertedPendulum-v4"][:100]
    shapes, todo, found = stacks.shapes(runs), deque(runs), []
    while todo:
        found.append(stacks.take(todo, shapes, 16))
    assert Counter(run for stack in found for run in stack.runs) == Counter(runs)
    for stack in found:
        assert len(stack.runs) <= 16 and len({run.params["update-epochs"] for run in stack.runs}) == 1
        assert [run.seed for run in stack.runs] == [member["seed"] for member in stack.members]
    sizes = {}
    for stack in found:
        sizes.setdefault(stack.runs[0].params["update-epochs"], []).append(len(stack.runs))
    assert all(max(of) - min(of) <= 1 and len(of) == -(-sum(of) // 16) for of in sizes.values())
    assert stacks.take(deque(runs[:1]), {}, 16) == stacks.Stack((runs[0],))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A suite that ran: its plan, folder, and the runs by step size."""
    folder = tmp_path_factory.mktemp("small")
    plan = plan_of(folder)
    words = [sys.executable, "benchmark/run.py", "run", folder / "small.toml", "--results", folder, "--workers", "1"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 1 and "4 done | 2 failed, of 6" in said.stdout, said
    return plan, folder / "small", {(run.params["adam-learning-rate"], run.seed): run for run in plan.runs}


def test_a_member_of_a_stack_is_a_run_like_any_other(small):
    """One process trained all; the runs that diverged failed alone; a member's folder is that of its plain command,
    which finds it finished."""
    plan, folder, runs = small
    assert len(list((folder / "stacks").iterdir())) == 1 and len(plan.runs) == 6
    book = ledger.Ledger(folder).records()
    for (rate, _), run in runs.items():
        record, where = book[run.id], board.run_directory(folder, run.id)
        assert record["state"] == ("failed" if rate > 1 else "done") and board.finished(folder, run) == (rate < 1)
        assert (folder / record["run_dir"]).samefile(where)
        assert ("not finite" in record["last_line"]) == (rate > 1) and ledger.outlook(record) == "closed"
        log = (folder / "logs" / f"{run.id}.log").read_text()
        assert "in stack-" in log and ("not finite" in log) == (rate > 1)
    run = runs[1e-3, 2]
    said = subprocess.run(run.command(folder), cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0 and "finished before, nothing to do" in said.stdout


def test_what_a_stack_lost_goes_on_in_another_one(small, tmp_path):
    """Of a stack that is stopped all members go on; of those that are done before nothing is made again."""
    plan, folder, runs = small
    done = runs[1e-4, 1], runs[1e-4, 2]
    before = [(board.run_directory(folder, run.id) / "result.json").stat().st_mtime_ns for run in done]
    for run in done[1:]:
        (board.run_directory(folder, run.id) / "result.json").unlink()
    shapes = stacks.shapes(done)
    stack = stacks.take(deque(done), shapes, 8)
    book = ledger.Ledger(folder)
    ended = execute.run_stack(stack, plan, folder, [book.get(run.id)["attempts"] for run in done])
    assert [record["state"] for record in ended] == ["done", "done"]
    after = [(board.run_directory(folder, run.id) / "result.json").stat().st_mtime_ns for run in done]
    assert before[0] == after[0] and before[1] < after[1]
    assert execute.run_stack(stack, plan, folder, [0, 0]) == [None, None]  # another's


def test_a_stack_that_is_stopped_goes_on(tmp_path):
    plan, ended = plan_of(tmp_path, LONGER), []
    folder, stop = tmp_path / "small", execute.Stop()
    shapes = stacks.shapes(plan.runs)
    stack = stacks.take(deque(plan.runs), shapes, 8)
    thread = threading.Thread(target=lambda: ended.extend(execute.run_stack(stack, plan, folder, [0] * 4, stop=stop)))
    thread.start()
    while not (tables := list(folder.glob("runs/*/*/*/*/metrics.jsonl"))) and thread.is_alive():
        time.sleep(0.05)
    stop()
    thread.join(60)
    assert tables and {(record["state"], record["reason"]) for record in ended} == {("interrupted", "stopped")}
    again = execute.run_stack(stacks.take(deque(plan.runs), shapes, 3), plan, folder, [1] * 2)
    assert [record["state"] for record in again] == ["done", "done"] and again[0]["attempts"] == 2
    for run in plan.runs:
        rows = (board.run_directory(folder, run.id) / "metrics.jsonl").read_text().splitlines()
        updates = [json.loads(row)["charts/update"] for row in rows]
        assert updates == list(range(1, 41)) if board.finished(folder, run) else updates[-1] < 40


def test_a_stack_that_falls_as_a_whole_is_tried_again_one_by_one(tmp_path, monkeypatch):
    plan = plan_of(tmp_path, SUITE.replace(", 1e30", ""))
    folder, sizes = tmp_path / "small", []

    def submit(stack, seen):
        sizes.append(len(stack.runs))
        alone = len(stack.runs) == 1
        records = [{"state": "done" if alone else "failed", "reason": "", "retry": not alone, "attempts": n + 1}
                   for n in seen]  # fmt: skip
        future = execute.ThreadPoolExecutor(1).submit(lambda: records)
        return future

    execute.drive(plan, folder, plan.runs, submit, 1, execute.Stop())
    assert sizes == [4, 1, 1, 1, 1]


# ---- The analysis ----------------------------------------------------------------------------------------------------


def test_the_report_of_choices(small):
    """Runs that diverged stay in, with the random policy's score; the figures and tables are there."""
    pytest.importorskip("pyarrow")
    plan, folder, runs = small
    words = [sys.executable, "benchmark/run.py", "report", folder.parent / "small.toml", "--results", folder.parent]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0, said
    found = json.loads((folder / "summary.json").read_text())["choices"]
    of = found["environments"]["Pendulum-v1"]
    assert (of["planned"], of["counted"], of["diverged"]) == (3, 3, 2)
    scores = found["configurations"]["Pendulum-v1"]
    assert scores["config:adam-learning-rate=1e+30"]["area"] == -1263
    assert scores["config:adam-learning-rate=1e+30"]["diverged"] == [1, 2]
    means = []
    for seed in (1, 2):
        where = board.run_directory(folder, runs[1e-3, seed].id)
        rows = [json.loads(line) for line in (where / "eval.jsonl").read_text().splitlines()]
        assert len(rows) == 2
        means.append(np.mean([row["return"] for row in rows]))
    assert scores["config:adam-learning-rate=0.001"]["area"] == pytest.approx(np.median(means))
    text = (folder / "report.md").read_text()
    assert "| Pendulum-v1 | 3 | 3 | 2 |" in text


# ---- Claims ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("differences", "expects", "found"),
    [
        (np.linspace(0.02, 0.4, 24), "first", "REPRODUCED"),
        (-np.linspace(0.02, 0.4, 24), "first", "CONTRADICTED"),
        (np.linspace(-0.3, 0.3, 24), "first", "UNDECIDED"),
        (np.linspace(-0.04, 0.03, 24), "alike", "REPRODUCED"),
        (np.linspace(-0.3, 0.3, 24), "alike", "UNDECIDED"),
        (np.linspace(0.2, 0.4, 24), "alike", "UNDECIDED"),
        (np.linspace(0.2, 0.4, 24), "open", "no claim"),
        (np.linspace(0.02, 0.4, 23), "first", "UNFINISHED"),
        (np.zeros(24), "first", "UNDECIDED"),
    ],
)
def test_the_rule_decides(differences, expects, found):
    made = claims.verdict(differences, expects, 24)
    assert made["verdict"] == found
    assert (made["interval"] is None) == (found == "UNFINISHED") and made["n"] == len(differences)


def test_the_numbers_of_a_verdict():
    x = np.array([0.3] * 18 + [-0.1] * 5 + [0.0])
    made = claims.verdict(x, "first", 24)
    assert (made["wins"], made["losses"], made["median"], made["interval"]) == (18, 5, 0.3, [0.3, 0.3])
    assert made["sign_p"] == pytest.approx(0.010622, abs=1e-6)  # 2 P(Bin(23, 1/2) <= 5)


def claims_suite():
    plan = suite.load("what_matters_claims")
    bases = sorted({run.algorithm for run in plan.runs if ":" not in run.algorithm})
    return plan, bases


def test_the_registered_claims():
    plan, bases = claims_suite()
    assert len(bases) == 24 and plan.seeds == [1000, 1001, 1002] and len(plan.runs) == 2 * 24 * (1 + 8) * 3
    params = {run.algorithm: run.params for run in plan.runs}
    for name, its in params.items():
        base, _, flip = name.partition(":")
        changed = [f"{flag}={suite.text(value)}" for flag, value in its.items() if params[base][flag] != value]
        assert changed == ([flip] if flip else []) and its.keys() == params[base].keys()
    paper = params[bases[0]]
    assert (paper["policy-init-scale"], paper["init-std"], paper["gae-lambda"]) == (0.01, 0.5, 0.9)


def test_judging_pairs_configurations_and_scales_them():
    """Flipping init-std costs 20 of (best 106 - random 6) in one environment; nothing else does anything. A
    configuration that is missing leaves its claims unfinished, and the others as they are."""
    plan, bases = claims_suite()
    plan.random = {"InvertedPendulum-v4": 6, "HalfCheetah-v4": -254}
    runs = {(run.algorithm, run.env_id) for run in plan.runs}
    level = {base: 60 + 2 * i for i, base in enumerate(bases)}  # the best: 60 + 46 = 106
    scores = {
        key: level[key[0].partition(":")[0]]
        - 20 * (key[0].endswith("init-std=2.0") and key[1] == "InvertedPendulum-v4")
        for key in runs
    }
    del scores["config#003:gae-lambda=0.99", "HalfCheetah-v4"]
    rows = claims.judge(plan, {"area": scores})
    assert len(rows) == 2 * 8
    made = {(row["environment"], row["flag"]): row for row in rows}
    row = made["InvertedPendulum-v4", "init-std"]
    assert row["median"] == pytest.approx(0.2) and row["verdict"] == "REPRODUCED" and row["wins"] == 24
    assert made["HalfCheetah-v4", "init-std"]["verdict"] == "UNDECIDED"
    assert made["HalfCheetah-v4", "gae-lambda"]["verdict"] == "UNFINISHED"
    assert made["HalfCheetah-v4", "gae-lambda"]["n"] == 23
    assert made["InvertedPendulum-v4", "norm-adv"]["verdict"] == "REPRODUCED"  # alike
    assert made["InvertedPendulum-v4", "norm-value"]["verdict"] == "no claim"
