"""``top_k_int2`` keeps the largest elements of each block, as the mean of one of four bins."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.compression.top_k_int2 import TopKInt2


def by_numpy(x, k):
    """Block by block, and value by value."""
    kept = np.concatenate(
        [
            start + np.argsort(-np.abs(x[start : start + 4096]))[:k]
            for start in range(0, len(x), 4096)
        ]
    )
    values = x[kept]
    edges = values.mean() + 1.5 * values.std() * np.array([-1, 0, 1])
    codes = np.searchsorted(edges, values, side="right")
    found = np.zeros_like(x)
    for code in range(4):
        if (codes == code).any():
            found[kept[codes == code]] = values[codes == code].mean()
    return found


@pytest.mark.parametrize("k", [1, 3, 64, 200])
@pytest.mark.parametrize("numel", [5, 4096, 4097, 10_000])
def test_means_of_four_bins(k, numel):
    """By numpy, of whole blocks, of one that is short, and of one with fewer elements than k."""
    x = np.random.default_rng(numel + k).standard_normal(numel) + 0.1
    codec = TensorCompressor(TopKInt2(k))
    encoded = codec.encode(torch.from_numpy(x)[None])
    got = codec.decode(encoded, torch.empty(1, numel, dtype=torch.float64))[0]
    np.testing.assert_allclose(got.numpy(), by_numpy(x, k), rtol=0, atol=1e-12)


def test_fourteen_bits_for_each_element_that_is_kept():
    """1.56 % of the elements: a fifth of a bit for each of all."""
    size = TopKInt2().encoded_size(4096 * 1000, torch.float32)
    assert size == 16 + 64_000 * 14 // 8


@pytest.mark.parametrize("k", [0, 4097, 2.0, True])
def test_a_number_out_of_range_is_refused(k):
    """By argument, range and value."""
    with pytest.raises(bf.ArgumentError, match=f"argument k: expected.*from 1 to 4096, got {k}"):
        TopKInt2(k)
