"""Variables: which are set for the ranks, and which of them go to other machines."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence

from asyncddp.errors import ArgumentError
from asyncddp.launch.hosts import Host, is_this_machine
from asyncddp.launch.machine import threads_for

__all__ = ["additions", "forwarded", "meeting_place", "names_hosts", "parse_exports"]

_NEEDED = (
    "COLUMNS",
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "PATH",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "TTY_COMPATIBLE",
    "VIRTUAL_ENV",
)
_BATCH = {
    "COBALT_NODEFILE",
    "HYDRA_HOST_FILE",
    "I_MPI_HYDRA_HOST_FILE",
    "LSB_JOBID",
    "OAR_NODEFILE",
    "OMPI_MCA_orte_default_hostfile",
    "PBS_NODEFILE",
    "PE_HOSTFILE",
    "PRTE_MCA_prte_default_hostfile",
    "SLURM_JOB_ID",
}
"""Variables by which launchers learn of machines."""
_HOST_FLAGS = {
    f"{dashes}{name}"
    for dashes in ("-", "--")
    for name in (
        *("H", "add-host", "add-hostfile", "default-hostfile", "dvm", "f", "host", "hostfile"),
        *("hosts", "machinefile", "rankfile", "rf"),
    )
}
_PORTS = range(20000, 30000)  # below those that systems give to connections by themselves
_TRIES = 100
_OURS_AND_THE_WIRES = ("ASYNCDDP_", "FI_", "NCCL_", "UCX_")


def parse_exports(items: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Read the values of ``-x``: ``VAR`` takes its value from here, ``VAR=value`` brings it.

    Raises:
        ArgumentError: A name that no variable can have, or one that is not set.

    Example:
        >>> parse_exports(["HOME", "LR=0.1"], {"HOME": "/home/ada"})
        {'HOME': '/home/ada', 'LR': '0.1'}
    """
    found = {}
    for item in items:
        name, given, value = item.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ArgumentError(f"-x: expected VAR or VAR=value, got {item!r}.")
        if not given and name not in environment:
            raise ArgumentError(f"-x: {name} is not set here. Set it, or give -x {name}=value.")
        found[name] = value if given else environment[name]
    return found


def additions(
    environment: Mapping[str, str],
    exports: Mapping[str, str],
    ranks_here: int | None,
    *,
    terminal: bool,
) -> dict[str, str]:
    """What is set for the ranks on top of what this process has.

    Args:
        environment: What this process has.
        exports: What the user gave with ``-x``.
        ranks_here: Ranks on this machine if all are here; None where other machines take part,
            whose cores only they can count.
        terminal: Whether people see the ranks' output on a terminal. The ranks cannot know: Open
            MPI gives them one in any case, others never. ``TTY_COMPATIBLE`` is what rich reads.
    """
    added = {} if "TTY_COMPATIBLE" in environment else {"TTY_COMPATIBLE": str(int(terminal))}
    if terminal and "COLUMNS" not in environment:
        added["COLUMNS"] = str(shutil.get_terminal_size().columns)
    if ranks_here is not None and "OMP_NUM_THREADS" not in environment:
        added["OMP_NUM_THREADS"] = str(threads_for(ranks_here))
    return {**added, **exports}


def names_hosts(environment: Mapping[str, str], extra: Iterable[str]) -> bool:
    """Whether a batch system, a variable or an argument tells the launcher itself of machines.

    Args:
        environment: The variables that it reads.
        extra: The user's own arguments for it.

    Example:
        >>> names_hosts({"PBS_NODEFILE": "/var/nodes"}, []), names_hosts({}, ["--hostfile", "h"])
        (True, True)
    """
    return bool(_BATCH & environment.keys()) or any(
        word.partition("=")[0] in _HOST_FLAGS for word in extra
    )


def meeting_place(
    environment: Mapping[str, str], hosts: Sequence[Host], *, remote: bool
) -> dict[str, str]:
    """Where torch.distributed and libraries on it would meet: MASTER_ADDR and MASTER_PORT.

    Libraries that see the variables of an MPI launcher, as Hugging Face's accelerate does, take
    themselves for ranks and look for these.

    Args:
        environment: What the user has set, which stays.
        hosts: Of the run, rank 0 being on the first; empty for this machine or a batch system's.
        remote: Whether other machines take part.

    Returns:
        What is to be set on top: an address of rank 0's machine, and a port that is free there as
        far as that can be seen from here.
    """
    address = "127.0.0.1"
    if remote:
        address = hosts[0].name if hosts else _first_of_slurm(environment)
        address = socket.gethostname() if is_this_machine(Host(address)) else address
    wanted = {"MASTER_ADDR": address, "MASTER_PORT": str(_free_port())}
    return {name: value for name, value in wanted.items() if name not in environment}


def _first_of_slurm(environment: Mapping[str, str]) -> str:
    """The first host of an allocation: ``node07`` of ``node[07-12,15]``."""
    given = environment.get("SLURM_JOB_NODELIST", "")
    match = re.match(r"([^,\[]+)(?:\[([0-9]+)[^\]]*\]([^,]*))?", given)
    return "".join(part or "" for part in match.groups()) if match else socket.gethostname()


def _free_port() -> int:
    for port in random.sample(_PORTS, _TRIES):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port
    return _PORTS.start


def forwarded(environment: Mapping[str, str], exports: Iterable[str]) -> tuple[str, ...]:
    """Names of the variables that go to other machines, in alphabetical order.

    These are the user's ``-x``, ours, those by which the wires are tuned, and those by which a
    program finds its libraries; never the rest, which may hold secrets.

    Example:
        >>> forwarded({"PATH": "/bin", "AWS_SECRET": "x", "ASYNCDDP_CHECK": "1"}, ["LR"])
        ('ASYNCDDP_CHECK', 'LR', 'PATH')
    """
    names = {n for n in environment if n in _NEEDED or n.startswith(_OURS_AND_THE_WIRES)}
    return tuple(sorted(names | set(exports)))
