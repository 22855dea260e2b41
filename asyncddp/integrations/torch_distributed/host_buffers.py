"""Contiguous host memory for the tensors of a verb, and the way back into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import empty
from asyncddp.tensors.byte_views import on_host

DEVICES = ("cpu", "cuda")


def check_tensors(verb: str, tensors: Iterable[Any]) -> None:
    """Raise an ArgumentError for what is no dense tensor on a device that the group serves."""
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


def streams_done(tensors: Iterable[torch.Tensor]) -> Callable[[], None] | None:
    """Return a function that waits until this thread's streams have done what they do so far.

    It is None where all tensors are on the host.
    """
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    if not devices:
        return None
    events = [torch.cuda.current_stream(device).record_event() for device in devices]

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


class OutputBuffer:
    """Contiguous host memory that becomes the value of a tensor: the tensor's own if it can be.

    Attributes:
        data: The memory, with the tensor's shape; with ``read`` it has the tensor's values.
    """

    def __init__(self, tensor: torch.Tensor, *, read: bool = False) -> None:
        self._tensor = tensor.detach()
        if read or (tensor.device.type == "cpu" and self._is_plain()):
            self.data = on_host(tensor)
        else:
            self.data = empty(tensor.shape, tensor.dtype)

    def _is_plain(self) -> bool:
        tensor = self._tensor
        return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())

    def store(self) -> None:
        """Copy the memory into the tensor, where it is another."""
        if self._tensor.is_cuda or self.data.data_ptr() != self._tensor.data_ptr():
            self._tensor.copy_(self.data)
            if self._tensor.is_cuda:
                torch.cuda.current_stream(self._tensor.device).synchronize()


def store_all(buffers: Sequence[OutputBuffer]) -> None:
    """Copy all buffers into their tensors."""
    for buffer in buffers:
        buffer.store()
