"""Diagnosis of failed runs in one sentence, from the ranks' reports and the launcher's messages."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.launcher_supervisor import RunOutcome
from asyncddp.launch.launchers import FailedRank, Launcher
from asyncddp.rank_list_text import list_ranks

_TIMED_OUT = 124  # as timeout(1)
_VANISHED = "killed or ended without a report, as by os._exit()"
_UNFINISHED = " before MPI was finalized, as by os._exit(0)"
_LEFT = re.compile(r"rank (?P<rank>\d+) has left \((?P<why>.+?)\),")
# Prefix of a message that quotes the failure of another rank.
_REPEATED = re.compile(r".*(?:refused|given up) by rank \d+: ", re.DOTALL)
_HINTS: dict[int, tuple[str]] = {
    signal.SIGKILL: ("Where nobody did that by hand, the machine may have run out of memory.",),
    signal.SIGSEGV: ("A native library crashed; PYTHONFAULTHANDLER=1 shows where.",),
}
_SHOWN = 3  # groups of ranks that are described beside the first
_RANK_OR_TIME = re.compile(r"\branks? \d+(?:(?:\u2013|, | and )\d+)*(?: more)?|\b\d+\.\d+ s\b")


@dataclass(frozen=True)
class RankFailureReport:
    """Report of one failed rank: exception, message, exit code and time."""

    rank: int
    host: str
    exit_code: int
    kind: str
    message: str
    time: float
    traceback: str = ""
    origin: int | None = None

    @property
    def is_consequence(self) -> bool:
        """True if the rank failed only because another rank had failed or ended."""
        told = self.origin not in (None, self.rank) or _REPEATED.match(self.message) is not None
        return told or self.kind.rpartition(".")[2] == "PeerLeftError"

    @property
    def failure_key(self) -> tuple[object, ...]:
        """Grouping key; reports of the same failure on different ranks have equal keys."""
        return self.kind, self.exit_code, _RANK_OR_TIME.sub("…", _REPEATED.sub("", self.message))


def group_by_failure(reports: Iterable[RankFailureReport]) -> list[list[RankFailureReport]]:
    """Group reports of the same failure across ranks; causes come before consequences.

    Messages that differ only in the ranks that they name and in seconds count as the same.
    """
    groups = defaultdict[tuple[object, ...], list[RankFailureReport]](list)
    for report in sorted(reports, key=lambda report: report.is_consequence):
        groups[report.failure_key].append(report)
    return list(groups.values())


def _describe_group(group: Sequence[RankFailureReport]) -> str:
    first, hosts = group[0], {report.host for report in group}
    where = list_ranks(report.rank for report in group)
    where = f"{where} on {first.host}" if len(hosts) == 1 else where
    if first.kind == "SystemExit" and first.message.strip("-").isdigit():
        return f"{where} ended with exit code {first.exit_code}"
    same = " alike" if len(group) > 1 else ""
    line = first.message.strip().partition("\n")[0]
    return f"{where} failed{same} (exit code {first.exit_code}): {first.kind}: {line}".rstrip(" :")


@dataclass(frozen=True)
class Diagnosis:
    """Exit code of a run and the lines that explain its failure, the most important first."""

    code: int
    lines: tuple[str, ...] = ()  # empty for a successful run
    explained: bool = True  # whether the failed rank and its reason are known


def read_failure_report(path: Path) -> RankFailureReport | None:
    """Read one rank's failure report; None if there is none, or it cannot be read."""
    with contextlib.suppress(OSError, ValueError):  # a rank that was killed while it wrote
        data = json.loads(path.read_text(encoding="utf-8"))  # which may hold surrogates
        return msgspec.convert(data, RankFailureReport)
    return None


def read_failure_reports(report_directory: Path) -> list[RankFailureReport]:
    """Read the ranks' failure reports, earliest first; skip unreadable ones."""
    read = map(read_failure_report, report_directory.glob("rank-*.json"))
    found = [report for report in read if report is not None]
    found.sort(key=lambda report: report.time)
    # the launcher has ended ranks that say after another's failure that they ended by SIGTERM
    return found[:1] + [one for one in found[1:] if one.exit_code != 128 + signal.SIGTERM]


def _signal_name(number: int) -> str:
    known = number in set(signal.Signals)
    return f"signal {number}" + (f" ({signal.Signals(number).name})" if known else "")


def _describe_rank(rank: int | None, host: str | None) -> str:
    who = "a rank" if rank is None else f"rank {rank}"
    return who if host is None else f"{who} on {host}"


def diagnose(
    outcome: RunOutcome,
    launcher: Launcher,
    output: str,
    report_directory: Path,
    options: RunOptions,
) -> Diagnosis:
    """Determine why a run ended, and its exit code.

    What counts first: a rank killed by a signal, the earliest report of a rank that failed by
    itself, exit codes that the launcher names, reports of ranks that failed because others had.
    """
    if outcome.timed_out:
        limit = f"ended after {options.timeout:g} s, the limit set by --timeout"
        return Diagnosis(_TIMED_OUT, (limit,))
    rank_exit, reports = launcher.parse_rank_exit(output), read_failure_reports(report_directory)
    if outcome.signal is not None and not _ended_by_themselves(outcome, rank_exit, reports):
        line = f"ended by {_signal_name(outcome.signal)}"
        if outcome.signal == signal.SIGTERM and outcome.killed:
            late = f"{options.grace_period:g} s later (--grace-period)"
            line += f"; ranks that were not done {late} were killed"
        return Diagnosis(128 + outcome.signal, (line,))
    if outcome.waiting_in_init:
        lines = (_describe_wait_in_init(outcome, reports), *_describe_others(reports))
        return Diagnosis(outcome.code or 1, lines)
    if (outcome.code == 0 and rank_exit is None) or (options.elastic and outcome.code > 0):
        return Diagnosis(outcome.code)  # the launcher of an elastic run has said why
    if rank_exit is not None and rank_exit.signal is not None:
        rank = next(iter(outcome.lost), None) if rank_exit.rank is None else rank_exit.rank
        if not any(report.rank == rank for report in reports):
            who = _describe_rank(rank, rank_exit.host)
            line = f"{who} was killed by {_signal_name(rank_exit.signal)}"
            hints = _HINTS.get(rank_exit.signal, ())
            return Diagnosis(128 + rank_exit.signal, (line, *_describe_others(reports), *hints))
        return _diagnose_reports(sorted(reports, key=lambda report: report.rank != rank))
    return _diagnose_exit_codes(outcome, rank_exit, reports)


def _ended_by_themselves(
    outcome: RunOutcome, rank_exit: FailedRank | None, reports: Sequence[RankFailureReport]
) -> bool:
    """Return whether ranks ended or failed by themselves after SIGTERM, without being killed."""
    if outcome.signal != signal.SIGTERM or outcome.killed:
        return False
    asked = {None, 0, 128 + signal.SIGTERM}
    failed = any(r.exit_code not in asked and not r.is_consequence for r in reports)
    if rank_exit is None:
        return failed or outcome.code == 0
    return failed or rank_exit.code not in asked or rank_exit.signal not in (None, signal.SIGTERM)


def _diagnose_exit_codes(
    outcome: RunOutcome, rank_exit: FailedRank | None, reports: Sequence[RankFailureReport]
) -> Diagnosis:
    if not all(report.is_consequence for report in reports):
        return _diagnose_reports(reports, outcome.lost)
    code = outcome.code if outcome.code > 0 else 128 - outcome.code
    reporters = {report.rank for report in reports}
    if not outcome.lost and (rank_exit is None or rank_exit.rank in reporters):
        left = [match for report in reports if (match := _LEFT.search(report.message))]
        left = [match for match in left if int(match["rank"]) not in reporters]
        if left:
            line = f"rank {left[0]['rank']} left while others needed it: {left[0]['why']}"
            return Diagnosis(reports[0].exit_code or 1, (line, *_describe_others(reports)))
    if rank_exit is not None and rank_exit.code is not None:
        who = _describe_rank(rank_exit.rank, rank_exit.host)
        line = f"{who} ended with exit code {rank_exit.code}"
        line += "" if rank_exit.code else _UNFINISHED
        return Diagnosis(rank_exit.code or code or 1, (line, *_describe_others(reports)))
    if reports:
        return _diagnose_reports(reports, outcome.lost)
    if rank_exit is not None and rank_exit.lost_host:  # Open MPI may call that a success
        line = f"host {rank_exit.host} was lost, or could not be reached"
        return Diagnosis(outcome.code or 1, (line,), explained=False)
    if rank_exit is not None:  # MPI itself ended it, as after a connection to a lost peer closed
        who = _describe_rank(rank_exit.rank, rank_exit.host)
        line = f"{who} was ended by MPI itself: another rank was lost, or the network failed"
        if outcome.lost and outcome.lost[0] != rank_exit.rank:
            line = f"rank {outcome.lost[0]} was lost first, {_VANISHED}; then {who} was"
        return Diagnosis(code or 1, (line,))
    line = f"the launcher ended with exit code {code}"
    if outcome.lost:
        line = f"{list_ranks(outcome.lost[:1])} was lost first, {_VANISHED}; {line}"
    return Diagnosis(code, (line,), explained=False)


def _describe_wait_in_init(outcome: RunOutcome, reports: Sequence[RankFailureReport]) -> str:
    waiting = f"while {list_ranks(outcome.waiting_in_init)} waited for it in init()"
    gone = [rank for rank in outcome.lost if rank not in outcome.waiting_in_init]
    if gone and {*gone} <= {report.rank for report in reports}:
        return f"{list_ranks(gone)} failed {waiting}"
    if gone:
        return f"{list_ranks(gone)} was lost, {_VANISHED}, {waiting}"
    ended = list_ranks(outcome.ended)
    return f"{ended} came to the end of the script without calling init(), {waiting}"


def _diagnose_reports(reports: Sequence[RankFailureReport], lost: Sequence[int] = ()) -> Diagnosis:
    main, *others = group_by_failure(reports)
    lines = [_describe_group(main)]
    if lost:
        lines.append(f"before that, {list_ranks(lost[:1])} was lost, {_VANISHED}")
    rest = [report for group in others for report in group]
    return Diagnosis(main[0].exit_code or 1, (*lines, *_describe_others(rest, main[0])))


def _describe_others(
    reports: Sequence[RankFailureReport], main: RankFailureReport | None = None
) -> tuple[str, ...]:
    groups, lines = group_by_failure(reports), []
    for group in groups[:_SHOWN]:
        delay = "" if main is None else f" {max(0.0, group[0].time - main.time):.1f} s later"
        lines.append(f"then{delay}: {_describe_group(group)}")
    if groups[_SHOWN:]:
        lines.append(f"and {list_ranks(r.rank for group in groups[_SHOWN:] for r in group)}")
    return tuple(lines)
