"""``join``: context manager for training with different numbers of batches per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from asyncddp.algorithms import CommunicationPattern, CommunicationTiming
from asyncddp.algorithms.join_coordinator import JoinCollectiveKind, JoinCoordinator
from asyncddp.algorithms.model_averager import ModelAverager
from asyncddp.algorithms.phases.update_in_backward import UpdateInBackwardPhase
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError, UsageError
from asyncddp.ops.allreduce_tensors import average_tensors
from asyncddp.ops.uneven_inputs import average_active_ranks_nonblocking_
from asyncddp.optim.distributed_optimizer import DistributedOptimizer
from asyncddp.optim.parameter_sync import broadcast_parameters
from asyncddp.optim.state_broadcast import broadcast_optimizer_state


@contextmanager
def join(*optimizers: DistributedOptimizer, broadcast_last: bool = False) -> Iterator[None]:
    r"""Let ranks have different numbers of batches: no rank waits for one that has finished.

    With T the ranks that still train, neighbours mix with

    .. math:: w'_{ii} = w_{ii} + \sum_{j \notin T} w_{ij}, \qquad w'_{ij} = w_{ij}\ (j \in T),

    and global averages, of gradients or parameters, are formed over T. A rank that comes to the end
    of the block answers the others until all are there; then all leave together, and count rounds
    and passes alike. The mean over T is kept where the weights are symmetric, as on ``ring`` or
    with ``metropolis_weights``; on directed graphs such as ``exponential_two`` it moves a little.

    Before each round all ranks say whether they train: one ``allreduce`` of a number for each rank,
    for which all wait, ``ASYNCDDP_TIMEOUT`` at most. Methods on windows have no such rounds: a rank
    that is done waits for the others at the end, so long at most, and its neighbours give its
    weight to themselves once they have made more steps.

    Inside the block, call no other collective, use several optimizers in the same order on all
    ranks, and leave ``communication`` as it is. An exception leaves the block at once, and tells
    nobody; the others fail as they always do where a rank does not come.

    Where all ranks hold one model, as with ``gradient_allreduce``, those that were done earlier get
    parameters, optimizer state and options of a rank that was last. Where they hold one after each
    round, as with ``diloco``, those that are done take it over then. Otherwise each keeps its own.

    Args:
        *optimizers: The distributed optimizers that are used in the block.
        broadcast_last: Give all ranks the average model of those that trained last.

    Raises:
        ArgumentError: Something else was given, or a communication that needs all ranks.
        UsageError: One of them is in such a block already, or is autotuning.
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
    context = checked[0]._averager.context
    if context.size == 1:
        yield
        return
    members = [_JoinableOptimizer(optimizer) for optimizer in checked]
    coordinator = JoinCoordinator(context, [member.averager.label for member in members])
    for member in members:
        member.averager.join_coordinator = coordinator
    try:
        yield
        _shadow_active_ranks(members, coordinator)
        for member in members:
            _take_all_back(member.averager)
    finally:
        for member in members:
            member.averager.join_coordinator = None
            member.step_counter.remove()
    _synchronize_at_end(members, coordinator, broadcast_last=broadcast_last)


class _JoinableOptimizer:
    """Distributed optimizer within a ``join`` block, which counts its steps."""

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self.optimizer = optimizer
        self.averager, self.phase = optimizer._averager, optimizer._phase
        self.has_replicated_model = self.averager.algorithm.replicates_model
        self.steps = 0
        self.step_counter = optimizer.register_step_post_hook(self._count)

    def _count(self, *step: Any) -> None:
        self.steps += 1


def _checked(optimizers: Sequence[Any]) -> Sequence[DistributedOptimizer]:
    if not optimizers:
        raise ArgumentError("join: expected the distributed optimizers of the block, got none")
    for optimizer in optimizers:
        if not isinstance(optimizer, DistributedOptimizer):
            raise ArgumentError(
                f"join: expected a DistributedOptimizer, got {type(optimizer).__name__}; wrap the "
                "optimizer first, and give the wrapper"
            )
        averager = optimizer._averager
        given_twice = sum(other is optimizer for other in optimizers) > 1
        if averager.join_coordinator is not None or given_twice:
            raise UsageError(
                f"join: {averager.label} is in a join block already; give each optimizer once, to "
                "one block around its loop"
            )
        if optimizer.autotune is not None and not optimizer.autotune.done:
            raise UsageError(
                f"join: {averager.label} is autotuning, by steps that all ranks make; begin the "
                "block once optimizer.autotune.done is True, or make it without autotune"
            )
        _check_supports_join(optimizer)
    return optimizers


def _check_supports_join(optimizer: DistributedOptimizer) -> None:
    averager = optimizer._averager
    if not averager.communication.supports_join:
        raise ArgumentError(
            f"join: {averager.communication.name} needs all ranks in every round; expected a "
            "communication that goes on without those that are done, such as neighbor_allreduce or "
            "allreduce"
        )
    if averager.algorithm.when is CommunicationTiming.INTERVAL:
        raise ArgumentError(
            f"join: {averager.algorithm.name} averages by the clock, and waits for no rank; call "
            "abort() on all ranks where they have no more batches, without join"
        )
    is_global = averager.communication.how is CommunicationPattern.GLOBAL
    if is_global and isinstance(optimizer._phase, UpdateInBackwardPhase):
        raise ArgumentError(
            "join: with update_in_backward=True and a global communication, buckets go in the "
            "order of the backward pass, which a rank that is done cannot know; expected "
            "update_in_backward=False or communication='neighbor_allreduce'"
        )
    if averager.force_barrier:
        raise ArgumentError(
            f"join: with force_barrier {averager.label} waits for all ranks, and so for one that "
            "is done; expected force_barrier=False"
        )


def _shadow_active_ranks(members: list[_JoinableOptimizer], coordinator: JoinCoordinator) -> None:
    """Take part in the operations of active ranks until all ranks have finished."""
    for member in members:
        member.phase.conclude()
        member.averager.windows.conclude()
    by_label = {member.averager.label: member for member in members}
    while (notification := coordinator.wait_for_notification()).active_ranks:
        if notification.collective is JoinCollectiveKind.LOSS_MEAN:
            coordinator.shadow_loss_average(notification)
        else:
            member = by_label[notification.label]
            member.phase.rebuild_if_changed()
            averager = member.averager
            averager.communication.shadow_round(averager, notification.active_ranks)


def _take_all_back(averager: ModelAverager) -> None:
    """Restart the method's state with all ranks, if some had finished earlier."""
    if averager.communication.supports_join and not averager.communication.asynchronous:
        row = averager.communication.row_of_round(averager, averager.round)
        averager.restart_if_changed(None, row)


def _synchronize_at_end(
    members: list[_JoinableOptimizer], coordinator: JoinCoordinator, *, broadcast_last: bool
) -> None:
    """Copy counters, and if needed the model, from the last active ranks to all."""
    steps = sum(member.steps for member in members)
    carried = [member.phase.accumulation.carried_passes for member in members]
    completed = [member.optimizer._switcher.steps for member in members]
    gathered = coordinator.allgather_integers([steps, *carried, *completed])
    counts = coordinator.participation_counts
    reached = [(count, row[0]) for count, row in zip(counts, gathered, strict=True)]
    last = [rank for rank, progress in enumerate(reached) if progress == max(reached)]
    if max(reached) == (0, 0):
        return
    for index, member in enumerate(members):
        member.phase.accumulation.carried_passes = gathered[last[0]][1 + index]
        member.optimizer._switcher.steps = gathered[last[0]][1 + len(members) + index]
        context = member.averager.context
        if member.has_replicated_model and len(last) < context.size:
            with use(context):
                broadcast_parameters([p for _, p in member.phase.named_parameters], last[0])
                broadcast_optimizer_state(member.optimizer, last[0])
        elif broadcast_last and not member.has_replicated_model:
            average = partial(
                average_active_ranks_nonblocking_, active_ranks=last, name=member.averager.label
            )
            with use(context):
                average_tensors([p for _, p in member.phase.named_parameters], average)
