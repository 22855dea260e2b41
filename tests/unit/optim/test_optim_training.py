"""What users do around ``step()``: accumulation, closures, schedulers, clipping, GradScaler."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import asyncddp as bf
from asyncddp import topology
from tests.support import LoopbackWorld
from tests.unit.optim.optim_reference import (
    METHODS,
    PARAMETER_METHODS,
    SkippingOnce,
    assign,
    batch,
    mlp,
    square_loss,
    train_by_matrix,
    train_here,
    vector,
)

pytestmark = pytest.mark.training

GRAPH = topology.one_peer_exponential(4)
RANKS = 4
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
every_method = pytest.mark.parametrize("method", METHODS)
in_backward = pytest.mark.parametrize("update_in_backward", [False, True])


def wrapped(method, model, make=sgd, **options):
    return bf.DistributedOptimizer(
        make(model.parameters()), model, method, **{"topology": GRAPH, **options}, broadcast=False
    )


def start(method):
    """A model from which the method may start."""
    return mlp(0 if method == "gradient_allreduce" else bf.rank())


def assert_all_close(got, expected):
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


# the rhythm of averaging


@pytest.mark.parametrize("method", PARAMETER_METHODS)
@pytest.mark.parametrize("every", [2, 3])
def test_local_steps_between_averagings(method, every):
    """J times backward and step: the J-th step averages, the others are local."""
    expected = train_by_matrix(
        method, GRAPH, sgd, 7, averages=lambda step: step % every == every - 1
    )
    got = LoopbackWorld(RANKS).run(
        train_here, method, GRAPH, sgd, 7, num_steps_per_communication=every
    )
    assert_all_close(got, expected)


def accumulating(method, every, passes, steps, **options):
    """``passes`` backward passes for each step."""
    model = start(method)
    optimizer = wrapped(method, model, num_steps_per_communication=every, **options)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(passes):
            (square_loss(model, batch(bf.rank(), step)[part : part + 1]) / 5).backward()
        optimizer.step()
    return vector(model), optimizer.round


def rowwise_loss(model, x):
    return sum(square_loss(model, x[part : part + 1]) / 5 for part in range(5))


@every_method
@pytest.mark.parametrize("every", [1, 5])
def test_accumulation_is_one_step_of_the_summed_gradient(method, every):
    """J backward passes with one step average in that step, told J or not."""
    expected = train_by_matrix(method, GRAPH, sgd, 4, loss_of=rowwise_loss)
    got = LoopbackWorld(RANKS).run(accumulating, method, every, 5, 4)
    assert_all_close([vector for vector, _ in got], expected)
    rounds = 4 * (5 if (method, every) == ("gradient_allreduce", 1) else 1)
    assert [count for _, count in got] == [rounds] * RANKS


@every_method
def test_a_gradient_is_never_applied_unaveraged(method):
    """With J = 3 and 2 passes per step ``gradient_allreduce`` averages in every step all the same.

    Parameter methods average as soon as 3 passes were made: in every second step.
    """
    got = LoopbackWorld(RANKS).run(accumulating, method, 3, 2, 4)
    assert [count for _, count in got] == [4 if method == "gradient_allreduce" else 2] * RANKS
    if method == "gradient_allreduce":
        assert_all_close([vector for vector, _ in got], [got[0][0]] * RANKS)


@pytest.mark.parametrize("every", [1, 2, 4])
def test_update_in_backward_with_accumulation(every):
    """The update is made in the J-th backward pass, or in step() where it does not come to that."""
    run = partial(LoopbackWorld(RANKS).run, accumulating, "adapt_then_combine", 4)
    usual = run(4 // every, 3 * every, bucket_size_in_mb=1e-5)
    overlapped = run(4 // every, 3 * every, bucket_size_in_mb=1e-5, update_in_backward=True)
    assert [count for _, count in usual] == [count for _, count in overlapped] == [3] * RANKS
    assert_all_close([v for v, _ in usual], [v for v, _ in overlapped])


def functional(method):
    """Gradients by hand, without a forward pass of the module and without hooks."""
    model = start(method)
    optimizer = wrapped(method, model)
    for step in range(4):
        weights = dict(model.named_parameters())
        out = torch.func.functional_call(model.eval(), weights, (batch(bf.rank(), step),))
        loss = (out - 1.0).square().mean()
        for p, g in zip(weights.values(), torch.autograd.grad(loss, weights.values()), strict=True):
            p.grad = g
        optimizer.step()
    return vector(model)


@every_method
def test_gradients_set_by_hand(method):
    """Where no forward and no backward was seen, step() does all of it."""
    got = LoopbackWorld(RANKS).run(functional, method)
    assert_all_close(got, train_by_matrix(method, GRAPH, sgd, 4))


@every_method
def test_evaluation_between_steps_sends_nothing(method):
    """Neither eval mode, nor no_grad, nor inference_mode starts a round."""

    def case():
        model = start(method)
        optimizer = wrapped(method, model)
        for step in range(4):
            data = batch(bf.rank(), step)
            if bf.rank() % 2:  # so that a message would lack its counterpart
                model.eval()(data)
                with torch.no_grad():
                    model.train()(data)
                with torch.inference_mode():
                    model(data)
            model.train()
            optimizer.zero_grad()
            square_loss(model, data).backward()
            optimizer.step()
        return vector(model)

    assert_all_close(LoopbackWorld(RANKS).run(case), train_by_matrix(method, GRAPH, sgd, 4))


def test_several_forward_passes_of_one_step_send_once():
    """The first forward since the last step starts the round; more of them do not."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped("adapt_with_combine", model)
        for step in range(3):
            optimizer.zero_grad()
            data = batch(bf.rank(), step)
            outs = [model(data[:2]), model(data[2:])]
            (torch.cat(outs) - 1.0).square().mean().backward()
            optimizer.step()
        return vector(model), optimizer.round

    got = LoopbackWorld(RANKS).run(case)
    assert [count for _, count in got] == [3] * RANKS
    assert_all_close([v for v, _ in got], train_by_matrix("adapt_with_combine", GRAPH, sgd, 3))


def test_a_skipped_step_takes_its_average():
    """A rank that skips a step after the forward pass stays in time with its neighbours."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped("adapt_with_combine", model)
        for step in range(4):
            optimizer.zero_grad()
            loss = square_loss(model, batch(bf.rank(), step))
            if bf.rank() == 2 and step == 1:
                continue
            loss.backward()
            optimizer.step()
        return optimizer.round

    assert LoopbackWorld(RANKS).run(case) == [4] * RANKS


@pytest.mark.parametrize("where", ["before zero_grad", "before forward", "after step"])
def test_a_forward_pass_for_a_log_is_no_round(where):
    """One rank's further forward passes, wherever they are in its loop, change nothing."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped("adapt_with_combine", model)

        def log(here, step):
            if here == where and bf.rank() == 0:
                float(square_loss(model, batch(bf.rank(), step)).detach())

        for step in range(4):
            log("before zero_grad", step)
            optimizer.zero_grad()
            log("before forward", step)
            square_loss(model, batch(bf.rank(), step)).backward()
            optimizer.step()
            log("after step", step)
        return vector(model), optimizer.round

    got = LoopbackWorld(RANKS).run(case)
    assert [count for _, count in got] == [4] * RANKS
    assert_all_close([v for v, _ in got], train_by_matrix("adapt_with_combine", GRAPH, sgd, 4))


def test_zero_grad_between_forward_and_backward_is_no_skipped_step():
    """An old habit: out = model(x); optimizer.zero_grad(); loss.backward(); optimizer.step()."""

    def case():
        model = mlp(bf.rank())
        optimizer = wrapped("adapt_with_combine", model)
        for step in range(4):
            loss = square_loss(model, batch(bf.rank(), step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return vector(model), optimizer.round

    got = LoopbackWorld(RANKS).run(case)
    assert [count for _, count in got] == [4] * RANKS
    assert_all_close([v for v, _ in got], train_by_matrix("adapt_with_combine", GRAPH, sgd, 4))


@pytest.mark.parametrize("reentrant", [False, True])
@every_method
def test_activation_checkpointing(method, reentrant):
    """Backward passes inside the backward pass change nothing."""

    def checkpointed(model, x):
        x = x.clone().requires_grad_()
        out = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=reentrant)
        return (model[2](model[1](out)) - 1.0).square().mean()

    got = LoopbackWorld(RANKS).run(train_here, method, GRAPH, sgd, 4, loss_of=checkpointed)
    assert_all_close(got, train_by_matrix(method, GRAPH, sgd, 4))


# closures, schedulers, hooks, clipping


@every_method
def test_closures(method):
    """step(closure): the gradient is taken where the method says; the loss is given back."""
    got = LoopbackWorld(RANKS).run(train_here, method, GRAPH, sgd, 4, closure=True)
    assert_all_close(got, train_by_matrix(method, GRAPH, sgd, 4, closure=True))

    def losses():
        model = start(method)
        optimizer = wrapped(method, model)

        def closure():
            optimizer.zero_grad()
            loss = square_loss(model, batch(bf.rank(), 0))
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    own = [
        float(square_loss(mlp(r if method in PARAMETER_METHODS else 0), batch(r, 0)).detach())
        for r in range(RANKS)
    ]
    central = [sum(own) / RANKS] * RANKS
    expected = central if method == "gradient_allreduce" else own
    assert LoopbackWorld(RANKS).run(losses) == pytest.approx(expected)


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, in the form of its most used implementation."""

    def __init__(self, parameters):
        super().__init__(parameters, {"rho": 0.5})
        self.base = sgd(self.param_groups)
        self.step_size, self.trains = 0.1, False

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * (0.5 / norm))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base.step()
        if zero_grad:
            self.zero_grad()

    def step(self, closure):
        self.first_step(zero_grad=True)
        with torch.enable_grad():
            loss = closure()
        self.second_step()
        return loss

    def train(self):
        self.trains = True


def central_sam():
    """Three steps with the mean of the ranks' losses, of one model."""
    model = mlp(0)
    optimizer = SAM(model.parameters())
    for step in range(3):

        def mean(step=step):
            model.zero_grad()
            loss = sum(square_loss(model, batch(rank, step)) for rank in range(RANKS)) / RANKS
            loss.backward()

        mean()
        optimizer.step(mean)
    return [vector(model)] * RANKS


def sam_by_matrix(method):
    """Three steps of all ranks, whose first gradients are taken before ``step(closure)``."""
    models = [mlp(rank) for rank in range(RANKS)]
    optimizers = [SAM(model.parameters()) for model in models]

    def own(rank, step):
        models[rank].zero_grad()
        square_loss(models[rank], batch(rank, step)).backward()

    def mix(step):
        w = torch.from_numpy(topology.mixing_matrix(GRAPH, step))
        mixed = w @ torch.stack([vector(model) for model in models])
        for model, row in zip(models, mixed, strict=True):
            assign(model, row)

    for step in range(3):
        for rank in range(RANKS):
            own(rank, step)
        if method == "adapt_with_combine":
            mix(step)
        for rank in range(RANKS):
            optimizers[rank].step(partial(own, rank, step))
        if method == "adapt_then_combine":
            mix(step)
    return [vector(model) for model in models]


@every_method
def test_an_optimizer_of_two_passes_takes_its_second_one_as_a_closure(method):
    """The average is that of the method, though parameters move between the two passes."""

    def case():
        model = start(method)
        optimizer = wrapped(method, model, SAM)
        for step in range(3):

            def closure(step=step):
                optimizer.zero_grad()
                loss = square_loss(model, batch(bf.rank(), step))
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)
        return vector(model)

    central = method == "gradient_allreduce"
    expected = central_sam() if central else sam_by_matrix(method)
    assert_all_close(LoopbackWorld(RANKS).run(case), expected)


@every_method
def test_parts_of_a_step_are_refused(method):
    """Such as ``first_step``, which would average nothing; all else of the optimizer is there."""

    def case():
        model = start(method)
        optimizer = wrapped(method, model, SAM)
        square_loss(model, batch(bf.rank(), 0)).backward()
        before = vector(model)
        for name in ("first_step", "second_step"):
            words = rf"DistributedOptimizer.{name}\(\): SAM's own .*optimizer.step\(closure\)"
            with pytest.raises(bf.UsageError, match=words):
                getattr(optimizer, name)(zero_grad=True)
        assert torch.equal(vector(model), before)
        optimizer.train()
        assert optimizer.wrapped.trains
        assert optimizer.step_size == 0.1
        assert not hasattr(optimizer, "third_step")

    LoopbackWorld(RANKS).run(case)


def test_closures_that_are_evaluated_unequally_often():
    """A line search may take more evaluations on one rank than on another; nobody waits for it."""
    make = partial(torch.optim.LBFGS, max_iter=6, line_search_fn="strong_wolfe", tolerance_change=0)
    evaluations = []

    def case(method):
        model = start(method)
        optimizer = wrapped(method, model, make)
        count = 0
        for step in range(3):
            data = batch(bf.rank(), step)

            def closure(data=data):
                nonlocal count
                count += 1
                optimizer.zero_grad()
                loss = square_loss(model, data)
                loss.backward()
                return loss

            optimizer.step(closure)
        evaluations.append(count)
        return optimizer.round

    for method in PARAMETER_METHODS:
        assert LoopbackWorld(RANKS).run(case, method) == [3] * RANKS
    assert len(set(evaluations)) > 1, "all ranks evaluated equally often: the test shows nothing"
    rounds = LoopbackWorld(RANKS).run(case, "gradient_allreduce")
    assert len(set(rounds)) == 1


@every_method
@pytest.mark.parametrize("on_wrapper", [True, False])
def test_schedulers_on_either_optimizer(method, on_wrapper):
    """The wrapper and the wrapped share their groups, so that a scheduler may hold either."""

    def case():
        model = start(method)
        plain = sgd(model.parameters())
        optimizer = bf.DistributedOptimizer(plain, model, method, topology=GRAPH, broadcast=False)
        held = optimizer if on_wrapper else plain
        scheduler = torch.optim.lr_scheduler.StepLR(held, step_size=2, gamma=0.5)
        rates = []
        for step in range(5):
            optimizer.zero_grad()
            square_loss(model, batch(bf.rank(), step)).backward()
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return vector(model), rates

    def by_hand(method):
        rates = iter([0.1, 0.1, 0.05, 0.05, 0.025] * RANKS)

        class Scheduled(torch.optim.SGD):
            def step(self, closure=None):
                self.param_groups[0]["lr"] = self.rates.pop(0)
                return super().step(closure)

        def make(parameters):
            optimizer = Scheduled(parameters, lr=0.1, momentum=0.9)
            optimizer.rates = [next(rates) for _ in range(5)]
            return optimizer

        return train_by_matrix(method, GRAPH, make, 5)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = LoopbackWorld(RANKS).run(case)
    assert got[0][1] == [0.1, 0.05, 0.05, 0.025, 0.025]
    assert_all_close([v for v, _ in got], by_hand(method))


@every_method
def test_hooks_of_torchs_optimizers(method):
    """Step and state hooks registered on the wrapper run, once each."""

    def case():
        model = start(method)
        optimizer = wrapped(method, model)
        called = []
        optimizer.register_step_pre_hook(lambda *_: called.append("before step"))
        optimizer.register_step_post_hook(lambda *_: called.append("after step"))
        optimizer.register_state_dict_post_hook(lambda o, state: called.append("state"))
        optimizer.register_load_state_dict_post_hook(lambda o: called.append("load"))
        square_loss(model, batch(bf.rank(), 0)).backward()
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        return called

    expected = ["before step", "after step", "state", "load"]
    assert LoopbackWorld(RANKS).run(case) == [expected] * RANKS


@every_method
def test_global_hooks_of_torchs_optimizers(method):
    """They run once a step, with the optimizer that updates."""

    def case():
        model = start(method)
        optimizer = wrapped(method, model)
        mine, called = optimizer.wrapped, []
        handles = [
            register(lambda one, *_, when=when: called.append(when) if one is mine else None)
            for when, register in (
                ("before", register_optimizer_step_pre_hook),
                ("after", register_optimizer_step_post_hook),
            )
        ]
        others = []
        handles.append(
            register_optimizer_step_pre_hook(
                lambda one, *_: others.append(one) if one is optimizer else None
            )
        )
        square_loss(model, batch(bf.rank(), 0)).backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
        return called, len(others)

    assert LoopbackWorld(RANKS).run(case) == [(["before", "after"], 0)] * RANKS


@pytest.mark.parametrize("scales", [False, True])
def test_clipping_where_an_accumulation_is_cut_short(scales):
    """``synchronize()`` averages what 2 of J = 3 passes have left, so that clipping sees averages.

    The clipped step is the one of plain torch on the mean of all gradients; without the call the
    same loop clips each rank's own, and a GradScaler is refused.
    """
    limit = 0.05

    def case(synchronized):
        model = mlp(0)
        optimizer = wrapped("gradient_allreduce", model, num_steps_per_communication=3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=scales)
        for step in range(3):
            optimizer.zero_grad()
            for part in (slice(0, 2), slice(2, 5)):
                rows = batch(bf.rank(), step)[part]
                scaler.scale(square_loss(model, rows) * len(rows) / 5).backward()
            if synchronized:
                optimizer.synchronize()
                optimizer.synchronize()  # all is averaged: without effect
            scaler.unscale_(optimizer)
            norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit))
            assert norm > limit, "nothing was clipped: the test shows nothing"
            scaler.step(optimizer)
            scaler.update()
        return vector(model), norm, optimizer.round

    class Clipped(torch.optim.SGD):
        def step(self, closure=None):
            parameters = [p for group in self.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, limit)
            return super().step(closure)

    make = partial(Clipped, lr=0.1, momentum=0.9)
    got = LoopbackWorld(RANKS).run(case, True)
    assert_all_close([v for v, _, _ in got], train_by_matrix("gradient_allreduce", GRAPH, make, 3))
    assert len({norm for _, norm, _ in got}) == 1
    assert [rounds for _, _, rounds in got] == [3] * RANKS

    def without():
        if not scales:
            return case(False)[1]
        with pytest.raises(bf.UsageError, match=r"call optimizer\.synchronize\(\) on all ranks"):
            case(False)
        return bf.rank()

    assert len(set(LoopbackWorld(RANKS).run(without))) == RANKS


@every_method
def test_synchronize_between_backward_and_step_changes_nothing(method):
    """Averaged gradients are not averaged again, and parameters are none of its business."""

    def case():
        model = start(method)
        optimizer = wrapped(method, model)
        for step in range(4):
            optimizer.zero_grad()
            square_loss(model, batch(bf.rank(), step)).backward()
            optimizer.synchronize()
            optimizer.step()
        return vector(model), optimizer.round

    got = LoopbackWorld(RANKS).run(case)
    assert_all_close([v for v, _ in got], train_by_matrix(method, GRAPH, sgd, 4))
    assert [rounds for _, rounds in got] == [4] * RANKS


# GradScaler and autocast


def scaled(method, overflow_on=(), steps=4):
    """Training with a GradScaler; rank and step in ``overflow_on`` get an infinite loss."""
    model = start(method)
    optimizer = wrapped(method, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    for step in range(steps):
        optimizer.zero_grad()
        loss = square_loss(model, batch(bf.rank(), step))
        if (bf.rank(), step) in overflow_on:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
    return vector(model), optimizer.round, scaler.get_scale()


@pytest.mark.parametrize("method", PARAMETER_METHODS)
def test_a_rank_with_overflow_skips_its_update_and_still_averages(method):
    """X+ = W X on the rank with infinities, its neighbours go on; only its own scale halves."""
    made = []

    def make(parameters):
        optimizer = SkippingOnce(parameters, lr=0.1, momentum=0.9)
        optimizer.skips = (2,) if len(made) == 1 else ()
        made.append(optimizer)
        return optimizer

    expected = train_by_matrix(method, GRAPH, make, 5)
    got = LoopbackWorld(RANKS).run(scaled, method, overflow_on=[(1, 2)], steps=5)
    assert_all_close([v for v, _, _ in got], expected)
    assert [count for _, count, _ in got] == [5] * RANKS
    assert [scale for _, _, scale in got] == [256.0, 128.0, 256.0, 256.0]


# misuse of update_in_backward


@in_backward
def test_what_comes_too_late_is_refused(update_in_backward):
    """Clipping, a second backward, a closure and GradScaler: words instead of wrong numbers."""

    def case():
        model = mlp(bf.rank())
        new = partial(wrapped, "adapt_then_combine", model, update_in_backward=update_in_backward)

        def clipped(optimizer):
            square_loss(model, batch(0, 0)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()

        def zeroed(optimizer):
            square_loss(model, batch(0, 0)).backward()
            optimizer.zero_grad()
            optimizer.step()

        def twice(optimizer):
            square_loss(model, batch(0, 0)).backward()
            square_loss(model, batch(0, 1)).backward()
            optimizer.step()

        def with_closure(optimizer):
            optimizer.step(lambda: square_loss(model, batch(0, 0)))

        def with_scaler(optimizer):
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(square_loss(model, batch(0, 0))).backward()
            scaler.step(optimizer)

        for misuse, words in {
            clipped: "gradient of 0.weight was changed between backward and step",
            zeroed: "gradient of 0.weight was changed between backward and step",
            twice: "another gradient before step",
            with_closure: "evaluates more than once",
            with_scaler: "GradScaler unscales gradients after backward",
        }.items():
            optimizer = new()
            optimizer.zero_grad()
            if not update_in_backward:
                misuse(optimizer)  # fine there
                continue
            with pytest.raises(bf.UsageError, match=f"{words}.*update_in_backward=False"):
                misuse(optimizer)
        bf.barrier()  # a neighbour may still wait for what this rank has sent in backward

    LoopbackWorld(RANKS).run(case)


def test_update_in_backward_needs_a_method_that_averages_after_the_step():
    """The message says which methods can."""

    def case():
        with pytest.raises(
            bf.ArgumentError, match=r"update_in_backward: adapt_with_combine .* adapt_then"
        ):
            wrapped("adapt_with_combine", mlp(0), update_in_backward=True)

    LoopbackWorld(RANKS).run(case)


def test_scaled_gradients_that_step_would_average_are_refused():
    """GradScaler has looked before the average: ranks would disagree about infinities."""

    def case():
        model = mlp(0)
        optimizer = wrapped("gradient_allreduce", model, num_steps_per_communication=2)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(square_loss(model, batch(0, 0))).backward()
        with pytest.raises(bf.UsageError, match="a multiple of num_steps_per_communication=2"):
            scaler.step(optimizer)

    LoopbackWorld(RANKS).run(case)


def test_parameters_changed_while_they_travel_are_noticed():
    """Between forward and step() the parameters belong to the messages."""

    def changed(change):
        model = mlp(bf.rank())
        optimizer = wrapped("adapt_with_combine", model)
        square_loss(model, batch(bf.rank(), 0)).backward()
        change(model[2].weight)
        with pytest.raises(bf.UsageError, match=r"2.weight was changed .*adapt_then_combine"):
            optimizer.step()

    @torch.no_grad()
    def in_place(weight):
        weight.mul_(2)

    def anew(weight):
        weight.data = weight.data * 2

    for change in (in_place, anew):
        LoopbackWorld(RANKS).run(changed, change)
