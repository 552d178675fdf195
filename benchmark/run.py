"""Plans, runs, resumes, collects and reports the suites in benchmark/suites/ (or a TOML file of yours).

    scripts/run benchmark/run.py plan cartpole                       # every run and its command; wrong arguments
    scripts/run benchmark/run.py run cartpole --workers 2            # again after any end: goes on
    scripts/run benchmark/run.py status cartpole
    scripts/run --extra benchmark benchmark/run.py report cartpole   # collects, and writes report.md and report.html
    scripts/run --extra benchmark benchmark/run.py claims what_matters_claims   # its verdicts, so far
    scripts/run --extra benchmark benchmark/run.py publish cartpole  # copies that to benchmark/results/cartpole
    scripts/run --extra benchmark benchmark/run.py tables --write    # the READMEs' tables, from benchmark/results

Everything is below --results: ledger, logs, runs, tables, report; benchmark/results holds what is published alone. Any
number of runners, on any machines that share that folder, may work on one suite at the same time. Exit code: 0 all
done, 1 something failed, 130 after Ctrl-C.
"""

import hashlib
import importlib
import json
import os
import re
import shlex
import signal
import sys
import time
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Literal

sys.path[0] = str(Path(__file__).resolve().parents[1])

import tyro  # noqa: E402  after the path, from which the rest of this package is found

from benchmark.runner import backends, execute, suite  # noqa: E402
from benchmark.runner.board import Board, run_directory  # noqa: E402
from benchmark.runner.ledger import HOST, Ledger, outlook  # noqa: E402


@dataclass
class Common:
    suite: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SUITE")]  # its name, or path of a TOML file
    results: Path = suite.RESULTS  # folder with a folder for each suite

    def __post_init__(self):
        if self.results.resolve() == suite.PUBLISHED:
            raise SystemExit(f"error: --results {self.results} holds what is published: name another folder")
        self.plan = suite.load(self.suite)
        self.folder = self.results / self.plan.name


@dataclass
class Chosen(Common):
    only: tuple[str, ...] = ()  # runs by id, name or pattern, as in 'plr/*/seed1'; others are left alone

    def __post_init__(self):
        super().__post_init__()
        self.runs = [run for run in self.plan.runs if not self.only or self.fits(run)]
        if not self.runs:
            raise SystemExit(f"error: --only {' '.join(self.only)} fits no run, as for example {self.plan.runs[0]}")

    def fits(self, run):
        return any(word in (run.id, str(run)) or fnmatch(str(run), word) for word in self.only)


@dataclass
class Plan(Chosen):
    """Prints every run and its command. Exit code 1 if an argument is wrong."""

    def main(self):
        lines = [f"{run}\n  {shlex.join(run.command(self.folder))}" for run in self.runs]
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ... | head
        print("\n".join([*lines, *self.plan.notes]))
        check(self.runs)
        steps = sum(run.budget for run in self.runs)
        print(f"{self.plan.name}: {len(self.runs)} runs of {steps:,} steps in all, no wrong argument")
        return 0


@dataclass
class Execute(Chosen):
    retry_failed: bool = False  # also runs that failed by an error of their own


@dataclass
class Run(Execute):
    """Runs what is not done: here, as a SLURM array or on a Ray cluster. Each run is bound to CPUs of its own: a second
    runner on the same machine should be given other ones (taskset -c 4-7 scripts/run ...)."""

    workers: int | None = None  # runs at the same time; default: as many as the CPUs (and GPUs) carry
    backend: Literal["local", "slurm", "ray"] = "local"
    dry_run: bool = False  # with slurm: print the script, as it could be submitted, and write and submit nothing
    slurm: tuple[str, ...] = ()  # further #SBATCH options, as in partition=gpu time=10:00:00
    ray_address: str | None = None  # of the cluster; default: the one around here, or a new one on this machine
    fail_fast: bool = False  # stop when a run has failed; the others leave checkpoints
    rerun_stale: bool = False  # first move what other versions of the scripts left to stale/: those runs begin anew

    def __post_init__(self):
        super().__post_init__()
        if self.workers is not None and self.workers < 1:
            raise SystemExit(f"error: --workers {self.workers}: at least 1 is needed")
        serves = {"dry_run": ("slurm",), "slurm": ("slurm",), "ray_address": ("ray",), "fail_fast": ("local", "ray")}
        for flag, kinds in serves.items():
            if getattr(self, flag) and self.backend not in kinds:
                flag = suite.dashed(flag)
                raise SystemExit(f"error: --{flag} is for --backend {' or '.join(kinds)}, and this is {self.backend}")

        if wrong := [pair for pair in self.slurm if not re.fullmatch(r"[a-z-]+(=.+)?", pair)]:
            raise SystemExit(f"error: --slurm {wrong[0]!r}: KEY=VALUE on one line is needed, as in partition=gpu")

    def main(self):
        if self.backend == "slurm":
            words = ["--only", *self.only] * bool(self.only) + ["--retry-failed"] * self.retry_failed
            script = backends.slurm_script(self.plan, self.folder, self.runs, self.workers, self.slurm, words)
            if self.dry_run:
                print(script)
                return 0
        check(self.runs)
        for note in self.plan.notes:
            print(note)
        prepare(self.plan, self.folder)
        if self.rerun_stale:
            set_aside(self.folder, self.runs)
        if self.backend == "slurm":
            return backends.submit_slurm(script, self.folder)
        stop, on_stop = execute.Stop(), []
        if self.backend == "local":
            submit, workers = execute.local(self.plan, self.folder, self.workers, stop)
        else:
            submit, workers, *on_stop = backends.ray_backend(self.plan, self.folder, self.workers, self.ray_address)
        stop.install()  # after Ray, which has handlers of its own
        return execute.drive(
            self.plan, self.folder, self.runs, submit, workers, stop, self.retry_failed, True, self.fail_fast, *on_stop
        )


@dataclass
class Worker(Execute):
    """Does every `tasks`-th run, from number `task` on, one after the other: a task of a SLURM array."""

    task: int = 0
    tasks: int = 1

    def main(self):
        if not 0 <= self.task < self.tasks:
            raise SystemExit(f"error: --task {self.task} --tasks {self.tasks}: tasks are numbered from 0 to tasks - 1")
        stop, runs = execute.Stop().install(), self.runs[self.task :: self.tasks]
        prepare(self.plan, self.folder)
        submit, _ = execute.local(self.plan, self.folder, 1, stop, bind=False)  # SLURM has bound it
        return execute.drive(self.plan, self.folder, runs, submit, 1, stop, self.retry_failed, share=False)


@dataclass
class Status(Chosen):
    """Says what is done, under way, failed and to be done."""

    def main(self):
        if not (self.folder / "ledger").is_dir():
            print(f"{self.plan.name}: nothing was run yet in {self.folder}")
            return 0
        Board(self.plan, self.folder, self.runs).summary(Ledger(self.folder))
        return 0


@dataclass
class Collect(Common):
    """Gathers the runs into metrics.parquet, runs.parquet and evals.parquet; reads only what is new."""

    from_tb: Path | None = None  # also import TensorBoard files from this folder, such as those of CleanRL's scripts
    wandb: str | None = None  # also send the runs to this Weights & Biases project (WANDB_MODE=offline works)

    def main(self):
        collect = extra("collect")
        for note in collect.collect(self.plan, self.results, self.from_tb):
            print(f"note: {note}")
        if self.wandb:
            try:
                collect.export_wandb(self.plan, self.results, self.wandb)
            except collect.Damaged as error:
                raise SystemExit(f"error: {error}: `report` makes it anew") from None
        return 0


@dataclass
class Report(Collect):
    """Collects, then writes report.md, report.html, figures and summary.json. Exit code 1 if something got worse."""

    against: Path | None = None  # summary.json of an earlier report: says where this one is worse
    metric: str | None = None  # another one than the suite's
    direction: Literal["", "max", "min"] = ""  # of that metric, where its name does not say it

    def main(self):
        super().main()
        summary = extra("report").report(self.plan, self.results, self.against, self.metric, self.direction)
        print(f"{self.folder / 'report.md'}")
        return int(any(row["what"] in ("worse", "missing") for row in summary.get("regressions", ())))


@dataclass
class Claims(Common):
    """Collects, then prints the verdicts on the suite's [[claims]]."""

    def main(self):
        if not self.plan.claims:
            raise SystemExit(f"error: {self.plan.name} has no [[claims]]")
        report, choices = extra("report"), extra("choices")
        extra("collect").collect(self.plan, self.results)
        study = report.Study(self.plan, self.folder, self.plan.metric, self.plan.direction)
        print(report.pages.markdown(choices.verdicts(choices.judge(study), report.number)))
        return 0


@dataclass
class Publish(Common):
    """Copies the suite's report to benchmark/results. Refused if fewer runs count than in the one that stands there."""

    published: Path = suite.PUBLISHED
    fewer: bool = False  # even then

    def main(self):
        for note in extra("publish").publish(self.plan, self.results, self.published, self.fewer):
            print(f"note: {note}")
        print(self.published / self.plan.name / "report.md")
        return 0


@dataclass
class Remake:
    """Makes report.md and the figures of a published report again, from the numbers beside them."""

    suite: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SUITE")]  # its name
    published: Path = suite.PUBLISHED

    def main(self):
        print(extra("publish").remake(self.suite, self.published) / "report.md")
        return 0


@dataclass
class Tables:
    """Prints the tables of the READMEs, made from what is published; --write puts them there."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME ...]")] = ()  # default: all
    write: bool = False  # into README.md, algos/, benchmark/ and curricula/README.md
    published: Path = suite.PUBLISHED

    def main(self):
        tables = extra("tables")
        made = tables.tables(self.published)
        if strange := [name for name in self.names if name not in made]:
            raise SystemExit(f"error: there is no table {strange[0]}, only {', '.join(made)}")
        if self.write:
            print(f"changed: {', '.join(tables.write(made)) or 'none'}")
        for name in () if self.write else self.names or made:
            print(f"{name}\n\n{made[name]}")
        return 0


def extra(name):
    """The module benchmark.runner.<name>, whose packages are an extra."""
    try:
        return importlib.import_module(f"benchmark.runner.{name}")
    except ImportError as error:
        raise SystemExit(f"error: {error}: scripts/run --extra benchmark {shlex.join(sys.argv)}") from None


def check(runs):
    """Ends the program if a command is wrong, before anything was started. Each script is imported for its Args."""
    own, scripts = suite.ROOT / "algos", {run.script for run in runs}
    if strange := sorted(s for s in scripts if not (suite.ROOT / s).resolve().is_relative_to(own)):
        print(f"note: runs code from outside algos/, to read its arguments: {', '.join(strange)}", flush=True)
    faults = suite.check(runs)
    for fault, its_runs in faults.items():
        print(f"error: {len(its_runs)} runs, the first is {its_runs[0]}: {fault}", file=sys.stderr)
    if faults:
        raise SystemExit(1)


def prepare(plan, folder):
    """Makes the results folder, with the suite as it is now."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text, path = plan.path.read_text(), folder / "suite.toml"
        if not path.exists() or path.read_text() != text:
            temporary = path.with_name(f".suite.toml.{HOST}.{os.getpid()}")
            temporary.write_text(text)
            temporary.replace(path)
        strangers = Ledger(folder).records().keys() - {run.id for run in plan.runs}
    except OSError as error:
        raise SystemExit(f"error: cannot write to --results {folder.parent}: {error}") from None
    if strangers:
        print(f"note: {len(strangers)} runs in {folder} are not part of the suite as it is now: they stay, unused")


def set_aside(folder, runs):
    """Moves what runs by another version of their script left, and opens these runs. Nothing that is in hand."""
    now = {s: hashlib.sha256((suite.ROOT / s).read_bytes()).hexdigest() for s in {run.script for run in runs}}
    ledger, moved = Ledger(folder), 0
    records = ledger.records()
    for run in runs:
        record, where = records.get(run.id), run_directory(folder, run.id)
        if where is not None and record is not None and outlook(record) != "held":
            made = json.loads((where / "config.json").read_text()).get("script_sha256")
            if made not in (None, now[run.script]):
                (folder / "stale").mkdir(exist_ok=True)
                (folder / "runs" / run.id).rename(folder / "stale" / f"{run.id}-{made[:8]}-{time.time():.0f}")
                ledger.write(run.id, record | {"state": "interrupted", "reason": "its script has changed"})
                moved += 1
    print(f"note: {moved} runs by another version of their script begin anew; {folder / 'stale'} has what they left")


if __name__ == "__main__":
    Command = Plan | Run | Status | Worker | Collect | Report | Claims | Publish | Remake | Tables
    sys.stdout.reconfigure(errors="replace")  # what a script said may not be of the terminal's alphabet
    try:
        sys.exit(tyro.cli(Annotated[Command, tyro.conf.OmitSubcommandPrefixes], description=__doc__).main())
    except KeyboardInterrupt:  # before a runner takes it for its runs
        sys.exit(130)
