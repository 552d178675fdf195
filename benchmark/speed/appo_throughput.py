"""Environment steps per second of algos/appo_pfsp.py, learning on, beside OpenSpiel's PyTorch PPO, in one run.

    scripts/run --extra openspiel benchmark/speed/appo_throughput.py               # about 4 minutes on 2 cores
    scripts/run --extra openspiel benchmark/speed/appo_throughput.py --rounds 1 --seconds 5

Both play Connect Four against a copy of themselves; a step is the learner's move with the opponent's reply. The same
network (two layers of 256 units, shared by policy and value), 64 games, updates from 64 x 32 steps in 2 epochs of 4
minibatches, one thread for the learner. OpenSpiel's PPO plays seat 0 alone and knows no opponent: here it is given one,
its own network frozen at the last update, which moves for all games at once, as OpenSpiel's `step` does in evaluation.
Ours alternates seats; with pfsp half of the games are against the league's snapshots, 4 at a time, which costs more.
Arms take turns; start-up and the first updates are left out; the table has medians.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
from benchmark.runner.measured import finish  # noqa: E402

SCRIPT = ROOT / "algos" / "appo_pfsp.py"
GAMES, STEPS = 64, 32
ARMS = {  # of ours: its arguments
    "appo_pfsp self, 0 actors": ["--opponents", "self", "--num-actors", "0"],
    "appo_pfsp self, 1 actor": ["--opponents", "self", "--num-actors", "1"],
    "appo_pfsp pfsp, 0 actors": ["--num-actors", "0", "--snapshot-interval", "5"],
    "appo_pfsp pfsp, 1 actor": ["--num-actors", "1", "--snapshot-interval", "5"],
}
PEER = "open_spiel PPO"


@dataclass
class Args:
    rounds: int = 3  # turns of every arm
    seconds: float = 12  # measured per turn, at least
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json


class Network(nn.Module):
    """Ours, with the methods that OpenSpiel's PPO calls."""

    def __init__(self, num_actions, observation_shape, device):
        from open_spiel.python.pytorch import ppo

        super().__init__()
        layers = ppo.layer_init(nn.Linear(*observation_shape, 256)), nn.ReLU(), ppo.layer_init(nn.Linear(256, 256))
        self.torso = nn.Sequential(*layers, nn.ReLU())
        self.actor = ppo.layer_init(nn.Linear(256, num_actions), std=0.01)
        self.critic = ppo.layer_init(nn.Linear(256, 1), std=1)
        self.register_buffer("mask_value", torch.tensor(ppo.INVALID_ACTION_PENALTY))
        self.masked = ppo.CategoricalMasked

    def get_value(self, x):
        return self.critic(self.torso(x))

    def get_action_and_value(self, x, legal_actions_mask=None, action=None):
        hidden = self.torso(x)
        probs = self.masked(logits=self.actor(hidden), masks=legal_actions_mask, mask_value=self.mask_value)
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden), probs.probs


def run_peer(seconds):
    """Steps per second of OpenSpiel's PPO."""
    from open_spiel.python.pytorch.ppo import PPO
    from open_spiel.python.rl_environment import Environment
    from open_spiel.python.vector_env import SyncVectorEnv

    envs = SyncVectorEnv([Environment("connect_four") for _ in range(GAMES)])
    shape = tuple(envs.observation_spec()["info_state"])
    options = {"num_envs": GAMES, "steps_per_batch": STEPS, "num_minibatches": 4, "update_epochs": 2, "gamma": 1.0,
               "learning_rate": 1e-3, "agent_fn": Network}  # fmt: skip
    learner = PPO(shape, 7, 2, player_id=0, **options)
    opponent = PPO(shape, 7, 2, player_id=1, **options)
    now, steps, start = envs.reset(), 0, None
    while start is None or time.perf_counter() < start + seconds:
        opponent.network.load_state_dict(learner.network.state_dict())
        for _ in range(STEPS):
            now, rewards, ended, _ = envs.step(learner.step(now))
            waiting = [i for i in range(GAMES) if not ended[i]]
            for i, answer in zip(waiting, opponent.step([now[i] for i in waiting], is_evaluation=True)):
                now[i] = envs.envs[i].step([answer.action])
                rewards[i], ended[i] = now[i].rewards, now[i].last()
            learner.post_step([reward[0] for reward in rewards], ended)
            now = envs.reset(envs_to_reset=ended)
        learner.learn(now)
        if start is None:
            start = time.perf_counter()  # after the first update
        else:
            steps += GAMES * STEPS
    return steps / (time.perf_counter() - start)


def run_ours(arguments, seconds):
    """Steps per second between the logged rows that are at least `seconds` apart."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, SCRIPT, "--env-id", "connect_four", "--envs-per-actor", GAMES, "--batch-rollouts",
                   GAMES, "--num-steps", STEPS, "--total-timesteps", 10**9, "--log-interval", 5, "--progress", "none",
                   "--checkpoint-interval", 10**9, "--run-dir", folder, *arguments]  # fmt: skip
        process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
        try:
            rows = []
            while len(rows) < 3 or rows[-1]["wall_s"] < rows[1]["wall_s"] + seconds:
                time.sleep(0.2)
                if process.poll() is not None:
                    raise SystemExit(f"error: {' '.join(map(str, command))} ended:\n{process.stderr.read()[-2000:]}")
                file = next(Path(folder).rglob("metrics.jsonl"), None)
                lines = file.read_text().splitlines(keepends=True) if file else []
                rows = [json.loads(line) for line in lines if line.endswith("\n")]
        finally:
            process.kill()
            process.wait()
    first, last = rows[1], rows[-1]
    return (last["global_step"] - first["global_step"]) / (last["wall_s"] - first["wall_s"])


def main(args):
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {args.rounds} rounds of {args.seconds:g} s", flush=True)
    found = {name: [] for name in (PEER, *ARMS)}
    for number in range(args.rounds):
        for name in found:
            found[name].append(run_peer(args.seconds) if name == PEER else run_ours(ARMS[name], args.seconds))
            print(f"round {number + 1}, {name}: {found[name][-1]:,.0f} steps/s", flush=True)
    header, rows = ["Connect Four", "moves/s", "lowest", "highest", "x OpenSpiel's"], []
    for name, speeds in found.items():
        ratio = statistics.median(speed / peer for speed, peer in zip(speeds, found[PEER]))
        numbers = [f"{x:,.0f}" for x in (statistics.median(speeds), min(speeds), max(speeds))]
        rows.append([name, *numbers, f"{ratio:.1f}"])
    finish({"appo_throughput": (header, rows)}, args.output, f"medians of {args.rounds} rounds of {args.seconds:g} s")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
