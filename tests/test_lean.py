"""The lean forms in algos/ beside the full ones in curricula/: the same inputs, the same draws, scores and states."""

import multiprocessing
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from algos import appo_pfsp, dqn_taper, ppo_plr
from algos.ppo import pack
from curricula import plr, self_play, sync, taper
from curricula.domain_randomization import DomainRandomization


def same(lean, full):
    """Equal to the bit: type for type, in dicts, lists, tuples and arrays."""
    if isinstance(full, dict):
        return lean.keys() == full.keys() and all(same(lean[key], full[key]) for key in full)
    if isinstance(full, (list, tuple)):
        return len(lean) == len(full) and all(map(same, lean, full))
    if isinstance(full, np.ndarray):
        if full.dtype.names and lean.dtype == full.dtype:  # by field: what lies between them is anything
            return all(same(lean[name], full[name]) for name in full.dtype.names)
        return lean.dtype == full.dtype and lean.shape == full.shape and lean.tobytes() == full.tobytes()
    return type(lean) is type(full) and (lean == full or lean != lean and full != full)


# ---- algos/ppo_plr.py ------------------------------------------------------------------------------------------------


@pytest.mark.lean("algos/ppo_plr.py:SyncQueue")
@pytest.mark.parametrize("seed", range(60))
def test_lean_ppo_plr_queue_by_random_calls(seed):
    rng = np.random.default_rng(seed)
    num_envs = int(rng.integers(1, 5))
    sizes = {"prefetch": int(rng.integers(1, 4)), "capacity": int(rng.integers(1, 5)), "timeout": 0.001}

    def new():
        return ppo_plr.SyncQueue(num_envs, **sizes), sync.SyncQueue(num_envs, task_shape=(2,), **sizes)

    def both(call):
        """What a call to each queue returns or raises; a time-out's own time is left out."""
        found = []
        for queue in queues:
            try:
                found.append(call(queue))
            except TimeoutError as error:
                found.append(str(error).split(" for 0.0")[0])
        assert same(*found), found
        return found[0]

    queues = new()
    for _ in range(60):
        env_id, kind, task = int(rng.integers(num_envs)), rng.random(), rng.integers(-9, 9, 2)
        if kind < 0.3:
            both(lambda q: q.put_task(env_id, task))  # noqa: B023
        elif kind < 0.5:
            both(lambda q: q.get_task(env_id))  # noqa: B023
        elif kind < 0.8:
            both(lambda q, r=rng.normal(): q.put_episode(env_id, task, r, int(10 * r), r / 2))  # noqa: B023
        elif kind < 0.9:
            both(lambda q: q.drain())
        elif kind < 0.93:
            both(lambda q: q.drain())
            state, queues = both(lambda q: q.state_dict()), new()
            both(lambda q: q.load_state_dict(state))  # noqa: B023


def play(queue, env_ids, episodes):
    """A worker: plays its environments in turn; the record tells the task back and numbers the episodes."""
    for episode in range(episodes):
        for env_id in env_ids:
            queue.put_episode(env_id, queue.get_task(env_id), episode / 2, episode, env_id / 4)
    queue.get_task(env_ids[0])


@pytest.fixture
def start():
    processes = []

    def make(*args, method="spawn"):
        processes.append(multiprocessing.get_context(method).Process(target=play, args=args))
        processes[-1].start()
        return processes[-1]

    yield make
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_lean_ppo_plr_queue_between_processes(method, start):
    """Every task and record arrives once, in order, through rings that wrap around."""
    queue = ppo_plr.SyncQueue(4, capacity=3, timeout=30)
    workers = [start(queue, [i, i + 2], 100, method=method) for i in range(2)]
    given, records = [0] * 4, []
    while sum(map(len, records)) < 400:
        for env_id in range(4):
            while given[env_id] < 100 and queue.rings["put"][env_id] - queue.rings["got"][env_id] < 2:
                queue.put_task(env_id, (env_id, given[env_id]))
                given[env_id] += 1
        records.append(queue.drain())
        assert (np.diff(records[-1]["env_id"]) >= 0).all()
        time.sleep(1e-4)
    records = np.concatenate(records)
    for env_id in range(4):
        mine = records[records["env_id"] == env_id]
        assert mine["task"].tolist() == [[env_id, k] for k in range(100)]
        assert mine["length"].tolist() == list(range(100)) and (mine["progress"] == env_id / 4).all()
    assert all(worker.exitcode is None for worker in workers)


def test_lean_ppo_plr_queue_tells_what_is_stuck():
    queue = ppo_plr.SyncQueue(2, timeout=0.2)
    with pytest.raises(TimeoutError, match="^environment 1: the learner has put no task for 0.2 s"):
        queue.get_task(1)
    queue.put_task(0, (1, 0))
    queue.put_task(0, (2, 0))
    with pytest.raises(TimeoutError, match="^environment 0: the environment has taken no task, its ring of 2 is full"):
        queue.put_task(0, (3, 0))


def levels_played(rng, draw, steps, waiting, p_end):
    """Which level each environment plays, and where its episode is terminated or ended: (steps, N) arrays."""
    levels, terminated, ended = (np.zeros((steps, len(waiting)), dtype) for dtype in (np.int64, bool, bool))
    for t in range(steps):
        levels[t] = [tasks[0] for tasks in waiting]
        ended[t] = rng.random(len(waiting)) < p_end
        terminated[t] = ended[t] & (rng.random(len(waiting)) < 0.7)
        for i in np.flatnonzero(ended[t]):  # one is drawn ahead, as in the script
            waiting[i] = [waiting[i][1], draw()]
    return levels, terminated, ended


def random_options(rng):
    """Settings of PLR that the script's arguments can ask for."""
    full = plr.PrioritizedLevelReplay
    transform = str(rng.choice(full.TRANSFORMS))
    return {
        "score": str(rng.choice(full.UNIT_SCORES if "match" in transform else full.SCORES)),
        "score_transform": transform,
        "temperature": float(rng.choice([0.1, 0.3, 1.0, 1.7])),
        "staleness_coef": float(rng.choice([0.0, 0.1, 0.5, 1.0])),
        "rho": float(rng.choice([0.0, 0.2, 0.5, 1.0])),
        "replay_schedule": str(rng.choice(["proportionate", "fixed"])),
        "replay_prob": float(rng.choice([0.0, 0.5, 1.0])),
        "alpha": float(rng.choice([0.3, 1.0])),
    }


@pytest.mark.lean("algos/ppo_plr.py:PrioritizedLevelReplay")
@pytest.mark.parametrize("seed", range(60))
def test_lean_plr(seed):
    """Five settings a seed, 4 or 20 rollouts each; the states move to new objects in between."""
    rng = np.random.default_rng(seed)
    for _ in range(5):
        options, num_levels = random_options(rng), int(rng.choice([1, 2, 5, 30, 300]))
        if rng.random() < 0.3:  # many misses by staleness, and levels that are seen late
            options |= {"rho": 0.0, "staleness_coef": 1.0, "replay_schedule": "fixed", "replay_prob": 0.97}
            num_levels = 12
        T, N, gamma = int(rng.integers(2, 40)), int(rng.integers(1, 9)), 0.97
        lean = ppo_plr.PrioritizedLevelReplay(num_levels, np.random.default_rng(seed), **options)
        full = plr.PrioritizedLevelReplay(num_levels, **options, seed=seed)

        def draw():
            assert same(lean.replay_probability(), float(full.replay_probability())), options  # noqa: B023
            level = lean.sample()  # noqa: B023
            assert same([level], full.sample()), options  # noqa: B023
            return level

        waiting, before, p_end = [[draw(), draw()] for _ in range(N)], np.zeros(N, bool), rng.choice([0.01, 0.3], N)
        for rollout in range(int(rng.choice([4, 20]))):
            levels, terminated, ended = levels_played(rng, draw, T, waiting, p_end)
            rewards, values, next_values, advantages = rng.normal(size=(4, T, N)).astype(np.float32)
            rewards[rng.random((T, N)) < 0.5] = 0
            if rng.random() < 0.2:
                advantages[:] = 0  # no score mass
            logits = rng.normal(size=(T, N, 4)).astype(np.float32) * 3
            dones = np.vstack([before, ended])
            full.update_from_rollout(
                levels, rewards, np.vstack([values, next_values[-1:]]), logits, dones, gamma, 0.95,
                next_values=next_values, terminated=terminated, advantages=advantages,
            )  # fmt: skip
            full.after_update()
            lean.update(levels, rewards, values, next_values, advantages, logits, terminated, ended, gamma)
            before = ended[-1]
            assert same(lean.scores, full.scores) and same(lean.unseen, full.unseen), options
            assert same(lean.clock - lean.last_drawn, full.staleness), options
            assert same(lean.weights(), full.sample_weights()), options
            assert same({name: float(x) for name, x in lean.metrics().items()}, full.metrics()), options
            state = full.state_dict()
            assert same(lean.rng.bit_generator.state, state["rng"])
            for episode in state["open"].values():
                del episode["max"]
            assert same({actor: {name: e[name] for name in state["open"][actor]} for actor, e in lean.open.items()},
                        state["open"]), options  # fmt: skip
            stat = lean.successes if options["score"] == "learnability" else lean.best
            for level, (value, count) in full._episodes.items():
                assert (stat[level], lean.episodes[level]) == (value, min(count, 20)), options
            if rollout == 1:
                states = ppo_plr.pack(lean.state_dict()), ppo_plr.pack(full.state_dict())
                lean = ppo_plr.PrioritizedLevelReplay(num_levels, lean.rng, **options)
                full = plr.PrioritizedLevelReplay(num_levels, **options)
                lean.load_state_dict(states[0])
                full.load_state_dict(states[1])


# ---- end of algos/ppo_plr.py -----------------------------------------------------------------------------------------


# ---- algos/dqn_taper.py ----------------------------------------------------------------------------------------------


class TaperWorld:
    """Random transitions of random subsets of environments: betas that persist, both kinds of ends, slow ones."""

    def __init__(self, seed, num_envs, num_tasks, T, continuing):
        self.rng, self.T, self.continuing = np.random.default_rng(seed), T, continuing
        self.share = self.rng.choice([0.05, 0.5, 1.0], num_envs)
        self.steps, self.beta = np.zeros(num_envs, np.int64), self.rng.random((num_envs, num_tasks)) < 0.2
        self.obs = self.rng.normal(size=(num_envs, 3)).astype(np.float32)
        self.p_beta, self.p_end = self.rng.choice([0.01, 0.1, 0.5]), self.rng.choice([0.0, 0.02, 0.3])

    def step(self):
        rng = self.rng
        envs = rng.permutation(np.flatnonzero(rng.random(len(self.share)) < self.share))
        K, n = len(envs), self.beta.shape[1]
        self.steps[envs] += 1
        beta = self.beta[envs]
        next_beta = beta ^ (rng.random((K, n)) < np.where(beta, 0.3, self.p_beta))
        terminated = rng.random(K) < self.p_end
        truncated = (rng.random(K) < self.p_end) | (not self.continuing and self.steps[envs] == self.T)
        self.beta[envs], ended = next_beta, envs[terminated | truncated]
        self.steps[ended], self.beta[ended] = 0, rng.random((len(ended), n)) < 0.2
        obs, next_obs = self.obs[envs], rng.normal(size=(K, 3)).astype(np.float32)
        self.obs[envs] = next_obs
        self.obs[ended] = rng.normal(size=(len(ended), 3))
        return {"envs": envs, "obs": obs, "action": rng.integers(4, size=K), "next_obs": next_obs, "beta": beta,
                "reward": rng.normal(size=(K, n)).astype(np.float32), "next_beta": next_beta,
                "terminated": terminated, "truncated": truncated}  # fmt: skip


def assert_same_replay(lean, full):
    """D^j, D* and its order, priorities, the windows and the generator."""
    assert lean.total == full.total and len(lean) == len(full)
    for name in ("steps", "window", "rises", "members", "drawn"):
        assert same(getattr(lean, name), getattr(full, name)), name
    assert lean.rng.bit_generator.state == full.rng.bit_generator.state
    if full.sets:
        assert same(lean.sets.order, full.sets.order) and same(lean.sets.where, full.sets.where)
        assert lean.sets.marked == full.sets.marked
    else:
        assert same(lean.tree.maxima, full.tree.maxima) and same(lean.tree.sums, full.tree.sums)


@pytest.mark.lean("algos/dqn_taper.py:TaskPrioritizedReplay", "algos/dqn_taper.py:IndexSets",
                  "algos/dqn_taper.py:SumTree")  # fmt: skip
@pytest.mark.parametrize("seed", range(300))
def test_lean_dqn_taper_replay(seed):
    """The same draws, weights, priorities, sets and metrics, also after each has gone through a checkpoint."""
    rng = np.random.default_rng(seed)
    kind = taper.TaskPrioritizedReplay.KINDS[seed % 5]
    num_envs, num_tasks, T = (int(rng.integers(1, high)) for high in (7, 5, 14))
    capacity = num_envs * T + int(rng.choice([0, 1, 7, 40, 2000]))
    options = {"eps": float(rng.choice([1.0, 0.01, 1e-6])), "reading": str(rng.choice(["first", "last"]))}
    continuing = bool(rng.random() < 0.4)

    def make(seed):
        lean = dqn_taper.TaskPrioritizedReplay(capacity, kind, num_envs, num_tasks, (3,), np.float32, T, **options,
                                               rng=np.random.default_rng(seed))  # fmt: skip
        full = taper.TaskPrioritizedReplay(capacity, num_envs, num_tasks, (3,), np.float32, T,
                                           np.random.default_rng(seed), kind, alpha=0.0, continuing=continuing,
                                           **options)  # fmt: skip
        return lean, full

    world, (lean, full) = TaperWorld(seed, num_envs, num_tasks, T, continuing), make(seed)
    for step in range(150):
        transition = world.step()
        lean.add(transition)
        full.add(**transition)
        if rng.random() < 0.1:
            alpha = float(rng.choice([0.0, 0.3, 0.5, 1.0]))
            lean.set_alpha(alpha)
            full.alpha = alpha
        if rng.random() < 0.5 and len(full):
            size, is_beta = int(rng.integers(1, min(64, capacity) + 1)), float(rng.choice([0.0, 0.4, 1.0]))
            mine, theirs = lean.sample(size, is_beta), full.sample(size, is_beta)
            slots, index = mine.pop("slots"), theirs.pop("index")
            assert same(slots, index % capacity) and same(mine, {name: theirs[name] for name in mine})
            assert mine.keys() == theirs.keys()
            if full.tree:
                errors = rng.normal(size=(size, num_tasks)).astype(np.float32) * 10.0 ** rng.integers(-4, 3)
                lean.set_priorities(slots, errors)
                full.set_priorities(index, errors)
        if rng.random() < 0.1:
            assert same({k: float(v) for k, v in lean.metrics().items()},
                        {k: float(v) for k, v in full.metrics().items()})  # fmt: skip
        if rng.random() < 0.03:
            states = pack(lean.state_dict()), pack(full.state_dict())
            lean, full = make(seed + 1)
            lean.load_state_dict(states[0])
            full.load_state_dict(states[1])
        if step % 10 == 9:
            assert_same_replay(lean, full)


# ---- end of algos/dqn_taper.py ---------------------------------------------------------------------------------------


# ---- algos/appo_pfsp.py ----------------------------------------------------------------------------------------------


def random_league(rng):
    """A lean league and the full one with the same settings and first agent, which draw as the same seed says."""
    args = SimpleNamespace(
        opponents=rng.choice(["self", "fsp", "pfsp", "pfsp", "pfsp"]),
        self_play_share=float(rng.choice([0, 0.5])),
        snapshot_interval=int(rng.integers(1, 9)),
        snapshot_win_rate=float(rng.choice([0.5, 0.7])),
        openings=int(rng.integers(5)),
        league_size=int(rng.integers(2, 9)),
        pfsp_weighting=str(rng.choice(["hard", "var", "linear", "linear_capped", "argmax"])),
        pfsp_power=float(rng.choice([0.5, 1, 2, 20, 300])),
        pfsp_uniform=float(rng.choice([0, 0.1, 1])),
        pfsp_decay=float(rng.choice([1, 0.99, 0.3])),
        pfsp_prior_games=float(rng.choice([0, 2, 10])),
    )
    seed, agent = int(rng.integers(2**32)), rng.normal(size=3).astype(np.float32)
    past, openings, newest = np.random.SeedSequence(seed).spawn(3)
    options = {"capacity": args.league_size, "keep_initial": True, "decay": args.pfsp_decay, "seed": past,
               "prior_games": args.pfsp_prior_games}  # fmt: skip
    if args.opponents == "pfsp":
        options |= {"weighting": args.pfsp_weighting, "power": args.pfsp_power, "uniform": args.pfsp_uniform}
        curriculum = self_play.PrioritizedFictitiousSelfPlay(agent, **options)
    else:
        curriculum = self_play.FictitiousSelfPlay(agent, **options)
    full = self_play.LeaguePlay(curriculum, self_play_share=1.0 if args.opponents == "self" else args.self_play_share,
                                snapshot_interval=args.snapshot_interval, snapshot_win_rate=args.snapshot_win_rate,
                                seed=newest)  # fmt: skip
    full_openings = DomainRandomization(args.openings + 1, seed=openings)
    return appo_pfsp.League(args, agent, np.random.SeedSequence(seed)), full, full_openings


def assert_same_league(lean, full, openings):
    """Equal to the bit. The lean one has neither Elo ratings nor metrics of each opponent."""
    past, ids = full.curriculum, full.curriculum.opponents
    assert [*lean.past] == [*lean.records] == ids
    np.testing.assert_array_equal(lean.win_rates(), past.win_rates())
    np.testing.assert_array_equal(lean.distribution(), past._sample_distribution())
    names = [name for name in full.metrics() if "/" not in name and name != "rating"]
    assert lean.metrics() == {f"curriculum/{name}": full.metrics()[name] for name in names}
    state, expected = lean.state_dict(), full.state_dict()
    assert state["rngs"] == [expected["curriculum"]["rng"], openings.state_dict()["rng"], expected["rng"]]
    assert state["ids"] == expected["curriculum"]["ids"].tolist() and state["updates"] == expected["updates"]
    assert state["records"].tobytes() == expected["curriculum"]["records"][:, :3].tobytes()
    assert state["next_id"] == expected["curriculum"]["next_id"]
    for a, b in zip(state["agents"], expected["curriculum"]["agents"], strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.lean("algos/appo_pfsp.py:League")
@pytest.mark.parametrize("seed", range(300))
def test_lean_appo_pfsp_league(seed):
    rng = np.random.default_rng(seed)
    leagues = lean, full, openings = random_league(rng)
    for _ in range(int(rng.integers(20, 120))):
        kind = rng.random()
        if kind < 0.4:
            assert lean.draw() == (*openings.sample(), *full.sample())
        elif kind < 0.8:
            opponent, result = int(rng.choice([*full.opponents, full.curriculum._next_id])), int(rng.integers(-1, 2))
            full.update_winrate(opponent, (result + 1) / 2)
            ended = torch.tensor([[False, opponent >= 0]])
            lean.record({"terminated": ended, "opponent": torch.tensor([[0, opponent]]),
                         "reward": torch.tensor([[1.0, 3.0 * result]]),
                         "early_opponent": torch.tensor([[-1]]), "early_reward": torch.tensor([[1.0]]),
                         })  # fmt: skip
        elif kind < 0.95:
            agent = rng.normal(size=3).astype(np.float32)
            lean.after_update(agent)
            full.after_update(agent)
            agent[:] = 0  # they hold copies
        else:
            saved = [appo_pfsp.pack(league.state_dict()) for league in leagues]
            leagues = lean, full, openings = random_league(np.random.default_rng(seed))
            for league, state in zip(leagues, saved):
                league.load_state_dict(state)
        assert_same_league(*leagues)


# ---- end of algos/appo_pfsp.py ---------------------------------------------------------------------------------------
