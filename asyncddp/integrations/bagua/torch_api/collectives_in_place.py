"""Bagua's in-place collectives: the result overwrites the input tensor.

Arguments are those of :mod:`~asyncddp.integrations.bagua.torch_api.collectives`. If a tensor has a
part for each rank, this rank's own part is at its position, and stays there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.errors import ArgumentError
from asyncddp.integrations.bagua.torch_api.collectives import Comm, member, rows_of, write
from asyncddp.integrations.bagua.torch_api.communicator import ReduceOp, operator_of
from asyncddp.ops.allgather import allgather as _allgather
from asyncddp.ops.allreduce import allreduce_
from asyncddp.ops.alltoall import alltoall as _alltoall
from asyncddp.ops.gather import gather as _gather
from asyncddp.ops.reduce import reduce as _reduce
from asyncddp.ops.reduce_scatter import reduce_scatter as _reduce_scatter
from asyncddp.ops.scatter import scatter as _scatter

__all__ = [
    "allgather_inplace", "allreduce_coalesced_inplace", "allreduce_inplace", "alltoall_inplace",
    "gather_inplace", "reduce_inplace", "reduce_scatter_inplace", "scatter_inplace",
]  # fmt: skip


def reduce_inplace(
    tensor: torch.Tensor, dst: int, op: ReduceOp = ReduceOp.SUM, comm: Comm = None
) -> None:
    """Reduce a tensor over all ranks; the result overwrites the tensor on ``dst`` only."""
    if (members := member(comm)) is not None:
        root = members.world_rank("reduce_inplace", "dst", dst)
        result = _reduce(tensor, root, operator_of(op), group=members.group)
        if result is not None:
            write("reduce_inplace", tensor, result)


def allreduce_inplace(tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None) -> None:
    """Overwrite a tensor with its reduction over all ranks."""
    if (members := member(comm)) is not None:
        allreduce_(tensor.detach(), op=operator_of(op), group=members.group)


def allreduce_coalesced_inplace(
    tensors: Sequence[torch.Tensor], op: ReduceOp = ReduceOp.SUM, comm: Comm = None
) -> None:
    """Overwrite several tensors with their reductions over all ranks."""
    if (members := member(comm)) is not None:
        given = [one.detach() for one in tensors]
        allreduce_(given, op=operator_of(op), group=members.group)


def allgather_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """Fill a tensor of equal parts with the parts of all ranks."""
    if (members := member(comm)) is not None:
        rows = rows_of("allgather_inplace", "tensor", tensor, members.nranks())
        own = rows[members.rank()].clone()
        write("allgather_inplace", tensor, _allgather(own, group=members.group))


def gather_inplace(tensor: torch.Tensor, count: int, dst: int, comm: Comm = None) -> None:
    """Fill the tensor of ``dst`` with the elements of all ranks.

    Args:
        tensor: On ``dst`` equal parts of ``count`` elements, elsewhere the elements to send.
        count: Number of elements of each rank.
        dst: Rank that gets the elements.
        comm: The ranks; all by default.
    """
    members = member(comm)
    if members is None:
        return
    root, here = members.world_rank("gather_inplace", "dst", dst), members.rank() == dst
    place, parts = (dst, members.nranks()) if here else (0, 1)
    own = _part("gather_inplace", tensor, count, place, parts).clone()
    result = _gather(own, root, group=members.group)
    if result is not None:
        write("gather_inplace", tensor, result)


def scatter_inplace(tensor: torch.Tensor, count: int, src: int, comm: Comm = None) -> None:
    """Send each rank its part of the tensor of ``src``.

    Args:
        tensor: On ``src`` equal parts of ``count`` elements, unchanged; elsewhere the received
            elements overwrite its beginning.
        count: Number of elements of each rank.
        src: Rank whose tensor is cut.
        comm: The ranks; all by default.
    """
    members = member(comm)
    if members is None:
        return
    root, here = members.world_rank("scatter_inplace", "src", src), members.rank() == src
    given = rows_of("scatter_inplace", "tensor", tensor, members.nranks()) if here else None
    into = tensor.detach().new_empty((1, count))
    part = _scatter(given, root, group=members.group, out=into)
    if not here:
        _part("scatter_inplace", tensor, count, 0, 1).copy_(part.view(-1))


def reduce_scatter_inplace(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, comm: Comm = None
) -> None:
    """Overwrite this rank's part of a tensor of equal parts with its reduction over all ranks."""
    if (members := member(comm)) is not None:
        rows = rows_of("reduce_scatter_inplace", "tensor", tensor, members.nranks())
        result = _reduce_scatter(rows, op=operator_of(op), group=members.group)
        place = members.rank()
        _part("reduce_scatter_inplace", tensor, result.numel(), place, len(rows)).copy_(
            result.view(-1)
        )


def alltoall_inplace(tensor: torch.Tensor, comm: Comm = None) -> None:
    """Send one of a tensor's equal parts to each rank; received parts overwrite the sent ones."""
    if (members := member(comm)) is not None:
        rows = rows_of("alltoall_inplace", "tensor", tensor, members.nranks())
        write("alltoall_inplace", tensor, _alltoall(rows, group=members.group))


def _part(caller: str, tensor: torch.Tensor, count: int, place: int, parts: int) -> torch.Tensor:
    """View one part of a contiguous tensor."""
    if not tensor.is_contiguous() or tensor.numel() < count * parts:
        raise ArgumentError(
            f"{caller}: argument tensor: expected a contiguous tensor of at least {parts} times "
            f"{count} elements, got {tensor.numel()}"
        )
    return tensor.detach().view(-1)[place * count : (place + 1) * count]
