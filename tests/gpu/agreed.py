"""The transport that ranks have agreed on, asserted in each case: none is staged in silence."""

from __future__ import annotations

import functools

import pytest

import asyncddp as bf
from asyncddp.context import current
from asyncddp.device.stream_registry import streams_of_device
from asyncddp.transport.cuda.device_transport_selection import select_for_group
from asyncddp.transport.cuda.negotiation import detect_capabilities
from asyncddp.transport.cuda.staged_transport import device_transport_for
from tests.gpu.places import GPU
from tests.support import LoopbackWorld

__all__ = ["LIMIT", "StagedWorld", "agreed_transport", "on_transport", "runner"]

LIMIT = 100.0


def agreed_transport(place):
    """The transport that serves this rank's device."""
    return device_transport_for(current().transport, streams_of_device(place.device)).name


def on_transport(place, transport, case, *args, **kwargs):
    """A case, which is not begun where another transport serves this rank's device."""
    agreed = agreed_transport(place)
    assert agreed == transport, f"the case is one of {transport}, and this rank has {agreed}"
    return case(*args, **kwargs)


def agreement(place, wanted):
    """The transport of this rank's device, and which condition of the wanted one is not met."""
    on_host = current().machines.rank_on_host
    group = bf.allgather_object(detect_capabilities(bf.rank(), bf.machine_rank(), on_host))
    return agreed_transport(place), select_for_group(group, [wanted]).refused.get(wanted)


@functools.cache
def _agreement(world, transport):
    return world.run(
        agreement, GPU(), transport, settings={"device_transports": transport}, limit=LIMIT
    )


class StagedWorld(LoopbackWorld):
    """Ranks that are threads, which can only stage: every case asserts that they do."""

    place = GPU()

    def outcomes(self, case, *args, **kwargs):
        return super().outcomes(on_transport, self.place, "cuda_staged", case, *args, **kwargs)


def runner(world, transport):
    """What runs a case on ranks that use a transport.

    Skips where a condition of the transport is not met, and fails where all are and the ranks have
    agreed on another one all the same.
    """
    found = _agreement(world, transport)
    agreed, obstacle = {name for name, _ in found}, found[0][1]
    if agreed != {transport}:
        if obstacle is not None:
            pytest.skip(f"{transport} cannot be had on {world.size} ranks here: {obstacle}")
        pytest.fail(
            f"asked for {transport}, whose conditions are met, the {world.size} ranks agreed on "
            f"{sorted(agreed)}; asyncddp doctor --check -np {world.size} says why"
        )
    return functools.partial(_run, world, transport)


def _run(world, transport, case, *args, **settings):
    """A case, which is given the rank's GPU first; further settings by keyword."""
    given = {
        "settings": {"device_transports": transport, "timeout": 60.0, **settings},
        "limit": LIMIT,
    }
    return world.run(on_transport, GPU(), transport, case, GPU(), *args, **given)
