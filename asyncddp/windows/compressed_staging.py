"""Staging of windows whose published tensors are encoded by a compressor."""

from __future__ import annotations

import torch
from typing_extensions import override

from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import dense
from asyncddp.windows.staging import (
    BufferPool,
    PublishCallback,
    SentMessages,
    SynchronousTensorStaging,
)


class CompressedStaging(SynchronousTensorStaging):
    """Copies that encode a window's tensor on the way into the buffers which neighbours read."""

    def __init__(self, pool: BufferPool, codec: TensorCompressor) -> None:
        super().__init__(pool)
        self._codec = codec

    @override
    def _publish_copy(self, values: torch.Tensor, publish_buffer: PublishCallback) -> SentMessages:
        buffer = self._pool.acquire_buffer()
        try:
            self._codec.encode(dense(values).view(1, -1), buffer.tensor)
            return publish_buffer(buffer)
        finally:
            buffer.drop()


class StoredForm:
    """Form in which a window stores what its ranks publish: as it is, or encoded.

    Attributes:
        codec: The compressor; None for as it is.
        shape, dtype: Of the published tensors.
    """

    def __init__(self, tensor: torch.Tensor, codec: TensorCompressor | None) -> None:
        self.codec, self._values = codec, (tuple(tensor.shape), tensor.dtype)
        self.shape, self.dtype = self._values
        if codec is not None:
            size = codec.compressor.encoded_size(tensor.numel(), tensor.dtype)
            self.shape, self.dtype = (1, size), torch.uint8

    def read(self, published: torch.Tensor) -> torch.Tensor:
        """Return the values of a published tensor, in new memory where they have to be decoded."""
        if self.codec is None:
            return published
        shape, dtype = self._values
        decoded = empty(shape, dtype)
        self.codec.decode(published, decoded.view(1, -1))
        return decoded
