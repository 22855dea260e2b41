"""Consensus error after rounds of mixing, and the number of rounds until the average is exact."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np
import numpy.typing as npt

from .checks import check_digraph, check_int
from .errors import TopologyError
from .matrices import Array, Matrix, matrix_of
from .schedule import GraphOrSchedule, Schedule, describe

__all__ = ["consensus_error", "finite_time_length"]

BLOCK = 1 << 20  # numbers of the identity that are mixed at a time, 8 MB
EXACT = 1e-11  # a relative error up to here is rounding …
CLOSE = 1e-6  # … unless the error before the last round was already this small


def _matrices(graph_or_schedule: GraphOrSchedule) -> Iterator[Matrix]:
    """Yield the mixing matrices of rounds 0, 1, 2, … endlessly."""
    if not isinstance(graph_or_schedule, Schedule):
        matrix = matrix_of(graph_or_schedule)
        while True:
            yield matrix
    k = 0
    while True:
        yield matrix_of(graph_or_schedule, k)
        k += 1


def _size(graph_or_schedule: GraphOrSchedule) -> int:
    """Return the number of ranks."""
    if isinstance(graph_or_schedule, Schedule):
        return graph_or_schedule.n
    return check_digraph(graph_or_schedule).number_of_nodes()


def consensus_error(
    graph_or_schedule: GraphOrSchedule, steps: int, x0: npt.ArrayLike | None = None
) -> Array:
    r"""Simulate mixing, and return the relative squared distance to the average after each round.

    .. math:: e_k = \frac{\|X_k - \mathbf 1 \bar x_0^\top\|_F^2}
                         {\|X_0 - \mathbf 1 \bar x_0^\top\|_F^2}, \quad X_{k+1} = W^{(k)} X_k

    Products are sparse: memory grows with edges and with the size of x0.

    Args:
        graph_or_schedule: A graph or a schedule.
        steps: Number of rounds.
        x0: What the ranks start with, ``(n,)`` or ``(n, d)``; 16 standard normal columns of a
            fixed seed if None.

    Returns:
        ``(steps + 1,)``, float64; the first is 1. It tends to a positive number where columns do
        not sum to one, since the ranks then agree on something else than the average.

    Raises:
        TopologyError: If ``steps`` is negative, or x0 has another number of rows than ranks, is
            not finite, or starts in consensus.

    Example:
        >>> from asyncddp import topology
        >>> consensus_error(topology.one_peer_exponential(4), 2, x0=[0.0, 1.0, 2.0, 3.0])
        array([1. , 0.4, 0. ])

    Reference:
        Ying et al., "Exponential graph is provably efficient for decentralized deep training",
        NeurIPS 2021, figure 1.
    """
    name, n = describe(graph_or_schedule), _size(graph_or_schedule)
    steps = check_int(steps, "steps", "consensus_error", 0)
    if x0 is None:
        x0 = np.random.default_rng(0).standard_normal((n, 16))
    x = np.asarray(x0, dtype=np.float64)
    if x.ndim not in (1, 2) or len(x) != n:
        raise TopologyError(
            f"consensus_error needs x0 of shape ({n},) or ({n}, d) for {name}, got {x.shape}"
        )
    if not np.isfinite(x).all():
        raise TopologyError("consensus_error needs finite numbers in x0, got inf or nan")
    mean = x.mean(axis=0)
    start = float(np.sum((x - mean) ** 2))
    if start == 0.0:
        if n == 1:
            return np.array([1.0] + [0.0] * steps)
        raise TopologyError(
            "consensus_error needs an x0 in which ranks differ, got the same on all; leave it out "
            "for a random one"
        )
    errors = [1.0]
    for matrix in islice(_matrices(graph_or_schedule), steps):
        x = matrix @ x
        errors.append(float(np.sum((x - mean) ** 2)) / start)
    return np.array(errors)


def _first_exact(graph_or_schedule: GraphOrSchedule, n: int, rounds: int) -> int | None:
    """Return the number of rounds until random values abruptly equal their average, or None."""
    x = np.random.default_rng(0).standard_normal((n, 4))
    mean = x.mean(axis=0)
    x -= mean
    scale = np.abs(x).max()
    for k, matrix in enumerate(islice(_matrices(graph_or_schedule), rounds), start=1):
        x = matrix @ x
        error = np.abs(x).max() / scale
        if error <= EXACT:
            return k
        if error <= CLOSE:
            return None
    return None


def finite_time_length(
    graph_or_schedule: GraphOrSchedule, max_rounds: int | None = None
) -> int | None:
    r"""Return the number of rounds until all ranks hold the exact average; None if never.

    .. math:: \min \{ L : W^{(L-1)} \cdots W^{(0)} = J \}

    Candidates are found with random vectors and confirmed on all columns of the identity, a few
    at a time: memory is some tens of megabytes for n = 10,000, and time grows with n times the
    edges of L rounds (a few seconds for n = 10,000 with scipy and one peer per round, a minute
    without). Exact means equal to J up to rounding, reached abruptly in one round: convergence,
    however fast, gives None.

    Args:
        graph_or_schedule: A graph or a schedule.
        max_rounds: Maximum number of rounds to try; if None, four periods or 4 log2(n) + 4,
            whichever is more, but at most 1,000.

    Returns:
        The number of rounds, 0 for one rank.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph`, or ``max_rounds``
            is below one.

    Example:
        >>> from asyncddp import topology
        >>> finite_time_length(topology.base_k(12, 1)), finite_time_length(topology.ring(12))
        (5, None)
    """
    n = _size(graph_or_schedule)
    if max_rounds is None:
        period = 1
        if isinstance(graph_or_schedule, Schedule):
            period = graph_or_schedule.period or 1
        max_rounds = min(1000, max(4 * period, 4 * n.bit_length() + 4))
    rounds = check_int(max_rounds, "max_rounds", "finite_time_length", 1)
    if n == 1:
        return 0
    length = _first_exact(graph_or_schedule, n, rounds)
    if length is None:
        return None
    matrices = list(islice(_matrices(graph_or_schedule), length))
    width = max(1, BLOCK // n)
    for first in range(0, n, width):
        block = np.eye(n, min(width, n - first), -first)
        for matrix in matrices:
            block = matrix @ block
        if np.abs(block - 1.0 / n).max() * n > EXACT:
            return None
    return length
