"""``DecentralizedDataParallel`` under a search: backward passes make the steps that it measures."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from tests.support import LoopbackWorld
from tests.unit.optim.autotune_reference import buckets_of, short
from tests.unit.parallel.parallel_reference import make_ddp, mlp, of_batch, vector


def sgd(parameters):
    """The plain optimizer."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(steps, **options):
    """Parameters after some steps, and the buckets of each."""
    model, seen = mlp(bf.rank()), []
    ddp = make_ddp(model, sgd, **options)
    for step in range(steps):
        seen.append(len(buckets_of(ddp._reducer.optimizer)))
        of_batch(ddp, bf.rank(), step).backward()
    return vector(model), seen, ddp


@pytest.mark.parametrize("algorithm", ["adapt_then_combine", "gradient_allreduce"])
def test_training_is_as_without_a_search(algorithm):
    """Bit by bit; the search ends, and tries other buckets."""

    def case():
        want, *_ = trained(30, algorithm=algorithm)
        got, seen, ddp = trained(30, algorithm=algorithm, autotune=short())
        assert ddp.autotune.done
        assert len(set(seen)) > 1
        return torch.equal(got, want), ddp.steps

    assert LoopbackWorld(2).run(case) == [(True, 30)] * 2


def test_a_pass_that_fails_counts_as_a_step_of_the_search():
    """The rank on which it failed changes its buckets with the others."""

    def case():
        model, seen = mlp(bf.rank()), []
        ddp = make_ddp(model, sgd, algorithm="adapt_then_combine", autotune=short())
        for step in range(40):
            seen.append(len(buckets_of(ddp._reducer.optimizer)))
            loss = of_batch(ddp, bf.rank(), step)
            if step == 6 and bf.rank() == 1:
                handle = next(model.parameters()).register_hook(_fail)
                with pytest.raises(ArithmeticError):
                    loss.backward()
                handle.remove()
            else:
                loss.backward()
        return seen[8:], ddp.autotune.done

    every = LoopbackWorld(2).run(case)
    assert every == [every[0]] * 2
    assert every[0][1]


def _fail(gradient):
    raise ArithmeticError("in the backward pass")


def test_the_search_goes_on_after_a_resume():
    """The choice is part of the optimizer's state."""

    def case():
        _, _, ddp = trained(30, algorithm="adapt_then_combine", autotune=short())
        _, _, other = trained(0, algorithm="adapt_then_combine", autotune=short())
        other.load_optim_state_dict(ddp.optim_state_dict())
        return other.autotune.result.setting == ddp.autotune.result.setting

    assert LoopbackWorld(2).run(case) == [True, True]


def test_the_default_algorithm_is_refused_in_words():
    """Its buckets are cut once."""

    def case():
        assert make_ddp(mlp(0), sgd, autotune=False).autotune is None
        with pytest.raises(bf.ArgumentError, match="the default algorithm cuts its buckets once"):
            make_ddp(mlp(0), sgd, autotune=True)

    LoopbackWorld(2).run(case)
