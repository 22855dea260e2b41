"""``gather``: concatenates the tensors of all ranks on one of them."""

from __future__ import annotations

import torch

from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.ops.allgather import concatenated
from asyncddp.ops.group_exchange import concatenate, exchange_to_root
from asyncddp.ops.process_group import (
    CollectiveImplementations,
    Output,
    ProcessGroup,
    Tensors,
    check_member,
    members_of,
)
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import check_tensor, signature_of, write_result
from asyncddp.ops.variants import nonblocking, of_tensors


@of_tensors(ListKind.GATHERING, collective=True)
def gather(
    tensor: torch.Tensor,
    root_rank: int = 0,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
    check: bool = False,
) -> OperationSpec[torch.Tensor | None]:
    r"""Concatenate all ranks' tensors along the first dimension on the root.

    .. math:: y_\mathrm{root} = (x_0, x_1, \dots, x_{n-1})

    Args:
        tensor: :math:`x_i`, of at least one dimension; the first may differ between ranks and be 0.
            Or a list, tuple or dict of tensors, as one operation: see :ref:`lists-of-tensors`.
        root_rank: The root's rank in the world, the same on all ranks.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.
        check: Return only after the root has confirmed that it expects the tensor.

    Returns:
        :math:`y` on the root, None elsewhere.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: A 0-dim tensor, or no such root; it or this rank is not in ``group``.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank has another root, dtype or other trailing dimensions.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.gather(torch.full((bf.rank(),), bf.rank()), root_rank=1))
        [None, tensor([1, 2, 2]), None]
    """
    members = members_of("gather", group)
    check_tensor("gather", tensor, min_ndim=1)
    root = check_member("gather", "root_rank", root_rank, members)
    title = f"gather(root_rank={root})" + (f" {name!r}" if name else "")

    form, here = signature_of(title, tensor, ragged=True), members.context.rank == root

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[torch.Tensor | None]:
        parts = yield from exchange_to_root(op, members.ranks, root, form, own)
        return None if parts is None else write_result(concatenate(parts), tensor, None)

    def combine(parts: Tensors, given: torch.Tensor, out: Output) -> torch.Tensor | None:
        return concatenated(parts, given, out) if here else None

    # a tensor without elements does not tell its rows by its bytes
    ways = CollectiveImplementations(combine if 0 not in tensor.shape[1:] else None)
    return members.collective("gather", form, (tensor, None), messages, ways, name, check)


gather_nonblocking = nonblocking(gather)
