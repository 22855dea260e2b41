"""Point-to-point exchanges of tensors among the ranks of a group, as parts of an operation.

A header with verb, dtype and shape precedes every tensor, so that sizes need not be known in
advance, and mismatches between ranks are detected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch

from asyncddp.device.stream_interfaces import empty_on
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import ExchangeSignature, OperationExchanges, PeerExchanges, Steps
from asyncddp.engine.exchange_request import ExchangeRequest
from asyncddp.ops.reduce_op import Reduction
from asyncddp.ops.validation import signature_of, write_result
from asyncddp.tensors.allocation import zeros
from asyncddp.transport.base import is_short


def exchange_tensors(
    op: PeerExchanges,
    signature: ExchangeSignature,
    sources: Iterable[int],
    parts: Mapping[int, torch.Tensor],
    like: torch.Tensor,
    into: Mapping[int, torch.Tensor] | None = None,
    audience: Collection[int] = (),
) -> Steps[dict[int, torch.Tensor]]:
    """Send each peer its tensor, and return the tensors received; all have one signature.

    All tensors are on ``like``'s device. None is returned of a rank that has left meanwhile, where
    the operation tolerates that. A received tensor that fits its source's tensor in
    ``into`` is written there. The ranks in ``audience`` are notified of a failure, too.
    """
    request = op.exchange(signature, sources, parts, streams_of(like), into=into)
    request.audience = frozenset(audience)
    for peer, part in parts.items():
        op.send(request, peer, part)
    received = {}
    for peer in sources:
        receive = request.receives[peer]
        yield receive
        if not receive.left:
            received[peer] = receive.take()
    yield request.sent()
    return received


def exchange_all_to_all(
    op: PeerExchanges,
    group: Sequence[int],
    signature: ExchangeSignature,
    parts: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor] | None = None,
) -> Steps[list[torch.Tensor]]:
    r"""Send each rank of a group its part, and return the parts received from all ranks.

    With :math:`p_{ij}` the part of rank i for rank j, rank i gets :math:`(p_{0i}, p_{1i}, \dots)`.

    Args:
        op: The operation; each call opens an exchange of its own, in the same order on all ranks.
        group: Ranks of the world in an order that is the same on all of them; this rank is one.
        signature: Verb, dtype, shape of a part and device; None stands for a size that may differ.
        parts: One contiguous tensor for each rank of ``group``, all on one device.
        outs: Tensors for the received parts, one for each rank of ``group``; used if they fit.

    Returns:
        One tensor of each rank of ``group``: new ones, and this rank's own part itself.
    """
    index = group.index(op.rank)
    # so that not all send to one at a time
    others = [group[place] for place in (*range(index + 1, len(group)), *range(index))]
    if not others:
        return list(parts)
    sent = dict(zip(group, parts, strict=True))
    given = {peer: sent[peer] for peer in others}
    into = None if outs is None else dict(zip(group, outs, strict=True))
    received = yield from exchange_tensors(op, signature, others, given, parts[index], into)
    return [sent[peer] if peer == op.rank else received[peer] for peer in group]


def exchange_all_gather(
    op: PeerExchanges, group: Sequence[int], signature: ExchangeSignature, own: torch.Tensor
) -> Steps[list[torch.Tensor]]:
    """Send a contiguous tensor to all ranks of a group; return all ranks' tensors in its order.

    The arguments are those of :func:`exchange_all_to_all`, with the same part for all.
    """
    return (yield from exchange_all_to_all(op, group, signature, [own] * len(group)))


def exchange_to_root(
    op: OperationExchanges,
    group: Sequence[int],
    root: int,
    signature: ExchangeSignature,
    own: torch.Tensor,
    outs: Sequence[torch.Tensor] | None = None,
) -> Steps[list[torch.Tensor] | None]:
    """Send a contiguous tensor to the root; return all ranks' tensors there, None elsewhere.

    The arguments are those of :func:`exchange_all_to_all`; ``root`` is a rank of ``group``. The
    signature's verb names the root, so that different roots are detected.
    """
    others = [peer for peer in group if peer != op.rank]
    ring = signal_in_ring(op, group, signature.verb)
    here = op.rank == root
    sources, parts = (others, {}) if here else ([], {root: own})
    into = None if outs is None or not here else dict(zip(group, outs, strict=True))
    received = yield from exchange_tensors(op, signature, sources, parts, own, into, others)
    yield from wait_in_ring(ring)
    return [own if peer == root else received[peer] for peer in group] if here else None


def exchange_from_root(
    op: OperationExchanges,
    group: Sequence[int],
    root: int,
    signature: ExchangeSignature,
    parts: Sequence[torch.Tensor] | None,
    like: torch.Tensor,
    out: torch.Tensor | None = None,
) -> Steps[torch.Tensor]:
    """Send each rank of a group its part from the root; return this rank's part.

    The arguments are those of :func:`exchange_to_root`. Only the root passes ``parts``, on
    ``like``'s device, and gets its own part itself. Another rank receives its part in ``out`` if it
    fits.
    """
    others = [peer for peer in group if peer != op.rank]
    ring = signal_in_ring(op, group, signature.verb)
    sent = None if parts is None else dict(zip(group, parts, strict=True))
    given = {} if sent is None else {peer: sent[peer] for peer in others}
    sources, into = [root] if sent is None else [], {} if out is None else {root: out}
    received = yield from exchange_tensors(op, signature, sources, given, like, into, others)
    yield from wait_in_ring(ring)
    return received[root] if sent is None else sent[root]


def signal_in_ring(
    op: OperationExchanges, group: Sequence[int], verb: str, distance: int = 1
) -> ExchangeRequest:
    """Send the verb's name to the rank ``distance`` places ahead; expect it from the one behind.

    Ranks that call different verbs, or verbs with different roots, detect this, and notify all.
    """
    index, alone = group.index(op.rank), len(group) == 1
    before, after = group[index - distance], group[(index + distance) % len(group)]
    request = op.exchange(
        ExchangeSignature(verb, "uint8", ()), [] if alone else [before], [] if alone else [after]
    )
    request.audience = frozenset(group) - {op.rank}
    if not alone:
        op.send(request, after, zeros((), torch.uint8))
    return request


def wait_in_ring(request: ExchangeRequest) -> Steps[None]:
    """Wait until an exchange begun by :func:`signal_in_ring` is complete."""
    yield from request.receives.values()
    yield request.sent()


def gather_parts(
    op: OperationExchanges,
    group: Sequence[int],
    signature: ExchangeSignature,
    part: torch.Tensor,
    shape: torch.Size,
) -> Steps[torch.Tensor]:
    """Send this rank's part of a tensor to all ranks of a group; return the whole, new tensor."""
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
    """Return the signature of a tensor's flat parts; it includes the shape of the whole tensor."""
    flat = whole.view(-1)
    return signature_of(f"{title} of shape {tuple(whole.shape)}", flat, ragged=True)


def goes_directly(group: Sequence[int], tensor: torch.Tensor) -> bool:
    """Return True if sending a tensor whole to each rank is better than exchanging its parts."""
    return len(group) <= 2 or is_short(tensor.nbytes)


def reduce_over_group(
    op: OperationExchanges,
    group: Sequence[int],
    own: torch.Tensor,
    reduction: Reduction,
    title: str,
) -> Steps[torch.Tensor]:
    """Reduce a contiguous tensor over a group; all its ranks get the same bits.

    Small tensors are sent whole to all ranks. For large ones each rank reduces a part and sends it
    to all.
    """
    if goes_directly(group, own):
        terms = yield from exchange_all_gather(op, group, signature_of(title, own), own)
        return reduction.of(terms)
    part = yield from _reduce_own_part(op, group, own, reduction, title)
    return (yield from gather_parts(op, group, signature_of_parts(title, own), part, own.shape))


def reduce_to_root(
    op: OperationExchanges,
    group: Sequence[int],
    root: int,
    own: torch.Tensor,
    reduction: Reduction,
    title: str,
) -> Steps[torch.Tensor | None]:
    """Reduce a contiguous tensor over a group; return the result on the root, None elsewhere."""
    if goes_directly(group, own):
        terms = yield from exchange_to_root(op, group, root, signature_of(title, own), own)
        return None if terms is None else reduction.of(terms)
    part = yield from _reduce_own_part(op, group, own, reduction, title)
    parts = yield from exchange_to_root(op, group, root, signature_of_parts(title, own), part)
    return None if parts is None else concatenate(parts).view(own.shape)


def reduce_scatter_over_group(
    op: OperationExchanges,
    group: Sequence[int],
    own: torch.Tensor,
    reduction: Reduction,
    title: str,
) -> Steps[torch.Tensor]:
    """Reduce a contiguous tensor over a group; return this rank's part of the result, flat."""
    form = signature_of_parts(title, own)
    terms = yield from exchange_all_to_all(op, group, form, own.view(-1).tensor_split(len(group)))
    return reduction.of(terms)


def _reduce_own_part(
    op: OperationExchanges,
    group: Sequence[int],
    own: torch.Tensor,
    reduction: Reduction,
    title: str,
) -> Steps[torch.Tensor]:
    """Reduce this rank's part of a tensor over a group; return it in the tensor's dtype."""
    part = yield from reduce_scatter_over_group(op, group, own, reduction, title)
    return write_result(part, own, None)
