"""Exceptions that are both ours and of the built-in class that BlueFog raises.

::

    NotInitializedValueError    NotInitializedError and ValueError
    MismatchValueError          MismatchError and ValueError
    DtypeValueError             DtypeError and ValueError
    TopologyAssertionError      TopologyError and AssertionError
    IntegerAverageError         ArgumentError and AssertionError
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from asyncddp.errors import ArgumentError, DtypeError, MismatchError, NotInitializedError
from topology import TopologyError

__all__ = [
    "DtypeValueError",
    "IntegerAverageError",
    "MismatchValueError",
    "NotInitializedValueError",
    "TopologyAssertionError",
    "translated",
]


class NotInitializedValueError(NotInitializedError, ValueError):
    """A name was used before ``bf.init()`` or after ``bf.shutdown()``."""


class MismatchValueError(MismatchError, ValueError):
    """Ranks meet in one name with different verbs, dtypes, shapes or neighbours."""


class DtypeValueError(DtypeError, ValueError):
    """A tensor has a dtype that the verb cannot serve."""


class TopologyAssertionError(TopologyError, AssertionError):
    """Arguments of a graph or schedule that cannot be."""


class IntegerAverageError(ArgumentError, AssertionError):
    """The average of integers was asked for."""


_TRANSLATIONS: dict[type[Exception], type[Exception]] = {
    NotInitializedError: NotInitializedValueError,
    MismatchError: MismatchValueError,
    DtypeError: DtypeValueError,
    TopologyError: TopologyAssertionError,
}


@contextmanager
def translated() -> Iterator[None]:
    """Raise what BlueFog raises; for a ``with`` block, or as a decorator of a function.

    Example:
        >>> import asyncddp
        >>> with translated():
        ...     asyncddp.rank()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        asyncddp.integrations.bluefog.errors.NotInitializedValueError: ... call bf.init() first...
    """
    try:
        yield
    except tuple(_TRANSLATIONS) as error:
        kind = _TRANSLATIONS.get(type(error))
        if kind is None:
            raise
        raise kind(str(error).replace("asyncddp.init()", "bf.init()")) from error
