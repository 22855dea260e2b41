"""``barrier``: wait until all ranks have called it."""

from __future__ import annotations

from asyncddp.context import current
from asyncddp.engine import ExchangeSignature, OperationExchanges, OperationSpec, Steps
from asyncddp.ops.variants import blocking, nonblocking


@blocking
def barrier(*, name: str | None = None) -> OperationSpec[None]:
    """Wait until all ranks have called this; other operations stay under way.

    Args:
        name: For messages; all ranks must give the same.

    Raises:
        NotInitializedError: ``init()`` was not called.
        MismatchError: Another rank calls another collective.
        WaitTimeoutError: A rank has not come by the deadline.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(2) as world:
        ...     world.run(bf.barrier)
        [None, None]
    """
    context = current()
    form = ExchangeSignature("barrier" + (f" {name!r}" if name else ""), "uint8", ())

    def steps(op: OperationExchanges) -> Steps[None]:
        yield from op.collective(range(context.size), form, context.transport.ibarrier)

    return OperationSpec("barrier", steps, name, ordered=True)


barrier_nonblocking = nonblocking(barrier)
