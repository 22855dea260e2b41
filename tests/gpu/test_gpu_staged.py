"""``cuda_staged`` on a GPU that ranks share, which are threads."""

from __future__ import annotations

import re

import pytest
import torch

from asyncddp.device.stream_interfaces import StreamRole
from asyncddp.device.stream_registry import streams_of
from tests.gpu import cases, conformance
from tests.gpu.agreed import StagedWorld
from tests.support.oracle import AVERAGING

SETTINGS = {"ranks_per_machine": 2}


@pytest.mark.parametrize("case", conformance.CASES, ids=str)
def test_conformance(ranks, place, case):
    """What holds of tensors on the host holds of CUDA tensors on ranks that are threads."""
    if ranks.size not in case.ranks:
        pytest.skip(f"the case is one of {case.ranks[0]} ranks")
    ranks.run(conformance.perform, place, case, settings=case.settings)


@pytest.mark.parametrize("dtype", AVERAGING, ids=str)
def test_every_verb_gives_what_the_host_gives(ranks, place, dtype):
    """Results of every verb lie on the GPU and equal the host's within rounding."""
    ranks.run(cases.agrees_with_the_host, place, dtype, settings=SETTINGS)


@pytest.mark.parametrize("side", [False, True], ids=["its-stream", "another-stream"])
def test_verbs_keep_to_the_order_of_the_caller_s_stream(ranks, place, side):
    """About 2 ms of a busy GPU before and after each verb."""
    ranks.run(cases.races, place, 5, side, settings=SETTINGS)


def test_handles_waited_on_other_streams_and_threads(ranks, place):
    """wait() orders the result before work on the stream that is current there."""
    ranks.run(cases.waited_elsewhere, place)


def test_a_graph_between_two_verbs(ranks, place):
    """A captured CUDA graph replays on the values of the verb before it."""
    ranks.run(cases.graphed, place, 10)


@pytest.mark.parametrize("method", cases.METHODS)
def test_training_equals_that_on_the_host(ranks, place, method):
    """Weights after 20 steps on the GPU equal those of the host to 1e-8."""
    for there, here in ranks.run(cases.trains, place, method, 20):
        torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", cases.COMPRESSED)
def test_compressed_training_is_near_that_on_the_host(ranks, place, method):
    """Weights after 20 steps, up to levels of quantisation on which a last bit decides."""
    for there, here in ranks.run(cases.trains, place, method, 20):
        torch.testing.assert_close(there, here, rtol=2e-2, atol=2e-2)


def test_training_with_unequal_numbers_of_batches(ranks, place):
    """Inside join() the weights on the GPU equal those of the host to 1e-8."""
    for there, here in ranks.run(cases.joins, place):
        torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10)


def test_host_memory_is_pinned(device):
    """Staging memory is pinned, and an event is done once the device is synchronised."""
    streams = streams_of(torch.zeros(1, device=device))
    assert streams.allocate_pinned(4096).is_pinned()
    event = streams.record_event(StreamRole.DEVICE_TO_HOST)
    torch.cuda.synchronize(device)
    assert event.done()


def test_a_rank_on_the_host_beside_one_on_a_gpu_is_named(place):
    """Both ranks raise MismatchError, which tells both kinds of device."""
    for message in StagedWorld(2).run(cases.mixed_devices, place):
        assert re.search(r"rank \d.* 'x'.*expected a tensor on c\w+, got one on c\w+", message)
