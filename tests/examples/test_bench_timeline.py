"""scripts/bench timeline measures steps with the timeline on beside the same steps with it off."""

from __future__ import annotations

import json

import pytest

from tests.examples.test_bench import run_bench


@pytest.mark.mpi(2)
def test_on_and_off_take_turns(tmp_path):
    """Steps are judged by their aim; the worlds of both are gone in the end, and so are files."""
    files = ("--json", "out.json")
    done = run_bench("timeline", "--quick", "--rounds", "2", *files, cwd=tmp_path)
    assert done.code == 0, done
    assert not done.left
    found = json.loads((tmp_path / "out.json").read_text())
    tables = {"timeline_mlp", "timeline_convnet", "timeline_small"}
    rows = {(row["table"], row["rival"]) for row in found["results"]}
    assert rows == {(table, rival) for table in tables for rival in ("on", "off")}
    assert len(found["aims"]) == 2
