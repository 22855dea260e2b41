"""Console of the commands that print tables; rich is imported only when it is needed."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def make_console(piped_width: int = 160) -> Console:
    """Make a console on standard output that does not wrap tables when output is piped."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else max(piped_width, shutil.get_terminal_size().columns)
    return Console(width=width, highlight=False)
