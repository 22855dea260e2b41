"""Service of pairwise averaging: exchanges active messages for each tensor, by name."""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from asyncddp.context import Context
from asyncddp.errors import PeerLeftError
from asyncddp.windows.edge import PublishedSnapshot
from asyncddp.windows.nonblocking_handle import PendingGet
from asyncddp.windows.pair_averaging import ASK, REFUSE, WITHDRAW, PairAveraging

_LOOK, _GOT = "look", "got"
_SERVICE = "pair averaging"
_POLL_INTERVAL = 0.002  # seconds between polls of the transport while peers may ask at any time


class PairAveragingService:
    """Pairwise averaging of one rank's tensors, by name, over active messages.

    A name denotes the same tensor on all ranks; requests for an unknown name are refused.
    """

    def __init__(self, context: Context) -> None:
        self._engine = context.engine
        self._tensors: dict[str, PairAveraging] = {}
        self._tickets, self._looks = (
            itertools.count(),
            weakref.WeakValueDictionary[int, PendingGet](),
        )
        with self._engine.active_messages() as active_messages:
            active_messages.handlers[_SERVICE] = self._receive

    def add(self, name: str) -> PairAveraging:
        """Register a tensor by name; its averaging is closed at first."""
        one = PairAveraging(partial(self._send, name), self._engine.lost_peers.is_lost)
        with self._engine.active_messages():
            self._tensors[name] = one
        return one

    def remove(self, names: Mapping[str, PairAveraging]) -> None:
        """Unregister tensors, and refuse their pending requests."""
        with self._engine.lock:
            for name, one in names.items():
                if not self._engine.closed:
                    one.conclude()
                self._tensors.pop(name, None)

    def progress(self) -> None:
        """Handle arrived messages, and make the idle engine poll for messages more often."""
        self._engine.idle_interval = min(self._engine.idle_interval, _POLL_INTERVAL)
        with suppress(PeerLeftError):  # raised where somebody waits
            self._engine.progress()

    def look(self, name: str, peer: int) -> PendingGet:
        """Request a copy of any rank's tensor; that rank's engine answers."""
        request, ticket = PendingGet(), next(self._tickets)
        self._looks[ticket] = request
        self._send(name, peer, _LOOK, ticket, 0.0, None)
        return request

    def _send(
        self,
        name: str,
        peer: int,
        word: str,
        ticket: int,
        weight: float,
        tensor: torch.Tensor | None,
        steps: int = 0,
    ) -> None:
        with self._engine.active_messages() as active_messages:
            active_messages.send(peer, _SERVICE, (name, word, ticket, weight, steps), tensor)
        self._record("send", name, peer, f"{word} {ticket}", tensor)

    def _record(
        self, kind: str, name: str, peer: int, number: str, tensor: torch.Tensor | None
    ) -> None:
        """Record a message that carries a tensor in the timeline."""
        tracer, now = self._engine.tracer, time.monotonic_ns()
        if tracer is not None and tensor is not None:
            facts = "pair_average", name, peer, tensor.nbytes, now, now, number
            tracer.record_transfer(kind, *facts)

    def _receive(self, peer: int, content: tuple[Any, ...], tensor: torch.Tensor | None) -> None:
        """Dispatch a peer's message; called by the engine, under its lock."""
        name, word, ticket, weight, steps = content
        self._record("receive", name, peer, f"{word} {ticket}", tensor)
        one = self._tensors.get(name)
        if word == _LOOK:
            age, values = (0.0, None) if one is None else one.look()
            self._send(name, peer, _GOT, ticket, age, values, 0 if one is None else one.steps)
        elif word == _GOT:
            request, when = self._looks.get(ticket), time.monotonic() - weight
            if request is not None and tensor is None:
                request.over = True  # there is nothing
            elif request is not None and tensor is not None:
                request.reply = PublishedSnapshot(0, 0, 1.0, 0.0, steps, when, tensor)
        elif one is not None:
            one.receive(peer, word, ticket, weight, tensor)
        elif word in (ASK, WITHDRAW):
            self._send(name, peer, REFUSE, ticket, 0.0, None)


def pair_averaging_of(context: Context) -> PairAveragingService:
    """Return a context's pairwise averaging, made on first use; raise an error after shutdown."""
    context.engine.ensure_open(_SERVICE)
    found: PairAveragingService | None = context.extensions.get(_SERVICE)
    if found is None:
        found = context.extensions[_SERVICE] = PairAveragingService(context)
    return found
