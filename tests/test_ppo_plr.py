"""The parts of algos/ppo_plr.py that are its own: learning in pieces, dealing levels, evaluation, arguments."""

import math

import numpy as np
import pytest
import torch

from algos import ppo_plr

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
    new = agent.evaluate_actions(picked.pop("obs"), picked.pop("actions"))
    loss, parts = ppo_plr.ppo_loss(*new, *picked.values(), *COEFS)
    loss.backward()
    whole = gradient(agent).clone()

    found = []
    for threads in (1, 2, 3):
        pieces = ppo_plr.Pieces(agent, 7, threads)
        summed = pieces.gradients(flat, rows, COEFS)
        found.append(gradient(agent).clone())
        assert (found[-1] - whole).abs().max() < 2e-5 * whole.abs().max()
        assert all(summed[name].item() == pytest.approx(parts[name].item(), abs=1e-5) for name in parts)
        logits, value = pieces.forward(flat["obs"])
        torch.testing.assert_close(logits, agent(flat["obs"])[0].detach(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(value, agent(flat["obs"])[1].detach(), atol=1e-5, rtol=1e-4)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_networks_have_the_published_size_and_read_pixels_as_fractions():
    impala, nature = (ppo_plr.Agent((64, 64, 3), 15, network) for network in ("impala", "nature"))
    assert sum(p.numel() for p in impala.parameters()) == 626_256
    assert sum(p.numel() for p in nature.parameters()) == 342_448
    obs = batch(2)["obs"]
    features = nature.network(obs.permute(0, 3, 1, 2).float() / 255)
    torch.testing.assert_close(nature(obs)[0], nature.policy(features))
    grid = ppo_plr.Agent((7, 7, 3), 7)
    assert grid(torch.zeros(5, 7, 7, 3, dtype=torch.uint8))[0].shape == (5, 7)


def test_act_samples_from_the_policy_and_reports_its_log_probability():
    torch.manual_seed(0)
    agent = ppo_plr.Agent((64, 64, 3), 4, "nature")
    with torch.no_grad():
        agent.policy.bias += torch.tensor([0.0, 1.0, -1.0, 0.5])
    obs = batch(1)["obs"].expand(4000, -1, -1, -1)[:4000]
    generator = torch.Generator().manual_seed(1)

    def forward(obs):  # one image: the network need not see it 4,000 times
        logits, value = agent(obs[:1])
        return logits.expand(len(obs), -1), value.expand(len(obs))

    actions, logprobs, _, logits = agent.act(obs, generator, forward)
    p = np.exp(logits[0].numpy() - np.log(np.exp(logits[0].numpy()).sum()))
    frequencies = np.bincount(actions.numpy(), minlength=4) / 4000
    assert np.abs(frequencies - p).max() < 4 * math.sqrt(0.25 / 4000)
    np.testing.assert_allclose(logprobs.numpy(), np.log(p)[actions.numpy()], rtol=1e-5)
    assert agent.act(obs[:1])[0].item() == p.argmax()


def make_dealer(num_envs, curriculum):
    return ppo_plr.Dealer(curriculum, ppo_plr.SyncQueue(num_envs), num_envs)


def test_dealer_keeps_a_task_ahead_and_hands_out_draws_in_order():
    curriculum = ppo_plr.DomainRandomization(50, seed=3)
    expected = ppo_plr.DomainRandomization(50, seed=3).sample(9)
    dealer, stats = make_dealer(2, curriculum), ppo_plr.EpisodeStats(2)
    for env_id in (0, 0, 1, 1):
        dealer.deal(env_id)
    assert [dealer.queue.get_task(i) for i in (0, 1)] == [expected[0], expected[2]]
    for env_id in (1, 0):  # both end in one step; the draws go by environment
        dealer.queue.put_episode(env_id, 0, 1.0 + env_id, 10, 0.0)
    dealer.collect(stats)
    assert stats.finished == [(1.0, 10), (2.0, 10)] and stats.total == 2
    assert [dealer.queue.get_task(0) for _ in range(2)] == [expected[1], expected[4]]
    assert [dealer.queue.get_task(1) for _ in range(2)] == [expected[3], expected[5]]


def test_robust_plr_learns_from_an_episode_only_if_its_level_had_a_score_when_drawn():
    curriculum = ppo_plr.PrioritizedLevelReplay(4, robust=True, rho=0.0, seed=0)
    dealer, stats = make_dealer(1, curriculum), ppo_plr.EpisodeStats(1)
    dealer.deal(0)
    dealer.deal(0)
    assert dealer.learns.tolist() == [[False, False]]
    state = curriculum.state_dict()
    state["unseen"][:], state["scores"][:] = 0, 1.0
    curriculum.load_state_dict(
        state
    )  # now all levels have a score, yet the two that were drawn before stay as they were
    seen = []
    for _ in range(3):
        seen.append(bool(dealer.learns[0, 0]))
        dealer.queue.put_episode(0, dealer.queue.get_task(0), 0.0, 1, 0.0)
        dealer.collect(stats)
    assert seen == [False, False, True]
    plain = make_dealer(1, ppo_plr.PrioritizedLevelReplay(4, seed=0))
    plain.deal(0)
    assert plain.learns.all()


def test_dealer_resumes_to_the_same_tasks():
    dealer, stats = make_dealer(2, ppo_plr.PrioritizedLevelReplay(6, robust=True, seed=5)), ppo_plr.EpisodeStats(2)
    for env_id in (0, 0, 1, 1):
        dealer.deal(env_id)
    state = ppo_plr.pack(dealer.state_dict())
    other = make_dealer(2, ppo_plr.PrioritizedLevelReplay(6, robust=True, seed=99))
    other.load_state_dict(state)
    tasks = []
    for d in (dealer, other):
        played = []
        for _ in range(5):
            for env_id in (0, 1):
                played.append(d.queue.get_task(env_id))
                d.queue.put_episode(env_id, played[-1], 0.0, 1, 0.0)
            played.append(d.learns.tolist())
            d.collect(stats)
        tasks.append(played)
    assert tasks[0] == tasks[1]


def test_evaluation_levels_are_disjoint_from_training_and_the_same_each_time():
    args = ppo_plr.Args(env_id="bigfish", network="nature", num_levels=30, start_level=100, num_minibatches=8)
    torch.manual_seed(0)
    agent = ppo_plr.Agent((64, 64, 3), 15, "nature")
    with torch.no_grad():  # a policy that swims down: short episodes
        agent.policy.bias[3] += 50
    before = torch.get_rng_state()
    rows = ppo_plr.evaluate(agent, args, 5)
    assert torch.equal(torch.get_rng_state(), before)
    assert rows == ppo_plr.evaluate(agent, args, 5)
    training = set(range(100, 130))
    assert not {row["level"] for row in rows if row["split"] == "eval"} & training
    assert {row["level"] for row in rows if row["split"] == "eval_train"} <= training
    assert [row["split"] for row in rows].count("eval") == [row["split"] for row in rows].count("eval_train") == 5
    summary = ppo_plr.summarize(rows, args)
    mean = np.mean([row["return"] for row in rows if row["split"] == "eval"])
    assert summary["eval/return_mean"] == pytest.approx(mean)
    assert summary["eval/return_normalized"] == pytest.approx((mean - 1) / 39)
    assert summary["eval/generalization_gap"] == pytest.approx(summary["eval_train/return_mean"] - mean)


def test_evaluation_does_not_list_two_billion_levels():
    args = ppo_plr.Args(env_id="bigfish", curriculum="dr", num_levels=2_000_000_000, start_level=7)
    agent = ppo_plr.Agent((64, 64, 3), 15, "nature")
    with torch.no_grad():
        agent.policy.bias[3] += 50
    levels = [row["level"] for row in ppo_plr.evaluate(agent, args, 4) if row["split"] == "eval_train"]
    assert len(set(levels)) == 4 and all(7 <= level < 2_000_000_007 for level in levels)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"env_id": "bigfsh"}, ("bigfsh", "bigfish")),
        ({"env_id": "MiniGrid-Emty-5x5-v0"}, ("MiniGrid-Emty-5x5-v0", "MiniGrid-Empty-5x5-v0")),
        ({"num_levels": 0}, ("num-levels", "0")),
        ({"start_level": -1}, ("start-level", "-1")),
        ({"num_workers": 65}, ("num-workers", "65", "64")),
        ({"plr_temperature": 0.0}, ("temperature", "0.0")),
        ({"plr_temperature": math.nan}, ("temperature", "nan")),
        ({"plr_score": "regret"}, ("regret", "value_l1")),
        ({"plr_score": "regret", "curriculum": "dr"}, ("regret", "value_l1")),
        ({"plr_temperature": math.nan, "curriculum": "dr"}, ("temperature", "nan")),
        ({"plr_score_transform": "match_rank"}, ("value_l1", "match_rank", "learnability")),
        ({"num_levels": 2_000_000_000}, ("num-levels", "2000000000", "dr")),
        ({"eval_seed": 2**64}, ("eval-seed", str(2**64))),
        ({"plr_staleness_coef": -0.1}, ("staleness_coef", "-0.1")),
        ({"plr_rho": 1.5}, ("rho", "1.5")),
        ({"ent_coef": -0.01}, ("ent-coef", "-0.01")),
        ({"ent_coef": math.nan}, ("ent-coef", "nan")),
        ({"reward_gamma": 1.0}, ("reward-gamma", "1.0")),
        ({"num_minibatches": 7}, ("num-minibatches", "7", "16384", "try 8")),
        ({"total_timesteps": 1000}, ("total-timesteps", "1000", "16384")),
    ],
)
def test_wrong_arguments_are_named_with_what_works(change, words):
    with pytest.raises(ValueError) as error:
        ppo_plr.Args(**change)
    for word in words:
        assert word in str(error.value)
