"""Pair-wise parameters: every pair of values of any two parameters occurs, and few rows do it."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.pairwise import by_transport, pairs_of, pairwise, rows_of_pairs


@pytest.mark.parametrize("counts", [(2,), (3, 4), (2, 2, 2), (6, 2, 2, 7), (4, 3, 2, 3), (1, 1, 5)])
def test_every_pair_occurs(counts):
    """And every value of a parameter that stands alone."""
    rows = rows_of_pairs(counts)
    assert len(rows) == len(set(rows))
    for one, other in combinations(range(len(counts)), 2):
        found = {(row[one], row[other]) for row in rows}
        assert found == set(product(range(counts[one]), range(counts[other])))
    if len(counts) > 1:
        two_largest = sorted(counts)[-2:]
        assert len(rows) <= 1.5 * two_largest[0] * two_largest[1]


@pairwise(world=["loopback-2", "mpi-2"], kind={"none": None, "some": 1}, form=["a", "b"])
def marked():
    """Not a test: its marks are looked at."""


def test_worlds_are_indirect_and_marked_and_values_have_their_ids():
    """What ``on`` gives worlds, they have here too."""
    (mark,) = marked.pytestmark
    names, rows = mark.args
    assert names == ["world", "kind", "form"]
    assert mark.kwargs == {"indirect": ["world"], "scope": "session"}
    assert [row.id for row in rows][:2] == ["loopback-2-none-a", "loopback-2-some-b"]
    names = {row.values[0]: [mark.name for mark in row.marks] for row in rows}
    assert names == {"loopback-2": ["exhaustive"], "mpi-2": ["mpi"]}


@by_transport(kind=["a", "b"])
def by_kind():
    """Not a test: its marks are looked at."""


def test_each_value_meets_each_transport_on_numbers_of_ranks_in_turn():
    """The first value meets the least number of ranks of each transport, the second the next."""
    (mark,) = by_kind.pytestmark
    assert mark.kwargs == {"indirect": ["world"], "scope": "session"}
    assert [row.id for row in mark.args[1]] == [
        *("loopback-1-a", "mpi-2-a", "shared_memory-2-a"),
        *("loopback-4-b", "mpi-2-b", "shared_memory-2-b"),
    ]
    left = [row.id for row in mark.args[1] if "exhaustive" in {mark.name for mark in row.marks}]
    assert left == ["shared_memory-2-a", "shared_memory-2-b"]


_USED = []


@pairwise(world=["loopback-2"], kind=["a", "b"])
def test_rows_of_one_world_have_the_same_ranks(world, kind):
    """The world of the first row is that of the second, whose ranks are not started anew."""
    _USED.append(world)
    assert all(one is world for one in _USED)


def test_pairs_of_values_for_loops_within_a_case():
    """Values themselves, in rows that are the same in every process."""
    rows = pairs_of("ab", [1, 2], (None, True))
    assert rows == [("a", 1, None), ("a", 2, True), ("b", 1, True), ("b", 2, None)]
