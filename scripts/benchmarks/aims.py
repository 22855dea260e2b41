"""Whether what was to be reached is reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

from benchmarks.contract import Aim, Line, Row, Sheet, Table
from benchmarks.units import size_text, time_text

__all__ = ["Verdict", "judge_sheet", "judge_table", "short"]


@dataclass(frozen=True)
class Verdict:
    """An aim, and what became of it.

    Attributes:
        place: The table's title, and which line of it.
        nbytes: The size in a table, or None in a sheet.
        rival: Whose aim, or the first of those whose it is.
        words: The aim.
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
        """The aim and a mark."""
        if self.met is None:
            return f"{self.words} (not judged)"
        if self.met:
            return f"{self.words} ✓"
        return f"{self.words} MISSED" + (f" ({self.found})" if self.found else "")


def short(name: str) -> str:
    """A rival's name without how it does it: ``mpi4py`` of ``mpi4py: Sendrecv + lerp``."""
    return name.partition(":")[0]


def _names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else names


def _words(table: Table, aim: Aim) -> str:
    if aim.words:
        return aim.words
    limits = []
    if aim.of is not None:
        who = " and ".join(map(short, _names(aim.of)))
        limits.append(f"≤ {aim.at_most:.3g} x {who}" if aim.at_most != 1 else f"≤ {who}")
    if aim.seconds is not None:
        limits.append(f"≤ {time_text(aim.seconds)}")
    whose = _names(aim.rival)
    others = "" if whose[0] == table.rivals[0].name else " or ".join(map(short, whose)) + " "
    return others + ", ".join(limits)


def _judge(table: Table, aim: Aim, nbytes: int, medians: Mapping[str, float]) -> Verdict:
    """One aim at one size, from the medians of the rivals that ran."""
    rivals, others = _names(aim.rival), _names(aim.of)
    place = f"{table.title}, {size_text(nbytes)}"
    words = _words(table, aim)
    ran = [medians[name] for name in rivals if name in medians]
    # The fastest of several others counts, so all of them must have run; nobody wins by absence.
    if not ran or not {*others, *_names(aim.beyond)} <= set(medians):
        return Verdict(place, nbytes, rivals[0], words, None)
    base = medians[aim.beyond] if aim.beyond is not None else 0.0
    value = min(ran) - base
    other = min((medians[name] for name in others), default=inf) - base
    if others and value > aim.at_most * other:
        found = aim.told(value / other) if other > 0 else time_text(min(ran))
        return Verdict(place, nbytes, rivals[0], words, False, found)
    if aim.seconds is not None and min(ran) > aim.seconds:
        return Verdict(place, nbytes, rivals[0], words, False, time_text(min(ran)))
    return Verdict(place, nbytes, rivals[0], words, True)


def judge_table(table: Table, rows: Sequence[Row]) -> list[Verdict]:
    """All aims of a table at all sizes that were measured."""
    verdicts = []
    for nbytes in table.sizes:
        medians = {row.rival: row.median for row in rows if row.nbytes == nbytes}
        for aim in table.aims:
            if medians and aim.sizes[0] <= nbytes <= aim.sizes[1]:
                verdicts.append(_judge(table, aim, nbytes, medians))
    return verdicts


def judge_sheet(sheet: Sheet, lines: Sequence[Line]) -> list[Verdict]:
    """All aims of a sheet, which its lines have judged already."""
    return [
        Verdict(f"{sheet.title}, {line.cells[0]}", None, str(line.cells[0]), line.aim, line.met)
        for line in lines
        if line.aim is not None
    ]
