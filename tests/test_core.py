"""Task spaces, domain randomization and the task wrapper."""

import itertools
import json
import pickle
import resource
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from curricula import Curriculum, DomainRandomization, TaskSpace, TaskWrapper
from curricula.core import (
    BoxTaskSpace,
    DiscreteTaskSpace,
    MultiDiscreteTaskSpace,
    PettingZooTaskWrapper,
    TupleTaskSpace,
)

GRID = MultiDiscrete([3, 2])
NESTED = Tuple(
    (Discrete(2), Dict({"size": Discrete(3, start=4), "goal": MultiDiscrete([2, 2])}), Discrete(2, start=-1))
)
FINITE = {  # space, names -> its tasks in order, written down or made by itertools
    "number": (TaskSpace(5), [0, 1, 2, 3, 4]),
    "numpy number": (TaskSpace(np.int64(2)), [0, 1]),
    "discrete": (TaskSpace(Discrete(3, start=7)), [7, 8, 9]),
    "named discrete": (TaskSpace(Discrete(3, start=7), ["a", "b", "c"]), ["a", "b", "c"]),
    "range": (TaskSpace(range(200, 1000, 100)), list(range(200, 1000, 100))),
    "strings": (TaskSpace(["score", "eat", "descend"]), ["score", "eat", "descend"]),
    "mixed": (TaskSpace([1, True, "1", (1,), 1.5, False, 0]), [1, True, "1", (1,), 1.5, False, 0]),
    "vectors": (TaskSpace([np.array([0.1, 0.2]), np.array([0.1, 0.3])]), [np.array([0.1, 0.2]), np.array([0.1, 0.3])]),
    "dicts": (TaskSpace([{"size": 5, "seed": [1, 2]}, {"size": 6, "seed": []}]), None),
    "predicates": (TaskSpace([len, print, sum]), [len, print, sum]),
    "multidiscrete": (TaskSpace(GRID), list(itertools.product(range(3), range(2)))),
    "named multidiscrete": (
        TaskSpace(GRID, list(itertools.product("abc", (1, 0)))),
        list(itertools.product("abc", (1, 0))),
    ),
    "offset multidiscrete": (
        TaskSpace(MultiDiscrete([2, 3], start=[5, -1])),
        list(itertools.product((5, 6), (-1, 0, 1))),
    ),
    "matrix": (TaskSpace(MultiDiscrete([[1, 2], [2, 1]])), [((0, b), (c, 0)) for b in range(2) for c in range(2)]),
    "tuple": (TaskSpace(Tuple((Discrete(2), Discrete(3, start=1)))), list(itertools.product(range(2), (1, 2, 3)))),
    "nested": (
        TaskSpace(NESTED),
        [
            (a, {"goal": g, "size": s}, b)
            for a, g, s, b in itertools.product((0, 1), itertools.product((0, 1), (0, 1)), (4, 5, 6), (-1, 0))
        ],
    ),
}


@pytest.mark.parametrize("name", FINITE)
def test_finite_spaces_number_and_encode_every_task_in_order(name):
    space, tasks = FINITE[name]
    tasks = space.tasks if tasks is None else tasks
    assert space.num_tasks == len(tasks) == len(space.tasks)
    for i, (task, listed) in enumerate(zip(tasks, space.tasks, strict=True)):
        encoding = space.encode(task)
        decoded = space.decode(encoding)
        assert np.array_equal(decoded, task) and type(decoded) is type(task) and np.array_equal(listed, task)
        assert space.gym_space.contains(encoding) and space.contains(encoding)
        assert space.index(encoding) == i and type(space.index(encoding)) is int
        assert space.index(space.encoding(i)) == i and space.index(space.encoding(np.int64(i))) == i
    for position in (-1, len(tasks)):
        with pytest.raises(ValueError, match=f"position {position}"):
            space.encoding(position)


def test_multidiscrete_table_of_syllabus():
    """CUR-11."""
    space = FINITE["named multidiscrete"][0]
    assert space.index(space.encode(("b", 0))) == 3
    assert space.encode(("b", 0)).tolist() == [1, 1] and space.encode(("b", 0)).dtype == GRID.dtype
    assert TaskSpace(MultiDiscrete([10] * 30)).num_tasks == 10**30  # more than an int64 counts
    digits = TaskSpace(MultiDiscrete([10] * 30)).encoding(123456789 * 10**15)
    assert "".join(map(str, digits)) == "000000123456789000000000000000"


GRID_NAMES = [("a", "b", "c"), (1, 0)]
PLACES = MultiDiscreteTaskSpace([3, 2], GRID_NAMES)
SYLLABUS = {  # its own tables (test_task_space.py): space -> task: encoding, in order
    "named": (DiscreteTaskSpace(Discrete(3), ["a", "b", "c"]), dict(zip("abc", range(3)))),
    "number": (DiscreteTaskSpace(4), dict(zip(range(4), range(4)))),
    "consecutive": (DiscreteTaskSpace(3, range(7, 10)), {7: 0, 8: 1, 9: 2}),
    "places": (PLACES, dict(zip(itertools.product("abc", (1, 0)), itertools.product(range(3), range(2))))),
    "flat": (
        MultiDiscreteTaskSpace((3, 2), GRID_NAMES, flatten=True),
        {("a", 1): 0, ("a", 0): 1, ("b", 1): 2, ("b", 0): 3, ("c", 1): 4, ("c", 0): 5},
    ),
    "unnamed": (MultiDiscreteTaskSpace(GRID), {(a, b): (a, b) for a in range(3) for b in range(2)}),
    "offset": (
        MultiDiscreteTaskSpace(MultiDiscrete([2, 2], start=[5, 0])),
        {(a, b): (a, b) for a in (5, 6) for b in range(2)},
    ),
    "tuple": (
        TupleTaskSpace((PLACES, DiscreteTaskSpace(3, ("X", "Y", "Z"))), space_names=("place", "kind")),
        {(("c", 0), "X"): ((2, 1), 0), (("a", 1), "Z"): ((0, 0), 2), (("a", 0), "Y"): ((0, 1), 1)},
    ),
    "flat tuple": (
        TupleTaskSpace((PLACES, ["X", "Y", "Z"]), space_names=None, flatten=True),
        {(("a", 0), "Y"): 4, (("a", 1), "Y"): 1, (("c", 0), "Z"): 17},
    ),
    "mixed": (TupleTaskSpace((2, Discrete(2, start=3), ["x"])), {(1, 4, "x"): (1, 4, 0), (0, 3, "x"): (0, 3, 0)}),
}


@pytest.mark.parametrize("name", SYLLABUS)
def test_spaces_of_syllabus(name):
    space, table = SYLLABUS[name]
    for task, encoding in table.items():
        assert space.encode(task) == encoding and type(space.encode(task)) is type(encoding)
        assert space.decode(encoding) == task and type(space.decode(encoding)) is type(task)
        assert space.contains(encoding) and space.gym_space.contains(encoding)
    assert len(space.tasks) == len(set(space.tasks)) == space.num_tasks and set(table) <= set(space.tasks)
    for position, task in enumerate(space.tasks):  # C order: the last part varies fastest
        encoding = space.encode(task)
        assert space.decode(encoding) == task and space.index(encoding) == position
        assert space.encoding(position) == encoding
    assert {space.sample() for _ in range(40 * space.num_tasks)} == set(space.tasks)
    draws = DomainRandomization(space, seed=1).sample(20)
    assert all(space.contains(draw) for draw in draws)
    space.seed(3)
    samples = [space.sample() for _ in range(9)]
    space.seed(3)
    assert [space.sample() for _ in range(9)] == samples and isinstance(space, TaskSpace)


@pytest.mark.parametrize(
    "name,task,encoding",
    [
        ("named", "d", 3),
        ("number", 4, 4),
        ("consecutive", 10, 3),
        ("places", ("b", 2), (1, 2)),
        ("places", ("b",), (1,)),
        ("flat", ("d", 1), 6),
        ("flat", ("a", 1, 0), (0, 0)),
        ("tuple", (("d", 0), "Y"), ((3, 0), 0)),
        ("flat tuple", (("a", 0), "Y", 0), 18),
        ("flat tuple", (("d", 0), "Y"), -1),
        ("unnamed", (3, 0), (3, 0)),
    ],
)
def test_spaces_of_syllabus_name_what_is_outside(name, task, encoding):
    space = SYLLABUS[name][0]
    for method, value in ((space.encode, task), (space.decode, encoding)):
        with pytest.raises(ValueError) as error:
            method(value)
        assert repr(value) in str(error.value) and repr(space) in str(error.value)
    assert not space.contains(encoding)


def test_box_task_space_and_infinite_tuples():
    space = BoxTaskSpace(Box(0, 1, (2, 2)))
    for task in ([[0, 1], [1, 0]], [[0.5, 0.2], [0.1, 0.9]], space.sample()):
        assert np.array_equal(space.decode(space.encode(task)), np.float32(task))
    with pytest.raises(ValueError, match="BoxTaskSpace"):
        space.encode([[1.2, 0], [0, 0]])
    both = TupleTaskSpace((["x", "y"], space), seed=1)
    kind, vector = both.sample()
    encoding = both.encode((kind, vector))
    assert kind in "xy" and encoding[0] in (0, 1) and np.array_equal(encoding[1], vector) and both.num_tasks is None


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: DiscreteTaskSpace(GRID), r"made of a number of tasks or a Discrete, found MultiDiscrete\(\[3 2\]\)"),
        (lambda: DiscreteTaskSpace(0), "found 0"),
        (lambda: DiscreteTaskSpace(3, ["a", "b"]), "2 tasks cannot name the 3"),
        (lambda: DiscreteTaskSpace(2, ["a", "a"]), "found 'a' at position 1"),
        (lambda: BoxTaskSpace(3), "a BoxTaskSpace is made of a Box, found 3"),
        (lambda: MultiDiscreteTaskSpace([3, 2], [("a", "b", "c")]), "1 lists of tasks cannot name the 2 places"),
        (lambda: MultiDiscreteTaskSpace([3, 2], [("a", "b"), (1, 0)]), "2 tasks cannot name the 3"),
        (lambda: TupleTaskSpace(()), "a task space is"),
        (lambda: TupleTaskSpace((2, 3), space_names=("a",)), "1 space_names .* cannot name 2 spaces"),
        (lambda: TupleTaskSpace((2, Box(0, 1, (1,))), flatten=True), "flatten=True numbers the tasks, but .* is inf"),
    ],
)
def test_bad_spaces_of_syllabus_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_lists_and_arrays_find_their_task_but_types_that_differ_do_not():
    space = TaskSpace([(1, 2), "ab", {"seed": (3,)}])
    assert space.encode([1, 2]) == space.encode(np.array([1, 2])) == 0 and space.encode(np.str_("ab")) == 1
    assert space.encode({"seed": np.array([3])}) == 2
    assert TaskSpace(3).encode(np.uint8(2)) == 2 and type(TaskSpace(3).encode(np.uint8(2))) is int
    for wrong in ((True, 2), ("a", "b"), {"seed": 3}, {1, 2}):
        with pytest.raises(ValueError, match="cannot encode"):
            space.encode(wrong)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_box_round_trip(dtype):
    """CUR-11."""
    space = TaskSpace(Box(np.array([-1, 0], dtype), np.array([1, 0.7], dtype), dtype=dtype), seed=3)
    assert space.num_tasks is None and space.tasks is None
    for task in ([0.1, 0.7], np.array([-1, 0.0]), (1, 0), space.sample()):
        encoding = space.encode(task)
        assert encoding.dtype == dtype and np.array_equal(encoding, np.asarray(task, dtype))
        assert np.array_equal(space.decode(encoding), encoding) and space.contains(encoding)
        assert encoding is not task  # the user's array may change afterwards
    samples = np.stack([space.sample() for _ in range(4000)])
    np.testing.assert_allclose(samples.mean(0), [0, 0.35], atol=0.03)
    np.testing.assert_allclose(samples.std(0), [2 / 12**0.5, 0.7 / 12**0.5], rtol=0.03)  # of a uniform variable


def test_integer_box_draws_both_bounds_and_takes_no_fractions():
    space = TaskSpace(Box(-2, 1, (2,), np.int8), seed=0)
    samples = np.stack([space.sample() for _ in range(400)])
    assert samples.dtype == np.int8
    assert [np.unique(column).tolist() for column in samples.T] == [[-2, -1, 0, 1]] * 2
    for wrong in ([0.5, 0], [0.0, 0.0], [256, 0]):  # 256 is 0 in int8
        with pytest.raises(ValueError, match="is not in TaskSpace"):
            space.encode(wrong)


def test_tuple_with_a_box_is_infinite_but_works():
    space = TaskSpace(Tuple((Discrete(3), Box(0, 1, (2,)))), seed=1)
    kind, vector = space.sample()
    assert space.num_tasks is None and kind in range(3) and vector.shape == (2,)
    task = (2, np.array([0.25, 0.5], np.float32))
    kind, vector = space.decode(space.encode(task))
    assert kind == 2 and np.array_equal(vector, task[1])
    for call in (lambda: space.index(task), lambda: space.encoding(0), lambda: space.split(0.5)):
        with pytest.raises(ValueError, match="Box"):
            call()


NAN = float("nan")
OUTSIDE = {  # space -> what is no task of it
    "5": (5, [None, -1, 5, 2.0, 2.5, True, "2", [2], NAN, np.array([2])]),
    "start": (Discrete(300, start=7), [0, 6, 307, None, np.uint8(2)]),
    "strings": (["a", "b"], [None, "c", "", 0, ("a",)]),
    "multidiscrete": (
        GRID,
        [None, 3, (3, 0), (0, -1), (0,), (0, 0, 0), (0.5, 0), "ab", (True, True), ((0, 0),), (0, (1,))],
    ),
    "tuple": (Tuple((Discrete(2), Discrete(3))), [None, (0, 3), (0,), (0, 0, 0), 1, "ab", {0: 0, 1: 1}]),
    "dict": (
        Dict(a=Discrete(2), b=Discrete(2)),
        [None, {"a": 0}, {"a": 0, "b": 2}, {"a": 0, "b": 0, "c": 0}, (0, 0), "ab"],
    ),
    "box": (
        Box(0, 1, (2,)),
        [None, 0.5, [0.5], [0.5, 1.5], [0.5, NAN], [0.5, np.inf], ["0.5", "0.5"], [None, 0], [True, True]],
    ),
}


@pytest.mark.parametrize("space,task", [(space, task) for space, tasks in OUTSIDE.values() for task in tasks])
def test_what_is_outside_the_space_is_named(space, task):
    """CUR-11."""
    space = TaskSpace(space)
    with pytest.raises(ValueError) as error:
        space.encode(task)
    assert repr(task) in str(error.value) and repr(space) in str(error.value)
    if isinstance(task, str) or space._names is None or task not in range(2):  # the names' encodings are 0 and 1
        assert not space.contains(task)
        for method in (space.decode, space.index):
            with pytest.raises(ValueError) as error:
                method(task)
            assert repr(space) in str(error.value)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ((0,), "found 0"),
        ((-3,), "found -3"),
        (([],), r"found \[\]"),
        ((None,), "found None"),
        ((True,), "found True"),
        (("abc",), "found 'abc'"),
        (((3, 2),), r"found \(3, 2\)"),
        ((MultiBinary(3),), "found MultiBinary"),
        ((Tuple(()),), "found Tuple"),
        ((Dict({}),), "found Dict"),
        ((Tuple((Discrete(2), MultiBinary(3))),), "found MultiBinary"),
        ((3, ["a", "b"]), "2 tasks cannot name the 3 of Discrete"),
        ((GRID, ["a"]), "1 tasks cannot name the 6 of MultiDiscrete"),
        ((Box(0, 1, (2,)), ["a"]), "1 tasks cannot name the infinitely many of Box"),
        ((["a", "b", "a"],), "found 'a' at position 2"),
        ((["a", None],), "found None at position 1"),
        ((2, [(1, 2), [1, 2]]), r"found \[1, 2\] at position 1"),
        (([{1}, {2}],), r"tasks must be hashable, found \{1\}: name it by a string"),
    ],
)
def test_bad_spaces_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        TaskSpace(*arguments)


def test_samples_are_uniform_seeded_and_leave_the_global_generator_alone():
    before = np.random.get_state()[1].copy()
    for space, _ in FINITE.values():
        tasks = space.tasks
        space.seed(11)
        indices = [space.index(space.encode(space.sample())) for _ in range(200 * len(tasks))]
        counts = np.bincount(indices, minlength=len(tasks))
        assert abs(counts - 200).max() < 5 * 200**0.5
        space.seed(11)
        assert [space.index(space.encode(space.sample())) for _ in range(50)] == indices[:50]
    assert np.array_equal(np.random.get_state()[1], before)
    with pytest.raises(ValueError, match="finite bounds"):
        TaskSpace(Box(0, np.inf, (2,))).sample()


@pytest.mark.parametrize("sizes,count", [(0.8, 160), (0.004, 1), ((150, 50), 150)])
def test_split_is_disjoint_and_complete(sizes, count):
    space = TaskSpace(range(1000, 1200))
    train, validation = space.split(sizes, seed=5)
    assert train.num_tasks == count and validation.num_tasks == 200 - count
    assert sorted(train.tasks + validation.tasks) == space.tasks
    assert train.tasks == sorted(train.tasks) != list(range(1000, 1000 + count))  # in order, but a random subset
    assert [train.encode(task) for task in train.tasks] == list(range(count))
    again, other = space.split(sizes, seed=5)[0], space.split(sizes, seed=6)[0]
    assert again.tasks == train.tasks != other.tasks
    assert [again.sample() for _ in range(9)] == [train.sample() for _ in range(9)]
    with pytest.raises(ValueError, match="is not in"):
        train.encode(validation.tasks[0])


def test_split_of_structured_tasks_and_bad_sizes():
    train, validation = TaskSpace(NESTED).split((40, 8))
    tasks = [json.dumps(task) for task in train.tasks + validation.tasks]
    assert sorted(tasks) == sorted(json.dumps(task) for task in FINITE["nested"][1])
    assert all(train.decode(train.encode(task)) == task for task in train.tasks)
    for sizes in (0.0, 1.0, 0.01, (48, 0), (40, 7), (50, -2)):
        with pytest.raises(ValueError, match="does not split 48 tasks"):
            TaskSpace(NESTED).split(sizes)


class Fixed(Curriculum):
    def _sample_distribution(self):
        return np.array([0.5, 0, 0.25, 0.25])


def test_curriculum_samples_its_distribution_as_encodings():
    for space, encodings in ((4, [0, 1, 2, 3]), (TaskSpace(Discrete(4, start=6), list("abcd")), [6, 7, 8, 9])):
        curriculum = Fixed(space, seed=2)
        draws = curriculum.sample(8000)
        counts = [draws.count(encoding) for encoding in encodings]
        np.testing.assert_allclose(counts, [4000, 0, 2000, 2000], atol=150)
        assert [curriculum._index(encoding) for encoding in encodings] == [0, 1, 2, 3]
        for wrong in (encodings[0] - 1, encodings[-1] + 1, encodings[1] + 0.5):
            with pytest.raises(ValueError, match=str(wrong)):
                curriculum._index(wrong)
    pairs = Fixed(TaskSpace(MultiDiscrete([2, 2])), seed=2)
    assert {tuple(map(int, pair)) for pair in pairs.sample(50)} == {(0, 0), (1, 0), (1, 1)}


def test_domain_randomization_is_uniform_whatever_it_is_told():
    """CUR-10."""
    curriculum = DomainRandomization(2, seed=0)
    for _ in range(100):
        curriculum.update_on_episode(1.0, 5, 0, 1.0, env_id=3)
        curriculum.update_task_progress(0, 1.0)
    assert curriculum._sample_distribution().tolist() == [0.5, 0.5]
    draws = curriculum.sample(1000)
    assert min(draws.count(0), draws.count(1)) >= 450
    assert all(len(set(draws[env::4])) == 2 for env in range(4))
    assert len(curriculum.sample()) == 1 and len(curriculum.sample(7)) == 7


def test_domain_randomization_draws_the_same_from_a_number_and_its_task_space():
    draws = DomainRandomization(1000, seed=4).sample(50)
    assert DomainRandomization(TaskSpace(1000), seed=4).sample(50) == draws
    assert all(type(draw) is int for draw in draws)
    state = (curriculum := DomainRandomization(1000, seed=4)).state_dict()
    curriculum.sample(50)
    curriculum.load_state_dict(state)
    assert curriculum.sample(50) == draws
    assert max(DomainRandomization(2**40, seed=0).sample(3)) > 2**20  # in O(k)


def test_domain_randomization_over_a_box():
    space = TaskSpace(Box(np.float32([0, 10]), np.float32([1, 30])), seed=9)
    draws = np.stack(DomainRandomization(space, seed=1).sample(3000))
    np.testing.assert_allclose(draws.mean(0), [0.5, 20], rtol=0.05)
    assert all(space.contains(draw) for draw in draws[:100])
    again = np.stack([DomainRandomization(space, seed=1).sample()[0], TaskSpace(space.gym_space, seed=1).sample()])
    assert np.array_equal(again, draws[[0, 0]])  # its own generator, not the space's
    with pytest.raises(ValueError, match="infinite"):
        DomainRandomization(space)._sample_distribution()


class Chain(gym.Env):
    """Pays 1 a step; ends after `self.length` steps, by termination if that is even."""

    observation_space = Dict(place=Discrete(100), goal=Box(0, 100, (1,)))
    action_space = Discrete(2)
    length = 3

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.options = 0, options
        return {"place": 0}, {"draw": int(self.np_random.integers(1000))}

    def step(self, action):
        self.place += 1
        done = self.place == self.length
        return {"place": self.place}, 1.0, done and self.length % 2 == 0, done and self.length % 2 == 1, {"mine": 1}


class ChainTask(TaskWrapper):
    def change_task(self, new_task):  # does not set self.task: reset does
        self.unwrapped.length = new_task

    def _encode_goal(self):
        return np.array([self.task or 0], np.float32)


def test_task_wrapper_reports_the_task_and_its_completion():
    env = ChainTask(Chain())
    obs, info = env.reset(new_task=2, seed=5, options={"a": 1})
    assert info == {"draw": int(np.random.default_rng(5).integers(1000)), "task": 2, "task_completion": 0.0}
    assert env.unwrapped.options == {"a": 1} and obs["goal"].tolist() == [2] and env.observation_space.contains(obs)
    assert env.step(0)[4] == {"mine": 1, "task": 2, "task_completion": 0.0}
    obs, reward, terminated, truncated, info = env.step(0)
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert info == {"mine": 1, "task": 2, "task_completion": 1.0} and obs["goal"].tolist() == [2]
    assert env.reset()[1]["task"] == 2  # again the same
    env.reset(new_task=1)
    _, _, terminated, truncated, info = env.step(0)
    assert (terminated, truncated, info["task"], info["task_completion"]) == (False, True, 1, 1.0)
    assert ChainTask(Chain()).reset()[1]["task"] is None


def test_reward_belongs_to_the_task_before_the_change():
    class Switching(TaskWrapper):
        def _task_completion(self, obs, reward, terminated, truncated, info):
            self.change_task(self.task + 10)
            return np.float32(0.25)

    env = Switching(Chain())
    env.reset(new_task=1)
    infos = [env.step(0)[4] for _ in range(3)]
    assert [info["task"] for info in infos] == [1, 11, 21] and env.task == 31
    assert infos[0]["task_completion"] == 0.25 and type(infos[0]["task_completion"]) is float


def test_wrapper_may_refuse_a_task_and_needs_a_place_for_its_goal():
    class Careful(TaskWrapper):
        def change_task(self, new_task):
            self.task = min(new_task, 5)

    assert Careful(Chain()).reset(new_task=9)[1]["task"] == 5
    with pytest.raises(ValueError, match="'goal', found Box"):
        ChainTask(gym.make("CartPole-v1").unwrapped).reset()


@pytest.mark.parametrize("wrong", [None, "half"])
def test_a_completion_that_is_no_number_is_named(wrong):
    class Wrong(TaskWrapper):
        def _task_completion(self, *outcome):
            return wrong

    env = Wrong(Chain())
    env.reset()
    with pytest.raises(ValueError, match=rf"_task_completion returned {wrong!r}: must be a number in \[0, 1\]"):
        env.step(0)


def test_the_goal_enters_the_observation_space():
    cartpole = gym.make("CartPole-v1")
    env = TaskWrapper(cartpole, DiscreteTaskSpace(3, "abc"), goal=True)
    assert env.observation_space == Dict(observation=cartpole.observation_space, goal=MultiBinary(3))
    obs, info = env.reset(new_task="b", seed=3)
    assert obs["goal"].tolist() == [0, 1, 0] and info["task"] == "b" and env.observation_space.contains(obs)
    assert np.array_equal(obs["observation"], cartpole.reset(seed=3)[0])
    env.change_task("c")
    assert env.step(0)[0]["goal"].tolist() == [0, 0, 1]

    class Embedded(TaskWrapper):
        def _encode_goal(self):
            return np.full(2, len(self.task), np.float32)

    inner = Chain()
    inner.observation_space = Dict(place=Discrete(100))
    env = Embedded(inner, goal=Box(0, 9, (2,)))
    assert env.observation_space == Dict(place=Discrete(100), goal=Box(0, 9, (2,)))
    obs = env.reset(new_task="abcd")[0]
    assert obs["goal"].tolist() == [4, 4] and env.observation_space.contains(obs)
    assert inner.observation_space == Dict(place=Discrete(100))  # not the environment's own
    with pytest.raises(ValueError, match="goal=True encodes the task's place in its task_space: give that"):
        TaskWrapper(cartpole, goal=True)


def test_a_task_outside_the_wrappers_space_starts_no_episode():
    env = ChainTask(Chain(), DiscreteTaskSpace(3, range(1, 4)))
    env.reset(new_task=2)
    with pytest.raises(ValueError, match="cannot encode 4"):
        env.reset(new_task=4)
    assert env.task == env.unwrapped.length == 2

    class Broken(TaskWrapper):
        def change_task(self, new_task):
            super().change_task(new_task)
            self.unwrapped.length = 6 // new_task

    env = Broken(Chain())
    env.reset(new_task=3)
    with pytest.raises(ZeroDivisionError):
        env.reset(new_task=0)
    assert env.reset()[1]["task"] == 3 and env.unwrapped.length == 2


class Race:
    """A parallel environment as PettingZoo defines it: agent i leaves after lengths[i] steps."""

    metadata, possible_agents, render_mode = {"name": "race_v0"}, ["fast", "slow"], None

    def __init__(self, lengths):
        self.lengths, self.agents = dict(zip(self.possible_agents, lengths)), []

    @property
    def unwrapped(self):
        return self

    def observation_space(self, agent):
        return Box(0, 9, (1,))

    def action_space(self, agent):
        return Discrete(2)

    def reset(self, seed=None, options=None):
        self.agents, self.place, self.arguments = self.possible_agents[:], 0, (seed, options)
        return {agent: np.zeros(1, np.float32) for agent in self.agents}, {agent: {"lane": 1} for agent in self.agents}

    def step(self, actions):
        self.place += 1
        ended = {agent: self.place >= self.lengths[agent] for agent in self.agents}
        obs = {agent: np.full(1, self.place, np.float32) for agent in self.agents}
        self.agents = [agent for agent in self.agents if not ended[agent]]
        return obs, dict.fromkeys(ended, 1.0), ended, dict.fromkeys(ended, False), {"common": {"lap": 1}}


@pytest.mark.parametrize("lengths", [(2, 4), (3, 3)], ids=["one leaves early", "all at once"])
def test_pettingzoo_wrapper_tells_every_agent_its_task(lengths):
    """SP-09, SP-10."""

    class Lanes(PettingZooTaskWrapper):
        def change_task(self, new_task):
            self.lane = new_task  # sets no task: reset does

    env = Lanes(Race(lengths), TaskSpace(["left", "right"]), goal=True)
    obs, infos = env.reset(3, {"a": 1}, new_task="right")
    assert env.arguments == (3, {"a": 1}) and env.lane == env.task == "right" and env.metadata["name"] == "race_v0"
    assert infos == {agent: {"lane": 1, "task": "right", "task_completion": 0.0} for agent in env.possible_agents}
    assert env.observation_space("fast") is env.observation_space("fast")
    for step in range(1, max(lengths) + 1):
        live = env.agents[:]
        obs, rewards, terminations, truncations, infos = env.step(dict.fromkeys(live, 0))
        assert infos.pop("common") == {"lap": 1}
        assert list(obs) == list(infos) == list(rewards) == live
        done = 1.0 if step == max(lengths) else 0.0
        assert all(info == {"task": "right", "task_completion": done} for info in infos.values())
        for agent in live:
            assert obs[agent]["goal"].tolist() == [0, 1] and obs[agent]["observation"].tolist() == [step]
            assert env.observation_space(agent).contains(obs[agent])
    assert not env.agents and env.reset(seed=1)[1]["slow"]["task"] == "right" and env.arguments == (1, None)
    with pytest.raises(ValueError, match="cannot encode 'up'"):
        env.reset(new_task="up")


def test_pettingzoo_wrapper_forwards_falsy_values_and_pickles():
    env = PettingZooTaskWrapper(Race((1, 1)))
    env.env.level = 0
    assert env.level == 0 and env.render_mode is None and env.agents == [] and env.unwrapped is env.env
    with pytest.raises(AttributeError, match="no_such"):
        env.no_such_thing  # noqa: B018
    again = pickle.loads(pickle.dumps(env))
    assert again.reset(new_task=5)[1]["fast"]["task"] == 5 and again.env.level == 0


def test_pettingzoo_wrapper_on_its_rock_paper_scissors():
    pytest.importorskip("pettingzoo", reason="scripts/test brings pettingzoo")
    from pettingzoo.classic import rps_v2
    from pettingzoo.test import parallel_api_test

    class Rounds(PettingZooTaskWrapper):
        def change_task(self, new_task):
            self.unwrapped.max_cycles = new_task

    env = Rounds(rps_v2.parallel_env(), DiscreteTaskSpace(20), goal=True)
    for rounds in (3, 5):
        env.reset(new_task=rounds, seed=1)
        while env.agents:
            completion = env.step(dict.fromkeys(env.agents, 0))[4]["player_0"]["task_completion"]
            rounds -= 1
            assert completion == (rounds == 0)
    parallel_api_test(env, num_cycles=30)
    plain = PettingZooTaskWrapper(rps_v2.parallel_env(max_cycles=2))
    plain.reset(new_task="any", seed=0)
    for _ in range(2):
        obs, rewards, _, _, infos = plain.step({"player_0": 0, "player_1": 1})  # rock, paper
    assert rewards == {"player_0": -1, "player_1": 1} and not plain.agents
    assert [infos[agent]["task_completion"] for agent in plain.possible_agents] == [1, 1]
    plain.close()


def test_twenty_thousand_task_changes_leak_nothing():
    """SYN-14."""
    space = TaskSpace([f"task {i}" for i in range(1, 50)], seed=0)

    class Named(TaskWrapper):
        def change_task(self, new_task):
            self.task, self.unwrapped.length = new_task, space.encode(new_task) + 1

    env = Named(Chain())

    def play(changes):
        for _ in range(changes):
            env.reset(new_task=space.sample())
            env.step(0)

    play(2000)
    pages = lambda: int(open("/proc/self/statm").read().split()[1])  # noqa: E731, SIM115
    before = pages()
    play(20_000)
    assert (pages() - before) * resource.getpagesize() < 10e6


def test_import_has_no_side_effect():
    code = """
import os, sys, threading
import numpy as np
np.random.seed(3); state = np.random.get_state()[1].copy(); errors = np.geterr()
fds, shm = len(os.listdir("/proc/self/fd")), [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
import curricula
assert (np.random.get_state()[1] == state).all() and np.geterr() == errors
assert len(os.listdir("/proc/self/fd")) == fds and threading.active_count() == 1
assert shm == [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]
assert not {"torch", "wandb", "ray", "pettingzoo", "matplotlib"} & set(sys.modules)
print(*sorted(curricula.__all__))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = (
        "AsyncPrioritizedLevelReplay BatchedDomainRandomization BoxTaskSpace Constant Curriculum "
        "DiscreteTaskSpace DomainRandomization DualCurriculum ExpandingBox FictitiousSelfPlay "
        "GymnasiumSyncWrapper LeaguePlay Learnability LearningProgress Manual MultiDiscreteTaskSpace OMNI "
        "OnlineLearningProgress PettingZooSyncWrapper PettingZooTaskWrapper PrioritizedFictitiousSelfPlay "
        "PrioritizedLevelReplay SelfPlay SequentialCurriculum SimulatedAnnealing SyncQueue TaskPrioritizedReplay "
        "TaskSpace TaskWrapper TupleTaskSpace make_multiprocessing_curriculum "
    )
    assert done.stdout.split() == names.split()
