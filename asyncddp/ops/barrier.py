"""``barrier``: wait until all ranks, or those of a group, have called it."""

from __future__ import annotations

from collections.abc import Sequence

from asyncddp.engine import (
    ExchangeSignature,
    OperationExchanges,
    OperationSpec,
    SlotCall,
    SlotExchange,
    Steps,
)
from asyncddp.ops.group_exchange import signal_in_ring, wait_in_ring
from asyncddp.ops.process_group import ProcessGroup, members_of
from asyncddp.ops.variants import collective, nonblocking


@collective
def barrier(*, group: ProcessGroup | None = None, name: str | None = None) -> OperationSpec[None]:
    """Wait until all ranks, or those of a group, have called this; other operations go on.

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
    ranks, transport = members.ranks, members.transport
    form = ExchangeSignature("barrier" + (f" {name!r}" if name else ""), "uint8", ())

    def steps(op: OperationExchanges) -> Steps[None]:
        if transport is None:
            yield from _meet(op, ranks, form.verb)
        else:
            yield from op.collective(ranks, form, transport.ibarrier)

    call = SlotCall(SlotExchange(form, lambda parts, given, out: None))
    return members.operation("barrier", steps, name, slot_call=call)


def _meet(op: OperationExchanges, group: Sequence[int], verb: str) -> Steps[None]:
    """Run the dissemination barrier of Hensgen, Finkel and Manber, 1988, in log2(n) rounds.

    In round k rank i tells rank :math:`i + 2^k`, and hears from :math:`i - 2^k` of all before it.
    """
    distance = 1
    while distance < len(group):
        yield from wait_in_ring(signal_in_ring(op, group, verb, distance))
        distance *= 2
