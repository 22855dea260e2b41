"""What users do around the backward pass: accumulate, clip, scale, schedule, and make mistakes."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch

import asyncddp as bf
from asyncddp import topology
from tests.support import BEFORE_DEADLINE, LoopbackWorld
from tests.unit.optim.optim_reference import SkippingOnce
from tests.unit.parallel.parallel_reference import (
    assert_all_close,
    batch,
    convnet,
    image_loss,
    make_ddp,
    mlp,
    of_batch,
    simulate,
    square_loss,
    train_here,
    vector,
)

pytestmark = pytest.mark.training

GRAPH = topology.one_peer_exponential(4)
RANKS = 4
sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
many_buckets = {"bucket_size_in_mb": 1e-5}
both_modes = pytest.mark.parametrize("sync", [True, False])


class Clipped(torch.optim.SGD):
    """Clips the norm of all gradients together before each step."""

    limit = 0.05

    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.limit)
        assert norm > self.limit, "nothing was clipped: the test shows nothing"
        return super().step(closure)


# accumulation


@both_modes
@pytest.mark.parametrize("by_hand", [True, False], ids=["set_accumulate_grad", "no_sync"])
def test_accumulated_gradients_are_one_step(sync, by_hand):
    """Rows one after the other, the last outside ``no_sync``, are one batch."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=GRAPH, sync=sync, **many_buckets)
        for step in range(4):
            rows = (batch(bf.rank(), step)[row : row + 1] for row in range(5))
            losses = (square_loss(ddp, row) / 5 for row in rows)
            if by_hand:
                ddp.set_accumulate_grad(True)
                for _ in range(4):
                    next(losses).backward()
                ddp.set_accumulate_grad(False)
            else:
                with ddp.no_sync():
                    for _ in range(4):
                        next(losses).backward()
            next(losses).backward()
            bf.barrier()
        assert ddp.steps == 4
        return vector(model)

    def loss_of(model, rank, step):
        return sum(square_loss(model, batch(rank, step)[row : row + 1]) / 5 for row in range(5))

    assert_all_close(LoopbackWorld(RANKS).run(case), simulate(GRAPH, sgd, 4, loss_of=loss_of))


def test_no_sync_sends_nothing():
    """A rank may make passes inside that the others do not make."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=GRAPH)
        for step in range(3):
            with ddp.no_sync():
                for _ in range(bf.rank()):
                    (0.0 * of_batch(ddp, bf.rank(), step)).backward()
            of_batch(ddp, bf.rank(), step).backward()
        return vector(model)

    assert_all_close(LoopbackWorld(RANKS).run(case), simulate(GRAPH, sgd, 3))


@both_modes
def test_evaluation_is_no_step(sync):
    """Forward passes without gradients, and backward passes in eval mode, change nothing."""

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, topology=GRAPH, sync=sync)
        for step in range(4):
            if bf.rank() % 2:  # so that a message would lack its counterpart
                with torch.no_grad():
                    ddp(batch(0, 0))
                with torch.inference_mode():
                    ddp(batch(0, 0))
                ddp.eval(average=False)
                of_batch(ddp, 0, 0).backward()
                ddp.zero_grad()
                ddp.train()
            of_batch(ddp, bf.rank(), step).backward()
            bf.barrier()
        return vector(model)

    assert_all_close(LoopbackWorld(RANKS).run(case), simulate(GRAPH, sgd, 4))


# clipping, scaling, schedules


@both_modes
@pytest.mark.parametrize("options", [{}, many_buckets], ids=["one bucket", "many buckets"])
def test_clipping_is_of_all_gradients_together(sync, options):
    """However many buckets there are, the norm is that of the whole gradient."""
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    got = LoopbackWorld(RANKS).run(
        train_here, GRAPH, make, 5, sync=sync, lockstep=True, grad_clip_norm=0.05, **options
    )
    assert_all_close(got, simulate(GRAPH, partial(Clipped, lr=0.1, momentum=0.9), 5))


def scaled(sync, overflow_on=(), steps=5, **options):
    """Training with a GradScaler; rank and step in ``overflow_on`` have an infinity in one layer.

    Gives the parameters, the scale, and the steps that each optimizer and scheduler has made.
    """
    model = mlp(bf.rank())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=1.0)
    ddp = make_ddp(
        model,
        sgd,
        lr_scheduler_fn=scheduler,
        topology=GRAPH,
        sync=sync,
        scaler=scaler,
        **{**many_buckets, **options},
    )
    for step in range(steps):
        loss = of_batch(ddp, bf.rank(), step)
        if (bf.rank(), step) in overflow_on:
            loss = loss + float("inf") * model[2].bias.sum()
        scaler.scale(loss).backward()
        bf.barrier()
    made = {scheduler.last_epoch for scheduler in ddp.lr_schedulers}
    return vector(model), scaler.get_scale(), made


@both_modes
def test_a_grad_scaler_without_overflow(sync):
    """A power of two is scaled away without a trace."""
    got = LoopbackWorld(RANKS).run(scaled, sync)
    assert_all_close([values for values, _, _ in got], simulate(GRAPH, sgd, 5))
    assert [rest for _, *rest in got] == [[256.0, {5}]] * RANKS


@both_modes
@pytest.mark.parametrize("when", [0, 2], ids=["in the first pass", "later"])
def test_an_overflow_skips_the_update_of_all_buckets_alike(sync, when):
    """One layer's infinity skips all buckets' updates on that rank, which mixes all the same."""
    made = []

    def make(parameters):
        optimizer = SkippingOnce(parameters, lr=0.1, momentum=0.9)
        optimizer.skips = (when,) if len(made) == 1 else ()
        made.append(optimizer)
        return optimizer

    got = LoopbackWorld(RANKS).run(scaled, sync, overflow_on=[(1, when)])
    assert_all_close([values for values, _, _ in got], simulate(GRAPH, make, 5))
    assert [scale for _, scale, _ in got] == [256.0, 128.0, 256.0, 256.0]
    assert [steps for *_, steps in got] == [{5}] * RANKS


def test_clipping_sees_unscaled_gradients():
    """A scaler and a norm together: unscaled first."""
    got = LoopbackWorld(RANKS).run(scaled, True, grad_clip_norm=0.05)
    expected = simulate(GRAPH, partial(Clipped, lr=0.1, momentum=0.9), 5)
    assert_all_close([values for values, _, _ in got], expected)


@both_modes
@pytest.mark.parametrize("clip", [0.0, 1e9], ids=["in the pass", "at its end"])
def test_schedulers_make_one_step_in_each(sync, clip):
    """Each bucket's learning rate is what one scheduler of the whole model would give."""

    class Scheduled(torch.optim.SGD):
        def step(self, closure=None):
            result = super().step(closure)
            self.param_groups[0]["lr"] *= 0.5
            return result

    def case():
        model = mlp(bf.rank())
        ddp = make_ddp(
            model,
            partial(torch.optim.SGD, lr=0.2),
            lr_scheduler_fn=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(
                optimizer, 0.5
            ),
            topology=GRAPH,
            sync=sync,
            grad_clip_norm=clip,
            **many_buckets,
        )
        rates = []
        for step in range(4):
            of_batch(ddp, bf.rank(), step).backward()
            rates.append({one.get_last_lr()[0] for one in ddp.lr_schedulers})
            bf.barrier()
        assert len(ddp.lr_schedulers) == len(ddp.optimizers) == 4
        return vector(model), rates

    got = LoopbackWorld(RANKS).run(case)
    assert [rates for _, rates in got] == [[{0.1}, {0.05}, {0.025}, {0.0125}]] * RANKS
    expected = simulate(GRAPH, partial(Scheduled, lr=0.2), 4)
    assert_all_close([values for values, _ in got], expected)


# memory


def test_buckets_follow_the_order_of_gradients():
    """The last layer's come first; a cap ends a bucket; what is unused comes last, apart."""

    def case():
        model = torch.nn.ModuleDict(
            {name: torch.nn.Linear(4, 4, dtype=torch.float64) for name in ("a", "b", "c")}
        )
        model.forward = lambda x: model["c"](model["a"](x))
        ddp = make_ddp(model, sgd, bucket_size_in_mb=170 / 2**20)
        assert ddp.bucket_names == ddp.optimizers == []
        ddp(batch(bf.rank(), 0)).sum().backward()
        return ddp.bucket_names, [
            [name for p in one.param_groups[0]["params"] for name, q in named_of(ddp) if p is q]
            for one in ddp.optimizers
        ]

    def named_of(ddp):
        return list(ddp.named_parameters())

    for names, held in LoopbackWorld(2).run(case):
        assert names[-1] == ["b.weight", "b.bias"]
        traced = [name for bucket in names[:-1] for name in bucket]
        assert {name[0] for name in traced[:2]} == {"c"}
        assert {name[0] for name in traced[2:]} == {"a"}
        assert names == held
        assert all(len(bucket) < 3 for bucket in names)


@both_modes
@pytest.mark.parametrize("as_view", [True, False])
def test_where_parameters_live(sync, as_view):
    """Views of one aligned tensor in their own memory format, or where they were."""

    def case():
        model = convnet(bf.rank())
        before = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
        ddp = make_ddp(model, sgd, sync=sync, param_as_bucket_view=as_view)
        image_loss(ddp, bf.rank(), 0).backward()
        after = {name: (p.data_ptr(), p.stride()) for name, p in model.named_parameters()}
        (block,) = ddp._reducer.buckets
        start = block.flat.data_ptr()
        inside = [start <= at < start + block.flat.nbytes for at, _ in after.values()]
        assert all(inside) == any(inside) == as_view
        assert [stride for _, stride in after.values()] == [s for _, s in before.values()]
        assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
        if as_view:
            assert all((at - start) % 64 == 0 for at, _ in after.values())
            block.flat.fill_(2.5)
            assert set(vector(model).tolist()) == {2.5}
        else:
            assert after == before

    LoopbackWorld(2).run(case)


# creation and garbage collection


def test_it_has_the_names_of_the_model():
    """No prefix anywhere, in either direction."""

    def case():
        model = convnet(0)
        plain = convnet(1)
        names = list(dict(model.named_parameters()))
        ddp = make_ddp(model, sgd)
        assert list(dict(ddp.named_parameters())) == names
        assert [id(p) for p in ddp.parameters()] == [id(p) for p in model.parameters()]
        assert [name for name, _ in ddp.named_buffers()] == [n for n, _ in model.named_buffers()]
        assert [m for m in ddp.modules()] == list(model.modules())
        assert list(ddp.children()) == list(model.children())
        assert list(ddp.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(ddp.state_dict())
        assert torch.equal(vector(plain), vector(model))
        ddp.load_state_dict(convnet(2).state_dict())
        assert torch.equal(vector(model), vector(convnet(2)))
        seen = []
        assert ddp.apply(seen.append) is ddp
        assert seen[-1] is model
        assert "Conv2d" in repr(ddp)
        assert ddp.requires_grad_(True) is ddp

    LoopbackWorld(2).run(case)


def test_it_cannot_be_copied_but_its_model_can():
    """A copy trains as a plain model does."""

    def case():
        model = mlp(0)
        ddp = make_ddp(model, sgd)
        of_batch(ddp, bf.rank(), 0).backward()
        for copied in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled; copy its module"):
                copied(ddp)
        other = copy.deepcopy(model)
        of_batch(other, 0, 0).backward()
        assert other[0].weight.grad is not None
        return ddp.steps

    assert LoopbackWorld(2).run(case) == [1, 1]


@both_modes
def test_after_close_the_model_is_the_users(sync):
    """Backward passes are plain ones; what needs the others is refused; closing twice is one."""

    def case():
        model = mlp(0)
        ddp = make_ddp(model, sgd, sync=sync)
        of_batch(ddp, bf.rank(), 0).backward()
        ddp.close()
        ddp.close()
        before = vector(model)
        of_batch(ddp, bf.rank(), 0).backward()
        assert model[0].weight.grad is not None
        assert torch.equal(vector(model), before)
        ddp.eval().train()
        for call in (ddp.global_avg, partial(ddp.set_topology, None)):
            with pytest.raises(bf.UsageError, match=r"called after close\(\)"):
                call()

    LoopbackWorld(2).run(case)


@both_modes
def test_a_wrapper_that_is_dropped_lets_go(sync):
    """Nothing is awaited, and the model trains as a plain one."""

    def case():
        model = mlp(0)
        ddp = make_ddp(model, sgd, sync=sync)
        of_batch(ddp, bf.rank(), 0).backward()
        gone = weakref.ref(ddp)
        if bf.rank() == 0:
            del ddp
            gc.collect()
            assert gone() is None
            of_batch(model, 0, 0).backward()
            assert model[0].weight.grad is not None

    LoopbackWorld(2).run(case)


# mistakes


def test_arguments_that_cannot_be():
    """Each is named, with what was expected and what came."""

    def case():
        frozen = mlp(0).requires_grad_(False)
        lazy = torch.nn.Module()
        lazy.weight = torch.nn.parameter.UninitializedParameter()
        tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        tied[1].weight.data = tied[0].weight.data.t()
        wrong = {
            r"argument model: expected a torch.nn.Module .*, got list": ([], sgd, {}),
            r"argument model: .*without any that requires a gradient": (frozen, sgd, {}),
            r"parameter weight has no shape yet; make a forward pass first": (lazy, sgd, {}),
            r"parameter weight is on the meta device; expected a dense": (
                torch.nn.Linear(1, 1, device="meta"),
                sgd,
                {},
            ),
            r"(0.weight and 1.weight|1.weight and 0.weight) share memory": (tied, sgd, {}),
            r"argument lr_scheduler_fn: expected a function .*got 3": (
                mlp(0),
                sgd,
                {"lr_scheduler_fn": 3},
            ),
            r"argument scaler: expected a torch.amp.GradScaler or None, got 1": (
                mlp(0),
                sgd,
                {"scaler": 1},
            ),
            r"argument grad_clip_norm: expected .*, got -1": (mlp(0), sgd, {"grad_clip_norm": -1}),
            r"argument bucket_size_in_mb: expected a number above 0, got 0": (
                mlp(0),
                sgd,
                {"bucket_size_in_mb": 0},
            ),
        }
        for words, (model, make, options) in wrong.items():
            with pytest.raises(bf.ArgumentError, match=words):
                make_ddp(model, make, **options)
        with pytest.raises(bf.ArgumentError, match="argument optim_fn: expected a function"):
            bf.DecentralizedDataParallel(mlp(0), None)
        with pytest.raises(bf.ArgumentError, match="not distributed yet, got Decentralized"):
            make_ddp(make_ddp(mlp(0), sgd), sgd)

    LoopbackWorld(1).run(case)


def test_functions_that_give_something_else():
    """Heard of at the end of the first backward pass, where they are called."""

    def case():
        stranger = mlp(1)
        wrong = {
            r"gives a torch.optim.Optimizer, got list from it": (lambda named: [], None),
            r"holds parameters that it was not given": (
                lambda named: sgd(stranger.parameters()),
                None,
            ),
            r"whose step\(\) needs no argument, got ReduceLROnPlateau": (
                lambda named: sgd([p for _, p in named]),
                torch.optim.lr_scheduler.ReduceLROnPlateau,
            ),
        }
        for words, (optim_fn, scheduler_fn) in wrong.items():
            ddp = bf.DecentralizedDataParallel(mlp(0), optim_fn, scheduler_fn)
            with pytest.raises(bf.ArgumentError, match=words):
                of_batch(ddp, 0, 0).backward()

    LoopbackWorld(1).run(case)


def test_models_or_settings_that_differ():
    """All ranks say the same first difference."""

    def other_shape():
        make_ddp(torch.nn.Linear(2 + bf.rank() // 3, 1), sgd)

    def other_mode():
        make_ddp(mlp(0), sgd, sync=bf.rank() != 2)

    for case, words in {
        other_shape: "rank 0 has parameter weight of shape (1, 2)",
        other_mode: "rank 0 has sync=True, and rank 2 has sync=False",
    }.items():
        for outcome in LoopbackWorld(RANKS).outcomes(case):
            assert outcome.error == "MismatchError", outcome
            assert words in outcome.message, outcome
            assert "needs the same model and settings on all ranks" in outcome.message


class Branches(torch.nn.Module):
    """Two layers whose order in the forward pass is a rank's own."""

    def __init__(self, rank, other):
        super().__init__()
        self.left = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.right = torch.nn.Linear(4, 4, bias=False, dtype=torch.float64)
        self.layers = [self.left, self.right] if rank != other else [self.right, self.left]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_another_order_of_gradients_is_told_on_all_ranks():
    """The first difference, with both ranks' parameters; nothing was updated."""

    def case():
        model = Branches(bf.rank(), other=2)
        ddp = make_ddp(model, sgd)
        before = vector(model)
        try:
            of_batch(ddp, bf.rank(), 0).backward()
        finally:
            assert torch.equal(vector(model), before)
            assert ddp.steps == 0

    for rank, outcome in enumerate(LoopbackWorld(RANKS).outcomes(case)):
        assert outcome.error == "MismatchError", outcome
        assert outcome.message.startswith(
            f"rank {rank}: DecentralizedDataParallel needs gradients in the same order on all "
            "ranks, but rank 0 has the 1st gradient of all for right.weight, and rank 2 has the "
            "1st gradient of all for left.weight"
        )


def test_another_use_of_parameters_is_told_on_all_ranks():
    """One rank's first pass does not use a layer that the others use."""

    def case():
        model = Branches(0, other=None)
        if bf.rank() == 1:
            model.layers = [model.left]
        ddp = make_ddp(model, sgd)
        of_batch(ddp, bf.rank(), 0).backward()

    for outcome in LoopbackWorld(RANKS).outcomes(case):
        assert outcome.error == "MismatchError", outcome
        assert "rank 1 has the 1st gradient of all for left.weight" in outcome.message


@pytest.mark.parametrize("as_view", [True, False])
def test_parameters_changed_while_they_travel_are_noticed(as_view):
    """Between two passes they belong to the messages, unless the wrapper loads them."""

    def case(change):
        model = mlp(bf.rank())
        ddp = make_ddp(model, sgd, param_as_bucket_view=as_view)
        of_batch(ddp, bf.rank(), 0).backward()
        change(model[2].weight)
        with pytest.raises(bf.UsageError, match=r"2\.weight was changed between .*sync=False"):
            of_batch(ddp, bf.rank(), 1).backward()

    @torch.no_grad()
    def in_place(weight):
        weight.mul_(2)

    def anew(weight):
        weight.data = weight.data * 2

    LoopbackWorld(2).run(case, in_place)
    if as_view:
        LoopbackWorld(2).run(case, anew)


@both_modes
def test_a_model_that_was_cast_in_mid_run(sync):
    """Said before anything of another dtype could travel."""

    def case():
        ddp = make_ddp(mlp(0), sgd, sync=sync, param_as_bucket_view=False)
        of_batch(ddp, bf.rank(), 0).backward()
        ddp.float()
        x = batch(bf.rank(), 1).float()
        with pytest.raises(bf.UsageError, match=r"another dtype.*before Decentralized|was changed"):
            (ddp(x) - 1.0).square().mean().backward()

    LoopbackWorld(2).run(case)


class Failing(torch.autograd.Function):
    """A layer whose backward pass raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("the data is gone")


class Fragile(torch.nn.Module):
    """A model whose backward pass may stop before its last layer."""

    def __init__(self, rank):
        super().__init__()
        self.inner, self.fails = mlp(rank), False

    def forward(self, x):
        hidden = self.inner[:2](x)
        return self.inner[2](Failing.apply(hidden) if self.fails else hidden)


def fail_once(fails_at):
    """Rank 2's pass fails in one step; in the first, where nothing was sent, it tries again."""
    model = Fragile(bf.rank())
    ddp = make_ddp(model, sgd, topology=GRAPH, **many_buckets)
    for step in range(5):
        if (bf.rank(), step) == (2, fails_at):
            model.fails = True
            loss = of_batch(ddp, bf.rank(), step)
            with pytest.raises(ValueError, match="the data is gone"):
                loss.backward()
            model.fails = False
            if fails_at:
                continue
        of_batch(ddp, bf.rank(), step).backward()
    return vector(model), ddp.steps


@pytest.mark.parametrize("fails_at", [0, 3])
def test_a_pass_that_fails_half_way_is_ended_by_the_next(fails_at):
    """The neighbours go on; what was not updated is mixed all the same."""

    def loss_of(model, rank, step):
        if fails_at and (rank, step) == (2, fails_at):  # only the last layer is updated
            return square_loss(
                lambda x: model.inner[2](model.inner[:2](x).detach()), batch(rank, step)
            )
        return of_batch(model, rank, step)

    got = LoopbackWorld(RANKS).run(fail_once, fails_at)
    assert [steps for _, steps in got] == [5] * RANKS
    expected = simulate(GRAPH, sgd, 5, model_of=Fragile, loss_of=loss_of)
    assert_all_close([values for values, _ in got], expected)


@both_modes
def test_a_rank_that_fails_is_told_to_the_others(sync):
    """In the backward pass, naming it; where nobody waits for anybody, at the first meeting."""

    def case():
        ddp = make_ddp(mlp(bf.rank()), sgd, topology=topology.complete(4), sync=sync)
        for step in range(5):
            if (bf.rank(), step) == (1, 2):
                raise ValueError("the data is gone")
            of_batch(ddp, bf.rank(), step).backward()
        ddp.global_avg()

    found = LoopbackWorld(RANKS).outcomes(case)
    assert found[1].error == "ValueError"
    for outcome in (found[0], found[2], found[3]):
        assert "PeerError" in outcome.bases, outcome
        assert "rank 1 has left (it raised ValueError: the data is gone)" in outcome.message
        assert outcome.seconds < BEFORE_DEADLINE
        assert ("global_avg" if not sync else "backward") in outcome.trace
