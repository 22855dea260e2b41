"""``asyncddp report``: what a monitored run has left, as figures and curves."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from click.testing import CliRunner

from asyncddp.cli.main import main
from asyncddp.cli.monitor_log import read_monitor_log, slowest_rank, summarise_ranks
from asyncddp.monitoring.rank_record import Record


def line(rank, step, **fields):
    """What a monitor writes of one rank at one report."""
    usual = {
        "time": 1e9,
        "consensus_distance": 0.5,
        "consensus_error": 0.1,
        "gradient_norm": 2.0,
        "step_seconds": 0.1,
        "exposed_seconds": 0.02,
        "monitor_seconds": 0.001,
        "bytes_sent": 1000 * step,
        "staleness": None,
    }
    return Record(rank=rank, step=step, **{**usual, **fields}).as_json() + "\n"


@pytest.fixture
def run(tmp_path):
    """Two ranks, of which rank 1 computes longer and rank 0 waits for it."""
    path = tmp_path / "run.jsonl"
    lines = [line(0, 50, exposed_seconds=0.06), line(1, 50, exposed_seconds=0.0)]
    lines += [line(0, 100, consensus_distance=0.25), line(1, 100, gradient_norm=float("nan"))]
    path.write_text("".join(lines))
    return path


def invoke(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)], prog_name="asyncddp")


def test_the_table_has_a_row_for_each_rank_and_names_the_slowest(run):
    """Each rank has a row of figures, and the rank of the longest own part is named."""
    shown = invoke(run)
    assert shown.exit_code == 0, shown.output
    rows = [row.split() for row in shown.output.splitlines() if row.split()[:1] in (["0"], ["1"])]
    assert rows == [
        ["0", "100", "0.25", "2", "100", "ms", "40.0%", "1.00", "kB", "-", "1.00%"],
        ["1", "100", "0.5", "2", "100", "ms", "10.0%", "1.00", "kB", "-", "1.00%"],
    ]
    assert "Rank 1 takes longest for its own part of a step: 90 ms." in shown.output


def test_json_has_the_same_figures(run):
    """``--json`` gives the figures per rank, of each the last that is a number."""
    shown = invoke(run, "--json")
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout)
    assert found["slowest"] == 1
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    assert found["ranks"][0]["exposed_share"] == pytest.approx(0.4)
    assert found["ranks"][0]["bytes_per_step"] == 1000
    assert found["ranks"][1]["gradient_norm"] == 2.0, "the last that is a number"
    assert found["ranks"][1]["staleness"] is None


def test_curves_are_drawn_of_what_is_known(run, tmp_path):
    """Each panel's name and each rank's stand in the picture; staleness where there is any."""
    picture = tmp_path / "run.svg"
    shown = invoke(run, "--plot", picture)
    assert shown.exit_code == 0, shown.output
    assert shown.output.endswith(f"Wrote {picture}.\n")
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")

    from asyncddp.cli.report_command import draw_curves

    with run.open("a") as more:
        more.write(line(1, 150, staleness=7))
    axes = draw_curves(read_monitor_log(run), "run").axes
    assert [one.get_ylabel() for one in axes] == [
        "consensus distance",
        "gradient norm",
        "step time, ms",
        "exposed, %",
        "staleness, steps",
    ]
    curves = [list(zip(one.get_xdata(), one.get_ydata(), strict=True)) for one in axes[0].lines]
    assert curves == [[(50, 0.5), (100, 0.25)], [(50, 0.5), (100, 0.5), (150, 0.5)]]
    assert [len(one.get_xdata()) for one in axes[1].lines] == [2, 2], "not a number: left out"
    assert [tuple(one.get_xdata()) for one in axes[4].lines] == [(), (150,)]


def test_a_run_that_is_still_written_can_be_read(run):
    """A line that is not complete yet is left out, and that is said."""
    with run.open("a") as more:
        more.write(line(0, 150)[:40])
    shown = invoke(run, "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["ranks"][0]["steps"] == 100
    assert "the last line is not complete; it is left out" in shown.stderr


def test_of_a_step_that_was_made_twice_the_later_counts(run):
    """Of two records of one rank and step, the later replaces the earlier."""
    with run.open("a") as more:
        more.write(line(0, 100, consensus_distance=0.125))
    assert summarise_ranks(read_monitor_log(run))[0].consensus_distance == 0.125
    assert summarise_ranks(read_monitor_log(run))[0].reports == 2


def test_the_slowest_is_whom_others_wait_for(run):
    """The slowest rank is the one with the longest step time without exposed communication."""
    assert slowest_rank(summarise_ranks(read_monitor_log(run))).rank == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no report in it yet. Reports come every 50 steps"),
        (line(0, 50) + "oops\n", "line 2: expected a JSON object, got 'oops'"),
        ("[1]\n", "line 1: expected a JSON object, got '[1]'"),
        ('{"rank": 0}\n', "line 1: there is no 'step'. Give a file that asyncddp.monitor"),
        (line(0, "x").replace('"xx', '"x'), "line 1: step: expected a whole number, got"),
        (line(0, 50, step_seconds=None), "line 1: step_seconds: expected a number, got None"),
    ],
)
def test_what_is_no_report_is_told_with_file_and_line(tmp_path, text, message):
    """A file that is no report exits with 2, its path, line number and what was expected."""
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    shown = invoke(path)
    assert shown.exit_code == 2
    assert f"{path}" in shown.output
    assert message in shown.output


def test_a_file_that_is_not_there_and_a_picture_that_cannot_be(run, tmp_path):
    """A missing file exits with 2, an unknown picture format with 1; the message names it."""
    missing = invoke(tmp_path / "none.jsonl")
    assert missing.exit_code == 2
    assert "none.jsonl: cannot be read: No such file or directory" in missing.output
    odd = invoke(run, "--plot", tmp_path / "run.xyz")
    assert odd.exit_code == 1
    assert "run.xyz cannot be written: Format 'xyz' is not supported" in odd.output


def test_without_matplotlib_the_error_says_what_to_install(run, tmp_path, monkeypatch):
    """``--plot`` without matplotlib exits with 1 and the pip line."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = invoke(run, "--plot", tmp_path / "run.png")
    assert shown.exit_code == 1
    assert "pip install 'matplotlib>=3.8'" in shown.output


def test_it_needs_neither_torch_nor_mpi(run):
    """``report --json`` imports none of torch, mpi4py, numpy and rich."""
    code = (
        "import sys\nfrom asyncddp.cli.main import main\n"
        f"main(['report', {str(run)!r}, '--json'], standalone_mode=False)\n"
        "print(sorted({'torch', 'mpi4py', 'numpy', 'rich'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == "[]"
