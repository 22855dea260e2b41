"""Windows under load: no read is torn, no version goes back, and no mass is lost or made."""

from __future__ import annotations

import random
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.windows import windows_of
from tests.support import PATIENCE, FileEvent, on

WORLDS = ("loopback-4", "mpi-4", "shared_memory-4")
ELEMENTS = 1_000_000  # 4 MB


def publish(seconds, folder):
    """Put 1, 2, 3, … as fast as it goes, whole tensors of each, until all readers have seen some;
    gives how many."""
    over, many, some = (FileEvent(folder / name) for name in ("over", "many", "some"))
    x, count, begun = torch.empty(ELEMENTS), 0, time.monotonic()
    behind = set(range(1, bf.size()))
    while behind or time.monotonic() < begun + seconds:
        assert time.monotonic() < begun + PATIENCE, f"readers {behind} have seen too little"
        count += 1
        x.fill_(float(count))
        bf.win_put_nonblocking(x, "x")
        x.fill_(-1.0)  # it may be changed at once
        if count == 10:
            many.set()
        behind = {rank for rank in behind if not some.of(rank).is_set()}
    over.set()
    return count


def read(folder):
    """Read without pause; each tensor is of one version. How many versions were seen."""
    over, many, some = (FileEvent(folder / name) for name in ("over", "many", "some"))
    edge = windows_of(bf.current()).find("test", "x").edges.incoming[0]
    last, seen, slow = 0, 0, bf.rank() == 1
    while not over.is_set():
        shown = edge.look()
        if shown is not None:
            assert shown.version >= last, "it went back"
            seen += shown.version > last
            last = shown.version
            if slow:
                many.wait()  # while this version is held, the writer goes on
                time.sleep(0.05)
            if seen > 2:
                some.of(bf.rank()).set()
            low, high = (x.item() for x in torch.aminmax(shown.tensor))
            assert low == high == float(shown.version), (low, high, shown.version)
        edge.release()
        time.sleep(0)
    return seen, last


def torn(seconds, folder):
    bf.set_topology(topology.star(bf.size()))
    bf.win_create(torch.zeros(ELEMENTS), "x", zero_init=True)
    bf.barrier()
    found = publish(seconds, folder) if bf.rank() == 0 else read(folder)
    bf.barrier()
    if bf.rank() != 0:
        count = bf.broadcast_object(None, 0)
        whole = bf.win_read_neighbor("x", 0)
        assert (whole == float(count)).all(), "the last one is seen in the end"
    else:
        bf.broadcast_object(found, 0)
    bf.barrier()
    return found


@on(*WORLDS)
def test_no_read_is_torn_and_no_writer_waits(world, tmp_path):
    """4 MB tensors as fast as they come; one of the readers holds each for 50 ms, and the first one
    until ten have been written."""
    assert_whole(world.run(torn, 0.2, tmp_path))


@pytest.mark.soak
@on(*WORLDS)
def test_no_read_is_torn_in_a_long_run(world, tmp_path):
    """The same for ten seconds."""
    assert_whole(world.run(torn, 10.0, tmp_path))


def assert_whole(found):
    """Readers have seen several versions, and none that was not yet written."""
    count, *readers = found
    for seen, last in readers:
        assert seen > 2
        assert last <= count


def sums(seconds, seed):
    """The same where values are added: a sum is whole, and of as many as were made."""
    bf.set_topology(topology.star(bf.size()))
    bf.win_create(torch.zeros(ELEMENTS), "x", zero_init=True)
    bf.barrier()
    drawn = random.Random(1000 * seed + bf.rank())
    end, one, made, got = time.monotonic() + seconds, torch.ones(ELEMENTS), 0, 0.0
    while time.monotonic() < end:
        if bf.rank() == 0:
            bf.win_accumulate_nonblocking(one, "x")
            made += 1
        else:
            got += collected()
            time.sleep(drawn.random() * 0.01)
    if bf.rank() == 0:
        bf.win_accumulate(one, "x")
        made += 1
    every = bf.allgather_object(made)
    if bf.rank() != 0:
        got += collected()
        assert got == every[0]
    bf.barrier()


def collected():
    x = bf.win_update("x", 0.0, {0: 1.0}, reset=True, clone=True)
    low, high = (value.item() for value in torch.aminmax(x))
    assert low == high
    return low


@on(*WORLDS)
def test_no_sum_is_torn_and_each_counts_once(world):
    """Readers that collect at random moments get all of it in the end."""
    world.run(sums, 0.2, 1)


@pytest.mark.soak
@on(*WORLDS)
def test_no_sum_is_torn_in_a_long_run(world, seed):
    """The same for ten seconds, at other moments each time."""
    world.run(sums, 10.0, seed)


def conserve(operations, seed):
    """Random accumulates to random neighbours, and collects, with delays; audits x and p."""
    n, r = bf.size(), bf.rank()
    drawn = random.Random(1000 * seed + r)
    bf.set_topology(topology.complete(n))
    x = torch.randn(17, dtype=torch.float64, generator=torch.Generator().manual_seed(r))
    before = sum(bf.allgather_object(x.clone()))
    bf.win_create(x, "x", zero_init=True, associated_p=True)
    bf.barrier()
    for _ in range(operations):
        if drawn.random() < 0.5:
            targets = drawn.sample(bf.out_neighbor_ranks(), drawn.randint(1, n - 1))
            shares = [drawn.random() for _ in range(len(targets) + 1)]
            own, *others = (share / sum(shares) for share in shares)
            weights = dict(zip(targets, others, strict=True))
            handle = bf.win_accumulate_nonblocking(x, "x", own, weights)
        else:
            bf.win_update_then_collect("x", require_mutex=drawn.random() < 0.1)
        if drawn.random() < 0.02:
            time.sleep(drawn.random() * 0.002)
    handle.wait()
    bf.win_accumulate(x, "x", 0.5, dict.fromkeys(bf.out_neighbor_ranks(), 0.5 / (n - 1)))
    bf.barrier()
    bf.win_update_then_collect("x")
    after = sum(bf.allgather_object(x.clone()))
    p = bf.allgather_object(bf.win_associated_p("x"))
    scale = 17 * n
    return (after - before).abs().max().item() / scale, abs(sum(p) - n) / n


@on(*WORLDS)
def test_mass_is_conserved_under_any_interleaving(world):
    """2,000 operations of four ranks: the sums of x and of p change by less than 1e-12."""
    assert_conserved(world.run(conserve, 500, 1))


@pytest.mark.soak
@on(*WORLDS)
def test_mass_is_conserved_in_a_long_run(world, seed):
    """20,000 operations of four ranks, others each time."""
    assert_conserved(world.run(conserve, 5_000, seed))


def assert_conserved(found):
    """The sums of x and of p have changed by less than 1e-12 of them."""
    for x, p in found:
        assert x < 1e-12
        assert p < 1e-12
