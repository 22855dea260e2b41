"""Benchmark tables of non-blocking calls: many small tensors, and the time such a call takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

import asyncddp as bf
from asyncddp.topology import Schedule
from benchmarks import baselines
from benchmarks.tables import Call, RankGroup, Rival, Target, TimingTable

__all__ = [
    "ALONE",
    "EACH",
    "MANY_CALLS",
    "NEAR_LIST",
    "ONE_CALL",
    "ONE_LIST",
    "caller_table",
    "small_table",
]

_LAYERS, _WIDTH = 100, 64
_SHAPES = ((_WIDTH, _WIDTH), (_WIDTH,)) * _LAYERS
_NBYTES = 4 * _LAYERS * (_WIDTH * _WIDTH + _WIDTH)
_MANY = len(_SHAPES)
ONE_CALL, MANY_CALLS = "one call on the concatenation", f"{_MANY} non-blocking calls"
ONE_LIST, NEAR_LIST = "one call with a list", "a list in one storage, in place"
ALONE, EACH = "a call alone", f"each of {_MANY} in a row"


def _pieces(world: RankGroup) -> list[torch.Tensor]:
    """This rank's small tensors; one after the other they are its tensor of that size."""
    flat, place, pieces = baselines.own(_NBYTES, world.rank), 0, []
    for shape in _SHAPES:
        count = torch.Size(shape).numel()
        pieces.append(flat[place : place + count].reshape(shape).clone())
        place += count
    return pieces


def small_table(
    world: RankGroup, schedule: Schedule, targets: Sequence[Target] = ()
) -> TimingTable:
    """The tensors of an MLP of narrow layers, each by itself and all in one."""

    def calls(nbytes: int) -> Call:
        pieces = [(f"small{i}", piece) for i, piece in enumerate(_pieces(world))]

        def call(number: int) -> list[torch.Tensor]:
            start = bf.neighbor_allreduce_nonblocking
            handles = [start(piece, name=name, round=number) for name, piece in pieces]
            return [handle.wait() for handle in handles]

        return call

    def flat(nbytes: int) -> Call:
        whole = baselines.own(nbytes, world.rank)
        return lambda number: bf.neighbor_allreduce(whole, round=number)

    def listed(nbytes: int) -> Call:
        pieces = _pieces(world)
        return lambda number: bf.neighbor_allreduce(pieces, name="list", round=number)

    def listed_in_place(nbytes: int) -> Call:
        sizes = [torch.Size(shape).numel() for shape in _SHAPES]
        parts = torch.split(baselines.own(nbytes, world.rank).clone(), sizes)
        pieces = [part.view(shape) for part, shape in zip(parts, _SHAPES, strict=True)]
        return lambda number: bf.neighbor_allreduce_(pieces, name="near", round=number)

    def cat(nbytes: int) -> Call:
        pieces = _pieces(world)
        sizes = [piece.numel() for piece in pieces]

        def call(number: int) -> list[torch.Tensor]:
            whole = torch.cat([piece.view(-1) for piece in pieces])
            mixed = torch.split(bf.neighbor_allreduce(whole, round=number), sizes)
            return [part.view_as(piece) for part, piece in zip(mixed, pieces, strict=True)]

        return call

    def one_by_one(nbytes: int) -> Call:
        pieces = [(f"one{i}", piece) for i, piece in enumerate(_pieces(world))]
        return lambda number: [
            bf.neighbor_allreduce(piece, name=name, round=number) for name, piece in pieces
        ]

    return TimingTable(
        "small",
        f"neighbor_allreduce of {_MANY} small tensors: {_LAYERS} layers of width {_WIDTH}",
        [_NBYTES],
        (
            Rival(MANY_CALLS, calls),
            Rival(ONE_CALL, flat),
            Rival(ONE_LIST, listed),
            Rival(NEAR_LIST, listed_in_place),
            Rival("cat, one call, split", cat),
            Rival(f"{_MANY} blocking calls", one_by_one),
        ),
        size_is="in all",
        expected=partial(baselines.average, schedule, world.rank),
        begin=lambda: bf.set_topology(schedule),
        targets=targets,
    )


def caller_table(
    world: RankGroup, schedule: Schedule, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """Seconds until a non-blocking call returns; what it has begun ends off the clock."""

    def alone(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        start = bf.neighbor_allreduce_nonblocking
        return lambda number: [start(own, name="alone", round=number)]

    def each(nbytes: int) -> Call:
        own = baselines.own(nbytes, world.rank)
        names = [f"each{i}" for i in range(_MANY)]
        start = bf.neighbor_allreduce_nonblocking
        return lambda number: [start(own, name=name, round=number) for name in names]

    def wait(handles: Sequence[bf.Handle[torch.Tensor]]) -> torch.Tensor:
        return [handle.wait() for handle in handles][-1]

    return TimingTable(
        "caller",
        "neighbor_allreduce_nonblocking, the caller's time until it returns",
        sizes,
        (Rival(ALONE, alone, finish=wait), Rival(EACH, each, finish=wait, parts=_MANY)),
        expected=partial(baselines.average, schedule, world.rank),
        begin=lambda: bf.set_topology(schedule),
        targets=targets,
        compare=(),
    )
