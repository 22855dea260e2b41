"""Torch's reduction operators in terms of the library's, with torch's rules for each dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp

from asyncddp.errors import ArgumentError
from asyncddp.ops.reduce_op import ReduceOp as LibraryOp
from asyncddp.ops.reduce_op import Reduction
from asyncddp.tensors.dtypes import DtypeKind, dtype_traits_of
from asyncddp.tensors.means import sum_of

_OPERATORS = {
    ReduceOp.SUM: LibraryOp.SUM,
    ReduceOp.AVG: LibraryOp.SUM,
    ReduceOp.PREMUL_SUM: LibraryOp.SUM,
    ReduceOp.PRODUCT: LibraryOp.PRODUCT,
    ReduceOp.MIN: LibraryOp.MIN,
    ReduceOp.MAX: LibraryOp.MAX,
    ReduceOp.BAND: LibraryOp.BAND,
    ReduceOp.BOR: LibraryOp.BOR,
    ReduceOp.BXOR: LibraryOp.BXOR,
}
_BITWISE = (LibraryOp.BAND, LibraryOp.BOR, LibraryOp.BXOR)


@dataclass(frozen=True)
class GroupReduction:
    """Reduction of one verb: terms are scaled, reduced in a wider dtype, divided and cast back.

    Attributes:
        reduction: The library's operator, and the dtype in which it is computed.
        averages: True if the sum is divided by the number of ranks; of integers it is rounded down.
        factor: What each term is multiplied by before the sum; None without.
    """

    reduction: Reduction
    averages: bool = False
    factor: Any = None

    @property
    def is_sum(self) -> bool:
        """True if the transport can reduce it."""
        return self.reduction.is_sum

    def divisor(self, ranks: int) -> int | None:
        """Return by what the transport divides the sum of floats; None if it does not."""
        return ranks if self.averages and self._divides_exactly else None

    @property
    def _divides_exactly(self) -> bool:
        return self.reduction.dtype.is_floating_point or self.reduction.dtype.is_complex

    def prepare(self, term: torch.Tensor) -> torch.Tensor:
        """Return a term in the dtype of the reduction, scaled."""
        wide = term.to(self.reduction.dtype)
        if self.factor is None:
            return wide
        return wide.mul_(self.factor) if wide is not term else wide * self.factor

    def finish_sum(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """Divide the sum that the transport has left undivided."""
        if self.averages and not self._divides_exactly:
            total.div_(ranks, rounding_mode="floor")
        return total

    def of(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Reduce prepared terms in their order; the result is new, in the reduction's dtype."""
        if self.divisor(len(terms)) is not None:
            return sum_of(terms, len(terms))
        return self.finish_sum(self.reduction.of(terms), len(terms))


def reduction_for(verb: str, op: Any, tensor: torch.Tensor) -> GroupReduction:
    """Return the reduction of a verb on a tensor's dtype.

    Raises:
        ArgumentError: The operator has no meaning for the dtype, or is unknown.
        DtypeError: The dtype cannot be reduced.
    """
    given: Any = op if hasattr(op, "op") else ReduceOp(op)  # isinstance says yes to both
    kind, factor = given.__getstate__()
    chosen = _OPERATORS.get(kind)
    traits = dtype_traits_of(tensor, verb)
    if chosen is None:
        raise ArgumentError(f"{verb}: unknown reduction operator {op!r}")
    is_bool, is_whole = traits.kind is DtypeKind.BOOL, traits.kind is DtypeKind.INTEGER
    ordered = traits.kind is not DtypeKind.COMPLEX
    refused = (
        (chosen in _BITWISE and not (is_bool or is_whole))
        or (chosen in (LibraryOp.MIN, LibraryOp.MAX) and not ordered)
        or (kind == ReduceOp.AVG and is_bool)
        or (kind == ReduceOp.PREMUL_SUM and not traits.averages)
    )
    if refused:
        raise ArgumentError(
            f"{verb}: there is no {str(kind).rpartition('.')[2]} of {traits.name} values; expected "
            "another operator, or a tensor of another dtype"
        )
    wide = chosen in (LibraryOp.SUM, LibraryOp.PRODUCT)
    dtype = traits.accumulate if wide else traits.dtype
    if is_whole and kind == ReduceOp.AVG:  # whose sum must not wrap around
        dtype = torch.promote_types(dtype, torch.int32)
    reduction = Reduction(chosen, dtype)
    return GroupReduction(reduction, kind == ReduceOp.AVG, factor)
