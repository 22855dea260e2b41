"""Selection of a group's transports for tensors on GPUs: by peer, and for collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile

from asyncddp.transport.cuda.pair_selection import (
    FALLBACK,
    DeviceCapabilities,
    have_peer_access,
    require_same_device_kind,
    select_for_pair,
)


@dataclass(frozen=True)
class GroupSelection:
    """Transports selected for a group of ranks with GPUs; the same on all its ranks.

    Attributes:
        usable: Names of the transports that the ranks can use, the best first.
        collectives: Name of the transport of collectives.
        refused: For each requested transport that no pair can use, the reason.
    """

    usable: tuple[str, ...]
    collectives: str
    refused: Mapping[str, str]

    def transport_between(self, one: DeviceCapabilities, other: DeviceCapabilities) -> str:
        """Return the name of the transport of messages between two ranks.

        On one machine it is the best that both can use. Between machines ``mpi_cuda`` comes first,
        whatever its rank in the list: NCCL is then for the inside of a machine.
        """
        there = [
            transport
            for transport in self.usable
            if transport != "cuda_ipc" or have_peer_access(one, other)
        ]
        if one.machine != other.machine and "mpi_cuda" in there:
            return "mpi_cuda"
        return there[0] if there else FALLBACK

    def used_transports(self, group: Sequence[DeviceCapabilities]) -> tuple[str, ...]:
        """Return the names of the transports that the group uses at all, the best first."""
        found = {self.transport_between(one, other) for one, other in combinations(group, 2)}
        return tuple(
            transport for transport in self.usable if transport in found | {self.collectives}
        )


def select_for_group(
    group: Sequence[DeviceCapabilities], wanted: Sequence[str] = ()
) -> GroupSelection:
    """Select the transports of a group: those that every two of its ranks can use.

    ``cuda_ipc`` is selected where any two ranks can use it, and serves these.

    Args:
        group: Capabilities of each rank.
        wanted: Names of allowed transports, the best first; those after ``cuda_staged`` are unused.

    Raises:
        MismatchError: Some ranks have GPUs and others have none.

    Example:
        >>> from dataclasses import replace
        >>> one = DeviceCapabilities(0, machine=0, device="cuda", gpu="a", mpi_cuda=True)
        >>> group = [one, replace(one, rank=1), replace(one, rank=2, machine=1, gpu="b")]
        >>> routing = select_for_group(group, ["cuda_ipc", "nccl", "mpi_cuda"])
        >>> (
        ...     routing.transport_between(group[0], group[1]),
        ...     routing.transport_between(group[1], group[2]),
        ... )
        ('cuda_ipc', 'mpi_cuda')
        >>> routing.collectives, *routing.refused
        ('cuda_staged', 'nccl')
    """
    require_same_device_kind(group)
    usable: list[str] = []
    refused: dict[str, str] = {}
    for transport in takewhile(lambda transport: transport != FALLBACK, wanted):
        choices = [
            select_for_pair(one, other, [transport]) for one, other in combinations(group, 2)
        ]
        against = [choice.refused[transport] for choice in choices if choice.transport != transport]
        if against and (transport != "cuda_ipc" or len(against) == len(choices)):
            refused[transport] = against[0]
        else:
            usable.append(transport)
    return GroupSelection(tuple(usable), "nccl" if "nccl" in usable else FALLBACK, refused)
