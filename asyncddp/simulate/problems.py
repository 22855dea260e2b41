"""Problems with known answers, and a small one on real data, for comparing methods."""

from __future__ import annotations

import numpy as np
import torch

from asyncddp.simulate.problem import Problem
from asyncddp.tensors.allocation import make_tensor


def least_squares(ranks: int, *, seed: int = 0) -> Problem:
    r"""Make the least squares problem LS(n), of which every rank has other data.

    .. math:: f_i(x) = \frac{1}{2 \cdot 50} \lVert A_i x - b_i \rVert^2, \qquad
              b_i = A_i (x_s + \xi_i) + 0.1\, \epsilon_i

    with :math:`x \in \mathbb R^{10}`, 50 rows a rank, and all else drawn from the standard normal
    distribution. The optimum is known, all is in float64, and batches are whole.

    Args:
        ranks: Number of ranks, n.
        seed: Of the numbers.

    Returns:
        The problem, which starts at 0.

    Example:
        >>> from asyncddp import simulate
        >>> problem = simulate.least_squares(8)
        >>> print(f"{problem.optimum.norm():.10f}")
        3.4515184231
    """
    random = np.random.default_rng(seed)
    center = random.standard_normal(10)
    rows = random.standard_normal((ranks, 50, 10))
    own = center + random.standard_normal((ranks, 10))
    targets = np.einsum("nij,nj->ni", rows, own) + 0.1 * random.standard_normal((ranks, 50))
    normal = np.einsum("nij,nik->jk", rows, rows), np.einsum("nij,ni->j", rows, targets)
    model = torch.nn.Linear(10, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    a, b = make_tensor(rows, torch.float64), make_tensor(targets, torch.float64)
    return Problem(
        model,
        _half_mean_square,
        list(zip(a, b, strict=True)),
        optimum=make_tensor(np.linalg.solve(*normal), torch.float64),
        name=f"least squares, {ranks} ranks",
    )


def _half_mean_square(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - targets).square().mean() / 2
