"""``asyncddp timeline``: from what ranks wrote to one file, a table and a picture."""

import json
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner

from asyncddp.cli.main import main
from tests.unit.timeline.timeline_files import VERB, Rank, straggling


def call(*arguments):
    """Exit code and everything that was printed."""
    result = CliRunner().invoke(main, ["timeline", *map(str, arguments)], prog_name="asyncddp")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.output
    return result.exit_code, result.output


@pytest.fixture
def out(tmp_path):
    """The folder of a run of four ranks, of which rank 3 is slow."""
    folder = tmp_path / "out"
    folder.mkdir()
    for rank in straggling():
        rank.write(folder)
    return folder


def row(output, rank):
    """The cells of a rank's row."""
    return next(words for line in output.splitlines() if (words := line.split())[:1] == [str(rank)])


def test_help_teaches_the_whole_chain():
    """The help shows the commands run, merge and report of one trace, and where to open it."""
    code, output = call("--help")
    assert code == 0
    for line in ("run -np 4 --timeline out", "merge out -o trace.json", "report trace.json"):
        assert f"asyncddp {line}" in output or f"asyncddp timeline {line}" in output
    assert "https://ui.perfetto.dev" in output
    for command, word in (("merge", "a prefix: out/bf_0.json"), ("report", "(exposed)")):
        code, output = call(command, "--help")
        assert code == 0
        assert word in output


def test_merge_writes_one_file_and_says_how_to_open_it(out, tmp_path):
    """``merge`` writes one trace, and prints the clock error, its size and how to view it."""
    trace = tmp_path / "t.json"
    code, output = call("merge", out, "-o", trace)
    assert code == 0
    assert output.splitlines() == [
        "Clocks: error at most 1.0 µs.",
        f"Wrote {trace}: {len(json.loads(trace.read_text()))} events of 4 ranks.",
        'Open it at https://ui.perfetto.dev with "Open trace file", or read it as a table:',
        f"  asyncddp timeline report {trace}",
    ]


def test_merge_says_who_is_missing_and_what_was_left_out(tmp_path):
    """``merge`` tells of empty files, missing ranks, unmeasured clocks, unmatched messages."""
    for rank in straggling()[:2]:
        rank.write(tmp_path, f"bf_{rank.rank}.json")
    (tmp_path / "bf_2.json").write_text("[\n")
    far = Rank(3, 4, "far").span("step", 0.0, 10.0)
    far.write(tmp_path, "bf_3.json")
    code, output = call("merge", tmp_path / "bf_", "-o", tmp_path / "t.json.gz")
    assert code == 0
    assert output.splitlines()[:4] == [
        f"{tmp_path / 'bf_2.json'} is empty: its rank was ended before it wrote an event.",
        "Of 4 ranks, no events are there of rank 2.",
        "Never measured was the clock of rank 3. It is placed by its machine's wall clock, which "
        "may be wrong by milliseconds or more.",
        "Left out 12 ends of messages whose other end is in no file.",
    ]


def test_report_shows_a_row_per_rank_and_who_stands_out(out, tmp_path):
    """A folder and its merged trace give one report: a row per rank, and the straggler."""
    trace = tmp_path / "t.json"
    call("merge", out, "-o", trace)
    code, output = call("report", trace)
    assert code == 0
    assert call("report", out) == (0, output)
    assert row(output, 0) == (
        ["0", "5", "5.50", "5.50-5.50", "5.50", "1.10", "4.30", "0.100", "0.000", "3:", "4.10"]
        + ["4.00", "kB"] * 2
    )
    assert row(output, 3)[5:9] == ["5.10", "0.300", "0.100", "0.000"]
    assert "Slowest by compute: rank 3, 5.10 ms per step; the others 1.10 ms." in output
    assert "Waited for most: rank 3, 4.10 ms per step by all others; it waits 0.100 ms" in output
    code, output = call("report", trace, "--skip", 0)
    assert row(output, 0)[1] == "6"


def test_report_says_what_the_trace_does_not_tell(tmp_path):
    """A trace without steps is summed as a whole, and what is not known is said."""
    Rank(0, 1).clock(0.0).span("enqueue", 5e3, 9e3, 2, verb=VERB).write(tmp_path)
    code, output = call("report", tmp_path)
    assert code == 0
    assert "milliseconds and bytes in all" in output
    assert row(output, 0) == ["0", "4.00", "-", "4.00", "-", "-", "-", "-", "-"]
    assert "Step times of rank 0 are not known" in output
    assert "Compute of rank 0 is not known: no module was followed." in output


def test_figures_and_picture_are_written_where_asked(out, tmp_path):
    """``--json FILE`` and ``--plot FILE`` write files, ``--json -`` the same figures to stdout."""
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    figures, picture = tmp_path / "r.json", tmp_path / "r.png"
    code, output = call("report", out, "--json", figures, "--plot", picture)
    assert code == 0
    assert f"Wrote {figures}.\nWrote {picture}.\n" in output
    data = json.loads(figures.read_text())
    assert (data["slowest"], data["holds_up"], len(data["ranks"])) == (3, 3, 4)
    assert picture.read_bytes().startswith(b"\x89PNG")
    code, output = call("report", out, "--json", "-")
    assert json.loads(output) == data


def test_a_narrow_terminal_gets_two_tables_that_are_whole(out):
    """On 80 columns the table is split, without cut cells."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "asyncddp", "timeline", "report", str(out)]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    with os.fdopen(master, "rb", buffering=0) as screen:
        child = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment)
        os.close(slave)
        shown = b""
        try:
            while chunk := screen.read(4096):
                shown += chunk
        except OSError:  # how Linux says that the other end has closed
            pass
        assert child.wait() == 0
    text = shown.decode()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "…" not in text
    assert text.count(" rank ") == 4
    assert "received" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["merge"], "Missing argument 'DIR|PREFIX|FILE…'"),
        (["merge", "none/bf_"], "no such folder: 'none'; timelines are files"),
        (["merge", "none"], "no such file or folder: 'none', nor 'none0.json'"),
        (["report", "none"], "no such file or folder: 'none', nor 'none0.json'"),
        (["merge", "{out}", "-o", "{out}/rank0.json"], "is one of the files to merge; write to"),
        (["merge", "{out}", "-o", "{out}/none/t.json"], "cannot be written: "),
        (["merge", "{out}/text"], "is not a rank's timeline: it has no event 'asyncddp.rank'"),
        (["report", "{out}/text"], "is not a rank's timeline: it has no event 'asyncddp.rank'"),
        (["merge", "{out}/empty"], "empty; the run was ended before it wrote an event"),
        (["report", "{out}/empty"], "empty; the run was ended before it wrote an event"),
        (["merge", "{out}/rank0.json", "{out}/again"], "again are both of rank 0; give the files"),
        (["report", "{out}", "--skip", "6"], "--skip 6 leaves nothing of the 6 steps of rank 0"),
        (["report", "{out}", "--skip", "-1"], "expected a whole number of at least 0, got '-1'"),
        (["report", "{out}", "--json", "{out}/none/r.json"], "cannot be written: "),
        (["report", "{out}", "--plot", "{out}/none/r.png"], "cannot be written: "),
        (["report", "{out}", "--plot", "{out}/r.odd"], "cannot be written: Format 'odd' is not"),
    ],
)
def test_a_mistake_is_a_sentence_with_a_remedy(out, arguments, message):
    """A wrong argument or file exits with 2 and a message, without a traceback."""
    (out / "text").write_text("hello\n")
    (out / "empty").write_text("[\n")
    (out / "again").write_text((out / "rank0.json").read_text())
    code, output = call(*(word.format(out=out) for word in arguments))
    assert code == 2
    assert message in " ".join(output.split())


def test_importing_the_command_loads_nothing_that_is_slow():
    """Importing the command loads none of numpy, torch, mpi4py, rich and matplotlib."""
    code = (
        "import sys, asyncddp.cli.timeline_command\n"
        "heavy = {'numpy', 'torch', 'mpi4py', 'rich', 'matplotlib', 'asyncddp.timeline'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_merging_and_reporting_load_neither_torch_nor_mpi(out):
    """``merge`` of a folder and ``report`` of its trace import neither torch nor mpi4py."""
    trace = str(out.parent / "t.json")
    code = (
        "import sys\nfrom asyncddp.cli.main import main\n"
        f"main(['timeline', 'merge', {str(out)!r}, '-o', {trace!r}], standalone_mode=False)\n"
        f"main(['timeline', 'report', {trace!r}], standalone_mode=False)\n"
        "print(sorted({'torch', 'mpi4py'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"Wrote {trace}: " in done.stdout
    assert "exposed" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
