"""``asyncddp.testing`` as its users have it: in a project of their own, run by their own pytest."""

from __future__ import annotations

import re
import sys

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.testing import assert_alike, assert_consensus, assert_result, held, oracle, ranks
from tests.support import Finished, LoopbackWorld, run_to_end
from tests.support.processes import warm_server

PROJECT = """
import os

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.testing import ranks
from asyncddp.testing import assert_alike, assert_consensus, assert_result, held, oracle


@pytest.fixture
def shape():
    return (3, 2)


@ranks(1, 4)
def test_average(shape):
    x = held(bf.rank(), shape, torch.float32)
    graph = topology.ring(bf.size())
    bf.set_topology(graph)
    expected = oracle(graph, bf.rank(), lambda rank: held(rank, shape, torch.float32))
    assert_result(bf.neighbor_allreduce(x), x, expected)


@pytest.mark.parametrize("start", [0, 5])
@ranks(2, transports=("loopback", "mpi"))
def test_ranks_agree(start):
    assert_alike(bf.allreduce(torch.ones(2) * (start + bf.rank())))


@ranks(2, transports="mpi")
def test_ranks_are_processes():
    assert len(set(bf.allgather_object(os.getpid()))) == 2


class TestInAClass:
    @ranks(3, ranks_per_machine=3, timeout=5.0)
    def test_settings(self, tmp_path):
        assert (bf.size(), bf.local_size()) == (3, 3)
        (tmp_path / f"rank{bf.rank()}").touch()


@ranks(2)
def test_takes_the_request(request):
    assert "loopback-2" in request.node.name


@ranks(2)
def test_skips():
    pytest.skip("not today")


@ranks(2, transports=("loopback", "mpi"))
def test_fails_on_one_rank():
    mine = bf.rank()
    assert mine == 0, "this rank is not the first"


@ranks(2, timeout=10.0)
def test_hangs():
    if bf.rank() == 0:
        bf.allreduce(torch.ones(1))
    else:
        bf.neighbor_allreduce(torch.ones(1), name="other")


@ranks(3)
def test_never_meets():
    assert_consensus([torch.full((4,), float(bf.rank()))], within=0.5)


def inner():
    @ranks(2, transports="mpi")
    def test_hidden():
        pass

    return test_hidden


test_is_not_at_the_top = inner()
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Finished:
    """A user's project after a run of its tests, with warnings as errors."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_mine.py").write_text(PROJECT, encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\naddopts = -rs -v\n")
    command = [warm_server().python, "-m", "pytest", "-p", "no:cacheprovider"]
    return run_to_end(command, cwd=folder)


@pytest.mark.launches
@pytest.mark.parametrize(
    "name",
    [
        "test_average[loopback-1]",
        "test_average[loopback-4]",
        "test_ranks_agree[loopback-2-0]",
        "test_ranks_agree[mpi-2-5]",
        "test_ranks_are_processes[mpi-2]",
        "TestInAClass::test_settings[loopback-3]",
        "test_takes_the_request[loopback-2]",
    ],
    ids=lambda name: name.partition("[")[0],  # one that names a world would run among its tests
)
def test_what_holds_passes(project, name):
    """A case that holds passes for each size, transport and parameter, under its own id."""
    assert f"test_mine.py::{name} PASSED" in project.stdout, project


@pytest.mark.launches
@pytest.mark.parametrize("transport", ["loopback", "mpi"])
def test_a_rank_that_fails_fails_the_test(project, transport):
    """With its traceback, its number and pytest's own words for the assertion."""
    assert f"test_fails_on_one_rank[{transport}-2] FAILED" in project.stdout, project
    assert project.stdout.count("RanksFailedError: rank 1 of 2 failed") >= 2
    assert "AssertionError: this rank is not the first" in project.stdout


@pytest.mark.launches
def test_what_would_hang_fails_in_time_and_says_what_came_instead(project):
    """Ranks that wait in different verbs fail the test, and each says what the other has sent."""
    assert "test_hangs[loopback-2] FAILED" in project.stdout, project
    assert not project.timed_out
    for rank, verb in ((0, r"allreduce\(average\) \(c"), (1, r"neighbor_allreduce 'other' \(u")):
        assert re.search(rf"rank {rank} has sent {verb}[^;]* instead", project.stdout), project


@pytest.mark.launches
def test_a_skip_on_all_ranks_is_one(project):
    """``pytest.skip`` on all ranks is one skipped test with its reason."""
    assert "test_skips[loopback-2] SKIPPED (not today)" in project.stdout, project


@pytest.mark.launches
def test_assertions_between_ranks_say_what_is_wrong(project):
    """A failed ``assert_consensus`` gives the distance found and the one expected."""
    told = "the parameters of 3 ranks are 1.63299 from their average, expected at most 0.5"
    assert told in project.stdout, project


@pytest.mark.launches
def test_processes_need_functions_that_they_can_import(project):
    """A case for processes that is no top-level function fails and says so."""
    assert "is not at the top of its module" in project.stdout, project


@pytest.mark.launches
def test_nothing_is_left_running(project):
    """A run with failed and timed-out cases ends by itself and leaves no process behind."""
    assert project.code == pytest.ExitCode.TESTS_FAILED, project
    assert project.left == ()


@ranks(2, 3)
def test_here_too():
    """The decorator in this very file: as many ranks as the name says."""
    assert bf.size() in (2, 3)
    assert_alike(bf.size())


@pytest.mark.parametrize("family", ["ring", "one_peer_exponential"])
def test_the_oracle_is_the_mixing_matrix(family):
    """(W_k X)[r], row by row, for graphs and each round of schedules."""
    built = getattr(topology, family)(4)
    x = torch.stack([held(rank, (5,), torch.float64) for rank in range(4)])
    for k in range(3):
        rows = torch.stack([oracle(built, rank, lambda r: x[r], k) for rank in range(4)])
        schedule = topology.as_schedule(built)
        matrix = torch.zeros(4, 4, dtype=torch.float64)
        for rank in range(4):
            near = schedule.neighbors(rank, k)
            matrix[rank, rank] = near.self_weight
            for source, weight in near.src_weights.items():
                matrix[rank, source] = weight
        torch.testing.assert_close(rows, matrix @ x)


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (torch.ones(2, dtype=torch.float64), "dtype torch.float64 came of torch.float32"),
        (torch.ones(3), r"shape \(3,\) of \(2,\)"),
        (torch.tensor([1.0, 1.1]), "not close"),
    ],
)
def test_a_wrong_result_is_told(got, message):
    """``assert_result`` rejects another dtype, shape or value, and says which it is."""
    with pytest.raises(AssertionError, match=message):
        assert_result(got, torch.ones(2), torch.ones(2, dtype=torch.float64))


def test_ranks_that_differ_are_told():
    """``assert_alike`` fails on all ranks where values, types or dtypes differ between two."""

    def case(values):
        assert_alike(values[bf.rank()])

    world = LoopbackWorld(2)
    world.run(case, [torch.ones(2), torch.ones(2)])
    world.run(case, [{"a": 1}, {"a": 1}])
    for mine, theirs in ((1, 2), (1, 1.0), (torch.ones(1), torch.ones(1, dtype=torch.float64))):
        with pytest.raises(AssertionError, match=r"rank 0 holds .*, but rank 1 holds") as caught:
            world.run(case, [mine, theirs])
        assert "ranks 0, 1 of 2 failed" in str(caught.value)


def test_consensus_is_a_distance():
    """Of two ranks whose modules hold k zeros and k twos the distance is √k; of one rank, 0."""

    def case(within):
        model = torch.nn.Linear(3, 1).requires_grad_(False)
        for parameter in model.parameters():
            parameter.fill_(2.0 * bf.rank())
        assert_consensus(model, within=within)

    LoopbackWorld(2).run(case, 2.0)
    with pytest.raises(AssertionError, match=r"are 2 from their average, expected at most 1\.99"):
        LoopbackWorld(2).run(case, 1.99)
    LoopbackWorld(1).run(case, 0.0)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((), {}, r"arguments sizes: expected numbers of ranks, such as ranks\(2, 4\), got \(\)"),
        ((0,), {}, r"arguments sizes: .*got \(0,\)"),
        (
            (2,),
            {"transports": "mpy"},
            "argument transports: expected some of .*loopback, mpi.*got 'mpy'",
        ),
        ((2,), {"transports": ()}, "argument transports: expected some of .*got ''"),
    ],
)
def test_what_cannot_be_is_refused_where_it_stands(sizes, options, message):
    """Impossible sizes and transports raise ArgumentError where ``ranks`` is called."""
    with pytest.raises(bf.ArgumentError, match=message):
        ranks(*sizes, **options)


def test_without_pytest_the_error_says_what_to_install(monkeypatch):
    """Without pytest ``ranks`` raises EnvironmentProblem with the pip command."""
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(bf.EnvironmentProblem, match=r"pip install 'psutil>=5\.9' 'pytest>=8\.2'"):
        ranks(2)
