"""A stand-in for the scripts of algos/ that starts in a moment: same arguments, exit codes and run directory; its
`mode` says how it goes wrong. A value depends on all steps before it, so that a run that lost or repeated one shows."""

import fcntl
import hashlib
import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass
class Args:
    env_id: str = "A"
    seed: int = 1
    run_dir: Path = Path("runs")
    total_timesteps: int = 10
    mode: Literal["well", "raises", "hangs", "dies_once", "dies", "swells", "lacks_memory", "stops_short", "leaves",
                  "lingers"] = "well"  # fmt: skip
    step_s: float = 0.01
    learning_rate: float = 1e-3
    norm_adv: bool = True
    clip_coef: float | None = None
    sizes: tuple[int, ...] = (64,)

    def __post_init__(self):
        if self.learning_rate > 1:
            raise ValueError(f"--learning-rate {self.learning_rate}: at most 1")
        if self.env_id == "nowhere":
            raise ValueError("--env-id nowhere: there is no such environment")


def write(path, data):
    path.with_suffix(".tmp").write_text(json.dumps(data))
    os.replace(path.with_suffix(".tmp"), path)


def main(args):
    shown = {key: str(value) for key, value in vars(args).items() if key not in ("seed", "run_dir")}
    digest = hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:8]
    folder = args.run_dir / "fake" / args.env_id / f"seed{args.seed}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: {folder} is in use")
    if (folder / "result.json").exists():
        sys.exit(print("finished before"))
    given = {"threads": os.environ.get("OMP_NUM_THREADS"), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    given["cpus"] = sorted(os.sched_getaffinity(0))
    given["script_sha256"] = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    write(folder / "config.json", {"args": shown | {"seed": args.seed}} | given)
    with open(folder / "starts", "a") as starts:
        starts.write("start\n")
    state, asked = {"step": 0, "value": args.seed}, []
    with suppress(FileNotFoundError):
        state = json.loads((folder / "checkpoint.json").read_text())
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    metrics.write_text("".join(lines[: state["step"]]))

    def stop(code):
        write(folder / "stopped.json", code)
        sys.exit(code)

    signal.signal(signal.SIGTERM, lambda *_: asked.append(75))
    signal.signal(signal.SIGINT, lambda *_: stop(130))
    swollen = []
    while state["step"] < args.total_timesteps:
        time.sleep(args.step_s)
        step = state["step"] + 1
        state = {"step": step, "value": (state["value"] * 31 + step) % 1_000_003}
        with open(metrics, "a") as file:
            file.write(json.dumps({"global_step": step, "eval/return_mean": state["value"]}) + "\n")
        write(folder / "checkpoint.json", state)
        write(folder / "status.json", {"state": "running", "step": step, "pid": os.getpid()})
        if asked:
            time.sleep(4 if args.mode == "lingers" else 0)
            stop(asked[0])
        if step >= 3 and args.mode == "raises":
            raise ValueError("no such level: 7")
        if step == 3 and args.mode == "lacks_memory":
            raise MemoryError("cannot allocate")
        if (step == 3 and args.mode == "dies_once") or args.mode == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 3 and args.mode == "stops_short":
            sys.exit(0)
        if args.mode == "leaves" and step == 3 and os.fork() == 0:
            time.sleep(600)  # a worker that outlives its parent
        while args.mode in ("hangs", "swells"):
            time.sleep(0.1)
            if args.mode == "swells":
                swollen.append(b"x" * 20_000_000)
    write(folder / "result.json", {"global_step": state["step"], "eval/return_mean": state["value"]})


if __name__ == "__main__":
    main(tyro.cli(Args))
