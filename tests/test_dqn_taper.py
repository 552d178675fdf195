"""algos/dqn_taper.py, dqn_taper_minigrid.py, dqn_taper_crafter.py: targets, tasks of all domains, runs, actors. Their
replay is tested beside its full form (tests/test_lean.py, tests/test_taper_replay.py)."""

import math
import multiprocessing
import os
import re
import signal
import time
from contextlib import ExitStack, closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import probe_envs  # noqa: F401  (registers Chain-v0 and others)
import probe_tasks  # noqa: F401
import pytest
import torch
import tyro
from test_runs import TINY, Ended, members, refusal, restored_signals, start, train, wait_for_updates  # noqa
from test_runs import assert_same as assert_same_values

from algos import dqn_taper as dqn
from algos import dqn_taper_crafter as crafter
from algos import dqn_taper_minigrid as mini
from algos.ppo import pack

TINY[dqn] = TINY[mini] = (
    "--num-envs 4 --num-steps 25 --total-timesteps 800 --learning-starts 100 --buffer-size 300 --episode-length 20 "
    "--eval-interval 4 --eval-episodes 2 --checkpoint-interval 2 --target-network-frequency 200 --hidden-size 16 "
    "--torch-threads 1 --progress none"
)  # 8 updates of 100 steps; the replay wraps
TINY[crafter] = f"--env-id probe_tasks:Tasks-v0 {TINY[dqn]}"
ENVS = {dqn: "two-rooms-rare", mini: "MiniGrid-DoorKey-5x5-v0", crafter: "probe_tasks:Tasks-v0"}
RNG = np.random.default_rng(0)
ALL = pytest.mark.parametrize("script", [dqn, mini, crafter], ids=["two rooms", "minigrid", "tasks"])


def assert_same(*states):
    """Equal to the bit, but for the token and the lengths of the logs, in which times are."""
    assert_same_values(*({k: v for k, v in state.items() if k not in ("token", "logs")} for state in states))


# ---- Mathematics ----


@pytest.mark.parametrize("double", [False, True])
def test_targets(double):
    """Each task bootstraps from its own values unless it or the environment ended."""
    B, n, A, gamma = 40, 3, 4, 0.9
    rewards, q_target, q_online = RNG.normal(size=(B, n)), RNG.normal(size=(B, n, A)), RNG.normal(size=(B, n, A))
    beta, terminated = RNG.random((B, n)) < 0.3, RNG.random(B) < 0.3
    arrays = rewards, beta, terminated, q_target, q_online if double else q_target
    found = dqn.td_targets(*map(torch.tensor, arrays), gamma)
    for i in range(B):
        for j in range(n):
            value = q_target[i, j, np.argmax(q_online[i, j])] if double else max(q_target[i, j])
            expected = rewards[i, j] + (0 if beta[i, j] or terminated[i] else gamma * value)
            assert found[i, j].item() == pytest.approx(expected, rel=1e-12)


def test_huber_gradient_is_that_of_the_weighted_loss():
    B, n, A = 30, 3, 4
    q = torch.tensor(3 * RNG.normal(size=(B, n, A)), requires_grad=True)
    actions, targets = torch.tensor(RNG.integers(A, size=B)), torch.tensor(3 * RNG.normal(size=(B, n)))
    weights = torch.tensor(RNG.random(B))
    taken = q[torch.arange(B), :, actions]
    loss = torch.nn.functional.huber_loss(taken, targets, reduction="none").mean(1) @ weights / B
    loss.backward()
    shaped = actions.view(-1, 1, 1).expand(-1, n, 1), targets.unsqueeze(2), weights.view(-1, 1, 1) / (B * n)
    errors, gradient = dqn.huber_gradient(q.detach(), *shaped)
    torch.testing.assert_close(gradient, q.grad, rtol=1e-12, atol=0)
    torch.testing.assert_close(errors.squeeze(2), (taken - targets).detach())
    assert (errors.abs() > 1).any() and (errors.abs() < 1).any()


def test_clip_norm():
    vector = torch.tensor([3.0, 4.0])
    assert dqn.clip_norm(vector, 10.0) == 5 and vector.tolist() == [3, 4]
    assert dqn.clip_norm(vector, 1.0) == 5 and vector.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("script,shape,dtype", [
    (dqn, (5,), torch.float32), (crafter, (5,), torch.float32), (crafter, (5, 5, 15), torch.uint8),
    (mini, (5, 5, 15), torch.uint8), (crafter, (64, 64, 3), torch.uint8), (crafter, (3, 64, 64), torch.float32),
])  # fmt: skip
def test_agent(script, shape, dtype, separate):
    """Shapes; separate networks do not touch each other; the flat vector is the parameters, and its step is theirs."""
    torch.manual_seed(0)
    agent, twin = (script.Agent(shape, 4, 3, 32, separate) for _ in range(2))
    twin.load_state_dict(agent.state_dict())
    weights, obs = dqn.flatten_parameters(agent), torch.rand(6, *shape)
    obs = (obs * 255).to(dtype)
    assert agent(obs).shape == (6, 3, 4) and weights.numel() == sum(p.numel() for p in twin.parameters())
    assert torch.equal(agent(obs), twin(obs))
    ours, plain = torch.optim.Adam([weights], 1e-2, fused=True), torch.optim.Adam(twin.parameters(), 1e-2)
    for _ in range(3):
        weights.grad.zero_()
        plain.zero_grad()
        for module, optimizer in ((agent, ours), (twin, plain)):
            (module(obs)[:, 1] ** 2).mean().backward()
            optimizer.step()
    torch.testing.assert_close(agent(obs), twin(obs), rtol=1e-4, atol=1e-5)
    assert torch.equal(weights, torch.nn.utils.parameters_to_vector(agent.parameters()))
    with torch.no_grad():
        before = agent(obs)
        weights.zero_()
        assert not agent(obs).any() and before.any()
    if separate:
        assert all(p.grad is None or not p.grad.any() for i in (0, 2) for p in twin.networks[i].parameters())


# ---- Tasks ----


def play(envs, action_rows):
    """Rows of (obs, rewards, terminations, terminated, truncated, final_obs)."""
    rows = []
    for actions in action_rows:
        obs, _, terminated, truncated, info = envs.step(np.array(actions))
        tasks = info["task_rewards"].copy(), info["task_terminations"].copy()
        rows.append((obs, *tasks, terminated.copy(), truncated.copy(), info["final_obs"].copy()))
    return rows


def test_events_pay_when_they_rise():
    """What holds at reset is no achievement; a condition pays when it becomes true, a count whenever it grows."""
    events = {"odd": lambda obs, *_: obs[0] % 2 == 1, "start": lambda obs, *_: obs[0] < 2,
              "thirds": lambda obs, *_: obs[0] // 3, "reward": lambda obs, reward, *_: reward > 3,
              "end": lambda obs, reward, terminated, truncated, info, env: terminated}  # fmt: skip
    env = crafter.EventTasks(gym.make("probe_envs:Chain-v0", length=6), events)
    for _ in range(2):
        env.reset()
        rewards = []
        for _ in range(6):
            _, _, terminated, _, info = env.step(0)
            assert (info["task_rewards"] == info["task_terminations"]).all()
            rewards.append(info["task_rewards"].tolist())
        columns = [[i + 1 for i, x in enumerate(column) if x] for column in zip(*rewards)]
        assert columns == [[1, 3, 5], [], [3, 6], [3], [6]] and terminated


def test_two_rooms():
    up, down, left, right = range(4)
    envs = dqn.Envs("two-rooms-mixed", [0, 1], 100)
    envs.reset()
    envs.state[:] = np.ravel_multi_index((0, 2, 0), (9, 9, 2))
    moves = [left, right, right, right, down, down, right]  # against the edge, beside the key to the closed door
    moves += [left, left, up, up, up, down, down, down, right, right, right, right]  # over the key and through the door
    rows, x, y = play(envs, [(m, left) for m in moves]), [], []
    for obs, *_ in rows:
        x.append(obs[0, :9].argmax())
        y.append(obs[0, 9:18].argmax())
    assert x == [0, 1, 2, 3, 3, 3, 3, 2, 1, 1, 1, 1, 1, 1, 1, 2, 3, 4, 5]
    assert y == [2, 2, 2, 2, 3, 4, 4, 4, 4, 3, 2, 1, 2, 3, 4, 4, 4, 4, 4]
    assert [row[0][0, 18] for row in rows] == [0] * 11 + [1] * 8, "the key stays"
    hits = [np.flatnonzero(row[1][0]).tolist() for row in rows]
    assert hits == [[]] * 11 + [[0]] + [[]] * 5 + [[1], []], "the key once, then the door"
    corner = play(envs, [(m, left) for m in [right] * 3 + [up] * 6 + [down, up]])
    assert [np.flatnonzero(row[1][0]).tolist() for row in corner] == [[]] * 6 + [[2]] + [[], [], [], [2]]


def test_two_rooms_by_chance():
    """The shares of random episodes of the docstring; episodes of 100 steps from the left room; fixed starts."""
    for name, low, high in (("rare", [0.02] * 4, [0.06] * 4), ("mixed", [0.6, 0.1, 0, 0], [0.7, 0.18, 0.02, 0.02])):
        envs = dqn.Envs(f"two-rooms-{name}", np.random.SeedSequence(1).spawn(3000), 100)
        first, rng, seen = envs.reset(), np.random.default_rng(2), np.zeros((3000, 4), bool)
        assert (first[:, :4].sum(1) == 1).all() and not first[:, 18].any() and len(np.unique(first, axis=0)) == 35
        for t in range(100):
            obs, _, terminated, truncated, info = envs.step(rng.integers(4, size=3000))
            seen |= info["task_terminations"]
            assert truncated.all() == truncated.any() == (t == 99) and not terminated.any()
        assert (obs[:, :4].sum(1) == 1).all() and (info["final_obs"] != obs).any()
        assert (seen.mean(0) >= low).all() and (seen.mean(0) <= high).all(), seen.mean(0)
        again = dqn.Envs(f"two-rooms-{name}", np.random.SeedSequence(1).spawn(3000), 100)
        assert (again.reset() == first).all()


def test_minigrid_events():
    envs = mini.Envs("MiniGrid-DoorKey-6x6-v0", np.random.SeedSequence(3).spawn(2), 50)
    names = ("pick-up-key", "put-down", "open-door", "close-door", "pass-door", "reach-goal")
    assert envs.task_names == names and envs.num_tasks == 6 and envs.obs_shape == (6, 6, 15)
    first = envs.reset()
    assert set(np.unique(first)) == {0, 255} and (first[..., 10].reshape(2, -1) == 255).sum(1).tolist() == [1, 1]
    env = envs.envs[0].unwrapped
    place = {cell.type: (i % env.width, i // env.width) for i, cell in enumerate(env.grid.grid)
             if cell is not None and cell.type in ("key", "door", "goal")}  # fmt: skip
    wall = place["door"][0]
    assert first[0][place["key"]][5] == 255 and first[0][place["door"]][4] == 255
    left, right, forward, pickup, drop, toggle = range(6)

    def stand(x, y, direction):
        env.agent_pos, env.agent_dir = (x, y), direction

    def act(action):
        (row,) = play(envs, [(action, left)])
        return [names[j] for j in np.flatnonzero(row[1][0])], row

    x, y = place["key"]
    stand(x, y - 1, 1) if y > 1 else stand(x, y + 1, 3)
    assert act(left)[0] == [] and act(right)[0] == []
    assert act(pickup)[0] == ["pick-up-key"]
    assert act(drop)[0] == ["put-down"] and act(pickup)[0] == ["pick-up-key"]
    stand(wall - 1, place["door"][1], 0)
    assert act(toggle)[0] == ["open-door"] and act(toggle)[0] == ["close-door"] and act(toggle)[0] == ["open-door"]
    assert act(forward)[0] == ["pass-door"] and act(forward)[0] == []
    x, y = place["goal"]
    stand(x, y - 1, 1)
    events, row = act(forward)
    assert events == ["reach-goal"] and row[3].tolist() == [True, False] and not row[4].any()
    assert row[5][0][x, y, 10] == 255 and row[0][0][x, y, 8] == 255, "the last frame, and the next episode's first"
    later = play(envs, [(left, left)] * 50)
    assert [t for t, row in enumerate(later) if row[4][0]] == [49] and not any(row[3].any() for row in later)


def test_crafter():
    pytest.importorskip("crafter")
    envs = crafter.Envs("crafter", np.random.SeedSequence(3).spawn(1), 5)
    assert envs.num_tasks == 22 and envs.obs_shape == (64, 64, 3) and envs.num_actions == 17
    first, names, env = envs.reset(), envs.task_names, envs.envs[0]
    game = env.unwrapped.game
    ahead = tuple(game._player.pos + game._player.facing)
    for _ in range(2):
        game._world[ahead] = "tree"
        (row,) = play(envs, [[5]])  # do
        assert [names[j] for j in np.flatnonzero(row[1][0])] == ["collect_wood"]
    assert [bool(row[4][0]) for row in play(envs, [[0]] * 3)] == [False, False, True], "T = 5 steps"
    envs.restart([0])
    assert (envs.obs != first).any()
    again = crafter.Envs("crafter", np.random.SeedSequence(3).spawn(1), 5)
    assert first.dtype == np.uint8 and (again.reset() == first).all()
    again.load_state_dict(pack(envs.state_dict()))  # of a later episode
    assert (play(again, [[1]])[0][5] == env.step(1)[0]).all()
    game._player.health = 0
    _, _, terminated, truncated, _ = env.step(0)
    assert (terminated, truncated) == (True, False)


@pytest.mark.parametrize("control", ["episodic", "continuing"])
def test_transitions_of_every_kind_of_end(control):
    """The replay gets the true last observation, and bootstraps past a truncation but not past a termination
    (RPL-02)."""
    for env_id, length, kind in (("Chain-v0", 3, "terminated"), ("Tasks-v0", 4, "truncated")):
        module = "probe_envs" if kind == "terminated" else "probe_tasks"
        envs = crafter.Envs(f"{module}:{env_id}", [0, 1], 4 if control == "episodic" else None)
        actor = crafter.Actor(envs, np.random.default_rng(0))
        for t in range(20):
            step = actor.step()
            at = t if kind == "truncated" and control == "continuing" else t % length
            assert step["obs"].tolist() == [[at]] * 2 and step["next_obs"].tolist() == [[at + 1]] * 2
            ends = at + 1 == length and not (kind == "truncated" and control == "continuing")
            for flag in ("terminated", "truncated"):
                assert step[flag].tolist() == [ends and flag == kind] * 2
            if kind == "terminated":  # no task vectors: its own reward and termination are the one task
                assert step["reward"].tolist() == [[2.0**at]] * 2 and step["next_beta"].tolist() == [[ends]] * 2
            else:
                assert step["beta"].tolist() == [[at % 2 == 0, at % 3 == 0]] * 2, "also at reset"
                assert step["next_beta"].tolist() == [[(at + 1) % 2 == 0, (at + 1) % 3 == 0]] * 2


def test_evaluation_ends_with_the_task():
    """Task j of CountTasks ends at step j + 2, and its own reward alone counts."""

    class Agent:
        shape = 3, 2

        def act(self, obs, tasks):
            return np.zeros(len(obs), int)

    gym.register("ThreeTasks-v0", "probe_tasks:CountTasks", kwargs={"n": 3})
    args = crafter.Args(env_id="ThreeTasks-v0", eval_episodes=2, episode_length=3)
    rows = crafter.evaluate(Agent(), args)
    expected = [("0", 1.0, 2, True), ("1", 1.0, 3, True), ("2", 0.0, 3, False)]
    assert [(row["task"], row["return"], row["length"], row["solved"]) for row in rows] == [
        row for row in expected for _ in range(2)
    ]


@ALL
def test_a_signal_ends_an_evaluation(script):
    """At its next step, with the run's exit code (USE-02)."""
    calls = []

    def check():
        calls.append(1)
        if len(calls) == 3:
            raise SystemExit(75)

    args = script.Args(env_id=ENVS[script], eval_episodes=2)
    with closing(script.Envs(args.env_id, [0], 5)) as envs:
        agent = script.Agent(envs.obs_shape, envs.num_actions, envs.num_tasks, 16)
    with pytest.raises(SystemExit) as caught:
        script.evaluate(agent, args, check)
    assert caught.value.code == 75 and len(calls) == 3


def test_epsilon_greedy_acts_for_a_task_per_episode():
    envs = crafter.Envs("probe_tasks:Tasks-v0", list(range(50)), 5)

    class Fixed:
        """Task 0 prefers action 0, task 1 action 1."""

        def act(self, obs, tasks):
            return tasks

    actor, tasks, actions = crafter.Actor(envs, np.random.default_rng(0), Fixed()), [], []
    for _ in range(10):
        tasks.append(actor.tasks.copy())
        actions.append(actor.step(epsilon=0.5)["action"])
    tasks, actions = np.array(tasks), np.array(actions)
    assert (tasks[:5] == tasks[0]).all() and (tasks[5:] == tasks[5]).all() and (tasks[0] != tasks[5]).any()
    assert 0.7 < (actions == tasks).mean() < 0.8, "half by epsilon, and half of the rest by chance"
    tasks = actor.tasks.copy()
    assert (actor.step(epsilon=0.0)["action"] == tasks).all()


@pytest.mark.parametrize("fault,found", [
    ("nan", r"environment \d, step 7 of the episode with seed \d+ gave task rewards \[ *0. +nan\]: not finite"),
    ("huge", r"environment \d, step 7 .* gave task rewards \[0.e\+00 1.e\+39\]: not finite, or beyond float32"),
    ("grow", r"\(3,\).*must be \(2,\)"),
    ("reset", r"task_terminations of shape \(3,\)"), ("strings", "<U1 and bool: .* numbers and bool"),
    ("shape", r"gave observation \[0. 0.\]: it must be finite, of shape \(1,\)"), ("float", "float64 and float64"),
    ("unequal", r"task_rewards of shape \(3,\) and task_terminations of shape \(2,\)"),
])  # fmt: skip
def test_task_vectors_that_break_the_contract(tmp_path, fault, found):
    assert re.search(found, refusal(crafter, tmp_path, f"--env-id probe_tasks:Tasks-{fault}-v0"))


def test_a_task_that_holds_all_the_time_is_not_achieved(tmp_path, capsys):
    row = train(crafter, tmp_path, "--env-id probe_tasks:Tasks-held-v0").rows()[-1]
    assert row["tasks/0/achieved"] == row["tasks/1/achieved"] == row["eval/success_mean"] == 0
    assert "never achieved 0, 1" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["taper", "per", "taper_td"])
def test_a_loss_that_is_not_finite_is_told(tmp_path, kind):
    assert "td_errors is not finite" in refusal(dqn, tmp_path, f"--replay {kind} --learning-rate 1e30")


def test_no_task(tmp_path):
    gym.register("NoEvents-v0", lambda: crafter.EventTasks(gym.make("probe_envs:Chain-v0"), {}))
    for env_id in ("probe_tasks:NoTask-v0", "NoEvents-v0"):
        assert "has no task: at least one is needed" in refusal(crafter, tmp_path, f"--env-id {env_id}")


# ---- Arguments ----


@ALL
@pytest.mark.parametrize("given,found", [
    ({"episode_length": 0}, "--episode-length 0: it must be a number at least 1"),
    ({"episode_length": 90}, "num_envs 4 x episode_length 90 = 360"), ({"buffer_size": 0}, "--buffer-size 0"),
    ({"taper_eps": 0}, "--taper-eps 0"), ({"taper_eps": 2}, "--taper-eps 2"), ({"gamma": math.nan}, "--gamma nan"),
    ({"num_actors": 3}, "--num-actors 3 cannot share --num-envs 4"), ({"num_actors": 5}, "--num-actors 5"),
    ({"num_actors": 2, "behaviour": "eps-greedy"}, "use --num-actors 0"), ({"tau": 1.5}, "--tau 1.5"),
    ({"train_frequency": 0}, "--train-frequency 0"), ({"per_beta": -0.1}, "--per-beta -0.1"),
    ({"total_timesteps": 1003}, "--total-timesteps 1003 ends before the first gradient step, at 1004"),
])  # fmt: skip
def test_bad_arguments(script, given, found):
    with pytest.raises(ValueError, match=re.escape(found)) as caught:
        script.Args(**{"env_id": ENVS[script], "num_envs": 4, "buffer_size": 300, "episode_length": 20} | given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("script,env_id,found", [
    (mini, "MiniGrid-DoorKy-5x5-v0", "Did you mean: `MiniGrid-DoorKey-5x5`"),
    (mini, "CartPole-v1", "takes MiniGrid-..., dqn_taper_crafter.py other environments"),
    (crafter, "no_module:Thing-v0", "no_module"), (crafter, "two-rooms-rare", "two-rooms-rare"),
    (crafter, "CartPoleX-v1", "CartPoleX"),
])  # fmt: skip
def test_unknown_environments(script, env_id, found):
    with pytest.raises(ValueError, match=f"--env-id {env_id}: .*{found}") as caught:
        script.Args(env_id=env_id)
    assert "\n" not in str(caught.value)


def test_an_unknown_set_of_tasks(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(dqn.Args, args=["--env-id", "two-rooms-rar"])
    assert "two-rooms-rare" in capsys.readouterr().err


@pytest.mark.parametrize("size", [2_000_000_000, 1_000_000_000_000])
@ALL
def test_a_replay_that_does_not_fit(script, size, tmp_path):
    message = refusal(script, tmp_path, f"--buffer-size {size}")
    assert re.search(f"--buffer-size {size}: .* take .* MiB .* are free: a capacity of \\d+ fits", message)
    each = {dqn: 2 * 19 * 4 + 4 * 6 + 33, mini: 2 * 5 * 5 * 15 + 6 * 6 + 33, crafter: 2 * 4 + 2 * 6 + 33}[script]
    assert f" take {size * each / 2**20:,.1f} MiB of memory" in message


@ALL
def test_more_is_drawn_at_once_than_the_replay_holds(script, tmp_path):
    """With replacement, so it simply works."""
    run = train(script, tmp_path, "--batch-size 301 --train-frequency 1 --learning-starts 0 --total-timesteps 400")
    assert run.rows()[-1]["losses/gradient_steps"] == 99


# ---- Runs ----

KINDS = pytest.mark.parametrize("kind", ["uniform", "per", "taper", "taper_td", "taper_shuffled"])


@KINDS
def test_runs_repeat_and_go_on_to_the_bit(kind, tmp_path, capsys):
    """Twice the same; and half of it, a copy of the folder as a kill leaves it, the other half
    (CKP-05, CKP-07, CLI-13)."""
    flags = f"--replay {kind} --env-id two-rooms-mixed --taper-alpha-fraction 0.8"
    one, two = (train(dqn, tmp_path / name, flags) for name in "ab")
    assert one.repeatable() == two.repeatable() and one.rows("eval.jsonl") == two.rows("eval.jsonl")
    assert_same(one.state(), two.state())
    assert "replay: 300 transitions take" in capsys.readouterr().err
    two.checkpoints()[-1].unlink()
    (two.dir / "result.json").unlink()
    assert len(train(dqn, tmp_path / "b", flags).rows()) == 8
    assert one.repeatable() == two.repeatable()
    assert_same(one.state(), two.state())
    assert one.rows("eval.jsonl") == two.rows("eval.jsonl")
    row = one.rows()[-1]
    assert row["replay/size"] == 300 and 0 < row["replay/achieving_share"] < 1
    assert sum(row[f"tasks/{name}/achieved"] for name in ("key", "door", "corner-8-0", "corner-8-8")) > 0


@pytest.mark.parametrize("script,flags", [
    (dqn, "--env-id two-rooms-mixed --behaviour eps-greedy --separate-networks --replay taper_td"),
    (dqn, "--env-id two-rooms-mixed --replay taper_shuffled --control continuing --taper-reading first --tau 0.5"),
    (crafter, "--env-id probe_tasks:Tasks-v0 --behaviour eps-greedy --separate-networks"),
    (mini, "--env-id MiniGrid-DoorKey-5x5-v0 --replay per --behaviour eps-greedy"),
    (mini, "--env-id MiniGrid-DoorKey-5x5-v0 --replay taper_td --control continuing --taper-reading first"),
])  # fmt: skip
def test_kill_and_signals(script, flags, tmp_path):
    """kill -9 and SIGTERM on the way: the same run as one that was left alone (CKP-06)."""
    flags += " --eval-interval 8 --total-timesteps 3200"
    for number, rc in ((signal.SIGKILL, -9), (signal.SIGTERM, 75)):
        process = start(script, tmp_path / "stopped", flags, step_s=0.002)
        wait_for_updates(process, tmp_path / "stopped", 3)
        process.send_signal(number)
        end = Ended(process)
        assert (end.rc, end.left, end.tracebacks) == (rc, [], 0) and end.seconds < 10, end
    stopped, straight = train(script, tmp_path / "stopped", flags), train(script, tmp_path / "straight", flags)
    assert len(straight.rows()) == 32 and straight.repeatable() == stopped.repeatable()
    assert straight.rows("eval.jsonl") == stopped.rows("eval.jsonl")
    assert_same(straight.state(), stopped.state())


def test_seeds_and_evaluation(tmp_path):
    """Another seed is another run; evaluation leaves training as it is; rows by task; --eval-only repeats the last."""
    often, rarely, other = (train(dqn, tmp_path / name, flags) for name, flags in
                            (("a", "--eval-interval 1"), ("b", "--eval-interval 0"), ("c", "--seed 2")))  # fmt: skip
    training = [[{k: v for k, v in row.items() if not k.startswith("eval")} for row in run.repeatable()]
                for run in (often, rarely, other)]  # fmt: skip
    assert training[0] == training[1] != training[2]
    rows = often.rows("eval.jsonl")
    names = list(dqn.Envs.TASKS["rare"])
    assert [row["task"] for row in rows] == 8 * [name for name in names for _ in range(2)]
    history = []
    for update, row in enumerate(often.rows()):
        history.append([np.mean([r["solved"] for r in rows[8 * update : 8 * update + 8] if r["task"] == name])
                        for name in names])  # fmt: skip
        assert row["eval/success_worst"] == min(history[-1]) and row["eval/success_mean"] == np.mean(history[-1])
        assert row["eval/auc_worst"] == pytest.approx(np.mean(history, 0).min())
        assert row["eval/auc_mean"] == pytest.approx(np.mean(history))
        assert [row[f"eval/success/{name}"] for name in names] == history[-1]
    for row in rows:
        assert row["return"] == row["solved"] and (row["length"] == 20 or row["solved"])
    last = rows[-8:]
    train(dqn, tmp_path / "a", "--eval-interval 1 --eval-only")
    assert often.rows("eval.jsonl")[-8:] == last and len(often.rows("eval.jsonl")) == 72


def test_target_updates_and_gradient_steps(tmp_path, monkeypatch):
    """Both are counted in environment steps, however many environments there are (RPL-12); no sampling before a batch
    is there (RPL-14); no task need ever be achieved, and that is said."""
    calls, lerp = [], torch.Tensor.lerp_
    monkeypatch.setattr(torch.Tensor, "lerp_", lambda *args: calls.append(args[2]) or lerp(*args))
    for num_envs in (1, 7):
        calls.clear()
        flags = f"--learning-starts 0 --target-network-frequency 501 --train-frequency 50 --num-envs {num_envs}"
        run = train(dqn, tmp_path / str(num_envs), flags, "--total-timesteps 10020 --eval-interval 0 --num-steps 500",
                    "--checkpoint-interval 100 --episode-length 5")  # fmt: skip
        assert calls.count(1.0) == 20
        assert sum(row["losses/gradient_steps"] for row in run.rows()) == (run.rows()[-1]["global_step"] - 32) // 50


def test_a_continuing_run(tmp_path):
    """No reset, and a window of T steps: all that led to an achievement within it is marked."""
    rows = train(mini, tmp_path, "--control continuing --eval-interval 0").rows()
    assert rows[-1]["charts/episodes"] < 8, "only the goal ends an episode; episodic, there are 40"
    assert rows[-1]["tasks/pick-up-key/achieved"] > 0 and rows[-1]["replay/achieving_share"] > 0


def test_a_task_that_is_never_achieved_is_reported(tmp_path, capsys):
    run = train(dqn, tmp_path, "--episode-length 2 --env-id two-rooms-mixed")
    assert "note: the behaviour never achieved door, corner-8-0, corner-8-8" in capsys.readouterr().err
    assert run.rows()[-1]["tasks/door/achieved"] == 0 and run.rows()[-1]["eval/success_worst"] == 0


def test_schedules(tmp_path):
    flags = "--behaviour eps-greedy --exploration-fraction 0.5 --end-e 0.2 --taper-alpha-fraction 0.25"
    rows = train(dqn, tmp_path, flags).rows()
    np.testing.assert_allclose([row["charts/epsilon"] for row in rows], [1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2, 0.2])
    np.testing.assert_allclose([row["replay/alpha"] for row in rows], [0, 0.5, 1, 1, 1, 1, 1, 1])


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path, monkeypatch):
    """While a checkpoint is written; the run then goes on from the one before, to the bit."""
    straight = train(dqn, tmp_path / "straight")
    fsync, count = os.fsync, []

    def full(number):
        count.append(1)
        if len(count) == 5:  # config.json, code.py, two checkpoints
            raise OSError(28, "No space left on device")
        fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left on device. What was there before is intact" in refusal(dqn, tmp_path / "full")
    again = train(dqn, tmp_path / "full")
    assert again.repeatable() == straight.repeatable()
    assert_same(again.state(), straight.state())


# ---- Environments that misbehave ----


class OneArray(gym.Env):
    """Counts in one array that it hands out again and again; with `forgets`, each reset starts elsewhere."""

    observation_space, action_space = gym.spaces.Box(0, 1e6, (1,), np.float32), gym.spaces.Discrete(2, start=5)
    resets = 0

    def __init__(self, forgets=False, render_mode=None):
        self.array, self.forgets = np.zeros(1, np.float32), forgets

    def reset(self, *, seed=None, options=None):
        OneArray.resets += 1
        self.array[:] = 100 * OneArray.resets if self.forgets else 0
        return self.array, {}

    def step(self, action):
        assert action in (5, 6)
        self.array += 1
        return self.array, np.array([1.0]), False, False, {}


gym.register("OneArray-v0", OneArray)
gym.register("Forgets-v0", OneArray, kwargs={"forgets": True})


def test_an_environment_that_reuses_its_array():
    """The last observation is the true one, not the reset's (USE-01); a reward of shape (1,) is a number."""
    envs = crafter.Envs("OneArray-v0", [0, 1], 4)
    envs.reset()
    rows = play(envs, [[0, 1]] * 4)
    assert [row[5].tolist() for row in rows] == [[[t]] * 2 for t in (1, 2, 3, 4)]
    assert [row[0].tolist() for row in rows] == [[[t]] * 2 for t in (1, 2, 3, 0)]
    assert rows[-1][4].all() and all((row[1] == 1).all() for row in rows)


def test_an_environment_that_does_not_repeat_itself(capsys):
    """A resume says so and starts new episodes: nothing of the old ones is glued to them (USE-04)."""
    envs = (crafter.Envs("Forgets-v0", [0, 1], 50) for _ in range(2))
    actor, again = (crafter.Actor(each, np.random.default_rng(0)) for each in envs)
    for _ in range(3):
        actor.step()
    again.load_state_dict(pack(actor.state_dict()))
    assert again.envs.lost.all() and not again.envs.actions[0]
    assert "environment 1 does not repeat itself; it begins a new episode" in capsys.readouterr().err
    step = again.step()
    assert (step["obs"] % 100 == 0).all() and (step["next_obs"] == step["obs"] + 1).all()


# ---- Actors ----


def test_actors(tmp_path):
    """Ctrl-C, a killed actor and a killed learner: each ends within 10 s and leaves nothing; then the run goes on
    (SYN-02)."""
    flags = "--num-actors 2 --total-timesteps 4800 --eval-interval 0 --env-id probe_tasks:Tasks-v0"
    for kind in ("sigint", "actor", "learner"):
        process = start(crafter, tmp_path, flags, step_s=0.001)
        wait_for_updates(process, tmp_path)
        actors = [pid for pid in members(process.pid) if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(actors) == 2
        if kind == "sigint":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(process.pid if kind == "learner" else actors[1], signal.SIGKILL)
        end = Ended(process)
        rc = {"sigint": 130, "actor": 1, "learner": -9}[kind]
        assert (end.rc, end.left) == (rc, []) and end.tracebacks <= 1 and end.seconds < 10, (kind, end)
        if kind == "actor":
            assert re.search(r"error: worker actor 1 \(pid \d+\) died with exit code -9", end.err), end
    run = train(crafter, tmp_path, flags)
    rows = run.rows()
    assert rows[-1]["global_step"] == 4800 and [row["charts/update"] for row in rows] == list(range(1, 49))
    assert rows[-1]["tasks/0/achieved"] > 1000 and max(row["async/queue_depth"] or 0 for row in rows) >= 1
    assert rows[-1]["losses/gradient_steps"] == pytest.approx(25, abs=3)


@pytest.mark.parametrize("num_actors", [1, 2, 4])
def test_actors_send_all_steps_in_order(num_actors):
    """Each the same transitions as an Actor with its seed, while the queue is full, while it is not."""
    env_id, num_envs = "probe_envs:Chain-v0", 4
    seeds, found = np.random.SeedSequence(3).spawn(num_actors), [[] for _ in range(num_actors)]
    with ExitStack() as run:
        run.check_signals = lambda: None
        envs = crafter.Envs(env_id, [0], 5)
        transition = crafter.Actor(envs, np.random.default_rng(0)).step()
        actors = crafter.Actors(run, num_envs, transition, env_id, 5, seeds)
        for t in range(400 * num_actors):
            time.sleep(0.2 * (t % 300 == 299) + 0.002 * (t > 1000))
            row = actors.step()
            found[row["envs"][0] * num_actors // num_envs].append(row)
        assert actors.metrics()["async/queue_depth"] >= 1
    assert not multiprocessing.active_children() and all(found)
    for index, rows in enumerate(found):
        env_seed, action_seed = np.random.SeedSequence(3).spawn(num_actors)[index].spawn(2)
        envs = crafter.Envs(env_id, env_seed.spawn(num_envs // num_actors), 5)
        actor = crafter.Actor(envs, np.random.default_rng(action_seed))
        for row in rows:
            expected = actor.step()
            assert row.keys() == expected.keys()
            assert (row.pop("envs") == expected.pop("envs") + index * envs.num_envs).all()
            for name, array in expected.items():
                assert row[name].dtype == array.dtype and (row[name] == array).all(), name


@pytest.mark.parametrize("fault,found", [
    ("raise", r"error: actor 0 failed:\nTraceback(.|\n)*environment \d, step 7 of the episode with seed \d+: "
              "ValueError: boom-44"),
    ("exit", r"error: actor 0 failed:\nTraceback(.|\n)*SystemExit"), ("die", r"actor 0 .*died with exit code 7"),
    ("nan", r"error: actor 0 failed:\nenvironment \d, step 7 .* gave task rewards \[ *0. +nan\]: not finite.*$"),
])  # fmt: skip
def test_an_actor_that_fails_is_named(tmp_path, fault, found):
    with pytest.raises(SystemExit) as caught:
        train(crafter, tmp_path, f"--num-actors 1 --env-id probe_tasks:Tasks-{fault}-v0")
    assert re.match(found, caught.value.code.removeprefix("error: worker ")), caught.value.code
    assert not multiprocessing.active_children()


def test_an_actor_that_hangs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(crafter.Actors, "TIMEOUT_S", 2)
    monkeypatch.setattr(crafter.Actors, "CHUNK", 4)
    message = refusal(crafter, tmp_path, "--num-actors 2 --env-id probe_tasks:Tasks-hang-v0 --num-envs 2")
    assert re.fullmatch(r"error: actor [01] \(process \d+\) has sent nothing for 2 s", message)


# ---- Learning ----


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_learns_the_grid(seed, tmp_path):
    """All four rare tasks, from 40 starts each."""
    args = dqn.Args(seed=seed, total_timesteps=72_000, train_frequency=16, taper_alpha_start=1.0, eval_interval=0,
                    run_dir=tmp_path, progress="none")  # fmt: skip
    result = dqn.train(args)
    assert result["eval/success_mean"] >= 0.85, result
