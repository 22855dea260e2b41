"""What ``join`` refuses, and how ranks that do not fit together inside it are told."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.conformance.join_reference import loss_of, made, train_epoch
from tests.support import LoopbackWorld, RanksFailedError
from tests.support.loops import on_each_rank


def test_tensors_scaled_by_their_senders_are_refused():
    """Nobody knows which share of a rank that is done to take over."""

    def case():
        model, optimizer = made("adapt_then_combine")
        other = 1 - bf.rank()
        optimizer.self_weight, optimizer.src_weights = 0.5, {other: 1.0}
        optimizer.dst_weights = {other: 0.5}
        with bf.join(optimizer):
            train_epoch(model, optimizer, 2 * bf.rank())

    words = r"join: dst_weights set by hand: expected a factor of 1 .* got \{0: 0.5\}"
    with pytest.raises(RanksFailedError, match=words):
        LoopbackWorld(2).run(case)


def test_a_rank_that_raises_holds_nobody_up():
    """The others are told by name that it is gone; its own error is the first."""

    def case():
        model, optimizer = made("adapt_with_combine")
        with bf.join(optimizer):
            train_epoch(model, optimizer, 1 + bf.rank())
            if bf.rank() == 1:
                raise ValueError("the data is gone")

    outcomes = LoopbackWorld(3).outcomes(case)
    assert outcomes[1].error == "ValueError"
    for rank in (0, 2):
        assert "PeerError" in outcomes[rank].bases
        told = outcomes[rank].message
        assert "rank 1 has left (it raised ValueError: the data is gone)" in told


def test_optimizers_used_in_another_order():
    """All ranks say which two ranks are about to do what."""

    def case():
        pairs = [made("adapt_then_combine"), made("adapt_then_combine")]
        with bf.join(*(optimizer for _, optimizer in pairs)):
            for model, optimizer in pairs[:: 1 - 2 * (bf.rank() == 2)]:
                train_epoch(model, optimizer, 1)

    words = (
        "rank 0 is about to begin a round of DistributedOptimizer0, but rank 2 to begin a round of "
        "DistributedOptimizer1; use the optimizers in the same order"
    )
    for outcome in LoopbackWorld(3).outcomes(case):
        assert outcome.error == "MismatchError"
        assert words in outcome.message


def test_another_collective_in_the_block():
    """A rank that is done cannot know of it: told to both, with the names."""

    def case():
        model, optimizer = made("adapt_then_combine")
        with bf.join(optimizer):
            train_epoch(model, optimizer, 1 + bf.rank())
            if bf.rank() == 1:
                bf.consensus_distance(model)

    for outcome in LoopbackWorld(2).outcomes(case):
        assert outcome.error == "MismatchError"
        assert "'join of DistributedOptimizer0'" in outcome.message
        assert "consensus_distance" in outcome.message


def test_a_call_of_one_rank_alone_is_named_as_the_user_called_it():
    """Not as what it does first."""

    def case(call):
        model = torch.nn.Linear(2, 2)
        calls = {
            "average_model": lambda: bf.average_model(model).__enter__(),
            "consensus_distance": lambda: bf.consensus_distance(model),
            "broadcast_parameters": lambda: bf.broadcast_parameters(model),
            "allreduce_parameters": lambda: bf.allreduce_parameters(model),
            "new_group": lambda: bf.new_group([0, 1]),
        }
        if bf.rank() == 0:
            with pytest.raises(bf.PeerLeftError, match=rf"^rank 0: {call} \(collective, number"):
                calls[call]()

    for call in ("average_model", "consensus_distance", "broadcast_parameters",
                 "allreduce_parameters", "new_group"):  # fmt: skip
        LoopbackWorld(2).run(case, call)


@on_each_rank(ranks=2)
def test_a_loss_that_is_no_number():
    """Ranks that are done can only stand in for one number."""
    model, optimizer = made("gradient_allreduce")

    def closure():
        loss_of(model, 0).backward()
        return torch.zeros(2)

    words = r"join: expected a closure that gives one number as its loss, .* shape \(2,\)"
    with bf.join(optimizer), pytest.raises(bf.ArgumentError, match=words):
        optimizer.step(closure)


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        ("nothing", bf.ArgumentError, "join: expected the distributed optimizers .* got none"),
        ("plain", bf.ArgumentError, "join: expected a DistributedOptimizer, got SGD; wrap"),
        ("twice", bf.UsageError, "join: DistributedOptimizer0 is in a join block already"),
        ("nested", bf.UsageError, "join: DistributedOptimizer0 is in a join block already"),
        (
            "hierarchical",
            bf.ArgumentError,
            "join: hierarchical_neighbor_allreduce needs all ranks in every round; .* such as "
            "neighbor_allreduce or allreduce",
        ),
        (
            "in backward",
            bf.ArgumentError,
            "join: with update_in_backward=True and a global communication, .* expected "
            "update_in_backward=False or communication='neighbor_allreduce'",
        ),
        (
            "barrier",
            bf.ArgumentError,
            "join: with force_barrier DistributedOptimizer0 waits for all ranks, and so for one "
            "that is done; expected force_barrier=False",
        ),
    ],
)
def test_what_cannot_be_joined(wrong, error, words):
    """They are refused on every rank, before anything is sent."""

    def given(optimizer):
        if wrong == "plain":
            return [torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)]
        return {"nothing": [], "twice": [optimizer, optimizer]}.get(wrong, [optimizer])

    def case():
        options = {}
        if wrong == "hierarchical":
            bf.set_machine_topology(topology.complete(1))
            options = {"communication": "hierarchical_neighbor_allreduce"}
        if wrong == "in backward":
            options = {"communication": "allreduce", "update_in_backward": True}
        _, optimizer = made("win_put" if wrong == "barrier" else "adapt_then_combine", **options)
        if wrong == "barrier":
            optimizer.force_barrier = True
        if wrong == "nested":
            with bf.join(optimizer), pytest.raises(error, match=words), bf.join(optimizer):
                pass
        else:
            with pytest.raises(error, match=words), bf.join(*given(optimizer)):
                pass

    LoopbackWorld(2).run(case)
