"""Reordering of a bucket's elements so that tiles of its matrices become a compressor's blocks."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.tensors.allocation import empty_like

_SIDE = 64


def to_tiles(bucket: AveragedBucket, flat: torch.Tensor) -> torch.Tensor:
    """Reorder a tensor of the bucket's layout: elements of matrices tile by tile.

    Matrices whose sides are multiples of 64 come first, so that each 4096 elements there are a tile
    of 64 × 64; all other elements follow in their order.
    """
    ordered = empty_like(flat)
    for element, place in _pieces(bucket, flat, ordered):
        place.copy_(element)
    return ordered


def from_tiles(bucket: AveragedBucket, ordered: torch.Tensor) -> torch.Tensor:
    """Undo :func:`to_tiles`: return a tensor in the bucket's layout."""
    flat = empty_like(ordered)
    for element, place in _pieces(bucket, flat, ordered):
        element.copy_(place)
    return flat


def _pieces(
    bucket: AveragedBucket, flat: torch.Tensor, ordered: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of corresponding views in ``flat`` and ``ordered``, of equal shapes."""
    outer, end = flat.shape[:-1], flat.shape[-1]
    matrices = [view for view in bucket.views_of(flat) if _has_tiles(view, len(outer))]
    at = before = 0
    others = []
    for matrix in sorted(matrices, key=torch.Tensor.storage_offset):
        rows, columns = (side // _SIDE for side in matrix.shape[-2:])
        tiles = matrix.view(*outer, rows, _SIDE, columns, _SIDE).transpose(-3, -2)
        numel = rows * columns * _SIDE * _SIDE
        start = int(matrix.storage_offset() - flat.storage_offset())
        yield tiles, ordered[..., at : at + numel].view(tiles.shape)
        others.append((before, start))
        at, before = at + numel, start + numel
    for start, stop in [*others, (before, end)]:
        yield flat[..., start:stop], ordered[..., at : at + stop - start]
        at += stop - start


def _has_tiles(view: torch.Tensor, outer: int) -> bool:
    """Return whether a parameter is a matrix of whole tiles, after ``outer`` dimensions."""
    return view.dim() == outer + 2 and not any(side % _SIDE for side in view.shape[-2:])
