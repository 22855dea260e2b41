"""The trial of a transport for GPU tensors, and the vote on it: what they find, and how long."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

import asyncddp as bf
from asyncddp.errors import PeerError, WaitTimeoutError
from asyncddp.transport.cuda import negotiation, trial
from asyncddp.transport.cuda.capabilities import DeviceCapabilities
from asyncddp.transport.cuda.ipc.ipc_transport import CudaIPCTransport
from asyncddp.transport.cuda.nccl.nccl_transport import NCCLTransport
from asyncddp.transport.cuda.negotiation import negotiate_transport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport
from asyncddp.transport.cuda.trial import run_trial
from asyncddp.transport.loopback import LoopbackTransport
from tests.support import DEFAULT_SETTINGS, on
from tests.support.late_device import LateDevice
from tests.support.nccl import FakeNccl
from tests.support.simulated_streams import SimulatedStreams

SECONDS = 60.0


def test_a_trial_that_never_arrives_has_failed():
    """A trial whose data do not come raises WaitTimeoutError at its timeout."""
    first, _ = LoopbackTransport.group(2)
    with pytest.raises(WaitTimeoutError, match="a trial was not done"):
        run_trial(CudaStagedTransport(first, SimulatedStreams()), 0.05, [1])


def test_all_waits_of_a_trial_share_its_timeout(monkeypatch):
    """The second wait of a trial has only what the first has left of the timeout."""
    clock, left = itertools.count(0.0, 4.0), []
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    transport = CudaStagedTransport(LoopbackTransport.group(2)[0], SimulatedStreams())
    monkeypatch.setattr(transport, "finish", lambda request, timeout, _: left.append(timeout))
    with pytest.raises(PeerError, match="did not arrive as it was sent"):
        run_trial(transport, 10.0, [1])
    assert left == [6.0, 2.0]


def far_and_near(base):
    """Rank 0 reaches nobody; the others have a trial around the ring."""
    transport = CudaStagedTransport(base, SimulatedStreams())
    sent, isend = [], transport.isend
    transport.isend = lambda data, peer, tag: sent.append(peer) or isend(data, peer, tag)
    run_trial(transport, SECONDS, [1, 2] if base.rank else [])
    return sent


def test_only_peers_take_part_in_a_trial():
    """No message goes to a rank, or is awaited from it, that the transport does not reach."""
    ends = LoopbackTransport.group(3)
    with bf.local_world(3, **DEFAULT_SETTINGS) as world:
        assert world.run(lambda: far_and_near(ends[bf.rank()])) == [[], [2], []]


class Counted(SimulatedStreams):
    """A device that counts the memory that it has shown."""

    shown = 0

    def export_memory(self, tensor):
        self.shown += tensor.nbytes
        return super().export_memory(tensor)


def by_cuda_ipc(base):
    streams = Counted(1, pace=1e-4)
    transport = CudaIPCTransport.open(base, streams, [1 - base.rank], SECONDS)
    run_trial(transport, SECONDS, [1 - base.rank])
    return streams.shown, streams.copied


@on("mpi-2")
def test_a_trial_by_cuda_ipc_maps_a_megabyte_and_reads_it_twice(world):
    """Each rank copies its megabyte into shown memory twice, and the peer compares both."""
    for shown, copied in world.run_bare(by_cuda_ipc):
        assert shown >= 1 << 20
        assert copied == 2 << 20


# the vote


def facts(rank):
    return DeviceCapabilities(rank, 0, "cuda", f"GPU-{rank}", cupy="13", nccl=22703)


def ask(monkeypatch, timeout=10.0, size=2):
    """What ranks agree on that ask for NCCL, and how long they would wait in collectives."""
    fake, ends, waits = FakeNccl(LateDevice()), LoopbackTransport.group(size), []
    true = LoopbackTransport.allgather

    def noted(self, tensor, counts, timeout):
        waits.extend([timeout] * (self._group is ends[0]._group))
        return true(self, tensor, counts, SECONDS)

    monkeypatch.setattr(LoopbackTransport, "allgather", noted)
    opened = NCCLTransport.open

    def body():
        rank = bf.rank()
        return negotiate_transport(ends[rank], ["nccl"], facts(rank), fake.device, timeout)

    monkeypatch.setattr(
        NCCLTransport,
        "open",
        lambda base, streams, peers, timeout: opened(
            base, streams, peers, timeout, fake.library(base.rank)
        ),
    )
    with bf.local_world(size, **DEFAULT_SETTINGS) as world:
        told = world.run(body)
    for end in ends:
        negotiation.close_device_transports(end)
    assert len({choice.transport for choice in told}) == 1
    return told[0], waits


def test_the_vote_waits_for_a_rank_whose_trial_takes_all_its_time(monkeypatch):
    """A rank that fails at once waits in the vote for twice the time of opening or of a trial."""
    given = []
    monkeypatch.setattr(negotiation, "run_trial", lambda _, timeout, peers: given.append(timeout))
    choice, waits = ask(monkeypatch)
    assert (choice.transport, set(given)) == ("nccl", {10.0})
    assert waits[:8] == [10.0] * 8, "what ranks say of their GPUs, and whose messages NCCL takes"
    assert waits[8:] == [20.0] * 8, "each rank votes on opening and on the trial, size and words"


def test_a_timeout_and_an_error_of_another_rank_in_a_trial_is_told_as_the_error(monkeypatch):
    """The vote names the rank with an error before one that has only waited for it."""

    def fails(transport, *_):
        if transport.rank == 0:
            raise WaitTimeoutError("rank 0: a trial was not done in 10 s")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(negotiation, "run_trial", fails)
    choice, _ = ask(monkeypatch)
    words = "rank 1: CUDA error: an illegal memory access was encountered"
    assert (choice.transport, choice.refused) == ("cuda_staged", {"nccl": words})


def test_an_error_of_the_device_while_data_are_compared_is_a_failed_trial(monkeypatch):
    """An error that the device reports in the comparison on one rank has all of them stage."""
    equal = torch.equal

    def fails(one, other):
        if bf.rank() == 1 and one.nbytes > 1000:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return equal(one, other)

    monkeypatch.setattr(trial.torch, "equal", fails)
    choice, _ = ask(monkeypatch)
    assert (choice.transport, choice.failed) == ("cuda_staged", ("nccl",))
    assert "rank 1: CUDA error: an illegal" in choice.refused["nccl"]
