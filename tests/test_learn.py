"""The algorithms learn: a small task each, 3 seeds of 3."""

import json
from pathlib import Path

import pytest

from algos import ppo, ppo_plr_minigrid, ppo_vector


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_learns_cartpole(seed, tmp_path):
    """At least 475, the mark of a solved CartPole-v1, over 20 evaluation episodes after 100k steps."""
    args = ppo.Args(seed=seed, total_timesteps=100_000, run_dir=tmp_path, progress="none", eval_interval=0)
    result = ppo.train(args)
    (path,) = Path(tmp_path).rglob("eval.jsonl")
    returns = [json.loads(line)["return"] for line in path.read_text().splitlines()]
    assert len(returns) == 20
    assert result["eval/return_mean"] == pytest.approx(sum(returns) / 20)
    assert result["eval/return_mean"] >= 475, returns


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ppo_vector_learns_a_choice_from_each_part_of_an_observation(seed, tmp_path):
    """0.95 of 1: the three parts of a MultiDiscrete action are told by a picture, a number and a choice. By chance 4/9,
    with one of them unseen at most 5/6."""
    args = ppo_vector.Args(env_id="probe_envs:ManyActions-v0", num_envs=8, num_steps=16, total_timesteps=4_096,
                           eval_interval=0, seed=seed, run_dir=tmp_path, progress="none")  # fmt: skip
    assert ppo_vector.train(args)["eval/return_mean"] >= 0.95


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("curriculum", ["plr", "robust_plr"])
def test_ppo_plr_minigrid_learns_unseen_minigrid_levels(curriculum, seed, tmp_path):
    """A return of 0.8 of at most 1 on 50 held-out rooms after 41k steps on 50 others; it starts near 0.1."""
    args = ppo_plr_minigrid.Args(
        env_id="MiniGrid-Empty-Random-6x6-v0", curriculum=curriculum, seed=seed, num_levels=50, num_envs=16,
        num_steps=64, num_minibatches=4, total_timesteps=40_960, learning_rate=1e-3, gamma=0.99, eval_interval=0,
        final_eval_episodes=50, torch_threads=1, run_dir=tmp_path, progress="none",
    )  # fmt: skip
    result = ppo_plr_minigrid.train(args)
    assert result["eval/return_mean"] >= 0.8
    (path,) = Path(tmp_path).rglob("metrics.jsonl")
    shares = [json.loads(line)["curriculum/learning_share"] for line in path.read_text().splitlines()]
    assert shares[-1] > 0.9 and (curriculum == "plr" or shares[0] == 0)
