"""Default topology, made fast and without networkx, since every program needs it at its start."""

from __future__ import annotations

from functools import lru_cache, partial

from .neighbors import Neighbors
from .schedule import Schedule

__all__ = ["default_schedule"]


def _look_up(n: int, rank: int, k: int) -> Neighbors:
    """Return the neighbours of a rank: sources 1, 2, 4, … behind, targets as far ahead."""
    del k
    distances = [2**t for t in range((n - 1).bit_length())]
    share = 1.0 / (len(distances) + 1)
    sources = sorted((rank - distance) % n for distance in distances)
    targets = sorted((rank + distance) % n for distance in distances)
    return Neighbors(1.0 - len(sources) * share, dict.fromkeys(sources, share), tuple(targets))


@lru_cache(8)
def default_schedule(n: int) -> Schedule:
    """Return the graph :func:`.topology.exponential_two` on n ranks as a schedule.

    Args:
        n: Number of ranks.

    Returns:
        The result of :func:`.topology.as_schedule` of the graph; a rank is looked up in O(log n).
        Ranks that are threads share it and its cached matrices.

    Example:
        >>> default_schedule(8).neighbors(rank=0, k=0)
        Neighbors(self_weight=0.25, src_weights={4: 0.25, 6: 0.25, 7: 0.25}, dst_ranks=(1, 2, 4))
    """
    return Schedule(f"exponential_two({n})", n, 1, partial(_look_up, n))
