"""``asyncddp`` command group, which imports a subcommand only when it is called."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import click

import asyncddp
from asyncddp.errors import AsyncDDPError, UsageError
from asyncddp.registry import nearest

HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
_COMMANDS = {  # of which each is NAME_command in asyncddp.cli.NAME_command
    "compare": "Train by several methods on virtual ranks, before booking a cluster.",
    "doctor": "Show what this machine has, and what to install or change.",
    "notebook": "Start and stop the ranks that notebooks drive.",
    "report": "Show and draw what asyncddp.monitor has written.",
    "run": "Start a training script on several ranks.",
    "timeline": "Merge and read what ranks recorded.",
    "topology": "Compare the graphs over which ranks can talk.",
}


@contextlib.contextmanager
def click_errors() -> Iterator[None]:
    """Convert the library's errors in the ``with`` block to click errors."""
    try:
        yield
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    except AsyncDDPError as error:
        raise click.ClickException(str(error)) from error


class SuggestingCommandGroup(click.Group):
    """click command group that suggests the nearest name for an unknown command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the subcommand, or raise with the nearest name."""
        name = args[0]
        if name.startswith("-") or self.get_command(ctx, name) is not None:
            return super().resolve_command(ctx, args)
        hint = nearest(name, self.list_commands(ctx))
        if name.endswith(".py") and self.get_command(ctx, "run") is not None:
            hint = f" Did you mean '{ctx.command_path} run {name}'?"
        raise click.UsageError(f"No such command {name!r}.{hint}", ctx=ctx)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the subcommand and convert the library's errors to click errors."""
        with click_errors():
            return super().invoke(ctx)


class _LazyCommandGroup(SuggestingCommandGroup):
    """Command group that lists names and one-line help without importing the subcommands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        name = f"{cmd_name}_command"
        command: click.Command = getattr(importlib.import_module(f"asyncddp.cli.{name}"), name)
        command.short_help = _COMMANDS[cmd_name]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyCommandGroup, context_settings=HELP_OPTIONS)
@click.version_option(asyncddp.__version__, prog_name="asyncddp")
def main() -> None:
    """Train PyTorch models on many processes without a central average."""


def bfrun() -> None:
    """Run ``bfrun …``, BlueFog's name for ``asyncddp run …``."""
    arguments = sys.argv[1:]
    if arguments in (["-v"], ["--version"]):
        main(["--version"], prog_name="asyncddp")
    main(["run", *arguments], prog_name="bfrun")
