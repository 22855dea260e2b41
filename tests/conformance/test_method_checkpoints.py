"""Checkpoints of every method: a run that is saved and loaded goes on bit for bit."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from asyncddp.algorithms import ALGORITHMS
from asyncddp.algorithms.method_traits import AveragedQuantity
from asyncddp.compression import COMPRESSORS
from tests.support import LoopbackWorld, on
from tests.support.bagua_net import LR, momentum_sgd, net, vector
from tests.support.bagua_training import Run, all_equal
from tests.support.loops import on_each_rank
from tests.support.methods import sgd_for

STEPS, SAVED = 8, 3
NO_DEFAULT_GRAPH = [
    name
    for name in ALGORITHMS
    if ALGORITHMS[name]().default_topology(4) is None
    and ALGORITHMS[name].what is AveragedQuantity.PARAMETER
]


def adam(warmup):
    return partial(bf.QAdamOptimizer, lr=LR, warmup_steps=warmup)


def made(method, **options):
    """A run, in which one-sided methods meet in each round, so that all is determined."""
    if method in NO_DEFAULT_GRAPH:
        options = {"topology": topology.ring(bf.size()), **options}
    make = adam(6) if method == "qadam" else sgd_for(method, LR)
    options = {"make": make, **options}
    run = Run(method, **options)
    run.optimizer.force_barrier = ALGORITHMS[method].how[0].one_sided
    return run


def saved(run):
    """A file of model and optimizer, as users write it."""
    file = io.BytesIO()
    content = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
    torch.save(content, file)
    return file.getvalue()


def load(run, file, step):
    content = torch.load(io.BytesIO(file), weights_only=True)
    run.model.load_state_dict(content["model"])
    run.optimizer.load_state_dict(content["optimizer"])
    run.step = step


def end(run):
    """All that a run has come to; what torch keeps as it is for the optimizer is among it."""
    result, optimizer = run.result(), run.optimizer
    moments = [one for state in result.optimizer_state for _, one in sorted(state.items())]
    tensors = [result.vector, *(torch.as_tensor(one).double().flatten() for one in moments)]
    return torch.cat([one.double() for one in tensors]), optimizer.algorithm, optimizer.counters


def check_same(one, other):
    assert one[1:] == other[1:]
    assert torch.equal(one[0], other[0])


def resumed(method, at, **options):
    """Go through; then save, build anew, load and go on; then load into what has gone on."""
    run = made(method, **options)
    run.train(at)
    file = saved(run)
    run.train(STEPS - at)
    through = end(run)
    bf.barrier()
    again = made(method, **options)
    again.train(1)  # whatever it has done is forgotten
    load(again, file, at)
    bf.barrier()
    again.train(STEPS - at)
    check_same(end(again), through)
    load(run, file, at)
    bf.barrier()
    run.train(STEPS - at)
    check_same(end(run), through)


AVERAGED = [*({"compression": name} for name in COMPRESSORS), {"compression": "qsgd_int4"}]
AVERAGED[-1]["error_feedback"] = True
DIFFERENCES = [{"compression": name, "consensus_step": 0.1} for name in COMPRESSORS]
COMPRESSED = [
    *(("gradient_allreduce", options) for options in AVERAGED[::2]),
    *(("choco_sgd", options) for options in DIFFERENCES[1::2]),
    *(("qadam", {"compression": name}) for name in ("sign", "power_sgd", "random_k")),
    ("bytegrad", {"error_feedback": True}),
    ("diloco", {"compression": "sign", "communication_interval": 2}),
    ("streaming_diloco", {"compression": "qsgd_int4", "communication_interval": 1}),
    ("low_precision_decentralized", {"compression": "qsgd_int8"}),
    ("decentralized", {"compression": "qsgd_int8", "plain_compression": True}),
    ("adapt_then_combine", {"compression": "random_k", "plain_compression": True}),
]


@pytest.mark.parametrize("method", list(ALGORITHMS))
def test_every_method_goes_on_as_if_nothing_had_been(method):
    """Parameters, moments, replicas, rounds and steps of several buckets: the same bits."""
    LoopbackWorld(3).run(resumed, method, SAVED, cap=600)


@on("mpi-2")
def test_between_processes(world):
    """The same where ranks are processes."""
    for method in ("low_precision_decentralized", "choco_sgd", "bytegrad"):
        world.run(resumed, method, SAVED)


@pytest.mark.parametrize(
    ("method", "options"),
    COMPRESSED,
    ids=lambda one: one if isinstance(one, str) else "-".join(map(str, one.values())),
)
def test_every_compressor_goes_on(method, options):
    """Residuals, factors of low rank, and seeds of random choices, of both messages."""
    LoopbackWorld(2).run(resumed, method, SAVED, cap=600, **options)


@pytest.mark.parametrize("at", [0, 3, 5, 6, 7])
@pytest.mark.parametrize("method", ["qadam", "choco_sgd", "gradient_allreduce"])
def test_whenever_it_is_saved(method, at):
    """Before the first step; in qadam's warm-up, as it ends, and after."""
    LoopbackWorld(2).run(resumed, method, at, compression="sign")


@pytest.mark.parametrize("method", ["decentralized", "low_precision_decentralized"])
@pytest.mark.parametrize("at", [0, 3, 4, 5])
def test_within_an_interval(method, at):
    """The count of steps since the last exchange goes on."""
    LoopbackWorld(2).run(resumed, method, at, communication_interval=3)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_while_a_round_is_under_way(at):
    """It is over for the state, and what it has brought is applied when it was to be."""
    options = {"communication_interval": 3, "fragments": 2, "delay": 2, "cap": 600}
    LoopbackWorld(2).run(resumed, "streaming_diloco", at, **options)


@pytest.mark.parametrize("at", [2, 3, 5, 6, 8])
def test_after_switches_of_a_schedule(at):
    """The state says how many steps were made, and so which method goes on, with what it keeps."""
    schedule = {
        3: ("choco_sgd", {"compression": "top_k", "consensus_step": 0.1}),
        6: ("low_precision_decentralized", {"communication_interval": 2}),
    }
    LoopbackWorld(3).run(resumed, "bytegrad", at, switch_at=schedule)


@pytest.mark.parametrize("at", [2, 4, 6, 8])
def test_in_the_warm_up_of_a_method_that_was_switched_to(at):
    """qadam begins in step 3, and its second stage in step 6."""
    schedule = {3: ("qadam", {"compression": "power_sgd"})}
    LoopbackWorld(2).run(resumed, "decentralized", at, switch_at=schedule, make=adam(6))


@pytest.mark.parametrize("method", ["low_precision_decentralized", "gradient_allreduce"])
@on_each_rank(ranks=3)
def test_after_a_switch_by_hand(method):
    """The method has to be switched to before; without that the message says so."""
    options = {"communication_interval": 2} if method.endswith("decentralized") else {}
    run = made("bytegrad")
    run.train(2)
    run.optimizer.switch_to(method, **options)
    run.train(SAVED - 2)
    file = saved(run)
    run.train(STEPS - SAVED)
    through = end(run)
    other = made("bytegrad")
    if ALGORITHMS[method].what is AveragedQuantity.PARAMETER:
        words = f"the state is of {method}, but bytegrad is in use; call switch_to.'{method}'"
        with pytest.raises(bf.ArgumentError, match=words):
            load(other, file, SAVED)
        other = made("bytegrad")
    other.optimizer.switch_to(method, **options)
    load(other, file, SAVED)
    assert other.optimizer.algorithm == method
    other.train(STEPS - SAVED)
    check_same(end(other), through)


@pytest.mark.parametrize("method", ["choco_sgd", "low_precision_decentralized"])
@on_each_rank(ranks=3)
def test_buckets_of_another_size(method):
    """Replicas are kept by parameter: what ranks know of each other is right in any buckets."""
    run = made(method, compression="bf16")
    run.train(SAVED)
    file = saved(run)
    before = run.optimizer.state_dict()["asyncddp"]["parameters"]
    other = made(method, compression="bf16", cap=600)
    load(other, file, SAVED)
    after = other.optimizer.state_dict()["asyncddp"]["parameters"]
    assert before.keys() == after.keys()
    for name, kept in before.items():
        assert kept.keys() == after[name].keys()
        assert all(torch.equal(kept[key], after[name][key]) for key in kept)
    run.train(STEPS - SAVED)
    other.train(STEPS - SAVED)
    torch.testing.assert_close(vector(run.model), vector(other.model), rtol=0, atol=1e-6)


def test_buckets_of_another_size_owe_nothing():
    """Residuals are those of whole buckets: in others they begin anew, alike on all ranks."""

    def case():
        run = made("gradient_allreduce", compression="sign", alike=True)
        run.train(SAVED)
        other = made("gradient_allreduce", compression="sign", alike=True, cap=600)
        load(other, saved(run), SAVED)
        other.train(STEPS - SAVED)
        return vector(other.model)

    assert all_equal(LoopbackWorld(3).run(case))


def plain_state(method):
    model = net(0)
    plain = momentum_sgd(model.parameters())
    model(torch.ones(2, 2)).sum().backward()
    plain.step()
    run = made(method, alike=True, communication_interval=3)
    run.train(2)
    run.optimizer.load_state_dict(plain.state_dict())
    run.train(1)
    return run.optimizer.round


@pytest.mark.parametrize("method", ["decentralized", "low_precision_decentralized"])
def test_the_state_of_a_plain_optimizer(method):
    """Counting begins anew: the first step exchanges."""
    assert LoopbackWorld(2).run(plain_state, method) == [1, 1]


def test_a_plain_state_past_the_warm_up():
    """QAdamOptimizer says which stage it is in, whoever saved it."""

    def case():
        run = made("qadam", alike=True)
        run.train(7)
        plain = {k: v for k, v in run.optimizer.state_dict().items() if k != "asyncddp"}
        file = io.BytesIO()
        torch.save({"model": run.model.state_dict(), "optimizer": plain}, file)
        run.train(2)
        other = made("qadam", alike=True)
        load(other, file.getvalue(), 7)
        other.train(2)
        return torch.equal(vector(run.model), vector(other.model))

    assert LoopbackWorld(2).run(case) == [True, True]
