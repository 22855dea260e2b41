"""Benchmark tables of averages with neighbours: blocking ones, lists, and non-blocking ones."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import asyncddp as bf
from asyncddp.topology import Schedule
from benchmarks import baselines, shm_floor
from benchmarks.baselines import CHANGE, FILL, over, rival
from benchmarks.tables import Call, RankGroup, Rival, RivalUnavailableError, Target, TimingTable

OURS, OUT, IN_PLACE = "asyncddp", "asyncddp, out=", "asyncddp in place"
MPI4PY, LIMIT = "mpi4py: Sendrecv + lerp", "limit: local lerp"


def average(own: torch.Tensor, number: int) -> torch.Tensor:
    """Average with the neighbours of the round."""
    return bf.neighbor_allreduce(own, round=number)


def average_into(own: torch.Tensor, out: torch.Tensor, number: int) -> torch.Tensor:
    """Average with the neighbours of the round into another tensor."""
    return bf.neighbor_allreduce(own, round=number, out=out)


def average_in_place(own: torch.Tensor, number: int) -> torch.Tensor:
    """Replace a tensor by its average with the neighbours of the round."""
    return bf.neighbor_allreduce_(own, round=number)


def mixing_table(
    world: RankGroup,
    key: str,
    title: str,
    schedule: Schedule,
    sizes: Sequence[int],
    targets: Sequence[Target] = (),
) -> TimingTable:
    """``neighbor_allreduce`` over a schedule, and those who do the same by hand."""
    rounds = range(schedule.period or 1)
    near = [schedule.neighbors(rank, k) for rank in range(world.size) for k in rounds]
    one_peer = all(len(one.src_weights) == 1 for one in near)
    by_mpi, how = (MPI4PY, "lerp") if one_peer else ("mpi4py: Isend, Irecv + add", "add")
    rivals = [
        rival(world, OURS, average),
        rival(world, OUT, average_into, FILL),
        rival(world, IN_PLACE, average_in_place, CHANGE),
        Rival(by_mpi, partial(baselines.mpi_exchange, world, schedule)),
        Rival(
            f"gloo: batch_isend_irecv + {how}", partial(baselines.gloo_exchange, world, schedule)
        ),
        Rival(f"limit: local {how}", partial(baselines.local_mix, world, schedule)),
    ]
    if one_peer:
        rivals.append(Rival(shm_floor.FLOOR, partial(shm_floor.prepare, world, schedule)))
    shared = over(world, schedule)
    return TimingTable(key, title, sizes, rivals, targets=targets, compare=(OURS, by_mpi), **shared)


def shared_table(
    world: RankGroup, schedule: Schedule, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """``neighbor_allreduce`` of buffers in memory that the machine's ranks share, and the limit."""

    def shared(nbytes: int) -> torch.Tensor:
        """Copy the input into the library's shared memory."""
        transport, own = bf.current().transport, baselines.own(nbytes, world.rank)
        if transport.shared_memory_group is None:
            raise RivalUnavailableError(f"the transport {transport.name} shares no memory")
        return bf.empty_shared(own.shape, dtype=own.dtype).copy_(own)

    return TimingTable(
        "shared",
        "neighbor_allreduce, one peer per call, buffers in the library's shared memory",
        sizes,
        (
            Rival(IN_PLACE, lambda nbytes: partial(average_in_place, shared(nbytes))),
            Rival(OUT, lambda nbytes: partial(average_into, shared(nbytes), shared(nbytes))),
            Rival(LIMIT, partial(baselines.local_mix, world, schedule)),
        ),
        targets=targets,
        compare=(IN_PLACE, LIMIT),
        **over(world, schedule),
    )


# many small tensors

_LAYERS, _WIDTH = 100, 64
_SHAPES = ((_WIDTH, _WIDTH), (_WIDTH,)) * _LAYERS
_COUNTS = [torch.Size(shape).numel() for shape in _SHAPES]
_NBYTES = 4 * sum(_COUNTS)
_MANY = len(_SHAPES)
_NAMES = [f"small{i}" for i in range(_MANY)]
ONE_CALL, MANY_CALLS = "one call on the concatenation", f"{_MANY} non-blocking calls"
ONE_LIST, NEAR_LIST = "one call with a list", "a list in one storage, in place"
ALONE, EACH = "a call alone", f"each of {_MANY} in a row"


def _views(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the small tensors in one storage, one after the other."""
    parts = torch.split(flat, _COUNTS)
    return [part.view(shape) for part, shape in zip(parts, _SHAPES, strict=True)]


def _calls(pieces: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    start, named = bf.neighbor_allreduce_nonblocking, zip(_NAMES, pieces, strict=True)
    handles = [start(piece, name=name, round=number) for name, piece in named]
    return [handle.wait() for handle in handles]


def _one_by_one(pieces: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    average, named = bf.neighbor_allreduce, zip(_NAMES, pieces, strict=True)
    return [average(piece, name=name, round=number) for name, piece in named]


def _concatenated(pieces: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    whole = torch.cat([piece.view(-1) for piece in pieces])
    mixed = torch.split(bf.neighbor_allreduce(whole, round=number), _COUNTS)
    return [part.view_as(piece) for part, piece in zip(mixed, pieces, strict=True)]


def small_table(
    world: RankGroup, schedule: Schedule, targets: Sequence[Target] = ()
) -> TimingTable:
    """The tensors of an MLP of narrow layers, each by itself and all in one."""

    def pieces(body: Any, *, near: bool = False) -> Any:
        def prepare(nbytes: int) -> Call:
            views = _views(baselines.own(nbytes, world.rank).clone())
            return partial(body, views if near else [view.clone() for view in views])

        return prepare

    def listed(pieces: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        return bf.neighbor_allreduce(pieces, name="list", round=number)

    def in_place(pieces: list[torch.Tensor], number: int) -> list[torch.Tensor]:
        return bf.neighbor_allreduce_(pieces, name="near", round=number)

    return TimingTable(
        "small",
        f"neighbor_allreduce of {_MANY} small tensors: {_LAYERS} layers of width {_WIDTH}",
        [_NBYTES],
        (
            Rival(MANY_CALLS, pieces(_calls)),
            rival(world, ONE_CALL, average),
            Rival(ONE_LIST, pieces(listed)),
            Rival(NEAR_LIST, pieces(in_place, near=True)),
            Rival("cat, one call, split", pieces(_concatenated)),
            Rival(f"{_MANY} blocking calls", pieces(_one_by_one)),
        ),
        size_is="in all",
        targets=targets,
        **over(world, schedule),
    )


def caller_table(
    world: RankGroup, schedule: Schedule, sizes: Sequence[int], targets: Sequence[Target] = ()
) -> TimingTable:
    """Seconds until a non-blocking call returns; what it has begun ends off the clock."""
    start = bf.neighbor_allreduce_nonblocking

    def alone(own: torch.Tensor, number: int) -> list[bf.Handle[torch.Tensor]]:
        return [start(own, name="alone", round=number)]

    def each(own: torch.Tensor, number: int) -> list[bf.Handle[torch.Tensor]]:
        return [start(own, name=name, round=number) for name in _NAMES]

    def wait(handles: Sequence[bf.Handle[torch.Tensor]]) -> torch.Tensor:
        return [handle.wait() for handle in handles][-1]

    return TimingTable(
        "caller",
        "neighbor_allreduce_nonblocking, the caller's time until it returns",
        sizes,
        (
            rival(world, ALONE, alone, finish=wait),
            rival(world, EACH, each, finish=wait, parts=_MANY),
        ),
        targets=targets,
        compare=(),
        **over(world, schedule),
    )
