"""One-sided methods at their own pace: stragglers, bounded staleness, mass, and where they lead."""

from __future__ import annotations

import random
import threading
import time
from functools import cache, partial

import networkx as nx
import numpy as np
import pytest
import torch
from torch import nn

import asyncddp as bf
from asyncddp import topology
from tests.conformance.test_algorithms import distance, fit
from tests.support import LoopbackWorld
from tests.support.least_squares import LeastSquares
from tests.unit.optim.optim_reference import batch, mlp, square_loss
from tests.unit.optim.test_optim_one_sided import (
    MIXED_BY_ROWS,
    RANKS,
    every_method,
    scalar,
    shares,
    unbalanced,
    wrapped,
)

pytestmark = pytest.mark.training

still = partial(torch.optim.SGD, lr=0.0)
SLOW = 3  # the rank that sleeps


def stepping(model, optimizer):
    """One step of training, with data that do not matter."""
    optimizer.zero_grad()
    square_loss(model, batch(bf.rank(), 0)).backward()
    optimizer.step()


# stragglers


@every_method
def test_a_straggler_holds_nobody_up(method):
    """While one rank sleeps through its steps the others make all of theirs."""
    done = threading.Event()

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model, method, topology=topology.ring(4)
        )
        if bf.rank() == SLOW:
            for _ in range(3):
                stepping(model, optimizer)
                assert done.wait(60.0)
            return time.monotonic()
        for _ in range(60):
            stepping(model, optimizer)
        ended = time.monotonic()
        if optimizer.round == 60 and bf.rank() == 0:
            done.set()
        return ended

    ended = LoopbackWorld(RANKS).run(case)
    assert done.is_set()
    assert ended[0] < ended[SLOW]


@every_method
@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize(
    "graph", [topology.ring(4), topology.one_peer_exponential(4)], ids=topology.describe
)
def test_bounded_staleness_holds_the_fast_ranks_back(method, bound, graph):
    """When a rank mixes in step k its neighbours have come to step k − bound at least.

    What it mixes is as old, or as many rounds older as a neighbour publishes to others.
    """
    period = topology.as_schedule(graph).period

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model,
            method,
            topology=graph,
            max_staleness=bound,
        )
        lags, behind = [], []
        for step in range(12):
            if bf.rank() == SLOW:
                time.sleep(0.02)
            stepping(model, optimizer)
            near = topology.neighbors_of(graph, bf.rank(), step).src_weights
            ages = optimizer.staleness()
            lags += [ages[peer].lag for peer in near if step >= bound + period]
            behind += [ages[peer].lag - ages[peer].steps for peer in near]
        return max(lags), max(behind)

    got = LoopbackWorld(RANKS).run(case)
    assert max(behind for _, behind in got) <= bound
    if method != "push_sum":  # who has not taken a share gets no other, and is told the step alone
        assert max(lag for lag, _ in got) <= bound + period - 1
    if bound:
        assert max(behind for _, behind in got) > 0, "nobody was ahead: the test shows nothing"


def test_without_a_bound_staleness_is_reported():
    """By neighbour: version, steps, seconds and by how many steps it was behind."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model,
            "win_put",
            topology=topology.ring(4),
            bucket_size_in_mb=1e-5,
        )
        fresh = optimizer.staleness()
        for _ in range(2):
            stepping(model, optimizer)
        bf.barrier()
        if bf.rank() == 0:
            for _ in range(10):
                stepping(model, optimizer)
        bf.barrier()
        return fresh, optimizer.staleness(), optimizer.max_staleness

    got = LoopbackWorld(RANKS).run(case)
    for rank, (fresh, ages, bound) in enumerate(got):
        assert bound is None
        assert sorted(fresh) == sorted(ages) == sorted({(rank - 1) % 4, (rank + 1) % 4})
        assert all(age.version == 0 for age in fresh.values())
    for peer in (1, 3):
        assert got[0][1][peer].lag == 10
        assert got[0][1][peer].version == 2
        assert got[0][1][peer].steps == 0
        assert got[peer][1][0].steps >= 10
        assert 0.0 < got[peer][1][0].seconds < 45.0


@pytest.mark.parametrize("method", ["win_put", "pull_get", "push_sum"])
def test_a_bound_that_is_passed_names_who_is_missing(method):
    """The deadline's error says which step, which bound, and who."""
    ended = threading.Event()

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model,
            method,
            topology=topology.ring(4, style="right"),
            max_staleness=2,
            window_prefix="net",
        )
        stepping(model, optimizer)
        bf.barrier()
        if bf.rank() == 0:
            ended.wait(60.0)
            return None
        if bf.rank() > 1:
            return None
        stepping(model, optimizer)
        stepping(model, optimizer)
        with pytest.raises(bf.PeerError) as caught:
            stepping(model, optimizer)
        ended.set()
        return optimizer.round, type(caught.value).__name__, str(caught.value)

    settings = {"timeout": 3.0, "warn_after": 10.0}
    rounds, kind, told = LoopbackWorld(RANKS).run(case, settings=settings)[1]
    assert (rounds, kind) == (3, "WaitTimeoutError")
    assert told.startswith("rank 1: step 4 of net with max_staleness=2 was not done in ")
    assert told.endswith("missing: rank 0")


@every_method
def test_with_a_bound_nobody_waits_for_a_rank_that_has_ended(method):
    """A rank whose function has returned has made all its steps."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model,
            method,
            topology=topology.ring(4),
            max_staleness=2,
        )
        for _ in range(1 if bf.rank() == 0 else 8):
            stepping(model, optimizer)
        return optimizer.round

    assert LoopbackWorld(RANKS).run(case) == [1, 8, 8, 8]


@every_method
def test_nobody_waits_for_a_rank_that_concludes(method):
    """With a bound, unequal numbers of steps and another epoch: whoever is done says so."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model,
            method,
            topology=topology.ring(4),
            max_staleness=1,
        )
        for epoch in range(2):
            for _ in range(6 * (1 + (bf.rank() + epoch) % RANKS)):
                stepping(model, optimizer)
            optimizer.conclude()
            bf.barrier()
        return optimizer.round

    steps = [6 * (2 + rank + (rank + 1) % RANKS) for rank in range(RANKS)]
    assert LoopbackWorld(RANKS).run(case) == steps


@every_method
def test_join_lets_ranks_with_unequal_numbers_of_batches_end_together(method):
    """``join`` concludes on the way: bounded staleness hangs nobody."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            model,
            method,
            topology=topology.ring(4),
            max_staleness=1,
        )
        with bf.join(optimizer):
            for _ in range(4 * (1 + bf.rank())):
                stepping(model, optimizer)
        return optimizer.round

    assert LoopbackWorld(RANKS).run(case) == [4, 8, 12, 16]


@every_method
def test_a_rank_that_fails_stops_nobody_but_those_who_wait(method):
    """Without a bound the others train on, though one has raised an exception."""

    def case():
        model = mlp(bf.rank())
        optimizer = bf.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model, method, topology=topology.ring(4)
        )
        stepping(model, optimizer)
        bf.barrier()
        if bf.rank() == 1:
            raise ValueError("the data is gone")
        time.sleep(0.3)
        for _ in range(20):
            stepping(model, optimizer)
        return optimizer.round

    outcomes = LoopbackWorld(RANKS)
    found = outcomes.outcomes(case)
    assert [found[rank].value for rank in (0, 2, 3)] == [21] * 3
    assert found[1].error == "ValueError"


# mass, hull, and the right mean


@pytest.mark.parametrize(
    "graph",
    [topology.ring(4), topology.one_peer_exponential(4), unbalanced()],
    ids=topology.describe,
)
def test_push_sum_keeps_the_mass(graph):
    """Σ z p and Σ p are what they were, however irregular the steps, once all is collected."""

    def case():
        model = nn.Linear(5, 3, dtype=torch.float64)
        generator = torch.Generator().manual_seed(bf.rank())
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        optimizer = bf.DistributedOptimizer(
            still(model.parameters()), model, "push_sum", topology=graph, broadcast=False
        )
        dice = random.Random(bf.rank())
        for _ in range(100):
            optimizer.step()
            if dice.random() < 0.1:
                time.sleep(0.003 * dice.random())
        bf.barrier()
        optimizer.force_barrier = True
        for _ in range(100 - optimizer.round % 2):
            optimizer.step()
        p = optimizer._averager.windows.push_sum_weights()[0]
        z = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        return start, z * p, p

    got = LoopbackWorld(RANKS).run(case)
    assert sum(p for _, _, p in got) == pytest.approx(RANKS, rel=1e-12)
    before, after = (torch.stack([row[k] for row in got]).sum(dim=0) for k in (0, 1))
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    for _, x, p in got:
        torch.testing.assert_close(x / p, before / RANKS, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["win_put", "pull_get", "async_model_average"])
def test_averages_stay_in_the_hull_and_agree(method):
    """Without gradients every value stays between the first ones, and all come together."""

    def case():
        model = scalar()
        optimizer = bf.DistributedOptimizer(
            still(model.parameters()), model, method, topology=topology.exponential_two(4)
        )
        dice, values = random.Random(bf.rank()), []
        for _ in range(80):
            optimizer.step()
            values.append(model.weight.item())
            time.sleep(0.002 * dice.random())
        bf.barrier()
        optimizer.force_barrier = True
        for _ in range(30):
            optimizer.step()
        return min(values), max(values), model.weight.item()

    got = LoopbackWorld(RANKS).run(case)
    assert min(low for low, _, _ in got) >= -1e-12
    assert max(high for _, high, _ in got) <= 3 + 1e-12
    assert max(x for _, _, x in got) - min(x for _, _, x in got) < 1e-9


UNBALANCED = nx.DiGraph(
    [(i, i) for i in range(8)]
    + [(i, (i + 1) % 8) for i in range(8)]
    + [(i, (i + 3) % 8) for i in range(0, 8, 2)],
    name="unbalanced(8)",
)


def test_push_sum_reaches_the_true_mean_where_rows_of_w_do_not():
    """0 … 7 on a digraph of unequal degrees: 3.5 by push-sum, 3.428571 by averaging rows."""

    def pushed():
        model = scalar()
        optimizer = wrapped("push_sum", model, still, topology=UNBALANCED)
        values = []
        for _ in range(50):
            optimizer.step()
            values.append(model.weight.item())
        return [values[k - 1] for k in (10, 20, 50)]

    def averaged():
        bf.set_topology(UNBALANCED)
        x = torch.tensor([float(bf.rank())], dtype=torch.float64)
        for _ in range(200):
            x = bf.neighbor_allreduce(x)
        return x.item()

    errors = np.abs(np.array(LoopbackWorld(8).run(pushed)) - 3.5).max(axis=0)
    np.testing.assert_allclose(errors, [1.6621e-1, 9.1659e-3, 1.6473e-6], rtol=1e-3)
    assert LoopbackWorld(8).run(averaged) == pytest.approx([24 / 7] * 8, rel=1e-9)


def test_push_sum_without_barriers_reaches_it_too():
    """Ranks of unequal speed, no gradient: the ratio tends to 3.5 all the same."""

    def case():
        model = scalar()
        optimizer = bf.DistributedOptimizer(
            still(model.parameters()),
            model,
            "push_sum",
            topology=UNBALANCED,
            max_staleness=4,
            broadcast=False,
        )
        for _ in range(150):
            optimizer.step()
            if bf.rank() == SLOW:
                time.sleep(0.001)
        bf.barrier()
        optimizer.step()  # what was given before the barrier is collected
        return model.weight.item()

    assert LoopbackWorld(8).run(case) == pytest.approx([3.5] * 8, rel=1e-6)


# where training leads, on LS(n)


@cache
def sgp_on_least_squares(lr, steps):
    """SGP of full gradients on LS(8) over the unbalanced digraph, with numpy alone."""
    problem = LeastSquares(8)
    a, b = problem.a, problem.b
    mix = shares(topology.as_schedule(UNBALANCED), 0).numpy()
    curvature, slope = np.einsum("nij,nik->njk", a, a) / 50, np.einsum("nij,ni->nj", a, b) / 50
    x, p = np.zeros((8, 10)), np.ones((8, 1))
    for _ in range(steps):
        gradient = (curvature @ (x / p)[:, :, None])[:, :, 0] - slope
        x, p = mix @ (x - lr * gradient), mix @ p
    return torch.from_numpy(x / p)


def test_push_sum_optimizes_the_average_loss_on_an_unbalanced_digraph():
    """As SGP by the book, to 1e-12; its bias shrinks with the step size, towards the optimum."""

    def run(lr, steps):
        return LoopbackWorld(8).run(fit, "push_sum", UNBALANCED, steps, lr=lr)

    got = run(0.05, 100)
    torch.testing.assert_close(
        torch.stack(got), sgp_on_least_squares(0.05, 100), rtol=1e-12, atol=1e-12
    )
    coarse = distance(list(sgp_on_least_squares(0.05, 500)), 8)
    fine = distance(list(sgp_on_least_squares(0.005, 5000)), 8)
    assert 7.0 < coarse / fine < 13.0
    assert coarse < 0.1


def asynchronous(counts, method, graph, steps, lr, bound):
    """Full gradients, with pauses at random; this rank's solution when all have made so many steps.

    All go on for a while, since who is left alone ends where its own data lead it.
    """
    problem = LeastSquares(bf.size())
    a, b = torch.from_numpy(problem.a), torch.from_numpy(problem.b)
    a, b = a[bf.rank()], b[bf.rank()]
    model = nn.Linear(10, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = bf.DistributedOptimizer(plain, model, method, topology=graph, max_staleness=bound)
    dice = random.Random(bf.rank())
    solution = None
    for _ in range(steps + 30):
        if dice.random() < 0.05:
            time.sleep(0.004 * dice.random())
        optimizer.zero_grad()
        ((model(a)[:, 0] - b).square().sum() / 100).backward()
        optimizer.step()
        counts[bf.rank()] += 1
        if solution is None and min(counts) >= steps:
            solution = model.weight.detach()[0].clone()
    return solution


@pytest.mark.nightly
@pytest.mark.parametrize("method", MIXED_BY_ROWS)
def test_with_bounded_delay_training_stays_near_the_optimum(method):
    """Within twice the bias of the synchronous method, with delays of up to four steps."""
    graph, lr = topology.ring(4), 0.1
    bias = distance(LoopbackWorld(4).run(fit, method, graph, 120, lr=lr), 4)
    got = LoopbackWorld(4).run(asynchronous, [0] * 4, method, graph, 120, lr, 4)
    assert distance(got, 4) < 2 * bias


def test_push_sum_with_bounded_delay_has_the_optimum_in_its_middle():
    """Ranks that have given much away make large steps, each with its own data; their mean none.

    A rank's own data would lead it 0.8 away.
    """
    got = LoopbackWorld(4).run(asynchronous, [0] * 4, "push_sum", topology.ring(4), 300, 0.05, 1)
    mean = torch.stack(got).mean(dim=0)
    assert distance(got, 4) < 0.3
    assert distance([mean], 4) < 0.1
