"""The algorithms learn: a small task each, 3 seeds of 3."""

import json
from pathlib import Path

import pytest

from algos import ppo


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
