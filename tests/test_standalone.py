"""Each file in algos/ works when it is copied alone to an empty folder, and does nothing when it is imported."""

import ast
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "algos").glob("*.py"))
TWO_UPDATES = {  # arguments with which a script makes exactly two updates
    "a3c.py": "--env-id CartPole-v1 --num-workers 1 --num-envs 2 --num-steps 16 --log-interval 1 --eval-episodes 2 "
    "--total-timesteps 64",
    "appo_pfsp.py": "--env-id rps --num-actors 1 --envs-per-actor 4 --batch-rollouts 4 --num-steps 8 "
    "--log-interval 1 --eval-episodes 2 --total-timesteps 64",
    "appo_pfsp_openspiel.py": "--env-id kuhn_poker --num-actors 1 --envs-per-actor 4 --batch-rollouts 4 --num-steps 8 "
    "--log-interval 1 --eval-episodes 2 --total-timesteps 64",
    "dqn_taper.py": "--env-id two-rooms-rare --num-envs 2 --num-steps 16 --learning-starts 16 --batch-size 8 "
    "--eval-episodes 2 --total-timesteps 64",
    "dqn_taper_crafter.py": "--env-id CartPole-v1 --num-envs 2 --num-steps 16 --learning-starts 16 "
    "--batch-size 8 --eval-episodes 2 --total-timesteps 64",
    "dqn_taper_minigrid.py": "--env-id MiniGrid-Empty-5x5-v0 --num-envs 2 --num-steps 16 --learning-starts 16 "
    "--batch-size 8 --eval-episodes 2 --total-timesteps 64",
    "evolution_strategies.py": "--env-id CartPole-v1 --population-size 4 --max-episode-steps 8 --eval-episodes 2 "
    "--total-timesteps 64",
    "impala_popart.py": "--suite mixed --num-actors 1 --envs-per-actor 4 --batch-rollouts 4 --num-steps 8 "
    "--log-interval 1 --eval-episodes 1 --total-timesteps 64",
    "impala_popart_atari.py": "--env-id Pong-v5 --network nature --num-actors 1 --envs-per-actor 2 --batch-rollouts 2 "
    "--num-steps 8 --log-interval 1 --eval-episodes 1 --eval-max-steps 20 --total-timesteps 32",
    "impala_popart_procgen.py": "--env-id bigfish --network nature --num-actors 1 --envs-per-actor 2 "
    "--batch-rollouts 2 --num-steps 8 --log-interval 1 --eval-episodes 1 --eval-max-steps 20 --total-timesteps 32",
    "neuroevolution.py": "--env-id VectorPong --population-size 3 --num-children 3 --num-elites 1 --fitness-episodes 1 "
    "--train-steps 32 --train-envs 2 --num-steps 16 --num-minibatches 2 --eval-episodes 1 --total-timesteps 6000",
    "nsga2.py": "--problem policy --pop-size 4 --num-envs 2 --num-steps 16 --train-steps 32 --num-minibatches 2 "
    "--update-epochs 1 --fitness-games 1 --eval-episodes 2 --total-timesteps 8",
    "onpolicy_choices.py": "--env-id InvertedPendulum-v4 --num-envs 2 --iteration-size 32 --minibatch-size 16 "
    "--update-epochs 1 --eval-episodes 2 --total-timesteps 64",
    "pbt_ppo.py": "--env-id CartPole-v1 --population 2 --leg-steps 32 --num-envs 2 --num-steps 16 --num-minibatches 2 "
    "--update-epochs 1 --num-workers 2 --eval-episodes 2 --final-eval-episodes 2 --total-timesteps 64",
    "ppo.py": "--env-id CartPole-v1 --num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 "
    "--total-timesteps 64",
    "ppo_vector.py": "--env-id CartPole-v1 --num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1 "
    "--vectorization async --norm-obs --norm-reward --total-timesteps 64",
    "ppo_plr.py": "--env-id bigfish --network nature --num-envs 4 --num-steps 16 --num-minibatches 2 "
    "--total-timesteps 128 --num-levels 8 --eval-episodes 1 --final-eval-episodes 2",
    "ppo_plr_minigrid.py": "--env-id MiniGrid-Empty-5x5-v0 --num-envs 4 --num-steps 16 --num-minibatches 2 "
    "--total-timesteps 128 --num-levels 8 --eval-episodes 1 --final-eval-episodes 2",
}

IMPORT = """
import importlib.util, random, sys
import numpy, torch
def states():
    numpy_state = numpy.random.get_state()
    return random.getstate(), numpy_state[1].tolist(), numpy_state[2:], torch.get_rng_state().tolist()
before = states()
spec = importlib.util.spec_from_file_location("script", sys.argv[1])
sys.modules["script"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert states() == before, "importing draws from or seeds a global generator"
"""


def python(folder, *arguments):
    """Runs Python in a folder, with nothing of this repository in reach; returns the finished process."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def numbers(value):
    """All numbers in nested JSON."""
    if isinstance(value, (dict, list)):
        return [number for item in (value.values() if isinstance(value, dict) else value) for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.fixture
def alone(tmp_path):
    """A function that copies a script into an empty folder."""

    def copy(script):
        folder = tmp_path / "alone"
        folder.mkdir()
        (folder / script.name).write_text(script.read_text())
        return folder

    return copy


def test_there_are_scripts_and_each_has_arguments_here():
    assert [script.name for script in SCRIPTS] == sorted(TWO_UPDATES)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_imports_nothing_of_this_repository(script):
    for node in ast.walk(ast.parse(script.read_text())):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            modules = [node.module]
        for module in modules:
            assert module.split(".")[0] not in {"algos", "benchmark", "curricula", "scripts", "tests"}, node.lineno


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_importing_has_no_side_effect(script, alone):
    folder = alone(script)
    done = python(folder, "-c", IMPORT, script.name)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [path.name for path in folder.rglob("*")] == [script.name]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_help_and_two_updates_alone_in_an_empty_folder(script, alone):
    folder = alone(script)
    shown = python(folder, script.name, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--total-timesteps" in shown.stdout
    done = python(folder, script.name, *TWO_UPDATES[script.name].split())
    assert done.returncode == 0, done.stderr
    (result,) = folder.glob("runs/**/result.json")
    found = numbers(json.loads(result.read_text()))
    assert found
    assert all(math.isfinite(number) for number in found)
    (metrics,) = folder.glob("runs/**/metrics.jsonl")
    assert [json.loads(line)["charts/update"] for line in metrics.read_text().splitlines()] == [1, 2]


def test_a_run_says_whether_its_script_differs_from_the_commit(tmp_path):
    """By the script alone: results that lie beside it change nothing."""
    script, git = tmp_path / "ppo.py", ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    script.write_bytes((ROOT / "algos" / "ppo.py").read_bytes())
    for words in (["init", "-q"], ["add", "ppo.py"], ["commit", "-qm", "a"]):
        subprocess.run([*git, *words], check=True)
    found = []
    for seed, change in enumerate(("", "# changed\n")):
        script.write_text(script.read_text() + change)
        command = [sys.executable, "ppo.py", *TWO_UPDATES["ppo.py"].split(), "--seed", str(seed)]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
        (path,) = tmp_path.glob(f"runs/ppo/*/seed{seed}-*/config.json")
        found.append(json.loads(path.read_text())["git_dirty"])
    assert found == [False, True]
