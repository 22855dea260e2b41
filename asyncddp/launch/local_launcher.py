"""Launcher process for one machine: ``python -m asyncddp.launch.local_launcher 4 -- PROGRAM``.

Every rank finds torch.distributed's variables: ``RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and so on.
After a rank has failed, the others have a short time to report errors before they are terminated.
"""

from __future__ import annotations

import math
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

from asyncddp.environments.launchers import without_launchers
from asyncddp.launch.launchers.local import LOCAL
from asyncddp.launch.rank_environment import rendezvous_variables
from asyncddp.launch.rank_processes import (
    FORWARDED_SIGNALS,
    TERMINATION_SIGNALS,
    RankProcesses,
    delivered,
    signal_handler,
    write_all,
)

GRACE_PERIOD = 3.0
"""Seconds in which the other ranks may end after one has failed."""


class LocalRanks(RankProcesses):
    """Processes of all ranks, started on this machine."""

    def __init__(
        self, count: int, program: Sequence[str], environment: Mapping[str, str], *, tag: bool
    ) -> None:
        super().__init__(sessions=False)
        self._received: set[int] = set()
        added = rendezvous_variables(environment, (), remote=False)
        added["ASYNCDDP_SECRET"] = secrets.token_hex(32)
        self.code = 0
        self._count, self._program, self._tag = count, program, tag
        self._environment, self._relays = {**environment, **added}, list[threading.Thread]()
        ranks = ((rank, self._rank_variables(rank)) for rank in range(count))
        streams = [stream for one in ranks for stream in self._start_process(*one)]
        self._forward(streams)  # threads only after the last fork

    def _rank_variables(self, rank: object) -> dict[str, str]:
        return {"RANK": str(rank), "LOCAL_RANK": str(rank)}

    def _start_process(
        self,
        name: object,
        variables: Mapping[str, str],
        program: Sequence[str] = (),
        stdin: int = subprocess.DEVNULL,
    ) -> list[tuple[IO[bytes] | None, int, object]]:
        """Start the process of a rank; return its output streams, each with its target."""
        count, stream = str(self._count), subprocess.PIPE if self._tag else None
        sizes = {"WORLD_SIZE": count, "NODE_RANK": "0", "LOCAL_WORLD_SIZE": count}
        given = {**self._environment, **sizes, **variables}
        words = program or self._program
        process = self.start(name, words, given, stream, stream, stdin=stdin)
        return [(process.stdout, 1, name), (process.stderr, 2, name)]

    def _forward(self, streams: Sequence[tuple[IO[bytes] | None, int, object]]) -> None:
        """Forward output streams, in threads."""
        self._relays += [
            _relay(source, target, rank) for source, target, rank in streams if source is not None
        ]

    def reap(self) -> None:
        """Collect exit codes of ended ranks."""
        for rank, process in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[rank]
            if code:
                self.on_failure(rank, process.pid, code)

    def on_failure(self, rank: object, pid: int, code: int) -> None:
        """Name the first rank that failed, and begin to terminate the others."""
        if not self.code:
            self.code = code if code > 0 else 128 - code
            how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
            sys.stderr.write(f"asyncddp-local: rank {rank} {how}\n")
            sys.stderr.flush()
        if -code not in self._received and self.deadline == math.inf:
            self.end_within(GRACE_PERIOD)

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Forward a signal; ranks that die of it do not count as failed, so others may save."""
        if number == LOCAL.abort_signal:
            self.end_within(0.0)
        else:
            self._received.add(number)
            self.send(delivered(number))

    def finish_output(self) -> None:
        """Wait until all output has been forwarded."""
        for relay in self._relays:
            relay.join(timeout=1.0)


def _relay(source: IO[bytes], target: int, rank: object) -> threading.Thread:
    """Forward lines in a thread, each prefixed with its rank."""

    def run() -> None:
        for line in source:
            write_all(target, f"[{rank}] ".encode() + line)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def run(ranks: LocalRanks) -> int:
    """Supervise ranks until all have ended, and return the run's exit code."""
    signal.signal(LOCAL.abort_signal, ranks.on_signal)  # also where it is ignored, as after &
    with signal_handler(ranks.on_signal, TERMINATION_SIGNALS | FORWARDED_SIGNALS):
        while ranks.running:
            ranks.reap()
            ranks.escalate_if_due()
            time.sleep(0.02)
    ranks.finish_output()
    return ranks.code


def main(words: Sequence[str]) -> int:
    """Parse and run ``COUNT [--tag-output] -- PROGRAM [ARGUMENT]…``."""
    head, program = words[: words.index("--")], words[words.index("--") + 1 :]
    tag = "--tag-output" in head
    return run(LocalRanks(int(head[0]), program, without_launchers(), tag=tag))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
