"""The mathematics of algos/impala_popart.py against the definitions in numpy, numbers by hand and tests/data/."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from probe_envs import ChainEnv

from algos import impala_popart as impala
from algos import impala_popart_atari as atari

DATA = Path(__file__).parent / "data"
VTRACE, POPART = (json.loads((DATA / f"{name}.json").read_text()) for name in ("vtrace", "popart"))
ENDS = ["terminated", "truncated", "both", "endless"]


@pytest.fixture
def rng():
    return np.random.default_rng(1)


def tensors(*arrays):
    return [torch.as_tensor(a) for a in arrays]


# ---- V-trace ---------------------------------------------------------------------------------------------------------


def vtrace_oracle(log_rhos, rewards, values, next_values, terminated, truncated, gamma, rho_bar, pg_rho_bar, c_bar):
    """Equation 1 of the IMPALA paper as printed: sums of products of ratios, cut at the end of each episode."""
    T, B = rewards.shape
    rho, c, pg = (np.minimum(bar, np.exp(log_rhos)) for bar in (rho_bar, c_bar, pg_rho_bar))
    bootstrap = np.where(terminated, 0.0, next_values)
    delta = rewards + gamma * bootstrap - values
    targets, advantages = np.zeros((T, B)), np.zeros((T, B))
    for t, b in itertools.product(range(T), range(B)):
        last = next((k for k in range(t, T) if terminated[k, b] or truncated[k, b]), T - 1)
        targets[t, b] = values[t, b] + sum(gamma ** (k - t) * np.prod(c[t:k, b]) * rho[k, b] * delta[k, b]
                                           for k in range(t, last + 1))  # fmt: skip
    for t, b in itertools.product(range(T), range(B)):
        alone = t == T - 1 or terminated[t, b] or truncated[t, b]
        after = bootstrap[t, b] if alone else targets[t + 1, b]
        advantages[t, b] = pg[t, b] * (rewards[t, b] + gamma * after - values[t, b])
    return targets, advantages


def random_unroll(rng, T, B, end_rate=0.2):
    """log_rhos, rewards, values, next_values, terminated, truncated; both flags together happen too."""
    values = rng.normal(0, 3, (T + 1, B))
    terminated, truncated = rng.random((2, T, B)) < end_rate
    next_values = np.where(truncated, rng.normal(0, 3, (T, B)), values[1:])
    return rng.normal(0, 1, (T, B)), rng.normal(0, 1, (T, B)), values[:-1], next_values, terminated, truncated


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor], ids=lambda convert: convert.__name__)
def test_vtrace_vectors(convert):
    keys = "log_rho", "reward", "value", "value_next", "terminated", "truncated"
    bars = [VTRACE[name] for name in ("gamma", "rho_bar", "pg_rho_bar", "c_bar")]
    kwargs = {"dtype": torch.float64} if convert is torch.tensor else {}
    inputs = [convert(VTRACE[key], **kwargs) for key in keys]
    targets, advantages = impala.vtrace(*inputs, *bars)
    np.testing.assert_allclose(targets, VTRACE["vs"], rtol=1e-13)
    np.testing.assert_allclose(advantages, VTRACE["pg_advantage"], rtol=1e-13)


@pytest.mark.parametrize("T,B", [(1, 1), (1, 5), (2, 3), (20, 7)])
@pytest.mark.parametrize("gamma,rho_bar,pg_rho_bar,c_bar", [(0.99, 1, 1, 1), (0.9, 2, 1.5, 0.7), (1, 0.5, 3, 1.2)])
def test_vtrace_is_its_definition(rng, T, B, gamma, rho_bar, pg_rho_bar, c_bar):
    inputs = *random_unroll(rng, T, B), gamma, rho_bar, pg_rho_bar, c_bar
    targets, advantages = impala.vtrace(*inputs)
    assert targets.dtype == advantages.dtype == torch.float64
    expected = vtrace_oracle(*inputs)
    np.testing.assert_allclose(targets, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(advantages, expected[1], rtol=1e-12, atol=1e-12)


def test_vtrace_in_float32_and_with_raw_float64_rewards(rng):
    inputs = random_unroll(rng, 6, 3)
    expected = vtrace_oracle(*inputs, 0.9, 1, 1, 1)
    single = [torch.as_tensor(x).float() for x in inputs[:4]] + tensors(*inputs[4:])
    for rewards, dtype in ((single[1], torch.float32), (inputs[1], torch.float64)):
        outputs = impala.vtrace(single[0], rewards, *single[2:], 0.9)
        for output, values in zip(outputs, expected):
            assert output.dtype == dtype
            np.testing.assert_allclose(output, values, atol=1e-5)


def test_an_episode_end_inside_an_unroll_is_the_end_of_an_unroll(rng):
    """Bit by bit the same, whether the step ends by a flag or by the unroll; what follows changes nothing."""
    *floats, terminated, truncated = random_unroll(rng, 9, 4, end_rate=0)
    truncated[4] = True
    outputs = impala.vtrace(*floats, terminated, truncated, 0.99)
    halves = [impala.vtrace(*(x[rows] for x in (*floats, terminated, truncated)), 0.99)
              for rows in (slice(0, 5), slice(5, 9))]  # fmt: skip
    for output, first, second in zip(outputs, *halves):
        assert torch.equal(output, torch.cat([first, second]))


def test_an_absurd_ratio_counts_as_its_bar():
    one = torch.ones(1, 1, dtype=torch.float64)
    targets, advantages = impala.vtrace(800 * one, one, 0 * one, one, one == 0, one == 0, 0.5)
    assert targets.item() == advantages.item() == 1.5


def test_the_bootstrap_counts_once():
    """PPO-06."""
    zeros = [[0.0]] * 3
    targets, advantages = impala.vtrace(zeros, [[1.0]] * 3, [[0.5]] * 3, [[0.5], [0.5], [2.0]], zeros, zeros, 0.9)
    np.testing.assert_allclose(advantages[:, 0], [3.668, 3.02, 2.3], rtol=1e-12)
    np.testing.assert_allclose(targets, advantages + 0.5, rtol=1e-12)


# ---- The loss --------------------------------------------------------------------------------------------------------


def random_batch(rng, T, B, A, N):
    """The arguments of impala_loss by name, float64."""
    terminated, truncated = rng.random((2, T, B)) < 0.15
    normalized, next_normalized = rng.normal(0, 1, (2, T, B, N))
    return {"logits": rng.normal(0, 1, (T, B, A)), "normalized": normalized, "next_normalized": next_normalized,
            "mu": rng.normal(0, 50, N), "sigma": rng.uniform(0.1, 9, N), "tasks": rng.integers(N, size=B),
            "actions": rng.integers(A, size=(T, B)), "behaviour_logits": rng.normal(0, 1, (T, B, A)),
            "rewards": rng.normal(0, 5, (T, B)), "terminated": terminated, "truncated": truncated}  # fmt: skip


def run_loss(batch, ent_coef=0.0, vf_coef=1.0, **settings):
    """Outputs of impala_loss and its gradients by `logits` and `normalized`."""
    batch = {name: torch.as_tensor(x) for name, x in batch.items()}
    batch["logits"], batch["normalized"] = (batch[k].clone().requires_grad_() for k in ("logits", "normalized"))
    loss, *outputs = impala.impala_loss(**batch, ent_coef=ent_coef, vf_coef=vf_coef, **settings)
    loss.backward()
    return loss, *outputs, batch["logits"].grad, batch["normalized"].grad


@pytest.mark.parametrize("N", [1, 3])
def test_loss_and_gradients_are_equations_11_and_12(rng, N):
    """In the paper's form, (G - mu) / sigma - n, with the gradients written out by hand."""
    T, B, A, ent_coef, vf_coef, bars = 6, 5, 4, 0.03, 0.7, (1.3, 1.6, 0.8)
    batch = random_batch(rng, T, B, A, N)
    outputs = run_loss(batch, ent_coef, vf_coef, gamma=0.9, rho_bar=bars[0], pg_rho_bar=bars[1], c_bar=bars[2])
    loss, parts, values, targets, by_logits, by_normalized = outputs

    def softmax(x):
        return np.exp(x) / np.exp(x).sum(-1, keepdims=True)

    pi, b = softmax(batch["logits"]), softmax(batch["behaviour_logits"])
    chosen = np.eye(A)[batch["actions"]]
    rho = (pi * chosen).sum(-1) / (b * chosen).sum(-1)
    n, next_n = (np.stack([batch[name][:, j, i] for j, i in enumerate(batch["tasks"])], 1)
                 for name in ("normalized", "next_normalized"))  # fmt: skip
    mu, sigma = batch["mu"][batch["tasks"]], batch["sigma"][batch["tasks"]]
    v, next_v = sigma * n + mu, sigma * next_n + mu
    flags = batch["terminated"], batch["truncated"]
    G, _ = vtrace_oracle(np.log(rho), batch["rewards"], v, next_v, *flags, 0.9, *bars)
    _, raw = vtrace_oracle(np.log(rho), batch["rewards"], v, next_v, *flags, 0.9, bars[0], math.inf, bars[2])
    G_pi = raw / rho + v
    advantage = np.minimum(bars[1], rho) * ((G_pi - mu) / sigma - n)
    error = (G - mu) / sigma - n
    policy_loss = -(advantage * np.log((pi * chosen).sum(-1))).sum()
    entropies = -(pi * np.log(pi)).sum(-1)

    np.testing.assert_allclose(values, v, rtol=1e-12)
    np.testing.assert_allclose(targets, G, rtol=1e-10)
    np.testing.assert_allclose(parts["policy_loss"].item(), policy_loss, rtol=1e-10)
    np.testing.assert_allclose(parts["value_loss"].item(), 0.5 * (error**2).sum(), rtol=1e-10)
    np.testing.assert_allclose(parts["entropy"].item(), entropies.mean(), rtol=1e-10)
    kl = (rho - 1 - np.log(rho)).mean()
    np.testing.assert_allclose(parts["approx_kl"].item(), kl, rtol=1e-10)
    np.testing.assert_allclose(parts["clipfrac"].item(), (rho > bars[0]).mean(), rtol=1e-6)
    total = policy_loss + vf_coef * 0.5 * (error**2).sum() - ent_coef * entropies.sum()
    np.testing.assert_allclose(loss.item(), total, rtol=1e-10)

    by_pi = -advantage[..., None] * (chosen - pi)
    by_entropy = pi * (np.log(pi) + entropies[..., None])
    np.testing.assert_allclose(by_logits, by_pi + ent_coef * by_entropy, rtol=1e-9, atol=1e-12)
    by_n = np.zeros_like(batch["normalized"])  # no other head learns
    for j, i in enumerate(batch["tasks"]):
        by_n[:, j, i] = -vf_coef * error[:, j]
    np.testing.assert_allclose(by_normalized, by_n, rtol=1e-9, atol=1e-12)


def test_updates_do_not_depend_on_the_scale_of_rewards(rng):
    """Rewards, mu and sigma times 1000: the same gradients (the paper's equations 7 and 8)."""
    batch = random_batch(rng, 6, 5, 4, 3)
    loud = batch | {name: 1000 * batch[name] for name in ("rewards", "mu", "sigma")}
    quiet_gradients, loud_gradients = (run_loss(x, 0.01, 0.5, gamma=0.9)[-2:] for x in (batch, loud))
    for quiet, shouted in zip(quiet_gradients, loud_gradients):
        np.testing.assert_allclose(shouted, quiet, rtol=1e-8, atol=1e-10)
        assert quiet.abs().sum() > 1


def chain_unrolls(envs, V, T, unrolls, gamma):
    """Steps chains as an actor does, which restart in the step that ends an episode, and yields, an unroll, from the
    gradients of impala_loss what each row (T, B) was trained towards: advantages (rho = 1) and G - V."""
    obs, B = np.stack([env.reset()[0] for env in envs]), len(envs)
    for _ in range(unrolls):
        rows = {name: [] for name in ("obs", "next_obs", "rewards", "terminated", "truncated")}
        for _ in range(T):
            rows["obs"].append(obs)
            next_obs, *results = (np.array(x) for x in zip(*(env.step(0)[:4] for env in envs)))
            for name, x in zip(("next_obs", "rewards", "terminated", "truncated"), (next_obs, *results)):
                rows[name].append(x)
            ended = results[1] | results[2]
            obs = np.stack([env.reset()[0] if end else row for env, end, row in zip(envs, ended, next_obs)])
        rows = {name: np.stack(x) for name, x in rows.items()}
        batch = {"logits": np.zeros((T, B, 2)), "behaviour_logits": np.zeros((T, B, 2)), "mu": np.zeros(1),
                 "actions": np.zeros((T, B), int), "tasks": np.zeros(B, int), "sigma": np.ones(1),
                 "normalized": V(rows.pop("obs").astype(np.float64)),
                 "next_normalized": V(rows.pop("next_obs").astype(np.float64))}  # fmt: skip
        *_, by_logits, by_normalized = run_loss(batch | rows, gamma=gamma)
        yield -2 * by_logits[..., 0].numpy(), -by_normalized[:, :, 0].numpy()


# Leaving s pays 2^s and V(s) = 2^(s+1): with gamma 0.5 each step but a terminal one has delta 2^s, the terminal step 2
# has 4 - V(2) = -4, and a delta counts half one step earlier. G - V of a stretch of states that ends as the key says:
BY_DEATH = {"0": [1], "01": [2, 2], "012": [1, 0, -4], "1": [2], "12": [0, -4], "2": [-4]}
BY_LIMIT = {"0": [1], "01": [2, 2], "012": [3, 4, 4], "1": [2], "12": [4, 4], "2": [4]}
ENDLESS = {1: [1], 2: [2, 2], 3: [3, 4, 4], 4: [4, 6, 8, 8], 5: [5, 8, 12, 16, 16]}
# The stretches that the unrolls of T steps see; an episode ends, and the next begins, at each "-" and after each 2.
STRETCHES = {1: ["0", "1", "2", "0"], 2: ["01", "2-0", "12", "01"], 3: ["012", "012"], 4: ["012-0", "12-01", "2-012"],
             5: ["012-01", "2-012-0", "12-012", "012-01"]}  # fmt: skip


@pytest.mark.parametrize("T", STRETCHES)
def test_every_way_an_episode_ends(T):
    chains = [ChainEnv(end=end) for end in ENDS]
    unrolls = chain_unrolls(chains, lambda s: 2.0 ** (s + 1), T, len(STRETCHES[T]), gamma=0.5)
    for k, (seen, (advantages, errors)) in enumerate(zip(STRETCHES[T], unrolls, strict=True)):
        for trained in (advantages, errors):
            death, limit = ([x for s in seen.split("-") for x in table[s]] for table in (BY_DEATH, BY_LIMIT))
            assert trained.T.tolist() == [death, limit, death, [2 ** (T * k) * x for x in ENDLESS[T]]], f"unroll {k}"


def test_a_time_limit_is_not_a_death():
    """PPO-01."""
    chains = [ChainEnv(5, "truncated", lambda s: 1.0) for _ in range(2)]
    for advantages, errors in chain_unrolls(chains, lambda s: np.full_like(s, 10.0), 7, 3, gamma=0.9):
        np.testing.assert_allclose([advantages, errors], np.zeros((2, 7, 2)), atol=1e-12)


def test_bootstraps_from_the_last_observation():
    """G = 200: 150 would be the value before the last step, 0 that of the observation after the reset (PPO-03)."""
    chains = [ChainEnv(4, "truncated", lambda s: 0.0)]
    ((advantages, errors),) = chain_unrolls(chains, lambda s: 100 * s, 5, 1, gamma=0.5)
    assert errors[3, 0] + 300 == advantages[3, 0] + 300 == 200


def test_the_last_step_of_each_unroll_is_learned_from():
    """PPO-05."""
    chains = [ChainEnv(5, "endless", lambda s: float(s % 5 == 4)) for _ in range(3)]
    for advantages, errors in chain_unrolls(chains, lambda s: 0 * s, 5, 4, gamma=0.5):
        for trained in (advantages, errors):
            assert (trained[4] == 1).all() and np.count_nonzero(trained) == 15
            np.testing.assert_array_equal(trained[:, 0], [1 / 16, 1 / 8, 1 / 4, 1 / 2, 1])


# ---- PopArt ----------------------------------------------------------------------------------------------------------


def popart(W, b, dtype=torch.float64, **settings):
    layer = impala.PopArt(len(W[0]), len(W), **settings)
    layer.weight.data, layer.bias.data = torch.tensor(W, dtype=dtype), torch.tensor(b, dtype=dtype)
    return layer


def popart_oracle(W, b, mu, nu, targets, tasks, beta, second_moment):
    """Statistics (eq. 6) and output-preserving step (eq. 9 and 13) after each rollout, one by one."""
    W, b, mu, nu = (np.array(x, np.float64) for x in (W, b, mu, nu))
    for j, i in enumerate(tasks):
        G = targets[:, j]
        sigma, old_mu = np.clip(np.sqrt(max(nu[i] - mu[i] ** 2, 0)), 1e-4, 1e6), mu[i]
        mu[i] = (1 - beta) * mu[i] + beta * np.mean(G)
        nu[i] = (1 - beta) * nu[i] + beta * (np.mean(G) ** 2 if second_moment == "sq-mean" else np.mean(G**2))
        new_sigma = np.clip(np.sqrt(max(nu[i] - mu[i] ** 2, 0)), 1e-4, 1e6)
        W[i], b[i] = sigma / new_sigma * W[i], (sigma * b[i] + old_mu - mu[i]) / new_sigma
    return W, b, mu, nu


def values(layer, features):
    """Unnormalised values in float64 from weights of any type."""
    n = features @ layer.weight.detach().double().T + layer.bias.detach().double()
    return layer.sigma * n + layer.mu


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("case", POPART["cases"])
def test_popart_vectors(case, dtype, tolerance):
    expected, (beta, name) = POPART["cases"][case], case.split(",nu=")
    second_moment = {"sq_of_mean": "sq-mean", "mean_sq": "mean-sq"}[name]
    layer = popart(POPART["W0"], POPART["b0"], dtype, beta=float(beta[5:]), second_moment=second_moment)
    assert (layer.mu.tolist(), layer.nu.tolist()) == (POPART["mu0"], POPART["nu0"])
    features = torch.tensor(POPART["features"], dtype=dtype)
    before = (layer.sigma * layer(features) + layer.mu).detach()
    layer.update(torch.tensor(POPART["G"], dtype=torch.float64), torch.tensor(POPART["task"]))
    after = (layer.sigma * layer(features) + layer.mu).detach()
    for name in ("mu", "nu", "sigma"):
        np.testing.assert_allclose(getattr(layer, name), expected[name], rtol=1e-12)
    np.testing.assert_allclose(layer.weight.detach(), expected["W"], rtol=tolerance)
    np.testing.assert_allclose(layer.bias.detach(), expected["b"], rtol=tolerance)
    np.testing.assert_allclose([before, after], [POPART["v_before_and_after"]] * 2, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("second_moment", ["sq-mean", "mean-sq"])
@pytest.mark.parametrize("beta", [3e-4, 0.1])
@pytest.mark.parametrize("T,B,N", [(1, 1, 1), (5, 40, 3), (20, 8, 6)])
def test_one_step_for_a_batch_is_one_for_each_rollout(rng, T, B, N, beta, second_moment):
    """Several batches with rollouts of the same task in a row."""
    W, b, mu, nu = rng.normal(0, 1, (N, 4)), rng.normal(0, 1, N), np.zeros(N), np.ones(N)
    layer = popart(W, b, beta=beta, second_moment=second_moment)
    for _ in range(5):
        tasks = rng.integers(N, size=B)
        targets = rng.normal(10.0**tasks, 3, (T, B))
        W, b, mu, nu = popart_oracle(W, b, mu, nu, targets, tasks, beta, second_moment)
        layer.update(targets, tasks)
        np.testing.assert_allclose(layer.mu, mu, rtol=1e-12)
        np.testing.assert_allclose(layer.nu, nu, rtol=1e-12)
        np.testing.assert_allclose(layer.weight.detach(), W, rtol=1e-9)
        np.testing.assert_allclose(layer.bias.detach(), b, rtol=1e-9, atol=1e-9)


def test_popart_by_hand():
    """mu, sigma from 0, 1 to 10, 5 with w = 2, b = 1: w = 0.4, b = -1.8, and v(3) stays 7 (PPO-13)."""
    layer = popart([[2.0]], [1.0], torch.float32, beta=1.0, second_moment="mean-sq")
    layer.update([[5.0], [15.0]], [0])
    assert (layer.mu.item(), layer.sigma.item()) == (10, 5)
    np.testing.assert_allclose([layer.weight.item(), layer.bias.item()], [0.4, -1.8], rtol=1e-7)
    np.testing.assert_allclose((layer.sigma * layer(torch.tensor([3.0])) + layer.mu).item(), 7, rtol=1e-6)


def test_first_loud_return():
    """The square-mean reading moves sigma to sqrt(1 + beta 1e8) at a first return of 1e4; a normalised target is 58."""
    layer = popart([[0.0]], [0.0])
    layer.update([[1e4]], [0])
    np.testing.assert_allclose(layer.mu.item(), 3)
    np.testing.assert_allclose(layer.sigma.item(), math.sqrt(1 - 3e-4 + 3e4 - 9), rtol=1e-12)


@pytest.mark.parametrize("dtype,epsilon", [(torch.float32, 2.0**-24), (torch.float64, 2.0**-53)])
def test_values_are_preserved_to_rounding(rng, dtype, epsilon):
    """Through statistics that jump by orders of magnitude; the bound is the rounding of the weights themselves."""
    features, loud = torch.tensor(rng.normal(0, 1, (30, 16))), np.array([1e-3, 1.0, 30.0, 1e4, 3e5])
    layer = popart(rng.normal(0, 1, (5, 16)), rng.normal(0, 1, 5), dtype, beta=0.2)
    for _ in range(20):
        before, tasks = values(layer, features), rng.permutation(5)[:4]
        layer.update(loud[tasks] * rng.normal(3, 1, (7, 4)), tasks)
        weight, bias = layer.weight.detach().double().abs(), layer.bias.detach().double().abs()
        size = layer.sigma * (features.abs() @ weight.T + bias)
        bound = epsilon * size + 2.0**-50 * (size + layer.mu.abs())  # and that of the arithmetic in float64
        assert ((values(layer, features) - before).abs() <= bound).all()


@pytest.mark.parametrize("mean,std", [(2500, 1), (-2500, 10), (3e4, 300)])
def test_statistics_of_a_loud_task_with_little_spread(rng, mean, std):
    """In float32, nu - mu^2 would be 0, 28.6^2 or 255^2."""
    layer = popart([[1.0]], [0.0], torch.float32)
    targets = rng.normal(mean, std, (1, 100_000))
    layer.update(targets, np.zeros(100_000, int))
    weights = 3e-4 * (1 - 3e-4) ** np.arange(100_000)[::-1]  # what is left of the start is e^-30
    average = np.average(targets[0], weights=weights)
    spread = np.sqrt(np.average((targets[0] - average) ** 2, weights=weights))
    np.testing.assert_allclose(layer.mu.item(), average, rtol=1e-7)
    np.testing.assert_allclose(layer.sigma.item(), spread, rtol=1e-5)
    assert abs(layer.sigma.item() / std - 1) < 0.1


def test_sigma_stays_within_its_bounds():
    layer = popart([[1.0], [1.0]], [0.0, 0.0], beta=1.0)
    layer.update([[5.0, 1e9]] * 2, [0, 1])
    assert layer.sigma.tolist() == [1e-4, 1e-4]
    layer.second_moment = "mean-sq"
    layer.update([[5.0, 1e9], [5.0, -1e9]], [0, 1])
    assert layer.sigma.tolist() == [1e-4, 1e6]


def test_a_variance_below_zero_by_rounding_is_none():
    layer = popart([[1.0]], [0.0], beta=0.2)
    layer.update([[1e3 / 3] * 3000], [0] * 3000)
    assert (layer.nu - layer.mu**2).item() < 0 and layer.sigma.item() == 1e-4


def test_only_the_tasks_of_the_batch_are_touched(rng):
    for dtype in (torch.float32, torch.float64):
        layer = popart(rng.normal(0, 1, (57, 8)), rng.normal(0, 1, 57), dtype, beta=0.1)
        layer.update(rng.normal(7, 3, (4, 57)), np.arange(57))
        layer.bias.data = torch.tensor(rng.normal(0, 1, 57), dtype=dtype)  # learned: no quotient by sigma
        before = {name: x.clone() for name, x in layer.state_dict().items()}
        layer.update(rng.normal(70, 3, (4, 2)), [40, 1])
        for name, x in layer.state_dict().items():
            changed, others = (x != before[name]).reshape(57, -1), np.setdiff1d(np.arange(57), [1, 40])
            assert changed[[1, 40]].all() and not changed[others].any(), name


def test_statistics_are_buffers_that_keep_their_memory():
    """Not parameters (no gradient, no share in the gradient norm), float64, saved, and updated in place."""
    layer = impala.PopArt(4, 3)
    assert {name for name, _ in layer.named_parameters()} == {"weight", "bias"}
    assert {name: x.dtype for name, x in layer.named_buffers()} == {"mu": torch.float64, "nu": torch.float64}
    assert layer.mu.tolist() == [0] * 3 and layer.nu.tolist() == [1] * 3 and layer.sigma.tolist() == [1] * 3
    before = {name: x.data_ptr() for name, x in layer.state_dict().items()}
    layer.update([[5.0]], [1])
    assert {name: x.data_ptr() for name, x in layer.state_dict().items()} == before
    other, features = impala.PopArt(4, 3), torch.ones(4, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(values(other, features), values(layer, features)) and other.mu[1] != 0
    with pytest.raises(KeyError, match="mean_sq"):
        impala.PopArt(4, 3, second_moment="mean_sq").update([[5.0]], [1])


def test_no_gradient_reaches_statistics_targets_or_other_heads(rng):
    layer, T, B = impala.PopArt(5, 3, beta=0.1), 4, 2
    layer.update(rng.normal(50, 9, (T, 3)), [0, 1, 2])
    features = torch.randn(T + 1, B, 5, generator=torch.Generator().manual_seed(1), requires_grad=True)
    batch = {name: torch.as_tensor(x) for name, x in random_batch(rng, T, B, 4, 3).items()}
    n = layer(features)
    batch |= {"normalized": n[:-1], "next_normalized": n[1:], "mu": layer.mu, "sigma": layer.sigma}
    batch["tasks"] = torch.tensor([2, 2])
    loss, _, old_values, targets = impala.impala_loss(**batch, gamma=0.9, ent_coef=0.01, vf_coef=0.5)
    assert not old_values.requires_grad and not targets.requires_grad
    loss.backward()
    assert layer.mu.grad is None and layer.nu.grad is None and layer.weight.grad.dtype == torch.float32
    assert [bool(row.any()) for row in layer.weight.grad] == [False, False, True]
    assert not features.grad[-1].any() and features.grad[:-1].any(-1).all()


@pytest.mark.parametrize("agent", ["popart", "multi_head", "one_head"])
def test_a_learner_step_goes_in_the_papers_order(agent, monkeypatch, tmp_path):
    """Losses with the old statistics, the network's step, the statistics, the output-preserving step; the agents
    without PopArt keep mu = 0, sigma = 1, and one of them a single head."""
    record = []

    def loss(logits, normalized, next_normalized, mu, sigma, tasks, *rest):
        outputs = real_loss(logits, normalized, next_normalized, mu, sigma, tasks, *rest)
        record.append(("loss", mu.clone(), sigma.clone(), tasks.clone(), outputs[3].clone()))
        return outputs

    def step(optimizer):
        real_step(optimizer)
        record.append(("step", optimizer.param_groups[0]["params"][-2].detach().clone()))  # W, of all parameters' end

    def update(layer, targets, tasks):
        before = {name: x.clone() for name, x in layer.state_dict().items()}
        real_update(layer, targets, tasks)
        record.append(("update", before, {name: x.clone() for name, x in layer.state_dict().items()}))

    real_loss, real_step, real_update = impala.impala_loss, impala.RMSPropTF.step, impala.PopArt.update
    monkeypatch.setattr(impala, "impala_loss", loss)
    monkeypatch.setattr(impala.RMSPropTF, "step", step)
    monkeypatch.setattr(impala.PopArt, "update", update)
    updates, kinds = 4, ["loss", "step", "update"] if agent == "popart" else ["loss", "step"]
    impala.train(impala.Args(
        env_id="mixed", num_actors=0, envs_per_actor=6, batch_rollouts=12, num_steps=5, total_timesteps=updates * 60,
        popart=agent == "popart", multi_head=agent == "multi_head", popart_beta=0.1, eval_episodes=1, progress="none",
        run_dir=tmp_path))  # fmt: skip
    assert [kind for kind, *_ in record] == kinds * updates
    mu, nu = np.zeros(3), np.ones(3)
    for k in range(updates):
        (_, old_mu, old_sigma, tasks, targets), (_, weight), *rest = record[k * len(kinds) : (k + 1) * len(kinds)]
        assert len(old_mu) == len(weight) == (1 if agent == "one_head" else 3)
        if agent != "popart":
            assert not old_mu.any() and (old_sigma == 1).all() and (agent == "multi_head") == bool(tasks.any())
            continue
        ((_, before, after),) = rest
        np.testing.assert_allclose(old_mu, mu, rtol=1e-10)
        np.testing.assert_allclose(old_sigma, np.sqrt(nu - mu**2), rtol=1e-10)
        assert torch.equal(before["weight"], weight) and sorted(set(tasks.tolist())) == [0, 1, 2]
        inputs = [x.numpy() for x in (before["weight"], before["bias"], targets, tasks)]
        W, b, mu, nu = popart_oracle(*inputs[:2], mu, nu, *inputs[2:], 0.1, "sq-mean")
        np.testing.assert_allclose(after["weight"], W, rtol=1e-5)
        np.testing.assert_allclose(after["bias"], b, rtol=1e-5, atol=1e-6)


# ---- RMSProp ---------------------------------------------------------------------------------------------------------


def test_rmsprop_is_tensorflows(rng):
    """Epsilon inside the root and a mean square that starts at 1; torch's has it outside and starts at 0."""
    start, gradients, lr, decay, eps = rng.normal(0, 1, (3, 2)), rng.normal(0, 1, (7, 3, 2)), 0.1, 0.9, 0.01
    p, q, unused = (torch.nn.Parameter(torch.tensor(start)) for _ in range(3))
    ours = impala.RMSPropTF([p, unused], lr, decay, eps)
    torchs = torch.optim.RMSprop([q], lr, alpha=decay, eps=eps)
    x, mean_square = start.copy(), np.ones((3, 2))
    for k, g in enumerate(gradients):
        if k == 3:  # a schedule, and a restart from a checkpoint
            lr = 0.05
            ours.param_groups[0]["lr"] = lr
            state, ours = ours.state_dict(), impala.RMSPropTF([p, unused], 9.0)
            ours.load_state_dict(state)
        p.grad, q.grad = torch.tensor(g), torch.tensor(g)
        ours.step(), torchs.step()
        mean_square = decay * mean_square + (1 - decay) * g**2
        x = x - lr * g / np.sqrt(mean_square + eps)
        np.testing.assert_allclose(p.detach(), x, rtol=1e-12)
    assert torch.equal(unused.detach(), torch.tensor(start)) and unused not in ours.state
    assert (p - q).abs().max() > 0.1


# ---- Pixel control ---------------------------------------------------------------------------------------------------


def test_pixel_rewards(rng):
    """The mean absolute change of each 4x4 cell of the central 80x80 pixels."""
    frames = rng.integers(256, size=(4, 2, 84, 84), dtype=np.uint8)
    rewards = atari.pixel_rewards(torch.tensor(frames[:-1]), torch.tensor(frames[1:]))
    assert rewards.shape == (3, 2, 20, 20)
    for t, b, i, j in itertools.product(range(3), range(2), (0, 1, 19), (0, 2, 19)):
        cell = frames[:, b, 2 + 4 * i : 6 + 4 * i, 2 + 4 * j : 6 + 4 * j].astype(float) / 255
        np.testing.assert_allclose(rewards[t, b, i, j], np.abs(cell[t + 1] - cell[t]).mean(), rtol=1e-5)


def test_pixel_control_head_has_a_value_for_each_cell_and_action():
    head = atari.PixelControlHead(10, 5)
    features = torch.randn(3, 2, 10, generator=torch.Generator().manual_seed(1))
    q = head(features)
    assert q.shape == (3, 2, 5, 20, 20)
    torch.testing.assert_close(head(features[1, 1]), q[1, 1])
    # Duelling: the mean over actions is the value stream, so the advantage stream's bias cancels.
    with torch.no_grad():
        head.advantage.bias += 7
        torch.testing.assert_close(head(features), q)
        head.value.bias += 7
        torch.testing.assert_close(head(features), q + 7)


def test_pixel_control_loss_and_gradient_are_its_definition(rng):
    """Returns to the end of episode or unroll plus the discounted best action value of what it led to, with each kind
    of boundary."""
    T, B, A, h, w, gamma = 8, 5, 3, 2, 3, 0.9
    q, next_q, rewards = *rng.normal(0, 1, (2, T, B, A, h, w)), rng.random((T, B, h, w))
    actions = rng.integers(A, size=(T, B))
    terminated, truncated = np.zeros((2, T, B), bool)
    terminated[3, 1] = truncated[3, 2] = terminated[3, 3] = truncated[3, 3] = True
    truncated[T - 1, 4] = True
    within = ~(terminated | truncated)[:-1]
    next_q[:-1][within] = q[1:][within]
    seen, following = torch.tensor(q, requires_grad=True), torch.tensor(next_q, requires_grad=True)
    loss = atari.pixel_control_loss(seen, following, *tensors(rewards, actions, terminated, truncated))
    loss.backward()
    expected, gradient = 0.0, np.zeros_like(q)
    for t, b in itertools.product(range(T), range(B)):
        last = next((k for k in range(t, T) if terminated[k, b] or truncated[k, b]), T - 1)
        target = sum(gamma ** (k - t) * rewards[k, b] for k in range(t, last + 1))
        if not terminated[last, b]:
            target = target + gamma ** (last + 1 - t) * next_q[last, b].max(0)
        error = q[t, b, actions[t, b]] - target
        expected, gradient[t, b, actions[t, b]] = expected + 0.5 * (error**2).sum(), error
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)
    np.testing.assert_allclose(seen.grad, gradient, rtol=1e-10, atol=1e-13)
    assert following.grad is None
