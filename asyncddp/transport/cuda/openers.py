"""Functions that open each kind of transport for tensors on GPUs, between all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from asyncddp.device.streams import DeviceStreams
from asyncddp.transport.base import Transport
from asyncddp.transport.cuda.composite import CompositeTransport
from asyncddp.transport.cuda.pair_selection import DeviceCapabilities, have_peer_access

if TYPE_CHECKING:
    from asyncddp.transport.cuda.nccl.nccl_transport import NCCLTransport


def _nothing() -> None:
    """Do nothing: there is nothing to free."""


@dataclass(frozen=True)
class OpenedTransport:
    """A device transport that was opened, with functions to free it and to open it for subgroups.

    Attributes:
        transport: The transport.
        for_device: Returns it for a device of this rank.
        free: Frees its resources, where it is not used after all.
        for_subgroup: Opens such a transport for some of the ranks; None where it cannot.
    """

    transport: Transport
    for_device: Callable[[DeviceStreams], Transport]
    free: Callable[[], None] = _nothing
    for_subgroup: Callable[[Transport], OpenedTransport] | None = None


def _mpi_cuda(
    transport: Transport,
    streams: DeviceStreams,
    group: Sequence[DeviceCapabilities],
    timeout: float,
) -> OpenedTransport:
    from asyncddp.transport.cuda.cuda_aware_mpi import CudaAwareMPITransport

    del group, timeout
    opened = CudaAwareMPITransport.open(transport, streams)
    return OpenedTransport(opened, opened.for_device)


def _cuda_ipc(
    transport: Transport,
    streams: DeviceStreams,
    group: Sequence[DeviceCapabilities],
    timeout: float,
) -> OpenedTransport:
    from asyncddp.transport.cuda.ipc.ipc_transport import CudaIPCTransport

    del timeout
    mine = group[transport.rank]
    near = [
        facts.rank for facts in group if facts.rank != mine.rank and have_peer_access(mine, facts)
    ]
    opened = CudaIPCTransport.open(transport, streams, near)
    return OpenedTransport(opened, opened.for_device)


def _nccl(
    transport: Transport,
    streams: DeviceStreams,
    group: Sequence[DeviceCapabilities],
    timeout: float,
) -> OpenedTransport:
    from asyncddp.transport.cuda.nccl.nccl_transport import NCCLTransport

    del group
    return _by_nccl(NCCLTransport.open(transport, streams, timeout))


def _by_nccl(transport: NCCLTransport) -> OpenedTransport:
    def for_subgroup(part: Transport) -> OpenedTransport:
        """Open one for a subgroup of the ranks."""
        return _by_nccl(transport.for_subgroup(part))

    return OpenedTransport(transport, transport.for_device, transport.free, for_subgroup)


_Opener: TypeAlias = Callable[
    [Transport, DeviceStreams, Sequence[DeviceCapabilities], float], OpenedTransport
]

OPENERS: dict[str, _Opener] = {"cuda_ipc": _cuda_ipc, "mpi_cuda": _mpi_cuda, "nccl": _nccl}
"""Openers by the name of the transport."""


def combine_transports(
    transport: Transport,
    streams: DeviceStreams,
    opened: Sequence[OpenedTransport],
    peers: Mapping[int, str],
) -> OpenedTransport:
    """Combine several transports into one that chooses by peer.

    Args:
        transport: The transport between all ranks, for tensors on the host.
        streams: Of the device.
        opened: The transports, one at least.
        peers: For each peer the name of the transport of its messages.
    """
    if len(opened) == 1:
        return opened[0]
    transports = {one.transport.name: one.transport for one in opened}
    groups = next((one for one in opened if one.transport.name == "nccl"), None)
    top = transports.pop("cuda_ipc", None)
    if not isinstance(top, CompositeTransport):
        top = CompositeTransport(transport, streams)
    messages = {peer: transports[name] for peer, name in peers.items() if name in transports}
    top.set_delegates(messages, None if groups is None else groups.transport)
    return OpenedTransport(
        top, top.for_device, top.close, None if groups is None else groups.for_subgroup
    )
