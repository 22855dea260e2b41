"""A verb under way: a generator that yields whatever it has to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from threading import Event
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch

from asyncddp.engine.desk import Desk
from asyncddp.engine.messages import COLLECTIVE, MACHINE_COLLECTIVE, Key
from asyncddp.errors import AsyncDDPError, NotInitializedError, PeerError, PeerLeftError
from asyncddp.memory.modes import inference_mode
from asyncddp.memory.streams import Order

__all__ = ["Operation", "Program", "Steps", "Wait"]


class Wait(Protocol):
    """Something that a verb waits for."""

    def done(self) -> bool:
        """Whether the verb may go on; raises what makes it fail."""
        ...

    def missing(self) -> list[tuple[int, Key]]:
        """The peers that hold it up, and what each has yet to submit."""
        ...


R = TypeVar("R")
Steps: TypeAlias = Generator[Wait, None, R]


@dataclass(frozen=True)
class Program(Generic[R]):
    """What a verb does, as data.

    Attributes:
        verb: Its name, for messages.
        steps: Makes the generator that does the work, given a :class:`Desk`.
        name: The user's name for this use, or None: named by call order.
        ordered: Whether all ranks must submit it in the same order, as collectives are.
        local: Whether, being ordered, it concerns the ranks of this machine alone.
        check: Whether peers must confirm before it counts as done.
        order: Which work of a device comes before it and after it; None on the host.
    """

    verb: str
    steps: Callable[[Desk], Steps[R]]
    name: str | None = None
    ordered: bool = False
    local: bool = False
    check: bool = False
    order: Order | None = None

    @property
    def label(self) -> str:
        """Its name, or the one under which all nameless uses of the verb are counted."""
        return self.name or f"{self.verb}.noname"

    @property
    def counted(self) -> str:
        """The name under which peers match it."""
        if not self.ordered:
            return self.label
        return MACHINE_COLLECTIVE if self.local else COLLECTIVE


class Operation(Generic[R]):
    """One submitted program and how far it has come."""

    def __init__(self, program: Program[R], desk: Desk, timeout: float) -> None:
        self.program, self.desk = program, desk
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.warned = False
        self.next_probe = self.started + 0.25
        self.result: R | None = None
        self.error: BaseException | None = None
        self.finished = Event()
        steps, order = program.steps(desk), program.order
        self._steps = steps if order is None else _in_order(order, steps)
        self._waiting: Wait | None = None
        self._inference = torch.is_inference_mode_enabled()

    @property
    def key(self) -> Key:
        """What this use is called on all ranks."""
        return self.desk.key

    def describe(self) -> str:
        """Verb and name, for messages."""
        name = f" {self.program.name!r}" if self.program.ordered and self.program.name else ""
        return f"{self.program.verb}{name} {self.key}"

    def missing(self) -> list[tuple[int, Key]]:
        """The peers that hold it up."""
        return self._waiting.missing() if self._waiting is not None else []

    def advance(self) -> bool:
        """Go on as far as possible without waiting; whether it has ended.

        On whichever thread, ``torch.inference_mode`` is on or off as where it was submitted.
        """
        if self.finished.is_set():
            return True
        with inference_mode(enabled=self._inference):
            return self._advance()

    def _advance(self) -> bool:
        try:
            self.desk.raise_if_failed()
            while self._waiting is None or self._waiting.done():
                self._waiting = next(self._steps)
        except StopIteration as stop:
            self._end(stop.value, None)
        except (AsyncDDPError, RuntimeError, ValueError, TypeError, MemoryError) as error:
            self.fail(error)
        return self.finished.is_set()

    def fail(self, error: BaseException) -> None:
        """End it with an error, and tell the peers."""
        self._steps.close()
        self._end(None, error)

    def forget(self, error: BaseException) -> None:
        """End it with an error in a forked process, telling nobody: the parent goes on with it."""
        self.error, self.finished = error, Event()
        self.finished.set()

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        reason = error if error is None or isinstance(error, PeerError) else _told(error)
        self.desk.close(reason)
        self.finished.set()


def _told(error: BaseException) -> PeerError:
    """What peers are told of an error that is no peer's fault."""
    kind = PeerLeftError if isinstance(error, NotInitializedError) else PeerError
    return kind(str(error))


def _in_order(order: Order, steps: Steps[R]) -> Steps[R]:
    """Take steps such that what they have a device do keeps to an order."""
    order.begin()
    try:
        while True:
            with order.working():
                try:
                    wait = next(steps)
                except StopIteration as stop:
                    result: R = stop.value
                    return result
            yield wait
    finally:
        steps.close()
        order.end()
