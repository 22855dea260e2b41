"""Record of one rank's training measurements in one monitor report."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """Training measurements of one rank in one report; times are means since the last report.

    Attributes:
        rank: The rank.
        step: Steps that it has made.
        time: When it reported, as of ``time.time()``.
        consensus_distance: How far its parameters are from the average of all ranks', or None.
        consensus_error: Relative standard error of that distance: 0 where it is exact.
        gradient_norm: Of its own gradients of its last step, as backward passes gave them: before
            clipping and averaging, without a GradScaler's factor; None where there were none.
        step_seconds: Time from step to step.
        exposed_seconds: Of that, time in which its thread sent, waited and mixed.
        monitor_seconds: Of that, time spent on monitoring.
        bytes_sent: Payload bytes that it has sent to peers so far.
        staleness: Steps by which the oldest of what it mixed last was behind, all of them where
            nothing has come; None where the method waits for its neighbours.
        departed: Neighbours that have left the averaging, whose weight it gives to itself.
    """

    rank: int
    step: int
    time: float
    consensus_distance: float | None
    consensus_error: float | None
    gradient_norm: float | None
    step_seconds: float
    exposed_seconds: float
    monitor_seconds: float
    bytes_sent: int
    staleness: int | None
    departed: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name; ``departed`` is a list, as in JSON."""
        return {**vars(self), "departed": list(self.departed)}

    def as_json(self) -> str:
        """Return one line of strict JSON; non-finite numbers become strings such as ``"nan"``."""
        strict = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in self.as_dict().items()
        }
        return json.dumps(strict, allow_nan=False)
