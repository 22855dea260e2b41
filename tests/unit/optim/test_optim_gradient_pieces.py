"""A gradient that comes in pieces, from backward passes inside of one, is averaged as a whole."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from tests.support import LoopbackWorld
from tests.support.gradient_pieces import KINDS, InPieces, loss_of, train_in_one_process, vector
from tests.support.methods import sgd_for
from tests.support.pairwise import pairwise

RANKS, STEPS, LR = 3, 4, 0.05
GRADIENT_METHODS = {
    "gradient_allreduce": {"algorithm": "gradient_allreduce"},
    "sum": {"algorithm": "gradient_allreduce", "average": False},
    "fp16": {"algorithm": "gradient_allreduce", "compression": "fp16"},
    "bytegrad": {"algorithm": "bytegrad"},
    "qadam": {"algorithm": "qadam"},
}
PARAMETER_METHODS = {
    "adapt_then_combine": {"algorithm": "adapt_then_combine"},
    "adapt_with_combine": {"algorithm": "adapt_with_combine"},
    "choco_sgd": {"algorithm": "choco_sgd", "compression": "minmax_uint8"},
}


def trained(kind, nested, interval, passes, options):
    """This rank's parameters and rounds, after steps of so many passes each."""
    model, name = InPieces(kind, nested=nested), options["algorithm"]
    if name == "qadam":
        plain = bf.QAdamOptimizer(model.parameters(), lr=0.01, warmup_steps=2)
    else:
        plain = sgd_for(name, LR, momentum=0.0)(model.parameters())
    optimizer = bf.DistributedOptimizer(
        plain,
        model,
        num_steps_per_communication=interval,
        bucket_size_in_mb=1e-4,  # a parameter or two in each
        **options,
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * passes, (step + 1) * passes):
            loss_of(model, bf.rank(), number).backward()
        optimizer.step()
    return vector(model), optimizer.round


def assert_as_whole(got, want):
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.training
@pairwise(options=GRADIENT_METHODS, passes=[1, 2], kind=KINDS)
def test_averages_of_gradients(options, passes, kind):
    """What autograd sums in one piece, and what comes in several, gives the same average.

    That is so as well where a parameter gets more pieces than ever before, after its first ones
    were sent, on some ranks alone: all of them then average once more.
    """
    whole = LoopbackWorld(RANKS).run(trained, kind, False, passes, passes, options)
    pieces = LoopbackWorld(RANKS).run(trained, kind, True, passes, passes, options)
    for (want, rounds), (got, others) in zip(whole, pieces, strict=True):
        assert_as_whole(got, want)
        assert others > rounds if kind == "varying" else others == rounds


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("passes", [1, 2])
def test_it_is_the_average_of_one_process(passes, kind):
    """Training is that of one process with the batches of all ranks."""
    options = GRADIENT_METHODS["gradient_allreduce"]
    want = train_in_one_process(kind, RANKS, STEPS, LR, passes)
    for got, _ in LoopbackWorld(RANKS).run(trained, kind, True, passes, passes, options):
        assert_as_whole(got, want)


@pairwise(options=PARAMETER_METHODS, kind=KINDS)
def test_pieces_are_no_passes(options, kind):
    """With two passes for an average, pieces of one pass count as one."""
    whole = LoopbackWorld(RANKS).run(trained, kind, False, 2, 1, options)
    pieces = LoopbackWorld(RANKS).run(trained, kind, True, 2, 1, options)
    for (want, rounds), (got, others) in zip(whole, pieces, strict=True):
        assert_as_whole(got, want)
        assert others == rounds == STEPS // 2


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["shared", "mixed", "reversible"])
def test_buckets_go_during_the_pass(kind, nested):
    """From the second pass on a gradient is sent with its last piece, whatever is under way."""

    def case():
        model, sent = InPieces(kind, nested=nested), []
        sgd = torch.optim.SGD(model.parameters(), LR)
        optimizer = bf.DistributedOptimizer(
            sgd, model, "gradient_allreduce", bucket_size_in_mb=1e-4
        )
        phase = optimizer._phase
        hook = model.first.weight.register_post_accumulate_grad_hook(
            lambda parameter: sent.append(phase._next_bucket)
        )
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, bf.rank(), step).backward()
            optimizer.step()
        hook.remove()  # a cycle through it is none that Python sees
        return sent, len(phase._buckets)

    for sent, buckets in LoopbackWorld(2).run(case):
        assert sent == [0, buckets - 1, buckets - 1]
        assert buckets > 2


def test_an_update_in_backward_is_refused():
    """The update has used the first piece when the next one comes: the error says what to do."""

    def case():
        model = InPieces("shared", nested=True)
        sgd = torch.optim.SGD(model.parameters(), LR)
        optimizer = bf.DistributedOptimizer(sgd, model, update_in_backward=True)
        with pytest.raises(bf.UsageError, match=r"another gradient in one backward.*use_reentrant"):
            loss_of(model, bf.rank(), 0).backward()
        return optimizer

    LoopbackWorld(2).run(case)


def test_a_failed_pass_is_no_lasting_one():
    """Passes are counted anew after one that has failed, also where the model is not called."""

    def case():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        sgd = torch.optim.SGD(model.parameters(), LR)
        optimizer = bf.DistributedOptimizer(sgd, model, num_steps_per_communication=2)

        def backward(hook=None):
            inner = model[0](torch.ones(1, 2))
            if hook is not None:
                inner.register_hook(hook)
            model[1](inner).sum().backward()

        def failing(gradient):
            raise ValueError("half-way")

        with pytest.raises(ValueError, match="half-way"):
            backward(failing)
        optimizer.step()
        for _ in range(4):
            optimizer.zero_grad()
            backward()
            backward()
            optimizer.step()
        return optimizer.round

    assert LoopbackWorld(2).run(case) == [4, 4]
