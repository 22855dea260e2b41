"""Figures as people read them."""

from __future__ import annotations

__all__ = ["size"]


def size(value: float | None) -> str:
    """Bytes with a unit.

    Example:
        >>> size(19.0), size(20_000.0), size(3.21e7), size(None)
        ('19 B', '20.0 kB', '32.1 MB', '-')
    """
    if value is None:
        return "-"
    if value < 999.5:
        return f"{value:.0f} B"
    for unit in ("kB", "MB"):
        value /= 1e3
        if value < 999.5:
            return f"{value:.{1 + (value < 10)}f} {unit}"
    return f"{value / 1e3:.2f} GB"
