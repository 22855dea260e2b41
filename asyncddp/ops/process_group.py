"""Process groups: sets of ranks that call collectives together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from asyncddp.context import Context, current
from asyncddp.context.context import EVERYONE, MACHINE
from asyncddp.device.stream_registry import stream_ordering_of
from asyncddp.engine import (
    ExchangeSignature,
    OperationExchanges,
    OperationSpec,
    SlotCall,
    SlotExchange,
    Steps,
    run_collective,
)
from asyncddp.engine.messages import COLLECTIVE, MACHINE_COLLECTIVE, MACHINE_OF_VIEW
from asyncddp.engine.slot_exchange import Combine, Start
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.ops.validation import check_rank, prepare_for_transport
from asyncddp.rank_list_text import list_ranks
from asyncddp.tensors.allocation import empty
from asyncddp.transport import Transport
from asyncddp.transport.cuda.negotiation import close_device_transports, negotiate_from_config

R = TypeVar("R")

Tensors: TypeAlias = Sequence[torch.Tensor]
Output: TypeAlias = torch.Tensor | None
"""Tensor into which a result goes, or None for a new one."""


@dataclass(frozen=True)
class CollectiveImplementations(Generic[R]):
    """Implementations of one collective, each optional: in shared memory, and by the transport.

    Attributes:
        combine: Computes the result from all ranks' tensors in shared-memory slots.
        start: Starts the transport's collective.
        counts: A number of this rank, such as its rows, that ``start`` gets from all ranks.
        dtype: Dtype of the tensors that ranks write to slots; None for the tensor's own.
        gives: Whether this rank writes a tensor to slots.
        overlaps: Whether the next collective may start before this one has ended.
    """

    combine: Combine[R] | None = None
    start: Start[R] | None = None
    counts: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    gives: bool = True
    overlaps: bool = False


@dataclass(frozen=True, eq=False, repr=False)
class ProcessGroup:
    """Group of ranks for the ``group`` argument of operations; made by :func:`~asyncddp.new_group`.

    ``rank in group`` tells whether a rank is a member.

    Attributes:
        ranks: Its ranks in the world, ascending.
        context: The context of the rank that created it.
        match_name: Name that counts and matches its collectives, apart from other groups'.
        transport: Transport for collectives among just these ranks; None if there is none.
        view: Number of the view in which it was made, where the run is elastic.
    """

    ranks: Sequence[int]
    context: Context
    match_name: str
    transport: Transport | None = None
    view: int = 0

    @property
    def title(self) -> str:
        """Name for messages, such as "group 1"."""
        return self.match_name[1:-1].removeprefix("collective of ")

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return len(self.ranks)

    @property
    def rank(self) -> int | None:
        """Index of this rank in the group, from 0; None if it is not a member."""
        own = self.context.rank
        return self.ranks.index(own) if own in self.ranks else None

    def operation(
        self,
        verb: str,
        steps: Callable[[OperationExchanges], Steps[R]],
        name: str | None,
        *tensors: torch.Tensor | None,
        check: bool = False,
        slot_call: SlotCall[R] | None = None,
        overlaps: bool = False,
    ) -> OperationSpec[R]:
        """Return the specification of a collective of this group on tensors of one device.

        With ``overlaps`` the steps run at most one collective of the transport, and the next
        collective may start before this one has ended.
        """
        given = [tensor for tensor in tensors if tensor is not None]
        order = stream_ordering_of(*given) if given else None
        return OperationSpec(
            verb,
            steps,
            name,
            ordered=True,
            overlaps=overlaps,
            group=self.match_name,
            check=check,
            stream_ordering=order,
            slot_call=slot_call,
        )

    def collective(
        self,
        verb: str,
        form: ExchangeSignature,
        given: tuple[torch.Tensor, torch.Tensor | None],
        messages: Callable[[OperationExchanges, torch.Tensor], Steps[R]],
        ways: CollectiveImplementations[R],
        name: str | None = None,
        check: bool = False,
    ) -> OperationSpec[R]:
        """Return the specification of a collective: in slots, by the transport, or point to point.

        Args:
            verb: Type of the operation.
            form: Signature that must be equal on all ranks.
            given: This rank's tensor, and the output tensor or None.
            messages: Runs it point to point, on the tensor's values, if the group has no transport
                or this collective no ``start``.
            ways: Ways of running it in slots and by the transport.
            name: For messages.
            check: Compare the signature with the other ranks before anything is sent.
        """
        base, ranks, start, counts = self.transport, self.ranks, ways.start, ways.counts

        def steps(op: OperationExchanges) -> Steps[R]:
            if base is None or start is None:
                op.next_may_start = ways.overlaps  # messages are matched by key
                own, _ = prepare_for_transport(self.context.transport, given[0])
                return (yield from messages(op, own))
            every: list[torch.Tensor] = []
            if counts is not None:
                every, ones = [empty((len(ranks),), counts.dtype)], [1] * len(ranks)
                gather = partial(base.iallgather, counts, every[0], ones)
                yield from op.collective(ranks, form, gather)
            return (yield from run_collective(op, ranks, form, partial(start, every, *given)))

        call = self.slot_call(form, *given, ways)
        return self.operation(
            verb, steps, name, *given, check=check, slot_call=call, overlaps=ways.overlaps
        )

    def slot_call(
        self,
        form: ExchangeSignature,
        tensor: torch.Tensor,
        out: torch.Tensor | None,
        ways: CollectiveImplementations[R],
    ) -> SlotCall[R] | None:
        """Return a collective's call through shared-memory slots; None if slots cannot serve it."""
        slots = self.context.engine.matcher.slots.get(self.match_name)
        dtype, start = ways.dtype or tensor.dtype, ways.start
        small = slots is not None and tensor.numel() * dtype.itemsize <= slots.capacity
        if small and form.device == "cpu" and ways.combine is not None:
            shape = tuple([-1 if size is None else size for size in form.shape])
            exchange = SlotExchange(form, ways.combine, dtype, shape, ways.gives)
        elif start is not None and self.transport is not None:
            exchange = SlotExchange(form, dtype=torch.int64, start=start, counts=ways.counts)
        else:
            return None
        return SlotCall(exchange, tensor, out)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def __repr__(self) -> str:
        return f"<ProcessGroup: {self.title}, {list_ranks(self.ranks)}>"


def members_of(verb: str, group: ProcessGroup | None) -> ProcessGroup:
    """Return the group in which a verb is called; None means the group of all ranks.

    Raises:
        ArgumentError: It is no group, was made before the last ``init()``, or lacks this rank.
    """
    context = current()
    if group is None:
        everyone: ProcessGroup | None = context.extensions.get(EVERYONE)
        if everyone is None:
            _require_part(verb, context)
            everyone = context.extensions[EVERYONE] = _group_of_members(context)
        return everyone
    if not isinstance(group, ProcessGroup):
        raise ArgumentError(
            f"{verb}: argument group: expected None or what new_group returns, got {group!r}"
        )
    if group.context is not context:
        raise ArgumentError(
            f"{verb}: argument group: expected a group that this rank has made since init(), got "
            f"{group!r} of before; call new_group again"
        )
    _require_first_processes(verb, group)
    if context.rank not in group:
        raise ArgumentError(
            f"{verb}: argument group: expected a group with rank {context.rank}, which calls this, "
            f"got {group!r}; call it only where rank() in group"
        )
    return group


def require_member(verb: str, context: Context) -> None:
    """Raise an error on a rank that joins a run, for now is alone, and would need others."""
    if context.view_alone is not None:
        raise UsageError(
            f"rank {context.rank}: {verb}: this rank takes a lost rank's place, and is alone until "
            "asyncddp.ElasticState is made; call it afterwards, on all ranks"
        )


def _require_part(verb: str, context: Context) -> None:
    """Raise an error on a rank that has left a run, in which others go on."""
    if context.rank not in context.members:
        raise UsageError(
            f"rank {context.rank}: {verb}: this rank has left the run, in which others go on "
            f"({list_ranks(context.members)}); end its process once state.left is True"
        )


def _require_first_processes(verb: str, group: ProcessGroup) -> None:
    """Raise an ArgumentError if another process has become a member since the group was made."""
    membership = group.context.engine.membership
    if membership is None or not membership.replaced:
        return
    since = membership.replaced
    replaced = [rank for rank in group.ranks if since.get(rank, 0) > group.view]
    if replaced:
        raise ArgumentError(
            f"{verb}: argument group: expected a group of processes that take part, got {group!r} "
            f"of before; another process has taken the place of {list_ranks(replaced)} since: call "
            "new_group again, on all ranks"
        )


def _group_of_members(context: Context) -> ProcessGroup:
    """Return the group of all ranks, or of the members of an elastic run's later view.

    That one has no transport of its own yet: its collectives go by point-to-point messages.
    """
    membership = context.engine.membership
    if membership is None or membership.view.number == 0:
        return ProcessGroup(range(context.size), context, COLLECTIVE, context.transport)
    return ProcessGroup(membership.view.members, context, membership.collective)


def ranks_of_machine(context: Context) -> ProcessGroup:
    """Return the group of the ranks of this machine, in an elastic run of those that take part.

    Once one of them has left or was replaced, collectives go by point-to-point messages.
    """
    machine: ProcessGroup | None = context.extensions.get(MACHINE)
    if machine is None:
        _require_part("local_allreduce", context)
        machine = context.extensions[MACHINE] = _members_on_machine(context)
    return machine


def _members_on_machine(context: Context) -> ProcessGroup:
    ranks, membership = context.local_ranks, context.engine.membership
    changes = {} if membership is None else membership.last_change
    changed = max((changes.get(rank, 0) for rank in ranks), default=0)
    if not changed:
        return ProcessGroup(ranks, context, MACHINE_COLLECTIVE, context.local_transport)
    there = tuple(rank for rank in ranks if rank in context.members)
    return ProcessGroup(there, context, MACHINE_OF_VIEW.format(changed))


def open_group(context: Context, ranks: Sequence[int], name: str, tag: int) -> ProcessGroup:
    """Open a group that has its own transport among its ranks; collective over these ranks.

    ``name`` matches the group's collectives; ``tag`` distinguishes groups that are opened at the
    same time.
    """
    with context.engine.lock:
        transport = context.transport.split_members(ranks, tag)
        transport.machine_id()  # tells it which peers are near; collective
        transport.device_watches = context.transport.device_watches
        negotiate_from_config(
            transport,
            context.config,
            machine=context.machine_rank,
            rank_on_host=context.machines.rank_on_host,
            all_see_gpus=context.machines.all_see_gpus,
        )
        slots = transport.collective_slots
        if slots is not None:
            slots.ranks = ranks
            context.engine.matcher.slots[name] = slots
        context.group_transports.append(transport)
    return ProcessGroup(ranks, context, name, transport)


def close_group(group: ProcessGroup) -> None:
    """Close the transport of a group opened by :func:`open_group`; may be called again."""
    context, transport = group.context, group.transport
    with context.engine.lock:
        if transport is not None and transport in context.group_transports:
            context.group_transports.remove(transport)
            context.engine.matcher.slots.pop(group.match_name, None)
            close_device_transports(transport)
            transport.close()


def check_member(verb: str, argument: str, rank: Any, group: ProcessGroup) -> int:
    """Return a rank of the world as an int; raise ArgumentError unless it is in the group.

    On a rank that joins a run, and for now is alone, it is this rank itself.
    """
    context = current()
    number = check_rank(verb, argument, rank, context.size)
    if number not in group:
        if context.transport.joining is not None:
            return context.rank
        raise ArgumentError(
            f"{verb}: argument {argument}: expected a rank of the world that is in the group, got "
            f"{rank!r}; its members are {list_ranks(group.ranks)}"
        )
    return number
