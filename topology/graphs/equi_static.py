"""EquiStatic graphs: the mean of a few random cyclic shifts; mixing does not slow down with n."""

from __future__ import annotations

import math
from collections import Counter

import networkx as nx
import numpy as np
import numpy.typing as npt

from ..checks import check_int
from ..errors import TopologyError
from ..weights import circulant

__all__ = ["equi_static"]

SEARCHED = 64  # seeds tried when none is given


def _draw(n: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Draw independent shifts, uniform in 1..n-1."""
    return np.random.default_rng(seed).integers(1, n, size=count)


def _rate(n: int, shifts: npt.NDArray[np.int64], directed: bool) -> float:
    """Compute ‖W - J‖₂ from the eigenvalues of W, which is circulant and thus normal."""
    symbol = np.fft.fft(np.bincount(shifts, minlength=n) / len(shifts))
    eigenvalues = 1 / n + (n - 1) / n * (symbol if directed else symbol.real)
    return float(np.abs(eigenvalues[1:]).max())


def _search(n: int, count: int, directed: bool) -> int:
    """Return the seed below :data:`SEARCHED` whose graph mixes fastest; the first of equals."""
    rates = [round(_rate(n, _draw(n, count, seed), directed), 12) for seed in range(SEARCHED)]
    return rates.index(min(rates))


def equi_static(
    n: int, degree: int, seed: int | None = None, directed: bool = True
) -> nx.DiGraph[int]:
    r"""Build an EquiStatic graph: the mean of M random shifts; mixing does not slow down with n.

    .. math:: W = \tfrac1M \sum_{m=1}^{M} A^{(u_m)}, \quad A^{(u)}_{ii} = \tfrac1n, \quad
              A^{(u)}_{i,\, i+u \bmod n} = \tfrac{n-1}{n}

    with :math:`u_m` uniform in 1..n-1 and M = degree; undirected, with
    :math:`(A + A^\top)/2` for A and M = degree / 2. Shifts may coincide, so that a rank can have
    fewer neighbours than ``degree``. A single seed is often no better than
    :func:`.topology.exponential_two`; with ``seed=None`` the best of 64 is taken.

    Args:
        n: Number of ranks.
        degree: Number of neighbours that a rank receives from, at most; even if undirected.
        seed: Seed of the shifts, the same on all ranks; None searches for the fastest graph.
        directed: Whether a rank sends to other ranks than it receives from.

    Returns:
        A doubly stochastic graph with self-loops, symmetric if undirected.

    Raises:
        TopologyError: If an argument is out of range, or the seed's graph is not connected.

    Example:
        >>> equi_static(64, 6).graph["name"]
        'equi_static(64, 6, seed=53)'

    Reference:
        Song et al., "Communication-efficient topologies for decentralized learning with O(1)
        consensus rate", NeurIPS 2022.
    """
    n = check_int(n, "n", "equi_static", 1)
    degree = check_int(degree, "degree", "equi_static", 1)
    if not directed and degree % 2:
        raise TopologyError(
            f"equi_static undirected uses each shift both ways and needs an even degree, got "
            f"degree={degree}; nearest: degree={degree + 1}, or directed=True"
        )
    count = degree if directed else degree // 2
    if seed is not None:
        seed = check_int(seed, "seed", "equi_static", 0)
    elif n > 1:
        seed = _search(n, count, directed)
    style = "" if directed else ", directed=False"
    name = f"equi_static({n}, {degree}, seed={seed}{style})"
    if n == 1:
        return circulant(name, n, {})
    shifts = _draw(n, count, seed or 0)
    if math.gcd(n, *shifts.tolist()) > 1:
        better = _search(n, count, directed)
        raise TopologyError(
            f"{name} is not connected: its shifts {sorted(shifts.tolist())} and n have a common "
            f"divisor; use seed={better}, or seed=None to search"
        )
    both = shifts.tolist() if directed else [*shifts.tolist(), *(-shifts).tolist()]
    times = Counter(-shift % n for shift in both)
    share = (n - 1) / n / len(both)
    return circulant(name, n, {distance: m * share for distance, m in times.items()})
