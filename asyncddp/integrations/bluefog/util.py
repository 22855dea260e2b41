"""BlueFog's helper ``env`` of ``bluefog.common.util``, which sets environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["env"]


@contextmanager
def env(**variables: str | None) -> Iterator[None]:
    """Set environment variables inside a ``with`` block, and put them back afterwards.

    One that is given as None stays as it is.

    Example:
        >>> with env(BLUEFOG_NODES_PER_MACHINE="2"):
        ...     os.environ["BLUEFOG_NODES_PER_MACHINE"]
        '2'
        >>> "BLUEFOG_NODES_PER_MACHINE" in os.environ
        False
    """
    given = {name: value for name, value in variables.items() if value is not None}
    before = {name: os.environ[name] for name in given if name in os.environ}
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            os.environ.pop(name, None)
        os.environ.update(before)
