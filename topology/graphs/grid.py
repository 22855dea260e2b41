"""Two-dimensional grid and torus."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import networkx as nx

from ..checks import check_int
from ..errors import TopologyError
from ..weights import undirected

__all__ = ["grid_2d", "torus_2d"]


def _shape(n: int, shape: Any, family: str) -> tuple[int, int]:
    """Check the given rows and columns, or choose the squarest."""
    rows = max(a for a in range(1, math.isqrt(n) + 1) if n % a == 0)
    squarest = (rows, n // rows)
    if shape is None:
        return squarest
    try:
        height, width = (check_int(side, "shape", family, 1) for side in shape)
    except (TypeError, ValueError):
        height = width = 0
    if height * width != n:
        raise TopologyError(
            f"{family} needs shape=(rows, columns) with rows * columns = n = {n}, got "
            f"shape={shape!r}; nearest: shape={squarest}, or leave it out"
        )
    return height, width


def _edges(rows: int, columns: int, wrap: bool) -> Iterator[tuple[int, int]]:
    """Yield the edges to the right and downwards, row by row."""
    for i in range(rows):
        for j in range(columns):
            if wrap or j + 1 < columns:
                yield i * columns + j, i * columns + (j + 1) % columns
            if wrap or i + 1 < rows:
                yield i * columns + j, (i + 1) % rows * columns + j


def grid_2d(n: int, shape: tuple[int, int] | None = None) -> nx.DiGraph[int]:
    r"""Build the 2D grid: ranks exchange with the ranks above, below, left and right.

    .. math:: w_{ij} = 1 / (1 + \max(d_i, d_j)), \quad w_{ii} = 1 - \sum_j w_{ij}

    Metropolis–Hastings weights, :math:`d_i` being the number of neighbours of i (2, 3 or 4).

    Args:
        n: Number of ranks.
        shape: (rows, columns); the squarest that fit if None (a line for a prime n).

    Returns:
        A symmetric doubly stochastic graph with self-loops.

    Raises:
        TopologyError: If ``n < 1`` or the shape does not have n places.

    Example:
        >>> sorted(grid_2d(6).successors(1))
        [0, 1, 2, 4]
    """
    n = check_int(n, "n", "grid_2d", 1)
    rows, columns = _shape(n, shape, "grid_2d")
    name = f"grid_2d({n})" if shape is None else f"grid_2d({n}, {(rows, columns)})"
    return undirected(name, n, _edges(rows, columns, wrap=False))


def torus_2d(n: int, shape: tuple[int, int] | None = None) -> nx.DiGraph[int]:
    """Build the 2D torus: a grid whose first and last rows, and columns, are neighbours.

    Weights are those of :func:`grid_2d`; all are 1/5 where both sides are longer than two.

    Args:
        n: Number of ranks.
        shape: (rows, columns); the squarest that fit if None (a ring for a prime n).

    Returns:
        A symmetric doubly stochastic graph with self-loops.

    Raises:
        TopologyError: If ``n < 1`` or the shape does not have n places.

    Example:
        >>> sorted(torus_2d(9).successors(0))
        [0, 1, 2, 3, 6]
    """
    n = check_int(n, "n", "torus_2d", 1)
    rows, columns = _shape(n, shape, "torus_2d")
    name = f"torus_2d({n})" if shape is None else f"torus_2d({n}, {(rows, columns)})"
    return undirected(name, n, _edges(rows, columns, wrap=True))
