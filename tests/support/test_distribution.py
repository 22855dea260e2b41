"""How the suite is shared among workers: groups stay whole, and every test runs once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support import run_to_end
from tests.support.marks import parameters
from tests.support.processes import REPO, warm_server
from tests.support.worlds import WORLDS

pytest.importorskip("xdist", reason="pytest-xdist is not installed: pip install pytest-xdist")

from tests.support.distribution import HOSTS, LIGHTNING, RANKS, Groups, group_of, handle_of_block

SUITE = [
    *(f"tests/mpi/test_a.py::test_verbs[{name}-ring-{k}]" for name in RANKS for k in range(4)),
    *(f"tests/unit/test_b.py::test_{k}[loopback-4]" for k in range(9)),
    "tests/unit/test_c.py::test_alone",
    "tests/docs/test_pages.py::test_page[a]",
    "tests/hosts/test_d.py::test_two_hosts",
]

INNER = """
import os
import pytest

@pytest.mark.parametrize("world", ["mpi-2", "mpi-4", "shared_memory-2"])
@pytest.mark.parametrize("number", range(3))
def test_on(world, number):
    with open("runs", "a") as file:
        print(world, number, os.environ.get("PYTEST_XDIST_WORKER"), file=file)
    assert (world, number) != ("mpi-4", 1)
"""
CONFTEST = f"""
def pytest_xdist_make_scheduler(config, log):
    import sys
    sys.path.append({str(REPO)!r})
    from tests.conftest import pytest_xdist_make_scheduler as make
    return make(config, log)
"""


class Worker:
    """What the scheduler sees of a worker; ``todo`` are the numbers of the tests it was given."""

    def __init__(self, name):
        self.gateway = SimpleNamespace(id=name)
        self.shutting_down = False
        self.todo = []

    def send_runtest_some(self, indices):
        self.todo += indices

    def shutdown(self):
        self.shutting_down = True


@pytest.fixture
def two(monkeypatch):
    """Two workers that have been given their first tests."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    option = SimpleNamespace(loadscopereorder=True)
    config = SimpleNamespace(option=option, getvalue=lambda name: {"tx": ["2*popen"]}[name])
    return started(Groups(config), Worker("a"), Worker("b"))


def started(groups, *workers):
    for worker in workers:
        groups.add_node(worker)
        groups.add_node_collection(worker, SUITE)
    groups.schedule()
    return groups, workers


def at_work(worker):
    return group_of(SUITE[worker.todo[0]]) if worker.todo else None


def work(groups, workers):
    """Let each worker run a test in turn; gives what both were at, step by step, and all tests."""
    steps, done = [], []
    while any(worker.todo for worker in workers):
        steps.append([at_work(worker) for worker in workers])
        for worker in workers:
            if worker.todo:
                done.append(SUITE[worker.todo[0]])
                groups.mark_test_complete(worker, worker.todo.pop(0))
    return steps, done


def test_every_test_on_processes_is_in_the_group_of_its_world(request):
    """The names that are all a scheduler sees tell what the tests themselves say."""
    seen = 0
    for item in request.session.items:
        world = getattr(item, "callspec", None) and item.callspec.params.get("world")
        if world in RANKS:
            seen += 1
            own = item.nodeid.startswith(LIGHTNING)
            assert group_of(item.nodeid) == (LIGHTNING if own else world)
        if item.get_closest_marker("hosts"):
            seen += 1
            assert group_of(item.nodeid) == HOSTS
    if not seen:
        pytest.skip("no test on processes was collected beside this one: run scripts/test")


@pytest.mark.parametrize(("name", "in_group"), [("mpi-2", True), ("loopback-2", False)])
def test_a_world_of_processes_is_a_group_wherever_its_name_stands(name, in_group):
    """Only a whole word of a test's parameters counts; other tests are grouped by file."""
    assert [one.id for one in parameters([name])] == [name]
    for test in (f"t.py::test[{name}]", f"t.py::test[a-{name}-b]", f"t.py::test[a-{name}]"):
        assert group_of(test) == (name if in_group else "t.py")
    assert group_of(f"t.py::test[{name}0]") == group_of(f"t.py::test[x{name}]") == "t.py"


def test_long_groups_come_first():
    """Worlds of processes begin before hosts, docs and other files, the larger one first."""
    groups = ["tests/unit/test_b.py", "tests/docs/test_pages.py", HOSTS, "mpi-2", "mpi-4"]
    assert sorted(groups, key=handle_of_block) == groups[::-1]
    assert set(RANKS) < set(WORLDS)


def test_every_test_runs_once_and_groups_stay_whole(two):
    """No group is ever at both workers, and both are told to end after the last test."""
    groups, workers = two
    steps, done = work(groups, workers)
    assert sorted(done) == sorted(SUITE)
    assert groups.tests_finished
    assert all(worker.shutting_down for worker in workers)
    assert not {step[0] for step in steps} & {step[1] for step in steps} - {None}


def test_ranks_of_two_worlds_wait_for_each_other_while_there_is_something_else(two):
    """On two processors; the last worlds may run side by side rather than leave a worker idle."""
    steps, _ = work(*two)
    seen = set()
    for step in steps:
        if set(step) <= set(RANKS):
            assert seen >= {group_of(test) for test in SUITE} - set(RANKS)
        seen.update(step)
    assert set(RANKS[-2:]) <= {first for first, _ in steps}


def test_a_worker_knows_of_a_few_tests_only(two):
    """What it was told of it runs even when another worker's failure is to end all."""
    groups, workers = two
    while any(worker.todo for worker in workers):
        for worker in workers:
            assert len(worker.todo) <= 6
            if worker.todo:
                groups.mark_test_complete(worker, worker.todo.pop(0))


def test_a_worker_that_is_not_told_to_end_knows_of_the_test_after_next(two):
    """Else it would wait for that with the next one, and a world would be closed for nothing."""
    groups, workers = two
    while any(worker.todo for worker in workers):
        for worker in workers:
            assert worker.shutting_down or len(worker.todo) > 2
            if worker.todo:
                groups.mark_test_complete(worker, worker.todo.pop(0))


def test_another_worker_takes_over_what_a_dead_one_has_left(two):
    """All but the test that it died of, which is told as failed."""
    groups, (first, second) = two
    crashed = groups.remove_node(first)
    assert crashed == SUITE[first.todo[0]]
    _, done = work(groups, [second])
    assert sorted([*done, crashed]) == sorted(SUITE)


def test_a_worker_that_comes_for_a_dead_one_gets_tests_once_it_has_collected(two):
    """While it collects, a third may die as well."""
    groups, (first, second) = two
    third = Worker("c")
    groups.add_node(third)
    crashed = groups.remove_node(first)
    assert not third.todo
    groups.add_node_collection(third, SUITE)
    groups.schedule()
    _, done = work(groups, [second, third])
    assert sorted([*done, crashed]) == sorted(SUITE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A suite of its own that two workers have shared."""
    made = tmp_path_factory.mktemp("shared")
    (made / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    (made / "test_inner.py").write_text(INNER, encoding="utf-8")
    done = run_inner(made, "-n", "2")
    assert done.code == pytest.ExitCode.TESTS_FAILED, done
    assert "1 failed, 8 passed" in done.stdout, done
    return made


def run_inner(folder, *options):
    words = ("-m", "pytest", f"--rootdir={folder}", "-c", "/dev/null", *options)
    return run_to_end(warm_server().command(*words), cwd=folder)


def runs(folder):
    return [line.split() for line in (folder / "runs").read_text().splitlines()]


def test_a_worker_has_all_tests_of_a_world(folder):
    """Each of the three worlds runs on one worker, and neither worker is without one."""
    found = runs(folder)
    workers = {(world, worker) for world, _, worker in found}
    assert {worker for _, worker in workers} == {"gw0", "gw1"}
    assert len(workers) == 3
    assert len(found) == 9


def test_what_failed_among_workers_is_run_again_without_them(folder):
    """A second try takes just that, by the name that it has everywhere."""
    (folder / "runs").unlink()
    done = run_inner(folder, "--last-failed", "--last-failed-no-failures", "none", "-v")
    assert runs(folder) == [["mpi-4", "1", "None"]], done
    assert "test_inner.py::test_on[1-mpi-4] FAILED" in done.stdout
