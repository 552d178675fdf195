"""algos/a3c.py: mathematics, unrolls, the staleness of gradients, faults, resume, both environments."""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import matplotlib.image
import numpy as np
import pytest
import torch
import tyro
from test_runs import ENVIRONMENT, Ended, Run, assert_same, restored_signals, wait_for_updates  # noqa: F401

from algos import a3c
from benchmark.figures import a3c_figures

TINY = "--num-envs 2 --num-steps 4 --log-interval 1 --eval-episodes 2 --progress none"  # 8 steps an update


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)  # as `train` does


def parse(*arguments):
    return tyro.cli(a3c.Args, args=[word for argument in arguments for word in argument.split()])


def train(folder, *arguments):
    try:
        a3c.train(parse(TINY, f"--run-dir {folder}", *arguments))
    finally:
        gc.collect()
    return Run(folder)


def refusal(folder, *arguments):
    """The one line with which a run ends."""
    with pytest.raises(SystemExit) as caught:
        train(folder, *arguments)
    message = caught.value.code
    assert message.startswith("error: ") and "\n" not in message
    return message


def seeds(count):
    return np.random.SeedSequence(3).spawn(count)


def ages_of(run):
    """staleness -> gradients, of the whole run."""
    counts = {}
    for row in run.rows("staleness.jsonl"):
        for age, count in row["staleness"].items():
            counts[int(age)] = counts.get(int(age), 0) + count
    return counts


# ---- It learns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_learns_to_balance(seed, tmp_path):
    """Without training about 10; with the defaults and 500,000 steps 500."""
    words = "--total-timesteps 25000 --num-steps 8 --learning-rate 5e-3 --gamma 0.97 --estimator gae --eval-episodes 8"
    args = parse(words, f"--num-workers 0 --seed {seed} --progress none --run-dir {tmp_path}")
    assert a3c.train(args)["eval/return_mean"] >= 300


# ---- Mathematics -----------------------------------------------------------------------------------------------------


def oracle_returns(b, gamma):
    """The paper's recursion, an environment at a time: R <- r + gamma R, from the bootstrap or 0."""
    T, N = b["rewards"].shape
    found = np.zeros((T, N))
    for i in range(N):
        R = float(b["next_values"][T - 1, i])
        for t in reversed(range(T)):
            if b["terminated"][t, i]:
                R = 0.0
            elif b["truncated"][t, i]:
                R = float(b["next_values"][t, i])
            found[t, i] = R = float(b["rewards"][t, i]) + gamma * R
    return found


@pytest.fixture
def batch():
    rng = np.random.default_rng(1)
    arrays = {name: rng.normal(size=(6, 3)).astype(np.float32) for name in ("rewards", "values", "next_values")}
    arrays["next_values"][:-1] = arrays["values"][1:]
    terminated, truncated = rng.random((2, 6, 3)) < 0.4
    arrays["next_values"][truncated] = 7.0
    assert (terminated & truncated).any() and (truncated & ~terminated).any()
    return arrays | {"terminated": terminated, "truncated": truncated}


def test_the_n_step_returns_are_the_paper_s_recursion(batch):
    parts = [batch[name] for name in ("rewards", "values", "next_values", "terminated", "truncated")]
    advantages, returns = a3c.gae(*parts, 0.9, 1.0)
    expected = oracle_returns(batch, 0.9)
    np.testing.assert_allclose(returns, expected, atol=1e-5)
    np.testing.assert_allclose(advantages, expected - batch["values"], atol=1e-5)


def test_the_loss_and_its_gradient_are_those_on_paper():
    """d loss / d logits = -(A (1[a] - p) - ent_coef p (H + log p)) / B, with the entropy H."""
    rng = np.random.default_rng(0)
    logits, values, advantages, returns = (rng.normal(size=shape) for shape in ((5, 3), 5, 5, 5))
    actions = rng.integers(3, size=5)
    given = [torch.tensor(x, requires_grad=i < 2) for i, x in enumerate((logits, values))]
    loss, parts = a3c.a3c_loss(*given, *map(torch.tensor, (actions, advantages, returns)), 0.02, 0.5)
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    entropy = -(p * np.log(p)).sum(1)
    expected = {"policy_loss": -(advantages * np.log(p[np.arange(5), actions])).mean(),
                "value_loss": 0.5 * ((values - returns) ** 2).mean(), "entropy": entropy.mean()}  # fmt: skip
    assert {name: x.item() for name, x in parts.items()} == pytest.approx(expected)
    assert loss.item() == pytest.approx(
        expected["policy_loss"] + 0.5 * expected["value_loss"] - 0.02 * expected["entropy"]
    )
    loss.backward()
    chosen = np.eye(3)[actions]
    on_logits = -(advantages[:, None] * (chosen - p) - 0.02 * p * (entropy[:, None] + np.log(p))) / 5
    np.testing.assert_allclose(given[0].grad, on_logits, atol=1e-12)
    np.testing.assert_allclose(given[1].grad, 0.5 * (values - returns) / 5, atol=1e-12)


def test_rmsprop_has_its_epsilon_inside_the_root_and_starts_at_zero():
    w, g = np.array([1.0, -2.0]), np.zeros(2)
    p = torch.tensor(w, requires_grad=True)
    optimizer = a3c.RMSProp([p], lr=0.1, decay=0.9, eps=0.01)
    for grad in ([0.5, -1.0], [0.0, 3.0], [-2.0, 1e-3]):
        p.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
        g = 0.9 * g + 0.1 * np.square(grad)
        w = w - 0.1 * np.array(grad) / np.sqrt(g + 0.01)
        np.testing.assert_allclose(p.detach(), w, rtol=1e-12)


# ---- Unrolls and their gradients -------------------------------------------------------------------------------------


def make_worker(*arguments):
    args = parse(TINY, *arguments)
    torch.manual_seed(0)
    worker = a3c.Worker(args, np.random.SeedSequence(1))
    agent = a3c.Agent(worker.envs.obs.shape[1:], int(worker.envs.action_space.n))
    worker.weights[:] = a3c.flat_weights(agent)
    return worker, agent


def test_an_unroll_bootstraps_from_what_truly_came():
    """TruncatedChain: 3 steps, cut off there; its last observation is 3, the next episode's first 0."""
    worker, agent = make_worker("--env-id probe_envs:TruncatedChain-v0 --num-steps 7")
    b = worker.unroll()
    with torch.no_grad():
        value = lambda s: agent(torch.tensor([[float(s)]]))[1].item()  # noqa: E731
    assert b["obs"][:, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert b["rewards"][:, 1].tolist() == [1, 2, 4, 1, 2, 4, 1]
    assert b["truncated"][:, 0].tolist() == [False, False, True] * 2 + [False] and not b["terminated"].any()
    np.testing.assert_allclose(b["next_values"][:, 0], [value(s) for s in (1, 2, 3, 1, 2, 3, 1)], atol=1e-6)
    assert worker.envs.finished == [(7.0, 3)] * 4
    assert worker.unroll()["obs"][:, 0, 0].tolist() == [1, 2, 0, 1, 2, 0, 1]  # goes on where that ended


@pytest.mark.parametrize("estimator", ["nstep", "gae"])
def test_a_slot_holds_the_gradient_with_the_weights_of_its_version(estimator):
    """The same from the unroll itself, by another way: the whole agent's .backward()."""
    worker, agent = make_worker(f"--env-id CartPole-v1 --num-steps 30 --estimator {estimator} --gae-lambda 0.7")
    board = a3c.Board(len(worker.weights))
    board.write(worker.weights * 2, 5)
    unroll, kept = worker.unroll, []
    worker.unroll = lambda: kept.append(unroll()) or dict(kept[0])
    shared = a3c.SharedMemory(a3c.Worker.layout(worker.args, len(worker.weights)), 1)
    worker.fill(slot := shared.record(0), board)
    (b,) = kept
    ended = sum(b["terminated"].sum(1) + b["truncated"].sum(1))
    assert slot["version"] == 5 and slot["num_episodes"] == ended > 0
    assert slot["episodes"][0, 0] == slot["episodes"][0, 1] > 8  # CartPole pays 1 a step
    torch.nn.utils.vector_to_parameters(torch.from_numpy(a3c.flat_weights(agent) * 2), agent.parameters())
    lam = 0.7 if estimator == "gae" else 1
    delta = b["rewards"] + 0.99 * np.where(b["terminated"], 0, b["next_values"]) - b["values"]
    going, advantages = 1.0 - (b["terminated"] | b["truncated"]), np.zeros((31, 2))
    for t in reversed(range(30)):
        advantages[t] = delta[t] + 0.99 * lam * going[t] * advantages[t + 1]
    advantages = torch.tensor(advantages[:-1].reshape(-1), dtype=torch.float32)
    logits, values = agent(torch.tensor(b["obs"].reshape(-1, 4)))
    log_p = logits.log_softmax(-1)
    targets = advantages + torch.tensor(b["values"].reshape(-1))
    policy = -(advantages * log_p[range(60), b["actions"].reshape(-1)]).mean()
    (policy + 0.25 * ((targets - values) ** 2).mean() + 0.01 * (log_p.exp() * log_p).sum(-1).mean()).backward()
    expected = torch.nn.utils.parameters_to_vector([p.grad for p in agent.parameters()])
    np.testing.assert_allclose(slot["gradient"], expected, rtol=2e-3, atol=1e-5)


# ---- Vector Pong -----------------------------------------------------------------------------------------------------


def test_the_agent_changes_seats_after_each_game_and_is_paid_for_its_own_points():
    """Standing still loses to the script; the script itself in the agent's seat comes out even."""
    for scripted, low, high in ((False, -20, -12), (True, -4, 4)):
        envs, seen, totals = a3c.make_envs("VectorPong", seeds(4)), [], np.zeros(4)
        while len(envs.finished) < 16:
            seat = envs.seats.copy()
            actions = envs.games.scripted()[envs.rows, seat] if scripted else np.ones(4, int)
            bats = envs.games.bats[envs.rows, seat]
            np.testing.assert_allclose(envs.obs[:, 0], (bats + 7.5) / 40 - 2, atol=1e-6)  # one's own bat comes first
            _, rewards, terminated, truncated, info = envs.step(actions)
            totals += rewards
            assert not truncated.any()
            mine = info["final_obs"][:, 0] * 40 + 72.5  # where one's own bat went, also in the last step of a game
            np.testing.assert_allclose(mine, np.clip(bats + 4.0 * (actions - 1), 0, 145), atol=1e-4)
            assert (envs.seats == np.where(terminated, 1 - seat, seat)).all()
            for i in np.flatnonzero(terminated):
                seen.append((totals[i], seat[i]))
                totals[i] = 0
        assert [found[0] for found in envs.finished] == [total for total, _ in seen]
        assert {seat for _, seat in seen} == {0, 1}
        assert low <= np.mean([total for total, _ in seen]) <= high


def test_games_go_on_from_their_state_to_the_bit():
    actions = np.random.default_rng(0).integers(3, size=(1500, 3))
    envs = a3c.make_envs("VectorPong", seeds(3))
    for row in actions[:450]:
        envs.step(row)
    state, games = a3c.pack(envs.state_dict()), len(envs.finished)
    other = a3c.make_envs("VectorPong", seeds(3)[::-1])
    other.load_state_dict(state)
    assert (other.obs == envs.obs).all()
    for row in actions[450:]:
        for x, y in zip(envs.step(row)[:3], other.step(row)[:3]):
            np.testing.assert_array_equal(x, y)
    assert envs.finished == other.finished and len(envs.finished) >= games + 3


# ---- Staleness -------------------------------------------------------------------------------------------------------


def test_the_mean_staleness_is_the_number_of_other_workers(tmp_path, monkeypatch):
    """A real run, whose 3 workers mostly wait for their environments. At each update the gradients of the 2 others, if
    they are under way, get a version older: never above 2 in the mean, and below it only by what the way back takes."""
    take = a3c.Workers.take

    def together(self, check):
        while self.version == 0 and len(self.full) < 3:  # all begin at once, however long a process takes to start
            self.poll(0.1)
        return take(self, check)

    monkeypatch.setattr(a3c.Workers, "take", together)
    monkeypatch.setenv("PROBE_STEP_S", "0.004")
    run = train(
        tmp_path, "--env-id probe_envs:SlowCartPole-v0 --num-workers 3 --total-timesteps 1200 --log-interval 10"
    )
    rows, files = run.rows(), run.rows("staleness.jsonl")
    counts = ages_of(run)
    assert 1.5 <= sum(age * count for age, count in counts.items()) / sum(counts.values()) <= 2
    assert sorted(row["workers"] for row in files)[len(files) // 2] == 3
    assert sum(ages_of(run).values()) == rows[-1]["charts/update"] == 150
    for row, ages in zip(rows, files, strict=True):
        counts = {int(age): count for age, count in ages["staleness"].items()}
        assert sum(counts.values()) == row["losses/gradient_steps"] == 10 and row["async/dropped"] == 0
        assert max(counts) == row["async/gradient_staleness_max"] and row["global_step"] == ages["global_step"]
        total = sum(age * count for age, count in counts.items())
        assert total / 10 == pytest.approx(row["async/gradient_staleness_mean"])
    assert (run.dir / "staleness.png").read_bytes().startswith(b"\x89PNG")
    assert rows[-1]["async/learner_wait_s"] > 0 and sum(row["charts/episodes"] for row in rows) > 0


@pytest.mark.parametrize("limit", [0, 1])
def test_older_gradients_are_dropped_and_counted(limit, tmp_path, monkeypatch):
    """Gradients claim to be 0, 1, 2, 0, ... versions older than they are."""
    fill, published, calls = a3c.Worker.fill, [], []

    def aged(self, slot, board):
        fill(self, slot, board)
        calls.append(1)
        slot["version"][...] -= len(calls) % 3

    monkeypatch.setattr(a3c.Worker, "fill", aged)
    publish = a3c.Workers.publish
    monkeypatch.setattr(a3c.Workers, "publish", lambda self, w: published.append(w.copy()) or publish(self, w))
    run = train(tmp_path, f"--num-workers 0 --total-timesteps 240 --max-staleness {limit} --log-interval 5")
    dropped = 10 if limit else 0
    assert ages_of(run) == {0: 10, 1: 10, 2: 10} and len(calls) == 30 and len(published) == 30 - dropped
    rows = run.rows()
    assert rows[-1]["async/dropped"] == dropped == run.rows("staleness.jsonl")[-1]["dropped"]
    assert sum(row["losses/gradient_steps"] for row in rows) == 30 - dropped
    assert (run.state()["agent"]["policy.0.weight"].numpy().ravel() == published[-1][:512]).all()
    assert rows[-1]["global_step"] == 240  # what was dropped was played all the same


class Echo:
    """A worker whose gradient is the weights that it found."""

    def __init__(self, size):
        self.weights = np.zeros(size, np.float32)

    def fill(self, slot, board):
        slot["version"][...] = board.read(self.weights)
        slot["gradient"][:] = self.weights
        slot["sent_s"][...] = time.monotonic()
        if slot["version"] == 10**6:
            time.sleep(100)


def make_echo(size, version, index):
    return Echo(size)


def test_gradients_come_in_order_of_one_version_each_and_a_lost_worker_is_named():
    """First whole weights of their version, the first sent first, then one that hangs, then one that was killed."""
    size = 200_000
    layout = a3c.Worker.layout(parse(TINY), size)
    workers = a3c.Workers(partial(make_echo, size), layout, 2)
    with contextlib.closing(workers):
        workers.start(np.full(size, 3, np.float32), 3)
        sent, who = [], set()
        while len(who) < 2 or len(sent) < 20:
            slot = workers.take()
            assert (slot["gradient"] == slot["version"]).all() and slot["version"] <= workers.version
            assert all(slot["sent_s"] <= workers.slots["sent_s"][i] for i in workers.full)
            sent.append(float(slot["sent_s"]))
            who.add(workers.taken)
            workers.publish(np.full(size, workers.version + 1, np.float32))
            workers.go_on()
        workers.version = 10**6 - 1
        workers.publish(np.full(size, 10**6, np.float32))  # now both sleep
        workers.TIMEOUT_S = 1.5
        with pytest.raises(SystemExit, match=r"^error: worker \d \(process \d+\) hangs: no gradient of it for 1.5 s$"):
            while True:
                workers.take()
                workers.go_on()
        workers.TIMEOUT_S, begun = 600, time.monotonic()
        workers.processes[1][0].kill()
        with pytest.raises(SystemExit, match=r"^error: worker 1 \(process \d+\) died with exit code -9$"):
            while True:
                workers.take()
                workers.go_on()
        assert time.monotonic() - begun < 10


def test_the_figure_shows_each_histogram_and_the_means(tmp_path, monkeypatch):
    data = {"slept": {"1": {"0": 5}, "4": {"0": 1, "3": 2, "10": 1}}, "CartPole": {"2": {"0": 1, "1": 3}}}
    (tmp_path / "staleness.json").write_text(json.dumps(data))
    drawn = []
    monkeypatch.setattr(a3c_figures, "save", lambda figure, path: drawn.append((figure, path)))
    a3c_figures.remake(tmp_path)
    ((figure, path),) = drawn
    slept, cartpole, means = figure.axes
    assert path == tmp_path / "staleness"
    assert [(line.get_label(), [*line.get_xdata()], [*line.get_ydata()]) for line in slept.lines] == [
        ("1 worker", [0], [100]), ("4 workers", [0, 3, 10], [25, 50, 25])]  # fmt: skip
    assert [*cartpole.lines[0].get_ydata()] == [25, 75]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in means.lines] == [(0, 3, 0, 4), (1, 0.75), (0, 3, 0, 3)]


def test_the_published_figure_is_drawn_from_its_numbers(tmp_path):
    numbers = (a3c_figures.FOLDER / "staleness.json").read_bytes()
    (tmp_path / "staleness.json").write_bytes(numbers)
    a3c_figures.remake(tmp_path)
    then, now = (matplotlib.image.imread(folder / "staleness.png") for folder in (a3c_figures.FOLDER, tmp_path))
    assert then.shape == now.shape and abs(then - now).mean() < 1e-3


# ---- Faults ----------------------------------------------------------------------------------------------------------


def test_a_worker_that_raises_ends_the_run_with_the_cause_in_one_line(tmp_path, capsys):
    message = refusal(tmp_path, "--env-id probe_envs:Faulty-raise-v0 --num-workers 1")
    assert message.startswith("error: worker 0 failed: RuntimeError: environment ") and "boom-42" in message
    assert "Traceback" in capsys.readouterr().err  # whose last line it is
    assert Run(tmp_path).json("status.json")["state"] == "failed"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--learning-rate 1e38", "is not finite. The last good checkpoint is kept"),
        ("--env-id probe_envs:Faulty-reward-v0", "reward nan"),
        ("--env-id probe_envs:HugeReward-v0", "reward 1e+39"),
    ],
)
def test_what_is_not_finite_ends_the_run_by_name(arguments, words, tmp_path):
    assert words in refusal(tmp_path, "--num-workers 0 --total-timesteps 800", arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env_id": "CartPole-v7"}, "--env-id CartPole-v7: "),
        ({"env_id": "vectorpong"}, "--env-id vectorpong: "),
        ({"env_id": "probe_envs:NoNumbers-v0"}, "observations that are no numbers"),
        ({"num_workers": -1}, "--num-workers -1: it must be a number at least 0"),
        ({"max_staleness": -1}, "--max-staleness -1: it must be a number at least 0"),
        ({"num_envs": 0}, "--num-envs 0: it must be a number at least 1"),
        ({"gamma": 1.1}, "--gamma 1.1: it must be a number between 0 and 1"),
        ({"learning_rate": np.nan}, "--learning-rate nan"),
    ],
)
def test_wrong_arguments_are_named(change, words):
    with pytest.raises(ValueError) as error:
        a3c.Args(**change)
    assert words in str(error.value)


def test_actions_that_are_not_discrete_are_refused(tmp_path):
    assert "this script takes Discrete" in refusal(tmp_path, "--env-id Pendulum-v1")


def test_a_missing_matplotlib_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(a3c.importlib.util, "find_spec", lambda name: None)
    assert "pip install matplotlib" in refusal(tmp_path)


# ---- Stops and resumes -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def stopping_at(update):
    """Ends a run in the middle of an update, as a kill would: what is not in a checkpoint is lost."""
    take, done = a3c.Workers.take, []

    def counted(self, *check):
        if self.version == update:
            raise KeyboardInterrupt
        done.append(self.version)
        return take(self, *check)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(a3c.Workers, "take", counted)
        yield


@pytest.mark.parametrize("env_id,more", [("CartPole-v1", "--optimizer adam --estimator gae"), ("VectorPong", "")])
def test_without_workers_a_run_repeats_and_resumes_to_the_bit(env_id, more, tmp_path):
    """And evaluations in between change nothing (EVO-11, EVO-12: stopped twice)."""
    words = (f"--env-id {env_id} --num-workers 0 --total-timesteps 1200 --checkpoint-interval 25 --log-interval 15 "
             f"--eval-max-steps 300 {more}")  # fmt: skip
    straight = train(tmp_path / "straight", words)
    for update in (60, 90):
        with stopping_at(update):
            train(tmp_path / "stopped", words, "--eval-interval 30")
    stopped = train(tmp_path / "stopped", words, "--eval-interval 30")
    assert [row["charts/update"] for row in straight.rows()] == list(range(15, 151, 15))
    assert_same(straight.state(), stopped.state())
    for row, same in zip(straight.repeatable(), stopped.repeatable(), strict=True):
        assert row == {name: value for name, value in same.items() if name in row}
    assert straight.rows("staleness.jsonl") == stopped.rows("staleness.jsonl")
    other = train(tmp_path / "other", words.replace("1200", "120"), "--seed 2")
    assert other.rows()[0]["losses/entropy"] != straight.rows()[0]["losses/entropy"]


def test_one_worker_does_what_the_server_does_alone(tmp_path):
    """Its gradients are never stale: to the bit the same weights, returns and losses (EVO-13)."""
    words = "--total-timesteps 800 --log-interval 10 --num-workers"
    alone, one = (train(tmp_path / number, words, number) for number in "01")
    assert ages_of(alone) == ages_of(one) == {0: 100}
    assert_same(alone.state()["agent"], one.state()["agent"])
    for row, same in zip(alone.repeatable(), one.repeatable(), strict=True):
        assert {k: v for k, v in row.items() if "wait" not in k} == {k: v for k, v in same.items() if "wait" not in k}


def test_whatever_ends_the_server_no_worker_stays_and_sigterm_goes_on(tmp_path):
    """SIGTERM to the whole group: 75, a checkpoint, nobody left; the same command goes on from there, and is killed by
    -9 while its workers are busy for a minute: they end too."""
    words = f"{TINY} --env-id probe_envs:SlowCartPole-v0 --num-workers 2 --total-timesteps 100000 --run-dir {tmp_path}"

    def start(step_s):
        environment = ENVIRONMENT | {"PROBE_STEP_S": step_s}
        return subprocess.Popen([sys.executable, a3c.__file__, *words.split()], env=environment, text=True,
                                start_new_session=True, stdout=-1, stderr=-1)  # fmt: skip

    process = start("0.002")
    wait_for_updates(process, tmp_path, 3)
    os.killpg(process.pid, signal.SIGTERM)
    end, run = Ended(process), Run(tmp_path)
    assert (end.rc, end.left, end.tracebacks) == (75, [], 0) and end.seconds < 10, end
    assert "SIGTERM: the same command goes on from" in end.err
    saved = torch.load(run.checkpoints()[-1], weights_only=True)
    assert saved["update"] == len(run.rows()) >= 3
    process = start("60")
    before = run.json("status.json")["pid"]
    while len(busy(process.pid)) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.kill()
    end = Ended(process)
    assert (end.rc, end.left) == (-9, []) and end.seconds < 10, end
    assert before != process.pid and run.rows()[-1]["charts/update"] == saved["update"]


def busy(group):
    """The worker processes of a group that wait in their environments: asleep each time that one looks."""
    from test_runs import members

    found = [pid for pid in members(group) if "spawn_main" in open(f"/proc/{pid}/cmdline").read()]
    for _ in range(5):
        time.sleep(0.1)
        found = [pid for pid in found if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] == "S"]
    return found


def test_evaluation_alone_reads_the_checkpoint_and_leaves_the_run(tmp_path):
    run = train(tmp_path, "--num-workers 0 --total-timesteps 80")
    rows = run.rows("eval.jsonl")
    before = {path: path.read_bytes() for path in run.dir.rglob("*") if path.is_file()}
    means = a3c.train(parse(TINY, f"--num-workers 0 --total-timesteps 80 --eval-only --run-dir {tmp_path}"))
    assert means["eval/return_mean"] == np.mean([row["return"] for row in rows])
    assert run.rows("eval.jsonl") == rows * 2
    assert all(path.read_bytes() == data for path, data in before.items() if path.name != "eval.jsonl")
    assert json.loads((run.dir / "result.json").read_text())["eval/return_mean"] == means["eval/return_mean"]
