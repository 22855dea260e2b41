"""A process that is let in has no request left, though it has asked twice."""

from __future__ import annotations

import socket

from asyncddp.transport.sockets.connection import Connection
from asyncddp.transport.sockets.pending_replacements import (
    PendingReplacements,
    ReplacementRequest,
    replacement_frame,
)
from asyncddp.transport.sockets.world_records import make_record


def test_a_request_is_forgotten_when_its_process_is_let_in():
    """It would be taken for that of a further process, and the rank for dead."""
    here, there = socket.socketpair()
    with here, there:
        connection = Connection(here, 2, lambda: 0)
        pending = PendingReplacements()
        pending.add(2, connection)
        record = make_record({}, "", 0, "")
        for ready in (False, True):
            frame = replacement_frame(2, ReplacementRequest(record, ready))
            assert pending.on_frame(connection, *frame)
        assert pending.let_in(2).record == record
        assert not pending.take_requests()
