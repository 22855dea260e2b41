"""Local world: a group of ranks that are threads of one process, for tests and notebooks."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from asyncddp.config import Config
from asyncddp.context.context import Context, use
from asyncddp.errors import ArgumentError, PeerError, RankError
from asyncddp.rank_list_text import list_ranks
from asyncddp.transport.loopback import LoopbackTransport

if TYPE_CHECKING:
    from asyncddp.notebook.local_view import LocalView

_POLL_INTERVAL = 0.1  # seconds between polls for the end of a thread


class LocalWorld:
    """World of ranks that are threads of this process; made by :func:`local_world`."""

    def __init__(self, size: int, config: Config) -> None:
        self.size = size
        self._transports = LoopbackTransport.group(size)
        self._config = config
        self.contexts: Sequence[Context] = ()
        """Contexts of the ranks, in order; empty before the world is entered."""

    def __enter__(self) -> LocalWorld:
        self.contexts = _in_threads(
            self.size,
            lambda rank: Context(self._transports[rank], self._config),
            failed=lambda rank, error: None,
        )
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        late: list[PeerError] = []
        for context in self.contexts:
            try:
                context.close("its world has ended")
            except PeerError as problem:
                late.append(problem)
        if late and error is None:
            raise late[0]

    def activate(self) -> LocalView:
        """Make ``%%px`` notebook cells run on these ranks from now on; requires IPython.

        Each rank has its own names, which last from cell to cell. What they print begins with the
        rank, the value of the last line is shown for each, and an error is shown once. The world
        need not be entered; it ends with the interpreter.

        Returns:
            The :class:`asyncddp.notebook.LocalView` of all ranks, with ``push``, ``pull`` and
            ``apply_sync``.

        Raises:
            UsageError: This is no IPython session.
            EnvironmentProblem: IPython is not installed.
        """
        from asyncddp.notebook.local_view import activate

        return activate(self)

    def renew(self) -> None:
        """Restart the world after an error; topologies are kept."""
        before = self.contexts
        for context in before:
            context.engine.fail_all("its world was begun anew; make it again")
            with contextlib.suppress(PeerError):
                context.close("its world is begun anew")
        self._transports = LoopbackTransport.group(self.size)
        self.__enter__()
        for old, new in zip(before, self.contexts, strict=True):
            old.topologies.pinned.clear()
            new.topologies = old.topologies

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank, each in its own thread.

        Args:
            fn: What to run; inside it ``asyncddp.rank()`` and all verbs are those of one rank.
            *args: Positional arguments, the same objects on all ranks.
            **kwargs: Keyword arguments, likewise.

        Returns:
            The results, element r being rank r's.

        Raises:
            RankError: A rank raised. The first error is the cause; the other ranks are released.

        Example:
            >>> import asyncddp as bf
            >>> with bf.local_world(3) as world:
            ...     world.run(lambda: bf.rank() * 10)
            [0, 10, 20]
        """

        def call(rank: int) -> Any:
            with use(self.contexts[rank]):
                result = fn(*args, **kwargs)
                self.contexts[rank].announce_exit("its function has returned")
                return result

        def release(rank: int, error: BaseException) -> None:
            for context in self.contexts:
                context.mark_failed(rank, f"it raised {type(error).__name__}: {error}")

        for context in self.contexts:
            context.readmit_peers()
        return _in_threads(self.size, call, release)


def local_world(size: int, **settings: Any) -> LocalWorld:
    """Create a world of ``size`` ranks that are threads of this process.

    Args:
        size: How many.
        **settings: Fields of :class:`asyncddp.config.Config`: ``timeout``, ``warn_after``,
            ``check``, ``ranks_per_machine``, ``timeline``.

    Returns:
        A context manager; its :meth:`LocalWorld.run` runs a function on every rank.

    Raises:
        ArgumentError: ``size`` is below 1.

    Example:
        >>> import asyncddp as bf, torch
        >>> with bf.local_world(4) as world:
        ...     world.run(lambda: bf.allreduce(torch.tensor([float(bf.rank())])).item())
        [1.5, 1.5, 1.5, 1.5]
    """
    if size < 1:
        raise ArgumentError(f"local_world: argument size: expected at least 1, got {size}")
    return LocalWorld(size, Config.from_environment(**settings))


def _in_threads(
    size: int, call: Callable[[int], Any], failed: Callable[[int, BaseException], None]
) -> list[Any]:
    """Run ``call(rank)`` for all ranks concurrently; raise the first error with its rank."""
    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []
    ended = [threading.Event() for _ in range(size)]

    def body(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, whatever it is
            errors.append((rank, error))
            failed(rank, error)
        finally:
            ended[rank].set()

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank-{rank}") for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    try:
        _join(threads, ended)
    except KeyboardInterrupt:
        for thread in threads:
            if thread.ident is not None and thread.is_alive():  # raised at its next line of Python
                identity, kind = ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(identity, kind)
        _join(threads, ended)
        raise
    if errors:
        rank, error = errors[0]
        kinds: dict[str, list[int]] = {}
        for other, problem in errors[1:]:
            kinds.setdefault(type(problem).__name__, []).append(other)
        others = "; ".join(f"{list_ranks(ranks)}: {kind}" for kind, ranks in kinds.items())
        more = f" (then also {others})" if others else ""
        text = f"rank {rank} raised {type(error).__name__}: {error}{more}"
        raise RankError(rank, text) from error
    return results


def _join(threads: Sequence[threading.Thread], ended: Sequence[threading.Event]) -> None:
    """Join threads; after Ctrl-C, ``Thread.join`` would report a running thread as ended."""
    for thread, event in zip(threads, ended, strict=True):
        while thread.is_alive():
            event.wait(_POLL_INTERVAL)
        thread.join()
