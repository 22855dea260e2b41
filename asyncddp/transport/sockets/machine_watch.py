"""Detection of machines that have lost power or network, by probes over idle connections."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable, Sequence

from asyncddp.config import keepalive_times
from asyncddp.transport.sockets.connection import Connection

_CHECK_SECONDS = 1.0  # at most, between two looks
_INFO = struct.Struct("=BxBB52xI")  # of struct tcp_info: state, retransmits, probes, last_ack_recv
_ESTABLISHED = 1
_KEEPALIVE = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT


class MachineWatch:
    """Watch that finds connections to machines that no longer respond.

    The system probes idle connections. For connections with bytes in flight, it reports the time
    since the last acknowledgement. Its own limit, ``TCP_USER_TIMEOUT``, would also close
    connections to a process that does not read, although its machine responds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._next = seconds, 0.0

    def begin(self, connection: socket.socket) -> None:
        """Enable TCP keepalive probes on a connection."""
        if connection.family == socket.AF_UNIX:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in zip(_KEEPALIVE, keepalive_times(self._seconds), strict=True):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def find_lost(self, connections: Iterable[Connection]) -> Sequence[Connection]:
        """Return, at intervals, connections whose machine has not responded for too long."""
        now = time.monotonic()
        if now < self._next:
            return ()
        self._next = now + min(_CHECK_SECONDS, self._seconds / 10)
        return [one for one in connections if self._is_silent(one.socket)]

    def _is_silent(self, connection: socket.socket) -> bool:
        if connection.family == socket.AF_UNIX:
            return False
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        state, retransmits, probes, milliseconds = _INFO.unpack(info)
        unanswered = state == _ESTABLISHED and (retransmits > 1 or probes > 1)
        return bool(unanswered and milliseconds > 900 * self._seconds)
