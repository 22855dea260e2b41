"""Overlap SGP: messages that come late, in an order of events that the test sets; and its bound."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.support.least_squares import LeastSquares

pytestmark = pytest.mark.training

RANKS, LR = 4, 0.1
GRAPH = topology.ring(RANKS)
SOURCES = {rank: [peer for peer in GRAPH[rank] if peer != rank] for rank in range(RANKS)}


class ProposerTurns:
    """Lets the ranks make their steps in one order."""

    def __init__(self, order):
        self.order, self.done, self.changed = order, 0, threading.Condition()

    def take(self, rank, step):
        """Make all steps of a rank, each in its turn."""
        for number, whose in enumerate(self.order):
            if whose == rank:
                with self.changed:
                    assert self.changed.wait_for(lambda turn=number: self.done == turn, timeout=60)
                step()
                with self.changed:
                    self.done += 1
                    self.changed.notify_all()


def order_within(staleness, seed, steps=80):
    """Ranks at random, none of them more steps ahead of a neighbour than is allowed."""
    dice, made, order = random.Random(seed), [0] * RANKS, []
    for _ in range(steps):
        free = [
            rank
            for rank in range(RANKS)
            if all(made[peer] >= made[rank] + 1 - staleness for peer in SOURCES[rank])
        ]
        order.append(dice.choice(free))
        made[order[-1]] += 1
    return order


def by_hand(order):
    """x and p by events: a step, shares for those who have read the last ones, what has come."""
    x, p = np.zeros((RANKS, 10)), np.ones(RANKS)
    inbox, unread = {rank: [] for rank in range(RANKS)}, set()
    gradients = LeastSquares(RANKS).gradients
    for rank in order:
        z = x / p[:, None]
        x[rank] -= LR * gradients(z)[rank]
        share = x[rank] / 3, p[rank] / 3
        for peer in SOURCES[rank]:
            if (rank, peer) not in unread:
                unread.add((rank, peer))
                inbox[peer].append((rank, *share))
                x[rank], p[rank] = x[rank] - share[0], p[rank] - share[1]
        for source, more, weight in inbox[rank]:
            unread.discard((source, rank))
            x[rank], p[rank] = x[rank] + more, p[rank] + weight
        inbox[rank] = []
    return x / p[:, None]


def trained(turns, **options):
    """This rank's model, after its steps in the order of the turns."""
    problem, rank = LeastSquares(RANKS), bf.rank()
    model = torch.nn.Linear(10, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer = bf.DistributedOptimizer(plain, model, "overlap_sgp", topology=GRAPH, **options)

    def step():
        optimizer.zero_grad()
        problem.loss(rank, model.weight[0]).backward()
        optimizer.step()

    turns.take(rank, step)
    bf.barrier()
    return model.weight.detach()[0].numpy(), optimizer.max_staleness


@pytest.mark.parametrize("staleness", [1, 3])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_formula_where_the_order_of_events_is_known(staleness, seed):
    """Numerators and weights come when they come, each once: 1e-12 of the loop by hand."""
    order = order_within(staleness, seed)
    got = LoopbackWorld(RANKS).run(trained, ProposerTurns(order), staleness=staleness)
    expected = by_hand(order)
    np.testing.assert_allclose(np.stack([x for x, _ in got]), expected, rtol=0, atol=1e-12)
    assert [bound for _, bound in got] == [staleness] * RANKS


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_nobody_is_further_ahead_than_the_bound(staleness):
    """When a rank has made step k its neighbours have come to step k − s; some are behind."""

    def case():
        model = torch.nn.Linear(4, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = bf.DistributedOptimizer(
            plain, model, "overlap_sgp", topology=GRAPH, staleness=staleness
        )
        behind = []
        for _ in range(10):
            if bf.rank() == 3:
                time.sleep(0.01)
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            ages = optimizer.staleness()
            behind += [ages[peer].lag - ages[peer].steps for peer in SOURCES[bf.rank()]]
        return max(behind)

    furthest = LoopbackWorld(RANKS).run(case)
    assert max(furthest) <= staleness
    assert max(furthest) > 0 or staleness == 0


def test_the_users_bound_counts():
    """``max_staleness`` overrules what the method would have."""

    def case():
        model = torch.nn.Linear(4, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        return bf.DistributedOptimizer(plain, model, "overlap_sgp", max_staleness=5).max_staleness

    assert LoopbackWorld(2).run(case) == [5, 5]
