"""The ledger of a suite's runs: a file per run in a folder that any number of processes on any machines share."""

import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

HOST = socket.gethostname()
PLACE = Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")  # of our pids
STALE_S = 600  # a machine that has not given a sign of life for so long has lost its runs
STATES = "running", "done", "failed", "interrupted"
FIELDS = {"attempts": int, "command": str | list, "host": str, "place": str, "started": int | float,
          "heartbeat": int | float, "runner": int | None, "pid": int | None, "reason": str | None,
          "retry": bool | None, "last_line": str | None}  # of every record; what is missing is None  # fmt: skip
DAMAGED = {"state": "interrupted", "reason": "its entry was damaged", "attempts": 0, "command": "", "host": HOST,
           "place": PLACE, "pid": None, "runner": None, "runner_started": 0, "started": 0, "heartbeat": 0}  # fmt: skip


def started(pid):
    """When a process of this machine began (clock ticks after the boot): tells it from a later one with its number.
    None: it has ended."""
    with suppress(OSError, TypeError):
        fields = Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None


def alive(record):
    """Whether the runner that wrote it still has the run in hand: here its process tells, elsewhere its heartbeat."""
    if record["place"] == PLACE:
        return started(record["runner"]) == record["runner_started"]
    return time.time() - record["heartbeat"] < STALE_S


def outlook(record, retry_failed=False):
    """ "open": a run that may be started; "held": somebody has it in hand; "closed": it ended, for good."""
    if record is None or record["state"] == "interrupted":
        return "open"
    if record["state"] == "running":
        return "held" if alive(record) else "open"
    return "open" if record["state"] == "failed" and (retry_failed or record["retry"]) else "closed"


def read_record(path):
    """The record in a file, or None. One that cannot be read (the machine lost power), or that is of another shape, is
    that of a dead runner."""
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return DAMAGED
    right = isinstance(record, dict) and record.get("state") in STATES
    return record if right and all(isinstance(record.get(key), kind) for key, kind in FIELDS.items()) else DAMAGED


class Ledger:
    """Records {"state": "running" | "done" | "failed" | "interrupted", "reason", "last_line", "command", "attempts",
    "host", "pid", "heartbeat", "started", "ended", ...} by run id; a run without one is pending.

    Attempt n belongs to whoever creates the file claims/<id>.<n>, which only one can. An attempt whose runner died is
    followed by the next one. So nothing has to be released, and no clock or lock decides.
    """

    def __init__(self, folder):
        self.folder, self.claims, self.known = folder / "ledger", folder / "ledger" / "claims", {}
        self.claims.mkdir(parents=True, exist_ok=True)

    def get(self, run_id):
        return read_record(self.folder / f"{run_id}.json")

    def records(self):
        """{run id: record}; reads only what changed since the last call."""
        for entry in os.scandir(self.folder):
            if entry.name.endswith(".json"):
                stamp = entry.stat().st_mtime_ns, entry.inode()
                if self.known.get(entry.name, (None,))[0] != stamp:
                    self.known[entry.name] = stamp, read_record(Path(entry.path))
        return {name[:-5]: record for name, (_, record) in self.known.items() if record is not None}

    def claim(self, run_id, seen, command):
        """The record of a new attempt, now the caller's own; None if others went on since attempt number `seen`.

        Its pid is that of the last child, which may outlive its runner for a while, until the next one is started.
        """
        me = {"host": HOST, "place": PLACE, "runner": os.getpid(), "runner_started": started(os.getpid())}
        before, attempt = self.get(run_id) or {}, seen + 1
        child = {key: before.get(key) if before.get("place") == PLACE else None for key in ("pid", "pid_started")}
        record = {"state": "running", "command": command, "started": time.time()} | child | me
        while (self.get(run_id) or {"attempts": 0})["attempts"] == seen:
            record |= {"attempts": attempt, "heartbeat": time.time()}
            claim = self.claims / f"{run_id}.{attempt}"
            try:
                self.write(run_id, record, os.link, claim)
            except FileExistsError:
                other = read_record(claim)
                if other is None or alive(other):
                    return None
                attempt += 1  # it died between its claim and its first entry
                continue
            if (self.get(run_id) or {"attempts": 0})["attempts"] == seen:
                self.write(run_id, record)
                return record
        return None

    def write(self, run_id, record, put=os.replace, path=None):
        """Writes a record as a whole. Errors: OSError, and what was there before is intact."""
        temporary = self.folder / f".{run_id}.{HOST}.{threading.get_native_id()}"
        try:
            temporary.write_text(json.dumps(record))
            put(temporary, path or self.folder / f"{run_id}.json")
        finally:
            temporary.unlink(missing_ok=True)

    def end(self, run_id, record):
        """The last entry of an attempt. Claims of a finished run are of no further use."""
        self.write(run_id, record)
        if record["state"] == "done":
            for claim in self.claims.glob(f"{run_id}.*"):
                claim.unlink(missing_ok=True)
