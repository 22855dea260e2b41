"""Hydra, the process manager of MPICH and, in a form of its own, of Intel MPI.

Source: ``mpiexec.hydra -help`` of MPICH 5.0 and of Intel MPI 2021.18; MPICH's guide "Using the
Hydra process manager"; Intel MPI Library Developer Reference, "mpiexec.hydra".
"""

from __future__ import annotations

import re
from typing import ClassVar

from asyncddp.errors import ArgumentError
from asyncddp.launch.job import Command, Job
from asyncddp.launch.vendors.contract import (
    Death,
    Launcher,
    Noise,
    death_from,
    first_match,
    flags_unless_given,
)

__all__ = ["INTEL_MPI", "MPICH"]

_ABORT = r"Abort\((?P<code>\d+)\) on node \d+ \(rank (?P<rank>\d+) in comm \d+\)"


class Hydra(Launcher):
    """What both share."""

    signature: ClassVar[re.Pattern[str]]
    deaths: ClassVar[tuple[re.Pattern[str], ...]]
    shell_arguments: ClassVar[str]

    noise = Noise(
        fence=re.compile(r"={60,}\s*"),
        openings=(re.compile(r"= +BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"),),
        lines=(
            re.compile(r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*"),
            re.compile(r"This typically refers to a problem with your application\."),
            re.compile(r"Please see the FAQ page for debugging suggestions"),
            re.compile(_ABORT + r".*application called MPI_Abort.*"),
        ),
        stems=("YOUR APPLICATION TERM", "This typically refers", "Please see the FAQ", "Abort("),
        on_stdout=True,
    )

    def recognise(self, version_output: str) -> str | None:
        match = self.signature.search(version_output)
        return match["version"].strip() if match else None

    def command(self, executable: str, job: Job) -> Command:
        arguments = [executable, "-n", str(job.ranks)]
        arguments += ["-hosts", self.hosts_argument(job)] if job.hosts else []
        arguments += self._binding(job)
        arguments += ["-prepend-rank"] if job.tag_output else []
        if job.interface is not None:
            arguments += ["-iface", self._interface(job.interface)]
        if job.remote_shell is not None:
            arguments += ["-launcher", "ssh", "-launcher-exec", job.remote_shell]
        if job.remote:
            arguments += ["-genvlist", ",".join(job.forward)]
        return Command((*arguments, *job.extra, *job.program), self._environment(job))

    def _interface(self, text: str) -> str:
        if "/" in text or "," in text:
            raise ArgumentError(
                f"--network-interface: {self.title} takes the name of one interface, like eth0; "
                f"got {text!r}."
            )
        return text

    def _binding(self, job: Job) -> list[str]:
        return flags_unless_given(job, ("-bind-to", "--bind-to"), job.bind_to)

    def _environment(self, job: Job) -> dict[str, str]:
        added = dict(job.set_environment)
        if job.interface is not None and "FI_TCP_IFACE" not in job.environment:
            added["FI_TCP_IFACE"] = job.interface  # what libfabric's TCP provider reads
        if job.ssh_port is not None:
            added[self.shell_arguments] = f"-p {job.ssh_port}"
        return added

    def death(self, said: str) -> Death | None:
        return death_from(first_match((*self.deaths, re.compile(_ABORT)), said))


class _Mpich(Hydra):
    title = "MPICH"
    signature = re.compile(r"HYDRA build details:\s+Version:\s+(?P<version>\S+)")
    deaths = (
        re.compile(
            r"=\s+PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)\n"
            r"[\s\S]*?EXIT STRING: .*?signal:? (?P<signal>\d+)\)"
        ),
    )
    shell_arguments = "HYDRA_LAUNCHER_EXTRA_ARGS"


class _IntelMpi(Hydra):
    title = "Intel MPI"
    signature = re.compile(
        r"Intel\(R\) MPI Library for Linux\* OS, Version (?P<version>[\d.]+(?: Update \d+)?)"
    )
    shell_arguments = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"
    deaths = (
        re.compile(
            r"=\s+RANK (?P<rank>\d+) PID (?P<pid>\d+) RUNNING AT (?P<host>\S+)\n"
            r"=\s+KILLED BY SIGNAL: (?P<signal>\d+)"
        ),
    )

    def _binding(self, job: Job) -> list[str]:
        return []  # Intel MPI pins by variables

    def _environment(self, job: Job) -> dict[str, str]:
        added = super()._environment(job)
        if not {"I_MPI_PIN", "I_MPI_PIN_DOMAIN"} & job.environment.keys():
            pin = {"I_MPI_PIN": "0"} if job.bind_to == "none" else {"I_MPI_PIN_DOMAIN": job.bind_to}
            added.update(pin)
        return added


MPICH = _Mpich()
INTEL_MPI = _IntelMpi()
