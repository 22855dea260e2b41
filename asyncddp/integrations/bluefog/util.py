"""BlueFog's helper ``env`` of ``bluefog.common.util``, which sets environment variables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncddp.config import variables_set

__all__ = ["env"]


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables inside a ``with`` block, and restore them afterwards.

    A variable given as None is unchanged.

    Example:
        >>> import os
        >>> with env(BLUEFOG_NODES_PER_MACHINE="2"):
        ...     os.environ["BLUEFOG_NODES_PER_MACHINE"]
        '2'
        >>> "BLUEFOG_NODES_PER_MACHINE" in os.environ
        False
    """
    given = {name: value for name, value in variables.items() if value is not None}
    with variables_set(given):
        yield
