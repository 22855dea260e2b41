"""The torch.distributed backend with tensors on GPUs, over every transport."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import torch_distributed_cases as cases
from tests.gpu.agreed import runner
from tests.gpu.test_gpu_transports import TRANSPORTS
from tests.support import on

pytestmark = on("mpi-2", "mpi-4")


@pytest.fixture(params=TRANSPORTS)
def run(request, world):
    """Runs a case on ranks that use a transport."""
    return runner(world, request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_every_verb_gives_what_the_host_gives(run, dtype):
    """Results of every verb of the group lie on the GPU and equal the host's within rounding."""
    run(cases.agrees_with_the_host, dtype)


@pytest.mark.parametrize("side", [False, True], ids=["its-stream", "another-stream"])
def test_verbs_keep_to_the_order_of_the_caller_s_stream(run, side):
    """A verb reads what the caller's stream queued before it, and what follows comes after."""
    run(cases.races, 5, side)


def test_receives_from_any_rank_find_each_message_once(run, world):
    """Large messages of one tag come from the ranks that sent them."""
    assert sorted(run(cases.from_any_rank)[0]) == list(range(1, world.size))


def test_sums_go_by_the_transport_that_was_asked_for(run, request):
    """The group agrees on the transport as the library's own verbs do."""
    (asked,) = [name for name in TRANSPORTS if name in request.node.callspec.params.values()]
    assert set(run(cases.served_by)) == {asked}
