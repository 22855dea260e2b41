"""Argument checks of communication operations, and conversion of their tensors and results."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, TypeGuard

import torch

from asyncddp.device.stream_registry import streams_of
from asyncddp.engine import AnyTensorSignature, ExchangeSignature
from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import dense, has_plain_memory, on_host
from asyncddp.tensors.dtypes import DTYPES, DtypeKind, DtypeTraits, dtype_traits_of
from asyncddp.tensors.ordinary import is_ordinary, require_ordinary
from asyncddp.tensors.tensor_lists import TensorOrTensors
from asyncddp.torch_modes import refuse_transforms
from asyncddp.transport import Transport
from asyncddp.transport.cuda.staged_transport import device_transport_for


def check_tensor(
    verb: str, tensor: Any, *, min_ndim: int = 0, argument: str = "tensor"
) -> DtypeTraits:
    """Check that an argument is a dense tensor of a dtype that can be sent; return its traits."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"{verb}: argument {argument}: expected a torch.Tensor, got {type(tensor).__name__}; "
            "for other objects use broadcast_object or allgather_object"
        )
    require_ordinary(verb, tensor, argument)
    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"{verb}: argument {argument}: expected a dense tensor, got layout {tensor.layout}; "
            "call tensor.to_dense() first"
        )
    if tensor.ndim < min_ndim:
        raise ArgumentError(
            f"{verb}: argument {argument}: expected at least {min_ndim} dimension, got a 0-dim "
            "tensor; call tensor.reshape(1) first"
        )
    if tensor.is_meta:
        raise ArgumentError(
            f"{verb}: argument {argument}: expected a tensor with values, got one on device meta; "
            'make it with device="cpu", or outside of torch.device("meta")'
        )
    refuse_transforms(verb)
    traits: DtypeTraits = dtype_traits_of(tensor, verb, argument)
    return traits


def single_output(verb: str, out: TensorOrTensors | None) -> torch.Tensor | None:
    """Return a verb's ``out``; raise ArgumentError unless it is a writable tensor or None."""
    if out is None:
        return out
    if isinstance(out, torch.Tensor):
        require_writable(verb, out)
        return out
    raise ArgumentError(
        f"{verb}: argument out: expected a torch.Tensor like the first argument, got "
        f"{type(out).__name__}"
    )


def require_writable(verb: str, out: torch.Tensor, argument: str = "out") -> None:
    """Raise ArgumentError unless each element of an output tensor can be written separately."""
    require_ordinary(verb, out, argument)
    if out.is_inference() and not torch.is_inference_mode_enabled():
        made, remedy = "one made in torch.inference_mode()", "write in that mode, or use a clone()"
    elif out.layout is torch.strided and any(
        step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)
    ):
        made, remedy = "an expanded one, whose elements share memory", "call contiguous() first"
    else:
        return
    raise ArgumentError(
        f"{verb}: argument {argument} (or the tensor, in place): expected a tensor that can be "
        f"written, got {made}; {remedy}"
    )


def check_rank(verb: str, argument: str, rank: Any, size: int, *, but: int | None = None) -> int:
    """Return a rank as an int; raise ArgumentError unless it is in the world and not ``but``."""
    number = int(rank) if not isinstance(rank, bool) and hasattr(rank, "__index__") else -1
    if not 0 <= number < size or number == but:
        other = "" if but is None else f" other than {but}, this rank itself"
        raise ArgumentError(
            f"{verb}: argument {argument}: expected a rank in 0..{size - 1}{other}, got {rank!r}"
        )
    return number


def accumulation_dtype(
    verb: str, tensor: Any, *, round_integers: bool, average: bool = True, min_ndim: int = 0
) -> torch.dtype:
    """Check a tensor as :func:`check_tensor` does; return the dtype of its average or sum.

    Floats are averaged in their own precision, half-precision floats in float32, and integers in
    float64 if ``round_integers`` is set.
    """
    traits = check_tensor(verb, tensor, min_ndim=min_ndim)
    if traits.averages or not average:
        return traits.accumulate
    if traits.kind is DtypeKind.INTEGER and round_integers:
        return torch.float64
    remedy = (
        "pass round_integers=True to round the average half to even, or cast to float first"
        if traits.kind is DtypeKind.INTEGER
        else "cast it to float first"
    )
    raise ArgumentError(
        f"{verb}: the average of {traits.name} values is no {traits.name}; {remedy}"
    )


def write_result(
    result: torch.Tensor, like: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    """Convert a result to the dtype and device of the input, into ``out`` if given."""
    if out is None and result.dtype is like.dtype and result.device == like.device:
        return result
    if result.dtype.is_floating_point and DTYPES[like.dtype].kind is DtypeKind.INTEGER:
        result = result.round()
    if out is None:
        return result.to(device=like.device, dtype=like.dtype)
    if result is out:
        return out
    with torch.no_grad():
        out.copy_(result.view(out.shape))
    return out


def can_write_result(out: torch.Tensor | None, own: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Return True if the result can be written directly into ``out``, chunk by chunk."""
    return out is not None and can_receive(out, own, in_place=True) and out.shape == own.shape


def can_receive(out: torch.Tensor, own: torch.Tensor, *, in_place: bool = False) -> bool:
    """Return True if ``out`` can be written while ``own`` is read, or (``in_place``) is ``own``."""
    return (
        is_ordinary(out)
        and out.device == own.device
        and out.dtype == own.dtype
        and out.is_contiguous()
        and not out.is_conj()
        and not out.is_neg()
        and (
            (in_place and is_same_memory(out, own))
            or out.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
        )
    )


def direct_out(
    out: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor | None:
    """Return ``out`` if a result of this dtype and shape can be computed in its memory."""
    if out is None or out.dtype is not dtype or out.shape != shape or out.requires_grad:
        return None
    return out if has_plain_memory(out) else None


def is_same_memory(out: torch.Tensor | None, own: torch.Tensor) -> bool:
    """Return True if ``out`` begins at the tensor's memory address."""
    return out is not None and out.data_ptr() == own.data_ptr()


def signature_of(verb: str, tensor: torch.Tensor, *, ragged: bool = False) -> ExchangeSignature:
    """Return the verb, dtype and shape that peers must match; ``ragged`` leaves out dimension 0."""
    shape: Iterable[int | None] = tensor.shape
    if ragged:
        shape = (None, *tensor.shape[1:])
    streams = streams_of(tensor)
    kind = "cpu" if streams is None else streams.kind
    return ExchangeSignature(verb, str(tensor.dtype).removeprefix("torch."), tuple(shape), kind)


def expected_by(
    verb: str, given: torch.Tensor | None, beside: torch.Tensor | None = None
) -> tuple[ExchangeSignature, torch.Tensor]:
    """Return the signature that a received tensor must have, and a tensor on its device.

    If ``given`` is None, any tensor on the device of ``beside`` is expected, on the host if that is
    None too; the returned tensor is then empty.
    """
    if given is not None:
        return signature_of(verb, given), given
    into = empty((0,), torch.uint8) if beside is None else beside.new_empty(0, dtype=torch.uint8)
    form = signature_of(verb, into)
    return AnyTensorSignature(verb, form.dtype, form.shape, form.device), into


def prepare_for_transport(
    transport: Transport, tensor: torch.Tensor
) -> tuple[torch.Tensor, Transport]:
    """Return a tensor's values, contiguous and detached, and the transport that sends them.

    Values stay on a device that has its own transport; otherwise they go to the host, with the
    given transport.
    """
    streams = streams_of(tensor)
    if streams is None:
        return on_host(tensor), transport
    return dense(tensor), device_transport_for(transport, streams)


def equal_splits(verb: str, rows: int, number: int) -> list[int]:
    """Divide rows equally among ranks; raise ArgumentError if that is impossible.

    Example:
        >>> equal_splits("alltoall", 6, 3)
        [2, 2, 2]
    """
    share, odd = divmod(rows, number)
    if odd:
        raise ArgumentError(
            f"{verb}: argument tensor: expected a first dimension that {number} ranks can share "
            f"equally, got {rows}; append {number - odd} rows, or say with splits= how many go to "
            "each rank"
        )
    return [share] * number


def checked_splits(
    verb: str, argument: str, splits: Sequence[int], number: int, rows: int | None = None
) -> list[int]:
    """Return the number of rows of each rank; raise ArgumentError unless they fit the tensor.

    Example:
        >>> checked_splits("alltoall", "splits", (2, 0, 1), 3, rows=3)
        [2, 0, 1]
    """
    try:
        given = [operator.index(split) for split in splits]
    except TypeError:
        given = [-1]
    whole = rows is None or sum(given) == rows
    if len(given) != number or min(given, default=0) < 0 or not whole:
        total = "" if rows is None else f" that sum to {rows}, the rows of the tensor"
        raise ArgumentError(
            f"{verb}: argument {argument}: expected {number} numbers of rows, one for each rank"
            f"{total}, got {splits!r}"
        )
    return given


def check_shape_of_out(verb: str, out: torch.Tensor | None, shape: Sequence[int]) -> None:
    """Raise ArgumentError unless ``out`` has the shape of the result."""
    if out is not None and tuple(out.shape) != tuple(shape):
        raise ArgumentError(
            f"{verb}: argument out: expected shape {tuple(shape)}, got {tuple(out.shape)}; pass "
            f"torch.empty({tuple(shape)}), or leave out= away"
        )
