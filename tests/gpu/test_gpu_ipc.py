"""CUDA IPC between processes: handles first, then ``cuda_ipc`` where memory comes and goes."""

from __future__ import annotations

import pytest

from tests.gpu import ipc_cases
from tests.gpu.places import GPU
from tests.support import on
from tests.support.processes import run_on_mpirun

LIMIT = 240.0

EXPANDABLE = """
import asyncddp as bf
from tests.gpu import ipc_cases
from tests.gpu.places import GPU

bf.init()
name, retired = ipc_cases.comes_and_goes(GPU(), 2)
print(f"went by {name}, {retired} left", flush=True)
bf.shutdown()
"""


@on("mpi-2")
def test_event_and_memory_handles_between_two_processes(world):
    """Each opens the other's event, and reads the other's memory in the order of the events."""
    assert world.run_bare(ipc_cases.handles_round_trip, ipc_cases.gpu_streams) == [True, True]


@on("mpi-2", "mpi-4")
def test_tensors_are_freed_and_segments_released_between_averages(world):
    """Averages are exact, and nothing that was freed stays open with the neighbours."""
    settings = {"device_transports": "cuda_ipc"}
    found = world.run(ipc_cases.comes_and_goes, GPU(), 3, settings=settings, limit=LIMIT)
    assert found == [("cuda_ipc", 0)] * world.size


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments(variable, tmp_path):
    """Ranks agree whether to open such memory or to stage, and averages are exact."""
    environ = {variable: "expandable_segments:True", "ASYNCDDP_DEVICE_TRANSPORTS": "cuda_ipc"}
    run = run_on_mpirun(2, EXPANDABLE, tmp_path, environ=environ, timeout=LIMIT, warm=False)
    assert run.code == 0, run
    lines = [line for line in run.stdout.splitlines() if line.startswith("went by")]
    assert lines in ([f"went by {name}, 0 left"] * 2 for name in ("cuda_ipc", "cuda_staged")), run


def test_a_staged_allgather_pins_a_few_pieces(ranks, place):
    """200 MB and more on each rank go through the pieces in flight."""
    for taken, allowed in ranks.run(ipc_cases.gathers_much, place, 20_000_000):
        assert 0 < taken <= allowed
