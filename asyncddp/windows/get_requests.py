"""Get requests: messages that fetch tensors which other ranks have published, and replies."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from asyncddp.engine import ProgressEngine
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.transport.base import SharedMemoryGroup
from asyncddp.windows.edge import PublishedSnapshot
from asyncddp.windows.nonblocking_handle import PendingGet
from asyncddp.windows.staging import scalar_for
from asyncddp.windows.window import Window

GET, LOOK, GOT, GIVE_BACK = "get", "look", "got", "give back"


class GetRequests:
    """Get requests of a rank's windows: sends this rank's, and answers those of other ranks.

    A *get* goes to a neighbour on another machine, which from then on publishes its updates, too. A
    *look* goes to any rank, and changes nothing there; on the same machine the tensor is read in
    place, and its owner keeps it unchanged until it is given back. ``send`` sends a peer a message
    about a window.
    """

    def __init__(
        self, engine: ProgressEngine, group: SharedMemoryGroup | None, send: Callable[..., None]
    ) -> None:
        self._engine, self._group, self._send = engine, group, send
        self._tickets = itertools.count()
        self._pending = weakref.WeakValueDictionary[int, PendingGet]()
        self.handlers = {
            **dict.fromkeys((GET, LOOK), self._handle_request),
            GOT: self._handle_reply,
            GIVE_BACK: self._handle_return,
        }

    def start(self, window: Window, peer: int, word: str) -> PendingGet:
        """Send a peer a request for its tensor: :data:`GET` or :data:`LOOK`."""
        request, ticket = PendingGet(), next(self._tickets)
        self._pending[ticket] = request
        self._send(peer, window.number, word, ticket)
        return request

    def _handle_request(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        edges, ticket, looks = window.edges, facts[0], word == LOOK
        edges.remote_get_received |= not looks
        edges.take_back(self._engine.lost_peers.is_lost)
        offered = edges.hold_offered()
        if offered is None:
            return
        buffer, weight, p, published = offered
        age = time.monotonic() - published if looks else 0.0
        reply = partial(self._send, peer, window.number, GOT, ticket, window.clock, age)
        near = looks and self._group is not None and peer in self._group.processes
        if near and buffer.place is not None and buffer.tensor.numel():
            edges.lent[peer, ticket] = buffer
            reply(1.0 / p, *buffer.place)
            return
        try:
            factor = scalar_for(buffer.tensor, 1.0 / p if looks else weight)
            reply(1.0, tensor=buffer.tensor * factor)
        finally:
            buffer.drop()

    def _handle_reply(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        ticket, clock, age, weight, *place, tensor = facts
        request = self._pending.get(ticket)
        give_back = partial(self._send, peer, window.number, GIVE_BACK, ticket) if place else None
        if request is None or request.over:
            if give_back is not None:
                give_back()
            return
        if place and self._group is not None:
            form = window.stored.shape, window.stored.dtype
            with suppress(FileNotFoundError):  # its owner has just ended
                where, process = SharedMemoryHandle(*place), self._group.processes[peer]
                tensor = self._group.arena.open(process, where).tensor(where.offset, *form)
        if tensor is not None:
            when = time.monotonic() - age
            request.reply = PublishedSnapshot(0, 0, weight, 0.0, clock, when, tensor)
            request.give_back = give_back

    def _handle_return(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        lent = window.edges.lent.pop((peer, facts[0]), None)
        if lent is not None:
            lent.drop()
