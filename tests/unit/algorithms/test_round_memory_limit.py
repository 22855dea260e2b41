"""Pieces of buckets: their sizes, and the padding of buckets to multiples of them."""

from __future__ import annotations

import pytest
import torch

from asyncddp.algorithms.rounds.round_memory_limit import RoundMemoryLimit
from asyncddp.tensors.buckets import ALIGNMENT, ParameterBucket

MB = 1 << 20


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limit", [MB // 4, MB, 8 * MB, 64 * MB])
@pytest.mark.parametrize("sizes", [[24 * MB], [26_214_400, 64, 7_000_000], [1_000_000] * 9])
def test_pieces_fit_into_the_limit(limit, ahead, sizes):
    """Eight or more fit, the ring buffer has two, and the largest bucket is hardly padded."""
    buffer = RoundMemoryLimit(limit, ahead=ahead)
    piece = buffer.piece_bytes(sizes)
    if piece is None:
        assert 3 * sum(sizes) <= limit
        return
    assert piece % ALIGNMENT == 0
    assert 8 * piece <= limit + 8 * ALIGNMENT
    assert piece <= (4 * MB if ahead else MB // 2) + ALIGNMENT
    pieces = -(-max(sizes) // piece)
    assert pieces * piece - max(sizes) <= pieces * ALIGNMENT
    assert buffer.message_room(piece) == (limit - 2 * piece if ahead else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("unit", [64, 192, 1024])
def test_a_bucket_is_a_multiple_of_a_piece(dtype, unit):
    """Zeros fill the end; the parameters lie and count as before."""
    parameters = [torch.nn.Parameter(torch.full((size,), size, dtype=dtype)) for size in (3, 70)]
    before = [one.detach().clone() for one in parameters]
    bucket = ParameterBucket([("a", parameters[0]), ("b", parameters[1])], unit=unit)
    assert bucket.flat.nbytes % unit == 0
    assert bucket.flat.nbytes - unit < sum(-(-one.nbytes // 64) * 64 for one in before)
    assert all(map(torch.equal, parameters, before))
    assert bucket.flat.sum() == sum(one.sum() for one in before)
