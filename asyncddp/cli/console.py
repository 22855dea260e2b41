"""Console output of the commands: tables and formatted numbers; rich is imported lazily."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

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


def format_bytes(value: float | None) -> str:
    """Format a number of bytes with a unit.

    Example:
        >>> format_bytes(19.0), format_bytes(20_000.0), format_bytes(3.21e7), format_bytes(None)
        ('19 B', '20.0 kB', '32.1 MB', '-')
    """
    if value is None:
        return "-"
    if value < 999.5:
        return f"{value:.0f} B"
    for unit in ("kB", "MB"):
        value /= 1e3
        if value < 999.5:
            return f"{value:.{1 + (value < 10)}f} {unit}"
    return f"{value / 1e3:.2f} GB"


@contextlib.contextmanager
def writing(
    option: str,
    path: Path,
    *,
    err: bool = False,
    failure: Callable[[str], Exception] = click.ClickException,
) -> Iterator[None]:
    """Report the file written in the ``with`` block; errors name the option that chose it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise failure(f"{option} {path} cannot be written: {error}.") from error
    click.echo(f"Wrote {path}.", err=err)


def open_standard_streams() -> None:
    """Open /dev/null for each closed standard stream, as after ``>&-``.

    Otherwise the next opened file gets the descriptor, and receives the stream's output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
