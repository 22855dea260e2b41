"""Launcher process of an elastic run: ``python -m asyncddp.launch.elastic_launcher 4 1 2 0 -- PR``.

It starts ranks as :mod:`~asyncddp.launch.local_launcher` does. After a rank has died or failed the
others go on, unless fewer than the second number are left, and a new process takes its place, as
often as the third number says. The fourth says how many processes wait for that.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO

from asyncddp.config import read_variable
from asyncddp.environments.launchers import without_launchers
from asyncddp.launch.local_launcher import GRACE_PERIOD, LocalRanks, run
from asyncddp.launch.rank import RUNNER
from asyncddp.launch.rank_losses import RankLosses
from asyncddp.launch.rank_processes import FORWARDED_SIGNALS, write_all
from asyncddp.launch.suspended_ranks import SUSPENDED_SECONDS, SuspendedRanks

_SPARE_PROGRAM = "asyncddp.checkpoint.spare_process"


class _ElasticRanks(LocalRanks):
    """Rank processes of an elastic run, which go on after failures as long as enough are left.

    A rank that fails again is replaced after 1, 2, 4 … seconds. One that is stopped is killed, as
    the others wait for it.
    """

    def __init__(
        self,
        losses: RankLosses,
        program: Sequence[str],
        environment: Mapping[str, str],
        *,
        spares: int,
        tag: bool,
    ) -> None:
        self._losses, self._asked = losses, False
        self._spares: list[subprocess.Popen[bytes]] = []
        self._due: list[tuple[float, object]] = []  # when to replace which rank
        self._failures: Counter[object] = Counter()
        self._suspended = SuspendedRanks()
        super().__init__(losses.ranks, program, environment, tag=tag)
        for _ in range(spares):
            self._start_spare()

    def _start_spare(self) -> None:
        """Start a process that imports torch, and waits for the variables of a rank."""
        program = [_SPARE_PROGRAM if word == RUNNER[1] else word for word in self._program]
        self._start_process("spare", {}, program, subprocess.PIPE)
        self._spares.append(self.running.pop("spare"))

    def _replace(self, rank: object) -> list[tuple[IO[bytes] | None, int, object]]:
        """Let a spare process be a rank, or else a new one; return its output streams."""
        variables = {**self._rank_variables(rank), "ASYNCDDP_REPLACES": "1"}
        while self._spares:
            process = self._spares.pop(0)
            if process.poll() is None and process.stdin is not None:
                with contextlib.suppress(BrokenPipeError), process.stdin as stream:
                    stream.write(json.dumps(variables).encode() + b"\n")
                self.running[rank] = process
                if self._losses.restarts_left > len(self._spares):
                    self._start_spare()
                return [(process.stdout, 1, rank), (process.stderr, 2, rank)]
        return self._start_process(rank, variables)

    def reap(self) -> None:
        """Collect exit codes of ended ranks, and replace those that are due."""
        super().reap()
        now = time.monotonic()
        self._kill_suspended(now)
        for when, rank in [one for one in self._due if one[0] <= now or not self.running]:
            self._due.remove((when, rank))
            if self.running and not self._losses.ending:
                self._forward(self._replace(rank))
            else:
                self._losses.give_up(rank)

    def _kill_suspended(self, now: float) -> None:
        pids = {rank: process.pid for rank, process in self.running.items()}
        for rank in self._suspended.overdue(pids, now):
            what = f"asyncddp: rank {rank} (pid {pids[rank]}) was stopped by a signal"
            write_all(2, f"{what} for {SUSPENDED_SECONDS:g} s, and is killed\n".encode())
            self.running[rank].kill()

    def on_failure(self, rank: object, pid: int, code: int) -> None:
        """Print the notice of a lost rank; begin to terminate the others if too few are left."""
        notice = self._losses.record(rank, pid, code, len(self.running))
        if self._losses.is_replaced(rank):
            failures = self._failures[rank]
            wait = 0.0 if failures == 0 else 2.0 ** (failures - 1)
            self._failures[rank] += 1
            self._due.append((time.monotonic() + wait, rank))
        write_all(2, notice.encode(errors="replace"))
        if not (self._losses.enough or self._losses.ending):
            self._losses.ending = True
            self.end_within(GRACE_PERIOD)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal; after one that ends the run, ranks that die of it are no news."""
        self._asked |= number not in FORWARDED_SIGNALS
        self._losses.ending |= self._asked
        if number != signal.SIGINT:  # which has reached their process group; a second would
            super().on_signal(number, frame)  # interrupt what they do upon the first

    def finish_output(self) -> None:
        """Wait until all output has been forwarded, and say which ranks were lost."""
        for process in self._spares:
            process.kill()
            process.wait()
        super().finish_output()
        self.code = self._losses.exit_code
        if not self._asked:  # asyncddp run says then that the run was ended
            write_all(2, self._losses.summary().encode())


def main(words: Sequence[str]) -> int:
    """Parse and run ``COUNT LEAST RESTARTS SPARES [--tag-output] -- PROGRAM [ARGUMENT]…``."""
    head, program = words[: words.index("--")], words[words.index("--") + 1 :]
    environment = without_launchers()
    reports = read_variable("ASYNCDDP_REPORT_DIR", Path, environment)
    ranks, least, restarts, spares = map(int, head[:4])
    losses, tag = RankLosses(ranks, least, restarts, reports), "--tag-output" in head
    return run(_ElasticRanks(losses, program, environment, spares=spares, tag=tag))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
