"""Mixing with one neighbour through two lanes: right when both come, and soon back if not."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from asyncddp.engine.lanes import Cut, Lane, SeenLane
from asyncddp.engine.swap import Swap, soon
from asyncddp.memory.shared import Arena

RANKS = (0, 1)
CUTS = {
    "one piece": Cut((6,), torch.float64, count=6, step=6, pieces=1, slots=1),
    "as many as slots": Cut((12,), torch.float64, count=12, step=3, pieces=4, slots=4),
    "a short one at the end": Cut((31,), torch.float64, count=31, step=3, pieces=11, slots=4),
    "one slot": Cut((9,), torch.float64, count=9, step=2, pieces=5, slots=1),
}
WEIGHT = 0.25


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()


class Side:
    """One of two ranks: its lane, and how it sees the other's."""

    def __init__(self, arena, cut, rank):
        self.arena, self.cut, self.rank = arena, cut, rank
        self.lane = Lane(arena, RANKS, cut)
        self.seen: SeenLane


def pause():
    time.sleep(0)


def two(arena, cut):
    sides = [Side(arena, cut, rank) for rank in RANKS]
    for side, other in zip(sides, reversed(sides), strict=True):
        view = arena.open(os.getpid(), other.lane.place)
        side.seen = SeenLane(view, other.lane.place.offset, RANKS, side.rank, cut)
    return sides


def swap_of(side, step):
    return Swap(side.lane, side.seen, step, (1 - side.rank,), pause)


def values(rank, step, count):
    return torch.arange(count, dtype=torch.float64) * (rank + 1) + 100 * step


def patiently(call):
    """As the engine goes on where a swap has given up: try again, for a while."""
    over = time.monotonic() + 60
    while not call():
        assert time.monotonic() < over, "it never came"
        time.sleep(0)


def together(*calls):
    """Both ranks at once; what one raises is raised here."""
    problems = []

    def guarded(call):
        try:
            call()
        except (AssertionError, RuntimeError, ValueError, IndexError) as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


# looking for a moment


def test_soon_looks_for_a_fraction_of_a_millisecond():
    looks = []
    started = time.perf_counter()
    assert not soon(lambda: bool(looks.append(1)), None)
    assert 0.0002 <= time.perf_counter() - started < 20
    assert len(looks) >= 50
    assert soon(lambda: True, None)


def test_soon_rests_between_looks_where_cores_are_few():
    rests, looks = [], []
    assert soon(lambda: len(looks) == 10 or bool(looks.append(1)), lambda: rests.append(1))
    assert len(rests) == len(looks) == 10


# both come


@pytest.mark.parametrize("same", [False, True], ids=["apart", "over the own tensor"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_pieces_go_through_slots(arena, cut, same):
    """Each side may be ahead, by no more than the slots; the average is y = x + w (peer - x)."""
    sides = two(arena, cut)

    def rank(side):
        for step in range(30):
            own = values(side.rank, step, cut.count)
            other = values(1 - side.rank, step, cut.count)
            out = own if same else torch.empty_like(own)
            want = torch.lerp(own, other, WEIGHT)
            pieces, into, swap = cut.split(own), cut.split(out), swap_of(side, step)
            patiently(lambda swap=swap: swap.begin(None))
            finish(swap, side, step, pieces, into)
            assert torch.equal(out, want), (side.rank, step)

    def finish(swap, side, step, pieces, into):
        """What is left when the other was not there in time is done here by hand."""
        if swap.staged(pieces, into, WEIGHT):
            return
        for taken in range(swap.taken, cut.pieces):
            while swap.shown < cut.pieces and swap.shown <= taken + 1:
                if side.lane.late(step, swap.shown - cut.slots + 1) and swap.shown >= cut.slots:
                    if swap.shown > taken:
                        break
                    continue
                side.lane.slot(step, swap.shown).copy_(pieces[swap.shown])
                swap.shown += 1
                side.lane.show(step, swap.shown)
            patiently(lambda taken=taken: side.seen.shown(step) > taken)
            torch.lerp(pieces[taken], side.seen.slot(step, taken), WEIGHT, out=into[taken])
            side.seen.take(step, taken + 1)

    together(lambda: rank(sides[0]), lambda: rank(sides[1]))


def neighbours_tensor(arena, cut, swap):
    """The neighbour's tensor where it lies, once it is shown."""
    found = []

    def there():
        place = swap.others_place()
        found.extend([] if place is None else [place])
        return bool(found)

    patiently(there)
    view = arena.open(os.getpid(), found[0])
    return view.tensor(found[0].offset, (cut.count,), cut.dtype)


def mixed_elsewhere(side, step, swap, own, other):
    out = torch.empty_like(own)
    if not swap.whole(own, other, out, WEIGHT):
        patiently(lambda: not side.lane.late(step, side.cut.pieces))
    return out


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_tensors_are_mixed_where_they_lie(arena, cut):
    """Into other tensors; whoever is back may write over its own."""
    sides = two(arena, cut)
    shown = [arena.empty((cut.count,), cut.dtype) for _ in RANKS]

    def rank(side):
        for step in range(20):
            own = shown[side.rank].copy_(values(side.rank, step, cut.count))
            want = torch.lerp(own, values(1 - side.rank, step, cut.count), WEIGHT)
            swap = swap_of(side, step)
            patiently(lambda swap=swap, own=own: swap.begin(arena.locate(own)))
            other = neighbours_tensor(arena, cut, swap)
            got = mixed_elsewhere(side, step, swap, own, other)
            assert torch.equal(got, want), (side.rank, step)

    together(lambda: rank(sides[0]), lambda: rank(sides[1]))


# one does not come


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_who_is_alone_is_back_soon_and_knows_how_far_it_came(arena, cut):
    side, _ = two(arena, cut)
    own = values(0, 0, cut.count)
    out, swap = torch.zeros_like(own), swap_of(side, 0)
    started = time.monotonic()
    assert swap.begin(None)
    assert not swap.staged(cut.split(own), cut.split(out), WEIGHT)
    assert time.monotonic() - started < 20
    assert swap.taken == 0
    assert swap.shown == min(2, cut.pieces, cut.slots), "shown ahead of what is taken"
    assert not out.any()
    assert swap.others_place() is None


def test_who_finds_no_room_does_not_begin(arena):
    cut = CUTS["as many as slots"]
    side, other = two(arena, cut)
    assert swap_of(side, 0).begin(None)
    side.lane.show(0, cut.pieces)
    assert not swap_of(side, 2).begin(None)
    assert other.seen.shown(0) == cut.pieces, "step 0 is still there"
    other.seen.take(0, cut.pieces)
    assert swap_of(side, 2).begin(None)


def test_what_a_neighbour_shows_to_others_is_not_taken(arena):
    cut = CUTS["as many as slots"]
    side, other = two(arena, cut)
    other.lane.begin(0, ())
    other.lane.show(0, cut.pieces)
    own = values(0, 0, cut.count)
    out, swap = torch.zeros_like(own), swap_of(side, 0)
    assert swap.begin(None)
    assert not swap.staged(cut.split(own), cut.split(out), WEIGHT)
    assert swap.taken == 0
    assert not out.any()


def test_what_a_neighbour_shows_where_it_lies_is_not_looked_for_in_its_slots(arena):
    cut = CUTS["as many as slots"]
    side, other = two(arena, cut)
    x = arena.empty((cut.count,), cut.dtype)
    assert swap_of(other, 0).begin(arena.locate(x))
    own = values(0, 0, cut.count)
    out, swap = torch.zeros_like(own), swap_of(side, 0)
    assert swap.begin(None)
    assert not swap.staged(cut.split(own), cut.split(out), WEIGHT)
    assert (swap.taken, bool(out.any())) == (0, False)
    assert swap.others_place() == arena.locate(x)
