"""Programs of collectives: from a verb's tensors to contiguous memory and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.errors import ArgumentError
from asyncddp.integrations.torch_distributed import collectives
from asyncddp.integrations.torch_distributed.group_channel import GroupChannel
from asyncddp.integrations.torch_distributed.output_buffers import contiguous
from asyncddp.integrations.torch_distributed.reductions import GroupReduction
from asyncddp.tensors.byte_views import dense

Tensors = Sequence[torch.Tensor]


def check_count(verb: str, what: str, tensors: Sequence[object], size: int) -> None:
    """Raise an ArgumentError unless there is one tensor for each rank."""
    if len(tensors) != size:
        raise ArgumentError(
            f"{verb}: expected {what} with one tensor for each of {size} ranks, got {len(tensors)}"
        )


def allreduce(channel: GroupChannel, tensors: Tensors, reduction: GroupReduction) -> None:
    """Reduce tensors of one dtype in place; several travel as one."""
    if len(tensors) == 1:
        with contiguous(tensors, read=True) as (data,):
            collectives.allreduce(channel, data, reduction)
        return
    flat = torch.cat([dense(tensor).view(-1) for tensor in tensors])
    collectives.allreduce(channel, flat, reduction)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def reduce(
    channel: GroupChannel, tensor: torch.Tensor, reduction: GroupReduction, root: int
) -> None:
    """Reduce a tensor into that of the root; those of other ranks stay as they are."""
    with contiguous([tensor], read=True) as (data,):
        collectives.reduce(channel, data, reduction, root)


def broadcast(channel: GroupChannel, tensors: Tensors, root: int) -> None:
    """Replace tensors by the root's."""
    with contiguous(tensors, read=channel.rank == root) as every:
        for data in every:
            collectives.broadcast(channel, data, root)


def allgather(channel: GroupChannel, outs: Tensors, own: torch.Tensor) -> None:
    """Gather the tensors of all ranks into a list of tensors."""
    with contiguous(outs) as data:
        collectives.allgather(channel, dense(own), data)


def allgather_whole(channel: GroupChannel, out: torch.Tensor, own: torch.Tensor) -> None:
    """Gather the tensors of all ranks into one tensor."""
    with contiguous([out]) as (data,):
        source = dense(own)
        first = data.view(-1)[channel.rank * own.numel() :]
        if own.numel() and first.data_ptr() == source.data_ptr():
            source = source.clone()  # a part of the result
        collectives.allgather_whole(channel, source, data)


def gather(channel: GroupChannel, outs: Tensors, own: torch.Tensor, root: int) -> None:
    """Gather the tensors of all ranks on the root."""
    with contiguous(outs) as data:
        collectives.gather(channel, dense(own), data, root)


def scatter(channel: GroupChannel, out: torch.Tensor, parts: Tensors, root: int) -> None:
    """Send part r of the root to rank r."""
    with contiguous([out]) as (data,):
        collectives.scatter(channel, data, [dense(part) for part in parts], root)


def reduce_scatter(
    channel: GroupChannel, out: torch.Tensor, parts: Tensors, reduction: GroupReduction
) -> None:
    """Reduce part r of all ranks on rank r."""
    with contiguous([out]) as (data,):
        collectives.reduce_scatter(channel, data, [dense(p) for p in parts], reduction)


def reduce_scatter_whole(
    channel: GroupChannel, out: torch.Tensor, whole: torch.Tensor, reduction: GroupReduction
) -> None:
    """Reduce the parts of one tensor, of equal length, each on its rank."""
    with contiguous([out]) as (data,):
        flat = dense(whole).view(-1)
        if flat.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
            flat = flat.clone()  # the result is a part of what is reduced
        parts = flat.chunk(channel.size) if flat.numel() else [flat] * channel.size
        collectives.reduce_scatter(channel, data, parts, reduction, flat)


def alltoall(channel: GroupChannel, outs: Tensors, parts: Tensors) -> None:
    """Send part r to rank r, and receive into the tensors of a list."""
    with contiguous(outs) as data:
        collectives.alltoall(channel, data, [dense(part) for part in parts])


def alltoall_whole(
    channel: GroupChannel,
    out: torch.Tensor,
    whole: torch.Tensor,
    out_rows: Sequence[int],
    rows: Sequence[int],
) -> None:
    """Send rows of one tensor to each rank, and receive rows into another; equal parts if none."""
    with contiguous([out]) as (data,):
        outs = _split_rows(data, out_rows, channel.size)
        collectives.alltoall(channel, outs, _split_rows(dense(whole), rows, channel.size))


def _split_rows(tensor: torch.Tensor, rows: Sequence[int], size: int) -> list[torch.Tensor]:
    if rows:
        return list(torch.split(tensor, list(rows)))
    if not tensor.numel():
        return [tensor.view(-1)] * size
    return list(tensor.view(size, -1).unbind())


def check_rows(verb: str, tensor: torch.Tensor, rows: Sequence[int], size: int) -> None:
    """Raise an ArgumentError for split sizes that do not fit a tensor and the ranks."""
    if rows:
        check_count(verb, "split sizes", rows, size)
        fits = sum(rows) == (tensor.shape[0] if tensor.dim() else 1)
        if not fits:
            raise ArgumentError(
                f"{verb}: split sizes {list(rows)} add up to {sum(rows)}, but the tensor has shape "
                f"{tuple(tensor.shape)}"
            )
    elif tensor.numel() % size:
        raise ArgumentError(
            f"{verb}: expected a tensor that {size} ranks can share equally, or split sizes; got "
            f"shape {tuple(tensor.shape)}"
        )
