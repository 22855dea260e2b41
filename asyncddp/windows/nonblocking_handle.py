"""Handle of a non-blocking window operation: poll, wait, cancel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from asyncddp.context import Context
from asyncddp.windows.edge import PublishedSnapshot
from asyncddp.windows.staging import PendingPublish, SentMessages


class PendingGet:
    """Pending get: a request for a tensor that another rank has published, and its reply.

    ``give_back`` tells the owner of a tensor in shared memory that it is not read any more.
    """

    reply: PublishedSnapshot | None = None
    give_back: Callable[[], None] | None = None
    over = False

    def has_reply(self) -> bool:
        """Return True once the reply is here."""
        return self.reply is not None

    def is_over(self) -> bool:
        """Return True once the reply is here, or will never come."""
        return self.over or self.has_reply()

    def end(self) -> None:
        """Give back what was lent, and whatever comes later; under the engine's lock."""
        self.over, self.reply = True, None
        if self.give_back is not None:
            self.give_back()
            self.give_back = None


class WindowForHandles(Protocol):
    """Interface of a window as its operations' handles see it: name, context, if it is open."""

    context: Context
    name: str

    def require_open(self) -> None:
        """Raise if the window was freed."""


class WindowHandle:
    """Handle of a put, accumulate, get or flush; done once neighbours see the data or have replied.

    ``pending`` has the messages that neighbours are to answer, once published, and ``finish`` is
    called once, when all have answered.
    """

    def __init__(
        self,
        window: WindowForHandles,
        verb: str,
        pending: PendingPublish | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._window, self._verb = window, verb
        self._pending, self._finish = pending, finish
        self._messages: SentMessages = ()
        self._done = self._published() and not self._messages and finish is None

    def poll(self) -> bool:
        """Return whether the operation is done; never waits.

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
        """Stop waiting for the operation; it goes on, and its end is ignored."""
        self._done, self._pending, self._messages, self._finish = True, None, (), None

    def _is_complete(self) -> bool:
        if self._published() and not self._late_peers():
            return True
        self._window.require_open()
        return False

    def _published(self) -> bool:
        """Return True once the tensor was published, and take over the messages that were sent."""
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
