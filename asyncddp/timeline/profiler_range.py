"""Named ranges in torch's profiler and, through NVTX, in NVIDIA's tools."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import profiler


class ProfilerRange:
    """Context manager that marks its block as a range in torch's profiler and for NVTX."""

    def __init__(self, name: str, *, nvtx: bool = False) -> None:
        self._name, self._nvtx = name, nvtx
        self._function: profiler.record_function | None = None

    def __enter__(self) -> None:
        if profiler._is_profiler_enabled:
            self._function = profiler.record_function(self._name)
            self._function.__enter__()  # type: ignore[no-untyped-call]
        if self._nvtx:
            torch.cuda.nvtx.range_push(self._name)  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        if self._nvtx:
            torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
        if self._function is not None:
            self._function.__exit__(*error)
