"""Selection of the transport for each kind of tensor and peer, also for ``asyncddp doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from asyncddp.transport import DEVICE_TRANSPORTS, TRANSPORTS
from asyncddp.transport.base import Transport
from asyncddp.transport.cuda.group_selection import select_for_group
from asyncddp.transport.cuda.pair_selection import FALLBACK, DeviceCapabilities, select_for_pair
from asyncddp.transport.startup_deadline import StartupDeadline


@dataclass(frozen=True)
class TransportRoute:
    """Transport that carries tensors of one kind of device to a peer, and how it moves them.

    Attributes:
        device: ``torch.device.type`` of the tensor.
        peer: Location of the peer: ``"same machine"`` or ``"other machine"``.
        transport: Name of the transport.
        how: Path of the bytes, in words.
    """

    device: str
    peer: str
    transport: str
    how: str


_DIRECT = "straight from the tensor's memory"
_SHARED = "read where they lie, or piece by piece out of shared memory"
_STAGED = "in pieces through pinned host memory, mixed on the GPU"
_OTHER = "copied to host memory, sent, copied back"
_DEFAULT = "shared_memory"


def select_route(device: str, same_machine: bool, transport: str = _DEFAULT) -> TransportRoute:
    """Select the transport for a kind of tensor and a peer.

    Args:
        device: ``torch.device.type`` of the tensor.
        same_machine: True if the peer is on this machine.
        transport: The transport between all ranks, ``ASYNCDDP_TRANSPORT`` or ``shared_memory``.

    Returns:
        The route; every device has one.

    Raises:
        UnknownNameError: No transport has that name.

    Example:
        >>> select_route("cuda", same_machine=True).how
        'in pieces through pinned host memory, mixed on the GPU'
        >>> select_route("cpu", same_machine=False).transport
        'mpi'
    """
    name = TRANSPORTS[transport].name
    shares = name == "shared_memory" and same_machine
    peer = "same machine" if same_machine else "other machine"
    if name == "shared_memory" and not same_machine:
        name = "mpi"
    if device == "cuda":
        base = "mpi" if name == "shared_memory" else name
        return TransportRoute(device, peer, f"{FALLBACK} over {base}", _STAGED)
    if device != "cpu":
        return TransportRoute(device, peer, name, _OTHER)
    return TransportRoute(device, peer, name, _SHARED if shares else _DIRECT)


def list_routes(
    devices: Sequence[str] = ("cpu", "cuda"), transport: str = _DEFAULT
) -> list[TransportRoute]:
    """List the routes from every kind of device to both kinds of peer, for ``asyncddp doctor``."""
    return [select_route(device, same, transport) for device in devices for same in (True, False)]


@dataclass(frozen=True)
class DeviceTransportStatus:
    """Status of one transport for tensors on GPUs: in use, available or unusable, and why.

    Attributes:
        transport: Name of the transport.
        state: ``"in use"``, ``"can be asked for"`` or ``"cannot be used"``.
        why: The reason.
    """

    transport: str
    state: str
    why: str


def list_device_transports(
    mine: DeviceCapabilities, wanted: Sequence[str] = ()
) -> list[DeviceTransportStatus]:
    """List the status of each GPU transport between this rank and a similar one.

    The other rank is on this machine and has a GPU of its own; for ``cuda_ipc`` it may share this
    one's. A transport that would carry tensors to a rank on another machine is in use as well.

    Args:
        mine: Facts about this rank's device.
        wanted: Transports that ``ASYNCDDP_DEVICE_WIRES`` names.

    Example:
        >>> rows = list_device_transports(
        ...     DeviceCapabilities(0, device="cuda", gpu="a", mpi_cuda=True)
        ... )
        >>> [row.transport for row in rows if row.state == "can be asked for"]
        ['cuda_ipc', 'mpi_cuda']
    """
    other = replace(mine, rank=mine.rank + 1, gpu=f"{mine.gpu}, the next one" if mine.gpu else "")
    sharing, far = replace(other, gpu=mine.gpu), replace(other, machine=mine.machine + 1)
    used_transports: set[str] = set()
    for peer in (other, sharing, far):
        routing = select_for_group([mine, peer], wanted)
        used_transports |= {
            routing.transport_between(mine, peer),
            *routing.used_transports([mine, peer]),
        }
    rows = []
    for transport in DEVICE_TRANSPORTS:
        peer = sharing if transport == "cuda_ipc" else other
        against = select_for_pair(mine, peer, [transport]).refused.get(transport)
        doubt = f"; but {mine.doubt}" if transport == "nccl" and mine.doubt else ""
        if against is not None:
            rows.append(DeviceTransportStatus(transport, "cannot be used", against))
        elif transport in used_transports:
            why = _REQUESTED_REASON if transport in wanted else _DEFAULT_REASON
            rows.append(DeviceTransportStatus(transport, "in use", why + doubt))
        else:
            why = f"ASYNCDDP_DEVICE_WIRES={transport}"
            rows.append(DeviceTransportStatus(transport, "can be asked for", why + doubt))
    return rows


_REQUESTED_REASON = "asked for by ASYNCDDP_DEVICE_WIRES"
_DEFAULT_REASON = "needs nothing of MPI or of the peer's GPU"


def open_transport(
    transport: str | None = None, startup: StartupDeadline | None = None
) -> Transport:
    """Open the transport between all ranks of this job.

    Args:
        transport: Name of the transport; if not given, ``shared_memory``, which warns
            where ranks of one machine cannot share memory and uses MPI there.
        startup: Deadline of ``init()``, and the settings that all ranks must share.

    Raises:
        UnknownNameError: No transport has that name.
        EnvironmentProblem: The transport cannot be used on this machine.
        WaitTimeoutError: Some ranks have not arrived by the deadline.
        MismatchError: A setting that all ranks must share differs.
    """
    if transport is None:
        from asyncddp.transport.shared_memory.shared_memory_transport import SharedMemoryTransport

        return SharedMemoryTransport(startup=startup, required=False)
    return TRANSPORTS[transport].join(
        StartupDeadline.for_single_process() if startup is None else startup
    )
