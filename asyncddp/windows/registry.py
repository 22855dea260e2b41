"""The windows of one rank's world: by name for its verbs, by number for its peers."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from asyncddp.context import Context
from asyncddp.errors import ArgumentError, PeerError, UnknownNameError
from asyncddp.memory.buddy_allocator import Block
from asyncddp.memory.modes import refuse_transforms
from asyncddp.memory.shared import Chunk, Place, place_of
from asyncddp.memory.streams import DeviceStreams, streams_of
from asyncddp.windows.board import WORDS, Inlet, Outlet
from asyncddp.windows.contract import Shown
from asyncddp.windows.device_side import Device
from asyncddp.windows.mutex import FREE, LOCK, LOCKED, Mutex
from asyncddp.windows.recorded import RecordedWindow
from asyncddp.windows.remote import ADD, ARRIVED, PUT, TAKEN, TICK, Inbox, Outbox, Question
from asyncddp.windows.window import Edges, Window
from topology import Schedule

__all__ = ["Windows", "windows_of"]

_SERVICE = "windows"
_making = threading.Lock()
_GET, _GOT, _GONE = "get", "got", "gone"
_LISTEN = 0.002  # seconds between looks at the wire while peers may send something any time
_BOARD = 16 * WORDS  # bytes of the words of both edges to a peer


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
        self._boards: dict[int, list[Block[Chunk]]] = {}
        self._tickets = itertools.count()
        self._questions: weakref.WeakValueDictionary[int, Question] = weakref.WeakValueDictionary()
        near = context.transport.visible
        self._arena = None if near is None else near.arena
        self._devices: dict[DeviceStreams, Device] = {}
        self._made = 0
        self._pause = self._engine.pause
        self.with_p = False
        self._heard: dict[str, Callable[[Window, int, list[Any], Any], None]] = {
            PUT: partial(self._laid_down, PUT),
            ADD: partial(self._laid_down, ADD),
            ARRIVED: self._arrived,
            TAKEN: self._taken,
            TICK: self._ticked,
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
            ArgumentError: ``torch.func`` transforms the caller.
        """
        refuse_transforms(verb)
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

    def prepare(
        self, name: str, tensor: torch.Tensor, schedule: Schedule, *, zero_init: bool
    ) -> Window:
        """Begin a window, before its edges are known."""
        number = self._made
        self._made += 1
        facts = self._context, name, number, tensor, schedule, self._arena, self._device_of(tensor)
        if self._context.recorder is None:
            return Window(*facts, zero_init=zero_init)
        return RecordedWindow(self._context.recorder, *facts, zero_init=zero_init)

    def _device_of(self, tensor: torch.Tensor) -> Device | None:
        streams = streams_of(tensor)
        if streams is None:
            return None
        if streams not in self._devices:
            self._devices[streams] = Device(streams)
        return self._devices[streams]

    def boards(
        self, targets: list[int]
    ) -> tuple[dict[int, tuple[Place, Place]], dict[int, Block[Chunk]]]:
        """Reserve words for the edges to ranks that see this one's memory.

        Returns:
            Where the two edges to each of them begin, for the others; and the same for
            :meth:`connect`.
        """
        near, places, own = self._context.transport.visible, {}, {}
        for target in targets:
            if near is not None and target in near.processes:
                block = own[target] = near.arena.take(_BOARD, zeroed=_BOARD)
                first = place_of(block)
                places[target] = first, first._replace(offset=first.offset + 8 * WORDS)
        return places, own

    def give_back(self, boards: Iterable[Block[Chunk]]) -> None:
        """Need these words no more."""
        for block in boards:
            if self._arena is not None:
                self._arena.give(block)

    def connect(
        self,
        window: Window,
        targets: list[int],
        sources: dict[int, tuple[Place, Place] | None],
        own: dict[int, Block[Chunk]],
    ) -> None:
        """Make a window's edges, and let the verbs find it.

        Args:
            window: The window.
            targets: Out-neighbours.
            sources: In-neighbours, and where they show this rank what they publish, if they can.
            own: The second result of :meth:`boards`.

        Raises:
            PeerLeftError: The memory of a neighbour on this machine cannot be read.
        """
        edges = Edges({}, {}, {}, {})
        for peer in targets:
            if peer in own:
                chunk, first = own[peer].chunk, own[peer].offset
                edges.outgoing[peer] = Outlet(chunk, first)
                edges.shows[peer] = Outlet(chunk, first + 8 * WORDS)
            else:
                edges.outgoing[peer] = Outbox(self._engine, peer, _SERVICE, window.number)
        near = self._context.transport.visible
        for peer, places in sources.items():
            if places is not None and near is not None:
                form = (window.shape, window.dtype, self._what(window, peer))
                process, arena = near.processes[peer], near.arena
                edges.incoming[peer] = Inlet(arena, process, places[0], *form)
                edges.gets[peer] = Inlet(arena, process, places[1], *form)
            else:
                edges.incoming[peer] = Inbox(partial(self._say, peer, window.number, TAKEN))
        window.open(edges)
        number, what = window.number, f"the mutex of window {window.name!r}"
        self._mutexes[number] = Mutex(
            self._engine,
            self._context.rank,
            lambda peer, word, ticket: self._say(peer, number, word, ticket),
            window.insist,
            what,
        )
        self._boards[number] = list(own.values())
        self._by_name[window.name] = self._by_number[number] = window
        if len(own) < len(targets) or None in sources.values():
            self._engine.pause = _LISTEN

    def _what(self, window: Window, peer: int) -> str:
        return f"rank {self._context.rank}: window {window.name!r}: rank {peer}"

    def drop(self, name: str) -> None:
        """Forget a window; no peer uses it any more."""
        with self._engine.parcels():  # while nobody hears anything about it
            window = self._by_name.pop(name)
            del self._by_number[window.number], self._mutexes[window.number]
        window.close(ArgumentError(f"window {name!r} was freed by win_free"))
        self.give_back(self._boards.pop(window.number))
        self._context.topologies.pinned.discard(name)
        if not self._by_name:
            self._engine.pause = self._pause

    # talking

    def _say(self, peer: int, *content: Any, tensor: torch.Tensor | None = None) -> None:
        with self._engine.parcels() as parcels:
            parcels.send(peer, _SERVICE, content, tensor)

    def ask(self, window: Window, peer: int) -> Question:
        """Ask a rank of another machine for what it lets others get."""
        question, ticket = Question(), next(self._tickets)
        self._questions[ticket] = question
        self._say(peer, window.number, _GET, ticket)
        return question

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

    def _taken(self, window: Window, peer: int, facts: list[Any], tensor: Any) -> None:
        del tensor
        edge = window.edges.outgoing[peer]
        if isinstance(edge, Outbox):
            edge.hear_taken(facts[0])

    def _ticked(self, window: Window, peer: int, facts: list[Any], tensor: Any) -> None:
        del tensor
        edge = window.edges.incoming[peer]
        if isinstance(edge, Inbox):
            edge.hear_clock(facts[0])

    def _asked(self, window: Window, peer: int, facts: list[Any], tensor: Any) -> None:
        del tensor
        window.asked = True
        published = window.published()
        if published is not None:
            values, clock = published
            self._say(peer, window.number, _GOT, facts[0], clock, tensor=values)

    def _answered(
        self, window: Window, peer: int, facts: list[Any], tensor: torch.Tensor | None
    ) -> None:
        del window, peer
        ticket, clock = facts
        question = self._questions.get(ticket)
        if question is not None and tensor is not None:
            question.answer = Shown(0, 0, 1.0, 0.0, clock, time.monotonic(), tensor)

    def _gone(self, window: Window, peer: int, facts: list[Any], tensor: Any) -> None:
        del facts, tensor
        window.end = PeerError(
            f"rank {self._context.rank}: window {window.name!r} was freed by rank {peer}; call "
            "win_free on all ranks"
        )

    def _lock_word(self, word: str) -> Callable[[Window, int, list[Any], Any], None]:
        def hear(window: Window, peer: int, facts: list[Any], tensor: Any) -> None:
            """Take a neighbour's word."""
            del tensor
            self._engine.pause = _LISTEN  # whoever waits for a slot waits for this rank's looks
            self._mutexes[window.number].hear(peer, word, facts[0])

        return hear


def windows_of(context: Context) -> Windows:
    """The windows of a context.

    Raises:
        NotInitializedError: The world has ended, or this process is a fork of the one that made it.
    """
    context.engine.insist("window")
    found: Windows | None = context.attachments.get(_SERVICE)
    if found is None:
        with _making:
            found = context.attachments.get(_SERVICE)
            if found is None:
                found = context.attachments[_SERVICE] = Windows(context)
    return found
