"""Estimates over seeds and environments, and their 95 % intervals (Agarwal et al. 2021, "Deep RL at the edge of the
statistical precipice"), in numpy.

Scores of several environments are normalised and stand in arrays (..., seeds, environments). Their intervals are
percentiles of a stratified bootstrap: seeds are drawn with replacement in each environment for itself. Means over seeds
of one environment have t intervals: a bootstrap of few seeds is too narrow. A single seed has no interval: None.
"""

import numpy as np
from scipy.special import stdtrit

ORDER_SEEDS = 5  # fewer runs than these bear no statement of order


def iqm(scores):
    """Interquartile mean: the mean of the runs without the lowest and the highest quarter."""
    runs = np.sort(scores.reshape(*scores.shape[:-2], -1))
    cut = runs.shape[-1] // 4
    return runs[..., cut : runs.shape[-1] - cut].mean(-1)


def median(scores):
    """Median over the environments of the means over seeds."""
    return np.median(scores.mean(-2), -1)


def mean(scores):
    return scores.mean((-2, -1))


def optimality_gap(scores):
    """How far the runs stay below 1 on average; what lies above 1 does not make up for it."""
    return 1 - np.minimum(scores, 1).mean((-2, -1))


ESTIMATES = {"IQM": iqm, "median": median, "mean": mean, "optimality gap": optimality_gap}


def interval(scores, statistic, reps=2000, seed=0):
    """Lower and upper bound (2, ...) of `statistic` of the scores (..., seeds, environments), or None for one seed."""
    seeds, envs = scores.shape[-2:]
    if seeds < 2:
        return None
    rng, at_once = np.random.default_rng(seed), max(1, 4_000_000 // scores.size)  # in pieces of at most 32 MB
    sizes = [min(at_once, reps - start) for start in range(0, reps, at_once)]
    picks = (rng.integers(seeds, size=(size, seeds, envs)) for size in sizes)
    draws = [statistic(scores[..., pick, np.arange(envs)]) for pick in picks]
    return np.percentile(np.concatenate(draws, -1), [2.5, 97.5], axis=-1)


def improvement(x, y, reps=2000, seed=0):
    """Probability that a run of x (n, environments) beats one of y (k, environments) on the same environment, a draw
    counting half, averaged over environments; and its interval."""
    wins = (x[:, None] > y) + (x[:, None] == y) / 2
    if min(len(x), len(y)) < 2:
        return wins.mean(), None
    rng, envs = np.random.default_rng(seed), x.shape[1]
    n, k = (rng.multinomial(len(z), [1 / len(z)] * len(z), (reps, envs)) / len(z) for z in (x, y))
    draws = np.einsum("ren,nke,rek->r", n, wins, k, optimize=True) / envs
    return wins.mean(), np.percentile(draws, [2.5, 97.5])


def profile(scores, thresholds):
    """Share of the runs above each threshold: (..., thresholds)."""
    return (scores[..., None] > thresholds).mean((-3, -2))


def t_interval(scores):
    """Lower and upper bound (2, ...) of the mean over the first axis of (seeds, ...), or None for one seed."""
    n = len(scores)
    if n < 2:
        return None
    half = stdtrit(n - 1, 0.975) * scores.std(0, ddof=1) / np.sqrt(n)
    return np.array([scores.mean(0) - half, scores.mean(0) + half])


def difference(x, y, paired=False):
    """Bounds of mean(x) - mean(y): Welch's t interval, or that of the mean of x - y where each pair shares its seed.
    None if a side has one seed."""
    if paired:
        return t_interval(x - y)
    if min(len(x), len(y)) < 2:
        return None
    parts, gap = np.array([np.var(z, ddof=1) / len(z) for z in (x, y)]), np.mean(x) - np.mean(y)
    if not parts.any():
        return np.array([gap, gap])
    degrees = parts.sum() ** 2 / (parts**2 / [len(x) - 1, len(y) - 1]).sum()
    half = stdtrit(degrees, 0.975) * np.sqrt(parts.sum())
    return np.array([gap - half, gap + half])


def better(x, y, sign=1, paired=False):
    """Whether x may be called better than y (sign -1: lower): enough seeds on both sides, and the interval of their
    difference lies on the one side of 0."""
    return min(len(x), len(y)) >= ORDER_SEEDS and bool((sign * difference(x, y, paired) > 0).all())


def shared(x, y):
    """Values of the seeds that both of {seed: value} have, in one order, as arrays."""
    seeds = [seed for seed in x if seed in y]
    return np.array([x[seed] for seed in seeds], float), np.array([y[seed] for seed in seeds], float)


def orders(scores, sign=1, paired=False):
    """name -> those than which it may be called better; scores: name -> {seed: score}."""

    def above(x, y):
        x, y = shared(x, y) if paired else (np.array([*of.values()], float) for of in (x, y))
        return better(x, y, sign, paired)

    found = {name: [other for other, y in scores.items() if other != name and above(x, y)]
             for name, x in scores.items()}  # fmt: skip
    return {name: others for name, others in found.items() if others}


def best(orders, names):
    """The one that may be called better than each of the others, or None."""
    return next((name for name, others in orders.items() if len(others) == len(names) - 1), None)
