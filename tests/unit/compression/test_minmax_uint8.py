"""Bagua's quantiser: its bytes, its bounds, and its one defect mended."""

from __future__ import annotations

import pytest
import torch

from asyncddp.compression.minmax_uint8 import MinMaxUInt8
from tests.unit.compression.codec import encoded, normal, received

Q = MinMaxUInt8()
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
GOLDEN = {
    "around zero": (
        [-1, 0, 0.5, 2],
        [0, 85, 127, 255],
        [-1, 0, 0.49411765, 2],
    ),
    "zeros": ([0, 0, 0, 0], [255] * 4, [0] * 4),
    "mostly positive": (
        [0.1, 0.2, 0.3, -0.4],
        [182, 219, 255, 0],
        [0.0988235, 0.2003922, 0.2992157, -0.4007844],
    ),
}


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=GOLDEN)
def test_golden_vectors(golden):
    """Codes and decoded values of Bagua's kernels, measured."""
    values, codes, back = golden
    x = torch.tensor(values, dtype=torch.float32)
    assert encoded(Q, x)[0, 32:36].tolist() == codes
    torch.testing.assert_close(received(Q, x), torch.tensor(back, dtype=torch.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_record_has_bounds_codes_and_zeros(dtype):
    """Minimum at byte 0, maximum behind it in the tensor's dtype, codes from byte 32 on."""
    x = torch.tensor([[3.0, -1.0, 2.0], [0.5, 0.25, 4.0]], dtype=dtype)
    rows = encoded(Q, x)
    assert rows.shape == (2, 64)
    bounds = rows[:, : 2 * dtype.itemsize].view(dtype)
    assert bounds.tolist() == [[-1.0, 3.0], [0.25, 4.0]]
    assert not rows[:, 2 * dtype.itemsize : 32].any()
    assert not rows[:, 35:].any()


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 1000])
def test_the_size_is_that_of_bagua(numel):
    """32 + 32 ⌈S / 32⌉ bytes for a chunk, whatever its dtype."""
    for dtype in DTYPES:
        assert Q.encoded_size(numel, dtype) == 32 + 32 * -(-numel // 32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 3.0, 1000.0])
def test_errors_are_bounded(dtype, offset):
    """|decoded - v| ≤ (max - min + 1e-7) / 510 · 1.01 + 4 ulp(max |v|)."""
    x = (normal(200, 97) * torch.logspace(-3, 2, 200).unsqueeze(1) + offset).to(dtype)
    low, high = x.double().amin(1), x.double().amax(1)
    ulp = torch.finfo(dtype).eps * torch.maximum(low.abs(), high.abs())
    worst = (received(Q, x).double() - x.double()).abs().amax(1)
    assert (worst <= (high - low + 1e-7) / 510 * 1.01 + 4 * ulp).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_is_exact_between_minimum_and_maximum(dtype):
    """Padding with zeros stays zero."""
    x = normal(50, 64).to(dtype)
    x[:, ::3] = 0
    assert not received(Q, x)[:, ::3].any()


def test_an_offset_never_turns_a_maximum_into_the_minimum():
    """Where Bagua's code wraps around to 0, the clamp keeps it at 255, and order is kept."""
    x = torch.tensor([100000.0, 100001.0, 100000.5])
    back = received(Q, x)
    assert back.tolist() == pytest.approx([100000.0, 100001.0, 100000.5], abs=0.02)
    offsets = torch.logspace(0, 6, 300).unsqueeze(1)
    x = (offsets + normal(300, 41)).sort(1).values
    back = received(Q, x)
    assert (back.diff(dim=1) >= 0).all()
    assert ((back[:, -1] - back[:, 0]) >= 0.9 * (x[:, -1] - x[:, 0]) - 0.5).all()


def test_what_is_not_finite_is_all_of_its_chunk():
    """The bounds tell of it, so no element decodes to a number, but those of other chunks do."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        x = normal(2, 40)
        x[0, 3] = bad
        back = received(Q, x)
        assert not back[0].isfinite().any()
        assert back[1].isfinite().all()
