"""Ring: every rank exchanges with its two neighbours on a circle."""

from __future__ import annotations

import networkx as nx

from ..checks import check_choice, check_int
from ..weights import circulant

__all__ = ["ring"]

_OFFSETS = {"both": (1, -1), "left": (-1,), "right": (1,)}


def ring(n: int, style: str = "both") -> nx.DiGraph[int]:
    r"""Build the ring: every rank exchanges with its neighbours on a circle.

    .. math:: w_{i,i} = w_{i,i \pm 1} = 1/3, \quad \|W - J\|_2 = |1 + 2\cos(2\pi/n)| / 3

    Mixing slows down as :math:`1/n^2`: suitable for few ranks, or to show effects of slow mixing.

    Args:
        n: Number of ranks.
        style: ``"both"``: send to both neighbours; ``"left"``: rank i sends to i - 1 only;
            ``"right"``: to i + 1 only (then both weights are 1/2).

    Returns:
        A doubly stochastic graph with self-loops, symmetric for ``"both"``.

    Raises:
        TopologyError: If ``n < 1`` or there is no such style.

    Example:
        >>> ring(4, style="right").edges(data="weight")  # doctest: +NORMALIZE_WHITESPACE
        OutEdgeDataView([(0, 0, 0.5), (0, 1, 0.5), (1, 1, 0.5), (1, 2, 0.5),
                         (2, 2, 0.5), (2, 3, 0.5), (3, 3, 0.5), (3, 0, 0.5)])
    """
    n = check_int(n, "n", "ring", 1)
    style = check_choice(style, "style", "ring", tuple(_OFFSETS))
    offsets = {offset % n for offset in _OFFSETS[style]} - {0}
    name = f"ring({n})" if style == "both" else f"ring({n}, {style!r})"
    return circulant(name, n, dict.fromkeys(offsets, 1.0 / (len(offsets) + 1)))
