"""Measurements of methods over slow and long links, and their tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.network.hosts import HostNetwork
from benchmarks.network.methods.digits_training import NBYTES
from benchmarks.network.methods.method_training import ASYNC, DDP, GOSSIP, LOCAL, METHODS
from benchmarks.tables import FigureRow, time_text

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


TARGET = 0.9
"""Share of test images that must be named rightly."""

_WINS, _FLAT = 1.5, 1.15
STRAGGLER_COLUMNS = ("method", "a step", "a step, one rank slow", "÷", "samples/s left")
CURVE_COLUMNS = ("method", f"{TARGET:.0%} after", "steps", "÷ DDP's time", "at the end", "after")


def _measured(found: Sequence[MethodsMeasurement]) -> list[str]:
    """Names of what was measured anywhere, in the order of ``METHODS``."""
    known = {turn.name for one in found for turn in one.turns}
    return [name for name in (LOCAL, *METHODS) if name in known]


def speed_lines(found: Sequence[MethodsMeasurement]) -> Iterator[FigureRow]:
    """Samples per second over DDP's: a line for each method, a column for each link."""
    for name in _measured(found):
        ratios = [one.against_ddp(name) for one in found]
        cells = (name, *("" if ratio is None else ratio for ratio in ratios))
        yield FigureRow(cells, *_speed_aim(name, found))
    steps = [one.steps().get(DDP) for one in found]
    yield FigureRow(("a step of DDP's", *(time_text(one) if one else "" for one in steps)))


def _speed_aim(name: str, found: Sequence[MethodsMeasurement]) -> tuple[str | None, bool | None]:
    """Where a method must win: compression on slow links, one peer on long ones."""
    slow = [one for one in found if one.network.rate == "100mbit" and not one.network.latency]
    long = [one for one in found if one.network.rate != "100mbit" and one.network.latency]
    places, least = {_compressing(found): (slow, _WINS), GOSSIP: (long, 1.0)}.get(name, ([], 0.0))
    ratios = [ratio for one in places if (ratio := one.against_ddp(name)) is not None]
    if not ratios:
        return None, None
    links = " and ".join(one.link for one in places)
    return f"≥ {least:g} at {links}", min(ratios) >= least


def _compressing(found: Sequence[MethodsMeasurement]) -> str | None:
    """The fastest of our methods that compress what all ranks average, on the slowest link."""
    samples = found[0].samples()
    names = [name for name in _COMPRESSING if name in samples]
    return max(names, key=samples.__getitem__, default=None)


_COMPRESSING = ("gradient_allreduce, fp16", "gradient_allreduce, power_sgd", "bytegrad", "qadam")


def bytes_lines(found: Sequence[MethodsMeasurement]) -> Iterator[FigureRow]:
    """Bytes that leave a host in a step over those of the model: a column for each measurement."""
    for name in _measured(found):
        if name == LOCAL:
            continue
        sent = [
            next((turn.nbytes for turn in one.turns if turn.name == name), None) for one in found
        ]
        yield FigureRow((name, *("" if nbytes is None else nbytes / NBYTES for nbytes in sent)))


def straggler_lines(measured: MethodsMeasurement) -> Iterator[FigureRow]:
    """A step of the ranks that are not slow, with and without one that is."""
    slower = measured.slowness
    plain, slowed = measured.steps(), measured.steps(slower)
    before, after = measured.samples(), measured.samples(slower)
    for name in (name for name in (LOCAL, *METHODS) if name in plain):
        ratio = slowed[name] / plain[name]
        told = (time_text(plain[name]), time_text(slowed[name]))
        cells = (name, *told, ratio, f"{after[name] / before[name]:.0%}")
        aim = (f"≤ {_FLAT:g} times a step", ratio <= _FLAT)
        yield FigureRow(cells, *(aim if name == ASYNC else ()))


def curve_lines(measured: MethodsMeasurement, slower: float = 1.0) -> Iterator[FigureRow]:
    """When each method was at the accuracy, on the mean of all ranks' own models."""
    curves = {one.name: one for one in measured.curves if one.slower == slower}
    reached = {name: one.reached(TARGET) for name, one in curves.items()}
    ddp = reached.get(DDP)
    times = {name: when[0] for name, when in reached.items() if when is not None}
    ours = [name for name in times if METHODS.get(name) is not None]
    first = min(ours, key=times.__getitem__, default=None)
    for name, one in curves.items():
        when = reached[name]
        cells = (
            name,
            "never" if when is None else time_text(when[0]),
            "" if when is None else str(when[1]),
            "" if when is None or ddp is None else when[0] / ddp[0],
            f"{one.accuracy[-1]:.1%}",
            time_text(one.seconds[-1]),
        )
        aim: tuple[str, bool] | tuple[()] = ()
        if name == first and ddp is not None and slower == 1:
            aim = f"≤ 1/{_WINS:g} of DDP's time", times[name] * _WINS <= ddp[0]
        yield FigureRow(cells, *aim)
