"""``broadcast``: copies the root rank's tensor to all ranks, or those of a group."""

from __future__ import annotations

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
from asyncddp.ops.group_exchange import (
    exchange_from_root,
    gather_parts,
    goes_directly,
    signature_of_parts,
)
from asyncddp.ops.process_group import (
    CollectiveImplementations,
    Output,
    ProcessGroup,
    Tensors,
    check_member,
    members_of,
)
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import (
    can_write_result,
    check_tensor,
    is_same_memory,
    prepare_for_transport,
    signature_of,
    single_output,
    write_result,
)
from asyncddp.ops.variants import in_place, nonblocking, of_tensors
from asyncddp.tensors.allocation import detached_copy
from asyncddp.tensors.tensor_lists import TensorOrTensors


@of_tensors(ListKind.ELEMENTWISE, collective=True)
def broadcast(
    tensor: torch.Tensor,
    root_rank: int = 0,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
    check: bool = False,
    out: TensorOrTensors | None = None,
) -> OperationSpec[torch.Tensor]:
    r"""Copy the root's tensor to all ranks, or to those of a group.

    .. math:: y_i = x_\mathrm{root}

    Args:
        tensor: :math:`x_i`, equal in shape and dtype on all ranks; only the root's values are used.
            Or a list, tuple or dict of tensors, as one operation: see :ref:`lists-of-tensors`.
        root_rank: The root's rank in the world, the same on all ranks.
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.
        check: Compare verb, dtype and shape with the other ranks before anything is sent.
        out: Tensor into which the result is written, which may be ``tensor`` itself.

    Returns:
        :math:`y_i`: ``out`` or a new tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: There is no such root; it or this rank is not in ``group``.
        DtypeError: The dtype cannot be sent.
        MismatchError: Another rank names another root, dtype or shape.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(3) as world:
        ...     world.run(lambda: bf.broadcast(torch.tensor([bf.rank()]), root_rank=2).item())
        [2, 2, 2]
    """
    out, members = single_output("broadcast", out), members_of("broadcast", group)
    check_tensor("broadcast", tensor)
    root = check_member("broadcast", "root_rank", root_rank, members)
    return plan_broadcast(members, tensor, root, name, check, out)


broadcast_nonblocking = nonblocking(broadcast)
broadcast_ = in_place(broadcast)
broadcast_nonblocking_ = nonblocking(broadcast_)


def plan_broadcast(
    members: ProcessGroup,
    tensor: torch.Tensor,
    root: int,
    name: str | None = None,
    check: bool = False,
    out: torch.Tensor | None = None,
) -> OperationSpec[torch.Tensor]:
    """Plan a broadcast in a group; the arguments have been checked."""
    title = f"broadcast(root_rank={root})" + (f" {name!r}" if name else "")
    form, place = signature_of(title, tensor), members.ranks.index(root)
    gives = members.context.rank == root

    def messages(op: OperationExchanges, own: torch.Tensor) -> Steps[torch.Tensor]:
        value = yield from broadcast_in_group(op, members.ranks, root, own, title)
        return write_result(value, tensor, out)

    def start(_: Tensors, given: torch.Tensor, out: Output) -> StartedCollective[torch.Tensor]:
        assert members.transport is not None
        own, transport = prepare_for_transport(members.transport, given)
        if gives:
            request = transport.ibroadcast(own, place)
            return StartedCollective(request, lambda: _result_of_root(own, given, out))
        if can_write_result(out, own):
            value = out
        else:
            value = empty_on(streams_of(own), own.shape, own.dtype)
        request = transport.ibroadcast(value.detach(), place)
        return StartedCollective(request, lambda: write_result(value, given, out))

    def combine(parts: Tensors, given: torch.Tensor, out: Output) -> torch.Tensor:
        value = parts[place]
        return write_result(detached_copy(value) if out is None else value, given, out)

    ways = CollectiveImplementations(combine, start, gives=gives)
    return members.collective("broadcast", form, (tensor, out), messages, ways, name, check)


def _result_of_root(
    own: torch.Tensor, given: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Return the root's result: a copy of its tensor, or the tensor itself if in place."""
    if out is not None and is_same_memory(out, own):
        return out
    if out is None or out.untyped_storage().data_ptr() == own.untyped_storage().data_ptr():
        own = detached_copy(own)  # which may overlap with the result
    return write_result(own, given, out)


def broadcast_in_group(
    op: OperationExchanges, group: Sequence[int], root: int, own: torch.Tensor, title: str
) -> Steps[torch.Tensor]:
    """Send the root's contiguous tensor to a group, a large one by scatter and allgather."""
    here = op.rank == root
    if goes_directly(group, own):
        form, whole = signature_of(title, own), [own] * len(group)
        got = yield from exchange_from_root(op, group, root, form, whole if here else None, own)
        return detached_copy(own) if here else got
    form, parts = signature_of_parts(title, own), own.view(-1).tensor_split(len(group))
    part = yield from exchange_from_root(op, group, root, form, parts if here else None, own)
    return (yield from gather_parts(op, group, form, part, own.shape))
