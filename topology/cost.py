"""What a step costs on the wire, beside the allreduce that it replaces."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from topology.errors import TopologyError
from topology.matrices import rounds_of
from topology.schedule import GraphOrSchedule, describe

__all__ = ["CommunicationCost", "Cost", "communication_cost"]


@dataclass(frozen=True, slots=True)
class Cost:
    """One step of the busiest rank; see :func:`communication_cost`.

    Attributes:
        seconds: Time of the step.
        bytes_per_rank: Bytes that the busiest rank sends or receives, whichever is more.
        messages_per_rank: Messages that it sends or receives, whichever is more.
    """

    seconds: float
    bytes_per_rank: float
    messages_per_rank: float


@dataclass(frozen=True, slots=True)
class CommunicationCost:
    """A step of neighbour averaging beside two averages of all; see :func:`communication_cost`.

    Attributes:
        name: The graph or schedule.
        neighbors: One step on it, the mean over its rounds.
        ring_allreduce: Reduce-scatter and allgather around a ring.
        tree_allreduce: Reduction to a root and broadcast along a binomial tree.
    """

    name: str
    neighbors: Cost
    ring_allreduce: Cost
    tree_allreduce: Cost

    @property
    def speedup(self) -> float:
        """How many steps fit in the time of the faster allreduce; infinite on one rank."""
        best = min(self.ring_allreduce.seconds, self.tree_allreduce.seconds)
        return best / self.neighbors.seconds if self.neighbors.seconds else float("inf")

    def __str__(self) -> str:
        """A table with a line for each way."""
        width = max(len(self.name), len("ring allreduce"))
        lines = [f"{'':{width}}  {'seconds':>10}  {'bytes/rank':>12}  {'messages':>8}"]
        for name, cost in (
            (self.name, self.neighbors),
            ("ring allreduce", self.ring_allreduce),
            ("tree allreduce", self.tree_allreduce),
        ):
            lines.append(
                f"{name:{width}}  {cost.seconds:10.3g}  {cost.bytes_per_rank:12.4g}  "
                f"{cost.messages_per_rank:8.3g}"
            )
        return "\n".join(lines)


def _check(value: float, name: str, unit: str, zero: bool) -> float:
    """A finite number above zero, or also zero."""
    bound = ">= 0" if zero else "> 0"
    if not (0 <= value < float("inf")) or (value == 0 and not zero):
        raise TopologyError(
            f"communication_cost needs {name} {bound} in {unit}, got {name}={value!r}"
        )
    return float(value)


def communication_cost(
    graph_or_schedule: GraphOrSchedule,
    nbytes: float,
    latency: float = 5e-5,
    bandwidth: float = 1.25e9,
) -> CommunicationCost:
    r"""Time, bytes and messages of one step, in the latency–bandwidth model.

    .. math:: T = d \,(\alpha + B/\beta), \quad
              T_\text{ring} = 2(n-1)\Big(\alpha + \frac{B}{n \beta}\Big), \quad
              T_\text{tree} = 2 \lceil \log_2 n \rceil \,(\alpha + B/\beta)

    with latency α, bandwidth β, message size B, and d the most messages that one rank sends or
    receives in a round; a rank sends and receives one message at a time each, both at once.

    Args:
        graph_or_schedule: A graph or a schedule, of which the rounds of
            :func:`topology.consensus_rate` are averaged.
        nbytes: Size of what is mixed, such as all parameters, in bytes.
        latency: Time until a message of no size has arrived, in seconds.
        bandwidth: Of a rank's link, in bytes per second; the default is 10 Gbit/s.

    Returns:
        A record of three costs; printed, it is a table.

    Raises:
        TopologyError: If a number is negative or not finite, or the bandwidth is zero.

    Example:
        >>> import topology
        >>> print(communication_cost(topology.one_peer_exponential(16), nbytes=1e8))
                                     seconds    bytes/rank  messages
        one_peer_exponential(16)        0.08         1e+08         1
        ring allreduce                 0.151     1.875e+08        30
        tree allreduce                  0.64         4e+08         4

    Reference:
        Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
        MPICH", 2005.
    """
    nbytes = _check(nbytes, "nbytes", "bytes", zero=True)
    latency = _check(latency, "latency", "seconds", zero=True)
    bandwidth = _check(bandwidth, "bandwidth", "bytes per second", zero=False)
    rounds = rounds_of(graph_or_schedule)
    n = rounds[0].n
    most = []
    for matrix in rounds:
        off = matrix.rows != matrix.columns
        sent = np.bincount(matrix.columns[off], minlength=n)
        received = np.bincount(matrix.rows[off], minlength=n)
        most.append(int(max(sent.max(), received.max())))
    messages = float(np.mean(most))
    whole = latency + nbytes / bandwidth
    depth = (n - 1).bit_length()
    hops = 2 * (n - 1)
    return CommunicationCost(
        describe(graph_or_schedule),
        Cost(messages * whole, messages * nbytes, messages),
        Cost(hops * (latency + nbytes / n / bandwidth), hops * nbytes / n, float(hops)),
        Cost(2 * depth * whole, depth * nbytes, float(depth)),
    )
