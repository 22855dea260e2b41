"""Programs of collectives: from a verb's tensors to contiguous memory and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from asyncddp.errors import ArgumentError
from asyncddp.integrations.torch_distributed import collectives
from asyncddp.integrations.torch_distributed.group_channel import GroupChannel
from asyncddp.integrations.torch_distributed.output_buffers import OutputBuffer, store_all
from asyncddp.integrations.torch_distributed.reductions import GroupReduction
from asyncddp.tensors.byte_views import dense

Program = Callable[[], None]
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
        buffer = OutputBuffer(tensors[0], read=True)
        collectives.allreduce(channel, buffer.data, reduction)
        buffer.store()
        return
    flat = torch.cat([dense(tensor).view(-1) for tensor in tensors])
    collectives.allreduce(channel, flat, reduction)
    for tensor, part in zip(tensors, torch.split(flat, [t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def reduce(
    channel: GroupChannel, tensor: torch.Tensor, reduction: GroupReduction, root: int
) -> None:
    """Reduce a tensor into that of the root; those of other ranks stay as they are."""
    if channel.rank == root:
        buffer = OutputBuffer(tensor, read=True)
        collectives.reduce(channel, buffer.data, reduction, root)
        buffer.store()
    else:
        collectives.reduce(channel, dense(tensor), reduction, root)


def broadcast(channel: GroupChannel, tensors: Tensors, root: int) -> None:
    """Replace tensors by the root's."""
    for tensor in tensors:
        buffer = OutputBuffer(tensor, read=channel.rank == root)
        collectives.broadcast(channel, buffer.data, root)
        if channel.rank != root:
            buffer.store()


def allgather(channel: GroupChannel, outs: Tensors, own: torch.Tensor) -> None:
    """Gather the tensors of all ranks into a list of tensors."""
    buffers = [OutputBuffer(out) for out in outs]
    collectives.allgather(channel, dense(own), [buffer.data for buffer in buffers])
    store_all(buffers)


def allgather_whole(channel: GroupChannel, out: torch.Tensor, own: torch.Tensor) -> None:
    """Gather the tensors of all ranks into one tensor."""
    buffer = OutputBuffer(out)
    source = dense(own)
    first = buffer.data.view(-1)[channel.rank * own.numel() :]
    if own.numel() and first.data_ptr() == source.data_ptr():
        source = source.clone()  # a part of the result
    collectives.allgather_whole(channel, source, buffer.data)
    buffer.store()


def gather(channel: GroupChannel, outs: Tensors, own: torch.Tensor, root: int) -> None:
    """Gather the tensors of all ranks on the root."""
    buffers = [OutputBuffer(out) for out in outs]
    data = [buffer.data for buffer in buffers]
    collectives.gather(channel, dense(own), data, root)
    store_all(buffers)


def scatter(channel: GroupChannel, out: torch.Tensor, parts: Tensors, root: int) -> None:
    """Send part r of the root to rank r."""
    buffer = OutputBuffer(out)
    collectives.scatter(channel, buffer.data, [dense(part) for part in parts], root)
    buffer.store()


def reduce_scatter(
    channel: GroupChannel, out: torch.Tensor, parts: Tensors, reduction: GroupReduction
) -> None:
    """Reduce part r of all ranks on rank r."""
    buffer = OutputBuffer(out)
    collectives.reduce_scatter(channel, buffer.data, [dense(p) for p in parts], reduction)
    buffer.store()


def reduce_scatter_whole(
    channel: GroupChannel, out: torch.Tensor, whole: torch.Tensor, reduction: GroupReduction
) -> None:
    """Reduce the parts of one tensor, of equal length, each on its rank."""
    buffer, flat = OutputBuffer(out), dense(whole).view(-1)
    target = buffer.data
    aliased = flat.untyped_storage().data_ptr() == target.untyped_storage().data_ptr()
    if aliased:  # the result is a part of what is reduced
        flat = flat.clone()
    parts = flat.chunk(channel.size) if flat.numel() else [flat] * channel.size
    collectives.reduce_scatter(channel, target, parts, reduction, flat)
    buffer.store()


def alltoall(channel: GroupChannel, outs: Tensors, parts: Tensors) -> None:
    """Send part r to rank r, and receive into the tensors of a list."""
    buffers = [OutputBuffer(out) for out in outs]
    sources = [dense(part) for part in parts]
    collectives.alltoall(channel, [buffer.data for buffer in buffers], sources)
    store_all(buffers)


def alltoall_whole(
    channel: GroupChannel,
    out: torch.Tensor,
    whole: torch.Tensor,
    out_rows: Sequence[int],
    rows: Sequence[int],
) -> None:
    """Send rows of one tensor to each rank, and receive rows into another; equal parts if none."""
    buffer, source = OutputBuffer(out), dense(whole)
    outs = _split_rows(buffer.data, out_rows, channel.size)
    collectives.alltoall(channel, outs, _split_rows(source, rows, channel.size))
    buffer.store()


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


def sequence(programs: Sequence[Program]) -> Program:
    """Return a program that runs others one after the other."""

    def run() -> None:
        for program in programs:
            program()

    return run
