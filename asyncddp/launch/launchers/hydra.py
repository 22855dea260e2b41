"""Command line and failure messages of Hydra, the ``mpiexec`` of MPICH and of Intel MPI.

Source: ``mpiexec.hydra -help`` of MPICH 5.0 and of Intel MPI 2021.18; MPICH's guide "Using the
Hydra process manager"; Intel MPI Library Developer Reference, "mpiexec.hydra".
"""

from __future__ import annotations

import re
import signal
from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from asyncddp.errors import ArgumentError
from asyncddp.launch.job_options import Job, LaunchCommand
from asyncddp.launch.launchers.launcher import FailedRank, Launcher, LauncherOutputPatterns

_ABORT = re.compile(r"Abort\((?P<code>\d+)\) on node (?P<rank>\d+) \(rank \d+ in comm \d+\).*")
_INTEL_EXIT = re.compile(
    r"=\s+RANK (?P<rank>\d+) PID \d+ RUNNING AT (?P<host>\S+)\n"
    r"=\s+KILLED BY SIGNAL: (?P<signal>\d+)"
)


class _HydraLauncher(Launcher):
    """Base class of the launchers based on Hydra, the ``mpiexec`` of MPICH and of Intel MPI."""

    shell_arguments: ClassVar[str]

    output_patterns = LauncherOutputPatterns(
        delimiter=re.compile(r" ?={60,} *$"),
        block_starts=(re.compile(r"= +BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"),),
        lines=(
            re.compile(r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*"),
            re.compile(r"This typically refers to a problem with your application\."),
            re.compile(r"Please see the FAQ page for debugging suggestions"),
            _ABORT,
        ),
        line_prefixes=(
            "YOUR APPLICATION TERM",
            "This typically refers",
            "Please see the FAQ",
            "Abort(",
        ),
        on_stdout=True,
    )

    def build_command(self, executable: str, job: Job) -> LaunchCommand:
        arguments = [executable, "-n", str(job.ranks)]
        arguments += ["-hosts", self.format_hosts(job)] if job.hosts else []
        arguments += self._binding(job)
        arguments += ["-prepend-rank"] if job.tag_output else []
        if job.interface is not None and not job.alone:
            if "/" in job.interface or "," in job.interface:
                raise ArgumentError(
                    f"--network-interface: {self.title} takes the name of one interface, like "
                    f"eth0; got {job.interface!r}."
                )
            arguments += ["-iface", job.interface]
        if job.remote_shell is not None:
            arguments += ["-launcher", "ssh", "-launcher-exec", job.remote_shell]
        if job.remote:
            arguments += ["-genvlist", ",".join(job.forward)]
        return LaunchCommand((*arguments, *job.extra, *job.program), self._environment(job))

    def _binding(self, job: Job) -> list[str]:
        return job.default_option("-bind-to", "--bind-to", value=job.bind_to)

    def _environment(self, job: Job) -> dict[str, str]:
        added = dict(job.set_environment)
        if job.interface is not None and not job.alone and "FI_TCP_IFACE" not in job.environment:
            added["FI_TCP_IFACE"] = job.interface  # what libfabric's TCP provider reads
        if job.ssh_port is not None:
            added[self.shell_arguments] = f"-p {job.ssh_port}"
        return added

    def parse_rank_exit(self, output: str) -> FailedRank | None:
        abort = _ABORT.search(output)
        return self._parse_signal(output) or (FailedRank.from_match(abort) if abort else None)

    @abstractmethod
    def _parse_signal(self, output: str) -> FailedRank | None:
        """Parse which rank was killed by a signal, if the messages name one."""


class _MpichLauncher(_HydraLauncher):
    title = "MPICH"
    signature = re.compile(r"HYDRA build details:\s+Version:\s+(?P<version>\S+)")
    shell_arguments = "HYDRA_LAUNCHER_EXTRA_ARGS"
    forwarded_signals = frozenset({signal.SIGTERM, signal.SIGUSR1})  # it dies of others

    def _parse_signal(self, output: str) -> FailedRank | None:
        """Parse the signal but no rank: MPICH names the lowest rank, not the first killed."""
        match = re.search(r"EXIT STRING: .*?signal:? (?P<signal>\d+)\)", output)
        return FailedRank.from_match(match) if match else None


class _IntelMpiLauncher(_HydraLauncher):
    title = "Intel MPI"
    signature = re.compile(
        r"Intel\(R\) MPI Library for Linux\* OS, Version (?P<version>[\d.]+(?: Update \d+)?)"
    )
    shell_arguments = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"

    def _parse_signal(self, output: str) -> FailedRank | None:
        """Parse the rank killed first; Intel MPI also lists ranks that it killed itself."""
        shown = [FailedRank.from_match(match) for match in _INTEL_EXIT.finditer(output)]
        suspects = [one for one in shown if one.signal != signal.SIGKILL] or shown
        return replace(suspects[0], rank=None) if len(suspects) > 1 else next(iter(suspects), None)

    def _binding(self, job: Job) -> list[str]:
        return []  # Intel MPI pins by variables

    def _environment(self, job: Job) -> dict[str, str]:
        added = super()._environment(job)
        if not {"I_MPI_PIN", "I_MPI_PIN_DOMAIN"} & job.environment.keys():
            pin = {"I_MPI_PIN": "0"} if job.bind_to == "none" else {"I_MPI_PIN_DOMAIN": job.bind_to}
            added.update(pin)
        return added


MPICH = _MpichLauncher()
INTEL_MPI = _IntelMpiLauncher()
