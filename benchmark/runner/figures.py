"""The figures of a report, each as PNG and SVG: colour-blind palette (Okabe and Ito), one colour per algorithm."""

from collections import Counter
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from benchmark.runner.choices import level
from benchmark.runner.suite import text

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
MOST = 12  # algorithms in a figure: more could not be told apart
WIDTH = 7.2  # inches: two columns of a paper
SETTINGS = {"font.size": 8, "svg.hashsalt": "report", "axes.grid": True, "grid.alpha": 0.3, "text.parse_math": False}


def draw(folder, summary, curves):
    """Writes all figures that there are numbers for, and returns their names. curves: environment -> algorithm ->
    steps, the curves of its runs (runs, steps), their mean and its bounds."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    studied = "choices" in summary or "claims" in summary
    if len(summary["algorithms"]) > MOST and not studied:
        summary, curves = leading(summary, curves)
    with matplotlib.rc_context(SETTINGS):
        drawn = {
            name: figure
            for name, plot in (CHOICES if studied else PLOTS).items()
            if (figure := plot(summary, curves)) is not None
        }
        for name, figure in drawn.items():
            save(figure, folder / name)
    return list(drawn)


def save(figure, path):
    """`path` with .png and .svg. The same numbers give the same files."""
    for kind, date in ("png", {}), ("svg", {"Date": None}):
        figure.savefig(f"{path}.{kind}", dpi=150, metadata=date)


def leading(summary, curves):
    """The same without all but the algorithms with the best places in the environments (a Borda count)."""
    marks, sign = Counter(), -1 if summary["direction"] == "min" else 1
    for of in summary["environments"].values():
        for place, name in enumerate(sorted(of, key=lambda name: sign * of[name]["value"])):
            marks[name] += place + 1
    best = {name for name, _ in marks.most_common(MOST)}
    only = {key: {name: of for name, of in summary[key].items() if name in best} for key in ("aggregate", "efficiency")}
    only["algorithms"] = [name for name in summary["algorithms"] if name in best]
    only["improvement"] = [pair for pair in summary["improvement"] if pair["x"] in best]
    shares = {name: line for name, line in summary["profile"]["shares"].items() if name in best}
    only["profile"] = summary["profile"] | {"shares": shares}
    curves = {env: {name: of[name] for name in of if name in best} for env, of in curves.items()}
    return summary | only, {env: of for env, of in curves.items() if of}


def styles(summary):
    """algorithm -> colour and dashes."""
    return {name: {"color": COLORS[i % len(COLORS)], "linestyle": DASHES[i // len(COLORS) % len(DASHES)]}
            for i, name in enumerate(summary["algorithms"])}  # fmt: skip


def panels(rows, columns, height, **shared):
    figure = Figure((WIDTH, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **shared).ravel()


def legend(figure, axes):
    """One for all panels, above them."""
    handles = {text: handle for axis in axes for handle, text in zip(*axis.get_legend_handles_labels())}
    columns = max(1, min(4, len(handles), int(WIDTH / (0.5 + 0.07 * max(map(len, handles))))))
    figure.set_figheight(figure.get_figheight() + 0.16 * ((len(handles) - 1) // columns))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=columns, frameon=False)


def unit(budget):
    """Steps in a unit of the axis, and its label."""
    return (1e6, "million steps") if budget >= 1e6 else (1e3, "thousand steps") if budget >= 1e4 else (1, "steps")


def dots(axis, rows):
    """rows: (label, estimate, style) from top to bottom."""
    for i, (_, estimate, style) in enumerate(rows):
        if estimate["interval"] is not None:
            bar = {"linewidth": 4, "alpha": 0.4, "solid_capstyle": "butt"}
            axis.plot(estimate["interval"], [i, i], color=style["color"], **bar)
        axis.plot(estimate["value"], i, "o", color=style["color"], markersize=4)
    axis.set(yticks=range(len(rows)), yticklabels=[row[0] for row in rows], ylim=(len(rows) - 0.5, -0.5))


def named(name):
    """As a label: a legend leaves out those with a leading underscore."""
    return f" {name}" if name.startswith("_") else name


def band(axis, x, line, style, name):
    """line: middle, low, high, of which the last two may be None; where one is NaN, nothing is drawn."""
    middle, low, high = (None if part is None else np.array(part, float) for part in line)
    axis.plot(x, middle, label=named(name), linewidth=1.8, **style)
    if low is not None:
        axis.fill_between(x, low, high, color=style["color"], alpha=0.18, linewidth=0)


def aggregate(summary, curves):
    if not summary["aggregate"]:
        return None
    of, style = summary["aggregate"], styles(summary)
    kinds = list(next(iter(of.values())))
    figure, axes = panels(1, len(kinds), 0.8 + 0.2 * len(of), sharey=True)
    for axis, kind in zip(axes, kinds):
        dots(axis, [(name, of[name][kind], style[name]) for name in of])
        axis.set_xlabel(kind)
    return figure


def improvement(summary, curves):
    pairs, style = summary["improvement"], styles(summary)
    if not pairs:
        return None
    figure, (axis,) = panels(1, 1, 0.8 + 0.2 * len(pairs))
    dots(axis, [(f"{pair['x']} > {pair['y']}", pair, style[pair["x"]]) for pair in pairs])
    axis.axvline(0.5, color="black", linewidth=0.8)
    axis.set(xlim=(-0.02, 1.02), xlabel="probability of improvement")
    return figure


def profile(summary, curves):
    if not summary["aggregate"]:
        return None
    figure, axes = panels(1, 1, 2.8)
    for name, line in summary["profile"]["shares"].items():
        band(axes[0], summary["profile"]["thresholds"], line, styles(summary)[name], name)
    axes[0].set(xlabel="score τ", ylabel="share of runs better than τ", ylim=(-0.02, 1.02))
    legend(figure, axes)
    return figure


def efficiency(summary, curves):
    if not summary["aggregate"]:
        return None
    figure, axes = panels(1, 2, 2.8, sharey=True)
    scale, label = unit(summary["budget"])
    longest = max([x for of in summary["efficiency"].values() for x in of["seconds"][0] if x is not None], default=0)
    time, time_label = (3600, "hours of a run") if longest >= 7200 else (60, "minutes of a run")
    for name, of in summary["efficiency"].items():
        for axis, kind, divisor in zip(axes, ("steps", "seconds"), (scale, time)):
            x, *line = of[kind]
            band(axis, np.array(x, float) / divisor, line, styles(summary)[name], name)
    axes[0].set(xlabel=label, ylabel="IQM")
    axes[1].set(xlabel=time_label)
    legend(figure, axes)
    return figure


def environments(summary, curves):
    if not curves:
        return None
    columns = min(4 if len(curves) > 3 else 3, len(curves))
    figure, axes = panels(-(-len(curves) // columns), columns, 1.9 if len(curves) > 1 else 3.2)
    scale, label = unit(summary["budget"])
    many = sum(len(runs) for of in curves.values() for _, runs, _, _ in of.values()) > 500  # no SVG for a browser
    for i, (axis, (env, of)) in enumerate(zip(axes, curves.items())):
        for name, (steps, runs, middle, bounds) in of.items():
            lines, style = [np.column_stack([steps / scale, run]) for run in runs], styles(summary)[name]
            axis.add_collection(LineCollection(lines, linewidth=0.6, alpha=0.35, zorder=1, **style))
            band(axis, steps / scale, (middle, *(bounds if bounds is not None else (None, None))), style, name)
        axis.set_rasterization_zorder(1.5 if many else None)  # all that lies under the thick lines
        axis.set_title(env, fontsize=8)
        axis.autoscale_view()
        values = np.concatenate([runs.ravel() for _, runs, _, _ in of.values()])
        low, high = np.nanmin(values), np.nanmax(values)  # the runs: an interval of two seeds would squash them
        margin = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
        axis.set_ylim(low - margin, high + margin)
        if i >= len(curves) - columns:
            axis.set_xlabel(label)
        if i % columns == 0:
            less = "\n(less is better)" * (summary["direction"] == "min")
            name = "score, mean of the games" if "*" in summary["metric"] else summary["metric"].split("/")[-1]
            axis.set_ylabel(name.replace("_", " ") + less)
    for axis in axes[len(curves) :]:
        axis.set_axis_off()
    legend(figure, axes)
    return figure


def bars(axis, heights, lows, highs, labels, hatched):
    """A bar per value, in the order of the palette; its interval where there is one."""
    x, colors = np.arange(len(heights)), [COLORS[i % len(COLORS)] for i in range(len(heights))]
    gaps = [np.maximum(0, np.subtract(heights, lows)), np.maximum(0, np.subtract(highs, heights))]
    drawn = axis.bar(x, heights, color=colors, alpha=0.8, yerr=gaps, ecolor="black", error_kw={"linewidth": 0.8})
    for bar, marked in zip(drawn, hatched):
        bar.set_hatch("///" * marked)
    axis.set_xticks(x, labels, rotation=90)
    axis.grid(axis="x", visible=False)


def choice_bars(summary, curves):
    """Rows: choices; columns: each environment's percentiles, then each one's shares of the top."""
    found = summary.get("choices", {})
    envs = [env for env, of in found.get("environments", {}).items() if of["counted"]]
    if not envs:
        return None
    flags = [flag for flag, of in found["choices"].items() if any(of.values())]
    figure, axes = panels(len(flags), 2 * len(envs), 1.7)
    for flag, row in zip(flags, axes.reshape(len(flags), -1)):
        for env, left, right in zip(envs, row, row[len(envs) :]):
            of = found["choices"][flag][env]
            if not of:
                continue
            p, values = level(of), list(of)
            spots = [one["percentiles"][p] for one in of.values()]
            heights, lows, highs = ([spot[key] for spot in spots] for key in ("value", "low", "high"))
            bars(left, heights, lows, highs, values, [spot["short"] for spot in spots])
            left.set_title(f"{env}, {100 * float(p):.0f}th", fontsize=7)
            share = [one["shares"]["0.05"]["value"] for one in of.values()]
            bars(right, share, share, share, values, [False] * len(of))
            wide = [one["shares"]["0.2"] for one in of.values()]
            gaps = np.array([[x["value"] - x["interval"][0], x["interval"][1] - x["value"]] for x in wide]).T
            right.errorbar(np.arange(len(of)) + 0.25, [x["value"] for x in wide], gaps, fmt="o", color="grey",
                           markersize=2.5, linewidth=0.8)  # fmt: skip
            right.axhline(1 / len(of), color="black", linewidth=0.6)
            right.set(ylim=(0, 1.02))
            right.set_title(f"{env}, top 5 %", fontsize=7)
        row[0].set_ylabel(flag)
    return figure


def learning(summary, curves):
    found = {env: of for env, of in summary.get("choices", {}).get("environments", {}).items() if of["counted"]}
    if not found:
        return None
    figure, axes = panels(1, len(found), 2.6)
    scale, label = unit(summary["budget"])
    for axis, (env, of) in zip(axes, found.items()):
        for (name, line), color in zip(of["curves"].items(), COLORS):
            x = np.arange(1, len(line) + 1) * (summary["budget"] / len(line) / scale)
            axis.plot(x, np.array(line, float), color=color, label=name)
        axis.set(xlabel=label)
        axis.set_title(f"{env}, {of['counted']} configurations", fontsize=8)
    axes[0].set_ylabel("return")
    legend(figure, axes)
    return figure


def spread(summary, curves):
    """ECDF by the values of the group's first choice."""
    found = summary.get("choices", {})
    envs = [env for env, of in found.get("environments", {}).items() if of["counted"]]
    if not envs:
        return None
    figure, axes = panels(1, len(envs), 2.6, sharey=True)
    flag = next(iter(found["choices"]))
    for axis, env in zip(axes, envs):
        of, random = found["configurations"][env].values(), found["environments"][env]["random"]
        best = max(one["area"] for one in of)
        for value, color in zip(found["choices"][flag][env], COLORS):
            x = np.sort([one["area"] for one in of if text(one["choices"].get(flag)) == value])
            axis.step((x - random) / ((best - random) or 1), np.arange(1, len(x) + 1) / len(x), where="post",
                      color=color, label=f"{flag} {value}")  # fmt: skip
        axis.set(xlabel="(score - random) / (best - random)")
        axis.set_title(f"{env}, best {best:.4g}", fontsize=8)
    axes[0].set_ylabel("share of the configurations")
    legend(figure, axes)
    return figure


CHOICES = {"choices": choice_bars, "learning": learning, "spread": spread}
PLOTS = {
    "aggregate": aggregate,
    "improvement": improvement,
    "profile": profile,
    "efficiency": efficiency,
    "curves": environments,
}
