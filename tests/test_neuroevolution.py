"""algos/neuroevolution.py: variation, selection, games and training in one batch, lineage, exact resume."""

import json
import math
import signal
from collections import Counter
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_runs import TINY, Ended, Run, assert_same, parse, refusal, restored_signals, start, train, wait_for_updates  # noqa: F401

from algos import neuroevolution as ne

CARTPOLE = (
    "--env-id CartPole-v1 --population-size 5 --num-children 4 --num-elites 2 --fitness-episodes 2 --hidden-size 4"
)
TINY[ne] = f"{CARTPOLE} --eval-interval 0 --eval-episodes 2 --checkpoint-interval 2 --progress none"
TRAINED = "--train-steps 64 --train-envs 2 --num-steps 16 --num-minibatches 2 --update-epochs 1"
LAYERS = [(4, 6), (5, 4), (3, 5)]  # (out, in)
OPERATORS = "best", "split", "split_layer", "split_layers", "sbx", "sbx_tensor"


def genome(rng):
    return [rng.standard_normal(s, np.float32) for shape in LAYERS for s in (shape, shape[:1])]


def stacked(networks):
    return [
        torch.stack([x.detach() for x in arrays]) for arrays in zip(*(network.parameters() for network in networks))
    ]


def lineage(run):
    return run.rows("lineage.jsonl")


# ---- Variation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
def test_children_have_their_parents_shapes_and_parents_stay_as_they_are(operator):
    rng = np.random.default_rng(1)
    a, b = genome(rng), genome(rng)
    before = [x.copy() for x in (*a, *b)]
    child = ne.mutated(ne.crossed(a, b, operator, 20.0, rng), 0.1, rng)
    assert [(x.shape, x.dtype) for x in child] == [(x.shape, x.dtype) for x in a]
    for x in ne.crossed(a, b, operator, 20.0, rng):
        x += 1
    assert all((x == y).all() for x, y in zip(before, (*a, *b)))


@pytest.mark.parametrize("operator", OPERATORS[1:4])
def test_cuts_take_whole_output_channels_of_both_parents(operator):
    """A weight's row and its bias come from the same parent; where the cuts are tells the operators apart."""
    rng, first = np.random.default_rng(2), Counter()
    a, b = [np.zeros_like(x) for x in genome(rng)], [np.ones_like(x) for x in genome(rng)]
    patterns = set()
    for _ in range(400):
        child = ne.crossed(a, b, operator, 20.0, rng)
        for weight, bias in zip(child[::2], child[1::2]):
            assert (weight == bias[:, None]).all()
        channels = np.concatenate(child[1::2])
        assert set(channels) == {0, 1}  # both parents
        patterns.add(tuple(channels))
        first[channels[0]] += 1
    assert 150 < first[0] < 250
    cuts = {tuple(np.flatnonzero(np.diff(pattern)) + 1) for pattern in patterns}
    if operator == "split":
        assert cuts == {(4,), (9,)}  # between layers of 4, 5 and 3 channels
    elif operator == "split_layer":
        assert cuts == {(k,) for k in range(1, 12)}
    else:  # each layer at one of its own
        assert len(patterns) == 2 * 3 * 4 * 2
        assert {len({*p[:4]}) + len({*p[4:9]}) + len({*p[9:]}) for p in patterns} == {6}


def test_best_is_the_fitter_parent_s_copy():
    rng = np.random.default_rng(3)
    a, b = genome(rng), genome(rng)
    assert all((x == y).all() for x, y in zip(ne.crossed(a, b, "best", 20.0, rng), a))


def test_sbx_is_deb_s_and_by_tensors_it_stays_on_the_line():
    """Deb and Agrawal 1995, without bounds, from the same draws: c = ((1 + beta) a + (1 - beta) b) / 2."""
    rng = np.random.default_rng(4)
    a, b = genome(rng), genome(rng)
    child, draws = ne.crossed(a, b, "sbx", 5.0, np.random.default_rng(5)), np.random.default_rng(5)
    for x, y, c in zip(a, b, child):
        r = draws.random(x.shape)
        beta = np.array([(2 * u) ** (1 / 6) if u <= 0.5 else (1 / (2 * (1 - u))) ** (1 / 6) for u in r.ravel()])
        beta = beta.reshape(x.shape) * draws.choice([-1, 1], x.shape)
        np.testing.assert_allclose(c, ((1 + beta) * x + (1 - beta) * y) / 2, atol=1e-5)
    signs, factors = Counter(), []
    for _ in range(200):
        child = ne.crossed(a, b, "sbx_tensor", 5.0, rng)
        found = [((2 * c - x - y) / (x - y)).astype(float) for x, y, c in zip(a, b, child)]
        for factor in found:
            np.testing.assert_allclose(factor, np.median(factor), rtol=5e-2, atol=5e-3)  # one for the whole array
        factors += [abs(np.median(factor)) for factor in found]
        signs.update(np.sign([np.median(factor) for factor in found]))
        assert len({round(float(np.median(factor)), 4) for factor in found}) > 1  # each array its own
    assert 0.45 < np.mean(np.array(factors) < 1) < 0.55 and 500 < signs[1] < 700  # contracts as often as it expands
    same = ne.crossed(a, a, "sbx", 5.0, rng)
    assert all(np.allclose(x, y) for x, y in zip(same, a))


def test_mutation_is_gaussian():
    rng = np.random.default_rng(6)
    (x,) = ne.mutated([np.full((300, 300), 7, np.float32)], 0.05, rng)
    assert abs(x.mean() - 7) < 1e-3 and abs(x.std() - 0.05) < 1e-3 and x.dtype == np.float32
    assert abs(np.mean(abs(x - 7) < 0.05) - math.erf(math.sqrt(0.5))) < 0.01


# ---- Selection -------------------------------------------------------------------------------------------------------


def test_parents_are_two_and_the_fitter_of_two_each():
    """EVO-04: populations of 2 and of odd sizes. The best of 5 is drawn into the first tournament by 2 of 5."""
    rng, first = np.random.default_rng(7), Counter()
    fitness = np.array([3.0, 1.0, 5.0, 2.0, 4.0])
    for _ in range(3000):
        a, b = ne.draw_parents(fitness, rng)
        assert a != b and fitness[a] > fitness[b]
        first[a] += 1
        first["b is worst"] += b == 1
    assert first["b is worst"] == 0 and 0.55 < first[2] / 3000 < 0.75  # 2/5 + 3/5 of about 2/4 = 0.7 at most
    assert ne.draw_parents(np.array([1.0, 2.0]), rng) == [1, 0]


def test_nan_never_wins():
    rng, nan = np.random.default_rng(8), math.nan
    fitness = np.array([nan, 1.0, nan, 2.0])
    assert all(set(ne.draw_parents(fitness, rng)) == {1, 3} for _ in range(50))
    assert ne.draw_parents(np.array([nan, 1.0, nan]), rng) == [1, 1]
    assert ne.survivors(fitness, np.zeros(4, bool), 3).tolist()[:2] == [3, 1]


def test_duplicates_stay_only_where_room_is_left():
    """EVO-05: ten equal genomes, of which the best counts; the others come after all but NaN."""
    x = np.zeros((12, 3), np.float32)
    x[10], x[11] = 1, 2
    duplicate = ne.repeated([x, x[:, :1]])
    assert duplicate.tolist() == [False] + [True] * 9 + [False] * 2
    fitness = np.array([9.0] * 10 + [1.0, math.nan])
    assert ne.survivors(fitness, duplicate, 2).tolist() == [0, 10]
    assert ne.survivors(fitness, duplicate, 12).tolist() == [0, 10, *range(1, 10), 11]


def test_duplicates_are_counted_in_a_run(tmp_path):
    """EVO-05: without mutation, copies of 5 genomes; those that stay are different ones as far as there are."""
    run = train(ne, tmp_path, "--mutation-std 0 --eval-max-steps 60 --total-timesteps 3000")
    counts, found = [row["evolution/duplicates"] for row in run.rows()], torch.load(run.checkpoints()[-1])["population"]
    assert counts[0] == 0 and sum(counts) > 0 and len(counts) > 2
    assert len({x.numpy().tobytes() for x in found["genome"][0]}) == min(5, 6 - counts[-1])


# ---- Games and training in one batch ---------------------------------------------------------------------------------


def test_forward_is_agent_s_of_each_member():
    torch.manual_seed(1)
    networks, obs = [ne.Agent((10,), 3, 8) for _ in range(4)], torch.randn(4, 5, 10)
    logits, values = ne.forward(stacked(networks), obs)
    for i, network in enumerate(networks):
        alone = network(obs[i])
        torch.testing.assert_close(logits[i], alone[0])
        torch.testing.assert_close(values[i], alone[1])


@pytest.mark.parametrize("env_id, obs", [("VectorPong", 10), ("CartPole-v1", 4)])
def test_all_in_one_batch_play_as_each_alone(env_id, obs):
    """However unequal the lengths, which are cut out of the batch on the way; a member of NaN has no returns."""
    torch.manual_seed(2)
    networks = [ne.Agent((obs,), 3 if obs == 10 else 2, 8) for _ in range(5)]
    for network in networks:
        for x in network.parameters():
            x.data += torch.randn_like(x)
    networks[3].net[0].weight.data[0, 0] = math.nan
    seeds = np.random.SeedSequence(3).spawn(3)
    returns, lengths = ne.play(stacked(networks), ne.make_games(env_id, seeds, 5), (5, 3), 27_000)
    assert np.isnan(returns[3]).all()
    assert lengths[[0, 1, 2, 4]].std() > 1
    for i in (0, 1, 2, 4):
        for e, seed in enumerate(seeds):
            games, ended, total, frames = ne.make_games(env_id, [seed], 1), False, 0.0, 0
            if env_id == "VectorPong" and e % 2:  # the seats take turns
                games.seats[:] = 1
                games.obs = games.own(games.pong.observations())
            while not ended:
                with torch.no_grad():
                    action = networks[i](torch.as_tensor(games.obs))[0].argmax(-1).numpy()
                _, reward, terminated, truncated, _ = games.step(action)
                ended, total, frames = (terminated | truncated)[0], total + reward[0], frames + 1
            assert (returns[i, e], lengths[i, e]) == (total, frames)


def test_gymnasium_s_games_are_gymnasium_s():
    """Seeds for every episode, truncation told from termination, the true last observation."""
    seeds = np.random.SeedSequence(4).spawn(2)
    games, rng = ne.GymGames("CartPole-v1", seeds, 2), np.random.default_rng(seeds[1])
    env = gym.make("CartPole-v1")
    for _ in range(3):
        obs, ended = env.reset(seed=int(rng.integers(2**31)))[0], False
        while not ended:
            np.testing.assert_array_equal(games.obs[1], obs)
            np.testing.assert_array_equal(games.obs[3], obs)  # the other member's
            obs, reward, terminated, truncated, _ = env.step(1)
            _, rewards, flags, cut, info = games.step(np.ones(4, int))
            assert (rewards[1], flags[1], cut[1]) == (reward, terminated, truncated)
            np.testing.assert_array_equal(info["final_obs"][1], obs)
            ended = terminated or truncated


class Fake:
    """Two games of a member: rewards by action; game 0 is truncated after step 2, game 1 terminated after step 3."""

    def __init__(self, members):
        self.members, self.t, self.obs = members, 0, np.zeros((2 * members, 3), np.float32)
        self.look()

    def look(self):
        self.obs = np.stack([np.cos(self.t + np.arange(2 * self.members) * k) for k in range(3)], 1).astype(np.float32)

    def step(self, actions):
        n = len(actions)
        self.t += 1
        self.look()
        game, final = np.arange(n) % 2, self.obs.copy() + 0.5
        truncated, terminated = (game == 0) & (self.t == 2), (game == 1) & (self.t == 3)
        return self.obs, actions + 0.1 * self.t, terminated, truncated, {"final_obs": final}


def leg_args(**changes):
    shape = {"train_envs": 2, "num_steps": 4, "train_steps": 8, "num_minibatches": 1, "update_epochs": 1}
    return SimpleNamespace(**vars(ne.Args(**shape)) | changes)


def test_a_leg_is_ppo_with_the_true_successor_s_value():
    """One member, one step of Adam, beside plain numpy and torch: truncation bootstraps from final_obs, termination
    does not."""
    torch.manual_seed(5)
    network, args = ne.Agent((3,), 2, 4), leg_args()
    leg, losses = ne.ppo_leg(
        stacked([network]), Fake(1), args, torch.Generator().manual_seed(6), np.random.default_rng(7)
    )

    generator, games, steps = torch.Generator().manual_seed(6), Fake(1), []
    with torch.no_grad():
        for _ in range(4):
            obs = torch.as_tensor(games.obs)
            logits, value = network(obs)
            action = (logits - torch.empty(1, 2, 2).exponential_(generator=generator)[0].log()).argmax(-1)
            _, reward, terminated, truncated, info = games.step(action.numpy())
            after = info["final_obs"] if truncated.any() else games.obs
            following = network(torch.as_tensor(np.where(truncated[:, None], after, games.obs)))[1].numpy()
            steps.append((obs, action, logits, value.numpy(), reward, terminated, truncated, following))
    advantages, trace = np.zeros((4, 2)), np.zeros(2)
    for t in reversed(range(4)):
        _, _, _, value, reward, terminated, truncated, following = steps[t]
        delta = reward + args.gamma * following * ~terminated - value
        trace = delta + args.gamma * args.gae_lambda * ~(terminated | truncated) * trace
        advantages[t] = trace
    obs, action, logits = (torch.cat([step[k] for step in steps]) for k in range(3))
    returns = torch.as_tensor((advantages + np.stack([s[3] for s in steps])).reshape(-1), dtype=torch.float32)
    advantage = torch.as_tensor(advantages.reshape(-1), dtype=torch.float32)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    optimizer = torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5)
    new, value = network(obs)
    policy = torch.distributions.Categorical(logits=new)
    ratio = (policy.log_prob(action) - torch.distributions.Categorical(logits=logits).log_prob(action)).exp()
    loss = -(advantage * ratio).mean() + args.vf_coef * 0.5 * ((value - returns) ** 2).mean()
    (loss - args.ent_coef * policy.entropy().mean()).backward()
    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), args.max_grad_norm)
    optimizer.step()
    for x, parameter in zip(leg, network.parameters()):
        torch.testing.assert_close(x[0], parameter, rtol=1e-4, atol=1e-6)
    assert losses["losses/grad_norm"] == pytest.approx(float(norm), rel=1e-4) and float(norm) > args.max_grad_norm


def test_members_train_as_if_they_were_alone():
    """Whatever the other one is, NaN too: the same weights to the bit."""
    torch.manual_seed(8)
    networks, found = [ne.Agent((3,), 2, 4) for _ in range(3)], []
    networks[2].net[0].bias.data[0] = math.nan
    for other in (1, 2):
        generator, rng = torch.Generator().manual_seed(9), np.random.default_rng(10)
        args = leg_args(train_steps=32, update_epochs=3, num_minibatches=2)
        weights = stacked([networks[0], networks[other]])
        found.append(ne.ppo_leg(weights, Fake(2), args, generator, rng)[0])
        assert all((x == y).all() for x, y in zip(weights[0][:1], stacked([networks[0]])[0]))  # not changed in place
    assert all(torch.equal(x[0], y[0]) and not torch.equal(x[0], n) for x, y, n in
               zip(*found, networks[0].parameters()))  # fmt: skip
    assert torch.isnan(found[1][0][1]).any() and torch.isfinite(found[0][0]).all()


def test_each_member_s_gradient_has_its_own_limit():
    gradients = [torch.tensor([[3.0, 0.0], [0.3, 0.0]]), torch.tensor([[4.0], [0.4]])]
    assert ne.clip_by_member(gradients, 1.0).tolist() == pytest.approx([5.0, 0.5])
    np.testing.assert_allclose(gradients[0], [[0.6, 0], [0.3, 0]], rtol=1e-5)
    np.testing.assert_allclose(gradients[1], [[0.8], [0.4]], rtol=1e-5)


# ---- Runs ------------------------------------------------------------------------------------------------------------


def test_stopped_runs_go_on_to_the_bit(tmp_path):
    """EVO-11, EVO-12: kill -9, then SIGTERM, each on the way; every generation once, each time from the newest."""
    flags = f"{TRAINED} --crossover sbx_tensor --inheritance baldwinian --total-timesteps 16000 --checkpoint-interval 1"
    begun = []
    for number, rc in ((signal.SIGKILL, -9), (signal.SIGTERM, 75)):
        process = start(ne, tmp_path / "stopped", flags)
        wait_for_updates(process, tmp_path / "stopped", 3)
        process.send_signal(number)
        end = Ended(process)
        assert (end.rc, end.left, end.tracebacks) == (rc, [], 0), end
        begun.append(torch.load(Run(tmp_path / "stopped").checkpoints()[-1])["update"])
    assert 0 < begun[0] < begun[1]
    stopped, straight = (train(ne, tmp_path / name, flags) for name in ("stopped", "straight"))
    assert straight.repeatable() == stopped.repeatable() and straight.rows("eval.jsonl") == stopped.rows("eval.jsonl")
    assert lineage(straight) == lineage(stopped)
    assert_same(straight.state(), stopped.state())
    generations = [row["charts/update"] - 1 for row in stopped.rows()]
    assert generations == [*range(len(generations))] and len(generations) > begun[1]
    counts = Counter(row["generation"] for row in lineage(stopped))
    assert counts == {0: 5} | {g: 6 for g in range(1, len(generations))}  # 5 first ones; then 2 elites, 4 children
    picture = (stopped.dir / "lineage.png").read_bytes()
    assert picture[:4] == b"\x89PNG" and picture == (straight.dir / "lineage.png").read_bytes()


@pytest.mark.parametrize("inheritance", ["lamarckian", "baldwinian"])
def test_what_is_inherited(inheritance, tmp_path):
    """Copies without mutation: the trained weights go on (Lamarck); the first genomes do (Baldwin), while what plays is
    trained."""
    run = train(
        ne,
        tmp_path,
        f"--mutation-std 0 --inheritance {inheritance} {TRAINED} --eval-max-steps 60 --total-timesteps 4000",
    )
    rows, state = lineage(run), torch.load(run.checkpoints()[-1])
    assert max(row["generation"] for row in rows) >= 2
    genome, weights = state["population"]["genome"], state["population"]["weights"]
    ne.Randomness(1, torch.device("cpu"))  # seeds what networks begin with
    networks = [ne.Agent((4,), 2, 4) for _ in range(5)]
    first = {x.tobytes() for x in (network.net[0].weight.detach().numpy() for network in networks)}
    found = [x.numpy().tobytes() in first for x in genome[0]]
    same = [torch.equal(x, y) for x, y in zip(genome, weights)]
    if inheritance == "lamarckian":
        assert not any(found) and all(same)
    else:
        assert all(found) and not any(same)
        assert not any(x.numpy().tobytes() in first for x in weights[0])
    champion = next(row for row in reversed(rows) if row["champion"])
    (at,) = np.flatnonzero(state["population"]["table"]["id"].numpy() == champion["individual"])
    for x, name in zip(weights, state["agent"]):
        assert torch.equal(x[at], state["agent"][name])  # the published one is what plays


def test_lineage_and_frames(tmp_path):
    """EVO-09: an age goes on along the fitter parent's line. Frames are those of training, of both evaluations, of
    elites again; their sum is global_step. Fitness and frames are what a replay finds."""
    run = train(ne, tmp_path, f"{TRAINED} --crossover split --total-timesteps 8000")
    rows, before = lineage(run), {}
    total = 0
    for generation in range(rows[-1]["generation"] + 1):
        born = [row for row in rows if row["generation"] == generation]
        total += sum(row["frames"] for row in born)
        assert {row["global_step"] for row in born} == {total}
        assert sum(row["champion"] for row in born) == 1 and sum(row["stays"] for row in born) == 5
        for row in born:
            parents = [before[parent] for parent in row["parents"]]
            assert row["age"] == row["frames"] + (parents[0]["age"] if parents else 0)
            if row["operator"] == "elite":
                assert row["parents"] == [row["individual"]] and row["fitness_before"] is None
                assert row["frames"] == row["fitness"] * 2  # CartPole: a return is a length, of two episodes
            else:
                assert row["frames"] == 64 + 2 * (row["fitness_before"] + row["fitness"])
            if row["operator"] == "split":
                assert parents[0]["fitness"] >= parents[1]["fitness"] and row["parents"][0] != row["parents"][1]
                assert all(parent["stays"] for parent in parents)
        champion = next(row for row in born if row["champion"])
        again = [row["fitness"] for row in born if row["stays"] and row["operator"] == "elite"]
        assert champion["fitness"] == max(again or [row["fitness"] for row in born])  # evaluated again, if one was
        elites = sorted((row["fitness"] for row in before.values() if row["stays"]), reverse=True)[:2]
        found = [before[row["individual"]]["fitness"] for row in born if row["operator"] == "elite"]
        assert found == elites
        before = {row["individual"]: row for row in born}
    assert run.json("result.json")["global_step"] == total == run.rows()[-1]["global_step"] >= 8000
    assert total - sum(row["frames"] for row in before.values()) < 8000  # the last generation was needed
    ids = [row["individual"] for row in rows if row["operator"] != "elite"]
    assert ids == [*range(len(ids))]


def test_a_generation_s_games_are_new_and_the_same_for_all(tmp_path, monkeypatch):
    """So an elite's fitness is drawn anew, and a lucky one does not stay."""
    seen = []
    make = ne.make_games
    monkeypatch.setattr(ne, "make_games", lambda env_id, seeds, members: seen.append((seeds, members)) or
                        make(env_id, seeds, members))  # fmt: skip
    run = train(ne, tmp_path, "--total-timesteps 5000")
    fitness = [(tuple(int(seed.generate_state(1)[0]) for seed in seeds), members) for seeds, members in seen[1:-1]]
    assert [members for _, members in fitness] == [5] + [6] * (len(fitness) - 1)
    assert len({seed for seeds, _ in fitness for seed in seeds}) == 2 * len(fitness) == 2 * len(run.rows()) > 4


@pytest.mark.parametrize("size", [2, 3, 7])
def test_population_sizes(size, tmp_path):
    """EVO-04: 2, odd ones; children fewer or more than the population."""
    words = f"--population-size {size} --num-children {2 * size - 1} --num-elites 1 --total-timesteps 4000"
    run = train(ne, tmp_path, words)
    assert len(torch.load(run.checkpoints()[-1])["population"]["table"]["id"]) == size and len(run.rows()) > 1


@pytest.mark.parametrize("words, expected", [
    ("--population-size 1", "--population-size 1: it must be a number at least 2"),
    ("--num-children 2", "--num-children 2 and --num-elites 2 do not fill --population-size 5: use 3 children or more"),
    ("--num-children 1000000", "--num-children 1000000: it must be a number between 1 and 10000"),
    ("--num-elites 9", "--num-elites 9: it must be a number between 1 and 5"),
    ("--inheritance baldwinian", "--inheritance baldwinian without training: give --train-steps"),
    ("--train-steps 64 --num-minibatches 3", "does not divide --train-envs 16 x --num-steps 64 = 1024: try 2"),
    ("--train-steps 64 --num-minibatches 1024", "less than 2 of 1024 frames a minibatch"),
    ("--mutation-std nan", "--mutation-std nan: it must be a number at least 0"),
    ("--env-id Pong-v9", "--env-id Pong-v9: "),
    ("--crossover sbx_layer", "--crossover"),
])  # fmt: skip
def test_wrong_arguments(words, expected, capsys):
    """EVO-04: a population of 1 is refused. Exit code 2."""
    with pytest.raises(SystemExit) as ended:
        parse(ne, TINY[ne], words)
    assert ended.value.code == 2
    assert expected in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_actions_in_boxes_are_refused(tmp_path):
    assert "this script takes Discrete" in refusal(ne, tmp_path, "--env-id Pendulum-v1")


def test_members_without_numbers_leave_no_children_and_none_at_all_stops_the_run(tmp_path, monkeypatch):
    """A child whose weights became NaN is out; with NaN alone the run ends and the last checkpoint stays."""
    leg, broken = ne.ppo_leg, [0, 2]

    def breaking(*arguments):
        weights, losses = leg(*arguments)
        weights[0][broken] = math.nan
        return weights, losses

    monkeypatch.setattr(ne, "ppo_leg", breaking)
    run = train(ne, tmp_path / "some", f"{TRAINED} --total-timesteps 8000")
    rows = lineage(run)
    lost = {row["individual"] for row in rows if row["fitness"] is None}
    assert len(lost) == 2 * (rows[-1]["generation"] + 1) > 4
    assert not lost & {parent for row in rows if row["operator"] == "best" for parent in row["parents"]}
    assert not any(row["champion"] for row in rows if row["fitness"] is None)
    assert all(row["evolution/not_finite"] >= 2 and row["losses/entropy"] > 0 for row in run.rows())
    assert (run.dir / "lineage.png").exists()

    broken[:] = [0, 1, 2, 3]
    monkeypatch.setattr(ne, "survivors", lambda fitness, duplicate, count: np.argsort(-fitness)[:count])
    monkeypatch.setattr(ne, "play", lambda *a: tuple(x * (math.nan if k == 0 else 1) for k, x in enumerate(PLAY(*a))))
    said = refusal(ne, tmp_path / "all", f"{TRAINED} --total-timesteps 1500")
    assert said.startswith("error: generation 0: no fitness of 5 individuals is a number")


PLAY = ne.play


def test_evaluation_leaves_training_as_it_is_and_repeats(tmp_path):
    words = "--total-timesteps 2500 --crossover split"
    plain, often = train(ne, tmp_path / "a", words), train(ne, tmp_path / "b", f"{words} --eval-interval 1")
    assert lineage(plain) == lineage(often)
    assert_same(*(run.state() | {"row": None} for run in (plain, often)))
    rows = often.rows("eval.jsonl")
    assert len(rows) == 2 * len(often.rows()) and rows[-2:] == plain.rows("eval.jsonl")
    train(ne, tmp_path / "a", f"{words} --eval-only")
    assert plain.rows("eval.jsonl") == 2 * rows[-2:] and lineage(plain) == lineage(often)


def test_pong_against_the_script(tmp_path):
    """Untrained networks lose; the evaluation's rows are games by the rules, the seats take turns."""
    words = "--env-id VectorPong --population-size 3 --num-children 2 --num-elites 1 --total-timesteps 3000 "
    run = train(ne, tmp_path, words, "--eval-episodes 4")
    rows = run.rows("eval.jsonl")
    assert all(abs(row["return"]) <= 20 and row["length"] >= 20 * 20 for row in rows) and len(rows) == 4
    assert -20 <= np.mean([row["fitness"] for row in lineage(run)]) < 0
    games = ne.PongGames(np.random.SeedSequence(1).spawn(4), 2)
    assert games.seats.tolist() == [0, 1, 0, 1] * 2
    script = [games.pong.scripted()[i, seat] for i, seat in enumerate(games.seats)]
    obs, reward, *_ = games.step(np.array(script))
    assert obs.shape == (8, 10) and (obs[:4] == obs[4:]).all() and not reward.any()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_genetic_algorithm_solves_cartpole(seed, tmp_path):
    """475 over 20 evaluation episodes."""
    args = ne.Args(env_id="CartPole-v1", seed=seed, total_timesteps=150_000, hidden_size=16, mutation_std=0.2,
                   population_size=16, num_children=24, num_elites=4, fitness_episodes=5, eval_interval=0,
                   run_dir=tmp_path, progress="none")  # fmt: skip
    assert ne.train(args)["eval/return_mean"] >= 475


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_training_between_birth_and_evaluation_helps(seed, tmp_path):
    """16k frames of PPO each give four networks 100 steps more on average."""
    args = ne.Args(env_id="CartPole-v1", seed=seed, total_timesteps=1, train_steps=16_384, gamma=0.98, vf_coef=0.01,
                   population_size=4, num_children=4, num_elites=2, fitness_episodes=3, eval_interval=0,
                   eval_episodes=1, run_dir=tmp_path, progress="none")  # fmt: skip
    ne.train(args)
    rows = [json.loads(line) for line in next(tmp_path.rglob("lineage.jsonl")).read_text().splitlines()]
    assert len(rows) == 4 and np.mean([row["fitness"] - row["fitness_before"] for row in rows]) > 100


def test_the_picture_follows_the_champion(tmp_path, monkeypatch):
    """Its line goes back through the fitter parents; rows that were lost are left out."""
    from matplotlib.axes import Axes

    row = {"operator": "split", "champion": False, "parents": []}
    rows = [row | {"generation": 0, "individual": i, "global_step": 10, "fitness": f} for i, f in ((0, 1), (1, None))]
    rows += [row | {"generation": 1, "individual": 2, "parents": [0, 1], "global_step": 20, "fitness": 3}]
    rows += [
        row | {"generation": 2, "individual": 2, "parents": [2], "global_step": 30, "fitness": 2, "champion": True}
    ]
    plot, lines = Axes.plot, []
    monkeypatch.setattr(Axes, "plot", lambda self, *a, **o: lines.append(a) or plot(self, *a, **o))
    assert ne.draw_lineage(rows)[:4] == b"\x89PNG"
    assert lines[0] == ((30, 20, 10), (2, 3, 1))
    ne.draw_lineage(rows[2:])
    assert lines[4] == ((30, 20), (2, 3))


def test_no_generation_is_larger_than_its_arguments_say(tmp_path):
    """batch_size, by which reports know how far beyond its budget a run's last evaluation may lie."""
    for name, words in (("plain", ""), ("trained", TRAINED)):
        run = train(ne, tmp_path / name, words, "--total-timesteps 3000 --eval-max-steps 60")
        steps = [row["global_step"] for row in run.rows("metrics.jsonl")]
        assert 0 < max(np.diff([0, *steps])) <= run.json("config.json")["args"]["batch_size"]
    args = parse(ne, "--train-steps 100 --train-envs 4 --num-steps 16 --num-minibatches 2 --population-size 3",
                 "--num-children 2 --num-elites 1 --fitness-episodes 5 --eval-max-steps 7")  # fmt: skip
    assert (args.train_frames, args.batch_size) == (128, 3 * 128 + (2 * 3 + 1) * 5 * 7)
