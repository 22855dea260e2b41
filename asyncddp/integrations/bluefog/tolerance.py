"""Methods that say what a graph does to them, where ours refuse it: BlueFog takes any."""

from __future__ import annotations

import functools
import logging

from asyncddp.algorithms import ALGORITHMS, Algorithm
from topology import GraphOrSchedule, TopologyError

__all__ = ["tolerant"]

logger = logging.getLogger("asyncddp")


class _Tolerant(Algorithm):
    """Warns where the method underneath refuses a graph."""

    def check(self, graph_or_schedule: GraphOrSchedule) -> None:
        """Warn of a graph that the theory of the method does not allow."""
        try:
            super().check(graph_or_schedule)
        except TopologyError as problem:
            logger.warning("%s. It runs all the same, as in BlueFog", problem)


@functools.cache
def tolerant(name: str) -> type[Algorithm]:
    """The method of that name, which takes any graph.

    Args:
        name: A name in ``asyncddp.algorithms.ALGORITHMS``.
    """
    method = ALGORITHMS[name]
    return type(method.__name__, (_Tolerant, method), {"__doc__": method.__doc__})
