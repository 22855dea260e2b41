"""Cases of NCCL that need one GPU, and of ranks whose verbs go by NCCL."""

from __future__ import annotations

import random
import time

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.config import tune_cuda
from asyncddp.context import current
from asyncddp.device.cuda_streams import CudaStreams
from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.device.stream_registry import streams_of_device
from asyncddp.errors import PeerError
from asyncddp.transport.cuda.nccl.communicator import BYTE, NCCLCommunicator, nccl_group
from asyncddp.transport.cuda.nccl.cupy_bindings import create_unique_id, library
from asyncddp.transport.cuda.nccl.nccl_collectives import NCCLCollectives, has_sum
from asyncddp.transport.cuda.staged_transport import device_transport_for
from asyncddp.transport.loopback import LoopbackTransport

SECONDS = 60.0
DTYPES = [torch.uint8, torch.int64, torch.bfloat16, torch.float32]


def alone(bindings, streams):
    """The collectives of a communicator of one rank."""
    identity = create_unique_id(bindings.nccl)
    communicator = NCCLCommunicator.open(bindings, streams, 1, identity, 0)
    (host,) = LoopbackTransport.group(1)
    return NCCLCollectives(streams, bindings.nccl, communicator, host)


def end(collectives, request=None):
    """Wait until a request is complete, and the device has done what it was handed."""
    deadline = time.monotonic() + SECONDS
    while request is not None and not request.done():
        assert time.monotonic() < deadline
    while collectives.communicator.watch(SECONDS):
        pass
    assert collectives.communicator.failed() is None


def on_device(streams, values, dtype):
    with streams.stream_context(StreamRole.COMPUTE):
        return torch.tensor(values, device=streams.device).to(dtype)


def all_collectives(bindings, streams):
    """Of one rank each collective gives what it was given; then the communicator is destroyed."""
    collectives, values = alone(bindings, streams), [3, 1, 4, 1]
    end(collectives, collectives.warm_up())
    for dtype in DTYPES:
        assert has_sum(dtype)
        x, out = on_device(streams, values, dtype), on_device(streams, [0] * 4, dtype)
        for start in (
            lambda x=x, out=out: collectives.reduce("allreduce", x, out),
            lambda x=x, out=out: collectives.reduce("reduce_scatter", x, out),
            lambda x=x, out=out: collectives.iallgather(x, out, [4]),
            lambda out=out: collectives.ibroadcast(out, 0),
        ):
            end(collectives, start())
            assert out.tolist() == values
    collectives.communicator.closer()()


def to_itself(bindings, streams):
    """One group of a send and a receive, both of this rank."""
    collectives = alone(bindings, streams)
    given, into = (on_device(streams, values, torch.uint8) for values in ([3, 1, 4], [0, 0, 0]))

    def call(handle, stream):
        with nccl_group(bindings.nccl):
            handle.send(given.data_ptr(), 3, BYTE, 0, stream)
            handle.recv(into.data_ptr(), 3, BYTE, 0, stream)

    before = [streams.record_event(StreamRole.COMPUTE)]
    event = collectives.communicator.enter("messages", call, [given, into], before)
    collectives.communicator.order_compute("messages", event)
    end(collectives)
    assert into.tolist() == [3, 1, 4]
    collectives.communicator.closer()()


def aborted(bindings, streams):
    """After an abort what is begun raises the reason; what was begun before raises it as well."""
    collectives = alone(bindings, streams)
    x = on_device(streams, [1.0, 2.0], torch.float32)
    request = collectives.reduce("allreduce", x, x)
    assert collectives.communicator.failed() is None
    collectives.communicator.abort("the test has aborted it")
    for call in (request.done, lambda: collectives.ibroadcast(x, 0)):
        with pytest.raises(PeerError, match="collectives cannot go on: the test has aborted it"):
            call()


def behind_a_busy_gpu(bindings, streams):
    """A collective completes on the host while the GPU has yet to do what was queued before it."""
    collectives = alone(bindings, streams)
    end(collectives, collectives.warm_up())
    x = on_device(streams, [1.0, 2.0], torch.float32)
    with streams.stream_context(StreamRole.COMPUTE):
        x.add_(0.0)  # the kernel's first call loads it, which waits for the GPU
        torch.cuda._sleep(200_000_000)
        x.add_(1.0)
    request = collectives.reduce("allreduce", x, x)
    while not request.done():
        pass
    after = streams.record_event(StreamRole.COMPUTE)
    assert not after.done()
    end(collectives)
    assert x.tolist() == [2.0, 3.0]


def independent_streams():
    """Of as many streams as a rank uses, none is held up by another; in a fresh process."""
    tune_cuda("nccl")
    device = torch.device("cuda", 0)
    streams, bindings = CudaStreams(device), library()
    contexts = [
        *(lambda role=role: streams.stream_context(role) for role in StreamRole),
        *(bindings.stream(device) for _ in range(10)),
    ]
    for number, busy in enumerate(contexts):
        with busy():
            torch.cuda._sleep(400_000_000)
            held = streams.record_event(StreamRole.CALLER)
        for other in contexts[:number] + contexts[number + 1 :]:
            with other():
                event = streams.record_event(StreamRole.CALLER)
            while not event.done():
                assert not held.done(), f"a stream waits for stream {number}"
        torch.cuda.synchronize()


# verbs


def under_stress(place, seed, rounds=5):
    """Non-blocking verbs that each rank begins and ends in an order of its own, with pauses."""
    bf.set_topology(topology.exponential_two(bf.size()))
    draw, group = random.Random(100 * seed + bf.rank()), [bf.rank(), *bf.in_neighbor_ranks()]
    for step in range(rounds):
        with place.there():
            found, names = {}, ["a", "b", "c", "sum"]
            draw.shuffle(names)
            for name in names:
                if draw.random() < 0.5:
                    place.busy()
                time.sleep(2e-3 * draw.random())
                x = torch.full((50_000,), float(bf.rank() + step), device=place.device)
                start = bf.allreduce_nonblocking
                if name != "sum":
                    start = bf.neighbor_allreduce_nonblocking
                found[name] = start(x, name=name)
            draw.shuffle(names)
            for name in names:
                ranks = range(bf.size()) if name == "sum" else group
                expected = step + sum(ranks) / len(ranks)
                got = found[name].wait()
                torch.testing.assert_close(got.cpu(), torch.full((50_000,), expected, device="cpu"))


def returns_first(place):
    """Whether the host had a result while the GPU was busy with what came before; the result."""
    with place.there():
        x = torch.ones(1000, device=place.device)
        bf.allreduce(x)
        torch.cuda._sleep(200_000_000)
        result = bf.allreduce(x.add_(1.0))
        after = torch.cuda.Event()
        after.record()
        return not after.query(), result.cpu()[0].item()


def after_an_abort(place):
    """What a verb raises whose communicator was aborted."""
    transport = device_transport_for(current().transport, streams_of_device(place.device))
    with place.there():
        x = torch.ones(1000, device=place.device)
        bf.allreduce(x)
        with current().engine.lock:
            transport.collectives.communicator.abort("the test has aborted it")
        try:
            bf.allreduce(x)
        except PeerError as problem:
            return str(problem)
        return "no error"
