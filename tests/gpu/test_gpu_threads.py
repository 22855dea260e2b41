"""Contexts, captures of CUDA graphs and the default device of ranks on GPUs."""

from __future__ import annotations

import re

import pytest
import torch

from tests.gpu import thread_cases
from tests.gpu.agreed import LIMIT, runner
from tests.gpu.test_gpu_transports import TRANSPORTS
from tests.support import FileEvent, on, run_on_mpirun
from tests.unit.device.test_default_device_runs import program

CONTEXTS = """
import asyncddp as bf
from tests.gpu.thread_cases import contexts, use_the_gpu
bf.init(timeout=120.0)
rank, device, transport = use_the_gpu()
bf.shutdown()
print(f"rank {rank} by {transport} on {device}: contexts on {contexts()}", flush=True)
"""


def skip_unless(agreed, transport):
    """Skip, with words, where the ranks use another transport than was asked for."""
    if set(agreed) != {transport}:
        pytest.skip(f"asked for {transport}, the ranks agreed on {agreed}: see asyncddp doctor")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_has_a_context_on_its_own_gpu_alone(tmp_path, transport):
    """After a run without torch.cuda.set_device no rank has a context on another rank's GPU."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU, which is every rank's own: the test needs two")
    environ = {"ASYNCDDP_DEVICE_TRANSPORTS": transport}
    done = run_on_mpirun(2, CONTEXTS, tmp_path, environ=environ, timeout=LIMIT, warm=False)
    assert done.code == 0, done
    told = re.findall(r"^rank (\d) by (\S+) on (\d+): contexts on (.*)$", done.stdout, re.MULTILINE)
    skip_unless([agreed for _, agreed, _, _ in told], transport)
    assert sorted((rank, device, found) for rank, _, device, found in told) == [
        ("0", "0", "[0]"),
        ("1", "1", "[1]"),
    ]


@on("mpi-2")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_capture_in_the_default_mode_beside_a_verb(world, tmp_path, transport):
    """A capture stays valid while the progress thread serves a verb from start to end."""
    runner(world, transport)(thread_cases.beside_a_capture, FileEvent(tmp_path / "begun"))


@on("mpi-2")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_thread_of_the_user_keeps_its_device_and_capture_mode(world, transport):
    """After blocking verbs the caller is on the device, and in the capture mode, of before."""
    assert runner(world, transport)(thread_cases.threads_of_the_user) == [(0, 0)] * 2


@pytest.mark.parametrize("transports", ["cuda_staged", "auto"])
def test_a_default_device_before_init(tmp_path, transports):
    """With a GPU as default device from before init on, a whole run gives the host's results."""
    environ = {"ASYNCDDP_DEVICE_TRANSPORTS": transports}
    done = run_on_mpirun(2, program("cuda"), tmp_path, environ=environ, timeout=LIMIT, warm=False)
    assert done.code == 0, done
    assert {"rank 0 is done", "rank 1 is done"} <= set(done.stdout.splitlines()), done
