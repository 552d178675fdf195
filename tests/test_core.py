"""Task spaces, domain randomization and the task wrapper."""

import itertools
import json
import resource
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple

from curricula import Curriculum, DomainRandomization, TaskSpace, TaskWrapper

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
    space = FINITE["named multidiscrete"][0]
    assert space.index(space.encode(("b", 0))) == 3
    assert space.encode(("b", 0)).tolist() == [1, 1] and space.encode(("b", 0)).dtype == GRID.dtype
    assert TaskSpace(MultiDiscrete([10] * 30)).num_tasks == 10**30  # more than an int64 counts
    digits = TaskSpace(MultiDiscrete([10] * 30)).encoding(123456789 * 10**15)
    assert "".join(map(str, digits)) == "000000123456789000000000000000"


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
def test_what_is_outside_the_space_is_named(space, task):  # CUR-11
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
    curriculum = DomainRandomization(2, seed=0)
    for _ in range(100):
        curriculum.update_on_episode(1.0, 5, 0, 1.0, env_id=3)
        curriculum.update_task_progress(0, 1.0)
    assert curriculum._sample_distribution().tolist() == [0.5, 0.5]
    draws = curriculum.sample(1000)
    assert min(draws.count(0), draws.count(1)) >= 450  # CUR-10
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


def test_twenty_thousand_task_changes_leak_nothing():  # SYN-14
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
    names = "Curriculum DomainRandomization PrioritizedLevelReplay SyncQueue TaskSpace TaskWrapper"
    assert done.stdout.split() == names.split()
