"""Flattening of lists of tensors into a few flat tensors, without a copy where they are adjacent.

The tensors of a list that agree in dtype and device are parts of one flat tensor, in their order.
If they are adjacent in one storage, the flat tensor is a view of them; else they are copied into a
flat tensor that later calls reuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate, zip_longest
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from asyncddp.tensors.allocation import empty
from asyncddp.tensors.free_list import FreeList
from asyncddp.torch_modes import normal_mode, untracked_views

TensorCollection: TypeAlias = Sequence[torch.Tensor] | Mapping[Any, torch.Tensor]
"""List, tuple or dict of tensors."""
TensorOrTensors: TypeAlias = torch.Tensor | TensorCollection

_DESCRIBED = 100  # tensors of a list that its description names one by one
_KEPT_BYTES = 4 << 20  # of copies that each of the known lists keeps for its next call
_Form: TypeAlias = tuple[torch.Size, torch.dtype, torch.device, torch.layout]
_form_of = attrgetter("shape", "dtype", "device", "layout")
_is_negated = torch.Tensor.is_neg  # where the numbers in memory are still to be negated


class FlatTensors(NamedTuple):
    """Flat tensor, with views in it in the shapes of a list's tensors."""

    flat: torch.Tensor
    views: list[torch.Tensor]


class TensorGroup:
    """Group of a list's tensors with the same dtype and device, which make up one flat tensor.

    Attributes:
        indices: Positions of the group's tensors in the list.
        dtype: Dtype of the tensors.
        device: Device of the tensors.
    """

    def __init__(self, indices: list[int], forms: Sequence[_Form]) -> None:
        self.indices, (_, self.dtype, self.device, _) = indices, forms[indices[0]]
        self._whole = len(indices) == len(forms)
        self._shapes = [forms[index][0] for index in indices]
        self._sizes = [shape.numel() for shape in self._shapes]
        *starts, self._numel = accumulate(self._sizes, initial=0)
        self._offsets = [start * self.dtype.itemsize for start in starts]
        self._shaped = [(i, shape) for i, shape in enumerate(self._shapes) if len(shape) != 1]
        self._free = FreeList(lambda _: self._allocate(), _KEPT_BYTES)

    def of(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Select the tensors of a list that belong to this group."""
        return tensors if self._whole else [tensors[index] for index in self.indices]

    def flat_view(self, members: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return a flat view of tensors that are adjacent in one storage, else None."""
        first = members[0]
        start, itemsize = first.data_ptr(), self.dtype.itemsize
        if [one.data_ptr() - start for one in members] != self._offsets or 0 in self._sizes:
            return None
        if not all(map(torch.Tensor.is_contiguous, members)) or any(map(_is_negated, members)):
            return None
        if self.dtype.is_complex and any(map(torch.Tensor.is_conj, members)):
            return None
        offset, storage = first.storage_offset(), first.untyped_storage()
        if (offset + self._numel) * itemsize > storage.nbytes():
            return None  # neighbours by chance, in memory of different storages
        return first.detach().as_strided((self._numel,), (1,), offset)

    def pack(self, members: Sequence[torch.Tensor]) -> FlatTensors:
        """Copy tensors into a flat tensor, which :meth:`give_back` releases for reuse."""
        packed = self._free.take(self._nbytes) if self._reuses else self._allocate()
        with torch.no_grad():
            torch._foreach_copy_(packed.views, list(members))
        return packed

    def give_back(self, packed: FlatTensors) -> None:
        """Release an unused flat tensor for reuse."""
        if self._reuses:
            self._free.give(packed, self._nbytes)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views in a flat tensor, one per tensor of the group, independent for autograd."""
        with normal_mode(), untracked_views():
            views = list(flat.split_with_sizes(self._sizes))
            for index, shape in self._shaped:
                views[index] = views[index].view(shape)
        return views

    @property
    def _nbytes(self) -> int:
        return self._numel * self.dtype.itemsize

    @property
    def _reuses(self) -> bool:
        """True if flat copies are reused: on CPU only; torch's allocator reuses device memory."""
        return self.device.type == "cpu"

    def _allocate(self) -> FlatTensors:
        flat = empty((self._numel,), self.dtype, self.device)
        return FlatTensors(flat, self.views_of(flat))


class TensorListLayout:
    """Layout of a list of tensors: its groups by dtype and device, and a description for ranks.

    Attributes:
        keys: Keys of a dict; None for a list.
        groups: Groups of the tensors, in the order of their first tensors.
        description: Number, keys, dtypes and shapes, which must be the same on all ranks.
        checked: Whether such tensors were checked to be sendable.
    """

    def __init__(self, keys: tuple[Any, ...] | None, forms: tuple[_Form, ...]) -> None:
        self.keys, self.checked, self._forms = keys, False, forms
        self.groups = [TensorGroup(indices, forms) for indices in _group(forms)]
        self.description = _describe(keys, forms)

    @cached_property
    def ragged_description(self) -> str:
        """The description with "any" as first dimensions, which may differ between ranks."""
        return _describe(self.keys, self._forms, ragged=True)

    @staticmethod
    def of(keys: tuple[Any, ...] | None, tensors: Sequence[torch.Tensor]) -> TensorListLayout:
        """Return the layout of tensors with these keys, None for a list; layouts are cached."""
        return _layout(keys, tuple(map(_form_of, tensors)))


_layout = lru_cache(64)(TensorListLayout)


def _group(forms: Sequence[_Form]) -> list[list[int]]:
    """Group indices of tensors by dtype and device."""
    found: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index, (_, dtype, device, _) in enumerate(forms):
        found.setdefault((dtype, device), []).append(index)
    return list(found.values())


def _describe(keys: tuple[Any, ...] | None, forms: Sequence[_Form], *, ragged: bool = False) -> str:
    """Describe a list of tensors as text, which ranks compare."""
    labels = range(len(forms)) if keys is None else keys
    entries = [
        f"[{label!r}] {str(dtype).removeprefix('torch.')} "
        f"{str(('any', *shape[1:])).replace(repr('any'), 'any') if ragged else tuple(shape)}"
        for label, (shape, dtype, *_) in zip(labels, forms, strict=True)
    ]
    rest = entries[_DESCRIBED:]
    if rest:
        digest = blake2b("; ".join(rest).encode("utf-8", "backslashreplace"), digest_size=8)
        entries[_DESCRIBED:] = [f"{len(rest)} more, of digest {digest.hexdigest()}"]
    kind = "list" if keys is None else "dict"
    return "; ".join([f"a {kind} of {len(forms)} tensors", *entries])


def describe_difference(expected: str, got: str) -> str:
    """Format the first difference of two lists' descriptions; "" describes a single tensor.

    Example:
        >>> describe_difference("a list of 1 tensors; [0] int8 (3,)", "")
        'expected a list of 1 tensors; [0] int8 (3,), got a single tensor'
        >>> both = "a list of 2 tensors; [0] int8 (3,); [1] int8 "
        >>> describe_difference(both + "(2,)", both + "(4,)")
        'expected [1] int8 (2,) in a list of 2 tensors, got [1] int8 (4,) in a list of 2 tensors'
    """
    if not expected or not got:
        return f"expected {expected or 'a single tensor'}, got {got or 'a single tensor'}"
    (kind, *mine), (other_kind, *others) = expected.split("; "), got.split("; ")
    pairs = zip_longest(mine, others, fillvalue="nothing more")
    one, other = next(((a, b) for a, b in pairs if a != b), ("its keys", "other ones"))
    return f"expected {one} in {kind}, got {other} in {other_kind}"


def labelled(given: TensorCollection) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a collection with their labels, such as "[0]" or "['bias']"."""
    pairs = given.items() if isinstance(given, Mapping) else enumerate(given)
    for key, tensor in pairs:
        yield f"[{key!r}]", tensor
