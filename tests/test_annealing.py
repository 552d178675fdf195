"""Simulated annealing, the expanding box, constant and manual curricula, batched domain randomization."""

import io

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from algos.ppo import pack
from curricula.annealing import ExpandingBox, SimulatedAnnealing
from curricula.core import TaskSpace
from curricula.domain_randomization import BatchedDomainRandomization, DomainRandomization
from curricula.manual import Constant, Manual

NAN = float("nan")
LINE = TaskSpace(Box(-1, 1, (2,)))
BOX = TaskSpace(Box(-0.3, 0.3, (2,)))


def through_a_file(state):
    file = io.BytesIO()
    torch.save(pack(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def play(curriculum, lengths, task=0, progress=0.0):
    for length in lengths:
        curriculum.update_on_episode(0.0, length, task, progress)


# ---- Simulated annealing ----


@pytest.mark.parametrize(
    "start,end,steps,table",
    [
        ([0.2], [0.8], 10, [[0.2 + 0.06 * i] for i in range(11)] + [[0.8]] * 3),
        ([-0.2], [-0.8], 10, [[-0.2 - 0.06 * i] for i in range(11)]),
        ([0.8], [0.2], [4], [[0.8], [0.65], [0.5], [0.35], [0.2], [0.2]]),
        ([0.0, 1.0], [1.0, 0.5], [2, 5], [[0, 1], [0.5, 0.9], [1, 0.8], [1, 0.7], [1, 0.6], [1, 0.5], [1, 0.5]]),
        ([0.5, 0.5], [0.5, -0.5], 4, [[0.5, 0.5], [0.5, 0.25], [0.5, 0], [0.5, -0.25], [0.5, -0.5]]),
    ],
)
def test_annealing_tables(start, end, steps, table):
    space = TaskSpace(Box(-1, 1, (len(start),)))
    curriculum = SimulatedAnnealing(space, start_values=start, end_values=end, total_steps=steps)
    for row in table:
        for task in curriculum.sample(2):
            np.testing.assert_allclose(task, row, atol=1e-6)
            assert space.contains(task) and task.dtype == np.float32
        play(curriculum, [1])


def test_annealing_counts_steps_of_finished_episodes_and_lends_no_memory():
    curriculum = SimulatedAnnealing(LINE, [0, 0], [1, -1], 1000)
    first, second = curriculum.sample(2)
    first[:] = 7
    assert second.tolist() == [0, 0] == curriculum.sample()[0].tolist()
    play(curriculum, [100, 150])
    np.testing.assert_allclose(curriculum.sample()[0], [0.25, -0.25])
    assert curriculum.metrics() == {"annealed": 0.25}
    play(curriculum, [10**9])
    np.testing.assert_array_equal(curriculum.sample()[0], [1, -1])
    restored = SimulatedAnnealing(LINE, [0, 0], [1, -1], 1000)
    restored.load_state_dict(curriculum.state_dict())
    np.testing.assert_array_equal(restored.sample()[0], [1, -1])


def test_annealing_never_leaves_the_box():
    space = TaskSpace(Box(-0.7, 0.4, (1,), np.float64))
    curriculum = SimulatedAnnealing(space, [-0.7], [0.4], 7)
    assert -0.7 + (0.4 - -0.7) > 0.4
    for _ in range(9):
        assert space.contains(curriculum.sample()[0])
        play(curriculum, [1])
    whole = SimulatedAnnealing(TaskSpace(Box(0, 5, (1,), np.int64)), [0], [5], 10)
    tasks = []
    for _ in range(11):
        tasks += whole.sample()
        play(whole, [1])
    assert np.array(tasks).ravel().tolist() == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5]  # halves to the even


# ---- Expanding box ----


def test_expanding_box_grows_by_successes_in_a_row():
    curriculum = ExpandingBox(BOX, steps=3, success_threshold=0.75, required_successes=4)
    widths = []
    for progress in [1, 1, 1, 0.75] + [0.76] * 3 + [0.76] + [1] * 4 + [0] * 20 + [1] * 9:
        play(curriculum, [5], curriculum.sample()[0], progress)
        widths.append(round(float(np.diff(curriculum.sample()[0])[0]) / 0.2, 3))
    assert widths == [1] * 7 + [2] * 4 + [3] * 30  # .75 is not above the threshold; full width stays
    np.testing.assert_array_equal(curriculum.sample()[0], np.array([-0.3, 0.3], np.float32))
    assert BOX.contains(curriculum.sample()[0])


def test_expanding_box_counts_both_kinds_of_reports_and_no_late_episode():
    curriculum = ExpandingBox(BOX, steps=5, required_successes=2)
    narrow = curriculum.sample()[0]
    np.testing.assert_allclose(narrow, [-0.06, 0.06], atol=1e-7)
    curriculum.update_task_progress(narrow, 1.0)
    play(curriculum, [5], narrow, 1.0)
    wide = curriculum.sample()[0]
    np.testing.assert_allclose(wide, [-0.12, 0.12], atol=1e-7)
    play(curriculum, [5] * 50, narrow, 1.0)  # of environments that were still at it
    play(curriculum, [5], wide, 1.0)
    play(curriculum, [5] * 50, narrow, 0.0)
    np.testing.assert_array_equal(curriculum.sample()[0], wide)
    assert curriculum.metrics()["successes"] == 1
    restored = ExpandingBox(BOX, steps=5, required_successes=2)
    restored.load_state_dict(curriculum.state_dict())
    play(restored, [5], wide, 1.0)
    np.testing.assert_allclose(restored.sample()[0], [-0.18, 0.18], atol=1e-7)


def test_expanding_box_around_an_uneven_middle():
    space = TaskSpace(Box(np.array([1.0, 2.0]), np.array([4.0, 5.0]), dtype=np.float64))
    curriculum = ExpandingBox(space, 2, 0.5, 1)
    np.testing.assert_allclose(curriculum.sample()[0], [2, 4])  # from 1 to 5: the middle is 3
    play(curriculum, [1], curriculum.sample()[0], 1)
    assert curriculum.sample()[0].tolist() == [1, 5]
    assert curriculum.metrics() == {"range_min": 1, "range_max": 5, "successes": 0}


# ---- Constant and manual ----


def test_constant():
    space = TaskSpace(["walk", "run", "jump"])
    curriculum = Constant("run", space)
    assert curriculum.sample(3) == [1, 1, 1] and not curriculum.requires_step_updates
    assert curriculum._sample_distribution().tolist() == [0, 1, 0]
    assert Constant("run", space, True).requires_step_updates and Constant(4, 7).sample() == [4]
    grid, box = Constant((2, 1), TaskSpace(MultiDiscrete([3, 2]))), Constant([0.1, 0.2], LINE)
    assert grid.sample()[0].tolist() == [2, 1]
    assert grid._sample_distribution().tolist() == [0, 0, 0, 0, 0, 1]
    box.sample()[0][:] = 9
    np.testing.assert_array_equal(box.sample()[0], np.array([0.1, 0.2], np.float32))


def test_manual_is_first_in_first_out_and_says_when_it_is_empty(capsys):
    curriculum = Manual(TaskSpace(["walk", "run", "jump"]))
    curriculum.add_tasks(["jump", "walk"])
    curriculum.add_tasks(("run",))
    with pytest.raises(ValueError, match="cannot encode 'fly'"):
        curriculum.add_tasks(["jump", "fly"])  # neither of them
    assert curriculum.metrics() == {"tasks_queued": 3.0}
    restored = Manual(TaskSpace(["walk", "run", "jump"]))
    state = curriculum.state_dict()
    assert curriculum.sample(3) == [2, 0, 1]
    for each in (curriculum, restored):
        each.load_state_dict(state)
        assert each.sample() == [2]
        with pytest.raises(ValueError, match=r"3 tasks wanted, 2 queued: add_tasks"):
            each.sample(3)
        assert each.sample(2) == [0, 1]
        with pytest.raises(ValueError, match="0 queued"):
            each.sample()
    assert capsys.readouterr().out == ""


# ---- Domain randomization ----


def test_domain_randomization_gives_each_of_two_tasks_its_share():
    """CUR-10."""
    curriculum = DomainRandomization(2, seed=0)
    counts = np.bincount([curriculum.sample()[0] for _ in range(1000)])
    assert counts.min() >= 450


def test_batched_one_task_for_all_until_the_batch_is_played():
    curriculum = BatchedDomainRandomization(100, 1000, warmup_batches=0, seed=1)
    task = curriculum.sample()[0]
    play(curriculum, [60])
    assert curriculum.sample(64) == [task] * 64
    assert np.flatnonzero(curriculum._sample_distribution()).tolist() == [task]
    play(curriculum, [39])
    assert curriculum.sample(2) == [task] * 2
    play(curriculum, [1])
    np.testing.assert_allclose(curriculum._sample_distribution(), 1 / 1000)
    second = curriculum.sample()[0]
    assert second != task
    play(curriculum, [350])  # a long episode: it does not owe three more tasks
    third = curriculum.sample()[0]
    play(curriculum, [49])
    assert curriculum.sample(5) == [third] * 5 and curriculum.metrics() == {"batches": 4.0}


def test_batched_warm_up_draws_each_task_anew():
    curriculum = BatchedDomainRandomization(10, 1000, warmup_batches=2, seed=0)
    for batch in range(4):
        for _ in range(2):
            different = len(set(curriculum.sample(20)))
            assert different > 15 if batch < 2 else different == 1
            play(curriculum, [5])


def test_batched_tasks_are_uniform_over_batches():
    curriculum = BatchedDomainRandomization(1, 4, 0, seed=0)
    counts = np.zeros(4)
    for _ in range(4000):
        counts[curriculum.sample()[0]] += 1
        play(curriculum, [1])
    np.testing.assert_allclose(counts, 1000, atol=120)


@pytest.mark.parametrize(
    "space", [7, TaskSpace(["a", "b", "c"]), LINE, TaskSpace(Dict(x=Box(0, 1, (2,)), n=Discrete(3)))]
)
def test_batched_restored_draws_are_the_same(space):
    curriculum, restored = (BatchedDomainRandomization(20, space, 2, seed=seed) for seed in (1, 2))

    def run(curriculum):
        tasks = []
        for _ in range(20):
            tasks += map(repr, curriculum.sample(2))
            play(curriculum, [7])
        return tasks

    for saved in (lambda state: state, through_a_file):
        run(curriculum)
        play(curriculum, [7])  # within a batch
        curriculum.sample()
        restored.load_state_dict(saved(curriculum.state_dict()))
        assert run(restored) == run(curriculum)


@pytest.mark.parametrize(
    "space,tasks",
    [
        (["walk", ("run", 2)], [("run", 2), "walk"]),
        (MultiDiscrete([3, 2]), [(2, 1), (0, 0)]),
        (Box(-1, 1, (2,), np.float32), [np.array([0.1, 1 / 3], np.float32)]),
        (Tuple([Discrete(3), Box(0, 1, (2,)), Tuple([Discrete(2)])]), [(1, np.ones(2, np.float32), (0,))]),
        (Dict(n=Discrete(3, start=-1), x=Box(-9, 9, (1,), int)), [{"n": -1, "x": np.array([3])}]),
    ],
)
def test_queued_tasks_come_back_from_a_file_as_they_were(space, tasks):
    curriculum, restored = Manual(space), Manual(space)
    curriculum.add_tasks(tasks)
    restored.load_state_dict(through_a_file(curriculum.state_dict()))
    drawn, again = curriculum.sample(len(tasks)), restored.sample(len(tasks))
    assert repr(drawn) == repr(again) and all(map(curriculum.task_space.contains, again))


@pytest.mark.parametrize(
    "make",
    [
        lambda: SimulatedAnnealing(LINE, [0, 0], [1, 1], 5),
        lambda: ExpandingBox(BOX),
        lambda: BatchedDomainRandomization(5, 3, 0),
        lambda: Manual(3),
        lambda: Constant(1, 3),
    ],
)
def test_states_hold_python_numbers_and_another_curriculums_state_is_named(make):
    curriculum = make()
    if not isinstance(curriculum, Manual):
        task = curriculum.sample()[0]
        curriculum.update_on_episode(np.float32(1), np.int64(3), task, np.float32(0.5))
    state = curriculum.state_dict()
    assert not any(isinstance(value, np.generic) for value in state.values())
    for name in state:
        missing = {key: value for key, value in state.items() if key != name}
        for wrong, why in ((missing, f"it has no '{name}'"), (state | {name: object()}, "")):
            text = rf"this state does not fit the {type(curriculum).__name__}: {why}"
            with pytest.raises(ValueError, match=text):
                curriculum.load_state_dict(wrong)
    with pytest.raises(ValueError, match="this state does not fit"):
        curriculum.load_state_dict(None)


@pytest.mark.parametrize(
    "make,named",
    [
        (lambda: SimulatedAnnealing(TaskSpace(3), [0], [1], 5), "needs the task space of a Box"),
        (lambda: SimulatedAnnealing(LINE, [0], [1, 1], 5), r"start_values=\[0\] has shape \(1,\): must be \(2,\)"),
        (lambda: SimulatedAnnealing(LINE, [0, 0], [1, 1, 1], 5), r"end_values.*\(3,\)"),
        (lambda: SimulatedAnnealing(LINE, [0, 0], [1, 1.5], 5), r"cannot encode \[1, 1.5\]"),
        (lambda: SimulatedAnnealing(LINE, [0, NAN], [1, 1], 5), "nan"),
        (lambda: SimulatedAnnealing(LINE, [0, 0], [1, 1], 0), "total_steps=0: must be above 0"),
        (lambda: SimulatedAnnealing(LINE, [0, 0], [1, 1], [5, -1]), r"total_steps=\[5, -1\]"),
        (lambda: SimulatedAnnealing(LINE, [0, 0], [1, 1], NAN), "total_steps=nan"),
        (lambda: SimulatedAnnealing(LINE, [0, 0], [1, 1], [5, 5, 5]), r"total_steps.*\(3,\)"),
        (lambda: ExpandingBox(TaskSpace(3)), "needs the task space of a Box"),
        (lambda: ExpandingBox(TaskSpace(Box(0, 1, ()))), "2 floats"),
        (lambda: ExpandingBox(TaskSpace(Box(0, 1, (3,)))), "2 floats"),
        (lambda: ExpandingBox(TaskSpace(Box(-np.inf, 1, (2,)))), "bounded"),
        (lambda: ExpandingBox(BOX, steps=0), "steps=0"),
        (lambda: ExpandingBox(BOX, success_threshold=1), "success_threshold=1"),
        (lambda: ExpandingBox(BOX, required_successes=0), "required_successes=0"),
        (lambda: ExpandingBox(BOX).update_on_episode(0, 1, [0, 0.1], NAN), r"progress nan: must be in \[0, 1\]"),
        (lambda: ExpandingBox(BOX).update_task_progress([0, 0.1], -1), "progress -1"),
        (lambda: ExpandingBox(BOX).update_task_progress([0, 0.5], 1), r"cannot decode \[0, 0.5\]"),
        *[
            (
                lambda make=make, n=n: make().update_on_episode(0, n, make().sample()[0], 0.0),
                rf"has length {n}: must be",
            )
            for make in (
                lambda: SimulatedAnnealing(LINE, [0, 0], [1, 1], 5),
                lambda: BatchedDomainRandomization(5, 3),
            )
            for n in (NAN, np.inf, -1, 1.5, None)
        ],
        (lambda: BatchedDomainRandomization(NAN, 3), "batch_size=nan"),
        (lambda: BatchedDomainRandomization(5, 3, NAN), "warmup_batches=nan"),
        (lambda: BatchedDomainRandomization(5, None), "found None"),
        (lambda: DomainRandomization(TaskSpace(Box(0, np.inf))), "no uniform distribution: give it finite bounds"),
        *[(lambda s=s: DomainRandomization(s), "must be a number or a TaskSpace") for s in ([0, 1], None, 2.5)],
        (lambda: ExpandingBox(BOX).update_task_progress([0, 0.1], None), "progress None"),
        (lambda: ExpandingBox(BOX).update_task_progress([0, 0.1], "half"), "progress 'half'"),
        (lambda: Constant("fly", TaskSpace(["walk"])), "cannot encode 'fly'"),
        (lambda: Constant(3, 3), "cannot encode 3"),
        (lambda: Constant([0.1, 0.1], LINE)._sample_distribution(), "no position"),
        (lambda: Manual(0), "found 0"),
        (lambda: BatchedDomainRandomization(0, 3), "batch_size=0"),
        (lambda: BatchedDomainRandomization(5, 3, -1), "warmup_batches=-1"),
        (lambda: BatchedDomainRandomization(5, LINE)._sample_distribution(), "infinite"),
    ],
)
def test_bad_input_is_named(make, named):
    with pytest.raises(ValueError, match=named) as error:
        make()
    assert "\n" not in str(error.value)
