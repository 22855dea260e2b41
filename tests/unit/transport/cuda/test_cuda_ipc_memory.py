"""``cuda_ipc``: when memory that peers have mapped is freed, and what cannot be exported."""

from __future__ import annotations

import ctypes

import pytest
import torch

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.errors import PeerError
from asyncddp.serialization import pack, unpack
from asyncddp.transport.cuda.capabilities import DeviceCapabilities
from asyncddp.transport.cuda.negotiation import negotiate_transport
from tests.support import on
from tests.support.ipc import NEVER, Pair
from tests.support.simulated_streams import SimulatedStreams


def fan_out(ranks, data, tag):
    """Rank 0's tensor, read by all others."""
    tags = dict.fromkeys(range(1, len(ranks.transports)), tag)
    exported = ranks.transports[0].export_tensor(data, tags)
    for rank in tags:
        assert torch.equal(ranks.receive(data, tag, rank), data)
    ranks.finish(*exported.values())


def keeping_no_buffers(ranks):
    """Each buffer of rank 0 is given up once it was read."""
    memory = ranks.transports[0].memory
    memory.buffers._limit = 0
    return memory


def unheld_view(tensor):
    """The same memory, which a view by its address does not keep."""
    raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=tensor.dtype)


# retired memory


def test_memory_is_kept_until_all_importers_have_closed_it():
    """Of two importers the first has closed it, the other has yet to hear of it."""
    three = Pair(near=(0, 1, 2), size=3)
    memory = keeping_no_buffers(three)
    fan_out(three, torch.randn(500), 0)
    three.drive(0, 1)
    assert [list(one.importers) for one in memory.retired.values()] == [[2]]
    assert len(three.transports[1]._importer.imported) == 0
    three.drive()
    assert not memory.retired
    assert len(three.transports[2]._importer.imported) == 0


def test_memory_that_a_device_still_reads_is_not_closed():
    """Its owner asks for it to be closed while the reading is queued; that is done first."""
    both, out = Pair(laziness=NEVER), torch.zeros(64)
    one, other = both.transports
    memory = keeping_no_buffers(both)
    exported = one.export_tensor(torch.ones(64), {1: 0})[1]
    imported = other.import_tensor((64,), torch.float32, 0, 0)
    assert imported.done()
    unheld = unheld_view(imported.tensor)
    other.streams.copy(out, unheld, StreamRole.COMPUTE)  # as a kernel holds no tensor
    imported.release()
    assert exported.done()
    for _ in range(3):
        one._drive_tasks()
        other._drive_tasks()
    assert len(memory.retired) == len(other._importer.imported) == 1
    while both.work():
        pass
    both.drive()
    assert out.tolist() == [1.0] * 64
    assert not memory.retired
    assert len(other._importer.imported) == 0


def test_memory_that_somebody_still_holds_is_not_said_to_be_closed():
    """A caller that keeps the peer's tensor beyond its release keeps it mapped."""
    both = Pair()
    one, other = both.transports
    memory = keeping_no_buffers(both)
    exported = one.export_tensor(torch.ones(64), {1: 0})[1]
    imported = other.import_tensor((64,), torch.float32, 0, 0)
    both.finish(imported)
    held = imported.tensor
    imported.release()
    both.finish(exported)
    both.drive()
    assert len(memory.retired) == 1
    del held
    both.drive()
    assert not memory.retired


def test_whoever_leaves_has_closed_everything():
    """A rank that has closed its transport is not waited for, now or later."""
    three = Pair(near=(0, 1, 2), size=3)
    one, _, gone = three.transports
    memory = keeping_no_buffers(three)
    fan_out(three, torch.randn(500), 0)
    three.drive(0, 1)
    assert len(memory.retired) == 1
    gone._reachable = frozenset()  # it waits for nobody
    gone._importer.close([0, 1])
    three.drive(0, 1)
    assert not memory.retired
    assert memory.left == {2}
    exported = one.export_tensor(torch.randn(500), {1: 1, 2: 1})
    three.receive(torch.randn(500), 1, 1)
    three.finish(exported[1])
    three.transports[0]._exporter.memory.confirm_closed(1, 99)
    assert not memory.retired, "an id that is not retired is nobody's"


@pytest.mark.parametrize("seed", range(3))
def test_tensors_that_come_and_go_are_never_freed_while_they_are_open(seed):
    """Of any size, with no buffers kept; the devices check each step."""
    torch.manual_seed(seed)
    three = Pair(near=(0, 1, 2), size=3, laziness=seed)
    memory = keeping_no_buffers(three)
    kept = {}
    for step in range(40):
        number = int(torch.randint(0, 4, ()))
        if number not in kept or torch.rand(()) < 0.3:
            size = int(torch.randint(1, 2000, ()))
            kept[number] = torch.randn(size)
        fan_out(three, kept[number], step)
    kept.clear()
    three.drive(*range(3), *range(3))
    assert not memory.retired
    assert [len(rank._importer.imported) for rank in three.transports] == [0, 0, 0]


# what cannot be exported


def test_a_buffer_that_cannot_be_exported_fails_at_both_ends(monkeypatch):
    """Neither the sender nor the receiver waits for its deadline."""
    both = Pair()
    one, other = both.transports

    def refuse(_):
        raise RuntimeError("expandable segments are not shared here")

    monkeypatch.setattr(both.devices[0], "export_memory", refuse)
    words = "expandable segments are not"
    sending, arriving = one.isend(torch.ones(3), 1, 0), other.irecv(torch.empty(3), 0, 0)
    with pytest.raises(PeerError, match=f"cannot be exported to rank 1: .*{words}"):
        both.finish(sending)
    with pytest.raises(PeerError, match=r"rank 0 shows on its device cannot be opened: .* export"):
        both.finish(arriving)
    assert not one._exporter.busy
    monkeypatch.undo()
    assert both.exchange(torch.ones(3), 1).tolist() == [1.0] * 3


class ExpandableSegments(SimulatedStreams):
    """A device whose memory has handles of any length, as a segment of gigabytes has."""

    def export_memory(self, tensor):
        return pack((super().export_memory(tensor), b"x" * 100_000))

    def import_memory(self, token):
        return super().import_memory(unpack(token, tuple[bytes, bytes], "a token")[0])


class Refusing(SimulatedStreams):
    """A device whose memory has no handles."""

    def export_memory(self, tensor):
        raise RuntimeError("expandable segments are not shared here")


def opened(base, device):
    mine = DeviceCapabilities(base.rank, device="cuda", gpu="GPU-a")
    return negotiate_transport(base, ("cuda_ipc",), mine, device(1, pace=1e-4), 60.0).transport


@on("mpi-2")
def test_ranks_with_long_handles_use_them_and_ranks_without_stage(world):
    """The trial at the opening finds it, before any verb does."""
    assert world.run_bare(opened, ExpandableSegments) == ["cuda_ipc"] * 2
    assert world.run_bare(opened, Refusing) == ["cuda_staged"] * 2
