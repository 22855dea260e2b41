"""``allgather``: concatenate the tensors of all ranks, or of a group, on each of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from asyncddp.device.stream_interfaces import empty_on
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import (
    ExchangeSignature,
    OperationExchanges,
    OperationSpec,
    SlotCall,
    SlotExchange,
    StartedCollective,
    Steps,
    run_collective,
)
from asyncddp.ops.group_exchange import concatenate, exchange_all_gather
from asyncddp.ops.process_group import ProcessGroup, members_of
from asyncddp.ops.validation import check_tensor, prepare_for_transport, signature_of, write_result
from asyncddp.ops.variants import collective, gathering, nonblocking
from asyncddp.tensors.allocation import empty, make_tensor
from asyncddp.torch_modes import normal_mode
from asyncddp.transport import Transport


@gathering
@collective
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
        DtypeError: The dtype cannot travel.
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
    title = "allgather" + (f" {name!r}" if name else "")
    ranks, transport = members.ranks, members.transport

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        if transport is not None:
            return (yield from gather_over_group(op, ranks, transport, tensor, title))
        own, _ = prepare_for_transport(members.context.transport, tensor)
        form = signature_of(title, own, ragged=True)
        parts = yield from exchange_all_gather(op, ranks, form, own)
        return write_result(concatenate(parts), tensor, None)

    form = signature_of(title, tensor, ragged=True)

    call = None
    if 0 not in tensor.shape[1:]:  # else bytes do not tell the number of rows
        call = members.slot_call(form, tensor, concatenated)
    if call is None and transport is not None:
        call = SlotCall(_started_exchange(form, transport, tensor.shape[0]), tensor)
    return members.operation("allgather", steps, name, tensor, check=check, slot_call=call)


allgather_nonblocking = nonblocking(allgather)


def concatenated(
    parts: Sequence[torch.Tensor], given: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Concatenate what all ranks have given to slots."""
    del out
    with normal_mode():
        rows = torch.cat(list(parts))
        return rows if rows.ndim == given.ndim else rows.view(-1, *given.shape[1:])


def _started_exchange(
    form: ExchangeSignature, transport: Transport, rows: int
) -> SlotExchange[torch.Tensor]:
    """Return how the ranks agree on an allgather of large tensors, and tell numbers of rows."""
    counts = make_tensor([rows], torch.int64)

    def start(
        rows: Sequence[torch.Tensor], given: torch.Tensor, out: torch.Tensor | None
    ) -> StartedCollective[torch.Tensor]:
        del out
        return _start_gathering(transport, given, rows)

    return SlotExchange(form, dtype=torch.int64, shape=(1,), start=start, counts=counts)


def gather_over_group(
    op: OperationExchanges,
    group: Sequence[int],
    transport: Transport,
    tensor: torch.Tensor,
    title: str,
) -> Steps[torch.Tensor]:
    """Gather tensors over a group of ranks: first the numbers of rows, then the rows."""
    rows, ones = empty((len(group),), torch.int64), [1] * len(group)
    mine = make_tensor([tensor.shape[0]], torch.int64)
    form = signature_of(title, tensor, ragged=True)
    yield from op.collective(group, form, lambda: transport.iallgather(mine, rows, ones))
    start = partial(_start_gathering, transport, tensor, [rows])
    return (yield from run_collective(op, group, form, start))


def _start_gathering(
    transport: Transport, tensor: torch.Tensor, rows: Sequence[torch.Tensor]
) -> StartedCollective[torch.Tensor]:
    """Start to gather tensors, of which each has as many rows as ``rows`` says, in all."""
    own, transport = prepare_for_transport(transport, tensor)
    sizes = [count for part in rows for count in part.tolist()]
    width = math.prod(own.shape[1:])
    whole = empty_on(streams_of(tensor), (sum(sizes), *own.shape[1:]), own.dtype)
    request = transport.iallgather(own, whole.view(-1), [count * width for count in sizes])
    return StartedCollective(request, lambda: write_result(whole, tensor, None))
