"""Names of Bagua that asyncddp lacks: using one raises an error that names the replacement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncddp.errors import UsageError

_CACHE = (
    "Bagua keeps samples in a Redis server; read them from a local file, for example of "
    "torch.save, numpy.memmap or LMDB, or keep them in a dict of the data set, which each worker "
    "of a DataLoader with persistent_workers=True fills once"
)
_EXPERTS = (
    "mixture of experts is not here; parameters with an attribute expert=True are left out of all "
    "communication, and asyncddp.alltoall moves tokens between ranks"
)
INSTEAD = {
    "CacheLoader": _CACHE,
    "CachedDataset": _CACHE,
    "RedisStore": _CACHE,
    "MoE": _EXPERTS,
    "Experts": _EXPERTS,
    "TopKGate": _EXPERTS,
}
"""Replacements of names."""


class MissingNameError(UsageError, ImportError):
    """Error: asyncddp lacks a name of Bagua's API; the message says what replaces it."""


def refusing(module: str) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module; it raises a MissingNameError for missing names.

    Example:
        >>> from asyncddp.integrations.bagua.torch_api.contrib import CachedDataset
        Traceback (most recent call last):
        asyncddp.integrations.bagua.missing_names.MissingNameError: asyncddp.integrations.bagua...
    """

    def find(name: str) -> Any:
        if name in INSTEAD:
            raise MissingNameError(f"{module} has no {name}: {INSTEAD[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find
