"""Typical contraction of a compressor, measured on normally distributed random numbers."""

from __future__ import annotations

from functools import lru_cache

import torch

from asyncddp.compression.compressor import Compressor
from asyncddp.compression.counter_random import normal, random_words
from asyncddp.tensors.allocation import empty

_LEAST = 1e-3


@lru_cache(maxsize=256)
def typical_contraction(compressor: Compressor, numel: int) -> float:
    r"""Measure a compressor's contraction factor on normally distributed numbers, in (0, 1].

    .. math:: \delta = 1 - \frac{\lVert Q(x) - x \rVert^2}{\lVert x \rVert^2}

    for a chunk of ``numel`` independent float32 numbers, which are always the same. The worst case,
    which ``contraction()`` returns, may be far below.

    Example:
        >>> from asyncddp.compression import compressor_for
        >>> round(typical_contraction(compressor_for("doctest", "sign"), 1 << 16), 2)
        0.64
    """
    host = torch.device("cpu")
    chunk = normal(random_words(0, numel, host)).to(torch.float32).view(1, numel)
    encoded = empty((1, compressor.encoded_size(numel, chunk.dtype)), torch.uint8)
    decoded = empty(chunk.shape, chunk.dtype)
    compressor.encode(chunk, encoded)
    compressor.decode(encoded, decoded)
    lost = float((decoded - chunk).square().sum() / chunk.square().sum())
    return min(1.0, max(1.0 - lost, _LEAST))
