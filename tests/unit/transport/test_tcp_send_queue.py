"""What waits in the TCP sockets of MPI, and which sockets those are."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from asyncddp.tcp_sockets import copy_of, tcp_sockets
from asyncddp.transport import tcp_send_queue
from asyncddp.transport.tcp_send_queue import TCPSendQueueLimit, listening_ports

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sockets are found on Linux alone")


@pytest.fixture
def ends():
    """A socket that listens at all addresses, and both ends of a connection to it."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("0.0.0.0", 0))
        listener.listen()
        here = stack.enter_context(
            socket.create_connection(("127.0.0.1", listener.getsockname()[1]))
        )
        there = stack.enter_context(listener.accept()[0])
        yield listener, here, there


def unsent(end: socket.socket) -> int:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)


def buffer(end: socket.socket) -> int:
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_both_ends_of_a_connection_and_who_listens_are_found(ends):
    """By descriptor, ports, and whether other machines can reach it; a copy sets options."""
    listener, here, there = ends
    found = {one.descriptor: one for one in tcp_sockets()}
    port = listener.getsockname()[1]
    assert (found[listener.fileno()].port, found[listener.fileno()].peer_port) == (port, None)
    assert not found[listener.fileno()].is_loopback
    assert found[here.fileno()].peer_port == found[there.fileno()].port == port
    assert port in listening_ports()
    with copy_of(found[here.fileno()]) as copy:
        copy.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


@pytest.mark.parametrize("who", ["accepts", "connects"])
def test_a_short_link_has_a_small_buffer(ends, who):
    """The end that MPI has is limited when its peer's first message came, and the other never."""
    listener, here, there = ends
    port = listener.getsockname()[1]
    own, others = ([port], {1: []}) if who == "accepts" else ([], {1: [port]})
    mine, other = (there, here) if who == "accepts" else (here, there)
    before = buffer(mine), buffer(other)
    limit = TCPSendQueueLimit(own, others)
    limit.connected(0)  # a rank of this machine
    assert (buffer(mine), buffer(other)) == before
    limit.connected(1)
    assert buffer(mine) == 2 * (128 << 10), "of which the kernel keeps a half to itself"
    assert buffer(other) == before[1]


def test_a_long_link_keeps_its_buffer_and_limits_what_is_unsent(ends, monkeypatch):
    """From a round trip of a millisecond on; no connection here takes as long, so none is short."""
    listener, here, _ = ends
    monkeypatch.setattr(tcp_send_queue, "_SHORT_MICROSECONDS", 0)
    before = buffer(here)
    TCPSendQueueLimit([], {1: [listener.getsockname()[1]]}).connected(1)
    assert buffer(here) == before
    assert unsent(here) == 32 << 10


def test_a_connection_is_limited_once(ends):
    """What a user has set since then stays."""
    listener, here, _ = ends
    port = listener.getsockname()[1]
    limit = TCPSendQueueLimit([], {1: [port], 2: [port]})
    limit.connected(1)
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    limit.connected(2)
    assert buffer(here) == 2 * (64 << 10)
