"""What all verbs do at the door: check arguments, bring tensors to their wire and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from asyncddp.engine import Form
from asyncddp.errors import ArgumentError
from asyncddp.memory.dtypes import DTYPES, Dtype, Kind, dtype_of
from asyncddp.memory.modes import refuse_transforms
from asyncddp.memory.streams import streams_of
from asyncddp.memory.views import dense, on_host
from asyncddp.transport import Transport
from asyncddp.transport.cuda_staged import on_device

__all__ = ["averaging_dtype", "carried", "check_rank", "check_tensor", "deliver", "form_of"]


def check_tensor(verb: str, tensor: Any, *, min_ndim: int = 0) -> Dtype:
    """Insist on a dense tensor whose dtype can travel.

    Raises:
        ArgumentError: It is no tensor, not dense, has too few dimensions or no values, or is one of
            a function that ``torch.func`` transforms.
        DtypeError: Its dtype cannot travel.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"{verb}: argument tensor: expected a torch.Tensor, got {type(tensor).__name__}; "
            "for other objects use broadcast_object or allgather_object"
        )
    if tensor.layout != torch.strided:
        raise ArgumentError(
            f"{verb}: argument tensor: expected a dense tensor, got layout {tensor.layout}; "
            "call tensor.to_dense() first"
        )
    if tensor.ndim < min_ndim:
        raise ArgumentError(
            f"{verb}: argument tensor: expected at least {min_ndim} dimension, got a 0-dim tensor; "
            "call tensor.reshape(1) first"
        )
    if tensor.is_meta:
        raise ArgumentError(
            f"{verb}: argument tensor: expected a tensor with values, got one on device meta; make "
            'it with device="cpu", or outside of torch.device("meta")'
        )
    refuse_transforms(verb)
    row: Dtype = dtype_of(tensor, verb)
    return row


def check_rank(verb: str, argument: str, rank: Any, size: int, *, but: int | None = None) -> int:
    """Insist on a rank of the world, other than ``but``.

    Raises:
        ArgumentError: It is not one.
    """
    number = int(rank) if not isinstance(rank, bool) and hasattr(rank, "__index__") else -1
    if not 0 <= number < size or number == but:
        other = "" if but is None else f" other than {but}, this rank itself"
        raise ArgumentError(
            f"{verb}: argument {argument}: expected a rank in 0..{size - 1}{other}, got {rank!r}"
        )
    return number


def averaging_dtype(verb: str, row: Dtype, *, round_integers: bool) -> torch.dtype:
    """The dtype in which a weighted average is formed.

    Floats and complex numbers average in their own precision, halves in float32. Integers average
    in float64 and are rounded half to even, where that was asked for.

    Raises:
        ArgumentError: Integers or bools, and nobody asked.
    """
    if row.averages:
        return row.accumulate
    if row.kind is Kind.INTEGER and round_integers:
        return torch.float64
    remedy = (
        "pass round_integers=True to round the average half to even, or cast to float first"
        if row.kind is Kind.INTEGER
        else "cast it to float first"
    )
    raise ArgumentError(f"{verb}: the average of {row.name} values is no {row.name}; {remedy}")


def deliver(result: torch.Tensor, like: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """Bring a result to the dtype and device of the input, into ``out`` if given."""
    if result.dtype.is_floating_point and DTYPES[like.dtype].kind is Kind.INTEGER:
        result = result.round()
    if out is None:
        return result.to(device=like.device, dtype=like.dtype)
    if result is out:
        return out
    with torch.no_grad():
        out.copy_(result.view(out.shape))
    return out


def form_of(verb: str, tensor: torch.Tensor, *, ragged: bool = False) -> Form:
    """What peers must agree about; with ``ragged`` the first dimension may differ."""
    shape: Iterable[int | None] = tensor.shape
    if ragged:
        shape = (None, *tensor.shape[1:])
    streams = streams_of(tensor)
    kind = "cpu" if streams is None else streams.kind
    return Form(verb, str(tensor.dtype).removeprefix("torch."), tuple(shape), kind)


def carried(wire: Transport, tensor: torch.Tensor) -> tuple[torch.Tensor, Transport]:
    """A tensor as a wire can take it, and the wire that takes it.

    Args:
        wire: Between the ranks, for tensors on the host.
        tensor: Anywhere.

    Returns:
        Its values, contiguous and outside autograd: where they lie and a wire for their device, or
        on the host and the wire itself.
    """
    streams = streams_of(tensor)
    if streams is None:
        return on_host(tensor), wire
    return dense(tensor), on_device(wire, streams)
