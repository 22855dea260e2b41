"""Conversion between tensors and bytes, without copies where possible."""

from __future__ import annotations

import ctypes

import torch

from asyncddp.tensors.allocation import empty
from asyncddp.tensors.ordinary import is_ordinary
from asyncddp.torch_modes import normal_mode


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a flat uint8 view of a contiguous tensor."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # of a single element, whose stride means nothing
        flat = flat.as_strided(flat.shape, (1,))
    with normal_mode():  # in inference mode this view of an ordinary tensor would be none
        return flat.view(torch.uint8)


def from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Make a tensor that owns a copy of ``data``.

    Raises:
        ValueError: The number of bytes differs from the tensor's.
    """
    out = empty(shape, dtype)
    write_bytes(out, data)
    return out


def write_bytes(out: torch.Tensor, data: bytes) -> None:
    """Copy bytes into a contiguous tensor on the host.

    Raises:
        ValueError: The number of bytes differs from the tensor's.
    """
    if len(data) != out.nbytes:
        raise ValueError(
            f"expected {out.nbytes} bytes for {out.dtype} of {tuple(out.shape)}, got {len(data)}"
        )
    ctypes.memmove(out.data_ptr(), data, out.nbytes)


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Copy the bytes of a contiguous tensor on the host."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def has_plain_memory(tensor: torch.Tensor) -> bool:
    """Return whether a CPU tensor's memory holds its values contiguously, ready to be copied.

    Example:
        >>> has_plain_memory(torch.ones(2, 3)), has_plain_memory(torch.ones(2, 3).t())
        (True, False)
    """
    return (
        tensor.is_cpu
        and is_ordinary(tensor)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached, contiguous tensor of the same values, on the same device."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached, contiguous CPU tensor of the same values; copies only if needed."""
    return tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
