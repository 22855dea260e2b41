"""Ring buffers: each step is read, whole or by chunks, by those whom it is for, and no other."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncddp.shm.arena import Arena, SharedMemoryHandle
from asyncddp.shm.chunk_layout import ChunkLayout
from asyncddp.shm.ring_buffer import (
    ReceiveRingBuffer,
    SendRingBuffer,
    pack_progress,
    unpack_chunks,
    unpack_step,
)

SMALL = ChunkLayout.of((3,), torch.float32)
LONG = ChunkLayout((10,), torch.float32, numel=10, chunk_numel=2, num_chunks=5, num_slots=2)
"""As :class:`ChunkLayout` makes them of large tensors, but of two elements a chunk."""


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()


def rings_of(arena, layout, ranks=(0, 1, 2)):
    """A send ring, and the receive ring of each of the ranks."""
    send_ring = SendRingBuffer(arena, ranks, layout)
    view = arena.open(os.getpid(), send_ring.handle)
    return send_ring, {
        rank: ReceiveRingBuffer(view, send_ring.handle.offset, ranks, rank, layout)
        for rank in ranks
    }


# progress words


@given(st.tuples(st.integers(0, 2**38), st.integers(0, 2**24 - 1)), st.data())
def test_a_progress_word_holds_a_step_and_chunks_and_only_grows(pair, data):
    """Later steps, and more chunks of the same one, are larger numbers of 64 bits."""
    step, chunks = pair
    value = pack_progress(step, chunks)
    assert (unpack_step(value), unpack_chunks(value)) == pair
    assert 0 < value < 1 << 64
    other = data.draw(st.tuples(st.integers(0, 2**38), st.integers(0, 2**24 - 1)))
    assert (pack_progress(*other) < value) == (other < pair)


def test_memory_that_was_never_written_is_before_every_step():
    """A zero word means step -1 and no chunks, and is less than the word of any step."""
    assert unpack_step(0) == -1
    assert unpack_chunks(0) == 0
    assert pack_progress(0, 0) > 0


# layouts

KIB, MIB = 1 << 10, 1 << 20
CHUNK_BYTES = [  # bytes of a tensor, and of its chunks
    (MIB, MIB, True),
    (MIB + 8, MIB + 8, False),
    (4 * MIB, 4 * MIB, False),
    (4 * MIB + 8, 512 * KIB, False),
    (64 * MIB, 512 * KIB, False),
]


@pytest.mark.parametrize(("size", "chunk", "doubled"), CHUNK_BYTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float64], ids=str)
def test_chunks_cover_a_tensor_and_none_is_empty(size, chunk, doubled, dtype):
    """All but the last are of one size, which depends on the tensor's bytes alone."""
    count = size // dtype.itemsize
    layout = ChunkLayout.of((count,), dtype)
    assert layout.chunk_numel * dtype.itemsize == chunk
    assert (
        (layout.num_chunks - 1) * layout.chunk_numel
        < layout.numel
        == count
        <= layout.num_chunks * layout.chunk_numel
    )
    assert layout.num_slots == min(layout.num_chunks, 16)
    assert layout.doubled is doubled


@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("chunks", [9, 10, 12, 13])
def test_a_layout_splits_as_its_chunks_lie(around, chunks):
    """The chunks of a layout, joined in order, are the tensor, and are as many as it says."""
    count = chunks * 131072 + around
    layout, flat = ChunkLayout.of((count,), torch.float32), torch.arange(count)
    parts = layout.split(flat)
    assert len(parts) == layout.num_chunks == chunks + (around > 0)
    assert torch.equal(torch.cat(parts), flat)
    for number, part in enumerate(parts):
        assert torch.equal(layout.chunk(flat, number), part)


def test_scalars_and_tensors_left_whole_are_one_chunk():
    """A scalar is one chunk, and so is a tensor of any size by ``ChunkLayout.single``."""
    assert ChunkLayout.of((), torch.float64) == ChunkLayout((), torch.float64, 1, 1, 1, 1)
    whole = ChunkLayout.single((3, 1 << 22), torch.float32)
    assert (whole.num_chunks, whole.chunk_numel) == (1, 3 << 22)


# published and acknowledged


def test_a_sender_tells_in_how_many_slots_a_tensor_goes_round(arena):
    """It tries few and many, and goes on with those into which it copies faster."""
    layout = ChunkLayout((40,), torch.float32, 40, 2, 20, 16, doubled=False)
    send_ring, receive_ring = rings_of(arena, layout)
    seen = []
    for step in range(12):
        tensor = torch.full((40,), float(step))
        send_ring.begin(step, (1,))
        seen.append(send_ring.cycle)
        for number in range(20):
            if number >= send_ring.cycle:
                assert not send_ring.pending_readers(step, number - send_ring.cycle + 1)
            send_ring.send_chunk(step, number, layout.chunk(tensor, number))
            assert torch.equal(receive_ring[1].slot(step, number), tensor[:2])
            receive_ring[1].acknowledge(step, number + 1)
        slot = receive_ring[1].slot(step, 0).data_ptr()
        assert slot == receive_ring[1].slot(step, send_ring.cycle).data_ptr()
    assert seen[:6] == [4, 16] * 3
    assert seen[6:] in ([4] * 6, [16] * 6)


def test_a_large_tensor_has_one_set_of_slots_for_all_steps(arena):
    """There is room for a step once all readers have read all of the one before it."""
    layout = ChunkLayout((10,), torch.float32, 10, 10, 1, 1, doubled=False)
    send_ring, receive_ring = rings_of(arena, layout)
    tensors = [torch.full((10,), float(step)) for step in range(6)]
    for step, tensor in enumerate(tensors):
        readers = (1, 2) if step % 2 else (1,)
        assert send_ring.try_send(step, readers, tensor)
        assert not send_ring.has_room(step + 1)
        assert not send_ring.try_send(step + 1, (1,), tensors[0])
        assert send_ring.pending_readers(step + 1, 0) == [(rank, step) for rank in readers]
        for rank in readers:
            assert torch.equal(receive_ring[rank].read_whole(step), tensor)
            receive_ring[rank].acknowledge(step, 1)
        assert send_ring.pending_readers(step + 1, 0) == []
        assert send_ring.has_room(step + 1)


def test_a_step_is_published_by_chunks_through_slots_that_are_reused(arena):
    """A slot is free for a chunk once all readers have acknowledged the one that it held."""
    send_ring, receive_ring = rings_of(arena, LONG)
    flat = torch.arange(10, dtype=torch.float32)
    send_ring.begin(0, (1, 2))
    for number in range(5):
        assert receive_ring[1].published(0) == number
        goal = number - LONG.num_slots + 1
        if goal > 0:
            assert send_ring.pending_readers(0, goal) == [(1, 0), (2, 0)]
            for rank in (1, 2):
                receive_ring[rank].acknowledge(0, goal)
            assert send_ring.pending_readers(0, goal) == []
        send_ring.slot(0, number).copy_(LONG.chunk(flat, number))
        send_ring.publish(0, number + 1)
        assert torch.equal(receive_ring[2].slot(0, number), LONG.chunk(flat, number))
    assert send_ring.pending_readers(0, 5) == [(1, 0), (2, 0)]
    receive_ring[1].acknowledge(0, 5)
    assert send_ring.pending_readers(0, 5) == [(2, 0)]


def test_the_last_chunk_may_be_short(arena):
    """Where the length is no multiple of the chunk's, the last slot has what is left."""
    layout = ChunkLayout((7,), torch.float32, numel=7, chunk_numel=3, num_chunks=3, num_slots=3)
    send_ring, receive_ring = rings_of(arena, layout)
    for step in (0, 1):
        send_ring.begin(step, (1,))
    assert [send_ring.slot(0, number).numel() for number in range(3)] == [3, 3, 1]
    assert [receive_ring[1].slot(1, number).numel() for number in range(3)] == [3, 3, 1]


def test_two_steps_lie_apart_and_a_third_waits(arena):
    """A rank may be one step ahead of its readers, and no more."""
    send_ring, receive_ring = rings_of(arena, SMALL)
    for step in (0, 1):
        assert send_ring.has_room(step)
        assert send_ring.try_send(step, (1,), torch.full((3,), float(step)))
    assert not send_ring.has_room(2)
    assert not send_ring.try_send(2, (1,), torch.full((3,), 2.0))
    assert [receive_ring[1].read_whole(step).tolist() for step in (0, 1)] == [[0.0] * 3, [1.0] * 3]
    assert send_ring.pending_readers(2, 1) == [(1, 0)]
    receive_ring[1].acknowledge(0, 1)
    assert send_ring.has_room(2)
    assert not send_ring.has_room(3)
    assert send_ring.try_send(2, (1,), torch.full((3,), 2.0))
    assert receive_ring[1].read_whole(0) is None
    assert receive_ring[1].read_whole(2).tolist() == [2.0] * 3
    assert receive_ring[1].read_whole(1).tolist() == [1.0] * 3


def test_who_acknowledged_a_later_step_acknowledged_the_earlier_ones(arena):
    """Acknowledging a later step frees the slots of earlier ones as well."""
    send_ring, receive_ring = rings_of(arena, SMALL)
    send_ring.try_send(0, (1,), torch.zeros(3))
    send_ring.try_send(1, (2,), torch.zeros(3))
    receive_ring[1].acknowledge(4, 1)
    assert send_ring.has_room(2)
    assert not send_ring.has_room(3)


def test_uses_of_other_signatures_leave_steps_out(arena):
    """The steps of a ring buffer need not follow each other, as long as they grow."""
    send_ring, receive_ring = rings_of(arena, SMALL)
    for step in (1, 3, 7, 8, 20):
        assert send_ring.has_room(step)
        assert send_ring.try_send(step, (1, 2), torch.full((3,), float(step)))
        for rank in (1, 2):
            assert receive_ring[rank].read_whole(step).tolist() == [float(step)] * 3
            receive_ring[rank].acknowledge(step, 1)


# for whom


def test_nobody_reads_a_step_that_is_for_others(arena):
    """A reader neither sees as unread nor reads a step that is addressed to others."""
    send_ring, receive_ring = rings_of(arena, SMALL)
    send_ring.try_send(0, (1,), torch.ones(3))
    send_ring.try_send(1, (2,), torch.ones(3))
    assert (receive_ring[1].is_addressed(0), receive_ring[2].is_addressed(0)) == (True, False)
    assert (receive_ring[1].is_addressed(1), receive_ring[2].is_addressed(1)) == (False, True)
    assert receive_ring[2].read_whole(0) is None
    assert receive_ring[1].read_whole(1) is None
    assert list(receive_ring[1].unread_steps()) == [0]
    assert list(receive_ring[2].unread_steps()) == [1]
    receive_ring[1].acknowledge(0, 1)
    assert list(receive_ring[1].unread_steps()) == []


def test_a_step_for_nobody_holds_nobody_up(arena):
    """Steps without readers are sent one after another, with none pending for anyone."""
    send_ring, receive_ring = rings_of(arena, SMALL)
    for step in range(4):
        assert send_ring.try_send(step, (), torch.ones(3))
    assert send_ring.pending_readers(3, 1) == []
    assert not any(receive_ring[rank].is_addressed(step) for rank in (0, 1, 2) for step in range(4))


def test_readers_change_from_step_to_step(arena):
    """A mask of an earlier step does not survive in its half."""
    send_ring, receive_ring = rings_of(arena, SMALL)
    mine = random.Random(5)
    for step in range(40):
        targets = tuple(sorted(mine.sample([0, 1, 2], mine.randrange(4))))
        assert send_ring.try_send(step, targets, torch.full((3,), float(step)))
        for rank in (0, 1, 2):
            assert receive_ring[rank].is_addressed(step) == (rank in targets)
            assert (receive_ring[rank].read_whole(step) is not None) == (rank in targets)
            if rank in targets:
                receive_ring[rank].acknowledge(step, 1)


def test_masks_of_many_ranks(arena):
    """Ranks of a machine need not be numbered from 0, nor fit into one word."""
    ranks = tuple(range(100, 100 + 3 * 140, 3))
    send_ring, receive_ring = rings_of(arena, SMALL, ranks)
    for step, places in enumerate([(0, 63, 64), (1, 127, 128), (139,), (0, 64, 128)]):
        targets = tuple(ranks[place] for place in places)
        assert send_ring.try_send(step, targets, torch.ones(3))
        assert [rank for rank in ranks if receive_ring[rank].is_addressed(step)] == list(targets)
        for target in targets:
            receive_ring[target].acknowledge(step, 1)
        assert send_ring.pending_readers(step, 1) == []


# while the owner moves on


def test_a_reader_for_whom_it_is_not_sees_no_other_step_in_its_place(arena):
    """The owner does not wait for it, and writes the next step while it looks."""
    send_ring, receive_ring = rings_of(arena, LONG)
    send_ring.begin(0, (1,))
    send_ring.publish(0, 5)
    receive_ring[1].acknowledge(0, 5)
    send_ring.begin(2, (2,))
    assert receive_ring[2].published(0) == 0
    assert not receive_ring[2].is_addressed(0)
    assert receive_ring[2].is_addressed(2)
    assert receive_ring[2].published(2) == 0
    send_ring.publish(2, 1)
    assert (
        receive_ring[2].published(2),
        receive_ring[1].published(2),
        receive_ring[2].published(0),
    ) == (1, 1, 0)
    assert (receive_ring[1].is_addressed(2), receive_ring[2].is_addressed(2)) == (False, True)


def polled_for(receive_ring, step, meant):
    """What a reader finds of a step; one for whom it is not gives up after a few looks."""
    over = time.monotonic() + 60
    while (found := receive_ring.read_whole(step)) is None and time.monotonic() < over:
        if not meant and random.random() < 0.3:
            return None
        time.sleep(0)
    return found


def test_two_readers_beside_a_writer_never_mix_steps_up(arena):
    """Each step is for one of them or both, and holds its number; both look at every step."""
    send_ring, receive_ring = rings_of(arena, ChunkLayout.of((2000,), torch.float64))
    drawn = random.Random(11)
    plan = [drawn.choice([(1,), (2,), (1, 2)]) for _ in range(800)]
    right = {1: [], 2: []}

    def reads(rank):
        for step, targets in enumerate(plan):
            found = polled_for(receive_ring[rank], step, rank in targets)
            if rank in targets:
                right[rank].append(found is not None and bool((found == step).all()))
                receive_ring[rank].acknowledge(step, 1)
            else:
                right[rank].append(found is None)

    readers = [threading.Thread(target=reads, args=(rank,)) for rank in (1, 2)]
    for reader in readers:
        reader.start()
    for step, targets in enumerate(plan):
        x = torch.full((2000,), float(step), dtype=torch.float64)
        while not send_ring.try_send(step, targets, x) and any(
            reader.is_alive() for reader in readers
        ):
            time.sleep(0)
    for reader in readers:
        reader.join()
    assert right == {1: [True] * len(plan), 2: [True] * len(plan)}


# sent by handle


def test_a_tensor_is_sent_by_handle_and_slots_are_used_after_it(arena):
    """A step may carry a handle in place of chunks; a later one is read from slots again."""
    send_ring, receive_ring = rings_of(arena, SMALL)
    handle = SharedMemoryHandle(7, 4096, 128)
    send_ring.begin(0, (1,), handle)
    assert receive_ring[1].tensor_handle(0) == handle
    send_ring.publish(0, 1)
    assert receive_ring[1].published(0) == 1
    assert receive_ring[1].read_whole(0) is None, "it does not lie in the slots"
    receive_ring[1].acknowledge(0, 1)
    assert send_ring.try_send(2, (1,), torch.ones(3))
    assert receive_ring[1].tensor_handle(2) is None
    assert receive_ring[1].read_whole(2).tolist() == [1.0] * 3


def test_descriptor_zero_is_a_handle_as_well(arena):
    """A handle with file descriptor 0 is told from a step without a handle."""
    send_ring, receive_ring = rings_of(arena, SMALL)
    send_ring.begin(1, (1,), SharedMemoryHandle(0, 4096, 0))
    assert receive_ring[1].tensor_handle(1) == SharedMemoryHandle(0, 4096, 0)


def test_rings_in_one_chunk_of_memory_lie_apart(arena):
    """All of their slots and words are their own, whatever their layouts."""
    layouts = [SMALL, LONG, ChunkLayout.of((), torch.int8), ChunkLayout.of((1000,), torch.float64)]
    rings = [rings_of(arena, layout)[0] for layout in layouts]
    for number, send_ring in enumerate(rings):
        for half in send_ring.slots:
            for slot in half:
                slot.fill_(number + 1)
        send_ring.publish(0, number + 1)
    for number, send_ring in enumerate(rings):
        assert all(bool((slot == number + 1).all()) for half in send_ring.slots for slot in half)
        assert unpack_chunks(send_ring.words[0]) == number + 1
    spans = sorted(
        (send_ring.handle.offset, SendRingBuffer.nbytes(3, send_ring.layout)) for send_ring in rings
    )
    ends = [offset + size for offset, size in spans]
    assert all(end <= begin for end, (begin, _) in zip(ends, spans[1:], strict=False))


# many ranks, and ranks that do not poll


@pytest.mark.parametrize("count", [256, 257, 1000])
def test_each_of_many_ranks_reads_what_is_for_it(arena, count):
    """Neither masks nor acknowledgements of hundreds of ranks overlap."""
    send_ring, readers = rings_of(arena, SMALL, tuple(range(count)))
    for step in range(5):
        targets, value = (step, count - 1 - step), torch.full((3,), float(step))
        assert send_ring.try_send(step, targets, value)
        assert [r for r, one in readers.items() if one.is_addressed(step)] == [*targets]
        assert send_ring.pending_readers(step, 1) == [(target, step) for target in targets]
        for target in targets:
            assert torch.equal(readers[target].read_whole(step), value)
            readers[target].acknowledge(step, 1)
        assert send_ring.pending_readers(step, 1) == []
    assert send_ring.reaches(count - 1)
    assert not send_ring.reaches(count)


def test_readers_and_the_sender_are_notified(arena):
    """Each reader is told of what is published for it, and the sender of what was read."""
    send_ring, readers = rings_of(arena, SMALL)
    told = []
    send_ring.notify_readers_by(told.append)
    readers[2].notify_sender_by(lambda: told.append("sender"))
    assert send_ring.try_send(0, (1, 2), torch.ones(3))
    assert told == [1, 2]
    send_ring.begin(1, (2,))
    send_ring.publish(1, 1)
    assert told == [1, 2, 2]
    readers[1].acknowledge(0, 1)
    readers[2].acknowledge(0, 1)
    assert told == [1, 2, 2, "sender"]
