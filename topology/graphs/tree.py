"""Trees: the chain, the binary tree, and trees with more children per rank."""

from __future__ import annotations

import networkx as nx

from ..checks import check_int
from ..weights import undirected

__all__ = ["tree"]


def tree(n: int, branching: int = 2) -> nx.DiGraph[int]:
    r"""Build a tree: each rank exchanges with its parent and its children.

    Rank i > 0 has the parent :math:`\lfloor (i - 1) / b \rfloor`; with one child each it is the
    chain. Metropolis–Hastings weights. Meant for methods on trees, such as ``relay_sgd``; with
    other methods it mixes slowly.

    Args:
        n: Number of ranks.
        branching: Children of a rank, the b above.

    Returns:
        A symmetric doubly stochastic graph with self-loops.

    Raises:
        TopologyError: If ``n < 1`` or ``branching < 1``.

    Example:
        >>> list(tree(6).successors(1)), list(tree(4, branching=1).successors(1))
        ([1, 0, 3, 4], [1, 0, 2])
    """
    n = check_int(n, "n", "tree", 1)
    branching = check_int(branching, "branching", "tree", 1)
    name = f"tree({n})" if branching == 2 else f"tree({n}, {branching})"
    return undirected(name, n, (((i - 1) // branching, i) for i in range(1, n)))
