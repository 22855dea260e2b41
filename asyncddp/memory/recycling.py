"""Memory for large tensors that is used again: fresh pages cost more than averaging does.

The C library gives every block above some 32 MB back to the system as soon as it is free, and the
system clears each page of the next one on its first touch. Here a block goes back to a shelf when
the last tensor that uses it is gone, wherever that tensor has been meanwhile.
"""

from __future__ import annotations

import math
import threading
import weakref

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Shelf", "empty"]

_Block = npt.NDArray[np.uint8]
_ALIGNMENT = 64  # bytes, as torch's own allocator gives


class Shelf:
    """Blocks of memory that wait to be used again.

    Args:
        smallest: Bytes below which recycling is not worth it.
        limit: Bytes that may wait at most; what comes beyond is freed.

    Example:
        >>> shelf = Shelf(smallest=1, limit=1 << 20)
        >>> first = shelf.empty((4,), torch.float32).data_ptr()
        >>> shelf.waiting
        16
        >>> shelf.empty((2, 2), torch.float32).data_ptr() == first
        True
    """

    def __init__(self, smallest: int, limit: int) -> None:
        self._smallest, self._limit = smallest, limit
        self._lock = threading.RLock()  # a finalizer may run in the middle of anything
        self._blocks: dict[int, list[_Block]] = {}
        self.waiting = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Make a contiguous host tensor with whatever values its memory holds.

        Args:
            shape: Its shape.
            dtype: Its dtype.

        Returns:
            The tensor; its block comes back by itself when nothing uses it any more.
        """
        size = math.prod(shape) * dtype.itemsize
        if size < self._smallest:
            return torch.empty(shape, dtype=dtype, device="cpu")
        block = self._take(size)
        lent = block[:]  # what the tensor holds on to; the block itself outlives it
        weakref.finalize(lent, self._back, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _take(self, size: int) -> _Block:
        with self._lock:
            waiting = self._blocks.get(size)
            if waiting:
                self.waiting -= size
                return waiting.pop()
        room = np.empty(size + _ALIGNMENT, dtype=np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        return room[start : start + size]

    def _back(self, block: _Block) -> None:
        with self._lock:
            if self.waiting + block.nbytes > self._limit:
                self._blocks.clear()  # sizes that nobody asks for must not keep the others out
                self.waiting = 0
            if block.nbytes <= self._limit:
                self._blocks.setdefault(block.nbytes, []).append(block)
                self.waiting += block.nbytes


_SHELF = Shelf(smallest=1 << 20, limit=1 << 29)


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """:meth:`Shelf.empty` of the shelf of this process, which keeps half a gigabyte at most."""
    return _SHELF.empty(tuple(shape), dtype)
