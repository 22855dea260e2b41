"""Tables of benchmarks: timings of rivals over sizes, and figures; sizes and times in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import median, quantiles
from typing import Any

import click
import torch

KB, MB = 1 << 10, 1 << 20

Call = Callable[[int], Any]
"""The work, once: given the number of the call, which is equal on all ranks, gives the result, a
tensor or several; or what the rival's ``finish`` makes them from."""


class RivalUnavailableError(RuntimeError):
    """Error of a rival that cannot run here; the message says why."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks of a benchmark run, as the harness and the baselines see them.

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
        """Number of ranks."""
        return int(self.comm.size)

    def say(self, text: str) -> None:
        """Print how far the run is, on rank 0: its first line tells the bench that started it."""
        if self.rank == 0:
            click.echo(text)

    def need_gloo(self) -> None:
        """Raise :class:`RivalUnavailableError` if gloo cannot be used."""
        if self.gloo is not None:
            raise RivalUnavailableError(self.gloo)


@dataclass(frozen=True)
class Rival:
    """One of several implementations that a table compares.

    Attributes:
        name: As it stands over its column.
        prepare: Makes the :data:`Call` for a size in bytes; raises :class:`RivalUnavailableError`.
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
class Target:
    """Performance target of a rival's median time, at some sizes of its table.

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
class TimingTable:
    """Table of timings: rivals, sizes, and the expected result.

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
    targets: Sequence[Target] = ()
    compare: tuple[str, ...] | None = None
    lead: int = 0
    samples: int | None = None
    note: str = ""


@dataclass(frozen=True)
class FigureRow:
    """Row of a table of figures.

    Attributes:
        cells: One for each column; numbers are shown with three digits.
        aim: What is to be reached, in words.
        met: Whether it is; None where there is no aim, or it could not be judged.
    """

    cells: tuple[str | float, ...]
    aim: str | None = None
    met: bool | None = None


@dataclass(frozen=True)
class FigureTable:
    """Table of figures that a benchmark has found by itself, such as bytes.

    Attributes:
        key: Short name, for JSON.
        title: What was measured.
        columns: Their heads.
        lines: The rows.
        note: What a reader must know; stands under the title.
    """

    key: str
    title: str
    columns: Sequence[str]
    lines: Sequence[FigureRow]
    note: str = ""


@dataclass(frozen=True)
class TimingRow:
    """Times of one rival at one size: per round, a call on the slowest rank.

    Attributes:
        seconds: One entry for each round.
        calls: Calls in a round, whose mean is the round's entry.
    """

    table: str
    rival: str
    nbytes: int
    calls: int
    seconds: Sequence[float]

    @property
    def median(self) -> float:
        """Median of the rounds, in seconds."""
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the rounds, in seconds."""
        low, _, high = quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, relative to the median."""
        low, high = self.quartiles
        return (high - low) / 2 / self.median


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < base * 0.9995:
            return f"{value:.3g} {unit}"
        value /= base
    return f"{value:.3g} {units[-1]}"


def size_text(nbytes: float) -> str:
    """Such as ``64 KB``."""
    return _scaled(nbytes, 1024, ("B", "KB", "MB", "GB"))


def time_text(seconds: float) -> str:
    """Such as ``4.53 µs``."""
    return _scaled(seconds * 1e6, 1000, ("µs", "ms", "s"))
