"""Flat buckets: many parameters in few tensors, so that few messages carry a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch

from asyncddp.memory.allocate import zeros

__all__ = ["ALIGNMENT", "FlatBucket", "ParameterBucket", "partition"]

Make: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

ALIGNMENT = 64
"""Bytes to whose multiples each tensor in a bucket is aligned."""


def partition(tensors: Iterable[torch.Tensor], cap: int) -> list[list[int]]:
    """Divide tensors among buckets, in order, by dtype, device and size.

    Args:
        tensors: Dense tensors.
        cap: Bytes that a bucket holds at most; a larger tensor gets one of its own.

    Returns:
        Indices into ``tensors``, a list for each bucket, buckets in order of their first tensor.

    Example:
        >>> a, b = torch.zeros(4), torch.zeros(2, dtype=torch.float64)
        >>> partition([a, b, a, a], cap=32)
        [[0, 2], [1], [3]]
    """
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for index, tensor in enumerate(tensors):
        key, size = (tensor.dtype, tensor.device), tensor.numel() * tensor.element_size()
        bucket, used = filling.get(key, ([], cap))
        if used + size > cap:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[key] = bucket, used + size
    return buckets


class FlatBucket:
    """A flat tensor with room for several tensors, each seen in its own shape.

    Dense tensors keep their strides (``channels_last`` stays what it is), all others lie
    contiguously. What is left between them for alignment is zero.

    Args:
        like: Tensors of one dtype and device, whose shapes and strides count.
        extra: Elements to add at the end.
        make: Makes the flat tensor of so many elements and of that dtype, for tensors on the host.

    Attributes:
        flat: The flat tensor.
        views: Views of it, one for each tensor.
        tail: The extra elements.

    Example:
        >>> bucket = FlatBucket([torch.zeros(2, 3), torch.zeros(5)])
        >>> bucket.flat.shape, bucket.views[1].storage_offset()
        (torch.Size([32]), 16)
    """

    def __init__(
        self, like: Sequence[torch.Tensor], extra: int = 0, make: Make | None = None
    ) -> None:
        first, self._offsets = like[0], []
        step, end = ALIGNMENT // first.element_size(), 0
        for tensor in like:
            self._offsets.append(end)
            end += -(-tensor.numel() // step) * step
        if make is not None and first.is_cpu:
            self.flat = make((end + extra,), first.dtype).zero_()
        else:
            self.flat = zeros((end + extra,), first.dtype, first.device)
        self.tail = self.flat[end:]
        self.views = [
            self.flat.as_strided(tensor.shape, _strides(tensor), offset)
            for tensor, offset in zip(like, self._offsets, strict=True)
        ]


class ParameterBucket(FlatBucket):
    """A flat bucket in which parameters live: each one's ``data`` is its view.

    Args:
        named: Names, for messages, and parameters of one dtype and device.
        make: As for :class:`FlatBucket`.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], make: Make | None = None) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        super().__init__([parameter.data for parameter in self.parameters], make=make)
        self._addresses = [view.data_ptr() for view in self.views]
        for index in range(len(self.parameters)):
            self._adopt(index)

    def _adopt(self, index: int) -> None:
        """Take a parameter's value, and make the parameter a view again."""
        parameter, view = self.parameters[index], self.views[index]
        view.copy_(parameter.data)
        parameter.data = view

    def strangers(self) -> list[int]:
        """Indices of parameters that are no longer views: moved, loaded or assigned anew."""
        homes = zip(self.parameters, self.views, self._addresses, strict=True)
        return [
            index
            for index, (parameter, view, address) in enumerate(homes)
            if parameter.data_ptr() != address or parameter.shape != view.shape
        ]

    def mend(self) -> bool:
        """Take in again what is no longer a view; False where that needs another bucket.

        A parameter whose dtype, device, shape or strides have changed does.
        """
        for index in self.strangers():
            data, view = self.parameters[index].data, self.views[index]
            if (data.dtype, data.device, data.shape) != (view.dtype, view.device, view.shape):
                return False
            if _strides(data) != view.stride():
                return False
            self._adopt(index)
        return True

    def versions(self) -> list[int]:
        """A number for each parameter that grows whenever it is changed in place."""
        return [parameter._version for parameter in self.parameters]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The tensor's own strides if it is dense and does not overlap, else contiguous ones."""
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
