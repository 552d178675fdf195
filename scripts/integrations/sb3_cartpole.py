"""Stable-Baselines3's PPO with a curriculum: environments in processes of their own, nothing in SB3 is changed.

    scripts/run --extra sb3 scripts/integrations/sb3_cartpole.py            # 2 minutes on 2 cores

The curriculum widens the range of CartPole's starts with success. Its last line, JSON, says how wide the range
has become, and what the policy gets over the widest one.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import tyro
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import SubprocVecEnv

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from curricula.annealing import ExpandingBox  # noqa: E402
from curricula.core import BoxTaskSpace  # noqa: E402
from curricula.sync_envs import GymnasiumSyncWrapper  # noqa: E402
from curricula.sync_learner import make_multiprocessing_curriculum  # noqa: E402
from curricula.task_wrappers import CartPoleTaskWrapper  # noqa: E402


@dataclass
class Args:
    total_timesteps: int = 100_000  # environment steps
    seed: int = 1
    num_envs: int = 4  # processes
    start_range: float = 0.2  # widest start: m, m/s, rad, rad/s
    steps: int = 5  # of the range, from the first to the widest
    success_threshold: float = 0.75  # share of the 500 steps to survive
    required_successes: int = 10  # episodes in a row that widen the range
    eval_episodes: int = 50


class LogCurriculum(BaseCallback):
    """The curriculum's metrics, in SB3's log."""

    def __init__(self, curriculum):
        super().__init__()
        self.curriculum = curriculum

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        for name, value in self.curriculum.metrics().items():
            self.logger.record(f"curriculum/{name}", value)


def main(args):
    task_space = BoxTaskSpace(gym.spaces.Box(-args.start_range, args.start_range, (2,)))
    expanding = ExpandingBox(task_space, args.steps, args.success_threshold, args.required_successes, seed=args.seed)
    with make_multiprocessing_curriculum(expanding) as curriculum:
        components = curriculum.components  # all that the processes get

        def make_env():
            env = CartPoleTaskWrapper(gym.make("CartPole-v1"), task_space)
            return Monitor(GymnasiumSyncWrapper(env, task_space, components))

        envs = SubprocVecEnv([make_env] * args.num_envs)
        model = PPO("MlpPolicy", envs, n_steps=256, seed=args.seed, device="cpu", verbose=1)
        model.learn(args.total_timesteps, callback=LogCurriculum(curriculum))
        envs.close()
    widest = CartPoleTaskWrapper(gym.make("CartPole-v1"), task_space)
    widest.change_task((-args.start_range, args.start_range))
    returns, _ = evaluate_policy(model, Monitor(widest), args.eval_episodes, return_episode_rewards=True)
    print(json.dumps(curriculum.metrics() | {"eval_mean": sum(returns) / len(returns), "eval_episodes": len(returns)}))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
