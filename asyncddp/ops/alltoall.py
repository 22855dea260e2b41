"""``alltoall``: each rank sends a part of its tensor's rows to each rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.device.stream_interfaces import empty_on
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.engine.messages import mismatch_found_by
from asyncddp.errors import ArgumentError
from asyncddp.ops.group_exchange import concatenate, exchange_all_to_all
from asyncddp.ops.process_group import (
    CollectiveImplementations,
    Output,
    ProcessGroup,
    Tensors,
    members_of,
)
from asyncddp.ops.validation import (
    can_receive,
    check_shape_of_out,
    check_tensor,
    checked_splits,
    equal_splits,
    signature_of,
    write_result,
)
from asyncddp.ops.variants import collective, in_place, nonblocking

_NAME = "alltoall"


@collective
def alltoall(
    tensor: torch.Tensor,
    splits: Sequence[int] | None = None,
    receive_splits: Sequence[int] | None = None,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Send a part of the rows to each rank, and concatenate the parts received from all ranks.

    With :math:`x_j = (x_{j,0}, \dots, x_{j,n-1})`, cut along dimension 0,

    .. math:: y_i = (x_{0,i}, x_{1,i}, \dots, x_{n-1,i})

    Args:
        tensor: :math:`x_i`, with a first dimension that the number of ranks divides, unless there
            are ``splits``. Ranks agree in dtype and trailing dimensions.
        splits: How many rows go to each rank, in the order of the ranks; equally many by default.
        receive_splits: Number of rows to receive from each rank. Without ``splits`` as many as are
            sent to it by default; with ``splits`` any number is accepted by default.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.
        check: Return only after all receivers have confirmed that they expect their rows.
        out: Tensor of the result's shape into which it is written, which may be ``tensor`` itself;
            with ``splits`` it needs ``receive_splits``.

    Returns:
        :math:`y_i`: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: Rows that cannot be shared equally, splits that do not fit the tensor, or an
            ``out`` of another shape; this rank is not in ``group``.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank has another dtype, other trailing dimensions, or sends another
            number of rows than this rank expects.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.alltoall(torch.tensor([1, 2]) + 10 * bf.rank()).tolist())
        [[1, 11], [2, 12]]

    References:
        MPI: A Message-Passing Interface Standard, ``MPI_Alltoallv``.
    """
    members = members_of(_NAME, group)
    check_tensor(_NAME, tensor, min_ndim=1)
    number, rows = members.size, tensor.shape[0]
    if splits is None:
        sent = equal_splits(_NAME, rows, number)
    else:
        sent = checked_splits(_NAME, "splits", splits, number, rows)
    awaited = sent if splits is None else None
    if receive_splits is not None:
        awaited = checked_splits(_NAME, "receive_splits", receive_splits, number)
    if awaited is not None:
        check_shape_of_out(_NAME, out, (sum(awaited), *tensor.shape[1:]))
    elif out is not None:
        raise ArgumentError(
            f"{_NAME}: arguments splits, out: expected receive_splits= with both, since the "
            "result's shape is not known before; alltoall of the splits tells them"
        )
    return plan_alltoall(members, tensor, sent, awaited, name, check, out)


alltoall_nonblocking = nonblocking(alltoall)
alltoall_ = in_place(alltoall)
alltoall_nonblocking_ = nonblocking(alltoall_)


def plan_alltoall(
    members: ProcessGroup,
    tensor: torch.Tensor,
    sent: Sequence[int],
    awaited: Sequence[int] | None,
    name: str | None = None,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    """Plan an all-to-all exchange in a group; the arguments have been checked."""
    title = _NAME + (f" {name!r}" if name else "")

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[torch.Tensor]:
        form, given = signature_of(title, own, ragged=True), torch.split(own, list(sent))
        if awaited is None:
            parts = yield from exchange_all_to_all(op, members.ranks, form, given)
            return write_result(concatenate(parts), tensor, out)
        whole = out
        if whole is None or not can_receive(whole, own):
            shape = (sum(awaited), *own.shape[1:])
            whole = empty_on(streams_of(own), shape, own.dtype)
        outs = torch.split(whole.detach(), list(awaited))
        parts = yield from exchange_all_to_all(op, members.ranks, form, given, outs)
        require_rows(op.rank, title, members.ranks, awaited, [len(part) for part in parts])
        for into, part in zip(outs, parts, strict=True):
            if part is not into:
                into.copy_(part)
        return write_result(whole, tensor, out)

    share = tensor.shape[0] // members.size
    first = share * members.ranks.index(members.context.rank)

    def combine(parts: Tensors, given: torch.Tensor, out: Output) -> torch.Tensor:
        found = concatenate([part[first : first + share] for part in parts])
        return write_result(found, given, out)

    form = signature_of(title, tensor)
    ways = CollectiveImplementations(combine if sent is awaited else None)  # equal shares
    return members.collective(_NAME, form, (tensor, out), messages, ways, name, check)


def require_rows(
    rank: int, title: str, ranks: Sequence[int], awaited: Sequence[int], got: Sequence[int]
) -> None:
    """Raise MismatchError unless each rank has sent the expected number of rows."""
    for peer, expected, rows in zip(ranks, awaited, got, strict=True):
        if rows != expected:
            raise mismatch_found_by(
                rank,
                f"rank {rank}, {title}: expected {expected} rows from rank {peer}, got {rows}; let "
                "its splits and this rank's receive_splits, equal ones by default, agree",
            )
