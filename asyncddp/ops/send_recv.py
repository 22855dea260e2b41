"""``send`` and ``recv``: send a tensor from one rank to another."""

from __future__ import annotations

import torch

from asyncddp.context import current
from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import (
    OperationExchanges,
    OperationSpec,
    ShortMessage,
    Steps,
    require_name,
)
from asyncddp.ops.group_exchange import exchange_tensors
from asyncddp.ops.process_group import ProcessGroup, check_member, members_of
from asyncddp.ops.validation import (
    can_receive,
    check_rank,
    check_tensor,
    expected_by,
    prepare_for_transport,
    signature_of,
    write_result,
)
from asyncddp.ops.variants import blocking, nonblocking

_FORM = "send"  # the verb in messages of both ranks


@blocking
def send(
    tensor: torch.Tensor,
    dst_rank: int,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
    check: bool = False,
) -> OperationSpec[None]:
    """Send a tensor to another rank, which must call :func:`~asyncddp.recv`.

    The call returns when the tensor may be changed again, possibly before the other rank has
    called: two ranks that both send first and then receive need non-blocking calls.

    Args:
        tensor: Tensor of any shape.
        dst_rank: The receiver's rank in the world.
        group: A group with both ranks, from :func:`~asyncddp.new_group`; its messages are matched
            separately.
        name: Matches this call with the receiver's of that name; by call order if None. Uses of a
            name are counted for each sender and receiver by itself.
        check: Return only after the receiver has confirmed that it expects the tensor.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No such receiver; it or this rank is not in ``group``.
        DtypeError: The dtype cannot be sent.
        MismatchError: The receiver expects another dtype or shape.
        WaitTimeoutError: The receiver has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> def hand_over():
        ...     if bf.rank() == 0:
        ...         return bf.send(torch.ones(2), 1)
        ...     return bf.recv(torch.empty(2), 0)
        >>> with bf.local_world(2) as world:
        ...     world.run(hand_over)
        [None, tensor([1., 1.])]
    """
    check_tensor("send", tensor)
    peer = _peer("send", "dst_rank", dst_rank, group)
    context = current()

    def steps(op: OperationExchanges) -> Steps[None]:
        own, _ = prepare_for_transport(context.transport, tensor)
        yield from exchange_tensors(op, signature_of(_FORM, own), [], {peer: own}, own)

    label, order = _label(context.rank, peer, group, name), stream_ordering_of(tensor)
    message = ShortMessage.of(signature_of(_FORM, tensor), peer, tensor)
    return OperationSpec("send", steps, label, check=check, stream_ordering=order, message=message)


@blocking
def recv(
    tensor: torch.Tensor | None,
    src_rank: int,
    *,
    group: ProcessGroup | None = None,
    name: str | None = None,
) -> OperationSpec[torch.Tensor]:
    """Receive a tensor from another rank, which must call :func:`~asyncddp.send`.

    Args:
        tensor: Tensor of the sent one's shape and dtype, on a device of the same type, into which
            it is written; None for any tensor of the host.
        src_rank: The sender's rank in the world.
        group: A group with both ranks, from :func:`~asyncddp.new_group`; its messages are matched
            separately.
        name: Matches this call with the sender's of that name; by call order if None.

    Returns:
        ``tensor``, or a new one on the host.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: No such sender; it or this rank is not in ``group``.
        DtypeError: The dtype cannot be sent.
        MismatchError: The sent tensor has another dtype or shape.
        WaitTimeoutError: The sender has not come by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(2) as world:
        ...     world.run(
        ...         lambda: bf.send(torch.arange(3), 1) if bf.rank() == 0 else bf.recv(None, 0)
        ...     )
        [None, tensor([0, 1, 2])]
    """
    if tensor is not None:
        check_tensor("recv", tensor)
    peer = _peer("recv", "src_rank", src_rank, group)
    form, into = expected_by(_FORM, tensor)

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        fits = tensor is not None and can_receive(tensor, into, in_place=True)
        room = {peer: into.detach()} if fits else {}
        got = (yield from exchange_tensors(op, form, [peer], {}, into, room))[peer]
        if tensor is None:
            return got
        return tensor if got is room.get(peer) else write_result(got, tensor, tensor)

    label, order = _label(peer, current().rank, group, name), stream_ordering_of(into)
    message = ShortMessage.of(form, peer, tensor, receives=True)
    return OperationSpec("recv", steps, label, stream_ordering=order, message=message)


send_nonblocking = nonblocking(send)
recv_nonblocking = nonblocking(recv)


def _peer(verb: str, argument: str, rank: int, group: ProcessGroup | None) -> int:
    """Return the peer's rank; raise ArgumentError if it is this rank or not in the group."""
    context, members = current(), members_of(verb, group)
    peer = check_rank(verb, argument, rank, context.size, but=context.rank)
    return check_member(verb, argument, peer, members)


def _label(source: int, target: int, group: ProcessGroup | None, name: str | None) -> str:
    """Return the name that matches the two calls; each pair of ranks has its own."""
    require_name(_FORM, name)
    within = "" if group is None else f" ({group.title})"
    return f"{name or _FORM}.{source}-{target}{within}"
