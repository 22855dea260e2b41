"""Decorators that make the blocking, non-blocking and in-place variants of an operation.

A verb is written once, as a function from its arguments to a
:class:`~asyncddp.engine.OperationSpec`; the decorators here make what users call. A verb of
:func:`elementwise`, :func:`rowwise` or :func:`gathering` is called on a list of tensors as well, by
:mod:`asyncddp.ops.list_calls`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

import torch

from asyncddp.context import current
from asyncddp.engine import Handle, OperationSpec
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.list_calls import TensorListCall, TensorListHandle, is_collection
from asyncddp.ops.list_groups import ElementwiseListCall, GatheringListCall, RowwiseListCall
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


def with_fast_path(find: Callable[..., FastCall | None]) -> Callable[[F], F]:
    """Give a verb a fast path outside the engine, before the variants are made.

    ``find`` takes the verb's arguments, and ``members``, the description of the list whose flat
    tensor it is called on; it returns None where the engine must do it.
    """

    def mark(plan: F) -> F:
        plan.find_fast_path = find  # type: ignore[attr-defined]
        return plan

    return mark


def collective(plan: F) -> F:
    """Let repeated calls of a collective verb go through slots, before the variants are made."""
    plan.is_collective = True  # type: ignore[attr-defined]
    return plan


def elementwise(
    plan: Callable[Concatenate[torch.Tensor, P], OperationSpec[R]],
) -> TensorVerb[P, R]:
    """Make the blocking variant of a verb that treats all elements of a tensor alike.

    So it may be called on a list of tensors as on one flat tensor of all their elements.
    """
    plan.on_lists = ElementwiseListCall  # type: ignore[attr-defined]
    return cast("TensorVerb[P, R]", blocking(plan))


def rowwise(plan: Callable[Concatenate[torch.Tensor, P], OperationSpec[R]]) -> TensorVerb[P, R]:
    """Make the blocking variant of a verb that gives each rank an equal share of a tensor's rows.

    So it may be called on a list of tensors as on one whose rows have the shares of all.
    """
    plan.on_lists = RowwiseListCall  # type: ignore[attr-defined]
    return cast("TensorVerb[P, R]", blocking(plan))


def gathering(plan: Callable[Concatenate[torch.Tensor, P], OperationSpec[R]]) -> TensorVerb[P, R]:
    """Make the blocking variant of a verb that concatenates the tensors of other ranks.

    So it may be called on a list of tensors as on the bytes of all.
    """
    plan.on_lists = GatheringListCall  # type: ignore[attr-defined]
    return cast("TensorVerb[P, R]", blocking(plan))


def blocking(plan: Callable[P, OperationSpec[R]]) -> Callable[P, R]:
    """Make the blocking variant of a verb from the function that builds its operation."""
    find, on_lists = getattr(plan, "find_fast_path", None), hasattr(plan, "on_lists")

    @functools.wraps(plan)
    def variant(*args: P.args, **kwargs: P.kwargs) -> R:
        if find is not None and (call := find(*args, **kwargs)) is not None:
            path, row, tensor, out = call
            result: R | None = path.run(row, tensor, out)
            if result is not None:
                return result
        if on_lists and is_collection(args[0] if args else kwargs.get("tensor")):
            return cast("R", _run_on_list(plan, *args, **kwargs))
        return run_in_slots(current().engine, plan(*args, **kwargs), args)

    if getattr(plan, "is_collective", False):
        in_place = getattr(plan, "is_in_place", False)

        @functools.wraps(plan)
        def variant(*args: P.args, **kwargs: P.kwargs) -> R:
            given: Any = args[0] if args else kwargs.get("tensor")
            if on_lists and is_collection(given):
                return cast("R", _run_on_list(plan, *args, **kwargs))
            out: Any = given if in_place else kwargs.get("out")
            return run_repeated(current().engine, plan, args, kwargs, out)

    returns = str(inspect.signature(plan).return_annotation).removeprefix("OperationSpec[")[:-1]
    return uncompiled(set_metadata(variant, plan.__name__, plan.__doc__, returns))


def _run_on_list(plan: Callable[..., OperationSpec[Any]], *args: Any, **kwargs: Any) -> object:
    """Call a verb on a list of tensors and wait for its results."""
    call, found = _list_call(plan, *args, **kwargs)
    if found is not None:
        path, row, tensor, out = found
        result = path.run(row, tensor, out)
        if result is not None:
            return call.finish(result)
    return call.finish(run_in_slots(current().engine, call.operation(), call.about))


def _start_on_list(
    plan: Callable[..., OperationSpec[Any]], *args: Any, **kwargs: Any
) -> Handle[object]:
    """Start a call of a verb on a list of tensors."""
    call, found = _list_call(plan, *args, **kwargs)
    if found is not None:
        path, row, tensor, out = found
        handle = path.start(row, tensor, out)
        if handle is not None:
            return TensorListHandle(handle, call.finish)
    handle = current().engine.submit(call.operation(), about=call.about)
    return TensorListHandle(handle, call.finish)


def _list_call(
    plan: Callable[..., OperationSpec[Any]], *args: Any, **kwargs: Any
) -> tuple[TensorListCall, FastCall | None]:
    """Return the call on a list's flat tensors, and its fast path if there is one."""
    given = args[0] if args else kwargs.pop("tensor")
    base: Any = getattr(plan, "in_place_of", plan)
    out = kwargs.pop("out", None) if base is plan else given
    call = TensorListCall(base, given, out, args[1:], kwargs)
    find = getattr(base, "find_fast_path", None)
    if find is None or call.single is None or base.on_lists is not ElementwiseListCall:
        return call, None
    flat, flat_out = call.single
    return call, find(flat, *args[1:], **kwargs, out=flat_out, members=call.members)


@overload
def nonblocking(  # type: ignore[overload-overlap]  # the more exact type of the two
    variant: TensorVerb[P, R],
) -> NonblockingTensorVerb[P, R]: ...
@overload
def nonblocking(variant: Callable[P, R]) -> Callable[P, Handle[R]]: ...
def nonblocking(variant: Any) -> Any:
    """Make the non-blocking variant of a blocking one."""
    plan = cast("Callable[..., OperationSpec[Any]]", inspect.unwrap(variant))
    name, find = variant.__name__, getattr(plan, "find_fast_path", None)
    on_lists = hasattr(plan, "on_lists")

    @functools.wraps(plan)
    def start(*args: Any, **kwargs: Any) -> Handle[Any]:
        if find is not None and (call := find(*args, **kwargs)) is not None:
            path, row, tensor, out = call
            handle: Handle[Any] | None = path.start(row, tensor, out)
            if handle is not None:
                return handle
        if on_lists and is_collection(args[0] if args else kwargs.get("tensor")):
            return _start_on_list(plan, *args, **kwargs)
        return current().engine.submit(plan(*args, **kwargs), about=args)

    doc = f"Start :func:`{name}` and give a handle; leave its tensors alone until that is done."
    own_name = f"{name.removesuffix('_')}_nonblocking{'_' * name.endswith('_')}"
    return uncompiled(set_metadata(start, own_name, doc, "Handle"))


@overload
def in_place(variant: TensorVerb[P, R]) -> TensorVerb[P, R]: ...
@overload
def in_place(
    variant: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]: ...
def in_place(variant: Any) -> Any:
    """Make the variant whose result replaces its first argument; the verb takes an ``out``."""
    plan = cast("Callable[..., OperationSpec[Any]]", inspect.unwrap(variant))
    find = getattr(plan, "find_fast_path", None)

    def inner(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> OperationSpec[Any]:
        return plan(tensor, *args, **kwargs, out=tensor)

    def find_in_place(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> FastCall | None:
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
    inner.in_place_of = plan  # type: ignore[attr-defined]
    if hasattr(plan, "on_lists"):
        inner.on_lists = plan.on_lists  # type: ignore[attr-defined]
    return blocking(inner if find is None else with_fast_path(find_in_place)(inner))


def set_metadata(variant: F, name: str, doc: str | None, returns: object) -> F:
    """Set the name, docstring and return annotation of a variant."""
    variant.__name__ = variant.__qualname__ = name
    variant.__doc__ = doc
    signature = inspect.signature(variant).replace(return_annotation=returns)
    variant.__signature__ = signature  # type: ignore[attr-defined]
    variant.__annotations__ = {**variant.__annotations__, "return": returns}
    return variant
