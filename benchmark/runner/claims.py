"""Verdicts on the claims of a suite, by one rule that is registered before its first run.

A claim is about a flag of the sweep's flips: of two values, the paper's stands first. Each base configuration has a run
of either value, alike in all else, per seed. Its difference is (score with the first - score with the second), of
medians over seeds, divided by (the best configuration's score - the random policy's) in that environment. The statistic
is the median difference over configurations, with the 95 % interval of a bootstrap over configurations. A claim that
  the first is better ("first"):  REPRODUCED where the interval lies above 0, CONTRADICTED where below, else UNDECIDED
  it does not matter ("alike"):   REPRODUCED where the interval lies within +-MARGIN, else UNDECIDED
  the sign is open ("open"):      no verdict; the interval is reported
and UNFINISHED while a registered run is missing. There are two scores, each with a verdict of its own: the area (mean
of all evaluations) and the last window (the suite's score, of the last of them). The sign test's count stands beside.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr

MARGIN, DRAWS = 0.05, 10_000
EXPECTS = "first", "alike", "open"


@dataclass
class Claim:
    flag: str
    expects: str  # one of EXPECTS
    text: str


def verdict(differences, expects, registered):
    """By the rule above, of the paired differences of the configurations, `registered` many."""
    x = np.asarray(differences, float)
    wins, losses = int((x > 0).sum()), int((x < 0).sum())
    found = {"n": len(x), "wins": wins, "losses": losses, "median": None, "interval": None, "sign_p": None}
    if len(x) < registered:
        return found | {"verdict": "UNFINISHED"}
    picks = np.random.default_rng(0).integers(len(x), size=(DRAWS, len(x)))
    low, high = map(float, np.percentile(np.median(x[picks], 1), [2.5, 97.5]))
    said = "UNDECIDED"
    if expects == "open":
        said = "no claim"
    elif expects == "alike":
        said = "REPRODUCED" if low > -MARGIN and high < MARGIN else said
    elif low > 0 or high < 0:
        said = "REPRODUCED" if low > 0 else "CONTRADICTED"
    sign = min(1.0, 2 * float(bdtr(min(wins, losses), wins + losses, 0.5))) if wins + losses else 1.0
    return found | {"median": float(np.median(x)), "interval": [low, high], "sign_p": sign, "verdict": said}


def judge(suite, scores):
    """A row for each environment, claim and score. scores: kind -> (algorithm, environment) -> the configuration's, of
    those whose seeds all count."""
    rows = []
    flips = {flag: values for algorithm in suite.algorithms for flag, values in algorithm.sweep["flips"].items()}
    start, labels = {flag: values[0] for flag, values in flips.items()}, {}
    for run in suite.runs:  # (configuration, the flag that is flipped) -> its label
        flipped = [flag for flag in flips if run.params[flag] != start[flag]]
        labels[run.algorithm.partition(":")[0], *flipped] = run.algorithm
    bases = [key for key in labels if len(key) == 1]
    for env in suite.environments:
        for claim in suite.claims:
            for kind, of in scores.items():
                arms = [[(labels[base], env), (labels[*base, claim.flag], env)] for base in bases]
                best = max([score for (_, where), score in of.items() if where == env], default=np.nan)
                scale = best - suite.random[env]
                x = [(of[a] - of[b]) / scale for a, b in arms if a in of and b in of]
                row = {"environment": env, "claim": claim.text, "flag": claim.flag, "values": flips[claim.flag]}
                rows.append(row | {"score": kind} | verdict(x, claim.expects, len(bases)))
    return rows
