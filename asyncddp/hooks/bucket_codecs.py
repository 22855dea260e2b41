"""Compressors of DDP's buckets: what each remembers, and when it must be forgotten."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch

from asyncddp.compression import Compressor
from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.tensors.dtypes import DTYPES


class BucketCodecs:
    """One tensor compressor for each bucket.

    What a compressor remembers belongs to the parameters of its bucket: a bucket that holds others,
    as after DDP has rebuilt them, begins anew. Where a result is not finite, all of them do in the
    next step: whoever looks for overflow, as a GradScaler, skips that step, and what error feedback
    counts as sent was never applied.

    Args:
        compressor: With which the buckets travel.
    """

    def __init__(self, compressor: Compressor) -> None:
        self.compressor = compressor
        self._codecs: dict[int, TensorCompressor] = {}
        self._layouts: dict[int, tuple[int, ...]] = {}
        self._overflow: list[torch.Tensor] = []

    def of_bucket(self, rank: int, index: int, layout: tuple[int, ...]) -> TensorCompressor:
        """Return the compressor of a bucket that holds the parameters at these positions."""
        if index == 0:
            self._forget_after_overflow()
        codec = self._codecs.get(index)
        if codec is None:
            codec = TensorCompressor(self.compressor, zlib.crc32(f"{rank} {index}".encode()))
            self._codecs[index] = codec
        elif self._layouts[index] != layout:
            codec.forget()
        self._layouts[index] = layout
        return codec

    def look_for_overflow(self, result: torch.Tensor) -> None:
        """Note whether a result is finite; the host does not wait for a device."""
        total = result.sum(dtype=DTYPES[result.dtype].accumulate)
        self._overflow.append(total.isfinite().logical_not_())

    def _forget_after_overflow(self) -> None:
        if any(bool(overflow) for overflow in self._overflow):
            for codec in self._codecs.values():
                codec.forget()
        self._overflow.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps depend on."""
        self._forget_after_overflow()
        codecs = {index: codec.state_dict() for index, codec in self._codecs.items()}
        return {"codecs": codecs, "layouts": dict(self._layouts)}

    def load_state_dict(self, rank: int, saved: Mapping[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave on this rank."""
        self._codecs, self._layouts = {}, {}
        self._overflow.clear()
        for index, state in saved["codecs"].items():
            layout = tuple(saved["layouts"][index])
            self.of_bucket(rank, index, layout).load_state_dict(state)
