"""Every transport on a GPU, between ranks that are processes: the same laws hold on all of them."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu import cases, conformance
from tests.gpu.agreed import runner
from tests.support import on

pytestmark = on("mpi-2", "mpi-4")
TRANSPORTS = ["cuda_staged", "cuda_ipc", "mpi_cuda", "nccl"]
BY_MODULE = {
    name: list(group)
    for name, group in itertools.groupby(conformance.CASES, key=lambda case: case.module)
}


@pytest.fixture(params=TRANSPORTS)
def run(request, world):
    """Runs a case on ranks that use a transport, and asserts it in each."""
    return runner(world, request.param)


@pytest.mark.parametrize("module", BY_MODULE)
def test_conformance(run, world, module):
    """Machines of two ranks are pretended, so that of four some are near and some are not."""
    fitting = [case for case in BY_MODULE[module] if world.size in case.ranks]
    run(conformance.perform_all, fitting, ranks_per_machine=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_every_verb_gives_what_the_host_gives(run, dtype):
    """Results of every verb lie on the GPU and equal the host's within rounding."""
    run(cases.agrees_with_the_host, dtype)


@pytest.mark.parametrize("side", [False, True], ids=["its-stream", "another-stream"])
def test_verbs_keep_to_the_order_of_the_caller_s_stream(run, side):
    """Verbs read late inputs, and inputs may be overwritten as soon as they return."""
    run(cases.races, 5, side)


def test_handles_waited_on_other_streams_and_threads(run):
    """wait() orders the result before work on the stream that is current there."""
    run(cases.waited_elsewhere)


def test_a_graph_between_two_verbs(run):
    """A captured CUDA graph replays on the values of the verb before it."""
    run(cases.graphed, 10)


def test_training_by_each_method_equals_that_on_the_host(run):
    """Weights after 8 steps on the GPU equal those of the host to 1e-8."""
    for trained in run(cases.trains_by_each, 8):
        for method, (there, here) in trained.items():
            torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10, msg=method)


def test_training_with_unequal_numbers_of_batches(run):
    """Inside join() the weights on the GPU equal those of the host to 1e-8."""
    for there, here in run(cases.joins):
        torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10)


@contextmanager
def _calls(found):
    """Count what the host asks of CUDA meanwhile, by all threads of this process."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        yield
    found.update({event.key: event.count for event in seen.key_averages()})


def host_waits(place):
    """For each verb the calls that make the host wait, beyond those of the profiler itself."""
    idle, told = Counter(), {}
    for _ in range(2):
        idle.clear()
        with _calls(idle):
            pass

    @contextmanager
    def watch(name):
        found = Counter()
        with _calls(found):
            yield
        waits = [key for key in found - idle if key.endswith("Synchronize")]
        told[name] = sorted(waits)

    cases.each_verb_once(place, watch)
    return told


def test_no_verb_makes_the_host_wait(run):
    """No stream, event or device is synchronised: events are asked."""
    for told in run(host_waits):
        assert not any(told.values()), told
