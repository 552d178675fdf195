"""Stages: the grammar of stopping conditions, what counts for which stage, and encodings."""

import numpy as np
import pytest
from gymnasium.spaces import Box, MultiDiscrete
from test_annealing import through_a_file

from curricula.core import Curriculum, TaskSpace
from curricula.domain_randomization import DomainRandomization
from curricula.learning_progress import OnlineLearningProgress
from curricula.manual import Constant, Manual
from curricula.plr import PrioritizedLevelReplay
from curricula.sequential import MEMORY, SequentialCurriculum, parse_condition

NAMES = TaskSpace(["score", "eat", "descend", "gold", "scout"])
NAN = float("nan")


class Recorder(Curriculum):
    """Draws its tasks in turn and writes down all that it hears."""

    def __init__(self, task_space, requires_step_updates=False):
        super().__init__(task_space)
        self.requires_step_updates, self.heard, self.drawn = requires_step_updates, [], 0

    def sample(self, k=1):
        self.drawn += k
        return [self._encoding(i % self.num_tasks) for i in range(self.drawn - k, self.drawn)]

    def update_task_progress(self, task, progress, env_id=None):
        self.heard.append(("progress", task, progress, env_id))

    def update_on_step_batch(self, steps, env_id=None):
        self.heard += [("step", step[0], step[2], env_id) for step in steps]

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        self.heard.append(("episode", task, episode_return, env_id))

    def update_on_demand(self, metrics):
        self.heard.append(metrics)


def stages(conditions, n=None, **options):
    """n stages that draw the tasks 0, 1, ... of one space."""
    n = n or len(conditions) + 1
    return SequentialCurriculum(list(range(n)), conditions, n, **options)


def play(curriculum, episodes, env_id=None):
    """Draws and ends one episode after the other, each (return, length); the stages after each."""
    after = []
    for episode_return, length in episodes:
        curriculum.update_on_episode(episode_return, length, curriculum.sample()[0], 0.0, env_id)
        after.append(int(curriculum.metrics()["stage"]))
    return after


# ---- Conditions ----


@pytest.mark.parametrize(
    "condition,first",  # the number of episodes, of 10 steps and returns 0, 1, 2, ..., after which it first holds
    [
        ("steps<100", 1),
        ("steps<=10", 1),
        ("steps>30", 4),
        ("steps>=30", 3),
        ("steps=30", 3),
        ("steps=35", 4),  # jumped over
        ("steps>=3e1", 3),
        ("episodes>=5", 5),
        ("episodes>5", 6),
        ("episodes=5", 5),
        ("total_steps>=45", 5),
        ("total_episodes=2", 2),
        ("episode_return>=2.5", 5),  # means of 4, from the 4th on: 1.5, 2.5, 3.5, ...
        ("episode_return>2.5", 6),
        ("episode_return<2", 4),
        ("episode_return<=-1", None),
        ("episode_return=3.25", 6),  # jumped over
        ("episode_return=1.5", 4),
        ("episode_return=1.25", None),  # never reached from above
        ("episodes>5&steps=10", 6),
        ("steps>=80&episodes>=3|episodes>=6", 6),
        ("episodes>=6|steps>=80&episodes>=3", 6),
        ("episodes>=9|steps>=80&episodes>=3", 8),
        ("steps>=20 | episodes >= 9", 2),
        ("steps>-1e3&steps>=.5e2", 5),
        ("steps<0", None),
        (lambda: len(CALLS) >= 3 or CALLS.append(0), 4),
    ],
)
def test_conditions(condition, first):
    CALLS.clear()
    curriculum, after = stages([condition], return_buffer_size=4), []
    for i in range(12):
        curriculum.update_on_episode(i, 10, 0, 0.0)
        after.append(int(curriculum.metrics()["stage"]))
    assert after == [0 if first is None or i + 1 < first else 1 for i in range(12)]


CALLS = []


def test_conditions_on_tasks_are_met_between_the_draws_of_one_call():
    assert stages(["tasks=3"]).sample(8) == [0] * 3 + [1] * 5
    assert stages(["tasks>3", "total_tasks>=6", "tasks>=1"]).sample(8) == [0] * 4 + [1] * 2 + [2] + [3]


def test_totals_go_on_where_a_stage_counts_anew():
    curriculum = stages(["episodes>=2", "episodes>=2", "total_episodes>=6", "total_steps=10"])
    assert play(curriculum, [(0, 5)] * 8) == [0, 1, 1, 2, 2, 3, 4, 4]  # 10 steps in all were passed long ago


@pytest.mark.parametrize(
    "condition,token",
    [
        ("", "''"),
        ("stepz>=10", "'stepz'.*one of steps, episodes, tasks"),
        ("steps", "'steps'"),
        ("steps>=", "''.*a finite number"),
        (">=10", "''.*one of steps"),
        ("steps=>10", "'>10'"),
        ("steps==10", "'=10'"),
        ("steps!=10", "'steps!'"),
        ("steps>=1O", "'1O'"),
        ("steps>=10|", "''"),
        ("steps>=10&&episodes>=2", "''"),
        ("steps>=10 and episodes>=2", "'10 and episodes>=2'"),
        ("(steps>=10)", r"'\(steps'"),
        ("steps>=nan", "'nan'"),
        ("steps>=1e999", "'1e999'"),
        ("steps>=1_000", "'1_000'"),
        ("Steps>=10", "'Steps'"),
        (10, "10.*text or a callable"),
        (None, "None"),
    ],
)
def test_a_condition_that_does_not_parse_names_the_token(condition, token):
    with pytest.raises(ValueError, match=f"stopping condition.*found {token}") as error:
        stages(["steps>=1", condition])
    assert repr(condition) in str(error.value) and "\n" not in str(error.value)


def test_grammar():
    assert parse_condition("steps>=10 & tasks<2|episode_return=-.5") == [
        [("steps", ">=", 10.0), ("tasks", "<", 2.0)],
        [("episode_return", "=", -0.5)],
    ]


def test_one_lucky_episode_is_no_mean():
    """CUR-09."""
    curriculum = stages(["episode_return>=.8", "episode_return>=.8"], return_buffer_size=20)
    assert play(curriculum, [(i % 2, 10) for i in range(1, 200)]) == [0] * 199
    assert play(curriculum, [(1, 10)] * 20) == [0] * 10 + [1] * 10  # from 16 ones of 20 on
    assert play(curriculum, [(1, 10)] * 11) == [1] * 10 + [2]  # 9 + 11: the window was emptied, and keeps its size


def test_a_mean_is_reached_from_where_its_own_stage_began():
    curriculum = stages(["episode_return=1", "episode_return=2"], return_buffer_size=1)
    assert play(curriculum, [(1, 5), (3, 5), (2.5, 5), (1.5, 5)]) == [1, 1, 1, 2]


def test_a_mean_is_exact():
    assert sum([0.8] * 12) / 12 < 0.8  # what a plain sum makes of it
    assert play(stages(["episode_return>=.8"], return_buffer_size=12), [(0.8, 5)] * 12)[-1] == 1


# ---- Entries, encodings, forwarding ----


def test_entries():
    subspace, own = TaskSpace(["gold", "eat"]), Recorder(TaskSpace(["scout"]))
    entries = ["score", ["eat", "gold"], subspace, own, NAMES]
    curriculum = SequentialCurriculum(entries, ["tasks>=50"] * 4, NAMES, seed=0)
    kinds = [type(c) for c in curriculum.curriculum_list]
    assert kinds == [Constant, DomainRandomization, DomainRandomization, Recorder, DomainRandomization]
    drawn = [sorted(set(curriculum.sample(50))) for _ in range(5)]
    assert drawn == [[0], [1, 3], [1, 3], [4], [0, 1, 2, 3, 4]]
    assert curriculum.curriculum_list[3] is own is not curriculum.current_curriculum


def test_classes_are_tasks_though_they_can_be_called():  # as NLE's
    space = TaskSpace([int, float, str])
    curriculum = SequentialCurriculum([float, [str, int]], ["tasks>=2"], space, seed=0)
    assert curriculum.sample(2) == [1, 1] and set(curriculum.sample(20)) == {0, 2}


def test_a_stage_hears_its_own_encodings_and_only_its_own_tasks():
    first, second = Recorder(TaskSpace(["gold", "eat"])), Recorder(TaskSpace(["scout", "descend"]), True)
    curriculum = SequentialCurriculum([first, second], ["episodes>=2"], NAMES)
    assert curriculum.requires_step_updates and curriculum.sample(3) == [3, 1, 3]

    curriculum.update_on_step(1, None, 0.5, False, False, {}, 0.0, env_id=1)  # the first asks for no steps
    curriculum.update_on_episode(7.0, 10, 3, 1.0, env_id=0)
    curriculum.update_on_episode(8.0, 10, 1, 0.0, env_id=1)
    assert first.heard == [("episode", 0, 7.0, 0), ("episode", 1, 8.0, 1)]

    assert curriculum.sample(2) == [4, 2]
    steps = [(3, None, r, False, False, {}, 0.0) for r in (0.1, 0.2)]
    curriculum.update_on_step_batch(steps, env_id=2)  # late
    curriculum.update_on_step_batch([(2, *step[1:]) for step in steps], env_id=1)
    curriculum.update_on_step(4, None, 0.3, False, False, {}, 0.0, env_id=0)
    curriculum.update_on_episode(9.0, 10, 3, 0.0, env_id=2)  # late
    curriculum.update_task_progress(2, 0.5, env_id=1)
    curriculum.update_on_episode(3.0, 10, 4, 0.0, env_id=0)
    curriculum.update_on_demand({"loss": 1})
    assert len(first.heard) == 2
    assert second.heard == [
        ("step", 1, 0.1, 1),
        ("step", 1, 0.2, 1),
        ("step", 0, 0.3, 0),
        ("progress", 1, 0.5, 1),
        ("episode", 0, 3.0, 0),
        {"loss": 1},
    ]
    metrics = curriculum.metrics()
    assert metrics["stage"] == metrics["stage_episodes"] == 1 and metrics["stage_return_mean"] == 3
    assert curriculum._counts["total_episodes"] == 4 and curriculum._counts["total_steps"] == 40
    with pytest.raises(ValueError, match="17"):
        curriculum.update_on_episode(0.0, 1, 17, 0.0)


def test_real_curricula_learn_within_a_stage():
    """Online learning progress over 3 of 5 tasks, then PLR over other numbers of the same."""
    online = OnlineLearningProgress(TaskSpace(["scout", "gold", "eat"]), update_interval=10)
    plr = PrioritizedLevelReplay(TaskSpace(["descend", "scout"]), seed=1)
    curriculum = SequentialCurriculum([online, plr], ["episodes>=40"], NAMES, seed=0)
    for i in range(40):
        task = curriculum.sample()[0]
        assert task in (4, 3, 1)
        curriculum.update_on_episode(0.0, 5, task, float(task == 3 and i >= 20), env_id=0)
    assert online.task_rates[1] > 0 == online.task_rates[0] == online.task_rates[2]
    assert curriculum.current_curriculum is plr
    np.testing.assert_allclose(curriculum._sample_distribution(), [0, 0, 0.5, 0, 0.5])
    assert set(curriculum.sample(50)) == {2, 4}


def test_boxes_and_vectors():
    space = TaskSpace(Box(-1, 1, (2,)))
    corners = Recorder(TaskSpace([np.array([0.1, 0.2]), np.array([0.3, 0.4])]))  # float64, not exact in the Box
    inner = Recorder(TaskSpace([np.array([0.5, 0.5])]))
    curriculum = SequentialCurriculum([corners, TaskSpace(Box(0, 0.1, (2,))), inner], ["episodes>=2"] * 2, space)
    tasks = curriculum.sample(2)
    np.testing.assert_array_equal(tasks, np.array([[0.1, 0.2], [0.3, 0.4]], np.float32))
    for env_id, task in enumerate(tasks):
        curriculum.update_on_episode(1.0, 5, task, 0.0, env_id)
    assert [heard[1] for heard in corners.heard] == [0, 1]
    for env_id in range(2):
        task = curriculum.sample()[0]
        assert (task >= 0).all() and (task <= 0.1).all()
        curriculum.update_on_episode(1.0, 5, task, 0.0, env_id)
    assert curriculum.current_curriculum is inner


def test_multidiscrete():
    space = TaskSpace(MultiDiscrete([3, 2]))
    curriculum = SequentialCurriculum([(2, 1), [(0, 0), (1, 1)], space], ["episodes>=2"] * 2, space, seed=0)
    drawn = []
    for _ in range(6):
        drawn += curriculum.sample()
        curriculum.update_on_episode(0.0, 1, drawn[-1], 0.0, env_id=0)
    assert [task.tolist() for task in drawn[:2]] == [[2, 1]] * 2
    assert {tuple(task.tolist()) for task in drawn[2:4]} <= {(0, 0), (1, 1)}
    assert curriculum.metrics()["stage"] == 2 and space.contains(drawn[-1])


# ---- Late episodes ----


def test_late_episodes_do_not_count_though_all_stages_share_their_tasks():
    """8 environments, 2 tasks: at the switch 7 are playing for the old stage, while new draws are of the same tasks."""
    own = [Recorder(2), Recorder(2), Recorder(2)]
    curriculum = SequentialCurriculum(own, ["episodes>=1", "episodes>=8"], 2)
    tasks = curriculum.sample(8)
    for env_id in range(8):
        curriculum.update_on_episode(1.0, 10, tasks[env_id], 0.0, env_id)
        tasks[env_id] = curriculum.sample()[0]
        state, curriculum = curriculum.state_dict(), SequentialCurriculum(own, ["episodes>=1", "episodes>=8"], 2)
        curriculum.load_state_dict(state)  # a resumed run knows what is late
    metrics = curriculum.metrics()
    assert (metrics["stage"], metrics["stage_episodes"], metrics["stage_steps"]) == (1, 0, 0)
    assert len(own[0].heard) == 1 and not own[1].heard and "stage_return_mean" not in metrics
    for env_id in range(8):
        assert curriculum.metrics()["stage"] == 1
        curriculum.update_on_episode(1.0, 10, tasks[env_id], 0.0, env_id)
    assert curriculum.metrics()["stage"] == 2 and len(own[1].heard) == 8
    assert curriculum._counts["total_episodes"] == 16


def test_the_steps_of_a_late_episode_stay_out_to_its_end():
    own = [Recorder(1, True), Recorder(1, True)]
    curriculum = SequentialCurriculum(own, ["episodes>=1"], 1)
    curriculum.sample(2)
    step = (0, None, 1.0, False, False, {}, 0.0)
    for env_id in (1, 0):
        curriculum.update_on_step_batch([step], env_id)
    state, curriculum = curriculum.state_dict(), SequentialCurriculum(own, ["episodes>=1"], 1)
    curriculum.load_state_dict(state)
    curriculum.update_on_episode(0.0, 1, 0, 0.0, 0)
    curriculum.sample()
    curriculum.update_on_step_batch([step], 0)  # the new stage's
    curriculum.update_on_step_batch([step], 1)
    curriculum.update_on_episode(0.0, 2, 0, 0.0, 1)
    curriculum.update_on_episode(0.0, 1, 0, 0.0, 0)
    assert [heard[0] for heard in own[0].heard] == ["step", "step", "episode"]
    assert own[1].heard == [("step", 0, 1.0, 0), ("episode", 0, 0.0, 0)]


def test_a_lone_environment_plays_the_newest_draw_and_may_play_it_again():
    curriculum = SequentialCurriculum([3, 3], ["tasks>=100"], 3 + 1)
    curriculum.sample(100)  # to look at, never played
    assert curriculum.metrics()["stage"] == 1
    play(curriculum, [(1, 5)] * 4)
    curriculum.update_on_episode(1, 5, 3, 0.0)  # of an old draw: late
    assert curriculum.metrics()["stage_episodes"] == 4
    again = SequentialCurriculum([3, 2], ["episodes>=3"], 4)
    again.sample()
    for _ in range(3):
        again.update_on_episode(1, 5, 3, 0.0, env_id=0)  # drawn once, played three times
    assert again.metrics()["stage"] == 1


def test_stage_never_goes_back_with_environments_of_different_speed():
    """After a switch each environment ends at most the one episode that was under way; draws are of the new stage
    (CUR-08)."""
    rng = np.random.default_rng(0)
    entries = [[0, 1, 2], [2, 3, 4], [4, 5, 0]]
    curriculum = SequentialCurriculum(entries, ["episodes>=20", "steps>=300"], 6, seed=1)
    playing = [(*curriculum.sample(), 0) for _ in range(8)]
    counted = [0, 0, 0]
    for _ in range(400):
        env_id = int(rng.choice(8, p=np.arange(1, 9) / 36))
        task, begun = playing[env_id]
        before = int(curriculum.metrics()["stage"])
        counted[before] += begun == before
        curriculum.update_on_episode(0.0, int(rng.integers(1, 20)), task, 0.0, env_id)
        stage = int(curriculum.metrics()["stage"])
        assert before <= stage <= before + 1
        if stage == before:
            assert curriculum.metrics()["stage_episodes"] == pytest.approx(counted[stage], abs=8)
        playing[env_id] = (*curriculum.sample(), stage)
        assert playing[env_id][0] in entries[stage]
    assert stage == 2 and counted[0] == 20


def test_loop():
    curriculum = stages(["episodes>=2", "episodes>=1"], n=2, should_loop=True)
    drawn = []
    for _ in range(7):
        drawn += curriculum.sample()
        curriculum.update_on_episode(0.0, 1, drawn[-1], 0.0)
    assert drawn == [0, 0, 1, 0, 0, 1, 0] and curriculum.metrics()["stage"] == 4


# ---- State, bad input ----


def test_draws_that_nobody_plays_are_forgotten_in_the_end():
    curriculum = SequentialCurriculum([TaskSpace(Box(0, 1, (2,)))], [], TaskSpace(Box(0, 1, (2,))))
    for _ in range(MEMORY // 1000 + 5):
        curriculum.sample(1000)
    assert len(curriculum._unplayed) == MEMORY


def make(seed):
    space = TaskSpace(["a", "b", "c", "d", "e"])
    online = OnlineLearningProgress(TaskSpace(["c", "d", "b"]), update_interval=4, seed=seed)
    entries = ["a", online, ["a", "b"], space]
    conditions = ["episodes>=3", "steps>=150&tasks>3", "episode_return=.3|total_tasks>120"]
    return SequentialCurriculum(entries, conditions, space, return_buffer_size=5, seed=seed)


def run(curriculum, rng, playing, episodes):
    log = []
    for _ in range(episodes):
        env_id = int(rng.integers(3))
        curriculum.update_on_step(playing[env_id], None, 0.0, False, False, {}, 0.0, (env_id + 1) % 3)
        curriculum.update_on_episode(rng.random(), np.int64(10), playing[env_id], float(rng.random() < 0.5), env_id)
        playing[env_id] = curriculum.sample()[0]
        log.append((playing[env_id], curriculum.metrics()))
    return log


@pytest.mark.parametrize("episodes", [2, 10, 30, 60])
def test_restored_draws_are_the_same(episodes):
    curriculum, restored = make(3), make(4)
    rng, playing = np.random.default_rng(0), curriculum.sample(3)
    run(curriculum, rng, playing, episodes)
    state, twin = curriculum.state_dict(), playing.copy()
    log = run(curriculum, np.random.default_rng(1), playing, 60)
    assert not any(isinstance(value, np.generic) for value in state["counts"].values())
    for saved in (state, through_a_file(state)):  # which the run has not moved
        restored.load_state_dict(saved)
        assert run(restored, np.random.default_rng(1), twin.copy(), 60) == log
    assert log[-1][1]["stage"] == 3
    with pytest.raises(ValueError, match="4 stages does not fit 2"):
        stages(["steps>1"]).load_state_dict(state)


@pytest.mark.parametrize(
    "build,named",
    [
        (lambda: SequentialCurriculum([], [], 3), "0 stages with 0"),
        (lambda: SequentialCurriculum([0, 1], [], 3), "2 stages with 0 stopping conditions.*here 1"),
        (lambda: SequentialCurriculum([0, 1], ["steps>1"], 3, should_loop=True), "here 2"),
        (lambda: SequentialCurriculum([0, 1], ["steps>1"] * 2, 3), "here 1"),
        (lambda: SequentialCurriculum(["fly"], [], NAMES), "cannot encode 'fly'"),
        (lambda: SequentialCurriculum([["eat", "fly"]], [], NAMES), "cannot encode 'fly'"),
        (lambda: SequentialCurriculum([Recorder(6)], [], 5), "cannot encode 5"),
        (lambda: SequentialCurriculum([0], [], 3, return_buffer_size=0), "return_buffer_size=0"),
        (lambda: SequentialCurriculum([0], [], 0), "found 0"),
        *[(lambda n=n: SequentialCurriculum([0], [], 3, return_buffer_size=n), f"size={n}") for n in (2.5, NAN)],
        (lambda: stages(["steps>1"]).update_on_episode(NAN, 1, 0, 0.0), "episode_return=nan"),
        *[
            (lambda n=n: stages(["steps>1"]).update_on_episode(0, n, 0, 0.0), f"length {n}")
            for n in (NAN, float("inf"), -1)
        ],
        (lambda: stages(["steps>1"]).load_state_dict({}), "does not fit the SequentialCurriculum: it has no"),
        (lambda: SequentialCurriculum([Manual(2)], [], 2).sample(), "add_tasks"),
    ],
)
def test_bad_input_is_named(build, named):
    with pytest.raises(ValueError, match=named) as error:
        build()
    assert "\n" not in str(error.value)
