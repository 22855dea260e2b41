"""Buddy allocation: blocks never overlap, free halves are one block again, pages have a bound."""

from __future__ import annotations

import copy
import itertools
import random
import threading

import pytest

from asyncddp.shm.buddy_allocator import AllocatedBlock, BuddyAllocator

CHUNK = 1 << 16


class Memory:
    """Chunks that note which of their parts were given back to the system."""

    def __init__(self, limit=1 << 40):
        self.released = []
        self.takes_pages = True
        self.blocks = BuddyAllocator(bytearray, self._release, chunk=CHUNK, limit=limit)

    def _release(self, chunk, offset, size):
        self.released.append((offset, size))
        return self.takes_pages


def test_blocks_in_use_never_overlap():
    """Whatever is taken and given back in whatever order."""
    blocks, live, chosen = Memory().blocks, [], random.Random(0)
    for _ in range(3000):
        if live and chosen.random() < 0.5:
            blocks.give(live.pop(chosen.randrange(len(live))))
        else:
            size = chosen.randrange(1, 1 << chosen.randrange(4, 18))
            live.append(blocks.take(size))
            assert live[-1].size >= size
            assert live[-1].offset % live[-1].size == 0
        spans = sorted((one.number, one.offset, one.offset + one.size) for one in live)
        for (number, _, end), (other, start, _) in itertools.pairwise(spans):
            assert number < other or end <= start
    for block in live:
        blocks.give(block)
    chunks = len(blocks.chunks)
    whole = [blocks.take(len(chunk)) for chunk in sorted(blocks.chunks, key=len, reverse=True)]
    assert len(blocks.chunks) == chunks == len({one.number for one in whole}), "all were joined"


def test_memory_that_was_taken_in_one_size_serves_every_other():
    """Blocks of any size, taken one after another, are served from a single chunk."""
    blocks = Memory().blocks
    for size in (*range(64, CHUNK, 700), *range(CHUNK, 0, -900)):
        blocks.give(blocks.take(size))
    assert len(blocks.chunks) == 1


def test_what_fits_no_chunk_gets_one_of_its_own():
    """A block larger than a chunk gets a chunk of the next power of two for itself."""
    blocks = Memory().blocks
    block = blocks.take(CHUNK + 1)
    assert (block.offset, len(block.chunk)) == (0, 2 * CHUNK)
    assert blocks.take(CHUNK).chunk is not block.chunk


def test_a_block_of_the_same_size_is_the_one_that_was_free_last():
    """Its pages are there, and in the cache."""
    blocks = Memory().blocks
    first, second = blocks.take(1000), blocks.take(1000)
    blocks.give(second)
    blocks.give(first)
    assert blocks.take(900).offset == first.offset


def test_free_memory_beyond_the_limit_gives_its_pages_back():
    """Free blocks keep their pages up to the limit, past which all are released."""
    memory = Memory(limit=3 * 8192)
    taken = [memory.blocks.take(8000) for _ in range(4)]
    for block in taken[:3]:
        memory.blocks.give(block)
    assert (memory.blocks.free_bytes, memory.released) == (24000, [])
    memory.blocks.give(taken[3])
    assert memory.blocks.free_bytes == 0
    covered = sum(size for _, size in memory.released)
    assert covered >= 4 * 8192
    memory.released.clear()
    memory.blocks.give(memory.blocks.take(100))
    assert (memory.blocks.free_bytes, memory.released) == (100, [])


def test_pages_are_counted_up_to_where_something_was_written():
    """Of a block that is divided or joined again as well."""
    blocks = Memory().blocks
    large = blocks.take(CHUNK)
    large.used = CHUNK // 2 + 100
    blocks.give(large)
    low, high = blocks.take(CHUNK // 2), blocks.take(CHUNK // 2)
    assert {low.used, high.used} == {CHUNK // 2}
    assert blocks.free_bytes == 0
    blocks.give(low)
    assert blocks.free_bytes == CHUNK // 2
    blocks.give(high)
    assert blocks.free_bytes == CHUNK


def test_after_the_end_nothing_comes_back():
    """A block that is given back after ``clear`` is dropped with its chunk."""
    blocks = Memory().blocks
    block = blocks.take(64)
    blocks.clear()
    blocks.give(block)
    assert blocks.free_bytes == 0
    assert blocks.take(64).chunk is not block.chunk


def test_a_finalizer_may_give_back_while_memory_is_being_taken():
    """It runs on whichever thread drops the last reference, also on one that holds the lock."""
    given: list[AllocatedBlock] = []
    made = []

    def make(size):
        made.append(size)
        while given:
            blocks.give(given.pop())
        return bytearray(size)

    blocks = BuddyAllocator(make, lambda *_: True, chunk=CHUNK, limit=1 << 40)
    given.append(blocks.take(CHUNK))
    blocks.take(CHUNK)
    assert len(made) == 2
    blocks.take(CHUNK)
    assert len(made) == 2, "what came back in the middle was not found"


def test_an_error_of_the_system_leaves_everything_as_it_was():
    """After a failed allocation chunks and free bytes are as before, and blocks are served."""

    def make(size):
        if size > CHUNK:
            raise OSError(24, "Too many open files")
        return bytearray(size)

    blocks = BuddyAllocator(make, lambda *_: True, chunk=CHUNK, limit=1 << 40)
    for taken in (0, 1):
        before = list(blocks.chunks), blocks.free_bytes, copy.deepcopy(blocks._free)
        assert len(blocks.chunks) == taken
        with pytest.raises(OSError, match="Too many open files"):
            blocks.take(CHUNK + 1)
        assert (blocks.chunks, blocks.free_bytes, blocks._free) == before
        if not taken:
            first = blocks.take(100)
            blocks.give(blocks.take(200))
    assert (first.number, first.offset) == (0, 0)
    assert blocks.free_bytes == 200
    blocks.give(first)
    assert blocks.take(CHUNK).number == 0


def test_threads_share_blocks_without_sharing_bytes():
    """Blocks that threads hold at the same time never overlap."""
    blocks, wrong = Memory().blocks, []

    def work(mark):
        for size in range(64, 2064, 10):
            block = blocks.take(size)
            view = memoryview(block.chunk)[block.offset : block.offset + block.size]
            view[:] = bytes([mark]) * block.size
            if bytes(view) != bytes([mark]) * block.size:
                wrong.append(mark)
            blocks.give(block)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
