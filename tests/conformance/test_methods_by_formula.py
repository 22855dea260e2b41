"""Methods by the formulas of their papers: the same models, step by step, on every transport."""

from __future__ import annotations

from functools import partial

import networkx as nx
import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from tests.support import LoopbackWorld, on
from tests.support.least_squares import LeastSquares
from tests.support.methods import (
    FORMULAS,
    admits,
    des_loc,
    fitting_graph,
    one_of_each_kind,
    one_peer,
)

STEPS = 12
every_formula = pytest.mark.parametrize("title", list(FORMULAS))
TIME_VARYING = [
    title
    for title in FORMULAS
    if admits(title.partition(",")[0], one_peer(title.partition(",")[0], 4))
]


def rates_of(k):
    """Another learning rate in each step, and for each of two parameter groups."""
    rate = 0.08 / (1 + 0.2 * k)
    return np.array([rate] * 4 + [rate / 2] * 6)


class Parts(torch.nn.Module):
    """The ten coefficients as two parameters."""

    def __init__(self, start):
        super().__init__()
        self.first = torch.nn.Parameter(start[:4].clone())
        self.second = torch.nn.Parameter(start[4:].clone())

    @property
    def vector(self):
        return torch.cat([self.first, self.second])


def starts(n):
    return torch.linspace(-1, 1, 10 * n, dtype=torch.float64).view(n, 10)


def trained(
    name,
    graph,
    steps,
    *,
    cap=25.0,
    dtype=torch.float64,
    closure=False,
    make=torch.optim.SGD,
    **options,
):
    """This rank's model after each step; two groups, whose rates a scheduler changes."""
    problem = LeastSquares(bf.size())
    model = Parts(starts(bf.size())[bf.rank()]).to(dtype)
    groups = [{"params": [model.first], "lr": 1.0}, {"params": [model.second], "lr": 0.5}]
    plain = make(groups)
    optimizer = bf.DistributedOptimizer(
        plain, model, name, topology=graph, bucket_size_in_mb=cap, **options, broadcast=False
    )
    optimizer.force_barrier = ALGORITHMS[name].how[0].one_sided
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: rates_of(k)[0])
    found = []

    def evaluate():
        optimizer.zero_grad()
        loss = problem.loss(bf.rank(), model.vector)
        loss.backward()
        return loss

    for _ in range(steps):
        if closure:
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        schedule.step()
        found.append(model.vector.detach().clone())
    return torch.stack(found)


def by_formula(title, graph, steps, n, formula=None):
    """All ranks' models after each step, ``[rank, step, :]``."""
    method = ALGORITHMS[title.partition(",")[0]]()
    problem, schedule = LeastSquares(n), method.schedule_along(graph)
    formula = (FORMULAS[title][1] if formula is None else formula)(
        starts(n).numpy(),
        lambda k: topology.mixing_matrix(schedule, k),
        problem.gradients,
        rates_of,
    )
    return np.stack([next(formula) for _ in range(steps)], axis=1)


def agree(got, title, graph, n, tolerance=1e-12, formula=None):
    expected = by_formula(title, graph, STEPS, n, formula)
    np.testing.assert_allclose(torch.stack(got).numpy(), expected, rtol=0, atol=tolerance)


@on("loopback-4", "mpi-2", "shared_memory-2")
def test_the_formula_step_by_step(world):
    """Rates that fall and differ between groups, on a graph that the method admits.

    Processes run one method of each kind.
    """
    kinds = one_of_each_kind(ALGORITHMS) if world.transport != "loopback" else ALGORITHMS
    for title, (options, _) in FORMULAS.items():
        if title.partition(",")[0] not in kinds:
            continue
        name = title.partition(",")[0]
        graph = fitting_graph(name, world.size)
        got = world.run(trained, name, graph, STEPS, **options)
        agree(got, title, graph, world.size)


@every_formula
def test_several_buckets_and_closures(title):
    """A bucket for each parameter; gradients that come of a closure."""
    options, _ = FORMULAS[title]
    name = title.partition(",")[0]
    graph = fitting_graph(name, 4)
    agree(
        LoopbackWorld(4).run(trained, name, graph, STEPS, cap=1e-6, closure=True, **options),
        title,
        graph,
        4,
    )


@pytest.mark.parametrize("title", TIME_VARYING)
def test_a_schedule_of_graphs(title):
    """Another W in each round, for methods that admit it."""
    options, _ = FORMULAS[title]
    name = title.partition(",")[0]
    graph = one_peer(name, 4)
    agree(LoopbackWorld(4).run(trained, name, graph, STEPS, **options), title, graph, 4)


adam = partial(torch.optim.Adam, betas=(0.8, 0.9), eps=1e-3)


@pytest.mark.parametrize(
    ("every", "moments", "options"),
    [
        (2, (6, 12), {}),
        (2, (3, 4), {"state_intervals": {"exp_avg": 3, "exp_avg_sq": 4}}),
        (4, (1, 99), {"state_intervals": {"exp_avg": 1}}),
    ],
)
def test_moments_of_adam_at_intervals_of_their_own(every, moments, options):
    """Three and six times those of the models, or what is asked for, also if none divides one."""
    options = {"communication_interval": every, **options}
    got = LoopbackWorld(3).run(trained, "des_loc", None, STEPS, make=adam, cap=1e-6, **options)
    formula = partial(des_loc, every=every, moments=moments)
    agree(got, "des_loc", topology.ring(3), 3, formula=formula)


@pytest.mark.parametrize("title", ["push_diging", "slowmo, push-sum"])
def test_a_directed_graph(title):
    """Columns of A sum to one, rows do not."""
    edges = [(i, (i + 1) % 4) for i in range(4)] + [(0, 2)]
    graph = topology.push_weights(nx.DiGraph(edges))
    name, (options, _) = title.partition(",")[0], FORMULAS[title]
    got = LoopbackWorld(4).run(trained, name, graph, STEPS, **options)
    agree(got, title, graph, 4)


@pytest.mark.parametrize(
    "title", one_of_each_kind(title for title in FORMULAS if title in ALGORITHMS)
)
def test_halves_keep_their_state_in_float32(title):
    """bfloat16 parameters come near what float64 ones do, and what is kept is float32."""
    options, _ = FORMULAS[title]
    name = title.partition(",")[0]
    graph = fitting_graph(name, 4)
    got = LoopbackWorld(4).run(trained, name, graph, STEPS, dtype=torch.bfloat16, **options)
    exact = by_formula(title, graph, STEPS, 4)
    assert all(one.dtype == torch.bfloat16 for one in got)
    error = np.abs(torch.stack(got).double().numpy() - exact).max()
    assert error < 0.25, error
