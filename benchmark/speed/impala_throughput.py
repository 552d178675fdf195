"""Environment frames per second of algos/impala_popart*.py, learning on, beside sample-factory 2.1.1 (APPO), in a run.

    python benchmark/speed/impala_throughput.py --peer-python PEER/bin/python        # all, about 14 minutes on 2 cores
    python benchmark/speed/impala_throughput.py --rounds 1 --seconds 4 --slept 4 8   # a short look at our side

Three parts, a table each:

- learning: CartPole and Pong (4 frames a step). Both sides have the same network without a recurrent core (a layer of
  256 units, on Pong behind the three convolutions of DQN), updates from 1,024 samples, each used once, and the better
  of 32 and 64 environments in a batch of inference. Ours has 0, 1 and 2 actor processes, the peer an environment
  process (async) or none (serial). Start-up and first seconds are left out; CPU-seconds are those of all processes.
- actor: an actor alone (environments, inference, recording), and bare loops with the same network over the actor's
  environments and over the vector environments of gymnasium or envpool; in turns, in one process, one thread, by CPU
  time. The policy is a fresh one: on CartPole an episode has some 20 steps, and ours are seeded one by one.
- slept: environments that sleep 2 ms a step with 4 to 32 actors: what the design costs as actors are added.

The peer needs an environment of its own, with older packages (the newest envpool that works with its gymnasium):

    python3.11 -m venv PEER && PEER/bin/pip install torch==2.13.0
    PEER/bin/pip install sample-factory==2.1.1 numpy==1.26.4 gymnasium==0.29.1 'huggingface-hub<1' 'setuptools<81' \
        envpool==0.8.4 gym==0.26.2 'shimmy<2'
"""

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

ALGOS = Path(__file__).resolve().parents[2] / "algos"
sys.path[:0] = [str(ALGOS), str(ALGOS.parent)]
import impala_popart  # noqa: E402
import impala_popart_atari  # noqa: E402

from benchmark.runner.measured import finish  # noqa: E402

SCRIPTS = {"CartPole-v1": impala_popart, "Pong-v5": impala_popart_atari}
TICKS = os.sysconf("SC_CLK_TCK")
# Kills a session once its input ends: when this process closes it, or is killed itself.
GUARD = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"

GAMES = {  # game: frames per step, our environments per actor, our network, the peer's game and network
    "CartPole-v1": (1, 64, "mlp", ["sf_examples.train_gym_env", "--env", "CartPole-v1", "--encoder_mlp_layers", 256]),
    "Pong-v5": (4, 32, "nature", ["sf_examples.envpool.atari.train_envpool_atari", "--env", "atari_pong",
                                  "--encoder_conv_architecture", "convnet_atari", "--encoder_conv_mlp_layers", 256]),
}  # fmt: skip
PEER = {  # the best found of its settings. Splits: halves of a worker's environments, one of which is always stepped
    ("CartPole-v1", "async"): ["--num_envs_per_worker", 64, "--worker_num_splits", 1],
    ("CartPole-v1", "serial"): ["--num_envs_per_worker", 64, "--worker_num_splits", 1, "--rollout", 16],
    ("Pong-v5", "async"): ["--env_agents", 32, "--num_envs_per_worker", 2, "--worker_num_splits", 2],
    ("Pong-v5", "serial"): ["--env_agents", 32, "--num_envs_per_worker", 1, "--worker_num_splits", 1],
}
SAMPLES = 1024  # of an update


@dataclass
class Args:
    peer_python: Path | None = None  # interpreter of the environment with sample-factory; without: ours alone
    rounds: int = 3  # turns of every arm
    seconds: float = 10  # measured per turn, after the warm-up
    warm_up: float = 3  # seconds from an arm's first update that are left out
    games: tuple[str, ...] = tuple(GAMES)  # which games
    slept: tuple[int, ...] = (4, 8, 16, 32)  # actor processes of the third part
    output: Path | None = None  # also write the tables there, as benchmark/results/speed/NAME.json


class SleepEnv(gym.Env):
    """An environment that takes 2 ms a step and no CPU."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (4,), np.float32), gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(4, np.float32), {}

    def step(self, action):
        time.sleep(0.002)
        return np.zeros(4, np.float32), 1.0, False, False, {}


gym.register("Sleep-v0", "impala_throughput:SleepEnv", max_episode_steps=500)


def our_command(env_id, num_actors, envs_per_actor, network, folder):
    """32 rollouts an update, or as many as an actor has environments."""
    rollouts = max(envs_per_actor, 32)
    script = SCRIPTS.get(env_id, impala_popart).__file__
    return [sys.executable, script, "--env-id", env_id, "--num-actors", num_actors, "--envs-per-actor", envs_per_actor,
            "--batch-rollouts", rollouts, "--num-steps", SAMPLES // rollouts, "--network", network, "--lstm-size", 0,
            "--log-interval", 5 if env_id == "CartPole-v1" else 1, "--total-timesteps", 10**9, "--checkpoint-interval",
            10**9, "--run-dir", folder, "--progress", "none"]  # fmt: skip


def our_rows(folder):
    file = next(Path(folder).rglob("metrics.jsonl"), None)
    lines = file.read_text().splitlines(keepends=True) if file else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def peer_command(python, game, mode, folder):
    return [python, "-m", *GAMES[game][3], "--algo", "APPO", "--experiment", "run", "--train_dir", folder, "--device",
            "cpu", "--use_rnn", False, "--recurrence", 1, "--nonlinearity", "relu", "--normalize_input", False,
            "--normalize_returns", False, "--rollout", 32, "--batch_size", SAMPLES, "--num_batches_per_epoch", 1,
            "--num_epochs", 1, "--serial_mode", mode == "serial", "--async_rl", mode == "async", "--num_workers", 1,
            *PEER[game, mode]]  # fmt: skip


def peer_frames(log):
    found = re.findall(r"Total num frames: (\d+)", log.read_text(errors="replace"))
    return int(found[-1]) if found else 0


def cpu_seconds(session):
    """CPU time of all living processes of a session."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int(fields[11]) + int(fields[12])
    return total / TICKS


def measure(command, frames, folder, args):
    """Runs a command until the count frames() has been watched for long enough: frames per second, per CPU-second."""
    environment, log = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}, folder / "log"
    with open(log, "w") as output:
        process = subprocess.Popen([str(part) for part in command], stdout=output, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)  # fmt: skip
    guard = subprocess.Popen(
        [sys.executable, "-c", GUARD, str(process.pid)], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        seen, last, first, limit = [], 0, None, time.monotonic() + 180
        while not seen or seen[-1][0] < seen[0][0] + args.seconds:
            time.sleep(0.05)
            if process.poll() is not None or time.monotonic() > limit:
                raise SystemExit(
                    f"error: nothing to measure from {' '.join(map(str, command))}\n{log.read_text()[-2000:]}"
                )
            count, now = frames(), time.monotonic()
            if count != last:  # only then is the count exact
                first, last = first or now, count
                if now >= first + args.warm_up:
                    seen.append((now, count, cpu_seconds(process.pid)))
    finally:
        guard.communicate()
        process.wait()
    wall, done, cpu = (after - before for before, after in zip(seen[0], seen[-1]))
    return done / wall, done / cpu


def run_ours(env_id, num_actors, envs_per_actor, network, skip, args):
    """Frames per second and per CPU-second, the share of time that the learner and an actor wait, the policy lag."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = our_command(env_id, num_actors, envs_per_actor, network, folder)
        speed = measure(command, lambda: sum(r["global_step"] for r in our_rows(folder)[-1:]) * skip, folder, args)
        rows = our_rows(folder)[2:]
    seconds = sum(row["perf/collect_s"] + row["perf/update_s"] for row in rows)
    learner, actors = (sum(row[f"async/{who}_wait_s"] for row in rows) / seconds for who in ("learner", "actor"))
    return *speed, learner, actors / max(num_actors, 1), statistics.mean(row["async/policy_lag_mean"] for row in rows)


def run_peer(game, mode, args):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = peer_command(args.peer_python, game, mode, folder)
        return measure(command, lambda: peer_frames(folder / "log"), folder, args)


def table(header, rows):
    return header.split(", "), [list(map(str, row)) for row in rows]


def learning(args):
    found, ours, peer = {}, [0, 1, 2], ["async", "serial"] if args.peer_python else []
    for number in range(args.rounds):
        for game in args.games:
            skip, envs, network, _ = GAMES[game]
            for arm in ours + peer:
                if arm in peer:
                    result = run_peer(game, arm, args)
                else:
                    result = run_ours(game, arm, envs, network, skip, args)
                found.setdefault((game, arm), []).append(result)
                print(f"round {number + 1}, {game}, {arm}: {result[0]:.0f} frames/s", flush=True)
    rows = []
    for game in args.games:
        medians = {arm: [statistics.median(column) for column in zip(*found[game, arm])] for arm in ours + peer}
        best = max((medians[arm][0] for arm in peer), default=math.nan)
        for arm, (speed, per_cpu, *waits) in medians.items():
            name = f"sample-factory, {arm}" if arm in peer else f"impala_popart, {arm} actors"
            waits = [f"{waits[0]:.0%}", f"{waits[1]:.0%}", f"{waits[2]:.1f}"] if waits else ["", "", ""]
            rows.append([game, name, f"{speed:,.0f}", f"{per_cpu:,.0f}", f"{speed / best:.2f}", *waits])
    return table("game, , frames/s, frames per CPU-s, x best peer, learner waits, actors wait, policy lag", rows)


def make_loops(game):
    """Functions that play SAMPLES steps: an actor's unroll, and bare loops over its environments and over those of
    gymnasium or envpool."""
    _, E, network, _ = GAMES[game]
    T = SAMPLES // E
    script = SCRIPTS[game]
    options = script.Args(env_id=game, num_actors=0, envs_per_actor=E, num_steps=T, batch_rollouts=E, lstm_size=0,
                          network=network)  # fmt: skip
    space = script.SPACE if script is impala_popart_atari else script.shared_space(options.games)[0]
    policy, generator = script.Policy(space, network, 0), torch.Generator().manual_seed(0)
    actor, other = (script.make_actor(options, np.random.SeedSequence(0), 0, 0) for _ in range(2))
    actor.weights[:] = script.flat_weights(policy)
    layout = script.Actor.layout(T, E, space, 0)
    slot = {name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()}
    if game == "Pong-v5":
        import envpool

        envs = envpool.make(game, env_type="gymnasium", num_envs=E, num_threads=1, full_action_space=True, seed=0)
    else:
        envs = gym.make_vec(game, num_envs=E, vectorization_mode="sync")

    @torch.inference_mode()
    def bare(envs, obs):
        for _ in range(T):
            inputs = torch.from_numpy(obs[0])
            if inputs.dtype == torch.uint8:
                inputs = inputs.to(torch.float32, memory_format=torch.channels_last).div_(255)
            logits = policy.head(policy.torso(inputs))
            obs[0] = envs.step(torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].numpy())[0]

    loops = partial(actor.unroll, slot), partial(bare, other.envs, [other.envs.obs])
    return *loops, partial(bare, envs, [envs.reset()[0]])


def actor_alone(args):
    rows = []
    torch.set_num_threads(1)
    for game in args.games:
        loops, rates = make_loops(game), []
        for _ in range(3 * args.rounds):
            rates.append([])
            for play in loops:
                frames, start = 0, time.process_time()
                while time.process_time() < start + args.seconds / 6:
                    play()
                    frames += SAMPLES * GAMES[game][0]
                rates[-1].append(frames / (time.process_time() - start))
        speeds = [f"{statistics.median(column):,.0f}" for column in zip(*rates)]
        shares = [f"{statistics.median(rate[0] / rate[i] for rate in rates):.0%}" for i in (1, 2)]
        rows.append([game, *speeds, *shares])
    return table(
        "game, actor: frames per CPU-s, its environments bare, gymnasium's or envpool's bare, share, share", rows
    )


def slept(args):
    rows, base = [], None
    for actors in args.slept:
        speed, _, learner, actor, lag = run_ours("impala_throughput:Sleep-v0", actors, 16, "mlp", 1, args)
        base = base or speed / actors
        waits = f"{learner:.0%}", f"{actor:.0%}", f"{lag:.1f}"
        rows.append([actors, f"{speed:,.0f}", f"{speed / actors:,.0f}", f"{speed / actors / base:.0%}", *waits])
    return table("actors, steps/s, per actor, of the first, learner waits, actors wait, policy lag", rows)


def main(args):
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {args.rounds} rounds of {args.seconds:g} s", flush=True)
    parts = {"impala_throughput": learning, "impala_actor": actor_alone, "impala_slept": slept}
    finish({name: part(args) for name, part in parts.items()}, args.output, f"medians of {args.rounds} rounds")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
