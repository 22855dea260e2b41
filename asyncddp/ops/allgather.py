"""``allgather``: concatenates the tensors of all ranks, or of a group, on each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from asyncddp.device.stream_interfaces import empty_on
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import (
    OperationExchanges,
    OperationSpec,
    StartedCollective,
    Steps,
)
from asyncddp.ops.group_exchange import concatenate, exchange_all_gather
from asyncddp.ops.process_group import (
    CollectiveImplementations,
    Output,
    ProcessGroup,
    Tensors,
    members_of,
)
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import (
    can_write_result,
    check_tensor,
    direct_out,
    prepare_for_transport,
    signature_of,
    write_result,
)
from asyncddp.ops.variants import nonblocking, of_tensors
from asyncddp.tensors.allocation import make_tensor
from asyncddp.torch_modes import normal_mode
from asyncddp.transport import Transport

_SLOT_BYTES = 1 << 19  # of a tensor that is not worth a read from the memory of each peer


@of_tensors(ListKind.GATHERING, collective=True)
def allgather(
    tensor: torch.Tensor,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
    check: bool = False,
) -> OperationSpec[torch.Tensor]:
    r"""Concatenate all ranks' tensors along the first dimension, in the order of the ranks.

    .. math:: y = (x_0, x_1, \dots, x_{n-1})

    Args:
        tensor: :math:`x_i`, of at least one dimension; the first may differ between ranks and be 0.
            Or a list, tuple or dict of tensors, as one operation: see :ref:`lists-of-tensors`.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.

    Returns:
        :math:`y`, the same on all ranks that take part.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: A 0-dim tensor; this rank is not in ``group``.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank has another dtype or other trailing dimensions.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.allgather(torch.full((bf.rank(),), bf.rank())).tolist())[0]
        [1, 2, 2]
    """
    members = members_of("allgather", group)
    check_tensor("allgather", tensor, min_ndim=1)
    return plan_allgather(members, tensor, name, check)


allgather_nonblocking = nonblocking(allgather)


def plan_allgather(
    members: ProcessGroup,
    tensor: torch.Tensor,
    name: str | None = None,
    check: bool = False,
    rows: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    """Plan an allgather in a group; the arguments have been checked.

    If ``rows`` gives the number of rows of each rank, the ranks do not exchange these numbers. The
    result goes into ``out``.
    """
    title = "allgather" + (f" {name!r}" if name else "")
    if rows is not None:
        title += f" of {list(rows)} rows" if len(set(rows)) > 1 else f" of {rows[0]} rows each"
    form = signature_of(title, tensor, ragged=True)
    known = None if rows is None else [make_tensor(list(rows), torch.int64)]

    def start(counts: Tensors, given: torch.Tensor, out: Output) -> StartedCollective[torch.Tensor]:
        every = [count for part in known or counts for count in part.tolist()]
        return start_gathering(members.transport, given, every, out)

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[torch.Tensor]:
        parts = yield from exchange_all_gather(op, members.ranks, form, own)
        return write_result(concatenate(parts), tensor, out)

    # a tensor without elements does not tell its rows by its bytes
    small = 0 not in tensor.shape[1:] and tensor.nbytes <= _SLOT_BYTES
    counts = make_tensor([tensor.shape[0]], torch.int64) if known is None else None
    ways = CollectiveImplementations(concatenated if small else None, start, counts)
    return members.collective("allgather", form, (tensor, out), messages, ways, name, check)


def concatenated(parts: Tensors, given: torch.Tensor, out: Output) -> torch.Tensor:
    """Concatenate the tensors of all ranks, read from shared-memory slots."""
    with normal_mode():
        into = direct_out(out, given.dtype, out.shape) if out is not None else None
        rows = torch.cat(list(parts), out=into)
        if rows.ndim != given.ndim:
            rows = rows.view(-1, *given.shape[1:])
        return rows if out is None else write_result(rows, given, out)


def start_gathering(
    transport: Transport | None,
    tensor: torch.Tensor,
    rows: Sequence[int],
    out: torch.Tensor | None = None,
) -> StartedCollective[torch.Tensor]:
    """Start gathering the ranks' tensors; ``rows`` gives each rank's number of rows."""
    assert transport is not None
    own, transport = prepare_for_transport(transport, tensor)
    width = math.prod(own.shape[1:])
    shape = sum(rows), *own.shape[1:]
    writes = can_write_result(out, out) if out is not None else False
    whole = out if writes and out is not None else empty_on(streams_of(tensor), shape, own.dtype)
    request = transport.iallgather(own, whole.view(-1), [count * width for count in rows])
    return StartedCollective(request, lambda: write_result(whole, tensor, out))
