"""Description of a job to launch, and the command line that a launcher builds from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from asyncddp.launch.hosts import Host


@dataclass(frozen=True)
class Job:
    """A program to start on several ranks, with hosts, binding and environment variables."""

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

    def has_flag(self, *flags: str) -> bool:
        """Return whether the user's own launcher arguments contain one of these flags."""
        return any(word == flag for word in self.extra for flag in flags)


@dataclass(frozen=True)
class LaunchCommand:
    """Command line that starts a job, and the variables to add to its environment."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
