"""Writes what study.py finds: report.md, report.html (one file), figures, summary.json and curves.json."""

import json
import os
import shutil
from collections import Counter
from pathlib import Path

from benchmark.runner import choices, estimates, figures, pages
from benchmark.runner.collect import Damaged, collect, discard
from benchmark.runner.study import Study, environment_curves, read_baseline, regressions, run_curves, summarize
from benchmark.runner.suite import RESULTS, better

LISTED = 50  # missing runs in the report; all are in summary.json
REPS = 2000  # draws of the bootstrap
WELCH = "Welch's t interval of the difference"


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


def contents(suite, summary, drawn):
    """The report, in the parts that pages.py knows."""
    sign = {"max": 1, "min": -1}[summary["direction"]]
    yield "title", summary["suite"]
    if suite.description:
        yield "text", suite.description
    yield from completeness(summary)
    if "choices" in summary:
        yield from choices.contents(summary["choices"], number, drawn)
    if "claims" in summary:
        yield from choices.verdicts(summary["claims"], number)
    if "choices" in summary or "claims" in summary:
        yield from reproduction(summary["origin"], summary["example"])
        return
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
        ends = ("lower", "upper")[::sign]
        scaled = f"Scores lie between the suite's constants: 0 is their {ends[0]}, 1 their {ends[1]} value."
        unscaled = f"Scores are values of `{summary['metric']}`: the suite has no constants."
        yield "text", scaled if suite.normalization or "*" in summary["metric"] else unscaled
        yield from (("figure", name) for name in drawn if name != "curves")
    yield "heading", "Each environment"
    rows = []
    for env, of in summary["environments"].items():
        cells = {name: shown(of.get(name)) for name in summary["algorithms"]}
        cells |= {name: f"**{cells[name]}**" for name in [summary["best"][env]] if name}
        rows.append([env, *cells.values()])
    table = [["environment", *summary["algorithms"]], *rows]
    many = len(summary["algorithms"]) > figures.MOST
    header, *rows = zip(*table) if many else table
    yield "table", (header, rows)
    interval = "the t interval of the difference of runs of one seed" if summary.get("paired") else WELCH
    rule = f"at least {estimates.ORDER_SEEDS} seeds of both, and no 0 in {interval}"
    yield (
        "text",
        f"Mean over seeds and its t interval. One is called better than another by {rule}; bold: than all others.",
    )
    rows = [[env, name, ", ".join(others)] for env, of in summary["orders"].items() for name, others in of.items()]
    if rows and not many:
        yield "table", (["environment", "algorithm", "is better than"], rows)
    elif not rows:
        yield "text", "None is called better than another."
    if many:
        yield "text", f"Figures show the {figures.MOST} algorithms with the best places in these environments."
    yield "figure", "curves"
    rows = [[env, metric, *(shown(of.get(name)) for name in summary["algorithms"])]
            for metric, envs in summary["also"].items() for env, of in envs.items() if of]  # fmt: skip
    if rows:
        yield "heading", "Further metrics"
        yield "table", (["environment", "metric", *summary["algorithms"]], sorted(rows, key=lambda row: row[0]))
        yield (
            "text",
            "Last values by the rule of the scores, their mean over seeds and its t interval; no order is claimed.",
        )
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
    yield from reproduction(summary["origin"], summary["example"])


def completeness(summary):
    missing = summary["missing"]
    whole = f"**Complete**: all {summary['planned']} runs count."
    partly = f"**Incomplete**: {summary['counted']} of {summary['planned']} runs count."
    intervals = ("Intervals are of 95 %: of t for means over seeds, of a stratified bootstrap for estimates over all "
                 f"environments ({summary['draws']:,} draws).")  # fmt: skip
    yield "text", f"{partly if missing else whole} {summary['rule']} {intervals}"
    yield "heading", "Completeness"
    states = ["planned", "whole", "running", "failed", "interrupted", "pending", "done, but no data"]
    counts = summary["states"]
    if len(counts) > LISTED:
        counts = {f"all {len(counts)}": sum(map(Counter, counts.values()), Counter())}
        missing = [run for run in missing if run["state"] != "pending"]
    yield "table", (["algorithm", *states],
                    [[name, *(str(of.get(state, "")) for state in states)]
                     for name, of in counts.items()])  # fmt: skip
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


def reproduction(origin, example):
    yield "heading", "Reproduce one run"
    for what in ("commits", "hosts", "devices", "versions"):
        runs = [f"{value} ({n} run{'s' * (n > 1)})" for value, n in sorted(origin[what].items())]
        yield "text", f"{what.capitalize()}: {', '.join(runs) or 'unknown'}."
    if origin["stale"]:
        some = ", ".join(origin["stale"][:3]) + ", ..." * (len(origin["stale"]) > 3)
        yield "text", f"Made by another version of their script than is here now: {len(origin['stale'])} runs ({some})."
    if example:
        yield "code", example


def report(suite, results=RESULTS, against=None, metric=None, direction="", reps=REPS):
    """Writes the report of the collected runs of `suite` and returns its numbers, which stand in summary.json too.
    against: summary.json of an earlier report, whose regressions are told; metric, direction: another one than the
    suite's, and whether "max" or "min" of it is better."""
    folder = Path(results) / suite.name
    baseline = read_baseline(against) if against else None
    try:
        direction = better(metric or suite.metric, direction or ("" if metric else suite.direction))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    study, notes = None, {}
    while study is None:
        try:
            study = Study(suite, folder, metric or suite.metric, direction)
        except Damaged as damaged:
            if damaged.path in notes:  # it was made anew, and is damaged again
                raise SystemExit(f"error: {damaged}") from None
            notes[damaged.path] = discard(damaged)
            collect(suite, results)
    study.notes += notes.values()
    summary = summarize(study, reps)
    if suite.claims:
        summary["claims"] = choices.judge(study)
    elif suite.random:
        summary["choices"] = choices.analyse(study)
    if baseline is not None:
        summary["regressions"] = regressions(summary, baseline, study.sign)
    new = folder / ".report"  # takes the place of what is there when it is complete
    shutil.rmtree(new, ignore_errors=True)
    try:
        curves = {} if suite.random else run_curves(study)  # what is drawn of choices stands in the summary
        drawn = figures.draw(new / "figures", summary, environment_curves(curves))
        content = list(contents(suite, summary, drawn))
        (new / "summary.json").write_text(json.dumps(summary, indent=1, allow_nan=False))
        (new / "curves.json").write_text(json.dumps(curves, allow_nan=False))
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
