"""``broadcast``: one rank's tensor for all."""

from __future__ import annotations

import torch

from asyncddp.context import current
from asyncddp.engine import Desk, Program, Steps
from asyncddp.memory.allocate import copied, empty_like
from asyncddp.memory.streams import order_of
from asyncddp.ops.door import carried, check_rank, check_tensor, deliver, form_of
from asyncddp.ops.forms import in_place, nonblocking, verb

__all__ = ["broadcast", "broadcast_", "broadcast_nonblocking", "broadcast_nonblocking_"]


@verb
def broadcast(
    tensor: torch.Tensor,
    root_rank: int = 0,
    *,
    name: str | None = None,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> Program[torch.Tensor]:
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

    def steps(desk: Desk) -> Steps[torch.Tensor]:
        """Send the root's tensor, and deliver."""
        own, wire = carried(context.transport, tensor)
        value = copied(own) if context.rank == root else empty_like(own)
        yield from desk.collective(
            range(context.size),
            form_of(title, tensor),
            lambda: wire.ibroadcast(value, root),
        )
        return deliver(value, tensor, out)

    return Program("broadcast", steps, name, ordered=True, check=check, order=order_of(tensor, out))


broadcast_nonblocking = nonblocking(broadcast)
broadcast_ = in_place(broadcast)
broadcast_nonblocking_ = nonblocking(broadcast_)
