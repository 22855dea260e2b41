"""Lists of ranks in messages: short whatever the number of ranks."""

from __future__ import annotations

import pytest

from asyncddp.rank_list_text import list_ranks


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([5], "rank 5"),
        ([1, 0], "ranks 0, 1"),
        ([3, 1, 2, 0, 5, 5], "ranks 0\u20133, 5"),
        ([*range(64), *range(65, 512)], "ranks 0\u201363, 65\u2013511"),
        (range(0, 16, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14"),
        (range(0, 18, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 1 more"),
        ([*range(0, 16, 2), *range(20, 30)], "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 10 more"),
    ],
)
def test_ranks_are_ranges_with_an_end(ranks, expected):
    """Ranks are sorted without duplicates, as ranges from three on, eight parts at most."""
    assert list_ranks(iter(ranks)) == expected


def test_no_list_is_longer_than_a_line():
    """50,000 ranks without any two in a row are told in less than 100 characters."""
    every_other = list_ranks(range(99_999, 0, -2))
    assert len(every_other) < 100
