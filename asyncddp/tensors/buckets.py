"""Flat buckets: one flat tensor holds many, so that a whole model is sent in few messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch.nn.parameter import is_lazy
from typing_extensions import override

from asyncddp.errors import ArgumentError
from asyncddp.tensors.allocation import zeros, zeros_like
from asyncddp.tensors.local_parts import (
    fitted,
    held,
    is_distributed,
    is_movable,
    local,
    set_local,
    shard,
)

TensorFactory: TypeAlias = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]

ALIGNMENT = 64
"""Alignment of each tensor in a bucket, in bytes."""


def partition(
    tensors: Iterable[torch.Tensor],
    cap: int,
    fragments: int = 1,
    kinds: Sequence[int] | None = None,
) -> list[list[int]]:
    """Assign tensors to buckets of at most ``cap`` bytes, in order, by dtype and device.

    A larger tensor gets a bucket of its own. Tensors of different fragments, as
    :func:`fragments_of` gives them, and of different ``kinds``, are in different buckets. Each
    bucket is returned as a list of indices into ``tensors``, buckets in order of their first
    tensors. Of DTensors the local parts count, but fragments are those of the whole model.
    """
    tensors = list(tensors)
    buckets: list[list[int]] = []
    filling: dict[tuple[torch.dtype, torch.device, int, int], tuple[list[int], int]] = {}
    of_each = zip(fragments_of(tensors, fragments), kinds or [0] * len(tensors), strict=True)
    for index, (tensor, (part, kind)) in enumerate(zip(tensors, of_each, strict=True)):
        key = tensor.dtype, tensor.device, part, kind
        size = local(tensor).numel() * tensor.element_size()
        bucket, used = filling.get(key, ([], cap))
        if used + size > cap:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[key] = bucket, used + size
    return buckets


def fragments_of(tensors: Sequence[torch.Tensor], count: int) -> list[int]:
    """Divide consecutive tensors into fragments of about equal size; return each one's fragment.

    Example:
        >>> fragments_of([torch.empty(2)] * 4 + [torch.empty(8)], 2)
        [0, 0, 0, 0, 1]
    """
    ends = list(accumulate((tensor.numel() for tensor in tensors), initial=0))
    middles = (start + end for start, end in pairwise(ends))
    twice = max(1, 2 * ends[-1])
    return [min(count - 1, count * middle // twice) for middle in middles]


def padded_nbytes(tensor: torch.Tensor) -> int:
    """Return the size of a tensor in a bucket, in bytes, including its padding."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def require_untied(
    named: Iterable[tuple[str, torch.Tensor]], others: Iterable[tuple[str, torch.Tensor]] = ()
) -> None:
    """Raise an error if tensors share elements; moving them to buckets would separate them.

    Args:
        named: Tensors that are to move to buckets, with their names.
        others: Tensors that stay where they are; some may be among ``named``.

    Raises:
        ArgumentError: Two of them are views of the same elements.
    """
    moved = {id(tensor): (name, tensor) for name, tensor in named}
    every = {**{id(tensor): (name, tensor) for name, tensor in others}, **moved}
    parts = [(n, local(t), key in moved) for key, (n, t) in every.items() if not is_lazy(t)]
    placed = [one for one in parts if _is_in_memory(one[1])]
    open_ones: list[tuple[str, torch.Tensor, bool]] = []  # which end behind where the next begins
    for name, tensor, moves in sorted(placed, key=lambda one: one[1].data_ptr()):
        start = tensor.data_ptr()
        open_ones = [one for one in open_ones if _end_address(one[1]) > start]
        for other, earlier, moves_too in open_ones:
            one_device = earlier.device == tensor.device
            if (moves or moves_too) and one_device and _overlap(earlier, tensor):
                raise ArgumentError(
                    f"argument model: {other} and {name} share memory, which would end when "
                    "parameters move to buckets; tie them as one parameter, by layer.weight = "
                    "other.weight, or use its transpose in forward; or give them memory of their "
                    "own, or algorithm='gradient_allreduce', which moves no parameter"
                )
        open_ones.append((name, tensor, moves))


def _is_in_memory(tensor: torch.Tensor) -> bool:
    dense = tensor.layout == torch.strided and not tensor.is_meta
    return dense and tensor.numel() > 0 and tensor.data_ptr() != 0


def _end_address(tensor: torch.Tensor) -> int:
    """Return the address after a tensor's last element."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.data_ptr() + (last + 1) * tensor.element_size())


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors share an element; ``first`` must begin at the lower address."""
    size, start = first.element_size(), first.data_ptr()
    end = max(_end_address(first), _end_address(second))
    if first.dtype != second.dtype or (second.data_ptr() - start) % size:
        return True
    taken = zeros(((end - start) // size,), torch.bool)
    taken.as_strided(first.shape, first.stride()).fill_(True)
    offset = (second.data_ptr() - start) // size
    return bool(taken.as_strided(second.shape, second.stride(), offset).any())


class FlatBucket:
    """Flat bucket: one flat tensor, with a view in it for each of several tensors of one dtype.

    The tensors are on one device. Dense tensors keep their strides, such as ``channels_last``; all
    others become contiguous. The padding between tensors is zero, and so is the padding at the end,
    up to a multiple of ``unit`` bytes. ``make`` allocates the flat tensor for tensors on the host.

    Attributes:
        flat: The flat tensor.
        views: Views of it, one for each tensor of ``like``.
        tail: The ``extra`` elements at the end.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        extra: int = 0,
        make: TensorFactory | None = None,
        unit: int = ALIGNMENT,
    ) -> None:
        first, size = like[0], like[0].element_size()
        *offsets, end = accumulate((padded_nbytes(one) // size for one in like), initial=0)
        end += -end % (unit // size)
        if make is not None and first.is_cpu:
            self.flat = make((end + extra,), first.dtype).zero_()
        else:
            self.flat = zeros((end + extra,), first.dtype, first.device)
        self.tail = self.flat[end:]
        self._places = [
            (tensor.shape, dense_strides(tensor), offset)
            for tensor, offset in zip(like, offsets, strict=True)
        ]
        self.views = self.views_of(self.flat)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views in another flat tensor of the same size, in the layout of this bucket.

        The views keep its leading dimensions, such as one for ranks.
        """
        start, (*outer, _), (*steps, _) = flat.storage_offset(), flat.shape, flat.stride()
        return [
            flat.as_strided((*outer, *shape), (*steps, *strides), start + offset)
            for shape, strides, offset in self._places
        ]

    def clear_padding(self, flat: torch.Tensor) -> None:
        """Write zeros to the padding of a flat tensor in the layout of this bucket."""
        if self._padding.numel():
            flat.index_fill_(-1, self._padding, 0.0)

    @cached_property
    def _padding(self) -> torch.Tensor:
        """Indices of the padding: elements outside of all tensors and of the tail."""
        taken = zeros_like(self.flat, torch.bool)
        for view in [*self.used_parts(taken), taken[taken.numel() - self.tail.numel() :]]:
            view.fill_(True)
        return taken.logical_not_().nonzero().squeeze(1)

    def used_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the views in a flat tensor, without padding inside of them."""
        return self.views_of(flat)


class NamedFlatBucket(FlatBucket):
    """Flat bucket with one view for each of several named parameters, which it does not store.

    Attributes:
        fragment: The fragment of the parameters, from 0 on.
    """

    fragment = 0

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        extra: int = 0,
        make: TensorFactory | None = None,
        unit: int = ALIGNMENT,
    ) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        super().__init__([local(parameter) for parameter in self.parameters], extra, make, unit)

    @override
    def used_parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self.views_of(flat), self.parameters, strict=True)
        return [fitted(view, shard(one)) if is_distributed(one) else view for view, one in pairs]


class ParameterBucket(NamedFlatBucket):
    """Flat bucket that stores named parameters: each one's local part is a view in it.

    Parameters that cannot be moved, as of an unknown version of FSDP2, are copied: to the bucket by
    :meth:`read`, and back by :meth:`write`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        make: TensorFactory | None = None,
        unit: int = ALIGNMENT,
    ) -> None:
        super().__init__(named, make=make, unit=unit)
        self._copied = [i for i, one in enumerate(self.parameters) if not is_movable(one)]
        for index in range(len(self.parameters)):
            self._attach(index)

    def _attach(self, index: int) -> None:
        """Copy a parameter's value into the bucket, and let the parameter be a view there."""
        parameter, view = self.parameters[index], self.views[index]
        view.copy_(local(parameter))
        if index not in self._copied:
            set_local(parameter, view)

    def read(self) -> None:
        """Copy the parameters that are no views into the bucket."""
        for index in self._copied:
            self.views[index].copy_(local(self.parameters[index]))

    def write(self) -> None:
        """Copy the bucket's values to the parameters that are no views."""
        for index in self._copied:
            local(self.parameters[index]).copy_(self.views[index])

    def detached_indices(self) -> list[int]:
        """Return indices of parameters that are no longer views, because ``data`` was replaced.

        If the bucket's memory itself has moved, as by ``share_memory()``, all are still views.
        """
        parts = enumerate(zip(map(held, self.parameters), self.views, strict=True))
        return [
            index
            for index, (part, view) in parts
            if part.shape != view.shape
            or (part.data_ptr() != view.data_ptr() and index not in self._copied)
        ]

    def reattach(self) -> bool:
        """Make all parameters views again; False if one's dtype, device, shape or strides changed.

        Raises:
            ArgumentError: Two parameters share memory.
        """
        detached = self.detached_indices()
        if detached:
            require_untied(zip(self.names, self.parameters, strict=True))
        for index in detached:
            data, view = local(self.parameters[index]), self.views[index]
            found = data.dtype, data.device, data.shape, dense_strides(data)
            if found != (view.dtype, view.device, view.shape, view.stride()):
                return False
            self._attach(index)
        self.read()
        return True

    def versions(self) -> list[int]:
        """Return each parameter's version counter, which grows with each in-place change."""
        return [parameter._version for parameter in self.parameters]


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's strides if it is dense and not overlapping, else contiguous strides."""
    kept = torch.empty_like(tensor, device="meta").stride()  # its own, if it is dense
    return kept if kept == tensor.stride() else torch.empty(tensor.shape, device="meta").stride()
