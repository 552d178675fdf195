"""algos/impala_popart.py: learning with and without actor processes, their bookkeeping, faults, resume."""

import contextlib
import copy
import gc
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from test_runs import ENVIRONMENT, Ended, Run, assert_same, members, restored_signals, wait_for_updates  # noqa: F401

from algos import impala_popart as impala
from algos import impala_popart_atari as atari
from algos import impala_popart_procgen as procgen

RECALL = (
    "--env-id probe_envs:Recall-v0,probe_envs:OtherRecall-v0@100 --lstm-size 32 --popart-beta 0.01 --progress none "
)
TINY = RECALL + "--envs-per-actor 4 --batch-rollouts 8 --num-steps 5 --log-interval 1 --eval-episodes 2 "  # 40 steps


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # as `train` does


def parse(*arguments):
    return tyro.cli(impala.Args, args=[word for argument in arguments for word in argument.split()])


def train(folder, *arguments):
    try:
        impala.train(parse(TINY, f"--run-dir {folder}", *arguments))
    finally:
        gc.collect()
    return Run(folder)


# ---- It learns -------------------------------------------------------------------------------------------------------

LEARN = RECALL + ("--envs-per-actor 8 --batch-rollouts 16 --num-steps 10 --total-timesteps 16000 --learning-rate 0.02 "
                  "--popart-second-moment mean-sq --eval-episodes 50")  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("num_actors", [0, 1, 2])
def test_one_policy_learns_to_remember_in_two_games_whose_rewards_differ_100_fold(num_actors, seed, tmp_path):
    """At least 0.95 of the best return in both; without memory 0.5."""
    lag = f"--max-policy-lag {4 * num_actors}" if num_actors else ""  # else it is the machine's other work that says
    result = impala.train(parse(LEARN, lag, f"--num-actors {num_actors} --seed {seed} --run-dir {tmp_path}"))
    assert result["eval/probe_envs:Recall-v0/return_mean"] >= 0.95
    assert result["eval/probe_envs:OtherRecall-v0@100/return_mean"] >= 95
    rows = Run(tmp_path).rows()
    assert max(row["async/policy_lag_max"] for row in rows) <= (4 * num_actors if num_actors else 0)
    if num_actors == 0 and seed == 1:
        assert_documented(rows, ["probe_envs:Recall-v0", "probe_envs:OtherRecall-v0@100"])


def assert_documented(rows, games):
    names = {"charts": "episodic_return episodic_length episodes SPS learning_rate update",
             "losses": "policy_loss value_loss entropy approx_kl clipfrac explained_variance grad_norm",
             "async": "policy_lag_mean policy_lag_max policy_lag_sent queue_depth learner_wait_s actor_wait_s dropped",
             "perf": "collect_s update_s"}  # fmt: skip
    always = {f"{group}/{name}" for group, text in names.items() for name in text.split()}
    always |= {f"popart/{game}/{name}" for game in games for name in ("mu", "sigma")}
    always |= {f"tasks/{game}/episodic_return" for game in games} | {"global_step", "wall_s"}
    evaluation = {
        "eval/return_mean",
        "eval/return_std",
        "eval/length_mean",
        "perf/eval_s",
        *(f"eval/{game}/return_mean" for game in games),
    }
    assert all(row.keys() == always for row in rows[:-1])
    assert rows[-1].keys() == always | evaluation


# ---- Unrolls ---------------------------------------------------------------------------------------------------------


def make_actor(num_steps, delays, version, index, games=("CartPole-v1",), num_envs=3):
    """An actor whose steps take delays[index] seconds."""
    tasks = np.arange(num_envs) % len(games)
    envs = impala.GymEnvs(games, tasks, np.random.SeedSequence(index).spawn(num_envs))
    step = envs.step
    envs.step = lambda actions: (time.sleep(delays[index]), step(actions))[1]
    with torch.device("meta"):
        policy = impala.Policy(impala.shared_space(games)[0], "mlp", 8)
    return impala.Actor(envs, policy, np.random.SeedSequence(100 + index), num_steps)


def expected_slots(num_actors, batch_slots, max_lag):
    """A batch, one in each actor and a batch to come, as far as the lag allows; the learner itself needs a batch."""
    slots = num_actors + 2 * batch_slots if num_actors else batch_slots
    return slots if max_lag is None else min(slots, batch_slots * (max_lag + 1))


def make_actors(num_actors, num_slots, batch_slots, max_lag, delays=(0.0, 0.0), num_steps=4, num_envs=3):
    space = impala.shared_space(("CartPole-v1",))[0]
    layout = impala.Actor.layout(num_steps, num_envs, space, 8)
    actors = impala.Actors(partial(make_actor, num_steps, delays), layout, num_actors, batch_slots, max_lag)
    assert actors.num_slots == expected_slots(num_actors, batch_slots, max_lag)
    actors.num_slots = num_slots
    return actors


POLICY = impala.Policy(impala.shared_space(("CartPole-v1",))[0], "mlp", 8)
WEIGHTS = impala.flat_weights(POLICY)


def weights_of(version):
    """Weights that tell the version."""
    return WEIGHTS * np.float32(1 + 0.1 * version)


@torch.no_grad()
def replay(weights, unroll, dtype):
    """Logits and core states of an unroll, row by row and in one piece."""
    inputs = [torch.from_numpy(unroll[name].copy()) for name in ("obs", "starts", "action", "reward")]
    inputs[0], inputs[3] = inputs[0].to(dtype), inputs[3].to(dtype)
    policy, core = copy.deepcopy(POLICY).to(dtype), torch.from_numpy(unroll["core"]).to(dtype)
    torch.nn.utils.vector_to_parameters(torch.from_numpy(weights).to(dtype), policy.parameters())
    whole, _, _ = policy(*inputs, core)
    rows = []
    for t in range(len(inputs[0]) - 1):
        logits, _, core = policy(*(x[t : t + 1] for x in inputs), core)
        rows.append(logits)
    return whole[:-1], torch.cat(rows), core


@pytest.mark.parametrize(("num_actors", "max_lag"), [(0, None), (2, None), (2, 0), (2, 1)])
def test_an_unroll_has_one_policy_and_no_step_is_lost_or_too_old(num_actors, max_lag):
    """Stored logits are those of the policy with the stored version, from row to row as in one piece; each actor's
    unrolls come in order and without a gap; the lag stays within its bound though one actor is much slower (SYN-11)."""
    num_slots = 2 if not num_actors else 5 if max_lag is None else 2 * (max_lag + 1)
    actors, version, lags, last = make_actors(num_actors, num_slots, 2, max_lag, delays=(0.0, 0.02)), 7, [], []
    with contextlib.closing(actors):
        actors.start(weights_of(7), 7)
        while len(lags) < 40 or len(last) < num_actors:
            batch = {name: tensor.numpy().copy() for name, tensor in actors.batch().items()}
            for k, used in enumerate(version - actors.lags):
                unroll = {name: array[:, 3 * k : 3 * k + 3] for name, array in batch.items()}
                _, rows, core = replay(weights_of(used), unroll, torch.float32)  # as the actor: rounds alike
                torch.testing.assert_close(torch.from_numpy(unroll["logits"]), rows, atol=1e-6, rtol=1e-5)
                whole, rows, _ = replay(weights_of(used), unroll, torch.float64)
                torch.testing.assert_close(whole, rows, atol=1e-12, rtol=1e-12)
                lags.append(version - used)
                before = [old for old in last if np.array_equal(old["obs"], unroll["obs"][0])]
                if before:  # the unroll of the same actor that this one continues
                    last = [old for old in last if old is not before[0]]
                    assert all(np.array_equal(before[0][name], unroll[name][0]) for name in ("starts", "action"))
                    torch.testing.assert_close(before[0]["core"], torch.from_numpy(unroll["core"]))
                else:
                    assert unroll["starts"][0].all() and not unroll["core"].any()
                last.append({name: unroll[name][-1] for name in ("obs", "starts", "action")} | {"core": core})
            version += 1
            actors.publish(weights_of(version))
    assert len(last) == max(num_actors, 1)
    if num_actors == 0 or max_lag == 0:
        assert set(lags) == {0}
    else:
        assert 0 < max(lags) <= (max_lag or np.inf)


def test_closed_actors_leave_no_descriptor_open():
    def use():
        actors = make_actors(1, 3, 2, None)
        with contextlib.closing(actors):
            actors.start(weights_of(0), 0)
        del actors
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    assert use() == use()


def test_the_slow_actor_waits_and_nothing_is_dropped():
    """A learner that takes its time: the actors stop when all slots are full, and every step still comes."""
    actors = make_actors(1, 3, 2, None)
    with contextlib.closing(actors):
        actors.start(weights_of(0), 0)
        rows = [actors.batch()["obs"].numpy().copy()]
        time.sleep(0.5)
        rows += [actors.batch()["obs"].numpy().copy() for _ in range(2)]
        assert actors.metrics["async/actor_wait_s"] > 0.3 and actors.metrics["async/dropped"] == 0
    unrolls = [row[:, 3 * k : 3 * k + 3] for row in rows for k in range(2)]
    for before, after in zip(unrolls, unrolls[1:]):
        assert np.array_equal(before[-1], after[0])


def test_every_reward_is_in_one_unroll_with_what_followed(monkeypatch):
    """Episodes of 3 steps with rewards 1, 2, 4 in unrolls of 5: the row after an end starts an episode, the true last
    observation is kept beside; totals are those of the episodes (PPO-05)."""
    actor = make_actor(5, (0.0,), 0, 0, games=("probe_envs:Chain-v0",), num_envs=2)
    space = impala.shared_space(("probe_envs:Chain-v0",))[0]
    slots = impala.SharedMemory(impala.Actor.layout(5, 2, space, 8), 4)
    for k in range(4):
        actor.unroll(slots.record(k))
    rows = {name: np.concatenate(array[:, :5]) for name, array in slots.items() if array.ndim > 2}
    rows |= {
        name: np.concatenate(slots[name][:, 1:]) for name in ("reward", "action")
    }  # what came of row t is in t + 1
    for name, period in (("obs", [0, 1, 2]), ("final_obs", [1, 2, 3]), ("starts", [1, 0, 0]), ("reward", [1, 2, 4]),
                         ("terminated", [0, 0, 1]), ("episode_return", [1, 3, 7]),
                         ("episode_length", [1, 2, 3])):  # fmt: skip
        for env in range(2):
            assert rows[name][:, env].ravel().tolist() == (period * 7)[:20], name


@torch.no_grad()
@pytest.mark.parametrize("lstm_size", [0, 8])
def test_what_is_cut_off_is_valued_by_its_true_last_observation(lstm_size):
    """Its features are those of an unroll that goes on with it instead of with another episode, also where episodes are
    cut several times in an unroll; nothing else is asked for."""
    torch.manual_seed(0)
    args = parse(TINY, f"--lstm-size {lstm_size}")
    agent, T, B = impala.Agent(impala.shared_space(args.games)[0], 2, args), 6, 3
    b = {"obs": torch.randn(T + 1, B, 4), "final_obs": torch.randn(T, B, 4), "action": torch.ones(T + 1, B).long(),
         "reward": torch.randn(T + 1, B), "core": torch.randn(2, B, lstm_size)}  # fmt: skip
    b |= {name: torch.zeros(T, B, dtype=torch.bool) for name in ("terminated", "truncated")}
    cuts = (1, 0), (5, 0), (3, 2)
    for t, i in cuts:
        b["truncated"][t, i] = True
    b["terminated"][2, 1] = b["truncated"][4, 1] = b["terminated"][4, 1] = True  # both at once is a death
    ended = b["terminated"] | b["truncated"]
    b["starts"] = torch.cat([torch.zeros(1, B, dtype=torch.bool), ended])
    kept = {name: x.clone() for name, x in b.items()}
    (steps, columns), features = agent.last_features(b)
    assert all(torch.equal(x, b[name]) for name, x in kept.items())
    assert sorted(zip(steps.tolist(), columns.tolist())) == sorted(cuts)
    for t, i, found in zip(steps.tolist(), columns.tolist(), features):
        core = b["core"][:, [i]]
        for row in range(t + 1):
            inputs = (b[name][row : row + 1, [i]] for name in ("obs", "starts", "action", "reward"))
            *_, core = agent.policy(*inputs, core)
        inputs = (b[name][t + 1 : t + 2, [i]] for name in ("action", "reward"))
        goes_on = torch.zeros(1, 1, dtype=torch.bool)
        _, expected, _ = agent.policy(b["final_obs"][t : t + 1, [i]], goes_on, *inputs, core)
        torch.testing.assert_close(found, expected[0, 0])
    b["truncated"][:] = False
    assert len(agent.last_features(b)[1]) == 0


def test_the_policy_is_blind_to_the_task_and_the_value_is_not():
    args = parse(TINY)
    torch.manual_seed(0)
    agent = impala.Agent(impala.shared_space(args.games)[0], 2, args)
    agent.values.mu.copy_(torch.tensor([0.0, 50.0]))
    assert "task" not in str(impala.Policy.forward.__code__.co_varnames)
    obs, starts, core = torch.randn(6, 4, 4), torch.zeros(6, 4, dtype=torch.bool), torch.zeros(2, 4, 32)
    inputs = obs, starts, torch.zeros(6, 4, dtype=torch.int64), torch.zeros(6, 4), core
    logits, features, _ = agent.policy(*inputs)
    starts[3] = True  # there no last action and reward exist
    others = obs, starts, torch.ones(6, 4, dtype=torch.int64), torch.ones(6, 4), core
    after_start = agent.policy(*inputs)[0][3], agent.policy(*others)[0][3]
    assert torch.equal(*after_start) and not torch.equal(agent.policy(*inputs)[0], agent.policy(*others)[0])
    starts[3] = False
    flags, n = [torch.zeros(5, 4, dtype=torch.bool)] * 2, agent.values(features)
    losses = []
    for tasks in (torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 0])):
        assert torch.equal(agent.policy(*inputs)[0], logits)
        losses.append(impala.impala_loss(
            logits[:-1], n[:-1], n[1:], agent.values.mu, agent.values.sigma, tasks, inputs[2][1:],
            logits[:-1].detach(), inputs[3][1:], *flags, 0.99, 0.01, 0.5,
        )[2])  # fmt: skip
    assert not torch.allclose(*losses)


@pytest.mark.parametrize(
    ("agent", "order", "heads"),
    [
        ("", ["step", "update", "publish"], 2),
        ("--no-popart --multi-head", ["step", "publish"], 2),
        ("--no-popart", ["step", "publish"], 1),
    ],
)
def test_the_order_of_an_update(agent, order, heads, monkeypatch, tmp_path):
    """First the network, with the old statistics, then these (PPO-13), then the actors get both; the paper's three
    agents differ in that, and in their heads. Every step of an unroll is learned from."""
    calls, learned = [], []

    def spy(owner, name):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (calls.append(name), original(*args))[1])

    for owner, name in ((impala.RMSPropTF, "step"), (impala.PopArt, "update"), (impala.Actors, "publish")):
        spy(owner, name)
    loss = impala.impala_loss
    noted = lambda *args: (learned.append((args[1].shape, args[8].numel())), loss(*args))[1]  # noqa: E731
    monkeypatch.setattr(impala, "impala_loss", noted)
    run = train(tmp_path, "--num-actors 0 --total-timesteps 120", agent)
    assert calls == order * 3
    assert [shape for shape, _ in learned] == [(5, 8, heads)] * 3
    assert sum(steps for _, steps in learned) == run.json("result.json")["global_step"]
    mu = run.state()["agent"]["values.mu"]
    assert mu.shape == (heads,) and bool(mu.any()) == ("update" in order)


def test_the_lstm_is_nn_lstm_cleared_where_episodes_start():
    torch.manual_seed(0)
    lstm, reference = impala.LSTM(5, 7), torch.nn.LSTM(5, 7)
    with torch.no_grad():
        for name, layer in (("ih", lstm.inputs), ("hh", lstm.hidden)):
            getattr(reference, f"weight_{name}_l0").copy_(layer.weight)
            getattr(reference, f"bias_{name}_l0").copy_(layer.bias)
    inputs, starts, core = torch.randn(6, 2, 5), torch.zeros(6, 2, dtype=torch.bool), torch.randn(2, 2, 7)
    starts[3, 1] = True
    outputs, last = lstm(inputs, starts, core)
    for env, pieces in ((0, [(0, 6)]), (1, [(0, 3), (3, 6)])):
        state = core[0, env], core[1, env]
        for first, stop in pieces:
            state = state if first == 0 else (torch.zeros(7), torch.zeros(7))
            expected, (h, c) = reference(inputs[first:stop, env], (state[0][None], state[1][None]))
            torch.testing.assert_close(outputs[first:stop, env], expected)
        torch.testing.assert_close(last[:, env], torch.cat([h, c]))


@torch.no_grad()
def test_evaluation_is_one_game_after_another_played_by_itself():
    """Against a loop over single environments, with a random policy whose memory matters; no generator of the run is
    touched, and a second evaluation is the same."""
    args = parse("--env-id probe_envs:Recall-v0@10,CartPole-v1 --eval-episodes 5 --eval-greedy --lstm-size 8")
    torch.manual_seed(0)
    policy = impala.Policy(impala.shared_space(args.games)[0], "mlp", 8)
    for layer in (policy.head, policy.lstm.hidden, policy.lstm.inputs):
        torch.nn.init.normal_(layer.weight, std=3)
    before, rows = torch.get_rng_state(), impala.evaluate(policy, args)
    assert rows == impala.evaluate(policy, args) and torch.equal(before, torch.get_rng_state())
    seeds, expected = np.random.SeedSequence(args.eval_seed).spawn(11), []
    for k, seed in enumerate(seeds[:10]):
        env = impala.gym.make(args.games[k // 5].split("@")[0])
        seed = int(np.random.default_rng(seed).integers(2**31))
        obs, columns, core = env.reset(seed=seed)[0], slice(0, 2) if k < 5 else slice(2, 6), torch.zeros(2, 1, 8)
        total, length, ended, action, reward = 0.0, 0, False, 0, 0.0
        while not ended:
            padded = torch.zeros(1, 1, 6)
            padded[..., columns] = torch.as_tensor(obs)
            inputs = [torch.tensor([[x]]) for x in (length == 0, action, reward)]
            logits, _, core = policy(padded, *inputs, core)
            action = int(logits.argmax())
            obs, reward, terminated, truncated, _ = env.step(action)
            reward *= 10 if k < 5 else 1
            total, length, ended = total + reward, length + 1, terminated or truncated
        expected.append({"split": "eval", "level": args.games[k // 5], "return": total, "length": length})
    assert rows == expected and len({row["length"] for row in rows[5:]}) > 1


@pytest.mark.parametrize(("shape", "dtype"), [((4,), np.uint8), ((6, 7), np.uint8), ((10, 10, 4), np.float32)])
def test_a_policy_sees_any_array(shape, dtype):
    """Bytes count as parts of 255, and images may have their channels last, also as floats."""
    torch.manual_seed(0)
    policy = impala.Policy(impala.Space(shape, dtype, 2), lstm_size=0)
    obs = torch.randint(256, (2, 3, *shape))
    starts, zeros = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.int64)
    floats = policy(obs / 255, starts, zeros, zeros.float(), None)[0]
    if dtype == np.uint8:
        torch.testing.assert_close(policy(obs.to(torch.uint8), starts, zeros, zeros.float(), None)[0], floats)
    assert floats.shape == (2, 3, 2) and floats.isfinite().all()


# ---- Faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_an_actor_that_fails_ends_the_run_and_says_why(fault, tmp_path):
    """Within 10 s, with the environment's own error or the exit code; also if the others always have a full slot
    (SYN-04, SYN-08)."""
    games = "probe_envs:Faulty-raise-v0" if fault == "raise" else "probe_envs:Chain-v0"
    killed = []
    original = impala.Actors.batch

    def batch(self, *check):
        if self.version >= 2 and fault == "kill":
            time.sleep(0.5)
            if not killed:
                os.kill(self.processes[1][0].pid, signal.SIGKILL)
                killed.append(time.monotonic())
        return original(self, *check)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(impala.Actors, "batch", batch)
        impala.train(parse(TINY, f"--env-id {games} --num-actors 2 --run-dir {tmp_path}"))
    message = caught.value.code
    if fault == "kill":
        assert "actor 1 (process " in message and "died with exit code -9" in message
        assert time.monotonic() - killed[0] < 10
    else:
        assert "actor " in message and "boom-42" in message and games in message and "Traceback" in message
    assert Run(tmp_path).json("status.json")["state"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--learning-rate 1e30", "is not finite. The last good checkpoint is kept"),
        ("--env-id probe_envs:Faulty-reward-v0", "(probe_envs:Faulty-reward-v0) gave what is not finite: reward nan"),
    ],
)
def test_what_is_not_finite_ends_the_run_by_name(arguments, words, tmp_path):
    """PPO-16."""
    with pytest.raises(SystemExit) as caught:
        train(tmp_path, "--num-actors 0", arguments)
    assert words in caught.value.code and "\n" not in caught.value.code, caught.value.code


def test_memory_that_does_not_suffice_is_told_before_it_is_taken(monkeypatch, tmp_path):
    args = parse(TINY, f"--run-dir {tmp_path} --num-actors 2 --num-steps 100")
    monkeypatch.setattr(impala, "available_memory", lambda: 2**14)
    with pytest.raises(SystemExit) as caught:
        impala.train(args)
    for words in ("6 unrolls take", "MiB of shared memory", "obs", "0 MiB are available", "--envs-per-actor"):
        assert words in caught.value.code


def test_an_actor_that_hangs_is_named_though_the_other_delivers():
    actors = make_actors(2, 6, 1, None)
    with contextlib.closing(actors):
        actors.start(weights_of(0), 0)
        while (actors.since == 0).any():  # until both have started
            actors.batch()
        os.kill(actors.processes[1][0].pid, signal.SIGSTOP)
        actors.TIMEOUT_S, start = 3, time.monotonic()
        with pytest.raises(SystemExit, match=r"actor 1 \(process \d+\) hangs: no unroll of it for 3 s"):
            while time.monotonic() < start + 60:
                actors.batch()


def test_an_actor_that_hangs_while_slots_wait_for_it_is_named():
    """Stopped with nothing to do, then given something; the learner's check is called all the while."""
    actors, checks = make_actors(1, 2, 2, 0), []
    with contextlib.closing(actors):
        actors.start(weights_of(0), 0)
        actors.batch()
        os.kill(actors.processes[0][0].pid, signal.SIGSTOP)
        actors.publish(weights_of(1))
        actors.TIMEOUT_S = 3
        with pytest.raises(SystemExit, match=r"actor 0 \(process \d+\) hangs: no unroll of it for 3 s"):
            actors.batch(lambda: checks.append(time.monotonic()))
    assert len(checks) >= 3 and max(np.diff(checks)) < 2


@pytest.mark.parametrize("max_lag", [None, 0])
@pytest.mark.parametrize("moment", ["full", "taken", "published"])
def test_the_only_actor_is_named_whenever_it_is_killed(max_lag, moment):
    """Also where the learner then has slots to hand out to it."""
    actors = make_actors(1, 2, 2, max_lag)
    with contextlib.closing(actors):
        actors.start(weights_of(0), 0)
        while len(actors.full) < 2:
            actors.poll(1)
        process, died = actors.processes[0][0], r"^error: actor 0 \(process \d+\) died with exit code -9$"
        for now, act in (("full", actors.batch), ("taken", lambda: actors.publish(weights_of(1))), ("published", None)):
            if now == moment:
                process.kill()
                process.join()
                break
            act()
        with pytest.raises(SystemExit, match=died):
            while True:
                actors.batch()
                actors.publish(weights_of(2))


def test_more_unrolls_than_a_pipe_has_room_for():
    """Each comes once and in order, though the learner takes its time."""
    actors = make_actors(1, 600, 600, None)
    with contextlib.closing(actors):
        actors.start(weights_of(0), 0)
        time.sleep(1)
        for _ in range(2):
            obs = actors.batch()["obs"]
            assert obs.shape == (5, 1800, 4) and torch.equal(obs[4, :-3], obs[0, 3:])


def shm():
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith(("sem.", "torch_"))}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Runs with two actors: the group ended by SIGTERM, then by Ctrl-C; the learner killed while its actors are busy
    for minutes."""
    ends, before = {}, shm()
    for name, arguments in (("SIGTERM", ""), ("SIGINT", ""), ("SIGKILL", "--env-id probe_envs:SlowCartPole-v0")):
        folder = tmp_path_factory.mktemp(name)
        words = f"{TINY} {arguments} --num-actors 2 --total-timesteps 100000000 --run-dir {folder}".split()
        process = subprocess.Popen([sys.executable, impala.__file__, *words], env=ENVIRONMENT | {"PROBE_STEP_S": "60"},
                                   start_new_session=True, stdout=-1, stderr=-1, text=True)  # fmt: skip
        if name == "SIGKILL":
            while len(blocked_signals(process.pid)) < 2:
                time.sleep(0.1)
            time.sleep(2)  # most of it imports
            process.kill()
        else:
            wait_for_updates(process, folder, 1)
            ends[f"blocked at {name}"] = blocked_signals(process.pid)
            os.killpg(process.pid, getattr(signal, name))
        ends[name] = Ended(process)
        ends[f"checkpoints at {name}"] = len(Run(folder).checkpoints())
    ends["shm"] = shm() - before
    return ends


def blocked_signals(group):
    """Of INT, TERM, USR1 and HUP, by actor."""
    found = []
    for pid in members(group):
        with contextlib.suppress(OSError):
            status, words = (Path(f"/proc/{pid}/{name}").read_text() for name in ("status", "cmdline"))
            mask = int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16)
            if "spawn_main" in words:
                numbers = signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP
                found.append([number.name for number in numbers if mask >> number - 1 & 1])
    return found


def test_whatever_ends_the_learner_no_process_and_no_shared_memory_stays(stopped):
    """SYN-02, SYN-05."""
    goes_on = "the same command goes on from"
    cases = ("SIGTERM", 75, f"SIGTERM: {goes_on}"), ("SIGINT", 130, f"SIGINT: {goes_on}"), ("SIGKILL", -9, "")
    for name, code, words in cases:
        end = stopped[name]
        assert (end.rc, end.left, end.tracebacks) == (code, [], 0), end
        assert words in end.err and end.err.count("\n") == bool(words)
        assert end.seconds < 10
        assert stopped[f"checkpoints at {name}"] == bool(words)
    assert stopped["shm"] == set()


def test_the_learner_answers_the_signals_for_its_actors(stopped):
    for name in ("SIGTERM", "SIGINT"):
        assert stopped[f"blocked at {name}"] == [["SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP"]] * 2


# ---- Resume ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopping_at(update, batches=None):
    """Ends a run in the middle of an update, as a kill would: what is not in a checkpoint is lost. Keeps the batches
    before, with the version of their first unroll, in the list `batches`."""
    original = impala.Actors.batch

    def batch(self, *check):
        if self.version == update:
            raise KeyboardInterrupt
        found = original(self, *check)
        if batches is not None:
            batches.append(
                {name: tensor.numpy().copy() for name, tensor in found.items()}
                | {"version": self.version - self.lags[0]}
            )
        return found

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(impala.Actors, "batch", batch)
        yield


P0 = "--num-actors 0 --total-timesteps 1200 --checkpoint-interval 8 --log-interval 3"  # 30; 16: in mid-episode


def test_the_synchronous_form_repeats_and_resumes_to_the_bit(tmp_path):
    """And evaluations in between change nothing (CKP-05, CLI-13)."""
    straight = train(tmp_path / "straight", P0)
    with stopping_at(18):
        train(tmp_path / "stopped", P0, "--eval-interval 6")
    stopped = train(tmp_path / "stopped", P0, "--eval-interval 6")
    assert [row["charts/update"] for row in straight.rows()] == list(range(3, 31, 3))
    assert_same(straight.state(), stopped.state())
    for row, same in zip(straight.repeatable(), stopped.repeatable(), strict=True):
        assert row == {name: value for name, value in same.items() if name in row}
    other = train(tmp_path / "other", P0, "--seed 2")
    assert other.rows()[0]["losses/entropy"] != straight.rows()[0]["losses/entropy"]


def test_actors_resume_with_the_weights_of_the_checkpoint_in_new_episodes(tmp_path):
    """CKP-11, with the LSTM's state and the episodes new."""
    arguments, before, after = "--num-actors 1 --total-timesteps 1200 --checkpoint-interval 1", [], []
    with stopping_at(3, before):
        train(tmp_path, arguments)
    saved = torch.load(Run(tmp_path).checkpoints()[-1], weights_only=True)
    with stopping_at(4, after):
        train(tmp_path, arguments)
    (first,) = after
    assert first["version"] == saved["update"] == 3
    space = impala.shared_space(parse(TINY).games)[0]
    policy = impala.Policy(space, "auto", 32)
    policy.load_state_dict({name.removeprefix("policy."): x for name, x in saved["agent"].items() if "policy" in name})
    inputs = (torch.from_numpy(first[name]) for name in ("obs", "starts", "action", "reward", "core"))
    torch.testing.assert_close(
        policy(*inputs)[0][:-1].detach(), torch.from_numpy(first["logits"]), atol=1e-6, rtol=1e-5
    )
    assert first["starts"][0, :4].all() and not first["core"][:, :4].any()  # of the first unroll
    assert not np.array_equal(first["obs"], before[0]["obs"])


def test_a_member_of_a_population_goes_on_with_other_settings(tmp_path):
    """Stopped, given another member's checkpoint and four new values, it goes on from there; without --pbt the other
    values would be another run."""
    new = "--learning-rate 0.05 --ent-coef 0.5 --rmsprop-eps 0.3 --max-grad-norm 7"
    common = "--num-actors 0 --total-timesteps 400 --checkpoint-interval 2"
    with stopping_at(5):
        train(tmp_path / "a", common, "--pbt --seed 1")
    with stopping_at(5):
        train(tmp_path / "b", common, "--pbt --seed 2")
    a, b = Run(tmp_path / "a"), Run(tmp_path / "b")
    for path in a.checkpoints():
        (b.dir / "checkpoints" / path.name).write_bytes(path.read_bytes())
    optimizers = []
    with pytest.MonkeyPatch.context() as patch:
        step = impala.RMSPropTF.step
        patch.setattr(
            impala.RMSPropTF, "step", lambda self: (optimizers.append(dict(self.param_groups[0])), step(self))
        )
        train(tmp_path / "b", common, "--pbt --seed 2", new)
    assert len(optimizers) == 6 and optimizers[0]["lr"] == pytest.approx(0.05 * 0.6) and optimizers[0]["eps"] == 0.3
    updates = [row["charts/update"] for row in b.rows()]
    assert updates == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 10]  # its logs stay whole: they may be no part of that checkpoint
    assert b.rows()[5]["charts/learning_rate"] == pytest.approx(0.05 * 0.6)
    assert b.rows()[:4] != a.rows()[:4]
    with stopping_at(1):
        train(tmp_path / "c", common)
    with stopping_at(1):
        train(tmp_path / "c", common, new)
    assert len([*(tmp_path / "c").rglob("config.json")]) == 2


# ---- Arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_rollouts": 24}, "--batch-rollouts 24 is no multiple of --envs-per-actor 16: try 32"),
        ({"batch_rollouts": 1}, "--batch-rollouts 1 is no multiple of --envs-per-actor 16: try 16"),
        ({"multi_head": True}, "add --no-popart"),
        ({"num_actors": 5, "max_policy_lag": 1}, "--max-policy-lag 1: it must be a number at least 2"),
        ({"envs_per_actor": 2}, "2 environments (num_actors x envs_per_actor) cannot play 3 games"),
        ({"env_id": "CartPole-v1,probe_envs:TinyImage-v0"}, "TinyImage-v0 has observations (8, 8, 3)"),
        ({"env_id": "CartPole-v7"}, "CartPole-v1"),
        ({"network": "nature"}, "--network nature sees images, and mixed has none"),
        ({"gamma": 1.5}, "--gamma 1.5: it must be a number between 0 and 1"),
        ({"num_actors": -1}, "--num-actors -1: it must be a number at least 0"),
        ({"learning_rate": np.nan}, "--learning-rate nan"),
        ({"lstm_size": 10**6}, "--lstm-size 1000000: it must be a number between 0 and 4096"),
        ({"env_id": "probe_envs:TinyImage-v0", "network": "nature"}, "--network nature needs larger images than 8x8"),
    ],
)
def test_wrong_arguments_are_named_with_what_works(change, words):
    with pytest.raises(ValueError) as error:
        impala.Args(**change)
    assert words in str(error.value)


def test_a_suite_whose_games_changed_is_another_run(tmp_path):
    for games in (("probe_envs:Recall-v0", "CartPole-v1"), ("probe_envs:Recall-v0", "probe_envs:OtherRecall-v0")):
        with pytest.MonkeyPatch.context() as patch, stopping_at(2):
            patch.setitem(impala.SUITES, "pair", games)
            train(tmp_path, "--num-actors 0 --checkpoint-interval 1 --env-id pair")
    assert len([*tmp_path.rglob("config.json")]) == 2


# ---- The other families ----------------------------------------------------------------------------------------------

IMAGES = ("--network nature --envs-per-actor 2 --batch-rollouts 4 --num-steps 5 --log-interval 1 --popart-beta 0.1 "
          "--lstm-size 8 --eval-episodes 1 --eval-max-steps 20 --progress none --num-actors 0 ")  # fmt: skip


def train_images(module, folder, *arguments):
    words = [word for argument in (IMAGES, f"--run-dir {folder}", *arguments) for word in argument.split()]
    try:
        module.train(tyro.cli(module.Args, args=words))
    finally:
        gc.collect()
    return Run(folder)


def test_procgen_resumes_to_the_bit(tmp_path):
    arguments = "--env-id bigfish,coinrun@100 --total-timesteps 160 --checkpoint-interval 4"
    straight = train_images(procgen, tmp_path / "straight", arguments)
    original = procgen.Actors.batch

    def batch(self, *check):
        if self.version == 6:
            raise KeyboardInterrupt
        return original(self, *check)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(procgen.Actors, "batch", batch)
        train_images(procgen, tmp_path / "stopped", arguments)
    stopped = train_images(procgen, tmp_path / "stopped", arguments)
    assert_same(straight.state(), stopped.state())
    assert straight.repeatable() == stopped.repeatable() and len(straight.rows()) == 8


def test_atari_learns_with_pixel_control_and_says_how_human_it_is(tmp_path):
    """Its log has what Atari's papers show, and a resumed run begins new episodes but keeps each game's last return."""
    arguments = "--env-id Breakout-v5,Pong-v5 --pixel-control-coef 0.01 --total-timesteps 160 --checkpoint-interval 4"
    run = train_images(atari, tmp_path, arguments)
    games, rows = ["Breakout-v5", "Pong-v5"], run.rows()
    for row in rows:
        assert row["charts/frames"] == 4 * row["global_step"] and row["losses/pixel_loss"] > 0
        assert all(f"popart/{game}/sigma" in row for game in games)
    means = [rows[-1][f"eval/{game}/return_mean"] for game in games]
    scores = [atari.human_normalized(game, mean) for game, mean in zip(games, means)]
    assert rows[-1]["eval/human_normalized_median"] == pytest.approx(np.median(scores))
    stats = atari.Stats()
    stats.latest = {}
    assert run.state()["stats"].keys() == {"total", "episodes", "updates", "latest"} == stats.state_dict().keys()
