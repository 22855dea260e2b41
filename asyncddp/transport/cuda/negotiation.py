"""Negotiation of GPU transports: all ranks choose the same from those that the user allows.

Without ``ASYNCDDP_DEVICE_TRANSPORTS`` the default ones are tried if every rank sees a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from asyncddp.config import Config
from asyncddp.device.stream_interfaces import DeviceStreams
from asyncddp.device.stream_registry import streams_of_device
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
from asyncddp.transport.cuda.staged_transport import device_transport_for
from asyncddp.transport.cuda.trial import run_trial
from asyncddp.transport.record_gathering import gather_records

logger = logging.getLogger("asyncddp")
_TIMEOUT = 60.0  # seconds: the first use of a GPU may take long


@dataclass(frozen=True)
class TransportChoice:
    """Result of the negotiation: names of the chosen GPU transports, reasons against others."""

    transport: str
    refused: Mapping[str, str]
    failed: tuple[str, ...] = ()  # of those, what could not be opened or failed in its trial


def detect_capabilities(
    rank: int, machine: int, rank_on_host: int, transports: Iterable[str] | None = None
) -> DeviceCapabilities:
    """Detect the capabilities of this rank's device and of the transports' libraries."""
    facts = detect_device(rank, machine, rank_on_host)
    names = DEVICE_TRANSPORTS if transports is None else transports
    for name in names if facts.device == "cuda" else ():
        facts = DEVICE_TRANSPORTS[name].detect(facts)
    return facts


def negotiate_from_config(
    transport: Transport,
    config: Config,
    *,
    machine: int,
    rank_on_host: int,
    all_see_gpus: bool = False,
    part: Transport | None = None,
) -> TransportChoice:
    """Negotiate the GPU transport by the configuration; collective.

    Without GPUs, unless the user asks for a transport, there is no negotiation. Ranks that are
    threads always stage. ``part`` connects the ranks of this machine; the transports must not be
    used meanwhile. Raises the errors of :func:`negotiate_transport`, and an UnknownNameError for an
    unknown transport.
    """
    wanted, asked = (
        parse_transport_names(config.device_transports),
        config.device_transports is not None,
    )
    if transport.scope is Scope.PROCESS or not (asked or all_see_gpus):
        return TransportChoice(FALLBACK, {})
    mine = detect_capabilities(transport.rank, machine, rank_on_host, wanted)
    index = default_device_index(rank_on_host)
    streams = None if index is None else streams_of_device(torch.device("cuda", index))
    timeout = min(config.timeout, _TIMEOUT)
    with torch.cuda.device(-1 if index is None else index):  # opening makes no other context
        return negotiate_transport(transport, wanted, mine, streams, timeout, part, asked=asked)


def negotiate_transport(
    transport: Transport,
    wanted: Sequence[str],
    mine: DeviceCapabilities,
    streams: DeviceStreams | None,
    timeout: float,
    part: Transport | None = None,
    *,
    asked: bool = True,
) -> TransportChoice:
    """Negotiate the GPU transport between all ranks from their capabilities; collective.

    The choice is the same on all ranks. It is installed in ``transport``, and in ``part``, which
    connects some of the ranks, if the chosen transport supports subgroups. If a rank cannot open
    a transport, or its trial fails, all ranks free it and choose the next best. Raises a
    MismatchError if only some ranks have GPUs. Rank 0 logs a warning for a transport that the
    user has ``asked`` for but that cannot be used.
    """
    group = gather_records(transport, mine, DeviceCapabilities, timeout)
    require_same_device_kind(group)
    if streams is None:
        return TransportChoice(FALLBACK, {})
    others = [facts for facts in group if facts.rank != mine.rank]
    refused: dict[str, str] = {}
    failed: dict[str, str] = {}
    opened: dict[str, DeviceTransport] = {}
    while True:
        selected = select_for_group(group, [name for name in wanted if name not in failed])
        refused.update(selected.refused)
        used = selected.used_transports(group)
        missing = next((name for name in used if name not in opened), None)
        if missing is None:
            break
        kind = DEVICE_TRANSPORTS[missing]
        served = [
            facts.rank for facts in others if selected.transport_between(mine, facts) == missing
        ]
        make = partial(kind.open, transport, streams, served, timeout)
        made, problem = _open_on_all_ranks(transport, mine.rank, make, timeout, served)
        if made is None:
            failed[missing] = problem
            while opened:  # others may have to serve its peers
                opened.popitem()[1].free()
        else:
            opened[missing] = made
    if used:
        peers = {facts.rank: selected.transport_between(mine, facts) for facts in others}
        every = {name: opened[name] for name in used}
        whole = CompositeTransport.combine(every, peers, selected.collectives)
        _install(transport, whole)
        _open_for_subgroup(part, whole, timeout)
    choice = TransportChoice("+".join(used) or FALLBACK, refused | failed, tuple(failed))
    log = logger.warning if asked else logger.info
    for name, reason in choice.refused.items() if transport.rank == 0 else ():
        log("tensors on GPUs do not go by %s: %s; they go by %s", name, reason, choice.transport)
    for doubt in filter(None, [opened[name].doubt(mine) for name in used]):
        logger.warning("rank %d: %s", transport.rank, doubt)
    return choice


def _install(transport: Transport, opened: DeviceTransport) -> None:
    transport.device_transport_factory = opened.for_device
    device_transport_for(transport, opened.streams)


def _open_for_subgroup(part: Transport | None, whole: DeviceTransport, timeout: float) -> None:
    """Open the same transport in a subgroup, if it supports that; collective in the subgroup."""
    if part is None or part.size == 1:
        return
    make = partial(whole.for_subgroup, part, timeout)
    opened, problem = _open_on_all_ranks(part, whole.rank, make, timeout)
    if opened is not None:
        _install(part, opened)
    elif problem and part.rank == 0:
        logger.warning(
            "sums inside a machine go by %s, not by %s: %s", FALLBACK, whole.name, problem
        )


def _open_on_all_ranks(
    base: Transport,
    rank: int,
    make: Callable[[], DeviceTransport | None],
    timeout: float,
    peers: Collection[int] = (),
) -> tuple[DeviceTransport | None, str]:
    """Open and try a transport on all ranks of ``base``, or free it on all; collective.

    Returns the transport, or the reason why a rank cannot use it; messages call this rank ``rank``.
    Both ``make`` and the trial take at most ``timeout`` seconds and may raise any error on any
    rank.
    """
    opened = None
    for step in ("open", "try"):
        late, problem = False, ""
        try:
            if step == "open":
                opened = make()
            elif opened is not None:
                run_trial(opened, timeout, peers)
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, whatever it is
            late = isinstance(error, TimeoutError)
            words = str(error).removeprefix(f"rank {base.rank}: ") or type(error).__name__
            problem = f"rank {rank}: {words}"
        # a rank that has failed at once waits for one that takes all its time
        told = gather_records(base, (late, rank, problem), tuple[bool, int, str], 2 * timeout)
        if problems := sorted(found for found in told if found[-1]):
            if opened is not None:
                opened.free()
            return None, problems[0][-1]  # an error rather than its consequence
    return opened, ""


def close_device_transports(*transports: Transport) -> None:
    """Close the device transports of host transports; a second call does nothing."""
    for transport in transports:
        for opened in (transport.device_transports or {}).values():
            opened.close()
