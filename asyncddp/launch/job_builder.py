"""Builder of a :class:`Job` from the options of ``asyncddp run`` and the environment variables."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from asyncddp.errors import ArgumentError
from asyncddp.launch.hosts import Host, is_loopback, is_this_machine, parse_placement
from asyncddp.launch.job_options import Job, RunOptions
from asyncddp.launch.launcher_discovery import LOCAL_NAME
from asyncddp.launch.machine_limits import cores
from asyncddp.launch.rank import RUNNER
from asyncddp.launch.rank_environment import (
    forwarded_variables,
    launch_variables,
    parse_exports,
    rendezvous_variables,
    specifies_hosts,
)


def build_job(
    options: RunOptions,
    program: Sequence[str],
    environment: Mapping[str, str],
    *,
    module: bool = False,
) -> Job:
    """Build the job to start from the user's options and the environment variables."""
    hosts = parse_placement(options.hosts, options.hostfile, options.num_proc)
    in_allocation = "SLURM_JOB_ID" in environment and not hosts
    remote = in_allocation or not all(is_this_machine(host) for host in hosts)
    slots = sum(host.slots or 0 for host in hosts)
    ranks = options.num_proc or slots
    ranks = ranks or int(environment.get("SLURM_NTASKS", "1") if in_allocation else 1)
    exports = parse_exports(options.exports, environment)
    words = build_rank_program(program, module=module, here=not remote)
    least = _least_ranks(options, ranks, words)
    if least is not None:
        _check_elastic(options, {**environment, **exports}, hosts, ranks, remote=remote)
    live = os.isatty(1) or os.isatty(2)
    ours = {n: v for n, v in environment.items() if n.startswith("ASYNCDDP_")}
    extra = tuple(word for text in options.mpi_args for word in _split(text))
    alone = not remote and not specifies_hosts(environment, extra)
    added = rendezvous_variables({**environment, **exports}, hosts, remote=not alone)
    added |= launch_variables(environment, exports, None if remote else ranks, terminal=live)
    interface = options.network_interface
    if remote and interface is not None and is_loopback(interface):
        away = ", ".join(str(host) for host in hosts if not is_this_machine(host))
        raise ArgumentError(
            f"--network-interface: {interface!r} reaches this machine alone, but the ranks run on "
            f"{away or 'the machines that the batch system chooses'}. Name an interface or a "
            "network between the machines, or leave -H and --hostfile out."
        )
    over = options.oversubscribe
    if over is None:
        over = bool(hosts and ranks > slots) or (not remote and ranks > cores())
    return Job(
        ranks, words,
        hosts=hosts, remote=remote, alone=alone, interface=interface,
        ssh_port=options.ssh_port, remote_shell=options.remote_shell, extra=extra,
        bind_to=options.bind_to, oversubscribe=over, tag_output=options.tag_output, live=live,
        environment=environment, set_environment={**ours, **added},
        forward=forwarded_variables({**environment, **added}, exports),
        root=os.geteuid() == 0, min_ranks=least, restarts=options.restarts, spares=options.spares,
    )  # fmt: skip


def _least_ranks(options: RunOptions, ranks: int, program: Sequence[str]) -> int | None:
    """Return how many ranks an elastic run needs; None for a run that ends with its first rank."""
    if not options.elastic:
        restarts, spares = options.restarts or None, options.spares or None
        given = {"--min": options.min_ranks, "--restarts": restarts, "--spares": spares}
        for flag, value in given.items():
            if value is not None:
                raise ArgumentError(
                    f"{flag}: expected beside --elastic, got {flag} {value} alone. Add --elastic, "
                    f"or leave {flag} out."
                )
        return None
    if options.spares > options.restarts:
        raise ArgumentError(
            f"--spares: expected at most --restarts, {options.restarts}, which says how many ranks "
            f"are replaced, got {options.spares}. Give --restarts {options.spares}."
        )
    if options.spares and tuple(program[1:3]) != RUNNER:
        raise ArgumentError(
            f"--spares: expected a Python script, which imports torch, got {program[0]!r}. Leave "
            "--spares out."
        )
    least = 1 if options.min_ranks is None else options.min_ranks
    if least > ranks:
        raise ArgumentError(
            f"--min: expected at most the number of ranks, {ranks}, got {least}. Give a smaller "
            "number, or start more ranks by -np."
        )
    return least


def _check_elastic(
    options: RunOptions,
    environment: Mapping[str, str],
    hosts: Sequence[Host],
    ranks: int,
    *,
    remote: bool,
) -> None:
    """Raise if a run cannot be elastic: only the library's own launcher goes on after a death."""
    others = "launchers of MPI end all ranks where one dies"
    if options.launcher not in (None, LOCAL_NAME):
        raise ArgumentError(
            f"--launcher: expected {LOCAL_NAME!r} beside --elastic, got {options.launcher!r}: "
            f"{others}. Leave --launcher out."
        )
    transport = environment.get("ASYNCDDP_TRANSPORT", "c10d")
    if transport != "c10d":
        raise ArgumentError(
            f"ASYNCDDP_TRANSPORT: expected 'c10d' beside --elastic, got {transport!r}, between "
            "whose ranks one that dies ends all. Unset it."
        )
    if remote:
        got = f"-H {','.join(map(str, hosts))}" if hosts else "an allocation of Slurm"
        raise ArgumentError(
            f"-H: expected hosts that are this machine beside --elastic, got {got}. Ranks on other "
            f"machines are started by MPI, and {others}. Give -H localhost:{ranks}, or leave "
            "--elastic out."
        )


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ArgumentError(f"--mpi-args: {error} in {text!r}.") from error


def build_rank_program(words: Sequence[str], *, module: bool, here: bool = True) -> tuple[str, ...]:
    """Return the command line of every rank; if ``here``, check that the program exists.

    Python goes through :mod:`asyncddp.launch.rank`.
    """
    if module:
        return (sys.executable, *RUNNER, "-m", *words)
    words = _without_python(words)
    first = words[0]
    if first == "-m" or first.endswith((".py", ".pyc")):
        if first != "-m" and here and not Path(first).is_file():
            raise ArgumentError(f"no such script: {first!r} (looked in {Path.cwd()}).")
        return (sys.executable, *RUNNER, *words)
    if here and shutil.which(first) is None:
        raise ArgumentError(
            f"no such program: {first!r}. A Python script ends in .py; a module is run by "
            f"'asyncddp run -m {first}'; a program must be on PATH or given with its path."
        )
    return tuple(words)


def _without_python(words: Sequence[str]) -> Sequence[str]:
    """Drop a leading ``python`` that is this interpreter: ranks run ``train.py`` themselves."""
    if len(words) < 2 or not re.fullmatch(r"python[\d.]*", Path(words[0]).name):
        return words
    named = shutil.which(words[0])
    if named is None or Path(named).parent != Path(sys.executable).parent:
        return words
    rest = words[2:] if words[1] == "-u" else words[1:]
    takes = bool(rest) and (rest[0].endswith(".py") or (rest[0] == "-m" and len(rest) > 1))
    return rest if takes else words
