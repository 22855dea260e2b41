"""scripts/lib/changed_tests.py: a change asks for the tests that import it, one way or another."""

from __future__ import annotations

import functools
import importlib.util

import pytest

from tests.scripts.conftest import REPO

pytest.importorskip("grimp", reason="import-linter, which brings grimp, is not installed")


@pytest.fixture(scope="module")
def changed():
    """The script as a module."""
    path = REPO / "scripts" / "lib" / "changed_tests.py"
    spec = importlib.util.spec_from_file_location("changed_tests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    find = module.used_names
    module.used_names = functools.cache(lambda source: [*find(source)])  # for all tests below
    return module


@pytest.mark.parametrize(
    ("file", "asked", "not_asked"),
    [
        ("asyncddp/errors.py", "tests/unit/test_errors.py", "tests/topology/test_base_k.py"),
        ("asyncddp/ops/pair_gossip.py", "tests/conformance/test_pair_gossip.py", "tests/unit/shm"),
        (
            "asyncddp/compression/sign.py",
            "tests/conformance/test_compressors.py",
            "tests/conformance/test_pair_gossip.py",
        ),
        ("topology/links.py", "tests/topology/test_links.py", "tests/topology/test_base_k.py"),
        ("tests/unit/test_config.py", "tests/unit/test_config.py", "tests/unit/test_errors.py"),
        ("tests/launch/conftest.py", "tests/launch", "tests/hosts"),
        ("tests/support/least_squares.py", "tests/conformance/test_algorithms.py", "tests/launch"),
        ("docs/start.md", "tests/docs", "tests/unit"),
        ("pyproject.toml", "tests", "tests/unit"),
    ],
)
def test_a_changed_file_asks_for_the_tests_that_it_can_break(changed, file, asked, not_asked):
    """By imports, by names that are loaded lazily, by registries; others are left out."""
    chosen = changed.chosen_paths({file})
    assert asked in chosen
    assert not_asked not in chosen


def test_the_nearest_tests_of_a_file_import_it_directly(changed):
    """Where none does, all that can see a change of it."""
    near = changed.chosen_paths({"asyncddp/engine/deadlock.py"}, nearest=True)
    assert "tests/unit/engine/test_deadlock.py" in near
    assert "tests/conformance/test_pair_gossip.py" not in near
    method = {"asyncddp/algorithms/methods/choco_sgd.py"}
    assert changed.chosen_paths(method, nearest=True) >= changed.chosen_paths(method)


def test_what_has_changed_is_seen_against_a_base(changed):
    """Git tells; a base that is unknown is this commit."""
    assert changed.changed_files("HEAD") == changed.changed_files("no-such-branch")
