"""Connections of one rank, polled to send and receive bytes without blocking."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from asyncddp.transport.sockets.authentication import is_same_user, overdue
from asyncddp.transport.sockets.connection import Connection, PayloadTarget
from asyncddp.transport.sockets.frames import FrameHeader
from asyncddp.transport.sockets.machine_watch import MachineWatch

_PIECE = 1 << 20  # bytes of a large tensor that are sent before others have their turn
_SOCKET_ERRORS = (OSError, EOFError, ValueError)


class PolledConnections(ABC):
    """Connections and listening sockets of one rank, which it polls.

    Attributes:
        wakeup_descriptor: Readable where there is something to receive.
        closed: Whether nothing moves any more.
        piece: Bytes of a large tensor that are sent before others have their turn.
    """

    def __init__(self, listeners: Sequence[socket.socket], watch: MachineWatch) -> None:
        self._watch, self.piece, self.closed = watch, _PIECE, False
        self._listeners = {listener.fileno(): listener for listener in listeners}
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._writing: set[int] = set()
        self._unknown: dict[Connection, float] = {}  # that have not said hello, since when
        self._epoll = select.epoll()
        self.wakeup_descriptor = self._epoll.fileno()
        for descriptor in self._listeners:
            self._epoll.register(descriptor, select.EPOLLIN)

    @abstractmethod
    def progress(self) -> None:
        """Send and receive without blocking."""

    @abstractmethod
    def _handle(self, connection: Connection, header: FrameHeader, payload: bytes) -> None:
        """Handle a frame."""

    @abstractmethod
    def _payload_target(self, connection: Connection, header: FrameHeader) -> PayloadTarget | None:
        """Return the memory for a frame's payload; None where it is handed over with the frame."""

    @abstractmethod
    def _lose(self, connection: Connection, error: Exception) -> None:
        """Drop a connection that has ended or cannot be read."""

    def move_bytes(self) -> None:
        """Accept, send and receive what is there without blocking."""
        for descriptor, events in self._epoll.poll(0):
            if descriptor in self._listeners:
                self._accept(self._listeners[descriptor])
                continue
            known = self._connections.get(descriptor)
            if known is not None and events & select.EPOLLOUT:
                self._flush(known)
            if known is not None and events & ~select.EPOLLOUT:
                self._receive(known)
        for connection in overdue(self._unknown) if self._unknown else ():
            self._drop(connection)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            if sock.family == socket.AF_UNIX and not is_same_user(sock):
                sock.close()
                return
            connection = Connection(sock, None, lambda: self.piece)
            self._add(connection)
            self._unknown[connection] = time.monotonic()

    def _add(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        self._connections[descriptor] = connection
        self._watch.begin(connection.socket)
        self._epoll.register(descriptor, select.EPOLLIN)

    def _flush(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        if descriptor not in self._connections:
            return
        try:
            connection.flush()
        except OSError:
            # the end is found by reading: what was said last, such as BYE, may still be there
            connection.discard_output()
        if connection.wants_to_write != (descriptor in self._writing):
            wanted = select.EPOLLIN
            if connection.wants_to_write:
                self._writing.add(descriptor)
                wanted |= select.EPOLLOUT
            else:
                self._writing.discard(descriptor)
            self._epoll.modify(descriptor, wanted)

    def _receive(self, connection: Connection) -> None:
        try:
            for header, payload in connection.receive(self._payload_target):
                self._handle(connection, header, payload)
        except _SOCKET_ERRORS as error:
            self._lose(connection, error)

    def _drop(self, connection: Connection) -> None:
        descriptor = connection.socket.fileno()
        if self._connections.pop(descriptor, None) is not None:
            self._epoll.unregister(descriptor)
            self._writing.discard(descriptor)
            self._unknown.pop(connection, None)
            connection.discard_output()
            connection.close()

    def flush_for(self, seconds: float) -> None:
        """Wait, up to a timeout, until all is sent and new connections are identified."""
        deadline = time.monotonic() + seconds
        self.progress()
        while (self._writing or self._unknown) and time.monotonic() < deadline:
            self._epoll.poll(0.01)
            self.progress()
