"""Ways to make a task real: environments rebuilt, classes or rewards swapped, and wrappers for single packages.

Environment packages are imported when a wrapper for them is made, never before.
"""

import contextlib
import importlib
import importlib.util
import struct
import sys

import gymnasium as gym
import numpy as np

from curricula.core import (
    BoxTaskSpace,
    DiscreteTaskSpace,
    PettingZooTaskWrapper,
    TaskSpace,
    TaskWrapper,
    checked_completion,
)


def _import(name, command):
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} cannot be imported ({error}): {command} brings it") from error


def _copied(obs):
    """An observation that the next step of an environment which reuses its arrays does not overwrite."""
    if isinstance(obs, dict):
        return {name: _copied(value) for name, value in obs.items()}
    return obs.copy() if isinstance(obs, np.ndarray) else obs


def _position(wrapper, task):
    return wrapper.task_space.index(wrapper.task_space.encode(task))


class EpisodeTaskWrapper(TaskWrapper):
    """A TaskWrapper whose task is fixed during an episode: only `reset` changes it. Base of the wrappers below."""

    _playing = False

    def reset(self, *, new_task=None, seed=None, options=None):
        self._playing = False
        obs, info = super().reset(new_task=new_task, seed=seed, options=options)
        self._playing = True
        return obs, info

    def step(self, action):
        outcome = super().step(action)
        self._playing = not (outcome[2] or outcome[3])
        return outcome

    def change_task(self, new_task):
        if self._playing:
            name = type(self).__name__
            raise ValueError(f"{name} cannot change to {new_task!r} in an episode: use reset(new_task={new_task!r})")
        super().change_task(new_task)


class ReinitTaskWrapper(EpisodeTaskWrapper):
    """Any task, by an environment of its own: `env_fn(task)`, made at the task's first episode and kept.

    All environments must have the spaces of `env`, which is played until the first task is given. `task_space` must be
    finite; memory holds one environment for each task that was played. `close` closes them all.
    """

    def __init__(self, env, env_fn, task_space, goal=False):
        super().__init__(env, task_space, goal)
        if task_space.num_tasks is None:
            raise ValueError(f"one environment is kept for each task, but {task_space!r} is infinite")
        self.env_fn, self._first, self._envs = env_fn, env, {}

    def change_task(self, new_task):
        super().change_task(new_task)
        position = _position(self, new_task)
        if position not in self._envs:
            env = self.env_fn(new_task)
            for space in ("observation_space", "action_space"):
                if getattr(env, space) != getattr(self._first, space):
                    found = f"{getattr(env, space)}, not {getattr(self._first, space)}"
                    env.close()
                    raise ValueError(f"env_fn({new_task!r}) has the {space} {found}: a wrapper has one for all tasks")
            self._envs[position] = env
        self.env = self._envs[position]

    def close(self):
        with contextlib.ExitStack() as stack:  # the others are closed also where one fails
            for env in {id(env): env for env in (self._first, *self._envs.values())}.values():
                stack.callback(env.close)


class SubclassTaskWrapper(EpisodeTaskWrapper):
    """A task is a class: that of the innermost environment is changed to it, without a new environment.

    `subclasses`: a list of classes, which are the tasks, or a dict from task to class. They must share a base with the
    environment's class. No `__init__` runs at a change: what only that of a subclass would set, set on the environment.
    """

    def __init__(self, env, subclasses, goal=False):
        classes = subclasses if isinstance(subclasses, dict) else {task: task for task in subclasses}
        super().__init__(env, TaskSpace(list(classes)), goal)
        shared = set.intersection(*(set(c.__mro__) for c in (type(env.unwrapped), *classes.values())))
        if not shared - set(gym.Env.__mro__):
            names = ", ".join(c.__name__ for c in classes.values())
            raise ValueError(
                f"{type(env.unwrapped).__name__} has no base in common with all of {names}: make it of one"
            )
        self._classes = list(classes.values())
        self.task = next((task for task, c in classes.items() if c is type(env.unwrapped)), None)

    def change_task(self, new_task):
        super().change_task(new_task)
        self.unwrapped.__class__ = self._classes[_position(self, new_task)]


class RewardFunctionWrapper(TaskWrapper):
    """A task is a reward: function(obs, action, reward, terminated, truncated, info) -> float, also in mid-episode.

    `functions`: a list of functions, which are the tasks, or a dict from task to function. They get the observation
    after the action and the environment's own reward, which stays in info["env_reward"].
    """

    def __init__(self, env, functions, goal=False):
        functions = functions if isinstance(functions, dict) else {function: function for function in functions}
        super().__init__(env, TaskSpace(list(functions)), goal)
        self._functions = list(functions.values())
        self.change_task(next(iter(functions)))

    def change_task(self, new_task):
        super().change_task(new_task)
        self._function = self._functions[_position(self, new_task)]

    def step(self, action):
        task, function = self.task, self._function  # remembered: as in TaskWrapper
        obs, reward, terminated, truncated, info = self.env.step(action)
        info = {**info, "env_reward": reward}
        reward = float(function(obs, action, reward, terminated, truncated, info))
        completion = checked_completion(self._task_completion(obs, reward, terminated, truncated, info))
        info |= {"task": task, "task_completion": completion}
        return self.observation(obs), reward, terminated, truncated, info


class CartPoleTaskWrapper(EpisodeTaskWrapper):
    """A task is the range (low, high) of the uniform start of CartPole's position, speed, angle and angular speed.

    In m, m/s, rad, rad/s, one range for all, its ends in either order; the pole counts as fallen beyond 0.209 rad.
    Any gymnasium environment whose reset takes the options "low" and "high" will do. Without a task: its own range.
    task_completion is the number of steps so far over those of the time limit.
    """

    def __init__(self, env, task_space=None, goal=False):
        super().__init__(env, task_space or BoxTaskSpace(gym.spaces.Box(-0.3, 0.3, (2,))), goal)
        self._steps, self._limit = 0, getattr(env.spec, "max_episode_steps", None) or 500

    def _reset_arguments(self, seed, options):
        self._steps = 0
        if self.task is not None:
            low, high = sorted(map(float, self.task))
            options = {**(options or {}), "low": low, "high": high}
        return {"seed": seed, "options": options}

    def _task_completion(self, obs, reward, terminated, truncated, info):
        self._steps += 1
        return min(self._steps / self._limit, 1.0)


class MiniGridTaskWrapper(EpisodeTaskWrapper):
    """A task is a level: the seed of the environment's reset, which decides everything that happens by chance in it.

    `task_space`: a TaskSpace of seeds, or n for 0..n-1. Reset's own `seed` is used until the first task is given.
    task_completion is 1.0 where the episode ended in a reward (MiniGrid rewards success only).
    """

    def __init__(self, env, task_space=200, goal=False):
        space = task_space if isinstance(task_space, TaskSpace) else DiscreteTaskSpace(task_space)
        super().__init__(env, space, goal)

    def _reset_arguments(self, seed, options):
        return {"seed": seed if self.task is None else int(self.task), "options": options}

    def _task_completion(self, obs, reward, terminated, truncated, info):
        return float(terminated and reward > 0)


class ProcgenEnv(gym.Env):
    """One Procgen game that plays `level` (0..2^31-2) from each reset on, to the bit as a fresh game of it would.

    Stock Procgen fixes its levels when it is made, so the level is written into a saved state, and the game restarted.
    It also restarts by itself in the last step: the observation that ends an episode is the next one's first, and a
    time-out looks like a death, terminated. `reset`'s seed has nothing to decide. obs: uint8 (64, 64, 3), actions: 15.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"

    def __init__(self, game, distribution_mode="easy", level=0):
        for name in ("gym3", "procgen"):  # bare packages: their __init__ would import the old gym, and imageio
            if name not in sys.modules and (spec := importlib.util.find_spec(name)):
                sys.modules[name] = importlib.util.module_from_spec(spec)
        gym3 = _import("gym3", "scripts/run SCRIPT")
        vars(gym3).setdefault("ToBaselinesVecEnv", object)  # base of a class that nobody uses
        options = {"distribution_mode": distribution_mode, "start_level": 123456789, "num_levels": 1, "rand_seed": 0}
        make = _import("procgen.env", "scripts/run SCRIPT").ProcgenGym3Env
        self._game = make(num=1, env_name=game, num_threads=0, **options)
        self.level, self._blank = level, bytearray(self._game.get_state()[0])
        self._level_range = self._blank.index(struct.pack("<ii", 123456789, 123456790))
        self.observation_space = gym.spaces.Box(0, 255, (64, 64, 3), np.uint8)
        self.action_space = gym.spaces.Discrete(15)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        struct.pack_into("<ii", self._blank, self._level_range, self.level, self.level + 1)
        self._game.set_state([bytes(self._blank)])
        return self._act(-1)[0], {}  # -1: a forced restart

    def step(self, action):
        obs, reward, terminated = self._act(action)
        info = {"level_complete": bool(self._game.get_info()[0]["prev_level_complete"])} if terminated else {}
        return obs, reward, terminated, False, info

    def _act(self, action):
        self._game.act(np.array([action], np.int32))
        reward, obs, first = self._game.observe()
        self._frame = obs["rgb"][0]
        return self._frame, float(reward[0]), bool(first[0])

    def render(self):
        return self._frame

    def close(self):
        self._game.close()


class ProcgenTaskWrapper(EpisodeTaskWrapper):
    """A task is a level of a Procgen game: `env` is a ProcgenEnv, in any wrappers, or the name of a game.

    `task_space`: a TaskSpace of levels, or n for 0..n-1. task_completion is 1.0 where the level's goal was reached.
    """

    def __init__(self, env, task_space=200, goal=False):
        space = task_space if isinstance(task_space, TaskSpace) else DiscreteTaskSpace(task_space)
        super().__init__(ProcgenEnv(env) if isinstance(env, str) else env, space, goal)
        if not isinstance(self.unwrapped, ProcgenEnv):
            raise ValueError(f"ProcgenTaskWrapper wraps a ProcgenEnv or the name of a game, found {env}")
        self.change_task(space.decode(space.encoding(0)))

    def change_task(self, new_task):
        super().change_task(new_task)
        self.unwrapped.level = int(new_task)

    def _task_completion(self, obs, reward, terminated, truncated, info):
        return float(info.get("level_complete", False))


class NetHackTaskWrapper(SubclassTaskWrapper):
    """The seven tasks of the NetHack Learning Environment (Kuettler et al. 2020), swapped at reset in one game.

    `env` is made of any of the seven, or is the id of one. A task is a name of TASKS, or with `seeds` (a list, or n for
    0..n-1) a pair (name, seed): NetHack, its levels included, is then played from that seed. Otherwise `seed` of reset,
    which NLE itself would ignore, seeds this game and, through it, the unseeded ones that follow.
    Observations are copies; with copy=False they are NLE's own arrays, which the next step overwrites.
    task_completion: 1.0 at success, or the return so far over the one in COMPLETE, within [0, 1].
    One thing stays as `env` was made: NetHackGold picks up gold only, the others also scrolls, potions and wands.
    """

    TASKS = {
        "score": "NetHackScore", "staircase": "NetHackStaircase", "staircase-pet": "NetHackStaircasePet",
        "oracle": "NetHackOracle", "gold": "NetHackGold", "eat": "NetHackEat", "scout": "NetHackScout",
    }  # fmt: skip
    COMPLETE = {"score": 1000, "gold": 1000, "eat": 1000, "scout": 1000}

    def __init__(self, env="NetHackScore-v0", seeds=None, goal=False, copy=True):
        tasks, nethack = (_import(m, "scripts/run --extra nethack SCRIPT") for m in ("nle.env.tasks", "nle.nethack"))
        env = gym.make(env) if isinstance(env, str) else env
        if type(env.unwrapped).__name__ not in self.TASKS.values():
            raise ValueError(f"NetHackTaskWrapper wraps one of {', '.join(self.TASKS.values())}, found {env}")
        classes = {name: getattr(tasks, cls) for name, cls in self.TASKS.items()}
        self._seeded = seeds is not None
        if self._seeded:
            seeds = range(seeds) if isinstance(seeds, int) else seeds
            classes = {(name, seed): cls for name, cls in classes.items() for seed in seeds}
        super().__init__(env, classes, goal)
        self._copy, self._games, self._return = copy, None, 0.0
        monsters = range(nethack.GLYPH_MON_OFF, nethack.GLYPH_PET_OFF)
        oracle = (g for g in monsters if nethack.permonst(nethack.glyph_to_mon(g)).mname == "Oracle")
        self.unwrapped.oracle_glyph = next(oracle)  # what __init__ of NetHackOracle would set

    def _reset_arguments(self, seed, options):
        game = self.task[1] if self._seeded else seed
        if seed is not None:
            self._games = np.random.default_rng(seed)
        elif game is None and self._games:
            game = int(self._games.integers(2**31))
        if game is not None:
            self.unwrapped.seed(core=game, disp=game, reseed=False, lgen=game)
        self.unwrapped._frozen_steps, self._return = 0, 0.0  # the former: NLE carries it over from the last episode
        return {"seed": seed, "options": options}

    def _task_completion(self, obs, reward, terminated, truncated, info):
        self._return += reward
        complete = self.COMPLETE.get(self.task[0] if self._seeded else self.task)
        if complete is None:
            return float(info["end_status"].name == "TASK_SUCCESSFUL")
        return min(max(self._return / complete, 0.0), 1.0)

    def observation(self, obs):
        return super().observation(_copied(obs) if self._copy else obs)


class NeuralMMOTaskWrapper(PettingZooTaskWrapper):
    """Neural MMO 2's predicate tasks (Suarez et al. 2023): every agent gets the same one, for itself, at reset.

    `env` is a nmmo.Env, `task_specs` a list of nmmo's TaskSpecs; a task is the name of one. Rewards are the task's.
    Observations are copies. task_completion is the mean progress of all agents, the dead included; info["task"] is the
    task's name, in the place of nmmo's own. nmmo needs numpy 1.26 and old packages, hence an environment of its own,
    with this repository on its path: tests/test_nmmo.py has the commands.
    """

    def __init__(self, env, task_specs, goal=False):
        self._specs, specs = {spec.name: spec for spec in task_specs}, [spec.name for spec in task_specs]
        self._make = _import("nmmo.task.task_spec", "the commands in tests/test_nmmo.py").make_task_from_spec
        super().__init__(env, TaskSpace(specs), goal)
        self.task = specs[0]

    def _reset_arguments(self, seed, options):
        agents = self.possible_agents
        make = lambda: self._make(agents, [self._specs[self.task]] * len(agents))  # noqa: E731
        return {"seed": seed, "options": {**(options or {}), "make_task_fn": make}}

    def _task_completion(self, obs, rewards, terminations, truncations, infos):
        return np.mean([task.progress for task in self.unwrapped.tasks])

    def observation(self, obs):
        return super().observation(_copied(obs))
