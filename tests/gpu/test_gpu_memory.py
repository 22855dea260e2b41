"""GPU memory that runs out while a tensor is received, between ranks that are processes."""

from __future__ import annotations

import time

import torch

import asyncddp as bf
from asyncddp import topology
from tests.conformance.test_out_of_memory import RECEIVER, error_of
from tests.gpu.agreed import agreed_transport
from tests.gpu.places import GPU
from tests.support import BEFORE_DEADLINE, on

NUMEL = 1 << 26  # float32: 256 MiB, a segment of torch's allocator for each tensor


def runs_out(place):
    """The receiver has room for the result of an average, and not for the tensor received."""
    device = place.device
    assert agreed_transport(place) == "cuda_staged"
    bf.set_topology(topology.complete(bf.size()))
    with place.there():
        bf.neighbor_allreduce(torch.ones(10), name="small")
        x = torch.full((NUMEL,), float(bf.rank()))
        place.ends()
        torch.cuda.empty_cache()
        if bf.rank() == RECEIVER:
            room = torch.cuda.memory_reserved() + 4 * NUMEL * 3 // 2
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(room / total, device)
        started = time.monotonic()
        try:
            error = error_of(lambda: bf.neighbor_allreduce(x, name="large"))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        assert time.monotonic() - started < BEFORE_DEADLINE
        assert f"{4 * NUMEL} bytes of rank 0 could not be received (OutOfMemory" in str(error)
        assert error.origin == RECEIVER
        if bf.rank() == RECEIVER:
            assert isinstance(error.__cause__, torch.OutOfMemoryError)
        for name in ("small", "large"):
            assert (bf.neighbor_allreduce(x, name=name) == 0.5).all()


@on("mpi-2")
def test_a_receive_without_memory_fails_on_both_ranks_and_the_next_average_works(world):
    """Both ranks raise PeerError that names the receiver, and averages after it are right."""
    world.run(runs_out, GPU(), settings={"device_transports": "cuda_staged"}, limit=240.0)
