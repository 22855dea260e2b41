"""``barrier``: waits until all ranks, or those of a group, have called it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.engine import (
    ExchangeSignature,
    OperationExchanges,
    OperationSpec,
    StartedCollective,
    Steps,
)
from asyncddp.ops.group_exchange import signal_in_ring, wait_in_ring
from asyncddp.ops.process_group import CollectiveImplementations, ProcessGroup, members_of
from asyncddp.ops.variants import collective, nonblocking
from asyncddp.tensors.allocation import empty


@collective
def barrier(*, group: ProcessGroup | None = None, name: str | None = None) -> OperationSpec[None]:
    """Wait until all ranks, or those of a group, have called it; other operations continue.

    Args:
        group: The ranks that take part, from :func:`~asyncddp.new_group`; all if None.
        name: For messages; all ranks must give the same.

    Raises:
        NotInitializedError: ``init()`` was not called.
        ArgumentError: This rank is not in ``group``.
        MismatchError: Another rank calls another collective.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(bf.barrier)
        [None, None]
    """
    return plan_barrier(members_of("barrier", group), name)


barrier_nonblocking = nonblocking(barrier)


def plan_barrier(members: ProcessGroup, name: str | None = None) -> OperationSpec[None]:
    """Plan a barrier of a group."""
    title, transport = "barrier" + (f" {name!r}" if name else ""), members.transport

    def messages(op: OperationExchanges, _: torch.Tensor) -> Steps[None]:
        return (yield from _meet(op, members.ranks, title))

    def start(*_: object) -> StartedCollective[None]:
        assert transport is not None
        return StartedCollective(transport.ibarrier(), lambda: None)

    form, nothing = ExchangeSignature(title, "uint8", (None,)), empty((0,), torch.uint8)
    ways = CollectiveImplementations(lambda *_: None, start)
    return members.collective("barrier", form, (nothing, None), messages, ways, name)


def _meet(op: OperationExchanges, group: Sequence[int], verb: str) -> Steps[None]:
    """Run the dissemination barrier of Hensgen, Finkel and Manber, 1988, in log2(n) rounds.

    In round k rank i signals rank :math:`i + 2^k`, and waits for the signal of rank
    :math:`i - 2^k`.
    """
    distance = 1
    while distance < len(group):
        yield from wait_in_ring(signal_in_ring(op, group, verb, distance))
        distance *= 2
