"""Neural MMO, in an environment of its own (its packages are older than ours), made and used by:

    python3.11 -m venv .venv-nmmo && . .venv-nmmo/bin/activate
    pip install pip==22.3.1 setuptools==59.8.0 wheel "cython<3.1" numpy==1.26.4
    pip install --no-use-pep517 --no-build-isolation vec-noise==1.1.4
    pip install --no-use-pep517 --no-build-isolation --no-deps nmmo==2.1.1
    pip install scipy imageio ordered-set==4.1.0 pettingzoo==1.24.1 gymnasium==0.29.1 psutil tqdm dill py \
        pytest sortedcontainers
    python -m pytest tests/test_nmmo.py
"""

import numpy as np
import pytest

from curricula.task_wrappers import NeuralMMOTaskWrapper

nmmo = pytest.importorskip("nmmo", reason="Neural MMO needs its own environment: the commands are in this file")


def make(tmp_path, goal=False):
    from nmmo.task import base_predicates
    from nmmo.task.task_spec import TaskSpec

    specs = [
        TaskSpec(base_predicates.TickGE, {"num_tick": 8}),
        TaskSpec(base_predicates.StayAlive, {}),
        TaskSpec(base_predicates.DistanceTraveled, {"dist": 5}),
    ]
    config = nmmo.config.Small()
    config.set("PATH_CWD", str(tmp_path))
    config.set("PLAYER_N", 8)
    config.set("HORIZON", 12)
    config.set("MAP_N", 2)
    return NeuralMMOTaskWrapper(nmmo.Env(config), specs, goal), [spec.name for spec in specs]


def play(env, **arguments):
    """Tasks as told to the agents, completion and the sum of rewards after each step."""
    env.reset(**arguments)
    told, completions, rewards = set(), [], []
    while env.agents:
        obs, reward, _, _, infos = env.step({})
        told |= {infos[agent]["task"] for agent in obs}
        completions.append(infos[next(iter(obs))]["task_completion"])
        rewards.append(sum(reward.values()))
    return told, completions, rewards


def test_predicate_tasks_are_swapped_at_reset(tmp_path):
    env, (ticks, alive, walk) = make(tmp_path)
    assert env.task_space.tasks == [ticks, alive, walk] and len(env.possible_agents) == 8
    told, completions, rewards = play(env, new_task=ticks, seed=1)
    assert told == {ticks} and len(completions) == 12
    np.testing.assert_allclose(completions, np.minimum(np.arange(1, 13) / 8, 1), atol=1e-6)
    np.testing.assert_allclose(sum(rewards), 8, atol=1e-5)  # 1 for each agent: nobody dies so soon
    told, completions, rewards = play(env, new_task=alive, seed=1)
    assert told == {alive} and completions == [1.0] * 12 and rewards[0] == 8 and sum(rewards[1:]) == 0
    told, completions, _ = play(env, new_task=walk, seed=1)
    assert told == {walk} and set(completions) == {0.0}  # nobody moves
    assert play(env)[0] == {walk} and play(env, new_task=ticks)[1][-1] == 1  # again the same; as new
    with pytest.raises(ValueError, match="cannot encode 'fly'"):
        env.reset(new_task="fly")


def test_seed_options_and_goal_are_passed_on(tmp_path):
    env, (ticks, alive, _) = make(tmp_path, goal=True)
    first, infos = env.reset(new_task=alive, seed=3, options={"map_id": 2})
    again, _ = env.reset(seed=3, options={"map_id": 2})
    for agent in env.possible_agents:
        assert first[agent]["goal"].tolist() == [0, 1, 0] and infos[agent]["task"] == alive
        assert np.array_equal(first[agent]["Tile"], again[agent]["Tile"])
        assert "goal" in env.observation_space(agent).spaces
    kept = {agent: first[agent]["Tile"].copy() for agent in env.possible_agents}
    other, _ = env.reset(seed=4, options={"map_id": 1})
    for agent, tiles in kept.items():  # nmmo reuses its arrays
        assert np.array_equal(first[agent]["Tile"], tiles) and not np.array_equal(other[agent]["Tile"], tiles)


def test_twenty_resets_with_new_tasks_keep_no_predicate(tmp_path):
    """SYN-14."""
    import gc

    from nmmo.task.predicate_api import Predicate

    env, tasks = make(tmp_path)

    def alive(resets):
        for i in range(resets):
            env.reset(new_task=tasks[i % 3])
            env.step({})
        gc.collect()
        return sum(isinstance(thing, Predicate) for thing in gc.get_objects())

    assert alive(3) == alive(20)
