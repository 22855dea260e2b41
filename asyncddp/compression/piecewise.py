"""Base class of compressors that decode chunks in pieces which fit in a processor's cache."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

import torch
from typing_extensions import override

from asyncddp.compression.compressor import FieldCompressor, Views
from asyncddp.tensors.allocation import empty

Pieces: TypeAlias = Iterator[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of a view of a part of the chunks, and the decoded values of this part."""

_HOST_PIECE = 1 << 18  # elements
_DEVICE_PIECE = 1 << 24  # elements; bounds the memory that intermediate results take


class PiecewiseCompressor(FieldCompressor):
    """Base class of compressors that decode in pieces: ``decode_add`` is one pass over memory."""

    @abstractmethod
    def decoded_pieces(self, fields: Views, chunks: torch.Tensor) -> Pieces:
        """Decode in pieces, and yield each with the part of ``chunks`` that it belongs to.

        Args:
            fields: The fields of encoded rows.
            chunks: As for :meth:`~asyncddp.compression.Compressor.decode`; its values are not
                read.

        Yields:
            A view of a part of ``chunks``, and its decoded values, in any dtype that holds them;
            the next piece may overwrite these values.
        """

    @override
    def decode(self, encoded: torch.Tensor, chunks: torch.Tensor) -> None:
        for part, decoded in self.decoded_pieces(self.views(encoded, chunks), chunks):
            part.copy_(decoded)

    @override
    def decode_add(self, encoded: torch.Tensor, chunks: torch.Tensor, weight: float = 1.0) -> None:
        for part, decoded in self.decoded_pieces(self.views(encoded, chunks), chunks):
            part.add_(decoded.to(part.dtype), alpha=weight)


class Scratch:
    """Scratch memory for the intermediate results of a piece, reused for the next piece.

    Without it the C library would return the memory after each piece to the system, whose fresh
    pages cost more than the arithmetic does.

    Example:
        >>> scratch = Scratch(torch.device("cpu"))
        >>> one = scratch("sum", (2, 4), torch.float32)
        >>> scratch("sum", (2, 2), torch.int32).data_ptr() == one.data_ptr()
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised contiguous tensor, in the same memory for the same name."""
        size = prod(shape) * dtype.itemsize
        memory = self._memory.get(name)
        if memory is None or memory.numel() < size:
            memory = self._memory[name] = empty((size,), torch.uint8, self._device)
        return memory[:size].view(dtype).view(tuple(shape))


def pieces(chunks: torch.Tensor, multiple: int = 1) -> Iterator[tuple[slice, slice]]:
    """Divide a matrix into pieces: each consists of whole rows, or of a part of one row.

    Args:
        chunks: Shape ``(K, S)``, with S a multiple of ``multiple``.
        multiple: The elements of each part of a row are a multiple of this, but for the last part.

    Yields:
        Rows and columns of each piece.

    Example:
        >>> chunks = torch.empty(1, 500_000)
        >>> [columns.stop for rows, columns in pieces(chunks, multiple=1000)]
        [262000, 500000]
    """
    rows, numel = chunks.shape
    limit = _HOST_PIECE if chunks.device.type == "cpu" else _DEVICE_PIECE
    width = min(numel, max(1, limit // multiple) * multiple)
    height = max(1, limit // width) if 0 < width == numel else 1
    for row in range(0, rows, height):
        for start in range(0, numel, max(1, width)):
            yield slice(row, min(row + height, rows)), slice(start, min(start + width, numel))
