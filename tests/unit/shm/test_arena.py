"""The arena of shared memory: allocated, located, opened by other ranks, freed and reused."""

from __future__ import annotations

import gc
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from asyncddp.shm import arena as shared
from asyncddp.shm.arena import Arena, SharedMemoryHandle
from tests.support import RUN_LIMIT
from tests.support.processes import warm_server


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()


def files():
    """Descriptors of this process that show a chunk."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:  # that of the listing itself
            continue
    return [target for target in found if "memfd:asyncddp" in target]


def test_a_tensor_is_found_again_and_its_parts_as_well(arena):
    """Where it lies is told by an offset into its chunk, in bytes."""
    x = arena.empty((10, 3), torch.float64)
    place = arena.locate(x)
    assert place is not None
    assert place.offset == 0
    assert place.size % mmap.PAGESIZE == 0
    assert arena.locate(x[2:5]) == SharedMemoryHandle(place.descriptor, place.size, 48)
    assert arena.locate(x.detach().view(-1)[29:]) == SharedMemoryHandle(
        place.descriptor, place.size, 232
    )


def test_other_memory_is_not_found(arena):
    """``locate`` knows tensors of its own arena alone; each has an offset of its own."""
    assert arena.locate(torch.empty(5)) is None
    tensors = [arena.empty((100,), torch.float32) for _ in range(3)]
    assert arena.locate(torch.empty(5)) is None
    assert arena.locate(Arena().empty((4,), torch.float32)) is None
    assert len({arena.locate(tensor).offset for tensor in tensors}) == 3
    assert len({arena.locate(tensor).descriptor for tensor in tensors}) == 1, "they share a file"


def test_what_is_written_is_seen_through_the_place(arena):
    """Opening a place of one's own goes the way that a peer goes, through the list of processes."""
    x = arena.empty((5,), torch.int32).copy_(torch.arange(5))
    place = arena.locate(x[1:])
    view = arena.open(os.getpid(), place)
    seen = view.tensor(place.offset, (4,), torch.int32)
    assert seen.tolist() == [1, 2, 3, 4]
    x += 10
    assert seen.tolist() == [11, 12, 13, 14]
    seen[0] = 0
    assert x.tolist() == [10, 0, 12, 13, 14]
    assert arena.open(os.getpid(), place) is view, "mapped twice"


CHILD = """
import sys, torch
from asyncddp.shm.arena import Arena, SharedMemoryHandle
place = SharedMemoryHandle(*map(int, sys.argv[2:5]))
view = Arena().open(int(sys.argv[1]), place)
x = view.tensor(place.offset, (3,), torch.float32)
print(x.tolist())
x.mul_(2)
"""


@pytest.mark.launches
def test_another_process_reads_and_writes_it(arena):
    """Another process that opens a handle sees the tensor's values and changes them."""
    x = arena.empty((4,), torch.float32).copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    place = arena.locate(x[1:])
    command = [warm_server().python, "-c", CHILD, *map(str, (os.getpid(), *place))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_LIMIT)
    assert done.stdout == "[1.0, 2.0, 3.0]\n"
    assert x.tolist() == [0.0, 2.0, 4.0, 6.0]


@pytest.mark.launches
def test_a_process_that_is_gone_is_an_error(arena):
    """Opening a handle of an ended process, or a wrong descriptor, raises OSError."""
    place = arena.locate(arena.empty((4,), torch.float32))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(30)
    with pytest.raises(OSError, match="No such file"):
        arena.open(ended.pid, place)
    with pytest.raises(OSError, match="No such file"):
        arena.open(os.getpid(), SharedMemoryHandle(9_999, place.size, 0))


def test_shapes_and_dtypes_of_any_kind(arena):
    """A tensor has the shape and dtype asked for, is contiguous and aligned to 64 bytes."""
    for shape in [(), (0,), (2, 0), (1,), (3, 5)]:
        for dtype in (torch.bool, torch.bfloat16, torch.complex128, torch.int8):
            x = arena.empty(shape, dtype)
            assert (tuple(x.shape), x.dtype, x.is_contiguous()) == (shape, dtype, True)
            assert x.data_ptr() % 64 == 0 or not x.numel()
            assert torch.equal(x.zero_(), torch.zeros(shape, dtype=dtype))


# recycling


def test_memory_is_reused_when_the_last_view_is_gone(arena):
    """Memory is reused once the last view of it is gone, and not while one is left."""
    x = arena.empty((1000,), torch.float32)
    address, view = x.data_ptr(), x[10:20].view(2, 5)
    del x
    gc.collect()
    other = arena.empty((1000,), torch.float32)
    assert other.data_ptr() != address, "allocated twice"
    del view
    gc.collect()
    assert arena.empty((1000,), torch.float32).data_ptr() == address


@pytest.mark.parametrize("derive", [torch.Tensor.numpy, lambda x: x.view(torch.int32), torch.split])
def test_whatever_is_derived_of_a_tensor_keeps_its_memory(arena, derive):
    """A NumPy array, a view in another dtype or a split keeps the memory from reuse."""
    x = arena.empty((1000,), torch.float32)
    address = x.data_ptr()
    kept = derive(x, 100) if derive is torch.split else derive(x)
    del x
    gc.collect()
    assert arena.empty((1000,), torch.float32).data_ptr() != address
    assert len(kept) > 0


def test_memory_is_reused_for_any_size(arena):
    """A process has few files, whatever the sizes of the tensors that it makes and drops."""
    before = len(files())
    for size in range(1, 1 << 22, 10_007):
        arena.empty((size,), torch.uint8)
    assert len(files()) <= before + 2, "the chunk's own, and that of its mapping"


def test_what_waits_gives_its_pages_back_beyond_a_limit():
    """The bytes read as zero afterwards, and the memory is reused all the same."""
    arena = Arena(limit=3 << 20)
    tensors = [arena.empty((1 << 20,), torch.uint8).fill_(7) for _ in range(4)]
    addresses = {tensor.data_ptr() for tensor in tensors}
    descriptor = arena.locate(tensors[0]).descriptor % (1 << shared._FILE_BITS)
    assert os.fstat(descriptor).st_blocks * 512 == 4 << 20
    while len(tensors) > 1:
        tensors.pop()
    assert os.fstat(descriptor).st_blocks * 512 == 4 << 20, "below the limit pages stay"
    tensors.clear()
    assert os.fstat(descriptor).st_blocks == 0
    again = [arena.empty((1 << 20,), torch.uint8) for _ in range(4)]
    assert {tensor.data_ptr() for tensor in again} == addresses
    assert not any(tensor.any() for tensor in again)
    arena.close()


def test_pages_beside_what_is_free_stay(arena):
    """A part of a page is never given back, since something else may lie on it."""
    small = Arena(limit=0)
    kept, dropped = small.empty((64,), torch.uint8).fill_(5), small.empty((64,), torch.uint8)
    del dropped
    assert kept.unique().tolist() == [5]
    small.close()


def test_tensors_that_threads_make_and_drop_never_share_memory(arena):
    """Finalizers run in whichever thread drops the last reference."""
    problems = []

    def loop(mark):
        for _ in range(300):
            one = arena.empty((64,), torch.float32).fill_(mark)
            two = arena.empty((64,), torch.float32).fill_(-mark)
            if one.tolist() != [mark] * 64 or two.tolist() != [-mark] * 64:
                problems.append(mark)

    threads = [threading.Thread(target=loop, args=(float(k),)) for k in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(arena._chunks) == 1, "what was dropped was not reused"


# what is taken without a tensor


def test_bytes_are_aligned_and_apart_and_zero_as_far_as_asked(arena):
    """Many small ones share a chunk; one that is larger than a chunk gets its own."""
    taken = [arena.take(size) for size in (1, 64, 65, 1000)]
    assert len({block.chunk.descriptor for block in taken}) == 1
    assert all(block.offset % 64 == 0 for block in taken)
    large = arena.take((1 << 26) + 1)
    assert large.offset == 0
    assert large.chunk is not taken[0].chunk
    assert large.chunk.size >= (1 << 26) + 1
    block = taken[3]
    block.chunk.memory[block.offset : block.offset + 1000] = 7
    arena.give(block)
    again = arena.take(1000, zeroed=512)
    assert (again.chunk, again.offset) == (block.chunk, block.offset)
    assert not again.chunk.memory[again.offset : again.offset + 512].any()
    assert shared.handle_of_block(again) == SharedMemoryHandle(
        again.chunk.descriptor, again.chunk.size, again.offset
    )


def test_words_are_whole_numbers_of_64_bits(arena):
    """A word of a chunk holds an unsigned number of 64 bits; a larger one is an error."""
    block = arena.take(64)
    chunk, offset = block.chunk, block.offset
    words = chunk.words(offset, 8)
    words[3] = (1 << 64) - 1
    assert chunk.memory[offset + 24 : offset + 32].tolist() == [255] * 8
    with pytest.raises(ValueError, match="invalid value"):
        words[3] = 1 << 64


# the end


def test_tensors_outlive_their_arena():
    """They keep their memory, and nothing of it is reused or located any more."""
    arena = Arena()
    x = arena.empty((1000,), torch.float32).fill_(3.0)
    arena.close()
    assert arena.locate(x) is None
    assert x.sum().item() == 3000.0
    x.add_(1.0)
    assert x[999].item() == 4.0
    del x
    gc.collect()
    arena.close()  # again, which is harmless


def test_a_closed_arena_holds_files_for_tensors_in_use_only():
    """Closing an arena closes all files but those mapped for tensors that are in use."""
    gc.collect()
    before = len(files())
    arena = Arena()
    tensors = [arena.empty(((k << 24) + 1,), torch.float32) for k in range(3)]
    arena.take(64)
    assert len(files()) > before + 3
    arena.close()
    assert len(files()) <= before + 3, "only the mappings of the tensors are left"
    tensors.clear()
    gc.collect()
    assert len(files()) == before


def test_memory_of_a_closed_arena_is_freed_with_its_tensors():
    """Each chunk of a closed arena is unmapped when the last tensor in it is gone."""

    def mapped():
        return Path("/proc/self/maps").read_text().count("memfd:asyncddp")

    gc.collect()
    before = mapped()
    arena = Arena()
    tensors = [arena.empty(((k << 24) + 1,), torch.float32) for k in range(3)]
    assert mapped() == before + 3
    arena.close()
    del arena
    gc.collect()
    tensors.pop()
    gc.collect()
    assert mapped() == before + 2
    tensors.clear()
    gc.collect()
    assert mapped() == before


def named():
    """What this process has mapped of /dev/shm: an MPI library, once started, has its own there."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if "/dev/shm/" in line}


def test_nothing_is_left_in_the_file_system():
    """A chunk has no name anywhere, whatever the temporary folders."""
    before = named()
    arena = Arena()
    tensors = [arena.empty((100_000,), torch.float32).fill_(1.0) for _ in range(3)]
    assert named() == before
    assert not list(Path("/dev/shm").glob("*asyncddp*"))
    assert all("(deleted)" in target for target in files())
    arena.close()
    assert len(tensors) == 3


ENDS = """
import os, torch
from asyncddp.shm.arena import Arena
arena = Arena()
x = arena.empty((1000,), torch.float32)
y = arena.empty((1000,), torch.float32)
del y
print("good")
"""


@pytest.mark.launches
def test_a_process_that_ends_with_tensors_in_use_ends_well():
    """Finalizers that run while the interpreter ends do not trip over what is gone by then."""
    done = subprocess.run(
        [sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=RUN_LIMIT
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "good\n", "")


def test_where_no_shared_memory_is_to_be_had_tensors_are_ordinary_ones(arena, monkeypatch):
    """Where memfd_create fails ``empty`` gives private memory, and shared again later."""

    def refuses(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuses)
    assert arena.locate(arena.empty((4,), torch.float32)) is None
    monkeypatch.undo()
    assert arena.locate(arena.empty((4,), torch.float32)) is not None


def test_a_later_file_of_the_same_number_is_another_one(arena):
    """Also where it is of a later process that has the same id."""
    first = shared.OwnedChunk(mmap.PAGESIZE)
    first.memory[:] = 1
    old = SharedMemoryHandle(first.descriptor, first.size, 0)
    assert arena.open(os.getpid(), old).memory[0] == 1
    first.close()
    later = shared.OwnedChunk(mmap.PAGESIZE)
    later.memory[:] = 2
    new = SharedMemoryHandle(later.descriptor, later.size, 0)
    assert later._file == first._file
    assert arena.open(os.getpid(), new).memory[0] == 2
    assert arena.open(os.getpid(), old).memory[0] == 1, "mapped before it was freed"
    other = Arena()
    with pytest.raises(FileNotFoundError, match="has freed that memory"):
        other.open(os.getpid(), old)
    later.close()
