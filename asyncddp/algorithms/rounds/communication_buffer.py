"""Limit on the memory that averaging rounds take besides the buckets, and what pieces fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Self

from asyncddp.context import Context
from asyncddp.tensors.buckets import ALIGNMENT

_IN_SHARED_MEMORY = 4 << 20
"""Limit in bytes where all ranks share memory: there larger pieces are no faster."""
_PIECES = 8  # that fit into the limit
_MOST_SHARED, _MOST_SENT = 1 << 19, 1 << 22
"""Most bytes of a piece where ranks share memory, which stays in a cache, and of one that is sent.
"""


@dataclass(frozen=True)
class CommunicationBuffer:
    """Limit on the bytes of messages under way and ring buffers.

    Attributes:
        limit: The limit in bytes, for one in-neighbour.
        ahead: Whether pieces are sent as soon as a round starts; where all ranks share memory,
            starting early gains nothing.
    """

    limit: int
    ahead: bool

    @classmethod
    def of(cls, context: Context, limit: int | None) -> Self | None:
        """Return the buffer of that many bytes, or the default for None; None for no limit."""
        group = context.transport.shared_memory_group
        shared = group is not None and len(group.processes) == context.size
        if limit is None:
            return cls(_IN_SHARED_MEMORY, ahead=False) if shared else None
        return cls(limit, ahead=not shared)

    def piece_bytes(self, sizes: Sequence[int]) -> int | None:
        """Compute the bytes of pieces for buckets of such sizes; None if whole buckets fit.

        A whole bucket takes its size as a message, and twice that as a ring buffer. Equal on all
        ranks, since pieces are matched by their order.
        """
        if 3 * sum(sizes) <= self.limit:
            return None
        most = min(self.limit // _PIECES, _MOST_SENT if self.ahead else _MOST_SHARED)
        largest = max(sizes)
        number = -(-largest // most)
        return -(-largest // (number * ALIGNMENT)) * ALIGNMENT

    def message_room(self, piece_bytes: int) -> int:
        """Return the bytes that the messages of such pieces may take, beside their ring buffer."""
        return self.limit - 2 * piece_bytes if self.ahead else 0
