"""Why a run failed, in one sentence: from the ranks' own reports and the launcher's words."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncddp.launch.supervise import Ending
from asyncddp.launch.vendors import Death, Launcher
from asyncddp.rank_lists import list_ranks

__all__ = ["Report", "Verdict", "alike", "judge", "read_reports"]

_TIMED_OUT = 124  # as timeout(1)
_VANISHED = "killed or ended without a report, as by os._exit()"
_UNFINISHED = " before MPI was finalized, as by os._exit(0)"
_TOLD = re.compile(r".*(?:refused|given up) by rank \d+: ", re.DOTALL)  # what another one has met
_SHOWN = 3  # groups of ranks that are told of beside the first
_OWN = re.compile(r"\branks? \d+(?:(?:\u2013|, | and )\d+)*(?: more)?|\b\d+\.\d+ s\b")


@dataclass(frozen=True)
class Report:
    """What a failing rank wrote into the report folder before it ended."""

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
        """Whether the rank failed only because another one had ended, or had failed."""
        told = self.origin not in (None, self.rank) or _TOLD.match(self.message) is not None
        return told or self.kind.rpartition(".")[2] == "PeerLeftError"

    @property
    def likeness(self) -> tuple[object, ...]:
        """What it shares with the reports of the same failure on other ranks."""
        return self.kind, self.exit_code, _OWN.sub("…", _TOLD.sub("", self.message))


def alike(reports: Iterable[Report]) -> list[list[Report]]:
    """Reports of the same failure together, causes before what followed from them.

    Messages that differ only in the ranks that they name and in seconds count as the same.
    """
    groups: dict[tuple[object, ...], list[Report]] = {}
    for report in sorted(reports, key=lambda report: report.is_consequence):
        groups.setdefault(report.likeness, []).append(report)
    return list(groups.values())


def _told(group: Sequence[Report]) -> str:
    """One line about ranks that failed alike, with the message of the first."""
    first, hosts = group[0], {report.host for report in group}
    where = list_ranks(report.rank for report in group)
    where = f"{where} on {first.host}" if len(hosts) == 1 else where
    if first.kind == "SystemExit" and first.message.strip("-").isdigit():
        return f"{where} ended with exit code {first.exit_code}"
    same = " alike" if len(group) > 1 else ""
    line = first.message.strip().partition("\n")[0]
    return f"{where} failed{same} (exit code {first.exit_code}): {first.kind}: {line}".rstrip(" :")


@dataclass(frozen=True)
class Verdict:
    """What to tell the user.

    Attributes:
        code: Exit code for the whole run.
        lines: The sentence, and further ones that matter less; empty where all went well.
        explained: Whether it is known which rank failed, and why.
    """

    code: int
    lines: tuple[str, ...] = ()
    explained: bool = True


def read_reports(folder: Path) -> list[Report]:
    """The ranks' reports, earliest first; what cannot be read is left out."""
    found = []
    for path in folder.glob("rank-*.json"):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found.append(
                Report(
                    rank=int(data["rank"]),
                    host=str(data["host"]),
                    exit_code=int(data["exit_code"]),
                    kind=str(data["kind"]),
                    message=str(data["message"]),
                    time=float(data["time"]),
                    traceback=str(data.get("traceback", "")),
                    origin=data.get("origin"),
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue  # a rank that was killed while it wrote
    return sorted(found, key=lambda report: report.time)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


def _who(rank: int | None, host: str | None) -> str:
    who = "a rank" if rank is None else f"rank {rank}"
    return who if host is None else f"{who} on {host}"


def _hint(number: int) -> str:
    hints = {
        signal.SIGKILL: " Where nobody did that by hand, the machine may have run out of memory.",
        signal.SIGSEGV: " A native library crashed; PYTHONFAULTHANDLER=1 shows where.",
    }
    return next((text for known, text in hints.items() if known == number), "")


def judge(
    ending: Ending, launcher: Launcher, said: str, folder: Path, timeout: float | None = None
) -> Verdict:
    """Say why a run ended.

    A signal's victim comes first, for the launcher names the first one; then the earliest report of
    a rank that failed by itself; then what the launcher says of exit codes; then the earliest
    report of a rank that failed because another had gone.

    Args:
        ending: How the launcher ended.
        launcher: Its family.
        said: What it wrote about the failure.
        folder: Where the ranks left their reports.
        timeout: The limit that was set, in seconds.
    """
    if ending.timed_out:
        return Verdict(_TIMED_OUT, (f"ended after {timeout:g} s, the limit set by --timeout",))
    if ending.signal is not None:
        return Verdict(128 + ending.signal, (f"ended by {_signal_name(ending.signal)}",))
    death, reports = launcher.death(said), read_reports(folder)
    if ending.stranded:
        return Verdict(ending.code or 1, (_never_joined(ending), *_others(reports)))
    if ending.code == 0 and death is None:
        return Verdict(0)
    if death is not None and death.signal is not None:
        rank = death.rank if death.rank is not None or not ending.lost else ending.lost[0]
        if not any(report.rank == rank for report in reports):
            line = f"{_who(rank, death.host)} was killed by {_signal_name(death.signal)}"
            return Verdict(128 + death.signal, (line, *_others(reports), *_as_lines(death.signal)))
        return _reported(sorted(reports, key=lambda report: report.rank != rank))
    return _judge_codes(ending, death, reports)


def _as_lines(number: int) -> tuple[str, ...]:
    hint = _hint(number).strip()
    return (hint,) if hint else ()


def _judge_codes(ending: Ending, death: Death | None, reports: Sequence[Report]) -> Verdict:
    if not all(report.is_consequence for report in reports):
        return _reported(reports, ending.lost)
    code = ending.code if ending.code > 0 else 128 - ending.code
    if death is not None and death.code is not None:
        line = f"{_who(death.rank, death.host)} ended with exit code {death.code}"
        line += "" if death.code else _UNFINISHED
        return Verdict(death.code or code or 1, (line, *_others(reports)))
    if reports:
        return _reported(reports, ending.lost)
    if death is not None and death.lost_host:  # Open MPI may call that a success
        line = f"host {death.host} was lost, or could not be reached"
        return Verdict(ending.code or 1, (line,), explained=False)
    if death is not None:
        return Verdict(code or 1, (_ended_by_mpi(death, ending.lost),))
    line = f"the launcher ended with exit code {code}"
    if ending.lost:
        line = f"{list_ranks(ending.lost[:1])} was lost first, {_VANISHED}; {line}"
    return Verdict(code, (line,), explained=False)


def _never_joined(ending: Ending) -> str:
    """Ranks wait in ``init()`` for one that has ended: no launcher notices that."""
    waiting = f"while {list_ranks(ending.stranded)} waited for it in init()"
    gone = [rank for rank in ending.lost if rank not in ending.stranded]
    if gone:
        return f"{list_ranks(gone)} was lost, {_VANISHED}, {waiting}"
    ended = list_ranks(ending.ended)
    return f"{ended} came to the end of the script without calling init(), {waiting}"


def _ended_by_mpi(death: Death, lost: Sequence[int]) -> str:
    """A rank that sees a connection close is ended by MPI, and may be noticed before its peer."""
    who = _who(death.rank, death.host)
    if lost and lost[0] != death.rank:
        return f"rank {lost[0]} was lost first, {_VANISHED}; then {who} was"
    return f"{who} was ended by MPI itself: another rank was lost, or the network failed"


def _reported(reports: Sequence[Report], lost: Sequence[int] = ()) -> Verdict:
    """What ranks themselves report, of which the first comes first."""
    main, *others = alike(reports)
    before = list_ranks(lost[:1])
    first = (f"before that, {before} was lost, {_VANISHED}",) if lost else ()
    rest = [report for group in others for report in group]
    return Verdict(main[0].exit_code or 1, (_told(main), *first, *_others(rest, main[0])))


def _others(reports: Sequence[Report], main: Report | None = None) -> tuple[str, ...]:
    """What other ranks reported, alike ones together, with the delay after the first."""
    groups, lines = alike(reports), []
    for group in groups[:_SHOWN]:
        delay = "" if main is None else f" {max(0.0, group[0].time - main.time):.1f} s later"
        lines.append(f"then{delay}: {_told(group)}")
    if groups[_SHOWN:]:
        lines.append(f"and {list_ranks(r.rank for group in groups[_SHOWN:] for r in group)}")
    return tuple(lines)
