"""The benchmark's suites, plan, ledger and execution, on a script that fails, hangs, dies and resumes."""

import contextlib
import itertools
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmark.runner import backends, board, execute, ledger, stacks, suite

ROOT = Path(__file__).parents[1]
FAKE = ROOT / "tests" / "fake_script.py"
RUN = [sys.executable, str(ROOT / "benchmark" / "run.py")]
HEAD = """
name = "fake"
seeds = [1, 2]
environments = ["A", "B"]
budget = 10
"""
ALGORITHM = f"""
[[algorithms]]
name = "fake"
script = "{FAKE}"
"""


def write(folder, text, name="fake.toml"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def load(folder, text):
    return suite.load(write(folder, text))


def start(verb, path, *words, **options):
    command = [*RUN, verb, str(path), "--results", str(path.parent), *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, start_new_session=True, **pipes, **options)


class Ended:
    """Waits for the end of a program."""

    def __init__(self, process, limit=100):
        try:
            self.out, self.err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"still running after {limit} s: {process.communicate()}")
        self.rc = process.returncode

    def __repr__(self):
        return f"rc {self.rc}\n{self.out}\n{self.err}"


def records(path):
    return ledger.Ledger(path.parent / "fake").records()


def stops(path):
    """The codes with which children ended when they were asked to."""
    return [json.loads(file.read_text()) for file in path.parent.glob("fake/runs/*/*/*/*/stopped.json")]


def results(path):
    """{run: (its result, its rows, how often it was started)}."""
    found = {}
    for run in suite.load(path).runs:
        where = board.run_directory(path.parent / "fake", run.id)
        if where is not None and (where / "result.json").exists():
            read = [(where / name).read_text() for name in ("result.json", "metrics.jsonl", "starts")]
            found[str(run)] = read[0], read[1], read[2].count("start")
    return found


def undisturbed(steps, seed):
    value = seed
    for step in range(1, steps + 1):
        value = (value * 31 + step) % 1_000_003
    return value


def wait_until(condition, what, limit=30):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {limit} s"
        time.sleep(0.02)


def rows(path, runs=1):
    """Rows of metrics of all runs; 0 before as many `runs` have some."""
    found = [len(file.read_text().splitlines()) for file in path.parent.glob("fake/runs/*/*/*/*/metrics.jsonl")]
    return sum(found) if sum(map(bool, found)) >= runs else 0


# ---- Suites ----------------------------------------------------------------------------------------------------------


def test_a_suite_becomes_runs(tmp_path):
    text = HEAD + "args = { step-s = 0.5, norm_adv = false }\n[env_args.B]\nstep-s = 0.1\n" + ALGORITHM
    runs = load(tmp_path, text + "args = { sizes = [1, 2] }\nenv_args.B = { sizes = [3] }").runs
    assert [str(run) for run in runs] == ["fake/A/seed1", "fake/B/seed1", "fake/A/seed2", "fake/B/seed2"]
    common = "--seed 1 --total-timesteps 10 --step-s"
    assert " ".join(runs[0].args) == f"--env-id A {common} 0.5 --no-norm-adv --sizes 1 2"
    assert " ".join(runs[1].args) == f"--env-id B {common} 0.1 --no-norm-adv --sizes 3"
    assert runs[0].budget == 10 and runs[0].params == {}
    canonical = json.dumps(["fake", "fake", str(FAKE), runs[0].args, "A", 1], separators=(",", ":"))
    assert runs[0].id == suite.hashlib.sha256(canonical.encode()).hexdigest()[:12]
    command = runs[0].command(tmp_path / "fake")
    assert command[1:] == [str(FAKE), *runs[0].args, "--run-dir", str(tmp_path / "fake" / "runs" / runs[0].id)]


SWEEP = """[algorithms.sweep]
trials = 40
random.learning-rate = { log_uniform = [1e-4, 1e-1] }
random.sizes = { int_uniform = [1, 3] }
random.norm-adv = { choice = [true, false], when.true = { clip-coef = { uniform = [0.1, 0.4] } } }
"""


def test_a_random_sweep(tmp_path):
    """BEN-14."""
    plan = load(tmp_path, HEAD + ALGORITHM + SWEEP)
    params = {}
    for run in plan.runs:
        assert params.setdefault(run.algorithm, run.params) == run.params, "all seeds and environments share them"
    assert list(params) == [f"fake#{i:03d}" for i in range(40)] and len(plan.runs) == 160
    rates, sizes = ([p[key] for p in params.values()] for key in ("learning-rate", "sizes"))
    assert all(1e-4 <= rate <= 1e-1 for rate in rates) and 8 < sum(rate < 3e-3 for rate in rates) < 32, "log-uniform"
    assert set(sizes) == {1, 2, 3}
    for p in params.values():
        assert ("clip-coef" in p) == p["norm-adv"] and 0.1 <= p.get("clip-coef", 0.2) <= 0.4
    assert len({p.get("clip-coef") for p in params.values()}) > 8, "None and some others"
    fewer = load(tmp_path, (HEAD + ALGORITHM + SWEEP).replace("trials = 40", "trials = 3").replace("[1, 2]", "[7]"))
    assert [run.params for run in fewer.runs[::2]] == list(params.values())[:3], "other trials and seeds change no draw"
    short = SWEEP.replace("random.learning-rate", "# ")
    less = load(tmp_path, HEAD + ALGORITHM + short).runs[0].params
    assert less == {k: v for k, v in params["fake#000"].items() if k != "learning-rate"}, "nor do other arguments"
    text = SWEEP.replace("trials = 40", "trials = 40\nseed = 1")
    assert load(tmp_path, HEAD + ALGORITHM + text).runs[0].params != params["fake#000"]


def test_paired_flips_change_one_thing(tmp_path):
    text = SWEEP.replace("trials = 40", "trials = 8\nflips = { norm-adv = [true, false], step-s = [0.01, 0.02, 0.03] }")
    arms = {run.algorithm: run.params for run in load(tmp_path, HEAD + ALGORITHM + text).runs}
    assert len(arms) == 8 * (1 + 1 + 2)
    for i in range(8):
        base = arms[f"fake#{i:03d}"]
        flip = {"norm-adv": not base["norm-adv"]}
        arm = arms[f"fake#{i:03d}:norm-adv={str(flip['norm-adv']).lower()}"]
        assert {k: v for k, v in arm.items() if k != "clip-coef"} == {
            k: v for k, v in base.items() if k != "clip-coef"
        } | flip
        assert ("clip-coef" in arm) == arm["norm-adv"], "sub-choices follow"
        assert base["step-s"] == 0.01 and arms[f"fake#{i:03d}:step-s=0.03"] == base | {"step-s": 0.03}


def test_a_grid_and_repeats_are_named(tmp_path):
    """BEN-15."""
    text = HEAD + ALGORITHM + "sweep.grid = { clip-coef = [0.1, 0.2], norm-adv = [true, false] }"
    names = [f"fake:clip-coef={c},norm-adv={n}" for c in ("0.1", "0.2") for n in ("true", "false")]
    assert list(dict.fromkeys(run.algorithm for run in load(tmp_path, text).runs)) == names
    text = HEAD + ALGORITHM + "sweep = { trials = 10, random.norm-adv = { choice = [true, false] } }"
    plan = load(tmp_path, text)
    assert len(plan.runs) == 2 * 4 and len(plan.notes) == 8
    assert all("is the same as fake#00" in note and "left out" in note for note in plan.notes)


DRAW = HEAD + ALGORITHM + "sweep = { trials = 2, random.sizes = "
WRONG = {
    "unknown key": (HEAD + "buget = 3" + ALGORITHM, "no key buget: did you mean budget?"),
    "unknown key below": (HEAD + ALGORITHM + "scrip = 3", "number 1 has no key scrip: did you mean script?"),
    "missing key": (HEAD.replace("budget = 10", "") + ALGORITHM, "the suite lacks budget"),
    "type": (HEAD.replace("10", "'10'") + ALGORITHM, "budget = '10' must be of type int"),
    "seeds": (HEAD.replace("[1, 2]", "[1, 1]") + ALGORITHM, "each may stand there once"),
    "huge seed": (HEAD.replace("[1, 2]", "[9223372036854775808]") + ALGORITHM, "from 0 on and below 2^63"),
    "huge budget": (HEAD.replace("10", "1" + "0" * 30) + ALGORITHM, "at most 10^15 are needed"),
    "no seeds": (HEAD.replace("[1, 2]", "[]") + ALGORITHM, "at least one is needed"),
    "negative": (HEAD.replace("[1, 2]", "[-1]") + ALGORITHM, "each must be a whole number, from 0 on"),
    "empty name": (HEAD.replace('"A"', '""') + ALGORITHM, "each must be a text of one line"),
    "none of its own": (HEAD + ALGORITHM + "environments = []", "environments of fake: at least one is needed"),
    "no steps": (HEAD + ALGORITHM + "budget = 0", "budget = 0: at least 1 step"),
    "no limit": (HEAD + "resources.memory_gb = nan" + ALGORITHM, "nothing below 0"),
    "two spellings": (HEAD + "args = { step_s = 1, step-s = 2 }" + ALGORITHM, "one of them is there with _ and with -"),
    "paper": (HEAD + "reference.fake.A = [1]" + ALGORITHM, "a number or [mean, deviation] is needed"),
    "paper's environment": (HEAD + "reference.fake.C = 1" + ALGORITHM, "[reference.fake] C is none of the environm"),
    "loss": (HEAD + 'metric = "losses/value_loss"' + ALGORITHM, "say whether more or less of it is better, direction"),
    "length": (HEAD + 'metric = "eval/length_mean"' + ALGORITHM, 'direction = "max" or "min"'),
    "NashConv": (HEAD + 'metric = "eval/nash_conv_average"' + ALGORITHM, "has nash in its name"),
    "time": (HEAD + 'metric = "perf/update_s"' + ALGORITHM, "has s in its name"),
    "direction": (HEAD + 'direction = "down"' + ALGORITHM, "direction = 'down': \"max\" or \"min\" is needed"),
    "infinite": (HEAD + "normalization.A = [0, inf]" + ALGORITHM, "[minimum, maximum] is needed"),
    "syntax": (HEAD + "x = = 3" + ALGORITHM, "Invalid value (at line 6"),
    "two of a name": (HEAD + ALGORITHM * 2, "names of [[algorithms]] ['fake', 'fake']: each may stand there once"),
    "overlapping folders": (HEAD + ALGORITHM + "args = { run_dir = 'x' }", "run-dir among the arguments"),
    "seed by hand": (HEAD + ALGORITHM + "sweep.grid.seed = [1]", "seed among the arguments: it is set by seeds"),
    "normalization": (HEAD + "normalization.C = [0, 1]" + ALGORITHM, "C is none of the environments (A, B)"),
    "limits": (HEAD + "normalization.A = [1, 0]" + ALGORITHM, "[minimum, maximum] is needed"),
    "distribution": (DRAW + "{ normal = [0, 1] } }", "one of uniform,"),
    "bounds": (DRAW + "{ uniform = [2, 1] } }", "needs [low, high]"),
    "endless": (DRAW + "{ uniform = [0, inf] } }", "needs [low, high]"),
    "not whole": (DRAW + "{ int_uniform = [0.5, 2] } }", "needs whole [low, high]"),
    "no sub-choices": (DRAW + "{ choice = [1], when = 3 } }", "random.sizes.when: a table is needed"),
    "negative trials": (HEAD + ALGORITHM + "sweep.trials = -1", "random needs trials, and trials need random"),
    "huge": (HEAD + ALGORITHM + f"sweep.grid = {{ x = {[0] * 1000}, y = {[0] * 101} }}", "101,000 variants, more than"),
    "one name for two": (HEAD + ALGORITHM + "sweep.grid.x = [1]\n" + ALGORITHM.replace('"fake"', '"fake:x=1"'),
                         "fake:x=1: two variants or algorithms have this name"),
    "sub-choice": (DRAW + "{ choice = [1], when.2 = {} } }", "when.2 is none"),
    "no trials": (HEAD + ALGORITHM + "sweep = { random.x = { choice = [1] } }", "random needs trials"),
    "name": (HEAD.replace('"fake"', '"../x"') + ALGORITHM, "letters, digits"),
    "parent folder": (HEAD.replace('"fake"', '".."') + ALGORITHM, "letters, digits"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_in_a_suite_is_told_in_one_line(case, tmp_path):
    """CLI-06."""
    text, message = WRONG[case]
    with pytest.raises(SystemExit) as caught:
        load(tmp_path, text)
    assert caught.value.code.startswith("error: ") and message in caught.value.code and "\n" not in caught.value.code


def test_a_suite_that_is_not_there(tmp_path):
    with pytest.raises(SystemExit, match="no suite smok: name a TOML file or one of bigfish_nature, cartpole, .*smoke"):
        suite.load("smok")


def faults(folder, more):
    return list(suite.check(load(folder, HEAD + more).runs))


def test_wrong_arguments_are_found_before_anything_starts(tmp_path):
    right = "args = { sizes = [1, 2], clip-coef = 0.3, norm-adv = false, mode = 'dies' }"
    assert faults(tmp_path, ALGORITHM + right) == []
    for argument, message in {
        "learning-rat = 1": "--learning-rat 1: Unrecognized options: --learning-rat, 1 Perhaps you meant: --learn",
        "learning-rate = 'x'": "--learning-rate",
        "learning-rate = 3": "--learning-rate 3.0: at most 1", "mode = 'wel'": "--mode wel: invalid choice 'wel'",
        "clip-coef = true": "--clip-coef", "sizes = ['x']": "--sizes", "norm-adv = 3": "--norm-adv",
    }.items():  # fmt: skip
        (fault,) = faults(tmp_path, ALGORITHM + f"args = {{ {argument} }}")
        assert message in fault and "\n" not in fault and "--help" not in fault, fault
    ((fault, runs),) = suite.check(load(tmp_path, HEAD.replace('"B"', '"nowhere"') + ALGORITHM).runs).items()
    assert "no such environment" in fault and [run.env_id for run in runs] == ["nowhere"] * 2
    missing = ALGORITHM.replace("fake_script", "gone").replace('"fake"', '"gone"')
    plan = load(tmp_path, HEAD + ALGORITHM + missing)
    ((fault, runs),) = suite.check(plan.runs).items()
    assert fault == f"{ROOT}/tests/gone.py: no such script" and len(runs) == 4
    end = Ended(start("run", tmp_path / "fake.toml"))
    assert end.rc == 1 and "4 runs, the first is gone/A/seed1" in end.err and end.err.count("\n") == 1, end
    assert not (tmp_path / "fake").exists()


def test_scripts_that_cannot_be_imported_and_one_with_a_neighbour(tmp_path):
    (tmp_path / "neighbour.py").write_text("")
    for text, message in {
        "import sys; sys.exit('not here')": "SystemExit: not here",
        "class Args: pass": "TypeError: must be called with a dataclass",
        "import neighbour\n" + FAKE.read_text(): None,
    }.items():
        (tmp_path / "script.py").write_text(text)
        found = faults(tmp_path, ALGORITHM.replace(str(FAKE), str(tmp_path / "script.py")))
        assert (found == []) if message is None else (len(found) == 1 and message in found[0]), found
    (fault,) = faults(tmp_path, ALGORITHM.replace(str(FAKE), str(tmp_path)))
    assert "Is a directory" in fault and str(tmp_path) not in sys.path


def test_options_that_go_with_another_backend_or_task(tmp_path):
    path = write(tmp_path, HEAD + ALGORITHM)
    for words, message in {
        ("plan", "--results", str(suite.PUBLISHED)): "benchmark/results holds what is published: name another folder",
        ("run", "--dry-run"): "--dry-run is for --backend slurm, and this is local",
        ("run", "--fail-fast", "--backend", "slurm"): "--fail-fast is for --backend local or ray, and this is slurm",
        ("worker", "--task", 2, "--tasks", 2): "--task 2 --tasks 2: tasks are numbered from 0",
    }.items():
        end = Ended(start(words[0], path, *words[1:]))
        assert end.rc == 1 and message in end.err and end.err.count("\n") == 1 and end.out == "", end
    assert not (tmp_path / "fake").exists()


def test_plan_prints_commands_that_run(tmp_path):
    path = write(tmp_path, HEAD + ALGORITHM + "sweep.grid.step-s = [0.0, 0.001, 0.0]")
    end = Ended(start("plan", path, "--only", "*/B/seed2"))
    assert end.rc == 0 and "note: fake:step-s=0.0 is the same" in end.out and "2 runs of 20 steps" in end.out, end
    command = end.out.splitlines()[1].split()
    assert subprocess.run(command, cwd=ROOT, check=True) and list(results(path)) == ["fake:step-s=0.0/B/seed2"]
    end = Ended(start("plan", path, "--only", "x*"))
    assert end.rc == 1 and "fits no run, as for example fake:step-s=0.0/A/seed1" in end.err, end


def test_code_from_elsewhere_is_named_before_it_runs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint('ran')\nsys.stdout.flush()\nos._exit(3)\n")
    link = tmp_path / "algos"
    link.symlink_to(tmp_path, target_is_directory=True)
    for name in (script, link / "script.py"):
        path = write(tmp_path, HEAD + ALGORITHM.replace(str(ROOT / "tests" / "fake_script.py"), str(name)))
        for verb in ("plan", "run"):
            end = Ended(start(verb, path))
            note = f"note: runs code from outside algos/, to read its arguments: {name}\n"
            assert end.rc == 3 and end.out.endswith(note + "ran\n"), end
    path = write(tmp_path, HEAD + '[[algorithms]]\nname = "a"\nscript = "algos/ppo.py"\n')
    assert "runs code" not in Ended(start("plan", path)).out


def test_the_shipped_suites():
    plans = {path.stem: suite.load(path.stem) for path in suite.SUITES.glob("*.toml")}
    assert {"smoke", "cartpole", "procgen_plr", "procgen_plr_small", "minigrid_plr"} <= plans.keys()
    for name, plan in plans.items():
        assert plan.name == name and suite.check(plan.runs) == {}
        assert not plan.notes or plan.algorithms[0].sweep["random"]  # which may draw the same again
        assert plan.reference.keys() <= {run.algorithm for run in plan.runs}
    figure = plans["procgen_plr"]
    assert len(figure.runs) == 2 * 10 * 5 and figure.budget == 25_000_000
    assert all(len(table) == 10 for table in (figure.normalization, *figure.reference.values()))
    assert {run.script for run in plans["smoke"].runs} == {f"algos/{p.name}" for p in (ROOT / "algos").glob("*.py")}


# ---- The ledger ------------------------------------------------------------------------------------------------------


def test_of_many_claims_one_is_granted(tmp_path):
    granted, barrier = [], threading.Barrier(8)

    def rush(number):
        book = ledger.Ledger(tmp_path)
        for run_id in map(str, range(20)):
            barrier.wait(20)
            granted.extend([run_id] if book.claim(run_id, 0, "x") else [])

    threads = [threading.Thread(target=rush, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(granted, key=int) == list(map(str, range(20)))
    assert {record["attempts"] for record in ledger.Ledger(tmp_path).records().values()} == {1}


def test_a_claim_is_refused_to_those_who_did_not_see_it_coming(tmp_path):
    """Each sees the ledger as it was a moment ago."""
    one, two = ledger.Ledger(tmp_path), ledger.Ledger(tmp_path)
    two.get = lambda run_id: None
    assert one.claim("a", 0, "x") and two.claim("a", 0, "x") is None


def dead_pid():
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_runs_of_the_dead_are_taken_over_those_of_the_living_are_not(tmp_path):
    book = ledger.Ledger(tmp_path)
    mine = book.claim("a", 0, "x")
    assert ledger.outlook(mine) == "held" and book.claim("a", 1, "x")["attempts"] == 2, "the caller says it may"
    assert book.claim("a", 1, "x") is None, "attempt 2 was granted"
    dead = mine | {"runner": dead_pid()}
    other_start = mine | {"runner_started": 1}
    away = mine | {"place": "elsewhere", "heartbeat": time.time() - 60}
    lost = away | {"heartbeat": time.time() - ledger.STALE_S - 1}
    assert [ledger.outlook(r) for r in (dead, other_start, away, lost)] == ["open", "open", "held", "open"]
    book.write("b", dead, os.link, book.claims / "b.1")  # it died between its claim and its first entry
    assert book.claim("b", 0, "x")["attempts"] == 2
    book.write("c", mine, os.link, book.claims / "c.1")
    assert book.claim("c", 0, "x") is None
    (tmp_path / "ledger" / "d.json").write_text('{"state": "runn')
    assert ledger.outlook(book.records()["d"]) == "open" and book.claim("d", 0, "x")["attempts"] == 1
    failed = {"state": "failed", "retry": False}
    assert [ledger.outlook(failed), ledger.outlook(failed, True), ledger.outlook(failed | {"retry": True})] == [
        "closed",
        "open",
        "open",
    ]


def test_a_runner_that_was_given_up_for_dead_lets_go(tmp_path, monkeypatch):
    monkeypatch.setattr(execute, "HEARTBEAT_S", 0.2)
    plan, folder = load(tmp_path, SLOW.replace("budget = 24", "budget = 4000")), tmp_path / "fake"
    run, book, returned = plan.runs[0], ledger.Ledger(folder), []
    thread = threading.Thread(target=lambda: returned.append(execute.run_one(run, plan, folder)))
    thread.start()
    wait_until(lambda: (book.get(run.id) or {}).get("pid") and rows(tmp_path / "fake.toml"), "a run")
    first = book.get(run.id)
    wait_until(lambda: book.get(run.id)["heartbeat"] > first["heartbeat"], "a heartbeat", 5)
    other = first | {"attempts": 2, "place": "elsewhere"}
    book.write(run.id, other)
    thread.join(20)
    assert returned == [None] and ledger.started(first["pid"]) is None and book.get(run.id) == other


def test_a_child_does_not_begin_without_its_runner(tmp_path):
    command = [sys.executable, "-ISc", execute.LAUNCHER, "", "touch", str(tmp_path / "begun")]
    for said, code in ((b"", 75), (b"go", 0)):
        assert subprocess.run(command, input=said).returncode == code
        assert (tmp_path / "begun").exists() == (said == b"go")


# ---- Execution -------------------------------------------------------------------------------------------------------

MODES = "well", "raises", "dies_once", "dies", "swells", "lacks_memory", "stops_short", "leaves"
ALL = (
    HEAD.replace('["A", "B"]', json.dumps(MODES)).replace("[1, 2]", "[1]")
    + "".join(f"env_args.{mode} = {{ mode = '{mode}' }}\n" for mode in MODES)
    + "resources = { memory_gb = 0.1, retries = 2 }\n"
    + ALGORITHM
)


@pytest.fixture(scope="module")
def troubled(tmp_path_factory):
    """A suite in which everything goes wrong that can: how its runner ended, and how the same command did again."""
    path = write(tmp_path_factory.mktemp("troubled"), ALL)
    ends = Ended(start("run", path, "--workers", 4)), records(path), Ended(start("run", path, "--workers", 4))
    return path, *ends


def test_a_fault_of_the_runner_itself_ends_the_run_not_the_others(tmp_path, monkeypatch):
    plan, folder = load(tmp_path, HEAD.replace("[1, 2]", "[1]") + ALGORITHM), tmp_path / "fake"
    watch, children = execute.watch, []

    def broken(child, records, *rest):
        if next(iter(records)).env_id == "B":
            return watch(child, records, *rest)
        children.append(child)
        raise RuntimeError("no such thing")

    monkeypatch.setattr(execute, "watch", broken)
    stop = execute.Stop()
    late = threading.Timer(30, stop)
    late.start()
    assert execute.drive(plan, folder, plan.runs, execute.local(plan, folder, 2, stop)[0], 2, stop) == 1
    late.cancel()
    one, two = (ledger.Ledger(folder).get(run.id) for run in plan.runs)
    assert one["reason"] == "the runner: RuntimeError('no such thing')" and ledger.outlook(one) == "open", one
    assert two["state"] == "done" and children[0].wait(5) == -signal.SIGKILL
    assert execute.verdict(-40, None, False, "") == ("failed", "killed by signal 40", True)


def test_a_signal_that_nohup_ignores_is_ignored():
    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        stop = execute.Stop().install()
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert (stop.level, stop.number) == (1, signal.SIGUSR1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_what_was_made_by_other_means_counts(tmp_path):
    """A run that somebody repeated by hand after it had failed, and one whose script got other defaults half-way."""
    path = write(tmp_path, HEAD.replace("[1, 2]", "[1]").replace('"A"', '"\\u00c4"') + ALGORITHM)
    by_hand, anew = suite.load(path).runs
    for run, name, age in (by_hand, "x", 0), (anew, "old", 60), (anew, "new", 0):
        folder = tmp_path / "fake" / "runs" / run.id / "fake" / run.env_id / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        os.utime(folder / "config.json", (time.time() - age,) * 2)
        if name != "old":
            (folder / "result.json").write_text('{"global_step": 10}')
    failed = {"state": "failed", "reason": "exit 1", "retry": False, "attempts": 1, "place": "x", "heartbeat": 0}
    ledger.Ledger(tmp_path / "fake").write(by_hand.id, failed)
    assert board.run_directory(tmp_path / "fake", anew.id).name == "new"
    end = Ended(start("run", path, env=os.environ | {"PYTHONIOENCODING": "ascii"}))  # which lacks a letter
    assert end.rc == 0 and "fake: 2 done, of 2" in end.out and not list(tmp_path.glob("fake/runs/*/*/*/*/starts")), end


def test_each_failure_is_told_and_retried_only_if_that_can_help(troubled):
    """BEN-10."""
    path, end, first, _ = troubled
    found = {run.env_id: first[run.id] for run in suite.load(path).runs}
    assert {mode: (record["state"], record["attempts"]) for mode, record in found.items()} == {
        "well": ("done", 1), "leaves": ("done", 1), "dies_once": ("done", 2), "lacks_memory": ("done", 2),
        "raises": ("failed", 1), "stops_short": ("failed", 1), "dies": ("failed", 3),
        "swells": ("failed", 3),
    }  # fmt: skip
    reasons = {
        "raises": "exit 1", "dies": "killed by SIGKILL (out of memory?)",
        "stops_short": "exit 0, but without a result",
    }  # fmt: skip
    assert "failed: fake/lacks_memory/seed1 in 0:0" in end.out and ": out of memory (exit 1)" in end.out, end
    assert {mode: found[mode]["reason"] for mode in reasons} == reasons
    assert "GiB, more than memory_gb = 0.1" in found["swells"]["reason"] and found["swells"]["peak_gb"] > 0.1
    assert found["raises"]["last_line"] == "ValueError: no such level: 7"
    assert end.rc == 1 and "fake: 4 done | 4 failed, of 8" in end.out, end
    report = end.out.split("4 failed, of 8")[1]
    for run in suite.load(path).runs:
        told = f"failed: {run}: {found[run.env_id]['reason']}" in report
        assert (
            told
            == (found[run.env_id]["state"] == "failed")
            == (f"command:   {found[run.env_id]['command']}\n" in report)
        )
    assert "last line: ValueError: no such level: 7" in report and end.err == "", end


def test_nothing_outlives_the_runner(troubled):
    script = str(FAKE).encode()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            assert not (script in process.read_bytes() and b"troubled" in process.read_bytes()), process


def test_again_only_what_can_get_better_is_tried_again(troubled):
    """BEN-15."""
    path, _, first, again = troubled
    for run in suite.load(path).runs:
        tries = records(path)[run.id]["attempts"] - first[run.id]["attempts"]
        assert tries == (3 if run.env_id in ("dies", "swells") else 0), run
    assert again.rc == 1 and "no such level: 7" in again.out, again
    assert results(path)["fake/dies_once/seed1"][:2] != results(path)["fake/well/seed1"], "another directory"
    assert json.loads(results(path)["fake/dies_once/seed1"][0])["eval/return_mean"] == undisturbed(10, 1)


def test_status_and_retry_failed(troubled):
    path, *_ = troubled
    end = Ended(start("status", path))
    assert end.rc == 0 and "4 done | 4 failed, of 8" in end.out and "failed, by reason: " in end.out, end
    write(path.parent, ALL.replace("mode = 'raises'", "mode = 'well'"))  # another command: another run
    end = Ended(start("run", path, "--only", "*/raises/*"))
    assert end.rc == 0 and "note: 1 runs in" in end.out and "1 done, of 1" in end.out, end
    write(path.parent, ALL)
    before = records(path)
    end = Ended(start("run", path, "--only", "*/raises/*", "--retry-failed"))
    (run,) = [run for run in suite.load(path).runs if run.env_id == "raises"]
    assert end.rc == 1 and records(path)[run.id]["attempts"] == before[run.id]["attempts"] + 1, end


def test_fail_fast(tmp_path):
    path = write(tmp_path, "env_args.A = { mode = 'raises' }\n" + SLOW.replace("budget = 24", "budget = 200"))
    end = Ended(start("run", path, "--workers", 2, "--fail-fast"))
    assert end.rc == 1 and "1 failed | 1 interrupted | 2 pending, of 4" in end.out and stops(path) == [75], end
    assert end.out.endswith("stopped: the same command goes on from here\n"), end


def test_runs_by_another_version_of_their_script_begin_anew_on_demand(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(FAKE.read_text())
    path = write(tmp_path, HEAD + ALGORITHM.replace(str(FAKE), str(script)))
    assert Ended(start("run", path, "--only", "*/seed1")).rc == 0
    script.write_text(FAKE.read_text() + "# changed")
    run, other = suite.load(path).runs[:2]
    assert Ended(start("run", path, "--only", run.id, str(other))).rc == 0 and len(results(path)) == 2
    end = Ended(start("run", path, "--rerun-stale", "--only", run.id, "*/A/seed2"))
    assert end.rc == 0 and "note: 1 runs by another version of their script begin anew" in end.out, end
    assert {name: record["attempts"] for name, record in records(path).items()}[run.id] == 2
    assert {starts for *_, starts in results(path).values()} == {1} and len(results(path)) == 3
    assert json.loads(next(tmp_path.glob(f"fake/stale/{run.id}-*/*/*/*/result.json")).read_text())["global_step"] == 10
    end = Ended(start("run", path, "--rerun-stale", "--only", run.id))
    assert end.rc == 0 and "note: 0 runs" in end.out and records(path)[run.id]["attempts"] == 2, end


def test_a_run_that_hangs_is_ended_and_not_tried_again(tmp_path):
    text = HEAD.replace("[1, 2]", "[1]").replace('"A", ', "") + "resources = { timeout_h = 0.001, grace_s = 1 }\n"
    path = write(tmp_path, text + ALGORITHM + "args.mode = 'hangs'")
    end = Ended(start("run", path))
    assert end.rc == 1 and "failed: fake/B/seed1: not finished after timeout_h = 0.001\n" in end.out, end
    (record,) = records(path).values()
    assert record["attempts"] == 1 and not record["retry"] and stops(path) == [130]


def test_runs_have_cpus_threads_and_no_gpu_of_their_own(tmp_path):
    path = write(tmp_path, HEAD + "args.step-s = 0.05\n" + ALGORITHM)
    end = Ended(start("run", path, "--workers", 1, preexec_fn=lambda: os.sched_setaffinity(0, {0})))
    assert end.rc == 0 and "4 done, of 4" in end.out, end
    configs = [json.loads(config.read_text()) for config in tmp_path.glob("fake/runs/*/*/*/*/config.json")]
    assert len(configs) == 4 and all(c["cpus"] == [0] and c["threads"] == "1" and c["gpus"] == "" for c in configs)
    assert (tmp_path / "fake" / "suite.toml").read_text() == path.read_text()


def test_slots(tmp_path, monkeypatch, capsys):
    plan = load(tmp_path, HEAD + "resources = { gpus = 0.5, threads = 2 }\n" + ALGORITHM)
    slots = []
    monkeypatch.setattr(
        execute, "run_stack", lambda stack, plan, folder, seen, slot, stop: slots.append(slot) or time.sleep(0.2)
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    submit, workers = execute.local(plan, tmp_path, 9, execute.Stop())
    assert workers == 4 and "4 workers, for 2 GPUs" in capsys.readouterr().out
    for future in [submit(stacks.Stack((run,)), [0]) for run in plan.runs]:
        future.result()
    assert sorted(slots, key=str) == [
        execute.Slot((0, 1), "4"),
        execute.Slot((2, 3), "4"),
        execute.Slot((4, 5), "7"),
        execute.Slot((6, 7), "7"),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert execute.local(plan, tmp_path, 5, execute.Stop())[1] == 5
    out = capsys.readouterr().out
    assert "this machine has none" in out and "5 workers of 2 threads share 8 CPUs" in out


SLOW = HEAD.replace("budget = 10", "budget = 24") + "args.step-s = 0.05\nresources.grace_s = 5\n" + ALGORITHM


def assert_as_undisturbed(path, steps=24):
    """All runs are done, with the values of runs that nothing disturbed, each step logged once."""
    found = results(path)
    assert list(found) == [str(run) for run in suite.load(path).runs]
    for run, (result, metrics, _) in found.items():
        assert json.loads(result) == {"global_step": steps, "eval/return_mean": undisturbed(steps, int(run[-1]))}, run
        assert [json.loads(line)["global_step"] for line in metrics.splitlines()] == list(range(1, steps + 1)), run
    assert {record["state"] for record in records(path).values()} == {"done"}


def test_a_second_request_to_stop_does_not_wait_for_the_update(tmp_path):
    path = write(tmp_path, HEAD.replace("[1, 2]", "[1]").replace('"A", ', "") + ALGORITHM + "args.mode = 'hangs'")
    process = start("run", path)
    wait_until(lambda: rows(path), "rows")
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None and stops(path) == []
    process.send_signal(signal.SIGINT)
    assert Ended(process).rc == 130 and stops(path) == [130]


def test_a_child_that_outlives_its_runner_is_waited_for(tmp_path):
    text = SLOW.replace("[1, 2]", "[1]").replace('"A", ', "")
    path = write(tmp_path, text + "args.mode = 'lingers'")
    process = start("run", path)
    wait_until(lambda: rows(path) > 2, "rows")
    process.kill()
    process.wait()
    end = Ended(start("run", path))
    assert end.rc == 0 and "done: fake/B/seed1" in end.out, end
    assert_as_undisturbed(path)


@pytest.mark.parametrize("number,code", [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_request_to_stop_lets_the_children_checkpoint(number, code, tmp_path):
    path = write(tmp_path, SLOW)
    process = start("run", path, "--workers", 2)
    wait_until(lambda: rows(path, 2) > 6, "rows")
    process.send_signal(number)
    end = Ended(process)
    assert end.rc == code and "2 interrupted | 2 pending, of 4" in end.out and "the same command goes on" in end.out, (
        end
    )
    interrupted = [record for record in records(path).values() if record["state"] == "interrupted"]
    assert [record["reason"] for record in interrupted] == ["stopped", "stopped"] and stops(path) == [75, 75]
    assert Ended(start("run", path, "--workers", 4)).rc == 0
    assert_as_undisturbed(path)
    assert sorted(starts for *_, starts in results(path).values()) == [1, 1, 2, 2]


def test_kill_9_of_the_runner_and_of_children_at_any_moment(tmp_path):
    path, rng = write(tmp_path, SLOW), random.Random(0)
    for _ in range(4):
        process = start("run", path, "--workers", 3)
        before = rows(path)
        with contextlib.suppress(AssertionError):  # it may have nothing left to do
            wait_until(lambda before=before: rows(path) > before, "progress", 5)
        time.sleep(rng.random() * 0.6)
        for record in records(path).values():
            if record["state"] == "running" and record["pid"] and rng.random() < 0.5:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(record["pid"], signal.SIGKILL)
        process.kill()
        process.wait()
    end = Ended(start("run", path, "--workers", 4))
    assert end.rc == 0, end
    assert_as_undisturbed(path)
    assert max(starts for *_, starts in results(path).values()) > 1


def test_children_stop_when_their_runner_is_killed(tmp_path):
    path = write(tmp_path, SLOW)
    process = start("run", path, "--workers", 1)
    wait_until(lambda: rows(path) > 2, "rows")
    process.kill()
    process.wait()
    (record,) = records(path).values()
    wait_until(lambda: ledger.started(record["pid"]) is None, "the end of the child", 5)
    assert rows(path) < 24


def test_two_runners_on_one_folder_share_the_work(tmp_path):
    path = write(tmp_path, SLOW.replace("[1, 2]", "[1, 2, 3, 4]"))
    ends = [Ended(process) for process in [start("run", path, "--workers", 2) for _ in range(2)]]
    assert [end.rc for end in ends] == [0, 0] and all("8 done, of 8" in end.out for end in ends), ends
    assert_as_undisturbed(path)
    assert {starts for *_, starts in results(path).values()} == {1}
    done = [sum(line.startswith("done: ") for line in end.out.splitlines()) for end in ends]
    assert sum(done) == 8 and min(done) > 0


def test_a_runner_goes_on_with_what_another_one_lost(tmp_path):
    path = write(tmp_path, SLOW.replace("[1, 2]", "[1]").replace("24", "90"))
    first = start("run", path, "--workers", 2)
    wait_until(lambda: rows(path, 2) > 4, "rows")
    second = start("run", path, "--workers", 2)
    time.sleep(1)
    first.kill()
    first.wait()
    end = Ended(second)
    assert end.rc == 0 and "2 done, of 2" in end.out, end
    assert_as_undisturbed(path, 90)
    assert {starts for *_, starts in results(path).values()} == {2}


def test_a_script_that_is_stopped_by_somebody_else_goes_on(tmp_path):
    path = write(tmp_path, SLOW.replace("[1, 2]", "[1]").replace('["A", "B"]', '["A"]'))
    process = start("run", path)
    wait_until(lambda: rows(path) > 4, "rows")
    os.kill(next(iter(records(path).values()))["pid"], signal.SIGTERM)
    end = Ended(process)
    assert end.rc == 0 and "interrupted: fake/A/seed1" in end.out and "stopped by somebody (exit 75)" in end.out, end
    assert_as_undisturbed(path)


def test_a_result_that_was_removed_is_made_again(tmp_path):
    path = write(tmp_path, HEAD + ALGORITHM)
    assert Ended(start("run", path)).rc == 0
    gone = next(tmp_path.glob("fake/runs/*/*/*/*"))
    for file in gone.iterdir():
        file.unlink()
    assert Ended(start("run", path)).rc == 0
    assert_as_undisturbed(path, 10)
    assert sorted(record["attempts"] for record in records(path).values()) == [1, 1, 1, 2]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress(terminal, tmp_path):
    path = write(tmp_path, SLOW.replace("24", "70" if terminal else "5"))
    leader, follower = os.openpty()
    options = {"stdout": follower} if terminal else {"stdout": subprocess.PIPE}
    process = subprocess.Popen(
        [*RUN, "run", str(path), "--results", str(tmp_path), "--workers", "4"], text=True, **options
    )
    os.close(follower)
    out = ""
    with contextlib.suppress(OSError):  # how a terminal says that it was closed
        while part := (os.read(leader, 4096).decode() if terminal else process.stdout.read()):
            out += part
    assert process.wait() == 0
    assert ("\x1b[" in out) == terminal and "4 done, of 4" in out and "done: fake/B/seed2 in 0:0" in out
    assert ("% fake/A/seed1  attempt 1, 0:0" in out and " | eta 0:0" in out) == terminal, out


# ---- Trouble with the disk -------------------------------------------------------------------------------------------


def test_results_that_cannot_be_written(tmp_path):
    path = write(tmp_path, HEAD + ALGORITHM)
    (tmp_path / "fake").write_text("")
    end = Ended(start("run", path))
    assert (
        end.rc == 1
        and end.err.startswith(f"error: cannot write to --results {tmp_path}: ")
        and end.err.count("\n") == 1
    ), end


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of `size` bytes; yields a function that gives it another size."""

    def mount(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        return subprocess.run(command, stderr=subprocess.PIPE).returncode == 0

    folder.mkdir()
    if not mount(f"size={size}"):
        pytest.skip("no right to mount a small file system")
    try:
        yield lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_fills_up_costs_no_more_than_the_runs_it_hits(tmp_path):
    path = write(tmp_path, SLOW.replace("0.05", "0.01"))
    with small_disk(tmp_path / "fake", 80_000) as resize:
        assert Ended(start("run", path, "--only", "*/A/seed1")).rc == 0
        before = results(path)
        end = Ended(start("run", path, "--workers", 3))
        assert end.rc == 1 and "Traceback" not in end.err and "No space left on device" in end.out, end
        failing = [run for run in suite.load(path).runs if str(run) not in results(path)]
        assert failing and all(f"failed: {run}: " in end.out for run in failing), end
        assert results(path).items() >= before.items()
        assert resize(10_000_000)
        assert Ended(start("run", path)).rc == 0
        assert_as_undisturbed(path)
        assert not list((tmp_path / "fake" / "ledger").glob(".*"))


def test_a_ledger_that_cannot_be_written(tmp_path):
    """A limit on the size of a file stands in for all causes."""
    path = write(tmp_path, HEAD + ALGORITHM)
    assert Ended(start("run", path, "--only", "*/A/*")).rc == 0
    before = records(path), results(path)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64))}
    end = Ended(start("run", path, **limit))
    assert end.rc == 1 and end.err == "" and "2 done | 2 failed, of 4" in end.out, end
    assert end.out.count("broken: fake/B/seed") == 2 and end.out.count("failed: fake/B/seed") == 2, end
    assert end.out.count("File too large") == 2 * 2 + 1 and (records(path), results(path)) == before


# ---- SLURM and Ray ---------------------------------------------------------------------------------------------------


def test_a_slurm_array_does_each_run_once_and_goes_back_to_the_queue(tmp_path):
    path = write(tmp_path, SLOW + "[algorithms.sweep]\ngrid.clip-coef = [0.1, 0.2]\n")
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sbatch", "scontrol"):
        (tools / name).write_text(f'#!/bin/bash\necho "{name} $@" >> {tmp_path}/calls\n')
        (tools / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    words = "--backend", "slurm", "--workers", 3, "--slurm", "partition=cpu", "time=60"
    dry = Ended(start("run", path, *words, "--dry-run"))
    assert dry.rc == 0 and not (tmp_path / "fake").exists()
    for line in ("array=0-7%3", "partition=cpu", "time=60", "requeue", "signal=B:USR1@120", "cpus-per-task=1"):
        assert f"#SBATCH --{line}\n" in dry.out, dry
    assert Ended(start("run", path, *words, env=environment)).rc == 0
    script = tmp_path / "fake" / "logs" / "slurm.sh"
    assert (tmp_path / "calls").read_text() == f"sbatch {script}\n" and script.read_text() == dry.out[:-1]

    def task(number):
        variables = {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_ARRAY_JOB_ID": "77"}
        return subprocess.Popen(
            ["bash", script], env=environment | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    tasks = [task(number) for number in range(8)]
    wait_until(lambda: rows(path, 8) > 20, "rows")
    tasks[5].send_signal(signal.SIGUSR1)
    ends = [Ended(process) for process in tasks]
    assert [end.rc for end in ends] == [0, 0, 0, 0, 0, 75, 0, 0], ends
    assert (tmp_path / "calls").read_text().splitlines()[1:] == ["scontrol requeue 77_5"]
    assert Ended(task(5)).rc == 0
    assert_as_undisturbed(path)
    some = Ended(start("run", path, *words, "--dry-run", "--retry-failed", "--only", "*/A/*", "x"))
    assert "array=0-3%3\n" in some.out and " --only '*/A/*' x --retry-failed --tasks 4 --task $" in some.out, some
    end = Ended(start("run", path, *words, env=os.environ | {"PATH": "/nowhere"}))
    assert end.rc == 1 and "error: there is no sbatch here" in end.err, end


def sbatch_options(text):
    """As sbatch reads them: words like a shell's."""
    words = [word for line in text.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]
    return dict(word.removeprefix("--").partition("=")[::2] for word in words)


def test_the_script_of_a_dry_run_can_be_submitted_and_a_cancelled_task_stays_cancelled(tmp_path):
    """From folders with spaces; nothing but the printed script is there (USE-09)."""
    results, tools = tmp_path / "my results", tmp_path / "tools"
    path = write(tmp_path, SLOW)
    tools.mkdir()
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/calls\n')
    (tools / "scontrol").chmod(0o755)
    words = "run", path, "--results", results, "--backend", "slurm", "--dry-run"
    dry = Ended(start(*words, "--slurm", "comment=two words", "mail-user=a"))
    assert dry.rc == 0 and not results.exists(), dry
    options = sbatch_options(dry.out)
    assert options["comment"] == "two words" and options["mail-user"] == "a" and options["output"] == "/dev/null"
    script = tmp_path / "job.sh"
    script.write_text(dry.out)
    variables = {"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7", "PATH": f"{tools}:{os.environ['PATH']}"}
    task = subprocess.Popen(["bash", script], env=os.environ | variables, cwd=tmp_path, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
    log = results / "fake" / "logs" / "slurm-7_0.log"
    wait_until(lambda: list(results.glob("fake/runs/*/*/*/*/metrics.jsonl")), "a run of the task")
    task.send_signal(signal.SIGTERM)  # scancel
    end = Ended(task)
    assert end.rc == 75 and not (tmp_path / "calls").exists(), end
    assert "stopped: the same command goes on from here" in log.read_text()
    elsewhere = Ended(start(*words, "--slurm", f"output={results}/%A log"))
    assert sbatch_options(elsewhere.out)["output"] == f"{results}/%A log" and "exec >>" not in elsewhere.out
    for odd in ("a\nb=c", "=x", "a b=c"):
        assert "KEY=VALUE on one line is needed" in Ended(start(*words, "--slurm", odd)).err


def test_an_array_longer_than_slurm_allows(tmp_path):
    plan = load(tmp_path, HEAD.replace("[1, 2]", str(list(range(700)))) + ALGORITHM)
    text = backends.slurm_script(plan, tmp_path, plan.runs, None, (), [])
    assert "--array=0-999\n" in text and "--tasks 1000 --task $SLURM_ARRAY_TASK_ID" in text
    parts = list(itertools.chain(*(plan.runs[i::1000] for i in range(1000))))
    assert len(parts) == 1400 and set(parts) == set(plan.runs)


@pytest.fixture
def cluster(monkeypatch):
    """A Ray cluster of two nodes with one CPU each."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    pytest.importorskip("ray", reason="scripts/run --extra ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.second = cluster.add_node(num_cpus=1, object_store_memory=80_000_000)
    yield cluster
    cluster.shutdown()


def test_ray_on_two_nodes_one_of_which_is_lost(cluster, tmp_path):
    path = write(tmp_path, SLOW.replace("budget = 24", "budget = 80"))  # longer than it takes to lose a node
    command = "run", path, "--backend", "ray", "--ray-address", cluster.address

    def two_at_once():
        return sum(bool(record["state"] == "running" and record["pid"]) for record in records(path).values()) == 2

    process = start(*command)
    wait_until(lambda: two_at_once() and rows(path) > 8, "two runs at once", 60)
    process.send_signal(signal.SIGINT)
    end = Ended(process)
    assert end.rc == 130 and "2 interrupted | 2 pending, of 4" in end.out, end
    process, before = start(*command), rows(path)
    wait_until(lambda: two_at_once() and rows(path) > before + 8, "two runs at once", 60)
    cluster.remove_node(cluster.second, allow_graceful=False)
    end = Ended(process)
    assert end.rc == 0 and "broken: fake/" in end.out and "4 done, of 4" in end.out, end
    assert_as_undisturbed(path, 80)


# ---- The real scripts ------------------------------------------------------------------------------------------------


def test_the_smoke_suite(tmp_path):
    def run(verb):
        command = [*RUN, verb, "smoke", "--results", str(tmp_path)]
        return Ended(subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE), 300)

    end = run("run")
    assert end.rc == 0 and "done: ppo_plr/bigfish/seed1 in" in end.out and end.err == "", end
    runs = suite.load("smoke").runs
    for planned in runs:
        where = board.run_directory(tmp_path / "smoke", planned.id)
        assert json.loads((where / "result.json").read_text())["eval/return_mean"] is not None
        assert len((where / "metrics.jsonl").read_text().splitlines()) == 2
    again = run("run")
    assert again.rc == 0 and again.out == f"smoke: {len(runs)} done, of {len(runs)}\n", again
    end = run("report")
    assert end.rc == 0 and end.out.strip().endswith("smoke/report.md"), end
    assert json.loads((tmp_path / "smoke" / "summary.json").read_text())["suite"] == "smoke"
    assert f"all {len(runs)} runs count" in (tmp_path / "smoke" / "report.md").read_text()
