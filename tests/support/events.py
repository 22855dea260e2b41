"""Waiting for events instead of sleeping, and bounds on durations that hold on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import asyncddp as bf
from asyncddp.testing.rank_function_call import DEFAULT_SETTINGS

__all__ = ["BEFORE_DEADLINE", "DELAY", "PATIENCE", "FileEvent", "deadline_of", "until"]

PATIENCE = 60.0
"""Seconds after which what a test waits for counts as never coming."""

BEFORE_DEADLINE = DEFAULT_SETTINGS["timeout"] / 2
"""Seconds: what has ended in less did not wait for the deadline of a test's world."""

DELAY = 30.0
"""Seconds by which an error may come after its deadline where the machine is busy."""


def until(condition: Callable[[], object], what: str = "the event") -> None:
    """Look again and again until a condition holds.

    Raises:
        AssertionError: It does not within :data:`PATIENCE`.
    """
    over = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < over, f"{what} did not come within {PATIENCE:g} s"
        time.sleep(0.001)


@contextmanager
def deadline_of(
    seconds: float, warn_after: float = DEFAULT_SETTINGS["warn_after"]
) -> Iterator[None]:
    """Give the verbs that this rank begins inside another deadline than its world has.

    As a setting of the world it would hold for the world's start and end as well, which may take
    longer on a busy machine.
    """
    engine = bf.current().engine
    before = engine.config
    engine.config = replace(before, timeout=seconds, warn_after=warn_after)
    engine.watchdog._config = engine.config
    try:
        yield
    finally:
        engine.config = engine.watchdog._config = before


@dataclass(frozen=True)
class FileEvent:
    """An event between threads or processes of a machine, without a call of the library.

    Attributes:
        path: A file that is there once the event is set; a test takes one in its ``tmp_path``.
    """

    path: Path

    def set(self) -> None:
        """Let all go on that wait for it."""
        self.path.touch()

    def is_set(self) -> bool:
        """Whether it has been set."""
        return self.path.exists()

    def wait(self) -> None:
        """Return once it is set.

        Raises:
            AssertionError: It is not within :data:`PATIENCE`.
        """
        until(self.is_set, self.path.name)

    def of(self, rank: int) -> FileEvent:
        """One rank's own event of this name."""
        return FileEvent(self.path.with_name(f"{self.path.name} of rank {rank}"))

    def wait_for(self, ranks: range | list[int]) -> None:
        """Return once all these ranks have set theirs."""
        for rank in ranks:
            self.of(rank).wait()
