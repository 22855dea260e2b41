"""``win_put`` and ``win_accumulate``: overwrite neighbours' buffers, or add to them, one-sided."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from asyncddp.context import current
from asyncddp.errors import ArgumentError
from asyncddp.ops.validation import check_tensor
from asyncddp.ops.weighted_average import require_finite
from asyncddp.ops.windows.locking import require_integer_weights, weights_by_rank
from asyncddp.torch_modes import uncompiled
from asyncddp.windows import Window, windows_of
from asyncddp.windows.nonblocking_handle import WindowHandle


@uncompiled
def win_put_nonblocking(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> WindowHandle:
    """Start :func:`win_put` and return a handle; the tensor may be changed at once."""
    return _write("win_put", tensor, name, self_weight, dst_weights, require_mutex)


@uncompiled
def win_put(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> bool:
    r"""Overwrite this rank's buffer at neighbours, without their participation.

    .. math:: b_i^{(j)} \leftarrow w_j x \quad \text{at each rank j}, \qquad x \leftarrow w_0 x

    Args:
        tensor: x, of the window's shape and dtype.
        name: The window.
        self_weight: :math:`w_0`, a factor that scales ``tensor`` in place at the end; 1 if None.
        dst_weights: :math:`w_j` by rank, or ranks of weight 1; if None the round's out-neighbours.
        require_mutex: Wait while a neighbour holds its own mutex. A put is whole without it.

    Returns:
        True, once all these neighbours can see it.

    Raises:
        UnknownNameError: There is no such window.
        ArgumentError: Another shape or dtype, no out-neighbour, or fractional weights of integers.
        PeerError: A neighbour has freed the window.
        PeerLeftError: A neighbour on another machine has ended.
        WaitTimeoutError: A neighbour on another machine cannot be reached by the deadline.

    Example:
        >>> import asyncddp as bf, torch
        >>> def shifted():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     bf.win_put(10 + x, "x")
        ...     bf.barrier()
        ...     return bf.win_read_neighbor("x", 1 - bf.rank()).item()
        >>> with bf.local_world(2) as world:
        ...     world.run(shifted)
        [11.0, 10.0]
    """
    return win_put_nonblocking(tensor, name, self_weight, dst_weights, require_mutex).wait()


@uncompiled
def win_accumulate_nonblocking(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> WindowHandle:
    """Start :func:`win_accumulate` and return a handle; the tensor may be changed at once."""
    return _write("win_accumulate", tensor, name, self_weight, dst_weights, require_mutex)


@uncompiled
def win_accumulate(
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None = None,
    dst_weights: Mapping[int, float] | Iterable[int] | None = None,
    require_mutex: bool = False,
) -> bool:
    r"""Add a tensor to this rank's buffer at neighbours; otherwise like :func:`win_put`.

    .. math:: b_i^{(j)} \leftarrow b_i^{(j)} + w_j x \quad \text{at each rank j}, \qquad
              x \leftarrow w_0 x

    Windows with a compressor do not support it.

    Example:
        >>> import asyncddp as bf, torch
        >>> def doubled():
        ...     x = torch.tensor([float(bf.rank())])
        ...     bf.win_create(x, "x", zero_init=True)
        ...     for _ in range(2):
        ...         bf.win_accumulate(torch.ones(1), "x")
        ...     bf.barrier()
        ...     return [bf.win_update_then_collect("x").item() for _ in range(2)]
        >>> with bf.local_world(2) as world:
        ...     world.run(doubled)
        [[2.0, 2.0], [3.0, 3.0]]
    """
    return win_accumulate_nonblocking(tensor, name, self_weight, dst_weights, require_mutex).wait()


def _write(
    verb: str,
    tensor: torch.Tensor,
    name: str,
    self_weight: float | None,
    dst_weights: Mapping[int, float] | Iterable[int] | None,
    require_mutex: bool,
) -> WindowHandle:
    window = windows_of(current()).find(verb, name)
    if tensor is not window.tensor:
        _require_matching_tensor(verb, window, tensor)
    if dst_weights is None:
        ranks = window.neighbors_at(window.step_of_put).dst_ranks
        weights: Mapping[int, float] = dict.fromkeys(ranks, 1.0)
    else:
        known = window.edges.outgoing
        weights = weights_by_rank(verb, "dst_weights", dst_weights, known, "an out-neighbour")
    own = 1.0 if self_weight is None else require_finite(verb, "self_weight", self_weight)
    if window.holds_integers:
        require_integer_weights(verb, window, [own, *weights.values()])
    add = verb == "win_accumulate"
    if add and window.stored.codec is not None:
        raise ArgumentError(
            f"win_accumulate: window {name!r} holds tensors encoded by "
            f"{window.stored.codec.compressor!r}, to which nothing can be added; expected win_put, "
            "or a window without compression"
        )
    if not require_mutex:
        return window.put(tensor, own, weights, add=add, with_p=window.with_p)
    with window.mutex.holding(weights, ()):
        handle = window.put(tensor, own, weights, add=add, with_p=window.with_p)
        handle.wait()
    return handle


def _require_matching_tensor(verb: str, window: Window, tensor: torch.Tensor) -> None:
    alike = isinstance(tensor, torch.Tensor) and tensor.dtype == window.dtype
    if not alike or tensor.shape != window.shape or tensor.layout != torch.strided:
        check_tensor(verb, tensor)
        raise ArgumentError(
            f"{verb}: argument tensor: window {window.name!r} holds {window.dtype} of shape "
            f"{window.shape}, got {tensor.dtype} of shape {tuple(tensor.shape)}"
        )
