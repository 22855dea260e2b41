"""A lane shows each step to those for whom it is, whole or piece by piece, and to nobody else."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncddp.engine.lanes import Cut, Lane, SeenLane, pieces_of, step_of, word
from asyncddp.memory.shared import Arena, Place

SMALL = Cut.of((3,), torch.float32)
LONG = Cut((10,), torch.float32, count=10, step=2, pieces=5, slots=2)
"""As :class:`Cut` makes them of large tensors, but of two elements a piece."""


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()


def lane_of(arena, cut, ranks=(0, 1, 2)):
    """A lane, and how each of the ranks sees it."""
    lane = Lane(arena, ranks, cut)
    view = arena.open(os.getpid(), lane.place)
    return lane, {rank: SeenLane(view, lane.place.offset, ranks, rank, cut) for rank in ranks}


# words


@given(st.tuples(st.integers(0, 2**38), st.integers(0, 2**24 - 1)), st.data())
def test_a_word_holds_a_step_and_pieces_and_only_grows(pair, data):
    """Later steps, and more pieces of the same one, are larger numbers of 64 bits."""
    step, pieces = pair
    value = word(step, pieces)
    assert (step_of(value), pieces_of(value)) == pair
    assert 0 < value < 1 << 64
    other = data.draw(st.tuples(st.integers(0, 2**38), st.integers(0, 2**24 - 1)))
    assert (word(*other) < value) == (other < pair)


def test_memory_that_was_never_written_is_before_every_step():
    assert step_of(0) == -1
    assert pieces_of(0) == 0
    assert word(0, 0) > 0


# cuts

KIB, MIB = 1 << 10, 1 << 20
PIECES = [  # bytes of a tensor, and of its pieces
    (512 * KIB - 4, 512 * KIB),
    (512 * KIB, 512 * KIB),
    (512 * KIB + 4, 512 * KIB),
    (32 * MIB - 4, 512 * KIB),
    (32 * MIB, MIB),
    (32 * MIB + 4, MIB),
]


@pytest.mark.parametrize(("size", "piece"), PIECES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float64], ids=str)
def test_pieces_cover_a_tensor_and_none_is_empty(size, piece, dtype):
    """All but the last are of one size, which depends on the tensor's bytes alone."""
    count = size // dtype.itemsize
    cut = Cut.of((count,), dtype)
    if count * dtype.itemsize == size:
        assert cut.step * dtype.itemsize == min(piece, size)
    assert (cut.pieces - 1) * cut.step < cut.count == count <= cut.pieces * cut.step
    assert cut.slots == min(cut.pieces, 4)


@pytest.mark.parametrize("around", [-1, 0, 1])
@pytest.mark.parametrize("pieces", [1, 2, 4, 5])
def test_a_cut_splits_as_its_pieces_lie(around, pieces):
    count = pieces * 131072 + around
    cut, flat = Cut.of((count,), torch.float32), torch.arange(count)
    parts = cut.split(flat)
    assert len(parts) == cut.pieces == pieces + (around > 0)
    assert torch.equal(torch.cat(parts), flat)
    for number, part in enumerate(parts):
        assert torch.equal(cut.piece(flat, number), part)


def test_scalars_and_tensors_left_whole_are_one_piece():
    assert Cut.of((), torch.float64) == Cut((), torch.float64, 1, 1, 1, 1)
    whole = Cut.whole((3, 1 << 22), torch.float32)
    assert (whole.pieces, whole.step) == (1, 3 << 22)


# shown and taken


def test_a_step_is_shown_piece_by_piece_through_slots_that_are_used_again(arena):
    """There is no room for a piece before all have taken the one that lay there."""
    lane, seen = lane_of(arena, LONG)
    flat = torch.arange(10, dtype=torch.float32)
    lane.begin(0, (1, 2))
    for number in range(5):
        assert seen[1].shown(0) == number
        goal = number - LONG.slots + 1
        if goal > 0:
            assert lane.late(0, goal) == [(1, 0), (2, 0)]
            for rank in (1, 2):
                seen[rank].take(0, goal)
            assert lane.late(0, goal) == []
        lane.slot(0, number).copy_(LONG.piece(flat, number))
        lane.show(0, number + 1)
        assert torch.equal(seen[2].slot(0, number), LONG.piece(flat, number))
    assert lane.late(0, 5) == [(1, 0), (2, 0)]
    seen[1].take(0, 5)
    assert lane.late(0, 5) == [(2, 0)]


def test_the_last_piece_may_be_short(arena):
    cut = Cut((7,), torch.float32, count=7, step=3, pieces=3, slots=3)
    lane, seen = lane_of(arena, cut)
    assert [lane.slot(0, number).numel() for number in range(3)] == [3, 3, 1]
    assert [seen[1].slot(1, number).numel() for number in range(3)] == [3, 3, 1]


def test_two_steps_lie_apart_and_a_third_waits(arena):
    """A rank may be one step ahead of its readers, and no more."""
    lane, seen = lane_of(arena, SMALL)
    for step in (0, 1):
        assert lane.free(step)
        assert lane.post(step, (1,), torch.full((3,), float(step)))
    assert not lane.free(2)
    assert not lane.post(2, (1,), torch.full((3,), 2.0))
    assert [seen[1].whole(step).tolist() for step in (0, 1)] == [[0.0] * 3, [1.0] * 3]
    assert lane.late(2, 1) == [(1, 0)]
    seen[1].take(0, 1)
    assert lane.free(2)
    assert not lane.free(3)
    assert lane.post(2, (1,), torch.full((3,), 2.0))
    assert seen[1].whole(0) is None
    assert seen[1].whole(2).tolist() == [2.0] * 3
    assert seen[1].whole(1).tolist() == [1.0] * 3


def test_who_has_taken_a_later_step_has_taken_the_earlier_ones(arena):
    lane, seen = lane_of(arena, SMALL)
    lane.post(0, (1,), torch.zeros(3))
    lane.post(1, (2,), torch.zeros(3))
    seen[1].take(4, 1)
    assert lane.free(2)
    assert not lane.free(3)


def test_uses_of_other_forms_leave_steps_out(arena):
    """The steps of a lane need not follow each other, as long as they grow."""
    lane, seen = lane_of(arena, SMALL)
    for step in (1, 3, 7, 8, 20):
        assert lane.free(step)
        assert lane.post(step, (1, 2), torch.full((3,), float(step)))
        for rank in (1, 2):
            assert seen[rank].whole(step).tolist() == [float(step)] * 3
            seen[rank].take(step, 1)


# for whom


def test_nobody_takes_a_step_that_is_for_others(arena):
    lane, seen = lane_of(arena, SMALL)
    lane.post(0, (1,), torch.ones(3))
    lane.post(1, (2,), torch.ones(3))
    assert (seen[1].addressed(0), seen[2].addressed(0)) == (True, False)
    assert (seen[1].addressed(1), seen[2].addressed(1)) == (False, True)
    assert seen[2].whole(0) is None
    assert seen[1].whole(1) is None
    assert list(seen[1].untaken()) == [0]
    assert list(seen[2].untaken()) == [1]
    seen[1].take(0, 1)
    assert list(seen[1].untaken()) == []


def test_a_step_for_nobody_holds_nobody_up(arena):
    lane, seen = lane_of(arena, SMALL)
    for step in range(4):
        assert lane.post(step, (), torch.ones(3))
    assert lane.late(3, 1) == []
    assert not any(seen[rank].addressed(step) for rank in (0, 1, 2) for step in range(4))


def test_readers_change_from_step_to_step(arena):
    """A mask of an earlier step does not survive in its half."""
    lane, seen = lane_of(arena, SMALL)
    mine = random.Random(5)
    for step in range(40):
        targets = tuple(sorted(mine.sample([0, 1, 2], mine.randrange(4))))
        assert lane.post(step, targets, torch.full((3,), float(step)))
        for rank in (0, 1, 2):
            assert seen[rank].addressed(step) == (rank in targets)
            assert (seen[rank].whole(step) is not None) == (rank in targets)
            if rank in targets:
                seen[rank].take(step, 1)


def test_masks_of_many_ranks(arena):
    """Ranks of a machine need not be numbered from 0, nor fit into one word."""
    ranks = tuple(range(100, 100 + 3 * 140, 3))
    lane, seen = lane_of(arena, SMALL, ranks)
    for step, places in enumerate([(0, 63, 64), (1, 127, 128), (139,), (0, 64, 128)]):
        targets = tuple(ranks[place] for place in places)
        assert lane.post(step, targets, torch.ones(3))
        assert [rank for rank in ranks if seen[rank].addressed(step)] == list(targets)
        for target in targets:
            seen[target].take(step, 1)
        assert lane.late(step, 1) == []


# while the owner moves on


def test_a_reader_for_whom_it_is_not_sees_no_other_step_in_its_place(arena):
    """The owner does not wait for it, and writes the next step while it looks."""
    lane, seen = lane_of(arena, LONG)
    lane.begin(0, (1,))
    lane.show(0, 5)
    seen[1].take(0, 5)
    lane.begin(2, (2,))
    assert seen[2].shown(0) == 0
    assert not seen[2].addressed(0)
    assert seen[2].addressed(2)
    assert seen[2].shown(2) == 0
    lane.show(2, 1)
    assert (seen[2].shown(2), seen[1].shown(2), seen[2].shown(0)) == (1, 1, 0)
    assert (seen[1].addressed(2), seen[2].addressed(2)) == (False, True)


def looked_for(seen, step, meant):
    """What a reader finds of a step; one for whom it is not gives up after a few looks."""
    over = time.monotonic() + 60
    while (found := seen.whole(step)) is None and time.monotonic() < over:
        if not meant and random.random() < 0.3:
            return None
        time.sleep(0)
    return found


def test_two_readers_beside_a_writer_never_mix_steps_up(arena):
    """Each step is for one of them or both, and holds its number; both look at every step."""
    lane, seen = lane_of(arena, Cut.of((2000,), torch.float64))
    drawn = random.Random(11)
    plan = [drawn.choice([(1,), (2,), (1, 2)]) for _ in range(800)]
    right = {1: [], 2: []}

    def reads(rank):
        for step, targets in enumerate(plan):
            found = looked_for(seen[rank], step, rank in targets)
            if rank in targets:
                right[rank].append(found is not None and bool((found == step).all()))
                seen[rank].take(step, 1)
            else:
                right[rank].append(found is None)

    readers = [threading.Thread(target=reads, args=(rank,)) for rank in (1, 2)]
    for reader in readers:
        reader.start()
    for step, targets in enumerate(plan):
        x = torch.full((2000,), float(step), dtype=torch.float64)
        while not lane.post(step, targets, x) and any(reader.is_alive() for reader in readers):
            time.sleep(0)
    for reader in readers:
        reader.join()
    assert right == {1: [True] * len(plan), 2: [True] * len(plan)}


# shown where it lies


def test_a_tensor_is_shown_where_it_lies_and_slots_come_back_after_it(arena):
    lane, seen = lane_of(arena, SMALL)
    place = Place(7, 4096, 128)
    lane.begin(0, (1,), place)
    assert seen[1].place(0) == place
    lane.show(0, 1)
    assert seen[1].shown(0) == 1
    assert seen[1].whole(0) is None, "it does not lie in the slots"
    seen[1].take(0, 1)
    assert lane.post(2, (1,), torch.ones(3))
    assert seen[1].place(2) is None
    assert seen[1].whole(2).tolist() == [1.0] * 3


def test_descriptor_zero_is_a_place_as_well(arena):
    lane, seen = lane_of(arena, SMALL)
    lane.begin(1, (1,), Place(0, 4096, 0))
    assert seen[1].place(1) == Place(0, 4096, 0)


def test_lanes_of_one_chunk_lie_apart(arena):
    """All of their slots and words are their own, whatever their forms."""
    cuts = [SMALL, LONG, Cut.of((), torch.int8), Cut.of((1000,), torch.float64)]
    lanes = [lane_of(arena, cut)[0] for cut in cuts]
    for number, lane in enumerate(lanes):
        for half in lane.slots:
            for slot in half:
                slot.fill_(number + 1)
        lane.show(0, number + 1)
    for number, lane in enumerate(lanes):
        assert all(bool((slot == number + 1).all()) for half in lane.slots for slot in half)
        assert pieces_of(lane.words[0]) == number + 1
    spans = sorted((lane.place.offset, Lane.nbytes(3, lane.cut)) for lane in lanes)
    ends = [offset + size for offset, size in spans]
    assert all(end <= begin for end, (begin, _) in zip(ends, spans[1:], strict=False))
