"""Partitions: every sample in exactly one part, by seed, with the heterogeneity asked for."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncddp.data import partition
from asyncddp.errors import ArgumentError, EnvironmentProblem

LABELS = np.random.default_rng(7).permutation(np.repeat(np.arange(10), 180))
WAYS = {
    "uniform": lambda n, seed: partition.uniform(len(LABELS), n, seed=seed),
    "dirichlet 0.1": lambda n, seed: partition.dirichlet(LABELS, n, 0.1, seed=seed),
    "dirichlet 100": lambda n, seed: partition.dirichlet(LABELS, n, 100, seed=seed),
    "dirichlet 0.1, equal": (
        lambda n, seed: partition.dirichlet(LABELS, n, 0.1, equal_sizes=True, seed=seed)
    ),
    "shards": lambda n, seed: partition.shards(LABELS, n, seed=seed),
    "by_group": lambda n, seed: partition.by_group(np.arange(len(LABELS)) // 9, n, seed=seed),
}
every_way = pytest.mark.parametrize("way", list(WAYS))


def equal(one, other):
    """Whether two partitions are the same."""
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@every_way
@pytest.mark.parametrize("n", [1, 4, 7, 32])
def test_every_sample_is_in_exactly_one_part(way, n):
    """The parts, put together and sorted, are all indices once; each part is ascending int64."""
    parts = WAYS[way](n, 3)
    assert len(parts) == n
    assert all(part.dtype == np.int64 and len(part) for part in parts)
    assert all((np.diff(part) > 0).all() for part in parts)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@every_way
def test_a_seed_gives_the_same_parts_and_another_seed_gives_others(way):
    """Partitions are functions of their arguments and seed alone."""
    assert equal(WAYS[way](8, 1), WAYS[way](8, 1))
    assert not equal(WAYS[way](8, 1), WAYS[way](8, 2))


@every_way
def test_equal_parts_differ_by_one_sample(way):
    """All ways but Dirichlet proportions without equal_sizes give parts of about the same size."""
    sizes = [len(part) for part in WAYS[way](7, 0)]
    if way.startswith("dirichlet") and not way.endswith("equal"):
        assert max(sizes) - min(sizes) > 10
    else:
        assert max(sizes) - min(sizes) <= {"shards": 2, "by_group": 9}.get(way, 1)


@pytest.mark.parametrize("equal_sizes", [False, True])
def test_heterogeneity_falls_with_alpha(equal_sizes):
    """The distance of a part's labels to those of all: large at 0.01, none as alpha grows."""

    def distance(alpha):
        parts = partition.dirichlet(LABELS, 8, alpha, equal_sizes=equal_sizes, min_size=0)
        counts = partition.label_counts(LABELS, parts)
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        return np.abs(shares - 0.1).sum(axis=1).mean() / 2

    strong, moderate, weak, none = map(distance, (0.01, 1.0, 100.0, 1e9))
    assert strong > moderate > weak > none
    assert strong > 0.6
    assert none < 0.02 if equal_sizes is False else none < 0.2  # multinomial counts of 225 samples


def test_without_equal_sizes_a_large_alpha_splits_each_label_evenly():
    """alpha → ∞: every part has the same count of every label, up to rounding."""
    parts = partition.dirichlet(LABELS, 9, 1e12)
    counts = partition.label_counts(LABELS, parts)
    assert np.abs(counts - 20).max() <= 1


def test_with_equal_sizes_a_tiny_alpha_gives_single_labels_while_there_are_enough():
    """alpha → 0: a part that has the choice takes one label only."""
    parts = partition.dirichlet(LABELS, 10, 1e-4, equal_sizes=True)
    labels_of_parts = (partition.label_counts(LABELS, parts) > 0).sum(axis=1)
    assert np.median(labels_of_parts) <= 2


def test_min_size_is_kept():
    """Proportions are drawn again until every part has so many samples."""
    sizes = {len(part) for part in partition.dirichlet(LABELS, 8, 0.3, min_size=60)}
    assert min(sizes) >= 60


def test_a_part_has_few_labels_with_shards():
    """Two shards of one label each: at most two labels, where shards do not cross labels."""
    parts = partition.shards(LABELS, 45, 2)
    assert (partition.label_counts(LABELS, parts) > 0).sum(axis=1).max() <= 2


def test_a_group_stays_together():
    """All samples of a writer are in one part, and the largest groups are spread."""
    groups = np.random.default_rng(1).choice(["ann", "bob", "cy", "dan", "eve"], 200)
    parts = partition.by_group(groups, 3)
    homes = [set(groups[part]) for part in parts]
    assert sum(map(len, homes)) == 5
    assert set.union(*homes) == set(groups)


def test_labels_may_be_tensors_or_lists():
    """Whatever numpy makes a vector of."""
    tensor, strings = torch.tensor(LABELS), [f"digit {label}" for label in LABELS]
    wanted = partition.dirichlet(LABELS, 4, 0.5)
    assert equal(partition.dirichlet(tensor, 4, 0.5), wanted)
    assert equal(partition.dirichlet(strings, 4, 0.5), wanted)


@pytest.mark.parametrize("n", [4, 64])
def test_a_partition_of_real_digits_trains_every_rank(n):
    """Digits of scikit-learn, 1,797 of them: each of up to 64 ranks gets its own labels."""
    found = importlib.util.find_spec("sklearn")  # importing it would take seconds
    if found is None or found.origin is None:
        pytest.skip("needs the digits of scikit-learn, which is not installed")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz"
    labels = np.loadtxt(file, delimiter=",")[:, -1].astype(int)
    parts = partition.dirichlet(labels, n, 0.1, equal_sizes=True, seed=2)
    assert {len(part) for part in parts} <= {len(labels) // n, len(labels) // n + 1}
    few = (partition.label_counts(labels, parts) > 0).sum(axis=1)
    assert np.median(few) < 6


def test_a_picture_has_a_bar_for_each_label_and_part():
    """The heights of the bars are the counts, those of a part add up to its size."""
    pytest.importorskip("matplotlib")
    parts = partition.dirichlet(LABELS, 5, 0.2)
    (axes,) = partition.draw(LABELS, parts).axes
    heights = np.array([[bar.get_height() for bar in bars] for bars in axes.containers])
    assert np.array_equal(heights.T, partition.label_counts(LABELS, parts))


def test_a_picture_without_matplotlib_names_the_package(monkeypatch):
    """The error has the install command."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentProblem, match=r"partition\.draw needs matplotlib.*pip install"):
        partition.draw([0, 1], [[0], [1]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: partition.uniform(3, 4), "4 parts need at least 4 samples, got 3"),
        (lambda: partition.uniform(3, 0), "argument parts: expected a whole number of at least 1"),
        (lambda: partition.dirichlet(LABELS, 4, 0.0), "argument alpha: expected a number above 0"),
        (lambda: partition.dirichlet(LABELS, 4, -1), "argument alpha: expected a number above 0"),
        (lambda: partition.dirichlet(LABELS, 4, float("inf")), "uniform"),
        (lambda: partition.dirichlet(LABELS, 4, 1, min_size=451), "expected from 0 to 450"),
        (lambda: partition.dirichlet(LABELS, 64, 0.01, min_size=20), "equal_sizes=True"),
        (lambda: partition.dirichlet([[1]], 1, 1.0), r"got shape \(1, 1\)"),
        (lambda: partition.dirichlet([], 1, 1.0), r"got shape \(0,\)"),
        (lambda: partition.shards([1, 2, 3], 2), "expected at most 1 parts"),
        (lambda: partition.shards(LABELS, 2, 0), "argument shards_per_part"),
        (lambda: partition.by_group(["a", "b", "a"], 3), "3 parts need at least 3 groups, got 2"),
    ],
)
def test_mistakes_are_named_with_the_remedy(call, message):
    """Each error says which argument, what was expected, and what came."""
    with pytest.raises(ArgumentError, match=message):
        call()
