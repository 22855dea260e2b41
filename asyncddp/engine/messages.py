"""The short messages between engines, and their bytes."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from asyncddp.memory.shared import Place

__all__ = [
    "COLLECTIVE",
    "MACHINE_COLLECTIVE",
    "Circle",
    "Confirm",
    "Data",
    "Key",
    "Leave",
    "Message",
    "Parcel",
    "Probe",
    "Refuse",
    "Waiting",
    "decode",
    "encode",
]

COLLECTIVE = "<collective>"
"""The name under which ordered verbs are counted, whatever the user calls them."""

MACHINE_COLLECTIVE = "<collective of the machine>"
"""The same for those among the ranks of one machine, which meet as often as they like."""


class Key(NamedTuple):
    """What both sides of an exchange call it: a name, and how often it was used before."""

    name: str
    step: int

    @property
    def base(self) -> str:
        """The name without the number of the part, where a collective has several."""
        return self.name.partition("/")[0] if self.name.startswith("<") else self.name

    @property
    def collective(self) -> bool:
        """Whether it is an ordered verb's."""
        return self.base in (COLLECTIVE, MACHINE_COLLECTIVE)

    def __str__(self) -> str:
        if self.collective:
            return f"({self.base[1:-1]}, number {self.step})"
        return f"{self.name!r} (use {self.step})"


class Data(NamedTuple):
    """A tensor, or the announcement of one that follows as bulk bytes under ``tag``."""

    key: Key
    verb: str
    dtype: str
    shape: tuple[int, ...]
    payload: bytes | None
    tag: int
    confirm: bool = False  # the sender waits for a Confirm
    mutual: bool = False  # the sender expects data from the receiver under the same key
    lane: Place | None = None  # where the receiver finds what comes later under this name and form
    device: str = "cpu"  # the kind of device that the tensor lies on


class Confirm(NamedTuple):
    """Data under this key was expected and fits."""

    key: Key


class Refuse(NamedTuple):
    """The exchange under this key failed on the sending rank; the reason says why."""

    key: Key
    reason: str


class Waiting(NamedTuple):
    """A link of a chain: ``rank`` waits in ``verb`` until the next rank submits ``key``."""

    rank: int
    verb: str
    key: Key


class Probe(NamedTuple):
    """A chain of waiting ranks that asks its receiver: do you wait as well?"""

    chain: tuple[Waiting, ...]


class Circle(NamedTuple):
    """A chain that has closed, told to everybody in it: nobody of you can ever go on."""

    chain: tuple[Waiting, ...]


class Leave(NamedTuple):
    """The sending rank has ended; it had joined so many collectives of each kind, and no more."""

    reason: str
    joined: Mapping[str, int]


class Parcel(NamedTuple):
    """Something for a service of the receiver; a tensor may be inside, or follow by ``tag``."""

    service: str
    content: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    payload: bytes | None
    tag: int


Message: TypeAlias = Data | Confirm | Refuse | Probe | Circle | Leave | Parcel

_KINDS: tuple[type, ...] = (Data, Confirm, Refuse, Probe, Circle, Leave, Parcel)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}


def encode(messages: Iterable[Message]) -> bytes:
    """Pack messages for one peer; they are unpacked in the same order."""
    return pickle.dumps([(_NUMBER[type(m)], *m) for m in messages], protocol=5)


def decode(data: bytes) -> list[Message]:
    """Unpack what :func:`encode` packed.

    Example:
        >>> decode(encode([Confirm(Key("x", 3))]))
        [Confirm(key=Key(name='x', step=3))]
    """
    return [_KINDS[number](*values) for number, *values in pickle.loads(data)]
