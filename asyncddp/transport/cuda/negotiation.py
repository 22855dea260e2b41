"""Negotiation between ranks of the transports for tensors on GPUs (ASYNCDDP_DEVICE_WIRES).

Without ``ASYNCDDP_DEVICE_WIRES`` nothing is sent, and tensors are staged through host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from asyncddp.config import Config
from asyncddp.device.streams import DeviceStreams, streams_of_device
from asyncddp.errors import UnknownNameError
from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import make_tensor
from asyncddp.transport import DEVICE_TRANSPORTS
from asyncddp.transport.base import Transport
from asyncddp.transport.cuda.group_selection import select_for_group
from asyncddp.transport.cuda.openers import OPENERS, OpenedTransport, combine_transports
from asyncddp.transport.cuda.pair_selection import (
    FALLBACK,
    DeviceCapabilities,
    TransportChoice,
    default_device_index,
    require_same_device_kind,
)
from asyncddp.transport.cuda.staged_transport import device_transport_for
from asyncddp.transport.cuda.verification import verify_transport

logger = logging.getLogger("asyncddp")

_AUTO = ("cuda_ipc", "nccl", "mpi_cuda")
_NEGOTIATION_TIMEOUT = 60.0  # seconds: the first use of a GPU may take long


def parse_transport_names(text: str) -> tuple[str, ...]:
    """Parse the names of transports in ``ASYNCDDP_DEVICE_WIRES``: comma-separated, the best first.

    ``auto`` stands for all of them: ``cuda_ipc,nccl,mpi_cuda``.

    Raises:
        UnknownNameError: There is no such transport.

    Example:
        >>> parse_transport_names("mpi_cuda, cuda_staged")
        ('mpi_cuda', 'cuda_staged')
    """
    if text.strip() == "auto":
        return _AUTO
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names or ("",):
        if name not in DEVICE_TRANSPORTS:
            known = ", ".join(DEVICE_TRANSPORTS)
            raise UnknownNameError(
                f"environment variable ASYNCDDP_DEVICE_WIRES: expected auto, or some of {known}, "
                f"separated by commas, got {text!r}"
            )
    return names


def detect_capabilities(rank: int, machine: int, local_rank: int) -> DeviceCapabilities:
    """Detect the capabilities of the device that this rank would use, from torch and MPI.

    Args:
        rank: This rank.
        machine: Number of its machine.
        local_rank: Its number there.
    """
    index = default_device_index(local_rank, torch.cuda.device_count())
    if index is None:
        return DeviceCapabilities(rank, machine)
    from asyncddp.transport.cuda.cuda_aware_mpi import query_cuda_support
    from asyncddp.transport.cuda.nccl.cupy_bindings import describe_conflict, versions

    cupy, nccl = versions()
    facts = DeviceCapabilities(
        rank,
        machine,
        "cuda",
        _gpu_uuid(index),
        query_cuda_support(),
        cupy=cupy,
        nccl=nccl,
        doubt=describe_conflict(nccl),
    )
    return replace(facts, reaches=_accessible_gpus(index))


def _gpu_uuid(index: int) -> str:
    """Return the UUID of a GPU; empty where torch does not tell it."""
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def _accessible_gpus(index: int) -> tuple[str, ...]:
    """Return the UUIDs of the other GPUs whose memory a GPU can access directly."""
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    near = [_gpu_uuid(other) for other in others if torch.cuda.can_device_access_peer(index, other)]
    return tuple(name for name in near if name)


def negotiate_from_config(
    transport: Transport,
    config: Config,
    *,
    machine: int,
    local_rank: int,
    part: Transport | None = None,
) -> TransportChoice:
    """Negotiate the transport if ``ASYNCDDP_DEVICE_WIRES`` is set; collective.

    Ranks that are threads stage in any case.

    Args:
        transport: The transport between all ranks, which nobody else uses meanwhile.
        config: The settings.
        part: The transport between the ranks of this machine.
        machine: Number of this machine.
        local_rank: This rank's number there.

    Returns:
        The choice, the same on all ranks.

    Raises:
        UnknownNameError: There is no transport of that name.
        MismatchError: Some ranks see GPUs and others see none.
        EnvironmentProblem: The chosen transport cannot be opened.
    """
    if config.device_wires is None:
        return TransportChoice(FALLBACK, {})
    wanted = parse_transport_names(config.device_wires)
    if transport.name == "loopback":
        return TransportChoice(FALLBACK, {})
    mine = detect_capabilities(transport.rank, machine, local_rank)
    index = default_device_index(local_rank, torch.cuda.device_count())
    streams = None if index is None else streams_of_device(torch.device("cuda", index))
    return negotiate_transport(
        transport, wanted, mine, streams, min(config.timeout, _NEGOTIATION_TIMEOUT), part
    )


def negotiate_transport(
    transport: Transport,
    wanted: Sequence[str],
    mine: DeviceCapabilities,
    streams: DeviceStreams | None,
    timeout: float,
    part: Transport | None = None,
) -> TransportChoice:
    """Negotiate the transport between all ranks from their capabilities; collective.

    Args:
        transport: The transport between all ranks, for tensors on the host.
        wanted: Names of allowed transports, the best first.
        mine: Capabilities of this rank's device.
        streams: Streams of the device that this rank would use; None where it has none.
        timeout: Seconds for the ranks to answer each other.
        part: A transport between some of the ranks, this one among them, for host tensors.

    Returns:
        The choice, the same on all ranks; it is installed in ``transport``, and in ``part`` where
        the chosen transport can serve subgroups.

    Raises:
        MismatchError: Some ranks have GPUs and others have none.
        EnvironmentProblem: The chosen transport cannot be opened.
    """
    group = _gather_capabilities(transport, mine, timeout)
    require_same_device_kind(group)
    if streams is None:
        return TransportChoice(FALLBACK, {})
    refused: dict[str, str] = {}
    opened: dict[str, OpenedTransport] = {}
    while True:
        routing = select_for_group(group, [name for name in wanted if name not in refused])
        refused.update(routing.refused)
        used = routing.used_transports(group)
        missing = next((name for name in used if name not in opened), None)
        if missing is None:
            break
        made = OPENERS[missing](transport, streams, group, timeout)
        if _all_true(transport, verify_transport(made.transport, streams, timeout), timeout):
            opened[missing] = made
        else:
            refused[missing] = "a trial out of GPU memory did not arrive as it was sent"
            made.free()
    if used:
        peers = {
            facts.rank: routing.transport_between(mine, facts)
            for facts in group
            if facts.rank != mine.rank
        }
        whole = combine_transports(transport, streams, [opened[name] for name in used], peers)
        _install(transport, whole, streams)
        _open_for_subgroup(part, whole, streams, timeout)
    choice = TransportChoice("+".join(used) or FALLBACK, refused)
    _log_choice(transport.rank, choice, mine.doubt if "nccl" in used else "")
    return choice


def _log_choice(rank: int, choice: TransportChoice, doubt: str) -> None:
    """Warn of requested transports that are not used, and of conflicting NCCL libraries."""
    for name, reason in choice.refused.items() if rank == 0 else ():
        logger.warning(
            "tensors on GPUs do not go by %s: %s; they go by %s", name, reason, choice.transport
        )
    if doubt:
        logger.warning("rank %d: %s", rank, doubt)


def _install(transport: Transport, opened: OpenedTransport, streams: DeviceStreams) -> None:
    transport.device_transport_factory = opened.for_device
    device_transport_for(transport, streams)


def _open_for_subgroup(
    part: Transport | None, opened: OpenedTransport, streams: DeviceStreams, timeout: float
) -> None:
    """Open the same transport in a subgroup, where it supports that; collective in the subgroup."""
    if part is None or part.size == 1 or opened.for_subgroup is None:
        return
    for_subgroup = opened.for_subgroup(part)
    if _all_true(
        part, verify_transport(for_subgroup.transport, streams, timeout, messages=False), timeout
    ):
        _install(part, for_subgroup, streams)
    else:
        logger.warning(
            "sums inside a machine go by %s: a trial by %s failed", FALLBACK, opened.transport.name
        )
        for_subgroup.free()


def close_device_transports(*transports: Transport) -> None:
    """Close the device transports of host transports; harmless when called twice."""
    for transport in transports:
        for opened in (transport.device_transports or {}).values():
            opened.close()


def _gather_capabilities(
    transport: Transport, mine: DeviceCapabilities, timeout: float
) -> list[DeviceCapabilities]:
    data = make_tensor(list(pack(mine)), torch.uint8)
    sizes = transport.allgather(
        make_tensor([data.numel()], torch.int64), [1] * transport.size, timeout
    ).tolist()
    whole = transport.allgather(data, sizes, timeout)
    return [
        unpack(part.numpy().tobytes(), DeviceCapabilities, f"what rank {peer} says of its GPU")
        for peer, part in enumerate(torch.split(whole, sizes))
    ]


def _all_true(transport: Transport, mine: bool, timeout: float) -> bool:
    every = transport.allgather(
        make_tensor([int(mine)], torch.int64), [1] * transport.size, timeout
    )
    return bool(every.all())
