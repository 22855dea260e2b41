"""What scripts/bench says about its figures: aims, marks, and the models that are trained."""

from __future__ import annotations

import io

import pytest

from tests.support.processes import REPO


@pytest.fixture(autouse=True)
def _benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))


def table_of(*targets, samples=None, **medians):
    """A table of rivals, the first one ``ours``, and a row of two equal rounds for each."""
    from benchmarks.tables import Rival, TimingRow, TimingTable

    rivals = [Rival(name, lambda nbytes: lambda number: None) for name in medians]
    table = TimingTable("t", "T", [1024], rivals, targets=targets, samples=samples)
    rows = [TimingRow("t", name, 1024, 1, (median, median)) for name, median in medians.items()]
    return table, rows


def judged(*targets, **medians):
    from benchmarks.targets import check_table_targets

    return [
        target_result.text for target_result in check_table_targets(*table_of(*targets, **medians))
    ]


@pytest.mark.parametrize(
    ("aim", "medians", "text"),
    [
        ({"at_most": 3, "of": "raw"}, {"raw": 1e-3}, "≤ 3 x raw ✓"),
        ({"at_most": 1.5, "of": "raw"}, {"raw": 1e-3}, "≤ 1.5 x raw MISSED (2 x)"),
        (
            {"at_most": 3, "of": "raw", "seconds": 1e-3},
            {"raw": 1e-3},
            "≤ 3 x raw, ≤ 1 ms MISSED (2 ms)",
        ),
        ({"seconds": 2e-3}, {}, "≤ 2 ms ✓"),
        ({"at_most": 1, "of": ("a", "b")}, {"a": 3e-3, "b": 1e-3}, "≤ a and b MISSED (2 x)"),
        ({"at_most": 1, "of": ("a", "b")}, {"a": 3e-3}, "≤ a and b (not judged)"),
        (
            {"at_most": 0.5, "of": "raw", "beyond": "base", "words": "adds half"},
            {"base": 1e-3, "raw": 3e-3},
            "adds half ✓",
        ),
        (
            {"at_most": 0.5, "of": "raw", "beyond": "base", "words": "adds half"},
            {"base": 1e-3, "raw": 2e-3},
            "adds half MISSED (1 x)",
        ),
    ],
)
def test_an_aim_is_met_missed_or_open_and_says_what_was_found(aim, medians, text):
    """Ours takes 2 ms. Nobody wins because another one could not run."""
    from benchmarks.tables import Target

    assert judged(Target("ours", **aim), ours=2e-3, **medians) == [text]


def test_an_aim_holds_at_its_sizes_only_and_for_the_fastest_of_its_rivals():
    """The first of several rivals is slow, but the second one is not."""
    from benchmarks.tables import Target

    aim = Target(("ours", "ours too"), 1, "raw")
    assert judged(aim, raw=1, ours=3, **{"ours too": 1}) == ["ours or ours too ≤ raw ✓"]
    assert judged(Target("ours", 1, "raw", sizes=(1025, 4096)), ours=2, raw=1) == []


def test_the_summary_names_every_aim_that_is_not_met():
    """And says so where there is none."""
    from benchmarks.report import Report
    from benchmarks.targets import TargetResult

    met, missed, open_one = (
        TargetResult("T, 1 KB", 1024, "ours", words, result, "2 x")
        for words, result in (("≤ a", True), ("≤ b", False), ("≤ c", None))
    )

    def summary(*results):
        report = Report({}, file=io.StringIO(), results=[*results])
        report.end(None)
        return report.file.getvalue().splitlines()[1:]

    assert summary(met, missed, open_one) == [
        "1 of 3 aims are met.",
        "  T, 1 KB: ≤ b MISSED (2 x)",
        "  T, 1 KB: ≤ c (not judged)",
    ]
    assert summary(met, met) == ["All 2 aims are met."]


def test_json_holds_rows_sheets_and_aims(tmp_path):
    """Everything that was printed can be read by a program."""
    import json

    from benchmarks.report import Report
    from benchmarks.tables import FigureRow, FigureTable, Target

    table, rows = table_of(Target("ours", seconds=1e-3), ours=2e-3)
    path = tmp_path / "out.json"
    lines = [FigureRow(("a", 1.5), "≤ 1", False)]
    report = Report({"ranks": 2}, file=io.StringIO())
    report.add_timings(table, rows, {})
    report.add_figures(FigureTable("s", "S", ("what", "how much"), lines))
    report.end(path)
    found = json.loads(path.read_text())
    assert found["header"] == {"ranks": 2}
    assert found["results"][0]["rounds"] == [2e-3, 2e-3]
    assert found["sheets"][0]["lines"] == [{"cells": ["a", 1.5], "aim": "≤ 1", "met": False}]
    assert found["aims"][0]["found"] == "2 ms"
