"""Which rhythm looks after which parameter, known without keeping either alive."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from asyncddp.algorithms.rhythms import Rhythm

__all__ = ["settle", "take_over"]


class _Owners:
    """One table for the process; ranks of a local world have parameters of their own."""

    lock = threading.Lock()
    table: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def take_over(parameters: Iterable[torch.Tensor], rhythm: Rhythm) -> None:
    """Make a rhythm the one that listens to these parameters; earlier ones listen no more.

    An earlier wrapper of the same parameters goes on working without overlap.
    """
    with _Owners.lock:
        for parameter in parameters:
            before: WeakSet[Rhythm] | None = _Owners.table.get(parameter)  # type: ignore[no-untyped-call]
            for other in list(before or ()):
                other.detach()
            _Owners.table[parameter] = WeakSet([rhythm])


def settle(parameters: Iterable[torch.Tensor]) -> None:
    """Wait until nobody reads these parameters for a message, so that they may be changed."""
    for rhythm in {rhythm: None for parameter in parameters for rhythm in _of(parameter)}:
        rhythm.settle()


def _of(parameter: torch.Tensor) -> Iterator[Rhythm]:
    with _Owners.lock:
        found: WeakSet[Rhythm] | None = _Owners.table.get(parameter)  # type: ignore[no-untyped-call]
    yield from list(found or ())
