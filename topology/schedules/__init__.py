"""Time-varying graphs, one family one file."""

from __future__ import annotations

from collections.abc import Callable

from topology.schedule import Schedule
from topology.schedules.alternating_exponential_ring import alternating_exponential_ring
from topology.schedules.base_k import base_k, simple_base_k
from topology.schedules.equi_dynamic import equi_dynamic
from topology.schedules.inner_outer import inner_outer_exponential, inner_outer_ring
from topology.schedules.matcha import matcha
from topology.schedules.one_peer_exponential import one_peer_exponential
from topology.schedules.one_peer_hypercube import one_peer_hypercube
from topology.schedules.one_peer_of import one_peer_of

__all__ = [
    "SCHEDULES",
    "alternating_exponential_ring",
    "base_k",
    "equi_dynamic",
    "inner_outer_exponential",
    "inner_outer_ring",
    "matcha",
    "one_peer_exponential",
    "one_peer_hypercube",
    "one_peer_of",
    "simple_base_k",
]

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "alternating_exponential_ring": alternating_exponential_ring,
    "base_k": base_k,
    "equi_dynamic": equi_dynamic,
    "inner_outer_exponential": inner_outer_exponential,
    "inner_outer_ring": inner_outer_ring,
    "matcha": matcha,
    "one_peer_exponential": one_peer_exponential,
    "one_peer_hypercube": one_peer_hypercube,
    "one_peer_of": one_peer_of,
    "simple_base_k": simple_base_k,
}
