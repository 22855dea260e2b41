"""Mixing matrix W of a graph, or of one round of a schedule, dense or sparse."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import numpy.typing as npt

from .checks import check_graph, check_int, is_weighted
from .neighbors import Neighbors, in_view
from .schedule import GraphOrSchedule, Schedule

if TYPE_CHECKING:
    import networkx as nx
    import scipy.sparse as sp

__all__ = [
    "Matrix",
    "matrix_of",
    "mixing_matrix",
    "rounds_of",
]

Array = npt.NDArray[np.float64]
CHUNK = 1 << 22  # products held at a time where scipy is missing, in numbers
PERIOD_LIMIT = 64  # rounds looked at, at most, of a schedule that repeats
SAMPLE = 16  # rounds looked at of a schedule that never repeats


@dataclass(frozen=True)
class Matrix:
    """Sparse mixing matrix: entries sorted by row; each row has at least its diagonal entry."""

    n: int
    rows: npt.NDArray[np.intp]
    columns: npt.NDArray[np.intp]
    values: Array

    @cached_property
    def csr(self) -> Any:
        """The matrix as a scipy ``csr_array``; None if scipy is missing."""
        try:
            from scipy.sparse import csr_array
        except ImportError:
            return None
        return csr_array((self.values, (self.rows, self.columns)), shape=(self.n, self.n))

    @cached_property
    def transposed(self) -> Matrix:
        """The transpose of the matrix."""
        order = np.argsort(self.columns, kind="stable")
        return Matrix(self.n, self.columns[order], self.rows[order], self.values[order])

    def __matmul__(self, x: Array) -> Array:
        """Multiply by a vector (n,) or by columns (n, d)."""
        if self.csr is not None:
            product: Array = self.csr @ x
            return product
        x = np.asarray(x, dtype=np.float64)
        flat = x.reshape(self.n, -1)
        starts = np.searchsorted(self.rows, np.arange(self.n))
        width = max(1, CHUNK // len(self.values))
        parts = [
            np.add.reduceat(self.values[:, None] * part[self.columns], starts, axis=0)
            for part in np.split(flat, range(width, flat.shape[1], width), axis=1)
        ]
        return np.concatenate(parts, axis=1).reshape(x.shape)

    def dense(self) -> Array:
        """Return the dense matrix, ``(n, n)``."""
        matrix = np.zeros((self.n, self.n))
        matrix[self.rows, self.columns] = self.values
        return matrix

    @cached_property
    def symbol(self) -> npt.NDArray[np.complex128] | None:
        """Eigenvalues in order of frequency if the matrix is circulant; else None."""
        degree, rest = divmod(len(self.values), self.n)
        if rest:
            return None
        distance = (self.rows - self.columns) % self.n
        order = np.lexsort((distance, self.rows))
        distances = distance[order].reshape(self.n, degree)
        values = self.values[order].reshape(self.n, degree)
        if (distances != distances[0]).any() or (values != values[0]).any():
            return None
        column = np.zeros(self.n)
        column[distances[0]] = values[0]
        return np.fft.fft(column)

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of the real eigenvalues, by Gershgorin's theorem."""
        diagonal = self.values[self.rows == self.columns]
        around = np.bincount(self.rows, np.abs(self.values), self.n) - np.abs(diagonal)
        return float((diagonal - around).min())

    @cached_property
    def is_symmetric(self) -> bool:
        """True if W equals its transpose, to 1e-9."""
        keys = np.concatenate(
            [self.rows * self.n + self.columns, self.columns * self.n + self.rows]
        )
        _, place = np.unique(keys, return_inverse=True)
        difference = np.bincount(place, np.concatenate([self.values, -self.values]))
        return bool(np.abs(difference).max() <= 1e-9)

    def sums_to_one(self, axis: Literal[0, 1]) -> bool:
        """Return whether all columns (axis 0) or all rows (axis 1) sum to one, to 1e-9."""
        sums = np.bincount(self.columns if axis == 0 else self.rows, self.values, self.n)
        return bool(np.abs(sums - 1.0).max() <= 1e-9)


def _assemble(n: int, views: list[Neighbors]) -> Matrix:
    """Build the matrix whose row i has the weights of rank i."""
    lengths = [len(view.src_weights) + 1 for view in views]
    columns: list[int] = []
    values: list[float] = []
    for rank, view in enumerate(views):
        columns.append(rank)
        values.append(view.self_weight)
        columns.extend(view.src_weights)
        values.extend(view.src_weights.values())
    rows = np.repeat(np.arange(n, dtype=np.intp), lengths)
    return Matrix(n, rows, np.array(columns, dtype=np.intp), np.array(values))


@lru_cache(maxsize=PERIOD_LIMIT)
def _of_round(schedule: Schedule, k: int) -> Matrix:
    """Build the matrix of one round of a schedule, cached."""
    return _assemble(schedule.n, [schedule.neighbors(rank, k) for rank in range(schedule.n)])


def _of_graph(graph: nx.DiGraph[int]) -> Matrix:
    """Build the matrix of a static graph."""
    check_graph(graph)
    weighted = is_weighted(graph)
    n = graph.number_of_nodes()
    return _assemble(n, [in_view(graph, rank, weighted) for rank in range(n)])


def matrix_of(graph_or_schedule: GraphOrSchedule, k: int = 0) -> Matrix:
    """Return the sparse mixing matrix of a graph, or of round k of a schedule."""
    if isinstance(graph_or_schedule, Schedule):
        k = check_int(k, "k", graph_or_schedule.name, 0)
        period = graph_or_schedule.period
        return _of_round(graph_or_schedule, k % period if period else k)
    return _of_graph(graph_or_schedule)


def rounds_of(graph_or_schedule: GraphOrSchedule) -> list[Matrix]:
    """Return the matrices of one period of a schedule, limited to a practical number of rounds.

    A period of more than 64 rounds gives the first 64, a schedule that never repeats the first 16.
    """
    if not isinstance(graph_or_schedule, Schedule):
        return [matrix_of(graph_or_schedule)]
    period = graph_or_schedule.period
    count = SAMPLE if period is None else min(period, PERIOD_LIMIT)
    return [matrix_of(graph_or_schedule, k) for k in range(count)]


@overload
def mixing_matrix(
    graph_or_schedule: GraphOrSchedule, k: int = 0, *, sparse: Literal[False] = False
) -> Array: ...
@overload
def mixing_matrix(
    graph_or_schedule: GraphOrSchedule, k: int = 0, *, sparse: Literal[True]
) -> sp.csr_array: ...
def mixing_matrix(
    graph_or_schedule: GraphOrSchedule, k: int = 0, *, sparse: bool = False
) -> Array | sp.csr_array:
    """Return the mixing matrix W: row i has the weights that rank i gives to all ranks' values.

    Args:
        graph_or_schedule: A graph (without weights: uniform ones are used) or a schedule.
        k: The round of a schedule, from 0.
        sparse: Whether to return a ``scipy.sparse.csr_array`` instead of all n² numbers.

    Returns:
        W, float64, ``(n, n)``; ``W[i, j] == graph[j][i]["weight"]``.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph`.
        ImportError: If ``sparse`` is asked for and scipy is missing.

    Example:
        >>> from asyncddp import topology
        >>> mixing_matrix(topology.ring(3, style="right"))
        array([[0.5, 0. , 0.5],
               [0.5, 0.5, 0. ],
               [0. , 0.5, 0.5]])
    """
    matrix = matrix_of(graph_or_schedule, k)
    if not sparse:
        return matrix.dense()
    if matrix.csr is None:
        raise ImportError(
            "mixing_matrix(…, sparse=True) needs scipy; install it: pip install 'scipy>=1.10'"
        )
    csr: sp.csr_array = matrix.csr.copy()
    return csr
