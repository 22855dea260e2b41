"""Which wire serves which tensor and peer: decided here, shown by ``asyncddp doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from asyncddp.transport import TRANSPORTS
from asyncddp.transport.contract import Transport
from asyncddp.transport.loopback import Loopback

__all__ = ["Route", "explain", "open_world", "route"]


@dataclass(frozen=True)
class Route:
    """How a tensor on one kind of device reaches a peer.

    Attributes:
        device: ``torch.device.type`` of the tensor.
        peer: Where the peer is: ``"same machine"`` or ``"other machine"``.
        transport: Name of the wire.
        how: What happens to the bytes on their way.
    """

    device: str
    peer: str
    transport: str
    how: str


_DIRECT = "straight from the tensor's memory"
_STAGED = "copied to host memory, sent, copied back"


def route(device: str, same_machine: bool, transport: str = "mpi") -> Route:
    """Choose the wire for a tensor and a peer.

    Args:
        device: ``torch.device.type`` of the tensor.
        same_machine: Whether the peer shares this machine.
        transport: The wire between all ranks, ``ASYNCDDP_TRANSPORT`` or ``mpi``.

    Returns:
        The route; every device has one.

    Raises:
        UnknownNameError: No transport has that name.

    Example:
        >>> route("cuda", same_machine=True).how
        'copied to host memory, sent, copied back'
    """
    name = TRANSPORTS[transport].name
    peer = "same machine" if same_machine else "other machine"
    return Route(device, peer, name, _DIRECT if device == "cpu" else _STAGED)


def explain(devices: Sequence[str] = ("cpu", "cuda"), transport: str = "mpi") -> list[Route]:
    """All routes, for people to read."""
    return [route(device, same, transport) for device in devices for same in (True, False)]


def open_world(transport: str | None = None) -> Transport:
    """Open the wire between all ranks of this job.

    Args:
        transport: Its name; ``mpi`` if not given.

    Raises:
        UnknownNameError: No transport has that name.
        EnvironmentProblem: It cannot be used on this machine.
    """
    chosen = TRANSPORTS[transport or "mpi"]
    return Loopback.group(1)[0] if chosen is Loopback else chosen()
