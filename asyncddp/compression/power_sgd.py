"""Compressor ``power_sgd``: approximates each chunk by a matrix of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log2
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import (
    CompressorState,
    FieldCompressor,
    Fields,
    State,
    Views,
    require_count,
)
from asyncddp.compression.counter_random import normal, random_words
from asyncddp.tensors.allocation import empty, zeros
from asyncddp.tensors.dtypes import DTYPES

_RANK = 4
_Q = "power_sgd.q"


@dataclass(frozen=True)
class PowerSGD(FieldCompressor):
    r"""PowerSGD: approximates each chunk, as a near-square matrix, by a product of two thin ones.

    .. math:: P = \operatorname{orthonormalize}(M Q_{\text{last}}), \qquad Q = M^\top P, \qquad
              \hat M = P Q^\top

    M holds the chunk row by row, padded with zeros. It is about as high as wide, and its width is
    a power of two: where that divides the rows of a layer, as it mostly does, a gradient of low
    rank makes a chunk of low rank. With a state, :math:`Q_{\text{last}}` is the Q of
    the tensor that was sent before, so that approximations of similar tensors get better from one
    to the next; without, or where that was zero or not finite, it is random.

    Args:
        rank: Columns of P and Q.

    Example:
        >>> x = torch.outer(torch.arange(4.0), torch.tensor([1.0, 0.0, -1.0, 2.0])).view(1, 16)
        >>> q = PowerSGD(rank=1)
        >>> encoded = torch.empty(1, q.encoded_size(16, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> decoded = torch.empty(1, 16)
        >>> q.decode(encoded, decoded)
        >>> torch.allclose(decoded, x, atol=1e-6)
        True

    References:
        Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for
        distributed optimization", NeurIPS 2019.
    """

    rank: int = _RANK

    name: ClassVar[str] = "power_sgd"
    wants_error_feedback = True
    costly_with = ("betas",)

    def __post_init__(self) -> None:
        require_count(f"{self.name}: argument rank", self.rank)

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the single field: P and Q, in float32 or float64."""
        height, width, rank = self._matrix(numel)
        return (((height + width) * rank, DTYPES[dtype].accumulate),)

    def contraction(self, numel: int) -> float:
        r"""Return the expected contraction without a state: rank / shorter side of the matrix."""
        height, width, rank = self._matrix(numel)
        return rank / min(height, width)

    def new_state(self, chunks: torch.Tensor) -> CompressorState:
        """Make the initial state: Qᵀ of shape ``(K, rank, n)``; zeros mean a random start."""
        _, width, rank = self._matrix(chunks.shape[1])
        wide = DTYPES[chunks.dtype].accumulate
        return {_Q: zeros((chunks.shape[0], rank, width), wide, chunks.device)}

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        whole, rest = self._matrix_rows(chunks.to(DTYPES[chunks.dtype].accumulate))
        p, q = self._factors(fields, chunks)
        start = _random_start(seed, q)
        if state is not None:
            start = _scaled(state[_Q], start)
        product = torch.cat((start @ whole.mT, start[..., : rest.shape[2]] @ rest.mT), 2)
        p.copy_(torch.linalg.qr(product.mT)[0].mT)
        q.copy_(p[..., : whole.shape[1]] @ whole)
        q[..., : rest.shape[2]].add_(p[..., whole.shape[1] :] @ rest)
        if state is not None:
            state[_Q].copy_(q)

    @override
    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        wide = DTYPES[chunks.dtype].accumulate
        decoded = chunks if chunks.dtype == wide else empty(chunks.shape, wide, chunks.device)
        whole, rest = self._matrix_rows(decoded)
        p, q = self._factors(self.views(encoded, chunks), chunks)
        torch.bmm(p[..., : whole.shape[1]].mT, q, out=whole)
        torch.bmm(p[..., whole.shape[1] :].mT, q[..., : rest.shape[2]], out=rest)
        if decoded is not chunks:
            chunks.copy_(decoded)

    def _matrix(self, numel: int) -> tuple[int, int, int]:
        """Compute height and width of a chunk's matrix, and the rank of its approximation."""
        width = 1 << round(log2(numel) / 2)
        height = -(-numel // width)
        return height, width, min(self.rank, height, width)

    def _matrix_rows(self, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the matrices' complete rows, and of an incomplete last row."""
        rows, numel = chunks.shape
        _, width, _ = self._matrix(numel)
        whole = numel // width
        rest = chunks[:, None, whole * width :]
        if not rest.shape[2]:
            rest = rest.view(rows, 0, 0)
        return chunks[:, : whole * width].view(rows, whole, width), rest

    def _factors(self, fields: Views, chunks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of Pᵀ and Qᵀ in encoded rows; products with transposes are faster."""
        height, width, rank = self._matrix(chunks.shape[1])
        p, q = fields[0][:, : height * rank], fields[0][:, height * rank :]
        return p.view(-1, rank, height), q.view(-1, rank, width)


def _random_start(seed: int, q: torch.Tensor) -> torch.Tensor:
    """Draw a random start for Q from the normal distribution."""
    rows, rank, width = q.shape
    seeds = random_words(seed, rows, q.device).unsqueeze(1)
    return normal(random_words(seeds, width * rank, q.device)).view(q.shape).to(q.dtype)


def _scaled(q: torch.Tensor, otherwise: torch.Tensor) -> torch.Tensor:
    """Scale each Q to a largest magnitude of 1; ``otherwise`` replaces a zero or non-finite Q."""
    scale = q.abs().amax((1, 2), keepdim=True)
    return torch.where((scale > 0) & (scale < inf), q / scale, otherwise)
