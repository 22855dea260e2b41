"""Selection of GPU transports in a group of ranks: per pair of ranks, and for collectives.

All ranks select from the same capabilities and get the same result. The requirements of a transport
are declared by its :class:`~asyncddp.transport.cuda.device_transport.DeviceTransport`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, takewhile

from asyncddp.errors import MismatchError, UnknownNameError
from asyncddp.rank_list_text import list_ranks
from asyncddp.transport import (
    DEFAULT_DEVICE_TRANSPORTS,
    DEVICE_TRANSPORTS,
    PREFERRED_DEVICE_TRANSPORTS,
)
from asyncddp.transport.base import Scope
from asyncddp.transport.cuda.capabilities import DeviceCapabilities
from asyncddp.transport.cuda.device_transport import DeviceTransport
from asyncddp.transport.cuda.staged_transport import CudaStagedTransport

FALLBACK = CudaStagedTransport.name
"""Name of the transport without requirements."""


def parse_transport_names(text: str | None) -> tuple[str, ...]:
    """Parse the names in ``ASYNCDDP_DEVICE_TRANSPORTS``: separated by commas, the best first.

    ``auto`` stands for all of them, ``cuda_ipc,nccl,mpi_cuda``; None, if the variable is not set,
    for the default ones.

    Example:
        >>> parse_transport_names("mpi_cuda, cuda_staged")
        ('mpi_cuda', 'cuda_staged')
    """
    if text is None:
        return DEFAULT_DEVICE_TRANSPORTS
    if text.strip() == "auto":
        return PREFERRED_DEVICE_TRANSPORTS
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names or not set(names) <= set(DEVICE_TRANSPORTS):
        raise UnknownNameError(
            f"environment variable ASYNCDDP_DEVICE_TRANSPORTS: expected auto, or some of "
            f"{', '.join(DEVICE_TRANSPORTS)}, separated by commas, got {text!r}"
        )
    return names


@dataclass(frozen=True)
class GroupTransports:
    """GPU transports selected for a group of ranks, best first; equal on all its ranks."""

    usable: tuple[type[DeviceTransport], ...]
    collectives: str
    refused: Mapping[str, str]  # why no pair can use a requested transport

    def transport_between(self, one: DeviceCapabilities, other: DeviceCapabilities) -> str:
        """Return the name of the best message transport that two ranks can use."""
        serving = [
            transport
            for transport in self.usable
            if transport.scope is Scope.ANY or transport.obstacle(one, other) is None
        ]
        if one.machine != other.machine:
            serving.sort(key=lambda transport: not transport.first_between_machines)
        return serving[0].name if serving else FALLBACK

    def used_transports(self, group: Sequence[DeviceCapabilities]) -> tuple[str, ...]:
        """Return the names of the transports that any pair or collective uses, best first."""
        used = {self.transport_between(one, other) for one, other in combinations(group, 2)}
        used.add(self.collectives)
        return tuple(transport.name for transport in self.usable if transport.name in used)


def select_for_group(
    group: Sequence[DeviceCapabilities], wanted: Sequence[str] = ()
) -> GroupTransports:
    """Select the transports of a group, from the wanted ones that its ranks can use.

    A transport inside machines is selected if any two ranks can use it, and serves these pairs; any
    other must be usable by all pairs. Names after ``cuda_staged`` are ignored.
    """
    require_same_device_kind(group)
    usable: list[type[DeviceTransport]] = []
    refused: dict[str, str] = {}
    for name in takewhile(lambda name: name != FALLBACK, wanted):
        transport = DEVICE_TRANSPORTS[name]
        answers = [transport.obstacle(one, other) for one, other in combinations(group, 2)]
        obstacles = [answer for answer in answers if answer is not None]
        serves_some = transport.scope is not Scope.ANY and len(obstacles) < len(answers)
        if obstacles and not serves_some:
            refused[name] = obstacles[0]
        else:
            usable.append(transport)
    collectives = [transport.name for transport in usable if transport.serves_collectives]
    return GroupTransports(tuple(usable), collectives[0] if collectives else FALLBACK, refused)


def require_same_device_kind(group: Sequence[DeviceCapabilities]) -> None:
    """Raise a MismatchError if some ranks of a group have GPUs and others have none."""
    kinds: dict[str, list[int]] = {}
    for facts in group:
        kinds.setdefault(facts.device, []).append(facts.rank)
    if len(kinds) > 1:
        parts = [
            f"{list_ranks(r)} {'have' if r[1:] else 'has'} tensors on {kind}"
            for kind, r in sorted(kinds.items())
        ]
        raise MismatchError(
            f"{' and '.join(parts)}: expected all ranks of a run on one kind of device. Start it "
            "only where there are GPUs, or hide them with CUDA_VISIBLE_DEVICES= on all ranks"
        )
