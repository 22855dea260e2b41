"""Signals to ``asyncddp run``: ranks get them, and have time to save before they are ended."""

import contextlib
import signal
import sys
import time

import psutil
import pytest

from tests.support import BEFORE_DEADLINE

LAUNCHERS = pytest.mark.parametrize("launcher", ["mpirun", "local"])

# each line is one write, as ranks of the local launcher share their output; {{}} for format()
SAVING = r"""
import os, signal, sys, time
rank = int(os.environ["RANK"])
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
sys.stdout.write(f"ready {{rank}}\n")
while not asked:
    time.sleep(0.05)
{save}
open(f"saved-{{rank}}", "w").close()
sys.stdout.write(f"saved {{rank}}\n")
"""
# says at its end, upon SIGUSR2, which signals it has got, and whether its child is still there
TOLD = r"""
import os, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
got = []
names = "USR1", "ALRM", "CONT", "USR2"
for name in names:
    signal.signal(getattr(signal, f"SIG{name}"), lambda number, _: got.append(number))
sys.stdout.write(f"ready {os.getpid()}\n")
while signal.SIGUSR2 not in got:
    time.sleep(0.02)
names = sorted(signal.Signals(number).name for number in set(got))
sys.stdout.write(" ".join(names) + f" worker {worker.poll()}\n")
worker.kill()
"""
# stands for a launcher that dies of signals that Open MPI's passes on
OTHER = """#!{python}
import os, subprocess, sys
if sys.argv[1:] == ["--version"]:
    sys.exit(print("{version}"))
program = sys.argv[sys.argv.index("{python}"):]
ranks = [
    subprocess.Popen(program, env={{**os.environ, "PMI_RANK": f"{{rank}}", "PMI_SIZE": "2"}})
    for rank in range(2)
]
codes = [rank.wait() for rank in ranks]
sys.exit(max(codes))
"""


def started(run, text, *options):
    """A run of two ranks whose handlers are in place, and what their first lines say."""
    child = run.start(*options, "-np", "2", run.script(text))
    lines = [child.stdout.readline().split() for _ in range(2)]
    assert [line[:1] for line in lines] == [["ready"]] * 2, lines
    return child, [int(line[1]) for line in lines]


def eventually(holds):
    end = time.monotonic() + BEFORE_DEADLINE
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    assert holds()


@LAUNCHERS
def test_after_sigterm_ranks_have_time_to_save(run, launcher):
    """Ranks that take seconds for it and exit 0 make the run exit 0, and nothing is said."""
    child, _ = started(run, SAVING.format(save="time.sleep(4)"), "--launcher", launcher)
    child.send_signal(signal.SIGTERM)
    ended = run.finish(child)
    assert sorted(ended.stdout.splitlines()) == ["saved 0", "saved 1"]
    assert (ended.code, ended.stderr) == (0, "")
    assert all((run.folder / f"saved-{rank}").exists() for rank in range(2))


@LAUNCHERS
def test_ranks_that_are_not_done_within_the_grace_period_are_killed(run, launcher):
    """The exit code is SIGTERM's then, however often it came, and the period is named."""
    options = "--launcher", launcher, "--grace-period", "1.5"
    child, _ = started(run, SAVING.format(save="time.sleep(300)"), *options)
    for _ in range(2):
        child.send_signal(signal.SIGTERM)
        time.sleep(0.1)
    ended = run.finish(child)
    assert ended.code == 143
    assert "ended by signal 15 (SIGTERM); ranks that were not done 1.5 s later" in ended.stderr
    assert run.wait_until_gone(20) == []


@LAUNCHERS
def test_a_rank_that_fails_while_it_saves_fails_the_run(run, launcher):
    """It is named, with its exit code, as at any other time."""
    child, _ = started(run, SAVING.format(save="sys.exit(3 * rank)"), "--launcher", launcher)
    child.send_signal(signal.SIGTERM)
    ended = run.finish(child)
    assert ended.code == 3
    assert ended.stderr.splitlines()[-1].endswith("ended with exit code 3"), ended.stderr
    assert "asyncddp run: rank 1 " in ended.stderr.splitlines()[-1]


@LAUNCHERS
def test_signals_that_end_nothing_reach_ranks_alone(run, launcher):
    """Neither the run ends nor a process that a rank has started, which would die of them."""
    child, _ = started(run, TOLD, "--launcher", launcher)
    for name in ("USR1", "ALRM", "CONT", "USR2"):
        child.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.1)
    ended = run.finish(child)
    assert ended.stdout.splitlines() == ["SIGALRM SIGCONT SIGUSR1 SIGUSR2 worker None"] * 2
    assert (ended.code, ended.stderr) == (0, "")


@LAUNCHERS
def test_a_run_stops_and_goes_on_with_its_ranks(run, launcher):
    """Ctrl-Z is SIGTSTP, and fg and bg send SIGCONT."""
    child, ranks = started(run, TOLD, "--launcher", launcher)
    processes = [psutil.Process(pid) for pid in (child.pid, *ranks)]
    child.send_signal(signal.SIGTSTP)
    eventually(lambda: all(one.status() == psutil.STATUS_STOPPED for one in processes))
    child.send_signal(signal.SIGCONT)
    eventually(lambda: all(one.status() != psutil.STATUS_STOPPED for one in processes))
    child.send_signal(signal.SIGUSR2)
    ended = run.finish(child)
    assert ended.stdout.splitlines() == ["SIGCONT SIGUSR2 worker None"] * 2
    assert ended.code == 0


INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18"


@pytest.mark.parametrize(
    ("version", "text", "names"),
    [
        (INTEL, TOLD, ["ALRM", "USR1", "CONT", "USR2"]),
        (INTEL, SAVING.format(save=""), ["TERM"]),
        ("slurm-wlm 22.05.8", SAVING.format(save=""), ["CONT", "ALRM", "TERM"]),
    ],
)
def test_ranks_get_what_their_launcher_would_die_of(run, version, text, names):
    """Upon SIGTERM srun kills its tasks, and SIGUSR1 ends Intel's script: ranks get them alone."""
    launcher = run.folder / "launcher"
    launcher.write_text(OTHER.format(python=sys.executable, version=version))
    launcher.chmod(0o700)
    text = f"import signal\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\n{text}"
    child, _ = started(run, text, "--launcher", str(launcher))
    for name in names:
        child.send_signal(getattr(signal, f"SIG{name}"))
        time.sleep(0.1)
    ended = run.finish(child)
    assert (ended.code, ended.stderr) == (0, "")


def test_a_rank_that_sigterm_ends_is_named_and_not_the_peer_that_missed_it(run):
    """Whether it dies of the signal or its handler ends it, with whatever exit code."""
    text = (
        "import os, signal, sys, torch, asyncddp as bf\n"
        "bf.init()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))\n"
        "bf.barrier()\n"
        "if bf.rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "while True:\n"
        "    bf.allreduce(torch.ones(4))\n"
    )
    for code, words in ((0, "left while others needed it"), (143, "ended with exit code 143")):
        ended = run("-np", "3", *run.warm(text.format(code=code)))
        first = next(line for line in ended.stderr.splitlines() if "asyncddp run:" in line)
        assert first.startswith("asyncddp run: rank 1 "), ended.stderr
        assert words in first
        assert ended.code == (code or 1)


IMPORTING = """
import sys, time
sys.stdout.write("imports\\n")
sys.stdout.flush()
sys.modules["torch"] = None  # as it is left where Ctrl-C has interrupted its import
time.sleep(60)
"""


def test_ctrl_c_before_the_library_is_there_prints_no_traceback(run):
    """Ranks have met no others yet, and torch cannot be imported again."""
    child = run.start("--launcher", "local", "-np", "2", run.script(IMPORTING))
    for _ in range(2):
        assert child.stdout.readline() == "imports\n"
    every = psutil.Process(child.pid).children(recursive=True)
    ranks = [one for one in every if one.cmdline()[1:3] == ["-m", "asyncddp.launch.rank"]]
    assert len(ranks) == 2, [one.cmdline() for one in every]
    for process in ranks:
        with contextlib.suppress(psutil.Error):  # the launcher has ended it since
            process.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130, stderr
    assert "Traceback" not in stderr, stderr
