"""Calls of operations on a list of tensors, made as one operation on a few flat tensors.

The verb is called on each flat tensor that :mod:`asyncddp.tensors.tensor_lists` makes. The results
are returned in the form of the list: as views of the flat result, or in the output tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from msgspec.structs import replace

from asyncddp.device.stream_interfaces import StreamOrdering
from asyncddp.device.stream_registry import stream_ordering_of, streams_of
from asyncddp.engine import Handle, OperationSpec, SlotCall, in_sequence
from asyncddp.errors import ArgumentError, AsyncDDPError, DtypeError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.coalesced_tensors import ElementwiseListCall, GatheringListCall, RowwiseListCall
from asyncddp.ops.process_group import members_of
from asyncddp.ops.shared_memory_fast_path import NeighborAverageFastPath
from asyncddp.ops.validation import check_tensor, require_writable
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.ordinary import is_ordinary
from asyncddp.tensors.tensor_lists import (
    TensorCollection,
    TensorListLayout,
    TensorOrTensors,
    describe_difference,
    labelled,
)
from asyncddp.torch_modes import refuse_transforms, uncompiled

R = TypeVar("R")
_GroupCall: TypeAlias = ElementwiseListCall | RowwiseListCall | GatheringListCall
FastCall: TypeAlias = tuple[NeighborAverageFastPath, WeightRow, torch.Tensor, torch.Tensor | None]
"""A fast path that may take a call, and the arguments of its ``run`` and ``start``."""


class ListKind(Enum):
    """Packing of a list of tensors into flat ones: elementwise, by rows, or as bytes."""

    ELEMENTWISE = "as on one flat tensor of all elements, which it treats alike"
    ROWWISE = "as on one tensor whose rows have the shares of all, of which each rank gets some"
    GATHERING = "as on the bytes of all, which it concatenates with those of other ranks"


@dataclass(frozen=True)
class Verb:
    """Definition of a communication operation, with the function that specifies each call.

    Attributes:
        plan: Makes the operation from the verb's arguments.
        lists: Kind of its calls on a list of tensors; None if it takes no lists.
        collective: True if repeated calls go through slots.
        for_some: True if a rank may get no result.
        fast_path: Returns the fast path of a call outside the engine, or None if the engine must
            run it. It takes the verb's arguments, and ``members``, the description of the list
            whose flat tensor is given.
        in_place: True if the first argument is also ``out``.
    """

    plan: Callable[..., OperationSpec[Any]]
    lists: ListKind | None = None
    collective: bool = False
    for_some: bool = False
    fast_path: Callable[..., FastCall | None] | None = None
    in_place: bool = False

    @property
    def name(self) -> str:
        """Name of the verb, without the underscore of its in-place variant."""
        return self.plan.__name__

    def add_out(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Set ``out`` of an in-place call to its first argument."""
        if not args:
            raise TypeError(f"{self.name}_() missing 1 required positional argument: 'tensor'")
        if "out" in kwargs:
            raise TypeError(f"{self.name}_() got an unexpected keyword argument 'out'")
        kwargs["out"] = args[0]


def is_collection(given: object) -> TypeGuard[TensorCollection]:
    """Return True for a list, tuple or dict, as a collection of tensors."""
    return not isinstance(given, torch.Tensor) and isinstance(given, (list, tuple, Mapping))


class TensorListCall:
    """Call of an operation on a list of tensors, made as one operation on a few flat tensors.

    A rank may get no result if the verb's result is not for all ranks.

    Raises:
        ArgumentError: An element is no tensor that can be sent, or ``out`` does not match the list.
        DtypeError: An element's dtype cannot be sent.
    """

    def __init__(self, verb: Verb, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._given = given = args[0] if args else kwargs.pop("tensor")
        self._result = out = kwargs.pop("out", None)
        self._verb, self._args, self._kwargs = verb, args[1:], kwargs
        layout, tensors = _layout_of(verb.name, "tensor", given)
        self.layout = layout
        self._empty = None if tensors else empty((0,), torch.float32)
        self.members = layout.description
        make: Callable[..., ElementwiseListCall | RowwiseListCall]
        if verb.lists is ListKind.GATHERING:
            self.members = layout.ragged_description
            self._calls: list[_GroupCall] = self._gather(tensors)
            return
        if verb.lists is ListKind.ELEMENTWISE:
            like, all_get = layout, not verb.for_some
            make = partial(ElementwiseListCall, in_place=out is given, for_all=all_get)
        else:
            ranks = members_of(verb.name, kwargs.get("group")).size
            like = _shares_of(verb.name, given, ranks)
            make = partial(RowwiseListCall, ranks=ranks)
        outs: Sequence[torch.Tensor] | None = None
        if out is not None:
            outs = tensors if out is given else _tensors_like(verb.name, like, out)
            for place, one in enumerate(outs):
                require_writable(verb.name, one, f"out, tensor {place}")
        self._calls = [
            make(group, group.of(tensors), outs and group.of(outs)) for group in layout.groups
        ]

    def _gather(self, tensors: Sequence[torch.Tensor]) -> list[_GroupCall]:
        """Return the one call that gathers tensors of all dtypes."""
        if self._result is not None:
            raise TypeError(f"{self._verb.name}() got an unexpected keyword argument 'out'")
        devices = sorted({str(one.device) for one in tensors})
        if len(devices) > 1:
            raise self._of_several_devices(devices)
        for label, one in labelled(self._given):
            check_tensor(self._verb.name, one, min_ndim=1, argument=f"tensor{label}")
        return [GatheringListCall(self.layout.groups[0], tensors)] if tensors else []

    def _of_several_devices(self, devices: Sequence[str]) -> ArgumentError:
        return ArgumentError(
            f"{self._verb.name}: argument tensor: expected tensors on one device, got some on "
            f"{' and '.join(devices)}; call {self._verb.name} for each device"
        )

    def find_fast_path(self) -> FastCall | None:
        """Return the fast path of the call if there is only one flat tensor, or None."""
        find, kind = self._verb.fast_path, self._verb.lists
        if find is None or len(self._calls) != 1 or kind is not ListKind.ELEMENTWISE:
            return None
        call = self._calls[0]
        return find(call.flat, *self._args, **self._kwargs, out=call.out, members=self.members)

    @property
    def about(self) -> list[torch.Tensor]:
        """Flat tensors of the call."""
        return [call.flat for call in self._calls]

    def operation(self) -> OperationSpec[Any]:
        """Return the operation's specification; :meth:`finish` takes the operation's result."""
        if self._empty is not None:
            specs = [self._verb.plan(self._empty, *self._args, **self._kwargs)]
        else:
            specs = [self._plan_group(call) for call in self._calls]
        first, members = specs[0], self.members
        slot_call: SlotCall[Any] | None = first.slot_call
        if slot_call is not None:
            exchange = slot_call.exchange
            exchange = replace(exchange, signature=replace(exchange.signature, members=members))
            slot_call = replace(slot_call, exchange=exchange)
        first = replace(first, slot_call=slot_call, members=members)
        if len(specs) == 1:
            return first
        joined = in_sequence([first, *specs[1:]])
        return replace(joined, stream_ordering=self._stream_ordering())

    def _plan_group(self, call: _GroupCall) -> OperationSpec[Any]:
        more = self._kwargs if call.out is None else {**self._kwargs, "out": call.out}
        try:
            return self._verb.plan(call.flat, *self._args, **more)
        except (ArgumentError, DtypeError) as error:
            dtype = call.group.dtype
            if str(dtype).removeprefix("torch.") not in str(error):
                raise
            places = [label for label, one in labelled(self._given) if one.dtype == dtype]
            where = ", ".join(f"tensor{place}" for place in places[:4])
            where += f" and {len(places) - 4} more" if len(places) > 4 else ""
            raise type(error)(f"{error}; of {len(self._given)} tensors, this is {where}") from error

    def _stream_ordering(self) -> StreamOrdering | None:
        """Return the stream ordering of all groups on the device; None on the host."""
        on_device = [call.flat for call in self._calls if streams_of(call.flat) is not None]
        if not on_device:
            return None
        devices = sorted({str(flat.device) for flat in on_device})
        if len(devices) > 1:
            raise self._of_several_devices(devices)
        return stream_ordering_of(on_device[0], *on_device[1:])

    def finish(self, result: Any) -> Any:
        """Return the operation's results in the form of the given list, or ``out``."""
        if len(self._calls) == 1:
            found = self._calls[0].finish(result)
        else:
            places: dict[int, torch.Tensor | None] = {}
            for call, one in zip(self._calls, result if self._calls else (), strict=True):
                places.update(zip(call.group.indices, call.finish(one), strict=True))
            found = [places[index] for index in range(len(places))]
        if self._result is not None:
            return self._result
        return _like(self._given, self.layout.keys, found)


class TensorListHandle(Handle[R]):
    """Handle of a non-blocking operation on a list of tensors; waiting for it unpacks the result.

    The output tensors are written at that moment, on the calling thread.
    """

    def __init__(self, inner: Handle[Any], finish: Callable[[Any], R]) -> None:
        self._inner, self._finish = inner, finish
        self._found: list[R] = []
        self._lock = threading.Lock()

    @uncompiled
    def poll(self) -> bool:
        """Return True if the call has ended, with or without an error; never wait."""
        if not self._found:
            if not self._inner.poll():
                return False
            with suppress(AsyncDDPError):  # raised by wait
                self.wait()
        return True

    @uncompiled
    def wait(self, timeout: float | None = None) -> R:
        """Wait for the result and return it."""
        if not self._found:
            result = self._inner.wait(timeout)
            with self._lock:
                if not self._found:
                    self._found.append(self._finish(result))
        return self._found[0]

    def __repr__(self) -> str:
        return repr(self._inner)


def _layout_of(
    verb: str, argument: str, given: TensorCollection
) -> tuple[TensorListLayout, Sequence[torch.Tensor]]:
    """Check each tensor of a list; return the list's layout and its tensors."""
    keys = tuple(given) if isinstance(given, Mapping) else None
    tensors = list(given.values() if isinstance(given, Mapping) else given)
    refuse_transforms(verb)
    try:
        layout = TensorListLayout.of(keys, tensors)
    except (AttributeError, RuntimeError):
        layout = None  # an element is no tensor, or one without a shape
    if layout is None or not layout.checked or not all(map(is_ordinary, tensors)):
        for label, tensor in labelled(given):
            check_tensor(verb, tensor, argument=f"{argument}{label}")
        layout = layout or TensorListLayout.of(keys, tensors)
        layout.checked = True
    return layout, tensors


def _shares_of(verb: str, given: TensorCollection, ranks: int) -> TensorListLayout:
    """Return the layout of one rank's equal shares of the tensors' rows."""
    shares = []
    for label, one in labelled(given):
        check_tensor(verb, one, min_ndim=1, argument=f"tensor{label}")
        rows, odd = divmod(one.shape[0], ranks)
        if odd:
            raise ArgumentError(
                f"{verb}: argument tensor{label}: expected a first dimension that {ranks} ranks "
                f"can share equally, got shape {tuple(one.shape)}; append {ranks - odd} rows"
            )
        shares.append(one[:rows])
    return TensorListLayout.of(tuple(given) if isinstance(given, Mapping) else None, shares)


def _tensors_like(
    verb: str, layout: TensorListLayout, out: TensorOrTensors
) -> Sequence[torch.Tensor]:
    """Return the tensors of ``out``, after checking that it matches the list."""
    if not is_collection(out):
        raise ArgumentError(
            f"{verb}: argument out: expected a list of tensors like the results, got "
            f"{type(out).__name__}"
        )
    other, tensors = _layout_of(verb, "out", out)
    if other.description != layout.description:
        difference = describe_difference(layout.description, other.description)
        raise ArgumentError(f"{verb}: argument out: {difference}, as the results have it")
    return tensors


def _like(given: TensorCollection, keys: tuple[Any, ...] | None, found: Sequence[Any]) -> Any:
    """Return results in a collection of the given one's type."""
    if keys is not None:
        return dict(zip(keys, found, strict=True))
    if isinstance(given, tuple):
        return type(given)(*found) if hasattr(given, "_fields") else tuple(found)
    return list(found)
