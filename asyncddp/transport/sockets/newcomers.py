"""Newcomers: processes that would take a lost rank's place, until the others let them in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from asyncddp.membership import View
from asyncddp.serialization import pack, unpack
from asyncddp.transport.sockets.connection import Connection
from asyncddp.transport.sockets.frames import FrameHeader, FrameKind
from asyncddp.transport.sockets.world_records import RankRecord


class JoinQuestion(NamedTuple):
    """Message of a newcomer to a rank: its record, and True once it is ready to take part."""

    record: RankRecord
    ready: bool


class JoinAnswer(NamedTuple):
    """Answer of a rank: its view, the records of all ranks, and why the newcomer cannot join."""

    view: View
    records: tuple[RankRecord, ...]
    refusal: str


def join_frame(rank: int, message: JoinQuestion | JoinAnswer) -> tuple[FrameHeader, bytes]:
    """Make the frame of a message between a newcomer and a rank."""
    data = pack(message)
    return FrameHeader(FrameKind.JOIN, 0, 0, rank, len(data)), data


class Newcomer:
    """Process that asks to take a lost rank's place; its frames wait until it is let in."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.record: RankRecord | None = None
        self.frames: list[tuple[FrameHeader, bytes]] = []
        self.ended = False

    def on_frame(self, header: FrameHeader, payload: bytes) -> bool | None:
        """Keep a frame; return what a question says of being ready, and None for other frames."""
        if header.kind is not FrameKind.JOIN:
            if header.kind is not FrameKind.FAILED:  # this rank sees by itself who has failed
                self.frames.append((header, payload))
            return None
        question = unpack(payload, JoinQuestion, "the question of a process that would join")
        self.record = question.record
        return question.ready


class Newcomers:
    """Newcomers that this rank knows, by the rank that they would be."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Newcomer] = {}
        self._questions: deque[tuple[int, bool]] = deque()

    def add(self, rank: int, connection: Connection) -> Newcomer | None:
        """Add a newcomer; return the one that it replaces."""
        replaced, self._by_rank[rank] = self._by_rank.get(rank), Newcomer(connection)
        return replaced

    def on_frame(self, connection: Connection, header: FrameHeader, payload: bytes) -> bool:
        """Take a frame of a newcomer; False if the connection is another one's."""
        rank = connection.peer
        one = self._by_rank.get(-1 if rank is None else rank)
        if rank is None or one is None or one.connection is not connection:
            return False
        ready = one.on_frame(header, payload)
        if ready is not None:
            self._questions.append((rank, ready))
        return True

    def on_end(self, connection: Connection) -> bool:
        """Record that a newcomer has ended; False if the connection is another one's."""
        found = [one for one in self._by_rank.values() if one.connection is connection]
        for one in found:
            one.ended = True
        return bool(found)

    def questions(self) -> Iterable[tuple[int, bool]]:
        """Return the ranks whose newcomers have asked, and if they are ready, each once."""
        while self._questions:
            yield self._questions.popleft()

    def get(self, rank: int) -> Newcomer | None:
        """Return the newcomer that would be a rank, if there is one."""
        return self._by_rank.get(rank)

    def let_in(self, rank: int) -> Newcomer | None:
        """Return a newcomer that becomes a rank, and forget it; None if it has ended."""
        found = self._by_rank.pop(rank, None)
        return None if found is None or found.ended or found.record is None else found
