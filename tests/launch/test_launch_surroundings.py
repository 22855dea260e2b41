"""What is around a run: folders, addresses, left-over files, and options in the wrong place."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asyncddp.launch.launcher_message_filter import LauncherMessageFilter
from asyncddp.launch.launchers import LAUNCHERS
from asyncddp.launch.report_directory import report_directory
from tests.launch import recorded

FAILING = "import torch, asyncddp as bf\nbf.init()\nraise SystemExit(3)\n"
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting and network namespaces want root")


def test_no_nul_byte_of_the_launcher_reaches_the_terminal(run):
    """PRRTE ends some messages with one, and grep would call the log a binary file."""
    ended = run("-np", "2", *run.warm(FAILING))
    assert ended.code == 3
    assert ended.stderr.startswith("asyncddp run: rank"), repr(ended.stderr)
    assert "\0" not in ended.stderr


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_nul_byte_is_dropped_after_a_launchers_message_alone(size):
    """However the bytes come; those that ranks write stay."""
    said = b"\0a\0\n" + recorded.OPEN_MPI_5_ABORT.encode() + b"\0\0b\n"
    part = LauncherMessageFilter(LAUNCHERS["open_mpi_5"].output_patterns)
    out = b"".join(part.feed(said[at : at + size]) for at in range(0, len(said), size))
    assert out + part.flush() == b"\0a\0\n\0b\n"


def shell(run, before, *words, **variables):
    command = [sys.executable, "-m", "asyncddp", "run", *words]
    return subprocess.run(
        ["unshare", "--mount", "--net", "sh", "-c", f'{before}\nexec "$@"', "sh", *command],
        env={**run.environment, "PYTHONPATH": str(Path.cwd()), **variables},
        cwd=run.folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def run_in(run, before, *words, **variables):
    """Exit code and standard error of a run after some commands, in namespaces of its own."""
    done = shell(run, before, *words, **variables)
    return done.returncode, done.stderr


@ROOT
def test_a_folder_that_cannot_be_used_is_named(run):
    """A full or read-only TMPDIR, and a working directory that has been removed."""
    folder = run.folder / "tmp"
    folder.mkdir()
    words = "-np", "2", run.script("pass")
    for options, why in (("size=4k", "No space left on device"), ("ro", "Read-only file system")):
        mount = f"mount -t tmpfs -o {options} tmpfs {folder}"
        code, said = run_in(run, mount, *words, TMPDIR=str(folder))
        assert code == 1
        assert said.startswith(f"Error: TMPDIR: nothing can be written into '{folder}' ({why})")
    gone = f"mkdir gone; cd gone; rmdir {run.folder}/gone"
    code, said = run_in(run, gone, *words)
    assert (code, said) == (
        1,
        "Error: the working directory has been removed: change to one that exists (cd)\n",
    )


@ROOT
def test_ranks_of_a_machine_meet_by_ipv6_where_there_is_no_ipv4(run):
    """And where there is no loopback interface at all the error says how to bring it up."""
    words = "--launcher", "local", "-np", "2"
    script = run.script("import os; print(os.environ['MASTER_ADDR'])")
    only_ipv6 = "ip link set lo up; ip address del 127.0.0.1/8 dev lo"
    done = shell(run, only_ipv6, *words, script)
    assert (done.returncode, done.stdout) == (0, "::1\n" * 2), done.stderr
    code, said = run_in(run, "", *words, script)
    assert code == 1
    assert "no loopback address (127.0.0.1 or ::1)" in said
    assert "ip link set lo up" in said


def test_a_number_of_ranks_after_the_script_is_noted(run):
    """It belongs to the script, which gets it; a run that was given one before has no note."""
    script = run.script("import sys; print(sys.argv[1:])")
    ended = run("--launcher", "local", script, "-np", "2")
    assert (ended.code, ended.stdout) == (0, "['-np', '2']\n")
    assert ended.stderr.startswith(f"asyncddp run: note: -np stands after {script} and belongs")
    assert run("--launcher", "local", "-np", "1", script, "-np", "2").stderr == ""


def test_a_host_that_cannot_be_reached_is_named_before_all_that_the_launcher_says(run):
    """PRRTE has fifteen lines on it; ssh's own reason comes first."""
    shell = run.folder / "no-ssh"
    shell.write_text("#!/bin/sh\nexit 255\n")
    shell.chmod(0o700)
    ended = run("-H", "nowhere:2", "--remote-shell", str(shell), run.script("pass"))
    assert ended.code != 0
    # PRRTE may warn of this first, where the shell has begun before its parent goes on
    said = [line for line in ended.stderr.splitlines() if "Warning: setpgid(" not in line]
    assert said[0] == "asyncddp run: host nowhere was lost, or could not be reached"
    assert "A daemon failed to report back" in ended.stderr


def test_what_a_killed_run_has_left_is_removed_by_the_next(run, tmp_path):
    """Not what a living run holds, nor folders of other machines, nor what is no run's."""
    run.environment["TMPDIR"] = str(tmp_path)
    script = run.script("import sys, time\nsys.stdout.write('ready\\n')\ntime.sleep(300)\n")
    children = [run.start("--launcher", "local", "-np", "1", script) for _ in range(2)]
    for child in children:
        assert child.stdout.readline() == "ready\n"
    killed, living = sorted(tmp_path.glob("asyncddp-*")), []
    children[0].kill()
    assert run.finish(children[0]).code == -signal.SIGKILL
    other = shutil.copytree(killed[0], tmp_path / "asyncddp-other")
    (other / "run.lock").write_text("another-machine 1")
    (tmp_path / "asyncddp-mine").mkdir()
    assert run("--launcher", "local", "-np", "1", run.script("pass")).code == 0
    living = sorted(path.name for path in tmp_path.glob("asyncddp-*"))
    assert len(living) == 3, living
    assert {"asyncddp-mine", "asyncddp-other"} < set(living)
    assert run.processes(), "the other run goes on"
    with report_directory() as own:
        assert own.is_dir()
    assert not own.exists()
