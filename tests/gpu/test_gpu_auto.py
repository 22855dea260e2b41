"""Every transport at once: memory of the neighbour in a machine, NCCL or MPI between machines."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from tests.gpu import cases
from tests.gpu.places import GPU
from tests.support import on

pytestmark = on("mpi-4")
LIMIT = 100.0
MACHINES = {"device_transports": "auto", "ranks_per_machine": 2, "timeout": 60.0}


def choice(place):
    """What the ranks have agreed on."""
    found = bf.current().device_choice
    return found.transport, dict(found.refused)


def sums(place):
    """The same mean gradient by the GPUs and by the host, and both after some steps."""
    with place.there():
        x = torch.randn(200_000, generator=torch.Generator().manual_seed(bf.rank()), device="cpu")
        there = bf.allreduce(x.to(place.device)).cpu()
    return there, bf.allreduce(x)


@pytest.fixture
def run(world):
    """Runs a case with all transports on two machines of two ranks; skips without NCCL."""
    used, refused = world.run(choice, GPU(), settings=MACHINES, limit=LIMIT)[0]
    if "nccl" not in used:
        pytest.skip(f"the ranks agreed on {used}: {refused}")
    assert "cuda_ipc" in used

    def run_there(case, *args):
        return world.run(case, GPU(), *args, settings=MACHINES, limit=LIMIT)

    return run_there


def test_every_verb_gives_what_the_host_gives(run):
    """Neighbours near and far, groups and sums, each by the transport that was chosen."""
    run(cases.agrees_with_the_host, torch.float32)


def test_verbs_keep_to_the_order_of_the_caller_s_stream(run):
    """Late inputs are read late, whichever transport the neighbour has."""
    run(cases.races, 5, True)


def test_sums_by_nccl_equal_those_of_the_host(run):
    """A mean gradient by NCCL is the host's to 1e-6."""
    for there, here in run(sums):
        torch.testing.assert_close(there, here, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["gradient_allreduce", "adapt_then_combine"])
def test_training_equals_that_on_the_host(run, method):
    """Weights after 10 steps on GPUs equal those of the host to 1e-8."""
    for there, here in run(cases.trains, method, 10):
        torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10)
