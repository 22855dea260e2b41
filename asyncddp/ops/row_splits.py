"""Splits of rows among ranks: equal ones, or as many for each rank as the caller says."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from asyncddp.errors import ArgumentError


def equal_splits(verb: str, rows: int, number: int) -> list[int]:
    """Share rows equally among so many ranks; raise ArgumentError if that cannot be.

    Example:
        >>> equal_splits("alltoall", 6, 3)
        [2, 2, 2]
    """
    share, odd = divmod(rows, number)
    if odd:
        raise ArgumentError(
            f"{verb}: argument tensor: expected a first dimension that {number} ranks can share "
            f"equally, got {rows}; append {number - odd} rows, or say with splits= how many go to "
            "each rank"
        )
    return [share] * number


def checked_splits(
    verb: str, argument: str, splits: Sequence[int], number: int, rows: int | None = None
) -> list[int]:
    """Return numbers of rows, one of each rank; raise ArgumentError unless they fit the tensor.

    Example:
        >>> checked_splits("alltoall", "splits", (2, 0, 1), 3, rows=3)
        [2, 0, 1]
    """
    try:
        given = [operator.index(split) for split in splits]
    except TypeError:
        given = [-1]
    whole = rows is None or sum(given) == rows
    if len(given) != number or min(given, default=0) < 0 or not whole:
        total = "" if rows is None else f" that sum to {rows}, the rows of the tensor"
        raise ArgumentError(
            f"{verb}: argument {argument}: expected {number} numbers of rows, one for each rank"
            f"{total}, got {splits!r}"
        )
    return given


def check_shape_of_out(verb: str, out: torch.Tensor | None, shape: Sequence[int]) -> None:
    """Raise ArgumentError unless ``out`` has the shape of the result."""
    if out is not None and tuple(out.shape) != tuple(shape):
        raise ArgumentError(
            f"{verb}: argument out: expected shape {tuple(shape)}, got {tuple(out.shape)}; pass "
            f"torch.empty({tuple(shape)}), or leave out= away"
        )
