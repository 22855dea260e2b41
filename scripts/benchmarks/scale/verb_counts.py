"""Message counts of each verb: calls on every rank between two readings of the counters."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

import asyncddp as bf
from asyncddp import topology
from benchmarks.scale.message_counters import OpenMpiCounter, TransportCounter

__all__ = ["ALLREDUCE", "GRAPHS", "ONE_PEER", "Found", "count_verbs"]

ONE_PEER, ALLREDUCE = "one-peer", "allreduce"
GRAPHS: dict[str, Callable[[int], topology.GraphOrSchedule]] = {
    ONE_PEER: topology.one_peer_exponential,
    "exp-2": topology.exponential_two,
    "ring": topology.ring,
}
Found = dict[str, dict[str, Any]]
"""For each verb what this rank sent by each counter, the sum of all calls."""


def count_verbs(nbytes: int, calls: int, inside: OpenMpiCounter | None = None) -> Found:
    """Run every verb on this rank's part of the current world, and count.

    Args:
        nbytes: Size of the tensor.
        calls: Calls of each verb; in one before them, which is not counted, connections are made.
        inside: Open MPI's counter, where there is one.

    Returns:
        The counts; of allreduce only what MPI has counted, and the headers.

    Raises:
        ValueError: A result is wrong.
    """
    at = TransportCounter(bf.current().transport)
    own = torch.full((nbytes // 4,), float(bf.rank()))
    found: Found = {}
    for name, graph in GRAPHS.items():
        schedule = topology.as_schedule(graph(bf.size()))
        bf.set_topology(schedule)
        near = schedule.neighbors(bf.rank(), calls)
        expected = near.self_weight * bf.rank()
        expected += sum(weight * peer for peer, weight in near.src_weights.items())
        counted = _VerbCounter(at, inside, calls, lambda k: bf.neighbor_allreduce(own, round=k))
        found[name] = counted.checked(expected)
    counted = _VerbCounter(at, inside, calls, lambda k: bf.allreduce(own))
    found[ALLREDUCE] = counted.checked((bf.size() - 1) / 2)
    return found


class _VerbCounter:
    """Context manager that counts a verb's messages between two readings of the counters."""

    def __init__(
        self,
        at: TransportCounter,
        inside: OpenMpiCounter | None,
        calls: int,
        call: Callable[[int], torch.Tensor],
    ) -> None:
        call(0)
        _settle()
        before, mpi_before = at.read(), inside.read() if inside else None
        for number in range(1, calls + 1):
            self._result = call(number)
        after, mpi_after = at.read(), inside.read() if inside else None
        _settle()
        self._counts: dict[str, Any] = {"transport": asdict(after - before), "mpi": None}
        if mpi_before and mpi_after:
            self._counts["mpi"] = asdict(mpi_after - mpi_before)

    def checked(self, expected: float) -> dict[str, Any]:
        """The counts, if the last call's result is right."""
        if not torch.allclose(self._result, torch.full_like(self._result, expected)):
            got = self._result[0].item()
            raise ValueError(f"rank {bf.rank()}: expected {expected}, got {got}")
        return self._counts


def _settle() -> None:
    """No rank counts while another's earlier messages are under way."""
    bf.barrier()
    time.sleep(0.05)
