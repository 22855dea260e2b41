"""``join``: ranks with different numbers of batches train together and end together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from asyncddp.algorithms import How, What
from asyncddp.algorithms.joining import Act, Attendance, Call
from asyncddp.algorithms.rhythms.in_backward import InBackward
from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.memory.buckets import FlatBucket, partition
from asyncddp.ops.joining import average_among
from asyncddp.optim.optimizer import DistributedOptimizer
from asyncddp.optim.parameters import broadcast_parameters
from asyncddp.optim.state import broadcast_optimizer_state

__all__ = ["join"]

_CAP = 32 << 20  # bytes of parameters that are averaged at a time


@contextmanager
def join(*optimizers: DistributedOptimizer, broadcast_last: bool = False) -> Iterator[None]:
    r"""Let ranks have different numbers of batches: none waits for a rank that is done.

    With T the ranks that still train, neighbours mix with

    .. math:: w'_{ii} = w_{ii} + \sum_{j \notin T} w_{ij}, \qquad w'_{ij} = w_{ij}\ (j \in T),

    so that nothing is drawn towards a model that stands still, and global averages, of gradients or
    parameters, are formed over T. A rank that comes to the end of the block answers the others
    until all are there; then all leave together, and count rounds and passes alike.

    Rows of :math:`W'` sum to one. Its columns do where the weights are symmetric, as on ``ring`` or
    with ``metropolis_weights``; on directed graphs such as ``exponential_two`` the mean over T then
    moves a little, by as much as ranks that are done gave and took unequally.

    Before each round all ranks say whether they train: one ``allreduce`` of a number for each rank,
    for which all wait. Outside the block nothing of it is paid. No rank may need longer between
    two rounds than ``ASYNCDDP_TIMEOUT``. Methods on windows have no such rounds: a rank that is
    done waits for the others at the end, so long at most, and its neighbours give its weight to
    themselves once they have made more steps.

    Inside the block, call no other collective verb, use several optimizers in the same order on all
    ranks, and leave ``communication`` as it is. An exception leaves the block at once, and
    tells nobody; the others fail as they always do where a rank does not come.

    Where all ranks hold one model, as with ``gradient_allreduce``, those that were done earlier get
    parameters, optimizer state and options of a rank that was last. Otherwise each keeps its own.

    Args:
        *optimizers: The distributed optimizers that are used in the block.
        broadcast_last: Give all ranks the average model of those that trained last.

    Raises:
        ArgumentError: Something else was given, or a communication that needs all ranks.
        UsageError: One of them is in such a block already.
        MismatchError: A rank does something else.
        PeerError: A rank failed.

    Example:
        >>> import asyncddp as bf, torch
        >>> def train():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        ...     optimizer = bf.DistributedOptimizer(optimizer, model)
        ...     with bf.join(optimizer):
        ...         for _ in range(1 + bf.rank()):
        ...             optimizer.zero_grad()
        ...             model(torch.ones(1, 1)).sum().backward()
        ...             optimizer.step()
        ...     return optimizer.round
        >>> with bf.local_world(3) as world:
        ...     world.run(train)
        [3, 3, 3]
    """
    checked = _checked(optimizers)
    context = checked[0]._mixer.context
    if context.size == 1:
        yield
        return
    members = [_Member(optimizer) for optimizer in checked]
    attendance = Attendance(context, [member.mixer.label for member in members])
    for member in members:
        member.enter(attendance)
    try:
        yield
        _stand_by(members, attendance)
    finally:
        for member in members:
            member.leave()
    _even_out(members, attendance, broadcast_last=broadcast_last)


class _Member:
    """An optimizer in ``join``: what it needs of its parts, and the count of its steps."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        self.mixer, self.rhythm = optimizer._mixer, optimizer._rhythm
        self.steps = 0
        self._counter = optimizer.register_step_post_hook(self._count)

    def _count(self, *step: Any) -> None:
        del step
        self.steps += 1

    def enter(self, attendance: Attendance) -> None:
        """Ask who trains before each round from now on."""
        self.mixer.attendance = attendance

    def leave(self) -> None:
        """Never more."""
        self.mixer.attendance = None
        self._counter.remove()

    def answer(self, call: Call, attendance: Attendance) -> None:
        """Do this rank's part of what the others do."""
        if call.act is Act.MEAN:
            attendance.attend_mean(call)
            return
        self.rhythm.refresh()
        self.mixer.communication.stand_in(self.mixer, self.rhythm.flats(), call.training)

    @property
    def one_model(self) -> bool:
        """Whether all ranks are to hold the same parameters."""
        return self.mixer.algorithm.what is What.GRADIENT


def _checked(optimizers: Sequence[Any]) -> Sequence[DistributedOptimizer]:
    """Insist on distributed optimizers, each once, that can go on among some of the ranks."""
    if not optimizers:
        raise ArgumentError("join: expected the distributed optimizers of the block, got none")
    for optimizer in optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            raise ArgumentError(
                f"join: expected a DistributedOptimizer, got {type(optimizer).__name__}; wrap the "
                "optimizer first, and give the wrapper"
            )
        label = optimizer._mixer.label
        if optimizer._mixer.attendance is not None or sum(o is optimizer for o in optimizers) > 1:
            raise UsageError(
                f"join: {label} is in a join block already; give each optimizer once, to one block "
                "around its loop"
            )
        _refuse_what_needs_all(optimizer)
    return optimizers


def _refuse_what_needs_all(optimizer: DistributedOptimizer) -> None:
    """Insist on rounds that can go on among some of the ranks."""
    mixer = optimizer._mixer
    if not mixer.communication.joins:
        raise ArgumentError(
            f"join: {mixer.communication.name} needs all ranks in every round; expected a "
            "communication that goes on without those that are done, such as neighbor_allreduce or "
            "allreduce"
        )
    if isinstance(optimizer._rhythm, InBackward) and mixer.communication.how is How.GLOBAL:
        raise ArgumentError(
            "join: with update_in_backward=True and a global communication, buckets go in the "
            "order of the backward pass, which a rank that is done cannot know; expected "
            "update_in_backward=False or communication='neighbor_allreduce'"
        )
    if mixer.force_barrier:
        raise ArgumentError(
            f"join: with force_barrier {mixer.label} waits for all ranks, and so for one that is "
            "done; expected force_barrier=False"
        )


def _stand_by(members: list[_Member], attendance: Attendance) -> None:
    """Answer those who train, until nobody does."""
    for member in members:
        member.rhythm.conclude()
        member.mixer.windows.conclude()
    named = {member.mixer.label: member for member in members}
    while (call := attendance.stand_by()).training:
        named[call.label].answer(call, attendance)


def _even_out(members: list[_Member], attendance: Attendance, *, broadcast_last: bool) -> None:
    """Give all ranks the counts, and where it is due the model, of those that trained last."""
    steps = sum(member.steps for member in members)
    carried = [member.rhythm.passes.carried for member in members]
    every = attendance.tally([steps, *carried])
    reached = [(there, row[0]) for there, row in zip(attendance.present, every, strict=True)]
    last = [rank for rank, place in enumerate(reached) if place == max(reached)]
    if max(reached) == (0, 0):
        return
    for index, member in enumerate(members):
        member.rhythm.passes.carried = every[last[0]][1 + index]
        context = member.mixer.context
        if member.one_model and len(last) < context.size:
            with use(context):
                broadcast_parameters([p for _, p in member.rhythm.named], last[0])
                broadcast_optimizer_state(member.optimizer, last[0])
        elif broadcast_last and not member.one_model:
            tensors = [parameter.data for _, parameter in member.rhythm.named]
            _take_average(context, tensors, last, member.mixer.label)


def _take_average(
    context: Context, tensors: list[torch.Tensor], last: Sequence[int], label: str
) -> None:
    """Replace tensors by their averages over the ranks ``last``."""
    for indices in partition(tensors, _CAP):
        bucket = FlatBucket([tensors[index] for index in indices])
        if context.rank in last:
            for view, index in zip(bucket.views, indices, strict=True):
                view.copy_(tensors[index])
        with use(context):
            bucket.flat.copy_(average_among(bucket.flat, len(last), name=label))
        for view, index in zip(bucket.views, indices, strict=True):
            tensors[index].copy_(view)
