"""Steps over a network and their bytes as rows of tables, with performance targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.network.steps.synthetic_model import (
    ALONE,
    BATCH,
    DDP,
    LOCAL,
    ONE_PEER,
    SyntheticWorkload,
)
from benchmarks.tables import FigureRow, TimingRow, size_text, time_text

_AIMED_HOSTS, _COMMUNICATING = 4, 0.6
STEP_COLUMNS = (
    *("method", "a step", "÷ max(compute, wire)", "samples/s, all hosts", "÷ DDP's samples/s"),
    *("communication alone", "overlap"),
)
BYTES_COLUMNS = (
    *("method, hosts, link", "model", "own count ÷ model", "interface", "interface ÷ model"),
    "with all headers ÷ model",
)


@dataclass(frozen=True)
class NetworkLink:
    """Link of each host, and the work computed per step over it.

    Attributes:
        name: For people.
        rate: As ``scripts/testhosts`` is told.
        bits: Bits per second; None where there is no limit.
        workload: A model such that DDP communicates for most of its step.
    """

    name: str
    rate: str
    bits: float | None
    workload: SyntheticWorkload

    @property
    def wire_time(self) -> float | None:
        """Seconds that one model takes on the wire, without any header."""
        return None if self.bits is None else self.workload.nbytes * 8 / self.bits


@dataclass(frozen=True)
class NetworkMeasurement:
    """Results of a run over some hosts.

    Attributes:
        hosts: How many, with one rank each.
        link: Between them.
        rows: Steps and communication alone.
        sent: For each method, bytes of the busiest host in a step by each counter.
        missing: Methods that could not be measured, and why.
        facts: Machine and versions.
    """

    hosts: int
    link: NetworkLink
    rows: Sequence[TimingRow]
    sent: Mapping[str, Mapping[str, float]]
    missing: Mapping[str, str]
    facts: Mapping[str, Any]

    @cached_property
    def seconds(self) -> dict[str, float]:
        """The median of everything that was timed."""
        return {row.rival: row.median for row in self.rows}

    @property
    def place(self) -> str:
        """Such as ``4 hosts, 1 Gbit/s``."""
        return f"{self.hosts} hosts, {self.link.name}"

    @property
    def limit(self) -> float:
        """max(compute, wire time of one model), in seconds."""
        return max(self.seconds[LOCAL], self.link.wire_time or 0.0)

    @property
    def ddp_share(self) -> float | None:
        """Which part of DDP's step is not computing."""
        ddp = self.seconds.get(DDP)
        return None if ddp is None else 1 - self.seconds[LOCAL] / ddp

    @property
    def fastest(self) -> str:
        """The fastest of our one-peer methods."""
        known = [name for name in ONE_PEER if name in self.seconds]
        return min(known, key=self.seconds.__getitem__)

    @property
    def note(self) -> str:
        """Note on this run for the reader, in a sentence."""
        wire, share = self.link.wire_time, self.ddp_share
        parts = [
            f"Model of {size_text(self.link.workload.nbytes)}",
            f"compute {time_text(self.seconds[LOCAL])}",
            f"wire time of one model {'unknown' if wire is None else time_text(wire)}",
        ]
        if share is not None:
            parts.append(f"DDP does not compute in {share:.0%} of its step")
        return ", ".join(parts) + "."

    def overlap(self, method: str) -> float | None:
        """1 - (step - compute) / communication alone: the part of it that is hidden."""
        alone = self.seconds.get(ALONE.get(method, ""))
        if alone is None:
            return None
        return 1 - (self.seconds[method] - self.seconds[LOCAL]) / alone


def step_lines(measured: NetworkMeasurement) -> Iterator[FigureRow]:
    """A line for every method; aims where DDP communicates for most of its step."""
    share, seconds = measured.ddp_share, measured.seconds
    judged = measured.hosts == _AIMED_HOSTS and measured.link.bits is not None
    judged = judged and share is not None and share >= _COMMUNICATING
    ddp = seconds.get(DDP)
    aims = {}
    if judged and ddp is not None:
        fastest = measured.fastest
        most = seconds[fastest]
        aims[fastest] = ("step ≤ 1.15 max(compute, wire)", most <= 1.15 * measured.limit)
        aims[DDP] = (f"{fastest} ≥ 1.5 of these samples/s", ddp >= 1.5 * most)
    for method in (LOCAL, *(name for name in ALONE if name in seconds)):
        step, hidden = seconds[method], measured.overlap(method)
        cells = (
            method,
            time_text(step),
            step / measured.limit,
            f"{BATCH * measured.hosts / step:.4g}",
            "" if ddp is None else ddp / step,
            time_text(seconds[ALONE[method]]) if hidden is not None else "",
            f"{hidden:.0%}" if hidden is not None else "",
        )
        yield FigureRow(cells, *aims.get(method, ()))


def byte_lines(measured: NetworkMeasurement) -> Iterator[FigureRow]:
    """A line for every method; one-peer must send its model once, whatever the number of hosts."""
    model = measured.link.workload.nbytes
    for method, sent in measured.sent.items():
        if method == LOCAL:
            continue
        interface, payload, headers = sent["interface"], sent.get("payload"), sent.get("headers")
        cells = (
            f"{method}, {measured.place}",
            size_text(model),
            "" if payload is None else payload / model,
            f"{interface:,.0f}",
            f"{interface / model:.4f}",
            "" if headers is None else f"{headers / model:.4f}",
        )
        aim = ("interface ≤ 1.02 models + 4 KB", interface <= 1.02 * model + 4096)
        yield FigureRow(cells, *(aim if method in ONE_PEER else ()))
