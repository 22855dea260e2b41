"""The ranks agree which wire carries tensors on their GPUs, where the user has asked for others.

Without ``ASYNCDDP_DEVICE_WIRES`` nothing is asked and nothing is sent: tensors are staged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from asyncddp.config import Config
from asyncddp.errors import UnknownNameError
from asyncddp.memory.allocate import values
from asyncddp.memory.packing import pack, unpack
from asyncddp.memory.streams import DeviceStreams, streams_of_device
from asyncddp.transport import DEVICE_WIRES
from asyncddp.transport.contract import Transport
from asyncddp.transport.cuda_staged import on_device
from asyncddp.transport.device_openers import OPENERS, Opened, together
from asyncddp.transport.device_routes import (
    LAST_RESORT,
    Choice,
    DeviceFacts,
    device_index,
    same_kind,
)
from asyncddp.transport.device_routing import route_group
from asyncddp.transport.device_trial import try_out

__all__ = ["agree", "let_go", "own_facts", "settle", "wires_of"]

logger = logging.getLogger("asyncddp")

_AUTO = ("cuda_ipc", "nccl", "mpi_cuda")
_PATIENCE = 60.0  # seconds: the first use of a GPU may take long


def wires_of(text: str) -> tuple[str, ...]:
    """The wires that ``ASYNCDDP_DEVICE_WIRES`` names, separated by commas, the best first.

    ``auto`` stands for all of them: ``cuda_ipc,nccl,mpi_cuda``.

    Raises:
        UnknownNameError: There is no such wire.

    Example:
        >>> wires_of("mpi_cuda, cuda_staged")
        ('mpi_cuda', 'cuda_staged')
    """
    if text.strip() == "auto":
        return _AUTO
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names or ("",):
        if name not in DEVICE_WIRES:
            known = ", ".join(DEVICE_WIRES)
            raise UnknownNameError(
                f"environment variable ASYNCDDP_DEVICE_WIRES: expected auto, or some of {known}, "
                f"separated by commas, got {text!r}"
            )
    return names


def own_facts(rank: int, machine: int, local_rank: int) -> DeviceFacts:
    """What this rank knows of the device that it would use; asks torch and the MPI library.

    Args:
        rank: This rank.
        machine: Number of its machine.
        local_rank: Its number there.
    """
    index = device_index(local_rank, torch.cuda.device_count())
    if index is None:
        return DeviceFacts(rank, machine)
    from asyncddp.transport.mpi_cuda import says_cuda
    from asyncddp.transport.nccl_library import doubt, versions

    cupy, nccl = versions()
    facts = DeviceFacts(
        rank, machine, "cuda", _gpu(index), says_cuda(), cupy=cupy, nccl=nccl, doubt=doubt(nccl)
    )
    return replace(facts, reaches=_reached_from(index))


def _gpu(index: int) -> str:
    """The unique name of a GPU; empty where torch does not tell it."""
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def _reached_from(index: int) -> tuple[str, ...]:
    """The unique names of the GPUs whose memory one reads."""
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    near = [_gpu(other) for other in others if torch.cuda.can_device_access_peer(index, other)]
    return tuple(name for name in near if name)


def settle(
    transport: Transport,
    config: Config,
    *,
    machine: int,
    local_rank: int,
    part: Transport | None = None,
) -> Choice:
    """Have all ranks agree on a wire, if ``ASYNCDDP_DEVICE_WIRES`` is set; collective.

    Ranks that are threads stage in any case.

    Args:
        transport: The wire between all ranks, which nobody else uses meanwhile.
        config: The settings.
        part: The wire between the ranks of this machine.
        machine: Number of this machine.
        local_rank: This rank's number there.

    Returns:
        The choice, the same on all ranks.

    Raises:
        UnknownNameError: There is no wire of that name.
        MismatchError: Some ranks see GPUs and others see none.
        EnvironmentProblem: The wire that was chosen cannot be opened.
    """
    if config.device_wires is None:
        return Choice(LAST_RESORT, {})
    wanted = wires_of(config.device_wires)
    if transport.name == "loopback":
        return Choice(LAST_RESORT, {})
    mine = own_facts(transport.rank, machine, local_rank)
    index = device_index(local_rank, torch.cuda.device_count())
    streams = None if index is None else streams_of_device(torch.device("cuda", index))
    return agree(transport, wanted, mine, streams, min(config.timeout, _PATIENCE), part)


def agree(
    transport: Transport,
    wanted: Sequence[str],
    mine: DeviceFacts,
    streams: DeviceStreams | None,
    timeout: float,
    part: Transport | None = None,
) -> Choice:
    """Decide on the wire between all ranks, from what they say; collective.

    Args:
        transport: The wire between all ranks, for tensors on the host.
        wanted: Wires that may be taken, the best first.
        mine: What this rank says.
        streams: Of the device that this rank would use; None where it has none.
        timeout: Seconds for the ranks to answer each other.
        part: A wire between some of the ranks, this one among them, for tensors on the host.

    Returns:
        The choice, the same on all ranks; ``transport`` is told, and ``part`` where the wire
        serves parts as well.

    Raises:
        MismatchError: Some ranks have GPUs and others have none.
        EnvironmentProblem: The wire that was chosen cannot be opened.
    """
    group = _gathered(transport, mine, timeout)
    same_kind(group)
    if streams is None:
        return Choice(LAST_RESORT, {})
    refused: dict[str, str] = {}
    opened: dict[str, Opened] = {}
    while True:
        routing = route_group(group, [wire for wire in wanted if wire not in refused])
        refused.update(routing.refused)
        used = routing.used(group)
        missing = next((name for name in used if name not in opened), None)
        if missing is None:
            break
        made = OPENERS[missing](transport, streams, group, timeout)
        if _all_agree(transport, try_out(made.wire, streams, timeout), timeout):
            opened[missing] = made
        else:
            refused[missing] = "a trial out of GPU memory did not arrive as it was sent"
            made.free()
    if used:
        peers = {
            facts.rank: routing.between(mine, facts) for facts in group if facts.rank != mine.rank
        }
        whole = together(transport, streams, [opened[name] for name in used], peers)
        _install(transport, whole, streams)
        _serve_part(part, whole, streams, timeout)
    choice = Choice("+".join(used) or LAST_RESORT, refused)
    _tell(transport.rank, choice, mine.doubt if "nccl" in used else "")
    return choice


def _tell(rank: int, choice: Choice, doubt: str) -> None:
    """Warn of what was asked for and is not taken, and of what is strange."""
    for wire, reason in choice.refused.items() if rank == 0 else ():
        logger.warning(
            "tensors on GPUs do not go by %s: %s; they go by %s", wire, reason, choice.wire
        )
    if doubt:
        logger.warning("rank %d: %s", rank, doubt)


def _install(transport: Transport, opened: Opened, streams: DeviceStreams) -> None:
    transport.device_wire = opened.serves
    on_device(transport, streams)


def _serve_part(
    part: Transport | None, opened: Opened, streams: DeviceStreams, timeout: float
) -> None:
    """Give the ranks of a part the same wire, where it serves parts; collective in the part."""
    if part is None or part.size == 1 or opened.beside is None:
        return
    beside = opened.beside(part)
    if _all_agree(part, try_out(beside.wire, streams, timeout, messages=False), timeout):
        _install(part, beside, streams)
    else:
        logger.warning(
            "sums inside a machine go by %s: a trial by %s failed", LAST_RESORT, opened.wire.name
        )
        beside.free()


def let_go(*transports: Transport) -> None:
    """Close the wires for tensors on devices, with those beneath; harmless when called twice."""
    for transport in transports:
        for wire in (transport.device_wires or {}).values():
            wire.close()


def _gathered(transport: Transport, mine: DeviceFacts, timeout: float) -> list[DeviceFacts]:
    data = values(list(pack(mine)), torch.uint8)
    sizes = transport.allgather(
        values([data.numel()], torch.int64), [1] * transport.size, timeout
    ).tolist()
    whole = transport.allgather(data, sizes, timeout)
    return [
        unpack(part.numpy().tobytes(), DeviceFacts, f"what rank {peer} says of its GPU")
        for peer, part in enumerate(torch.split(whole, sizes))
    ]


def _all_agree(transport: Transport, mine: bool, timeout: float) -> bool:
    every = transport.allgather(values([int(mine)], torch.int64), [1] * transport.size, timeout)
    return bool(every.all())
