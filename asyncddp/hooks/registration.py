"""Argument checks of hooks, and comparison of their settings on all ranks of the process group."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from asyncddp.agreement import Gather, T, agree
from asyncddp.errors import ArgumentError, AsyncDDPError
from asyncddp.serialization import pack, unpack
from asyncddp.tensors.allocation import empty, make_tensor
from asyncddp.tensors.byte_views import from_bytes
from asyncddp.topology import TopologyError

_DEVICES = ("cpu", "cuda")
_CLAIM = "the hook's settings differ: expected the same on all ranks of the process group"


def require_ddp(caller: str, module: object) -> DistributedDataParallel:
    """Return the module if it is a DistributedDataParallel; raise an error otherwise.

    Raises:
        ArgumentError: It is something else.
    """
    if isinstance(module, DistributedDataParallel):
        return module
    raise ArgumentError(
        f"{caller}: argument module: expected a torch.nn.parallel.DistributedDataParallel, got "
        f"{type(module).__name__}; wrap the model first, ddp = DistributedDataParallel(model), and "
        "give ddp"
    )


def require_bucket(hook: str, state: object, kind: type[Any], bucket: object) -> None:
    """Raise an ArgumentError unless DDP called the hook, with a state of the hook's own class."""
    if not isinstance(state, kind):
        raise ArgumentError(
            f"{hook}: argument state: expected a {kind.__name__}, got {type(state).__name__}; "
            f"register it by ddp.register_comm_hook({kind.__name__}(ddp, ...), {hook})"
        )
    if not isinstance(bucket, GradBucket):
        raise ArgumentError(
            f"{hook}: argument bucket: expected a torch.distributed.GradBucket, got "
            f"{type(bucket).__name__}; the hook serves torch.nn.parallel.DistributedDataParallel, "
            "and no other wrapper"
        )


def check_device(caller: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise an ArgumentError unless a process group can send tensors of a device between ranks."""
    backend = ""
    if device.type not in _DEVICES:
        pass
    elif type(group) is not dist.ProcessGroup:  # of a backend in Python, which tells what it serves
        served = {one.type for one in getattr(group, "_device_types", ())}
        backend = group.name() if device.type in served or not served else ""
    else:
        with contextlib.suppress(RuntimeError):
            backend = group._get_backend(device).name()
    if backend and not (backend == "gloo" and device.type != "cpu"):
        return
    serves = f"{backend!r}, which sends CPU tensors alone" if backend else "no backend for it"
    raise ArgumentError(
        f"{caller}: the module's parameters are on {device}, for which the process group has "
        f"{serves}; expected a backend that sends tensors of that device from rank to rank. Start "
        'the group by init_process_group("cpu:gloo,cuda:nccl") for GPUs, or move the model to the '
        "CPU"
    )


def agree_on_settings(
    group: dist.ProcessGroup, device: torch.device, settings: str, mistake: Exception | None
) -> None:
    """Compare settings on all ranks of a group; an error on one rank is raised on all of them.

    Args:
        group: The group.
        device: A device that the group's collectives support.
        settings: The settings that must be equal on all ranks, as text.
        mistake: The error that this rank found, or None.

    Raises:
        MismatchError: Another rank has other settings, or found a mistake.
    """
    own = mistake and f"a mistake: {type(mistake).__name__}: {mistake}"
    try:
        agree(_gather_over(group, device), [own or settings], _CLAIM, "; give the same on all")
    finally:
        if mistake is not None:
            raise mistake


def _gather_over(group: dist.ProcessGroup, device: torch.device) -> Gather:
    """Return a function that gathers a record from each rank of a group."""

    def gather_tensors(mine: torch.Tensor) -> list[torch.Tensor]:
        rows = [empty(mine.shape, mine.dtype, device) for _ in range(dist.get_world_size(group))]
        dist.all_gather(rows, mine.to(device), group=group)
        return rows

    def gather(mine: T, kind: type[T]) -> list[T]:
        packed = pack(mine)
        sizes = [int(one) for one in gather_tensors(make_tensor([len(packed)], torch.int64))]
        whole = packed.ljust(max(sizes), b"\0")
        rows = gather_tensors(from_bytes(whole, torch.uint8, (len(whole),)))
        return [
            unpack(bytes(row.tolist()[:size]), kind, f"what rank {rank} of the process group says")
            for rank, (size, row) in enumerate(zip(sizes, rows, strict=True))
        ]

    return gather


USER_ERRORS = (AsyncDDPError, TopologyError)
"""Mistakes that one rank may find, of which the others are told."""
