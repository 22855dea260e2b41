"""Scaled sign: one bit for an element."""

from __future__ import annotations

import pytest
import torch

from asyncddp.compression.sign import Sign
from tests.unit.compression.codec import encoded, normal, received

Q = Sign()
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 8, 9, 63, 64, 65, 300_001])
def test_mean_magnitude_times_sign(dtype, numel):
    """Decoded is mean |x| where the sign bit is not set, and its negative elsewhere."""
    x = normal(2, numel).to(dtype)
    mean = x.double().abs().mean(1, keepdim=True)
    expected = torch.where(x.signbit(), -mean, mean)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(received(Q, x).double(), expected, rtol=2 * eps + 1e-6, atol=0)


def test_a_record_has_a_scale_and_bits():
    """float32 and zeros in 8 bytes, then bit i mod 8 of byte i div 8 for element i."""
    x = torch.tensor([[1.0, -1, 1, 1, -1, 1, 1, -1, -1, 1, -0.0]])
    rows = encoded(Q, x)
    assert rows.shape == (1, 16)
    assert rows[:, :4].view(torch.float32).item() == pytest.approx(10 / 11)
    assert rows[0, 4:].tolist() == [0] * 4 + [0b10010010, 0b101] + [0] * 6


def test_the_size_is_a_bit_for_an_element():
    """8 + S / 8 bytes, up to a multiple of 8, whatever the dtype."""
    for dtype in DTYPES:
        sizes = [Q.encoded_size(numel, dtype) for numel in (1, 64, 65, 1_000_000)]
        assert sizes == [16, 16, 24, 125_008]


def test_one_element_that_is_not_zero_attains_the_contraction():
    """‖Q(x) - x‖² = (1 - 1/S) ‖x‖² for it."""
    x = torch.zeros(100, dtype=torch.float64)
    x[3] = -2.0
    error = (received(Q, x) - x).square().sum() / x.square().sum()
    assert error == pytest.approx(1 - Q.contraction(100))
