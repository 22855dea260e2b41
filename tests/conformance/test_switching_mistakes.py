"""Switches that cannot be: refused in words, on all ranks, before anything ends."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld, on
from tests.support.bagua_net import LR, vector
from tests.support.bagua_training import Run, all_equal
from tests.support.loops import on_each_rank

adam = partial(bf.QAdamOptimizer, lr=LR, warmup_steps=4)


def goes_on(run):
    """Train on with what is in use; fails where the switch has left anything undone."""
    run.train(2)
    run.optimizer.switch_to("gradient_allreduce")
    run.train(1)
    return vector(run.model)


ON_ALL = {
    "unknown name": (
        {"algorithm": "decentralised"},
        bf.UnknownNameError,
        "Did you mean 'decentralized'",
    ),
    "unknown option": (
        {"algorithm": "decentralized", "communication_intervall": 2},
        bf.ArgumentError,
        r"decentralized has no such option.*Did you mean 'communication_interval'",
    ),
    "option of another method": (
        {"algorithm": "bytegrad", "peer_selection_mode": "all"},
        bf.ArgumentError,
        "argument peer_selection_mode: bytegrad has no such option",
    ),
    "value": (
        {"algorithm": "choco_sgd", "consensus_step": 2.0},
        bf.ArgumentError,
        "argument consensus_step: .* got 2.0",
    ),
    "interval": (
        {"algorithm": "low_precision_decentralized", "communication_interval": 0},
        bf.ArgumentError,
        "argument communication_interval: expected a whole number of at least 1, got 0",
    ),
    "interval of another type": (
        {"algorithm": "decentralized", "communication_interval": "often"},
        bf.ArgumentError,
        "argument communication_interval: .* got 'often'",
    ),
    "interval and its like": (
        {"algorithm": "decentralized", "num_steps_per_communication": 2},
        bf.ArgumentError,
        "decentralized takes communication_interval, .* here 1; expected 1, got 2",
    ),
    "compressor": (
        {"algorithm": "bytegrad", "compression": "minmax"},
        bf.UnknownNameError,
        "minmax_uint8",
    ),
    "compressor that diverges": (
        {"algorithm": "low_precision_decentralized", "compression": "top_k"},
        bf.ArgumentError,
        "diverges with few bits.*choco_sgd",
    ),
    "compressed parameters": (
        {"algorithm": "decentralized", "compression": "sign"},
        bf.ArgumentError,
        "keeps ranks apart.*plain_compression=True",
    ),
    "communication": (
        {"algorithm": "choco_sgd", "communication": "allreduce"},
        bf.ArgumentError,
        "argument communication: choco_sgd works with",
    ),
    "graph": (
        {"algorithm": "choco_sgd", "topology": topology.ring(3, style="right")},
        topology.TopologyError,
        "choco_sgd cannot run on ring",
    ),
    "number of ranks": (
        {"algorithm": "decentralized", "peer_selection_mode": "shift_one"},
        topology.TopologyError,
        "got n=3",
    ),
    "optimizer": ({"algorithm": "qadam"}, bf.ArgumentError, r"asyncddp\.QAdamOptimizer, got SGD"),
    "update in backward": (
        {"algorithm": "bytegrad", "update_in_backward": True},
        bf.ArgumentError,
        "argument update_in_backward: bytegrad averages gradient_ready",
    ),
    "buckets": (
        {"algorithm": "bytegrad", "bucket_size_in_mb": -1},
        bf.ArgumentError,
        "argument bucket_size_in_mb",
    ),
    "staleness": (
        {"algorithm": "bytegrad", "max_staleness": 3},
        bf.ArgumentError,
        "argument max_staleness: bytegrad has no windows",
    ),
    "replicas": (
        {"algorithm": "bytegrad", "replicas": "mean"},
        bf.ArgumentError,
        "argument replicas: expected one of 'average', 'rank0', 'keep', got 'mean'",
    ),
}


@pytest.mark.parametrize("mistake", ON_ALL)
def test_a_mistake_on_all_ranks(mistake):
    """Every rank raises what a constructor would raise, and trains on by the method in use."""
    arguments, kind, words = ON_ALL[mistake]

    def case():
        run = Run("adapt_with_combine", topology=topology.ring(3))
        run.train(2)
        before = vector(run.model)
        with pytest.raises(kind, match=words):
            run.optimizer.switch_to(**arguments)
        assert run.optimizer.algorithm == "adapt_with_combine"
        assert torch.equal(before, vector(run.model))
        assert run.optimizer.round == 2
        return goes_on(run)

    assert all_equal(LoopbackWorld(3).run(case))


@pytest.mark.parametrize("mistake", [name for name in ON_ALL if name != "replicas"])
def test_a_mistake_in_a_schedule(mistake):
    """What a schedule asks for later is refused when the wrapper is made."""
    arguments, kind, words = ON_ALL[mistake]
    own = {key: value for key, value in arguments.items() if key != "algorithm"}

    def case():
        with pytest.raises(kind, match=words):
            Run("adapt_then_combine", switch_at={1000: (arguments["algorithm"], own)})

    LoopbackWorld(3).run(case)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({0: "bytegrad"}, "step: expected a whole number of at least 1, got 0"),
        ({"5": "bytegrad"}, "step: expected a whole number of at least 1, got '5'"),
        ({5: 7}, "argument algorithm: expected one of .* got 7"),
        (["bytegrad"], "argument switch_at: expected a mapping"),
    ],
)
def test_schedules_that_are_none(schedule, words):
    """Steps are whole numbers from 1 on."""
    (outcome,) = LoopbackWorld(1).outcomes(Run, "gradient_allreduce", switch_at=schedule)
    assert outcome.error == "ArgumentError"
    assert re.search(words, outcome.message)


# ranks that disagree

DISAGREEMENTS = {
    "algorithm": (
        lambda rank: ("decentralized" if rank == 1 else "bytegrad", {}),
        "rank 0 has bytegrad.* rank 1 has decentralized",
    ),
    "option": (
        lambda rank: ("decentralized", {"communication_interval": 1 + rank // 2}),
        "rank 0 has decentralized, communication_interval=1 .* rank 2 has decentralized, "
        "communication_interval=2",
    ),
    "compression": (
        lambda rank: ("bytegrad", {"compression": "fp16" if rank == 2 else "bf16"}),
        "rank 0 has .*'bf16'.* rank 2 has .*'fp16'",
    ),
    "replicas": (
        lambda rank: ("bytegrad", {"replicas": "rank0" if rank else "average"}),
        "rank 0 has .*replicas='average', and rank 1 has .*replicas='rank0'",
    ),
}


def disagree(name):
    of_rank, words = DISAGREEMENTS[name]
    run = Run("decentralized", alike=True)
    run.train(2)
    algorithm, arguments = of_rank(bf.rank())
    with pytest.raises(bf.MismatchError, match=words) as caught:
        run.optimizer.switch_to(algorithm, **arguments)
    assert "switch_to needs the same arguments on all ranks" in str(caught.value)
    assert run.optimizer.algorithm == "decentralized"
    return goes_on(run)


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree(name):
    """All raise MismatchError, which names two ranks and what they want, and train on."""
    assert all_equal(LoopbackWorld(3).run(disagree, name))


@on("shared_memory-2")
def test_processes_that_disagree(world):
    """The same between processes."""
    assert all_equal(world.run(disagree, "algorithm"))


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"algorithm": "bytegrat"}, "UnknownNameError", "Did you mean 'bytegrad'"),
        ({"algorithm": "choco_sgd", "consensus_step": -1.0}, "ArgumentError", "got -1.0"),
        ({"algorithm": "choco_sgd", "compression": "none"}, "UnknownNameError", "minmax_uint8"),
        (
            {"algorithm": "decentralized", "peer_selection_mode": "shift_one"},
            "TopologyError",
            "got n=3",
        ),
    ],
)
def test_a_mistake_on_one_rank(arguments, kind, words):
    """It raises what is wrong; the others hear of it at once, as MismatchError with its words."""

    def case():
        run = Run("decentralized", alike=True)
        algorithm = arguments["algorithm"] if bf.rank() == 1 else "bytegrad"
        own = {key: value for key, value in arguments.items() if key != "algorithm"}
        run.optimizer.switch_to(algorithm, **(own if bf.rank() == 1 else {}))

    outcomes = LoopbackWorld(3).outcomes(case)
    assert [one.error for one in outcomes] == ["MismatchError", kind, "MismatchError"]
    assert all(words in one.message for one in outcomes)
    assert "rank 0 has bytegrad" in outcomes[2].message
    assert "rank 1 has an error" in outcomes[2].message


@on_each_rank(ranks=3)
def test_ranks_at_different_steps():
    """Who has made more steps is named with their number."""
    run = Run("gradient_allreduce", communication="empty")
    run.train(2 + bf.rank() // 2)
    words = "rank 0 has step 2, and rank 2 has step 3"
    with pytest.raises(bf.MismatchError, match=words):
        run.optimizer.switch_to("bytegrad")


@on_each_rank(ranks=2)
def test_a_schedule_that_is_not_everybodys():
    """The switch itself finds it, at the step at which some begin another method."""
    schedule = {2: "decentralized" if bf.rank() else "bytegrad"}
    run = Run("gradient_allreduce", switch_at=schedule)
    run.train(1)
    with pytest.raises(bf.MismatchError, match=r"algorithm .bytegrad.*decentralized"):
        run.train(1)


# inside join


def test_a_switch_inside_join():
    """Ranks may have made different numbers of steps there: refused, and possible after."""

    def case():
        run = Run("gradient_allreduce", alike=True)
        with bf.join(run.optimizer):
            run.train(2)
            with pytest.raises(
                bf.UsageError, match="switch_to was called after step 2, inside join"
            ):
                run.optimizer.switch_to("bytegrad")
            run.train(bf.rank())
        run.optimizer.switch_to("bytegrad")
        run.train(2)
        return vector(run.model)

    assert all_equal(LoopbackWorld(3).run(case))


@on_each_rank(ranks=2)
def test_a_schedule_inside_join():
    """Where its step falls into the block, the message says so."""
    run = Run("gradient_allreduce", alike=True, switch_at={2: "bytegrad"})
    with bf.join(run.optimizer):
        run.train(1)
        with pytest.raises(bf.UsageError, match="a switch to bytegrad is due after step 2"):
            run.train(1)


@on_each_rank(ranks=2)
def test_a_warm_up_that_ends_inside_join():
    """qadam begins to average something else, which those who are done would not know of."""
    run = Run("qadam", alike=True, make=adam)
    with bf.join(run.optimizer):
        run.train(2)
        with pytest.raises(bf.UsageError, match="the warm-up of qadam ends after step 3"):
            run.train(1)


def test_warm_ups_before_and_after_join():
    """A block in the warm-up, and one in the second stage, both with uneven inputs."""

    def case(warmup):
        make = partial(bf.QAdamOptimizer, lr=LR, warmup_steps=warmup)
        run = Run("qadam", alike=True, make=make)
        run.train(3)
        with bf.join(run.optimizer):
            run.train(2 + bf.rank())
        run.train(3)
        return vector(run.model)

    for warmup in (3, 10):
        assert all_equal(LoopbackWorld(3).run(case, warmup))
