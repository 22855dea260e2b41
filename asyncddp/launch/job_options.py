"""Options of ``asyncddp run``, with the job and the command line that are made from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncddp.launch.hosts import Host


@dataclass(frozen=True)
class RunOptions:
    """Options of ``asyncddp run`` as the user gave them, unvalidated."""

    num_proc: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    network_interface: str | None = None
    ssh_port: int | None = None
    remote_shell: str | None = None
    exports: tuple[str, ...] = ()
    mpi_args: tuple[str, ...] = ()
    launcher: str | None = None
    elastic: bool = False
    min_ranks: int | None = None
    restarts: int = 0
    spares: int = 0
    bind_to: str = "none"
    oversubscribe: bool | None = None
    ranks_per_machine: int | None = None
    timeout: float | None = None
    grace_period: float = 30.0
    timeline: Path | None = None
    timeline_filename: str | None = None
    tag_output: bool = False
    dry_run: bool = False
    verbose: bool = False

    def to_arguments(self) -> tuple[str, ...]:
        """Convert the placement and launcher options back to arguments of ``asyncddp run``."""
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


@dataclass(frozen=True)
class Job:
    """Program to start on several ranks, with hosts, binding and environment variables."""

    ranks: int
    program: tuple[str, ...]
    hosts: tuple[Host, ...] = ()  # with slots; none: this machine or the batch system's choice
    remote: bool = False  # other machines take part, or may
    alone: bool = False  # all ranks run here, and no option or variable names other machines
    interface: str | None = None  # of the network (eth0), or its address (10.0.0.0/24)
    ssh_port: int | None = None
    remote_shell: str | None = None  # in place of ssh: called with a host and a command line
    bind_to: str = "none"  # none, core, socket or numa
    oversubscribe: bool = False
    tag_output: bool = False  # each line of output says which rank wrote it
    live: bool = False  # an unfinished line, as of a progress bar, is shown before its end
    extra: tuple[str, ...] = ()  # further arguments for the launcher itself
    set_environment: Mapping[str, str] = field(default_factory=dict)
    forward: tuple[str, ...] = ()  # names of the variables that go to other machines; no other does
    environment: Mapping[str, str] = field(default_factory=dict)  # of the launcher, as it was
    root: bool = False
    min_ranks: int | None = None  # elastic: so many ranks must be left, or the run is ended
    restarts: int = 0  # elastic: so many ranks that die are replaced
    spares: int = 0  # elastic: so many processes wait for that

    def default_option(self, *names: str, value: str) -> list[str]:
        """Return ``[names[0], value]``, or nothing if the user's own arguments set the option."""
        return [] if set(names) & set(self.extra) else [names[0], value]


@dataclass(frozen=True)
class LaunchCommand:
    """Command line that starts a job, and the environment variables to add for it."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
