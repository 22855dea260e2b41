"""Runner of ``%%px`` cells on ranks that are threads, with the interface of ipyparallel's views."""

from __future__ import annotations

import ast
import atexit
import contextlib
import copy
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TextIO

from asyncddp.context.context import Context, current
from asyncddp.errors import ArgumentError, RankError, UsageError
from asyncddp.install_commands import needed_package
from asyncddp.notebook.error_grouping import CellFailure, group_failures, with_traceback_lines

_INTERRUPTED = "KeyboardInterrupt: the ranks have ended the cell"
_RENEWED = (
    "[asyncddp] the ranks had lost step and have begun anew; topologies stay, but optimizers, "
    "windows and handles must be made again"
)


class RanksOnThreads(Protocol):
    """Interface of a world whose ranks are threads, such as :class:`asyncddp.LocalWorld`."""

    size: int
    contexts: Sequence[Context]

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> None: ...

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank."""

    def renew(self) -> None:
        """Restart the world after an error."""


class LocalView:
    """View of ranks that are threads, like ipyparallel's: runs code and copies variables.

    It implements the part of an ``ipyparallel.DirectView`` that notebooks use most. ``names`` are
    the ranks' namespaces, which persist from cell to cell.

    Example:
        >>> import asyncddp as bf
        >>> with bf.local_world(3) as world:
        ...     view = LocalView(world)
        ...     view.push({"x": 5})
        ...     view.execute("import asyncddp as bf; y = x * bf.rank()")
        ...     view["y"]
        [0, 5, 10]
    """

    def __init__(self, world: RanksOnThreads) -> None:
        self._world = world
        self.names: list[dict[str, Any]] = [{"__name__": "__main__"} for _ in range(world.size)]

    def push(self, values: Mapping[str, Any]) -> None:
        """Set variables on every rank to copies of the given values."""
        for names in self.names:
            names.update(copy.deepcopy(dict(values)))

    def pull(self, names: str | Sequence[str]) -> list[Any]:
        """Return the ranks' values of one variable, or of several, in rank order.

        Raises:
            ArgumentError: A rank has nothing under that name.
        """
        if not isinstance(names, str):
            return [[own[name] for name in names] for own in self.names]
        missing = [rank for rank, own in enumerate(self.names) if names not in own]
        if missing:
            raise ArgumentError(f"pull: rank {missing[0]} has no {names!r}")
        return [own[names] for own in self.names]

    def __getitem__(self, name: str) -> list[Any]:
        return self.pull(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.push({name: value})

    def apply_sync(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call a function on every rank; return the results in rank order."""
        return self._world.run(fn, *args, **kwargs)

    def execute(self, cell: str, *, file: str = "<cell>") -> None:
        """Run Python code on every rank, and show the value of a last line that is an expression.

        Tracebacks give ``file`` as the name of the source.

        Raises:
            SyntaxError: The cell is not valid Python.
            RankError: The cell raised on some ranks; equal errors are grouped.
            KeyboardInterrupt: Ctrl-C; the ranks have ended the cell too.
        """
        body, last = _compile_cell(cell, file)
        values: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def run() -> None:
            rank = current().rank
            names = self.names[rank]
            try:
                exec(body, names)
                values[rank] = None if last is None else eval(last, names)
            except BaseException as error:
                errors[rank] = error
                raise

        with _prefixed_output():
            try:
                self._world.run(run)
            except (RankError, KeyboardInterrupt) as error:
                self._recover_from_errors()
                if isinstance(error, KeyboardInterrupt):
                    raise with_traceback_lines(error, [_INTERRUPTED]) from None
        if errors:
            raise group_failures([_make_failure(*item, file) for item in errors.items()])
        for rank in sorted(values):
            if values[rank] is not None:
                sys.stdout.write(f"Out[{rank}]: {values[rank]!r}\n")

    def _recover_from_errors(self) -> None:
        """Restart the world if the ranks have called different operations."""
        counts = [context.engine.use_counts() for context in self._world.contexts]
        if any(one != counts[0] for one in counts):
            self._world.renew()
            sys.stderr.write(f"{_RENEWED}\n")


def activate(world: RanksOnThreads) -> LocalView:
    """Register ``%%px`` for the ranks of a local world; see :meth:`asyncddp.LocalWorld.activate`.

    Raises:
        UsageError: This is no IPython session.
        EnvironmentProblem: IPython is not installed.
    """
    with needed_package("notebooks need IPython", "notebook"):
        from IPython.core.getipython import get_ipython
        from IPython.core.magic import no_var_expand
    shell: Any = get_ipython()
    if shell is None:
        raise UsageError("activate: cells need IPython or a notebook; in a script use world.run()")
    if not world.contexts:
        world.__enter__()
        atexit.register(world.__exit__, None, None, None)
    view = LocalView(world)
    for names in view.names:
        names["get_ipython"] = shell.get_ipython

    @no_var_expand
    def px(line: str, cell: str | None = None) -> None:
        """Run a line, or a cell, on every rank."""
        if cell is not None and line.strip():
            raise UsageError(f"%%px on threads takes no options, got {line.strip()!r}")
        text = shell.transform_cell(line if cell is None else cell)
        view.execute(text, file=shell.compile.cache(text, shell.execution_count))

    shell.register_magic_function(px, "line_cell")
    return view


def _compile_cell(cell: str, file: str) -> tuple[Any, Any]:
    tree = ast.parse(cell, file)
    last: ast.Expression | None = None
    quiet = cell.rstrip().endswith(";")
    if tree.body and isinstance(tree.body[-1], ast.Expr) and not quiet:
        last = ast.Expression(tree.body.pop().value)  # type: ignore[attr-defined]  # it is an Expr
    return compile(tree, file, "exec"), None if last is None else compile(last, file, "eval")


def _make_failure(rank: int, error: BaseException, file: str) -> CellFailure:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace or error.__traceback__)
    text = "".join(lines).rstrip().splitlines()
    return CellFailure(rank, type(error).__name__, str(error), text)


class _RankPrefixStream:
    """Text stream that prefixes each line with the stream's name and the writing rank."""

    def __init__(self, target: TextIO, name: str) -> None:
        self._target, self._name = target, name
        self._lock = threading.Lock()
        self._open: dict[int, str] = {}

    def write(self, text: str) -> int:
        """Forward complete lines with a prefix; buffer an incomplete line."""
        name = threading.current_thread().name
        if not name.startswith("rank-"):
            return self._target.write(text)
        rank = int(name.removeprefix("rank-"))
        with self._lock:
            *lines, rest = (self._open.pop(rank, "") + text).split("\n")
            self._open[rank] = rest
            for line in lines:
                self._target.write(f"[{self._name}:{rank}] {line}\n")
        return len(text)

    def flush_lines(self) -> None:
        for rank, rest in sorted(self._open.items()):
            if rest:
                self._target.write(f"[{self._name}:{rank}] {rest}\n")
        self._open.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@contextlib.contextmanager
def _prefixed_output() -> Iterator[None]:
    before = sys.stdout, sys.stderr
    streams = _RankPrefixStream(sys.stdout, "stdout"), _RankPrefixStream(sys.stderr, "stderr")
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in streams:
            stream.flush_lines()
