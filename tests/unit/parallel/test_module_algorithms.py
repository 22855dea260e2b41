"""``DecentralizedDataParallel`` by any algorithm does what ``DistributedOptimizer`` does."""

from __future__ import annotations

import io

import pytest
import torch

import asyncddp as bf
from asyncddp.algorithms import ALGORITHMS
from tests.support import LoopbackWorld, gradient_pieces
from tests.support.gradient_pieces import KINDS, InPieces
from tests.support.methods import one_of_each_kind, sgd_for

pytestmark = pytest.mark.training

STEPS = 6
IN_STEP = one_of_each_kind(
    name
    for name in ALGORITHMS
    if not ALGORITHMS[name].how[0].one_sided and name != "adapt_with_combine"
)
every_algorithm = pytest.mark.parametrize("name", IN_STEP)


def model_and_data():
    """The same model on all ranks, and data of this rank's own."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    generator = torch.Generator().manual_seed(1 + bf.rank())
    return model, [torch.randn(5, 3, generator=generator) for _ in range(2 * STEPS)]


def optim_fn_for(name):
    if name == "qadam":
        return lambda named: bf.QAdamOptimizer([p for _, p in named], lr=0.01, warmup_steps=4)
    return lambda named: sgd_for(name, 0.05)([p for _, p in named])


def loss_of(output):
    return (output - 1).square().mean()


def vector(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def by_optimizer(name, passes=1, clip=0.0, switch=None, **options):
    """The loop that the module wrapper spares."""
    model, data = model_and_data()
    plain = optim_fn_for(name)(list(model.named_parameters()))
    optimizer = bf.DistributedOptimizer(
        plain, model, name, num_steps_per_communication=1, **options
    )
    for number in range(STEPS):
        if switch and number in switch:
            optimizer.switch_to(switch[number])
        optimizer.zero_grad()
        batch = data[2 * number : 2 * number + passes]
        optimizer._phase.accumulation.held = passes > 1
        for x in batch[:-1]:
            loss_of(model(x)).backward()
        optimizer._phase.accumulation.held = False
        loss_of(model(batch[-1])).backward()
        if clip:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return vector(model)


def by_module(name, passes=1, clip=0.0, switch=None, **options):
    model, data = model_and_data()
    ddp = bf.DecentralizedDataParallel(
        model, optim_fn_for(name), algorithm=name, grad_clip_norm=clip, **options
    )
    for number in range(STEPS):
        if switch and number in switch:
            ddp.switch_to(switch[number])
        batch = data[2 * number : 2 * number + passes]
        with ddp.no_sync():
            for x in batch[:-1]:
                loss_of(ddp(x)).backward()
        loss_of(ddp(batch[-1])).backward()
    assert ddp.steps == STEPS
    assert ddp.algorithm == (switch or {}).get(max(switch or [0]), name)
    return vector(model)


PASSES = {"plain": {}, "no_sync": {"passes": 2}, "clip": {"clip": 0.5}}
"""Each algorithm trains by plain passes, and in one of the other ways in turn."""
TRAINED = [
    pytest.param(name, PASSES[kind], id=f"{kind}-{name}")
    for number, name in enumerate(IN_STEP)
    for kind in ("plain", ("no_sync", "clip")[number % 2])
]


@pytest.mark.parametrize(("name", "more"), TRAINED)
def test_the_module_trains_as_the_optimizer_does(name, more):
    """Bit for bit, also with accumulated and clipped gradients."""
    expected = LoopbackWorld(3).run(by_optimizer, name, **more)
    found = LoopbackWorld(3).run(by_module, name, **more)
    assert all(map(torch.equal, found, expected))


def test_compression_and_options_reach_the_algorithm():
    """The wrapper passes on what it does not know."""
    options = {"compression": "sign", "hierarchical": True}
    settings = {"ranks_per_machine": 2}
    world = LoopbackWorld(4)
    expected = world.run(by_optimizer, "gradient_allreduce", settings=settings, **options)
    found = world.run(by_module, "gradient_allreduce", settings=settings, **options)
    assert all(map(torch.equal, found, expected))


def test_algorithms_are_switched_between_passes():
    """A chain from the wrapper's own algorithm on; the optimizer's momentum goes along."""
    switch = {2: "bytegrad", 4: "low_precision_decentralized"}
    expected = LoopbackWorld(3).run(by_optimizer, "adapt_with_combine", switch=switch)
    found = LoopbackWorld(3).run(by_module, "adapt_with_combine", switch=switch)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


@every_algorithm
def test_a_run_goes_on_from_its_states(name):
    """What the module, its optimizer and its algorithm save is all that the rest depends on."""

    def case():
        def start():
            model, data = model_and_data()
            schedule = lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
            options = {"broadcast": False}
            return data, bf.DecentralizedDataParallel(
                model, optim_fn_for(name), schedule, algorithm=name, **options
            )

        data, ddp = start()
        for x in data[:STEPS]:
            loss_of(ddp(x)).backward()
        file = io.BytesIO()
        torch.save([ddp.state_dict(), ddp.optim_state_dict()], file)
        for x in data[STEPS:]:
            loss_of(ddp(x)).backward()
        file.seek(0)
        _, again = start()
        model_state, optim_state = torch.load(file, weights_only=True)
        again.load_state_dict(model_state)
        again.load_optim_state_dict(optim_state)
        for x in data[STEPS:]:
            loss_of(again(x)).backward()
        assert again.steps == ddp.steps == 2 * STEPS
        assert torch.equal(vector(again.module), vector(ddp.module))

    LoopbackWorld(2).run(case)


@every_algorithm
def test_averages_are_shown_and_taken_back(name):
    """eval() shows the ranks' average, train() brings back each rank's own."""

    def case():
        model, data = model_and_data()
        ddp = bf.DecentralizedDataParallel(model, optim_fn_for(name), algorithm=name)
        for x in data[:3]:
            loss_of(ddp(x)).backward()
        own = vector(model).clone()
        mean = bf.allreduce(own)
        ddp.eval()
        torch.testing.assert_close(vector(model), mean)
        ddp.train()
        assert torch.equal(vector(model), own)
        ddp.global_avg()
        torch.testing.assert_close(vector(model), mean)
        loss_of(ddp(data[3])).backward()
        ddp.close()

    LoopbackWorld(2).run(case)


@every_algorithm
def test_a_pass_that_fails_holds_up_nobody(name):
    """The next forward pass ends its step on that rank, with what there was of gradients."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            raise RuntimeError("half-way")

    def case():
        model, data = model_and_data()
        ddp = bf.DecentralizedDataParallel(model, optim_fn_for(name), algorithm=name)
        loss_of(ddp(data[0])).backward()
        if bf.rank() == 1:
            hidden = Failing.apply(model[0](data[1]))
            output = model[2](model[1](hidden))
            with pytest.raises(RuntimeError, match="half-way"):
                loss_of(output).backward()
        else:
            loss_of(ddp(data[1])).backward()
        loss_of(ddp(data[2])).backward()
        return ddp.steps, vector(model)

    results = LoopbackWorld(2).run(case)
    assert [steps for steps, _ in results] == [3, 3]
    if ALGORITHMS[name]().replicates_model:
        assert torch.equal(results[0][1], results[1][1])


def test_a_scaler_skips_the_step_on_all_ranks():
    """Infinities that one rank has are seen by all that average gradients."""

    def case():
        model, data = model_and_data()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        ddp = bf.DecentralizedDataParallel(
            model, optim_fn_for("bytegrad"), algorithm="bytegrad", scaler=scaler
        )
        before = vector(model).clone()
        bad = float("inf") if bf.rank() == 1 else 1.0
        scaler.scale(loss_of(ddp(data[0] * bad))).backward()
        assert torch.equal(vector(model), before)
        assert scaler.get_scale() == 2.0
        scaler.scale(loss_of(ddp(data[1]))).backward()
        assert not torch.equal(vector(model), before)
        return vector(model)

    assert torch.equal(*LoopbackWorld(2).run(case))


def test_windows_are_of_the_default_algorithm():
    """sync=False has its own remedy for others."""

    def case():
        model, _ = model_and_data()
        with pytest.raises(bf.ArgumentError, match=r"argument sync: .* in place of 'bytegrad'"):
            bf.DecentralizedDataParallel(
                model, optim_fn_for("bytegrad"), algorithm="bytegrad", sync=False
            )
        with pytest.raises(bf.UnknownNameError, match="unknown algorithm 'bytegard'"):
            bf.DecentralizedDataParallel(model, optim_fn_for("bytegrad"), algorithm="bytegard")

    LoopbackWorld(2).run(case)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "adapt_then_combine"])
def test_gradients_in_pieces(name, kind):
    """Backward passes inside of a pass change neither its gradients nor when the step is made."""

    def trained(nested):
        model = InPieces(kind, nested=nested)
        ddp = bf.DecentralizedDataParallel(
            model, optim_fn_for(name), algorithm=name, bucket_size_in_mb=1e-4
        )
        for step in range(STEPS):
            gradient_pieces.loss_of(ddp, bf.rank(), step).backward()
        return vector(model), ddp.steps

    whole = LoopbackWorld(3).run(trained, False)
    for (got, steps), (want, others) in zip(
        LoopbackWorld(3).run(trained, True), whole, strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
        assert steps == others == STEPS
