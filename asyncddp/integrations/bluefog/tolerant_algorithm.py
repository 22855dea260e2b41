"""Variants of training algorithms that, as in BlueFog, warn of an unsuitable graph and run."""

from __future__ import annotations

import functools
import logging

from asyncddp.algorithms import ALGORITHMS, Algorithm
from topology import GraphOrSchedule, TopologyError

logger = logging.getLogger("asyncddp")


class _TolerantAlgorithm(Algorithm):
    """Base class of algorithm variants that warn of an unsuitable graph instead of raising."""

    def check(self, graph_or_schedule: GraphOrSchedule) -> None:
        """Warn of a graph that the theory of the method does not allow."""
        try:
            super().check(graph_or_schedule)
        except TopologyError as problem:
            logger.warning("%s. It runs all the same, as in BlueFog", problem)


@functools.cache
def tolerant_algorithm(name: str) -> type[Algorithm]:
    """Create the variant of a method that accepts any graph.

    Args:
        name: A name in ``asyncddp.algorithms.ALGORITHMS``.
    """
    method = ALGORITHMS[name]
    return type(method.__name__, (_TolerantAlgorithm, method), {"__doc__": method.__doc__})
