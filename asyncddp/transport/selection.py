"""Selection of transports: opens the requested one, and lists the routes of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from asyncddp.config import tune_cuda
from asyncddp.errors import EnvironmentProblem
from asyncddp.transport import (
    DEFAULT_DEVICE_TRANSPORTS,
    DEFAULT_TRANSPORT,
    DEVICE_TRANSPORTS,
    TRANSPORTS,
)
from asyncddp.transport.base import Scope, Transport
from asyncddp.transport.cuda.capabilities import DeviceCapabilities
from asyncddp.transport.cuda.device_transport_selection import FALLBACK, select_for_group
from asyncddp.transport.startup_deadline import StartupDeadline


def open_transport(
    transport: str | None = None,
    startup: StartupDeadline | None = None,
    *,
    default: str = DEFAULT_TRANSPORT,
) -> Transport:
    """Open the transport between all ranks of this job.

    Where the user names none it is the ``default``, which warns where ranks of one machine cannot
    share memory and uses messages there.

    Raises:
        UnknownNameError: No transport has that name.
        EnvironmentProblem: The transport cannot be used on this machine.
        WaitTimeoutError: Some ranks have not arrived by the deadline.
        MismatchError: A setting that all ranks must share differs.
    """
    startup = startup or StartupDeadline.for_single_process()
    name = default if transport is None else transport
    if torch.version.cuda is not None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tune_cuda(startup.config.device_transports)
    return TRANSPORTS[name].join(startup, required=transport is not None)


def can_load(transport: str) -> bool:
    """Tell whether the libraries that a transport needs can be loaded."""
    try:
        return bool(TRANSPORTS[transport])
    except EnvironmentProblem:
        return False


@dataclass(frozen=True)
class TransportRoute:
    """Route of one device type's tensors to a peer: the transport, and its way of copying."""

    device: str
    peer: str  # "same machine" or "other machine"
    transport: str
    how: str


def select_route(
    device: str,
    same_machine: bool,
    transport: str = DEFAULT_TRANSPORT,
    device_transports: Sequence[str] = (),
) -> TransportRoute:
    """Select the transport for a kind of tensor to a peer, if one connects all ranks.

    ``device_transports`` are those in use for tensors on GPUs, the best first; what goes by none of
    them is staged.

    Example:
        >>> select_route("cuda", same_machine=True).how
        'in pieces through pinned host memory, mixed on the GPU'
        >>> select_route("cuda", same_machine=True, device_transports=["cuda_ipc"]).transport
        'cuda_ipc'
        >>> select_route("cpu", same_machine=False).transport
        'mpi'
    """
    chosen = TRANSPORTS[transport]
    messages = chosen.messages_by or chosen.name
    name = chosen.name if same_machine else messages
    how = chosen.local_path if same_machine else chosen.remote_path
    if device == "cuda":
        serving = [DEVICE_TRANSPORTS[name] for name in (*device_transports, FALLBACK)]
        first = next(one for one in serving if same_machine or one.scope is Scope.ANY)
        name = f"{FALLBACK} over {messages}" if first.name == FALLBACK else first.name
        how = first.local_path
    elif device != "cpu":
        how = "copied to host memory, sent, copied back"
    return TransportRoute(device, "same machine" if same_machine else "other machine", name, how)


@dataclass(frozen=True)
class DeviceTransportStatus:
    """Availability of one GPU transport on this machine, and the reason."""

    transport: str
    state: str  # "in use", "can be asked for" or "cannot be used"
    why: str


def list_device_transports(
    mine: DeviceCapabilities, wanted: Sequence[str] = ()
) -> list[DeviceTransportStatus]:
    """List the status of each GPU transport between this rank and similar ones.

    The others are on this machine, with a GPU of their own or this rank's, or on another machine.
    ``wanted`` are the transports in ``ASYNCDDP_DEVICE_TRANSPORTS``, or of the default.
    """
    other = replace(mine, rank=mine.rank + 1, gpu=f"{mine.gpu}, the next one" if mine.gpu else "")
    sharing, far = replace(other, gpu=mine.gpu), replace(other, machine=mine.machine + 1)
    used: set[str] = set()
    for peer in (other, sharing, far):
        selected = select_for_group([mine, peer], wanted)
        used |= {selected.transport_between(mine, peer), *selected.used_transports([mine, peer])}
    rows = []
    for name, transport in DEVICE_TRANSPORTS.items():
        obstacle = transport.obstacle(mine, other)
        doubt = f"; but {found}" if (found := transport.doubt(mine)) else ""
        if obstacle is not None and transport.obstacle(mine, sharing) is not None:
            state, why = "cannot be used", obstacle
        elif name not in used:
            state, why = "can be asked for", f"ASYNCDDP_DEVICE_TRANSPORTS={name}{doubt}"
        elif name in wanted:
            default = tuple(wanted) == DEFAULT_DEVICE_TRANSPORTS
            reason = "by default" if default else "asked for by ASYNCDDP_DEVICE_TRANSPORTS"
            state, why = "in use", f"{reason}{doubt}"
        else:
            state, why = "in use", "needs nothing of MPI or of the peer's GPU"
        rows.append(DeviceTransportStatus(name, state, why))
    return rows
