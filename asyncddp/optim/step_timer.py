"""Timer of training steps: by the host's clock, or by events in the GPU's stream."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepTimer:
    """Timer of consecutive steps on one device; no step waits for the GPU because of it.

    Args:
        device: Where the parameters are.

    Example:
        >>> timer = StepTimer(torch.device("cpu"))
        >>> for _ in range(4):
        ...     timer.mark()
        >>> len(timer.durations())
        3
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    @property
    def started(self) -> bool:
        """True if there is a mark."""
        return bool(self._marks)

    def __len__(self) -> int:
        """Number of steps between marks."""
        return max(0, len(self._marks) - 1)

    def mark(self) -> None:
        """Note that a step has ended and the next one begins."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def durations(self) -> list[float]:
        """Return the seconds of each step, once the GPU has come to the end of the last."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type != "cuda":
            return [end - start for start, end in pairs]
        if pairs:
            self._marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def clear(self) -> None:
        """Forget all marks."""
        self._marks.clear()
