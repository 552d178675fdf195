"""Runs the runs of a suite: those of one process by `run_stack`, all by `drive`, here by `local`, elsewhere by
backends.py."""

import json
import math
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmark.runner.board import Board, finished, run_directory
from benchmark.runner.ledger import Ledger, outlook, started
from benchmark.runner.stacks import Stack, shapes, take
from benchmark.runner.suite import ROOT

POLL_S, HEARTBEAT_S = 0.5, 30  # between looks at a child; between signs of life in the ledger
LOST = "another machine took a run of its stack"
STOPS = signal.SIGTERM, signal.SIGINT, signal.SIGKILL  # to a child: after its update, at once, without a checkpoint

# Becomes the script itself, when the runner has written its number down. The script is asked to stop when its runner
# dies, whatever the runner died of.
LAUNCHER = """
import ctypes, os, signal, sys
cpus, *command = sys.argv[1:]
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if not os.read(0, 1):
    sys.exit(75)
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
if cpus:
    os.sched_setaffinity(0, map(int, cpus.split(",")))
os.execvp(command[0], command)
"""

# What the last line of a script says, in lower case -> what it wants. Another attempt may find more of it.
WANTS = {"memoryerror": "out of memory", "out of memory": "out of memory", "no space left on device": "disk full"}


class Stop:
    """Counts requests to stop: the first lets children finish their update, the second not, the third kills them."""

    level, number = 0, None

    def __call__(self, number=None, frame=None):
        self.level, self.number = self.level + 1, number

    def install(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's, which stays
                signal.signal(number, self)
        return self


@dataclass(frozen=True)
class Slot:
    cpus: tuple[int, ...] = ()  # empty: all
    gpu: str | None = None  # None: as the runner itself


# ---- One run ---------------------------------------------------------------------------------------------------------


class Memory:
    """Private bytes of each process group of this machine, looked up at most once a second for all threads."""

    lock, when, groups = threading.Lock(), 0.0, Counter()

    @classmethod
    def of(cls, group):
        with cls.lock:
            if time.monotonic() - cls.when > 1:
                cls.when, cls.groups = time.monotonic(), Counter()
                for process in filter(str.isdigit, os.listdir("/proc")):
                    with suppress(OSError):  # it ended meanwhile
                        pgrp = int(Path("/proc", process, "stat").read_text().rpartition(")")[2].split()[2])
                        _, resident, shared, *_ = map(int, Path("/proc", process, "statm").read_text().split())
                        cls.groups[pgrp] += (resident - shared) * os.sysconf("SC_PAGESIZE")
            return cls.groups[group]


def last_line(path):
    """The last line of a log that says something, "" if there is none."""
    if not path.exists():
        return ""
    with open(path, "rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - 10_000))
        lines = log.read().decode(errors="replace").replace("\r", "\n").splitlines()
    said = [line.strip("\u2500\u2502\u256d\u256e\u2570\u256f ") for line in lines if not line.startswith("# attempt ")]
    line = next((line for line in reversed(said) if any(map(str.isalnum, line))), "")
    return "".join(filter(str.isprintable, line))[:500]


def verdict(code, why, done, last):
    """(state, reason, whether another attempt can help) of a child that ended with `code` after we did `why` to it."""
    if done:
        return "done", "", False
    if why is not None:
        ours = why in ("stopped", LOST)
        return ("interrupted", why, why == LOST) if ours else ("failed", why, "GiB" in why)
    if code in (75, 130):
        return "interrupted", f"stopped by somebody (exit {code})", True
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"  # a real-time one
        return "failed", f"killed by {name}" + " (out of memory?)" * (name == "SIGKILL"), True
    for words, want in WANTS.items():
        if words in last.lower():
            return "failed", f"{want} (exit {code})", True
    return "failed", f"exit {code}" if code else "exit 0, but without a result", False


def run_one(run, suite, folder, seen=0, slot=Slot(), stop=None):
    """`run_stack` of a run alone: its record, or None."""
    return run_stack(Stack((run,)), suite, folder, [seen], slot, stop)[0]


def run_stack(stack, suite, folder, seen, slot=Slot(), stop=None):
    """Claims the runs of a stack, starts them, watches their process to its end and records that. Returns their
    records, None for those that are another's.

    Errors: OSError if the ledger or the log cannot be written.
    """
    ledger, records = Ledger(folder), {}
    try:
        for run, attempts in zip(stack.runs, seen):
            record = ledger.claim(run.id, attempts, shlex.join(run.command(folder)))
            records |= {} if record is None else {run: record}
        ended = attempt(stack.only(records), suite, folder, ledger, records, slot, stop or Stop()) if records else {}
    except Exception as error:  # nobody may wait for a run that nobody has in hand
        for run, record in records.items():
            with suppress(OSError):
                ledger.end(run.id, record | {"state": "failed", "reason": f"the runner: {error!r}", "retry": True})
        raise
    return [ended.get(run) for run in stack.runs]


def attempt(stack, suite, folder, ledger, records, slot, stop):
    """`run_stack`, once the runs are ours: {run: record}."""
    resources, logs = suite.resources, folder / "logs"
    for record in records.values():
        outlive(record, resources.grace_s)
    code, why, peak, ended = 0, None, 0, {}
    stack = stack.only([run for run in stack.runs if not finished(folder, run)])
    if stack.runs:
        logs.mkdir(parents=True, exist_ok=True)
        own = stack.command(folder)
        environment = os.environ | {"OMP_NUM_THREADS": str(resources.threads), "PYTHONUNBUFFERED": "1"}
        gpu = slot.gpu if resources.gpus else ""
        environment |= {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        command = [sys.executable, "-ISc", LAUNCHER, ",".join(map(str, slot.cpus)), *own]
        for run in stack.runs:
            how = records[run]["command"] if len(stack.runs) == 1 else f"in {stack.name}.log"
            say(logs / f"{run.id}.log", f"# attempt {records[run]['attempts']} on {records[run]['host']}: {how}")
        if len(stack.runs) > 1:
            say(logs / f"{stack.name}.log", f"# attempt of {len(stack.runs)} runs: {shlex.join(own)}")
        with open(logs / f"{stack.name}.log", "ab", buffering=0) as log:
            child = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
                                     start_new_session=True, bufsize=0)  # fmt: skip
        with child.stdin:
            for run in stack.runs:
                records[run] |= {"pid": child.pid, "pid_started": started(child.pid)}
                ledger.write(run.id, records[run])
            child.stdin.write(b"go")
        try:
            code, why, peak = watch(child, {run: records[run] for run in stack.runs}, ledger, resources, stop)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # what it left behind
    for run, record in records.items():
        if why == LOST and given_up(ledger, run, record):
            continue
        error = own_error(folder, run) if len(stack.runs) > 1 else ""
        if error:
            say(logs / f"{run.id}.log", error)
        said = error or last_line(logs / f"{stack.name if run in stack.runs else run.id}.log")
        state, reason, retry = verdict(1 if error else code, None if error else why, finished(folder, run), said)
        where = run_directory(folder, run.id)
        record |= {"state": state, "reason": reason, "last_line": said * (state != "done"), "ended": time.time(),
                   "retry": retry or (state == "failed" and len(stack.runs) > 1 and not error),  # then alone
                   "heartbeat": time.time(), "peak_gb": round(peak / 2**30, 3),
                   "run_dir": where and str(where.relative_to(folder))}  # fmt: skip
        ledger.end(run.id, record)
        ended[run] = record
    return ended


def say(path, line):
    with open(path, "a") as log:
        log.write(f"{line}\n")


def own_error(folder, run):
    """What ended a run of a stack, and no other one; "" if nothing did."""
    with suppress(OSError, ValueError, TypeError):
        return json.loads((run_directory(folder, run.id) / "status.json").read_text()).get("error", "")
    return ""


def given_up(ledger, run, record):
    """Whether this machine was given up for dead: another one has the run."""
    return (ledger.get(run.id) or record)["attempts"] != record["attempts"]


def outlive(record, grace_s):
    """Waits for the child of a runner that died: it is asked to stop by that death, and killed if it does not."""
    deadline = time.monotonic() + grace_s
    while record["pid"] and started(record["pid"]) == record["pid_started"]:
        if time.monotonic() > deadline:
            with suppress(ProcessLookupError):
                os.killpg(record["pid"], signal.SIGKILL)
        time.sleep(0.1)


def watch(child, records, ledger, resources, stop):
    """Waits for the end of a child within its limits, with a heartbeat of its runs' records. Returns (exit code, why we
    ended it, bytes)."""
    begun, sent, why, deadline, peak = time.monotonic(), 0, None, None, 0
    beat = begun + HEARTBEAT_S
    memory_gb, timeout_h = (limit * len(records) for limit in (resources.memory_gb, resources.timeout_h))
    while True:
        now = time.monotonic()
        if now >= beat:
            beat = now + HEARTBEAT_S
            for run, record in records.items():
                try:
                    if given_up(ledger, run, record):
                        why, deadline = LOST, -math.inf
                    else:
                        ledger.write(run.id, record | {"heartbeat": time.time()})
                except OSError as error:
                    print(f"warning: {run}: no heartbeat: {error}", file=sys.stderr)
        used = Memory.of(child.pid)
        peak, level = max(peak, used), stop.level
        if why is None and level:
            why = "stopped"
        elif why is None and used > memory_gb * 2**30:
            why, deadline = f"used {used / 2**30:.1f} GiB, more than memory_gb = {memory_gb}", -math.inf
        elif why is None and now - begun > timeout_h * 3600:
            why = f"not finished after timeout_h = {timeout_h:g}"
        if why is not None:
            deadline = deadline or now + resources.grace_s
            level = max(level, 1 + (now > deadline) + (now > deadline + 30))
        for number in STOPS[sent:level]:
            child.send_signal(number)
        sent = max(sent, min(level, 3))
        with suppress(subprocess.TimeoutExpired):
            return child.wait(POLL_S), why, peak


# ---- Many runs -------------------------------------------------------------------------------------------------------


def local(suite, folder, workers, stop, bind=True):
    """(submit, number of workers) for `drive`: threads of this process, each with its own GPUs and (`bind`) CPUs."""
    share, threads, cpus = suite.resources.gpus, suite.resources.threads, sorted(os.sched_getaffinity(0))
    found = ",".join(sorted(p.name[6:] for p in Path("/dev").glob("nvidia[0-9]*")))
    gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", found).split(",") if gpu and share]
    per_gpu, per_run = int(max(1, 1 / share)) if share else 1, max(1, math.ceil(share))
    workers = workers or max(1, len(cpus) // threads)
    if gpus and workers > len(gpus) // per_run * per_gpu:
        workers = max(1, len(gpus) // per_run * per_gpu)
        print(f"note: {workers} workers, for {len(gpus)} GPUs and gpus = {share} a run")
    elif share and not gpus:
        print(f"note: the suite wants gpus = {share} a run and this machine has none: --device auto is the CPU")
    if workers * threads > len(cpus):
        print(f"note: {workers} workers of {threads} threads share {len(cpus)} CPUs: each run may use all of them")
    slots = queue.SimpleQueue()
    for i in range(workers):
        own = cpus[i * threads : (i + 1) * threads] if bind and workers * threads <= len(cpus) else ()
        first = i // per_gpu * per_run
        slots.put(Slot(tuple(own), ",".join(gpus[first : first + per_run]) if gpus else None))
    pool = ThreadPoolExecutor(workers)

    def task(stack, seen):
        slot = slots.get()
        try:
            return run_stack(stack, suite, folder, seen, slot, stop)
        finally:
            slots.put(slot)

    return lambda stack, seen: pool.submit(task, stack, seen), workers


def drive(suite, folder, runs, submit, capacity, stop, retry_failed=False, share=True, fail_fast=False,
          on_stop=lambda: None):  # fmt: skip
    """Brings `runs` to their end: done, or failed where another attempt cannot help. Returns the program's exit code.

    `submit(stack, seen) -> future of run_stack`. With `share` it also waits for the runs that other processes have in
    hand, and goes on with those that they lose. With `fail_fast` it stops when the first of its runs has failed.
    """
    ledger, board = Ledger(folder), Board(suite, folder, runs)
    records = ledger.records()
    seen = {run: (records.get(run.id) or {"attempts": 0})["attempts"] for run in runs}
    todo, elsewhere, futures, tries, stopped, look = deque(), set(), {}, Counter(), 0, 0.0
    for run in runs:
        record = records.get(run.id)
        state = outlook(record, retry_failed)
        if state == "open" or (state == "closed" and (record["state"] == "done") != finished(folder, run)):
            todo.append(run)
        elif state == "held":
            elsewhere.add(run)
    shaped = shapes(todo) if suite.resources.stack > 1 else {}
    while futures or (not stop.level and (todo or (elsewhere and share))):
        while todo and len(futures) < capacity and not stop.level:
            stack = take(todo, shaped, suite.resources.stack)
            futures[submit(stack, [seen[run] for run in stack.runs])] = stack
        if stop.level > stopped:
            stopped = stop.level
            on_stop()
        for future in wait(futures, POLL_S, FIRST_COMPLETED).done if futures else time.sleep(POLL_S) or ():
            stack, error = futures.pop(future), future.exception()
            what = f"in {folder}: {error}" if isinstance(error, OSError) else " ".join(str(error).split())[-500:]
            broken = {"state": "broken", "reason": what, "retry": True}
            for run, record in zip(stack.runs, [broken] * len(stack.runs) if error else future.result()):
                if record is None:
                    elsewhere.add(run)
                    continue
                board.say(run, record)
                tries[run] += 1
                if isinstance(error, OSError) or (error and tries[run] > suite.resources.retries):
                    board.broken[run.id] = what
                elif error:
                    elsewhere.add(run)  # a node was lost: the ledger knows whether the run was, too
                    continue
                elif record["retry"] and tries[run] <= suite.resources.retries:
                    seen[run] = record["attempts"]
                    todo.append(run)
                    if record["state"] == "failed":  # perhaps by its stack's fault, perhaps the stack by its: alone
                        shaped.pop(run, None)
                    continue
                if fail_fast and not stop.level and record["state"] in ("failed", "broken"):
                    stop()
        if elsewhere and (begun := time.monotonic()) > look:
            records = ledger.records()
            look = time.monotonic() + max(1, 20 * (time.monotonic() - begun))
            for run in list(elsewhere):
                record = records.get(run.id)
                state = outlook(record)
                if state != "held":
                    elsewhere.discard(run)
                if state == "open" and (record is None or record["state"] != "failed"):  # it failed for the other one
                    seen[run] = record["attempts"] if record else 0
                    todo.append(run)
        board.show(ledger)
    return board.summary(ledger, stop)
