"""scripts/bench gpu and scripts/gpu, with the host standing in for a GPU."""

from __future__ import annotations

import itertools
import json
import re
import signal
import xml.etree.ElementTree as ET

import pytest
import torch
from click.testing import CliRunner

from tests.support.processes import REPO, run_to_end, warm_server

PNG = b"\x89PNG\r\n\x1a\n"
PATH = f"{REPO / 'scripts'}:{REPO}"
RIVALS = {
    "cuda_staged",
    "cuda_staged, in place",
    "limit: copy on the device",
    "pinned copy out",
    "pinned copy in",
    "pinned copy, the slower direction",
    "gloo: pinned, messages + lerp",
}
WAYS = {"one pass, by Triton", "passes of torch", "torch._foreach"}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(REPO / "scripts"))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of the command, with one group of tests, and the folder of its results."""
    out = tmp_path_factory.mktemp("gpu") / "found"
    options = ["--stand-in", "--env", warm_server().environment, "--out", str(out)]
    options += ["--only", "doctor,facts,bench"]
    return run_to_end([str(REPO / "scripts" / "gpu"), *options], timeout=400), out


@pytest.mark.nightly
@pytest.mark.mpi(2)
class TestOneCommand:
    def test_ends_well_and_leaves_no_process(self, run):
        """scripts/gpu --stand-in exits with 0 and tells where its results are."""
        done, out = run
        assert done.code == 0, done
        assert not done.left
        assert f"the results are in {out}" in done.stderr

    def test_tests_were_run_and_say_why_they_were_skipped(self, run):
        """The group of tests has results, of which none failed, and a log."""
        _, out = run
        suites = {}
        for path in out.glob("tests-*.xml"):
            (suites[path.stem],) = ET.parse(path).getroot()
        assert suites.keys() == {"tests-facts"}
        assert sum(int(suite.get("tests")) for suite in suites.values()) > 0
        for name, suite in suites.items():
            assert (suite.get("failures"), suite.get("errors")) == ("0", "0"), name
            log = (out / f"{name}.log").read_text()
            assert torch.cuda.is_available() or "torch sees no GPU: scripts/test gpu runs" in log

    def test_the_doctor_was_asked(self, run):
        """The doctor's report is among the results, and tells of the launcher."""
        assert "launcher" in (run[1] / "doctor.txt").read_text()

    def test_every_rival_was_measured_and_checked(self, run):
        """bench.json has positive times, and a row for each rival and size of pieces."""
        found = json.loads((run[1] / "bench.json").read_text())
        rows = found["results"]
        assert {row["rival"] for row in rows if row["table"] == "cuda_staged_2"} == RIVALS
        assert all(min(row["rounds"]) > 0 for row in rows)
        pieces = {row["rival"] for row in rows if row["table"] == "pieces_2"}
        assert pieces == {f"{size} MB" for size in (1, 2, 4, 8, 16)}
        steps = [row["rival"] for row in rows if row["table"] == "step_cuda_staged_2"]
        assert steps[:2] == ["local step", "adapt_then_combine, one-peer"]

    def test_ways_to_mix_were_measured(self, run):
        """The sheet of ways to mix has a line for each way and dtype, with two neighbours."""
        sheets = json.loads((run[1] / "bench.json").read_text())["sheets"]
        (ways,) = [sheet for sheet in sheets if sheet["table"] == "ways"]
        cells = sorted(tuple(line["cells"][:4]) for line in ways["lines"])
        kinds = itertools.product(WAYS, ("bfloat16", "float32"))
        assert cells == sorted((way, dtype, "2", "64 KB") for way, dtype in kinds)
        measured = {line["cells"][0] for line in ways["lines"] if line["cells"][4].endswith("s")}
        assert measured >= WAYS - {"one pass, by Triton"}, "Triton needs a GPU"

    def test_the_aims_stand_beside_the_figures(self, run):
        """bench.md marks each aim as met or missed, and says what could not be measured."""
        text = (run[1] / "bench.md").read_text()
        targets = json.loads((run[1] / "bench.json").read_text())["aims"]
        assert len([aim for aim in targets if aim["words"].startswith("≤ 30 µs")]) == 2
        assert len([aim for aim in targets if "≤ 2% over the local step" in aim["words"]]) == 1
        assert len(re.findall(r"✓|MISSED", text.partition("aims are met.")[0])) == len(targets)
        assert re.search(r"2 ranks, 1 MB: pieces of \d+ MB are the fastest, \d+% faster", text)
        assert "NCCL: messages + lerp was not measured: NCCL has a GPU for each of 2 ranks" in text
        assert "the figures mean nothing" in text

    def test_the_picture_is_a_png(self, run):
        """bench.png begins with the signature of PNG files."""
        assert (run[1] / "bench.png").read_bytes().startswith(PNG)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_bench_says_so_in_one_sentence(tmp_path):
    """Without a GPU the bench exits with 2, prints no table and names --stand-in on stderr."""
    command = warm_server().command("-m", "benchmarks", "gpu", "--quick")
    done = run_to_end(command, cwd=tmp_path, environ={"PYTHONPATH": PATH})
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        "bench: gpu needs a GPU that torch can use, and torch sees none here; "
        "scripts/bench gpu --stand-in runs the same on the host\n"
    )


def row(table, rival, nbytes, seconds):
    from benchmarks.tables import TimingRow

    return TimingRow(table, rival, nbytes, 1, (seconds, seconds))


@pytest.mark.parametrize(
    ("transport", "limit", "ratio", "words"),
    [
        ("cuda_ipc", "limit: copy on the device", 2, "≤ 2 x limit"),
        ("cuda_staged", "pinned copy, the slower direction", 1.25, "≥ 80% of the pinned copy"),
    ],
)
def test_the_aims_of_the_transports(scripts, transport, limit, ratio, words):
    """Against the limit that is theirs, from 64 MB on; a limit that did not run judges nothing."""
    from benchmarks.gpu.device import open_device
    from benchmarks.gpu.verb_tables import GpuTableSetup, mixing_table
    from benchmarks.tables import MB, RankGroup
    from benchmarks.targets import check_table_targets

    class Two:
        rank, size = 0, 2

    with open_device(pretend=True) as device:
        table = mixing_table(
            GpuTableSetup(RankGroup(Two(), None), device), transport, [MB, 64 * MB]
        )
    key = table.key
    for factor, met in ((0.99, True), (1.01, False)):
        rows = [row(key, transport, size, factor * ratio) for size in (MB, 64 * MB)]
        rows += [row(key, limit, size, 1.0) for size in (MB, 64 * MB)]
        (target_result,) = check_table_targets(table, rows)
        assert (target_result.nbytes, target_result.met) == (64 * MB, met)
        assert target_result.words.startswith(words)
    (open_one,) = check_table_targets(table, rows[:2])
    assert open_one.met is None


@pytest.mark.parametrize(
    ("transport", "copy"),
    [
        ("cuda_ipc", "limit: copy on the device"),
        ("cuda_staged", "pinned copy, the slower direction"),
        ("mpi_cuda", "limit: copy on the device"),
        ("nccl", "limit: copy on the device"),
    ],
)
def test_a_rate_that_cannot_be_right_is_told(scripts, transport, copy):
    """From 64 MB on, too many times the copy is told with both times; one that is near is not."""
    from benchmarks.gpu.rate_floors import FLOORS, below_floors

    most, table, large = FLOORS[transport][1], f"{transport}_4", 64 << 20
    limit = row(table, copy, large, 0.001)
    near = row(table, transport, large, 0.00099 * most)
    slow = row(table, f"{transport}, in place", large, 0.00202 * most)
    small = [row(table, copy, 1 << 20, 1e-6), row(table, transport, 1 << 20, 1.0)]
    (told,) = below_floors([limit, near, slow, *small])
    assert told.startswith(f"{transport}, in place, 4 ranks, 64 MB: ")
    assert f"is {2.02 * most:.0f} times the {copy} (1 ms), and {most} times are the most" in told
    assert below_floors([near, slow]) == [], "where the copy did not run, nothing is judged"


def test_such_a_rate_fails_the_bench_after_its_report(scripts, tmp_path, monkeypatch):
    """The command writes its tables and its file, and ends with 1 and the sentence."""
    from benchmarks.__main__ import main
    from benchmarks.gpu import bench
    from benchmarks.report import BenchFigures

    figures = BenchFigures(
        {"gpu": "one"}, [], lambda path: None, failures=["nccl: 9 s is too long"]
    )
    monkeypatch.setattr(bench, "refuse", lambda options: None)
    monkeypatch.setattr(bench, "figures", lambda options, advance: figures)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    done = CliRunner().invoke(main, ["gpu", "--json", str(tmp_path / "found.json")])
    assert done.exit_code == 1
    assert "Error: nccl: 9 s is too long" in done.output
    assert json.loads((tmp_path / "found.json").read_text())["results"] == []
