"""``pair_gossip``: two ranks average, and nobody else takes part."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from tests.support import OF_SEVERAL, on
from tests.support.loops import each, on_each_rank
from tests.support.oracle import AVERAGING, SHAPES, check, held, mixed, options

SEVERAL = on(*OF_SEVERAL)


def partner():
    return bf.rank() ^ 1


@SEVERAL
@on_each_rank
@each("dtype", AVERAGING)
def test_every_dtype_and_shape(dtype):
    """The result is the mean, or the sum with the weights given, in the input's dtype."""
    for seed, shape in enumerate(SHAPES):

        def of(rank, shape=shape, seed=seed):
            return held(rank, shape, dtype, seed)

        x = of(bf.rank())
        got = bf.pair_gossip(x, partner(), **options(dtype))
        check(got, x, mixed(bf.rank(), 0.5, {partner(): 0.5}, of))
        got = bf.pair_gossip(x, partner(), self_weight=0.25, pair_weight=0.75, **options(dtype))
        check(got, x, mixed(bf.rank(), 0.25, {partner(): 0.75}, of))


def asymmetric():
    """Each side has weights of its own."""
    own, other = (0.25, 0.5) if bf.rank() % 2 else (1.0, -1.0)
    x = torch.tensor([bf.rank() + 1.0])
    return bf.pair_gossip(x, partner(), own, other).item()


@SEVERAL
def test_both_sides_choose_their_weights(world):
    """Each side's result has the weights that it gave itself, whatever the other side gave."""
    told = world.run(asymmetric)
    pairs = range(0, world.size, 2)
    assert told == [v for r in pairs for v in (-1.0, 0.25 * (r + 2) + 0.5 * (r + 1))]


def some_gossip_more():
    """The others compute meanwhile; pairs are counted apart."""
    if bf.rank() < 2:
        for _ in range(5):
            bf.pair_gossip(torch.ones(3), partner())
    x = torch.tensor([float(bf.rank())])
    for peer in (bf.rank() ^ 1, bf.rank() ^ 2):
        x = bf.pair_gossip(x, peer)
    return x.item()


@on("loopback-4", "mpi-4")
def test_pairs_need_not_gossip_equally_often(world):
    """Two gossips along the edges of a square reach the average."""
    assert world.run(some_gossip_more) == [1.5] * 4


def sits_rounds_out():
    """In each round another pair of three sits out; all use one name, from the third on rings."""
    pairs = [(0, 1), (1, 2), (0, 2)]
    x = torch.tensor([float(4 ** bf.rank())])
    for step in range(12):
        pair = pairs[step % 3]
        if bf.rank() in pair:
            x = bf.pair_gossip(x, sum(pair) - bf.rank(), name="model")
    return x.item()


@on("loopback-4", "mpi-4", "shared_memory-4")
def test_a_rank_may_sit_rounds_out_under_a_name(world):
    """Uses of a name are counted for each pair by itself."""
    expected = [1.0, 4.0, 16.0, 64.0]
    for a, b in [(0, 1), (1, 2), (0, 2)] * 4:
        expected[a] = expected[b] = (expected[a] + expected[b]) / 2
    assert world.run(sits_rounds_out) == expected


@SEVERAL
@on_each_rank
def test_several_in_flight_in_place():
    """In-place gossips under several names may be waited for in any order."""
    x = [torch.full((2,), float(bf.rank() + k)) for k in range(4)]
    handles = [
        bf.pair_gossip_nonblocking_(tensor, partner(), name=f"g{k}") for k, tensor in enumerate(x)
    ]
    order = handles if bf.rank() % 2 else handles[::-1]
    for handle in order:
        handle.wait()
    mean = (bf.rank() + partner()) / 2
    assert [tensor.tolist() for tensor in x] == [[mean + k] * 2 for k in range(4)]


def wrong_arguments():
    told = []
    for arguments in ((bf.rank(),), (7,), (partner(), 0.5), (partner(), 0.5, float("nan"))):
        with pytest.raises(bf.ArgumentError) as caught:
            bf.pair_gossip(torch.ones(1), *arguments)
        told.append(str(caught.value))
    return told


@on("loopback-2")
def test_wrong_arguments_are_told(world):
    """A target that is no other rank, and weights incomplete or not finite, are refused."""
    assert world.run(wrong_arguments)[1] == [
        "pair_gossip: argument target_rank: expected a rank in 0..1 other than 1, this rank "
        "itself, got 1",
        "pair_gossip: argument target_rank: expected a rank in 0..1 other than 1, this rank "
        "itself, got 7",
        "pair_gossip: arguments self_weight, pair_weight: expected both or neither",
        "pair_gossip: argument pair_weight: expected a finite number, got nan",
    ]
