"""What an engine does around cells, so that no rank waits for one whose cell has failed.

A rank whose cell raises leaves its peers, who would else wait for it until the deadline, and is
back with the next cell. Whether the ranks are still in step, only who sees all of them can tell:
the client asks each for its :func:`standing` and then lets them :func:`go_on` or :func:`give_up`.
The library is looked up only where a cell has imported it, for importing it takes seconds.
"""

from __future__ import annotations

import functools
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


def register(kernel: Any) -> None:
    """Watch the cells of an engine's kernel, and the functions that clients apply."""
    kernel.shell.events.register("pre_run_cell", lambda info: go_on())
    kernel.shell.events.register("post_run_cell", _after_cell)
    apply = kernel.do_apply

    @functools.wraps(apply)
    def do_apply(*args: Any, **kwargs: Any) -> Any:
        """Call it, after what was given up has gone on; give up where it fails."""
        go_on()
        reply, buffers = apply(*args, **kwargs)
        if reply["status"] == "error":
            _leave(f"its function ended with {reply['ename']}: {reply['evalue']}")
        return reply, buffers

    kernel.do_apply = do_apply


def _after_cell(result: Any) -> None:
    error = result.error_in_exec
    if error is not None:
        _leave(f"its cell ended with {type(error).__name__}: {error}")


def _leave(reason: str) -> None:
    context = _context()
    if context is not None:
        context.engine.leave(reason)


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
