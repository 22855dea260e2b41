"""``scatter``: sends each rank its part of the rows of the root's tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.errors import ArgumentError
from asyncddp.ops.group_exchange import exchange_from_root
from asyncddp.ops.process_group import ProcessGroup, check_member, members_of
from asyncddp.ops.validation import (
    check_shape_of_out,
    check_tensor,
    checked_splits,
    equal_splits,
    expected_by,
    prepare_for_transport,
    signature_of,
    write_result,
)
from asyncddp.ops.variants import blocking, nonblocking
from asyncddp.tensors.allocation import detached_copy

_NAME = "scatter"


@blocking
def scatter(
    tensor: torch.Tensor | None = None,
    root_rank: int = 0,
    splits: Sequence[int] | None = None,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Cut the root's tensor along the first dimension, and send each rank its part.

    .. math:: x_\mathrm{root} = (y_0, y_1, \dots, y_{n-1})

    Args:
        tensor: :math:`x`, with a first dimension that the number of ranks divides, unless there are
            ``splits``. Only the root's is used; elsewhere it may be None, or give the part's
            device.
        root_rank: The root's rank in the world, the same on all ranks.
        splits: Number of rows for each rank, in the order of the ranks; equal by default. Only the
            root's is used.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.
        check: Return only after all receivers have confirmed that they expect their part.
        out: Tensor of the part's shape and dtype into which the part is written. Ranks other than
            the root check the received part against it.

    Returns:
        :math:`y_i`: ``out`` or a new tensor on the device of ``tensor``, on the host where a rank
        gives neither.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No tensor on the root, or rows that cannot be shared so; no such root; it or
            this rank is not in ``group``; an ``out`` of another shape on the root.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank names another root, or ``out`` does not fit the part.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(lambda: bf.scatter(torch.arange(4) if bf.rank() == 0 else None).tolist())
        [[0, 1], [2, 3]]
    """
    members = members_of(_NAME, group)
    root = check_member(_NAME, "root_rank", root_rank, members)
    title = f"{_NAME}(root_rank={root})" + (f" {name!r}" if name else "")
    if members.context.rank == root:
        return _from_here(members, root, title, tensor, splits, name, check, out)
    for given in (tensor, out):
        if given is not None:
            check_tensor(_NAME, given)
    form, into = expected_by(title, out, tensor)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        part = yield from exchange_from_root(op, members.ranks, root, form, None, into)
        return part if out is None else write_result(part, out, out)

    return members.operation(_NAME, steps, name, into, check=check)


scatter_nonblocking = nonblocking(scatter)


def _from_here(
    members: ProcessGroup,
    root: int,
    title: str,
    tensor: torch.Tensor | None,
    splits: Sequence[int] | None,
    name: str | None,
    check: bool,
    out: torch.Tensor | None,
) -> OperationSpec[torch.Tensor]:
    """Plan the root's side of a scatter."""
    if tensor is None:
        raise ArgumentError(
            f"{_NAME}: argument tensor: expected the tensor to cut on rank {root}, which is the "
            "root, got None"
        )
    check_tensor(_NAME, tensor, min_ndim=1)
    rows, number = tensor.shape[0], members.size
    if splits is None:
        sent = equal_splits(_NAME, rows, number)
    else:
        sent = checked_splits(_NAME, "splits", splits, number, rows)
    check_shape_of_out(_NAME, out, (sent[members.ranks.index(root)], *tensor.shape[1:]))

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        own, _ = prepare_for_transport(members.context.transport, tensor)
        form, parts = signature_of(title, own, ragged=True), torch.split(own, sent)
        part = yield from exchange_from_root(op, members.ranks, root, form, parts, own)
        return write_result(detached_copy(part) if out is None else part, tensor, out)

    return members.operation(_NAME, steps, name, tensor, out, check=check)
