"""What the runner says: a live table on a terminal, a line now and then elsewhere, and who failed at the end."""

import glob
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from benchmark.runner.ledger import alive

REFRESH_S, LINE_S = 2, 30  # on a terminal, elsewhere


def run_directories(folder, run_id):
    """Where the script keeps the run: nowhere before it has begun; two folders, the last one begun first, if its
    defaults changed meanwhile, so that it began anew."""
    found = glob.glob(f"{glob.escape(str(folder))}/runs/{run_id}/*/*/*/config.json")
    return [Path(config).parent for config in sorted(found, key=os.path.getmtime, reverse=True)]


def run_directory(folder, run_id):
    return next(iter(run_directories(folder, run_id)), None)


def finished(folder, run):
    """Whether its result is there."""
    with suppress(OSError, ValueError, TypeError):
        return "global_step" in json.loads((run_directory(folder, run.id) / "result.json").read_text())
    return False


class Board:
    """The state of `runs` by the ledger, so that it includes what other machines do."""

    def __init__(self, suite, folder, runs):
        self.suite, self.folder, self.runs = suite, folder, runs
        self.broken = {}  # run id -> why it could not be run or written down
        self.tty, self.drawn, self.next, self.first = sys.stdout.isatty(), 0, 0.0, None

    def states(self, records):
        """{state: [(run, record)]}. A run whose runner died counts as interrupted."""
        states = {state: [] for state in ("done", "running", "failed", "interrupted", "pending")}
        for run in self.runs:
            broken = run.id in self.broken
            record = {"state": "failed", "reason": self.broken[run.id]} if broken else records.get(run.id)
            state = record["state"] if record else "pending"
            states["interrupted" if state == "running" and not alive(record) else state].append((run, record))
        return states

    def progress(self, run):
        """The share of its steps that a run has done."""
        with suppress(OSError, ValueError, TypeError):  # not begun, or just being written
            status = json.loads((run_directory(self.folder, run.id) / "status.json").read_text())
            return min(1, status["step"] / run.budget)
        return 0.0

    def lines(self, records):
        """The summary line, and a line for each run that is under way."""
        states = self.states(records)
        shares = {run: self.progress(run) for run, _ in states["running"]}
        now, ended = time.time(), len(states["done"]) + len(states["failed"]) + sum(shares.values())
        self.first = self.first or (now, ended)
        gained = ended - self.first[1]
        rest = len(self.runs) - ended
        eta = (now - self.first[0]) / gained * rest if gained > 0 and rest else None
        counts = " | ".join(f"{len(them)} {state}" for state, them in states.items() if them or state == "done")
        left = "" if eta is None else f" | eta {timedelta(seconds=int(eta))}"
        yield f"{self.suite.name}: {counts}, of {len(self.runs)}{left}"
        for run, record in states["running"]:
            age = timedelta(seconds=int(now - record["started"]))
            yield f"  {shares[run]:4.0%} {run}  attempt {record['attempts']}, {age} on {record['host']}"

    def say(self, run, record):
        """A line about a run that has ended."""
        took = f" in {timedelta(seconds=int(record['ended'] - record['started']))}" if "ended" in record else ""
        self.put([f"{record['state']}: {run}{took}{': ' * bool(record['reason'])}{record['reason']}"])

    def put(self, lines, erase=0):
        """Prints in the place of the live table; `erase` says how many lines to print over the next time."""
        with suppress(OSError):  # nobody reads any more, and the runs are worth more
            print(f"\x1b[{self.drawn}A\x1b[J" if self.drawn else "", "\n".join(lines), sep="", flush=True)
        self.drawn = erase

    def show(self, ledger):
        """The live table of a terminal, or its first line."""
        if time.monotonic() >= self.next or (self.tty and not self.drawn):
            self.next = time.monotonic() + (REFRESH_S if self.tty else LINE_S)
            columns, height = shutil.get_terminal_size()
            lines = [line[: columns - 1] for line in self.lines(ledger.records())]
            lines = lines[: height - 2 if self.tty else 1]
            self.put(lines, erase=len(lines) * self.tty)

    def summary(self, ledger, stop=None):
        """Prints all states and what failed. Returns 0 if all is done, 130 or 75 if stopped, else 1."""
        records = ledger.records()
        states, lines = self.states(records), [*self.lines(records)]
        for run, record in states["failed"]:
            lines.append(f"failed: {run}: {record['reason']}")
            lines += [f"  last line: {record['last_line']}"] if record.get("last_line") else []
            lines.append(f"  log:       {self.folder / 'logs' / run.id}.log")
            lines.append(f"  command:   {shlex.join(run.command(self.folder))}")
        if causes := Counter(record["reason"] for _, record in states["failed"]).most_common(10):
            lines.append("failed, by reason: " + "; ".join(f"{count} {reason}" for reason, count in causes))
        if stop is not None and stop.level:
            lines.append("stopped: the same command goes on from here")
        self.put(lines)
        if stop is not None and stop.number:
            return 130 if stop.number == signal.SIGINT else 75
        return int(len(states["done"]) < len(self.runs))
