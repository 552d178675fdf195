"""The integration scripts and the synchronisation benchmark, each run as a user runs it, but shorter."""

import importlib.util
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
EASY = ["--success-threshold", "0.02", "--required-successes", "2"]  # 11 steps count as success


def run(script, *arguments, block=None):
    """Runs a script to its end, as if the module `block` were not installed; returns its output."""
    start = f"import sys, runpy; sys.path[0] = '{ROOT / script}/..'; sys.modules['{block}'] = None; "
    start += f"sys.argv[0] = '{ROOT / script}'; runpy.run_path(sys.argv[0], run_name='__main__')"
    program = [ROOT / script] if block is None else ["-c", start]
    command = [sys.executable, *program, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    found = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=180, env=environment)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    return found.stdout


def load(script):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(Path(script).stem, ROOT / script)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(text):
    """The cells of a markdown table's rows, without its head."""
    lines = [line.strip("| \n") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")] for line in lines[2:]]


# ---- CleanRL's loop, the CartPole experiment -------------------------------------------------------------------------


def test_cartpole_experiment(tmp_path):
    out = run("scripts/integrations/cleanrl_cartpole.py", "--num-seeds", 2, "--total-timesteps", 2048,
              "--eval-episodes", 20, "--out", tmp_path)  # fmt: skip
    found = json.loads((tmp_path / "curves.json").read_text())
    assert {arm: list(runs) for arm, runs in found.items()} == {"expanding": ["1", "2"], "full": ["1", "2"]}
    for arm, runs in found.items():
        for seed, lines in runs.items():
            assert lines["steps"] == [1024, 2048] and 5 < lines["return"][-1] < 450
            assert f"{arm} seed {seed}: {lines['return'][-1]:.1f}, range {lines['widest'][-1]:.2f}" in out
    assert out.count("range 0.06") == 2 and out.count("range 0.30") == 2
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_cartpole_experiment_leaves_what_is_published():
    out = load("scripts/integrations/cleanrl_cartpole.py").Args().out
    assert not (ROOT / out).resolve().is_relative_to(ROOT / "benchmark" / "results")


def test_cartpole_evaluation():
    script = load("scripts/integrations/cleanrl_cartpole.py")
    controller = torch.nn.Linear(4, 2, bias=False)
    controller.weight.data = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.1, 0.2, 1.0, 1.0]])
    with torch.no_grad():
        assert script.evaluate(controller, script.Args(start_range=0.05, eval_episodes=20)) == 500
        widest = script.evaluate(controller, script.Args(start_range=0.3))
    envs = script.gym.make_vec("CartPole-v1", 400, "vector_entry_point")
    start = envs.reset(seed=0, options={"low": -0.3, "high": 0.3})[0].T
    fallen = abs(start[2] + 0.02 * start[3]) > 12 * np.pi / 180  # after the first step: about 30 % of the starts
    assert 100 < fallen.sum() < 140 and widest == (500 * (400 - fallen.sum()) + fallen.sum()) / 400


def test_cartpole_run_repeats_and_the_range_grows():
    script = load("scripts/integrations/cleanrl_cartpole.py")
    script.ExpandingBox = partial(script.ExpandingBox, success_threshold=0.02, required_successes=2)
    args = script.Args(total_timesteps=2048, eval_episodes=20, eval_interval=1)
    one, two = (script.train(args, "expanding", seed=3) for _ in range(2))
    assert one.shape == (2, 3) and one[-1, 0] == 2048
    assert np.array_equal(one, two)
    assert one[-1, 2] == np.float32(0.3) and not np.array_equal(one, script.train(args, "expanding", seed=4))


# ---- Other libraries -------------------------------------------------------------------------------------------------


def test_stable_baselines():
    pytest.importorskip("stable_baselines3", reason="the extra sb3 is not installed")
    script = "scripts/integrations/sb3_cartpole.py"
    out = run(script, "--total-timesteps", 2048, "--num-envs", 2, "--eval-episodes", 10, *EASY)
    found = json.loads(out.splitlines()[-1])
    assert found["range_max"] == pytest.approx(0.2) and found["range_min"] == pytest.approx(-0.2)
    assert found["eval_episodes"] == 10 and 5 < found["eval_mean"] < 500
    assert out.count("curriculum/") == 4  # in SB3's log, once a rollout


def test_rllib():
    pytest.importorskip("ray", reason="the extra ray is not installed")
    out = run("scripts/integrations/rllib_cartpole.py", "--total-timesteps", 2000, "--batch-size", 1000, *EASY)
    found = json.loads(out.splitlines()[-1])
    assert found["range_max"] == pytest.approx(0.2) and found["range_min"] == pytest.approx(-0.2)
    assert 2000 <= found["steps"] < 2100 and 5 < found["episode_return_mean"] < 500


@pytest.mark.parametrize("curriculum", ["sp", "pfsp"])
def test_pettingzoo(curriculum):
    pytest.importorskip("pettingzoo", reason="the extra pettingzoo is not installed")
    script = "scripts/integrations/pettingzoo_selfplay.py"
    found = json.loads(run(script, "--total-timesteps", 32_000, "--curriculum", curriculum).splitlines()[-1])
    average = np.array(found["league_average"])
    assert found["games"] == 3200 and average.sum() == pytest.approx(1, abs=1e-3)
    assert found["opponents"] == (101 if curriculum == "pfsp" else 1)  # the first agent, a copy each 4 of 400 games
    rock, paper, scissors = average
    best = max(scissors - paper, rock - scissors, paper - rock)  # of an answer by rock, paper, scissors
    assert found["exploitability_league"] == pytest.approx(best, abs=2e-3)
    if curriculum == "pfsp":
        assert found["exploitability_league"] < 0.1
    else:
        assert found["exploitability_league"] > 0.2  # plain self-play goes in circles


# ---- The benchmark of the synchronisation ----------------------------------------------------------------------------

SMALL = ["--processes", "2", "--episodes", "1", "--rounds", "1", "--steps", "50"]


@pytest.mark.parametrize(
    "library, workload, module", [("ours", "cartpole", "numpy"), ("ours", "nle", "nle"), ("ray", "cartpole", "ray"),
                                  ("package", "nle-blstats", "syllabus")]
)  # fmt: skip
def test_overhead(library, workload, module):
    pytest.importorskip(module if module != "syllabus" else "nle", reason=f"{module} is not installed")
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    out = run("benchmark/speed/sync_overhead.py", *SMALL, "--libraries", library, "--workloads", workload, "--check")
    assert "WRONG" not in out and "left out" not in out and "; 0 differences in what arrived" in out
    rows = table(out)
    base = "ray" if library == "ray" else "none"
    updates = ["episodes", "steps", "observations"]
    assert [row[:3] for row in rows] == [[workload, base, "none"], *([workload, library, name] for name in updates)]
    assert all(float(cell) >= 0 for row in rows for cell in row[3:5])
    assert all(row[5].endswith("%") and row[6].endswith("%") for row in rows[1:])


def test_overhead_tells_what_is_lost_or_wrong(capsys, monkeypatch):
    script = load("benchmark/speed/sync_overhead.py")
    args = script.Args(processes=2, episodes=1, steps=50, check=True)
    script.measure(args, "ours", "observations", "cartpole", None)
    assert capsys.readouterr().out == ""
    update = script.Ours.update_on_step_batch

    def altered(self, steps, env_id=None):
        update(self, [(task, obs * (1 + 1e-6), *rest) for task, obs, *rest in steps[:-1]], env_id)

    monkeypatch.setattr(script.Ours, "update_on_step_batch", altered)
    script.measure(args, "ours", "observations", "cartpole", None)
    found = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in found] == [
        ["WRONG:", "ours", "observations", "cartpole:", name] for name in ("records", "prints")
    ]


def test_overhead_of_the_channel():
    out = run("benchmark/speed/sync_overhead.py", "--channel", "--rounds", 1, "--seconds", 0.05, "--libraries", "ours")
    rows = table(out)
    cases = [("episodes", "1"), ("episodes", "200"), ("steps", "200"), ("observations", "200")]
    assert [tuple(row[:3]) for row in rows] == [(*case, n) for case in cases for n in ("1", "4")]
    for updates, steps, _, library, ahead, tasks, records, p50, p95 in rows:
        tasks = float(tasks.replace(",", ""))
        assert library == "ours" and ahead == "2" and tasks > 0 and 0 < float(p50) <= float(p95)
        if updates != "episodes":
            assert float(records.replace(",", "")) == pytest.approx(tasks * int(steps), rel=0.01)


def test_overhead_without_the_package_says_what_to_type():
    out = run("benchmark/speed/sync_overhead.py", "--libraries", "package", block="syllabus")
    assert "left out: package, because syllabus is not installed (.venv/bin/pip install --no-deps syllabus-rl" in out
