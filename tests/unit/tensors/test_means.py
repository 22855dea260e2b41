"""Means of terms: finite where the terms are, and rounded once as a quotient of the sum is."""

from __future__ import annotations

import pytest
import torch

from asyncddp.tensors.means import first_divisor, split_divisor, sum_of
from tests.support.oracle import held

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
COUNTS = [*range(1, 10), 16, 17, 33, 64, 100]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("largest", ["max", "min"])
def test_the_mean_of_equal_huge_values_is_finite(dtype, largest):
    """That value to the dtype's rounding, of a power of two of them to the bit."""
    value = getattr(torch.finfo(dtype), largest)
    for count in COUNTS:
        x = torch.full((3,), value, dtype=dtype)
        mean = sum_of([x] * count, count)
        assert mean.isfinite().all(), count
        if count & (count - 1):
            torch.testing.assert_close(mean, x, rtol=count * torch.finfo(dtype).eps, atol=0.0)
        else:
            assert torch.equal(mean, x), count


@pytest.mark.parametrize("value", [-0.0, 1.25, 1.1754943508222875e-38, float("inf")])
def test_the_mean_of_equal_values_keeps_their_bits(value):
    """Also of the smallest normal number, of infinity and of a zero with a sign."""
    x = torch.tensor([value])
    for count in (1, 2, 3, 4, 5, 6, 8, 9, 16, 17):
        mean = sum_of([x] * count, count)
        assert torch.equal(mean.view(torch.int32), x.view(torch.int32)), count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_other_means_are_the_sum_divided_to_the_bit(dtype):
    """The scale is a power of two, so that no rounding changes."""
    for count in COUNTS:
        terms = [held(rank, (1000,), dtype) for rank in range(count)]
        total = torch.zeros(1000, dtype=dtype)
        for term in terms:
            total += term
        assert torch.equal(sum_of(terms, count), total / count), count


def test_the_result_may_replace_one_of_two_terms_or_be_wider():
    """As the memory of a verb in place is, and the float64 of an average of integers."""
    for place in (0, 1):
        terms = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 6.0])]
        for divisor, expected in ((None, [4.0, 8.0]), (2, [2.0, 4.0])):
            given = [term.clone() for term in terms]
            assert sum_of(given, divisor, given[place]).tolist() == expected
    whole = torch.tensor([2**62 + 1, 3])
    into = torch.empty(2, dtype=torch.float64)
    assert sum_of([whole, whole, whole], 3, into).tolist() == whole.double().tolist()


def test_sums_in_parts_are_divided_in_parts():
    """A first divisor that is a power of two leaves a rest for the sum of the sums."""
    for count in COUNTS:
        first = first_divisor(count)
        assert first // 2 < count <= first
        scale, rest = split_divisor(count)
        assert scale == 1 / first
        assert rest == split_divisor(count / first)[1] == count / first
