"""click decorators for the options of ``asyncddp run``, and parameter types for all commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from asyncddp.topology import Link

F = TypeVar("F", bound=Callable[..., Any])


class _ExplainedParamType(click.ParamType):  # type: ignore[type-arg]  # generic in click 8.3
    """Mixin of click parameter types; errors name the expected value."""

    expected: str

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as problem:
            words = f"expected {self.expected}, got {value!r}."
            raise click.BadParameter(words, ctx=ctx, param=param) from problem


class IntegerParamType(_ExplainedParamType, click.IntRange):
    """click parameter type of an integer in a range; errors say what the integer means."""

    def __init__(
        self, what: str = "number", least: int | None = 1, most: int | None = None
    ) -> None:
        super().__init__(least, most)
        bounds = "" if least is None else f" of at least {least}"
        bounds = bounds if most is None else f" from {least} to {most}"
        self.expected = f"a {what}{bounds}" if " " in what else f"a whole {what}{bounds}"

    def _describe_range(self) -> str:
        """Describe the range for the help, unless click would show ``x<=None``."""
        return "" if self.min is None and self.max is None else super()._describe_range()


class NumberParamType(_ExplainedParamType, click.FloatRange):
    """click parameter type of a real number, optionally restricted to positive ones."""

    def __init__(self, *, positive: bool = False) -> None:
        super().__init__(min=0 if positive else None, min_open=positive)
        self.expected = "a number above 0" if positive else "a number"

    def _describe_range(self) -> str:
        """Describe the range for the help, unless click would show ``x<=None``."""
        return "" if self.min is None else super()._describe_range()


class ParsedParamType(click.ParamType):  # type: ignore[type-arg]  # generic in click 8.3
    """click parameter type of a text parsed by a function, whose ValueErrors are shown."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name, self._parse = name, parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse the text; return a value that is already parsed unchanged."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as problem:
            self.fail(f"{problem}.", param, ctx)


def rank_value(form: str, example: str, kind: type[int] | type[float]) -> ParsedParamType:
    """Return the parameter type of a pair such as ``3:10``: a rank and a number."""

    def parse(text: str) -> tuple[int, float]:
        rank, _, number = text.partition(":")
        try:
            return int(rank), kind(number)
        except ValueError:
            raise ValueError(f"expected {form} such as {example}, got {text!r}") from None

    return ParsedParamType("rank and number", parse)


def parse_link(text: str) -> Link:
    """Parse a text such as ``100Mbit,20ms`` into a link between ranks."""
    from asyncddp.topology import Link

    return Link.parse(text)


LINK = ParsedParamType("link", parse_link)
PORT_NUMBER = IntegerParamType("port number", 1, 65535)
# fmt: off
_PLACEMENT_OPTIONS = (
    click.option("-np", "-n", "--num-proc", type=IntegerParamType("number of ranks"),
                 metavar="RANKS", help="Ranks to start [the hosts' slots, or 1]."),
    click.option("-H", "--hosts", metavar="H1:2,H2:2", help="Hosts, each with its slots."),
    click.option("--hostfile", type=click.Path(path_type=Path),
                 help="File with one host per line: h1 slots=2."),
    click.option("--network-interface", metavar="NAME|NETWORK",
                 help="Interface between the hosts: eth0, or (Open MPI) 10.0.0.0/24."),
    click.option("--ssh-port", type=PORT_NUMBER, help="Port of ssh on the hosts."),
    click.option("--remote-shell", metavar="PROGRAM", help="Called like ssh, in place of it."),
    click.option("--launcher", metavar="PROGRAM", help="mpirun, srun, or a path [found]."),
)
_PROGRAM_OPTIONS = (
    click.option("-x", "exports", metavar="VAR[=V]", multiple=True,
                 help="Variable for the ranks; repeatable."),
    click.option("--mpi-args", "--extra-mpi-flags", metavar="ARGS", multiple=True,
                 help="Further arguments for the launcher, in one string."),
)
_LAUNCH_OPTIONS = (
    *_PROGRAM_OPTIONS,
    click.option("--elastic", is_flag=True,
                 help="Let the other ranks go on where one dies; ranks of this machine."),
    click.option("--min", "min_ranks", type=IntegerParamType("number of ranks"), metavar="RANKS",
                 help="Ranks that an elastic run needs to go on, and to succeed [1]."),
    click.option("--restarts", type=IntegerParamType("number of restarts", 0), default=0,
                 metavar="N",
                 help="Replace N ranks that die by new processes, which take over another rank's "
                 "state: see asyncddp.ElasticState [0]."),
    click.option("--spares", type=IntegerParamType("number of processes", 0), default=0,
                 metavar="N",
                 help="Processes that have imported torch and wait to replace a rank [0]."),
    click.option("--bind-to", type=click.Choice(["none", "core", "socket", "numa"]),
                 default="none", show_default=True, help="What a rank is bound to."),
    click.option("--oversubscribe/--no-oversubscribe", default=None,
                 help="Allow more ranks than slots or cores [where needed]."),
    click.option("--ranks-per-machine", type=IntegerParamType(),
                 help="Simulate machines of so many ranks each."),
    click.option("--timeout", type=NumberParamType(positive=True),
                 help="End the run after SECONDS."),
    click.option("--grace-period", type=NumberParamType(positive=True), metavar="SECONDS",
                 default=30.0, show_default=True,
                 help="Time that ranks have to end by themselves after SIGTERM, as to save."),
    click.option("--timeline", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
                 help="Note in DIR/rank<r>.json what each rank does when; see asyncddp timeline "
                 "--help."),
    click.option("--timeline-filename", metavar="PREFIX",
                 help="The same, in files named <PREFIX><r>.json."),
    click.option("--tag-output", is_flag=True, help="Begin each line with the rank that wrote it."),
    click.option("--dry-run", is_flag=True, help="Print the command and do not run it."),
    click.option("--verbose", is_flag=True,
                 help="Show the command and all of the launcher's words."),
)
# fmt: on


def add_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Return a decorator that adds options to a click command, in the given order."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


placement_options = add_options(*_PLACEMENT_OPTIONS)
"""Adds the options for the number of ranks and their hosts to a click command."""
cluster_options = add_options(*_PLACEMENT_OPTIONS, *_PROGRAM_OPTIONS)
"""Adds the options for ranks that stay: placement, variables and launcher arguments."""
run_options = add_options(*_PLACEMENT_OPTIONS, *_LAUNCH_OPTIONS)
"""Adds all options of :class:`~asyncddp.launch.job_options.RunOptions` to a click command."""
