"""The games, engines and measures of algos/appo_pfsp.py against slow oracles, OpenSpiel and PettingZoo."""

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

from algos import appo_pfsp as script

ROOT = Path(__file__).parent.parent
LINE_GAMES = ["connect_four", "tic_tac_toe"]
DRAWN = [int(c) for c in "022020444203163623312330666064114411555555"]  # of Connect Four


def needs(module):
    missing = importlib.util.find_spec(module) is None
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


openspiel, pettingzoo, atari = needs("pyspiel"), needs("pettingzoo"), needs("multi_agent_ale_py")
OF_OPENSPIEL = ["kuhn_poker", "leduc_poker", "goofspiel(num_cards=4)", "matrix_mp", "othello"]
ALL = [*LINE_GAMES, "rps", "biased_rps", *(pytest.param(name, marks=openspiel) for name in OF_OPENSPIEL)]
ALL += [pytest.param("connect_four_v3", marks=pettingzoo), pytest.param("texas_holdem_v4", marks=needs("rlcard"))]
ALL += [pytest.param("chess_v6", marks=needs("chess")), pytest.param("pong_v3", marks=atari)]


def seeds(count, seed=0):
    return np.random.SeedSequence(seed).spawn(count)


def make(name, count, seed=0):
    games = script.make_games(name, count)
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
    board, rules, rng = Board(name), script.LineRules(name), np.random.default_rng(0)
    cells = np.array(list(itertools.product(range(board.rows), range(board.columns))))
    few = rng.random((3000, len(cells))) < rng.uniform(0.1, 0.6, (3000, 1))  # also boards that no game comes to
    wins = []
    for pieces in few:
        board.cells = [[None] * board.columns for _ in range(board.rows)]
        for row, column in cells[pieces]:
            board.cells[row][column] = 0
        wins.append(board.wins(0))
    planes = few.reshape(-1, 1, board.rows, board.columns).repeat(2, 1)
    bits = rules.boards(planes)
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
    games.openings[0] = 7
    with pytest.raises(ValueError, match="connect_four can open with 0 to 6 random moves, not 7"):
        games.reset(seeds(40))


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


@pettingzoo
def test_connect_four_of_pettingzoo_is_the_same_game():
    ours, theirs = make("connect_four", 4), make("connect_four_v3", 4)
    assert (theirs.obs_shape, theirs.num_actions) == ((2, 6, 7), 7)
    for player, obs, legal, actions, rewards, ended in play(ours, 90, np.random.default_rng(2)):
        np.testing.assert_array_equal(theirs.player, player)
        np.testing.assert_array_equal(theirs.observe()[0], obs)
        np.testing.assert_array_equal(theirs.observe()[1], legal)
        for found, expected in zip(theirs.step(actions), (rewards, ended)):
            np.testing.assert_array_equal(found, expected)


# ---- all families ----------------------------------------------------------------------------------------------------


def packed(state):
    """As a checkpoint has it: tensors for arrays."""
    if isinstance(state, dict):
        return {key: packed(value) for key, value in state.items()}
    return torch.from_numpy(state.copy()) if isinstance(state, np.ndarray) else state


@pytest.mark.parametrize("name", ALL)
def test_games_that_are_not_told_to_move_stand_still(name):
    """Two games, moved one at a time, go as they do alone."""
    steps, rng = 12 if name == "pong_v3" else 60, np.random.default_rng(0)
    both, alone = make(name, 2), [script.make_games(name, 1) for _ in range(2)]
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
    count, steps = (1, 40) if name == "pong_v3" else (5, 47)
    games, rng = make(name, count), np.random.default_rng(0)
    assert script.game_spec(name) == (games.obs_shape, games.num_actions)
    if name == "connect_four":
        games.openings[:] = 3
    list(play(games, steps, rng))
    state = games.get_state()
    torch.save(packed(state), tmp_path / "state.pt")
    rng_before = rng.bit_generator.state
    expected = list(play(games, steps, rng))
    for saved in (state, torch.load(tmp_path / "state.pt", weights_only=True)):
        again = script.make_games(name, count)
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
    other = make("rps" if name != "rps" else "biased_rps", 2).get_state()
    with pytest.raises(ValueError, match=r"a state of 2 games of \w*rps for 2 games of "):
        games.set_state(other)
    with pytest.raises(ValueError, match="a state of 2 games of .* for 3 games of "):
        script.make_games(name, 3).set_state(games.get_state())
    with pytest.raises(ValueError, match="3 seeds for 2 games"):
        games.reset(seeds(3))


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
        games, found = script.make_games("kuhn_poker", len(which)), []
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


# ---- OpenSpiel, PettingZoo -------------------------------------------------------------------------------------------


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
        histories = [one.state.history() for one in games.games]
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
                assert games.games[i].state.history()[: len(history) + 1] == state.history() and not rewards[i].any()
                continue
            while state.is_chance_node():  # one that has a single outcome
                state.apply_action(state.legal_actions()[0])
            assert state.is_terminal() and rewards[i].tolist() == state.returns()
        finished += ended.sum()
    assert finished > 20 or (name == "othello" and finished)


@openspiel
def test_openspiel_deals_by_its_probabilities():
    games = make("kuhn_poker", 3000)
    cards = [tuple(one.state.history()) for one in games.games]
    counts = [cards.count(deal) for deal in itertools.permutations(range(3), 2)]
    assert sum(counts) == 3000 and max(abs(np.array(counts) - 500)) < 4 * np.sqrt(500)


@openspiel
def test_simultaneous_moves_are_hidden():
    games = make("goofspiel(num_cards=4)", 4)
    games.set_state(make("goofspiel(num_cards=4)", 4).get_state() | {"seeds": [7] * 4})  # the same prizes
    games.step(np.arange(4))
    assert games.player.all() and (games.observe()[0] == games.observe()[0][0]).all()


@openspiel
def test_rewards_that_do_not_sum_to_zero_are_refused(monkeypatch):
    games = make("kuhn_poker", 2)
    monkeypatch.setattr(games.games[1], "play", lambda action: ((1, 0), False))
    with pytest.raises(RuntimeError, match=r"kuhn_poker is not zero-sum: it paid \[1.0, 0.0\]"):
        games.step([0, 0])


@atari
def test_pong_shows_each_player_the_own_paddle_at_the_right():
    games, rng = make("pong_v3", 1), np.random.default_rng(0)
    ended, paid, steps = [False], 0.0, 0
    while not ended[0] and steps < 3000:
        first = games.observe()[0]
        games.step([rng.integers(6)])
        assert games.player[0] == 1 and first.dtype == np.uint8 and first.shape == (1, 4, 84, 84)
        np.testing.assert_array_equal(games.observe()[0], first[..., ::-1])
        rewards, ended = games.step([rng.integers(6)])
        second = games.observe()[0]
        if not ended[0]:
            np.testing.assert_array_equal(second[0, :3], first[0, 1:])
        paid, steps = paid + abs(rewards[0, 0]), steps + 1
        if steps == 80:
            break
    assert paid > 0 and games.player[0] == 0


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
        pytest.param("rps_v2", "rps_v2 has 2 players and shows .*it takes 2 and an action_mask", marks=pettingzoo),
        pytest.param("konnect_four_v3", "no game konnect_four_v3. Nearest: connect_four_v3", marks=pettingzoo),
        pytest.param("hanabi_v5", "PettingZoo cannot make hanabi_v5: Hanabi depends on", marks=pettingzoo),
    ],
)
def test_other_games_are_refused(name, message):
    with pytest.raises(ValueError, match=message) as caught:
        script.make_games(name, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name, module, extra", [("kuhn_poker", "pyspiel", "openspiel"), ("pong_v3", "cv2", "atari"),
                                                 ("go_v5", "pettingzoo.classic", "pettingzoo")])  # fmt: skip
def test_a_missing_package_is_one_line(name, module, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{module}.* scripts/run --extra {extra} "):
        script.make_games(name, 1)


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
    engine, rng, decisive = script.alpha_beta(name, depth), np.random.default_rng(0), 0
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
    minimax = script.alpha_beta("tic_tac_toe", 9)
    against_random = scores(minimax, script.random_policy, "tic_tac_toe", 40)
    assert len(against_random) > 200 and against_random.min() == 0 and against_random.mean() > 0.7
    assert not scores(minimax, minimax, "tic_tac_toe", 18).any()


def test_mcts_sees_a_win_and_a_threat():
    board = Board("connect_four")
    for action in (0, 6, 0, 6, 0, 6):  # both have three in a column
        board.play(action)
    legal = np.ones((1, 7), bool)
    for expected in (0, 6):
        obs = board.planes()[None].astype(np.float32)
        assert script.mcts("connect_four", 200)(obs, legal)[0].tolist() == np.eye(7)[expected].tolist()
        if expected == 0:
            board.cells[2][0] = 1  # the own column is blocked now: the other's has to be
            board.cells[0][3] = None
    batch = np.concatenate([obs, np.zeros_like(obs), obs])
    probabilities = script.mcts("connect_four", 200)(batch, np.ones((3, 7), bool))
    assert probabilities[[0, 2]].argmax(1).tolist() == [6, 6] and probabilities.sum() == 3


def test_the_playouts_of_mcts_tell_it_that_the_middle_is_best():
    openings = script.mcts("connect_four", 200)(np.zeros((60, 2, 6, 7)), np.ones((60, 7), bool)).mean(0)
    assert openings[3] > 0.3 and openings[2:5].sum() > 0.6 and openings[[0, 6]].max() < 0.25


def test_mcts_is_better_with_more_simulations_and_repeats_itself():
    rng, best, good, weak = np.random.default_rng(0), *(script.mcts("connect_four", count) for count in (100, 30, 5))
    assert match_score(best, script.random_policy, "connect_four", 40) > 0.95
    assert match_score(good, weak, "connect_four", 40) > 0.75
    obs, legal = position("connect_four", 4, rng)[1:]
    obs, legal = obs.repeat(20, 0), legal.repeat(20, 0)
    one, other, again = (script.mcts("connect_four", 5, seed=seed)(obs, legal) for seed in (1, 2, 1))
    assert (one == again).all() and (one != other).any()


# ---- matches, ratings ------------------------------------------------------------------------------------------------


def always(action):
    return lambda obs, legal, games=None: np.eye(legal.shape[1])[np.full(len(obs), action)]


def match_score(*match):
    return script.score(script.match(*match)[0])


def test_a_match_is_fair_in_seats():
    seen = {"a": [], "b": []}

    def spy(name, policy):
        def spied(obs, legal, games):
            seen[name] += zip(games.tolist(), obs.argmax(1).tolist())  # rps shows the seat
            return policy(obs, legal)

        return spied

    paper, rock = spy("a", always(1)), spy("b", always(0))
    returns, lengths = script.match(paper, rock, "rps", 22)
    assert (returns == 1).all() and (lengths == 2).all() and script.score(returns) == 1
    assert sorted(seen["a"]) == [(i, i % 2) for i in range(22)]
    assert sorted(seen["b"]) == [(i, 1 - i % 2) for i in range(22)]
    assert match_score(rock, paper, "rps", 22) == 0.0
    assert match_score(rock, rock, "rps", 22) == 0.5
    assert (script.match(paper, always(2), "biased_rps", 4)[0] == -1).all()


def test_a_match_is_no_better_for_the_first_to_move_and_repeats_itself():
    assert make("connect_four", 1).player[0] == 0
    assert abs(match_score(script.random_policy, script.random_policy, "connect_four", 1000) - 0.5) < 0.06
    mixed = lambda obs, legal, games: np.array([[0.2, 0.5, 0.3]] * len(obs))  # noqa: E731
    assert abs(match_score(mixed, always(0), "rps", 4000) - 0.6) < 0.04  # paper wins, rock draws
    one, again, other = (script.match(mixed, always(0), "rps", 40, seed)[0].tolist() for seed in (1, 1, 2))
    assert one == again != other


def test_a_match_plays_one_game_at_each_place():
    asked = []

    def policy(obs, legal, games):
        asked.append(games.tolist())
        return script.random_policy(obs, legal)

    returns, lengths = script.match(policy, policy, "connect_four", 60)
    moves = np.bincount(np.concatenate(asked), minlength=60)
    np.testing.assert_array_equal(moves, lengths)
    assert lengths.min() >= 7 and len(set(lengths)) > 5 and set(returns) <= {-1, 0, 1}
    last_mover_is_a = (lengths % 2 == 1) == (np.arange(60) % 2 == 0)
    np.testing.assert_array_equal(returns[lengths < 42], np.where(last_mover_is_a, 1, -1)[lengths < 42])


@pytest.mark.parametrize("number", [0, 1, 7])
def test_a_match_takes_an_even_number_of_games(number):
    with pytest.raises(ValueError, match=f"a match of {number} games"):
        script.match(always(0), always(0), "rps", number)


def test_a_policy_that_wants_an_illegal_move_is_named():
    with pytest.raises(RuntimeError, match="connect_four, game 0: player . took action 3, legal are"):
        script.match(always(3), always(3), "connect_four", 2)


def test_round_robin_and_its_picture(tmp_path):
    policies = [always(0), always(1), always(2), script.random_policy]
    payoff = script.round_robin(policies, "rps", 40)
    np.testing.assert_array_equal(payoff[:3, :3], [[0.5, 0, 1], [1, 0.5, 0], [0, 1, 0.5]])
    np.testing.assert_allclose(payoff + payoff.T, 1)
    script.plot_payoff(payoff, ["rock", "paper", "scissors", "random"], tmp_path / "payoff.png")
    assert (tmp_path / "payoff.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_elo_finds_the_ratings_that_made_the_scores():
    ratings = np.array([1000, 1200, 900, 1750])
    payoff = 1 / (1 + 10 ** ((ratings - ratings[:, None]) / 400))
    np.testing.assert_allclose(script.elo(payoff, 10**7), ratings, atol=0.1)
    for score, number in ((0.75, 100), (1.0, 10), (0.0, 4)):
        expected = (score * number + 0.5) / (number + 1)
        found = script.elo(np.array([[0.5, 1 - score], [score, 0.5]]), number)
        np.testing.assert_allclose(found, [1000, 1000 + 400 * np.log10(expected / (1 - expected))])
    np.testing.assert_allclose(script.elo(np.full((5, 5), 0.5), 10), 1000)
    assert script.elo(np.array([[0.5]]), 10).tolist() == [1000]
    cycle = np.array([[0.5, 0, 1], [1, 0.5, 0], [0, 1, 0.5]])
    np.testing.assert_allclose(script.elo(cycle, 10), 1000)


# ---- NashConv --------------------------------------------------------------------------------------------------------


def fixed(*probabilities):
    return lambda obs, legal, games=None: np.array([probabilities] * len(obs), float)


def test_nash_conv_of_rock_paper_scissors():
    assert script.nash_conv("rps", [script.random_policy]) == pytest.approx(0)
    assert script.nash_conv("rps", [always(0)]) == 2
    assert script.nash_conv("rps", [always(0), always(1), always(2)]) == pytest.approx(0)
    assert script.nash_conv("rps", [always(0), always(1)], [0.75, 0.25]) == pytest.approx(2 * 0.75)
    assert script.nash_conv("biased_rps", [fixed(1 / 4, 1 / 2, 1 / 4)]) == pytest.approx(0)
    assert script.nash_conv("biased_rps", [script.random_policy]) == pytest.approx(2 / 3)
    by_seat = lambda obs, legal, games=None: np.where(obs[:, :1] == 1, [[1, 0, 0]], [[0, 1, 0]])  # noqa: E731
    assert script.nash_conv("rps", [by_seat]) == 2  # rock can gain 2 by scissors, paper has nothing to gain


def kuhn(table):
    """The policy that bets with table[player, card, what happened so far], from what a network sees."""

    def policy(obs, legal, games=None):
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
    assert script.nash_conv("kuhn_poker", [script.random_policy]) == pytest.approx(11 / 12)
    assert script.nash_conv("leduc_poker", [script.random_policy]) == pytest.approx(4.747222222222222)
    for alpha in (0, 0.1, 1 / 3):
        assert script.nash_conv("kuhn_poker", [kuhn(kuhn_equilibrium(alpha))]) == pytest.approx(0, abs=1e-12)
    wrong = kuhn_equilibrium(0.2) | {(1, 1, "b"): 0.5}  # calls too often with the queen: the jack never bluffs
    assert script.nash_conv("kuhn_poker", [kuhn(wrong)]) > 0.02


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
    keys, obs, legal, parent, taken = script.information_states("kuhn_poker")
    table = script.average([kuhn(one), kuhn(two)], [0.3, 0.7], parent, taken, obs, legal)
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
    for weights, member in (([1, 0], one), ([0, 1], two)):
        found = script.nash_conv("kuhn_poker", [kuhn(one), kuhn(two)], weights)
        assert found == pytest.approx(script.nash_conv("kuhn_poker", [kuhn(member)]))
    equal = [kuhn(kuhn_equilibrium(alpha)) for alpha in (0, 1 / 6, 1 / 3)]
    assert script.nash_conv("kuhn_poker", equal, [0.5, 0.2, 0.3]) == pytest.approx(0, abs=1e-12)


@openspiel
def test_the_decisions_of_tic_tac_toe_are_shown_as_the_games_show_them():
    keys, obs, legal, parent, taken = script.information_states("tic_tac_toe")
    assert len(keys) == 294778
    own, other = obs.reshape(-1, 2, 9).astype(bool).transpose(1, 0, 2)
    np.testing.assert_array_equal(legal, ~(own | other))
    assert not (own & other).any() and set((other.sum(1) - own.sum(1)).tolist()) == {0, 1}
    before = own[parent]  # the own pieces are those before the own last move, and that one
    before[np.arange(len(before)), taken] = True
    np.testing.assert_array_equal(own[parent >= 0], before[parent >= 0])
    assert not own[parent < 0].any()


@pytest.mark.parametrize(
    "policies, weights", [([], None), ([script.random_policy], [0.5, 0.5]), ([script.random_policy] * 2, [0.5, 0.6])]
)
def test_an_empty_league_or_bad_weights_are_refused(policies, weights):
    with pytest.raises(ValueError, match=f"a league of {len(policies)} policies with weights"):
        script.nash_conv("rps", policies, weights)


@openspiel
def test_games_without_an_exact_best_response_are_refused():
    with pytest.raises(ValueError, match="nash_conv of leduc_poker: more than 1000 positions"):
        script.information_states("leduc_poker", limit=1000)
    with pytest.raises(ValueError, match="OpenSpiel does not tell its information states"):
        script.nash_conv("pig", [script.random_policy])


# ---- scripts/play.py -------------------------------------------------------------------------------------------------

# The agent of the run: it holds the action with the highest weight for the best, of the legal ones.
CODE = """
class Agent(torch.nn.Module):
    def __init__(self, obs_shape, num_actions, args):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(num_actions))

def as_policy(agent):
    return lambda obs, legal, games=None: np.where(legal, agent.weights.detach().numpy(), 0)
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
    assert (
        closed.returncode == 0 and closed.stdout.startswith("You are X") and closed.stdout.endswith("left the game\n")
    )
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
