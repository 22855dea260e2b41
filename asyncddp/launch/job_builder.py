"""Builds a :class:`Job` from the options of ``asyncddp run`` and the environment variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from asyncddp.errors import ArgumentError
from asyncddp.launch.cpu_cores import cores
from asyncddp.launch.hosts import (
    Host,
    assign_slots,
    is_loopback,
    is_this_machine,
    parse_hostfile,
    parse_hosts,
)
from asyncddp.launch.job import Job
from asyncddp.launch.rank_command_line import build_rank_program
from asyncddp.launch.rank_environment import (
    forwarded_variables,
    launch_variables,
    parse_exports,
    rendezvous_variables,
    specifies_hosts,
)
from asyncddp.launch.run_options import RunOptions


def _hosts(options: RunOptions) -> tuple[Host, ...]:
    if options.hosts is not None and options.hostfile is not None:
        raise ArgumentError("-H and --hostfile: give one of them, not both.")
    hosts: tuple[Host, ...] = ()
    if options.hosts is not None:
        hosts = parse_hosts(options.hosts)
    elif options.hostfile is not None:
        hosts = parse_hostfile(options.hostfile)
    return assign_slots(hosts, options.num_proc)


def _oversubscribed(
    hosts: Sequence[Host], ranks: int, *, remote: bool, in_allocation: bool
) -> bool:
    """Return whether ranks exceed the slots or, on a single machine, the CPU cores."""
    if hosts and ranks > sum(host.slots or 0 for host in hosts):
        return True
    return ranks > cores() and not remote and not in_allocation


def build_job(
    options: RunOptions,
    program: Sequence[str],
    environment: Mapping[str, str],
    *,
    module: bool = False,
) -> Job:
    """Build the job to start from the user's options and the environment variables.

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
    alone = not remote and not specifies_hosts(environment, extra)
    added = rendezvous_variables({**environment, **exports}, hosts, remote=not alone)
    added |= launch_variables(environment, exports, None if remote else ranks, terminal=live)
    if remote:
        _check_interface(options.network_interface, hosts)
    over = options.oversubscribe
    if over is None:
        over = _oversubscribed(hosts, ranks, remote=remote, in_allocation=in_allocation)
    return Job(
        ranks=ranks,
        program=build_rank_program(program, module=module, here=not remote),
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
        forward=forwarded_variables({**environment, **added}, exports),
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
