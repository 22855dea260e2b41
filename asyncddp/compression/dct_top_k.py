"""Compressor ``dct_top_k``: keeps the k largest DCT coefficients of each block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import cos, pi, sqrt
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import (
    FieldCompressor,
    Fields,
    State,
    Views,
    require_count,
)
from asyncddp.tensors.allocation import make_tensor, zeros
from asyncddp.tensors.dtypes import DTYPES

_BLOCK = 64
_SCALE = 1 / 16  # keeps coefficients below the largest element


@dataclass(frozen=True)
class DCTTopK(FieldCompressor):
    r"""Compressor that keeps the k largest coefficients of each block's discrete cosine transform.

    .. math:: c = D x, \qquad Q(x) = D^{\top} \mathrm{TopK}_k(c), \qquad
              D_{mj} = \sqrt{\tfrac{2 - [m = 0]}{64}} \cos \frac{\pi m (2 j + 1)}{128}

    for each block of 64 elements; the last one is filled up by zeros.

    Args:
        k: How many coefficients of a block are kept, from 1 to 64.

    Example:
        >>> x = torch.ones(1, 64)
        >>> q = DCTTopK(k=1)
        >>> encoded = torch.empty(1, q.encoded_size(64, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> q.decode(encoded, x)
        >>> encoded.shape, bool((x - 1).abs().max() < 1e-6)
        (torch.Size([1, 16]), True)

    References:
        Peng, Quesnelle, Kingma, "DeMo: decoupled momentum optimization", 2024.
    """

    k: int = 8

    name: ClassVar[str] = "dct_top_k"
    wants_error_feedback = True
    costly_with = ("betas",)

    def __post_init__(self) -> None:
        require_count(f"{self.name}: argument k", self.k, _BLOCK)

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the fields: indices of the kept coefficients, one byte each, and their values."""
        count = self.k * -(-numel // _BLOCK)
        return (count, torch.uint8), (count, dtype)

    def contraction(self, numel: int) -> float:
        r"""Return :math:`k / 64`; the worst case is a block with equally large coefficients."""
        return self.k / _BLOCK

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        rows, numel = chunks.shape
        wide = DTYPES[chunks.dtype].accumulate
        blocks = zeros((rows, -(-numel // _BLOCK), _BLOCK), wide, chunks.device)
        blocks.view(rows, -1)[:, :numel].copy_(chunks)
        coefficients = _product(blocks * _SCALE, _transform(wide, chunks.device).T)
        indices = coefficients.abs().topk(self.k, sorted=False).indices
        kept = coefficients.gather(2, indices).view(rows, -1)
        places, values = fields
        places.copy_(indices.view(rows, -1))
        values.copy_(kept)

    @override
    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        rows, numel = chunks.shape
        wide = DTYPES[chunks.dtype].accumulate
        places, values = self.views(encoded, chunks)
        coefficients = zeros((rows, -(-numel // _BLOCK), _BLOCK), wide, chunks.device)
        form = (rows, -1, self.k)
        indices = places.to(torch.int64).reshape(form)
        coefficients.scatter_(2, indices, values.to(wide).reshape(form))
        blocks = _product(coefficients, _transform(wide, chunks.device)).div_(_SCALE)
        chunks.copy_(blocks.view(rows, -1)[:, :numel])


def _product(blocks: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply each chunk's blocks by a matrix, chunk by chunk so that rounding is reproducible.

    Args:
        blocks: Shape ``(K, blocks, 64)``; overwritten by the product.
        matrix: Shape ``(64, 64)``.
    """
    for chunk in blocks:
        chunk.copy_(chunk @ matrix)
    return blocks


@lru_cache(maxsize=8)
def _transform(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return D, the matrix of the discrete cosine transform, with one cosine per row."""
    rows = [
        [sqrt((1 if m == 0 else 2) / _BLOCK) * cos(pi * m * (2 * j + 1) / 128) for j in range(64)]
        for m in range(_BLOCK)
    ]
    return make_tensor(rows, dtype, device)
