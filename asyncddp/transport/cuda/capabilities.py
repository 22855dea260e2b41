"""Capabilities of a rank's device, from which ranks select the transports between their GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceCapabilities:
    """Capabilities of a rank's device (GPU, NCCL, MPI support), which ranks tell each other."""

    rank: int
    machine: int = 0
    device: str = "cpu"  # or "cuda" where torch sees a GPU
    gpu: str = ""  # its UUID, the same for ranks that share it; empty if unknown
    mpi_cuda: bool | None = None  # what the MPI library says of GPU memory; None if nothing
    cupy: str | None = None  # the version; None where cupy cannot be imported
    nccl: int | None = None  # version of the NCCL that cupy has loaded, as 22703 for 2.27.3
    nccl_host: str = ""  # by which NCCL tells machines apart; empty where it takes the host's name
    nccl_shares_gpu: bool = False  # whether NCCL lets ranks share a GPU, as it can since 2.30
    doubt: str = ""  # a conflict of NCCL libraries in the process, in words
    reaches: tuple[str, ...] = ()  # UUIDs of the other visible GPUs whose memory it can access


def detect_device(rank: int, machine: int, rank_on_host: int) -> DeviceCapabilities:
    """Detect the device that this rank would use, and which others it can access, from torch."""
    index = default_device_index(rank_on_host, torch.cuda.device_count())
    if index is None:
        return DeviceCapabilities(rank, machine)
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    near = [_gpu_uuid(other) for other in others if torch.cuda.can_device_access_peer(index, other)]
    reaches = tuple(name for name in near if name)
    return DeviceCapabilities(rank, machine, "cuda", _gpu_uuid(index), reaches=reaches)


def _gpu_uuid(index: int) -> str:
    """Return the UUID of a GPU; empty where torch does not tell it."""
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def default_device_index(rank_on_host: int, visible: int) -> int | None:
    """Return the GPU that a rank uses by default: its number on its host modulo the visible GPUs.

    None where there is no GPU. The library never calls ``torch.cuda.set_device``.

    Example:
        >>> [default_device_index(rank, 2) for rank in range(4)], default_device_index(0, 0)
        ([0, 1, 0, 1], None)
    """
    return rank_on_host % visible if visible else None


def have_peer_access(one: DeviceCapabilities, other: DeviceCapabilities) -> bool:
    """Return whether two ranks of one machine have access to each other's GPU memory.

    Example:
        >>> one = DeviceCapabilities(0, gpu="a", reaches=("b",))
        >>> have_peer_access(one, DeviceCapabilities(1, gpu="b", reaches=("a",)))
        True
    """
    if one.machine != other.machine or not (one.gpu and other.gpu):
        return False
    return one.gpu == other.gpu or (one.gpu in other.reaches and other.gpu in one.reaches)


def ranks_without(
    holds: Callable[[DeviceCapabilities], bool], *pair: DeviceCapabilities
) -> str | None:
    """Name those of two ranks for which a condition does not hold; None where it holds for both.

    Example:
        >>> ranks_without(lambda facts: facts.cupy is not None, *map(DeviceCapabilities, (0, 1)))
        'rank 0 and rank 1'
    """
    return " and ".join(f"rank {facts.rank}" for facts in pair if not holds(facts)) or None


def unknown_gpu(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    """Say which of two ranks use an unknown GPU; None where both GPUs are known."""
    where = ranks_without(lambda facts: bool(facts.gpu), one, other)
    return where and f"it is not known which GPU {where} uses"
