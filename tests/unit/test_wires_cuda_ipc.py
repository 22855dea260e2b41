"""``cuda_ipc``: the protocol between processes, over memory of the host that both have mapped."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.errors import ArgumentError, PeerError
from asyncddp.memory.streams import Queue
from asyncddp.memory.streams_host import HostStreams
from asyncddp.transport import cuda_ipc
from asyncddp.transport.cuda_ipc import _DEPTH, CudaIPC
from asyncddp.transport.cuda_staged import CudaStaged, on_device
from asyncddp.transport.device_agreement import agree, try_out
from asyncddp.transport.device_routes import DeviceFacts
from asyncddp.transport.loopback import Loopback
from tests.conformance import test_transports as transports
from tests.support import DEFAULTS, on

SECONDS = 10.0


def over_ipc(base, case, *args):
    near = [rank for rank in range(base.size) if rank != base.rank]
    return getattr(transports, case)(CudaIPC.open(base, HostStreams(1), near), *args)


CASES = {
    "by_tag_backwards": (),
    "same_tag_in_order": (),
    "every_dtype_in_bulk": (),
    "around_pieces": ([0, 1, 999, 1000, 1001, 2000, 30_001],),
    "given_up_receive": (),
    "given_up_send": (),
    "several_at_once": (),
    "splits": (),
    "closes_twice": (),
}


@on("mpi-2")
@pytest.mark.parametrize("case", CASES)
def test_the_contract_of_transports_between_processes(world, case):
    told = world.run_bare(over_ipc, case, *CASES[case])
    if case == "given_up_receive":
        assert told[0] == ([0.0] * 3, [1.0] * 3)


def pair(near=(0, 1), laziness=0):
    """Two wires in one thread."""
    first, second = Loopback.group(2)
    parts = [Loopback.group(2), Loopback.group(2)]
    streams = HostStreams(laziness)
    return [
        CudaIPC(base, streams, set(near) - {base.rank}, parts[0][place], parts[1][place])
        for place, base in enumerate((first, second))
    ]


def exchange(sender, receiver, data, tag=0):
    out = torch.empty_like(data)
    arriving, sending = (
        receiver.irecv(out, sender.rank, tag),
        sender.isend(data, receiver.rank, tag),
    )
    for _ in range(1000):
        ended = [arriving.done(), sending.done()]
        if all(ended):
            return out
    raise AssertionError(f"nothing moves: {ended}")


def test_buffers_are_lent_again_and_opened_once(monkeypatch):
    monkeypatch.setattr(cuda_ipc, "_PIECE", 4096)
    one, other = pair(laziness=2)
    opened = []
    borrow = other.streams.borrow
    monkeypatch.setattr(
        other.streams, "borrow", lambda token: opened.append(token) or borrow(token)
    )
    for tag in range(5):
        data = torch.randn(9000)
        assert torch.equal(exchange(one, other, data, tag), data)
    assert one._buffers.made == len(opened) == _DEPTH


def test_a_note_leaves_only_once_its_copy_has_been_made():
    one, other = pair(laziness=20)
    data, out = torch.ones(100), torch.zeros(100)
    sending, arriving = one.isend(data, 1, 0), other.irecv(out, 0, 0)
    assert not one._notes._hub.sends, "the copy has not been made"
    while not sending.done():
        arriving.done()
    assert out.tolist() == [1.0] * 100


def test_an_answer_leaves_only_once_what_was_lent_has_been_read():
    """Else the sender would write the next piece over it."""
    one, other = pair(laziness=3)
    sending, out = one.isend(torch.ones(100), 1, 0), torch.zeros(100)
    arriving = other.irecv(out, 0, 0)
    while not sending.done():
        assert not one._buffers.waiting
        arriving.done()
    assert out.tolist() == [1.0] * 100
    assert one._buffers.waiting


def test_the_tensor_is_copied_after_the_work_that_makes_it():
    one, other = pair(laziness=50)
    late = torch.zeros(10)
    one.streams.copy(late, torch.ones(10), Queue.WORK)
    assert exchange(one, other, late).tolist() == [1.0] * 10


def test_ranks_on_other_gpus_are_staged():
    one, other = pair(near=())
    data = torch.randn(10)
    assert torch.equal(exchange(one, other, data), data)
    assert one._buffers.made == 0


def test_a_receive_that_was_given_up_takes_no_note():
    one, other = pair()
    kept, out = torch.zeros(3), torch.zeros(3)
    other.irecv(kept, 0, 7).abandon()
    sending, arriving = one.isend(torch.ones(3), 1, 7), other.irecv(out, 0, 7)
    while not (arriving.done() and sending.done()):
        pass
    assert (kept.tolist(), out.tolist()) == ([0.0] * 3, [1.0] * 3)


def test_what_fails_beneath_is_raised():
    one, _ = pair()

    def fail(*_):
        raise PeerError("the peer is gone")

    one._notes.isend = fail
    sending = one.isend(torch.ones(3), 1, 0)
    with pytest.raises(PeerError, match="the peer is gone"):
        sending.done()


def test_a_buffer_that_is_not_kept_is_forgotten(monkeypatch):
    """Another one may lie at its address, with another handle."""
    one, other = pair()
    monkeypatch.setattr(one._buffers, "_limit", 0)
    data = torch.randn(10)
    assert torch.equal(exchange(one, other, data), data)
    assert not one._tokens


def test_a_wire_serves_one_gpu_of_its_rank():
    one, _ = pair()
    assert one.for_device(HostStreams()) is one, "what is dropped, is dropped on the host"
    strange = HostStreams()
    strange.device = torch.device("cuda", 1)
    with pytest.raises(ArgumentError, match="expected tensors on cpu, whose memory its peers know"):
        one.for_device(strange)


def test_parts_of_a_group_are_staged():
    with bf.local_world(2, **DEFAULTS) as world:
        ends = Loopback.group(2)
        names = world.run(
            lambda: CudaIPC.open(ends[bf.rank()], HostStreams(), [1 - bf.rank()]).split(0, 0).name
        )
    assert names == ["cuda_staged"] * 2


# agreement and trial


def agreed(base, spoilt):
    mine = DeviceFacts(base.rank, device="cuda", gpu="GPU-a")
    streams = Spoilt() if spoilt and base.rank == 1 else HostStreams(1)
    choice = agree(base, ("cuda_ipc",), mine, streams, SECONDS)
    return choice.wire, dict(choice.refused), type(on_device(base, streams)).__name__


class Spoilt(HostStreams):
    """A device that shows others something else than it was asked to."""

    def lend(self, tensor):
        return super().lend(self.lendable(tensor.nbytes).fill_(7))


@on("mpi-2")
def test_ranks_that_share_a_gpu_agree(world):
    assert world.run_bare(agreed, False) == [("cuda_ipc", {}, "CudaIPC")] * 2


@on("mpi-2")
def test_a_trial_that_does_not_arrive_as_it_was_sent_keeps_all_ranks_from_the_wire(world):
    """One rank sees it, all of them stage, and each is told why."""
    reason = {"cuda_ipc": "a trial out of GPU memory did not arrive as it was sent"}
    assert world.run_bare(agreed, True) == [("cuda_staged", reason, "CudaStaged")] * 2


def test_a_trial_that_never_arrives_has_failed():
    first, _ = Loopback.group(2)
    streams = HostStreams()
    assert try_out(CudaStaged(first, streams), streams, timeout=0.05) is False
