"""Request of a collective made of sends and receives, advanced in every round of progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from asyncddp.errors import PeerError
from asyncddp.transport.base import TRANSFER_ERRORS
from asyncddp.transport.collective_algorithms import PointToPointRequest, Steps

_WINDOW = 4  # pieces under way at once: one is added while others are in flight


class RunningCollectives:
    """Collectives of a transport that are in progress, advanced together.

    Args:
        progress: Makes a round of progress, in which :meth:`advance` is called.
        check: Raises an error once a rank is gone that collectives need.
        on_abandon: Called when a collective was given up.
    """

    def __init__(
        self,
        progress: Callable[[], object],
        check: Callable[[], object],
        on_abandon: Callable[[], object],
    ) -> None:
        self.progress, self.check, self.on_abandon = progress, check, on_abandon
        self.requests: list[CollectiveRequest] = []

    def advance(self) -> None:
        """Advance every collective as far as possible."""
        for request in list(self.requests):
            request.advance()


class CollectiveRequest:
    """Request of one collective in ``pieces``, which are started in order.

    It advances with the transport's other collectives, even while this rank waits for another
    operation. ``finish`` is called after all pieces have completed.
    """

    def __init__(
        self,
        running: RunningCollectives,
        pieces: Iterable[Steps],
        finish: Callable[[], object] | None = None,
    ) -> None:
        self._running, self._finish = running, finish
        self._pieces = iter(pieces)
        self._under_way: deque[tuple[Steps, list[PointToPointRequest]]] = deque()
        self._ended, self._error = False, None  # type: bool, Exception | None
        self.moves = 0  # steps that have ended
        running.requests.append(self)
        self.advance()

    def done(self) -> bool:
        """Make progress, and test for completion."""
        if not self._ended:
            self._running.progress()
        if self._error is not None:
            raise self._error
        return self._ended

    def advance(self) -> None:
        """Advance as far as possible."""
        try:
            self._advance_pieces()
        except TRANSFER_ERRORS as error:
            self._end(error)

    def _advance_pieces(self) -> None:
        self._running.check()
        for _ in range(len(self._under_way)):
            steps, waiting = self._under_way.popleft()
            self._step(steps, waiting)
        while len(self._under_way) < _WINDOW and (piece := next(self._pieces, None)) is not None:
            self._step(piece, [])
        if not self._under_way:
            self._end(None)

    def _step(self, steps: Steps, waiting: list[PointToPointRequest]) -> None:
        """Advance a piece as far as possible, and keep it unless it has completed.

        Only the first incomplete request of the piece is tested each time.
        """
        while True:
            while waiting:
                if not waiting[0].test():
                    self._under_way.append((steps, waiting))
                    return
                del waiting[0]
            self.moves += 1
            following = next(steps, None)
            if following is None:
                return
            waiting = following

    def _end(self, error: Exception | None) -> None:
        if not self._ended and self._error is None:
            self._running.requests.remove(self)
            if error is None and self._finish is not None:
                self._finish()
            self._ended, self._error = error is None, error

    def abandon(self) -> None:
        """Give up; later collectives are refused, since some ranks may not have joined this one."""
        self._end(PeerError("the collective was given up"))
        for _, waiting in self._under_way:
            for request in waiting:
                request.abandon()
        self._under_way.clear()
        self._running.on_abandon()
