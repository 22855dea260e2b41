"""Description of a job to launch, and the command line that a launcher builds from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncddp.launch.hosts import Host


@dataclass(frozen=True)
class Job:
    """A program to start on several ranks, with hosts, binding and environment variables.

    Attributes:
        hosts: Hosts with their slots; empty for this machine or the batch system's choice.
        remote: Whether other machines take part, or may.
        alone: Whether all ranks run here and no option or variable names other machines.
        interface: Network interfaces (``eth0``) or networks (``10.0.0.0/24``), as given.
        remote_shell: Program to use instead of ssh: called with a host and a command line.
        bind_to: Hardware to which each rank is bound: ``none``, ``core``, ``socket`` or ``numa``.
        tag_output: Whether each line of output says which rank wrote it.
        live: Whether an unfinished line, as of a progress bar, is shown before its end.
        extra: Further arguments for the launcher itself.
        forward: Names of the variables that go to other machines; no other does.
        environment: The environment that the launcher would otherwise run in.
    """

    ranks: int
    program: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    remote: bool = False
    alone: bool = False
    interface: str | None = None
    ssh_port: int | None = None
    remote_shell: str | None = None
    bind_to: str = "none"
    oversubscribe: bool = False
    tag_output: bool = False
    live: bool = False
    extra: tuple[str, ...] = ()
    set_environment: Mapping[str, str] = field(default_factory=dict)
    forward: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    root: bool = False

    def has_flag(self, *flags: str) -> bool:
        """Return whether the user's own launcher arguments contain one of these flags."""
        return any(word == flag for word in self.extra for flag in flags)


@dataclass(frozen=True)
class LaunchCommand:
    """Command line that starts a job, and the variables to add to its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
