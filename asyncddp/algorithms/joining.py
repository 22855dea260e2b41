"""Who still trains: asked of all ranks before each round, while they are in ``join``."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch

from asyncddp.context import Context
from asyncddp.context.context import use
from asyncddp.errors import ArgumentError, MismatchError
from asyncddp.memory.allocate import values, zeros
from asyncddp.ops.allreduce import allreduce
from asyncddp.ops.joining import average_among

__all__ = ["Act", "Attendance", "Call"]


class Act(IntEnum):
    """What those who train are about to do."""

    ROUND = 0
    """A round of averaging."""
    MEAN = 1
    """The mean of a loss."""


class Call(NamedTuple):
    """What the ranks that train have announced.

    Attributes:
        training: Those ranks, ascending; none when all are done.
        label: Whose round it is.
        act: What they do.
    """

    training: tuple[int, ...]
    label: str
    act: Act


class Attendance:
    """The roll that is called before each round; one small message on every rank.

    A rank that trains says what it is about to do, one that is done says so, and all learn of all.

    Args:
        context: The world.
        labels: The wrappers of the ranks, in one order everywhere.

    Attributes:
        present: How often each rank was there to train.
    """

    def __init__(self, context: Context, labels: Sequence[str]) -> None:
        self._context, self._labels = context, list(labels)
        self.present = [0] * context.size
        self._name = f"join of {', '.join(labels)}"

    def train(self, label: str, act: Act) -> tuple[int, ...]:
        """Say that this rank trains.

        Args:
            label: Whose round it is about to begin.
            act: What it does.

        Returns:
            The ranks that do, ascending.

        Raises:
            MismatchError: Others are about to do something else.
            PeerError: A peer failed, or is not in ``join``.
        """
        return self._called(1 + len(Act) * self._labels.index(label) + act).training

    def stand_by(self) -> Call:
        """Say that this rank is done, and learn what the others are about to do.

        Raises:
            MismatchError: They disagree.
            PeerError: A peer failed, or is not in ``join``.
        """
        return self._called(0)

    def mean(self, label: str, loss: torch.Tensor) -> torch.Tensor:
        """The average of a loss over the ranks that train.

        Args:
            label: Whose loss.
            loss: One number, of this rank, which trains.

        Raises:
            ArgumentError: It is more than one number.
            PeerError: A peer failed, or does something else.
        """
        if loss.numel() != 1:
            raise ArgumentError(
                "join: expected a closure that gives one number as its loss, got a tensor of shape "
                f"{tuple(loss.shape)}"
            )
        training = self.train(label, Act.MEAN)
        with use(self._context):
            if len(training) == self._context.size:
                return allreduce(loss)
            # Ranks that are done have no loss, whose device they could follow: on the host.
            mean = average_among(loss.cpu().double().reshape(()), len(training), name=label)
        return mean.to(loss).reshape(loss.shape)

    def attend_mean(self, call: Call) -> None:
        """Take part in the average of a loss, on a rank that is done."""
        with use(self._context):
            nothing = zeros((), torch.float64)
            average_among(nothing, len(call.training), name=call.label)

    def tally(self, numbers: Sequence[int]) -> list[list[int]]:
        """Show numbers to all: element r is rank r's."""
        shape = self._context.size, len(numbers)
        rows = zeros(shape, torch.int64)
        rows[self._context.rank] = values(list(numbers), torch.int64)
        with use(self._context):
            every: list[list[int]] = allreduce(rows, average=False, name=self._name).tolist()
        return every

    def _called(self, code: int) -> Call:
        codes = [row[0] for row in self.tally([code])]
        training = tuple(rank for rank, said in enumerate(codes) if said)
        if not training:
            return Call((), "", Act.ROUND)
        first = codes[training[0]]
        for rank in training:
            if codes[rank] != first:
                raise MismatchError(
                    f"rank {self._context.rank}: {self._name}: rank {training[0]} is about to "
                    f"{self._said(first)}, but rank {rank} to {self._said(codes[rank])}; use the "
                    "optimizers in the same order on all ranks"
                )
            self.present[rank] += 1
        place, act = divmod(first - 1, len(Act))
        return Call(training, self._labels[place], Act(act))

    def _said(self, code: int) -> str:
        place, act = divmod(code - 1, len(Act))
        what = "begin a round" if Act(act) is Act.ROUND else "average a loss"
        return f"{what} of {self._labels[place]}"
