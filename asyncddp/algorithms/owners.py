"""Who looks after which parameter, known without keeping either alive."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Protocol
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Owner", "settle", "take_over"]


class Owner(Protocol):
    """What listens to parameters' gradients, and sends parameters."""

    def settle(self) -> None:
        """Wait until no parameter is being read by a message any more."""
        ...

    def detach(self) -> None:
        """Listen no more."""
        ...


class _Owners:
    """One table for the process; ranks of a local world have parameters of their own."""

    lock = threading.Lock()
    table: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def take_over(parameters: Iterable[torch.Tensor], owner: Owner) -> None:
    """Make an owner the one that listens to these parameters; earlier ones listen no more.

    An earlier wrapper of an optimizer goes on working without overlap; one of a module trains no
    more.
    """
    with _Owners.lock:
        for parameter in parameters:
            before: WeakSet[Owner] | None = _Owners.table.get(parameter)  # type: ignore[no-untyped-call]
            for other in list(before or ()):
                other.detach()
            _Owners.table[parameter] = WeakSet([owner])


def settle(parameters: Iterable[torch.Tensor]) -> None:
    """Wait until nobody reads these parameters for a message, so that they may be changed."""
    for owner in {owner: None for parameter in parameters for owner in _of(parameter)}:
        owner.settle()


def _of(parameter: torch.Tensor) -> Iterator[Owner]:
    with _Owners.lock:
        found: WeakSet[Owner] | None = _Owners.table.get(parameter)  # type: ignore[no-untyped-call]
    yield from list(found or ())
