"""Time-varying graphs, one family one file."""

from __future__ import annotations

from collections.abc import Callable

from topology.schedule import Schedule
from topology.schedules.one_peer_exponential import one_peer_exponential

__all__ = ["SCHEDULES", "one_peer_exponential"]

SCHEDULES: dict[str, Callable[..., Schedule]] = {"one_peer_exponential": one_peer_exponential}
