"""``asyncddp doctor --check``: what it starts, what it says of it, and that it can fail."""

import json
import os

import pytest
import torch
from click.testing import CliRunner

from asyncddp.cli.doctor import transport_self_test as doctor
from asyncddp.cli.main import main
from asyncddp.testing import LoopbackWorld
from asyncddp.testing import self_test as checks
from asyncddp.testing.self_test import CHECKS, SelfTestData, problems
from asyncddp.transport import DEVICE_TRANSPORTS

CPU = torch.device("cpu")
GOOD = {
    "ranks": 2,
    "checks": 11,
    "problems": [],
    "device_transport": "cuda_staged",
    "refused": {},
    "failed": [],
}


class Ranks:
    """Answers in place of ranks, by the transport that was asked for; notes what was started."""

    def __init__(self, **answers):
        self.answers, self.started = answers, []

    def __call__(self, words, environment, seconds):
        device = words[-1]
        name = "ASYNCDDP_TRANSPORT" if device == "cpu" else "ASYNCDDP_DEVICE_TRANSPORTS"
        transport = environment[name]
        self.started.append((transport, list(words), environment, seconds))
        return {**GOOD, "device_transport": transport, **self.answers.get(transport, {})}


def rows(has_gpus=False, **answers):
    return {
        row["transport"]: row
        for row in doctor.self_test(Ranks(**answers), ["--num-proc", "2"], has_gpus=has_gpus)
    }


def test_the_transports_are_those_of_the_library():
    """The self-test's list of device transports is the library's."""
    assert set(doctor.DEVICE_TRANSPORTS) == set(DEVICE_TRANSPORTS)


def test_each_transport_is_tried_by_ranks_of_its_own_in_bounded_time():
    """Each transport is tested by a run of its own, with a time limit and a verb timeout."""
    ranks = Ranks()
    doctor.self_test(ranks, ["--num-proc", "2"], has_gpus=True)
    assert [transport for transport, *_ in ranks.started] == [
        *doctor.HOST_TRANSPORTS,
        *doctor.DEVICE_TRANSPORTS,
    ]
    for transport, words, environment, seconds in ranks.started:
        device = "cpu" if transport in doctor.HOST_TRANSPORTS else "cuda"
        assert words == [
            "--num-proc", "2", "--timeout", "100", "-m", "asyncddp.testing.self_test", device,
        ]  # fmt: skip
        assert environment["PATH"] == os.environ["PATH"]
        assert environment["ASYNCDDP_TIMEOUT"] == "30"
        assert seconds > doctor.LIMIT, "the launcher speaks before it is given up"


def test_without_gpus_their_transports_are_not_run_and_that_is_no_failure():
    """Without GPUs device transports are "not run", and the finding is good."""
    found = rows()
    assert {found[transport]["result"] for transport in doctor.HOST_TRANSPORTS} == {"passed"}
    assert {found[transport]["result"] for transport in doctor.DEVICE_TRANSPORTS} == {"not run"}
    finding = doctor.summarise_self_test(list(found.values()))
    assert (finding.level, finding.value) == ("good", "passed: shared_memory, mpi, c10d")


def test_a_transport_that_the_ranks_cannot_take_is_not_run_and_says_why():
    """A device transport that ranks have refused is "not run", with their reason."""
    shared = {
        "device_transport": "cuda_staged",
        "refused": {"nccl": "rank 0 and rank 1 share one GPU"},
    }
    row = rows(has_gpus=True, nccl=shared)["nccl"]
    assert (row["result"], row["what"]) == ("not run", "rank 0 and rank 1 share one GPU")


def test_a_transport_that_a_rank_cannot_open_has_failed_with_its_words():
    """A device transport that no rank refuses, and one cannot open, has failed, with the reason."""
    words = "rank 1: NCCL makes no communicator of 2 ranks (NCCL_ERROR_SYSTEM_ERROR)"
    broken = {"device_transport": "cuda_staged", "refused": {"nccl": words}, "failed": ["nccl"]}
    row = rows(has_gpus=True, nccl=broken)["nccl"]
    assert (row["result"], row["what"]) == ("failed", words)


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        ({"problems": ["allreduce: wrong"]}, "allreduce: wrong"),
        ({"problems": ["a", "b", "c"]}, "a (and 2 more)"),
    ],
)
def test_wrong_values_are_a_failure(answer, what):
    """A transport with problems has failed, with the first one; the finding is bad."""
    found = rows(mpi=answer)
    assert (found["mpi"]["result"], found["mpi"]["what"]) == ("failed", what)
    finding = doctor.summarise_self_test(list(found.values()))
    assert (finding.level, finding.value) == ("bad", "failed: mpi")
    assert "-m asyncddp.testing.self_test cpu" in finding.advice


def test_ranks_that_do_not_answer_are_a_failure_with_their_words():
    """If ranks give no answer, the transport has failed with the problem of the run."""

    def silent(words, environment, seconds):
        return {"mpi": {"problem": "rank 1 on h2 was killed by signal 9 (SIGKILL)"}}

    found = doctor.self_test(silent, [], has_gpus=False)
    assert found[0]["result"] == "failed"
    assert "signal 9" in found[0]["what"]


def test_without_mpi_only_what_needs_none_is_run():
    """Rows of MPI's transports say that there is no launcher of MPI."""
    rows = doctor.self_test(lambda *_: {"mpi": {"problem": "-"}}, [], has_gpus=False, has_mpi=False)
    found = {row["transport"]: (row["result"], row["what"]) for row in rows}
    assert found["mpi"] == found["shared_memory"] == ("not run", "no MPI launcher")
    assert found["c10d"] == ("failed", "-")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_check_passes_on_any_number_of_ranks(size):
    """On 1, 2 and 3 ranks of correct verbs the checks find no problem."""
    assert LoopbackWorld(size).run(lambda: problems(CPU)) == [[]] * size


@pytest.mark.parametrize("name", CHECKS)
def test_every_check_sees_a_wrong_value(name, monkeypatch):
    """Ranks that hold something else than they should fail each check."""
    monkeypatch.setattr(checks, "_COUNTS", {"cpu": (6,)})
    monkeypatch.setattr(checks, "CHECKS", {name: CHECKS[name]})
    monkeypatch.setattr(SelfTestData, "own", lambda case: case.of(case.rank).float() + 1)
    for found in LoopbackWorld(3).run(lambda: problems(CPU)):
        lonely = name == "pair_gossip" and not found  # the odd one out has no partner
        assert lonely or found[0].startswith(f"{name} of 6 elements on rank")
    monkeypatch.setattr(SelfTestData, "own", lambda case: case.of(case.rank).float() * float("nan"))
    assert any(LoopbackWorld(3).run(lambda: problems(CPU))), "a NaN is wrong, too"


def test_doctor_check_runs_all_transports_of_the_host(warm_run):
    """``doctor --check`` passes over shared memory, MPI and c10d, with exit code 0."""
    shown = CliRunner().invoke(main, ["doctor", "--check", "--json"])
    report = json.loads(shown.output)
    results = {row["transport"]: row["result"] for row in report["self_test"]}
    passed = {name: results[name] for name in doctor.HOST_TRANSPORTS}
    assert passed == dict.fromkeys(doctor.HOST_TRANSPORTS, "passed"), report["self_test"]
    assert shown.exit_code == 0
    (finding,) = (one for one in report["findings"] if one["section"] == "Self-test")
    assert finding["level"] == "good"


def test_doctor_check_ends_with_1_where_a_transport_fails(warm_run, monkeypatch):
    """Ranks that are started anew see this and cannot begin."""
    monkeypatch.setattr(doctor, "HOST_TRANSPORTS", ("no_such_transport",))
    shown = CliRunner().invoke(main, ["doctor", "--check", "--json"])
    report = json.loads(shown.output)
    (row,) = (row for row in report["self_test"] if row["device"] == "cpu")
    assert row["result"] == "failed"
    assert "no_such_transport" in row["what"]
    assert shown.exit_code == 1
