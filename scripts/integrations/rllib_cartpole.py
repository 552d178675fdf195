"""RLlib's PPO (its current API stack) with a curriculum in a Ray actor: 2 env runners, nothing in RLlib is changed.

    scripts/run --extra ray scripts/integrations/rllib_cartpole.py            # 2 minutes on 2 cores

The curriculum widens the range of CartPole's starts with success, as in the Syllabus paper (its section 6). The last
line, JSON, says how wide the range has become, and how RLlib's own training episodes went.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of this machine alone
try:
    import ray
except ImportError:
    sys.exit("error: ray is not installed: scripts/run --extra ray scripts/integrations/rllib_cartpole.py")
from ray.rllib.algorithms.ppo import PPOConfig  # noqa: E402
from ray.tune.registry import register_env  # noqa: E402

from curricula.annealing import ExpandingBox  # noqa: E402
from curricula.core import BoxTaskSpace  # noqa: E402
from curricula.ray_sync import RayGymnasiumSyncWrapper, make_ray_curriculum  # noqa: E402
from curricula.task_wrappers import CartPoleTaskWrapper  # noqa: E402


@dataclass
class Args:
    total_timesteps: int = 100_000  # environment steps
    seed: int = 1
    num_env_runners: int = 2  # processes
    num_envs: int = 2  # of each process
    start_range: float = 0.2  # widest start: m, m/s, rad, rad/s
    steps: int = 5  # of the range, from the first to the widest
    success_threshold: float = 0.75  # share of the 500 steps to survive
    required_successes: int = 10  # episodes in a row that widen the range
    batch_size: int = 2000  # steps of an iteration


def main(args):
    ray.init("local", num_cpus=args.num_env_runners + 1, object_store_memory=2 * 10**8, include_dashboard=False)
    task_space = BoxTaskSpace(gym.spaces.Box(-args.start_range, args.start_range, (2,)))
    expanding = ExpandingBox(task_space, args.steps, args.success_threshold, args.required_successes, seed=args.seed)
    with make_ray_curriculum(expanding) as curriculum:
        components = curriculum.components  # all that the env runners get

        def make_env(_):
            env = CartPoleTaskWrapper(gym.make("CartPole-v1"), task_space)
            return RayGymnasiumSyncWrapper(env, task_space, components)

        register_env("cartpole_curriculum", make_env)
        config = PPOConfig().environment("cartpole_curriculum").debugging(seed=args.seed)
        config.env_runners(num_env_runners=args.num_env_runners, num_envs_per_env_runner=args.num_envs)
        config.training(train_batch_size=args.batch_size, minibatch_size=250, num_epochs=6, lr=1e-3, entropy_coeff=0.01)
        algorithm, steps = config.build_algo(), 0
        while steps < args.total_timesteps:
            runners = algorithm.train()["env_runners"]
            steps = int(runners["num_env_steps_sampled_lifetime"])
            print(f"{steps} steps, return {runners['episode_return_mean']:.1f}, {curriculum.metrics()}", flush=True)
        algorithm.stop()
        found = {"steps": steps, "episode_return_mean": runners["episode_return_mean"], **curriculum.metrics()}
    ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
