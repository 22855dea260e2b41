"""Open MPI: ``mpirun`` of the 4 series (ORTE) and of the 5 series (PRRTE).

Source: the manual pages mpirun(1) of Open MPI 4.1 and 5.0, and prterun(1) of PRRTE 3.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import ClassVar

from asyncddp.launch.job import Command, Job
from asyncddp.launch.vendors.contract import (
    Death,
    Launcher,
    Noise,
    death_from,
    first_match,
    flags_unless_given,
)
from asyncddp.listening import local_open_mpi

__all__ = ["OPEN_MPI_4", "OPEN_MPI_5"]

_VERSION = re.compile(r"\((?:Open MPI|OpenRTE)\) (?P<version>(?P<major>\d+)\.[\w.]+)")
_PROGRAM = r"(?:mpirun|mpiexec|orterun|prterun|prun)(?:\.openmpi)?"

_DEATHS = (
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


class OpenMPI(Launcher):
    """What both series share."""

    title = "Open MPI"
    series: ClassVar[range]
    runtime_flag: ClassVar[str]
    runtime_interfaces: ClassVar[str]
    shell_program: ClassVar[str]
    shell_arguments: ClassVar[str]
    tag: ClassVar[tuple[str, ...]]
    as_it_comes: ClassVar[tuple[str, ...]] = ()

    noise = Noise(
        fence=re.compile(r" ?-{60,} *$"),
        openings=(
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
        stems=("[",),
    )

    def recognise(self, version_output: str) -> str | None:
        """By "Open MPI" and a number."""
        match = _VERSION.search(version_output)
        return match["version"] if match and int(match["major"]) in self.series else None

    def command(self, executable: str, job: Job) -> Command:
        """With parameters of the run by --mca, and variables by -x."""
        mapping = "slot:OVERSUBSCRIBE" if job.oversubscribe else "slot"
        arguments = [executable, "-np", str(job.ranks)]
        arguments += ["--host", self.hosts_argument(job)] if job.hosts else []
        arguments += flags_unless_given(job, ("--map-by", "-map-by"), mapping)
        arguments += flags_unless_given(job, ("--bind-to", "-bind-to"), job.bind_to)
        arguments += self._settings(job)
        arguments += flags_unless_given(job, ("--stdin",), "none")  # 5.0 loses its end
        if job.tag_output or job.live:
            arguments += self.tag if job.tag_output else self.as_it_comes
        for name in job.forward if job.remote else ():
            arguments += ["-x", name]
        root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
        environment = {
            **self._local(job),
            **job.set_environment,
            **(dict.fromkeys(root, "1") if job.root else {}),
        }
        return Command((*arguments, *job.extra, *job.program), environment)

    def _local(self, job: Job) -> dict[str, str]:
        """What keeps the ranks off the network where no other machine takes part."""
        if not job.alone or any(word.startswith("btl") for word in job.extra):
            return {}
        return local_open_mpi({**job.environment, **job.set_environment}, job.ranks, all_told=True)

    def _settings(self, job: Job) -> list[str]:
        """The parameters of Open MPI's components, but for those that the user has set."""
        wanted = [("--mca", "osc", "^ucx")]  # osc/ucx complains of every window without RDMA
        if job.oversubscribe:
            wanted.append(("--mca", "mpi_yield_when_idle", "1"))
        if job.interface is not None and not job.alone:
            wanted.append(("--mca", "btl_tcp_if_include", job.interface))
            wanted.append((self.runtime_flag, self.runtime_interfaces, job.interface))
        if job.ssh_port is not None:
            wanted.append((self.runtime_flag, self.shell_arguments, f"-p {job.ssh_port}"))
        if job.remote_shell is not None:
            wanted.append((self.runtime_flag, self.shell_program, job.remote_shell))
        return [
            word
            for setting in wanted
            if not job.asks_for(setting[1]) and f"OMPI_MCA_{setting[1]}" not in job.environment
            for word in setting
        ]

    def death(self, said: str) -> Death | None:
        """From words about lost hosts, signals and exit codes."""
        lost = first_match(_HOSTS_LOST, said)
        found = death_from(first_match(_DEATHS, said))
        if found is None and (unfinished := _UNFINISHED.search(said)):
            found = Death(int(unfinished["rank"]), unfinished["host"], code=0)
        return Death(host=lost["host"], lost_host=True) if lost and not found else found


class _OpenMPI4(OpenMPI):
    """The 4 series and older."""

    series = range(1, 5)
    runtime_flag = "--mca"
    runtime_interfaces = "oob_tcp_if_include"
    shell_program = "plm_rsh_agent"
    shell_arguments = "plm_rsh_args"
    tag = ("--tag-output",)


class _OpenMPI5(OpenMPI):
    """The 5 series and newer."""

    series = range(5, 100)
    runtime_flag = "--prtemca"
    runtime_interfaces = "prte_if_include"
    shell_program = "plm_ssh_agent"
    shell_arguments = "plm_ssh_args"
    tag = ("--output", "tag")
    noise = replace(OpenMPI.noise, on_stdout=True)  # some of it
    as_it_comes = ("--output", ":raw")  # else it waits for the ends of lines


OPEN_MPI_4 = _OpenMPI4()
OPEN_MPI_5 = _OpenMPI5()
