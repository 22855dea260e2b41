"""The torch.distributed backend with tensors on a GPU that is pretended."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

import asyncddp as bf
from asyncddp.device.stream_interfaces import StreamOrdering
from asyncddp.device.stream_registry import streams_of_device
from asyncddp.transport.cuda.ipc.ipc_transport import CudaIPCTransport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport
from tests.gpu import torch_distributed_cases as cases
from tests.gpu.places import PretendedGPU, on_a_pretended_gpu
from tests.gpu.pretended import pretended_gpu, waits
from tests.support import LoopbackWorld, RanksFailedError, on

pytestmark = [pytest.mark.training, pytest.mark.exhaustive]


@pytest.fixture
def place():
    with pretended_gpu():
        yield PretendedGPU()


@pytest.fixture
def ranks():
    return LoopbackWorld(3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=str)
def test_every_verb_gives_what_the_host_gives(place, ranks, dtype, monkeypatch):
    """Results of every verb of the group lie on the GPU and equal the host's within rounding."""
    monkeypatch.setattr(cases, "SHAPES", cases.SHAPES[:-1])
    ranks.run(cases.agrees_with_the_host, place, dtype)


def test_verbs_keep_to_the_order_of_the_caller_s_stream(place, ranks):
    """A verb reads what the caller's stream queued before it, and what follows comes after."""
    ranks.run(cases.races, place, 2, False)


def test_every_verb_begins_after_what_its_tensors_wait_for(place, monkeypatch):
    """By the engine's order of streams, which has all tensors of the call."""
    begun, begin = Counter(), StreamOrdering.begin

    def counted(self):
        begun[threading.get_ident(), len(self.tensors)] += 1
        begin(self)

    monkeypatch.setattr(StreamOrdering, "begin", counted)
    LoopbackWorld(2).run(cases.races, place, 1, False)
    assert begun.total() >= 2 * len(cases._VERBS)
    assert all(tensors for _, tensors in begun)


def test_no_verb_makes_the_host_wait(place, ranks):
    """No verb of the group makes the host wait for the GPU once it is warmed up."""
    seen = {}

    @contextmanager
    def watch(name):
        before = Counter(waits.seen)
        yield
        seen[name] = Counter(waits.seen) - before

    ranks.run(cases.each_verb_once, place, watch)
    assert len(seen) >= 16
    assert not any(seen.values()), seen


def test_receives_from_any_rank_find_each_message_once(place):
    """Two large messages of each tag come from the ranks that sent them."""
    found = LoopbackWorld(3).run(cases.from_any_rank, place)[0]
    assert sorted(found) == [1, 2]
    for rank, values in found.items():
        assert torch.equal(values, torch.full_like(values, float(rank)))


def test_sums_go_by_the_transport_that_the_group_has_agreed_on(place, ranks, monkeypatch):
    """The group's device transport starts the sum, not a copy of the group's own."""
    started = Counter()

    class Recording(CudaStagedTransport):
        name = "recording"

        def iallreduce(self, tensor, out=None, divisor=None):
            started[self.rank] += 1
            return super().iallreduce(tensor, out, divisor)

    def agree(transport, config, **facts):
        if not bf.is_initialized():  # of the world, not of the group
            return
        assert facts["machine"] == bf.machine_rank()
        assert transport.device_watches == []
        transport.device_transport_factory = lambda streams: Recording(transport, streams)

    monkeypatch.setattr("asyncddp.context.context.negotiate_from_config", agree)
    assert set(ranks.run(cases.served_by, place)) == {"recording"}
    assert set(started) == set(range(ranks.size))


def mixed(place):
    with cases.group() as made, place.there():
        there, here = torch.ones(2), torch.ones(2, device="cpu")
        made.allreduce_coalesced([there, here])


def test_tensors_of_one_verb_on_two_devices_are_refused(place):
    """The message names both devices, before anything is sent."""
    with pytest.raises(RanksFailedError, match="on one device, got some on cuda:0 and on cpu"):
        LoopbackWorld(2).run(mixed, place)


def over_cuda_ipc(place, wanted):
    """The group's verbs, where its ranks read each other's memory."""

    def agree(transport, config, **facts):
        near = {rank for rank in range(transport.size) if rank != transport.rank}
        streams = streams_of_device(place.device)
        streams._pace = 1e-4  # others wait for what it is asked to do
        opened = CudaIPCTransport.open(transport, streams, near, 20.0)
        transport.device_transport_factory = opened.for_device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("asyncddp.context.context.negotiate_from_config", agree)
        patch.setattr(cases, "SHAPES", cases.SHAPES[:-1])
        if wanted == "values":
            cases.agrees_with_the_host(place, torch.float32)
        else:
            cases.races(place, 2, False)


@on("mpi-2")
@pytest.mark.parametrize("wanted", ["values", "order"])
def test_verbs_between_processes_that_read_each_other_s_memory(world, wanted):
    """Over cuda_ipc the group's verbs give what they give on the host, and keep to the order."""
    world.run(on_a_pretended_gpu, over_cuda_ipc, wanted)
