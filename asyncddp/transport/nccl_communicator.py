"""One communicator of NCCL on a stream of its own: opened, entered, given up, ended.

NCCL's calls that wait for other ranks (opening, ending) are made on threads of their own, so that
nobody who has other things to do waits with them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch

from asyncddp.errors import PeerError
from asyncddp.memory.streams import DeviceStreams, Event, Queue
from asyncddp.transport.nccl_library import Current, Library, join

__all__ = ["BYTE", "Call", "Communicator", "Opening", "run_apart"]

BYTE = 1
"""``ncclUint8``."""

_PATIENCE = 2.0  # seconds for NCCL to end what it has; then it is left to its thread

Call: TypeAlias = Callable[[Any, int], None]
"""What is entered: takes cupy's communicator and the address of a stream."""


class Communicator:
    """A communicator of NCCL, of this rank.

    Args:
        streams: Of the device.
        current: Makes its stream the current one.
        handle: cupy's communicator.

    Attributes:
        why: What has made it useless; None while it serves.

    References:
        NCCL's documentation, "CUDA Stream Semantics" and "Error handling and communicator abort";
        cupy's, ``cupy.cuda.nccl.NcclCommunicator``.
    """

    def __init__(self, streams: DeviceStreams, current: Current, handle: Any) -> None:
        self._streams, self._current, self._handle = streams, current, handle
        self._last: Event | None = None
        self.why: str | None = None

    @classmethod
    def open(
        cls, library: Library, streams: DeviceStreams, size: int, identity: bytes, rank: int
    ) -> Communicator:
        """Make one; waits for all its ranks.

        Args:
            library: cupy.
            streams: Of the device.
            size: Number of ranks.
            identity: What one of them has made.
            rank: The number of this one.

        Raises:
            RuntimeError: NCCL refuses; cupy's message says why.
        """
        current = library.stream(streams.device)
        with current():  # which makes its device the current one
            handle = join(library.nccl, size, identity, rank)
        return cls(streams, current, handle)

    def enter(
        self,
        what: str,
        call: Call,
        tensors: Iterable[torch.Tensor],
        after: Iterable[Event],
    ) -> Event:
        """Queue a call on the stream.

        Args:
            what: Its name, for messages.
            call: The call.
            tensors: What it reads and writes, on the device.
            after: What comes before it.

        Returns:
            An event behind it.

        Raises:
            PeerError: NCCL refuses; the communicator is of no use afterwards.
        """
        streams = self._streams
        with self._current():
            for event in after:
                streams.after(Queue.CALLER, event)
            for tensor in tensors:
                streams.hold(tensor, Queue.CALLER)
            try:
                call(self._handle, streams.pointer(Queue.CALLER))
            except RuntimeError as problem:
                self.abort(f"{what} could not be started: {problem}")
                raise PeerError(str(self.why)) from problem
            self._last = streams.mark(Queue.CALLER)
        return self._last

    def failed(self) -> str | None:
        """Ask NCCL whether something has gone wrong since; if so it is aborted."""
        if self.why is None:
            try:
                self._handle.check_async_error()
            except RuntimeError as problem:
                self.abort(f"NCCL reports: {problem}")
        return self.why

    def abort(self, why: str) -> None:
        """Make an end of it, and with it of what is on the device."""
        if self.why is None:
            self.why = why
            run_apart([self._handle.abort])

    def ending(self) -> Callable[[], None] | None:
        """What gives it back: ``destroy``, or ``abort`` where something is under way.

        Both may wait for the other ranks: the caller has it run apart.
        """
        if self.why is not None:
            return None
        self.why = "it was closed"
        idle = self._last is None or self._last.done()
        end: Callable[[], None] = self._handle.destroy if idle else self._handle.abort
        return end


def run_apart(calls: Iterable[Callable[[], None]], patience: float = _PATIENCE) -> None:
    """Make calls at once, each on a thread of its own; those that take too long are left alone."""
    threads = [threading.Thread(target=call, name="asyncddp-nccl", daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + patience
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


class Opening:
    """A communicator that is being opened, on a thread of its own.

    Args:
        make: Opens it.
    """

    def __init__(self, make: Callable[[], Communicator]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: Communicator | None = None
        self._unwanted = False
        self.problem: str | None = None
        threading.Thread(target=self._run, name="asyncddp-nccl-opening", daemon=True).start()

    def _run(self) -> None:
        try:
            made = self._make()
        except RuntimeError as problem:  # NCCL's, or ours for a peer
            self.problem = str(problem)
            return
        with self._lock:
            self._made = made
            unwanted = self._unwanted
        if unwanted:
            made.abort("nobody waits for it any more")

    def take(self) -> Communicator | None:
        """The communicator, once it is there."""
        return self._made

    def abandon(self) -> None:
        """Nobody waits for it any more; should it open yet, it is aborted."""
        with self._lock:
            self._unwanted = True
            made = self._made
        if made is not None:
            made.abort("nobody waits for it any more")
