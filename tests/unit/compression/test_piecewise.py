"""Pieces cover a matrix, each element once."""

from __future__ import annotations

import pytest
import torch

from asyncddp.compression.piecewise import pieces


@pytest.mark.parametrize(
    ("rows", "numel", "multiple"),
    [
        (1, 1, 1),
        (7, 1000, 8),
        (5, 100_000, 1),
        (2, 600_000, 64),
        (3, 2**18, 8),
        (4, 0, 8),
        (2, 900_000, 600_000),
    ],
)
def test_pieces_cover_every_element_once(rows, numel, multiple):
    """Parts of rows begin at multiples, and no piece is much larger than the limit."""
    covered = torch.zeros(rows, numel, dtype=torch.int8)
    for at, columns in pieces(covered, multiple):
        part = covered[at, columns]
        part += 1
        assert part.numel() <= max(2**18, multiple)
        assert columns.start % multiple == 0
        assert at.stop - at.start == 1 or part.shape[1] == numel
    assert (covered == 1).all()
