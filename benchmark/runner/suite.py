"""Suites: TOML files that say which runs make up a benchmark, and the check of every command before anything starts.

    name = "cartpole"                                    # the folder under the results
    seeds = [1, 2, 3]
    environments = ["CartPole-v1"]
    budget = 100_000                                     # environment steps: --total-timesteps
    metric = "eval/return_mean"                          # what the report compares; this is the default
    direction = "max"                                    # or "min"; needed where the metric sounds of a loss or a time
    also = ["eval/*/return_mean", "charts/SPS"]          # further metrics in the report, also by patterns
    paired = true                                        # runs of one seed share what they meet: compared in pairs
    args = { torch-threads = 1 }                         # of every run; [env_args.NAME]: of one environment
    [normalization]
    CartPole-v1 = [0, 500]                               # fixed: never taken from the runs that are compared
    [games]                                              # of an environment of many: metric = "eval/*/return_mean", and
    Acrobot-v1 = [-500, -80]                             # a score is the mean of theirs, each between its constants
    [random]                                             # of each environment, the random policy's score: the report
    CartPole-v1 = 22                                     # then ranks the choices of the sweep (choices.py)
    [[claims]]                                           # what flips are to show (claims.py)
    [resources]
    threads = 1                                          # see Resources
    [[algorithms]]
    name = "ppo"
    script = "algos/ppo.py"                              # from the repository's root, or absolute
    args = { gamma = 0.98 }                              # also env_args, environments and budget, for it alone
    [algorithms.sweep]                                   # each variant is an algorithm of its own in the report:
    grid = { num-steps = [32, 128] }                     # ppo:num-steps=32 and ppo:num-steps=128
    trials = 20                                          # ppo#000 to ppo#019: draws from the distributions under random
    random.learning-rate = { log_uniform = [1e-4, 1e-2] }
    random.clip-vloss = { choice = [true, false], when.true = { clip-coef = { uniform = [0.1, 0.4] } } }
    flips = { norm-adv = [true, false] }                 # each variant as it is, and once more per other value

A draw depends on the sweep's seed, the trial and the argument's name alone: not on a run's seed, nor on the number of
trials or on the other arguments, so that both arms of a flip and all seeds of a variant share their other values.
"""

import contextlib
import difflib
import hashlib
import importlib.machinery
import importlib.util
import io
import itertools
import json
import math
import re
import sys
import tomllib
import types
import typing
import zlib
from collections import defaultdict
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path

import numpy as np
import tyro

from benchmark.runner.claims import EXPECTS, Claim

ROOT = Path(__file__).resolve().parents[2]
SUITES = ROOT / "benchmark" / "suites"
RESULTS = Path("runs/suites")  # what runs and reports write
PUBLISHED = ROOT / "benchmark" / "results"
RESERVED = {
    "seed": "seeds",
    "env-id": "environments",
    "total-timesteps": "budget",
    "run-dir": "nothing: each run has a folder of its own",
    "resume": "nothing: runs always go on from their checkpoint",
    "eval-only": "nothing: a suite trains",
}  # argument -> what sets it
# Words of a metric's name that leave open whether more of it is better.
COSTS = {"loss", "losses", "nash", "nashconv", "exploitability", "regret", "error", "gap", "kl", "lag", "length",
         "time", "seconds", "s", "hours"}  # fmt: skip
MOST = 100_000  # variants of a sweep: more are a mistake, which would take minutes to see


@dataclass(frozen=True)
class Run:
    id: str  # 12 hex digits of what it is
    algorithm: str  # with the sweep's variant in its label
    env_id: str
    seed: int
    script: str
    args: tuple[str, ...]  # all but --run-dir
    params: dict = field(compare=False)  # what the sweep chose
    budget: int = 0  # steps

    def command(self, folder):
        """As it is started in the repository's root, with the suite's results in `folder`."""
        shown = [str(p.relative_to(ROOT)) if p.is_relative_to(ROOT) else str(p)
                 for p in (Path(sys.executable), Path(folder).resolve() / "runs" / self.id)]  # fmt: skip
        return [shown[0], self.script, *self.args, "--run-dir", shown[1]]

    def __str__(self):
        return f"{self.algorithm}/{self.env_id}/seed{self.seed}"


@dataclass
class Resources:
    """What one run may use."""

    threads: int = 1  # CPUs that it is bound to, where there are enough for all workers, and OMP_NUM_THREADS
    gpus: float | int = 0  # share of a GPU, or number of them; 0 hides them
    memory_gb: float | int = math.inf  # GiB of private memory in all its processes: more ends it
    timeout_h: float | int = math.inf  # hours of one attempt
    grace_s: float | int = 60  # seconds for an update to end when a run is asked to stop; then it is cut short
    retries: int = 2  # further attempts after a signal or for want of memory
    stack: int = 1  # runs of one shape in a process, where their script takes --stack; memory and time are a run's


@dataclass
class Algorithm:
    name: str
    script: str
    args: dict = field(default_factory=dict)
    env_args: dict = field(default_factory=dict)
    environments: list | None = None
    budget: int | None = None
    sweep: dict = field(default_factory=dict)


@dataclass
class Sweep:
    grid: dict = field(default_factory=dict)
    random: dict = field(default_factory=dict)
    flips: dict = field(default_factory=dict)
    trials: int = 0
    seed: int = 0


@dataclass
class Suite:
    """`runs`: those it plans, seed by seed. `notes`: what was left out, and why."""

    name: str
    environments: list
    seeds: list
    budget: int
    algorithms: list
    description: str = ""
    metric: str = "eval/return_mean"
    direction: str = ""  # of the metric: max or min is better; afterwards always one of the two
    also: list = field(default_factory=list)  # further metrics, or patterns of such, whose last values the report shows
    paired: bool = False  # seeds are paired: runs of one seed share their stream, levels or starts
    args: dict = field(default_factory=dict)
    env_args: dict = field(default_factory=dict)
    games: dict = field(default_factory=dict)  # game -> [minimum, maximum], where * stands in the metric
    normalization: dict = field(default_factory=dict)  # environment -> [minimum, maximum]
    reference: dict = field(default_factory=dict)  # algorithm -> environment -> number or [mean, deviation]
    random: dict = field(default_factory=dict)  # environment -> score of the random policy, and of a run that diverged
    claims: list = field(default_factory=list)  # see claims.Claim
    resources: dict = field(default_factory=dict)

    def __post_init__(self):
        self.notes = []
        self.resources = build(Resources, self.resources, "[resources]")
        self.algorithms = [build(Algorithm, a, f"[[algorithms]] number {i + 1}") for i, a in enumerate(self.algorithms)]
        right = re.fullmatch(r"[\w-][\w.-]*", self.name)
        require(right, f"name {self.name!r}: letters, digits, '_', '-' and, not as the first, '.' only")
        self.direction = better(self.metric, self.direction)
        own = {f"environments of {a.name}": a.environments for a in self.algorithms if a.environments is not None}
        names = {"environments": self.environments, "names of [[algorithms]]": [a.name for a in self.algorithms]} | own
        for what, values in names.items():
            right = all(isinstance(v, str) and v.strip() and v.isprintable() for v in values)
            require(right, f"{what} {values}: each must be a text of one line")
        require(all(isinstance(key, str) for key in self.also), f"also {self.also}: names of metrics are needed")
        right = all(type(seed) is int and 0 <= seed < 2**63 for seed in self.seeds)
        require(right, f"seeds {self.seeds}: each must be a whole number, from 0 on and below 2^63")
        for what, values in (names | {"seeds": self.seeds}).items():
            require(values, f"{what}: at least one is needed")
            require(len(set(values)) == len(values), f"{what} {values}: each may stand there once")
        for budget in (self.budget, *(a.budget for a in self.algorithms)):
            right = budget is None or 0 < budget <= 10**15
            require(right, f"budget = {budget}: at least 1 step and at most 10^15 are needed")
        known = set(self.environments).union(*own.values())
        self.claims = [build(Claim, claim, f"[[claims]] number {i + 1}") for i, claim in enumerate(self.claims)]
        flips = {flag for a in self.algorithms for flag, both in a.sweep.get("flips", {}).items() if len(both) == 2}
        for claim in self.claims:
            right = claim.expects in EXPECTS and claim.flag in flips and self.random
            require(
                right, f"[[claims]] {claim.flag} = {claim.expects}: one of {', '.join(EXPECTS)}, a flip, and [random]"
            )
        limits = vars(self.resources)
        right = limits["threads"] > 0 and limits["stack"] > 0 and all(limit >= 0 for limit in limits.values())
        require(right, f"[resources] {limits}: at least 1 thread, a stack of 1, and nothing below 0")
        right = not self.random or known == self.random.keys() and all(pair([x, 0]) for x in self.random.values())
        require(right, f"[random] {self.random}: each environment's score of the random policy is needed")
        for where, table in {
            "normalization": self.normalization, "env_args": self.env_args,
            **{f"env_args of {a.name}": a.env_args for a in self.algorithms},
            **{f"reference.{name}": table for name, table in self.reference.items()},
        }.items():  # fmt: skip
            for env_id in mapping(table, f"[{where}]"):
                require(env_id in known, f"[{where}] {env_id} is none of the environments{nearest(env_id, known)}")
        require(not (self.games and self.normalization), "[games] have constants of their own: no [normalization]")
        needed = f"metric {self.metric}: * stands for one of the [games], and is needed where there are some"
        require(self.metric.count("*") == bool(self.games), needed)
        for where, table in {"normalization": self.normalization, "games": self.games}.items():
            for name, limits in table.items():
                right = pair(limits) and limits[0] < limits[1]
                require(right, f"[{where}] {name} = {limits}: [minimum, maximum] is needed")
        for name, env_id, paper in ((n, e, x) for n, table in self.reference.items() for e, x in table.items()):
            right = pair(paper) or pair([paper, 0])
            require(right, f"[reference.{name}] {env_id} = {paper}: a number or [mean, deviation] is needed")
        self.normalization = {env_id: tuple(limits) for env_id, limits in self.normalization.items()}

    @cached_property
    def runs(self):
        runs, labels = [], set()
        for algorithm in self.algorithms:
            seen = {}
            base = dash(self.args | algorithm.args)
            for variant, params in variants(build(Sweep, algorithm.sweep, f"sweep of {algorithm.name}"), base):
                label = algorithm.name + variant
                budget = algorithm.budget or self.budget
                words = {}
                for env_id in algorithm.environments or self.environments:
                    own = dash(self.env_args.get(env_id, {})) | dash(algorithm.env_args.get(env_id, {}))
                    for flag in sorted(RESERVED.keys() & (base | own | params).keys()):
                        raise ValueError(f"{flag} among the arguments: it is set by {RESERVED[flag]}")
                    words[env_id] = flags({"total-timesteps": budget} | base | own | params)
                same = json.dumps(words)
                if same in seen:
                    self.notes.append(f"note: {label} is the same as {seen[same]}: left out")
                    continue
                seen[same] = label
                require(label not in labels, f"{label}: two variants or algorithms have this name")
                labels.add(label)
                runs += [self.run(algorithm, label, env_id, seed, words[env_id], params, budget)
                         for env_id in words for seed in self.seeds]  # fmt: skip
        return sorted(runs, key=lambda run: self.seeds.index(run.seed))

    def run(self, algorithm, label, env_id, seed, words, params, budget):
        args = "--env-id", env_id, "--seed", str(seed), *words
        canonical = json.dumps([self.name, label, algorithm.script, args, env_id, seed], separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()[:12]
        return Run(digest, label, env_id, seed, algorithm.script, args, params, budget)


def load(path_or_name):
    """The Suite in a TOML file, or in suites/<name>.toml. Ends the program with one line about what is wrong there."""
    shipped, path = SUITES / f"{path_or_name}.toml", Path(path_or_name)
    path = shipped if shipped.is_file() else path
    if not path.is_file():
        names = sorted(p.stem for p in SUITES.glob("*.toml"))
        raise SystemExit(f"error: there is no suite {path_or_name}: name a TOML file or one of {', '.join(names)}")
    try:
        suite = build(Suite, tomllib.loads(path.read_text()), "the suite")
        _ = suite.runs  # the sweeps' errors too
    except (ValueError, TypeError) as error:  # TOML's own are of this kind
        raise SystemExit(f"error: {path}: {error}") from None
    suite.path = path
    return suite


def require(condition, message):
    if not condition:
        raise ValueError(message)


def better(metric, said=""):
    """ "max" or "min" of the metric, as said; the name of a return, score or rate says it by itself."""
    require(said in ("", "max", "min"), f'direction = {said!r}: "max" or "min" is needed')
    costs = sorted(COSTS.intersection(re.split("[^a-z]+", metric.lower())))
    needed = (
        f"metric {metric} has {', '.join(costs)} in its name: say whether more or less of it is better, direction ="
    )
    require(said or not costs, f'{needed} "max" or "min"')
    return said or "max"


def nearest(name, known):
    found = difflib.get_close_matches(str(name), known, n=1)
    return f": did you mean {found[0]}?" if found else f" ({', '.join(sorted(known))})"


def mapping(value, where):
    require(isinstance(value, dict), f"{where}: a table is needed, not {value!r}")
    return value


def pair(values):
    """Whether they are a list of two finite numbers."""
    return isinstance(values, list) and [type(x) in (int, float) and abs(x) < math.inf for x in values] == [True] * 2


def build(cls, table, where):
    """cls(**table), after a check of its keys and types."""
    known = {f.name: f for f in fields(cls)}
    for key, value in mapping(table, where).items():
        require(key in known, f"{where} has no key {key}{nearest(key, known)}")
        right = isinstance(value, known[key].type) and isinstance(value, bool) == (known[key].type is bool)
        kind = getattr(known[key].type, "__name__", known[key].type)
        require(right, f"{where}: {key} = {value!r} must be of type {kind}")
    for key, f in known.items():
        needed = f.default is MISSING and f.default_factory is MISSING
        require(key in table or not needed, f"{where} lacks {key}")
    return cls(**table)


# ---- Arguments and sweeps --------------------------------------------------------------------------------------------


def dashed(flag):
    return flag.replace("_", "-")


def dash(arguments):
    found = {dashed(flag): value for flag, value in mapping(arguments, "arguments").items()}
    require(len(found) == len(arguments), f"arguments {', '.join(arguments)}: one of them is there with _ and with -")
    return found


def text(value):
    return str(value).lower() if isinstance(value, bool) else str(value)


def flags(arguments):
    """As words: {"gamma": 0.9, "anneal-lr": False, "sizes": [1, 2]} is --gamma 0.9 --no-anneal-lr --sizes 1 2."""
    words = []
    for flag, value in arguments.items():
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return words


DISTRIBUTIONS = {
    "uniform": lambda rng, low, high: float(f"{rng.uniform(low, high):.6g}"),
    "log_uniform": lambda rng, low, high: float(f"{math.exp(rng.uniform(math.log(low), math.log(high))):.6g}"),
    "int_uniform": lambda rng, low, high: int(rng.integers(low, high + 1)),
    "log_int_uniform": lambda rng, low, high: int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))),
    "choice": lambda rng, *values: values[rng.integers(len(values))],
}  # bounds are inclusive; floats have 6 digits, so that commands stay readable


def draw(space, seed, trial, fixed=()):
    """{argument: value} of one trial; those in `fixed` have its value, and their sub-choices follow from it."""
    params = {}
    for flag, spec in dash(space).items():
        spec = spec if isinstance(spec, dict) else {}
        kind, *more = [key for key in spec if key != "when"] or [None]
        when = mapping(spec.get("when", {}), f"random.{flag}.when")
        require(kind in DISTRIBUTIONS and not more, f"random.{flag}: one of {', '.join(DISTRIBUTIONS)} is needed")
        bounds = spec[kind]
        if kind == "choice":
            require(isinstance(bounds, list) and bounds, f"random.{flag}: choice needs a list of values")
            wrong = when.keys() - set(map(text, bounds))
            require(not wrong, f"random.{flag}: when.{'/'.join(wrong)} is none of its choices")
        else:
            right = pair(bounds) and bounds[0] <= bounds[1] and ("int" not in kind or set(map(type, bounds)) == {int})
            numbers = "whole [low, high]" if "int" in kind else "[low, high]"
            require(right, f"random.{flag}: {kind} needs {numbers}, not {bounds}")
            require("log" not in kind or bounds[0] > 0, f"random.{flag}: {kind} needs bounds above 0, not {bounds}")
            require(not when, f"random.{flag}: only a choice has sub-choices (when)")
        value = DISTRIBUTIONS[kind](np.random.default_rng([seed, trial, zlib.crc32(flag.encode())]), *bounds)
        params[flag] = dict(fixed).get(flag, value)
        params |= draw(when.get(text(params[flag]), {}), seed, trial, fixed)
    return params


def variants(sweep, base):
    """(suffix of the label, {argument: value}) of every variant, in order; ("", {}) without a sweep."""
    grid, flips = dash(sweep.grid), dash(sweep.flips)
    require(bool(sweep.random) == bool(sweep.trials), "sweep: random needs trials, and trials need random")
    require(sweep.trials >= 0, f"sweep: trials = {sweep.trials}: nothing below 0")
    for flag, values in (grid | flips).items():
        require(isinstance(values, list) and values, f"sweep: {flag} needs a list of values")
    twice = (grid.keys() & flips.keys()) | (grid.keys() & dash(sweep.random).keys())
    require(not twice, f"sweep: {', '.join(sorted(twice))} in grid and in another part")
    count = math.prod(map(len, grid.values())) * (sweep.trials or 1)
    require(count <= MOST, f"sweep: {count:,} variants, more than {MOST:,}")
    for trial in range(sweep.trials or 1):
        for values in itertools.product(*grid.values()):
            chosen = dict(zip(grid, values))
            drawn = draw(sweep.random, sweep.seed, trial) | chosen
            start = {flag: drawn.get(flag, base.get(flag, values[0])) for flag, values in flips.items()}
            name = f"#{trial:03d}" if sweep.trials else ""
            parts = [f"{flag}={text(value)}" for flag, value in chosen.items()]
            yield name + ":" * bool(parts) + ",".join(parts), drawn | start
            for flag, other in [(flag, value) for flag, both in flips.items() for value in both]:
                if other != start[flag]:
                    params = draw(sweep.random, sweep.seed, trial, {flag: other}) | chosen | start | {flag: other}
                    yield f"{name}:{','.join([*parts, f'{flag}={text(other)}'])}", params


# ---- The check of every command --------------------------------------------------------------------------------------


def check(runs):
    """{what is wrong with their commands: the runs}, by each script's own Args, imported once; nothing is started."""
    faults, scripts, seen = defaultdict(list), defaultdict(list), {}
    for run in runs:
        scripts[run.script].append(run)
    for script, its_runs in scripts.items():
        try:
            parse = make_parser(load_args(ROOT / script))
        except (Exception, SystemExit) as error:  # an import can raise anything
            what = "no such script" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
            faults[f"{script}: {what}"] += its_runs
            continue
        for run in its_runs:
            words = run.args[:2] + run.args[4:]  # without the seed
            key = script, words
            seen[key] = seen[key] if key in seen else parse(words)
            if seen[key]:
                faults[f"{script}: {seen[key]}"].append(run)
    return dict(faults)


def load_args(path):
    """The class Args of a script."""
    name = f"{path.stem}_{zlib.crc32(str(path).encode()):08x}"  # not to hide a module of that name
    loader = importlib.machinery.SourceFileLoader(name, str(path))  # whatever its suffix is
    module = sys.modules[name] = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    sys.path.insert(0, str(path.parent))  # as for a script: its neighbours can be imported
    try:
        loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module.Args


def make_parser(args_class):
    """words -> None, or what is wrong with them. Plain values are read here, in microseconds; whatever is not plain, or
    wrong, goes to tyro (10 ms), which alone decides."""
    hints, told = arguments(args_class), {}

    def ask_tyro(words):
        output = io.StringIO()
        try:
            with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
                tyro.cli(args_class, args=list(words), prog="it")
        except SystemExit:  # a box with a title
            _, *lines = re.sub(r"\x1b\[[\d;]*m|\u2502", "", output.getvalue()).splitlines()
            said = [line for line in lines if re.match(r"(?! *For full helptext).*\w", line)]
            return " ".join(" ".join(said).split())
        return None

    def parse(words):
        values = {}
        for flag, given in split(words):
            try:
                values |= [value(hints, flag, given)]
            except NotImplementedError:
                return ask_tyro(words)
            except (KeyError, ValueError):  # the same word is wrong in every command
                if told.get((flag, given)) is None:
                    told[flag, given] = ask_tyro(words)
                return told[flag, given] and f"{flag} {' '.join(given)}: {told[flag, given]}"
        try:
            args_class(**values)
        except (Exception, SystemExit) as error:  # the script's own checks may raise anything
            return str(error)
        return None

    return parse


def arguments(args_class):
    """{flag: (name, type)} of a class Args."""
    hints = typing.get_type_hints(args_class)
    return {f"--{dashed(f.name)}": (f.name, hints[f.name]) for f in fields(args_class) if f.init}


def split(words):
    """(flag, its words) one after the other."""
    starts = [i for i, word in enumerate(words) if word.startswith("--")]
    return [(words[i], words[i + 1 : end]) for i, end in zip(starts, [*starts[1:], len(words)])]


def value(known, flag, given):
    """Name and value that a flag with these words sets. KeyError, ValueError: wrong; NotImplementedError: not plain."""
    if given:
        name, hint = known[flag]
        return name, convert(hint, given)
    name, hint = known.get(flag) or known[flag.replace("--no-", "--", 1)]
    require(hint is bool, "a value is missing")
    return name, flag in known


def convert(hint, words):
    """The value of a plain type, as tyro reads it. ValueError: wrong; NotImplementedError: not plain."""
    if len(words) > 1:
        raise NotImplementedError
    (word,) = words
    options = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for option in options:
        if option is type(None):
            if word == "None":
                return None
        elif typing.get_origin(option) is typing.Literal:
            if word in typing.get_args(option):
                return word
        elif option in (int, float, str, Path):
            with contextlib.suppress(ValueError):
                return option(word)
        elif option is not bool:
            raise NotImplementedError
    raise ValueError
