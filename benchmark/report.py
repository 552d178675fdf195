"""Turns the tables of a suite into report.md, report.html (one file), figures and summary.json.

The score of a run is the mean of the last three points of the suite's metric. Curves stand on a grid of 100 steps up to
the budget: the mean of the points since the step before, or else the last point, carried on. Only whole runs are data:
one that failed, stopped short, or ends without a finite return is missing, and stands at the top of the report.
"""

import hashlib
import json
import os
import shlex
import shutil
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmark import estimates, figures, pages
from benchmark.collect import label, points, read_runs

ROOT = Path(__file__).resolve().parents[1]
GRID, LAST = 100, 3  # cells of a curve; the score is the mean of the last cells that hold a point
REPS, CURVE_REPS = 2000, 200  # draws of the bootstrap: of estimates, and of each point of a curve
LISTED = 50  # missing runs in the report; all are in summary.json


# ---- What the runs say ----------------------------------------------------------------------------------------------


def on_grid(folder, metric, rows):
    """Mean of the points in each cell, and seconds at its last point, (runs, GRID), NaN in cells without; which cells
    hold points. A point at step s lies in the cell whose upper edge is the first at or above s."""
    index, shape = {row["run_id"]: i for i, row in enumerate(rows)}, (len(rows), GRID)
    total, count, seconds = np.zeros(shape).ravel(), np.zeros(shape).ravel(), np.full(shape, np.nan).ravel()
    budget = np.array([row["budget"] for row in rows])
    update = np.array([row["batch_size"] or 0 for row in rows])
    last = budget + np.maximum(update, budget // GRID)  # the last update may go beyond
    for names, owners, steps, walls, values in points(folder, metric):
        run = np.array([index.get(name, -1) for name in names])[owners]
        kept = (run >= 0) & (steps <= last[run])
        run = run[kept]
        cell = run * GRID + np.clip(-(-steps[kept] * GRID // budget[run]) - 1, 0, GRID - 1)
        count += np.bincount(cell, minlength=count.size)
        np.fmax.at(seconds, cell, walls[kept])
        with np.errstate(invalid="ignore"):  # inf and -inf in one cell: NaN, as it should be
            total += np.bincount(cell, values[kept], count.size)
    with np.errstate(invalid="ignore"):
        return (total / count).reshape(shape), seconds.reshape(shape), (count > 0).reshape(shape)


def carried(cells, held):
    """Empty cells take the last one's content; nothing before the first point, nor after one that is not finite."""
    last = np.maximum.accumulate(np.where(held, np.arange(GRID), -1), axis=1)
    values = np.where(last >= 0, np.take_along_axis(cells, np.maximum(last, 0), axis=1), np.nan)
    return np.where(np.isfinite(values), values, np.nan)


def fault(row, cells, held, metric):
    """Why a run is missing, or None. cells, held: (GRID,)."""
    budget, step = row["budget"], row["final_step"] or 0
    if row["state"] != "done":
        at = f" at step {step:,} of {budget:,}" if row["path"] else ""
        return f"{row['state']}{at}" + (f": {row['reason']}" if row["reason"] else "")
    taken = step + (row.get("dead_steps") or 0)  # a dead autoreset step is no step, but the budget paid for it
    if taken + max(row["batch_size"] or 0, 1) <= budget:  # CleanRL stops before an update that would go beyond
        return f"short: {step:,} of {budget:,} steps"
    filled, end = np.flatnonzero(held), min(-(-step * GRID // budget), GRID) - 1
    if not len(filled):
        keys = [key for key in json.loads(row["keys_json"] or "[]") if "return" in key]
        return f"logs no {metric} up to its budget" + (f" (but {', '.join(keys)})" if keys else "")
    if end - filled[-1] > max(5, *np.diff(filled, prepend=-1)):
        return f"its last {metric} is at step {(filled[-1] + 1) * budget // GRID:,} of {budget:,}"
    if not np.isfinite(cells[filled[-LAST:]]).all():
        return f"{metric} is not finite at its end"
    return None


class Study:
    """Runs of a suite with their scores and curves. whole: (algorithm, env_id) -> seed -> index of the whole run."""

    def __init__(self, suite, folder, metric):
        self.suite, self.metric, self.planned = suite, metric, {run.id: run for run in suite.runs}
        found = {row["run_id"]: row for row in read_runs(folder)}
        lacking = [str(run) for run in suite.runs if run.id not in found]
        if lacking:
            raise SystemExit(f"error: {len(lacking)} runs, as {lacking[0]}, are in no table of {folder}: collect first")
        self.rows = [found[run.id] | {"budget": run.budget} for run in suite.runs]
        self.algorithms, self.envs = (
            list(dict.fromkeys(row[key] for row in self.rows)) for key in ("algorithm", "env_id")
        )
        imported = [row | {"budget": suite.budget} for row in found.values() if row["source"] == "tensorboard"]
        self.rows += sorted((row for row in imported if row["env_id"] in self.envs), key=label)
        self.algorithms += sorted({row["algorithm"] for row in self.rows} - set(self.algorithms))
        self.notes = [f"{label(row)} is left out: its environment is not in the suite"
                      for row in imported if row["env_id"] not in self.envs]  # fmt: skip
        self.budgets = {row["algorithm"]: row["budget"] for row in self.rows}
        cells, self.seconds, held = on_grid(folder, metric, self.rows)
        self.curves = carried(cells, held)
        self.scores, self.missing, self.whole = {}, [], defaultdict(dict)
        for i, row in enumerate(self.rows):
            why, seeds = fault(row, cells[i], held[i], metric), self.whole[row["algorithm"], row["env_id"]]
            if why is None and row["seed"] in seeds:
                why = f"a second run of this seed: {row['path']}"
            if why is None:
                seeds[row["seed"]] = i
                self.scores[i] = float(cells[i, np.flatnonzero(held[i])[-LAST:]].mean())
            else:
                shown = {key: row[key] for key in ("state", "last_line", "command")}
                self.missing.append({"name": label(row), "id": row["run_id"], "why": why} | shown)
        self.limits = self.constants()

    def constants(self):
        """The suite's lower and upper bounds (environments,); returns of a single environment may go without."""
        known = self.suite.normalization or ({self.envs[0]: (0, 1)} if len(self.envs) == 1 else {})
        lacking = [env for env in self.envs if env not in known]
        if lacking:
            self.notes.append(f"no estimate over all environments: [normalization] lacks {', '.join(lacking)}")
            return None
        return np.array([known[env] for env in self.envs], float).T

    def complete_seeds(self, algorithm):
        """Indices (seeds, environments) of as many whole runs as each environment has; None if one has none."""
        of = [[i for _, i in sorted(self.whole[algorithm, env].items())] for env in self.envs]
        seeds = min(map(len, of))
        return np.array([runs[:seeds] for runs in of]).T if seeds and self.limits is not None else None

    def steps(self, algorithm):
        return np.arange(1, GRID + 1) * (self.budgets[algorithm] / GRID)

    def normalized(self, values):
        """The same (..., environments) between the suite's constants."""
        low, high = self.limits
        return (values - low) / (high - low)


def estimate(value, bounds, n):
    return {"value": float(value), "interval": None if bounds is None else [float(b) for b in bounds], "n": int(n)}


def plain(values):
    """For JSON: NaN becomes null."""
    return None if values is None else [float(v) if np.isfinite(v) else None for v in values]


def line(x, values):
    """IQM and bounds at each x of the curves (x, seeds, environments); null where a run has no value."""
    known = np.isfinite(values).all((1, 2))
    middle, bounds = estimates.iqm(values), estimates.interval(values, estimates.iqm, CURVE_REPS)
    low, high = (None, None) if bounds is None else np.where(known, bounds, np.nan)
    return [plain(values) for values in (x, np.where(known, middle, np.nan), low, high)]


def efficiency(study, name, runs):
    """IQM of the whole runs (seeds, environments) over steps, and over seconds up to the end of the first of them."""
    curves = study.curves[runs]
    walls = np.fmax.accumulate(study.seconds[runs], axis=-1)
    times = np.linspace(0, walls[..., -1].min(), GRID // 2 + 1)[1:]
    walls = np.where(np.isnan(walls), -np.inf, walls)
    at = np.apply_along_axis(lambda wall: np.searchsorted(wall, times, "right") - 1, -1, walls)
    over_time = np.where(at >= 0, np.take_along_axis(curves, np.maximum(at, 0), -1), np.nan)
    parts = {"steps": (study.steps(name), curves), "seconds": (times, over_time)}
    return {kind: line(x, study.normalized(np.moveaxis(values, -1, 0))) for kind, (x, values) in parts.items()}


def profiles(scores):
    """Share of whole runs above each threshold, and its bounds, per algorithm."""
    everything = np.concatenate([x.ravel() for x in scores.values()] or [[0]])
    thresholds = np.linspace(min(0, everything.min()), max(1, everything.max()), GRID + 1)
    shares = {}
    for name, x in scores.items():
        bounds = estimates.interval(x, lambda y: estimates.profile(y, thresholds).T, CURVE_REPS)
        lines = estimates.profile(x, thresholds), *((None, None) if bounds is None else bounds)
        shares[name] = [plain(values) for values in lines]
    return {"thresholds": plain(thresholds), "shares": shares}


def improvements(scores, reps):
    """Of each later algorithm over each earlier one; of more than five, over the first alone."""
    names, found = list(scores), []
    for y, x in combinations(names, 2) if len(names) <= 5 else [(names[0], name) for name in names[1:]]:
        value, bounds = estimates.improvement(scores[x], scores[y], reps)
        found.append({"x": x, "y": y} | estimate(value, bounds, min(len(scores[x]), len(scores[y]))))
    return found


def environment(study, env, reps):
    """Mean score of each algorithm in one environment."""
    found = {}
    for name in study.algorithms:
        scores = {seed: study.scores[i] for seed, i in sorted(study.whole[name, env].items())}
        if scores:
            x = np.array([list(scores.values())]).T
            found[name] = estimate(x.mean(), estimates.interval(x, estimates.mean, reps), len(x)) | {"scores": scores}
    return found


def against_paper(reference, environments):
    rows = []
    for name, numbers in reference.items():
        for env, number in numbers.items():
            paper, deviation = number if isinstance(number, list | tuple) else (number, None)
            ours = environments.get(env, {}).get(name)
            low, high = ours["interval"] or (None, None) if ours else (None, None)
            within = None if low is None else low <= paper <= high
            rows.append({"algorithm": name, "env_id": env, "paper": paper, "deviation": deviation, "ours": ours,
                         "within": within})  # fmt: skip
    return rows


def speed(study):
    found = {}
    for name in study.algorithms:
        runs = [study.rows[i] for i in study.scores if study.rows[i]["algorithm"] == name]
        sps = [row["sps_median"] for row in runs if row["sps_median"] is not None]
        hours = [row["wall_s"] / 3600 for row in runs if row["wall_s"] is not None]
        if runs:
            found[name] = {"steps_per_second": float(np.median(sps)) if sps else None, "hours": sum(hours),
                           "hours_per_run": float(np.median(hours)) if hours else None}  # fmt: skip
    return found


def origin(study):
    """What the whole runs were made with, each value with its number of runs; those whose script has changed since."""
    runs = [study.rows[i] for i in sorted(study.scores)]
    scripts = {run.script: ROOT / run.script for run in study.planned.values()}
    now = {script: hashlib.sha256(path.read_bytes()).hexdigest() for script, path in scripts.items() if path.is_file()}
    planned = [(row, study.planned[row["run_id"]].script) for row in runs if row["run_id"] in study.planned]
    stale = [label(row) for row, script in planned if row["script_sha256"] not in (None, now.get(script))]
    commits = Counter((row["git_commit"] or "unknown")[:12] + " with changes" * bool(row["git_dirty"]) for row in runs)
    versions = Counter(f"{k} {v}" for row in runs for k, v in json.loads(row["versions_json"] or "{}").items())
    hosts, devices = (Counter(row[key] or "unknown" for row in runs) for key in ("host", "device"))
    return {"commits": commits, "hosts": hosts, "devices": devices, "versions": versions, "stale": stale}


def read_baseline(path):
    try:
        found = json.loads(Path(path).read_text())
        means = {env: {name: float(x["value"]) for name, x in of.items()} for env, of in found["environments"].items()}
        return {"metric": found["metric"], "budget": found["budget"], "environments": means}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise SystemExit(f"error: --against {path}: this is no summary.json of a report") from None


def regressions(summary, baseline):
    """What is worse than in an earlier summary: intervals wholly below the old mean, and results that are gone."""
    for what in "metric", "budget":
        if summary[what] != baseline[what]:
            found = f"its {what} is {baseline[what]}, here it is {summary[what]}"
            raise SystemExit(f"error: no comparison with the baseline: {found}")
    found = []
    for env, of in baseline["environments"].items():
        for name, old in of.items():
            new = summary["environments"].get(env, {}).get(name)
            if new is None:
                what = "missing"
            elif new["interval"] is None:
                what = "lower, but n=1 has no interval" if new["value"] < old else None
            else:
                what = "worse" if new["interval"][1] < old else None
            if what:
                row = {"algorithm": name, "env_id": env, "what": what, "old": old}
                found.append(row | {"new": new and new["value"]})
    return found


def summarize(study, reps):
    """All numbers of the report, as they stand in summary.json."""
    used = {name: study.complete_seeds(name) for name in study.algorithms}
    partial = study.scores and study.limits is not None
    for name in [name for name, runs in used.items() if runs is None and partial]:
        empty = [env for env in study.envs if not study.whole[name, env]]
        study.notes.append(f"no estimate over all environments of {name}: no whole run on {', '.join(empty[:3])}"
                           + f" and {len(empty) - 3} more" * (len(empty) > 3))  # fmt: skip
    used = {name: runs for name, runs in used.items() if runs is not None}
    scores = {name: np.array([[study.scores[i] for i in seed] for seed in runs]) for name, runs in used.items()}
    scores = {name: study.normalized(x) for name, x in scores.items()}
    kinds = {k: f for k, f in estimates.ESTIMATES.items() if k != "optimality gap" or study.suite.normalization}
    environments = {env: environment(study, env, reps) for env in study.envs}
    return {
        "suite": study.suite.name, "metric": study.metric, "budget": max(study.budgets.values()),
        "budgets": study.budgets, "draws": reps, "algorithms": study.algorithms, "planned": len(study.rows),
        "counted": len(study.scores), "missing": study.missing, "notes": study.notes,
        "aggregate": {name: {k: estimate(f(x), estimates.interval(x, f, reps), len(x)) for k, f in kinds.items()}
                      for name, x in scores.items()},
        "improvement": improvements(scores, reps), "profile": profiles(scores),
        "efficiency": {name: efficiency(study, name, runs) for name, runs in used.items()},
        "environments": environments,
        "best": {env: estimates.best({name: mean["value"] for name, mean in of.items()})[0]
                 for env, of in environments.items()},
        "reference": against_paper(study.suite.reference, environments), "speed": speed(study), "origin": origin(study),
    }  # fmt: skip


# ---- The report -----------------------------------------------------------------------------------------------------


def number(x):
    if x is None:
        return ""
    return f"{x:,.{0 if abs(x) >= 1000 else 1 if abs(x) >= 100 else 2 if abs(x) >= 0.1 or x == 0 else 3}f}"


def shown(found):
    if not found:
        return ""
    return f"{number(found['value'])} ({' to '.join(map(number, found['interval'])) if found['interval'] else 'n=1'})"


def code(line):
    return "`" + " ".join(line.replace("`", "'").split()) + "`" if line else ""


def winner(of):
    """The algorithm whose interval lies above those of all others, if there is one."""
    for name, found in of.items():
        others = [other["interval"] for key, other in of.items() if key != name]
        if others and found["interval"] and all(other and other[1] < found["interval"][0] for other in others):
            return name
    return None


def contents(study, summary, drawn):
    """The report, in the parts that pages.py knows."""
    yield "title", summary["suite"]
    if study.suite.description:
        yield "text", study.suite.description
    yield from completeness(study, summary)
    if summary.get("regressions") is not None:
        yield "heading", "Against the baseline"
        yield "table", (["algorithm", "environment", "what", "before", "now"],
                        [[row["algorithm"], row["env_id"], row["what"], number(row["old"]), number(row["new"])]
                         for row in summary["regressions"]] or [["none is worse", "", "", "", ""]])  # fmt: skip
    if not summary["counted"]:
        yield "text", "No run is whole yet: there is nothing to estimate."
        return
    if summary["aggregate"]:
        yield "heading", "All environments"
        kinds = list(next(iter(summary["aggregate"].values())))
        yield "table", (["algorithm", "seeds", *kinds], [[name, str(of["IQM"]["n"]), *(shown(of[k]) for k in kinds)]
                                                         for name, of in summary["aggregate"].items()])  # fmt: skip
        scaled = "Scores lie between the suite's constants: 0 is their lower, 1 their upper value."
        yield "text", scaled if study.suite.normalization else "Scores are returns: the suite has no constants."
        yield from (("figure", name) for name in drawn if name != "curves")
    yield "heading", "Each environment"
    rows = []
    for env, of in summary["environments"].items():
        cells = {name: shown(of.get(name)) for name in summary["algorithms"]}
        cells |= {name: f"**{cells[name]}**" for name in [winner(of)] if name}
        rows.append([env, *cells.values()])
    table = [["environment", *summary["algorithms"]], *rows]
    many = len(summary["algorithms"]) > figures.MOST
    header, *rows = zip(*table) if many else table
    yield "table", (header, rows)
    yield "text", "Mean over seeds and its interval; bold where that lies above those of all others."
    if many:
        yield "text", f"Figures show the {figures.MOST} algorithms with the best places in these environments."
    yield "figure", "curves"
    if summary["reference"]:
        yield "heading", "Against the paper"
        rows = []
        for row in summary["reference"]:
            paper = " ± ".join(number(row[key]) for key in ("paper", "deviation") if row[key] is not None)
            within = {True: "yes", False: "no", None: ""}[row["within"]]
            rows.append([row["algorithm"], row["env_id"], paper, shown(row["ours"]), within])
        yield "table", (["algorithm", "environment", "paper", "here", "paper's mean in our interval"], rows)
    yield "heading", "Speed"
    yield "table", (["algorithm", "steps per second", "hours of a run", "hours of all"],
                    [[name, *(number(of[key]) for key in ("steps_per_second", "hours_per_run", "hours"))]
                     for name, of in summary["speed"].items()])  # fmt: skip
    yield from reproduction(study, summary["origin"])


def completeness(study, summary):
    missing = summary["missing"]
    whole = f"**Complete**: all {summary['planned']} runs count."
    partly = f"**Incomplete**: {summary['counted']} of {summary['planned']} runs count."
    yield "text", (f"{partly if missing else whole} A run's score is the mean of the last {LAST} points of "
                   f"`{summary['metric']}`, the budget {summary['budget']:,} steps. Intervals are of 95 %: stratified "
                   f"bootstrap over seeds, {summary['draws']:,} draws.")  # fmt: skip
    yield "heading", "Completeness"
    states = ["planned", "whole", "running", "failed", "interrupted", "pending", "done, but no data"]
    counts = {name: Counter() for name in summary["algorithms"]}
    for i, row in enumerate(study.rows):
        state = "whole" if i in study.scores else "done, but no data" if row["state"] == "done" else row["state"]
        counts[row["algorithm"]].update(["planned", state])
    yield "table", (["algorithm", *states],
                    [[name, *(str(of[state] or "") for state in states)] for name, of in counts.items()])  # fmt: skip
    if missing:
        yield "table", (["missing run", "id", "why", "last line", "command"],
                        [[run["name"], run["id"], run["why"], code(run["last_line"]), code(run["command"])]
                         for run in missing[:LISTED]])  # fmt: skip
    if len(missing) > LISTED:
        yield "text", f"{len(missing) - LISTED} more stand in summary.json."
    if missing and summary["aggregate"]:
        seeds = ", ".join(f"{name}: {of['IQM']['n']}" for name, of in summary["aggregate"].items())
        yield "text", f"Estimates over all environments are of as many seeds as each environment has: {seeds}."
    yield from (("text", f"Note: {note}.") for note in summary["notes"])


def reproduction(study, origin):
    yield "heading", "Reproduce one run"
    for what in ("commits", "hosts", "devices", "versions"):
        runs = [f"{value} ({n} run{'s' * (n > 1)})" for value, n in sorted(origin[what].items())]
        yield "text", f"{what.capitalize()}: {', '.join(runs) or 'unknown'}."
    if origin["stale"]:
        some = ", ".join(origin["stale"][:3]) + ", ..." * (len(origin["stale"]) > 3)
        yield "text", f"Made by another version of their script than is here now: {len(origin['stale'])} runs ({some})."
    for row in [study.rows[i] for i in sorted(study.scores) if study.rows[i]["run_id"] in study.planned][:1]:
        run, checkout = study.planned[row["run_id"]], [f"git checkout {row['git_commit']}"] if row["git_commit"] else []
        yield "code", "\n".join([*checkout, f"scripts/run {run.script} {shlex.join(run.args)}"])


def environment_curves(study):
    """environment -> algorithm -> steps, curves of whole runs, their mean where all have a value, and its bounds."""
    found = defaultdict(dict)
    for (name, env), runs in study.whole.items():
        if runs:
            lines = study.curves[[i for _, i in sorted(runs.items())]]
            bounds = estimates.interval(lines.T[..., None], estimates.mean, CURVE_REPS)
            found[env][name] = study.steps(name), lines, lines.mean(0), bounds
    return {env: found[env] for env in study.envs if env in found}


def report(suite, results="benchmark/results", against=None, metric=None, reps=REPS):
    """Writes the report of the collected runs of `suite` and returns its numbers, which stand in summary.json too.
    against: summary.json of an earlier report, whose regressions are told; metric: another one than the suite's."""
    folder = Path(results) / suite.name
    baseline = read_baseline(against) if against else None
    study = Study(suite, folder, metric or suite.metric)
    summary = summarize(study, reps)
    if baseline is not None:
        summary["regressions"] = regressions(summary, baseline)
    new = folder / ".report"  # takes the place of what is there when it is complete
    shutil.rmtree(new, ignore_errors=True)
    try:
        drawn = figures.draw(new / "figures", summary, environment_curves(study))
        content = list(contents(study, summary, drawn))
        (new / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
        (new / "report.md").write_text(pages.markdown(content))
        (new / "report.html").write_text(pages.page(content, new / "figures"))
        shutil.rmtree(folder / "figures", ignore_errors=True)
        for path in new.iterdir():
            os.replace(path, folder / path.name)
    except OSError as error:
        raise SystemExit(f"error: the report cannot be written: {error}. {folder} is as it was") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return summary
