"""Opening transports between GPUs: which GPU a rank takes, trials that pass, and falling back."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import asyncddp as bf
from asyncddp.device.stream_registry import streams_of_device
from asyncddp.transport.cuda.negotiation import (
    close_device_transports,
    detect_capabilities,
    negotiate_transport,
)
from tests.gpu.places import GPU
from tests.support import on, run_on_mpirun

SECONDS = 30.0
LIMIT = 240.0
TRANSPORTS = ["cuda_staged", "cuda_ipc", "mpi_cuda", "nccl"]


def chosen(place):
    """The rank's GPU, and which transport was chosen for it, whose trial failed and why."""
    choice, x = bf.current().device_choice, torch.ones(3, device=place.device)
    assert bf.allreduce(x).tolist() == [1.0] * 3
    return place.device.index, choice.transport, list(choice.failed), dict(choice.refused)


def ask(world, transport, **more):
    """What all ranks have chosen, and their GPUs."""
    found = world.run(chosen, GPU(), settings={"device_transports": transport, **more}, limit=LIMIT)
    assert all(told[1:] == found[0][1:] for told in found)
    return found[0][1:], [gpu for gpu, *_ in found]


@on("mpi-2", "mpi-4")
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_no_rank_refuses_opens_and_passes_its_trial(world, transport):
    """A transport that is asked for is used, unless a pair of ranks lacks what it needs."""
    (used, failed, refused), _ = ask(world, transport)
    assert not failed, refused
    if refused:
        pytest.skip(f"{transport} cannot be used between these ranks: {refused[transport]}")
    assert used == transport


@on("mpi-2", "mpi-4")
def test_without_the_variable_ranks_of_a_machine_read_each_other_s_gpu(world):
    """The default is ``cuda_ipc``, beside which NCCL sums where there is a GPU for each rank."""
    found = world.run(chosen, GPU(), limit=LIMIT)
    refused = found[0][3]
    if "cuda_ipc" in refused:
        pytest.skip(f"these ranks cannot read each other's GPU: {refused}")
    expected = "cuda_ipc" if "nccl" in refused else "cuda_ipc+nccl"
    assert {told[1] for told in found} == {expected}


@on("mpi-2", "mpi-4")
@pytest.mark.parametrize("per_machine", [None, 1, 2])
def test_ranks_of_a_host_take_gpus_in_turn(world, per_machine):
    """Simulated machines leave each rank the GPU of its number on the host."""
    machines = {} if per_machine is None else {"ranks_per_machine": per_machine}
    _, gpus = ask(world, "cuda_staged", **machines)
    assert gpus == [rank % torch.cuda.device_count() for rank in range(world.size)]


@on("mpi-2", "mpi-4")
@pytest.mark.parametrize("wanted", ["nccl", "auto"])
def test_ranks_that_share_a_gpu_do_without_nccl(world, wanted):
    """Where ranks share a GPU ``init()`` succeeds, and the refusal names both."""
    if world.size <= torch.cuda.device_count():
        pytest.skip(f"{world.size} ranks have {torch.cuda.device_count()} GPUs")
    (used, failed, refused), _ = ask(world, wanted)
    assert "nccl" not in used + "".join(failed)
    assert "share one GPU" in refused["nccl"] or "cupy" in refused["nccl"]


def on_one_gpu(base):
    """Ranks that ask for NCCL on GPU 0, each of which says that it has one of its own."""
    streams = streams_of_device(torch.device("cuda", 0))
    mine = replace(detect_capabilities(base.rank, 0, 0), gpu=f"GPU-{base.rank}")
    with torch.cuda.device(0):
        choice = negotiate_transport(base, ("nccl",), mine, streams, SECONDS)
    x = torch.ones(3)
    base.allreduce(x, SECONDS)
    close_device_transports(base)
    return choice.transport, list(choice.failed), choice.refused["nccl"], x.tolist()


@on("mpi-2")
def test_what_nccl_itself_refuses_is_staged(world):
    """NCCL's own error for two ranks on one GPU has both stage, and tells its words."""
    found = world.run_bare(on_one_gpu)
    if "cannot import cupy" in found[0][2]:
        pytest.skip(found[0][2])
    for transport, failed, words, total in found:
        assert (transport, failed, total) == ("cuda_staged", ["nccl"], [2.0] * 3)
        assert "NCCL makes no communicator of 2 ranks (NCCL_ERROR" in words


STRANGE_NETWORK = """
import os, sys
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
if rank == 1:
    os.environ["NCCL_SOCKET_IFNAME"] = "=none_of_that_name"
from dataclasses import replace
from asyncddp.transport.cuda import negotiation
detect = negotiation.detect_capabilities
negotiation.detect_capabilities = lambda *given: replace(detect(*given), gpu=f"GPU-{rank}")
import torch
import asyncddp as bf
bf.init(timeout=8.0)
choice = bf.current().device_choice
total = bf.allreduce(torch.ones(3, device=f"cuda:{bf.current().default_gpu}"), average=False)
if rank == 0:
    print(choice.transport, choice.failed, choice.refused["nccl"], total.tolist())
bf.shutdown()
"""


def test_a_rank_whose_nccl_fails_leaves_none_waiting(tmp_path):
    """Where one rank's network for NCCL is missing, ``init()`` succeeds and names that rank."""
    asked = {"ASYNCDDP_DEVICE_TRANSPORTS": "nccl"}
    done = run_on_mpirun(2, STRANGE_NETWORK, tmp_path, environ=asked, timeout=LIMIT, warm=False)
    assert done.code == 0, done
    if "cannot import cupy" in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.startswith("cuda_staged ('nccl',) rank "), done
    assert "NCCL" in done.stderr, "the warning of rank 0"
    assert "[2.0, 2.0, 2.0]" in done.stdout
