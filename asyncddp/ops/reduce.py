"""``reduce``: combines all ranks' tensors (sum, average or another operator) on one rank."""

from __future__ import annotations

import torch

from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.ops.group_exchange import reduce_to_root
from asyncddp.ops.process_group import (
    CollectiveImplementations,
    Output,
    ProcessGroup,
    Tensors,
    check_member,
    members_of,
)
from asyncddp.ops.reduce_op import ReduceOp, Reduction, reduction_of
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import (
    direct_out,
    signature_of,
    single_output,
    write_result,
)
from asyncddp.ops.variants import in_place, nonblocking, of_tensors
from asyncddp.tensors.tensor_lists import TensorOrTensors


@of_tensors(ListKind.ELEMENTWISE, collective=True, for_some=True)
def reduce(
    tensor: torch.Tensor,
    root_rank: int = 0,
    op: ReduceOp | str = ReduceOp.AVERAGE,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
    round_integers: bool = False,
    check: bool = False,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor | None]:
    r"""Reduce a tensor over all ranks or a group; only the root rank gets the result.

    .. math:: y_\mathrm{root} = \frac{1}{n} \sum_j x_j \quad\text{or}\quad \sum_j x_j
        \quad\text{or}\quad \max_j x_j \quad\text{or}\ \dots

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks. Halves are summed in float32.
            Or a list, tuple or dict of tensors, as one operation: see :ref:`lists-of-tensors`.
        root_rank: The root's rank in the world, the same on all ranks.
        op: Reduction operator, as of :func:`~asyncddp.allreduce`, the same on all ranks.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.
        round_integers: Average integers in float64 and round half to even.
        check: Return only after the receivers have confirmed that they expect the tensor.
        out: Tensor into which the root's result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y` on the root, ``out`` or a new tensor; elsewhere ``out``, unchanged, or None.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: There is no such root; it or this rank is not in ``group``; the operator has
            no meaning for the dtype.
        UnknownNameError: There is no such operator.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank calls another verb, root, operator, dtype or shape.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.reduce(torch.tensor([bf.rank()]), root_rank=1, op="max"))
        [None, tensor([2]), None]
    """
    out, members = single_output("reduce", out), members_of("reduce", group)
    reduction = reduction_of("reduce", tensor, op, None, round_integers=round_integers)
    root = check_member("reduce", "root_rank", root_rank, members)
    return plan_reduce(members, tensor, root, reduction, name, check, out)


reduce_nonblocking = nonblocking(reduce)
reduce_ = in_place(reduce)
reduce_nonblocking_ = nonblocking(reduce_)


def plan_reduce(
    members: ProcessGroup,
    tensor: torch.Tensor,
    root: int,
    reduction: Reduction,
    name: str | None = None,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor | None]:
    """Plan a reduction to one rank of a group; the arguments have been checked."""
    title = f"reduce({reduction.name}, root_rank={root})" + (f" {name!r}" if name else "")

    form, here = signature_of(title, tensor), members.context.rank == root

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[torch.Tensor | None]:
        total = yield from reduce_to_root(op, members.ranks, root, own, reduction, title)
        return out if total is None else write_result(total, tensor, out)

    def combine(terms: Tensors, given: torch.Tensor, out: Output) -> torch.Tensor | None:
        if not here:
            return out
        into = direct_out(out, reduction.dtype, given.shape)
        return write_result(reduction.of(terms, into), given, out)

    ways = CollectiveImplementations(combine)
    return members.collective("reduce", form, (tensor, out), messages, ways, name, check)
