"""State of BlueFog's API on one rank: pending handles, and options."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from asyncddp.context import current
from asyncddp.engine import Handle
from asyncddp.errors import ArgumentError
from asyncddp.windows.nonblocking_handle import WindowHandle

_KEY = "bluefog"

H = TypeVar("H", Handle[Any], WindowHandle)


class HandleTable(Generic[H]):
    """Table of pending operations by the integer handles (from 1) that BlueFog's users get."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._count = itertools.count(1)
        self._under_way: dict[int, H] = {}
        self._named: dict[str, int] = {}

    def add(self, handle: H, name: str | None = None) -> int:
        """Add a handle and return its number."""
        number = next(self._count)
        self._under_way[number] = handle
        if name is not None:
            self._named[name] = number
        return number

    def require_free_name(self, name: str | None) -> None:
        """Raise ArgumentError if an operation of that name is in progress."""
        number = None if name is None else self._named.get(name)
        if number is not None and number in self._under_way and not self._under_way[number].poll():
            raise ArgumentError(
                f"argument name: {name!r} is under way already, as handle {number}; wait for that "
                "handle first, or give another name"
            )

    def __contains__(self, number: object) -> bool:
        return number in self._under_way

    def find(self, verb: str, number: int) -> H:
        """Return the handle of a number; raise ArgumentError if it was waited for already."""
        if number not in self._under_way:
            raise ArgumentError(
                f"{verb}: argument handle: expected what a non-blocking {self._what} gave and "
                f"nobody has waited for yet, got {number!r}"
            )
        return self._under_way[number]

    def pop(self, verb: str, number: int) -> H:
        """Remove and return the handle of a number."""
        self.find(verb, number)
        return self._under_way.pop(number)


@dataclass
class BluefogState:
    """State of BlueFog's API on one rank, kept in its context: handles and options."""

    skip_negotiate: bool = False
    suspended: bool = False
    associated_p: bool = False
    collectives: HandleTable[Handle[Any]] = field(default_factory=lambda: HandleTable("verb"))
    windows: HandleTable[WindowHandle] = field(default_factory=lambda: HandleTable("window verb"))


def current_state() -> BluefogState:
    """Return this rank's state, which is kept in its context; create it on first use."""
    extensions = current().extensions
    if _KEY not in extensions:
        extensions[_KEY] = BluefogState()
    return cast("BluefogState", extensions[_KEY])


def active_state() -> BluefogState:
    """Return the state of this rank; raise ArgumentError while communication is suspended."""
    found = current_state()
    if found.suspended:
        raise ArgumentError("communication is suspended by bf.suspend(); call bf.resume() first")
    return found
