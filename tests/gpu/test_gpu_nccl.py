"""Verbs by NCCL between ranks that are processes, each with a GPU of its own."""

from __future__ import annotations

import pytest

from tests.gpu import nccl_cases
from tests.gpu.agreed import agreed_transport
from tests.gpu.places import GPU
from tests.support import on

pytestmark = on("mpi-2", "mpi-4")
SETTINGS = {"device_transports": "nccl", "timeout": 60.0}
LIMIT = 100.0


@pytest.fixture
def run(world):
    """Runs a case on ranks that agree on ``nccl``; skips where they do not, and says so."""
    agreed = set(world.run(agreed_transport, GPU(), settings=SETTINGS, limit=LIMIT))
    if agreed != {"nccl"}:
        pytest.skip(f"asked for nccl, the ranks agreed on {agreed}: it has a GPU for each rank")

    def run_there(case, *args):
        return world.run(case, GPU(), *args, settings=SETTINGS, limit=LIMIT)

    return run_there


@pytest.mark.parametrize("seed", range(3))
def test_verbs_in_orders_of_each_rank_s_own_end(run, seed):
    """Messages and sums overlap in other orders on each rank, with pauses, and are right."""
    run(nccl_cases.under_stress, seed)


def test_the_host_does_not_wait_for_the_gpu(run):
    """A sum returns while the GPU is busy with what was queued before it, and is right."""
    assert set(run(nccl_cases.returns_first)) == {(True, 2.0)}


def test_verbs_after_an_abort_raise_its_reason(run):
    """After the communicator was aborted a sum raises PeerError on every rank."""
    for told in run(nccl_cases.after_an_abort):
        assert "collectives cannot go on: the test has aborted it" in told
