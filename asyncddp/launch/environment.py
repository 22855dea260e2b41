"""Variables: which are set for the ranks, and which of them go to other machines."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping

from asyncddp.errors import ArgumentError
from asyncddp.launch.machine import threads_for

__all__ = ["additions", "forwarded", "names_hosts", "parse_exports"]

_NEEDED = (
    "COLUMNS",
    "CONDA_PREFIX",
    "LD_LIBRARY_PATH",
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
