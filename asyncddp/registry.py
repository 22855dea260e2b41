"""Names for plug-ins: one class serves transports, algorithms, verbs and whatever comes later."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from asyncddp.errors import UnknownNameError

__all__ = ["Registry", "nearest"]

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that names the known name nearest to one that is not; empty where none is near.

    Example:
        >>> nearest("neighbour_allreduce", ["allreduce", "neighbor_allreduce"])
        " Did you mean 'neighbor_allreduce'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class Registry(Mapping[str, T], Generic[T]):
    """A mapping from names to objects that are imported when asked for.

    Args:
        kind: What is registered, for messages: ``"transport"``.
        entries: ``{name: "package.module:attribute"}``; one line for each of our own plug-ins.
        group: Entry-point group in which other distributions may register theirs.

    Example:
        >>> shapes = Registry("shape", {"path": "pathlib:Path"})
        >>> shapes["path"].__name__
        'Path'
        >>> shapes["pth"]
        Traceback (most recent call last):
        asyncddp.errors.UnknownNameError: unknown shape 'pth'; known are: path. Did you mean 'path'?
    """

    def __init__(self, kind: str, entries: Mapping[str, str], group: str | None = None) -> None:
        self.kind = kind
        self._entries = dict(entries)
        self._group = group

    def _known(self) -> dict[str, str]:
        """Our own entries and those of installed distributions; ours win."""
        found = entry_points(group=self._group) if self._group else ()
        return {**{point.name: point.value for point in found}, **self._entries}

    def __getitem__(self, name: str) -> T:
        known = self._known()
        if name not in known:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}; known are: {', '.join(sorted(known))}."
                f"{nearest(name, known)}"
            )
        module, _, attribute = known[name].partition(":")
        loaded: Any = getattr(importlib.import_module(module), attribute)
        return cast("T", loaded)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known()))

    def __len__(self) -> int:
        return len(self._known())
