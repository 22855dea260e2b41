"""Bagua's acceptance criteria of gradient methods and of those that mix, against a simulation.

The toy net is Bagua's, and one process computes what all ranks should have. The letters are those
of the criteria.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.support.bagua_net import (
    LR,
    STEPS,
    FrozenAdam,
    batch,
    loss_of,
    momentum_sgd,
    net,
    sgd,
    vector,
)
from tests.support.bagua_simulation import Simulation
from tests.support.bagua_training import Run, all_equal, assert_near, train, vectors
from tests.support.pairwise import by_transport

SMALL = 600
"""Bytes of a bucket that make four of the model; the largest parameter has one of its own."""

ranks = pytest.mark.parametrize("n", [3])
even_ranks = pytest.mark.parametrize("n", [4])
intervals = pytest.mark.parametrize("interval", [1, 2])
caps = pytest.mark.parametrize("cap", [25 << 20, SMALL], ids=["one bucket", "buckets"])
machines = pytest.mark.parametrize(("n", "per_machine"), [(5, 3), (3, 1)])


def both(n, method, simulate, *, alike=True, make=sgd, cap=25 << 20, per_machine=None, **options):
    """Train n ranks with the library, and in the simulation."""
    simulation = Simulation(n, alike=alike, make=make, cap=cap, per_machine=per_machine)
    simulate(simulation)
    settings = {"ranks_per_machine": per_machine} if per_machine else {}
    got = LoopbackWorld(n).run(
        train, method, alike=alike, make=make, cap=cap, settings=settings, **options
    )
    return got, simulation


# B: gradient_allreduce


@ranks
@caps
def test_gradient_allreduce_is_training_with_a_large_batch(n, cap):
    """B1, B2: bit-equal on all ranks, and what one process computes on all data, to 1e-6."""
    got, simulation = both(n, "gradient_allreduce", Simulation.gradient_allreduce, cap=cap)
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 1e-6)
    model = net(0)
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        parts = [batch(rank, step) for rank in range(n)]
        data, target = map(torch.cat, zip(*parts, strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(data), target).backward()
        optimizer.step()
    torch.testing.assert_close(got[0].vector, vector(model), rtol=0, atol=1e-6)


@machines
@caps
def test_gradients_summed_inside_machines_first(n, per_machine, cap):
    """B3: hierarchical is flat to 1e-6, also where machines differ in size; ranks are bit-equal."""
    simulate = Simulation.gradient_allreduce
    options = {"cap": cap, "per_machine": per_machine, "hierarchical": True}
    got, simulation = both(n, "gradient_allreduce", simulate, make=momentum_sgd, **options)
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 1e-6)


@ranks
@pytest.mark.parametrize("hierarchical", [False, True])
def test_the_sum_of_gradients_in_place_of_the_average(n, hierarchical):
    """B4: average=False is n times the gradient: n times the step size."""
    simulate = partial(Simulation.gradient_allreduce, average=False)
    options = {"average": False, "hierarchical": hierarchical, "per_machine": 2}
    got, simulation = both(n, "gradient_allreduce", simulate, **options)
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 1e-6)
    scaled = Simulation(n, alike=True, make=partial(torch.optim.SGD, lr=LR * n))
    scaled.gradient_allreduce()
    assert_near(vectors(got), scaled.vectors, 1e-6)


@pytest.mark.parametrize("n", [4])
def test_the_sum_of_quantised_gradients(n):
    """B4 for bytegrad: Q(Σ Q(g)), which is not divided."""
    one = LoopbackWorld(n).run(train, "bytegrad", 1, alike=True, average=False)
    simulation = Simulation(n, alike=True, make=partial(torch.optim.SGD, lr=LR * n))
    simulation.bytegrad(1)  # n is a power of two: scaling changes no code but by the spread of 1e-7
    assert all_equal(vectors(one))
    assert_near(vectors(one), simulation.vectors, 1e-6)


def without_overlap(method, **options):
    """Gradients that no backward pass of the model has brought: all are sent in step()."""
    run = Run(method, alike=True, **options)
    for step in range(STEPS):
        loss = loss_of(run.model, bf.rank(), step)
        gradients = torch.autograd.grad(loss, list(run.model.parameters()))
        for parameter, gradient in zip(run.model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        run.optimizer.step()
    return run.result()


@pytest.mark.parametrize("method", ["gradient_allreduce", "bytegrad", "qadam"])
def test_overlap_changes_nothing(method):
    """B5: sent bucket by bucket during the backward pass or all at its end: the same bits."""
    make = partial(bf.QAdamOptimizer, lr=LR, warmup_steps=4) if method == "qadam" else sgd
    world = LoopbackWorld(3)
    early = world.run(train, method, alike=True, make=make, cap=SMALL)
    late = world.run(without_overlap, method, make=make, cap=SMALL)
    assert all_equal([*vectors(early), *vectors(late)])


def with_an_unused_layer(method, **options):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    make = bf.QAdamOptimizer if method == "qadam" else sgd
    plain = make(model.parameters(), **({"warmup_steps": 2} if method == "qadam" else {}))
    optimizer = bf.DistributedOptimizer(plain, model, method, **options)
    for step in range(4):
        optimizer.zero_grad()
        layer = model[0] if bf.rank() or step % 2 else model[1]  # rank 0 alone uses the second
        layer(batch(bf.rank(), step)[0]).square().sum().backward()
        optimizer.step()
    return vector(model)


@pytest.mark.parametrize("method", ["gradient_allreduce", "bytegrad", "qadam"])
def test_parameters_that_some_ranks_do_not_use(method):
    """B5: no rank waits for a gradient that will not come, and ranks stay bit-equal."""
    for cap in (25, 2e-5):
        assert all_equal(LoopbackWorld(3).run(with_an_unused_layer, method, bucket_size_in_mb=cap))


# C: decentralized


@ranks
@intervals
@caps
def test_decentralized_with_all(n, interval, cap):
    """C1: averages are bit-equal on all ranks, and models are the simulation's to 1e-6."""
    simulate = partial(Simulation.decentralized, mode="all", interval=interval)
    options = {"alike": False, "make": momentum_sgd, "cap": cap, "communication_interval": interval}
    got, simulation = both(n, "decentralized", simulate, **options)
    assert_near(vectors(got), simulation.vectors, 1e-6)
    for step in range(0, STEPS, interval):
        assert all_equal([one.averages[step] for one in got])
    if interval > 1:
        assert not torch.equal(got[0].averages[1], got[1].averages[1])


@even_ranks
@intervals
@caps
def test_decentralized_in_pairs(n, interval, cap):
    """C2: both ranks of a pair have one average, to its last bit, and the models are right."""
    simulate = partial(Simulation.decentralized, mode="shift_one", interval=interval)
    got, simulation = both(
        n,
        "decentralized",
        simulate,
        alike=False,
        cap=cap,
        peer_selection_mode="shift_one",
        communication_interval=interval,
    )
    assert_near(vectors(got), simulation.vectors, 2e-7)
    half, k = n // 2, (STEPS - 1) // interval
    for rank in range(half):
        peer = (k + rank) % half + half
        step = k * interval
        torch.testing.assert_close(
            got[rank].averages[step], got[peer].averages[step], rtol=2e-7, atol=1e-9
        )


def test_pairs_need_an_even_number():
    """C3: an odd number of ranks is refused by name."""

    def case():
        with pytest.raises(topology.TopologyError, match=r"even n.*got n=3"):
            Run("decentralized", peer_selection_mode="shift_one")

    LoopbackWorld(3).run(case)


@ranks
def test_the_gradient_is_taken_before_averaging(n):
    """C5: with a loss that is not linear, averaging first gives something else."""
    got, before = both(n, "decentralized", Simulation.decentralized, alike=False)
    after = Simulation(n)
    after.decentralized(first=True)
    assert_near(vectors(got), before.vectors, 1e-6)
    with pytest.raises(AssertionError, match="is more than 1e-05"):
        assert_near(vectors(got), after.vectors, 1e-5)


@pytest.mark.parametrize("mode", ["all", "shift_one"])
@intervals
@pytest.mark.parametrize("n", [4])
def test_decentralized_among_machines(n, mode, interval):
    """C6: ranks of a machine hold one model, to the bit, after each averaging."""
    simulate = partial(Simulation.decentralized, mode=mode, interval=interval)
    got, simulation = both(
        n,
        "decentralized",
        simulate,
        alike=False,
        per_machine=2,
        peer_selection_mode=mode,
        communication_interval=interval,
        hierarchical=True,
    )
    assert_near(vectors(got), simulation.vectors, 1e-6)
    for step in range(0, STEPS, interval):
        for first in range(0, n, 2):
            assert torch.equal(got[first].averages[step], got[first + 1].averages[step])


# one spot check of each method between processes


SPOTS = {
    "gradient_allreduce": (Simulation.gradient_allreduce, sgd, {}),
    "bytegrad": (Simulation.bytegrad, sgd, {}),
    "decentralized": (Simulation.decentralized, sgd, {}),
    "low_precision_decentralized": (Simulation.low_precision, sgd, {}),
    "qadam": (
        Simulation.qadam,
        partial(FrozenAdam, warmup=4),
        {"make": partial(bf.QAdamOptimizer, lr=LR, warmup_steps=4)},
    ),
}


@by_transport(["mpi-2"], method=SPOTS)
def test_between_processes(world, method):
    """MPI carries what threads do."""
    simulate, make, options = SPOTS[method]
    simulation = Simulation(world.size, alike=True, make=make, cap=SMALL)
    simulate(simulation)
    got = world.run(train, method, alike=True, cap=SMALL, **options)
    assert_near(vectors(got), simulation.vectors, 1e-5)
