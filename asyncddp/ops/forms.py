"""The forms of a verb: blocking, non-blocking and in place, all made from one plan.

A verb is written once, as a function from its arguments to a
:class:`~asyncddp.engine.Program`; the decorators here make what users call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch

from asyncddp.context import current
from asyncddp.engine import Handle, Program
from asyncddp.memory.modes import uncompiled

__all__ = ["in_place", "nonblocking", "verb"]

P = ParamSpec("P")
R = TypeVar("R")


def verb(plan: Callable[P, Program[R]]) -> Callable[P, R]:
    """Make the blocking form: plan, run, give the result."""
    return _blocking(plan, None, None)


def verb_with(
    shortcut: Callable[..., torch.Tensor | None],
    starter: Callable[..., Handle[torch.Tensor] | None],
) -> Callable[[Callable[P, Program[torch.Tensor]]], Callable[P, torch.Tensor]]:
    """Make the blocking form of a verb that has a short way.

    Args:
        shortcut: Takes the verb's arguments; what it gives is the result, unless it is None.
        starter: The same for the non-blocking form, whose handle it gives.
    """

    def made(plan: Callable[P, Program[torch.Tensor]]) -> Callable[P, torch.Tensor]:
        """Make the verb of a plan."""
        return _blocking(plan, shortcut, starter)

    return made


def _blocking(
    plan: Callable[P, Program[R]],
    shortcut: Callable[..., R | None] | None,
    starter: Callable[..., Handle[R] | None] | None,
) -> Callable[P, R]:
    @functools.wraps(plan)
    def form(*args: P.args, **kwargs: P.kwargs) -> R:
        """Go the short way where there is one, and run the plan otherwise."""
        if shortcut is not None:
            result = shortcut(*args, **kwargs)
            if result is not None:
                return result
        return current().engine.run(plan(*args, **kwargs), about=args)

    form.short = shortcut, starter  # type: ignore[attr-defined]  # the other forms take them too
    annotation = str(inspect.signature(plan).return_annotation)
    return _as(form, plan.__name__, plan.__doc__, annotation.removeprefix("Program[")[:-1])


def nonblocking(form: Callable[P, R]) -> Callable[P, Handle[R]]:
    """Make the non-blocking form of a blocking one."""
    plan = cast("Callable[P, Program[R]]", inspect.unwrap(form))
    name = form.__name__

    _, starter = getattr(form, "short", (None, None))

    @functools.wraps(plan)
    def start(*args: P.args, **kwargs: P.kwargs) -> Handle[R]:
        """Start the short way where there is one, and submit the plan otherwise."""
        if starter is not None:
            handle: Handle[R] | None = starter(*args, **kwargs)
            if handle is not None:
                return handle
        return current().engine.submit(plan(*args, **kwargs), about=args)

    doc = f"Start :func:`{name}` and give a handle; leave its tensors alone until that is done."
    trailing = "_" if name.endswith("_") else ""
    return _as(start, f"{name.removesuffix('_')}_nonblocking{trailing}", doc, "Handle")


def in_place(
    form: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Make the form whose result replaces its first argument; the verb takes an ``out``."""
    plan = cast("Callable[..., Program[R]]", inspect.unwrap(form))

    def inner(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Program[R]:
        """Plan with the first argument as out."""
        return plan(tensor, *args, **kwargs, out=tensor)

    inner.__signature__ = _without_out(plan)  # type: ignore[attr-defined]

    shortcut, starter = getattr(form, "short", (None, None))

    def begin(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> Handle[R] | None:
        """Start the short way, or give None."""
        handle: Handle[R] | None = starter and starter(tensor, *args, **kwargs, out=tensor)
        return handle

    def run(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Go the short way where there is one, and run the plan otherwise."""
        if shortcut is not None:
            result: R | None = shortcut(tensor, *args, **kwargs, out=tensor)
            if result is not None:
                return result
        return current().engine.run(inner(tensor, *args, **kwargs), about=(tensor,))

    run.__wrapped__ = inner  # type: ignore[attr-defined]
    run.short = shortcut, None if starter is None else begin  # type: ignore[attr-defined]
    run.__module__ = form.__module__
    doc = f":func:`{form.__name__}` whose result replaces the tensor, which is returned."
    return _as(run, f"{form.__name__}_", doc, "torch.Tensor")


def _without_out(plan: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(plan)
    kept = [item for item in signature.parameters.values() if item.name != "out"]
    return signature.replace(parameters=kept)


F = TypeVar("F", bound=Callable[..., Any])


def _as(form: F, name: str, doc: str | None, returns: object) -> F:
    """Give a form its name, docstring and return annotation."""
    form.__name__ = form.__qualname__ = name
    form.__doc__ = doc
    signature = inspect.signature(form).replace(return_annotation=returns)
    form.__signature__ = signature  # type: ignore[attr-defined]
    form.__annotations__ = {**form.__annotations__, "return": returns}
    return uncompiled(form)
