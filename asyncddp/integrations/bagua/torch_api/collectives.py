"""Bagua's collectives with a send and a receive tensor, and point-to-point messages.

Each function takes a communicator, by default that of all ranks; ``src`` and ``dst`` are ranks in
it. On ranks that are not members it does nothing. Tensors are treated as sequences of elements,
whatever their shapes. All calls are blocking.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.torch_api.communicator import Communicator, ReduceOp, operator_of
from asyncddp.integrations.bagua.torch_api.process_group import BaguaProcessGroup, default_group
from asyncddp.ops.allgather import allgather as _allgather
from asyncddp.ops.allreduce import allreduce as _allreduce
from asyncddp.ops.allreduce_tensors import broadcast_tensors
from asyncddp.ops.alltoall import alltoall as _alltoall
from asyncddp.ops.barrier import barrier as _barrier
from asyncddp.ops.broadcast import broadcast_
from asyncddp.ops.gather import gather as _gather
from asyncddp.ops.object_collectives import broadcast_object as _broadcast_object
from asyncddp.ops.reduce import reduce as _reduce
from asyncddp.ops.reduce_scatter import reduce_scatter as _reduce_scatter
from asyncddp.ops.scatter import scatter as _scatter
from asyncddp.ops.send_recv import recv as _recv
from asyncddp.ops.send_recv import send as _send

__all__ = [
    "allgather", "allreduce", "alltoall", "alltoall_v", "barrier", "broadcast",
    "broadcast_coalesced", "broadcast_object", "gather", "recv", "reduce", "reduce_scatter",
    "scatter", "send",
]  # fmt: skip

Comm: TypeAlias = Communicator | BaguaProcessGroup | None


def member(comm: Comm) -> Communicator | None:
    """Return a communicator, a group's, or that of all ranks; None if this rank is not in it."""
    if comm is None:
        comm = default_group()
    if isinstance(comm, BaguaProcessGroup):
        comm = comm.get_global_communicator()
    return comm if comm.rank() >= 0 else None


def rows_of(caller: str, argument: str, tensor: torch.Tensor, count: int) -> torch.Tensor:
    """View a tensor as ``count`` rows of equal length."""
    if tensor.numel() % count:
        raise ArgumentError(
            f"{caller}: argument {argument}: expected a number of elements that {count} ranks can "
            f"share equally, got {tensor.numel()}"
        )
    return tensor.detach().reshape(count, -1)


def write(caller: str, tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result into a tensor with as many elements."""
    if tensor.numel() != result.numel():
        raise ArgumentError(
            f"{caller}: argument recv_tensor: expected {result.numel()} elements, got "
            f"{tensor.numel()}"
        )
    tensor.detach().copy_(result.view(tensor.shape))


def send(tensor: torch.Tensor, dst: int, comm: Comm = None) -> None:
    """Send a tensor to a rank, which must call ``recv``."""
    if (members := member(comm)) is not None:
        _send(tensor, members.world_rank("send", "dst", dst), group=members.group)


def recv(tensor: torch.Tensor, src: int, comm: Comm = None) -> None:
    """Receive a tensor from a rank, which must call ``send``."""
    if (members := member(comm)) is not None:
        _recv(tensor, members.world_rank("recv", "src", src), group=members.group)


def broadcast(tensor: torch.Tensor, src: int = 0, comm: Comm = None) -> None:
    """Copy the tensor of ``src`` to all ranks, in place."""
    if (members := member(comm)) is not None:
        root = members.world_rank("broadcast", "src", src)
        broadcast_(tensor.detach(), root, group=members.group)


def broadcast_coalesced(tensors: Sequence[torch.Tensor], src: int = 0, comm: Comm = None) -> None:
    """Copy several tensors of ``src`` to all ranks, in place."""
    if (members := member(comm)) is not None:
        root = members.world_rank("broadcast_coalesced", "src", src)
        broadcast_tensors(tensors, root, members.group)


def broadcast_object(obj: Any, src: int = 0, comm: Comm = None) -> Any:
    """Broadcast the Python object of ``src``, by pickle; return None on non-members."""
    members = member(comm)
    if members is None:
        return None
    root = members.world_rank("broadcast_object", "src", src)
    return _broadcast_object(obj, root, group=members.group)


def reduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    dst: int,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """Reduce a tensor over all ranks, into ``recv_tensor`` on ``dst``."""
    if (members := member(comm)) is not None:
        root = members.world_rank("reduce", "dst", dst)
        result = _reduce(send_tensor, root, operator_of(op), group=members.group)
        if result is not None:
            write("reduce", recv_tensor, result)


def allreduce(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """Reduce a tensor over all ranks, into ``recv_tensor`` on each rank.

    Example:
        >>> import asyncddp as bf
        >>> import asyncddp.integrations.bagua.torch_api as bagua
        >>> def largest():
        ...     bagua.init_process_group()
        ...     own, found = torch.tensor([bagua.get_rank()]), torch.zeros(1, dtype=torch.int64)
        ...     bagua.allreduce(own, found, op=bagua.ReduceOp.MAX)
        ...     return found.item()
        >>> with bf.local_world(3) as world:
        ...     world.run(largest)
        [2, 2, 2]
    """
    if (members := member(comm)) is not None:
        result = _allreduce(send_tensor, op=operator_of(op), group=members.group)
        write("allreduce", recv_tensor, result)


def allgather(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """Concatenate the elements of all ranks in ``recv_tensor`` on each rank."""
    if (members := member(comm)) is not None:
        result = _allgather(send_tensor.detach().reshape(-1), group=members.group)
        write("allgather", recv_tensor, result)


def gather(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, dst: int, comm: Comm = None
) -> None:
    """Concatenate the elements of all ranks in ``recv_tensor`` on ``dst``."""
    if (members := member(comm)) is not None:
        root = members.world_rank("gather", "dst", dst)
        result = _gather(send_tensor.detach().reshape(-1), root, group=members.group)
        if result is not None:
            write("gather", recv_tensor, result)


def scatter(
    send_tensor: torch.Tensor, recv_tensor: torch.Tensor, src: int, comm: Comm = None
) -> None:
    """Cut the tensor of ``src`` into equal parts, and send one to each rank."""
    if (members := member(comm)) is not None:
        root, here = members.world_rank("scatter", "src", src), members.rank() == src
        count = members.nranks()
        given = rows_of("scatter", "send_tensor", send_tensor, count) if here else None
        into = recv_tensor.detach().new_empty((1, recv_tensor.numel()))
        write("scatter", recv_tensor, _scatter(given, root, group=members.group, out=into))


def reduce_scatter(
    send_tensor: torch.Tensor,
    recv_tensor: torch.Tensor,
    op: ReduceOp = ReduceOp.SUM,
    comm: Comm = None,
) -> None:
    """Reduce a tensor over all ranks, and give each rank one of the result's equal parts."""
    if (members := member(comm)) is not None:
        rows = rows_of("reduce_scatter", "send_tensor", send_tensor, members.nranks())
        result = _reduce_scatter(rows, op=operator_of(op), group=members.group)
        write("reduce_scatter", recv_tensor, result)


def alltoall(send_tensor: torch.Tensor, recv_tensor: torch.Tensor, comm: Comm = None) -> None:
    """Send one of a tensor's equal parts to each rank; concatenate the parts received."""
    if (members := member(comm)) is not None:
        rows = rows_of("alltoall", "send_tensor", send_tensor, members.nranks())
        write("alltoall", recv_tensor, _alltoall(rows, group=members.group))


def alltoall_v(
    send_tensor: torch.Tensor,
    send_counts: Sequence[int],
    send_displs: Sequence[int],
    recv_tensor: torch.Tensor,
    recv_counts: Sequence[int],
    recv_displs: Sequence[int],
    comm: Comm = None,
) -> None:
    """Send each rank a part of a tensor, and receive a part from each rank at a given offset.

    Args:
        send_tensor: The tensor to send from.
        send_counts: Number of elements for each rank.
        send_displs: Offset of the elements for each rank.
        recv_tensor: The tensor to receive into; other elements are unchanged.
        recv_counts: Number of elements from each rank.
        recv_displs: Offset of the elements from each rank.
        comm: The ranks; all by default.
    """
    members = member(comm)
    if members is None:
        return
    sent = _parts("send", send_tensor, send_counts, send_displs, members.nranks())
    received = _parts("recv", recv_tensor, recv_counts, recv_displs, members.nranks())
    sizes = [part.numel() for part in received]
    result = _alltoall(torch.cat(sent), [part.numel() for part in sent], sizes, group=members.group)
    for place, part in zip(received, torch.split(result, sizes), strict=True):
        place.copy_(part)


def barrier(comm: Comm = None) -> None:
    """Wait until all ranks have called it."""
    if (members := member(comm)) is not None:
        _barrier(group=members.group)


def _parts(
    which: str, tensor: torch.Tensor, counts: Sequence[int], displs: Sequence[int], ranks: int
) -> list[torch.Tensor]:
    """Return the part of a contiguous tensor that belongs to each rank."""
    name = f"alltoall_v: arguments {which}_tensor, {which}_counts, {which}_displs"
    sizes, starts = [int(one) for one in counts], [int(one) for one in displs]
    if not tensor.is_contiguous() or len(sizes) != ranks or len(starts) != ranks:
        raise ArgumentError(
            f"{name}: expected a contiguous tensor, and a number for each of {ranks} ranks, got "
            f"{len(sizes)} counts and {len(starts)} displacements"
        )
    for size, start in zip(sizes, starts, strict=True):
        if not 0 <= start <= start + size <= tensor.numel():
            raise ArgumentError(
                f"{name}: expected parts inside of {tensor.numel()} elements, got {size} at {start}"
            )
    flat = tensor.detach().view(-1)
    return [flat[start : start + size] for size, start in zip(sizes, starts, strict=True)]
