"""Gathers the runs of a suite into tables in long form, and those of others from their TensorBoard files.

    <results>/<suite>/runs.parquet      a row per run: state, steps, time, speed, arguments, commit, versions, host
    <results>/<suite>/metrics.parquet/  a row per point: run, algorithm, env_id, seed, global_step, wall_s, key, value
    <results>/<suite>/evals.parquet/    a row per evaluation episode

The last two are folders of parts, which pandas and polars read like one file. A part of finished runs is written once
and tells in its metadata whose files it holds and as of when, so that the next collect reads only what is new; the rows
of unfinished runs stand in `part-open`, written anew each time. A part is dropped, and its runs read again, when a file
of one of them has changed.
"""

import fcntl
import hashlib
import json
import math
import os
import re
from collections import defaultdict
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmark.runner.board import run_directories
from benchmark.runner.ledger import alive, read_record
from benchmark.runner.suite import RESULTS

TABLES = ("evals.parquet", "metrics.parquet")
PART_ROWS = 2_000_000  # points in a part: what collect keeps in memory
NAME = pa.dictionary(pa.int32(), pa.string())
RUN = {"suite": NAME, "algorithm": NAME, "env_id": NAME, "seed": pa.int64(), "run_id": NAME}
METRICS = RUN | {"key": NAME, "global_step": pa.int64(), "wall_s": pa.float64(), "value": pa.float64()}
EPISODE = {"global_step": pa.int64(), "split": NAME, "level": pa.string(), "return": pa.float64(),
           "length": pa.float64(), "solved": pa.bool_(), "other_json": pa.string()}  # fmt: skip
TEXTS = ("run_id", "suite", "algorithm", "env_id", "source", "state", "reason", "last_line", "command", "note", "host",
         "device", "git_commit", "script_sha256", "args_json", "versions_json", "keys_json", "path",
         "mark")  # fmt: skip
RUNS = dict.fromkeys(TEXTS, pa.string()) | {"git_dirty": pa.bool_()}
RUNS |= dict.fromkeys(("seed", "attempts", "final_step", "dead_steps", "batch_size", "damaged_lines"), pa.int64())
RUNS |= dict.fromkeys(("wall_s", "sps_median", "started"), pa.float64())
UNREADABLE = (OSError, ValueError, RecursionError)  # what a file can do to its reader
FROM_METRICS = ("final_step", "dead_steps", "wall_s", "sps_median", "keys_json", "damaged_lines")


def number(value):
    return float(value) if isinstance(value, int | float) and abs(value) < 2**63 else None


def whole(value):
    return None if number(value) is None else int(value)


def truth(value):
    return None if value is None else bool(value)


def text(value):
    if value is None:
        return None
    joined = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return joined.encode(errors="replace").decode()  # JSON and file names may hold half a character


EPISODE_VALUES = {"global_step": int, "split": text, "level": text, "return": number, "length": number,
                  "solved": truth}  # fmt: skip


def read_json(path, notes):
    """The table in a file; an empty one if it is not there yet, or damaged, which goes to the notes."""
    try:
        found = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return {}
    except UNREADABLE as error:
        found = error
    if not isinstance(found, dict):
        notes.append(f"{path} is left out: {found if isinstance(found, Exception) else 'it holds no table'}")
        return {}
    return found


def read_rows(path):
    """Rows of a JSON-lines file, and the number of lines that are none (damaged, or the last one half written)."""
    lines = [line for line in Path(path).read_bytes().splitlines() if line.strip()] if os.path.exists(path) else []
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")  # one call is much quicker than one a line
    except UNREADABLE:
        rows = [parse(line) for line in lines]
    rows = [row for row in rows if isinstance(row, dict) and isinstance(step := row.get("global_step"), int)
            and 0 <= step < 2**63]  # fmt: skip
    return rows, len(lines) - len(rows)


def parse(line):
    try:
        return json.loads(line)
    except UNREADABLE:
        return None


def series(rows):
    """key -> steps, wall seconds and values, in the order of the steps; a step that was logged twice counts once."""
    columns = defaultdict(lambda: ([], [], []))
    for row in rows:
        step, wall = row["global_step"], row.get("wall_s", math.nan)
        for key, value in row.items():
            if value is None and not key.startswith("charts/"):  # there it only says that no episode has ended
                value = math.nan
            if isinstance(value, int | float) and key not in ("global_step", "wall_s"):
                steps, walls, values = columns[key]
                steps.append(step)
                walls.append(wall)
                values.append(value)
    return {text(key): last_of_each_step(*map(np.asarray, column)) for key, column in columns.items()}


def last_of_each_step(steps, walls, values):
    order = np.argsort(steps, kind="stable")
    order = order[np.append(np.diff(steps[order]) > 0, True)]
    return steps[order], walls[order].astype(float), values[order].astype(float)


# ---- Runs of a suite ------------------------------------------------------------------------------------------------


def stamp(*paths):
    """Size and time of each file: equal as long as none has been written to."""
    marks = []
    for path in paths:
        try:
            stat = os.stat(path)
            marks.append(f"{stat.st_size}-{stat.st_mtime_ns}")
        except FileNotFoundError:
            marks.append("0")
    return " ".join(marks)


def describe(run, suite, folder, old):
    """The row of a planned run in runs.parquet; what comes from its metrics is that of the last collect, or missing."""
    found = run_directories(folder, run.id)
    path, notes = str(found[0]) if found else "", []
    claim = read_record(folder / "ledger" / f"{run.id}.json") or {}
    config, result = (read_json(f"{path}/{name}", notes) for name in ("config.json", "result.json"))
    args, state, reason = config.get("args"), claim.get("state"), claim.get("reason")
    args = args if isinstance(args, dict) else {}
    if result:
        state, reason = "done", None
    elif state == "done":
        state, reason = "failed", "it ended without result.json"
    elif state == "running" and not alive(claim):
        state, reason = "interrupted", "its runner ended"
    if len(found) > 1:
        notes.append(f"{len(found)} run folders, the newest counts: {path}")
    apart = ("args", "argv", "script_sha256", "git_commit", "git_dirty", "host")
    row = {
        "run_id": run.id, "suite": suite.name, "algorithm": run.algorithm, "env_id": run.env_id, "seed": run.seed,
        "source": "suite", "state": state or ("interrupted" if path else "pending"), "reason": reason, "path": path,
        "mark": stamp(*(f"{path}/{name}" for name in ("metrics.jsonl", "eval.jsonl", "result.json"))) if path else "",
        "last_line": claim.get("last_line"), "command": claim.get("command") or config.get("argv"),
        "attempts": whole(claim.get("attempts")), "final_step": whole(result.get("global_step")),
        "wall_s": number(result.get("wall_s")), "batch_size": whole(args.get("batch_size")),
        "started": number(claim.get("started")), "host": config.get("host") or claim.get("host"),
        "device": args.get("device"), "git_commit": config.get("git_commit"),
        "git_dirty": truth(config.get("git_dirty")), "script_sha256": config.get("script_sha256"),
        "args_json": json.dumps(args),
        "versions_json": json.dumps({key: value for key, value in config.items() if key not in apart}),
        "note": "; ".join(notes) or None,
    }  # fmt: skip
    same = old.get(run.id, {}).get("mark") == row["mark"] and old[run.id].keys() >= {*FROM_METRICS}
    return row | {key: old[run.id][key] for key in FROM_METRICS} if same else row


def read_run(row):
    """Series and evaluation episodes of a run; completes its row."""
    rows, damaged = read_rows(f"{row['path']}/metrics.jsonl")
    evals, more = read_rows(f"{row['path']}/eval.jsonl")
    columns = series(rows)
    complete(row, columns)
    row["damaged_lines"] = damaged + more
    return columns, evals


def complete(row, columns):
    """Fills in what the metrics tell, as far as they do."""
    row["keys_json"] = json.dumps(sorted(columns))
    steps, walls, _ = (np.concatenate(part) for part in zip(*columns.values())) if columns else ([], [], [])
    speeds = columns["charts/SPS"][2] if "charts/SPS" in columns else []
    row["dead_steps"] = whole(columns["perf/dead_steps"][2][-1].item()) if "perf/dead_steps" in columns else None
    for key, values, of in ("final_step", steps, np.max), ("wall_s", walls, np.max), ("sps_median", speeds, np.median):
        values = np.array(values)[np.isfinite(values)]
        if row.get(key) is None and len(values):
            row[key] = of(values).item()


# ---- TensorBoard: runs of other programs, such as CleanRL's ---------------------------------------------------------


def read_tensorboard(folder, suite):
    """Row and series of the run whose event files lie in `folder`. A later file replaces an earlier one from its own
    first step on (a resumed run is one run); all points of one step are kept, for environments that end together."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    points, hyperparameters, elapsed, started = defaultdict(list), "", 0.0, None
    for path in sorted(folder.glob("events.out.tfevents.*")):
        start, piece = None, defaultdict(list)
        for event in EventFileLoader(str(path)).Load():
            start = start if start is not None else event.wall_time
            for value in event.summary.value:
                data = tensor_util.make_ndarray(value.tensor)
                if value.tag.startswith("hyperparameters/"):
                    hyperparameters = data.ravel()[0].decode()
                elif value.metadata.plugin_data.plugin_name == "scalars":
                    piece[value.tag].append((event.step, elapsed + event.wall_time - start, float(data)))
        if piece:
            started = started if started is not None else start
            first = min(column[0][0] for column in piece.values())
            points = defaultdict(list, {tag: [p for p in column if p[0] < first] for tag, column in points.items()})
            for tag, column in piece.items():
                points[tag] += column
            elapsed = max(point[1] for column in points.values() for point in column)
    args = dict(re.findall(r"^\|([^|\s]+)\|(.*)\|$", hyperparameters, re.M))
    name = re.fullmatch(r"(?P<env_id>.+)__(?P<exp_name>.+)__(?P<seed>\d+)__\d+", folder.name)
    who = (name.groupdict() if name else {}) | args  # the name lacks the first part of ALE/Pong-v5: that is a folder
    known = {"env_id", "exp_name", "seed"} <= who.keys() and re.fullmatch("[0-9]{1,18}", who["seed"])
    if not points or not known or not (who["env_id"] + who["exp_name"]).isprintable():
        lacks = "hyperparameters or a name such as CartPole-v1__ppo__1__1700000000" if points else "scalars"
        raise ValueError(f"it has no {lacks}")
    columns = {}
    for tag, column in points.items():
        steps, walls, values = map(np.asarray, zip(*column))
        order = np.argsort(steps, kind="stable")
        columns[tag] = steps[order], walls[order], values[order]
    batch = args.get("batch_size", "")
    row = {
        "run_id": hashlib.sha256(folder.name.encode() + hyperparameters.encode()).hexdigest()[:12],
        "suite": suite.name, "algorithm": f"{who['exp_name']} (imported)", "env_id": who["env_id"],
        "seed": int(who["seed"]), "source": "tensorboard", "state": "done", "attempts": 1, "mark": "",
        "batch_size": int(batch) if re.fullmatch("[0-9]{1,18}", batch) else None, "started": started,
        "args_json": json.dumps(args), "versions_json": "{}", "path": str(folder),
    }  # fmt: skip
    complete(row, columns)
    return row, columns


# ---- Tables ---------------------------------------------------------------------------------------------------------


def write_table(path, table):
    """Under a temporary name first: a table is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table, temporary, compression="zstd", row_group_size=131_072, write_page_checksum=True)
        os.replace(temporary, path)
    except OSError as error:
        raise SystemExit(f"error: {path} cannot be written: {error}. The runs themselves are untouched") from None


def write_part(folder, name, entries):
    """One part of the evals and of the metrics from `entries`: (row of the run, series, evaluation episodes)."""
    marks = {b"runs": json.dumps({row["run_id"]: row.get("mark", "") for row, _, _ in entries}).encode()}

    def names(values, codes):
        return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(values, pa.string()))

    def write(table, schema, owners, columns):
        for column in RUN:
            values, codes = np.unique([row[column] for row, _, _ in entries], return_inverse=True)
            columns[column] = names(values, codes[owners]) if schema[column] == NAME else values[codes[owners]]
        arrays = [pa.array(columns[column], kind) for column, kind in schema.items()]
        rows = pa.Table.from_arrays(arrays, schema=pa.schema(list(schema.items()), metadata=marks))
        write_table(folder / table / name, rows)

    evals = [episode for _, _, episodes in entries for episode in episodes]
    columns = {key: [convert(episode.get(key)) for episode in evals] for key, convert in EPISODE_VALUES.items()}
    columns["other_json"] = [json.dumps({k: v for k, v in e.items() if k not in EPISODE} or None) for e in evals]
    write("evals.parquet", RUN | EPISODE, np.repeat(range(len(entries)), [len(e) for _, _, e in entries]), columns)

    # Ordered by key, so that a reader of one metric skips the row groups of the others.
    keys = sorted({key for _, columns, _ in entries for key in columns})
    blocks = [(i, k, run[1][key]) for k, key in enumerate(keys) for i, run in enumerate(entries) if key in run[1]]
    sizes = [len(steps) for _, _, (steps, _, _) in blocks]
    owners, codes = (np.repeat(np.array([block[i] for block in blocks], int), sizes) for i in (0, 1))
    points = (np.concatenate([column[i] for _, _, column in blocks] or [[]]) for i in range(3))
    columns = dict(zip(("global_step", "wall_s", "value"), points)) | {"key": names(keys, codes)}
    write("metrics.parquet", METRICS, owners, columns)


@contextmanager
def only_one(folder):
    tables = folder / "metrics.parquet"
    try:
        tables.mkdir(parents=True, exist_ok=True)
        file = open(tables / ".lock", "w")
    except OSError as error:
        raise SystemExit(f"error: {tables} cannot be written: {error}. The runs themselves are untouched") from None
    with file as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"error: another process collects {folder}: try again when it is done") from None
        yield


class Damaged(Exception):
    """A table that cannot be read: its path, and why."""

    def __init__(self, path, why):
        super().__init__(f"{path} is damaged ({' '.join(str(why).split())[:200]})")
        self.path = path


def read_table(path, **options):
    try:
        return pq.read_table(path, page_checksum_verification=True, **options)
    except (pa.ArrowException, OSError) as error:
        raise Damaged(path, error) from None


def read_runs(folder):
    """Rows of runs.parquet, or none."""
    path = Path(folder) / "runs.parquet"
    return read_table(path).to_pylist() if path.exists() else []


def discard(damaged):
    """Removes both halves of a part, so that its runs are read anew. Returns a note."""
    for table in TABLES:
        (damaged.path.parents[1] / table / damaged.path.name).unlink(missing_ok=True)
    again = "what came by --from-tb has to be imported again" if "import" in damaged.path.name else "it is made anew"
    return f"{damaged}: {again}"


def collect(suite, results=RESULTS, tensorboard=None):
    """Brings the tables of `suite` up to date with its runs. `tensorboard`: a folder that holds a folder of event files
    for each run of another program; these are imported for good. Returns what was left out and why, a line each."""
    folder, notes = Path(results) / suite.name, []
    with only_one(folder):
        try:
            old = {row["run_id"]: row for row in read_runs(folder)}
        except Damaged:
            old = {}
            notes.append("runs.parquet was damaged and is made anew: what came by --from-tb has to be imported again")
        rows = {run.id: describe(run, suite, folder, old) for run in suite.runs}
        imported = {run_id: row for run_id, row in old.items() if row["source"] == "tensorboard"}
        if tensorboard:
            imported |= import_runs(Path(tensorboard), suite, folder, notes)
        done = unchanged_runs(folder, rows)
        finished, unfinished, size = [], [], 0
        for row in rows.values():
            if row["run_id"] in done or not row["path"]:
                continue
            try:
                entry = row, *read_run(row)
            except (*UNREADABLE, TypeError, OverflowError) as error:
                row |= {"state": "failed", "reason": f"its metrics cannot be read: {error}"}
                continue
            if row["state"] != "done":
                unfinished.append(entry)
                continue
            finished.append(entry)
            size += sum(len(steps) for steps, _, _ in entry[1].values())
            if size > PART_ROWS:
                write_part(folder, part_name(finished), finished)
                finished, size = [], 0
        if finished:
            write_part(folder, part_name(finished), finished)
        if unfinished:
            write_part(folder, "part-open.parquet", unfinished)
        rows = [row | {key: text(row.get(key)) for key in TEXTS} for row in (*rows.values(), *imported.values())]
        write_table(folder / "runs.parquet", pa.Table.from_pylist(rows, pa.schema(list(RUNS.items()))))
    for row in rows:
        lines = f"{row['damaged_lines']} damaged lines left out" if row.get("damaged_lines") else None
        notes += [f"{label(row)}: {note}" for note in (row.get("note"), lines) if note]
    return notes


def label(row):
    return f"{row['algorithm']}/{row['env_id']}/seed{row['seed']}"


def import_runs(tensorboard, suite, folder, notes):
    """run id -> row of the runs whose event files lie below `tensorboard`; their points are written, a part each."""
    rows = {}
    for path in sorted({file.parent for file in tensorboard.rglob("events.out.tfevents.*")}):
        try:
            row, columns = read_tensorboard(path, suite)
            write_part(folder, f"part-import-{row['run_id']}.parquet", [(row, columns, [])])
        except Exception as error:  # a file of another program may hold anything
            notes.append(f"{path} is left out: {error}")
            continue
        rows[row["run_id"]] = row
    if not rows:
        notes.append(f"{tensorboard} holds no TensorBoard event file of a run")
    return rows


def unchanged_runs(folder, rows):
    """Runs that stand in a part as they are now. Parts that are half written, or hold another run, are removed."""
    for path in folder.glob("*.parquet/.*.tmp"):  # of a collect that was killed
        path.unlink()
    done = set()
    names = {path.name for table in TABLES for path in (folder / table).glob("part-*.parquet")}
    for name in names:
        paths = [folder / table / name for table in TABLES]
        with suppress(FileNotFoundError, pa.ArrowException, OSError):  # half of it, or half written
            marks, _ = (json.loads(pq.read_schema(path).metadata[b"runs"]) for path in paths)
            if "import" in name:
                continue
            known = {run_id for run_id in marks if "keys_json" in rows.get(run_id, ())}
            current = {run_id: rows[run_id]["mark"] for run_id in known}
            if name != "part-open.parquet" and marks == current:
                done |= marks.keys()
                continue
        for path in paths:
            path.unlink(missing_ok=True)
    return done


def part_name(entries):
    runs = "".join(row["run_id"] + row["mark"] for row, _, _ in entries)
    return f"part-{hashlib.sha256(runs.encode()).hexdigest()[:12]}.parquet"


def points(folder, key):
    """The points of one metric, a part at a time: run ids; index of the run, step, seconds and value of each point."""
    for path in sorted(Path(folder).glob("metrics.parquet/part-*.parquet")):
        columns = ["run_id", "global_step", "wall_s", "value"]
        table = read_table(path, columns=columns, filters=[("key", "=", key)]).unify_dictionaries()
        if len(table):
            runs, *rest = (column.combine_chunks() for column in table.columns)
            yield runs.dictionary.to_pylist(), runs.indices.to_numpy(), *(column.to_numpy() for column in rest)


def episodes(folder, split):
    """The evaluation episodes of one split, a part at a time: run ids; index of the run and step of each episode."""
    for path in sorted(Path(folder).glob("evals.parquet/part-*.parquet")):
        table = read_table(path, columns=["run_id", "global_step"], filters=[("split", "=", split)])
        if len(table):
            runs, steps = (column.combine_chunks() for column in table.unify_dictionaries().columns)
            yield runs.dictionary.to_pylist(), runs.indices.to_numpy(), steps.to_numpy()


def export_wandb(suite, results=RESULTS, project="coursework"):
    """Gives every collected run to Weights & Biases, under its run id, grouped by algorithm, and returns their number.
    Unless WANDB_MODE says otherwise it works offline, for `wandb sync` to send <results>/<suite>/wandb later."""
    import wandb

    folder, sent = Path(results) / suite.name, 0
    rows = {row["run_id"]: row for row in read_runs(folder)}
    for path in sorted(folder.glob("metrics.parquet/part-*.parquet")):
        table = read_table(path, columns=["run_id", "global_step", "wall_s", "key", "value"]).to_pydict()
        runs = defaultdict(lambda: defaultdict(dict))
        for run_id, step, wall, key, value in zip(*table.values()):
            if math.isfinite(value):
                runs[run_id][step] |= {key: value, "global_step": step, "wall_s": wall}
        for run_id in runs.keys() & rows.keys():
            row = rows[run_id]
            try:
                run = wandb.init(
                    project=project, id=run_id, name=label(row), group=row["algorithm"], dir=folder, resume="allow",
                    config=json.loads(row["args_json"]), mode=os.environ.get("WANDB_MODE", "offline"),
                    settings=wandb.Settings(silent=True),
                )  # fmt: skip
            except Exception as error:  # no key, no network
                fault = str(error).splitlines()[0]
                raise SystemExit(f"error: Weights & Biases: {fault}. WANDB_MODE=offline needs no key") from None
            run.define_metric("*", step_metric="global_step")
            for _, point in sorted(runs[run_id].items()):
                run.log(point)
            run.finish()
            sent += 1
    wandb.teardown()  # offline, finish() may return before the file is written
    return sent
