"""Public fault reports as probes: which test asserts each, which features the scripts do not claim, and the probes that
have no other home."""

import ast
import contextlib
import multiprocessing
import re
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import test_appo_pfsp
import test_dqn_taper
import test_impala
import test_impala_envs
import test_level_envs
import torch
from probe_envs import ChainEnv, OddRewards
from test_ppo import VECTOR_MODES, begin, train, vector  # noqa: F401
from test_ppo_plr import FakeRun
from test_runs import Run, assert_same, parse, refusal, restored_signals  # noqa: F401
from test_runs import train as run_script

from algos import dqn_taper_crafter as crafter
from algos import impala_popart as impala
from algos import ppo, ppo_plr, ppo_plr_minigrid, ppo_vector
from curricula import PrioritizedLevelReplay
from curricula.taper import TaskPrioritizedReplay

TESTS = Path(__file__).parent

PROBES = {
    "PPO": "1 3 5 6 7 9 10 11 12 13 15 16 17", "SYN": "2 4 5 7 8 9 11 12 13 14 15 16", "SP": "2 4 5 6 7 8 9 10",
    "CUR": "1 3 4 7 8 9 10 11 12 13 14", "RPL": "2 3 4 5 6 8 9 10 11 12 13 14",
    "BEN": "1 2 4 5 6 8 9 10 11 12 13 14 15", "CLI": "1 2 4 5 6 7 8 9 10 11 12 13",
    "CKP": "2 3 4 5 6 7 8 9 10 11 13", "ENV": "1 3 4 5 6 7 8 9 10 11 12 13", "USE": "1 2 3 4 5 6 7 8 9 10",
    "EVO": "1 3 4 5 8 9 10 11 12 13 14",
}  # fmt: skip
NOT_CLAIMED = {
    "RPL-06": "the replay makes one-step targets: there is no n-step return",
    "CLI-01": "not five folders: one command is one folder, which its first copy locks "
              "(test_five_copies_at_once_are_one_run)",
    "CLI-11": "no artifact is uploaded: checkpoints lie in the run's folder, under names without / and :",
}  # fmt: skip


def test_every_probe_has_a_test_or_a_reason():
    known = {f"{area}-{int(number):02d}" for area, numbers in PROBES.items() for number in numbers.split()}
    found = {}
    for path in TESTS.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                text = " ".join([ast.get_docstring(node) or "", *map(ast.unparse, node.decorator_list)])
                for name in re.findall(rf"\b(?:{'|'.join(PROBES)})-\d+", text):
                    found.setdefault(name, []).append(f"{path.name}:{node.name}")
    assert not found.keys() - known, "no such probe"
    assert not found.keys() & NOT_CLAIMED.keys(), "both covered and not claimed"
    assert found.keys() | NOT_CLAIMED.keys() == known, sorted(known - found.keys() - NOT_CLAIMED.keys())


# ---- PPO and V-trace ----


def test_the_learning_rate_falls_and_a_resume_past_the_end_changes_nothing(tmp_path):
    """PPO-12: two updates of 512 steps."""
    arguments = ppo, tmp_path, "--anneal-lr --total-timesteps 1000 --num-envs 4 --num-steps 128"
    run = run_script(*arguments)
    before = run.repeatable(), run.state()
    assert [row["charts/learning_rate"] for row in run.rows()] == [1e-3, 5e-4]
    (run.dir / "result.json").unlink()
    run_script(*arguments)
    assert run.repeatable() == before[0] and run.json("result.json")["global_step"] == 1024
    assert_same(run.state(), before[1])
    assert run.state()["optimizer"]["param_groups"][0]["lr"] == 5e-4


@pytest.mark.parametrize("train_tiny,flags", [
    (test_impala.train, "--env-id probe_envs:Recall-v0 --envs-per-actor 1 --batch-rollouts 1"),
    (test_impala.train, "--env-id probe_envs:Recall-v0 --envs-per-actor 1 --batch-rollouts 1 --num-actors 0"),
    (test_appo_pfsp.train, "--envs-per-actor 1 --batch-rollouts 1 --num-minibatches 1 --num-actors 0"),
])  # fmt: skip
def test_one_environment(train_tiny, flags, tmp_path):
    """PPO-15: two updates. Those of the other scripts: test_runs.py and test_dqn_taper.py."""
    run = train_tiny(tmp_path, flags, "--num-steps 8 --total-timesteps 16")
    assert [row["global_step"] for row in run.rows()] == [8, 16]
    assert all(torch.isfinite(weights).all() for weights in run.state()["agent"].values())


def test_rewards_are_clipped_for_the_learner_and_raw_in_the_log(tmp_path, monkeypatch):
    """ENV-05, with negative ones, too."""
    seen, loss = [], impala.impala_loss
    monkeypatch.setattr(impala, "impala_loss", lambda *args: (seen.extend(args[8].flatten().tolist()), loss(*args))[1])
    gym.register("Fives-v0", ChainEnv, kwargs={"reward": lambda s: 5.0 if s < 2 else -3.0})
    run = test_impala.train(tmp_path, "--env-id Fives-v0 --num-actors 0 --reward-clip unit --total-timesteps 120")
    assert set(seen) == {1.0, -1.0} and len(seen) == 120
    assert all(row["charts/episodic_return"] == 7 for row in run.rows())
    assert run.json("result.json")["eval/return_mean"] == 7


# ---- Workers and queues ----


def test_a_batch_of_no_rows_is_refused_or_nothing():
    """SYN-16: no division by zero and no endless loop, and what is there stays as it was."""
    curriculum, none, ends = PrioritizedLevelReplay(5), np.zeros((0, 2)), np.zeros((1, 2))
    with pytest.raises(ValueError, match=r"tasks is int64 of shape \(0, 2\): must be \(T, N\)"):
        curriculum.update_from_rollout(none.astype(int), none, ends, None, ends, 0.9, 0.9)
    curriculum.update_on_step_batch([])
    assert curriculum.unseen.all() and curriculum.sample(0) == []
    replay = TaskPrioritizedReplay(20, 2, 3, (2,), np.int64, 4, np.random.default_rng(0))
    obs, action, rewards, flags = np.zeros((0, 2), int), np.zeros(0, int), np.zeros((0, 3)), np.zeros(0, bool)
    replay.add(action, obs, action, rewards, obs, rewards, rewards, flags, flags)
    assert len(replay) == replay.total == 0
    with pytest.raises(ValueError, match="batch_size 0: it must lie between 1"):
        replay.sample(0)


@contextlib.contextmanager
def forked(target, *arguments):
    """Processes that call target(connection, *one of arguments): their ends of pipes, yielded when all have started."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe() for _ in arguments]
    processes = [context.Process(target=target, args=(pipe, *one)) for (_, pipe), one in zip(pipes, arguments)]
    for process in processes:
        process.start()
    try:
        yield [pipe for pipe, _ in pipes]
    finally:
        for process in processes:
            process.join(60)
            process.kill()


def copy_of_a_run(pipe, barrier, folder):
    torch.set_num_threads(1)
    barrier.wait()
    try:
        run_script(ppo, folder, "--env-id probe_envs:SlowCartPole-v0")
        pipe.send("done")
    except SystemExit as error:
        pipe.send(error.code)


def test_five_copies_at_once_are_one_run(tmp_path, monkeypatch):
    """One trains, the others name it and leave its files alone."""
    monkeypatch.setenv("PROBE_STEP_S", "0.01")
    barrier = multiprocessing.get_context("fork").Barrier(5)
    with forked(copy_of_a_run, *[(barrier, tmp_path)] * 5) as pipes:
        told = [pipe.recv() for pipe in pipes]
    told.remove("done")
    assert all("is in use by" in line and "--run-dir" in line for line in told), told
    run, alone = Run(tmp_path), run_script(ppo, tmp_path / "alone", "--env-id probe_envs:SlowCartPole-v0")
    assert run.repeatable() == alone.repeatable() and len(run.rows()) == 4
    assert_same(run.state(), alone.state())


# ---- Curricula ----


def test_the_risk_that_levels_look_alike_is_told():
    """CUR-13: seeds are disjoint, frames may not be, in three games."""
    lines = (TESTS.parent / "algos/README.md").read_text().splitlines()
    (line,) = [line for line in lines if "procgen/issues/100" in line]
    assert all(name in line for name in ("coinrun", "maze", "ninja", "outside the training range"))


@pytest.mark.parametrize("game,limit", [("coinrun", 1000), ("maze", 500)])
def test_a_time_out_of_procgen_terminates(game, limit):
    """ENV-12: as documented, since the last frame is never shown: nothing is bootstrapped from that of a reset. CUR-04:
    the level's next episode starts from its first frame and has all its time again."""
    slots = ppo_plr.ProcgenLevels(game, 1)
    slots.set_level(0, 3)
    first = slots.obs[0].copy()
    for _ in range(2):
        for t in range(1, limit + 1):
            _, _, terminated, truncated = slots.step(np.array([4]))
            assert (terminated[0], truncated[0]) == (t == limit, False)
        slots.set_level(0, 3)
        np.testing.assert_array_equal(slots.obs[0], first)
    slots.close()


# ---- Measures ----


@pytest.mark.parametrize("mode", ["ppo", "sync"])
def test_the_logged_return_is_the_mean_of_all_environments(mode):
    """BEN-08: environment i always returns i."""
    envs = vector(mode, [ChainEnv(1, reward=lambda s, i=i: float(i)) for i in range(8)])
    stats = ppo_vector.EpisodeStats(8)
    begin(envs)
    for _ in range(3):
        _, reward, terminated, truncated, _ = envs.step(np.zeros(8, np.int64))
        stats.step(reward, terminated | truncated)
    means = envs.pop_episodes() if mode == "ppo" else stats.pop()
    assert (means["charts/episodic_return"], means["charts/episodes"]) == (3.5, 24)


def test_evaluations_are_greedy_whatever_the_exploration(monkeypatch):
    """BEN-12: the help says of dqn_taper's "greedy policy"; epsilon is 1 here."""
    played, step = [], crafter.Envs.step
    noted = lambda self, actions: (played.extend(actions), step(self, actions))[1]  # noqa: E731
    monkeypatch.setattr(crafter.Envs, "step", noted)
    options = {"behaviour": "eps-greedy", "start_e": 1.0, "end_e": 1.0, "eval_episodes": 20, "episode_length": 4}
    args = crafter.Args(env_id="probe_tasks:Tasks-v0", **options)
    agent = mock.Mock(shape=(2, 2), act=lambda obs, tasks: np.ones(len(obs), int))
    crafter.evaluate(agent, args)
    assert set(played) <= {1, -1} and played.count(1) == 20 * (2 + 3)
    (line,) = [line for line in Path(crafter.__file__).read_text().splitlines() if "eval_episodes:" in line]
    assert "greedy policy" in line


@pytest.mark.parametrize("game,counter", [("Breakout-v5", 90), ("Pong-v5", 8), ("Freeway-v5", 1)])
def test_a_step_of_atari_is_four_frames(game, counter):
    """ENV-13: by the game's own counter of frames in its memory, of the emulator behind the script's environments; also
    in Freeway, which knows no FIRE."""
    with closing(test_impala_envs.make(game, 1, module=test_impala_envs.atari)) as envs:
        ((_, pool),) = envs.groups
        memory = [int(pool.step(np.array([0]))[4]["ram"][0, counter]) for _ in range(30)]
    assert set(np.diff(memory) % 256) == {4}


def test_a_step_of_gymnasiums_atari_is_four_frames():
    """ENV-13, with ppo_vector.py: nothing skips once more."""
    with closing(ppo_vector.make_env("ale_py:ALE/Breakout-v5")) as env:
        env.reset(seed=1)
        before = env.unwrapped.ale.getEpisodeFrameNumber()
        env.step(0)
        assert env.unwrapped.ale.getEpisodeFrameNumber() - before == 4


# ---- Checkpoints ----


def test_settings_do_not_drift_over_reloads(tmp_path):
    """CKP-10: stopped three times with 4 environments; the same settings, target updates and gradient steps."""
    flags = "--num-envs 4 --target-network-frequency 300 --checkpoint-interval 1 --keep-checkpoints 9"
    configs, syncs, lerp = [], [], torch.Tensor.lerp_
    with mock.patch.object(torch.Tensor, "lerp_", lambda *args: (syncs.append(args[2] == 1), lerp(*args))[1]):
        straight = run_script(test_dqn_taper.dqn, tmp_path / "straight", flags)
        once = sum(syncs)
        for stop in (200, 400, 600, None):
            run = run_script(test_dqn_taper.dqn, tmp_path / "stopped", flags)
            configs.append(run.json("config.json")["args"] | {"run_dir": ""})
            if stop:
                (run.dir / "result.json").unlink()
                for path in run.checkpoints():
                    if int(path.stem) > stop:
                        path.unlink()
    assert configs[1:] == [configs[0]] * 3 and configs[0]["target_network_frequency"] == 300 and once
    assert run.repeatable() == straight.repeatable()
    test_dqn_taper.assert_same(run.state(), straight.state())


# ---- Environments that do what packages do ----


class OneArray(OddRewards):
    """A chain of 4 that pays nothing, cut off at its end; its observations are in one array."""

    def __init__(self):
        super().__init__()
        self.length, self.reward = 4, lambda s: 0.0

    def step(self, action):
        obs, reward, *rest = super().step(action)
        return obs, float(reward[0]), *rest


@pytest.mark.parametrize("mode", ["ppo", *VECTOR_MODES])
def test_the_bootstrap_is_the_value_of_what_the_array_held(mode, train):  # noqa: F811
    """USE-01: 100 V(4) / 2, though the reset has overwritten it."""
    (record,) = train(mode, lambda n: [OneArray() for _ in range(n)], lambda obs: 100 * obs[:, 0], 4, 1, gamma=0.5)
    assert record["returns"][3, 0] == 200


def test_the_last_observation_of_impala_is_what_the_array_held():
    """USE-01, and rewards of shape (1,) (USE-07)."""
    with closing(test_impala_envs.make("probe_envs:OddRewards-v0", 2)) as envs:
        found = test_impala_envs.roll(envs, [0] * 6)
    assert found["final_obs"][:, 0, 0].tolist() == [1, 2, 3] * 2 and found["obs"][:, 1, 0].tolist() == [1, 2, 0] * 2
    assert found["reward"][:, 0].tolist() == [1, 2, 4] * 2


def test_an_evaluation_of_impala_without_an_end_ends_and_says_so(capsys):
    """USE-02; `check`, which answers signals, is asked at each step."""
    args = test_impala.parse("--env-id probe_envs:Endless-v0 --eval-episodes 3 --eval-max-steps 30 --lstm-size 0")
    policy, asked = impala.Policy(impala.shared_space(args.games)[0], "mlp", 0), []
    rows = impala.evaluate(policy, args, lambda: asked.append(1))
    assert [row["length"] for row in rows] == [30] * 3 and len(asked) == 30
    assert "3 episodes of probe_envs:Endless-v0 were cut off at --eval-max-steps" in capsys.readouterr().err


def test_an_evaluation_of_levels_ends_at_its_limit_and_says_so(capsys):
    """USE-02; of the game of Procgen that waits for 1000 steps, and the check for signals at each."""
    args = ppo_plr.Args(env_id="coinrun", network="nature", eval_max_steps=20, num_minibatches=8)
    agent, asked = ppo_plr.Agent((64, 64, 3), 15, "nature"), []
    with torch.no_grad():
        agent.policy.bias[4] += 50  # does nothing
    make_levels = partial(ppo_plr.ProcgenLevels, "coinrun")
    run = FakeRun()
    run.check_signals = lambda: asked.append(1)
    ppo_plr.evaluate(run, 7, agent, args, make_levels, 2)
    assert [row["length"] for row in run.rows] == [20] * 4 and len(asked) == 2 * 20
    assert capsys.readouterr().err.count("was cut off at --eval-max-steps") == 4


@pytest.mark.parametrize("script", [ppo_plr, ppo_plr_minigrid, crafter], ids=lambda script: script.__name__)
def test_a_reset_that_raises_names_environment_and_task_or_seed(script):
    """USE-06, in the process of the run; in others: test_runs.py and test_level_envs.py."""
    if script is crafter:
        envs = crafter.Envs("probe_envs:HardReset-raise-v0", [0, 1], 4)
        with pytest.raises(RuntimeError, match=r"environment 0, step 0 of the episode with seed \d+: ValueError: boom"):
            envs.reset()
            for _ in range(4):
                envs.step(np.zeros(2, int))
        return
    env_id, bad = ("bigfish", 2**31) if script is ppo_plr else (test_level_envs.MINIGRID, -500)
    run = test_level_envs.Run("LevelEnvs", env_id, tasks=[0, 1, 2, bad])
    with closing(run), pytest.raises(RuntimeError, match=f"environment 3, task {bad}: "):
        run.reset()


@pytest.mark.parametrize("script,size,flags,fault", [
    (ppo, "Small", "", None), (ppo, "Float", "", None), (ppo_vector, "Small", "", "images of 36 x 36 or more"),
    (ppo_vector, "Float", "", None), (crafter, "Small", "--torch-threads 1", None), (crafter, "Float", "", None),
])  # fmt: skip
def test_pictures_are_learned_from_or_refused(script, size, flags, fault, tmp_path):
    """USE-07: 7 x 7 x 3 bytes, 40 x 40 x 3 floats."""
    arguments = script, tmp_path, f"--env-id probe_envs:{size}Picture-v0", flags
    if fault:
        assert fault in refusal(*arguments)
    else:
        run = run_script(*arguments)
        assert run.rows() and all(torch.isfinite(weights).all() for weights in run.state()["agent"].values())


@pytest.mark.parametrize("size", ["Small", "Float"])
def test_impala_learns_from_pictures(size, tmp_path):
    """USE-07."""
    run = test_impala.train(tmp_path, f"--env-id probe_envs:{size}Picture-v0 --num-actors 0 --total-timesteps 80")
    assert run.json("result.json")["eval/return_mean"] == 7 and len(run.rows()) == 2
