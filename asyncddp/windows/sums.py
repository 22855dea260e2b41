"""Weighted sums of tensors that lie in memory, formed piece by piece in a processor's cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from asyncddp.memory.dtypes import DTYPES, Kind

__all__ = ["Term", "weighted"]

Term: TypeAlias = tuple[torch.Tensor, float]
_PIECE = 1 << 19  # bytes


def weighted(out: torch.Tensor, terms: Sequence[Term], shares: int | None = None) -> None:
    r"""Form :math:`\sum_k w_k x_k`.

    Where all of ``shares`` weights are equal to ``1 / shares`` it is formed as a sum and one
    division, which is exact for equal values.

    Args:
        out: A contiguous tensor on the host; it may be one of the terms, but not overlap another.
        terms: Contiguous tensors of its shape and dtype, with their weights; none gives zero.
        shares: How many tensors are averaged, those that are zero and left out included.

    Example:
        >>> out = torch.empty(2)
        >>> weighted(out, [(torch.tensor([1.0, 2.0]), 0.5), (torch.tensor([4.0, 0.0]), 0.25)])
        >>> out
        tensor([1.5000, 1.0000])
    """
    if not terms:
        out.zero_()
        return
    row = DTYPES[out.dtype]
    wide = torch.float64 if row.kind is Kind.INTEGER else row.accumulate
    mean = shares is not None and all(
        math.isclose(weight * shares, 1.0, rel_tol=1e-12) for _, weight in terms
    )
    weights = [1.0] * len(terms) if mean else [weight for _, weight in terms]
    divisor = shares if mean and shares is not None else 1
    flats = [tensor.reshape(-1) for tensor, _ in terms]
    flat = out.view(-1)
    order = sorted(range(len(flats)), key=lambda k: flats[k].data_ptr() != flat.data_ptr())
    flats, weights = [flats[k] for k in order], [weights[k] for k in order]
    step = max(1, _PIECE // out.element_size())
    if flat.numel() <= step or (len(flats) <= 2 and wide == out.dtype):
        _sum(flat, flats, weights, divisor, wide)
        return
    for start in range(0, flat.numel(), step):
        pieces = [one[start : start + step] for one in flats]
        _sum(flat[start : start + step], pieces, weights, divisor, wide)


def _sum(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    weights: Sequence[float],
    divisor: int,
    wide: torch.dtype,
) -> None:
    if wide != out.dtype:
        total = parts[0].to(wide).mul_(weights[0])
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            total.add_(part.to(wide), alpha=weight)
        out.copy_(total.div_(divisor) if divisor != 1 else total)
    elif len(parts) == 2 and divisor == 2:
        torch.lerp(parts[0], parts[1], 0.5, out=out)
    elif len(parts) == 2 and math.isclose(weights[0] + weights[1], 1.0, rel_tol=1e-15):
        torch.lerp(parts[0], parts[1], weights[1], out=out)
    else:
        if weights[0] == 1.0 and len(parts) > 1:
            torch.add(parts[0], parts[1], alpha=weights[1], out=out)
            rest = 2
        else:
            torch.mul(parts[0], weights[0], out=out)
            rest = 1
        for part, weight in zip(parts[rest:], weights[rest:], strict=True):
            out.add_(part, alpha=weight)
        if divisor != 1:
            out.div_(divisor)
