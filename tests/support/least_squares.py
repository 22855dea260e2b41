"""LS(n): least squares of which every rank has other data, and whose optimum is known."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch


class LeastSquares:
    """The problem of n ranks, f_i(x) = |A_i x - b_i|² / 100.

    Attributes:
        optimum: Where the mean of all f_i is least.
    """

    def __init__(self, n: int) -> None:
        self.a, self.b, self.optimum = _data(n)
        self._hessians = np.einsum("nij,nik->njk", self.a, self.a) / 50
        self._slopes = np.einsum("nij,ni->nj", self.a, self.b) / 50

    def gradients(self, x: np.ndarray) -> np.ndarray:
        """All ranks' gradients, each at its row of x."""
        return np.einsum("njk,nk->nj", self._hessians, x) - self._slopes

    def gradient(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """H and c of a rank, whose gradient is H x - c."""
        return torch.from_numpy(self._hessians[rank]), torch.from_numpy(self._slopes[rank])

    def loss(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """f_i(x)."""
        a, b = (torch.from_numpy(one[rank]).to(x.dtype) for one in (self.a, self.b))
        return (a @ x - b).square().sum() / 100

    def error(self, x: np.ndarray) -> float:
        """|X - 1 x*ᵀ| / (√n |x*|), of a row for each rank."""
        off = np.linalg.norm(x - self.optimum)
        return float(off / (len(x) ** 0.5 * np.linalg.norm(self.optimum)))


@cache
def _data(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    center = random.standard_normal(10)
    a = random.standard_normal((n, 50, 10))
    own = center + random.standard_normal((n, 10))
    b = np.stack([a[i] @ own[i] for i in range(n)]) + 0.1 * random.standard_normal((n, 50))
    optimum = np.linalg.solve(
        sum(x.T @ x for x in a), sum(x.T @ y for x, y in zip(a, b, strict=True))
    )
    return a, b, optimum
