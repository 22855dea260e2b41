"""What goes wrong over ``cuda_ipc``, which ranks it serves, and how they agree about it."""

from __future__ import annotations

import time

import pytest
import torch

from asyncddp.errors import ArgumentError, PeerError
from asyncddp.transport.cuda.capabilities import DeviceCapabilities, have_peer_access
from asyncddp.transport.cuda.ipc import exporter as cuda_ipc_sending
from asyncddp.transport.cuda.negotiation import negotiate_transport
from asyncddp.transport.cuda.staged_transport import device_transport_for
from tests.support import on
from tests.support.ipc import Pair
from tests.support.simulated_streams import SimulatedStreams

SECONDS = 60.0


@pytest.fixture
def small(monkeypatch):
    """What comes in pieces elsewhere has a few kilobytes."""
    monkeypatch.setattr(cuda_ipc_sending, "MAX_COPY_BYTES", 1 << 12)
    monkeypatch.setattr(cuda_ipc_sending, "_PIECE", 1 << 10)


def test_a_receive_that_was_given_up_takes_no_message():
    """An abandoned receive takes no message; the next one of its tag gets it."""
    both, kept = Pair(), torch.zeros(3)
    both.transports[1].irecv(kept, 0, 7).abandon()
    assert both.exchange(torch.ones(3), 7).tolist() == [1.0] * 3
    assert kept.tolist() == [0.0] * 3


@pytest.mark.parametrize("when", ["before it comes", "once it is here", "in the middle"])
def test_an_import_that_nobody_wants_completes_its_export(small, when):
    """An import that is released or abandoned completes its export, and has no tensor."""
    both = Pair()
    one, other = both.transports
    size = 2500 if when == "in the middle" else 64
    imported = other.import_tensor((size,), torch.float32, 0, 0)
    if when == "before it comes":
        imported.release()
    exported = one.export_tensor(torch.ones(size), {1: 0})[1]
    imported.done()
    if when != "before it comes":
        imported.abandon()
    both.finish(exported, imported)
    with pytest.raises(
        RuntimeError, match="expected an imported tensor that is done and not yet released"
    ):
        imported.tensor  # noqa: B018


def test_the_buffer_exported_to_a_dead_peer_is_not_reused():
    """It may be read yet: nobody else writes there. What goes to others goes on."""
    three = Pair(near=(0, 1, 2), size=3)
    one = three.transports[0]
    lost = one.export_tensor(torch.ones(30), {1: 0})[1]
    one._message_transport.failed_peers = lambda: {1: "its process has failed"}
    for transfer in (lost, one.irecv(torch.zeros(3), 1, 0)):
        with pytest.raises(PeerError, match="rank 1 is lost: its process has failed"):
            three.finish(transfer)
    assert not one._exporter.busy
    for tag in range(3):
        data = torch.randn(30)
        exported = one.export_tensor(data, {2: tag})[2]
        assert torch.equal(three.receive(data, tag, 2), data)
        three.finish(exported)
    assert one.memory.buffers.num_allocated == 2


@pytest.mark.parametrize("what", ["memory", "event"])
def test_what_cannot_be_opened_is_told_with_the_rank_that_exports_it(monkeypatch, what):
    """Memory or an event that cannot be opened raises PeerError with its owner's rank."""
    both = Pair()
    one, other = both.transports

    def fail(_):
        raise RuntimeError("invalid resource handle")

    broken = "import_memory" if what == "memory" else "import_event"
    monkeypatch.setattr(other.streams, broken, fail)
    one.isend(torch.ones(3), 1, 0)
    with pytest.raises(PeerError, match="rank 0 shows on its device cannot be opened: invalid"):
        both.finish(other.irecv(torch.empty(3), 0, 0))


def test_an_answer_that_cannot_be_opened_fails_its_own_transfer(monkeypatch):
    """A reader's event that cannot be opened raises PeerError from the export it answers."""
    both = Pair()

    def fail(_):
        raise RuntimeError("invalid resource handle")

    monkeypatch.setattr(both.devices[0], "import_event", fail)
    exported = both.transports[0].export_tensor(torch.ones(3), {1: 0})[1]
    both.receive(torch.empty(3), 0)
    with pytest.raises(PeerError, match="after which rank 1 has read cannot be opened: invalid"):
        both.finish(exported)


def test_a_transport_serves_one_gpu_of_its_rank():
    """``for_device`` serves the device that ``cuda_ipc`` was opened for and refuses others."""
    one, _ = Pair().transports
    assert one.for_device(SimulatedStreams()) is one, "what is dropped, is dropped on the host"
    strange = SimulatedStreams()
    strange.device = torch.device("cuda", 1)
    with pytest.raises(ArgumentError, match="expected tensors on cpu, for which cuda_ipc was"):
        one.for_device(strange)


# agreement and trial


def agreed(base, spoilt):
    mine = DeviceCapabilities(base.rank, device="cuda", gpu="GPU-a")
    streams = (spoilt if base.rank == 1 else SimulatedStreams)(1, pace=1e-4)
    choice = negotiate_transport(base, ("cuda_ipc",), mine, streams, SECONDS)
    return (
        choice.transport,
        dict(choice.refused),
        type(device_transport_for(base, streams)).__name__,
    )


class Spoilt(SimulatedStreams):
    """A device that shows others something else than it was asked to."""

    def export_memory(self, tensor):
        return super().export_memory(self.allocate_exportable(tensor.nbytes).fill_(7))


class SpoiltAgain(SimulatedStreams):
    """A device whose second copy of a tensor is wrong."""

    copies = 0

    def copy(self, out, source, role):
        self.copies += 1
        super().copy(out, source if self.copies < 2 else torch.full_like(source, 7), role)


TABLE = {
    "the same GPU": (
        DeviceCapabilities(0, 1, "cuda", "a"),
        DeviceCapabilities(1, 1, "cuda", "a"),
        True,
    ),
    "two that see each other": (
        DeviceCapabilities(0, 1, "cuda", "a", out_of_reach=("c",)),
        DeviceCapabilities(1, 1, "cuda", "b"),
        True,
    ),
    "one that does not reach the other": (
        DeviceCapabilities(0, 1, "cuda", "a", out_of_reach=("b",)),
        DeviceCapabilities(1, 1, "cuda", "b"),
        False,
    ),
    "names alike on two machines": (
        DeviceCapabilities(0, 1, "cuda", "a"),
        DeviceCapabilities(1, 2, "cuda", "a"),
        False,
    ),
    "no names": (DeviceCapabilities(0, 1, "cuda"), DeviceCapabilities(1, 1, "cuda"), False),
}


@pytest.mark.parametrize("case", TABLE)
def test_gpus_may_be_in_reach_unless_cuda_says_no(case):
    """GPUs of one machine, which CUDA has not said to be out of each other's reach, are tried."""
    one, other, expected = TABLE[case]
    assert have_peer_access(one, other) is have_peer_access(other, one) is expected


def test_what_is_freed_in_place_of_being_used_waits_for_nobody():
    """A transport that failed its trial closes its messages' transport alone."""
    one, closed = Pair().transports[0], []
    one.export_tensor(torch.ones(3), {1: 0})
    one._message_transport.close = lambda: closed.append("messages")
    one.base.close = lambda: closed.append("base")
    began = time.monotonic()
    one.free()
    one.watch(1.0)
    assert closed == ["messages"]
    assert time.monotonic() - began < SECONDS / 2


@on("mpi-2")
def test_ranks_that_share_a_gpu_agree(world):
    """Two processes on one GPU that ask for ``cuda_ipc`` agree on it and use it."""
    told = world.run_bare(agreed, SimulatedStreams)
    assert told == [("cuda_ipc", {}, "CudaIPCTransport")] * 2


@on("mpi-2")
def test_a_trial_that_does_not_arrive_as_it_was_sent_keeps_all_ranks_from_the_transport(world):
    """One rank sees it, all of them stage, and each is told which one it is."""
    reason = {"cuda_ipc": "rank 0: a trial out of GPU memory did not arrive as it was sent"}
    for spoilt in (Spoilt, SpoiltAgain):
        told = world.run_bare(agreed, spoilt)
        assert told == [("cuda_staged", reason, "CudaStagedTransport")] * 2
