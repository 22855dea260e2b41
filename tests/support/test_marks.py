"""Which tests the default run leaves to ``scripts/test all``."""

from __future__ import annotations

import pytest

from tests.support.marks import WHOLE_PROGRAMS, on, parameters
from tests.support.processes import REPO
from tests.support.worlds import DEFAULT_WORLDS, WORLDS


def default_of(names, **options):
    rows = parameters(names, **options)
    return [row.id for row in rows if "exhaustive" not in {mark.name for mark in row.marks}]


@pytest.mark.parametrize(
    ("names", "default"),
    [
        (WORLDS, DEFAULT_WORLDS),
        (["loopback-1", "loopback-2", "loopback-4"], ["loopback-4"]),
        (["mpi-4", "loopback-4"], ["loopback-4"]),
        (["loopback-2"], ["loopback-2"]),
        (["shared_memory-2", "shared_memory-4"], ["shared_memory-2"]),
        (["shared_memory-4"], []),
    ],
)
def test_a_test_runs_on_default_worlds_or_else_on_its_first(names, default):
    """What wants more processes than two is left to ``scripts/test all``."""
    assert default_of(names) == list(default)


def test_laws_of_transports_are_tried_on_all_of_them():
    """Others leave four processes to nightly runs, where two have tried the law."""

    def at_night(**options):
        rows = on("mpi", "loopback", **options).args[1]
        return [row.id for row in rows if "nightly" in {mark.name for mark in row.marks}]

    assert at_night() == ["mpi-4"]
    assert at_night(always=True) == []
    assert on("mpi", always=True).args[1] == parameters(["mpi-2", "mpi-4"], always=True)


def test_programs_that_are_left_out_are_there():
    """A file that was renamed would be run by default."""
    assert [path for path in WHOLE_PROGRAMS if not (REPO / path).exists()] == []
