"""Static graphs, one family one file."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx

from topology.graphs.complete import complete
from topology.graphs.equi_static import equi_static
from topology.graphs.exponential import exponential, exponential_two, symmetric_exponential
from topology.graphs.grid import grid_2d, torus_2d
from topology.graphs.hypercube import hypercube
from topology.graphs.random_regular import random_regular
from topology.graphs.ring import ring
from topology.graphs.star import star

__all__ = [
    "GRAPHS",
    "complete",
    "equi_static",
    "exponential",
    "exponential_two",
    "grid_2d",
    "hypercube",
    "random_regular",
    "ring",
    "star",
    "symmetric_exponential",
    "torus_2d",
]

GRAPHS: dict[str, Callable[..., nx.DiGraph[int]]] = {
    "complete": complete,
    "equi_static": equi_static,
    "exponential": exponential,
    "exponential_two": exponential_two,
    "grid_2d": grid_2d,
    "hypercube": hypercube,
    "random_regular": random_regular,
    "ring": ring,
    "star": star,
    "symmetric_exponential": symmetric_exponential,
    "torus_2d": torus_2d,
}
