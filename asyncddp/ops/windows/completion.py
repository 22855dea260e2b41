"""Functions that flush, wait for, poll and cancel non-blocking window operations."""

from __future__ import annotations

from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.torch_modes import uncompiled
from asyncddp.windows import windows_of
from asyncddp.windows.nonblocking_handle import WindowHandle


@uncompiled
def win_flush(name: str | None = None) -> bool:
    """Wait until neighbours can see all puts and accumulates of this rank; return True.

    With a barrier after it a step of windows works like a collective: each buffer then holds its
    neighbour's latest write.

    Args:
        name: Name of the window; all windows if None.

    Raises:
        UnknownNameError: There is no such window.
        PeerError: A neighbour has ended, has freed the window, or cannot be reached.

    Example:
        >>> import asyncddp as bf, torch
        >>> def in_step():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     handle = bf.win_put_nonblocking(x, "x")
        ...     bf.win_flush()
        ...     bf.barrier()
        ...     return bf.win_update("x").item()
        >>> with bf.local_world(2) as world:
        ...     world.run(in_step)
        [0.5, 0.5]

    Source: MPI: A Message-Passing Interface Standard, version 4.1 (2023), section 12.5.4
    (``MPI_Win_flush_all``).
    """
    windows = windows_of(current())
    for one in windows.names if name is None else [name]:
        windows.find("win_flush", one).flush().wait()
    return True


@uncompiled
def win_wait(handle: WindowHandle) -> bool:
    """Wait for a non-blocking window operation and return True.

    Raises:
        ArgumentError: It is no handle of a window operation.
        PeerError: A neighbour has ended, has freed the window, or cannot be reached.

    Example:
        >>> import asyncddp as bf, torch
        >>> def waited():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     handle = bf.win_put_nonblocking(x, "x")
        ...     return bf.win_wait(handle), bf.win_poll(handle)
        >>> with bf.local_world(2) as world:
        ...     world.run(waited)
        [(True, True), (True, True)]
    """
    return _handle("win_wait", handle).wait()


@uncompiled
def win_poll(handle: WindowHandle) -> bool:
    """Return True if a non-blocking window operation is done; never wait; see :func:`win_wait`.

    Raises:
        ArgumentError: It is no handle of a window operation.
    """
    return _handle("win_poll", handle).poll()


@uncompiled
def win_cancel(handle: WindowHandle) -> None:
    """Stop waiting for a window operation, which still completes; see :func:`win_wait`.

    Raises:
        ArgumentError: It is no handle of a window operation.
    """
    _handle("win_cancel", handle).cancel()


def _handle(verb: str, handle: WindowHandle) -> WindowHandle:
    if not isinstance(handle, WindowHandle):
        raise ArgumentError(
            f"{verb}: argument handle: expected what a non-blocking window verb gives, got "
            f"{handle!r}"
        )
    return handle
