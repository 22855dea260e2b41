"""Runs whose ranks are killed one after another, read by the logs of their steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from benchmarks.elastic.rank_loops import RECORD
from benchmarks.ranks import RunFailedError, last_words, python_path, started

_POLL = 0.02  # seconds
_START, _LIMIT = 300.0, 60.0  # seconds until all ranks step, and until they step again or end
_STEADY = 1.0  # seconds of steps before a run counts as started, and until its last step

Steps = np.ndarray[Any, np.dtype[np.float64]]
"""A record for each step of a process: its end, CPU seconds, the era."""


class Kill(NamedTuple):
    """Kill of a rank, and seconds until all that go on had ended a step in the era after it."""

    rank: int
    seconds: float


@dataclass(frozen=True)
class Launch:
    """Commands of a run.

    Attributes:
        ranks: How many ranks it has.
        commands: Words of each process that is started here; ``{folder}`` stands for the logs'.
        replaces: Whether a kill ends all ranks, and new ones take their places.
    """

    ranks: int
    commands: Sequence[Sequence[str]]
    replaces: bool = False


def loop_words(loop: str) -> list[str]:
    """Return the words, after that of Python, with which a rank runs a loop."""
    return ["-m", "benchmarks.elastic.rank_loops", loop, "{folder}"]


def read_steps(path: Path, skip: int = 0) -> Steps:
    """Read the log of a process, but for its first steps."""
    steps = np.fromfile(path, offset=skip * RECORD.size)
    return steps[: len(steps) // 3 * 3].reshape(-1, 3)


def _rank_of(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _count(path: Path) -> int:
    return path.stat().st_size // RECORD.size


@dataclass
class KilledRun:
    """A run that makes steps, and whose ranks can be killed.

    Attributes:
        logs: Log of each rank that goes on, by its number; ``RANK-PID`` is its name.
        kills: Those that there were.
    """

    launch: Launch
    folder: Path
    children: Sequence[subprocess.Popen[str]]
    words: IO[str]
    logs: dict[int, Path] = field(default_factory=dict)
    kills: list[Kill] = field(default_factory=list)

    def wait_for_start(self) -> None:
        """Wait until all ranks step in one era, for a while."""
        since: dict[float, float] = {}

        def steady() -> bool:
            self.logs = {_rank_of(path): path for path in self.folder.glob("*-*")}
            last = [read_steps(path, max(_count(path) - 1, 0)) for path in self.logs.values()]
            eras = {float(era) for steps in last for era in steps[:, 2]}
            if len(eras) != 1 or sum(map(len, last)) < self.launch.ranks:
                since.clear()
                return False
            return time.monotonic() - since.setdefault(eras.pop(), time.monotonic()) > _STEADY

        self._wait(steady, "did not start to make steps", _START)

    def kill(self, rank: int) -> None:
        """Kill a rank, and wait until all that go on have ended a step without it."""
        counts = {path: _count(path) for path in self.logs.values()}
        era = read_steps(self.logs[rank])[-1, 2]
        gone = counts if self.launch.replaces else {self.logs[rank]}
        going_on = set(self.logs) - (set() if self.launch.replaces else {rank})
        moment = time.monotonic()
        os.kill(int(self.logs[rank].name.partition("-")[2]), signal.SIGKILL)
        ends: dict[int, float] = {}

        def again() -> bool:
            for path in set(self.folder.glob("*-*")).difference(gone):
                steps = read_steps(path, counts.get(path, 0))
                later = steps[steps[:, 2] > era]
                if len(later):
                    self.logs[_rank_of(path)] = path
                    ends[_rank_of(path)] = later[0, 0]
            return going_on <= set(ends)

        self._wait(again, f"made no further step after its rank {rank} was killed", _LIMIT)
        self.logs = {number: self.logs[number] for number in going_on}
        self.kills.append(Kill(rank, float(max(ends.values())) - moment))

    def finish(self) -> list[str]:
        """Let all ranks end at one step; return what cannot be right, in sentences."""
        before = max(map(_count, self.logs.values()))
        time.sleep(_STEADY)
        now = max(map(_count, self.logs.values()))
        last = now + (now - before) + 5  # no rank has made it before all know of it
        told = self.folder / "told"
        told.write_text(str(last), encoding="utf-8")
        told.rename(self.folder / "end")
        self._wait(lambda: self._ended, "did not end", _LIMIT)
        wrong = [f"ended with {child.returncode}" for child in self.children if child.returncode]
        made = {rank: _count(path) for rank, path in self.logs.items()}
        wrong += [f"rank {rank} made {n} of {last} steps" for rank, n in made.items() if n != last]
        return wrong

    @property
    def _ended(self) -> bool:
        return all(child.poll() is not None for child in self.children)

    def _wait(self, ready: Callable[[], bool], otherwise: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        ended = self._ended
        while not ready():  # which was asked after the end
            if ended or time.monotonic() > deadline:
                when = ", for it had ended" if ended else f" for {seconds:g} s"
                raise RunFailedError(f"{otherwise}{when}:\n{last_words(self.words)}")
            time.sleep(_POLL)
            ended = self._ended


@contextmanager
def killed_run(launch: Launch) -> Iterator[KilledRun]:
    """Start a run, and wait until its ranks make steps; it ends with the ``with`` block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        words = stack.enter_context(
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
        )
        common = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
        children = []
        for command in launch.commands:
            told = [word.replace("{folder}", str(folder)) for word in command]
            children.append(stack.enter_context(started(told, common, words, words)))
        run = KilledRun(launch, folder, children, words)
        run.wait_for_start()
        yield run


def elastic_launch(loop: str, ranks: int) -> Launch:
    """``asyncddp run --elastic``: the others go on."""
    run = [sys.executable, "-m", "asyncddp", "run", "--elastic", "-np", str(ranks)]
    return Launch(ranks, [[*run, *loop_words(loop)]])
