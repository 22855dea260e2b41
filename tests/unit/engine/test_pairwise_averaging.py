"""Pairwise averaging through ring buffers: right if both ranks come, and soon back if not."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from asyncddp.engine import pairwise_averaging
from asyncddp.engine.pairwise_averaging import PairwiseAveraging, poll_briefly
from asyncddp.shm.arena import Arena
from asyncddp.shm.chunk_layout import ChunkLayout
from asyncddp.shm.ring_buffer import ReceiveRingBuffer, SendRingBuffer

RANKS = (0, 1)
LAYOUTS = {
    "one chunk": ChunkLayout(
        (6,), torch.float64, numel=6, chunk_numel=6, num_chunks=1, num_slots=1
    ),
    "as many as slots": ChunkLayout(
        (12,), torch.float64, numel=12, chunk_numel=3, num_chunks=4, num_slots=4
    ),
    "a short one at the end": ChunkLayout(
        (31,), torch.float64, numel=31, chunk_numel=3, num_chunks=11, num_slots=4
    ),
    "one slot": ChunkLayout((9,), torch.float64, numel=9, chunk_numel=2, num_chunks=5, num_slots=1),
}
WEIGHT = 0.25


@pytest.fixture
def arena():
    made = Arena()
    yield made
    made.close()


class Side:
    """One of two ranks: its send ring, and its receive ring for the peer's."""

    def __init__(self, arena, layout, rank):
        self.arena, self.layout, self.rank = arena, layout, rank
        self.send_ring = SendRingBuffer(arena, RANKS, layout)
        self.receive_ring: ReceiveRingBuffer


def pause():
    time.sleep(0)


def two(arena, layout):
    sides = [Side(arena, layout, rank) for rank in RANKS]
    for side, other in zip(sides, reversed(sides), strict=True):
        view = arena.open(os.getpid(), other.send_ring.handle)
        side.receive_ring = ReceiveRingBuffer(
            view, other.send_ring.handle.offset, RANKS, side.rank, layout
        )
    return sides


def averaging_of(side, step):
    return PairwiseAveraging(side.send_ring, side.receive_ring, step, (1 - side.rank,), pause)


def values(rank, step, count):
    return torch.arange(count, dtype=torch.float64) * (rank + 1) + 100 * step


def patiently(call):
    """As the engine goes on where an averaging has given up: try again, for a while."""
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


# polling briefly


class Clock:
    """A clock that each reading moves by as much as 50 polls may take."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        self.now += 0.00015
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(pairwise_averaging, "time", made)
    return made


def test_it_polls_for_a_fraction_of_a_millisecond(clock):
    """``poll_briefly`` polls for 0.2 ms, and reads the clock after each 50 polls."""
    polls = []
    assert not poll_briefly(lambda: bool(polls.append(1)), None)
    assert clock.now == pytest.approx(0.00045), "the first reading begins the time"
    assert len(polls) == 3 * 50
    assert poll_briefly(lambda: True, None)


def test_it_pauses_between_polls_where_cores_are_few():
    """``poll_briefly`` calls ``pause`` after each poll that fails."""
    pauses, polls = [], []
    assert poll_briefly(lambda: len(polls) == 10 or bool(polls.append(1)), lambda: pauses.append(1))
    assert len(pauses) == len(polls) == 10


# both come


@pytest.mark.parametrize("same", [False, True], ids=["apart", "over the own tensor"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_chunks_go_through_slots(arena, layout, same):
    """Each side may be ahead, by no more than the slots; the average is y = x + w (peer - x)."""
    sides = two(arena, layout)

    def rank(side):
        for step in range(30):
            own = values(side.rank, step, layout.numel)
            other = values(1 - side.rank, step, layout.numel)
            out = own if same else torch.empty_like(own)
            want = torch.lerp(own, other, WEIGHT)
            chunks, into, pairwise = layout.split(own), layout.split(out), averaging_of(side, step)
            patiently(lambda pairwise=pairwise: pairwise.begin(None))
            finish(pairwise, side, step, chunks, into)
            assert torch.equal(out, want), (side.rank, step)

    def finish(pairwise, side, step, chunks, into):
        """What is left when the peer was not there in time is done here, as the engine would."""
        if pairwise.average_chunks(chunks, into, WEIGHT):
            return
        for taken in range(pairwise.chunks_read, layout.num_chunks):
            while pairwise.chunks_sent < layout.num_chunks and pairwise.chunks_sent <= taken + 1:
                if (
                    side.send_ring.pending_readers(
                        step, pairwise.chunks_sent - layout.num_slots + 1
                    )
                    and pairwise.chunks_sent >= layout.num_slots
                ):
                    if pairwise.chunks_sent > taken:
                        break
                    continue
                side.send_ring.slot(step, pairwise.chunks_sent).copy_(chunks[pairwise.chunks_sent])
                pairwise.chunks_sent += 1
                side.send_ring.publish(step, pairwise.chunks_sent)
            patiently(lambda taken=taken: side.receive_ring.published(step) > taken)
            torch.lerp(chunks[taken], side.receive_ring.slot(step, taken), WEIGHT, out=into[taken])
            side.receive_ring.acknowledge(step, taken + 1)

    together(lambda: rank(sides[0]), lambda: rank(sides[1]))


def peer_tensor(arena, layout, pairwise):
    """The peer's tensor, mapped by its handle, once that is published."""
    found = []

    def there():
        handle = pairwise.peer_handle()
        found.extend([] if handle is None else [handle])
        return bool(found)

    patiently(there)
    view = arena.open(os.getpid(), found[0])
    return view.tensor(found[0].offset, (layout.numel,), layout.dtype)


def averaged_mapped(side, step, pairwise, own, other):
    out = torch.empty_like(own)
    if not pairwise.average_mapped(own, other, out, WEIGHT):
        patiently(lambda: not side.send_ring.pending_readers(step, side.layout.num_chunks))
    return out


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_tensors_are_averaged_where_they_are_mapped(arena, layout):
    """Into other tensors; whoever is back may write over its own."""
    sides = two(arena, layout)
    shared = [arena.empty((layout.numel,), layout.dtype) for _ in RANKS]

    def rank(side):
        for step in range(20):
            own = shared[side.rank].copy_(values(side.rank, step, layout.numel))
            want = torch.lerp(own, values(1 - side.rank, step, layout.numel), WEIGHT)
            pairwise = averaging_of(side, step)
            patiently(lambda pairwise=pairwise, own=own: pairwise.begin(arena.locate(own)))
            other = peer_tensor(arena, layout, pairwise)
            got = averaged_mapped(side, step, pairwise, own, other)
            assert torch.equal(got, want), (side.rank, step)

    together(lambda: rank(sides[0]), lambda: rank(sides[1]))


# one does not come


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_who_is_alone_is_back_soon_and_knows_how_far_it_came(arena, layout, clock):
    """Without its peer averaging returns False in 10 ms: nothing read, at most two chunks sent."""
    side, _ = two(arena, layout)
    own = values(0, 0, layout.numel)
    out, pairwise = torch.zeros_like(own), averaging_of(side, 0)
    assert pairwise.begin(None)
    assert not pairwise.average_chunks(layout.split(own), layout.split(out), WEIGHT)
    assert 0.0 < clock.now < 0.01
    assert pairwise.chunks_read == 0
    assert pairwise.chunks_sent == min(2, layout.num_chunks, layout.num_slots), (
        "sent ahead of what is read"
    )
    assert not out.any()
    assert pairwise.peer_handle() is None


def test_who_finds_no_room_does_not_begin(arena):
    """``begin`` is refused until the peer has acknowledged the step whose slots it reuses."""
    layout = LAYOUTS["as many as slots"]
    side, other = two(arena, layout)
    assert averaging_of(side, 0).begin(None)
    side.send_ring.publish(0, layout.num_chunks)
    assert not averaging_of(side, 2).begin(None)
    assert other.receive_ring.published(0) == layout.num_chunks, "step 0 is still there"
    other.receive_ring.acknowledge(0, layout.num_chunks)
    assert averaging_of(side, 2).begin(None)


def test_what_a_peer_publishes_for_others_is_not_averaged(arena):
    """Chunks that a peer publishes for other readers are not averaged."""
    layout = LAYOUTS["as many as slots"]
    side, other = two(arena, layout)
    other.send_ring.begin(0, ())
    other.send_ring.publish(0, layout.num_chunks)
    own = values(0, 0, layout.numel)
    out, pairwise = torch.zeros_like(own), averaging_of(side, 0)
    assert pairwise.begin(None)
    assert not pairwise.average_chunks(layout.split(own), layout.split(out), WEIGHT)
    assert pairwise.chunks_read == 0
    assert not out.any()


def test_what_a_peer_sends_by_handle_is_not_read_from_its_slots(arena):
    """If a peer announces its tensor by handle, no chunk is read from its slots."""
    layout = LAYOUTS["as many as slots"]
    side, other = two(arena, layout)
    x = arena.empty((layout.numel,), layout.dtype)
    assert averaging_of(other, 0).begin(arena.locate(x))
    own = values(0, 0, layout.numel)
    out, pairwise = torch.zeros_like(own), averaging_of(side, 0)
    assert pairwise.begin(None)
    assert not pairwise.average_chunks(layout.split(own), layout.split(out), WEIGHT)
    assert (pairwise.chunks_read, bool(out.any())) == (0, False)
    assert pairwise.peer_handle() == arena.locate(x)
