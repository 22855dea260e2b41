"""Why a run failed, in one sentence: from the ranks' own reports and the launcher's words."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncddp.launch.supervise import Ending
from asyncddp.launch.vendors import Death, Launcher

__all__ = ["Report", "Verdict", "judge", "read_reports"]

_TIMED_OUT = 124  # as timeout(1)


@dataclass(frozen=True)
class Report:
    """What a failing rank wrote into the report folder before it ended."""

    rank: int
    host: str
    exit_code: int
    kind: str
    message: str
    time: float

    @property
    def is_consequence(self) -> bool:
        """Whether the rank failed only because another one had ended."""
        return self.kind.rpartition(".")[2] == "PeerLeftError"

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host}"
        if self.kind == "SystemExit" and self.message.strip("-").isdigit():
            return f"{where} ended with exit code {self.exit_code}"
        first = self.message.strip().partition("\n")[0]
        return f"{where} failed (exit code {self.exit_code}): {self.kind}: {first}".rstrip(" :")


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
    death = launcher.death(said)
    if ending.code == 0 and death is None:
        return Verdict(0)
    reports = read_reports(folder)
    if death is not None and death.signal is not None:
        rank = death.rank if death.rank is not None or not ending.lost else ending.lost[0]
        own = [report for report in reports if report.rank == rank]
        if not own:
            line = f"{_who(rank, death.host)} was killed by {_signal_name(death.signal)}"
            return Verdict(128 + death.signal, (line, *_others(reports), *_as_lines(death.signal)))
        return Verdict(own[0].exit_code, (str(own[0]), *_others(reports, own[0])))
    return _judge_codes(ending, death, reports)


def _as_lines(number: int) -> tuple[str, ...]:
    hint = _hint(number).strip()
    return (hint,) if hint else ()


def _judge_codes(ending: Ending, death: Death | None, reports: Sequence[Report]) -> Verdict:
    causes = [report for report in reports if not report.is_consequence]
    if causes:
        return Verdict(causes[0].exit_code or 1, (str(causes[0]), *_others(reports, causes[0])))
    if death is not None and death.code:
        line = f"{_who(death.rank, death.host)} ended with exit code {death.code}"
        return Verdict(death.code, (line, *_others(reports)))
    if reports:
        return Verdict(reports[0].exit_code or 1, (str(reports[0]), *_others(reports, reports[0])))
    code = ending.code if ending.code > 0 else 128 - ending.code
    if death is not None and death.lost_host:  # Open MPI may call that a success
        line = f"host {death.host} was lost, or could not be reached"
        return Verdict(ending.code or 1, (line,), explained=False)
    if death is not None:
        return Verdict(code or 1, (_ended_by_mpi(death, ending.lost),))
    return Verdict(code, (f"the launcher ended with exit code {code}",), explained=False)


def _ended_by_mpi(death: Death, lost: Sequence[int]) -> str:
    """A rank that sees a connection close is ended by MPI, and may be noticed before its peer."""
    who = _who(death.rank, death.host)
    if lost and lost[0] != death.rank:
        return f"rank {lost[0]} was lost first, killed or ended without a report; then {who} was"
    return f"{who} was ended by MPI itself: another rank was lost, or the network failed"


def _others(reports: Sequence[Report], main: Report | None = None) -> tuple[str, ...]:
    """What other ranks reported, at most three of them, with the delay after the first."""
    rest = [report for report in reports if report is not main]
    start = main.time if main is not None else None
    lines = []
    for report in rest[:3]:
        delay = "" if start is None else f" {max(0.0, report.time - start):.1f} s later"
        lines.append(f"then{delay}: {report}")
    if len(rest) > 3:
        lines.append(f"and {len(rest) - 3} more ranks")
    return tuple(lines)
