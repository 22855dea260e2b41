"""The library's own launcher, which starts ranks on one machine without MPI."""

from __future__ import annotations

import re
import signal

from asyncddp.errors import ArgumentError
from asyncddp.launch.job_options import Job, LaunchCommand
from asyncddp.launch.launchers.launcher import FailedRank, Launcher, LauncherOutputPatterns
from asyncddp.launch.rank_processes import FORWARDED_SIGNALS

PROGRAM = "asyncddp.launch.local_launcher"
ELASTIC_PROGRAM = "asyncddp.launch.elastic_launcher"
_FAILURE = re.compile(
    r"asyncddp-local: rank (?P<rank>\d+) (?:was killed by signal (?P<signal>\d+)"
    r"|ended with exit code (?P<code>\d+))"
)


class _LocalLauncher(Launcher):
    title = "asyncddp's own launcher"
    signature = re.compile(r"asyncddp-local (?P<version>\S+)")
    forwarded_signals = FORWARDED_SIGNALS | {signal.SIGTERM}
    abort_signal = signal.SIGQUIT
    output_patterns = LauncherOutputPatterns(lines=(_FAILURE,), line_prefixes=("asyncddp-local: ",))

    def build_command(self, executable: str, job: Job) -> LaunchCommand:
        if job.remote:
            raise ArgumentError(
                f"{self.title} starts ranks on this machine alone. For several machines install an "
                "MPI library (asyncddp doctor says how), or start the script on each machine by "
                "torchrun --nnodes N --node-rank I --master-addr HOST --nproc-per-node RANKS"
            )
        for flag, value in (
            ("--bind-to", None if job.bind_to == "none" else job.bind_to),
            ("--mpi-args", " ".join(job.extra)),
        ):
            if value:
                raise ArgumentError(
                    f"{flag} {value}: {self.title} has no such option; leave it out"
                )
        arguments = [executable, "-m", PROGRAM, str(job.ranks)]
        if job.min_ranks is not None:
            numbers = job.ranks, job.min_ranks, job.restarts, job.spares
            arguments = [executable, "-m", ELASTIC_PROGRAM, *map(str, numbers)]
        arguments += ["--tag-output"] if job.tag_output else []
        return LaunchCommand((*arguments, "--", *job.program), dict(job.set_environment))

    def parse_rank_exit(self, output: str) -> FailedRank | None:
        match = _FAILURE.search(output)
        return FailedRank.from_match(match) if match else None


LOCAL = _LocalLauncher()
