"""The options of ``asyncddp run`` as a plain record, independent of click."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunOptions:
    """The options of ``asyncddp run`` as the user gave them, unvalidated."""

    num_proc: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    network_interface: str | None = None
    ssh_port: int | None = None
    remote_shell: str | None = None
    exports: tuple[str, ...] = ()
    mpi_args: tuple[str, ...] = ()
    launcher: str | None = None
    bind_to: str = "none"
    oversubscribe: bool | None = None
    ranks_per_machine: int | None = None
    timeout: float | None = None
    timeline: Path | None = None
    timeline_filename: str | None = None
    tag_output: bool = False
    dry_run: bool = False
    verbose: bool = False

    def to_arguments(self) -> tuple[str, ...]:
        """Convert the options of ranks that stay back to arguments of ``asyncddp run``."""
        names = ("num_proc", "hosts", "hostfile", "network_interface", "ssh_port", "remote_shell")
        given = {name: getattr(self, name) for name in (*names, "launcher")}
        words = [
            f"--{name.replace('_', '-')}={value}"
            for name, value in given.items()
            if value is not None
        ]
        words += [word for item in self.exports for word in ("-x", item)]
        words += [f"--mpi-args={text}" for text in self.mpi_args]
        return (*words, *["--verbose"] * self.verbose)
