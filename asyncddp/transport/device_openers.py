"""What opens each wire for tensors on GPUs, between all ranks; collective."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from asyncddp.memory.streams import DeviceStreams
from asyncddp.transport.contract import Transport
from asyncddp.transport.device_routes import DeviceFacts, in_reach
from asyncddp.transport.per_peer import PerPeer

if TYPE_CHECKING:
    from asyncddp.transport.nccl import NCCL

__all__ = ["OPENERS", "Opened", "together"]


def _nothing() -> None:
    """Nothing has to be given back."""


@dataclass(frozen=True)
class Opened:
    """A wire that was opened.

    Attributes:
        wire: The wire.
        serves: Gives it for a device of this rank.
        free: Gives back what it has taken, where it is not used after all.
        beside: Opens such a wire over one between some of the ranks; None where it serves all only.
    """

    wire: Transport
    serves: Callable[[DeviceStreams], Transport]
    free: Callable[[], None] = _nothing
    beside: Callable[[Transport], Opened] | None = None


def _mpi_cuda(
    transport: Transport, streams: DeviceStreams, group: Sequence[DeviceFacts], timeout: float
) -> Opened:
    from asyncddp.transport.mpi_cuda import MPICuda

    del group, timeout
    wire = MPICuda.open(transport, streams)
    return Opened(wire, wire.for_device)


def _cuda_ipc(
    transport: Transport, streams: DeviceStreams, group: Sequence[DeviceFacts], timeout: float
) -> Opened:
    from asyncddp.transport.cuda_ipc import CudaIPC

    del timeout
    mine = group[transport.rank]
    near = [facts.rank for facts in group if facts.rank != mine.rank and in_reach(mine, facts)]
    wire = CudaIPC.open(transport, streams, near)
    return Opened(wire, wire.for_device)


def _nccl(
    transport: Transport, streams: DeviceStreams, group: Sequence[DeviceFacts], timeout: float
) -> Opened:
    from asyncddp.transport.nccl import NCCL

    del group
    return _by_nccl(NCCL.open(transport, streams, timeout))


def _by_nccl(wire: NCCL) -> Opened:
    def beside(part: Transport) -> Opened:
        """Open one for a part of the ranks."""
        return _by_nccl(wire.beside(part))

    return Opened(wire, wire.for_device, wire.free, beside)


_Opener: TypeAlias = Callable[[Transport, DeviceStreams, Sequence[DeviceFacts], float], Opened]

OPENERS: dict[str, _Opener] = {"cuda_ipc": _cuda_ipc, "mpi_cuda": _mpi_cuda, "nccl": _nccl}
"""By the names of the wires."""


def together(
    transport: Transport,
    streams: DeviceStreams,
    opened: Sequence[Opened],
    peers: Mapping[int, str],
) -> Opened:
    """Make one wire of several.

    Args:
        transport: The wire between all ranks, for tensors on the host.
        streams: Of the device.
        opened: The wires, one at least.
        peers: For each peer the name of the wire that carries its messages.
    """
    if len(opened) == 1:
        return opened[0]
    wires = {one.wire.name: one.wire for one in opened}
    groups = next((one for one in opened if one.wire.name == "nccl"), None)
    top = wires.pop("cuda_ipc", None)
    if not isinstance(top, PerPeer):
        top = PerPeer(transport, streams)
    messages = {peer: wires[name] for peer, name in peers.items() if name in wires}
    top.leave_to(messages, None if groups is None else groups.wire)
    return Opened(top, top.for_device, top.close, None if groups is None else groups.beside)
