"""Mesh of sockets between the ranks of a run, with notification of failed ranks.

Two ranks of one machine talk over a Unix socket, others over TCP; a connection is opened when it is
first needed. Every rank keeps one to the first ranks, which pass on what they see of failures, so
that the end of a process is known to all ranks at once, whoever waits for it.
"""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Callable, Sequence
from hmac import compare_digest

from typing_extensions import override

from asyncddp.errors import PeerLeftError
from asyncddp.membership import View
from asyncddp.serialization import unpack
from asyncddp.transport.sockets.addresses import connect_to
from asyncddp.transport.sockets.authentication import code_of
from asyncddp.transport.sockets.connection import (
    BulkReceive,
    BulkReceives,
    BulkSend,
    Connection,
    GroupFrameHandler,
    Payload,
    PayloadTarget,
)
from asyncddp.transport.sockets.connection_losses import ConnectionLosses
from asyncddp.transport.sockets.frames import FrameHeader, FrameKind
from asyncddp.transport.sockets.machine_watch import MachineWatch
from asyncddp.transport.sockets.pending_replacements import (
    PendingReplacements,
    ReplacementReply,
    ReplacementRequest,
    replacement_frame,
)
from asyncddp.transport.sockets.polled_connections import PolledConnections
from asyncddp.transport.sockets.world_records import WorldRecord

_WATCHED = 16  # the first ranks, to which all others are connected
_CLOSE_TIMEOUT = 1.0  # seconds in which close() tries to send the last messages
_LINGER = 0.2  # seconds in which it waits for the others to leave as well


class SocketMesh(PolledConnections):
    """Connections of one rank to the other ranks of its world.

    Attributes:
        lock: Held by every call; several transports of one rank share the mesh.
        failed: Ranks that have failed, with the reason.
        losses: Connections that were lost, which tell whether these ranks have ended.
        departed: Ranks that have left in an orderly way.
        make_endpoint: Makes the endpoint of a group whose first frame comes before it exists here.
    """

    def __init__(
        self, world: WorldRecord, listeners: Sequence[socket.socket], *, joins: bool = False
    ) -> None:
        super().__init__(listeners, MachineWatch(world.network_timeout))
        self.world, self.rank, self.size = world, world.rank, len(world.records)
        self.lock = threading.RLock()
        self.failed: dict[int, str] = {}
        self.losses = ConnectionLosses()
        self.departed: set[int] = set()
        self._suspected: dict[int, str] = {}  # ranks that others call failed, and why
        self.endpoints: dict[int, GroupFrameHandler] = {}
        self.bulk_receives = BulkReceives()
        self.rounds: list[Callable[[], object]] = []  # called in every round of progress
        self._numbers = itertools.count(1)  # of large tensors that this rank sends
        self._waiting_frames: dict[int, list[tuple[int, FrameHeader, Payload]]] = {}
        self._routes: dict[int, Connection] = {}  # by rank: where this rank sends
        self._came: set[int] = set()  # ranks that have connected with this one
        self.joins = joins
        self.pending_replacements = PendingReplacements()
        self.answers: dict[int, ReplacementReply] = {}  # to this rank's questions, where it joins
        for peer in range(self.size if joins else min(self.rank, _WATCHED)):
            if peer != self.rank:
                self.connect(peer)

    @override
    def _drop(self, connection: Connection) -> None:
        super()._drop(connection)
        if connection.peer is not None and self._routes.get(connection.peer) is connection:
            del self._routes[connection.peer]

    # sending

    def connect(self, peer: int) -> Connection | None:
        """Return the connection to a rank, opening it if need be; None if the rank is gone."""
        if peer in self._routes or peer in self.failed or peer in self.departed or self.closed:
            return self._routes.get(peer)
        try:
            sock = connect_to(self.world.me, self.world.records[peer], self.world.network_timeout)
        except OSError as error:
            self._mark_lost(peer, error)
            return None
        connection = Connection(sock, peer, lambda: self.piece)
        self._add(connection)
        self._routes[peer] = connection
        self._say_hello(connection, peer, joins=self.joins)
        return connection

    def _say_hello(self, connection: Connection, peer: int, *, joins: bool = False) -> None:
        code = code_of(self.world.key, self.rank, peer)
        header = FrameHeader(FrameKind.HELLO, int(joins), 0, self.rank, len(code))
        connection.send_frame(header, code)
        self._flush(connection)

    def send_frame(
        self,
        peer: int,
        header: FrameHeader,
        payload: bytes | memoryview = b"",
        on_sent: Callable[[], object] | None = None,
    ) -> None:
        """Send a frame to another rank; drop it if that rank is gone.

        ``on_sent`` is called once the system has taken the frame, or it was dropped.
        """
        connection = self.connect(peer)
        if connection is not None:
            connection.send_frame(header, payload, on_sent)
            self._flush(connection)
        elif on_sent is not None:
            on_sent()

    def next_number(self) -> int:
        """Return a number for a large tensor that this rank sends."""
        return next(self._numbers)

    def send_bulk(self, peer: int, send: BulkSend) -> None:
        """Send the part of an announced tensor that has credit."""
        connection = self.connect(peer)
        if connection is not None:
            connection.send_bulk(send)
            self._flush(connection)

    # progress

    def progress(self) -> None:
        """Send and receive without blocking, and run the registered progress functions."""
        if self.closed:
            return
        self.move_bytes()
        for connection in self._watch.find_lost(self._connections.values()):
            self._lose(connection, TimeoutError("its machine does not answer"))
        for call in list(self.rounds):
            call()

    @override
    def _lose(self, connection: Connection, error: Exception) -> None:
        self._drop(connection)
        if self.pending_replacements.on_end(connection):
            return
        if connection.peer is not None and not connection.said_bye:
            self._mark_lost(connection.peer, error)

    # frames

    @override
    def _payload_target(self, connection: Connection, header: FrameHeader) -> PayloadTarget | None:
        if connection.peer is None or not connection.proven:
            return None
        if header.kind is FrameKind.DATA:
            return self.bulk_receives.target(connection.peer, header)
        if header.kind is FrameKind.MESSAGE and header.size > 1 << 17:
            memory, peer = bytearray(header.size), connection.peer
            return PayloadTarget(memoryview(memory), lambda: self._deliver(peer, header, memory))
        return None

    @override
    def _handle(self, connection: Connection, header: FrameHeader, payload: bytes) -> None:
        if connection.peer is None or not connection.proven:
            self._check_hello(connection, header, payload)
        elif self.pending_replacements.on_frame(connection, header, payload):
            return
        elif header.kind is FrameKind.JOIN:
            if self.joins:  # else a rank that is in, and does not know yet, has asked again
                reply = unpack(payload, ReplacementReply, "the reply of a rank")
                self.answers[connection.peer] = reply
        elif header.kind is FrameKind.BYE:
            connection.said_bye = True
            self.departed.add(connection.peer)
        elif header.kind is FrameKind.FAILED:
            reason = payload.decode("utf-8", "replace")
            self._hear_of_failure(connection.peer, header.number, reason)
        elif header.kind is FrameKind.RTS:
            bulk = self.bulk_receives[connection.peer, header.number] = BulkReceive(header.size)
            self._deliver(connection.peer, header, bulk)
        elif header.kind is FrameKind.WITHDRAWN:
            self.bulk_receives.pop((connection.peer, header.number), None)
            self._deliver(connection.peer, header, payload)
        else:
            self._deliver(connection.peer, header, payload)

    def _check_hello(self, connection: Connection, header: FrameHeader, payload: bytes) -> None:
        """Check a connection's first frame, which proves the rank of the other end."""
        peer, opened_here = header.number, connection.peer is not None
        here = peer < self.size and peer != self.rank
        joins = here and header.tag and not opened_here
        free = here and (joins or peer not in self._came)
        may_be = peer == connection.peer if opened_here else free
        code = code_of(self.world.key, peer, self.rank)
        if header.kind is not FrameKind.HELLO or not may_be or not compare_digest(payload, code):
            raise ValueError("a connection that is none of this run")
        connection.trust(peer)
        if joins:
            del self._unknown[connection]
            replaced = self.pending_replacements.add(peer, connection)
            if replaced is not None:
                self._drop(replaced.connection)
            self._say_hello(connection, peer)
            return
        self._suspected.pop(peer, None)
        if not opened_here:
            del self._unknown[connection]
            self._came.add(peer)
            self._say_hello(connection, peer)
            self._routes.setdefault(peer, connection)

    def _deliver(self, peer: int, header: FrameHeader, payload: Payload) -> None:
        endpoint = self.endpoints.get(header.group)
        if endpoint is None:
            self._waiting_frames.setdefault(header.group, []).append((peer, header, payload))
        else:
            endpoint.on_frame(peer, header, payload)

    # processes that become a lost rank

    def ask(self, peer: int, request: ReplacementRequest) -> None:
        """Ask a rank to be let in, where this process joins."""
        self.send_frame(peer, *replacement_frame(self.rank, request))

    def answer(self, peer: int, view: View, refusal: str) -> None:
        """Answer the process that would be a rank."""
        replacement = self.pending_replacements.get(peer)
        if replacement is not None and not replacement.ended:
            answer = ReplacementReply(view, self.world.records, refusal)
            replacement.connection.send_frame(*replacement_frame(self.rank, answer))
            self._flush(replacement.connection)

    def readmit(self, peer: int) -> None:
        """Exchange frames with the process that has become a rank."""
        replacement = self.pending_replacements.let_in(peer)
        for connection in [one for one in self._connections.values() if one.peer == peer]:
            if replacement is None or connection is not replacement.connection:
                self._drop(connection)
        self.failed.pop(peer, None)
        self.losses.forget(peer)
        self.departed.discard(peer)
        self._suspected.pop(peer, None)
        for key in [key for key in self.bulk_receives if key[0] == peer]:
            del self.bulk_receives[key]
        if replacement is None or replacement.record is None:
            self.mark_failed(peer, "it has ended before it could join")
            return
        records = list(self.world.records)
        records[peer] = replacement.record
        self.world = self.world._replace(records=tuple(records))
        self._came.add(peer)
        self._routes[peer] = replacement.connection
        for header, payload in replacement.frames:
            self._handle(replacement.connection, header, payload)

    # failures, and the end

    def _mark_lost(self, peer: int, error: Exception) -> None:
        """Record that a rank has failed, to which this one has lost the connection."""
        me, theirs = self.world.me, self.world.records[peer]
        self.mark_failed(peer, self.losses.add(peer, me, theirs, error, self._suspected.get(peer)))

    def mark_failed(self, peer: int, reason: str) -> None:
        """Record that a rank has failed, and notify the other ranks if this is new."""
        if peer in self.failed or peer in self.departed or peer == self.rank or self.closed:
            return
        self.failed[peer] = reason
        self._routes.pop(peer, None)
        self.tell_of_failure(peer, reason)

    def _hear_of_failure(self, teller: int, peer: int, reason: str) -> None:
        """Trust a rank's report of its own failure; check another rank's by connecting.

        One that reaches no peer may itself have lost its network, or have no open files left.
        """
        if peer >= self.size:
            raise ValueError(f"news of rank {peer}, where there are {self.size} ranks")
        if teller == peer:
            self.mark_failed(peer, reason)
        else:
            self._suspected.setdefault(peer, reason)
            self.connect(peer)

    def tell_of_failure(self, failed: int, reason: str) -> None:
        """Notify all connected ranks that a rank has failed."""
        text = reason.encode()
        header = FrameHeader(FrameKind.FAILED, 0, 0, failed, len(text))
        for peer in [peer for peer in self._routes if peer != failed]:
            self.send_frame(peer, header, text)

    def error_of(self, peer: int) -> PeerLeftError | None:
        """Return the error for operations that need a rank, if it has failed."""
        if peer not in self.failed:
            return None
        error = PeerLeftError(
            f"rank {self.rank}: rank {peer} has left ({self.failed[peer]}), but is needed"
        )
        error.origin = peer
        return error

    def close(self) -> None:
        """Send the last messages, announce the departure, and close all connections."""
        if self.closed:
            return
        self.flush_for(_CLOSE_TIMEOUT)
        for connection in list(self._connections.values()):
            if connection.peer is not None:
                connection.send_frame(FrameHeader(FrameKind.BYE))
                self._flush(connection)
        self.flush_for(_CLOSE_TIMEOUT)
        deadline = time.monotonic() + _LINGER
        # bytes that nobody has read would make the system tell the others of a broken connection
        while time.monotonic() < deadline and any(
            connection.peer is not None and not connection.said_bye
            for connection in self._connections.values()
        ):
            self.progress()
            self._epoll.poll(0.01)
        self.closed = True
        for connection in list(self._connections.values()):
            self._drop(connection)
        for listener in self._listeners.values():
            listener.close()
        self._epoll.close()

    def open_endpoint(self, group: int, endpoint: GroupFrameHandler) -> None:
        """Deliver a group's frames to its endpoint, including those that arrived earlier."""
        self.endpoints[group] = endpoint
        for peer, header, payload in self._waiting_frames.pop(group, []):
            endpoint.on_frame(peer, header, payload)
