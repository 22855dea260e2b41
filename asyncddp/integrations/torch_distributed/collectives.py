"""Collectives on contiguous tensors, by the transport of their device; each call blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from asyncddp.integrations.torch_distributed.group_channel import TAG, GroupChannel
from asyncddp.integrations.torch_distributed.reductions import GroupReduction
from asyncddp.tensors.allocation import empty, empty_like
from asyncddp.transport.base import Request

_GATHERED_BYTES = 1 << 14  # tensors of all ranks that are gathered, and reduced by each of them
_COUNTABLE_BYTES = 1 << 30  # in all, that one allgather of the transport counts


def barrier(channel: GroupChannel) -> None:
    """Wait for all ranks."""
    channel.finish([channel.transport.ibarrier()])


def broadcast(channel: GroupChannel, tensor: torch.Tensor, root: int) -> None:
    """Replace a tensor by the root's."""
    if channel.size > 1 and tensor.numel():
        channel.run(tensor, lambda transport: transport.ibroadcast(tensor, root))


def allreduce(channel: GroupChannel, tensor: torch.Tensor, reduction: GroupReduction) -> None:
    """Reduce a tensor over all ranks, in place."""
    if not tensor.numel():
        return
    flat = tensor.view(-1)
    if tensor.nbytes * channel.size <= _GATHERED_BYTES:
        wide = _reduce_gathered(channel, reduction.prepare(flat), reduction)
    elif reduction.is_sum:
        wide = reduction.prepare(flat)
        if channel.size > 1:
            divisor = reduction.divisor(channel.size)
            channel.run(wide, lambda transport: transport.iallreduce(wide, None, divisor))
        reduction.finish_sum(wide, channel.size)
    elif channel.size <= 2:
        wide = reduction.of(exchange_copies(channel, reduction.prepare(flat)))
    else:
        parts = flat.tensor_split(channel.size)
        own = _reduce_own_part(channel, parts, reduction).to(flat.dtype)
        allgather(channel, own, list(parts))
        return
    if wide.data_ptr() != flat.data_ptr():
        flat.copy_(wide)


def reduce(
    channel: GroupChannel, tensor: torch.Tensor, reduction: GroupReduction, root: int
) -> None:
    """Reduce a tensor over all ranks into that of the root; those of other ranks stay."""
    if not tensor.numel():
        return
    flat, here = tensor.view(-1), channel.rank == root
    if tensor.nbytes * channel.size <= _GATHERED_BYTES:
        terms = [empty_like(flat) for _ in range(channel.size)] if here else []
        gather(channel, flat, terms, root)
        if here:
            flat.copy_(reduction.of([reduction.prepare(term) for term in terms]))
        return
    parts = list(flat.tensor_split(channel.size))
    own = _reduce_own_part(channel, parts, reduction).to(flat.dtype)
    gather(channel, own, parts if here else [], root)


def _reduce_gathered(
    channel: GroupChannel, own: torch.Tensor, reduction: GroupReduction
) -> torch.Tensor:
    """Reduce what all ranks send to all: one message each way, where MPI's sum takes several."""
    if channel.size == 1:
        return reduction.of([own])
    every = empty((channel.size * own.numel(),), own.dtype, own.device)
    counts = [own.numel()] * channel.size
    channel.run(own, lambda transport: transport.iallgather(own, every, counts))
    return reduction.of(every.view(channel.size, -1).unbind())


def _reduce_own_part(
    channel: GroupChannel, parts: Sequence[torch.Tensor], reduction: GroupReduction
) -> torch.Tensor:
    """Reduce part r of all ranks on rank r."""
    terms = [empty_like(parts[channel.rank]) for _ in range(channel.size)]
    alltoall(channel, terms, parts)
    return reduction.of([reduction.prepare(term) for term in terms])


def reduce_scatter(
    channel: GroupChannel,
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    reduction: GroupReduction,
    whole: torch.Tensor | None = None,
) -> None:
    """Reduce part r of all ranks into ``out`` of rank r; ``whole`` has the parts one by one."""
    alike = len({part.numel() for part in parts}) == 1
    if not (reduction.is_sum and alike and channel.size > 1):
        out.copy_(_reduce_own_part(channel, parts, reduction).view(out.shape))
        return
    if not out.numel():
        return
    joined = torch.cat([part.view(-1) for part in parts]) if whole is None else whole.view(-1)
    given = reduction.prepare(joined)
    total = out.view(-1)
    if total.dtype != given.dtype:
        total = empty(total.shape, given.dtype, total.device)
    divisor = reduction.divisor(channel.size)
    channel.run(given, lambda transport: transport.ireduce_scatter(given, total, divisor))
    reduction.finish_sum(total, channel.size)
    if total.data_ptr() != out.data_ptr():
        out.view(-1).copy_(total)


def allgather(channel: GroupChannel, own: torch.Tensor, outs: Sequence[torch.Tensor]) -> None:
    """Send a tensor to all ranks; ``outs`` get those of all ranks, each in memory of its own."""
    alltoall(channel, outs, [own] * channel.size)


def allgather_whole(channel: GroupChannel, own: torch.Tensor, out: torch.Tensor) -> None:
    """Send a tensor to all ranks; ``out`` gets those of all ranks, one after the other."""
    if not out.numel():
        return
    if out.nbytes > _COUNTABLE_BYTES or channel.size == 1:
        allgather(channel, own.view(-1), list(out.view(-1).chunk(channel.size)))
        return
    given, into, counts = own.view(-1), out.view(-1), [own.numel()] * channel.size
    channel.run(given, lambda transport: transport.iallgather(given, into, counts))


def exchange_copies(channel: GroupChannel, own: torch.Tensor) -> list[torch.Tensor]:
    """Send a tensor to all ranks, and return those of all ranks, new but for the own one."""
    outs = [own if r == channel.rank else empty_like(own) for r in range(channel.size)]
    alltoall(channel, outs, [own] * channel.size)
    return outs


def alltoall(
    channel: GroupChannel, outs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
) -> None:
    """Send part r to rank r; ``outs`` get what the ranks send to this one."""
    _exchange(channel, dict(enumerate(outs)), dict(enumerate(parts)))


def gather(
    channel: GroupChannel, own: torch.Tensor, outs: Sequence[torch.Tensor], root: int
) -> None:
    """Send a tensor to the root, where ``outs`` get those of all ranks."""
    _exchange(channel, dict(enumerate(outs)) if channel.rank == root else {}, {root: own})


def scatter(
    channel: GroupChannel, out: torch.Tensor, parts: Sequence[torch.Tensor], root: int
) -> None:
    """Send part r from the root to rank r, into ``out``."""
    _exchange(channel, {root: out}, dict(enumerate(parts)) if channel.rank == root else {})


def _exchange(
    channel: GroupChannel, outs: Mapping[int, torch.Tensor], parts: Mapping[int, torch.Tensor]
) -> None:
    """Send parts to their ranks, and receive ``outs`` from theirs; this rank's own is copied."""
    own, distances = channel.rank, range(1, channel.size)
    requests: list[Request] = []
    with channel.messages_lock:
        for peer in [(own - distance) % channel.size for distance in distances]:
            if peer in outs and (out := outs[peer]).numel():
                requests.append(channel.transport_for(out).irecv(out, peer, TAG))
        for peer in [(own + distance) % channel.size for distance in distances]:
            if peer in parts and (part := parts[peer]).numel():
                requests.append(channel.transport_for(part).isend(part, peer, TAG))
    if own in outs and parts[own].data_ptr() != outs[own].data_ptr():
        outs[own].view(-1).copy_(parts[own].view(-1))
    channel.finish(requests)
