"""What holds of windows on the host holds of windows whose tensors lie on a device.

The cases are those of the conformance tests, over a stand-in that copies late.
"""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.context import current
from asyncddp.transport.loopback import LoopbackTransport
from asyncddp.windows import windows_of
from asyncddp.windows.device_staging import DeviceStaging
from asyncddp.windows.message_edge import MessageEdgeWriter
from tests.conformance import test_windows as windows
from tests.support import on
from tests.support.staged import StagedWorld, on_a_stand_in

CASES = [
    windows.create_and_free,
    windows.made_anew,
    windows.update_with_weights,
    windows.collect_twice,
    windows.accumulate_onto,
    windows.many_outstanding,
    windows.reset_some,
    windows.put_and_update,
    windows.put_to_one,
    windows.scaled_in_place,
    windows.flushed,
    windows.cancelled,
    windows.get_neighbors,
    windows.get_after_puts,
    windows.versions,
    windows.staleness,
    windows.one_sender,
    windows.non_contiguous,
    windows.leaf_parameter,
    windows.directed,
]


@pytest.fixture(params=[1, 4], ids=["1-rank", "4-ranks"])
def ranks(request):
    return StagedWorld(request.param, laziness=5)


@pytest.fixture(params=["near", "apart"])
def way(request, monkeypatch):
    """Through memory that neighbours see, or by messages as between machines."""
    if request.param == "apart":
        monkeypatch.setattr(LoopbackTransport, "window_group", None)
    return request.param


def lies_on_a_device(way):
    windows.made(1.0)
    window = windows_of(current()).find("test", "x")
    assert isinstance(window._staging, DeviceStaging)
    assert {isinstance(edge, MessageEdgeWriter) for edge in window.edges.outgoing.values()} == {
        way == "apart"
    }


def test_the_stand_in_is_taken_for_a_device(way):
    """Else the tests below would show nothing."""
    StagedWorld(2).run(lies_on_a_device, way)


@pytest.mark.training
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_holds_on_the_host(ranks, way, case):
    """A window case of the host holds on a device, by shared memory and by messages."""
    ranks.run(case)


@pytest.mark.training
@pytest.mark.parametrize("dtypes", [windows.FLOATS, windows.INTEGERS], ids=["floats", "integers"])
def test_every_dtype_and_shape(ranks, way, dtypes):
    """Put, accumulate and update on a device are right in every dtype and shape."""
    ranks.run(windows.any_dtype, dtypes, windows.SHAPES)


@pytest.mark.parametrize("family", ["star", "ring"])
def test_weights_of_the_topology(ranks, way, family):
    """``win_update`` without weights takes those of the topology."""
    ranks.run(windows.update_by_the_topology, family)


def test_sums_are_conserved(ranks, way):
    """Whoever adds, updates and collects when: p stays equal to x, and both to the true mean."""
    for seed in range(3):
        ranks.run(windows.p_is_x, seed)
    if ranks.size > 1:
        ranks.run(windows.push_sum, 40)


def test_a_mean_of_two_is_exact(ranks, way):
    """On the one-peer graph all ranks hold the exact mean after log2(n) rounds."""
    ranks.run(windows.one_peer, {1: 1, 2: 1, 4: 2}[ranks.size])


def rounded_once():
    """1 and 3 times 2**-9 of bfloat16, whose unit is 2**-7: together more than half of it."""
    x = torch.ones(5, dtype=torch.bfloat16)
    bf.win_create(x, "x", zero_init=True)
    for _ in range(3):
        bf.win_accumulate(torch.full((5,), 2.0**-9, dtype=torch.bfloat16), "x")
    bf.barrier()
    assert bf.win_update_then_collect("x").tolist() == [1 + 2.0**-7] * 5


def test_halves_are_summed_in_float32_with_the_own_tensor():
    """Accumulates in bfloat16 and the own tensor are summed in float32 and rounded once."""
    StagedWorld(2).run(rounded_once)


def over_a_transport(name, *args):
    with on_a_stand_in(laziness=5):
        getattr(windows, name)(*args)


@on("mpi-2", "shared_memory-4")
def test_processes(world):
    """Each with a device of its own."""
    for case in (windows.put_and_update, windows.get_after_puts, windows.many_outstanding):
        world.run(over_a_transport, case.__name__)
    world.run(over_a_transport, "p_is_x", 1)
