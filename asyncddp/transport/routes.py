"""Which wire serves which tensor and peer: decided here, shown by ``asyncddp doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncddp.transport import DEVICE_WIRES, TRANSPORTS
from asyncddp.transport.contract import Transport
from asyncddp.transport.device_routes import LAST_RESORT, DeviceFacts, choose
from asyncddp.transport.device_routing import route_group
from asyncddp.transport.starting import Start

__all__ = ["DeviceRow", "Route", "explain", "explain_device_wires", "open_world", "route"]


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
_STAGED = "in pieces through pinned host memory, mixed on the GPU"
_OTHER = "copied to host memory, sent, copied back"
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
        'in pieces through pinned host memory, mixed on the GPU'
        >>> route("cpu", same_machine=False).transport
        'mpi'
    """
    name = TRANSPORTS[transport].name
    shares = name == "shared_memory" and same_machine
    peer = "same machine" if same_machine else "other machine"
    if name == "shared_memory" and not same_machine:
        name = "mpi"
    if device == "cuda":
        base = "mpi" if name == "shared_memory" else name
        return Route(device, peer, f"{LAST_RESORT} over {base}", _STAGED)
    if device != "cpu":
        return Route(device, peer, name, _OTHER)
    return Route(device, peer, name, _SHOWN if shares else _DIRECT)


def explain(devices: Sequence[str] = ("cpu", "cuda"), transport: str = _DEFAULT) -> list[Route]:
    """All routes, for people to read."""
    return [route(device, same, transport) for device in devices for same in (True, False)]


@dataclass(frozen=True)
class DeviceRow:
    """What the doctor says of a wire for tensors on GPUs.

    Attributes:
        wire: Its name.
        state: ``"in use"``, ``"can be asked for"`` or ``"cannot be used"``.
        why: The reason.
    """

    wire: str
    state: str
    why: str


def explain_device_wires(mine: DeviceFacts, wanted: Sequence[str] = ()) -> list[DeviceRow]:
    """What each wire could do between this rank and one like it on this machine.

    The other rank has a GPU of its own; for ``cuda_ipc`` it may share this one's. In use is also
    what would carry tensors to one like it on another machine.

    Args:
        mine: What this rank says of its device.
        wanted: What ``ASYNCDDP_DEVICE_WIRES`` asks for.

    Example:
        >>> rows = explain_device_wires(DeviceFacts(0, device="cuda", gpu="a", mpi_cuda=True))
        >>> [row.wire for row in rows if row.state == "can be asked for"]
        ['cuda_ipc', 'mpi_cuda']
    """
    other = replace(mine, rank=mine.rank + 1, gpu=f"{mine.gpu}, the next one" if mine.gpu else "")
    sharing, far = replace(other, gpu=mine.gpu), replace(other, machine=mine.machine + 1)
    used: set[str] = set()
    for peer in (other, sharing, far):
        routing = route_group([mine, peer], wanted)
        used |= {routing.between(mine, peer), *routing.used([mine, peer])}
    rows = []
    for wire in DEVICE_WIRES:
        peer = sharing if wire == "cuda_ipc" else other
        against = choose(mine, peer, [wire]).refused.get(wire)
        doubt = f"; but {mine.doubt}" if wire == "nccl" and mine.doubt else ""
        if against is not None:
            rows.append(DeviceRow(wire, "cannot be used", against))
        elif wire in used:
            why = _ASKED if wire in wanted else _DEFAULT_WIRE
            rows.append(DeviceRow(wire, "in use", why + doubt))
        else:
            why = f"ASYNCDDP_DEVICE_WIRES={wire}"
            rows.append(DeviceRow(wire, "can be asked for", why + doubt))
    return rows


_ASKED = "asked for by ASYNCDDP_DEVICE_WIRES"
_DEFAULT_WIRE = "needs nothing of MPI or of the peer's GPU"


def open_world(transport: str | None = None, start: Start | None = None) -> Transport:
    """Open the wire between all ranks of this job.

    Args:
        transport: Its name; if not given, ``shared_memory``, which warns where ranks of one machine
            cannot share memory and goes by MPI.
        start: How long this rank waits for the others.

    Raises:
        UnknownNameError: No transport has that name.
        EnvironmentProblem: It cannot be used on this machine.
        WaitTimeoutError: Some ranks have not come by the deadline.
        MismatchError: A setting that all ranks must share differs.
    """
    if transport is None:
        from asyncddp.transport.shared_memory import SharedMemoryTransport

        return SharedMemoryTransport(start=start, required=False)
    return TRANSPORTS[transport].join(Start.alone() if start is None else start)
