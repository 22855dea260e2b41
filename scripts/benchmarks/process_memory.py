"""Memory that a process holds now and held at its peak, from Linux's /proc."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

_SELF = Path("/proc/self")
Steps = Callable[[int], object]
"""Makes so many steps."""


class MemoryUnknownError(RuntimeError):
    """Error of a system whose /proc lacks the needed fields."""


def _fields(name: str) -> dict[str, int]:
    """The fields of a file of /proc that are in kB, in bytes."""
    try:
        text = (_SELF / name).read_text(encoding="ascii", errors="replace")
    except OSError as problem:
        raise MemoryUnknownError(
            f"/proc/self/{name} cannot be read: {problem.strerror}"
        ) from problem
    found = re.findall(r"^(\w+):\s+(\d+) kB$", text, flags=re.MULTILINE)
    return {key: int(value) * 1024 for key, value in found}


def _not_own() -> int:
    """Bytes in the resident set that are not this process's: files, and others' shared memory.

    Pages that n processes share are each one's to the n-th part, so that the sum is right.
    """
    status, rollup = _fields("status"), _fields("smaps_rollup")
    if "Pss_Shmem" not in rollup or "RssShmem" not in status:
        raise MemoryUnknownError("this kernel does not tell shared memory apart (Linux 5.9 does)")
    return status["RssFile"] + status["RssShmem"] - rollup["Pss_Shmem"]


def own_bytes() -> int:
    """Bytes that this process holds now."""
    return _fields("status")["VmRSS"] - _not_own()


def reset_peak() -> None:
    """Begin anew to look for the peak.

    Raises:
        MemoryUnknownError: The system does not let it.
    """
    try:
        (_SELF / "clear_refs").write_text("5", encoding="ascii")
    except OSError as problem:
        raise MemoryUnknownError(
            f"the peak cannot be reset by /proc/self/clear_refs: {problem.strerror}"
        ) from problem


def own_peak() -> int:
    """The most that this process held since :func:`reset_peak`.

    What is not its own is taken as it is now; call it when that has long been so.
    """
    return _fields("status")["VmHWM"] - _not_own()


def peak_of(make: Callable[[], Steps], steps: int, meet: Callable[[], object]) -> int:
    """The most that this process held in some steps, beyond what it held before.

    Args:
        make: Makes all that is needed for steps.
        steps: How many; half of them are taken apart, when everything has been made.
        meet: Waits for the other ranks, so that none is in the middle of a step.
    """
    meet()
    before = own_bytes()
    reset_peak()
    go = make()
    peaks = []
    for part in (steps - steps // 2, steps // 2):
        go(part)
        meet()
        peaks.append(own_peak())
        reset_peak()
    return max(peaks) - before


def in_shared_memory(tensor: torch.Tensor) -> bool:
    """Return True if a tensor lies in memory that other processes can map."""
    address = tensor.data_ptr()
    for line in (_SELF / "maps").read_text(encoding="utf-8").splitlines():
        span, permissions = line.split(maxsplit=2)[:2]
        start, _, end = span.partition("-")
        if int(start, 16) <= address < int(end, 16):
            return permissions.endswith("s")
    return False
