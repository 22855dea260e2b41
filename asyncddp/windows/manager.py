"""Manager of one rank's windows: creates them, finds them by name, handles peers' messages."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from asyncddp.context import Context
from asyncddp.device.stream_registry import streams_of
from asyncddp.device.streams import DeviceStreams
from asyncddp.errors import ArgumentError, PeerError, UnknownNameError
from asyncddp.shm.arena import SharedMemoryHandle
from asyncddp.tensors.free_list import FreeList
from asyncddp.torch_modes import refuse_transforms
from asyncddp.windows.device_staging import DeviceResources
from asyncddp.windows.edge import Snapshot
from asyncddp.windows.message_edge import (
    ADD,
    ARRIVED,
    PUT,
    TAKEN,
    TICK,
    MessageReader,
    MessageWriter,
)
from asyncddp.windows.mutex import FREE, LOCK, LOCKED, WindowMutex
from asyncddp.windows.nonblocking_handle import PendingGet, WindowHandle
from asyncddp.windows.staging import PendingPublish
from asyncddp.windows.traced_window import TracedWindow
from asyncddp.windows.window import Window
from asyncddp.windows.window_edges import ControlWords, EdgeFactory
from topology import Schedule

_SERVICE = "windows"
_making = threading.Lock()
_GET, _GOT, _GONE = "get", "got", "gone"
_POLL_INTERVAL = 0.002  # seconds between polls of the transport while peers may send at any time


class WindowManager:
    """Manager of all windows of a rank: creates, finds and frees them, handles their messages."""

    def __init__(self, context: Context) -> None:
        self._context, self._engine = context, context.engine
        self._by_name: dict[str, Window] = {}
        self._by_number: dict[int, Window] = {}
        self._tickets = itertools.count()
        self._pending_gets = weakref.WeakValueDictionary[int, PendingGet]()
        group = context.transport.window_group
        self._arena = None if group is None else group.arena
        self._devices: dict[DeviceStreams, DeviceResources] = {}
        self.edge_factory = EdgeFactory(context, self._send)
        self._made = 0
        self._pause = self._engine.idle_interval
        self._message_handlers = {
            **dict.fromkeys((PUT, ADD, TICK), self._handle_writer),
            **dict.fromkeys((ARRIVED, TAKEN), self._handle_reader),
            **dict.fromkeys((LOCK, LOCKED, FREE), self._handle_lock),
            _GET: self._handle_get_request,
            _GOT: self._handle_get_reply,
            _GONE: self._handle_freed,
        }
        with self._engine.active_messages() as active_messages:
            active_messages.handlers[_SERVICE] = self._handle_message

    @property
    def names(self) -> list[str]:
        """The names of all windows, sorted."""
        return sorted(self._by_name)

    def __iter__(self) -> Iterator[Window]:
        return iter(list(self._by_name.values()))

    def find(self, verb: str, name: str) -> Window:
        """Return the window of a name, for a verb that no ``torch.func`` may transform."""
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
        self, name: str, tensor: torch.Tensor, schedule: Schedule, *, zero_init: bool
    ) -> Window:
        """Make a window whose edges are not known yet."""
        number = self._made
        self._made += 1
        facts = self._context, name, number, tensor, schedule, self._arena, self._device_of(tensor)
        if self._context.tracer is None:
            return Window(*facts, zero_init=zero_init)
        return TracedWindow(self._context.tracer, *facts, zero_init=zero_init)

    def _device_of(self, tensor: torch.Tensor) -> DeviceResources | None:
        streams = streams_of(tensor)
        if streams is None:
            return None
        if streams not in self._devices:
            self._devices[streams] = DeviceResources(streams, FreeList(streams.allocate_pinned))
        return self._devices[streams]

    def connect(
        self,
        window: Window,
        targets: list[int],
        sources: dict[int, SharedMemoryHandle | None],
        own: ControlWords,
    ) -> None:
        """Make a window's edges as :meth:`EdgeFactory.make` does, and register it by name."""
        number, rank = window.number, self._context.rank
        what = f"rank {rank}: window {window.name!r}: rank"
        window.open(self.edge_factory.make(number, window.tensor, targets, sources, own, what))
        window.mutex = WindowMutex(
            self._engine,
            rank,
            lambda peer, word, ticket: self._send(peer, number, word, ticket),
            window.require_open,
            f"the mutex of window {window.name!r}",
        )
        self._by_name[window.name] = self._by_number[number] = window
        if len(own) < len(targets) or None in sources.values():
            self._engine.idle_interval = _POLL_INTERVAL

    def drop(self, name: str) -> None:
        """Remove a window that no peer uses any more."""
        with self._engine.active_messages():  # while no message about it is handled
            window = self._by_name.pop(name)
            del self._by_number[window.number], window.mutex  # which refers to the window
        words = window.edges.control_words
        window.close(ArgumentError(f"window {name!r} was freed by win_free"))
        self.edge_factory.release(words)
        self._context.topologies.pinned.discard(name)
        if not self._by_name:
            self._engine.idle_interval = self._pause

    # messages

    def _send(self, peer: int, *content: Any, tensor: torch.Tensor | None = None) -> None:
        with self._engine.active_messages() as active_messages:
            active_messages.send(peer, _SERVICE, content, tensor)

    def get(self, window: Window, weights: Mapping[int, float]) -> WindowHandle:
        """Read tensors in shared memory into buffers, and request those of other machines."""
        window.require_open()
        requested: dict[int, PendingGet] = {}
        for source, weight in weights.items():
            if source in window.edges.get_readers:
                window.get(source, weight)
                continue
            request, ticket = PendingGet(), next(self._tickets)
            requested[source] = self._pending_gets[ticket] = request
            self._send(source, window.number, _GET, ticket)
        if not requested:
            return WindowHandle(window, "win_get")

        def finish() -> None:
            for source, request in requested.items():
                if request.reply is not None:
                    window.store_get_result(source, request.reply, weights[source])

        messages = [(source, request.has_reply) for source, request in requested.items()]
        return WindowHandle(window, "win_get", PendingPublish(messages), finish)

    def _handle_message(
        self, peer: int, content: tuple[Any, ...], tensor: torch.Tensor | None
    ) -> None:
        """Handle a message of a peer; called by the engine, under its lock."""
        number, word, *facts = content
        window = self._by_number.get(number)
        if window is not None:
            self._message_handlers[word](window, peer, word, [*facts, tensor])
        elif word in (PUT, ADD, _GET, LOCK):
            self._send(peer, number, _GONE)

    def _handle_writer(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        edge = window.edges.incoming[peer]
        *facts, tensor = facts
        if word == TICK:
            if isinstance(edge, MessageReader):
                edge.handle_clock(facts[0])
            return
        if isinstance(edge, MessageReader) and tensor is not None:
            edge.receive(word, facts, tensor)
        self._send(peer, window.number, ARRIVED, facts[-1])

    def _handle_reader(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        edge = window.edges.outgoing[peer]
        if isinstance(edge, MessageWriter):
            (edge.handle_arrived if word == ARRIVED else edge.handle_taken)(facts[0])

    def _handle_get_request(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        window.edges.remote_get_received = True
        values = window.edges.copy_for_get()
        if values is not None:
            self._send(peer, window.number, _GOT, facts[0], window.clock, tensor=values)

    def _handle_get_reply(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        ticket, clock, tensor = facts
        request = self._pending_gets.get(ticket)
        if request is not None and tensor is not None:
            request.reply = Snapshot(0, 0, 1.0, 0.0, clock, time.monotonic(), tensor)

    def _handle_freed(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        window.end = PeerError(
            f"rank {self._context.rank}: window {window.name!r} was freed by rank {peer}; call "
            "win_free on all ranks"
        )

    def _handle_lock(self, window: Window, peer: int, word: str, facts: list[Any]) -> None:
        # whoever waits for a slot waits for this rank to poll
        self._engine.idle_interval = _POLL_INTERVAL
        window.mutex.handle_message(peer, word, facts[0])


def windows_of(context: Context) -> WindowManager:
    """Return the window manager of a context; made on first use.

    Raises:
        NotInitializedError: The world has ended, or this process is a fork of the one that made it.
    """
    context.engine.ensure_open("window")
    found: WindowManager | None = context.extensions.get(_SERVICE)
    if found is None:
        with _making:
            found = context.extensions.get(_SERVICE)
            if found is None:
                found = context.extensions[_SERVICE] = WindowManager(context)
    return found
