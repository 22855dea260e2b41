"""Selection of the transport between the GPUs of two ranks, with the reasons against others.

A transport can be used between two ranks where the user allows it and its conditions hold; the
first such one of the user's list is taken, and ``cuda_staged`` where there is none. All ranks of a
group decide from the same capabilities and come to the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from asyncddp.errors import MismatchError
from asyncddp.packages import install_command
from asyncddp.rank_lists import list_ranks

FALLBACK = "cuda_staged"
"""The transport that has no conditions."""


@dataclass(frozen=True)
class DeviceCapabilities:
    """Capabilities of the device that a rank would use, as the rank tells the others.

    Attributes:
        rank: The rank.
        machine: Number of its machine.
        device: ``"cuda"``, or ``"cpu"`` where torch sees no GPU.
        gpu: The GPU's UUID, the same for ranks that share it; empty if unknown.
        mpi_cuda: Whether the MPI library says that it takes GPU memory; None if it says nothing.
        cupy: Version of cupy; None where it cannot be imported.
        nccl: Version of the NCCL that cupy has loaded, as ``22703`` for 2.27.3; None where none.
        doubt: Conflict of NCCL libraries in the process, in words; empty where there is none.
        reaches: UUIDs of the other visible GPUs whose memory its own can access.
    """

    rank: int
    machine: int = 0
    device: str = "cpu"
    gpu: str = ""
    mpi_cuda: bool | None = None
    cupy: str | None = None
    nccl: int | None = None
    doubt: str = ""
    reaches: tuple[str, ...] = ()


@dataclass(frozen=True)
class TransportChoice:
    """Choice of a transport, with the reasons against the others that were requested.

    Attributes:
        transport: Name of the transport.
        refused: For each transport that was requested and not taken, the reason.
    """

    transport: str
    refused: Mapping[str, str]


_Check = Callable[[DeviceCapabilities, DeviceCapabilities], str | None]
_NCCL_LEAST = 20700  # send and recv came with 2.7


def _ranks(
    have: Callable[[DeviceCapabilities], bool], one: DeviceCapabilities, other: DeviceCapabilities
) -> str:
    """Name those of two ranks for which a condition does not hold."""
    missing = [f"rank {facts.rank}" for facts in (one, other) if not have(facts)]
    return " and ".join(missing)


def _mpi_says_so(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    where = _ranks(lambda facts: facts.mpi_cuda is True, one, other)
    return f"the MPI library of {where} does not say that it takes GPU memory" if where else None


def _gpus_known(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    where = _ranks(lambda facts: bool(facts.gpu), one, other)
    return f"it is not known which GPU {where} uses" if where else None


def _cupy_there(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    where = _ranks(lambda facts: facts.cupy is not None, one, other)
    install = install_command("cuda12", "cuda13")
    return f"{where} cannot import cupy: {install}" if where else None


def _nccl_there(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    where = _ranks(lambda facts: (facts.nccl or 0) >= _NCCL_LEAST, one, other)
    return f"cupy finds no NCCL of at least 2.7 at {where}" if where else None


def _nccl_alike(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    if one.nccl == other.nccl:
        return None
    return f"rank {one.rank} has NCCL {one.nccl}, rank {other.rank} has {other.nccl}"


def _two_gpus(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    if one.gpu == other.gpu:
        return f"rank {one.rank} and rank {other.rank} share one GPU, which NCCL refuses"
    return None


def _memory_read(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    if have_peer_access(one, other):
        return None
    return f"rank {one.rank} and rank {other.rank} do not read each other's GPU memory"


_CONDITIONS: Mapping[str, tuple[_Check, ...]] = {
    "nccl": (_cupy_there, _nccl_there, _nccl_alike, _gpus_known, _two_gpus),
    "mpi_cuda": (_mpi_says_so,),
    "cuda_ipc": (_gpus_known, _memory_read),
    FALLBACK: (),
}
"""Conditions of each transport between two ranks; the first that fails is the reason."""


def select_for_pair(
    one: DeviceCapabilities, other: DeviceCapabilities, wanted: Sequence[str] = (FALLBACK,)
) -> TransportChoice:
    """Select the transport for tensors on the GPUs of two ranks.

    Args:
        one: Capabilities of one rank.
        other: Capabilities of the other one; the order does not matter.
        wanted: Names of allowed transports, the best first.

    Returns:
        The transport, and the reasons against those before it.

    Raises:
        MismatchError: One rank has a GPU and the other one has none.

    Example:
        >>> one, other = (
        ...     DeviceCapabilities(rank, device="cuda", mpi_cuda=False) for rank in (0, 1)
        ... )
        >>> choice = select_for_pair(one, other, ["mpi_cuda"])
        >>> choice.transport
        'cuda_staged'
        >>> choice.refused["mpi_cuda"]
        'the MPI library of rank 0 and rank 1 does not say that it takes GPU memory'
    """
    require_same_device_kind([one, other])
    refused: dict[str, str] = {}
    for transport in wanted:
        reasons = (check(one, other) for check in _CONDITIONS[transport])
        reason = next((text for text in reasons if text is not None), None)
        if reason is None:
            return TransportChoice(transport, refused)
        refused[transport] = reason
    return TransportChoice(FALLBACK, refused)


def require_same_device_kind(group: Sequence[DeviceCapabilities]) -> None:
    """Raise an error for a group of which some ranks have GPUs and others have none.

    Raises:
        MismatchError: The kinds of devices differ.
    """
    kinds: dict[str, list[int]] = {}
    for facts in group:
        kinds.setdefault(facts.device, []).append(facts.rank)
    if len(kinds) > 1:
        parts = [
            f"{list_ranks(r)} {'have' if r[1:] else 'has'} tensors on {kind}"
            for kind, r in sorted(kinds.items())
        ]
        raise MismatchError(
            f"{' and '.join(parts)}: expected all ranks of a run on one kind of device. Start it "
            "only where there are GPUs, or hide them with CUDA_VISIBLE_DEVICES= on all ranks"
        )


def default_device_index(local_rank: int, visible: int) -> int | None:
    """Return the GPU that a rank uses by default: its local rank modulo the visible GPUs.

    The library never calls ``torch.cuda.set_device``: which GPU a rank uses is the user's choice.

    Args:
        local_rank: The rank's number among those of its machine.
        visible: GPUs that the rank sees.

    Returns:
        The index; None where there is no GPU.

    Example:
        >>> [default_device_index(rank, 2) for rank in range(4)], default_device_index(0, 0)
        ([0, 1, 0, 1], None)
    """
    return local_rank % visible if visible else None


def have_peer_access(one: DeviceCapabilities, other: DeviceCapabilities) -> bool:
    """Return whether two ranks have access to each other's GPU memory.

    They have it on one machine, where they share a GPU or each GPU can access the other's memory.

    Args:
        one: Capabilities of one rank.
        other: Capabilities of the other one.

    Example:
        >>> one = DeviceCapabilities(0, gpu="a", reaches=("b",))
        >>> [
        ...     have_peer_access(one, DeviceCapabilities(1, gpu="b", reaches=seen))
        ...     for seen in (("a",), ())
        ... ]
        [True, False]
    """
    if one.machine != other.machine or not (one.gpu and other.gpu):
        return False
    return one.gpu == other.gpu or (one.gpu in other.reaches and other.gpu in one.reaches)
