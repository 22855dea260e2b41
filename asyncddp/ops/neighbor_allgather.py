"""``neighbor_allgather``: concatenates the in-neighbours' tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.context import Context, current
from asyncddp.device.stream_registry import stream_ordering_of, streams_of
from asyncddp.engine import OperationExchanges, OperationSpec, Steps
from asyncddp.errors import ArgumentError
from asyncddp.ops.gather_fast_path import (
    find_gather_path,
    gather_on_host,
    register_gather_path,
)
from asyncddp.ops.tensor_list_call import ListKind
from asyncddp.ops.validation import (
    check_rank,
    check_tensor,
    prepare_for_transport,
    signature_of,
    write_result,
)
from asyncddp.ops.variants import nonblocking, of_tensors


@of_tensors(ListKind.GATHERING, fast_path=find_gather_path)
def neighbor_allgather(
    tensor: torch.Tensor,
    *,
    src_ranks: Sequence[int] | None = None,
    dst_ranks: Sequence[int] | None = None,
    name: str | None = None,
    round: int | None = None,  # noqa: A002 - the field's word
    check: bool = False,
) -> OperationSpec[torch.Tensor]:
    r"""Concatenate the in-neighbours' tensors along the first dimension, excluding this rank's.

    .. math:: y_i = (x_j)_{j \in \mathrm{src}(i)}

    Args:
        tensor: :math:`x_i`, of at least one dimension; the first may differ between ranks and be 0.
            Or a list, tuple or dict of tensors, as one operation: see :ref:`lists-of-tensors`.
        src_ranks: The ranks to receive from, in the order wanted; by default the in-neighbours in
            the topology, ascending. Both lists or neither.
        dst_ranks: The ranks to send to.
        name: Matches this call with the neighbours' calls of that name; by call order if None.
        round: Round of a time-varying topology; by default the number of earlier uses of the name.
        check: Return only after all receivers have confirmed that they expect the tensor.

    Returns:
        :math:`y_i`; with no in-neighbour a tensor whose first dimension is 0.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: A 0-dim tensor, one list without the other, a rank that cannot be.
        DtypeError: The dtype cannot be sent.
        MismatchError: A neighbour calls another verb, dtype, shape or neighbours under this name.
        WaitTimeoutError: A neighbour has not come by the deadline.

    Example:
        >>> import asyncddp as bf, topology, torch
        >>> def from_the_left():
        ...     bf.set_topology(topology.ring(3, style="right"))
        ...     return bf.neighbor_allgather(torch.tensor([bf.rank()])).tolist()
        >>> with bf.local_world(3) as world:
        ...     world.run(from_the_left)
        [[2], [0], [1]]
    """
    context = current()
    title = "neighbor_allgather"
    check_tensor(title, tensor, min_ndim=1)
    if (src_ranks is None) != (dst_ranks is None):
        raise ArgumentError(f"{title}: arguments src_ranks, dst_ranks: expected both or neither")
    lists = ("src_ranks", src_ranks), ("dst_ranks", dst_ranks)
    given = [_checked_peers(context, title, argument, ranks) for argument, ranks in lists]

    def steps(op: OperationExchanges) -> Steps[torch.Tensor]:
        sources, targets = given
        op.tolerates_loss = True
        if src_ranks is None:
            schedule = context.topologies.of_round(*op.key)
            neighbors = schedule.neighbors(context.rank, op.key.step if round is None else round)
            sources, targets = list(neighbors.src_weights), list(neighbors.dst_ranks)
        own, _ = prepare_for_transport(context.transport, tensor)
        form = signature_of(title, own, ragged=True)
        if streams_of(own) is None:
            shapes = context.extensions.setdefault("last shapes of neighbor_allgather", {})
            rows = yield from gather_on_host(op, form, sources, targets, own, shapes)
            if src_ranks is None and not op.check:
                register_gather_path(context, name, op.key.name, own)
            return write_result(rows, tensor, None)
        request = op.exchange(form, sources, targets, streams_of(own))
        for peer in targets:
            op.send(request, peer, own)
        for peer in sources:
            yield request.receives[peer]
        yield request.sent()
        receives = [request.receives[peer] for peer in sources]
        parts = [receive.take() for receive in receives if not receive.left]
        return write_result(torch.cat([own[:0], *parts]), tensor, None)

    order = stream_ordering_of(tensor)
    return OperationSpec(title, steps, name, check=check, stream_ordering=order)


neighbor_allgather_nonblocking = nonblocking(neighbor_allgather)


def _checked_peers(
    context: Context, verb: str, argument: str, ranks: Sequence[int] | None
) -> Sequence[int]:
    """Check that an argument names other ranks, each once; return an empty tuple for None."""
    given = () if ranks is None else ranks
    peers = [check_rank(verb, argument, rank, context.size, but=context.rank) for rank in given]
    if len(set(peers)) != len(peers):
        raise ArgumentError(f"{verb}: argument {argument}: expected each rank once, got {peers}")
    return peers
