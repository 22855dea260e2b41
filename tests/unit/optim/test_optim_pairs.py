"""Methods of atomic pair averages at their own pace: nobody waits, the sum stays, refusals."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp import simulate, topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.engine.active_messages import ActiveMessageDispatcher
from tests.support import LoopbackWorld, on
from tests.support.least_squares import LeastSquares
from tests.support.timelines import arrows, assert_nested, read, spans
from tests.unit.algorithms.uneven_training import Pace
from tests.unit.optim.optim_reference import batch, mlp, square_loss

pytestmark = pytest.mark.training

PAIRS = [name for name in ALGORITHMS if ALGORITHMS[name].needs.pairs]
every_method = pytest.mark.parametrize("method", PAIRS)
still = partial(torch.optim.SGD, lr=0.0)
RANKS = 4


def made(method, lr=0.01, **options):
    """A model, and a function that makes a step with data that do not matter."""
    model = mlp(bf.rank())
    optimizer = bf.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr), model, method, **options, broadcast=False
    )

    def step(meanwhile=None):
        optimizer.zero_grad()
        square_loss(model, batch(bf.rank(), 0)).backward()
        if meanwhile is not None:
            meanwhile()
        optimizer.step()

    return optimizer, step


@every_method
def test_a_straggler_holds_nobody_up(method):
    """While one rank is in its step the others make all of theirs, and average, also with it."""
    done = threading.Event()

    def case():
        optimizer, step = made(method)
        step()
        bf.barrier()
        if bf.rank() == 3:
            step(lambda: done.wait(60.0))
        else:
            for _ in range(60):
                step()
                time.sleep(0.001)
            if bf.rank() == 0:
                done.set()
        assert done.wait(60.0)
        met = optimizer._averager.windows.pairs[0].averages
        bf.barrier()
        return optimizer.round, met

    got = LoopbackWorld(RANKS).run(case)
    assert [rounds for rounds, _ in got] == [61, 61, 61, 2]
    assert all(met > 5 for _, met in got), got


@pytest.mark.exhaustive
@every_method
@pytest.mark.parametrize("graph", [None, topology.star(4)], ids=["random", "star"])
def test_the_mean_is_kept_at_any_pace(method, graph):
    """Σ x is what it was, however irregular the steps, once all that is under way has come."""

    def case():
        model = torch.nn.Linear(5, 3, dtype=torch.float64)
        generator = torch.Generator().manual_seed(bf.rank())
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        plain = still(model.parameters())
        optimizer = bf.DistributedOptimizer(plain, model, method, topology=graph, broadcast=False)
        dice = random.Random(bf.rank())
        for _ in range(60):
            optimizer.step()
            time.sleep(0.003 * dice.random())
        met = optimizer._averager.windows.pairs[0].averages
        bf.barrier()
        optimizer.force_barrier = True
        for _ in range(160 - optimizer.round):
            optimizer.step()
        return start, torch.cat([p.detach().reshape(-1) for p in model.parameters()]), met

    got = LoopbackWorld(RANKS).run(case)
    mean = torch.stack([start for start, _, _ in got]).mean(dim=0)
    for _, after, met in got:
        torch.testing.assert_close(after, mean, rtol=1e-7, atol=1e-7)
        assert met > 3, "nobody has averaged: the test shows nothing"
    ends = torch.stack([after for _, after, _ in got]).mean(dim=0)
    torch.testing.assert_close(ends, mean, rtol=1e-12, atol=1e-12)


def fit(pace, method, steps, lr):
    """LS(n) from the optimum on, at about one pace; the models of the last half of the steps."""
    problem, rank = LeastSquares(bf.size()), bf.rank()
    model = torch.nn.Linear(10, 1, bias=False, dtype=torch.float64)
    model.weight.data[0] = torch.from_numpy(problem.optimum)
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = bf.DistributedOptimizer(plain, model, method)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        problem.loss(rank, model.weight[0]).backward()
        optimizer.step()
        pace.step(rank)
        found.append(model.weight.detach()[0].numpy().copy())
    pace.done(rank)
    bf.barrier()
    return np.stack(found[steps // 2 :])


@pytest.mark.nightly
@every_method
def test_least_squares_at_their_own_pace(method):
    """Stale gradients and random pairs leave a bias of O(γ), as of D-SGD; the mean is nearer."""
    n, problem, errors = 4, LeastSquares(4), []
    for lr in (0.05, 0.01):
        got = np.stack(LoopbackWorld(n).run(fit, Pace([1.0] * n), method, 300, lr))
        errors.append(np.mean([problem.error(got[:, k]) for k in range(got.shape[1])]))
        mean = problem.error(np.broadcast_to(got.mean(axis=(0, 1)), (n, 10)))
        assert mean < 0.25 * errors[-1], (mean, errors)
    assert 2.5 < errors[0] / errors[1] < 8.0, errors


@on("mpi-2")
def test_between_processes(world):
    """Free steps first, then rounds in which all meet: one mean, which nobody has moved."""
    for method in PAIRS:
        got = world.run(free_then_together, method)
        assert {round(value, 9) for value, _ in got} == {(world.size - 1) / 2}
        assert all(met > 0 for _, met in got)


def free_then_together(method):
    model = torch.nn.Linear(1000, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, float(bf.rank()))
    optimizer = bf.DistributedOptimizer(still(model.parameters()), model, method, broadcast=False)
    met, end = 0, time.monotonic() + 20
    while met < 3 and time.monotonic() < end:
        model(torch.ones(1, 1000, dtype=torch.float64)).sum().backward()
        time.sleep(0.002)
        optimizer.step()
        met = optimizer._averager.windows.pairs[0].averages
    rounds = int(bf.allreduce(torch.tensor(optimizer.round), op="max"))
    while optimizer.round < rounds:
        optimizer.step()
    bf.barrier()
    optimizer.force_barrier = True
    for _ in range(80):
        optimizer.step()
    return model.weight.mean().item(), met


@every_method
def test_a_rank_that_ends_or_fails_stops_nobody(method):
    """One returns, one raises: the others go on with each other."""

    def case():
        optimizer, step = made(method)
        step()
        bf.barrier()
        if bf.rank() == 1:
            raise ValueError("the data is gone")
        for _ in range(0 if bf.rank() == 2 else 40):
            step()
            time.sleep(0.002)
        return optimizer.round, optimizer._averager.windows.pairs[0].waits_for

    found = LoopbackWorld(RANKS).outcomes(case)
    assert found[1].error == "ValueError"
    assert [found[rank].value[0] for rank in (0, 2, 3)] == [41, 1, 41]
    assert all(found[rank].value[1] not in (1, 2) for rank in (0, 3))


@every_method
def test_who_waits_for_a_rank_that_is_gone_is_told(method):
    """With force_barrier the partner is needed: an error names it, before the deadline."""

    def case():
        optimizer, step = made(method)
        optimizer.force_barrier = True
        step()
        if bf.rank() == 1:
            return
        step()

    found = LoopbackWorld(2).outcomes(case)
    assert found[0].error == "PeerLeftError"
    assert "rank 1 has left" in found[0].message


@every_method
def test_unequal_numbers_of_batches(method):
    """In ``join`` a rank that is done refuses, and all leave together; twice."""

    def case():
        optimizer, step = made(method)
        for epoch in range(2):
            with bf.join(optimizer):
                for _ in range(4 * (1 + (bf.rank() + epoch) % RANKS)):
                    step()
            assert not optimizer._averager.windows.pairs[0].open
        return optimizer.round

    assert LoopbackWorld(RANKS).run(case) == [12, 20, 28, 20]


def test_bytes_and_memory_are_as_declared(monkeypatch):
    """A message of the model's size to the partner of each round, and one copy to average with."""
    sent, steps, numel = [], 6, 64 * 64
    send = ActiveMessageDispatcher.send

    def counted(self, peer, handler, arguments, tensor=None):
        if handler == "pair averaging" and tensor is not None:
            sent.append((self._transport.rank, tensor.nbytes))
        return send(self, peer, handler, arguments, tensor)

    monkeypatch.setattr(ActiveMessageDispatcher, "send", counted)

    def case(method):
        model = torch.nn.Linear(64, 64, bias=False)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = bf.DistributedOptimizer(plain, model, method)
        optimizer.force_barrier = True
        for _ in range(steps):
            model(torch.ones(1, 64)).square().mean().backward()
            optimizer.step()
        return optimizer.bytes_sent, optimizer._averager.windows.pairs[0].nbytes

    for method in PAIRS:
        sent.clear()
        got = LoopbackWorld(RANKS).run(case, method)
        assert got == [(steps * 4 * numel * ALGORITHMS[method].messages, 4 * numel)] * RANKS
        assert [sum(nbytes for r, nbytes in sent if r == rank) for rank in range(RANKS)] == [
            nbytes for nbytes, _ in got
        ]


@every_method
def test_averages_are_in_the_timeline(method, tmp_path):
    """One span a round, which names the partners, and one of each message, on both ends."""

    def case():
        optimizer, step = made(method)
        optimizer.force_barrier = True
        for _ in range(4):
            step()

    LoopbackWorld(2).run(case, settings={"timeline": f"{tmp_path}/"})
    events = [read(tmp_path / f"rank{rank}.json") for rank in range(2)]
    for rank, own in enumerate(events):
        assert_nested(own)
        averages = spans(own, "window", "PAIR_AVERAGE")
        assert [one["args"]["peers"] for one in averages] == [[1 - rank]] * 4
        sent = [name for name in arrows(own, "s") if "bucket0" in name]
        assert len(sent) == 4  # a question, or the answer, in each round
        assert {*sent} <= {*arrows(events[1 - rank], "f")}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": 2}, "max_staleness: ad_psgd has no windows, and waits for nobody"),
        ({"window_prefix": "w"}, "window_prefix: ad_psgd has no windows"),
        ({"compression": "qsgd_int8"}, "compression: ad_psgd averages .* as they are"),
        ({"update_in_backward": True}, "update_in_backward: ad_psgd averages before_forward"),
        ({"communication": "allreduce"}, "ad_psgd works with pair_average, empty"),
        ({"topology": topology.exponential_two(4)}, "not symmetric.* Use topology"),
        (
            {"topology": topology.matcha(topology.complete(4), 1.0, seed=0)},
            r"rank 0 has several neighbours in one round.* Use topology.random_matching\(4\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(options, message):
    """The argument, and what to do."""

    def case():
        with pytest.raises((bf.ArgumentError, topology.TopologyError), match=message):
            made("ad_psgd", **options)[1]()

    LoopbackWorld(RANKS).run(case)


def test_the_coefficients_of_the_momentum_are_those_of_the_graph():
    """χ₁ and χ₂ by their definition, on the ring, whose edges average in every second round."""
    n = 8
    laplacian = np.zeros((n, n))
    for rank in range(n):
        edge = np.eye(n)[rank] - np.eye(n)[(rank + 1) % n]
        laplacian += np.outer(edge, edge) / 2
    first = np.eye(n)[0] - np.eye(n)[1]
    chi1 = 1 / np.linalg.eigvalsh(laplacian)[1]
    chi2 = first @ np.linalg.pinv(laplacian) @ first / 2
    assert topology.pair_constants(topology.matching_decomposition(topology.ring(n))) == (
        pytest.approx((chi1, chi2), rel=1e-8)
    )
    method = ALGORITHMS["a2cid2"]()
    method.schedule_along(topology.ring(n))
    expected = 1 / (2 * np.sqrt(chi1 * chi2)), np.sqrt(chi1 / chi2) / 2
    assert method._coefficients == pytest.approx(expected, rel=1e-8)


def consensus_factor(method, n, steps=150):
    """By which factor the ranks come nearer to each other in a round, without gradients."""
    models = []
    for rank in range(n):
        model = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.constant_(model.weight, float(rank % 3) + rank)
        models.append(model)
    one = torch.ones(1, 1, dtype=torch.float64)
    problem = simulate.Problem(models, lambda out: 0 * out.sum(), [(one,)] * n)
    run = simulate.train(
        problem, still, method, steps=steps, topology=topology.ring(n), record_every=steps // 3
    )
    distances = run.consensus_distance
    return (distances[2] / distances[1]) ** (3 / steps)


def test_momentum_lets_a_ring_agree_sooner_and_as_fast_as_theory_says():
    """The largest eigenvalue of two rounds, by an independent matrix of x and x̃."""
    n = 16
    chi1, chi2 = topology.pair_constants(topology.matching_decomposition(topology.ring(n)))
    eta, alpha = 1 / (2 * np.sqrt(chi1 * chi2)), np.sqrt(chi1 / chi2) / 2
    factors = {}
    for method, rate, step in (("ad_psgd", 0.0, 0.5), ("a2cid2", eta, alpha)):
        keep, whole, one = (1 + np.exp(-2 * rate)) / 2, np.eye(2 * n), np.eye(n)
        for k in range(2):
            laplacian = np.zeros((n, n))
            for rank in range(k, n, 2):
                edge = one[rank] - one[(rank + 1) % n]
                laplacian += np.outer(edge, edge)
            average = np.block([[one - laplacian / 2, 0 * one], [-step * laplacian, one]])
            flow = np.block([[keep * one, (1 - keep) * one], [(1 - keep) * one, keep * one]])
            whole = flow @ average @ whole
        values = np.sort(np.abs(np.linalg.eigvals(whole)))[::-1]
        expected = float(values[values < 1 - 1e-6][0]) ** 0.5
        factors[method] = consensus_factor(method, n)
        assert factors[method] == pytest.approx(expected, rel=2e-3), method
    assert np.log(factors["a2cid2"]) < 1.5 * np.log(factors["ad_psgd"])
