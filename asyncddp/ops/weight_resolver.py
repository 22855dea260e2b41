"""Weights of one averaging call: validated at once, computed when the call's graph is known."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from asyncddp.errors import ArgumentError
from asyncddp.kernels.weight_row import WeightRow
from asyncddp.ops.validation import check_rank
from asyncddp.tensors.dtypes import DTYPES
from asyncddp.topology import Schedule

Weights: TypeAlias = Mapping[int, float]


class WeightResolver:
    """Chooses the weights of an averaging call: those the caller gave, or the topology's.

    ``place`` is this rank or, with the topology of machines, this machine; ``given`` holds the
    verb's three weight arguments by name: own, sources, targets.
    """

    def __init__(
        self,
        verb: str,
        schedule: Schedule,
        place: int,
        given: Mapping[str, float | Weights | Iterable[int] | None],
        round: int | None,  # noqa: A002 - the field's word
    ) -> None:
        self._verb, self._schedule, self._place, self._round = verb, schedule, place, round
        self._names = list(given)
        own, sources, targets = given.values()
        self._own: float | None = None
        self._sources: dict[int, float] | None = None
        self._targets: dict[int, float] | None = None
        if own is None and sources is None and targets is None:
            return
        if own is None or sources is None:
            there = [name for name, value in given.items() if value is not None]
            raise ArgumentError(
                f"{verb}: arguments {', '.join(given)}: expected none, the first two, or all "
                f"three; got {', '.join(there)}"
            )
        self._own = require_finite(verb, self._names[0], own)
        self._sources = self._checked(1, sources)
        if targets is not None:
            self._targets = self._checked(2, targets)

    def row_at(self, step: int) -> WeightRow:
        """Return the weight row of a round."""
        if self._own is not None and self._sources is not None and self._targets is not None:
            return WeightRow(self._own, self._sources, self._targets)
        number = step if self._round is None else self._round
        near = self._schedule.neighbors(self._place, number)

        def row_of(rank: int) -> tuple[float, Mapping[int, float]]:
            others = self._schedule.neighbors(rank, number)
            return others.self_weight, others.src_weights

        targets = dict.fromkeys(near.dst_ranks, 1.0)
        if self._own is None or self._sources is None:
            return WeightRow(near.self_weight, near.src_weights, targets, row_of)
        strangers = sorted(set(self._sources) - set(near.src_weights))
        if strangers:
            raise ArgumentError(
                f"{self._verb}: argument {self._names[1]}: expected in-neighbours of {self._place} "
                f"in {self._schedule.name}, {sorted(near.src_weights)}, got {strangers}; give "
                f"{self._names[2]} as well to choose neighbours freely"
            )
        every = {peer: self._sources.get(peer, 0.0) for peer in near.src_weights}
        return WeightRow(self._own, every, targets, row_of, by_hand=True)

    def _checked(self, index: int, weights: object) -> dict[int, float]:
        verb, argument = self._verb, self._names[index]
        if index == 2 and isinstance(weights, Iterable) and not isinstance(weights, Mapping):
            ranks = list(weights)
            if len(set(ranks)) != len(ranks):
                raise ArgumentError(
                    f"{verb}: argument {argument}: expected each rank once, got {ranks}"
                )
            weights = dict.fromkeys(ranks, 1.0)
        if not isinstance(weights, Mapping):
            raise ArgumentError(
                f"{verb}: argument {argument}: expected a mapping {{rank: weight}}, got "
                f"{type(weights).__name__}"
            )
        checked = {}
        for rank, weight in weights.items():
            peer = check_rank(verb, argument, rank, self._schedule.n, but=self._place)
            checked[peer] = require_finite(verb, f"{argument}[{peer}]", weight)
        return dict(sorted(checked.items()))


def refuse_scaling(verb: str, argument: str, targets: object, dtype: torch.dtype) -> None:
    """Require send factors of 1 for tensors of a dtype that cannot be scaled."""
    scaled = {r: w for r, w in targets.items() if w != 1} if isinstance(targets, Mapping) else {}
    if scaled:
        name = DTYPES[dtype].name
        raise ArgumentError(
            f"{verb}: argument {argument}: expected 1 for every rank, since {name} values are sent "
            f"as they are, got {scaled}; scale with src_weights, or cast to float first"
        )


def require_finite(verb: str, argument: str, value: object) -> float:
    """Return a number as a float; raise ArgumentError unless it is finite."""
    try:
        result = float(value)  # type: ignore[arg-type]  # whatever float() accepts is welcome
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result):
        raise ArgumentError(f"{verb}: argument {argument}: expected a finite number, got {value!r}")
    return result
