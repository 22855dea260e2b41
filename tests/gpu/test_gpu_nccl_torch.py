"""torch's own NCCL between ranks that are processes: alone, under DDP's hooks, and for FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.gpu import torch_cases
from tests.support import on

pytestmark = on("mpi-2")
LIMIT = 120.0


@pytest.fixture
def run(world, tmp_path):
    """Runs a case in a group of a backend; skips where NCCL would refuse the ranks."""
    if torch.cuda.device_count() < world.size and not all(world.run(torch_cases.told_apart)):
        pytest.skip("NCCL has a GPU for each rank; scripts/gpu --share hosts has ranks share one")
    if not dist.is_nccl_available():
        pytest.skip("this torch was built without NCCL")
    numbers = iter(range(9))

    def run_there(case, backend, *args):
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return world.run(case, backend, str(folder), *args, limit=LIMIT)

    return run_there


def test_collectives_and_messages_of_torch_s_nccl(run):
    """A sum, a pair of messages and the end of the group: whether NCCL takes these ranks at all."""
    assert set(run(torch_cases.talks, "nccl")) == {(3.0, True)}


@pytest.mark.parametrize("hook", torch_cases.HOOKS)
def test_a_hook_of_ddp_gives_over_nccl_what_it_gives_over_gloo(run, hook):
    """Parameters after some steps on GPUs equal those on the host within rounding."""
    here, there = run(torch_cases.hooked, "gloo", hook), run(torch_cases.hooked, "nccl", hook)
    for one, other in zip(here, there, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_fsdp2_by_nccl_beside_the_backend_for_the_host(run):
    """``cpu:asyncddp,cuda:nccl``: shards train on GPUs as a whole model does on the host."""
    backend = "cpu:asyncddp,cuda:nccl"
    for sharded, whole in run(torch_cases.sharded, backend):
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-5)
