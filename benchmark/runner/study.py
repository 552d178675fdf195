"""What the collected runs of a suite say: scores, curves and estimates, as they stand in summary.json and curves.json.

Curves stand on a grid of 100 steps up to the budget: the mean of the suite's metric since the step before, or else the
last one, carried on. The score of a run is the mean over the last three cells of the grid that hold a point. A point
weighs as much as it has evaluation episodes in eval.jsonl, so that a large last evaluation counts as what it is; the
points of a metric without evaluation episodes weigh the same. Of an environment of many games the suite names each with
its constants: every point is then the mean of the games' scores between them, never of their raw returns, of which the
loudest is the largest part. Only whole runs are data: one that failed, stopped short, or ends without a finite return
is missing, and stands at the top of the report.
"""

import fnmatch
import hashlib
import json
import shlex
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import numpy as np

from benchmark.runner import estimates
from benchmark.runner.collect import episodes, label, points, read_runs, text
from benchmark.runner.suite import ROOT

GRID, LAST = 100, 3  # cells of a curve; those of the score
REPS, CURVE_REPS = 2000, 200  # draws of the bootstrap: of estimates, and of each point of a curve


def on_grid(folder, metric, rows):
    """Mean of the points in each cell, their weight, and seconds at the last one, (runs, GRID); NaN and weight 0 in
    cells without. A point at step s lies in the cell whose upper edge is the first at or above s."""
    index, shape = {row["run_id"]: i for i, row in enumerate(rows)}, (len(rows), GRID)
    total, weight, seconds = np.zeros(shape).ravel(), np.zeros(shape).ravel(), np.full(shape, np.nan).ravel()
    budget = np.array([row["budget"] for row in rows])
    update = np.array([row["batch_size"] or 0 for row in rows])
    last = budget + np.maximum(update, budget // GRID)  # the last update may go beyond
    weigh = evaluations(folder, metric, index, last.max(initial=0) + 1)
    for names, owners, steps, walls, values in points(folder, metric):
        run = np.array([index.get(name, -1) for name in names])[owners]
        kept = (run >= 0) & (steps <= last[run])
        run = run[kept]
        cell = run * GRID + np.clip(-(-steps[kept] * GRID // budget[run]) - 1, 0, GRID - 1)
        weights = weigh(run, steps[kept])
        weight += np.bincount(cell, weights, weight.size)
        np.fmax.at(seconds, cell, walls[kept])
        with np.errstate(invalid="ignore"):  # inf and -inf in one cell: NaN, as it should be
            total += np.bincount(cell, weights * values[kept], total.size)
    with np.errstate(invalid="ignore"):
        return (total / weight).reshape(shape), weight.reshape(shape), seconds.reshape(shape)


def scores_on_grid(folder, metric, rows, games):
    """on_grid of the suite's metric. Where it has games: of the mean of their scores between their constants, in cells
    that all of them fill."""
    if "*" not in metric:
        return on_grid(folder, metric, rows)
    parts = [on_grid(folder, metric.replace("*", game), rows) for game in games]
    scores = [(cells - low) / (high - low) for (cells, _, _), (low, high) in zip(parts, games.values())]
    return np.mean(scores, 0), np.min([weight for _, weight, _ in parts], 0), parts[0][2]


def evaluations(folder, metric, index, end):
    """A function of run indices and steps below `end`: how many evaluation episodes of the metric's split stand there,
    or 1 where there are none."""
    known, counts = [], []
    for names, owners, steps in episodes(folder, metric.split("/")[0]):
        run = np.array([index.get(name, -1) for name in names])[owners]
        places, found = np.unique((run * end + steps)[(run >= 0) & (steps < end)], return_counts=True)
        known.append(places)
        counts.append(found)
    known, counts = (np.concatenate([*parts, np.zeros(0, int)]) for parts in (known, counts))  # a run is in one part
    order = np.argsort(known)
    known, counts = np.append(known[order], -1), np.append(counts[order], 1)

    def weigh(run, steps):
        place = np.searchsorted(known[:-1], run * end + steps)
        return np.where(known[place] == run * end + steps, counts[place], 1)

    return weigh


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


def final(cells, weights):
    """The last value of a run: the mean of its last cells that hold points. cells, weights: (GRID,)."""
    last = np.flatnonzero(weights)[-LAST:]
    return float(np.average(cells[last], weights=weights[last]))


class Study:
    """Runs of a suite with their scores and curves. whole: (algorithm, env_id) -> seed -> index of the whole run.
    sign: 1 where more of the metric is better, else -1; scale_sign: the same of scores between constants, of which the
    better one is 1."""

    def __init__(self, suite, folder, metric, direction):
        self.suite, self.folder, self.metric = suite, folder, metric
        self.planned = {run.id: run for run in suite.runs}
        self.direction, self.sign = direction, {"max": 1, "min": -1}[direction]
        if "*" in metric and not suite.games:
            raise SystemExit(f"error: --metric {metric}: * stands for one of the suite's [games], and it has none")
        self.scale_sign = 1 if suite.normalization else self.sign
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
        cells, weights, self.seconds = scores_on_grid(folder, metric, self.rows, suite.games)
        held = weights > 0
        self.cells = np.where(held, cells, np.nan)  # as they are measured
        self.curves = carried(cells, held)
        self.scores, self.missing, self.whole = {}, [], defaultdict(dict)
        for i, row in enumerate(self.rows):
            why, seeds = fault(row, cells[i], held[i], metric), self.whole[row["algorithm"], row["env_id"]]
            if why is None and row["seed"] in seeds:
                why = f"a second run of this seed: {row['path']}"
            if why is None:
                seeds[row["seed"]] = i
                self.scores[i] = final(cells[i], weights[i])
            else:
                shown = {key: row[key] for key in ("state", "last_line", "command")}
                self.missing.append({"name": label(row), "id": row["run_id"], "why": why} | shown)
        self.limits = self.constants()

    def constants(self):
        """Values that become 0 and 1 (environments,), of which 1 is the better; a single environment may go without."""
        if self.suite.random:  # choices are ranked in each environment for itself
            return None
        plain = "*" in self.metric or len(self.envs) == 1  # scores of games lie between constants already
        known = self.suite.normalization or (dict.fromkeys(self.envs, (0, 1)) if plain else {})
        lacking = [env for env in self.envs if env not in known]
        if lacking:
            self.notes.append(f"no estimate over all environments: [normalization] lacks {', '.join(lacking)}")
            return None
        return np.array([known[env] for env in self.envs], float).T[:: self.scale_sign * self.sign]

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


def profiles(scores, sign):
    """Share of whole runs better than each threshold, and its bounds, per algorithm."""
    everything = np.concatenate([x.ravel() for x in scores.values()] or [[0]])
    thresholds = np.linspace(min(0, everything.min()), max(1, everything.max()), GRID + 1)
    shares = {}
    for name, x in scores.items():
        bounds = estimates.interval(x, lambda y: estimates.profile(sign * y, sign * thresholds).T, CURVE_REPS)
        lines = estimates.profile(sign * x, sign * thresholds), *((None, None) if bounds is None else bounds)
        shares[name] = [plain(values) for values in lines]
    return {"thresholds": plain(thresholds), "shares": shares}


def improvements(scores, reps):
    """Of each later algorithm over each earlier one; of more than five, over the first alone."""
    names, found = list(scores), []
    for y, x in combinations(names, 2) if len(names) <= 5 else [(names[0], name) for name in names[1:]]:
        value, bounds = estimates.improvement(scores[x], scores[y], reps)
        found.append({"x": x, "y": y} | estimate(value, bounds, min(len(scores[x]), len(scores[y]))))
    return found


def seeds(found):
    """The scores behind a mean, as an array."""
    return np.array(list(found["scores"].values()), float)


def order(of, sign, paired):
    """name -> those than which it may be called better in one environment."""
    return estimates.orders({name: found["scores"] for name, found in of.items()}, sign, paired)


def environment(study, env):
    """Mean score of each algorithm in one environment."""
    found = {}
    for name in study.algorithms:
        scores = {seed: study.scores[i] for seed, i in sorted(study.whole[name, env].items())}
        if scores:
            x = np.array(list(scores.values()))
            found[name] = estimate(x.mean(), estimates.t_interval(x), len(x)) | {"scores": scores}
    return found


def further(study):
    """Last values of the suite's further metrics in the whole runs: metric -> environment -> algorithm -> mean."""
    keys, found = {key for i in study.scores for key in json.loads(study.rows[i]["keys_json"])}, {}
    for metric in [key for pattern in study.suite.also for key in sorted(fnmatch.filter(keys, pattern))]:
        cells, weights, _ = on_grid(study.folder, metric, study.rows)
        found[metric] = {env: {} for env in study.envs}
        for (name, env), runs in study.whole.items():
            scores = {seed: final(cells[i], weights[i]) for seed, i in sorted(runs.items()) if weights[i].any()}
            x = np.array(list(scores.values()))
            if len(x) and np.isfinite(x).all():
                found[metric][env][name] = estimate(x.mean(), estimates.t_interval(x), len(x)) | {"scores": scores}
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
    versions = Counter(text(f"{k} {v}") for row in runs for k, v in json.loads(row["versions_json"] or "{}").items())
    hosts, devices = (Counter(row[key] or "unknown" for row in runs) for key in ("host", "device"))
    return {"commits": commits, "hosts": hosts, "devices": devices, "versions": versions, "stale": stale}


def states(study):
    """algorithm -> state -> number of its runs."""
    found = {name: Counter() for name in study.algorithms}
    for i, row in enumerate(study.rows):
        state = "whole" if i in study.scores else "done, but no data" if row["state"] == "done" else row["state"]
        found[row["algorithm"]].update(["planned", state])
    return found


def rule(study):
    """What the score of a run is."""
    end = "more" if study.sign > 0 else "less"
    games = (f"{game} ({low:g} is 0, {high:g} is 1)" for game, (low, high) in study.suite.games.items())
    mean = f" between constants over the games {', '.join(games)}" * ("*" in study.metric)
    return (f"A run's score is the mean of `{study.metric}`{mean}, of which {end} is better, over the last {LAST} of "
            f"{GRID} parts of its budget ({max(study.budgets.values()):,} steps) in which it was measured, weighted by "
            "evaluation episodes.")  # fmt: skip


def example(study):
    """The commands that make the first whole run again; empty without one."""
    for row in [study.rows[i] for i in sorted(study.scores) if study.rows[i]["run_id"] in study.planned]:
        run, checkout = study.planned[row["run_id"]], [f"git checkout {row['git_commit']}"] if row["git_commit"] else []
        return "\n".join([*checkout, f"scripts/run {run.script} {shlex.join(run.args)}"])
    return ""


def read_baseline(path):
    try:
        found = json.loads(Path(path).read_text())
        scores = {env: {name: seeds(x) for name, x in of.items()} for env, of in found["environments"].items()}
        return {"metric": found["metric"], "budget": found["budget"], "environments": scores}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise SystemExit(f"error: --against {path}: this is no summary.json of a report") from None


def regressions(summary, baseline, sign):
    """What is worse than in an earlier summary, and results that are gone; of too few seeds, what only looks so."""
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
            elif estimates.better(old, seeds(new), sign):
                what = "worse"
            elif (n := min(len(old), new["n"])) < estimates.ORDER_SEEDS and sign * new["value"] < sign * old.mean():
                what = f"perhaps worse: n={n} is too few to say"
            else:
                continue
            row = {"algorithm": name, "env_id": env, "what": what, "old": float(old.mean())}
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
    scaled = study.suite.normalization or "*" in study.metric
    kinds = {k: f for k, f in estimates.ESTIMATES.items() if k != "optimality gap" or scaled}
    environments = {env: environment(study, env) for env in study.envs}
    orders = {env: order(of, study.sign, study.suite.paired) for env, of in environments.items()}
    return {
        "suite": study.suite.name, "metric": study.metric, "direction": study.direction, "paired": study.suite.paired,
        "budget": max(study.budgets.values()), "budgets": study.budgets, "draws": reps,
        "algorithms": study.algorithms, "planned": len(study.rows), "counted": len(study.scores),
        "missing": study.missing, "notes": study.notes, "states": states(study), "rule": rule(study),
        "aggregate": {name: {k: estimate(f(x), estimates.interval(x, f, reps), len(x)) for k, f in kinds.items()}
                      for name, x in scores.items()},
        "improvement": improvements({name: study.scale_sign * x for name, x in scores.items()}, reps),
        "profile": profiles(scores, study.scale_sign),
        "efficiency": {name: efficiency(study, name, runs) for name, runs in used.items()},
        "environments": environments,
        "orders": orders, "best": {env: estimates.best(orders[env], of) for env, of in environments.items()},
        "also": further(study), "reference": against_paper(study.suite.reference, environments),
        "speed": speed(study), "origin": origin(study),
        "example": example(study),
    }  # fmt: skip


def run_curves(study):
    """environment -> algorithm -> the curves of its whole runs, as in curves.json: steps, and values by seed."""
    found = {env: {} for env in study.envs}
    for (name, env), runs in study.whole.items():
        if runs:
            lines = {str(seed): plain(map(rounded, study.curves[i])) for seed, i in sorted(runs.items())}
            found[env][name] = {"steps": plain(study.steps(name)), "runs": lines}
    return {env: of for env, of in found.items() if of}


def rounded(value):
    return float(f"{value:.6g}")


def environment_curves(curves):
    """environment -> algorithm -> steps, curves of whole runs, their mean where all have a value, and its bounds."""
    found = defaultdict(dict)
    for env, of in curves.items():
        for name, curve in of.items():
            lines = np.array(list(curve["runs"].values()), float)
            found[env][name] = np.array(curve["steps"]), lines, lines.mean(0), estimates.t_interval(lines)
    return dict(found)
