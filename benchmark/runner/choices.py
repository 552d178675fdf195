"""Which values of the choices that a suite draws at random do well: the method of Andrychowicz et al. 2020.

A run's score is the mean of its evaluations, a configuration's the median over its seeds; one counts when all of its
seeds are known. A run that diverged stays in, with the random policy's score. Of the configurations that have a value:
  percentile   that of their scores, with a binomial interval: what a tuner reaches with this choice pinned. Where the
               interval's upper end would lie beyond the best of them, it is cut off there and flagged as `short`
  share        its part among the best configurations, of all those in which the choice is active
"""

import numpy as np
from scipy.special import bdtr, betaincinv

from benchmark.runner import claims
from benchmark.runner.study import GRID, plain
from benchmark.runner.suite import dash, text

LEVELS, SHARES, ENDS = (0.95, 0.9, 0.8), (0.05, 0.2), (0.025, 0.975)
SCORES = (
    "Here a configuration's score is the median over its seeds of the mean of all evaluations. Percentiles of the "
    "scores with a value, and their binomial intervals; * marks not enough data: the upper end is then the best score. "
    "Shares of a value among the best 5 % and 20 % of the configurations in which the choice is active."
)
TOPS = {"all": 1.0, "top 10 %": 0.1, "top 5 %": 0.05, "top 1 %": 0.01}


def score(evals_per_seed):
    """Of a configuration: the median over seeds of the mean of the evaluations."""
    return float(np.median([np.mean(evals) for evals in evals_per_seed]))


def percentile_ci(x, p):
    """The p quantile of x, and its interval between two of x; `short` where there are too few of them for its end."""
    x, n = np.sort(x), len(x)
    below = bdtr(np.arange(n + 1.0), n, p)  # P(Bin(n, p) <= k)
    low, high = (int(np.searchsorted(below, end)) for end in ENDS)
    ends = {"low": float(x[low]), "high": float(x[min(high, n - 1)]), "lo_i": low, "hi_i": high}
    return {"value": float(np.percentile(x, 100 * p)), "short": high >= n} | ends


def top_count(n, share=0.05):
    return (n - 1) // round(1 / share) + 1


def top(scores, values, share=0.05):
    """The values of the best configurations, of those with the choice active (its value is not None)."""
    active = [i for i, value in enumerate(values) if value is not None]
    best = sorted(active, key=lambda i: -scores[i])[: top_count(len(active), share) if active else 0]
    return [values[i] for i in best]


def top_frequency(scores, values, share=0.05):
    best = top(scores, values, share)
    return {value: best.count(value) / len(best) for value in ordered(values)}


def share_ci(count, n):
    """Clopper and Pearson's interval of a share."""
    low = betaincinv(count, n - count + 1, ENDS[0]) if count else 0.0
    return [float(low), float(betaincinv(count + 1, n - count, ENDS[1])) if count < n else 1.0]


def ordered(values):
    """Numbers before texts."""
    return sorted({value for value in values if value is not None}, key=lambda v: (isinstance(v, str), v))


def varied(sweep):
    """The flags that a sweep gives several values: those of its grid, and those that it draws, with sub-choices."""
    yield from (flag for flag, values in dash(sweep.get("grid", {})).items() if len(values) > 1)
    yield from drawn(sweep.get("random", {}))


def drawn(space):
    for flag, spec in dash(space).items():
        if len(spec.get("choice", ())) > 1:
            yield flag
        for within in spec.get("when", {}).values():
            yield from drawn(within)


# ---- Of a study ------------------------------------------------------------------------------------------------------


def diverged(row):
    return row["state"] == "failed" and "not finite" in (row["last_line"] or "")


def configurations(study):
    """(algorithm, environment) -> scores area (mean of the evaluations) and last (the suite's), the curve's mean over
    seeds, and the seeds that diverged; of those whose seeds all are known."""
    runs, random = {}, study.suite.random
    for i, row in enumerate(study.rows):
        if i in study.scores:
            found = {"area": float(np.nanmean(study.cells[i])), "last": study.scores[i], "curve": study.curves[i]}
        elif diverged(row):
            found = dict.fromkeys(("area", "last"), random[row["env_id"]])
            found["curve"] = np.full(GRID, random[row["env_id"]], float)
        else:
            continue
        runs.setdefault((row["algorithm"], row["env_id"]), {})[row["seed"]] = found | {"diverged": diverged(row)}
    return {
        key: {kind: float(np.median([run[kind] for run in of.values()])) for kind in ("area", "last")}
        | {"curve": np.mean([run["curve"] for run in of.values()], axis=0)}
        | {"diverged": sorted(seed for seed, run in of.items() if run["diverged"])}
        for key, of in runs.items()
        if len(of) == len(study.suite.seeds)
    }


def judge(study):
    found = configurations(study)
    return claims.judge(study.suite, {kind: {key: of[kind] for key, of in found.items()} for kind in ("area", "last")})


def analyse(study):
    """What summary.json holds of it. environments: env -> counts, quantiles, curves; configurations: env -> name ->
    scores and choices; choices: flag -> env -> value -> statistics; pooled: flag -> value -> share of all top sets."""
    params = {run.algorithm: run.params for run in study.suite.runs}
    flags = list(dict.fromkeys(flag for algorithm in study.suite.algorithms for flag in varied(algorithm.sweep)))
    found, tops = configurations(study), {flag: [] for flag in flags}
    environments, scored, choices = {}, {}, {flag: {} for flag in flags}
    for env in study.envs:
        of = {name: found[name, env] for name in params if (name, env) in found}
        scores = np.array([one["area"] for one in of.values()])
        environments[env] = {"planned": len(params), "counted": len(of), "random": study.suite.random[env]}
        scored[env] = {name: {key: one[key] for key in ("area", "last", "diverged")} | {"choices": params[name]}
                       for name, one in of.items()}  # fmt: skip
        if not of:
            continue
        lines, order = np.array([one["curve"] for one in of.values()]), np.argsort(-scores, kind="stable")
        environments[env] |= {
            "diverged": sum(len(one["diverged"]) for one in of.values()),
            "quantiles": {f"{100 * p:.0f}th": float(np.quantile(scores, p)) for p in LEVELS[::-1]}
            | {"best": scores.max()},
            "curves": {
                name: plain(lines[order[: max(1, round(part * len(of)))]].mean(0)) for name, part in TOPS.items()
            },
        }
        for flag in flags:
            values = [params[name].get(flag) for name in of]
            best = {share: top(scores, values, share) for share in SHARES}
            tops[flag] += best[SHARES[0]]
            choices[flag][env] = {text(value): statistics(value, values, scores, best) for value in ordered(values)}
    pooled = {flag: {text(value): best.count(value) / len(best) for value in ordered(best)} if best else {}
              for flag, best in tops.items()}  # fmt: skip
    return {"environments": environments, "configurations": scored, "choices": choices, "pooled": pooled}


def statistics(value, values, scores, best):
    x = [score for score, its in zip(scores, values) if its == value]
    shares = {f"{share:g}": {"value": top.count(value) / len(top), "interval": share_ci(top.count(value), len(top)),
                             "of": len(top)} for share, top in best.items()}  # fmt: skip
    return {"n": len(x), "percentiles": {f"{p:g}": percentile_ci(x, p) for p in LEVELS}, "shares": shares}


def level(of):
    """The highest percentile that no value of a choice is too rare for; the lowest if there is none. of: value ->
    statistics."""
    fit = [p for p in map("{:g}".format, LEVELS) if not any(one["percentiles"][p]["short"] for one in of.values())]
    return fit[0] if fit else f"{LEVELS[-1]:g}"


# ---- Of a report -----------------------------------------------------------------------------------------------------


def contents(found, number, drawn):
    """The report's part, in the parts that pages.py knows."""
    yield "heading", "Configurations"
    header = ["environment", "planned", "counted", "runs that diverged", *(f"{100 * p:.0f}th" for p in LEVELS[::-1])]
    rows = [[env, str(of["planned"]), str(of["counted"]), str(of.get("diverged", "")),
             *map(number, of.get("quantiles", {}).values())] for env, of in found["environments"].items()]  # fmt: skip
    yield "table", ([*header, "best"], [row + [""] * (len(header) + 1 - len(row)) for row in rows])
    short = [f"{env}: {of['counted']} of {of['planned']}" for env, of in found["environments"].items()
             if of["counted"] < of["planned"]]  # fmt: skip
    if short:
        yield "text", f"**Unfinished**: configurations whose seeds are all there, {', '.join(short)}."
    if not any(of["counted"] for of in found["environments"].values()):
        return
    yield "text", SCORES
    yield from (("figure", name) for name in drawn)
    yield "heading", "Choices"
    rows = []
    for flag, envs in found["choices"].items():
        for env, of in envs.items():
            for value, one in of.items():
                cells = [f"{number(x['value'])} ({number(x['low'])} to {number(x['high'])}){'*' * x['short']}"
                         for x in one["percentiles"].values()]  # fmt: skip
                shares = [f"{x['value']:.2f} ({x['interval'][0]:.2f} to {x['interval'][1]:.2f})"
                          for x in one["shares"].values()]  # fmt: skip
                rows.append([f"`{flag}`", value, env, str(one["n"]), *cells, *shares])
    yield "table", (["choice", "value", "environment", "n", *(f"{100 * p:.0f}th" for p in LEVELS),
                     *(f"in the top {100 * share:.0f} %" for share in SHARES)], rows)  # fmt: skip


def verdicts(rows, number):
    """The table of claims, in the parts that pages.py knows."""
    cells = [[row["environment"], row["claim"], f"`{row['flag']}` " + " - ".join(map(text, row["values"])),
              row["score"], str(row["n"]), number(row["median"]), " to ".join(map(number, row["interval"] or ())),
              f"{row['wins']} : {row['losses']}", number(row["sign_p"]), row["verdict"]] for row in rows]  # fmt: skip
    yield "heading", "Claims"
    yield "table", (["environment", "claim", "difference", "score", "pairs", "median", "95 % interval", "signs + : -",
                     "sign test's p", "verdict"], cells)  # fmt: skip
    yield (
        "text",
        "Differences of configurations' scores, as parts of best - random. The rule, registered before the first run, "
        f"stands in benchmark/runner/claims.py. Of {len(rows)} intervals of 95 %, {number(0.05 * len(rows))} miss by "
        "chance alone.",
    )
