"""Ranks that share memory, beside ranks that do not: sums, random verbs, optimizers."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import random
import time
from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import FileEvent, PoolWorld, on, open_transport
from tests.support.oracle import check, held, mixed, summed
from tests.unit.optim.optim_reference import batch, mlp, square_loss, train_here, vector

NEAR = on("shared_memory-4")
PIECE = 1 << 19
"""Bytes of a piece of a sum."""


@pytest.fixture(scope="module")
def three():
    """An odd number of ranks, so that parts of pieces are of unequal size."""
    world = PoolWorld("shared_memory", 3)
    yield world
    world.close()


# sums


def sums(dtype):
    """Digests of sums and means of all sizes, which must be the same on all ranks."""
    assert bf.current().transport._shared is not None
    found = []
    counts = [(1 << 16) // dtype.itemsize + extra for extra in (-1, 0, 1)]
    counts += [
        k * PIECE // dtype.itemsize + extra for k, extra in ((1, 0), (1, 1), (5, -3), (6, 2))
    ]
    for number, count in enumerate(counts):
        for average in (False, True):

            @functools.cache
            def of(rank, number=number, count=count):
                return held(rank, (count,), dtype, seed=number)

            x = of(bf.rank()).clone()
            want = summed(range(bf.size()), of) / (bf.size() if average else 1)
            got = bf.allreduce(x, average=average)
            assert torch.equal(x, of(bf.rank()))
            check(got, x, want)
            assert torch.equal(bf.allreduce_(x, average=average), got)
            assert torch.equal(x, got)
            shared = bf.empty_shared((count,), dtype=dtype).copy_(of(bf.rank()))
            assert torch.equal(bf.allreduce_(shared, average=average), got)
            found.append(hashlib.sha256(got.numpy().tobytes()).hexdigest())
    return found


def assert_alike(found):
    assert all(one == found[0] for one in found), "ranks have got different bits"
    assert len(set(found[0])) == len(found[0])


@NEAR
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_sums_of_large_tensors_are_the_same_to_the_bit(world, dtype):
    """Right, and equal on all ranks, whatever the size and wherever the tensor lies."""
    assert_alike(world.run(sums, dtype))


@pytest.mark.mpi(3)
def test_sums_over_three_ranks(three):
    """allreduce is right and equal to the bit where three ranks divide no piece evenly."""
    assert_alike(three.run(sums, torch.float32))


def parts_of_sums(dtype):
    """Parts of sums of all sizes, in turn with sums, whose slots they use."""
    n, rank = bf.size(), bf.rank()
    assert bf.current().transport._shared is not None
    columns = PIECE // (n * dtype.itemsize)
    least = -(-(1 << 16) // (n * dtype.itemsize))
    for number, count in enumerate(
        (least - 1, least, columns - 1, columns, columns + 1, 5 * columns - 3, 6 * columns + 2)
    ):

        @functools.cache
        def of(rank, number=number, count=count):
            return held(rank, (n * count,), dtype, seed=number)

        x, want = of(rank), summed(range(n), of)
        mine, part = x.view(n, -1)[rank], want.view(n, -1)[rank]
        check(bf.reduce_scatter(x, average=False), mine, part)
        assert torch.equal(x, of(rank))
        if dtype != torch.int64:
            check(bf.reduce_scatter(x), mine, part / n)
        check(bf.allreduce(x, average=False), x, want)


@NEAR
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex128], ids=str)
def test_parts_of_sums_of_large_tensors(world, dtype):
    """reduce_scatter is right at lengths around those of pieces, in turn with allreduce."""
    world.run(parts_of_sums, dtype)


@pytest.mark.mpi(3)
def test_parts_of_sums_over_three_ranks(three):
    """reduce_scatter is right where three ranks divide no piece evenly."""
    three.run(parts_of_sums, torch.float32)


def gives_up_large_sums(transport, folder):
    """Rank 0 gives a sum up that the others never join, with another behind it."""
    given_up = FileEvent(folder / "given up")
    if transport.rank > 0:
        given_up.wait()
        return None
    x, total, part = (
        torch.ones(200_000),
        torch.zeros(200_000),
        torch.zeros(200_000 // transport.size),
    )
    first = transport.ireduce_scatter(x, part)
    second = transport.iallreduce(x, total)
    told = []
    for transfer in (first, second):
        with pytest.raises(bf.WaitTimeoutError) as late:
            transport.finish(transfer, 0.1, "sum")
        told.append(str(late.value))
    for start in (lambda: transport.iallreduce(x), lambda: transport.ireduce_scatter(x, part)):
        with pytest.raises(bf.PeerError) as refused:
            start()
        told.append(str(refused.value))
    given_up.set()
    assert not total.any()
    assert not part.any()
    return told


@NEAR
def test_large_sums_that_were_given_up_end_all_that_come_after(world, tmp_path):
    """A sum behind one that timed out does too, new ones raise, and no output is written."""
    told, *_ = world.run_bare(gives_up_large_sums, tmp_path)
    refused = (
        "collectives cannot go on: an earlier collective was given up while some ranks had not "
        "joined it. End and restart the run."
    )
    assert told == ["rank 0: sum was not done in 0.1 s"] * 2 + [refused] * 2


def integers():
    for k in range(3):
        for dtype in (torch.int64, torch.int8, torch.bool):

            def of(rank, k=k, dtype=dtype):
                return held(rank, (200_001,), dtype, seed=k)

            x = of(bf.rank())
            check(bf.allreduce(x, average=False), x, summed(range(bf.size()), of))


@NEAR
def test_sums_of_integers_and_bools(world):
    """Modulo and by or, as for small ones."""
    world.run(integers)


# random verbs

SHAPES = [(), (3,), (7, 5), (40_001,), (100_000,)]
GRAPHS = [
    topology.ring,
    topology.complete,
    topology.exponential_two,
    topology.star,
    partial(topology.ring, style="right"),
]


drawn = functools.lru_cache(maxsize=160)(held)
"""Nobody writes into these."""


def lying(x, where):
    """A copy of a tensor somewhere."""
    if where == "shared":
        return bf.empty_shared(x.shape, dtype=x.dtype).copy_(x)
    return x.clone()


def soak(verbs, seed):
    """All ranks agree on names, shapes and graphs; forms, places and delays are each rank's own."""
    shared, mine = random.Random(seed), random.Random(1000 * seed + bf.rank())
    pending, kept = [], []
    for number in range(verbs):
        if number % 40 == 0:
            bf.set_topology(shared.choice(GRAPHS)(bf.size()))
            near = topology.neighbors_of(bf.load_topology(), bf.rank())
        shape, name = shared.choice(SHAPES), f"layer {shared.randrange(6)}"
        total = shared.random() < 0.05

        def of(rank, shape=shape, number=number):
            return drawn(rank, shape, torch.float64, seed=number % 7)

        if mine.random() < 0.1:
            time.sleep(0.003 * mine.random())
        x = of(bf.rank())
        if total:
            check(bf.allreduce(x, average=False), x, summed(range(bf.size()), of))
            continue
        want = mixed(bf.rank(), near.self_weight, near.src_weights, of)
        y = lying(x, mine.choice(["ordinary", "shared"]))
        kept.append(y)
        form = mine.choice(["", "_", "_nonblocking", "_nonblocking_"])
        got = getattr(bf, f"neighbor_allreduce{form}")(y, name=name)
        if "nonblocking" not in form:
            check(got, x, want)
            continue
        pending.append((got, x, want))
        while len(pending) > mine.randrange(4):
            handle, x, want = pending.pop(mine.randrange(len(pending)))
            check(handle.wait(), x, want)
    for handle, x, want in pending:
        check(handle.wait(), x, want)
    return verbs


@pytest.mark.exhaustive
@on("shared_memory-4")
def test_random_verbs_through_ring_buffers(world):
    """Names with signatures that come and go, on graphs that change, with delays."""
    verbs = 320
    assert world.run(soak, verbs, 2026, settings={"timeout": 60}) == [verbs] * world.size


# optimizers

sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
METHODS = ["adapt_with_combine", "adapt_then_combine"]
STEPS = 20


@pytest.fixture(scope="module")
def plain():
    """As many ranks as the test's other world has, which exchange all by MPI."""
    with contextlib.ExitStack() as opened:
        yield functools.cache(lambda size: opened.enter_context(open_transport(f"mpi-{size}")))


@pytest.mark.exhaustive
@NEAR
@pytest.mark.parametrize("schedule", ["ring", "one_peer_exponential"])
@pytest.mark.parametrize("method", METHODS)
def test_optimizers_train_alike_with_and_without_shared_memory(world, plain, method, schedule):
    """Several buckets, twenty steps, the parameters in double precision to 1e-12."""
    graph = getattr(topology, schedule)(world.size)
    options = {"bucket_size_in_mb": 1e-4}
    got = world.run(train_here, method, graph, sgd, STEPS, **options)
    want = plain(world.size).run(train_here, method, graph, sgd, STEPS, **options)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def outlives(method):
    """Train, leave the world, and go on with the model alone."""
    model = mlp(bf.rank())
    optimizer = bf.DistributedOptimizer(
        sgd(model.parameters()), model, method, bucket_size_in_mb=1e-4, broadcast=False
    )
    for step in range(8):
        optimizer.zero_grad()
        square_loss(model, batch(bf.rank(), step)).backward()
        optimizer.step()
    arena = bf.current().transport.shared_memory_group.arena
    places = [arena.locate(parameter.detach()) for parameter in model.parameters()]
    assert None not in places
    engine = bf.current().engine.matcher.channels
    assert any(channel.send_ring is not None for named in engine._by_name.values()
               for channel in named.values())  # fmt: skip
    before = vector(model)
    bf.shutdown()
    assert arena.locate(next(iter(model.parameters())).detach()) is None
    assert torch.equal(vector(model), before)
    plain = sgd(model.parameters())
    loss = square_loss(model, batch(0, 0))
    loss.backward()
    plain.step()
    assert not torch.equal(vector(model), before)
    return bool(vector(model).isfinite().all())


@NEAR
@pytest.mark.parametrize("method", METHODS)
def test_parameters_live_in_shared_memory_and_outlive_the_world(world, method):
    """After shutdown() parameters are ordinary tensors of the same values."""
    assert all(world.run(outlives, method))


def two_worlds():
    """A tensor of an earlier world is an ordinary one in the next."""
    x = bf.empty_shared((5,)).fill_(float(bf.rank()))
    for _ in range(4):
        bf.neighbor_allreduce_(x, name="x")
    bf.shutdown()
    bf.init(transport="shared_memory")
    assert bf.current().transport.shared_memory_group.arena.locate(x) is None
    y = bf.empty_shared((5,))
    for _ in range(4):
        y.fill_(float(bf.rank()))
        x.fill_(float(bf.rank()))
        assert torch.equal(bf.neighbor_allreduce_(x, name="x"), bf.neighbor_allreduce(y, name="y"))
    return True


@NEAR
def test_a_second_world_after_the_first(world):
    """A shared tensor of the first world averages as an ordinary one in the second."""
    assert all(world.run(two_worlds))
