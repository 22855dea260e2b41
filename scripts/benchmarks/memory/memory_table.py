"""Ranks' peak memory as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.memory.training_methods import LIMITS, LOCAL
from benchmarks.tables import FigureRow
from benchmarks.unit_text import size_text

__all__ = ["MethodMemory", "RankMemory", "lines"]


@dataclass(frozen=True)
class RankMemory:
    """Memory measured on one rank.

    Attributes:
        model: Bytes of the model.
        beyond: Bytes at the peak beyond model, gradients and the optimizer's state.
        shared: Whether the parameters lie in shared memory.
        why: Why nothing could be measured, if so.
    """

    model: int = 0
    beyond: int = 0
    shared: bool = False
    why: str = ""


@dataclass(frozen=True)
class MethodMemory:
    """Memory measured on all ranks with one method."""

    method: str
    ranks: Sequence[RankMemory]
    facts: Mapping[str, Any]

    @property
    def models(self) -> float:
        """The fuller rank's peak, in model sizes."""
        return max(one.beyond for one in self.ranks) / self.ranks[0].model

    @property
    def why(self) -> str:
        """Why it could not be measured, if so."""
        return next((one.why for one in self.ranks if one.why), "")


def lines(held: Sequence[MethodMemory]) -> Iterator[FigureRow]:
    """A line for every method, judged by what it takes beyond a local step."""
    local = next((one.models for one in held if one.method == LOCAL), 0.0)
    for one in held:
        shared = all(rank.shared for rank in one.ranks)
        place = "shared memory" if shared else "own memory"
        peak = size_text(max(rank.beyond for rank in one.ranks))
        beyond, limit = one.models - local, LIMITS.get(one.method)
        cells = (one.method, peak, one.models, beyond, place)
        if limit is None:
            yield FigureRow(cells)
        else:
            yield FigureRow(cells, f"≤ {limit:g} models", beyond <= limit)
