"""Results of ``asyncddp doctor`` checks, and their tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {"good": "", "note": "yellow", "bad": "bold red"}
_SIGNS = {"good": " ", "note": "!", "bad": "x"}


@dataclass(frozen=True)
class CheckResult:
    """Result of an ``asyncddp doctor`` check: finding, severity and advice."""

    section: str  # of the report: MPI, Python, GPU, Machine
    name: str
    value: str  # what was found, in words
    advice: str = ""  # what to install or change
    level: Literal["", "good", "note", "bad"] = ""  # "": a note with advice; bad: ranks cannot run

    def __post_init__(self) -> None:
        object.__setattr__(self, "level", self.level or ("note" if self.advice else "good"))


def print_check_results(console: Console, findings: Sequence[CheckResult]) -> None:
    """Print the check results by section, followed by numbered advice."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    section = None
    for finding in findings:
        head = "" if finding.section == section else finding.section
        section = finding.section
        value = Text(finding.value, style=_STYLES[finding.level], overflow="fold")
        table.add_row(Text(head, style="bold"), _SIGNS[finding.level], finding.name, value)
    console.print(table)
    advised = sorted((one for one in findings if one.advice), key=lambda found: found.level)
    title = ("What to install or change", "bold") if advised else ("Nothing is missing.", "green")
    console.print(Text(f"\n{title[0]}", style=title[1]))
    for number, finding in enumerate(advised, 1):
        words = f"{number}. {finding.name}: {finding.advice}"
        console.print(Text(words, style=_STYLES[finding.level]))


def print_rows(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print records with equal keys as a table, if there are any."""
    from rich.table import Column, Table
    from rich.text import Text

    if not rows:
        return
    console.print(Text(f"\n{title}", style="bold"))
    table = Table(*(Column(key, overflow="fold") for key in rows[0]), box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    console.print(table)
