"""Sums and means of tensors, without overflow in means of finite numbers.

The terms of a mean are scaled by a power of two first. That changes no bit of the result, except
for terms below n times the smallest normal number, which are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache

import torch

from asyncddp.tensors.allocation import empty, make_tensor
from asyncddp.torch_modes import normal_mode

_BLOCK = 1 << 16  # elements of a mean of integers that are formed at once in float64
_number = lru_cache(make_tensor)  # takes less time than a number, and so does one of its dtype


@lru_cache
def split_divisor(divisor: float | None) -> tuple[float, float]:
    """Split a divisor into a factor for the terms, a power of two, and a divisor for their sum.

    A sum of at most ``divisor`` scaled terms does not overflow. Both are 1 without a divisor.

    Example:
        >>> split_divisor(3), split_divisor(4), split_divisor(0.75), split_divisor(None)
        ((0.25, 0.75), (0.25, 1), (1, 0.75), (1, 1))
    """
    if divisor is None or divisor <= 1:
        return 1, divisor or 1
    power = first_divisor(divisor)
    return 1 / power, 1 if divisor == power else divisor / power


def first_divisor(count: float) -> int:
    """Return the smallest power of two that is at least ``count``.

    A partial sum that is divided by it can be added to further terms, and be divided by the rest.
    """
    power = 1
    while power < count:
        power *= 2
    return power


def rounds(dtype: torch.dtype) -> bool:
    """Return whether means of a dtype are computed in float64 and rounded: for integers."""
    return not (dtype.is_floating_point or dtype.is_complex)


def sum_of(
    terms: Sequence[torch.Tensor], divisor: float | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Add terms in the given order, and divide the sum; for bools, the logical or.

    The mean of integers is computed in float64, and rounded half to even unless ``out`` is wider.
    ``out`` may be one of the first two terms, or have a wider dtype than all terms; without it the
    result is a new tensor. Returns the result.

    Example:
        >>> huge = torch.tensor([torch.finfo(torch.float32).max])
        >>> bool(sum_of([huge, huge, huge], 3) == huge)
        True
    """
    first, others, (scale, rest) = terms[0], terms[1:], split_divisor(divisor)
    if scale != 1 and first.dtype.is_complex:
        parts = [torch.view_as_real(term) for term in terms]
        into = None if out is None else torch.view_as_real(out)
        return torch.view_as_complex(sum_of(parts, divisor, into))
    if divisor is not None and rounds(first.dtype) and (out is None or out.dtype == first.dtype):
        total = empty(first.shape, first.dtype) if out is None else out
        blocks = [torch.split(one.reshape(-1), _BLOCK) for one in (total, *terms)]
        for block, *parts in zip(*blocks, strict=True):
            block.copy_(sum_of(parts, divisor, empty(block.shape, torch.float64)).round_())
        return total
    if out is not None and first.dtype is not out.dtype:
        first = out.copy_(first)
    elif scale != 1 and others and out is not None and others[0].data_ptr() == out.data_ptr():
        first, others = others[0], [first, *others[1:]]
    with normal_mode() if out is None else nullcontext():
        if scale != 1:
            total = torch.mul(first, _number(scale, first.dtype), out=out)
        elif others:
            total, others = torch.add(first, others[0], out=out), others[1:]
        else:
            total = first.clone() if out is None else out.copy_(first)
    for term in others:
        total.add_(term) if scale == 1 else total.add_(term, alpha=scale)
    return total if rest == 1 else total.div_(_number(rest, total.dtype))


def scaled(term: torch.Tensor, scale: float, out: torch.Tensor) -> torch.Tensor:
    """Write ``scale`` times a term into ``out``, which may be the term, and return ``out``."""
    if term.dtype != out.dtype:
        term = out.copy_(term)
    if scale != 1:
        return torch.mul(term, _number(scale, out.dtype), out=out)
    return out if out is term else out.copy_(term)


def add(total: torch.Tensor, term: torch.Tensor, scale: float = 1) -> None:
    """Add ``scale`` times a term in place; for bools, the logical or."""
    if total.dtype == torch.bool:
        total.logical_or_(term)
    else:
        total.add_(term, alpha=scale)
