"""Tiny environments with several tasks and known answers, for --env-id probe_tasks:<name>-v0."""

import os
import sys
import time

import gymnasium as gym
import numpy as np


class CountTasks(gym.Env):
    """Counts its steps from 0: task j ends at the multiples of j + 2. `fault`, at the 7th step of the
    episode: raise, hang, die, exit, or what it does to the task vectors or the observation; held: all always hold."""

    observation_space, action_space = gym.spaces.Box(0, 1e6, (1,), np.float32), gym.spaces.Discrete(2)

    def __init__(self, n=2, fault="", render_mode=None):
        self.n, self.fault = n, fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {"task_terminations": np.ones(self.n + (self.fault == "reset"), bool)}

    def step(self, action):
        self.t += 1
        time.sleep(float(os.environ.get("PROBE_STEP_S", 0)))
        ends = np.array([self.t % (j + 2) == 0 for j in range(self.n)], bool)
        rewards, faulty = ends.astype(np.float64), self.t == 7
        if faulty and self.fault == "raise":
            raise ValueError("boom-44")
        if faulty and self.fault == "hang":
            time.sleep(1000)
        if faulty and self.fault == "die":
            os._exit(7)
        if faulty and self.fault == "exit":
            sys.exit(0)
        if faulty and self.fault == "strings":
            rewards = ["a", "b"]
        if faulty and self.fault == "float":
            ends = ends.astype(float)
        if self.fault == "held":
            rewards, ends = np.zeros(self.n), np.ones(self.n, bool)
        if faulty and self.fault == "nan":
            rewards[1] = np.nan
        if faulty and self.fault == "huge":
            rewards[1] = 1e39
        if faulty and self.fault == "grow":
            rewards, ends = np.zeros(3), np.zeros(3, bool)
        if faulty and self.fault == "unequal":
            rewards = np.zeros(3)
        size = 1 + (faulty and self.fault == "shape")
        return (
            np.full(size, self.t * (size == 1), np.float32),
            0.0,
            False,
            False,
            {"task_rewards": rewards, "task_terminations": ends},
        )


gym.register("Tasks-v0", "probe_tasks:CountTasks")
gym.register("NoTask-v0", "probe_tasks:CountTasks", kwargs={"n": 0})
FAULTS = "raise", "hang", "die", "exit", "nan", "huge", "grow", "unequal", "reset", "strings", "float", "held", "shape"
for _fault in FAULTS:
    gym.register(f"Tasks-{_fault}-v0", "probe_tasks:CountTasks", kwargs={"fault": _fault})
