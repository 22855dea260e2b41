"""The tree of exceptions is the one that its module draws."""

from __future__ import annotations

import re

import pytest

from asyncddp import errors

BUILT_IN = {
    "NotInitializedError": RuntimeError,
    "ArgumentError": ValueError,
    "UnknownNameError": KeyError,
    "DtypeError": TypeError,
    "PeerError": RuntimeError,
    "WaitTimeoutError": TimeoutError,
    "EnvironmentProblem": RuntimeError,
}


def drawn_parents():
    """``{name: parent}`` as the drawing has it, by indentation."""
    parents, path = {}, []
    for line in errors.__doc__.splitlines():
        found = re.match(r"^    ([│├└─ ]*)(\w+(?:Error|Problem))\b", line)
        if found:
            depth = len(found[1]) // 4
            path = [*path[:depth], found[2]]
            parents[found[2]] = path[-2] if depth else None
    return parents


def test_the_drawing_names_every_exception_with_its_parent():
    """The tree in the module's docstring has exactly its exceptions under their bases."""
    parents = drawn_parents()
    assert set(parents) == {name for name, value in vars(errors).items() if isinstance(value, type)}
    for name, parent in parents.items():
        ancestors = [base.__name__ for base in getattr(errors, name).__mro__]
        assert (parent or "Exception") in ancestors[1:]


@pytest.mark.parametrize(("name", "base"), BUILT_IN.items())
def test_errors_are_also_python_s_own(name, base):
    """So that ``except TimeoutError`` and the like work."""
    assert issubclass(getattr(errors, name), base)


def test_an_unknown_name_reads_like_a_sentence():
    """Not like a ``KeyError``, which prints its message quoted."""
    assert str(errors.UnknownNameError("no 'x' here")) == "no 'x' here"


def test_a_rank_error_has_its_rank():
    """A RankError has the rank as an attribute, and its message alone as text."""
    error = errors.RankError(3, "rank 3 raised")
    assert (error.rank, str(error)) == (3, "rank 3 raised")
