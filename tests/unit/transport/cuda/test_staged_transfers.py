"""The stages of a staged transfer, with streams and a transport that note what is asked of them."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import asyncddp as bf
from asyncddp.context import current
from asyncddp.device.stream_interfaces import DeviceStreams, StreamRole
from asyncddp.device.stream_registry import streams_of, use_streams_on_cpu
from asyncddp.errors import PeerError, WaitTimeoutError
from asyncddp.tensors.byte_views import as_bytes
from asyncddp.transport.cuda import staged_transport as cuda_staged
from asyncddp.transport.cuda.staged_pipeline import (
    MAX_PIECES_IN_FLIGHT,
    StagedRequest,
    StagingPlan,
)
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport, device_transport_for
from asyncddp.transport.loopback import LoopbackTransport
from tests.support import LoopbackWorld
from tests.support.simulated_streams import SimulatedStreams


class Happening:
    """An event or a transfer that ends when the test says so."""

    def __init__(self, log, what):
        self.log, self.what, self.ended, self.dropped = log, what, False, False

    def done(self):
        return self.ended

    def abandon(self):
        self.dropped = True


class RecordedStreams(DeviceStreams):
    """Streams that note in which order copies, events and waits are queued, and copy at once."""

    kind = "recorded"
    device = torch.device("cpu")

    def __init__(self, log):
        self.log, self.events = log, {queue: [] for queue in StreamRole}
        self.numbers = itertools.count()

    def record_event(self, queue):
        event = Happening(self.log, f"event {next(self.numbers)}")
        self.events[queue].append(event)
        self.log.append(("mark", queue))
        return event

    def wait_event(self, queue, event):
        assert isinstance(event, Happening)
        self.log.append(("after", queue, event))

    def stream_context(self, queue):
        raise AssertionError("a transport does no arithmetic")

    def copy(self, out, source, queue):
        assert out.dtype == source.dtype == torch.uint8
        assert out.nbytes == source.nbytes
        out.copy_(source)
        self.log.append(("copy", queue, out.nbytes))

    def record_stream(self, tensor, queue):
        self.log.append(("hold", queue, tensor.data_ptr()))

    def stream_pointer(self, queue):
        raise AssertionError("a staged transport tells nobody of its queues")

    def allocate_exportable(self, size):
        raise AssertionError("a staged transport shows nobody its device's memory")

    export_memory = import_memory = allocate_exportable
    import_event = create_interprocess_event = allocate_exportable

    def allocate_pinned(self, size):
        self.log.append(("pinned", size))
        return torch.zeros(size, dtype=torch.uint8)


def parts_of(side):
    return [] if side is None else [side]


def staged(log, *, read=None, write=None, step=100, free=True):
    """A transfer whose transport notes what it carries."""
    streams, carried = RecordedStreams(log), []

    def carry(piece):
        log.append(("carry", piece.send_buffer.nbytes))
        carried.append(Happening(log, "carried"))
        return carried[-1]

    transfer = StagedRequest(
        StagingPlan(parts_of(read), parts_of(write), step, carry, "line"),
        streams,
        lambda: transfer.advance(first=free),
    )
    return transfer, streams, carried


def copies(log, queue):
    return [entry[2] for entry in log if entry[:2] == ("copy", queue)]


def carries(log):
    return [entry[1] for entry in log if entry[0] == "carry"]


def test_one_piece_is_in_each_stage_at_a_time():
    """While piece 0 is written, piece 1 is carried and piece 2 is read; then all move on."""
    log = []
    data = torch.zeros(450, dtype=torch.uint8)
    transfer, streams, carried = staged(log, read=data, write=data)
    assert not transfer.done()
    assert copies(log, StreamRole.DEVICE_TO_HOST) == [100] * MAX_PIECES_IN_FLIGHT, (
        "three pieces are read ahead"
    )
    assert not carries(log), "nothing is carried before it has been read"
    streams.events[StreamRole.DEVICE_TO_HOST][0].ended = True
    assert not transfer.done()
    assert carries(log) == [100]
    assert copies(log, StreamRole.HOST_TO_DEVICE) == []
    carried[0].ended = streams.events[StreamRole.DEVICE_TO_HOST][1].ended = True
    assert not transfer.done()
    assert copies(log, StreamRole.HOST_TO_DEVICE) == [100], "piece 0 is being written"
    assert len(carried) == 2, "piece 1 is being carried"
    assert copies(log, StreamRole.DEVICE_TO_HOST) == [100] * 3, (
        "piece 2 is being read, piece 3 has no buffer yet"
    )
    streams.events[StreamRole.HOST_TO_DEVICE][0].ended = True
    assert not transfer.done()
    assert copies(log, StreamRole.DEVICE_TO_HOST) == [100] * 4, "piece 3 has the buffer of piece 0"
    for _ in range(10):
        for happening in (
            *streams.events[StreamRole.DEVICE_TO_HOST],
            *carried,
            *streams.events[StreamRole.HOST_TO_DEVICE],
        ):
            happening.ended = True
        transfer.done()
    assert transfer.done()
    assert (
        copies(log, StreamRole.DEVICE_TO_HOST)
        == copies(log, StreamRole.HOST_TO_DEVICE)
        == [100, 100, 100, 100, 50]
    )
    assert len([entry for entry in log if entry[0] == "pinned"]) == MAX_PIECES_IN_FLIGHT


def test_a_copy_is_followed_by_its_event_on_the_same_queue():
    """Each copy to or from the device is followed at once by an event on its stream."""
    log = []
    data = torch.zeros(50, dtype=torch.uint8)
    transfer, streams, carried = staged(log, read=data, write=data)
    transfer.done()
    streams.events[StreamRole.DEVICE_TO_HOST][0].ended = True
    transfer.done()
    carried[0].ended = True
    transfer.done()
    for queue in (StreamRole.DEVICE_TO_HOST, StreamRole.HOST_TO_DEVICE):
        place = log.index(("copy", queue, 50))
        assert log[place + 1] == ("mark", queue)


def test_pieces_are_carried_in_their_order_though_a_later_one_is_read_first():
    """A piece read early is transferred only after those before it."""
    log = []
    transfer, streams, carried = staged(log, read=torch.zeros(200, dtype=torch.uint8))
    transfer.done()
    streams.events[StreamRole.DEVICE_TO_HOST][1].ended = True
    assert not transfer.done()
    assert not carried
    streams.events[StreamRole.DEVICE_TO_HOST][0].ended = True
    assert not transfer.done()
    assert len(carried) == 2


def test_a_transfer_that_has_no_turn_reads_and_does_not_carry():
    """A request before its turn reads its pieces but starts no transfer of them."""
    log = []
    transfer, streams, carried = staged(log, read=torch.zeros(10, dtype=torch.uint8), free=False)
    transfer.done()
    streams.events[StreamRole.DEVICE_TO_HOST][0].ended = True
    assert not transfer.done()
    assert copies(log, StreamRole.DEVICE_TO_HOST) == [10]
    assert not carried
    assert not transfer.next_may_start


@pytest.mark.parametrize(
    ("sizes", "pieces"),
    [([], 1), ([0], 1), ([9], 1), ([10], 1), ([11], 2), ([0, 21, 3], 3), ([10, 10], 1)],
)
def test_the_number_of_pieces(sizes, pieces):
    """The longest part decides; nothing is one piece as well, since the peer waits for it."""
    parts = [torch.zeros(size, dtype=torch.uint8) for size in sizes]
    assert StagingPlan(parts, [], 10, lambda _: None, "line").pieces == pieces
    assert StagingPlan([], parts, 10, lambda _: None, "line").pieces == pieces


def transferred(read, write, carry):
    """A transfer of forty bytes of each part at a time, to its end; what was copied."""
    streams = RecordedStreams([])

    def carried(piece):
        carry(piece)
        happened = Happening([], "carried")
        happened.ended = True
        return happened

    plan = StagingPlan(read, write, 40, carried, "line", apart=True)
    transfer = StagedRequest(plan, streams, lambda: transfer.advance(first=True))
    for _ in range(10):
        for happening in (
            *streams.events[StreamRole.DEVICE_TO_HOST],
            *streams.events[StreamRole.HOST_TO_DEVICE],
        ):
            happening.ended = True
        transfer.done()
    assert transfer.done()
    return [
        copies(streams.log, queue)
        for queue in (StreamRole.DEVICE_TO_HOST, StreamRole.HOST_TO_DEVICE)
    ]


def test_a_piece_of_several_parts_is_the_same_columns_of_each():
    """Three parts of a hundred bytes, forty columns at a time; one part is written."""
    read, write = torch.arange(300).to(torch.uint8), torch.zeros(100, dtype=torch.uint8)
    seen = []

    def carry(piece):
        seen.append(piece.send_buffer.view(3, -1).clone())
        piece.receive_buffer.copy_(seen[-1].sum(dim=0))

    out, back = transferred(read.split(100), [write], carry)
    assert (out, back) == ([40] * 3 + [40] * 3 + [20] * 3, [40, 40, 20])
    assert torch.equal(torch.cat(seen, dim=1), read.view(3, 100))
    assert torch.equal(write, read.view(3, 100).sum(dim=0).to(torch.uint8))


def test_a_piece_is_scattered_to_parts_of_unequal_lengths():
    """Parts that have ended get nothing more, and each byte goes to its own place."""
    sizes, whole = [50, 0, 90, 7], torch.zeros(147, dtype=torch.uint8)
    expected = torch.arange(147).to(torch.uint8)
    given = [part.split(40) for part in expected.split(sizes)]
    came = iter(range(3))

    def carry(piece):
        number = next(came)
        parts = [part[number] for part in given if number < len(part)]
        piece.receive_buffer.copy_(torch.cat(parts))

    out, back = transferred([expected[:50]], whole.split(sizes), carry)
    assert (out, back) == ([40, 10], [40, 40, 7, 10, 40, 10])
    assert torch.equal(whole, expected)


def test_what_fails_on_the_transport_is_raised_by_its_own_transfer_alone():
    """An error ends its own request, whose other pieces are abandoned, and no other."""
    log = []
    first, _, _ = staged(log, write=torch.zeros(10, dtype=torch.uint8))
    first.done()

    def breaks():
        raise PeerError("the peer is gone")

    second, _, carried = staged(log, write=torch.zeros(200, dtype=torch.uint8))
    second.done()
    carried[0].done = breaks
    with pytest.raises(PeerError, match="the peer is gone"):
        second.done()
    assert second.over
    assert carried[1].dropped, "the transport may still write into its buffer"
    assert not first.done()
    assert not first.over


def test_buffers_of_what_was_given_up_are_not_used_again():
    """Abandoning a request abandons its transfers, whose buffers never come to the free list."""
    log = []
    transfer, _, carried = staged(log, write=torch.zeros(200, dtype=torch.uint8))
    transfer.done()
    assert len(carried) == transfer._streams.pinned.num_allocated == 2
    transfer.abandon()
    assert all(happening.dropped for happening in carried)
    assert transfer.over
    for happening in carried:  # the transport has written into them after all
        happening.ended = True
    assert not transfer.done()
    assert not any(entry[0] == "copy" for entry in log)
    assert transfer._streams.pinned.free_bytes == 0


def test_buffers_of_what_has_ended_are_used_again():
    """A request of more pieces than are in flight allocates no buffer for the last ones."""
    log = []
    transfer, streams, carried = staged(log, write=torch.zeros(1000, dtype=torch.uint8))
    while not transfer.done():
        for happening in (*carried, *streams.events[StreamRole.HOST_TO_DEVICE]):
            happening.ended = True
    assert transfer._streams.pinned.num_allocated <= MAX_PIECES_IN_FLIGHT
    assert transfer._streams.pinned.free_bytes > 0


# the transport


def pair(streams, piece=64):
    ends = LoopbackTransport.group(2)
    return [CudaStagedTransport(end, streams) for end in ends]


def test_a_transfer_comes_after_the_work_that_was_queued_before_it():
    """The copies out wait for an event of the work queue, and the tensor is held for them."""
    log = []
    streams = RecordedStreams(log)
    one, _ = pair(streams)
    data = torch.ones(3)
    one.isend(data, 1, 0)
    event = streams.events[StreamRole.COMPUTE][0]
    copied = log.index(("copy", StreamRole.DEVICE_TO_HOST, 12))
    assert (
        log.index(("mark", StreamRole.COMPUTE))
        < log.index(("after", StreamRole.DEVICE_TO_HOST, event))
        < copied
    )
    assert log.index(("hold", StreamRole.DEVICE_TO_HOST, data.data_ptr())) < copied


def test_memory_that_is_received_into_is_not_written_before_the_work_queue_has_done_with_it():
    """A receive writes after the compute stream's event, and ends with its own copy's."""
    log = []
    streams = RecordedStreams(log)
    one, other = pair(streams)
    out = torch.zeros(3)
    arriving = one.irecv(out, 1, 0)
    assert ("after", StreamRole.HOST_TO_DEVICE, streams.events[StreamRole.COMPUTE][0]) in log
    other.base.isend(as_bytes(torch.ones(3)), 0, 0)
    assert not arriving.done(), "it is written, and nobody knows yet whether that has ended"
    streams.events[StreamRole.HOST_TO_DEVICE][0].ended = True
    assert arriving.done()
    assert out.tolist() == [1.0] * 3


def test_pinned_buffers_are_used_again():
    """Ten transfers of five pieces each take no more buffers than two ends have under way."""
    streams = SimulatedStreams()
    one, other = pair(streams)
    before, cuda_staged._PIECE = cuda_staged._PIECE, 4096
    try:
        for tag in range(10):
            data, out = torch.randn(5000), torch.empty(5000)
            sending, arriving = one.isend(data, 1, tag), other.irecv(out, 0, tag)
            one.finish(sending, 5.0, "send")
            other.finish(arriving, 5.0, "receive")
            assert torch.equal(data, out)
    finally:
        cuda_staged._PIECE = before
    assert streams.pinned.num_allocated <= 2 * MAX_PIECES_IN_FLIGHT


def test_collectives_after_one_that_was_given_up_before_it_began_fail_in_words():
    """The others have joined it, or will; the next one would meet them in it."""
    one, _ = pair(RecordedStreams([]))
    with pytest.raises(WaitTimeoutError, match=r"rank 0: allreduce was not done in 0\.05 s"):
        one.allreduce(torch.ones(2), 0.05)
    with pytest.raises(PeerError, match="collectives cannot go on: an earlier collective"):
        one.ibarrier()


def test_there_is_one_transport_for_each_device_and_transport():
    """Each pair of host transport and device has one device transport, made once."""
    first, second = LoopbackTransport.group(2)
    streams = SimulatedStreams()
    assert device_transport_for(first, streams) is device_transport_for(first, streams)
    assert device_transport_for(first, streams) is not device_transport_for(
        first, SimulatedStreams()
    )
    assert device_transport_for(first, streams) is not device_transport_for(second, streams)


# progress of what nobody waits for


def sends_and_forgets():
    """Rank 0 never asks for its request; rank 1 returns what it has received."""
    context = current()
    staged = device_transport_for(context.transport, streams_of(torch.zeros(1)))
    data = torch.arange(40_000.0)
    if context.rank == 0:
        with context.engine.lock:
            staged.isend(data, 1, 5)
        bf.barrier()
        return True
    out = torch.empty_like(data)
    with context.engine.lock:
        arriving = staged.irecv(out, 0, 5)
    deadline = time.monotonic() + 60.0
    while True:
        with context.engine.lock:
            if arriving.done():
                break
        assert time.monotonic() < deadline, "its pieces do not go on"
        time.sleep(1e-3)
    bf.barrier()
    return torch.equal(out, data)


def test_pieces_go_on_though_nobody_asks_for_the_request(monkeypatch):
    """The engine advances all requests of a device transport, whatever the rank waits for."""
    monkeypatch.setattr(cuda_staged, "_PIECE", 1 << 12)
    with use_streams_on_cpu(SimulatedStreams(2)):
        assert LoopbackWorld(2).run(sends_and_forgets) == [True, True]
