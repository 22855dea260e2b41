"""Decorators that make the blocking, non-blocking and in-place variants of an operation.

A verb is written once, as a function from its arguments to a
:class:`~asyncddp.engine.OperationSpec`; the decorators here make what users call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, cast

import torch

from asyncddp.context import current
from asyncddp.engine import Handle, OperationSpec
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.shared_memory_fast_path import FastPath
from asyncddp.ops.slot_fast_path import run_in_slots, run_repeated
from asyncddp.torch_modes import uncompiled

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


FastCall: TypeAlias = tuple[FastPath, WeightRow, torch.Tensor, torch.Tensor | None]
"""A fast path that may take a call, and the arguments of its ``run`` and ``start``."""


def with_fast_path(find: Callable[..., FastCall | None]) -> Callable[[F], F]:
    """Give a verb a fast path outside the engine, before the variants are made.

    ``find`` takes the verb's arguments; it returns None where the engine must do it.
    """

    def mark(plan: F) -> F:
        plan.find_fast_path = find  # type: ignore[attr-defined]
        return plan

    return mark


def collective(plan: F) -> F:
    """Let repeated calls of a collective verb go through slots, before the variants are made."""
    plan.is_collective = True  # type: ignore[attr-defined]
    return plan


def blocking(plan: Callable[P, OperationSpec[R]]) -> Callable[P, R]:
    """Make the blocking variant of a verb from the function that builds its operation."""
    find = getattr(plan, "find_fast_path", None)

    @functools.wraps(plan)
    def variant(*args: P.args, **kwargs: P.kwargs) -> R:
        if find is not None and (call := find(*args, **kwargs)) is not None:
            path, row, tensor, out = call
            result: R | None = path.run(row, tensor, out)
            if result is not None:
                return result
        return run_in_slots(current().engine, plan(*args, **kwargs), args)

    if getattr(plan, "is_collective", False):
        in_place = getattr(plan, "is_in_place", False)

        @functools.wraps(plan)
        def variant(*args: P.args, **kwargs: P.kwargs) -> R:
            out: Any = args[0] if in_place and args else kwargs.get("out")
            return run_repeated(current().engine, plan, args, kwargs, out)

    returns = str(inspect.signature(plan).return_annotation).removeprefix("OperationSpec[")[:-1]
    return uncompiled(set_metadata(variant, plan.__name__, plan.__doc__, returns))


def nonblocking(variant: Callable[P, R]) -> Callable[P, Handle[R]]:
    """Make the non-blocking variant of a blocking one."""
    plan = cast("Callable[P, OperationSpec[R]]", inspect.unwrap(variant))
    name, find = variant.__name__, getattr(plan, "find_fast_path", None)

    @functools.wraps(plan)
    def start(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        if find is not None and (call := find(*args, **kwargs)) is not None:
            path, row, tensor, out = call
            handle: Handle[R] | None = path.start(row, tensor, out)
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
    find = getattr(plan, "find_fast_path", None)

    def inner(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> OperationSpec[R]:
        return plan(tensor, *args, **kwargs, out=tensor)

    def find_in_place(
        tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs
    ) -> FastCall | None:
        call: FastCall | None = find and find(tensor, *args, **kwargs, out=tensor)
        return call

    signature = inspect.signature(plan)
    kept = [item for item in signature.parameters.values() if item.name != "out"]
    inner.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    inner.is_collective = getattr(plan, "is_collective", False)  # type: ignore[attr-defined]
    inner.is_in_place = True  # type: ignore[attr-defined]
    inner.__module__, inner.__name__ = plan.__module__, f"{variant.__name__}_"
    inner.__qualname__ = find_in_place.__qualname__ = inner.__name__  # for Python's own errors
    inner.__doc__ = (
        f":func:`{variant.__name__}` whose result replaces the tensor, which is returned."
    )
    return blocking(inner if find is None else with_fast_path(find_in_place)(inner))


def set_metadata(variant: F, name: str, doc: str | None, returns: object) -> F:
    """Set the name, docstring and return annotation of a variant."""
    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = doc
    signature = inspect.signature(variant).replace(return_annotation=returns)
    variant.__signature__ = signature  # type: ignore[attr-defined]
    variant.__annotations__ = {**variant.__annotations__, "return": returns}
    return variant
