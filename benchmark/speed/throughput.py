"""Steps per second of algos/ppo_plr.py on Procgen, beside two plain loops of the same network, in one run.

    python benchmark/speed/throughput.py                  # both networks, 3 rounds, about 15 minutes on 2 cores
    python benchmark/speed/throughput.py --networks nature --rounds 1

The shape is the paper's: 64 environments x 256 steps, 3 epochs of 8 minibatches of 2,048. Every arm is a process of its
own; the arms take turns, and the table gives the median of the rounds. Arms:

- plr, dr: the script itself; its own clock says where the time goes.
- plain: CleanRL's shape: float32 NCHW storage, each minibatch in one piece, torch and malloc as they come.
- simple: the best simple loop: uint8 storage, channels-last, pieces of 512, malloc thresholds raised.

The two loops do a whole rollout and `minibatches` of the 24 minibatches, and their learning time is scaled up.
`--check` compares instead the gradients of the three ways of learning on one minibatch.
"""

import ctypes
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

SCRIPT = Path(__file__).resolve().parents[2] / "algos" / "ppo_plr.py"
sys.path[:0] = [str(SCRIPT.parent), str(SCRIPT.parents[1])]
import ppo_plr  # noqa: E402

from benchmark.runner.measured import finish  # noqa: E402

T, N, EPOCHS, MINIBATCHES = 256, 64, 3, 8
COEFS = 0.2, True, 0.01, 0.5  # clip, value clip, entropy, value loss


@dataclass
class Args:
    networks: tuple[Literal["impala", "nature"], ...] = ("impala", "nature")  # which networks
    rounds: int = 3  # turns of every arm
    minibatches: int = 4  # minibatches that the two loops work off, of 24
    env_id: str = "bigfish"  # Procgen game
    updates: int = 2  # updates of the script; the last one is measured
    check: bool = False  # compare the gradients, measure nothing
    output: Path | None = None  # also write the table there, as benchmark/results/speed/NAME.json
    loop: Literal["", "plain", "simple"] = ""  # used by the benchmark itself: run one loop, print its seconds


def textbook_agent(ppo_plr, network):
    """The script's network with the input as a simple loop writes it: NCHW floats or NHWC bytes, divided by 255."""

    class Agent(ppo_plr.Agent):
        def forward(self, obs):
            features = self.network((obs if obs.is_floating_point() else obs.permute(0, 3, 1, 2)) / 255)
            return self.policy(features), self.value(features).squeeze(-1)

    return Agent((64, 64, 3), 15, network)


def textbook_gradients(ppo_plr, agent, flat, rows, piece):
    """The minibatch in pieces of `piece` samples (2,048: in one), gradients added by autograd."""
    agent.zero_grad()
    for part in np.array_split(rows, math.ceil(len(rows) / piece)):
        b = {name: tensor[part] for name, tensor in flat.items()}
        logits, value = agent(b.pop("obs"))
        logprobs = logits.log_softmax(-1)
        new = logprobs.gather(1, b.pop("actions")[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1), value
        loss, _ = ppo_plr.ppo_loss(*new, *b.values(), *COEFS)
        (loss * (len(part) / len(rows))).backward()


def random_batch(size):
    """A batch as after a rollout: the values do not matter for the time."""
    noise = {name: torch.randn(size) for name in ("old_value", "advantage", "returns")}
    return {"actions": torch.randint(15, (size,)), "old_logprob": -2.7 + 0.1 * torch.randn(size)} | noise


def run_loop(args, network):
    """One update of a plain or simple loop; returns its seconds by activity."""
    plain, piece = args.loop == "plain", 2048 if args.loop == "plain" else 512
    agent = textbook_agent(ppo_plr, network)
    if not plain:
        # Copied from algos/ppo_plr.py:region(memory)
        with suppress(OSError, AttributeError):  # glibc keeps freed activations, instead of faulting them in anew
            for option, value in ((-3, 2**30), (-1, 2**31 - 1), (-8, 1)):  # mmap threshold, trim threshold, arenas
                ctypes.CDLL("libc.so.6").mallopt(option, value)
        # End of copy
        agent = agent.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-4, eps=1e-5)
    envs = ppo_plr.ProcgenLevels(args.env_id, N)
    for i in range(N):
        envs.set_level(i, i)
    shape, dtype = ((3, 64, 64), torch.float32) if plain else ((64, 64, 3), torch.uint8)
    obs, generator = torch.zeros(T, N, *shape, dtype=dtype), torch.Generator().manual_seed(0)
    begun = time.perf_counter()
    for t in range(T):
        raw = torch.as_tensor(envs.obs)
        obs[t] = raw.permute(0, 3, 1, 2) if plain else raw
        action = agent.act(obs[t], generator)[0].numpy()
        ended = envs.step(action)[2]
        for i in np.flatnonzero(ended):
            envs.set_level(i, i)
    collected = time.perf_counter()
    flat = {"obs": obs.flatten(0, 1)} | random_batch(T * N)
    for rows in np.array_split(np.random.default_rng(0).permutation(T * N), MINIBATCHES)[: args.minibatches]:
        textbook_gradients(ppo_plr, agent, flat, rows, piece)
        torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
    updated = (time.perf_counter() - collected) * EPOCHS * MINIBATCHES / args.minibatches
    return {"collect": collected - begun, "update": updated}


def run_script(args, network, curriculum):
    """Seconds by activity of the last of `updates` updates of the script, without its evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, SCRIPT, "--env-id", args.env_id, "--network", network, "--curriculum", curriculum,
                   "--total-timesteps", T * N * args.updates, "--eval-interval", 0, "--final-eval-episodes", 1,
                   "--run-dir", folder, "--progress", "none"]  # fmt: skip
        subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)  # not its result
        row = json.loads(next(Path(folder).rglob("metrics.jsonl")).read_text().splitlines()[-1])
    return {name: row[f"perf/{name}_s"] for name in ("collect", "update")}


def check_gradients():
    """The largest difference between the three gradients of one minibatch, relative to the largest entry."""
    for network in ("impala", "nature"):
        torch.manual_seed(0)
        agent = textbook_agent(ppo_plr, network).to(memory_format=torch.channels_last)
        flat = {"obs": torch.randint(0, 256, (2048, 64, 64, 3), dtype=torch.uint8)} | random_batch(2048)
        floats = flat | {"obs": flat["obs"].permute(0, 3, 1, 2).float().contiguous()}
        rows, found = np.arange(2048), {}
        for name, run in (
            ("plain", partial(textbook_gradients, ppo_plr, agent, floats, rows, 2048)),
            ("simple", partial(textbook_gradients, ppo_plr, agent, flat, rows, 512)),
            ("ours", partial(ppo_plr.gradients, agent, ThreadPoolExecutor(2), 512, flat, rows, COEFS)),
        ):
            run()
            found[name] = torch.cat([p.grad.flatten() for p in agent.parameters()]).clone()
        for name in ("simple", "ours"):
            difference = (found[name] - found["plain"]).abs().max() / found["plain"].abs().max()
            print(
                f"{network}: largest difference of {name} to plain, relative to the largest gradient: {difference:.1e}"
            )


def main(args):
    if args.check:
        return check_gradients()
    if args.loop:
        return print(json.dumps(run_loop(args, args.networks[0])))
    rounds = {}
    for number in range(args.rounds):
        for network in args.networks:
            for arm in ("plain", "plr", "simple", "dr"):
                started = time.time()
                if arm in ("plr", "dr"):
                    seconds = run_script(args, network, arm)
                else:
                    command = [sys.executable, __file__, "--loop", arm, "--networks", network, "--env-id", args.env_id,
                               "--minibatches", str(args.minibatches)]  # fmt: skip
                    seconds = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
                rounds.setdefault((network, arm), []).append(seconds)
                sps = T * N / sum(seconds.values())
                print(
                    f"round {number + 1} {network} {arm}: {sps:.0f} steps/s ({time.time() - started:.0f} s)", flush=True
                )

    header, rows = ["network", "arm", "steps/s", "collecting", "learning", "x plain", "x simple"], []
    for network in args.networks:
        rate = {
            arm: [T * N / sum(s.values()) for s in rounds[network, arm]] for arm in ("plr", "dr", "simple", "plain")
        }
        for arm, rates in rate.items():
            seconds = rounds[network, arm]
            shares = [
                f"{statistics.median(s[k] / sum(s.values()) for s in seconds):.1%}" for k in ("collect", "update")
            ]
            ratios = [
                f"{statistics.median(a / b for a, b in zip(rates, rate[base])):.2f}" for base in ("plain", "simple")
            ]
            rows.append([network, arm, f"{statistics.median(rates):.0f}", *shares, *ratios])
    shape = f"{args.env_id}, {N} x {T}, {torch.get_num_threads()} threads"
    finish({"throughput": (header, rows)}, args.output, f"{shape}; medians of {args.rounds} rounds")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
