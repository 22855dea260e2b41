"""What a family of launchers must tell: its signature, its flags, and how it says that a rank died.

A launcher is data plus three small functions without side effects: nothing here starts a process.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from asyncddp.launch.job import Command, Job

__all__ = ["Death", "Launcher", "Noise"]


@dataclass(frozen=True)
class Death:
    """What a launcher says about the process that ended badly first.

    Attributes:
        rank: Which rank; None where the launcher does not say for sure.
        host: Where it ran.
        signal: The signal that killed it, if one did.
        code: Its exit code otherwise; None where MPI itself ended it, 0 where it left without
            finalizing MPI.
        lost_host: Whether it is a whole host that was lost.
    """

    rank: int | None = None
    host: str | None = None
    signal: int | None = None
    code: int | None = None
    lost_host: bool = False


@dataclass(frozen=True)
class Noise:
    """Lines that a launcher writes between the ranks' own when one of them has failed.

    Attributes:
        fence: Pattern of the end of a line that opens a block, and of the line that closes it; None
            where there is no block.
        openings: Patterns of a block's first line, of which one must fit.
        lines: Patterns of single lines.
        stems: How those lines begin, literally: only a line that begins so is held back.
        on_stdout: Whether the launcher writes them to standard output.
    """

    fence: re.Pattern[str] | None = None
    openings: tuple[re.Pattern[str], ...] = ()
    lines: tuple[re.Pattern[str], ...] = ()
    stems: tuple[str, ...] = ()
    on_stdout: bool = False


class Launcher(ABC):
    """One family of launchers."""

    title: ClassVar[str]
    """What people call it."""
    noise: ClassVar[Noise] = Noise()
    ipv6_hosts: ClassVar[bool] = False
    """Whether a host may be an IPv6 address."""
    local: ClassVar[bool] = True
    """Whether it starts ranks on its own machine where the job names no other."""

    @abstractmethod
    def recognise(self, version_output: str) -> str | None:
        """The version, read from what ``LAUNCHER --version`` prints; None if it is another's."""

    @abstractmethod
    def command(self, executable: str, job: Job) -> Command:
        """The command that starts the job.

        Raises:
            ArgumentError: The family cannot do what the job asks for.
        """

    @abstractmethod
    def death(self, said: str) -> Death | None:
        """Which process ended badly first, read from what the launcher wrote."""

    def hosts_argument(self, job: Job) -> str:
        """The hosts as ``h1:2,h2:2``."""
        return ",".join(str(host) for host in job.hosts)


def first_match(patterns: Iterable[re.Pattern[str]], text: str) -> re.Match[str] | None:
    """The match that comes first in the text, whichever pattern it is of."""
    found = [match for pattern in patterns if (match := pattern.search(text)) is not None]
    return min(found, key=lambda match: match.start(), default=None)


def death_from(match: re.Match[str] | None) -> Death | None:
    """A death from a pattern's groups ``rank``, ``host``, ``signal`` and ``code``."""
    if match is None:
        return None
    found = match.groupdict()
    rank, killed, code = (
        None if found.get(name) is None else int(found[name]) for name in ("rank", "signal", "code")
    )
    return Death(rank, found.get("host"), killed, code)


def flags_unless_given(job: Job, names: Sequence[str], *values: str) -> list[str]:
    """``[names[0], *values]``, or nothing where the user's own arguments already say it."""
    return [] if job.asks_for(*names) else [names[0], *values]
