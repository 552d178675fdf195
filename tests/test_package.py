"""`pip install` of the checkout gives `curricula`, with what it needs and nothing else."""

import json
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
NEEDED = {"cloudpickle", "gymnasium", "numpy", "sortedcontainers"}
PROGRAM = """
import importlib, importlib.metadata, json, pkgutil, sys
import curricula
for module in pkgutil.iter_modules(curricula.__path__):
    importlib.import_module(f"curricula.{module.name}")
requires = importlib.metadata.requires("coursework")
level = curricula.PrioritizedLevelReplay(20, seed=1).sample()[0]
sync = curricula.make_multiprocessing_curriculum(curricula.DomainRandomization(20, seed=1))
env = curricula.TaskWrapper(__import__("gymnasium").make("CartPole-v1"))
env = curricula.GymnasiumSyncWrapper(env, curricula.TaskSpace(20), sync.components)
task = env.reset()[1]["task"]
env.close()
sync.stop()
print(json.dumps({"file": curricula.__file__, "requires": requires, "level": level, "task": task}))
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def with_needs(name):
    """The distribution and those that it needs."""
    requirements = [Requirement(text) for text in distribution(name).requires or ()]
    needs = [r.name for r in requirements if not r.marker or r.marker.evaluate({"extra": ""})]
    return {name}.union(*map(with_needs, needs))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the checkout, which it would leave its build folder in."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "runs", "results", "build", "__pycache__")
    shutil.copytree(ROOT, source, ignore=ignored)
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_package_alone(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {f"curricula/{path.name}" for path in (ROOT / "curricula").glob("*.py")}
    assert {name for name in names if ".dist-info/" not in name} == modules
    assert any(name.endswith("LICENSE") for name in names)


def test_it_is_imported_in_a_fresh_environment_with_its_four_dependencies(wheel, tmp_path):
    venv, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    run(*PIP, "--python", venv / "bin/python", "install", "--no-deps", wheel)
    (site,) = venv.glob("lib/python3*/site-packages")
    for name in set().union(*map(with_needs, NEEDED)):  # as they are here, instead of a download
        found = distribution(name)
        for top in {path.parts[0] for path in found.files if path.parts[0] not in ("..", "__pycache__")}:
            (site / top).symlink_to(found.locate_file(top))
    said = json.loads(run(venv / "bin/python", "-I", "-c", PROGRAM, cwd=empty))
    assert Path(said["file"]).is_relative_to(venv) and 0 <= said["level"] < 20 and 0 <= said["task"] < 20
    assert {Requirement(text).name for text in said["requires"]} == NEEDED
