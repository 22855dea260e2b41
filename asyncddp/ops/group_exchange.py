"""Point-to-point exchanges among all ranks of a group, as parts of an operation's steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import ExchangeSignature, OperationExchanges, Steps


def exchange_all_to_all(
    op: OperationExchanges,
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
    op: OperationExchanges, group: Sequence[int], signature: ExchangeSignature, own: torch.Tensor
) -> Steps[list[torch.Tensor]]:
    """Send a contiguous tensor to all ranks of a group, and return all ranks' in its order.

    The arguments are those of :func:`exchange_all_to_all`, with the same part for all.
    """
    return (yield from exchange_all_to_all(op, group, signature, [own] * len(group)))
