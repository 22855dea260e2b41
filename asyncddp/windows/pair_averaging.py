r"""Atomic averages of pairs of ranks, without waiting: the protocol.

The protocol of one tensor
--------------------------

A rank *opens* a copy of its tensor for averaging, and *closes* it to use what it has become. While
it is open, it answers at once, on whichever thread drives the engine:

1. Rank i asks rank j: it sends its :math:`x_i`, and averages with nobody else until j has replied.
2. Rank j computes :math:`\delta = w (x_i - x_j)`, adds it to :math:`x_j` and sends it back.
3. Rank i subtracts :math:`\delta` from what it has by then, or once it opens again.

The sum :math:`x_i + x_j` never changes. Nobody waits for anybody, and no two averages overlap:
who has asked refuses those who ask it, and so there is no circle of ranks that wait. A question to
a rank that is closed lies there until it opens, or until the asking rank withdraws it, as it closes
after some time; one that has been closed for so long refuses at once.
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


class _Question(NamedTuple):
    """Question of a rank for an average; its ticket tells it from the rank's other ones."""

    peer: int
    ticket: int
    weight: float
    tensor: torch.Tensor


class _Asked(NamedTuple):
    """Question of this rank that has no reply yet."""

    peer: int
    ticket: int
    opening: int
    time: float


class PairAveraging:
    """One tensor of this rank, averaged atomically with those of single peers; does no I/O itself.

    Args:
        send: ``send(peer, word, ticket, weight, tensor)`` sends one message of the protocol.
        has_left: Whether a rank answers no more.
        clock: The time, in seconds.

    Attributes:
        open: Whether the tensor is open for averages.
        sent: Tensors sent so far, as question or answer.
        averages: Averages with peers so far.
        peers: The other rank of each average that the caller has not taken note of.
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
        self._questions: dict[int, _Question] = {}  # that lie here until this rank opens
        self._late: torch.Tensor | None = None  # what came of averages after this rank had closed
        self._silent: set[int] = set()

    @property
    def waits_for(self) -> int | None:
        """The rank that was asked and has not replied."""
        return None if self._asked is None else self._asked.peer

    @property
    def steps(self) -> int:
        """Openings so far, plus CONCLUDED where none follow for now."""
        return self._openings + CONCLUDED * self._concluded

    @property
    def nbytes(self) -> int:
        """Bytes of the copy that is averaged."""
        return 0 if self._shared is None else self._shared.nbytes

    def begin(self, tensor: torch.Tensor) -> None:
        """Open a copy of a tensor; answer the questions that lie here."""
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
        """Ask a peer for an average; False if it cannot be now, and there is none."""
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
        """Close, and return what the tensor has become; withdraw a question that lies too long."""
        assert self._shared is not None
        self.open, self._closed, asked = False, self._clock(), self._asked
        waits = asked is not None and self._closed - asked.time > _PATIENCE
        if asked is not None and waits and not self._withdrawn:
            self._withdrawn = True
            self._send(asked.peer, WITHDRAW, asked.ticket, 0.0, None)
        return self._shared

    def conclude(self) -> None:
        """Refuse all questions until the next :meth:`begin`."""
        self.open, self._concluded = False, True
        questions, self._questions = self._questions, {}
        for question in questions.values():
            self._send(question.peer, REFUSE, question.ticket, 0.0, None)

    def look(self) -> tuple[float, torch.Tensor | None]:
        """Return a copy of what averages have made of the tensor, and how long ago it opened."""
        if self._shared is None:
            return 0.0, None
        values = detached_copy(self._shared)
        if self._late is not None:
            values.sub_(self._late)
        return self._clock() - self._opened, values

    def receive(
        self, peer: int, word: str, ticket: int, weight: float, tensor: torch.Tensor | None
    ) -> None:
        """Handle a message of a peer."""
        self._silent.discard(peer)
        if word == ASK:
            assert tensor is not None
            self._handle_question(_Question(peer, ticket, weight, tensor))
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

    def _handle_question(self, question: _Question) -> None:
        long_closed = not self.open and self._clock() - self._closed > _PATIENCE
        if self._concluded or long_closed or self._asked is not None:
            self._send(question.peer, REFUSE, question.ticket, 0.0, None)
        elif self.open:
            self._answer(question)
        else:
            self._questions[question.peer] = question

    def _answer(self, question: _Question) -> None:
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
        """Average with others again where the rank that was asked has left, or does not reply."""
        if self._asked is None:
            return
        if self._has_left(self._asked.peer):
            self._asked = None
        elif self._withdrawn and self._openings - self._asked.opening > _SILENT:
            self._silent.add(self._asked.peer)
            self._asked = None
