"""Table of which optimizer or model wrapper has gradient hooks on which parameter."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Protocol
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary


class GradientHookOwner(Protocol):
    """Interface of a wrapper that has gradient hooks on parameters and sends parameters."""

    def wait_for_reads(self) -> None:
        """Wait until no message or peer reads a parameter any more."""
        ...

    def detach(self) -> None:
        """Remove all hooks."""
        ...


class _HookOwnerTable:
    """Process-wide weak table, with a lock, from parameters to the wrappers that hook them."""

    lock = threading.Lock()
    table: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def claim_parameters(parameters: Iterable[torch.Tensor], owner: GradientHookOwner) -> None:
    """Make an object the owner of these parameters' hooks; earlier owners remove theirs.

    An earlier wrapper of an optimizer keeps working without overlap; one of a module no longer
    trains.
    """
    with _HookOwnerTable.lock:
        for parameter in parameters:
            before: WeakSet[GradientHookOwner] | None = _HookOwnerTable.table.get(parameter)  # type: ignore[no-untyped-call]
            for other in list(before or ()):
                other.detach()
            _HookOwnerTable.table[parameter] = WeakSet([owner])


def wait_for_reads(parameters: Iterable[torch.Tensor]) -> None:
    """Wait until no message or peer reads these parameters, so that they may be changed."""
    for owner in {owner: None for parameter in parameters for owner in _owners_of(parameter)}:
        owner.wait_for_reads()


def _owners_of(parameter: torch.Tensor) -> Iterator[GradientHookOwner]:
    with _HookOwnerTable.lock:
        found: WeakSet[GradientHookOwner] | None = _HookOwnerTable.table.get(parameter)  # type: ignore[no-untyped-call]
    yield from list(found or ())
