"""Base class of the state objects of hooks that average gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from typing_extensions import override

from asyncddp.algorithms.compression_rules import warn_of_cost
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.engine import Steps
from asyncddp.hooks.bucket_codecs import BucketCodecs, Positions, elements_of
from asyncddp.hooks.hook_state import HookState
from asyncddp.hooks.process_group_exchanges import ProcessGroupExchanges


class GradientHookState(HookState):
    """Base class of state objects of hooks that replace each bucket's gradients by an average.

    Attributes:
        codecs: The compressors of the buckets; None if gradients are sent uncompressed.
    """

    codecs: BucketCodecs | None

    def __init__(self, module: torch.nn.Module, prepare: Callable[[], None]) -> None:
        super().__init__(module, prepare)
        if self.codecs is not None and dist.get_rank(self.group) == 0:
            warn_of_cost(type(self).__name__, self.codecs.compressor, None)

    @abstractmethod
    def _average(
        self,
        operation: ProcessGroupExchanges,
        gradients: torch.Tensor,
        codec: TensorCompressor | None,
    ) -> Steps[torch.Tensor]:
        """Return the operation steps that average flat gradients."""

    def average(self, hook: str, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start averaging a bucket's gradients; the future's value is the bucket's own memory."""
        gradients = bucket.buffer()
        devices: list[int | str | torch.device] | None
        devices = [gradients.device] if gradients.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        positions = self._positions_in(bucket)
        if self.codecs is not None and bucket.index() == 0:
            self.codecs.forget_after_overflow()

        def finish(mean: torch.Tensor) -> None:
            if mean is not gradients:
                gradients.copy_(mean.view_as(gradients))
            if self.codecs is not None:
                self.codecs.look_for_overflow(gradients)
            future.set_result(gradients)

        def steps(operation: ProcessGroupExchanges) -> Steps[torch.Tensor]:
            if self.codecs is None:
                return self._average(operation, gradients, None)
            return self._average_parts(operation, self.codecs, bucket, positions)

        self._begin(hook, bucket, steps, finish)
        if bucket.is_last():
            self._drain()
            self.step += 1
        return future

    def _positions_in(self, bucket: GradBucket) -> Positions:
        return tuple(self._positions[id(one)] for one in bucket.parameters())

    def _average_parts(
        self,
        operation: ProcessGroupExchanges,
        codecs: BucketCodecs,
        bucket: GradBucket,
        held: Positions,
    ) -> Steps[torch.Tensor]:
        """Average a bucket part by part, one compressor per part; usually there is one part."""
        gradients, rank = bucket.buffer(), operation.rank
        parts = codecs.parts_of(held)
        if parts == [held]:
            codec = codecs.of_part(rank, held)
            return (yield from self._average(operation, gradients, codec))
        sizes = [one.numel() for one in bucket.parameters()]
        for part in parts:
            views = elements_of(gradients, held, sizes, part)
            codec = codecs.of_part(rank, part)
            mean = yield from self._average(operation, torch.cat(views), codec)
            means = torch.split(mean, [view.numel() for view in views])
            for view, one in zip(views, means, strict=True):
                view.copy_(one)
        return gradients

    @override
    def _bind(self, module: torch.nn.Module, prepare: Callable[[], None]) -> None:
        super()._bind(module, prepare)
        if self.codecs is not None:
            self.codecs.expect_one_bucket()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **(self.codecs.state_dict() if self.codecs else {})}

    @override
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        if self.codecs is not None:
            self.codecs.load_state_dict(dist.get_rank(self.group), saved)
