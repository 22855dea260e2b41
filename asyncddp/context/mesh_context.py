"""Contexts of replicas that are sharded: one for each dimension of a device mesh that averages.

A model may be sharded inside a replica, over the other dimensions of torch's ``DeviceMesh``. Ranks
that hold the same part of it, one of each replica, are a column: they are the world in which the
part is averaged. The ranks of one replica are its inner mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from asyncddp.context.context import Context, current, use
from asyncddp.context.group_context import split_disjoint
from asyncddp.errors import ArgumentError
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

    Args:
        mesh: One dimension of the mesh of all ranks, along which the model is not sharded, such as
            ``mesh["replica"]``.

    Returns:
        A context manager that gives the context.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: The mesh has several dimensions, or other ranks than this world.

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
    if world.config.elastic:
        raise ArgumentError(
            "argument mesh: replicas that are sharded cannot go on without a rank yet; start the "
            "run without --elastic"
        )
    columns, numbers = _columns(world, ranks)
    across = sorted({tuple(sorted(replica)) for replica in zip(*columns, strict=True)})
    column, inner = split_disjoint(world, columns), split_disjoint(world, across)
    (own,) = (replica for replica in across if world.rank in replica)
    known = frozenset(numbers[rank] for rank in own)
    column.extensions.update({_INNER: inner, _WORLD: world, _RANKS: known})
    return column


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
