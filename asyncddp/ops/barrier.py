"""``barrier``: nobody leaves before all have come."""

from __future__ import annotations

from asyncddp.context import current
from asyncddp.engine import Desk, Form, Program, Steps
from asyncddp.ops.forms import nonblocking, verb

__all__ = ["barrier", "barrier_nonblocking"]


@verb
def barrier(*, name: str | None = None) -> Program[None]:
    """Wait until all ranks are here; verbs under way stay under way.

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
    form = Form("barrier" + (f" {name!r}" if name else ""), "uint8", ())

    def steps(desk: Desk) -> Steps[None]:
        """Meet."""
        yield from desk.collective(range(context.size), form, context.transport.ibarrier)

    return Program("barrier", steps, name, ordered=True)


barrier_nonblocking = nonblocking(barrier)
