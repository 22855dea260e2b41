"""IPython magics ``%px`` and ``%%px``, which run notebook cells on ranks that are threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, line_cell_magic, magics_class, no_var_expand

from asyncddp.errors import UsageError

if TYPE_CHECKING:
    from asyncddp.notebook.local_view import LocalView


@magics_class
class LocalCellMagics(Magics):
    """IPython magics ``%px`` and ``%%px``, which run notebook cells on ranks that are threads.

    Args:
        shell: The IPython session.
        view: The ranks.
    """

    def __init__(self, shell: Any, view: LocalView) -> None:
        super().__init__(shell)
        self._session, self._view = shell, view

    @no_var_expand
    @line_cell_magic
    def px(self, line: str, cell: str | None = None) -> None:
        """Run a line, or a cell, on every rank.

        Raises:
            UsageError: The line of ``%%px`` has options; threads know none.
        """
        if cell is not None and line.strip():
            raise UsageError(f"%%px on threads takes no options, got {line.strip()!r}")
        text = self._session.transform_cell(line if cell is None else cell)
        file = self._session.compile.cache(text, self._session.execution_count)
        for names in self._view.names:
            names.setdefault("get_ipython", self._session.get_ipython)
        self._view.execute(text, file=file)
