"""The cases of NCCL for GPUs, over the stand-in: they hold there, and can be run."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import asyncddp as bf
from asyncddp.context import current
from asyncddp.device.stream_registry import streams_of
from asyncddp.transport.cuda.staged_transport import device_transport_for
from tests.gpu import nccl_cases
from tests.support import LoopbackWorld
from tests.support.late_device import LateDevice
from tests.support.nccl import FakeNccl
from tests.support.nccl_world import NcclWorld

PLACE = SimpleNamespace(there=nullcontext, device=torch.device("cpu"), busy=lambda: None)


@pytest.mark.parametrize(
    "case", [nccl_cases.all_collectives, nccl_cases.to_itself, nccl_cases.aborted]
)
@pytest.mark.parametrize("cupy", [13, 14])
def test_a_communicator_of_one_rank(case, cupy):
    """Collectives, messages to itself and abort of a communicator of one rank."""
    nccl = FakeNccl(LateDevice(), cupy)
    case(nccl.library(0), nccl.device)
    ended = [comm.ended for comm in nccl.modules[0].made]
    assert ended == ["abort" if case is nccl_cases.aborted else "destroy"]


@pytest.mark.parametrize("seed", range(2))
def test_verbs_in_orders_of_each_rank_s_own_end(seed):
    """Messages and sums overlap in other orders on each rank, with pauses, and are right."""
    NcclWorld(4, seed).run(nccl_cases.under_stress, PLACE, seed, 3)


def watched():
    """What a watch of this rank's devices is called with while no operation is in progress."""
    context, called = current(), []
    assert context.local_transport.device_watches is context.transport.device_watches
    context.transport.device_watches.append(called.append)
    deadline = time.monotonic() + 60.0
    while not called:
        assert time.monotonic() < deadline
        time.sleep(1e-3)
    return called[0]


def test_devices_are_watched_while_no_operation_is_in_progress():
    """The engine gives them the deadline of all operations, for all ranks and for a machine's."""
    assert LoopbackWorld(2).run(watched, settings={"timeout": 33.0}) == [33.0] * 2


def connected():
    """Peers with which a pair was opened by the topology alone."""
    transport = device_transport_for(current().transport, streams_of(torch.ones(1)))
    pairs = transport.pairs._pairs
    bf.set_topology(bf.load_topology())

    def opened():
        return bool(pairs) and all(pair._communicator is not None for pair in pairs.values())

    current().engine.wait_until(opened, "the pairs", list)
    bf.barrier()
    return sorted(pairs)


def test_pairs_are_opened_when_a_topology_is_set():
    """Both ranks of each edge open a communicator before the first message between them."""
    assert NcclWorld(4).run(connected) == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
