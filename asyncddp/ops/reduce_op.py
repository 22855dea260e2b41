"""Reduction operators of ``allreduce``, ``reduce`` and ``reduce_scatter``: sum, maximum, ..."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import Any

import torch

from asyncddp.device.stream_interfaces import empty_on
from asyncddp.device.stream_registry import streams_of
from asyncddp.errors import ArgumentError, UnknownNameError
from asyncddp.ops.validation import accumulation_dtype, check_tensor
from asyncddp.registry import nearest
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.dtypes import DtypeKind
from asyncddp.tensors.means import rounds, sum_of


class ReduceOp(Enum):
    """Elementwise reduction operator; collectives take a member or its name in lower case.

    Sums and products of bools are their logical or and and, and so are maxima and minima. Bitwise
    operators, ``BAND`` or ``AND``, ``BOR`` or ``OR`` and ``BXOR`` or ``XOR``, are for integers and
    bools.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.allreduce(torch.tensor(bf.rank()), op=bf.ReduceOp.MAX).item())
        [2, 2, 2]
    """

    SUM = "sum"
    AVERAGE = "average"
    AVG = AVERAGE
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    AND = BAND
    BOR = "bor"
    OR = BOR
    BXOR = "bxor"
    XOR = BXOR


_OF_TWO: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVERAGE: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
"""Functions that reduce two tensors, into a third given as ``out``."""

_SMALL = 1 << 17  # bytes of a sum that is not worth memory of the free list
_NO_ORDER = (DtypeKind.COMPLEX,)
_NO_BITS = (DtypeKind.FLOAT, DtypeKind.COMPLEX)
_REFUSED = {
    ReduceOp.MIN: _NO_ORDER,
    ReduceOp.MAX: _NO_ORDER,
    ReduceOp.BAND: _NO_BITS,
    ReduceOp.BOR: _NO_BITS,
    ReduceOp.BXOR: _NO_BITS,
}
"""Kinds of numbers for which there is no such operator."""


@dataclass(frozen=True)
class Reduction:
    """Reduction operator and the dtype in which it is computed."""

    op: ReduceOp
    dtype: torch.dtype

    @cached_property
    def name(self) -> str:
        """Name of the operator."""
        return self.op.value

    @cached_property
    def is_sum(self) -> bool:
        """True for the sum and the average, which transports compute themselves."""
        return self.op in (ReduceOp.SUM, ReduceOp.AVERAGE)

    @cached_property
    def _of_two(self) -> Callable[..., torch.Tensor]:
        return _OF_TWO[self.op]  # whose hash is slow

    def summed_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which a transport sums; a transport rounds averages itself."""
        return dtype if self.op is ReduceOp.AVERAGE and rounds(dtype) else self.dtype

    def divisor(self, terms: int) -> int | None:
        """Return the divisor of a sum of ``terms`` terms; None if the operator does not average."""
        return terms if self.op is ReduceOp.AVERAGE else None

    def of(self, terms: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
        """Reduce tensors of one shape, dtype and device in order, into ``out`` or a new tensor.

        ``out`` has the reduction's dtype, and shares no memory with the terms.

        Example:
            >>> Reduction(ReduceOp.MAX, torch.int32).of(
            ...     [torch.tensor([1, 5]), torch.tensor([3, 4])]
            ... )
            tensor([3, 5], dtype=torch.int32)
        """
        first, reduce = terms[0], self._of_two
        alike = first.dtype is self.dtype
        if out is None and not (alike and first.nbytes <= _SMALL and streams_of(first) is None):
            out = empty_on(streams_of(first), first.shape, self.dtype)
        if self.is_sum:
            return sum_of(terms, self.divisor(len(terms)), out)
        total = detached_copy(first) if out is None else out.copy_(first)
        for term in terms[1:]:
            reduce(total, term, out=total)
        return total


_reduction = lru_cache(Reduction)


def reduction_of(
    verb: str,
    tensor: Any,
    op: ReduceOp | str | None,
    average: bool | None,
    *,
    round_integers: bool,
    min_ndim: int = 0,
) -> Reduction:
    """Check a verb's tensor, ``op`` and ``average``, and return its reduction.

    Raises:
        ArgumentError: The two contradict each other, or the operator has no meaning for the dtype.
        UnknownNameError: There is no such operator.
        DtypeError: The dtype cannot be sent.
    """
    chosen = _operator(verb, op, average)
    averages = chosen is ReduceOp.AVERAGE
    if averages or chosen is ReduceOp.SUM:
        dtype = accumulation_dtype(
            verb, tensor, round_integers=round_integers, average=averages, min_ndim=min_ndim
        )
        return _reduction(chosen, dtype)
    traits = check_tensor(verb, tensor, min_ndim=min_ndim)
    if traits.kind in _REFUSED.get(chosen, ()):
        raise ArgumentError(
            f"{verb}: argument op: there is no {chosen.value} of {traits.name} values; expected "
            f"another op, or a tensor of another dtype"
        )
    accumulates = chosen is ReduceOp.PRODUCT
    return _reduction(chosen, traits.accumulate if accumulates else traits.dtype)


def _operator(verb: str, op: ReduceOp | str | None, average: bool | None) -> ReduceOp:
    """Return the operator given by ``op`` or ``average``; the average if neither is given."""
    if op is None:
        return ReduceOp.AVERAGE if average is None or average else ReduceOp.SUM
    if isinstance(op, str):
        known = {name.lower(): one for name, one in ReduceOp.__members__.items()}
        if op not in known:
            raise UnknownNameError(
                f"{verb}: argument op: unknown operator {op!r}; known are: "
                f"{', '.join(known)}.{nearest(op, known)}"
            )
        op = known[op]
    if not isinstance(op, ReduceOp):
        raise ArgumentError(
            f"{verb}: argument op: expected a ReduceOp or the name of one, got {op!r}"
        )
    if average is not None and average != (op is ReduceOp.AVERAGE):
        raise ArgumentError(
            f"{verb}: arguments op, average: expected no contradiction, got op={op.value!r} and "
            f"average={average}; leave average= away"
        )
    return op
