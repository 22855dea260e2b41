"""Conversion of torch's reduction operators to asyncddp's, with torch's rules per dtype."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from asyncddp.errors import ArgumentError
from asyncddp.ops.reduce_op import ReduceOp as LibraryOp
from asyncddp.ops.reduce_op import Reduction
from asyncddp.tensors.dtypes import DtypeKind, dtype_traits_of

_OPERATORS = {
    ReduceOp.SUM: LibraryOp.SUM,
    ReduceOp.AVG: LibraryOp.AVERAGE,
    ReduceOp.PREMUL_SUM: LibraryOp.SUM,
    ReduceOp.PRODUCT: LibraryOp.PRODUCT,
    ReduceOp.MIN: LibraryOp.MIN,
    ReduceOp.MAX: LibraryOp.MAX,
    ReduceOp.BAND: LibraryOp.BAND,
    ReduceOp.BOR: LibraryOp.BOR,
    ReduceOp.BXOR: LibraryOp.BXOR,
}
_BITWISE = (LibraryOp.BAND, LibraryOp.BOR, LibraryOp.BXOR)


class TorchReduction(NamedTuple):
    """Reduction of one torch.distributed call: its operator, and the scaling of inputs and result.

    Attributes:
        reduction: The library's operator, and the dtype in which it is computed.
        floors: True if a sum of integers is divided by the number of ranks, rounded down.
        factor: Factor that multiplies each term before the sum; None if there is none.
    """

    reduction: Reduction
    floors: bool = False
    factor: Any = None

    def prepare(self, term: torch.Tensor) -> torch.Tensor:
        """Return a term, scaled or widened to the dtype of the reduction if needed."""
        if self.factor is not None:
            return torch.mul(term.to(self.reduction.dtype), self.factor)
        return term.to(self.reduction.dtype) if self.floors else term

    def finish(self, total: torch.Tensor, ranks: int) -> torch.Tensor:
        """Divide a sum of integers by the number of ranks, rounding down."""
        return total.div(ranks, rounding_mode="floor") if self.floors else total


def reduction_for(verb: str, op: Any, tensor: torch.Tensor) -> TorchReduction:
    """Return the reduction for torch's operator and a tensor's dtype.

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
    if is_whole and kind == ReduceOp.AVG:  # whose sum must not wrap around
        widest = torch.promote_types(traits.accumulate, torch.int32)
        return TorchReduction(Reduction(LibraryOp.SUM, widest), floors=True)
    wide = chosen in (LibraryOp.SUM, LibraryOp.AVERAGE, LibraryOp.PRODUCT)
    dtype = traits.accumulate if wide else traits.dtype
    return TorchReduction(Reduction(chosen, dtype), factor=factor)
