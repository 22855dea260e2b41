"""What scripts/bench says about its figures: aims, marks, and the models that are trained."""

from __future__ import annotations

import io

import pytest
import torch

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


def shown(show, *arguments):
    """What a method of a report prints, and the results of the aims then."""
    from benchmarks.report import Report

    report = Report({}, file=io.StringIO())
    getattr(report, show)(*arguments)
    return report.file.getvalue().removeprefix("\n"), report.results


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


def test_a_table_over_sizes_is_markdown_with_ratio_and_aims():
    """One line for each size, all of one width, so that it can be pasted as it is."""
    from benchmarks.tables import Target

    table, rows = table_of(Target("ours", 1.5, "raw"), ours=2e-3, raw=1e-3)
    text, target_results = shown("add_timings", table, rows, {"other": "it does not run"})
    lines = text.splitlines()
    assert lines[2].split("|")[1:-1] == [
        " tensor ",
        "     ours ",
        "      raw ",
        " ours ÷ raw ",
        " aim                      ",
    ]
    assert lines[4] == "|   1 KB | 2 ms ±0% | 1 ms ±0% |       2.00 | ≤ 1.5 x raw MISSED (2 x) |"
    assert len({len(line) for line in lines[2:5]}) == 1
    assert lines[5] == "other was not measured: it does not run"
    assert [target_result.met for target_result in target_results] == [False]


def test_a_table_of_steps_has_a_line_for_each_method():
    """Samples per second of all ranks, and what a method adds to the first one."""
    table, rows = table_of(samples=64, alone=0.1, together=0.125)
    text, _ = shown("add_timings", table, rows, {})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:6]]
    assert cells[0] == ["method", "a step", "samples/s, all ranks", "over the alone"]
    assert cells[2] == ["alone", "100 ms ±0%", "640", ""]
    assert cells[3] == ["together", "125 ms ±0%", "512", "25 ms, 25%"]


def test_a_sheet_shows_its_lines_with_their_aims():
    """Only lines that have an aim are marked."""
    from benchmarks.tables import FigureRow, FigureTable

    lines = [
        FigureRow(("a", 1.23456), "≤ 1", False),
        FigureRow(("b", "none")),
        FigureRow(("c", 1.0), "≤ 1", True),
    ]
    sheet = FigureTable("s", "S", ("what", "how much"), lines, "A note.")
    text, target_results = shown("add_figures", sheet)
    assert text.splitlines()[:3] == ["S", "", "A note."]
    assert "|    a |     1.23 | ≤ 1 MISSED |" in text
    assert [target_result.met for target_result in target_results] == [False, True]


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


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot_has_a_panel_for_each_table_that_was_measured(tmp_path, ending):
    """Bars for a single size; a table nobody could run for is left out."""
    from benchmarks.plots import save_plot
    from benchmarks.tables import TimingTable

    table, rows = table_of(samples=1, **{"local step": 0.1, "DDP gloo": 0.2, "ours": 0.15})
    path = tmp_path / f"out.{ending}"
    save_plot(path, [table, TimingTable("empty", "nobody", [4], table.rivals)], rows, "caption")
    assert path.stat().st_size > 5000
    if ending == "svg":
        assert "nobody" not in path.read_text()


@pytest.mark.parametrize(
    ("name", "millions", "tensors"),
    [
        ("narrow_mlp", (0.4, 0.45), 200),
        ("convnet", (11, 11.4), 62),
        ("transformer", (10, 11.5), 78),
    ],
)
def test_the_models_are_as_large_as_they_are_said_to_be_and_learn(name, millions, tensors):
    """Gradients reach every parameter, and a few steps on one batch make the loss smaller."""
    import torch.nn.functional as F
    from benchmarks import training_models

    workload = getattr(training_models, name)(samples=4)
    assert millions[0] < workload.nbytes / 4e6 < millions[1]
    torch.manual_seed(0)
    model = workload.build()
    inputs, targets = workload.batch(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    parameters = list(model.parameters())
    assert len(parameters) == tensors
    assert sum(p.numel() for p in parameters) * 4 == workload.nbytes
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in parameters)
    assert losses[-1] < losses[0]
