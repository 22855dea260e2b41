"""Asynchronous training of one number by ranks that differ in speed or in how long they train."""

from __future__ import annotations

import math
import threading

import torch

import asyncddp as bf
from asyncddp import topology

LR = 0.05


class Pace:
    """Gives each rank a speed of its own, by events: none gets ahead of the others' time.

    Args:
        costs: How long a step of each rank takes, in any unit.
        ahead: How many of its steps a rank may be ahead of the one that is furthest behind.
    """

    def __init__(self, costs, ahead=2):
        self._costs, self._ahead = costs, ahead
        self.times, self._changed = [0.0] * len(costs), threading.Condition()

    def step(self, rank):
        """A rank has made a step."""
        with self._changed:
            self.times[rank] += self._costs[rank]
            self._changed.notify_all()
            limit = self.times[rank] - self._ahead * self._costs[rank]
            assert self._changed.wait_for(lambda: min(self.times) >= limit, timeout=120)

    def done(self, rank):
        """A rank makes no more."""
        with self._changed:
            self.times[rank] = math.inf
            self._changed.notify_all()


def trained(method, **options):
    """Make this rank's model: it learns its rank on its own, and the mean with the others.

    Returns:
        A function that makes a step, the model, and its wrapper.
    """
    target = float(bf.rank())
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    graph, data = topology.ring(bf.size()), torch.ones(1, 1, dtype=torch.float64)
    if method == "DecentralizedDataParallel":
        ddp = bf.DecentralizedDataParallel(
            model,
            lambda named: torch.optim.SGD([p for _, p in named], lr=LR),
            sync=False,
            topology=graph,
        )
        return lambda: (ddp(data) - target).square().div(2).sum().backward(), model, ddp
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), model, method, topology=graph, **options
    )

    def step():
        optimizer.zero_grad()
        (model(data) - target).square().div(2).sum().backward()
        optimizer.step()

    return step, model, optimizer
