"""Performance targets of benchmark tables, and whether measurements meet them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.tables import FigureTable, Target, TimingRow, TimingTable, size_text, time_text


@dataclass(frozen=True)
class TargetResult:
    """Performance target with the result of its check.

    Attributes:
        place: The table's title, and which line of it.
        nbytes: The size in a table, or None in a sheet.
        rival: The rival that the target is for, or the first of several.
        words: The target in words.
        met: None where it could not be judged.
        found: What was measured instead, where it is missed.
    """

    place: str
    nbytes: int | None
    rival: str
    words: str
    met: bool | None
    found: str = ""

    @property
    def text(self) -> str:
        """The target in words, with a mark."""
        if self.met is None:
            return f"{self.words} (not judged)"
        if self.met:
            return f"{self.words} ✓"
        return f"{self.words} MISSED" + (f" ({self.found})" if self.found else "")


def short(name: str) -> str:
    """Shorten a rival's name: ``mpi4py: Sendrecv + lerp`` to ``mpi4py``."""
    return name.partition(":")[0]


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else names


def _words(table: TimingTable, target: Target) -> str:
    if target.words:
        return target.words
    limits = []
    if target.of is not None:
        who = " and ".join(map(short, _names(target.of)))
        limits.append(f"≤ {target.at_most:.3g} x {who}" if target.at_most != 1 else f"≤ {who}")
    if target.seconds is not None:
        limits.append(f"≤ {time_text(target.seconds)}")
    whose = _names(target.rival)
    others = "" if whose[0] == table.rivals[0].name else " or ".join(map(short, whose)) + " "
    return others + ", ".join(limits)


def _check(
    table: TimingTable, target: Target, nbytes: int, medians: Mapping[str, float]
) -> TargetResult:
    """Check one target at one size, from the medians of the rivals that ran."""
    rivals, others = _names(target.rival), _names(target.of)
    ran = [medians[name] for name in rivals if name in medians]
    met, found = None, ""
    # The fastest of several others counts, so all of them must have run; nobody wins by absence.
    if ran and {*others, *_names(target.beyond)} <= set(medians):
        base = medians[target.beyond] if target.beyond is not None else 0.0
        value = min(ran) - base
        other = min((medians[name] for name in others), default=inf) - base
        ahead = not others or value <= target.at_most * other
        met = ahead and (target.seconds is None or min(ran) <= target.seconds)
        if not met:
            found = time_text(min(ran)) if ahead or other <= 0 else target.told(value / other)
    place = f"{table.title}, {size_text(nbytes)}"
    return TargetResult(place, nbytes, rivals[0], _words(table, target), met, found)


def check_table_targets(table: TimingTable, rows: Sequence[TimingRow]) -> list[TargetResult]:
    """Check all targets of a table at all sizes that were measured."""
    target_results = []
    for nbytes in table.sizes:
        medians = {row.rival: row.median for row in rows if row.nbytes == nbytes}
        for target in table.targets:
            if medians and target.sizes[0] <= nbytes <= target.sizes[1]:
                target_results.append(_check(table, target, nbytes, medians))
    return target_results


def check_figure_targets(table: FigureTable) -> list[TargetResult]:
    """Collect the targets of a table of figures, whose rows hold the results already."""
    return [
        TargetResult(f"{table.title}, {name}", None, name, line.aim, line.met)
        for line in table.lines
        for name in [str(line.cells[0])]
        if line.aim is not None
    ]
