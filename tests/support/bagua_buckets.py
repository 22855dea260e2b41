"""Buckets of the simulation of Bagua's methods: where parameters lie in them, and their means."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncddp.compression.minmax_uint8 import MinMaxUInt8
from asyncddp.tensors.buckets import NamedFlatBucket, partition
from tests.support.bagua_net import Tensors


def mean(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean of tensors, summed in their order."""
    return sum(tensors[1:], tensors[0]) / len(tensors)


def quantised(chunks: torch.Tensor) -> torch.Tensor:
    """What the receivers of chunks, one in each row, decode."""
    q = MinMaxUInt8()
    encoded = torch.empty(
        len(chunks), q.encoded_size(chunks.shape[1], chunks.dtype), dtype=torch.uint8
    )
    q.encode(chunks.contiguous(), encoded)
    q.decode(encoded, decoded := torch.empty_like(chunks))
    return decoded


def quantised_mean(sums: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """Q(Σ Q(s) / count), with one chunk of each vector for each vector."""
    parts, numel = len(sums), sums[0].numel()
    width = -(-numel // parts)
    rows = [torch.nn.functional.pad(one, (0, parts * width - numel)) for one in sums]
    chunks = [quantised(one.view(parts, width)) for one in rows]
    return quantised(sum(chunks[1:], chunks[0]) / count).view(-1)[:numel]


class Layout:
    """Where parameters lie in flat buckets of at most ``cap`` bytes."""

    def __init__(self, model: torch.nn.Module, cap: int, *, backwards: bool) -> None:
        self._named = list(model.named_parameters())[:: -1 if backwards else 1]
        self._backwards = backwards
        parts = partition([one for _, one in self._named], cap)
        self._parts, self._buckets = parts, [self._bucket(part) for part in parts]

    def _bucket(self, part: Sequence[int]) -> NamedFlatBucket:
        return NamedFlatBucket(
            [(name, one.detach()) for name, one in map(self._named.__getitem__, part)]
        )

    def pack(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """The flat tensors of what belongs to the parameters, in the model's order."""
        ordered, flats = list(tensors)[:: -1 if self._backwards else 1], []
        for part, bucket in zip(self._parts, self._buckets, strict=True):
            flat = torch.zeros_like(bucket.flat)
            for view, index in zip(bucket.views_of(flat), part, strict=True):
                view.copy_(ordered[index])
            flats.append(flat)
        return flats

    def unpack(self, flats: Sequence[torch.Tensor]) -> Tensors:
        """The tensors of the parameters, in the model's order."""
        found = {}
        for part, bucket, flat in zip(self._parts, self._buckets, flats, strict=True):
            found.update(zip(part, bucket.views_of(flat), strict=True))
        return [found[index].clone() for index in sorted(found)][:: -1 if self._backwards else 1]
