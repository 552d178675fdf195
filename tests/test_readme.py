"""What the READMEs tell people to type works."""

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
READMES = {
    path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("[!.]*/README.md"))
}
TEXT = "\n".join(READMES.values())
COMMANDS = sorted(set(re.findall(r"scripts/run (algos/\w+\.py[^`#\n|]*)", TEXT)))
PROGRAM = (
    r"(?:scripts/run(?: --extra \w+)*|python) ((?:benchmark(?:/\w+)?|scripts|scripts/integrations)/\w+\.py[^`#\n|]*)"
)
PROGRAMS = sorted({shlex.split(command)[0] for command in re.findall(PROGRAM, TEXT)})
BLOCKS = [(name, block) for name, text in READMES.items() for block in re.findall(r"```python\n(.*?)```", text, re.S)]


def test_the_readmes_have_commands():
    assert len(COMMANDS) >= 3 and len(PROGRAMS) >= 3 and len(BLOCKS) >= 5
    assert {"README.md", "algos/README.md", "benchmark/README.md", "curricula/README.md"} == READMES.keys()


def test_the_door_is_short():
    assert len(READMES["README.md"].splitlines()) <= 200


@pytest.mark.parametrize("script", sorted((ROOT / "algos").glob("*.py")), ids=lambda script: script.name)
def test_every_script_has_its_row_and_its_section(script):
    door, room = READMES["README.md"], READMES["algos/README.md"]
    assert f"| [`{script.name}`](algos/{script.name}) |" in door
    assert f"scripts/run algos/{script.name} " in door or f" algos/{script.name} --" in door
    assert re.search(rf"^### .*\n\n`{re.escape(script.name)}`", room, re.M)
    pip = room[room.index("## Copy one") : room.index("## Anatomy")]
    assert f"`{script.name}`" in pip


def test_the_extras_are_those_that_there_are():
    extras = {path.stem for path in (ROOT / "scripts" / "extras").glob("*.txt")}
    (sentence,) = re.findall(r"Optional packages are extras(.*?);", READMES["README.md"], re.S)
    assert set(re.findall(r"`(\w+)`", sentence)) == extras
    assert set(re.findall(r"--extra (\w+)", TEXT)) <= extras


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse_with_the_script_s_own_arguments(command):
    script, *words = shlex.split(command.replace("$curriculum", "dr").replace("$seed", "3"))
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    args = tyro.cli(module.Args, args=words)
    for name, value in zip(words, words[1:]):
        if name.startswith("--") and not value.startswith("--"):
            found = getattr(args, name[2:].replace("-", "_"))
            if isinstance(found, tuple):
                assert value in found
            else:
                assert str(found) == value or float(found) == float(value)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_start(program):
    help_page = subprocess.run([sys.executable, ROOT / program, "--help"], capture_output=True, text=True, timeout=120)
    assert help_page.returncode == 0 and "usage" in help_page.stdout


def test_copies_are_listed():
    command = [sys.executable, ROOT / "scripts" / "sync_copies.py", "--list"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "curricula/plr.py:PrioritizedLevelReplay" in listed and "algos/ppo_plr.py" in listed


def headings(text):
    """GitHub's names of a page's headings."""
    return {re.sub(r"[^a-z0-9 _-]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("name", READMES)
def test_files_and_links_exist(name):
    folder = (ROOT / name).parent
    for target in re.findall(r"\]\(([^)]+)\)", READMES[name]):
        if target.startswith("http"):
            continue
        path, _, heading = target.partition("#")
        found = folder / path if path else ROOT / name
        assert found.exists(), target
        assert not heading or heading in headings(found.read_text()), target


# ---- Blocks of Python: what the text around them says is there, and what they leave ----


def rollout():
    dones = np.zeros((5, 2), bool)
    dones[4] = True
    return {"levels": np.zeros((4, 2), int), "rewards": np.ones((4, 2)), "values": np.zeros((5, 2)), "dones": dones}


def transitions():
    envs, zero, false = np.arange(4), np.zeros((4, 3)), np.zeros(4, bool)
    row = {"envs": envs, "obs": np.ones((4, 8), np.float32), "actions": envs, "rewards": zero, "betas": zero}
    row |= {"next_obs": np.zeros((4, 8), np.float32), "next_betas": zero + 1, "terminated": false, "truncated": ~false}
    return row | {"td_errors": np.ones((32, 3))}


def check_sync(names):
    envs, curriculum = names["envs"], names["curriculum"]
    with contextlib.closing(envs), curriculum:
        envs.reset(seed=1)
        for _ in range(130):  # truncates at 100 steps
            envs.step(np.zeros(4, int))
        tasks = envs.reset()[1]["task"]
    assert len(tasks) == 4 and ((tasks >= 0) & (tasks < 200)).all()
    assert curriculum.curriculum._trials.sum() >= 4


def check_rollout(names):
    assert not names["plr"].is_unseen(0) and names["plr"].is_unseen(1) and 0 <= names["level"] < 200


def check_own(names):
    returns, curriculum = names["curriculum"].returns, names["curriculum"].curriculum
    assert (returns > 0).sum() >= 3 and set(names["obs"]) == {"observation", "goal"} and names["obs"]["goal"].sum() == 1
    again = names["WorstFirst"](names["task_space"])
    again.load_state_dict(curriculum.state_dict())
    assert again.sample(20) == curriculum.sample(20)


def check_league(names):
    assert names["opponent"] in (-1, 0) and (names["rival"] == names["policy"]).all()
    assert names["league"].metrics()["games"] == (names["opponent"] == 0)


def check_replay(names):
    assert len(names["replay"]) == 4 and names["replay"].num_achieving == 4
    assert names["batch"]["reward"].shape == (32, 3) and (names["batch"]["obs"] == 1).all()


@pytest.mark.parametrize(
    "number, block",
    list(enumerate(block for _, block in BLOCKS)),
    ids=[f"{name}:{i}" for i, (name, _) in enumerate(BLOCKS)],
)
def test_blocks_run(number, block):
    kinds = {
        "make_env": (dict, check_sync),
        "plr = ": (rollout, check_rollout),
        "class WorstFirst": (dict, check_own),
        "league = ": (lambda: {"policy": np.arange(3.0)}, check_league),
        "replay = ": (transitions, check_replay),
    }
    ((given, check),) = [kind for text, kind in kinds.items() if text in block]  # every block has its check
    names = given()
    exec(block, names)
    check(names)


def test_every_public_name_stands_in_the_readme():
    text = READMES["curricula/README.md"]
    assert not [name for name in curricula.__all__ if f"`{name}`" not in text and f"import {name}" not in text]


def test_documented_tags_are_those_that_runs_write():
    """Every tag of the table stands in one of the scripts or in the curriculum's metrics."""
    code = "".join(path.read_text() for path in (*(ROOT / "algos").glob("*.py"), ROOT / "curricula" / "plr.py"))
    groups = "charts|losses|curriculum|eval|perf|popart|async|replay|tasks|league|evolution|pbt|genes"
    rows = [line for line in TEXT.splitlines() if re.match(rf"\| `({groups})/", line)]
    assert len(rows) >= 16
    for row in rows:
        for tag in re.findall(r"`([\w/.<>]+)`", row.split("|")[1]):
            name = re.sub("<.*>", "", tag.split("/")[-1]).removesuffix("_s")
            assert name == "..." or name in code, tag
