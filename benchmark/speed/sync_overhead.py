"""What a curriculum costs environments in other processes: the Syllabus paper's Table 1, beside its public package.

    scripts/run --extra nethack --extra ray benchmark/speed/sync_overhead.py        # 10 minutes on 2 quiet cores
    scripts/run --extra nethack --extra ray benchmark/speed/sync_overhead.py --channel   # the channel alone, 4 minutes
    scripts/run --extra nethack --extra ray benchmark/speed/sync_overhead.py --check --rounds 1   # right? 2 minutes

N processes play M episodes each of NetHack (NetHackScore with all its observations, 146 KiB, or with blstats only) and
of CartPole, in every arm with the same seeds and actions, and with a TaskWrapper also where there is no curriculum:

none: no curriculum. episodes: an update at each end. steps: also every step's reward, flags and progress.
observations: and every observation, as it was when the environment returned it.

ours: curricula/sync*.py; ray: curricula/ray_sync.py with Ray actors, beside Ray actors without a curriculum; package:
`syllabus-rl` 0.7, which is no requirement: `.venv/bin/pip install --no-deps syllabus-rl==0.7 joblib` (it also needs
PettingZoo and Ray). Its steps always carry observations: in "steps" their keys are removed (CartPole's 4 floats stay);
it sends references to NetHack's arrays, which the next step overwrites: in "observations" the environment copies them.
Its Ray backend fails at the first reset. All draw one task ahead (`buffer_size` 2), which is not the package's default.

In every round the steps, episodes and rewards that were played are compared with those that arrived, with --check the
observations, too. The arms take turns in rotating order, those of Ray among themselves, at the end. Wall seconds run
until the curriculum has applied the last update; CPU seconds are those of all processes, Ray's servers included.
Ratios are medians over the rounds of arm / none.
"""

import importlib.util
import multiprocessing
import os
import platform
import resource
import signal
import statistics
import sys
import threading
import time
import zlib
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import curricula  # noqa: E402
from benchmark.runner.measured import finish  # noqa: E402
from curricula.core import Curriculum, TaskSpace, TaskWrapper  # noqa: E402

MODES = {"episodes": (False, False), "steps": (True, False), "observations": (True, True)}  # what a curriculum requires
NUM_TASKS, TIMEOUT = 200, 120.0  # seconds
WRONG = []  # differences between what was played and what arrived


@dataclass
class Args:
    workloads: tuple[Literal["nle", "nle-blstats", "cartpole"], ...] = ("nle", "nle-blstats", "cartpole")
    libraries: tuple[Literal["ours", "ray", "package"], ...] = ("ours", "ray", "package")
    processes: int = 4  # environments
    episodes: int = 48  # of each NetHack process; CartPole's play 4 times as many
    steps: int = 200  # limit of an episode
    rounds: int = 5  # turns of every arm
    channel: bool = False  # measure tasks and step records per second, and how long reset takes, with no environment
    seconds: float = 1.0  # of each measurement of --channel
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json
    check: bool = False  # compare the observations on both sides, too: the times then mean little


class Tiny(gym.Env):
    """Costs nothing: 4 floats, episodes of `length` steps."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(2)

    def __init__(self, length):
        self.length, self.obs = length, np.zeros(4, np.float32)

    def reset(self, *, seed=None, options=None):
        self.left = self.length
        return self.obs, {}

    def step(self, action):
        self.left -= 1
        return self.obs, 1.0, self.left == 0, False, {}


class CopyObservation(TaskWrapper):
    def observation(self, obs):
        return {name: array.copy() for name, array in obs.items()}


def make_env(workload, steps, copy=False):
    if workload == "tiny":
        return TaskWrapper(Tiny(steps), TaskSpace(NUM_TASKS))
    if workload == "cartpole":
        return TaskWrapper(gym.make("CartPole-v1", max_episode_steps=steps), TaskSpace(NUM_TASKS))
    import nle  # noqa: F401  registers its environments

    options = {"observation_keys": ("blstats",)} if workload == "nle-blstats" else {}
    env = gym.make("NetHackScore-v0", max_episode_steps=steps, **options)
    return (CopyObservation if copy else TaskWrapper)(env, TaskSpace(NUM_TASKS))


def fingerprint(obs):
    arrays = obs.values() if isinstance(obs, dict) else [obs]
    return sum(zlib.crc32(np.ascontiguousarray(array)) for array in arrays)


# ---- 1. The curricula and their channels -----------------------------------------------------------------------------


class Recorder:
    """Draws tasks uniformly and counts what it is told: the same work for every library."""

    requires_step_updates = requires_observations = False
    check, wanted, complete = False, None, None
    episodes = records = total = prints = 0

    def sample(self, k=1):
        return self.draws.integers(NUM_TASKS, size=k).tolist()

    def update_on_episode(self, episode_return, length, task, progress, env_id=None):
        self.episodes, self.total = self.episodes + 1, self.total + episode_return
        if self.episodes == self.wanted:
            self.complete.set()

    def update_on_step_batch(self, steps, env_id=None):
        self.records += len(steps)
        if self.check and self.requires_observations:
            final = steps[-1][5].get("final_obs")
            self.prints += sum(fingerprint(step[1]) for step in steps) + (0 if final is None else fingerprint(final))

    def pid(self):
        return os.getpid()

    def wait(self, episodes):
        """Until the updates of so many episodes are applied; those of their steps come before."""
        self.complete = threading.Event()
        self.wanted = episodes
        if self.episodes < episodes and not self.complete.wait(TIMEOUT):
            raise TimeoutError(f"{self.episodes} of {episodes} episodes reached the curriculum in {TIMEOUT} s")


class Ours(Recorder, Curriculum):
    pass


def load_package():
    """The public package and its Recorder."""
    errors = np.geterr()
    import syllabus.core
    import syllabus.task_space

    np.seterr(**errors)  # importing it makes numpy raise, everywhere

    class Package(Recorder, syllabus.core.Curriculum):
        def update_on_step_batch(self, steps, env_id=None):
            observations = steps[1]  # a list each of tasks, observations, rewards, ...; the reset's is a record too
            self.records += len(observations)
            if self.check and self.requires_observations:
                self.prints += sum(map(fingerprint, observations))

    return syllabus, Package


def connect(library, mode, workload, steps, processes, check=False, ahead=2):
    """(Recorder, its sync, a function that makes an environment on it); without a curriculum (None, None, ...)."""
    copy = library == "package" and mode == "observations" and workload.startswith("nle")
    make, space = partial(make_env, workload, steps, copy), TaskSpace(NUM_TASKS)
    if mode == "none":
        return None, None, make
    if library == "package":
        syllabus, Package = load_package()
        space, wrapper = syllabus.task_space.DiscreteTaskSpace(NUM_TASKS), syllabus.core.GymnasiumSyncWrapper
    recorder = (Package if library == "package" else Ours)(space)
    recorder.draws, recorder.check = np.random.default_rng(0), check
    recorder.requires_step_updates, recorder.requires_observations = MODES[mode]
    options = {"buffer_size": ahead}
    if library == "package":
        curriculum = syllabus.core.make_multiprocessing_curriculum(recorder, start=False, timeout=TIMEOUT)
        options |= {"remove_keys": list(getattr(make().observation_space, "spaces", ()))} if mode == "steps" else {}
    elif library == "ours":
        curriculum = curricula.make_multiprocessing_curriculum(
            recorder, max_envs=processes, timeout=TIMEOUT, start=False
        )
        wrapper = curricula.GymnasiumSyncWrapper
    else:
        from curricula.ray_sync import RayGymnasiumSyncWrapper as wrapper
        from curricula.ray_sync import make_ray_curriculum

        curriculum = make_ray_curriculum(recorder, max_envs=processes, timeout=TIMEOUT)
    components = curriculum.components
    return recorder, curriculum, lambda: wrapper(make(), space, components, **options)


# ---- 2. What a process does ------------------------------------------------------------------------------------------


def play(env, index, workload, mode, episodes, steps, check):
    """Plays its episodes, the same ones in every arm: the number of steps, of rewards, the observations' prints."""
    told, done = (
        {"new_task": 0} if mode == "none" else {},
        {"episodes": episodes, "steps": 0, "total": 0.0, "prints": 0},
    )
    for seed in range(10_000 * index, 10_000 * index + episodes):
        if workload != "cartpole":
            env.unwrapped.seed(core=seed, disp=seed, reseed=False)  # NLE ignores reset's
        actions = np.random.default_rng(seed).integers(env.action_space.n, size=steps).tolist()
        obs, _ = env.reset(seed=seed, **told)
        done["prints"] += fingerprint(obs) if check else 0
        for action in actions:
            if workload == "cartpole":
                action = int(obs[2] + obs[3] > 0)  # keeps the pole up
            obs, reward, terminated, truncated, _ = env.step(action)
            done["steps"], done["total"] = done["steps"] + 1, done["total"] + reward
            done["prints"] += fingerprint(obs) if check else 0
            if terminated or truncated:
                break
    return done


def hammer(env, index, seconds):
    """Plays episodes for some seconds: how many, of how many steps, and the times of the resets."""
    times, steps, end = [], 0, time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        env.reset()
        times.append(time.perf_counter() - start)
        ended = False
        while not ended:
            _, _, ended, _, _ = env.step(0)
            steps += 1
    return {"episodes": len(times), "steps": steps, "times": times}


def player(connection, wrap, job, index):
    """A process: makes its environment, waits for the start, does its job."""
    env = wrap()
    connection.send(time.process_time())
    connection.recv()
    connection.send(job(env, index))
    env.close()


def receive(connection):
    if not connection.poll(TIMEOUT + 60):
        raise TimeoutError("a process has not answered in time")
    try:
        return connection.recv()
    except EOFError:
        raise RuntimeError("a process died: its error stands above") from None


def run_native(recorder, curriculum, wrap, job, processes):
    """The processes' results, wall and CPU seconds until all updates are applied."""
    context, players = multiprocessing.get_context("fork"), []  # the package knows no other way
    interrupt = signal.getsignal(signal.SIGINT)
    for index in range(processes):
        here, there = context.Pipe()
        process = context.Process(target=player, args=(there, wrap, job, index), daemon=True)
        process.start()
        there.close()
        players.append((process, here))
    set_up = sum(receive(here) for _, here in players)
    if curriculum:
        curriculum.start()
    used = lambda: sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) + time.process_time()  # noqa: E731
    wall, cpu = time.perf_counter(), used()
    for _, here in players:
        here.send("go")
    found = [receive(here) for _, here in players]
    if curriculum:
        recorder.wait(sum(result["episodes"] for result in found))
    wall = time.perf_counter() - wall
    deadline = time.monotonic() + TIMEOUT
    for process, _ in players:
        while process.is_alive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"process {process.pid} has not ended {TIMEOUT} s after its last episode")
            if hasattr(curriculum, "components") and hasattr(curriculum.components, "get_metrics"):
                curriculum.components.get_metrics()  # the package's processes cannot end before somebody reads these
            process.join(0.1)
    if curriculum:
        curriculum.stop()
    signal.signal(signal.SIGINT, interrupt)  # the package's handler would stop a curriculum that is gone
    return found, wall, used() - cpu - set_up


class RayPlayer:
    """An actor: `player`, for one job after the other."""

    def prepare(self, wrap):
        self.env = wrap()
        return os.getpid()

    def run(self, job, index):
        result = job(self.env, index)
        self.env.close()  # returns when all its updates are applied
        return result


def seconds_of(pids):
    """CPU seconds of these processes so far."""
    tasks = (task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def run_ray(recorder, curriculum, wrap, job, players):
    """As run_native, with actors that are there already."""
    import ray

    pids = ray.get([actor.prepare.remote(wrap) for actor in players], timeout=TIMEOUT)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()  # Ray's servers
    pids += [os.getpid(), *children, *([curriculum.pid()] if curriculum else [])]
    wall, cpu = time.perf_counter(), seconds_of(pids)
    found = ray.get([actor.run.remote(job, index) for index, actor in enumerate(players)], timeout=TIMEOUT + 60)
    wall, cpu = time.perf_counter() - wall, seconds_of(pids) - cpu
    if curriculum:
        for name in ("episodes", "records", "total", "prints"):
            setattr(recorder, name, getattr(curriculum, name))
        curriculum.stop()
    return found, wall, cpu


# ---- 3. The tables ---------------------------------------------------------------------------------------------------


def wrong(text):
    WRONG.append(text)
    print(f"WRONG: {text}", flush=True)


def measure(args, library, mode, workload, players):
    """One arm: steps, wall and CPU seconds, sum of rewards. Says so if the curriculum's counts differ."""
    episodes = args.episodes * (4 if workload == "cartpole" else 1)
    arm = connect(library, mode, workload, args.steps, args.processes, args.check)
    options = {"workload": workload, "mode": mode, "episodes": episodes, "steps": args.steps, "check": args.check}
    run = run_ray if players else run_native
    found, wall, cpu = run(*arm, partial(play, **options), players or args.processes)
    sent = {key: sum(result[key] for result in found) for key in found[0]}
    recorder = arm[0]
    if recorder:
        # the package makes a record of each reset, too
        records = 0 if mode == "episodes" else sent["steps"] + (sent["episodes"] if library == "package" else 0)
        expected = {"episodes": sent["episodes"], "records": records, "total": sent["total"]}
        expected |= {"prints": sent["prints"]} if args.check and mode == "observations" else {}
        for name, value in expected.items():
            if not np.isclose(getattr(recorder, name), value, rtol=1e-9):
                wrong(f"{library} {mode} {workload}: {name} {getattr(recorder, name)}, sent {value}")
    return sent["steps"], wall, cpu, sent["total"]


def rotated(arms, number):
    return arms[number % len(arms) :] + arms[: number % len(arms)]


def compare(args, arms, workloads, players=None):
    """Rows of the table: every arm in turns."""
    lines = []
    for workload in workloads:
        results = {arm: [] for arm in arms}
        for number in range(args.rounds):
            for arm in rotated(arms, number):
                results[arm].append(measure(args, *arm, workload, players))
                steps, wall, cpu, _ = results[arm][-1]
                line = f"round {number + 1} {workload} {' '.join(arm)}: {steps} steps, {wall:.2f} s, CPU {cpu:.2f} s"
                print(line, file=sys.stderr, flush=True)
        if len(played := {result[::3] for rounds in results.values() for result in rounds}) > 1:
            wrong(f"not every arm played the same {workload}: steps and rewards {played}")
        bases, median = results[arms[0]], statistics.median
        for (library, mode), rounds in results.items():
            cells = [workload, library, mode, *(f"{median([r[i] for r in rounds]):.2f}" for i in (1, 2))]
            pairs = list(zip(rounds, bases)) if mode != "none" else []
            cells += [f"{median([r[i] / base[i] for r, base in pairs]) - 1:+.1%}" if pairs else "" for i in (1, 2)]
            cells += [f"{median([(r[2] - base[2]) / r[0] * 1e6 for r, base in pairs]):.1f}" if pairs else ""]
            lines.append(cells)
    return lines


def channel(args, libraries):
    """Rows: tasks and step records per second, with environments that cost nothing; how long their resets take."""
    lines = []
    arms = [arm for arm in (("ours", 2), ("package", 1), ("package", 2)) if arm[0] in libraries]
    cases = [("episodes", 1), ("episodes", 200), ("steps", 200), ("observations", 200)]
    for (mode, length), processes in [(case, n) for case in cases for n in (1, 4)]:
        found = {arm: {"tasks": [], "records": [], "p50": [], "p95": []} for arm in arms}
        for number in range(args.rounds):
            for library, ahead in rotated(arms, number):
                recorder, *arm = connect(library, mode, "tiny", length, processes, ahead=ahead)
                results, wall, _ = run_native(recorder, *arm, partial(hammer, seconds=args.seconds), processes)
                times = np.concatenate([result["times"] for result in results]) * 1e3
                figures = recorder.episodes / wall, recorder.records / wall, *np.percentile(times, [50, 95])
                for values, figure in zip(found[library, ahead].values(), figures):
                    values.append(figure)
        for (library, ahead), figures in found.items():
            tasks, records, p50, p95 = map(statistics.median, figures.values())
            cells = [mode, length, processes, library, ahead, f"{tasks:,.0f}", f"{records:,.0f}" if records else ""]
            lines.append([*map(str, cells), f"{p50:.3f}", f"{p95:.3f}"])
            print(*lines[-1], file=sys.stderr, flush=True)
    return lines


def main(args):
    libraries, workloads = list(args.libraries), list(args.workloads)
    for chosen, names, module, remedy in (
        (libraries, ["package"], "syllabus", ".venv/bin/pip install --no-deps syllabus-rl==0.7 joblib"),
        (libraries, ["ray"], "ray", "scripts/run --extra ray benchmark/speed/sync_overhead.py"),
        (workloads, ["nle", "nle-blstats"], "nle", "scripts/run --extra nethack benchmark/speed/sync_overhead.py"),
    ):
        for name in set(names) & set(chosen) if importlib.util.find_spec(module) is None else ():
            chosen.remove(name)
            print(f"left out: {name}, because {module} is not installed ({remedy})")
    native, lines = [library for library in libraries if library != "ray"], []
    if args.channel:
        head = "updates | steps an episode | processes | library | ahead | tasks/s | steps/s | reset p50, ms | p95, ms"
        lines = channel(args, native)
    else:
        head = "workload | library | updates | wall, s | CPU, s | wall over none | CPU over none | us CPU a step"
        arms = [("none", "none"), *((library, mode) for library in native for mode in MODES)]
        lines += compare(args, arms, workloads) if native else []
        lines += compare_ray(args, workloads) if "ray" in libraries else []
    machine = f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, numpy {np.__version__}"
    note = f"medians of {args.rounds} rounds"
    if not args.channel:
        size = f"{args.processes} processes x {args.episodes} episodes (CartPole: {4 * args.episodes})"
        note += f"; {size} of at most {args.steps} steps; {len(WRONG)} differences in what arrived"
    print(f"\n{machine}; {note}")
    finish({"sync_channel" if args.channel else "sync_overhead": (head.split(" | "), lines)}, args.output, note)


def compare_ray(args, workloads):
    os.environ["RAY_AUTH_MODE"] = "disabled"  # a cluster of one machine
    import ray

    ray.init("local", num_cpus=args.processes, object_store_memory=2 * 10**8, include_dashboard=False,
             log_to_driver=False, logging_level="ERROR")  # fmt: skip
    try:
        players = [ray.remote(RayPlayer).options(num_cpus=0).remote() for _ in range(args.processes)]
        return compare(args, [("ray", "none"), *(("ray", mode) for mode in MODES)], workloads, players)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
