"""Choice of the environment variables to set for ranks, and to forward to other machines."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import socket
from collections.abc import Iterable, Mapping, Sequence

from asyncddp.environments.launchers import SlurmEnvironment
from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.launch.hosts import Host, is_this_machine
from asyncddp.launch.machine_limits import threads_per_rank

_NEEDED = (
    *("COLUMNS", "CONDA_PREFIX", "LD_LIBRARY_PATH", "MASTER_ADDR", "MASTER_PORT"),
    *("OMP_NUM_THREADS", "PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "TTY_COMPATIBLE"),
    "VIRTUAL_ENV",
)
_BATCH = {  # from which launchers read their hosts
    *("COBALT_NODEFILE", "HYDRA_HOST_FILE", "I_MPI_HYDRA_HOST_FILE", "LSB_JOBID", "OAR_NODEFILE"),
    *("OMPI_MCA_orte_default_hostfile", "PBS_NODEFILE", "PE_HOSTFILE", "SLURM_JOB_ID"),
    "PRTE_MCA_prte_default_hostfile",
}
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
_LIBRARY_PREFIXES = ("ASYNCDDP_", "CUDA_", "FI_", "NCCL_", "PYTORCH_", "UCX_")


def parse_exports(items: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Parse the values of ``-x``: ``VAR`` (value taken from this environment) or ``VAR=value``."""
    found = {}
    for item in items:
        name, given, value = item.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ArgumentError(f"-x: expected VAR or VAR=value, got {item!r}.")
        if not given and name not in environment:
            raise ArgumentError(f"-x: {name} is not set here. Set it, or give -x {name}=value.")
        found[name] = value if given else environment[name]
    return found


def launch_variables(
    environment: Mapping[str, str],
    exports: Mapping[str, str],
    ranks_here: int | None,
    *,
    terminal: bool,
) -> dict[str, str]:
    """Return the variables to set for ranks on top of this process's environment.

    ``ranks_here`` is None where other machines count their own cores. Ranks cannot know whether
    output is shown on a ``terminal``, as a launcher stands between; rich reads ``TTY_COMPATIBLE``.
    """
    added = {} if "TTY_COMPATIBLE" in environment else {"TTY_COMPATIBLE": str(int(terminal))}
    if terminal and "COLUMNS" not in environment:
        added["COLUMNS"] = str(shutil.get_terminal_size().columns)
    if ranks_here is not None and "OMP_NUM_THREADS" not in environment:
        added["OMP_NUM_THREADS"] = str(threads_per_rank(ranks_here))
    return {**added, **exports}


def specifies_hosts(environment: Mapping[str, str], extra: Iterable[str]) -> bool:
    """Return whether a batch system, a variable or an argument gives hosts to the launcher.

    Example:
        >>> specifies_hosts({}, ["--hostfile", "h"])
        True
    """
    return bool(_BATCH & environment.keys()) or any(
        word.partition("=")[0] in _HOST_FLAGS for word in extra
    )


def rendezvous_variables(
    environment: Mapping[str, str], hosts: Sequence[Host], *, remote: bool
) -> dict[str, str]:
    """Return MASTER_ADDR and MASTER_PORT for torch.distributed, unless they are set.

    Libraries such as Hugging Face's accelerate read them where they see the variables of an MPI
    launcher. The address is the first host's; the port is free as far as this machine can tell.
    """
    address = "" if remote else loopback_address()
    if remote:
        address = hosts[0].name if hosts else SlurmEnvironment(environment).address
        address = socket.gethostname() if is_this_machine(Host(address)) else address
    wanted = {"MASTER_ADDR": address, "MASTER_PORT": str(_free_port())}
    return {name: value for name, value in wanted.items() if name not in environment}


def loopback_address() -> str:
    """Return this machine's own address: ``127.0.0.1``, or ``::1`` where there is no IPv4.

    Raises:
        EnvironmentProblem: It has neither, as where the loopback interface is down.
    """
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing; fails where there is no way to it
            return address
    raise EnvironmentProblem(
        "this machine has no loopback address (127.0.0.1 or ::1), by which its ranks meet: "
        "ip link set lo up"
    )


def _free_port() -> int:
    for port in random.sample(_PORTS, _TRIES):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("", port))
            return port
    return _PORTS.start


def forwarded_variables(environment: Mapping[str, str], exports: Iterable[str]) -> tuple[str, ...]:
    """Return names of variables to forward to other machines; the rest may hold secrets."""
    names = {n for n in environment if n in _NEEDED or n.startswith(_LIBRARY_PREFIXES)}
    kept = {"CUDA_VISIBLE_DEVICES", "ASYNCDDP_SECRET"}  # of each task under Slurm; not for MPI
    return tuple(sorted(names - kept | set(exports)))
