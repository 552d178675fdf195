"""A sequence of stages seen from environments in 8 processes: no way back, and hardly a straggler."""

from collections import Counter

import gymnasium as gym
import numpy as np
import pytest

from curricula import (
    GymnasiumSyncWrapper,
    SequentialCurriculum,
    TaskSpace,
    TaskWrapper,
    make_multiprocessing_curriculum,
)


class Walk(gym.Env):
    """Episodes of 1 to 6 steps."""

    observation_space, action_space = gym.spaces.Box(0, 6, (1,)), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 7))
        return np.array([self.left], np.float32), {}

    def step(self, action):
        self.left -= 1
        return np.array([self.left], np.float32), 1.0, self.left == 0, False, {}


class Logged(SequentialCurriculum):
    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        stage = self._stage  # before this report
        super().update_on_episode(episode_return, length, task, progress, env_id)
        self.log.append((env_id, task, stage))


@pytest.mark.parametrize("buffer_size", [1, 2])
def test_stages_never_go_back_and_few_old_episodes_follow_a_switch(buffer_size):
    """CUR-08."""
    space = TaskSpace(3)
    stages = Logged([[0], [1], [2]], ["episodes>=40", "episodes>=40"], space, seed=1)
    stages.log = []
    with make_multiprocessing_curriculum(stages, max_envs=8) as curriculum:
        components = curriculum.components

        def make_env():
            return GymnasiumSyncWrapper(TaskWrapper(Walk()), space, components, buffer_size=buffer_size)

        envs = gym.vector.AsyncVectorEnv([make_env] * 8, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
        envs.reset(seed=1)
        for _ in range(150):
            envs.step(np.zeros(8, int))
        envs.close()
    played, late = {}, Counter()
    for env_id, task, stage in stages.log:
        played.setdefault(env_id, []).append(task)
        late[env_id, stage] += task < stage
    assert len(played) == 8 and stages.log[-1][2] == 2
    assert all(tasks == sorted(tasks) and tasks[-1] == 2 for tasks in played.values())
    assert all(task >= stage - 1 for _, task, stage in stages.log)
    assert 1 <= max(late.values()) <= buffer_size
    for stage in (0, 1):  # exactly the condition's episodes counted; the late ones, told by their task, did not
        assert sum(task == stage == at for _, task, at in stages.log) == 40
