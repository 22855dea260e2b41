"""Timer of training steps, by the host's clock or by CUDA events."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepTimer:
    """Timer of consecutive steps on one device, which never makes a step wait for the GPU.

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
        """True if a step has been marked."""
        return bool(self._marks)

    def __len__(self) -> int:
        """Number of steps between marks."""
        return max(0, len(self._marks) - 1)

    def mark(self) -> None:
        """Mark the end of a step and the start of the next."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def durations(self) -> list[float]:
        """Wait for the GPU to finish the last step; return the seconds of each step."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type != "cuda":
            return [end - start for start, end in pairs]
        if pairs:
            self._marks[-1].synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def clear(self) -> None:
        """Forget all marks."""
        self._marks.clear()
