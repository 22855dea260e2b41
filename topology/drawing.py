"""Drawing of graphs, and of schedules round by round, with matplotlib."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from .checks import check_int
from .matrices import Array, Matrix, matrix_of
from .schedule import GraphOrSchedule, Schedule, describe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw"]

INK, EDGE, NEGATIVE, FAINT = "#1f2933", "#2f6f9f", "#c0392b", "#7b8794"
PANELS = 8  # rounds shown if not told
ACROSS = 4  # panels in a row
ARROWS = 800  # edges up to which directions are drawn; more would be a blot
LABELS = 64  # ranks up to which numbers are written

Pair = tuple[int, int]


def _places(n: int) -> Array:
    """Place the ranks on the unit circle: rank 0 on top, the others clockwise."""
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / n
    return np.stack([np.cos(angle), np.sin(angle)], axis=1) * (n > 1)


def _edges(matrix: Matrix) -> tuple[dict[Pair, float], dict[Pair, float]]:
    """Split edges into those with the same weight both ways, each once, and all others."""
    weights = {
        (int(j), int(i)): float(w)
        for i, j, w in zip(matrix.rows, matrix.columns, matrix.values, strict=True)
        if i != j and w
    }
    both = {e: w for e, w in weights.items() if e[0] < e[1] and weights.get(e[::-1]) == w}
    single = {e: w for e, w in weights.items() if e not in both and e[::-1] not in both}
    return both, single


def _styles(edges: dict[Pair, float], strongest: float, scale: float) -> list[Any]:
    """Return line width and colour of every edge; ``scale`` below one also fades them."""
    from matplotlib.colors import to_rgba

    opacity = min(0.95, 0.15 + scale)
    return [
        {
            "linewidth": scale * (0.35 + 1.65 * abs(weight) / strongest),
            "color": to_rgba(EDGE if weight > 0 else NEGATIVE, opacity),
        }
        for weight in edges.values()
    ]


def _draw_lines(axes: Axes, places: Array, edges: dict[Pair, float], styles: list[Any]) -> None:
    """Draw edges as straight lines without direction."""
    from matplotlib.collections import LineCollection

    axes.add_collection(
        LineCollection(
            [places[list(edge)] for edge in edges],
            colors=[style["color"] for style in styles],
            linewidths=[style["linewidth"] for style in styles],
            capstyle="round",
            zorder=1,
        )
    )


def _draw_arrows(
    axes: Axes, places: Array, edges: dict[Pair, float], styles: list[Any], radius: float
) -> None:
    """Draw edges as slightly bent arrows, so that opposite edges do not cover each other."""
    from matplotlib.patches import FancyArrowPatch

    for (source, target), style in zip(edges, styles, strict=True):
        axes.add_patch(
            FancyArrowPatch(
                tuple(places[source]),
                tuple(places[target]),
                arrowstyle="-|>",
                mutation_scale=4 + 3.5 * style["linewidth"],
                connectionstyle="arc3,rad=0.15",
                shrinkA=radius,
                shrinkB=radius + 0.5,
                capstyle="round",
                joinstyle="round",
                zorder=1,
                **style,
            )
        )


def _draw_round(axes: Axes, matrix: Matrix, inches: float) -> None:
    """Draw one graph: nodes on a circle, shaded by own weight, and edges."""
    n = matrix.n
    places = _places(n)
    gap = 2 * math.sin(math.pi / n) if n > 1 else 2.0  # between neighbours, in data units
    radius = min(11.0 * inches / 3.2, 0.25 * gap * inches * 72 / 2.5)  # of a node, in points
    both, single = _edges(matrix)
    strongest = max((abs(w) for w in (*both.values(), *single.values())), default=1.0)
    scale = min(1.0, (24 / (len(both) + len(single) + 1)) ** 0.5) * inches / 3.2
    _draw_lines(axes, places, both, _styles(both, strongest, scale))
    styles = _styles(single, strongest, scale)
    if len(single) <= ARROWS:
        _draw_arrows(axes, places, single, styles, radius)
    else:
        _draw_lines(axes, places, single, styles)
    own = matrix.values[matrix.rows == matrix.columns]
    axes.scatter(
        places[:, 0], places[:, 1], s=(2 * radius) ** 2, c=np.clip(own, 0, 1), cmap="Blues",
        vmin=0, vmax=1.6, edgecolors=INK, linewidths=min(1.0, radius / 6), zorder=2,
    )  # fmt: skip
    if n <= LABELS:
        for rank, (x, y) in enumerate(places):
            axes.text(
                x, y, str(rank), size=radius * (1.05 if n <= 10 else 0.88),
                color=INK, ha="center", va="center_baseline", zorder=3,
            )  # fmt: skip
    axes.set_xlim(-1.15, 1.15)
    axes.set_ylim(-1.15, 1.15)
    axes.set_aspect("equal")
    axes.set_axis_off()


def _rounds_shown(graph_or_schedule: GraphOrSchedule, rounds: int | None) -> int:
    """Return the number of panels."""
    if not isinstance(graph_or_schedule, Schedule):
        return 1
    if rounds is not None:
        return check_int(rounds, "rounds", "draw", 1)
    return min(graph_or_schedule.period or PANELS, PANELS)


def draw(graph_or_schedule: GraphOrSchedule, rounds: int | None = None) -> Figure:
    """Draw a graph on a circle, or a schedule as a strip of rounds.

    Lines are edges with equal weights both ways, arrows point from sender to receiver (without
    heads above 800); the wider, the greater the weight, red if negative. The darker a node, the
    greater its own weight.

    Args:
        graph_or_schedule: What to draw.
        rounds: How many rounds of a schedule; one period, at most 8, if None.

    Returns:
        A ``matplotlib.figure.Figure``: ``draw(graph).savefig("graph.png")``.

    Raises:
        TopologyError: If the graph does not pass :func:`.topology.check_graph` or ``rounds`` is
            below one.
        ImportError: If matplotlib is missing.

    Example:
        >>> from asyncddp import topology
        >>> figure = draw(topology.base_k(6, 1))
        >>> len(figure.axes)
        4
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError(
            "topology.draw needs matplotlib; install it: pip install 'matplotlib>=3.8'"
        ) from None
    shown = _rounds_shown(graph_or_schedule, rounds)
    across = min(shown, ACROSS)
    down = -(-shown // across)
    inches = 4.6 if shown == 1 else 2.7
    figure = Figure((inches * across, inches * down + 0.7), dpi=150, layout="constrained")
    figure.suptitle(describe(graph_or_schedule), size=12, color=INK, weight="bold")
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for k, axes in enumerate(panels[:shown]):
        _draw_round(axes, matrix_of(graph_or_schedule, k), inches)
        if shown > 1:
            axes.set_title(f"round {k}", size=9, color=FAINT, pad=2)
    for axes in panels[shown:]:
        axes.remove()
    figure.supxlabel(_caption(graph_or_schedule, shown), size=8, color=FAINT)
    return figure


def _caption(graph_or_schedule: GraphOrSchedule, shown: int) -> str:
    """Format the caption below the picture."""
    if not isinstance(graph_or_schedule, Schedule):
        return "darker node: greater own weight · wider line: greater weight"
    if graph_or_schedule.period is None:
        return f"the first {shown} rounds of a schedule that never repeats"
    if shown < graph_or_schedule.period:
        return f"the first {shown} of {graph_or_schedule.period} rounds, which then repeat"
    return "one period, which then repeats"
