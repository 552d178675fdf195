"""Tiny environments with known answers, for --env-id probe_envs:<name>-v0 and for direct use."""

import multiprocessing
import os
import sys
import time

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv


class ChainEnv(gym.Env):
    """State s = 0, 1, 2, ...; leaving s pays reward(s); the `length`-th step ends the episode with the flags that `end`
    names (terminated, truncated, both, endless). Actions must lie in action_space and do nothing else."""

    observation_space, action_space = gym.spaces.Box(0, 1e6, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, length=3, end="terminated", reward=lambda s: 2.0**s, render_mode=None):
        self.length, self.end, self.reward, self.episodes = length, end, reward, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action), f"action {action} is not in {self.action_space}"
        reward, self.state = self.reward(self.state), self.state + 1
        ended = self.state == self.length and self.end != "endless"
        self.episodes += ended
        flags = ended and self.end != "truncated", ended and self.end != "terminated"
        return np.full(1, self.state, np.float32), reward, *flags, {}


class ShiftedChain(ChainEnv):
    action_space = gym.spaces.Discrete(3, start=-1)


class TinyImage(ChainEnv):
    """Too small for the network."""

    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


class NoNumbers(ChainEnv):
    """Its observation is of a kind that gymnasium cannot flatten."""

    observation_space = gym.spaces.Dict(state=gym.spaces.Space())


class BinaryActions(ChainEnv):
    action_space = gym.spaces.MultiBinary(2)


class ManyActions(gym.Env):
    """A step an episode. A picture in one grey, a number and a choice among 3 say which of the three parts of the
    action pay a third each."""

    action_space = gym.spaces.MultiDiscrete([2, 2, 3], start=[5, 0, 0])
    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (36, 36, 1), np.uint8),
        number=gym.spaces.Box(-1, 1, (1,), np.float32),
        choice=gym.spaces.Discrete(3),
    )

    def __init__(self, render_mode=None):
        self.answer = np.zeros(3, int)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.answer = self.np_random.integers([2, 2, 3])
        grey, number, choice = self.answer
        image = np.full((36, 36, 1), 200 * grey, np.uint8)
        return {"image": image, "number": np.float32([2 * number - 1]), "choice": choice}, {}

    def step(self, action):
        assert self.action_space.contains(action), f"action {action} is not in {self.action_space}"
        reward = np.mean(action - self.action_space.start == self.answer)
        return self.reset()[0], reward, True, False, {}


class HardStart(ChainEnv):
    """In a worker process, making it raises (fault "raise") or takes three seconds (fault "sleep")."""

    def __init__(self, fault, render_mode=None):
        super().__init__()
        if multiprocessing.parent_process() is not None:
            if fault == "raise":
                raise ValueError("boom-43")
            time.sleep(3)


class EnvpoolLike:
    """Chains behind envpool's interface: NEXT_STEP for who is not reset by its id, spaces of one environment, read-only
    num_envs, no seed at reset."""

    metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
    num_envs = property(lambda self: len(self.envs))
    observation_space = property(lambda self: self.envs[0].observation_space)
    action_space = property(lambda self: self.envs[0].action_space)

    def __init__(self, envs):
        self.envs, self.ended = envs, np.zeros(len(envs), bool)

    def reset(self, ids=slice(None)):
        ids = np.arange(len(self.envs))[ids]
        self.ended[ids] = False
        return np.stack([self.envs[i].reset()[0] for i in ids]), {}

    def step(self, actions):
        rows = []
        for env, action, ended in zip(self.envs, actions, self.ended):
            rows.append((env.reset()[0], 0.0, False, False) if ended else env.step(action)[:4])
        obs, reward, terminated, truncated = (np.array(column) for column in zip(*rows))
        self.ended = terminated | truncated
        return obs, reward.astype(np.float32), terminated, truncated, {"elapsed_step": np.zeros(len(rows))}

    def close(self):
        pass


class SlowCartPole(CartPoleEnv):
    """CartPole whose steps take PROBE_STEP_S seconds, so that a test can catch a run in the middle."""

    def step(self, action):
        time.sleep(float(os.environ.get("PROBE_STEP_S", 0)))
        return super().step(action)


class FaultyEnv(ChainEnv):
    """A chain of 9 steps whose 7th raises (fault "raise") or has a NaN as observation or reward, but only in episodes
    whose first action, by the policy's chance, is 1: so not all environments fail at once."""

    def __init__(self, fault, render_mode=None):
        super().__init__(length=9)
        self.fault, self.faulty = fault, False

    def step(self, action):
        self.faulty = self.faulty if self.state else bool(action)
        obs, reward, *rest = super().step(action)
        if self.faulty and self.state == 7:
            if self.fault == "raise":
                raise ValueError("boom-42")
            obs, reward = (obs * np.nan, reward) if self.fault == "observation" else (obs, np.nan)
        return obs, reward, *rest


class RecallEnv(gym.Env):
    """Shows -1 or 1 and then 0; the second action earns 1 if it says which. Who does not remember earns 0.5."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.cue = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.first = int(self.np_random.integers(2)), True
        return np.float32([2 * self.cue - 1, 0]), {}

    def step(self, action):
        self.first, ended = False, not self.first
        return np.float32([0, 1]), float(ended and action == self.cue), ended, False, {}


class OddRewards(ChainEnv):
    """Rewards in arrays of one number, and one array for all observations."""

    def __init__(self, render_mode=None):
        super().__init__(end="truncated")
        self.obs = np.zeros(1, np.float32)

    def reset(self, **options):
        self.obs[:], info = super().reset(**options)
        return self.obs, info

    def step(self, action):
        self.obs[:], reward, *rest = super().step(action)
        return self.obs, np.array([reward]), *rest


class OldStep(ChainEnv):
    """Four values as before Gymnasium 0.26: observation, reward, done, info."""

    def step(self, action):
        obs, reward, done, *_ = super().step(action)
        return obs, reward, done, {"any": 1}


class NoReward(ChainEnv):
    def step(self, action):
        obs, _, *rest = super().step(action)
        return obs, None, *rest


class ScalarObs(ChainEnv):
    observation_space = gym.spaces.Box(0, 9, (), np.float32)

    def reset(self, **options):
        obs, info = super().reset(**options)
        return obs[0], info

    def step(self, action):
        obs, *rest = super().step(action)
        return obs[0], *rest


class WrongShape(ChainEnv):
    """Its second observation has one number, its space four."""

    observation_space = gym.spaces.Box(0, 9, (4,), np.float32)

    def reset(self, **options):
        return np.repeat(super().reset(**options)[0], 4), {}

    def step(self, action):
        obs, *rest = super().step(action)
        return obs if self.state == 2 else np.repeat(obs, 4), *rest


class Picture(ChainEnv):
    """The state as a picture of one colour."""

    def __init__(self, shape, dtype, render_mode=None):
        super().__init__(render_mode=render_mode)
        self.observation_space = gym.spaces.Box(0, 255 if dtype == np.uint8 else 1, shape, dtype)

    def paint(self, obs):
        high = self.observation_space.high.flat[0]
        return np.full(self.observation_space.shape, obs[0] * high / 4, self.observation_space.dtype)

    def reset(self, **options):
        obs, info = super().reset(**options)
        return self.paint(obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return self.paint(obs), *rest


class HardReset(ChainEnv):
    """The third reset raises (fault "raise") or ends the program with the code 0 (fault "exit") or 3 ("exit3")."""

    def __init__(self, fault, render_mode=None):
        super().__init__()
        self.fault, self.resets = fault, 0

    def reset(self, **options):
        self.resets += 1
        if self.resets == 3:
            if self.fault.startswith("exit"):
                sys.exit(int(self.fault[4:] or 0))
            raise ValueError("boom-44")
        return super().reset(**options)


class Unseeded(ChainEnv):
    """Episodes of 100 steps that begin somewhere else each time, whatever the seed."""

    starts = iter(np.arange(1, 10_000, 100))

    def __init__(self, render_mode=None):
        super().__init__(100, reward=lambda s: 1.0)

    def reset(self, **options):
        super().reset(**options)
        self.start = next(self.starts)
        return np.full(1, self.start, np.float32), {}

    def step(self, action):
        obs, *rest = super().step(action)
        return obs + self.start, *rest


gym.register("Chain-v0", "probe_envs:ChainEnv")
gym.register("TruncatedChain-v0", "probe_envs:ChainEnv", max_episode_steps=3, kwargs={"end": "endless"})
gym.register("ShiftedChain-v0", "probe_envs:ShiftedChain")
gym.register("SlowCartPole-v0", "probe_envs:SlowCartPole", max_episode_steps=500)
for _name in ("Recall-v0", "OtherRecall-v0"):
    gym.register(_name, "probe_envs:RecallEnv")
gym.register("TinyImage-v0", "probe_envs:TinyImage")
gym.register("NoNumbers-v0", "probe_envs:NoNumbers")
gym.register("BinaryActions-v0", "probe_envs:BinaryActions")
gym.register("ManyActions-v0", "probe_envs:ManyActions")
gym.register("OddRewards-v0", "probe_envs:OddRewards")
gym.register("HugeReward-v0", "probe_envs:ChainEnv", kwargs={"reward": lambda s: 1e39})
gym.register("SmallPicture-v0", "probe_envs:Picture", kwargs={"shape": (7, 7, 3), "dtype": np.uint8})
gym.register("FloatPicture-v0", "probe_envs:Picture", kwargs={"shape": (40, 40, 3), "dtype": np.float32})
for _name in ("OldStep", "NoReward", "ScalarObs", "WrongShape"):
    gym.register(f"{_name}-v0", f"probe_envs:{_name}")
gym.register("Unseeded-v0", "probe_envs:Unseeded")
gym.register("Endless-v0", "probe_envs:ChainEnv", kwargs={"end": "endless"})
for _fault in ("raise", "exit", "exit3"):
    gym.register(f"HardReset-{_fault}-v0", "probe_envs:HardReset", kwargs={"fault": _fault})
for _fault in ("raise", "sleep"):
    gym.register(f"HardStart-{_fault}-v0", "probe_envs:HardStart", kwargs={"fault": _fault})
for _fault in ("raise", "observation", "reward"):
    gym.register(f"Faulty-{_fault}-v0", "probe_envs:FaultyEnv", kwargs={"fault": _fault})
