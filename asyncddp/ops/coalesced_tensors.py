"""Calls of an operation on a list of tensors, coalesced into flat tensors and split again."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from asyncddp.tensors.allocation import make_tensor, zeros
from asyncddp.tensors.byte_views import as_bytes, dense
from asyncddp.tensors.tensor_lists import FlatTensors, TensorGroup
from asyncddp.torch_modes import normal_mode

_ALIGNMENT = 16  # bytes: the size of the largest numbers


class ElementwiseListCall:
    """Elementwise operation on a list of tensors: packs them into a flat one, unpacks the result.

    ``given`` and ``out`` are the group's tensors; ``out`` is None if the result is to be new. A new
    result overwrites a packed copy of the given tensors, unless a rank may get no result.
    """

    def __init__(
        self,
        group: TensorGroup,
        given: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        *,
        in_place: bool,
        for_all: bool,
    ) -> None:
        self.group, self._out = group, out
        self._packed: FlatTensors | None = None
        flat = group.flat_view(given)
        if flat is None:
            self._packed = group.pack(given)
            flat = self._packed.flat
        self.flat = flat
        self.out: torch.Tensor | None = None
        if in_place or (out is None and self._packed is not None and for_all):
            self.out = flat
        elif out is not None:
            self.out = group.flat_view(out)

    def finish(self, result: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Unpack the result into the group's output tensors, and return these."""
        group, out, packed = self.group, self._out, self._packed
        if result is None:
            return out or [None] * len(group.indices)
        written = packed is not None and result is packed.flat
        views = packed.views if packed is not None and written else None
        if out is None:
            return views or group.views_of(result)
        if written or self.out is None:
            write_tensors(views or group.views_of(result), out)
        else:
            count_changes(out)
        if packed is not None:
            group.give_back(packed)
        return out


class RowwiseListCall:
    """Operation by rows on a list of tensors: each rank gets equal shares of each tensor's rows.

    The flat tensor has a row for each rank: the rank's shares of all tensors.
    """

    def __init__(
        self,
        group: TensorGroup,
        given: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor] | None,
        *,
        ranks: int,
    ) -> None:
        self.group, self._out = group, out
        self.out: torch.Tensor | None = None
        shares = [one.detach().reshape(ranks, one.numel() // ranks) for one in given]
        self.flat = torch.cat(shares, dim=1)
        self._sizes = [share.shape[1] for share in shares]
        self._shapes = [(one.shape[0] // ranks, *one.shape[1:]) for one in given]

    def finish(self, result: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Split this rank's result into the group's output tensors, and return these."""
        assert result is not None
        parts = result.view(-1).split_with_sizes(self._sizes)
        shares = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]
        if self._out is None:
            return shares
        write_tensors(shares, self._out)
        return self._out


class GatheringListCall:
    """Gathering operation on a list of tensors whose first dimensions may differ, sent as bytes.

    The flat tensor holds each tensor's number of rows, and then the bytes of each tensor, whatever
    their dtypes; all parts are aligned.
    """

    def __init__(self, group: TensorGroup, given: Sequence[torch.Tensor]) -> None:
        self.group, self._given = group, given
        self.out: torch.Tensor | None = None
        rows = make_tensor([one.shape[0] for one in given], torch.int64, given[0].device)
        parts: list[torch.Tensor] = []
        for one in (rows, *given):
            data = as_bytes(dense(one))
            parts += [data, zeros((-data.numel() % _ALIGNMENT,), torch.uint8, data.device)]
        self.flat = torch.cat(parts)

    def finish(self, result: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
        """Split the result into one concatenation per tensor; return Nones without a result."""
        if result is None:
            return [None] * len(self._given)
        parts: list[list[torch.Tensor]] = [[one.detach()[:0]] for one in self._given]
        place = 0

        def take(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            nonlocal place
            begin, size = place, math.prod(shape) * dtype.itemsize
            place += size + -size % _ALIGNMENT
            return result[begin : begin + size].view(dtype).view(shape)

        while place < result.numel():
            numbers = take((len(parts),), torch.int64).tolist()
            for one, rows, found in zip(self._given, numbers, parts, strict=True):
                found.append(take((rows, *one.shape[1:]), one.dtype))
        with normal_mode():
            return [torch.cat(found) for found in parts]


def write_tensors(found: list[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
    """Copy each tensor into its output tensor, outside autograd."""
    with torch.no_grad():
        if any(one.is_conj() or one.is_neg() for one in out):  # which no kernel for lists writes
            for one, value in zip(out, found, strict=True):
                one.copy_(value)
        else:
            torch._foreach_copy_(list(out), found)


def count_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Tell autograd that tensors were changed through a flat view of their memory."""
    if not any(map(torch.Tensor.is_inference, tensors)):
        torch.autograd.graph.increment_version(tensors)
