"""The environments of algos/ppo_plr.py and ppo_plr_minigrid.py: levels by choice, the queue, worker processes."""

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from algos import ppo_plr, ppo_plr_minigrid

MINIGRID = "MiniGrid-Dynamic-Obstacles-5x5-v0"  # ends in crashes, successes and time-outs (100 steps)


def of(env_id):
    return ppo_plr_minigrid if env_id.startswith("MiniGrid") else ppo_plr


def makers(env_id, mode="easy"):
    """What makes environments, given their number; the shapes of what they show."""
    if env_id.startswith("MiniGrid"):
        obs_shape = ppo_plr_minigrid.env_spec(env_id)[0]
        return partial(ppo_plr_minigrid.MiniGridLevels, env_id), {"obs": obs_shape, "final_obs": obs_shape}
    return partial(ppo_plr.ProcgenLevels, env_id, distribution_mode=mode), {"obs": ppo_plr.ProcgenLevels.OBS_SHAPE}


class Run:
    """Environments with a queue whose tasks, chosen at random from 0..num_tasks-1, are topped up after each step."""

    def __init__(self, kind, env_id, num_envs=4, num_tasks=6, start_level=100, mode="easy", tasks=None, waiting=None,
                 **options):  # fmt: skip
        script = of(env_id)
        self.queue = script.SyncQueue(num_envs, timeout=100)
        self.rng, self.num_tasks = np.random.default_rng(0), num_tasks
        self.num_envs, self.sent, self.records = num_envs, [[] for _ in range(num_envs)], []
        if waiting is not None:
            self.queue.load_state_dict(waiting)
        self.fill(tasks)
        make, frames = makers(env_id, mode)
        self.envs = getattr(script, kind)(make, frames, self.queue, range(num_envs), start_level, **options)

    def reset(self):
        self.envs.run("start")
        return self.envs.records["obs"].copy()

    def fill(self, tasks=None):
        for env_id in range(self.num_envs):
            while self.queue.state_dict()["waiting"][env_id] < 2:
                self.sent[env_id].append(int(self.rng.integers(self.num_tasks)) if tasks is None else tasks[env_id])
                self.queue.put_task(env_id, (self.sent[env_id][-1], 0))

    def step(self, actions):
        outputs = self.envs.step(actions)
        self.records += [(i, int(task[0]), *rest) for i, task, *rest in self.queue.drain().tolist()]
        self.fill()
        return outputs

    def close(self):
        self.envs.close()


@pytest.fixture
def start():
    runs = []

    def make(*args, **kwargs):
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def procgen(num, game, level, mode, seed):
    from procgen.env import ProcgenGym3Env

    options = dict(distribution_mode=mode, start_level=level, num_levels=1, rand_seed=seed, num_threads=0)
    return ProcgenGym3Env(num=num, env_name=game, **options)


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# ---- the two families ----


@pytest.mark.parametrize("game,mode", [("bigfish", "easy"), ("dodgeball", "easy"), ("maze", "hard"), ("chaser", "hard"),
                                       ("jumper", "easy"), ("starpilot", "hard")])  # fmt: skip
def test_each_procgen_episode_is_the_first_of_a_fresh_game(game, mode):
    """Frames, rewards, ends and success of 4 slots that switch levels at random, also across the whole seed range
    (CUR-04)."""
    rng, slots = np.random.default_rng(3), ppo_plr.ProcgenLevels(game, 4, mode, cached_levels=3)
    level = [7, 7, 2**31 - 2, 123456789]
    for i in range(4):
        slots.set_level(i, level[i])
    fresh = [procgen(1, game, level[i], mode, seed=i) for i in range(4)]
    episodes = 0
    for _ in range(300):
        for i in range(4):
            assert np.array_equal(slots.obs[i], fresh[i].observe()[1]["rgb"][0])
        actions = rng.integers(15, size=4)
        _, reward, terminated, truncated = slots.step(actions)
        assert not truncated.any() and reward.dtype == np.float32
        for i in range(4):
            fresh[i].act(actions[i : i + 1])
            expected_reward, _, first = fresh[i].observe()
            assert (reward[i], terminated[i]) == (expected_reward[0], first[0])
            if terminated[i]:
                assert slots.solved[i] == fresh[i].get_info()[0]["prev_level_complete"]
                fresh[i].close()
                level[i] = int(rng.choice([level[i], 7, 8, 9, 10, rng.integers(2**31 - 1)]))
                slots.set_level(i, level[i])
                fresh[i], episodes = procgen(1, game, level[i], mode, seed=episodes), episodes + 1
    assert episodes >= 2
    assert slots.first_state.cache_info().currsize <= 3
    for env in [*fresh, slots]:
        env.close()


def test_five_tasks_then_one_twice():
    """CUR-07."""
    slots = ppo_plr.ProcgenLevels("coinrun", 1)
    frames = []
    for level in (0, 1, 2, 3, 4, 3, 3):
        slots.set_level(0, level)
        frames.append(slots.obs[0].tobytes())
        slots.step(np.array([7]))
    assert len(set(frames[:5])) == 5 and frames[3] == frames[5] == frames[6]
    slots.close()


def test_reward_and_end_survive_the_next_level():
    """leaper pays 10 at its goal, in the very step that ends the episode."""
    slots, paid = ppo_plr.ProcgenLevels("leaper", 8), 0
    for i in range(8):
        slots.set_level(i, i)
    for _ in range(400):
        _, reward, terminated, _ = slots.step(np.full(8, 5))
        before = reward.copy(), terminated.copy(), slots.solved.copy()
        for i in np.flatnonzero(terminated):
            assert slots.solved[i] == (reward[i] > 0)
            slots.set_level(i, i + 8)
        assert same(before[:2], (reward, terminated))
        paid += reward.sum()
    assert paid >= 10
    slots.close()


@pytest.mark.parametrize("game", ["bossfight", MINIGRID])
def test_slots_go_on_from_their_state(game):
    rng, make = np.random.default_rng(0), makers(game)[0]
    slots = make(3)
    for i in range(3):
        slots.set_level(i, i)

    def play(slots, rng, steps):
        for _ in range(steps):
            obs, *flags = slots.step(rng.integers(3, size=3))
            for i in np.flatnonzero(flags[1] | flags[2]):
                slots.set_level(i, rng.integers(20))
            yield obs.copy(), *flags

    assert any(flags.any() for _, _, *both in play(slots, rng, 57) for flags in both)
    state, rng_state, frame = slots.get_state(), rng.bit_generator.state, slots.obs.copy()
    assert all(s.dtype == np.uint8 and s.ndim == 1 for s in state)
    expected = list(play(slots, rng, 200))
    other, rng.bit_generator.state = make(3), rng_state
    other.set_state(state)
    assert np.array_equal(other.obs, frame) and same(other.get_state(), state)
    assert all(same(x, y) for x, y in zip(expected, play(other, rng, 200), strict=True))
    slots.close()
    other.close()


def test_minigrid_levels_are_seeds():
    slots, env = ppo_plr_minigrid.MiniGridLevels(MINIGRID, 2), gym.make(f"minigrid:{MINIGRID}")
    for level in (5, 9, 5):
        slots.set_level(1, level)
        assert np.array_equal(slots.obs[1], env.reset(seed=level)[0]["image"])
        slots.set_level(0, 1)
        for action in (2, 0, 1, 2):
            obs, *_ = slots.step(np.array([0, action]))
            assert np.array_equal(obs[1], env.step(action)[0]["image"])


def test_ids(monkeypatch):
    assert ppo_plr_minigrid.env_spec(MINIGRID) == ((7, 7, 3), 3)
    assert ppo_plr_minigrid.env_spec(f"minigrid:{MINIGRID}") == ((7, 7, 3), 3)
    with pytest.raises(ValueError, match="--env-id MiniGrid-Emty-5x5-v0 .*MiniGrid-Empty-5x5"):
        ppo_plr_minigrid.env_spec("MiniGrid-Emty-5x5-v0")
    with pytest.raises(ValueError, match="--env-id CartPole-v1 has no image"):
        ppo_plr_minigrid.env_spec("CartPole-v1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="is missing: pip install --no-deps procgen-mirror==0.10.7 gym3==0.3.3$"):
        ppo_plr.Args(env_id="bigfish")
    with pytest.raises(ValueError, match="needs minigrid: pip install minigrid"):
        ppo_plr_minigrid.env_spec(MINIGRID)


class OddEnv(gym.Env):
    """Shows floats, though its space says uint8, or one first frame whatever the level."""

    def __init__(self, dtype=np.uint8):
        self.observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 255, (7, 7, 3), np.uint8))
        self.action_space, self.dtype = gym.spaces.Discrete(3), dtype

    def reset(self, *, seed=None, options=None):
        return {"image": np.full((7, 7, 3), 0.5, self.dtype)}, {}


@pytest.fixture
def odd_env():
    def make(**options):
        gym.register("MiniGrid-Odd-v0", OddEnv, kwargs=options)
        return "MiniGrid-Odd-v0"

    yield make
    del gym.registry["MiniGrid-Odd-v0"]


def test_observations_that_are_no_bytes_are_refused(start, odd_env):
    run = start("LevelEnvs", odd_env(dtype=np.float32), num_envs=2)
    with pytest.raises(RuntimeError, match="environment 0, task 5: TypeError: Cannot cast .* from dtype..float32.. to"):
        run.reset()


def test_an_environment_that_ignores_its_level_is_noticed(odd_env, capsys):
    for env_id, noticed in ((odd_env(), True), ("MiniGrid-Empty-5x5-v0", True), ("MiniGrid-MultiRoom-N2-S4-v0", False)):
        ppo_plr_minigrid.notice_equal_levels(makers(env_id)[0], 3, 50)
        assert ("levels 3 to 12 all begin with the same frame" in capsys.readouterr().err) == noticed
    ppo_plr_minigrid.notice_equal_levels(makers("MiniGrid-Empty-5x5-v0")[0], 0, 1)
    assert capsys.readouterr().err == ""


# ---- episodes and their tasks ----


@pytest.mark.parametrize("env_id", ["bossfight", MINIGRID])
def test_tasks_and_feedback(start, env_id):
    run, rng = start("LevelEnvs", env_id), np.random.default_rng(0)
    oracle = makers(env_id)[0](1)
    obs = run.reset()
    playing, returns, lengths, expected = [sent[0] for sent in run.sent], np.zeros(4), np.zeros(4, int), []
    index = [0] * 4
    for _ in range(300):
        previous = obs
        obs, reward, terminated, truncated, info = run.step(rng.integers(3, size=4))
        assert info["task"][:, 0].tolist() == playing and (env_id == MINIGRID or not truncated.any())
        cut = truncated & ~terminated
        returns, lengths = returns + reward, lengths + 1
        for i in np.flatnonzero(terminated | truncated):
            expected.append((i, playing[i], returns[i], lengths[i]))
            returns[i], lengths[i], index[i] = 0, 0, index[i] + 1
            playing[i] = run.sent[i][index[i]]
            oracle.set_level(0, 100 + playing[i])
            assert np.array_equal(obs[i], oracle.obs[0])  # the first frame of the next level
        if env_id == MINIGRID:  # the last frame of a truncated episode is a neighbour of the one before, not the next's
            for i in np.flatnonzero(cut):
                assert info["final_obs"][i].any() and lengths[i] == 0 and expected[-1][3] == 100
        assert previous is not obs and not np.shares_memory(previous, obs)
    assert len(expected) >= 8 and len({task for _, task, _, _ in expected}) > 3
    assert [record[:4] for record in run.records] == expected
    if env_id == MINIGRID:  # a crash pays -1, a time-out 0
        assert [record[4] for record in run.records] == [float(episode[2] > 0) for episode in expected]
    oracle.close()


def test_truncated_minigrid_episode_shows_its_true_last_frame(start):
    """Turning left for ever ends every episode by time: both flags, the final frame and the feedback."""
    run = start("LevelEnvs", "MiniGrid-Empty-5x5-v0", num_envs=2)  # 100 steps
    env = gym.make("minigrid:MiniGrid-Empty-5x5-v0")  # 99 left turns: the last frame is not a first one
    run.reset()
    env.reset(seed=100 + run.sent[1][0])
    for t in range(1, 101):
        obs, reward, terminated, truncated, info = run.step(np.zeros(2, int))
        final = env.step(0)[0]["image"]
        assert (truncated.all(), terminated.any()) == (t == 100, False)
        assert np.array_equal(info["final_obs"][1], final)
    assert np.array_equal(info["final_obs"][1], final)
    assert [record[1:] for record in run.records] == [(run.sent[i][0], 0.0, 100, 0.0) for i in range(2)]


def test_both_flags_mean_terminated(start):
    """A success in the very last step: terminated, so nothing is bootstrapped."""
    gym.register("MiniGrid-Short-v0", "minigrid.envs:EmptyEnv", kwargs={"size": 5, "max_steps": 5})
    run = start("LevelEnvs", "MiniGrid-Short-v0", num_envs=1)
    run.reset()
    for action in (2, 2, 1, 2, 2):
        _, reward, terminated, truncated, info = run.step(np.array([action]))
    assert terminated[0] and truncated[0] and reward[0] > 0
    assert run.records[0][3:] == (5, 1.0)
    del gym.registry["MiniGrid-Short-v0"]


@pytest.mark.parametrize("env_id", ["bossfight", MINIGRID])
def test_workers_equal_one_process_and_states_move_between_them(start, env_id):
    here, there = (
        start("LevelEnvs", env_id, num_envs=5),
        start("WorkerEnvs", env_id, num_envs=5, num_workers=2),
    )
    rng = np.random.default_rng(0)
    assert np.array_equal(here.reset(), there.reset())

    def compare(one, other, steps):
        for _ in range(steps):
            actions = rng.integers(3, size=5)
            *outputs, info = one.step(actions)
            *others, other_info = other.step(actions)
            assert same(outputs, others) and info.keys() == other_info.keys()
            assert same(info.values(), other_info.values())
        assert one.records == other.records

    compare(here, there, 150)
    assert len(here.records) > 5
    state, queue_state, rng_state = there.envs.state_dict(), there.queue.state_dict(), there.rng.bit_generator.state
    assert all(np.array_equal(here.envs.state_dict()[name], state[name]) for name in here.envs.EPISODE)
    assert same(here.envs.state_dict()["slots"], state["slots"])
    targets = [("LevelEnvs", {}), ("WorkerEnvs", {"num_workers": 3})]
    for make, options in targets if env_id == MINIGRID else targets[:1]:
        resumed = start(make, env_id, num_envs=5, waiting=queue_state, **options)
        resumed.envs.load_state_dict(state)
        resumed.rng.bit_generator.state, resumed.records = rng_state, list(there.records)
        compare(there, resumed, 100)
        state, queue_state, rng_state = there.envs.state_dict(), there.queue.state_dict(), there.rng.bit_generator.state


# ---- faults ----


def children():
    return {int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def gone(pids, seconds):
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{p}/exe").exists() for p in pids) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(Path(f"/proc/{p}/exe").exists() for p in pids)


def workers_of(run):
    return [process.pid for _, process, _ in run.envs.workers]


@pytest.mark.parametrize("env_id,bad,text", [("bigfish", 2**31, "format requires"), (MINIGRID, -500, "[Ss]eed")])
def test_error_in_a_worker(start, env_id, bad, text):
    """SYN-08, USE-06."""
    run = start("WorkerEnvs", env_id, tasks=[0, 1, 2, bad], num_workers=2)
    pids = workers_of(run)
    with pytest.raises(SystemExit, match=f"(?s)Traceback.*environment 3, task {bad}: .*({text})"):
        run.reset()
    assert gone(pids, 5)


def test_constructor_error_in_a_worker(start):
    run = start("WorkerEnvs", "bigfish", mode="medium", num_workers=2)
    with pytest.raises(SystemExit, match='"medium" is not a valid distribution mode'):
        run.reset()


@pytest.mark.parametrize("when", ["idle", "waiting"])
def test_killed_worker(start, when):
    run = start("WorkerEnvs", MINIGRID, num_workers=2)
    run.reset()
    pids = workers_of(run)
    if when == "waiting":  # for a task that never comes
        for _ in range(100):
            run.envs.step(np.full(4, 2)) if min(run.queue.state_dict()["waiting"]) else None
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -9 {pids[1]}"])
    else:
        os.kill(pids[1], signal.SIGKILL)
        run.envs.workers[1][1].join()
    began = time.monotonic()
    with pytest.raises(SystemExit, match=r"environments range\(2, 4\), tasks \[.*\]: died with exit code -9"):
        for _ in range(1000):
            run.envs.step(np.full(4, 2))
    assert time.monotonic() - began < 10 and gone(pids, 5)


def test_stopped_worker(start, monkeypatch):
    run = start("WorkerEnvs", MINIGRID, num_workers=2)
    run.reset()
    monkeypatch.setattr(ppo_plr_minigrid.WorkerEnvs, "TIMEOUT_S", 1)
    pids = workers_of(run)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(SystemExit, match=r"environments range\(2, 4\), tasks \[.*\]: gave no answer for 1 s"):
        run.envs.step(np.full(4, 2))
    assert gone(pids, 5)


def test_workers_leave_the_signals_of_the_group_to_the_parent(start):
    run = start("WorkerEnvs", MINIGRID, num_workers=2)
    run.reset()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        for pid in workers_of(run):
            os.kill(pid, number)
    time.sleep(0.2)
    run.step(np.zeros(4, int))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()  # and the parent still gets them


def test_close_leaves_nothing():
    """SYN-15."""
    counts = []
    for _ in range(4):
        run = Run("WorkerEnvs", MINIGRID, num_workers=2)
        run.reset()
        run.envs.close()
        run.envs.close()
        del run
        counts.append((len(children()), len(os.listdir("/proc/self/fd")), len(os.listdir("/dev/shm"))))
    assert counts[1:] == [counts[0]] * 3


MAIN = """
    if __name__ == "__main__":
        queue = SyncQueue(4, prefetch=1000)
        for i in range(4):
            for k in range(1000):
                queue.put_task(i, (k, 0))
        make_levels = partial(MiniGridLevels, "MiniGrid-Empty-5x5-v0")
        envs = WorkerEnvs(make_levels, {"obs": (7, 7, 3), "final_obs": (7, 7, 3)}, queue, range(4), 0, num_workers=2)
        envs.run("start")
        print(*(process.pid for _, process, _ in envs.workers), flush=True)
        if sys.argv[1] == "raises":
            raise KeyError("forgot to close")
        if sys.argv[1] == "stuck":
            replay = np.zeros(1_000_000, int).view(np.uint8)  # minutes of work
            envs.load_state_dict(envs.state_dict() | {"slots": [replay] * 4})
        while True:
            envs.step(np.zeros(4, int)) if sys.argv[1] == "busy" else signal.pause()
"""


def alone(tmp_path, mode):
    """The script alone in an empty folder, with a main."""
    code = Path(ppo_plr_minigrid.__file__).read_text().split('if __name__ == "__main__":')[0]
    (tmp_path / "experiment.py").write_text(code + textwrap.dedent(MAIN))
    command = [sys.executable, "experiment.py", mode]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("mode", ["idle", "busy", "stuck"])
def test_kill_9_of_the_parent(tmp_path, mode):
    before = set(os.listdir("/dev/shm"))
    process, pids = alone(tmp_path, mode)
    assert len(pids) == 2, process.communicate()[1]
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    assert not gone(pids, 0), "workers leave SIGTERM to their parent"
    process.kill()
    assert gone(pids, 5), "workers outlive their parent"
    assert "Traceback" not in process.communicate()[1]
    assert set(os.listdir("/dev/shm")) <= before


def test_forgotten_close(tmp_path):
    process, pids = alone(tmp_path, "raises")
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1 and stderr.count("Traceback") == 1 and "forgot to close" in stderr
    assert gone(pids, 5)
