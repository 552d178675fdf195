"""onpolicy_choices.py: its mathematics against numeric cases and independent oracles, its stacks against plain runs."""

import gc
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from torch import nn

from algos import onpolicy_choices as script

ROOT = Path(__file__).parents[1]
CASES = [case for path in sorted((ROOT / "tests" / "data" / "onpolicy").glob("*.json"))
         for case in json.loads(path.read_text())]  # fmt: skip
LOSSES = ["ppo", "pg", "vtrace", "awr", "rpa", "vmpo"]
TINY = dict(env_id="InvertedPendulum-v4", num_envs=4, iteration_size=64, minibatch_size=16, update_epochs=2,
            total_timesteps=640, eval_interval=4, eval_episodes=3, progress="none")  # fmt: skip  # 10 updates


torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def restored_signals():
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers):
        signal.signal(number, handler)
    gc.collect()  # locks and environments that a traceback holds


# ---- The numeric cases, through one adapter: fn -> what the script finds, by the names of `expect` ----


def tensor(x):
    return torch.tensor(np.array(x, float))


def gradients(per, *inputs):
    return torch.autograd.grad(per.mean(), inputs, allow_unused=True, materialize_grads=True)


def fragments(args, kind):
    """A dummy step after a time limit (`abandoned`) is worth V: the same as a terminal step that pays V."""
    values = tensor(args["values"])
    te, ab = (torch.tensor(args[name]) for name in ("terminated", "abandoned"))
    rewards = torch.where(ab, values[:-1], tensor(args["rewards"]))
    ratio = tensor(args["logp_pi"]) - tensor(args["logp_mu"]) if kind == "vtrace" else torch.zeros_like(rewards)
    found = script.advantages(kind, rewards, values[:-1], values[1:], te | ab, torch.zeros_like(te), ratio,
                              args["gamma"], args.get("lam", 0), args.get("n", 1), args.get("rho_bar", 1))  # fmt: skip
    return dict(zip(("advantages", "targets"), found))


def gae_next_values(values, next_values, rewards, terminated, truncated, gamma, lam):
    inputs = [tensor(x) for x in (rewards, values, next_values)]
    flags = torch.tensor(terminated), torch.tensor(truncated)
    found = script.advantages("gae", *inputs, *flags, torch.zeros_like(inputs[0]), gamma, lam, 1, 1.0)
    return dict(zip(("advantages", "targets"), found))


class Scripted(gym.Env):
    """Pays a list of rewards and ends where another list says so; its last step is a time limit."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (1,), np.float32), gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, rewards, ends):
        self.rewards, self.ends, self.t = rewards, ends, 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.t += 1
        last = self.t == len(self.rewards)
        return np.zeros(1, np.float32), self.rewards[self.t - 1], bool(self.ends[self.t - 1]), last, {}


def scripted_envs(env, frame_skip):
    with mock.patch.object(gym, "make", lambda *_, **__: env):
        args = SimpleNamespace(env_id="", vectorization="sync", frame_skip=frame_skip)
        return script.Envs(args, np.random.SeedSequence(1).spawn(1))


def frame_skip(rewards, ends, n):
    env, rows = Scripted(rewards, ends), []
    envs = scripted_envs(env, n)
    while env.t < len(rewards):
        _, reward, terminated, _, info = envs.step(np.zeros((1, 1)))
        rows.append([reward[0], info["frames"][0], bool(terminated[0])])
    return {"out": rows}


def policy_loss(kind, logp_pi, adv, logp_mu=None, eps=0.2, rho_bar=1.0, beta=1.0, w_max=1.0):
    logp = tensor(logp_pi).requires_grad_()
    mu, adv = tensor(logp_pi if logp_mu is None else logp_mu), tensor(adv)
    per = script.policy_loss(kind, logp, mu, adv, eps, rho_bar, beta, w_max)
    (dlogp,) = gradients(per, logp)
    weight = -dlogp * len(adv)
    ratio = (logp - mu).detach()
    return {"per": per, "loss": per.mean(), "dlogp": dlogp, "w": weight,
            "rho": ratio.clamp(max=math.log(rho_bar)).exp(),
            "clipfrac": (ratio.abs() > math.log1p(eps)).double().mean()}  # fmt: skip


def ppo(lower=None, **args):
    if lower == "one_minus":  # not ours: Schulman's bound, to show where it differs
        logp, mu, adv = tensor(args["logp_pi"]).requires_grad_(), tensor(args["logp_mu"]), tensor(args["adv"])
        ratio = (logp - mu).exp()
        per = -torch.minimum(ratio * adv, ratio.clamp(1 - args["eps"], 1 + args["eps"]) * adv)
        clipped = (ratio < 1 - args["eps"]) | (ratio > 1 + args["eps"])
        return {"per": per, "loss": per.mean(), "dlogp": gradients(per, logp)[0], "clipfrac": clipped.double().mean()}
    return policy_loss("ppo", **args)


def rpa(variant="paper", **args):
    if variant == "paper":
        return policy_loss("rpa", **args)
    return policy_loss("awr", beta=1e-6, **args)  # the authors' code


def vmpo(logp_pi, adv, eta, eps_n, variant="paper"):
    logp, a = tensor(logp_pi).requires_grad_(), tensor(adv)
    if variant == "paper":
        weights, divergence = script.vmpo_weights(a, eta)
        per = script.policy_loss("vmpo", logp, logp.detach(), a, 0.2, 1.0, eta, 1.0)
        loss, shown = per.mean(), per / len(a)  # the paper sums
        mask = (a >= a.sort().values[len(a) - len(a) // 2]).double()
    else:  # not ours: the authors' code, to show where it differs
        k = len(a) // 2
        mask = (a >= a.sort().values[len(a) - k]).double()
        weights = torch.softmax(a / eta * mask, 0) * mask
        shown = -weights * logp
        loss = shown.mean()
        divergence = torch.logsumexp(torch.where(mask > 0, a / eta, -math.inf), 0) - math.log(k + 1e-3)
    p = torch.tensor(math.log(eta) / 10, dtype=torch.float64, requires_grad=True)
    temperature_loss = script.constraint_loss(p, divergence, eps_n) - eta * divergence
    (dlogp,) = torch.autograd.grad(loss, logp)
    (dp,) = torch.autograd.grad(temperature_loss, p)
    return {"per": shown, "loss": loss, "dlogp": dlogp, "w": weights, "mask": mask, "R": divergence,
            "temperature_loss": temperature_loss, "dp": dp}  # fmt: skip


def vmpo_dual(adv, eta, eps_n):
    upper = np.sort(adv)[len(adv) - len(adv) // 2 :]
    value = eta * eps_n + eta * np.log(np.mean(np.exp(upper / eta)))
    return {"value": value, "deta": eps_n - script.vmpo_weights(tensor(adv), eta)[1]}


def value_loss(pred, target, kind="mse", delta=1.0, clip_eps=None, old=None):
    value = tensor(pred).requires_grad_()
    old = tensor(pred if old is None else old)
    per = script.value_loss(kind, value, tensor(target), old, clip_eps or 0.0, delta)
    return {"per": per, "loss": per.mean(), "dpred": gradients(per, value)[0]}


def log_tail(x, m, s, sign):
    return torch.special.log_ndtr(sign * (m - x) / s)


def tanh_logp_from_action(u, m, s, threshold=0.999):
    """The authors' code has the tails' mean density beyond the threshold; between them it is the script's two parts."""
    u, m, s = tensor(u), tensor(m), tensor(s)
    x = u.clamp(-threshold, threshold).atanh()
    inside = script.log_prob(x.unsqueeze(-1), m.unsqueeze(-1), s.unsqueeze(-1)) - script.log_tanh_derivative(x)
    limit = math.atanh(threshold)
    tail = torch.where(u > 0, log_tail(tensor(limit), m, s, 1), log_tail(tensor(-limit), m, s, -1))
    return {"out": torch.where(u.abs() >= threshold, tail - math.log(1 - threshold), inside).sum(-1)}


def tanh_entropy_exact(m, s):
    """The mean of the one-sample estimates over the Gaussian's quadrature nodes."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(180)
    total = 0.0
    for mean, std in zip(m, s):
        mean, std = torch.full((180, 1), mean).double(), torch.full((180, 1), std).double()
        found = script.regularizer(("entropy", "tanh"), mean, std, mean, std, tensor(nodes).unsqueeze(-1))[0]
        total -= (found.numpy() * weights).sum() / weights.sum()
    return {"out": total}


def clip_logp(x, m, s, variant):
    x = tensor(x).clamp(-1, 1) if variant != "unclipped" else tensor(x)
    return {"out": script.log_prob(x, tensor(m), tensor(s))}


def std_offset(kind, init_std, min_std):
    above = script.action_std(kind, torch.zeros(1).double(), tensor(init_std), tensor(min_std)) - min_std
    return {"out": (above.log() if kind == "exp" else torch.expm1(above).log())[0]}


def std_fn(x_rho, kind, init_std, min_std):
    x = tensor(x_rho).requires_grad_()
    std = script.action_std(kind, x, tensor(init_std), tensor(min_std))
    return {"std": std, "dstd": torch.autograd.grad(std.sum(), x)[0]}


def minibatches(mode, T, B, batch_size, perms):
    rng, out = SimpleNamespace(permutation=lambda n, left=iter(perms): np.array(next(left))), []
    for _ in perms:
        found = script.minibatches(mode, T, B, batch_size, rng)
        assert sorted(found.flatten()) == list(range(T * B)), "each transition once an epoch"
        out.append(np.sort(found, 1))
    return {"out": out}


def advantage_computations(mode, num_epochs, num_minibatches):
    """Counted in `optimise` itself."""
    T, N, calls = 2, 2 * num_minibatches, []
    args = SimpleNamespace(num_steps=T, num_envs=N, minibatch_size=4, batch_mode=mode, iteration_size=T * N,
                           update_epochs=num_epochs, num_updates=1)  # fmt: skip

    def estimate(data, envs=None):
        calls.append(1)
        return torch.zeros(1, T * (N if envs is None else envs.shape[1]), 3)

    agents = SimpleNamespace(args=args, estimate=estimate, learn=lambda *_: torch.zeros(len(script.LOSSES), 1))
    member = SimpleNamespace(random=SimpleNamespace(minibatches=np.random.default_rng(1)))
    data = {"obs": torch.zeros(1, T + 1, N, 1), "logp": torch.zeros(1, T, N)}
    data |= {name: torch.zeros(1, T, N, 1) for name in ("x", "mean", "std", "noise")}
    script.optimise(agents, [member], data, 0)
    return {"out": len(calls)}


def rms_run(batches, query, clip=0.0):
    moments, stats = torch.zeros(3, np.shape(query)[1]).double(), []
    for batch in batches:
        moments = script.add_moments(moments, tensor(batch))
        mean, std = script.mean_and_std(moments)
        stats.append({"n": moments[0, 0], "mean": mean, "std": std})
    return {"stats": stats, "normalized": script.normalize(tensor(query), mean, std, clip or 0.0)}


def clip_global_norm(grads, c):
    grad, norm = script.clip_gradient(torch.cat([tensor(g) for g in grads]), c or 0.0)
    return {"out": [list(grad.split([len(g) for g in grads])), norm[0]]}


def descend(kind, p, grads, lr, momentum, eps, centered=False):
    p, slots, out = tensor(p), (torch.zeros(len(p)).double(),) * 3, []
    for i, grad in enumerate(grads):
        change, *slots = script.optimizer_change(kind, i + 1, tensor(grad), *slots, lr, momentum, eps, centered)
        p = p - change
        out.append(p)
    return {"out": out}


def by_torch(make, p, grads):
    p, out = nn.Parameter(tensor(p)), []
    optimizer = make([p])
    for grad in grads:
        p.grad = tensor(grad)
        optimizer.step()
        out.append(p.detach().clone())
    return {"out": out}


def adam(p, grads, lr, eps, beta1=0.9, variant="keras"):
    if variant == "torch":  # not ours
        return by_torch(lambda ps: torch.optim.Adam(ps, lr=lr, eps=eps, betas=(beta1, 0.999)), p, grads)
    return descend("adam", p, grads, lr, beta1, eps)


def rmsprop(p, grads, lr, eps, momentum=0.0, centered=False, variant="keras"):
    if variant == "torch":  # not ours
        options = dict(lr=lr, eps=eps, alpha=0.9, momentum=momentum, centered=centered)
        return by_torch(lambda ps: torch.optim.RMSprop(ps, **options), p, grads)
    return descend("rmsprop", p, grads, lr, momentum, eps, centered)


def lagrange(p, R, eps):
    alpha, p, r = math.exp(10 * p), tensor(p).requires_grad_(), tensor(R).requires_grad_()
    loss = script.constraint_loss(p, r.mean(), eps)
    dp, dr = torch.autograd.grad(loss, (p, r))
    scaled = alpha * r.mean()
    return {"alpha": alpha, "adjustment_loss": loss - scaled, "scaled": scaled, "dp": dp, "dR": dr.sum()}


def lagrange_sgd(p, Rs, eps, lr):
    p, out = tensor(p), []
    for R in Rs:
        p = p.detach().requires_grad_()
        (dp,) = torch.autograd.grad(script.constraint_loss(p, tensor(R).mean(), eps), p)
        p = (p - lr * dp).clamp(-script.P_LIMIT, script.P_LIMIT)
        out.append([float(p), math.exp(10 * float(p))])
    return {"out": out}


def kl_decoupled(m_mu, s_mu, m_pi, s_pi):
    m_mu, s_mu, m_pi, s_pi = map(tensor, (m_mu, s_mu, m_pi, s_pi))
    mean, std = script.regularizer(("decoupled_kl", "clip"), m_pi, s_pi, m_mu, s_mu, None).unbind(-2)
    return {"mean": mean, "std": std, "total": mean + std}


ADAPTER = {
    "nstep": lambda **args: fragments(args, "n_step"), "gae": lambda **args: fragments(args, "gae"),
    "vtrace_adv": lambda **args: fragments(args, "vtrace"), "gae_next_values": gae_next_values,
    "frame_skip": frame_skip, "ppo": ppo, "rpa": rpa, "vmpo": vmpo, "vmpo_dual": vmpo_dual,
    "pg": lambda **args: policy_loss("pg", **args), "vtrace_pg": lambda **args: policy_loss("vtrace", **args),
    "awr": lambda **args: policy_loss("awr", **args), "value_loss": value_loss,
    "normalize_advantages": lambda adv: {"out": script.normalize_advantages(tensor(adv))},
    "gauss_logp": lambda x, m, s: {"out": script.log_prob(tensor(x), tensor(m), tensor(s))},
    "log_dtanh": lambda x: {"out": script.log_tanh_derivative(tensor(x))},
    "tanh_logp_from_action": tanh_logp_from_action, "tanh_entropy_exact": tanh_entropy_exact, "clip_logp": clip_logp,
    "std_offset": std_offset, "std_fn": std_fn, "minibatches": minibatches, "rms_run": rms_run,
    "advantage_computations": advantage_computations, "clip_global_norm": clip_global_norm, "adam": adam,
    "rmsprop": rmsprop, "lagrange": lagrange, "lagrange_sgd": lagrange_sgd, "kl_decoupled": kl_decoupled,
    "lr_schedule": lambda lr0, decay, step, total: {"out": script.learning_rate(lr0, decay, step, total)},
    "lagrange_clip": lambda p: {"out": max(-script.P_LIMIT, min(script.P_LIMIT, p))},
    "kl_gauss": lambda **a: {"out": script.kl_gauss(*(tensor(a[name]) for name in ("m0", "s0", "m1", "s1")))},
}  # fmt: skip


def assert_near(found, expected, tol, where):
    if isinstance(expected, dict):
        for name in expected:
            assert_near(found[name], expected[name], tol, f"{where}/{name}")
    elif isinstance(expected, list) and not isinstance(found, torch.Tensor):
        assert len(found) == len(expected), where
        for i, (x, y) in enumerate(zip(found, expected)):
            assert_near(x, y, tol, f"{where}/{i}")
    else:
        found = found.detach().numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
        np.testing.assert_allclose(found, expected, rtol=tol, atol=tol, err_msg=where)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_numeric_cases(case):
    assert_near(ADAPTER[case["fn"]](**case["args"]), case["expect"], case["tol"], case["name"])


# ---- Facts that join the parts ----


def random_fragments(T=7, N=5):
    generator = torch.Generator().manual_seed(3)
    rewards, values, next_values = (torch.randn(T, N, generator=generator).double() for _ in range(3))
    te, tr = (torch.rand(T, N, generator=generator) < 0.15 for _ in range(2))
    next_values[:-1] = torch.where((te | tr)[:-1], next_values[:-1], values[1:])
    return rewards, values, next_values, te, tr


def test_gae_of_lambda_1_n_step_of_all_steps_and_on_policy_vtrace_are_the_same():
    inputs = *random_fragments(), torch.zeros(7, 5).double()
    gae, n_step, vtrace = (
        script.advantages(kind, *inputs, 0.9, 1.0, 1_000_000, 1.5) for kind in ("gae", "n_step", "vtrace")
    )
    for found in (n_step, vtrace):
        torch.testing.assert_close(found, gae, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 4, 9])
def test_n_step_against_a_walk(n):
    rewards, values, next_values, te, tr = random_fragments()
    _, targets = script.advantages("n_step", rewards, values, next_values, te, tr, None, 0.9, 0.0, n, 1.0)
    for i in range(5):
        for t in range(7):
            total, discount = 0.0, 1.0
            for k in range(t, min(t + n, 7)):
                total, discount = total + discount * rewards[k, i], discount * 0.9
                if te[k, i] or tr[k, i]:
                    break
            total += discount * (0 if te[k, i] else next_values[k, i])
            assert abs(total - targets[t, i]) < 1e-12


def test_the_gradients_of_ppo_and_pg_are_equal_where_pi_is_mu():
    logp, adv = torch.randn(64).double().requires_grad_(), torch.randn(64).double()
    grads = [gradients(script.policy_loss(kind, logp, logp.detach(), adv, 0.2, 1.0, 1.0, 1.0), logp)[0]
             for kind in ("ppo", "pg", "vtrace")]  # fmt: skip
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-15)
    torch.testing.assert_close(grads[2], grads[1], rtol=0, atol=1e-15)


def test_awr_tends_to_rpa():
    logp, adv = -torch.rand(64).double(), torch.randn(64).double()
    awr = script.policy_loss("awr", logp, logp, adv, 0.2, 1.0, 1e-6, 1.0)
    torch.testing.assert_close(awr, script.policy_loss("rpa", logp, logp, adv, 0.2, 1.0, 1.0, 1.0))


def test_a_std_that_starts_at_its_minimum_stays_there():
    for kind in ("exp", "softplus"):
        x = torch.zeros(3).requires_grad_()
        std = script.action_std(kind, x, torch.tensor(0.1), torch.tensor(0.1))
        assert std.tolist() == [0.1 * 1.0] * 3 or torch.allclose(std, torch.full((3,), 0.1))
        assert (torch.autograd.grad(std.sum(), x)[0] == 0).all()


def test_moments_keep_precision_far_from_0_and_in_parts():
    x = np.random.default_rng(1).normal(1e6, 1e-2, (1000, 2))
    moments = torch.zeros(3, 2).double()
    for part in np.array_split(x, 7):
        moments = script.add_moments(moments, tensor(part))
    mean, std = script.mean_and_std(moments)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-14)
    np.testing.assert_allclose(std, x.std(0), rtol=1e-6)


@pytest.mark.parametrize("kind", ["glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "lecun_normal",
                                  "lecun_uniform", "orthogonal", "orthogonal_1.41"])  # fmt: skip
def test_initial_weights(kind):
    torch.manual_seed(1)
    weight = script.initial_weight(kind, 300, 200)
    variance = {"g": 2 / 500, "h": 2 / 300, "l": 1 / 300}.get(kind[0])
    if variance is None:
        gain = 1.41 if "1.41" in kind else 1.0
        torch.testing.assert_close(weight.T @ weight, gain**2 * torch.eye(200), atol=1e-4, rtol=1e-4)
    else:
        assert abs(weight.var() / variance - 1) < 0.03


# ---- Networks and gradient steps against plain PyTorch ----


def member(obs_dim=5, action_dim=2, **choices):
    args = script.Args(**TINY | choices)
    torch.manual_seed(args.seed)
    state = script.initial_state(args, obs_dim, action_dim)
    return SimpleNamespace(args=args, obs_dim=obs_dim, action_dim=action_dim, state=state)


def plain_networks(m):
    """nn.Linear layers with the member's parameters, and its x_rho and p."""
    theta, nets = m.state["theta"].clone(), []
    for sizes in script.layer_sizes(m.args, m.obs_dim, m.action_dim).values():
        layers = []
        for inputs, outputs in zip(sizes, sizes[1:]):
            layer = nn.Linear(inputs, outputs)
            layer.weight.data, theta = (
                theta[: inputs * outputs].view(inputs, outputs).T.clone(),
                theta[inputs * outputs :],
            )
            layer.bias.data, theta = theta[:outputs].clone(), theta[outputs:]
            layers += [layer, nn.Tanh()]
        nets.append(nn.Sequential(*layers[:-1]))
    return *nets, nn.Parameter(theta[: m.action_dim].clone()), nn.Parameter(theta[m.action_dim :].clone())


def plain_loss(args, logp, mu, adv, p):
    ratio, k = (logp - mu).exp(), len(adv) // 2
    if args.policy_loss == "ppo":
        return -torch.min(ratio * adv, ratio.clamp(1 / (1 + args.clip_coef), 1 + args.clip_coef) * adv).mean()
    if args.policy_loss == "pg":
        return -(logp * adv).mean()
    if args.policy_loss == "vtrace":
        return -(ratio.detach().clamp(max=args.vtrace_loss_rho_bar) * logp * adv).mean()
    if args.policy_loss == "awr":
        return -(logp * (adv / args.awr_beta).exp().clamp(max=args.awr_max_weight)).mean()
    if args.policy_loss == "rpa":
        return -(logp * (adv > 0)).mean()
    top = adv.topk(k).indices
    temperature = (10 * p[2]).exp()
    psi = (adv[top] / temperature.detach()).softmax(0)
    divergence = (psi * (psi * k).log()).sum()
    return -(psi * logp[top]).sum() + temperature * (args.vmpo_epsilon - divergence)


def test_ten_gradient_steps_of_a_stack_of_six_losses_are_those_of_plain_networks():
    members = [member(policy_loss=loss, seed=k, adam_learning_rate=1e-3 * (k + 1), policy_init_scale=1.0)
               for k, loss in enumerate(LOSSES)]  # fmt: skip
    plain = [plain_networks(m) for m in members]
    agents, slots = script.Agents(members), [{} for _ in members]
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        batch, estimates = (
            torch.randn(6, 32, 5 + 4 * 2 + 1, generator=generator),
            torch.randn(6, 32, 3, generator=generator),
        )
        agents.learn(batch, estimates, step, 100)
        for k, (m, (policy, value, x_rho, p)) in enumerate(zip(members, plain)):
            obs, x, _, _, _, mu = batch[k].split([5, 2, 2, 2, 2, 1], -1)
            advantage, target, old = estimates[k].unbind(-1)
            std = (m.args.init_std - m.args.min_std) * x_rho.exp() + m.args.min_std
            logp = torch.distributions.Normal(policy(obs), std).log_prob(x).sum(-1)
            v = value(obs)[:, 0]
            clipped = old + (v - old).clamp(-m.args.value_clip, m.args.value_clip)
            loss = plain_loss(m.args, logp, mu[:, 0], advantage, p)
            loss = loss + torch.max((v - target) ** 2, (clipped - target) ** 2).mean()
            parameters = [*policy.parameters(), *value.parameters(), x_rho, p]
            grads = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            norm = torch.cat([g.flatten() for g in grads]).norm()
            rate = m.args.adam_learning_rate * (1 - step / 100)
            for parameter, grad in zip(parameters, grads):  # Keras' Adam
                grad = grad * min(1, m.args.max_grad_norm / norm)
                first, second = slots[k].get(parameter, (0, 0))
                first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
                slots[k][parameter] = first, second
                factor = rate * math.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
                parameter.data -= factor * first / (second.sqrt() + m.args.adam_eps)
            p.data.clamp_(-script.P_LIMIT, script.P_LIMIT)
    for m, (policy, value, x_rho, p) in zip(members, plain):
        rows = [x for net in (policy, value) for layer in net if isinstance(layer, nn.Linear)
                for x in (layer.weight.T.flatten(), layer.bias)]  # fmt: skip
        torch.testing.assert_close(m.state["theta"], torch.cat([*rows, x_rho, p]), rtol=1e-3, atol=2e-5)


CHOICES = [{"network": "shared", "shared_depth": 1}, {"std_dependence": "state", "std_transform": "softplus"},
           {"activation": "elu"}, {"policy_depth": 1, "value_width": 16}]  # fmt: skip


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_networks_of_every_shape(choices):
    members = [member(seed=seed, **choices) for seed in (1, 2)]
    mean, std, value = script.Agents(members)(torch.randn(2, 7, 5))
    assert mean.shape == std.shape == (2, 7, 2) and value.shape == (2, 7)
    assert (mean[0] != mean[1]).any() and (std > 0).all()
    if "shared_depth" not in choices and "activation" not in choices and "std_dependence" not in choices:
        obs = torch.randn(2, 7, 5)
        policy, values, *_ = plain_networks(members[1])
        mean, _, value = script.Agents(members)(obs)
        torch.testing.assert_close(mean[1], policy(obs[1]), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(value[1], values(obs[1])[:, 0], rtol=1e-4, atol=1e-6)


# ---- Whole runs ----


def rows(folder, name="metrics.jsonl"):
    """The rows of a run without their times."""
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("wall_s", "charts/SPS") and not k.startswith("perf/")}
        for row in found
    ]


def folders(base):
    return {path.parent.name: path.parent for path in sorted(Path(base).rglob("config.json"))}


def stack_file(folder, members):
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "stack.json").write_text(json.dumps(members))
    return folder / "stack.json"


def assert_same_runs(a, b):
    a, b = folders(a), folders(b)
    assert a.keys() == b.keys() and a
    for name in a:
        assert rows(a[name]) == rows(b[name]) and rows(a[name], "eval.jsonl") == rows(b[name], "eval.jsonl"), name
        configs = [json.loads((run[name] / "config.json").read_text())["args"] | {"run_dir": ""} for run in (a, b)]
        assert configs[0] == configs[1]
        states = [torch.load(sorted((run[name] / "checkpoints").glob("*.pt"))[-1], weights_only=True) for run in (a, b)]
        for key in ("theta", "first", "second", "buffer", "obs_moments", "value_moments"):
            assert torch.equal(states[0]["agent"][key], states[1]["agent"][key]), (name, key)
        assert torch.equal(states[0]["envs"]["obs"], states[1]["envs"]["obs"])


DIFFERENT = [  # all losses, estimators, and most that may differ within a stack
    {}, {"policy_loss": "pg", "seed": 2, "gamma": 0.95, "norm_obs": "none", "action_transform": "tanh"},
    {"policy_loss": "vtrace", "advantage_estimator": "vtrace", "norm_value": "none", "handle-abandoned": True},
    {"policy_loss": "awr", "optimizer": "rmsprop", "rmsprop_centered": True, "initializer": "he_normal"},
    {"policy_loss": "rpa", "value_loss": "huber", "advantage_estimator": "n_step", "norm_adv": True, "value_clip": 0.0},
    {"policy_loss": "vmpo", "regularization": "penalty", "action_transform": "tanh", "preset": "recommended",
     "batch_mode": "shuffle_transitions", "value_width": 64},
    {"regularization": "constraint", "constraint": "decoupled_kl", "std_transform": "softplus", "max_grad_norm": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("mode", ["shuffle_transitions", "shuffle_trajectories"])
def test_members_of_a_stack_are_their_plain_runs_to_the_bit(tmp_path, mode):
    """10 updates; so a member's curve doesn't depend on its neighbours either, one of which diverges at once."""
    common, different = (
        TINY | {"batch_mode": mode},
        [{k: v for k, v in row.items() if k != "batch_mode"} for row in DIFFERENT],
    )
    stack = stack_file(tmp_path, [*different, {"adam_learning_rate": 1e30}])
    with pytest.raises(SystemExit, match="1 of 8 members failed, the others are complete: .* is not finite"):
        script.train(script.Args(**common, stack=stack, run_dir=tmp_path / "stack"))
    (failed,) = [path for path in folders(tmp_path / "stack").values() if not (path / "result.json").exists()]
    status = json.loads((failed / "status.json").read_text())
    assert status["state"] == "failed" and "is not finite" in status["error"]
    for row in different:
        row = {name.replace("-", "_"): value for name, value in row.items()}
        script.train(script.Args(**common | row, run_dir=tmp_path / "plain"))
    failed.rename(tmp_path / "failed")
    assert_same_runs(tmp_path / "stack", tmp_path / "plain")
    found = script.train(script.Args(**common, stack=stack_file(tmp_path, different), run_dir=tmp_path / "stack"))
    assert len(found) == 7 and all("eval/return_mean" in result for result in found), "finished before"


@pytest.mark.parametrize("mode,count", [("fixed_trajectories", 8), ("shuffle_trajectories", 8),
                                        ("shuffle_transitions", 1), ("shuffle_transitions_recompute", 2)])  # fmt: skip
def test_each_batch_mode_computes_advantages_as_often_as_it_says_and_begins_with_pi_equal_to_mu(
    tmp_path, monkeypatch, mode, count
):
    calls, ratios, advantages, loss = [], [], script.advantages, script.policy_loss
    monkeypatch.setattr(script, "advantages", lambda *args: calls.append(1) or advantages(*args))
    monkeypatch.setattr(
        script, "policy_loss", lambda *args: ratios.append((args[1] - args[2]).abs().max()) or loss(*args)
    )
    script.train(script.Args(**TINY | {"total_timesteps": 192}, batch_mode=mode, run_dir=tmp_path))
    assert len(calls) == 3 * count and len(ratios) == 3 * 8  # 3 updates of 2 epochs of 4 minibatches
    assert max(ratios[::8]) < 1e-4 < max(ratios)


class Limited(gym.Env):
    """Pays 1 a step, for `length` steps; an observation tells the time. Faults: nan, error."""

    action_space, observation_space = gym.spaces.Box(-3, 1, (2,), np.float32), gym.spaces.Box(-9, 99, (1,), np.float32)

    def __init__(self, length=4, fault=None):
        self.length, self.fault, self.actions = length, fault, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.actions.append(action)
        self.t += 1
        if self.fault == "error" and self.t == 3:
            raise ValueError("boom-43")
        obs = np.full(1, np.nan if self.fault == "nan" and self.t == 3 else self.t, np.float32)
        return obs, 1.0, False, self.t == self.length, {}


@pytest.mark.parametrize("handle", [False, True])
@pytest.mark.parametrize("frame_skip", [1, 3])
def test_time_limits_and_frame_skip_in_a_run(tmp_path, monkeypatch, handle, frame_skip):
    """Every fourth frame is a time limit: bootstrapped from the last observation, or terminal. gamma^n a decision."""
    seen, advantages = [], script.advantages
    monkeypatch.setattr(gym, "make", lambda *_, **__: Limited())
    monkeypatch.setattr(
        script.Agents,
        "part",
        lambda self, name, x: 10 * self.raw[..., :1] if name == "value" else torch.zeros(*x.shape[:2], 2),
    )
    monkeypatch.setattr(script, "normalize", lambda x, *_: setattr(script.Agents, "raw", x) or x)
    monkeypatch.setattr(script, "advantages", lambda *args: seen.append((args, advantages(*args))) or seen[-1][1])
    monkeypatch.setattr(script.Agents, "learn", lambda *_: torch.zeros(len(script.LOSSES), 1))
    options = TINY | {"vectorization": "sync", "total_timesteps": 64 * frame_skip, "eval_episodes": 1, "gamma": 0.5}
    args = script.Args(**options, norm_value="none", handle_abandoned=handle, frame_skip=frame_skip, run_dir=tmp_path)
    script.train(args)
    ((kind, rewards, values, next_values, te, tr, _, gamma, *_), (_, targets)), *_ = seen
    period = {1: 4, 3: 2}[frame_skip]
    assert rewards[0, :4, 0].tolist() == {1: [1, 1, 1, 1], 3: [3, 1, 3, 1]}[frame_skip]
    assert float(gamma) == 0.5**frame_skip
    end = (0, period - 1, 0)
    assert tr[end] and te[end] == (not handle)
    last = rewards[end] + (float(gamma) * 40 if handle else 0)  # V of the state at the time limit is 10 t = 40
    assert abs(targets[end] - last) < 1e-5
    (row,) = rows(folders(tmp_path).popitem()[1])
    assert row["global_step"] == 64 * frame_skip and row["charts/episodic_length"] == 4


def test_actions_are_scaled_to_the_box(monkeypatch):
    env = Limited()
    with mock.patch.object(gym, "make", lambda *_, **__: env):
        envs = script.Envs(
            SimpleNamespace(env_id="", vectorization="sync", frame_skip=1), np.random.SeedSequence(1).spawn(1)
        )
    for value in (-1.0, 0.0, 1.0):
        envs.step(np.full((1, 2), value, np.float32))
    assert [action.tolist() for action in env.actions] == [[-3, -3], [-1, -1], [1, 1]]


@pytest.mark.parametrize("fault,message", [("nan", r"environment 0, step \d+ of its episode 1: .*nan.*: not finite"),
                                           ("error", "boom-43")])  # fmt: skip
def test_a_faulty_environment_ends_its_member_alone(tmp_path, monkeypatch, fault, message):
    made = []

    def make(*_, **__):  # 4 a member; the second member's are faulty
        made.append(Limited(fault=fault if 4 <= len(made) < 8 else None))
        return made[-1]

    monkeypatch.setattr(gym, "make", make)
    common = TINY | {"vectorization": "sync", "total_timesteps": 128, "run_dir": tmp_path / "runs"}
    args = script.Args(**common, stack=stack_file(tmp_path, [{"seed": 1}, {"seed": 2}, {"seed": 3}]))
    monkeypatch.setattr(script.Args, "members", lambda self, found=args.members(): found)  # which look, too
    made.clear()
    with pytest.raises(SystemExit, match=f"1 of 3 members failed.*{message}"):
        script.train(args)
    states = {
        path.name[:5]: json.loads((path / "status.json").read_text())["state"] for path in folders(tmp_path).values()
    }
    assert states == {"seed1": "finished", "seed2": "failed", "seed3": "finished"}


@pytest.mark.parametrize("fault,message", [
    (SystemExit(), "error: an environment called sys.exit"), (SystemExit(3), "error: an environment called sys.exit"),
    (OSError("boom-44"), "error: OSError: boom-44"), (None, r"^error: environment 39, .*: .* observation \[nan"),
])  # fmt: skip
def test_a_failure_of_a_plain_run_is_one_line(tmp_path, monkeypatch, fault, message):
    """Also with more environments than a printed line of numbers has room for, the last of which fails."""
    made = []

    def step(self, action):
        if fault and self.t == 2:
            raise fault
        return step_of(self, action)

    def make(*_, **__):
        made.append(Limited(fault="nan" if len(made) == 39 else None))
        return made[-1]

    step_of = Limited.step
    monkeypatch.setattr(Limited, "step", step)
    options = TINY | {"num_envs": 40, "iteration_size": 160, "vectorization": "sync", "run_dir": tmp_path}
    args = script.Args(**options)
    monkeypatch.setattr(gym, "make", make)
    with pytest.raises(SystemExit, match=message) as ended:
        script.train(args)
    assert "\n" not in ended.value.code and not list(tmp_path.rglob("result.json"))
    (status,) = tmp_path.rglob("status.json")
    assert json.loads(status.read_text())["state"] == "failed"


def start(folder, stack, **options):
    words = [word for name, value in (TINY | options).items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return subprocess.Popen([sys.executable, script.__file__, *words, "--stack", str(stack), "--run-dir", str(folder)],
                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)  # fmt: skip


@pytest.mark.parametrize(
    "number,vectorization,env_id",
    [(signal.SIGKILL, "envpool", "InvertedPendulum-v4"), (signal.SIGKILL, "sync", "Pendulum-v1"),
     (signal.SIGTERM, "envpool", "InvertedPendulum-v4")],
)  # fmt: skip
def test_a_stack_goes_on_exactly_after_a_stop(tmp_path, number, vectorization, env_id):
    stack = stack_file(tmp_path, [{"seed": 1}, {"seed": 2, "policy_loss": "vmpo"}, {"seed": 3, "frame_skip": 1}])
    options = dict(vectorization=vectorization, env_id=env_id, checkpoint_interval=3, total_timesteps=64 * 40)
    process = start(tmp_path / "stopped", stack, **options)
    until = time.monotonic() + 120
    while (
        sum(len(rows(path)) for path in folders(tmp_path / "stopped").values() if (path / "metrics.jsonl").exists())
        < 24
    ):
        assert process.poll() is None and time.monotonic() < until, process.stderr.read()
        time.sleep(0.02)
    process.send_signal(number)
    error = process.communicate()[1]
    assert process.returncode == {signal.SIGKILL: -9, signal.SIGTERM: 75}[number], error
    assert not any((path / "result.json").exists() for path in folders(tmp_path / "stopped").values())
    for folder in ("stopped", "straight"):
        process = start(tmp_path / folder, stack, **options)
        error = process.communicate()[1]
        assert process.returncode == 0 and "do not repeat" not in error, error
    assert_same_runs(tmp_path / "stopped", tmp_path / "straight")


def test_members_that_a_kill_parted_go_on_apart(tmp_path):
    """One has a checkpoint more than the other."""
    stack = stack_file(tmp_path, [{"seed": 1}, {"seed": 2}])
    common = TINY | {"checkpoint_interval": 2}
    for folder in ("parted", "straight"):
        script.train(script.Args(**common, stack=stack, run_dir=tmp_path / folder))
    for path, steps in zip(folders(tmp_path / "parted").values(), (512, 640)):
        (path / "result.json").unlink()
        for checkpoint in (path / "checkpoints").glob("*.pt"):
            if int(checkpoint.stem) > steps:
                checkpoint.unlink()
    gc.collect()
    script.train(script.Args(**common, stack=stack, run_dir=tmp_path / "parted"))
    assert_same_runs(tmp_path / "parted", tmp_path / "straight")


def test_eval_only_repeats_the_last_evaluation_and_changes_nothing(tmp_path):
    result = script.train(script.Args(**TINY, run_dir=tmp_path))
    (folder,) = folders(tmp_path).values()
    before = (folder / "metrics.jsonl").read_text(), (folder / "status.json").read_text()
    means = script.train(script.Args(**TINY, run_dir=tmp_path, eval_only=True))
    assert means["eval/return_mean"] == result["eval/return_mean"]
    assert before == ((folder / "metrics.jsonl").read_text(), (folder / "status.json").read_text())


# ---- Bad input ----

WRONG = [
    ("--constraint kl_mu_pi", "--constraint kl_mu_pi is a choice within --regularization constraint, but here"),
    ("--kl-mu-pi-threshold 0.1", "--kl-mu-pi-threshold 0.1 is a choice within --constraint kl_mu_pi, but here"),
    ("--policy-loss pg --clip-coef 0.2", "--clip-coef 0.2 is a choice within --policy-loss ppo, but here that is pg"),
    ("--rmsprop-momentum 0", "--rmsprop-momentum 0.0 is a choice within --optimizer rmsprop"),
    ("--rmsprop-centered", "--rmsprop-centered True is a choice within --optimizer rmsprop, but here that is adam"),
    ("--network shared --policy-width 64", "--policy-width 64 is a choice within --network separate"),
    ("--batch-mode fixed_trajectories --num-envs 16", "fragments of --iteration-size / --num-envs = 128: it must "
     "divide --minibatch-size 64 (--batch-mode fixed_trajectories)"),
    ("--minibatch-size 96", "--minibatch-size 96: it must divide --iteration-size 2048"),
    ("--num-envs 4096", "--num-envs 4096: it must divide --iteration-size 2048"),
    ("--frame-skip 0", "--frame-skip 0: it must be a number at least 1"),
    ("--gamma 1.5", "--gamma 1.5: it must be a number between 0 and 1"),
    ("--init-std 0.1 --min-std 0.5", "--min-std 0.5: it must be a number between 0 and 0.1"),
    ("--env-id HalfCheeta-v4", "HalfCheetah-v4"),
    ("--env-id Pendulum-v7 --vectorization sync", "Pendulum"),
    ("--stack nowhere.json", "nowhere.json"),
]  # fmt: skip
WRONG_STACKS = [
    ('[{"policy_width": 64}, {"policy_width": 128}]', "its members share one --policy-width"),
    ('[{"seed": 1}, {"seed": 1}]', "member 1: the same run as one before it"),
    ('[{"env_id": "Ant-v4"}]', "member 0: env_id: members set seed, preset, run_dir and choices alone"),
    ('[{"seed": 1}, {"policy_loss": "ppp"}]', "member 1: --policy-loss ppp: it is one of awr, pg, ppo"),
    ('[{"seed": 1}, {"gamma": "high"}]', "member 1: "),
    ("[]", "a list of one object or more"), ("{", "stack.json"), ("[1]", "stack.json"), ("3", "a list of one object"),
    ('[{"num_envs": 4.0}]', "member 0: --num-envs 4.0: it must be of type int"),
    ('[{"seed": null}]', "member 0: --seed null: it must be of type"),
    ('[{"gamma": true}]', "member 0: --gamma true: it must be of type float"),
    ('[{"norm_adv": "yes"}]', 'member 0: --norm-adv "yes": it must be of type'),
    ('[{"preset": null}]', "member 0: --preset None: it is one of default, recommended"),
]  # fmt: skip


def shown(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        tyro.cli(script.Args, args=arguments.split())
    printed = capsys.readouterr()
    assert caught.value.code == 2 and "Traceback" not in printed.err + printed.out
    return " ".join(re.sub("[│╭╮╰╯─]", " ", printed.err + printed.out).split())


@pytest.mark.parametrize("arguments,expected", WRONG, ids=[case[0].replace("--", "") for case in WRONG])
def test_wrong_arguments_are_told_with_what_to_type(capsys, arguments, expected):
    assert expected in shown(capsys, arguments)


@pytest.mark.parametrize("text,expected", WRONG_STACKS, ids=[case[0] for case in WRONG_STACKS])
def test_wrong_stacks_are_told(capsys, tmp_path, text, expected):
    (tmp_path / "stack.json").write_text(text)
    assert expected in shown(capsys, f"--stack {tmp_path}/stack.json")


@pytest.mark.parametrize("vectorization", ["sync", "envpool"])
def test_an_action_space_that_is_no_box(tmp_path, vectorization):
    with pytest.raises(SystemExit, match="takes a box with bounds"):
        script.train(
            script.Args(**TINY | {"env_id": "CartPole-v1", "vectorization": vectorization, "run_dir": tmp_path})
        )


def test_the_presets_know_every_choice_and_the_choices_their_number():
    source = Path(script.__file__).read_text()
    numbers = re.findall(r"# C(\d+)\b", source[source.index("class Args") : source.index("def __post_init__")])
    assert [int(number) for number in numbers] == list(range(1, 69))
    assert script.DEFAULT.keys() == script.PRESETS["recommended"].keys() <= {*script.Args.__dataclass_fields__}
    assert len(script.DEFAULT) == 68
    plain, advised = script.Args(**TINY), script.Args(**TINY, preset="recommended")
    assert (plain.gae_lambda, advised.gae_lambda, advised.awr_beta) == (0.95, 0.9, None)
    assert advised.init_std == 0.5 and advised.action_transform == "tanh" and advised.value_clip == 0


# ---- Learning ----


def test_three_seeds_learn_to_balance(tmp_path):
    """A random policy keeps the pole up for 6 steps."""
    choices = dict(num_envs=16, iteration_size=512, minibatch_size=64, update_epochs=10, value_width=64)
    choices |= dict(adam_learning_rate=1e-3)  # so that it takes 30,000 frames
    args = TINY | choices | dict(total_timesteps=30_720, eval_interval=0, eval_episodes=5, preset="recommended")
    stack = stack_file(tmp_path, [{"seed": seed} for seed in (1, 2, 3)])
    results = script.train(script.Args(**args, stack=stack, run_dir=tmp_path))
    assert min(result["eval/return_mean"] for result in results) > 300, results
