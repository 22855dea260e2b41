"""Message counts and the cost model as rows of tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from asyncddp import topology
from benchmarks.scale.verb_counts import ALLREDUCE, GRAPHS, ONE_PEER, Found
from benchmarks.tables import FigureRow

__all__ = ["ModelCosts", "WorldCounts", "compute_model_costs", "counted_lines"]


@dataclass(frozen=True)
class WorldCounts:
    """Message counts of all ranks of one world.

    Attributes:
        ranks: How many there are.
        started: ``"processes"`` or ``"threads"``.
        nbytes: Size of the tensor.
        calls: Calls of each verb.
        found: For each rank and verb the counts of each counter.
        why: Why MPI has not counted, where it has not.
        facts: Machine and versions, where a run has told them.
    """

    ranks: int
    started: str
    nbytes: int
    calls: int
    found: Sequence[Found]
    why: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def busiest(self, verb: str, counter: str, what: str) -> float | None:
        """The most that a rank sent for a call; None where that was not counted."""
        counts = [one[verb][counter] for one in self.found]
        return None if None in counts else max(count[what] for count in counts) / self.calls

    def sent(self, verb: str) -> tuple[float, float] | None:
        """Messages and bytes of the busiest rank, by the counter that sees all of them."""
        for counter in ("mpi", "transport") if verb in GRAPHS else ("mpi",):
            messages = self.busiest(verb, counter, "messages")
            nbytes = self.busiest(verb, counter, "nbytes")
            if messages is not None and nbytes is not None:
                return messages, nbytes
        return None


def counted_lines(counted: WorldCounts) -> Iterator[FigureRow]:
    """A line for every verb that was counted, beside its model."""
    tensor = counted.nbytes
    for verb in (*GRAPHS, ALLREDUCE):
        sent = counted.sent(verb)
        if sent is None:
            continue
        messages, nbytes = sent
        headers = counted.busiest(verb, "transport", "headers") or 0.0
        cost = _model(verb, counted.ranks, tensor)
        cells = (f"{counted.ranks} {counted.started}", verb, messages, headers, f"{nbytes:,.0f}")
        compared = (nbytes / tensor, cost.messages_per_rank, cost.bytes_per_rank / tensor)
        if verb == ONE_PEER:
            reached = nbytes <= 1.02 * tensor + 4096
            yield FigureRow((*cells, *compared), "≤ 1.02 tensors + 4 KB", reached)
        else:
            yield FigureRow((*cells, *compared))


def _model(verb: str, ranks: int, nbytes: int) -> topology.Cost:
    if verb == ALLREDUCE:
        return topology.communication_cost(topology.ring(ranks), nbytes).ring_allreduce
    return topology.communication_cost(GRAPHS[verb](ranks), nbytes).neighbors


@dataclass(frozen=True)
class ModelCosts:
    """Modelled costs at one number of ranks, by averaging method."""

    ranks: int
    costs: Mapping[str, topology.Cost]


def compute_model_costs(
    sizes: Sequence[int], nbytes: int, advance: Callable[[str], None]
) -> Sequence[ModelCosts]:
    """The model alone, also for numbers of ranks that no machine here has."""
    found = []
    for ranks in sizes:
        advance(f"model of {ranks} ranks")
        one_peer = topology.communication_cost(topology.one_peer_exponential(ranks), nbytes)
        exp2 = topology.communication_cost(topology.exponential_two(ranks), nbytes)
        costs = {
            "one-peer": one_peer.neighbors,
            "exp-2": exp2.neighbors,
            "ring allreduce": exp2.ring_allreduce,
            "tree allreduce": exp2.tree_allreduce,
        }
        found.append(ModelCosts(ranks, costs))
    return found
