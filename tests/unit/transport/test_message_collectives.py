"""Large tensors are cut into few pieces of equal size."""

from __future__ import annotations

import pytest
import torch

from asyncddp.transport.message_collectives import _MAX_PIECE, _MIN_PIECE, _part, _pieces, _step

SIZES = [1, 1000, 262_656, 1_050_624 // 4, 1 << 20, 1_250_001, 5_000_011]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16, 17])
@pytest.mark.parametrize("numel", SIZES)
def test_pieces_are_about_equal_and_neither_small_nor_large(numel, ranks):
    """The last one is no small rest, which would cost as many messages as the others."""
    tensor = torch.empty(numel)
    pieces = [piece.numel() for piece in _pieces(tensor, _part(tensor, ranks) * ranks)]
    assert sum(pieces) == numel
    assert max(pieces) - min(pieces) <= 4 * ranks * len(pieces)
    share = 4 * max(pieces) / ranks  # bytes that each rank sums
    assert share <= 1.5 * _MAX_PIECE
    assert len(pieces) == 1 or share >= 0.6 * min(_MIN_PIECE, (1 << 22) / ranks)


def test_a_bucket_of_a_megabyte_is_one_piece_among_eight_ranks():
    """A layer of 512 x 512 with its bias: three, one of them tiny, took a third more messages."""
    tensor = torch.empty(513 * 512)
    assert len(_pieces(tensor, _part(tensor, 8) * 8)) == 1
    assert len(_pieces(tensor, _part(tensor, 2) * 2)) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.complex128])
def test_an_empty_tensor_and_one_element_are_pieces(dtype):
    """There is no step of zero elements."""
    assert _step(0, torch.empty(0, dtype=dtype)) >= 1
    assert _part(torch.empty(1, dtype=dtype), 8) >= 1
