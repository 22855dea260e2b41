"""Mixing speed of a graph or schedule, from eigenvalues and singular values of its matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .errors import TopologyError
from .matrices import Array, Matrix, rounds_of
from .schedule import GraphOrSchedule

Function: TypeAlias = Callable[[Array], Array]

__all__ = ["consensus_rate", "min_eigenvalue", "spectral_gap"]

DENSE = 512  # ranks up to which dense matrices are decomposed
KRYLOV = 48  # vectors that the sparse routines keep
NOTHING = 1e-13  # a product this near to J is J, but for rounding


def _symbol(rounds: Sequence[Matrix]) -> npt.NDArray[np.complex128] | None:
    """Return the eigenvalues of the product if all matrices are circulant, else None."""
    symbols = [matrix.symbol for matrix in rounds if matrix.symbol is not None]
    return np.prod(symbols, axis=0) if len(symbols) == len(rounds) else None


def _deviation(rounds: Sequence[Matrix]) -> Array:
    """Compute the dense deviation: the product of the rounds, last one leftmost, minus J."""
    n = rounds[0].n
    product = reduce(lambda done, matrix: matrix @ done, rounds, np.eye(n))
    return product - 1.0 / n


def _operator(rounds: Sequence[Matrix]) -> tuple[Function, Function]:
    """Return functions that apply the deviation and its transpose to a vector."""

    def forward(x: Array) -> Array:
        """Apply all rounds minus J."""
        product: Array = reduce(lambda y, matrix: matrix @ y, rounds, x)
        product -= x.mean()
        return product

    def backward(x: Array) -> Array:
        """Apply all transposed rounds, last first, minus J."""
        product: Array = reduce(lambda y, matrix: matrix.transposed @ y, reversed(rounds), x)
        product -= x.mean()
        return product

    return forward, backward


def _sparse_tools(what: str, n: int) -> Any:
    """Import scipy.sparse.linalg, which large non-circulant graphs need."""
    try:
        import scipy.sparse.linalg
    except ImportError:
        raise ImportError(
            f"{what} of a graph on {n} ranks (more than {DENSE}, and not circulant) needs scipy's "
            "sparse routines; install them: pip install 'scipy>=1.10'"
        ) from None
    return scipy.sparse.linalg


def _extreme(tools: Any, solve: str, n: int, apply: Function, which: str) -> float:
    """Compute an extreme eigenvalue of a linear function by Lanczos' or Arnoldi's method."""
    start = np.random.default_rng(0).standard_normal(n)
    operator = tools.LinearOperator((n, n), matvec=apply, dtype=np.float64)
    values = getattr(tools, solve)(
        operator, 1, which=which, v0=start, ncv=min(KRYLOV, n), tol=1e-9, maxiter=300,
        return_eigenvectors=False,
    )  # fmt: skip
    return float(values[0].real if which in ("SA", "SR") else abs(values[0]))


def _nearest(tools: Any, matrix: Matrix, sigma: float, count: int) -> Array:
    """Compute the eigenvalues of a symmetric matrix nearest to ``sigma``, by factorisation.

    Ascending. Meant for graphs that mix too slowly for Lanczos' method: these factorise cheaply.
    """
    start = np.random.default_rng(0).standard_normal(matrix.n)
    values: Array = tools.eigsh(
        matrix.csr.tocsc(), count, sigma=sigma, v0=start, return_eigenvectors=False
    )
    return np.sort(values)


def _large(rounds: Sequence[Matrix], what: str, radius: bool) -> float:
    """Compute spectral radius or norm of the deviation with sparse products only."""
    n = rounds[0].n
    tools = _sparse_tools(what, n)
    forward, backward = _operator(rounds)
    probe = np.random.default_rng(1).standard_normal(n)
    if np.linalg.norm(forward(probe)) <= NOTHING * np.linalg.norm(probe) * n:
        return 0.0
    symmetric = len(rounds) == 1 and rounds[0].is_symmetric
    try:
        if symmetric:
            return _extreme(tools, "eigsh", n, forward, "LM")
        if radius:
            return _extreme(tools, "eigs", n, forward, "LM")
        return float(_extreme(tools, "eigsh", n, lambda x: backward(forward(x)), "LA") ** 0.5)
    except tools.ArpackNoConvergence:
        if symmetric:
            second = float(_nearest(tools, rounds[0], 1 + 1e-7, 2)[0])
            return max(second, -_lowest(rounds[0]))
        raise TopologyError(
            f"the {what} of this graph on {n} ranks was not found in reasonable time: it mixes too "
            "slowly; use fewer ranks or a faster graph such as exponential_two(n)"
        ) from None


def _contraction(graph_or_schedule: GraphOrSchedule, what: str, radius: bool) -> float:
    """Compute norm or spectral radius of the product minus J, as a mean factor per round."""
    rounds = rounds_of(graph_or_schedule)
    symbol = _symbol(rounds)
    if symbol is not None:
        whole = float(np.abs(symbol[1:]).max(initial=0.0))
    elif rounds[0].n > DENSE:
        whole = _large(rounds, what, radius)
    else:
        deviation = _deviation(rounds)
        if len(rounds) == 1 and rounds[0].is_symmetric:
            whole = float(np.abs(np.linalg.eigvalsh(deviation)).max())
        elif radius:
            whole = float(np.abs(np.linalg.eigvals(deviation)).max())
        else:
            whole = float(np.linalg.norm(deviation, 2))
    return 0.0 if whole <= NOTHING else float(whole ** (1 / len(rounds)))


def consensus_rate(graph_or_schedule: GraphOrSchedule) -> float:
    r"""Compute the factor by which the distance to the average shrinks per round: 0 exact, 1 never.

    .. math:: \rho = \|W - J\|_2, \quad
              \rho = \|W^{(T-1)} \cdots W^{(0)} - J\|_2^{1/T} \text{ for a schedule}

    over T rounds: one period, at most 64 rounds; the first 16 if it never repeats.

    Exact for circulant graphs of any size (by a Fourier transform) and for up to 512 ranks (dense);
    to about 1e-9 otherwise, by scipy's sparse routines.

    Args:
        graph_or_schedule: A graph or a schedule.

    Returns:
        The factor ρ; 0.0 if the product is J up to rounding.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph`, or a large one
            mixes too slowly to tell.
        ImportError: If a large graph needs scipy and it is missing.

    Example:
        >>> from asyncddp import topology
        >>> round(consensus_rate(topology.ring(16)), 6)
        0.949253
        >>> consensus_rate(topology.one_peer_exponential(16))
        0.0
    """
    return _contraction(graph_or_schedule, "consensus rate", radius=False)


def spectral_gap(graph_or_schedule: GraphOrSchedule) -> float:
    r"""Compute the spectral gap :math:`1 - |\lambda_2|`, which sets the asymptotic mixing speed.

    .. math:: 1 - |\lambda_2(W)|, \quad
              1 - |\lambda_2(W^{(T-1)} \cdots W^{(0)})|^{1/T} \text{ for a schedule}

    Equal to 1 - :func:`consensus_rate` for symmetric and circulant matrices; larger for others.

    Args:
        graph_or_schedule: A graph or a schedule.

    Returns:
        The gap, 0 (not connected) to 1 (exact).

    Raises:
        TopologyError: As for :func:`consensus_rate`.
        ImportError: As for :func:`consensus_rate`.

    Example:
        >>> from asyncddp import topology
        >>> round(spectral_gap(topology.hypercube(8)), 6)
        0.5
    """
    return 1.0 - _contraction(graph_or_schedule, "spectral gap", radius=True)


def _lowest(matrix: Matrix) -> float:
    """Compute the smallest real part of a matrix's eigenvalues."""
    symbol = matrix.symbol
    if symbol is not None:
        return float(symbol.real.min())
    if matrix.n > DENSE:
        return _lowest_large(matrix)
    if matrix.is_symmetric:
        return float(np.linalg.eigvalsh(matrix.dense())[0])
    return float(np.linalg.eigvals(matrix.dense()).real.min())


def _lowest_large(matrix: Matrix) -> float:
    """Compute the smallest real part of a large matrix's eigenvalues, by sparse products."""
    tools = _sparse_tools("smallest eigenvalue", matrix.n)
    solve, which = ("eigsh", "SA") if matrix.is_symmetric else ("eigs", "SR")
    try:
        return _extreme(tools, solve, matrix.n, lambda x: matrix @ x, which)
    except tools.ArpackNoConvergence:
        if matrix.is_symmetric:
            return float(_nearest(tools, matrix, matrix.lower_bound - 1e-7, 1)[0])
        raise TopologyError(
            f"the smallest eigenvalue of this graph on {matrix.n} ranks was not found in "
            "reasonable time; use fewer ranks"
        ) from None


def min_eigenvalue(graph_or_schedule: GraphOrSchedule) -> float:
    r"""Compute the smallest real part of the eigenvalues of W, over all rounds of a schedule.

    .. math:: \min_k \min_i \operatorname{Re} \lambda_i(W^{(k)})

    Some methods converge only where it is above a bound, such as -1/3. Rounds are those of
    :func:`consensus_rate`.

    Args:
        graph_or_schedule: A graph or a schedule.

    Returns:
        The smallest eigenvalue, from -1 to 1 if no weight is negative.

    Raises:
        TopologyError: As for :func:`consensus_rate`.
        ImportError: As for :func:`consensus_rate`.

    Example:
        >>> from asyncddp import topology
        >>> round(min_eigenvalue(topology.ring(4)), 6)
        -0.333333
    """
    return min(_lowest(matrix) for matrix in rounds_of(graph_or_schedule))
