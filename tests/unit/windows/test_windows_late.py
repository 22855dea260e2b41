"""Windows of tensors on a device that is late: what is seen when, and who waits for whom."""

from __future__ import annotations

import threading

import pytest
import torch

import asyncddp as bf
from asyncddp.device.stream_interfaces import StreamOrdering, StreamRole
from asyncddp.transport.loopback import LoopbackTransport
from asyncddp.windows import device_staging
from tests.support import RanksFailedError
from tests.support.late_windows import NEVER, LateWorld, idle, made, peer, window
from tests.support.lazy_streams import LazyStreams


@pytest.fixture
def busy():
    """Two ranks, and devices that come to nothing by themselves."""
    return LateWorld(2, NEVER)


# what goes


def published_once_it_is_there(streams):
    with idle(streams):
        x = made(bf.rank(), zero_init=True)
    bf.barrier()
    handle = bf.win_put_nonblocking(x, "x")
    streams.copy(x, torch.full((300,), 99.0), StreamRole.CALLER)  # the caller may change it at once
    bf.barrier()
    assert not handle.poll()
    assert bf.get_win_version("x") == {peer(): 0}, "nothing was published yet"
    bf.barrier()
    with idle(streams):
        assert handle.wait()
        bf.barrier()
        got = bf.win_read_neighbor("x", peer())
        assert streams.read(got).tolist() == [float(peer())] * 300
        assert streams.read(x).tolist() == [99.0] * 300
    bf.barrier()


def test_a_put_is_seen_once_the_device_has_copied_it_out(busy):
    """And the tensor may be overwritten meanwhile: what is put is its value at the call."""
    busy.run(published_once_it_is_there)


def waits_until_seen(streams):
    x = made(bf.rank(), zero_init=True)
    for step in range(3):
        for value in (float("nan"), float("inf"), 10.0 * step + bf.rank()):
            streams.copy(x, torch.full((300,), value), StreamRole.CALLER)
        bf.win_put(x, "x", self_weight=0.5)
        bf.barrier()
        got = bf.win_read_neighbor("x", peer())
        assert streams.read(got).tolist() == [10.0 * step + peer()] * 300
        assert streams.read(x).tolist() == [(10.0 * step + bf.rank()) / 2] * 300
        bf.barrier()


def test_a_blocking_put_is_seen_when_it_returns():
    """Whatever the caller had queued before it; and it is scaled after it was read."""
    LateWorld(2, 20).run(waits_until_seen)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["begin", "arrive"])
def test_a_window_that_keeps_to_no_order_is_found(monkeypatch, mistake):
    """Else the tests of this file would show nothing."""
    monkeypatch.setattr(StreamOrdering, mistake, lambda *_: None)
    with pytest.raises(RanksFailedError, match="AssertionError"):
        LateWorld(2, 20).run(waits_until_seen)


def in_order(streams):
    """A put, a step that is told, a sum, and a flush that comes after all of them."""
    with idle(streams):
        x = made(1.0, zero_init=True)
    bf.barrier()
    bf.win_put_nonblocking(x, "x")
    window().tell(50)
    bf.win_accumulate_nonblocking(x, "x")
    clock = window().edges.incoming[peer()].clock
    assert clock() < 2
    flushed = window().flush()
    bf.barrier()
    assert not flushed.poll()
    with idle(streams):
        flushed.wait()
        bf.barrier()
        assert clock() == 2, "the step of the last one, which came after what was told"
        assert bf.get_win_version("x") == {peer(): 2}
        assert streams.read(bf.win_read_neighbor("x", peer())).tolist() == [2.0] * 300
    bf.barrier()


def test_what_was_put_is_published_in_its_order(busy):
    """Puts, accumulates and told steps are published in order; a flush waits for all."""
    busy.run(in_order)


def never_far_behind(streams):
    with idle(streams):
        x = made(1.0, zero_init=True)
    bf.barrier()
    side = window()._staging
    handles = [bf.win_accumulate_nonblocking(x, "x") for _ in range(device_staging._MAX_QUEUED)]
    assert len(side._queued) == device_staging._MAX_QUEUED
    threading.Timer(0.05, setattr, (streams, "_laziness", 3)).start()
    for _ in range(20):
        handles.append(bf.win_accumulate_nonblocking(x, "x"))
        assert len(side._queued) <= device_staging._MAX_QUEUED
    assert all(handle.wait() for handle in handles)
    bf.barrier()
    total = bf.win_update_then_collect("x")
    assert streams.read(total).tolist() == [25.0] * 300
    bf.barrier()


def test_a_caller_does_not_run_far_ahead_of_its_device(busy):
    """Pinned memory would grow; sums are whole nevertheless."""
    busy.run(never_far_behind)


# what comes


def mixed_after_it_came(streams):
    with idle(streams):
        x = made(bf.rank(), zero_init=True)
        bf.win_put(x, "x")
        bf.barrier()
    updated = bf.win_update("x", 0.75, {peer(): 0.25})
    cloned = bf.win_update("x", 0.0, {peer(): 3.0}, clone=True)
    assert updated is x
    assert float(x[0]) == float(bf.rank()), "nothing has waited for the device"
    bf.barrier()
    assert streams.read(x).tolist() == [0.75 * bf.rank() + 0.25 * peer()] * 300
    assert streams.read(cloned).tolist() == [3.0 * peer()] * 300, "it has memory of its own"
    bf.barrier()


def test_an_update_waits_for_nothing_and_what_follows_comes_after_it(busy):
    """An update returns before the device has acted; what is queued next reads its result."""
    busy.run(mixed_after_it_came)


def own_memory(streams):
    """Updates whose sums are still to be copied in while others are formed."""
    with idle(streams):
        made(0.0, zero_init=True)
    for step in range(12):
        with idle(streams):
            bf.win_put(torch.full((300,), float(step)), "x")
        bf.barrier()
        bf.win_update("x", 1.0, {peer(): 1.0})
        bf.barrier()
    assert streams.read(window().tensor).tolist() == [66.0] * 300
    bf.barrier()


def test_memory_is_not_used_again_before_the_device_has_read_it():
    """Pinned memory of an update is not overwritten before it is copied to the device."""
    LateWorld(2, 15).run(own_memory)


# the order of streams


class Noted(LazyStreams):
    """Notes what waits for what, and what is copied where."""

    def __init__(self):
        super().__init__(laziness=0)
        self.log = []

    def record_event(self, queue):
        event = super().record_event(queue)
        event.at = queue
        return event

    def wait_event(self, queue, event):
        self.log.append((queue, "after", event.at))
        super().wait_event(queue, event)

    def copy(self, out, source, queue):
        self.log.append((queue, "copies"))
        super().copy(out, source, queue)


def noted(streams):
    base = torch.ones(6, 8)
    bf.win_create(base.t(), "x")
    found = []
    for verb in (lambda: bf.win_put(base.t(), "x", 0.5), lambda: bf.win_update("x")):
        streams.log.clear()
        verb()
        found.append(list(streams.log))
        bf.barrier()
    return found


def test_each_queue_waits_for_what_its_work_needs(monkeypatch):
    """Also for memory that torch may have used for something else on another queue before."""
    world = LateWorld(2, 0)
    world.devices = [Noted(), Noted()]
    caller, work, out, into = (
        StreamRole.CALLER,
        StreamRole.COMPUTE,
        StreamRole.DEVICE_TO_HOST,
        StreamRole.HOST_TO_DEVICE,
    )
    begun = [(queue, "after", caller) for queue in (work, out, into)]
    for put, update in world.run(noted):
        read = [(out, "after", work), (out, "copies"), (work, "after", out)]
        assert put == [*begun, *read, (caller, "after", work)]
        written = [(into, "after", work), (into, "copies"), (work, "after", into)]
        assert update == [*begun, *written, (caller, "after", work)]


# between machines


def test_over_messages(monkeypatch):
    """What travels leaves once it was copied out; a handle waits for both."""
    monkeypatch.setattr(LoopbackTransport, "window_group", None)
    LateWorld(2, 20).run(waits_until_seen)
    LateWorld(2, NEVER).run(published_once_it_is_there)
    LateWorld(2, 15).run(own_memory)
