"""Error feedback: adds the compression error of earlier tensors to the next one before encoding."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import Compressor, CompressorState
from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import empty, zeros
from asyncddp.tensors.dtypes import DTYPES

RESIDUAL = "error_feedback.residual"
"""Key of the residual in the state: shape ``(K, S)``, float32, or float64 for that dtype."""


@dataclass(frozen=True)
class ErrorFeedback(Compressor):
    r"""Error feedback around a compressor: each error is added to the next tensor before encoding.

    .. math:: v = x + e, \qquad \text{send } Q(v), \qquad e \leftarrow v - Q(v)

    with Q the inner compressor and e the residual. So no part of an input is lost: the sum of all
    inputs equals the sum of all decoded tensors plus the residual. A chunk with a non-finite
    element is compressed as it is, and leaves its residual unchanged. Without a state, Q
    is applied alone.

    Args:
        inner: The compressor.

    Attributes:
        unbiased: False, since each message corrects the error of earlier ones.

    Example:
        >>> from asyncddp.compression.sign import Sign
        >>> x = torch.tensor([[1.0, 2.0]])
        >>> q = ErrorFeedback(Sign())
        >>> state = q.new_state(x)
        >>> encoded = torch.empty(1, q.encoded_size(2, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded, state=state)
        >>> state["error_feedback.residual"]
        tensor([[-0.5000,  0.5000]])

    References:
        Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
        distributed training of speech DNNs", Interspeech 2014.
        Karimireddy et al., "Error feedback fixes SignSGD and other gradient compression schemes",
        ICML 2019.
    """

    inner: Compressor

    name: ClassVar[str] = "error_feedback"
    needs_state: ClassVar[bool] = True

    def __post_init__(self) -> None:
        inner: object = self.inner
        if not isinstance(inner, Compressor) or isinstance(inner, ErrorFeedback):
            raise ArgumentError(
                "error_feedback: argument inner: expected a compressor without error feedback, "
                f"such as asyncddp.compression.COMPRESSORS['sign'](), got {inner!r}"
            )

    @override
    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        return self.inner.encoded_size(numel, dtype)

    @override
    def contraction(self, numel: int) -> float | None:
        return self.inner.contraction(numel)

    def new_state(self, chunks: torch.Tensor) -> CompressorState:
        """Make the initial state: that of the inner compressor, and a residual of zero."""
        wide = DTYPES[chunks.dtype].accumulate
        residual = zeros(chunks.shape, wide, chunks.device)
        return {**self.inner.new_state(chunks), RESIDUAL: residual}

    @override
    def encode(
        self,
        chunks: torch.Tensor,
        encoded: torch.Tensor,
        *,
        seed: int = 0,
        state: CompressorState | None = None,
    ) -> None:
        if state is None:
            self.inner.encode(chunks, encoded, seed=seed)
            return
        residual = state[RESIDUAL]
        total = empty(chunks.shape, residual.dtype, chunks.device)
        torch.add(residual, chunks, out=total)
        if total.dtype == chunks.dtype:
            self.inner.encode(total, encoded, seed=seed, state=state)
            self.inner.decode_add(encoded, total, -1.0)
        else:
            sent = empty(chunks.shape, chunks.dtype, chunks.device).copy_(total)
            self.inner.encode(sent, encoded, seed=seed, state=state)
            self.inner.decode(encoded, sent)
            total.sub_(sent)
        finite = (total.amin(1, keepdim=True) > -inf) & (total.amax(1, keepdim=True) < inf)
        if finite.device.type == "cpu" and finite.all():  # elsewhere the host would have to wait
            residual.copy_(total)
        else:
            torch.where(finite, total, residual, out=residual)

    @override
    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        self.inner.decode(encoded, chunks)

    @override
    def decode_add(self, encoded: torch.Tensor, chunks: torch.Tensor, weight: float = 1.0) -> None:
        self.inner.decode_add(encoded, chunks, weight)
