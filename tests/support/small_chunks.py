"""Ring buffers cut into small chunks, so that small tensors go through several."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncddp.shm import ring_buffer

__all__ = ["in_small_chunks"]


def in_small_chunks(case: Callable[..., Any], *given: Any) -> Any:
    """Run a case with chunks of 8 KiB and, of tensors from 512 KiB on, 16 KiB: 1/64 of the usual.

    The protocol does not know how large a chunk is, and small ones cost the tests a third less.
    Each rank must be a process: threads would have the sizes in common.
    """
    before = ring_buffer._CHUNK_SIZES
    ring_buffer._CHUNK_SIZES = ((1 << 19, 1 << 14), (0, 1 << 13))
    try:
        return case(*given)
    finally:
        ring_buffer._CHUNK_SIZES = before
