"""The windows of one rank's world: by name for its verbs, by number for its peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from asyncddp.context import Context
from asyncddp.errors import PeerError, UnknownNameError
from asyncddp.memory.shared import Place
from asyncddp.windows.board import WORDS, Inlet, Outlet
from asyncddp.windows.contract import Incoming, Outgoing, Shown
from asyncddp.windows.mutex import FREE, LOCK, LOCKED, Mutex
from asyncddp.windows.remote import ADD, ARRIVED, PUT, Inbox, Outbox
from asyncddp.windows.window import Edges, Window

__all__ = ["Windows", "windows_of"]

_SERVICE = "windows"
_GET, _GOT, _GONE = "get", "got", "gone"
_LISTEN = 0.001  # seconds between looks at the wire while there are windows


class Windows:
    """All windows of a context, and what other ranks say about them.

    Args:
        context: The world.

    Attributes:
        with_p: Whether the verbs map the associated p as well.
    """

    def __init__(self, context: Context) -> None:
        self._context, self._engine = context, context.engine
        self._by_name: dict[str, Window] = {}
        self._by_number: dict[int, Window] = {}
        self._mutexes: dict[int, Mutex] = {}
        self._answers: dict[tuple[int, int], Shown] = {}
        self._freed_by: dict[int, int] = {}
        self._made = 0
        self._pause = self._engine.pause
        self.with_p = False
        self._heard: dict[str, Callable[[Window, int, list[Any], Any], None]] = {
            PUT: partial(self._laid_down, PUT),
            ADD: partial(self._laid_down, ADD),
            ARRIVED: self._arrived,
            _GET: self._asked,
            _GOT: self._answered,
            _GONE: self._gone,
            **{word: self._lock_word(word) for word in (LOCK, LOCKED, FREE)},
        }
        with self._engine.parcels() as parcels:
            parcels.services[_SERVICE] = self._hear

    @property
    def names(self) -> list[str]:
        """Of all windows, sorted."""
        return sorted(self._by_name)

    def find(self, verb: str, name: str) -> Window:
        """The window of a name.

        Raises:
            UnknownNameError: There is none.
        """
        window = self._by_name.get(name)
        if window is None:
            known = ", ".join(map(repr, self.names)) or "none"
            raise UnknownNameError(
                f"{verb}: argument name: there is no window {name!r}; there are: {known}. Call "
                "win_create first, on all ranks"
            )
        return window

    def mutex(self, window: Window) -> Mutex:
        """The mutex of a window."""
        return self._mutexes[window.number]

    # making

    def prepare(self, name: str, tensor: torch.Tensor, *, zero_init: bool) -> Window:
        """Begin a window, before its edges are known."""
        window = Window(self._context, name, self._made, tensor, zero_init=zero_init)
        self._made += 1
        return window

    def boards(self, targets: list[int]) -> tuple[dict[int, tuple[Place, Place]], dict[str, Any]]:
        """Reserve words for the edges to ranks that see this one's memory.

        Returns:
            Where the two edges to each of them begin, for the others; and the same for
            :meth:`connect`.
        """
        near = self._context.transport.visible
        seen = [t for t in targets if near is not None and t in near.processes]
        if near is None or not seen:
            return {}, {}
        chunk, start = near.arena.reserve(16 * WORDS * len(seen))
        places, offsets = {}, {}
        for number, target in enumerate(seen):
            first = start + 16 * WORDS * number
            offsets[target] = first
            places[target] = (
                Place(chunk.descriptor, chunk.size, first),
                Place(chunk.descriptor, chunk.size, first + 8 * WORDS),
            )
        return places, {"view": chunk, "offsets": offsets}

    def connect(
        self,
        window: Window,
        targets: list[int],
        sources: dict[int, tuple[Place, Place] | None],
        own: dict[str, Any],
    ) -> None:
        """Make a window's edges, and let the verbs find it.

        Args:
            window: The window.
            targets: Out-neighbours.
            sources: In-neighbours, and where they show this rank what they publish, if they can.
            own: The second result of :meth:`boards`.
        """
        outgoing: dict[int, Outgoing] = {}
        shows: dict[int, Outgoing] = {}
        for peer in targets:
            if peer in own.get("offsets", {}):
                wait = self._waiting(window, peer)
                first = own["offsets"][peer]
                outgoing[peer] = Outlet(own["view"], first, wait)
                shows[peer] = Outlet(own["view"], first + 8 * WORDS, wait)
            else:
                outgoing[peer] = Outbox(self._engine, peer, _SERVICE, window.number)
        incoming: dict[int, Incoming] = {}
        gets: dict[int, Incoming] = {}
        near = self._context.transport.visible
        for peer, places in sources.items():
            if places is not None and near is not None:
                process = near.processes[peer]
                form = (window.shape, window.dtype)
                incoming[peer] = Inlet(near.arena, process, places[0], *form)
                gets[peer] = Inlet(near.arena, process, places[1], *form)
            else:
                incoming[peer] = Inbox()
        window.open(Edges(outgoing, incoming, shows, gets))
        number, what = window.number, f"the mutex of window {window.name!r}"
        self._mutexes[number] = Mutex(
            self._engine, self._context.rank, lambda peer, word: self._say(peer, number, word), what
        )
        self._by_name[window.name] = self._by_number[number] = window
        self._context.topologies.pinned.add(window.name)
        self._engine.pause = _LISTEN

    def _waiting(self, window: Window, peer: int) -> Any:
        def begin() -> Any:
            patience = self._engine.patience(f"window {window.name!r}, which rank {peer} reads,")

            def again() -> None:
                patience([peer])
                time.sleep(0)

            return again

        return begin

    def drop(self, name: str) -> None:
        """Forget a window; its memory is free once no verb uses it any more."""
        window = self._by_name.pop(name)
        del self._by_number[window.number], self._mutexes[window.number]
        self._context.topologies.pinned.discard(name)
        if not self._by_name:
            self._engine.pause = self._pause

    # talking

    def _say(self, peer: int, *content: Any, tensor: torch.Tensor | None = None) -> None:
        with self._engine.parcels() as parcels:
            parcels.send(peer, _SERVICE, content, tensor)

    def ask(self, window: Window, peer: int) -> None:
        """Ask a rank of another machine for what it lets others get."""
        self._answers.pop((window.number, peer), None)
        self._say(peer, window.number, _GET)

    def answer(self, window: Window, peer: int) -> Shown | None:
        """What it has answered, if it has.

        Raises:
            PeerError: It has no such window any more.
        """
        self.insist(window)
        return self._answers.get((window.number, peer))

    def insist(self, window: Window) -> None:
        """Refuse to go on with a window that a peer has freed.

        Raises:
            PeerError: One has.
        """
        peer = self._freed_by.get(window.number)
        if peer is not None:
            raise PeerError(
                f"rank {self._context.rank}: window {window.name!r} was freed by rank {peer}; call "
                "win_free on all ranks"
            )

    def _hear(self, peer: int, content: tuple[Any, ...], tensor: torch.Tensor | None) -> None:
        """Take what a peer says; called by the engine, under its lock."""
        number, word, *facts = content
        window = self._by_number.get(number)
        if window is not None:
            self._heard[word](window, peer, facts, tensor)
        elif word in (PUT, ADD, _GET, LOCK):
            self._say(peer, number, _GONE)

    def _laid_down(
        self, kind: str, window: Window, peer: int, facts: list[Any], tensor: torch.Tensor | None
    ) -> None:
        edge = window.edges.incoming[peer]
        if isinstance(edge, Inbox) and tensor is not None:
            edge.receive(kind, tuple(facts), tensor)
        self._say(peer, window.number, ARRIVED, facts[-1])

    def _arrived(self, window: Window, peer: int, facts: list[Any], tensor: Any) -> None:
        del tensor
        edge = window.edges.outgoing[peer]
        if isinstance(edge, Outbox):
            edge.hear(facts[0])

    def _asked(self, window: Window, peer: int, facts: list[Any], tensor: Any) -> None:
        del facts, tensor
        window.asked = True
        values, clock = window.published()
        self._say(peer, window.number, _GOT, clock, tensor=values)

    def _answered(
        self, window: Window, peer: int, facts: list[Any], tensor: torch.Tensor | None
    ) -> None:
        if tensor is not None:
            shown = Shown(0, 0, 1.0, 0.0, facts[0], time.monotonic(), tensor)
            self._answers[window.number, peer] = shown

    def _gone(self, window: Window, peer: int, facts: list[Any], tensor: Any) -> None:
        del facts, tensor
        self._freed_by[window.number] = peer

    def _lock_word(self, word: str) -> Callable[[Window, int, list[Any], Any], None]:
        return lambda window, peer, *_: self._mutexes[window.number].hear(peer, word)


def windows_of(context: Context) -> Windows:
    """The windows of a context."""
    found: Windows | None = context.attachments.get(_SERVICE)
    if found is None:
        found = context.attachments[_SERVICE] = Windows(context)
    return found
