"""``asyncddp run``: starts a program on several ranks and returns its exit code."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from asyncddp.cli.console import open_standard_streams
from asyncddp.cli.options import run_options
from asyncddp.environments.rank_process_marker import environment_of_children
from asyncddp.errors import ArgumentError
from asyncddp.launch.diagnosis import Diagnosis, diagnose, group_by_failure, read_failure_reports
from asyncddp.launch.job_builder import build_job
from asyncddp.launch.job_options import Job, LaunchCommand, RunOptions
from asyncddp.launch.launcher_discovery import LOCAL_NAME, InstalledLauncher, find_launcher
from asyncddp.launch.launcher_message_filter import LauncherMessageFilter, WaitWarningAggregator
from asyncddp.launch.launcher_supervisor import REPORT_DIR, supervise
from asyncddp.launch.machine_limits import ensure_open_files
from asyncddp.launch.report_directory import check_folders, report_directory
from asyncddp.rank_list_text import list_ranks
from asyncddp.restrict_listening_sockets import confine_while_it_runs


@click.command("run", context_settings={"allow_interspersed_args": False})
@run_options
@click.option("-m", "module", is_flag=True, help="Run a module, as python -m does.")
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def run_command(program: tuple[str, ...], module: bool, **given: Any) -> None:
    """Start PROGRAM on several ranks, as in: asyncddp run -np 4 train.py --lr 0.1.

    What follows PROGRAM belongs to it. A .py file or a module (-m) is run by this Python; anything
    else is run as it is. Ranks read nothing from standard input. The exit code is that of the rank
    that failed first.

    With --elastic, a rank that dies or fails does not end the others: the run says so at once, and
    its exit code is 0 if at least --min ranks ended with 0. bf.init() is elastic then.
    """
    options = RunOptions(**given)
    if options.num_proc is None and {"-np", "--num-proc"} & {*program[1:]}:
        note = f"-np stands after {program[0]} and belongs to it; write it before"
        click.echo(f"asyncddp run: note: {note}", err=True)
    sys.exit(start(options, program, module=module))


def start(options: RunOptions, program: Sequence[str], *, module: bool = False) -> int:
    """Run a program on several ranks and return the exit code."""
    open_standard_streams()
    ensure_open_files(options.num_proc or 1)
    environment = environment_of_children()
    check_folders(environment)
    if options.ranks_per_machine is not None:
        environment["ASYNCDDP_RANKS_PER_MACHINE"] = str(options.ranks_per_machine)
    timeline = timeline_pattern(options)
    if timeline is not None:
        environment["ASYNCDDP_TIMELINE"] = timeline
    if options.elastic:
        environment["ASYNCDDP_ELASTIC"] = "1"
    found = find_launcher(LOCAL_NAME if options.elastic else options.launcher, environment)
    with report_directory() as reports:
        if not options.dry_run:
            environment[REPORT_DIR] = str(reports)
        if options.elastic:
            # by which ranks know that nobody ends them, and if one that is lost is replaced
            (reports / "elastic").write_text(str(options.restarts or 0))
        job = build_job(options, program, environment, module=module)
        command = _build_command(found, job)
        if options.dry_run or options.verbose:
            click.echo(_format_command(command, options), err=not options.dry_run)
        if options.dry_run:
            return 0
        # daemons on other machines or of the batch system must reach the launcher
        confine = job.alone and found.launcher.local
        started = confine_while_it_runs if confine else lambda process: None
        return _run_supervised(found, command, environment, reports, options, started)


def timeline_pattern(options: RunOptions) -> str | None:
    """Return the absolute file name pattern of the ranks' timelines; None if there is none."""
    if options.timeline is not None and options.timeline_filename is not None:
        raise ArgumentError("--timeline and --timeline-filename: give one of them, not both.")
    if options.timeline is not None:
        return str(options.timeline.absolute() / "rank{rank}.json")
    if options.timeline_filename is not None:
        return str(Path.cwd() / f"{options.timeline_filename}{{rank}}.json")
    return None


def _build_command(found: InstalledLauncher, job: Job) -> LaunchCommand:
    ipv6 = [str(host) for host in job.hosts if host.is_ipv6]
    if ipv6:
        raise ArgumentError(
            f"{', '.join(ipv6)}: {found.launcher.title} takes no IPv6 address as a host. Give it a "
            "name in /etc/hosts or DNS, and use that."
        )
    return found.launcher.build_command(found.executable, job)


def _format_command(command: LaunchCommand, options: RunOptions) -> str:
    """Format the command for a shell; hide values that ``-x`` takes from the environment."""
    named = {item for item in options.exports if "=" not in item}
    shown = [f"{n}={v}" for n, v in sorted(command.environment.items()) if n not in named]
    return shlex.join((*(("env", *shown) if shown else ()), *command.arguments))


def _run_supervised(
    found: InstalledLauncher,
    command: LaunchCommand,
    environment: Mapping[str, str],
    report_directory: Path,
    options: RunOptions,
    started: Callable[[int], None],
) -> int:
    output_patterns = found.launcher.output_patterns
    stdout = LauncherMessageFilter(output_patterns, pass_through=options.verbose)
    stderr = LauncherMessageFilter(
        output_patterns, pass_through=options.verbose, wait_warnings=WaitWarningAggregator()
    )
    beside = str(Path(found.executable).parent)
    path = f"{beside}{os.pathsep}{environment.get('PATH', '')}"  # Intel's mpirun looks there
    outcome = supervise(
        command.arguments,
        {**environment, **command.environment, "PATH": path},
        found.launcher,
        report_directory,
        (stdout if output_patterns.on_stdout else None, stderr),
        options,
        started,
    )
    launcher_lines = [*stderr.launcher_lines, *stdout.launcher_lines]
    said = "\n".join(launcher_lines)
    diagnosis = diagnose(outcome, found.launcher, said, report_directory, options)
    if diagnosis.lines and not stderr.at_line_start:
        click.echo(err=True)  # a rank's unfinished line, as of a progress bar
    if diagnosis.lines and not options.elastic:  # whose launcher shows each at once
        _show_tracebacks(report_directory)
    _print_diagnosis(diagnosis, () if options.verbose else launcher_lines)
    return diagnosis.code


def _show_tracebacks(report_directory: Path) -> None:
    groups = group_by_failure(read_failure_reports(report_directory))
    groups = [group for group in groups if group[0].traceback]
    groups = [group for group in groups if not group[0].is_consequence] or groups[:1]
    for group in groups:
        if len(groups) > 1:
            click.echo(f"[asyncddp] {list_ranks(report.rank for report in group)}:", err=True)
        click.echo(group[0].traceback, err=True, nl=False)


def _print_diagnosis(diagnosis: Diagnosis, launcher_lines: Sequence[str]) -> None:
    if not diagnosis.lines:
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    for number, line in enumerate(diagnosis.lines):
        console.print(Text(f"asyncddp run: {line}", style="dim" if number else "bold red"))
    if not diagnosis.explained:
        for line in launcher_lines:  # the launcher's messages are the best explanation then
            console.print(Text(line))
