"""Tests of mixing matrices: row, column and doubly stochastic, symmetric."""

from __future__ import annotations

from .matrices import rounds_of
from .schedule import GraphOrSchedule

__all__ = ["is_column_stochastic", "is_doubly_stochastic", "is_row_stochastic", "is_symmetric"]


def is_row_stochastic(graph_or_schedule: GraphOrSchedule) -> bool:
    r"""Return whether the weights that each rank receives sum to one, so that consensus is kept.

    .. math:: W \mathbf 1 = \mathbf 1

    Negative weights are allowed, since some schedules (:func:`.topology.matcha`) use them. All
    rounds of a schedule are tested: one period, at most 64 rounds, or 16 if it never repeats.

    Args:
        graph_or_schedule: A graph or a schedule.

    Returns:
        True if all row sums are within 1e-9 of one.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph`.

    Example:
        >>> from asyncddp import topology
        >>> is_row_stochastic(topology.push_weights(topology.star(4)))
        False
    """
    return all(matrix.sums_to_one(axis=1) for matrix in rounds_of(graph_or_schedule))


def is_column_stochastic(graph_or_schedule: GraphOrSchedule) -> bool:
    r"""Return whether the weights that each rank gives sum to one, so that the sum is kept.

    .. math:: \mathbf 1^\top W = \mathbf 1^\top

    Rounds and signs are treated as by :func:`is_row_stochastic`.

    Args:
        graph_or_schedule: A graph or a schedule.

    Returns:
        True if all column sums are within 1e-9 of one.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph`.

    Example:
        >>> from asyncddp import topology
        >>> is_column_stochastic(topology.push_weights(topology.star(4)))
        True
    """
    return all(matrix.sums_to_one(axis=0) for matrix in rounds_of(graph_or_schedule))


def is_doubly_stochastic(graph_or_schedule: GraphOrSchedule) -> bool:
    """Return whether rows and columns sum to one, so that ranks agree on the initial average.

    Rounds and signs are treated as by :func:`is_row_stochastic`.

    Args:
        graph_or_schedule: A graph or a schedule.

    Returns:
        True if all row and column sums are within 1e-9 of one.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph`.

    Example:
        >>> from asyncddp import topology
        >>> is_doubly_stochastic(topology.star(4))
        True
    """
    return is_row_stochastic(graph_or_schedule) and is_column_stochastic(graph_or_schedule)


def is_symmetric(graph_or_schedule: GraphOrSchedule) -> bool:
    """Return whether ranks give each other equal weights, to 1e-9.

    Rounds are treated as by :func:`is_row_stochastic`.

    Args:
        graph_or_schedule: A graph or a schedule.

    Returns:
        True if W equals its transpose in every round.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph`.

    Example:
        >>> from asyncddp import topology
        >>> is_symmetric(topology.ring(8)), is_symmetric(topology.exponential_two(8))
        (True, False)
    """
    return all(matrix.is_symmetric for matrix in rounds_of(graph_or_schedule))
