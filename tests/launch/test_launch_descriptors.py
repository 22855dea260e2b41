"""Output that nobody reads, standard streams that are closed, and few open files."""

import resource
import shlex
import subprocess
import sys

import pytest

from tests.support import RUN_LIMIT

LAUNCHERS = pytest.mark.parametrize("launcher", ["mpirun", "local"])
MUCH = """
import os, sys
for number in range(20_000): sys.stdout.write(f"line {number}\\n")
open(f"end-{os.environ['RANK']}", "w").close()
"""


def by_shell(run, before, *arguments, after=""):
    """A run that a shell starts after some commands, and with redirections of its own."""
    words = shlex.join([sys.executable, "-m", *run.command, *arguments])
    shell = subprocess.run(
        ["sh", "-c", f"{before} exec {words} {after}"],
        env=run.environment, cwd=run.folder, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=RUN_LIMIT, check=False,
    )  # fmt: skip
    return shell.returncode, shell.stdout, shell.stderr


@LAUNCHERS
def test_a_reader_that_leaves_ends_no_run(run, launcher):
    """As ``| head -1`` does: ranks that write far more than a pipe holds come to their end."""
    options = "--launcher", launcher, "--tag-output", "-np", "2"
    child = run.start(*options, run.script(MUCH), stderr=subprocess.DEVNULL)
    assert child.stdout.readline().endswith("line 0\n")
    child.stdout.close()
    assert child.wait(timeout=RUN_LIMIT) == 0
    assert all((run.folder / f"end-{rank}").exists() for rank in range(2))


@LAUNCHERS
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_if_they_led_nowhere(run, launcher, closed):
    """Their descriptors are not those of other files then, into which output would go."""
    options = "--launcher", launcher, "-np", "2"
    assert by_shell(run, "", *options, run.script(MUCH), after=closed) == (0, "", "")
    assert all((run.folder / f"end-{rank}").exists() for rank in range(2))


def test_a_full_disk_behind_the_output_is_told_once(run):
    """The run goes on, as it may be worth more than what it prints."""
    code, _, stderr = by_shell(run, "", "-np", "2", run.script(MUCH), after=">/dev/full")
    assert code == 0
    assert stderr.count("output of ranks is lost: No space left on device") == 1


LIMIT = "import resource; print(*resource.getrlimit(resource.RLIMIT_NOFILE))"


@LAUNCHERS
def test_a_low_limit_of_open_files_is_raised_as_far_as_a_run_needs(run, launcher):
    """Where the hard limit allows it; and a higher one stays."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    options = "--launcher", launcher, "-np", "2", run.script(LIMIT)
    assert by_shell(run, "ulimit -S -n 20;", *options)[1] == f"80 {hard}\n" * 2
    assert by_shell(run, "ulimit -S -n 100;", *options)[1] == f"100 {hard}\n" * 2


@LAUNCHERS
def test_too_few_open_files_are_refused_at_once(run, launcher):
    """In one sentence with the remedy, before anything is started."""
    options = "--launcher", launcher, "-np", "2", run.script(LIMIT)
    assert by_shell(run, "ulimit -n 20;", *options) == (
        1,
        "",
        "Error: a process may open 20 files here, and a run needs at least 64. Raise the limit, "
        "as by ulimit -n 1024 in the shell that starts it\n",
    )
