"""The program that each rank runs: a script, a module, or any other program."""

import sys

import pytest

from asyncddp.errors import ArgumentError
from asyncddp.launch.job_builder import build_job, build_rank_program
from asyncddp.launch.job_options import RunOptions
from asyncddp.launch.launchers import LAUNCHERS

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


@pytest.mark.parametrize(
    ("launcher", "flag"),
    [("open_mpi_4", "-x {}"), ("open_mpi_5", "-x {}"), ("mpich", ",{}"), ("intel_mpi", ",{}")],
)
def test_variables_of_cuda_nccl_and_torch_are_on_the_command_line_of_a_remote_run(launcher, flag):
    """Each launcher is told to forward them, and not which GPUs are visible on this machine."""
    environment = {
        "ASYNCDDP_TIMEOUT": "9",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "NCCL_DEBUG": "INFO",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    job = build_job(RunOptions(hosts="far1:1,far2:1"), ["./solver"], environment)
    words = " ".join(LAUNCHERS[launcher].build_command("mpirun", job).arguments)
    for name in environment.keys() - {"CUDA_VISIBLE_DEVICES"}:
        assert flag.format(name) in words.replace("-genvlist ", ","), name
    assert "CUDA_VISIBLE_DEVICES" not in words
