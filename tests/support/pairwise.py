"""Pairs of parameters instead of their full product.

A fault that parameters bring about is nearly always one of a value or of a pair of values. So a
test of many parameters runs on rows in which every pair of values of any two of them occurs::

    @pairwise(world=ALL_WORLDS, method=METHODS, check={"plain": False, "checked": True})
    def test_law(world, method, check): ...
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.support.marks import parameters
from tests.support.worlds import EVERYWHERE, WORLDS

__all__ = ["by_transport", "pairs_of", "pairwise", "rows_of_pairs"]

_WORLDS: dict[str, Any] = {"indirect": ["world"], "scope": "session"}
"""How ``world`` is parametrized beside others: without a scope each test would start ranks anew."""


def rows_of_pairs(counts: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of one index for each parameter, in which every pair of indices of any two occurs.

    Each row is the first that has the most pairs which no row before it has.

    Args:
        counts: How many values each parameter has.

    Example:
        >>> rows_of_pairs([2, 2, 2])
        [(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0)]
    """
    size = min(2, len(counts))
    left = {row: set(combinations(enumerate(row), size)) for row in product(*map(range, counts))}
    rows = []
    while left:
        best = max(left, key=lambda row: len(left[row]))
        covered = left.pop(best)
        rows.append(best)
        left = {row: pairs - covered for row, pairs in left.items() if pairs - covered}
    return rows


def pairs_of(*columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each column, in which every pair of values of any two occurs.

    For loops within a case: ``for shape, form in pairs_of(SHAPES, FORMS)``.
    """
    rows = rows_of_pairs([len(column) for column in columns])
    return [
        tuple(column[index] for column, index in zip(columns, row, strict=True)) for row in rows
    ]


def pairwise(**given: Collection[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by rows in which every pair of two parameters' values occurs.

    Args:
        **given: The values of each parameter, or a mapping of their ids to them. The values of
            ``world`` are names of :data:`tests.support.worlds.WORLDS`.
    """
    columns = [_values(name, values) for name, values in given.items()]
    rows = [
        pytest.param(
            *(column[index].values[0] for column, index in zip(columns, row, strict=True)),
            id="-".join(str(column[index].id) for column, index in zip(columns, row, strict=True)),
            marks=[
                mark
                for column, index in zip(columns, row, strict=True)
                for mark in column[index].marks
            ],
        )
        for row in rows_of_pairs([len(column) for column in columns])
    ]
    return pytest.mark.parametrize(list(given), rows, **(_WORLDS if "world" in given else {}))


def by_transport(
    worlds: Collection[str] = EVERYWHERE, /, **given: Collection[Any]
) -> pytest.MarkDecorator:
    """Parametrize a test so that each value meets each transport, on numbers of ranks in turn.

    The default run takes threads, the transport of the first process world, and no other.

    Args:
        worlds: The numbers of ranks, by names of :data:`tests.support.worlds.WORLDS`.
        **given: The one other parameter and its values, which are shown as their ``str``.
    """
    ((name, values),) = given.items()
    sizes: dict[str, list[str]] = {}
    for world in worlds:
        sizes.setdefault(WORLDS[world][0], []).append(world)
    usual = [name for name in sizes if name == "loopback"] + [
        name for name in sizes if name != "loopback"
    ][:1]
    rows = [
        pytest.param(
            world.values[0],
            value,
            marks=[*world.marks, *([] if transport in usual else [pytest.mark.exhaustive])],
            id=f"{world.id}-{value}",
        )
        for number, value in enumerate(values)
        for transport, names in sizes.items()
        for world in parameters([names[number % len(names)]])
    ]
    return pytest.mark.parametrize(("world", name), rows, **_WORLDS)


def _values(name: str, values: Collection[Any]) -> list[Any]:
    """The values of a parameter as pytest's, each with an id."""
    if name == "world":
        return parameters(values)
    if isinstance(values, Mapping):
        return [pytest.param(value, id=key) for key, value in values.items()]
    return [pytest.param(value, id=str(value)) for value in values]
