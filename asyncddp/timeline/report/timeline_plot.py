"""Plot of a timeline report: a time bar per rank, and a few typical steps with messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from asyncddp.install_commands import needed_package
from asyncddp.timeline.report.intervals import intersection, union
from asyncddp.timeline.report.timeline_report import TimelineReport
from asyncddp.timeline.report.trace_spans import TimelineSpans, as_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#1f2933", "#7b8794"
_BARS = {"compute": "#2f6f9f", "exposed": "#c0392b", "other": "#dde2e6"}
_HIDDEN = "#f2b134"
_UPPER = {"backward": "#2f6f9f", "forward": "#85b7d9", "optimizer": "#173f5f"}
_LOWER = {
    **dict.fromkeys(("transfer", "collective"), _HIDDEN),
    **dict.fromkeys(("enqueue", "window"), "#b8a9c9"),
    "wait": _BARS["exposed"],
    **dict.fromkeys(("mix", "mixing"), "#3f8f5f"),
}
_NAMES = {"mixing": "mix", "collective": "transfer"}
STEPS = 3  # in the strip
STRIPS = 8  # ranks in the strip
BARS = 64  # ranks with a bar
HEADS = 150  # messages up to which arrows have heads


def draw_timeline(timeline: TimelineSpans, report: TimelineReport) -> Figure:
    """Draw each rank's time by activity, and a few steps of typical length with messages.

    Where there are many ranks, the steps of the slowest and the most waited for are shown.
    """
    with needed_package("a picture needs matplotlib", "plot"):
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    ranks = [one.rank for one in report.ranks]
    first = [rank for rank, _ in report.waited_for[:1] if rank in ranks]
    first += [] if report.slowest is None else [report.slowest]
    shown = sorted(list(dict.fromkeys([*first, *ranks]))[:STRIPS])
    heights = (0.8 + 0.32 * min(len(report.ranks), BARS), 0.9 + 0.62 * len(shown))
    figure = Figure((11, sum(heights) + 1.2), dpi=130, layout=ConstrainedLayoutEngine(h_pad=0.1))
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    _draw_bars(upper, report)
    _draw_strip(lower, timeline, shown)
    return figure


def _style_axes(axes: Axes, title: str, ranks: Sequence[int]) -> None:
    axes.set_title(title, loc="left", size=10, color=INK, weight="bold")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks], size=8, color=INK)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.tick_params(length=0, labelsize=8, labelcolor=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _draw_bars(axes: Axes, report: TimelineReport) -> None:
    ranks = report.ranks[:BARS]
    places, left = range(len(ranks)), np.zeros(len(ranks))
    for name, colour in _BARS.items():
        lengths = np.array([getattr(one, name) or 0.0 for one in ranks])
        axes.barh(places, lengths, 0.7, left=left, color=colour, label=name)
        left += lengths
    hidden, below = [one.hidden or 0.0 for one in ranks], [place + 0.25 for place in places]
    axes.barh(below, hidden, 0.2, color=_HIDDEN, label="hidden (in compute)")
    stepped = any(one.steps for one in ranks)
    more = f" (the first {BARS} of {len(report.ranks)} ranks)" if len(report.ranks) > BARS else ""
    unit = "a step on average" if stepped else "all that was recorded"
    _style_axes(axes, f"Where the time of {unit} goes{more}", [one.rank for one in ranks])
    axes.set_xlabel("milliseconds", size=8, color=FAINT)
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=7, frameon=False, fontsize=8,
        labelcolor=INK, handlelength=1.0, handleheight=0.8, columnspacing=1.2, borderpad=0.1,
    )  # fmt: skip


def find_typical_steps(timeline: TimelineSpans, count: int = STEPS) -> tuple[float, float]:
    """Find consecutive steps of length nearest to the median; return begin and end in µs.

    Without steps, from when 45 to when 55 of a hundred spans have begun.
    """
    for _, spans in sorted(timeline.ranks.items()):
        steps = spans.sorted_steps()
        if len(steps):
            count = min(count, len(steps))
            median = float(np.median(steps[:, 1] - steps[:, 0]))
            long = steps[count - 1 :, 1] - steps[: len(steps) - count + 1, 0]
            k = int(np.argmin(np.abs(long - count * median)))
            return float(steps[k, 0]), float(steps[k + count - 1, 1])
    every = [spans.intervals(kind) for spans in timeline.ranks.values() for kind in spans.kinds]
    begin, end = np.quantile(np.concatenate(every)[:, 0], [0.45, 0.55]).tolist()
    last = max(spans.last for spans in timeline.ranks.values())
    return (begin, end) if end > begin else (begin, last)


def _draw_strip(axes: Axes, timeline: TimelineSpans, ranks: Sequence[int]) -> None:
    """Draw two rows per rank, computation above communication, with arrows between ranks."""
    begin, end = find_typical_steps(timeline)
    window, used = union([(begin, end)]), set()
    for place, rank in enumerate(ranks):
        spans = timeline.ranks[rank]
        for kinds, top, height in ((_UPPER, -0.36, 0.34), (_LOWER, 0.02, 0.28)):
            for kind, colour in kinds.items():
                intervals = (intersection(spans.intervals(kind), window) - begin) / 1e3
                if len(intervals):
                    label = _NAMES.get(kind, kind)
                    named = None if label in used else label
                    used.add(label)
                    bars = [(float(start), float(stop - start)) for start, stop in intervals]
                    row = place + top, height
                    axes.broken_barh(bars, row, linewidth=0, color=colour, label=named)
        for edge in as_rows(spans.steps).ravel():
            if begin <= edge <= end:
                x = (edge - begin) / 1e3
                axes.plot([x, x], [place - 0.42, place + 0.36], color=INK, linewidth=0.7)
    _draw_messages(axes, timeline, ranks, begin, end)
    stepped = any(spans.steps for spans in timeline.ranks.values())
    what = "Steps of usual length" if stepped else "The middle of what was recorded"
    more = f" ({len(ranks)} of {len(timeline.ranks)} ranks)" * (len(ranks) < len(timeline.ranks))
    _style_axes(axes, what + more, ranks)
    axes.set_xlim(0, (end - begin) / 1e3)
    axes.set_xlabel("milliseconds; arrows are messages", size=8, color=FAINT)
    if used:
        _legend(axes)


def _draw_messages(
    axes: Axes, timeline: TimelineSpans, ranks: Sequence[int], begin: float, end: float
) -> None:
    from matplotlib.collections import LineCollection
    from matplotlib.patches import FancyArrowPatch

    rows = as_rows(timeline.arrows, 4)
    rows = rows[(rows[:, 0] < end) & (rows[:, 2] > begin)]
    place = {float(rank): k + 0.16 for k, rank in enumerate(ranks)}
    lines = [
        (((t0 - begin) / 1e3, place[source]), ((t1 - begin) / 1e3, place[target]))
        for t0, source, t1, target in rows.tolist()
        if source in place and target in place
    ]
    if len(lines) > HEADS:
        axes.add_collection(LineCollection(lines, colors=INK, linewidths=0.3, alpha=0.35))
        return
    for start, stop in lines:
        arrow = FancyArrowPatch(
            start, stop, arrowstyle="-|>", mutation_scale=6, linewidth=0.6,
            color=INK, alpha=0.65, shrinkA=0, shrinkB=0, zorder=3,
        )  # fmt: skip
        axes.add_patch(arrow)
