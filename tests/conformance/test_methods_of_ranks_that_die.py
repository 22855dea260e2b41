"""In elastic runs all methods train on where ranks die; exact ones to the survivors' optimum."""

from __future__ import annotations

import random

import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from tests.support.methods import every_step, sgd_for

RANKS, DEAD = 4, 2
EXACT = [
    "gradient_allreduce",
    "gradient_tracking",
    "push_diging",
    "exact_diffusion",
    "extra",
    "edm",
]


class DiesError(Exception):
    """End of a rank in the middle of its training."""


def least_squares(rank):
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(12, width, generator=generator).double() for width in (6, 1)]


def train(name, plan, steps, results, *, lr=0.03):
    """Train on this rank's least squares; ranks die at the steps of a plan."""
    rank = bf.rank()
    model = torch.nn.Linear(6, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 0.1)
    optimizer = sgd_for(name, lr, 0.0)(model.parameters())
    optimizer = bf.DistributedOptimizer(optimizer, model, algorithm=name, **every_step(name))
    inputs, targets = least_squares(rank)
    for k in range(steps):
        if plan.get(rank) == k:
            raise DiesError
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if k % 7 == 0:
            bf.allreduce(torch.ones(1))
    results[rank] = model.weight.detach().clone()


def survivors(name, plan, steps, ranks=RANKS):
    """The survivors' models after training; nobody but the dead has failed."""
    results = {}
    with (
        pytest.raises(bf.RankError, match="raised DiesError") as raised,
        bf.local_world(ranks, elastic=True, timeout=30) as world,
    ):
        world.run(train, name, plan, steps, results)
    living = [rank for rank in range(ranks) if rank not in plan]
    assert sorted(results) == living, f"{name} {plan}: {raised.value}"
    return results


@pytest.mark.parametrize("name", EXACT)
def test_exact_methods_come_to_the_optimum_of_the_survivors(name):
    """Trackers, corrections and duals begin anew at one round of all."""
    models = survivors(name, {DEAD: 20}, 1500)
    parts = [least_squares(rank) for rank in models]
    inputs, targets = (torch.cat(one) for one in zip(*parts, strict=True))
    best = torch.linalg.lstsq(inputs, targets).solution.T
    assert all((model - best).abs().max() < 1e-9 for model in models.values())


def test_replicas_of_averaged_gradients_stay_equal_bit_by_bit():
    """Whatever was under way is made again by all survivors."""
    models = list(survivors("gradient_allreduce", {DEAD: 20}, 60).values())
    assert all(torch.equal(model, models[0]) for model in models)


@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - {"qadam"}))
def test_every_method_goes_on(name):
    """A rank dies in the middle; qadam needs an optimizer of its own."""
    models = survivors(name, {DEAD: 13}, 40)
    assert all(model.isfinite().all() for model in models.values())


@pytest.mark.parametrize("seed", range(12))
def test_any_ranks_may_die_at_any_time(seed):
    """All but one, the lowest, several at once or one after the other; seeds name the histories."""
    chance = random.Random(seed)
    name = chance.choice(["adapt_then_combine", "gradient_allreduce", "choco_sgd", "win_put"])
    ranks = chance.choice([3, 4, 5, 6])
    victims = chance.sample(range(ranks), chance.randint(1, ranks - 1))
    begins = chance.randrange(2, 40)
    plan = {victim: begins + chance.choice([0, 0, 1, 3, 10]) for victim in victims}
    survivors(name, plan, 60, ranks)


def test_push_sum_gives_nothing_to_ranks_from_which_nothing_comes_back():
    """Its windows keep their edges, and ranks 1 and 4 are not joined any more: p stays above 0."""
    models = survivors("push_sum", {0: 300, 2: 500, 3: 600, 5: 800}, 1500, 6)
    assert all(model.isfinite().all() and model.abs().max() < 10 for model in models.values())


@pytest.mark.parametrize("dead", [0, 2])
def test_survivors_save_checkpoints_that_all_can_load(tmp_path, dead):
    """The lowest survivor writes what rank 0 wrote; replicas of all ranks there are no more."""

    def saves(results):
        torch.manual_seed(bf.rank())
        model = torch.nn.Linear(2, 1)
        bf.barrier()
        if bf.rank() == dead:
            raise DiesError
        bf.barrier()
        bf.save_checkpoint(tmp_path, model, step=3)
        bf.save_checkpoint(tmp_path, model, step=4, replicas="rank0")
        with pytest.raises(bf.ArgumentError, match=f"run goes on without rank {dead},"):
            bf.save_checkpoint(tmp_path, model, step=5, replicas="all")
        with bf.average_model(model):
            results[bf.rank()] = model.weight.detach().clone()

    results = {}
    with (
        pytest.raises(bf.RankError, match="raised DiesError") as raised,
        bf.local_world(RANKS, elastic=True, timeout=30) as world,
    ):
        world.run(saves, results)
    assert len(results) == RANKS - 1, raised.value

    def loads():
        model = torch.nn.Linear(2, 1)
        step = bf.load_checkpoint(tmp_path, model, step=3).step
        return step, model.weight.detach().clone()

    with bf.local_world(2) as world:
        for step, weight in world.run(loads):
            assert step == 3
            assert torch.equal(weight, next(iter(results.values())))
