"""What the README tells people to type works."""

import contextlib
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tyro

import curricula

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"scripts/run (algos/\w+\.py[^`#\n|]*)", README)))
PROGRAM = r"(?:scripts/run(?: --extra \w+)*|python) ((?:benchmark|scripts/integrations)/\w+\.py[^`#\n|]*)"
BENCHMARKS = sorted(set(re.findall(PROGRAM, README)))
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_readme_has_commands():
    assert len(COMMANDS) >= 3 and len(BENCHMARKS) >= 3 and len(BLOCKS) == 2


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse_with_the_script_s_own_arguments(command):
    script, *words = shlex.split(command.replace("$curriculum", "dr").replace("$seed", "3"))
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    args = tyro.cli(module.Args, args=words)
    for name, value in zip(words, words[1:]):
        if name.startswith("--") and not value.startswith("--"):
            found = getattr(args, name[2:].replace("-", "_"))
            assert str(found) == value or float(found) == float(value)


@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmarks_start(command):
    script = ROOT / shlex.split(command)[0]
    help_page = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, timeout=120)
    assert help_page.returncode == 0 and "usage" in help_page.stdout


def test_copies_are_listed():
    command = [sys.executable, ROOT / "scripts" / "sync_copies.py", "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "curricula/plr.py:PrioritizedLevelReplay" in listed and "algos/ppo_plr.py" in listed


def test_files_and_links_exist():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):  # a heading of this page
            headings = re.findall(r"^#+ (.*)$", README, re.M)
            assert target[1:] in {re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings}
        elif not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_sync_block_runs():
    names = {}
    exec(BLOCKS[0], names)
    envs, curriculum = names["envs"], names["curriculum"]
    with contextlib.closing(envs), curriculum:
        envs.reset(seed=1)
        for _ in range(130):  # truncates at 100 steps
            envs.step(np.zeros(4, int))
        tasks = envs.reset()[1]["task"]
    assert len(tasks) == 4 and ((tasks >= 0) & (tasks < 200)).all()
    assert curriculum.curriculum._trials.sum() >= 4


def test_rollout_block_runs():
    levels, rewards = np.zeros((4, 2), int), np.ones((4, 2))
    dones = np.zeros((5, 2), bool)
    dones[4] = True
    names = {"levels": levels, "rewards": rewards, "values": np.zeros((5, 2)), "dones": dones}
    exec(BLOCKS[1], names)
    assert not names["plr"].is_unseen(0) and names["plr"].is_unseen(1) and 0 <= names["level"] < 200


def test_every_public_name_stands_in_the_readme():
    assert not [name for name in curricula.__all__ if f"`{name}`" not in README and name not in BLOCKS[0]]


def test_documented_tags_are_those_that_runs_write():
    """Every tag of the table stands in one of the scripts or in the curriculum's metrics."""
    code = "".join(path.read_text() for path in (*(ROOT / "algos").glob("*.py"), ROOT / "curricula" / "plr.py"))
    groups = "charts|losses|curriculum|eval|perf|popart|async|replay|tasks|league"
    rows = [line for line in README.splitlines() if re.match(rf"\| `({groups})/", line)]
    assert len(rows) >= 16
    for row in rows:
        for tag in re.findall(r"`([\w/.<>]+)`", row.split("|")[1]):
            name = re.sub("<.*>", "", tag.split("/")[-1]).removesuffix("_s")
            assert name == "..." or name in code, tag
