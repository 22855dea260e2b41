"""Formatting of sizes and times with units."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["size_text", "time_text"]


def _scaled(value: float, base: float, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(value) < base * 0.9995:
            return f"{value:.3g} {unit}"
        value /= base
    return f"{value:.3g} {units[-1]}"


def size_text(nbytes: float) -> str:
    """Such as ``64 KB``."""
    return _scaled(nbytes, 1024, ("B", "KB", "MB", "GB"))


def time_text(seconds: float) -> str:
    """Such as ``4.53 µs``."""
    return _scaled(seconds * 1e6, 1000, ("µs", "ms", "s"))
