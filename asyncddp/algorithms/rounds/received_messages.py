"""Encoded tensors that a rank has received in one exchange, decoded on demand."""

from __future__ import annotations

import torch
from typing_extensions import override

from asyncddp.algorithms.averaged_bucket import Received
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.neighbor_exchange import ExchangedTensors
from asyncddp.tensors.allocation import zeros_like
from asyncddp.tensors.means import split_divisor


class ReceivedMessages(Received):
    """Encoded tensors of this rank and its neighbours, decoded when they are summed."""

    def __init__(
        self,
        row: WeightRow,
        codec: TensorCompressor | None,
        sent: torch.Tensor,
        tensors: ExchangedTensors,
    ) -> None:
        self.sources, self._row, self._tensors = row.sources, row, tensors
        self._codec, self._plain = codec, sent

    @property
    @override
    def mixed(self) -> torch.Tensor:
        row, own = self._row, self._tensors.rank
        weights = {own: row.self_weight, **row.src_weights}
        if row.is_silent:
            del weights[own]
        uniform = row.is_uniform or (row.is_silent and len({*weights.values()}) == 1)
        if uniform:  # so that ranks that sum the same tensors get the same bits
            scale, rest = split_divisor(len(weights))
            weights = dict.fromkeys(weights, scale)
        total = zeros_like(self._plain)
        for rank in sorted(weights):
            message = self._tensors.sent if rank == own else self._tensors.received[rank]
            self._add(message, total, weights[rank])
        return total.div_(rest) if uniform else total

    @override
    def add_to(self, target: torch.Tensor, rank: int, weight: float = 1.0) -> None:
        self._add(self._tensors.received[rank], target, weight)

    @override
    def add_own_to(self, target: torch.Tensor, weight: float = 1.0) -> None:
        if not self._row.is_silent:
            self._add(self._tensors.sent, target, weight)

    def _add(self, message: torch.Tensor, target: torch.Tensor, weight: float) -> None:
        if self._codec is None:
            target.add_(message, alpha=weight)
        else:
            rows, dtype = target.view(len(message), -1), self._plain.dtype
            self._codec.decode_add(message, rows, weight, dtype)
