"""Runs that train in one process: those of a script with --stack whose tensors have one shape. Each stays a run of the
ledger, with its own folder, result and failure; a run without its like is a stack of one."""

import hashlib
import json
import sys
from dataclasses import dataclass

from benchmark.runner.suite import ROOT, Run, arguments, load_args, split, value


@dataclass(frozen=True)
class Stack:
    runs: tuple[Run, ...]
    shared: tuple[str, ...] = ()  # words for all of them
    members: tuple[dict, ...] = ()  # {argument: value} of each

    @property
    def name(self):
        ids = ",".join(run.id for run in self.runs)
        return ids if len(self.runs) == 1 else f"stack-{hashlib.sha256(ids.encode()).hexdigest()[:12]}"

    def only(self, runs):
        kept = [i for i, run in enumerate(self.runs) if run in runs]
        return Stack(tuple(self.runs[i] for i in kept), self.shared, tuple(self.members[i] for i in kept[1:] and kept))

    def command(self, folder):
        """As it is started in the repository's root; writes the file of a stack of more than one."""
        commands = [run.command(folder) for run in self.runs]
        if len(commands) == 1:
            return commands[0]
        path = folder.resolve() / "stacks" / f"{self.name}.json"
        path.parent.mkdir(exist_ok=True)
        rows = [member | {"run_dir": command[-1]} for member, command in zip(self.members, commands)]
        path.write_text(json.dumps(rows, indent=1))
        return [*commands[0][:2], *self.shared, "--stack", str(path)]


def shapes(runs):
    """{run: (what the runs of a stack have in common, its words, what the run sets itself)} of the runs whose scripts
    take --stack: those have a table DEFAULT of the choices that a member sets, like MEMBER, and name in STRUCTURE those
    that shape its tensors."""
    found, scripts = {}, {}
    for run in runs:
        if run.script not in scripts:
            scripts[run.script] = load_args(ROOT / run.script)
        args, module = scripts[run.script], sys.modules[scripts[run.script].__module__]
        if hasattr(args, "stack"):
            known, own, shared = arguments(args), {}, []
            for flag, given in split(run.args):
                name, read = value(known, flag, given)
                if name in (*module.MEMBER, *module.DEFAULT):
                    own[name] = read
                else:
                    shared += [flag, *given]
            whole = args(**dict(value(known, flag, given) for flag, given in split(run.args)))
            shape = tuple(str(getattr(whole, name)) for name in module.STRUCTURE)
            found[run] = (run.script, *shared, shape), tuple(shared), own
    return found


def take(todo, shapes, size):
    """The next Stack of the deque `todo`, which it leaves. Those of one shape are divided evenly, configuration by
    configuration, among as few stacks of at most `size` as hold them."""
    if todo[0] not in shapes:
        return Stack((todo.popleft(),))
    shape, shared, _ = shapes[todo[0]]
    same = sorted((run for run in todo if run in shapes and shapes[run][0] == shape), key=lambda run: run.algorithm)
    stacks = -(-len(same) // size)
    runs = tuple(same[: -(-len(same) // stacks)])
    rest = [run for run in todo if run not in set(runs)]
    todo.clear()
    todo.extend(rest)
    return Stack(runs, shared, tuple(shapes[run][2] for run in runs))
