"""Formatting and parsing of rank lists in messages, as ranges such as "0–3", shortened if long."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

_MAX_PARTS = 8  # ranges and single ranks in one message


def list_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as sorted ranges: ``rank 5``, ``ranks 0–3, 5``, ``ranks 0, 2, … and 490 more``.

    Example:
        >>> list_ranks([3, 1, 2, 0, 5])
        'ranks 0–3, 5'
        >>> list_ranks(range(0, 512, 2))
        'ranks 0, 2, 4, 6, 8, 10, 12, 14 and 248 more'
    """
    every = sorted(set(ranks))
    parts: list[tuple[str, int]] = []  # ranges, and ranks by themselves in runs of one or two
    for _, items in groupby(enumerate(every), lambda item: item[1] - item[0]):
        run = [rank for _, rank in items]
        if len(run) < 3:
            parts += [(str(rank), 1) for rank in run]
        else:
            parts.append((f"{run[0]}\u2013{run[-1]}", len(run)))
    left = sum(count for _, count in parts[_MAX_PARTS:])
    text = ", ".join(part for part, _ in parts[:_MAX_PARTS])
    return f"rank{'s' * (len(every) != 1)} {text}{f' and {left} more' if left else ''}"


def parse_ranks(text: str) -> list[int]:
    """Parse a complete (not shortened) text of :func:`list_ranks`.

    Example:
        >>> parse_ranks("ranks 0–3, 5")
        [0, 1, 2, 3, 5]
    """
    found: list[int] = []
    for part in text.partition(" ")[2].split(", "):
        first, _, last = part.partition("\u2013")
        found += range(int(first), int(last or first) + 1)
    return found
