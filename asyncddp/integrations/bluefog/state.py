"""What BlueFog's names keep for each rank beside our own world: handles, topologies, switches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from asyncddp.context import current
from asyncddp.engine import Handle
from asyncddp.errors import ArgumentError
from asyncddp.windows.handle import WindowHandle

if TYPE_CHECKING:
    import networkx as nx

    from topology import Schedule

__all__ = ["Given", "Handles", "State", "state", "working"]

_KEY = "bluefog"


class _Pollable(Protocol):
    def poll(self) -> bool:
        """Whether it is done."""
        ...


H = TypeVar("H", bound=_Pollable)


class Handles(Generic[H]):
    """Handles by number, as BlueFog counts them: from 1 on, each until somebody has waited for it.

    Args:
        what: What has such handles, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = itertools.count(1)
        self._under_way: dict[int, H] = {}
        self._named: dict[str, int] = {}

    def add(self, handle: H, name: str | None = None) -> int:
        """Keep a handle; gives its number."""
        number = next(self._count)
        self._under_way[number] = handle
        if name is not None:
            self._named[name] = number
        return number

    def insist_on_free(self, name: str | None) -> None:
        """Insist that nothing of that name is under way.

        Raises:
            ArgumentError: Something is.
        """
        number = None if name is None else self._named.get(name)
        if number is not None and number in self._under_way and not self._under_way[number].poll():
            raise ArgumentError(
                f"argument name: {name!r} is under way already, as handle {number}; wait for that "
                "handle first, or give another name"
            )

    def __contains__(self, number: object) -> bool:
        return number in self._under_way

    def find(self, verb: str, number: int) -> H:
        """The handle of a number.

        Raises:
            ArgumentError: Nobody gave that number, or somebody has waited for it.
        """
        if number not in self._under_way:
            raise ArgumentError(
                f"{verb}: argument handle: expected what a non-blocking {self._what} gave and "
                f"nobody has waited for yet, got {number!r}"
            )
        return self._under_way[number]

    def pop(self, verb: str, number: int) -> H:
        """The same, and forget it."""
        handle = self.find(verb, number)
        del self._under_way[number]
        return handle


@dataclass(frozen=True)
class Given:
    """A topology as the caller gave it, and as it is in use.

    Attributes:
        graph: The caller's own graph.
        weighted: Whether its weights count.
        schedule: What the context was given.
    """

    graph: nx.DiGraph[int]
    weighted: bool
    schedule: Schedule


@dataclass
class State:
    """All that is kept for one rank of one world."""

    topology: Given | None = None
    machine_topology: Given | None = None
    skip_negotiate: bool = False
    suspended: bool = False
    collectives: Handles[Handle[Any]] = field(default_factory=lambda: Handles("verb"))
    windows: Handles[WindowHandle] = field(default_factory=lambda: Handles("window verb"))


def state() -> State:
    """The state of this rank; goes with its world.

    Raises:
        NotInitializedError: There is no world.
    """
    attachments = current().attachments
    if _KEY not in attachments:
        attachments[_KEY] = State()
    found: State = attachments[_KEY]
    return found


def working() -> State:
    """The same, for verbs.

    Raises:
        NotInitializedError: There is no world.
        ArgumentError: ``bf.suspend()`` was called.
    """
    found = state()
    if found.suspended:
        raise ArgumentError("communication is suspended by bf.suspend(); call bf.resume() first")
    return found
