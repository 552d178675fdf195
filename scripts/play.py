"""Play a finished agent of algos/appo_pfsp.py in the terminal, at Connect Four or tic-tac-toe.

  scripts/run scripts/play.py runs/appo_pfsp/connect_four/seed1-1a2b3c4d
  scripts/run scripts/play.py runs/appo_pfsp/tic_tac_toe/seed1-1a2b3c4d --agent-first

The run's newest checkpoint plays, by the run's own code.py, and always the move that it holds for the best. Your moves
are the numbers that the board shows; q leaves. They can also come from a pipe, one a line.
"""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

GAMES = {"connect_four": "column", "tic_tac_toe": "cell"}


def fail(message):
    raise SystemExit(f"error: {message}")


def load_agent(run):
    """The game's name, the run's module and its policy: obs (B, ...), legal (B, A) -> probabilities (B, A)."""
    for name in ("config.json", "code.py"):
        if not (run / name).exists():
            fail(
                f"{run} is no folder of a run: it has no {name}. Give one such as runs/appo_pfsp/connect_four/seed1-..."
            )
    try:
        args = SimpleNamespace(**json.loads((run / "config.json").read_text())["args"])
    except (KeyError, TypeError, ValueError) as error:
        fail(f"{run}/config.json is damaged ({error!r}): the command of the run writes it anew")
    if getattr(args, "env_id", None) not in GAMES:
        fail(f"{run} is a run of {getattr(args, 'env_id', None)}: only {' and '.join(GAMES)} can be played here")
    checkpoints = sorted((run / "checkpoints").glob("*.pt"))
    if not checkpoints:
        fail(f"{run} has no checkpoint yet: train on")
    if not (run / "result.json").exists():
        print(f"The run is not finished: its newest checkpoint plays, of step {checkpoints[-1].stem.lstrip('0')}.")
    import torch  # seconds, which what is wrong above and --help need not wait for

    try:
        state = torch.load(checkpoints[-1], weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can raise anything
        fail(f"{checkpoints[-1]} cannot be read ({type(error).__name__}): remove it, and the one before plays")
    spec = importlib.util.spec_from_file_location("code_of_the_run", run / "code.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    agent = module.Agent(*module.game_spec(args.env_id), args)
    try:
        agent.load_state_dict(state["agent"])
    except (KeyError, RuntimeError):
        fail(f"{checkpoints[-1]} is not of this run's game and network: remove it, and the one before plays")
    return args.env_id, module, module.as_policy(agent)


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
    try:
        play(*load_agent(options.run), options.agent_first)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python's exit would try again, and fail
        fail("nobody reads the board any more")
    except KeyboardInterrupt:
        raise SystemExit("\nleft the game") from None


if __name__ == "__main__":
    main()
