"""Mixing speed of averaging in random pairs: the two constants of asynchronous gossip."""

from __future__ import annotations

import numpy as np

from .errors import TopologyError
from .matrices import rounds_of
from .schedule import GraphOrSchedule, describe

__all__ = ["pair_constants"]


def pair_constants(graph_or_schedule: GraphOrSchedule) -> tuple[float, float]:
    r"""Compute the mixing constants of averages in random pairs: χ₁ plain, χ₂ for momentum.

    .. math:: \Lambda = \sum_{(i,j)} \lambda_{ij} (e_i - e_j)(e_i - e_j)^T, \qquad
              \chi_1 = \frac{1}{\lambda_2(\Lambda)}, \qquad
              \chi_2 = \frac12 \max_{(i,j)} (e_i - e_j)^T \Lambda^+ (e_i - e_j)

    with :math:`\lambda_{ij}` the number of averages of the pair (i, j) per round. The mixing time
    of plain averages is proportional to :math:`\chi_1`, with continuous momentum to
    :math:`\sqrt{\chi_1 \chi_2}`, which is never longer.

    Args:
        graph_or_schedule: Rounds in which pairs average, such as those of
            :func:`.topology.matching_decomposition`; for a schedule that never repeats, the first
            rounds are used.

    Returns:
        :math:`\chi_1` and :math:`\chi_2`, in rounds; zeros for one rank.

    Raises:
        TopologyError: Its pairs do not connect all ranks.

    Example:
        >>> from asyncddp import topology
        >>> ring = topology.matching_decomposition(topology.ring(16))
        >>> print("{:.2f} {:.2f}".format(*pair_constants(ring)))
        13.14 0.94

    Reference:
        Nabli, Belilovsky, Oyallon, "A²CiD²: accelerating asynchronous communication in
        decentralized deep learning", NeurIPS 2023.
    """
    rounds = rounds_of(graph_or_schedule)
    n = rounds[0].n
    if n == 1:
        return 0.0, 0.0
    rates = np.zeros((n, n))
    for matrix in rounds:
        rates[matrix.rows, matrix.columns] += 1.0 / len(rounds)
    np.fill_diagonal(rates, 0.0)
    rates = (rates + rates.T) / 2
    laplacian = np.diag(rates.sum(axis=1)) - rates
    values, vectors = np.linalg.eigh(laplacian)
    if values[1] < 1e-12:
        raise TopologyError(
            f"pair_constants: the pairs of {describe(graph_or_schedule)} do not connect all {n} "
            f"ranks; use random_matching({n})"
        )
    inverse = (vectors[:, 1:] / values[1:]) @ vectors[:, 1:].T
    tails, heads = np.nonzero(rates)
    resistances = inverse[tails, tails] + inverse[heads, heads] - 2 * inverse[tails, heads]
    return round(1.0 / float(values[1]), 9), round(float(resistances.max()) / 2, 9)
