"""The environment of the scripts: made once, redone when interrupted, never silent on failure."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

# A Python that can say its version, make an environment (a copy of itself) and pretend to be pip.
PYTHON = """
case "$1 $2" in
    "-c "*version_info*) echo "${FAKE_VERSION:-3.11.2} /usr" ;;
    "-c "*ensurepip*) [[ -z ${FAKE_NO_ENSUREPIP:-} ]] ;;
    "-c "*mpi4py*) [[ -z ${FAKE_NO_LIBMPI:-} ]] ;;
    "-c "*find_spec*) echo "${FAKE_TRITON:-}" ;;
    "-c "*json*) cat >/dev/null && echo "${FAKE_SIZE:-without CUDA: 200 MB}" ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
    "-m pip")
        [[ $3 != index ]] || { echo "Available versions: ${FAKE_OFFERS:-9.9, 9.8}" && exit; }
        echo "pip says hello"
        [[ -z ${FAKE_PIP_SLEEP:-} ]] || sleep "$FAKE_PIP_SLEEP"
        [[ -z ${FAKE_PIP_FAILS:-} ]] || { echo "ERROR: no such wheel" && exit 7; } ;;
    "- "*) shift && echo "${FAKE_MISSING:-}" ;;
esac
"""
PROBE = """#!/usr/bin/env bash
set -euo pipefail
. "$(dirname -- "${BASH_SOURCE[0]}")/lib/environment.sh"
prepare_environment "$1"
echo "ready: $VIRTUAL_ENV ${PATH%%:*}"
"""


@pytest.fixture
def clone(machine):
    """A clone with a space in its name, and a script that only prepares the environment."""
    path = machine.root / "a clone"
    shutil.copytree(REPO / "scripts" / "lib", path / "scripts" / "lib")
    shutil.copy(REPO / "pyproject.toml", path)
    (path / "scripts" / "probe").write_text(PROBE)
    machine.install("python3", PYTHON)
    return path


@pytest.fixture
def probe(machine, clone):
    def run(profile="dev", **environ):
        machine.log.unlink(missing_ok=True)
        return machine.run(clone / "scripts" / "probe", profile, **environ)

    return run


def installs(machine):
    """What pip was told to install; not what it was asked about, and not itself."""
    calls = [call for call in machine.calls() if "[-m] [pip] [install]" in call]
    return [call for call in calls if "[--dry-run]" not in call and "[pip]" not in call[-5:]]


def creations(machine):
    return [call for call in machine.calls() if "[-m] [venv]" in call]


def test_first_run_creates_and_installs_and_says_so(machine, clone, probe):
    """The first run makes .venv, installs torch, then the clone with its extras: a line each."""
    done = probe()
    assert done.returncode == 0, done.stderr
    venv = clone / ".venv"
    assert done.stdout == f"ready: {venv} {venv}/bin\n"
    first, second = installs(machine)
    assert first.endswith("[off] [torch]")
    assert second.endswith(f"[off] [torch] [--editable] [{clone}[dev,openmpi]]")
    lines = done.stderr.splitlines()
    assert [line.split(" … ")[0] for line in lines] == [
        "creating .venv with Python 3.11.2",
        "installing torch, without CUDA: 200 MB",
        "installing asyncddp with dev,openmpi",
    ]
    assert "pip says hello" in (venv / ".asyncddp" / "install.log").read_text()


def test_second_run_installs_nothing_and_is_silent(machine, probe):
    """The stamp of the first run makes the second one install nothing and print nothing."""
    assert probe().returncode == 0
    done = probe()
    assert done.returncode == 0
    assert done.stderr == ""
    assert not installs(machine)
    assert not creations(machine)


@pytest.mark.parametrize("profile", ["docs", "examples"])
def test_dev_serves_docs_and_examples_but_not_the_reverse(machine, probe, profile):
    """The tests' environment serves them all; that of one of them is completed for tests."""
    assert probe(profile).returncode == 0
    assert probe("dev").returncode == 0
    assert len(installs(machine)) == 2
    assert not creations(machine)
    assert probe(profile).returncode == 0
    assert not installs(machine)


def test_the_site_needs_no_more_than_the_extra_docs(machine, clone):
    """scripts/docs installs that extra alone; scripts/check runs the doctests."""
    shutil.copy(REPO / "scripts" / "docs", clone / "scripts")
    done = machine.run(clone / "scripts" / "docs")
    assert done.returncode == 0, done.stderr
    assert installs(machine)[-1].endswith(f"[--editable] [{clone}[docs,openmpi]]")
    assert not [call for call in machine.calls() if "[pytest]" in call]
    assert "[-m] [sphinx]" in machine.calls()[-1]


def test_a_changed_pyproject_installs_again_into_the_same_environment(machine, clone, probe):
    """The stamp is keyed by pyproject.toml: new requirements are installed, nothing is created."""
    assert probe().returncode == 0
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert probe().returncode == 0
    assert len(installs(machine)) == 2
    assert not creations(machine)


def test_a_moved_clone_gets_a_new_environment(machine, clone, probe):
    """Scripts of an environment name its old path, so a moved clone makes its own anew."""
    assert probe().returncode == 0
    moved = clone.rename(clone.with_name("moved"))
    machine.log.unlink()
    done = machine.run(moved / "scripts" / "probe", "dev")
    assert done.returncode == 0, done.stderr
    assert creations(machine)
    assert str(moved / ".venv") in creations(machine)[0]


def test_another_python_makes_a_new_environment(machine, probe):
    """PYTHON=… of another version replaces the environment; the same one again keeps it."""
    assert probe().returncode == 0
    other = machine.install("python9", PYTHON.replace("3.11.2", "3.12.7"))
    done = probe(PYTHON=str(other))
    assert done.returncode == 0, done.stderr
    assert "creating .venv with Python 3.12.7" in done.stderr
    assert probe(PYTHON=str(other)).stderr == ""
    assert probe().stderr == "", "without PYTHON the environment that is there is kept"


def test_mpirun_on_path_spares_the_openmpi_extra(machine, clone, probe):
    """Where an mpirun is on PATH no Open MPI is installed; the environment's own does not count."""
    machine.install("mpirun", "")
    assert probe().returncode == 0
    assert installs(machine)[-1].endswith(f"[{clone}[dev]]")
    (machine.bin / "mpirun").unlink()
    own = clone / ".venv" / "bin" / "mpirun"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    done = probe(PATH=f"{own.parent}:{machine.bin}")
    assert done.returncode == 0, done.stderr
    assert installs(machine)[-1].endswith(f"[{clone}[dev,openmpi]]")


def test_an_mpirun_without_a_library_still_brings_openmpi(machine, clone, probe):
    """An mpirun of some other environment is no MPI for mpi4py: Open MPI is installed after all."""
    machine.install("mpirun", "")
    done = probe(FAKE_NO_LIBMPI="1")
    assert done.returncode == 0, done.stderr
    assert f"installing Open MPI, for the library of {machine.bin}/mpirun cannot be" in done.stderr
    assert installs(machine)[-1].endswith(f"[{clone}[dev,openmpi]]")
    assert probe(FAKE_NO_LIBMPI="1").stderr == ""


def test_without_a_gpu_a_build_without_cuda_is_taken_where_pip_is_offered_one(
    machine, probe, has_gpu
):
    """The newest "+cpu" that pip's configuration offers; with a GPU, what the publisher ships."""
    offers = {"FAKE_OFFERS": "9.9, 9.8+cpu, 9.8, 9.7+cpu"}
    assert probe(**offers).returncode == 0
    chosen = "[torch]" if has_gpu else "[torch==9.8+cpu]"
    assert installs(machine)[0].endswith(f"[off] {chosen}")
    machine.install("nvidia-smi", "")
    assert probe(**offers).returncode == 0
    assert installs(machine)[0].endswith("[off] [torch]"), "the GPU has come: the stamp is old"
    assert probe(ASYNCDDP_TORCH="torch==9.7", **offers).returncode == 0
    assert installs(machine)[0].endswith("[off] [torch==9.7]")


def test_the_index_of_torch_can_be_given_and_serves_for_torch_alone(machine, probe):
    """ASYNCDDP_TORCH_INDEX is where torch comes from, and what its size is asked of."""
    done = probe(ASYNCDDP_TORCH_INDEX="file:///builds")
    assert done.returncode == 0, done.stderr
    asked = [call for call in machine.calls() if "[--dry-run]" in call]
    assert len(asked) == 1
    assert asked[0].endswith("[--report] [-] [--index-url] [file:///builds] [torch]")
    first, second = installs(machine)
    assert first.endswith("[--index-url] [file:///builds] [torch]")
    assert "builds" not in second
    assert probe(ASYNCDDP_TORCH_INDEX="file:///others").returncode == 0
    assert len(installs(machine)) == 2, "another index installs again"


def test_both_packages_of_lightning_come_in_the_version_that_is_given(machine, probe):
    """With a setuptools that old ones can use; a version that is given later installs again."""
    assert probe().returncode == 0
    assert probe(ASYNCDDP_LIGHTNING="2.2.0").returncode == 0
    first, second = installs(machine)
    assert first.endswith("[off] [torch]")
    words = "[lightning==2.2.0] [pytorch-lightning==2.2.0] [setuptools<82] [--editable]"
    assert f"[off] [torch] {words}" in second


def test_what_is_large_is_said_before_it_is_downloaded(machine, probe, has_gpu):
    """With CUDA: how much, and what to do against it where there is no GPU; with an index given
    that is the user's choice."""
    size = "with CUDA: about 3 GB to download, 5 GB on disk"
    lines = probe(FAKE_SIZE=size).stderr.splitlines()
    place = [line.startswith(f"installing torch, {size} … ") for line in lines].index(True)
    advice = "there is no GPU here, and pip's configuration offers only a torch with CUDA."
    assert lines[place - 1].startswith(advice) is not has_gpu
    assert has_gpu or "ASYNCDDP_TORCH_INDEX=URL" in lines[place - 1]
    done = probe(FAKE_SIZE=size, ASYNCDDP_TORCH_INDEX="file:///builds")
    assert f"installing torch, {size}" in done.stderr
    assert "there is no GPU here" not in done.stderr


HERE, ELSEWHERE = f'sys_platform == "{sys.platform}"', f'sys_platform != "{sys.platform}"'


@pytest.mark.parametrize(
    ("needs", "told"),
    [
        (["filelock", f"nvidia-cublas-cu12==12.8.4; {HERE}"], "with CUDA: about 3 GB"),
        (["filelock", f"cuda-toolkit[cublas]==13.0; {HERE}"], "with CUDA: about 3 GB"),
        (["filelock", f"nvidia-cublas-cu12==12.8.4; {ELSEWHERE}"], "without CUDA: about 200 MB"),
        (["filelock", 'nvidia-cublas-cu12; extra == "cuda"'], "without CUDA: about 200 MB"),
        ([f"pytorch-triton-rocm==3.5; {HERE}"], "with libraries for GPUs: several GB"),
        ([f"pytorch-triton-rocm==3.5; {ELSEWHERE}"], "without CUDA: about 200 MB"),
        (None, "which is there already"),
    ],
)
def test_what_comes_with_torch_is_read_from_the_report_of_pip(needs, told):
    """CUDA is told of where torch requires its packages on this platform, without extras."""
    pytest.importorskip("pip", reason="pip, which reads requirements, is not installed here")
    torch = {"metadata": {"version": "2.9.0", "requires_dist": needs}}
    report = json.dumps({"version": "1", "install": [] if needs is None else [torch]})
    code = '. "$1"; venv=$2; describe_torch'
    command = ["bash", "-c", code, "bash", REPO / "scripts" / "lib" / "environment.sh", sys.prefix]
    done = subprocess.run(command, input=report, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(told)


def test_triton_is_added_where_torch_has_come_without(machine, probe):
    """Only then, only for tests, alone, so that nothing can ask for another one."""
    assert probe("examples", FAKE_TRITON="triton<9").returncode == 0
    assert len(installs(machine)) == 2
    done = probe(FAKE_TRITON="triton<9")
    assert done.returncode == 0, done.stderr
    *_, last = installs(machine)
    assert last.endswith("[--no-deps] [--only-binary] [:all:] [triton<9]")
    assert "Triton" not in done.stderr


def test_the_lowest_versions_come_from_the_lowest_python(machine, clone, probe):
    """`lowest` takes Python 3.10 or the one that is given, and asks uv for the lowest versions."""
    done = probe("lowest")
    assert done.returncode == 1
    assert done.stderr == (
        "probe: the lowest versions are those for Python 3.10, and there is no python3.10 here: "
        "give one, PYTHON=/path/to/python3.10\n"
    )
    lowest = machine.install("python3.10", PYTHON.replace("3.11.2", "3.10.9"))
    lowest.write_text(
        lowest.read_text() + 'case "$*" in *" install "*uv) cp "$0" "${0%/*}/uv" ;; esac\n'
    )
    done = probe("lowest")
    assert done.returncode == 0, done.stderr
    assert "creating .venv with Python 3.10.9" in done.stderr
    assert "about 3 GB to download" in done.stderr
    assert machine.calls()[-1].endswith(
        f"[--resolution] [lowest-direct] [--editable] [{clone}[dev,openmpi]]"
    )
    assert probe("lowest").stderr == ""
    shutil.rmtree(clone / ".venv")
    done = probe("lowest", ASYNCDDP_TORCH_INDEX="https://example.org/cpu")
    assert done.returncode == 1
    assert "unset ASYNCDDP_TORCH, ASYNCDDP_TORCH_INDEX and" in done.stderr


def test_failure_shows_the_log_and_the_next_run_tries_again(machine, probe):
    """A failing pip ends with its last lines and a sentence; the next run installs again."""
    done = probe(FAKE_PIP_FAILS="1")
    assert done.returncode == 1
    assert "    ERROR: no such wheel" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("probe: installing torch")
    assert "failed (exit code 7)" in done.stderr
    assert probe().returncode == 0
    assert len(installs(machine)) == 2
    assert not creations(machine), "a failed download is no reason to make the environment anew"


def test_a_killed_install_is_redone_from_the_start(machine, clone, probe):
    """An install that was killed leaves no stamp: the next run makes the environment anew."""
    command = machine.command(clone / "scripts" / "probe", "dev")
    process = subprocess.Popen(
        command, env=machine.environment(FAKE_PIP_SLEEP="30"), start_new_session=True
    )
    deadline = time.monotonic() + 20
    while not (clone / ".venv" / ".asyncddp" / "installing").exists():
        assert time.monotonic() < deadline, "the install did not begin"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)
    done = probe()
    assert done.returncode == 0, done.stderr
    assert creations(machine)
    assert len(installs(machine)) == 2


def test_two_at_once_install_once(machine, clone):
    """Of two scripts started together one installs; the other says that it waits."""
    command = machine.command(clone / "scripts" / "probe", "dev")
    pair = [
        subprocess.Popen(
            command,
            env=machine.environment(FAKE_PIP_SLEEP="0.5"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=60) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], outputs
    assert len(installs(machine)) == 2, "torch and the clone, each once"
    assert sum("waiting for another script" in err for _, err in outputs) == 1


def test_no_python_is_one_sentence(machine, probe):
    """Without any Python: what is needed, and the Debian packages."""
    (machine.bin / "python3").unlink()
    done = probe()
    assert done.returncode == 1
    assert done.stderr == (
        "probe: Python 3.10 or newer is needed, and there is no python3 here; "
        "on Debian: apt-get install python3 python3-venv\n"
    )


def test_an_old_python_is_passed_over_and_named(machine, probe):
    """An old python3 is named; a newer one beside it is taken."""
    done = probe(FAKE_VERSION="3.9.2")
    assert done.returncode == 1
    assert "Python 3.10 or newer is needed, and python3 is Python 3.9.2" in done.stderr
    machine.install("python3.12", PYTHON.replace("${FAKE_VERSION:-3.11.2}", "3.12.1"))
    done = probe(FAKE_VERSION="3.9.2")
    assert done.returncode == 0, done.stderr
    assert "creating .venv with Python 3.12.1" in done.stderr


def test_a_python_without_venv_names_the_debian_package(probe):
    """Debian splits ensurepip off: the sentence names the package of that very version."""
    done = probe(FAKE_NO_ENSUREPIP="1")
    assert done.returncode == 1
    assert done.stderr == (
        "probe: python3 (Python 3.11.2) cannot make environments; "
        "on Debian: apt-get install python3.11-venv\n"
    )


def test_a_wrong_python_setting_is_named(probe):
    """PYTHON=… that does not run is an error, not silently another Python."""
    done = probe(PYTHON="/nowhere/python")
    assert done.returncode == 1
    assert "PYTHON=/nowhere/python is no Python 3 that runs here" in done.stderr


def test_a_folder_of_something_else_is_left_alone(machine, probe):
    """ASYNCDDP_VENV on a folder with other things in it is refused; nothing there is touched."""
    folder = machine.root / "precious"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    done = probe(ASYNCDDP_VENV=str(folder))
    assert done.returncode == 1
    assert "precious is a folder of something else" in done.stderr
    assert [path.name for path in folder.iterdir()] == ["thesis.tex"]


def test_an_environment_of_the_users_own_is_used_and_not_changed(machine, clone, probe):
    """An environment that the scripts did not make is used as it is; what it lacks is named."""
    own = machine.root / "own"
    (own / "bin").mkdir(parents=True)
    shutil.copy(machine.bin / "python3", own / "bin" / "python")
    done = probe(ASYNCDDP_VENV="own")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"ready: {own} {own}/bin\n"
    assert not installs(machine)
    assert not (clone / ".venv").exists()
    done = probe(ASYNCDDP_VENV="own", FAKE_MISSING="pytest")
    assert done.returncode == 1
    assert "own lacks pytest and is not ours to change: pip install -e '.[dev]'" in done.stderr
