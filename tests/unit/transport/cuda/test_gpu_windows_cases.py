"""The cases of windows in ``tests/gpu``, on a pretended GPU: a mistake in one shows here."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from asyncddp.transport.loopback import LoopbackTransport
from tests.gpu import conformance, windows_cases
from tests.gpu.places import PretendedGPU
from tests.gpu.pretended import pretended_gpu, waits
from tests.support import LoopbackWorld

pytestmark = [pytest.mark.training, pytest.mark.exhaustive]


@pytest.fixture
def place():
    with pretended_gpu():
        yield PretendedGPU()


@pytest.fixture
def ranks():
    return LoopbackWorld(2)


@pytest.mark.parametrize("case", windows_cases.CASES, ids=str)
def test_conformance(place, case):
    """A window case of the GPU suite passes with tensors on a pretended GPU."""
    LoopbackWorld(min(case.ranks)).run(conformance.perform, place, case)


def test_conformance_by_messages(place, ranks, monkeypatch):
    """Put, get and accumulate on a pretended GPU hold without shared memory, by messages."""
    monkeypatch.setattr(LoopbackTransport, "window_group", None)
    for case in windows_cases.CASES:
        if case.name in ("put_and_update", "get_after_puts", "accumulate_onto"):
            ranks.run(conformance.perform, place, case)


def test_windows_keep_to_the_order_of_the_caller_s_stream(place, ranks):
    """Puts and updates keep to the order of the side stream on which they are called."""
    ranks.run(windows_cases.races, place, 3, True)


def test_no_verb_makes_the_host_wait(place, ranks):
    """None of the nine window calls makes the host wait for the GPU."""
    seen = {}

    @contextmanager
    def watch(name):
        before = Counter(waits.seen)
        yield
        seen[name] = Counter(waits.seen) - before

    ranks.run(windows_cases.each_verb_once, place, watch)
    assert len(seen) == 9
    assert not any(seen.values()), seen


@pytest.mark.parametrize("method", windows_cases.METHODS)
def test_training_equals_that_on_the_host(place, ranks, method):
    """Each one-sided optimizer trains to the same weights on the GPU as on the host."""
    for there, here in ranks.run(windows_cases.trains, place, method, 4):
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-14)
