"""When a rank fails, all end soon, and the terminal says which one failed first, and why."""

import re
import signal
import time

import pytest

from tests.launch import recorded

FAILING = """
import os, sys, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print("ready", rank, flush=True)
if rank == 2:
    {act}
time.sleep(300)
"""
SOON = 120.0  # seconds: ten for the run, the rest for a busy machine; ranks sleep for 300


def failing(run, act):
    return run("-np", "4", run.script(FAILING.format(act=act)))


def last_lines(text):
    return [line for line in text.splitlines() if line.startswith("asyncddp run: ")]


def test_an_exit_code_is_the_runs_exit_code(run):
    """The run ends soon with the exit code of the failed rank, and names that rank."""
    ended = failing(run, "sys.exit(3)")
    assert ended.code == 3
    assert "asyncddp run: rank 2 on " in ended.stderr
    assert last_lines(ended.stderr)[0].endswith("ended with exit code 3")
    assert ended.seconds < SOON
    assert run.wait_until_gone(20) == []


def test_an_exception_is_shown_once_and_last_of_all_in_one_sentence(run):
    """An exception's traceback is printed once, and the last line is rank and exception."""
    ended = failing(run, 'raise ValueError("loss is nan")')
    assert ended.code == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert ended.stderr.count('raise ValueError("loss is nan")') == 1
    assert "runpy" not in ended.stderr, "the traceback begins in the script"
    assert ended.stderr.splitlines()[-1].startswith("asyncddp run: rank 2 on ")
    assert ended.stderr.endswith("failed (exit code 1): ValueError: loss is nan\n")
    assert "-----" not in ended.stderr, "the launcher's own words are left out"
    assert ended.seconds < SOON
    assert run.wait_until_gone(20) == []


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(9, 137, "signal 9 (SIGKILL)"), (11, 139, "signal 11 (SIGSEGV)")],
)
def test_a_killed_rank_is_named_with_its_signal(run, number, code, words):
    """A rank killed by a signal is named with it, and the exit code is 128 + its number."""
    ended = failing(run, f"os.kill(os.getpid(), {number})")
    assert ended.code == code
    assert last_lines(ended.stderr)[0].startswith("asyncddp run: rank 2 on ")
    assert last_lines(ended.stderr)[0].endswith(f"was killed by {words}")
    assert ended.seconds < SOON
    assert run.wait_until_gone(20) == []


LEAVING = """
import os
rank = os.environ["OMPI_COMM_WORLD_RANK"]
if rank == "1":
    {before}
import torch, asyncddp as bf
bf.init()
bf.neighbor_allreduce(torch.ones(4))
if rank == "1":
    {after}
while True:
    bf.neighbor_allreduce(torch.ones(4))
"""


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("pass", "os._exit(0)", "ended with exit code 0 before MPI was finalized"),
        ("os._exit(0)", "", "was lost, killed or ended without a report, as by os._exit(), while"),
        ("raise SystemExit", "", "came to the end of the script without calling init(), while"),
    ],
    ids=["in a verb", "before init", "without init"],
)
def test_a_rank_that_leaves_without_a_word_is_named(run, before, after, words):
    """No exit code tells of it, and where others wait in ``init()`` no launcher notices."""
    text = LEAVING.format(before=before, after=after or "pass")
    ended = run("-np", "2", *(run.warm(text) if after else [run.script(text)]))
    (line,) = last_lines(ended.stderr)
    assert line.startswith("asyncddp run: rank 1 ")
    assert words in line
    assert ended.code != 0
    assert "exiting\nimproperly" not in ended.stderr, "the launcher's own words are left out"
    assert run.wait_until_gone(20) == []


def test_an_error_that_all_ranks_share_is_printed_once(run):
    """One traceback, and one line for all ranks; none of them prints a second one."""
    ended = run(
        "-np",
        "4",
        *run.warm(
            "import torch, asyncddp as bf\n"
            "bf.init()\n"
            "bf.allreduce(torch.ones(3))\n"
            "raise ValueError('no data')\n"
        ),
    )
    assert ended.code == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert ended.stderr.count("ValueError: no data\n") == 2, "of the traceback and of the diagnosis"
    (line,) = last_lines(ended.stderr)
    assert line.startswith("asyncddp run: rank")
    assert line.endswith("(exit code 1): ValueError: no data")
    assert "[asyncddp]" not in ended.stderr


def test_a_rank_that_fails_with_mpi_under_way_is_shown_before_all_else(run):
    """The others wait for it inside a verb; what they see of it must not bury its traceback."""
    ended = run(
        "-np",
        "3",
        *run.warm(
            "import torch, asyncddp as bf\n"
            "bf.init()\n"
            "if bf.rank() == 1:\n"
            "    raise KeyError('no such sample')\n"
            "bf.allreduce(torch.ones(3))\n"
        ),
    )
    assert ended.code == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert ended.stderr.count("KeyError: 'no such sample'\n") == 2
    assert last_lines(ended.stderr)[0].startswith("asyncddp run: rank 1 on ")
    assert last_lines(ended.stderr)[0].endswith("failed (exit code 1): KeyError: 'no such sample'")
    assert "MPI_ABORT" not in ended.stderr
    assert run.wait_until_gone(20) == []


def test_ranks_that_wait_for_one_are_told_of_in_one_line(run):
    """Neighbours wait for it, and their neighbours for them."""
    script = run.warm(
        "import time, pathlib, torch, asyncddp as bf\n"
        "bf.init(warn_after=2)\n"
        "bf.barrier()\n"
        "while bf.rank() == 1 and not pathlib.Path('go').exists():\n"
        "    time.sleep(0.05)\n"
        "for _ in range(3):\n"
        "    bf.neighbor_allreduce(torch.ones(4), name='w')\n"
    )
    child = run.start("-np", "4", *script)
    said = child.stderr.readline()
    (run.folder / "go").touch()
    ended = run.finish(child)
    assert re.match(
        r"\d ranks \([023, ]+\) wait for rank 1, in neighbor_allreduce 'w' \(use \d\), since \d+ s",
        said,
    ), said + ended.stderr
    assert ended.code == 0


def test_verbose_keeps_the_launchers_words_and_shows_the_command(run):
    """With ``--verbose`` stderr also has the launcher's command and its own message."""
    ended = run("-np", "4", "--verbose", run.script(FAILING.format(act="os.kill(os.getpid(), 9)")))
    assert "noticed that process rank 2" in ended.stderr
    assert last_lines(ended.stderr)[0].endswith("was killed by signal 9 (SIGKILL)")
    assert " -m asyncddp.launch.rank " in ended.stderr
    assert ended.code == 137


def test_what_ranks_write_between_dashes_is_not_taken_for_the_launchers(run):
    """A rank's output in the form of the launcher's messages reaches stderr unchanged."""
    block = recorded.OPEN_MPI_5_NO_SLOTS
    ended = run("-np", "1", run.script(f"import sys\nsys.stderr.write({block!r} + '50%|#')\n"))
    assert ended.code == 0
    assert ended.stderr == block + "50%|#"


def wait_for_ranks(child, count):
    for _ in range(count):
        assert child.stdout.readline().startswith("ready")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_rank(run, number, code):
    """SIGINT or SIGTERM to the run ends all its processes, with exit code 128 + number."""
    child = run.start("-np", "4", run.script(FAILING.format(act="pass")))
    wait_for_ranks(child, 4)
    assert len(run.processes()) >= 6, "asyncddp run, mpirun and four ranks"
    child.send_signal(number)
    ended = run.finish(child)
    assert ended.code == code
    assert f"ended by signal {number.value}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert ended.seconds < SOON
    assert run.wait_until_gone(20) == []


def test_a_second_ctrl_c_kills_ranks_that_will_not_end(run):
    """A second SIGINT ends ranks that ignore SIGHUP, SIGINT and SIGTERM."""
    deaf = FAILING.format(act="pass").replace(
        "import os, sys, time",
        "import os, sys, time, signal\n"
        "for number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)",
    )
    child = run.start("-np", "4", run.script(deaf))
    wait_for_ranks(child, 4)
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    ended = run.finish(child)
    assert ended.code == 130
    assert ended.seconds < SOON
    assert run.wait_until_gone(20) == []


def test_ranks_end_when_the_command_itself_is_killed(run):
    """After SIGKILL of the command no process of the run is left."""
    child = run.start("-np", "2", run.script(FAILING.format(act="pass")))
    wait_for_ranks(child, 2)
    child.kill()
    assert run.wait_until_gone(SOON) == []


def test_a_time_limit_ends_the_run(run):
    """After ``--timeout`` seconds all processes are ended, with exit code 124 and the reason."""
    ended = run("-np", "2", "--timeout", "2", run.script(FAILING.format(act="pass")))
    assert ended.code == 124
    assert ended.stderr.endswith("asyncddp run: ended after 2 s, the limit set by --timeout\n")
    assert run.wait_until_gone(20) == []


def test_a_process_that_a_rank_has_left_behind_is_ended(run):
    """Not even one in a session of its own."""
    ended = run(
        "-np",
        "1",
        run.script(
            "import subprocess\n"
            "subprocess.Popen(['sleep', '300'], start_new_session=True,\n"
            "                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
        ),
    )
    assert ended.code == 0
    assert run.wait_until_gone(20) == []
