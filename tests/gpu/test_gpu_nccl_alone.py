"""NCCL through cupy with a communicator of one rank, which needs one GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from asyncddp.device.cuda_streams import CudaStreams
from asyncddp.errors import EnvironmentProblem
from asyncddp.transport.cuda.nccl.cupy_bindings import library
from tests.gpu import nccl_cases
from tests.support.processes import REPO


@pytest.fixture
def bindings():
    """NCCL through cupy, where it is installed."""
    try:
        return library()
    except EnvironmentProblem as problem:
        pytest.skip(f"NCCL cannot be reached: {problem}")


@pytest.mark.parametrize(
    "case",
    [
        nccl_cases.all_collectives,
        nccl_cases.to_itself,
        nccl_cases.aborted,
        nccl_cases.behind_a_busy_gpu,
    ],
)
def test_a_communicator_of_one_rank(case, bindings, device):
    """Collectives, messages to itself, abort and order by streams; the GPU is free afterwards."""
    case(bindings, CudaStreams(device))
    torch.cuda.synchronize(device)


def test_streams_have_hardware_queues_of_their_own(bindings):
    """With the variables that init() sets, no stream of a rank waits for what another one does."""
    script = "from tests.gpu.nccl_cases import independent_streams; independent_streams()"
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_MAX_CONNECTIONS"}
    command = [sys.executable, "-c", script]
    subprocess.run(command, cwd=REPO, env=environment, check=True, timeout=300)
