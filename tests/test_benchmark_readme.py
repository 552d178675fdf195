"""What benchmark/README.md tells people to type works."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.runner import suite

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmark"
README = (FOLDER / "README.md").read_text()
COMMANDS = re.findall(r"(?:scripts/run(?: --extra \w+)*|python) ([\w/]+\.py)([^`#\n|]*)", README)
BLOCKS = re.findall(r"```toml\n(.*?)```", README, re.S)


@pytest.mark.parametrize("script", sorted({script for script, _ in COMMANDS}))
def test_programs_start(script):
    shown = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True, timeout=120)
    if "No module named" in shown.stderr:
        pytest.skip(shown.stderr.splitlines()[-1])
    assert shown.returncode == 0, shown.stderr
    flags = {flag for name, words in COMMANDS if name == script for flag in re.findall(r"--[\w-]+", words)}
    assert all(flag in shown.stdout for flag in flags) or script == "benchmark/run.py"


def test_the_runner_takes_its_commands():
    commands = [words.split() for script, words in COMMANDS if script == "benchmark/run.py"]
    assert len(commands) >= 5
    for verb, *words in commands:
        name, flags = next((word for word in words if not word.startswith("--")), "SUITE"), words
        shown = subprocess.run([sys.executable, FOLDER / "run.py", verb, "--help"], capture_output=True, text=True)
        assert shown.returncode == 0 and all(flag in shown.stdout for flag in flags if flag.startswith("--")), verb
        assert name == "SUITE" or (FOLDER / "suites" / f"{name}.toml").is_file()


def test_every_suite_and_room_has_its_place():
    suites = {path.stem for path in (FOLDER / "suites").glob("*.toml")}
    assert suites <= set(re.findall(r"`(\w+)`", README[README.index("Shipped:") : README.index("## Reports")]))
    programs = {script for script, _ in COMMANDS}
    for room in ("speed", "figures"):
        assert f"{room}/  " in README
        assert {f"benchmark/{room}/{path.name}" for path in (FOLDER / room).glob("*.py")} <= programs


def test_files_and_links_exist():
    for target in re.findall(r"\]\(([^)]+)\)", README):
        if target.startswith("#"):  # a heading of this page
            headings = re.findall(r"^#+ (.*)$", README, re.M)
            assert target[1:] in {re.sub(r"[^a-z0-9 _-]", "", h.lower()).replace(" ", "-") for h in headings}
        elif not target.startswith("http"):
            assert (FOLDER / target).exists(), target


def test_the_suite_of_the_readme_can_be_run(tmp_path):
    path = tmp_path / "my_suite.toml"
    path.write_text(BLOCKS[0])
    runs = suite.load(path).runs
    assert len(runs) == 10 and suite.check(runs) == {}


def test_the_smoke_suite_takes_the_table_of_the_readme(tmp_path):
    path = tmp_path / "smoke.toml"
    table = BLOCKS[1].replace("algos/my_method.py", "algos/ppo.py")
    path.write_text((FOLDER / "suites" / "smoke.toml").read_text() + table)
    runs = [run for run in suite.load(path).runs if run.algorithm == "my_method"]
    assert len(runs) == 1 and suite.check(runs) == {}
