"""Reductions over a group of ranks point to point, for operators and groups of no transport."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.engine import OperationExchanges, Steps
from asyncddp.ops.group_exchange import (
    concatenate,
    exchange_all_gather,
    exchange_all_to_all,
    exchange_to_root,
    gather_parts,
    goes_directly,
    signature_of_parts,
)
from asyncddp.ops.reduce_op import Reduction
from asyncddp.ops.validation import signature_of, write_result


def reduce_over_group(
    op: OperationExchanges,
    group: Sequence[int],
    own: torch.Tensor,
    reduction: Reduction,
    title: str,
) -> Steps[torch.Tensor]:
    """Reduce a contiguous tensor over a group, on all its ranks; the result has the same bits.

    Small ones go whole to all ranks. Of others each rank reduces a part and sends it to all.
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
    """Reduce a contiguous tensor over a group, on the root; None elsewhere."""
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
    """Reduce a contiguous tensor over a group; each rank gets its equal share of the rows, flat."""
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
    """Reduce this rank's part of a tensor, and return it in the tensor's dtype."""
    part = yield from reduce_scatter_over_group(op, group, own, reduction, title)
    return write_result(part, own, None)
