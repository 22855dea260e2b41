"""Which sums of a mixing matrix are one, and whether it is symmetric."""

from __future__ import annotations

from .matrices import rounds_of
from .schedule import GraphOrSchedule

__all__ = ["is_column_stochastic", "is_doubly_stochastic", "is_row_stochastic", "is_symmetric"]


def is_row_stochastic(graph_or_schedule: GraphOrSchedule) -> bool:
    r"""Whether what each rank receives sums to one: a consensus stays one.

    .. math:: W \mathbf 1 = \mathbf 1

    Sums count, not signs: some methods (:func:`.topology.matcha`) use negative own weights. Of a
    schedule every round must do: one period, at most 64 rounds, or the first 16 if none repeats.

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
    r"""Whether what each rank gives sums to one: the sum over ranks is kept.

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
    """Whether rows and columns sum to one: ranks agree on the average of what they had.

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
    """Whether ranks give each other equal weights, to 1e-9.

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
