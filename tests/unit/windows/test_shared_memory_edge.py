"""The two ends of an edge in shared memory: what is read is whole, and what is added counts once.

The ends are run against each other in thousands of orders of their accesses.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading

import pytest
import torch

from asyncddp.errors import PeerLeftError
from asyncddp.shm.arena import Arena, InProcessArena, SharedMemoryHandle, handle_of_block
from asyncddp.windows import shared_memory_edge, staging
from asyncddp.windows.shared_memory_edge import (
    _INTENDED,
    WORDS,
    SharedMemoryReader,
    SharedMemoryWriter,
)
from asyncddp.windows.staging import BufferPool

FORM = ((2,), torch.float64)


class Edge:
    """Both ends of an edge, and the writer's buffers."""

    def __init__(self, arena, shape=(2,), dtype=torch.float64):
        block = arena.take(8 * WORDS, zeroed=8 * WORDS)
        self.pool = BufferPool(arena, shape, dtype)
        self.outlet = SharedMemoryWriter(block.chunk, block.offset)
        self.pool.edges = [self.outlet]
        place = handle_of_block(block)
        self.inlet = SharedMemoryReader(
            arena, os.getpid(), place, shape, dtype, "rank 1: window 'x': rank 0"
        )

    def write(self, kind, value, p=0.0, clock=0, weight=1.0):
        buffer = self.pool.acquire_buffer()
        buffer.tensor.fill_(value)
        try:
            if kind == "put":
                return self.outlet.put(buffer, weight, p, clock)
            return self.outlet.add(buffer, weight, p, clock, self.pool.acquire_buffer)
        finally:
            buffer.drop()


@pytest.fixture
def edge():
    return Edge(InProcessArena())


def values(shown):
    return None if shown is None else (shown.tensor * shown.weight).tolist()


def test_nothing_is_there_before_the_first_version(edge):
    """Before the first version a reader gets None, and version, clock and taken are 0."""
    assert edge.inlet.look() is None
    assert edge.inlet.take() is None
    assert (edge.inlet.version(), edge.inlet.clock(), edge.inlet.taken) == (0, 0, 0)


def test_a_put_takes_the_place_of_all_before_it(edge):
    """A reader sees the last put alone, with its own p and clock."""
    for number, value in enumerate((3.0, 4.0, 5.0), start=1):
        assert edge.write("put", value, p=value / 2, clock=10 * number) == number
    shown = edge.inlet.look()
    assert values(shown) == [5.0, 5.0]
    assert (shown.version, shown.floor, shown.p, shown.clock) == (3, 3, 2.5, 30)
    assert edge.inlet.version() == 3
    edge.inlet.release()


def test_what_is_added_is_summed_until_it_is_taken(edge):
    """Accumulates are summed with their weights and p until a take, which empties the edge."""
    edge.write("add", 1.0, p=0.5, weight=2.0)
    edge.write("add", 3.0, p=0.25, weight=0.5)
    assert edge.outlet.has_unread()
    shown = edge.inlet.take()
    assert not edge.outlet.has_unread()
    assert values(shown) == [3.5, 3.5]
    assert (shown.p, shown.floor, edge.inlet.taken) == (0.75, 0, 2)
    edge.inlet.release()
    assert edge.inlet.look() is None, "it was taken"
    assert edge.inlet.take() is None
    edge.write("add", 8.0, p=1.0)
    shown = edge.inlet.take()
    assert (values(shown), shown.p) == ([8.0, 8.0], 1.0)
    edge.inlet.release()


def test_what_is_added_to_a_put_is_added_to_it_alone(edge):
    """An accumulate after a put adds to the put, and not to what came before it."""
    edge.write("add", 1.0)
    edge.write("put", 2.0)
    edge.write("add", 4.0)
    shown = edge.inlet.look()
    assert (values(shown), shown.floor) == ([6.0, 6.0], 2)
    edge.inlet.release()


def test_what_is_held_stays_as_it_is(edge):
    """A version that the reader holds keeps its values, and three buffers suffice."""
    edge.write("put", 1.0)
    shown = edge.inlet.look()
    for value in range(2, 50):
        edge.write("put", float(value))
        assert values(shown) == [1.0, 1.0]
    edge.inlet.release()
    assert len(edge.pool.buffers) <= 3, "the newest, the held one and the one being filled"
    edge.write("put", 50.0)
    assert values(edge.inlet.look()) == [50.0, 50.0]


def test_buffers_are_used_again(edge):
    """With a reader that never looks: the newest sum, what was added last, and two to form it."""
    for value in range(100):
        edge.write("add" if value % 3 else "put", float(value))
    assert len(edge.pool.buffers) <= 4


def test_the_reader_tells_that_it_looks(edge):
    """``reader_gets`` is True at the writer once the reader has announced gets."""
    assert not edge.outlet.reader_gets()
    edge.inlet.announce_gets()
    assert edge.outlet.reader_gets()


def test_steps_are_told_without_a_tensor(edge):
    """``set_clock`` reaches the reader without a version; a version keeps its own clock."""
    edge.write("put", 1.0, clock=3)
    edge.outlet.set_clock(7)
    assert edge.inlet.clock() == 7
    assert edge.inlet.look().clock == 3


def test_tensors_without_elements(edge):
    """Versions of an empty tensor are counted, and have its shape and dtype."""
    edge = Edge(InProcessArena(), (2, 0), torch.int8)
    edge.write("add", 0)
    edge.write("add", 0)
    shown = edge.inlet.take()
    assert (shown.tensor.shape, shown.tensor.dtype, shown.version) == ((2, 0), torch.int8, 2)


WRITER = """
import os, sys, time
from asyncddp.shm.arena import Arena, handle_of_block
from asyncddp.windows.shared_memory_edge import WORDS, SharedMemoryWriter
from asyncddp.windows.staging import BufferPool
import torch
arena = Arena()
block = arena.take(8 * WORDS, zeroed=8 * WORDS)
pool, outlet = BufferPool(arena, (2,), torch.float64), SharedMemoryWriter(block.chunk, block.offset)
buffer = pool.acquire_buffer()
buffer.tensor.fill_(3.0)
outlet.put(buffer, 1.0, 0.0, 0)
print(*handle_of_block(block), flush=True)
sys.stdin.read()
"""


@pytest.mark.launches
def test_a_writer_that_is_gone_before_its_memory_was_seen():
    """The words were mapped before it ended, the tensor was not: the error says so."""
    command = [sys.executable, "-c", WRITER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as child:
        place = SharedMemoryHandle(*map(int, child.stdout.readline().split()))
        arena = Arena()
        seen, unseen = (
            SharedMemoryReader(arena, child.pid, place, *FORM, f"rank 1: window 'x': rank {rank}")
            for rank in (0, 2)
        )
        assert values(seen.look()) == [3.0, 3.0]
        child.kill()
        child.wait()
    assert values(seen.look()) == [3.0, 3.0], "what was mapped stays"
    arena._foreign.clear()
    with pytest.raises(PeerLeftError, match="rank 1: window 'x': rank 2: it has ended"):
        unseen.look()
    arena.close()


# all orders of accesses


class ProposerTurns:
    """Two threads of which one runs at a time; at chosen accesses the turn goes to the other."""

    def __init__(self, switches):
        self.switches, self.count, self.now = set(switches), 0, None
        self.gates = [threading.Semaphore(0), threading.Semaphore(0)]
        self.over = [False, False]
        self.errors = []

    def step(self):
        """An access is made next."""
        if self.now is None:
            return
        self.count += 1
        if self.count in self.switches and not self.over[1 - self.now]:
            me = self.now
            self._give()
            self.gates[me].acquire()

    def _give(self):
        self.now = 1 - self.now
        self.gates[self.now].release()

    def run(self, first, *actors):
        """Run both to their ends; gives how many accesses they made."""

        def body(me):
            self.gates[me].acquire()
            try:
                actors[me]()
            except BaseException as error:  # noqa: BLE001 - told to the test
                self.errors.append(error)
            self.over[me] = True
            if not self.over[1 - me]:
                self._give()

        threads = [threading.Thread(target=body, args=(me,)) for me in (0, 1)]
        for thread in threads:
            thread.start()
        self.now = first
        self.gates[first].release()
        for thread in threads:
            thread.join()
        self.now = None
        if self.errors:
            raise self.errors[0]
        return self.count


class Stepped:
    """Words of which each access is a step; writing to some of them may come to nothing."""

    def __init__(self, words, turns, deaf=()):
        self.words, self.turns, self.deaf = words, turns, deaf

    def __getitem__(self, index):
        self.turns.step()
        return self.words[index]

    def __setitem__(self, index, value):
        self.turns.step()
        if index not in self.deaf:
            self.words[index] = value


LOG = [("add", 1.0), ("add", 2.0), ("put", 4.0), ("add", 8.0), ("add", 16.0), ("add", 32.0)]
READS = ["take", "look", "take", "take"]


def expected(taken, version):
    """What a reader sees at a version, of a log of which some was taken before."""
    total = 0.0
    for kind, value in LOG[:version]:
        total = value if kind == "put" else total + value
    for number, (kind, _) in enumerate(LOG[:version], start=1):
        if kind == "put" and number > taken:
            return total
    return sum(value for _, value in LOG[taken:version])


def play(monkeypatch, switches, first, deaf=()):
    """Let a writer and a reader meet in one order of accesses, and check all that is read."""
    turns, arena = ProposerTurns(switches), InProcessArena()
    for module, name in (
        (shared_memory_edge, "store_fence"),
        (shared_memory_edge, "full_memory_fence"),
        (staging, "full_memory_fence"),
    ):
        monkeypatch.setattr(module, name, turns.step)
    edge = Edge(arena)
    edge.outlet._words = Stepped(edge.outlet._words, turns)
    edge.inlet._words = Stepped(edge.inlet._words, turns, deaf)

    def write():
        for kind, value in LOG:
            edge.write(kind, value, p=value)

    def read():
        last = 0
        for kind in (*READS, "end"):
            if kind == "end":
                wait(turns)
            before = edge.inlet.taken
            shown = edge.inlet.look() if kind == "look" else edge.inlet.take()
            if shown is None:
                assert edge.inlet.version() >= before
                continue
            assert shown.version >= last
            last = shown.version
            turns.step()
            announce_gets = expected(before, shown.version)
            assert values(shown) == [announce_gets, announce_gets], (before, shown)
            assert shown.p == announce_gets
            turns.step()
            assert values(shown) == [announce_gets, announce_gets], "it changed while it was held"
            edge.inlet.release()
        assert last == len(LOG)

    return turns.run(first, write, read)


def wait(turns):
    """Let the writer come to its end."""
    while not turns.over[0]:
        turns.switches.add(turns.count + 1)
        turns.step()


def orders(total, seed, pairs=0, sets=500):
    """Where the turn goes to the other: single accesses, and some pairs and larger sets of them."""
    drawn, places = random.Random(seed), range(1, total + 1)
    yield from ((place,) for place in places)
    yield from drawn.sample(list(itertools.combinations(places, 2)), pairs)
    for _ in range(sets):
        yield tuple(drawn.sample(places, drawn.randint(3, 9)))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_in_any_order_what_is_read_is_whole_and_counts_once(monkeypatch):
    """Each read gives exactly what was put and added after what was taken before it."""
    total = play(monkeypatch, (), 0)
    assert total > 60
    for first in (0, 1):
        for switches in orders(total, first, pairs=500):
            play(monkeypatch, switches, first)


@pytest.mark.slow
def test_a_reader_that_does_not_say_what_it_intends_is_found_out(monkeypatch):
    """The counter-check: without that word some order loses or doubles what was added."""

    def all_orders():
        for switches in orders(120, 2, sets=3000):
            play(monkeypatch, switches, 1, deaf=(_INTENDED,))

    with pytest.raises((AssertionError, RuntimeError)):
        all_orders()
