"""Compressor ``bf16``: rounds each element to bfloat16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from asyncddp.compression.casts import Cast


@dataclass(frozen=True)
class BF16(Cast):
    r"""Compressor that rounds each element to bfloat16: 8 significant bits, range of float32.

    Finite values are clamped to the largest bfloat16, :math:`3.39 \cdot 10^{38}`.

    Example:
        >>> x = torch.tensor([[1.0, 0.1, 1e6]])
        >>> q = BF16()
        >>> encoded = torch.empty(1, q.encoded_size(3, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> q.decode(encoded, x)
        >>> x.tolist()
        [[1.0, 0.10009765625, 999424.0]]

    References:
        Kalamkar et al., "A study of BFLOAT16 for deep learning training", 2019.
    """

    name: ClassVar[str] = "bf16"
    to: ClassVar[torch.dtype] = torch.bfloat16

    def contraction(self, numel: int) -> float:
        r"""Return :math:`1 - 2^{-16}`: relative errors of elements are at most :math:`2^{-8}`."""
        return 1 - 2.0**-16
