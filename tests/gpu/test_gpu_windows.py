"""Windows of tensors on a GPU that ranks share: threads, and processes near and apart."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import conformance, windows_cases
from tests.gpu.agreed import on_transport
from tests.gpu.places import GPU
from tests.support import on


@pytest.mark.parametrize("case", windows_cases.CASES, ids=str)
def test_conformance(ranks, place, case):
    """What holds of windows on the host holds of windows of CUDA tensors."""
    if ranks.size not in case.ranks:
        pytest.skip(f"the case is one of {case.ranks[0]} ranks")
    ranks.run(conformance.perform, place, case)


@pytest.mark.parametrize("side", [False, True], ids=["its-stream", "another-stream"])
def test_windows_keep_to_the_order_of_the_caller_s_stream(ranks, place, side):
    """About 2 ms of a busy GPU before what is put was made, and after what is mixed."""
    ranks.run(windows_cases.races, place, 5, side)


@pytest.mark.parametrize("method", windows_cases.METHODS)
def test_training_equals_that_on_the_host(ranks, place, method):
    """With one-sided methods in step, weights equal those of the host to 1e-8."""
    for there, here in ranks.run(windows_cases.trains, place, method, 20):
        torch.testing.assert_close(there, here, rtol=1e-8, atol=1e-10)


def in_a_process(names, side):
    """Cases of :mod:`tests.gpu.windows_cases`, and races."""
    for case in windows_cases.CASES:
        if case.name in names:
            conformance.perform(GPU(), case)
    windows_cases.races(GPU(), 3, side)


@on("mpi-2", "shared_memory-4")
def test_processes_that_share_a_gpu(world):
    """By messages, and through memory that they see alike."""
    case = on_transport, GPU(), "cuda_staged", in_a_process
    world.run(*case, ("put_and_update", "get_after_puts", "many_outstanding"), side=True)


def test_nobody_waits_for_the_device(ranks, place):
    """No verb of windows synchronises a stream or the device; events are asked."""
    seen, waits, idle = torch.profiler.ProfilerActivity, {}, {}

    class Watch:
        """Counts what a verb has the host wait for."""

        def __init__(self, name):
            self.name = name
            self.profile = torch.profiler.profile(activities=[seen.CPU, seen.CUDA])

        def __enter__(self):
            self.profile.__enter__()

        def __exit__(self, *raised):
            self.profile.__exit__(*raised)
            found = {event.key: event.count for event in self.profile.key_averages()}
            waits[self.name] = {
                key: count
                for key, count in found.items()
                if key.endswith("Synchronize") and count > idle.get(key, 0)
            }
            if self.name == "nothing":
                idle.update(found)

    for _ in range(2):  # the profiler waits itself, and more often the first time
        with Watch("nothing"):
            pass
    waits.clear()
    ranks.run(windows_cases.each_verb_once, place, Watch)
    assert len(waits) == 9
    assert not any(waits.values()), waits
