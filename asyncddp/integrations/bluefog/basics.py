"""BlueFog's context functions: ``init``, ranks, ``suspend``, timeline, build features."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import networkx as nx

from asyncddp.context import current, is_initialized, lifecycle
from asyncddp.context.ranks_and_topology import (
    is_homogeneous,
    local_rank,
    local_size,
    machine_rank,
    machine_size,
    rank,
    size,
)
from asyncddp.context.user_activities import (
    timeline_context,
    timeline_end_activity,
    timeline_start_activity,
)
from asyncddp.integrations.bluefog import bluefog_environment
from asyncddp.integrations.bluefog.bluefog_state import current_state
from asyncddp.integrations.bluefog.error_translation import translate_errors_of
from asyncddp.integrations.bluefog.topology_settings import set_topology

__all__ = [
    "get_skip_negotiate_stage", "init", "is_available", "is_homogeneous", "is_initialized",
    "local_rank", "local_size", "machine_rank", "machine_size", "mpi_threads_supported",
    "nccl_built", "rank", "resume", "set_skip_negotiate_stage", "shutdown", "size", "suspend",
    "timeline_context", "timeline_end_activity", "timeline_start_activity",
    "unified_mpi_window_model_supported",
]  # fmt: skip

shutdown = lifecycle.shutdown


def init(
    topology_fn: Callable[[int], nx.DiGraph[int]] | None = None, is_weighted: bool = False
) -> None:
    """Join the world of ranks, and set a topology; if already initialised, only set a topology.

    ``topology_fn`` makes the graph from the number of ranks, by default ``ExponentialGraph``. Ranks
    average uniformly unless ``is_weighted``.

    Example:
        >>> import asyncddp.integrations.bluefog as bf
        >>> bf.init(bf.RingGraph)
        >>> bf.size(), bf.in_neighbor_ranks()
        (1, [])
        >>> bf.shutdown()
    """
    if not is_initialized():
        bluefog_environment.read_log_level()
        machines = bluefog_environment.read_ranks_per_machine()
        lifecycle.init(ranks_per_machine=machines, timeline=bluefog_environment.timeline())
        if rank() == 0:
            bluefog_environment.warn_of_others()
    set_topology(None if topology_fn is None else topology_fn(size()), is_weighted)


def suspend() -> None:
    """Refuse all communication on this rank until :func:`resume`."""
    current_state().suspended = True


def resume() -> None:
    """Allow communication again."""
    current_state().suspended = False


def set_skip_negotiate_stage(value: bool) -> None:
    """Store a flag without effect, for BlueFog's API: nothing is negotiated."""
    current_state().skip_negotiate = value


def get_skip_negotiate_stage() -> bool:
    """Return the flag set by :func:`set_skip_negotiate_stage`; False at first."""
    return current_state().skip_negotiate


def mpi_threads_supported() -> int:
    """Return 1 if several threads of a rank may call verbs, else 0."""
    return int(current().transport.allows_threads)


def unified_mpi_window_model_supported() -> bool:
    """Return True: puts are visible without further calls; no MPI window is used."""
    return True


def nccl_built() -> bool:
    """Return True if cupy, which calls NCCL, is installed."""
    return importlib.util.find_spec("cupy") is not None


def is_available() -> bool:
    """Return True if mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


_PLAIN = {name for name in __all__ if name.startswith("timeline_")} | {"is_initialized"}
translate_errors_of(globals(), set(__all__) - _PLAIN)
