"""Negotiation among all ranks of the transports for GPU tensors, out of those the user allows.

Without ``ASYNCDDP_DEVICE_WIRES`` nothing is sent, and tensors are staged through host memory.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from asyncddp.config import Config
from asyncddp.device.stream_registry import streams_of_device
from asyncddp.device.streams import DeviceStreams
from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import make_tensor
from asyncddp.transport import DEVICE_TRANSPORTS
from asyncddp.transport.base import Scope, Transport
from asyncddp.transport.cuda.capabilities import (
    DeviceCapabilities,
    default_device_index,
    detect_device,
)
from asyncddp.transport.cuda.composite import CompositeTransport
from asyncddp.transport.cuda.device_transport import DeviceTransport
from asyncddp.transport.cuda.device_transport_selection import (
    FALLBACK,
    parse_transport_names,
    require_same_device_kind,
    select_for_group,
)
from asyncddp.transport.cuda.nccl.cupy_bindings import prepare_cuda
from asyncddp.transport.cuda.staged_transport import device_transport_for

logger = logging.getLogger("asyncddp")
_TIMEOUT = 60.0  # seconds: the first use of a GPU may take long


@dataclass(frozen=True)
class TransportChoice:
    """Names of the transports chosen for GPU tensors, and the reasons why others were rejected."""

    transport: str
    refused: Mapping[str, str]


def detect_capabilities(rank: int, machine: int, local_rank: int) -> DeviceCapabilities:
    """Detect the capabilities of this rank's device and of the libraries of all transports."""
    facts = detect_device(rank, machine, local_rank)
    for transport in DEVICE_TRANSPORTS.values() if facts.device == "cuda" else ():
        facts = transport.detect(facts)
    return facts


def negotiate_from_config(
    transport: Transport,
    config: Config,
    *,
    machine: int,
    local_rank: int,
    part: Transport | None = None,
) -> TransportChoice:
    """Negotiate the transport if ``ASYNCDDP_DEVICE_WIRES`` is set; collective.

    Ranks that are threads stage in any case. ``part`` connects the ranks of this machine; nobody
    else uses the transports meanwhile. Raises the same as :func:`negotiate_transport`, and
    UnknownNameError where there is no transport of that name.
    """
    wanted = () if config.device_wires is None else parse_transport_names(config.device_wires)
    if not wanted or transport.scope is Scope.PROCESS:
        return TransportChoice(FALLBACK, {})
    if "nccl" in wanted:
        prepare_cuda()
    mine = detect_capabilities(transport.rank, machine, local_rank)
    index = default_device_index(local_rank, torch.cuda.device_count())
    streams = None if index is None else streams_of_device(torch.device("cuda", index))
    timeout = min(config.timeout, _TIMEOUT)
    return negotiate_transport(transport, wanted, mine, streams, timeout, part)


def negotiate_transport(
    transport: Transport,
    wanted: Sequence[str],
    mine: DeviceCapabilities,
    streams: DeviceStreams | None,
    timeout: float,
    part: Transport | None = None,
) -> TransportChoice:
    """Negotiate the transport between all ranks from their capabilities; collective.

    The choice is the same on all ranks. It is installed in ``transport``, and in ``part``, which
    connects some of the ranks, where the chosen transport can serve subgroups. Ranks with and
    without GPUs are a MismatchError.
    """
    group = _gather_capabilities(transport, mine, timeout)
    require_same_device_kind(group)
    if streams is None:
        return TransportChoice(FALLBACK, {})
    others = [facts for facts in group if facts.rank != mine.rank]
    refused: dict[str, str] = {}
    opened: dict[str, DeviceTransport] = {}
    while True:
        selected = select_for_group(group, [name for name in wanted if name not in refused])
        refused.update(selected.refused)
        used = selected.used_transports(group)
        missing = next((name for name in used if name not in opened), None)
        if missing is None:
            break
        kind = DEVICE_TRANSPORTS[missing]
        reachable = [facts.rank for facts in others if kind.obstacle(mine, facts) is None]
        made = kind.open(transport, streams, reachable, timeout)
        if all(_allgather_number(transport, made.verify(timeout), timeout)):
            opened[missing] = made
        else:
            refused[missing] = "a trial out of GPU memory did not arrive as it was sent"
            made.free()
    if used:
        peers = {facts.rank: selected.transport_between(mine, facts) for facts in others}
        every = {name: opened[name] for name in used}
        whole = CompositeTransport.combine(every, peers, selected.collectives)
        _install(transport, whole)
        _open_for_subgroup(part, whole, timeout)
    choice = TransportChoice("+".join(used) or FALLBACK, refused)
    _log_choice(transport.rank, choice, [opened[name].doubt(mine) for name in used])
    return choice


def _log_choice(rank: int, choice: TransportChoice, doubts: Sequence[str]) -> None:
    """Warn of requested transports that are not used, and of doubts about those in use."""
    for name, reason in choice.refused.items() if rank == 0 else ():
        logger.warning(
            "tensors on GPUs do not go by %s: %s; they go by %s", name, reason, choice.transport
        )
    for doubt in filter(None, doubts):
        logger.warning("rank %d: %s", rank, doubt)


def _install(transport: Transport, opened: DeviceTransport) -> None:
    transport.device_transport_factory = opened.for_device
    device_transport_for(transport, opened.streams)


def _open_for_subgroup(part: Transport | None, whole: DeviceTransport, timeout: float) -> None:
    """Open the same transport in a subgroup, where it supports that; collective in the subgroup."""
    opened = None if part is None or part.size == 1 else whole.for_subgroup(part)
    if part is None or opened is None:
        return
    works = opened.verify(timeout, messages=False)
    if all(_allgather_number(part, works, timeout)):
        _install(part, opened)
    else:
        logger.warning("sums inside a machine go by %s: a trial by %s failed", FALLBACK, whole.name)
        opened.free()


def close_device_transports(*transports: Transport) -> None:
    """Close the device transports of host transports; harmless when called twice."""
    for transport in transports:
        for opened in (transport.device_transports or {}).values():
            opened.close()


def _gather_capabilities(
    transport: Transport, mine: DeviceCapabilities, timeout: float
) -> list[DeviceCapabilities]:
    data = make_tensor(list(pack(mine)), torch.uint8)
    sizes = _allgather_number(transport, data.numel(), timeout)
    whole = transport.allgather(data, sizes, timeout)
    return [
        unpack(part.numpy().tobytes(), DeviceCapabilities, f"what rank {peer} says of its GPU")
        for peer, part in enumerate(torch.split(whole, sizes))
    ]


def _allgather_number(transport: Transport, mine: int, timeout: float) -> list[int]:
    number = make_tensor([mine], torch.int64)
    every: list[int] = transport.allgather(number, [1] * transport.size, timeout).tolist()
    return every
