"""Ranks that a signal stops: in elastic runs the others go on without them."""

from __future__ import annotations

import pytest

from asyncddp.launch.suspended_ranks import SUSPENDED_SECONDS, SuspendedRanks

STOPS = """
import os, pathlib, signal, subprocess, sys, time
import asyncddp as bf
import torch

bf.init()
rank, seconds = bf.rank(), sys.argv[1]
x, longest, before = torch.ones(1), 0.0, time.monotonic()
for step in range(10**6):
    if rank == 1 and step == 5:
        if seconds != "for ever":
            words = [sys.executable, "-c", f"import os, time; time.sleep({seconds}); "
                     f"os.kill({os.getpid()}, 18)"]
            subprocess.Popen(words)
        os.kill(os.getpid(), signal.SIGSTOP)
        pathlib.Path("woken").touch()
    bf.neighbor_allreduce(x)
    now = time.monotonic()
    longest, before = max(longest, now - before), now
    done = bf.size() == 2 or os.path.exists("woken")
    if bf.allreduce(torch.tensor([float(done)]), average=False).item():
        break
print(f"rank {rank}: {bf.size()} ranks, {longest:.1f} s", flush=True)
"""


def test_a_rank_that_stays_stopped_is_killed_and_the_others_go_on(run):
    """The launcher says so, and the others have waited for it for about 1.5 s."""
    ended = run("--elastic", "-np", "3", run.script(STOPS), "for ever")
    assert ended.code == 0, ended
    assert f"was stopped by a signal for {SUSPENDED_SECONDS:g} s, and is killed" in ended.stderr
    assert "2 of 3 ranks ended with exit code 0; rank 1 was killed by SIGKILL" in ended.stderr
    lines = sorted(ended.stdout.splitlines())
    assert [line.rpartition(", ")[0] for line in lines] == ["rank 0: 2 ranks", "rank 2: 2 ranks"]
    for line in lines:
        assert float(line.split()[-2]) >= SUSPENDED_SECONDS - 0.3, line


def test_a_rank_that_goes_on_in_time_is_not_lost(run):
    """It was stopped for half a second, for which the others have waited."""
    ended = run("--elastic", "-np", "3", run.script(STOPS), "0.5")
    assert ended.code == 0, ended
    assert "stopped" not in ended.stderr
    assert "lost" not in ended.stderr
    assert sum("3 ranks" in line for line in ended.stdout.splitlines()) == 3


def looks(times, states):
    """What is found overdue at each time, where ``states`` says who is stopped then."""
    stopped = set()
    watch = SuspendedRanks(lambda pid: pid in stopped)
    found = []
    for now, state in zip(times, states, strict=True):
        stopped.clear()
        stopped.update(state)
        found.append(watch.overdue({0: 0, 1: 1, 2: 2}, now))
    return found


TIMES = [10 + 0.2 * n for n in range(20)]


def test_a_stopped_rank_is_overdue_after_its_time():
    """Not before, and others are not named."""
    found = looks(TIMES, [{1}] * len(TIMES))
    overdue = [now for now, ranks in zip(TIMES, found, strict=True) if ranks]
    assert overdue[0] == pytest.approx(10 + SUSPENDED_SECONDS, abs=0.2)
    assert {tuple(ranks) for ranks in found} == {(), (1,)}


def test_time_begins_anew_when_a_rank_goes_on():
    """A rank that is stopped again and again, each time for a short time, is slow."""
    assert not any(looks(TIMES, [{1} if n % 5 else set() for n in range(len(TIMES))]))


def test_no_rank_is_overdue_where_all_are_stopped():
    """The user has stopped the run."""
    assert not any(looks(TIMES, [{0, 1, 2}] * len(TIMES)))


def test_time_in_which_the_launcher_stood_still_does_not_count():
    """After Ctrl-Z ranks may go on later than the launcher does."""
    later = [10.0, 10.2, 90.0, 90.2, 90.4]
    assert not any(looks(later, [{1}] * len(later)))
