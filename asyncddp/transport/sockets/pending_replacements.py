"""Replacement processes that wait until the ranks let them take a lost rank's place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncddp.membership import View
from asyncddp.serialization import pack, unpack
from asyncddp.transport.sockets.connection import Connection
from asyncddp.transport.sockets.frames import FrameHeader, FrameKind
from asyncddp.transport.sockets.world_records import RankRecord


class ReplacementRequest(NamedTuple):
    """Message of a replacement process to a rank: its addresses, and if it is ready to join."""

    record: RankRecord
    ready: bool


class ReplacementReply(NamedTuple):
    """Reply of a rank to a replacement process: members, ranks' records, and any refusal."""

    view: View
    records: tuple[RankRecord, ...]
    refusal: str


def replacement_frame(
    rank: int, message: ReplacementRequest | ReplacementReply
) -> tuple[FrameHeader, bytes]:
    """Make the frame of a message between a replacement and a rank."""
    data = pack(message)
    return FrameHeader(FrameKind.JOIN, 0, 0, rank, len(data)), data


class PendingReplacement:
    """Replacement process that waits for a lost rank's place, and the frames that it has sent."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.record: RankRecord | None = None
        self.frames: list[tuple[FrameHeader, bytes]] = []
        self.ended = False

    def on_frame(self, header: FrameHeader, payload: bytes) -> bool | None:
        """Keep a frame; return what a request says of being ready, and None for other frames."""
        if header.kind is not FrameKind.JOIN:
            if header.kind is not FrameKind.FAILED:  # this rank sees by itself who has failed
                self.frames.append((header, payload))
            return None
        request = unpack(payload, ReplacementRequest, "the request of a process that would join")
        self.record = request.record
        return request.ready


class PendingReplacements:
    """Replacement processes that this rank knows, by the rank whose place they would take."""

    def __init__(self) -> None:
        self._by_rank: dict[int, PendingReplacement] = {}
        self._requests: list[tuple[int, bool]] = []

    def add(self, rank: int, connection: Connection) -> PendingReplacement | None:
        """Add a process; return the one that it replaces."""
        replaced, self._by_rank[rank] = self._by_rank.get(rank), PendingReplacement(connection)
        return replaced

    def on_frame(self, connection: Connection, header: FrameHeader, payload: bytes) -> bool:
        """Take a frame of a replacement; False if the connection is another one's."""
        rank = connection.peer
        one = self._by_rank.get(-1 if rank is None else rank)
        if rank is None or one is None or one.connection is not connection:
            return False
        ready = one.on_frame(header, payload)
        if ready is not None:
            self._requests.append((rank, ready))
        return True

    def on_end(self, connection: Connection) -> bool:
        """Record that a replacement has ended; False if the connection is another one's."""
        found = [one for one in self._by_rank.values() if one.connection is connection]
        for one in found:
            one.ended = True
        return bool(found)

    def take_requests(self) -> Sequence[tuple[int, bool]]:
        """Return the ranks whose replacements have asked, and if they are ready, each once."""
        if not self._requests:
            return ()
        taken, self._requests = self._requests, []
        return taken

    def get(self, rank: int) -> PendingReplacement | None:
        """Return the process that would be a rank, if there is one."""
        return self._by_rank.get(rank)

    def let_in(self, rank: int) -> PendingReplacement | None:
        """Return the process that becomes a rank, and forget it; None if it has ended."""
        self._requests = [one for one in self._requests if one[0] != rank]  # it has asked again
        found = self._by_rank.pop(rank, None)
        return None if found is None or found.ended or found.record is None else found
