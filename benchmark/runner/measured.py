"""What the programs of benchmark/speed leave: their tables, printed and, with --output, written as JSON. Of the files
in benchmark/results/speed, `benchmark/run.py tables` makes the tables of the READMEs."""

import json
import os
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command():
    """This program as it was called, without --output."""
    words, kept = sys.argv[1:], []
    while words:
        word = words.pop(0)
        if word == "--output":
            words = words[1:]
        elif not word.startswith("--output="):
            kept.append(word)
    return shlex.join(["python", os.path.relpath(Path(sys.argv[0]).resolve(), ROOT), *kept])


def origin():
    """Commit, whether its code was changed, and the machine."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    changed = " with changes" * bool(git("status", "--porcelain", "--", "*.py"))
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    cores, model = len(os.sched_getaffinity(0)), models[0].split(":")[1].strip() if models else "an unknown CPU"
    commit = git("rev-parse", "--short=7", "HEAD") or "unknown"
    return f"commit {commit}{changed}, {cores} core{'s' * (cores > 1)} of {model}, torch {version('torch')}"


def finish(tables, output=None, note=""):
    """Prints {name: (header, rows of texts)}, and writes them to `output` with what they were measured by."""
    for header, rows in tables.values():
        print("\n" + "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)), flush=True)
    if output:
        said = f"`{command()}`, {origin()}{'; ' * bool(note)}{note}."
        found = {name: {"header": header, "rows": rows, "note": said} for name, (header, rows) in tables.items()}
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
