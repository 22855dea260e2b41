"""Who am I, and who are my neighbours: the public questions about the current context."""

from __future__ import annotations

from asyncddp.context.context import current
from asyncddp.context.topologies import Topology

__all__ = [
    "in_neighbor_machine_ranks",
    "in_neighbor_ranks",
    "is_homogeneous",
    "load_machine_topology",
    "load_topology",
    "local_rank",
    "local_size",
    "machine_rank",
    "machine_size",
    "out_neighbor_machine_ranks",
    "out_neighbor_ranks",
    "rank",
    "set_machine_topology",
    "set_topology",
    "size",
]


def rank() -> int:
    """This rank's number, 0 .. ``size() - 1``."""
    return current().rank


def size() -> int:
    """The number of ranks."""
    return current().size


def local_rank() -> int:
    """This rank's number among those of its machine."""
    return current().local_rank


def local_size() -> int:
    """The number of ranks on this machine."""
    return current().local_size


def machine_rank() -> int:
    """This machine's number, in order of the machines' lowest ranks."""
    return current().machine_rank


def machine_size() -> int:
    """The number of machines."""
    return current().machine_size


def is_homogeneous() -> bool:
    """Whether all machines have equally many ranks, numbered one machine after the other."""
    return current().machines.homogeneous


def set_topology(topology: Topology | None = None) -> None:
    """Set the graph or schedule between ranks, on this rank; all ranks must set the same.

    Args:
        topology: The graph or schedule; None takes ``topology.exponential_two(size())``.

    Raises:
        TopologyError: It is no graph or schedule on ``size()`` ranks.

    Example:
        >>> import asyncddp as bf, topology
        >>> with bf.local_world(4) as world:
        ...     world.run(lambda: bf.set_topology(topology.ring(4)) or bf.in_neighbor_ranks())
        [[1, 3], [0, 2], [1, 3], [0, 2]]
    """
    current().topologies.set(topology)


def load_topology() -> Topology:
    """The graph or schedule between ranks that is in use."""
    return current().topologies.load()


def set_machine_topology(topology: Topology | None = None) -> None:
    """Set the graph or schedule between machines, on this rank; all ranks must set the same.

    Args:
        topology: The graph or schedule; None takes ``topology.exponential_two(machine_size())``.

    Raises:
        TopologyError: It is no graph or schedule on ``machine_size()`` machines.
    """
    current().topologies.set_machine(topology)


def load_machine_topology() -> Topology | None:
    """The graph or schedule between machines that is in use; None before one is set."""
    return current().topologies.load_machine()


def in_neighbor_ranks(round: int = 0) -> list[int]:  # noqa: A002 - the field's word
    """The ranks from which this one receives in that round of the topology, ascending."""
    context = current()
    return list(context.topologies.ranks.neighbors(context.rank, round).src_weights)


def out_neighbor_ranks(round: int = 0) -> list[int]:  # noqa: A002 - the field's word
    """The ranks to which this one sends in that round of the topology, ascending."""
    context = current()
    return list(context.topologies.ranks.neighbors(context.rank, round).dst_ranks)


def in_neighbor_machine_ranks(round: int = 0) -> list[int]:  # noqa: A002 - the field's word
    """The machines from which this one receives; empty before a machine topology is set."""
    context = current()
    if context.topologies.load_machine() is None:
        return []
    return list(context.topologies.machines.neighbors(context.machine_rank, round).src_weights)


def out_neighbor_machine_ranks(round: int = 0) -> list[int]:  # noqa: A002 - the field's word
    """The machines to which this one sends; empty before a machine topology is set."""
    context = current()
    if context.topologies.load_machine() is None:
        return []
    return list(context.topologies.machines.neighbors(context.machine_rank, round).dst_ranks)
