"""Limit on unsent bytes in MPI's TCP sockets, so that messages leave in the order of need.

Megabytes that wait in one socket take their share of the link from what the next peer needs first.
On a short link a small buffer prevents it. On a long one the buffer has to hold all that is on its
way, 5 MB at 1 Gbit/s and 20 ms: there the kernel decides on its size, and only what has not been
sent is limited, which costs about a tenth of the rate on short ones. Linux only.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterable

from asyncddp.restrict_listening_sockets import listeners
from asyncddp.tcp_sockets import copy_of, tcp_sockets

_SHORT_BUFFER, _UNSENT = 128 << 10, 32 << 10  # bytes
_SHORT_MICROSECONDS = 1000  # there and back; 128 KB in each is a rate of 1 Gbit/s
_MIN_RTT = slice(148, 152)  # where struct tcp_info has tcpi_min_rtt, in microseconds


def listening_ports() -> list[int]:
    """Return the ports where other machines can reach this process; empty if unknown."""
    with contextlib.suppress(OSError):
        return sorted({one.port for one in listeners() if not one.is_loopback})
    return []


class TCPSendQueueLimit:
    """Limiter of MPI's TCP send queues to other machines, applied after the first message.

    Args:
        own_ports: Ports on which this process listens.
        peers: Ports of each rank on another machine.
    """

    def __init__(self, own_ports: Iterable[int], peers: dict[int, list[int]]) -> None:
        self._own = frozenset(own_ports)
        self._others = frozenset(port for ports in peers.values() for port in ports)
        self._new = set(peers)
        self._limited: set[int] = set()

    def connected(self, peer: int) -> None:
        """Record that a message has arrived from a rank; limit its connection if new."""
        if peer not in self._new:
            return
        self._new.remove(peer)
        with contextlib.suppress(OSError):  # closed, or not Linux
            for found in tcp_sockets():
                ours = found.port in self._own or found.peer_port in self._others
                if ours and found.inode not in self._limited:
                    with copy_of(found) as copy:
                        limit_send_queue(copy)
                    self._limited.add(found.inode)


def limit_send_queue(connection: socket.socket) -> None:
    """Limit a connection's send queue according to its round-trip time."""
    with contextlib.suppress(OSError, AttributeError, struct.error):  # closed, or not Linux
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT.stop)
        (round_trip,) = struct.unpack("I", info[_MIN_RTT])
        if round_trip < _SHORT_MICROSECONDS:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SHORT_BUFFER)
        else:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
