"""Functions that read a window's counters: writes received, staleness, push-sum weight p."""

from __future__ import annotations

from asyncddp.context import current
from asyncddp.torch_modes import uncompiled
from asyncddp.windows import Staleness, windows_of


@uncompiled
def get_win_version(name: str) -> dict[int, int]:
    """Return how many times each in-neighbour's buffer was written since this rank's last update.

    Raises:
        UnknownNameError: There is no such window.

    Example:
        >>> import asyncddp as bf, torch
        >>> def counted():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     bf.win_put(x, "x")
        ...     bf.win_put(x, "x")
        ...     bf.barrier()
        ...     counts = bf.get_win_version("x")
        ...     bf.win_update("x")
        ...     return counts, bf.win_staleness("x")[1 - bf.rank()].version
        >>> with bf.local_world(2) as world:
        ...     world.run(counted)
        [({1: 2}, 2), ({0: 2}, 2)]
    """
    return windows_of(current()).find("get_win_version", name).versions()


@uncompiled
def win_staleness(name: str) -> dict[int, Staleness]:
    """Return the age of the data last read from each in-neighbour.

    Returns:
        By rank, a tuple ``(version, steps, seconds, lag)``: how many times the neighbour had
        published to this rank, how many steps it has made since, how long ago that was, and by how
        many steps it was behind this rank. A step is a put or an accumulate.

    Raises:
        UnknownNameError: There is no such window.

    Example: see :func:`get_win_version`.
    """
    return windows_of(current()).find("win_staleness", name).staleness()


@uncompiled
def win_associated_p(name: str) -> float:
    """Return this rank's associated scalar p, the divisor in push-sum.

    It is 1 unless ``win_create(..., associated_p=True)`` made the window.

    Raises:
        UnknownNameError: There is no such window.

    Example:
        >>> import asyncddp as bf, torch
        >>> def halved():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True, associated_p=True)
        ...     bf.win_accumulate(x, "x", self_weight=0.5, dst_weights={1 - bf.rank(): 0.5})
        ...     bf.barrier()
        ...     bf.win_update_then_collect("x")
        ...     return bf.win_associated_p("x")
        >>> with bf.local_world(2) as world:
        ...     world.run(halved)
        [1.0, 1.0]
    """
    return windows_of(current()).find("win_associated_p", name).p
