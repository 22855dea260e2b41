"""scripts/test: the whole suite is shared among workers; quick, soak and areas are parts of it."""

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


LONG = (
    "soaks, release tests, most of torch's and c10d's; "
    "scripts/test soak, release, torch, c10d run them"
)
PROGRESS = "[-o] [console_output_style=count] [--durations] [10] [--durations-min] [0.1]"


@pytest.mark.parametrize(("processors", "workers"), [(1, 2), (2, 3), (4, 3), (6, 3), (16, 8)])
def test_all_of_it_is_shared_among_workers_by_the_number_of_processors(suite, processors, workers):
    """Half as many, but three where there are few; the ten slowest tests are told."""
    call = suite(processors=processors, OMP_NUM_THREADS="1")
    assert call == f"python [-m] [pytest] [-n] [{workers}] {PROGRESS}"


def test_processes_of_the_tests_keep_what_they_compile(suite, machine):
    """Also on a machine whose Python is told to write no bytecode."""
    machine.install("python", f"echo \"${{PYTHONDONTWRITEBYTECODE-kept}}\" >'{machine.root}/told'")
    suite(PYTHONDONTWRITEBYTECODE="1")
    assert (machine.root / "told").read_text() == "kept\n"


def test_quick_runs_in_one_process_what_launches_nothing(suite):
    """Unit tests and topology without worlds of processes; further arguments are pytest's."""
    marks = "not (soak or release or slow or mpi or hosts or launches or training)"
    expected = f"python [-m] [pytest] [tests/unit] [tests/topology] [-m] [{marks}] {PROGRESS} [-x]"
    assert suite("quick", "-x") == expected


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
        ([], f"left out: {LONG}"),
        (["unit"], f"left out: {LONG}"),
        (["soak"], "left out: all but the soak tests; scripts/test runs most of it"),
        (["release"], "left out: all but the release tests; scripts/test runs most of it"),
        (
            ["quick"],
            "left out: launches, most of training, slow tests and more; "
            "scripts/test runs most of it",
        ),
    ],
    ids=["all", "area", "soak", "release", "quick"],
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
