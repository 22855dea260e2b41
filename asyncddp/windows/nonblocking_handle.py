"""Handle of a non-blocking window operation, with ``poll``, ``wait`` and ``cancel``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncddp.context import Context
from asyncddp.windows.edge import PublishedSnapshot
from asyncddp.windows.staging import PendingPublish, SentMessages


class PendingGet:
    """Pending get: a request for a tensor that another rank has published, with its reply.

    ``give_back`` releases a tensor in shared memory to its owner.
    """

    reply: PublishedSnapshot | None = None
    give_back: Callable[[], None] | None = None
    over = False

    def has_reply(self) -> bool:
        """Return whether the reply has arrived."""
        return self.reply is not None

    def is_over(self) -> bool:
        """Return whether the reply has arrived or will never arrive."""
        return self.over or self.has_reply()

    def end(self) -> None:
        """Release a lent tensor or a late reply's tensor; the caller holds the engine's lock."""
        self.over, self.reply = True, None
        if self.give_back is not None:
            self.give_back()
            self.give_back = None


class WindowProtocol(Protocol):
    """Interface of a window that operation handles use for its name, context and open state."""

    context: Context
    name: str

    def require_open(self) -> None:
        """Raise if the window was freed."""


class WindowHandle:
    """Handle of a put, accumulate, get or flush: done once neighbours see the data or have replied.

    ``pending`` holds, once the tensor is published, the messages that neighbours answer. ``finish``
    is called once, after all answers.
    """

    def __init__(
        self,
        window: WindowProtocol,
        verb: str,
        pending: PendingPublish | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._window, self._verb = window, verb
        self._pending, self._finish = pending, finish
        self._messages: SentMessages = ()
        self._done = self._published() and not self._messages and finish is None

    def poll(self) -> bool:
        """Return whether the operation is done, without waiting.

        Raises:
            PeerError: The window was freed before.
        """
        if not self._done:
            if self._is_complete():
                self._complete()
            else:
                self._window.context.engine.progress_unthreaded()
        return self._done

    def wait(self) -> bool:
        """Wait until the operation is done, and return True.

        Raises:
            PeerLeftError: A neighbour has ended meanwhile.
            WaitTimeoutError: The deadline has passed.
            PeerError: The window was freed before.
        """
        if not self._done and not self.poll():
            what = f"{self._verb} {self._window.name!r}"
            self._window.context.engine.wait_until(self._is_complete, what, self._late_peers)
            self._complete()
        return True

    def cancel(self) -> None:
        """Abandon the handle: the operation continues, and its completion is ignored."""
        self._done, self._pending, self._messages, self._finish = True, None, (), None

    def _is_complete(self) -> bool:
        if self._published() and not self._late_peers():
            return True
        self._window.require_open()
        return False

    def _published(self) -> bool:
        """Return whether the tensor was published; then take over the messages that were sent."""
        pending = self._pending
        if pending is None:
            return True
        if pending.problem is not None:
            raise pending.problem
        if pending.messages is None:
            return False
        self._pending, self._messages = None, pending.messages
        return True

    def _late_peers(self) -> list[int]:
        late = self._messages = [one for one in self._messages if not one[1]()]
        return [peer for peer, _ in late]

    def _complete(self) -> None:
        finish, self._finish = self._finish, None
        self._done = True
        if finish is not None:
            finish()

    def __repr__(self) -> str:
        state = "done" if self._done else "under way"
        return f"<WindowHandle {self._verb} {self._window.name!r} {state}>"
