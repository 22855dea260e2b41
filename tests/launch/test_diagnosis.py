"""The diagnosis of a failed run: its cause among several failures, exit code and lines."""

import json
import os
import signal
import subprocess
import sys

import pytest

from asyncddp.launch import launcher_supervisor
from asyncddp.launch.diagnosis import diagnose, group_by_failure, read_failure_reports
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.launcher_message_filter import LauncherMessageFilter
from asyncddp.launch.launcher_supervisor import RunOutcome
from asyncddp.launch.launchers import LAUNCHERS
from asyncddp.launch.rank_tracker import RankTracker, record_end, record_start
from tests.launch import recorded


def report(folder, rank, kind, message, time, code=1, host=None, origin=None):
    data = {
        "rank": rank,
        "host": host or f"h{rank}",
        "pid": 1,
        "exit_code": code,
        "kind": kind,
        "message": message,
        "traceback": "",
        "origin": origin,
        "time": time,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(data))


def ending(code, **given):
    return RunOutcome(**{"code": code, "signal": None, "timed_out": False, **given})


def diagnosed(folder, end, said="", vendor="open_mpi_5", **given):
    found = diagnose(end, LAUNCHERS[vendor], said, folder, RunOptions(**given))
    return found.code, *found.lines


def test_success_is_not_talked_about(tmp_path):
    """A run that ended with 0 and left no report has no lines."""
    assert diagnosed(tmp_path, ending(0)) == (0,)


def test_the_earliest_report_is_the_cause(tmp_path):
    """The earliest report gives exit code and first line; later ones have their delay."""
    report(tmp_path, 0, "RuntimeError", "late", 12.0, 1)
    report(tmp_path, 3, "ValueError", "loss is nan\nsecond line", 10.5, 7)
    assert diagnosed(tmp_path, ending(1)) == (
        7,
        "rank 3 on h3 failed (exit code 7): ValueError: loss is nan",
        "then 1.5 s later: rank 0 on h0 failed (exit code 1): RuntimeError: late",
    )


def test_a_rank_that_lost_its_peer_is_no_cause_even_if_it_spoke_first(tmp_path):
    """A ``PeerLeftError`` is no cause where another rank reports another error, if later."""
    report(tmp_path, 0, "PeerLeftError", "rank 3 has left", 10.0)
    report(tmp_path, 3, "ValueError", "loss is nan", 10.1)
    assert diagnosed(tmp_path, ending(1))[1].startswith("rank 3 on h3 failed")


def test_a_signal_is_the_cause_of_what_the_others_report(tmp_path):
    """A rank that the launcher names as killed goes before a reported ``PeerLeftError``."""
    report(tmp_path, 0, "PeerLeftError", "rank 2 has left", 10.0)
    code, first, second, _ = diagnosed(tmp_path, ending(137), recorded.OPEN_MPI_5_KILLED)
    assert (code, first) == (137, "rank 2 on vm was killed by signal 9 (SIGKILL)")
    assert second == "then: rank 0 on h0 failed (exit code 1): PeerLeftError: rank 2 has left"


def test_a_rank_that_reported_before_it_was_killed_is_believed(tmp_path):
    """An abort may end in a signal; the exception says more."""
    report(tmp_path, 2, "ValueError", "loss is nan", 10.0)
    lines = diagnosed(tmp_path, ending(137), recorded.OPEN_MPI_5_KILLED)
    assert lines == (1, "rank 2 on h2 failed (exit code 1): ValueError: loss is nan")


def test_out_of_memory_is_thought_of(tmp_path):
    """After a SIGKILL a line mentions that memory may have run out."""
    assert "out of memory" in diagnosed(tmp_path, ending(137), recorded.OPEN_MPI_5_KILLED)[2]


@pytest.mark.parametrize(
    ("vendor", "said"), [("mpich", "MPICH_KILLED"), ("intel_mpi", "INTEL_KILLED_ALL")]
)
def test_where_the_launcher_names_nobody_the_first_that_was_lost_is(tmp_path, vendor, said):
    """If the launcher names no rank, the one lost first is named, else "a rank"."""
    words = getattr(recorded, said)
    assert "rank 3" in diagnosed(tmp_path, ending(9, lost=(3, 0, 1)), words, vendor)[1]
    assert diagnosed(tmp_path, ending(9), words, vendor)[1].startswith("a rank")


def test_without_reports_the_launchers_words_serve(tmp_path):
    """Without reports rank and exit code are those of the launcher's message."""
    assert diagnosed(tmp_path, ending(1), recorded.OPEN_MPI_5_EXIT) == (
        3,
        "rank 2 ended with exit code 3",
    )


def test_an_exit_code_without_a_reason_is_not_dressed_up(tmp_path):
    """A ``SystemExit`` with a number is told as an exit code, without an exception."""
    report(tmp_path, 1, "SystemExit", "3", 1.0, 3)
    assert diagnosed(tmp_path, ending(3)) == (3, "rank 1 on h1 ended with exit code 3")


@pytest.mark.parametrize(("code", "expected"), [(1, 1), (-11, 139)])
def test_what_cannot_be_explained_is_said_to_be_so(tmp_path, code, expected):
    """Without report or message nothing is explained; a signal's exit code is 128 + number."""
    found = diagnose(ending(code), LAUNCHERS["open_mpi_5"], "", tmp_path, RunOptions())
    assert (found.code, found.explained) == (expected, False)


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (255, 255)])
def test_a_lost_host_is_a_failure_even_where_the_launcher_calls_it_a_success(
    tmp_path, code, expected
):
    """Open MPI 5.0 exits with 0 when the daemon of a host has gone."""
    said = recorded.OPEN_MPI_5_HOST_LOST
    found = diagnose(ending(code), LAUNCHERS["open_mpi_5"], said, tmp_path, RunOptions())
    assert found.code == expected
    assert found.lines == ("host h2 was lost, or could not be reached",)
    assert not found.explained, "so the launcher's own words are shown"


def test_a_rank_that_mpi_ended_over_a_closed_connection_is_not_taken_for_the_cause(tmp_path):
    """Over TCP, a rank may notice that its peer was killed before the launcher does."""
    said = recorded.OPEN_MPI_5_CONNECTION_CLOSED
    code, line = diagnosed(tmp_path, ending(14, lost=(1, 0)), said)
    assert code == 14
    assert line.startswith("rank 1 was lost first, killed or ended without a report")
    (line,) = diagnosed(tmp_path, ending(14), said)[1:]
    assert line == (
        "rank 0 on h1 was ended by MPI itself: another rank was lost, or the network failed"
    )
    report(tmp_path, 1, "ValueError", "loss is nan", 1.0)
    assert diagnosed(tmp_path, ending(14), said)[1].startswith("rank 1 on h1 failed")


def test_signals_and_limits_of_ours_come_first(tmp_path):
    """The run's own signal or time limit is the diagnosis, before any report."""
    report(tmp_path, 1, "KeyboardInterrupt", "", 1.0, 130)
    assert diagnosed(tmp_path, ending(1, signal=2)) == (130, "ended by signal 2 (SIGINT)")
    late = ending(143, timed_out=True)
    assert diagnosed(tmp_path, late, timeout=90.0) == (
        124,
        "ended after 90 s, the limit set by --timeout",
    )


def test_many_ranks_do_not_bury_the_first(tmp_path):
    """Of eight different failures four have their own lines; a last one names the rest."""
    for rank in range(8):
        report(tmp_path, rank, "ValueError", "abcdefgh"[rank], float(rank))
    assert diagnosed(tmp_path, ending(1))[-1] == "and ranks 4\u20137"
    assert len(diagnosed(tmp_path, ending(1))) == 6


def test_ranks_that_fail_alike_are_told_of_in_one_line(tmp_path):
    """What differs is which ranks a message names, and how long it took."""
    for rank in (0, 1, 2, 3, 5):
        words = (
            f"rank {rank}: allreduce was not done in {3 + rank / 10} s; missing: rank {9 - rank}"
        )
        report(tmp_path, rank, "WaitTimeoutError", words, float(rank), host="h1")
    report(tmp_path, 4, "WaitTimeoutError", "rank 4: broadcast was not done in 3.1 s", 9.0)
    said = "allreduce was not done in 3.0 s; missing: rank 9"
    assert diagnosed(tmp_path, ending(1)) == (
        1,
        f"ranks 0\u20133, 5 on h1 failed alike (exit code 1): WaitTimeoutError: rank 0: {said}",
        "then 9.0 s later: rank 4 on h4 failed (exit code 1): WaitTimeoutError: rank 4: broadcast "
        "was not done in 3.1 s",
    )
    assert [len(group) for group in group_by_failure(read_failure_reports(tmp_path))] == [5, 1]


def test_who_was_refused_by_the_rank_that_failed_is_no_cause_of_its_own(tmp_path):
    """Errors passed on by the rank that failed are told in its line, by its message."""
    cause = "rank 2: allreduce was not done in 3.0 s"
    report(tmp_path, 0, "WaitTimeoutError", f"rank 0, allreduce, refused by rank 2: {cause}", 1.0)
    report(
        tmp_path,
        1,
        "WaitTimeoutError",
        f"rank 1, allreduce, given up by rank 2: {cause}",
        1.1,
        origin=2,
    )
    report(tmp_path, 2, "WaitTimeoutError", cause, 1.2)
    (line,) = diagnosed(tmp_path, ending(1))[1:]
    assert line == f"ranks 0\u20132 failed alike (exit code 1): WaitTimeoutError: {cause}"


def test_a_rank_that_left_before_the_end_is_named(tmp_path):
    """By os._exit(0), of which Open MPI speaks, and where nobody says a word."""
    said = recorded.OPEN_MPI_5_UNFINISHED
    assert diagnosed(tmp_path, ending(1), said) == (
        1,
        "rank 1 on vm ended with exit code 0 before MPI was finalized, as by os._exit(0)",
    )
    code, line = diagnosed(tmp_path, ending(1, lost=(3, 0)))
    assert code == 1
    assert line == (
        "rank 3 was lost first, killed or ended without a report, as by os._exit(); the launcher "
        "ended with exit code 1"
    )
    report(tmp_path, 0, "WaitTimeoutError", "nobody came", 1.0)
    lines = diagnosed(tmp_path, ending(1, lost=(3,)))
    assert lines[2].startswith("before that, rank 3 was lost, killed or ended without a report")


def test_who_left_while_others_waited_in_init_is_named(tmp_path):
    """If ranks wait in ``init()``, those lost or ended without calling it are named."""
    away = ending(143, waiting_in_init=(0, 2), lost=(1, 0, 2))
    assert diagnosed(tmp_path, away)[1] == (
        "rank 1 was lost, killed or ended without a report, as by os._exit(), while ranks 0, 2 "
        "waited for it in init()"
    )
    done = ending(143, waiting_in_init=(0,), ended=(1, 2, 3))
    assert diagnosed(tmp_path, done)[1] == (
        "ranks 1\u20133 came to the end of the script without calling init(), while rank 0 waited "
        "for it in init()"
    )


def test_a_report_that_was_cut_short_is_left_out(tmp_path):
    """Reports that are no complete JSON object of a report are not read."""
    (tmp_path / "rank-0.json").write_text('{"rank": 0, "ho')
    (tmp_path / "rank-1.json").write_text('{"rank": 1}')
    (tmp_path / "rank-2.json").write_text("[]")
    assert read_failure_reports(tmp_path) == []


def test_the_tracker_knows_which_ranks_are_lost(tmp_path):
    """A rank of this host is lost if its process ends with neither end file nor report."""
    children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) for _ in range(4)]
    for rank, child in enumerate(children[:3]):
        record_start(str(tmp_path), str(rank))
        (tmp_path / f"started-{rank}").write_text(f"{child.pid} {os.uname().nodename}")
    (tmp_path / "started-3").write_text("1 another-machine")
    (tmp_path / "started-4").write_text(f"{children[3].pid} {os.uname().nodename}")
    children[3].kill()
    children[3].communicate()
    tracker = RankTracker(tmp_path)
    assert sorted(tracker.new_processes()) == [0, 1, 2]
    assert tracker.lost == [4], "it had ended before the first look"
    assert tracker.new_processes() == {}
    assert tracker.waiting_in_init() == ()
    (tmp_path / "joining-2").touch()
    assert tracker.waiting_in_init() == (2,)
    record_end(str(tmp_path), "0")
    assert tracker.ended() == (), "its process is still there"
    children[1].send_signal(signal.SIGKILL)
    for child in children:
        child.communicate()
    for rank in (0, 1):
        assert tracker.on_process_exit(rank) is False
    assert tracker.lost == [4, 1]
    assert tracker.ended() == (0,)
    (tmp_path / "joined-1").touch()
    assert not tracker.is_lost_for_good(), "rank 2 may do something of worth"
    (tmp_path / "rank-2.json").touch()
    tracker.on_process_exit(2)
    assert tracker.lost == [4, 1], "what comes after a report is no news"
    assert tracker.is_lost_for_good()
    (tmp_path / "joined-1").unlink()
    assert not tracker.is_lost_for_good(), "ranks that are no part of MPI end as they like"
    tracker.close()


def test_signals_reach_ranks_that_have_not_been_seen_yet(tmp_path):
    """They start between two looks; those that start after SIGTERM get it, and none twice."""
    text = (
        "import signal; every = [*signal.Signals]; signal.pthread_sigmask(0, every); "
        "print(flush=True); print(int(signal.sigwait(every)), flush=True); "
        "print(signal.sigtimedwait([15], 0.2))"
    )
    command = [sys.executable, "-c", text]
    tracker = RankTracker(tmp_path)
    ranks: list[subprocess.Popen[str]] = []

    def start() -> None:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        child.stdout.readline()
        (tmp_path / f"started-{len(ranks)}").write_text(f"{child.pid} {os.uname().nodename}")
        ranks.append(child)

    assert not tracker.send(signal.SIGTERM), "there is none"
    start()
    assert sorted(tracker.new_processes()) == [0], "which started after the signal"
    ranks[0].wait()
    tracker.on_process_exit(0)
    start()
    assert tracker.send(signal.SIGUSR1)
    ranks[1].wait()
    start()
    assert tracker.send(signal.SIGTERM)
    assert sorted(tracker.new_processes()) == [2]
    ends = [rank.communicate()[0].splitlines() for rank in ranks]
    tracker.close()
    assert ends == [["15", "None"], ["10", "None"], ["15", "None"]]


LAUNCHER_THAT_STAYS = """
import os, pathlib, socket, subprocess, sys, time
folder = pathlib.Path(os.environ["ASYNCDDP_REPORT_DIR"])
rank = subprocess.Popen(["sleep", "300"])
(folder / "started-0").write_text(f"{rank.pid} {socket.gethostname()}")
(folder / "joined-0").touch()
time.sleep(1)
rank.kill()
rank.wait()
time.sleep(300)
"""


def test_a_launcher_that_stays_after_its_ranks_were_lost_is_ended(tmp_path, monkeypatch):
    """PRRTE did so once in forty runs over two hosts of which one rank was killed."""
    monkeypatch.setattr(launcher_supervisor, "_LOSS_GRACE_PERIOD", 0.5)
    command = [sys.executable, "-IS", "-c", LAUNCHER_THAT_STAYS]
    filters = (None, LauncherMessageFilter())
    outcome = launcher_supervisor.supervise(
        command,
        dict(os.environ),
        LAUNCHERS["mpich"],
        tmp_path,
        filters,
        RunOptions(timeout=60, grace_period=0.0),
    )
    assert outcome == ending(-signal.SIGTERM, lost=(0,))


def test_recording_where_the_folder_is_on_another_machine_does_nothing(tmp_path):
    """Recording start or end in a folder that does not exist raises and creates nothing."""
    record_start(str(tmp_path / "nowhere"), "0")
    record_end(str(tmp_path / "nowhere"), "0")
    assert list(tmp_path.iterdir()) == []
