"""Contexts of subsets of the ranks, in which a subset communicates as if it were the world."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from asyncddp.config import Config
from asyncddp.context.context import Context, use
from asyncddp.engine.replica_agreement import ReplicaAgreement
from asyncddp.timeline.tracer import GroupTracer
from asyncddp.transport import Transport
from asyncddp.transport.loopback import LoopbackTransport


def split_context(context: Context, ranks: Sequence[int]) -> Context | None:
    """Create the context of a rank group, whose members are numbered from 0; collective.

    All ranks of ``context`` call it, between the same two collectives. Inside
    ``use(split_context(...))`` the group is the world: verbs, wrappers and windows work as they do
    among all ranks, and never match those of other contexts. It is closed with ``context``.

    Args:
        context: The context to split.
        ranks: The ranks of the group, ascending, the same on all ranks.

    Returns:
        The context, or None on ranks that are not in the group.

    Example:
        >>> import asyncddp as bf
        >>> def places():
        ...     group = split_context(bf.current(), [0, 2])
        ...     return group and (group.rank, group.size)
        >>> with bf.local_world(3) as world:
        ...     world.run(places)
        [(0, 2), None, (1, 2)]
    """
    member = context.rank in ranks
    with context.engine.lock:
        transport = context.transport.split(int(member), context.rank)
    if not member:
        context.exit_callbacks.append(transport.close)
        return None
    return _part(context, transport, ranks, context.config)


def split_disjoint(
    context: Context, groups: Sequence[Sequence[int]], agreement: ReplicaAgreement | None = None
) -> Context:
    """Create the context of the group to which this rank belongs; collective.

    As :func:`split_context`, for groups of which each rank is in exactly one, at once. In an
    elastic run such a group needs all of its ranks, but for those that ``agreement`` leaves out.
    """
    mine = next(number for number, ranks in enumerate(groups) if context.rank in ranks)
    with context.engine.lock:
        transport = context.transport.split(mine, context.rank)
    config = replace(context.config, elastic=agreement is not None)
    return _part(context, transport, groups[mine], config, agreement)


def _part(
    context: Context,
    transport: Transport,
    ranks: Sequence[int],
    config: Config,
    agreement: ReplicaAgreement | None = None,
) -> Context:
    """Create the context of a group, which is closed with ``context``, from its transport."""
    tracer = None if context.tracer is None else GroupTracer(context.tracer, ranks)
    machines = context.machines.restricted_to(ranks)
    part = Context(transport, replace(config, timeline=None), machines, tracer, agreement)
    context.exit_callbacks.append(lambda: part.close("its world has ended"))
    context.parts.append((tuple(ranks), part))
    context.tell_parts_of_failures()
    return part


@contextmanager
def alone(context: Context) -> Iterator[None]:
    """Make this rank a world of its own in a ``with`` block, without involving other ranks.

    Example:
        >>> import asyncddp as bf
        >>> def size_inside():
        ...     with alone(bf.current()):
        ...         return bf.size()
        >>> with bf.local_world(2) as world:
        ...     world.run(size_inside)
        [1, 1]
    """
    config, own = replace(context.config, timeline=None), [context.rank]
    part = Context(LoopbackTransport.group(1)[0], config, context.machines.restricted_to(own))
    try:
        with use(part):
            yield
    finally:
        part.close("its rank is not alone any more")
