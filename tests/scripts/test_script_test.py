"""scripts/test: the whole suite is shared among workers, anything less is not unless asked."""

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
        return [call for call in machine.calls() if call.startswith("python [-m] [pytest]")][-1]

    return called


@pytest.mark.parametrize(("processors", "workers"), [(1, 2), (2, 2), (4, 2), (6, 3), (16, 8)])
def test_all_of_it_is_shared_among_half_as_many_workers_as_processors(suite, processors, workers):
    """Two at least, for each waits half of its time; the slowest tests are told."""
    call = suite(processors=processors, OMP_NUM_THREADS="1")
    assert call == f"python [-m] [pytest] [-n] [{workers}] [--durations] [25] [--durations-min] [1]"


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
    assert suite(*arguments) == f"python [-m] [pytest] {handed}"
