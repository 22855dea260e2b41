"""Weighted sums over buffers: right in every dtype, in place, and exact where that can be had."""

from __future__ import annotations

import pytest
import torch

from asyncddp.kernels.cpu_weighted_sum import weighted_sum
from asyncddp.tensors.dtypes import DTYPES, DtypeKind
from tests.support.oracle import held

FLOATS = [row.dtype for row in DTYPES.values() if row.kind is DtypeKind.FLOAT]
INTEGERS = [row.dtype for row in DTYPES.values() if row.kind is DtypeKind.INTEGER]
SHAPES = [(), (0,), (1,), (3, 4), (140_000,)]
WEIGHTS = {
    "one": [0.3],
    "two that make one": [0.25, 0.75],
    "two": [0.3, 0.9],
    "ones": [1.0, 1.0],
    "one and a share": [1.0, 0.5],
    "a share and one": [0.5, 1.0],
    "three": [0.2, 0.3, 0.1],
    "five": [0.2, 1.0, 0.3, -0.4, 0.5],
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_sums_of_floats_into_any_of_the_terms(dtype, weights):
    """Right to the dtype's rounding, whichever of the terms is overwritten by the sum."""
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 2e-3}.get(dtype, 2e-2)
    for shape in SHAPES:
        for place in range(-1, len(weights) if len(shape) != 1 else 1):
            parts = [held(k, shape, dtype) for k in range(len(weights))]
            want = sum(w * x.double() for w, x in zip(weights, parts, strict=True))
            out = torch.empty(shape, dtype=dtype) if place < 0 else parts[place]
            weighted_sum(out, list(zip(parts, weights, strict=True)))
            torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_mean_of_equal_values_is_that_value(dtype):
    """A sum and one division, or an interpolation: the weight 1/3 is never rounded."""
    for count in (1, 2, 3, 6, 7):
        for value in (1.25, torch.finfo(dtype).min):
            x = torch.full((10,), value, dtype=dtype)
            out = torch.empty_like(x)
            weighted_sum(out, [(x, 1 / count)] * count, shares=count)
            assert torch.equal(out, x), count


def test_a_mean_with_zeros_left_out_is_divided_by_all():
    """A sum with weights 1/shares is divided by ``shares``, however few terms it has."""
    out = torch.empty(3, dtype=torch.float64)
    weighted_sum(out, [(torch.full((3,), 6.0, dtype=torch.float64), 1 / 3)], shares=3)
    assert out.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_sums_of_integers_are_exact_and_wrap_as_those_of_torch_do(dtype):
    """Integer sums equal torch's own arithmetic in every dtype, also where they overflow."""
    most = torch.iinfo(dtype).max
    one, two = torch.tensor([1, most], dtype=dtype), torch.tensor([2, 3], dtype=dtype)
    want = one * 2 + two - one
    out = one.clone()
    weighted_sum(out, [(out, 1.0), (one, 1.0), (two, 1.0), (one, -1.0)])
    assert torch.equal(out, want)
    weighted_sum(out, [(two, 2.0), (one, -1.0)])
    assert torch.equal(out, two * 2 - one)


def test_large_integers_keep_every_bit():
    """A sum of int64 beyond 2**53, where float64 would round, is exact."""
    x = torch.tensor([2**62 + 1])
    weighted_sum(x, [(x, 1.0), (torch.tensor([1]), 1.0)])
    assert x.item() == 2**62 + 2


def test_no_terms_give_zero():
    """A sum of no terms fills the result with zeros."""
    out = torch.ones(3)
    weighted_sum(out, [])
    assert out.tolist() == [0.0, 0.0, 0.0]
