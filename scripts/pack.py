"""Packs a finished run into a small folder to share: what play.py, arena.py, watch.py and export.py need of it.

  scripts/run scripts/pack.py runs/ppo/CartPole-v1/seed1-1a2b3c4d benchmark/agents/cartpole

The program, the arguments, the result, and of the newest checkpoint the networks: no optimiser, replay, league or logs,
no name of a machine, no path. --half stores weights as 16-bit numbers, which halves the size and rounds them.
"""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.arena import fail, run_args  # noqa: E402

PARTS = "agent", "obs_norm", "update", "global_step", "row"  # of a checkpoint


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # folder of the run
    output: tyro.conf.Positional[Path]  # a new folder
    half: bool = False  # 16-bit weights


def main(options):
    run, output = options.run, options.output
    args = vars(run_args(run))
    if not (run / "result.json").exists():
        fail(f"{run} is not finished: its own command goes on")
    import torch

    if not (checkpoints := sorted((run / "checkpoints").glob("*.pt"))):
        fail(f"{run} has no checkpoint")
    newest = checkpoints[-1]
    try:
        state = torch.load(newest, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file can raise anything
        fail(f"{newest} cannot be read ({type(error).__name__}): remove it, and the one before is packed")
    try:
        (output / "checkpoints").mkdir(parents=True)
        packed = {name: state[name] for name in PARTS if name in state}
        if options.half:
            packed["agent"] = {name: x.half() if x.is_floating_point() else x for name, x in packed["agent"].items()}
        if "league" in state:
            packed["league"] = {"ids": [], "agents": []}
        torch.save(packed, output / "checkpoints" / newest.name)
        config = json.loads((run / "config.json").read_text())
        config.pop("host", None)
        words = config.get("argv", [])[1:]
        before = ["", *words]  # each word's
        words = [word for word, one in zip(words, before) if "--run-dir" not in (one, word.partition("=")[0])]
        config |= {"argv": [f"algos/{args['exp_name']}.py", *words], "args": args | {"run_dir": "runs"}}
        (output / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        shutil.copy(run / "code.py", output)
        shutil.copy(run / "result.json", output)
    except FileExistsError:
        fail(f"{output} is there: remove it, or name another folder")
    except (OSError, ValueError) as error:
        fail(f"{run} cannot be packed: {error}")
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    print(f"{output}: {size / 1e6:.2f} MB.")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
