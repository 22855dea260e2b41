"""``cuda_staged`` on a GPU: ranks that share it, as threads and as processes."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.memory.streams import Queue, streams_of
from tests.gpu import cases
from tests.support import LoopbackWorld, on
from tests.support.oracle import AVERAGING

SETTINGS = {"ranks_per_machine": 2}


@pytest.fixture(params=[2, 4], ids=["2-ranks", "4-ranks"])
def ranks(request):
    return LoopbackWorld(request.param)


@pytest.mark.parametrize("dtype", AVERAGING, ids=str)
def test_every_verb_gives_what_the_host_gives(ranks, device, dtype):
    ranks.run(cases.agrees_with_the_host, device, dtype, settings=SETTINGS)


def test_verbs_keep_to_the_order_of_the_caller_s_stream(ranks, device):
    """About 2 ms of a busy GPU before and after each verb."""
    ranks.run(cases.races, device, lambda: torch.cuda._sleep(4_000_000), settings=SETTINGS)


def test_training_equals_that_on_the_host(ranks, device):
    on_host = ranks.run(cases.trains, torch.device("cpu"), 20)
    for there, here in zip(ranks.run(cases.trains, device, 20), on_host, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4)


@on("mpi-2", "mpi-4")
def test_processes_that_share_a_gpu(world):
    world.run(cases.in_a_process, "agrees_with_the_host", torch.float32, settings=SETTINGS)


@on("mpi-2", "mpi-4")
@pytest.mark.parametrize("wire", ["cuda_ipc", "mpi_cuda", "nccl"])
def test_every_wire_that_the_ranks_agree_on(world, wire):
    """One that cannot be taken here is said to be so; what is taken gives what the host gives."""
    used = world.run(cases.agreed_wire, settings={"device_wires": wire})
    if set(used) != {wire}:
        pytest.skip(f"the ranks agreed on {set(used)}: asyncddp doctor says why")
    world.run(
        cases.in_a_process, "agrees_with_the_host", torch.float32, settings={"device_wires": wire}
    )


def test_nobody_waits_for_the_whole_device(device):
    """A verb on a busy device synchronises no stream and no device; its events are asked."""
    seen = torch.profiler.ProfilerActivity

    def case():
        x = torch.ones(1_000_000, device=device)
        bf.neighbor_allreduce(x)
        torch.cuda.synchronize(device)
        return bf.neighbor_allreduce_nonblocking(x).wait()

    with torch.profiler.profile(activities=[seen.CPU, seen.CUDA]) as profile:
        LoopbackWorld(2).run(case)
    waits = {event.key: event.count for event in profile.key_averages() if "Sync" in event.key}
    ours = {key: count for key, count in waits.items() if "Device" not in key}
    assert waits.get("cudaDeviceSynchronize", 0) <= 3, "two of the test, one of the profiler"
    assert not ours, waits


def test_host_memory_is_pinned(device):
    streams = streams_of(torch.zeros(1, device=device))
    assert streams.pinned(4096).is_pinned()
    event = streams.mark(Queue.OUT)
    torch.cuda.synchronize(device)
    assert event.done()


def test_a_rank_on_the_host_beside_one_on_a_gpu_is_named(device):
    def case():
        place = device if bf.rank() else torch.device("cpu")
        with pytest.raises(bf.MismatchError, match=r"expected a tensor on c\w+, got one on c\w+"):
            bf.neighbor_allreduce(torch.ones(70_000, device=place), name="x")

    LoopbackWorld(2).run(case)
