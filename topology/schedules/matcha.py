"""MATCHA schedule: random matchings of a graph, important links with higher probability."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import networkx as nx
import numpy as np
import numpy.typing as npt

from ..checks import check_digraph, check_graph, check_int, graph_name
from ..errors import TopologyError
from ..neighbors import Neighbors
from ..schedule import Schedule, alone
from ..schedules._edge_coloring import matchings_of

__all__ = ["matcha"]

Vector = npt.NDArray[np.float64]
LIMIT = 1024  # ranks; the design decomposes dense n x n matrices some hundred times


class _Links:
    """Matchings of a graph as arrays: edge ``tail[e]``-``head[e]`` is in matching ``group[e]``."""

    def __init__(self, n: int, matchings: list[list[tuple[int, int]]]) -> None:
        self.n, self.count = n, len(matchings)
        self.tail, self.head = np.array([edge for group in matchings for edge in group]).T
        self.group = np.repeat(np.arange(self.count), [len(group) for group in matchings])

    def laplacian(self, scale: Vector) -> Vector:
        """Compute the sum over all matchings j of ``scale[j]`` times the Laplacian of j."""
        matrix = np.zeros((self.n, self.n))
        weight = scale[self.group]
        matrix[self.tail, self.head] = matrix[self.head, self.tail] = -weight
        matrix[np.diag_indices(self.n)] = -matrix.sum(axis=1)
        return matrix

    def slowest(self, scale: Vector, softness: float) -> tuple[float, Vector, float]:
        """Compute the soft minimum of all eigenvalues except the first, its gradient, and λ₂."""
        values, vectors = np.linalg.eigh(self.laplacian(scale))
        values, vectors = values[1:], vectors[:, 1:]
        share = np.exp((values[0] - values) / softness)
        total = share.sum()
        squares = (vectors[self.tail] - vectors[self.head]) ** 2 @ (share / total)
        gradient = np.bincount(self.group, squares, minlength=self.count).astype(np.float64)
        return float(values[0] - softness * np.log(total)), gradient, float(values[0])


def _project(point: Vector, total: float) -> Vector:
    """Project a point to the nearest one with entries in [0, 1] that sum to ``total``."""
    low, high = point.min() - 1.0, point.max()
    for _ in range(60):
        middle = (low + high) / 2
        if np.clip(point - middle, 0.0, 1.0).sum() > total:
            low = middle
        else:
            high = middle
    nearest: Vector = np.clip(point - high, 0.0, 1.0)
    return nearest


def _probabilities(links: _Links, budget: float) -> Vector:
    """Optimise the probabilities of the matchings: maximise λ₂ of the mean Laplacian.

    By gradient ascent on a soft minimum of the eigenvalues, which is smooth where they coincide, so
    that machines with different linear algebra libraries find the same numbers.
    """
    total = budget * links.count
    point = best = np.full(links.count, budget)
    start = highest = links.slowest(point, 1.0)[2]
    for softness in (0.1 * start, 0.01 * start):
        value, gradient, _ = links.slowest(point, softness)
        step = 1.0
        for _ in range(60):
            trial = _project(point + step * gradient, total)
            new, slope, lowest = links.slowest(trial, softness)
            if new <= value:
                step /= 4
                if step < 1e-9:
                    break
                continue
            if lowest > highest * (1 + 1e-9):
                best, highest = trial, lowest
            gain = new - value
            point, value, gradient, step = trial, new, slope, 2 * step
            if gain < 1e-6 * start:
                break
    return best


def _smallest(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimise a convex function by golden-section search."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    for _ in range(48):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _design(links: _Links, budget: float) -> tuple[Vector, float, float]:
    """Compute probabilities, step size alpha, and contraction of the mean squared distance."""
    chance = np.ones(links.count) if budget == 1 else _probabilities(links, budget)
    mean = links.laplacian(chance)
    second = mean @ mean + 2 * links.laplacian(chance * (1 - chance))
    rest = np.eye(links.n) - 1 / links.n

    def factor(alpha: float) -> float:
        """Compute the expected contraction for a step size."""
        matrix = rest - 2 * alpha * mean + alpha**2 * second
        return float(np.linalg.eigvalsh(matrix)[-1])

    alpha = _smallest(factor, 0.0, 2.0 / float(np.linalg.eigvalsh(mean)[-1]))
    return chance.round(6), round(alpha, 6), factor(alpha)


@lru_cache(maxsize=64)
def _active(seed: int, k: int, chance: tuple[float, ...]) -> tuple[int, ...]:
    """Draw the active matchings of a round; cached, since all ranks of a process use the same."""
    drawn = np.random.default_rng((seed, k)).random(len(chance)) < chance
    return tuple(np.flatnonzero(drawn).tolist())


def _look_up(
    partners: tuple[dict[int, int], ...],
    chance: tuple[float, ...],
    alpha: float,
    seed: int,
    rank: int,
    k: int,
) -> Neighbors:
    """Return a rank's neighbours: its partners in the matchings that are active in round k."""
    mine = partners[rank]
    peers = tuple(sorted(mine[j] for j in _active(seed, k, chance) if j in mine))
    return Neighbors(1.0 - len(peers) * alpha, dict.fromkeys(peers, alpha), peers)


def _check(graph: Any, budget: float) -> nx.DiGraph[int]:
    """Check graph (connected, undirected, not too large) and budget; return the bare graph."""
    if isinstance(graph, nx.Graph) and not isinstance(graph, nx.DiGraph):
        graph = graph.to_directed()
    digraph = check_digraph(graph)
    bare: nx.DiGraph[int] = nx.DiGraph(name=graph_name(digraph))
    bare.add_nodes_from(range(digraph.number_of_nodes()))
    bare.add_edges_from(digraph.edges())
    check_graph(bare, connected=True)
    one_way = next(((i, j) for i, j in bare.edges() if not bare.has_edge(j, i)), None)
    if one_way:
        raise TopologyError(
            f"matcha needs a graph with both directions of every edge, but {graph_name(bare)} has "
            f"{one_way[0]} -> {one_way[1]} only; use graph.to_undirected(), or one_peer_of(graph)"
        )
    if bare.number_of_nodes() > LIMIT:
        raise TopologyError(
            f"matcha decomposes dense matrices and takes up to n={LIMIT} ranks, got "
            f"n={bare.number_of_nodes()}; use equi_dynamic(n, seed)"
        )
    if not 0 < budget <= 1:
        raise TopologyError(
            f"matcha needs a budget in (0, 1], the part of all matchings that is used on average, "
            f"got budget={budget!r}; budget=0.5 halves the communication"
        )
    return bare


def matcha(graph: nx.DiGraph[int], budget: float, seed: int) -> Schedule:
    r"""Build a MATCHA schedule: random matchings of a graph, important links more often.

    .. math:: W^{(k)} = I - \alpha \sum_j B_j^{(k)} L_j, \quad
              p = \operatorname{arg\,max}_{\sum_j p_j \le C_b M} \lambda_2 \Big(\sum_j p_j L_j\Big)

    with :math:`L_j` the Laplacians of M matchings that make up the graph, :math:`B_j^{(k)}`
    Bernoulli variables with probabilities :math:`p_j` from the shared seed, :math:`C_b` the budget
    and :math:`\alpha` the step size that minimises the expected squared distance to the average.
    A rank's own weight is negative if alpha times its number of neighbours exceeds one.

    Args:
        graph: Connected undirected graph on the ranks 0..n-1, n at most 1024; an ``nx.Graph`` or
            an ``nx.DiGraph`` with both directions; its weights and self-loops are ignored.
        budget: Fraction of the matchings used per round on average, in (0, 1].
        seed: Seed of the variables, the same on all ranks.

    Returns:
        A schedule that never repeats; every round is symmetric, rows and columns sum to one.

    Raises:
        TopologyError: If the graph is directed, not connected or too large, or the budget or the
            seed is out of range.

    Example:
        >>> from asyncddp import topology
        >>> schedule = matcha(topology.ring(8), budget=0.5, seed=0)
        >>> [schedule.neighbors(rank=0, k=k).dst_ranks for k in range(5)]
        [(7,), (), (1, 7), (), (7,)]

    Reference:
        Wang et al., "MATCHA: speeding up decentralized SGD via matching decomposition sampling",
        2019.
    """
    seed = check_int(seed, "seed", "matcha", 0)
    graph = _check(graph, budget)
    n = graph.number_of_nodes()
    name = f"matcha({graph_name(graph)}, {budget:g}, seed={seed})"
    if n == 1:
        return alone(name)
    matchings = matchings_of(n, ((i, j) for i, j in graph.edges() if i < j))
    chance, alpha, _ = _design(_Links(n, matchings), budget)
    partners: tuple[dict[int, int], ...] = tuple({} for _ in range(n))
    for colour, matching in enumerate(matchings):
        for i, j in matching:
            partners[i][colour], partners[j][colour] = j, i
    return Schedule(name, n, None, partial(_look_up, partners, tuple(chance.tolist()), alpha, seed))
