"""The default graph, made at once and without networkx, as every start of a program needs it."""

from __future__ import annotations

from functools import lru_cache, partial

from .neighbors import Neighbors
from .schedule import Schedule

__all__ = ["default_schedule"]


def _look_up(n: int, rank: int, k: int) -> Neighbors:
    """Receive from 1, 2, 4, … behind, and send as far ahead."""
    del k
    distances = [2**t for t in range((n - 1).bit_length())]
    share = 1.0 / (len(distances) + 1)
    sources = sorted((rank - distance) % n for distance in distances)
    targets = sorted((rank + distance) % n for distance in distances)
    return Neighbors(1.0 - len(sources) * share, dict.fromkeys(sources, share), tuple(targets))


@lru_cache(8)
def default_schedule(n: int) -> Schedule:
    """The graph :func:`.topology.exponential_two` on n ranks as a schedule.

    Args:
        n: Number of ranks.

    Returns:
        What :func:`.topology.as_schedule` makes of the graph; a rank is looked up in O(log n).
        Ranks that are threads share it, with the matrices that are kept of it.

    Example:
        >>> default_schedule(8).neighbors(rank=0, k=0)
        Neighbors(self_weight=0.25, src_weights={4: 0.25, 6: 0.25, 7: 0.25}, dst_ranks=(1, 2, 4))
    """
    return Schedule(f"exponential_two({n})", n, 1, partial(_look_up, n))
