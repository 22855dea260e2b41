"""Results of methods in several settings, from which both table and picture are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.tables import FigureRow, FigureTable

Values = tuple[float, ...]
"""A figure for each seed."""


@dataclass(frozen=True)
class Grid:
    """Figures of methods (rows) in several settings (columns), such as graphs.

    Attributes:
        key: Short name, for JSON.
        title: What is measured.
        rows: Names of the methods.
        columns: Names of the settings.
        values: By row and column; what a method refuses is left out.
        text: Tells the figures of all seeds.
        axis: What the figures are, below the picture.
        log: Whether the picture's axis is logarithmic.
        aims: By row: what is to be reached, in words, and whether it is; None where the seeds do
            not tell.
        beside: A further column of the table, by row, such as what a paper reports.
        beside_name: Its head.
        note: What a reader must know.
        row_name: Head of the rows.
        scale: Factor of what the picture shows.
    """

    key: str
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Mapping[tuple[str, str], Values]
    text: Callable[[Values], str]
    axis: str
    log: bool = False
    aims: Mapping[str, tuple[str, bool | None]] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    beside_name: str = ""
    note: str = ""
    row_name: str = "method"
    scale: float = 1.0

    def table(self) -> FigureTable:
        """Return the table."""
        columns = [self.row_name, *self.columns, *([self.beside_name] if self.beside else [])]
        lines = [self._line(row) for row in self.rows]
        return FigureTable(self.key, self.title, columns, lines, self.note)

    def _line(self, row: str) -> FigureRow:
        found = [self.values.get((row, column)) for column in self.columns]
        cells = [row, *("-" if one is None else self.text(one) for one in found)]
        cells += [self.beside.get(row, "")] if self.beside else []
        return FigureRow(tuple(cells), *self.aims.get(row, (None, None)))
