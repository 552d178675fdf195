"""Runs on disk: what they leave, how they stop and go on, and what they say when something is wrong."""

import contextlib
import gc
import importlib.util
import io
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from algos import ppo, ppo_plr, ppo_plr_minigrid, ppo_vector

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "tests"), "WANDB_MODE": "offline"}
TINY = {
    ppo: "--num-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 2 --eval-interval 0 --eval-episodes 2 "
    "--total-timesteps 128 --checkpoint-interval 2 --progress none",
    ppo_plr: "--env-id bigfish --network nature --num-envs 4 --num-steps 32 --num-minibatches 2 --num-levels 8 "
    "--eval-interval 0 --eval-episodes 2 --final-eval-episodes 2 --torch-threads 1 --total-timesteps 256 "
    "--checkpoint-interval 2 --progress none",
}  # 4 updates of 32 steps, 2 of 128
TINY[ppo_vector] = TINY[ppo]
ALL = pytest.mark.parametrize("script", [ppo, ppo_vector, ppo_plr], ids=["ppo", "ppo_vector", "ppo_plr"])
PPO = pytest.mark.parametrize("script", [ppo, ppo_vector], ids=["ppo", "ppo_vector"])


@pytest.fixture(autouse=True)
def restored_signals():
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


class Run:
    """The only run below a folder."""

    def __init__(self, folder):
        (config,) = folder.rglob("config.json")
        self.dir = config.parent

    def json(self, name):
        return json.loads((self.dir / name).read_text())

    def rows(self, name="metrics.jsonl"):
        return [json.loads(line) for line in (self.dir / name).read_text().splitlines()]

    def repeatable(self):
        """The rows without their times."""
        times = {"wall_s", "charts/SPS"}
        return [{k: v for k, v in row.items() if k not in times and not re.fullmatch("perf/.*_s", k)}
                for row in self.rows()]  # fmt: skip

    def checkpoints(self):
        return sorted((self.dir / "checkpoints").glob("*.pt"))

    def state(self):
        """The newest checkpoint's state without its times, its name for wandb, and the sizes of the logs."""
        state = torch.load(self.checkpoints()[-1], weights_only=True)
        for name in ("wall_s", "token", "logs"):
            del state[name]
        for row in (state["row"], *state.get("window", {"rows": []})["rows"]):
            for name in [name for name in row if re.fullmatch("perf/.*_s", name)]:
                del row[name]
        return state

    def scalars(self):
        """{tag: [(step, value)]} of all TensorBoard files."""
        events = EventAccumulator(str(self.dir / "tb")).Reload()
        return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def assert_same(a, b, path=""):
    """Equal to the bit."""
    assert type(a) is type(b), path
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{path}/{i}")
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), path
    else:
        assert a == b or a != a and b != b, path


def parse(script, *arguments):
    return tyro.cli(script.Args, args=[word for argument in arguments for word in argument.split()])


def train(script, folder, *arguments):
    """Trains in this process (a new one costs seconds) with the tiny settings; returns the Run."""
    try:
        script.train(parse(script, TINY[script], f"--run-dir {folder}", *arguments))
    finally:
        gc.collect()  # environments that hang in a reference cycle
    return Run(folder)


def refusal(script, folder, *arguments):
    """The one line with which a run ends."""
    with pytest.raises(SystemExit) as caught:
        train(script, folder, *arguments)
    message = caught.value.code
    assert message.startswith("error: ") and "\n" not in message
    del caught
    gc.collect()  # the lock that the traceback holds
    return message


def program(path, replace="", by=""):
    """The module of a script that was copied to a file, with a change."""
    text = Path(ppo_vector.__file__ if "vector" in path.name else ppo.__file__).read_text()
    assert replace in text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(replace, by, 1))
    spec = importlib.util.spec_from_file_location(f"copy_{len(sys.modules)}", path)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    TINY[module] = TINY[ppo]
    return module


def command(script, folder, *arguments):
    words = [word for argument in (TINY[script], f"--run-dir {folder}", *arguments) for word in argument.split()]
    return [sys.executable, script.__file__, *words]


def start(script, folder, *arguments, step_s=0.0, environment=None, **options):
    """The script in a process group of its own."""
    environment = ENVIRONMENT | {"PROBE_STEP_S": str(step_s)} | (environment or {})
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(
        command(script, folder, *arguments), env=environment, start_new_session=True, **pipes, **options
    )


class Ended:
    """Waits for the end of a process; `seconds` from now till then."""

    def __init__(self, process, limit=120):
        begun = time.monotonic()
        try:
            self.out, self.err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"still running after {limit} s: {process.communicate()}")
        self.rc, self.seconds = process.returncode, time.monotonic() - begun
        self.tracebacks = self.err.count("Traceback")
        for _ in range(50):  # a moment for the resource tracker, which ends when the last pipe to it closes
            self.left = members(process.pid)
            if not self.left:
                break
            time.sleep(0.1)

    def __repr__(self):
        return f"rc {self.rc} after {self.seconds:.1f} s, left {self.left}\n{self.out}\n{self.err}"


class Called:
    """What a run in this process prints."""

    def __init__(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            train(*arguments)
        self.out, self.err = out.getvalue(), err.getvalue()


def members(group):
    """The pids of a process group, zombies apart."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(int(stat.parent.name))
    return found


def wait_for_updates(process, folder, count=2):
    """Returns when this process has logged `count` updates, while it goes on."""
    steps = set()
    for _ in range(12_000):
        for path in folder.rglob("status.json"):
            with contextlib.suppress(ValueError):  # caught while it was being written
                status = json.loads(path.read_text())
                steps |= {status["step"]} if status["pid"] == process.pid else set()
        assert process.poll() is None, Ended(process)
        if len(steps) >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"no {count} updates within two minutes: {Ended(process)}")


# ---- One run of ppo.py and ppo_vector.py: stopped in all ways, and the same run undisturbed ----

SLOW = "--env-id probe_envs:SlowCartPole-v0 --total-timesteps 960 --eval-interval 6"
CHAIN = {ppo: SLOW, ppo_vector: f"{SLOW} --norm-obs --norm-reward"}
STOPS = {ppo: {"sighup": 75}, ppo_vector: {"sigterm": 75, "sigint": 130}}  # exit codes


@pytest.fixture(scope="module", params=[ppo, ppo_vector], ids=["ppo", "ppo_vector"])
def script(request):
    return request.param


@pytest.fixture(scope="module")
def straight(script, tmp_path_factory):
    return train(script, tmp_path_factory.mktemp("straight"), CHAIN[script])


@pytest.fixture(scope="module")
def stopped(script, tmp_path_factory):
    """The same 30 updates: signals, kill -9, a damaged checkpoint on the way. Returns the run and its ends."""
    folder, ends = tmp_path_factory.mktemp("stopped"), {}
    arguments = script, folder, CHAIN[script]
    for name in (*STOPS[script], "sigkill"):
        hangup = signal.SIG_IGN if name == "sigterm" else signal.SIG_DFL  # as under nohup, or not
        process = start(*arguments, step_s=0.02, preexec_fn=lambda h=hangup: signal.signal(signal.SIGHUP, h))
        wait_for_updates(process, folder, 5 if name == "sigkill" else 2)  # 5: there is a checkpoint before the newest
        if name == "sigterm":
            process.send_signal(signal.SIGHUP)
            wait_for_updates(process, folder)
        if name in ("sigterm", "sighup"):
            process.send_signal(signal.SIGSTOP)  # so that it is still there however slowly the second one starts
            ends["pid"], ends["second"] = process.pid, refusal(*arguments)
            process.send_signal(signal.SIGCONT)
        process.send_signal(getattr(signal, name.upper()))
        ends[name] = Ended(process)
        ends[f"status after {name}"] = Run(folder).json("status.json")
    damaged = Run(folder).checkpoints()[-1]
    os.truncate(damaged, 100)
    ends["damaged"], ends["last"] = damaged, Ended(start(*arguments))
    ends["again"], ends["eval only"] = Called(*arguments), Called(*arguments, "--eval-only")
    return Run(folder), ends


def test_a_run_that_was_stopped_in_all_ways_equals_one_that_was_not(straight, stopped):
    """CKP-03, CKP-04, CKP-05."""
    run, ends = stopped
    assert ends["last"].rc == 0, ends["last"]
    assert len(run.rows()) == 30
    assert run.repeatable() == straight.repeatable()
    assert_same(run.state(), straight.state())
    results = [{k: v for k, v in r.json("result.json").items() if k != "wall_s"} for r in (run, straight)]
    assert results[0] == results[1] and results[0]["global_step"] == 960


def test_steps_are_logged_once_and_in_order(stopped):
    """CKP-08, CKP-09."""
    run, _ = stopped
    assert [row["global_step"] for row in run.rows()] == list(range(32, 961, 32))
    walls = [row["wall_s"] for row in run.rows()]
    assert walls == sorted(walls), "wall_s counts the work before a resume"
    evals = [row["global_step"] for row in run.rows("eval.jsonl")]
    assert evals == [step for step in (192, 384, 576, 768, 960, 960) for _ in range(2)], "the last two: --eval-only"
    frame = pandas.read_json(run.dir / "metrics.jsonl", lines=True)
    assert len(frame) == 30 and frame["charts/update"].tolist() == list(range(1, 31))
    assert {step for step, _ in run.scalars()["charts/learning_rate"]} == set(range(32, 961, 32))


def test_signals_end_a_run_soon_with_their_exit_codes(script, stopped):
    """Under nohup, as in the run that SIGTERM ends, SIGHUP is for others (SYN-02)."""
    for name, rc in STOPS[script].items():
        end = stopped[1][name]
        assert (end.rc, end.left, end.tracebacks, end.out) == (rc, [], 0, ""), end
        assert re.fullmatch(rf"{name.upper()}: the same command goes on from \S+\n", end.err)
        assert end.seconds < 60, "15 s on a quiet machine"
        assert stopped[1][f"status after {name}"]["state"] == "interrupted"


def test_a_damaged_checkpoint_is_told_and_the_one_before_is_used(stopped):
    """CKP-13."""
    end = stopped[1]["last"]
    assert f"warning: {stopped[1]['damaged']} cannot be read" in end.err
    assert end.err.count("\n") == 1


def test_a_second_run_in_the_same_folder_is_refused(stopped):
    assert f"is in use by pid {stopped[1]['pid']} on {os.uname().nodename}:" in stopped[1]["second"]


def test_a_finished_run_prints_its_result(stopped):
    run, ends = stopped
    assert ends["again"].err == ""
    assert json.loads(ends["again"].out.splitlines()[-1]) == run.json("result.json")
    assert str(run.dir) in ends["again"].out


def test_a_new_process_evaluates_the_checkpoint_alike(stopped):
    """With the observation statistics of the training (CKP-02)."""
    run, ends = stopped
    found = json.loads(ends["eval only"].out)
    assert found == {k: v for k, v in run.json("result.json").items() if k.startswith("eval/")}
    rows = run.rows("eval.jsonl")
    assert rows[-2:] == rows[-4:-2]


def test_the_documented_files_and_tags(script, straight):
    names = {path.name for path in straight.dir.iterdir()} - {"lock"}
    assert names == {
        "config.json",
        "code.py",
        "status.json",
        "metrics.jsonl",
        "eval.jsonl",
        "tb",
        "checkpoints",
        "result.json",
    }
    config = straight.json("config.json")
    assert config["args"]["env_id"] == "probe_envs:SlowCartPole-v0" and config["args"]["seed"] == 1
    assert {"argv", "script_sha256", "git_commit", "git_dirty", "host", "torch", "gymnasium", "numpy"} <= config.keys()
    assert (straight.dir / "code.py").read_bytes() == Path(script.__file__).read_bytes()
    status = straight.json("status.json")
    assert (status["state"], status["step"], status["pid"]) == ("finished", 960, os.getpid())
    assert abs(status["heartbeat"] - time.time()) < 1000
    assert [path.name for path in straight.checkpoints()] == ["000000000896.pt", "000000000960.pt"], "the newest two"
    always = {
        f"charts/{name}"
        for name in ("episodic_return", "episodic_length", "episodes", "SPS", "learning_rate", "update")
    }
    losses = ("policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance", "grad_norm")
    always |= {f"losses/{name}" for name in losses} | {"perf/collect_s", "perf/update_s"}
    evaluation = {"eval/return_mean", "eval/return_std", "eval/length_mean", "perf/eval_s"}
    for row in straight.rows():
        assert always | {"global_step", "wall_s"} <= row.keys()
        assert evaluation <= row.keys() if row["charts/update"] in (6, 12, 18, 24, 30) else not evaluation & row.keys()
    scalars = straight.scalars()
    assert scalars.keys() == always | evaluation | {"losses/gradient_steps"}
    assert scalars["losses/entropy"] == [
        (r["global_step"], pytest.approx(r["losses/entropy"])) for r in straight.rows()
    ]


def test_metrics_say_what_happened(straight):
    rows = straight.rows()
    episodes = [row for row in rows if row["charts/episodic_return"] is not None]
    assert rows[-1]["charts/episodes"] >= len(episodes) > 3
    assert all(row["charts/episodic_return"] == row["charts/episodic_length"] > 7 for row in episodes), (
        "raw rewards of 1"
    )
    rates = [row["charts/learning_rate"] for row in rows]
    np.testing.assert_allclose(rates, 1e-3 * (1 - np.arange(30) / 30), rtol=1e-12)
    assert all(row["losses/gradient_steps"] == 4 for row in rows)
    for row in straight.rows("eval.jsonl"):
        assert row["return"] == row["length"] > 7 and row["split"] == "eval"


# ---- Signals and workers ----


def test_ctrl_c_and_termination_of_a_group_with_16_environment_processes(tmp_path):
    """A terminal and a cluster signal all processes of a group: the workers must leave the answer to the run
    (SYN-02, SYN-05)."""
    arguments = ppo_vector, tmp_path, CHAIN[ppo_vector], "--vectorization async --num-envs 16 --total-timesteps 12800"
    for number, rc in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
        process = start(*arguments, step_s=0.01)
        wait_for_updates(process, tmp_path)
        for _ in range(2):  # the impatient press it twice
            os.killpg(process.pid, number)
            time.sleep(0.01)
        end = Ended(process)
        assert (end.rc, end.left, end.tracebacks) == (rc, [], 0), end
        assert end.seconds < 60
        assert Run(tmp_path).checkpoints()
    process = start(*arguments, step_s=0.01)
    wait_for_updates(process, tmp_path)
    os.kill(next(pid for pid in members(process.pid) if pid != process.pid), signal.SIGSTOP)
    process.kill()
    process.wait()
    ppo_vector.RunLogger(parse(ppo_vector, TINY[ppo_vector], f"--run-dir {tmp_path}", *arguments[2:])).lock.close()
    assert Ended(process).left == [], "workers end with the run, a stopped one too"


def test_termination_while_an_environment_process_does_not_answer(tmp_path):
    process = start(ppo_vector, tmp_path, CHAIN[ppo_vector], "--vectorization async", step_s=0.01)
    wait_for_updates(process, tmp_path)
    os.kill(next(pid for pid in members(process.pid) if pid != process.pid), signal.SIGSTOP)
    time.sleep(1)  # the run waits for it now
    process.terminate()
    end = Ended(process)
    assert (end.rc, end.left, end.tracebacks) == (75, [], 0) and end.seconds < 40, end
    assert Run(tmp_path).checkpoints()


@pytest.mark.parametrize("env_id,fault", [
    ("TinyImage-v0", r"error: observations \(8, 8, 3\): .* images of 36 x 36 or more"),
    ("BinaryActions-v0", "error: actions MultiBinary"), ("Chain-v0", "error: --track"),
    ("HardStart-raise-v0", r"error: environment 0 .process \d+. died with exit code 1"),
])  # fmt: skip
def test_a_failure_of_the_set_up_leaves_no_process(tmp_path, env_id, fault):
    """SYN-13."""
    arguments = f"--env-id probe_envs:{env_id} --vectorization async --num-envs 4", "--track" * fault.endswith("track")
    environment = {"PROBE_STEP_S": "0", "WANDB_MODE": "no such mode"}
    end = Ended(start(ppo_vector, tmp_path, *arguments, environment=environment), 60)
    assert (end.rc, end.left) == (1, []) and re.search(fault, end.err), end
    if "raise" in env_id:  # each child tells its own, if the parent, which ends them all, leaves it the time
        assert 1 <= end.tracebacks <= 4 and "boom-43" in end.err, end
    else:
        assert end.tracebacks == 0 and end.err.count("\n") == 1, end


@pytest.mark.parametrize("number,rc", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_during_the_set_up(tmp_path, number, rc):
    process = start(ppo_vector, tmp_path, "--env-id probe_envs:HardStart-sleep-v0 --vectorization async --num-envs 4")
    while len(members(process.pid)) < 5 and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.2)
    os.killpg(process.pid, number)
    end = Ended(process, 60)
    assert (end.rc, end.left, end.tracebacks) == (rc, [], 0), end


def test_workers_of_ppo_plr(tmp_path):
    """Signals to the group, a killed worker and a killed learner; then the same numbers as without workers (SYN-02)."""
    long, folder = "--total-timesteps 3072", tmp_path / "workers"
    for kind in ("sigterm", "sigint", "worker", "learner"):
        process = start(ppo_plr, folder, long, "--num-workers 2")
        wait_for_updates(process, folder)
        workers = [pid for pid in members(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(workers) == 2
        if kind == "sigint":  # twice, while one hangs
            os.kill(workers[0], signal.SIGSTOP)
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.3)
        if kind in ("sigterm", "sigint"):
            os.killpg(process.pid, getattr(signal, kind.upper()))
        elif kind == "learner":
            process.kill()  # its workers notice by themselves
        else:
            os.kill(workers[1], signal.SIGKILL)
        end = Ended(process)
        rc = {"sigterm": 75, "sigint": 130, "worker": 1, "learner": -9}[kind]
        assert (end.rc, end.left) == (rc, []) and end.tracebacks <= 1, (kind, end)
        assert end.seconds < 60, (kind, end)
        if kind == "worker":
            assert re.search(r"worker\b.*tasks \[\d, \d\].*died with exit code -9", end.err), end
    end = Ended(start(ppo_plr, folder, long, "--num-workers 2"))
    assert end.rc == 0, end
    alone, run = train(ppo_plr, tmp_path / "alone", long), Run(folder)
    assert len(run.rows()) == 24 and run.repeatable() == alone.repeatable()
    assert_same(run.state(), alone.state())
    assert run.rows("eval.jsonl") == alone.rows("eval.jsonl")


def test_an_environment_that_raises_in_another_process_ends_the_run(tmp_path):
    """SYN-07, SYN-08."""
    flags = "--env-id probe_envs:Faulty-raise-v0 --vectorization async --num-envs 4 --track"
    end = Ended(start(ppo_vector, tmp_path, flags))
    assert (end.rc, end.left) == (1, []), end
    assert re.search(r"environment \d, step 7 of the episode with seed \d+: ValueError: boom-42", end.err)
    assert Run(tmp_path).json("status.json")["state"] == "failed"


@pytest.mark.parametrize("script,flags", [(ppo, ""), (ppo_vector, ""), (ppo_vector, "--vectorization async")])
@pytest.mark.parametrize("env_id,fault", [
    ("Faulty-raise-v0", "step 7 .*boom-42"), ("HardReset-raise-v0", "step 0 .*boom-44"),
    ("OldStep-v0", "step 1 .*not enough values to unpack"),
    ("WrongShape-v0", r"step 2 .*(array of size 1 into shape \(4,\)|observation \(1,\), by its space \(4,\))"),
])  # fmt: skip
def test_an_environment_that_raises_is_named(script, flags, tmp_path, env_id, fault, capfd):
    """In every vector mode; so is one that returns what its space or gymnasium does not allow (USE-06, SYN-04)."""
    with pytest.raises(
        RuntimeError, match=r"environment \d, step \d of the episode with seed \d+: ValueError: "
    ) as raised:
        train(script, tmp_path, f"--env-id probe_envs:{env_id}", flags)
    assert re.search(fault, str(raised.value))
    assert Run(tmp_path).json("status.json")["state"] == "failed" and multiprocessing.active_children() == []


@pytest.mark.parametrize("fault", ["exit", "exit3"])
@pytest.mark.parametrize("script,flags", [(ppo, ""), (ppo_vector, ""), (ppo_vector, "--vectorization async")])
def test_an_environment_that_ends_the_program_is_no_success(script, flags, fault, tmp_path):
    message = refusal(script, tmp_path, f"--env-id probe_envs:HardReset-{fault}-v0", flags)
    assert "sys.exit in an environment" in message or f"died with exit code {fault[4:] or 0}" in message
    assert Run(tmp_path).json("status.json")["state"] == "failed" and not list(tmp_path.rglob("result.json"))


@PPO
@pytest.mark.parametrize("what", ["observation", "reward"])
def test_numbers_that_are_not_finite_are_named_where_they_arise(script, tmp_path, what):
    """PPO-16."""
    message = refusal(script, tmp_path, f"--env-id probe_envs:Faulty-{what}-v0 --num-envs 8 --checkpoint-interval 1")
    assert re.search(r"environment \d, step 7 of the episode with seed \d+: reward", message)
    assert what in message and "nan" in message


@PPO
def test_a_reward_beyond_float32_is_named_and_not_the_learning_rate(script, tmp_path):
    message = refusal(script, tmp_path, "--env-id probe_envs:HugeReward-v0")
    assert re.search(r"environment 0, step 1 of the episode with seed \d+: reward 1e\+39, .*float32", message)
    assert "--learning-rate" not in message


@PPO
def test_rewards_in_arrays_and_observations_in_one_array(script, tmp_path):
    """USE-07."""
    run = train(script, tmp_path, "--env-id probe_envs:OddRewards-v0")
    assert run.rows()[-1]["charts/episodic_return"] == run.json("result.json")["eval/return_mean"] == 7


@PPO
def test_an_observation_that_is_one_number(script, tmp_path):
    run = train(script, tmp_path, "--env-id probe_envs:ScalarObs-v0")
    assert run.rows()[-1]["charts/episodic_return"] == run.json("result.json")["eval/return_mean"] == 7


def test_a_reward_that_is_no_number_is_named(tmp_path):
    with pytest.raises(RuntimeError, match="environment 0, step 1 of the episode with seed .*NoneType"):
        train(ppo, tmp_path, "--env-id probe_envs:NoReward-v0")


@PPO
def test_observations_that_are_no_numbers_are_refused(script, tmp_path, capsys):
    """MiniGrid's, for one, with a mission in words; ppo_vector.py reads these."""
    flags = f"--env-id {'minigrid:MiniGrid-Empty-5x5-v0' if script is ppo else 'probe_envs:NoNumbers-v0'}"
    if script is ppo:
        assert f"{flags}: observations that are no numbers" in shown(capsys, script, flags)
    else:
        assert "observations Dict(" in refusal(script, tmp_path, flags)


def test_a_learner_that_fails_leaves_no_process_and_keeps_the_checkpoint(tmp_path):
    """SYN-04, PPO-16."""
    before = train(ppo_vector, tmp_path / "before", "--vectorization async --env-id CartPole-v1 --total-timesteps 64")
    assert len(before.checkpoints()) == 1
    message = refusal(ppo_vector, tmp_path / "after", "--vectorization async --env-id CartPole-v1 --learning-rate 1e30")
    assert re.search(r"error: [\w.]+ is not finite", message) and "--learning-rate" in message
    assert multiprocessing.active_children() == []
    run = Run(tmp_path / "after")
    assert run.json("status.json")["state"] == "failed"
    for path in run.checkpoints():
        assert all(torch.isfinite(w).all() for w in torch.load(path, weights_only=True)["agent"].values())


@pytest.mark.parametrize("script,rate", [(ppo, "1e30"), (ppo_vector, "1e308"), (ppo_plr, "1e308")])
def test_weights_that_are_not_finite_reach_no_checkpoint(script, rate, tmp_path):
    """Not even from the last step of an update, behind which no loss tells; the good checkpoint stays as it is
    (PPO-16)."""
    flags = "--no-anneal-lr --num-minibatches 1 --update-epochs 1 --checkpoint-interval 1 --keep-checkpoints 9"
    run = train(script, tmp_path, flags)
    for path in [*run.checkpoints()[1:], run.dir / "result.json"]:
        path.unlink()
    (path,) = run.checkpoints()
    optimizer = torch.load(path, weights_only=True)["optimizer"]
    optimizer["param_groups"][0]["lr"] = float(rate)
    edit(path, optimizer=optimizer)
    before = run.state()
    assert re.search(r"error: [\w.]+ is not finite. The last good", refusal(script, tmp_path, flags))
    assert run.checkpoints() == [path]
    for name in ("agent", "optimizer", "random", "global_step"):
        assert_same(run.state()[name], before[name], name)


def test_spawned_workers(tmp_path):
    """The start method of macOS and Windows (SYN-09)."""
    code = "import multiprocessing, runpy, sys; multiprocessing.set_start_method('spawn'); "
    code += "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = command(ppo_vector, tmp_path, "--env-id CartPole-v1 --vectorization async --total-timesteps 64")[1:]
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(Run(tmp_path).rows()) == 2


# ---- Determinism ----


@ALL
def test_seeds(script, tmp_path):
    """CLI-13."""
    runs = [train(script, tmp_path / name, f"--seed {seed}") for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    assert runs[0].repeatable() == runs[1].repeatable()
    assert_same(runs[0].state(), runs[1].state())
    assert runs[0].rows("eval.jsonl") == runs[1].rows("eval.jsonl")
    first, other = runs[0].repeatable()[0], runs[2].repeatable()[0]
    assert first["losses/policy_loss"] != other["losses/policy_loss"]


@ALL
def test_evaluation_leaves_training_as_it_is(script, tmp_path):
    flags = "--norm-obs --norm-reward" if script is ppo_vector else ""
    often = train(script, tmp_path / "often", "--eval-interval 1", flags)
    rarely = train(script, tmp_path / "rarely", flags)
    training = [[{k: v for k, v in row.items() if not k.startswith("eval")} for row in run.repeatable()]
                for run in (often, rarely)]  # fmt: skip
    assert training[0] == training[1]
    assert all("eval/return_mean" in row for row in often.rows())
    states = [{k: v for k, v in run.state().items() if k != "row"} for run in (often, rarely)]
    assert_same(*states)


def test_the_horizon_matters_only_to_annealing(tmp_path):
    """PPO-17."""

    def rows(steps, flag):
        return train(ppo, tmp_path / f"{steps}{flag}", f"--total-timesteps {steps} {flag}").repeatable()

    short, long = rows(128, "--no-anneal-lr"), rows(160, "--no-anneal-lr")
    strip = [{k: v for k, v in row.items() if not k.startswith("eval")} for row in short]
    assert strip == long[:4]
    assert {row["charts/learning_rate"] for row in long} == {1e-3}
    annealed = rows(150, "--anneal-lr")
    np.testing.assert_allclose([row["charts/learning_rate"] for row in annealed], 1e-3 * (1 - np.arange(5) / 5))
    assert annealed[-1]["global_step"] == 160, "rounded up to whole updates"


# ---- Resuming ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Four updates with a checkpoint each."""
    return train(ppo, tmp_path_factory.mktemp("finished"), "--checkpoint-interval 1 --keep-checkpoints 9")


@pytest.fixture
def half(finished, tmp_path):
    """A copy of the finished run as it was after two updates and a kill; and the arguments that go on with it."""
    copy = tmp_path / finished.dir.relative_to(finished.dir.parents[2])
    copy.mkdir(parents=True)
    subprocess.run(["cp", "-r", f"{finished.dir}/.", copy], check=True)
    for path in copy.glob("checkpoints/*.pt"):
        if int(path.stem) > 64:
            path.unlink()
    (copy / "result.json").unlink()
    return Run(tmp_path), (ppo, tmp_path, "--checkpoint-interval 1 --keep-checkpoints 9")


def edit(path, **changes):
    state = torch.load(path, weights_only=True)
    torch.save(state | changes, path)


def test_rows_after_the_checkpoint_are_dropped_once(half, finished):
    """CKP-08."""
    run, arguments = half
    for name in ("metrics.jsonl", "eval.jsonl"):
        with open(run.dir / name, "ab") as file:
            file.write(b'\xff\xfe\n[1]\n{"global_step": 160, "charts/upd')  # the kill cut it off
    train(*arguments)
    assert run.repeatable() == finished.repeatable()
    assert run.rows("eval.jsonl") == finished.rows("eval.jsonl")
    assert_same(run.state(), finished.state())
    assert [step for step, _ in run.scalars()["charts/update"]] == [32, 64, 96, 128]


def test_eval_only_leaves_the_run_as_it_was(half, finished):
    run, arguments = half
    kept = {name: (run.dir / name).read_bytes() for name in ("status.json", "metrics.jsonl", "config.json")}
    for _ in range(2):
        train(*arguments, "--eval-only")
    assert {name: (run.dir / name).read_bytes() for name in kept} == kept
    rows = run.rows("eval.jsonl")
    assert len(rows) == 6 and rows[:2] == finished.rows("eval.jsonl") and rows[2:4] == rows[4:]
    train(*arguments)
    assert run.repeatable() == finished.repeatable() and run.rows("eval.jsonl") == finished.rows("eval.jsonl")


def test_damaged_checkpoints_are_told(half, finished, capsys):
    run, arguments = half
    (run.dir / "checkpoints" / "000000000900.pt").write_bytes(b"")
    torch.save([1], run.dir / "checkpoints" / "000000000901.pt")
    state = torch.load(run.checkpoints()[1], weights_only=True)
    del state["envs"]
    torch.save(state, run.dir / "checkpoints" / "000000000902.pt")
    train(*arguments)
    err = capsys.readouterr().err
    assert err.count("cannot be read") == err.count("\n") == 3
    assert run.repeatable() == finished.repeatable()
    (run.dir / "result.json").write_text("{")
    assert "result.json is damaged" in refusal(*arguments)


@PPO
@pytest.mark.parametrize("number,rc", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signals_are_answered_inside_an_evaluation(script, number, rc, tmp_path, monkeypatch):
    """And the update before it is made again, to the bit (USE-02)."""
    flags = "--eval-interval 2", "--norm-obs --norm-reward" if script is ppo_vector else ""
    straight, calls, evaluate, act = train(script, tmp_path / "straight", *flags), [], script.evaluate, script.Agent.act

    def act_and_stop(*args):
        calls.append(1)
        if len(calls) == 5:
            os.kill(os.getpid(), number)
        return act(*args)

    def evaluate_and_stop(*args):
        patch.setattr(script.Agent, "act", act_and_stop)
        return evaluate(*args)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(script, "evaluate", evaluate_and_stop)
        train(script, tmp_path / "stopped", *flags)
    assert caught.value.code == rc and len(calls) == 5
    run = Run(tmp_path / "stopped")
    assert run.json("status.json")["state"] == "interrupted" and run.state()["global_step"] == 32
    train(script, tmp_path / "stopped", *flags)
    assert run.repeatable() == straight.repeatable() and run.rows("eval.jsonl") == straight.rows("eval.jsonl")
    assert_same(run.state(), straight.state())


@PPO
def test_an_environment_that_ignores_its_seed_begins_anew_after_a_resume(script, tmp_path, capsys):
    """And says so; the part of an episode that was lost counts nowhere. Episodes are of 100 steps, 64 are played
    (USE-04)."""
    arguments = script, tmp_path, "--env-id probe_envs:Unseeded-v0 --total-timesteps 512 --keep-checkpoints 9"
    run = train(*arguments)
    for path in [*run.checkpoints()[2:], run.dir / "result.json"]:
        path.unlink()
    assert run.state()["global_step"] == 128
    capsys.readouterr()
    train(*arguments)
    assert "new" in (err := capsys.readouterr().err) and "episode" in err
    rows = [row for row in run.rows() if row["charts/episodic_return"] is not None]
    assert [row["charts/update"] for row in rows] == [11]
    assert rows[0]["charts/episodic_return"] == rows[0]["charts/episodic_length"] == 100


def test_the_saved_code_goes_on_with_its_run(half, finished):
    run, arguments = half
    words = command(*arguments, "--exp-name ppo")
    done = subprocess.run([words[0], run.dir / "code.py", *words[2:]], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert run.repeatable() == finished.repeatable()
    assert (run.dir / "code.py").read_bytes() == Path(ppo.__file__).read_bytes()


def test_a_lost_metrics_file_does_not_stop_a_resume(half):
    """CKP-09."""
    run, arguments = half
    (run.dir / "metrics.jsonl").unlink()
    train(*arguments)
    assert [row["global_step"] for row in run.rows()] == [96, 128]


def test_resume_never_refuses_and_keeps_what_is_there(half):
    run, arguments = half
    before = (run.dir / "metrics.jsonl").read_bytes()
    message = refusal(*arguments, "--resume never")
    assert str(run.dir) in message and "--run-dir" in message
    assert (run.dir / "metrics.jsonl").read_bytes() == before and len(run.checkpoints()) == 2
    (run.dir / "metrics.jsonl").unlink()
    assert str(run.dir) in refusal(*arguments, "--resume never"), "the checkpoints are a run, too"


def test_resume_must(half, finished, tmp_path):
    run, arguments = half
    train(*arguments, "--resume must")
    assert run.repeatable() == finished.repeatable()
    for flag in ("--resume must", "--eval-only"):
        assert "holds no checkpoint to go on from" in refusal(ppo, tmp_path / "empty", flag)


def test_all_checkpoints_damaged(half, capsys):
    run, arguments = half
    for path in run.checkpoints():
        os.truncate(path, 100)
    assert "no checkpoint" in refusal(*arguments) and len(run.checkpoints()) == 2
    assert capsys.readouterr().err.count("cannot be read") == 2


def test_a_run_is_never_continued_by_another_program(half):
    """An edited one starts a folder of its own; one with other comments or docstrings is the same."""
    run, (_, folder, flags) = half
    before = {path: path.read_bytes() for path in run.dir.rglob("*") if path.is_file()}
    edited = program(folder / "edited" / "ppo.py", "eps=1e-5", "eps=1e-6")
    assert "holds no checkpoint" in refusal(edited, folder / "other", flags, "--resume must")
    edited.train(parse(edited, TINY[edited], f"--run-dir {folder}", flags))
    (other,) = set(run.dir.parent.iterdir()) - {run.dir}
    assert [json.loads(line)["global_step"] for line in open(other / "metrics.jsonl")] == [32, 64, 96, 128]
    assert {path: path.read_bytes() for path in before} == before
    for name, replace, by in [
        ("docstring", '"""Generalized', '"""Generalised'),
        ("comment", "# Optimise: ", "# Learn: "),
    ]:
        same = program(folder / name / "ppo.py", replace, by)
        args = parse(same, TINY[same], f"--run-dir {folder}", flags)
        assert same.RunLogger(args).dir == run.dir


def test_step_counter_beyond_two_billion(half):
    """CLI-12."""
    run, arguments = half
    for path in run.checkpoints()[:-1]:
        path.unlink()
    edit(run.checkpoints()[-1], global_step=2**31 - 40)
    (run.dir / "metrics.jsonl").unlink()
    for path in run.dir.glob("tb/*"):
        path.unlink()
    train(*arguments)
    steps = [2**31 - 8, 2**31 + 24]
    assert [row["global_step"] for row in run.rows()] == steps
    assert [step for step, _ in run.scalars()["charts/update"]] == steps
    assert run.checkpoints()[-1].name == f"{2**31 + 24:012d}.pt"
    assert run.json("result.json")["global_step"] == run.state()["global_step"] == 2**31 + 24


def test_envpool_starts_new_episodes_and_says_so(tmp_path, capsys):
    """CKP-05."""
    flags = "--vectorization envpool --checkpoint-interval 2"
    run = train(ppo_vector, tmp_path, flags)
    run.checkpoints()[-1].unlink()
    (run.dir / "result.json").unlink()
    capsys.readouterr()
    train(ppo_vector, tmp_path, flags)
    assert "envpool cannot restore the unfinished episodes" in capsys.readouterr().err
    rows = run.rows()
    assert [row["charts/update"] for row in rows] == [1, 2, 3, 4]
    assert [row["global_step"] for row in rows] == [32, 64, 96, 128]


# ---- The disk ----


def test_a_run_dir_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    message = refusal(ppo, tmp_path / "file" / "runs")
    assert f"cannot write {tmp_path}/file/runs" in message and "--run-dir" in message


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of `size` bytes; without the right to mount one, a limit on each file stands in for it."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], stderr=subprocess.PIPE
    ).returncode:
        yield {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size // 4, size // 4))}
    else:
        try:
            yield {}
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(tmp_path):
    """The third checkpoint does not fit: the two before stay as they are."""
    with small_disk(tmp_path / "disk", 480_000) as options:
        end = Ended(start(ppo, tmp_path / "disk", "--checkpoint-interval 1 --keep-checkpoints 9", **options))
        assert end.rc == 1 and end.tracebacks == 0 and end.err.count("\n") == 1, end
        assert re.search(r"error: cannot write \S+\.pt: .*(No space left|File too large)", end.err), end
        left = Run(tmp_path / "disk").checkpoints()
        assert options or left, "the disk was full from the start"
        for path in left:
            assert torch.load(path, weights_only=True)["global_step"] == int(path.stem)
        assert not list((tmp_path / "disk").rglob("*.tmp"))


@pytest.mark.parametrize("limit,file", [(0, "lock"), (30_000, "code.py"), (70_000, "metrics.jsonl")])
def test_files_that_cannot_grow(tmp_path, limit, file):
    options = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))}
    end = Ended(start(ppo, tmp_path, "--num-steps 4 --total-timesteps 12800 --checkpoint-interval 1000", **options))
    assert end.rc == 1 and end.err.count("\n") == 1 and re.search(f"^error: cannot write .*{file}: ", end.err), end


@PPO
def test_arrays_that_do_not_fit_into_memory_are_told_in_one_line(script, tmp_path):
    message = refusal(script, tmp_path, f"--num-steps {10**14}")
    assert "allocate memory" in message, message


def test_a_deleted_run_directory(tmp_path):
    process = start(ppo, tmp_path, CHAIN[ppo], step_s=0.02)
    wait_for_updates(process, tmp_path)
    process.send_signal(signal.SIGSTOP)  # so that it writes no file while they are deleted
    shutil.rmtree(tmp_path / "ppo")
    process.send_signal(signal.SIGCONT)
    end = Ended(process)
    assert end.rc == 1 and end.err.count("\n") == 1 and "error: cannot write" in end.err, end


# ---- The command line ----


def shown(capsys, script, *arguments):
    """What a wrong command line prints, on one line, without the box around it."""
    with pytest.raises(SystemExit) as caught:
        parse(script, *arguments)
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err + printed.out
    return " ".join(re.sub("[│╭╮╰╯─]", " ", printed.err + printed.out).split())


WRONG = [
    (ppo, "--num-envs 1 --num-steps 32 --num-minibatches 64", "does not divide num_envs 1 x num_steps 32 = 32: try 32"),
    (ppo, "--num-envs 2 --num-steps 9 --num-minibatches 4", "does not divide num_envs 2 x num_steps 9 = 18: try 3"),
    (ppo, "--num-envs 1 --num-steps 1 --num-minibatches 1 --total-timesteps 20", "1 sample a minibatch of num_envs 1"),
    (ppo, "--num-envs 0", "--num-envs 0: it must be a number at least 1"),
    (ppo, "--num-minibatches 0", "--num-minibatches 0: it must be a number at least 1"),
    (ppo, "--gamma 1.5", "--gamma 1.5: it must be a number between 0 and 1"),
    (ppo, "--learning-rate nan", "--learning-rate nan: it must be"),
    (ppo, "--learning-rate inf", "--learning-rate inf: it must be"),
    (ppo, "--seed -1", "--seed -1: it must be"),
    (ppo, f"--eval-seed {2**64}", f"--eval-seed {2**64}: it must be a number between 0 and"),
    (ppo, f"--seed {10**400} --torch-threads 100000", "--torch-threads 100000: it must be"),
    (ppo_vector, "--vectorization envpool --capture-video", "--capture-video: envpool renders no frames"),
    (ppo, "--env-id CartPol-v1", "Did you mean: `CartPole`?"),
    (ppo_vector, "--env-id CartPole-v7", "[ `v0`, `v1` ]"),
    (ppo, "--env-id no_such_module:X-v0", "No module named 'no_such_module'"),
    (ppo, "--env-id probe_envs:NoSuchThing-v0", "--env-id probe_envs:NoSuchThing-v0"),
    (ppo_vector, "--env-id CartPole-v7 --vectorization envpool", "CartPole-v1"),
    (ppo, "--lerning-rate 1", "--learning-rate"),
    (ppo_vector, "--vectorization threads", "sync"),
    (ppo_plr, "--env-id bigfihs", "bigfish"),
    (ppo_plr_minigrid, "--env-id MiniGrid-Emty-5x5-v0", "MiniGrid-Empty-5x5"),
    (ppo_plr, "--num-envs 64 --num-workers 65", "--num-workers 65: it must be a number between 0 and 64"),
    (ppo_plr, "--plr-score valuel1", "value_l1"),
    (ppo_plr, "--plr-temperature 0", "temperature"),
    (ppo_plr, "--curriculum dr --plr-temperature nan", "temperature"),
    (ppo_plr, "--plr-score-transform match", "--plr-score value_l1: not for match, which takes"),
    (ppo_plr, "--num-levels 0", "--num-levels 0"),
    (ppo_vector, "--env-id DoesNotExist-v0 --vectorization async", "`DoesNotExist` doesn't exist"),
]  # fmt: skip


@pytest.mark.parametrize("script,arguments,expected", WRONG, ids=[case[1].replace("--", "") for case in WRONG])
def test_wrong_arguments_are_told_with_what_to_type(capsys, script, arguments, expected):
    """PPO-07, CLI-07, SYN-13."""
    assert expected in shown(capsys, script, arguments)


def test_flags(capsys):
    """CLI-04, CLI-06."""
    assert parse(ppo).anneal_lr and not parse(ppo, "--no-anneal-lr").anneal_lr and parse(ppo, "--track").track
    assert "Unrecognized options: False" in shown(capsys, ppo, "--anneal-lr False")
    with pytest.raises(SystemExit):
        parse(ppo, "--help")
    assert "--anneal-lr, --no-anneal-lr" in capsys.readouterr().out, "the help shows the right form"
    assert not parse(ppo, "--eval-greedy --no-eval-greedy").eval_greedy, "the last one counts"
    assert parse(ppo, "--target-kl 0.1").target_kl == 0.1 and parse(ppo, "--target-kl None").target_kl is None


def test_a_wrong_command_line_ends_the_program(tmp_path):
    end = Ended(start(ppo, tmp_path, "--num-minibatches 3"))
    assert end.rc == 2 and end.tracebacks == 0 and "does not divide" in end.err
    assert not list(tmp_path.iterdir())


@ALL
def test_the_saved_config_is_what_ran(script, tmp_path):
    """CLI-05."""
    saved = train(script, tmp_path).json("config.json")["args"]
    given = {word[2:].replace("-", "_") for word in TINY[script].split() if word.startswith("--")} | {"run_dir"}
    defaults = {k: str(v) if isinstance(v, Path) else v for k, v in vars(script.Args()).items()}
    derived = {"batch_size", "num_updates"}
    assert {k: v for k, v in saved.items() if k not in given | derived} == {
        k: v for k, v in defaults.items() if k not in given | derived
    }
    assert saved == {k: str(v) if isinstance(v, Path) else v
                     for k, v in vars(parse(script, TINY[script], f"--run-dir {tmp_path}")).items()}  # fmt: skip


def test_folder_names(tmp_path):
    """One level, no character that a file system may refuse; arguments that change the numbers change the name
    (CLI-02)."""

    def name(*arguments, **options):
        run = ppo.RunLogger(ppo.Args(*arguments, run_dir=tmp_path, **options))
        return run.dir.resolve().relative_to(tmp_path.resolve())

    base = name()
    assert re.fullmatch(r"ppo/CartPole-v1/seed1-[0-9a-f]{8}", str(base))
    assert program(tmp_path / "code.py").Args().exp_name == "code", "the file's name"
    odd = name(env_id="probe_envs:Chain-v0", exp_name='a/b:c"?*<>|')
    assert len(odd.parts) == 3 and re.fullmatch(r"[\w.-]+", odd.parts[0]) and odd.parts[1] == "probe_envs-Chain-v0"
    gc.collect()
    others = [name(gamma=0.9), name(seed=2), name(num_envs=8), name(env_id="CartPole-v0"), name(exp_name="other")]
    assert len({base, odd, *others, name(exp_name="..")}) == 8
    gc.collect()
    same = [name(track=True), name(progress="none"), name(keep_checkpoints=5), name(eval_only=True)]
    gc.collect()
    assert set(same) == {base}


# ---- Algorithm settings, through the whole program ----


@ALL
def test_target_kl_ends_the_update_and_the_count_is_true(script, tmp_path, monkeypatch):
    """PPO-11."""
    steps, step = [], torch.optim.Adam.step
    monkeypatch.setattr(torch.optim.Adam, "step", lambda *args, **kwargs: steps.append(1) or step(*args, **kwargs))
    run = train(script, tmp_path / "stop", "--target-kl 1e-9 --update-epochs 10 --num-minibatches 4")
    counts = [row["losses/gradient_steps"] for row in run.rows()]
    assert sum(counts) == len(steps) and max(counts) <= 2
    steps.clear()
    run = train(script, tmp_path / "all", "--update-epochs 3 --num-minibatches 4")
    assert [row["losses/gradient_steps"] for row in run.rows()] == [12] * len(run.rows())
    assert len(steps) == 12 * len(run.rows())


@pytest.mark.parametrize("script,flags", [
    (ppo, "--num-envs 1 --total-timesteps 32"),
    (ppo_vector, "--num-envs 1 --total-timesteps 32 --env-id Pendulum-v1 --norm-obs --norm-reward --clip-vloss"),
    (ppo_vector, "--num-envs 1 --total-timesteps 32 --vectorization envpool"),
    (ppo, "--num-envs 1 --num-steps 2 --num-minibatches 2 --no-norm-adv --total-timesteps 4"),
    (ppo_plr, "--num-envs 1 --total-timesteps 64"),
])  # fmt: skip
def test_one_environment(script, flags, tmp_path):
    """PPO-07, PPO-15."""
    run = train(script, tmp_path, flags)
    assert len(run.rows()) == 2
    assert all(torch.isfinite(weights).all() for weights in run.state()["agent"].values())


def test_a_total_below_one_rollout_is_one_update(tmp_path):
    """CLI-07."""
    run = train(ppo, tmp_path, "--total-timesteps 5")
    assert [row["global_step"] for row in run.rows()] == [32]


@PPO
def test_episodes_are_counted(script, tmp_path):
    """Chains of 3 steps: 2 environments in 4 updates of 16 steps end 2 * (64 // 3) of them, each worth 7
    (ENV-06, BEN-11)."""
    run = train(script, tmp_path, "--env-id probe_envs:Chain-v0")
    rows = run.rows()
    assert [row["charts/episodes"] for row in rows] == [2 * (16 * n // 3) for n in (1, 2, 3, 4)]
    assert all(row["charts/episodic_return"] == 7 and row["charts/episodic_length"] == 3 for row in rows)
    assert run.json("result.json")["eval/return_mean"] == 7


def test_metrics_stay_json_when_a_number_is_undefined(tmp_path):
    """PPO-10."""
    run = train(ppo, tmp_path, "--env-id probe_envs:Chain-v0 --num-steps 2")
    assert run.rows()[0]["charts/episodic_return"] is None
    assert "NaN" not in (run.dir / "metrics.jsonl").read_text()


def test_plr_tags(tmp_path):
    run = train(ppo_plr, tmp_path, "--eval-interval 1")
    for row in run.rows():
        tags = {"curriculum/levels_seen", "curriculum/replay_prob", "curriculum/score_mean", "perf/collect_s"}
        tags |= {"perf/update_s", "eval/return_mean", "eval_train/return_mean", "eval/generalization_gap"}
        assert tags <= row.keys()
        gap = row["eval_train/return_mean"] - row["eval/return_mean"]
        assert row["eval/generalization_gap"] == pytest.approx(gap)
        assert all(value is None or math.isfinite(value) for value in row.values())
    evals = run.rows("eval.jsonl")
    assert [row["split"] for row in evals] == (["eval"] * 2 + ["eval_train"] * 2) * 2
    assert all(0 <= row["level"] < 8 if row["split"] == "eval_train" else row["level"] >= 8 for row in evals)


# ---- Weights & Biases and videos ----


def wandb_steps(path):
    """global_step of each row of a file of wandb: records in LevelDB's log format, long ones in parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record, steps = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # no header begins in the last bytes of a block
            at += 2**15 - at % 2**15
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record, at = record + data[at + 7 : at + 7 + size], at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            items = Record.FromString(record).history.item
            steps += [json.loads(i.value_json) for i in items if "global_step" in (i.key, *i.nested_key)]
            record = b""
    return steps


def test_tracking_offline_and_a_video(tmp_path):
    """A resume has the same id in wandb; a run of another name or folder has its own
    (CLI-08, CLI-09, CLI-10, USE-03)."""
    arguments = ppo_vector, tmp_path, CHAIN[ppo_vector], "--track --capture-video --vectorization async"
    process = start(*arguments, step_s=0.02)
    wait_for_updates(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    end = Ended(process)
    assert (end.rc, end.left, end.tracebacks) == (75, [], 0), end
    end = Ended(start(*arguments))
    assert (end.rc, end.left) == (0, []), end
    run = Run(tmp_path)
    assert len(run.rows()) == 30
    logs = sorted(run.dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(logs) == 2 and len({path.name for path in logs}) == 1, "the same id"
    steps = [wandb_steps(path) for path in logs]
    assert sum(steps, []) == list(range(32, 961, 32)) and all(steps)
    others = [train(ppo, tmp_path / name, f"--exp-name {name}") for name in ("a", "b")]
    tokens = {torch.load(r.checkpoints()[-1], weights_only=True)["token"] for r in (run, *others)}
    assert len(tokens) == 3 and logs[0].stem.removeprefix("run-") in tokens
    import imageio.v3

    (video,) = (run.dir / "videos").glob("*.mp4")
    frames = imageio.v3.imread(video)
    assert len(frames) == run.rows("eval.jsonl")[-2]["length"] + 1
    assert frames.shape[1:] == (400, 600, 3) and frames.std() > 1
