"""Formatting of byte counts with a unit."""

from __future__ import annotations


def format_bytes(value: float | None) -> str:
    """Format a number of bytes with a unit.

    Example:
        >>> format_bytes(19.0), format_bytes(20_000.0), format_bytes(3.21e7), format_bytes(None)
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
