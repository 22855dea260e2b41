"""Compressor ``fp16``: rounds each element to float16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncddp.compression.casts import Cast


@dataclass(frozen=True)
class FP16(Cast):
    r"""Compressor that rounds each element to float16: 11 significant bits, magnitudes up to 65504.

    Larger finite values are clamped to ±65504, and magnitudes below :math:`3 \cdot 10^{-8}` become
    0, so that the compressor is no contraction.

    Example:
        >>> x = torch.tensor([[1.0, 0.1, 1e6, -float("inf")]])
        >>> q = FP16()
        >>> encoded = torch.empty(1, q.encoded_size(4, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> q.decode(encoded, x)
        >>> x.tolist()
        [[1.0, 0.0999755859375, 65504.0, -inf]]

    References:
        Micikevicius et al., "Mixed precision training", ICLR 2018.
    """

    name: ClassVar[str] = "fp16"
    to: ClassVar[torch.dtype] = torch.float16
