"""Trains with a script of algos/ from the networks of another run: everything else begins anew.

  scripts/run scripts/init_from.py runs/ppo_plr/bigfish/seed1-1a2b3c4d algos/ppo_plr.py --env-id leaper --network nature
  scripts/run scripts/init_from.py RUN SCRIPT --help

SCRIPT and what follows is a command as without this program; its network must have the shapes of RUN's. Taken over from
RUN's newest checkpoint are the networks, target networks and, of ppo_vector.py, the normalisation of observations. The
new run is runs/<script>-from-<hash of these>/...: the same command finds it and goes on, as any run. The scripts do not
have this as an argument of theirs: there is no room.
"""

import hashlib
import importlib
import io
import sys
from pathlib import Path
from unittest import mock

import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from scripts.arena import fail, load_checkpoint, newest_checkpoint, run_args  # noqa: E402

OTHERWISE = "onpolicy_choices", "pbt_ppo", "evolution_strategies", "nsga2"  # their training begins with no one network
NETWORKS = "agent", "target", "obs_norm"  # parts of a checkpoint


def networks(run):
    """The parts of the run's newest checkpoint that are networks, by name, and a hash of them."""
    import torch

    run_args(run)  # or it is no run
    state = load_checkpoint(checkpoint := newest_checkpoint(run))
    found, buffer = {name: state[name] for name in NETWORKS if name in state}, io.BytesIO()
    if not found:
        fail(f"{checkpoint} holds no network")
    torch.save(found, buffer)
    return found, hashlib.sha256(buffer.getvalue()).hexdigest()[:8]


def load(parts, found, run):
    """Loads the networks `found` into a new run's parts; all of these that are networks must be among them."""
    wanted = [name for name in NETWORKS if name in parts]
    if wanted != list(found):
        fail(f"{run} holds {', '.join(found)}, and this command trains {', '.join(wanted)}")
    for name in wanted:
        try:
            parts[name].load_state_dict(found[name])
        except (KeyError, RuntimeError, ValueError) as error:
            fail(f"{run} has another network: {' '.join(str(error).split())[:500]}")


def main(words):
    if len(words) < 2 or Path(words[1]).suffix != ".py":
        print(f"usage: scripts/run scripts/init_from.py RUN SCRIPT [arguments of SCRIPT]\n\n{__doc__}")
        sys.exit(0 if words[:1] in (["-h"], ["--help"]) else 2)
    run, script = Path(words[0]), Path(words[1]).resolve()
    if script.parent != ROOT / "algos" or not script.exists():
        known = ", ".join(path.name for path in sorted((ROOT / "algos").glob("*.py")))
        fail(f"{words[1]} is no script of algos/: give one of {known}")
    module = importlib.import_module(f"algos.{script.stem}")
    if script.stem in OTHERWISE:
        fail(f"{script.name} is not for this: its training does not begin with one network")
    args = tyro.cli(module.Args, prog=f"{Path(__file__).name} {run} {script.name}", args=words[2:],
                    description=module.__doc__)  # fmt: skip
    found, digest = networks(run)
    args.exp_name += f"-from-{digest}"
    restore = module.RunLogger.restore

    def restore_or_begin(self, **parts):
        outcome = restore(self, **parts)
        if not self.resumed:
            load(parts, found, run)
            print(f"Begins with {', '.join(found)} of {run}", file=sys.stderr)
        return outcome

    with mock.patch.object(module.RunLogger, "restore", restore_or_begin):
        return module.train(args)


if __name__ == "__main__":
    main(sys.argv[1:])
