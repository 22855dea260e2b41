"""``{cost-picture}``: seconds of an average over the number of ranks, as the model has them."""

from __future__ import annotations

import base64
import functools
import io
from typing import Any

import matplotlib as mpl
from docutils import nodes
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from sphinx.util.docutils import SphinxDirective

from asyncddp import topology

_SIZES = [2**k for k in (1, 2, 3, 4, 6, 8, 10, 12, 14, 15, 17)]
_LOCAL = 8  # ranks per machine in the last panel
_INSIDE = topology.Link.parse("2.4Tbit,2us")
_PANELS = (
    ("100 MB, 10 Gbit/s, 50 µs", 1e8, topology.Links(topology.Link.parse("10Gbit,50us"))),
    ("1 MB, 10 Gbit/s, 50 µs", 1e6, topology.Links(topology.Link.parse("10Gbit,50us"))),
    ("100 MB, 100 Mbit/s, 20 ms", 1e8, topology.Links(topology.Link.parse("100Mbit,20ms"))),
    (
        f"1 GB, 100 Gbit/s, 10 µs, {_LOCAL} ranks a machine",
        1e9,
        topology.Links(topology.Link.parse("100Gbit,10us"), _LOCAL, _INSIDE),
    ),
)
_ONE_PEER, _MACHINES = "one peer", "machines, one peer"
_STYLES = {  # Okabe and Ito's colours: warm ones are averages with neighbours
    _ONE_PEER: ("#D55E00", "-", 2.4),
    _MACHINES: ("#E69F00", "-", 2.4),
    "ring": ("#0072B2", "-", 1.4),
    "tree": ("#009E73", "-", 1.4),
    "halving-doubling": ("#000000", "--", 1.4),
    "hierarchical": ("#CC79A7", "-", 1.4),
}


@functools.cache
def _shift(n: int, distance: int) -> topology.Schedule:
    """One round of the one-peer exponential schedule, by itself."""

    def look_up(rank: int, k: int) -> topology.Neighbors:
        return topology.Neighbors(0.5, {(rank - distance) % n: 0.5}, ((rank + distance) % n,))

    return topology.Schedule(f"shift by {distance}", n, 1, look_up)


def one_peer(
    n: int, nbytes: float, links: topology.Links
) -> tuple[float, topology.CommunicationCost]:
    """Seconds of one peer on n ranks, the mean over its rounds; and the cost of its last round.

    All rounds between machines take as long as the last one, and those that reach less far than a
    machine's ranks as long as on four machines: so not every round of every rank is looked at.
    """
    period, local = (n - 1).bit_length(), links.ranks_per_machine
    near = local.bit_length() - 1
    last = topology.communication_cost(_shift(n, 2 ** (period - 1)), nbytes, links)
    few = (_shift(min(n, 4 * local), 2**k) for k in range(near))
    seconds = sum(topology.communication_cost(one, nbytes, links).neighbors.seconds for one in few)
    return (seconds + (period - near) * last.neighbors.seconds) / period, last


def _seconds() -> list[dict[str, list[tuple[int, float]]]]:
    """For each panel the points of every way."""
    found: list[dict[str, list[tuple[int, float]]]] = [{} for _ in _PANELS]
    for n in _SIZES:
        for ways, (_, nbytes, links) in zip(found, _PANELS, strict=True):
            local = links.ranks_per_machine
            if n <= local:
                continue
            averaged, cost = one_peer(n, nbytes, links)
            times = {way: one.seconds for way, one in cost.allreduces.items()}
            times[_ONE_PEER] = averaged
            if local == 1:
                del times[
                    "hierarchical"
                ]  # it is the ring there, or two latencies and the ring's bytes
            else:
                inside = topology.communication_cost(topology.ring(local), nbytes, links.inside)
                between, _ = one_peer(n // local, nbytes, topology.Links(links.between))
                times[_MACHINES] = inside.ring_allreduce.seconds + between
            for way, seconds in times.items():
                ways.setdefault(way, []).append((n, seconds))
    return found


def _time(value: float, _: object = None) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if value >= 0.9995 * factor:
            return f"{value / factor:,.0f} {unit}"
    return f"{value * 1e6:.0f} µs"


def _label_ends(axes: Axes, ways: dict[str, list[tuple[int, float]]]) -> None:
    """Write each line's name beside its end, moved apart where two ends are close."""
    low, high = axes.get_ylim()
    least = (high / low) ** 0.065  # the factor between two lines of text
    below = 0.0
    for way, points in sorted(ways.items(), key=lambda item: item[1][-1][1]):
        at = max(points[-1][1], below * least)
        below = at
        axes.annotate(
            way,
            (1, at),
            (5, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color=_STYLES[way][0],
        )


@functools.cache
def _picture() -> str:
    """The picture as SVG."""
    style = {"axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    with mpl.rc_context({**style, "svg.hashsalt": "cost"}):
        figure = Figure(figsize=(10.6, 7.2), layout="constrained")
        panels = zip(figure.subplots(2, 2).flat, _PANELS, _seconds(), strict=True)
        for axes, (title, _, _), ways in panels:
            for way, points in ways.items():
                color, line, width = _STYLES[way]
                axes.plot(*zip(*points, strict=True), line, color=color, linewidth=width)
            axes.set(xscale="log", yscale="log")
            axes.set_title(title, loc="left", fontsize=10)
            axes.set_xticks([2, 16, 128, 1024, 8192, 65536])
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(_time))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_xlim(ways[_ONE_PEER][0][0], _SIZES[-1])
            axes.grid(color="0.92", linewidth=0.6)
            axes.tick_params(labelsize=8.5)
            _label_ends(axes, ways)
        figure.supxlabel("ranks", fontsize=9)
        figure.supylabel("seconds of one average, predicted", fontsize=9)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


class CostPicture(SphinxDirective):
    """Show the predictions of ``topology.communication_cost``, computed as the site is built."""

    def run(self) -> list[nodes.Node]:
        """Give the picture as one image that lies in the page itself."""
        data = base64.b64encode(_picture().encode()).decode()
        image = (
            '<img class="cost-picture" style="width: 100%; background: white" alt="predicted '
            "seconds of an average over the number of ranks, for one peer and four kinds of "
            f'allreduce, on four networks" src="data:image/svg+xml;base64,{data}">'
        )
        return [nodes.raw("", image, format="html")]


def setup(app: Any) -> dict[str, bool]:
    """Register the directive with Sphinx."""
    app.add_directive("cost-picture", CostPicture)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
