"""Where ranks of different speed lead each asynchronous method."""

from __future__ import annotations

import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from tests.support import LoopbackWorld
from tests.unit.algorithms.uneven_training import Pace, trained

pytestmark = pytest.mark.training

RANKS, TIME = 4, 600.0
BY_ROWS = [
    name
    for name, method in ALGORITHMS.items()
    if method.how[0].windowed and method().max_staleness is None
]
PAIRS = [name for name, method in ALGORITHMS.items() if method.needs.pairs]


def weighted_by_rates(slow):
    """The optimum that fast ranks would pull to: each rank's number, weighted by its steps."""
    rates = [1.0, 1.0, 1.0, 1.0 / slow]
    return sum(rank * rate for rank, rate in enumerate(rates)) / sum(rates)


def of_last_quarter(pace, method, **options):
    """This rank's number and scale, averaged over the last quarter of the time."""
    rank = bf.rank()
    step, model, wrapper = trained(method, **options)
    bf.barrier()
    seen, scale = [], 1.0
    while pace.times[rank] < TIME:
        step()
        pace.step(rank)
        if pace.times[rank] > 0.75 * TIME:
            seen.append(model.weight.item())
        if isinstance(wrapper, bf.DistributedOptimizer):
            scale = wrapper._averager.step_scale
    pace.done(rank)
    bf.barrier()
    return sum(seen) / len(seen), scale


def trained_beside_a_straggler(slow, method, **options):
    """The ranks' mean in the end, and their scales; rank 3 is slow."""
    pace = Pace([1.0, 1.0, 1.0, slow])
    got = LoopbackWorld(RANKS).run(of_last_quarter, pace, method, **options)
    return sum(number for number, _ in got) / RANKS, [scale for _, scale in got]


@pytest.mark.parametrize("method", ["push_sum", *PAIRS])
def test_ranks_of_any_speed_count_alike(method):
    """The mean is the optimum of the average loss, 1.5; scales are as the rates ask."""
    slow = 10.0
    mean, scales = trained_beside_a_straggler(slow, method, scale_steps=True)
    assert mean == pytest.approx(1.5, abs=0.1)
    reference = min((3 + 1 / slow) / 4, 4 / slow)
    assert scales[:3] == pytest.approx([reference] * 3, rel=0.15)
    assert scales[3] == pytest.approx(slow * reference, rel=0.15)


def test_push_sum_without_scaled_steps_tends_to_the_optimum_weighted_by_rates():
    """As BlueFog's does; with the option off."""
    mean, scales = trained_beside_a_straggler(10.0, "push_sum", scale_steps=False)
    assert mean == pytest.approx(weighted_by_rates(10.0), abs=0.1)
    assert scales == [1.0] * RANKS


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "method", [*(name for name in BY_ROWS if name != "push_sum"), "DecentralizedDataParallel"]
)
def test_methods_that_mix_by_rows_need_no_scale(method):
    """A slow rank mixes as seldom as it steps, which cancels: they reach 1.5 all the same."""
    mean, scales = trained_beside_a_straggler(10.0, method)
    assert mean == pytest.approx(1.5, abs=0.1)
    assert scales == [1.0] * RANKS


@pytest.mark.parametrize("method", PAIRS)
def test_pair_averages_lead_to_the_optimum_weighted_by_rates(method):
    """They keep the sum of all ranks, to which a fast rank adds more often, unless told not to."""
    mean, scales = trained_beside_a_straggler(10.0, method)
    assert mean == pytest.approx(weighted_by_rates(10.0), abs=0.1)
    assert scales == [1.0] * RANKS


@pytest.mark.parametrize("method", ["push_sum", *PAIRS])
def test_where_ranks_meet_no_step_is_scaled(method):
    """With force_barrier all ranks are equally fast."""

    def case():
        step, _, optimizer = trained(method, scale_steps=True)
        optimizer.force_barrier = True
        for _ in range(5):
            step()
        return optimizer._averager.step_scale

    assert LoopbackWorld(2).run(case) == [1.0, 1.0]


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("method", ["push_sum", *PAIRS])
def test_any_optimizer_is_scaled_by_what_it_changes(method, closure):
    """Adam, whose update does not depend on the size of gradients: half of its change counts."""

    def case():
        model = torch.nn.Linear(2, 1, dtype=torch.float64)
        bf.broadcast_parameters(model)
        plain = torch.nn.Linear(2, 1, dtype=torch.float64)
        plain.load_state_dict(model.state_dict())
        before = torch.cat([p.detach().reshape(-1).clone() for p in plain.parameters()])
        alone = torch.optim.Adam(plain.parameters())
        wrapped = torch.optim.Adam(model.parameters())
        optimizer = bf.DistributedOptimizer(wrapped, model, method, scale_steps=True)
        optimizer._averager.windows.step_rates.scale = 0.5
        for one, stepped in ((model, optimizer), (plain, alone)):

            def evaluate(one=one):
                loss = one(torch.ones(3, 2, dtype=torch.float64)).sum()
                loss.backward()
                return loss

            if closure:
                stepped.step(evaluate)
            else:
                evaluate()
                stepped.step()
        optimizer.param_groups[0]["lr"] = 0.0
        bf.barrier()
        optimizer.force_barrier = True
        for _ in range(40):  # until all that was given is collected, and all have the mean
            optimizer.step()
        after, whole = (
            torch.cat([p.detach().reshape(-1) for p in one.parameters()]) for one in (model, plain)
        )
        return after, (before + whole) / 2

    for after, half in LoopbackWorld(2).run(case):
        torch.testing.assert_close(after, half, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "given", "message"),
    [
        ("push_sum", 2, "scale_steps: expected True, False or None, got 2"),
        ("win_put", True, "scale_steps: win_put lets ranks of any speed count alike"),
    ],
)
def test_what_cannot_be_is_refused(method, given, message):
    """A value that is none, and a method that needs no scale."""

    def case():
        with pytest.raises(bf.ArgumentError) as caught:
            trained(method, scale_steps=given)
        return str(caught.value)

    assert all(message in told for told in LoopbackWorld(2).run(case))


def test_ranks_that_differ_in_it_are_told():
    """Making the window of the counts is collective."""

    def case():
        with pytest.raises(bf.MismatchError, match="scale_steps=") as caught:
            trained("push_sum", scale_steps=bf.rank() == 0)
        return str(caught.value)

    assert all("scale_steps=" in told for told in LoopbackWorld(2).run(case))
