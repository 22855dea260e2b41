"""Record of a rank that has exited, as ranks of one process share it or keep it each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class ExitRecord(NamedTuple):
    """Record of a rank that has exited: why, when, and after how many collectives of each kind."""

    reason: str
    collective_counts: Mapping[str, int]  # of each kind, before its exit
    since: float
    failed: bool = False
