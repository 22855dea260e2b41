"""Eight ranks, which are processes: on eight GPUs, or on fewer that they share where they stage."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from tests.gpu import cases
from tests.gpu.agreed import runner
from tests.support import PoolWorld

pytestmark = pytest.mark.mpi(8)


@pytest.fixture(scope="module")
def eight():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    with closing(PoolWorld("mpi", 8)) as world:
        yield world


@pytest.fixture(params=["cuda_staged", "cuda_ipc", "mpi_cuda", "nccl"])
def run(request, eight):
    """Runs a case on ranks that use a transport."""
    if request.param != "cuda_staged" and torch.cuda.device_count() < 8:
        pytest.skip(f"{request.param} on eight ranks is for machines with eight GPUs")
    return runner(eight, request.param)


def test_every_verb_gives_what_the_host_gives(run):
    """Results of every verb on eight ranks lie on the GPU and equal the host's within rounding."""
    run(cases.agrees_with_the_host, torch.float32)


def test_training_equals_that_on_the_host(run):
    """Weights of eight ranks after 10 steps on GPUs equal those of the host to 1e-8."""
    for there, here in run(cases.trains, "adapt_then_combine", 10):
        torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10)
