"""Digits of the laboratory, shared out among ranks."""

from __future__ import annotations

import pytest

from asyncddp import simulate
from asyncddp.errors import ArgumentError

pytest.importorskip("sklearn")


def _labels_of_ranks(problem):
    return [set(targets.tolist()) for _, targets in problem.data]


@pytest.mark.parametrize(
    ("labels_per_rank", "most", "title"),
    [(1, 2, "digits, 10 ranks, 1 label each"), (2, 4, "digits, 10 ranks, 2 labels each")],
)
def test_ranks_have_few_labels(labels_per_rank, most, title):
    """A shard may reach into the next label, no further; together they are all images."""
    problem = simulate.digits(10, labels_per_rank=labels_per_rank, seed=3)
    found = _labels_of_ranks(problem)
    assert all(labels_per_rank <= len(labels) <= most for labels in found)
    assert set().union(*found) == set(range(10))
    assert sum(len(targets) for _, targets in problem.data) == 1348
    assert problem.name == title


def test_images_are_shared_out_evenly_by_default():
    """Each rank has all ten labels."""
    assert all(len(labels) == 10 for labels in _labels_of_ranks(simulate.digits(10)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"alpha": 0.1, "labels_per_rank": 2},
            r"arguments alpha and labels_per_rank: expected one way .* got 0.1 and 2",
        ),
        ({"labels_per_rank": 0}, r"argument labels_per_rank: expected 1 to 10 .* got 0"),
        ({"labels_per_rank": 11}, r"argument labels_per_rank: expected 1 to 10 .* got 11"),
        (
            {"ranks": 300, "labels_per_rank": 5},
            r"expected 1 to 4 with 300 ranks, which share ten labels and 1348 images, got 5",
        ),
    ],
)
def test_what_cannot_be_shared_out_is_named(settings, message):
    """Two ways at once, and labels or images that there are too few of."""
    with pytest.raises(ArgumentError, match=message):
        simulate.digits(**{"ranks": 4, **settings})
