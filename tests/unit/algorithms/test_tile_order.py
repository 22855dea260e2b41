"""Elements tile by tile: where each goes, and what ``sparse_loco`` keeps of each tile."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms.averaged_bucket import AveragedBucket
from asyncddp.algorithms.tile_order import from_tiles, to_tiles
from asyncddp.tensors.buckets import NamedFlatBucket
from tests.support import LoopbackWorld

SHAPES = {"bias": (3,), "wide": (64, 192), "odd": (64, 70), "tall": (128, 64), "cube": (64, 64, 2)}


def bucket_of_shapes(ranks=None):
    """A bucket whose elements are 0, 1, …, one row for each rank if they are stacked."""
    layout = NamedFlatBucket([(name, torch.zeros(shape)) for name, shape in SHAPES.items()])
    size = layout.flat.numel()
    flat = torch.arange(size * (ranks or 1)).view(*([] if ranks is None else [ranks]), size)
    return AveragedBucket(0, flat, layout, torch.optim.SGD([torch.zeros(1)]))


def test_tiles_come_first_and_all_else_in_its_order():
    """Each 4096 elements are a tile, from left to right and from top to bottom."""
    bucket = bucket_of_shapes()
    ordered = to_tiles(bucket, bucket.flat)
    _, wide, _, tall, _ = bucket.views_of(bucket.flat)
    tiles = [*wide.split(64, dim=1), *tall.split(64, dim=0)]
    assert torch.equal(ordered[: 5 * 4096], torch.cat([tile.flatten() for tile in tiles]))
    rest = ordered[5 * 4096 :]
    assert torch.equal(rest, rest.sort().values)
    assert torch.equal(ordered.sort().values, bucket.flat)


@pytest.mark.parametrize("ranks", [None, 3])
def test_there_and_back(ranks):
    """Also of stacked ranks, each of which is ordered by itself."""
    bucket = bucket_of_shapes(ranks)
    ordered = to_tiles(bucket, bucket.flat)
    assert torch.equal(from_tiles(bucket, ordered), bucket.flat)
    if ranks is not None:
        rows = bucket_of_shapes()
        size = bucket.flat.shape[1]
        for rank, row in enumerate(ordered):
            assert torch.equal(row - rank * size, to_tiles(rows, rows.flat))


def changed_by_one_round():
    """A step whose change is known, in two ranks that are alike; what the round leaves of it."""
    model = torch.nn.Linear(128, 64, dtype=torch.float64)
    change = np.random.default_rng(5).standard_normal((64, 128))
    torch.nn.init.zeros_(model.weight)
    plain = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = bf.DistributedOptimizer(plain, model, "sparse_loco", communication_interval=1)
    model.weight.grad = torch.from_numpy(-change)
    optimizer.step()
    return change, model.weight.detach().numpy()


def test_the_largest_of_each_tile_travel():
    """64 of each tile of 64 x 64, as in the paper, not of 4096 in a row."""
    for change, got in LoopbackWorld(2).run(changed_by_one_round):
        for tile, found in zip(np.split(change, 2, axis=1), np.split(got, 2, axis=1), strict=True):
            least = np.sort(np.abs(tile), axis=None)[-64]
            np.testing.assert_array_equal(found != 0.0, np.abs(tile) >= least)
