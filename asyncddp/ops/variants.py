"""Decorators that make the blocking, non-blocking and in-place variants of an operation.

A verb is written once, as a function from its arguments to a
:class:`~asyncddp.engine.OperationSpec`; the decorators turn it into the functions that users call,
as described by a :class:`Verb`. A verb that takes a tensor can also be called on a list of tensors,
by a :class:`~asyncddp.ops.tensor_list_call.TensorListCall`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

import torch
from msgspec.structs import replace as replace_field

from asyncddp.context import current
from asyncddp.context.context import use
from asyncddp.engine import Handle, OperationSpec
from asyncddp.ops.slot_fast_path import run_in_slots, run_repeated
from asyncddp.ops.tensor_list_call import (
    FastCall,
    ListKind,
    TensorListCall,
    TensorListHandle,
    Verb,
    is_collection,
)
from asyncddp.tensors.allocation import detached_copy, empty
from asyncddp.tensors.byte_views import has_plain_memory
from asyncddp.torch_modes import uncompiled

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K")
F = TypeVar("F", bound=Callable[..., Any])


class TensorVerb(Protocol[P, R]):
    """Blocking operation on a tensor, or on a list, tuple or dict of tensors."""

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
    """Non-blocking operation on a tensor, or on a list, tuple or dict of tensors."""

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


_verbs: dict[Callable[..., Any], Verb] = {}
"""Verbs by their blocking variants, of which the other variants are made."""


def of_tensors(
    lists: ListKind,
    *,
    collective: bool = False,
    for_some: bool = False,
    fast_path: Callable[..., FastCall | None] | None = None,
) -> Callable[[Callable[Concatenate[torch.Tensor, P], OperationSpec[R]]], TensorVerb[P, R]]:
    """Make the blocking variant of a verb that takes a tensor or a list of tensors.

    The arguments are those of :class:`Verb`.
    """

    def make(plan: Callable[..., OperationSpec[Any]]) -> Any:
        return _blocking(Verb(plan, lists, collective, for_some, fast_path))

    return make


def blocking(plan: Callable[P, OperationSpec[R]]) -> Callable[P, R]:
    """Make the blocking variant of a verb from the function that plans its operation."""
    return _blocking(Verb(plan))


def collective(plan: Callable[P, OperationSpec[R]]) -> Callable[P, R]:
    """Make the blocking variant of a collective; repeated calls use shared-memory slots."""
    return _blocking(Verb(plan, collective=True))


def _blocking(verb: Verb) -> Callable[..., Any]:
    """Make the blocking variant that a :class:`Verb` describes."""
    plan, find, on_lists = verb.plan, verb.fast_path, verb.lists is not None
    in_place = verb.in_place

    if verb.collective:

        def variant(*args: Any, **kwargs: Any) -> Any:
            if in_place:
                verb.add_out(args, kwargs)
            given: Any = args[0] if args else kwargs.get("tensor")
            if on_lists and not isinstance(given, torch.Tensor) and is_collection(given):
                return _run_on_list(verb, args, kwargs)
            return _run_collective(plan, args, kwargs)

    else:

        def variant(*args: Any, **kwargs: Any) -> Any:
            if in_place:
                verb.add_out(args, kwargs)
            if find is not None and (call := find(*args, **kwargs)) is not None:
                path, row, tensor, out = call
                result = path.run(row, tensor, out)
                if result is not None:
                    return result
            given: Any = args[0] if args else kwargs.get("tensor")
            if on_lists and not isinstance(given, torch.Tensor) and is_collection(given):
                return _run_on_list(verb, args, kwargs)
            return _run(_repeatable(plan, args, kwargs), args)

    name = plan.__name__ + "_" * in_place
    doc = f":func:`{plan.__name__}` whose result replaces the tensor, which is returned."
    made = uncompiled(_documented(variant, verb, name, doc if in_place else plan.__doc__))
    _verbs[made] = verb
    return made


def _run(spec: OperationSpec[R], about: Sequence[object]) -> R:
    """Run an operation on the calling thread, and return its result."""
    engine = current().engine
    return engine.run(spec, about) if spec.slot_call is None else run_in_slots(engine, spec, about)


def _repeatable(
    plan: Callable[..., OperationSpec[R]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> OperationSpec[R]:
    """Plan an operation; a collective of all ranks so that it can be planned anew without some.

    Its tensor is kept where its result would overwrite it.
    """
    spec, context = plan(*args, **kwargs), current()
    membership = context.engine.membership
    if membership is None or not spec.ordered or spec.group != membership.collective:
        return spec
    if args and isinstance(kwargs.get("out"), torch.Tensor):
        args = (_kept(args[0]), *args[1:])

    def again() -> OperationSpec[R]:
        with use(context):
            return replace_field(plan(*args, **kwargs), again=again)

    return replace_field(spec, again=again)


def run_planned(plan: Callable[[], OperationSpec[R]]) -> R:
    """Run a collective that a function plans on the calling thread, and return its result."""
    return _run(_repeatable(plan, (), {}), ())


def _kept(tensor: object) -> object:
    """Copy a tensor that a result may overwrite; what is no plain tensor is refused later on."""
    if type(tensor) not in {torch.Tensor, torch.nn.Parameter}:
        return tensor
    assert isinstance(tensor, torch.Tensor)
    if not has_plain_memory(tensor):
        return detached_copy(tensor) if tensor.layout is torch.strided else tensor
    with torch.no_grad():
        return empty(tensor.shape, tensor.dtype).copy_(tensor)


def _run_collective(
    plan: Callable[..., OperationSpec[R]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> R:
    """Run a collective on the calling thread, and return its result."""
    make_spec = functools.partial(_repeatable, plan, args, kwargs)
    return run_repeated(current().engine, plan, args, kwargs, make_spec)


def _run_on_list(verb: Verb, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Call a verb on a list of tensors and wait for its results."""
    call = TensorListCall(verb, args, kwargs)
    if (found := call.find_fast_path()) is not None:
        path, row, tensor, out = found
        result = path.run(row, tensor, out)
        if result is not None:
            return call.finish(result)
    return call.finish(_run(_repeatable(call.operation, (), {}), call.about))


def _start_on_list(verb: Verb, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handle[object]:
    """Start a call of a verb on a list of tensors, and return its handle."""
    call = TensorListCall(verb, args, kwargs)
    if (found := call.find_fast_path()) is not None:
        path, row, tensor, out = found
        handle = path.start(row, tensor, out)
        if handle is not None:
            return TensorListHandle(handle, call.finish)
    handle = current().engine.submit(_repeatable(call.operation, (), {}), about=call.about)
    return TensorListHandle(handle, call.finish)


@overload
def nonblocking(  # type: ignore[overload-overlap]  # the more exact type of the two
    variant: TensorVerb[P, R],
) -> NonblockingTensorVerb[P, R]: ...
@overload
def nonblocking(variant: Callable[P, R]) -> Callable[P, Handle[R]]: ...
def nonblocking(variant: Any) -> Any:
    """Make the non-blocking variant of a blocking verb."""
    verb = _verbs[variant]
    plan, find, on_lists = verb.plan, verb.fast_path, verb.lists is not None
    in_place = verb.in_place

    def start(*args: Any, **kwargs: Any) -> Handle[Any]:
        if in_place:
            verb.add_out(args, kwargs)
        if find is not None and (call := find(*args, **kwargs)) is not None:
            path, row, tensor, out = call
            handle: Handle[Any] | None = path.start(row, tensor, out)
            if handle is not None:
                return handle
        given: Any = args[0] if args else kwargs.get("tensor")
        if on_lists and not isinstance(given, torch.Tensor) and is_collection(given):
            return _start_on_list(verb, args, kwargs)
        return current().engine.submit(_repeatable(plan, args, kwargs), about=args)

    name, end = plan.__name__, "_" * in_place
    doc = f":func:`{name}{end}`"
    doc = f"Start {doc} and give a handle; leave its tensors alone until that is done."
    return uncompiled(_documented(start, verb, f"{name}_nonblocking{end}", doc, "Handle"))


@overload
def in_place(variant: TensorVerb[P, R]) -> TensorVerb[P, R]: ...
@overload
def in_place(
    variant: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]: ...
def in_place(variant: Any) -> Any:
    """Make the in-place variant of a blocking verb that takes an ``out``."""
    return _blocking(replace(_verbs[variant], in_place=True))


def _documented(
    variant: F, verb: Verb, name: str, doc: str | None, returns: str | None = None
) -> F:
    """Give a variant its verb's signature, and its own name and docstring."""
    functools.update_wrapper(variant, verb.plan)
    signature = inspect.signature(verb.plan)
    if returns is None:  # what the planned operation returns
        returns = str(signature.return_annotation).removeprefix("OperationSpec[")[:-1]
    kept = [
        item for item in signature.parameters.values() if not (verb.in_place and item.name == "out")
    ]
    return set_metadata(variant, name, doc, returns, signature.replace(parameters=kept))


def set_metadata(
    variant: F, name: str, doc: str | None, returns: object, like: inspect.Signature | None = None
) -> F:
    """Set the name, docstring, signature and return annotation of a variant."""
    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = doc
    signature = (like or inspect.signature(variant)).replace(return_annotation=returns)
    variant.__signature__ = signature  # type: ignore[attr-defined]
    variant.__annotations__ = {**variant.__annotations__, "return": returns}
    return variant
