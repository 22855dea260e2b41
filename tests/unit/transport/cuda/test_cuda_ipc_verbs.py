"""Verbs over ``cuda_ipc`` between processes: right however late devices are, and what they copy."""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.config import Config
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.device.stream_registry import use_streams_on_cpu
from asyncddp.ops import weighted_average
from asyncddp.transport.cuda.composite import CompositeTransport
from asyncddp.transport.cuda.ipc import ipc_transport
from asyncddp.transport.cuda.ipc.ipc_transport import CudaIPCTransport
from asyncddp.transport.loopback import LoopbackTransport
from tests.support import BEFORE_DEADLINE, DEFAULT_SETTINGS, on
from tests.support.simulated_streams import SimulatedStreams

SIZE = 5000
STEPS = 6


@contextmanager
def on_a_device(base, near=None, laziness=3):
    """A world whose tensors are read where they lie, on a device that mixes late."""
    streams = SimulatedStreams(laziness, pace=1e-4)
    near = [rank for rank in range(base.size) if rank != base.rank] if near is None else near
    transport = CudaIPCTransport.open(base, streams, near, 60.0)
    whole = CompositeTransport.combine(
        {"cuda_ipc": transport},
        {peer: "cuda_ipc" if peer in near else "cuda_staged" for peer in range(base.size)},
        "cuda_staged",
    )
    base.device_transport_factory = whole.for_device
    combine = weighted_average.weighted_sum_on_device

    def late(mixing, dtype, own, others, out):
        streams.later(StreamRole.COMPUTE, partial(combine, mixing, dtype, own, list(others), out))

    weighted_average.weighted_sum_on_device = late
    try:
        with use_streams_on_cpu(streams):
            context = Context(base, Config(**DEFAULT_SETTINGS))
            with use(context):
                yield streams, transport
            context.close("the case has ended")
    finally:
        weighted_average.weighted_sum_on_device = combine


def held(rank, step):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * step + rank))


def kept(streams):
    """A tensor in memory that peers can be shown, as all memory of a GPU can."""
    return streams.allocate_exportable(4 * SIZE).view(torch.float32)


def averages(base, in_place):
    """The average of what all ranks hold, again and again; and bytes copied in each step."""
    with on_a_device(base) as (streams, _):
        bf.set_topology(topology.complete(base.size))
        mine, copied = kept(streams), []
        for step in range(STEPS):
            streams.copy(mine, held(base.rank, step), StreamRole.CALLER)
            streams.wait_event(StreamRole.COMPUTE, streams.record_event(StreamRole.CALLER))
            before = streams.copied
            found = (bf.neighbor_allreduce_ if in_place else bf.neighbor_allreduce)(mine)
            expected = torch.stack([held(rank, step) for rank in range(base.size)]).mean(0)
            torch.testing.assert_close(found, expected)
            copied.append((streams.copied - before) // mine.nbytes)
            found.fill_(float("nan"))
            mine.fill_(float("nan"))  # as soon as the verb is over
        return copied


@on("mpi-4")
@pytest.mark.parametrize("in_place", [False, True], ids=["new", "in place"])
def test_a_tensor_is_copied_once_for_all_neighbours(world, in_place):
    """One copy on the sender's device, which they read where it lies; none on theirs."""
    assert world.run_bare(averages, in_place) == [[1] * STEPS] * world.size


def goes_around(base):
    """Directed neighbours, weights by hand, several names at once, waited for in another order."""
    rank, size = base.rank, base.size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    with on_a_device(base) as (streams, _):
        mine = [kept(streams) for _ in range(3)]
        for step in range(4):
            handles = []
            for part, tensor in enumerate(mine):
                tensor.copy_(held(rank, 10 * step + part))
                handles.append(
                    bf.neighbor_allreduce_nonblocking(
                        tensor,
                        self_weight=0.25,
                        src_weights={behind: 0.5},
                        dst_weights={ahead: 2.0 if step == 3 else 1.0},
                        name=f"part {part}",
                    )
                )
            for part in (2, 0, 1):
                found, scale = handles[part].wait(), 1.0 if step == 3 else 0.5
                peer = held(behind, 10 * step + part)
                expected = 0.25 * held(rank, 10 * step + part) + scale * peer
                torch.testing.assert_close(found, expected)
        return True


@on("mpi-4")
def test_directed_exchanges_under_several_names(world):
    """Named averages on a directed ring are right though waited for in another order."""
    assert all(world.run_bare(goes_around))


def other_verbs(base):
    """Those whose tensors are copied, or come through the host."""
    with on_a_device(base) as (streams, _):
        bf.set_topology(topology.complete(base.size))
        mine = kept(streams).copy_(held(base.rank, 0))
        both = [held(rank, 0) for rank in range(base.size)]
        assert torch.equal(bf.neighbor_allgather(mine), torch.cat([both[1 - base.rank]]))
        torch.testing.assert_close(bf.pair_gossip(mine, 1 - base.rank), sum(both) / 2)
        torch.testing.assert_close(bf.allreduce(mine), sum(both) / 2)
        assert torch.equal(bf.broadcast(mine, 1), both[1])
        return True


@on("mpi-2")
def test_other_verbs(world):
    """Verbs whose tensors are copied or staged are right between two processes."""
    assert all(world.run_bare(other_verbs))


def settled(transport):
    """Whether peers have read all that they were shown, after a while."""
    deadline = time.monotonic() + 60.0
    while transport._exporter.busy and time.monotonic() < deadline:
        transport._drive_tasks()
    return not transport._exporter.busy


def partly_in_reach(base):
    """Pairs of ranks share a GPU; what goes to the others is staged."""
    with on_a_device(base, near=[base.rank ^ 1]) as (streams, transport):
        bf.set_topology(topology.complete(base.size))
        mine = kept(streams)
        for step in range(3):
            mine.copy_(held(base.rank, step))
            found = bf.neighbor_allreduce(mine)
            expected = torch.stack([held(rank, step) for rank in range(base.size)]).mean(0)
            torch.testing.assert_close(found, expected)
        return settled(transport)


@on("mpi-4")
def test_neighbours_in_reach_and_out_of_it_in_one_average(world):
    """An average of neighbours in reach and staged ones is right, and all imports end."""
    assert world.run_bare(partly_in_reach) == [True] * 4


def disagrees(base):
    """One rank has another shape: both are told, and what was exported is released."""
    with on_a_device(base) as (streams, transport):
        bf.set_topology(topology.complete(base.size))
        with pytest.raises(bf.MismatchError, match="shape"):
            bf.neighbor_allreduce(kept(streams)[: SIZE - base.rank], name="differs")
        bf.barrier()
        mine, expected = kept(streams).copy_(held(base.rank, 0)), (held(0, 0) + held(1, 0)) / 2
        for _ in range(3):
            torch.testing.assert_close(bf.neighbor_allreduce(mine), expected)
        return settled(transport)


@on("mpi-2")
def test_after_a_mismatch_nothing_stays_exported_and_the_world_goes_on(world):
    """After a MismatchError the next averages are right and all imports end."""
    assert world.run_bare(disagrees) == [True] * 2


# leaving


def transports():
    ends, notes = (LoopbackTransport.group(2) for _ in range(2))
    return [
        CudaIPCTransport(ends[rank], SimulatedStreams(pace=0.01), [1 - rank], notes[rank])
        for rank in range(2)
    ]


def test_a_rank_that_leaves_waits_for_its_readers_but_not_for_long(monkeypatch):
    """``close`` waits a minute for a reader that never comes, and when called again not at all."""
    now = [100.0]  # a clock that only waiting moves

    def wait(attempt):
        now[0] += 0.25

    monkeypatch.setattr(ipc_transport, "time", SimpleNamespace(monotonic=lambda: now[0]))
    one, other = transports()
    for transport in (one, other):
        monkeypatch.setattr(transport.base, "backoff", wait)
    exported = one.export_tensor(torch.ones(10), {1: 0})[1]
    one.close()
    assert now == [161.0], "a minute for the reader to read, and a second for it to leave"
    assert not exported.done()
    other.close()
    one.close()
    assert now == [161.0], "the first has said that it leaves, and it does so once"


def test_ranks_that_leave_with_unread_memory_do_not_wait_for_each_other():
    """A rank that leaves says that it reads nothing more, before it waits for its own readers."""
    with bf.local_world(2, **DEFAULT_SETTINGS) as world:
        pair = transports()

        def leave():
            transport = pair[bf.rank()]
            transport.export_tensor(torch.ones(10), {1 - bf.rank(): 0})
            started = time.monotonic()
            transport.close()
            return time.monotonic() - started < BEFORE_DEADLINE

        assert world.run(leave) == [True, True]


@pytest.mark.parametrize("late", [0.0, 1.2])
def test_ranks_that_leave_together_keep_what_is_read_until_then(late):
    """The peer's reading is still queued, or to come, when the sender has left its last verb."""
    with bf.local_world(2, **DEFAULT_SETTINGS) as world:
        pair, out = transports(), torch.zeros(10)

        def leave():
            transport = pair[bf.rank()]
            if bf.rank() == 0:
                transport.export_tensor(torch.ones(10), {1: 0})
                transport.close()
                return float(out.sum())
            time.sleep(late)
            imported = transport.import_tensor((10,), torch.float32, 0, 0)
            while not imported.done():
                transport.backoff(0)
            transport.streams.copy(out, imported.tensor, StreamRole.COMPUTE)
            imported.release()
            transport.close()
            return len(transport._importer.imported)

        assert world.run(leave) == [10.0, 0]
