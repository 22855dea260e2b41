"""Bagua's acceptance criteria of compressed methods, against a simulation; letters as there."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp.compression.minmax_uint8 import MinMaxUInt8
from tests.support import LoopbackWorld, on
from tests.support.bagua_buckets import Layout, mean
from tests.support.bagua_net import LR, STEPS, FrozenAdam, loss_of, net
from tests.support.bagua_simulation import Simulation
from tests.support.bagua_training import Run, all_equal, assert_near, train, vectors

SMALL = 600
"""Bytes of a bucket that make four of the model; the largest parameter has one of its own."""

ranks = pytest.mark.parametrize("n", [3])
caps = pytest.mark.parametrize("cap", [25 << 20, SMALL], ids=["one bucket", "buckets"])
machines = pytest.mark.parametrize(("n", "per_machine"), [(5, 3), (2, 2)])

# D: low_precision_decentralized


def replica_of(state, owner, rank, n):
    """What a rank believes another's, or its own, replica to be."""
    return [one["replica" if owner == rank else f"replica of rank {owner % n}"] for one in state]


def check_replicas(got, n):
    for owner in range(n):
        for rank in (owner - 1, owner + 1):
            near = replica_of(got[rank % n].state, owner, rank % n, n)
            own = replica_of(got[owner].state, owner, owner, n)
            assert all(map(torch.equal, near, own)), (owner, rank)


@ranks
@pytest.mark.parametrize("interval", [1, 2])
@caps
def test_replicas_of_neighbours(n, interval, cap):
    """D1, D2: neighbours' replicas are the rank's own, bit for bit; models are the simulation's."""
    simulation = Simulation(n, alike=True, cap=cap)
    simulation.low_precision(interval)
    options = {"alike": True, "cap": cap, "communication_interval": interval}
    got = LoopbackWorld(n).run(train, "low_precision_decentralized", **options)
    check_replicas(got, n)
    own = [torch.cat(replica_of(one.state, rank, rank, n)) for rank, one in enumerate(got)]
    assert_near(own, [torch.cat(one) for one in simulation.replicas], 1e-5)
    assert_near(vectors(got), simulation.vectors, 1e-5)
    assert not torch.equal(got[0].vector, got[1].vector)


@on("mpi-4")
def test_replicas_between_processes(world):
    """D1 over each transport, with more steps and other compressors."""
    for compression in ("minmax_uint8", "qsgd_int8", "bf16"):
        got = world.run(
            train, "low_precision_decentralized", 30, alike=True, compression=compression
        )
        check_replicas(got, world.size)


@ranks
def test_replicas_of_ranks_that_start_apart(n):
    """What was equal by a broadcast in Bagua is exchanged once here: models come together."""

    def case():
        run = Run("low_precision_decentralized")
        spread = bf.consensus_distance(run.model)
        run.train(20)
        return run.result(), spread, bf.consensus_distance(run.model)

    got, before, after = zip(*LoopbackWorld(n).run(case), strict=True)
    check_replicas(got, n)
    assert after[0] < 0.2 * before[0]


def test_a_parameter_of_no_optimizer():
    """D4: Bagua refuses it, since its replicas cover all parameters; here they cover a wrapper's.

    A parameter that the optimizer does not have is neither sent nor changed.
    """

    def case():
        model = net(bf.rank())
        plain = torch.optim.SGD([model.fc1.weight, model.fc3.weight], lr=LR)
        optimizer = bf.DistributedOptimizer(
            plain, model, "low_precision_decentralized", broadcast=False
        )
        loss_of(model, bf.rank(), 0).backward()
        optimizer.step()
        names = [name for bucket in optimizer._averager.buckets for name in bucket.names]
        return names, torch.equal(model.fc2.weight, net(bf.rank()).fc2.weight)

    assert LoopbackWorld(2).run(case) == [(["fc1.weight", "fc3.weight"], True)] * 2


# F: bytegrad


@ranks
@caps
def test_bytegrad_is_two_quantisations(n, cap):
    """F1: bit-equal on all ranks, and Q(mean Q(g)), also where n does not divide the elements."""
    simulation = Simulation(n, alike=True, cap=cap)
    simulation.bytegrad()
    got = LoopbackWorld(n).run(train, "bytegrad", alike=True, cap=cap)
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 1e-6)


@machines
def test_bytegrad_among_machines(n, per_machine):
    """Sums inside machines travel as they are, and on one machine nothing is quantised."""
    simulation = Simulation(n, alike=True, per_machine=per_machine)
    simulation.gradient_allreduce() if n == per_machine else simulation.bytegrad()
    got = LoopbackWorld(n).run(
        train,
        "bytegrad",
        alike=True,
        hierarchical=True,
        settings={"ranks_per_machine": per_machine},
    )
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 1e-6)


@ranks
def test_the_error_of_bytegrad_is_bounded(n):
    """F2: at most the mean of all ranges over 510, and the range of the mean over 510."""

    def case():
        run = Run("bytegrad", alike=True)
        loss_of(run.model, bf.rank(), 0).backward()
        return [one.grad.clone() for one in run.model.parameters()]

    every = Simulation(n, alike=True).gradients()
    layout = Layout(net(0), 25 << 20, backwards=True)
    own = [layout.pack(one)[0] for one in every]
    exact = mean(own)
    width = -(-exact.numel() // n)
    limits = torch.zeros(n)
    for chunk in range(n):
        parts = [one[chunk * width : (chunk + 1) * width] for one in own]
        ranges = [float(part.max() - part.min()) + 1e-7 for part in parts]
        middle = exact[chunk * width : (chunk + 1) * width]
        limits[chunk] = sum(ranges) / n / 510 + (float(middle.max() - middle.min()) + 1e-7) / 510
    for got in LoopbackWorld(n).run(case):
        error = (layout.pack(got)[0] - exact).abs()
        for chunk in range(n):
            part = error[chunk * width : (chunk + 1) * width]
            assert part.max() <= 1.02 * limits[chunk]
            assert part.max() > 0


@pytest.mark.parametrize("n", [4])
def test_bytegrad_learns_as_well(n):
    """F3: after 60 steps on two batches the loss has come down as far as with full precision."""
    options = {"alike": True, "batches": 2, "make": partial(torch.optim.SGD, lr=1.0)}
    exact, quantised = Simulation(n, **options), Simulation(n, **options)
    start = exact.loss
    exact.gradient_allreduce(60)
    got = LoopbackWorld(n).run(train, "bytegrad", 60, **options)
    for model, one in zip(quantised.models, got, strict=True):
        torch.nn.utils.vector_to_parameters(one.vector, model.parameters())
    assert exact.loss < 0.95 * start
    assert start - quantised.loss == pytest.approx(start - exact.loss, rel=0.03)


# G: qadam


def adam(warmup, **options):
    return partial(bf.QAdamOptimizer, lr=LR, warmup_steps=warmup, **options)


@pytest.mark.parametrize("n", [1, 3])
def test_a_warm_up_longer_than_training_is_adam(n):
    """G1: Adam with L2 decay on the data of all ranks, to 1e-6."""
    got = LoopbackWorld(n).run(train, "qadam", 20, alike=True, make=adam(21, weight_decay=0.01))
    adams = Simulation(n, alike=True, make=partial(torch.optim.Adam, lr=LR, weight_decay=0.01))
    adams.gradient_allreduce(20)
    assert all_equal(vectors(got))
    assert_near(vectors(got), adams.vectors, 1e-6)


@pytest.mark.parametrize("n", [1, 3])
@caps
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_momentum_is_averaged_quantised(n, cap, decay):
    """G2, G3: ranks are bit-equal; m = Q(mean Q(β₁ m + (1 - β₁) g)); v stays that of step W - 1.

    A single rank has nobody to send to, and quantises nothing.
    """
    warmup = 4
    make = partial(FrozenAdam, warmup=warmup, decay=decay)
    simulation = Simulation(n, alike=True, make=make, cap=cap)
    simulation.qadam() if n > 1 else simulation.gradient_allreduce()
    world = LoopbackWorld(n)
    options = {"alike": True, "make": adam(warmup, weight_decay=decay), "cap": cap}
    got = world.run(train, "qadam", **options)
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 1e-6)
    before = world.run(train, "qadam", warmup - 1, **options)[0]
    moments = zip(simulation.optimizers[0].m, simulation.optimizers[0].v, strict=True)
    for (m, v), state, then in zip(
        moments, got[0].optimizer_state, before.optimizer_state, strict=True
    ):
        torch.testing.assert_close(state["exp_avg"], m.view_as(state["exp_avg"]), rtol=0, atol=1e-7)
        torch.testing.assert_close(state["exp_avg_sq"], v.view_as(state["exp_avg_sq"]))
        assert torch.equal(state["exp_avg_sq"], then["exp_avg_sq"])
    for rank in got:
        for one, other in zip(rank.optimizer_state, got[0].optimizer_state, strict=True):
            assert torch.equal(one["exp_avg"], other["exp_avg"])
            assert torch.equal(one["exp_avg_sq"], other["exp_avg_sq"])


@machines
def test_qadam_among_machines(n, per_machine):
    """Momentum is summed inside machines as it is."""
    simulation = Simulation(
        n, alike=True, make=partial(FrozenAdam, warmup=3), per_machine=per_machine
    )
    simulation.gradient_allreduce() if n == per_machine else simulation.qadam()
    got = LoopbackWorld(n).run(
        train,
        "qadam",
        alike=True,
        make=adam(3),
        hierarchical=True,
        settings={"ranks_per_machine": per_machine},
    )
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 2e-6)


def test_qadam_that_trains_alone():
    """communication="empty": each rank's own momentum, as a plain QAdamOptimizer forms it."""
    got = LoopbackWorld(2).run(train, "qadam", make=adam(4), communication="empty")
    alone = Simulation(2, make=partial(FrozenAdam, warmup=4))
    for _ in range(STEPS):
        alone.update(alone.gradients())
    assert_near(vectors(got), alone.vectors, 1e-6)


@pytest.mark.parametrize("method", ["gradient_allreduce", "bytegrad", "decentralized"])
def test_other_methods_know_no_momentum_in_gradients(method):
    """The optimizer of qadam, past its warm-up, forms momentum itself where others average."""
    n = 2
    make = partial(FrozenAdam, warmup=4)
    simulation = Simulation(n, alike=True, make=make)
    getattr(simulation, method)()
    got = LoopbackWorld(n).run(train, method, alike=True, make=adam(4))
    assert_near(vectors(got), simulation.vectors, 1e-5)  # rounding over the root of a small v


@pytest.mark.parametrize("warmup", [0, 1, -3, 2.5, None])
def test_a_warm_up_that_cannot_be(warmup):
    """G4: a ValueError that names the argument."""
    with pytest.raises(ValueError, match="argument warmup_steps"):
        bf.QAdamOptimizer(net(0).parameters(), warmup_steps=warmup)


def test_qadam_needs_its_optimizer():
    """An optimizer that cannot take momentum is refused by name, before anything is sent."""

    def case():
        with pytest.raises(bf.ArgumentError, match=r"expected asyncddp.QAdamOptimizer, got Adam"):
            Run("qadam", make=torch.optim.Adam)

    LoopbackWorld(2).run(case)


def test_records_are_baguas():
    """E1, E5: the size of a record, and the bytes that Bagua would send."""
    q = MinMaxUInt8()
    assert [q.encoded_size(size, torch.float32) for size in (1, 32, 33)] == [64, 64, 96]
    x = torch.tensor([[0.1, 0.2, 0.3, -0.4]])
    encoded = torch.empty(1, 64, dtype=torch.uint8)
    q.encode(x, encoded)
    assert encoded[0, 32:36].tolist() == [182, 219, 255, 0]
