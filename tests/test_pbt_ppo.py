"""algos/pbt_ppo.py: decisions, legs, the population's order, workers that die and hang, resumes, Vector Pong."""

import importlib.util
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from test_runs import ENVIRONMENT, TINY, Ended, Run, assert_same, members, parse, refusal, restored_signals, train

from algos import pbt_ppo, ppo
from algos.pbt_ppo import Gene, Population, VectorPong, Workers, evolve, exploit, explore

TINY[pbt_ppo] = (
    "--env-id CartPole-v1 --population 2 --num-envs 2 --num-steps 16 --leg-steps 64 --num-minibatches 2 "
    "--update-epochs 2 --eval-episodes 2 --final-eval-episodes 2 --eval-interval 0 --total-timesteps 256 "
    "--num-workers 0 --progress none"
)
PONG = "--env-id VectorPong --num-envs 4 --num-steps 8 --leg-steps 32"
_ = restored_signals  # used by every test here


def lineage(run):
    """The rows without their times."""
    return [{name: value for name, value in row.items() if name != "time"} for row in run.rows("lineage.jsonl")]


# ---- Decisions -------------------------------------------------------------------------------------------------------


def test_explore_stays_inside_the_bounds_and_keeps_types():
    """EVO-08."""
    rng = np.random.default_rng(1)
    genes = [Gene("a", 1e-4, 1e-3, "log"), Gene("b", 1, 8, "int"), Gene("c", 0.0, 1.0, "linear")]
    values, seen = {"a": 1e-3, "b": 1, "c": 0.0}, []
    for _ in range(200):
        values = explore(values, genes, rng)
        seen.append(tuple(values.values()))
        assert 1e-4 <= values["a"] <= 1e-3 and type(values["b"]) is int and 1 <= values["b"] <= 8
        assert 0 <= values["c"] <= 1
    a, b, c = zip(*seen)
    assert len({*b}) == 8 and len({round(x, 6) for x in c}) == 6, "0 is left, and the upper end is reached"
    factors = {round(y / x, 6) for x, y in zip(a, a[1:]) if 1e-4 < y < 1e-3}
    assert factors == {0.8, 1.2}


def test_initial_genes_are_uniform_on_their_scale():
    rng = np.random.default_rng(1)
    for gene, mid in ((Gene("a", 1e-4, 1e-2, "log"), 1e-3), (Gene("c", 0.0, 1.0, "linear"), 0.5)):
        draws = np.array([gene.draw(rng) for _ in range(2000)])
        assert gene.low <= draws.min() and draws.max() <= gene.high and abs((draws < mid).mean() - 0.5) < 0.04
    assert {Gene("b", 1, 3, "int").draw(rng) for _ in range(50)} == {1, 2, 3}


def draws(method, slot, fitness, scores=None, number=200):
    rng = np.random.default_rng(1)
    scores = scores or [[f] * 3 for f in fitness]
    return {exploit(method, slot, fitness, scores, rng) for _ in range(number)}


def test_truncation_copies_the_best_fifth_into_the_worst():
    fitness = [5.0, 9.0, 1.0, 4.0, 8.0, 2.0, 3.0, 6.0, 7.0, 0.0]  # of ten: two and two
    assert draws("truncation", 9, fitness) == draws("truncation", 2, fitness) == {1, 4}
    for slot in (0, 1, 3, 4, 5, 6, 7, 8):
        assert draws("truncation", slot, fitness) == {None}
    assert draws("truncation", 0, [0.0, 1.0]) == {1} and draws("truncation", 1, [0.0, 1.0]) == {None}
    assert draws("truncation", 0, [2.0, 2.0]) == {None}, "nobody is worse"
    assert draws("none", 9, fitness) == {None}


@pytest.mark.parametrize("method", ["truncation", "ttest", "elo"])
def test_nan_never_wins_and_never_donates(method):
    nan, names = math.nan, {0: {1, 2, 3}, 1: {None}}
    fitness = [nan, 1000.0, 1000.0, 1000.0]
    found = draws(method, 0, fitness)
    assert None not in found and found <= names[0], "who has NaN copies another"
    assert draws(method, 1, [nan, 1.0]) == {None} and draws(method, 1, [nan, nan]) == {None}
    assert draws(method, 0, [0.0, nan, 3000.0], [[0.0, 0.1], [nan, nan], [9.0, 9.1]]) <= {2, None}


def test_welch_is_scipy_s():
    rng = np.random.default_rng(1)
    for n, m in ((2, 2), (5, 20), (20, 20), (60, 3)):
        for shift in (0, 0.5, 3):
            a, b = rng.normal(size=n), shift + 2 * rng.normal(size=m)
            assert pbt_ppo.welch(a, b) == pytest.approx(stats.ttest_ind(a, b, equal_var=False).pvalue, abs=1e-6)
    assert pbt_ppo.welch([1.0] * 20, [1.0, 2.0]) == pytest.approx(
        stats.ttest_ind([1.0] * 20, [1.0, 2.0], equal_var=False).pvalue, abs=1e-6
    )


def test_equal_episodes_differ_significantly_only_if_the_means_do():
    """20 identical greedy episodes have no variance."""
    assert pbt_ppo.welch([1.0] * 20, [1.0] * 20) == 1 and pbt_ppo.welch([1.0] * 20, [2.0] * 20) == 0
    assert pbt_ppo.welch([1.0], [2.0]) == 1, "one episode says nothing"
    assert draws("ttest", 0, [1.0, 2.0], [[1.0] * 9, [2.0] * 9]) == {1}
    assert draws("ttest", 0, [1.5, 2.0], [[0.0, 3.0] * 3, [0.5, 3.5] * 3]) == {None}
    assert draws("ttest", 1, [1.0, 2.0], [[1.0] * 9, [2.0] * 9]) == {None}, "the better one keeps itself"


def test_elo():
    assert pbt_ppo.elo_expected(1400, 1000) == pytest.approx(10 / 11)
    assert pbt_ppo.elo_update(1000, 1000, 1, 32) == (1016, 984)
    assert pbt_ppo.elo_update(1400, 1000, 0.5, 22) == pytest.approx((1400 - 22 * (10 / 11 - 0.5), 1009))
    low = 1000 + 400 * math.log10(0.3 / 0.7)  # beats 1000 with probability 0.3
    assert draws("elo", 0, [low - 1, 1000.0]) == {1} and draws("elo", 0, [low + 1, 1000.0]) == {None}


def test_opponents_are_drawn_by_closeness():
    rng = np.random.default_rng(1)
    ratings = [1000.0, 1000.0, 1200.0, 1800.0]
    drawn = np.bincount(pbt_ppo.opponents(0, ratings, 20_000, rng, 0.15), minlength=4) / 20_000
    p = 1 / (1 + 10 ** ((np.array(ratings[1:]) - 1000) / 400))
    mass = np.exp(-((p - 0.5) ** 2) / (2 * 0.15**2))
    assert drawn[0] == 0 and np.abs(drawn[1:] - mass / mass.sum()).max() < 0.015


# ---- Advantages ------------------------------------------------------------------------------------------------------


def oracle(ratios, rewards, values, next_values, terminated, truncated, gamma, lam):
    """GAE-V as sums over the rest of each episode, by its definition."""
    T, N = rewards.shape
    c = np.minimum(ratios, 1)
    advantages = np.zeros((T, N))
    for t in range(T):
        for i in range(N):
            weight = 1.0
            for s in range(t, T):
                following = 0 if terminated[s, i] else next_values[s, i]
                advantages[t, i] += weight * (rewards[s, i] + gamma * following - values[s, i])
                if terminated[s, i] or truncated[s, i] or s + 1 == T:
                    break
                weight *= gamma * lam * c[s + 1, i]
    return advantages, values + c * advantages


def test_gae_v_is_its_definition_and_gae_on_policy():
    rng = np.random.default_rng(1)
    rewards, values, next_values = rng.normal(size=(3, 9, 4))
    terminated, truncated = rng.random((2, 9, 4)) < 0.2
    ratios = np.exp(rng.normal(size=(9, 4)))
    given = rewards, values, next_values, terminated, truncated, 0.97, 0.9
    for found, expected in zip(pbt_ppo.gae_v(ratios, *given), oracle(ratios, *given)):
        np.testing.assert_allclose(found, expected, atol=1e-12)
    for found, expected in zip(pbt_ppo.gae_v(np.ones((9, 4)), *given), ppo.gae(*given)):
        np.testing.assert_allclose(found, expected, atol=1e-5)


# ---- Jaderberg's toy, in the controller's own order ------------------------------------------------------------------


def toy_leg(request, check=None):
    """Eight steps up the surrogate 1.2 - h0 theta0^2 - h1 theta1^2; the fitness is the objective without h."""
    theta, h = np.array(request["agent"]), np.array([request["genes"][name] for name in ("h0", "h1")])
    for _ in range(8):
        theta = theta - 0.02 * h * theta
    answer = {"slot": request["slot"], "agent": theta.tolist(), "optimizer": None, "envs": None, "results": []}
    return answer | {"scores": [1.2 - (theta**2).sum()], "row": {}, "diverged": None}


def toy_population(seed=1, members=2, **changes):
    args = {"exploit": "truncation", "explore": True, "self_play": False, "leg_steps": 10, "elo_k": 1.0} | changes
    genes = [Gene(name, 0.0, 1.0, "linear") for name in ("h0", "h1")]
    population = Population(SimpleNamespace(**args), genes, [[0.9, 0.9]] * members, np.random.default_rng(seed))
    for member, h0 in zip(population.members, (1.0, 0.0)):
        member["genes"] = {"h0": h0, "h1": 1 - h0}
    return population


def toy(seed, **changes):
    population = toy_population(seed, **changes)
    workers = Workers(toy_leg, 0, 10)
    workers.start()
    assert len(list(evolve(population, workers, 100))) == 100
    return population.members[population.best()]["fitness"]


def test_toy():
    """Jaderberg et al. 2017, section 4.1 with facts 1.4: neither half alone gets past 0.40."""
    assert min(toy(seed) for seed in range(50)) >= 1.19
    assert max(toy(seed, explore=False) for seed in range(5)) <= 0.40
    assert max(toy(seed, exploit="none") for seed in range(5)) <= 0.40


def test_a_copy_takes_everything_of_the_donor_but_place_and_past():
    """EVO-09."""
    population = toy_population(explore=False)
    slow, fast = population.members
    fast |= {"legs": 5, "frames": 50, "fitness": 2.0, "scores": [2.0], "optimizer": {"moments": 1}, "agent": [1.0, 1.0]}
    fast["earned"] = fast["genes"]
    slow |= {"legs": 2, "frames": 20, "fitness": 1.0, "scores": [1.0], "envs": "its own"}
    request = population.next()
    assert (
        request["agent"] == [1.0, 1.0] and request["genes"] == fast["genes"] and request["optimizer"] == {"moments": 1}
    )
    assert request["legs"] == 2 and request["envs"] == "its own", "no two members see the same random numbers"
    assert (slow["fitness"], slow["scores"]) == (2.0, [2.0]), (
        "it is worth what the copied network is, until its leg ends"
    )
    row = population.record(0, toy_leg(request))
    assert (row["parent"], row["frames"], row["leg"]) == (1, 60, 3)


def test_the_genes_that_are_logged_are_those_that_earned_the_fitness():
    """Not those of a copy that has not trained with them, though it ties with its donor and stands before it."""
    population = toy_population()
    copy, donor = population.members
    copy |= {"legs": 1, "fitness": 0.0, "scores": [0.0]}
    donor |= {"legs": 1, "fitness": 1.0, "scores": [1.0], "earned": donor["genes"]}
    request = population.next()
    assert population.best() == request["slot"] == 0 and request["genes"] != donor["genes"]
    logged = {name.removeprefix("genes/"): x for name, x in population.metrics().items() if name.startswith("genes/")}
    assert logged == donor["genes"]
    population.record(0, toy_leg(request))
    assert copy["earned"] == request["genes"]


def test_members_go_on_in_the_order_in_which_they_return():
    population = toy_population(members=4, exploit="none")
    assert [population.next()["slot"] for _ in range(3)] == [0, 1, 2]
    for slot in (2, 0):
        population.record(slot, toy_leg(population.in_flight[slot]))
    assert population.ready == [3, 2, 0] and [*population.in_flight] == [1]


def test_all_nan_ends_the_run_and_one_nan_does_not():
    population = toy_population()
    bad = {"agent": [0.9, 0.9], "optimizer": None, "envs": None, "results": [], "row": {}, "diverged": "loss"}
    for slot in (0, 1):
        assert population.next()["slot"] == slot
    population.record(0, bad | {"scores": [math.nan]})
    with pytest.raises(
        SystemExit, match=r"error: all 2 members have a fitness of NaN, the last one slot 1 with .*loss"
    ):
        population.record(1, bad | {"scores": [math.nan]})


# ---- Legs ------------------------------------------------------------------------------------------------------------


def request_of(args, genes=None, **changes):
    torch.manual_seed(1)
    agent = pbt_ppo.Agent(args.obs_shape, args.num_actions, args.continuous)
    base = {"slot": 0, "legs": 0, "agent": agent.state_dict(), "optimizer": None, "envs": None, "rivals": []}
    return base | {"opponents": [], "genes": genes or {}} | changes


def test_the_optimiser_s_step_size_is_the_gene():
    """ray-project/ray#62173: after a copy, whatever step size the moments came with; and the moments are kept."""
    args = parse(pbt_ppo, TINY[pbt_ppo])
    first = pbt_ppo.leg(args, request_of(args, {"learning_rate": 0.01}))
    state = pbt_ppo.unpacked(pbt_ppo.packed(first))
    again = request_of(args, {"learning_rate": 0.0005}, agent=state["agent"], optimizer=state["optimizer"], legs=1)
    second = pbt_ppo.leg(args, again)
    assert first["row"]["charts/learning_rate"] == 0.01 and second["row"]["charts/learning_rate"] == 0.0005
    assert second["optimizer"]["param_groups"][0]["lr"] == 0.0005
    steps = [answer["optimizer"]["state"][0]["step"].item() for answer in (first, second)]
    assert steps == [8, 16], "2 updates x 2 epochs x 2 minibatches each, and Adam goes on counting"
    moved = [
        max((answer["agent"][name] - given["agent"][name]).abs().max().item() for name in given["agent"])
        for answer, given in ((second, again),)
    ]
    assert 0 < moved[0] < 8 * 0.0005 * 3


def test_a_gene_counts_as_the_argument_does():
    args = parse(pbt_ppo, TINY[pbt_ppo], "--clip-coef 0.1 --update-epochs 3 --ent-coef 0.05")
    other = parse(pbt_ppo, TINY[pbt_ppo])
    genes = {"clip_coef": 0.1, "update_epochs": 3, "ent_coef": 0.05}
    assert_same(pbt_ppo.pack(pbt_ppo.leg(args, request_of(args)))["agent"],
                pbt_ppo.pack(pbt_ppo.leg(other, request_of(other, genes)))["agent"])  # fmt: skip


@pytest.mark.parametrize("words", [PONG, f"{PONG} --env-id ImagePong", "--env-id Pendulum-v1", "--estimator gae_v"])
def test_a_leg_repeats_to_the_bit_and_goes_on_where_it_was(words):
    args = parse(pbt_ppo, TINY[pbt_ppo], words, "--eval-max-steps 60")
    answers = [pbt_ppo.unpacked(pbt_ppo.packed(pbt_ppo.leg(args, request_of(args)))) for _ in range(2)]
    for answer in answers:
        del answer["row"]
    assert_same(*answers)
    assert (answers[0]["envs"] is not None) == ("Pong" in words)
    following = request_of(args, legs=1, agent=answers[0]["agent"], envs=answers[0]["envs"])
    if "Pong" in words:
        envs = pbt_ppo.PongEnvs(args, np.random.SeedSequence(3).spawn(4), (), None)
        envs.load_state_dict(following["envs"])
        assert (envs.lengths == 32 // 4).all() and (envs.games.length == 8).all()
    pbt_ppo.leg(args, following)


def test_off_policy_epochs_differ_and_the_first_does_not():
    for epochs, same in ((1, True), (3, False)):
        words = f"--update-epochs {epochs} --leg-steps 32 --learning-rate 0.01"
        args = [parse(pbt_ppo, TINY[pbt_ppo], words, f"--estimator {name}") for name in ("gae", "gae_v")]
        one, other = (pbt_ppo.leg(a, request_of(a))["agent"]["policy.0.weight"] for a in args)
        assert torch.equal(one, other) == same


def test_a_leg_that_diverges_is_worth_nothing_and_keeps_what_it_had():
    args = parse(pbt_ppo, TINY[pbt_ppo])
    request = request_of(args, {"learning_rate": 1e30})
    answer = pbt_ppo.leg(args, request)
    assert all(map(math.isnan, answer["scores"])) and "not finite" in answer["diverged"]
    assert answer["agent"] is request["agent"]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_member_learns_cartpole(seed):
    args = parse(pbt_ppo, TINY[pbt_ppo], f"--seed {seed} --num-envs 8 --num-steps 64 --leg-steps 8192 --gamma 0.99 "
                 "--gae-lambda 0.95 --num-minibatches 4 --update-epochs 4 --eval-episodes 5")  # fmt: skip
    request = request_of(args)
    for legs in range(2):
        answer = pbt_ppo.leg(args, request | {"legs": legs})
        request |= {name: answer[name] for name in ("agent", "optimizer", "envs")}
    assert np.mean(answer["scores"]) > 100, "20 without training"


# ---- Whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_that_was_stopped_twice_equals_one_that_was_not(tmp_path):
    """EVO-10, EVO-11, EVO-12, EVO-14: no member idles, none of the legs comes twice."""
    words = "--population 3 --total-timesteps 768 --env-id VectorPong --num-envs 4 --num-steps 8 --eval-max-steps 30"
    straight = train(pbt_ppo, tmp_path / "a", words)
    for number in (4, 5):
        stop_after(number, tmp_path / "b", words)
        assert Run(tmp_path / "b").json("status.json")["step"] == 64 * number
        with open(Run(tmp_path / "b").dir / "lineage.jsonl", "a") as file:
            file.write("a leg after the checkpoint\n")
    stopped = train(pbt_ppo, tmp_path / "b", words)
    assert_same(straight.state(), stopped.state())
    assert lineage(straight) == lineage(stopped) and straight.repeatable() == stopped.repeatable()
    assert [row["global_step"] for row in lineage(stopped)] == list(range(64, 769, 64))
    assert [row["leg"] for row in lineage(stopped) if row["slot"] == 1] == [1, 2, 3, 4]
    assert any(row["parent"] is not None for row in lineage(stopped))
    population = stopped.state()["population"]
    assert [m["legs"] for m in population["members"]] == [4] * 3 and population["in_flight"] == {}
    for member in population["members"]:
        assert member["optimizer"]["param_groups"][0]["lr"] == member["genes"]["learning_rate"]


def stop_after(number, folder, words):
    """SIGTERM when so many legs are done."""
    original, seen = pbt_ppo.Population.record, []

    def record(self, slot, answer):
        seen.append(slot)
        if self.returns + 1 == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, slot, answer)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(pbt_ppo.Population, "record", record)
        train(pbt_ppo, folder, words)
    assert ended.value.code == 75


def start(folder, *arguments, **options):
    words = " ".join([TINY[pbt_ppo], f"--run-dir {folder}", *arguments]).split()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, pbt_ppo.__file__, *words]
    return subprocess.Popen(command, env=ENVIRONMENT | options, start_new_session=True, **pipes)


def wait_for_legs(process, folder, count):
    for _ in range(6000):
        for path in folder.rglob("lineage.jsonl"):
            if len(path.read_text().splitlines()) >= count:
                return
        assert process.poll() is None, Ended(process)
        time.sleep(0.01)
    raise AssertionError(f"no {count} legs: {Ended(process)}")


def children(process):
    return [pid for pid in members(process.pid) if pid != process.pid and "spawn_main" in cmdline(pid)]


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_text()


BARRIER = "--barrier --population 4 --total-timesteps 1536 --exploit ttest"


def test_barrier_does_not_depend_on_workers_nor_on_a_killed_controller(tmp_path):
    """EVO-13. kill -9 of the controller in a round; its workers end with it; the rest of the run has no workers."""
    straight = train(pbt_ppo, tmp_path / "a", BARRIER, "--seed 1")
    process = start(tmp_path / "b", BARRIER, "--seed 1 --num-workers 2")
    wait_for_legs(process, tmp_path / "b", 6)
    assert len(children(process)) == 2
    process.kill()
    end = Ended(process)
    assert end.left == [], "workers end with the controller"
    config = next((tmp_path / "b").rglob("config.json"))
    stopped = Run(tmp_path / "b")
    done = len(stopped.rows("lineage.jsonl"))
    assert done < 24 and config.parent == stopped.dir
    train(pbt_ppo, tmp_path / "b", BARRIER, "--seed 1 --num-workers 2")
    assert lineage(straight) == lineage(stopped)
    assert_same(straight.state()["population"], stopped.state()["population"])


def test_the_first_legs_are_the_same_with_any_number_of_workers(tmp_path):
    """EVO-13."""
    words = "--population 4 --total-timesteps 256"
    found = []
    for number in (0, 1, 4):
        rows = train(pbt_ppo, tmp_path / str(number), words, f"--num-workers {number}").rows("lineage.jsonl")
        found.append({row["slot"]: row["fitness"] for row in rows})
    assert len(found[0]) == 4 and found[0] == found[1] == found[2]


def test_a_worker_that_is_killed_or_hangs_is_replaced_and_its_leg_repeated(tmp_path):
    process = start(tmp_path, "--num-workers 1 --leg-timeout 20 --total-timesteps 3200 --checkpoint-interval 5")
    wait_for_legs(process, tmp_path, 2)
    os.kill(children(process)[0], signal.SIGKILL)
    wait_for_legs(process, tmp_path, len(Run(tmp_path).rows("lineage.jsonl")) + 4)
    end = Ended(process)
    assert end.rc == 0 and end.left == []
    assert end.err.count("its worker died with exit code -9. It begins again from its last state") == 1, end
    rows = Run(tmp_path).rows("lineage.jsonl")
    assert [row["restarted"] for row in rows if row["restarted"]] == [1] and len(rows) == 50
    assert sum(row["slot"] == 0 for row in rows) == 25


def stuck(request, check=None):
    """Slot 1 does not come back."""
    time.sleep(600 if request["slot"] else 0)
    return toy_leg(request)


def broken(request, check=None):
    if request["slot"]:
        raise ValueError("no such\nlevel")
    return toy_leg(request)


@pytest.mark.parametrize("work, number, reason", [
    (stuck, 1, "its worker hangs: no answer for 1 s"), (broken, 1, "ValueError: no such level"),
    (broken, 0, "ValueError: no such level"),
])  # fmt: skip
def test_the_third_failure_in_a_row_ends_the_run_in_one_line(work, number, reason, capsys):
    population, workers = toy_population(), Workers(work, number, 60)
    workers.start()
    try:
        with pytest.raises(SystemExit) as ended:
            for _row in evolve(population, workers, 100):
                workers.timeout_s = 1 if work is stuck else 60  # a process takes seconds to start
    finally:
        workers.close()
    said = "slot 1, leg 1, genes {'h0': 0.0, 'h1': 1.0}"
    assert ended.value.code == f"error: {said}: failed three times in a row, at last: {reason}"
    assert capsys.readouterr().err == f"warning: {said}: {reason}. It begins again from its last state\n" * 2


def test_nothing_from_a_connection_is_unpickled():
    class Evil:
        def __reduce__(self):
            return os.system, ("true",)

    import io

    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    with pytest.raises(Exception, match="[Ww]eights"):
        pbt_ppo.unpacked(buffer.getvalue())


def test_self_play(tmp_path):
    """Both seats are members, the fitness is Elo; the sum of ratings stays but for copies; rewards are genes."""
    words = "--self-play --exploit none --population 3 --total-timesteps 576 --eval-max-steps 3000 --eval-episodes 4"
    genes = "--genes reward-hit=0:0.2:linear reward-move=-0.01:0.01:linear"
    run = train(pbt_ppo, tmp_path, PONG, "--num-envs 8 --num-steps 8 --leg-steps 64", words, genes)
    population = run.state()["population"]
    assert sum(member["elo"] for member in population["members"]) == pytest.approx(3000)
    assert len({member["elo"] for member in population["members"]}) == 3
    assert [member["fitness"] for member in population["members"]] == [m["elo"] for m in population["members"]]
    assert all(row["parent"] is None and set(row["genes"]) == {"reward_hit", "reward_move"} for row in lineage(run))
    assert {row["split"] for row in run.rows("eval.jsonl")} == {"eval"}


@pytest.mark.parametrize("words, said", [
    ("--population 1", "--population 1: it must be a number at least 2"),
    ("--genes learning-rate=0:1:log", "no log scale begins at 0: use a LOW above 0, or linear"),
    ("--genes learning-rate=0.1:0.01:log", "it takes LOW below HIGH"),
    ("--genes learning-rate=0.1:0.1:log", "it takes LOW below HIGH"),
    ("--genes gamma=0.9:1.1:linear", "both in [0, 1]"),
    ("--genes clip-coef=-1:1:linear", "both in [0, inf]"),
    ("--genes learning-rate=0.1:inf:log", "it takes LOW below HIGH"),
    ("--genes learning-rate=nan:1:log", "it takes LOW below HIGH"),
    ("--genes update-epochs=0:8:int", "both in [1, inf]"),
    ("--genes update-epochs=1.5:8:int", "--update-epochs is of type int"),
    ("--genes update-epochs=1:8:log", "its scale int"),
    ("--genes clip-coef=1:2:int", "its scale log or linear"),
    ("--genes clip-coef=low:2:log", "--clip-coef is of type float"),
    ("--genes clip-coef=0.1:0.2", "write NAME=LOW:HIGH:SCALE"),
    ("--genes num-envs=1:8:int", "there is no gene num-envs; use reward-win"),
    ("--genes gamma=0.9:1:linear gamma=0.9:1:linear", "gamma is there twice"),
    ("--leg-steps 100", "--leg-steps 100 is no multiple of num_envs 2 x num_steps 16 = 32: try 96"),
    ("--num-minibatches 17", "--num-minibatches 17 of 32 samples: use 16 at most"),
    ("--genes num-minibatches=1:64:int", "--num-minibatches 64 of 32 samples: use 16 at most"),
    ("--self-play --exploit elo", "it has one seat; use VectorPong or ImagePong"),
    ("--self-play --env-id VectorPong", "--exploit truncation: elo and none go with --self-play"),
    ("--exploit elo", "--exploit elo: elo and none go with --self-play, all others without it"),
    ("--env-id NoGame-v0", "--env-id NoGame-v0: "),
])  # fmt: skip
def test_bad_input_is_one_line(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(pbt_ppo, TINY[pbt_ppo], words)
    assert ended.value.code == 2
    told = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in told


def test_no_genes_is_a_fixed_setting(tmp_path):
    assert all(row["genes"] == {} for row in train(pbt_ppo, tmp_path, "--genes").rows("lineage.jsonl"))


def test_all_members_that_diverge_end_the_run_in_one_line(tmp_path):
    said = refusal(pbt_ppo, tmp_path, "--genes --learning-rate 1e30")
    assert said.startswith("error: all 2 members have a fitness of NaN, the last one slot 1 with {}")


# ---- Vector Pong -----------------------------------------------------------------------------------------------------


def games(number=6, first=0):
    pong = VectorPong([*range(first, first + number)])
    return pong, pong.reset()


def test_the_seats_are_mirror_images():
    """Swapped actions in the mirrored game give mirrored observations and swapped rewards."""
    (a, seen_a), (b, _) = games(), games()
    b.serves[:, :, 0] *= -1
    b.begin_rounds(np.arange(6))
    seen_b = b.observations()
    rng, scored = np.random.default_rng(1), 0
    for _ in range(400):
        np.testing.assert_allclose(seen_a, seen_b[:, ::-1], atol=1e-6)
        actions = rng.integers(0, 3, (6, 2))
        (seen_a, rewards_a, _, info_a), (seen_b, rewards_b, _, info_b) = a.step(actions), b.step(actions[:, ::-1])
        assert (rewards_a == rewards_b[:, ::-1]).all() and (rewards_a.sum(1) == 0).all()
        assert (info_a["hits"] == info_b["hits"][:, ::-1]).all()
        scored += (rewards_a != 0).any(1).sum()
    assert scored > 20


def test_a_game_does_not_depend_on_its_neighbours_and_goes_on_from_its_state():
    (all_six, _), (last, _) = games(6), games(1, 5)
    rng = np.random.default_rng(1)
    for t in range(700):
        actions = rng.integers(0, 3, (6, 2))
        for one, other in zip(all_six.step(actions)[:3], last.step(actions[5:])[:3]):
            assert (one[5] == other[0]).all()
        if t == 300:
            saved = pbt_ppo.unpacked(pbt_ppo.packed(all_six.state_dict()))
            again, _ = games(6, 90)
            again.load_state_dict({k: v.numpy() if torch.is_tensor(v) else v for k, v in saved.items()})
        if t > 300:
            outcome = again.step(actions)
    assert (outcome[0] == all_six.observations()).all()


def test_a_game_is_twenty_points_and_the_script_beats_random_play():
    pong, _ = games(64)
    rng, points, lengths = np.random.default_rng(1), [], []
    while len(points) < 100:
        actions = pong.scripted()
        actions[:, 0] = rng.integers(0, 3, 64)
        _, rewards, terminated, info = pong.step(actions)
        points += info["points"][terminated].tolist()
        lengths += info["length"][terminated].tolist()
        assert (info["length"] >= 1).all()
    assert {sum(game) for game in points} == {20}
    assert 3 < np.mean(points, 0)[0] < 4.5, "3.7 of 20"
    assert 500 < np.mean(lengths) < 1200


def test_the_learner_changes_seats_and_is_paid_for_its_own_points():
    args = parse(pbt_ppo, TINY[pbt_ppo], PONG, "--reward-win 2 --reward-lose 3 --reward-hit 0.5 --reward-move 0.25")
    envs = pbt_ppo.PongEnvs(args, np.random.SeedSequence(1).spawn(4), (), None)
    rng, seats, found = np.random.default_rng(1), envs.seats.copy(), []
    assert seats.tolist() == [0, 1, 0, 1]
    for _ in range(2500):
        before = envs.seats.copy()
        obs, reward, terminated, _, info = envs.step(rng.integers(0, 3, 4))
        assert obs.shape == (4, 10) and np.abs(obs).max() < 3
        assert ((envs.seats != before) == terminated).all()
        found += [returned for _, returned, _ in info["finished"]]
        assert set(np.round(reward * 4).astype(int).tolist()) <= {
            b + h + m for b in (0, 8, -12) for h in (0, 2) for m in (0, 1)
        }
    assert len(found) >= 8 and -17 < np.mean(found) < -9, "3.7 against 16.3"


def test_pictures_show_the_vectors():
    pictures, vectors = pbt_ppo.ImagePong([1, 2]), VectorPong([1, 2])
    seen, numbers = pictures.reset(), vectors.reset()
    rng = np.random.default_rng(1)
    for _ in range(30):
        actions = rng.integers(0, 3, (2, 2))
        seen, numbers = pictures.step(actions)[0], vectors.step(actions)[0]
    assert seen.shape == (2, 2, 4, 40, 40) and seen.dtype == np.uint8
    assert (seen[:, 1] == seen[:, 0, :, :, ::-1]).all()
    ball = seen[0, 0, 3].astype(float)
    ball[:, [4, 5, 34, 35]] = 0  # the bats' columns
    y, x = (ball[..., None] * np.stack(np.mgrid[:40, :40], -1)).sum((0, 1)) / ball.sum()
    assert (x * 4 + 2) / 160 == pytest.approx(numbers[0, 0, 8], abs=0.01)
    assert (y * 4 + 2) / 160 == pytest.approx(numbers[0, 0, 9], abs=0.01)


def test_lineage_is_json_without_nan(tmp_path):
    run = train(pbt_ppo, tmp_path, "--genes learning-rate=1e-3:1e-2:log")
    for line in (run.dir / "lineage.jsonl").read_text().splitlines():
        row = json.loads(line, parse_constant=pytest.fail)
        names = {"global_step", "time", "slot", "parent", "genes", "fitness", "frames", "leg", "restarted"}
        assert set(row) == names


def telling(request, check=None):
    """A leg that says which process did it, and once, where a file is missing, kills it or hangs."""
    slot, legs = request["slot"], request["legs"]
    marker = Path(os.environ["PBT_MARKERS"], f"{slot}-{legs}") if "PBT_MARKERS" in os.environ else None
    if slot == 1 and legs in (1, 3) and marker is not None and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL if legs == 1 else signal.SIGSTOP)
    return toy_leg(request) | {"row": {"pid": os.getpid()}}


def test_the_lineage_is_drawn_from_its_rows_alone(tmp_path):
    pytest.importorskip("pandas")
    from benchmark.figures import pbt_figures

    rows = [{"global_step": 10 * i, "slot": i % 2, "parent": 0 if i == 3 else None, "fitness": None if i == 1 else i,
             "genes": {"learning_rate": 10.0**-i, "clip_coef": 0.1}} for i in range(1, 6)]  # fmt: skip
    data = pbt_figures.gather(rows)
    assert data["names"] == ["fitness", "learning_rate", "clip_coef"]
    assert data["members"]["1"][1] == [30, 0, 3, 1e-3, 0.1]
    figure = pbt_figures.draw(data)
    fitness, rate, clip = figure.axes
    assert (fitness.get_yscale(), rate.get_yscale(), clip.get_yscale()) == ("linear", "log", "linear")
    assert [len(axis.lines) for axis in figure.axes] == [4] * 3, "two members, a dot and the line to it"
    assert list(rate.lines[2].get_ydata()) == [1e-2, 1e-3], "from what the other had"
    (tmp_path / "lineage.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.json").write_text("{}")
    pbt_figures.main(pbt_figures.Args(str(tmp_path)))
    assert (tmp_path / "lineage.png").stat().st_size > 5000
    (tmp_path / "lineage.json").write_text(json.dumps(data))
    pbt_figures.remake(tmp_path)
    with pytest.raises(SystemExit, match="holds no leg"):
        pbt_figures.read(tmp_path / "elsewhere")


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="scripts/run --extra ray brings it")
def test_actors_of_ray_that_die_or_hang_are_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PBT_MARKERS", str(tmp_path))
    importlib.import_module("ray").cloudpickle.register_pickle_by_value(sys.modules[__name__])  # none of Ray's path
    population, workers = toy_population(), Workers(telling, 2, 60, "ray")
    workers.start()
    try:
        host, port = workers.server.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(multiprocessing.AuthenticationError):
            multiprocessing.connection.Client((host, port), authkey=b"wrong")
        pids, restarted = set(), []
        for row, answer in evolve(population, workers, 12):
            workers.timeout_s = 8
            pids.add(answer["row"]["pid"])
            restarted += [(row["slot"], row["leg"])] * row["restarted"]
    finally:
        workers.close()
    assert restarted == [(1, 2), (1, 4)] and len(pids) >= 3 and os.getpid() not in pids
    said = capsys.readouterr().err
    assert (
        said.count("its worker died. It begins again") == 1 and said.count("its worker hangs: no answer for 8 s") == 1
    )
