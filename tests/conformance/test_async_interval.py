"""``async_model_average`` by the clock: rounds in step, ranks at their own pace, an agreed end."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import FileEvent, LoopbackWorld, on
from tests.support.loops import on_each_rank

MODES = pytest.mark.parametrize("mode", ["all", "neighbors"])


def start(mode, lr=0.0, interval=1.0, **options):
    """A model that differs from rank to rank, in two buckets, and its optimizer."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(float(bf.rank() + number))
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = bf.DistributedOptimizer(
        plain,
        model,
        "async_model_average",
        sync_interval_ms=interval,
        peer_selection_mode=mode,
        bucket_size_in_mb=1e-4,
        **options,
        broadcast=False,
    )
    return model, optimizer


def make_step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(3, 4) * (1 + bf.rank())).square().mean().backward()
    optimizer.step()


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def rounds_to_consensus(mode):
    """Steps without learning, until many rounds were made."""
    if mode == "neighbors":
        bf.set_topology(topology.ring(bf.size()))
    model, optimizer = start(mode)
    expected = bf.allreduce(vector(model))
    while optimizer.round < 60:
        make_step(model, optimizer)
    optimizer.abort()
    torch.testing.assert_close(vector(model), expected, rtol=0, atol=1e-5)
    return optimizer.round


@on("loopback-4")
@MODES
def test_replicas_tend_to_the_mean(world, mode):
    """With a step size of zero all ranks end at the initial mean, after the same round."""
    assert len(set(world.run(rounds_to_consensus, mode))) == 1


@MODES
def test_a_round_keeps_the_sum_and_the_steps_made_meanwhile(mode):
    """The sum over ranks moves by the optimizers' updates alone: the change is added."""

    def case():
        model, optimizer = start(mode, lr=1e-4)
        moved = torch.zeros_like(vector(model))
        before = bf.allreduce(vector(model), average=False)
        wrapped, step = optimizer.wrapped, optimizer.wrapped.step

        def recorded(closure=None):
            here = vector(model)
            step()
            moved.add_(vector(model) - here)

        wrapped.step = recorded
        for _ in range(40):
            make_step(model, optimizer)
        optimizer.abort()
        after = bf.allreduce(vector(model), average=False)
        updates = bf.allreduce(moved, average=False)
        torch.testing.assert_close(after, before + updates, rtol=1e-5, atol=1e-4)
        return optimizer.round

    assert min(LoopbackWorld(3).run(case)) > 0


@MODES
def test_nobody_waits_for_a_slow_rank(mode, tmp_path):
    """The others make all their steps while one rank has not ended its first."""
    done = FileEvent(tmp_path / "done")

    def case():
        model, optimizer = start(mode, lr=1e-4)
        if bf.rank() == 2:
            done.wait()
        for _ in range(30):
            make_step(model, optimizer)
        if bf.rank() == 0:
            bf.send(torch.ones(1), 1)
        if bf.rank() == 1:
            bf.recv(torch.ones(1), 0)
            done.set()
        optimizer.abort()
        return optimizer.round

    assert len(set(LoopbackWorld(3).run(case))) == 1


@MODES
def test_the_end_is_agreed_on(mode):
    """Rounds go on for those who have not asked; all leave after the same one."""

    def case():
        model, optimizer = start(mode)
        if bf.rank() == 0:
            before = optimizer.round
            deadline = time.monotonic() + 30
            while optimizer.round < before + 5 and time.monotonic() < deadline:
                make_step(model, optimizer)  # the others are in abort() already
            assert optimizer.round >= before + 5
        optimizer.abort()
        at_end = optimizer.round
        for _ in range(5):
            make_step(model, optimizer)
        assert optimizer.round == at_end, "no round after the end"
        return at_end

    assert len(set(LoopbackWorld(3).run(case))) == 1


def pauses(mode):
    """resume, abort, abort, resume, … in any order; collectives in between; no thread is left."""
    bf.barrier()  # all threads of ranks have started
    threads = set(threading.enumerate())
    model, optimizer = start(mode, lr=1e-4)
    rounds = []
    for _ in range(3):
        optimizer.resume()
        for _ in range(10):
            make_step(model, optimizer)
            bf.allreduce(torch.ones(2))  # between rounds that are under way
        optimizer.abort()
        optimizer.abort()
        model.eval()
        first = model(torch.ones(1, 4))
        assert torch.equal(first, model(torch.ones(1, 4)))
        model.train()
        rounds.append(optimizer.round)
    assert set(threading.enumerate()) <= threads
    assert rounds == sorted(set(rounds)), "each part has rounds of its own"
    return rounds


@on("loopback-4", "mpi-2")
@MODES
def test_rounds_pause_and_go_on(world, mode):
    """Any sequence of abort and resume is right, with other collectives between the rounds."""
    assert len({tuple(rounds) for rounds in world.run(pauses, mode)}) == 1


def test_the_warm_up_averages_gradients():
    """For the first W steps all ranks hold equal bits; then they train asynchronously."""

    def case():
        model, optimizer = start("all", lr=1e-4, warmup_steps=4)
        bf.broadcast_parameters(model)
        seen = []
        for _ in range(8):
            make_step(model, optimizer)
            seen.append((optimizer.algorithm, vector(model).clone()))
        optimizer.abort()
        return seen

    results = LoopbackWorld(3).run(case)
    for number in range(4):
        assert all(torch.equal(r[number][1], results[0][number][1]) for r in results)
    assert [name for name, _ in results[0]] == ["gradient_allreduce"] * 3 + [
        "async_model_average"
    ] * 5


def test_a_run_goes_on_from_a_checkpoint():
    """Loading a state ends the round under way on all ranks, and rounds go on after it."""

    def case():
        model, optimizer = start("all", lr=1e-4)
        for _ in range(10):
            make_step(model, optimizer)
        saved = optimizer.state_dict()
        for _ in range(5):
            make_step(model, optimizer)
        optimizer.load_state_dict(saved)
        before = optimizer.round
        while optimizer.round < before + 3:
            make_step(model, optimizer)
        optimizer.abort()
        return optimizer.round

    assert len(set(LoopbackWorld(2).run(case))) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sync_interval_ms": 0}, "sync_interval_ms: expected a number above 0, or None"),
        ({"sync_interval_ms": "50"}, "sync_interval_ms: expected a number above 0, or None"),
        ({"sync_interval_ms": 5, "peer_selection_mode": "one"}, "'all' or 'neighbors', got 'one'"),
        ({"sync_interval_ms": 5, "warmup_steps": -1}, "warmup_steps: expected"),
        ({"sync_interval": 5}, "has no such option.*Did you mean 'sync_interval_ms'"),
        ({"sync_interval_ms": 5, "max_staleness": 2}, "argument max_staleness"),
    ],
)
@on_each_rank(ranks=2)
def test_options_that_cannot_be(options, words):
    """Named with what is expected."""
    model = torch.nn.Linear(1, 1)
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(bf.ArgumentError, match=words):
        bf.DistributedOptimizer(plain, model, "async_model_average", **options)


@on_each_rank(ranks=2)
def test_join_is_refused():
    """It has no meaning where nobody waits."""
    _, optimizer = start("all")
    with pytest.raises(bf.ArgumentError, match=r"averages by the clock.*abort\(\)"):
        bf.join(optimizer).__enter__()


def test_a_single_rank_trains_alone():
    """At n = 1 it is the plain optimizer."""

    def case():
        model, optimizer = start("all", lr=0.1)
        make_step(model, optimizer)
        optimizer.abort()
        optimizer.resume()
        make_step(model, optimizer)
        return optimizer.round

    assert LoopbackWorld(1).run(case) == [0]
