"""Plot of the shape of it: bandwidth, latency, a slow rank, and accuracy over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

from benchmarks.network.methods.method_tables import TARGET, MethodsMeasurement
from benchmarks.network.methods.method_training import (
    ALLREDUCE,
    ASYNC,
    BYTEGRAD,
    DDP,
    DDP_HALF,
    DDP_POWER,
    GOSSIP,
    LOW_PRECISION,
)
from benchmarks.plots import drawing, legend_below

# Okabe and Ito's colours; the rivals are grey and black.
_STYLES: Mapping[str, tuple[str, str]] = {
    DDP: ("black", "-"),
    DDP_HALF: ("0.45", "--"),
    DDP_POWER: ("0.65", ":"),
    ALLREDUCE: ("#0072B2", "-"),
    BYTEGRAD: ("#56B4E9", "-"),
    GOSSIP: ("#009E73", "-"),
    LOW_PRECISION: ("#D55E00", "-"),
    ASYNC: ("#CC79A7", "-"),
}


def _over_ddp(
    axes: Axes, found: Sequence[MethodsMeasurement], tick: Callable[[MethodsMeasurement], str]
) -> None:
    """Samples per second over DDP's: a line for each method, over the links."""
    for name, (color, style) in _STYLES.items():
        points = [(place, one.against_ddp(name)) for place, one in enumerate(found)]
        shown = [(place, ratio) for place, ratio in points if ratio is not None]
        places, ratios = zip(*shown, strict=True) if shown else ((), ())
        axes.plot(places, ratios, style, color=color, marker="o", markersize=3.5, label=name)
    axes.set_xticks(range(len(found)), [tick(one) for one in found])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("samples/s ÷ DDP's")
    axes.grid(axis="y")


def _slow_rank(axes: Axes, measured: MethodsMeasurement) -> None:
    """How much longer a step of the other ranks takes with one that is slow."""
    plain, slowed = measured.steps(), measured.steps(measured.slowness)
    names = [name for name in reversed(tuple(_STYLES)) if name in plain]
    ratios = [slowed[name] / plain[name] for name in names]
    axes.barh(range(len(names)), ratios, color=[_STYLES[name][0] for name in names])
    axes.set_yticks(range(len(names)), names, fontsize=7.5)
    axes.axvline(1, color="0.3", linewidth=0.8)
    axes.set_xlabel(f"a step ÷ that without a rank {measured.slowness:g} times slower")


def _accuracy(axes: Axes, measured: MethodsMeasurement) -> None:
    """Accuracy over seconds, on the mean of the ranks' own models."""
    for curve in measured.curves:
        if curve.name in _STYLES and curve.slower == 1:
            color, style = _STYLES[curve.name]
            axes.plot(curve.seconds, curve.accuracy, style, color=color, linewidth=1.2)
    axes.axhline(TARGET, color="0.3", linewidth=0.6)
    axes.set(xlabel="seconds of training", ylabel="digits named rightly", ylim=(0.4, 1.0))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.xaxis.set_minor_locator(NullLocator())


def draw(path: Path, found: Sequence[MethodsMeasurement]) -> None:
    """Draw what was found with the fewest hosts."""
    hosts = min(one.network.hosts for one in found)
    here = [one for one in found if one.network.hosts == hosts]
    near = [one for one in here if not one.network.latency]
    gigabit = [one for one in here if one.network.rate == "1gbit"]
    trained = next((one for one in here if one.curves), None)
    slowed = next((one for one in here if one.slowness > 1), None)
    with drawing(path, 10.4, 7.2) as figure:
        bandwidth, latency, slow, accuracy = figure.subplots(2, 2).flat
        bandwidth.set_title(f"Bandwidth: {hosts} hosts, no latency")
        _over_ddp(bandwidth, near, lambda one: one.rate_name)
        latency.set_title(f"Latency: {hosts} hosts, 1 Gbit/s")
        _over_ddp(latency, gigabit, lambda one: f"{1000 * one.network.latency:.0f} ms")
        if slowed is not None:
            slow.set_title(f"A slow rank: {slowed.place}")
            _slow_rank(slow, slowed)
        if trained is not None:
            title = f"Accuracy over time: {trained.place}"
            accuracy.set_title(title)
            _accuracy(accuracy, trained)
        legend_below(figure, bandwidth)
