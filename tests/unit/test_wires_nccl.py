"""``nccl``: what NCCL is handed, over a library that checks it and does the same on the host."""

from __future__ import annotations

import ctypes
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import asyncddp as bf
from asyncddp.errors import ArgumentError, EnvironmentProblem, PeerError
from asyncddp.memory.streams import Queue
from asyncddp.memory.streams_host import HostStreams
from asyncddp.transport.cuda_staged import CudaStaged
from asyncddp.transport.loopback import Loopback
from asyncddp.transport.nccl import NCCL, library, versions
from tests.conformance import test_transports as transports
from tests.support import DEFAULTS

SECONDS = 10.0
TYPES = {
    0: torch.int8,
    1: torch.uint8,
    2: torch.int32,
    4: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}
"""``ncclDataType_t`` of nccl.h."""
STREAM = list(Queue).index(Queue.GROUP)
IDENTITY = tuple(range(-64, 64))


class NcclError(RuntimeError):
    """As cupy's."""


def memory(pointer, count, datatype):
    """What lies at an address, as a tensor."""
    dtype = TYPES[datatype]
    assert pointer, "NCCL would be handed no memory"
    assert count > 0
    room = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(room, dtype=dtype)


class Communicator:
    """What cupy's communicator does, on the host, over a wire of its own."""

    def __init__(self, owner, ranks, identity, rank):
        assert isinstance(identity, tuple)
        assert identity == IDENTITY, "all ranks take the identity that rank 0 has made"
        assert (ranks, rank) == (owner.wire.size, owner.wire.rank)
        self.owner, self.wire, self.ended, self.problem = owner, owner.wire, None, None

    def _check(self, stream):
        assert stream == STREAM
        assert self.ended is None, f"used after {self.ended}"
        if self.problem:
            raise NcclError(self.problem)

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):
        self._check(stream)
        given, into = memory(sendbuf, count, datatype), memory(recvbuf, count, datatype)
        if op == 2:
            every = self.wire.allgather(given, [count] * self.wire.size, SECONDS)
            into.copy_(every.view(self.wire.size, count).amax(dim=0))
            return
        assert op == 0
        total = given.clone()
        self.wire.allreduce(total, SECONDS)
        into.copy_(total)

    def broadcast(self, sendbuff, recvbuff, count, datatype, root, stream):
        self._check(stream)
        assert datatype == 1

        def perform():
            into = memory(recvbuff, count, datatype)
            if root == self.wire.rank:
                into.copy_(memory(sendbuff, count, datatype).clone())
            self.wire.broadcast(into, root, SECONDS)

        self.owner.perform(perform)

    def allGather(self, sendbuf, recvbuf, count, datatype, stream):
        self._check(stream)
        ranks = self.wire.size
        every = self.wire.allgather(memory(sendbuf, count, datatype), [count] * ranks, SECONDS)
        memory(recvbuf, count * ranks, datatype).copy_(every)

    def check_async_error(self):
        self._check(STREAM)

    def destroy(self):
        self.ended = "destroy"

    def abort(self):
        self.ended = "abort"


class Library:
    """What cupy's module of NCCL does."""

    NcclError = NcclError

    def __init__(self, wire):
        self.wire, self.group, self.made = wire, None, []

    def get_unique_id(self):
        assert self.wire.rank == 0, "only one rank makes an identity"
        return IDENTITY

    def NcclCommunicator(self, ranks, identity, rank):
        self.made.append(Communicator(self, ranks, identity, rank))
        return self.made[-1]

    def perform(self, what):
        if self.group is None:
            what()
        else:
            self.group.append(what)

    def groupStart(self):
        assert self.group is None
        self.group = []

    def groupEnd(self):
        group, self.group = self.group, None
        for what in group:
            what()


def run(size, case, *args):
    """Run a case of a bare wire on ranks that are threads."""
    bases, inner = Loopback.group(size), Loopback.group(size)

    def body():
        base = bases[bf.rank()]
        wire = NCCL.open(base, HostStreams(1), SECONDS, Library(inner[bf.rank()]))
        return case(wire, *args)

    with bf.local_world(size, **DEFAULTS) as world:
        return world.run(body)


@pytest.mark.parametrize("dtype", transports.WIRE_DTYPES, ids=str)
def test_sums_of_every_dtype(dtype):
    """Bools by or, complex numbers as pairs of floats."""
    run(3, transports.sums, dtype)


@pytest.mark.parametrize("case", ["broadcasts", "gathers", "several_at_once", "by_tag_backwards"])
def test_the_contract_of_transports(case):
    run(3, getattr(transports, case))


def halves(wire, dtype):
    x = torch.full((5,), wire.rank + 0.5, dtype=dtype)
    out = torch.empty_like(x)
    wire.finish(wire.iallreduce(x, out, divisor=2), SECONDS, "allreduce")
    return x.tolist(), out.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_have_numbers_of_their_own(dtype):
    """0.5 + 1.5, divided by 2; what was given stays as it is."""
    assert run(2, halves, dtype) == [([0.5] * 5, [1.0] * 5), ([1.5] * 5, [1.0] * 5)]


def short_integers(wire):
    x = torch.full((5,), wire.rank + 1, dtype=torch.int16)
    wire.allreduce(x, SECONDS)
    return x.tolist(), type(wire.iallreduce(x)).__name__


def test_what_nccl_has_not_is_staged():
    assert run(2, short_integers) == [([3] * 5, "_Watched")] * 2


def test_collectives_come_after_the_work_that_was_queued_before_them():
    """The group's queue waits for an event of the work queue; only then is NCCL called."""
    streams, (end,) = HostStreams(laziness=50), Loopback.group(1)
    wire = NCCL.open(end, streams, SECONDS, Library(*Loopback.group(1)))
    late = torch.zeros(3)
    streams.copy(late, torch.ones(3), Queue.WORK)
    wire.finish(wire.iallreduce(late), SECONDS, "allreduce")
    assert late.tolist() == [1.0] * 3


def alone():
    (end,), (inner,) = Loopback.group(1), Loopback.group(1)
    nccl = Library(inner)
    return NCCL.open(end, HostStreams(), SECONDS, nccl), nccl.made[0]


class Never:
    def done(self):
        return False


def test_an_error_that_nccl_reports_later_is_raised_by_whoever_waits(monkeypatch):
    wire, comm = alone()
    monkeypatch.setattr(wire.streams, "mark", lambda queue: Never())
    monkeypatch.setattr(wire.streams, "after", lambda queue, event: None)
    under_way = wire.iallreduce(torch.ones(2))
    assert not under_way.done()
    comm.problem = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
    words = "collectives cannot go on: NCCL reports: NCCL_ERROR_SYSTEM_ERROR: unhandled system"
    with pytest.raises(PeerError, match=words):
        under_way.done()
    assert comm.ended == "abort"
    with pytest.raises(PeerError, match=words):
        wire.iallreduce(torch.ones(2))


def test_a_collective_past_its_deadline_aborts_the_communicator(monkeypatch):
    """Else the device would wait for the missing rank for ever."""
    wire, comm = alone()
    monkeypatch.setattr(wire.streams, "mark", lambda queue: Never())
    monkeypatch.setattr(wire.streams, "after", lambda queue, event: None)
    with pytest.raises(bf.WaitTimeoutError, match=r"rank 0: allreduce was not done in 0\.05 s"):
        wire.allreduce(torch.ones(2), 0.05)
    assert comm.ended == "abort"
    with pytest.raises(PeerError, match="an earlier collective was given up"):
        wire.ibroadcast(torch.ones(2), 0)


def test_a_call_that_nccl_refuses_is_an_error_of_ours():
    wire, comm = alone()

    def refuse(*_):
        raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")

    comm.broadcast = refuse
    with pytest.raises(PeerError, match="broadcast could not be started: NCCL_ERROR_INVALID_ARG"):
        wire.ibroadcast(torch.ones(2), 0)


def test_two_ranks_on_one_gpu_are_explained():
    (end,) = Loopback.group(1)

    def refuse(*_):
        raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

    nccl = SimpleNamespace(get_unique_id=lambda: IDENTITY, NcclCommunicator=refuse)
    with pytest.raises(EnvironmentProblem) as caught:
        NCCL.open(end, HostStreams(), SECONDS, nccl)
    assert str(caught.value) == (
        "rank 0: NCCL makes no communicator of 1 ranks (NCCL_ERROR_INVALID_USAGE: invalid usage). "
        "It refuses two ranks on one GPU; leave it out of ASYNCDDP_DEVICE_WIRES then"
    )


def test_a_wire_serves_the_gpu_of_its_communicator():
    wire, _ = alone()
    assert wire.for_device(HostStreams()) is wire
    wire.streams.device = torch.device("cuda", 0)
    other = HostStreams()
    assert type(wire.for_device(other)) is CudaStaged, "what is dropped, is dropped on the host"
    other.device = torch.device("cuda", 1)
    with pytest.raises(ArgumentError, match="expected tensors on cuda:0, where NCCL has its comm"):
        wire.for_device(other)


def test_closing_gives_the_communicator_back_once():
    wire, comm = alone()
    wire.close()
    assert comm.ended == "destroy"
    comm.ended = None
    wire.close()
    assert comm.ended is None


# cupy


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(EnvironmentProblem, match=re.escape("pip install 'asyncddp[cuda12]'")):
        library()
    assert versions() == (None, None)


@pytest.mark.parametrize("available", [True, False])
def test_versions_are_those_of_cupy_and_of_the_nccl_that_it_has_loaded(monkeypatch, available):
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.__version__, cupy.cuda = "13.6.0", cuda
    cuda.nccl = SimpleNamespace(available=available, get_version=lambda: 22703)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    assert versions() == ("13.6.0", 22703 if available else None)
    if not available:
        with pytest.raises(EnvironmentProblem, match="cupy has found no NCCL"):
            library()
