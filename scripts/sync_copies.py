"""Keeps the marked copies in algos/ the same as their sources, and lean forms beside a test against the full one.

    # Copied from algos/ppo.py:RunLogger                             right above a decorator, def or class
    # Copied from curricula/plr.py:rank_weights with rank_weights->plr_weights      renames the block itself only
    # Copied from algos/ppo.py:region(seeding)                       down to `# End of copy`; its source stands between
                                                                     `# region: seeding` and `# endregion: seeding`
    # Lean form of curricula/plr.py:PrioritizedLevelReplay           the same places, `with` too: what a script needs of
                                                                     it; exact copies may be made of it

    python scripts/sync_copies.py                         check: a diff for each copy that differs, and exit code 1
    python scripts/sync_copies.py --fix                   rewrite the copies from their sources
    python scripts/sync_copies.py --adopt FILE:NAME       the other way: that copy's text becomes its source
    python scripts/sync_copies.py --list                  source -> copies, full form -> lean forms

Each lean form needs a test in tests/test_lean.py that drives it and the full one with the same random inputs and finds
the same. The test says by a mark which lean form (or forms) it drives:

    @pytest.mark.lean("algos/ppo_plr.py:PrioritizedLevelReplay")
    def test_lean_ppo_plr_levels(): ...

A marker that cannot be followed is an error (exit code 2), so that a slip of the pen never switches a check off.
"""

import argparse
import ast
import builtins
import difflib
import dis
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import CodeType

FOLDERS = (  # each without the folders in it: some of those hold results and data
    "algos",
    "benchmark",
    "benchmark/figures",
    "benchmark/runner",
    "benchmark/speed",
    "curricula",
    "scripts",
    "scripts/integrations",
    "tests",
)
LEAN_TESTS, MARK = "tests/test_lean.py", "pytest.mark.lean"
COPY = re.compile(
    r"# (Copied from|Lean form of) ([\w./-]+\.py):(region\([\w-]+\)|[^\W\d][\w.]*)(?: with (\w+)->(\w+))?"
)
REGION = re.compile(r"# (end)?region: ([\w-]+)")
END = "# End of copy"
ALIKE = re.compile(  # these, or a slip
    r"#\W*(copied\s*from\b|lean\s*form\s*of\b|end\s*of\s*copy\b|(end\s*)?region\s*:)", re.IGNORECASE
)


class MarkerError(Exception):
    """A marker that cannot be followed, or edits that would be lost."""


def need(condition, message):
    if not condition:
        raise MarkerError(message)


@dataclass(frozen=True)
class Stretch:
    """Lines first..last (from 1, inclusive): a def or class with its decorators, or the inside of a region."""

    path: str
    name: str  # qualified name, or region(NAME)
    first: int
    last: int
    indent: int

    def __str__(self):
        return f"{self.path}:{self.first}"


@dataclass(frozen=True)
class Copy:
    """A stretch that is a copy or lean form, and what its marker says; old and new are empty without `with`."""

    stretch: Stretch
    path: str
    name: str
    old: str
    new: str

    def __str__(self):
        return f"{self.stretch.path}:{self.stretch.name}"


class File:
    """One parsed file: by name the `stretches` that can be sources, and the `copies` and `lean` forms.

    Raises MarkerError.
    """

    def __init__(self, path, text):
        self.path, self.text, self.lines = path, text, text.split("\n")
        self.stretches, self.copies, self.lean = defaultdict(list), [], []
        try:
            self.tree = ast.parse(text)
        except SyntaxError as error:
            raise MarkerError(f"{path}:{error.lineno}: {error.msg}") from None
        self._find_blocks(self.tree, "")
        self._find_markers({block.first: block for found in self.stretches.values() for block in found})

    def _find_blocks(self, node, prefix):
        for child in ast.iter_child_nodes(node):
            name = getattr(child, "name", None) if hasattr(child, "decorator_list") else None  # a def or class
            if name:
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                block = Stretch(self.path, prefix + name, first, child.end_lineno, child.col_offset)
                self.stretches[block.name].append(block)
            self._find_blocks(child, f"{prefix}{name}." if name else prefix)

    def _find_markers(self, blocks):
        regions, copy = {}, None  # those that are open
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type != tokenize.COMMENT or not ALIKE.match(token.string):
                continue
            (line, indent), text = token.start, token.string.rstrip()
            at = f"{self.path}:{line}: `{text}`"
            need(not token.line[:indent].strip(), f"{at} must stand on a line of its own")
            if text == END:
                need(copy, f"{at} ends no copy of a region")
                self.copies.append(Copy(Stretch(self.path, copy[2], copy[0], line - 1, indent), *copy[1:]))
                copy = None
            elif match := REGION.fullmatch(text):
                end, name = match[1], f"region({match[2]})"
                need(bool(end) == (name in regions), f"{at}: `# region: NAME` and `# endregion: NAME` must alternate")
                if end:
                    self.stretches[name].append(Stretch(self.path, name, regions.pop(name), line - 1, indent))
                else:
                    regions[name] = line + 1
            elif match := COPY.fullmatch(text):
                kind, path, name, old, new = match.groups("")
                need(not copy, f"{at}: the copy of a region above has no `{END}`")
                if name.startswith("region("):
                    need(not old, f"{at}: `with` renames a def or class only")
                    need(kind == "Copied from", f"{at}: a lean form is a def or class")
                    copy = (line + 1, path, name, old, new)
                    continue
                need(line + 1 in blocks, f"{at}: no decorator, def or class starts on the next line")
                names = name.split(".")[-1], blocks[line + 1].name.split(".")[-1]
                renames = (old, new) == names if old else names[0] == names[1]
                need(renames, f"{at}: the block below is {names[1]}: say `with {names[0]}->{names[1]}`")
                forms = self.copies if kind == "Copied from" else self.lean
                forms.append(Copy(blocks[line + 1], path, name, old, new))
            else:
                raise MarkerError(f"{at} is no marker (python scripts/sync_copies.py --help shows them)")
        need(not copy and not regions, f"{self.path}: {copy[2] if copy else ', '.join(regions)} has no end")

    def read(self, stretch):
        """The stretch's text as it would stand at the margin."""
        lines = self.lines[stretch.first - 1 : stretch.last]
        for number, line in enumerate(lines, stretch.first):
            need(
                not line[: stretch.indent].strip(), f"{self.path}:{number}: less indented than its block: no copy of it"
            )
        return "\n".join(line[stretch.indent :] for line in lines)

    def replaced(self, stretch, text):
        """The whole file's text with another text in the stretch's place."""
        lines = [" " * stretch.indent + line if line else line for line in text.split("\n")] if text else []
        return "\n".join([*self.lines[: stretch.first - 1], *lines, *self.lines[stretch.last :]])

    @cached_property
    def globals(self):
        """The global names that the module defines, and (name, line) of each read: the compiler does the scoping."""
        defined, reads = {*dir(builtins), "__file__", "__annotations__"}, []
        for code in code_objects(compile(self.tree, self.path, "exec")):
            steps = list(dis.get_instructions(code))
            own = {step.argval for step in steps if step.opname == "STORE_NAME"}  # the module's, or a class body's
            defined |= {step.argval for step in steps if step.opname == "STORE_GLOBAL"}
            defined |= own if code.co_name == "<module>" else set()
            loads = [step for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval not in own]
            reads += [(step.argval, step.positions.lineno) for step in loads]
        return defined, reads


def rename(text, old, new):
    """`text` with the name `old` replaced: whole names only, none after a dot (another object's), none in a string."""
    lines = text.split("\n")
    tokens = tokenize.generate_tokens(io.StringIO(text).readline) if old else []
    for before, token in reversed(list(pairwise(tokens))):
        if token.string == old and before.string != ".":
            (row, start), (_, end) = token.start, token.end
            lines[row - 1] = lines[row - 1][:start] + new + lines[row - 1][end:]
    return "\n".join(lines)


def code_objects(code):
    """A code object and all that are nested in it."""
    return [code, *(inner for item in code.co_consts if isinstance(item, CodeType) for inner in code_objects(item))]


class Repository:
    """All files under `root`, parsed, their copies and lean forms. Raises MarkerError."""

    def __init__(self, root):
        self.root, self.files = Path(root), {}
        for path in sorted(path for folder in FOLDERS for path in (self.root / folder).glob("*.py")):
            name = path.relative_to(self.root).as_posix()
            self.files[name] = File(name, path.read_text())
        self.copies = [copy for file in self.files.values() for copy in file.copies]
        self.lean = [form for file in self.files.values() for form in file.lean]
        for copy in self.copies:
            self.source(copy)
        for form in self.lean:
            self.named(form)

    def named(self, copy):
        """The stretch that the marker of a copy or lean form names."""
        at = f"{copy.stretch.path}:{copy.stretch.first - 1}: {copy.path}:{copy.name}"
        need(copy.path in self.files, f"{at}: there is no such file (a path starts at the repository's top)")
        found = self.files[copy.path].stretches.get(copy.name, [])
        need(len(found) == 1, f"{at}: the file has {len(found)} of that name, not 1")
        return found[0]

    def source(self, copy):
        """The stretch that a copy was copied from."""
        found, at = self.named(copy), f"{copy.stretch.path}:{copy.stretch.first - 1}: {copy.path}:{copy.name}"
        for other in self.files[copy.path].copies:
            apart = found.last < other.stretch.first or other.stretch.last < found.first
            need(apart, f"{at} is, holds or lies in a copy itself: name the source, {other.path}:{other.name}")
        return found

    def expected(self, copy):
        """The text that a copy should have."""
        return rename(self.files[copy.path].read(self.source(copy)), copy.old, copy.new)

    def drift(self, copy):
        """A diff from the copy to its source; empty if they are the same."""
        texts = self.files[copy.stretch.path].read(copy.stretch), self.expected(copy)
        names = str(copy.stretch), str(self.source(copy))
        return "\n".join(difflib.unified_diff(*(text.split("\n") for text in texts), *names, n=2, lineterm=""))

    def missing_globals(self, copy):
        """A text that names the globals that a copy reads and its module lacks; empty if there are none."""
        stretch, (defined, reads) = copy.stretch, self.files[copy.stretch.path].globals
        lines = range(stretch.first, stretch.last + 1)
        missing = ", ".join(sorted({name for name, line in reads if line in lines and name not in defined}))
        return f"{stretch}: {stretch.name} needs {missing}: import or copy it too" if missing else ""

    def namesakes(self):
        """Classes in algos/ with the name of a class in curricula/ and no marker: a copy without one drifts unseen."""
        blocks = defaultdict(list)
        for file in self.files.values():
            names = [node.name for node in file.tree.body if isinstance(node, ast.ClassDef)]
            blocks[file.path.split("/")[0]] += [file.stretches[name][0] for name in names]
        homes, marked = {b.name: b.path for b in blocks["curricula"]}, [c.stretch for c in self.copies + self.lean]
        found = [block for block in blocks["algos"] if block.name in homes and block not in marked]
        return [
            f"{b}: class {b.name} is in {homes[b.name]} too: mark it as its copy or lean form, or rename it"
            for b in found
        ]

    @cached_property
    def tested(self):
        """FILE:NAME of each lean form that a test in LEAN_TESTS says to drive, by its mark."""
        tree = self.files[LEAN_TESTS].tree if LEAN_TESTS in self.files else ast.Module([])
        tests = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
        marks = [mark for test in tests for mark in test.decorator_list if isinstance(mark, ast.Call)]
        return [ast.unparse(arg).strip("'") for mark in marks if ast.unparse(mark.func) == MARK for arg in mark.args]

    def untested(self, form):
        """A text that says that a lean form has no test beside its full form; empty if it has one."""
        if str(form) in self.tested:
            return ""
        return f'{form.stretch}: {LEAN_TESTS} has no test marked @{MARK}("{form}") that drives it and {form.path}'

    def stale_marks(self):
        """Texts that name the marks of tests for lean forms that are not there."""
        forms = {str(form) for form in self.lean}
        return [f"{LEAN_TESTS}: @{MARK}: {name!r} is no lean form" for name in self.tested if name not in forms]

    def problems(self):
        """Everything that is wrong, one text each."""
        found = [text for copy in self.copies for text in (self.drift(copy), self.missing_globals(copy)) if text]
        untested = [text for form in self.lean if (text := self.untested(form))]
        return found + untested + self.stale_marks() + self.namesakes()

    def refuse_edited(self, stretch):
        """Raises MarkerError if the stretch differs from its committed version; a new file or stretch has none."""
        command = ["git", "-C", str(self.root), "show", f"HEAD:./{stretch.path}"]
        shown = subprocess.run(command, capture_output=True, text=True)
        head = File(f"HEAD:{stretch.path}", "" if shown.returncode else shown.stdout)
        same = [*head.stretches[stretch.name], *(c.stretch for c in head.copies if c.stretch.name == stretch.name)]
        kept = not same or self.files[stretch.path].read(stretch) in [head.read(other) for other in same]
        need(kept, f"{stretch}: {stretch.name} has uncommitted edits: commit or --adopt them, or drop them by --force")

    def write(self, texts, force):
        """Puts texts (by stretch) in place: all of them or, if one is refused, none; each file atomically."""
        for stretch in texts if not force else ():
            self.refuse_edited(stretch)
        for stretch in sorted(texts, key=lambda stretch: -stretch.first):  # bottom up: line numbers above stay right
            text = self.files[stretch.path].replaced(stretch, texts[stretch])
            self.files[stretch.path] = File(stretch.path, text)  # an error, if it does not parse, before any is written
        for path in {stretch.path for stretch in texts}:
            target, temporary = self.root / path, self.root / f"{path}.tmp"
            temporary.write_text(self.files[path].text)
            shutil.copymode(target, temporary)
            os.replace(temporary, target)

    def fix(self, force=False):
        """Rewrites the copies that differ from their sources, and returns them."""
        drifted = [copy for copy in self.copies if self.drift(copy)]
        self.write({copy.stretch: self.expected(copy) for copy in drifted}, force)
        return drifted

    def adopt(self, target, force=False):
        """Writes the text of the copy FILE:NAME into its source, and returns that."""
        found = [copy for copy in self.copies if str(copy) == target]
        need(len(found) == 1, f"--adopt {target}: there are {len(found)} such copies, not 1; --list shows all")
        text, source = self.files[found[0].stretch.path].read(found[0].stretch), self.source(found[0])
        self.write({source: rename(text, found[0].new, found[0].old)}, force)
        return source


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--fix", action="store_true", help="rewrite the copies that differ from their sources")
    action.add_argument("--adopt", metavar="FILE:NAME", help="make the text of this copy that of its source")
    action.add_argument("--list", action="store_true", help="print each source and its copies")
    parser.add_argument("--force", action="store_true", help="let --fix and --adopt overwrite uncommitted edits")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="default: this repository")
    args = parser.parse_args(argv)
    try:
        repository = Repository(args.root)
        if args.adopt:
            print(f"{repository.adopt(args.adopt, args.force)} rewritten from {args.adopt}")
        if args.fix:
            print("".join(f"{copy} rewritten from {copy.path}\n" for copy in repository.fix(args.force)), end="")
        if args.adopt or args.fix:
            repository = Repository(args.root)
        if args.list:
            for source in sorted({(copy.path, copy.name) for copy in repository.copies}):
                copies = [str(copy) for copy in repository.copies if (copy.path, copy.name) == source]
                print(f"{':'.join(source)} -> {', '.join(copies)}")
            for form in sorted(repository.lean, key=lambda form: (form.path, form.name)):
                print(f"{form.path}:{form.name} -> {form} (lean)")
            return 0
        problems = repository.problems()
    except MarkerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = f"{len(repository.copies)} marked copies, {len(repository.lean)} lean forms, {len(problems)} problems"
    print("\n\n".join([*problems, counts]))
    if any(problem.startswith("---") for problem in problems):
        print("in a diff - is the copy and + the source: --fix rewrites the copies, --adopt FILE:NAME a source")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
