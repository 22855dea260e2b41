"""What ``network-cost`` measures: averages between hosts, and what the model predicts of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from asyncddp import topology
from benchmarks.network.hosts import HostNetwork
from benchmarks.tables import FigureRow, TimingRow

GRAPHS: dict[str, Callable[[int], topology.GraphOrSchedule]] = {
    "one-peer": topology.one_peer_exponential,
    "ring": topology.ring,
}
ALLREDUCE = "allreduce"
OURS, SOCKETS, GLOO = "asyncddp", "plain sockets", "gloo"
WITHIN = 0.15
"""How far what is measured may be from what is predicted."""
COLUMNS = ("average, network", "by", "measured", "predicted", "measured ÷ predicted")
_JUDGED = {"one-peer": SOCKETS, "ring": SOCKETS, ALLREDUCE: GLOO}


def links_of(network: HostNetwork) -> topology.Links:
    """The links of hosts, for the model."""
    far = topology.Link.parse(f"{network.rate},{network.latency}s")
    slow: dict[int | tuple[int, int], topology.Link] = {}
    if network.slow_rate is not None:
        slow[network.hosts - 1] = topology.Link.parse(f"{network.slow_rate},{network.latency}s")
    return topology.Links(far, network.ranks_per_host, slow=slow)


@dataclass(frozen=True)
class CostMeasurement:
    """Averages on some hosts.

    Attributes:
        network: The hosts.
        rows: Of every average, by everybody who makes it.
        missing: Who could not be measured, and why.
        facts: Machine and versions.
    """

    network: HostNetwork
    rows: list[TimingRow]
    missing: Mapping[str, str]
    facts: Mapping[str, Any]

    @classmethod
    def read(cls, network: HostNetwork, found: Mapping[str, Any]) -> CostMeasurement:
        """From what ``cost_rank`` wrote."""
        rows = [TimingRow(**row) for row in found["rows"]]
        return cls(network, rows, found["missing"], found["header"])

    @property
    def place(self) -> str:
        """Such as ``4 hosts, 100 Mbit/s, 20 ms``, with ``one of 25 Mbit/s``."""
        network, links = self.network, links_of(self.network)
        rate, _, latency = str(links.between).partition(", ")
        words = f"{network.hosts} hosts, {rate}"
        if network.latency:
            words += f", {latency}" + (", window kept" if network.keeps_window else "")
        if network.ranks_per_host > 1:
            words += f", {network.ranks_per_host} ranks each"
        for link in links.slow.values():
            words += f", one of {str(link).partition(',')[0]}"
        return words

    def _graph(self, row: TimingRow) -> topology.GraphOrSchedule:
        ranks = self.network.hosts * self.network.ranks_per_host
        return GRAPHS.get(row.table, topology.ring)(ranks)

    def measured(
        self, row: TimingRow, typical: Callable[[Sequence[float]], float] = median
    ) -> float:
        """Seconds of a call, on average over the rounds of a period, whose calls take turns."""
        period = topology.as_schedule(self._graph(row)).period or 1
        by_round = [row.seconds[k::period] for k in range(period)]
        return fmean(typical(seconds) for seconds in by_round if seconds)

    def predicted(self, row: TimingRow) -> float:
        """Seconds by the model, of gloo's allreduce those of a ring, of ours of a hierarchy."""
        cost = topology.communication_cost(self._graph(row), row.nbytes, links_of(self.network))
        if row.table != ALLREDUCE:
            return cost.neighbors.seconds
        return (cost.ring_allreduce if row.rival == GLOO else cost.hierarchical_allreduce).seconds

    def ratios(self) -> dict[tuple[str, str], float]:
        """Seconds over those predicted, by average and who makes it."""
        return {
            (row.table, row.rival): self.measured(row) / self.predicted(row) for row in self.rows
        }

    def lines(self) -> list[FigureRow]:
        """A line for everybody; those are judged who add least of their own.

        Not so where TCP begins slowly again after pauses, of which the model knows nothing.
        """
        restarts = self.network.latency > 0 and not self.network.keeps_window
        found = []
        for row in self.rows:
            took, expected = self.measured(row), self.predicted(row)
            told = [f"{1e3 * seconds:.0f} ms" for seconds in (took, expected)]
            cells = (f"{row.table}, {self.place}", row.rival, told[0], told[1], took / expected)
            judged = _JUDGED[row.table] == row.rival and not restarts
            met = abs(took / expected - 1) <= WITHIN
            aim = (f"within {WITHIN:.0%} of the prediction", met) if judged else ()
            found.append(FigureRow(cells, *aim))
        return found
