"""What processes do with each other's GPU memory; each case runs on a pretended GPU as well."""

from __future__ import annotations

import time

import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.context import current
from asyncddp.device.stream_interfaces import StreamRole, empty_on
from asyncddp.device.stream_registry import streams_of_device
from asyncddp.serialization import pack, unpack
from asyncddp.transport.cuda.staged_pipeline import MAX_PIECES_IN_FLIGHT
from asyncddp.transport.cuda.staged_transport import device_transport_for
from tests.support.oracle import held

SIZE = 3_000_000
_SECONDS = 60.0


def gpu_streams(base):
    """The streams of the GPU that a rank takes, without a context."""
    return streams_of_device(torch.device("cuda", base.rank % torch.cuda.device_count()))


def parts_of(transport):
    """A transport, or those to which it forwards."""
    return getattr(transport, "_delegates", (transport,))


def _message(base):
    """The next message of the other rank."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        for _, message in base.poll():
            return message
    raise AssertionError("no message has come")


def _ends(event):
    deadline = time.monotonic() + _SECONDS
    while not event.done():
        assert time.monotonic() < deadline, "the event is not reached"


def handles_round_trip(base, make_streams):
    """Memory and an event of rank 0 are opened by rank 1, and an event of rank 1 by rank 0.

    Rank 1 reads after rank 0 has written, and rank 0 writes again after rank 1 has read.
    """
    streams, peer = make_streams(base), 1 - base.rank
    event = streams.create_interprocess_event()
    if base.rank == 0:
        memory = streams.allocate_exportable(SIZE)
        with streams.stream_context(StreamRole.COMPUTE):
            memory.fill_(7)
        event.record(StreamRole.COMPUTE)
        base.post(peer, pack((streams.export_memory(memory), event.handle)))
        streams.wait_event(StreamRole.COMPUTE, streams.import_event(_message(base)))
        with streams.stream_context(StreamRole.COMPUTE):
            memory.fill_(9)
        _ends(streams.record_event(StreamRole.COMPUTE))
        base.post(peer, b"written")
        return _message(base) == b"closed"
    token, handle = unpack(_message(base), tuple[bytes, bytes], "handles")
    source, out = streams.import_memory(token), empty_on(streams, (SIZE,), torch.uint8)
    streams.wait_event(StreamRole.COMPUTE, streams.import_event(handle))
    streams.copy(out, source, StreamRole.COMPUTE)
    event.record(StreamRole.COMPUTE)
    base.post(peer, event.handle)
    _ends(event)
    assert _message(base) == b"written"
    assert bool((out == 7).all()), "it was read before it was written, or after it was again"
    with streams.stream_context(StreamRole.COMPUTE):
        assert bool((source == 9).all()), "both see the same memory"
    with streams.stream_context(StreamRole.HOST_TO_DEVICE):
        del source
    base.post(peer, b"closed")
    return True


def comes_and_goes(place, rounds):
    """Averages of tensors that are freed and made anew, of other sizes, between empty_cache()."""
    bf.set_topology(topology.ring(bf.size()))
    sizes = [300_000, 2_000_000, 700_000, 1, 5_000_000]
    for step, size in enumerate(sizes * rounds):
        x = held(bf.rank(), (size,), torch.float32, step)
        expected = bf.neighbor_allreduce(x)
        with place.there():
            there = x.to(place.device)
            for _ in range(3):
                got = bf.neighbor_allreduce(there)
                torch.testing.assert_close(got.cpu(), expected, msg=f"size {size}, step {step}")
            del there, got
        torch.cuda.empty_cache()
    with place.there():
        small = torch.ones(10, device=place.device)
        for _ in range(100):
            bf.neighbor_allreduce(small)
    transport = device_transport_for(current().transport, streams_of_device(place.device))
    memories = [one.memory for one in parts_of(transport) if hasattr(one, "memory")]
    return transport.name, sum(len(memory.retired) for memory in memories)


def gathers_much(place, elements):
    """An allgather of unequal parts; how many pinned buffers it took, and of how many allowed.

    The ranks are threads, which share the free list of their device.
    """
    pinned = streams_of_device(place.device).pinned
    pinned.clear()
    before = pinned.num_allocated
    bf.barrier()
    counts = [elements * (rank + 1) for rank in range(bf.size())]
    with place.there():
        mine = torch.full((counts[bf.rank()],), float(bf.rank()), device=place.device)
        got = bf.allgather(mine)
        for rank, part in enumerate(got.split(counts)):
            assert bool((part == rank).all())
    bf.barrier()
    return pinned.num_allocated - before, bf.size() * MAX_PIECES_IN_FLIGHT
