"""Agreement of ranks: equal facts cost one gathering, others are named with both ranks."""

import pytest

from asyncddp.agreement import agree, compare
from asyncddp.errors import MismatchError


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["a", "b"], ["a", "c"], "rank 0 has b, and rank 1 has c"),
        (["a"], ["a", "b"], "rank 0 has nothing more, and rank 1 has b"),
        ({"x": "1"}, {"x": "2"}, "x is 1 on rank 0 and 2 on rank 1"),
        ({"x": "1"}, {}, "rank 0 has x, which rank 1 has not"),
        ({}, {"x": "1"}, "rank 1 has x, which rank 0 has not"),
        (
            {name: "1" for name in "abcdefg"},
            {name: "2" for name in "abcdefg"},
            "e is 1 on rank 0 and 2 on rank 1; 2 more differ",
        ),
    ],
)
def test_what_differs_is_named_with_the_ranks_and_a_remedy(first, second, words):
    """The claim stands before it, the remedy behind."""
    with pytest.raises(MismatchError, match=r"^all need the same, but ") as caught:
        compare([first, second], "all need the same", "; set it alike")
    assert words in str(caught.value)
    assert str(caught.value).endswith("; set it alike")


@pytest.mark.parametrize("facts", [["a", "b"], {"x": "1"}])
def test_equal_facts_are_compared_by_their_digests_alone(facts):
    """Which are short, whatever the facts are."""
    gathered = []

    def gather(mine, kind):
        gathered.append(kind)
        return [mine, mine]

    agree(gather, facts, "all need the same")
    assert gathered == [str]


def test_facts_travel_where_the_digests_differ():
    """And every rank raises the same."""

    def gather(mine, kind):
        return ["one", "other"] if kind is str else [mine, ["c"]]

    with pytest.raises(MismatchError, match="but rank 0 has a, and rank 1 has c"):
        agree(gather, ["a"], "all need the same")
