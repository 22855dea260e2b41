"""BlueFog's context functions: ``init``, ranks, ``suspend``, timeline, build features."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import networkx as nx

from asyncddp.context import current, is_initialized, lifecycle, ranks_and_topology
from asyncddp.context.user_activities import (
    timeline_context,
    timeline_end_activity,
    timeline_start_activity,
)
from asyncddp.integrations.bluefog import bluefog_environment
from asyncddp.integrations.bluefog.bluefog_state import current_state
from asyncddp.integrations.bluefog.error_translation import translate_errors
from asyncddp.integrations.bluefog.topology_settings import set_topology

__all__ = [
    "get_skip_negotiate_stage", "init", "is_available", "is_homogeneous", "is_initialized",
    "local_rank", "local_size", "machine_rank", "machine_size", "mpi_threads_supported",
    "nccl_built", "rank", "resume", "set_skip_negotiate_stage", "shutdown", "size", "suspend",
    "timeline_context", "timeline_end_activity", "timeline_start_activity",
    "unified_mpi_window_model_supported",
]  # fmt: skip

rank = translate_errors()(ranks_and_topology.rank)
size = translate_errors()(ranks_and_topology.size)
local_rank = translate_errors()(ranks_and_topology.local_rank)
local_size = translate_errors()(ranks_and_topology.local_size)
machine_rank = translate_errors()(ranks_and_topology.machine_rank)
machine_size = translate_errors()(ranks_and_topology.machine_size)
is_homogeneous = translate_errors()(ranks_and_topology.is_homogeneous)
shutdown = lifecycle.shutdown


def init(
    topology_fn: Callable[[int], nx.DiGraph[int]] | None = None, is_weighted: bool = False
) -> None:
    """Join the world of ranks, and set a topology; where that was done before, only set a topology.

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


@translate_errors()
def suspend() -> None:
    """Refuse all communication on this rank until :func:`resume`."""
    current_state().suspended = True


@translate_errors()
def resume() -> None:
    """Allow communication again."""
    current_state().suspended = False


@translate_errors()
def set_skip_negotiate_stage(value: bool) -> None:
    """Store a flag without effect, for BlueFog's API: nothing is negotiated."""
    current_state().skip_negotiate = value


@translate_errors()
def get_skip_negotiate_stage() -> bool:
    """Return the flag that was set last; False at first."""
    return current_state().skip_negotiate


@translate_errors()
def mpi_threads_supported() -> int:
    """Return 1 if several threads of a rank may call verbs, else 0."""
    return int(current().transport.allows_threads)


def unified_mpi_window_model_supported() -> bool:
    """Return True: puts are visible without further calls; no MPI window is used."""
    return True


def nccl_built() -> bool:
    """Return True if cupy is installed, through which NCCL is called."""
    return importlib.util.find_spec("cupy") is not None


def is_available() -> bool:
    """Return True if mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None
