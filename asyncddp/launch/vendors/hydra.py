"""Hydra, the process manager of MPICH and, in a form of its own, of Intel MPI.

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
from asyncddp.launch.job import Command, Job
from asyncddp.launch.vendors.contract import (
    Death,
    Launcher,
    Noise,
    death_from,
    flags_unless_given,
)

__all__ = ["INTEL_MPI", "MPICH"]

_ABORT = re.compile(r"Abort\((?P<code>\d+)\) on node (?P<rank>\d+) \(rank \d+ in comm \d+\).*")


_INTEL_DEATH = re.compile(
    r"=\s+RANK (?P<rank>\d+) PID \d+ RUNNING AT (?P<host>\S+)\n"
    r"=\s+KILLED BY SIGNAL: (?P<signal>\d+)"
)


class Hydra(Launcher):
    """What both share."""

    signature: ClassVar[re.Pattern[str]]
    shell_arguments: ClassVar[str]

    noise = Noise(
        fence=re.compile(r" ?={60,} *$"),
        openings=(re.compile(r"= +BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"),),
        lines=(
            re.compile(r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: .*"),
            re.compile(r"This typically refers to a problem with your application\."),
            re.compile(r"Please see the FAQ page for debugging suggestions"),
            _ABORT,
        ),
        stems=("YOUR APPLICATION TERM", "This typically refers", "Please see the FAQ", "Abort("),
        on_stdout=True,
    )

    def recognise(self, version_output: str) -> str | None:
        """By its signature."""
        match = self.signature.search(version_output)
        return match["version"].strip() if match else None

    def command(self, executable: str, job: Job) -> Command:
        """With mpiexec's own options, and variables by name."""
        arguments = [executable, "-n", str(job.ranks)]
        arguments += ["-hosts", self.hosts_argument(job)] if job.hosts else []
        arguments += self._binding(job)
        arguments += ["-prepend-rank"] if job.tag_output else []
        if job.interface is not None and not job.alone:
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
        if job.interface is not None and not job.alone and "FI_TCP_IFACE" not in job.environment:
            added["FI_TCP_IFACE"] = job.interface  # what libfabric's TCP provider reads
        if job.ssh_port is not None:
            added[self.shell_arguments] = f"-p {job.ssh_port}"
        return added

    def death(self, said: str) -> Death | None:
        """From words about signals and aborts."""
        return self._killed(said) or death_from(_ABORT.search(said))

    @abstractmethod
    def _killed(self, said: str) -> Death | None:
        """Who was killed by a signal, as far as it can be told."""


class _Mpich(Hydra):
    title = "MPICH"
    signature = re.compile(r"HYDRA build details:\s+Version:\s+(?P<version>\S+)")
    shell_arguments = "HYDRA_LAUNCHER_EXTRA_ARGS"

    def _killed(self, said: str) -> Death | None:
        """The process that MPICH shows is the first in order, not in time: it names no victim."""
        return death_from(re.search(r"EXIT STRING: .*?signal:? (?P<signal>\d+)\)", said))


class _IntelMpi(Hydra):
    title = "Intel MPI"
    signature = re.compile(
        r"Intel\(R\) MPI Library for Linux\* OS, Version (?P<version>[\d.]+(?: Update \d+)?)"
    )
    shell_arguments = "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS"

    def _killed(self, said: str) -> Death | None:
        """Intel MPI shows all that were killed, its own victims too, and those by SIGKILL."""
        deaths = [death_from(match) for match in _INTEL_DEATH.finditer(said)]
        shown = [death for death in deaths if death is not None]
        others = [death for death in shown if death.signal != signal.SIGKILL]
        suspects = others or shown
        return replace(suspects[0], rank=None) if len(suspects) > 1 else next(iter(suspects), None)

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
