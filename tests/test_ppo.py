"""The mathematics and the parts of ppo.py and ppo_vector.py against hand-computed numbers and independent oracles."""

import contextlib
import io
import json
import math
import os
import signal
from contextlib import closing
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from numpy.random import SeedSequence
from probe_envs import ChainEnv, EnvpoolLike, OddRewards, ShiftedChain
from torch import nn

from algos import ppo, ppo_vector

SCRIPTS = pytest.mark.parametrize("script", [ppo, ppo_vector], ids=["ppo", "ppo_vector"])
VECTOR_MODES = ["sync", "async", "envpool-like"]  # of ppo_vector.py
MODES = ["ppo", *VECTOR_MODES]  # ppo: the environments of ppo.py, in its process
GAE = json.loads((Path(__file__).parent / "data" / "gae.json").read_text())


@pytest.fixture(autouse=True)
def restored_signals():
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)


def script_of(mode):
    return ppo if mode == "ppo" else ppo_vector


def vector(mode, envs, make_ppo=ppo.Envs):
    """The environments of a script around single ones, in one of MODES."""
    seeds = np.random.SeedSequence(1).spawn(len(envs))
    if mode == "ppo":
        with mock.patch.object(gym, "make", lambda env_id, made=iter(envs): next(made)):
            return make_ppo("", seeds)
    if mode == "envpool-like":
        return ppo_vector.VectorEnvs(EnvpoolLike(envs), seeds)
    make = {"sync": gym.vector.SyncVectorEnv, "async": ppo_vector.AsyncEnvs}[mode]
    makers = [lambda i=i, env=env: ppo_vector.Episodes(env, i) for i, env in enumerate(envs)]
    return ppo_vector.VectorEnvs(make(makers, autoreset_mode=gym.vector.AutoresetMode.DISABLED), seeds)


def begin(envs):
    """The first observations; the environments of ppo.py have made them with themselves."""
    return envs.obs.copy() if isinstance(envs, ppo.Envs) else envs.reset()


@pytest.fixture
def train(monkeypatch, tmp_path):
    """train(mode, make, value, T, updates): trains on the environments make(n) in that mode, with the critic
    value(obs). Returns a record an update: gae's results, the trained advantages."""

    def run(mode, make, value, T, updates, num_envs=1, **args):
        records, script = [], script_of(mode)

        def gae(*inputs):
            advantages, returns = real_gae(*inputs)
            records.append({"advantages": advantages, "returns": returns, "trained": []})
            return advantages, returns

        def ppo_loss(*inputs):
            records[-1]["trained"] += inputs[5].tolist()
            return real_loss(*inputs)

        class Agent(script.Agent):
            def forward(self, obs):
                return self.policy(obs), value(obs)

        def make_envs(env_id, *options, check=None):
            return vector(mode, make(len(options[-1])))

        real_gae, real_loss = script.gae, script.ppo_loss
        with monkeypatch.context() as patch:
            patch.setattr(script, "gae", gae)
            patch.setattr(script, "ppo_loss", ppo_loss)
            patch.setattr(script, "Agent", Agent)
            patch.setattr(script, "evaluate", lambda *_: [{"return": 0.0, "length": 1}])
            patch.setattr(script, "Envs" if script is ppo else "make_envs", make_envs)
            defaults = {"num_minibatches": 1, "update_epochs": 1, "norm_adv": False, "eval_episodes": 1}
            defaults |= {"eval_interval": 0, "progress": "none", "run_dir": tmp_path / "runs"}
            shape = {"num_envs": num_envs, "num_steps": T, "total_timesteps": updates * T * num_envs}
            script.train(script.Args(**defaults | shape | args))
        return records

    return run


# ---- Advantages ----


@pytest.mark.parametrize("case", GAE["cases"], ids=lambda case: case["case"])
def test_gae_vectors(case):
    inputs = [np.array(case[name]) for name in ("rewards", "values", "v_next", "terminated", "truncated")]
    advantages, returns = ppo.gae(*inputs, case["gamma"], case["lam"])
    np.testing.assert_allclose(advantages, case["advantages"], **GAE["tolerance"])
    np.testing.assert_allclose(returns, case["returns"], **GAE["tolerance"])


def test_gae_counts_the_bootstrap_once():
    """PPO-06."""
    advantages, returns = ppo.gae([[1.0]] * 3, [[0.5]] * 3, [[0.5], [0.5], [2.0]], [[0]] * 3, [[0]] * 3, 0.9, 1.0)
    np.testing.assert_allclose(advantages[:, 0], [3.668, 3.02, 2.3], rtol=1e-12)
    np.testing.assert_allclose(returns, advantages + 0.5, rtol=1e-12)


def test_gae_does_not_truncate_integers():
    advantages, _ = ppo.gae([[1], [1]], [[0], [0]], [[0], [0]], [[0], [0]], [[0], [0]], 1, 0.95)
    assert advantages.tolist() == [[1.95], [1.0]]


# A chain pays 2^s and the critic says V(s) = 2^(s+1): with gamma 0.5 every step but a terminal one has delta 2^s, and
# the terminal step 2 has 4 - V(2) = -4. With lambda 0.5 the trace decays by 0.25. Advantages of a stretch of states:
ENDING_IN_DEATH = {"0": [1], "01": [1.5, 2], "012": [1.25, 1, -4], "12": [1, -4], "1": [2], "2": [-4]}
ENDING_BY_LIMIT = {"0": [1], "01": [1.5, 2], "012": [1.75, 3, 4], "12": [3, 4], "1": [2], "2": [4]}
# An environment that never ends goes on by T states an update, and each state's delta is twice the one before.
ENDLESS = {1: [1], 2: [1.5, 2], 3: [1.75, 3, 4], 4: [1.875, 3.5, 6, 8]}
ENDS = ["terminated", "truncated", "both", "endless"]
# The states that the updates see, by T.
STRETCHES = {1: ["0", "1", "2", "0"], 2: ["01", "2 0", "12"], 3: ["012", "012"], 4: ["012 0", "12 01"]}


@pytest.mark.parametrize(
    "mode,T,stretches",
    [(mode, T, s) for mode in MODES for T, s in STRETCHES.items() if T == 3 or mode != "async"],
    ids=lambda x: str(x) if not isinstance(x, list) else "",
)
def test_every_way_an_episode_ends_gives_the_same_advantages_in_every_mode(train, mode, T, stretches):
    records = train(mode, lambda n: [ChainEnv(end=end) for end in ENDS[:n]],
                    lambda obs: torch.ldexp(torch.full((len(obs),), 2.0), obs[:, 0].int()),
                    T, len(stretches), num_envs=4, gamma=0.5, gae_lambda=0.5)  # fmt: skip
    assert len(records) == len(stretches)
    for update, (record, seen) in enumerate(zip(records, stretches)):
        death = [a for stretch in seen.split() for a in ENDING_IN_DEATH[stretch]]
        limit = [a for stretch in seen.split() for a in ENDING_BY_LIMIT[stretch]]
        endless = [a * 2 ** (T * update) for a in ENDLESS[T]]
        columns = [record["advantages"][:, i].tolist() for i in range(4)]
        assert columns == [death, limit, death, endless], f"update {update}"
        assert sorted(record["trained"]) == sorted(death + limit + death + endless), f"update {update}"


@pytest.mark.parametrize("mode", MODES)
def test_a_time_limit_is_not_a_death(train, mode):
    """V = 10 is exact for a reward of 1 for ever under gamma 0.9, so nothing is surprising at the cut (PPO-01)."""

    def chains(n):
        return [ChainEnv(5, "truncated", lambda s: 1.0) for _ in range(n)]

    for record in train(mode, chains, lambda obs: torch.full((len(obs),), 10.0), 5, 1, gamma=0.9):
        np.testing.assert_allclose(record["advantages"], np.zeros((5, 1)), atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_bootstraps_from_the_last_observation(train, mode):
    """150 would be the value before the last step, 0 that of the observation after the reset (PPO-03)."""

    def chains(n):
        return [ChainEnv(4, "truncated", lambda s: 0.0) for _ in range(n)]

    (record,) = train(mode, chains, lambda obs: 100 * obs[:, 0], 4, 1, gamma=0.5)
    assert record["returns"][3, 0] == 200


@pytest.mark.parametrize("mode", MODES)
def test_the_last_step_of_each_rollout_is_learned_from(train, mode):
    """PPO-05."""

    def chains(n):
        return [ChainEnv(5, "endless" if n == 2 else "terminated", lambda s: float(s % 5 == 4)) for _ in range(n)]

    records = train(mode, chains, lambda obs: torch.zeros(len(obs)), 5, 3, num_envs=2)
    for record in records:
        assert (record["advantages"][4] == 1).all()
        assert len(record["trained"]) == 10


# ---- Environments ----


def seeds(n, entropy=1):
    return np.random.SeedSequence(entropy).spawn(n)


def make_envs(mode, env_id, seeds):
    return ppo.Envs(env_id, seeds) if mode == "ppo" else ppo_vector.make_envs(env_id, mode, seeds)


@pytest.mark.parametrize("mode", ["ppo", "sync", "async", "envpool"])
def test_parallel_environments_differ_and_follow_their_seeds(mode, capsys):
    """ENV-01."""
    rows = []
    for entropy in (1, 1, 2):
        envs = make_envs(mode, "CartPole-v1", seeds(8, entropy))
        rows.append(begin(envs))
        envs.close()
    assert rows[0].shape == (8, 4) and rows[0].dtype == np.float32
    assert len(np.unique(rows[0], axis=0)) == 8
    np.testing.assert_array_equal(rows[0], rows[1])
    assert len(np.unique(np.concatenate([rows[0], rows[2]]), axis=0)) == 16, "two seeds share an environment"
    assert capsys.readouterr().err == ""


def test_identical_environments_are_told(capsys):
    """ENV-01."""
    vector("sync", [ChainEnv(), ChainEnv()]).reset()
    assert "all environments start from the same observation" in capsys.readouterr().err


@pytest.mark.parametrize("mode", MODES)
def test_contract_of_step(mode):
    envs = vector(mode, [ChainEnv(3, "terminated"), ChainEnv(2, "truncated")])
    obs = begin(envs)
    assert obs.tolist() == [[0], [0]] and obs.dtype == np.float32
    rows = [envs.step(np.zeros(2, np.int64)) for _ in range(6)]
    envs.close()
    columns = {name: np.array([row[k] for row in rows]).T for k, name in ((1, "reward"), (2, "term"), (3, "trunc"))}
    assert np.array([row[0][:, 0] for row in rows]).T.tolist() == [[1, 2, 0, 1, 2, 0], [1, 0, 1, 0, 1, 0]]
    assert columns["reward"].tolist() == [[1, 2, 4, 1, 2, 4], [1, 2, 1, 2, 1, 2]]
    assert columns["term"].tolist() == [[0, 0, 1, 0, 0, 1], [0] * 6]
    assert columns["trunc"].tolist() == [[0] * 6, [0, 1, 0, 1, 0, 1]]
    final = np.array([row[4]["final_obs"][:, 0] for row in rows]).T.tolist()
    assert final == [[1, 2, 3, 1, 2, 3], [1, 2, 1, 2, 1, 2]]


@pytest.mark.parametrize("mode", ["ppo", "sync", "async"])
def test_an_environment_that_reuses_its_array_and_rewards_in_arrays(mode):
    """Its last observation is not that of the reset, which went into the same array (USE-01, USE-07)."""
    envs = vector(mode, [OddRewards(), OddRewards()])
    begin(envs)
    rows = [envs.step(np.zeros(2, np.int64)) for _ in range(6)]
    envs.close()
    assert np.array([row[0][:, 0] for row in rows]).T.tolist() == [[1, 2, 0, 1, 2, 0]] * 2
    assert np.array([row[1] for row in rows]).T.tolist() == [[1, 2, 4, 1, 2, 4]] * 2
    assert np.array([row[4]["final_obs"][:, 0] for row in rows]).T.tolist() == [[1, 2, 3, 1, 2, 3]] * 2


class Recorder:
    """Keeps the last result of the environments' step. (A closure would be a reference cycle, and a later fork that
    collects an envpool crashes: its threads are not there.)"""

    def __init__(self, envs):
        self.envs, self.reset = envs, envs.reset

    def step(self, actions):
        self.result = self.envs.step(actions)
        return self.result


def test_envpool_has_no_dead_steps():
    """An episode restarts in the step that ends it, and info tells what it ended with."""
    envs, ends = ppo_vector.make_envs("CartPole-v1", "envpool", seeds(4)), 0
    envs.reset()
    envs.envs = Recorder(envs.envs)
    for _ in range(60):
        obs, reward, terminated, truncated, info = envs.step(np.ones(4, np.int64))
        last, *_, raw = envs.envs.result
        assert (raw["elapsed_step"] > 0).all() and (reward == 1).all()
        np.testing.assert_array_equal(info["final_obs"], last)
        ended = terminated | truncated
        assert (np.abs(obs[ended]) <= 0.05).all(), "CartPole starts within 0.05"
        assert (obs[~ended] == last[~ended]).all() and (np.abs(last[terminated, 2]) > 0.2).all()
        ends += ended.sum()
    assert ends > 10


def play(envs, steps, *sinks):
    """Feeds each sink (reward, ended) for some steps."""
    begin(envs)
    for _ in range(steps):
        _, reward, terminated, truncated, _ = envs.step(np.zeros(len(envs.obs), np.int64))
        for sink in sinks:
            sink(reward, terminated | truncated)
    envs.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_episode_statistics(mode, end):
    """Full return and length for all episodes, not only the first; nothing is carried over a time limit (ENV-03)."""
    stats = ppo_vector.EpisodeStats(2)
    envs = vector(mode, [ChainEnv(3, end, lambda s: 1.0), ChainEnv(10, end, lambda s: 1.0)])
    play(envs, 30, stats.step)
    for finished in (stats.finished, envs.finished) if mode == "ppo" else (stats.finished,):
        assert sorted(map(tuple, finished)) == [(3.0, 3)] * 10 + [(10.0, 10)] * 3
    pop = envs.pop_episodes if mode == "ppo" else stats.pop
    means = pop()
    assert means["charts/episodic_return"] == means["charts/episodic_length"] == pytest.approx(60 / 13)
    assert means["charts/episodes"] == 13
    again = pop()
    assert math.isnan(again["charts/episodic_return"]) and again["charts/episodes"] == 13


def test_episode_statistics_survive_saving():
    stats, other = ppo_vector.EpisodeStats(2), ppo_vector.EpisodeStats(2)
    steps = [(np.array([1.0, 2.0]), np.array([t == 2, t == 4])) for t in range(6)]
    for step in steps[:4]:
        stats.step(*step)
    other.load_state_dict(through_a_file(stats.state_dict()))
    for step in steps[4:]:
        stats.step(*step)
        other.step(*step)
    assert stats.finished == other.finished == [[3.0, 3], [10.0, 5]]
    assert stats.pop() == other.pop() and stats.returns.tolist() == other.returns.tolist() == [3, 2]


@pytest.mark.parametrize("mode", VECTOR_MODES)
@pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
def test_reward_scaler_restarts_with_each_episode_and_counts_real_steps(mode, end):
    """ENV-07, ENV-08."""
    scaler, firsts, running = ppo_vector.RewardScaler(2, 0.99), [], np.zeros(2, bool)

    def scale(reward, ended):
        seen = []
        update, scaler.update = scaler.update, lambda batch: (seen.extend(batch), update(batch))
        scaler(reward, ended)
        scaler.update = update
        firsts.extend(value for value, on in zip(seen, running) if not on)
        running[:] = ~ended

    play(vector(mode, [ChainEnv(4, end, lambda s: 1.0) for _ in range(2)]), 12, scale)
    assert firsts == [1.0] * 6, "begun within 12 steps: at 0, 4, 8"
    assert scaler.count - 1e-4 == pytest.approx(24)


def test_reward_scaler_oracle():
    rng, scaler = np.random.default_rng(0), ppo_vector.RewardScaler(3, 0.9)
    rewards, ended = rng.normal(2, 3, (50, 3)), rng.random((50, 3)) < 0.1
    running, seen = [0.0] * 3, []
    for t in range(50):
        for i in range(3):
            running[i] = 0.9 * running[i] + rewards[t, i]
            seen.append(running[i])
            running[i] = 0.0 if ended[t, i] else running[i]
        variance = (1e-4 + sum(x * x for x in seen)) / (1e-4 + len(seen)) - (sum(seen) / (1e-4 + len(seen))) ** 2
        expected = np.clip(rewards[t] / math.sqrt(variance + 1e-8), -10, 10)
        if t == 20:
            other = ppo_vector.RewardScaler(3, 0.9)
            other.load_state_dict(through_a_file(scaler.state_dict()))
            scaler = other
        np.testing.assert_allclose(scaler(rewards[t], ended[t]), expected, rtol=1e-9)
    scaler.var = np.float64(4.0)
    scaler.update = lambda batch: None
    assert scaler(np.array([1e9, -1e9, 0.0]), np.zeros(3, bool)).tolist() == [10, -10, 0]


def test_running_mean_std_oracle():
    """Mean and variance of all rows together, with a prior of weight 1e-4 at mean 0 and variance 1."""
    rng, running = np.random.default_rng(0), ppo_vector.RunningMeanStd(shape=(2,))
    batches = [rng.normal([5, -1000], [0.1, 3], (n, 2)) for n in (1, 7, 256, 2)]
    for batch in batches:
        running.update(batch)
    rows = np.concatenate(batches)
    mean = rows.sum(0) / (len(rows) + 1e-4)
    variance = (((rows - mean) ** 2).sum(0) + 1e-4 * (1 + mean**2)) / (len(rows) + 1e-4)
    np.testing.assert_allclose(running.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(running.var, variance, rtol=1e-9)
    assert running.count == pytest.approx(len(rows) + 1e-4, abs=1e-9)
    x = rows[:3].astype(np.float32)
    other = ppo_vector.RunningMeanStd(shape=(2,))
    other.load_state_dict(through_a_file(running.state_dict()))
    for one in (running, other):
        normal = one.normalize(x)
        assert normal.dtype == np.float32
        np.testing.assert_allclose(normal, (x - mean) / np.sqrt(variance + 1e-8), rtol=1e-4, atol=1e-4)
    assert running.normalize(np.array([[1e9, -1e9]])).tolist() == [[10, -10]]


class NaNChain(ChainEnv):
    """A chain of 3 whose observation of state `bad` is NaN."""

    def __init__(self, bad):
        super().__init__(3, "truncated")
        self.bad = bad

    def reset(self, **options):
        obs, info = super().reset(**options)
        return (obs * np.nan if self.bad == 0 else obs), info

    def step(self, action):
        obs, *rest = super().step(action)
        return (obs * np.nan if self.state == self.bad else obs), *rest


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [0, 1, 3], ids=["first", "middle", "last"])
def test_an_observation_that_is_not_finite_is_named(mode, bad):
    """The last one too, from which a truncated episode is bootstrapped (PPO-16)."""
    with pytest.raises(SystemExit, match=r"environment 1\b.*nan"), contextlib.ExitStack() as stack:
        envs = stack.enter_context(contextlib.closing(vector(mode, [ChainEnv(), NaNChain(bad)])))
        begin(envs)
        for _ in range(3):
            envs.step(np.zeros(2, np.int64))


@pytest.mark.parametrize("mode", MODES)
def test_actions_of_a_shifted_discrete_space(mode):
    """ENV-10."""
    envs = vector(mode, [ShiftedChain(), ShiftedChain(), ShiftedChain()])
    assert envs.action_space.n == 3
    begin(envs)
    envs.step(np.array([0, 1, 2]))  # the environments check that these become -1, 0, 1
    envs.close()


def test_continuous_actions_are_clipped_to_the_space():
    envs = ppo_vector.make_envs("Pendulum-v1", "sync", seeds(2))
    assert envs.continuous and envs.num_actions == 1
    envs.reset()
    envs.step(np.array([[5.0], [-5.0]], np.float32))
    assert [env.unwrapped.last_u for env in envs.envs.envs] == [2, -2]
    envs.close()


@pytest.mark.parametrize(
    "number,text", [(signal.SIGSTOP, "gave no answer for 1 s"), (signal.SIGKILL, "died with exit code -9")]
)
@pytest.mark.parametrize("when", ["idle", "waiting"])
def test_an_environment_process_that_does_not_answer_is_named(monkeypatch, number, text, when):
    monkeypatch.setattr(ppo_vector.WorkerPipe, "TIMEOUT_S", 1)
    envs = ppo_vector.make_envs("CartPole-v1", "async", seeds(3))
    envs.reset()
    process = envs.envs.processes[1]
    if when == "waiting":
        envs.envs.step_async(np.zeros(3, int))
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        process.join()
    with pytest.raises(SystemExit, match=f"environment 1 .process {process.pid}. {text}"):
        for _ in range(2):  # what it had sent before it died still counts
            envs.envs.step_wait() if when == "waiting" else envs.step(np.zeros(3, int))
            when = "idle"
    envs.close()
    assert not any(process.is_alive() for process in envs.envs.processes)


@pytest.mark.parametrize("mode", ["ppo", "sync"])
def test_other_action_spaces_are_refused(mode):
    class Multi(ChainEnv):
        action_space = gym.spaces.MultiDiscrete([2, 2]) if mode == "ppo" else gym.spaces.MultiBinary(2)

    kinds = "Discrete, ppo_vector.py also MultiDiscrete and Box" if mode == "ppo" else "Discrete, MultiDiscrete or Box"
    with pytest.raises(SystemExit, match=f"actions Multi.*this script takes {kinds}"):
        vector(mode, [Multi()])


def through_a_file(state):
    """The state as a resumed run sees it: packed, saved, and loaded by weights_only."""
    file = io.BytesIO()
    torch.save(ppo.pack(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("mode,env_id", [("ppo", "CartPole-v1"), ("sync", "CartPole-v1"), ("sync", "Hopper-v4")])
@pytest.mark.parametrize("steps", [0, 1, 37])
def test_unfinished_episodes_are_restored_to_the_bit(mode, env_id, steps):
    rng = np.random.default_rng(0)
    envs, other = (make_envs(mode, env_id, seeds(2, entropy)) for entropy in (1, 2))

    def act():
        if env_id == "CartPole-v1":
            return rng.integers(2, size=2)
        return rng.normal(0, 0.5, (2, envs.num_actions)).astype(np.float32)

    begin(envs)
    begin(other)
    for _ in range(steps):
        envs.step(act())
    other.load_state_dict(through_a_file(envs.state_dict()))
    np.testing.assert_array_equal(envs.obs, other.obs)
    episodes = 0
    for _ in range(200):
        actions = act()
        one, two = envs.step(actions.copy()), other.step(actions.copy())
        for a, b in zip(one[:4], two[:4]):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(one[4]["final_obs"], two[4]["final_obs"])
        episodes += (one[2] | one[3]).sum()
    assert episodes > 4, "the seeds of later episodes were not compared"


@pytest.mark.parametrize("mode", ["ppo", "sync"])
def test_a_time_limit_goes_on_after_restoring(mode):
    """The steps before count: MountainCar truncates at 200."""
    envs, other = (make_envs(mode, "MountainCar-v0", seeds(1, entropy)) for entropy in (1, 2))
    begin(envs)
    begin(other)
    for _ in range(150):
        envs.step(np.ones(1, np.int64))
    other.load_state_dict(through_a_file(envs.state_dict()))
    ends = [t for t in range(60) if other.step(np.ones(1, np.int64))[3][0]]
    assert ends == [49]


@pytest.mark.parametrize("mode", ["ppo", "sync"])
def test_a_snapshot_of_a_long_episode_copies_one_array(mode):
    """Not an object a step: every update takes one, and an episode can be longer than all updates (USE-08)."""
    envs = vector(mode, [ChainEnv(end="endless", reward=float), ChainEnv(2)])
    begin(envs)
    for steps in (1, 500, 1000):
        for _ in range(steps):
            envs.step(np.zeros(2, np.int64))
        packed = ppo.pack(envs.state_dict())
        tensors = [taken if isinstance(taken, list) else [taken] for taken in packed["actions"]]
        assert len(tensors[0]) == 1 and all(isinstance(tensor, torch.Tensor) for tensor in tensors[0])
    assert tensors[0][0].shape == (1501,)
    other = vector(mode, [ChainEnv(end="endless", reward=float), ChainEnv(2)])
    other.load_state_dict(through_a_file(packed))
    assert other.step(np.zeros(2, np.int64))[0].tolist() == [[1502], [0]]


# ---- Agent and loss ----


def test_pack():
    state = {"a": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": (np.float64(0.1), 2**70, None, "x", True),
             3: [torch.ones(2, requires_grad=True), {"rng": np.random.default_rng(5).bit_generator.state}],
             "empty": np.zeros((0, 4)), "bool": np.array([True, False]), "big": np.array([2**40])}  # fmt: skip
    packed = ppo.pack(state)
    state["a"][:] = 9  # a deep copy
    loaded = through_a_file(packed)
    assert loaded["a"].dtype == torch.uint8 and loaded["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert loaded["b"] == [0.1, 2**70, None, "x", True] and type(loaded["b"][0]) is float
    assert not loaded[3][0].requires_grad and loaded[3][0].tolist() == [1, 1]
    assert loaded["empty"].shape == (0, 4) and loaded["bool"].dtype == torch.bool and loaded["big"].item() == 2**40
    rng = np.random.default_rng()
    rng.bit_generator.state = loaded[3][1]["rng"]
    assert rng.random() == np.random.default_rng(5).random()


def test_random_streams_go_on_after_saving():
    one, other = ppo.Randomness(1, "cpu"), ppo.Randomness(2, "cpu")
    torch.rand(1)
    one.minibatches.random()
    other.load_state_dict(through_a_file(one.state_dict()))

    def draw(random):
        return torch.rand(3, generator=random.actions).tolist(), random.minibatches.random(3).tolist()

    assert draw(one) == draw(other) != draw(one)


@pytest.mark.parametrize("shape", [(64, 72, 3), (4, 84, 84)], ids=["channels last", "channels first"])
def test_images_stay_bytes_until_the_network_divides(shape):
    torch.manual_seed(0)
    agent = ppo_vector.Agent(shape, 5)
    image = torch.randint(256, (2, *shape), dtype=torch.uint8)
    logits, value = agent(image)
    assert logits.shape == (2, 5) and value.shape == (2,)
    planes = (image.permute(0, 3, 1, 2) if shape[-1] == 3 else image).numpy() / np.float32(255)
    torch.testing.assert_close(agent.value(torch.as_tensor(planes)).squeeze(-1), value)


@SCRIPTS
def test_discrete_policy(script):
    torch.manual_seed(0)
    agent, obs = script.Agent((4,), 3), torch.randn(1, 4).expand(20_000, 4)
    agent.policy[-1].bias.data = torch.tensor([0.0, 1.0, 2.0])
    action, logprob, value = agent.act(obs, torch.Generator().manual_seed(1))
    logits = agent(obs[:1])[0][0].detach().double().numpy()
    probs = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(logprob.numpy(), np.log(probs)[action.numpy()], rtol=1e-5)
    np.testing.assert_allclose(np.bincount(action) / len(action), probs, atol=0.015)
    assert (agent.act(obs[:5])[0] == 2).all(), "without a generator: the most likely action"
    assert value.shape == (20_000,)
    again = agent.act(obs, torch.Generator().manual_seed(1))[0]
    assert (again == action).all()


def test_continuous_policy():
    torch.manual_seed(0)
    agent, obs = ppo_vector.Agent((4,), 2, continuous=True), torch.randn(1, 4).expand(20_000, 4)
    agent.log_std.data = torch.tensor([-1.0, 0.5])
    action, logprob, _ = agent.act(obs, torch.Generator().manual_seed(1))
    mean, std = agent(obs[:1])[0][0].detach().double().numpy(), np.exp([-1.0, 0.5])
    z = (action.double().numpy() - mean) / std
    expected = (-0.5 * z**2 - np.log(std) - 0.5 * math.log(2 * math.pi)).sum(1)
    np.testing.assert_allclose(logprob.numpy(), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(z.mean(0), 0, atol=0.03)
    np.testing.assert_allclose(z.std(0), 1, atol=0.03)
    np.testing.assert_allclose(agent.act(obs[:1])[0][0].numpy(), mean, rtol=1e-5)
    entropy = agent.distribution(agent(obs[:1])[0]).entropy().item()
    assert entropy == pytest.approx((np.log(std) + 0.5 * math.log(2 * math.pi * math.e)).sum(), rel=1e-5)


def test_several_choices_at_once():
    """MultiDiscrete: log-probability and entropy are sums over independent choices, by a numpy oracle."""
    torch.manual_seed(0)
    sizes = [2, 3]
    agent, obs = ppo_vector.Agent((4,), sizes), torch.randn(1, 4).expand(20_000, 4)
    for parameter in agent.policy[-1].parameters():
        nn.init.normal_(parameter)
    action, logprob, value = agent.act(obs, torch.Generator().manual_seed(1))
    parts = np.split(agent(obs[:1])[0][0].detach().double().numpy(), [2])
    probs = [np.exp(part) / np.exp(part).sum() for part in parts]
    assert action.shape == (20_000, 2) and value.shape == (20_000,)
    expected = sum(np.log(p)[column] for p, column in zip(probs, action.numpy().T))
    np.testing.assert_allclose(logprob.numpy(), expected, rtol=1e-4, atol=1e-5)
    for p, column in zip(probs, action.numpy().T):
        np.testing.assert_allclose(np.bincount(column, minlength=len(p)) / len(column), p, atol=0.015)
    assert agent.act(obs[:1])[0][0].tolist() == [p.argmax() for p in probs]
    entropy = agent.distribution(agent(obs[:1])[0]).entropy().item()
    assert entropy == pytest.approx(-sum((p * np.log(p)).sum() for p in probs), rel=1e-5)


def test_a_picture_among_other_observations():
    """The picture of a Dict comes first, scaled to [0, 1]; its features and the other numbers meet in one layer."""
    env = ppo_vector.make_env("probe_envs:ManyActions-v0")
    obs, _ = env.reset(seed=3)
    grey, number, choice = env.unwrapped.answer
    picture, others = np.split(obs, [1296])
    assert (picture == np.float32(200 * grey / 255)).all() and others[3:] == [2 * number - 1]
    assert others[:3].tolist() == np.eye(3)[choice].tolist() and obs.dtype == np.float32
    with closing(ppo_vector.make_envs("probe_envs:ManyActions-v0", "async", SeedSequence(1).spawn(2))) as envs:
        assert (envs.obs_shape, envs.image_shape, envs.num_actions) == ((1300,), (36, 36, 1), [2, 2, 3])
        rows = torch.as_tensor(envs.reset())
        final = envs.step(np.zeros((2, 3), int))[4]["final_obs"]
        assert final.shape == (2, 1300)
    agent = ppo_vector.Agent(envs.obs_shape, envs.num_actions, False, envs.image_shape)
    joint, *rest = agent.value
    image = rows[:, :1296].reshape(2, 36, 36, 1).permute(0, 3, 1, 2)
    expected = nn.Sequential(*rest)(torch.cat([joint.convs(image), rows[:, 1296:]], 1)).squeeze(1)
    torch.testing.assert_close(agent(rows)[1], expected)


def test_minigrids_mission_is_read_word_by_word():
    env = ppo_vector.make_env("minigrid:MiniGrid-Fetch-5x5-N2-v0")
    first, _ = env.reset(seed=0)
    others = [env.reset(seed=seed)[0] for seed in range(1, 9)]
    assert first.shape == env.observation_space.shape == (147 + 4 + 50 * 52,) and env.unwrapped.mission
    assert len({obs[151:].tobytes() for obs in [first, *others]}) > 3, "missions differ, and so do their words"


def loss_oracle(logprob, entropy, value, old_logprob, old_value, advantage, returns, eps, clip_vloss, ent, vf):
    """The loss sample by sample, in plain numbers."""
    policy, errors, kl, clipped = [], [], [], []
    for lp, v, olp, ov, a, r in zip(logprob, value, old_logprob, old_value, advantage, returns):
        ratio = math.exp(lp - olp)
        policy.append(-min(a * ratio, a * min(max(ratio, 1 - eps), 1 + eps)))
        error = (v - r) ** 2
        if clip_vloss:
            error = max(error, (ov + min(max(v - ov, -eps), eps) - r) ** 2)
        errors.append(error)
        kl.append(ratio - 1 - (lp - olp))
        clipped.append(abs(ratio - 1) > eps)
    parts = {"policy_loss": np.mean(policy), "value_loss": 0.5 * np.mean(errors), "entropy": np.mean(entropy),
             "approx_kl": np.mean(kl), "clipfrac": np.mean(clipped)}  # fmt: skip
    return parts["policy_loss"] - ent * parts["entropy"] + vf * parts["value_loss"], parts


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_ppo_loss_and_its_gradients(clip_vloss):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(0, scale, 64) for scale in (0.4, 1, 1, 0.4, 1, 1, 1)]
    coefs = 0.2, clip_vloss, 0.01, 0.5
    expected, parts = loss_oracle(*arrays, *coefs)
    assert 0.1 < parts["clipfrac"] < 0.9, "the cases are one-sided"
    tensors = [torch.tensor(array, requires_grad=True) for array in arrays]
    loss, found = ppo.ppo_loss(*tensors, *coefs)
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert {name: value.item() for name, value in found.items()} == pytest.approx(parts, rel=1e-6)
    loss.backward()
    for k in (0, 1, 2):  # logprob, entropy, value
        for i in range(64):
            shifted = [
                [a + h * (np.arange(64) == i) if j == k else a for j, a in enumerate(arrays)] for h in (1e-6, -1e-6)
            ]
            slope = (loss_oracle(*shifted[0], *coefs)[0] - loss_oracle(*shifted[1], *coefs)[0]) / 2e-6
            assert tensors[k].grad[i].item() == pytest.approx(slope, abs=1e-8), (k, i)


def test_a_ratio_beyond_float32_has_the_gradient_of_a_clipped_one():
    logprob, zeros = torch.tensor([200.0, 0.0], requires_grad=True), torch.zeros(2)
    loss, _ = ppo.ppo_loss(logprob, zeros, zeros, zeros, zeros, torch.ones(2), zeros, 0.2, False, 0.0, 0.5)
    loss.backward()
    assert loss.item() == pytest.approx(-1.1) and logprob.grad.tolist() == [0.0, -0.5]


def test_explained_variance():
    """PPO-10."""
    rng = np.random.default_rng(0)
    returns = rng.normal(size=100)
    assert ppo.explained_variance(returns, returns) == 1
    assert ppo.explained_variance(np.zeros(100), returns) == 0
    assert ppo.explained_variance(returns + rng.normal(0, 0.5, 100), returns) == pytest.approx(0.75, abs=0.1)
    assert math.isnan(ppo.explained_variance(returns, np.full(100, 7.0)))
    with np.errstate(invalid="ignore"):
        assert math.isnan(ppo.explained_variance(returns, np.where(returns > 1, np.inf, returns)))


@pytest.mark.parametrize("mode", ["ppo", "sync"])
def test_nothing_to_learn_leaves_the_weights_finite(mode, train, tmp_path):
    """Every reward and value is 0, so all advantages and their deviation are (PPO-09)."""
    options = {"num_envs": 2, "num_minibatches": 2, "norm_adv": True} | (
        {"norm_reward": True} if mode == "sync" else {}
    )
    train(mode, lambda n: [ChainEnv(3, "terminated", lambda s: 0.0) for _ in range(n)],
          lambda obs: torch.zeros(len(obs)), 6, 2, **options)  # fmt: skip
    (path,) = (tmp_path / "runs").rglob("*.pt")
    state = torch.load(path, weights_only=True)
    assert all(torch.isfinite(weights).all() for weights in state["agent"].values())
    (metrics,) = (tmp_path / "runs").rglob("metrics.jsonl")
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        assert row["losses/explained_variance"] is None and math.isfinite(row["losses/policy_loss"])


# ---- Evaluation ----


def evaluate(script, agent, obs_norm, args):
    return script.evaluate(agent, args) if script is ppo else script.evaluate(agent, obs_norm, args)


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_counts_the_first_episode_of_each_environment(monkeypatch, mode, tmp_path):
    def chains(env_id, *options):
        seeds = options[0] if mode == "ppo" else options[1]
        return vector(mode, [ChainEnv(2 + i, "truncated") for i in range(len(seeds))])

    script = script_of(mode)
    monkeypatch.setattr(script, "Envs" if script is ppo else "make_envs", chains)
    args = script.Args(eval_episodes=3, run_dir=tmp_path)
    rows = evaluate(script, script.Agent((1,), 2), None, args)
    assert rows == [{"split": "eval", "return": r, "length": n} for r, n in ((3, 2), (7, 3), (15, 4))]
    with script.RunLogger(args) as run:
        assert run.log_eval(7, rows) == pytest.approx(
            {"eval/return_mean": 25 / 3, "eval/return_std": np.std([3, 7, 15]), "eval/length_mean": 3}
        )


@pytest.mark.parametrize("mode", ["ppo", "sync", "envpool"])
def test_evaluation_depends_on_its_seed_alone_and_touches_nothing(mode):
    """ENV-09."""
    script, norm = script_of(mode), ppo_vector.RunningMeanStd(shape=(4,))
    agent = script.Agent((4,), 2)
    norm.update(np.random.default_rng(0).normal(size=(50, 4)))
    before, states = json.dumps(norm.state_dict(), default=np.ndarray.tolist), torch.get_rng_state()

    def rows(eval_seed, **args):
        args |= {} if script is ppo else {"vectorization": mode}
        return evaluate(
            script, agent, norm, script.Args(eval_episodes=5, eval_greedy=False, eval_seed=eval_seed, **args)
        )

    first = rows(1)
    np.random.seed(5)
    torch.rand(1)
    states_later = torch.get_rng_state()
    assert rows(1, seed=7, num_envs=2) == first != rows(2)
    assert torch.equal(torch.get_rng_state(), states_later) and not torch.equal(states_later, states)
    assert json.dumps(norm.state_dict(), default=np.ndarray.tolist) == before


@SCRIPTS
def test_an_evaluation_without_a_time_limit_ends_and_says_so(script, capsys):
    """A greedy policy walks against the edge of CliffWalking for ever; `check` is asked all the way (USE-02)."""
    args, agent, asked = script.Args(env_id="CliffWalking-v1", eval_episodes=3, eval_max_steps=50), None, []
    agent = script.Agent((48,), 4)
    agent.policy[-1].bias.data[0] = 99  # up, where the wall is
    options = {"check": lambda: asked.append(1)}
    rows = script.evaluate(agent, args, **options) if script is ppo else script.evaluate(agent, None, args, **options)
    assert [row["length"] for row in rows] == [50] * 3 and len(asked) == 50
    assert "3 evaluation episodes were cut off at --eval-max-steps" in capsys.readouterr().err
