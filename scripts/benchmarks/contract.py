"""What a bench is made of: tables of rivals over sizes, and sheets of finished figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median, quantiles
from typing import Any

import torch

__all__ = ["Aim", "Call", "Line", "Rival", "Row", "Sheet", "Table", "Unavailable", "World"]

Call = Callable[[int], Any]
"""The work, once: given the number of the call, which is equal on all ranks, gives the result, a
tensor or several; or what the rival's ``finish`` makes them from."""


class Unavailable(RuntimeError):  # noqa: N818 - it is a finding, not a mistake
    """A rival cannot run here; the message says why."""


@dataclass(frozen=True)
class World:
    """The ranks, as the harness and the raw rivals see them.

    Attributes:
        comm: mpi4py's communicator, a clone of ``COMM_WORLD`` that asyncddp never uses.
        gloo: Why ``torch.distributed`` with gloo cannot be used, or None where it can.
    """

    comm: Any
    gloo: str | None

    @property
    def rank(self) -> int:
        """This rank."""
        return int(self.comm.rank)

    @property
    def size(self) -> int:
        """How many there are."""
        return int(self.comm.size)


@dataclass(frozen=True)
class Rival:
    """One way of doing a table's work.

    Attributes:
        name: As it stands over its column.
        prepare: Makes the :data:`Call` for a size in bytes; raises :class:`Unavailable`.
        finish: Ends off the clock what a call has begun on it, and gives the result.
        parts: Equal parts of a call, of which one's time is of interest.
        checked: Whether its result is the table's; False for one that is only timed beside it.
    """

    name: str
    prepare: Callable[[int], Call]
    finish: Callable[[Any], Any] | None = None
    parts: int = 1
    checked: bool = True


@dataclass(frozen=True)
class Aim:
    """What a rival's median is to reach, at some sizes of its table.

    Attributes:
        rival: Whose median; of several names the fastest counts.
        at_most: So many times the median of ``of``.
        of: The rival to compare with, of several the fastest; None where ``seconds`` alone count.
        sizes: The smallest and the largest size for which it holds, in bytes.
        seconds: What the median must not exceed besides.
        beyond: A rival whose median is subtracted on both sides: what counts is what they add.
        words: How it is told, where not from the fields above.
        told: Tells the ratio that was found.
    """

    rival: str | tuple[str, ...]
    at_most: float = inf
    of: str | tuple[str, ...] | None = None
    sizes: tuple[float, float] = (0, inf)
    seconds: float | None = None
    beyond: str | None = None
    words: str = ""
    told: Callable[[float], str] = "{:.3g} x".format


@dataclass(frozen=True)
class Table:
    """Rivals, sizes, and what all of them must give.

    Attributes:
        key: Short name, for JSON and the plot's file.
        title: What is measured.
        sizes: Bytes; what they count is the ``size_is``.
        rivals: The columns.
        size_is: What the size is the size of.
        expected: The right result of call 0 for a size, against which every rival is checked
            before it is timed; None where results are not comparable.
        begin: Called on all ranks before the table is measured.
        end: Called on all ranks when it has been.
        aims: What is to be reached; the report marks what is missed.
        compare: The two rivals whose ratio is shown; None for the first two, empty for no ratio.
        lead: Calls just before the clock starts, for work that reaches over from call to call.
        samples: Samples in a call, over all ranks, where it is a training step. The report then
            has a line for each rival, with samples per second and what it adds to the first.
        note: What a reader must know; stands under the title.
    """

    key: str
    title: str
    sizes: Sequence[int]
    rivals: Sequence[Rival]
    size_is: str = "tensor"
    expected: Callable[[int], torch.Tensor] | None = None
    begin: Callable[[], None] = field(default=lambda: None)
    end: Callable[[], None] = field(default=lambda: None)
    aims: Sequence[Aim] = ()
    compare: tuple[str, ...] | None = None
    lead: int = 0
    samples: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A line of a sheet.

    Attributes:
        cells: One for each column; numbers are shown with three digits.
        aim: What is to be reached, in words.
        met: Whether it is; None where there is no aim, or it could not be judged.
    """

    cells: tuple[str | float, ...]
    aim: str | None = None
    met: bool | None = None


@dataclass(frozen=True)
class Sheet:
    """Finished figures that a bench measures by itself: bytes, model sizes, samples per second.

    Attributes:
        key: Short name, for JSON.
        title: What is measured.
        columns: Their heads.
        measure: Called on all ranks with the world and ``advance``, which shows a text on the
            progress line; rank 0's lines count.
        note: What a reader must know; stands under the title.
    """

    key: str
    title: str
    columns: Sequence[str]
    measure: Callable[[World, Callable[[str], None]], list[Line]]
    note: str = ""


@dataclass(frozen=True)
class Row:
    """One rival at one size: the time of a call, slowest rank of each round.

    Attributes:
        seconds: One entry for each round.
        calls: Calls in a round, whose mean is the round's entry.
    """

    table: str
    rival: str
    nbytes: int
    calls: int
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle round, in seconds."""
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between which the middle half of the rounds lies, in seconds."""
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        low, high = self.quartiles
        return (high - low) / 2 / self.median
