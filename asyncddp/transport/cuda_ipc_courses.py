"""Tensors on their way over ``cuda_ipc``: steps that yield what they wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from typing import TypeAlias

import torch

from asyncddp.memory.streams import Event
from asyncddp.transport.contract import Transfer
from asyncddp.transport.cuda_ipc_lender import Reading

__all__ = ["Arriving", "Borrowed", "Course", "Courses", "Leaving", "Steps"]

Steps: TypeAlias = Generator["Event | Transfer | Reading | None", None, None]
"""Yields None where the next course of its line may begin."""


class Course:
    """One tensor on its way.

    Args:
        line: Courses of one line begin one after the other.
        drive: Moves all courses of the wire on.

    Attributes:
        passed: Whether the next of its line may begin.
        over: Whether nothing is left to be done.
    """

    def __init__(self, line: Hashable, drive: Callable[[], None]) -> None:
        self.line, self._drive = line, drive
        self._steps: Steps | None = None
        self._wait: Event | Transfer | Reading | None = None
        self._problem: Exception | None = None
        self.passed = self.over = False

    def go(self, steps: Steps) -> None:
        """Say what it is made of."""
        self._steps = steps

    def move(self) -> None:
        """Go on as far as possible without waiting."""
        try:
            while not self.over and (self._wait is None or self._wait.done()):
                self._step()
        except (RuntimeError, OSError) as problem:  # a peer's, or one of the device's libraries
            self._problem = problem
            self._end()

    def _step(self) -> None:
        if self._steps is None:
            return
        try:
            self._wait = next(self._steps)
        except StopIteration:
            self._end()
        else:
            self.passed = self.passed or self._wait is None

    def _end(self) -> None:
        self.passed = self.over = True
        if self._steps is not None:
            self._steps.close()
        self._steps = self._wait = None

    def done(self) -> bool:
        """Whether it has arrived, or been read."""
        self._drive()
        if self._problem is not None:
            raise self._problem
        return self.over

    def abandon(self) -> None:
        """What a peer was told of it will still read, so it goes on."""


class Leaving(Course):
    """A tensor that a peer reads.

    Attributes:
        copied: Whether the peer reads a copy, which is queued.
    """

    copied = False

    def free(self) -> bool:
        """Whether the tensor may be written again."""
        return self.copied or self.done()


class Arriving(Course):
    """A tensor that comes from a peer.

    Attributes:
        begun: Whether the peer has said where it is.
        wanted: Whether anybody will read it.
    """

    begun, wanted = False, True

    def abandon(self) -> None:
        """Withdraw it, or let the peer go where it has begun."""
        self.wanted = False
        if self.begun or self.over:
            return
        waits_for = getattr(self._wait, "abandon", None)  # an event has nothing to give up
        if waits_for is not None:
            waits_for()
        self._end()


class Borrowed(Arriving):
    """A tensor that is read where it lies, or in this rank's memory where it came in pieces."""

    def __init__(self, line: Hashable, drive: Callable[[], None]) -> None:
        super().__init__(line, drive)
        self._tensor: torch.Tensor | None = None
        self._answer: Callable[[], None] | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor, once done."""
        if self._tensor is None:
            raise RuntimeError("expected a loan that is done and was not released yet")
        return self._tensor

    def here(self, tensor: torch.Tensor, answer: Callable[[], None] | None = None) -> None:
        """It can be read.

        Args:
            tensor: Where.
            answer: Tells the peer that what reads it is queued, where it is the peer's.
        """
        self._tensor, self._answer = tensor, answer
        if not self.wanted:
            self.release()

    def release(self) -> None:
        """What reads it is queued, or never will be."""
        self.wanted = False
        answer, self._answer, self._tensor = self._answer, None, None
        if answer is not None:
            answer()

    def abandon(self) -> None:
        """Nobody will read it."""
        super().abandon()
        self.release()


class Courses:
    """All courses of one wire, in the order in which they were started."""

    def __init__(self) -> None:
        self._all: list[Course] = []

    def add(self, course: Course) -> None:
        """Let it begin in its turn."""
        self._all.append(course)

    def move(self) -> None:
        """Move all of them on whose turn it is."""
        waiting: set[Hashable] = set()
        for course in self._all:
            if course.line not in waiting:
                course.move()
            if not course.passed:
                waiting.add(course.line)
        self._all = [course for course in self._all if not course.over]

    def clear(self) -> None:
        """Forget them."""
        self._all.clear()
