"""Self-play in a PettingZoo game, rock paper scissors: the opponents are past copies of the agent.

    scripts/run --extra pettingzoo scripts/integrations/pettingzoo_selfplay.py                      # 10 s on one core
    scripts/run --extra pettingzoo scripts/integrations/pettingzoo_selfplay.py --curriculum sp

A task is the opponent's id; the learner asks the curriculum for that opponent, and says who won. The agent starts as a
player of rock, and a copy of it joins the league every few games. Prints one line of JSON with what a best response
wins a round against the newest agent, and against the league's average. Seeds 1 to 3, the average: 0.01, 0.01 and 0.04
by prioritized fictitious self-play (pfsp), 0.18, 0.16 and 0.12 by fictitious self-play (fsp), 0.82, 0.37 and 0.68 by
plain self-play (sp), which goes in circles.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from pettingzoo.classic import rps_v2

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from curricula.core import PettingZooTaskWrapper, TaskSpace  # noqa: E402
from curricula.self_play import FictitiousSelfPlay, PrioritizedFictitiousSelfPlay, SelfPlay  # noqa: E402
from curricula.sync_envs import PettingZooSyncWrapper  # noqa: E402
from curricula.sync_learner import make_multiprocessing_curriculum  # noqa: E402

PAYOFF = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])  # of rock, paper, scissors (rows) against each of them


@dataclass
class Args:
    total_timesteps: int = 40_000  # rounds of the game
    seed: int = 1
    curriculum: Literal["sp", "fsp", "pfsp"] = "pfsp"
    num_envs: int = 8
    rounds: int = 10  # of a game
    copy_interval: int = 4  # games of each environment between copies
    learning_rate: float = 0.5
    entropy: float = 0.1  # weight of the entropy


def policy(logits):
    p = np.exp(logits - logits.max())
    return p / p.sum()


def exploitability(p):
    """What the best response wins a round against the mixed strategy p: 0 at the equilibrium (1/3, 1/3, 1/3)."""
    return float((PAYOFF @ p).max())


def main(args):
    rng, logits = np.random.default_rng(args.seed), np.log([0.8, 0.1, 0.1])
    num_games = args.total_timesteps // (args.num_envs * args.rounds)
    # room for every copy: an opponent that was drawn ahead of its game must not be evicted before it
    room = {} if args.curriculum == "sp" else {"capacity": num_games // args.copy_interval + 1}
    kind = {"sp": SelfPlay, "fsp": FictitiousSelfPlay, "pfsp": PrioritizedFictitiousSelfPlay}[args.curriculum]
    league = kind(logits, seed=args.seed, **room)
    task_space = TaskSpace(league.task_space)
    # all in one process: without a thread the order of draws and results, and so the run, depends on the seed alone
    with make_multiprocessing_curriculum(league, start=False) as curriculum:
        envs = [PettingZooTaskWrapper(rps_v2.parallel_env(max_cycles=args.rounds)) for _ in range(args.num_envs)]
        envs = [PettingZooSyncWrapper(env, task_space, curriculum.components) for env in envs]
        for game in range(1, num_games + 1):
            p, payoffs = policy(logits), np.zeros(3)
            for env in envs:
                _, infos = env.reset()
                opponent, total = infos["player_1"]["task"], 0.0
                q = policy(curriculum.get_opponent(opponent))
                while env.agents:
                    action = rng.choice(3, p=p)
                    _, rewards, *_ = env.step({"player_0": action, "player_1": rng.choice(3, p=q)})
                    payoffs[action] += rewards["player_0"] / p[action]  # an unbiased estimate of each action's
                    total += rewards["player_0"]
                curriculum.update_winrate(opponent, (np.sign(total) + 1) / 2)
            # a natural policy gradient with an entropy bonus
            gradient = payoffs / (args.num_envs * args.rounds) - args.entropy * logits
            logits = logits + args.learning_rate * gradient
            if game % args.copy_interval == 0:
                curriculum.update_agent(logits)
        for env in envs:
            env.close()
    average = np.mean([policy(league.get_opponent(i)) for i in league.opponents], 0)
    found = {"games": num_games * args.num_envs, "league_average": average.round(4).tolist()}
    found |= {"exploitability_newest": exploitability(policy(logits)), "exploitability_league": exploitability(average)}
    print(json.dumps(found | league.metrics()))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
