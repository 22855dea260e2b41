"""What a non-blocking window verb gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from asyncddp.context import Context
from asyncddp.windows.contract import Outgoing

__all__ = ["WindowHandle"]


class WindowHandle:
    """Something published, or asked for; done once the neighbours can see it, or have answered.

    Args:
        context: The world.
        what: For messages.
        versions: Neighbours, the edges to them, and the versions that they shall see.
        answered: Whether neighbours that were asked have answered, and who has not.
        finish: Called once, when all is done.
    """

    def __init__(
        self,
        context: Context,
        what: str,
        versions: Sequence[tuple[int, Outgoing, int]] = (),
        answered: Callable[[], list[int]] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._context, self._what, self._answered = context, what, answered
        self._versions = [entry for entry in versions if not entry[1].arrived(entry[2])]
        self._finish = finish
        self._done = self._cancelled = False

    def poll(self) -> bool:
        """Whether it is done; never waits."""
        if not self._done and not self._missing():
            self._end()
        if not self._done:
            self._context.engine.nudge()
        return self._done

    def wait(self) -> bool:
        """Wait until it is done, and say True.

        Raises:
            PeerLeftError: A neighbour has ended meanwhile.
            WaitTimeoutError: The deadline has passed.
        """
        if not self.poll():
            self._context.engine.attend(
                lambda: not self._missing(), self._what, lambda: self._missing()
            )
            self._end()
        return True

    def cancel(self) -> None:
        """Wait for it no more; what is under way goes on, and its end is ignored."""
        self._done = self._cancelled = True

    def _missing(self) -> list[int]:
        if self._done:
            return []
        self._versions = [entry for entry in self._versions if not entry[1].arrived(entry[2])]
        silent = [] if self._answered is None else self._answered()
        return sorted({*(peer for peer, _, _ in self._versions), *silent})

    def _end(self) -> None:
        if not self._done:
            self._done = True
            if self._finish is not None:
                self._finish()

    def __repr__(self) -> str:
        return f"<WindowHandle {self._what} {'done' if self._done else 'under way'}>"
