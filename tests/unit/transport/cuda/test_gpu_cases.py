"""The cases of ``tests/gpu``, on a GPU that is pretended: a mistake in one shows here.

So does a tensor that the library leaves on the wrong device, and what makes the host wait.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from _pytest.outcomes import Failed, Skipped

import asyncddp as bf
from asyncddp.device.stream_interfaces import StreamOrdering
from tests.gpu import agreed, cases, conformance, short_run, thread_cases
from tests.gpu.places import PretendedGPU, on_a_pretended_gpu
from tests.gpu.pretended import Pretended, pretended_gpu, waits
from tests.support import FileEvent, LoopbackWorld, RanksFailedError, on

pytestmark = [pytest.mark.training, pytest.mark.exhaustive]


@pytest.fixture
def place():
    with pretended_gpu():
        yield PretendedGPU()


DTYPES = [torch.int16, torch.bfloat16]
"""One that is averaged and one that is not: the others differ on a real device only."""

SETTINGS = {"ranks_per_machine": 2}

CASES = [
    pytest.param(min(case.ranks), case, id=str(case))
    for case in conformance.CASES
    if not {arg for arg in case.args if isinstance(arg, torch.dtype)} - set(DTYPES)
]


@pytest.mark.parametrize(("size", "case"), CASES)
def test_conformance(place, size, case):
    """A conformance case of the GPU suite passes with tensors on a pretended GPU."""
    LoopbackWorld(size).run(conformance.perform, place, case, settings=case.settings)


@pytest.fixture
def ranks():
    return LoopbackWorld(2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_verb_gives_what_the_host_gives(place, ranks, dtype, monkeypatch):
    """Every verb gives on the GPU, for every shape, what it gives on the host."""
    monkeypatch.setattr(cases, "SHAPES", cases.SHAPES[:-1])
    ranks.run(cases.agrees_with_the_host, place, dtype, settings=SETTINGS)


@pytest.mark.parametrize("side", [False, True], ids=["its stream", "another stream"])
def test_verbs_keep_to_the_order_of_the_caller_s_stream(place, ranks, side):
    """A verb reads what the caller's stream queued before it, and what follows comes after."""
    ranks.run(cases.races, place, 2, side, settings=SETTINGS)


def test_the_short_run_for_compute_sanitizer(place):
    """The program that compute-sanitizer watches runs to its end."""
    short_run.main(place)


def test_handles_waited_on_other_streams_and_threads(place, ranks):
    """A handle may be waited for on another stream or thread than it was started on."""
    ranks.run(cases.waited_elsewhere, place)


def test_a_verb_that_keeps_to_no_order_is_found(place, ranks, monkeypatch):
    """Else the tests above would show nothing."""
    monkeypatch.setattr(StreamOrdering, "begin", lambda self: None)
    with pytest.raises(RanksFailedError, match="neighbor_allreduce"):
        ranks.run(cases.races, place, 1, False, settings=SETTINGS)


def test_a_graph_between_two_verbs(place, ranks):
    """A replayed graph reads what the verb before it wrote, and the next verb its result."""
    ranks.run(cases.graphed, place, 3)


def test_a_capture_beside_a_verb(place, ranks, tmp_path):
    """The progress thread serves a verb from start to end while its caller does other work."""
    ranks.run(thread_cases.beside_a_capture, place, FileEvent(tmp_path / "begun"))


def test_no_verb_makes_the_host_wait(place, ranks):
    """No verb makes the host wait for the GPU once it is warmed up."""
    seen = {}

    @contextmanager
    def watch(name):
        before = Counter(waits.seen)
        yield
        seen[name] = Counter(waits.seen) - before

    ranks.run(cases.each_verb_once, place, watch, settings=SETTINGS)
    assert len(seen) >= 10
    assert not any(seen.values()), seen


@pytest.mark.parametrize("method", cases.METHODS)
def test_training_equals_that_on_the_host(place, ranks, method):
    """Each algorithm trains to the same weights on the GPU as on the host."""
    for there, here in ranks.run(cases.trains, place, method, 4):
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("method", cases.COMPRESSED)
def test_compressed_training_equals_that_on_the_host(place, ranks, method):
    """Each compressed method trains to the same weights on the GPU as on the host."""
    for there, here in ranks.run(cases.trains, place, method, 4):
        torch.testing.assert_close(there, here, rtol=2e-2, atol=2e-2)


def test_training_with_unequal_numbers_of_batches(place, ranks):
    """``join`` with unequal numbers of batches gives the host's weights on the GPU."""
    for there, here in ranks.run(cases.joins, place):
        torch.testing.assert_close(there, here, rtol=1e-12, atol=1e-14)


def test_a_rank_on_the_host_beside_one_on_a_gpu_is_named(place, ranks):
    """Tensors on different device types raise MismatchError with a rank and both devices."""
    for message in ranks.run(cases.mixed_devices, place):
        assert re.search(r"rank \d.* 'x'.*expected a tensor on c\w+, got one on c\w+", message)


def test_the_transport_of_threads_is_the_one_that_always_works(place, ranks):
    """Ranks that are threads use ``cuda_staged``, and a case of another transport is not begun."""
    assert ranks.run(agreed.on_transport, place, "cuda_staged", bf.rank) == [0, 1]
    with pytest.raises(RanksFailedError, match="of nccl, and this rank has cuda_staged"):
        ranks.run(agreed.on_transport, place, "nccl", bf.rank)


class StagedInSilence:
    """A world whose ranks agree on ``cuda_staged``, whatever speaks against the transport."""

    size = 2

    def __init__(self, obstacle):
        self.obstacle = obstacle

    def run(self, *_, **__):
        return [("cuda_staged", self.obstacle)] * 2


def test_ranks_that_stage_though_nothing_speaks_against_the_transport_fail():
    """An unmet condition skips the test with its words; without one it fails, and names both."""
    with pytest.raises(Skipped, match="nccl cannot be had on 2 ranks here: they share one GPU"):
        agreed.runner(StagedInSilence("they share one GPU"), "nccl")
    with pytest.raises(Failed, match=r"asked for nccl, .* agreed on \['cuda_staged'\]; asyncddp d"):
        agreed.runner(StagedInSilence(None), "nccl")


# ranks that are processes


@on("mpi-2")
def test_processes_tell_their_transport_and_what_speaks_against_another(world):
    """Each rank gets the transport it has, and which condition of the wanted one is not met."""
    for transport, obstacle in world.run(on_a_pretended_gpu, agreed.agreement, "nccl"):
        assert transport == "cuda_staged"
        assert obstacle
    case = on_a_pretended_gpu, agreed.on_transport, "cuda_staged", bf.rank
    assert world.run(*case) == [0, 1]


@pytest.mark.nightly
@on("mpi-2")
def test_conformance_between_processes(world):
    """Gossip and handles keep their conformance between processes on a pretended GPU."""
    some = [case for case in conformance.CASES if case.module in ("pair_gossip", "handles")]
    world.run(on_a_pretended_gpu, conformance.perform_all, some, settings=SETTINGS)


@on("mpi-2")
def test_a_case_that_fails_is_named(world):
    """A failure among several cases names the case in which it happened."""
    wrong = conformance.Case("collectives", "no_such_case")
    with pytest.raises(RanksFailedError, match="collectives-no_such_case: module"):
        world.run(on_a_pretended_gpu, conformance.perform_all, [wrong], settings=SETTINGS)


# the pretended GPU itself


def test_the_pretended_gpu_refuses_what_a_gpu_refuses(place):
    """The pretended GPU refuses tensors of two devices in one operation, and ``numpy()``."""
    with place.there():
        there, here = torch.ones(3), torch.ones(3, device="cpu")
        assert type(there) is Pretended
        assert there.device == torch.device("cuda", 0)
        assert (there + 1.0 + torch.tensor(1.0, device="cpu")).tolist() == [3.0] * 3
        with pytest.raises(RuntimeError, match="expected all tensors on cuda:0, got one of shape"):
            there.add_(here)
        with pytest.raises(TypeError, match="its memory is none of NumPy's"):
            there.numpy()


def test_the_pretended_gpu_counts_what_waits_for_it(place):
    """The pretended GPU counts one wait for each call that reads a value on the host."""
    with place.there():
        x = torch.arange(3.0)
        before = Counter(waits.seen)
        torch.empty(3, device="cpu").copy_(x, non_blocking=True)
        assert not Counter(waits.seen) - before
        for wait in (x.cpu, x[0].item, x.tolist, lambda: torch.equal(x, x), x.nonzero):
            before = Counter(waits.seen)
            wait()
            assert sum((Counter(waits.seen) - before).values()) == 1, wait
