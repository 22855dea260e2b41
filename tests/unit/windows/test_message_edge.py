"""The two ends of an edge between machines: one message under way, and the next one grows."""

from __future__ import annotations

import threading

import pytest
import torch

from asyncddp.config import Config
from asyncddp.engine import ProgressEngine
from asyncddp.transport.loopback import LoopbackTransport
from asyncddp.windows.message_edge import ADD, PUT, MessageEdgeReader, MessageEdgeWriter
from asyncddp.windows.staging import BufferPool


class Ends:
    """A writer's end; what comes to the reader is kept, and answered when the test says so."""

    def __init__(self, engines):
        self.engines, self.came, self.bell = engines, [], threading.Event()
        self.pool = BufferPool(None, (2,), torch.float64)
        self.box = MessageEdgeWriter(engines[0], self.send)
        with engines[1].active_messages() as active_messages:
            active_messages.handlers["windows"] = self.hear

    def send(self, *content, tensor=None):
        with self.engines[0].active_messages() as active_messages:
            active_messages.send(1, "windows", (7, *content), tensor)

    def hear(self, peer, content, tensor):
        self.came.append((*content, tensor))
        self.bell.set()

    def write(self, kind, value, p=0.0, weight=1.0):
        buffer = self.pool.acquire_buffer()
        buffer.tensor.fill_(value)
        try:
            if kind == PUT:
                return self.box.put(buffer, weight, p, 0)
            return self.box.add(buffer, weight, p, 0, self.pool.acquire_buffer)
        finally:
            buffer.drop()

    def next(self):
        """What came next: number of the window, kind, weight * tensor, p, version."""
        assert self.bell.wait(10)
        (number, kind, weight, p, _, version, tensor) = self.came.pop(0)
        if not self.came:
            self.bell.clear()
        return number, kind, (weight * tensor).tolist(), p, version


@pytest.fixture
def ends():
    engines = [ProgressEngine(end, Config()) for end in LoopbackTransport.group(2)]
    yield Ends(engines)
    for engine in engines:
        engine.close("the test is over")


def test_while_one_is_under_way_a_later_put_takes_the_place_of_what_waits(ends):
    """While a put is under way only the newest waits, and goes once the first has arrived."""
    for value in range(1, 6):
        assert ends.write(PUT, float(value)) == value
    assert ends.next() == (7, PUT, [1.0, 1.0], 0.0, 1)
    assert not ends.came
    assert not ends.box.arrived(1)
    ends.box.handle_arrived(1)
    assert ends.box.arrived(1)
    assert not ends.box.arrived(2)
    assert ends.next() == (7, PUT, [5.0, 5.0], 0.0, 5)
    ends.box.handle_arrived(5)
    assert all(ends.box.arrived(version) for version in range(6))
    assert len(ends.pool.buffers) <= 3, "under way, waiting, being filled"
    assert not any(buffer.holds for buffer in ends.pool.buffers)


def test_a_later_sum_is_added_to_what_waits(ends):
    """While a message is under way accumulates are summed into the one that waits."""
    ends.write(ADD, 1.0, p=0.5)
    for value in (2.0, 3.0, 4.0):
        ends.write(ADD, value, p=0.25, weight=2.0)
    assert ends.next() == (7, ADD, [1.0, 1.0], 0.5, 1)
    ends.box.handle_arrived(1)
    assert ends.next() == (7, ADD, [18.0, 18.0], 0.75, 4)
    ends.write(PUT, 5.0)
    ends.write(ADD, 6.0)
    ends.box.handle_arrived(4)
    assert ends.next() == (7, PUT, [11.0, 11.0], 0.0, 6), "a put with something added is a put"
    ends.box.handle_arrived(6)
    assert ends.box.has_unread()
    ends.box.handle_taken(6)
    assert not ends.box.has_unread()
    assert not any(buffer.holds for buffer in ends.pool.buffers)


def received(*letters, told=None):
    box = MessageEdgeReader([].append if told is None else told.append)
    for version, (kind, value, p) in enumerate(letters, start=1):
        box.receive(kind, (1.0, p, version, version), torch.full((2,), value))
    return box


def test_the_reader_sums_what_was_not_taken():
    """The reader sums accumulates since the last take, tells what it took, and counts p."""
    told = []
    box = received((ADD, 1.0, 0.1), (ADD, 2.0, 0.2), told=told)
    shown = box.take()
    assert (shown.tensor.tolist(), shown.version, shown.floor) == ([3.0, 3.0], 2, 0)
    assert shown.p == pytest.approx(0.3)
    assert box.look() is None
    assert box.take() is None
    assert told == [2], "the writer hears what was taken"
    box.receive(ADD, (0.5, 0.4, 3, 3), torch.full((2,), 8.0))
    assert box.look().weight * box.look().tensor[0] == 4.0
    assert shown.tensor.tolist() == [3.0, 3.0], "what was seen stays"
    assert (box.version(), box.clock()) == (3, 3)


def test_a_put_at_the_reader_takes_the_place_of_all():
    """At the reader a put replaces what came before it; later accumulates add to it."""
    box = received((ADD, 1.0, 0.1), (PUT, 2.0, 0.2), (ADD, 4.0, 0.0))
    shown = box.look()
    assert (shown.tensor.tolist(), shown.floor, shown.version) == ([6.0, 6.0], 2, 3)
