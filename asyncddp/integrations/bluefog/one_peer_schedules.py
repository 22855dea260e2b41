"""BlueFog's one-peer schedules, which generate a rank's ``(send_ranks, recv_ranks)`` per step."""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

import topology
from asyncddp.integrations.bluefog.error_translation import TopologyAssertionError, translate_errors

SendRecv = Iterator[tuple[list[int], list[int]]]


@translate_errors()
def GetDynamicOnePeerSendRecvRanks(  # noqa: N802 - BlueFog's name
    topo: nx.DiGraph[int], self_rank: int
) -> SendRecv:
    """Each rank sends to one out-neighbour in clockwise turn; see :func:`topology.one_peer_of`.

    Example:
        >>> turns = GetDynamicOnePeerSendRecvRanks(topology.exponential_two(4), self_rank=0)
        >>> [next(turns) for _ in range(3)]
        [([1], [3]), ([2], [2]), ([1], [3])]
    """
    return _ranks(topology.one_peer_of(topo), self_rank)


@translate_errors()
def GetExp2DynamicSendRecvMachineRanks(  # noqa: N802 - BlueFog's name
    world_size: int, local_size: int, self_rank: int, local_rank: int
) -> SendRecv:
    """Machine m sends to machine m + 1, m + 2, m + 4, … in turn; gives numbers of machines.

    Raises:
        TopologyAssertionError: Machines that do not have ``local_size`` ranks each, numbered one
            machine after the other, or only one machine.
    """
    if self_rank % local_size != local_rank or world_size % local_size or world_size <= local_size:
        raise TopologyAssertionError(
            "GetExp2DynamicSendRecvMachineRanks: expected two machines or more with local_size "
            f"ranks each, and local_rank = self_rank % local_size; got {world_size} ranks, "
            f"{local_size} on each machine, rank {self_rank} as its rank {local_rank}"
        )
    machines = topology.one_peer_exponential(world_size // local_size)
    return _ranks(machines, self_rank // local_size)


@translate_errors()
def GetInnerOuterRingDynamicSendRecvRanks(  # noqa: N802 - BlueFog's name
    world_size: int, local_size: int, self_rank: int
) -> SendRecv:
    """One rank of each machine goes out, the others around; see :func:`inner_outer_ring`.

    Raises:
        TopologyAssertionError: ``local_size`` is below 3, or does not divide ``world_size``.
    """
    return _ranks(topology.inner_outer_ring(world_size, local_size), self_rank)


@translate_errors()
def GetInnerOuterExpo2DynamicSendRecvRanks(  # noqa: N802 - BlueFog's name
    world_size: int, local_size: int, self_rank: int
) -> SendRecv:
    """Yield inner-outer ranks at distances 1, 2, 4, …: :func:`topology.inner_outer_exponential`.

    Raises:
        TopologyAssertionError: ``local_size`` is below 3, or does not divide ``world_size``.
    """
    return _ranks(topology.inner_outer_exponential(world_size, local_size), self_rank)


def _ranks(schedule: topology.Schedule, rank: int) -> SendRecv:
    return ((list(near.dst_ranks), list(near.src_weights)) for near in schedule.iterate(rank))
