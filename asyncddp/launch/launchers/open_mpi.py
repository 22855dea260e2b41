"""Command line and failure messages of Open MPI's ``mpirun``, series 4 (ORTE) and 5 (PRRTE).

Source: the manual pages mpirun(1) of Open MPI 4.1 and 5.0, and prterun(1) of PRRTE 3.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace

from asyncddp.config import open_mpi_keepalive
from asyncddp.launch.job_options import Job, LaunchCommand
from asyncddp.launch.launchers.launcher import FailedRank, Launcher, LauncherOutputPatterns
from asyncddp.launch.rank_processes import FORWARDED_SIGNALS
from asyncddp.restrict_listening_sockets import local_open_mpi

_PROGRAM = r"(?:mpirun|mpiexec|orterun|prterun|prun)(?:\.openmpi)?"
_PMIX_INTERFACES = "PMIX_MCA_ptl_base_if_"  # include or exclude: where ranks reach the launcher

_EXITS = (
    re.compile(
        rf"{_PROGRAM} noticed that process rank (?P<rank>\d+) with PID \d+ on node "
        r"(?P<host>\S+)\s+exited on\s+signal (?P<signal>\d+)"
    ),
    re.compile(r"Process name: \[.*,(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)"),
    re.compile(r"MPI_ABORT was invoked on rank (?P<rank>\d+) in [\s\S]*?rrorcode:? (?P<code>\d+)"),
    re.compile(
        rf"{_PROGRAM} has exited due to process rank (?P<rank>\d+) with PID \d+ on node "
        r'(?P<host>\S+) calling\s+"abort"'
    ),
)
_UNFINISHED = re.compile(
    rf"{_PROGRAM} has exited due to process rank (?P<rank>\d+) with PID \d+ on node "
    r"(?P<host>\S+) exiting\s+improperly"
)
_HOSTS_LOST = (
    re.compile(r"A daemon failed to report back[\s\S]*?Remote host:\s+(?P<host>\S+)"),
    re.compile(
        r"(?:PRTE|ORTE) has lost communication with a remote daemon[\s\S]*?"
        r"Remote daemon:\s+\[.*\] on node (?P<host>\S+)"
    ),
)


_OUTPUT_PATTERNS = LauncherOutputPatterns(
    delimiter=re.compile(r" ?-{60,} *$"),
    block_starts=(
        re.compile(rf"{_PROGRAM} (?:noticed that|detected that|has exited due to) .*process"),
        re.compile(r"MPI_ABORT was invoked on rank"),
        re.compile(r"A daemon failed to report back after being spawned"),
        re.compile(r"(?:PRTE|ORTE) has lost communication with a remote daemon"),
        re.compile(r"Primary job +terminated normally, but \d+ process"),
    ),
    lines=(
        re.compile(r"\[\S+\] \d+ more process(?:es)? (?:has|have) sent help message .*"),
        re.compile(r"\[\S+\] Set MCA parameter .* to 0 to see all help / error messages"),
        re.compile(r"\[\S+:\d+\] PMIX ERROR: PMIX_ERR_UNREACH in file .*"),  # of the survivors
    ),
    line_prefixes=("[",),
)


@dataclass(frozen=True)
class _OpenMPILauncher(Launcher):
    """Launcher for Open MPI's ``mpirun``, version 4 (ORTE) or version 5 (PRRTE)."""

    title = "Open MPI"
    signature: re.Pattern[str]
    runtime_flag: str
    runtime_interfaces: str
    shell: str  # the MCA component that starts daemons by ssh
    tag: tuple[str, ...]
    unbuffered: tuple[str, ...] = ()
    forwarded_signals: frozenset[int] = FORWARDED_SIGNALS
    abort_signal: int = signal.SIGINT
    output_patterns: LauncherOutputPatterns = _OUTPUT_PATTERNS

    def build_command(self, executable: str, job: Job) -> LaunchCommand:
        mapping = "slot:OVERSUBSCRIBE" if job.oversubscribe else "slot"
        arguments = [executable, "-np", str(job.ranks)]
        arguments += ["--host", self.format_hosts(job)] if job.hosts else []
        arguments += job.default_option("--map-by", "-map-by", value=mapping)
        arguments += job.default_option("--bind-to", "-bind-to", value=job.bind_to)
        arguments += self._mca_parameters(job)
        arguments += job.default_option("--stdin", value="none")  # 5.0 loses its end
        if job.tag_output or job.live:
            arguments += self.tag if job.tag_output else self.unbuffered
        for name in job.forward if job.remote else ():
            arguments += ["-x", name]
        environment = {**self._loopback_variables(job), **job.set_environment}
        if job.remote:
            environment |= open_mpi_keepalive({**job.environment, **job.set_environment})
        if job.root:
            environment["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
            environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
        return LaunchCommand((*arguments, *job.extra, *job.program), environment)

    def _loopback_variables(self, job: Job) -> dict[str, str]:
        """Return variables that keep ranks off the network in a single-machine run."""
        if not job.alone:
            return {}
        environment = {**job.environment, **job.set_environment}
        # Open MPI 5.0.8 would tell its ranks an outside address, at which the launcher is closed.
        chosen = any(name.startswith(_PMIX_INTERFACES) for name in environment)
        found = {} if chosen else {f"{_PMIX_INTERFACES}include": "127.0.0.0/8"}
        if not any(word.startswith("btl") for word in job.extra):
            found |= local_open_mpi(job.ranks, environment, all_told=True)
        return found

    def _mca_parameters(self, job: Job) -> list[str]:
        """Return MCA parameters, except for those set by the user."""
        wanted = [("--mca", "osc", "^ucx")]  # osc/ucx complains of every window without RDMA
        if not job.alone:  # btl/ofi looks for hardware for a second; it serves MPI's windows alone
            wanted.append(("--mca", "btl", "^ofi"))
        if job.oversubscribe:
            wanted.append(("--mca", "mpi_yield_when_idle", "1"))
        if job.interface is not None and not job.alone:
            wanted.append(("--mca", "btl_tcp_if_include", job.interface))
            wanted.append((self.runtime_flag, self.runtime_interfaces, job.interface))
        if job.ssh_port is not None:
            wanted.append((self.runtime_flag, f"{self.shell}_args", f"-p {job.ssh_port}"))
        if job.remote_shell is not None:
            wanted.append((self.runtime_flag, f"{self.shell}_agent", job.remote_shell))
        # to ranks alone: workers of a DataLoader would die of a signal that a rank handles
        wanted.append((self.runtime_flag, "odls_base_signal_direct_children_only", "1"))
        if signal.SIGTERM in self.forwarded_signals:  # by number: PRRTE refuses its name
            numbers = ",".join(str(int(number)) for number in sorted(self.forwarded_signals))
            wanted.append((self.runtime_flag, "ess_base_forward_signals", numbers))
        return [
            word
            for setting in wanted
            if setting[1] not in job.extra and f"OMPI_MCA_{setting[1]}" not in job.environment
            for word in setting
        ]

    def parse_rank_exit(self, output: str) -> FailedRank | None:
        if match := _earliest_match(_EXITS, output):
            return FailedRank.from_match(match)
        if match := _UNFINISHED.search(output):
            return FailedRank(int(match["rank"]), match["host"], code=0)
        lost = _earliest_match(_HOSTS_LOST, output)
        return FailedRank(host=lost["host"], lost_host=True) if lost else None


def _earliest_match(patterns: Iterable[re.Pattern[str]], text: str) -> re.Match[str] | None:
    found = [match for pattern in patterns if (match := pattern.search(text)) is not None]
    return min(found, key=lambda match: match.start(), default=None)


OPEN_MPI_4 = _OpenMPILauncher(
    re.compile(r"\((?:Open MPI|OpenRTE)\) (?P<version>[1-4]\.[\w.]+)"),
    runtime_flag="--mca",
    runtime_interfaces="oob_tcp_if_include",
    shell="plm_rsh",
    tag=("--tag-output",),
)
OPEN_MPI_5 = _OpenMPILauncher(
    re.compile(r"\((?:Open MPI|OpenRTE)\) (?P<version>(?:[5-9]|\d\d)\.[\w.]+)"),
    runtime_flag="--prtemca",
    runtime_interfaces="prte_if_include",
    shell="plm_ssh",
    tag=("--output", "tag"),
    unbuffered=("--output", ":raw"),  # else it waits for the ends of lines
    forwarded_signals=FORWARDED_SIGNALS | {signal.SIGTERM},
    output_patterns=replace(_OUTPUT_PATTERNS, on_stdout=True),  # some of it
)
