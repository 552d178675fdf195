"""Finished agents of algos/appo_pfsp*.py against each other, their own past and engines: scores, Elo, exact measures.

  scripts/run scripts/arena.py RUN                                        # the run's agent, 15 snapshots of its league
  scripts/run scripts/arena.py RUN --snapshots 0 --engines random mcts100 --games 200 --greedy
  scripts/run scripts/arena.py RUN RUN RUN --snapshots 0 --engines alphabeta4
  scripts/run --extra openspiel scripts/arena.py RUN --nash-conv

A RUN is a run's folder, such as runs/appo_pfsp/connect_four/seed1-1a2b3c4d; all are of one game. Its newest checkpoint
plays, by its own code.py. Everyone plays everyone, half of the games as either player. Engines, of Connect Four and
tic-tac-toe: alphabeta<moves looked ahead> (9 is perfect in tic-tac-toe), mcts<simulations a move>; random is for all
games. The table goes to the terminal and to payoff.json, the matrix to payoff.png.
"""

import importlib.util
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tyro

ROOT = Path(__file__).parents[1]


@dataclass
class Args:
    runs: tyro.conf.Positional[tuple[Path, ...]]  # folders of runs of one game
    engines: tuple[str, ...] = ()  # random, alphabeta<depth>, mcts<simulations>
    snapshots: int = 15  # of each run's league, the oldest, the newest and evenly between; 0: none
    games: int = 20  # of each pair, an even number
    greedy: bool = False  # agents play the likeliest action, not a sampled one
    seed: int = 10_000  # of the games
    nash_conv: bool = False  # also the exact NashConv of each run's agent and of its league's average
    out: Path | None = None  # folder for payoff.json and payoff.png; None: the first run's


def fail(message):
    raise SystemExit(f"error: {message}")


# ---- Runs ------------------------------------------------------------------------------------------------------------


def run_args(run):
    """The arguments of a run, from its folder."""
    for name in ("config.json", "code.py"):
        if not (run / name).exists():
            fail(f"{run} is no folder of a run: it has no {name}. Give runs/appo_pfsp/connect_four/seed1-... or so")
    try:
        return SimpleNamespace(**json.loads((run / "config.json").read_text())["args"])
    except (KeyError, TypeError, ValueError) as error:
        fail(f"{run}/config.json is damaged ({error!r}): the command of the run writes it anew")


def shape_of(module, game):
    """What a network has to know of a game: the shape of its observations and the number of its actions."""
    games = module.make_games(game, 1)
    return games.obs_shape, games.num_actions


def newest_checkpoint(run):
    checkpoints = sorted((run / "checkpoints").glob("*.pt"))
    if not checkpoints:
        fail(f"{run} has no checkpoint yet: train on")
    return checkpoints[-1]


def load_checkpoint(path):
    """The state that lies in a checkpoint."""
    import torch  # seconds, which what is wrong before and --help need not wait for

    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can raise anything
        fail(f"{path} cannot be read ({type(error).__name__}): remove it, and the one before plays")


def load_program(run):
    """The arguments of a run, the module of its program and its newest checkpoint's state. Before it runs the code that
    it finds there it says so."""
    args, checkpoint = run_args(run), newest_checkpoint(run)
    if not (run / "result.json").exists():
        print(f"The run is not finished: its newest checkpoint plays, of step {checkpoint.stem.lstrip('0')}.")
    print(f"Running the program that lies in the run: {run}/code.py", flush=True)
    state = load_checkpoint(checkpoint)
    spec = importlib.util.spec_from_file_location(f"code_of_{run.name}", run / "code.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        fail(f"{run}/code.py does not run ({type(error).__name__}: {error}): the command of the run writes it anew")
    return args, module, state


def load_agent(run):
    """What `load_program` gives, and the agent with the newest weights: arguments, module, agent, state."""
    args, module, state = load_program(run)
    if not hasattr(module, "as_policies"):
        fail(f"{run} holds no agent that plays games: give a run of algos/appo_pfsp.py or appo_pfsp_openspiel.py")
    agent = module.Agent(*shape_of(module, args.env_id), args)
    try:
        agent.load_state_dict(state["agent"])
    except (KeyError, RuntimeError):
        newest = max((run / "checkpoints").glob("*.pt"))
        fail(f"{newest} is not of this run's game and network: remove it, and the one before plays")
    return args, module, agent, state


# ---- Engines for line games ------------------------------------------------------------------------------------------
# A policy maps obs (n, ...), legal (n, A) to float64 probabilities (n, A). `rules`, the script's LineGames, know what a
# move does.


def random_policy(obs, legal):
    return legal / legal.sum(1, keepdims=True)


def boards_of(rules, obs):
    """Own and other pieces (n, 2), in the bits of `rules`."""
    return (np.asarray(obs, bool) * rules.bits).sum((-2, -1))


def alpha_beta(rules, depth):
    """The policy that looks `depth` moves ahead, sees nothing beyond, and is uniform over the best moves."""
    steps, gap = rules.steps[:, 0].tolist(), rules.length - 2
    # the middle first: it is most often good, which cuts off most
    order = sorted(range(len(rules.cells)), key=lambda a: abs(a - len(rules.cells) // 2))
    lowest, cells = rules.lowest.tolist(), rules.cells.tolist()

    def won(pieces):
        return any((pairs := pieces & pieces >> step) & pairs >> gap * step for step in steps)

    @lru_cache(100_000)
    def value(own, other, depth, low, high):
        """1 + the moves left when the player to move wins, 0 if nobody does, within low to high: sooner is better."""
        occupied = own | other
        moves = [move for a in order if (move := (occupied + lowest[a]) & cells[a])]
        if depth > 0 and any(won(own | move) for move in moves):
            return 1 + depth
        if depth <= 1 or not moves:
            return 0
        for move in moves:
            low = max(low, -value(other, own | move, depth - 1, -high, -low))
            if low >= high:
                break
        return low

    @cache
    def best_actions(own, other):
        best, actions = -math.inf, []
        for a in order:
            if move := (own + other + lowest[a]) & cells[a]:
                low = best - 1  # so that equally good moves are told from worse ones
                v = 1 + depth if won(own | move) else -value(other, own | move, depth - 1, -math.inf, -low)
                best, actions = (v, [a]) if v > best else (best, actions + [a] * (v == best))
        return actions

    def policy(obs, legal):
        probabilities = np.zeros(legal.shape)
        for row, board in zip(probabilities, boards_of(rules, obs).tolist()):
            actions = best_actions(*board)
            row[actions] = 1 / len(actions)
        return probabilities

    return policy


def mcts(rules, simulations=100, c=2.0, seed=0):
    """The policy of Monte Carlo tree search (UCT with constant c, one random playout each; Kocsis & Szepesvari 2006):
    a new tree for every move, all B of a batch at a time, then the most visited action."""
    rng = np.random.default_rng(seed)

    def playout(boards):
        """Results (B,) of random play for the player to move: 1, 0, -1."""
        result, sign, alive, (own, other) = np.zeros(len(boards)), 1.0, np.arange(len(boards)), boards.T
        while len(alive):
            moves = np.zeros_like(own)
            while len(rest := np.flatnonzero(moves == 0)):  # again for those who drew an illegal action
                action = rng.integers(len(rules.cells), size=len(rest))
                moves[rest] = ((own[rest] | other[rest]) + rules.lowest[action]) & rules.cells[action]
            own = own | moves
            won = rules.won(own)
            result[alive[won]] = sign
            go = ~won & (own | other != rules.full)
            alive, own, other, sign = alive[go], other[go], own[go], -sign
        return result

    def policy(obs, legal):
        root, (B, A) = boards_of(rules, obs), legal.shape
        child = np.zeros((B, simulations + 1, A), np.int64)  # node 0 is the root, and no node's child
        visits, total = np.zeros((B, simulations + 1)), np.zeros((B, simulations + 1))  # total: for who moved there
        for n in range(1, simulations + 1):
            games, node, boards, sign, path = np.arange(B), np.zeros(B, np.int64), root, 1.0, []
            leaf, leaf_sign, value = root.copy(), np.zeros(B), np.zeros(B)  # value: for the player to move at the root
            while len(games):
                moves, children, row = rules.moves(boards), child[games, node], np.arange(len(games))
                count = np.maximum(visits[games[:, None], children], 1)
                explore = c * np.sqrt(np.log(np.maximum(visits[games, node], 1))[:, None] / count)
                score = total[games[:, None], children] / count + explore
                score = np.where(children, score, 1e9 + rng.random(score.shape))  # the untried first
                action = np.where(moves, score, -np.inf).argmax(1)
                new = children[row, action] == 0
                child[games[new], node[new], action[new]] = n
                node, own = child[games, node, action], boards[:, 0] | moves[row, action]
                path.append((games, node, sign))
                won = rules.won(own)
                value[games[won]] = sign
                over, boards, sign = won | (own | boards[:, 1] == rules.full), np.stack([boards[:, 1], own], 1), -sign
                leaf[games[new & ~over]], leaf_sign[games[new & ~over]] = boards[new & ~over], sign
                go = ~(new | over)
                games, node, boards = games[go], node[go], boards[go]
            played = leaf_sign != 0
            value[played] = leaf_sign[played] * playout(leaf[played])
            for games, node, sign in path:
                visits[games, node] += 1
                total[games, node] += sign * value[games]
            visits[:, 0] += 1
        count = np.where(child[:, 0], visits[np.arange(B)[:, None], child[:, 0]], 0)
        mean = total[np.arange(B)[:, None], child[:, 0]] / np.maximum(count, 1)
        return np.eye(A)[(count + mean / 4).argmax(1)]  # the mean decides between equally visited ones

    return policy


def engine(name, game, module):
    """The policy of the engine's name."""
    if name == "random":
        return random_policy
    match = re.fullmatch(r"(alphabeta|mcts)([1-9]\d*)", name)
    if not match:
        fail(f"--engines {name}: there are random, alphabeta<depth> and mcts<simulations>, such as alphabeta4, mcts100")
    if game not in getattr(module, "LineGames", SimpleNamespace(GAMES=())).GAMES:
        fail(f"--engines {name}: it plays connect_four and tic_tac_toe of algos/appo_pfsp.py, not {game}. Use random")
    rules, number = module.LineGames(game, 0), int(match[2])
    return alpha_beta(rules, number) if match[1] == "alphabeta" else mcts(rules, number)


# ---- Measures --------------------------------------------------------------------------------------------------------


def play_match(policy_a, policy_b, module, game, num_games, seed=0):
    """Side by side, `num_games` games, an even number: a is player 0 in every other one. Returns what a has got and how
    many moves both made, (num_games,) each."""
    *seeds, moves = np.random.SeedSequence(seed).spawn(num_games + 1)
    games, rng, seat = module.make_games(game, num_games), np.random.default_rng(moves), np.arange(num_games) % 2
    games.reset(seeds)
    returns, lengths, playing = np.zeros(num_games), np.zeros(num_games, np.int64), np.arange(num_games)
    while len(playing):
        (obs, legal), own = games.observe(playing), games.player[playing] == seat[playing]
        probabilities = np.zeros(legal.shape)
        for policy, turn in ((policy_a, own), (policy_b, ~own)):
            if turn.any():
                probabilities[turn] = policy(obs[turn], legal[turn])
        cumulative = probabilities.cumsum(1)
        actions = (cumulative > rng.random((len(playing), 1)) * cumulative[:, -1:]).argmax(1)
        rewards, ended = games.step(actions, playing)
        returns[playing] += rewards[np.arange(len(playing)), seat[playing]]
        lengths[playing] += 1
        playing = playing[~ended]
    return returns, lengths


def score(returns):
    """Mean of 1 for a game won, 1/2 for a draw, 0 for a loss."""
    return float(np.mean((np.sign(returns) + 1) / 2))


def round_robin(entrants, module, game, num_games, seed=0):
    """Mean scores (n, n) of each policy of `entrants` (row) against each (column), 1/2 against itself; and those of the
    row in the games in which it moves first."""
    payoff = np.full((len(entrants), len(entrants)), 0.5)
    first = payoff.copy()
    for i in range(len(entrants)):
        for j in range(i):
            returns, _ = play_match(entrants[i], entrants[j], module, game, num_games, seed)
            payoff[i, j], first[i, j] = score(returns), score(returns[::2])
            payoff[j, i], first[j, i] = 1 - payoff[i, j], 1 - score(returns[1::2])
    return payoff, first


def elo(payoff, num_games, rounds=1000):
    """Elo ratings (n,), the first one 1000, from mean scores (n, n) of `num_games` games a pair: the likeliest ones
    (Bradley-Terry model), with one draw more a pair, so that a clean sweep is finite. By Newton's method, with steps of
    1 at most (174 points); says on stderr where that does not get there."""
    n = len(payoff)
    strength, others = np.zeros(n), 1 - np.eye(n)  # natural logarithms
    points = (others * (num_games * np.asarray(payoff) + 0.5)).sum(1)
    most = (num_games + 1) * (n - 1)
    tolerance = 1e-9 * np.minimum(points, most - points) + 1e-13 * most
    for _ in range(rounds):
        expected = 1 / (1 + np.exp(strength - strength[:, None]))
        missing = points - ((num_games + 1) * others * expected).sum(1)
        if (abs(missing) <= tolerance).all():
            break
        curvature = -(num_games + 1) * others * expected * expected.T
        curvature -= np.diag(curvature.sum(1))
        step = np.linalg.lstsq(curvature[1:, 1:], missing[1:], rcond=None)[0]
        strength[1:] += step / max(abs(step).max(), 1)
    else:
        print(f"warning: the Elo ratings have not converged: {abs(missing).max():.3g} points of "
              f"{num_games} games a pair are unexplained", file=sys.stderr)  # fmt: skip
    return 1000 + 400 / math.log(10) * strength


def information_states(game, module):
    """What the script's nash_conv needs of a game in sequential moves, None in a matrix game. Of OpenSpiel's, up to
    600,000 positions: seconds and 1 GB for tic-tac-toe."""
    if game in getattr(module, "MatrixGames", SimpleNamespace(GAMES=())).GAMES:
        return None
    if hasattr(module, "information_states"):
        states = module.information_states(game, limit=600_000)
    elif game == "tic_tac_toe":  # OpenSpiel's game, shown in the script's own way: a key lists the cells played
        keys, _, *rest = openspiel_script().information_states(game, limit=600_000)
        rules = module.LineGames(game, 0)
        played = [[int(rules.cells[int(cell)]) for cell in re.findall(r"\d", key)] for key in keys]
        boards = [[sum(cells[k::-2]) for k in (-2, -1)] for cells in played]
        states = keys, rules.planes(np.array(boards)), *rest
    else:
        states = None
    if states is None:
        fail(f"--nash-conv: {game} has too many positions, or does not tell its information states")
    return states


def openspiel_script():
    sys.path.insert(0, str(ROOT))
    from algos import appo_pfsp_openspiel

    return appo_pfsp_openspiel


def nash_conv(game, module, policies):
    """Of the average of a run's policies (Lanctot et al. 2017): 0 at a Nash equilibrium."""
    if (states := information_states(game, module)) is None:
        return module.nash_conv(game, policies)
    script = module if hasattr(module, "information_states") else openspiel_script()
    return script.nash_conv(game, policies, states)


def plot_payoff(payoff, labels, path):
    """A heat map of the mean scores (n, n) as a picture file."""
    from matplotlib.figure import Figure

    n = len(payoff)
    figure = Figure(figsize=(2 + 0.5 * n, 1.5 + 0.5 * n), layout="constrained")
    axes = figure.add_subplot(xticks=range(n), yticks=range(n), xlabel="opponent", title="mean score of the row")
    axes.set_xticklabels(labels, rotation=90)
    axes.set_yticklabels(labels)
    figure.colorbar(axes.imshow(payoff, cmap="RdBu", vmin=0, vmax=1))
    for i in range(n if n <= 20 else 0):
        for j in range(n):
            color = "white" if abs(payoff[i][j] - 0.5) > 0.35 else "black"
            axes.text(j, i, f"{payoff[i][j]:.2f}", ha="center", va="center", fontsize=7, color=color)
    figure.savefig(path)


# ---- The arena -------------------------------------------------------------------------------------------------------


def chosen(ids, count):
    """`count` of the ids at most: the first, the last, and evenly between."""
    return [ids[i] for i in np.unique(np.linspace(0, len(ids) - 1, count).round().astype(int))] if ids and count else []


def name_runs(runs):
    """Short labels: the runs' folders without what all have in common; of one run the newest agent is "newest"."""
    if len(runs) == 1:
        return ["newest"]
    common = Path(os.path.commonpath([run.resolve() for run in runs]))
    return [str(run.resolve().relative_to(common)) for run in runs]


def main(args):
    if not args.runs:
        fail("no run is given: name the folder of one or more")
    if len({run.resolve() for run in args.runs}) < len(args.runs):
        fail("a run is given twice")
    loaded = [load_agent(run) for run in args.runs]
    games = {(a.env_id, *shape_of(module, a.env_id)) for a, module, *_ in loaded}
    if len(games) > 1:
        fail(f"the runs are not of one game, shown in one way: {', '.join(sorted(map(str, games)))}")
    game, module = loaded[0][0].env_id, loaded[0][1]
    if args.games < 2 or args.games % 2:
        fail(f"--games {args.games}: an even number plays both seats alike")
    entrants = {name: engine(name, game, module) for name in args.engines}
    for label, (settings, code, agent, state) in zip(name_runs(args.runs), loaded):
        league = dict(zip(state["league"]["ids"], state["league"]["agents"]))
        some = {str(i) if len(loaded) == 1 else f"{label}:{i}": league[i] for i in chosen([*league], args.snapshots)}
        some[label] = code.flat_weights(agent)
        entrants |= zip(some, code.as_policies(some.values(), settings, args.greedy))
        if args.nash_conv:
            newest, *rest = code.as_policies([code.flat_weights(agent), *league.values()], settings)
            average = f", of its league's average {nash_conv(game, code, rest):.4f}" if rest else ""
            print(f"{label}: NashConv {nash_conv(game, code, [newest]):.4f}{average}")
    payoff, first = round_robin([*entrants.values()], module, game, args.games, args.seed)
    ratings, labels = elo(payoff, args.games), [*entrants]
    show(labels, payoff, first, ratings, len(args.engines))
    table = {"game": game, "games": args.games, "labels": labels, "payoff": payoff.tolist(), "first": first.tolist(),
             "elo": ratings.tolist()}  # fmt: skip
    out = args.out or args.runs[0]
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "payoff.json").write_text(json.dumps(table))
        plot_payoff(payoff, labels, out / "payoff.png")
    except OSError as error:
        fail(f"--out {out} cannot be written: {error}")
    print(f"{out}/payoff.json and {out}/payoff.png hold the whole matrix.")


def show(labels, payoff, first, ratings, num_engines):
    """A table of the ratings and the mean scores, win 1, draw 1/2: against all others and against each engine."""
    header = ["", "Elo", "score (as first, as second)", *(f"against {name}" for name in labels[:num_engines])]
    rows = [header, ["---"] * len(header)]
    for i, label in enumerate(labels):
        rivals = [np.arange(len(labels)) != i, *np.eye(len(labels), dtype=bool)[:num_engines]]
        scores = [(payoff[i, rival].mean(), first[i, rival].mean(), 1 - first[rival, i].mean()) for rival in rivals]
        cells = ["{:.3f} ({:.2f}, {:.2f})".format(*score) for score in scores]
        rows.append([label, f"{ratings[i]:.0f}", *("" if rival[i] else c for rival, c in zip(rivals, cells))])
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
