"""PLR from the environments' steps: the scores of the central form, by an agent that training cannot touch."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete, Tuple

from curricula import PrioritizedLevelReplay, TaskSpace
from curricula.plr_async import AsyncPrioritizedLevelReplay


def linear(agent, obs):
    return obs @ agent["w"]


def make(num_tasks=5, agent=None, get_value=linear, **options):
    agent = agent or {"w": np.array([1.0, -0.5])}
    return AsyncPrioritizedLevelReplay(num_tasks, agent, get_value, gamma=0.9, gae_lambda=0.8, seed=1, **options)


def episode(rng, task, length, truncated=False):
    """The steps of an episode, as curricula get them, and all its observations (length + 1, 2)."""
    obs, rewards = rng.normal(size=(length + 1, 2)), rng.normal(size=length)
    steps = [(task, obs[t], rewards[t], False, False, {}, 0.0) for t in range(length)]
    steps[-1] = (task, obs[length - 1], rewards[-1], not truncated, truncated, {"final_obs": obs[length]}, 1.0)
    return steps, obs


def mean_abs_advantage(rewards, values, terminated, gamma=0.9, gae_lambda=0.8):
    total, advantage = 0.0, 0.0
    for t in reversed(range(len(rewards))):
        last = t == len(rewards) - 1
        following = 0.0 if last and terminated else values[t + 1]
        advantage = rewards[t] + gamma * following - values[t] + (0 if last else gamma * gae_lambda * advantage)
        total += abs(advantage)
    return total / len(rewards)


@pytest.mark.parametrize("num_steps", [1, 2, 7, 256])
@pytest.mark.parametrize("truncated", [False, True])
def test_the_score_is_the_mean_absolute_advantage_of_the_whole_episode(num_steps, truncated):
    sizes, w = [], np.array([1.0, -0.5])
    plr = make(num_steps=num_steps, get_value=lambda agent, obs: sizes.append(len(obs)) or linear(agent, obs))
    for task, length in ((3, 1), (0, 6), (2, 7), (4, 20)):
        steps, obs = episode(np.random.default_rng(task), task, length, truncated)
        plr.update_on_step_batch(steps, env_id=task)
        expected = mean_abs_advantage([step[2] for step in steps], obs @ w, not truncated)
        assert plr.scores[task] == pytest.approx(expected, abs=1e-12)
    assert plr.unseen.tolist() == [False, True, False, False, False]
    assert max(sizes) <= num_steps + 1  # the final observation comes on top


def test_it_agrees_with_the_central_form_also_when_environments_interleave():
    rng, plr, central = np.random.default_rng(0), make(num_steps=3), PrioritizedLevelReplay(5, seed=1)
    (a, obs_a), (b, obs_b) = episode(rng, 1, 6), episode(rng, 2, 6)
    for t in range(0, 6, 2):
        plr.update_on_step_batch(a[t : t + 2], env_id=0)
        plr.update_on_step_batch(b[t : t + 2], env_id=1)
    values = np.stack([obs_a, obs_b], axis=1) @ np.array([1.0, -0.5])
    rewards, tasks = np.array([[x[2], y[2]] for x, y in zip(a, b)]), np.tile([1, 2], (6, 1))
    dones = np.zeros((7, 2), bool)
    dones[[0, -1]] = True
    central.update_from_rollout(tasks, rewards, values, None, dones, 0.9, 0.8)
    assert np.allclose(plr.scores, central.scores, atol=1e-12) and plr.scores[1] != plr.scores[2]


def test_a_perfect_critic_scores_zero_and_length_does_not_count():
    remaining = lambda agent, obs: obs[:, 0]  # noqa: E731
    plr = AsyncPrioritizedLevelReplay(3, None, remaining, gamma=1.0, gae_lambda=0.95)
    for task, length, error in ((0, 9, 0.0), (1, 2, 1.0), (2, 6, 1.0)):
        # reward 1 a step; the critic of tasks 1 and 2 is one too low everywhere but at the end: only the last step errs
        steps = [(task, np.array([length - t - error]), 1.0, False, False, {}, 0.0) for t in range(length)]
        steps[-1] = (*steps[-1][:3], True, False, {"final_obs": np.array([5.0])}, 1.0)
        plr.update_on_step_batch(steps, env_id=0)
    assert plr.scores[0] == 0
    decays = [np.mean(0.95 ** np.arange(length)) for length in (2, 6)]
    assert plr.scores[1:] == pytest.approx(decays, abs=1e-12)


def test_training_does_not_change_what_scores_are_made_with():
    net = torch.nn.Linear(2, 1)
    value = lambda net, obs: net(torch.as_tensor(obs, dtype=torch.float32))[:, 0]  # noqa: E731
    plr, (steps, obs) = make(agent=net, get_value=value), episode(np.random.default_rng(0), 0, 5)
    before = value(net, obs).detach().numpy()
    with torch.no_grad():
        net.weight += 1
    rewards = [step[2] for step in steps]
    plr.update_on_step_batch(steps, env_id=0)
    assert plr.scores[0] == pytest.approx(mean_abs_advantage(rewards, before, True), abs=1e-6)
    plr.update_agent(net)
    plr.update_on_step_batch(steps, env_id=0)
    assert plr.scores[0] == pytest.approx(mean_abs_advantage(rewards, value(net, obs).detach().numpy(), True), abs=1e-6)


def test_scores_of_the_policy_read_the_logits_and_leave_out_the_final_observation():
    policy = lambda agent, obs: (obs[:, 0], np.stack([obs[:, 0], obs[:, 1], 0 * obs[:, 0]], 1))  # noqa: E731
    plr, (steps, obs) = make(get_value=policy, score="least_confidence"), episode(np.random.default_rng(0), 4, 5)
    plr.update_on_step_batch(steps, env_id=0)
    p = np.exp(np.c_[obs, np.zeros(6)])[:5]
    assert plr.scores[4] == pytest.approx(np.mean(1 - (p / p.sum(1, keepdims=True)).max(1)), abs=1e-12)


def test_observations_may_be_dicts_and_tasks_vectors():
    space = TaskSpace(MultiDiscrete([2, 3]))
    plr = make(space, get_value=lambda agent, obs: obs["a"] + obs["b"][0][:, 0])
    obs = [{"a": float(t), "b": (np.array([t, 0]),)} for t in range(4)]
    task = np.array([1, 2])
    steps = [(task, obs[t], 1.0, False, False, {}, 0.0) for t in range(2)]
    plr.update_on_step_batch([*steps, (task, obs[2], 1.0, False, True, {"final_obs": obs[3]}, 0.0)], env_id=0)
    expected = mean_abs_advantage([1, 1, 1], [0, 2, 4, 6], False)
    assert plr.scores[5] == pytest.approx(expected) and (~plr.unseen).sum() == 1


def test_an_episode_is_scored_for_each_of_its_tasks():
    w, (steps, obs) = np.array([1.0, -0.5]), episode(np.random.default_rng(0), 0, 7)
    for num_steps in (1, 2, 256):
        plr = make(num_steps=num_steps)
        plr.update_on_step_batch([(1, *step[1:]) for step in steps[:2]], env_id=0)
        plr.update_task_progress(1, 1.0, env_id=0)  # completed: nothing follows
        plr.update_on_step_batch([(2, *step[1:]) for step in steps[2:5]], env_id=0)
        plr.update_task_progress(2, 0.5, env_id=0)  # a measurement, no more
        plr.update_on_step_batch([(3, *step[1:]) for step in steps[5:]], env_id=0)  # changed by the environment
        for task, part, terminated in ((1, slice(0, 3), True), (2, slice(2, 6), False), (3, slice(5, 8), True)):
            rewards = [step[2] for step in steps[part.start : part.stop - 1]]
            expected = mean_abs_advantage(rewards, obs[part] @ w, terminated)
            assert plr.scores[task] == pytest.approx(expected, abs=1e-12)
        assert plr.unseen.tolist() == [True, False, False, False, True]


def test_an_episode_that_is_over_without_an_end_is_forgotten():
    plr, (steps, _) = make(), episode(np.random.default_rng(0), 0, 7)
    plr.update_on_step_batch(steps[:3], env_id=4)
    plr.update_on_end(range(3, 5), 0)
    plr.update_on_step_batch(steps[4:], env_id=4)
    alone = make()
    alone.update_on_step_batch(steps[4:], env_id=4)
    assert plr.scores[0] == alone.scores[0]


def test_robust_plr_trains_on_replayed_levels_alone_and_plays_the_new_ones_itself():
    """CUR-12."""
    rng, played = np.random.default_rng(0), []

    def play(agent, task):
        assert agent is not given and agent["w"][0] == 1.0
        played.append(task)
        return episode(rng, task, 4)[0]

    given = {"w": np.array([1.0, -0.5])}
    plr = make(200, given, robust=True, play=play, rho=0.5)
    first = plr.sample()[0]
    assert len(played) >= 100 and len(set(played)) == len(played)  # the share rho, each new level once
    assert first in played
    for task in plr.sample(50):
        assert task in played and not plr.is_unseen(task)
    assert sorted(played) == np.flatnonzero(~plr.unseen).tolist()


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="robust=True, play=None"):
        make(robust=True)
    with pytest.raises(ValueError, match="robust=False, play="):
        make(play=print)
    with pytest.raises(ValueError, match="num_steps=0"):
        make(num_steps=0)
    for space in (Dict(a=Discrete(2)), Tuple([Discrete(2), MultiDiscrete([2, 2])]), Tuple([Tuple([Discrete(2)])])):
        with pytest.raises(ValueError, match="levels are numbers or rows of them, found TaskSpace"):
            make(TaskSpace(space))
    make(TaskSpace(Tuple([Discrete(2), Discrete(3)])))
    with pytest.raises(ValueError, match="countable"):
        make(TaskSpace(Box(0, 1)))
    steps, _ = episode(np.random.default_rng(0), 1, 3)
    with pytest.raises(ValueError, match="final_obs"):
        make().update_on_step_batch([(*steps[-1][:5], {}, 1.0)], env_id=0)
    with pytest.raises(ValueError, match=r"shape \(1, 4\) for 4 observations"):
        make(get_value=lambda agent, obs: obs[None, :, 0]).update_on_step_batch(steps, env_id=0)
    with pytest.raises(ValueError, match="no whole episode"):
        make(robust=True, play=lambda agent, task: steps[:-1]).sample()
    with pytest.raises(ValueError, match="outside"):
        make().update_on_step_batch(episode(np.random.default_rng(0), 7, 3)[0], env_id=0)
