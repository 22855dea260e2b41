"""A Slurm of one node: its two daemons, without authentication, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.support.sockets import free_ports

__all__ = ["OneNode", "missing"]

_CPUS = 8
_PATIENCE = 20.0
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "salloc", "sinfo")
_SETTINGS = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/control.pid
SlurmdPidFile={folder}/node.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
MpiDefault=none
SchedulerParameters=sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} Gres=gpu:2 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """What keeps this machine from having a Slurm of its own."""
    lacking = [name for name in _PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"no {', '.join(lacking)}; on Debian: apt-get install slurmctld slurmd slurm-client"
    return None if os.geteuid() == 0 else "slurmd wants root"


class OneNode:
    """The daemons; ``with`` ends them.

    The node has two GPUs in name only: devices that are there on every machine stand for them.

    Args:
        folder: For their files; a short path, since sockets lie there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> OneNode:
        for name in ("state", "spool"):
            (self.folder / name).mkdir()
        host = socket.gethostname().partition(".")[0]
        control_port, node_port = free_ports(2)
        (self.folder / "slurm.conf").write_text(
            _SETTINGS.format(
                host=host,
                folder=self.folder,
                control_port=control_port,
                node_port=node_port,
                cpus=_CPUS,
            )
        )
        (self.folder / "gres.conf").write_text(
            f"NodeName={host} Name=gpu File=/dev/null\nNodeName={host} Name=gpu File=/dev/zero\n"
        )
        try:
            self._start("slurmctld", "-D", "-i", "-c")
            self._start("slurmd", "-D", "-N", host)
            self._wait_until_idle()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End both, the node first."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()

    def call(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Slurm's in the folder."""
        return subprocess.run(
            words,
            env={**self.environment, **more},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    def pmix_step(self, ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a program on ranks that PMIx connects; right after another Slurm may not launch."""
        end = time.monotonic() + _PATIENCE
        while True:
            done = self.call("srun", f"--ntasks={ranks}", "--mpi=pmix", *words)
            if "launch failed" not in done.stderr or time.monotonic() > end:
                return done
            time.sleep(1.0)

    def submit(self, name: str, *words: str, **more: str) -> tuple[int, str]:
        """Run a batch job; gives exit code and output (``sbatch --wait`` rarely looks)."""
        output = f"--output={name}.out"
        done = self.call("sbatch", "--parsable", f"--job-name={name}", output, *words, **more)
        assert done.returncode == 0, done.stderr
        end = time.monotonic() + 150
        while time.monotonic() < end:
            told = self.call("scontrol", "show", "job", done.stdout.strip()).stdout
            facts = dict(word.split("=", 1) for word in told.split() if "=" in word)
            if facts["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"):
                said = (self.folder / f"{name}.out").read_text()
                return int(facts["ExitCode"].split(":")[0]), said
            time.sleep(0.1)
        raise TimeoutError(f"the job did not end: {told}")

    def log(self, daemon: str) -> str:
        """What a daemon has written, ``slurmctld`` or ``slurmd``."""
        return (self.folder / f"{daemon}.log").read_text(errors="replace")

    def _start(self, *words: str) -> None:
        with (self.folder / f"{words[0]}.log").open("wb") as log:
            self._daemons.append(
                subprocess.Popen(words, env=self.environment, stdout=log, stderr=log)
            )

    def _wait_until_idle(self) -> None:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            if any(daemon.poll() is not None for daemon in self._daemons):
                break
            if self.call("sinfo", "--noheader", "--format=%t").stdout.strip() == "idle":
                return
            time.sleep(0.1)
        said = [
            line
            for name in ("slurmctld", "slurmd")
            for line in self.log(name).splitlines()
            if "error" in line or "fatal" in line
        ]
        raise RuntimeError(f"the node does not come up: {said[-3:]}")
