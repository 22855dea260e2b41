"""Decorators that make the blocking, non-blocking and in-place variants of an operation.

A verb is written once, as a function from its arguments to a
:class:`~asyncddp.engine.OperationSpec`; the decorators here make what users call. A :class:`Verb`
says how. One of tensors is called on a list of them as well, by :mod:`asyncddp.ops.list_calls`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, overload

import torch

from asyncddp.context import current
from asyncddp.engine import Handle, OperationSpec
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.list_calls import ListKind, TensorListCall, TensorListHandle, is_collection
from asyncddp.ops.shared_memory_fast_path import FastPath
from asyncddp.ops.slot_fast_path import run_in_slots, run_repeated
from asyncddp.torch_modes import uncompiled

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")
F = TypeVar("F", bound=Callable[..., Any])


FastCall: TypeAlias = tuple[FastPath, WeightRow, torch.Tensor, torch.Tensor | None]
"""A fast path that may take a call, and the arguments of its ``run`` and ``start``."""


class TensorVerb(Protocol[P, R]):
    """Blocking variant of a verb that takes a tensor, or a list, tuple or dict of tensors."""

    @overload
    def __call__(self, tensor: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a tuple is a sequence, and wins
        self, tensor: tuple[torch.Tensor, ...], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, ...]: ...
    @overload
    def __call__(
        self, tensor: Sequence[torch.Tensor], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...
    @overload
    def __call__(
        self, tensor: Mapping[K, torch.Tensor], *args: P.args, **kwargs: P.kwargs
    ) -> dict[K, R]: ...


class NonblockingTensorVerb(Protocol[P, R]):
    """Non-blocking variant of a :class:`TensorVerb`."""

    @overload
    def __call__(self, tensor: torch.Tensor, *args: P.args, **kwargs: P.kwargs) -> Handle[R]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]  # a tuple is a sequence, and wins
        self, tensor: tuple[torch.Tensor, ...], *args: P.args, **kwargs: P.kwargs
    ) -> Handle[tuple[R, ...]]: ...
    @overload
    def __call__(
        self, tensor: Sequence[torch.Tensor], *args: P.args, **kwargs: P.kwargs
    ) -> Handle[list[R]]: ...
    @overload
    def __call__(
        self, tensor: Mapping[K, torch.Tensor], *args: P.args, **kwargs: P.kwargs
    ) -> Handle[dict[K, R]]: ...


@dataclass(frozen=True)
class Verb:
    """A verb: what plans its operation, and how it is called.

    Attributes:
        plan: Makes the operation of the verb's arguments.
        lists: How it is called on a list of tensors; None where it cannot be.
        collective: True if repeated calls go through slots.
        for_some: True if a rank may get no result.
        fast_path: Returns the fast path of a call outside the engine. It takes the verb's
            arguments, and ``members``, the description of the list whose flat tensor it is called
            on; it returns None where the engine must do it.
        in_place_of: The verb of which this is the variant in place, if it is one.
    """

    plan: Callable[..., OperationSpec[Any]]
    lists: ListKind | None = None
    collective: bool = False
    for_some: bool = False
    fast_path: Callable[..., FastCall | None] | None = None
    in_place_of: Verb | None = None


_verbs: dict[Callable[..., Any], Verb] = {}
"""Verbs by their blocking variants, of which the other variants are made."""


def of_tensors(
    lists: ListKind,
    *,
    collective: bool = False,
    for_some: bool = False,
    fast_path: Callable[..., FastCall | None] | None = None,
) -> Callable[[Callable[Concatenate[torch.Tensor, P], OperationSpec[R]]], TensorVerb[P, R]]:
    """Make the blocking variant of a verb that takes a tensor, or a list of them.

    The arguments are those of :class:`Verb`.
    """

    def make(plan: Callable[..., OperationSpec[Any]]) -> Any:
        return _blocking(Verb(plan, lists, collective, for_some, fast_path))

    return make


def blocking(plan: Callable[P, OperationSpec[R]]) -> Callable[P, R]:
    """Make the blocking variant of a verb from the function that plans its operation."""
    return _blocking(Verb(plan))


def collective(plan: Callable[P, OperationSpec[R]]) -> Callable[P, R]:
    """Make the blocking variant of a collective, of which repeated calls go through slots."""
    return _blocking(Verb(plan, collective=True))


def _blocking(verb: Verb) -> Callable[..., Any]:
    """Make the blocking variant of a verb."""
    plan, find, on_lists = verb.plan, verb.fast_path, verb.lists is not None
    in_place = verb.in_place_of is not None

    if verb.collective:

        def variant(*args: Any, **kwargs: Any) -> Any:
            given: Any = args[0] if args else kwargs.get("tensor")
            if on_lists and is_collection(given):
                return _run_on_list(verb, *args, **kwargs)
            out: Any = given if in_place else kwargs.get("out")
            return run_repeated(current().engine, plan, args, kwargs, out)

    else:

        def variant(*args: Any, **kwargs: Any) -> Any:
            if find is not None and (call := find(*args, **kwargs)) is not None:
                path, row, tensor, out = call
                result = path.run(row, tensor, out)
                if result is not None:
                    return result
            if on_lists and is_collection(args[0] if args else kwargs.get("tensor")):
                return _run_on_list(verb, *args, **kwargs)
            return run_in_slots(current().engine, plan(*args, **kwargs), args)

    made = uncompiled(_documented(variant, plan, plan.__name__, plan.__doc__, _result_of(plan)))
    _verbs[made] = verb
    return made


def _run_on_list(verb: Verb, *args: Any, **kwargs: Any) -> object:
    """Call a verb on a list of tensors and wait for its results."""
    call, found = _list_call(verb, *args, **kwargs)
    if found is not None:
        path, row, tensor, out = found
        result = path.run(row, tensor, out)
        if result is not None:
            return call.finish(result)
    return call.finish(run_in_slots(current().engine, call.operation(), call.about))


def _start_on_list(verb: Verb, *args: Any, **kwargs: Any) -> Handle[object]:
    """Start a call of a verb on a list of tensors."""
    call, found = _list_call(verb, *args, **kwargs)
    if found is not None:
        path, row, tensor, out = found
        handle = path.start(row, tensor, out)
        if handle is not None:
            return TensorListHandle(handle, call.finish)
    handle = current().engine.submit(call.operation(), about=call.about)
    return TensorListHandle(handle, call.finish)


def _list_call(verb: Verb, *args: Any, **kwargs: Any) -> tuple[TensorListCall, FastCall | None]:
    """Return the call on a list's flat tensors, and its fast path if there is one."""
    given = args[0] if args else kwargs.pop("tensor")
    base = verb.in_place_of or verb
    out = kwargs.pop("out", None) if base is verb else given
    assert base.lists is not None
    call = TensorListCall(
        base.plan, base.lists, given, out, args[1:], kwargs, for_all=not base.for_some
    )
    if base.fast_path is None or call.single is None or base.lists is not ListKind.ELEMENTWISE:
        return call, None
    flat, flat_out = call.single
    return call, base.fast_path(flat, *args[1:], **kwargs, out=flat_out, members=call.members)


@overload
def nonblocking(  # type: ignore[overload-overlap]  # the more exact type of the two
    variant: TensorVerb[P, R],
) -> NonblockingTensorVerb[P, R]: ...
@overload
def nonblocking(variant: Callable[P, R]) -> Callable[P, Handle[R]]: ...
def nonblocking(variant: Any) -> Any:
    """Make the non-blocking variant of a blocking one."""
    verb, name = _verbs[variant], variant.__name__
    plan, find, on_lists = verb.plan, verb.fast_path, verb.lists is not None

    def start(*args: Any, **kwargs: Any) -> Handle[Any]:
        if find is not None and (call := find(*args, **kwargs)) is not None:
            path, row, tensor, out = call
            handle: Handle[Any] | None = path.start(row, tensor, out)
            if handle is not None:
                return handle
        if on_lists and is_collection(args[0] if args else kwargs.get("tensor")):
            return _start_on_list(verb, *args, **kwargs)
        return current().engine.submit(plan(*args, **kwargs), about=args)

    doc = f"Start :func:`{name}` and give a handle; leave its tensors alone until that is done."
    own_name = f"{name.removesuffix('_')}_nonblocking{'_' * name.endswith('_')}"
    return uncompiled(_documented(start, plan, own_name, doc, "Handle"))


@overload
def in_place(variant: TensorVerb[P, R]) -> TensorVerb[P, R]: ...
@overload
def in_place(
    variant: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]: ...
def in_place(variant: Any) -> Any:
    """Make the variant whose result replaces its first argument; the verb takes an ``out``."""
    verb, name = _verbs[variant], variant.__name__
    plan, find = verb.plan, verb.fast_path

    def inner(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> OperationSpec[Any]:
        return plan(tensor, *args, **kwargs, out=tensor)

    def find_in_place(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> FastCall | None:
        return find and find(tensor, *args, **kwargs, out=tensor)

    doc = f":func:`{name}` whose result replaces the tensor, which is returned."
    _documented(inner, plan, f"{name}_", doc, inspect.signature(plan).return_annotation, but="out")
    fast_path = None if find is None else find_in_place
    return _blocking(replace(verb, plan=inner, fast_path=fast_path, in_place_of=verb))


def _result_of(plan: Callable[..., Any]) -> str:
    """Return the annotation of what an operation that a function plans returns."""
    return str(inspect.signature(plan).return_annotation).removeprefix("OperationSpec[")[:-1]


def _documented(
    variant: F, like: Callable[..., Any], name: str, doc: str | None, returns: object, but: str = ""
) -> F:
    """Give a variant the signature of a function, for readers, with a name and doc of its own."""
    functools.update_wrapper(variant, like)
    signature = inspect.signature(like)
    kept = [item for item in signature.parameters.values() if item.name != but]
    variant.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    variant.__doc__ = doc
    return set_metadata(variant, name, doc, returns)


def set_metadata(variant: F, name: str, doc: str | None, returns: object) -> F:
    """Set the name, docstring and return annotation of a variant."""
    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = doc
    signature = inspect.signature(variant).replace(return_annotation=returns)
    variant.__signature__ = signature  # type: ignore[attr-defined]
    variant.__annotations__ = {**variant.__annotations__, "return": returns}
    return variant
