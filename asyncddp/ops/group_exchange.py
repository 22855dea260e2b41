"""Point-to-point exchanges among all ranks of a group, as parts of an operation's steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.device.stream_interfaces import DeviceStreams, empty_on
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import ExchangeSignature, OperationExchanges, PeerExchanges, Steps
from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.ops.validation import signature_of
from asyncddp.tensors.allocation import zeros

_DIRECT_BYTES = 1 << 14  # of a tensor that costs latency rather than bandwidth


def exchange_all_to_all(
    op: PeerExchanges,
    group: Sequence[int],
    signature: ExchangeSignature,
    parts: Sequence[torch.Tensor],
) -> Steps[list[torch.Tensor]]:
    r"""Send each rank of a group its part, and return the parts that they send to this rank.

    With :math:`p_{ij}` the part of rank i for rank j, rank i gets :math:`(p_{0i}, p_{1i}, \dots)`.

    Args:
        op: The operation; each call opens an exchange of its own, in the same order on all ranks.
        group: Ranks of the world in an order that is the same on all of them; this rank is one.
        signature: Verb, dtype, shape of a part and device; None stands for a size that may differ.
        parts: One contiguous tensor for each rank of ``group``, all on one device.

    Returns:
        One tensor of each rank of ``group``: new ones, and this rank's own part itself.
    """
    received = list(parts)
    index = group.index(op.rank)
    order = [*range(index + 1, len(group)), *range(index)]  # so that not all send to one at a time
    if not order:
        return received
    others = [group[i] for i in order]
    request = op.exchange(signature, others, others, streams_of(parts[order[0]]))
    for i in order:
        op.send(request, group[i], parts[i])
    for i in order:
        yield request.receives[group[i]]
        received[i] = request.receives[group[i]].take()
    yield request.sent()
    return received


def exchange_all_gather(
    op: PeerExchanges, group: Sequence[int], signature: ExchangeSignature, own: torch.Tensor
) -> Steps[list[torch.Tensor]]:
    """Send a contiguous tensor to all ranks of a group, and return all ranks' in its order.

    The arguments are those of :func:`exchange_all_to_all`, with the same part for all.
    """
    return (yield from exchange_all_to_all(op, group, signature, [own] * len(group)))


def exchange_to_root(
    op: OperationExchanges,
    group: Sequence[int],
    root: int,
    signature: ExchangeSignature,
    own: torch.Tensor,
) -> Steps[list[torch.Tensor] | None]:
    """Send a contiguous tensor to the root, and return all ranks' on the root; None elsewhere.

    The arguments are those of :func:`exchange_all_to_all`; ``root`` is a rank of ``group``, and the
    signature's verb names it, so that ranks with different roots find out.
    """
    streams, others = streams_of(own), [peer for peer in group if peer != op.rank]
    ring = signal_in_ring(op, group, signature.verb)
    here = op.rank == root
    request = op.exchange(signature, others if here else [], [] if here else [root], streams)
    request.audience = frozenset(others)
    if not here:
        op.send(request, root, own)
    for peer in request.receives:
        yield request.receives[peer]
    yield request.sent()
    yield from wait_in_ring(ring)
    if not here:
        return None
    return [own if peer == root else request.receives[peer].take() for peer in group]


def exchange_from_root(
    op: OperationExchanges,
    group: Sequence[int],
    root: int,
    signature: ExchangeSignature,
    parts: Sequence[torch.Tensor] | None,
    streams: DeviceStreams | None,
) -> Steps[torch.Tensor]:
    """Send each rank of a group its part from the root, and return this rank's.

    The arguments are those of :func:`exchange_to_root`; the root alone has ``parts``, on a device
    with these ``streams``, and gets its own part itself.
    """
    others = [peer for peer in group if peer != op.rank]
    ring = signal_in_ring(op, group, signature.verb)
    here = parts is not None
    request = op.exchange(signature, [] if here else [root], others if here else [], streams)
    request.audience = frozenset(others)
    for peer, part in zip(group, parts or (), strict=here):
        if peer != root:
            op.send(request, peer, part)
    if not here:
        yield request.receives[root]
    yield request.sent()
    yield from wait_in_ring(ring)
    return request.receives[root].take() if parts is None else parts[group.index(root)]


def signal_in_ring(
    op: OperationExchanges, group: Sequence[int], verb: str, distance: int = 1
) -> ExchangeRequest:
    """Tell the rank so far after this one in a group what this one calls; it expects the same.

    Ranks that call different verbs, or name different roots in them, find out, and tell all.
    """
    index = group.index(op.rank)
    before, after = group[index - distance], group[(index + distance) % len(group)]
    alone = len(group) == 1
    request = op.exchange(
        ExchangeSignature(verb, "uint8", ()), [] if alone else [before], [] if alone else [after]
    )
    request.audience = frozenset(group) - {op.rank}
    if not alone:
        op.send(request, after, zeros((), torch.uint8))
    return request


def wait_in_ring(request: ExchangeRequest) -> Steps[None]:
    """Wait for the signal of the rank before this one."""
    yield from request.receives.values()
    yield request.sent()


def gather_parts(
    op: OperationExchanges,
    group: Sequence[int],
    signature: ExchangeSignature,
    part: torch.Tensor,
    shape: torch.Size,
) -> Steps[torch.Tensor]:
    """Send this rank's part of a tensor to all ranks of a group, and return the whole, new."""
    parts = yield from exchange_all_gather(op, group, signature, part)
    return concatenate(parts).view(shape)


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate contiguous tensors along the first dimension into a new tensor.

    Example:
        >>> concatenate([torch.ones(1), torch.zeros(2)])
        tensor([1., 0., 0.])
    """
    rows, first = sum(part.shape[0] for part in parts), parts[0]
    whole = empty_on(streams_of(first), (rows, *first.shape[1:]), first.dtype)
    torch.cat(list(parts), out=whole)
    return whole


def signature_of_parts(title: str, whole: torch.Tensor) -> ExchangeSignature:
    """Return the signature of flat parts of a tensor, whose shape all ranks must share."""
    flat = whole.view(-1)
    return signature_of(f"{title} of shape {tuple(whole.shape)}", flat, ragged=True)


def goes_directly(group: Sequence[int], tensor: torch.Tensor) -> bool:
    """Return True if a tensor had better go to each rank whole than in parts by way of others."""
    return len(group) <= 2 or tensor.nbytes <= _DIRECT_BYTES
