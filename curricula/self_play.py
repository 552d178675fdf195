"""Opponents for two-player zero-sum games: self-play, fictitious self-play and prioritized fictitious self-play."""

import copy

import gymnasium as gym
import numpy as np

from curricula.core import Curriculum, TaskSpace

NEWEST = -1  # the opponent that is the learner itself, with the weights that it acts with


def pfsp_distribution(win_rates, weighting="hard", power=2.0):
    """Probability of each opponent from the learner's win rates x against them: both float64 (n,).

    AlphaStar's (Vinyals et al. 2019, supplement): hard (1 - x)^power, var x (1 - x), linear 1 - x, linear_capped
    min(1/2, 1 - x). argmax, as the Syllabus paper has it: those that win most against the learner, all alike.
    No mass: uniform.
    """
    x = np.asarray(win_rates, float)
    mass = {
        "hard": lambda: 1 - x,
        "var": lambda: x * (1 - x),
        "linear": lambda: 1 - x,
        "linear_capped": lambda: np.minimum(0.5, 1 - x),
        "argmax": lambda: (x == x.min()).astype(float),
    }[weighting]()
    if mass.max() < 1e-10:
        return np.full(len(x), 1 / len(x))
    mass = (mass / mass.max()) ** (power if weighting == "hard" else 1)  # the division: no power makes all vanish
    return mass / mass.sum()


class SelfPlay(Curriculum):
    """The opponent is the newest copy of the agent: its id is always 0.

    A task is an opponent's id. `agent` is the first opponent: a flat array, a torch module, anything that deepcopy
    copies. Copies keep the weights that they were made with: arrays become read-only, modules get no gradient and are
    in eval mode.
    Every result changes the opponent's record: its counts of games and of wins are multiplied by `decay`, then the game
    is added, a draw as half a win. The record starts with `prior_games` games, half of them won (decay=1, prior_games=2
    is the mean of a Beta(1, 1) posterior; prior_games=1/(1 - decay) a moving average). Without games, or with fewer
    than `min_games` played, the win rate is 0.5.

    Each call of `sample` draws from the generator once, no update does. The state holds arrays as they are, of
    modules their state_dict, other agents as they are: to load it, build the curriculum with an agent of that kind.
    """

    capacity = 1

    def __init__(self, agent, *, decay=0.99, prior_games=0.0, min_games=0, seed=None):
        super().__init__(2**31 - 1, seed=seed)  # ids count up and are never used twice; num_tasks are those held
        for name, value, valid, allowed in (
            ("agent", agent, agent is not None, "the first opponent: a league is never empty"),
            ("decay", decay, 0 < decay <= 1, "in (0, 1]"),
            ("prior_games", prior_games, 0 <= prior_games < np.inf, "0 or more"),
            ("min_games", min_games, 0 <= min_games < np.inf, "0 or more"),
        ):
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
        self.decay, self.prior_games, self.min_games = decay, prior_games, min_games
        self.rating = 1000.0  # the learner's Elo rating
        self._agents, self._records, self._next_id = {}, {}, 0
        self._add(0, self._snapshot(agent))

    @property
    def opponents(self):
        """The ids that are held, oldest first: what `_sample_distribution` and `win_rates` are about."""
        return list(self._agents)

    def get_opponent(self, opponent_id):
        """The agent with this id, as it was when it was added. A ValueError names an id that is not held."""
        return self._agents[self._held(opponent_id)]

    def update_agent(self, agent):
        """Makes a copy of `agent` the opponent; its record goes on. Returns its id."""
        self._agents[0] = self._snapshot(agent)
        return 0

    def update_winrate(self, opponent_id, result):
        """One finished game: the learner has won (1), drawn (0.5) or lost (0). Of a return in {-1, 0, 1}: (r + 1) / 2.

        A game against an opponent that was evicted meanwhile is a ValueError: look in `opponents` first.
        """
        if not 0 <= result <= 1:
            raise ValueError(f"result {result!r} is none of 1 (won), 0.5 (drawn), 0 (lost): pass (return + 1) / 2")
        record = self._records[self._held(opponent_id)]
        games, wins, played, rating = record
        # Elo: what the result says beyond the expected score, at most K = 32 points
        change = 32 * (result - 1 / (1 + 10 ** ((rating - self.rating) / 400)))
        self.rating += float(change)
        record[:] = self.decay * games + 1, self.decay * wins + result, played + 1, rating - change

    def win_rates(self):
        """The learner's win rate against each of `opponents`: float64 (num_tasks,)."""
        games, wins, played, _ = np.array(list(self._records.values())).T
        known = (games > 0) & (played >= self.min_games)
        return np.where(known, wins / np.where(known, games, 1), 0.5)

    def ratings(self):
        """The Elo rating of each of `opponents`: float64 (num_tasks,). A new one starts with the learner's."""
        return np.array([record[3] for record in self._records.values()])

    def _sample_distribution(self):
        return np.full(self.num_tasks, 1 / self.num_tasks)

    def _held(self, opponent_id):
        if opponent_id in self._agents:
            return opponent_id
        known = isinstance(opponent_id, (int, np.integer)) and 0 <= opponent_id < self._next_id
        was = f"was evicted: {self.capacity} are kept" if known else "does not exist"
        raise ValueError(f"opponent {opponent_id!r} {was}. Take one of `opponents`: {str(self.opponents)[:200]}")

    def _index(self, task):
        return self.opponents.index(self._held(task))

    def _encoding(self, index):
        return self.opponents[index]

    def _add(self, opponent_id, snapshot):
        self._agents[opponent_id] = snapshot
        self._records[opponent_id] = [self.prior_games, self.prior_games / 2, 0, self.rating]
        self._next_id, self.num_tasks = opponent_id + 1, len(self._agents)

    @staticmethod
    def _shapes(agent):
        """What agents of one game have in common, as far as it can be seen."""
        if hasattr(agent, "load_state_dict"):
            return {name: np.shape(value) for name, value in agent.state_dict().items()}
        return agent.shape if isinstance(agent, np.ndarray) else type(agent)

    def _snapshot(self, agent):
        wanted = [self._shapes(held) for held in list(self._agents.values())[:1]]
        if agent is None or wanted not in ([], [self._shapes(agent)]):
            found = f"found {type(agent).__name__} of {self._shapes(agent)}"
            raise ValueError(f"an agent is one as the first, of {wanted[0]}, {found}")
        snapshot = copy.deepcopy(agent)
        if isinstance(snapshot, np.ndarray):
            snapshot.setflags(write=False)
        elif hasattr(snapshot, "requires_grad_"):  # of torch: an opponent only acts
            snapshot.requires_grad_(False)
            if hasattr(snapshot, "eval"):  # a tensor has none
                snapshot.eval()  # BatchNorm would learn from the games, and Dropout play them badly
        return snapshot

    def _restored(self, saved):
        """The agent from its part of the state, of the same kind as those that are held."""
        like = next(iter(self._agents.values()))
        if isinstance(like, np.ndarray):
            agent = np.asarray(saved).astype(like.dtype)
            if agent.shape != like.shape:
                raise ValueError(f"an agent of shape {agent.shape} in the state is none of this game's, {like.shape}")
            return self._snapshot(agent)
        agent = copy.deepcopy(like if hasattr(like, "load_state_dict") else saved)
        if hasattr(like, "load_state_dict"):
            agent.load_state_dict(saved)
        return agent

    def state_dict(self):
        saved = [a.state_dict() if hasattr(a, "load_state_dict") else a for a in self._agents.values()]
        agents = [a if isinstance(a, np.ndarray) else copy.deepcopy(a) for a in saved]
        records = np.array(list(self._records.values()), float)
        state = {"ids": np.array(self.opponents), "records": records, "next_id": self._next_id, "rating": self.rating}
        return {**super().state_dict(), **state, "agents": agents}

    def _load(self, state):
        ids, records = np.asarray(state["ids"]).tolist(), np.asarray(state["records"]).tolist()
        if not 1 <= len(ids) <= self.capacity:
            raise ValueError(f"the state holds {len(ids)} opponents, this curriculum 1 to {self.capacity}")
        if unknown := [i for i in ids if not 0 <= i < state["next_id"]]:
            raise ValueError(f"the state holds opponents {unknown}, but ids go to {state['next_id'] - 1}")
        if not np.isfinite(records).all():
            raise ValueError("the state's records of games are not finite")
        agents = [self._restored(saved) for saved in state["agents"]]
        super()._load(state)
        self._agents, self._records = dict(zip(ids, agents)), dict(zip(ids, records))
        self._next_id, self.rating, self.num_tasks = int(state["next_id"]), float(state["rating"]), len(ids)

    def metrics(self):
        p, x = self._sample_distribution(), self.win_rates()
        played = sum(record[2] for record in self._records.values())
        effective = np.exp(-(p * np.log(np.where(p > 0, p, 1))).sum())  # the number of equally likely ones
        figures = {"opponents": len(p), "newest_opponent": self._next_id - 1, "effective_opponents": effective}
        figures |= {"games": played, "win_rate_mean": x.mean(), "win_rate_min": x.min(), "rating": self.rating}
        return {name: float(value) for name, value in figures.items()}


class FictitiousSelfPlay(SelfPlay):
    """Uniform over past copies of the agent (Heinrich et al. 2015): `update_agent` adds one, under the next id.

    At most `capacity` copies are kept: a new one evicts the oldest, and evicted ids are never used again. An id that
    waited in a queue can be evicted before it is played: if it is not in `opponents`, sample another. With
    `keep_initial` the first agent, id 0, stays. `options` are those of SelfPlay.
    """

    def __init__(self, agent, *, capacity=100, keep_initial=False, **options):
        least = 2 if keep_initial else 1
        if not isinstance(capacity, (int, np.integer)) or capacity < least:
            raise ValueError(f"capacity={capacity!r}: must be a whole number from {least} with {keep_initial=}")
        self.capacity, self.keep_initial = capacity, keep_initial
        super().__init__(agent, **options)

    def update_agent(self, agent):
        """Adds a copy of `agent` and returns its id."""
        snapshot = self._snapshot(agent)
        if self.num_tasks == self.capacity:
            evicted = self._encoding(self._least_useful())
            del self._agents[evicted], self._records[evicted]
        opponent_id = self._next_id
        self._add(opponent_id, snapshot)
        return opponent_id

    def _least_useful(self):
        """The position of the opponent to evict."""
        return int(self.keep_initial)


class PrioritizedFictitiousSelfPlay(FictitiousSelfPlay):
    """Past copies of the agent by how hard they are for it (Vinyals et al. 2019): see `pfsp_distribution`.

    `uniform` is the share of the draws that is uniform: argmax can go back and forth between two opponents without it.
    A new copy evicts the easiest, the one with the highest win rate, of equal ones the oldest. `options` are those of
    FictitiousSelfPlay.
    """

    WEIGHTINGS = ("hard", "var", "linear", "linear_capped", "argmax")

    def __init__(self, agent, *, weighting="hard", power=2.0, uniform=0.0, **options):
        for name, value, valid, allowed in (
            ("weighting", weighting, weighting in self.WEIGHTINGS, f"one of {self.WEIGHTINGS}"),
            ("power", power, 0 < power < np.inf, "above 0 and finite"),
            ("uniform", uniform, 0 <= uniform <= 1, "in [0, 1]"),
        ):
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
            setattr(self, name, value)
        super().__init__(agent, **options)

    def _sample_distribution(self):
        priorities = pfsp_distribution(self.win_rates(), self.weighting, self.power)
        return (1 - self.uniform) * priorities + self.uniform / self.num_tasks

    def _least_useful(self):
        return int(self.keep_initial) + int(np.argmax(self.win_rates()[int(self.keep_initial) :]))


class LeaguePlay(Curriculum):
    """Opponents during training: the learner itself in a share of the games, and its past by a curriculum.

    A draw is NEWEST with probability `self_play_share`, else one of `curriculum`'s, a (Prioritized)FictitiousSelfPlay.
    Games against NEWEST, or an opponent that was evicted before they ended, count for nobody. After each policy update
    call `after_update`: a copy of the agent joins after `snapshot_interval` of them, or as soon as the learner's win
    rate against every opponent is above `snapshot_win_rate`. Each draw takes one number from this generator.
    """

    def __init__(self, curriculum, *, self_play_share=0.5, snapshot_interval=50, snapshot_win_rate=0.7, seed=None):
        super().__init__(TaskSpace(gym.spaces.Discrete(2**31, start=NEWEST)), seed=seed)
        for name, value, valid, allowed in (
            ("curriculum", curriculum, isinstance(curriculum, FictitiousSelfPlay), "a (Prioritized)FictitiousSelfPlay"),
            ("self_play_share", self_play_share, 0 <= self_play_share <= 1, "in [0, 1]"),
            ("snapshot_interval", snapshot_interval, snapshot_interval >= 1, "1 or more policy updates"),
            ("snapshot_win_rate", snapshot_win_rate, 0 <= snapshot_win_rate <= 1, "in [0, 1]"),
        ):
            if not valid:
                raise ValueError(f"{name}={value!r}: must be {allowed}")
            setattr(self, name, value)
        self.num_tasks, self._updates = 1 + curriculum.num_tasks, 0  # updates since the newest copy joined

    @property
    def opponents(self):
        """What `_sample_distribution` is about: NEWEST, and the ids that are held."""
        return [NEWEST, *self.curriculum.opponents]

    def sample(self, k=1):
        return [NEWEST if self.rng.random() < self.self_play_share else self.curriculum.sample()[0] for _ in range(k)]

    def _sample_distribution(self):
        past = (1 - self.self_play_share) * self.curriculum._sample_distribution()
        return np.concatenate([[self.self_play_share], past])

    def _index(self, task):
        return 0 if task == NEWEST else 1 + self.curriculum._index(task)

    def _encoding(self, index):
        return self.opponents[index]

    def get_opponent(self, opponent_id):
        """The copy with this id; NEWEST is the learner itself, whom you have."""
        return self.curriculum.get_opponent(opponent_id)

    def update_winrate(self, opponent_id, result):
        """One finished game, as in SelfPlay."""
        if opponent_id in self.curriculum.opponents:
            self.curriculum.update_winrate(opponent_id, result)

    def update_agent(self, agent):
        """Adds a copy of `agent` now, and returns its id."""
        opponent_id = self.curriculum.update_agent(agent)
        self.num_tasks, self._updates = 1 + self.curriculum.num_tasks, 0
        return opponent_id

    def after_update(self, agent):
        """Once per policy update: adds a copy of `agent` if it is time. Its id, or None."""
        self._updates += 1
        if self._updates >= self.snapshot_interval or self.curriculum.win_rates().min() > self.snapshot_win_rate:
            return self.update_agent(agent)
        return None

    def state_dict(self):
        return {**super().state_dict(), "curriculum": self.curriculum.state_dict(), "updates": self._updates}

    def _load(self, state):
        self.curriculum.load_state_dict(state["curriculum"])
        super()._load(state)
        self.num_tasks, self._updates = 1 + self.curriculum.num_tasks, int(state["updates"])

    def metrics(self):
        """The curriculum's; and of each opponent in it the win rate, the probability of a draw, the Elo rating."""
        c = self.curriculum
        columns = {"win_rate": c.win_rates(), "probability": c._sample_distribution(), "rating": c.ratings()}
        rows = {f"{i}/{name}": float(x[k]) for k, i in enumerate(c.opponents) for name, x in columns.items()}
        return c.metrics() | rows
