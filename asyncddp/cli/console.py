"""Console and tables of the commands; rich is imported only when it is needed."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def make_console(piped_width: int = 160) -> Console:
    """Make a console on standard output that does not wrap tables when output is piped."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else max(piped_width, shutil.get_terminal_size().columns)
    return Console(width=width, highlight=False)


def make_table(title: str | None, headers: Iterable[str]) -> Table:
    """Make a table with a title and right-aligned columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True, vertical="bottom")
    return table
