"""Contiguous memory for the tensors of a verb, on their device, and the way back into them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import dense

DEVICES = ("cpu", "cuda")


def check_tensors(verb: str, tensors: Sequence[Any]) -> None:
    """Raise an ArgumentError for what are no dense tensors on one device that the group serves."""
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise ArgumentError(f"{verb}: expected tensors, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise ArgumentError(
                f"{verb}: expected dense tensors, got one of layout {tensor.layout}; call "
                "tensor.to_dense() first"
            )
        if tensor.device.type not in DEVICES:
            raise ArgumentError(
                f"{verb}: expected tensors on {' or '.join(DEVICES)}, which this process group "
                f"serves, got one on {tensor.device}; call tensor.cpu() first"
            )
        if tensor.device != tensors[0].device:
            raise ArgumentError(
                f"{verb}: expected all tensors on one device, got some on {tensors[0].device} and "
                f"on {tensor.device}; move them to one of the two first"
            )


class OutputBuffer:
    """Contiguous memory that becomes the value of a tensor: the tensor's own if it can be.

    Attributes:
        data: The memory, with the tensor's shape; with ``read`` it has the tensor's values.
    """

    def __init__(self, tensor: torch.Tensor, *, read: bool = False) -> None:
        self._tensor = tensor.detach()
        plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if read or plain:
            self.data = dense(tensor)
        else:
            self.data = empty(tensor.shape, tensor.dtype, tensor.device)

    def store(self) -> None:
        """Copy the memory into the tensor, where it is another."""
        if self.data.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.data)


@contextmanager
def contiguous(
    tensors: Sequence[torch.Tensor], *, read: bool = False
) -> Iterator[list[torch.Tensor]]:
    """Yield contiguous memory for each tensor, and then copy it into the tensor."""
    buffers = [OutputBuffer(tensor, read=read) for tensor in tensors]
    yield [buffer.data for buffer in buffers]
    for buffer in buffers:
        buffer.store()
