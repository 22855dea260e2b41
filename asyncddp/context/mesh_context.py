"""Contexts of sharded replicas: one of all ranks with the same shard, one of a replica's ranks.

A model may be sharded inside a replica, over the other dimensions of torch's ``DeviceMesh``. Ranks
that hold the same part of it, one of each replica, are a column: they are the world in which the
part is averaged. The ranks of one replica are its inner mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from asyncddp.context.context import Context, current, use
from asyncddp.context.crash_handler import end_run
from asyncddp.context.group_context import split_disjoint
from asyncddp.engine.replica_agreement import ReplicaAgreement
from asyncddp.errors import ArgumentError, PeerLeftError
from asyncddp.rank_list_text import list_ranks
from asyncddp.tensors.allocation import make_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_COLUMNS, _INNER, _WORLD = "columns of meshes", "inner mesh", "world of a column"
_RANKS = "ranks of a replica"
_EXAMPLE = "such as mesh['replica'] of init_device_mesh(..., mesh_dim_names=('replica', 'shard'))"


@contextmanager
def replicas(mesh: DeviceMesh) -> Iterator[Context]:
    """Make the replicas of a sharded model the world, in a ``with`` block.

    Inside, ``rank()`` and ``size()`` count replicas. Topologies, verbs, windows and wrappers
    connect this rank with those that hold the same part of the model in the other replicas; they
    never match those of other parts. Collective over all ranks at the first use of a mesh.

    In an elastic run a replica takes part while all of its ranks do. The loss of one ends the
    others of its replica with ``PeerLeftError``, and the replicas that are left go on.

    Args:
        mesh: One dimension of the mesh of all ranks, along which the model is not sharded, such as
            ``mesh["replica"]``.

    Returns:
        A context manager that gives the context.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: The mesh has several dimensions, or other ranks than this world. Or the run
            is elastic, and has lost a rank before the mesh was used, or replaces ranks.

    Example:
        >>> import asyncddp as bf, torch
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> def places():  # on 4 ranks
        ...     mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        ...     with bf.replicas(mesh["replica"]):
        ...         return bf.rank(), bf.size(), bf.neighbor_allreduce(torch.ones(3))
    """
    context = replica_context(mesh)
    with use(context):
        yield context


def replica_context(mesh: DeviceMesh | None) -> Context:
    """Return the context of this rank's column of a mesh; the current one for None.

    Collective over all ranks at the first use of a mesh.
    """
    context = current()
    if mesh is None:
        return context
    world = context.extensions.get(_WORLD, context)
    ranks = _ranks_of(mesh)
    known = world.extensions.setdefault(_COLUMNS, {})
    key = mesh.mesh_dim_names, ranks
    if key not in known:
        known[key] = _split(world, ranks)
    column: Context = known[key]
    return column


def inner_context(context: Context) -> Context | None:
    """Return the context of this rank's replica; None unless ``context`` is that of a column."""
    found: Context | None = context.extensions.get(_INNER)
    return found


def ranks_of_replica(context: Context) -> frozenset[int]:
    """Return the ranks of this rank's replica as torch.distributed numbers them."""
    found: frozenset[int] = context.extensions.get(_RANKS, frozenset())
    return found


def world_of(context: Context) -> Context:
    """Return the context of all ranks, for that of a column or any other."""
    found: Context = context.extensions.get(_WORLD, context)
    return found


def _ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a one-dimensional mesh, as torch.distributed numbers them."""
    shape = getattr(getattr(mesh, "mesh", None), "shape", None)
    if shape is None or len(shape) != 1:
        got = type(mesh).__name__ if shape is None else f"a mesh of shape {tuple(shape)}"
        raise ArgumentError(
            f"argument mesh: expected one dimension of a DeviceMesh, {_EXAMPLE}, got {got}"
        )
    return tuple(mesh.mesh.tolist())


def _split(world: Context, ranks: tuple[int, ...]) -> Context:
    """Split the world into columns, and into replicas across them; collective."""
    _check_elastic(world)
    columns, numbers = _columns(world, ranks)
    across = sorted({tuple(sorted(replica)) for replica in zip(*columns, strict=True)})
    agreement = _agreement_of_replicas(world, columns)
    column, inner = split_disjoint(world, columns, agreement), split_disjoint(world, across)
    (own,) = (replica for replica in across if world.rank in replica)
    if agreement is not None:
        world.engine.on_failure.append(_ends_replica(column.rank, own))
    known = frozenset(numbers[rank] for rank in own)
    column.extensions.update({_INNER: inner, _WORLD: world, _RANKS: known})
    return column


def _check_elastic(world: Context) -> None:
    """Raise an error if the columns of an elastic run cannot be made: all ranks raise it."""
    lost = sorted(set(range(world.size)).difference(world.members))
    if lost:
        raise ArgumentError(
            f"argument mesh: the run goes on without {list_ranks(lost)}, and columns are made of "
            "all ranks; use the mesh for the first time before training begins"
        )
    marker = Path(world.config.report_dir or "", "elastic")  # of asyncddp run
    if world.config.elastic and marker.is_file() and int(marker.read_text()):
        raise ArgumentError(
            "argument mesh: a replica that is sharded cannot be replaced, since process groups of "
            "torch.distributed admit no other process; start the run without --restarts, and the "
            "other replicas go on where one is lost"
        )


def _agreement_of_replicas(
    world: Context, columns: Sequence[Sequence[int]]
) -> ReplicaAgreement | None:
    """Make the agreement on replicas of an elastic run, which follows that on ranks."""
    membership, known = world.engine.membership, len(world.extensions[_COLUMNS])
    if membership is None:
        return None
    number, column = next(
        (number, column) for number, column in enumerate(columns) if world.rank in column
    )
    names = f"mesh {known}: ", f"mesh {known}, column {number}: "
    replicas = list(zip(*columns, strict=True))
    with world.engine.lock:
        made = ReplicaAgreement(membership, replicas, column.index(world.rank), names)
        world.engine.replica_agreements.append(made)
    return made


def _ends_replica(replica: int, ranks: Collection[int]) -> Callable[[int, str], None]:
    """Make the function that ends this process where another rank of its replica has failed."""

    def end(rank: int, reason: str) -> None:
        if rank in ranks:
            error = PeerLeftError(
                f"replica {replica} ends, since its rank {rank} is lost ({reason})"
            )
            error.origin = rank
            end_run(error, is_cause=True)

    return end


def _columns(world: Context, ranks: tuple[int, ...]) -> tuple[list[tuple[int, ...]], list[int]]:
    """Gather the columns of all ranks, and torch's number of each; one verdict for all."""
    with world.engine.lock:
        facts = make_tensor([torch.distributed.get_rank(), len(ranks)], torch.int64)
        every = world.transport.allgather(facts, [2] * world.size, world.config.timeout)
        numbers, sizes = every.view(-1, 2).T.tolist()
        own = make_tensor(ranks, torch.int64)
        gathered = torch.split(world.transport.allgather(own, sizes, world.config.timeout), sizes)
    here = {number: rank for rank, number in enumerate(numbers)}
    columns = {tuple(here.get(number, -1) for number in one.tolist()) for one in gathered}
    placed = sorted(rank for column in columns for rank in column)
    if len(set(sizes)) != 1 or placed != list(range(world.size)):
        raise ArgumentError(
            f"argument mesh: expected a dimension of a mesh of all {world.size} ranks, the same on "
            f"each of them, {_EXAMPLE}; got the columns {_listed(columns)}"
        )
    if any(list(column) != sorted(column) for column in columns):
        raise ArgumentError(
            "argument mesh: expected ranks in ascending order along it, got the columns "
            f"{_listed(columns)}; let init_device_mesh number them"
        )
    return sorted(columns), numbers


def _listed(columns: Collection[tuple[int, ...]]) -> str:
    shown = sorted(columns)[:4]
    return ", ".join(map(str, shown)) + (", ..." if len(columns) > len(shown) else "")
