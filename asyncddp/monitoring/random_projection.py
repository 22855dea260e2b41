"""Random projection of model parameters to a few numbers, which nearly preserves distances."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from asyncddp.tensors.allocation import make_tensor, zeros
from asyncddp.tensors.buckets import partition

_WIDTH = 1021  # a prime, so that no column of a weight matrix falls on one index
_PIECE = 256 * _WIDTH  # elements that are worked on at a time
_GROUP = 4 << 20  # bytes of small parameters that are worked on together


class RandomProjection:
    r"""Random projection of model parameters to k numbers, equal on ranks with the same seed.

    .. math:: P(x) = \tfrac{1}{\sqrt k} B S x, \qquad
              \mathbb{E} \lVert P(x) \rVert^2 = \lVert x \rVert^2, \qquad
              \operatorname{Var} \lVert P(x) \rVert^2 \approx \tfrac{2}{k} \lVert x \rVert^4

    S gives each parameter a random sign and adds up those of equal index modulo 1021; B has
    random signs too. So the cost is one multiplication for each parameter, whatever k is, and
    d / 8 bytes of signs are kept. P is linear, and equal for equal parameters bit by bit.

    Example:
        >>> project = RandomProjection(64)
        >>> apart = project([torch.ones(5000)]) - project([torch.zeros(5000)])
        >>> 0.5 < float(apart.norm()) / 5000**0.5 < 1.5
        True

    References:
        Achlioptas, "Database-friendly random projections", JCSS 2003; Charikar, Chen and
        Farach-Colton, "Finding frequent items in data streams", ICALP 2002.
    """

    def __init__(self, k: int = 64, seed: int = 0) -> None:
        self.k, self._seed = k, seed
        signs = np.unpackbits(np.frombuffer(self._random(0, k * _WIDTH), np.uint8))[: k * _WIDTH]
        matrix = make_tensor(signs, torch.float64).reshape(k, _WIDTH)
        self._last = (2 * matrix - 1) / math.sqrt(k)
        self._bits: dict[tuple[int, int, torch.device], torch.Tensor] = {}

    @property
    def relative_error(self) -> float:
        r"""Relative standard error of a distance: :math:`1 / \sqrt{2 k}`."""
        return 1 / math.sqrt(2 * self.k)

    @torch.no_grad()
    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Project parameters, in the same way on all ranks, to k float64 numbers on the host."""
        sums: dict[torch.device, torch.Tensor] = {}
        for number, flat in enumerate(_flatten(tensors)):
            bits = self._signs(number, flat)
            table = _sign_table(flat.dtype, flat.device)
            for start in range(0, flat.numel(), _PIECE):
                piece = flat[start : start + _PIECE]
                some = bits[start // 8 : start // 8 + -(-piece.numel() // 8)]
                signs = table.index_select(0, some.int()).view(-1)[: piece.numel()]
                total = sums.get(flat.device)
                part = _sum_modulo_width(piece * signs).double()
                sums[flat.device] = part if total is None else total.add_(part)
        y = sum((total.cpu() for total in sums.values()), zeros((_WIDTH,), torch.float64))
        return self._last @ y

    def _signs(self, number: int, flat: torch.Tensor) -> torch.Tensor:
        key = number, flat.numel(), flat.device
        if key not in self._bits:
            packed = np.frombuffer(self._random(1 + number, flat.numel()), np.uint8)
            self._bits[key] = make_tensor(packed, torch.uint8, flat.device)
        return self._bits[key]

    def _random(self, stream: int, count: int) -> bytes:
        """Generate ``count`` random bits, which are equal on every machine."""
        generator = np.random.Generator(np.random.Philox(key=[self._seed, stream]))
        return generator.bytes(-(-count // 8))


def distances(projections: Iterable[torch.Tensor]) -> list[float]:
    r"""Compute :math:`\lVert P(x_i) - \tfrac{1}{n} \sum_j P(x_j) \rVert_2`; 0 where all agree."""
    every = torch.stack(list(projections))
    every = every - every[0]  # so that equal ones are exactly at their mean
    found: list[float] = torch.linalg.vector_norm(every - every.mean(0), dim=1).tolist()
    return found


def _flatten(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flatten parameters to real tensors; join small ones of the same dtype and device."""
    for indices in partition(tensors, _GROUP):
        parts = [tensors[index].detach() for index in indices]
        parts = [torch.view_as_real(p) if p.is_complex() else p for p in parts]
        flats = [part.reshape(-1) for part in parts]
        flat = flats[0] if len(flats) == 1 else torch.cat(flats)
        yield flat if flat.dtype == torch.float64 else flat.float()


@functools.lru_cache(maxsize=16)
def _sign_table(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Build the table of the eight signs encoded by each byte."""
    bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
    return make_tensor(2 * bits - 1, dtype, device)


def _sum_modulo_width(piece: torch.Tensor) -> torch.Tensor:
    whole = piece.numel() - piece.numel() % _WIDTH
    total = piece[:whole].view(-1, _WIDTH).sum(0)
    total[: piece.numel() - whole] += piece[whole:]
    return total
