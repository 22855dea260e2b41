"""``asyncddp run --elastic``: ranks go on where one dies, and the terminal says what was lost."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.support import BEFORE_DEADLINE

# a file of the test's folder says what a rank does; those without one go on until "go" is there
ACTING = """
import os, pathlib, sys, time
rank = int(os.environ["RANK"])
sys.stdout.write(f"ready {rank} {os.getpid()}\\n")
sys.stdout.flush()
def wait_for(*names):
    end = time.monotonic() + 200
    while not any(map(os.path.exists, names)) and time.monotonic() < end:
        time.sleep(0.02)
wait_for("go", f"act-{rank}")
act = pathlib.Path(f"act-{rank}")
if act.exists():
    exec(act.read_text())
sys.stdout.write(f"done {rank}\\n")
"""


class Elastic:
    """An elastic run, whose ranks say that they are ready and then do what they are told."""

    def __init__(self, run, ranks, *options):
        self.run, self.ranks = run, ranks
        words = "--elastic", *options, "-np", str(ranks), run.script(ACTING)
        self.child = run.start(*words)
        lines = [self.child.stdout.readline().split() for _ in range(ranks)]
        self.pids = {int(rank): int(pid) for _, rank, pid in lines}
        self.notices: list[str] = []

    def act(self, rank, text):
        """Have a rank run something."""
        begun = self.run.folder / "begun"
        begun.write_text(text)
        begun.rename(self.run.folder / f"act-{rank}")

    def notice(self):
        """The next line of the terminal, which comes while the others run."""
        self.notices.append(self.child.stderr.readline())
        return self.notices[-1].rstrip("\n")

    def finish(self):
        """Let those that are left come to their end."""
        (self.run.folder / "go").touch()
        return self.run.finish(self.child)


def kill(number=9):
    return f"os.kill(os.getpid(), {int(number)})"


def test_the_others_go_on_after_a_kill_and_the_run_succeeds(run):
    """One line says at once who died, of what, and how many go on; a summary ends the run."""
    elastic = Elastic(run, 4)
    elastic.act(3, kill())
    pid = elastic.pids[3]
    assert elastic.notice() == f"asyncddp: rank 3 (pid {pid}) was killed by SIGKILL; 3 ranks go on"
    time.sleep(4)  # more than the others would have without --elastic
    ended = elastic.finish()
    assert sorted(ended.stdout.splitlines()) == ["done 0", "done 1", "done 2"]
    summary = "asyncddp: 3 of 4 ranks ended with exit code 0; rank 3 was killed by SIGKILL\n"
    assert (ended.code, ended.stderr) == (0, summary)
    assert run.wait_until_gone(20) == []


def test_a_run_that_loses_nobody_says_nothing(run):
    """Ranks that end early do not end the others."""
    elastic = Elastic(run, 3, "--min", "3")
    elastic.act(0, "pass")
    time.sleep(1)
    ended = elastic.finish()
    assert sorted(ended.stdout.splitlines()) == ["done 0", "done 1", "done 2"]
    assert (ended.code, ended.stderr) == (0, "")


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("sys.exit(3)", "ended with exit code 3"),
        ("os._exit(4)", "ended with exit code 4"),
        (kill(signal.SIGSEGV), "was killed by SIGSEGV"),
        ("raise ValueError('no data')", "ended with exit code 1 (ValueError: no data)"),
    ],
)
def test_each_way_to_die_is_named(run, act, how):
    """An exception's traceback stands above its line, and is not shown again."""
    elastic = Elastic(run, 2)
    elastic.act(1, act)
    lines = [elastic.notice()]
    while not lines[-1].startswith("asyncddp: "):
        lines.append(elastic.notice())
    assert lines[-1] == f"asyncddp: rank 1 (pid {elastic.pids[1]}) {how}; 1 rank goes on"
    assert lines.count("Traceback (most recent call last):") == ("raise" in act)
    ended = elastic.finish()
    assert (ended.code, ended.stdout) == (0, "done 0\n")
    (summary,) = ended.stderr.splitlines()
    short = how.partition(" (")[0]
    assert summary == f"asyncddp: 1 of 2 ranks ended with exit code 0; rank 1 {short}"


def test_too_few_ranks_end_the_run_with_the_first_failure_s_code(run):
    """The last notice says so, and ranks that would sleep on are ended soon."""
    elastic = Elastic(run, 4, "--min", "3")
    elastic.act(2, kill())
    assert elastic.notice().endswith("was killed by SIGKILL; 3 ranks go on")
    elastic.act(0, "sys.exit(5)")
    assert elastic.notice().endswith(
        "ended with exit code 5; 2 ranks are left, fewer than --min 3: the run is ended"
    )
    ended = run.finish(elastic.child)
    assert (ended.code, ended.stdout) == (137, "")
    assert ended.seconds < BEFORE_DEADLINE
    assert ended.stderr == (
        "asyncddp: 0 of 4 ranks ended with exit code 0, fewer than --min 3; rank 2 was killed by "
        "SIGKILL, rank 0 ended with exit code 5, 2 more were ended\n"
    )
    assert run.wait_until_gone(20) == []


def test_ranks_that_have_ended_well_count_as_left(run):
    """Of four ranks two end well and one dies: with --min 3 the last one may come to its end."""
    elastic = Elastic(run, 4, "--min", "3")
    for rank in (0, 1):
        elastic.act(rank, "pass")
    assert {elastic.child.stdout.readline() for _ in (0, 1)} == {"done 0\n", "done 1\n"}
    time.sleep(0.5)
    elastic.act(2, kill())
    assert elastic.notice().endswith("; 1 rank goes on")
    ended = elastic.finish()
    assert (ended.code, ended.stdout) == (0, "done 3\n")
    assert ended.stderr.startswith("asyncddp: 3 of 4 ranks ended with exit code 0; rank 2 was")


def test_a_run_that_loses_all_fails(run):
    """Nobody is left to go on."""
    elastic = Elastic(run, 2)
    elastic.act(0, "sys.exit(7)")
    assert elastic.notice().endswith("exit code 7; 1 rank goes on")
    elastic.act(1, kill())
    assert elastic.notice().endswith("; 0 ranks are left, fewer than --min 1: the run is ended")
    ended = run.finish(elastic.child)
    assert ended.code == 7
    assert ended.stderr.count("\n") == 1


DYING_TWICE = """
import os, pathlib, time
died = pathlib.Path("died")
if os.environ["RANK"] == "1":
    with died.open("a") as file:
        file.write("x")
    os.kill(os.getpid(), 9)
while not died.exists() or died.stat().st_size < 2:
    time.sleep(0.02)
time.sleep(0.3)
"""


@pytest.mark.parametrize(("least", "code"), [(1, 0), (2, 137)])
def test_a_rank_that_waits_for_its_next_process_is_given_up_with_the_others(run, least, code):
    """It counts as lost, in the summary and in the exit code, once the others have ended."""
    text = "import os, time\nos.environ['RANK'] == '1' and os.kill(os.getpid(), 9)\ntime.sleep(0.6)"
    ended = run("--elastic", "--restarts", "9", "--min", f"{least}", "-np", "2", run.script(text))
    few = ", fewer than --min 2" if least == 2 else ""
    assert ended.stderr.splitlines()[-1] == (
        f"asyncddp: 1 of 2 ranks ended with exit code 0{few}; rank 1 was killed by SIGKILL, and "
        "was not replaced, since the others had ended"
    )
    assert ended.code == code


def test_an_exception_of_all_ranks_is_shown_once(run):
    """Ranks that fail alike have one traceback."""
    ended = run("--elastic", "-np", "3", run.script("raise KeyError('x')"))
    assert ended.code == 1
    assert ended.stderr.count("Traceback (most recent call last)") == 1
    assert len(re.findall(r"^asyncddp: rank \d \(pid \d+\) ended", ended.stderr, re.MULTILINE)) == 3


def test_ctrl_c_ends_an_elastic_run_as_any_other(run):
    """No rank that dies of it is told of as lost."""
    elastic = Elastic(run, 2)
    elastic.child.send_signal(signal.SIGINT)
    ended = run.finish(elastic.child)
    assert ended.code == 130
    assert ended.stderr == "asyncddp run: ended by signal 2 (SIGINT)\n"
    assert run.wait_until_gone(20) == []


SAVING = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
sys.stdout.write("ready\\n")
sys.stdout.flush()
while not asked:
    time.sleep(0.02)
time.sleep(4)
{last}
"""


@pytest.mark.parametrize(("last", "code"), [("", 0), ("sys.exit(3)", 3)])
def test_after_sigterm_ranks_of_an_elastic_run_may_save(run, last, code):
    """Those that fail as they do so are named."""
    child = run.start("--elastic", "-np", "2", run.script(SAVING.format(last=last)))
    for _ in range(2):
        assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGTERM)
    ended = run.finish(child)
    assert ended.code == code
    named = [line.partition(") ")[2] for line in ended.stderr.splitlines()]
    assert named == ["ended with exit code 3"] * 2 * bool(code)


def test_the_time_limit_holds_for_an_elastic_run(run):
    """It is named, and its exit code is that of timeout(1)."""
    script = run.script("import time; time.sleep(200)")
    ended = run("--elastic", "--timeout", "1.5", "-np", "2", script)
    assert ended.code == 124
    assert ended.stderr == "asyncddp run: ended after 1.5 s, the limit set by --timeout\n"


def test_lines_are_tagged_in_an_elastic_run(run):
    """Notices are the launcher's, and have no tag."""
    text = "import os\nprint('here')\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)"
    ended = run("--elastic", "--tag-output", "-np", "2", run.script(text))
    assert ended.code == 0
    assert "[0] here" in ended.stdout.splitlines()
    assert all(line.startswith("asyncddp: ") for line in ended.stderr.splitlines())


@pytest.mark.parametrize(("act", "code"), [("os._exit(3)", 3), ("raise ValueError('no data')", 1)])
def test_a_rank_that_is_lost_before_all_have_joined_ends_the_run(run, act, code):
    """The others wait for it in init(), of which nothing comes."""
    text = (
        f"import os\nif os.environ['RANK'] == '1': {act}\nimport torch, asyncddp as bf\nbf.init()\n"
    )
    ended = run("--elastic", "-np", "2", *run.warm(text))
    assert ended.code == code
    assert ended.seconds < BEFORE_DEADLINE
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("asyncddp run: rank")]
    assert "while rank 0 waited for it in init()" in line
    assert ended.stderr.count("Traceback (most recent call last)") == ("raise" in act)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--min", "2"), "--min: expected beside --elastic, got --min 2 alone. Add --elastic, or"),
        (("--restarts", "2"), "--restarts: expected beside --elastic, got --restarts 2 alone. Add"),
        (("--spares", "2"), "--spares: expected beside --elastic, got --spares 2 alone. Add"),
        (
            ("--elastic", "--restarts", "1", "--spares", "2"),
            "--spares: expected at most --restarts, 1, which says how many ranks are replaced, got",
        ),
        (
            ("--elastic", "--min", "5"),
            "--min: expected at most the number of ranks, 4, got 5. Give a smaller number, or",
        ),
        (("--elastic", "--min", "0"), "'--min': expected a number of ranks of at least 1, got '0'"),
        (
            ("--elastic", "--launcher", "mpirun"),
            "--launcher: expected 'local' beside --elastic, got 'mpirun': launchers of MPI end all",
        ),
        (
            ("--elastic", "-H", "elsewhere:2,beside:2"),
            "-H: expected hosts that are this machine beside --elastic, got -H elsewhere:2,beside",
        ),
        (
            ("--elastic", "-x", "ASYNCDDP_TRANSPORT=shared_memory"),
            "ASYNCDDP_TRANSPORT: expected 'c10d' beside --elastic, got 'shared_memory'",
        ),
        (
            ("--elastic", "-x", "ASYNCDDP_TRANSPORT=mpi"),
            "ASYNCDDP_TRANSPORT: expected 'c10d' beside --elastic, got 'mpi'",
        ),
    ],
)
def test_what_cannot_be_elastic_is_refused(run, options, words):
    """The message names argument, expected, got and remedy, and nothing starts."""
    ended = run(*options, "-np", "4", run.script("print('started')"))
    assert (ended.code, ended.stdout) == (2, "")
    assert words in ended.stderr, ended.stderr


def test_the_command_shows_what_makes_it_elastic(run):
    """--dry-run prints it."""
    ended = run("--elastic", "--min", "2", "-np", "3", "--dry-run", run.script(""))
    assert ended.code == 0
    assert "ASYNCDDP_ELASTIC=1 " in ended.stdout
    assert "asyncddp.launch.elastic_launcher 3 2 0 0 -- " in ended.stdout
