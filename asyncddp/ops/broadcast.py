"""``broadcast``: copy the root rank's tensor to all ranks."""

from __future__ import annotations

import torch

from asyncddp.context import current
from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.ops.validation import (
    check_rank,
    check_tensor,
    prepare_for_transport,
    signature_of,
    write_result,
)
from asyncddp.ops.variants import blocking, in_place, nonblocking
from asyncddp.tensors.allocation import detached_copy, empty_like


@blocking
def broadcast(
    tensor: torch.Tensor,
    root_rank: int = 0,
    *,
    name: str | None = None,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Give all ranks the root's tensor.

    .. math:: y_i = x_\mathrm{root}

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks; its values count on the root.
        root_rank: The root, the same on all ranks.
        name: For messages; all ranks must give the same.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        out: Tensor into which the result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y_i`: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: There is no such root.
        DtypeError: The dtype cannot travel.
        MismatchError: Another rank names another root, dtype or shape.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.broadcast(torch.tensor([bf.rank()]), root_rank=2).item())
        [2, 2, 2]
    """
    context = current()
    check_tensor("broadcast", tensor)
    root = check_rank("broadcast", "root_rank", root_rank, context.size)
    title = f"broadcast(root_rank={root})" + (f" {name!r}" if name else "")

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        own, transport = prepare_for_transport(context.transport, tensor)
        value = detached_copy(own) if context.rank == root else empty_like(own)
        group, form = range(context.size), signature_of(title, tensor)
        yield from op.collective(group, form, lambda: transport.ibroadcast(value, root))
        return write_result(value, tensor, out)

    order = stream_ordering_of(tensor, out)
    return OperationSpec("broadcast", steps, name, ordered=True, check=check, stream_ordering=order)


broadcast_nonblocking = nonblocking(broadcast)
broadcast_ = in_place(broadcast)
broadcast_nonblocking_ = nonblocking(broadcast_)
