"""Options of Bagua's launchers: common ones, renamed ones, and ones without effect."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click
from typing_extensions import override

from asyncddp.cli.main import HELP_OPTIONS, click_errors
from asyncddp.cli.options import PORT_NUMBER, IntegerParamType, add_options
from asyncddp.cli.run_command import start
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.rank import RANKS_PER_NODE

F = TypeVar("F", bound=Callable[..., Any])

CONTEXT = {"allow_interspersed_args": False, **HELP_OPTIONS}
_TUNING = "asyncddp.Autotune has such settings for DistributedOptimizer(autotune=...)"
_VARIABLES = {
    "autotune_level": "BAGUA_AUTOTUNE",
    "default_bucket_size": "BAGUA_DEFAULT_BUCKET_SIZE",
}
"""Variables for the ranks that options set, which torch_api reads."""
_INSTEAD = {
    "bagua_service_port": "there is no service process",
    "set_additional_flag": "scripts read LOCAL_RANK from the environment",
    "logdir": "asyncddp run --tag-output tells the ranks' lines apart",
    "autotune_max_samples": _TUNING,
    "autotune_sampling_confidence_time": _TUNING,
    "autotune_warmup_time": _TUNING,
    "is_output_autotune_log": _TUNING,
    "report_metrics": "asyncddp.monitor reports speed and consensus",
    "enable_bagua_net": "MPI's transports and ASYNCDDP_DEVICE_TRANSPORTS",
}
"""Replacements of options that have no effect."""
_FLAGS = {
    "set_additional_flag", "is_output_autotune_log", "report_metrics", "enable_bagua_net",
}  # fmt: skip

common_options = add_options(
    click.option("--nproc_per_node", type=IntegerParamType("number of ranks"), default=1,
                 show_default=True, help="Ranks on each node."),
    click.option("--master_port", type=PORT_NUMBER, help="MASTER_PORT for the ranks [a free one]."),
    click.option("-m", "--module", is_flag=True, help="Run a module, as python -m does."),
    click.option("--no_python", is_flag=True, help="Run the program as it is."),
    click.option("--dry_run", is_flag=True, help="Print the command and do not run it."),
    *(click.option(f"--{name}", type=IntegerParamType("number", least=0),
                   help=f"Sets {variable} for ranks.") for name, variable in _VARIABLES.items()),
    *(click.option(f"--{name}", is_flag=name in _FLAGS, default=False if name in _FLAGS else None,
                   help=f"Without effect: {instead}.") for name, instead in _INSTEAD.items()),
    click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED),
)  # fmt: skip
"""Adds the options that both launchers have, and the program with its arguments."""


class LauncherCommand(click.Command):
    """Click command that reports asyncddp's errors as click reports its own."""

    @override
    def invoke(self, ctx: click.Context) -> Any:
        with click_errors():
            return super().invoke(ctx)


def launch(
    command: str,
    nodes: int,
    given: Mapping[str, Any],
    *,
    exports: Sequence[str] = (),
    **placement: Any,
) -> None:
    """Run the program with ``asyncddp run``, by Bagua's options, and exit with its exit code.

    Args:
        command: Name of the launcher, for messages.
        nodes: Number of nodes.
        given: The values of :data:`common_options`.
        exports: Variables for the ranks, as ``-x`` takes them.
        placement: Further fields of :class:`~asyncddp.launch.job_options.RunOptions`.
    """
    _warn(command, [name for name in _INSTEAD if given[name] not in (None, False, "0")])
    each = given["nproc_per_node"]
    named = {item.partition("=")[0] for item in exports}
    added = [f"{RANKS_PER_NODE}={each}"]
    for name, variable in _VARIABLES.items():
        if given[name] is not None and variable not in named:
            added.append(f"{variable}={given[name]}")
    if given["master_port"] is not None and "MASTER_PORT" not in named:
        added.append(f"MASTER_PORT={given['master_port']}")
    program = given["program"]
    if given["no_python"] and program[0].endswith((".py", ".pyc")):
        program = ("env", program[0], *program[1:])  # else Python would run it
    placement |= {"num_proc": nodes * each, "exports": (*exports, *added)}
    options = RunOptions(dry_run=given["dry_run"], **placement)
    sys.exit(start(options, program, module=given["module"]))


def _warn(command: str, without_effect: Sequence[str]) -> None:
    options: dict[str, list[str]] = {}
    for name in without_effect:
        options.setdefault(_INSTEAD[name], []).append(f"--{name}")
    if options:
        words = "; ".join(f"{', '.join(names)}: {instead}" for instead, names in options.items())
        click.echo(f"{command}: without effect here: {words}.", err=True)
