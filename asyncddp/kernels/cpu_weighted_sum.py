"""Weighted sum of CPU tensors, computed block by block so that blocks stay in the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch

from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from asyncddp.tensors.means import split_divisor

WeightedTensor: TypeAlias = tuple[torch.Tensor, float]
WEIGHT_TOLERANCE = 1e-12
"""Relative tolerance for weights to count as equal to 1/n, or for sums of weights as 1."""
_BLOCK_BYTES = 1 << 19  # bytes
_NATIVE_DTYPES = (torch.float32, torch.float64)


def weighted_sum(
    out: torch.Tensor, terms: Sequence[WeightedTensor], shares: int | None = None
) -> None:
    r"""Compute :math:`\sum_k w_k x_k` on CPU; integers need whole weights; without terms, zero.

    If all weights equal ``1 / shares``, it is computed as a sum and one division, which is exact
    for equal values; terms that are zero may be left out. The tensors are contiguous, of one shape
    and dtype; ``out`` may have a wider dtype, and may be one of the terms, but not overlap another.

    Example:
        >>> out = torch.empty(2)
        >>> weighted_sum(out, [(torch.tensor([1.0, 2.0]), 0.5), (torch.tensor([4.0, 0.0]), 0.25)])
        >>> out
        tensor([1.5000, 1.0000])
    """
    if not terms:
        out.zero_()
        return
    parts, weights = [x for x, _ in terms], [w for _, w in terms]
    dtype = parts[0].dtype
    if uses_lerp(dtype, weights):
        torch.lerp(parts[0], parts[1], weights[1], out=out)
        return
    traits = DTYPES[dtype]
    if traits.kind is DtypeKind.INTEGER:
        _sum_wide(out, parts, [int(weight) for weight in weights], 1, torch.int64)
        return
    scale, divisor = split_divisor(mean_divisor(weights, shares))
    if scale != 1:
        weights = [scale] * len(terms)
    if len(parts) <= 2 and dtype in _NATIVE_DTYPES:
        _sum(out, parts, weights, divisor)
        return
    address = out.data_ptr()
    order = sorted(range(len(parts)), key=lambda k: parts[k].data_ptr() != address)
    flat, flats = out.view(-1), [parts[k].reshape(-1) for k in order]
    weights = [weights[k] for k in order]
    step = max(1, _BLOCK_BYTES // out.element_size())
    for start in range(0, flat.numel(), step):
        block, blocks = flat[start : start + step], [x[start : start + step] for x in flats]
        if dtype in _NATIVE_DTYPES:
            _sum(block, blocks, weights, divisor)
        else:
            _sum_wide(block, blocks, weights, divisor, traits.accumulate)


def uses_lerp(dtype: torch.dtype, weights: Sequence[float]) -> bool:
    """Return whether a sum is computed as :math:`a + w (b - a)`, which is exact for a = b."""
    return (
        dtype in _NATIVE_DTYPES
        and len(weights) == 2
        and math.isclose(sum(weights), 1.0, rel_tol=WEIGHT_TOLERANCE)
    )


def mean_divisor(weights: Sequence[float], shares: int | None) -> int:
    """Return ``shares`` if all weights equal 1 / shares, so that the sum is a mean; else 1."""
    if shares is None:
        return 1
    alike = [math.isclose(weight * shares, 1.0, rel_tol=WEIGHT_TOLERANCE) for weight in weights]
    return shares if all(alike) else 1


def _sum(
    out: torch.Tensor, parts: Sequence[torch.Tensor], weights: Sequence[float], divisor: float
) -> None:
    """Write the sum into ``out``, which may be the first part, or any of two parts."""
    if len(parts) == 2:
        if weights[0] == 1.0 or weights[1] == 1.0:
            one = 0 if weights[0] == 1.0 else 1
            torch.add(parts[one], parts[1 - one], alpha=weights[1 - one], out=out)
            parts, weights = [out], [1.0]
        elif parts[1].data_ptr() == out.data_ptr():
            parts, weights = [parts[1], parts[0]], [weights[1], weights[0]]
    if parts[0] is not out or weights[0] != 1.0:
        torch.mul(parts[0], weights[0], out=out)
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        out.add_(part, alpha=weight)
    if divisor != 1:
        out.div_(divisor)


def _sum_wide(
    out: torch.Tensor,
    parts: Sequence[torch.Tensor],
    weights: Sequence[float],
    divisor: float,
    wide: torch.dtype,
) -> None:
    """Write the sum, accumulated in a wider dtype; integer sums wrap around on overflow."""
    total = parts[0].to(wide, copy=True).mul_(weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total.add_(part.to(wide), alpha=weight)
    out.copy_(total.div_(divisor) if divisor != 1 else total)
