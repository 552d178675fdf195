"""Wall time of asynchronous population-based training against the same with a barrier, one member being slower:
`python benchmark/speed/pbt_async.py` prints a markdown table.

Population, evolve and Workers are those of algos/pbt_ppo.py; a leg only sleeps, so that the table is about the order of
work alone, whatever the machine. Each member has a worker. The number of legs is the same in both.
"""

import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from algos.pbt_ppo import Population, Workers, evolve  # noqa: E402
from benchmark.runner.measured import finish  # noqa: E402


def sleeping_leg(leg_s, slower, request, check=None):
    time.sleep(leg_s * (slower if request["slot"] == 0 else 1))
    return {"slot": request["slot"], "agent": [], "optimizer": None, "envs": None, "scores": [request["legs"] % 3],
            "results": [], "row": {}, "diverged": None}  # fmt: skip


def measure(barrier, members, rounds, leg_s, slower):
    """Seconds, and legs of the slow and of the other members."""
    args = SimpleNamespace(exploit="truncation", explore=True, self_play=False, leg_steps=1, elo_k=1.0)
    population = Population(args, [], [[]] * members, np.random.default_rng(1))
    workers = Workers(partial(sleeping_leg, leg_s, slower), members, 600)
    workers.start()
    try:
        for _ in evolve(population, workers, members, barrier):  # their processes start
            pass
        begun, before = time.perf_counter(), [member["legs"] for member in population.members]
        for _ in evolve(population, workers, members * (rounds + 1), barrier):
            pass
        seconds = time.perf_counter() - begun
    finally:
        workers.close()
    slow, *others = [member["legs"] - old for member, old in zip(population.members, before)]
    return seconds, slow, np.mean(others)


def main(
    members: int = 8,
    rounds: int = 12,  # legs of a member with the barrier
    leg_s: float = 0.5,  # seconds of a leg
    slower: float = 4.0,  # the first member takes so many times as long
    output: Path | None = None,  # also write the table there, as benchmark/results/speed/NAME.json
):
    found = {name: measure(name == "barrier", members, rounds, leg_s, slower) for name in ("barrier", "asynchronous")}
    rows = [[name, f"{seconds:.1f}", f"{seconds / found['barrier'][0]:.2f}", f"{slow}", f"{others:.1f}"]
            for name, (seconds, slow, others) in found.items()]  # fmt: skip
    header = ["order", "seconds", "of the barrier's", "legs of the slow member", "of each other"]
    note = f"{members} members, {members * rounds} legs of {leg_s:g} s, one member {slower:g} times slower"
    finish({"pbt_async": (header, rows)}, output, note)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
