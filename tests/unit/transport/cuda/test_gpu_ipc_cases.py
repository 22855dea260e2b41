"""The cases of ``tests/gpu/ipc_cases.py``, on devices that are pretended."""

from __future__ import annotations

import pytest

from tests.gpu import ipc_cases
from tests.gpu.places import PretendedGPU
from tests.gpu.pretended import pretended_gpu
from tests.support import LoopbackWorld, on
from tests.support.simulated_streams import SimulatedStreams


def simulated(base):
    return SimulatedStreams(1, pace=1e-4)


@on("mpi-2")
def test_event_and_memory_handles_between_two_processes(world):
    """The case that opens handles of CUDA passes with those of shared memory."""
    assert world.run_bare(ipc_cases.handles_round_trip, simulated) == [True, True]


@pytest.mark.nightly
@pytest.mark.slow
def test_tensors_that_come_and_go_between_averages():
    """The case passes on ``cuda_staged``, which shows nobody any memory."""
    with pretended_gpu():
        found = LoopbackWorld(2).run(ipc_cases.comes_and_goes, PretendedGPU(), 1)
    assert found == [("cuda_staged", 0)] * 2


def test_a_staged_allgather_pins_a_few_pieces():
    """The case counts the pinned buffers of a gather of many pieces."""
    with pretended_gpu():
        found = LoopbackWorld(3).run(ipc_cases.gathers_much, PretendedGPU(), 200_000)
    assert all(0 < taken <= allowed == 9 for taken, allowed in found)
