"""Launcher for Slurm's ``srun``: its command line and its failure messages.

Source: the manual page srun(1) of Slurm 22.05 to 24.11.
"""

from __future__ import annotations

import re
import signal

from asyncddp.errors import ArgumentError
from asyncddp.launch.job_options import Job, LaunchCommand
from asyncddp.launch.launchers.launcher import FailedRank, Launcher, LauncherOutputPatterns

_BINDING = {"none": "none", "core": "cores", "socket": "sockets", "numa": "ldoms"}
_LOGIN = ("HOME", "LANG", "LOGNAME", "SHELL", "TERM", "TMPDIR", "USER")
_TASK = re.compile(
    r"srun: error: (?P<host>[^\s:]+): tasks? (?P<rank>\d+)[\d,\-]*: "
    r"(?:Exited with exit code (?P<code>\d+)|(?P<words>[A-Z][^(\n]*?))(?: \(core dumped\))?$",
    re.MULTILINE,
)


class _SrunLauncher(Launcher):
    title = "srun"
    signature = re.compile(r"^slurm(?:-wlm)? (?P<version>\d[\w.\-]*)", re.MULTILINE)
    local = False
    forwarded_signals = frozenset({signal.SIGUSR1, signal.SIGUSR2})  # upon SIGTERM it kills
    output_patterns = LauncherOutputPatterns(
        lines=(
            re.compile(r"srun: error: \S+: tasks? [\d,\-]+: .*"),
            re.compile(r"srun: (?:Terminating|launch/slurm: _step_signal: Terminating) .*"),
            re.compile(r"srun: Force Terminated .*"),
            re.compile(r"slurmstepd: error: \*\*\* STEP .* CANCELLED AT .*"),
        ),
        line_prefixes=("srun: ", "slurmstepd: error: *** STEP"),
    )

    def build_command(self, executable: str, job: Job) -> LaunchCommand:
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
        return LaunchCommand((*arguments, *job.extra, *job.program), added)

    def _placement(self, job: Job) -> list[str]:
        if not job.hosts:
            return []
        slots = {host.slots for host in job.hosts}
        if len(slots) > 1:
            raise ArgumentError(
                "-H: srun wants the same number of ranks on every host, got "
                f"{self.format_hosts(job)}. Give equal slots, or use --launcher mpirun."
            )
        return [
            f"--nodes={len(job.hosts)}",
            f"--ntasks-per-node={slots.pop()}",
            f"--nodelist={','.join(host.name for host in job.hosts)}",
            "--distribution=block",
        ]

    def _environment(self, job: Job) -> dict[str, str]:
        """Return variables that configure the MPI library; srun has no flags for it."""
        wanted = {"OMPI_MCA_osc": "^ucx", "OMPI_MCA_btl": "^ofi"}
        if job.oversubscribe:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if job.interface is not None:
            wanted["OMPI_MCA_btl_tcp_if_include"] = job.interface
            if "/" not in job.interface and "," not in job.interface:
                wanted["FI_TCP_IFACE"] = job.interface
        kept = {name: value for name, value in wanted.items() if name not in job.environment}
        return {**kept, **job.set_environment}

    def parse_rank_exit(self, output: str) -> FailedRank | None:
        match = _TASK.search(output)
        if match is None:
            return None
        words = (match["words"] or "").strip()
        killed = next((n.value for n in signal.Signals if signal.strsignal(n) == words), None)
        code = None if match["code"] is None else int(match["code"])
        return FailedRank(int(match["rank"]), match["host"], killed, code)


SLURM = _SrunLauncher()
