"""``asyncddp run``: from options to a running job and its exit code."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from asyncddp.errors import ArgumentError
from asyncddp.launch.environment import (
    additions,
    forwarded,
    meeting_place,
    names_hosts,
    parse_exports,
)
from asyncddp.launch.hosts import (
    Host,
    is_loopback,
    is_this_machine,
    parse_hostfile,
    parse_hosts,
    share_out,
)
from asyncddp.launch.job import Command, Job
from asyncddp.launch.locate import Found, locate
from asyncddp.launch.machine import cores
from asyncddp.launch.options import RunOptions, run_options
from asyncddp.launch.program import program_for
from asyncddp.launch.sieve import Sieve
from asyncddp.launch.supervise import supervise
from asyncddp.launch.verdict import Verdict, alike, judge, read_reports
from asyncddp.launch.waits import Waits
from asyncddp.listening import confine_while_it_runs
from asyncddp.rank_lists import list_ranks

__all__ = ["job_for", "run_command", "start"]

_REPORT_DIR = "ASYNCDDP_REPORT_DIR"


@click.command(
    "run",
    short_help="Start a training script on several ranks.",
    context_settings={"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]},
)
@run_options
@click.option("-m", "module", is_flag=True, help="Run a module, as python -m does.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(program: tuple[str, ...], module: bool, **given: Any) -> None:
    """Start PROGRAM on several ranks, as in: asyncddp run -np 4 train.py --lr 0.1.

    What follows PROGRAM belongs to it. A .py file or a module (-m) is run by this Python; anything
    else is run as it is. Ranks read nothing from standard input. The exit code is that of the rank
    that failed first.
    """
    sys.exit(start(RunOptions(**given), program, module=module))


def start(options: RunOptions, program: Sequence[str], *, module: bool = False) -> int:
    """Run a program on several ranks and give the exit code.

    Raises:
        ArgumentError: An option has a value that cannot be served.
        EnvironmentProblem: There is no MPI launcher, or none that is known.
    """
    environment = dict(os.environ)
    if options.ranks_per_machine is not None:
        environment["ASYNCDDP_RANKS_PER_MACHINE"] = str(options.ranks_per_machine)
    timeline = timeline_of(options)
    if timeline is not None:
        environment["ASYNCDDP_TIMELINE"] = timeline
    found = locate(options.launcher, environment)
    with tempfile.TemporaryDirectory(prefix="asyncddp-", ignore_cleanup_errors=True) as folder:
        if not options.dry_run:
            environment[_REPORT_DIR] = folder
        job = job_for(options, program, environment, module=module)
        command = _command(found, job)
        if options.dry_run or options.verbose:
            click.echo(_shown(command, options), err=not options.dry_run)
        if options.dry_run:
            return 0
        started = confine_while_it_runs if job.alone and found.launcher.local else _leave_alone
        return _run(found, command, environment, folder, options, started)


def _leave_alone(process: int) -> None:
    """Daemons on other machines, or those of the batch system, must reach the launcher."""


def timeline_of(options: RunOptions) -> str | None:
    """Where the ranks' timelines go; absolute, since programs may go to other folders.

    Raises:
        ArgumentError: A folder and a prefix are given.
    """
    if options.timeline is not None and options.timeline_filename is not None:
        raise ArgumentError("--timeline and --timeline-filename: give one of them, not both.")
    if options.timeline is not None:
        return str(options.timeline.absolute() / "rank{rank}.json")
    if options.timeline_filename is not None:
        return str(Path.cwd() / f"{options.timeline_filename}{{rank}}.json")
    return None


def _hosts(options: RunOptions) -> tuple[Host, ...]:
    if options.hosts is not None and options.hostfile is not None:
        raise ArgumentError("-H and --hostfile: give one of them, not both.")
    hosts: tuple[Host, ...] = ()
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = parse_hostfile(options.hostfile)
    return share_out(hosts, options.num_proc)


def _oversubscribed(
    hosts: Sequence[Host], ranks: int, *, remote: bool, in_allocation: bool
) -> bool:
    """Whether there are more ranks than slots or, where all are here, than cores."""
    if hosts and ranks > sum(host.slots or 0 for host in hosts):
        return True
    return ranks > cores() and not remote and not in_allocation


def job_for(
    options: RunOptions,
    program: Sequence[str],
    environment: Mapping[str, str],
    *,
    module: bool = False,
) -> Job:
    """What is to be started, from what the user gave and the environment.

    Raises:
        ArgumentError: An option has a value that cannot be served.
    """
    hosts = _hosts(options)
    in_allocation = "SLURM_JOB_ID" in environment and not hosts
    remote = in_allocation or not all(is_this_machine(host) for host in hosts)
    ranks = options.num_proc or sum(host.slots or 0 for host in hosts)
    ranks = ranks or int(environment.get("SLURM_NTASKS", "1") if in_allocation else 1)
    exports = parse_exports(options.exports, environment)
    live = os.isatty(1) or os.isatty(2)
    ours = {n: v for n, v in environment.items() if n.startswith("ASYNCDDP_")}
    extra = tuple(word for text in options.mpi_args for word in _split(text))
    alone = not remote and not names_hosts(environment, extra)
    added = meeting_place({**environment, **exports}, hosts, remote=not alone)
    added |= additions(environment, exports, None if remote else ranks, terminal=live)
    if remote:
        _check_interface(options.network_interface, hosts)
    over = options.oversubscribe
    if over is None:
        over = _oversubscribed(hosts, ranks, remote=remote, in_allocation=in_allocation)
    return Job(
        ranks=ranks,
        program=program_for(program, module=module, here=not remote),
        hosts=hosts,
        remote=remote,
        alone=alone,
        interface=options.network_interface,
        ssh_port=options.ssh_port,
        remote_shell=options.remote_shell,
        bind_to=options.bind_to,
        oversubscribe=over,
        tag_output=options.tag_output,
        live=live,
        extra=extra,
        set_environment={**ours, **added},
        forward=forwarded({**environment, **added}, exports),
        environment=environment,
        root=hasattr(os, "geteuid") and os.geteuid() == 0,
    )


def _check_interface(interface: str | None, hosts: Sequence[Host]) -> None:
    if interface is not None and is_loopback(interface):
        away = ", ".join(str(host) for host in hosts if not is_this_machine(host))
        raise ArgumentError(
            f"--network-interface: {interface!r} reaches this machine alone, but the ranks run on "
            f"{away or 'the machines that the batch system chooses'}. Name an interface or a "
            "network between the machines, or leave -H and --hostfile out."
        )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ArgumentError(f"--mpi-args: {error} in {text!r}.") from error


def _command(found: Found, job: Job) -> Command:
    launcher = found.launcher
    six = [str(host) for host in job.hosts if host.is_ipv6]
    if six and not launcher.ipv6_hosts:
        raise ArgumentError(
            f"{', '.join(six)}: {launcher.title} takes no IPv6 address as a host. Give it a name "
            "in /etc/hosts or DNS, and use that."
        )
    return launcher.command(found.executable, job)


def _shown(command: Command, options: RunOptions) -> str:
    """The command for a shell; a variable given by -x without a value is not shown with one."""
    named = {item for item in options.exports if "=" not in item}
    shown = [f"{n}={v}" for n, v in sorted(command.environment.items()) if n not in named]
    return shlex.join((*(("env", *shown) if shown else ()), *command.arguments))


def _run(
    found: Found,
    command: Command,
    environment: Mapping[str, str],
    folder: str,
    options: RunOptions,
    started: Callable[[int], None],
) -> int:
    noise = found.launcher.noise
    stderr = Sieve(noise, keep=options.verbose, waits=Waits())
    stdout = Sieve(noise, keep=options.verbose) if noise.on_stdout else None
    beside = str(Path(found.executable).parent)
    path = f"{beside}{os.pathsep}{environment.get('PATH', '')}"  # Intel's mpirun looks there
    ending = supervise(
        command.arguments,
        {**environment, **command.environment, "PATH": path},
        reports=(_REPORT_DIR, Path(folder)),
        sieves=(stdout, stderr),
        timeout=options.timeout,
        started=started,
    )
    notes = [*stderr.notes, *(stdout.notes if stdout is not None else ())]
    verdict = judge(ending, found.launcher, "\n".join(notes), Path(folder), options.timeout)
    if verdict.lines and not stderr.at_start:
        click.echo(err=True)  # a rank's unfinished line, as of a progress bar
    if verdict.lines:
        _show_tracebacks(Path(folder))
    _tell(verdict, () if options.verbose else notes)
    return verdict.code


def _show_tracebacks(folder: Path) -> None:
    """The traceback of each cause once, however many ranks have reported it."""
    groups = [group for group in alike(read_reports(folder)) if group[0].traceback]
    groups = [group for group in groups if not group[0].is_consequence] or groups[:1]
    for group in groups:
        if len(groups) > 1:
            click.echo(f"[asyncddp] {list_ranks(report.rank for report in group)}:", err=True)
        click.echo(group[0].traceback, err=True, nl=False)


def _tell(verdict: Verdict, notes: Sequence[str]) -> None:
    if not verdict.lines:
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    if not verdict.explained:
        for line in notes:  # then the launcher's own words are the best there are
            console.print(Text(line))
    for number, line in enumerate(verdict.lines):
        console.print(Text(f"asyncddp run: {line}", style="dim" if number else "bold red"))
