"""Bagua's methods inside ``join``, under ``monitor`` and the timeline, and updated in backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from tests.support import LoopbackWorld, on
from tests.support.bagua_buckets import Layout, mean, quantised_mean
from tests.support.bagua_net import LR, momentum_sgd, net, vector
from tests.support.bagua_simulation import Simulation
from tests.support.bagua_training import Run, all_equal, assert_near, vectors
from tests.support.timelines import assert_balanced, assert_nested, read, spans

BAGUA = [
    "bytegrad",
    "choco_sgd",
    "decentralized",
    "gradient_allreduce",
    "low_precision_decentralized",
    "qadam",
]
DIFFERENCES = ["choco_sgd", "deepsqueeze", "low_precision_decentralized"]
BATCHES = (2, 5, 3)


def made(method, **options):
    if method == "qadam":
        options = {"make": partial(bf.QAdamOptimizer, lr=LR, warmup_steps=3), **options}
    return Run(method, **options)


# join


def joined(method, epochs, **options):
    run = made(method, **options)
    for batches in epochs:
        with bf.join(run.optimizer):
            run.train(batches[bf.rank()])
        run.step = 100  # alike on all ranks
    return run.result()


def joined_simulation(batches, average):
    """Ranks that are done have gradients of zero; all have the model of the last."""
    simulation = Simulation(len(batches), alike=True)
    for step in range(max(batches)):
        active = [rank for rank, count in enumerate(batches) if step < count]
        every = simulation.gradients()
        given = [
            gradients if rank in active else [torch.zeros_like(one) for one in gradients]
            for rank, gradients in enumerate(every)
        ]
        simulation.update([average(given, len(active))] * simulation.n)
    return simulation


def mean_of_active(given, count):
    return [mean(same) * (len(given) / count) for same in zip(*given, strict=True)]


def quantised_mean_of_active(given, count):
    layout = Layout(net(0), 25 << 20, backwards=True)
    (flats,) = zip(*(layout.pack(one) for one in given), strict=True)
    return layout.unpack([quantised_mean(list(flats), count)])


@pytest.mark.parametrize("batches", [BATCHES, (0, 4, 4), (1, 0, 0)])
@pytest.mark.parametrize(
    ("method", "average"),
    [("gradient_allreduce", mean_of_active), ("bytegrad", quantised_mean_of_active)],
)
def test_gradients_of_those_who_train(method, average, batches):
    """Sums are divided by the number of ranks that still train; quantised as ever."""
    got = LoopbackWorld(3).run(joined, method, [batches])
    # all start from rank 0's model
    assert len(got) == 3
    aligned = LoopbackWorld(3).run(joined, method, [batches], alike=True)
    assert all_equal(vectors(aligned))
    assert_near(vectors(aligned), joined_simulation(batches, average).vectors, 1e-6)


@on("mpi-2", "shared_memory-2")
def test_uneven_inputs_of_processes(world):
    """The same between processes."""
    got = world.run(joined, "bytegrad", [(2, 4)], alike=True)
    simulation = joined_simulation((2, 4), quantised_mean_of_active)
    assert_near(vectors(got), simulation.vectors, 1e-6)


@pytest.mark.parametrize("method", ["gradient_allreduce", "bytegrad"])
def test_a_sum_over_those_who_train(method):
    """average=False: nothing is divided, whoever is done."""
    got = LoopbackWorld(2).run(joined, method, [(1, 3)], alike=True, average=False)
    assert all_equal(vectors(got))

    def total(given, count):
        if method == "gradient_allreduce":
            return mean_of_active(given, 1)
        return quantised_mean_of_active(given, 1)

    assert_near(vectors(got), joined_simulation((1, 3), total).vectors, 1e-6)


@pytest.mark.parametrize("compression", ["sign", "top_k", "power_sgd", "qsgd_int8"])
def test_error_feedback_with_uneven_inputs(compression):
    """Two epochs in which others are done first: ranks hold one model, and learn."""
    epochs = [BATCHES, BATCHES[::-1]]
    options = {"alike": True, "compression": compression}
    got = LoopbackWorld(3).run(joined, "gradient_allreduce", epochs, **options)
    assert all_equal(vectors(got))
    assert not torch.equal(got[0].vector, vector(net(0)))


@pytest.mark.parametrize("method", BAGUA)
def test_equal_numbers_of_batches(method):
    """Every method goes through a block in which all are done at once, without a change."""
    make = {} if method != "qadam" else {"make": partial(bf.QAdamOptimizer, warmup_steps=50)}
    world = LoopbackWorld(2)
    inside = world.run(joined, method, [(4, 4)], alike=True, **make)

    def outside():
        run = made(method, alike=True, **make)
        run.train(4)
        return run.result()

    for one, other in zip(inside, world.run(outside), strict=True):
        assert torch.equal(one.vector, other.vector)


def test_averages_of_those_who_train():
    """decentralized with all: parameters are averaged over the ranks that still train."""
    got = LoopbackWorld(3).run(joined, "decentralized", [BATCHES])
    simulation = Simulation(3)
    for step in range(max(BATCHES)):
        active = [rank for rank, count in enumerate(BATCHES) if step < count]
        gradients = simulation.gradients()
        average = mean([simulation.vectors[rank] for rank in active])
        for rank in active:
            simulation.assign_vector(rank, average)
        for rank in active:
            parameters = simulation.models[rank].parameters()
            for parameter, gradient in zip(parameters, gradients[rank], strict=True):
                parameter.grad = gradient
            simulation.optimizers[rank].step()
        simulation.step += 1
    assert_near(vectors(got), simulation.vectors, 1e-6)


# monitor and timeline


def watched(first, then):
    run = made(first, alike=True)
    seen = []
    with bf.monitor(run.optimizer, every=1, to=seen.append):
        run.train(4)
        run.optimizer.switch_to(then)
        run.train(4)
        bf.barrier()
    return seen


@pytest.mark.parametrize(
    ("first", "then"), [("bytegrad", "choco_sgd"), ("qadam", "gradient_allreduce")]
)
def test_a_monitor_sees_through_a_switch(first, then):
    """Steps, and the bytes and seconds so far, go on, also through the end of a warm-up."""
    seen = LoopbackWorld(2).run(watched, first, then)[0]
    for rank in range(2):
        own = [one for one in seen if one["rank"] == rank]
        assert [one["step"] for one in own] == list(range(1, 9))
        sent = [one["bytes_sent"] for one in own]
        assert sent == sorted(set(sent)), "bytes were lost or not counted"
        assert all(0 < one["exposed_seconds"] <= one["step_seconds"] for one in own)


def traced(methods):
    run = made("qadam", alike=True, cap=600)
    run.train(4)
    for method in methods:
        run.optimizer.switch_to(method)
        run.train(2)


def test_the_timeline_of_all_methods(tmp_path):
    """Spans nest and end, and each method's steps are there."""
    methods = [method for method in BAGUA if method != "qadam"]
    LoopbackWorld(2).run(traced, methods, settings={"timeline": f"{tmp_path}/"})
    for rank in range(2):
        events = read(tmp_path / f"rank{rank}.json")
        assert_balanced(events)
        assert_nested(events)
        assert len(spans(events, "step")) == 4 + 2 * len(methods)


# update_in_backward


@pytest.mark.parametrize("method", [*DIFFERENCES, "adapt_then_combine"])
@pytest.mark.parametrize("every", [1, 3])
def test_an_update_in_backward(method, every):
    """Each bucket is updated and sent as soon as it is ready: the same bits."""

    def case(early):
        options = {"topology": topology.ring(3), "make": momentum_sgd, "cap": 600}
        interval = "communication_interval" if method.startswith("low") else None
        options[interval or "num_steps_per_communication"] = every
        run = Run(method, update_in_backward=early, **options)
        run.train(7)
        return vector(run.model), run.optimizer.round

    world = LoopbackWorld(3)
    for (one, rounds), (other, more) in zip(
        world.run(case, True), world.run(case, False), strict=True
    ):
        assert torch.equal(one, other)
        assert rounds == more


@pytest.mark.parametrize("method", [name for name in BAGUA if name not in DIFFERENCES])
def test_methods_that_cannot_update_in_backward(method):
    """They average before the update, or while gradients are made: refused by name."""

    def case():
        with pytest.raises(bf.ArgumentError, match=f"update_in_backward: {method} averages"):
            made(method, update_in_backward=True)

    assert ALGORITHMS[method].when.value != "after_step"
    LoopbackWorld(2).run(case)
