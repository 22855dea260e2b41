"""Interface of MPI launchers: version detection, command line, and parsing of failure messages."""

from __future__ import annotations

import re
import signal
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

from asyncddp.launch.job_options import Job, LaunchCommand


@dataclass(frozen=True)
class FailedRank:
    """First failed rank, as reported by the launcher."""

    rank: int | None = None  # None where the launcher does not say for certain
    host: str | None = None
    signal: int | None = None
    code: int | None = None  # None: MPI itself ended it; 0: it ended without finalizing MPI
    lost_host: bool = False

    @classmethod
    def from_match(cls, match: re.Match[str]) -> FailedRank:
        """Build it from a match's groups ``rank``, ``host``, ``signal`` and ``code``."""
        found: dict[str, Any] = {name: value for name, value in match.groupdict().items() if value}
        numbers = {name: int(value) for name, value in found.items() if name != "host"}
        return cls(**{**found, **numbers})


@dataclass(frozen=True)
class LauncherOutputPatterns:
    """Patterns of the failure messages that a launcher mixes into the output of the ranks."""

    delimiter: re.Pattern[str] | None = None  # ends the line that opens a block; its last line
    block_starts: tuple[re.Pattern[str], ...] = ()  # of its first line, of which one must fit
    lines: tuple[re.Pattern[str], ...] = ()  # single lines
    line_prefixes: tuple[str, ...] = ()  # how they begin: only such an unfinished line is buffered
    on_stdout: bool = False  # the launcher writes them to standard output


class Launcher(ABC):
    """Base class of launchers, such as Open MPI's ``mpirun`` or Slurm's ``srun``."""

    title: ClassVar[str]  # in messages
    signature: re.Pattern[str]  # in the output of LAUNCHER --version, with a group "version"
    output_patterns: LauncherOutputPatterns = LauncherOutputPatterns()
    forwarded_signals: frozenset[int] = frozenset()  # that it passes on to ranks, wherever they are
    abort_signal: int = signal.SIGTERM  # upon which it ends all ranks, now or soon
    local: ClassVar[bool] = True  # it starts ranks on this machine where the job names no hosts

    def parse_version(self, version_output: str) -> str | None:
        """Parse the version from ``LAUNCHER --version``; None if another launcher printed it."""
        match = self.signature.search(version_output)
        return match["version"] if match else None

    @abstractmethod
    def build_command(self, executable: str, job: Job) -> LaunchCommand:
        """Build the command line; raise ``ArgumentError`` if the launcher cannot run the job."""

    @abstractmethod
    def parse_rank_exit(self, output: str) -> FailedRank | None:
        """Parse which rank failed first from the launcher's messages."""

    def format_hosts(self, job: Job) -> str:
        """Format the job's hosts as ``h1:2,h2:2``."""
        return ",".join(str(host) for host in job.hosts)
