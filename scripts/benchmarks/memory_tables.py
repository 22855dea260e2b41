"""What ranks have found of their memory, as lines of a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.contract import Line
from benchmarks.memory_methods import AIMED
from benchmarks.units import size_text

__all__ = ["Found", "Held", "lines"]


@dataclass(frozen=True)
class Found:
    """What one rank has found.

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
class Held:
    """What the ranks of one method have found."""

    method: str
    ranks: Sequence[Found]
    facts: Mapping[str, Any]

    @property
    def models(self) -> float:
        """The fuller rank's peak, in model sizes."""
        return max(one.beyond for one in self.ranks) / self.ranks[0].model

    @property
    def why(self) -> str:
        """Why it could not be measured, if so."""
        return next((one.why for one in self.ranks if one.why), "")


def lines(held: Sequence[Held]) -> Iterator[Line]:
    """A line for every method; buckets in shared memory have the stricter aim."""
    for one in held:
        shared = all(rank.shared for rank in one.ranks)
        place = "shared memory" if shared else "own memory"
        peak = size_text(max(rank.beyond for rank in one.ranks))
        cells = (one.method, peak, one.models, place)
        if one.method not in AIMED:
            yield Line(cells)
            continue
        limit = 1 if shared else 2
        words = "≤ 1 model, buckets being shared" if shared else "≤ 2 models"
        yield Line(cells, words, one.models <= limit)
