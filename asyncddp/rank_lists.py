"""Formats and parses lists of ranks in messages, as ranges such as "0–3", shortened if long."""

from __future__ import annotations

from collections.abc import Iterable

_MAX_PARTS = 8  # ranges and single ranks in one message


def list_ranks(ranks: Iterable[int]) -> str:
    """Format ranks as sorted ranges: ``rank 5``, ``ranks 0–3, 5``, ``ranks 0, 2, … and 490 more``.

    Args:
        ranks: Ranks in any order; repeats count once.

    Example:
        >>> list_ranks([3, 1, 2, 0, 5])
        'ranks 0–3, 5'
        >>> list_ranks(range(0, 512, 2))
        'ranks 0, 2, 4, 6, 8, 10, 12, 14 and 248 more'
    """
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [part for run in runs for part in _format_run(run)]
    left = sum(len(run) for _, run in parts[_MAX_PARTS:])
    text = ", ".join(part for part, _ in parts[:_MAX_PARTS])
    many = sum(len(run) for run in runs) != 1
    return f"rank{'s' * many} {text}{f' and {left} more' if left else ''}"


def parse_ranks(text: str) -> list[int]:
    """Parse a text of :func:`list_ranks` that was not cut short.

    Example:
        >>> parse_ranks("ranks 0–3, 5")
        [0, 1, 2, 3, 5]
    """
    found: list[int] = []
    for part in text.partition(" ")[2].split(", "):
        first, _, last = part.partition("\u2013")
        found += range(int(first), int(last or first) + 1)
    return found


def _format_run(run: list[int]) -> list[tuple[str, list[int]]]:
    """Format a run of ranks as a range, or one by one where it is shorter than three."""
    if len(run) < 3:
        return [(str(rank), [rank]) for rank in run]
    return [(f"{run[0]}\u2013{run[-1]}", run)]
