"""Window manager of a rank, which keeps its windows by name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from asyncddp.compression.tensor_compressor import TensorCompressor
from asyncddp.context import Context
from asyncddp.errors import ArgumentError, PeerError, UnknownNameError
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.topology import Schedule
from asyncddp.torch_modes import refuse_transforms
from asyncddp.windows.get_requests import GET, LOOK, GetRequests
from asyncddp.windows.message_edge import (
    ADD,
    ARRIVED,
    PUT,
    TAKEN,
    TICK,
    MessageEdgeReader,
    MessageEdgeWriter,
)
from asyncddp.windows.mutex import FREE, LOCK, LOCKED, WindowMutex
from asyncddp.windows.nonblocking_handle import PendingGet, WindowHandle
from asyncddp.windows.shared_memory_edge import WORDS, SharedMemoryReader, SharedMemoryWriter
from asyncddp.windows.staging import PendingPublish
from asyncddp.windows.traced_window import TracedWindow
from asyncddp.windows.window import Window
from asyncddp.windows.window_edges import ControlWords, WindowEdges

_SERVICE = "windows"
_making = threading.Lock()
_GONE = "gone"
_EDGE_BYTES = 8 * WORDS
_POLL_INTERVAL = 0.002  # seconds between polls of the transport while peers may send at any time


class WindowManager:
    """Manager of one rank's windows: creates, finds and frees them, and handles their messages."""

    def __init__(self, context: Context) -> None:
        self._context, self._engine = context, context.engine
        self._by_name: dict[str, Window] = {}
        self._by_number: dict[int, Window] = {}
        self._group = context.transport.window_group
        self._gets = GetRequests(self._engine, self._group, self._send)
        self._made = 0
        self._pause = self._engine.idle_interval
        self._message_handlers = {
            **dict.fromkeys((PUT, ADD, TICK), self._handle_writer),
            **dict.fromkeys((ARRIVED, TAKEN), self._handle_reader),
            **dict.fromkeys((LOCK, LOCKED, FREE), self._handle_lock),
            **self._gets.handlers,
            _GONE: self._handle_freed,
        }
        with self._engine.active_messages() as active_messages:
            active_messages.handlers[_SERVICE] = self._receive

    @property
    def names(self) -> list[str]:
        """Names of all windows, sorted."""
        return sorted(self._by_name)

    def __iter__(self) -> Iterator[Window]:
        return iter(list(self._by_name.values()))

    def find(self, verb: str, name: str) -> Window:
        """Find a window by name; raise an error if there is none, or inside ``torch.func``."""
        refuse_transforms(verb)
        window = self._by_name.get(name)
        if window is None:
            known = ", ".join(map(repr, self.names)) or "none"
            raise UnknownNameError(
                f"{verb}: argument name: there is no window {name!r}; there are: {known}. Call "
                "win_create first, on all ranks"
            )
        return window

    # creation

    def prepare(
        self,
        name: str,
        tensor: torch.Tensor,
        schedule: Schedule,
        *,
        zero_init: bool,
        codec: TensorCompressor | None = None,
    ) -> Window:
        """Create a window without edges; :meth:`connect` adds them."""
        number = self._made
        self._made += 1
        facts = self._context, name, number, tensor, schedule
        if self._context.tracer is None:
            return Window(*facts, zero_init=zero_init, codec=codec)
        return TracedWindow(self._context.tracer, *facts, zero_init=zero_init, codec=codec)

    def reserve(self, targets: Iterable[int]) -> ControlWords:
        """Reserve shared memory for the control words of edges to ranks of this machine."""
        group = self._group
        if group is None:
            return {}
        near = [target for target in targets if target in group.processes]
        return {peer: group.arena.take(2 * _EDGE_BYTES, zeroed=2 * _EDGE_BYTES) for peer in near}

    def release(self, words: ControlWords) -> None:
        """Free the control words of edges."""
        for block in words.values():
            if self._group is not None:
                self._group.arena.give(block)

    def connect(
        self,
        window: Window,
        targets: list[int],
        sources: dict[int, SharedMemoryHandle | None],
        own: ControlWords,
    ) -> None:
        """Create a window's edges, and register the window by name.

        An edge uses shared memory if the neighbour can map it: to targets with control words in
        ``own``, which :meth:`reserve` has returned, and from sources with a handle of theirs.
        """
        number = window.number
        window.open(self._make_edges(window, targets, sources, own))
        window.mutex = WindowMutex(
            self._engine,
            self._context.rank,
            lambda peer, word, ticket: self._send(peer, number, word, ticket),
            window.require_open,
            f"the mutex of window {window.name!r}",
        )
        self._by_name[window.name] = self._by_number[number] = window
        if len(own) < len(targets) or None in sources.values():
            self._engine.idle_interval = _POLL_INTERVAL

    def _make_edges(
        self,
        window: Window,
        targets: list[int],
        sources: dict[int, SharedMemoryHandle | None],
        own: ControlWords,
    ) -> WindowEdges:
        edges = WindowEdges(own)
        for peer in targets:
            if peer in own:
                chunk, first = own[peer].chunk, own[peer].offset
                edges.outgoing[peer] = SharedMemoryWriter(chunk, first)
                edges.get_writers[peer] = SharedMemoryWriter(chunk, first + _EDGE_BYTES)
            else:
                send = partial(self._send, peer, window.number)
                edges.outgoing[peer] = MessageEdgeWriter(self._engine, send)
        what = f"rank {self._context.rank}: window {window.name!r}: rank"
        for peer, place in sources.items():
            if place is not None and self._group is not None:
                second = place._replace(offset=place.offset + _EDGE_BYTES)
                facts = window.stored.shape, window.stored.dtype, f"{what} {peer}"
                process, arena = self._group.processes[peer], self._group.arena
                edges.incoming[peer] = SharedMemoryReader(arena, process, place, *facts)
                edges.get_readers[peer] = SharedMemoryReader(arena, process, second, *facts)
            else:
                taken = partial(self._send, peer, window.number, TAKEN)
                edges.incoming[peer] = MessageEdgeReader(taken)
        return edges

    def drop(self, name: str) -> None:
        """Remove a window that all peers have stopped using."""
        with self._engine.active_messages():  # while no message about it is handled
            window = self._by_name.pop(name)
            del self._by_number[window.number], window.mutex  # which refers to the window
        words = window.edges.control_words
        window.close(ArgumentError(f"window {name!r} was freed by win_free"))
        self.release(words)
        self._context.topologies.pinned.discard(name)
        if not self._by_name:
            self._engine.idle_interval = self._pause

    # messages

    def _send(self, peer: int, *content: Any, tensor: torch.Tensor | None = None) -> None:
        with self._engine.active_messages() as active_messages:
            active_messages.send(peer, _SERVICE, content, tensor)

    def get(self, window: Window, weights: Mapping[int, float]) -> WindowHandle:
        """Get neighbours' tensors: read from shared memory, or requested by message."""
        window.require_open()
        requested: dict[int, PendingGet] = {}
        for source, weight in weights.items():
            if source in window.edges.get_readers:
                window.get(source, weight)
                continue
            requested[source] = self._gets.start(window, source, GET)
        if not requested:
            return WindowHandle(window, "win_get")

        def finish() -> None:
            for source, request in requested.items():
                if request.reply is not None:
                    window.store_get_result(source, request.reply, weights[source])

        messages = [(source, request.has_reply) for source, request in requested.items()]
        return WindowHandle(window, "win_get", PendingPublish(messages), finish)

    def look(self, window: Window, peer: int) -> PendingGet:
        """Request any rank's newest published tensor, divided by its p.

        The peer's engine answers without its user's code: on this machine with the location of the
        tensor, which stays unchanged until the request is ended; on another one with a copy.
        """
        window.require_open()
        return self._gets.start(window, peer, LOOK)

    def _receive(self, peer: int, content: tuple[Any, ...], tensor: torch.Tensor | None) -> None:
        """Dispatch a peer's message; called by the engine, under its lock."""
        number, word, *facts = content
        window = self._by_number.get(number)
        if window is not None and word in (LOOK, LOCK):  # who asks waits until this rank polls
            self._engine.idle_interval = _POLL_INTERVAL
        if window is not None:
            self._message_handlers[word](window, peer, word, [*facts, tensor])
        elif word in (PUT, ADD, GET, LOOK, LOCK):
            self._send(peer, number, _GONE)

    def _handle_writer(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        edge = window.edges.incoming[peer]
        *facts, tensor = facts
        if word == TICK:
            if isinstance(edge, MessageEdgeReader):
                edge.handle_clock(facts[0])
            return
        try:
            if isinstance(edge, MessageEdgeReader) and tensor is not None:
                edge.receive(word, facts, tensor)
        finally:  # also where there was no memory for it: the writer has been told, and goes on
            self._send(peer, window.number, ARRIVED, facts[-1])

    def _handle_reader(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        edge = window.edges.outgoing[peer]
        if isinstance(edge, MessageEdgeWriter):
            (edge.handle_arrived if word == ARRIVED else edge.handle_taken)(facts[0])

    def _handle_freed(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        window.end = PeerError(
            f"rank {self._context.rank}: window {window.name!r} was freed by rank {peer}; call "
            "win_free on all ranks"
        )

    def _handle_lock(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        window.mutex.handle_message(peer, word, facts[0])


def windows_of(context: Context) -> WindowManager:
    """Return a context's window manager, made on first use; raise an error after shutdown."""
    context.engine.ensure_open("window")
    found: WindowManager | None = context.extensions.get(_SERVICE)
    if found is None:
        with _making:
            found = context.extensions.get(_SERVICE)
            if found is None:
                found = context.extensions[_SERVICE] = WindowManager(context)
    return found
