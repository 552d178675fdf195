"""The games of algos/appo_pfsp*.py, scripts/arena.py and scripts/play.py against slow oracles and OpenSpiel."""

import importlib.util
import itertools
import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro

from algos import appo_pfsp as script
from algos import appo_pfsp_openspiel as tree
from scripts import arena

ROOT = Path(__file__).parent.parent
LINE_GAMES = ["connect_four", "tic_tac_toe"]
DRAWN = [int(c) for c in "022020444203163623312330666064114411555555"]  # of Connect Four


def needs(module):
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


openspiel = needs("pyspiel")
OF_OPENSPIEL = ["kuhn_poker", "leduc_poker", "goofspiel(num_cards=4)", "matrix_mp", "othello"]
ALL = [*LINE_GAMES, "rps", "biased_rps", *(pytest.param(name, marks=openspiel) for name in OF_OPENSPIEL)]


def seeds(count, seed=0):
    return np.random.SeedSequence(seed).spawn(count)


def of(name):
    """The script that plays the game."""
    return tree if name in OF_OPENSPIEL else script


def make(name, count, seed=0):
    games = of(name).make_games(name, count)
    games.reset(seeds(count, seed))
    return games


def random_actions(legal, rng):
    return np.array([rng.choice(np.flatnonzero(row)) for row in legal])


def play(games, steps, rng):
    """Random legal moves; yields (player, obs, legal, actions, rewards, ended), the first three before the move."""
    for _ in range(steps):
        player, (obs, legal) = games.player.copy(), games.observe()
        actions = random_actions(legal, rng)
        yield player, obs, legal, actions, *games.step(actions)


class Board:
    """The rules of Connect Four and tic-tac-toe, slowly: cells[row][column], row 0 at the top, of 0, 1 or None."""

    def __init__(self, name):
        self.rows, self.columns, self.length = (6, 7, 4) if name == "connect_four" else (3, 3, 3)
        self.drop = name == "connect_four"
        self.cells, self.player = [[None] * self.columns for _ in range(self.rows)], 0

    def target(self, action):
        """The cell that an action fills, None if it is illegal."""
        if not self.drop:
            row, column = divmod(action, self.columns)
            return (row, column) if self.cells[row][column] is None else None
        free = [row for row in range(self.rows) if self.cells[row][action] is None]
        return (free[-1], action) if free else None

    def legal(self):
        return [self.target(action) is not None for action in range(self.columns if self.drop else 9)]

    def wins(self, player):
        for row, column in itertools.product(range(self.rows), range(self.columns)):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                line = [(row + k * down, column + k * right) for k in range(self.length)]
                if all(r < self.rows and 0 <= c < self.columns and self.cells[r][c] == player for r, c in line):
                    return True
        return False

    def planes(self):
        return np.array(
            [[[cell == who for cell in row] for row in self.cells] for who in (self.player, 1 - self.player)]
        )

    def play(self, action):
        """(reward of player 0, ended)"""
        row, column = self.target(action)
        self.cells[row][column], player = self.player, self.player
        self.player = 1 - player
        won = self.wins(player)
        return (1 - 2 * player) * won, won or not any(self.legal())

    def after(self, action):
        board = Board("connect_four" if self.drop else "tic_tac_toe")
        board.cells, board.player = [list(row) for row in self.cells], self.player
        return board, *board.play(action)


# ---- Connect Four and tic-tac-toe ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LINE_GAMES)
def test_line_games_follow_the_rules(name):
    games, rng = make(name, 16), np.random.default_rng(0)
    boards, finished = [Board(name) for _ in range(16)], []
    for player, obs, legal, actions, rewards, ended in play(games, 150, rng):
        assert (obs.dtype, rewards.dtype, player.dtype) == (np.float32, np.float32, np.int8)
        for i, board in enumerate(boards):
            assert player[i] == board.player
            np.testing.assert_array_equal(obs[i], board.planes())
            np.testing.assert_array_equal(legal[i], board.legal())
            reward, over = board.play(actions[i])
            assert (rewards[i].tolist(), ended[i]) == ([reward, -reward], over)
            if over:
                boards[i] = Board(name)
                finished.append(reward)
    assert {1, -1} <= set(finished) and len(finished) > 90


@pytest.mark.parametrize("name", LINE_GAMES)
def test_every_line_wins_and_nothing_else_does(name):
    board, rules, rng = Board(name), script.LineGames(name, 0), np.random.default_rng(0)
    cells = np.array(list(itertools.product(range(board.rows), range(board.columns))))
    few = rng.random((3000, len(cells))) < rng.uniform(0.1, 0.6, (3000, 1))  # also boards that no game comes to
    wins = []
    for pieces in few:
        board.cells = [[None] * board.columns for _ in range(board.rows)]
        for row, column in cells[pieces]:
            board.cells[row][column] = 0
        wins.append(board.wins(0))
    planes = few.reshape(-1, 1, board.rows, board.columns).repeat(2, 1)
    bits = arena.boards_of(rules, planes)
    np.testing.assert_array_equal(rules.won(bits[:, 0]), wins)
    np.testing.assert_array_equal(rules.planes(bits), planes)
    lines = [
        {(r + k * down, c + k * right) for k in range(board.length)}
        for r, c in cells
        for down, right in ((0, 1), (1, 0), (1, 1), (1, -1))
        if r + (board.length - 1) * down < board.rows and 0 <= c + (board.length - 1) * right < board.columns
    ]
    assert len(lines) == {"connect_four": 69, "tic_tac_toe": 8}[name]
    for line in lines:
        for gap in [None, *line]:  # the whole line, and without one of its cells
            own = sum(int(rules.bits[cell]) for cell in line if cell != gap)
            assert rules.won(np.array([own])).tolist() == [gap is None]


def test_a_full_board_is_a_draw_and_the_next_game_begins():
    games = make("connect_four", 2)
    for number, column in enumerate(DRAWN):
        assert games.player.tolist() == [number % 2] * 2
        rewards, ended = games.step([column] * 2)
        assert not rewards.any() and ended.tolist() == [number == 41] * 2
    assert games.player.tolist() == [0, 0] and not games.observe()[0].any() and games.observe()[1].all()


def test_openings_are_random_moves_before_the_game():
    games = script.make_games("connect_four", 40)
    games.openings[:] = np.arange(40) % 6
    games.reset(seeds(40))
    pieces = games.observe()[0].sum((2, 3))
    np.testing.assert_array_equal(pieces, np.stack([games.openings // 2, (games.openings + 1) // 2], 1))
    np.testing.assert_array_equal(games.player, games.openings % 2)
    assert len(np.unique(games.boards[5::6], axis=0)) > 3
    boards = games.boards.copy()
    games.openings[3:] = 0  # for the games that begin from now on
    games.set_state(games.get_state())
    np.testing.assert_array_equal(games.boards, boards)
    for *_, ended in play(games, 43, np.random.default_rng(0)):
        fresh = games.observe()[0].sum((1, 2, 3))[ended]
        np.testing.assert_array_equal(fresh, games.openings[ended])


@openspiel
@pytest.mark.parametrize("name", LINE_GAMES)
def test_line_games_are_those_of_openspiel(name):
    import pyspiel

    game, games = pyspiel.load_game(name), make(name, 8)
    states = [game.new_initial_state() for _ in range(8)]
    for player, _, legal, actions, rewards, ended in play(games, 120, np.random.default_rng(1)):
        for i, state in enumerate(states):
            assert player[i] == state.current_player() and np.flatnonzero(legal[i]).tolist() == state.legal_actions()
            state.apply_action(int(actions[i]))
            assert rewards[i].tolist() == state.returns() and ended[i] == state.is_terminal()
            if ended[i]:
                states[i] = game.new_initial_state()


# ---- all families ----------------------------------------------------------------------------------------------------


def packed(state):
    """As a checkpoint has it: tensors for arrays."""
    if isinstance(state, dict):
        return {key: packed(value) for key, value in state.items()}
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


@pytest.mark.parametrize("name", ALL)
def test_games_that_are_not_told_to_move_stand_still(name):
    """Two games, moved one at a time, go as they do alone."""
    steps, rng = 60, np.random.default_rng(0)
    both, alone = make(name, 2), [of(name).make_games(name, 1) for _ in range(2)]
    for games, seed in zip(alone, seeds(2)):
        games.reset([seed])
    for _ in range(steps):
        i = rng.integers(2, size=1)
        one = alone[i[0]]
        for array, expected in zip(both.observe(i), one.observe()):
            np.testing.assert_array_equal(array, expected)
        action = random_actions(one.observe()[1], rng)
        for array, expected in zip(both.step(action, i), one.step(action)):
            np.testing.assert_array_equal(array, expected)
        assert both.player.tolist() == [int(games.player[0]) for games in alone]


@pytest.mark.parametrize("name", ALL)
def test_state_goes_on_from_exactly_there(name, tmp_path):
    count, steps = 5, 47
    games, rng = make(name, count), np.random.default_rng(0)
    if name in ("connect_four", "othello"):
        games.openings[:] = 3
    list(play(games, steps, rng))
    state = games.get_state()
    torch.save(packed(state), tmp_path / "state.pt")
    rng_before = rng.bit_generator.state
    expected = list(play(games, steps, rng))
    for saved in (state, torch.load(tmp_path / "state.pt", weights_only=True)):
        again = of(name).make_games(name, count)
        again.set_state(saved)
        rng.bit_generator.state = rng_before
        found = list(play(again, steps, rng))
        for found_arrays, expected_arrays in zip(found, expected, strict=True):
            for a, b in zip(found_arrays, expected_arrays, strict=True):
                np.testing.assert_array_equal(a, b)
                assert a.dtype == b.dtype
    assert np.array([row[4] for row in expected]).sum(2) == pytest.approx(0)


@pytest.mark.parametrize("name", ALL)
def test_illegal_actions_and_foreign_states_are_refused(name):
    games = make(name, 2)
    before = [array.copy() for array in games.observe()]
    for action in (-1, games.num_actions):
        with pytest.raises(RuntimeError, match=rf"game 1: player 0 took action {action}, legal are \[\d"):
            games.step([int(before[1][0].argmax()), action])
    for found, expected in zip(games.observe(), before):
        np.testing.assert_array_equal(found, expected)
    for call, given in ((of(name).make_games(name, 3).set_state, games.get_state()), (games.reset, seeds(3))):
        with pytest.raises(ValueError, match=r"zip\(\) argument 2 is (shorter|longer) than argument 1"):
            call(given)


def test_a_full_column_is_an_illegal_action():
    games = make("connect_four", 1)
    for _ in range(6):
        games.step([2])
    with pytest.raises(
        RuntimeError, match=r"connect_four, game 0: player 0 took action 2, legal are \[0, 1, 3, 4, 5, 6\]"
    ):
        games.step([2])


@openspiel
def test_each_game_has_its_own_chance():
    def deals(which, steps=60):
        games, found = tree.make_games("kuhn_poker", len(which)), []
        games.reset([seeds(6)[i] for i in which])
        for _ in range(steps):
            found.append(games.observe()[0])
            games.step(np.zeros(len(which), int))
        return np.array(found)

    np.testing.assert_array_equal(deals([4, 1]), deals(range(6))[:, [4, 1]])
    assert (deals([0]) != deals([1])).any()


@pytest.mark.parametrize("name", ["rps", "biased_rps"])
def test_rock_paper_scissors_pays_its_matrix(name):
    games = make(name, 9)
    first, second = np.divmod(np.arange(9), 3)
    obs, legal = games.observe()
    assert obs.tolist() == [[1, 0]] * 9 and legal.all()
    rewards, ended = games.step(first)
    assert not rewards.any() and not ended.any() and games.player.all()
    assert games.observe()[0].tolist() == [[0, 1]] * 9  # nothing of what the first one chose
    rewards, ended = games.step(second)
    beats, rock = {(0, 2), (1, 0), (2, 1)}, 2 if name == "biased_rps" else 1
    for i, pair in enumerate(zip(first.tolist(), second.tolist())):
        size = rock if set(pair) == {0, 2} else 1
        gain = size * ((pair in beats) - (pair[::-1] in beats))
        assert rewards[i].tolist() == [gain, -gain]
    assert ended.all() and not games.player.any()


# ---- OpenSpiel -------------------------------------------------------------------------------------------------------


@openspiel
@pytest.mark.parametrize("name", OF_OPENSPIEL)
def test_openspiel_games_are_openspiels(name):
    import pyspiel

    game = pyspiel.load_game(name)
    if game.get_type().dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS:
        game = pyspiel.convert_to_turn_based(game)
    kind = "information_state" if game.get_type().provides_information_state_tensor else "observation"
    games, rng, finished = make(name, 3), np.random.default_rng(0), 0
    for _ in range(70):
        (obs, legal), player = games.observe(), games.player.copy()
        histories = [state.history() for state in games.states]
        actions = random_actions(legal, rng)
        rewards, ended = games.step(actions)
        for i, history in enumerate(histories):
            state = game.new_initial_state()
            for action in history:
                state.apply_action(action)
            tensor = getattr(state, f"{kind}_tensor")()
            assert player[i] == state.current_player() and np.flatnonzero(legal[i]).tolist() == state.legal_actions()
            assert obs[i].ravel().tolist() == pytest.approx(tensor + [player[i]] * (obs[i].size - len(tensor)))
            state.apply_action(int(actions[i]))
            if not ended[i]:
                assert games.states[i].history()[: len(history) + 1] == state.history() and not rewards[i].any()
                continue
            while state.is_chance_node():  # one that has a single outcome
                state.apply_action(state.legal_actions()[0])
            assert state.is_terminal() and rewards[i].tolist() == state.returns()
        finished += ended.sum()
    assert finished > 20 or (name == "othello" and finished)


@openspiel
def test_openspiel_deals_by_its_probabilities():
    games = make("kuhn_poker", 3000)
    cards = [tuple(state.history()) for state in games.states]
    counts = [cards.count(deal) for deal in itertools.permutations(range(3), 2)]
    assert sum(counts) == 3000 and max(abs(np.array(counts) - 500)) < 4 * np.sqrt(500)


@openspiel
def test_simultaneous_moves_are_hidden():
    games = make("goofspiel(num_cards=4)", 4)
    games.reset([7] * 4)  # the same prizes
    games.step(np.arange(4))
    assert games.player.all() and (games.observe()[0] == games.observe()[0][0]).all()


@openspiel
def test_openings_of_openspiel_are_random_moves_too():
    """A game that is over before its opening begins without one."""
    games = tree.make_games("tic_tac_toe", 40)
    games.openings[:] = np.arange(40) % 5
    games.reset(seeds(40))
    assert [len(state.history()) for state in games.states] == games.openings.tolist()
    np.testing.assert_array_equal(games.player, games.openings % 2)
    assert len({tuple(state.history()) for state in games.states[4::5]}) > 5
    kuhn = tree.make_games("kuhn_poker", 40)
    kuhn.openings[:] = 2
    kuhn.reset(seeds(40))
    assert {len(state.history()) - 2 for state in kuhn.states} == {0, 2}
    assert games.most_openings == 9


@pytest.mark.parametrize(
    "name, message",
    [
        pytest.param("konnect_four", "there is no game konnect_four. Nearest: connect_four", marks=openspiel),
        pytest.param(
            "kuhn_poker(players=3)", "is not a two-player zero-sum game: 3 players, zero_sum", marks=openspiel
        ),
        pytest.param("first_sealed_auction", "is not a .* game: 2 players, general_sum", marks=openspiel),
        pytest.param("coordinated_mp", "coordinated_mp has neither an information state tensor", marks=openspiel),
        pytest.param("goofspiel(cards=4)", "OpenSpiel cannot load goofspiel", marks=openspiel),
    ],
)
def test_other_games_are_refused(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        tree.make_games(name, 1)
    assert "\n" not in str(caught.value)


def test_an_unknown_game_is_named_with_those_that_there_are():
    with pytest.raises(
        ValueError, match="no game kuhn_poker.* connect_four, tic_tac_toe, rps, biased_rps. .*openspiel"
    ):
        script.make_games("kuhn_poker", 1)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspiel", None)
    with pytest.raises(ValueError, match="pyspiel.* scripts/run --extra openspiel ") as caught:
        tree.make_games("breakthrough", 1)
    assert "\n" not in str(caught.value)


def rules(name):
    return script.LineGames(name, 0)


# ---- engines ---------------------------------------------------------------------------------------------------------


def exact(board, depth):
    """The value of a board for the player to move by plain search: 1 + moves left if that player wins."""
    if depth == 0 or not any(board.legal()):
        return 0
    return max(-after if over is None else over for over, after in outcomes(board, depth))


def outcomes(board, depth):
    """(value if the move ends the game, else None; the value for the other player) of every legal move."""
    for action in np.flatnonzero(board.legal()).tolist():
        following, reward, over = board.after(action)
        yield ((1 + depth - 1) * abs(reward), 0) if over else (None, exact(following, depth - 1))


def position(name, moves, rng):
    """A board after random moves that is not over, and what a policy sees of it."""
    while True:
        board, over = Board(name), False
        for _ in range(moves):
            if not over:
                over = board.play(rng.choice(np.flatnonzero(board.legal())))[1]
        if not over:
            return board, board.planes()[None].astype(np.float32), np.array(board.legal())[None]


@pytest.mark.parametrize("name, depth, least", [("connect_four", 3, 14), ("tic_tac_toe", 9, 3), ("tic_tac_toe", 2, 2)])
def test_alpha_beta_finds_the_moves_of_plain_search(name, depth, least):
    engine, rng, decisive = arena.alpha_beta(rules(name), depth), np.random.default_rng(0), 0
    for _ in range(12):
        board, obs, legal = position(name, rng.integers(least, 2 * least), rng)
        values = [v if v is not None else -after for v, after in outcomes(board, depth)]
        best = np.flatnonzero(legal[0])[np.array(values) == max(values)]
        probabilities = engine(obs, legal)[0]
        assert np.flatnonzero(probabilities).tolist() == best.tolist() and probabilities.sum() == pytest.approx(1)
        assert probabilities.max() == pytest.approx(1 / len(best))
        decisive += len(best) < len(values)
    assert decisive > 2


def scores(policy, opponent, name, moves):
    """The rewards of `policy` in all games that end within `moves` moves at 50 places, at half of them as player 0."""
    games, rng, seat, found = make(name, 50), np.random.default_rng(0), np.arange(50) % 2, []
    for _ in range(moves):
        obs, legal = games.observe()
        p = np.where((games.player == seat)[:, None], policy(obs, legal), opponent(obs, legal))
        rewards, ended = games.step([rng.choice(len(row), p=row) for row in p])
        found += rewards[ended, seat[ended]].tolist()
    return np.array(found)


def test_minimax_never_loses_tic_tac_toe():
    minimax = arena.alpha_beta(rules("tic_tac_toe"), 9)
    against_random = scores(minimax, arena.random_policy, "tic_tac_toe", 40)
    assert len(against_random) > 200 and against_random.min() == 0 and against_random.mean() > 0.7
    assert not scores(minimax, minimax, "tic_tac_toe", 18).any()


def test_mcts_sees_a_win_and_a_threat():
    board = Board("connect_four")
    for action in (0, 6, 0, 6, 0, 6):  # both have three in a column
        board.play(action)
    legal = np.ones((1, 7), bool)
    for expected in (0, 6):
        obs = board.planes()[None].astype(np.float32)
        assert arena.mcts(rules("connect_four"), 200)(obs, legal)[0].tolist() == np.eye(7)[expected].tolist()
        if expected == 0:
            board.cells[2][0] = 1  # the own column is blocked now: the other's has to be
            board.cells[0][3] = None
    batch = np.concatenate([obs, np.zeros_like(obs), obs])
    probabilities = arena.mcts(rules("connect_four"), 200)(batch, np.ones((3, 7), bool))
    assert probabilities[[0, 2]].argmax(1).tolist() == [6, 6] and probabilities.sum() == 3


def test_the_playouts_of_mcts_tell_it_that_the_middle_is_best():
    openings = arena.mcts(rules("connect_four"), 200)(np.zeros((60, 2, 6, 7)), np.ones((60, 7), bool)).mean(0)
    assert openings[3] > 0.3 and openings[2:5].sum() > 0.6 and openings[[0, 6]].max() < 0.25


def test_mcts_is_better_with_more_simulations_and_repeats_itself():
    rng, best, good, weak = (
        np.random.default_rng(0),
        *(arena.mcts(rules("connect_four"), count) for count in (100, 30, 5)),
    )
    assert match_score(best, arena.random_policy, "connect_four", 40) > 0.95
    assert match_score(good, weak, "connect_four", 40) > 0.75
    obs, legal = position("connect_four", 4, rng)[1:]
    obs, legal = obs.repeat(20, 0), legal.repeat(20, 0)
    one, other, again = (arena.mcts(rules("connect_four"), 5, seed=seed)(obs, legal) for seed in (1, 2, 1))
    assert (one == again).all() and (one != other).any()


# ---- matches, ratings ------------------------------------------------------------------------------------------------


def always(action):
    return lambda obs, legal: np.eye(legal.shape[1])[np.full(len(obs), action)]


def match_score(*match):
    policy_a, policy_b, *rest = match
    return arena.score(arena.play_match(policy_a, policy_b, script, *rest)[0])


def test_a_match_is_fair_in_seats():
    seen = {"a": [], "b": []}

    def spy(name, policy):
        def spied(obs, legal):
            seen[name].append(obs.argmax(1).tolist())  # rps shows the seat
            return policy(obs, legal)

        return spied

    paper, rock = spy("a", always(1)), spy("b", always(0))
    returns, lengths = arena.play_match(paper, rock, script, "rps", 22)
    assert (returns == 1).all() and (lengths == 2).all() and arena.score(returns) == 1
    assert seen["a"] == seen["b"] == [[0] * 11, [1] * 11]
    assert match_score(rock, paper, "rps", 22) == 0.0
    assert match_score(rock, rock, "rps", 22) == 0.5
    assert (arena.play_match(paper, always(2), script, "biased_rps", 4)[0] == -1).all()


def test_a_match_is_no_better_for_the_first_to_move_and_repeats_itself():
    assert make("connect_four", 1).player[0] == 0
    assert abs(match_score(arena.random_policy, arena.random_policy, "connect_four", 1000) - 0.5) < 0.06
    mixed = lambda obs, legal: np.array([[0.2, 0.5, 0.3]] * len(obs))  # noqa: E731
    assert abs(match_score(mixed, always(0), "rps", 4000) - 0.6) < 0.04  # paper wins, rock draws
    one, again, other = (arena.play_match(mixed, always(0), script, "rps", 40, seed)[0].tolist() for seed in (1, 1, 2))
    assert one == again != other


def test_a_match_plays_one_game_at_each_place():
    asked = []

    def policy(obs, legal):
        asked.extend(obs.sum((1, 2, 3)).astype(int).tolist())  # the moves before
        return arena.random_policy(obs, legal)

    returns, lengths = arena.play_match(policy, policy, script, "connect_four", 60)
    np.testing.assert_array_equal(np.bincount(asked), [(lengths > n).sum() for n in range(lengths.max())])
    assert lengths.min() >= 7 and len(set(lengths)) > 5 and set(returns) <= {-1, 0, 1}
    last_mover_is_a = (lengths % 2 == 1) == (np.arange(60) % 2 == 0)
    np.testing.assert_array_equal(returns[lengths < 42], np.where(last_mover_is_a, 1, -1)[lengths < 42])


def test_a_policy_that_wants_an_illegal_move_is_named():
    with pytest.raises(RuntimeError, match="connect_four, game 0: player . took action 3, legal are"):
        arena.play_match(always(3), always(3), script, "connect_four", 2)


def test_round_robin_and_its_picture(tmp_path):
    entrants = [always(0), always(1), always(2), arena.random_policy]
    payoff, first = arena.round_robin(entrants, script, "rps", 40)
    np.testing.assert_array_equal(payoff[:3, :3], [[0.5, 0, 1], [1, 0.5, 0], [0, 1, 0.5]])
    np.testing.assert_array_equal(first[:3, :3], payoff[:3, :3])
    np.testing.assert_allclose(payoff + payoff.T, 1)
    np.testing.assert_allclose((first + 1 - first.T) / 2, payoff)
    arena.plot_payoff(payoff, ["rock", "paper", "scissors", "random"], tmp_path / "payoff.png")
    assert (tmp_path / "payoff.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_round_robin_tells_the_seats_apart():
    """A policy that plays paper as the first player and rock as the second, against one who always plays rock."""
    by_seat = lambda obs, legal: np.where(obs[:, :1] == 1, [[0, 1, 0]], [[1, 0, 0]])  # noqa: E731
    payoff, first = arena.round_robin([always(0), by_seat], script, "rps", 10)
    assert payoff.tolist() == [[0.5, 0.25], [0.75, 0.5]] and first.tolist() == [[0.5, 0.5], [1, 0.5]]


def test_elo_finds_the_ratings_that_made_the_scores():
    ratings = np.array([1000, 1200, 900, 1750])
    payoff = 1 / (1 + 10 ** ((ratings - ratings[:, None]) / 400))
    np.testing.assert_allclose(arena.elo(payoff, 10**7), ratings, atol=0.1)
    for score, number in ((0.75, 100), (1.0, 10), (0.0, 4)):
        expected = (score * number + 0.5) / (number + 1)
        found = arena.elo(np.array([[0.5, 1 - score], [score, 0.5]]), number)
        np.testing.assert_allclose(found, [1000, 1000 + 400 * np.log10(expected / (1 - expected))])
    np.testing.assert_allclose(arena.elo(np.full((5, 5), 0.5), 10), 1000)
    assert arena.elo(np.array([[0.5]]), 10).tolist() == [1000]
    cycle = np.array([[0.5, 0, 1], [1, 0.5, 0], [0, 1, 0.5]])
    np.testing.assert_allclose(arena.elo(cycle, 10), 1000)


def test_elo_says_where_it_has_not_converged(capsys):
    """Clean sweeps along a chain, of a million games a pair: thousands of points, which Newton's method still finds."""
    n, games = 12, 10**6
    payoff = np.tril(np.ones((n, n)), -1) + np.eye(n) / 2
    ratings = arena.elo(payoff, games)
    expected = 1 / (1 + 10 ** ((ratings - ratings[:, None]) / 400))
    points, others = (games * payoff + 0.5), 1 - np.eye(n)
    np.testing.assert_allclose((others * expected).sum(1) * (games + 1), (others * points).sum(1), rtol=2e-6)
    assert np.diff(ratings).min() > 100 and capsys.readouterr().err == ""
    arena.elo(payoff, games, rounds=3)
    assert "warning: the Elo ratings have not converged" in capsys.readouterr().err


# ---- NashConv --------------------------------------------------------------------------------------------------------


def fixed(*probabilities):
    return lambda obs, legal: np.array([probabilities] * len(obs), float)


def test_nash_conv_of_rock_paper_scissors():
    assert script.nash_conv("rps", [arena.random_policy]) == pytest.approx(0)
    assert script.nash_conv("rps", [always(0)]) == 2
    assert script.nash_conv("rps", [always(0), always(1), always(2)]) == pytest.approx(0)
    assert script.nash_conv("rps", [*[always(0)] * 3, always(1)]) == pytest.approx(2 * 0.75)
    assert script.nash_conv("biased_rps", [fixed(1 / 4, 1 / 2, 1 / 4)]) == pytest.approx(0)
    assert script.nash_conv("biased_rps", [arena.random_policy]) == pytest.approx(2 / 3)
    by_seat = lambda obs, legal: np.where(obs[:, :1] == 1, [[1, 0, 0]], [[0, 1, 0]])  # noqa: E731
    assert script.nash_conv("rps", [by_seat]) == 2  # rock can gain 2 by scissors, paper has nothing to gain


def tree_nash_conv(name, policies):
    return tree.nash_conv(name, policies, tree.information_states(name))


def kuhn(table):
    """The policy that bets with table[player, card, what happened so far], from what a network sees."""

    def policy(obs, legal):
        bet = np.empty(len(obs))
        for row, seen in enumerate(obs):
            player, card, moves = seen[:2].argmax(), seen[2:5].argmax(), seen[5:11].reshape(3, 2)
            assert player == seen[11]
            bet[row] = table[player, card, "".join("pb"[move.argmax()] for move in moves if move.any())]
        return np.stack([1 - bet, bet], 1)

    return policy


def kuhn_equilibrium(alpha):
    """Kuhn's family of equilibria, 0 <= alpha <= 1/3; cards 0, 1, 2 are jack, queen, king."""
    first = {(0, ""): alpha, (1, ""): 0, (2, ""): 3 * alpha, (0, "pb"): 0, (1, "pb"): alpha + 1 / 3, (2, "pb"): 1}
    second = {(0, "p"): 1 / 3, (1, "p"): 0, (2, "p"): 1, (0, "b"): 0, (1, "b"): 1 / 3, (2, "b"): 1}
    return {(player, *key): p for player, part in enumerate((first, second)) for key, p in part.items()}


@openspiel
def test_nash_conv_of_known_policies():
    assert tree_nash_conv("kuhn_poker", [arena.random_policy]) == pytest.approx(11 / 12)
    assert tree_nash_conv("leduc_poker", [arena.random_policy]) == pytest.approx(4.747222222222222)
    for alpha in (0, 0.1, 1 / 3):
        assert tree_nash_conv("kuhn_poker", [kuhn(kuhn_equilibrium(alpha))]) == pytest.approx(0, abs=1e-12)
    wrong = kuhn_equilibrium(0.2) | {(1, 1, "b"): 0.5}  # calls too often with the queen: the jack never bluffs
    assert tree_nash_conv("kuhn_poker", [kuhn(wrong)]) > 0.02


def kuhn_value(first, second):
    """Player 0's expected gain between two tables, by hand."""

    def walk(cards, history, p):
        if history in ("pp", "bp", "pbp", "bb", "pbb"):
            high = 1 if cards[0] > cards[1] else -1
            return p * {"pp": high, "bp": 1, "pbp": -1}.get(history, 2 * high)
        player = len(history) % 2
        bet = (first, second)[player][player, cards[player], history]
        return walk(cards, history + "b", p * bet) + walk(cards, history + "p", p * (1 - bet))

    return sum(walk(cards, "", 1 / 6) for cards in itertools.permutations(range(3), 2))


@openspiel
def test_a_league_is_averaged_in_sequence_form():
    rng, names = np.random.default_rng(0), list(kuhn_equilibrium(0))
    one, two, other = ({name: rng.random() for name in names} for _ in range(3))
    assert kuhn_value(kuhn_equilibrium(0.2), kuhn_equilibrium(0)) == pytest.approx(-1 / 18)
    keys, obs, legal, parent, taken = tree.information_states("kuhn_poker")
    table = tree.average([kuhn(one)] * 3 + [kuhn(two)] * 7, parent, taken, obs, legal)
    assert len(keys) == 12 and len(set(keys)) == 12
    rows = {(len(key) % 2 == 0, int(key[0]), key[1:]): row[1] for key, row in zip(keys, table)}
    mean = {(int(player), card, history): p for (player, card, history), p in rows.items()}
    for seat in (0, 1):  # a league's value is the mean of its members' values: that defines its average
        values = [kuhn_value(*((t, other) if seat == 0 else (other, t))) for t in (one, two, mean)]
        assert values[2] == pytest.approx(0.3 * values[0] + 0.7 * values[1])
    naive = 0.3 * one[0, 0, "pb"] + 0.7 * two[0, 0, "pb"]
    passes = 0.3 * (1 - one[0, 0, ""]), 0.7 * (1 - two[0, 0, ""])
    right = (passes[0] * one[0, 0, "pb"] + passes[1] * two[0, 0, "pb"]) / sum(passes)
    assert mean[0, 0, "pb"] == pytest.approx(right) and abs(right - naive) > 0.01
    equal = [kuhn(kuhn_equilibrium(alpha)) for alpha in (0, 1 / 6, 1 / 6, 1 / 3)]
    assert tree_nash_conv("kuhn_poker", equal) == pytest.approx(0, abs=1e-12)


@openspiel
def test_the_decisions_of_tic_tac_toe_are_shown_as_the_games_show_them():
    keys, obs, legal, parent, taken = arena.information_states("tic_tac_toe", script)
    assert len(keys) == 294778
    own, other = obs.reshape(-1, 2, 9).astype(bool).transpose(1, 0, 2)
    np.testing.assert_array_equal(legal, ~(own | other))
    assert not (own & other).any() and set((other.sum(1) - own.sum(1)).tolist()) == {0, 1}
    before = own[parent]  # the own pieces are those before the own last move, and that one
    before[np.arange(len(before)), taken] = True
    np.testing.assert_array_equal(own[parent >= 0], before[parent >= 0])
    assert not own[parent < 0].any()


@openspiel
def test_games_without_an_exact_best_response_have_none():
    assert tree.information_states("leduc_poker", limit=1000) is None and tree.information_states("pig") is None
    for module, name in ((tree, "pig"), (script, "connect_four")):
        with pytest.raises(SystemExit, match=f"--nash-conv: {name} has too many positions, or does not tell"):
            arena.nash_conv(name, module, [arena.random_policy])
    assert arena.nash_conv("rps", script, [always(0)]) == 2
    assert arena.nash_conv("kuhn_poker", tree, [arena.random_policy]) == pytest.approx(11 / 12)


# ---- scripts/play.py -------------------------------------------------------------------------------------------------

# The agent of the run: it holds the action with the highest weight for the best, of the legal ones.
CODE = """
class Agent(torch.nn.Module):
    def __init__(self, obs_shape, num_actions, args):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(num_actions))

def flat_weights(agent):
    return agent.weights.detach().numpy()

def as_policies(snapshots, args):
    (weights,) = snapshots
    return [lambda obs, legal: np.where(legal, weights, 0)]
"""


@pytest.fixture
def finished_run(tmp_path):
    def make_run(name, *best):
        """A run whose newest checkpoint likes the actions `best` in this order."""
        code = Path(script.__file__).read_text().split('\nif __name__ == "__main__"')[0]
        (tmp_path / "code.py").write_text(f"{code}\nimport torch\n{CODE}")
        (tmp_path / "config.json").write_text(json.dumps({"args": {"env_id": name}}))
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        size = {"connect_four": 7, "tic_tac_toe": 9}.get(name, 2)
        weights = torch.ones(size)
        weights[list(best)] = torch.arange(len(best), 0, -1) + 1.0
        torch.save({"agent": {"weights": torch.ones(size)}}, tmp_path / "checkpoints" / "000000000001.pt")
        torch.save({"agent": {"weights": weights}}, tmp_path / "checkpoints" / "000000000002.pt")
        return tmp_path

    return make_run


def run_play(*arguments, moves="", shell=""):
    command = f"{shlex.join([sys.executable, 'scripts/play.py', *map(str, arguments)])} {shell}"
    return subprocess.run(command, shell=True, input=moves, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_play_connect_four_and_win(finished_run):
    done = run_play(finished_run("connect_four", 6, 5), moves="1\n1\n9\n1\n1\n")
    assert done.returncode == 0 and done.stdout.endswith("You win.\n"), done
    assert done.stdout.startswith("The run is not finished: its newest checkpoint plays, of step 2.\n")
    assert "'9' is no move here: 1 2 3 4 5 6 7, or q to leave" in done.stdout
    last = done.stdout.split("you: column 1\n")[-1].splitlines()
    assert last[:7] == [
        "  . . . . . . .",
        "  . . . . . . .",
        *["  X . . . . . ."],
        *["  X . . . . . O"] * 3,
        "  1 2 3 4 5 6 7",
    ]


def test_play_tic_tac_toe_against_an_agent_that_begins(finished_run):
    run = finished_run("tic_tac_toe", 0, 1, 2)
    done = run_play(run, "--agent-first", moves="1\n5\n9\n")
    assert "'1' is no move here: 2 3 4 5 6 7 8 9, or q to leave" in done.stdout
    assert done.stdout.endswith("the agent: cell 3\n  O O O\n  4 X 6\n  7 8 X\nThe agent wins.\n"), done


def test_play_is_left_at_the_end_of_the_input(finished_run):
    done = run_play(finished_run("tic_tac_toe", 0, 2), moves="2\n")
    assert done.returncode == 0 and done.stdout.endswith("  O X 3\n  4 5 6\n  7 8 9\nyour cell: left the game\n")


def test_play_says_what_is_wrong(finished_run, tmp_path):
    for run, message in (
        (tmp_path / "none", "is no folder of a run: it has no config.json"),
        (finished_run("kuhn_poker"), "is a run of kuhn_poker: only connect_four and tic_tac_toe can be played here"),
    ):
        done = run_play(run)
        assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1
    newest = finished_run("tic_tac_toe") / "checkpoints" / "000000000002.pt"
    (tmp_path / "result.json").touch()
    closed = run_play(tmp_path, shell="<&-")
    says = f"Running the program that lies in the run: {tmp_path}/code.py\nYou are X"
    assert closed.returncode == 0 and closed.stdout.startswith(says) and closed.stdout.endswith("left the game\n")
    assert run_play(tmp_path, shell="| true").stderr == "error: nobody reads the board any more\n"
    torch.save({"agent": {"weights": torch.ones(7)}}, newest)
    assert run_play(tmp_path).stderr.startswith(f"error: {newest} is not of this run's game and network")
    newest.write_bytes(b"no checkpoint")
    assert f"{newest} cannot be read" in run_play(newest.parent.parent).stderr
    for path in newest.parent.iterdir():
        path.unlink()
    assert run_play(tmp_path).stderr == f"error: {tmp_path} has no checkpoint yet: train on\n"
    (tmp_path / "config.json").write_text('{"args": {')
    assert run_play(tmp_path).stderr.startswith(f"error: {tmp_path}/config.json is damaged (JSONDecodeError")
    assert "--agent-first" in run_play("--help").stdout


# ---- scripts/arena.py ------------------------------------------------------------------------------------------------

TINY = ("--num-actors 0 --envs-per-actor 4 --batch-rollouts 4 --num-minibatches 1 --hidden-size 8 --num-steps 3 "
        "--snapshot-interval 1 --league-size 4 --eval-episodes 2 --progress none --total-timesteps 60")  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of finished runs by name."""
    found = {}

    def train(name, module, arguments):
        folder = tmp_path_factory.mktemp(name)
        module.train(tyro.cli(module.Args, args=[*f"{TINY} {arguments} --run-dir".split(), str(folder)]))
        found[name] = next(folder.rglob("config.json")).parent

    train("a", script, "--env-id tic_tac_toe")
    train("b", script, "--env-id tic_tac_toe --seed 2 --hidden-size 4")
    train("rps", script, "--env-id rps")
    return found


def run_arena(*arguments):
    command = [sys.executable, "scripts/arena.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_an_arena_of_one_run_plays_its_league(runs, tmp_path):
    done = run_arena(runs["a"], "--engines", "random", "alphabeta9", "--snapshots", "3", "--games", "4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"Running the program that lies in the run: {runs['a']}/code.py\n| ")
    table = json.loads((runs["a"] / "payoff.json").read_text())
    assert len(table["labels"]) == 6 and table["labels"][:3] == ["random", "alphabeta9", "0"] and table["games"] == 4
    assert table["labels"][4:] == ["5", "newest"]
    payoff, first = np.array(table["payoff"]), np.array(table["first"])
    np.testing.assert_allclose(payoff + payoff.T, 1)
    assert payoff[1].min() >= 0.5 and payoff[1, 0] > 0.7 and table["elo"][0] == 1000 and first.shape == (6, 6)
    assert (runs["a"] / "payoff.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()[1:9]]
    assert rows[0] == ["", "Elo", "score (as first, as second)", "against random", "against alphabeta9"]
    assert [row[0] for row in rows[2:]] == table["labels"] and float(rows[7][4].split()[0]) == round(payoff[5, 1], 3)


def test_the_newest_agent_and_the_snapshots_play_with_their_own_weights(runs, tmp_path):
    """The arena's match is the match of the script's own policies."""
    run_arena(runs["a"], "--snapshots", "2", "--games", "20", "--out", tmp_path, "--seed", "7")
    args, module, agent, state = arena.load_agent(runs["a"])
    league = state["league"]["agents"]
    policies = module.as_policies([league[0], league[-1], module.flat_weights(agent)], args)
    table = json.loads((tmp_path / "payoff.json").read_text())
    for i in range(3):
        for j in range(i):
            returns, _ = arena.play_match(policies[i], policies[j], module, "tic_tac_toe", 20, 7)
            assert table["payoff"][i][j] == arena.score(returns)


def test_an_arena_of_several_runs(runs, tmp_path):
    """Also of one with another network."""
    arguments = [runs["a"], runs["b"], "--snapshots", "1", "--games", "4", "--greedy", "--out", tmp_path]
    done = [run_arena(*arguments) for _ in range(2)]
    assert done[0].returncode == 0 and done[0].stdout == done[1].stdout, done[0].stderr
    labels = json.loads((tmp_path / "payoff.json").read_text())["labels"]
    assert len(labels) == 4 and all(label.endswith(":0") for label in labels[::2])
    assert [label.split("/")[-1].split("-")[0] for label in labels[1::2]] == ["seed1", "seed2"]


def test_an_arena_measures_nash_conv(runs):
    done = run_arena(runs["rps"], "--snapshots", "0", "--engines", "random", "--nash-conv")
    result = json.loads((runs["rps"] / "result.json").read_text())
    expected = (
        f"NashConv {result['eval/nash_conv']:.4f}, of its league's average {result['eval/nash_conv_average']:.4f}"
    )
    assert expected in done.stdout


def test_an_arena_says_what_is_wrong(runs, tmp_path):
    for arguments, message in (
        ([tmp_path], "is no folder of a run: it has no config.json"),
        ([runs["a"], runs["rps"]], "the runs are not of one game"),
        ([runs["a"], runs["a"]], "a run is given twice"),
        ([runs["a"], "--engines", "stockfish"], "--engines stockfish: there are random, alphabeta<depth> and mcts"),
        ([runs["rps"], "--engines", "mcts5"], "--engines mcts5: it plays connect_four and tic_tac_toe of"),
        ([runs["a"], "--games", "3"], "--games 3: an even number"),
    ):
        done = run_arena(*arguments)
        assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1, done


def test_a_run_s_program_is_announced_before_it_runs(finished_run):
    run = finished_run("tic_tac_toe")
    (run / "code.py").write_text("raise SystemExit('here it runs')")
    for done in (run_play(run), run_arena(run)):
        assert done.stdout.endswith(f"Running the program that lies in the run: {run}/code.py\n")
        assert done.stderr == "here it runs\n"
