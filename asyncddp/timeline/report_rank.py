r"""Where the time of one rank goes: compute, communication that it waited for, and the rest.

With :math:`B` the moments in which the caller is held up by communication, :math:`C` those of
forward, backward and optimizer in which it is not, and :math:`T` those in which messages travel or
are mixed by another thread, a step of length :math:`s` is

.. math:: s = |C| + |B| + \text{other}, \qquad \text{hidden} = |T \cap C|.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncddp.errors import ArgumentError
from asyncddp.timeline.report_intervals import Intervals, common, length_within, union
from asyncddp.timeline.report_spans import BACKGROUND, BLOCKING, COMPUTE, Recording, pairs

__all__ = ["Look", "RankReport", "rank_report"]


@dataclass(frozen=True)
class RankReport:
    """The figures of one rank: of a step on average, or of all that was recorded if no steps are.

    Times are milliseconds; what the trace does not tell is None.

    Attributes:
        rank: Whose.
        steps: How many steps the figures are of; None where none were recorded.
        recorded: From its first span to its last.
        step: Length of a step on average, the sum of the next three.
        step_median: Median.
        step_low: A tenth of the steps were shorter.
        step_high: A tenth were longer.
        compute: Forward, backward and optimizer, however they nest, but for what is exposed.
        exposed: The caller was held up by communication, also where a hook in them did that.
        other: The rest: data, the script's own lines, other programs on the machine.
        hidden: Messages travelled, or were mixed by another thread, while it computed.
        waited: For whom it waited how long, the longest first; rank -1 where that is not known.
        sent: Bytes that left it.
        received: Bytes that came.
    """

    rank: int
    steps: int | None
    recorded: float
    step: float | None
    step_median: float | None
    step_low: float | None
    step_high: float | None
    compute: float | None
    exposed: float | None
    other: float | None
    hidden: float | None
    waited: tuple[tuple[int, float], ...] | None
    sent: float | None
    received: float | None

    @property
    def own(self) -> float | None:
        """Time in which communication did not hold it up."""
        return None if self.step is None else self.step - (self.exposed or 0.0)


class Look:
    """Looks at a rank's spans within its steps, or at all of them where there are no steps.

    Args:
        recording: What all ranks did.
        rank: The one to look at.
        skip: Steps of warm-up that are left out; if None, the first where there are more.

    Attributes:
        rank: As given.
        spans: All that it did.
        waits: Its waits, by the rank that came last.
        stepped: Whether there are steps.
        windows: Begin and end of each in µs.

    Raises:
        ArgumentError: If ``skip`` leaves no step.
    """

    def __init__(self, recording: Recording, rank: int, skip: int | None = None) -> None:
        self.rank, self.spans = rank, recording.ranks[rank]
        self.waits, spans = recording.waits_of(rank), self.spans
        steps = pairs(spans.steps)
        self.stepped = len(steps) > 0
        self.windows = np.array([[spans.first, spans.last]])
        if self.stepped:
            skip = int(len(steps) > 1) if skip is None else skip
            if skip >= len(steps):
                raise ArgumentError(
                    f"--skip {skip} leaves nothing of the {len(steps)} steps of rank {rank}; skip "
                    "fewer."
                )
            self.windows = steps[np.argsort(steps[:, 0], kind="stable")][skip:]

    def lengths(self) -> NDArray[np.float64]:
        """How long each window is, in ms."""
        long: NDArray[np.float64] = (self.windows[:, 1] - self.windows[:, 0]) / 1e3
        return long

    def time(self, moments: Intervals) -> float:
        """How long a set of moments lasts in a window on average, in ms."""
        return float(length_within(moments, self.windows).mean()) / 1e3

    def bytes(self, flat: array[float]) -> float:
        """Bytes per window, of what began after the first one's begin and before the last's end."""
        times, counts = pairs(flat).T
        inside = (times >= self.windows[:, 0].min()) & (times < self.windows[:, 1].max())
        return float(counts[inside].sum()) / len(self.windows)


def rank_report(look: Look) -> RankReport:
    """One rank's figures."""
    spans, lengths = look.spans, look.lengths()
    step = median = low = high = None
    if look.stepped:
        step = float(lengths.mean())
        low, median, high = np.quantile(lengths, [0.1, 0.5, 0.9]).tolist()
    compute, exposed, hidden = _parts(look)
    moved = bool(spans.sent or spans.received)
    return RankReport(
        look.rank,
        steps=len(lengths) if look.stepped else None,
        recorded=(spans.last - spans.first) / 1e3,
        step=step,
        step_median=median,
        step_low=low,
        step_high=high,
        compute=compute,
        exposed=exposed,
        other=None if step is None or compute is None else step - compute - (exposed or 0.0),
        hidden=hidden,
        waited=_waited(look),
        sent=look.bytes(spans.sent) if moved else None,
        received=look.bytes(spans.received) if moved else None,
    )


def _parts(look: Look) -> tuple[float | None, float | None, float | None]:
    """Compute, exposed and hidden communication."""
    spans = look.spans
    busy, blocked = spans.moments(*COMPUTE), spans.moments(*BLOCKING)
    background = spans.moments(*BACKGROUND)

    def computing(moments: Intervals) -> float:
        """Time of these moments in which nothing was waited for."""
        return look.time(moments) - look.time(common(moments, blocked))

    compute = computing(busy) if len(busy) else None
    exposed = look.time(blocked) if len(blocked) or len(background) else None
    known = len(busy) and len(background)
    return compute, exposed, computing(common(background, busy)) if known else None


def _waited(look: Look) -> tuple[tuple[int, float], ...] | None:
    """For whom how long, the longest first."""
    waits = {whom: look.time(union(spans)) for whom, spans in look.waits.items()}
    return tuple(sorted(waits.items(), key=lambda pair: -pair[1])) if waits else None
