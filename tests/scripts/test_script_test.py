"""scripts/test: the suite is shared among workers, and has parts of other names."""

from __future__ import annotations

import shutil

import pytest

from tests.scripts.conftest import REPO


@pytest.fixture
def suite(machine):
    """A clone with one area, a Python that only notes how it is called, and some processors."""
    clone = machine.root / "clone"
    shutil.copytree(REPO / "scripts", clone / "scripts")
    (clone / "tests" / "unit").mkdir(parents=True)
    (clone / "tests" / "unit" / "test_one.py").touch()
    (machine.root / "own").mkdir()
    (machine.root / "own" / "bin").symlink_to(machine.bin)
    machine.install("python", "")
    machine.environ["ASYNCDDP_VENV"] = str(machine.root / "own")

    def called(*arguments, processors=2, **environ):
        machine.install("nproc", f"echo ${{OMP_NUM_THREADS:-{processors}}}")
        done = machine.run(clone / "scripts" / "test", *arguments, **environ)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].startswith("left out: ")
        return [call for call in machine.calls() if call.startswith("python [-m] [pytest]")][-1]

    return called


OTHERS = (
    "whole benches, soaks, release tests, most of torch's and c10d's: "
    "scripts/test nightly, soak, release, torch, c10d"
)
WIDE = (
    "worlds other than loopback-4 and mpi-2, launches, hosts, Slurm, GPUs, notebooks, frameworks, "
    "examples, further cases of simulations, "
    f"the documentation's code and site: scripts/test all; {OTHERS}"
)
DEFAULT = (
    "[-m] [not (soak or release or torch_suite or nightly or exhaustive or hosts or launches)]"
)
PROGRESS = "[-o] [console_output_style=count] [--durations] [10] [--durations-min] [0.1]"


@pytest.mark.parametrize(("processors", "workers"), [(1, 2), (2, 3), (4, 3), (6, 3), (16, 8)])
def test_it_is_shared_among_workers_by_the_number_of_processors(suite, processors, workers):
    """Half as many, but three where there are few; the ten slowest tests are told."""
    call = suite(processors=processors, OMP_NUM_THREADS="1")
    assert call == f"python [-m] [pytest] {DEFAULT} [-n] [{workers}] {PROGRESS}"


def test_all_leaves_no_world_and_no_launch_out(suite):
    """Pytest's own choice: all but soaks, release tests and torch's suite."""
    assert suite("all", "-x") == f"python [-m] [pytest] [-n] [3] {PROGRESS} [-x]"


def test_processes_of_the_tests_keep_what_they_compile(suite, machine):
    """Also on a machine whose Python is told to write no bytecode."""
    machine.install("python", f"echo \"${{PYTHONDONTWRITEBYTECODE-kept}}\" >'{machine.root}/told'")
    suite(PYTHONDONTWRITEBYTECODE="1")
    assert (machine.root / "told").read_text() == "kept\n"


def test_quick_runs_what_launches_nothing(suite):
    """Unit tests and topology without worlds of processes; further arguments are pytest's."""
    marks = DEFAULT.replace(")", " or slow or mpi or training)")
    expected = (
        f"python [-m] [pytest] [tests/unit] [tests/topology] {marks} [-n] [3] {PROGRESS} [-x]"
    )
    assert suite("quick", "-x") == expected


def test_nightly_runs_what_all_leaves_to_it(suite):
    """Whole benches, notebooks and guides, shared among workers."""
    assert suite("nightly") == f"python [-m] [pytest] [-m] [nightly] [-n] [3] {PROGRESS}"


def test_soak_runs_the_soaks_alone_and_shows_their_seeds(suite):
    """Nothing is captured, so that the seeds are seen; a seed is handed on."""
    expected = f"python [-m] [pytest] [tests] [-m] [soak] [-s] {PROGRESS} [--seed] [7]"
    assert suite("soak", "--seed", "7") == expected


def test_release_runs_what_builds_the_wheel_or_asks_pypi(suite):
    """These tests are all among those of the scripts."""
    assert suite("release") == f"python [-m] [pytest] [tests/scripts] [-m] [release] {PROGRESS}"


def test_c10d_runs_the_conformance_tests_on_ranks_without_mpi(suite):
    """Further arguments are pytest's."""
    expected = f"python [-m] [pytest] [tests/conformance] [-k] [c10d] {PROGRESS} [-x]"
    assert suite("c10d", "-x") == expected


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], f"left out: {WIDE}"),
        (["all"], f"left out: {OTHERS}"),
        (["unit"], f"left out: {OTHERS}"),
        (["soak"], "left out: all but the soak tests; scripts/test all runs most of it"),
        (["release"], "left out: all but the release tests; scripts/test all runs most of it"),
        (
            ["quick"],
            "left out: launches, most of training, slow tests and more; "
            "scripts/test all runs most of it",
        ),
    ],
    ids=["default", "all", "area", "soak", "release", "quick"],
)
def test_the_last_line_says_what_was_left_out(suite, machine, arguments, told):
    """Also where tests fail, whose exit code is kept."""
    suite()
    machine.install("python", "[[ $2 != pytest ]] || exit 3")
    done = machine.run(machine.root / "clone" / "scripts" / "test", *arguments)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (3, told), done.stderr


@pytest.mark.parametrize(
    ("arguments", "handed"),
    [
        (["unit"], "[tests/unit]"),
        (["tests/unit/test_one.py", "-x"], "[tests/unit/test_one.py] [-x]"),
        (["--last-failed", "-v"], "[--last-failed] [-v]"),
        (["unit", "-n", "3"], "[tests/unit] [-n] [3]"),
    ],
)
def test_workers_come_with_a_part_of_it_only_where_they_are_asked_for(suite, arguments, handed):
    """An area, a file or pytest's options run in one process."""
    assert suite(*arguments) == f"python [-m] [pytest] {handed}"


def test_changed_runs_what_the_import_graph_tells(suite, machine):
    """Since the branch main, or since what is named; a choice of nothing is told in words."""
    told = "case $1 in *changed_tests.py) echo tests/unit/test_one.py ;; esac"
    machine.install("python", told)
    call = suite("changed", "v1", "-x")
    assert call == (
        f"python [-m] [pytest] [tests/unit/test_one.py] {DEFAULT} [-n] [3] {PROGRESS} [-x]"
    )
    assert "python [scripts/lib/changed_tests.py] [v1]" in machine.calls()
    machine.install("python", "")
    done = machine.run(machine.root / "clone" / "scripts" / "test", "changed")
    assert done.returncode == 1
    assert "nothing has changed since main" in done.stderr


def test_a_file_of_the_library_stands_for_the_tests_that_import_it(suite, machine):
    """They are named first; further arguments are pytest's."""
    file = machine.root / "clone" / "asyncddp" / "config.py"
    file.parent.mkdir()
    file.touch()
    machine.install("python", "case $1 in *changed_tests.py) echo tests/unit/test_one.py ;; esac")
    assert suite("asyncddp/config.py", "-x") == "python [-m] [pytest] [tests/unit/test_one.py] [-x]"
    assert "python [scripts/lib/changed_tests.py] [asyncddp/config.py]" in machine.calls()


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize(
    ("arguments", "folder"),
    [
        (["--torch", "2.6.0"], ".venv-torch-2.6.0"),
        (["--lightning", "2.2.0"], ".venv-lightning-2.2.0"),
        (["--lightning", "2.2.0", "--torch", "2.6.0"], ".venv-torch-2.6.0-lightning-2.2.0"),
    ],
)
def test_other_versions_have_environments_of_their_own(machine, arguments, folder):
    """By version, beside the clone, as the refusal of one that is something else tells."""
    clone = machine.root / "clone"
    (clone / "pyproject.toml").touch()
    (clone / folder).mkdir()
    (clone / folder / "thesis.tex").touch()
    done = machine.run(clone / "scripts" / "test", "unit", *arguments, ASYNCDDP_VENV="")
    assert f"clone/{folder} is a folder of something else" in done.stderr
