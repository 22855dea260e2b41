"""What tests over all methods need to know of each: a graph, an optimizer, and formulas.

The formulas are those of the papers, for the models of all ranks in one matrix, whose rows are the
ranks: X⁺ = W (X − γ G(X)), and so on. ``w`` gives the mixing matrix of a round, ``gradient`` all
ranks' gradients, ``rates`` the learning rates of a step, for each column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import networkx as nx
import numpy as np
import torch

from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.compression.bf16 import BF16
from asyncddp.compression.largest_error import largest_error
from asyncddp.topology import GraphOrSchedule, TopologyError

Matrix = np.ndarray
Step = Callable[[int], Matrix]
Formula = Callable[[Matrix, Step, Callable[[Matrix], Matrix], Step], Iterator[Matrix]]


def one_of_each_kind(names: Iterable[str]) -> list[str]:
    """The first method of each kind: of when and what it averages, with whom, and how compressed.

    A law of the phases, rounds and exchanges that methods share needs no more of them.
    """
    kinds: dict[tuple[object, ...], str] = {}
    for name in names:
        method = ALGORITHMS[name]
        at_intervals = method().communication_interval is not None
        kind = (method.when, method.what, method.compression, method.how[0])
        kind = (*kind, at_intervals, method.owns_momentum, method.hidden_rounds)
        kinds.setdefault(kind, name)
    return list(kinds.values())


def fitting_graph(name: str, n: int) -> nx.DiGraph[int]:
    """A ring, or else what comes closest to it among the graphs that a method admits."""
    method = ALGORITHMS[name]()
    ring = topology.ring(n)
    for graph in (ring, topology.lazy_weights(ring), topology.star(n), topology.complete(n)):
        try:
            method.check(graph)
        except TopologyError:
            continue
        return graph
    raise AssertionError(f"no graph for {name}")


def one_peer(name: str, n: int) -> topology.Schedule:
    """Exact averages in log2(n) rounds: one-peer exponential, or pairs for who needs symmetry."""
    symmetric = ALGORITHMS[name].needs.symmetric
    return (topology.one_peer_hypercube if symmetric else topology.one_peer_exponential)(n)


def every_step(name: str) -> dict[str, int]:
    """Options by which a method averages in every step, also one that rarely does."""
    rarely = not ALGORITHMS[name].averages_first_step
    return {"communication_interval": 1} if rarely else {}


def admits(name: str, graph: GraphOrSchedule) -> bool:
    """Whether a method says that it works on a graph."""
    try:
        ALGORITHMS[name]().check(graph)
    except TopologyError:
        return False
    return True


def sgd_for(name: str, lr: float, momentum: float = 0.9) -> Callable[..., torch.optim.Optimizer]:
    """SGD with momentum, or without any for methods that keep it themselves."""
    own = ALGORITHMS[name].owns_momentum
    return partial(torch.optim.SGD, lr=lr, momentum=0.0 if own else momentum)


# formulas: each yields X¹, X², …


def adapt_then_combine(x, w, gradient, rates):
    for k in iter_steps():
        x = w(k) @ (x - rates(k) * gradient(x))
        yield x


def adapt_with_combine(x, w, gradient, rates):
    for k in iter_steps():
        x = w(k) @ x - rates(k) * gradient(x)
        yield x


def gradient_allreduce(x, w, gradient, rates):
    for k in iter_steps():
        x = x - rates(k) * gradient(x).mean(0)
        yield x


def averaged_with_all(x, w, gradient, rates, every=3):
    for k in iter_steps():
        mixed = np.broadcast_to(x.mean(0), x.shape) if k % every == 0 else x
        x = mixed - rates(k) * gradient(x)
        yield x


def push_sum(x, w, gradient, rates):
    z, p = x, np.ones((len(x), 1))
    for k in iter_steps():
        linked = w(k) != 0.0
        shares = linked / linked.sum(0)  # of what each rank keeps and gives
        x, p = shares @ (p * z - rates(k) * gradient(z)), shares @ p
        z = x / p
        yield z


def low_precision_decentralized(x, w, gradient, rates):
    replicas = x
    for k in iter_steps():
        h = replicas - rates(k) * gradient(replicas)
        replicas = replicas + bfloat16(w(k) @ replicas - 2 * replicas + h)
        yield replicas


def a2cid2(x, w, gradient, rates, eta, alpha):
    tilde, keep = x, (1 + np.exp(-2 * eta)) / 2
    for k in iter_steps():
        difference, step = 2 * (x - w(k) @ x), rates(k) * gradient(x)
        x, tilde = x - difference / 2 - step, tilde - alpha * difference - step
        x, tilde = keep * x + (1 - keep) * tilde, keep * tilde + (1 - keep) * x
        yield x


def gradient_tracking(x, w, gradient, rates, combine_last=True):
    y = g = gradient(x)
    for k in iter_steps():
        x = w(k) @ (x - rates(k) * y) if combine_last else w(k) @ x - rates(k) * y
        before, g = g, gradient(x)
        y = w(k if combine_last else k + 1) @ y + g - before
        yield x


def push_diging(x, w, gradient, rates):
    u, v, y, g = x, np.ones((len(x), 1)), gradient(x), gradient(x)
    for k in iter_steps():
        u, v = w(k) @ (u - rates(k) * y), w(k) @ v
        x = u / v
        before, g = g, gradient(x)
        y = w(k) @ y + g - before
        yield x


def exact_diffusion(x, w, gradient, rates, lazy=True, beta=0.0):
    psi, m = x, np.zeros_like(x)
    for k in iter_steps():
        m = beta * m + gradient(x)
        before, psi = psi, x - rates(k) * m
        combine = (np.eye(len(x)) + w(k)) / 2 if lazy else w(k)
        x = combine @ (psi + x - before)
        yield x


def extra(x, w, gradient, rates):
    before, step_before = x, rates(0) * gradient(x)
    x = w(0) @ x - step_before
    yield x
    for k in iter_steps(1):
        one, step = np.eye(len(x)), rates(k) * gradient(x)
        after = (one + w(k)) @ x - (one + w(k)) / 2 @ before - (step - step_before)
        before, x, step_before = x, after, step
        yield x


def momentum_tracking(x, w, gradient, rates, beta=0.9):
    m = c = np.zeros_like(x)
    for k in iter_steps():
        m = beta * m + gradient(x)
        # with C of the round before, since C⁺ = W (C - M⁺) + M⁺ is mixed in the next round
        x, c = w(k) @ x - rates(k) * (m - c), w(k + 1) @ (c - m) + m
        yield x


def quasi_global_momentum(x, w, gradient, rates, beta=0.9, mu=0.9):
    m = np.zeros_like(x)
    for k in iter_steps():
        before = x
        x = w(k) @ (x - rates(k) * (beta * m + gradient(x)))
        m = mu * m + (1 - mu) * (before - x) / rates(k)
        yield x


def decentlam(x, w, gradient, rates, beta=0.9):
    m = np.zeros_like(x)
    for k in iter_steps():
        m = beta * m + (x - w(k) @ (x - rates(k) * gradient(x))) / rates(k)
        x = x - rates(k) * m
        yield x


def local_sgd(x, w, gradient, rates, every=3):
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            x = np.broadcast_to(x.mean(0), x.shape)
        yield x


def des_loc(x, w, gradient, rates, every, moments, betas=(0.8, 0.9), eps=1e-3):
    """With Adam, whose moments are averaged every so many steps each."""
    u, v = np.zeros_like(x), np.zeros_like(x)
    for k in iter_steps(1):
        g = gradient(x)
        u, v = betas[0] * u + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        step = (u / (1 - betas[0] ** k)) / (np.sqrt(v / (1 - betas[1] ** k)) + eps)
        x = x - rates(k - 1) * step
        u, v, x = (
            np.broadcast_to(one.mean(0), one.shape) if k % interval == 0 else one
            for one, interval in zip((u, v, x), (*moments, every), strict=True)
        )
        yield x


def slowmo(x, w, gradient, rates, every=3, beta=0.5, alpha=1.0):
    outer, u = x, np.zeros_like(x)
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            u = beta * u + (outer - x.mean(0)) / rates(k - 1)
            x = outer = outer - alpha * rates(k - 1) * u
        yield x


def slowmo_over_gossip(x, w, gradient, rates, every=3, beta=0.5, alpha=1.0):
    outer, u = x, np.zeros_like(x)
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            u = beta * u + (outer - x.mean(0)) / rates(k - 1)
            x = outer = outer - alpha * rates(k - 1) * u
        else:
            x = w(k - 1) @ x
        yield x


def slowmo_over_push_sum(x, w, gradient, rates, every=3, beta=0.5, alpha=1.0):
    outer, u, p = x, np.zeros_like(x), np.ones((len(x), 1))
    for k in iter_steps(1):
        pushed = p * x - rates(k - 1) * gradient(x)
        if k % every == 0:
            u = beta * u + (outer - pushed.mean(0)) / rates(k - 1)
            x = outer = outer - alpha * rates(k - 1) * u
            p = np.ones((len(x), 1))
        else:
            p = w(k - 1) @ p
            x = w(k - 1) @ pushed / p
        yield x


def diloco(x, w, gradient, rates, every=3, eta=0.7, mu=0.9, q=None):
    """``q`` is what a compressor does."""
    outer, m = x, np.zeros_like(x)
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            own = outer - x
            change = own.mean(0) if q is None else q(q(own).mean(0))
            m = mu * m + change
            x = outer = outer - eta * (change + mu * m)
        yield x


def streaming_diloco(
    x, w, gradient, rates, every=3, ends=(10,), delay=2, alpha=0.5, eta=0.7, mu=0.9, q=None
):
    """Columns up to each of ``ends`` are a fragment; ``q`` is what a compressor does."""
    outer, m, starts = x.copy(), np.zeros_like(x), (0, *ends)
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            part = slice(*starts[(k // every - 1) % len(ends) :][:2])
            own = (outer - x)[:, part]
            change = own.mean(0) if q is None else q(q(own).mean(0))
            m[:, part] = mu * m[:, part] + change
            outer[:, part] -= eta * (change + mu * m[:, part])
        if k >= every and k % every == delay:
            x[:, part] = alpha * x[:, part] + (1 - alpha) * outer[:, part]
        yield x.copy()


def decoupled_diloco(x, w, gradient, rates, every=3, eta=0.7, mu=0.9):
    theta, m = x, np.zeros_like(x)
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            change = theta - w(k // every - 1) @ x
            m = mu * m + change
            x = theta = theta - eta * (change + mu * m)
        yield x


def noloco(x, w, gradient, rates, every=3, eta=0.7, mu=0.9, kappa=0.7):
    phi, delta = x, np.zeros_like(x)
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            mix = w(k // every - 1)
            delta = mu * delta + eta * mix @ (x - phi) + kappa * (mix @ phi - phi)
            x = phi = phi + delta
        yield x


def factored_gossip_diloco(x, w, gradient, rates, every=3, eta=0.7, mu=0.9):
    theta, psi, m = x, x, np.zeros_like(x)
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            number, change = 2 * (k // every - 1), theta - x
            m = mu * m + change
            x = theta = w(number) @ (psi - eta * (change + mu * m))
            psi = w(number + 1) @ theta
        yield x


def gasloc(x, w, gradient, rates, every=3, eta=0.7, gamma=0.5, alpha=0.6):
    start, before = x, x
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            v = start + eta * (x - start)
            laplacian = np.eye(len(x)) - w(k // every - 1)
            x = start = v - alpha * laplacian @ v + gamma * (v - before)
            before = v
        yield x


def sparse_loco(x, w, gradient, rates, every=3, eta=0.8, beta=0.9):
    outer, e = x, np.zeros_like(x)
    for k in iter_steps(1):
        x = x - rates(k - 1) * gradient(x)
        if k % every == 0:
            e = beta * e + outer - x
            s = bfloat16(e)
            e = e - s
            x = outer = outer - eta * s.mean(0)
        yield x


def demo(x, w, gradient, rates, beta=0.9):
    delta = np.zeros_like(x)
    for k in iter_steps():
        delta = beta * delta + rates(k) * gradient(x)
        q = bfloat16(delta)
        delta = delta - q
        x = x - rates(k) * np.sign(q.sum(0))
        yield x


def relay_sgd(x, w, gradient, rates):
    n = len(x)
    edges = [(i, j) for i, j in zip(*np.nonzero(w(0)), strict=True) if i != j]
    m = {edge: np.zeros(x.shape[1]) for edge in edges}
    c = dict.fromkeys(edges, 0)
    for k in iter_steps():
        h = x - rates(k) * gradient(x)
        m, c = (
            {(i, j): h[i] + sum(m[s, t] for s, t in edges if t == i and s != j) for i, j in edges},
            {(i, j): 1 + sum(c[s, t] for s, t in edges if t == i and s != j) for i, j in edges},
        )
        x = np.stack(
            [
                (
                    h[i] * (n - sum(c[s, t] for s, t in edges if t == i))
                    + sum(m[s, t] for s, t in edges if t == i)
                )
                / n
                for i in range(n)
            ]
        )
        yield x


def choco_sgd(x, w, gradient, rates, gamma):
    known = np.zeros_like(x)
    for k in iter_steps():
        h = x - rates(k) * gradient(x)
        known = known + bfloat16(h - known)
        x = h + gamma * (w(k) @ known - known)
        yield x


def beer(x, w, gradient, rates, gamma):
    h = v = g = public = np.zeros_like(x)
    for k in iter_steps():
        before, g = g, gradient(x)
        v = v + gamma * (w(k) @ public - public) + g - before
        x = x - rates(k) * v + gamma * (w(k) @ h - h)
        h, public = h + bfloat16(x - h), public + bfloat16(v - public)
        yield x


def deepsqueeze(x, w, gradient, rates, gamma):
    delta = np.zeros_like(x)
    for k in iter_steps():
        h = x - rates(k) * gradient(x)
        q = bfloat16(h + delta)
        delta = h + delta - q
        x = h + gamma * (w(k) @ q - q)
        yield x


def moniqua(x, w, gradient, rates, theta, gamma):
    modulus = 2 * theta / (1 - 2 * largest_error(BF16()))
    for k in iter_steps():
        h = x - rates(k) * gradient(x)
        q = bfloat16(h / modulus - np.round(h / modulus))
        apart = q[None, :, :] - h[:, None, :] / modulus  # by receiver and sender
        apart = modulus * (apart - np.round(apart))
        own = np.einsum("iid->id", apart)
        x = h + gamma * (np.einsum("ij,ijd->id", w(k), apart) - own)
        yield x


def bfloat16(x: Matrix) -> Matrix:
    """Round to 8 significant bits, ties to even, as the compressor of this name does."""
    mantissa, exponent = np.frexp(x)
    return np.ldexp(np.round(mantissa * 256), exponent - 8)


def iter_steps(start: int = 0) -> Iterator[int]:
    """0, 1, 2, …"""
    while True:
        yield start
        start += 1


FORMULAS: dict[str, tuple[dict[str, object], Formula]] = {
    "adapt_then_combine": ({}, adapt_then_combine),
    "adapt_with_combine": ({}, adapt_with_combine),
    "async_model_average": ({}, adapt_with_combine),
    "win_put": ({}, adapt_with_combine),
    "pull_get": ({}, adapt_with_combine),
    "push_sum": ({}, push_sum),
    "overlap_sgp": ({}, push_sum),
    "gradient_allreduce": ({}, gradient_allreduce),
    "decentralized": ({"communication_interval": 3}, averaged_with_all),
    "low_precision_decentralized": (
        {"compression": "bf16"},
        low_precision_decentralized,
    ),
    "ad_psgd": ({}, adapt_with_combine),
    "a2cid2": ({"rate": 0.3, "pair_step": 0.8}, partial(a2cid2, eta=0.3, alpha=0.8)),
    "gradient_tracking": ({}, gradient_tracking),
    "gradient_tracking, diging": (
        {"form": "diging"},
        partial(gradient_tracking, combine_last=False),
    ),
    "push_diging": ({}, push_diging),
    "exact_diffusion": ({}, exact_diffusion),
    "d2": ({}, partial(exact_diffusion, lazy=False)),
    "edm": ({"beta": 0.7}, partial(exact_diffusion, beta=0.7)),
    "extra": ({}, extra),
    "momentum_tracking": ({"beta": 0.7}, partial(momentum_tracking, beta=0.7)),
    "quasi_global_momentum": (
        {"beta": 0.7, "mu": 0.8},
        partial(quasi_global_momentum, beta=0.7, mu=0.8),
    ),
    "decentlam": ({"beta": 0.7}, partial(decentlam, beta=0.7)),
    "power_gossip": ({}, adapt_then_combine),  # of vectors
    "relay_sgd": ({}, relay_sgd),
    "local_sgd": ({"communication_interval": 3}, local_sgd),
    "post_local_sgd": ({"communication_interval": 3}, local_sgd),
    "des_loc": ({"communication_interval": 3}, local_sgd),
    "slowmo": ({"communication_interval": 3}, slowmo),
    "slowmo, gossip": (
        {"communication_interval": 3, "base": "adapt_then_combine"},
        slowmo_over_gossip,
    ),
    "slowmo, push-sum": (
        {"communication_interval": 3, "base": "push_sum"},
        slowmo_over_push_sum,
    ),
    "diloco": ({"communication_interval": 3}, diloco),
    "muloco": (
        {"communication_interval": 3, "outer_momentum": 0.9, "compression": "bf16"},
        partial(diloco, q=bfloat16),
    ),
    "streaming_diloco": (
        {"communication_interval": 3, "fragments": 1, "delay": 2},
        streaming_diloco,
    ),
    "streaming_diloco, fragments": (
        {"communication_interval": 2, "fragments": 2, "mixing": 0.3},
        partial(streaming_diloco, every=2, ends=(4, 10), delay=1, alpha=0.3),
    ),
    "streaming_diloco, at once": (
        {"communication_interval": 1, "fragments": 2, "compression": "bf16"},
        partial(streaming_diloco, every=1, ends=(4, 10), delay=0, q=bfloat16),
    ),
    "choco_sgd": (
        {"compression": "bf16", "consensus_step": 0.6},
        partial(choco_sgd, gamma=0.6),
    ),
    "beer": ({"compression": "bf16", "consensus_step": 0.6}, partial(beer, gamma=0.6)),
    "deepsqueeze": (
        {"compression": "bf16", "consensus_step": 0.6},
        partial(deepsqueeze, gamma=0.6),
    ),
    "moniqua": (
        {"compression": "bf16", "theta": 1.6, "consensus_step": 0.8},
        partial(moniqua, theta=1.6, gamma=0.8),
    ),
    "demo": ({"beta": 0.9, "compression": "bf16"}, demo),
    "noloco": ({"communication_interval": 3}, noloco),
    "decoupled_diloco": ({"communication_interval": 3, "fragments": 1}, decoupled_diloco),
    "factored_gossip_diloco": ({"communication_interval": 3}, factored_gossip_diloco),
    "gasloc": (
        {"communication_interval": 3, "outer_momentum": 0.5, "consensus_rate": 0.6},
        gasloc,
    ),
    "sparse_loco": (
        {
            "communication_interval": 3,
            "outer_lr": 0.8,
            "error_decay": 0.9,
            "compression": "bf16",
        },
        sparse_loco,
    ),
}
"""By method, and form: options, and the formula."""

EACH_STEP = {"decoupled_diloco": {"communication_interval": 1, "fragments": 1}}
"""Options of methods that are one-sided, and rare by default, to average in each step."""
