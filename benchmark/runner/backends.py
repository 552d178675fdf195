"""A suite on more than one machine: as a SLURM array, or on a Ray cluster. The results folder must be shared by all."""

import math
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from benchmark.runner import execute, suite
from benchmark.runner.ledger import HOST

MAX_ARRAY = 1000  # SLURM's usual limit (MaxArraySize 1001): beyond it a task of the array does several runs in turn

SLURM = """\
#!/bin/bash
{options}
{log}cd {root}
{command} &
worker=$! again=no
trap 'kill -USR1 $worker; again=yes' USR1 # time is nearly up: the runs leave checkpoints and go on later
trap 'kill -TERM $worker' TERM # it was cancelled
code=75
while kill -0 $worker 2>/dev/null; do
  wait $worker
  code=$?
done
[[ $code$again != 75yes ]] || scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_${{SLURM_ARRAY_TASK_ID}}"
exit $code
"""


def slurm_script(plan, folder, runs, workers, extra, words):
    """The text of an array script, which needs no file that only a real run writes. `extra`: KEY=VALUE for further
    #SBATCH lines; `words`: further ones for a worker."""
    resources, tasks = plan.resources, min(len(runs), MAX_ARRAY)
    options = {
        "job-name": plan.name, "array": f"0-{tasks - 1}" + (f"%{workers}" if workers else ""),
        "output": "/dev/null", "open-mode": "append", "signal": "B:USR1@120", "cpus-per-task": resources.threads,
        "requeue": None,
    }  # fmt: skip
    options |= {"mem": f"{math.ceil(resources.memory_gb * 1024)}M"} if resources.memory_gb < math.inf else {}
    options |= (
        {"time": math.ceil(resources.timeout_h * 60 * math.ceil(len(runs) / tasks))}
        if resources.timeout_h < math.inf
        else {}
    )
    options |= {"gres": f"gpu:{math.ceil(resources.gpus)}"} if resources.gpus else {}
    own = dict(pair.partition("=")[::2] for pair in extra)
    options |= own
    lines = [f"#SBATCH --{key}" + (f"={shlex.quote(str(value))}" if value else "") for key, value in options.items()]
    command = [sys.executable, "benchmark/run.py", "worker", str(plan.path.resolve()), "--results",
               str(folder.resolve().parent), *words, "--tasks", str(tasks), "--task"]  # fmt: skip
    command = f"{shlex.join(command)} $SLURM_ARRAY_TASK_ID"
    logs = shlex.quote(str(folder.resolve() / "logs"))  # SLURM itself would not make the folder
    log = f'mkdir -p {logs} && exec >>{logs}/"slurm-${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID.log" 2>&1\n'
    return SLURM.format(options="\n".join(lines), log="" if "output" in own else log,
                        root=shlex.quote(str(suite.ROOT)), command=command)  # fmt: skip


def submit_slurm(text, folder):
    """Hands the script to sbatch. Returns its exit code."""
    if shutil.which("sbatch") is None:
        raise SystemExit(
            "error: there is no sbatch here: submit from a login node, or look at the script with --dry-run"
        )
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "slurm.sh").write_text(text)
    return subprocess.run(["sbatch", folder / "logs" / "slurm.sh"]).returncode


def ray_task(stack, path, folder, seen):
    """A stack of runs, on a node of the cluster, in the main thread of a Ray worker."""
    if not Path(folder, "suite.toml").exists():
        raise RuntimeError(f"{HOST} does not see {folder}: the results folder must be shared by all nodes")
    stop = execute.Stop()
    signal.signal(signal.SIGINT, stop)  # how ray.cancel arrives
    stack["runs"] = tuple(suite.Run(**run) for run in stack["runs"])
    return execute.run_stack(execute.Stack(**stack), suite.load(path), Path(folder), seen, stop=stop)


def ray_backend(plan, folder, workers, address):
    """(submit, number of workers, on_stop) for `drive`: tasks on a Ray cluster, or on a local one made for it."""
    try:
        import ray
    except ImportError as error:
        hint = f"scripts/run --extra ray benchmark/run.py run {plan.name} --backend ray"
        raise SystemExit(f"error: --backend ray needs ray ({error}): {hint}") from None
    ray.init(address=address, log_to_driver=False, include_dashboard=None if address else False)
    resources, refs = plan.resources, {}

    @ray.remote(num_cpus=resources.threads, num_gpus=resources.gpus, max_retries=0)
    def task(root, *rest):
        import sys

        sys.path.insert(0, root)  # of the node's own copy of this repository
        from benchmark.runner import backends

        return backends.ray_task(*rest)

    def submit(stack, seen):
        where = folder.resolve()
        refs[stack.name] = task.remote(str(suite.ROOT), asdict(stack), str(where / "suite.toml"), str(where), seen)
        return refs[stack.name].future()

    def on_stop():
        for ref in refs.values():
            ray.cancel(ref)

    return submit, workers or MAX_ARRAY, on_stop
