"""``mpi_cuda``: what MPI is handed, when, and that a real MPI library carries it.

The buffers lie on the host and are handed over as device memory is, which MPI for Python cannot
tell apart; only the MPI library's own way into GPU memory is not tested here.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from asyncddp.config import Config
from asyncddp.context import current
from asyncddp.context.context import Context, use
from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.errors import MismatchError, PeerError, UnknownNameError
from asyncddp.transport import DEVICE_TRANSPORTS
from asyncddp.transport.cuda import cuda_aware_mpi as mpi_cuda
from asyncddp.transport.cuda.capabilities import DeviceCapabilities, have_peer_access
from asyncddp.transport.cuda.cuda_aware_mpi import CudaAwareMPITransport, query_cuda_support
from asyncddp.transport.cuda.device_transport_selection import parse_transport_names
from asyncddp.transport.cuda.negotiation import (
    detect_capabilities,
    negotiate_from_config,
    negotiate_transport,
)
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport, device_transport_for
from asyncddp.transport.loopback import LoopbackTransport
from asyncddp.transport.mpi.runtime import MPI, initialize_mpi
from tests.conformance import test_collectives as collectives
from tests.conformance import test_mismatches as mismatches
from tests.conformance import test_neighbor_allgather as gathering
from tests.conformance import test_neighbor_allreduce as neighbors
from tests.conformance import test_transports as transports
from tests.support import DEFAULT_SETTINGS, on
from tests.support.oracle import SHAPES
from tests.support.simulated_streams import SimulatedStreams
from tests.support.staged import on_a_stand_in


@pytest.fixture(scope="module", autouse=True)
def mpi():
    """The library's functions may be called: mpi4py alone does not start it here."""
    initialize_mpi()


class Comm:
    """A communicator that checks and notes what it is handed, and ends a request when told."""

    def __init__(self):
        self.calls = []

    def Set_errhandler(self, handler):
        assert handler == MPI.ERRORS_RETURN

    def _begin(self, kind, message, peer, tag):
        buffer, datatype = message
        assert datatype == MPI.BYTE
        interface = buffer.__cuda_array_interface__
        assert interface["typestr"] == "|u1"
        assert "stream" not in interface
        self.calls.append((kind, *interface["data"], *interface["shape"], peer, tag))
        return MPI.REQUEST_NULL

    def Isend(self, message, peer, tag):
        return self._begin("send", message, peer, tag)

    def Irecv(self, message, peer, tag):
        return self._begin("receive", message, peer, tag)


def transport(laziness=0):
    streams, comm = SimulatedStreams(laziness), Comm()
    return CudaAwareMPITransport(LoopbackTransport.group(2)[0], streams, comm), streams, comm


def test_mpi_gets_the_tensor_s_own_memory_as_bytes():
    """MPI is given the tensor's own address and size in bytes, without a copy."""
    sender, _, comm = transport()
    data, out = torch.zeros(7, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.complex64)
    assert sender.isend(data, 1, 5).done()
    assert sender.irecv(out, 1, 6).done()
    assert comm.calls == [
        ("send", data.data_ptr(), False, 14, 1, 5),
        ("receive", out.data_ptr(), False, 24, 1, 6),
    ]


def test_large_tensors_go_in_pieces_that_c_ints_can_count(monkeypatch):
    """A tensor longer than a piece goes in consecutive messages that cover it."""
    monkeypatch.setattr(mpi_cuda, "_PIECE", 1000)
    sender, _, comm = transport()
    data = torch.zeros(2500, dtype=torch.uint8)
    sender.isend(data, 1, 5)
    address = data.data_ptr()
    assert [(call[1] - address, call[3]) for call in comm.calls] == [
        (0, 1000),
        (1000, 1000),
        (2000, 500),
    ]


def test_mpi_reads_nothing_before_the_work_that_makes_it_has_ended():
    """The event of the work queue is asked, nothing is waited for."""
    sender, streams, comm = transport(laziness=5)
    data = torch.zeros(4)
    streams.copy(data, torch.ones(4), StreamRole.COMPUTE)
    sending = sender.isend(data, 1, 0)
    assert not sending.done()
    assert comm.calls == []
    while not sending.done():
        pass
    assert data.tolist() == [1.0] * 4
    assert len(comm.calls) == 1


def test_messages_start_in_their_order():
    """Messages that wait for queued work start in the order of their sends."""
    sender, streams, comm = transport(laziness=3)
    scratch = torch.zeros(1)
    for tag in range(4):
        streams.copy(scratch, torch.ones(1), StreamRole.COMPUTE)
        last = sender.isend(torch.zeros(1), 1, tag)
    while not last.done():
        pass
    assert [call[-1] for call in comm.calls] == [0, 1, 2, 3]


def test_a_receive_that_was_given_up_before_it_began_never_begins():
    """A receive abandoned before its event has completed is never posted to MPI."""
    receiver, streams, comm = transport(laziness=1)
    streams.copy(torch.zeros(1), torch.ones(1), StreamRole.COMPUTE)
    arriving = receiver.irecv(torch.zeros(4), 1, 0)
    arriving.abandon()
    for _ in range(10):
        receiver.isend(torch.zeros(1), 1, 1).done()
    assert {call[0] for call in comm.calls} == {"send"}


def test_what_mpi_refuses_is_an_error_of_ours():
    """An MPI exception at the start of a message is raised as PeerError with its text."""
    sender, _, comm = transport()

    def refuse(*_):
        raise MPI.Exception(MPI.ERR_BUFFER)

    comm.Isend = refuse
    with pytest.raises(PeerError, match=r"a message between GPUs could not be started: MPI_ERR_BU"):
        sender.isend(torch.zeros(1), 1, 1).done()


def test_collectives_are_staged():
    """Open MPI takes no GPU memory in collectives that do not block."""
    assert CudaAwareMPITransport.iallreduce is CudaStagedTransport.iallreduce
    assert CudaAwareMPITransport.ibroadcast is CudaStagedTransport.ibroadcast
    assert CudaAwareMPITransport.iallgather is CudaStagedTransport.iallgather


# whether MPI takes GPU memory


class Answers:
    """A library with one of the two functions."""

    def __init__(self, name, answer):
        def mpich(kind, found):
            assert kind == 0
            found._obj.value = answer
            return 0

        by_name = {"MPIX_Query_cuda_support": lambda: answer, "MPIX_GPU_query_support": mpich}
        if name:
            setattr(self, name, by_name[name])


@pytest.mark.parametrize("name", ["MPIX_Query_cuda_support", "MPIX_GPU_query_support"])
@pytest.mark.parametrize("answer", [0, 1])
def test_the_library_is_asked(monkeypatch, name, answer):
    """CUDA support is what the loaded MPI library's query function says."""
    monkeypatch.setattr(mpi_cuda, "_loaded", lambda *names: ["/lib/libmpi.so.40"])
    monkeypatch.setattr(mpi_cuda.ctypes, "CDLL", lambda path: Answers(name, answer))
    assert query_cuda_support({}) is bool(answer)


@pytest.mark.parametrize("name", sorted(mpi_cuda._DISABLING_VARIABLES))
def test_a_variable_that_turns_it_off_wins(monkeypatch, name):
    """A variable of an MPI library that is 0 wins over a library that says yes; 1 leaves it so."""
    monkeypatch.setattr(mpi_cuda, "_loaded", lambda *names: ["/lib/libmpi.so.40"])
    monkeypatch.setattr(mpi_cuda.ctypes, "CDLL", lambda path: Answers("MPIX_Query_cuda_support", 1))
    assert query_cuda_support({name: "1"}) is True
    assert query_cuda_support({name: "0"}) is False


@pytest.mark.parametrize(
    ("pml", "asked", "loaded", "expected"),
    [
        ("ucx", "cuda_ipc,mpi_cuda", ["/lib/ucx/libuct_cuda.so.0"], True),
        ("ucx", "auto", ["/lib/ucx/libuct_cuda.so.0"], False),
        ("ucx", "mpi_cuda", [], False),
        ("ob1", "mpi_cuda", ["/lib/ucx/libuct_cuda.so.0"], False),
    ],
)
def test_ucx_may_take_gpu_memory_for_an_open_mpi_without_cuda(
    monkeypatch, pml, asked, loaded, expected
):
    """Where UCX sends the messages, has its part for CUDA, and the user asks for it by name."""

    def found(*names):
        return loaded if names == ("libuct_cuda",) else ["/lib/libmpi.so.40"]

    monkeypatch.setattr(mpi_cuda, "_loaded", found)
    monkeypatch.setattr(mpi_cuda.ctypes, "CDLL", lambda path: Answers("MPIX_Query_cuda_support", 0))
    given = {"OMPI_MCA_pml": pml, "ASYNCDDP_DEVICE_TRANSPORTS": asked}
    assert query_cuda_support(given) is expected


def test_libraries_of_the_process_are_found_by_name():
    """Every program has libc, and none a library of no such name."""
    assert all("/libc" in path for path in mpi_cuda._loaded("libc"))
    assert mpi_cuda._loaded("libc")
    assert mpi_cuda._loaded("libnone_of_that_name") == []


def test_a_library_that_says_nothing_is_not_believed(monkeypatch):
    """CUDA support is None where no loaded library has a function to ask."""
    monkeypatch.setattr(mpi_cuda, "_loaded", lambda *names: ["/lib/libmpi.so.12"])
    monkeypatch.setattr(mpi_cuda.ctypes, "CDLL", lambda path: Answers("", 0))
    assert query_cuda_support({}) is None
    monkeypatch.setattr(mpi_cuda, "_loaded", lambda *names: [])
    assert query_cuda_support({}) is None


# over a real MPI library


def over_mpi_cuda(base, case, *args):
    transport = CudaAwareMPITransport.open(base, SimulatedStreams(1), (), 60.0)
    return getattr(transports, case)(transport, *args)


CASES = {
    "by_tag_backwards": (),
    "same_tag_in_order": (),
    "every_dtype_in_bulk": (),
    "around_pieces": ([0, 1, 999, 1000, 1001, 2000, 100_001],),
    "given_up_receive": (),
    "given_up_send": (),
    "every_collective": (),
    "several_at_once": (),
    "splits": (),
}


@on("mpi-2")
@pytest.mark.parametrize("case", CASES)
def test_a_real_mpi_library_carries_it(world, case):
    """``mpi_cuda`` over a real MPI library keeps the contract of transports."""
    told = world.run_bare(over_mpi_cuda, case, *CASES[case])
    if case == "given_up_receive":
        assert told[0] == ([0.0] * 3, [1.0] * 3)


def agreed(base, mpi_cuda_says, wanted):
    mine = DeviceCapabilities(
        base.rank, device="cuda", gpu=f"GPU-{base.rank}", mpi_cuda=mpi_cuda_says
    )
    streams = SimulatedStreams(1)
    choice = negotiate_transport(base, parse_transport_names(wanted), mine, streams, 10.0)
    return choice.transport, dict(choice.refused), device_transport_for(base, streams).name


@on("mpi-2")
def test_ranks_agree_on_a_transport_and_use_it(world):
    """Ranks use the first transport on the list that all can; a refused one has its reason."""
    told = world.run_bare(agreed, True, "mpi_cuda")
    assert told == [("mpi_cuda", {}, "mpi_cuda")] * 2
    reason = "the MPI library of rank 0 and rank 1 does not say that it takes GPU memory"
    told = world.run_bare(agreed, False, "mpi_cuda,cuda_staged")
    assert told == [("cuda_staged", {"mpi_cuda": reason}, "cuda_staged")] * 2
    ((transport, refused, used), *_) = world.run_bare(agreed, True, "nccl,mpi_cuda")
    assert (transport, used) == ("mpi_cuda", "mpi_cuda")
    assert refused["nccl"].startswith("rank 0 and rank 1 cannot import cupy")


def agreed_mixed(base):
    mine = DeviceCapabilities(base.rank, device="cuda" if base.rank else "cpu")
    with pytest.raises(MismatchError) as caught:
        negotiate_transport(base, ("cuda_staged",), mine, None, 10.0)
    return str(caught.value)


@on("mpi-2")
def test_a_rank_without_a_gpu_is_named_at_the_start(world):
    """Ranks of which one has no GPU get MismatchError that says who has what."""
    for told in world.run_bare(agreed_mixed):
        assert told.startswith("rank 0 has tensors on cpu and rank 1 has tensors on cuda")


# what the user says


def test_transports_are_named_with_commas_or_all_at_once():
    """A list names transports in order; ``auto`` is all of them but ``cuda_staged``."""
    assert parse_transport_names("mpi_cuda,cuda_staged") == ("mpi_cuda", "cuda_staged")
    assert set(parse_transport_names("auto")) == set(DEVICE_TRANSPORTS) - {"cuda_staged"}


@pytest.mark.parametrize("text", ["mpi-cuda", "cuda_staged,tcp", "", ","])
def test_a_transport_that_there_is_not_is_told_with_those_that_there_are(text):
    """An unknown or empty name raises UnknownNameError with the variable and all names."""
    known = (
        "ASYNCDDP_DEVICE_TRANSPORTS: expected auto, or some of cuda_ipc, cuda_staged, mpi_cuda, nc"
    )
    with pytest.raises(UnknownNameError, match=re.escape(known)):
        parse_transport_names(text)


def test_a_rank_without_gpus_says_so():
    """Without a visible GPU a rank's capabilities are the defaults of a CPU."""
    assert detect_capabilities(3, 1, 0) == DeviceCapabilities(3, 1)


def test_a_rank_says_which_gpu_it_would_use(monkeypatch):
    """Capabilities hold the UUID of the rank's GPU and of those out of its reach."""

    class Properties:
        def __init__(self, index):
            self.uuid = f"uuid of GPU {index}"

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(
        torch.cuda, "can_device_access_peer", lambda one, other: (one, other) != (1, 0)
    )
    facts = detect_capabilities(3, 1, 3)
    known = DeviceCapabilities(3, 1, "cuda", "uuid of GPU 1", out_of_reach=("uuid of GPU 0",))
    assert facts == replace(known, mpi_cuda=facts.mpi_cuda)


def test_a_gpu_of_which_no_name_is_known_has_none(monkeypatch):
    """It is read by nobody, though torch gives access."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: object())
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    facts = detect_capabilities(0, 0, 0)
    assert facts.gpu == ""
    assert not have_peer_access(facts, replace(facts, rank=1))


def in_a_world():
    context = current()
    return context.device_choice.transport, device_transport_for(
        context.transport, SimulatedStreams()
    ).name


@on("mpi-2")
def test_a_world_without_gpus_comes_up_whatever_is_asked_for(world):
    """A world without GPUs comes up with ``cuda_staged`` though ``mpi_cuda`` is asked for."""
    told = world.run(in_a_world, settings={"device_transports": "mpi_cuda"})
    assert told == [("cuda_staged", "cuda_staged")] * 2


@on("mpi-2")
def test_a_transport_that_there_is_not_ends_init_on_all_ranks(world):
    """``init`` with an unknown transport name raises UnknownNameError on every rank."""
    for outcome in world.outcomes(in_a_world, settings={"device_transports": "smoke"}):
        assert outcome.error == "UnknownNameError"
        assert "expected auto, or some of cuda_ipc, cuda_staged, mpi_cuda" in outcome.message


def test_ranks_that_are_threads_stage():
    """Ranks that are threads use ``cuda_staged`` whatever is asked for, with no refusals."""
    config = Config.from_environment({"ASYNCDDP_DEVICE_TRANSPORTS": "mpi_cuda"})
    choice = negotiate_from_config(LoopbackTransport.group(2)[0], config, machine=0, rank_on_host=0)
    assert (choice.transport, dict(choice.refused)) == ("cuda_staged", {})


# verbs over it


def verbs_over(base, names, taken, dtype, machines=1):
    """What the conformance tests ask of neighbours and collectives, over transports agreed on."""
    with on_a_stand_in(piece=30_000, pace=1e-4 if machines > 1 else None) as streams:
        machine = base.rank * machines // base.size
        mine = DeviceCapabilities(base.rank, machine, "cuda", f"GPU-{machine}", mpi_cuda=True)
        choice = negotiate_transport(base, parse_transport_names(names), mine, streams, 10.0)
        assert choice.transport == taken, choice
        context = Context(base, Config(**DEFAULT_SETTINGS))
        with use(context):
            neighbors.averages_shapes(dtype, SHAPES)
            gathering.gathers(dtype)
            collectives.averages(dtype)
            for error, message in [mismatches.neighbour_mismatch("shape", "blocking")]:
                assert error == "MismatchError", message
        used = {type(found).__name__ for found in base.device_transports.values()}
        context.close("the case has ended")
    return used


@on("mpi-2")
@pytest.mark.parametrize(
    ("transport", "name"), [("mpi_cuda", "CudaAwareMPITransport"), ("cuda_ipc", "CudaIPCTransport")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verbs_between_processes(world, transport, name, dtype):
    """Verbs use the agreed transport between processes, and are right over it."""
    assert world.run_bare(verbs_over, transport, transport, dtype) == [{name}] * 2


@on("mpi-4")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_verbs_between_machines_and_inside_them_by_transports_of_their_own(world, dtype):
    """Two ranks on each of two GPUs: memory that both read inside, messages by MPI between."""
    told = world.run_bare(verbs_over, "auto", "cuda_ipc+mpi_cuda", dtype, 2)
    assert told == [{"CompositeTransport"}] * 4
