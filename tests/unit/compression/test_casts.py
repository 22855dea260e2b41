"""Rounding to float16 and bfloat16: torch's, but that finite numbers stay finite."""

from __future__ import annotations

import pytest
import torch

from asyncddp.compression.bf16 import BF16
from asyncddp.compression.fp16 import FP16
from tests.unit.compression.codec import encoded, normal, received

both = pytest.mark.parametrize("q", [FP16(), BF16()], ids=["fp16", "bf16"])
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_within_the_range_it_is_torch_s_rounding(q, dtype):
    """Bits are those of ``tensor.to``, subnormal and zero ones included."""
    x = normal(3, 1001).to(dtype)
    x[0] *= 1e-6
    x[1, ::2] = 0
    x[1, 1::4] = -0.0
    rows = encoded(q, x)
    assert torch.equal(
        rows[:, : 2 * 1001].view(q.to).view(torch.int16), x.to(q.to).view(torch.int16)
    )
    assert torch.equal(received(q, x), x.to(q.to).to(dtype))


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_beyond_the_range_it_is_the_largest_number(q, dtype):
    """Finite values stay finite with their sign; infinities and NaN stay what they are."""
    most = torch.finfo(dtype).max
    x = torch.tensor([most, -most, most / 2, torch.inf, -torch.inf, torch.nan, 1], dtype=dtype)
    back = received(q, x)
    largest = min(torch.finfo(q.to).max, most)
    expected = x.to(q.to).to(dtype)
    expected[:3] = torch.tensor([largest, -largest, min(largest, most / 2)]).to(q.to).to(dtype)
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


@both
def test_two_bytes_for_an_element(q):
    """The size is 2 S, up to a multiple of 8, whatever the dtype."""
    for dtype in DTYPES:
        assert [q.encoded_size(numel, dtype) for numel in (1, 4, 5, 1000)] == [8, 8, 16, 2000]


def test_only_bfloat16_is_a_contraction():
    """float16 loses numbers below 6e-8 altogether."""
    assert FP16().contraction(10) is None
    assert not received(FP16(), torch.full((4,), 1e-8)).any()
    x = torch.full((4,), 1e-30)
    assert (received(BF16(), x) - x).norm() <= 2**-8 * x.norm()
