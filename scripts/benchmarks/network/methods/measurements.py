"""What ``network-methods`` measures: turns of methods, trainings, and a run's results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.network.host_network import HostNetwork
from benchmarks.network.methods.method_names import DDP

__all__ = ["LearningCurve", "MethodTurns", "MethodsMeasurement"]

_RATE_NAMES = {"100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "unlimited": "unlimited"}


@dataclass(frozen=True)
class MethodTurns:
    """All ranks' turns of one method.

    Attributes:
        name: The method's.
        slower: How many times slower the last rank computed; 1 for no slower.
        seconds: For each round, the mean step of the slowest rank, the slow one left out.
        samples: For each round, samples per second of all ranks together.
        nbytes: Bytes that the interface of the busiest rank sent in a step, the rounds' median.
        payload: The same by the optimizer's count; None for the rivals.
    """

    name: str
    slower: float
    seconds: Sequence[float]
    samples: Sequence[float]
    nbytes: float
    payload: float | None


@dataclass(frozen=True)
class LearningCurve:
    """Accuracy of a training.

    Attributes:
        name: The method's.
        slower: How many times slower the last rank computed; 1 for no slower.
        seconds: After the start, for each point.
        steps: That the first rank had made.
        accuracy: Mean over the ranks' own models of the share of test images named rightly.
    """

    name: str
    slower: float
    seconds: Sequence[float]
    steps: Sequence[int]
    accuracy: Sequence[float]

    def reached(self, target: float) -> tuple[float, int] | None:
        """Seconds and steps until the accuracy was first there; None where it never was."""
        points = zip(self.seconds, self.steps, self.accuracy, strict=True)
        return next(((when, step) for when, step, height in points if height >= target), None)


@dataclass(frozen=True)
class MethodsMeasurement:
    """Results of a run on some hosts.

    Attributes:
        network: The hosts.
        turns: Of every method that could run, for each slowness.
        curves: Of the same, where they were trained.
        missing: Methods that could not be measured, and why.
        facts: Machine and versions.
    """

    network: HostNetwork
    turns: Sequence[MethodTurns]
    curves: Sequence[LearningCurve]
    missing: Mapping[str, str]
    facts: Mapping[str, Any]

    @classmethod
    def read(cls, network: HostNetwork, found: Mapping[str, Any]) -> MethodsMeasurement:
        """From what ``methods_rank`` wrote."""
        turns = [MethodTurns(**one) for one in found["turns"]]
        curves = [LearningCurve(**one) for one in found["curves"]]
        return cls(network, turns, curves, found["missing"], found["header"])

    @property
    def place(self) -> str:
        """Such as ``4 hosts, 100 Mbit/s, 20 ms``."""
        return f"{self.network.hosts} hosts, {self.link}"

    @property
    def link(self) -> str:
        """Such as ``100 Mbit/s, 20 ms``."""
        return f"{self.rate_name}, {1000 * self.network.latency:.0f} ms"

    @property
    def rate_name(self) -> str:
        """The links' rate, for people."""
        return _RATE_NAMES[self.network.rate]

    def steps(self, slower: float = 1.0) -> dict[str, float]:
        """Median seconds of a step by method."""
        return {one.name: median(one.seconds) for one in self.turns if one.slower == slower}

    def samples(self, slower: float = 1.0) -> dict[str, float]:
        """Median samples per second of all ranks by method."""
        return {one.name: median(one.samples) for one in self.turns if one.slower == slower}

    @property
    def slowness(self) -> float:
        """How many times slower the last rank was at most."""
        return max(one.slower for one in self.turns)

    def against_ddp(self, name: str) -> float | None:
        """A method's samples per second over those of DDP; None where one is missing."""
        samples = self.samples()
        return samples[name] / samples[DDP] if {name, DDP} <= set(samples) else None
