"""Compressor ``random_k``: keeps k random elements of each chunk; a seed determines the indices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from asyncddp.compression.compressor import Fields, State, Views
from asyncddp.compression.counter_random import below, random_words
from asyncddp.compression.sparsifier import Sparsifier
from asyncddp.tensors.allocation import arange
from asyncddp.tensors.dtypes import DTYPES


@dataclass(frozen=True)
class RandomK(Sparsifier):
    r"""Compressor that keeps k random elements of each chunk, and sends a seed for their indices.

    The chunk, seen as a circle, is divided into k equal arcs from a random element on, and an
    element of each arc is drawn: each is kept with probability k / S, and indices are distinct.

    .. math:: Q(x)_i = x_i \text{ if i is kept, else } 0, \qquad
              \text{or } \frac{S}{k} x_i \text{ with unbiased}

    Args:
        ratio: What part of the elements is kept, at least one; 0.01 unless ``k`` is given.
        k: How many elements of each chunk are kept, instead.
        unbiased: Scale what is kept by S / k: its mean is then x, and its variance
            :math:`(S / k - 1) \lVert x \rVert^2`. Without, it is a contraction, for error feedback.

    Example:
        >>> x = torch.arange(1.0, 7.0).view(1, 6)
        >>> q = RandomK(k=2)
        >>> encoded = torch.empty(1, q.encoded_size(6, x.dtype), dtype=torch.uint8)
        >>> q.encode(x, encoded, seed=3)
        >>> q.decode(encoded, x)
        >>> x.count_nonzero(), encoded.shape
        (tensor(2), torch.Size([1, 16]))

    References:
        Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
        Wangni et al., "Gradient sparsification for communication-efficient distributed
        optimization", NeurIPS 2018.
    """

    unbiased: bool = False

    name: ClassVar[str] = "random_k"
    wants_error_feedback = True
    costly_with = ("lr",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "wants_error_feedback", not self.unbiased)

    def fields(self, numel: int, dtype: torch.dtype) -> Fields:
        """Return the fields: the seed, and k values."""
        return (1, torch.int64), (self.kept(numel), dtype)

    def contraction(self, numel: int) -> float | None:
        r"""Return :math:`k / S`, or :math:`2 - S / k` with ``unbiased``, if it is positive."""
        share = self.kept(numel) / numel
        if not self.unbiased:
            return share
        return 2 - 1 / share if share > 0.5 else None

    @override
    def encode_into(self, fields: Views, chunks: torch.Tensor, seed: int, state: State) -> None:
        rows, numel = chunks.shape
        k = self.kept(numel)
        seeds = random_words(seed, rows, chunks.device).unsqueeze(1)
        sent, kept = fields
        sent.copy_(seeds)
        values = chunks.gather(1, _drawn(seeds, k, numel))
        if self.unbiased:
            values.mul_(numel / k)
        # zero, or NaN where any element is not finite, whether it is kept or not
        values.add_(chunks.sum(1, keepdim=True, dtype=DTYPES[chunks.dtype].accumulate).mul_(0))
        kept.copy_(values)

    @override
    def _found(self, fields: Views, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        seeds, values = fields
        return _drawn(seeds, values.shape[1], numel), values


def _drawn(seeds: torch.Tensor, k: int, numel: int) -> torch.Tensor:
    """Draw k distinct indices below ``numel`` for each seed, shape ``(K, k)``."""
    words = random_words(seeds, k + 1, seeds.device)
    ends = arange(k + 1, torch.int64, seeds.device).mul_(numel).floor_divide_(k)
    drawn = below(words[:, :k], ends[1:] - ends[:-1]).add_(ends[:-1])
    return drawn.add_(below(words[:, k:], numel)).remainder_(numel)
