"""Buffers that are used again for the next request of their size, with a bound on what is kept."""

from __future__ import annotations

import pytest

from asyncddp.tensors.free_list import FreeList


@pytest.mark.parametrize(("oldest_first", "order"), [(False, [1, 0]), (True, [0, 1])])
def test_it_keeps_no_more_than_its_limit_and_gives_buffers_in_its_order(oldest_first, order):
    """Buffers beyond the limit are not kept; kept ones come newest or oldest first."""
    free = FreeList(bytearray, limit=10_000, oldest_first=oldest_first)
    buffers = [free.take(4096) for _ in range(3)]
    assert [free.give(buffer, 4096) for buffer in buffers] == [True, True, False]
    assert free.free_bytes == 8192
    again = [free.take(4096) for _ in range(2)]
    assert all(buffer is buffers[number] for buffer, number in zip(again, order, strict=True))
    assert (free.free_bytes, free.num_allocated) == (0, 3)


def test_buffers_are_found_by_their_size():
    """A free buffer serves requests of exactly its own size."""
    free = FreeList(bytearray)
    buffer = free.take(64)
    free.give(buffer, 64)
    assert len(free.take(128)) == 128
    assert free.take(64) is buffer


def test_what_was_free_is_dropped_at_the_end():
    """``clear`` drops every free buffer, and the next request gets a new one."""
    free = FreeList(bytearray)
    buffer = free.take(64)
    free.give(buffer, 64)
    free.clear()
    assert free.free_bytes == 0
    assert free.take(64) is not buffer
