"""Tensor compressors of DDP's buckets, and the rules for resetting their state."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from asyncddp.compression import Compressor
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.tensors.dtypes import DTYPES

Positions: TypeAlias = tuple[int, ...]
"""Parameters that are encoded together, by their places in the module, in that order."""


class BucketCodecs:
    """Compressors of DDP's gradient buckets, looked up by a bucket's parameters.

    The state of a compressor belongs to the parameters of its bucket: after DDP has rebuilt its
    buckets, a bucket with other parameters gets a new compressor. If a result is not finite, all
    compressors are reset before the next step: a GradScaler skips such a step, so that the
    gradients that error feedback counts as sent were never applied.

    After a restart DDP has one bucket in the first backward pass, and the earlier buckets from the
    second on. The compressors loaded from a checkpoint are used in the first pass too, part by
    part.

    Args:
        compressor: Compressor of the buckets' messages.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._codecs: dict[Positions, TensorCompressor] = {}
        self._restored: set[Positions] = set()
        self._overflow: list[torch.Tensor] = []

    def parts_of(self, bucket: Positions) -> list[Positions]:
        """Divide a bucket into parts to compress separately: one, or a checkpoint's buckets."""
        if bucket in self._codecs:
            self._restored.discard(bucket)
            return [bucket]
        within = [part for part in self._codecs if part in self._restored and {*part} <= {*bucket}]
        if sum(map(len, within)) == len(bucket):
            return within
        for part in [part for part in self._codecs if not {*part}.isdisjoint(bucket)]:
            del self._codecs[part]
        return [bucket]

    def of_part(self, rank: int, part: Positions) -> TensorCompressor:
        """Return this rank's compressor for a part of the parameters; create it on first use."""
        if part not in self._codecs:
            seed = zlib.crc32(f"{rank} {part}".encode())
            self._codecs[part] = TensorCompressor(self.compressor, seed)
        return self._codecs[part]

    def look_for_overflow(self, result: torch.Tensor) -> None:
        """Record whether a result is finite, without waiting for the device."""
        total = result.sum(dtype=DTYPES[result.dtype].accumulate)
        self._overflow.append(total.isfinite().logical_not_())

    def forget_after_overflow(self) -> None:
        """Reset all compressors if a result of the last step was not finite."""
        if any(bool(overflow) for overflow in self._overflow):
            for codec in self._codecs.values():
                codec.forget()
        self._overflow.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all compressors, for a checkpoint of this rank."""
        self.forget_after_overflow()
        parts = [(list(part), codec.state_dict()) for part, codec in self._codecs.items()]
        return {"codecs": [{"parameters": part, **state} for part, state in parts]}

    def load_state_dict(self, rank: int, saved: Mapping[str, Any]) -> None:
        """Load the compressors' state that :meth:`state_dict` returned on this rank."""
        self._codecs.clear()
        self._overflow.clear()
        for state in saved["codecs"]:
            self.of_part(rank, tuple(state["parameters"])).load_state_dict(state)
        self.expect_one_bucket()

    def expect_one_bucket(self) -> None:
        """Expect the single bucket of DDP's first pass; keep the compressors for its parts."""
        self._restored = set(self._codecs)


def elements_of(
    bucket: torch.Tensor, held: Positions, sizes: Sequence[int], part: Positions
) -> list[torch.Tensor]:
    """Return views of the elements of some of the parameters in a bucket.

    Args:
        bucket: The bucket's memory.
        held: The parameters in it.
        sizes: Number of elements of each parameter in ``held``.
        part: The parameters to view, in this order.
    """
    views = dict(zip(held, torch.split(bucket, list(sizes)), strict=True))
    return [views[place] for place in part]
