"""What an engine does around cells, so that no rank waits for one whose cell has failed.

A rank whose cell raises leaves its peers, who would else wait for it until the deadline, and is
back with the next cell. Whether the ranks are still in step, only who sees all of them can tell:
the client asks each for its :func:`standing` and then lets them :func:`go_on` or :func:`give_up`.
The library is looked up only where a cell has imported it, for importing it takes seconds.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncddp.context.context import Context

__all__ = ["give_up", "go_on", "register", "standing"]


def _context() -> Context | None:
    """The world of this rank, if a cell has joined one."""
    module = sys.modules.get("asyncddp.context.context")
    if module is None or not module.is_initialized():
        return None
    context: Context = module.current()
    return context


def register(shell: Any) -> None:
    """Watch the cells of an IPython shell."""
    shell.events.register("pre_run_cell", _before)
    shell.events.register("post_run_cell", _after)


def _before(info: Any) -> None:
    del info
    go_on()


def _after(result: Any) -> None:
    error, context = result.error_in_exec, _context()
    if error is not None and context is not None:
        context.engine.leave(f"its cell ended with {type(error).__name__}: {error}")


def standing() -> dict[str, int] | None:
    """How often this rank has used each name; None where it has joined no world."""
    context = _context()
    return None if context is None else context.engine.counts()


def go_on() -> None:
    """Forget that peers have left."""
    context = _context()
    if context is not None and not context.engine.closed:
        context.engine.resume()


def give_up(reason: str) -> None:
    """Let every further verb of this world fail with a reason, until it is left."""
    context = _context()
    if context is not None:
        context.engine.give_up(reason)
