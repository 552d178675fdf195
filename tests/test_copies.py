"""The marked copies in algos/ are the same as their sources, and scripts/sync_copies.py finds it when they are not."""

import subprocess
from pathlib import Path

import pytest

from scripts.sync_copies import FOLDERS, MarkerError, Repository, main, rename

ROOT = Path(__file__).parents[1]
REPOSITORY = Repository(ROOT)


@pytest.mark.parametrize("copy", REPOSITORY.copies, ids=str)
def test_copy_is_the_same_as_its_source_and_has_the_globals_it_reads(copy):
    assert REPOSITORY.drift(copy) == ""
    assert REPOSITORY.missing_globals(copy) == ""


@pytest.mark.parametrize("form", REPOSITORY.lean, ids=str)
def test_lean_form_has_a_test_beside_its_full_form(form):
    assert REPOSITORY.untested(form) == ""


def test_every_folder_of_code_is_looked_through():
    shown = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [Path(path) for path in shown.stdout.split("\0") if path]
    programs = {path for path in paths if path.name == "code.py" and (ROOT / path).with_name("config.json").exists()}
    assert {str(path.parent) for path in {*paths} - programs} <= set(FOLDERS), "the program of a run is what ran"


def test_repository_has_copies_and_no_unmarked_namesake():
    assert REPOSITORY.namesakes() == REPOSITORY.stale_marks() == []
    assert REPOSITORY.copies or not (ROOT / "algos/ppo_plr.py").exists()


# ---- on small trees --------------------------------------------------------------------------------------------------

PLR = '''\
import numpy as np


def rank_weights(scores, temperature):
    return np.argsort(scores) ** temperature


@staticmethod
def decorated():
    return 1


class Replay:
    """Docs."""

    def update(self, scores):
        self.scores.update(scores)  # another object's update
        return rank_weights(scores, 1)

    def copy(self):
        return Replay()
'''

PPO = """\
import numpy as np


def train(args):
    if args:
        # region: seeding
        seeds = np.random.SeedSequence(args)

        for seed in seeds.spawn(3):
            print(seed)
        # endregion: seeding
    return seeds
"""

RANK, REPLAY = PLR[PLR.index("def rank") : PLR.index("\n\n@static")], PLR[PLR.index("class Replay") :]
SEEDING = "\n".join(line[8:] for line in PPO.split("\n")[6:10])
MARK = "# Copied from curricula/plr.py:"
COPIES = f"import numpy as np\n\n\n{MARK}rank_weights\n{RANK}\n\n{MARK}Replay\n{REPLAY}"


@pytest.fixture
def tree(tmp_path):
    """A function that writes algos/new.py beside two sources, and returns the folder."""

    def write(new="", **sources):
        for path, text in {"curricula/plr.py": PLR, "algos/ppo.py": PPO, "algos/new.py": new}.items():
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_text(sources.get(Path(path).stem, text))
        return tmp_path

    return write


def run(capsys, root, *options):
    """Exit code, and all that was printed."""
    code = main(["--root", str(root), *options])
    return code, "".join(capsys.readouterr())


def commit(root):
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *command], cwd=root, check=True)


def test_good_copies_pass_and_are_listed(tree, capsys):
    root = tree(COPIES)
    assert run(capsys, root) == (0, "2 marked copies, 0 lean forms, 0 problems\n")
    assert run(capsys, root, "--list") == (
        0,
        "curricula/plr.py:Replay -> algos/new.py:Replay\ncurricula/plr.py:rank_weights -> algos/new.py:rank_weights\n",
    )


def test_drift_is_shown_with_file_and_line_and_fixed(tree, capsys):
    drifted = COPIES.replace("** temperature", "* temperature")
    root = tree(drifted)
    code, out = run(capsys, root)
    assert code == 1
    assert "--- algos/new.py:5\n+++ curricula/plr.py:4\n" in out
    assert "-    return np.argsort(scores) * temperature\n+    return np.argsort(scores) ** temperature" in out
    assert (root / "algos/new.py").read_text() == drifted
    code, out = run(capsys, root, "--fix")
    assert (code, out.splitlines()[0]) == (0, "algos/new.py:rank_weights rewritten from curricula/plr.py")
    assert (root / "algos/new.py").read_text() == COPIES
    assert run(capsys, root, "--fix") == (0, "2 marked copies, 0 lean forms, 0 problems\n")


def test_fix_rewrites_several_blocks_of_one_file_bottom_up(tree, capsys):
    root = tree(
        COPIES,
        plr=PLR.replace('"""Docs."""', '"""Docs."""\n\n    size = 3').replace("    return np", "\n    return np"),
    )
    assert run(capsys, root, "--fix")[0] == 0
    new, source = (root / "algos/new.py").read_text(), (root / "curricula/plr.py").read_text()
    assert "size = 3" in new
    assert new.replace(f"{MARK}rank_weights\n", "").replace(f"{MARK}Replay\n", "") == source.replace(
        source[source.index("@static") : source.index("class Replay")], ""
    )


def test_a_rename_reaches_the_name_alone(tree, capsys):
    renamed = REPLAY.replace("class Replay", "class Levels").replace("return Replay()", "return Levels()")
    imports = "from x import rank_weights\n\n\n"
    root = tree(f"{imports}{MARK}Replay with Replay->Levels\n{renamed}")
    assert run(capsys, root)[0] == 0
    text = 'def f(n):  # f\n    "f"\n    return f(n - 1) + x.f(n) + ff + "f"\n'
    assert rename(text, "f", "g") == 'def g(n):  # f\n    "f"\n    return g(n - 1) + x.f(n) + ff + "f"\n'
    tree(f"{imports}{MARK}Replay with Replay->Levels\n{renamed.replace('Docs', 'Other docs')}")
    assert run(capsys, root, "--adopt", "algos/new.py:Levels")[0] == 0
    assert (root / "curricula/plr.py").read_text() == PLR.replace("Docs", "Other docs")


def test_methods_decorators_and_other_indentation(tree, capsys):
    decorated = "@staticmethod\ndef decorated():\n    return 1\n"
    inner = "".join(f"    {line}\n" for line in decorated.splitlines())
    method = REPLAY[REPLAY.index("    def copy") :]
    new = f"class Mine:\n    {MARK}decorated\n{inner}\n    {MARK}Replay.copy\n{method}"
    root = tree(new + "\n\nReplay = Mine\n")
    assert run(capsys, root) == (0, "2 marked copies, 0 lean forms, 0 problems\n")
    tree(new.replace("return 1", "return 2") + "\n\nReplay = Mine\n")
    assert run(capsys, root)[0] == 1
    assert run(capsys, root, "--fix")[0] == 0
    assert (root / "algos/new.py").read_text() == new + "\n\nReplay = Mine\n"


def region(body):
    body = "".join(f"    {line}\n" if line else "\n" for line in body.split("\n"))
    start = "import numpy as np\n\n\ndef train(args):\n    # Copied from algos/ppo.py:region(seeding)\n"
    return f"{start}{body}    # End of copy\n"


def test_regions(tree, capsys):
    root = tree(region(SEEDING))
    assert run(capsys, root) == (0, "1 marked copies, 0 lean forms, 0 problems\n")
    tree(region(SEEDING.replace("spawn(3)", "spawn(4)")))
    code, out = run(capsys, root)
    assert code == 1
    assert "--- algos/new.py:6\n+++ algos/ppo.py:7\n" in out
    assert run(capsys, root, "--adopt", "algos/new.py:region(seeding)")[0] == 0
    assert (root / "algos/ppo.py").read_text() == PPO.replace("spawn(3)", "spawn(4)")
    tree(region("pass"))
    assert run(capsys, root, "--fix")[0] == 0
    assert (root / "algos/new.py").read_text() == region(SEEDING)


def test_adopt_makes_the_copy_the_source_and_reports_the_other_copies(tree, capsys):
    root = tree(COPIES.replace("** temperature", "** (1 / temperature)"))
    (root / "algos/third.py").write_text(COPIES)
    code, out = run(capsys, root, "--adopt", "algos/new.py:rank_weights")
    assert code == 1
    assert "algos/third.py:5" in out
    assert "algos/new.py:5" not in out
    assert (root / "curricula/plr.py").read_text() == PLR.replace("** temperature", "** (1 / temperature)")
    assert run(capsys, root, "--fix")[0] == 0
    assert run(capsys, root, "--adopt", "algos/new.py:train")[0] == 2


def test_uncommitted_edits_are_refused_unless_forced(tree, capsys):
    root = tree(COPIES)
    commit(root)
    edited = COPIES.replace("** temperature", "** 2")
    (root / "algos/new.py").chmod(0o751)
    tree(edited, plr=PLR.replace("Docs", "New docs"))
    code, out = run(capsys, root, "--fix")
    assert code == 2
    assert "algos/new.py:5: rank_weights has uncommitted edits" in out
    assert (root / "algos/new.py").read_text() == edited  # the other copy, which could be rewritten, is not either
    assert run(capsys, root, "--fix", "--force")[0] == 0
    assert (root / "algos/new.py").read_text() == COPIES.replace("Docs", "New docs")
    assert (root / "algos/new.py").stat().st_mode & 0o777 == 0o751


def test_uncommitted_edits_of_a_region_are_refused(tree, capsys):
    root = tree(region(SEEDING))
    commit(root)
    tree(region(SEEDING), ppo=PPO.replace("spawn(3)", "spawn(4)"))
    assert run(capsys, root, "--fix")[0] == 0
    tree(region("pass"))
    code, out = run(capsys, root, "--fix")
    assert code == 2
    assert "algos/new.py:6: region(seeding) has uncommitted edits" in out


def test_edits_elsewhere_and_new_files_are_not_refused(tree, capsys):
    root = tree(COPIES)
    commit(root)
    tree("EDIT = 1\n" + COPIES, plr=PLR.replace("Docs", "New docs"))
    (root / "algos/third.py").write_text(COPIES.replace("** temperature", "** 2"))
    assert run(capsys, root, "--fix")[0] == 0
    assert (root / "algos/new.py").read_text() == "EDIT = 1\n" + COPIES.replace("Docs", "New docs")
    assert (root / "algos/third.py").read_text() == COPIES.replace("Docs", "New docs")


def test_adopt_refuses_over_uncommitted_edits_of_the_source(tree, capsys):
    root = tree(COPIES)
    commit(root)
    tree(COPIES.replace("Docs", "One"), plr=PLR.replace("Docs", "Two"))
    code, out = run(capsys, root, "--adopt", "algos/new.py:Replay")
    assert code == 2
    assert "curricula/plr.py:13: Replay has uncommitted edits" in out


@pytest.mark.parametrize(
    "marker, says",
    {
        "# copied from curricula/plr.py:rank_weights": "is no marker",
        "# Copied From curricula/plr.py:rank_weights": "is no marker",
        "#Copied from curricula/plr.py:rank_weights": "is no marker",
        "# Copied from curricula/plr.py rank_weights": "is no marker",
        "# Copied from: curricula/plr.py:rank_weights": "is no marker",
        "# Copied from curricula.plr:rank_weights": "is no marker",
        "# Copied from curricula/plr.py:rank_weights with a": "is no marker",
        "# Copied from curricula/lpr.py:rank_weights": "curricula/lpr.py:rank_weights: there is no such file",
        "# Copied from curricula/plr.py:ranks with ranks->rank_weights": "the file has 0 of that name",
        "# Copied from curricula/plr.py:decorated": "say `with decorated->rank_weights`",
        "# Copied from curricula/plr.py:rank_weights with rank->weights": "say `with rank_weights->rank_weights`",
        "# Copied from curricula/plr.py:rank_weights\n": "no decorator, def or class starts on the next line",
        "# Copied from algos/ppo.py:region(seeding)": "has no end",
        "# Copied from algos/ppo.py:region(seeding) with a->b": "`with` renames a def or class only",
        "# Lean form of algos/ppo.py:region(seeding)": "a lean form is a def or class",
        "# Lean form of curricula/plr.py:rank_weight": "say `with rank_weight->rank_weights`",
        "# Lean form of curricula/plr.py:rank with rank->rank_weights": "the file has 0 of that name",
        "# Lean form of curricula/lpr.py:rank_weights": "curricula/lpr.py:rank_weights: there is no such file",
        "# Lean form of curricula/plr.py:rank_weights\n": "no decorator, def or class starts on the next line",
        "# lean form of curricula/plr.py:rank_weights": "is no marker",
        "# Lean form of PrioritizedLevelReplay": "is no marker",
        "# Copied from algos/ppo.py:region(seeding)\n# Copied from curricula/plr.py:rank_weights": "above has no `# E",
        "# region a\n# region:b": "is no marker",
        "# End of copy": "ends no copy of a region",
        "# region: a": "region(a) has no end",
        "# endregion: a": "must alternate",
        "# Region: a": "is no marker",
        "x = 1  # Copied from curricula/plr.py:rank_weights": "must stand on a line of its own",
    }.items(),
)
def test_a_bad_marker_is_an_error(tree, capsys, marker, says):
    code, out = run(capsys, tree(f"import numpy as np\n\n\n{marker}\n{RANK}"))
    assert code == 2
    assert out.startswith("error: algos/new.py")
    assert says in out
    assert out.count("\n") == 1


def test_markers_in_strings_are_text(tree, capsys):
    assert run(capsys, tree('"""\n# copied from nowhere\n"""\n')) == (0, "0 marked copies, 0 lean forms, 0 problems\n")


def test_a_copy_of_a_copy_is_an_error(tree, capsys):
    root = tree(COPIES)
    (root / "algos/third.py").write_text(COPIES.replace("curricula/plr.py:R", "algos/new.py:R"))
    code, out = run(capsys, root)
    assert code == 2
    assert (
        "algos/third.py:9: algos/new.py:Replay is, holds or lies in a copy itself: name the source, curricula/plr"
        in out
    )
    method = REPLAY[REPLAY.index("    def copy") :]
    (root / "algos/third.py").write_text(f"class A:\n    # Copied from algos/new.py:Replay.copy\n{method}")
    assert run(capsys, root)[0] == 2


def test_a_name_defined_twice_is_no_source(tree, capsys):
    code, out = run(capsys, tree(COPIES, plr=PLR + "\n\n" + RANK))
    assert code == 2
    assert "the file has 2 of that name" in out


def test_a_class_that_lost_its_marker_is_found(tree, capsys):
    code, out = run(capsys, tree(COPIES.replace(f"{MARK}Replay\n", "")))
    assert code == 1
    assert "algos/new.py:9: class Replay is in curricula/plr.py too: mark it as its copy or lean form" in out


LEAN = "# Lean form of curricula/plr.py:Replay{}\nclass {}:\n    def update(self, scores):\n        pass\n"
LEAN_TEST = 'import pytest\n\n\n@pytest.mark.lean("algos/new.py:{}")\n{} test_lean_new():\n    pass\n'


@pytest.mark.parametrize("rename, name", [("", "Replay"), (" with Replay->Levels", "Levels")])
def test_a_lean_form_needs_a_test_that_names_it(tree, capsys, rename, name):
    root = tree(LEAN.format(rename, name))
    missing = f'algos/new.py:2: tests/test_lean.py has no test marked @pytest.mark.lean("algos/new.py:{name}")'
    assert run(capsys, root)[0] == 1
    (root / "tests").mkdir()
    for text in ("", LEAN_TEST.format("Other", "def"), LEAN_TEST.format(name, "class"), f"# algos/new.py:{name}\n"):
        (root / "tests/test_lean.py").write_text(text)
        code, out = run(capsys, root)
        assert code == 1
        assert missing in out
        assert "in a diff" not in out
    (root / "tests/test_lean.py").write_text(LEAN_TEST.format(name, "def"))
    assert run(capsys, root) == (0, "0 marked copies, 1 lean forms, 0 problems\n")
    assert run(capsys, root, "--list") == (0, f"curricula/plr.py:Replay -> algos/new.py:{name} (lean)\n")


def test_a_mark_for_a_lean_form_that_is_gone_is_found(tree, capsys):
    root = tree(LEAN.format("", "Replay"))
    (root / "tests").mkdir()
    marked = LEAN_TEST.format('Replay", "algos/gone.py:Replay', "def")
    (root / "tests/test_lean.py").write_text(marked)
    code, out = run(capsys, root)
    assert code == 1
    assert "tests/test_lean.py: @pytest.mark.lean: 'algos/gone.py:Replay' is no lean form" in out
    assert "1 lean forms, 1 problems" in out


def test_a_lean_form_may_be_the_source_of_exact_copies(tree, capsys):
    root = tree(LEAN.format("", "Replay"))
    (root / "tests").mkdir()
    (root / "tests/test_lean.py").write_text(LEAN_TEST.format("Replay", "def"))
    copy = LEAN.format("", "Replay").replace("Lean form of curricula/plr.py", "Copied from algos/new.py")
    (root / "algos/third.py").write_text(copy)
    assert run(capsys, root) == (0, "1 marked copies, 1 lean forms, 0 problems\n")
    (root / "algos/third.py").write_text(copy.replace("pass", "return 1"))
    assert run(capsys, root)[0] == 1
    assert run(capsys, root, "--fix") == (
        0,
        "algos/third.py:Replay rewritten from algos/new.py\n1 marked copies, 1 lean forms, 0 problems\n",
    )


def test_a_missing_global_is_named(tree, capsys):
    code, out = run(capsys, tree(f"{MARK}Replay\n{REPLAY}"))
    assert code == 1
    assert "algos/new.py:2: Replay needs rank_weights: import or copy it too" in out
    code, out = run(capsys, tree(f"{MARK}rank_weights\n{RANK}"))
    assert code == 1
    assert "rank_weights needs np:" in out
    code, out = run(
        capsys, tree(region(SEEDING).replace("train(args)", "train(arguments)").replace("numpy as", "numpy as n,"))
    )
    assert code == 1
    assert "region(seeding) needs args:" in out


def test_only_names_of_the_module_count_as_there_and_only_reads_of_the_copy_as_needed(tree, capsys):
    source = "def f():\n    return A, B, C\n"
    other = "def g():\n    global A\n    A = 1\n    B = 2\n    return B, GONE\n\n\nclass D:\n    C = 3\n\n\n"
    code, out = run(capsys, tree(f"{other}{MARK}f\n{source}", plr=source))
    assert code == 1
    assert "algos/new.py:13: f needs B, C: import" in out


SCOPED = '''\
class Replay(Base):
    """Docs."""

    size = 3
    sizes: list = [size]

    def update(self, a, *b, c=DEFAULT, **d) -> Result:
        import math
        e, outer = [f for f in a if f], 0

        def inner(g=a):
            nonlocal outer
            outer = len(b) + math.pi + __file__
            return lambda h: h + outer + g + DEEP

        try:
            with a as i:
                del e
        except ValueError as j:
            raise j from None
        if (k := c) and i:
            local: Unread = k
        return inner, d, local, self.GONE
'''


def test_scoping_of_globals(tree, capsys):
    root = tree(f"{MARK}Replay\n{SCOPED}", plr=SCOPED)
    code, out = run(capsys, root)
    assert code == 1
    assert "Replay needs Base, DEEP, DEFAULT, Result: import" in out
    bound = "import Base\nfrom x import y as DEEP\n\nDEFAULT: int = 1\nif DEFAULT:\n    class Result: ...\n\n\n"
    tree(f"{bound}{MARK}Replay\n{SCOPED}", plr=SCOPED)
    assert run(capsys, root)[0] == 0


def test_a_string_at_the_margin_cannot_change_its_indentation(tree):
    source = 'class A:\n    def f(self):\n        return """\nx\n"""\n'
    root = tree("# Copied from curricula/plr.py:A\n" + source, plr=source)
    assert Repository(root).problems() == []
    tree(
        "# Copied from curricula/plr.py:A.f\n" + source[9:].replace("    def f", "def f").replace("        r", "    r"),
        plr=source,
    )
    with pytest.raises(MarkerError, match="plr.py:4: less indented than its block"):
        Repository(root).problems()


def test_a_syntax_error_names_its_line(tree, capsys):
    assert run(capsys, tree("x = 1\ny = = 2\n")) == (2, "error: algos/new.py:2: invalid syntax\n")
