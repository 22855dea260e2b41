"""Outer steps of gossip: what they are on a complete graph, and how fast ranks come together."""

from __future__ import annotations

import math
import threading
from functools import partial

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import simulate, topology
from tests.support import LoopbackWorld
from tests.support.least_squares import LeastSquares
from tests.support.loops import on_each_rank

RATE, ROUNDS, EVERY = 0.08, 6, 3


def trained(name, *, alike=False, apart=0.0, steps=ROUNDS * EVERY, **options):
    """This rank's models after each step, of LS(n); ``alike`` gives all the Hessian of rank 0."""
    problem = LeastSquares(bf.size())
    hessian, slope = problem.gradient(bf.rank())
    hessian = problem.gradient(0)[0] if alike else hessian
    model = torch.nn.Linear(10, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.3 + apart * bf.rank())
    plain = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"communication_interval": EVERY, **options, "broadcast": False}
    optimizer = bf.DistributedOptimizer(plain, model, name, **options)
    found = []
    for _ in range(steps):
        model.weight.grad = (hessian @ model.weight.detach()[0] - slope)[None]
        optimizer.step()
        found.append(model.weight.detach()[0].clone())
    return torch.stack(found).numpy()


def run(name, n=4, **options):
    """All ranks' models after each step, ``[rank, step, :]``."""
    return np.stack(LoopbackWorld(n).run(partial(trained, name, **options)))


def same(one, other):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_without_momentum_on_the_complete_graph_it_is_diloco():
    """α Λ = I - J and γ = 0: the outer step along the mean change, on ranks that differ."""
    options = {"outer_momentum": 0.0, "outer_lr": 0.6}
    given = {"topology": topology.complete(4), "consensus_rate": 1.0}
    same(run("gasloc", **options, **given), run("diloco", **options))


def test_where_the_second_round_is_exact_it_is_diloco():
    """With its momentum, and whatever the hidden round does: on ranks that differ, and on pairs."""
    options = {"outer_momentum": 0.9, "outer_lr": 0.6}
    name, expected = "factored_gossip_diloco", run("diloco", **options)
    same(run(name, topology=topology.complete(4), **options), expected)
    pairs = {"topology": topology.random_matching}
    same(run(name, n=2, **pairs, **options), run("diloco", n=2, **options))


GRAPHS = {
    "ring": {"topology": topology.ring, "consensus_rate": 1.2},
    "complete": {"topology": topology.complete},
    "random pairs": {},
    "one-peer hypercube": {"topology": topology.one_peer_hypercube},
}
"""Options of gossip that keeps the mean."""


METHODS = [
    *(("gasloc", graph, options) for graph, options in GRAPHS.items()),
    ("factored_gossip_diloco", "ring", {"topology": topology.ring}),
    ("factored_gossip_diloco", "random pairs", {}),
    ("factored_gossip_diloco", "one-peer", {"topology": topology.one_peer_exponential}),
]
"""Methods whose mean is DiLoCo's, name of a graph, and options."""


@pytest.mark.parametrize(("name", "graph", "options"), METHODS)
def test_the_mean_is_that_of_diloco_where_hessians_are_equal(name, graph, options):
    """With momentum too: η is DiLoCo's outer_lr, γ its outer_momentum, from equal starts."""
    found = run(name, alike=True, outer_momentum=0.8, **options)
    expected = run("diloco", alike=True, outer_momentum=0.8)
    same(found[:, EVERY - 1 :: EVERY].mean(0), expected[:, EVERY - 1 :: EVERY].mean(0))
    assert np.ptp(found[:, -1], 0).max() > 1e-3  # ranks are apart, as their optima are


@pytest.mark.parametrize(("name", "graph", "options"), METHODS)
def test_the_mean_makes_the_nesterov_step_of_the_mean_change(name, graph, options):
    """On ranks that differ in all: m⁺ = γ m + Δ, θ⁺ = θ - η (Δ + γ m⁺), Δ the mean change."""
    eta, gamma, problem = 0.7, 0.8, LeastSquares(4)
    found = run(name, outer_momentum=gamma, **options)
    mean, m = np.full(10, 0.3), 0.0
    start = np.full((4, 10), 0.3)
    for last in range(EVERY - 1, found.shape[1], EVERY):
        end = found[:, last - 1]
        change = (start - (end - RATE * problem.gradients(end))).mean(0)
        m = gamma * m + change
        mean = mean - eta * (change + gamma * m)
        start = found[:, last]
        same(start.mean(0), mean)


def constants(n):
    """The least eigenvalue of Λ = I - W on the ring of n but 0, and the largest."""
    found = np.sort(np.linalg.eigvalsh(np.eye(n) - topology.mixing_matrix(topology.ring(n))))
    return found[1], found[-1]


def rounds_to_agree(n, accuracy=1e-6, **options):
    """Rounds on the ring until quadratics' ranks are ``accuracy`` times as far apart as at first.

    f_i(x) = x² / 2 for all, whose steps of 1e-9 leave the gossip alone.
    """
    models = [torch.nn.Linear(1, 1, bias=False, dtype=torch.float64) for _ in range(n)]
    starts = np.random.default_rng(n).standard_normal(n)
    for model, start in zip(models, starts - starts.mean(), strict=True):
        torch.nn.init.constant_(model.weight, start)
    ones = torch.ones(1, 1, dtype=torch.float64)
    problem = simulate.Problem(
        models, lambda output, _: output.square().mean() / 2, [(ones, ones)] * n
    )
    sgd = partial(torch.optim.SGD, lr=1e-9)
    options = {"communication_interval": 1, "outer_lr": 1.0, **options}
    made = simulate.train(problem, sgd, "gasloc", topology=topology.ring(n), steps=n * n, **options)
    apart = np.asarray(made.consensus_distance)
    return int(np.argmax(apart <= accuracy * apart[0]))


def test_momentum_needs_the_root_of_the_rounds():
    """On rings, by χ = L / μ, about n²: α = 2 / (L + μ) without, Polyak's α and γ with momentum."""
    rounds = {}
    for n in (8, 16, 32):
        low, high = constants(n)
        root = math.sqrt(high / low)
        gamma = ((root - 1) / (root + 1)) ** 2
        alpha = 4 / (math.sqrt(high) + math.sqrt(low)) ** 2
        plain = rounds_to_agree(n, outer_momentum=0.0, consensus_rate=2 / (low + high))
        fast = rounds_to_agree(n, outer_momentum=gamma, consensus_rate=alpha)
        assert plain >= 0.7 * math.log(1e6) * root**2 / 2  # rate (χ - 1) / (χ + 1)
        assert fast <= 1.7 * math.log(1e6) * root / 2  # rate (√χ - 1) / (√χ + 1)
        rounds[n] = plain, fast
    grows = [math.log2(rounds[32][k] / rounds[8][k]) / 2 for k in range(2)]
    assert grows[0] == pytest.approx(2, abs=0.25), rounds
    assert grows[1] == pytest.approx(1, abs=0.25), rounds


@on_each_rank(ranks=4)
def test_where_momentum_diverges_it_is_refused():
    """By name, with the largest α that works: beyond 2 (1 + γ) / L on one graph, or on pairs."""

    def build(**options):
        model = torch.nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        return bf.DistributedOptimizer(plain, model, "gasloc", **options)

    ring = topology.ring(4)  # L = 4 / 3
    build(topology=ring, outer_momentum=0.5, consensus_rate=2.2)
    with pytest.raises(topology.TopologyError, match=r"eigenvalue is -0\.3333, but gasloc"):
        build(topology=ring, outer_momentum=0.5, consensus_rate=2.3)
    words = r"changes from round to round, but consensus_rate=0.8 .*=0.5 .*Use at most 0.75, or"
    with pytest.raises(topology.TopologyError, match=words):
        build(topology=topology.random_matching(4), outer_momentum=0.5, consensus_rate=0.8)
    with pytest.raises(topology.TopologyError, match="weights are not symmetric, but gasloc"):
        build(topology=topology.exponential_two(4))
    build(topology=topology.exponential_two(4), outer_momentum=0.0)


@pytest.mark.parametrize("momentum", [0.5, 0.9])
def test_random_pairs_come_together_by_default(momentum):
    """α = 1 - γ: with α = 1 and γ = 0.9 they would be 10¹² times as far apart after 400 rounds."""
    made = run("gasloc", 8, alike=True, apart=1.0, outer_momentum=momentum, steps=900)
    end = made[:, -1]
    fixed = run("gasloc", 8, alike=True, outer_momentum=momentum, steps=900)[:, -1]
    assert np.abs(end - fixed).max() < 1e-3


def test_distances_are_contracted_by_both_rounds():
    """Without a gradient: W₀, then W₂ W₁ and so on, where W₁ is hidden; two bits of four ranks."""
    graph = topology.one_peer_hypercube(4)
    hidden, blocking = (topology.mixing_matrix(graph, k) for k in (1, 0))
    assert np.linalg.norm(blocking @ hidden - 0.25) < 1e-12
    options = {"alike": True, "topology": graph, "outer_lr": 1e-9, "steps": 2 * EVERY}
    apart = run("factored_gossip_diloco", apart=1.0, **options)
    alone = run("factored_gossip_diloco", **options)
    moved = (apart - alone)[:, [0, EVERY - 1, -1], 0]
    starts = np.arange(4.0)
    assert moved[:, 1] == pytest.approx(blocking @ starts, abs=1e-6)
    assert moved[:, 2] == pytest.approx(np.full(4, starts.mean()), abs=1e-6)


def test_steps_go_on_while_the_hidden_round_travels():
    """A rank waits for another one where both have made their H steps, and not before."""
    ahead = threading.Event()

    def case():
        model = torch.nn.Linear(2, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"communication_interval": 4, "topology": topology.ring(2)}
        with pytest.raises(bf.ArgumentError, match="lasts 4 steps more, in which buckets change"):
            bf.DistributedOptimizer(
                plain, model, "factored_gossip_diloco", update_in_backward=True, **options
            )
        optimizer = bf.DistributedOptimizer(plain, model, "factored_gossip_diloco", **options)
        rounds, sent = [], []
        for step in range(8):
            if bf.rank() == 0 and step == 4:
                assert ahead.wait(60)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            if bf.rank() == 1 and step == 7:
                ahead.set()
            optimizer.step()
            rounds.append(optimizer.round)
            sent.append(optimizer.bytes_sent)
        optimizer.switch_to("local_sgd")
        return rounds, [one // sent[3] for one in sent]

    steps = [0, 0, 0, 1, 1, 1, 1, 3], [0, 0, 0, 1, 1, 1, 1, 2]
    assert LoopbackWorld(2).run(case) == [steps] * 2
