"""``reduce_scatter``: reduces over all ranks or a group; each rank gets some rows of the result."""

from __future__ import annotations

import torch

from asyncddp.device.stream_interfaces import empty_on
from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import (
    OperationExchanges,
    OperationSpec,
    StartedCollective,
    Steps,
)
from asyncddp.errors import ArgumentError
from asyncddp.ops.group_exchange import reduce_scatter_over_group
from asyncddp.ops.process_group import (
    CollectiveImplementations,
    Output,
    ProcessGroup,
    Tensors,
    members_of,
)
from asyncddp.ops.reduce_op import ReduceOp, Reduction, reduction_of
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import (
    can_write_result,
    direct_out,
    is_same_memory,
    prepare_for_transport,
    signature_of,
    single_output,
    write_result,
)
from asyncddp.ops.variants import nonblocking, of_tensors
from asyncddp.tensors.tensor_lists import TensorOrTensors

_NAME = "reduce_scatter"


@of_tensors(ListKind.ROWWISE, collective=True)
def reduce_scatter(
    tensor: torch.Tensor,
    average: bool | None = None,
    *,
    op: ReduceOp | str | None = None,
    group: ProcessGroup | None = None,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Reduce a tensor over all ranks or a group, and give each rank an equal share of the rows.

    With :math:`x_j = (x_{j,0}, \dots, x_{j,n-1})`, cut into n equal parts along dimension 0,

    .. math:: y_i = \sum_j x_{j,i} \quad\text{or}\quad y_i = \frac{1}{n} \sum_j x_{j,i}

    so that :func:`~asyncddp.allgather` of all :math:`y_i` is :func:`~asyncddp.allreduce` of x.

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks, with a first dimension that the
            number of ranks divides. Halves are summed in float32. Or a list, tuple or dict of
            tensors, as one operation: see :ref:`lists-of-tensors`.
        average: Divide by the number of ranks, as is the default. Integers are summed only with
            ``average=False``, or averaged where ``round_integers`` asks for it; the sum of bools is
            their logical or.
        op: Reduction operator in place of ``average``, as of :func:`~asyncddp.allreduce`.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.
        round_integers: Average integers in float64 and round half to even.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        out: Tensor of the part's shape into which the result is written.

    Returns:
        :math:`y_i`, of shape ``(tensor.shape[0] // n, *tensor.shape[1:])``: new, or ``out``.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: A first dimension that cannot be shared equally, an ``out`` of another shape,
            or the average of integers or bools, which was not asked for; ``op`` contradicts
            ``average`` or the dtype; this rank is not in ``group``.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank calls another verb, dtype or shape.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.reduce_scatter(torch.tensor([0.0, 10.0, 20.0])).tolist())
        [[0.0], [10.0], [20.0]]

    References:
        MPI: A Message-Passing Interface Standard, ``MPI_Reduce_scatter_block``.
    """
    out, members = single_output(_NAME, out), members_of(_NAME, group)
    reduction = reduction_of(_NAME, tensor, op, average, round_integers=round_integers, min_ndim=1)
    shape = _part_shape(tensor, members.size, out)
    return plan_reduce_scatter(members, tensor, shape, reduction, name, check, out)


reduce_scatter_nonblocking = nonblocking(reduce_scatter)


def plan_reduce_scatter(
    members: ProcessGroup,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    reduction: Reduction,
    name: str | None = None,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    """Plan a reduce-scatter in a group; the arguments have been checked."""
    ranks, dtype = members.ranks, reduction.dtype
    summed_in = reduction.summed_in(tensor.dtype)
    title = f"{_NAME}({reduction.name})" + (f" {name!r}" if name else "")
    divisor, first = reduction.divisor(len(ranks)), shape[0] * ranks.index(members.context.rank)

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[torch.Tensor]:
        part = yield from reduce_scatter_over_group(op, ranks, own, reduction, title)
        return write_result(part.view(shape), tensor, out)

    def start(_: Tensors, given: torch.Tensor, out: Output) -> StartedCollective[torch.Tensor]:
        assert members.transport is not None
        own, transport = prepare_for_transport(members.transport, given)
        own = own.to(summed_in)
        part = own[: shape[0]]
        if can_write_result(out, part) and not is_same_memory(out, part):
            total, into = out, out.detach()
        else:
            total = into = empty_on(streams_of(given), shape, summed_in)
        request = transport.ireduce_scatter(own.view(-1), into.view(-1), divisor)
        return StartedCollective(request, lambda: write_result(total, given, out))

    def combine(terms: Tensors, given: torch.Tensor, out: Output) -> torch.Tensor:
        parts = [term[first : first + shape[0]] for term in terms]
        total = reduction.of(parts, direct_out(out, dtype, shape))
        return write_result(total, given, out)

    form = signature_of(title, tensor)
    ways = CollectiveImplementations(combine, start if reduction.is_sum else None, dtype=dtype)
    return members.collective(_NAME, form, (tensor, out), messages, ways, name, check)


def _part_shape(tensor: torch.Tensor, size: int, out: torch.Tensor | None) -> tuple[int, ...]:
    """Return the shape of a rank's part of the rows; check that ``out`` has this shape."""
    rows, odd = divmod(tensor.shape[0], size)
    if odd:
        raise ArgumentError(
            f"{_NAME}: argument tensor: expected a first dimension that {size} ranks can share "
            f"equally, got shape {tuple(tensor.shape)}; append {size - odd} rows, for example of "
            "zeros with torch.nn.functional.pad, and leave them out of the last parts"
        )
    shape = (rows, *tensor.shape[1:])
    if out is not None and out.shape != shape:
        raise ArgumentError(
            f"{_NAME}: argument out: expected shape {shape}, the part of one of {size} ranks, got "
            f"{tuple(out.shape)}; pass torch.empty({shape}), or leave out= away"
        )
    return shape
