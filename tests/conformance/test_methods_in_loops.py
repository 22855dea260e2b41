"""Methods in the loops that users write: accumulation, clipping, autocast, GradScaler."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from tests.support import LoopbackWorld
from tests.support.bagua_net import LR, FrozenAdam, loss_of, sgd, vector
from tests.support.bagua_simulation import Simulation
from tests.support.bagua_training import Run, all_equal, assert_near, vectors
from tests.support.loops import each
from tests.support.methods import one_of_each_kind

METHODS = list(ALGORITHMS)
KINDS = one_of_each_kind(ALGORITHMS)
GRADIENTS = ["gradient_allreduce", "bytegrad"]
REPLICATING = [*GRADIENTS, "qadam"]
DIFFERENCES = ["choco_sgd", "low_precision_decentralized"]
WARMUP = 4


def made(method, **options):
    """A run by a method, from one model where it has to be."""
    if method in ("adapt_then_combine", "adapt_with_combine"):
        options = {"topology": topology.ring(bf.size()), **options}
    if method == "qadam":
        options = {"make": partial(bf.QAdamOptimizer, lr=LR, warmup_steps=WARMUP), **options}
    run = Run(method, **{"alike": method in REPLICATING, **options})
    run.optimizer.force_barrier = ALGORITHMS[method].how[0].one_sided
    return run


class Accumulated(Simulation):
    """Each step has the gradients of two batches."""

    def gradients(self):
        pairs = []
        for step in (2 * self.step, 2 * self.step + 1):
            losses = [loss_of(model, rank, step) for rank, model in enumerate(self.models)]
            pairs.append(
                [
                    torch.autograd.grad(loss, list(model.parameters()))
                    for loss, model in zip(losses, self.models, strict=True)
                ]
            )
        return [[a + b for a, b in zip(*both, strict=True)] for both in zip(*pairs, strict=True)]


def accumulate(method, steps, **options):
    """Two backward passes, then a step."""
    run = made(method, **options)
    for step in range(steps):
        run.optimizer.zero_grad()
        for half in range(2):
            loss_of(run.model, bf.rank(), 2 * step + half).backward()
        run.optimizer.step()
    return run.result()


@pytest.mark.parametrize("method", REPLICATING)
def test_two_passes_of_which_the_sum_is_averaged(method):
    """num_steps_per_communication=2: what two passes have accumulated travels once."""
    n = 3
    make = partial(FrozenAdam, warmup=WARMUP) if method == "qadam" else sgd
    simulation = Accumulated(n, alike=True, make=make)
    getattr(simulation, method)(6)
    got = LoopbackWorld(n).run(accumulate, method, 6, num_steps_per_communication=2)
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 2e-6)


@pytest.mark.parametrize("method", GRADIENTS)
def test_two_passes_each_of_which_is_averaged(method):
    """Without it each pass averages what is there, which is the same but for rounding of codes."""
    n = 3
    simulation = Accumulated(n, alike=True)
    simulation.gradient_allreduce(6)
    got = LoopbackWorld(n).run(accumulate, method, 6)
    assert all_equal(vectors(got))
    assert_near(vectors(got), simulation.vectors, 2e-6 if method == "gradient_allreduce" else 1e-3)


def momentum_twice():
    run = made("qadam")
    run.train(WARMUP - 1)
    words = "after momentum had been averaged in its place; give the number of backward passes"
    for _ in range(2):
        run.optimizer.zero_grad()
        loss_of(run.model, bf.rank(), 0).backward()
    with pytest.raises(bf.UsageError, match=words):
        loss_of(run.model, bf.rank(), 1).backward()
    run.train(2)
    return vector(run.model)


def test_momentum_that_would_be_formed_twice():
    """A second pass would take momentum for a gradient: refused, and zero_grad() begins anew."""
    assert all_equal(LoopbackWorld(2).run(momentum_twice))


@pytest.mark.parametrize("method", ["decentralized", "low_precision_decentralized"])
@each("interval", [1, 2, 3])
def test_an_interval_counts_steps(method, interval):
    """However many backward passes a step has."""
    n, alike = 2, method != "decentralized"
    make = partial(torch.optim.SGD, lr=0.5)
    simulation = Accumulated(n, alike=alike, make=make)
    simulate = simulation.low_precision if alike else simulation.decentralized
    simulate(interval=interval, steps=7)
    got = LoopbackWorld(n).run(
        accumulate, method, 7, alike=alike, make=make, communication_interval=interval
    )
    assert_near(vectors(got), simulation.vectors, 1e-6 if method == "decentralized" else 1e-3)


def local_steps(method, every):
    run = made(method, num_steps_per_communication=every)
    rounds = []
    for _ in range(6):
        run.train(1)
        rounds.append(run.optimizer.round)
    return rounds


@pytest.mark.parametrize("method", [name for name in METHODS if name not in REPLICATING])
def test_local_steps_between_rounds(method):
    """Every third step averages; methods with an interval of their own say to use that."""
    world = LoopbackWorld(2)
    if ALGORITHMS[method]().communication_interval is None:
        assert world.run(local_steps, method, 3) == [[0, 0, 1, 1, 1, 2]] * 2
    else:
        outcomes = world.outcomes(local_steps, method, 3)
        words = "takes communication_interval, which counts steps of the optimizer"
        assert all(words in one.message for one in outcomes)


# clipping


class Clipped(Simulation):
    """Each rank clips what it is about to step with."""

    def update(self, gradients):
        clipped = []
        for given in gradients:
            tensors = [torch.nn.Parameter(one) for one in given]
            for tensor, one in zip(tensors, given, strict=True):
                tensor.grad = one.clone()
            torch.nn.utils.clip_grad_norm_(tensors, 0.02)
            clipped.append([one.grad for one in tensors])
        super().update(clipped)


def clip(method, steps):
    run = made(method, alike=True)
    for step in range(steps):
        run.optimizer.zero_grad()
        loss_of(run.model, bf.rank(), step).backward()
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.02)
        run.optimizer.step()
    return run.result()


@pytest.mark.parametrize("method", [*GRADIENTS, "decentralized", "low_precision_decentralized"])
def test_gradients_are_clipped_as_they_are_used(method):
    """Averages where gradients are averaged, each rank's own where parameters are."""
    simulation = Clipped(3, alike=True)
    name = "low_precision" if method.startswith("low") else method
    getattr(simulation, name)(steps=6)
    assert_near(vectors(LoopbackWorld(3).run(clip, method, 6)), simulation.vectors, 1e-5)


def test_momentum_is_clipped_alike():
    """With qadam, clipping between backward and step limits the average momentum, on all ranks."""
    got = LoopbackWorld(3).run(clip, "qadam", 8)
    assert all_equal(vectors(got))
    moments = torch.cat([one["exp_avg"].flatten() for one in got[0].optimizer_state])
    assert moments.norm() <= 0.02 * (1 + 1e-5)


# precision


def autocast(method, steps):
    lr = 0.01 if method == "demo" else 0.5  # the length of its steps, whatever the gradients
    run = made(method, **({} if method == "qadam" else {"make": partial(torch.optim.SGD, lr=lr)}))
    losses = []
    for _ in range(steps):
        run.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(run.model, bf.rank(), 0)
        loss.backward()
        run.optimizer.step()
        losses.append(loss.item())
    return vector(run.model), losses


@pytest.mark.parametrize("method", KINDS)
def test_autocast(method):
    """Passes in bfloat16: parameters, gradients and messages stay what they are."""
    got, losses = zip(*LoopbackWorld(2).run(autocast, method, 40), strict=True)
    assert all(one.dtype == torch.float32 for one in got)
    assert sum(one[-1] for one in losses) < sum(one[0] for one in losses)
    assert method not in REPLICATING or all_equal(got)


def in_half(method, dtype):
    run = made(method)
    run.model.to(dtype)
    for _ in range(6):
        run.optimizer.zero_grad()
        run.model(torch.ones(4, 2, dtype=dtype)).square().sum().backward()
        run.optimizer.step()
    return vector(run.model)


@pytest.mark.parametrize("method", KINDS)
@each("dtype", [torch.bfloat16, torch.float64])
def test_models_of_other_dtypes(method, dtype):
    """Cast after wrapping: buckets, and what a method keeps, are made anew in that dtype."""
    got = LoopbackWorld(3).run(in_half, method, dtype)
    assert all(one.dtype == dtype and one.isfinite().all() for one in got)
    assert method not in REPLICATING or all_equal(got)


def scaled(method, steps, *, overflow_on=None, scaler=True, **options):
    """Train with a GradScaler; in step 2 the loss of one rank may be infinite."""
    run = made(method, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaler)
    skipped = []
    for step in range(steps):
        run.optimizer.zero_grad()
        loss = loss_of(run.model, bf.rank(), step)
        if step == 2 and bf.rank() == overflow_on:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(run.optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
    return run.result(), skipped


@pytest.mark.parametrize("method", [name for name in KINDS if name != "qadam"])
def test_a_grad_scaler(method):
    """Powers of two come and go without a trace, but for the spread of 1e-7 in Bagua's codes."""
    world = LoopbackWorld(2)
    got, skipped = zip(*world.run(scaled, method, 6), strict=True)
    plain, _ = zip(*world.run(scaled, method, 6, scaler=False), strict=True)
    assert not any(map(any, skipped))
    assert_near(vectors(got), vectors(plain), 1e-5 if method == "bytegrad" else 0.0)


@pytest.mark.parametrize(
    "method", [*GRADIENTS, *(name for name in KINDS if name not in REPLICATING)]
)
@each("compression", [None, "sign", "top_k"])
def test_a_step_that_overflows(method, compression):
    """Who averages gradients skips it everywhere; else the rank that overflowed, alone."""
    options = {}
    if compression is not None:
        if method not in GRADIENTS:
            return
        options = {"compression": compression}
    got, skipped = zip(
        *LoopbackWorld(3).run(scaled, method, 6, overflow_on=1, **options), strict=True
    )
    assert all(one.vector.isfinite().all() for one in got)
    together = method in GRADIENTS
    alone = [[False, False, together or rank == 1, *[False] * 3] for rank in range(3)]
    assert list(skipped) == alone
    if together:
        assert all_equal(vectors(got))


def test_a_grad_scaler_and_momentum():
    """qadam's warm-up may be scaled and may overflow; its second stage refuses in words."""

    def case():
        got, skipped = scaled("qadam", WARMUP, overflow_on=1)  # a step less, since one is skipped
        assert skipped == [False, False, True, False]
        words = r"qadam averages momentum, into which gradients went while GradScaler"
        with pytest.raises(bf.UsageError, match=words):
            scaled("qadam", WARMUP)
        got, _ = scaled("qadam", WARMUP + 2, scaler=False)
        return got.vector

    assert all_equal(LoopbackWorld(3).run(case))
    LoopbackWorld(1).run(scaled, "qadam", WARMUP + 2)  # a single rank averages nothing
