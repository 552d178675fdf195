"""Play a finished agent of algos/appo_pfsp*.py in the terminal, at Connect Four or tic-tac-toe.

  scripts/run scripts/play.py runs/appo_pfsp/connect_four/seed1-1a2b3c4d
  scripts/run scripts/play.py runs/appo_pfsp/tic_tac_toe/seed1-1a2b3c4d --agent-first

The run's newest checkpoint plays, by the program that lies in the run, code.py, and always the move that it holds for
the best. Your moves are the numbers that the board shows; q leaves. They can also come from a pipe, one a line.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.arena import fail, load_agent, run_args  # noqa: E402

GAMES = {"connect_four": "column", "tic_tac_toe": "cell"}


def draw(name, grid):
    """The board as text. Free cells of tic-tac-toe show their numbers."""
    if name == "tic_tac_toe":
        cells = [mark if mark != "." else str(i + 1) for i, mark in enumerate(grid.flat)]
        rows = [" ".join(cells[i : i + 3]) for i in (0, 3, 6)]
    else:
        rows = [" ".join(row) for row in grid] + [" ".join(map(str, range(1, 8)))]
    return "\n".join(f"  {row}" for row in rows)


def ask(name, legal):
    """The person's action. Asks again until it is legal; leaves at q or the end of the input."""
    allowed = [str(action + 1) for action in np.flatnonzero(legal)]
    while True:
        try:
            answer = input(f"your {GAMES[name]}: ").strip() if sys.stdin else "q"  # None: it was closed
        except EOFError:
            answer = "q"
        if answer in allowed:
            return int(answer) - 1
        if answer == "q":
            print("left the game")
            raise SystemExit
        print(f"{answer!r} is no move here: {' '.join(allowed)}, or q to leave")


def play(name, module, policy, agent_first):
    games = module.make_games(name, 1)
    games.reset([np.random.SeedSequence(0)])
    grid, marks = np.full(games.obs_shape[1:], "."), {"you": "X", "the agent": "O"}
    turns = ["the agent", "you"] if agent_first else ["you", "the agent"]
    print(f"You are X, the agent is O.\n{draw(name, grid)}")
    ended = [False]
    while not ended[0]:
        who, (obs, legal) = turns[games.player[0]], games.observe()
        action = ask(name, legal[0]) if who == "you" else int(policy(obs, legal)[0].argmax())
        rewards, ended = games.step([action])
        if name == "connect_four":
            grid[np.flatnonzero(grid[:, action] == ".")[-1], action] = marks[who]
        else:
            grid.flat[action] = marks[who]
        print(f"{who}: {GAMES[name]} {action + 1}\n{draw(name, grid)}")
    print({1: "You win.", 0: "A draw.", -1: "The agent wins."}[int(rewards[0, turns.index("you")])])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument("--agent-first", action="store_true", help="the agent makes the first move")
    options = parser.parse_args()
    if (game := getattr(run_args(options.run), "env_id", None)) not in GAMES:
        fail(f"{options.run} is a run of {game}: only {' and '.join(GAMES)} can be played here")
    try:
        args, module, agent, _ = load_agent(options.run)
        play(game, module, *module.as_policies([module.flat_weights(agent)], args), options.agent_first)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's exit would try again, and fail
        fail("nobody reads the board any more")
    except KeyboardInterrupt:
        raise SystemExit("\nleft the game") from None


if __name__ == "__main__":
    main()
