"""scripts/run and the set-up of .venv, in a copy of the tree whose .venv/bin/python only notes how it is called."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FAKE_PYTHON = """#!/usr/bin/env bash
echo "$*" >>"{log}"
if [[ "$*" == *"pip install"* ]]; then
  [[ ! -e "{root}/slow" ]] || sleep 0.3
  [[ ! -e "{root}/broken" || "$*" != *no-deps* ]] || exit 7
fi
"""


class Tree:
    """A copy of what the set-up needs."""

    def __init__(self, root):
        self.root, self.log = root, root / "calls.log"
        (root / ".venv/bin").mkdir(parents=True)
        (root / "scripts").mkdir()
        shutil.copytree(ROOT / "scripts/extras", root / "scripts/extras")
        for name in ("requirements.txt", "scripts/requirements-nodeps.txt", "scripts/run", "scripts/setup.sh"):
            shutil.copy(ROOT / name, root / name)
        self.executable(root / ".venv/bin/python", FAKE_PYTHON.format(log=self.log, root=root))
        (root / "hello.py").touch()

    def executable(self, path, text):
        path.write_text(text)
        path.chmod(0o755)

    def start(self, *arguments, **options):
        command = [self.root / "scripts/run", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.root, stdout=pipe, stderr=pipe, text=True, **options)

    def run(self, *arguments, **options):
        """Exit code, output, errors."""
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def calls(self):
        """What .venv/bin/python was called with since the last time; the check of its version left out."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.replace(f"{self.root}/", "") for line in lines if not line.startswith("-c ")]


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


PIP = "-m pip install -qq --disable-pip-version-check --no-warn-conflicts"
TORCH = (ROOT / "requirements.txt").read_text().split("torch==")[1].split()[0]
CORE = [
    f"{PIP} torch=={TORCH}",
    f"{PIP} -rrequirements.txt",
    f"{PIP} --no-deps -r scripts/requirements-nodeps.txt",
]


@pytest.mark.parametrize("name", ["a & b", "100%", "a'b", "["])
def test_a_checkout_may_have_any_name(tmp_path, name):
    (tmp_path / name).mkdir()
    tree = Tree(tmp_path / name)
    assert tree.run("--extra", "ray", "hello.py", "1")[0] == 0
    assert tree.calls() == [CORE[0], f"{PIP} -rrequirements.txt -rscripts/extras/ray.txt", CORE[2], "hello.py 1"]
    assert tree.run("hello.py", "2")[0] == 0 and tree.calls() == ["hello.py 2"]


@pytest.mark.parametrize("extra", ["../requirements-nodeps", "./ray", "", "ray.txt"])
def test_an_extra_is_a_name_and_no_path(tree, extra):
    code, _, err = tree.run("--extra", extra, "hello.py")
    assert code == 2 and f"there is no extra '{extra}'; choose from: atari " in err and tree.calls() == []


def test_usage(tree):
    code, out, err = tree.run("--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: scripts/run [--extra NAME]... SCRIPT [ARGUMENTS]...")
    for arguments, says in {
        (): "error: no script given. usage:",
        ("--extra", "ray"): "error: no script given. usage:",
        ("nothing.py",): f"error: there is no script nothing.py in {tree.root}. usage:",
        ("--extras", "ray", "hello.py"): "error: --extras is not an option of scripts/run. usage:",
        ("--extra",): "usage:",
    }.items():
        code, out, err = tree.run(*arguments)
        assert code != 0
        assert out == ""
        assert says in err
        assert err.count("\n") == 1
    assert tree.calls() == []


def test_an_unknown_extra_is_one_line_that_lists_those_there_are(tree):
    (tree.root / "scripts/extras").joinpath("zoo.txt").write_text("zoo==1\n")
    code, out, err = tree.run("--extra", "rya", "hello.py")
    assert (code, out) == (2, "")
    known = " ".join(sorted(path.stem for path in (tree.root / "scripts/extras").iterdir()))
    assert "zoo" in known and err.strip() == "error: there is no extra 'rya'; choose from: " + known
    assert tree.calls() == []


def test_installs_once_then_runs_the_script_at_once(tree):
    code, _, err = tree.run("hello.py", "--env-id", "a b", "--extra", "x")
    assert code == 0
    assert err.splitlines()[0] == f"set-up: 1/3 torch=={TORCH}"
    assert tree.calls() == [*CORE, "hello.py --env-id a b --extra x"]
    assert tree.run("hello.py") == (0, "", "")
    assert tree.calls() == ["hello.py"]


@pytest.mark.parametrize("name", ["requirements.txt", "scripts/requirements-nodeps.txt"])
def test_a_changed_requirement_is_installed(tree, name):
    tree.run("hello.py")
    tree.calls()
    with (tree.root / name).open("a") as file:
        file.write("more==1\n")
    tree.run("hello.py")
    assert tree.calls() == [*CORE, "hello.py"]


def test_an_extra_is_installed_with_the_core_pins_and_remembered(tree):
    tree.run("hello.py")
    tree.calls()
    with_ray = [CORE[0], f"{PIP} -rrequirements.txt -rscripts/extras/ray.txt", CORE[2]]
    tree.run("--extra", "ray", "hello.py")
    assert tree.calls() == [*with_ray, "hello.py"]
    tree.run("hello.py")
    tree.run("--extra", "ray", "hello.py")
    assert tree.calls() == ["hello.py", "hello.py"]
    (tree.root / "requirements.txt").open("a").write("more==1\n")
    tree.run("hello.py")
    assert tree.calls() == [*with_ray, "hello.py"]
    tree.run("--extra", "benchmark", "hello.py")
    assert f"{PIP} -rrequirements.txt -rscripts/extras/benchmark.txt -rscripts/extras/ray.txt" in tree.calls()


def test_a_failed_installation_is_done_again(tree):
    (tree.root / "broken").touch()
    code, *_ = tree.run("hello.py")
    assert code == 7
    assert tree.calls() == CORE  # and the script did not run
    (tree.root / "broken").unlink()
    assert tree.run("hello.py")[0] == 0
    assert tree.calls() == [*CORE, "hello.py"]


def test_a_failed_extra_does_not_pass_for_installed(tree):
    tree.run("hello.py")
    (tree.root / "broken").touch()
    assert tree.run("--extra", "ray", "hello.py")[0] == 7
    (tree.root / "broken").unlink()
    tree.calls()
    tree.run("hello.py")
    assert tree.calls() == [*CORE, "hello.py"]


def test_two_at_once_install_once(tree):
    (tree.root / "slow").touch()
    first = tree.start("hello.py", "1")
    for _ in range(200):
        if tree.log.exists():
            break
        time.sleep(0.02)
    code, _, err = tree.run("hello.py", "2")
    assert first.communicate(timeout=30) and first.returncode == code == 0
    assert err == "set-up: waiting for another set-up of .venv\n"
    assert sorted(tree.calls()) == sorted([*CORE, "hello.py 1", "hello.py 2"])


def test_signals_reach_the_script_and_its_exit_code_comes_back(tree):
    tree.run("hello.py")
    script = "#!/usr/bin/env bash\ntrap 'exit 75' TERM\necho up\nfor _ in {1..200}; do sleep 0.1; done\n"
    tree.executable(tree.root / ".venv/bin/python", script)
    process = tree.start("hello.py")
    assert process.stdout.readline() == "up\n"
    process.terminate()
    process.communicate(timeout=10)
    assert process.returncode == 75


def test_a_missing_python_is_one_line(tree):
    tools = tree.root / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname", "cat", "sort", "sha256sum", "mkdir", "flock", "rm"):
        (tools / tool).symlink_to(shutil.which(tool))
    tree.executable(tools / "python3", "#!/usr/bin/env bash\n[[ $1 == --version ]] && echo Python 3.9.2 || exit 1\n")
    shutil.rmtree(tree.root / ".venv")
    code, out, err = tree.run("hello.py", env={"PATH": str(tools)})
    assert (code, out) == (2, "")
    assert err.startswith("error: Python 3.11 with its venv module is needed, and PATH has Python 3.9.2: install it")
    assert err.count("\n") == 1


def test_a_dead_environment_is_made_anew(tree):
    shutil.rmtree(tree.root / ".venv/bin")
    (tree.root / ".venv/bin").mkdir()
    (tree.root / ".venv/bin/python").symlink_to("/nowhere/python3.11")
    tools, fake = tree.root / "tools", FAKE_PYTHON.format(log=tree.log, root=tree.root)
    tools.mkdir()
    made = '[[ $2 != venv ]] || { mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; }\n'
    tree.executable(tools / "python3.11", fake + made)
    code, _, err = tree.run("hello.py", env=os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"})
    assert (code, err.splitlines()[0]) == (0, f"set-up: making .venv with {tools}/python3.11")
    assert tree.calls() == ["-m venv .venv", *CORE, "hello.py"]


def test_a_newer_python_does_without_procgen(tree):
    """3.13, for which there is no wheel: all else is installed, and one line says what is not."""
    newer = FAKE_PYTHON.format(log=tree.log, root=tree.root) + '[[ $* != *"version_info >= (3, 13)"* ]]\n'
    tree.executable(tree.root / ".venv/bin/python", newer)
    code, _, err = tree.run("hello.py")
    assert code == 0 and tree.calls() == [*CORE[:2], "hello.py"]
    (line,) = [line for line in err.splitlines() if "3/3" in line]
    assert "left out: Procgen has no wheel for Python 3.13" in line and "ppo_plr.py" in line
    assert tree.run("hello.py")[0] == 0 and tree.calls() == ["hello.py"], "and this once"


@pytest.mark.parametrize("version,fits", [((3, 10), 1), ((3, 11), 0), ((3, 12), 0), ((3, 13), 0), ((3, 14), 1)])
def test_the_versions_of_python_that_fit(version, fits):
    text = (ROOT / "scripts/setup.sh").read_text()
    (check,) = re.findall("^fits='import sys; (.*)'$", text, re.M)
    code = f"import sys; sys.version_info = {(*version, 0)}; {check}"
    assert subprocess.run(["python3", "-c", code]).returncode == fits


def test_the_tests_bring_every_extra(tree):
    shutil.copy(ROOT / "scripts/test", tree.root / "scripts/test")
    subprocess.run([tree.root / "scripts/test", "-k", "some"], capture_output=True, check=True, timeout=30)
    calls = tree.calls()
    asked = [word for call in calls for word in call.split() if word.startswith("-rscripts/extras/")]
    assert asked == sorted(f"-rscripts/extras/{path.name}" for path in (ROOT / "scripts/extras").iterdir())
    assert calls[-1] == "-m pytest -k some"
