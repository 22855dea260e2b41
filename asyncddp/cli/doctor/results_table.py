"""Prints the results of ``asyncddp doctor`` as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from asyncddp.cli.doctor.check_result import CheckResult

_STYLES = {"good": "", "note": "yellow", "bad": "bold red"}
_SIGNS = {"good": " ", "note": "!", "bad": "x"}


def print_check_results(console: Console, findings: Sequence[CheckResult]) -> None:
    """Print the check results by section, and then the advice, numbered."""
    table = Table(box=None, show_header=False, pad_edge=False)
    section = None
    for finding in findings:
        head = "" if finding.section == section else finding.section
        section = finding.section
        style = _STYLES[finding.level]
        value = Text(finding.value, style=style, overflow="fold")
        table.add_row(Text(head, style="bold"), _SIGNS[finding.level], finding.name, value)
    console.print(table)
    advised = [finding for finding in findings if finding.advice]
    if advised:
        console.print(Text("\nWhat to install or change", style="bold"))
    for number, finding in enumerate(sorted(advised, key=lambda found: found.level), 1):
        style = _STYLES[finding.level]
        console.print(Text(f"{number}. {finding.name}: {finding.advice}", style=style))
    if not advised:
        console.print(Text("\nNothing is missing.", style="green"))


def print_rows(console: Console, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print records with the same keys as a table."""
    if not rows:
        return
    console.print(Text(f"\n{title}", style="bold"))
    table = Table(box=None, pad_edge=False)
    for key in rows[0]:
        table.add_column(str(key), overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    console.print(table)
