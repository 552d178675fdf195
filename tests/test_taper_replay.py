"""The replay of curricula/taper.py alone, against the vectors, an oracle that keeps the whole history, and the probes
of public fault reports (RPL, CKP, B). tests/test_lean.py finds the scripts' lean form equal to it."""

import copy
import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from algos.ppo import pack
from curricula import taper

VECTORS = json.loads((Path(__file__).parent / "data" / "taper.json").read_text())
KINDS = taper.TaskPrioritizedReplay.KINDS


def make(capacity=100, num_envs=1, num_tasks=2, shape=(2,), dtype=np.int64, T=10, seed=0, **options):
    return taper.TaskPrioritizedReplay(
        capacity, num_envs, num_tasks, shape, dtype, T, np.random.default_rng(seed), **options
    )


class World:
    """Random environments that remember every transition. An observation is (environment, count): each is unique.
    Betas persist and fall at random; a step is taken by a random subset of the environments."""

    def __init__(self, num_envs, num_tasks, T, continuing=False, seed=0, p_beta=0.03, p_end=0.03, slow=(), shape=(2,)):
        self.rng, self.n, self.T, self.continuing = np.random.default_rng(seed), num_tasks, T, continuing
        self.p_beta, self.p_end, self.slow, self.history = p_beta, p_end, slow, []
        self.count, self.steps = np.zeros(num_envs, np.int64), np.zeros(num_envs, np.int64)
        self.episode, self.beta = np.arange(num_envs) * 10**6, self.rng.random((num_envs, num_tasks)) < 0.2

    def step(self, replay):
        rng = self.rng
        envs = np.flatnonzero([rng.random() < (0.02 if e in self.slow else 0.8) for e in range(len(self.count))])
        rng.shuffle(envs)
        K = len(envs)
        obs = np.stack([envs, self.count[envs]], 1)
        self.count[envs] += 1
        self.steps[envs] += 1
        next_obs, beta = np.stack([envs, self.count[envs]], 1), self.beta[envs]
        flips = rng.random((K, self.n)) < np.where(beta, 0.3, self.p_beta)
        next_beta, reward = beta ^ flips, rng.normal(size=(K, self.n))
        terminated = rng.random(K) < self.p_end
        truncated = (rng.random(K) < self.p_end) | (not self.continuing and self.steps[envs] == self.T)
        action = rng.integers(5, size=K)
        replay.add(envs, obs, action, reward, next_obs, beta, next_beta, terminated, truncated)
        for k, e in enumerate(envs):
            self.history.append({
                "obs": obs[k], "action": action[k], "reward": reward[k].astype(np.float32), "next_obs": next_obs[k],
                "beta": beta[k], "next_beta": next_beta[k], "terminated": terminated[k],
                "episode": self.episode[e], "step": self.steps[e], "time": len(self.history) - k + K,
            })  # fmt: skip
            self.beta[e] = next_beta[k]
            if terminated[k] or truncated[k]:
                self.count[e] += 1  # the reset observation is another one
                self.episode[e], self.steps[e], self.beta[e] = self.episode[e] + 1, 0, rng.random(self.n) < 0.2

    def members(self, capacity, reading):
        """D^j (capacity or less, n) of the newest transitions, by definition: for each rise at a time when it was still
        held, all earlier steps of the episode, at most T of them; "first": of the first rise in that window."""
        history, episodes = self.history, {}
        member = np.zeros((len(history), self.n), bool)
        for number, t in enumerate(history):
            steps = episodes.setdefault(t["episode"], [])
            steps.append(number)
            window = steps[-self.T :]
            if not (t["next_beta"] & ~t["beta"]).any():
                continue
            for j in range(self.n):
                rises = [i for i in window if history[i]["next_beta"][j] and not history[i]["beta"][j]]
                for i in window:
                    if rises and i <= rises[0 if reading == "first" else -1] and i >= t["time"] - capacity:
                        member[i, j] = True
        return member[-capacity:]


def rows_by_number(replay, batches=20):
    """Everything that `sample` ever returns, by index."""
    found = {}
    for _ in range(batches):
        batch = replay.sample(replay.capacity)
        for i, number in enumerate(batch["index"]):
            found[int(number)] = {name: value[i] for name, value in batch.items()}
    return found


def drawn_counts(replay, draws):
    """How often each slot is drawn."""
    batches = [replay.sample(min(replay.capacity, 2000))["index"] for _ in range(draws // min(replay.capacity, 2000))]
    return np.bincount(np.concatenate(batches) % replay.capacity, minlength=len(replay))


def in_another_process(script, folder):
    """Runs the script with this file importable and the folder as its argument."""
    here = Path(__file__).parent
    env = os.environ | {"PYTHONPATH": str(here.parent)}
    command = [sys.executable, "-c", script, folder]
    return subprocess.run(command, cwd=here, env=env, capture_output=True, text=True, timeout=60)


def fill(replay, steps, rises=()):
    """A single environment that counts; task 0 rises at the given steps; episodes of replay.T steps."""
    n, start = replay.num_tasks, replay.total
    for t in range(start, start + steps):
        beta = np.zeros((1, n), bool)
        beta[0, 0] = t in rises
        end = t % replay.T == replay.T - 1 and not replay.continuing
        replay.add(
            [0], [[0, t]], [t % 7], np.full((1, n), t), [[0, t + 1]], np.zeros((1, n), bool), beta, [False], [end]
        )


# ---- The achieving prefix ----


@pytest.mark.parametrize("reading", ["first", "last"])
def test_vectors(reading):
    T, expect = VECTORS["T"], VECTORS["readings"][reading]
    beta = np.array(VECTORS["beta_next"], bool)
    n, replay = beta.shape[1], make(len(beta), num_tasks=beta.shape[1], T=T, reading=reading, c=VECTORS["c"],
                                    eps=VECTORS["eps_p"])  # fmt: skip
    for episode, sets in enumerate(expect["sets"]):
        prefix = taper.achieving_prefix(beta[episode * T : (episode + 1) * T], reading)
        assert prefix.shape == (T, n) and prefix.dtype == bool
        assert [(np.flatnonzero(column) + episode * T).tolist() for column in prefix.T] == sets
    for t, b in enumerate(beta):
        before = beta[t - 1] if t % T else np.zeros(n, bool)
        replay.add([0], [[0, t]], [0], np.zeros((1, n)), [[0, t + 1]], [before], [b], [False], [t % T == T - 1])
    assert np.flatnonzero(replay.members.any(1)).tolist() == expect["union"]
    assert replay.counts.tolist() == [sum(len(sets[j]) for sets in expect["sets"]) for j in range(n)]
    for alpha, P in expect["P"].items():
        replay.alpha = float(alpha)
        slots, probability = replay.sets.sample(len(beta), 2000, replay.rng)
        np.testing.assert_allclose(probability, np.array(P)[slots], rtol=1e-12)
        assert set(slots.tolist()) == set(range(len(beta))) or alpha != "0.0"


def test_prefix_by_hand():
    held = np.array([[0, 0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 1], [0] * 7, [0, 0, 0, 0, 0, 0, 1]], bool).T
    first, last = taper.achieving_prefix(held, "first"), taper.achieving_prefix(held, "last")
    assert first.sum(0).tolist() == [3, 1, 0, 7] and last.sum(0).tolist() == [6, 7, 0, 7]
    for prefix in (first, last):
        assert all(not (np.diff(column.astype(int)) > 0).any() for column in prefix.T)  # a prefix
    rises = held & ~np.vstack([np.zeros((1, 4), bool), held[:-1]])
    assert taper.achieving_prefix(rises, "last").sum(0).tolist() == [6, 1, 0, 7]
    assert taper.achieving_prefix(np.zeros((0, 3)), "first").shape == (0, 3)
    assert taper.achieving_prefix([[1]], "first").tolist() == [[True]]
    with pytest.raises(ValueError, match="'both'.*'first' or 'last'"):
        taper.achieving_prefix(held, "both")


def test_true_at_the_start_marks_nothing_and_a_rise_includes_its_step():
    replay, none, held = make(T=6, num_tasks=1), [[False]], [[True]]
    betas = [held, held, none, none, held, held, none]  # at s_0 ... s_6: it rises once, at s_4, by transition 3
    for t in range(6):
        replay.add([0], [[0, t]], [0], [[0.0]], [[0, t + 1]], betas[t], betas[t + 1], [False], [t == 5])
        assert replay.num_achieving == (0 if t < 3 else 4)  # marked at once, not at the end
    assert np.flatnonzero(replay.members[:, 0]).tolist() == [0, 1, 2, 3]


# ---- Against the whole history ----


@pytest.mark.parametrize("reading", ["first", "last"])
@pytest.mark.parametrize("continuing", [False, True])
@pytest.mark.parametrize("capacity, slack", [(60, 0), (97, 41), (400, 7)])
def test_against_the_history(reading, continuing, capacity, slack):
    world = World(num_envs=5, num_tasks=3, T=12, continuing=continuing, seed=capacity, slow=(1,),
                  p_end=0.01 if continuing else 0.05)  # fmt: skip
    replay = make(capacity, 5, 3, T=12, reading=reading, continuing=continuing, slack=slack, alpha=0.0)
    for step in range(240):
        world.step(replay)
        if step % 80 != 79:
            continue
        assert len(replay) == min(len(world.history), capacity)
        first = len(world.history) - len(replay)
        expect = world.members(capacity, reading)
        numbers = np.arange(first, len(world.history))
        np.testing.assert_array_equal(replay.members[numbers % capacity], expect)
        assert replay.counts.tolist() == expect.sum(0).tolist() and replay.num_achieving == expect.any(1).sum()
        marked = np.sort(replay.sets.order[: replay.sets.marked])
        np.testing.assert_array_equal(marked, np.sort(numbers[expect.any(1)] % capacity))
        found = rows_by_number(replay)
        assert found.keys() == set(numbers.tolist())
        for number, row in found.items():
            for name in ("obs", "action", "reward", "next_obs", "next_beta", "terminated"):
                np.testing.assert_array_equal(row[name], world.history[number][name], name)
    assert expect.any() and not expect.any(1).all()


def test_sets_by_swap_remove():
    rng, sets, truth = np.random.default_rng(0), taper.IndexSets(50, 1.0, 0.01, 1.0), set()
    for _ in range(300):
        slots = rng.choice(50, rng.integers(1, 12), replace=False)
        if rng.random() < 0.5:
            sets.mark(new := np.setdiff1d(slots, list(truth)))
            truth |= set(new.tolist())
        else:
            sets.unmark(slots)
            truth -= set(slots.tolist())
        assert set(sets.order[: sets.marked].tolist()) == truth and sets.marked == len(truth)
        np.testing.assert_array_equal(sets.order[sets.where], np.arange(50))


def test_shuffled_set_is_as_large_and_another():
    real, shuffled = (make(500, T=20, kind=kind) for kind in ("taper", "taper_shuffled"))
    for replay in (real, shuffled):
        fill(replay, 400, rises=range(9, 400, 40))
    marked = [set(replay.sets.order[: replay.sets.marked].tolist()) for replay in (real, shuffled)]
    assert len(marked[0]) == len(marked[1]) == 100 and 10 < len(marked[0] & marked[1]) < 60
    np.testing.assert_array_equal(real.members, shuffled.members)  # what achieved is known to both
    drawn = np.concatenate([shuffled.sample(500)["index"] for _ in range(20)])
    assert np.isin(drawn, list(marked[1])).mean() == pytest.approx(100 / (100 + 300 * 0.01), abs=0.01)
    assert shuffled.metrics()["replay/drawn_share"] == pytest.approx(np.isin(drawn, list(marked[0])).mean())


# ---- P(k) ----


def expected_probabilities(replay, kind, alpha, priorities):
    """By eq. 3 to 5, from D* and the |delta| that were set."""
    achieving = replay.members[: len(replay)].any(1)
    p = {"uniform": np.ones(len(replay)), "taper": np.where(achieving, 1.0, 0.01), "per": priorities + 0.01,
         "taper_td": np.where(achieving, priorities + 0.01, 0.01)}  # fmt: skip
    if kind == "taper_shuffled":
        marked = replay.sets.order[: replay.sets.marked]
        p[kind] = np.where(np.isin(np.arange(len(replay)), marked), 1.0, 0.01)
    weights = p[kind] ** alpha
    return weights / weights.sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("capacity", [3, 100, 1000, 4096])
def test_frequencies(kind, capacity):
    T = 3 if capacity == 3 else 50
    replay = make(capacity, T=T, kind=kind, alpha=0.5, seed=capacity)
    fill(replay, int(capacity * 1.4), rises=range(1, 10**4, 3 * T))  # wraps: the newest are in front of the oldest
    rng = np.random.default_rng(7)
    priorities = rng.random(capacity) ** 2
    numbers = np.arange(replay.total - capacity, replay.total)
    replay.set_priorities(numbers, np.stack([priorities, -priorities / 2], 1)[numbers % capacity])
    for alpha in (0.0, 0.3, 0.5, 1.0):
        replay.alpha = alpha
        expect = expected_probabilities(replay, kind, alpha, priorities)
        counts = drawn_counts(replay, max(3000, 25 * capacity))
        few = expect * counts.sum() < 5  # are taken together
        seen, due = ([*x[~few], *([x[few].sum()] if few.any() else [])] for x in (counts, expect * counts.sum()))
        assert chisquare(seen, due).pvalue > 1e-3 if len(seen) > 1 else seen == due
        assert (counts[expect > 20 / counts.sum()] > 0).all()


def test_frequencies_before_the_ring_is_full_and_after_an_alpha_change():
    for kind in KINDS:
        replay = make(100, kind=kind, alpha=0.2, T=10)
        fill(replay, 37, rises=(5, 28))
        replay.alpha = 0.7
        weights = {"uniform": np.ones(37), "per": np.ones(37)}
        achieving = np.isin(np.arange(37), [*range(6), *range(20, 29)])
        expect = weights.get(kind, np.where(achieving, 1.0, 0.01**0.7))
        if kind == "taper_shuffled":
            marked = replay.sets.order[: replay.sets.marked]
            expect = np.where(np.isin(np.arange(37), marked), 1.0, 0.01**0.7)
            assert len(marked) == 15
        counts = drawn_counts(replay, 20_000)
        assert len(counts) == 37 and chisquare(counts, expect / expect.sum() * counts.sum()).pvalue > 1e-3


def test_importance_weights():
    """(N P(k))^-beta over the batch's maximum, so that none scales the loss up (B24: by 150)."""
    for kind in ("per", "taper", "taper_td"):
        replay = make(64, T=8, kind=kind, alpha=0.6)
        fill(replay, 64, rises=(3, 30))
        delta = np.random.default_rng(1).random((64, 2))
        replay.set_priorities(np.arange(64), delta)
        P = expected_probabilities(replay, kind, 0.6, delta.max(1))
        batch = replay.sample(32, is_beta=0.4)
        weights = (64 * P[batch["index"]]) ** -0.4
        np.testing.assert_allclose(batch["weight"], weights / weights.max(), rtol=1e-6)
        assert batch["weight"].dtype == np.float32 and (replay.sample(32)["weight"] == 1).all()


def test_sum_tree_is_exact_and_never_returns_a_leaf_of_priority_0():
    rng = np.random.default_rng(3)
    for size in (1, 2, 31, 32, 33, 1024, 1025, 5000):
        for alpha in (0.0, 0.6, 1.0):
            tree, p = taper.SumTree(size, alpha), rng.random(size) * 10.0 ** rng.integers(-12, 6, size)
            tree.set(np.arange(size), p)
            for _ in range(5):
                changed = rng.integers(size, size=20)
                p[changed] = rng.random(20)
                tree.set(changed, p[changed])  # with repeated slots: the last one counts
            for level in range(1, len(tree.sums)):
                for above, below, reduce in ((tree.sums, tree.sums, np.sum), (tree.maxima, tree.maxima, np.max)):
                    blocks = below[level - 1].reshape(-1, tree.FAN)
                    np.testing.assert_array_equal(above[level][: len(blocks)], reduce(blocks, 1))
            assert tree.top == p.max() and tree.total == pytest.approx((p**alpha).sum(), rel=1e-12)
            again = taper.SumTree(size, 0.1)
            again.rebuild(p, alpha)
            assert all((a == b).all() for a, b in zip(again.sums + again.maxima, tree.sums + tree.maxima))
    tree, p = taper.SumTree(1000, 1.0), np.zeros(1000)
    p[[5, 400, 998]] = 1e-9, 0.3, 1e9
    rng.shuffle(p)
    tree.set(np.flatnonzero(p), p[p > 0])
    masses = np.concatenate(
        [[0.0, -1e-20], rng.random(5000) * tree.total, [tree.total, np.nextafter(tree.total, math.inf)]]
    )
    assert (p[tree.find(masses)] > 0).all()


# ---- Public fault reports ----


def test_rpl_02_the_successor_at_a_truncation_is_the_true_one():
    """RPL-02."""
    replay = make(10, T=4)
    fill(replay, 4)
    replay.add([0], [[0, 0]], [0], [[0, 0]], [[0, 1]], [[0, 0]], [[0, 0]], [False], [False])  # the reset observation
    rows = rows_by_number(replay)
    assert rows[3]["next_obs"].tolist() == [0, 4] and not rows[3]["terminated"]
    assert [rows[i]["next_obs"][1] for i in (0, 1, 2, 4)] == [1, 2, 3, 1]


def test_rpl_03_stacks_across_the_write_head():
    """RPL-03."""
    replay = make(8, shape=(4,), T=8, continuing=True)
    stack = lambda t: np.maximum(np.arange(t - 3, t + 1), 0)  # noqa: E731
    for t in range(20):
        replay.add([0], [stack(t)], [0], [[t, t]], [stack(t + 1)], [[0, 0]], [[0, 0]], [False], [False])
        for number, row in rows_by_number(replay, 5).items():
            assert row["obs"].tolist() == stack(number).tolist()
            assert row["next_obs"].tolist() == stack(number + 1).tolist()


def test_rpl_04_05_nothing_past_the_end():
    """RPL-04, RPL-05."""
    replay = make(100)
    fill(replay, 5)
    for _ in range(100):
        batch = replay.sample(100)
        assert batch["index"].max() < 5 and (batch["next_obs"][:, 1] > 0).all()
    replay = make(5, num_envs=3, T=1)
    add = lambda envs, k: replay.add(envs, [[0, k]] * len(envs), [k] * len(envs), np.full((len(envs), 2), k),  # noqa: E731
                                     [[0, -k]] * len(envs), np.zeros((len(envs), 2)), np.zeros((len(envs), 2)),
                                     [False] * len(envs), [True] * len(envs))  # fmt: skip
    for k in range(1, 5):
        add([0], k)
    assert len(replay) == 4 and set(rows_by_number(replay)) == {0, 1, 2, 3}
    add([2, 0, 1], 5)
    assert len(replay) == 5
    assert {i: int(row["action"]) for i, row in rows_by_number(replay).items()} == {2: 3, 3: 4, 4: 5, 5: 5, 6: 5}


def test_rpl_08_new_transitions_get_the_current_maximum():
    """RPL-08."""
    replay = make(10, kind="per", eps=0.01, T=10)
    fill(replay, 3)
    assert (replay.tree.maxima[0][:3] == 1).all()  # nothing is known yet
    replay.set_priorities(np.arange(3), np.array([[0.36, 0.1], [0.2, -0.3], [0, 0]]))
    fill(replay, 1)
    np.testing.assert_allclose(replay.tree.maxima[0][:4], [0.37, 0.31, 0.01, 0.37])
    replay = make(10, kind="taper_td", eps=0.01, T=5)
    fill(replay, 3, rises=(1,))
    np.testing.assert_allclose(replay.tree.maxima[0][:3], [1, 1, 0.01])
    replay.set_priorities(np.arange(3), np.array([[0.36, 0], [0, -0.2], [9, 9]]))
    fill(replay, 4, rises=(5, 6))
    np.testing.assert_allclose(replay.tree.maxima[0][:7], [0.37, 0.21, 0.01, 0.01, 0.01, 0.37, 0.37])


def test_rpl_09_10_borders_of_the_tree():
    """RPL-09, RPL-10."""
    for alpha in (1.0, 0.5):
        tree = taper.SumTree(3, alpha)
        tree.set(np.arange(3), np.array([10.0, 5.0, 2.0]) ** (1 / alpha))
        assert np.bincount(tree.find(np.arange(17) + 1e-9)).tolist() == [10, 5, 2]
    tree = taper.SumTree(3, 1.0)
    tree.set(np.arange(3), np.array([10.0, 5.0, 2.0]))
    assert np.bincount(tree.find(np.arange(17.0))).tolist() == [10, 5, 2]
    tree = taper.SumTree(2, 1.0)
    tree.set(np.arange(2), np.array([0.0, 1.0]))
    assert (tree.sample(2, 1000, np.random.default_rng(0))[0] == 1).all()


def test_rpl_11_priorities_do_not_depend_on_importance_weights():
    """RPL-11."""
    found = []
    for is_beta in (0.0, 1.0):
        replay = make(20, kind="per", alpha=0.6)
        fill(replay, 20)
        for _ in range(5):
            index = replay.sample(8, is_beta)["index"]
            replay.set_priorities(index, np.stack([index / 10, -index / 20], 1))
        found.append(replay.tree.maxima[0][:20].copy())
    np.testing.assert_array_equal(*found)
    touched = found[0] != 1
    np.testing.assert_allclose(found[0][touched], np.flatnonzero(touched) / 10 + 0.01)


def test_rpl_13_types_and_memory():
    """RPL-13."""
    fields = np.dtype([("img", np.uint8, (4, 4, 3)), ("vec", np.float64, (3,))])
    replay = make(50, shape=(), dtype=fields, T=5, num_tasks=3, action_shape=(2,), action_dtype=np.float32)
    obs = np.zeros(61, fields)
    obs["img"], obs["vec"] = np.arange(61)[:, None, None, None], np.arange(61)[:, None] / 3
    for t in range(60):
        replay.add([0], obs[t : t + 1], np.full((1, 2), t / 7), np.zeros((1, 3), np.int64), obs[t + 1 : t + 2],
                   np.zeros((1, 3)), np.zeros((1, 3)), [False], [t % 5 == 4])  # fmt: skip
    batch = replay.sample(50)
    assert batch["obs"]["img"].dtype == np.uint8 and batch["obs"]["vec"].dtype == np.float64
    np.testing.assert_array_equal(batch["next_obs"], obs[batch["index"] + 1])
    np.testing.assert_array_equal(batch["action"], np.repeat(batch["index"][:, None] / 7, 2, 1).astype(np.float32))
    assert replay.rows["obs"].nbytes == 50 * (48 + 24) and replay.rows.itemsize <= 72 + 8 + 12 + 3 + 1 + 16 + 4
    assert batch["reward"].dtype == np.float32 and all(array.flags.c_contiguous for array in batch.values())
    again = make(50, shape=(), dtype=fields, T=5, num_tasks=3, action_shape=(2,), action_dtype=np.float32, seed=1)
    again.load_state_dict(saved(replay.state_dict()))
    np.testing.assert_array_equal(again.sample(50)["next_obs"], replay.sample(50)["next_obs"])


@pytest.mark.parametrize("in_files", [False, True])
@pytest.mark.parametrize("kind", ["taper", "per"])
def test_memory_is_said_before_it_is_taken(tmp_path, capsys, kind, in_files):
    folder = tmp_path / "replay" if in_files else None
    replay = make(1000, 4, 3, (8, 8, 3), np.uint8, 50, kind=kind, folder=folder, slack=200)
    index = replay.members.nbytes + replay.window.nbytes + replay.rises.nbytes
    index += sum(a.nbytes for a in (replay.tree.sums + replay.tree.maxima if kind == "per" else
                                    [replay.sets.order, replay.sets.where]))  # fmt: skip
    rows = replay.rows.nbytes + replay.extra.nbytes
    assert replay.nbytes == pytest.approx(rows + index, rel=0.01) and replay.extra.nbytes < 0.05 * rows
    said = f"{index / 2**20:,.1f} MiB of memory and {rows / 2**20:,.1f} MiB in {folder}"
    said = said if in_files else f"{(rows + index) / 2**20:,.1f} MiB of memory"
    assert capsys.readouterr().err == f"replay: 1,000 transitions take {said}\n"
    if in_files:
        assert sum(path.stat().st_size for path in folder.iterdir()) == rows


@pytest.mark.parametrize("in_files", [False, True])
def test_what_does_not_fit_is_refused(tmp_path, in_files):
    with pytest.raises(
        ValueError, match=r"2000000000 transitions takes .* MiB .* are free: a capacity of \d+ fits"
    ) as error:
        make(2 * 10**9, shape=(512, 512, 3), dtype=np.uint8, folder=tmp_path if in_files else None)
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
    fits = int(str(error.value).split()[-2])
    assert 0 < fits < 2 * 10**9


def test_a_disk_that_fills_up_while_files_grow(tmp_path):
    script = """if True:
        import resource, sys, numpy as np
        from test_taper_replay import make
        replay = make(100, shape=(1000,), T=50, folder=sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
        try:
            for t in range(400):
                obs, zero = np.full((1, 1000), t), np.zeros((1, 2))
                replay.add([0], obs, [0], zero, obs, zero, zero, [True], [False])
        except OSError as error:
            print(error, t)
        """
    run = in_another_process(script, tmp_path)
    assert "MiB: File too large" in run.stdout and str(tmp_path / "extra.bin") in run.stdout, run.stderr


def test_rpl_14_and_other_bad_input():
    """RPL-14."""
    good = {"envs": [0, 1], "obs": [[0, 0], [1, 0]], "action": [0, 0], "reward": np.zeros((2, 3)),
            "next_obs": [[0, 1], [1, 1]], "beta": np.zeros((2, 3)), "next_beta": np.zeros((2, 3)),
            "terminated": [False, False], "truncated": [False, False]}  # fmt: skip
    replay = make(20, 2, 3, T=4)
    with pytest.raises(ValueError, match="a batch of 8 from 0 transitions"):
        replay.sample(8)
    replay.add(**good)
    with pytest.raises(ValueError, match="batch_size 21: .* capacity of 20"):
        replay.sample(21)
    assert len(replay.sample(20)["obs"]) == 20  # of 2 transitions, with replacement
    nan = np.array([[0, 0, 0], [0, math.nan, 0]])
    for change, message in (
        ({"reward": np.zeros((2, 4))}, r"reward has shape \(2, 4\): .* 3 tasks it must be \(2, 3\)"),
        ({"next_beta": np.zeros((2, 2))}, r"next_beta has shape \(2, 2\)"),
        ({"beta": np.zeros(3)}, r"beta has shape \(3,\)"),
        ({"obs": np.zeros((2, 2))}, "obs has type float64: this replay stores int64"),
        ({"reward": nan}, "environment 1 gave task 1 the reward nan"),
        ({"reward": nan + math.inf}, "environment 0 gave task 0 the reward inf"),
        ({"next_obs": [[0, 1, 2]] * 2}, r"next_obs has shape \(2, 3\)"),
        ({"truncated": [False]}, "truncated has shape"),
        ({"envs": [0, 0]}, r"environments \[0, 0\]: they must differ"), ({"envs": [1, 2]}, "lie in 0 to 1"),
    ):  # fmt: skip
        before = replay.rows.copy()
        with pytest.raises(ValueError, match=message) as error:
            replay.add(**good | change)
        assert "\n" not in str(error.value) and replay.total == 2  # and nothing of it is in the replay
        assert (before == replay.rows).all()
    for _ in range(3):
        replay.add(**good)
    with pytest.raises(ValueError, match="environment 0 is at step 5 of an episode of at most 4 steps"):
        replay.add(**good)
    for options, message in (
        ({"num_tasks": 0}, "num_tasks 0: it must be a whole number between 1"),
        ({"T": 0}, "episode_length 0: it must be a whole number between 1"),
        ({"T": 21}, "capacity 20 is below num_envs 2 x episode_length 21 = 42"), ({"capacity": 0}, "capacity 0"),
        ({"capacity": 20.5}, "capacity 20.5: it must be a whole"), ({"eps": 0.0}, "eps 0.0, c 1.0: .* 0 < eps <= c"),
        ({"eps": 2.0}, "0 < eps <= c"), ({"alpha": 1.5}, "alpha 1.5"), ({"alpha": math.nan}, "alpha nan"),
        ({"kind": "rank"}, "kind 'rank': .* uniform, per, taper, taper_td, taper_shuffled"),
        ({"slack": -1}, "slack -1: it must be a whole number between 0"),
        ({"reading": "all"}, "reading 'all'"), ({"c": math.inf}, "c inf"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            make(**{"capacity": 20, "num_envs": 2, "num_tasks": 3, "T": 4} | options)
    replay = make(20, kind="per")
    fill(replay, 3)
    with pytest.raises(ValueError, match=r"TD errors of shape \(2, 2\), 3 of them finite"):
        replay.set_priorities(np.arange(2), np.array([[0, math.inf], [1, 1]]))
    with pytest.raises(ValueError, match=r"TD errors of shape \(2,\).*\(2, 2\)"):
        replay.set_priorities(np.arange(2), np.zeros(2))


def test_a_task_that_is_never_achieved_is_reported():
    replay = make(40, T=10)
    assert math.isnan(replay.metrics()["replay/drawn_share"])
    fill(replay, 20, rises=(4,))
    replay.alpha = 0.5
    for _ in range(50):
        replay.sample(40)
    metrics = replay.metrics()
    assert metrics.pop("replay/drawn_share") == pytest.approx(5 / (5 + 15 * 0.1), abs=0.03)
    assert metrics == {"replay/size": 20, "replay/achieving_share": 0.25, "replay/alpha": 0.5, "replay/achieving_0": 5,
                       "replay/achieving_1": 0}  # fmt: skip
    assert math.isnan(replay.metrics()["replay/drawn_share"])  # nothing since
    fill(replay, 22)  # of the five, the first two are overwritten
    assert replay.metrics()["replay/achieving_0"] == 3 and replay.sets.marked == 3


def test_priorities_of_overwritten_transitions_are_left_out():
    for kind in ("per", "taper_td"):
        replay = make(10, kind=kind, T=10)
        fill(replay, 10, rises=(9,))
        index = replay.sample(10)["index"]
        fill(replay, 4)
        before = replay.tree.maxima[0].copy()
        replay.set_priorities(index, np.full((10, 2), 7.0))
        after = replay.tree.maxima[0]
        np.testing.assert_array_equal(after[:4], before[:4])
        assert (after[index[index >= 4]] == 7.01).all()


def test_each_part_of_a_batch_is_drawn_from_all():
    for kind in KINDS:
        replay = make(1000, kind=kind, T=10, alpha=0.0)
        fill(replay, 1000)
        first = np.concatenate([replay.sample(128)["index"][:32] for _ in range(50)])
        assert first.mean() == pytest.approx(500, abs=60), kind


def test_ramp():
    assert [taper.ramp(x, 0.0, 1.0, 0.5) for x in (0, 0.001, 0.005, 0.25, 0.499, 0.5, 1)] == [
        0,
        0,
        0.01,
        0.5,
        0.99,
        1,
        1,
    ]
    assert taper.ramp(0.0, 0.2, 1.0, 0.0) == 1.0 and taper.ramp(0.3, 0.4, 1.0, 1.0) == pytest.approx(0.4 + 0.6 * 0.3)
    assert len({taper.ramp(x, 0.0, 1.0, 0.7) for x in np.linspace(0, 1, 10_001)}) == 101


# ---- Room for final observations, episodes that are cut ----


@pytest.mark.parametrize("in_files", [False, True])
def test_many_short_episodes(tmp_path, in_files):
    replay = make(60, num_envs=2, T=20, folder=tmp_path if in_files else None, slack=10)
    room = len(replay.extra)
    for t in range(300):
        terminated = [t % 2 == 0, True]
        replay.add([0, 1], [[0, t], [1, t]], [0, 0], np.zeros((2, 2)), [[0, t + 1], [1, -t]], np.zeros((2, 2)),
                   np.zeros((2, 2)), terminated, [False, False])  # fmt: skip
    assert room < len(replay.extra) <= 100  # 53 finals at most, of 70 rows
    for number, row in rows_by_number(replay).items():
        t, env = divmod(number, 2)
        assert row["obs"].tolist() == [env, t] and row["next_obs"].tolist() == [env, -t if env else t + 1]


def test_episodes_that_are_cut():
    replay, zero = make(40, num_envs=2, T=10), np.zeros((2, 2))
    add = lambda t, beta: replay.add([0, 1], [[0, t], [1, t]], [0, 0], zero, [[0, t + 1], [1, t + 1]], zero, beta,  # noqa: E731
                                     [False, False], [False, False])  # fmt: skip
    for t in range(6):
        add(t, zero)
    replay.end_episodes(np.array([1]))
    rise = np.ones((2, 2), bool)
    add(100, rise)  # environment 0 goes on, 1 starts anew
    rows = rows_by_number(replay)
    assert rows[11]["next_obs"].tolist() == [1, 6] and rows[10]["next_obs"].tolist() == [0, 100]
    assert np.flatnonzero(replay.members.any(1)).tolist() == [0, 2, 4, 6, 8, 10, 12, 13]
    replay.end_episodes(np.array([0, 1]))
    replay.end_episodes(np.array([0, 1]))
    assert rows_by_number(replay)[12]["next_obs"].tolist() == [0, 101]

    one = np.zeros((1, 2))
    replay.add([0], [[0, 7]], [0], one, [[0, 8]], one, one, [False], [False])
    for t in range(40):  # of environment 0 nothing is left
        replay.add([1], [[1, t]], [0], one, [[1, t + 1]], one, one, [False], [t % 10 == 9])
    replay.end_episodes(np.array([0]))
    assert all(row["next_obs"].tolist() == [1, row["obs"][1] + 1] for row in rows_by_number(replay).values())


def test_what_was_overwritten_is_not_marked():
    replay, zero = make(20, num_envs=2, T=10), np.zeros((1, 2))
    replay.add([0], [[0, 0]], [0], zero, [[0, 1]], zero, zero, [0], [0])
    for t in range(25):
        replay.add([1], [[1, t]], [0], zero, [[1, t + 1]], zero, zero, [0], [t % 10 == 9])
    replay.add([0], [[0, 1]], [0], zero, [[0, 2]], zero, [[1, 0]], [0], [0])
    assert replay.counts.tolist() == [1, 0] and np.flatnonzero(replay.members.any(1)).tolist() == [26 % 20]


# ---- State ----


def saved(state):
    """Through a checkpoint file, as `RunLogger` writes and reads it."""
    file = io.BytesIO()
    torch.save(pack(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def work(world, replay, steps):
    """Steps, draws, priorities, alphas: returns all that was drawn."""
    drawn = []
    for _ in range(steps):
        world.step(replay)
        if len(replay):
            batch = replay.sample(16, is_beta=0.5)
            replay.set_priorities(batch["index"], np.stack([batch["reward"][:, 0], batch["reward"][:, 1] * 2], 1))
            replay.alpha = taper.ramp(replay.total / 2000, 0.1, 0.9, 0.5)
            drawn.append(batch)
    return drawn


def assert_same(a, b):
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for name in a:
            assert_same(a[name], b[name])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b):
            assert_same(x, y)
    else:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_files", [False, True])
def test_ckp_06_07_restored_to_the_bit(tmp_path, kind, in_files):
    """CKP-06, CKP-07."""
    folder = tmp_path / "replay" if in_files else None
    options = {"capacity": 150, "num_envs": 4, "T": 20, "kind": kind, "alpha": 0.1}
    straight, world = make(**options, slack=90), World(4, 2, 20, seed=5, slow=(3,))
    work(world, straight, 70)
    expect = work(world, straight, 60)

    replay, world = make(**options, slack=90, folder=folder), World(4, 2, 20, seed=5, slow=(3,))
    work(world, replay, 70)
    state, position = saved(replay.state_dict()), copy.deepcopy(world)
    held = {k: {n: np.copy(v) for n, v in row.items()} for k, row in rows_by_number(replay).items()}
    before, free = replay.total, set(replay.free)
    while replay.total < before + 80:  # what is lost with the process
        work(world, replay, 1)
    assert replay.total <= before + 90
    replay = make(**options, slack=90, folder=folder, seed=99)
    replay.load_state_dict(state)
    if kind in ("per", "taper_td"):
        assert replay.tree.total == pytest.approx(replay.tree.sums[0].sum()) and replay.tree.top > 0.5
    assert_same(saved(replay.state_dict()), state)
    assert free <= set(replay.free)  # nothing leaks from what is lost
    for k, row in rows_by_number(replay).items():
        for name in ("obs", "next_obs", "reward", "action", "next_beta", "terminated"):
            np.testing.assert_array_equal(row[name], held[k][name])

    replay.load_state_dict(state)  # rows_by_number has drawn from it
    assert_same(work(position, replay, 60), expect)
    mine, theirs = replay.state_dict(), straight.state_dict()
    assert_same({k: v for k, v in mine.items() if k not in ("signature", "rows", "extra")},
                {k: v for k, v in theirs.items() if k not in ("signature", "rows", "extra")})  # fmt: skip


def test_states_in_files_last_for_slack_transitions(tmp_path):
    """A later state's restoration leaves an earlier one intact, and one that is overwritten is refused."""
    options = {"capacity": 80, "num_envs": 2, "T": 10, "slack": 100, "folder": tmp_path, "alpha": 0.0}
    replay, world = make(**options), World(2, 2, 10, seed=1, p_end=0.2)
    work(world, replay, 90)
    early, held, start = saved(replay.state_dict()), rows_by_number(replay), replay.total
    work(world, replay, 20)
    late = saved(replay.state_dict())
    work(world, replay, 20)
    replay = make(**options)
    replay.load_state_dict(late)
    replay.end_episodes(np.arange(2))
    world = World(2, 2, 10, seed=2, p_end=0.2)
    while replay.total < start + 98:
        work(world, replay, 1)
    replay = make(**options)
    replay.load_state_dict(early)
    for k, row in rows_by_number(replay).items():
        for name in ("obs", "next_obs", "reward"):
            np.testing.assert_array_equal(row[name], held[k][name])
    while replay.total < start + 103:
        work(world, replay, 1)
    again = make(**options)
    lost = replay.total - start - 100
    with pytest.raises(ValueError, match=f"no longer holds {lost} of the 80 .* more than 100 .slack. added after"):
        again.load_state_dict(early)


def test_another_future_than_the_lost_one(tmp_path):
    """Processes that act on their own do not repeat what was lost: number 2 is now another environment's."""
    options, zero = {"capacity": 10, "num_envs": 2, "T": 5, "slack": 5, "folder": tmp_path}, np.zeros((1, 2))
    replay = make(**options)
    for e, t in ((0, 0), (1, 0), (None, None), (0, 1), (1, 1)):
        if e is None:
            state = saved(replay.state_dict())
        else:
            replay.add([e], [[e, t]], [0], zero, [[e, t + 1]], zero, zero, [0], [0])
    replay = make(**options)
    replay.load_state_dict(state)
    replay.add([1], [[1, 1]], [0], zero, [[1, 2]], zero, zero, [0], [0])
    assert [row["next_obs"].tolist() for _, row in sorted(rows_by_number(replay).items())] == [[0, 1], [1, 1], [1, 2]]


@pytest.mark.parametrize("gone", ["*", "extra.*", "rows.*"])
def test_a_state_whose_files_are_gone_is_refused(tmp_path, gone):
    replay = make(50, folder=tmp_path)
    fill(replay, 20)
    state = saved(replay.state_dict())
    for path in tmp_path.glob(gone):
        path.unlink()
    with pytest.raises(ValueError, match="no longer holds (19|20) of the 20 transitions .* its files were removed, or"):
        make(50, folder=tmp_path).load_state_dict(state)


def test_a_state_of_another_replay_is_refused():
    replay = make(50)
    fill(replay, 5)
    for options in ({"capacity": 51}, {"capacity": 50, "kind": "per"}, {"capacity": 50, "slack": 1},
                    {"capacity": 50, "num_tasks": 3}, {"capacity": 50, "T": 9}):  # fmt: skip
        with pytest.raises(ValueError, match="the state is of a replay with kind taper, capacity 50, .*; this one has"):
            make(**options).load_state_dict(replay.state_dict())


def test_killed_between_two_checkpoints(tmp_path):
    script = """if True:
        import os, signal, sys, torch
        from test_taper_replay import World, make, pack, work
        replay, world = make(150, 4, T=20, slack=200, folder=sys.argv[1], alpha=0.5), World(4, 2, 20, seed=5)
        work(world, replay, 100)
        torch.save(pack(replay.state_dict()), sys.argv[1] + "/state.pt")
        while replay.total < 480:
            work(world, replay, 1)
        print(replay.total, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    run = in_another_process(script, tmp_path)
    assert run.returncode == -signal.SIGKILL and 480 <= int(run.stdout) < 490, run.stderr
    replay = make(150, 4, T=20, slack=200, folder=tmp_path)
    replay.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    other, world = make(150, 4, T=20, slack=200, alpha=0.5), World(4, 2, 20, seed=5)
    work(world, other, 100)
    assert other.total == replay.total and int(run.stdout) - replay.total > 100
    assert_same([replay.sample(100) for _ in range(20)], [other.sample(100) for _ in range(20)])
    assert os.listdir(tmp_path).count("state.pt") == 1
