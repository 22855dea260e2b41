"""What a failing rank says and leaves, before it takes the others down."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from asyncddp.context.crash_handler import exit_code
from asyncddp.errors import MismatchError
from tests.support import RUN_LIMIT
from tests.support.processes import warm_server


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit("words"), 1),
        (KeyboardInterrupt(), 130),
        (ValueError("x"), 1),
        (MismatchError("x"), 1),
    ],
    ids=repr,
)
def test_exit_codes_are_python_s(error, code):
    """The exit code of an uncaught exception is the one that python would give."""
    assert exit_code(error) == code


def run(code, **environ):
    head = "import asyncddp as bf\nbf.init(transport='loopback')\n"
    return subprocess.run(
        [warm_server().python, "-c", head + code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT,
        check=False,
    )


@pytest.mark.launches
def test_an_uncaught_error_is_told_with_rank_and_traceback():
    """An uncaught error exits with 1, and stderr begins with rank and error."""
    done = run("raise ValueError('no data')")
    assert done.returncode == 1
    first, second, *_ = done.stderr.splitlines()
    assert first == "[asyncddp] rank 0 of 1 failed: ValueError: no data"
    assert second == "Traceback (most recent call last):"
    assert done.stderr.rstrip().endswith("ValueError: no data")


@pytest.mark.launches
def test_under_the_launcher_it_is_reported_and_left_to_the_launcher_to_print(tmp_path):
    """With a report directory the error goes into the rank's file, and none to stderr."""
    done = run("raise ValueError('no data')", ASYNCDDP_REPORT_DIR=str(tmp_path))
    assert (done.returncode, done.stderr) == (1, "")
    report = json.loads((tmp_path / "rank-0.json").read_text())
    assert report["rank"] == 0
    assert report["exit_code"] == 1
    assert (report["kind"], report["message"]) == ("ValueError", "no data")
    assert "Traceback" in report["traceback"]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


@pytest.mark.launches
def test_a_process_that_a_rank_has_started_speaks_for_itself(tmp_path):
    """It inherits the variable, and its failure is its parent's business."""
    (tmp_path / "started-0").write_text("1 here")
    done = run("raise ValueError('no data')", ASYNCDDP_REPORT_DIR=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: no data")
    assert not (tmp_path / "rank-0.json").exists()


@pytest.mark.launches
def test_what_was_printed_before_is_not_lost():
    """What the script printed before its error reaches stdout."""
    done = run("print('before'); raise ValueError('x')")
    assert done.stdout == "before\n"


@pytest.mark.launches
def test_a_rank_that_was_left_alone_prints_no_traceback():
    """The rank that left has said why."""
    done = run("raise bf.PeerLeftError('rank 1 has left')")
    assert done.returncode == 1
    assert done.stderr == "[asyncddp] rank 0 of 1 failed: PeerLeftError: rank 1 has left\n"


@pytest.mark.launches
def test_a_report_folder_that_is_gone_hides_no_error(tmp_path):
    """If the report cannot be written, the error goes to stderr."""
    done = run("raise ValueError('x')", ASYNCDDP_REPORT_DIR=str(tmp_path / "gone"))
    assert "ValueError: x" in done.stderr


@pytest.mark.launches
def test_exits_of_the_script_s_own_choice_stay_as_they_are():
    """``SystemExit(5)`` exits with 5, and nothing goes to stderr."""
    done = run("raise SystemExit(5)")
    assert (done.returncode, done.stderr) == (5, "")
