"""Request of a collective over the mesh, which advances with every round of progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from asyncddp.errors import PeerError
from asyncddp.transport.base import TRANSFER_ERRORS
from asyncddp.transport.c10d.collectives import Steps
from asyncddp.transport.c10d.message_endpoint import MeshRequest
from asyncddp.transport.c10d.socket_mesh import SocketMesh

_WINDOW = 4  # pieces under way at once: one is added while others are in flight


class CollectiveRequest:
    """Request of one collective among ``members``, piece by piece; ``pieces`` are started in order.

    It advances in every round of the mesh, also while this rank waits for something else.
    """

    def __init__(
        self,
        mesh: SocketMesh,
        members: Sequence[int],
        pieces: Iterable[Steps],
        on_abandon: Callable[[], object],
    ) -> None:
        self._mesh, self._members, self._on_abandon = mesh, members, on_abandon
        self._pieces = iter(pieces)
        self._running: deque[tuple[Steps, list[MeshRequest]]] = deque()
        self._ended, self._error = False, None  # type: bool, Exception | None
        with mesh.lock:
            mesh.rounds.append(self._advance)
            self._advance()

    def done(self) -> bool:
        """Make progress, and test for the end."""
        if not self._ended:
            with self._mesh.lock:
                self._mesh.progress()
        if self._error is not None:
            raise self._error
        return self._ended

    def _advance(self) -> None:
        try:
            self._advance_pieces()
        except TRANSFER_ERRORS as error:
            self._end(error)

    def _advance_pieces(self) -> None:
        for failed in self._mesh.failed:
            if failed in self._members and (error := self._mesh.error_of(failed)) is not None:
                raise error
        for _ in range(len(self._running)):
            steps, waiting = self._running.popleft()
            self._step(steps, waiting)
        while len(self._running) < _WINDOW and (piece := next(self._pieces, None)) is not None:
            self._step(piece, [])
        if not self._running:
            self._end(None)

    def _step(self, steps: Steps, waiting: list[MeshRequest]) -> None:
        """Go on with a piece as far as that is possible, and keep it unless it has ended."""
        while all(request.test() for request in waiting):
            following = next(steps, None)
            if following is None:
                return
            waiting = following
        self._running.append((steps, waiting))

    def _end(self, error: Exception | None) -> None:
        if not self._ended and self._error is None:
            self._ended, self._error = error is None, error
            self._mesh.rounds.remove(self._advance)

    def abandon(self) -> None:
        """Give up; later collectives are refused, since some ranks may not have joined this one."""
        with self._mesh.lock:
            self._end(PeerError("the collective was given up"))
            for _, waiting in self._running:
                for request in waiting:
                    request.abandon()
            self._running.clear()
        self._on_abandon()
