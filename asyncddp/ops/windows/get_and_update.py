"""``win_get`` and ``win_update``: read neighbours' tensors and average with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.ops.weighted_average import require_finite
from asyncddp.ops.windows.locking import require_integer_weights, weights_by_rank
from asyncddp.torch_modes import uncompiled
from asyncddp.windows import windows_of
from asyncddp.windows.nonblocking_handle import WindowHandle


@uncompiled
def win_get_nonblocking(
    name: str,
    src_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> WindowHandle:
    """Start :func:`win_get` and return a handle."""
    windows = windows_of(current())
    window = windows.find("win_get", name)
    if src_weights is None:
        src_weights = list(window.neighbors_at(window.step_of_update).src_weights)
    known = window.edges.incoming
    weights = weights_by_rank("win_get", "src_weights", src_weights, known, "an in-neighbour")
    if window.holds_integers:
        require_integer_weights("win_get", window, weights.values())
    if not require_mutex:
        return windows.get(window, weights)
    with window.mutex.holding((), weights):
        handle = windows.get(window, weights)
        handle.wait()
    return handle


@uncompiled
def win_get(
    name: str,
    src_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> bool:
    r"""Read neighbours' tensors into this rank's buffers, without their participation.

    .. math:: b_j \leftarrow w_j x_j

    A neighbour's tensor is the one that it published last: in ``win_create``, in puts of the
    window's own tensor, and, as long as it has not put anything or once a rank has called
    ``win_get``, in ``win_update``.

    Args:
        name: The window.
        src_weights: :math:`w_j` by rank, or ranks of weight 1; if None the round's in-neighbours.
        require_mutex: Wait while this rank's buffers are held by their writers' mutex.

    Returns:
        True, once the values are here.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: A rank that is no in-neighbour, or weights of integers that are not whole.
        PeerError: A neighbour has freed the window.
        PeerLeftError: A neighbour has ended.
        WaitTimeoutError: A neighbour on another machine cannot be reached by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> def fetched():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     bf.win_get("x")
        ...     return bf.win_read_neighbor("x", 1 - bf.rank()).item()
        >>> with bf.local_world(2) as world:
        ...     world.run(fetched)
        [1.0, 0.0]
    """
    return win_get_nonblocking(name, src_weights, require_mutex).wait()


@uncompiled
def win_update(
    name: str,
    self_weight: float | None = None,
    src_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
    require_mutex: bool = False,
) -> torch.Tensor:
    r"""Average this rank's tensor with its buffers, without waiting for other ranks.

    .. math:: x \leftarrow w_0 x + \sum_j w_j b_j

    A neighbour that was killed or has raised an error is left out: if the weights sum to 1, its
    weight is added to that of this rank's own tensor.

    Args:
        name: The window.
        self_weight: :math:`w_0`.
        src_weights: :math:`w_j` of in-neighbours. Give both or neither; by default the topology's
            weights of the round.
        reset: Whether the buffers of these neighbours are zero afterwards.
        clone: Return a new tensor, and leave this rank's own tensor unchanged.
        require_mutex: Wait while a neighbour holds this rank's mutex.

    Returns:
        The tensor that ``win_create`` was given, or the new one.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: One weight alone, no in-neighbour, or fractional weights of integers.
        PeerLeftError: A neighbour has ended, and what it published last cannot be read any more.

    Example:
        >>> import asyncddp as bf, torch
        >>> def averaged():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     bf.win_put(x, "x")
        ...     bf.barrier()
        ...     return bf.win_update("x", 0.75, {1 - bf.rank(): 0.25}).item()
        >>> with bf.local_world(2) as world:
        ...     world.run(averaged)
        [0.25, 0.75]
    """
    window = windows_of(current()).find("win_update", name)
    weights: Mapping[int, float]
    if self_weight is None and src_weights is None:
        neighbors = window.neighbors_at(window.step_of_update)
        own, weights = neighbors.self_weight, neighbors.src_weights
    elif self_weight is None or not isinstance(src_weights, Mapping):
        raise ArgumentError(
            "win_update: arguments self_weight, src_weights: expected neither, or a number "
            f"and a mapping {{rank: weight}}, got {self_weight!r} and {src_weights!r}"
        )
    else:
        known = window.edges.incoming
        weights = weights_by_rank(
            "win_update", "src_weights", src_weights, known, "an in-neighbour"
        )
        own = require_finite("win_update", "self_weight", self_weight)
    if window.holds_integers:
        require_integer_weights("win_update", window, [own, *weights.values()])
    if not require_mutex:
        return window.update(own, weights, reset=reset, clone=clone, with_p=window.with_p)
    with window.mutex.holding((), weights):
        return window.update(own, weights, reset=reset, clone=clone, with_p=window.with_p)


@uncompiled
def win_update_then_collect(name: str, require_mutex: bool = True) -> torch.Tensor:
    r"""Add all buffers to this rank's tensor, and set them to zero.

    .. math:: x \leftarrow x + \sum_j b_j, \qquad b_j \leftarrow 0

    Each value that a neighbour has accumulated is collected exactly once.

    Args:
        name: The window.
        require_mutex: Wait while a neighbour holds this rank's mutex.

    Returns:
        The tensor that ``win_create`` was given.

    Raises:
        UnknownNameError: There is no such window.

    Example: see :func:`win_accumulate`.
    """
    window = windows_of(current()).find("win_update_then_collect", name)
    ones = dict.fromkeys(window.edges.incoming, 1.0)
    return win_update(name, 1.0, ones, reset=True, require_mutex=require_mutex)


@uncompiled
def win_read_neighbor(name: str, rank: int, require_mutex: bool = True) -> torch.Tensor:
    """Return a copy of one in-neighbour's buffer, without changing the buffer.

    Args:
        name: The window.
        rank: The neighbour.
        require_mutex: Wait while it holds this rank's mutex.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: The rank is no in-neighbour.
        PeerLeftError: The neighbour has ended, and what it published last cannot be read any more.

    Example: see :func:`win_put`.
    """
    window = windows_of(current()).find("win_read_neighbor", name)
    known = window.edges.incoming
    (source,) = weights_by_rank("win_read_neighbor", "rank", [rank], known, "an in-neighbour")
    if not require_mutex:
        return window.read_buffer(source)
    with window.mutex.holding((), [source]):
        return window.read_buffer(source)
