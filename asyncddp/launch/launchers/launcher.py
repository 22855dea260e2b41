"""Interface of MPI launchers: version detection, command line, and parsing of their messages.

A launcher is data plus three small functions without side effects; none starts a process.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from asyncddp.launch.job import Job, LaunchCommand


@dataclass(frozen=True)
class FailedRank:
    """The first failed process as the launcher reports it: rank, host, signal or exit code.

    Attributes:
        rank: Its rank; None where the launcher does not say for certain.
        host: Host on which it ran.
        signal: The signal that killed it, if one did.
        code: Its exit code otherwise; None where MPI itself ended it, 0 where it ended without
            finalizing MPI.
        lost_host: Whether a whole host was lost.
    """

    rank: int | None = None
    host: str | None = None
    signal: int | None = None
    code: int | None = None
    lost_host: bool = False


@dataclass(frozen=True)
class LauncherOutputPatterns:
    """Patterns of the failure messages that a launcher mixes into the ranks' output.

    Attributes:
        delimiter: Pattern of the end of a line that opens a block and of its last line; None
            where there is no block.
        block_starts: Patterns of a block's first line, of which one must fit.
        lines: Patterns of single lines.
        line_prefixes: Literal beginnings of those lines: only a line that begins so is buffered.
        on_stdout: Whether the launcher writes them to standard output.
    """

    delimiter: re.Pattern[str] | None = None
    block_starts: tuple[re.Pattern[str], ...] = ()
    lines: tuple[re.Pattern[str], ...] = ()
    line_prefixes: tuple[str, ...] = ()
    on_stdout: bool = False


class Launcher(ABC):
    """Interface of an MPI launcher implementation, such as Open MPI's mpirun or Slurm's srun."""

    title: ClassVar[str]
    """Its name in messages."""
    output_patterns: ClassVar[LauncherOutputPatterns] = LauncherOutputPatterns()
    ipv6_hosts: ClassVar[bool] = False
    """True if a host may be an IPv6 address."""
    local: ClassVar[bool] = True
    """True if it starts ranks on this machine where the job names no hosts."""

    @abstractmethod
    def parse_version(self, version_output: str) -> str | None:
        """Parse the version from ``LAUNCHER --version``; None if it is another launcher's."""

    @abstractmethod
    def build_command(self, executable: str, job: Job) -> LaunchCommand:
        """Build the command line that starts the job.

        Raises:
            ArgumentError: The launcher cannot do what the job asks for.
        """

    @abstractmethod
    def parse_rank_exit(self, output: str) -> FailedRank | None:
        """Parse from the launcher's messages which process failed first."""

    def format_hosts(self, job: Job) -> str:
        """Format the job's hosts as ``h1:2,h2:2``."""
        return ",".join(str(host) for host in job.hosts)


def earliest_match(patterns: Iterable[re.Pattern[str]], text: str) -> re.Match[str] | None:
    """Return the match of any pattern that comes first in the text."""
    found = [match for pattern in patterns if (match := pattern.search(text)) is not None]
    return min(found, key=lambda match: match.start(), default=None)


def rank_exit_from(match: re.Match[str] | None) -> FailedRank | None:
    """Build a :class:`FailedRank` from the groups ``rank``, ``host``, ``signal`` and ``code``."""
    if match is None:
        return None
    found = match.groupdict()
    rank, killed, code = (
        None if found.get(name) is None else int(found[name]) for name in ("rank", "signal", "code")
    )
    return FailedRank(rank, found.get("host"), killed, code)


def default_option(job: Job, names: Sequence[str], *values: str) -> list[str]:
    """Return ``[names[0], *values]``, or nothing if the user's arguments already set it."""
    return [] if job.has_flag(*names) else [names[0], *values]
