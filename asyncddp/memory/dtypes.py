"""The one dtype table: what may travel, and in which dtype sums are formed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch

from asyncddp.errors import DtypeError

__all__ = ["DTYPES", "Dtype", "Kind", "dtype_of", "require_kind"]


class Kind(Enum):
    """What arithmetic a dtype allows."""

    BOOL = "bool"
    INTEGER = "integer"
    FLOAT = "float"
    COMPLEX = "complex"


@dataclass(frozen=True)
class Dtype:
    """One row of the table.

    Attributes:
        dtype: The dtype of the user's tensor.
        kind: Its arithmetic.
        accumulate: Dtype in which sums are formed before the result is cast back.
        mpi: Name of the MPI datatype of ``accumulate``, an attribute of ``mpi4py.MPI``.
    """

    dtype: torch.dtype
    kind: Kind
    accumulate: torch.dtype
    mpi: str

    @property
    def name(self) -> str:
        """The dtype's short name, ``"float32"``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def averages(self) -> bool:
        """Whether a weighted average of such values is again such a value, up to rounding."""
        return self.kind in (Kind.FLOAT, Kind.COMPLEX)


_ROWS = [
    Dtype(torch.bool, Kind.BOOL, torch.bool, "C_BOOL"),
    Dtype(torch.uint8, Kind.INTEGER, torch.int32, "INT32_T"),  # Open MPI's vector units saturate
    Dtype(torch.int8, Kind.INTEGER, torch.int32, "INT32_T"),  # narrow sums where torch wraps
    Dtype(torch.int16, Kind.INTEGER, torch.int32, "INT32_T"),
    Dtype(torch.int32, Kind.INTEGER, torch.int32, "INT32_T"),
    Dtype(torch.int64, Kind.INTEGER, torch.int64, "INT64_T"),
    Dtype(torch.float16, Kind.FLOAT, torch.float32, "FLOAT"),
    Dtype(torch.bfloat16, Kind.FLOAT, torch.float32, "FLOAT"),
    Dtype(torch.float32, Kind.FLOAT, torch.float32, "FLOAT"),
    Dtype(torch.float64, Kind.FLOAT, torch.float64, "DOUBLE"),
    Dtype(torch.complex64, Kind.COMPLEX, torch.complex64, "C_FLOAT_COMPLEX"),
    Dtype(torch.complex128, Kind.COMPLEX, torch.complex128, "C_DOUBLE_COMPLEX"),
]
DTYPES = {row.dtype: row for row in _ROWS}


def dtype_of(tensor: torch.Tensor, verb: str) -> Dtype:
    """Look a tensor's dtype up.

    Raises:
        DtypeError: The dtype is not in the table; the message lists those that are.
    """
    try:
        return DTYPES[tensor.dtype]
    except KeyError:
        known = ", ".join(row.name for row in _ROWS)
        raise DtypeError(
            f"{verb}: argument tensor has dtype {tensor.dtype}; expected one of {known}. "
            "Cast it first with tensor.to(...)."
        ) from None


def require_kind(tensor: torch.Tensor, verb: str, kinds: Iterable[Kind], remedy: str) -> Dtype:
    """Look a tensor's dtype up and insist on its arithmetic.

    Raises:
        DtypeError: The dtype's kind is not among ``kinds``.
    """
    row = dtype_of(tensor, verb)
    kinds = list(kinds)
    if row.kind not in kinds:
        expected = " or ".join(kind.value for kind in kinds)
        raise DtypeError(
            f"{verb}: argument tensor has dtype {tensor.dtype}; expected {expected}. {remedy}"
        )
    return row
