"""DecentralizedDataParallel that waits for nobody: x_i ← w_ii x_i + Σ_j w_ij latest_j − u_i."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import PATIENCE, LoopbackWorld
from tests.unit.parallel.parallel_reference import (
    assert_all_close,
    assign,
    in_turns,
    make_ddp,
    mlp,
    of_batch,
    simulate,
    train_here,
    vector,
)

pytestmark = pytest.mark.training

RANKS = 4
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
still = partial(torch.optim.SGD, lr=0.0)
RING = topology.ring(4)
GRAPHS = [RING, topology.one_peer_exponential(4), topology.metropolis_weights(topology.star(4))]
every_graph = pytest.mark.parametrize("graph", GRAPHS, ids=["ring", "one peer", "star"])
every_layout = pytest.mark.parametrize(
    "options",
    [{}, {"bucket_size_in_mb": 1e-5}, {"param_as_bucket_view": False, "bucket_size_in_mb": 1e-4}],
    ids=["one bucket", "many buckets", "copied"],
)


@every_layout
@every_graph
def test_in_lockstep_it_is_the_synchronous_equation(graph, options):
    """Where all wait for all after each step, what is latest is what the last step has made."""
    got = LoopbackWorld(RANKS).run(train_here, graph, sgd, 6, sync=False, lockstep=True, **options)
    assert_all_close(got, simulate(graph, sgd, 6))


@every_graph
def test_without_gradients_it_stays_in_the_hull_and_reaches_consensus(graph):
    """Ranks of any speed come together between the smallest and the largest start."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, still, topology=graph, sync=False, bucket_size_in_mb=1e-4)
        start = torch.stack([vector(mlp(rank)) for rank in range(RANKS)])
        low, high = start.min(0).values - 1e-12, start.max(0).values + 1e-12
        for phase in range(30):
            for step in range(2 + (bf.rank() + phase) % 4):
                of_batch(ddp, bf.rank(), step).backward()
                now = vector(model)
                assert (low <= now).all()
                assert (now <= high).all()
                time.sleep(0.0002 * bf.rank())
            bf.barrier()  # so that each phase has an exchange at least
        return bf.consensus_distance(model), float((high - low).norm())

    for distance, wide in LoopbackWorld(RANKS).run(case):
        assert distance < 1e-2 * wide


def test_constants_stay_constant_at_any_speed():
    """The weights of a mixing sum to one, however old what is mixed is."""

    def case():
        model = mlp(0)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 1.25)
        ddp = make_ddp(model, still, topology=RING, sync=False)
        for step in range(10 + 10 * bf.rank()):
            of_batch(ddp, bf.rank(), step).backward()
        return vector(model)

    for values in LoopbackWorld(RANKS).run(case):
        torch.testing.assert_close(values, torch.full_like(values, 1.25), rtol=1e-14, atol=0)


def test_two_ranks():
    """One neighbour, where the fork divided by zero."""
    graph = topology.ring(2)
    got = LoopbackWorld(2).run(train_here, graph, sgd, 4, sync=False, lockstep=True)
    assert_all_close(got, simulate(graph, sgd, 4))


def test_one_rank_is_plain_torch():
    """At n = 1 there is nobody to mix with."""
    got = LoopbackWorld(1).run(train_here, None, sgd, 4, sync=False)
    assert_all_close(got, simulate(topology.ring(1), sgd, 4))


def test_nobody_waits_for_a_straggler():
    """While one rank stops in the midst of its steps, the others make all theirs."""
    through = [threading.Event() for _ in range(3)]

    def case():
        ddp = make_ddp(mlp(bf.rank()), sgd, topology=RING, sync=False)
        of_batch(ddp, bf.rank(), 0).backward()
        bf.barrier()
        for step in range(1, 21):
            if (bf.rank(), step) == (3, 8):
                assert all(event.wait(PATIENCE) for event in through), "the others wait for rank 3"
            of_batch(ddp, bf.rank(), step).backward()
        of_the_straggler = ddp.staleness().get(3)
        if bf.rank() < 3:
            through[bf.rank()].set()
        bf.barrier()
        return of_the_straggler

    of_it, unknown, *_ = LoopbackWorld(RANKS).run(case)
    assert unknown is None, "rank 1 is no neighbour of rank 3"
    assert of_it.lag > 5, "a rank that has run ahead mixes what is many steps behind"


@every_layout
def test_the_own_term_is_the_live_parameter(options):
    """What the user does to a parameter between two steps counts, and reaches the neighbours."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, in_turns(still), topology=RING, sync=False, **options)
        for step in range(3):
            of_batch(ddp, bf.rank(), step).backward()
            bf.barrier()
        before = vector(model)
        if bf.rank() == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
        of_batch(ddp, bf.rank(), 3).backward()
        bf.barrier()
        first = vector(model)
        of_batch(ddp, bf.rank(), 4).backward()
        return before, first, vector(model)

    found = LoopbackWorld(RANKS).run(case)
    before, first, second = (torch.stack(part) for part in zip(*found, strict=True))
    w = torch.from_numpy(topology.mixing_matrix(RING))
    bump = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)[:, None]
    expected = w @ before + torch.diag(w.diagonal()) @ bump
    torch.testing.assert_close(first, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(second, w @ first, rtol=1e-12, atol=1e-13)


def test_another_topology_in_mid_run():
    """The windows are made anew along its edges; the world's own topology is free meanwhile."""
    complete = topology.complete(4)

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, in_turns(sgd), topology=RING, sync=False, bucket_size_in_mb=1e-4)
        for step in range(6):
            of_batch(ddp, bf.rank(), step).backward()
            bf.barrier()
            if step == 2:
                bf.set_topology(topology.ring(4))
                ddp.set_topology(complete)
        names = bf.get_current_created_window_names()
        buckets = len(ddp.bucket_names)
        ddp.close()
        return vector(model), len(names) == buckets, bf.get_current_created_window_names()

    def mixes(step):
        return torch.from_numpy(topology.mixing_matrix(RING if step <= 2 else complete))

    got = LoopbackWorld(RANKS).run(case)
    assert_all_close([values for values, *_ in got], simulate(None, sgd, 6, mixes=mixes))
    assert [rest for _, *rest in got] == [[True, []]] * RANKS


def test_the_topology_of_the_world_stays_while_there_are_windows_along_it():
    """Without a topology of its own the wrapper holds the world's."""

    def case():
        ddp = make_ddp(mlp(bf.rank()), sgd, sync=False)
        bf.set_topology(topology.ring(4))
        of_batch(ddp, bf.rank(), 0).backward()
        with pytest.raises(topology.TopologyError, match=r"windows .*DecentralizedDataParallel0"):
            bf.set_topology(topology.complete(4))
        ddp.close()
        bf.set_topology(topology.complete(4))

    LoopbackWorld(RANKS).run(case)


def test_topologies_that_windows_cannot_follow():
    """A schedule that never repeats has no edges to lie along; a star without weights may be."""

    endless = topology.Schedule("endless", 4, None, topology.as_schedule(RING).look_up)

    def case():
        with pytest.raises(topology.TopologyError, match=r"endless never repeats, .*a schedule"):
            make_ddp(mlp(0), sgd, topology=endless, sync=False)
        make_ddp(mlp(0), sgd, topology=topology.uniform_weights(topology.star(4)), sync=False)

    LoopbackWorld(RANKS).run(case)


def test_the_average_model_and_on():
    """``global_avg`` replaces what neighbours see as well; ``eval`` leaves it alone."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, in_turns(sgd), topology=RING, sync=False, bucket_size_in_mb=1e-4)
        for step in range(3):
            of_batch(ddp, bf.rank(), step).backward()
            bf.barrier()
        before = vector(model)
        ddp.eval()
        lent = vector(model)
        ddp.train()
        assert torch.equal(vector(model), before)
        ddp.global_avg()
        average = vector(model)
        for step in range(3, 6):
            of_batch(ddp, bf.rank(), step).backward()
            bf.barrier()
        return before, lent, average, vector(model)

    def averaged(step, models):
        if step == 3:
            mean = torch.stack([vector(model) for model in models]).mean(0)
            for model in models:
                assign(model, mean)

    before, lent, average, after = zip(*LoopbackWorld(RANKS).run(case), strict=True)
    mean = torch.stack(before).mean(0)
    assert_all_close(lent, [mean] * RANKS)
    assert_all_close(average, [mean] * RANKS)
    assert_all_close(after, simulate(RING, sgd, 6, before=averaged))
