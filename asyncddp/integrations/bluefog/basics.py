"""BlueFog's context: ``init``, ranks, switches, what was built in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import networkx as nx

from asyncddp.context import current, is_initialized, lifecycle, queries
from asyncddp.integrations.bluefog import environment
from asyncddp.integrations.bluefog.errors import translated
from asyncddp.integrations.bluefog.state import state
from asyncddp.integrations.bluefog.topologies import set_topology
from asyncddp.transport import TRANSPORTS

__all__ = [
    "get_skip_negotiate_stage",
    "init",
    "is_available",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "machine_rank",
    "machine_size",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "resume",
    "set_skip_negotiate_stage",
    "shutdown",
    "size",
    "suspend",
    "unified_mpi_window_model_supported",
]

rank = translated()(queries.rank)
size = translated()(queries.size)
local_rank = translated()(queries.local_rank)
local_size = translated()(queries.local_size)
machine_rank = translated()(queries.machine_rank)
machine_size = translated()(queries.machine_size)
is_homogeneous = translated()(queries.is_homogeneous)
shutdown = lifecycle.shutdown


def init(
    topology_fn: Callable[[int], nx.DiGraph[int]] | None = None, is_weighted: bool = False
) -> None:
    """Join the world of ranks, and set a topology; again only the latter.

    Args:
        topology_fn: Makes the graph from the number of ranks; ``ExponentialGraph`` if None.
        is_weighted: Whether the graph's weights count; ranks average uniformly otherwise.

    Raises:
        TypeError: What it makes is no directed graph on that number of ranks.
        ArgumentError: A ``BLUEFOG_…`` variable cannot be read.

    Example:
        >>> import asyncddp.integrations.bluefog as bf
        >>> bf.init(bf.RingGraph)
        >>> bf.size(), bf.in_neighbor_ranks()
        (1, [])
        >>> bf.shutdown()
    """
    if not is_initialized():
        environment.read_log_level()
        machines, where = environment.ranks_per_machine(), environment.timeline()
        lifecycle.init(ranks_per_machine=machines, timeline=where)
        if rank() == 0:
            environment.warn_of_others()
    set_topology(None if topology_fn is None else topology_fn(size()), is_weighted)


@translated()
def suspend() -> None:
    """Refuse all communication on this rank until :func:`resume`."""
    state().suspended = True


@translated()
def resume() -> None:
    """Allow communication again."""
    state().suspended = False


@translated()
def set_skip_negotiate_stage(value: bool) -> None:
    """Keep a flag that means nothing here: nothing is ever negotiated."""
    state().skip_negotiate = value


@translated()
def get_skip_negotiate_stage() -> bool:
    """The flag that was set last; False at first."""
    return state().skip_negotiate


@translated()
def mpi_threads_supported() -> int:
    """1 where several threads of a rank may call verbs, 0 elsewhere."""
    return int(current().transport.threads)


def unified_mpi_window_model_supported() -> bool:
    """True: what is put is seen without further calls, whatever the MPI; no MPI window is used."""
    return True


def nccl_built() -> bool:
    """Whether there is a wire by NCCL."""
    return "nccl" in TRANSPORTS


def is_available() -> bool:
    """Whether mpi4py is installed, by which ranks that are processes talk."""
    return importlib.util.find_spec("mpi4py") is not None
