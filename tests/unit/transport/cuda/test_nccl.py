"""``nccl``: its collectives, how communicators come and go, and the bindings of cupy."""

from __future__ import annotations

import os
import re
import sys
from importlib.metadata import PackageNotFoundError
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

import asyncddp as bf
from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.errors import ArgumentError, EnvironmentProblem, PeerError
from asyncddp.transport.cuda.capabilities import DeviceCapabilities
from asyncddp.transport.cuda.nccl import cupy_bindings as nccl_library
from asyncddp.transport.cuda.nccl.cupy_bindings import (
    describe_conflict,
    library,
    limit_channels,
    versions,
)
from asyncddp.transport.cuda.nccl.nccl_transport import NCCLTransport
from asyncddp.transport.loopback import LoopbackTransport
from tests.conformance import test_transports as transports
from tests.support.late_device import LateDevice
from tests.support.nccl import FakeNccl, NcclError
from tests.support.nccl_world import NcclWorld
from tests.support.simulated_streams import SimulatedStreams
from tests.unit.transport.cuda.conftest import WARM_UP_BYTES

SECONDS = 60.0


@pytest.mark.parametrize("dtype", transports.TRANSPORT_DTYPES, ids=str)
def test_sums_of_every_dtype(dtype):
    """Bools by or, complex numbers as pairs of floats."""
    world = NcclWorld(3)
    world.run_bare(transports.sums, dtype)
    world.run_bare(transports.scattered_sums, dtype)


def halves(transport, dtype):
    x = torch.full((6,), transport.rank + 0.5, dtype=dtype)
    out, part = torch.empty_like(x), torch.empty(3, dtype=dtype)
    summing = transport.iallreduce(x, out, divisor=2), transport.ireduce_scatter(x, part, divisor=2)
    transports.finish_all(transport, summing)
    return x.tolist(), out.tolist(), part.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_have_numbers_of_their_own(dtype):
    """0.5 + 1.5, divided by 2; what was given stays as it is."""
    common = [1.0] * 6, [1.0] * 3
    assert NcclWorld(2).run_bare(halves, dtype) == [([0.5] * 6, *common), ([1.5] * 6, *common)]


def short_integers(transport):
    x, part = (
        torch.full((4,), transport.rank + 1, dtype=torch.int16),
        torch.empty(2, dtype=torch.int16),
    )
    transport.allreduce(x, SECONDS)
    transport.finish(transport.ireduce_scatter(x, part), SECONDS, "reduce_scatter")
    return x.tolist(), part.tolist()


def test_what_nccl_has_not_is_staged():
    """Sums of int16, which NCCL lacks, are right and call nothing of NCCL but its warm-up."""
    world = NcclWorld(2)
    assert world.run_bare(short_integers) == [([3] * 4, [6] * 2)] * 2
    warming = [kinds for _, kinds in world.nccl.groups]
    assert len(warming) == 2 * len(WARM_UP_BYTES) * 4, "nothing but what connects the ranks"


def late(transport):
    data = torch.zeros(3)
    transport.streams.copy(data, torch.ones(3), StreamRole.COMPUTE)
    transport.finish(transport.iallreduce(data, divisor=2), SECONDS, "allreduce")
    return data.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_collectives_come_after_the_work_that_was_queued_before_them(seed):
    """The stream of the group waits for an event of the work queue; and divides at last."""
    assert NcclWorld(2, seed).run_bare(late) == [[1.0] * 3] * 2


def parts(transport):
    base = transport.base.split(transport.rank // 3, transport.rank)
    part = transport.for_subgroup(base)
    x = torch.ones(2)
    part.allreduce(x, SECONDS)
    part.close()
    return part.name, x[0].item()


def test_a_subgroup_has_a_communicator_of_its_own():
    """A subgroup opens a communicator of its ranks beside that of all ranks."""
    world = NcclWorld(4)
    assert world.run_bare(parts) == [("nccl", 3.0)] * 3 + [("nccl", 1.0)]
    made = [[comm.group.size for comm in world.nccl.modules[rank].made] for rank in range(4)]
    assert made == [[4, 3]] * 3 + [[4, 1]]
    assert all(c.ended == "destroy" for m in world.nccl.modules.values() for c in m.made)


# what goes wrong


def alone(cupy=14):
    (end,), nccl = LoopbackTransport.group(1), FakeNccl(LateDevice(), cupy)
    transport = NCCLTransport.open(end, nccl.device, (), SECONDS, nccl.library(0))
    return transport, nccl.modules[0].made[0]


def test_an_error_that_nccl_reports_later_is_raised_by_whoever_waits(monkeypatch):
    """An asynchronous NCCL error aborts the communicator and fails this and later calls."""
    transport, comm = alone()
    monkeypatch.setattr(transport.streams, "step", lambda: None)
    under_way = transport.iallreduce(torch.ones(2))
    assert under_way.done()
    assert transport.watch(SECONDS)
    comm.problem = "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"
    assert not transport.watch(SECONDS)
    assert comm.ended == "abort"
    words = "collectives cannot go on: NCCL reports: NCCL_ERROR_SYSTEM_ERROR: unhandled system"
    with pytest.raises(PeerError, match=words):
        under_way.done()
    with pytest.raises(PeerError, match=words):
        transport.iallreduce(torch.ones(2))


def test_a_device_that_does_not_end_a_collective_is_freed_at_the_deadline(monkeypatch):
    """Without progress for so long the communicator is aborted, which names the collective."""
    transport, comm = alone()
    monkeypatch.setattr(transport.streams, "step", lambda: None)
    words = "allreduce, which all its ranks had posted, has not ended in 0.05 s"
    with pytest.raises(PeerError, match=words):
        transport.allreduce(torch.ones(2), 0.05)
    assert comm.ended == "abort"
    with pytest.raises(PeerError, match=words):
        transport.ibroadcast(torch.ones(2), 0)


def without_the_last(transport):
    """Rank 1 never enters the collective of rank 0."""
    if transport.rank == 0:
        with pytest.raises(bf.WaitTimeoutError, match=r"rank 0: allreduce was not done in 0\.2 s"):
            transport.allreduce(torch.ones(2), 0.2)
        with pytest.raises(PeerError, match="an earlier collective was given up"):
            transport.ibroadcast(torch.ones(2), 0)
    transport.base.barrier(SECONDS)
    return transport.collectives.communicator.why


def test_a_collective_that_a_rank_never_enters_is_aborted_at_its_deadline():
    """It completes on no rank before all have entered it; giving it up frees the device."""
    why = "an earlier collective was given up while some ranks had not joined it"
    assert NcclWorld(2).run_bare(without_the_last) == [why, None]


def test_a_call_that_nccl_refuses_is_an_error_of_ours():
    """An NCCL call that fails at once raises PeerError that names the collective."""
    transport, comm = alone()

    def refuse(*_):
        raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")

    comm.broadcast = refuse
    with pytest.raises(PeerError, match="cannot go on: broadcast could not be started: NCCL_ERR"):
        transport.ibroadcast(torch.ones(2), 0)


def test_what_nccl_refuses_is_told_in_its_words():
    """A communicator that NCCL refuses raises EnvironmentProblem with NCCL's reason."""
    (end,), nccl = LoopbackTransport.group(1), FakeNccl(LateDevice())
    bindings = nccl.library(0)

    def refuse(*_):
        raise NcclError("NCCL_ERROR_INVALID_USAGE: invalid usage")

    bindings.nccl.NcclCommunicator = refuse
    with pytest.raises(EnvironmentProblem) as caught:
        NCCLTransport.open(end, nccl.device, (), SECONDS, bindings)
    assert str(caught.value) == (
        "rank 0: NCCL makes no communicator of 1 ranks (NCCL_ERROR_INVALID_USAGE: invalid usage); "
        "NCCL_DEBUG=WARN has it say more"
    )


def test_a_transport_serves_the_gpu_of_its_communicator():
    """``for_device`` serves the communicator's GPU and the host, and refuses other GPUs."""
    transport, _ = alone()
    assert transport.for_device(SimulatedStreams()) is transport
    transport.streams.device = torch.device("cuda", 0)
    other = SimulatedStreams()
    assert transport.for_device(other) is transport, "what is dropped lies on the host"
    other.device = torch.device("cuda", 1)
    with pytest.raises(
        ArgumentError, match="expected tensors on cuda:0, for which nccl was opened"
    ):
        transport.for_device(other)


def test_closing_gives_the_communicator_back_once():
    """Closing destroys an idle communicator; closing again does nothing."""
    transport, comm = alone()
    done = transport.iallreduce(torch.ones(3))
    while not done.done():
        pass
    transport.close()
    assert comm.ended == "destroy"
    transport.close()
    transport.free()
    assert comm.ended == "destroy"


def test_closing_aborts_what_is_under_way(monkeypatch):
    """Closing aborts a communicator whose work has not ended at its deadline."""
    transport, comm = alone()
    monkeypatch.setattr(transport.streams, "step", lambda: None)
    assert transport.iallreduce(torch.ones(2)).done()
    assert transport.watch(0.05)
    transport.close()
    assert comm.ended == "abort"


def test_closing_waits_for_what_the_device_has_yet_to_do():
    """Results of completed collectives are right though the transport is closed at once."""
    transport, comm = alone()
    data = torch.zeros(3)
    transport.streams.copy(data, torch.ones(3), StreamRole.COMPUTE)
    assert transport.iallreduce(data).done()
    transport.close()
    assert (comm.ended, data.tolist()) == ("destroy", [1.0] * 3)


# cupy


@pytest.mark.parametrize("cupy", [13, 14])
def test_communicators_open_by_what_either_cupy_takes_for_an_identity(cupy):
    """A tuple of signed numbers up to version 13, bytes since then, and never the other one."""
    transport, comm = alone(cupy)
    assert (comm.group.size, transport.collectives.communicator.why) == (1, None)
    with pytest.raises(TypeError):
        comm.owner.NcclCommunicator(1, bytes(128) if cupy == 13 else (0,) * 128, 0)


def with_cupy(monkeypatch, *, available=True, version=22703):
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.__version__, cupy.cuda, cuda.Stream = "13.6.0", cuda, SimpleNamespace
    cuda.nccl = SimpleNamespace(available=available, get_version=lambda: version)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    return cuda


def test_without_cupy_the_error_says_what_to_install(monkeypatch):
    """Without cupy the library raises EnvironmentProblem with the pip command."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(EnvironmentProblem, match=re.escape("pip install 'cupy-cuda12x>=13.6'")):
        library()
    assert versions() == (None, None)


@pytest.mark.parametrize("available", [True, False])
def test_versions_are_those_of_cupy_and_of_the_nccl_that_it_has_loaded(monkeypatch, available):
    """The versions are cupy's and its NCCL's; a cupy without NCCL is an error when used."""
    with_cupy(monkeypatch, available=available)
    assert versions() == ("13.6.0", 22703 if available else None)
    if not available:
        with pytest.raises(EnvironmentProblem, match="cupy has found no NCCL"):
            library()


def test_a_stream_is_nobody_else_s(monkeypatch):
    """It is one of the library's private streams, on the communicator's device."""
    with_cupy(monkeypatch)
    monkeypatch.setattr(nccl_library, "private_stream", lambda device: ("private", device))
    monkeypatch.setattr(nccl_library, "use_stream", lambda given: ("current", given))
    device = torch.device("cuda", 3)
    assert library().stream(device)() == ("current", ("private", device))


@pytest.mark.parametrize(("given", "expected"), [({}, "8"), ({"NCCL_MAX_P2P_NCHANNELS": "7"}, "7")])
def test_channels_are_limited_unless_the_user_has_set_how_many(given, expected):
    """Before NCCL opens a communicator."""
    with mock.patch.dict(os.environ, given, clear=True):
        limit_channels()
        assert dict(os.environ) == {"NCCL_MAX_P2P_NCHANNELS": expected}


@pytest.mark.parametrize(
    ("variables", "nccl", "expected"),
    [
        ({}, 22809, ("", False)),
        ({"NCCL_HOSTID": "rank-1"}, 22809, ("rank-1", False)),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 23007, ("", True)),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, 22907, ("", False)),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, 23007, ("", False)),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, None, ("", False)),
    ],
)
def test_what_nccl_is_told_of_ranks_that_share_a_gpu(variables, nccl, expected):
    """The name of the machine, and whether an NCCL that can share GPUs is to."""
    with mock.patch.dict(os.environ, variables, clear=True):
        assert nccl_library.gpu_sharing_settings(nccl) == expected


@pytest.mark.parametrize(
    ("one", "other", "refused"),
    [
        ({}, {}, True),
        ({"nccl_host": "a"}, {"nccl_host": "a"}, True),
        ({"nccl_host": "a"}, {"nccl_host": "b"}, False),
        ({"nccl_host": "a"}, {}, False),
        ({"nccl_shares_gpu": True}, {}, True),
        ({"nccl_shares_gpu": True}, {"nccl_shares_gpu": True}, False),
    ],
)
def test_ranks_share_a_gpu_where_nccl_lets_them(one, other, refused):
    """Where it takes them to be on two machines, and where both are told to share."""
    both = [
        DeviceCapabilities(rank, device="cuda", gpu="GPU-0", cupy="14", nccl=23007, **more)
        for rank, more in enumerate((one, other))
    ]
    problem = NCCLTransport.obstacle(*both)
    expected = "rank 0 and rank 1 share one GPU, which NCCL refuses" if refused else None
    assert problem == expected


MAPS = """
7f00-7f01 r-xp 00000000 00:00 1 /site-packages/nvidia/nccl/lib/libnccl.so.2
7f01-7f02 rw-p 00000000 00:00 1 /site-packages/nvidia/nccl/lib/libnccl.so.2
7f02-7f03 r-xp 00000000 00:00 2 /lib/libcudart.so.12
"""


@pytest.mark.parametrize(
    ("more", "wheel", "nccl", "words"),
    [
        ("", "2.27.3", 22703, ""),
        ("", None, 22703, ""),
        ("", "2.27.3", None, ""),
        ("", "2.27.3.post1", 22703, ""),
        (
            "",
            "2.26.2",
            22703,
            "cupy has loaded NCCL 22703, and torch's wheel is nvidia-nccl-cu12 2.26",
        ),
        (
            "7f04 r-xp 00 00:00 3 /usr/lib/libnccl.so.2.20.0\n",
            "2.27.3",
            22703,
            "this process has loaded several NCCL libraries, /site-packages/nvidia/nccl/lib/"
            "libnccl.so.2 and /usr/lib/libnccl.so.2.20.0: keep one wheel",
        ),
    ],
)
def test_two_nccl_libraries_in_one_process_are_doubted(
    tmp_path, monkeypatch, more, wheel, nccl, words
):
    """Two loaded NCCL files, or another version than the wheel's, are told; else nothing."""

    def version(name):
        if wheel is None or name != "nvidia-nccl-cu12":
            raise PackageNotFoundError(name)
        return wheel

    (tmp_path / "maps").write_text(MAPS + more)
    monkeypatch.setattr(nccl_library, "version", version)
    found = describe_conflict(nccl, tmp_path / "maps")
    assert found.startswith(words)
    assert bool(found) == bool(words)
    assert not describe_conflict(None, tmp_path / "absent")
