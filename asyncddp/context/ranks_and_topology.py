"""Public functions that return ranks, sizes and neighbours, and set or return topologies."""

from __future__ import annotations

from asyncddp.context.context import current
from asyncddp.context.topologies import Topology
from asyncddp.membership import View
from asyncddp.topology.builders import TopologyLike


def rank() -> int:
    """Return this rank's number, 0 .. ``size() - 1``.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(3) as world:
        ...     world.run(bf.rank)
        [0, 1, 2]
    """
    return current().rank


def size() -> int:
    """Return the number of ranks; in an elastic run, of those that take part.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(3) as world:
        ...     world.run(bf.size)
        [3, 3, 3]
    """
    return len(current().members)


def view() -> View:
    """Return the view of an elastic run: which ranks take part.

    Ranks agree on a new one when ranks die. A rank keeps its number for life, so that ``rank()``
    may be above ``size()``. A run that is not elastic stays in view 0.

    Returns:
        The view: its ``number``, its ``members``, ascending, those that have ``left`` since the
        view before, and the ``starts``: from which use of each name on its graph holds.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.view().members)
        [(0, 1, 2), (0, 1, 2), (0, 1, 2)]
    """
    context = current()
    membership = context.engine.membership
    return View.first(range(context.size)) if membership is None else membership.view


def local_rank() -> int:
    """Return this rank's number among the ranks of its machine.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(4, ranks_per_machine=2) as world:
        ...     world.run(bf.local_rank)
        [0, 1, 0, 1]
    """
    return current().local_rank


def local_size() -> int:
    """Return the number of ranks on this machine.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(4, ranks_per_machine=2) as world:
        ...     world.run(bf.local_size)
        [2, 2, 2, 2]
    """
    return current().local_size


def machine_rank() -> int:
    """Return this machine's number, in order of the machines' lowest ranks.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(4, ranks_per_machine=2) as world:
        ...     world.run(bf.machine_rank)
        [0, 0, 1, 1]
    """
    return current().machine_rank


def machine_size() -> int:
    """Return the number of machines.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(4, ranks_per_machine=2) as world:
        ...     world.run(bf.machine_size)
        [2, 2, 2, 2]
    """
    return current().machine_size


def is_homogeneous() -> bool:
    """Return True if machines have equally many ranks, numbered consecutively by machine.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(3, ranks_per_machine=2) as world:
        ...     world.run(bf.is_homogeneous)
        [False, False, False]
    """
    return current().machines.homogeneous


def set_topology(topology: TopologyLike | None = None) -> None:
    """Set this rank's graph or schedule between ranks; all ranks must set the same.

    Args:
        topology: The graph or schedule, a function of the number of ranks that makes it, or its
            name; None takes ``topology.exponential_two(size())``.

    Raises:
        TopologyError: It is no graph or schedule on ``size()`` ranks.

    Example:
        >>> import asyncddp as bf, topology
        >>> with bf.local_world(4) as world:
        ...     world.run(lambda: bf.set_topology(topology.ring(4)) or bf.in_neighbor_ranks())
        [[1, 3], [0, 2], [1, 3], [0, 2]]
    """
    context = current()
    context.topologies.set(topology)
    context.connect_neighbors()


def load_topology() -> Topology:
    """Return the current graph or schedule between ranks.

    Example:
        >>> import asyncddp as bf, topology
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: topology.describe(bf.load_topology()))
        ['exponential_two(2)', 'exponential_two(2)']
    """
    return current().topologies.given


def set_machine_topology(topology: TopologyLike | None = None) -> None:
    """Set this rank's graph or schedule between machines; all ranks must set the same.

    Args:
        topology: The graph or schedule, a function of the number of machines that makes it, or its
            name; None takes ``topology.exponential_two(machine_size())``.

    Raises:
        TopologyError: It is no graph or schedule on ``machine_size()`` machines.

    Example:
        >>> import asyncddp as bf, topology
        >>> def links():
        ...     bf.set_machine_topology(topology.ring(2))
        ...     return bf.in_neighbor_machine_ranks()
        >>> with bf.local_world(4, ranks_per_machine=2) as world:
        ...     world.run(links)
        [[1], [1], [0], [0]]
    """
    current().topologies.set_machine(topology)


def load_machine_topology() -> Topology | None:
    """Return the current graph or schedule between machines; None before one is set.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(bf.load_machine_topology)
        [None, None]
    """
    return current().topologies.machine_given


def in_neighbor_ranks(round: int = 0) -> list[int]:  # noqa: A002 - the field's word
    """Return the ranks that this rank receives from in a round of the topology, ascending.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(4) as world:
        ...     world.run(bf.in_neighbor_ranks)
        [[2, 3], [0, 3], [0, 1], [1, 2]]
    """
    context = current()
    return list(context.topologies.ranks.neighbors(context.rank, round).src_weights)


def out_neighbor_ranks(round: int = 0) -> list[int]:  # noqa: A002 - the field's word
    """Return the ranks that this rank sends to in a round of the topology, ascending.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(4) as world:
        ...     world.run(bf.out_neighbor_ranks)
        [[1, 2], [2, 3], [0, 3], [0, 1]]
    """
    context = current()
    return list(context.topologies.ranks.neighbors(context.rank, round).dst_ranks)


def in_neighbor_machine_ranks(round: int = 0) -> list[int]:  # noqa: A002 - the field's word
    """Return the machines that this one receives from; empty without a machine topology.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(bf.in_neighbor_machine_ranks)
        [[], []]
    """
    context = current()
    if context.topologies.machine_given is None:
        return []
    return list(context.topologies.machines.neighbors(context.machine_rank, round).src_weights)


def out_neighbor_machine_ranks(round: int = 0) -> list[int]:  # noqa: A002 - the field's word
    """Return the machines that this one sends to; empty without a machine topology.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(bf.out_neighbor_machine_ranks)
        [[], []]
    """
    context = current()
    if context.topologies.machine_given is None:
        return []
    return list(context.topologies.machines.neighbors(context.machine_rank, round).dst_ranks)
