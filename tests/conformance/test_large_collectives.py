"""Collectives of large tensors among ranks that share memory: sizes, late ranks, failures."""

from __future__ import annotations

import math
import time
import weakref
from typing import Any

import pytest
import torch

import asyncddp as bf
from asyncddp.errors import PeerError
from tests.support import FileEvent, World, on
from tests.support.loops import on_each_rank

SHARED = on("shared_memory-4")
LATE = 0.3  # seconds: the engine has taken over by then
PIECE, COPY = 1 << 17, 1 << 20  # numbers in a piece of a sum, and in one of a copy
LARGE = COPY // 2 + 1  # more than slots take
COUNTS = (16_500, PIECE - 1, PIECE + 1, 4 * PIECE + 5, COPY, COPY + 3, 9 * PIECE)


def numbers(count: int, rank: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32).remainder_(1000).mul_(rank + 1)


def gathered(count: int, ranks: int) -> torch.Tensor:
    return torch.cat([numbers(count - rank, rank) for rank in range(ranks)])


def all_verbs(count: int) -> None:
    """Check each verb on this rank, blocking and not, in turn."""
    rank, ranks = bf.rank(), bf.size()
    x, mean, root = numbers(count, rank), numbers(count, 0) * ((ranks + 1) / 2), ranks - 1
    for _ in range(2):
        torch.testing.assert_close(bf.allreduce(x), mean)
        copy = bf.broadcast(x, root)
        assert torch.equal(copy, numbers(count, root))
        assert copy.data_ptr() != x.data_ptr()
        copy.zero_()
        assert torch.equal(x, numbers(count, rank))
        out = torch.empty_like(x)
        assert bf.broadcast(x, root, out=out) is out
        assert torch.equal(out, numbers(count, root))
        place = x.clone()
        assert bf.broadcast_(place, 0) is place
        assert torch.equal(place, numbers(count, 0))
        assert torch.equal(bf.allgather(x[: count - rank]), gathered(count, ranks))
        part = bf.reduce_scatter(x.repeat(ranks).view(ranks, -1))
        torch.testing.assert_close(part[0], mean)
    handles = [
        bf.allgather_nonblocking(x[: count - rank]),
        bf.broadcast_nonblocking(x, root),
        bf.allreduce_nonblocking(x),
    ]
    assert torch.equal(handles[0].wait(), gathered(count, ranks))
    assert torch.equal(handles[1].wait(), numbers(count, root))
    torch.testing.assert_close(handles[2].wait(), mean)


@SHARED
@pytest.mark.parametrize("count", COUNTS)
def test_collectives_of_large_tensors(world: World, count: int) -> None:
    """Right at sizes around those of pieces, one after the other, whatever else is used."""
    world.run(all_verbs, count)


def reads_memory() -> bool:
    transport: Any = bf.current().transport
    return bool(transport._shared.reads_private_memory)


def all_verbs_by_messages(count: int) -> None:
    transport: Any = bf.current().transport
    buffers = transport._shared
    able, buffers.reads_private_memory = buffers.reads_private_memory, False
    try:
        all_verbs(count)
    finally:
        buffers.reads_private_memory = able


@SHARED
def test_systems_that_let_no_process_read_anothers_memory(world: World) -> None:
    """Copies go by messages there."""
    world.run(all_verbs_by_messages, PIECE + 1)


@SHARED
@on_each_rank
def test_ranks_that_give_no_rows_and_rows_without_numbers() -> None:
    """Lengths differ, to 0, and dtypes are those that cannot be added, too."""
    rank, ranks = bf.rank(), bf.size()
    none = bf.allgather(torch.ones(200_000 * (rank == 1), 3))
    assert none.shape == (200_000, 3)
    assert bool((none == 1).all())
    assert bf.allgather(torch.ones(50_000 * rank, 0)).shape == (50_000 * math.comb(ranks, 2), 0)
    flags = bf.allgather(torch.full((100_000,), rank == 0))
    assert int(flags.sum()) == 100_000
    assert bool(flags[:100_000].all())


@SHARED
@on_each_rank
def test_lists_of_large_tensors_and_what_is_kept_of_them() -> None:
    """Lists are right in repeated calls, and what is remembered of a call keeps no tensor alive."""
    rank, ranks = bf.rank(), bf.size()
    for count in (LARGE, LARGE, LARGE + 1):  # the second goes the way of the first
        given = [numbers(count, rank), numbers(20_000, rank).view(100, -1)]
        mixed = {"a": given[0], "b": given[1].double()}
        mean = [numbers(one.numel(), 0).view(one.shape) * ((ranks + 1) / 2) for one in given]
        for found in (bf.allreduce(given), list(bf.allreduce(mixed).values())):
            torch.testing.assert_close(found, mean, check_dtype=False)
        last = bf.broadcast(given, ranks - 1)
        assert torch.equal(last[0], numbers(count, ranks - 1))
        every = bf.allgather(given)
        assert torch.equal(every[0], torch.cat([numbers(count, peer) for peer in range(ranks)]))
        assert every[1].shape == (100 * ranks, 200)
    x = numbers(LARGE, rank)
    bf.barrier()
    alive, total = weakref.ref(x), bf.allreduce(x)
    weak = weakref.ref(total)
    bf.broadcast(x, 0)
    bf.allgather(x)
    bf.reduce_scatter(x[:-1])
    del x, total
    assert alive() is None
    assert weak() is None


@SHARED
@on_each_rank
def test_the_engine_takes_over_large_tensors_where_a_rank_is_late() -> None:
    """Whoever it is."""
    rank, ranks = bf.rank(), bf.size()
    x = numbers(LARGE, rank)
    for late in range(ranks):
        for verb in (
            lambda: bf.allreduce(x)[-1].item() == x[-1].item() / (rank + 1) * (ranks + 1) / 2,
            lambda: bf.allgather(x).numel() == ranks * x.numel(),
            lambda: torch.equal(bf.broadcast(x, 0), numbers(LARGE, 0)),
        ):
            if rank == late:
                time.sleep(LATE)
            assert verb()


def different(kind: int) -> None:
    last = bf.rank() == bf.size() - 1
    if last:
        time.sleep(LATE * (kind % 2))  # the others wait on their threads, or by the engine
    x = torch.ones(300_000 + last, 2)
    if kind < 2:
        bf.allreduce(x)
    elif last:
        bf.allgather(x)
    else:
        bf.broadcast(x, 0)


@SHARED
@pytest.mark.parametrize("kind", range(4))
def test_large_tensors_that_do_not_fit_together(world: World, kind: int) -> None:
    """Both signatures are named, and all ranks raise."""
    found = world.outcomes(different, kind)
    assert {one.error for one in found} == {"MismatchError"}, found
    words = " ".join(str(one.message) for one in found)
    assert ("(300000, 2)" if kind < 2 else "broadcast") in words, words
    assert ("(300001, 2)" if kind < 2 else "allgather") in words, words


def gives_up_copies(transport: Any, folder: Any) -> list[str]:
    """Rank 0 gives up a copy of its tensor, which the others then want to read."""
    given_up, x = FileEvent(folder / "given up"), torch.ones(200_000)
    out = torch.zeros(200_000 * transport.size)
    told = []
    if transport.rank == 0:
        for start in (
            lambda: transport.ibroadcast(x, 0),
            lambda: transport.iallgather(x, out, [x.numel()] * transport.size),
        ):
            request = start()
            with pytest.raises(bf.WaitTimeoutError):
                transport.finish(request, 0.1, "copy")
            transport.broken = None  # to begin another one
        x.fill_(7.0)
        given_up.set()
        return told
    given_up.wait()
    with pytest.raises(PeerError) as refused:
        transport.finish(transport.ibroadcast(x, 0), 5.0, "copy")
    assert bool((x == 1.0).all())
    return [str(refused.value)]


@SHARED
def test_a_tensor_that_was_given_up_is_read_no_more(world: World, tmp_path: Any) -> None:
    """Its memory may hold something else by then; ranks that come later raise."""
    if not all(world.run(reads_memory)):
        pytest.skip("this system lets no process read another one's memory")
    _, *later = world.run_bare(gives_up_copies, tmp_path)
    for told in later:
        assert "rank 0 cannot be read: it has given the collective up" in told[0], told


def beyond_what_mpi_counts() -> None:
    """Gather uneven parts, one of them empty, where MPI's limit for all of them is low."""
    from asyncddp.transport.mpi import mpi_collectives

    limit, mpi_collectives._MAX_COUNT = mpi_collectives._MAX_COUNT, 1 << 15
    try:
        for count in (20_000, 3):
            x = numbers(count, bf.rank())[: count * bf.rank()]
            got = bf.allgather(x)
            parts = [numbers(count, rank)[: count * rank] for rank in range(bf.size())]
            assert torch.equal(got, torch.cat(parts))
    finally:
        mpi_collectives._MAX_COUNT = limit


@on("mpi-2")
def test_more_is_gathered_than_mpi_can_count(world: World) -> None:
    """Each rank's part, of more bytes than MPI's integers hold in all, is broadcast."""
    world.run(beyond_what_mpi_counts)
