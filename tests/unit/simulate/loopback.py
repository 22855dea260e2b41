"""The same training on ranks that are threads, for comparison with a simulation."""

from __future__ import annotations

import copy

import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from asyncddp.simulate.problem import StackedBatches
from tests.support import LoopbackWorld


def train_on_loopback(
    problem,
    optimizer,
    algorithm,
    steps,
    seed=0,
    schedule=None,
    local=None,
    departures=None,
    **settings,
):
    """Train as ``simulate.train`` does; gives all parameters by name, stacked, and bytes sent.

    Ranks that leave do so at the end of a ``join`` block, which begins when the first one leaves.
    """
    batches = StackedBatches(problem, seed)

    def case():
        rank = bf.rank()
        given = problem.model
        model = copy.deepcopy(given[rank] if isinstance(given, list) else given)
        plain = optimizer(list(model.parameters()))
        wrapped = bf.DistributedOptimizer(plain, model, algorithm, **settings, broadcast=False)
        scheduler = None if schedule is None else schedule(wrapped)
        one_sided = all(how.one_sided for how in ALGORITHMS[algorithm].how)

        def train(begin, end):
            for step in range(begin, end):
                inputs, *targets = (one[0] for one in batches.of([rank], [step]))
                wrapped.force_barrier = one_sided  # also after a warm-up
                wrapped.zero_grad()
                problem.loss(model(inputs), *targets).backward()
                wrapped.step()
                if scheduler is not None:
                    scheduler.step()

        together = min(departures.values()) if departures else steps
        train(0, together)
        if departures:
            with bf.join(wrapped):
                train(together, departures.get(rank, steps))
        found = {name: one.detach().clone() for name, one in model.named_parameters()}
        return found, wrapped.bytes_sent

    results = LoopbackWorld(problem.ranks).run(case, settings={"ranks_per_machine": local})
    names = results[0][0]
    stacked = {name: torch.stack([found[name] for found, _ in results]) for name in names}
    return stacked, [sent for _, sent in results]
