"""Lost ranks of an elastic run: ranks that have died or failed, and notices about them."""

from __future__ import annotations

import signal
from pathlib import Path

from asyncddp.launch.diagnosis import RankFailureReport, read_failure_report
from asyncddp.launch.rank_processes import TERMINATION_SIGNALS

_NAMED = 8  # lost ranks that the summary describes
_ENDED = {128 + number for number in TERMINATION_SIGNALS}


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"


class RankLosses:
    """Record of the lost ranks of an elastic run, which makes the notices about them.

    Args:
        ranks: How many were started.
        least: How many must run or have ended with 0.
        restarts: How many lost ranks are replaced.
        report_directory: In which they report failures; None where they print them themselves.
    """

    def __init__(
        self, ranks: int, least: int, restarts: int, report_directory: Path | None
    ) -> None:
        self.ranks, self._least, self._report_directory = ranks, least, report_directory
        self.restarts_left = restarts
        """Number of lost ranks that may still be replaced."""
        self._lost: dict[object, str] = {}  # how each rank was lost that has no other process
        self._replaced: dict[object, str] = {}  # how each rank was lost that has one
        self._ended = 0  # by the launcher
        self._shown: set[tuple[object, ...]] = set()
        self.ending = False
        """True while the others are being ended; those that die of it get no notice."""
        self.code = 0
        """Exit code of the first rank that was lost."""

    @property
    def enough(self) -> bool:
        """True if so many ranks run or have ended with 0 as are needed."""
        return self._left >= self._least

    @property
    def _left(self) -> int:
        return self.ranks - len(self._lost) - self._ended

    @property
    def exit_code(self) -> int:
        """Exit code of the run: 0 if enough ranks ended with 0, else the first lost rank's."""
        return 0 if self.enough else self.code

    def record(self, rank: object, pid: int, code: int, running: int) -> str:
        """Record the exit code of a rank, which is not 0; return the notice, or nothing.

        ``code`` is negative for the signal that killed it; ``running`` ranks have not ended.
        """
        report = self._report_of(rank)
        self.code = self.code or (code if code > 0 else 128 - code)
        how = _describe_end(code)
        caused = code < 0 or code in _ENDED or (report is not None and report.is_consequence)
        if self.ending and caused:
            self._ended += 1
            return ""
        replaced = self.restarts_left > 0 and running > 0 and not self.ending
        (self._replaced if replaced else self._lost)[rank] = f"rank {rank} {how}"
        line = f"asyncddp: rank {rank} (pid {pid}) {how}{_describe_error(report)}"
        others = self._describe_others(running)
        if replaced:
            self.restarts_left -= 1
            self._forget_report(rank)
            others += f", and another process takes its place ({self.restarts_left} more may)"
        else:
            self._replaced.pop(rank, None)
        return f"{self._new_traceback(report)}{line}{others}\n"

    def is_replaced(self, rank: object) -> bool:
        """Return whether another process takes, or has taken, the place of a rank."""
        return rank in self._replaced

    def give_up(self, rank: object) -> None:
        """Record that no other process takes the place of a rank after all."""
        why = "" if self.ending else ", since the others had ended"
        self._lost[rank] = f"{self._replaced.pop(rank)}, and was not replaced{why}"

    def summary(self) -> str:
        """Return the line that says at the end who was lost; nothing if nobody was."""
        if not self._lost and not self._replaced:
            return ""
        ended = f"{self._left} of {_count(self.ranks)} ended with exit code 0"
        ended += "" if self.enough else f", fewer than --min {self._least}"
        lost = [
            *self._lost.values(),
            *(f"{how}, and was replaced" for how in self._replaced.values()),
        ]
        more = len(lost) - _NAMED
        named = [*lost[:_NAMED], *([f"{more} more were lost"] if more > 0 else [])]
        named += [f"{self._ended} more were ended"] if self._ended else []
        return f"asyncddp: {ended}; {', '.join(named)}\n"

    def _report_of(self, rank: object) -> RankFailureReport | None:
        if self._report_directory is None:
            return None
        return read_failure_report(self._report_directory / f"rank-{rank}.json")

    def _forget_report(self, rank: object) -> None:
        if self._report_directory is not None:
            (self._report_directory / f"rank-{rank}.json").unlink(missing_ok=True)

    def _new_traceback(self, report: RankFailureReport | None) -> str:
        """Return a report's traceback, but for one that another rank has had alike."""
        if report is None or report.failure_key in self._shown:
            return ""
        self._shown.add(report.failure_key)
        return report.traceback

    def _describe_others(self, running: int) -> str:
        if self.ending:
            return ""
        if not self.enough:
            left = f"{_count(self._left)} {'is' if self._left == 1 else 'are'} left"
            return f"; {left}, fewer than --min {self._least}: the run is ended"
        if not running:
            return "; the others have ended"
        return f"; {_count(running)} go{'es' if running == 1 else ''} on"


def _describe_end(code: int) -> str:
    if code > 0:
        return f"ended with exit code {code}"
    known = -code in set(signal.Signals)
    return f"was killed by {signal.Signals(-code).name if known else f'signal {-code}'}"


def _describe_error(report: RankFailureReport | None) -> str:
    if report is None or report.kind == "SystemExit":
        return ""
    line = report.message.strip().partition("\n")[0]
    return f" ({report.kind}: {line})" if line else f" ({report.kind})"
