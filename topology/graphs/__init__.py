"""Static graphs, one family one file."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from topology.graphs.exponential import exponential, exponential_two, symmetric_exponential
from topology.graphs.ring import ring

__all__ = ["GRAPHS", "exponential", "exponential_two", "ring", "symmetric_exponential"]

GRAPHS: dict[str, Callable[..., nx.DiGraph[int]]] = {
    "exponential": exponential,
    "exponential_two": exponential_two,
    "ring": ring,
    "symmetric_exponential": symmetric_exponential,
}
