"""The timeline's names in other people's tools: torch's profiler, and NVIDIA's by NVTX."""

from __future__ import annotations

from types import TracebackType

import torch
from torch.autograd import profiler

__all__ = ["Range", "profiled", "reaches_nvtx"]


def profiled() -> bool:
    """Whether a profiler of torch is on."""
    return bool(profiler._is_profiler_enabled)


def reaches_nvtx(*, wanted: bool) -> bool:
    """Whether marks by NVTX are wanted, and reach somebody: there is CUDA."""
    return wanted and torch.cuda.is_available()


class Range:
    """What happens inside has a name there.

    Args:
        name: The name.
        nvtx: Whether NVIDIA's tools shall see it as well.

    Example:
        >>> from torch.profiler import profile
        >>> with profile() as profiled, Range("MIX"):
        ...     _ = torch.ones(2).sum()
        >>> any(event.key == "MIX" for event in profiled.key_averages())
        True
    """

    def __init__(self, name: str, *, nvtx: bool = False) -> None:
        self._name, self._nvtx = name, nvtx
        self._function: profiler.record_function | None = None

    def __enter__(self) -> None:
        if profiled():
            self._function = profiler.record_function(self._name)
            self._function.__enter__()  # type: ignore[no-untyped-call]
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if self._function is not None:
            self._function.__exit__(kind, error, trace)
