"""algos/nsga2.py beside pymoo's NSGA2 on the test functions, in one run: IGD, hypervolume, and CPU seconds.

    scripts/run --extra evolution benchmark/speed/nsga2_pymoo.py                                 # 12 functions, 5 seeds
    scripts/run --extra evolution benchmark/speed/nsga2_pymoo.py --problems zdt1 --seeds 1

Both have 100 individuals for 250 generations (DTLZ1 and DTLZ3: 400), the same operators (SBX: eta 20, 0.9 of the pairs,
0.5 of their genes; polynomial mutation: eta 20, 1/n of the genes), the same numbers of variables, and compute the
functions themselves. Timed is the algorithm alone, in turns, by time.process_time: no logging, no history, no
measures. The last front is measured on both sides by the same functions, against the same points of the true front.
Medians over the seeds; the ratio of two medians stands in brackets.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos import nsga2  # noqa: E402
from benchmark.runner.measured import finish  # noqa: E402


@dataclass
class Args:
    problems: tuple[str, ...] = tuple(nsga2.FUNCTIONS)  # of algos/nsga2.py
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    fronts: Path | None = None  # also write the first seed's fronts there, for benchmark/figures/nsga2_figures.py
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json


def ours(problem, args, seed):
    """The last front (N, M) of the loop of nsga2.train, without its logging."""
    rng = np.random.default_rng(seed)
    population = nsga2.Population(problem, rng)
    for generation in range(args.num_updates):
        start = problem.initial(args.pop_size, rng) if not generation else population.children(args)
        genes, networks = start[:2]
        objectives, networks, _ = problem.evaluate(genes, networks, rng)
        population.select(genes, networks, objectives, args.pop_size)
    return population.objectives[population.front]


def peers(problem, args, seed):
    from pymoo.algorithms.moo.nsga2 import NSGA2
    from pymoo.operators.crossover.sbx import SBX
    from pymoo.operators.mutation.pm import PM
    from pymoo.optimize import minimize
    from pymoo.problems import get_problem

    sizes = {"n_obj": problem.num_objectives} if problem.name.startswith("dtlz") else {}
    function = get_problem(problem.name, n_var=len(problem.lower), **sizes)
    crossover = SBX(prob=args.sbx_prob, prob_var=args.sbx_gene_prob, eta=args.sbx_eta)
    mutation = PM(prob=1.0, prob_var=args.mutation_prob, eta=args.mutation_eta)
    algorithm = NSGA2(pop_size=args.pop_size, crossover=crossover, mutation=mutation)
    return minimize(function, algorithm, ("n_gen", args.num_updates), seed=seed, verbose=False).F


def main(options):
    try:
        import pymoo
        from pymoo.functions import is_compiled
    except ImportError as error:
        raise SystemExit(f"error: {error}: scripts/run --extra evolution benchmark/speed/nsga2_pymoo.py") from error
    header, rows, fronts = ["function", "side", "IGD", "hypervolume", "CPU seconds"], [], {}
    for name in options.problems:
        args = nsga2.Args(env_id=name)
        problem, found = nsga2.TestFunction(name, args.num_variables, args.num_objectives), {"ours": [], "pymoo": []}
        for seed in options.seeds:
            for side, run in (("ours", ours), ("pymoo", peers)):
                begun = time.process_time()
                front = run(problem, args, seed)
                seconds = time.process_time() - begun
                measures = nsga2.igd(problem.front, front), nsga2.hypervolume(front, problem.reference)
                found[side].append((*measures, seconds))
                if side == "ours" and seed == options.seeds[0]:
                    fronts[name] = np.round(front[np.lexsort(front.T)], 4).tolist()
        medians = {side: [statistics.median(column) for column in zip(*runs)] for side, runs in found.items()}
        ratios = [f" ({a / b:.3f})" if b else "" for a, b in zip(*medians.values())]
        forms = ["{:.5f}", "{:.4f}", "{:.2f}"]
        for side in found:
            cells = [form.format(value) for form, value in zip(forms, medians[side])]
            rows.append([name, side, *(cell + ratio * (side == "ours") for cell, ratio in zip(cells, ratios))])
            print(*rows[-1], flush=True)
    if options.fronts:
        options.fronts.parent.mkdir(parents=True, exist_ok=True)
        options.fronts.write_text(json.dumps({"seed": options.seeds[0], "fronts": fronts}) + "\n")
    peer = f"pymoo {pymoo.__version__}, {'compiled' if is_compiled() else 'not compiled'}"
    note = f"{peer}; medians of seeds {', '.join(map(str, options.seeds))}; in brackets ours in parts of pymoo's"
    finish({"nsga2_pymoo": (header, rows)}, options.output, note)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
