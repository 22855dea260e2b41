"""Capabilities of a rank's device, from which ranks select the transports between GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DeviceCapabilities:
    """Capabilities of a rank's device (GPU, NCCL, MPI support), which ranks exchange."""

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
    out_of_reach: tuple[str, ...] = ()  # UUIDs of visible GPUs whose memory it cannot access


def detect_device(rank: int, machine: int, rank_on_host: int) -> DeviceCapabilities:
    """Detect this rank's default device, and the visible GPUs that it cannot access, from torch."""
    index, visible = default_device_index(rank_on_host), range(torch.cuda.device_count())
    if index is None:
        return DeviceCapabilities(rank, machine)
    access = torch.cuda.can_device_access_peer
    far = tuple(_gpu_uuid(one) for one in visible if one != index and not access(index, one))
    return DeviceCapabilities(rank, machine, "cuda", _gpu_uuid(index), out_of_reach=far)


def _gpu_uuid(index: int) -> str:
    """Return the UUID of a GPU; empty if torch does not provide it."""
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", ""))


def default_device_index(rank_on_host: int) -> int | None:
    """Return the index of a rank's default GPU; None if torch sees no GPU.

    It is the current device if the caller has set one other than 0, and else the rank's number on
    its host modulo the number of visible GPUs. The library itself does not set the current device.
    """
    visible = torch.cuda.device_count()
    if not visible:
        return None
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    return current or rank_on_host % visible


def have_peer_access(one: DeviceCapabilities, other: DeviceCapabilities) -> bool:
    """Return whether two ranks of one machine may have access to each other's GPU memory.

    CUDA knows this for visible GPUs only. If a rank does not see the other's GPU, a trial decides.

    Example:
        >>> one = DeviceCapabilities(0, gpu="a", out_of_reach=("c",))
        >>> [have_peer_access(one, DeviceCapabilities(1, gpu=gpu)) for gpu in "abc"]
        [True, True, False]
    """
    if one.machine != other.machine or not (one.gpu and other.gpu):
        return False
    return one.gpu not in other.out_of_reach and other.gpu not in one.out_of_reach


def ranks_without(
    holds: Callable[[DeviceCapabilities], bool], *pair: DeviceCapabilities
) -> str | None:
    """Format the ranks of a pair for which a condition does not hold; None if it holds for both.

    Example:
        >>> ranks_without(lambda facts: facts.cupy is not None, *map(DeviceCapabilities, (0, 1)))
        'rank 0 and rank 1'
    """
    return " and ".join(f"rank {facts.rank}" for facts in pair if not holds(facts)) or None


def unknown_gpu(one: DeviceCapabilities, other: DeviceCapabilities) -> str | None:
    """Format an error for the ranks of a pair whose GPU is unknown; None if both are known."""
    where = ranks_without(lambda facts: bool(facts.gpu), one, other)
    return where and f"it is not known which GPU {where} uses"
