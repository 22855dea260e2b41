"""Decorators that make the blocking, non-blocking and in-place variants of an operation.

A verb is written once, as a function from its arguments to a
:class:`~asyncddp.engine.OperationSpec`; the decorators here make what users call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from asyncddp.context import current
from asyncddp.engine import Handle, OperationSpec
from asyncddp.torch_modes import uncompiled

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


def blocking(plan: Callable[P, OperationSpec[R]]) -> Callable[P, R]:
    """Make the blocking variant of a verb from the function that builds its operation."""
    return _make_blocking(plan, None, None)


def blocking_with_fast_path(
    shortcut: Callable[..., torch.Tensor | None],
    starter: Callable[..., Handle[torch.Tensor] | None],
) -> Callable[[Callable[P, OperationSpec[torch.Tensor]]], Callable[P, torch.Tensor]]:
    """Make the blocking variant of a verb that has a fast path outside the engine.

    ``shortcut`` takes the verb's arguments and returns the result, ``starter`` takes them and
    returns a handle; both return None if they cannot.
    """
    return lambda plan: _make_blocking(plan, shortcut, starter)


def _make_blocking(
    plan: Callable[P, OperationSpec[R]],
    shortcut: Callable[..., R | None] | None,
    starter: Callable[..., Handle[R] | None] | None,
) -> Callable[P, R]:
    @functools.wraps(plan)
    def variant(*args: P.args, **kwargs: P.kwargs) -> R:
        if shortcut is not None:
            result = shortcut(*args, **kwargs)
            if result is not None:
                return result
        return current().engine.run(plan(*args, **kwargs), about=args)

    variant.fast_path_functions = shortcut, starter  # type: ignore[attr-defined]  # the other forms take them too
    returns = str(inspect.signature(plan).return_annotation).removeprefix("OperationSpec[")[:-1]
    return uncompiled(set_metadata(variant, plan.__name__, plan.__doc__, returns))


def nonblocking(variant: Callable[P, R]) -> Callable[P, Handle[R]]:
    """Make the non-blocking variant of a blocking one."""
    plan = cast("Callable[P, OperationSpec[R]]", inspect.unwrap(variant))
    name = variant.__name__
    _, starter = getattr(variant, "fast_path_functions", (None, None))

    @functools.wraps(plan)
    def start(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        if starter is not None:
            handle: Handle[R] | None = starter(*args, **kwargs)
            if handle is not None:
                return handle
        return current().engine.submit(plan(*args, **kwargs), about=args)

    doc = f"Start :func:`{name}` and give a handle; leave its tensors alone until that is done."
    own_name = f"{name.removesuffix('_')}_nonblocking{'_' * name.endswith('_')}"
    return uncompiled(set_metadata(start, own_name, doc, "Handle"))


def in_place(
    variant: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Make the variant whose result replaces its first argument; the verb takes an ``out``."""
    plan = cast("Callable[..., OperationSpec[R]]", inspect.unwrap(variant))

    def inner(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> OperationSpec[R]:
        return plan(tensor, *args, **kwargs, out=tensor)

    signature = inspect.signature(plan)
    kept = [item for item in signature.parameters.values() if item.name != "out"]
    inner.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    shortcut, starter = getattr(variant, "fast_path_functions", (None, None))

    def begin(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R] | None:
        handle: Handle[R] | None = starter and starter(tensor, *args, **kwargs, out=tensor)
        return handle

    def run(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if shortcut is not None:
            result: R | None = shortcut(tensor, *args, **kwargs, out=tensor)
            if result is not None:
                return result
        return current().engine.run(inner(tensor, *args, **kwargs), about=(tensor,))

    run.__wrapped__ = inner  # type: ignore[attr-defined]
    run.fast_path_functions = shortcut, None if starter is None else begin  # type: ignore[attr-defined]
    run.__module__ = variant.__module__
    doc = f":func:`{variant.__name__}` whose result replaces the tensor, which is returned."
    return uncompiled(set_metadata(run, f"{variant.__name__}_", doc, "torch.Tensor"))


def set_metadata(variant: F, name: str, doc: str | None, returns: object) -> F:
    """Set the name, docstring and return annotation of a variant."""
    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = doc
    signature = inspect.signature(variant).replace(return_annotation=returns)
    variant.__signature__ = signature  # type: ignore[attr-defined]
    variant.__annotations__ = {**variant.__annotations__, "return": returns}
    return variant
