"""Registry of plug-ins (transports, algorithms, …) by name, with lazy import and entry points."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from asyncddp.errors import UnknownNameError

T = TypeVar("T")


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name most similar to an unknown one, as a sentence; empty if none is.

    Example:
        >>> nearest("neighbour_allreduce", ["allreduce", "neighbor_allreduce"])
        " Did you mean 'neighbor_allreduce'?"
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


class PluginRegistry(Mapping[str, T], Generic[T]):
    """Read-only mapping from names to plug-in objects, which are imported on access.

    Args:
        kind: Kind of the plug-ins, for messages: ``"transport"``.
        entries: ``{name: "package.module:attribute"}``; one for each built-in plug-in.
        group: Entry-point group in which other distributions may register theirs.

    Example:
        >>> shapes = PluginRegistry("shape", {"path": "pathlib:Path"})
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
        self._read: tuple[list[str], dict[str, str]] | None = None

    def _known(self, *, again: bool = False) -> dict[str, str]:
        """Return built-in and other distributions' entries; built-in ones take precedence.

        The other distributions' are read again where ``sys.path`` has changed.
        """
        if self._read is None or self._read[0] != sys.path or again:
            found = entry_points(group=self._group) if self._group else ()
            self._read = [*sys.path], {point.name: point.value for point in found}
        return {**self._read[1], **self._entries}

    def __getitem__(self, name: str) -> T:
        module, _, attribute = self.location_of(name).partition(":")
        loaded: Any = getattr(importlib.import_module(module), attribute)
        return cast("T", loaded)

    def location_of(self, name: str) -> str:
        """Return a plug-in's location, ``"package.module:attribute"``, without importing it.

        Raises:
            UnknownNameError: There is none of that name.
        """
        known = self._entries
        if name not in known and name not in (known := self._known()):
            known = self._known(again=True)  # it may have been installed meanwhile
        if name not in known:
            raise UnknownNameError(
                f"unknown {self.kind} {name!r}; known are: {', '.join(sorted(known))}."
                f"{nearest(name, known)}"
            )
        return known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._known()))

    def __len__(self) -> int:
        return len(self._known())
