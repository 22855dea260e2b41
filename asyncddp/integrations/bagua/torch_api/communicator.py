"""Communicators of Bagua's API (ranks that call collectives together), and reduction operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from asyncddp.context import current
from asyncddp.engine.messages import GROUP_COLLECTIVE
from asyncddp.errors import ArgumentError
from asyncddp.ops.process_group import ProcessGroup
from asyncddp.ops.reduce_op import ReduceOp as LibraryReduceOp

__all__ = ["Communicator", "ReduceOp", "operator_of"]


class ReduceOp(IntEnum):
    """Reduction operator of Bagua's collectives, numbered as in Bagua."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def operator_of(op: Any) -> LibraryReduceOp:
    """Convert one of Bagua's operators, or its number, to the library's."""
    if op not in list(ReduceOp):
        known = ", ".join(f"{one.name} ({one.value})" for one in ReduceOp)
        raise ArgumentError(f"argument op: expected one of {known}, got {op!r}")
    return LibraryReduceOp[ReduceOp(op).name]


@dataclass(frozen=True)
class Communicator:
    """Group of ranks that call collectives together, numbered from 0.

    Attributes:
        ranks: World ranks of the members, ascending.
        group: The library's group of these ranks; None for all ranks.
    """

    ranks: Sequence[int]
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: Sequence[int], name: str) -> Communicator:
        """Make a communicator of some ranks; its unique name matches their calls."""
        context = current()
        if len(ranks) == context.size:
            return cls(ranks)
        return cls(ranks, ProcessGroup(ranks, context, GROUP_COLLECTIVE.format(name)))

    def rank(self) -> int:
        """Return this rank's number in the communicator, or -1 if it is not a member."""
        own = current().rank
        return list(self.ranks).index(own) if own in self.ranks else -1

    def nranks(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def world_rank(self, caller: str, argument: str, rank: Any) -> int:
        """Convert a rank in the communicator to a rank in the world."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.nranks():
            raise ArgumentError(
                f"{caller}: argument {argument}: expected a rank of the communicator, in "
                f"0..{self.nranks() - 1}, got {rank!r}"
            )
        return self.ranks[rank]
