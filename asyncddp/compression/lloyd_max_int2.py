"""Compressor ``lloyd_max_int2``: each element as the mean of one of four bins of its block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import FieldCompressor, Fields, State, Views
from asyncddp.tensors.allocation import arange, zeros
from asyncddp.tensors.dtypes import DTYPES

_BLOCK = 4096
_LEVELS = 4
_WIDTH = 0.9816  # of a bin, in standard deviations: Lloyd and Max's for the normal distribution


@dataclass(frozen=True)
class LloydMaxInt2(FieldCompressor):
    r"""Compressor that quantises each element to the mean of one of four bins of its block.

    .. math:: c_i = [x_i \ge \mu - t \sigma] + [x_i \ge \mu] + [x_i \ge \mu + t \sigma], \qquad
              \hat x_i = \frac{\sum_{j : c_j = c_i} x_j}{|\{j : c_j = c_i\}|}, \qquad t = 0.9816

    with :math:`\mu` and :math:`\sigma` the mean and the standard deviation of a block of 4096
    consecutive elements. The bins are the best four for normally distributed elements, of whose
    square 11.75 % are lost. A block takes 2 bits an element, and four values.

    Example:
        >>> x = torch.tensor([[-4.0, -2.0, 1.0, 1.0, 0.5, 3.5]])
        >>> q = LloydMaxInt2()
        >>> encoded = torch.empty(1, q.encoded_size(6, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded)
        >>> q.decode(encoded, x)
        >>> [round(one, 3) for one in x[0].tolist()]
        [-4.0, -2.0, 0.833, 0.833, 0.833, 3.5]

    References:
        Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory, 1982.
        Max, "Quantizing for minimum distortion", IRE Transactions on Information Theory, 1960.
    """

    name: ClassVar[str] = "lloyd_max_int2"
    wants_error_feedback = True

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the fields: four values for each block, and 2-bit codes of the elements."""
        values = _LEVELS * -(-numel // _BLOCK), DTYPES[dtype].accumulate
        return values, (-(-numel // 4), torch.uint8)

    def contraction(self, numel: int) -> float:
        """Return 1 / b for blocks of b elements, as of the signs of what differs from the mean."""
        return 1 / min(numel, _BLOCK)

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        (rows, numel), device = chunks.shape, chunks.device
        wide, blocks = DTYPES[chunks.dtype].accumulate, -(-numel // _BLOCK)
        size = min(_BLOCK, -(-numel // 4) * 4)
        padded = zeros((rows, blocks * size), wide, device)
        padded[:, :numel] = chunks
        there = (arange(blocks * size, torch.int64, device) < numel).view(blocks, size)
        x = padded.view(rows, blocks, size)
        largest = x.abs().amax(2, keepdim=True).clamp_(min=torch.finfo(wide).tiny)
        x = x.div_(largest)  # so that no square or sum leaves the range
        codes, (table, packed) = _codes(x, there), fields
        for level in range(_LEVELS):
            member = there & (codes == level)
            mean = torch.where(member, x, 0.0).sum(2) / member.sum(2).clamp_(min=1)
            table[:, level::_LEVELS] = mean.mul_(largest[..., 0])
        quads = codes.view(rows, -1, 4)
        whole = sum(quads[..., place] * 4**place for place in range(4))
        packed.copy_(whole[:, : packed.shape[1]])

    @override
    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        table, packed = self.views(encoded, chunks)
        quads = [packed.bitwise_right_shift(2 * place).bitwise_and(3) for place in range(4)]
        codes = torch.stack(quads, -1).flatten(1)[:, : chunks.shape[1]].to(torch.int64)
        blocks = arange(chunks.shape[1], torch.int64, chunks.device).div_(
            _BLOCK, rounding_mode="floor"
        )
        chunks.copy_(table.gather(1, codes.add_(blocks, alpha=_LEVELS)))


def _codes(x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Return each element's bin, from 0 to 3, as int32; 0 in a block that is not finite."""
    count = there.sum(1, keepdim=True)
    mean = x.sum(2, keepdim=True) / count
    centred = torch.where(there, x - mean, 0.0)
    width = centred.square().sum(2, keepdim=True).div_(count).sqrt_().mul_(_WIDTH)
    codes = zeros(x.shape, torch.int32, x.device)
    for bound in (mean - width, mean, mean + width):
        codes.add_(x >= bound)
    return codes
