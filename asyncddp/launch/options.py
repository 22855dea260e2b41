"""The options of ``asyncddp run``, as one record and one decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["PORT", "Count", "Number", "RunOptions", "run_options", "where_options"]

F = TypeVar("F", bound=Callable[..., Any])


class Count(click.IntRange):
    """A whole number; what is none is answered with what is expected.

    Args:
        what: What it counts.
        least: The least; None where there is none.
        most: The most.
    """

    def __init__(
        self, what: str = "number", least: int | None = 1, most: int | None = None
    ) -> None:
        super().__init__(least, most)
        bounds = "" if least is None else f" of at least {least}"
        bounds = bounds if most is None else f" from {least} to {most}"
        self.expected = f"a {what}{bounds}" if " " in what else f"a whole {what}{bounds}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        return _convert(super().convert, self.expected, value, param, ctx)


class Number(click.FloatRange):
    """A number, above zero if asked for; what is none is answered with what is expected."""

    def __init__(self, *, positive: bool = False) -> None:
        super().__init__(min=0 if positive else None, min_open=positive)
        self.expected = "a number above 0" if positive else "a number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read it."""
        return _convert(super().convert, self.expected, value, param, ctx)


def _convert(
    read: Callable[..., Any],
    expected: str,
    value: Any,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> Any:
    try:
        return read(value, param, ctx)
    except click.BadParameter as problem:
        words = f"expected {expected}, got {value!r}."
        raise click.BadParameter(words, ctx=ctx, param=param) from problem


@dataclass(frozen=True)
class RunOptions:
    """What the user asked for, as given."""

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


_COUNT = Count()
PORT = Count("port number", 1, 65535)
_WHERE = (
    click.option(
        "-np",
        "-n",
        "--num-proc",
        type=Count("number of ranks"),
        metavar="RANKS",
        help="Ranks to start [the hosts' slots, or 1].",
    ),
    click.option("-H", "--hosts", metavar="H1:2,H2:2", help="Hosts, each with its slots."),
    click.option(
        "--hostfile",
        type=click.Path(path_type=Path),
        help="File with one host per line: h1 slots=2.",
    ),
    click.option(
        "--network-interface",
        metavar="NAME|NETWORK",
        help="Interface between the hosts: eth0, or (Open MPI) 10.0.0.0/24.",
    ),
    click.option("--ssh-port", type=PORT, help="Port of ssh on the hosts."),
    click.option("--remote-shell", metavar="PROGRAM", help="Called like ssh, in place of it."),
    click.option("--launcher", metavar="PROGRAM", help="mpirun, srun, or a path [found]."),
)
_HOW = (
    click.option(
        "-x",
        "exports",
        metavar="VAR[=V]",
        multiple=True,
        help="Variable for the ranks; repeatable.",
    ),
    click.option(
        "--mpi-args",
        "--extra-mpi-flags",
        metavar="ARGS",
        multiple=True,
        help="Further arguments for the launcher, in one string.",
    ),
    click.option(
        "--bind-to",
        type=click.Choice(["none", "core", "socket", "numa"]),
        default="none",
        show_default=True,
        help="What a rank is bound to.",
    ),
    click.option(
        "--oversubscribe/--no-oversubscribe",
        default=None,
        help="Allow more ranks than slots or cores [where needed].",
    ),
    click.option(
        "--ranks-per-machine", type=_COUNT, help="Simulate machines of so many ranks each."
    ),
    click.option("--timeout", type=Number(positive=True), help="End the run after SECONDS."),
    click.option(
        "--timeline",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="DIR",
        help="Note in DIR/rank<r>.json what each rank does when; see asyncddp timeline --help.",
    ),
    click.option(
        "--timeline-filename",
        metavar="PREFIX",
        help="The same, in files named <PREFIX><r>.json.",
    ),
    click.option("--tag-output", is_flag=True, help="Begin each line with the rank that wrote it."),
    click.option("--dry-run", is_flag=True, help="Print the command and do not run it."),
    click.option(
        "--verbose", is_flag=True, help="Show the command and all of the launcher's words."
    ),
)


def where_options(command: F) -> F:
    """Give a click command the options that say how many ranks there are, and where."""
    for option in reversed(_WHERE):
        command = option(command)
    return command


def run_options(command: F) -> F:
    """Give a click command the options of :class:`RunOptions`."""
    for option in reversed(_HOW):
        command = option(command)
    return where_options(command)
