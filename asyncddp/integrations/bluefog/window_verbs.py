"""BlueFog's one-sided window operations, such as ``win_put``, with integer handles."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import ParamSpec

import torch

from asyncddp.context import current
from asyncddp.integrations.bluefog.bluefog_state import active_state, current_state
from asyncddp.integrations.bluefog.error_translation import translate_errors, translate_errors_of
from asyncddp.integrations.bluefog.verb_variants import unless_suspended
from asyncddp.ops.variants import set_metadata
from asyncddp.ops.windows import creation, get_and_update, locking, put_and_accumulate
from asyncddp.ops.windows.creation import get_current_created_window_names
from asyncddp.ops.windows.inspection import get_win_version, win_associated_p
from asyncddp.windows import windows_of
from asyncddp.windows.nonblocking_handle import WindowHandle

__all__ = [
    "get_current_created_window_names", "get_win_version", "neighbor_win_accumulate",
    "neighbor_win_accumulate_nonblocking", "neighbor_win_get", "neighbor_win_get_nonblocking",
    "neighbor_win_put", "neighbor_win_put_nonblocking", "turn_off_win_ops_with_associated_p",
    "turn_on_win_ops_with_associated_p", "win_accumulate", "win_accumulate_nonblocking",
    "win_associated_p", "win_cancel", "win_create", "win_free", "win_get", "win_get_nonblocking",
    "win_lock", "win_mutex", "win_poll", "win_put", "win_put_nonblocking", "win_read_neighbor",
    "win_update", "win_update_then_collect", "win_wait",
]  # fmt: skip

logger = logging.getLogger("asyncddp")

P = ParamSpec("P")

win_free = unless_suspended(creation.win_free)
win_update_then_collect = unless_suspended(get_and_update.win_update_then_collect)


def turn_on_win_ops_with_associated_p() -> None:
    """Apply puts, accumulates and updates of all windows to :func:`win_associated_p` as well."""
    _switch_associated_p(on=True)


def turn_off_win_ops_with_associated_p() -> None:
    """Stop applying puts, accumulates and updates of windows to :func:`win_associated_p`."""
    _switch_associated_p(on=False)


def _switch_associated_p(*, on: bool) -> None:
    current_state().associated_p = on
    for window in windows_of(current()):
        window.with_p = on


@unless_suspended
def win_create(tensor: torch.Tensor, name: str, zero_init: bool = False) -> bool:
    """Create a window along the edges of the topology; see :func:`asyncddp.win_create`."""
    made = creation.win_create(tensor, name, zero_init)
    if made:
        windows_of(current()).find("win_create", name).with_p = current_state().associated_p
    return made


@unless_suspended
def win_update(
    name: str,
    self_weight: float | None = None,
    neighbor_weights: Mapping[int, float] | None = None,
    reset: bool = False,
    clone: bool = False,
    require_mutex: bool = False,
) -> torch.Tensor:
    """Average the buffers with this rank's tensor; return it; see :func:`asyncddp.win_update`."""
    return get_and_update.win_update(
        name, self_weight, neighbor_weights, reset, clone, require_mutex
    )


@unless_suspended
def win_read_neighbor(name: str, rank_: int, require_mutex: bool = True) -> torch.Tensor:
    """Return a copy of one in-neighbour's buffer; see :func:`asyncddp.win_read_neighbor`."""
    return get_and_update.win_read_neighbor(name, rank_, require_mutex)


def win_wait(handle: int) -> bool:
    """Wait for a window operation, remove its handle, and return True.

    If there is no such handle, log a warning and return False.
    """
    handles = current_state().windows
    if handle not in handles:
        logger.warning("win_wait: there is no handle %r that nobody has waited for", handle)
        return False
    return handles.pop("win_wait", handle).wait()


def win_poll(handle: int) -> bool:
    """Return True if a window operation is done; never wait."""
    return current_state().windows.find("win_poll", handle).poll()


def win_cancel(handle: int) -> None:
    """Stop waiting for a window operation, which still completes."""
    current_state().windows.pop("win_cancel", handle).cancel()


def _nonblocking(start: Callable[P, WindowHandle]) -> Callable[P, int]:
    """Make BlueFog's variant of a non-blocking window operation: it returns an integer handle."""

    @unless_suspended
    @functools.wraps(start)
    def variant(*args: P.args, **kwargs: P.kwargs) -> int:
        return current_state().windows.add(start(*args, **kwargs))

    doc = "Start a window operation and give a handle for :func:`win_wait`."
    return set_metadata(variant, start.__name__, doc, int)


win_put = neighbor_win_put = unless_suspended(put_and_accumulate.win_put)
win_accumulate = neighbor_win_accumulate = unless_suspended(put_and_accumulate.win_accumulate)
win_get = neighbor_win_get = unless_suspended(get_and_update.win_get)
win_put_nonblocking = _nonblocking(put_and_accumulate.win_put_nonblocking)
win_accumulate_nonblocking = _nonblocking(put_and_accumulate.win_accumulate_nonblocking)
win_get_nonblocking = _nonblocking(get_and_update.win_get_nonblocking)
neighbor_win_put_nonblocking = win_put_nonblocking
neighbor_win_accumulate_nonblocking = win_accumulate_nonblocking
neighbor_win_get_nonblocking = win_get_nonblocking


@contextmanager
def win_mutex(
    name: str, for_self: bool = False, ranks: Iterable[int] | None = None
) -> Iterator[None]:
    """Hold a window's mutex in a ``with`` block; see :func:`asyncddp.win_mutex`."""
    with translate_errors():
        active_state()
        with locking.win_mutex(name, for_self, ranks):
            yield


@contextmanager
def win_lock(name: str) -> Iterator[None]:
    """Lock this rank's own buffers against neighbours that write with ``require_mutex``."""
    with win_mutex(name, for_self=True):
        yield


translate_errors_of(globals(), __all__)
