"""Writes the network of a run of any script of algos/ but onpolicy_choices.py as ONNX, and checks it against torch.

  scripts/run --extra onnx scripts/export.py runs/ppo/CartPole-v1/seed1-1a2b3c4d
  scripts/run --extra onnx scripts/export.py RUN --output agent.onnx

In go raw observations, as the environment gives them (images uint8; ppo_vector.py's running normalisation is part of
the file). Out come logits (with actions in boxes their means and deviations; of dqn_taper*.py Q-values, a row a task)
and, where the actor has one, the value. Board games also take which actions are legal. impala_popart*.py's LSTM takes
its state, `core`, whether an episode starts, the last action and the last reward, and gives the next state. The batch,
of any size, is the first axis, of `core` the second. The file is compared with torch on random inputs, and with the
run's own program on what that sees in an evaluation.
"""

import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.arena import fail, load_program  # noqa: E402
from scripts.watch import evaluate, need_policy  # noqa: E402

LIMIT = 1e-4  # of the difference between ONNX and torch
AGENTLESS = "onpolicy_choices.py, which computes a stack of them at once"


@dataclass
class Args:
    run: tyro.conf.Positional[Path]  # folder of the run
    output: Path | None = None  # a .onnx; None: RUN/<step>.onnx


@contextmanager
def listening(module, parts, calls):
    """`calls` gets (network, inputs, outputs) of each call of a network, as arrays; inputs from before ppo_vector.py's
    normalisation, where there is one."""
    raw = []
    if norm := parts.get("obs_norm"):
        normalize = norm.normalize
        norm.normalize = lambda obs: normalize(raw.append(np.array(obs, np.float32)) or obs)

    def hear(network, inputs, output):
        if type(network) in (module.Agent, getattr(module, "Policy", None)):
            outputs = output if isinstance(output, tuple) else (output,)
            given = [raw.pop()] if norm else [tensor.numpy().copy() for tensor in inputs]
            calls.append((network, given, [tensor.numpy().copy() for tensor in outputs]))

    hook = torch.nn.modules.module.register_module_forward_hook(hear)
    try:
        yield
    finally:
        hook.remove()


class Exported(torch.nn.Module):
    """`compute(network, *inputs)` as a module."""

    def __init__(self, network, compute):
        super().__init__()
        self.network, self.compute = network, compute

    def forward(self, *inputs):
        return self.compute(self.network, *inputs)


def network_to_export(run, program):
    """A torch module, the names of its inputs and outputs, the axes of the batch, real inputs, and what the run's own
    program computed for them."""
    parts, calls = {}, []

    def around(found):
        parts.update(found)
        return listening(program[1], found, calls)

    few = {"eval_episodes": 4, "final_eval_episodes": 4, "eval_max_steps": 30, "episode_length": 30}
    evaluate(run, program, around, **few)
    if not calls:
        fail(f"{run} cannot be exported: its evaluation calls no network that is a torch module (as {AGENTLESS})")
    network, norm, recurrent = calls[0][0].eval(), parts.get("obs_norm"), int(hasattr(program[1], "Policy"))
    real, found = (
        [np.concatenate(arrays, recurrent) for arrays in zip(*(call[k] for call in calls[:64]))] for k in (1, 2)
    )
    if recurrent:  # impala_popart*.py: a row (1, B, ...) of a rollout is a batch; `core` stays (2, B, H)
        real, found = [*(array[0] for array in real[:4]), *real[4:]], [found[0][0], found[2]]

    def plain(network, *inputs):
        return network(*inputs)

    def vector(network, obs):  # ppo_vector.py: normalised in double precision, as there
        if norm:
            obs = (obs.double() - torch.as_tensor(norm.mean)) / torch.as_tensor(norm.var + 1e-8).sqrt()
            obs = obs.clamp(-10, 10).float()
        out, value = network(obs)
        return (out, value, network.log_std.exp().expand_as(out)) if network.continuous else (out, value)

    def step(policy, obs, starts, last_action, last_reward, core):
        logits, _, core = policy(obs[None], starts[None], last_action[None], last_reward[None], core)
        return logits[0], core

    def feedforward(policy, obs):
        starts = torch.zeros_like(obs[None].flatten(2)[..., 0], dtype=torch.bool)
        return policy(obs[None], starts, None, None, None)[0][0]

    if recurrent and network.lstm is not None:
        compute, inputs, outputs = step, "obs starts last_action last_reward core", "logits next_core"
    elif recurrent:
        compute, inputs, outputs = feedforward, "obs", "logits"
    elif hasattr(network, "log_std"):
        compute, inputs, outputs = vector, "obs", "mean value std" if network.continuous else "logits value"
    else:
        compute, inputs, outputs = plain, "obs legal", "logits value" if len(found) > 1 else "q"
    names = inputs.split()[: len(real)]
    axes = [int(name == "core") for name in names]
    return Exported(network, compute), names, outputs.split(), axes, real[: len(names)], found


def random_like(array, rng):
    """Random values of an array's type: pictures of noise, integers within what it has, normal numbers."""
    if array.dtype == np.uint8:
        return rng.integers(256, size=array.shape).astype(np.uint8)
    if array.dtype == bool:
        return rng.random(array.shape) < 0.5
    if array.dtype == np.int64:
        return rng.integers(array.max() + 1, size=array.shape)
    return rng.standard_normal(array.shape).astype(array.dtype)


def export(run, program, path):
    """Writes the file -> a line for each input and output; the largest differences to torch, on random inputs and on
    real ones."""
    import onnxruntime

    network, inputs, outputs, axes, real, found = network_to_export(run, program)
    examples = tuple(torch.from_numpy(array.take(range(2), axis)) for array, axis in zip(real, axes))
    shapes = (tuple({axis: torch.export.Dim("batch", min=1)} for axis in axes),)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        written = torch.onnx.export(network, examples, input_names=inputs, output_names=outputs, dynamo=True,
                                    dynamic_shapes=shapes, verbose=False)  # fmt: skip
    written.save(path, external_data=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rng, noise = np.random.default_rng(0), []
    for size in (1, 2, 33):
        arrays = [random_like(array.take([0] * size, axis), rng) for array, axis in zip(real, axes)]
        with torch.no_grad():
            expected = network(*map(torch.from_numpy, arrays))
        expected = expected if isinstance(expected, tuple) else (expected,)
        for one, other in zip(session.run(None, dict(zip(inputs, arrays))), expected, strict=True):
            noise.append(abs(one - other.numpy()).max())
    seen = max(abs(one - other).max() for one, other in zip(session.run(None, dict(zip(inputs, real))), found))
    lines = [f"in  {one.name}: {one.type} {one.shape}" for one in session.get_inputs()]
    lines += [f"out {one.name}: {one.type} {one.shape}" for one in session.get_outputs()]
    return lines, float(max(noise)), float(seen)


def main(options):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        try:
            __import__(name)
        except ImportError:
            fail(f"{name} is missing: scripts/run --extra onnx scripts/export.py {options.run}")
    program = load_program(options.run)
    need_policy(options.run, program, "export")
    path = options.output or options.run / f"{program[2]['global_step']}.onnx"
    if path.suffix != ".onnx":
        fail(f"--output {path}: the name must end in .onnx")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        open(path, "ab").close()  # before the work
    except OSError as error:
        fail(f"{path} cannot be written: {error}. Choose another --output")
    try:
        lines, noise, seen = export(options.run, program, path)
    finally:
        if not path.stat().st_size:  # it failed
            path.unlink()
    print("\n".join(lines))
    print(f"largest difference to torch: {noise:.1e} on random inputs, {seen:.1e} on those of an evaluation")
    if not max(noise, seen) <= LIMIT:
        path.unlink()
        fail(
            f"the network in ONNX differs from torch's by {max(noise, seen):.1e}, more than {LIMIT}: nothing is written"
        )
    print(f"{path} holds the network, {path.stat().st_size / 1e6:.2f} MB.")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
