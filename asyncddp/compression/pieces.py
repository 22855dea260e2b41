"""Pieces of chunks that fit in a processor's cache, with all that is computed of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_HOST_PIECE = 1 << 16  # elements
_DEVICE_PIECE = 1 << 24  # elements; bounds the memory that intermediate results take


def pieces(chunks: torch.Tensor, multiple: int = 1) -> Iterator[tuple[slice, slice]]:
    """Divide a matrix into pieces: several whole rows each, or parts of one row.

    Args:
        chunks: Shape ``(K, S)``, with S a multiple of ``multiple``.
        multiple: The elements of each part of a row are a multiple of this.

    Yields:
        Rows and columns of each piece.

    Example:
        >>> chunks = torch.empty(1, 100_000)
        >>> [columns.stop for rows, columns in pieces(chunks, multiple=1000)]
        [65000, 100000]
    """
    rows, numel = chunks.shape
    limit = _HOST_PIECE if chunks.device.type == "cpu" else _DEVICE_PIECE
    width = min(numel, max(1, limit // multiple) * multiple)
    height = max(1, limit // width) if 0 < width == numel else 1
    for row in range(0, rows, height):
        for start in range(0, numel, max(1, width)):
            yield slice(row, min(row + height, rows)), slice(start, min(start + width, numel))
