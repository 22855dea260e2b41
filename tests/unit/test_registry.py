"""Names for plug-ins: found when asked for, unknown ones told with the known and the nearest."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import asyncddp as bf
from asyncddp import registry
from asyncddp.registry import PluginRegistry


@pytest.fixture
def shapes():
    return PluginRegistry(
        "shape", {"path": "pathlib:Path", "lock": "threading:Lock"}, group="g.shapes"
    )


def test_entries_are_imported_when_asked_for():
    """Listing names imports nothing: a missing module is an error of its own entry."""
    missing = PluginRegistry("thing", {"nowhere": "no_such_module:Thing"})
    assert list(missing) == ["nowhere"]
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _ = missing["nowhere"]


def test_names_are_sorted_and_counted(shapes):
    """A registry is a sorted mapping with a length and membership by exact name."""
    assert list(shapes) == ["lock", "path"]
    assert len(shapes) == 2
    assert "path" in shapes
    assert "pathos" not in shapes


def test_an_unknown_name_lists_the_known_and_the_nearest(shapes):
    """UnknownNameError lists all known names and suggests the nearest."""
    with pytest.raises(bf.UnknownNameError) as caught:
        _ = shapes["pth"]
    assert str(caught.value) == "unknown shape 'pth'; known are: lock, path. Did you mean 'path'?"


def test_without_a_near_name_there_is_no_guess(shapes):
    """UnknownNameError suggests nothing where no known name is similar."""
    with pytest.raises(bf.UnknownNameError) as caught:
        _ = shapes["zzz"]
    assert str(caught.value) == "unknown shape 'zzz'; known are: lock, path."


def test_other_distributions_add_by_entry_point_and_do_not_replace_ours(shapes, monkeypatch):
    """Entry points add names to a registry; of a name it has, its own entry is used."""
    points = [
        EntryPoint("box", "collections:deque", "g.shapes"),
        EntryPoint("path", "collections:deque", "g.shapes"),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert list(shapes) == ["box", "lock", "path"]
    assert shapes["box"].__name__ == "deque"
    assert shapes["path"].__name__ == "Path"


def test_a_registry_without_a_group_asks_nobody(monkeypatch):
    """A registry without a group reads no entry points."""
    monkeypatch.setattr(registry, "entry_points", lambda group: pytest.fail("asked"))
    assert list(PluginRegistry("thing", {"a": "pathlib:Path"})) == ["a"]


def test_other_distributions_are_read_once_until_a_name_is_unknown(shapes, monkeypatch):
    """Reading what all distributions offer takes long; one may be installed meanwhile."""
    points, asked = [], []
    monkeypatch.setattr(registry, "entry_points", lambda group: asked.append(group) or points)
    assert shapes["path"].__name__ == "Path"
    assert asked == []
    assert list(shapes) == list(shapes) == ["lock", "path"]
    assert asked == ["g.shapes"]
    points.append(EntryPoint("box", "collections:deque", "g.shapes"))
    assert shapes["box"].__name__ == "deque"
    assert list(shapes) == ["box", "lock", "path"]
    assert asked == ["g.shapes"] * 2


def test_other_distributions_are_read_again_where_sys_path_has_changed(shapes, monkeypatch):
    """A change of ``sys.path`` makes the registry read entry points again."""
    points = []
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    assert list(shapes) == ["lock", "path"]
    points.append(EntryPoint("box", "collections:deque", "g.shapes"))
    monkeypatch.syspath_prepend("/of/another/distribution")
    assert list(shapes) == ["box", "lock", "path"]
