"""Base class of the states of hooks that average gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from typing_extensions import override

from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.engine import Steps
from asyncddp.hooks.bucket_codecs import BucketCodecs
from asyncddp.hooks.hook_state import HookState
from asyncddp.hooks.process_group_exchanges import ProcessGroupExchanges


class GradientState(HookState):
    """State of a hook that puts an average in the place of each bucket's gradients.

    Attributes:
        codecs: The compressors of the buckets; None where gradients travel as they are.
    """

    codecs: BucketCodecs | None

    @abstractmethod
    def _average(self, operation: ProcessGroupExchanges, bucket: GradBucket) -> Steps[torch.Tensor]:
        """Return the steps of a bucket's average."""

    def average(self, hook: str, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket's gradients; the future has them in the bucket's own memory."""
        gradient = bucket.buffer()
        devices: list[int | str | torch.device] | None
        devices = [gradient.device] if gradient.is_cuda else None
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)

        def finish(mean: torch.Tensor) -> None:
            if mean is not gradient:
                gradient.copy_(mean.view_as(gradient))
            if self.codecs is not None:
                self.codecs.look_for_overflow(gradient)
            future.set_result(gradient)

        self._begin(hook, bucket, lambda operation: self._average(operation, bucket), finish)
        if bucket.is_last():
            self._drain()
            self.step += 1
        return future

    def _codec_of(self, codecs: BucketCodecs, rank: int, bucket: GradBucket) -> TensorCompressor:
        layout = tuple(self._positions[id(one)] for one in bucket.parameters())
        return codecs.of_bucket(rank, bucket.index(), layout)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **(self.codecs.state_dict() if self.codecs else {})}

    @override
    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        super().load_state_dict(saved)
        if self.codecs is not None:
            self.codecs.load_state_dict(dist.get_rank(self.group), saved)
