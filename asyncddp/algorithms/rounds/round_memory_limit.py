"""Memory limit of averaging rounds, in bytes, from which the size of bucket pieces follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import Self

from asyncddp.context import Context
from asyncddp.tensors.buckets import ALIGNMENT

_IN_SHARED_MEMORY = 4 << 20
"""Default limit in bytes if all ranks share memory, since larger pieces are no faster."""
_PIECES = 8  # that fit into the limit
_MOST_SHARED, _MOST_SENT = 1 << 19, 1 << 22
"""Maximum size of a piece: in shared memory, where it stays in a cache, and by message.
"""


@dataclass(frozen=True)
class RoundMemoryLimit:
    """Memory limit, in bytes, of the messages and ring buffers of averaging rounds.

    Attributes:
        limit: The limit in bytes, for one in-neighbour.
        ahead: Whether pieces are sent as soon as a round starts; if all ranks share memory,
            starting early gains nothing.
    """

    limit: int
    ahead: bool

    @classmethod
    def of(cls, context: Context, limit: int | None) -> Self | None:
        """Make the buffer for a limit, None for the default; return None if unlimited."""
        group = context.transport.shared_memory_group
        shared = group is not None and len(group.processes) == context.size
        if limit is None:
            return cls(_IN_SHARED_MEMORY, ahead=False) if shared else None
        return cls(limit, ahead=not shared)

    def piece_bytes(self, sizes: Sequence[int]) -> int | None:
        """Compute the size of pieces for buckets of given sizes; None if whole buckets fit.

        A whole bucket takes its size as a message, and twice that as a ring buffer. The result is
        equal on all ranks, since pieces are matched by their order.
        """
        if 3 * sum(sizes) <= self.limit:
            return None
        most = min(self.limit // _PIECES, _MOST_SENT if self.ahead else _MOST_SHARED)
        largest = max(sizes)
        number = -(-largest // most)
        return -(-largest // (number * ALIGNMENT)) * ALIGNMENT

    def message_room(self, piece_bytes: int) -> int:
        """Return the bytes left for messages of pieces, besides their ring buffer."""
        return self.limit - 2 * piece_bytes if self.ahead else 0
