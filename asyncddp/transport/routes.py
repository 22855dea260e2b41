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
_SHOWN = "read where they lie, or piece by piece out of shared memory"
_STAGED = "copied to host memory, sent, copied back"
_DEFAULT = "shared_memory"


def route(device: str, same_machine: bool, transport: str = _DEFAULT) -> Route:
    """Choose the wire for a tensor and a peer.

    Args:
        device: ``torch.device.type`` of the tensor.
        same_machine: Whether the peer shares this machine.
        transport: The wire between all ranks, ``ASYNCDDP_TRANSPORT`` or ``shared_memory``.

    Returns:
        The route; every device has one.

    Raises:
        UnknownNameError: No transport has that name.

    Example:
        >>> route("cuda", same_machine=True).how
        'copied to host memory, sent, copied back'
        >>> route("cpu", same_machine=False).transport
        'mpi'
    """
    name = TRANSPORTS[transport].name
    shares = name == "shared_memory" and same_machine
    peer = "same machine" if same_machine else "other machine"
    if name == "shared_memory" and not same_machine:
        name = "mpi"
    if device != "cpu":
        return Route(device, peer, name, _STAGED)
    return Route(device, peer, name, _SHOWN if shares else _DIRECT)


def explain(devices: Sequence[str] = ("cpu", "cuda"), transport: str = _DEFAULT) -> list[Route]:
    """All routes, for people to read."""
    return [route(device, same, transport) for device in devices for same in (True, False)]


def open_world(transport: str | None = None) -> Transport:
    """Open the wire between all ranks of this job.

    Args:
        transport: Its name; if not given, ``shared_memory``, which warns where ranks of one machine
            cannot share memory and goes by MPI.

    Raises:
        UnknownNameError: No transport has that name.
        EnvironmentProblem: It cannot be used on this machine.
    """
    if transport is None:
        from asyncddp.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(required=False)
    chosen = TRANSPORTS[transport]
    return Loopback.group(1)[0] if chosen is Loopback else chosen()
