"""The ranks agree which wire carries tensors on their GPUs, where the user has asked for others.

Without ``ASYNCDDP_DEVICE_WIRES`` nothing is asked and nothing is sent: tensors are staged.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from asyncddp.errors import UnknownNameError
from asyncddp.memory.streams import DeviceStreams
from asyncddp.memory.streams_host import HostStreams
from asyncddp.transport import DEVICE_WIRES
from asyncddp.transport.contract import Transport
from asyncddp.transport.device_routes import (
    LAST_RESORT,
    Choice,
    DeviceFacts,
    choose_for_all,
    device_index,
)

__all__ = ["agree", "own_facts", "wires_of"]

logger = logging.getLogger("asyncddp")


def wires_of(text: str) -> tuple[str, ...]:
    """The wires that ``ASYNCDDP_DEVICE_WIRES`` names, separated by commas, the best first.

    Raises:
        UnknownNameError: There is no such wire.

    Example:
        >>> wires_of("mpi_cuda, cuda_staged")
        ('mpi_cuda', 'cuda_staged')
    """
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names or ("",):
        if name not in DEVICE_WIRES:
            known = ", ".join(DEVICE_WIRES)
            raise UnknownNameError(
                f"environment variable ASYNCDDP_DEVICE_WIRES: expected some of {known}, separated "
                f"by commas, got {text!r}"
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
    from asyncddp.transport.nccl import versions

    gpu = str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))
    cupy, nccl = versions()
    return DeviceFacts(rank, machine, "cuda", gpu, says_cuda(), cupy=cupy, nccl=nccl)


def agree(
    transport: Transport,
    wanted: Sequence[str],
    mine: DeviceFacts,
    streams: DeviceStreams | None,
    timeout: float,
) -> Choice:
    """Decide on the wire between all ranks, from what they say; collective.

    Args:
        transport: The wire between all ranks, for tensors on the host.
        wanted: Wires that may be taken, the best first.
        mine: What this rank says.
        streams: Of the device that this rank would use; None where it has none.
        timeout: Seconds for the ranks to answer each other.

    Returns:
        The choice, the same on all ranks; ``transport`` is told.

    Raises:
        MismatchError: Some ranks have GPUs and others have none.
        EnvironmentProblem: The wire that was chosen cannot be opened.
    """
    group = _gathered(transport, mine, timeout)
    if all(facts.device == "cpu" for facts in group):
        return Choice(LAST_RESORT, {})
    choice = choose_for_all([replace(facts, probed=facts.mpi_cuda) for facts in group], wanted)
    if choice.wire == "mpi_cuda" and streams is not None:
        mine = replace(mine, probed=_tried(transport, streams))
        choice = choose_for_all(_gathered(transport, mine, timeout), wanted)
    if choice.wire == "mpi_cuda":
        transport.device_wire = _mpi_cuda(transport)
    if choice.wire == "nccl" and streams is not None:
        transport.device_wire = _nccl(transport, streams, timeout)
    for wire, reason in choice.refused.items() if transport.rank == 0 else ():
        logger.warning(
            "tensors on GPUs do not go by %s: %s; they go by %s", wire, reason, choice.wire
        )
    return choice


def _gathered(transport: Transport, mine: DeviceFacts, timeout: float) -> list[DeviceFacts]:
    data = torch.frombuffer(bytearray(pickle.dumps(mine)), dtype=torch.uint8)
    sizes = transport.allgather(
        torch.tensor([data.numel()]), [1] * transport.size, timeout
    ).tolist()
    whole = transport.allgather(data, sizes, timeout)
    return [pickle.loads(part.numpy().tobytes()) for part in torch.split(whole, sizes)]


def _mpi_cuda(transport: Transport) -> Callable[[DeviceStreams], Transport]:
    """Make the wires of all devices of this rank share one communicator; collective."""
    from asyncddp.transport.mpi_cuda import MPICuda

    first = MPICuda.open(transport, HostStreams())
    return first.for_device


def _nccl(
    transport: Transport, streams: DeviceStreams, timeout: float
) -> Callable[[DeviceStreams], Transport]:
    """Make NCCL's communicator of all ranks; collective."""
    from asyncddp.transport.nccl import NCCL

    return NCCL.open(transport, streams, timeout).for_device


def _tried(transport: Transport, streams: DeviceStreams) -> bool:
    """Whether a message from GPU to GPU arrives as it was sent; collective."""
    from asyncddp.transport.mpi_cuda import MPICuda, try_out

    def made(size: int) -> torch.Tensor:
        return torch.arange(size, device=streams.device).mul_(size).to(torch.uint8)

    return try_out(MPICuda.open(transport, streams), made)
