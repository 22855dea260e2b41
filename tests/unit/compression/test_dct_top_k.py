"""``dct_top_k`` keeps the largest coefficients of the orthonormal cosine transform."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp.compression.dct_top_k import DCTTopK
from asyncddp.compression.tensor_compressor import TensorCompressor


def transform():
    """D of 64 elements, in numpy."""
    m, j = np.mgrid[:64, :64]
    d = np.cos(np.pi * m * (2 * j + 1) / 128) / np.sqrt(32)
    d[0] /= np.sqrt(2)
    return d


@pytest.mark.parametrize("k", [1, 8, 63, 64])
def test_the_largest_coefficients_of_each_block(k):
    """By numpy, of a whole block and one that zeros fill up; with k = 64 nothing is lost."""
    x = np.random.default_rng(0).standard_normal(100)
    blocks = np.zeros((2, 64))
    blocks.reshape(-1)[:100] = x
    coefficients = blocks @ transform().T
    lost = np.argsort(np.abs(coefficients), axis=1)[:, : 64 - k]
    np.put_along_axis(coefficients, lost, 0.0, axis=1)
    expected = (coefficients @ transform()).reshape(-1)[:100]
    codec = TensorCompressor(DCTTopK(k))
    encoded = codec.encode(torch.from_numpy(x)[None])
    got = codec.decode(encoded, torch.empty(1, 100, dtype=torch.float64))[0]
    np.testing.assert_allclose(got.numpy(), expected, rtol=0, atol=1e-12)
    assert k < 64 or np.abs(got.numpy() - x).max() < 1e-12


@pytest.mark.parametrize("k", [0, 65, 2.0, True])
def test_a_number_out_of_range_is_refused(k):
    """By argument, range and value."""
    with pytest.raises(bf.ArgumentError, match=f"argument k: expected.*from 1 to 64, got {k}"):
        DCTTopK(k)
