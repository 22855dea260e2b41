"""What a non-blocking window verb gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from asyncddp.windows.remote import Question
from asyncddp.windows.side import Publication, Version

if TYPE_CHECKING:
    from asyncddp.windows.window import Window

__all__ = ["WindowHandle"]


class WindowHandle:
    """Something published, or asked for; done once the neighbours can see it, or have answered.

    Args:
        window: The window.
        verb: For messages.
        publication: What neighbours shall see.
        questions: What neighbours were asked.
        finish: Called once, when all have answered.
    """

    def __init__(
        self,
        window: Window,
        verb: str,
        publication: Publication | None = None,
        questions: Mapping[int, Question] | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._window, self._verb = window, verb
        self._publication, self._questions, self._finish = publication, questions, finish
        self._versions: Sequence[Version] = ()
        self._done = self._published() and not self._versions and finish is None

    def poll(self) -> bool:
        """Whether it is done; never waits.

        Raises:
            PeerError: The window was freed before.
        """
        if not self._done and self._published() and not self._missing():
            self._end()
        if not self._done:
            self._window.insist()
            self._window.context.engine.nudge()
        return self._done

    def wait(self) -> bool:
        """Wait until it is done, and say True.

        Raises:
            PeerLeftError: A neighbour has ended meanwhile.
            WaitTimeoutError: The deadline has passed.
            PeerError: The window was freed before.
        """
        if not self._done and not self.poll():
            what = f"{self._verb} {self._window.name!r}"
            self._window.context.engine.attend(self._over, what, self._missing)
            self._end()
        return True

    def cancel(self) -> None:
        """Wait for it no more; what is under way goes on, and its end is ignored."""
        self._done, self._publication, self._versions = True, None, ()
        self._questions, self._finish = None, None

    def _over(self) -> bool:
        if self._published() and not self._missing():
            return True
        self._window.insist()
        return False

    def _published(self) -> bool:
        """Whether it was published, so that it is known what has to travel."""
        publication = self._publication
        if publication is None:
            return True
        if publication.problem is not None:
            raise publication.problem
        if publication.versions is None:
            return False
        self._publication, self._versions = None, publication.versions
        return True

    def _missing(self) -> list[int]:
        late = self._versions = [one for one in self._versions if not one[1].arrived(one[2])]
        peers = [peer for peer, _, _ in late]
        if self._questions is not None:
            peers += [peer for peer, asked in self._questions.items() if asked.answer is None]
        return peers

    def _end(self) -> None:
        finish, self._finish = self._finish, None
        self._done = True
        if finish is not None:
            finish()

    def __repr__(self) -> str:
        state = "done" if self._done else "under way"
        return f"<WindowHandle {self._verb} {self._window.name!r} {state}>"
