"""Model of the communication cost of a step of neighbour averaging, compared with allreduces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .links import Link, Links, check_quantity
from .matrices import Matrix, rounds_of
from .schedule import GraphOrSchedule, describe

__all__ = ["CommunicationCost", "Cost", "communication_cost"]

Messages = tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]  # their sources, and their targets

DIRECT_MACHINES = 16  # up to which asyncddp.allreduce sends each part straight to its machine


@dataclass(frozen=True, slots=True)
class Cost:
    """Communication cost of one step for the busiest rank; see :func:`communication_cost`.

    Attributes:
        seconds: Time of the step.
        bytes_per_rank: Bytes that the busiest rank sends or receives, whichever is more.
        messages_per_rank: Messages that it sends or receives, whichever is more.
        rounds: Consecutive messages, each of which adds a latency.
    """

    seconds: float
    bytes_per_rank: float
    messages_per_rank: float
    rounds: float


@dataclass(frozen=True, slots=True)
class CommunicationCost:
    """Costs of a step of neighbour averaging and of allreduces; see :func:`communication_cost`.

    Attributes:
        name: The graph or schedule.
        neighbors: One step on it, the mean over its rounds.
        ring_allreduce: Reduce-scatter and allgather around a ring.
        tree_allreduce: Reduction to a root and broadcast along a binomial tree.
        halving_doubling_allreduce: Reduce-scatter by recursive halving, and allgather by doubling.
        hierarchical_allreduce: As :func:`asyncddp.allreduce` makes it: reduce-scatter inside
            machines, each part averaged between machines, allgather inside machines. Up to 16
            machines send their pieces straight to each other, more around a ring.
    """

    name: str
    neighbors: Cost
    ring_allreduce: Cost
    tree_allreduce: Cost
    halving_doubling_allreduce: Cost
    hierarchical_allreduce: Cost

    @property
    def allreduces(self) -> dict[str, Cost]:
        """Costs of the allreduces, keyed by algorithm."""
        return {
            "ring": self.ring_allreduce,
            "tree": self.tree_allreduce,
            "halving-doubling": self.halving_doubling_allreduce,
            "hierarchical": self.hierarchical_allreduce,
        }

    @property
    def speedup(self) -> float:
        """Time of the fastest allreduce divided by the time of a step; infinite on one rank."""
        best = min(cost.seconds for cost in self.allreduces.values())
        return best / self.neighbors.seconds if self.neighbors.seconds else float("inf")

    def __str__(self) -> str:
        """Format a table with one row for neighbour averaging and one per allreduce."""
        ways = {f"{way} allreduce": cost for way, cost in self.allreduces.items()}
        width = max(map(len, (self.name, *ways)))
        lines = [f"{'':{width}}  {'seconds':>10}  {'bytes/rank':>12}  {'messages':>8}"]
        for name, cost in {self.name: self.neighbors, **ways}.items():
            lines.append(
                f"{name:{width}}  {cost.seconds:10.3g}  {cost.bytes_per_rank:12.4g}  "
                f"{cost.messages_per_rank:8.3g}"
            )
        return "\n".join(lines)


def _round_seconds(messages: Messages, nbytes: float, links: Links) -> float:
    """Compute the time until the last of simultaneously sent messages has arrived."""
    times = links.latencies(*messages) + links.transfers(*messages, nbytes)
    return float(times.max(initial=0.0))


def _neighbors(rounds: Sequence[Matrix], nbytes: float, links: Links) -> Cost:
    seconds, most = [], []
    for matrix in rounds:
        off = matrix.rows != matrix.columns
        sources, targets = matrix.columns[off], matrix.rows[off]
        seconds.append(_round_seconds((sources, targets), nbytes, links))
        counts = (np.bincount(ranks).max(initial=0) for ranks in (sources, targets))
        most.append(int(max(counts)))
    messages = float(np.mean(most))
    return Cost(float(np.mean(seconds)), messages * nbytes, messages, float(np.sign(most).mean()))


def _ring(n: int, nbytes: float, links: Links) -> Cost:
    """Cost of a ring allreduce: 2 (n - 1) hops of chunks, with the slowest link's bandwidth."""
    hops = 2.0 * (n - 1)
    if not hops:
        return Cost(0.0, 0.0, 0.0, 0.0)
    ranks = np.arange(n)
    around = (ranks, (ranks + 1) % n)
    hop = links.latencies(*around).mean() + links.transfers(*around, nbytes / n).max()
    return Cost(hops * float(hop), hops * nbytes / n, hops, hops)


def _tree(n: int, nbytes: float, links: Links) -> Cost:
    depth = (n - 1).bit_length()
    seconds = 0.0
    for k in range(depth):
        sources = np.arange(2**k, n, 2 ** (k + 1))
        for way in ((sources, sources - 2**k), (sources - 2**k, sources)):
            seconds += _round_seconds(way, nbytes, links)
    return Cost(seconds, depth * nbytes, depth, 2.0 * depth)


def _halving_rounds(n: int) -> Iterator[tuple[Messages, float]]:
    """Yield the messages of each round of recursive halving, with their share of the tensor.

    Ranks beyond the largest power of two send their tensors to others first, and take no part.
    """
    power = 1 << (n.bit_length() - 1)
    beyond = np.arange(power, n)
    if len(beyond):
        yield (beyond, beyond - power), 1.0
    ranks = np.arange(power)
    for k in range(power.bit_length() - 1):
        yield (ranks, ranks ^ (1 << k)), 0.5 ** (k + 1)


def _halving(n: int, nbytes: float, links: Links) -> Cost:
    """Cost of halving-doubling: doubling sends the messages of halving in reverse direction."""
    seconds = share = messages = rounds = 0.0
    for (sources, targets), part in _halving_rounds(n):
        rounds += 2
        for way in ((sources, targets), (targets, sources)):
            seconds += _round_seconds(way, part * nbytes, links)
        folds = part == 1.0  # one sends, the other receives
        share += part if folds else 2 * part
        messages += 1 if folds else 2
    return Cost(seconds, share * nbytes, messages, rounds)


def _direct(n: int, nbytes: float, links: Links) -> Cost:
    """Cost of a direct allreduce: each rank sends each rank its part, then its averaged part."""
    sources, targets = np.nonzero(~np.eye(n, dtype=bool))
    seconds = 2 * _round_seconds((sources, targets), nbytes / n, links)
    messages = 2.0 * (n - 1)
    return Cost(seconds, messages * nbytes / n, messages, min(messages, 2.0))


def _hierarchical(n: int, nbytes: float, links: Links) -> Cost:
    """Cost of a hierarchical allreduce; between machines, all ranks together send one tensor."""
    local = min(links.ranks_per_machine, n)
    inside = _ring(local, nbytes, Links(links.inside))
    machines = -(-n // local)
    way = _direct if machines <= DIRECT_MACHINES else _ring
    between = way(machines, nbytes, Links(links.between, slow=links.slow))
    return Cost(
        inside.seconds + between.seconds,
        inside.bytes_per_rank + between.bytes_per_rank / local,
        inside.messages_per_rank + between.messages_per_rank,
        inside.rounds + between.rounds,
    )


def communication_cost(
    graph_or_schedule: GraphOrSchedule, nbytes: float, links: Links | Link | None = None
) -> CommunicationCost:
    r"""Estimate time, bytes and messages of one step, from latency and bandwidth of the links.

    A round lasts until its last message has arrived, and a schedule's step the mean of its rounds:

    .. math:: T = \frac1K \sum_{k=1}^{K} \max_{(i, j) \in E_k} \Big(\alpha_{ij} +
              \max\Big(\frac{B\, m_i^\text{out}}{\beta_i},
              \frac{B\, m_j^\text{in}}{\beta_j}\Big)\Big)

    with latency α, bandwidth β, message size B, and the m messages that share a link, see
    :class:`Links`. Between n ranks with a link each, one neighbour and the allreduces take

    .. math:: T = \alpha + \frac B\beta, \quad
              T_\text{ring} = 2(n-1)\Big(\alpha + \frac{B}{n \beta}\Big), \quad
              T_\text{tree} = 2 \lceil \log_2 n \rceil \Big(\alpha + \frac B\beta\Big), \quad
              T_\text{halving-doubling} = 2 \log_2 n\, \alpha + 2 \frac{n-1}{n} \frac B\beta

    and the hierarchical one on M machines of L ranks, with links α', β' inside machines, and r = 2
    rounds between up to 16 machines or r = 2 (M - 1) between more,

    .. math:: 2(L-1)\Big(\alpha' + \frac{B}{L \beta'}\Big) +
              r \alpha + 2 \frac{M-1}{M} \frac B\beta.

    The model ignores arithmetic, processor time per message, headers (5 % of what TCP sends over
    Ethernet), waiting for late ranks, and switches with less bandwidth than all their links.

    Args:
        graph_or_schedule: A graph or a schedule, of which the rounds of
            :func:`.topology.consensus_rate` are averaged.
        nbytes: Size of the mixed tensors, such as all parameters, in bytes.
        links: The links, or one :class:`Link` for all if machines have one rank each; by default
            50 µs and 10 Gbit/s.

    Returns:
        A record of the costs; printed, it is a table.

    Raises:
        TopologyError: If ``nbytes`` is negative or not finite, or ``links`` has a link of a machine
            that does not exist.

    Example:
        >>> from asyncddp import topology
        >>> schedule = topology.one_peer_exponential(16)
        >>> print(communication_cost(schedule, nbytes=1e8))
                                       seconds    bytes/rank  messages
        one_peer_exponential(16)          0.08         1e+08         1
        ring allreduce                   0.151     1.875e+08        30
        tree allreduce                    0.64         4e+08         4
        halving-doubling allreduce        0.15     1.875e+08         8
        hierarchical allreduce            0.15     1.875e+08        30

        With four ranks per machine, those share its link where they all send to other machines:

        >>> far = topology.Links(topology.Link.parse("100Mbit,20ms"), ranks_per_machine=4)
        >>> cost = communication_cost(schedule, 1e6, far)
        >>> print(f"{cost.neighbors.seconds:.2f} {cost.hierarchical_allreduce.seconds:.2f}")
        0.24 0.16

    Reference:
        Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
        MPICH", 2005; Jeaugey, "Massively scale your deep learning training with NCCL 2.4", 2019,
        on trees and hierarchies of rings.
    """
    nbytes = check_quantity(nbytes, "nbytes", "bytes", "communication_cost", zero=True)
    links = links if isinstance(links, Links) else Links(links or Link())
    rounds = rounds_of(graph_or_schedule)
    n = rounds[0].n
    links.check_size(n)
    return CommunicationCost(
        describe(graph_or_schedule),
        _neighbors(rounds, nbytes, links),
        _ring(n, nbytes, links),
        _tree(n, nbytes, links),
        _halving(n, nbytes, links),
        _hierarchical(n, nbytes, links),
    )
