"""What is published: a suite's report in benchmark/results/<suite>/, apart from what runs and reports write."""

import importlib
import os
import shutil
from pathlib import Path

from benchmark.runner import figures, pages, suite
from benchmark.runner.report import contents
from benchmark.runner.study import environment_curves
from benchmark.runner.suite import PUBLISHED
from benchmark.runner.tables import ONCE, read

FILES = "suite.toml", "summary.json", "curves.json", "report.md"
OTHERS = {
    "games": "popart_figures",
    "equilibrium": "pfsp_figures",
    "fronts": "nsga2_figures",
    "lineage": "pbt_figures",
    "staleness": "a3c_figures",
}  # picture, beside its numbers -> who draws it


def lost(new, old):
    """Where a summary counts fewer runs than an earlier one: environment, algorithm, runs now and before."""
    for env, of in old["environments"].items():
        for name, found in of.items():
            now = new["environments"].get(env, {}).get(name, {"n": 0})["n"]
            if now < found["n"]:
                yield env, name, now, found["n"]


def publish(plan, results, published=PUBLISHED, fewer=False):
    """Copies the report of a suite from `results` to `published`, with all that is needed to make it again. Returns
    notes. Refused, unless `fewer`, if fewer runs count than in the report that stands there."""
    source, target = Path(results) / plan.name, Path(published) / plan.name
    new, old = read(source, "summary.json"), read(target, "summary.json")
    if not new or any(not (source / name).is_file() for name in FILES):
        raise SystemExit(f"error: there is no whole report in {source}: benchmark/run.py report {plan.name} makes it")
    if (new["metric"], new["direction"]) != (plan.metric, plan.direction):
        raise SystemExit(f"error: the report in {source} is of {new['metric']}, the suite's metric is {plan.metric}")
    gone = list(lost(new, old)) if old else []
    if gone and not fewer:
        env, name, now, before = gone[0]
        more = f", and {len(gone) - 1} more such" if len(gone) > 1 else ""
        what = f"{name} on {env} has {now} runs, in the published report {before}{more}"
        raise SystemExit(f"error: {what}: --fewer publishes it all the same")
    (target / "figures").mkdir(parents=True, exist_ok=True)
    drawn = sorted((source / "figures").iterdir())
    for path in [*(source / name for name in FILES), *drawn]:
        temporary = target / ".new"
        shutil.copyfile(plan.path if path.name == "suite.toml" else path, temporary)  # as it is reported, not as it ran
        os.replace(temporary, target / path.relative_to(source))
    (target / ONCE).unlink(missing_ok=True)  # what was measured once, of the report before
    older = sorted({path.name for path in (target / "figures").iterdir()} - {path.name for path in drawn})
    return [f"figures/{name} is not of this report: the script that drew it has to run again" for name in older]


def remake(name, published=PUBLISHED):
    """Makes report.md and the figures of a published report again, from its summary.json and curves.json, and those
    of figures/ that have their numbers beside them."""
    folder = Path(published) / name
    if not (folder / "suite.toml").is_file():
        names = sorted(path.parent.name for path in Path(published).glob("*/suite.toml"))
        raise SystemExit(f"error: there is no report of {name} in {published}, only of {', '.join(names) or 'none'}")
    plan, summary, curves = suite.load(folder / "suite.toml"), read(folder, "summary.json"), read(folder, "curves.json")
    drawn = figures.draw(folder / "figures", summary, environment_curves(curves))
    (folder / "report.md").write_text(pages.markdown(contents(plan, summary, drawn)))
    for picture in OTHERS:
        if (folder / "figures" / f"{picture}.json").is_file():
            importlib.import_module(f"benchmark.figures.{OTHERS[picture]}").remake(folder / "figures")
    return folder
