"""The parts of algos/ppo_plr.py that are its own: learning in pieces, dealing levels, evaluation, arguments."""

import json
import math
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
import tyro

from algos import ppo_plr, ppo_plr_minigrid
from curricula import DomainRandomization

COEFS = 0.2, True, 0.01, 0.5


def batch(size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(size, generator=generator) for name in ("old_value", "advantage", "returns")}
    obs = torch.randint(0, 256, (size, 64, 64, 3), dtype=torch.uint8, generator=generator)
    actions = torch.randint(15, (size,), generator=generator)
    return {"obs": obs, "actions": actions, "old_logprob": -2.7 + 0.1 * noise["returns"]} | noise


def gradient(agent):
    return torch.cat([parameter.grad.flatten() for parameter in agent.parameters()])


@pytest.mark.parametrize("network", ["nature", "impala"])
def test_pieces_add_up_to_the_minibatch_gradient_and_threads_change_no_bit(network):
    torch.manual_seed(0)
    agent = ppo_plr.Agent((64, 64, 3), 15, network)
    flat, rows = batch(48), np.random.default_rng(0).permutation(48)[:40]
    picked = {name: tensor[rows] for name, tensor in flat.items()}
    logits, value = agent(picked.pop("obs"))
    policy = torch.distributions.Categorical(logits=logits)
    new = policy.log_prob(picked.pop("actions")), policy.entropy(), value
    loss, parts = ppo_plr.ppo_loss(*new, *picked.values(), *COEFS)
    loss.backward()
    whole = gradient(agent).clone()

    found = []
    for threads in (1, 2, 3):
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            summed = ppo_plr.gradients(agent, pool, 7, flat, rows, COEFS)
        found.append(gradient(agent).clone())
        assert (found[-1] - whole).abs().max() < 2e-5 * whole.abs().max()
        assert all(summed[name].item() == pytest.approx(parts[name].item(), abs=1e-5) for name in parts)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_networks_have_the_published_size_and_read_pixels_as_fractions():
    impala, nature = (ppo_plr.Agent((64, 64, 3), 15, network) for network in ("impala", "nature"))
    assert sum(p.numel() for p in impala.parameters()) == 626_256
    assert sum(p.numel() for p in nature.parameters()) == 342_448
    obs = batch(2)["obs"]
    features = nature.network(obs.permute(0, 3, 1, 2).float() / 255)
    torch.testing.assert_close(nature(obs)[0], nature.policy(features))
    grid = ppo_plr_minigrid.Agent((7, 7, 3), 7)
    assert grid(torch.zeros(5, 7, 7, 3, dtype=torch.uint8))[0].shape == (5, 7)


def test_act_samples_from_the_policy_and_reports_its_log_probability():
    torch.manual_seed(0)
    agent = ppo_plr.Agent((64, 64, 3), 4, "nature")
    with torch.no_grad():
        agent.policy.bias += torch.tensor([0.0, 1.0, -1.0, 0.5])
        obs = batch(1)["obs"].expand(4000, -1, -1, -1)[:4000]
        one = agent(obs[:1])  # one image: the network need not see it 4,000 times
    generator = torch.Generator().manual_seed(1)
    agent.forward = lambda obs: (one[0].expand(len(obs), -1), one[1].expand(len(obs)))
    actions, logprobs, _, logits = agent.act(obs, generator)
    del agent.forward
    p = np.exp(logits[0].numpy() - np.log(np.exp(logits[0].numpy()).sum()))
    frequencies = np.bincount(actions.numpy(), minlength=4) / 4000
    assert np.abs(frequencies - p).max() < 4 * math.sqrt(0.25 / 4000)
    np.testing.assert_allclose(logprobs.numpy(), np.log(p)[actions.numpy()], rtol=1e-5)
    assert agent.act(obs[:1])[0].item() == p.argmax()


def make_dealer(num_envs, num_levels=6, seed=5, **options):
    args = ppo_plr.Args(num_levels=num_levels, **options)
    return ppo_plr.Dealer(args, ppo_plr.SyncQueue(num_envs), seed)


def test_dealer_keeps_a_task_ahead_and_hands_out_draws_in_order():
    dealer = make_dealer(2, 50, seed=3, curriculum="dr")
    expected = DomainRandomization(50, seed=3).sample(9)
    for env_id in (0, 0, 1, 1):
        dealer.deal(env_id)

    def next_task(env_id):
        return dealer.queue.get_task(env_id).tolist()

    assert [next_task(i) for i in (0, 1)] == [[expected[0], 0], [expected[2], 0]]
    for env_id in (1, 0):  # both end in one step; the draws go by environment
        dealer.queue.put_episode(env_id, (0, 0), 1.0 + env_id, 10, 0.0)
    dealer.collect()
    assert dealer.finished == [(1.0, 10), (2.0, 10)]
    means = {"charts/episodic_return": 1.5, "charts/episodic_length": 10, "charts/episodes": 2}
    assert dealer.pop_episodes() == means and dealer.finished == []
    assert [next_task(0)[0] for _ in range(2)] == [expected[1], expected[4]]
    assert [next_task(1)[0] for _ in range(2)] == [expected[3], expected[5]]


def test_a_task_tells_whether_its_level_had_a_score_when_it_was_drawn():
    dealer = make_dealer(1, 4, curriculum="robust_plr", plr_rho=0.0)
    dealer.deal(0)
    dealer.deal(0)
    dealer.plr.unseen[:], dealer.plr.scores[:] = False, 1.0
    dealer.plr.rank()  # now all levels have a score, yet the two that were drawn before stay as they were
    new = []
    for _ in range(3):
        task = dealer.queue.get_task(0)
        new.append(int(task[1]))
        dealer.queue.put_episode(0, task, 0.0, 1, 0.0)
        dealer.collect()
    assert new == [1, 1, 0]


def test_dealer_resumes_to_the_same_tasks():
    dealer = make_dealer(2, seed=5, curriculum="robust_plr")
    for env_id in (0, 0, 1, 1):
        dealer.deal(env_id)
    dealer.queue.put_episode(0, dealer.queue.get_task(0), 0.5, 3, 0.0)
    dealer.collect()
    other = make_dealer(2, seed=99, curriculum="robust_plr")
    for part, resumed in ((dealer, other), (dealer.queue, other.queue), (dealer.plr, other.plr)):
        resumed.load_state_dict(ppo_plr.pack(part.state_dict()))
    tasks = []
    for d in (dealer, other):
        played = []
        for _ in range(5):
            for env_id in (0, 1):
                played.append(d.queue.get_task(env_id).tolist())
                d.queue.put_episode(env_id, played[-1], 0.0, 1, 0.0)
            d.collect()
        tasks.append((played, d.pop_episodes()))
    assert tasks[0] == tasks[1] and tasks[0][1]["charts/episodes"] == 11


class FakeRun:
    check_signals, log_eval = (lambda self: None), ppo_plr.RunLogger.log_eval

    def __init__(self):
        self.rows = []

    def write_rows(self, name, step, rows):
        assert (name, step) == ("eval.jsonl", 7)
        self.rows += rows


def evaluate(agent, args, game, episodes):
    """The rows of an evaluation, and its means."""
    run = FakeRun()
    means = ppo_plr.evaluate(run, 7, agent, args, partial(ppo_plr.ProcgenLevels, game), episodes)
    return run.rows, means


def test_evaluation_levels_are_disjoint_from_training_and_the_same_each_time():
    """CUR-13."""
    args = ppo_plr.Args(env_id="bigfish", network="nature", num_levels=30, start_level=100, num_minibatches=8)
    torch.manual_seed(0)
    agent = ppo_plr.Agent((64, 64, 3), 15, "nature")
    with torch.no_grad():  # a policy that swims down: short episodes
        agent.policy.bias[3] += 50
    before = torch.get_rng_state()
    rows, summary = evaluate(agent, args, "bigfish", 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert (rows, summary) == evaluate(agent, args, "bigfish", 5)
    training = set(range(100, 130))
    assert not {row["level"] for row in rows if row["split"] == "eval"} & training
    assert {row["level"] for row in rows if row["split"] == "eval_train"} <= training
    assert [row["split"] for row in rows].count("eval") == [row["split"] for row in rows].count("eval_train") == 5
    mean = np.mean([row["return"] for row in rows if row["split"] == "eval"])
    assert summary["eval/return_mean"] == pytest.approx(mean)
    assert summary["eval/generalization_gap"] == pytest.approx(summary["eval_train/return_mean"] - mean)


def test_evaluation_does_not_list_two_billion_levels():
    args = ppo_plr.Args(env_id="bigfish", curriculum="dr", num_levels=2_000_000_000, start_level=7)
    agent = ppo_plr.Agent((64, 64, 3), 15, "nature")
    with torch.no_grad():
        agent.policy.bias[3] += 50
    levels = [row["level"] for row in evaluate(agent, args, "bigfish", 4)[0] if row["split"] == "eval_train"]
    assert len(set(levels)) == 4 and all(7 <= level < 2_000_000_007 for level in levels)


def refusal(script, arguments, capsys):
    """What a wrong command line prints, in one line without a frame."""
    with pytest.raises(SystemExit) as end:
        tyro.cli(script.Args, args=arguments.split())
    assert end.value.code == 2
    return " ".join(re.sub("[^ -~]", " ", "".join(capsys.readouterr())).split())


@pytest.mark.parametrize("script", [ppo_plr, ppo_plr_minigrid], ids=["procgen", "minigrid"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--num-levels 0", ("--num-levels 0", "at least 1")),
        ("--start-level -1", ("--start-level -1",)),
        ("--start-level 2147483500", ("--start-level 2147483500", "between 0 and 2147483446")),
        ("--num-workers 65", ("--num-workers 65", "between 0 and 64")),
        ("--plr-temperature 0", ("--plr-temperature 0.0",)),
        ("--plr-temperature nan", ("--plr-temperature nan",)),
        ("--plr-temperature nan --curriculum dr", ("--plr-temperature nan",)),
        ("--plr-score regret", ("regret", "value_l1", "learnability")),
        ("--plr-score regret --curriculum dr", ("regret", "value_l1")),
        ("--plr-score-transform ranks", ("ranks", "rank", "match_rank")),
        ("--plr-score-transform match_rank", ("value_l1", "match_rank", "learnability")),
        ("--num-levels 2000000000", ("--num-levels 2000000000", "dr")),
        (f"--eval-seed {2**64}", (f"--eval-seed {2**64}",)),
        ("--plr-staleness-coef -0.1", ("--plr-staleness-coef -0.1",)),
        ("--plr-rho 1.5", ("--plr-rho 1.5",)),
        ("--ent-coef -0.01", ("--ent-coef -0.01",)),
        ("--ent-coef nan", ("--ent-coef nan",)),
        ("--reward-gamma 1", ("--reward-gamma 1.0",)),
    ],
)
def test_wrong_arguments_are_named_with_what_works(script, arguments, words, capsys):
    shown = refusal(script, arguments, capsys)
    for word in words:
        assert word in shown


def test_unknown_environments_are_named_with_known_ones(capsys):
    for script, env_id, known in (
        (ppo_plr, "bigfsh", "bigfish"),
        (ppo_plr_minigrid, "MiniGrid-Emty-5x5-v0", "MiniGrid-Empty-5x5"),
    ):
        shown = refusal(script, f"--env-id {env_id}", capsys)
        assert env_id in shown and known in shown


@pytest.mark.parametrize("script", [ppo_plr, ppo_plr_minigrid], ids=["procgen", "minigrid"])
def test_minibatches_need_not_divide_the_batch(script, tmp_path):
    flags = "--num-envs 2 --num-steps 9 --num-minibatches 4 --total-timesteps 18 --num-levels 3 --final-eval-episodes 1"
    args = tyro.cli(script.Args, args=[*flags.split(), "--run-dir", str(tmp_path), "--progress", "none"])
    script.train(args)
    (path,) = tmp_path.rglob("metrics.jsonl")
    assert json.loads(path.read_text())["losses/gradient_steps"] == 4 * 3
