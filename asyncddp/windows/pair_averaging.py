r"""Protocol of atomic, wait-free pairwise averaging: one tensor, two ranks at a time.

The protocol of one tensor
--------------------------

A rank *opens* a copy of its tensor for averaging, and *closes* it to use its averaged values. While
it is open, it answers requests at once, in whichever thread drives the engine:

1. Rank i sends its :math:`x_i` to rank j, and averages with no other rank until j has replied.
2. Rank j computes :math:`\delta = w (x_i - x_j)`, adds it to :math:`x_j` and sends it back.
3. Rank i subtracts :math:`\delta` from its current values, or once it opens again.

The sum :math:`x_i + x_j` never changes. No rank waits for another, and no two averages overlap: a
rank with an unanswered request refuses the requests of others, so that no cycle of waiting ranks
can form. A rank that is closed keeps a request until it opens, or until the sender withdraws the
request when it closes after some time. A rank that has been closed for that long refuses at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from asyncddp.tensors.allocation import detached_copy, empty
from asyncddp.windows.departure_detector import CONCLUDED

ASK, ANSWER, REFUSE, WITHDRAW = "ask", "answer", "refuse", "withdraw"
_PATIENCE = 0.05  # seconds after which a question without a reply is withdrawn
_SILENT = 100  # openings after which a rank that does not reply is asked no more


class _AveragingRequest(NamedTuple):
    """Request of a peer to average with this rank, numbered by a ticket."""

    peer: int
    ticket: int
    weight: float
    tensor: torch.Tensor


class _Asked(NamedTuple):
    """Request of this rank to average with a peer, which has not answered yet."""

    peer: int
    ticket: int
    opening: int
    time: float


class PairAveraging:
    """Protocol state of one tensor that is averaged atomically with single peers; does no I/O.

    Args:
        send: ``send(peer, word, ticket, weight, tensor)`` sends one message of the protocol.
        has_left: Returns whether a rank has left, so that it answers no more.
        clock: Returns the time in seconds.

    Attributes:
        open: Whether the tensor is open for averages.
        sent: Tensors sent so far, as request or answer.
        averages: Averages with peers so far.
        peers: The peer of each average; the caller removes those that it has recorded.
    """

    def __init__(
        self,
        send: Callable[..., None],
        has_left: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._has_left, self._clock = send, has_left, clock
        self._shared: torch.Tensor | None = None
        self.open = self._concluded = self._withdrawn = False
        self._closed = self._opened = clock()
        self.sent = self.averages = 0
        self.peers: list[int] = []
        self._tickets = self._openings = 0
        self._asked: _Asked | None = None
        self._questions: dict[int, _AveragingRequest] = {}  # that lie here until this rank opens
        self._late: torch.Tensor | None = None  # what came of averages after this rank had closed
        self._silent: set[int] = set()

    @property
    def waits_for(self) -> int | None:
        """The peer with an unanswered request of this rank; None if there is none."""
        return None if self._asked is None else self._asked.peer

    @property
    def steps(self) -> int:
        """Number of openings so far, plus CONCLUDED if no further one follows for now."""
        return self._openings + CONCLUDED * self._concluded

    @property
    def nbytes(self) -> int:
        """Size of the averaged copy in bytes."""
        return 0 if self._shared is None else self._shared.nbytes

    def begin(self, tensor: torch.Tensor) -> None:
        """Open a copy of a tensor for averaging, and answer the pending requests of peers."""
        if self._shared is None or self._shared.shape != tensor.shape:
            self._shared = empty(tuple(tensor.shape), tensor.dtype)
        self._shared.copy_(tensor)
        if self._late is not None:
            self._shared.sub_(self._late)
            self._late = None
        self.open, self._concluded = True, False
        self._opened = self._clock()
        self._openings += 1
        self._forget_the_silent()
        questions, self._questions = self._questions, {}
        for question in questions.values():
            if not self._has_left(question.peer):  # it could not subtract its part
                self._answer(question)

    def ask(self, peer: int, weight: float) -> bool:
        """Send a peer a request to average; False if that is impossible now."""
        if self._asked is not None or peer in self._silent or self._has_left(peer):
            return False
        assert self._shared is not None
        self._tickets += 1
        self._asked = _Asked(peer, self._tickets, self._openings, self._clock())
        self._withdrawn = False
        self.sent += 1
        self._send(peer, ASK, self._tickets, weight, detached_copy(self._shared))
        return True

    def end(self) -> torch.Tensor:
        """Close and return the averaged copy; withdraw a request that is unanswered too long."""
        assert self._shared is not None
        self.open, self._closed, asked = False, self._clock(), self._asked
        waits = asked is not None and self._closed - asked.time > _PATIENCE
        if asked is not None and waits and not self._withdrawn:
            self._withdrawn = True
            self._send(asked.peer, WITHDRAW, asked.ticket, 0.0, None)
        return self._shared

    def conclude(self) -> None:
        """Refuse all requests until the next :meth:`begin`."""
        self.open, self._concluded = False, True
        questions, self._questions = self._questions, {}
        for question in questions.values():
            self._send(question.peer, REFUSE, question.ticket, 0.0, None)

    def look(self) -> tuple[float, torch.Tensor | None]:
        """Return the time since opening in seconds, and a copy of the current values."""
        if self._shared is None:
            return 0.0, None
        values = detached_copy(self._shared)
        if self._late is not None:
            values.sub_(self._late)
        return self._clock() - self._opened, values

    def receive(
        self, peer: int, word: str, ticket: int, weight: float, tensor: torch.Tensor | None
    ) -> None:
        """Handle one message of a peer."""
        self._silent.discard(peer)
        if word == ASK:
            assert tensor is not None
            self._handle_question(_AveragingRequest(peer, ticket, weight, tensor))
        elif word == WITHDRAW:
            question = self._questions.get(peer)
            if question is not None and question.ticket == ticket:
                del self._questions[peer]
            self._send(peer, REFUSE, ticket, 0.0, None)  # of no effect if it has been answered
        else:
            if self._asked is not None and self._asked[:2] == (peer, ticket):
                self._asked = None
            if word == ANSWER and tensor is not None:
                self.peers.append(peer)
                self._subtract(tensor)

    def _handle_question(self, question: _AveragingRequest) -> None:
        long_closed = not self.open and self._clock() - self._closed > _PATIENCE
        if self._concluded or long_closed or self._asked is not None:
            self._send(question.peer, REFUSE, question.ticket, 0.0, None)
        elif self.open:
            self._answer(question)
        else:
            self._questions[question.peer] = question

    def _answer(self, question: _AveragingRequest) -> None:
        assert self._shared is not None
        change = empty(tuple(self._shared.shape), self._shared.dtype)
        torch.sub(question.tensor, self._shared, out=change).mul_(question.weight)
        self._shared.add_(change)
        self.sent += 1
        self.averages += 1
        self.peers.append(question.peer)
        self._send(question.peer, ANSWER, question.ticket, 0.0, change)

    def _subtract(self, change: torch.Tensor) -> None:
        self.averages += 1
        if self.open and self._shared is not None:
            self._shared.sub_(change)
        else:
            self._late = change if self._late is None else self._late + change

    def _forget_the_silent(self) -> None:
        """Drop this rank's request if its peer has left or does not reply."""
        if self._asked is None:
            return
        if self._has_left(self._asked.peer):
            self._asked = None
        elif self._withdrawn and self._openings - self._asked.opening > _SILENT:
            self._silent.add(self._asked.peer)
            self._asked = None
