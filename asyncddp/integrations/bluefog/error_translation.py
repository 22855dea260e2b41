"""Translation of asyncddp's errors to subclasses of the built-in errors that BlueFog raises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from asyncddp.errors import ArgumentError, DtypeError, MismatchError, NotInitializedError
from asyncddp.topology import TopologyError


class NotInitializedValueError(NotInitializedError, ValueError):
    """Error: an operation was called before ``bf.init()`` or after ``bf.shutdown()``."""


class MismatchValueError(MismatchError, ValueError):
    """Error: ranks' calls with the same name differ in operation, dtype, shape or neighbours."""


class DtypeValueError(DtypeError, ValueError):
    """Error: a tensor has a dtype that the communication operation does not support."""


class TopologyAssertionError(TopologyError, AssertionError):
    """Error: a graph or schedule is unusable, or the arguments to build one are invalid."""


class IntegerAverageError(ArgumentError, AssertionError):
    """Error: a call asks for the average of integer tensors."""


_TRANSLATIONS: dict[type[Exception], type[Exception]] = {
    NotInitializedError: NotInitializedValueError,
    MismatchError: MismatchValueError,
    DtypeError: DtypeValueError,
    TopologyError: TopologyAssertionError,
}


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate errors to BlueFog's in a ``with`` block, or as a decorator of a function."""
    try:
        yield
    except tuple(_TRANSLATIONS) as error:
        kind = _TRANSLATIONS.get(type(error))
        if kind is None:
            raise
        raise kind(str(error).replace("asyncddp.init()", "bf.init()")) from error


def translate_errors_of(module: dict[str, Any], names: Iterable[str]) -> None:
    """Make the named functions of a module raise BlueFog's errors; called at the module's end."""
    translated: dict[FunctionType, Any] = {}  # a function of two names stays one
    for name in names:
        plain = module[name]
        if isinstance(plain, FunctionType):
            module[name] = translated.setdefault(plain, translate_errors()(plain))
