"""Measurement of a compressor's largest absolute error on numbers in [-½, ½)."""

from __future__ import annotations

from functools import lru_cache

import torch

from asyncddp.compression.compressor import Compressor
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.tensors.allocation import empty_like, make_tensor

_SAMPLE = 1 << 14
_GOLDEN = 0.6180339887498949


@lru_cache(maxsize=256)
def largest_error(compressor: Compressor) -> float:
    r"""Measure the largest absolute error of a compressor on evenly spread numbers in [-½, ½).

    .. math:: \delta = \max_k |Q(y)_k - y_k|, \qquad
              y_k = \left(\tfrac{\sqrt5 - 1}{2} k\right) \bmod 1 - \tfrac12, \quad
              k = 0, \dots, 2^{14} - 1

    Example:
        >>> from asyncddp.compression import compressor_for
        >>> round(1 / largest_error(compressor_for("doctest", "minmax_uint8")))
        510
    """
    evenly = [(_GOLDEN * k) % 1.0 - 0.5 for k in range(_SAMPLE)]
    chunk = make_tensor(evenly, torch.float32).view(1, -1)
    codec = TensorCompressor(compressor)
    decoded = codec.decode(codec.encode(chunk), empty_like(chunk))
    return float((decoded - chunk).abs().max())
