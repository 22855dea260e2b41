"""``asyncddp notebook`` and ``ibfrun``: start, stop and query clusters for notebooks."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from asyncddp.cli.main import HELP_OPTIONS, SuggestingCommandGroup
from asyncddp.cli.options import PORT_NUMBER, NumberParamType, add_options, cluster_options
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.notebook_cluster.cluster_spec import build_cluster_spec
from asyncddp.launch.notebook_cluster.profile_directory import ProfileDirectory
from asyncddp.launch.notebook_cluster.start_and_stop import (
    StartedCluster,
    start_cluster,
    stop_cluster,
)
from asyncddp.launch.rank_processes import signal_handler

_BLUEFOG = "bluefog"


@click.group("notebook", cls=SuggestingCommandGroup)
def notebook_command() -> None:
    """Start and stop the ranks that notebooks drive.

    A notebook connects by asyncddp.notebook.Cluster.connect(), and its cells that begin with %%px
    then run on all ranks.
    """


_profile = click.option(
    "--profile", default="asyncddp", show_default=True, help="IPython profile of the cluster."
)
_start_options = add_options(
    click.option(
        "--start-timeout", type=NumberParamType(positive=True), default=120.0, show_default=True,
        help="Seconds for the engines to answer.",
    ),
    click.option("--foreground", is_flag=True, help="Stay until Ctrl-C, which ends the cluster."),
)  # fmt: skip


@notebook_command.command("start")
@cluster_options
@_profile
@_start_options
def start_command(profile: str, start_timeout: float, foreground: bool, **given: Any) -> None:
    """Start a controller and one engine for each rank; come back when all of them answer."""
    stop = f"asyncddp notebook stop --profile {profile}"
    _start(RunOptions(**given), profile, start_timeout, foreground=foreground, stop=stop)


def _add_stop_and_status(group: click.Group, profile_option: Callable[[Any], Any]) -> None:
    @group.command("stop")
    @profile_option
    def stop_command(profile: str) -> None:
        """End the cluster; come back when nothing of it is left."""
        record = stop_cluster(ProfileDirectory.for_profile(profile))
        ended = f"the cluster has ended: {record}" if record else "no cluster runs"
        click.echo(f"profile {profile!r}: {ended}", err=True)

    @group.command("status")
    @profile_option
    def status_command(profile: str) -> None:
        """Say what runs; ends with 1 where nothing does."""
        record = ProfileDirectory.for_profile(profile).running_cluster()
        click.echo(f"profile {profile!r}: {record or 'no cluster runs'}")
        sys.exit(int(record is None))


_add_stop_and_status(notebook_command, _profile)


def _start(
    options: RunOptions, profile: str, timeout: float, *, foreground: bool, stop: str
) -> None:
    spec, profile_directory = build_cluster_spec(options), ProfileDirectory.for_profile(profile)
    with signal_handler(signal.default_int_handler), contextlib.ExitStack() as undo:
        try:
            cluster_process = start_cluster(spec, profile_directory, timeout=timeout)
            undo.callback(cluster_process.stop)
            _await_engines(cluster_process, timeout)
            name = "" if profile == "asyncddp" else f"profile={profile!r}"
            click.echo(
                f"{spec.ranks} ranks are ready. In a notebook: asyncddp.notebook.Cluster."
                f"connect({name}). To end them: {stop}",
                err=True,
            )
            if foreground:
                cluster_process.wait()
                cluster_process.ready(0.0)  # raises: it has ended of itself
        except KeyboardInterrupt:
            undo.close()
            click.echo("The cluster has ended.", err=True)
            sys.exit(0 if foreground else 128 + signal.SIGINT)
        cluster_process.release()
        undo.pop_all()


def _await_engines(cluster_process: StartedCluster, timeout: float) -> None:
    import ipyparallel
    from rich.console import Console

    with (
        ipyparallel.Client(str(cluster_process.profile_directory.client_file)) as client,
        Console(stderr=True).status("") as status,
    ):
        ranks = cluster_process.spec.ranks
        cluster_process.wait_for_engines(
            client, timeout, lambda count: status.update(f"{count} of {ranks} engines answer")
        )


@click.group("ibfrun", cls=SuggestingCommandGroup, context_settings=HELP_OPTIONS)
@click.version_option(None, "-v", "--version", package_name="asyncddp", prog_name="ibfrun")
def _ibfrun() -> None:
    """Start and stop the ranks that notebooks drive, in BlueFog's words."""


_ipython_profile = click.option(
    "--ipython-profile", "--profile", "profile", default=_BLUEFOG, show_default=True,
    help="IPython profile of the cluster.",
)  # fmt: skip


@_ibfrun.command("start")
@cluster_options
@click.option("-p", "bluefog_port", type=PORT_NUMBER, hidden=True, help="The same as --ssh-port.")
@click.option("-hostfile", "bluefog_hostfile", hidden=True, help="The same as --hostfile.")
@click.option("--use-infiniband", is_flag=True, hidden=True, help="MPI finds it by itself.")
@click.option("--enable-heartbeat", is_flag=True, hidden=True, help="Hearts always beat here.")
@click.option("--verbose", is_flag=True, help="Keep all of the launcher's words in the log.")
@_ipython_profile
@_start_options
def _ibfrun_start(profile: str, start_timeout: float, foreground: bool, **given: Any) -> None:
    """Start a controller and one engine for each rank; come back when all of them answer."""
    del given["use_infiniband"], given["enable_heartbeat"]
    port, hostfile = given.pop("bluefog_port"), given.pop("bluefog_hostfile")
    given["ssh_port"], given["hostfile"] = given["ssh_port"] or port, given["hostfile"] or hostfile
    stop = "ibfrun stop" if profile == _BLUEFOG else f"ibfrun stop --ipython-profile {profile}"
    _start(RunOptions(**given), profile, start_timeout, foreground=foreground, stop=stop)


_add_stop_and_status(_ibfrun, _ipython_profile)


def ibfrun() -> None:
    """Run ``ibfrun start|stop|status``, BlueFog's name for ``asyncddp notebook …``."""
    _ibfrun(prog_name="ibfrun")
