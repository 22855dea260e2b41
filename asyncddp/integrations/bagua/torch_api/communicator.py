"""Communicators: ranks among which Bagua's collectives take place, and operators of reductions."""

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
    """Operator of a reduction, by Bagua's numbers."""

    SUM = 0
    PRODUCT = 1
    MIN = 2
    MAX = 3
    BOR = 7
    BAND = 8
    BXOR = 9
    AVG = 10


def operator_of(op: Any) -> LibraryReduceOp:
    """Return the library's operator of one of ``ReduceOp``, or of its number."""
    if op not in list(ReduceOp):
        known = ", ".join(f"{one.name} ({one.value})" for one in ReduceOp)
        raise ArgumentError(f"argument op: expected one of {known}, got {op!r}")
    return LibraryReduceOp[ReduceOp(op).name]


@dataclass(frozen=True)
class Communicator:
    """Ranks among which collectives take place, numbered from 0 in it.

    Attributes:
        ranks: Their ranks in the world, ascending.
        group: The library's group of them; None for that of all ranks.
    """

    ranks: Sequence[int]
    group: ProcessGroup | None = None

    @classmethod
    def of(cls, ranks: Sequence[int], name: str) -> Communicator:
        """Make a communicator of some ranks; its name, which is theirs alone, matches calls."""
        context = current()
        if len(ranks) == context.size:
            return cls(ranks)
        return cls(ranks, ProcessGroup(ranks, context, GROUP_COLLECTIVE.format(name)))

    def rank(self) -> int:
        """Return the number of this rank, -1 where it is no member."""
        own = current().rank
        return list(self.ranks).index(own) if own in self.ranks else -1

    def nranks(self) -> int:
        """Return the number of ranks."""
        return len(self.ranks)

    def world_rank(self, caller: str, argument: str, rank: Any) -> int:
        """Return the rank in the world of a rank in the communicator."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.nranks():
            raise ArgumentError(
                f"{caller}: argument {argument}: expected a rank of the communicator, in "
                f"0..{self.nranks() - 1}, got {rank!r}"
            )
        return self.ranks[rank]
