"""Room for what is published: found again, shared in chunks, given back."""

from __future__ import annotations

import pytest
import torch

from asyncddp.shm.arena import Arena
from asyncddp.windows.staging import BufferPool
from tests.unit.shm.test_arena import files

SMALL, LARGE = (100,), (5_000_000,)


class Busy:
    """An edge that reads what it is told to."""

    def __init__(self):
        self.buffers = []

    def in_use(self):
        return iter(self.buffers)


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()


@pytest.mark.parametrize("shape", [SMALL, LARGE, ()])
def test_a_buffer_is_used_again_once_nobody_needs_it(arena, shape):
    """A buffer is reused once it is neither held nor in use by an edge."""
    pool, edge = BufferPool(arena, shape, torch.float32), Busy()
    pool.edges = [edge]
    first = pool.acquire_buffer()
    assert pool.acquire_buffer() is not first, "it is held"
    edge.buffers = [first]
    first.drop()
    pool.buffers[1].drop()
    assert pool.acquire_buffer() is pool.buffers[1], "the first one is being read"
    edge.buffers = []
    assert pool.acquire_buffer() is first
    assert len(pool.buffers) == 2
    assert arena.locate(first.tensor) == first.place


def test_small_tensors_share_an_open_file(arena):
    """A model may have hundreds of windows, and a process about a thousand files."""
    before = len(files())
    pools = [BufferPool(arena, SMALL, torch.float32) for _ in range(200)]
    rooms = [pool.acquire_buffer() for pool in pools for _ in range(3)]
    assert len(files()) <= before + 2, "the chunk's own, and that of its mapping"
    assert len({room.tensor.data_ptr() for room in rooms}) == 600


def test_memory_is_given_back_when_a_pool_is_closed(arena):
    """The memory of a closed pool serves the next pool of that shape."""
    for shape in (SMALL, LARGE):
        places = set()
        for _ in range(5):
            pool = BufferPool(arena, shape, torch.float32)
            buffer = pool.acquire_buffer()
            places.add(buffer.place)
            buffer.drop()
            del buffer
            pool.close()
            del pool
        assert len(places) == 1, shape


def test_what_is_still_held_is_not_given_back(arena):
    """Closing a pool frees its buffers but those that are still held."""
    pool = BufferPool(arena, SMALL, torch.float32)
    held, other = pool.acquire_buffer(), pool.acquire_buffer()
    free = other.place
    del other
    pool.close()
    pool = BufferPool(arena, SMALL, torch.float32)
    places = {pool.acquire_buffer().place, pool.acquire_buffer().place}
    assert free in places
    assert held.place not in places


def test_without_peers_on_this_machine_memory_is_ordinary():
    """A pool without an arena gives private tensors, which have no handle."""
    pool = BufferPool(None, SMALL, torch.float16)
    assert pool.acquire_buffer().place is None
    assert pool.acquire_buffer().tensor.dtype == torch.float16


def test_no_more_shared_memory_is_an_error(arena, monkeypatch):
    """A buffer that cannot be had in shared memory raises OSError that says so."""
    monkeypatch.setattr(arena, "empty", lambda shape, dtype: torch.empty(shape, dtype=dtype))
    pool = BufferPool(arena, LARGE, torch.float32)
    with pytest.raises(OSError, match="no more memory can be shared with the ranks of this mach"):
        pool.acquire_buffer()
