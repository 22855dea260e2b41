"""``srun``, Slurm's own launcher, for sites whose MPI is started by it.

Source: the manual page srun(1) of Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from asyncddp.errors import ArgumentError
from asyncddp.launch.job import Command, Job
from asyncddp.launch.vendors.contract import Death, Launcher, Noise

__all__ = ["SLURM"]

_BINDING = {"none": "none", "core": "cores", "socket": "sockets", "numa": "ldoms"}
_LOGIN = ("HOME", "LANG", "LOGNAME", "SHELL", "TERM", "TMPDIR", "USER")
_TASK = re.compile(
    r"srun: error: (?P<host>[^\s:]+): tasks? (?P<rank>\d+)[\d,\-]*: "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<words>[A-Z][^(\n]*?))(?: \(core dumped\))?$",
    re.MULTILINE,
)


def _signal_called(words: str) -> int | None:
    """The number of the signal that the C library describes in these words."""
    known: Iterable[signal.Signals] = signal.Signals
    return next((number.value for number in known if signal.strsignal(number) == words), None)


class _Slurm(Launcher):
    title = "srun"
    local = False
    noise = Noise(
        lines=(
            re.compile(r"srun: error: \S+: tasks? [\d,\-]+: .*"),
            re.compile(r"srun: (?:Terminating|launch/slurm: _step_signal: Terminating) .*"),
            re.compile(r"srun: Force Terminated .*"),
            re.compile(r"slurmstepd: error: \*\*\* STEP .* CANCELLED AT .*"),
        ),
        stems=("srun: ", "slurmstepd: error: *** STEP"),
    )

    def recognise(self, version_output: str) -> str | None:
        """By "slurm" and a number."""
        match = re.search(r"^slurm(?:-wlm)? (?P<version>\d[\w.\-]*)", version_output, re.MULTILINE)
        return match["version"] if match else None

    def command(self, executable: str, job: Job) -> Command:
        """With a number of tasks, and variables by --export."""
        for flag, value in (("--ssh-port", job.ssh_port), ("--remote-shell", job.remote_shell)):
            if value is not None:
                raise ArgumentError(f"{flag}: srun starts ranks without ssh; leave it out.")
        added = self._environment(job)
        names = [name for name in _LOGIN if name in job.environment]
        names += [*job.forward, *(name for name in added if name not in job.forward)]
        arguments = [executable, "--ntasks", str(job.ranks), "--kill-on-bad-exit=1", "--input=none"]
        arguments += self._placement(job)
        arguments.append(f"--cpu-bind={_BINDING[job.bind_to]}")
        arguments += ["--overcommit"] if job.oversubscribe else []
        arguments += ["--label"] if job.tag_output else []
        arguments += ["--unbuffered"] if job.live and not job.tag_output else []
        arguments.append(f"--export={','.join(names)}")
        return Command((*arguments, *job.extra, *job.program), added)

    def _placement(self, job: Job) -> list[str]:
        if not job.hosts:
            return []
        slots = {host.slots for host in job.hosts}
        if len(slots) > 1:
            raise ArgumentError(
                "-H: srun wants the same number of ranks on every host, got "
                f"{self.hosts_argument(job)}. Give equal slots, or use --launcher mpirun."
            )
        return [
            f"--nodes={len(job.hosts)}",
            f"--ntasks-per-node={slots.pop()}",
            f"--nodelist={','.join(host.name for host in job.hosts)}",
            "--distribution=block",
        ]

    def _environment(self, job: Job) -> dict[str, str]:
        """No flags reach the MPI library through srun, so what it needs goes by variables."""
        wanted = {"OMPI_MCA_osc": "^ucx"}
        if job.oversubscribe:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if job.interface is not None:
            wanted["OMPI_MCA_btl_tcp_if_include"] = job.interface
            if "/" not in job.interface and "," not in job.interface:
                wanted["FI_TCP_IFACE"] = job.interface
        kept = {name: value for name, value in wanted.items() if name not in job.environment}
        return {**kept, **job.set_environment}

    def death(self, said: str) -> Death | None:
        """From the words "task 3: Exited with exit code 1"."""
        match = _TASK.search(said)
        if match is None:
            return None
        code = None if match["code"] is None else int(match["code"])
        killed = None if match["words"] is None else _signal_called(match["words"].strip())
        return Death(rank=int(match["rank"]), host=match["host"], signal=killed, code=code)


SLURM = _Slurm()
