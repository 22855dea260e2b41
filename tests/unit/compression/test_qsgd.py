"""Stochastic quantisation of blocks: layout, bounds, and the variance that was promised."""

from __future__ import annotations

import math

import pytest
import torch

import asyncddp as bf
from asyncddp.compression.qsgd import QSGDInt4, QSGDInt8
from tests.unit.compression.codec import encoded, normal, received

both = pytest.mark.parametrize("kind", [QSGDInt8, QSGDInt4], ids=["int8", "int4"])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def scales(x, size):
    """The largest magnitude of each element's block, in the shape of x."""
    blocks = [block.abs().amax(1, keepdim=True).expand_as(block) for block in x.split(size, 1)]
    return torch.cat(blocks, 1)


def test_a_record_of_int8_has_scales_then_codes():
    """A scale per block in the tensor's dtype, padded to 8 bytes, then a signed byte each."""
    x = torch.tensor([[127.0, -5, 0, 3, 1, -127, 64, 2, 254.0, -2, 4, 0]])
    rows = encoded(QSGDInt8(block_size=8), x)
    assert rows.shape == (1, 8 + 16)
    assert rows[:, :8].view(torch.float32).tolist() == [[127.0, 254.0]]
    codes = [127, -5, 0, 3, 1, -127, 64, 2, 127, -1, 2, 0]
    assert rows[0, 8:20].view(torch.int8).tolist() == codes


def test_a_record_of_int4_has_both_halves_of_a_block_in_its_bytes():
    """Lower bits: the first half of the block, plus 8; upper bits: the second half."""
    x = torch.tensor([[7.0, -7, 0, 1, 2, -3, 4, -5, 14, 2, -4]])
    rows = encoded(QSGDInt4(block_size=8), x)
    assert rows.shape == (1, 8 + 8)
    assert rows[:, :8].view(torch.float32).tolist() == [[7.0, 14.0]]
    pairs = [(7, 2), (-7, -3), (0, 4), (1, -5), (7, -2), (1, -8)]
    assert rows[0, 8:14].tolist() == [(low + 8) + 16 * (high + 8) for low, high in pairs]


@both
def test_the_size_is_a_scale_per_block_and_the_codes(kind):
    """Each part padded to 8 bytes; scales have the size of the tensor's elements."""
    q = kind()
    for numel in (1, 8, 255, 256, 257, 100_000):
        for dtype in DTYPES:
            blocks, codes = -(-numel // 256), -(-numel * q.bits // 8)
            expected = 8 * math.ceil(blocks * dtype.itemsize / 8) + 8 * math.ceil(codes / 8)
            assert q.encoded_size(numel, dtype) == expected


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [8, 64, 256, 1000])
def test_errors_are_below_a_level_of_the_own_block(kind, dtype, size):
    """|x̂ - x| < s / L with the s of the block; its largest element is exact, and so is zero."""
    q = kind(block_size=size)
    x = normal(3, 2345).to(dtype) * torch.logspace(-4, 4, 2345).to(dtype)
    x[:, ::5] = 0
    back, s = received(q, x, seed=1), scales(x, size)
    eps = 2 * torch.finfo(dtype).eps
    assert ((back - x).abs().double() <= s.double() * (1 / q.levels + eps)).all()
    largest = x.abs() == s
    torch.testing.assert_close(back[largest], x[largest], rtol=eps, atol=0)
    assert not back[x == 0].any()


@both
def test_blocks_far_apart_in_magnitude_do_not_disturb_each_other(kind):
    """Blocks from subnormal to huge keep their relative precision, in float32."""
    q = kind(block_size=8)
    magnitudes = torch.tensor([1e-36, 1e-20, 1.0, 1e20, 1e38]).repeat_interleave(8)
    x = normal(1, 40).sign() * magnitudes
    torch.testing.assert_close(received(q, x), x, rtol=1e-6, atol=0)


@both
def test_the_variance_comes_near_its_bound_and_stays_below(kind):
    """On the worst chunk, one large element and all others equal, E‖error‖² is (1 - δ)‖x‖²."""
    q = kind()
    r = 255 / q.levels**2
    x = torch.full((1, 256), (math.sqrt(1 + r) - 1) / r / q.levels)
    x[0, 7] = 1.0
    found = received(q, x.expand(2000, -1).contiguous(), seed=3) - x
    relative = float(found.square().sum(1).mean() / x.square().sum())
    assert relative == pytest.approx(1 - q.contraction(256), rel=0.03)


def test_large_blocks_of_int4_are_no_contraction():
    """From 393 elements on the error may exceed the chunk: no factor is declared."""
    assert QSGDInt4(block_size=392).contraction(1000) > 0
    assert QSGDInt4(block_size=400).contraction(1000) is None
    assert QSGDInt4(block_size=400).contraction(300) == QSGDInt4(block_size=304).contraction(300)


@both
def test_only_blocks_with_what_is_not_finite_are_lost(kind):
    """All of such a block decodes to infinities and NaN; other blocks are unharmed."""
    q = kind(block_size=16)
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = normal(1, 40)
        x[0, 20] = bad
        finite = received(q, x).isfinite()[0]
        assert finite.tolist() == [True] * 16 + [False] * 16 + [True] * 8


@both
def test_equal_chunks_and_blocks_are_rounded_independently(kind):
    """Codes of equal elements agree as often as independent ones, p² + (1 - p)²."""
    q = kind(block_size=64)
    x = torch.full((2, 64 * 1000), 0.3)
    x[:, ::64] = 1.0
    codes = received(q, x, seed=5).view(2, -1, 64)[..., 1:]
    p = float((codes == codes.max()).double().mean())
    assert p == pytest.approx(0.3 * q.levels % 1, abs=0.01)
    expected = p * p + (1 - p) ** 2
    assert float((codes[0] == codes[1]).double().mean()) == pytest.approx(expected, abs=0.02)
    for distance in (1, 2, 128, 129):
        agree = (codes[:, distance:] == codes[:, :-distance]).double().mean()
        assert float(agree) == pytest.approx(expected, abs=0.02)


@both
@pytest.mark.parametrize("wrong", [0, -8, 12, 2.0, True, "256"])
def test_a_wrong_block_size_is_named(kind, wrong):
    """The message names the compressor, the argument, what was expected and what came."""
    with pytest.raises(
        bf.ArgumentError, match=f"^{kind.name}: argument block_size: expected a pos"
    ):
        kind(block_size=wrong)
