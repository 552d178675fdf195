"""Learning progress, online learning progress, learnability and OMNI, against the formulas written down anew."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box

from curricula.core import TaskSpace
from curricula.learning_progress import (
    Learnability,
    LearningProgress,
    OnlineLearningProgress,
    progress_distribution,
    reweight,
)
from curricula.omni import OMNI

VECTORS = json.loads((Path(__file__).parent / "data" / "learning_progress.json").read_text())
EXAMPLE = [[0, 0.1, 0.5, 0.9], [0.2, 0.1, 0.6, 0.9], [0.4, 0.3, 0.6, 0.9]]
RATES = np.array([0, 0.1, 0.3, 0.5, 0.55, 0.9, 1])
NAN = float("nan")


def push(curriculum, rates):
    curriculum.update_on_demand({"success_rates": rates})
    return curriculum._sample_distribution()


def play(curriculum, episodes, **options):
    """`episodes` of (task, progress)."""
    for task, progress in episodes:
        curriculum.update_on_episode(0.0, 10, task, progress, **options)
    return curriculum._sample_distribution()


class Evaluator:
    """Plays back a list of success rates, and keeps in mind of how many episodes they were to be."""

    def __init__(self, rates):
        self.rates, self.asked = list(rates), []

    def __call__(self):
        return self.rates.pop(0)


class PackageEvaluator(Evaluator):
    """As the public package's: (returns, success rates, success rates at the episodes' ends, data)."""

    __call__ = None

    def evaluate_agent(self, num_episodes):
        self.asked.append(num_episodes)
        return None, torch.tensor(self.rates.pop(0)), torch.tensor([0.25, 0.5]), {}


# ---- Learning progress ----


@pytest.mark.parametrize("case", VECTORS["cases"], ids=lambda case: case["case"])
def test_vectors(case):
    options = {"ema_alpha": case["ema_alpha"], "p_theta": case["p_theta"], "normalize_success": case["normalize"]}
    curriculum = LearningProgress(None, case["n_tasks"], **options)
    online = OnlineLearningProgress(
        case["n_tasks"], update_interval=case["n_tasks"], continuous_progress=True, **options
    )
    for step in case["steps"]:
        expect = {name: np.array(value) for name, value in step["expect"].items()}
        probabilities = push(curriculum, step["success"])
        for name, found in (
            ("p_fast", curriculum._p_fast),
            ("p_slow", curriculum._p_slow),
            ("p_true", curriculum._p_true),
            ("lp", curriculum.learning_progress()),
            ("probs", probabilities),
            ("probs_uniform025", play(online, enumerate(step["success"]))),
        ):
            np.testing.assert_allclose(found, expect[name], rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(curriculum.random_baseline, case["baseline"], atol=1e-12)


def test_reweight_table():
    for theta, values in VECTORS["reweight_table"]["theta"].items():
        p = np.array(VECTORS["reweight_table"]["p"])
        np.testing.assert_allclose(reweight(p, float(theta)), values, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [list, np.array, lambda r: np.array(r, np.float32), torch.tensor])
def test_worked_example(kind):
    """Syllabus' own class gave these numbers."""
    curriculum = LearningProgress(Evaluator(map(kind, EXAMPLE)), TaskSpace(["a", "b", "c", "d"]))
    for _ in EXAMPLE:
        curriculum.eval_and_update()
    for found, expect in (
        (curriculum._p_fast, [0.058, 0.022222, 0.038, 0.6]),
        (curriculum._p_slow, [0.0076, 0.002222, 0.0056, 0.6]),
        (curriculum.learning_progress(), [0.292078, 0.150161, 0.214031, 0]),
        (curriculum._sample_distribution(), [0.378512, 0.230646, 0.303052, 0.087790]),
    ):
        np.testing.assert_allclose(found, expect, atol=1e-6)
    assert all(np.array_equal(curriculum._sample_distribution(), curriculum._sample_distribution()) for _ in range(3))
    curriculum._sample_distribution()[:] = 0  # a copy
    assert curriculum._sample_distribution().sum() == pytest.approx(1)


def test_rates_with_a_gradient_are_taken():
    assert push(LearningProgress(None, 2), torch.tensor([0.0, 0.5], requires_grad=True)).tolist() == [0, 1]


def test_equal_progress_is_uniform_though_rounding_makes_it_differ():
    progress = 0.1 + np.array([0, 1, 2, 3]) * 1e-16
    np.testing.assert_allclose(progress_distribution(progress, progress > 0), 0.25)
    curriculum = LearningProgress(None, 3, ema_alpha=0.3)
    for _ in range(20):
        p = push(curriculum, [0.1, 0.3, 0.7])
    np.testing.assert_allclose(p, 1 / 3)


def test_many_tasks_of_which_one_stands_out_make_no_overflow():
    progress = np.zeros(1_000_000)
    progress[3] = 1
    with np.errstate(all="raise"):
        p = progress_distribution(-progress, progress == progress)
    assert p[3] < 1e-12 and p.sum() == pytest.approx(1)


def test_evaluates_at_the_first_draw_then_at_intervals():
    for options, episodes in (({"eval_interval": 3}, 3), ({"eval_interval_steps": 25}, 3)):  # of 10 steps each
        evaluator = Evaluator(EXAMPLE)
        curriculum = LearningProgress(evaluator, 4, **options)
        assert len(evaluator.rates) == 3
        curriculum.sample(5)
        for left in (2, 1, 0):
            assert len(evaluator.rates) == left
            np.testing.assert_array_equal(curriculum.task_rates, EXAMPLE[2 - left])
            for _ in range(episodes if left else 0):
                assert len(evaluator.rates) == left
                curriculum.update_on_episode(0.0, 10, 0, 0.0)


def test_evaluators_of_the_public_package():
    for continuous, expect in ((False, [1.0, 0.0]), (True, [0.25, 0.5])):
        evaluator = PackageEvaluator([[1.0, 0.0]] * 2)
        options = {"eval_eps": 7, "baseline_eval_eps": 20, "continuous_progress": continuous}
        curriculum = LearningProgress(evaluator, 2, **options)
        curriculum.sample()
        curriculum.eval_and_update()
        assert evaluator.asked == [20, 7]
        np.testing.assert_allclose(curriculum.task_rates, expect)
        np.testing.assert_allclose(curriculum.random_baseline, np.minimum(expect, 0.75))


def test_without_an_evaluator_it_is_uniform_until_it_is_told():
    for curriculum in (LearningProgress(None, 4), Learnability(None, 4, topk=1), OMNI(None, 4)):
        np.testing.assert_array_equal(curriculum._sample_distribution(), [0.25] * 4)
        curriculum.update_on_demand({"loss": 3.0})  # not for us
        np.testing.assert_array_equal(curriculum._sample_distribution(), [0.25] * 4)
        with pytest.raises(ValueError, match="update_on_demand"):
            curriculum.eval_and_update()


def test_draws_are_encodings_and_follow_the_distribution():
    space = TaskSpace(range(100, 104))
    curriculum = LearningProgress(None, space, seed=3)
    for rates in EXAMPLE:
        p = push(curriculum, rates)
    draws = curriculum.sample(20_000)
    assert all(space.contains(task) for task in draws)
    np.testing.assert_allclose(np.bincount(draws, minlength=4) / 20_000, p, atol=0.015)


# ---- Online ----


def test_online_learns_from_ordinary_episodes():
    """By hand: baseline 0, then rates 0.5 and 0 (alpha .1): fast .05, slow .005."""
    curriculum = OnlineLearningProgress(3, update_interval=6)
    play(curriculum, [(0, 0.0), (1, 0.0)] * 3)
    np.testing.assert_allclose(curriculum._sample_distribution(), 1 / 3)  # nothing is active: uniform
    p = play(curriculum, [(0, 1.0), (0, 0.0), (0, 1.0), (0, 0.0), (1, 0.99), (1, 0)])
    np.testing.assert_allclose([curriculum._p_fast[0], curriculum._p_slow[0]], [0.05, 0.005])
    np.testing.assert_allclose(p, [0.75 + 0.25 / 3, 0.25 / 3, 0.25 / 3])  # .99 is no success


def test_online_progress_may_count_as_it_is():
    curriculum = OnlineLearningProgress(2, update_interval=3, continuous_progress=True)
    play(curriculum, [(0, 0.25), (0, 0.5), (1, True)])
    np.testing.assert_allclose(curriculum.task_rates, [0.375, 1])


def test_online_a_task_without_trial_keeps_its_means():
    curriculum = OnlineLearningProgress(3, update_interval=2)
    play(curriculum, [(0, 0.0), (1, 0.0), (0, 1.0), (1, 1.0)])
    before = curriculum._p_fast.copy(), curriculum._p_slow.copy(), curriculum._p_true.copy()
    play(curriculum, [(1, 1.0), (2, 1.0)])
    for old, name in zip(before, ("_p_fast", "_p_slow", "_p_true")):
        new = getattr(curriculum, name)
        assert new[0] == old[0] > 0 and new[1] > old[1]
    assert curriculum.random_baseline.tolist() == [0, 0, 0.75]  # of the first trial, however late
    assert curriculum._p_fast[2] == curriculum._p_slow[2] == 1


def test_online_save_last_counts_the_last_rate_once_more():
    curriculum = OnlineLearningProgress(2, update_interval=4, save_last=True)
    play(curriculum, [(0, 1.0), (0, 0.0), (0, 0.0), (0, 0.0)])
    play(curriculum, [(0, 1.0), (0, 1.0), (0, 1.0), (1, 1.0)])
    np.testing.assert_allclose(curriculum.task_rates, [3.25 / 4, 1])


def test_online_task_progress_is_a_trial_too_and_intervals_may_be_steps():
    curriculum = OnlineLearningProgress(2, update_interval_steps=20)
    curriculum.update_task_progress(0, 1.0)
    curriculum.update_task_progress(0, 0.0)
    play(curriculum, [(1, 0.0)])
    assert not curriculum._measured.any()
    play(curriculum, [(1, 0.0)])
    np.testing.assert_allclose(curriculum.task_rates, [0.5, 0])


def test_online_every_task_goes_on_being_drawn():
    """A task that has never succeeded is inactive; only the uniform share can find that it has become solvable."""
    curriculum = OnlineLearningProgress(10, update_interval=20, seed=0)
    solvable, counts = {0}, np.zeros(10)
    for i in range(2000):
        task = curriculum.sample()[0]
        counts[task] += 1
        solvable |= {9} if i >= 1000 else set()
        curriculum.update_on_episode(0.0, 5, task, float(task in solvable))
    assert counts.min() > 2000 * 0.025 / 2 and curriculum._p_true[9] > 0.5
    assert curriculum._sample_distribution()[9] > 0.2 > 0.1 > curriculum._sample_distribution()[5]


# ---- Learnability ----


def test_learnability_topk_and_dist():
    r, l = RATES, RATES * (1 - RATES)
    top = np.zeros(7)
    top[[3, 4, 2]] = 1 / 3  # .25, .2475, .21
    np.testing.assert_allclose(push(Learnability(None, 7, topk=3), r), top)
    np.testing.assert_allclose(push(Learnability(None, 7, topk=3, learnable_prob=0.6), r), 0.6 * top + 0.4 / 7)
    np.testing.assert_allclose(push(Learnability(None, 7), r), 1 / 7)  # topk=1000
    np.testing.assert_allclose(push(Learnability(None, 7, sampling="dist"), torch.tensor(r)), l / l.sum())
    np.testing.assert_allclose(push(Learnability(None, 2, sampling="dist"), [0, 1]), 0.5)
    curriculum = Learnability(None, 2, sampling="dist", normalize_success=True)
    push(curriculum, [0.5, 0.0])
    np.testing.assert_allclose(push(curriculum, [0.6, 0.2]), np.array([0.16, 0.16]) / 0.32)  # .1/.5 = .2
    many = push(Learnability(None, 1000, topk=5), np.resize([0.1, 0.5], 1000))
    assert np.flatnonzero(many).tolist() == [1, 3, 5, 7, 9]  # of equal ones the first


def test_learnability_evaluates_by_itself():
    evaluator = Evaluator([[0.5, 1.0], [0.0, 0.5]])
    curriculum = Learnability(evaluator, 2, topk=1, eval_interval=2)
    assert curriculum.sample(3) == [0, 0, 0]
    play(curriculum, [(0, 0.0)] * 2)
    assert curriculum.sample(3) == [1, 1, 1]


# ---- OMNI ----


def omni_by_hand(lp_distribution, rates, interesting):
    weights, visited = dict.fromkeys(range(len(rates)), None), sorted(range(len(rates)), key=lambda i: (-rates[i], i))
    for done in visited:
        if weights[done] is None:
            weights[done] = 1.0
            for task, weight in weights.items():
                if weight is None and not interesting(done, task):
                    weights[task] = 0.001
    p = lp_distribution * np.array([weights[i] for i in range(len(rates))])
    return p / p.sum()


def test_omni_against_the_walk_by_hand():
    rng = np.random.default_rng(0)
    for _ in range(20):
        table = rng.random((6, 6)) < 0.6
        omni = OMNI(None, 6, interestingness=lambda done, task, table=table: table[done, task])
        plain = LearningProgress(None, 6)
        for _ in range(4):
            rates = rng.integers(5, size=6) / 4
            expect = omni_by_hand(push(plain, rates), rates, lambda done, task, table=table: table[done, task])
            np.testing.assert_allclose(push(omni, rates), expect, rtol=1e-12)
            np.testing.assert_array_equal(omni._sample_distribution(), omni._sample_distribution())  # the mask stays


def test_omni_by_hand_with_named_tasks_and_a_table():
    """walk is mastered, so crawl bores; sprint does not; the table says nothing of stand, which therefore bores."""
    space = TaskSpace(["walk", "crawl", "sprint", "stand"])
    table = {"walk": {"crawl": False, "sprint": True}, "sprint": {"walk": True}}
    asked = []

    def interesting(done, task):
        asked.append((done, task))
        return table.get(done, {}).get(task, False)

    for curriculum in (OMNI(None, space, interestingness=table), OMNI(None, space, interestingness=interesting)):
        push(curriculum, [0.5, 0.1, 0.1, 0.1])
        p = push(curriculum, [0.9, 0.2, 0.2, 0.2])
        assert curriculum._boring.tolist() == [False, True, False, True]
        assert p[1] == p[3] == pytest.approx(p[2] / 1000)
    assert len(asked) == 2 * 3 and set(asked) == {("walk", name) for name in ("crawl", "sprint", "stand")}
    np.testing.assert_array_equal(push(OMNI(None, 4), EXAMPLE[0]), push(LearningProgress(None, 4), EXAMPLE[0]))


# ---- State, figures, bad input ----

CURRICULA = {
    "lp": lambda seed: LearningProgress(Evaluator(EXAMPLE * 50), 4, eval_interval=3, seed=seed),
    "online": lambda seed: OnlineLearningProgress(4, update_interval=7, seed=seed),
    "save_last": lambda seed: OnlineLearningProgress(4, update_interval_steps=70, save_last=True, seed=seed),
    "topk": lambda seed: Learnability(Evaluator(EXAMPLE * 50), 4, topk=2, eval_interval=3, seed=seed),
    "omni": lambda seed: OMNI(
        Evaluator(EXAMPLE * 50), 4, interestingness=lambda i, j: (i + j) % 2, eval_interval=3, seed=seed
    ),
}


def run(curriculum, steps):
    drawn = []
    for i in range(steps):
        drawn += curriculum.sample(2)
        curriculum.update_on_episode(1.0, 10, drawn[-1], float(i % 3 == 0), env_id=0)
    return drawn


@pytest.mark.parametrize("make", CURRICULA.values(), ids=CURRICULA)
def test_restored_draws_are_the_same(make, tmp_path):
    state = np.random.get_state()[1].copy(), torch.get_rng_state()
    curriculum, again, restored = make(5), make(5), make(6)
    assert run(curriculum, 40) == run(again, 40)
    torch.save(curriculum.state_dict(), tmp_path / "state.pt")
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    if hasattr(restored.evaluator, "rates"):
        restored.evaluator.rates = curriculum.evaluator.rates.copy()
    assert restored.metrics() == curriculum.metrics()
    assert run(restored, 60) == run(curriculum, 60) != run(make(6), 60)
    saved = curriculum.state_dict()
    curriculum.eval_and_update()
    assert any(not np.array_equal(saved[n], curriculum.state_dict()[n]) for n in curriculum.ARRAYS)  # copies
    assert np.array_equal(np.random.get_state()[1], state[0]) and torch.equal(torch.get_rng_state(), state[1])
    with pytest.raises(ValueError, match="has shape"):
        OnlineLearningProgress(5, update_interval=1).load_state_dict(
            OnlineLearningProgress(4, update_interval=1).state_dict()
        )


def test_omni_restores_what_the_model_said():
    answers = iter([True, False, True] + [False] * 9)
    omni, other = (OMNI(None, 4, interestingness=lambda done, task: next(answers)) for _ in range(2))
    push(omni, EXAMPLE[0])
    other.load_state_dict(omni.state_dict())
    np.testing.assert_array_equal(other._sample_distribution(), omni._sample_distribution())
    assert len(list(answers)) > 0  # not asked at the restore


def test_metrics():
    curriculum = OMNI(None, 4, interestingness=lambda done, task: False)
    for rates in EXAMPLE:
        p = push(curriculum, rates)
    metrics = curriculum.metrics()
    expect = {"tasks_measured": 4, "success_rate_mean": 0.55, "tasks_boring": 3, "learning_progress_max": 0.292078}
    assert {name: metrics[name] for name in expect} == pytest.approx(expect, abs=1e-6)
    assert metrics["sampling_entropy"] == pytest.approx(-(p * np.log(p)).sum())
    assert LearningProgress(None, 2).metrics()["tasks_measured"] == 0
    learnability = Learnability(None, 2)
    push(learnability, [0.5, 1])
    assert learnability.metrics()["learnability_mean"] == 0.125
    assert all(type(value) is float for value in metrics.values())


@pytest.mark.parametrize(
    "make,named",
    [
        (lambda: LearningProgress(None, TaskSpace(Box(0, 1, (2,)))), "finite"),
        (lambda: LearningProgress(None, 0), "at least 1"),
        (lambda: LearningProgress(3, 4), "evaluator=3"),
        (lambda: LearningProgress(None, 4, ema_alpha=1), r"ema_alpha=1.*\(0, 1\)"),
        (lambda: LearningProgress(None, 4, p_theta=0), r"p_theta=0.*\(0, 1\)"),
        (lambda: LearningProgress(None, 4, p_theta=NAN), "p_theta=nan"),
        (lambda: LearningProgress(None, 4, eval_interval=0), "eval_interval=0"),
        (lambda: LearningProgress(None, 4, eval_interval=1, eval_interval_steps=1), "one of them"),
        (lambda: LearningProgress(None, 4, eval_eps=0), "eval_eps=0"),
        (lambda: OnlineLearningProgress(4), "update_interval=None"),
        (lambda: OnlineLearningProgress(4, update_interval=1, uniform_prob=1.5), "uniform_prob=1.5"),
        (lambda: Learnability(None, 4, topk=0), "topk=0"),
        (lambda: Learnability(None, 4, learnable_prob=-1), "learnable_prob=-1"),
        (lambda: Learnability(None, 4, sampling="best"), "'topk' or 'dist'"),
        (lambda: OMNI(None, 4, interestingness="crafter.json"), "interestingness='crafter.json'"),
        (lambda: push(LearningProgress(None, 4), [0.5] * 3), r"shape \(3,\).*\(4,\)"),
        (lambda: push(LearningProgress(None, 4), [0.5, 0, 1.25, 0]), r"task 2 is 1.25.*\[0, 1\]"),
        (lambda: push(Learnability(None, 2), [0.5, NAN]), "task 1 is nan"),
        (lambda: LearningProgress(lambda: [-0.1], 1).sample(), r"task 0 is -0.1"),
        *[
            (
                lambda p=p: OnlineLearningProgress(4, update_interval=9).update_on_episode(0, 1, 2, p),
                rf"task 2 has progress {p}.*\[0, 1\]",
            )
            for p in (-0.01, 1.01, NAN)
        ],
        (lambda: OnlineLearningProgress(4, update_interval=9).update_task_progress(4, 0.5), "task 4 is outside"),
        *[
            (lambda n=n: OnlineLearningProgress(4, update_interval=9).update_on_episode(0, n, 2, 0.5), f"length {n}")
            for n in (NAN, np.inf, -1)
        ],
        (lambda: LearningProgress(None, [0, 1]), r"task_space=\[0, 1\]: must be a number or a TaskSpace"),
        (lambda: LearningProgress(None, 4).load_state_dict({"rng": 0}), "does not fit the .*: it has no 'task_rates'"),
    ],
)
def test_bad_input_is_named(make, named):
    with pytest.raises(ValueError, match=named) as error:
        make()
    assert "\n" not in str(error.value)
