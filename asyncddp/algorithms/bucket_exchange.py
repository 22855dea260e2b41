"""Exchanges of single buckets: what is sent of a bucket, and what its method gets back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
from typing_extensions import override

from asyncddp.algorithms.algorithm import Algorithm
from asyncddp.algorithms.averaged_bucket import AveragedBucket, Received, ReceivedAverage
from asyncddp.algorithms.method_traits import CompressionUse
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.engine import Handle
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.neighbor_exchange import ExchangedTensors, exchange_with_neighbors_nonblocking
from asyncddp.tensors.allocation import zeros_like
from asyncddp.tensors.means import split_divisor


class BucketExchange(ABC):
    """Exchange of one bucket in progress (base class)."""

    @abstractmethod
    def poll(self) -> bool:
        """Return True if the exchange is complete."""

    @abstractmethod
    def wait(self) -> Received:
        """Wait for the exchange, and return what it has brought."""


class AverageExchange(BucketExchange):
    """Exchange of a tensor by a verb that averages, such as allreduce.

    A compressor encodes what is the parameters'; the rest, such as flags, travels as it is.
    Without one the average replaces the tensor where that is done ``in_place``.
    """

    def __init__(
        self,
        start: Callable[..., Handle[torch.Tensor]],
        bucket: AveragedBucket,
        sent: torch.Tensor,
        name: str,
        *,
        in_place: bool = False,
    ) -> None:
        self._sent, codec, numel = sent, bucket.compressor, bucket.payload.numel()
        self._whole = codec is None or numel == sent.numel()
        if codec is None:
            out = {"out": sent} if in_place else {}
            self._handles = [start(sent, name=name, **out)]
        elif self._whole:
            self._handles = [start(sent, name=name, compression=codec)]
        else:
            payload, tail = sent[:numel], sent[numel:]
            self._handles = [
                start(payload, name=name, compression=codec, out=payload),
                start(tail, name=f"{name}.tail", out=tail),
            ]

    @override
    def poll(self) -> bool:
        return all([handle.poll() for handle in self._handles])

    @override
    def wait(self) -> Received:
        results = [handle.wait() for handle in self._handles]
        return ReceivedAverage(results[0] if self._whole else self._sent)


class MessageExchange(BucketExchange):
    """Exchange of encoded tensors with the neighbours, each of which the method gets by itself."""

    def __init__(
        self,
        row: WeightRow,
        bucket: AveragedBucket,
        sent: torch.Tensor,
        name: str,
        to_each: Mapping[int, torch.Tensor] | None,
    ) -> None:
        self._row, self._bucket, self._sent = row, bucket, sent
        self._to_each = to_each or {}
        self._handle: Handle[ExchangedTensors] = exchange_with_neighbors_nonblocking(
            sent,
            row,
            bucket.compressor,
            name=name,
            describe=lambda: bucket.describe_not_finite(sent),
            to_each=to_each,
        )

    @override
    def poll(self) -> bool:
        return self._handle.poll()

    @override
    def wait(self) -> Received:
        tensors = self._handle.wait()
        received = ReceivedMessages(self._row, self._bucket.compressor, self._sent, tensors)
        received.sent_to_each = self._to_each
        return received


class ReceivedMessages(Received):
    """Encoded tensors of this rank and its neighbours, decoded into what they are added to."""

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


class StatefulExchange(BucketExchange):
    """Exchange of a bucket together with tensors of its state, which travel as they are."""

    def __init__(
        self,
        start: Callable[..., Handle[torch.Tensor]],
        bucket: AveragedBucket,
        sent: torch.Tensor,
        states: Mapping[str, torch.Tensor],
        name: str,
    ) -> None:
        self._bucket = AverageExchange(start, bucket, sent, name)
        self._states = {key: start(one, name=f"{name}.{key}") for key, one in states.items()}

    @override
    def poll(self) -> bool:
        return all([self._bucket.poll(), *(handle.poll() for handle in self._states.values())])

    @override
    def wait(self) -> Received:
        received = self._bucket.wait()
        received.states = {key: handle.wait() for key, handle in self._states.items()}
        return received


def exchange_of(
    start: Callable[..., Handle[torch.Tensor]],
    method: Algorithm,
    bucket: AveragedBucket,
    sent: torch.Tensor,
    states: Mapping[str, torch.Tensor],
    name: str,
    *,
    in_place: bool,
) -> BucketExchange:
    """Start the exchange of a bucket, whose ``row`` has the weights if there are neighbours."""
    if method.compression is CompressionUse.DIFFERENCES and bucket.row is not None:
        to_each = method.outgoing_to_each(bucket, sent)
        return MessageExchange(bucket.row, bucket, sent, name, to_each)
    if states:
        return StatefulExchange(start, bucket, sent, states, name)
    return AverageExchange(start, bucket, sent, name, in_place=in_place)
