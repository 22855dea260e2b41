"""BlueFog's functions that infer source ranks from all ranks' destinations, and the reverse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncddp.context.queries import rank, size
from asyncddp.integrations.bluefog.bluefog_state import active_state
from asyncddp.integrations.bluefog.error_translation import TopologyAssertionError, translate_errors
from asyncddp.ops.object_collectives import gather_records

Inferred = list[int] | tuple[list[int], Any]


@translate_errors()
def InferSourceFromDestinationRanks(  # noqa: N802 - BlueFog's name
    dst_ranks: Sequence[int], construct_adjacency_matrix: bool = False
) -> Inferred:
    """Return the ranks that send to this one, ascending, from those to which it sends; collective.

    With ``construct_adjacency_matrix`` return ``(sources, W)``, W being an (n, n) float64 array in
    which ``W[i, j]`` is 1 over the number of those who send to j, itself included, where i is one
    of them, and 0 elsewhere.

    Raises:
        TopologyAssertionError: Ranks that are none, come twice, or are this one.
    """
    return _inferred("dst_ranks", dst_ranks, construct_adjacency_matrix)


@translate_errors()
def InferDestinationFromSourceRanks(  # noqa: N802 - BlueFog's name
    src_ranks: Sequence[int], construct_adjacency_matrix: bool = False
) -> Inferred:
    """Return the ranks to which this one sends, from those from which it receives; collective.

    The rest is as in :func:`InferSourceFromDestinationRanks`.
    """
    return _inferred("src_ranks", src_ranks, construct_adjacency_matrix)


def _inferred(argument: str, ranks: Sequence[int], with_matrix: bool) -> Inferred:
    active_state()
    own, n = rank(), size()
    named = list(ranks)
    wrong = [r for r in named if isinstance(r, bool) or not isinstance(r, int) or not 0 <= r < n]
    if wrong or own in named or len(set(named)) < len(named):
        raise TopologyAssertionError(
            f"argument {argument}: expected ranks in 0..{n - 1} other than {own}, this rank "
            f"itself, each once, got {named}"
        )
    every = gather_records(named, list[int], f"infer from {argument}")
    found = [peer for peer in range(n) if own in every[peer]]
    if not with_matrix:
        return found
    matrix = np.eye(n)
    for peer, others in enumerate(every):
        matrix[peer, others] = 1.0
    if argument == "src_ranks":
        matrix = matrix.T
    return found, matrix / matrix.sum(axis=0)
