"""Coordination of ``join`` blocks: before each averaging, ranks agree on which still train."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError, MismatchError
from asyncddp.ops.allreduce import allreduce
from asyncddp.ops.uneven_inputs import average_active_ranks
from asyncddp.tensors.allocation import make_tensor, zeros


class JoinCollectiveKind(Enum):
    """Kind of collective that the active ranks run next inside ``join``."""

    AVERAGING_ROUND = "begin a round"
    LOSS_MEAN = "average a loss"


class NextCollectiveAnnouncement(NamedTuple):
    """Announcement to ranks that wait in ``join``: the next collective of the active ranks."""

    active_ranks: tuple[int, ...]
    """Ranks that still train, ascending; empty when all have joined."""
    label: str
    """Label of the optimizer that runs the collective."""
    collective: JoinCollectiveKind


class JoinCoordinator:
    """Coordinator of ``join``: a small allreduce tells all ranks which ranks still train.

    An active rank announces its next collective, a joined rank announces that it is done.
    ``participation_counts`` counts the collectives in which each rank was active. The labels of the
    optimizers must be in the same order on all ranks.
    """

    def __init__(self, context: Context, labels: Sequence[str]) -> None:
        self._context = context
        self._operations = [(label, kind) for label in labels for kind in JoinCollectiveKind]
        self.participation_counts = [0] * context.size
        self._name = f"join of {', '.join(labels)}"

    def notify(self, label: str, collective: JoinCollectiveKind) -> tuple[int, ...]:
        """Announce the next collective of this active rank; return the active ranks."""
        return self._exchange_codes(1 + self._operations.index((label, collective))).active_ranks

    def wait_for_notification(self) -> NextCollectiveAnnouncement:
        """Announce that this rank has joined; return the active ranks' next collective."""
        return self._exchange_codes(0)

    def average_loss(self, label: str, loss: torch.Tensor) -> torch.Tensor:
        """Average a loss over the active ranks."""
        if loss.numel() != 1:
            raise ArgumentError(
                "join: expected a closure that gives one number as its loss, got a tensor of shape "
                f"{tuple(loss.shape)}"
            )
        active_ranks = self.notify(label, JoinCollectiveKind.LOSS_MEAN)
        with use(self._context):
            if len(active_ranks) == self._context.size:
                return allreduce(loss)
            on_host = loss.cpu().double().reshape(())  # joined ranks know no other device
            mean = average_active_ranks(on_host, active_ranks, name=label)
        return mean.to(loss).reshape(loss.shape)

    def shadow_loss_average(self, notification: NextCollectiveAnnouncement) -> None:
        """Take part in the average of a loss as a joined rank, with weight zero."""
        active_ranks, label, _ = notification
        with use(self._context):
            average_active_ranks(zeros((), torch.float64), active_ranks, name=label)

    def allgather_integers(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gather integers from all ranks: element r of the result is rank r's list."""
        rows = zeros((self._context.size, len(numbers)), torch.int64)
        rows[self._context.rank] = make_tensor(list(numbers), torch.int64)
        with use(self._context):
            gathered: list[list[int]] = allreduce(rows, average=False, name=self._name).tolist()
        return gathered

    def _exchange_codes(self, code: int) -> NextCollectiveAnnouncement:
        codes = [row[0] for row in self.allgather_integers([code])]
        active_ranks = tuple(rank for rank, code in enumerate(codes) if code)
        if not active_ranks:
            return NextCollectiveAnnouncement((), "", JoinCollectiveKind.AVERAGING_ROUND)
        first = codes[active_ranks[0]]
        for rank in active_ranks:
            if codes[rank] != first:
                raise MismatchError(
                    f"rank {self._context.rank}: {self._name}: rank {active_ranks[0]} is about to "
                    f"{self._describe(first)}, but rank {rank} to {self._describe(codes[rank])}; "
                    "use the optimizers in the same order on all ranks"
                )
            self.participation_counts[rank] += 1
        return NextCollectiveAnnouncement(active_ranks, *self._operations[first - 1])

    def _describe(self, code: int) -> str:
        label, collective = self._operations[code - 1]
        return f"{collective.value} of {label}"
