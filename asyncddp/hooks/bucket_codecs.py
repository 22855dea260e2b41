"""Compressors of DDP's buckets: what each remembers, and when it must be forgotten."""

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
    """One tensor compressor for each bucket, known by the parameters that it holds.

    What a compressor remembers belongs to the parameters of its bucket: a bucket that holds others,
    as after DDP has rebuilt them, begins anew. Where a result is not finite, all of them do in the
    next step: whoever looks for overflow, as a GradScaler, skips that step, and what error feedback
    counts as sent was never applied.

    After a restart DDP has one bucket in the first backward pass, and those of before from the
    second on. What a checkpoint tells of them is used in that first one as well, part by part.

    Args:
        compressor: With which the buckets travel.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._codecs: dict[Positions, TensorCompressor] = {}
        self._restored: set[Positions] = set()
        self._overflow: list[torch.Tensor] = []

    def parts_of(self, bucket: Positions) -> list[Positions]:
        """Divide a bucket into what is encoded together: all of it, or buckets of a checkpoint."""
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
        """Return the compressor of some parameters on this rank."""
        if part not in self._codecs:
            seed = zlib.crc32(f"{rank} {part}".encode())
            self._codecs[part] = TensorCompressor(self.compressor, seed)
        return self._codecs[part]

    def look_for_overflow(self, result: torch.Tensor) -> None:
        """Note whether a result is finite; the host does not wait for a device."""
        total = result.sum(dtype=DTYPES[result.dtype].accumulate)
        self._overflow.append(total.isfinite().logical_not_())

    def forget_after_overflow(self) -> None:
        """Begin a step: forget everything if a result of the last one was not finite."""
        if any(bool(overflow) for overflow in self._overflow):
            for codec in self._codecs.values():
                codec.forget()
        self._overflow.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on."""
        self.forget_after_overflow()
        parts = [(list(part), codec.state_dict()) for part, codec in self._codecs.items()]
        return {"codecs": [{"parameters": part, **state} for part, state in parts]}

    def load_state_dict(self, rank: int, saved: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave on this rank."""
        self._codecs.clear()
        self._overflow.clear()
        for state in saved["codecs"]:
            self.of_part(rank, tuple(state["parameters"])).load_state_dict(state)
        self.expect_one_bucket()

    def expect_one_bucket(self) -> None:
        """Note that DDP begins anew with its buckets."""
        self._restored = set(self._codecs)


def elements_of(
    bucket: torch.Tensor, held: Positions, sizes: Sequence[int], part: Positions
) -> list[torch.Tensor]:
    """View the elements of some parameters in a bucket that holds them among others.

    Args:
        bucket: The bucket's memory.
        held: The parameters in it.
        sizes: How many elements each of those has.
        part: The parameters to view, in this order.
    """
    views = dict(zip(held, torch.split(bucket, list(sizes)), strict=True))
    return [views[place] for place in part]
