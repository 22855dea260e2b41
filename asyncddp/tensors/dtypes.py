"""Table of the supported dtypes: kind, accumulation dtype and MPI datatype of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from asyncddp.errors import DtypeError


class DtypeKind(Enum):
    """Arithmetic kind of a dtype: boolean, integer, float or complex."""

    BOOL = "bool"
    INTEGER = "integer"
    FLOAT = "float"
    COMPLEX = "complex"


@dataclass(frozen=True)
class DtypeTraits:
    """Communication traits of a supported dtype: kind, accumulation dtype and MPI datatype."""

    dtype: torch.dtype
    kind: DtypeKind
    accumulate: torch.dtype  # in which sums are formed before the result is cast back
    mpi: str  # name of the MPI datatype in which MPI sums, an attribute of mpi4py.MPI

    @property
    def name(self) -> str:
        """Short name of the dtype, such as ``"float32"``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def averages(self) -> bool:
        """True if the dtype is closed under weighted averaging, up to rounding."""
        return self.kind in (DtypeKind.FLOAT, DtypeKind.COMPLEX)


_ROWS = [
    DtypeTraits(torch.bool, DtypeKind.BOOL, torch.bool, "C_BOOL"),
    # Open MPI's vector units saturate narrow sums where torch wraps: MPI sums them in int32
    DtypeTraits(torch.uint8, DtypeKind.INTEGER, torch.uint8, "INT32_T"),
    DtypeTraits(torch.int8, DtypeKind.INTEGER, torch.int8, "INT32_T"),
    DtypeTraits(torch.int16, DtypeKind.INTEGER, torch.int16, "INT32_T"),
    DtypeTraits(torch.int32, DtypeKind.INTEGER, torch.int32, "INT32_T"),
    DtypeTraits(torch.int64, DtypeKind.INTEGER, torch.int64, "INT64_T"),
    DtypeTraits(torch.float16, DtypeKind.FLOAT, torch.float32, "FLOAT"),
    DtypeTraits(torch.bfloat16, DtypeKind.FLOAT, torch.float32, "FLOAT"),
    DtypeTraits(torch.float32, DtypeKind.FLOAT, torch.float32, "FLOAT"),
    DtypeTraits(torch.float64, DtypeKind.FLOAT, torch.float64, "DOUBLE"),
    DtypeTraits(torch.complex64, DtypeKind.COMPLEX, torch.complex64, "C_FLOAT_COMPLEX"),
    DtypeTraits(torch.complex128, DtypeKind.COMPLEX, torch.complex128, "C_DOUBLE_COMPLEX"),
]
DTYPES = {row.dtype: row for row in _ROWS}


def dtype_traits_of(tensor: torch.Tensor, verb: str, argument: str = "tensor") -> DtypeTraits:
    """Look up the traits of a tensor's dtype; raise a DtypeError if it is not supported."""
    try:
        return DTYPES[tensor.dtype]
    except KeyError:
        known = ", ".join(row.name for row in _ROWS)
        raise DtypeError(
            f"{verb}: argument {argument} has dtype {tensor.dtype}; expected one of {known}. "
            "Cast it first with tensor.to(...)."
        ) from None
