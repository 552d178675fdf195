"""The tables of the READMEs, printed from what is committed below benchmark/results: `run.py tables`.

In a README a table stands between <!-- table NAME --> and <!-- end of table -->. NAME is a suite's, of whose
summary.json it is made, or that of a table in speed/*.json, as the programs of benchmark/speed leave them by --output.
Values whose runs are gone stand in once.json beside the summary, as further metrics without intervals and with a note
that says so, until the suite is published anew.
"""

import json
import re
from pathlib import Path

import numpy as np

from benchmark.runner import estimates, pages
from benchmark.runner.report import number, shown
from benchmark.runner.suite import PUBLISHED, ROOT

ONCE, SPEED = "once.json", "speed"
READMES = "README.md", "algos/README.md", "benchmark/README.md", "curricula/README.md"
PLACE = r"<!-- table (\S+) -->\n(.*?)<!-- end of table -->"
ATARI = {"Boxing": (0.1, 12.1), "Breakout": (1.7, 30.5), "SpaceInvaders": (148.0, 1668.7),
         "CrazyClimber": (10780.5, 35829.4)}  # random play and a human, as in algos/impala_popart_atari.py  # fmt: skip


def read(folder, name):
    """The table in a JSON file of a report; an empty one if it is not there."""
    try:
        return json.loads((folder / name).read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise SystemExit(f"error: {folder / name} is damaged: {error}") from None


class Report:
    """Cells of a published report, each a function of an algorithm."""

    def __init__(self, folder):
        self.summary, once = read(folder, "summary.json"), read(folder, ONCE)
        self.further = once.get("also", {}) | self.summary["also"]
        self.note, self.paired = once.get("note", ""), self.summary.get("paired", False)
        self.games = read(folder / "figures", "games.json").get("games", {})
        self.envs = list(self.summary["environments"])

    def score(self, env):
        return lambda name: shown(self.summary["environments"][env].get(name))

    def also(self, metric, env, form=number):
        """Mean over seeds and t interval; of what was measured once the value, [lowest to highest seed]."""

        def cell(name):
            found = self.further.get(metric, {}).get(env, {}).get(name)
            if not found or form is number and found.get("interval"):
                return shown(found)
            ends = f" [{' to '.join(map(form, found['range']))}]" if "range" in found else ""
            return form(found["value"]) + ends

        return cell

    def training(self, game):
        """Mean over seeds of a game's training returns in the last fifth of the run, by the points of its picture."""

        def cell(name):
            points = [line[-(len(line) // 5) :] for line in self.games[game]["returns"][name].values()]
            return number(np.mean([np.nanmean(np.array(part, float)) for part in points]))

        return cell

    def minus(self, env, base):
        """Difference of the scores to those of `base`, seed by seed where they are paired."""

        def cell(name):
            x, y = (self.summary["environments"][env][which]["scores"] for which in (name, base))
            x, y = estimates.shared(x, y) if self.paired else (np.array([*z.values()]) for z in (x, y))
            if name == base:
                return ""
            bounds = estimates.difference(x, y, self.paired)
            gap = float(x.mean() - y.mean())
            return f"{'+' * (gap > 0)}{number(gap)} ({' to '.join(map(number, bounds))})"

        return cell

    def seeds(self, name):
        return ", ".join(self.summary["environments"][self.envs[0]][name]["scores"])

    def by_algorithm(self, first, columns, labels=None):
        rows = [[(labels or {}).get(name, f"`{name}`"), *(cell(name) for cell in columns.values())]
                for name in self.summary["algorithms"]]  # fmt: skip
        return [first, *columns], rows


def percent(value):
    return f"{100 * value:.2g} %"


def bigfish_nature(of):
    columns = {"seeds": of.seeds, "held-out levels": of.score("bigfish"),
               "training levels": of.also("eval_train/return_mean", "bigfish"),
               "training minus held-out": of.also("eval/generalization_gap", "bigfish")}  # fmt: skip
    return of.by_algorithm("curriculum", columns)


def minigrid_plr(of):
    names = of.summary["algorithms"]
    return ["environment", *names], [[env, *(of.score(env)(name) for name in names)] for env in of.envs]


AGENTS = {"popart_impala": "PopArt-IMPALA", "multihead_impala": "MultiHead-IMPALA", "impala": "IMPALA"}


def impala_mixed(of):
    games = {"CartPole-v1@0.01": "CartPole-v1, rewards x 0.01", "Acrobot-v1": "Acrobot-v1",
             "CartPole-v1@100": "CartPole-v1, rewards x 100"}  # fmt: skip
    columns = {title: of.also(f"eval/{game}/return_mean", "mixed") for game, title in games.items()}
    return of.by_algorithm(
        "agent", {"seeds": of.seeds, "score, mean of the games": of.score("mixed")} | columns, AGENTS
    )


def impala_atari(of):
    (env,) = of.envs
    columns = {game: of.training(f"{game}-v5") for game in ATARI}
    last = {"median of the games": of.score(env), "entropy of the policy": of.also("losses/entropy", env)}
    header, rows = of.by_algorithm("agent", {"seeds": of.seeds} | columns | last, AGENTS)
    for i, label in enumerate(("random play, from the literature", "a human, from the literature")):
        rows.append([label, "", *(number(scores[i]) for scores in ATARI.values()), str(i), ""])
    return header, rows


REPLAYS = {"taper_alpha1": "`taper`, alpha = 1 from the start", "taper_td": "`taper_td`: TD errors as priorities",
           "taper_shuffled": "`taper_shuffled`: as many transitions marked, but random ones"}  # fmt: skip


def taper_grid(of):
    rare, mixed = of.envs
    drawn = [of.also("replay/drawn_share", env, percent) for env in of.envs]
    columns = {
        "rare: worst task": of.score(rare), "minus `uniform`'s": of.minus(rare, "uniform"),
        "mean of the tasks": of.also("eval/auc_mean", rare), "worst at the end": of.also("eval/success_worst", rare),
        "mixed: worst task": of.score(mixed), "minus `uniform`'s, mixed": of.minus(mixed, "uniform"),
        "mean of the tasks, mixed": of.also("eval/auc_mean", mixed),
        "achieving transitions drawn: rare, mixed": lambda name: ", ".join(cell(name) for cell in drawn),
    }  # fmt: skip
    return of.by_algorithm("replay", columns, REPLAYS)


def taper_minigrid(of):
    (env,) = of.envs
    tasks = [metric for metric in of.further if metric.startswith("eval/success/")]
    columns = {
        "area, mean of the tasks": of.score(env), "minus `uniform`'s": of.minus(env, "uniform"),
        "worst task": of.also("eval/auc_worst", env),
        **{f"at the end: {task.split('/')[-1].replace('_', ' ')}": of.also(task, env) for task in tasks},
        "achieving transitions drawn": of.also("replay/drawn_share", env, percent),
    }  # fmt: skip
    return of.by_algorithm("replay", columns, REPLAYS)


def nash_conv(of):
    names, bonus = of.summary["algorithms"], "at the entropy bonus's own equilibrium"
    rows = [[f"the league's average, {env}", *(of.score(env)(name) for name in names),
             of.also(f"nash_conv {bonus}", env)("")] for env in of.envs]  # fmt: skip
    rows += [[f"the newest policy, {env}", *(of.also("eval/nash_conv", env)(name) for name in names), ""]
             for env in of.envs]  # fmt: skip
    return ["NashConv", *names, bonus], rows


def pfsp_connect_four(of):
    (env,) = of.envs
    arena = {
        title: of.also(f"arena/{title}", env) for title in ("seed 1", "seed 2", "as first player", "as second player")
    }
    speed = {"moves per second": lambda name: number(of.summary["speed"][name]["steps_per_second"])}
    return of.by_algorithm("opponents", {"seeds": of.seeds, "in training": of.score(env)} | arena | speed)


EVOLVED = {"openai-es": "OpenAI-ES", "cma-es": "CMA-ES", "ga": "genetic algorithm",
           "lamarckian": "the same with PPO, weights inherited (Lamarckian)",
           "baldwinian": "the same with PPO, weights not inherited (Baldwinian)"}  # fmt: skip


def evolution_pong(of):
    columns = {"seeds": of.seeds, "score difference": of.score("VectorPong"),
               "frames per second": lambda name: number(of.summary["speed"][name]["steps_per_second"])}  # fmt: skip
    return of.by_algorithm("method", columns, EVOLVED)


def pbt_pong(of):
    columns = {"seeds": of.seeds, "best member, held out": of.score("VectorPong"),
               "minus `random_search`'s": of.minus("VectorPong", "random_search"),
               "mean fitness of the members": of.also("pbt/fitness_mean", "VectorPong"),
               "frames of the best line": of.also("pbt/frames_best", "VectorPong")}  # fmt: skip
    return of.by_algorithm("population", columns)


def cartpole(folder):
    rows = []
    for arm, runs in read(folder, "curves.json").items():
        cells = [arm, ", ".join(runs)]
        for scores in (np.array([f(run["return"]) for run in runs.values()]) for f in (lambda x: x[-1], np.mean)):
            low, high = estimates.t_interval(scores)
            cells.append(f"{scores.mean():.1f} ({low:.1f} to {high:.1f})")
        rows.append(cells)
    return ["arm", "seeds", "return at the end", "mean over the run"], rows


SUITES = {"bigfish_nature": bigfish_nature, "minigrid_plr": minigrid_plr, "impala_mixed": impala_mixed,
          "impala_atari": impala_atari, "taper_grid": taper_grid, "taper_minigrid": taper_minigrid,
          "pfsp_small": nash_conv, "pfsp_poker": nash_conv, "pfsp_connect_four": pfsp_connect_four,
          "evolution_pong": evolution_pong, "pbt_pong": pbt_pong}  # fmt: skip


def tables(published=PUBLISHED):
    """name -> its Markdown, of all tables that there are numbers for."""
    published, found = Path(published), {}
    for name, make in SUITES.items():
        if (published / name / "summary.json").is_file():
            report = Report(published / name)
            found[name] = *make(report), report.note
    if (published / "cartpole_curriculum" / "curves.json").is_file():
        found["cartpole_curriculum"] = *cartpole(published / "cartpole_curriculum"), ""
    for path in sorted((published / SPEED).glob("*.json")):
        for name, table in read(path.parent, path.name).items():
            found[name] = table["header"], table["rows"], table["note"]
    return {name: pages.markdown([("table", (header, rows)), *[("text", note)] * bool(note)])
            for name, (header, rows, note) in found.items()}  # fmt: skip


def filled(text, made):
    """A README with its tables as they are made now."""

    def place(found):
        if found[1] not in made:
            raise SystemExit(f"error: there is no table {found[1]}, only {', '.join(made)}")
        return f"<!-- table {found[1]} -->\n{made[found[1]]}\n<!-- end of table -->"

    return re.sub(PLACE, place, text, flags=re.S)


def write(made):
    """Puts all tables into the READMEs. Returns those that changed."""
    changed = []
    for name in READMES:
        old = (ROOT / name).read_text()
        if (new := filled(old, made)) != old:
            (ROOT / name).write_text(new)
            changed.append(name)
    return changed
