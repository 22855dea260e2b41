"""Which wires a group of ranks takes for tensors on GPUs: one by peer, and one for collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile

from asyncddp.transport.device_routes import LAST_RESORT, DeviceFacts, choose, in_reach, same_kind

__all__ = ["Routing", "route_group"]


@dataclass(frozen=True)
class Routing:
    """What carries tensors between the GPUs of a group; the same on all its ranks.

    Attributes:
        usable: The wires that the ranks can have, the best first.
        collectives: What carries collectives.
        refused: For each wire that was asked for and serves nobody, the reason.
    """

    usable: tuple[str, ...]
    collectives: str
    refused: Mapping[str, str]

    def between(self, one: DeviceFacts, other: DeviceFacts) -> str:
        """What carries messages between two ranks.

        On one machine the best wire that serves the two. Between machines ``mpi_cuda`` comes first,
        whatever its place: NCCL is for the inside of a machine where there is something else.
        """
        there = [wire for wire in self.usable if wire != "cuda_ipc" or in_reach(one, other)]
        if one.machine != other.machine and "mpi_cuda" in there:
            return "mpi_cuda"
        return there[0] if there else LAST_RESORT

    def used(self, group: Sequence[DeviceFacts]) -> tuple[str, ...]:
        """The wires that carry anything between the ranks of the group, the best first."""
        found = {self.between(one, other) for one, other in combinations(group, 2)}
        return tuple(wire for wire in self.usable if wire in found | {self.collectives})


def route_group(group: Sequence[DeviceFacts], wanted: Sequence[str] = ()) -> Routing:
    """Find out which wires a group can have: those that serve every two of its ranks.

    ``cuda_ipc`` serves those that it reaches, and is of use where there are any.

    Args:
        group: What is known of each rank.
        wanted: Wires that may be taken, the best first; those after ``cuda_staged`` never are.

    Raises:
        MismatchError: Some ranks have GPUs and others have none.

    Example:
        >>> from dataclasses import replace
        >>> one = DeviceFacts(0, machine=0, device="cuda", gpu="a", mpi_cuda=True)
        >>> group = [one, replace(one, rank=1), replace(one, rank=2, machine=1, gpu="b")]
        >>> routing = route_group(group, ["cuda_ipc", "nccl", "mpi_cuda"])
        >>> routing.between(group[0], group[1]), routing.between(group[1], group[2])
        ('cuda_ipc', 'mpi_cuda')
        >>> routing.collectives, *routing.refused
        ('cuda_staged', 'nccl')
    """
    same_kind(group)
    usable: list[str] = []
    refused: dict[str, str] = {}
    for wire in takewhile(lambda wire: wire != LAST_RESORT, wanted):
        choices = [choose(one, other, [wire]) for one, other in combinations(group, 2)]
        against = [choice.refused[wire] for choice in choices if choice.wire != wire]
        if against and (wire != "cuda_ipc" or len(against) == len(choices)):
            refused[wire] = against[0]
        else:
            usable.append(wire)
    return Routing(tuple(usable), "nccl" if "nccl" in usable else LAST_RESORT, refused)
