"""What a monitor reports of every method, on every transport, and that nobody waits for it."""

from __future__ import annotations

import json
import math
import time

import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS, AveragedQuantity
from asyncddp.topology import random_matching
from tests.support import BEFORE_DEADLINE, FileEvent, LoopbackWorld, on
from tests.support.methods import every_step

ONE_SIDED = [name for name in ALGORITHMS if ALGORITHMS[name].how[0].one_sided]
PAIRS = [name for name in ALGORITHMS if ALGORITHMS[name].needs.pairs]
BY_RANDOM_PAIRS = [k for k in ALGORITHMS if ALGORITHMS[k].default_graph is random_matching]
MODULES = ("module in step", "module at its own pace")
worlds = on("loopback-4", "mpi-2")
STEPS, EVERY = 6, 2


def start(kind, lr=0.1):
    """A model and what steps it: a method of the registry, or the decentralized module."""
    torch.manual_seed(bf.rank())
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 40), torch.nn.Tanh(), torch.nn.Linear(40, 2, dtype=torch.float32)
    )
    if kind in MODULES:
        ddp = bf.DecentralizedDataParallel(
            model,
            lambda named: torch.optim.SGD([p for _, p in named], lr=lr),
            sync=kind == MODULES[0],
            bucket_size_in_mb=1e-3,
            broadcast=False,
        )
        return model, ddp, ddp
    if kind == "qadam":
        plain = bf.QAdamOptimizer(model.parameters(), lr=lr)
    else:
        plain = torch.optim.SGD(model.parameters(), lr=lr)
    return (
        model,
        model,
        bf.DistributedOptimizer(plain, model, kind, **every_step(kind), broadcast=False),
    )


def one_step(forward, watched):
    """Of data that differ from rank to rank."""
    if isinstance(watched, torch.optim.Optimizer):
        watched.zero_grad()
    x = torch.full((4, 8), 1.0 + bf.rank())
    forward(x).square().mean().backward()
    if isinstance(watched, torch.optim.Optimizer):
        watched.step()


def vector(model):
    return torch.cat([p.detach().reshape(-1).double() for p in model.parameters()])


def watched_run(kind, consensus="projection", lockstep=False):
    """Train; gives the records that rank 0 saw, and what each rank held when it reported."""
    model, forward, watched = start(kind)
    if lockstep:
        watched.force_barrier = True
    seen, held, norms = [], [], []
    with bf.monitor(watched, EVERY, seen.append, consensus) as monitor:
        for step in range(1, STEPS + 1):
            one_step(forward, watched)
            if step % EVERY == 0:
                held.append(vector(model))
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                norms.append(math.sqrt(sum(float(g.double().square().sum()) for g in grads)))
    sent = watched.bytes_sent if isinstance(watched, torch.optim.Optimizer) else None
    return {
        "seen": seen,
        "held": torch.stack(held),
        "norms": norms,
        "sent": sent,
        "steps": [monitor.latest[bf.rank()].step, STEPS],
    }


def of(seen, rank, name):
    return [record[name] for record in seen if record["rank"] == rank]


def deviations(results):
    """‖x_i − x̄‖ of rank i (row) in each report (column)."""
    x = torch.stack([result["held"] for result in results])
    return torch.linalg.vector_norm(x - x.mean(0), dim=2)


@pytest.mark.parametrize("kind", [*ALGORITHMS, *MODULES])
def test_every_rank_is_reported_at_every_report(kind):
    """Whatever the method: n records each time, and nothing of what is measured is impossible."""
    n = 3
    results = LoopbackWorld(n).run(watched_run, kind)
    seen = results[0]["seen"]
    for rank in range(n):
        assert results[rank]["steps"] == [STEPS, STEPS]
        assert of(seen, rank, "step") == list(range(EVERY, STEPS + 1, EVERY))
        alone_at_first = kind in BY_RANDOM_PAIRS  # of three ranks one has no partner in a round
        if kind not in PAIRS:  # whose ranks need not have met yet
            assert all(sent > 0 for sent in of(seen, rank, "bytes_sent")[-alone_at_first:])
        assert of(seen, rank, "bytes_sent") == sorted(of(seen, rank, "bytes_sent"))
        for record in (record for record in seen if record["rank"] == rank):
            assert 0 < record["exposed_seconds"] < record["step_seconds"]
            assert 0 <= record["monitor_seconds"] < record["step_seconds"]
            assert record["gradient_norm"] > 0
            assert (record["staleness"] is None) == (kind not in (*ONE_SIDED, MODULES[1]))
    if kind not in MODULES:
        for rank in range(n):
            method = ALGORITHMS[kind]()
            averages = method.what is not AveragedQuantity.PARAMETER
            if not averages and not method.replaces_gradients:  # else they are others by then
                assert of(seen, rank, "gradient_norm") == pytest.approx(results[rank]["norms"])
            assert of(seen, rank, "bytes_sent")[-1] == results[rank]["sent"]
    assert all(result["seen"] == [] for result in results[1:])


@worlds
@pytest.mark.parametrize("kind", ["adapt_with_combine", "push_sum", "module in step"])
def test_the_projected_distance_is_the_distance_up_to_its_error(world, kind):
    """In step, projections of the same step are compared: within five standard errors."""
    results = world.run(watched_run, kind, lockstep=kind == "push_sum")
    exact = deviations(results)
    for rank in range(world.size):
        got = of(results[0]["seen"], rank, "consensus_distance")
        assert got == pytest.approx(exact[rank].tolist(), rel=5 / math.sqrt(2 * 64))
        assert set(of(results[0]["seen"], rank, "consensus_error")) == {1 / math.sqrt(2 * 64)}


@on("loopback-4", "shared_memory-2")
@pytest.mark.parametrize("kind", ["adapt_then_combine", "module in step"])
def test_on_request_the_distance_is_exact(world, kind):
    """With "exact" the reported distance is the norm of x_i minus the mean, with error 0."""
    results = world.run(watched_run, kind, "exact")
    exact = deviations(results)
    for rank in range(world.size):
        got = of(results[0]["seen"], rank, "consensus_distance")
        assert got == pytest.approx(exact[rank].tolist(), rel=1e-9)
        assert set(of(results[0]["seen"], rank, "consensus_error")) == {0.0}


def test_ranks_that_agree_are_at_distance_zero():
    """Not nearly: their projections are alike bit by bit."""

    def case():
        model = torch.nn.Linear(300, 7)
        numbers = torch.Generator().manual_seed(0)  # threads share torch's own
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, generator=numbers)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = bf.DistributedOptimizer(plain, model, "gradient_allreduce")
        seen = []
        with bf.monitor(optimizer, 1, seen.append):
            one_step(lambda x: model(x.repeat(1, 38)[:, :300]), optimizer)
        return seen

    seen = LoopbackWorld(3).run(case)[0]
    assert [record["consensus_distance"] for record in seen] == [0.0, 0.0, 0.0]


def test_no_distance_on_request():
    """With None for the consensus, records hold neither a distance nor its error."""
    seen = LoopbackWorld(2).run(watched_run, "adapt_with_combine", None)[0]["seen"]
    assert {(r["consensus_distance"], r["consensus_error"]) for r in seen} == {(None, None)}


def quick_and_slow(kind, slow_rank, folder):
    """One rank stops in the midst until the others have made all their steps; what rank 0 saw."""
    through = FileEvent(folder / "through")
    others = [rank for rank in range(bf.size()) if rank != slow_rank]
    _, forward, watched = start(kind, lr=0.01)
    seen = []
    with bf.monitor(watched, 5, seen.append):
        for step in range(20):
            if (bf.rank(), step) == (slow_rank, 12):
                through.wait_for(others)
            one_step(forward, watched)
        through.of(bf.rank()).set()
    return seen


@on("loopback-4", "mpi-2")
@pytest.mark.parametrize(("kind", "slow_rank"), [("push_sum", 0), ("module at its own pace", 1)])
def test_nobody_waits_for_a_straggler(world, tmp_path, kind, slow_rank):
    """At their own pace ranks report to rank 0 without waiting, also where that is the slow one;
    its last reports are taken when the monitor ends, and how old what was mixed is, is told."""
    seen = world.run(quick_and_slow, kind, slow_rank, tmp_path)[0]
    for rank in range(world.size):
        assert of(seen, rank, "step") == [5, 10, 15, 20]
    quick = [rank for rank in range(world.size) if rank != slow_rank]
    assert max(max(of(seen, rank, "staleness")) for rank in quick) >= 1
    known = [r["consensus_distance"] for r in seen if r["consensus_distance"] is not None]
    assert known, "no distance, though all have reported"
    assert max(known) > 0


def test_ranks_that_are_done_hold_up_no_report():
    """Inside join ranks make different numbers of steps; each step that was made is reported."""

    def case():
        _, forward, watched = start("adapt_with_combine")
        seen = []
        with bf.monitor(watched, 1, seen.append), bf.join(watched):
            for _ in range(2 + 3 * bf.rank()):
                one_step(forward, watched)
        return seen

    seen = LoopbackWorld(3).run(case)[0]
    assert [of(seen, rank, "step")[-1] for rank in range(3)] == [2, 5, 8]
    assert [len(of(seen, rank, "step")) for rank in range(3)] == [2, 5, 8]


def test_an_exact_distance_inside_join_is_refused():
    """An exact distance is an error where ranks may make unequal numbers of steps."""

    def case():
        _, forward, watched = start("adapt_with_combine")
        monitor = bf.monitor(watched, 1, None, "exact")
        with bf.join(watched):
            one_step(forward, watched)
        monitor.close()

    with pytest.raises(AssertionError, match="inside join some are done before others"):
        LoopbackWorld(2).run(case)


def test_scaled_gradients_are_reported_unscaled():
    """The norm is of the loss's own gradients, not of the scaled one's."""

    def case():
        model = torch.nn.Linear(3, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = bf.DistributedOptimizer(plain, model, "adapt_then_combine")
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        seen = []
        with bf.monitor(optimizer, 1, seen.append):
            scaler.scale(model(torch.ones(1, 3)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return seen

    seen = LoopbackWorld(2).run(case)[0]
    assert [record["gradient_norm"] for record in seen] == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("kind", ["adapt_then_combine", "gradient_allreduce"])
def test_the_norm_is_of_this_ranks_own_gradients_before_they_are_clipped(kind):
    """A norm that is always the clipping limit, or of the average, says nothing about a rank."""

    def case():
        model = torch.nn.Linear(3, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = bf.DistributedOptimizer(plain, model, kind)
        seen = []
        with bf.monitor(optimizer, 2, seen.append):
            for _ in range(4):
                optimizer.zero_grad()
                (model(torch.ones(1, 3)).sum() * (1 + bf.rank())).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        return seen

    seen = LoopbackWorld(2).run(case)[0]
    for rank in range(2):
        assert of(seen, rank, "gradient_norm") == pytest.approx([2.0 * (1 + rank)] * 2)


def test_a_modules_norm_is_before_it_clips():
    """``grad_clip_norm`` clips inside the wrapper."""

    def case():
        sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
        ddp = bf.DecentralizedDataParallel(torch.nn.Linear(3, 1), sgd, grad_clip_norm=0.5)
        seen = []
        with bf.monitor(ddp, 1, seen.append):
            for _ in range(2):
                ddp(torch.ones(1, 3)).sum().backward()
        return seen

    seen = LoopbackWorld(2).run(case)[0]
    assert of(seen, 0, "gradient_norm") == pytest.approx([2.0, 2.0])


def test_a_monitor_tells_of_ranks_that_have_left():
    """Rank 0's neighbour, after it has concluded."""

    def case():
        model = torch.nn.Linear(1, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.0)
        optimizer = bf.DistributedWinPutOptimizer(plain, model)
        seen = []
        with bf.monitor(optimizer, 1, seen.append):
            for _ in range(2 if bf.rank() else 4):
                if optimizer.round == 2:
                    bf.barrier()  # rank 1 has concluded
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
            if bf.rank():
                optimizer.conclude()
                bf.barrier()
        return seen

    seen = LoopbackWorld(2).run(case)[0]
    assert of(seen, 0, "departed") == [[], [], [], [1]]
    assert of(seen, 1, "departed") == [[], []]


def without_an_end(path):
    """Train with a monitor that nobody closes."""
    _, forward, watched = start("adapt_with_combine")
    bf.monitor(watched, 1, path)
    for _ in range(3):
        one_step(forward, watched)


@on("loopback-4", "mpi-2")
def test_the_end_of_the_world_ends_a_monitor(world, tmp_path):
    """Nothing that was reported is lost, and nobody waits."""
    path = tmp_path / "run.jsonl"
    world.run(without_an_end, str(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for rank in range(world.size):
        assert of(records, rank, "step") == [1, 2, 3]


def test_a_rank_that_never_closes_is_told_of(caplog):
    """Rank 0 goes on after its patience, with a warning that names the rank."""

    def case():
        _, _, watched = start("adapt_with_combine")
        monitor = bf.monitor(watched, 1, None)
        if bf.rank() == 0:
            monitor.close(patience=0.2)
        bf.barrier()
        monitor.close()

    LoopbackWorld(2).run(case)
    assert [record.getMessage() for record in caplog.records] == [
        "monitor: closed while rank 1 still trains; close it on all ranks, or wait longer with "
        "close(patience=…)"
    ]


def test_settings_that_differ_are_told_on_all_ranks(tmp_path):
    """And the file that rank 0 has opened is closed, of which pytest would complain."""

    def case():
        _, _, watched = start("adapt_with_combine")
        bf.monitor(watched, 1 + bf.rank(), tmp_path / "run.jsonl")

    outcomes = LoopbackWorld(2).outcomes(case)
    for outcome in outcomes:
        assert outcome.error == "MismatchError"
        assert "monitor needs the same on all ranks, but rank 0 has every=1" in outcome.message


def test_two_monitors_of_one_optimizer_are_refused_until_one_is_closed():
    """A second monitor raises UsageError; close() may be called twice."""

    def case():
        _, forward, watched = start("adapt_with_combine")
        first = bf.monitor(watched, 1, None)
        with pytest.raises(bf.UsageError, match="is monitored already"):
            bf.monitor(watched, 1, None)
        first.close()
        first.close()
        with bf.monitor(watched, 1, None, first_step=7) as second:
            one_step(forward, watched)
        return second.latest[bf.rank()].step

    assert LoopbackWorld(2).run(case) == [8, 8]


def test_an_error_in_the_loop_ends_the_monitor_at_once():
    """An exception leaves the monitor's with block long before any deadline."""

    def case():
        _, _, watched = start("adapt_with_combine")
        began = time.monotonic()
        with pytest.raises(KeyError), bf.monitor(watched, 1, None):
            raise KeyError("mine")
        return time.monotonic() - began

    assert max(LoopbackWorld(2).run(case)) < BEFORE_DEADLINE
