"""Ring buffers cut into small chunks, so that small tensors go through several."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from asyncddp.ops import shared_memory_fast_path
from asyncddp.shm import chunk_layout

__all__ = ["in_small_chunks"]

_SIZES = {
    (chunk_layout, "_DOUBLED"): 1 << 14,
    (chunk_layout, "_WHOLE"): 1 << 15,
    (chunk_layout, "_CHUNK"): 1 << 13,
    (shared_memory_fast_path, "_SMALL"): 1 << 13,
}


def in_small_chunks(case: Callable[..., Any], *given: Any) -> Any:
    """Run a case with chunks of 8 KiB, of tensors above 32 KiB: 1/64 or less of the usual.

    The protocol does not know how large a chunk is, and small ones cost the tests a third less.
    Each rank must be a process: threads would have the sizes in common.
    """
    before = {place: getattr(*place) for place in _SIZES}
    _set(_SIZES)
    try:
        return case(*given)
    finally:
        _set(before)


def _set(sizes: dict[tuple[ModuleType, str], int]) -> None:
    for place, size in sizes.items():
        setattr(*place, size)
